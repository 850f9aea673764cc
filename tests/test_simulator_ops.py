from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import apply, kernel, run_text

from workbench.simulator.ops import UnknownInstructionError, find

SIZE = 256
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {"f16": np.float16, "bf16": BFLOAT16, "f32": np.float32, "f64": np.float64}


def integers(kind: str, seed: int = 0) -> np.ndarray:
    """Random numbers of every length, and the ends of the range."""
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    rng, limits = np.random.default_rng(seed), np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, SIZE, dtype, endpoint=True)
    values >>= rng.integers(0, dtype.itemsize * 8, SIZE).astype(dtype)
    ends = [0, 1, 2, limits.max, limits.max - 1, limits.min, limits.min + 1, 31, 32, 33]
    for i, end in zip(rng.choice(SIZE, len(ends), replace=False), ends, strict=True):
        values[i] = end
    return values


def floats(kind: str, seed: int = 0) -> np.ndarray:
    """Random numbers of every size, and the special ones."""
    dtype = np.dtype(FLOATS[kind])
    rng, limits = np.random.default_rng(seed), ml_dtypes.finfo(dtype)
    with np.errstate(over="ignore", under="ignore"):
        values = (rng.standard_normal(SIZE) * 2.0 ** rng.integers(-8, 8, SIZE)).astype(dtype)
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.5, -1.5]
        special += [float(limits.max), float(limits.smallest_normal), float(limits.tiny) / 2]
        values[: len(special)] = rng.permutation(special).astype(dtype)
    return values


def same(got: np.ndarray, want: np.ndarray, note: str = "") -> None:
    """Equal to the last bit, signs of zeros included; NaN may have any bits."""
    want = np.asarray(want).astype(got.dtype)
    bits = f"u{got.dtype.itemsize}"
    equal = got.view(bits) == want.view(bits)
    if got.dtype.kind in "fV":
        equal |= np.isnan(got) & np.isnan(want)
    assert equal.all(), f"{note}[{np.argmin(equal)}]: {got[~equal][:3]}, not {want[~equal][:3]}"


# ------------------------------------------------------------------------- integer arithmetic


def wrap(value: int, kind: str) -> int:
    """A whole number as the type holds it."""
    width = int(kind[1:])
    value %= 1 << width
    return value - (1 << width) if kind[0] == "s" and value >> (width - 1) else value


def divided(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bits_of(value: int, kind: str) -> int:
    return value % (1 << int(kind[1:]))


INTEGER: dict[str, tuple[str, Callable[..., int]]] = {
    # template of the opcode: types, function of Python's whole numbers
    "add.{}": ("s16 u16 s32 u32 s64 u64", lambda a, b: a + b),
    "sub.{}": ("s16 u16 s32 u32 s64 u64", lambda a, b: a - b),
    "mul.lo.{}": ("s16 u16 s32 u32 s64 u64", lambda a, b: a * b),
    "min.{}": ("s16 u16 s32 u32 s64 u64", min),
    "max.{}": ("s16 u16 s32 u32 s64 u64", max),
    "and.{}": ("b16 b32 b64", lambda a, b: a & b),
    "or.{}": ("b16 b32 b64", lambda a, b: a | b),
    "xor.{}": ("b16 b32 b64", lambda a, b: a ^ b),
}


@pytest.mark.parametrize("opcode", INTEGER)
def test_whole_numbers(opcode: str) -> None:
    kinds, function = INTEGER[opcode]
    for kind in kinds.split():
        number = kind.replace("b", "u")
        a, b = integers(number, 1), integers(number, 2)
        want = [wrap(function(int(x), int(y)), number) for x, y in zip(a, b, strict=True)]
        same(apply(opcode.format(kind), (a, b), a.dtype), np.array(want, a.dtype), kind)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_products_and_quotients(kind: str) -> None:
    a, b = integers(kind, 1), integers(kind, 2)
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    width = int(kind[1:])
    high = [wrap(x * y >> width, kind) for x, y in pairs]
    same(apply(f"mul.hi.{kind}", (a, b), a.dtype), np.array(high, a.dtype))
    if width < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        same(apply(f"mul.wide.{kind}", (a, b), wide), np.array([x * y for x, y in pairs], wide))
        c = integers(f"{kind[0]}{2 * width}", 3)
        total = [wrap(x * y + int(z), f"{kind[0]}{2 * width}") for (x, y), z in zip(pairs, c)]  # noqa: B905
        same(apply(f"mad.wide.{kind}", (a, b, c), wide), np.array(total, wide))
    c = integers(kind, 3)
    total = [wrap(x * y + int(z), kind) for (x, y), z in zip(pairs, c, strict=True)]
    same(apply(f"mad.lo.{kind}", (a, b, c), a.dtype), np.array(total, a.dtype))
    total = [wrap(h + int(z), kind) for h, z in zip(high, c, strict=True)]
    same(apply(f"mad.hi.{kind}", (a, b, c), a.dtype), np.array(total, a.dtype))
    total = [wrap(abs(x - y) + int(z), kind) for (x, y), z in zip(pairs, c, strict=True)]
    same(apply(f"sad.{kind}", (a, b, c), a.dtype), np.array(total, a.dtype))
    b[b == 0] = 3
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    quotients = [wrap(divided(x, y), kind) for x, y in pairs]
    same(apply(f"div.{kind}", (a, b), a.dtype), np.array(quotients, a.dtype))
    rests = [wrap(x - divided(x, y) * y, kind) for x, y in pairs]
    same(apply(f"rem.{kind}", (a, b), a.dtype), np.array(rests, a.dtype))


def test_products_of_24_bits() -> None:
    for kind in ("s32", "u32"):
        a, b = integers(kind, 1), integers(kind, 2)
        low = [wrap(int(x) & 0xFFFFFF, "u32") for x in a], [int(y) & 0xFFFFFF for y in b]
        if kind == "s32":
            low = tuple([x - (x >> 23 << 24) for x in part] for part in low)
        want = [wrap(x * y, kind) for x, y in zip(*low, strict=True)]
        same(apply(f"mul24.lo.{kind}", (a, b), a.dtype), np.array(want, a.dtype))


def test_saturated_sums() -> None:
    a, b = integers("s32", 1), integers("s32", 2)
    want = np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1)
    same(apply("add.sat.s32", (a, b), np.int32), want)


