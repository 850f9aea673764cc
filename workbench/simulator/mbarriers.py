"""`mbarrier`: barriers in shared memory that also count the bytes of asynchronous copies.

A phase ends when all arrivals that it expects have come and its transaction count is 0; the next
one begins at once. Who waits for a phase knows, once it has ended, what came before the arrivals,
and what the copies wrote that were counted in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.simulator import faults, native
from workbench.simulator.decode import Decoder, Getter, Putter, builder
from workbench.simulator.engine import NOWHERE, Chunk, Extension, Group, Outcome, Step, group_of
from workbench.simulator.faults import SimulationError, at
from workbench.simulator.memory import SHARED_BASE
from workbench.simulator.ops import UnknownInstructionError
from workbench.simulator.ptx import Instruction, Operand
from workbench.simulator.transfers import Access, addresses_of, reach

Array = Any  # numpy.ndarray
Places = Callable[[Chunk, Group], Array]
MAX_COUNT = 2**20 - 1
_PENDING_BITS = 20  # of the state that an arrival returns: phase, then arrivals that were pending


@dataclass(slots=True)
class Waiting:
    """Lanes that are parked at a `try_wait`."""

    pc: int
    lanes: Array
    put: Putter
    acquires: bool


@dataclass(slots=True)
class MBarrier:
    """One barrier.

    Attributes
    ----------
    block, offset : int
        Where it lies; the block counts from the first one of the chunk.
    maker : int or None
        The lane that made it, as long as that has not fenced this.
    count, pending : int
        Arrivals that a phase expects, and those that are still missing.
    bytes : int
        The transaction count.
    phase : int
        How many have ended.
    engine : int
        The stream of the copies that it counts, `order.Clocks.engine`.
    """

    block: int
    offset: int
    maker: int | None
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    engine: int = 0
    waiting: list[Waiting] = field(default_factory=list)

    @property
    def gathering(self) -> tuple[str, int, int]:
        """Where those who arrive leave what they know, `order.Clocks.leave_at`."""
        return "arrivals", self.block, self.offset

    @property
    def ended(self) -> tuple[str, int, int]:
        """Where those who have waited find it."""
        return "phase", self.block, self.offset


class MBarriers(Extension):
    """Those of the blocks of a chunk, by block and offset."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        self.table: dict[tuple[int, int], MBarrier] = {}
        self.gave_up_at = -1

    def find(self, pc: int, block: int, offset: int, lane: int) -> MBarrier:
        """The barrier at a place."""
        barrier = self.table.get((block, offset))
        if barrier is None:
            where = self.chunk.launch.where(pc)
            raise SimulationError(
                faults.MBARRIER,
                f"{self.chunk.name(lane)} at {at(where)} uses byte {offset} of shared memory, "
                "where no mbarrier.init has made one",
                where,
            )
        return barrier

    def arrive(self, barrier: MBarrier, count: int, pc: int, lane: int) -> list[tuple[int, Group]]:
        """`count` arrivals; who goes on because of them."""
        if count > barrier.pending:
            where = self.chunk.launch.where(pc)
            raise SimulationError(
                faults.MBARRIER,
                f"{self.chunk.name(lane)} brings {count} arrivals at {at(where)}, where the phase "
                f"still expects {barrier.pending} of {barrier.count}",
                where,
            )
        barrier.pending -= count
        return self.end_phase(barrier)

    def count_bytes(self, barrier: MBarrier, size: int, pc: int, lane: int) -> None:
        """`size` more bytes (less, if negative) to come in this phase."""
        barrier.bytes += size
        if abs(barrier.bytes) > MAX_COUNT:
            where = self.chunk.launch.where(pc)
            raise SimulationError(
                faults.MBARRIER,
                f"{self.chunk.name(lane)} at {at(where)} brings the transaction count to "
                f"{barrier.bytes} bytes; its range is +-{MAX_COUNT}",
                where,
            )

    def end_phase(self, barrier: MBarrier) -> list[tuple[int, Group]]:
        """End the phase if nothing is missing; who waited for it, and where they go on."""
        if barrier.pending or barrier.bytes:
            return []
        chunk = self.chunk
        barrier.phase += 1
        barrier.pending = barrier.count
        chunk.launch.writes += 1
        if chunk.checks is not None:
            clocks = chunk.checks.clocks
            clocks.move(barrier.gathering, barrier.ended)
            clocks.finish(barrier.ended, barrier.block, barrier.engine, barrier.phase)
        waiting, barrier.waiting = barrier.waiting, []
        return [self._resume(x, barrier) for x in waiting]

    def _resume(self, waiting: Waiting, barrier: MBarrier | None) -> tuple[int, Group]:
        """Let parked lanes go on: the phase has ended or, without `barrier`, they give up."""
        chunk = self.chunk
        mask = np.zeros(chunk.size, bool)
        mask[waiting.lanes] = True
        group = group_of(mask)
        chunk.waiting_at[waiting.lanes] = NOWHERE
        waiting.put(chunk, np.bool_(barrier is not None), group)
        if barrier is not None and waiting.acquires and chunk.checks is not None:
            chunk.checks.clocks.take_from(barrier.ended, waiting.lanes)
        return waiting.pc + 1, group

    def give_up_waiting(self) -> bool:
        """A `try_wait` may end in vain after a while, once for everything that happens."""
        if self.gave_up_at == self.chunk.launch.writes:
            return False
        self.gave_up_at = self.chunk.launch.writes
        tired = []
        for barrier in self.table.values():
            tired += [self._resume(x, None) for x in barrier.waiting]
            barrier.waiting = []
        for pc, group in tired:
            self.chunk.add(pc, group)
        return bool(tired)

    def why_waiting(self, lanes: Array) -> str:
        """The state of the barriers that lanes wait at."""
        for barrier in self.table.values():
            if any(np.isin(x.lanes, lanes).any() for x in barrier.waiting):
                return (
                    f", in phase {barrier.phase} of the one at byte {barrier.offset}, which expects"
                    f" {barrier.pending} more of {barrier.count} arrivals and {barrier.bytes} bytes"
                )
        return ""

    def fence(self, lanes: Array) -> None:
        """What these lanes have made is visible to asynchronous copies."""
        for barrier in self.table.values():
            if barrier.maker is not None and barrier.maker in lanes:
                barrier.maker = None


