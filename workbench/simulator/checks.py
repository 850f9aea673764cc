"""Who touched memory last: races, reads of what nobody wrote, copies still under way.

Every granule of memory (the smallest piece that the kernel accesses) has a shadow: the last write
and the last reads, each with thread, instruction and a stamp that says when. Two accesses by
different threads, at least one of them a write, race unless something puts them in order
(`order`), whether or not the values came out right this time. Asynchronous operations, which write
and read on their own, are noted like threads; what they write may not be touched before it has
arrived, and what they read may not be overwritten before they have read it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.simulator import native
from workbench.simulator.memory import GlobalMemory, Region
from workbench.simulator.native import INITIAL, NOBODY, SHADOW_COLUMNS, WRITE
from workbench.simulator.order import Clocks, Counters, Knowledge, Order
from workbench.simulator.ptx import SIZES, Program

if TYPE_CHECKING:
    from workbench.simulator.engine import Chunk, Launch

Array = Any  # numpy.ndarray
MAX_SHADOW = 1 << 22  # granules of global memory; more are not checked for races


class UncheckedWarning(UserWarning):
    """Something is too large for the simulator to check."""


def shared_granule(program: Program) -> int:
    """Bytes of the smallest access to shared memory in a program, at most 4."""
    sizes = (
        SIZES.get(instruction.mods[-1], 4)
        for instruction in program.instructions
        if instruction.op in ("ld", "st", "atom", "red") and "global" not in instruction.mods
    )
    return min(4, *sizes, 4)


class Checker:
    """The shadow of global memory, through all launches of a call.

    Attributes
    ----------
    shadow : int64 array
        See `native.track`. Only memory that kernels may write to has one.
    starts, shifts : int64 arrays
        Of each region: its first row less what its offset would make of it, and log2 of the
        bytes of a row.
    knowledge : Knowledge
        Of the launch under way.
    """

    knowledge: Knowledge

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.starts = np.full(len(memory.regions), native.NO_SHADOW, np.int64)
        self.shifts = np.zeros(len(memory.regions), np.int64)
        initial: list[Array] = []
        rows = 0
        for i, region in enumerate(memory.regions[1:], start=1):
            shift = region.itemsize.bit_length() - 1
            first, last = region.start >> shift, (region.start + region.size) >> shift
            count = last - first + 1
            if not region.buffer.writable:
                continue
            if rows + count > MAX_SHADOW:
                _warn_of_size(region)
                continue
            self.starts[i] = rows - first
            self.shifts[i] = shift
            fill = INITIAL if region.buffer.written else NOBODY
            initial.append(np.full(count, fill, np.int64))
            rows += count
        self.shadow = np.full((max(rows, 1), SHADOW_COLUMNS), NOBODY, np.int64)
        if initial:
            self.shadow[:, WRITE] = np.concatenate(initial)
        self.granule = 4

    def begin(self, launch: Launch) -> None:
        """A new launch: everything before it is done."""
        self.shadow[:, WRITE] = np.where(self.shadow[:, WRITE] == NOBODY, NOBODY, INITIAL)
        self.shadow[:, WRITE + 2 :: 2] = NOBODY
        self.knowledge = Knowledge(launch)
        if not self.knowledge.complete:
            warnings.warn(
                f"races between the {launch.grid} blocks of {launch.code.program.entry.name} are "
                "not looked for: too many of them synchronise with each other",
                UncheckedWarning,
                stacklevel=2,
            )
        self.granule = shared_granule(launch.code.program)


def _warn_of_size(region: Region) -> None:
    warnings.warn(
        f"races in {region.name} {region.buffer.array.shape} are not looked for: outputs and "
        f"workspaces are watched up to {MAX_SHADOW} elements in all",
        UncheckedWarning,
        stacklevel=3,
    )


class SharedChecks:
    """The shadow of the shared memories of a chunk, and the order of what its threads do.

    Attributes
    ----------
    busy : int64 array
        See `native.track`; empty until something reads asynchronously.
    """

    def __init__(self, checker: Checker, chunk: Chunk) -> None:
        self.checker = checker
        self.chunk = chunk
        self.shift = checker.granule.bit_length() - 1
        rows = chunk.shared.size >> self.shift
        self.shadow = np.full((max(rows, 1), SHADOW_COLUMNS), NOBODY, np.int64)
        self.busy = np.zeros(0, np.int64)
        self._readings: list[tuple[Array, int]] = []
        kind = Clocks if checker.knowledge.clocks else Counters
        self.order: Order = kind(checker.knowledge, chunk)
        self.fault = np.zeros(3, np.int64)

    def shared(
        self, offsets: Array, lanes: Array, size: int, pc: int, flags: int, write: bool
    ) -> int:
        """Note accesses to shared memory; what is wrong with one of them (`fault` says which)."""
        counts = np.full(offsets.size, max(1, size >> self.shift))
        return self._track(self.shadow, offsets >> self.shift, counts, lanes, pc, flags, write)

    def global_(
        self, offsets: Array, lanes: Array, size: int, pc: int, flags: int, write: bool
    ) -> int:
        """The same in global memory."""
        checker = self.checker
        first, counts = native.granules_of(
            offsets, checker.memory.region_of, checker.starts, checker.shifts, size
        )
        return self._track(checker.shadow, first, counts, lanes, pc, flags, write)

    def _track(
        self, shadow: Array, first: Array, counts: Array, lanes: Array, pc: int, flags: int,
        write: bool,
    ) -> int:  # fmt: skip
        chunk, order, knowledge = self.chunk, self.order, self.checker.knowledge
        busy = self.busy if shadow is self.shadow else _NOT_BUSY
        code = native.track(
            shadow, busy, first, counts, lanes, chunk.first, chunk.threads, order.barriers,
            order.warp_barriers, order.times, order.seen, knowledge.clock, knowledge.owner,
            order.acquired, pc, flags, write, self.fault,
        )  # fmt: skip
        return int(code)

    # ----------------------------------------------------------------- asynchronous operations

    def engine(
        self, rows: Array, lanes: Array, who: int, now: int, pc: int, flags: int, write: bool
    ) -> int:
        """Note an access to shared memory by `who`, started by `lanes`; what is wrong with it.

        It is the `now`-th operation of its stream.
        """
        seen, fenced = self.clocks.known_to(lanes)
        clock, threads = self.checker.knowledge.clock, self.chunk.threads
        line = self.chunk.first + int(lanes[0]) // threads
        code = native.track_engine(
            self.shadow, self.busy, rows, np.ones_like(rows), who, now, threads, seen, fenced,
            clock, line, pc, flags, write, self.fault,
        )  # fmt: skip
        return int(code)

    def arrived(self, rows: Array, now: int) -> None:
        """What flew to these rows of shared memory is there, as the `now`-th operation."""
        self.shadow[rows, WRITE] &= ~native.FLYING
        self.shadow[rows, WRITE + 1] = now

    def arrived_global(self, offsets: Array, size: int) -> None:
        """What flew to global memory is there."""
        checker = self.checker
        first, counts = native.granules_of(
            offsets, checker.memory.region_of, checker.starts, checker.shifts, size
        )
        for i in range(int(counts.max(initial=0))):
            rows = first[(first >= 0) & (counts > i)] + i
            checker.shadow[rows, WRITE] &= ~native.FLYING

    def begin_reading(self, rows: Array, who: int, pc: int) -> None:
        """These rows of shared memory are being read: nobody may write to them."""
        if not self.busy.size:
            self.busy = np.full(self.shadow.shape[0], NOBODY, np.int64)
        tag = who << native.WHO | pc << native.PC
        self._readings.append((rows, tag))
        self.busy[rows] = tag

    def end_reading(self, rows: Array) -> None:
        """The operation that began to read exactly this array of rows has read them."""
        self._readings = [reading for reading in self._readings if reading[0] is not rows]
        self.busy[rows] = NOBODY
        for others, tag in self._readings:
            self.busy[others] = tag

    @property
    def clocks(self) -> Clocks:
        """The order of a kernel that `order.needs_clocks`."""
        assert isinstance(self.order, Clocks)
        return self.order


_NOT_BUSY = np.zeros(0, np.int64)
