"""Stored numbers and floats: the only place that knows how a format encodes and decodes.

Attention reads words. A word of a native cache is the number itself; a word of an 8-bit cache is an int16 that holds dims 2w (low
byte) and 2w + 1. The numbers at one place in their words are a *plane*: q and the output are split in the same way, and a product
with K or V is one dot a plane. 16-bit words let 8-bit tiles be read from shared memory by 16-bit matrix loads.
"""

import triton
import triton.language as tl


@triton.jit
def plane_dims(PLANE: tl.constexpr, STORAGE: tl.constexpr):
    """Head dims of a plane, [WIDTH]; those of padding words are DIM or more."""
    return tl.arange(0, STORAGE.WIDTH) * STORAGE.PLANES + PLANE


@triton.jit
def natural(planes, STORAGE: tl.constexpr):
    """Planes [BLOCK, WIDTH] as one tile [BLOCK, WIDTH * PLANES] with the head dims in their order."""
    if STORAGE.PLANES == 1:
        return planes[0]
    else:
        return tl.interleave(planes[0], planes[1])


@triton.jit
def round_even(x):
    """float32 |x| < 2^22 to the nearest integer, ties to even, as float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_e4m3(x):
    """float32 to e4m3 as uint8: nearest even, subnormals kept, saturating at 448, NaN to NaN with its sign."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448.0
    # From 2^-6 on: drop 20 bits of the significand, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below: a multiple of 2^-9. Next to 2^14 float32 has just that step, so the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude >= 0x3C800000, normal, small)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(x):
    """float32 to int8 as uint8: nearest even, saturating at +-127, NaN to 0."""
    x = tl.where(x == x, x, 0.0)
    return round_even(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def encode(x, STORAGE: tl.constexpr):
    """float32 in units of the scale, as the stored byte."""
    if STORAGE.CODE == "fp8_e4m3":
        return encode_e4m3(x)
    else:
        tl.static_assert(STORAGE.CODE == "int8")
        return encode_int8(x)


@triton.jit
def largest_code(STORAGE: tl.constexpr):
    """The number that a row's largest magnitude is mapped to."""
    return 448.0 if STORAGE.CODE == "fp8_e4m3" else 127.0


@triton.jit
def e4m3_bits(u):
    """A byte in an int16 as fp16, times 2^-8: exact for every finite code, also subnormals; the NaN codes give +-1.875."""
    return (((u & 0x80) << 8) | ((u & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def unpack_portable(words, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """The two planes of 8-bit words in fp16, by integer arithmetic that every backend has."""
    if STORAGE.CODE == "fp8_e4m3":
        if TARGET.FLUSHES:
            # The numbers themselves are all normal in fp16.
            return (e4m3_bits(words) * 256.0, e4m3_bits(words >> 8) * 256.0)
        else:
            return (e4m3_bits(words), e4m3_bits(words >> 8))
    else:
        return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16))


@triton.jit
def unpack_packed(words, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """The two planes of 8-bit words in fp16, two words to a 32-bit register."""
    if STORAGE.CODE == "int8":
        # With its sign bit flipped, byte b under 0x64 is the fp16 number 1024 + 128 + b.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 flipped, low, high, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 flipped, $2, 0x80808080;
            prmt.b32 low, flipped, 0x64646464, 0x4240;
            prmt.b32 high, flipped, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, low, bias;
            sub.rn.f16x2 $1, high, bias;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif TARGET.E4M3:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 a, b;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, second;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, magnitude;
            shl.b32 sign, $2, 8;
            shl.b32 magnitude, $2, 7;
            and.b32 magnitude, magnitude, 0x3f803f80;
            lop3.b32 $0, sign, 0x80008000, magnitude, 0xea;
            shr.u32 magnitude, $2, 1;
            and.b32 magnitude, magnitude, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, magnitude, 0xea;
            }""",
            "=&r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack(words, DTYPE: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """The planes of a tile of words in DTYPE, in units of the scale divided by `unit`."""
    if STORAGE.PLANES == 1:
        return (words.to(DTYPE),)
    else:
        if TARGET.PORTABLE:
            low, high = unpack_portable(words, STORAGE, TARGET)
        else:
            low, high = unpack_packed(words, STORAGE, TARGET)
        return (low.to(DTYPE), high.to(DTYPE))


@triton.jit
def unit(STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """What `unpack` leaves to be multiplied by: e4m3 decoded by its bits is 2^-8 of the number."""
    if STORAGE.CODE == "fp8_e4m3":
        return 1.0 if TARGET.FLUSHES or (TARGET.E4M3 and not TARGET.PORTABLE) else 256.0
    else:
        return 1.0
