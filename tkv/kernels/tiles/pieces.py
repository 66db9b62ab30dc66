"""How a row lies in words, and the pieces of it that kernels work on.

A word of a native cache is the number itself. A word of an 8-bit cache is an int16 that holds dims 2w (low byte) and 2w + 1; one of
an int4 cache holds a dim of each quarter, nibble j being dim ``j * DIM/4 + w``. The numbers at one place in their words are a *plane*.
A row's words are one *run*, padded to a power of two, or two (576 = 512 + 64) where that is less. A *piece* is a plane of a run: q, the
output and a tile of K or V are tuples of pieces, and a product with K or V is one dot a piece. 16-bit words let tiles of 8 and 4 bits
be read from shared memory by 16-bit matrix loads.
"""

import triton
import triton.language as tl


@triton.jit
def run_words(RUN: tl.constexpr, STORAGE: tl.constexpr):
    """Words of a run; those of padding are DIM // PLANES or more."""
    if RUN == 0:
        return tl.arange(0, STORAGE.WIDTH)
    else:
        return STORAGE.WIDTH + tl.arange(0, STORAGE.REST)


@triton.jit
def piece_dims(PIECE: tl.constexpr, STORAGE: tl.constexpr):
    """(head dims of a piece, which of them exist), one a word."""
    words = run_words(PIECE // STORAGE.PLANES, STORAGE)
    PLANE: tl.constexpr = PIECE % STORAGE.PLANES
    if STORAGE.PLANES == 4:
        return PLANE * (STORAGE.DIM // 4) + words, words < STORAGE.DIM // 4
    else:
        return words * STORAGE.PLANES + PLANE, words < STORAGE.DIM // STORAGE.PLANES


@triton.jit
def zeros_of_run(BLOCK: tl.constexpr, RUN: tl.constexpr, STORAGE: tl.constexpr):
    """A piece [BLOCK, words] of zeros."""
    WORDS: tl.constexpr = STORAGE.REST if RUN else STORAGE.WIDTH
    return tl.zeros([BLOCK, WORDS], tl.float32)


@triton.jit
def zeros(BLOCK: tl.constexpr, STORAGE: tl.constexpr):
    """All pieces of BLOCK rows, zeros."""
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    PLANES: tl.constexpr = STORAGE.PLANES
    pieces = ()
    for piece in tl.static_range(PIECES):
        pieces = pieces + (zeros_of_run(BLOCK, piece // PLANES, STORAGE),)
    return pieces


@triton.jit
def natural(pieces, STORAGE: tl.constexpr):
    """Pieces with both planes of 8-bit words put together, so that head dims come in their order; quarters stay apart."""
    RUNS: tl.constexpr = STORAGE.RUNS
    if STORAGE.PLANES == 2:
        merged = ()
        for run in tl.static_range(RUNS):
            merged = merged + (tl.interleave(pieces[2 * run], pieces[2 * run + 1]),)
        return merged
    else:
        return pieces