def test_carries_through_two_words() -> None:
    a, b, c, d = (integers("u32", seed) for seed in range(4))
    low = apply("add.cc.u32", (a, b), np.uint32)
    same(low, (a.astype(np.uint64) + b) & 0xFFFFFFFF)
    first, second = (x.astype(np.uint64) | y.astype(np.uint64) << 32 for x, y in ((a, c), (b, d)))
    for op, want in (("add", first + second), ("sub", first - second)):
        # Operands become %r20 to %r23; the first instruction leaves the carry.
        opcode = f"{op}.cc.u32 %r5, %r20, %r21; {op}c.u32"
        high = apply(opcode, (a, b, c, d), np.uint32, shown=(2, 3))
        same(high, want >> 32)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_shifts(kind: str) -> None:
    width = int(kind[1:])
    counts = np.random.default_rng(3).integers(0, 2 * width, SIZE).astype(np.uint32)
    counts[:6] = [0, 1, width - 1, width, width + 1, 0xFFFFFFFF]
    for signed in (False, True):
        number = f"{'s' if signed else 'u'}{width}"
        a = integers(number, 1)
        right = [int(x) >> min(int(n), width) for x, n in zip(a, counts, strict=True)]
        right = [wrap(x, number) if x >= 0 or signed else 0 for x in right]
        same(apply(f"shr.{number}", (a, counts), a.dtype), np.array(right, a.dtype))
    left = [wrap(int(x) << min(int(n), width), number) for x, n in zip(a, counts, strict=True)]
    same(apply(f"shl.{kind}", (a, counts), a.dtype), np.array(left, a.dtype))


def test_funnel_shifts() -> None:
    low, high = integers("u32", 1), integers("u32", 2)
    counts = np.random.default_rng(3).integers(0, 70, SIZE).astype(np.uint32)
    for mode in ("wrap", "clamp"):
        numbers = [int(n) % 32 if mode == "wrap" else min(int(n), 32) for n in counts]
        words = [int(h) << 32 | int(x) for h, x in zip(high, low, strict=True)]
        left = [(w << n >> 32) & 0xFFFFFFFF for w, n in zip(words, numbers, strict=True)]
        right = [w >> n & 0xFFFFFFFF for w, n in zip(words, numbers, strict=True)]
        same(apply(f"shf.l.{mode}.b32", (low, high, counts), np.uint32), np.array(left))
        same(apply(f"shf.r.{mode}.b32", (low, high, counts), np.uint32), np.array(right))


