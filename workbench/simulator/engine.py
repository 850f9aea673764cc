"""Runs a grid of thread blocks: who executes what, and when.

A chunk of blocks runs at a time, one lane a CUDA thread; a register is an array with one number a
lane. Lanes that stand at the same instruction form a group and execute it together. While there is
more than one group, the one with the lowest program counter goes first, so that groups meet again
where their paths join. Lanes that wait, at a barrier or for others of their warp, are parked until
all whom they wait for have come; a group that polls memory lets the others go first. What goes on
by itself, like an asynchronous copy, happens when no lane can go on, in an order drawn from a seed:
as late as possible, so that who forgets to wait for it sees that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from workbench.simulator import faults
from workbench.simulator.checks import Checker, SharedChecks
from workbench.simulator.counts import Counts
from workbench.simulator.faults import SimulationError
from workbench.simulator.memory import RANK, Bytes, GlobalMemory
from workbench.simulator.native import WARP
from workbench.simulator.ops import UnknownInstructionError
from workbench.simulator.ptx import Location, Program

Array = Any  # numpy.ndarray
Registers = list[Any]  # an array with one value a lane, or one NumPy scalar for all lanes
NOWHERE = -1
NAMED_BARRIERS = 16
MAX_STEPS = 200_000_000
LANES_PER_CHUNK = 8192  # as many as keep their registers in the cache
SHARED_PER_CHUNK = 2**23  # bytes: the shadow of shared memory takes sixteen times as many


class Group:
    """Lanes that execute together.

    Attributes
    ----------
    mask : array of bool or None
        Which lanes of the chunk; None is all of them.
    count : int
    """

    __slots__ = ("_lanes", "_warps", "count", "mask")

    def __init__(self, mask: Array | None, count: int) -> None:
        self.mask = mask
        self.count = count
        self._lanes: Array | None = None
        self._warps = 0

    @property
    def lanes(self) -> Array:
        """Their numbers."""
        if self._lanes is None:
            every = np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask)
            self._lanes = every
        return self._lanes

    @property
    def warps(self) -> int:
        """Number of warps that any of them belongs to."""
        if self._warps == 0:
            if self.mask is None:
                self._warps = self.count // WARP
            else:
                self._warps = int(self.mask.reshape(-1, WARP).any(1).sum())
        return self._warps


def group_of(mask: Array) -> Group:
    """The group of the lanes of a mask."""
    count = int(np.count_nonzero(mask))
    return Group(None if count == mask.size else mask, count)


def _words(mask: Array) -> Array:
    """A mask as a number of 32 bits for each warp."""
    return np.packbits(mask, bitorder="little").view(np.uint32)


# What an instruction does to a chunk: None to go on with the next instruction, else where the
# group goes: one place, or several parts of it to a place each.
Outcome = int | list[tuple[int, Group]] | None
Step = Callable[["Chunk", Group], Outcome]


@dataclass(slots=True)
class Code:
    """A program made executable.

    Attributes
    ----------
    steps : list of callable
        One an instruction.
    fixed : list of (int, str)
        Registers that hold what no instruction writes: ``%tid.x``, a variable's address.
    register_types : list of numpy.dtype
        Of all registers, `fixed` included.
    module_addresses : dict
        Of the module's variables and constants, in global memory.
    watched : list of int
        Registers that `wgmma` uses.
    """

    program: Program
    steps: list[Step]
    fixed: list[tuple[int, str]]
    register_types: list[np.dtype[Any]]
    module_addresses: dict[str, int]
    watched: list[int] = field(default_factory=list)


class Extension:
    """What some instructions keep for a chunk, like the mbarriers of its blocks."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def leave(self, lanes: Array, pc: int) -> None:  # noqa: ARG002
        """Lanes have exited."""
        return

    def give_up_waiting(self) -> bool:
        """No lane can go on and nothing is pending: whether some need not wait any longer."""
        return False

    def why_waiting(self, lanes: Array) -> str:  # noqa: ARG002
        """What lanes that wait in vain wait for, to end a message."""
        return ""


AnyExtension = TypeVar("AnyExtension", bound=Extension)


class Pending(Protocol):
    """Something asynchronous under way that needs no thread to come to its end."""

    def land(self, chunk: Chunk) -> list[tuple[int, Group]]:
        """Let it happen; the lanes that waited for it, and where they go on."""


