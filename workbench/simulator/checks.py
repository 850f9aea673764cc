"""Who touched which memory last: races, reads of what nobody wrote, copies still under way.

Every granule of memory (the smallest piece that the kernel accesses) has a shadow: the last write
and the last reads, each with thread, instruction and a stamp of how many barriers its block and
its warp had passed. Two accesses by different threads, at least one of them a write, are in order
if a barrier lies between them, if both are in one warp and a `bar.warp.sync` does, or, between
blocks, if the first block released and the second acquired a value after it. Otherwise they race,
whether or not the values came out right this time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.simulator import native
from workbench.simulator.memory import GlobalMemory
from workbench.simulator.native import INITIAL, NOBODY, SHADOW_COLUMNS, WRITE
from workbench.simulator.ptx import SIZES, Program

if TYPE_CHECKING:
    from workbench.simulator.engine import Chunk

Array = Any  # numpy.ndarray
MAX_SHADOW = 1 << 22  # granules of global memory; more are not checked for races
MAX_ORDERED_BLOCKS = 2048  # with more, blocks that synchronise are not checked against each other
_ORDERING = ("atom", "red", "membar", "fence")


def shared_granule(program: Program) -> int:
    """Bytes of the smallest access to shared memory in a program, at most 4."""
    sizes = (
        SIZES.get(instruction.mods[-1], 4)
        for instruction in program.instructions
        if instruction.op in ("ld", "st", "atom", "red") and "global" not in instruction.mods
    )
    return min(4, *sizes, 4)


def synchronises(program: Program) -> bool:
    """Whether blocks of a program may wait for each other."""
    return any(
        i.op in _ORDERING or "acquire" in i.mods or "release" in i.mods or "volatile" in i.mods
        for i in program.instructions
    )


class Checker:
    """The shadow of global memory, through all launches of a call.

    Attributes
    ----------
    shadow : int64 array
        See `native.track`. Only memory that kernels may write to has one.
    starts, shifts : int64 arrays
        Of each region: its first row less what its offset would make of it, and log2 of the
        bytes of a row.
    clock, owner : int64 arrays
        See `native.track`.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.starts = np.full(len(memory.regions), native.NO_SHADOW, np.int64)
        self.shifts = np.zeros(len(memory.regions), np.int64)
        initial: list[Array] = []
        rows = 0
        for i, region in enumerate(memory.regions[1:], start=1):
            shift = region.itemsize.bit_length() - 1
            first, last = region.start >> shift, (region.start + region.size) >> shift
            if region.buffer.writable and rows + last - first + 1 <= MAX_SHADOW:
                self.starts[i] = rows - first
                self.shifts[i] = shift
                fill = INITIAL if region.buffer.written else NOBODY
                initial.append(np.full(last - first + 1, fill, np.int64))
                rows += last - first + 1
        self.shadow = np.full((max(rows, 1), SHADOW_COLUMNS), NOBODY, np.int64)
        if initial:
            self.shadow[:, WRITE] = np.concatenate(initial)
        self.clock = self.owner = np.zeros((2, 1), np.int64)
        self.granule = 4
        self.published: dict[int, tuple[Array, Array]] = {}

    def begin(self, program: Program, grid: int) -> None:
        """A new launch: everything before it is done."""
        self.shadow[:, WRITE] = np.where(self.shadow[:, WRITE] == NOBODY, NOBODY, INITIAL)
        self.shadow[:, WRITE + 2 :: 2] = NOBODY
        blocks = grid if synchronises(program) and grid <= MAX_ORDERED_BLOCKS else 1
        self.clock = np.zeros((2 * blocks, blocks), np.int64)
        self.owner = np.full((2 * blocks, blocks), -1, np.int64)
        self.granule = shared_granule(program)
        self.published = {}


class SharedChecks:
    """The shadow of the shared memories of a chunk, and what its threads know of other blocks."""

    def __init__(self, checker: Checker, chunk: Chunk) -> None:
        self.checker = checker
        self.chunk = chunk
        self.shift = checker.granule.bit_length() - 1
        rows = chunk.shared.size >> self.shift
        self.shadow = np.full((max(rows, 1), SHADOW_COLUMNS), NOBODY, np.int64)
        self.acquired = np.zeros(chunk.size, np.int64)
        self.fenced = np.zeros(chunk.size, bool)
        self.relaxed: dict[int, list[tuple[Array, Array]]] = {}
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
        chunk, checker = self.chunk, self.checker
        code = native.track(
            shadow, first, counts, lanes, chunk.first * chunk.threads, chunk.threads,
            chunk.barriers, chunk.warp_barriers, checker.clock, checker.owner, self.acquired, pc,
            flags, write, self.fault,
        )  # fmt: skip
        return int(code)

    # ------------------------------------------------------------------ order between blocks

    def pass_barrier(self, blocks: Array) -> None:
        """What some threads of these blocks have acquired, all of them know now."""
        if self.checker.clock.shape[1] == 1:
            return
        rows = 2 * (self.chunk.first + blocks)
        self.checker.clock[rows] = self.checker.clock[rows + 1]
        self.checker.owner[rows] = self.checker.owner[rows + 1]
        self.acquired.reshape(self.chunk.blocks, -1)[blocks] = 0

    def release(self, lanes: Array, addresses: Array, relaxed: bool) -> None:
        """Lanes write a value: who acquires it knows what came before it in its block."""
        clock, owner, chunk = self.checker.clock, self.checker.owner, self.chunk
        if clock.shape[1] == 1:
            return
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            if relaxed and not self.fenced[lane]:
                continue
            block = chunk.first + lane // chunk.threads
            row = 2 * block + self.acquired[lane]
            known, source = clock[row].copy(), owner[row].copy()
            known[block] = chunk.barriers[lane // chunk.threads]
            source[block] = chunk.first * chunk.threads + lane
            if address in self.checker.published:
                known, source = _later(self.checker.published[address], (known, source))
            self.checker.published[address] = known, source

    def acquire(self, lanes: Array, addresses: Array, relaxed: bool) -> None:
        """Lanes read a value: they know what its writers knew, once a fence follows if relaxed."""
        published = self.checker.published
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            if address in published:
                if relaxed and not self.fenced[lane]:
                    self.relaxed.setdefault(lane, []).append(published[address])
                else:
                    self._learn(lane, published[address])

    def fence(self, lanes: Array) -> None:
        """Relaxed accesses of these lanes count as ordered from here on."""
        self.fenced[lanes] = True
        for lane in lanes.tolist() if self.relaxed else ():
            for news in self.relaxed.pop(lane, ()):
                self._learn(lane, news)

    def _learn(self, lane: int, news: tuple[Array, Array]) -> None:
        row = 2 * (self.chunk.first + lane // self.chunk.threads) + 1
        clock, owner = self.checker.clock, self.checker.owner
        clock[row], owner[row] = _later((clock[row], owner[row]), news)
        self.acquired[lane] = 1


def _later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """What somebody knows who knows both."""
    newer = b[0] > a[0]
    return np.where(newer, b[0], a[0]), np.where(newer, b[1], a[1])