@pytest.mark.parametrize("width", [32, 64])
def test_counting_bits(width: int) -> None:
    a = integers(f"u{width}", 1)
    numbers = [int(x) for x in a]
    same(apply(f"popc.b{width}", (a,), np.uint32), np.array([x.bit_count() for x in numbers]))
    leading = np.array([width - x.bit_length() for x in numbers])
    same(apply(f"clz.b{width}", (a,), np.uint32), leading)
    found = np.array([(x.bit_length() - 1) % 2**32 for x in numbers])
    same(apply(f"bfind.u{width}", (a,), np.uint32), found)
    signed = a.view(f"i{width // 8}")
    highest = [(x if x >= 0 else ~x).bit_length() - 1 for x in signed.tolist()]
    same(apply(f"bfind.s{width}", (signed,), np.uint32), np.array(highest) % 2**32)
    turned = [int(f"{x:0{width}b}"[::-1], 2) for x in numbers]
    same(apply(f"brev.b{width}", (a,), a.dtype), np.array(turned, a.dtype))
    same(apply(f"not.b{width}", (a,), a.dtype), ~a)
    same(apply(f"cnot.b{width}", (a,), a.dtype), a == 0)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    width = int(kind[1:])
    a, b = integers(kind, 1), integers(f"u{width}", 2)
    rng = np.random.default_rng(5)
    position, length = (rng.integers(0, width + 4, SIZE).astype(np.uint32) for _ in range(2))
    want = []
    for x, p, n in zip(a, position, length, strict=True):
        taken = [bits_of(int(x), kind) >> min(int(p) + i, width - 1) & 1 for i in range(int(n))]
        inside = [bit if int(p) + i < width else 0 for i, bit in enumerate(taken)]
        if kind[0] == "s":  # beyond the number lie copies of its sign
            inside = taken
        field = sum(bit << i for i, bit in enumerate(inside[:width]))
        if kind[0] == "s" and n > 0 and taken[-1]:
            field |= -1 << min(int(n), width)
        want.append(wrap(field, kind))
    same(apply(f"bfe.{kind}", (a, position, length), a.dtype), np.array(want, a.dtype), "bfe")
    want = []
    for x, y, p, n in zip(a, b, position, length, strict=True):
        mask = ((1 << int(n)) - 1) << int(p) & ((1 << width) - 1)
        want.append(int(y) & ~mask | bits_of(int(x), kind) << int(p) & mask)
    got = apply(f"bfi.b{width}", (a.view(b.dtype), b, position, length), b.dtype)
    same(got, np.array(want, b.dtype), "bfi")


