"""Conversions between types, `cvt`, with all its roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.simulator.ops import DTYPES, Operation, Value, is_float, operation

ROUNDINGS = ("rn", "rz", "rm", "rp")

_TO_INTEGER: dict[str, Callable[[Value], Value]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


@operation("cvt")
def _cvt(op: str, mods: tuple[str, ...]) -> Operation:
    target, source = mods[-2:]
    if target.endswith("x2"):
        return _cvt_pair(target, mods)
    if target == "tf32":
        return Operation(_to_tf32, "b32", ("f32",))
    return Operation(_conversion(target, source, mods), target, (source,))


def _conversion(target: str, source: str, mods: tuple[str, ...]) -> Callable[[Value], Value]:
    dtype = DTYPES[target]
    rounding = next((mode for mode in (*_TO_INTEGER, *ROUNDINGS) if mode in mods), None)
    if not is_float(target):
        if is_float(source):
            return lambda x: _float_to_integer(_TO_INTEGER[rounding or "rzi"](x), dtype)
        if "sat" in mods:
            return lambda x: _clipped(x, dtype)
        return lambda x: x.astype(dtype)
    if not is_float(source):
        if rounding != "rn":
            raise KeyError("integers are converted to nearest only")
        return lambda x: x.astype(dtype)
    if rounding in _TO_INTEGER:
        whole = _TO_INTEGER[rounding]
        return lambda x: whole(x).astype(dtype)
    if rounding in ("rz", "rm", "rp"):
        return lambda x: _directed(x, dtype, rounding)
    if "relu" in mods:
        return lambda x: np.where(x > 0, x, x.dtype.type(0)).astype(dtype)
    return lambda x: x.astype(dtype)


def _clipped(x: Value, dtype: np.dtype[Any]) -> Value:
    limits, own = np.iinfo(dtype), np.iinfo(x.dtype)
    return np.clip(x, max(limits.min, own.min), min(limits.max, own.max)).astype(dtype)


def _float_to_integer(x: Value, dtype: np.dtype[Any]) -> Value:
    """Whole numbers as integers: what does not fit becomes the nearest that does, NaN becomes 0."""
    x = x.astype(np.float64)
    limits = np.iinfo(dtype)
    above, below = x >= float(limits.max), x <= float(limits.min)
    inside = ~(above | below | np.isnan(x))
    result = np.where(inside, x, 0.0).astype(dtype)
    result = np.where(above, dtype.type(limits.max), result)
    return np.where(below, dtype.type(limits.min), result)


def _directed(x: Value, dtype: np.dtype[Any], rounding: str) -> Value:
    """A narrower float, rounded towards zero, down or up."""
    nearest = x.astype(dtype)
    back = nearest.astype(x.dtype)
    infinity = dtype.type(np.inf)
    if rounding == "rz":
        too_far, towards = np.abs(back) > np.abs(x), np.zeros_like(nearest)
    elif rounding == "rm":
        too_far, towards = back > x, np.full_like(nearest, -infinity)
    else:
        too_far, towards = back < x, np.full_like(nearest, infinity)
    return np.where(too_far, np.nextafter(nearest, towards), nearest)


def _cvt_pair(target: str, mods: tuple[str, ...]) -> Operation:
    """Two float32 to a pair of 16-bit floats: the first operand becomes the upper half."""
    half = target.removesuffix("x2")
    convert = _conversion(half, mods[-1], mods)

    def pair(high: Value, low: Value) -> Value:
        words = [convert(x).view(np.uint16).astype(np.uint32) for x in (high, low)]
        return words[0] << np.uint32(16) | words[1]

    return Operation(pair, "b32", (mods[-1], mods[-1]))


def _to_tf32(x: Value) -> Value:
    """To nearest, ties away from zero, 10 bits of fraction."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits)
