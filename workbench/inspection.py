"""What a kernel's source lines cost: its instructions and traffic, counted by the simulator.

The counts are exact and the same on every machine. They tell what a kernel asks of the hardware,
in either language, and nothing of how long the hardware takes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from workbench import comparison, report, show
from workbench import compile as compiler
from workbench.workload import Oracle, Workload, random_inputs

if TYPE_CHECKING:
    from workbench.show import Pair, Piece
    from workbench.simulator.lines import Line, Traffic
    from workbench.simulator.run import Record

SIDE_BY_SIDE_WIDTH = 200  # two columns of code with their counts
COUNTED = ("instr", "sectors", "wavefr")
# Kernels that several rows of the table launch, or one row beside others: by whom we see them.
LAUNCHED_BY = {
    "attention_delta": "attention_naive",
    "attention_dbias": "attention_naive",
    "attention_dq": "attention_flash_mma",
    "attention_merge": "attention_flash_mma",
    "attention_row_stats": "attention_flash_wgmma",
    "attention_flash_wgmma_bwd_wide": "attention_flash_wgmma",
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """The launches of one kernel file in each language, on one workload.

    Attributes
    ----------
    stem : str
        Like ``"attention_tiled_fwd"``.
    records : dict
        By language, in the order of the launches.
    missing : dict
        Why a language has none.
    """

    stem: str
    workload: Workload
    records: dict[str, list[Record]]
    missing: dict[str, str]


def inspect(stem: str, workload: Workload) -> Inspection:
    """Run a kernel file's launches in the simulator, in both languages.

    Parameters
    ----------
    stem : str
        Name of a file in `cuda_src` and `numba_kernels`, without its suffix.
    workload : Workload
        The sizes; what is computed follows from `stem`.

    Raises
    ------
    NoKernelError
        If the kernel does not take the workload.
    ValueError
        If the workload is computed without this kernel.
    SimulationError
        If the kernel is at fault.
    """
    from workbench.simulator.run import recording

    records: dict[str, list[Record]] = {}
    missing: dict[str, str] = {}
    for language in compiler.LANGUAGES:
        try:
            with recording() as everything:
                _call(stem, workload, f"{language}-simulator")
        except compiler.ToolchainError as error:
            missing[language] = str(error)
            continue
        records[language] = [record for record in everything if record.entry.stem == stem]
        if not records[language]:
            raise ValueError(
                f"{launched_by(stem)} does without {stem} for these sizes; cuda_src/README.md says "
                "what it is there for"
            )
    return Inspection(stem, workload, records, missing)


def launched_by(stem: str) -> str:
    """The row of the table that launches a kernel file."""
    return LAUNCHED_BY.get(stem, stem.removesuffix("_fwd").removesuffix("_bwd"))


def usual_dtype(stem: str) -> str:
    """The dtype to inspect a kernel with: float32, or the first that it takes."""
    from workbench.table import KERNELS

    dtypes = next(row.dtypes for row in KERNELS if row.name == launched_by(stem))
    return "float32" if "float32" in dtypes else dtypes[0]


def _call(stem: str, workload: Workload, backend: str) -> None:
    """The public call that launches a kernel file."""
    import workbench

    inputs = random_inputs(workload)
    if stem.startswith("vector_"):
        workbench.vector_add(inputs["a"], inputs["b"], backend=backend, kernel=stem)
        return
    options: dict[str, Any] = dict(workload.options)
    name, with_bias = launched_by(stem), stem == "attention_dbias"
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if stem.endswith("_fwd") or stem == "attention_merge":
        workbench.attention(q, k, v, backend=backend, kernel=name, **options)
        return
    if with_bias:
        import numpy as np

        shape = (1, workload.heads_q, workload.seqlen_q, workload.seqlen_k)
        accumulator = np.float64 if workload.dtype == "float64" else np.float32
        options |= {"bias": np.zeros(shape, accumulator)}
    out, lse = workbench.attention(q, k, v, return_lse=True, backend="reference", **options)
    workbench.attention_backward(
        inputs["dout"], q, k, v, out, lse, backend=backend, kernel=name,
        return_dbias=with_bias, **options,
    )  # fmt: skip


# ----------------------------------------------------------------------------------- as tables


def summary(found: Inspection) -> RenderableType:
    """Lay out the counts of whole launches: by class of instruction, then by array."""
    from workbench.simulator.lines import CLASSES, total

    totals = {
        language: total(record.launch for record in records)
        for language, records in found.records.items()
    }
    names = [report.LANGUAGE_NAMES[language] for language in totals]
    table = report.plain_table("counts", *names, "ratio", right=[*names, "ratio"])
    rows = [("instructions of a warp", [line.issued for line in totals.values()])]
    rows += [
        (f"  {kind}", [line.instructions.get(kind, 0) for line in totals.values()])
        for kind in CLASSES
    ]
    for label, traffics, unit in _traffic_rows(totals.values()):
        rows += [(label, [t.transactions for t in traffics]), (unit, [t.excess for t in traffics])]
    for label, numbers in rows:
        if any(numbers):
            ratio = f"{numbers[1] / numbers[0]:.2f}" if len(numbers) == 2 and numbers[0] else ""
            table.add_row(label, *(f"{number:,}" for number in numbers), ratio)
    parts: list[RenderableType] = [
        Text(f"{found.stem}: {found.workload.title}", style="bold"), Text(), table, Text(),
        _arrays(found),
    ]  # fmt: skip
    parts += [Text(f"no {name}: {why}", style="yellow") for name, why in found.missing.items()]
    return Group(*parts)


def _traffic_rows(lines: Iterable[Line]) -> list[tuple[str, list[Traffic], str]]:
    every = list(lines)
    return [
        ("sectors loaded (32 bytes)", [x.loads for x in every], "  not needed"),
        ("sectors stored", [x.stores for x in every], "  not needed"),
        ("shared-memory wavefronts", [x.shared for x in every], "  bank conflicts"),
    ]


def _arrays(found: Inspection) -> Table:
    """How many times its own size each array is read and written."""
    from workbench.simulator.lines import by_array

    names = [report.LANGUAGE_NAMES[language] for language in found.records]
    heads = [f"{name} {verb}" for name in names for verb in ("reads", "writes")]
    table = report.plain_table("array", "KiB", *heads, right=["KiB", *heads])
    cells: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for column, records in enumerate(found.records.values()):
        sums: dict[str, tuple[int, int]] = {}
        for record in records:
            regions = {r.name: r for r in record.launch.memory.regions}
            for name, (loads, stores) in by_array(record.launch).items():
                before = sums.get(name, (0, 0))
                sums[name] = before[0] + loads.bytes, before[1] + stores.bytes
                sizes[name] = int(regions[name].buffer.array.nbytes)
        for name, both in sums.items():
            row = cells.setdefault(name, [""] * len(heads))
            row[2 * column : 2 * column + 2] = [_times(number, sizes[name]) for number in both]
    for name, row in cells.items():
        table.add_row(name, f"{sizes[name] / 1024:,.1f}", *row)
    return table


def _times(count: int, size: int) -> str:
    return f"{count / size:.3g} x" if count else report.NONE


def listing(found: Inspection, console: Console, step: str | None) -> Iterator[RenderableType]:
    """Lay out the source of both languages, step by step, with what each line cost."""
    from workbench.simulator.lines import by_line

    costs = {
        language: by_line(
            (record.launch for record in records),
            compiler.source_path(language, found.stem).name,
        )
        for language, records in found.records.items()
    }
    for pair in show.read_pairs(found.stem):
        if pair.title in (show.HEADER, show.SETUP):  # declarations: what they cost, any kernel does
            continue
        if step is None or show.is_step(pair.title, step):
            panels = list(_panels(pair, costs))
            if console.width >= SIDE_BY_SIDE_WIDTH and panels:
                grid = Table.grid(expand=True)
                for _ in panels:
                    grid.add_column(ratio=1)
                grid.add_row(*panels)
                yield grid
            else:
                yield from panels


def included(found: Inspection, file: str) -> RenderableType:
    """Lay out a file that the kernel includes, like ``tiles.cuh``, with what its lines cost.

    Raises
    ------
    ValueError
        If there is no such file, or no line of it costs anything.
    """
    from workbench.simulator.lines import by_line

    language = "cuda" if file.endswith(".cuh") else "numba"
    path = compiler.source_path(language, found.stem).parent / file
    launches = [record.launch for record in found.records.get(language, ())]
    costs = by_line(launches, file, innermost=True)
    if not path.is_file() or not costs:
        raise ValueError(f"no line of {file} has a part in {found.stem}")
    source = path.read_text(encoding="utf-8")
    return _panel(file, language, show.Piece(0, file, 1, source), costs)


def _panels(pair: Pair, costs: dict[str, dict[int, Line]]) -> Iterator[Panel]:
    """The sides of a pair; none if neither cost anything."""
    sides = {"cuda": pair.cuda, "numba": pair.numba}
    chosen = {language: piece for language, piece in sides.items() if piece and language in costs}
    spent = {
        language: any(number in costs[language] for number in _numbers(piece))
        for language, piece in chosen.items()
    }
    if any(spent.values()):
        for language, piece in chosen.items():
            yield _panel(pair.title, language, piece, costs[language])


def _numbers(piece: Piece) -> range:
    return range(piece.line, piece.line + len(piece.source.splitlines()))


def _panel(title: str, language: str, piece: Piece, costs: dict[int, Line]) -> Panel:
    code = Syntax("", "cuda" if language == "cuda" else "python", theme="ansi_dark")
    highlighted = code.highlight(piece.source).split("\n", allow_blank=True)
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in COUNTED:
        table.add_column(justify="right", no_wrap=True, min_width=7)
    table.add_column(overflow="fold")
    table.add_row(*(Text(word, style="dim") for word in COUNTED), "")
    for number, text in zip(_numbers(piece), highlighted, strict=False):
        table.add_row(*_cells(costs.get(number)), text)
    return Panel(
        table,
        title=Text(title, style="bold"),
        title_align="left",
        subtitle=Text(f"{report.LANGUAGE_NAMES[language]}, line {piece.line}", style="dim"),
        subtitle_align="right",
        border_style="green" if language == "cuda" else "blue",
        padding=(0, 1),
    )


def _cells(line: Line | None) -> Sequence[Text]:
    if line is None:
        return [Text()] * len(COUNTED)
    both = _transactions((line.loads, line.stores)), _transactions((line.shared,))
    return [Text(short(line.issued), style="cyan"), *both]


def _transactions(traffics: Sequence[Traffic]) -> Text:
    """Sectors or wavefronts; in red with the factor if more than the bytes need."""
    count = sum(traffic.transactions for traffic in traffics)
    least = sum(traffic.least for traffic in traffics)
    if count > 1.005 * least:
        return Text(f"{short(count)} x{count / least:.1f}", style="bold red")
    return Text(short(count), style="cyan")


def short(count: int) -> str:
    """A count in at most five characters; nothing for none."""
    if count == 0:
        return ""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{report.three_digits(count / size)}{unit}"
    return str(count)


# ----------------------------------------------------------------------- beside a comparison

SIMULATED_WORK = 2e8  # operations, or bytes: some seconds a kernel


@dataclass(frozen=True, slots=True)
class Counts:
    """What one kernel asks of a GPU, and how far its result is from the float64 reference.

    Attributes
    ----------
    instructions : int
        Issued to warps.
    loaded_bytes, stored_bytes : int
        Of global memory, in sectors of 32.
    wavefronts, conflicts : int
        Of shared memory, and how many of them bank conflicts cost.
    error : float
    """

    kernel: str
    language: str
    instructions: int
    loaded_bytes: int
    stored_bytes: int
    wavefronts: int
    conflicts: int
    error: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The counts of several kernels on one workload.

    Attributes
    ----------
    notes : list of str
        Why some, or all, are missing.
    """

    rows: list[Counts]
    notes: list[str]


