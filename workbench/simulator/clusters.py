"""Clusters of blocks: addresses in each other's shared memory, barriers of all their threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.simulator.decode import Decoder, builder
from workbench.simulator.engine import NOWHERE, Chunk, Extension, Group, Outcome, Step, group_of
from workbench.simulator.memory import RANK, SHARED_BASE
from workbench.simulator.ops import UnknownInstructionError
from workbench.simulator.ptx import Instruction, Sym

Array = Any  # numpy.ndarray


@builder("mapa")
def _mapa(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """The address of the same place in the shared memory of another block of the cluster."""
    kind = instruction.mods[-1]
    target, address, rank = instruction.operands
    get, get_rank = decoder.get(address, kind), decoder.get(rank, "u32")
    put = decoder.put(target, kind)
    # An address that says itself which memory it is in, unless the instruction does.
    named = "shared__cluster" in instruction.mods
    base = 0 if named or isinstance(address, Sym) else SHARED_BASE
    result = 0 if named else SHARED_BASE

    width = np.dtype(np.uint32 if kind == "u32" else np.uint64)

    def map_address(chunk: Chunk, group: Group) -> None:
        offset = (get(chunk.registers).astype(np.int64) - base) & ((1 << RANK) - 1)
        place = (get_rank(chunk.registers).astype(np.int64) + 1) << RANK | offset
        put(chunk, (place + result).astype(width), group)

    return map_address


@builder("getctarank")
def _getctarank(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    target, address = instruction.operands
    kind = instruction.mods[-1]
    get, put = decoder.get(address, kind), decoder.put(target, "u32")
    base = 0 if "shared__cluster" in instruction.mods else SHARED_BASE

    def rank(chunk: Chunk, group: Group) -> None:
        ranks = (get(chunk.registers).astype(np.int64) - base >> RANK) - 1
        own = (chunk.first + chunk.block_of) % chunk.launch.cluster
        put(chunk, np.where(ranks < 0, own, ranks).astype(np.uint32), group)

    return rank


class ClusterBarriers(Extension):
    """The one barrier that every cluster has.

    Attributes
    ----------
    arrived : int64 array
        Threads of each cluster that have come, or exited, in the present phase.
    phases : int64 array
        How many have ended, of each cluster.
    own : int64 array
        The phase that each lane has arrived for last.
    """

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        clusters = chunk.blocks // chunk.launch.cluster
        self.cluster_of = chunk.block_of // chunk.launch.cluster
        self.gone = np.bincount(self.cluster_of[chunk.exited_at != NOWHERE], minlength=clusters)
        self.size = chunk.launch.cluster * chunk.threads
        self.arrived = self.gone.copy()
        self.phases = np.zeros(clusters, np.int64)
        self.own = np.full(chunk.size, -1)

    def arrive(self, lanes: Array, releases: bool) -> list[tuple[int, Group]]:
        """Lanes have come; who goes on because of that."""
        clusters = self.cluster_of[lanes]
        self.own[lanes] = self.phases[clusters]
        self.arrived += np.bincount(clusters, minlength=self.arrived.size)
        if releases and self.chunk.checks is not None:
            for cluster in np.unique(clusters).tolist():
                place = ("cluster", cluster, int(self.phases[cluster]))
                self.chunk.checks.clocks.leave_at(place, lanes[clusters == cluster])
        return self._end_phases()

    def leave(self, lanes: Array, pc: int) -> None:  # noqa: ARG002
        """Who has exited is not waited for."""
        clusters = np.bincount(self.cluster_of[lanes], minlength=self.arrived.size)
        self.arrived += clusters
        self.gone += clusters
        for place, group in self._end_phases():
            self.chunk.add(place, group)

    def _end_phases(self) -> list[tuple[int, Group]]:
        chunk = self.chunk
        complete = (self.arrived >= self.size) & (self.gone < self.size)
        if not complete.any():
            return []
        self.phases[complete] += 1
        self.arrived[complete] = self.gone[complete]
        chunk.launch.writes += 1
        waiting = (self.own >= 0) & complete[self.cluster_of] & (chunk.waiting_at != NOWHERE)
        waiting &= np.isin(chunk.waiting_at, self.waits)
        woken = []
        for place in np.unique(chunk.waiting_at[waiting]):
            mask = waiting & (chunk.waiting_at == place)
            woken.append((int(place) + 1, group_of(mask)))
            self.know(np.flatnonzero(mask))
        chunk.waiting_at[waiting] = NOWHERE
        return woken

    @property
    def waits(self) -> list[int]:
        """The instructions that wait at such a barrier."""
        instructions = self.chunk.launch.code.program.instructions
        return [i for i, x in enumerate(instructions) if x.op == "barrier" and "wait" in x.mods]

    def know(self, lanes: Array) -> None:
        """Lanes have waited for the phase that they arrived for."""
        if self.chunk.checks is not None:
            for cluster in np.unique(self.cluster_of[lanes]).tolist():
                here = lanes[self.cluster_of[lanes] == cluster]
                place = ("cluster", cluster, int(self.own[here[0]]))
                self.chunk.checks.clocks.take_from(place, here)
        self.own[lanes] = -1


@builder("barrier.cluster")
def _cluster_barrier(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """``barrier.cluster.arrive`` and ``barrier.cluster.wait``."""
    mods = instruction.mods
    if "arrive" in mods:
        releases = "relaxed" not in mods

        def arrive(chunk: Chunk, group: Group) -> Outcome:
            woken = chunk.extension(ClusterBarriers).arrive(group.lanes, releases)
            return [(pc + 1, group), *woken] if woken else None

        return arrive
    if "wait" not in mods:
        raise UnknownInstructionError(instruction.opcode)

    def wait(chunk: Chunk, group: Group) -> Outcome:
        barriers, lanes = chunk.extension(ClusterBarriers), group.lanes
        over = barriers.own[lanes] < barriers.phases[barriers.cluster_of[lanes]]
        over &= barriers.own[lanes] >= 0
        barriers.know(lanes[over])
        if over.all():
            return None
        chunk.waiting_at[lanes[~over]] = pc
        mask = np.zeros(chunk.size, bool)
        mask[lanes[over]] = True
        return [(pc + 1, group_of(mask))]

    return wait