def test_permutes_and_tables() -> None:
    a, b, c = (integers("u32", seed) for seed in range(3))
    want = []
    for x, y, selector in zip(a, b, c, strict=True):
        pool = [int(x) >> 8 * i & 255 for i in range(4)] + [int(y) >> 8 * i & 255 for i in range(4)]
        word = 0
        for i in range(4):
            choice = int(selector) >> 4 * i & 15
            byte = pool[choice & 7]
            word |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
        want.append(word)
    same(apply("prmt.b32", (a, b, c), np.uint32), np.array(want))
    for table, function in ((0x96, a ^ b ^ c), (0xE8, a & b | a & c | b & c), (0x1B, None)):
        got = apply("lop3.b32", (a, b, c, table), np.uint32)
        if function is None:
            function = sum(
                (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
                for i in range(32)
            )
        same(got, function)
    signed, unsigned = integers("s32", 1), integers("u32", 2)
    dot = []
    for x, y in zip(signed, unsigned, strict=True):
        parts = (wrap(int(x) >> 8 * i, "s8") * bits_of(int(y) >> 8 * i, "u8") for i in range(4))
        dot.append(wrap(sum(parts) + 7, "s32"))
    same(apply("dp4a.s32.u32", (signed, unsigned, 7), np.int32), np.array(dot, np.int32))


# -------------------------------------------------------------------------------------- floats


@pytest.mark.parametrize("kind", FLOATS)
def test_sums_and_products(kind: str) -> None:
    a, b = floats(kind, 1), floats(kind, 2)
    with np.errstate(all="ignore"):
        wide = (a.astype(np.float64), b.astype(np.float64))
        for name, value in (("add", wide[0] + wide[1]), ("sub", wide[0] - wide[1]),
                            ("mul", wide[0] * wide[1])):  # fmt: skip
            rounding = ".rn" if kind != "f32" else ""
            same(apply(f"{name}{rounding}.{kind}", (a, b), a.dtype), value.astype(a.dtype), name)
    same(apply(f"neg.{kind}", (a,), a.dtype), -a)
    same(apply(f"abs.{kind}", (a,), a.dtype), abs(a))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # next to the largest number is infinity
def test_a_multiply_add_is_rounded_once(kind: str) -> None:
    a, b = floats(kind, 1), floats(kind, 2)
    with np.errstate(all="ignore"):  # half of them cancel to what was rounded off
        c = np.where(np.arange(SIZE) % 2, floats(kind, 3), -a * b)
    got = apply(f"fma.rn.{kind}", (a, b, c), a.dtype)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        if not all(map(math.isfinite, map(float, (x, y, z, r)))):
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(r)) - exact)
        infinity = r.dtype.type(np.inf)
        for neighbour in (np.nextafter(r, infinity), np.nextafter(r, -infinity)):
            if math.isfinite(float(neighbour)):
                assert error <= abs(Fraction(float(neighbour)) - exact), (x, y, z, r)
    with np.errstate(all="ignore"):
        special = ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c)
        same(got[special], (a * b + c)[special])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_alone_and_in_pairs(kind: str) -> None:
    a, b, c = (floats(kind, seed) for seed in range(3))
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        want = {"fma.rn": exact, "add.rn": a.astype(np.float64) + b.astype(np.float64)}
    for name, value in want.items():
        operands = (a, b, c) if name == "fma.rn" else (a, b)
        with np.errstate(all="ignore"):
            value = value.astype(a.dtype)
        same(apply(f"{name}.{kind}", operands, a.dtype), value, name)
        words = tuple(x.view(np.uint32) for x in operands)
        got = apply(f"{name}.{kind}x2", words, np.uint32).view(a.dtype)
        same(got, value, f"{name} x2")


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_quotients_and_roots(kind: str) -> None:
    a, b = floats(kind, 1), floats(kind, 2)
    with np.errstate(all="ignore"):
        same(apply(f"div.rn.{kind}", (a, b), a.dtype), a / b)
        same(apply(f"sqrt.rn.{kind}", (a,), a.dtype), np.sqrt(a))
        same(apply(f"rcp.rn.{kind}", (a,), a.dtype), 1 / a)


APPROXIMATE: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations(name: str) -> None:
    a = floats("f32", 1)
    with np.errstate(all="ignore"):
        want = APPROXIMATE[name](a.astype(np.float64))
        got = apply(f"{name}.approx.f32", (a,), np.float32).astype(np.float64)
        close = np.isclose(got, want.astype(np.float32), rtol=1e-6, atol=0, equal_nan=True)
    assert close.all(), (a[~close], got[~close], want[~close])


def test_approximations_in_double_keep_the_upper_word() -> None:
    a = floats("f64", 1)
    got = apply("rcp.approx.ftz.f64", (a,), np.float64)
    assert not (got.view(np.uint64) & 0xFFFFFFFF)[~np.isnan(got)].any()
    normal = np.isfinite(a) & (abs(a) > 1e-300) & (abs(a) < 1e300)
    np.testing.assert_allclose(got[normal], 1 / a[normal], rtol=2**-19)


def test_literals() -> None:
    a = floats("f32", 1)
    with np.errstate(all="ignore"):
        same(apply("add.f32", (a, "0f40490FDB"), np.float32), a + np.float32(np.pi))
        same(apply("add.f32", (a, "2.5"), np.float32), a + np.float32(2.5))
    half = floats("f16", 1)
    with np.errstate(all="ignore"):  # of 16-bit floats, a literal gives the bits
        same(apply("add.rn.f16", (half, "0x3C00"), np.float16), half + np.float16(1))
    b = integers("s32", 1)
    same(apply("add.s32", (b, -5), np.int32), b - np.int32(5))
    same(apply("and.b32", (b, "0xFFFF0000U"), np.int32), b & np.int32(-65536))


