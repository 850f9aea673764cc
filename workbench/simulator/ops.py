"""What every arithmetic instruction of PTX computes, in NumPy.

`find` gives an instruction's function and the types of its operands. A function takes one value
per operand, an array with an element a lane or, where all lanes have the same, a NumPy scalar; it
knows nothing of registers, lanes and program counters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from workbench.simulator import rounding
from workbench.simulator.native import fma

Value = Any  # numpy.ndarray or numpy.generic
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    **{f"b{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"u{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"f{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "bf16": BFLOAT16,
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    "tf32": np.dtype(np.float32),
}


# Words that may stand in an opcode beside types; another one may mean anything.
_MODIFIERS = {
    "rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu", "approx",
    "satfinite",
    "full", "lo", "hi", "wide", "cc", "NaN", "l", "r", "wrap", "clamp", "shiftamt",
    "eq", "ne", "lt", "le", "gt", "ge", "ls", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu",
    "num", "nan", "and", "or", "xor", "finite", "infinite", "number", "notanumber", "normal",
    "subnormal",
}  # fmt: skip


class UnknownInstructionError(NotImplementedError):
    """An opcode, or a form of it, that the simulator does not know."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An instruction without its registers.

    Attributes
    ----------
    function : callable
        Of as many values as `sources` has types.
    result : str
        PTX type of what it returns.
    sources : tuple of str
        PTX types of what it takes.
    """

    function: Callable[..., Value]
    result: str
    sources: tuple[str, ...]


Finder = Callable[[str, tuple[str, ...]], Operation]
_FINDERS: dict[str, Finder] = {}


def operation(*ops: str) -> Callable[[Finder], Finder]:
    """Register what finds the operations of some opcodes: a function of opcode and modifiers."""

    def register(finder: Finder) -> Finder:
        _FINDERS.update(dict.fromkeys(ops, finder))
        return finder

    return register


@functools.lru_cache(maxsize=4096)
def find(op: str, mods: tuple[str, ...]) -> Operation:
    """The operation of an opcode.

    Raises
    ------
    UnknownInstructionError
        If it is none that is known here.
    """
    # They register their part of the instructions.
    from workbench.simulator import bits, conversions  # noqa: F401

    unknown = UnknownInstructionError(".".join((op, *mods)))
    try:
        found = _FINDERS[op](op, mods)
    except (KeyError, IndexError):
        raise unknown from None
    kinds = (found.result, *found.sources)
    if not (all(kind in DTYPES for kind in kinds) and _MODIFIERS.issuperset({*mods} - {*DTYPES})):
        raise unknown
    if "satfinite" in mods and op != "cvt":
        raise unknown
    if any(kind.endswith("x2") for kind in kinds) and (op in ("setp", "set") or "sat" in mods):
        raise unknown
    if "ftz" in mods:
        found = _with_flushing(found)
    if "sat" in mods and found.result in ("f16", "f32", "f64"):
        found = _with_saturation(found)
    return found


def is_float(kind: str) -> bool:
    """Whether a PTX type is a floating one."""
    return kind[0] == "f" or kind[:2] in ("bf", "tf")


def is_signed(kind: str) -> bool:
    """Whether a PTX type is a signed integer."""
    return kind[0] == "s"


def width_of(kind: str) -> int:
    """Bits of a PTX type."""
    return DTYPES[kind].itemsize * 8


def _rounded(op: str, mods: tuple[str, ...], count: int, nearest: Any) -> Operation:
    """An operation as its rounding says; `nearest` computes it to nearest."""
    mode = next((mode for mode in rounding.DIRECTED if mode in mods), None)
    if mode is None:
        return uniform(mods, count, nearest)
    return uniform(mods, count, rounding.operation(op, mods[-1], mode, fma))


# ---------------------------------------------------------------------------------- modifiers


def _flush(x: Value) -> Value:
    """Subnormal numbers become zeros of their sign."""
    if x.dtype.kind != "f":
        return x
    tiny = np.finfo(x.dtype).smallest_normal
    return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


def _with_flushing(plain: Operation) -> Operation:
    def flushed(*values: Value) -> Value:
        return _flush(plain.function(*map(_flush, values)))

    return Operation(flushed, plain.result, plain.sources)


def _with_saturation(plain: Operation) -> Operation:
    def saturated(*values: Value) -> Value:
        x = plain.function(*values)
        zero, one = x.dtype.type(0), x.dtype.type(1)
        return np.fmin(np.fmax(x, zero), one)  # NaN becomes 0

    return Operation(saturated, plain.result, plain.sources)


def _by_halves(function: Callable[..., Value], kind: str) -> Callable[..., Value]:
    """A function of 16-bit floats applied to both halves of 32-bit words."""
    half = DTYPES[kind.removesuffix("x2")]

    def both(*words: Value) -> Value:
        arrays = np.broadcast_arrays(*(np.atleast_1d(word) for word in words))
        halves = [np.ascontiguousarray(x).view(half) for x in arrays]
        return function(*halves).astype(half, copy=False).view(np.uint32)

    return both


def uniform(mods: tuple[str, ...], count: int, function: Callable[..., Value]) -> Operation:
    """An operation whose operands and result have one type, the last word of the opcode."""
    kind = mods[-1]
    if kind.endswith("x2"):
        function = _by_halves(function, kind)
    return Operation(function, kind, (kind,) * count)


# ------------------------------------------------------------------------------- add, multiply


@operation("add", "sub")
def _add(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    if "sat" in mods and kind == "s32":
        limits = np.iinfo(np.int32)
        wide = np.add if op == "add" else np.subtract
        return uniform(
            mods,
            2,
            lambda a, b: np.clip(
                wide(a.astype(np.int64), b.astype(np.int64)), limits.min, limits.max
            ).astype(np.int32),
        )
    return _rounded(op, mods, 2, np.add if op == "add" else np.subtract)


def _doubled(kind: str) -> np.dtype[Any]:
    return np.dtype(f"{DTYPES[kind].kind}{DTYPES[kind].itemsize * 2}")


def _product(kind: str, half: str) -> Callable[[Value, Value], Value]:
    """The lower or upper half of an integer product, or all of it."""
    if half == "lo":
        return np.multiply
    if kind in ("u64", "s64"):
        return functools.partial(_high_product, signed=is_signed(kind))
    wide, shift = _doubled(kind), width_of(kind)
    if half == "wide":
        return lambda a, b: a.astype(wide) * b.astype(wide)
    return lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(shift)).astype(DTYPES[kind])


def _high_product(a: Value, b: Value, signed: bool) -> Value:
    """Upper 64 bits of a product of 64-bit numbers, from four products of their halves."""
    x, y = a.view(np.uint64), b.view(np.uint64)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    xl, xh, yl, yh = x & low, x >> shift, y & low, y >> shift
    middle = (xl * yl >> shift) + (xl * yh & low) + (xh * yl & low)
    high = xh * yh + (xl * yh >> shift) + (xh * yl >> shift) + (middle >> shift)
    if not signed:
        return high
    zero = np.uint64(0)
    high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return high.view(np.int64)


@operation("mul")
def _mul(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    if is_float(kind):
        return _rounded(op, mods, 2, np.multiply)
    half = mods[0]
    result = f"{kind[0]}{width_of(kind) * 2}" if half == "wide" else kind
    return Operation(_product(kind, half), result, (kind, kind))


@operation("mul24")
def _mul24(op: str, mods: tuple[str, ...]) -> Operation:
    kind, unused = mods[-1], DTYPES[mods[-1]].type(8)

    def low(a: Value, b: Value) -> Value:
        return (a << unused >> unused) * (b << unused >> unused)

    if mods[0] != "lo":
        raise KeyError(op)
    return Operation(low, kind, (kind, kind))


@operation("mad")
def _mad(op: str, mods: tuple[str, ...]) -> Operation:
    if is_float(mods[-1]):
        return _fma(op, mods)
    multiply = _mul(op, mods)
    return Operation(
        lambda a, b, c: multiply.function(a, b) + c,
        multiply.result,
        (*multiply.sources, multiply.result),
    )


@operation("fma")
def _fma(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    if kind in ("f32", "f64"):
        return _rounded("fma", mods, 3, fma)
    half = DTYPES[kind.removesuffix("x2")]

    def in_double(a: Value, b: Value, c: Value) -> Value:
        x = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        x = x.astype(half)
        return np.where(x > 0, x, half.type(0)) if "relu" in mods else x

    return uniform(mods, 3, in_double)


@operation("sad")
def _sad(op: str, mods: tuple[str, ...]) -> Operation:
    return uniform(mods, 3, lambda a, b, c: np.where(a < b, b - a, a - b) + c)


@operation("dp4a")
def _dp4a(op: str, mods: tuple[str, ...]) -> Operation:
    def dot(a: Value, b: Value, c: Value) -> Value:
        parts = []
        for x, kind in ((a, mods[0]), (b, mods[1])):
            bytes_ = np.atleast_1d(x).view(np.int8 if kind == "s32" else np.uint8)
            parts.append(bytes_.reshape(-1, 4).astype(np.int64))
        return ((parts[0] * parts[1]).sum(-1) + c).astype(DTYPES[result])

    result = "s32" if "s32" in mods else "u32"
    return Operation(dot, result, (mods[0], mods[1], result))


# ------------------------------------------------------------------------ division, functions


@operation("div")
def _div(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    if is_float(kind):
        return _rounded(op, mods, 2, np.divide)
    if is_signed(kind):  # towards zero; NumPy rounds down
        return uniform(mods, 2, lambda a, b: (a - np.fmod(a, b)) // b)
    return uniform(mods, 2, np.floor_divide)


@operation("rem")
def _rem(op: str, mods: tuple[str, ...]) -> Operation:
    return uniform(mods, 2, np.fmod)


def _upper_word(x: Value) -> Value:
    """What approximations in double precision keep: the first 20 bits of the fraction."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _in_single(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """A function of float32 for the 16-bit types too."""
    return lambda x: function(x.astype(np.float32)).astype(x.dtype)


_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@operation(*_FUNCTIONS)
def _function(op: str, mods: tuple[str, ...]) -> Operation:
    kind, function = mods[-1], _FUNCTIONS[op]
    if kind == "f64" and "approx" in mods:
        return uniform(mods, 1, lambda x: _upper_word(function(x)))
    if kind not in ("f32", "f64"):
        function = _in_single(function)
    return _rounded(op, mods, 1, function)


@operation("abs", "neg")
def _sign(op: str, mods: tuple[str, ...]) -> Operation:
    return uniform(mods, 1, np.abs if op == "abs" else np.negative)


@operation("copysign")
def _copysign(op: str, mods: tuple[str, ...]) -> Operation:
    return uniform(mods, 2, lambda a, b: np.copysign(b, a))


@operation("min", "max")
def _extreme(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    if not is_float(kind):
        return uniform(mods, 2, np.minimum if op == "min" else np.maximum)
    if "NaN" in mods:
        choose: Any = np.minimum if op == "min" else np.maximum
    else:
        choose = np.fmin if op == "min" else np.fmax

    def chosen(a: Value, b: Value) -> Value:
        x = choose(a, b)
        if not np.any(x == 0):
            return x
        # -0 is less than +0: of equal zeros, min takes a sign that is set and max one that is not.
        negative = np.signbit(a) | np.signbit(b) if op == "min" else np.signbit(a) & np.signbit(b)
        both = (a == 0) & (b == 0)
        return np.where(both, np.where(negative, x.dtype.type(-0.0), x.dtype.type(0)), x)

    return uniform(mods, 2, chosen)


@operation("testp")
def _testp(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    tiny = np.finfo(DTYPES[kind]).smallest_normal
    tests: dict[str, Callable[[Value], Value]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    return Operation(tests[mods[0]], "pred", (kind,))


# ------------------------------------------------------------------------- compare and select

_ORDERED: dict[str, Callable[[Value, Value], Value]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
BOOLEAN: dict[str, Callable[[Value, Value], Value]] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip


def comparison(name: str, kind: str) -> Callable[[Value, Value], Value]:
    """A comparison; of floats, those that end in ``u`` also hold where an operand is NaN."""
    if not is_float(kind):
        return _ORDERED[name]

    def unordered(a: Value, b: Value) -> Value:
        return np.isnan(a) | np.isnan(b)

    if name in ("num", "nan"):
        return unordered if name == "nan" else lambda a, b: ~unordered(a, b)
    if name.endswith("u"):
        ordered = _ORDERED[name[:-1]]
        return lambda a, b: ordered(a, b) | unordered(a, b)
    if name == "ne":
        return lambda a, b: (a != b) & ~unordered(a, b)
    return _ORDERED[name]


@operation("setp")
def _setp(op: str, mods: tuple[str, ...]) -> Operation:
    kind, compare = mods[-1], comparison(mods[0], mods[-1])
    if mods[1] not in BOOLEAN:
        return Operation(compare, "pred", (kind, kind))
    combine = BOOLEAN[mods[1]]
    return Operation(lambda a, b, c: combine(compare(a, b), c), "pred", (kind, kind, "pred"))


@operation("set")
def _set(op: str, mods: tuple[str, ...]) -> Operation:
    result, kind = mods[-2:]
    compare = comparison(mods[0], kind)
    if mods[1] in BOOLEAN:
        raise KeyError(op)
    dtype = DTYPES[result]
    yes = dtype.type(1) if is_float(result) else ~np.zeros((), dtype)[()]
    return Operation(lambda a, b: np.where(compare(a, b), yes, dtype.type(0)), result, (kind, kind))


@operation("selp")
def _selp(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    return Operation(lambda a, b, p: np.where(p, a, b), kind, (kind, kind, "pred"))


@operation("slct")
def _slct(op: str, mods: tuple[str, ...]) -> Operation:
    kind, test = mods[-2:]
    return Operation(lambda a, b, c: np.where(c >= 0, a, b), kind, (kind, kind, test))


@operation("mov", "cvta")
def _mov(op: str, mods: tuple[str, ...]) -> Operation:
    return Operation(lambda a: a, mods[-1], (mods[-1],))
