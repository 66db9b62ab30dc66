"""Stored numbers and floats: the only place that knows how a format encodes and decodes."""

import triton
import triton.language as tl

LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def round_even(x):
    """float32 |x| < 2^22 to the nearest integer, ties to even, as float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 to fp8 as uint8: nearest even, subnormals kept, saturating, NaN to NaN with its sign."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, tl.full([], LARGEST, tl.float32).to(tl.int32, bitcast=True))
    # Normal numbers: drop bits of the significand, then move the exponent's bias from 127.
    normal = ((magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below: multiples of 2^(1 - BIAS - MANTISSA). Next to `step` float32 has just that step, so the addition rounds.
    STEP: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    small = (magnitude.to(tl.float32, bitcast=True) + STEP).to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    code = tl.where(magnitude >= ((128 - BIAS) << 23), normal, small)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(x):
    """float32 to int8 as uint8: nearest even, saturating at +-127, NaN to 0."""
    x = tl.where(x == x, x, 0.0)
    return round_even(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def encode(x, STORAGE: tl.constexpr):
    """float32 in units of the scale, as the stored byte of a symmetric format."""
    if STORAGE.CODE == "fp8_e4m3":
        return encode_fp8(x, 3, 7, 448.0)
    elif STORAGE.CODE == "fp8_e5m2":
        return encode_fp8(x, 2, 15, 57344.0)
    else:
        tl.static_assert(STORAGE.CODE == "int8")
        return encode_int8(x)


@triton.jit
def largest_code(STORAGE: tl.constexpr):
    """The number that a row's largest magnitude, or its largest distance from the minimum, is mapped to."""
    if STORAGE.ASYMMETRIC:
        return 15.0 if STORAGE.CODE == "int4" else 255.0
    elif STORAGE.CODE == "fp8_e4m3":
        return 448.0
    elif STORAGE.CODE == "fp8_e5m2":
        return 57344.0
    else:
        return 127.0


@triton.jit
def encode_above(x, scale, minimum, STORAGE: tl.constexpr):
    """float32 as codes above a minimum, int32: nearest even, saturating; NaN is taken for 0."""
    x = tl.where(x == x, x, 0.0) - minimum
    steps = tl.div_rn(x, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))
    return round_even(tl.minimum(tl.maximum(steps, 0.0), largest_code(STORAGE))).to(tl.int32)


@triton.jit
def pair_for(low, high, STORAGE: tl.constexpr):
    """(scale, minimum) in float16 for numbers from `low` to `high`, such that no code decodes to more than float16 holds."""
    low = tl.minimum(tl.maximum(low, -LARGEST_HALF), LARGEST_HALF)
    high = tl.minimum(tl.maximum(high, -LARGEST_HALF), LARGEST_HALF)
    minimum = low.to(tl.float16)
    steps = tl.full(low.shape, largest_code(STORAGE), tl.float32)
    scale = tl.div_rn(high - low, steps).to(tl.float16)
    # From 65520 on float16 rounds to infinity.
    too_large = scale.to(tl.float32) * steps + minimum.to(tl.float32) >= 65520.0
    below = (scale.to(tl.int16, bitcast=True) - 1).to(tl.float16, bitcast=True)
    return tl.where(too_large, below, scale), minimum


