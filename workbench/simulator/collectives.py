"""What the threads of a warp, or of a block, do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.simulator import faults
from workbench.simulator.decode import Decoder, Getter, builder
from workbench.simulator.engine import Chunk, Group, Outcome, Step, group_of
from workbench.simulator.faults import SimulationError, at
from workbench.simulator.native import WARP
from workbench.simulator.ops import DTYPES, UnknownInstructionError
from workbench.simulator.ptx import Imm, Instruction, Operand, Pair

Array = Any  # numpy.ndarray
ALL_LANES = np.uint32(0xFFFFFFFF)


def together(members: Getter, pc: int, action: Step) -> Step:
    """A step that happens once all lanes that `members` names have come, or exited."""
    return lambda chunk, group: chunk.meet(group, pc, members(chunk.registers), action)


def whole_warps(pc: int, action: Step) -> Step:
    """A step that happens once all lanes of a warp have come."""
    return lambda chunk, group: chunk.meet(group, pc, ALL_LANES, action, everybody=True)


def in_warps(chunk: Chunk, value: Any) -> Array:
    """A value as a table of warps and lanes."""
    return chunk.spread(value).reshape(-1, WARP)


def _present(chunk: Chunk, group: Group) -> Array:
    mask = np.ones(chunk.size, bool) if group.mask is None else group.mask
    return mask.reshape(-1, WARP)


def _results(operand: Operand) -> tuple[Operand, Operand]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


# --------------------------------------------------------------------------------- barriers


@builder("bar", "barrier")
def _bar(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    mods = [m for m in instruction.mods if m != "cta"]
    if mods[0] == "warp":
        members = decoder.get(instruction.operands[0], "u32")
        return together(members, pc, _pass_warp_barrier)
    operands = list(instruction.operands)
    if mods[0] == "red":
        return _reducing_barrier(decoder, instruction, pc)
    if mods[0] not in ("sync", "arrive"):
        raise UnknownInstructionError(instruction.opcode)
    number = decoder.get(operands[0], "u32")
    expected = decoder.get(operands[1], "u32") if len(operands) > 1 else None
    waits = mods[0] == "sync"

    def arrive(chunk: Chunk, group: Group) -> Outcome:
        which = number(chunk.registers)
        count = None if expected is None else expected(chunk.registers)
        if which.ndim == 0 and (count is None or count.ndim == 0):
            return chunk.arrive(group, pc, int(which), None if count is None else int(count),
                                wait=waits)  # fmt: skip
        # Several barriers at once: parts of the block may have one each.
        both = np.stack([chunk.of_lanes(x if x is not None else which, group)
                         for x in (which, count)]).astype(np.int64)  # fmt: skip
        released: list[tuple[int, Group]] = []
        for one in np.unique(both, axis=1).T:
            mask = np.zeros(chunk.size, bool)
            mask[group.lanes[(both == one[:, None]).all(0)]] = True
            part = group_of(mask)
            outcome = chunk.arrive(
                part, pc, int(one[0]), None if count is None else int(one[1]), wait=waits
            )
            released += [(pc + 1, part)] if outcome is None else outcome  # type: ignore[arg-type]
        return released

    return arrive


def _pass_warp_barrier(chunk: Chunk, group: Group) -> Outcome:
    if chunk.checks is not None:
        chunk.checks.order.pass_warp_barrier(group.lanes)
    return None


_REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "popc": lambda p: p.sum(1).astype(np.uint32),
    "and": lambda p: p.all(1),
    "or": lambda p: p.any(1),
}


def _reducing_barrier(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """``bar.red``: a barrier that also counts, or joins, a predicate of all threads."""
    target, number, *rest = instruction.operands
    name, kind = next(m for m in instruction.mods if m in _REDUCTIONS), instruction.mods[-1]
    if len(rest) != 1 or not isinstance(number, Imm):
        raise UnknownInstructionError(instruction.opcode)
    get, put = decoder.get(rest[0], "pred"), decoder.put(target, kind)
    missing = name == "and"

    def arrive(chunk: Chunk, group: Group) -> Outcome:
        chunk.offered[group.lanes] = chunk.of_lanes(get(chunk.registers), group)
        outcome = chunk.arrive(group, pc, number.value, None)
        released = [(pc + 1, group)] if outcome is None else outcome
        offered = chunk.offered.astype(bool).reshape(chunk.blocks, -1)
        offered[:, chunk.launch.block :] = missing
        values = np.repeat(_REDUCTIONS[name](offered), chunk.threads)
        for place, part in released:  # type: ignore[union-attr]
            if place == pc + 1:
                put(chunk, values, part)
        return outcome

    return arrive


# --------------------------------------------------------------------------------- shuffles


@builder("shfl")
def _shfl(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    if instruction.mods[0] != "sync":
        raise UnknownInstructionError(instruction.opcode)
    mode = instruction.mods[1]
    target, value, distance, clamp, members = instruction.operands
    value_target, inside_target = _results(target)
    get = decoder.get(value, "b32")
    get_b, get_c = decoder.get(distance, "u32"), decoder.get(clamp, "u32")
    put, put_inside = decoder.put(value_target, "b32"), decoder.put(inside_target, "pred")
    fixed = isinstance(distance, Imm) and isinstance(clamp, Imm)
    known: dict[int, tuple[Array, Array]] = {}  # by size of the chunk: most distances are literal

    def sources(chunk: Chunk) -> tuple[Array, Array]:
        if not fixed:
            return shuffle_sources(mode, chunk.size, get_b(chunk.registers), get_c(chunk.registers))
        if chunk.size not in known:
            known[chunk.size] = shuffle_sources(
                mode, chunk.size, get_b(chunk.registers), get_c(chunk.registers)
            )
        return known[chunk.size]

    def shuffle(chunk: Chunk, group: Group) -> Outcome:
        lanes, inside = sources(chunk)
        if group.mask is not None and not group.mask[lanes[group.lanes]].all():
            reader = int(group.lanes[~group.mask[lanes[group.lanes]]][0])
            where = chunk.launch.where(pc)
            raise SimulationError(
                faults.SHUFFLE,
                f"{chunk.name(reader)} takes its value at {at(where)} from lane "
                f"{int(lanes[reader]) % WARP}, which does not take part",
                where,
            )
        put(chunk, chunk.spread(get(chunk.registers))[lanes], group)
        put_inside(chunk, inside, group)
        return None

    return together(decoder.get(members, "u32"), pc, shuffle)


def shuffle_sources(mode: str, size: int, b: Any, c: Any) -> tuple[Array, Array]:
    """The lane that each lane's value comes from, and whether that lies in its segment."""
    every = np.arange(size)
    lane = every % WARP
    b, c = b.astype(np.int64) & 31, c.astype(np.int64)
    segment, limit = c >> 8 & 31, c & 31
    first = lane & segment
    last = first | (limit & ~segment)
    if mode == "up":
        source = lane - b
        inside = source >= last
    else:
        source = {"down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[mode]
        inside = source <= last
    return every - lane + np.where(inside, source, lane), inside


@builder("vote")
def _vote(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    if instruction.mods[0] != "sync":
        raise UnknownInstructionError(instruction.opcode)
    mode = instruction.mods[1]
    target, predicate, members = instruction.operands
    get, put = decoder.get(predicate, "pred"), decoder.put(target, instruction.mods[-1])

    def vote(chunk: Chunk, group: Group) -> Outcome:
        present = _present(chunk, group)
        yes = in_warps(chunk, get(chunk.registers)) & present
        if mode == "ballot":
            result = _bits(yes)
        elif mode == "any":
            result = yes.any(1)
        else:
            result = (yes == present).all(1)
            if mode == "uni":
                result |= ~yes.any(1)
        put(chunk, np.repeat(result, WARP), group)
        return None

    return together(decoder.get(members, "u32"), pc, vote)


def _bits(table: Array) -> Array:
    """A row of 32 truth values as a number."""
    return np.packbits(table, axis=1, bitorder="little").view(np.uint32)[:, 0]


@builder("activemask")
def _activemask(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    put = decoder.put(instruction.operands[0], "b32")

    def active(chunk: Chunk, group: Group) -> Outcome:
        put(chunk, np.repeat(_bits(_present(chunk, group)), WARP), group)
        return None

    return active


@builder("match")
def _match(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    mode, kind = instruction.mods[0], instruction.mods[-1]
    target, value, members = instruction.operands
    mask_target, same_target = _results(target)
    get = decoder.get(value, kind)
    put, put_same = decoder.put(mask_target, "b32"), decoder.put(same_target, "pred")

    def match(chunk: Chunk, group: Group) -> Outcome:
        values, present = in_warps(chunk, get(chunk.registers)), _present(chunk, group)
        equal = (values[:, :, None] == values[:, None, :]) & present[:, None, :]
        masks = np.packbits(equal, axis=2, bitorder="little").view(np.uint32)[..., 0]
        if mode == "all":
            same = masks == _bits(present)[:, None]
            put_same(chunk, same.reshape(-1), group)
            masks = np.where(same, masks, np.uint32(0))
        put(chunk, masks.reshape(-1), group)
        return None

    return together(decoder.get(members, "u32"), pc, match)


@builder("redux")
def _redux(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    name, kind = instruction.mods[1], instruction.mods[-1]
    target, value, members = instruction.operands
    reduce: Any = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[name]  # fmt: skip
    dtype = DTYPES[kind]
    limits = np.iinfo(dtype)
    neutral = dtype.type({"min": limits.max, "max": limits.min, "and": limits.max}.get(name, 0))
    get, put = decoder.get(value, kind), decoder.put(target, kind)

    def combine(chunk: Chunk, group: Group) -> Outcome:
        values = np.where(_present(chunk, group), in_warps(chunk, get(chunk.registers)), neutral)
        put(chunk, np.repeat(reduce.reduce(values, axis=1, dtype=dtype), WARP), group)
        return None

    return together(decoder.get(members, "u32"), pc, combine)


@builder("elect")
def _elect(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """The lowest lane that takes part is elected."""
    lane_target, elected_target = _results(instruction.operands[0])
    put, put_elected = decoder.put(lane_target, "b32"), decoder.put(elected_target, "pred")

    def elect(chunk: Chunk, group: Group) -> Outcome:
        leader = np.repeat(_present(chunk, group).argmax(1).astype(np.uint32), WARP)
        put(chunk, leader, group)
        put_elected(chunk, leader == np.arange(chunk.size) % WARP, group)
        return None

    return together(decoder.get(instruction.operands[1], "u32"), pc, elect)
