"""Rounding towards zero, down and up, which NumPy cannot do.

A result is rounded to nearest first; then the sign of what that lost, exact minus rounded, says
whether its neighbour is right instead.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

Value = Any  # numpy.ndarray or numpy.generic
DIRECTED = ("rz", "rm", "rp")


def directed(nearest: Value, lost: Value, mode: str) -> Value:
    """The result in another rounding than to nearest; `lost` has the sign of what that lost."""
    dtype = nearest.dtype
    zero, infinity = dtype.type(0), dtype.type(np.inf)
    if mode == "rz":
        too_far, towards = lost * np.sign(nearest.astype(np.float64)) < 0, zero
    elif mode == "rm":
        too_far, towards = lost < 0, -infinity
    else:
        too_far, towards = lost > 0, infinity
    return np.where(too_far, np.nextafter(nearest, towards), nearest)


def _lost_in_sum(x: Value, y: Value, rounded: Value) -> Value:
    """Of a sum of float64, which need not be exact, rounded to float32."""
    total = x + y
    part = total - x
    below = (x - (total - part)) + (y - part)  # exactly what the sum in float64 lost
    difference = total - rounded
    return np.where(difference != 0, difference, below)


_NEAREST: dict[str, Callable[..., Value]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "rcp": lambda x: x.dtype.type(1) / x, "sqrt": np.sqrt,
}  # fmt: skip
# What float32 results lose, from operands and result in float64, where products are exact.
_LOST: dict[str, Callable[..., Value]] = {
    "add": _lost_in_sum,
    "sub": lambda x, y, r: _lost_in_sum(x, -y, r),
    "mul": lambda x, y, r: x * y - r,
    "fma": lambda x, y, z, r: _lost_in_sum(x * y, z, r),
    "div": lambda x, y, r: (x - r * y) * np.sign(y),
    "rcp": lambda x, r: (1 - r * x) * np.sign(x),
    "sqrt": lambda x, r: x - r * r,
}
# The same with exact fractions.
_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda x, y, r: x + y - r,
    "sub": lambda x, y, r: x - y - r,
    "mul": lambda x, y, r: x * y - r,
    "fma": lambda x, y, z, r: x * y + z - r,
    "div": lambda x, y, r: x / y - r,
    "rcp": lambda x, r: 1 / x - r,
    "sqrt": lambda x, r: x - r * r,
}


def operation(name: str, kind: str, mode: str, fma: Callable[..., Value]) -> Callable[..., Value]:
    """An operation on float32 or float64, rounded in a direction; `fma` rounds to nearest.

    Raises
    ------
    KeyError
        If there is none.
    """
    if kind not in ("f32", "f64"):
        raise KeyError(kind)
    nearest = fma if name == "fma" else _NEAREST[name]
    lost = _LOST[name] if kind == "f32" else _lost_exactly(_EXACT[name])

    def rounded(*values: Value) -> Value:
        result = nearest(*values)
        wide = [x.astype(np.float64) for x in (*values, result)]
        error = lost(*wide)
        changed = directed(result, error, mode)
        if mode == "rm" and name in ("add", "sub", "fma"):
            # Opposite numbers add up to -0.
            first, second = wide[0], wide[1] if name == "add" else -wide[1]
            if name == "fma":
                first, second = wide[0] * wide[1], wide[2]
            negative = (result == 0) & (error == 0) & (np.signbit(first) | np.signbit(second))
            changed = np.where(negative, -result.dtype.type(0), changed)
        return changed

    return rounded


def _lost_exactly(exact: Callable[..., Fraction]) -> Callable[..., Value]:
    """What float64 results lose, one after the other."""

    def sign(*numbers: float) -> float:
        *values, result = numbers
        if not all(map(np.isfinite, values)) or np.isnan(result):
            return 0.0
        if np.isinf(result):
            # Too large for the type, unless something was divided by zero.
            return 0.0 if values[-1] == 0 and len(values) < 3 else -float(np.sign(result))
        difference = exact(*map(Fraction, numbers))
        return float((difference > 0) - (difference < 0))

    return np.vectorize(sign, otypes=[np.float64])


def from_integers(x: Value, dtype: np.dtype[Any], mode: str) -> Value:
    """Whole numbers as floats, rounded in a direction."""
    nearest = x.astype(dtype)

    def sign(number: int, result: float) -> float:
        difference = number - int(result) if np.isfinite(result) else -np.sign(result)
        return float((difference > 0) - (difference < 0))

    lost = np.vectorize(sign, otypes=[np.float64])(x.astype(object), nearest.astype(np.float64))
    return directed(nearest, lost, mode)
