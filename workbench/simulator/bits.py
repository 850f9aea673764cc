"""Logic, shifts, fields and permutations of bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.simulator.ops import (
    DTYPES,
    Operation,
    Value,
    is_signed,
    operation,
    uniform,
    width_of,
)


@operation("and", "or", "xor")
def _logic(op: str, mods: tuple[str, ...]) -> Operation:
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return uniform(mods, 2, functions[op])


@operation("not")
def _not(op: str, mods: tuple[str, ...]) -> Operation:
    return uniform(mods, 1, np.invert)


@operation("cnot")
def _cnot(op: str, mods: tuple[str, ...]) -> Operation:
    return uniform(mods, 1, lambda a: (a == 0).astype(a.dtype))


@operation("shl", "shr")
def _shift(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    dtype, shift = DTYPES[kind], np.left_shift if op == "shl" else np.right_shift
    # Shifting by the width or more gives all zeros or all signs, in NumPy as in PTX.
    return Operation(lambda a, n: shift(a, n.astype(dtype)), kind, (kind, "u32"))


@operation("shf")
def _funnel(op: str, mods: tuple[str, ...]) -> Operation:
    left, wrap = mods[0] == "l", mods[1] == "wrap"

    def shift(low: Value, high: Value, n: Value) -> Value:
        n = n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))
        word = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        distance = n.astype(np.uint64)
        shifted = (word << distance) >> np.uint64(32) if left else word >> distance
        return (shifted & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return Operation(shift, "b32", ("b32", "b32", "u32"))


@operation("popc")
def _popc(op: str, mods: tuple[str, ...]) -> Operation:
    return Operation(lambda a: np.bitwise_count(a).astype(np.uint32), "u32", (mods[-1],))


def _bit_length(x: Value) -> Value:
    """Number of bits from the highest one on."""
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < x.dtype.itemsize * 8:
            x = x | x >> x.dtype.type(shift)
    return np.bitwise_count(x).astype(np.uint32)


@operation("clz")
def _clz(op: str, mods: tuple[str, ...]) -> Operation:
    width = np.uint32(width_of(mods[-1]))
    return Operation(lambda a: width - _bit_length(a), "u32", (mods[-1],))


@operation("bfind")
def _bfind(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    width = np.uint32(width_of(kind))
    unsigned = DTYPES[f"u{width_of(kind)}"]

    def find_bit(a: Value) -> Value:
        x = np.where(a < 0, ~a, a).view(unsigned) if is_signed(kind) else a
        length = _bit_length(x)
        found = width - length if "shiftamt" in mods else length - np.uint32(1)
        return np.where(length == 0, np.uint32(0xFFFFFFFF), found)

    return Operation(find_bit, "u32", (kind,))


@operation("brev")
def _brev(op: str, mods: tuple[str, ...]) -> Operation:
    def reverse(a: Value) -> Value:
        width = a.dtype.itemsize * 8
        for shift in (s for s in (32, 16, 8, 4, 2, 1) if s < width):
            ones = sum(((1 << shift) - 1) << at for at in range(0, width, 2 * shift))
            mask, distance = a.dtype.type(ones), a.dtype.type(shift)
            a = (a >> distance & mask) | (a & mask) << distance
        return a

    return uniform(mods, 1, reverse)


def _ones(count: Value, dtype: np.dtype[Any]) -> Value:
    """`count` low bits set; from the width on all of them."""
    return ~(~dtype.type(0) << count.astype(dtype))


@operation("bfe")
def _bfe(op: str, mods: tuple[str, ...]) -> Operation:
    kind = mods[-1]
    width, dtype = width_of(kind), DTYPES[kind]
    unsigned = np.dtype(f"u{dtype.itemsize}")

    def extract(a: Value, position: Value, length: Value) -> Value:
        position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
        field = (a >> position.astype(dtype)).view(unsigned) & _ones(length, unsigned)
        if not is_signed(kind):
            return field
        sign_at = np.minimum(position + length - np.uint32(1), np.uint32(width - 1))
        negative = (a >> sign_at.astype(dtype) & dtype.type(1)).astype(bool) & (length > 0)
        return np.where(negative, field | ~_ones(length, unsigned), field).view(dtype)

    return Operation(extract, kind, (kind, "u32", "u32"))


@operation("bfi")
def _bfi(op: str, mods: tuple[str, ...]) -> Operation:
    kind, dtype = mods[-1], DTYPES[mods[-1]]

    def insert(a: Value, b: Value, position: Value, length: Value) -> Value:
        position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
        mask = _ones(length, dtype) << position.astype(dtype)
        return (b & ~mask) | (a << position.astype(dtype) & mask)

    return Operation(insert, kind, (kind, kind, "u32", "u32"))


@operation("prmt")
def _prmt(op: str, mods: tuple[str, ...]) -> Operation:
    def permute(a: Value, b: Value, selector: Value) -> Value:
        word = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        result: Value = np.uint32(0)
        for i in range(4):
            choice = selector >> np.uint32(4 * i)
            shift = (choice & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = (word >> shift & np.uint64(0xFF)).astype(np.uint32)
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            byte = np.where(choice & np.uint32(8), sign, byte)
            result = result | byte << np.uint32(8 * i)
        return result

    if mods[0] != "b32":
        raise KeyError(op)
    return Operation(permute, "b32", ("b32", "b32", "b32"))


@operation("lop3")
def _lop3(op: str, mods: tuple[str, ...]) -> Operation:
    def look_up(a: Value, b: Value, c: Value, table: Value) -> Value:
        result: Value = np.uint32(0)
        for case in range(8):
            chosen = [x if case >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            on = np.where(table >> np.uint32(case) & np.uint32(1), ~np.uint32(0), np.uint32(0))
            result = result | (chosen[0] & chosen[1] & chosen[2] & on)
        return result

    return Operation(look_up, "b32", ("b32", "b32", "b32", "u32"))