@triton.jit
def join_pair(scale, minimum):
    """A float16 scale and its minimum as the int32 that holds both."""
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (minimum.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def split_pair(word):
    """(scale, minimum) in float16 of an int32 that holds both."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def pack(codes, STORAGE: tl.constexpr):
    """The stored element of codes, one a plane: a byte, or the 16-bit word of four nibbles."""
    if STORAGE.CODE == "int4":
        return (codes[0] | (codes[1] << 4) | (codes[2] << 8) | (codes[3] << 12)).to(tl.int16)
    elif STORAGE.ASYMMETRIC:
        return (codes[0] - 128).to(tl.uint8)
    else:
        return codes[0]


@triton.jit
def decode(words, PLANE: tl.constexpr, STORAGE: tl.constexpr):
    """Codes of a plane in float32, right for every one of them. Words are bytes, of int4 the 16-bit words."""
    if STORAGE.CODE == "int4":
        return ((words >> (4 * PLANE)) & 15).to(tl.float32)
    else:
        byte = words.to(tl.int16)
        if STORAGE.CODE == "fp8_e4m3":
            return tl.where((byte & 0x7F) == 0x7F, float("nan"), e4m3_bits(byte).to(tl.float32) * 256.0)
        elif STORAGE.CODE == "fp8_e5m2":
            return (byte << 8).to(tl.float16, bitcast=True).to(tl.float32)
        elif STORAGE.ASYMMETRIC:
            return (byte ^ 128).to(tl.float32)
        else:
            return ((byte << 8) >> 8).to(tl.float32)


@triton.jit
def decoded(codes, scale, minimum, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """``fp16(code * scale + minimum)``, rounded once, of float16 codes and scales; without the minimum in symmetric formats."""
    if TARGET.INTERPRET:
        numbers = codes.to(tl.float64) * scale.to(tl.float64)
        if STORAGE.ASYMMETRIC:
            numbers += minimum.to(tl.float64)
        return numbers.to(tl.float16)
    elif TARGET.PORTABLE:
        if STORAGE.ASYMMETRIC:
            return tl.fma(codes, tl.broadcast_to(scale, codes.shape), tl.broadcast_to(minimum, codes.shape))
        else:
            return codes * scale
    elif STORAGE.ASYMMETRIC:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [codes, scale, minimum], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [codes, scale], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def e4m3_bits(u):
    """A byte in an int16 as fp16, times 2^-8: exact for every finite code, also subnormals; the NaN codes give +-1.875."""
    return (((u & 0x80) << 8) | ((u & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def unpack_portable(words, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """The planes of 16-bit words in fp16, by integer arithmetic that every backend has."""
    if STORAGE.CODE == "fp8_e4m3":
        if TARGET.FLUSHES:
            # The numbers themselves are all normal in fp16.
            return (e4m3_bits(words) * 256.0, e4m3_bits(words >> 8) * 256.0)
        else:
            return (e4m3_bits(words), e4m3_bits(words >> 8))
    elif STORAGE.CODE == "fp8_e5m2":
        return ((words << 8).to(tl.float16, bitcast=True), (words & -256).to(tl.float16, bitcast=True))
    elif STORAGE.CODE == "int8":
        if STORAGE.ASYMMETRIC:
            return (((words & 255) ^ 128).to(tl.float16), (((words >> 8) & 255) ^ 128).to(tl.float16))
        else:
            return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16))
    else:
        return (
            (words & 15).to(tl.float16),
            ((words >> 4) & 15).to(tl.float16),
            ((words >> 8) & 15).to(tl.float16),
            ((words >> 12) & 15).to(tl.float16),
        )


@triton.jit
def unpack_packed(words, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """The planes of 16-bit words in fp16, two words to a 32-bit register."""
    if STORAGE.CODE == "int8":
        # With its sign bit flipped, byte b under 0x64 is the fp16 number 1024 + 128 + b.
        BIAS: tl.constexpr = "0x64006400" if STORAGE.ASYMMETRIC else "0x64806480"
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 flipped, low, high, bias;
            mov.b32 bias, """
            + BIAS
            + """;
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
    elif STORAGE.CODE == "fp8_e5m2":
        # A byte is the upper half of the fp16 number.
        return tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xff00ff00;
            }""",
            "=&r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif STORAGE.CODE == "int4":
        # Nibble c under 0x6400 is 1024 + c, and 4 bits higher 1024 + 16 c.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 upper, a, b, c, d, low, high, sixteenth;
            mov.b32 low, 0x64006400;
            mov.b32 high, 0xd400d400;
            mov.b32 sixteenth, 0x2c002c00;
            shr.u32 upper, $4, 8;
            lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 c, upper, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, upper, 0x00f000f0, 0x64006400, 0xea;
            sub.rn.f16x2 $0, a, low;
            fma.rn.f16x2 $1, b, sixteenth, high;
            sub.rn.f16x2 $2, c, low;
            fma.rn.f16x2 $3, d, sixteenth, high;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif TARGET.E4M3:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 sorted;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
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
def unpack(words, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """The planes of a tile of 16-bit words as codes in fp16: in units of the scale divided by `unit`."""
    if TARGET.PORTABLE:
        return unpack_portable(words, STORAGE, TARGET)
    else:
        return unpack_packed(words, STORAGE, TARGET)


@triton.jit
def unit(STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """What `unpack` leaves to be multiplied by: e4m3 decoded by its bits is 2^-8 of the number."""
    if STORAGE.CODE == "fp8_e4m3":
        return 1.0 if TARGET.FLUSHES or (TARGET.E4M3 and not TARGET.PORTABLE) else 256.0
    else:
        return 1.0
