"""Tensor cores: `mma.sync`, and the loads and stores of its fragments, `ldmatrix` and `stmatrix`.

A fragment is a matrix spread over the registers of a warp. Of thread t, g = t / 4 and c = t % 4:
with E elements in a register, register r of the thread holds, counting e from 0 to E - 1,

    A (M x K)   row g + 8 (r % 2),   column E c + e + 4 E (r / 2)
    B (K x N)   row E c + e + 4 E r, column g
    C (M x N)   row g + 8 (r / 2),   column 2 c + r % 2            (32 and 64-bit elements)
                row g + 8 r,         column 2 c + e                (16-bit elements, in pairs)
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from workbench.simulator.collectives import whole_warps
from workbench.simulator.decode import Decoder, Getter, Putter, builder
from workbench.simulator.engine import Chunk, Group, Outcome, Step
from workbench.simulator.native import WARP
from workbench.simulator.ops import DTYPES, UnknownInstructionError
from workbench.simulator.ptx import SIZES, Instruction, Operand, Vec
from workbench.simulator.transfers import Access, addresses_of, reach

Array = Any  # numpy.ndarray
LANE = np.arange(WARP)
G, C = LANE // 4, LANE % 4
# One of the threads that get a row, or store it, whose address a thread gives: another than itself.
USERS = np.where(LANE % 8 * 4 == LANE, LANE % 8 * 4 + 1, LANE % 8 * 4)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


# ------------------------------------------------------------------------------- 8 x 8 matrices


@builder("ldmatrix", "stmatrix")
def _matrices(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """Eight rows of 16 bytes each; thread 8 i + j gives the address of row j of matrix i."""
    loads = instruction.op == "ldmatrix"
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    count = next((int(m[1:]) for m in instruction.mods if m in ("x1", "x2", "x4")), 0)
    if instruction.mods[-1] != "b16" or not count:
        raise UnknownInstructionError(instruction.opcode)
    access = Access(pc, "shared", 16, not loads)
    addresses, turned = addresses_of(decoder, address), "trans" in instruction.mods
    puts = [decoder.put_lanes(item, "b32") for item in _items(registers)] if loads else []
    getters = [] if loads else [decoder.get(item, "b32") for item in _items(registers)]

    def rows(chunk: Chunk, group: Group) -> Array:
        where = addresses(chunk, group).reshape(-1, WARP)[:, : 8 * count]
        lanes = group.lanes.reshape(-1, WARP)[:, : 8 * count]
        users = (lanes - lanes % WARP + USERS[: 8 * count]).reshape(-1)
        return reach(chunk, access, where.reshape(-1), lanes.reshape(-1), users)[1]

    def load(chunk: Chunk, group: Group) -> Outcome:
        columns = chunk.shared.load(rows(chunk, group), 2, 8)
        matrices = np.stack(columns, axis=-1).reshape(-1, count, 8, 8)
        if turned:
            matrices = matrices.swapaxes(-1, -2)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, WARP)
        for i, put in enumerate(puts):
            put(chunk, np.ascontiguousarray(words[:, i]).reshape(-1), group)
        return None

    def store(chunk: Chunk, group: Group) -> Outcome:
        words = np.stack([chunk.of_lanes(get(chunk.registers), group) for get in getters], axis=-1)
        words = np.ascontiguousarray(words.reshape(-1, WARP, count).swapaxes(1, 2))
        matrices = words.view(np.uint16).reshape(-1, count, 8, 8)
        if turned:
            matrices = matrices.swapaxes(-1, -2)
        table = np.ascontiguousarray(matrices).reshape(-1, 8)
        chunk.shared.store(rows(chunk, group), [table[:, i] for i in range(8)], 2)
        return None

    return whole_warps(pc, load if loads else store)


@builder("movmatrix")
def _movmatrix(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """An 8 x 8 matrix of 16-bit elements, transposed from registers to registers."""
    put = decoder.put_lanes(instruction.operands[0], "b32")
    get = decoder.get(instruction.operands[1], "b32")

    def turn(chunk: Chunk, group: Group) -> Outcome:
        words = np.ascontiguousarray(chunk.of_lanes(get(chunk.registers), group))
        matrices = words.view(np.uint16).reshape(-1, 8, 8).swapaxes(-1, -2)
        put(chunk, np.ascontiguousarray(matrices).view(np.uint32).reshape(-1), group)
        return None

    return whole_warps(pc, turn)


# ------------------------------------------------------------------------------------- products


def places_a(registers: int, elements: int) -> tuple[Array, Array]:
    """Row and column of each (register, lane, element)."""
    r = np.arange(registers)[:, None, None]
    e = np.arange(elements)
    row = G[:, None] + 8 * (r % 2) + 0 * e
    return row, elements * C[:, None] + e + 4 * elements * (r // 2)


def _places_b(registers: int, elements: int) -> tuple[Array, Array]:
    r = np.arange(registers)[:, None, None]
    e = np.arange(elements)
    return elements * C[:, None] + e + 4 * elements * r, G[:, None] + 0 * (e + r)


def _places_c(registers: int, elements: int) -> tuple[Array, Array]:
    r = np.arange(registers)[:, None, None]
    e = np.arange(elements)
    if elements == 2:
        return G[:, None] + 8 * r + 0 * e, 2 * C[:, None] + e + 0 * r
    return G[:, None] + 8 * (r // 2) + 0 * e, 2 * C[:, None] + r % 2 + 0 * e


def elements_in_register(kind: str) -> int:
    """Elements in a register."""
    return max(1, 4 // SIZES[kind])


def _words(chunk: Chunk, group: Group, getters: list[Getter]) -> list[Array]:
    return [chunk.of_lanes(get(chunk.registers), group) for get in getters]


def gather(registers: list[Array], kind: str, shape: tuple[int, int], places: Any) -> Array:
    """Fragments, from the registers of whole warps, as matrices in float64, or int64."""
    words = np.stack(registers, axis=-1)
    if kind == "tf32":  # what is below its fraction is not looked at
        words = words.view(np.uint32) & np.uint32(0xFFFFE000)
    words = np.ascontiguousarray(words.reshape(-1, WARP, len(registers)).swapaxes(1, 2))
    values = words.view(DTYPES[kind]).reshape(-1, len(registers), WARP, elements_in_register(kind))
    wide = np.int64 if values.dtype.kind in "iu" else np.float64
    matrices = np.zeros((values.shape[0], *shape), wide)
    matrices[:, places[0], places[1]] = values
    return matrices


def scatter(
    chunk: Chunk, group: Group, puts: list[Putter], kind: str, matrices: Array, places: Any
) -> None:
    """Matrices to the registers of the warps of a group."""
    values = np.ascontiguousarray(matrices[:, places[0], places[1]].astype(DTYPES[kind]))
    word = "u8" if SIZES[kind] == 8 else "u4"
    words = values.view(word)[..., 0]
    for i, put in enumerate(puts):
        put(chunk, np.ascontiguousarray(words[:, i]).reshape(-1), group)


_KNOWN = {  # types of A and B, and the depths K that they come with
    ("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("tf32", 4), ("f64", 4),
    ("s8", 16), ("s8", 32), ("u8", 16), ("u8", 32),
}  # fmt: skip


@builder("mma")
def _mma(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """D = A B + C, added up exactly and rounded once, which no tensor core does to the last bit."""
    mods = instruction.mods
    sizes = next((re.fullmatch(r"m(\d+)n(\d+)k(\d+)", m) for m in mods if m[0] == "m"), None)
    kinds = [m for m in mods if m in SIZES]
    if sizes is None or len(kinds) != 4 or "sp" in mods or "row" not in mods or "col" not in mods:
        raise UnknownInstructionError(instruction.opcode)
    d_kind, a_kind, b_kind, c_kind = kinds
    m, n, k = (int(size) for size in sizes.groups())
    if (a_kind, k) not in _KNOWN or n != 8 or m != (8 if a_kind == "f64" else 16):
        raise UnknownInstructionError(instruction.opcode)
    d, a, b, c = (_items(operand) for operand in instruction.operands)
    word = "b64" if a_kind == "f64" else "b32"
    get_a, get_b, get_c = ([decoder.get(x, word) for x in items] for items in (a, b, c))
    puts = [decoder.put_lanes(x, word) for x in d]
    at_a = places_a(len(a), elements_in_register(a_kind))
    at_b = _places_b(len(b), elements_in_register(b_kind))
    at_c = _places_c(len(c), elements_in_register(c_kind))
    at_d = _places_c(len(d), elements_in_register(d_kind))

    def multiply(chunk: Chunk, group: Group) -> Outcome:
        left = gather(_words(chunk, group, get_a), a_kind, (m, k), at_a)
        right = gather(_words(chunk, group, get_b), b_kind, (k, n), at_b)
        start = gather(_words(chunk, group, get_c), c_kind, (m, n), at_c)
        scatter(chunk, group, puts, d_kind, left @ right + start, at_d)
        return None

    return whole_warps(pc, multiply)
