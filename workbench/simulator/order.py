"""What is known to have happened before what: the order that barriers and flags make.

`Counters` is enough for kernels whose threads meet at barriers of their whole block or warp: it
counts these. `Clocks` is for all others, those with barriers of some threads, mbarriers, clusters
or asynchronous operations: every thread has a clock, and knows up to when it has seen what each
other thread of its cluster did. Both pass on, through values that one block releases and another
acquires, what is known of other blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.simulator.native import BLOCK, FIRST_ENGINE, WARP
from workbench.simulator.ptx import Instruction, Program

if TYPE_CHECKING:
    from workbench.simulator.engine import Chunk, Launch

Array = Any  # numpy.ndarray
MAX_KNOWN = (
    1 << 24
)  # numbers; if blocks would have to know more of each other, they are not checked
_NEVER, _ALWAYS = 0, 1  # what is known between blocks that have nothing to tell each other


def _passes_on(instruction: Instruction) -> bool:
    """Whether an instruction may order the blocks of a grid."""
    if instruction.op == "fence":
        return not {"proxy", "mbarrier_init"} & {*instruction.mods}
    return instruction.op in ("atom", "red", "membar") or (
        instruction.op in ("ld", "st")
        and bool({"acquire", "release", "relaxed", "volatile"} & {*instruction.mods})
    )


def synchronises(program: Program) -> bool:
    """Whether blocks of a program may wait for each other."""
    return any(map(_passes_on, program.instructions))


def needs_clocks(program: Program, cluster: int) -> bool:
    """Whether threads meet otherwise than in whole blocks and warps."""
    return cluster > 1 or any(
        i.op in ("mbarrier", "wgmma")
        or (i.op == "cp" and "bulk" in i.mods)
        or (i.op in ("bar", "barrier") and "warp" not in i.mods and len(i.operands) > 1
            and "red" not in i.mods)
        for i in program.instructions
    )  # fmt: skip


class Knowledge:
    """What blocks of a launch know of each other.

    Attributes
    ----------
    clock, owner : int64 arrays
        See `native.track`; `clock` has one column where nothing is kept.
    published : dict
        What whoever acquires the value at an address learns.
    complete : bool
        Whether `clock` is what it should be: False where it would be too large.
    """

    def __init__(self, launch: Launch) -> None:
        program, grid = launch.code.program, launch.grid
        self.clocks = needs_clocks(program, launch.cluster)
        shape = (grid, grid * launch.threads) if self.clocks else (2 * grid, grid)
        wanted = synchronises(program) and (self.clocks or grid > 1)
        self.complete = not wanted or shape[0] * shape[1] <= MAX_KNOWN
        self.clock = np.full((1, 1), _NEVER if self.complete else _ALWAYS, np.int64)
        if wanted and self.complete:
            self.clock = np.zeros(shape, np.int64)
        self.owner = np.full((1, 1) if self.clocks else self.clock.shape, -1, np.int64)
        self.published: dict[int, Any] = {}

    @property
    def kept(self) -> bool:
        """Whether there is anything to pass on."""
        return self.clock.shape[1] > 1


class Order:
    """What both kinds have in common: values that are released and acquired.

    Attributes
    ----------
    barriers, warp_barriers : int64 arrays
        How many each block and each warp has passed.
    times, seen : arrays
        Of `Clocks`, see `native.track`; else empty.
    acquired : int64 array
        1 for lanes that know more of other blocks than their own block does.
    """

    def __init__(self, knowledge: Knowledge, chunk: Chunk) -> None:
        self.knowledge, self.chunk = knowledge, chunk
        self.barriers = np.ones(chunk.blocks, np.int64)
        self.warp_barriers = np.ones(chunk.size // WARP, np.int64)
        self.acquired = np.zeros(chunk.size, np.int64)
        self.times = np.zeros(0, np.int64)
        self.seen = np.zeros((0, 0, 0), np.int32)
        self._fenced_lanes = np.zeros(chunk.size, bool)
        self._relaxed: dict[int, list[Any]] = {}

    def release(self, lanes: Array, addresses: Array, relaxed: bool) -> None:
        """Lanes write a value: who acquires it knows what came before it."""
        if not self.knowledge.kept:
            return
        published = self.knowledge.published
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            if relaxed and not self._fenced_lanes[lane]:
                continue
            news = self._news(lane)
            published[address] = self._joined(published.get(address), news)

    def acquire(self, lanes: Array, addresses: Array, relaxed: bool) -> None:
        """Lanes read a value: they know what its writers knew, once a fence follows if relaxed."""
        published = self.knowledge.published
        if not published:
            return
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            if address in published:
                if relaxed and not self._fenced_lanes[lane]:
                    self._relaxed.setdefault(lane, []).append(published[address])
                else:
                    self._learn(lane, published[address])

    def fence(self, lanes: Array) -> None:
        """Relaxed accesses of these lanes count as ordered from here on."""
        self._fenced_lanes[lanes] = True
        for lane in lanes.tolist() if self._relaxed else ():
            for news in self._relaxed.pop(lane, ()):
                self._learn(lane, news)

    def pass_barrier(self, blocks: Array) -> None:
        """All threads of some blocks have met."""
        raise NotImplementedError

    def pass_warp_barrier(self, lanes: Array) -> None:
        """These lanes have met those of their warps."""
        raise NotImplementedError

    def _news(self, lane: int) -> Any:
        raise NotImplementedError

    def _joined(self, old: Any, news: Any) -> Any:
        raise NotImplementedError

    def _learn(self, lane: int, news: Any) -> None:
        raise NotImplementedError


class Counters(Order):
    """The order of kernels that have barriers of whole blocks and warps only."""

    def pass_barrier(self, blocks: Array) -> None:
        """All threads of some blocks have met: what some have acquired, all of them know now."""
        self.barriers[blocks] += 1
        if self.knowledge.kept:
            rows = 2 * (self.chunk.first + blocks)
            self.knowledge.clock[rows] = self.knowledge.clock[rows + 1]
            self.knowledge.owner[rows] = self.knowledge.owner[rows + 1]
            self.acquired.reshape(self.chunk.blocks, -1)[blocks] = 0

    def pass_warp_barrier(self, lanes: Array) -> None:
        """These lanes have met those of their warps."""
        self.warp_barriers[np.unique(lanes // WARP)] += 1

    def _news(self, lane: int) -> Any:
        chunk, knowledge = self.chunk, self.knowledge
        local_block, thread = divmod(lane, chunk.threads)
        block = chunk.first + local_block
        row = 2 * block + self.acquired[lane]
        known, source = knowledge.clock[row].copy(), knowledge.owner[row].copy()
        known[block] = self.barriers[local_block]
        source[block] = block << BLOCK | thread
        return known, source

    def _joined(self, old: Any, news: Any) -> Any:
        if old is None:
            return news
        newer = news[0] > old[0]
        return np.where(newer, news[0], old[0]), np.where(newer, news[1], old[1])

    def _learn(self, lane: int, news: Any) -> None:
        row = 2 * (self.chunk.first + lane // self.chunk.threads) + 1
        clock, owner = self.knowledge.clock, self.knowledge.owner
        clock[row], owner[row] = self._joined((clock[row], owner[row]), news)
        self.acquired[lane] = 1


class Clocks(Order):
    """The order of all other kernels.

    Attributes
    ----------
    seen : int32 array of shape (lanes, blocks of a cluster, threads + engines)
        Up to when each lane knows what each thread of its cluster did.
    fenced : int32 array
        The same for what is visible to asynchronous operations too: `fence.proxy.async`.
    """

    def __init__(self, knowledge: Knowledge, chunk: Chunk) -> None:
        super().__init__(knowledge, chunk)
        cluster = chunk.launch.cluster
        self.times = np.ones(chunk.size, np.int64)
        self.seen = np.zeros((chunk.size, cluster, chunk.threads), np.int32)
        self.fenced = np.zeros_like(self.seen)
        self._places: dict[Hashable, tuple[Array, Array]] = {}
        self._engines: dict[tuple[int, Hashable], int] = {}
        self._engines_of = [0] * chunk.blocks
        lanes = np.arange(chunk.size)
        self._rank = lanes // chunk.threads % cluster
        self._thread = lanes % chunk.threads

    def leave_at(self, place: Hashable, lanes: Array) -> None:
        """Lanes of one cluster let whoever comes to a place know what they know."""
        self.seen[lanes, self._rank[lanes], self._thread[lanes]] = self.times[lanes]
        news = self.seen[lanes].max(0), self.fenced[lanes].max(0)
        self._leave(place, news)
        self.times[lanes] += 1

    def _leave(self, place: Hashable, news: tuple[Array, Array]) -> None:
        if place in self._places:
            old = self._places[place]
            news = _latest(old[0], news[0]), _latest(old[1], news[1])
        self._places[place] = news

    def take_from(self, place: Hashable, lanes: Array) -> None:
        """Lanes learn what was left at a place."""
        if place in self._places:
            for mine, news in zip((self.seen, self.fenced), self._places[place], strict=True):
                part = mine[lanes]
                width = news.shape[1]
                np.maximum(part[..., :width], news, out=part[..., :width])
                mine[lanes] = part

    def move(self, old: Hashable, new: Hashable) -> None:
        """What was left at one place is at another from now on."""
        if old in self._places:
            self._leave(new, self._places.pop(old))

    def forget(self, place: Hashable) -> None:
        """Nobody will come to a place any more."""
        self._places.pop(place, None)

    def _meet(self, lanes: Array) -> None:
        self.leave_at("here", lanes)
        self.take_from("here", lanes)
        self.forget("here")

    def pass_barrier(self, blocks: Array) -> None:
        """All threads of some blocks have met."""
        threads = self.chunk.threads
        for block in blocks.tolist():
            self._meet(np.arange(block * threads, (block + 1) * threads))

    def pass_warp_barrier(self, lanes: Array) -> None:
        """These lanes have met those of their warps."""
        breaks = np.flatnonzero(np.diff(lanes // WARP)) + 1
        for part in np.split(lanes, breaks):
            self._meet(part)

    def fence_proxy(self, lanes: Array) -> None:
        """What these lanes know of is visible to asynchronous operations."""
        self.seen[lanes, self._rank[lanes], self._thread[lanes]] = self.times[lanes]
        self.fenced[lanes] = np.maximum(self.fenced[lanes], self.seen[lanes])
        self.times[lanes] += 1

    # -------------------------------------------------------------------------------- engines

    def engine(self, block: int, key: Hashable) -> int:
        """Number, in its block, of a stream of asynchronous operations."""
        if (block, key) not in self._engines:
            number = self._engines_of[block]
            self._engines_of[block] += 1
            self._engines[block, key] = FIRST_ENGINE + number
            missing = self.chunk.threads + number + 1 - self.seen.shape[2]
            if missing > 0:
                more = ((0, 0), (0, 0), (0, 8))
                self.seen, self.fenced = np.pad(self.seen, more), np.pad(self.fenced, more)
        return self._engines[block, key]

    def who(self, block: int, in_block: int) -> int:
        """A thread or an engine as `native.track` numbers it."""
        return (self.chunk.first + block) << BLOCK | in_block

    def _column(self, engine: int) -> int:
        return self.chunk.threads + engine - FIRST_ENGINE

    def finish(self, place: Hashable, block: int, engine: int, count: int) -> None:
        """Let whoever comes to a place know that `count` operations of an engine are done."""
        news = np.zeros(self.seen.shape[1:], np.int32)
        news[block % self.chunk.launch.cluster, self._column(engine)] = count
        self._leave(place, (news, np.zeros_like(news)))

    def see(self, lanes: Array, block: int, engine: int, count: int) -> None:
        """Lanes know that `count` operations of an engine of their block are done."""
        rank, column = block % self.chunk.launch.cluster, self._column(engine)
        self.seen[lanes, rank, column] = np.maximum(self.seen[lanes, rank, column], count)

    def known_to(self, lanes: Array) -> tuple[Array, Array]:
        """What all of some lanes know: `seen` and `fenced`."""
        self.seen[lanes, self._rank[lanes], self._thread[lanes]] = self.times[lanes]
        if lanes.size == 1:
            return self.seen[lanes], self.fenced[lanes]
        return self.seen[lanes].min(0, keepdims=True), self.fenced[lanes].min(0, keepdims=True)

    # --------------------------------------------------------------------------- other blocks

    def _cluster(self, lane: int) -> slice:
        """The columns of `Knowledge.clock` that a lane's own cluster has."""
        size = self.chunk.launch.cluster * self.chunk.threads
        start = (self.chunk.first * self.chunk.threads + lane) // size * size
        return slice(start, start + size)

    def _news(self, lane: int) -> Any:
        threads = self.chunk.threads
        known = self.knowledge.clock[self.chunk.first + lane // threads].copy()
        self.seen[lane, self._rank[lane], self._thread[lane]] = self.times[lane]
        known[self._cluster(lane)] = self.seen[lane, :, :threads].reshape(-1)
        self.times[lane] += 1
        return known

    def _joined(self, old: Any, news: Any) -> Any:
        return news if old is None else np.maximum(old, news)

    def acquire(self, lanes: Array, addresses: Array, relaxed: bool) -> None:
        """Lanes read a value: if what its writers knew is not kept, they are taken to know all."""
        if self.knowledge.complete:
            super().acquire(lanes, addresses, relaxed)
            return
        size = self.chunk.launch.cluster * self.chunk.threads
        for lane in lanes.tolist():
            first = lane // size * size
            own = self.seen[lane, :, : self.chunk.threads]
            own[...] = self.times[first : first + size].reshape(own.shape)

    def _learn(self, lane: int, news: Any) -> None:
        # What one thread has learnt of other blocks, its whole block is taken to know.
        threads = self.chunk.threads
        row = self.knowledge.clock[self.chunk.first + lane // threads]
        np.maximum(row, news, out=row)
        own = self.seen[lane, :, :threads]
        np.maximum(own, news[self._cluster(lane)].reshape(own.shape), out=own)


def _latest(a: Array, b: Array) -> Array:
    """The later of what two know; the one that knew of fewer engines knows nothing of the rest."""
    if a.shape[1] < b.shape[1]:
        a, b = b, a
    result = a.copy()
    np.maximum(result[:, : b.shape[1]], b, out=result[:, : b.shape[1]])
    return result