def places_of(decoder: Decoder, instruction: Instruction, operand: Operand) -> Places:
    """A function that gives addresses in the shared memories of a cluster, of a lane each."""
    addresses = addresses_of(decoder, operand)
    if any(m.startswith("shared") for m in instruction.mods):
        return addresses
    return lambda chunk, group: addresses(chunk, group) - SHARED_BASE


def blocks_and_offsets(
    chunk: Chunk, access: Access, addresses: Array, lanes: Array
) -> list[tuple[int, int]]:
    """Where the barriers at some addresses lie; they are there, unless they are being written."""
    blocks, offsets = chunk.in_cluster(addresses, lanes)
    places = list(zip(blocks.tolist(), offsets.tolist(), strict=True))
    if not access.write:
        for place, lane in zip(places, lanes.tolist(), strict=True):
            chunk.extension(MBarriers).find(access.pc, *place, lane)
    reach(chunk, access, addresses, lanes)
    return places


@builder("mbarrier")
def _mbarrier(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    kind = instruction.mods[0]
    if kind in ("init", "inval"):
        return _init(decoder, instruction, pc)
    if kind in ("arrive", "arrive_drop"):
        return _arrive(decoder, instruction, pc)
    if kind in ("expect_tx", "complete_tx"):
        return _transactions(decoder, instruction, pc)
    if kind in ("test_wait", "try_wait"):
        return _wait(decoder, instruction, pc)
    if kind == "pending_count":
        get = decoder.get(instruction.operands[1], "u64")
        put = decoder.put(instruction.operands[0], "u32")
        bits = np.uint64(MAX_COUNT)

        def count(chunk: Chunk, group: Group) -> None:
            put(chunk, (get(chunk.registers) & bits).astype(np.uint32), group)

        return count
    raise UnknownInstructionError(instruction.opcode)


def _init(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    places = places_of(decoder, instruction, instruction.operands[0])
    makes = instruction.mods[0] == "init"
    get = decoder.get(instruction.operands[1], "u32") if makes else None
    access = Access(pc, "cluster", 8, True)

    def change(chunk: Chunk, group: Group) -> None:
        barriers, lanes = chunk.extension(MBarriers), group.lanes
        where = blocks_and_offsets(chunk, access, places(chunk, group), lanes)
        if get is None:
            for place, lane in zip(where, lanes.tolist(), strict=True):
                barriers.find(pc, *place, lane)
                del barriers.table[place]
            return
        counts = chunk.of_lanes(get(chunk.registers), group)
        for place, count, lane in zip(where, counts.tolist(), lanes.tolist(), strict=True):
            wrong = "is there already" if place in barriers.table else ""
            if not 1 <= count <= MAX_COUNT:
                wrong = f"would expect {count} arrivals; 1 to {MAX_COUNT} are possible"
            if wrong:
                line = chunk.launch.where(pc)
                raise SimulationError(
                    faults.MBARRIER,
                    f"{chunk.name(lane)} at {at(line)}: the one at byte {place[1]} {wrong}",
                    line,
                )
            barrier = MBarrier(*place, lane, count, count)
            if chunk.checks is not None:
                barrier.engine = chunk.checks.clocks.engine(place[0], place)
            barriers.table[place] = barrier

    return change


def _arrive(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    mods = instruction.mods
    state, address, *rest = instruction.operands
    expects = "expect_tx" in mods
    get = decoder.get(rest[0], "u32") if rest else None
    places, put = places_of(decoder, instruction, address), decoder.put_lanes(state, "u64")
    access = Access(pc, "cluster", 8, False, native.STRONG)
    drops, completes = mods[0] == "arrive_drop", "noComplete" not in mods
    releases = "relaxed" not in mods

    def arrive(chunk: Chunk, group: Group) -> Outcome:
        barriers, lanes = chunk.extension(MBarriers), group.lanes
        where = blocks_and_offsets(chunk, access, places(chunk, group), lanes)
        numbers = chunk.of_lanes(get(chunk.registers), group) if get else np.ones(lanes.size, int)
        states = np.zeros(lanes.size, np.uint64)
        woken: list[tuple[int, Group]] = []
        for place, members in _together(where).items():
            barrier = barriers.find(pc, *place, int(lanes[members[0]]))
            arrivals = np.ones(lanes.size, int) if expects else numbers.astype(int)
            # All at once, unless a phase ends among them.
            together = arrivals[members].sum() <= barrier.pending
            for part in [members] if together else [[i] for i in members]:
                lane = int(lanes[part[0]])
                before = np.cumsum(arrivals[part]) - arrivals[part]
                states[part] = barrier.phase << _PENDING_BITS | barrier.pending - before
                if releases and chunk.checks is not None:
                    chunk.checks.clocks.leave_at(barrier.gathering, lanes[part])
                if expects:
                    barriers.count_bytes(barrier, int(numbers[part].sum()), pc, lane)
                count = int(arrivals[part].sum())
                barrier.count -= count if drops else 0
                phase = barrier.phase
                woken += barriers.arrive(barrier, count, pc, lane)
                if not completes and barrier.phase != phase:
                    line = chunk.launch.where(pc)
                    raise SimulationError(
                        faults.MBARRIER,
                        f"{chunk.name(lane)} at {at(line)} ends a phase despite .noComplete",
                        line,
                    )
        put(chunk, states, group)
        return [(pc + 1, group), *woken] if woken else None

    return arrive


def _together(places: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """The positions of each place in a list."""
    members: dict[tuple[int, int], list[int]] = {}
    for i, place in enumerate(places):
        members.setdefault(place, []).append(i)
    return members


def _transactions(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    places = places_of(decoder, instruction, instruction.operands[0])
    get = decoder.get(instruction.operands[1], "u32")
    access = Access(pc, "cluster", 8, False, native.STRONG)
    sign = 1 if instruction.mods[0] == "expect_tx" else -1

    def change(chunk: Chunk, group: Group) -> Outcome:
        barriers, lanes = chunk.extension(MBarriers), group.lanes
        where = blocks_and_offsets(chunk, access, places(chunk, group), lanes)
        sizes = chunk.of_lanes(get(chunk.registers), group)
        woken: list[tuple[int, Group]] = []
        for place, size, lane in zip(where, sizes.tolist(), lanes.tolist(), strict=True):
            barrier = barriers.find(pc, *place, lane)
            barriers.count_bytes(barrier, sign * size, pc, lane)
            woken += barriers.end_phase(barrier)
        return [(pc + 1, group), *woken] if woken else None

    return change


def _wait(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    mods = instruction.mods
    target, address, wanted = instruction.operands[:3]
    by_parity, parks = "parity" in mods, mods[0] == "try_wait"
    places, put = places_of(decoder, instruction, address), decoder.put(target, "pred")
    get: Getter = decoder.get(wanted, "u32" if by_parity else "u64")
    access = Access(pc, "cluster", 8, False, native.STRONG)
    acquires = "relaxed" not in mods

    def wait(chunk: Chunk, group: Group) -> Outcome:
        barriers, lanes = chunk.extension(MBarriers), group.lanes
        where = blocks_and_offsets(chunk, access, places(chunk, group), lanes)
        values = chunk.of_lanes(get(chunk.registers), group).tolist()
        over = np.zeros(lanes.size, bool)
        for place, members in _together(where).items():
            barrier = barriers.find(pc, *place, int(lanes[members[0]]))
            for i in members:
                over[i] = (
                    (barrier.phase & 1) != values[i] & 1
                    if by_parity
                    else barrier.phase > values[i] >> _PENDING_BITS
                )
            yes, no = lanes[members][over[members]], lanes[members][~over[members]]
            if yes.size and acquires and chunk.checks is not None:
                chunk.checks.clocks.take_from(barrier.ended, yes)
            if no.size and parks:
                chunk.waiting_at[no] = pc
                barrier.waiting.append(Waiting(pc, no, put, acquires))
        if over.all():
            put(chunk, np.bool_(True), group)
            return None
        result = np.zeros(chunk.size, bool)
        result[lanes[over]] = True
        if parks:
            part = group_of(result)
            put(chunk, result, part)
            return [(pc + 1, part)]
        put(chunk, result, group)
        chunk.polled = True
        return None

    return wait


@builder("fence.proxy", "fence.mbarrier_init")
def _proxy_fence(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """What threads wrote becomes visible to asynchronous copies; no other proxy is simulated."""
    everything = "async" in [m.partition("__")[0] for m in instruction.mods]
    if not everything and "mbarrier_init" not in instruction.mods:
        return lambda chunk, group: None

    def fence(chunk: Chunk, group: Group) -> None:
        if chunk.checks is not None and chunk.checks.checker.knowledge.clocks:
            chunk.extension(MBarriers).fence(group.lanes)
            if everything:
                chunk.checks.clocks.fence_proxy(group.lanes)

    return fence