def test_flushing() -> None:
    tiny = np.float32(2.0**-126)
    a = np.array([tiny, tiny / 2, -tiny / 2, 2.0**-100, 1.0, -0.0, np.nan, -np.inf], np.float32)
    b = np.full(8, 0.5, np.float32)
    want = np.array([0, 0, -0.0, 2.0**-101, 0.5, -0.0, np.nan, -np.inf], np.float32)
    same(apply("mul.ftz.f32", (a, b), np.float32), want)
    kept = np.array([tiny / 2, tiny / 4, -tiny / 4, 2.0**-101], np.float32)
    same(apply("mul.f32", (a, b), np.float32)[:4], kept)
    small = np.array([-126.0, -127.0, -149.0, 0.0], np.float32)
    want = np.array([tiny, 0, 0, 1], np.float32)
    same(apply("ex2.approx.ftz.f32", (small,), np.float32), want)


def test_saturation() -> None:
    a = np.array([-1, -0.0, 0.25, 1, 2, np.inf, -np.inf, np.nan], np.float32)
    zero = np.zeros(8, np.float32)
    want = np.array([0, 0, 0.25, 1, 1, 1, 0, 0], np.float32)
    np.testing.assert_array_equal(apply("add.sat.f32", (a, zero), np.float32), want)


@pytest.mark.parametrize("kind", FLOATS)
def test_extremes_of_floats(kind: str) -> None:
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0], FLOATS[kind])
    a, b = np.repeat(values, 8), np.tile(values, 8)
    for name, pick in (("min", min), ("max", max)):
        want, loud = [], []
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            key = lambda v: (v, math.copysign(1, v))  # noqa: E731
            both = [v for v in (x, y) if not math.isnan(v)]
            want.append(pick(both, key=key) if both else math.nan)
            loud.append(want[-1] if len(both) == 2 else math.nan)
        same(apply(f"{name}.{kind}", (a, b), a.dtype), np.array(want, a.dtype), name)
        same(apply(f"{name}.NaN.{kind}", (a, b), a.dtype), np.array(loud, a.dtype), name)


def test_signs_and_kinds_of_floats() -> None:
    a, b = floats("f32", 1), floats("f32", 2)
    same(apply("copysign.f32", (a, b), np.float32), np.copysign(b, a))
    tiny = np.finfo(np.float32).smallest_normal
    with np.errstate(invalid="ignore"):
        tests = {
            "finite": np.isfinite(a), "infinite": np.isinf(a), "number": ~np.isnan(a),
            "notanumber": np.isnan(a), "subnormal": (a != 0) & (abs(a) < tiny),
            "normal": np.isfinite(a) & (abs(a) >= tiny),
        }  # fmt: skip
    for name, want in tests.items():
        np.testing.assert_array_equal(apply(f"testp.{name}.f32", (a,), bool), want, name)


