"""What ops hand to kernels: tensors with their strides, and the constants that a kernel is compiled for.

Fields in lower case are run-time values, fields in capitals belong to a NamedTuple that is passed as one ``tl.constexpr``.
Strides are in elements.
"""

from typing import Any, NamedTuple


class TokenStrides(NamedTuple):
    """Strides of a paged tensor ``[page, token, head, ...]``."""

    page: int
    token: int
    head: int


class Stored(NamedTuple):
    """One of K and V: its words (8- and 4-bit numbers in an int16), and its scales (with minima two to an int32) where there are any."""

    ptr: Any
    strides: TokenStrides
    scale_ptr: Any
    scale_strides: TokenStrides


class PagedKV(NamedTuple):
    """A layer's cache."""

    k: Stored
    v: Stored


class RowStrides(NamedTuple):
    """Strides of ``[seq, row, head, ...]``: queries, outputs and their LSE. Ragged ones, ``[token, head, ...]``, have no `seq`."""

    seq: int
    row: int
    head: int


class Results(NamedTuple):
    """Outputs ``[seq, row, head, dim]`` and their LSE ``[seq, row, head]``, or None."""

    out_ptr: Any
    out_strides: RowStrides
    lse_ptr: Any
    lse_strides: RowStrides


class Lengths(NamedTuple):
    """Of each sequence: number of keys; position of key 0 and of query row 0, or None for the defaults."""

    keys_ptr: Any
    kv_start_ptr: Any
    q_start_ptr: Any


class Level(NamedTuple):
    """What a program's sequence is in a cascade.

    members_ptr: the sequences of each group of a level, one after the other; group_lens_ptr, group_starts_ptr: keys of a group and
    the position of their first; cover_ptr: of each sequence the position up to which levels cover it, written by the levels from the
    outermost on and read by the call for the rest. All are None outside of a cascade.
    """

    members_ptr: Any
    group_lens_ptr: Any
    group_starts_ptr: Any
    cover_ptr: Any


class Tree(NamedTuple):
    """Tree attention among new tokens: which sees which, ``[seq, M, M]`` bytes, and their depths, ``[seq, M]``; or all None."""

    mask_ptr: Any
    strides: RowStrides
    depth_ptr: Any
    depth_stride: int


class Storage(NamedTuple):
    """How one of K and V is stored, and in what pieces kernels work on a row; see `tiles.pieces`.

    CODE: "native", or the dtype of a :class:`tkv.KVFormat`; SCALE: "none", or where its scale lives; GROUP: dims that share one, 0 if
    not in groups; ASYMMETRIC: each scale has a minimum beside it; FOLDED: attention multiplies codes and brings scales in outside of the
    products, else it multiplies decoded numbers;
    DIM: head_dim; PLANES: numbers in a word; RUNS: 1, or 2 where a row's words are cut in two; WIDTH, REST: words of each run, powers of
    two of at least 16 (REST 0 if there is none); ALIGN: every row starts at a multiple of so many words (16 at most) from the start of the
    tensor.
    """

    CODE: str
    SCALE: str
    GROUP: int
    ASYMMETRIC: bool
    FOLDED: bool
    DIM: int
    PLANES: int
    RUNS: int
    WIDTH: int
    REST: int
    ALIGN: int


class Target(NamedTuple):
    """What the kernel runs on.

    INTERPRET: Triton's interpreter, whose arithmetic is wrong on bf16; PORTABLE: no inline PTX; E4M3: PTX converts e4m3;
    FLUSHES: the matrix unit takes subnormal fp16 numbers for 0; FEW_REGISTERS: a tile hardly fits.
    """

    INTERPRET: bool
    PORTABLE: bool
    E4M3: bool
    FLUSHES: bool
    FEW_REGISTERS: bool


class Attend(NamedTuple):
    """What one inner loop of attention is compiled for.

    PAGE_SIZE, BLOCK_N: keys of a page (0: they are not paged) and of a tile; DTYPE, P_DTYPE: of the operands of q @ k and of p @ v;
    V_IS_K: V is the first run of K's words; LIFT: probabilities are times 2^LIFT; HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_TREE: options in
    use; HAS_PINNED: some keys are pinned; PARTS: 2 where sink tokens are attended to apart from other keys, else 1; ONE_POSITION: all rows
    of a program stand at one position.
    """

    PAGE_SIZE: int
    BLOCK_N: int
    DTYPE: Any
    P_DTYPE: Any
    V_IS_K: bool
    LIFT: int
    HAS_WINDOW: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_TREE: bool
    HAS_PINNED: bool
    PARTS: int
    ONE_POSITION: bool


class Limits(NamedTuple):
    """What limits scores and visibility; what is not in use is 0."""

    softcap: float
    window: int
    sinks: int
    pinned: int


class NewStrides(NamedTuple):
    """Strides of new keys or values, ``[token, head, ...]``."""

    token: int
    head: int


class Rows(NamedTuple):
    """Rows ``[token, head, ...]`` that are gathered, and their scales where they have any."""

    ptr: Any
    strides: NewStrides
    scale_ptr: Any
    scale_strides: NewStrides


class RopeTables(NamedTuple):
    """The tables of a :class:`tkv.Rope`, or None; strides of their rows."""

    cos_ptr: Any
    sin_ptr: Any
    cos_stride: int
    sin_stride: int
    num_rows: int


class Rotary(NamedTuple):
    """How vectors are rotated. DIM: so many of their first dims, 0 for none; INTERLEAVED: pairs are neighbours."""

    DIM: int
    INTERLEAVED: bool
