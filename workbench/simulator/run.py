"""Runs the launches of a kernel on NumPy arrays: what `launchers.Plan` is on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench import compile as compiler
from workbench import launchers
from workbench.compile import Entry
from workbench.launchers import Launch, Work
from workbench.problem import DTYPES, SIMULATOR_ARCH
from workbench.simulator import engine
from workbench.simulator.checks import Checker
from workbench.simulator.decode import decode
from workbench.simulator.engine import Code
from workbench.simulator.memory import Buffer, GlobalMemory
from workbench.simulator.ptx import parse
from workbench.simulator.tensormap import encode_tiled


@dataclass(frozen=True, slots=True)
class Options:
    """How to run.

    Attributes
    ----------
    checks : bool
        Look for races and for reads of unwritten memory, and count what memory accesses cost.
        Addresses are checked in any case.
    max_steps : int
        Instructions, each for a group of threads, after which a launch is given up.
    """

    checks: bool = True
    max_steps: int = engine.MAX_STEPS


_options = Options()


@contextmanager
def options(*, checks: bool = True, max_steps: int = engine.MAX_STEPS) -> Iterator[None]:
    """Set how the simulator runs within a ``with`` block.

    Parameters
    ----------
    checks : bool
        Without, kernels run nearly twice as fast, and races go unnoticed. With, they are looked for
        in the first four million elements of outputs and workspaces, and between some 2900 blocks
        that wait for each other; `UncheckedWarning` says so where there are more.
    max_steps : int
        Instructions, each for a group of threads, after which a launch is given up.
    """
    global _options
    before, _options = _options, Options(checks, max_steps)
    try:
        yield
    finally:
        _options = before


@dataclass(frozen=True, slots=True)
class Record:
    """A launch that was run, with its counts."""

    language: str
    entry: Entry
    launch: engine.Launch


_recordings: list[list[Record]] = []


@contextmanager
def recording() -> Iterator[list[Record]]:
    """Collect every launch that the simulator runs within a ``with`` block."""
    records: list[Record] = []
    _recordings.append(records)
    try:
        yield records
    finally:
        _recordings.remove(records)


@functools.lru_cache(maxsize=256)
def load(language: str, entry: Entry) -> Code:
    """A kernel, compiled and made executable."""
    text, symbol = compiler.build_ptx(language, entry, SIMULATOR_ARCH)
    return decode(parse(text, symbol))


def run(
    work: Work, problem: Any, language: str, arrays: Mapping[str, Any], outputs: Collection[str]
) -> None:
    """Run everything that a kernel launches for a problem; fills the outputs in place.

    Parameters
    ----------
    work : Work
        What a launcher returned for `problem`.
    language : {"cuda", "numba"}
    arrays : mapping
        NumPy arrays by the names of the kernels' parameters; None is a null pointer.
    outputs : collection of str
        Names of the arrays that kernels may write to.

    Raises
    ------
    SimulationError
        At the first fault of a kernel.
    """
    buffers = {
        name: Buffer(array, name in outputs, name not in outputs)
        for name, array in arrays.items()
        if array is not None
    }
    for space in work.workspaces:
        dtype = DTYPES.get(space.dtype, np.dtype(space.dtype) if space.dtype == "int32" else None)
        array = np.zeros(space.shape, dtype)
        if not space.zeroed:
            array.view(np.uint8)[...] = 0xFF  # NaN, or -1: nothing that goes unnoticed
        buffers[space.name] = Buffer(array, True, space.zeroed)
    memory = GlobalMemory(buffers)
    checker = Checker(memory) if _options.checks else None
    values = launchers.argument_values(problem)
    for name, address in memory.addresses.items():
        values[name] = values[f"score.{name}"] = address
    for launch in work.launches:
        if launch.grid == 0:
            continue
        arguments = launch.entry.signature.pack(
            values | dict(launch.values) | _tensor_maps(launch, problem, memory)
        )
        started = engine.Launch(
            load(language, launch.entry), (launch.grid,), (launch.block,), launch.shared_memory,
            arguments, memory, checker, _options.max_steps,
        )  # fmt: skip
        engine.run(started)
        for records in _recordings:
            records.append(Record(language, launch.entry, started))
    memory.copy_back()


def _tensor_maps(launch: Launch, problem: Any, memory: GlobalMemory) -> dict[str, int]:
    """The words of a launch's tensor maps."""
    words = {}
    for chosen in launch.maps:
        encoded = encode_tiled(
            **launchers.tensor_map(problem, chosen, memory.addresses[chosen.array])
        )
        for i, word in enumerate(np.frombuffer(encoded, np.uint64)):
            words[f"{chosen.parameter}.{i}"] = int(word)
    return words
