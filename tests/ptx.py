"""The inline PTX of the codec, executed by NumPy: so that what only a GPU runs is compared with torch on a CPU, word for word."""

import re

import numpy as np
import torch
import triton.language as tl

_LANES = {"b16": np.uint16, "b32": np.uint32}


def _half(x):
    return np.ascontiguousarray(x).view(np.float16)


def _word(x):
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32)


def _bytes_of(*words):
    return np.stack([(word >> np.uint32(8 * i)) & np.uint32(255) for word in words for i in range(4)])


def _prmt(a, b, selector):
    """Each nibble of the selector picks one of the eight bytes of b and a; bit 3 would replicate a sign and is not used here."""
    choices, out = _bytes_of(a, b), np.zeros_like(a)
    for i in range(4):
        pick = (int(selector[0]) >> (4 * i)) & 15
        assert pick < 8
        out |= choices[pick] << np.uint32(8 * i)
    return out


def _lop3(a, b, c, table):
    """Bit i of the table is the result where (a, b, c) spells i in binary."""
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _e4m3x2(pair):
    codes = torch.from_numpy(np.stack([pair & 255, pair >> 8], -1).astype(np.uint8)).view(torch.float8_e4m3fn)
    return np.ascontiguousarray(codes.float().numpy().astype(np.float16)).view(np.uint32)[..., 0]


def _fma(a, b, c):
    return (_half(a).astype(np.float64) * _half(b).astype(np.float64) + _half(c).astype(np.float64)).astype(np.float16).view(np.uint32)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "sub.rn.f16x2": lambda a, b: _word(_half(a) - _half(b)),
    "mul.rn.f16x2": lambda a, b: _word(_half(a) * _half(b)),
    "fma.rn.f16x2": _fma,
    "cvt.rn.f16x2.e4m3x2": _e4m3x2,
}


def execute(text, inputs, num_outputs):
    """Run a block of PTX: `inputs` are uint32 arrays, the operands behind the outputs. Gives the outputs."""
    registers = {f"${num_outputs + i}": x for i, x in enumerate(inputs)}
    shape = inputs[0].shape
    for statement in re.sub(r"^\s*{|}\s*$", "", text.strip()).split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name, rest = statement.split(None, 1)
        if rest.startswith("{"):
            halves, source = re.fullmatch(r"{(.*)}, *(\S+)", rest).groups()
            for i, half in enumerate(halves.split(",")):
                registers[half.strip()] = (registers[source] >> np.uint32(16 * i)) & np.uint32(0xFFFF)
            continue
        out, *operands = [operand.strip() for operand in rest.split(",")]
        values = [registers[x] if x in registers else np.full(shape, int(x, 0), np.uint32) for x in operands]
        assert out.startswith("$") or out not in registers or name != "", out
        registers[out] = OPERATIONS[name](*values)
    return [registers[f"${i}"] for i in range(num_outputs)]


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack, **_):
    """`tl.inline_asm_elementwise` of 16-bit numbers, two to a register, in Triton's interpreter."""
    assert pack == 2 and is_pure
    asm, dtypes = str(getattr(asm, "value", asm)), dtype if isinstance(dtype, tuple) else (dtype,)
    tensors = [arg.handle.data for arg in args]
    shape = np.broadcast_shapes(*(x.shape for x in tensors))
    words = [np.ascontiguousarray(np.broadcast_to(x, shape)).reshape(-1).view(np.uint32) for x in tensors]
    # An output that is written before all inputs were read must not share a register with one of them.
    outputs = constraints.split(",")[: len(dtypes)]
    assert all("=" in output for output in outputs)
    results = execute(asm, words, len(dtypes))
    made = [_tensor_like(args[0], result.view(np.float16).reshape(shape), kind) for result, kind in zip(results, dtypes)]
    return tuple(made) if isinstance(dtype, tuple) else made[0]


def _tensor_like(tensor, data, dtype):
    handle = type(tensor.handle)(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(data.shape)))