# ------------------------------------------------------------------------- compare and select


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u64", "f16", "bf16", "f32", "f64"])
def test_comparisons(kind: str) -> None:
    make = floats if kind in FLOATS else integers
    a, b = make(kind, 1), make(kind, 2)
    b[::3] = a[::3]
    relations: dict[str, Callable[[Any, Any], bool]] = {
        "eq": lambda x, y: x == y, "ne": lambda x, y: x < y or x > y,
        "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    }  # fmt: skip
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    for name, relation in relations.items():
        want = np.array([relation(x, y) for x, y in pairs])
        np.testing.assert_array_equal(apply(f"setp.{name}.{kind}", (a, b), bool), want, name)
        if kind in FLOATS:
            unordered = np.array([math.isnan(x) or math.isnan(y) for x, y in pairs])
            got = apply(f"setp.{name}u.{kind}", (a, b), bool)
            np.testing.assert_array_equal(got, want | unordered, f"{name}u")
    if kind in FLOATS:
        np.testing.assert_array_equal(apply(f"setp.nan.{kind}", (a, b), bool), unordered)
        np.testing.assert_array_equal(apply(f"setp.num.{kind}", (a, b), bool), ~unordered)
    if kind[0] == "u":
        for name, relation in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            got, want = apply(f"setp.{name}.{kind}", (a, b), bool), relations[relation]
            np.testing.assert_array_equal(got, [want(x, y) for x, y in pairs])


def test_combined_predicates() -> None:
    a, b = integers("s32", 1), integers("s32", 2)
    c = np.random.default_rng(0).random(SIZE) < 0.5
    for name, combine in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        got = apply(f"setp.lt.{name}.s32", (a, b, c), bool)
        np.testing.assert_array_equal(got, combine(a < b, c))
        np.testing.assert_array_equal(
            apply(f"{name}.pred", (c, c[::-1].copy()), bool), combine(c, c[::-1])
        )
    np.testing.assert_array_equal(apply("not.pred", (c,), bool), ~c)
    same(apply("selp.b32", (a, b, c), np.int32), np.where(c, a, b))
    same(apply("slct.s32.s32", (a, b, a), np.int32), np.where(a >= 0, a, b))
    same(apply("set.lt.u32.s32", (a, b), np.uint32), np.where(a < b, 0xFFFFFFFF, 0))
    same(apply("set.lt.f32.s32", (a, b), np.float32), np.where(a < b, 1.0, 0.0))


# -------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversions_of_whole_numbers(source: str) -> None:
    a = integers(source, 1)
    for target in ("s16", "u16", "s32", "u32", "s64", "u64"):
        dtype = np.dtype(f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}")
        want = np.array([wrap(int(x), target) for x in a], dtype)
        same(apply(f"cvt.{target}.{source}", (a,), dtype), want, target)
        limits = np.iinfo(dtype)
        want = np.array([min(max(int(x), limits.min), limits.max) for x in a], dtype)
        same(apply(f"cvt.sat.{target}.{source}", (a,), dtype), want, f"sat {target}")
    for target in ("f32", "f64"):
        dtype = np.dtype(FLOATS[target])
        for x, y in zip(a, apply(f"cvt.rn.{target}.{source}", (a,), dtype), strict=True):
            error = abs(Fraction(float(y)) - int(x))
            assert error <= abs(Fraction(float(np.nextafter(y, dtype.type(0)))) - int(x))


@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
def test_floats_to_whole_numbers(source: str) -> None:
    a = floats(source, 1)
    a[-6:] = np.array([2.5, -2.5, 3.5, 1e4, -1e4, 65504], a.dtype)
    roundings = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for target in ("s32", "u32", "s64", "u64"):
        dtype = np.dtype(f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}")
        limits = np.iinfo(dtype)
        for mode, rounding in roundings.items():
            want = []
            for x in a.tolist():
                if math.isnan(x):
                    want.append(0)
                elif math.isinf(x):
                    want.append(limits.max if x > 0 else limits.min)
                else:
                    want.append(min(max(rounding(x), limits.min), limits.max))
            got = apply(f"cvt.{mode}.{target}.{source}", (a,), dtype)
            same(got, np.array(want, dtype), f"{mode} {target}")


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_rounding_in_place(mode: str) -> None:
    a = floats("f32", 1)
    want = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](a)
    same(apply(f"cvt.{mode}.f32.f32", (a,), np.float32), want)


NARROWINGS = [("f32", "f64"), ("f16", "f32"), ("bf16", "f32"), ("f16", "f64")]


@pytest.mark.parametrize(("target", "source"), NARROWINGS)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # next to the largest number is infinity
def test_narrower_floats(target: str, source: str, mode: str) -> None:
    a = floats(source, 1)
    dtype = np.dtype(FLOATS[target])
    got = apply(f"cvt.{mode}.{target}.{source}", (a,), dtype)
    down, up = dtype.type(-np.inf), dtype.type(np.inf)
    for x, y in zip(a.tolist(), got, strict=True):
        if math.isnan(x):
            assert np.isnan(y)
        elif math.isinf(x):
            assert float(y) == x
        elif np.isfinite(y):
            below, above = float(np.nextafter(y, down)), float(np.nextafter(y, up))
            if mode == "rn":
                error = abs(Fraction(float(y)) - Fraction(x))
                for other in (below, above):
                    assert math.isinf(other) or error <= abs(Fraction(other) - Fraction(x))
            elif mode == "rm" or (mode == "rz" and x > 0):
                assert float(y) <= x < above or x == y
            else:
                assert below < x <= float(y) or x == y


