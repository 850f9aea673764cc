"""Conversions between types, `cvt`, with all its roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from workbench.simulator.ops import DTYPES, Operation, Value, is_float, operation
from workbench.simulator.rounding import DIRECTED, directed, from_integers

ROUNDINGS = ("rn", *DIRECTED)
EIGHTHS = ("e4m3", "e5m2")

_TO_INTEGER: dict[str, Callable[[Value], Value]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


@operation("cvt")
def _cvt(op: str, mods: tuple[str, ...]) -> Operation:
    target, source = mods[-2:]
    if "satfinite" in mods and target.removesuffix("x2") not in EIGHTHS:
        raise KeyError("only 8-bit floats saturate")
    if source.removesuffix("x2") in EIGHTHS or target.removesuffix("x2") in EIGHTHS:
        return _cvt_eighths(target, source, mods)
    if target.endswith("x2"):
        return _cvt_pair(target, mods)
    if target == "tf32":
        mode = next(mode for mode in ("rna", "rn", "rz") if mode in mods)
        return Operation(lambda x: _to_tf32(x, mode), "b32", ("f32",))
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
        if rounding in DIRECTED:
            return lambda x: from_integers(x, dtype, rounding)
        if rounding != "rn":
            raise KeyError("integers are rounded to floats")
        return lambda x: x.astype(dtype)
    if rounding in _TO_INTEGER:
        whole = _TO_INTEGER[rounding]
        return lambda x: whole(x).astype(dtype)
    if rounding in DIRECTED:
        return lambda x: _narrowed(x, dtype, rounding)
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


def _narrowed(x: Value, dtype: np.dtype[Any], mode: str) -> Value:
    """A narrower float, rounded in a direction."""
    nearest = x.astype(dtype)
    return directed(nearest, x.astype(np.float64) - nearest.astype(np.float64), mode)


def _cvt_pair(target: str, mods: tuple[str, ...]) -> Operation:
    """Two float32 to a pair of 16-bit floats: the first operand becomes the upper half."""
    half = target.removesuffix("x2")
    convert = _conversion(half, mods[-1], mods)

    def pair(high: Value, low: Value) -> Value:
        words = [convert(x).view(np.uint16).astype(np.uint32) for x in (high, low)]
        return words[0] << np.uint32(16) | words[1]

    return Operation(pair, "b32", (mods[-1], mods[-1]))


def _to_eighth(dtype: np.dtype[Any], mods: tuple[str, ...]) -> Callable[[Value], Value]:
    """To an 8-bit float, to nearest; what is too large becomes the largest finite one."""
    largest = ml_dtypes.finfo(dtype).max.astype(np.float32)

    def convert(x: Value) -> Value:
        x = x.astype(np.float32)
        if "relu" in mods:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))
        return np.clip(x, -largest, largest).astype(dtype)

    return convert


def _cvt_eighths(target: str, source: str, mods: tuple[str, ...]) -> Operation:
    """Pairs of 8-bit floats: from two float32 or a pair of float16, and to such a pair."""
    if "rn" not in mods or not target.endswith("x2"):
        raise KeyError("8-bit floats come in pairs, rounded to nearest")
    if target == "f16x2" and source.endswith("x2"):
        narrow = DTYPES[source.removesuffix("x2")]

        def widen(pair: Value) -> Value:
            halves = np.atleast_1d(pair).view(narrow).astype(np.float16)
            return np.maximum(halves, np.float16(0)) if "relu" in mods else halves

        return Operation(lambda x: widen(x).view(np.uint32), "b32", (source,))
    if "satfinite" not in mods or source not in ("f32", "f16x2"):
        raise KeyError("conversions to 8-bit floats saturate")
    convert = _to_eighth(DTYPES[target.removesuffix("x2")], mods)
    if source == "f16x2":
        return Operation(
            lambda x: convert(np.atleast_1d(x).view(np.float16)).view(np.uint16), "b16", ("b32",)
        )

    def pair(high: Value, low: Value) -> Value:
        words = [convert(x).view(np.uint8).astype(np.uint16) for x in (high, low)]
        return words[0] << np.uint16(8) | words[1]

    return Operation(pair, "b16", ("f32", "f32"))


def _to_tf32(x: Value, mode: str) -> Value:
    """10 bits of fraction: to nearest, ties away from zero (rna) or to even (rn), or cut off."""
    bits = x.view(np.uint32)
    last = bits >> np.uint32(13) & np.uint32(1)
    more = {"rna": np.uint32(0x1000), "rn": np.uint32(0xFFF) + last, "rz": np.uint32(0)}[mode]
    rounded = (bits + more) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits)
