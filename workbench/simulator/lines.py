"""Counts of a launch, added up by source line, by array and by class of instruction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.simulator.counts import BYTES, LEAST, REQUESTS, THREADS, TRANSACTIONS
from workbench.simulator.engine import Launch
from workbench.simulator.ops import is_float
from workbench.simulator.ptx import SIZES, Instruction, Location

# Classes of instructions, in the order in which they are shown.
FLOAT, INTEGER, MATRIX, GLOBAL, SHARED, LOCAL, EXCHANGE, BARRIER, BRANCH = (
    "float", "integer", "matrix", "global", "shared", "local", "exchange", "barrier", "branch"
)  # fmt: skip
CLASSES = (FLOAT, INTEGER, MATRIX, GLOBAL, SHARED, LOCAL, EXCHANGE, BARRIER, BRANCH)
_BY_OP = {
    **dict.fromkeys(("bra", "brx", "ret", "exit", "call"), BRANCH),
    **dict.fromkeys(("bar", "barrier", "membar", "fence", "mbarrier", "wgmma"), BARRIER),
    **dict.fromkeys(("shfl", "vote", "match", "redux", "elect", "activemask"), EXCHANGE),
    **dict.fromkeys(("mma", "wgmma.mma_async"), MATRIX),
    **dict.fromkeys(("ldmatrix", "stmatrix"), SHARED),
    "cp": GLOBAL,
}
_MEMORY = ("ld", "st", "ldu", "atom", "red")


def class_of(instruction: Instruction) -> str:
    """The class that an instruction counts for."""
    for name in (".".join((instruction.op, *instruction.mods[:1])), instruction.op):
        if name in _BY_OP:
            return _BY_OP[name]
    if instruction.op in _MEMORY:
        spaces = (GLOBAL, SHARED, LOCAL)
        return next((s for s in spaces if s in instruction.mods), _without_space(instruction))
    kinds = [m for m in instruction.mods if m in SIZES]
    # Moves and selections of floats are done by the integer units.
    computes = instruction.op not in ("mov", "selp", "ld")
    return FLOAT if kinds and computes and is_float(kinds[-1]) else INTEGER


def _stores(instruction: Instruction) -> bool:
    """Whether an instruction that accesses global memory writes to it."""
    if instruction.op == "cp":  # what is written is named first
        spaces = [m.partition("__")[0] for m in instruction.mods]
        return next((s for s in spaces if s in (GLOBAL, SHARED)), "") == GLOBAL
    return instruction.op in ("st", "atom", "red")


def _without_space(instruction: Instruction) -> str:
    return INTEGER if "param" in instruction.mods or "const" in instruction.mods else GLOBAL


@dataclass(slots=True)
class Traffic:
    """Memory accesses: sectors of 32 bytes in global memory, wavefronts in shared memory.

    Attributes
    ----------
    requests : int
        Instructions, each of a warp.
    transactions, least : int
        Sectors or wavefronts that they took, and what the same bytes take at best.
    """

    requests: int = 0
    threads: int = 0
    bytes: int = 0
    transactions: int = 0
    least: int = 0

    def add(self, row: Any) -> None:
        """Add a row of `Counts`."""
        self.requests += int(row[REQUESTS])
        self.threads += int(row[THREADS])
        self.bytes += int(row[BYTES])
        self.transactions += int(row[TRANSACTIONS])
        self.least += int(row[LEAST])

    @property
    def excess(self) -> int:
        """Transactions that another access pattern would not need; bank conflicts, if shared."""
        return self.transactions - self.least


@dataclass(slots=True)
class Line:
    """What a source line cost.

    Attributes
    ----------
    instructions : dict
        Instructions issued to warps, by class.
    """

    instructions: dict[str, int] = field(default_factory=dict)
    loads: Traffic = field(default_factory=Traffic)
    stores: Traffic = field(default_factory=Traffic)
    shared: Traffic = field(default_factory=Traffic)

    @property
    def issued(self) -> int:
        """All instructions."""
        return sum(self.instructions.values())

    def add(self, launch: Launch, pc: int) -> None:
        """Add the counts of one instruction."""
        counts, instruction = launch.counts, launch.code.program.instructions[pc]
        kind = class_of(instruction)
        self.instructions[kind] = self.instructions.get(kind, 0) + int(counts.warps[pc])
        (self.stores if _stores(instruction) else self.loads).add(counts.global_[pc])
        self.shared.add(counts.shared[pc])


def total(launches: Iterable[Launch]) -> Line:
    """The counts of whole launches."""
    everything = Line()
    for launch in launches:
        for pc in range(len(launch.code.steps)):
            everything.add(launch, pc)
    return everything


def by_line(launches: Iterable[Launch], file: str, *, innermost: bool = False) -> dict[int, Line]:
    """The counts of each line of a source file, by its number.

    What was inlined counts for the line that it was inlined into: the outermost of `file`, or the
    `innermost`, where a file of helpers is looked at.
    """
    lines: dict[int, Line] = {}
    for launch in launches:
        for pc, instruction in enumerate(launch.code.program.instructions):
            number = line_in(instruction.where, file, innermost=innermost)
            if number is not None and launch.counts.warps[pc]:
                lines.setdefault(number, Line()).add(launch, pc)
    return lines


def line_in(where: Location | None, file: str, *, innermost: bool = False) -> int | None:
    """The line of `file` (its name without folders) that a place is in or was inlined into."""
    chain = where.chain() if where is not None else ()
    found = [place.line for place in chain if Path(place.file).name == file]
    return found[0 if innermost else -1] if found else None


def by_array(launch: Launch) -> dict[str, tuple[Traffic, Traffic]]:
    """Loads and stores of each array that a launch touched."""
    arrays = {}
    for i, region in enumerate(launch.memory.regions):
        loads, stores = Traffic(), Traffic()
        loads.add(launch.counts.arrays[0, i])
        stores.add(launch.counts.arrays[1, i])
        if loads.requests or stores.requests:
            arrays[region.name] = loads, stores
    return arrays
