"""Hold the simulator against a GPU: whether results and counts are the same.

    python scripts/hardware.py --out found.json     # needs an NVIDIA GPU and ncu on the PATH
    python scripts/hardware.py --kernel attention_tiled --backend cuda

A few kernels run on small fixed problems, in the simulator and on the GPU. Their results are
compared bit by bit, and what the simulator counts for each launch stands beside the counters of
the hardware, read by Nsight Compute (ncu) without changing any clock. Where the two have a known
reason to differ, the table says it. The exit code tells whether everything could be measured, not
whether it agrees.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

import workbench
from workbench import compile as compiler
from workbench.problem import SIMULATOR_ARCH
from workbench.workload import Workload, random_inputs

# Lengths that no tile divides.
_ATTENTION: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "seqlen_q": 150, "seqlen_k": 200}
CASES = {
    "vector_add_vec4": Workload("vector_add", size=10_007),
    "attention_tiled": Workload("attention", **_ATTENTION),
    "attention_flash_simt": Workload("attention", **_ATTENTION),
    "attention_flash_mma": Workload("attention", dtype="bfloat16", **_ATTENTION),
}
RUN_SECONDS, ALL_SECONDS = 90, 300  # for one program on the GPU, and for all of them
TRIES = 4  # of ncu, each without the counters that the last one did not know
RESULTS = "results.npz"


class MeasureError(Exception):
    """Something could not be measured; the message says what."""


# ----------------------------------------------------------------------------- what is compared


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that the simulator counts and a GPU has a counter for.

    Attributes
    ----------
    chosen : callable
        Whether an instruction of PTX has a part in it.
    column : str
        Of the counts of an instruction: see `_columns`.
    counters : tuple of tuples of str
        What to ask ncu for. The first of them of which the GPU has everything counts; its parts are
        added up.
    why : str
        A known reason for a difference.
    """

    name: str
    chosen: Callable[[Any], bool]
    column: str
    counters: tuple[tuple[str, ...], ...]
    why: str = ""


OPCODES = "sass__inst_executed_per_opcode"  # a counter with a part for each opcode of the machine


def opcode(name: str) -> str:
    """The part of `OPCODES` for one opcode, written as if it was a counter of its own."""
    return f"{OPCODES}[{name}]"


def _is(*ops: str, space: str = "") -> Callable[[Any], bool]:
    def chosen(instruction: Any) -> bool:
        mods = [m.partition("__")[0] for m in instruction.mods]
        return instruction.op in ops and (not space or space in mods)

    return chosen


def _is_copy(instruction: Any) -> bool:
    """Whether it is a `cp.async` that copies, and none that waits."""
    return instruction.op == "cp" and "global" in instruction.mods


def _is_barrier(instruction: Any) -> bool:
    return instruction.op in ("bar", "barrier") and "warp" not in instruction.mods


def _is_special(instruction: Any) -> bool:
    """Whether the special-function unit does it in one instruction, or as part of several."""
    inexact = "approx" in instruction.mods or instruction.op in ("rcp", "div", "sqrt")
    return inexact and any(m in ("f32", "f64") for m in instruction.mods)


def _everything(_: Any) -> bool:
    return True


def _in_global(name: str, chosen: Callable[[Any], bool], op: str, why: str) -> list[Quantity]:
    """Requests and sectors; of LDGSTS there may be counters by its way, through L1 or past it."""
    found = []
    for unit in ("requests", "sectors"):
        tail = f"{unit}_pipe_lsu_mem_global_op_{op}"
        counters: list[tuple[str, ...]] = [(f"l1tex__t_{tail}.sum",)]
        if op == "ldgsts":
            names = [f"{prefix}_t_{tail}" for prefix in ("l1tex_", *_PER_OPCODE)]
            counters += [(f"{x}.sum",) for x in names[1:]]
            counters += [(f"{x}_cache_access.sum", f"{x}_cache_bypass.sum") for x in names]
        found.append(Quantity(f"{name}: {unit}", chosen, unit, tuple(counters), why))
    return found