@pytest.mark.parametrize(("target", "source"), [(b, a) for a, b in NARROWINGS])
def test_wider_floats(target: str, source: str) -> None:
    a = floats(source, 1)
    same(apply(f"cvt.{target}.{source}", (a,), FLOATS[target]), a.astype(FLOATS[target]))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_of_halves(kind: str) -> None:
    high, low = floats("f32", 1), floats("f32", 2)
    got = apply(f"cvt.rn.{kind}x2.f32", (high, low), np.uint32).view(FLOATS[kind]).reshape(-1, 2)
    with np.errstate(over="ignore"):
        same(got[:, 0].copy(), low.astype(FLOATS[kind]))
        same(got[:, 1].copy(), high.astype(FLOATS[kind]))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_rounding_in_a_direction(mode: str, kind: str) -> None:
    """The neighbour of the exact result on the right side, for every operation that has it."""
    a, b, c = (floats(kind, seed) for seed in range(3))
    c[-8:] = -a[-8:] * b[-8:]
    b[:32] = -a[:32]
    a[-4:], b[-4:] = a[-4:] * a.dtype.type(2.0**-100), b[-4:] * a.dtype.type(2.0**-100)
    operations: dict[str, tuple[Any, Callable[..., Fraction]]] = {
        "add": ((a, b), lambda x, y: x + y), "sub": ((a, -b), lambda x, y: x - y),
        "mul": ((a, b), lambda x, y: x * y), "fma": ((a, b, c), lambda x, y, z: x * y + z),
        "div": ((a, b), lambda x, y: x / y), "rcp": ((a,), lambda x: 1 / x),
    }  # fmt: skip
    for name, (values, exact) in operations.items():
        got = apply(f"{name}.{mode}.{kind}", values, a.dtype)
        for *x, y in zip(*values, got, strict=True):
            numbers = [float(v) for v in x]
            if not all(map(math.isfinite, numbers)) or (name in ("div", "rcp") and not x[-1]):
                continue
            want = exact(*map(Fraction, numbers))
            check_direction(want, y, mode)
            if want == 0 and name == "add" and numbers[0] != 0:
                assert math.copysign(1, y) == (-1 if mode == "rm" else 1)
    got = apply(f"sqrt.{mode}.{kind}", (np.abs(a),), a.dtype)
    for x, y in zip(np.abs(a), got, strict=True):
        if np.isfinite(x) and x > 0:
            square, up = Fraction(float(y)) ** 2, Fraction(float(np.nextafter(y, y * 2))) ** 2
            low = Fraction(float(np.nextafter(y, y / 2))) ** 2
            number = Fraction(float(x))
            assert low < number <= square if mode == "rp" else square <= number < up


def check_direction(want: Fraction, got: Any, mode: str) -> None:
    """Whether `got` is the neighbour of the exact number in the direction of a rounding."""
    down = mode == "rm" or (mode == "rz" and want > 0)
    dtype = got.dtype
    with np.errstate(over="ignore"):
        below, above = (float(np.nextafter(got, dtype.type(x))) for x in (-np.inf, np.inf))
    if np.isinf(got):
        largest = Fraction(float(np.finfo(dtype).max))
        assert (got > 0 and want > largest and not down) or (got < 0 and want < -largest and down)
    elif down:
        assert Fraction(float(got)) <= want
        assert math.isinf(above) or want < Fraction(above)
    else:
        assert want <= Fraction(float(got))
        assert math.isinf(below) or Fraction(below) < want


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_whole_numbers_rounded_in_a_direction(source: str, mode: str) -> None:
    a = integers(source, 1)
    for target in ("f32", "f64"):
        got = apply(f"cvt.{mode}.{target}.{source}", (a,), FLOATS[target])
        for x, y in zip(a.tolist(), got, strict=True):
            check_direction(Fraction(x), y, mode)


