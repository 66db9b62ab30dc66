"""Every matrix product of tkv goes through `dot`, every rounding to a 16-bit dtype through `round_to`."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, TARGET: tl.constexpr):
    """acc + a @ b with float32 accumulation: IEEE for float32 operands, where Triton's default would be TF32."""
    if TARGET.INTERPRET:
        # The interpreter multiplies the raw bits of bf16 operands.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, DTYPE: tl.constexpr, TARGET: tl.constexpr):
    """float32 x in DTYPE, rounded to nearest even."""
    if TARGET.INTERPRET:
        if DTYPE == tl.bfloat16:
            # The interpreter truncates, and its subnormals are wrong: round and cut in integers.
            bits = x.to(tl.int32, bitcast=True)
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
            rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
            return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return x.to(DTYPE)
    else:
        return x.to(DTYPE)