@dataclass(slots=True)
class Launch:
    """Everything about one launch that its chunks share.

    Attributes
    ----------
    grid_shape, block_shape : tuple of int
        Up to three sizes, x first.
    shared_bytes : int
        Of dynamic shared memory.
    cluster : int
        Blocks of a cluster, neighbours in x.
    seed : int
        Of the order in which asynchronous operations happen.
    writes : int
        How often memory that others may poll has changed.
    """

    code: Code
    grid_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    shared_bytes: int
    params: bytes
    memory: GlobalMemory
    checker: Checker | None = None
    max_steps: int = MAX_STEPS
    lanes_per_chunk: int = LANES_PER_CHUNK
    cluster: int = 0  # as the kernel says
    seed: int = 0
    counts: Counts = field(init=False)
    writes: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.cluster = self.cluster or self.code.program.entry.cluster
        if self.grid_shape[0] % self.cluster:
            raise ValueError(
                f"grid {self.grid_shape} is no multiple of the cluster's {self.cluster} blocks"
            )
        for name, address in self.code.module_addresses.items():
            variable = self.code.program.variables[name]
            self.memory.set_module(address, variable.data.ljust(variable.size, b"\0"))
        if self.checker is not None:
            self.checker.begin(self)
        self.counts = Counts(len(self.code.steps), len(self.memory.regions))

    @property
    def grid(self) -> int:
        """Number of blocks."""
        return math.prod(self.grid_shape)

    @property
    def block(self) -> int:
        """Threads of a block."""
        return math.prod(self.block_shape)

    @property
    def threads(self) -> int:
        """Lanes of a block: its threads, rounded up to whole warps."""
        return -(-self.block // WARP) * WARP

    def where(self, pc: int) -> Location | None:
        """Source line of an instruction."""
        instructions = self.code.program.instructions
        return instructions[pc].where if 0 <= pc < len(instructions) else None


def run(launch: Launch) -> None:
    """Run all blocks of a launch.

    Raises
    ------
    SimulationError
        At the first fault.
    """
    with np.errstate(all="ignore"):
        polling: list[Chunk] = []
        for chunk in _chunks(launch):
            if not chunk.run():
                polling.append(chunk)
            polling = [waiting for waiting in polling if waiting is chunk or not waiting.run()]
        while polling:
            writes = launch.writes
            polling = [waiting for waiting in polling if not waiting.run()]
            if polling and launch.writes == writes:
                raise polling[0].endless_polling()
    launch.counts.finish()


def _chunks(launch: Launch) -> Iterator[Chunk]:
    shared = launch.code.program.shared_size + launch.shared_bytes
    blocks = min(launch.lanes_per_chunk // launch.threads, SHARED_PER_CHUNK // max(shared, 1))
    blocks = max(1, blocks // launch.cluster) * launch.cluster
    for first in range(0, launch.grid, blocks):
        yield Chunk(launch, first, min(blocks, launch.grid - first))


def _axes(name: str, number: Array, shape: tuple[int, ...], size_name: str) -> dict[str, Any]:
    """Special registers of a place, by its number, in up to three axes."""
    values: dict[str, Any] = {}
    for i, axis in enumerate("xyz"):
        size = shape[i] if i < len(shape) else 1
        values[f"%{name}.{axis}"] = (number % size).astype(np.uint32) if size > 1 else np.uint32(0)
        values[f"%{size_name}.{axis}"] = np.uint32(size)
        number = number // size
    return values


class Chunk:
    """Some neighbouring blocks, with their registers and memories.

    Attributes
    ----------
    first, blocks : int
        Number of the first block, and how many they are.
    registers : list
        One value a lane each, or one for all. An array is never changed, only replaced: several
        registers may hold the same.
    polled : bool
        Whether something has been read that another thread may change.
    """

    def __init__(self, launch: Launch, first: int, blocks: int) -> None:
        self.launch = launch
        self.first, self.blocks, self.threads = first, blocks, launch.threads
        self.size = blocks * self.threads
        program = launch.code.program
        self.random = random.Random(launch.seed + first)
        lanes = np.arange(self.size)
        self.block_of = lanes // self.threads
        thread = lanes % self.threads
        self.everyone = Group(None, self.size)
        self.registers: Registers = [kind.type(0) for kind in launch.code.register_types]
        for index, name in launch.code.fixed:
            self.registers[index] = self._fixed(name, thread)

        self.global_memory = launch.memory
        self.params = Bytes(len(launch.params))
        self.params.bytes[: len(launch.params)] = np.frombuffer(launch.params, np.uint8)
        static = program.shared_size
        if launch.shared_bytes:
            static = -(-static // WARP) * WARP
        self.shared_limit = static + launch.shared_bytes
        self.shared_stride = -(-self.shared_limit // WARP) * WARP
        self.shared = Bytes(self.shared_stride * blocks)
        self.local_limit = program.local_size
        self.local_stride = -(-self.local_limit // WARP) * WARP
        self.local = Bytes(self.local_stride * self.size)
        self.checks = None if launch.checker is None else SharedChecks(launch.checker, self)

        self.waiting_at = np.full(self.size, NOWHERE)  # a barrier, or something of the warp's
        self.waiting_for = np.full(self.size, NOWHERE)  # which barrier
        self.offered = np.zeros(self.size, np.uint32)  # what lanes bring to a reducing barrier
        self.arrived = np.zeros((blocks, NAMED_BARRIERS), np.int64)
        self.expected = np.zeros((blocks, NAMED_BARRIERS), np.int64)  # by who has arrived
        self.exited_at = np.where(thread < launch.block, NOWHERE, len(launch.code.steps))
        self.real = _words(self.exited_at == NOWHERE)  # of each warp, the lanes that are threads
        self.members = np.zeros(self.size, np.uint32)  # whom lanes wait for in their warp
        self.meetings: dict[int, tuple[Step, bool]] = {}  # where lanes wait for others of theirs
        self.groups: dict[int, Group] = {}
        self.yielded: dict[int, Group] = {}
        self.polled = False
        self.writes_seen = -1
        self.copies: list[Any] = []  # cp.async under way
        self.committed = np.zeros(self.size, np.int64)
        self.pending: list[Pending] = []  # what happens by itself
        self.extensions: dict[type[Extension], Extension] = {}
        self.add(launch.code.program.entry.start, group_of(self.exited_at == NOWHERE))

    def extension(self, kind: type[AnyExtension]) -> AnyExtension:
        """What a part of the instruction set keeps for a chunk: made when it is first used."""
        if kind not in self.extensions:
            self.extensions[kind] = kind(self)
        return self.extensions[kind]  # type: ignore[return-value]

    def _fixed(self, name: str, thread: Array) -> Any:
        launch, one, zero = self.launch, np.uint32(1), np.uint32(0)
        lane = (thread % WARP).astype(np.uint32)
        block, cluster = self.first + self.block_of, launch.cluster
        values: dict[str, Any] = {
            **_axes("tid", thread, launch.block_shape, "ntid"),
            **_axes("ctaid", block, launch.grid_shape, "nctaid"),
            **_axes("cluster_ctaid", block % cluster, (cluster,), "cluster_nctaid"),
            **_axes("clusterid", block // cluster,
                    (launch.grid_shape[0] // cluster, *launch.grid_shape[1:]), "nclusterid"),
            "%cluster_ctarank": (block % cluster).astype(np.uint32),
            "%cluster_nctarank": np.uint32(cluster), "%is_explicit_cluster": np.bool_(cluster > 1),
            "%laneid": lane, "%warpid": (thread // WARP).astype(np.uint32),
            "%nwarpid": np.uint32(self.threads // WARP),
            "%smid": zero, "%nsmid": one, "%gridid": np.uint64(0),
            "%clock": zero, "%clock_hi": zero, "%clock64": np.uint64(0),
            "%globaltimer": np.uint64(0), "%globaltimer_lo": zero, "%globaltimer_hi": zero,
            "%lanemask_eq": one << lane, "%lanemask_lt": (one << lane) - one,
            "%lanemask_le": (np.uint32(2) << lane) - one,
            "%lanemask_gt": ~((np.uint32(2) << lane) - one),
            "%lanemask_ge": ~((one << lane) - one),
            "%dynamic_smem_size": np.uint32(launch.shared_bytes),
        }  # fmt: skip
        if name in values:
            return values[name]
        if name.startswith("%return "):
            return zero
        if name == "%carry":
            return np.bool_(False)
        raise UnknownInstructionError(f"the register {name}")

    # ------------------------------------------------------------------------------- running

    def run(self) -> bool:
        """Go on until all lanes have exited (True) or all that have not are polling (False)."""
        launch = self.launch
        while True:
            while self.groups:
                pc = min(self.groups)
                self._run_group(pc, self.groups.pop(pc))
            if self.yielded and self.writes_seen != launch.writes:
                self.writes_seen = launch.writes
            elif not self._let_something_happen():
                break
            for pc, group in self.yielded.items():
                self.add(pc, group)
            self.yielded = {}
        if self.yielded:
            self.writes_seen = -1
            return False
        if (self.exited_at == NOWHERE).any():
            raise self._deadlock()
        return True

    def _let_something_happen(self) -> bool:
        """No lane can go on: one of the asynchronous operations under way comes to its end."""
        if not self.pending:
            return any(x.give_up_waiting() for x in self.extensions.values())
        chosen = self.pending.pop(self.random.randrange(len(self.pending)))
        for pc, group in chosen.land(self):
            self.add(pc, group)
        return True

    def _run_group(self, pc: int, group: Group) -> None:
        """Run a group until it meets another, parts, waits, polls in a loop, or exits."""
        steps, launch = self.launch.code.steps, self.launch
        start, others = pc, min(self.groups, default=len(steps))
        while True:
            outcome = steps[pc](self, group)
            pc += 1
            if outcome is None and pc != others:
                continue
            launch.counts.add(start, pc, group)
            launch.steps += pc - start
            if launch.steps > launch.max_steps:
                raise SimulationError(
                    faults.STEP_LIMIT,
                    f"{launch.max_steps} instructions executed, the last at "
                    f"{faults.at(launch.where(pc - 1))}",
                    launch.where(pc - 1),
                )
            if outcome is None:
                self.add(pc, group)
                return
            if isinstance(outcome, int):
                if outcome < others and (outcome >= pc or not self.polled):
                    start = pc = outcome
                    continue
                outcome = [(outcome, group)]
            for target, part in outcome:
                if target < pc and self.polled:
                    self._merge(self.yielded, target, part)
                else:
                    self.add(target, part)
            self.polled = False
            return

    def add(self, pc: int, group: Group) -> None:
        """Let a group go on at `pc`, together with whoever is there."""
        self._merge(self.groups, pc, group)

    def _merge(self, groups: dict[int, Group], pc: int, group: Group) -> None:
        if group.count == 0:
            return
        if group.mask is None:
            group = self.everyone
        elif pc in groups:
            group = group_of(groups[pc].mask | group.mask)
        groups[pc] = group

    # ------------------------------------------------------------------------------ registers

    def put(self, index: int, value: Any, group: Group) -> None:
        """Give a register a new value, computed for all lanes, in the lanes of a group."""
        if group.mask is None:
            self.registers[index] = value
        else:
            new = self._writable(index, value.dtype)
            np.putmask(new, group.mask, value)
            self.registers[index] = new

    def put_lanes(self, index: int, values: Array, group: Group) -> None:
        """The same with values for the lanes of the group only."""
        if group.mask is None:
            self.registers[index] = values
        else:
            new = self._writable(index, values.dtype)
            new[group.lanes] = values
            self.registers[index] = new

    def _writable(self, index: int, dtype: np.dtype[Any]) -> Array:
        old = self.registers[index]
        if old.dtype is not dtype:
            old = old.view(dtype)
        return np.full(self.size, old) if old.ndim == 0 else old.copy()

    def spread(self, value: Any) -> Array:
        """A value with one element a lane."""
        return value if value.ndim else np.full(self.size, value)

    def of_lanes(self, value: Any, group: Group) -> Array:
        """A value in the lanes of a group only."""
        if value.ndim == 0:
            return np.full(group.count, value)
        return value if group.mask is None else value[group.lanes]

    def part(self, group: Group, condition: Any) -> Group | None:
        """The lanes of a group where a condition holds; None if nowhere."""
        if condition.ndim == 0:
            return group if condition else None
        mask = condition if group.mask is None else condition & group.mask
        count = int(np.count_nonzero(mask))
        if count == group.count:
            return group
        return Group(mask, count) if count else None

    def mask_without(self, group: Group, part: Group) -> Array:
        """The lanes of a group that are not in a part of it."""
        others: Array = ~np.asarray(part.mask)
        return others if group.mask is None else group.mask & others

    def in_cluster(self, addresses: Array, lanes: Array) -> tuple[Array, Array]:
        """Block, among those of the chunk, and offset of addresses of shared memory.

        A rank that the cluster does not have gives an offset that no memory has.
        """
        own, cluster = self.block_of[lanes], self.launch.cluster
        rank, offsets = (addresses >> RANK) - 1, addresses & ((1 << RANK) - 1)
        blocks = np.where(rank < 0, own, own // cluster * cluster + rank)
        wrong = (rank >= cluster) | (addresses < 0)
        return np.where(wrong, own, blocks), np.where(wrong, -1, offsets)

    # ------------------------------------------------------------------------- leaving, waiting

    def exit(self, group: Group, pc: int) -> list[tuple[int, Group]]:
        """Lanes of a group have come to their end; who waited for them in their warp goes on."""
        self.exited_at[group.lanes] = pc
        for extension in self.extensions.values():
            extension.leave(group.lanes, pc)
        return [part for place in list(self.meetings) for part in self._go_on(place)]

    def arrive(
        self, group: Group, pc: int, barrier: int, expected: int | None, *, wait: bool = True
    ) -> Outcome:
        """Lanes come to a barrier of their blocks; with the last one of a block all go on."""
        if group.mask is None and wait and expected is None:
            self._pass_barrier(np.arange(self.blocks))
            return None
        lanes = group.lanes
        blocks = self.block_of[lanes]
        self._check_barrier(pc, lanes, barrier, expected)
        if wait:
            self.waiting_at[lanes], self.waiting_for[lanes] = pc, barrier
        self.arrived[:, barrier] += np.bincount(blocks, minlength=self.blocks)
        if self.checks is not None and expected is not None:
            for block in np.unique(blocks).tolist():
                place = ("barrier", barrier, block)
                self.checks.clocks.leave_at(place, lanes[blocks == block])
        need = self.launch.block if expected is None else expected
        complete = np.flatnonzero(self.arrived[:, barrier] >= need)
        released: list[tuple[int, Group]] = [] if wait else [(pc + 1, group)]
        if complete.size:
            released += self._release(complete, barrier, expected is None)
        return released

    def _check_barrier(self, pc: int, lanes: Array, barrier: int, expected: int | None) -> None:
        """All who come to a barrier must agree on how many they are: whole warps."""
        wrong = ""
        if barrier >= NAMED_BARRIERS:
            wrong = f"there are {NAMED_BARRIERS} of them"
        elif expected is not None and (expected <= 0 or expected % WARP):
            wrong = f"it expects {expected} threads, no multiple of {WARP}"
        else:
            need = self.launch.threads if expected is None else expected
            blocks = self.block_of[lanes]
            others = (self.arrived[blocks, barrier] > 0) & (self.expected[blocks, barrier] != need)
            if others.any():
                before = int(self.expected[blocks[others], barrier][0])
                wrong = f"it expects {need} threads, and those that came before expect {before}"
            self.expected[blocks, barrier] = need
        if wrong:
            where = self.launch.where(pc)
            raise SimulationError(
                faults.BARRIER,
                f"{self.name(int(lanes[0]))} comes to barrier {barrier} at {faults.at(where)}, but "
                f"{wrong}",
                where,
            )

    def _release(self, complete: Array, barrier: int, whole: bool) -> list[tuple[int, Group]]:
        self.arrived[complete, barrier] = 0
        waiting = self.waiting_for == barrier
        waiting &= np.isin(self.block_of, complete)
        places = self.waiting_at[waiting]
        self._check_warps(waiting)
        if whole:
            self._pass_barrier(complete)
        elif self.checks is not None:
            for block in complete.tolist():
                place = ("barrier", barrier, block)
                here = np.flatnonzero(waiting & (self.block_of == block))
                self.checks.clocks.take_from(place, here)
                self.checks.clocks.forget(place)
        released = []
        for place in np.unique(places):
            mask = waiting & (self.waiting_at == place)
            released.append((int(place) + 1, group_of(mask)))
        self.waiting_at[waiting] = self.waiting_for[waiting] = NOWHERE
        return released

    def _check_warps(self, waiting: Array) -> None:
        """A warp passes a barrier as one: its threads may not stand at different instructions."""
        table = np.where(waiting, self.waiting_at, NOWHERE).reshape(-1, WARP)
        least = np.where(table == NOWHERE, table.max(1, keepdims=True), table).min(1)
        apart = np.flatnonzero(least != table.max(1))
        if apart.size:
            warp = int(apart[0])
            lanes = np.arange(warp * WARP, (warp + 1) * WARP)
            first, second = (int(table[warp].max()), int(least[warp]))
            words = [
                f"{self._names(lanes[table[warp] == pc])} at {faults.at(self.launch.where(pc))}"
                for pc in (second, first)
            ]
            raise SimulationError(
                faults.SPLIT_WARP,
                f"in block {self.first + int(self.block_of[lanes[0]])} {' and '.join(words)}",
                self.launch.where(second),
                self.launch.where(first),
            )

    def _pass_barrier(self, blocks: Array) -> None:
        """Note that all threads of some blocks have met."""
        if self.checks is not None:
            self.checks.order.pass_barrier(blocks)

    def meet(
        self, group: Group, pc: int, members: Any, action: Step, *, everybody: bool = False
    ) -> Outcome:
        """Let `action` happen once all lanes of a warp that `members` (a bit each) names have come.

        Who has exited is not waited for unless `everybody` must be there.
        """
        if group.mask is None:
            return action(self, group)
        present = _words(group.mask)
        if ((present == 0) | (present == self.real)).all():
            return action(self, group)
        self.waiting_at[group.lanes] = pc
        self.members[group.lanes] = self.of_lanes(members, group)
        self.meetings[pc] = action, everybody
        return self._go_on(pc)

    def _go_on(self, pc: int) -> list[tuple[int, Group]]:
        """Let those lanes that wait at `pc` go on for whom nobody is missing."""
        action, everybody = self.meetings[pc]
        waiting = self.waiting_at == pc
        missing = self.real & ~_words(waiting)
        if not everybody:
            missing &= ~_words(self.exited_at != NOWHERE)
        ready = waiting & (self.members & np.repeat(missing, WARP) == 0)
        if not ready.any():
            return []
        self.waiting_at[ready] = NOWHERE
        if (ready == waiting).all():
            del self.meetings[pc]
        together = group_of(ready)
        action(self, together)
        return [(pc + 1, together)]

    # --------------------------------------------------------------------------------- faults

    def name(self, lane: int) -> str:
        """A lane as it is called in messages."""
        return f"thread {lane % self.threads} of block {self.first + lane // self.threads}"

    def _names(self, lanes: Array) -> str:
        """Like ``threads 0-31, 64``."""
        threads = lanes % self.threads
        breaks = np.flatnonzero(np.diff(threads) != 1) + 1
        runs = [(int(run[0]), int(run[-1])) for run in np.split(threads, breaks)]
        shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:8]]
        return f"thread{'s' * (threads.size > 1)} {', '.join(shown)}{', ...' * (len(runs) > 8)}"

    def _deadlock(self) -> SimulationError:
        """Who waits where for whom, in the first block that does not go on."""
        stuck = int(self.block_of[np.flatnonzero(self.exited_at == NOWHERE)[0]])
        lanes = np.flatnonzero(self.block_of == stuck)[: self.launch.block]
        waits, left, lines = [], [], []
        for place in np.unique(self.waiting_at[lanes]):
            if place != NOWHERE:
                instruction = self.launch.code.program.instructions[place]
                who = lanes[self.waiting_at[lanes] == place]
                why = [x.why_waiting(who) for x in self.extensions.values()]
                waits.append(
                    f"{self._names(who)} wait{'s' * (who.size == 1)} at {instruction.opcode} "
                    f"({faults.at(instruction.where)}){''.join(why)}"
                )
                lines.append(instruction.where)
        for place in np.unique(self.exited_at[lanes]):
            if place != NOWHERE:
                where = self.launch.where(int(place))
                left.append(
                    f"{self._names(lanes[self.exited_at[lanes] == place])} exited at "
                    f"{faults.at(where)}"
                )
                lines.append(where)
        return SimulationError(
            faults.DEADLOCK,
            f"in block {self.first + stuck} " + "; ".join(waits + left),
            lines[0],
            lines[1] if len(lines) > 1 else None,
        )

    def trapped(self, group: Group, pc: int) -> SimulationError:
        """A kernel stopped itself."""
        where = self.launch.where(pc)
        return SimulationError(
            faults.TRAP, f"{self.name(int(group.lanes[0]))} at {faults.at(where)}", where
        )

    def endless_polling(self) -> SimulationError:
        """Nobody is left who could change what this chunk's lanes poll."""
        pc, group = next(iter(self.yielded.items()))
        where = self.launch.where(pc)
        block = int(self.block_of[group.lanes[0]])
        lanes = group.lanes[self.block_of[group.lanes] == block]
        return SimulationError(
            faults.DEADLOCK,
            f"{self._names(lanes)} of block {self.first + block} poll memory at "
            f"{faults.at(where)}, and no thread is left that could change it",
            where,
        )