# Two factors in %x1 and %x2, their rounded product in %x3; what becomes of these lines: 1 and -1
# stand for the rounding error of the product, which only a multiply-add can leave.
CONTRACTED = {
    "product first": ("mul.T %x4, %x1, %x2; sub.T %x5, %x4, %x3;", 1),
    "product second": ("mul.T %x4, %x1, %x2; sub.T %x5, %x3, %x4;", -1),
    "sum": ("neg.T %x6, %x3; mul.T %x4, %x1, %x2; add.T %x5, %x6, %x4;", 1),
    "rounded product": ("mul.rn.T %x4, %x1, %x2; sub.T %x5, %x4, %x3;", 0),
    "rounded sum": ("mul.T %x4, %x1, %x2; sub.rn.T %x5, %x4, %x3;", 0),
    "used twice": ("mul.T %x4, %x1, %x2; mov.T %x6, %x4; sub.T %x5, %x4, %x3;", 0),
    "a factor that changes": ("mul.T %x4, %x1, %x2; mov.T %x1, %x3; sub.T %x5, %x4, %x3;", 0),
    "another basic block": ("mul.T %x4, %x1, %x2; bra L; L: sub.T %x5, %x4, %x3;", 0),
    "on a condition": ("mov.T %x5, %x3; mul.T %x4, %x1, %x2; @%p1 sub.T %x5, %x4, %x3;", 0),
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("lines", CONTRACTED)
def test_products_that_go_into_sums_are_not_rounded(lines: str, kind: str) -> None:
    """Where ptxas makes one multiply-add of them, and only there."""
    dtype, width = FLOATS[kind], 8 if kind == "f64" else 4
    a, b = np.full(32, 1.1, dtype), np.full(32, 1.3, dtype)
    out = np.zeros_like(a)
    body, sign = CONTRACTED[lines]
    load = f"""
        .reg .{kind} %x<8>;
        setp.eq.u64 %p1, %d0, %d0;
        ld.global.{kind} %x1, [%d0];
        ld.global.{kind} %x2, [%d1];
        mul.rn.{kind} %x3, %x1, %x2;
    """
    store = f"""
        mov.u32 %r0, %tid.x;
        mad.wide.u32 %d3, %r0, {width}, %d2;
        st.global.{kind} [%d3], %x5;
        ret;
    """
    text = kernel(load + body.replace(".T", f".{kind}") + store, ("a", "b", "out"))
    run_text(text, {"a": a, "b": b, "out": out})
    exact = Fraction(float(a[0])) * Fraction(float(b[0]))
    same(out, np.full_like(out, sign * float(exact - Fraction(float(a[0] * b[0])))))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_eighths(kind: str) -> None:
    """8-bit floats come in pairs."""
    dtype: Any = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
    largest = float(ml_dtypes.finfo(dtype).max)
    high, low = (np.clip(floats("f32", seed) * 8, -1e9, 1e9) for seed in (1, 2))

    def narrow(x: np.ndarray) -> np.ndarray:
        return np.clip(x.astype(np.float32), -largest, largest).astype(dtype)

    got = apply(f"cvt.rn.satfinite.{kind}x2.f32", (high, low), np.uint16).view(dtype)
    same(got.reshape(-1, 2)[:, 1].copy(), narrow(high))
    same(got.reshape(-1, 2)[:, 0].copy(), narrow(low))
    positive = apply(f"cvt.rn.satfinite.relu.{kind}x2.f32", (high, low), np.uint16).view(dtype)
    assert not (positive.astype(np.float32) < 0).any()
    halves = np.stack([low, high], axis=-1).astype(np.float16)
    got = apply(f"cvt.rn.satfinite.{kind}x2.f16x2", (halves.view(np.uint32)[:, 0],), np.uint16)
    same(got.view(dtype), narrow(halves.reshape(-1)))
    pairs = np.arange(0, 2**16, 2**8 + 1).astype(np.uint16)
    back = apply(f"cvt.rn.f16x2.{kind}x2", (pairs,), np.uint32)
    same(back.view(np.float16), pairs.view(dtype).astype(np.float16))


def test_tf32() -> None:
    even = np.array([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, np.inf], np.float32)
    for mode, want in (("rn", [1, 1 + 2**-9, -1, np.inf]), ("rz", [1, 1 + 2**-10, -1, np.inf])):
        got = apply(f"cvt.{mode}.tf32.f32", (even,), np.uint32).view(np.float32)
        same(got, np.array(want, np.float32))
    a = np.array([1 + 2**-11, 1 + 2**-10, 1 + 3 * 2**-11, -1 - 2**-11, 3.0], np.float32)
    want = np.array([1 + 2**-10, 1 + 2**-10, 1 + 2**-9, -1 - 2**-10, 3.0], np.float32)
    same(apply("cvt.rna.tf32.f32", (a,), np.uint32).view(np.float32), want)


# ------------------------------------------------------------------------------------- unknown


UNKNOWN = [
    "frobnicate.s32", "add.rz.f16", "cvt.rn.e4m3x2.f32", "mul.f8", "min.xorsign.abs.f32",
    "cvt.rn.satfinite.f16.f32", "setp.lt.f16x2", "add.sat.f16x2", "prmt.f4e.b32",
]  # fmt: skip


@pytest.mark.parametrize("opcode", UNKNOWN)
def test_what_is_not_known_is_not_guessed(opcode: str) -> None:
    op, *mods = opcode.split(".")
    with pytest.raises(UnknownInstructionError, match=opcode.replace(".", r"\.")):
        find(op, tuple(mods))