def _in_shared(
    name: str, chosen: Callable[[Any], bool], op: str, prefixes: Sequence[str], *why: str
) -> list[Quantity]:
    """Wavefronts and bank conflicts, with a reason each."""
    tails = {"wavefronts": "data_pipe_lsu_wavefronts", "conflicts": "data_bank_conflicts_pipe_lsu"}
    return [
        Quantity(
            f"{name}: {kind}", chosen, kind,
            tuple((f"{prefix}_{tail}_mem_shared_op_{op}.sum",) for prefix in prefixes), reason,
        )
        for (kind, tail), reason in zip(tails.items(), why, strict=True)
    ]  # fmt: skip


def _issued(
    chosen: Callable[[Any], bool], name: str, op: str, *others: str, why: str = ""
) -> Quantity:
    """Instructions of a kind; `others` are counters where ncu does not print opcodes."""
    counters = tuple((counter,) for counter in (opcode(op), *others))
    return Quantity(f"{name}, {op}", chosen, "issued", counters, why)


# Of the data stage as a whole, and of the instructions of one opcode.
_STAGE, _PER_OPCODE = ("l1tex_",), ("smsp__sass_l1tex", "sm__sass_l1tex")

_LOADS, _STORES = _is("ld", "ldu", space="global"), _is("st", space="global")
_READS, _WRITES = _is("ld", "ldu", space="shared"), _is("st", space="shared")
_ALL_READS = _is("ld", "ldu", "ldmatrix", space="shared")
_ALL_WRITES = _is("st", "stmatrix", space="shared")

_ASSEMBLED = "ptxas may drop a load, join it with another or move it before a branch"
_WITH_COPIES = "the counter has the copies of cp.async too"
_PASSES = (
    "seen to be more where writing to shared memory takes several passes; why is not known, as "
    "requests agree"
)
_ARBITRATION = "the counter also has cycles that were lost to other traffic of the data stage"
_ARRIVAL = "the hardware writes as data arrives; the simulator as if all of a warp arrived at once"

QUANTITIES = (
    *_in_global("global loads", _LOADS, "ld", _WITH_COPIES),
    *_in_global("cp.async", _is_copy, "ldgsts", _PASSES),
    *_in_global("global stores", _STORES, "st", ""),
    *_in_shared("shared loads, all", _ALL_READS, "ld", _STAGE, _ASSEMBLED, _ARBITRATION),
    *_in_shared("ld.shared", _READS, "ld", _PER_OPCODE, _ASSEMBLED, _ASSEMBLED),
    *_in_shared("ldmatrix", _is("ldmatrix"), "ldsm", _PER_OPCODE, "", ""),
    *_in_shared("shared stores, all", _ALL_WRITES, "st", _STAGE, "", _ARBITRATION),
    *_in_shared("st.shared", _WRITES, "st", _PER_OPCODE, "", ""),
    *_in_shared(
        "cp.async to shared", _is_copy, "ldgsts", (*_STAGE, *_PER_OPCODE), _ARRIVAL, _ARRIVAL
    ),
    _issued(_LOADS, "ld.global", "LDG", why=_ASSEMBLED),
    _issued(_STORES, "st.global", "STG"),
    _issued(_is_copy, "cp.async", "LDGSTS", "smsp__inst_executed_op_ldgsts.sum"),
    _issued(
        _READS, "ld.shared", "LDS", "smsp__sass_inst_executed_op_shared_ld.sum", why=_ASSEMBLED
    ),
    _issued(_WRITES, "st.shared", "STS", "smsp__sass_inst_executed_op_shared_st.sum"),
    _issued(_is("ldmatrix"), "ldmatrix", "LDSM", "smsp__inst_executed_op_ldsm.sum"),
    _issued(
        _is("mma"), "mma.sync", "HMMA", "smsp__inst_executed_pipe_tensor_op_hmma.sum",
        "sm__inst_executed_pipe_tensor_op_hmma.sum",
    ),
    _issued(_is_barrier, "bar.sync", "BAR"),
    _issued(_is("shfl"), "shfl", "SHFL"),
    _issued(
        _is_special, "ex2, lg2, rcp, div", "MUFU",
        why="divisions of integers and conversions use the unit too; a slow path is a call",
    ),
    Quantity(
        "all instructions", _everything, "issued", (("smsp__inst_executed.sum",),),
        "PTX is not SASS: addresses are folded, moves vanish, divisions become many instructions",
    ),
)  # fmt: skip


# -------------------------------------------------------------------------------- the simulator


