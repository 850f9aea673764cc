"""Branches, calls, exits: the instructions that say which one is next."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.simulator.decode import Decoder, builder, callee_of
from workbench.simulator.engine import Chunk, Group, Outcome, Step
from workbench.simulator.ops import UnknownInstructionError
from workbench.simulator.ptx import Instruction

# Instructions that only advise the hardware, or measure it.
_NO_EFFECT = ("prefetch", "prefetchu", "pmevent", "nanosleep", "griddepcontrol", "applypriority")


@builder("bra")
def _bra(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    target = decoder.program.labels[instruction.operands[0].name]  # type: ignore[union-attr]
    if instruction.guard is None:
        return lambda chunk, group: target
    condition = decoder.condition(instruction.guard)

    def branch(chunk: Chunk, group: Group) -> Outcome:
        taken = chunk.part(group, condition(chunk.registers))
        if taken is None:
            return None
        if taken is group:
            return target
        rest = Group(chunk.mask_without(group, taken), group.count - taken.count)
        return [(pc + 1, rest), (target, taken)]

    return branch


@builder("brx")
def _brx(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """A jump through a table of labels."""
    index, table = instruction.operands
    labels = decoder.program.branch_targets[table.name]  # type: ignore[union-attr]
    targets = np.array([decoder.program.labels[label] for label in labels])
    get = decoder.get(index, "u32")

    def jump(chunk: Chunk, group: Group) -> Outcome:
        return _parts(chunk, group, targets[chunk.of_lanes(get(chunk.registers), group)])

    return jump


def _parts(chunk: Chunk, group: Group, places: Any) -> Outcome:
    """Send each lane of a group to its own place."""
    parts: list[tuple[int, Group]] = []
    for place in np.unique(places):
        mask = np.zeros(chunk.size, bool)
        mask[group.lanes[places == place]] = True
        parts.append((int(place), Group(mask, int(np.count_nonzero(mask)))))
    return parts


@builder("ret", "exit")
def _ret(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    function = decoder.function_at[pc]
    if instruction.op == "exit" or function is decoder.program.entry:

        def leave(chunk: Chunk, group: Group) -> Outcome:
            return chunk.exit(group, pc)

        return leave
    place = decoder.fixed_register(f"%return {function.name}", "u32")

    def go_back(chunk: Chunk, group: Group) -> Outcome:
        return _parts(chunk, group, chunk.of_lanes(chunk.registers[place], group))

    return go_back


@builder("call")
def _call(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """A function's registers and parameters are its own, so it may not call itself."""
    name = callee_of(instruction)
    function = decoder.program.functions.get(name)
    if function is None:
        if name == "vprintf":
            return lambda chunk, group: None
        raise UnknownInstructionError(f"call of {name}")
    place, start = decoder.fixed_register(f"%return {name}", "u32"), function.start

    def call(chunk: Chunk, group: Group) -> Outcome:
        chunk.put(place, np.uint32(pc + 1), group)
        return start

    return call


@builder("trap", "brkpt")
def _trap(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    def stop(chunk: Chunk, group: Group) -> Outcome:
        raise chunk.trapped(group, pc)

    return stop


@builder(*_NO_EFFECT)
def _nothing(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    return lambda chunk, group: None
