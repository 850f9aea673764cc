"""Asynchronous copies from global to shared memory: `cp.async`, its groups and its waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.simulator import native
from workbench.simulator.bulk import bulk_copy
from workbench.simulator.decode import Decoder, builder
from workbench.simulator.engine import Chunk, Group, Outcome, Step
from workbench.simulator.mbarriers import MBarrier, MBarriers, blocks_and_offsets, places_of
from workbench.simulator.ops import UnknownInstructionError
from workbench.simulator.ptx import Imm, Instruction, Reg
from workbench.simulator.transfers import Access, addresses_of, collision, reach

Array = Any  # numpy.ndarray


@dataclass(slots=True)
class Copy:
    """A `cp.async` under way.

    Attributes
    ----------
    targets, sources : int64 arrays
        Offsets in shared and global memory.
    lengths : int64 array
        Bytes that are read; the rest becomes 0.
    number : int64 array
        How many groups each lane had committed before: the group that the copy belongs to.
    """

    access: Access
    lanes: Array
    targets: Array
    sources: Array
    lengths: Array
    number: Array

    def land(self, chunk: Chunk, chosen: Array) -> None:
        """The copies of some lanes arrive."""
        size = self.access.size
        targets, lengths = self.targets[chosen], self.lengths[chosen]
        words = chunk.global_memory.load(self.sources[chosen], 4, size // 4)
        for i, word in enumerate(words):
            here = np.clip(lengths - 4 * i, 0, 4) * 8
            keep = ((1 << here) - 1).astype(np.uint32)
            words[i] = word & keep
        chunk.shared.store(targets, words, 4)
        if chunk.checks is not None:
            lanes = self.lanes[chosen]
            code = chunk.checks.shared(targets, lanes, size, self.access.pc, 0, True)
            if code:
                raise collision(chunk, self.access, targets, lanes, code)

    def without(self, chosen: Array) -> Copy:
        """The copies of the other lanes."""
        left = ~chosen
        return Copy(self.access, self.lanes[left], self.targets[left], self.sources[left],
                    self.lengths[left], self.number[left])  # fmt: skip


@builder("cp")
def _cp(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    mods = instruction.mods
    if "bulk" in mods:
        return bulk_copy(decoder, instruction, pc)
    if mods[0] != "async":
        raise UnknownInstructionError(instruction.opcode)
    if "mbarrier" in mods:
        return _arriving(decoder, instruction, pc)
    if mods[1] == "commit_group":
        return _commit
    if mods[1] in ("wait_group", "wait_all"):
        return _waiting(instruction)
    return _start_copy(decoder, instruction, pc)


def _commit(chunk: Chunk, group: Group) -> Outcome:
    chunk.committed[group.lanes] += 1
    return None


def _waiting(instruction: Instruction) -> Step:
    """Data arrives when it is waited for and no earlier, so that a missing wait shows."""
    everything = instruction.mods[1] == "wait_all"
    operand = instruction.operands[0] if instruction.operands else None
    allowed = operand.value if isinstance(operand, Imm) else 0

    def wait(chunk: Chunk, group: Group) -> None:
        remaining = []
        for copy in chunk.copies:
            done = np.full(copy.lanes.size, True)
            if group.mask is not None:
                done = group.mask[copy.lanes]
            if not everything:
                done &= copy.number < chunk.committed[copy.lanes] - allowed
            if done.any():
                copy.land(chunk, done)
            if not done.all():
                remaining.append(copy.without(done))
        chunk.copies = remaining

    return wait


@dataclass(slots=True)
class ArrivalOfCopies:
    """An arrival at an mbarrier that comes when a thread's copies so far have landed."""

    pc: int
    lane: int
    barrier: MBarrier

    def land(self, chunk: Chunk) -> list[tuple[int, Group]]:
        """Let the copies land and arrive; who has waited for that."""
        for copy in chunk.copies:
            copy.land(chunk, copy.lanes == self.lane)
        chunk.copies = [
            copy.without(copy.lanes == self.lane)
            for copy in chunk.copies
            if (copy.lanes != self.lane).any()
        ]
        if chunk.checks is not None:
            chunk.checks.clocks.leave_at(self.barrier.gathering, np.array([self.lane]))
        return chunk.extension(MBarriers).arrive(self.barrier, 1, self.pc, self.lane)


def _arriving(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """``cp.async.mbarrier.arrive``; without ``.noinc`` the phase expects one more for it."""
    places = places_of(decoder, instruction, instruction.operands[0])
    access = Access(pc, "cluster", 8, False, native.STRONG)
    more = 0 if "noinc" in instruction.mods else 1

    def arrive(chunk: Chunk, group: Group) -> None:
        barriers, lanes = chunk.extension(MBarriers), group.lanes
        where = blocks_and_offsets(chunk, access, places(chunk, group), lanes)
        for place, lane in zip(where, lanes.tolist(), strict=True):
            barrier = barriers.find(pc, *place, lane)
            barrier.pending += more
            chunk.pending.append(ArrivalOfCopies(pc, lane, barrier))

    return arrive


def _start_copy(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    hinted = "L2__cache_hint" in instruction.mods
    operands = instruction.operands[:-1] if hinted else instruction.operands
    target, source, size, *rest = operands
    if not isinstance(size, Imm):
        raise UnknownInstructionError(instruction.opcode)
    # The last operand is how many bytes to read, or a predicate that says to read none.
    ignored = rest and isinstance(rest[0], Reg) and rest[0].kind == "pred"
    length = decoder.get(rest[0] if rest else size, "pred" if ignored else "u32")
    read, read_byte = (Access(pc, "global", n, False) for n in (size.value, 1))
    write = Access(pc, "shared", size.value, True, native.FLYING)
    to, come_from = addresses_of(decoder, target), addresses_of(decoder, source)

    def start(chunk: Chunk, group: Group) -> None:
        lanes = group.lanes
        lengths = chunk.of_lanes(length(chunk.registers), group).astype(np.int64)
        if ignored:
            lengths = np.where(lengths, 0, read.size)
        where, sources = come_from(chunk, group), np.zeros(lanes.size, np.int64)
        whole, part = lengths >= read.size, (lengths > 0) & (lengths < read.size)
        if whole.any():
            _, sources[whole] = reach(chunk, read, where[whole], lanes[whole])
        if part.any():  # what lies behind a copy that is cut short need not exist
            ends = where[part] + lengths[part] - 1
            reach(chunk, read_byte, ends, lanes[part])
            _, sources[part] = reach(chunk, read_byte, where[part], lanes[part])
        _, targets = reach(chunk, write, to(chunk, group), lanes)
        chunk.copies.append(Copy(write, lanes, targets, sources, lengths, chunk.committed[lanes]))

    return start