def call(kernel: str, inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    """The public call of a case, the same for the GPU and the simulator; its results by name."""
    if CASES[kernel].op == "vector_add":
        out = workbench.vector_add(inputs["a"], inputs["b"], backend=backend, kernel=kernel)
        return {"out": out}
    q, k, v = (inputs[name] for name in "qkv")
    out, lse = workbench.attention(q, k, v, backend=backend, kernel=kernel, return_lse=True)
    return {"out": out, "lse": lse}


def simulate(kernel: str, language: str) -> tuple[dict[str, Any], list[Any]]:
    """Run a case in the simulator: its results, and a `Record` of each launch."""
    from workbench.simulator.run import recording

    with recording() as records:
        results = call(kernel, random_inputs(CASES[kernel]), f"{language}-simulator")
    return results, records


def _columns(counts: Any, pc: int) -> dict[str, int]:
    """What one instruction cost, by the names that a `Quantity` uses."""
    from workbench.simulator.counts import LEAST, REQUESTS, TRANSACTIONS

    in_global, in_shared = counts.global_[pc], counts.shared[pc]
    return {
        "issued": int(counts.warps[pc]),
        "requests": int(in_global[REQUESTS]),
        "sectors": int(in_global[TRANSACTIONS]),
        "wavefronts": int(in_shared[TRANSACTIONS]),
        "conflicts": int(in_shared[TRANSACTIONS] - in_shared[LEAST]),
    }


def tally(launch: Any) -> dict[str, int]:
    """All `QUANTITIES` of a launch that the simulator has run, by name."""
    sums = dict.fromkeys((quantity.name for quantity in QUANTITIES), 0)
    for pc, instruction in enumerate(launch.code.program.instructions):
        costs = _columns(launch.counts, pc)
        for quantity in QUANTITIES:
            if quantity.chosen(instruction):
                sums[quantity.name] += costs[quantity.column]
    return sums


# ------------------------------------------------------------------------------ Nsight Compute


def base_name(counter: str) -> str:
    """A counter's name as ncu lists it: without its sum, or its part."""
    return re.split(r"[.\[]", counter)[0]


def wanted(known: set[str] | None) -> list[str]:
    """The counters to ask for: of every quantity the first choice that the GPU knows.

    `known` are base names; None is for a GPU that did not tell.
    """
    names: dict[str, None] = {}
    for quantity in QUANTITIES:
        for choice in quantity.counters:
            # ncu does not list what it counts by changing the kernel.
            if known is None or all(
                base_name(x) in known or x.startswith("sass__") for x in choice
            ):
                names |= dict.fromkeys(x.partition("[")[0] for x in choice)
                if not choice[0].startswith(OPCODES):
                    break  # else ncu may not print the parts: one more choice
    return list(names)


def parse_names(text: str) -> set[str]:
    """The counters that ``ncu --query-metrics`` lists."""
    return set(re.findall(r"^\s*([a-z0-9]+__\w+)", text, re.MULTILINE))


def parse_csv(text: str) -> list[dict[str, str]]:
    """The launches in what ``ncu --csv --page raw`` writes, each a row by the column's name."""
    csv.field_size_limit(2**24)  # a counter may be told for every instruction
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(line for line in lines[start:] if not line.startswith("=="))
    return [row for row in rows if row["ID"]]  # the row below the names has the units


def read_counter(row: dict[str, str], counter: str) -> int | None:
    """A counter of a launch, or one part of it; None if there is no number."""
    name, _, part = counter.partition("[")
    whole, _, parts = (row.get(name) or "").partition(" (")
    if part:
        found = dict(re.findall(r"([A-Z]\w*): ([\d,]+)", parts))
        if not found:
            return None
        whole = found.get(part.rstrip("]"), "0")
    try:
        return round(float(whole.replace(",", "")))
    except ValueError:  # n/a, or nothing
        return None


def read_quantity(row: dict[str, str], quantity: Quantity) -> tuple[int | None, str]:
    """What the hardware counted, and the names of the counters that say so."""
    for choice in quantity.counters:
        values = [read_counter(row, counter) for counter in choice]
        if None not in values:
            return sum(value for value in values if value is not None), " + ".join(choice)
    return None, ""


def errors_in(text: str) -> str:
    """What a program said about its failure: ncu's errors, or else its last lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
    return " ".join((errors or lines)[-3:])


def run_limited(command: Sequence[str], log: Path, seconds: float) -> tuple[int, str]:
    """Run a program, for so long at most: (exit code, all that it printed).

    Raises
    ------
    MeasureError
        If the time is up; whatever the program started is stopped too.
    """
    if seconds <= 0:
        raise MeasureError(f"not tried: all of it was to take {ALL_SECONDS} s")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            raise MeasureError(
                f"{Path(command[0]).name} ran for more than {seconds:.0f} s"
            ) from None
    return process.returncode, log.read_text(errors="replace")


@dataclass(slots=True)
class Measured:
    """What the GPU did in one case: results by name, a row of counters a launch."""

    results: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Gpu:
    """Runs cases on the GPU, each in a process of its own under ncu: a fault spoils no other.

    Parameters
    ----------
    ncu : str
        The program.
    folder : pathlib.Path
        For what the processes leave behind.
    """

    def __init__(self, ncu: str, folder: Path) -> None:
        self.ncu, self.folder = ncu, folder
        self.end = time.monotonic() + ALL_SECONDS
        self.counters: list[str] = []

    def _seconds(self) -> float:
        return min(RUN_SECONDS, self.end - time.monotonic())

    def prepare(self) -> None:
        """Ask which counters there are."""
        command = [self.ncu, "--query-metrics"]
        try:
            _, text = run_limited(command, self.folder / "names.txt", self._seconds())
        except (MeasureError, OSError):
            text = ""
        known = parse_names(text)
        self.counters = wanted(known if "smsp__inst_executed" in known else None)

    def measure(self, kernel: str, language: str) -> Measured:
        """Run a case under ncu; without it, if that gives no results."""
        measured = Measured()
        folder = self.folder / f"{kernel}-{language}"
        folder.mkdir()
        try:
            measured.rows = self._profile(kernel, language, folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest goes on
            measured.failures.append(f"no counters: {error}")
        try:
            if not (folder / RESULTS).exists():
                command = _launching(kernel, language, folder)
                code, text = run_limited(command, folder / "log.txt", self._seconds())
                if code:
                    raise MeasureError(errors_in(text))
            with np.load(folder / RESULTS) as results:
                measured.results = dict(results)
        except Exception as error:  # noqa: BLE001
            measured.failures.append(f"no results: {error}")
        return measured

    def _profile(self, kernel: str, language: str, folder: Path) -> list[dict[str, str]]:
        report = folder / "ncu.txt"
        for _ in range(TRIES):
            command = [
                self.ncu, "--csv", "--page", "raw", "--print-units", "base",
                "--print-metric-instances", "details", "--clock-control", "none",
                "--target-processes", "all", "--log-file", str(report),
                "--metrics", ",".join(self.counters), *_launching(kernel, language, folder),
            ]  # fmt: skip
            report.unlink(missing_ok=True)
            _, printed = run_limited(command, folder / "log.txt", self._seconds())
            text = report.read_text(errors="replace") if report.exists() else ""
            rows = parse_csv(text)
            if rows:
                return rows
            text = text or printed
            unknown = set(re.findall(r"Failed to find metric (?:regex:\^)?(\w+)", text))
            left = [x for x in self.counters if base_name(x) not in unknown]
            if left == self.counters:
                break
            self.counters = left
        raise MeasureError(errors_in(text))


def _launching(kernel: str, language: str, folder: Path) -> list[str]:
    options = ["--kernel", kernel, "--backend", language, "--launch", str(folder)]
    return [sys.executable, str(Path(__file__).resolve()), *options]


def launch(kernel: str, language: str, folder: Path) -> None:
    """Run a case on the GPU and leave its results in a folder; what ncu runs."""
    import cupy

    inputs = {name: cupy.asarray(x) for name, x in random_inputs(CASES[kernel]).items()}
    results = call(kernel, inputs, language)
    np.savez(folder / RESULTS, **{name: bits(x.get()) for name, x in results.items()})


# ------------------------------------------------------------------------------- the comparison


def bits(x: Any) -> Any:
    """An array as unsigned numbers, which every file format knows."""
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


@dataclass(frozen=True, slots=True)
class Values:
    """How far two results are from each other.

    Attributes
    ----------
    same : int
        Elements with the same bits.
    largest : float
        Difference; NaN if somewhere one of the two is not a number.
    scale : float
        The simulator's largest value.
    """

    name: str
    elements: int
    same: int
    largest: float
    scale: float


def compare_values(name: str, simulated: Any, measured_bits: Any) -> Values:
    """Compare the simulator's result with the bits that the GPU left."""
    measured = measured_bits.view(simulated.dtype).reshape(simulated.shape)
    equal = bits(simulated) == bits(measured)
    a, b = (x[~equal].astype(np.float64) for x in (simulated, measured))
    largest = float(np.abs(a - b).max(initial=0.0))  # NaN stays one
    scale = float(np.abs(simulated.astype(np.float64)).max(initial=0.0))
    return Values(name, equal.size, int(equal.sum()), largest, scale)


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity of one launch; `gpu` is None where the GPU has no counter for it."""

    name: str
    simulator: int
    gpu: int | None
    counters: str
    why: str

    @property
    def ratio(self) -> float | None:
        """The GPU's number, in units of the simulator's."""
        return self.gpu / self.simulator if self.gpu is not None and self.simulator else None


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """Both sides of a launch; `raw` is all that ncu wrote about it."""

    title: str
    lines: list[Line]
    raw: dict[str, str]


@dataclass(slots=True)
class Report:
    """Both sides of a case."""

    kernel: str
    backend: str
    problem: str
    values: list[Values] = field(default_factory=list)
    launches: list[LaunchReport] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def compare_launches(records: Sequence[Any], rows: Sequence[dict[str, str]]) -> list[LaunchReport]:
    """Put the launches of the simulator and of the GPU side by side.

    Raises
    ------
    MeasureError
        If they are not the same launches.
    """
    stems = {record.entry.stem for record in records}
    # Others than ours may come from CuPy.
    ours = [row for row in rows if any(stem in row["Kernel Name"] for stem in stems)] or rows
    sides = (
        [(record.launch.grid, record.launch.block) for record in records],
        [tuple(_first_number(row[f"{what} Size"]) for what in ("Grid", "Block")) for row in ours],
    )
    if sides[0] != sides[1]:
        raise MeasureError(
            f"the simulator launched (blocks, threads) {sides[0]}, and the GPU {sides[1]}"
        )
    reports = []
    for record, row in zip(records, ours, strict=True):
        counted, lines = tally(record.launch), []
        for quantity in QUANTITIES:
            number, counters = read_quantity(row, quantity)
            simulated = counted[quantity.name]
            why = quantity.why if number is not None and number != simulated else ""
            lines.append(Line(quantity.name, simulated, number, counters, why))
        blocks, threads = record.launch.grid, record.launch.block
        title = f"{record.entry.describe()}: {blocks} blocks of {threads} threads"
        reports.append(LaunchReport(title, lines, row))
    return reports


def _first_number(text: str) -> int:
    """Of ``(6, 1, 1)``, 6: all launches have one axis."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


def compare(kernel: str, language: str, measure: Callable[[], Measured]) -> Report:
    """Both sides of a case, as far as they go: what fails is told in the report."""
    report = Report(kernel, language, CASES[kernel].title)
    try:
        results, records = simulate(kernel, language)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases go on
        report.failures.append(f"not simulated: {type(error).__name__}: {error}")
        return report
    try:
        measured = measure()
        report.failures += measured.failures
        if measured.results:
            report.values = [compare_values(n, x, measured.results[n]) for n, x in results.items()]
        if measured.rows:
            report.launches = compare_launches(records, measured.rows)
    except Exception as error:  # noqa: BLE001
        report.failures.append(f"not compared: {type(error).__name__}: {error}")
    return report


# -------------------------------------------------------------------------------------- output


def values_table(reports: Iterable[Report]) -> Any:
    """Lay out how the results of all cases differ."""
    from workbench.report import plain_table

    numbers = ["elements", "same bits", "largest difference", "largest value"]
    table = plain_table("kernel", "in", "result", *numbers, right=numbers)
    for report in reports:
        for x in report.values:
            table.add_row(
                report.kernel, report.backend, x.name, f"{x.elements:,}",
                f"{x.same:,} ({100 * x.same / max(x.elements, 1):.1f} %)", f"{x.largest:.1e}",
                f"{x.scale:.3g}",
            )  # fmt: skip
    return table


def counts_table(launched: LaunchReport) -> Any:
    """Lay out both sides of a launch; what neither side has is left out."""
    from workbench.report import NONE, plain_table

    columns = ("simulator", "GPU", "GPU/sim")
    table = plain_table("per launch", *columns, "why", right=columns)
    table.columns[0].no_wrap = True
    for line in launched.lines:
        if line.simulator or line.gpu:
            ratio = line.ratio
            table.add_row(
                line.name, f"{line.simulator:,}", NONE if line.gpu is None else f"{line.gpu:,}",
                NONE if ratio is None else f"{ratio:.3f}", line.why,
            )  # fmt: skip
    return table


def verdict(reports: Iterable[Report]) -> str:
    """How much agrees, in one sentence: all but the number of all instructions is comparable."""
    lines = [
        line
        for report in reports
        for launched in report.launches
        for line in launched.lines
        if line.gpu is not None and (line.simulator or line.gpu) and line.name != "all instructions"
    ]
    exact = sum(line.gpu == line.simulator for line in lines)
    close = sum(abs((line.gpu or 0) - line.simulator) <= 0.01 * line.simulator for line in lines)
    return (
        f"of {len(lines)} counts that can be compared, {exact} are the same and {close} within 1 %"
    )


def show(reports: Sequence[Report], device: str) -> None:
    """Print everything."""
    from rich.console import Group
    from rich.text import Text

    from workbench.report import emit, make_console

    head = f"{device}, and the simulator running PTX for {SIMULATOR_ARCH}"
    parts: list[Any] = [Text(head, style="bold"), Text(), values_table(reports)]
    for report in reports:
        head = f"{report.kernel}, {report.backend}: {report.problem}"
        parts += [Text(), Text(head, style="bold")]
        for launched in report.launches:
            parts += [Text(launched.title), counts_table(launched)]
        parts += [Text(failure, style="yellow") for failure in report.failures]
    emit(make_console(), Group(*parts, Text(), Text(verdict(reports), style="bold")))


def write_json(path: Path, device: str, reports: Sequence[Report]) -> None:
    """Write everything, the raw counters too, whole or not at all."""
    found = {
        "device": device,
        "simulator": SIMULATOR_ARCH,
        "verdict": verdict(reports),
        "cases": [dataclasses.asdict(report) for report in reports],
    }
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".hardware-") as folder:
        written = Path(folder) / path.name
        written.write_text(json.dumps(found, indent=1) + "\n")
        written.replace(path)