def simulate(
    workload: Workload,
    which: Iterable[tuple[str, str]],
    *,
    inputs: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Count what kernels ask of a GPU, where no time can be had.

    Parameters
    ----------
    which : iterable of (str, str)
        Names of rows of `KERNELS` and languages.
    inputs : dict of arrays, optional
        As for `comparison.compare`.
    progress : callable
        Is told what is about to be done, once for each of `which`.

    Raises
    ------
    SimulationError
        If a kernel is at fault.
    """
    from workbench.simulator.lines import total
    from workbench.simulator.run import recording
    from workbench.table import NoKernelError

    if workload.work > SIMULATED_WORK:
        hint = "--size 65536" if workload.op == "vector_add" else "--seqlen 128"
        return Simulation([], [f"counts from the simulator: for small problems, as with {hint}"])
    rows: list[Counts] = []
    missing: dict[str, None] = {}
    oracle = Oracle(workload, inputs)
    for kernel, language in which:
        backend = f"{language}-simulator"
        progress(f"{kernel} ({backend})")
        try:
            call = comparison.prepared_call(workload, oracle.inputs, kernel, backend)
            with recording() as records:
                error = oracle.error(call())
        except NoKernelError:
            continue
        except compiler.ToolchainError as reason:
            missing[f"not simulated: {reason}"] = None
            continue
        line = total(record.launch for record in records)
        rows.append(
            Counts(
                kernel, language, line.issued, 32 * line.loads.transactions,
                32 * line.stores.transactions, line.shared.transactions, line.shared.excess, error,
            )
        )  # fmt: skip
    return Simulation(rows, list(missing))


def simulation_table(simulation: Simulation) -> RenderableType:
    """Lay out the counts of several kernels, a row each."""
    columns = ["kernel", "in", "instr", "loads", "stores", "shared", "extra", "error"]
    table = report.plain_table(*columns, right=columns[2:])
    table.columns[0].no_wrap = True
    for row in simulation.rows:
        table.add_row(
            row.kernel, row.language, short(row.instructions),
            report.format_bytes(row.loaded_bytes), report.format_bytes(row.stored_bytes),
            short(row.wavefronts), short(row.conflicts) or "0", f"{row.error:.1e}",
        )  # fmt: skip
    parts: list[RenderableType] = []
    if table.row_count:
        meaning = (
            "instr: instructions issued to warps; loads, stores: bytes of global memory in sectors "
            "of 32; shared: wavefronts of shared memory; extra: those that bank conflicts cost"
        )
        title = Text("counted by the simulator, the same on every machine", style="bold")
        parts += [title, Text(), table, Text(meaning, style="dim")]
    parts += [Text(note, style="yellow" if simulation.rows else "dim") for note in simulation.notes]
    return Group(*parts)