# ---------------------------------------------------------------------------------------- main


def device_name() -> str:
    """Like ``NVIDIA H200 (sm_90)``."""
    from workbench import bench

    return bench.gpu_name()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernel", choices=CASES, action="append", help="default: all")
    parser.add_argument("--backend", choices=compiler.LANGUAGES, help="default: both")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)  # what ncu runs
    chosen = parser.parse_args(arguments)
    kernels = list(dict.fromkeys(chosen.kernel or CASES))
    languages = [chosen.backend] if chosen.backend else compiler.LANGUAGES
    if chosen.launch:
        launch(kernels[0], languages[0], chosen.launch)
        return 0
    missing = compiler.gpu_missing()
    if missing is not None:
        parser.error(f"this compares the simulator with a GPU, but {missing}")
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu is not on the PATH; it comes with Nsight Compute, or the CUDA toolkit")
    if chosen.out and not chosen.out.resolve().parent.is_dir():
        parser.error(f"there is no folder {chosen.out.resolve().parent}")
    reports = []
    device = device_name()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        # The GPU works through all cases, one after the other, while the simulator does.
        gpu = Gpu(ncu, Path(folder))
        pool.submit(gpu.prepare)
        cases = [(kernel, language) for kernel in kernels for language in languages]
        waiting = [pool.submit(gpu.measure, *case) for case in cases]
        for case, future in zip(cases, waiting, strict=True):
            print(f"{' in '.join(case)} ...", file=sys.stderr, flush=True)
            reports.append(compare(*case, future.result))
    show(reports, device)
    if chosen.out:
        write_json(chosen.out.resolve(), device, reports)
    return int(any(report.failures for report in reports))


if __name__ == "__main__":
    sys.exit(main())
