"""What a person sees: tables, panels, JSON and plots of the results of the other modules."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from workbench.comparison import Availability, Comparison, Row
from workbench.doctor import Finding, Machine, Verdict, facts_of
from workbench.problem import DTYPES, SIMULATOR_BACKENDS
from workbench.show import Pair, Piece

LANGUAGE_NAMES = {"cuda": "CUDA C++", "numba": "Numba"}
PIPE_WIDTH = 120  # of output that no terminal limits
SIDE_BY_SIDE_WIDTH = 120  # two columns of code need this much
NONE = "-"


if TYPE_CHECKING:
    from workbench.inspection import Simulation
    from workbench.table import Kernel
    from workbench.vit.look import Look


class UserError(Exception):
    """Something the user can mend; its text is all that is shown."""


def make_console(*, stderr: bool = False) -> Console:
    """Make a console as wide as the terminal, or as wide as tables like it where there is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


def emit(console: Console, *renderables: RenderableType) -> None:
    """Print; into a pipe or a file without the blanks that fill a terminal's lines."""
    if console.is_terminal:
        console.print(*renderables)
        return
    with console.capture() as capture:
        console.print(*renderables)
    console.file.write("\n".join(line.rstrip() for line in capture.get().split("\n")))


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar that leaves nothing behind; nothing at all where nobody watches.

    Yields
    ------
    callable
        Takes what is about to be done, once before each of the steps.
    """
    if not console.is_terminal:
        console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def step(doing: str) -> None:
            bar.update(task, description=doing, advance=1)

        yield step


def plain_table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """Make a table with a rule under its head and no other lines."""
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False,
        padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


# ------------------------------------------------------------------------------------- numbers


def format_seconds(seconds: float) -> str:
    """Format a time with three digits: ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def format_bytes(count: float) -> str:
    """Format a size: ``48.0 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the loop returns")


def three_digits(x: float) -> str:
    """Format a positive number with three significant digits and without an exponent."""
    if x >= 99.95:
        return f"{x:.0f}"
    return f"{x:.1f}" if x >= 9.995 else f"{x:.2f}" if x >= 0.995 else f"{x:.3f}"


# ------------------------------------------------------------------------------------- kernels


def kernels_table(
    kernels: Sequence[Kernel], availabilities: Sequence[Availability]
) -> RenderableType:
    """Lay out the rows of `KERNELS`, with what works of each on this machine."""
    table = plain_table("kernel", "takes", "here")
    table.columns[0].no_wrap = True
    for kernel, available in zip(kernels, availabilities, strict=True):
        every = len(kernel.dtypes) == len(DTYPES)
        takes = [kernel.op, "every dtype" if every else ", ".join(kernel.dtypes)]
        if kernel.max_head_dim is not None:
            takes.append(f"head_dim up to {kernel.max_head_dim}")
        if not available.compiles:
            here = Text("no", style="yellow")
        elif available.runs:
            here = Text("runs", style="green")
        else:
            here = Text("compiles")
        table.add_row(Text(kernel.name, style="bold"), "; ".join(takes), here)
        names = [LANGUAGE_NAMES[language] for language in kernel.languages]
        works = [LANGUAGE_NAMES[language] for language in available.compiles]
        only = f"only in {works[0]}" if works and works != names else ""
        table.add_row("", Text(f"{kernel.summary} ({', '.join(names)})", style="dim"), only)
    reasons = dict.fromkeys(reason for found in availabilities for reason in found.reasons)
    parts: list[RenderableType] = [table]
    if reasons:
        parts += [Text(), *(Text(f"why not more: {reason}", style="yellow") for reason in reasons)]
        parts.append(Text("The backends cpu and reference run everything on the host."))
    return Group(*parts)


# ---------------------------------------------------------------------------------- comparisons


def comparison_table(comparison: Comparison) -> RenderableType:
    """Lay out a comparison: the rows that ran, then why the others did not."""
    ran = [row for row in comparison.rows if row.reason is None]
    parts: list[RenderableType] = [Text(comparison.workload.title, style="bold")]
    parts += [Text(device, style="dim") for device in comparison.devices]
    if ran:
        unit, factor = _display_unit(comparison)
        parts += [Text(), _rows_table(ran, unit, factor)]
        against = ", ".join(
            f"{name} at {three_digits(factor * rate)} {unit}"
            for name, rate in comparison.ceilings.items()
        )
        if against:
            parts.append(Text(f"share of what the same run measured: {against}", style="dim"))
        if any(row.backend in SIMULATOR_BACKENDS for row in ran):
            parts.append(Text("a simulator's time says nothing about a GPU's", style="dim"))
    if comparison.in_l2:
        parts.append(Text("times are warm: the inputs fit in the GPU's L2 cache", style="dim"))
    if ran and comparison.checked < 1:
        of = "elements" if comparison.workload.op == "vector_add" else "heads"
        checked = f"{100 * comparison.checked:.2g} % of the {of}"
        parts.append(Text(f"error checked on {checked}", style="dim"))
    stopped = [row for row in comparison.rows if row.reason is not None]
    if stopped:
        parts += [Text(), *_reasons(stopped)]
    return Group(*parts)


def _display_unit(comparison: Comparison) -> tuple[str, float]:
    """Choose a unit without leading zeros on a machine that has no GPU."""
    unit = comparison.workload.unit
    if unit == "TFLOP/s" and max(comparison.ceilings.values(), default=1.0) < 1:
        return "GFLOP/s", 1e3
    return unit, 1.0


def _rows_table(rows: Sequence[Row], unit: str, factor: float) -> Table:
    some_rate = any(row.rate is not None for row in rows)  # a simulator has none
    columns = ["backend", "error", "time", *([unit, "share"] if some_rate else [])]
    some_kernel = any(row.kernel for row in rows)
    if some_kernel:
        columns = ["kernel", *columns]
    on_gpu = any(row.registers is not None for row in rows)
    if on_gpu:
        columns += ["regs", "stack", "smem"]
    table = plain_table(*columns, right=columns[1 + some_kernel :])
    table.padding = (0, 0) if on_gpu else table.padding  # to fit all of it into 80 columns
    for column in table.columns:
        column.no_wrap = True
    fastest = max((row.rate or 0.0 for row in rows), default=0.0)
    for row in rows:
        cells = [
            row.backend,
            NONE if row.error is None else f"{row.error:.1e}",
            NONE if row.seconds is None else format_seconds(row.seconds),
        ]
        if some_rate:
            cells += [
                NONE if row.rate is None else three_digits(factor * row.rate),
                NONE if row.share is None else f"{100 * row.share:.0f} %",
            ]
        if some_kernel:
            cells = [row.kernel or NONE, *cells]
        if on_gpu:
            shared = row.shared_bytes
            cells += [
                NONE if row.registers is None else str(row.registers),
                NONE if row.stack_bytes is None else str(row.stack_bytes),
                NONE if shared is None else f"{shared / 1024:.1f}K" if shared else "0",
            ]
        table.add_row(*cells, style="green" if row.rate == fastest and len(rows) > 1 else "")
    return table


def _reasons(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Say each reason once, with everything that it stopped."""
    for reason in dict.fromkeys(row.reason for row in rows):
        backends: dict[str, list[str]] = {}
        for row in rows:
            if row.reason == reason:
                backends.setdefault(row.kernel or row.backend, []).append(row.backend)
        kernels: dict[str, list[str]] = {}
        for name, found in backends.items():
            kernels.setdefault("" if found == [name] else f" ({', '.join(found)})", []).append(name)
        stopped = "; ".join(", ".join(names) + where for where, names in kernels.items())
        yield Text(f"did not run: {reason}", style="yellow")
        yield Padding(Text(stopped), (0, 0, 0, 2))


def comparison_json(comparison: Comparison, simulation: Simulation | None = None) -> str:
    """Give a comparison as JSON: its workload, devices, ceilings and rows.

    With a `simulation`, also the counts of what could not run here, by the simulator.
    """
    rows = [dataclasses.asdict(row) | {"share": row.share} for row in comparison.rows]
    return json.dumps(
        {
            "workload": comparison.workload.asdict(),
            "unit": comparison.workload.unit,
            "devices": comparison.devices,
            "rows": rows,
            "ceilings": comparison.ceilings,
            "checked": comparison.checked,
            "in_l2": comparison.in_l2,
            "simulated": dataclasses.asdict(simulation) if simulation is not None else None,
        },
        indent=2,
    )


def save_plot(comparison: Comparison, path: Path) -> None:
    """Draw the rates of a comparison as bars, with the ceiling that each was measured against.

    Raises
    ------
    UserError
        If matplotlib is not installed, nothing ran, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'kernel-workbench[plot]'") from error
    rows = [row for row in comparison.rows if row.rate is not None]
    if not rows:
        raise UserError("there is nothing to plot: no row ran")
    unit, factor = _display_unit(comparison)
    figure = Figure(figsize=(9, 1.3 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colors = {"cuda": "#76b900", "numba": "#2f7fd1", "cpu": "#8c6bb1", "reference": "#999999"}
    for y, row in enumerate(rows):
        assert row.rate is not None
        axes.barh(y, factor * row.rate, color=colors.get(row.backend, "#999999"), height=0.7)
        share = "" if row.share is None else f"  {100 * row.share:.0f} %"
        axes.annotate(
            f"{three_digits(factor * row.rate)}{share}",
            (factor * row.rate, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    labels = [f"{row.kernel} ({row.backend})" if row.kernel else row.backend for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    for ceiling in sorted({row.ceiling for row in rows if row.ceiling}):
        axes.axvline(factor * ceiling, color="#555555", linestyle="--", linewidth=1)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} (dashed: measured ceiling)")
    axes.set_title(comparison.workload.title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"the plot cannot be written to {path}: {error}") from error


def model_table(title: str, rows: Sequence[tuple[str, float, float]]) -> RenderableType:
    """Lay out (backend, seconds, difference) of a model's forward passes."""
    table = plain_table(
        "backend", "time", "features differ by", right=["time", "features differ by"]
    )
    for backend, seconds, difference in rows:
        table.add_row(backend, format_seconds(seconds), f"{difference:.1e}" if difference else NONE)
    return Group(Text(title, style="bold"), Text(), table)


def look_report(seen: Look, count: int) -> RenderableType:
    """Lay out what a checkpoint saw in a picture: the model, its classes, and the time of each."""
    config = seen.model.config
    height, width = seen.image_size
    rows, cols = config.grid_of(seen.image_size)
    title = (
        f"{config.depth} blocks of {config.heads} heads, {config.dim} wide; {height} x {width} "
        f"pixels, {rows} x {cols} patches of {config.patch_size[0]} x {config.patch_size[1]}"
    )
    parts: list[RenderableType] = [Text(title, style="bold"), Text()]
    best = seen.top(count)
    if best:
        classes = plain_table("class", "logit", "share", right=["logit", "share"])
        for name, logit, share in best:
            classes.add_row(name, f"{logit:.3f}", f"{share:.1%}")
        parts += [classes, Text()]
    else:
        norm = float(np.linalg.norm(seen.features))
        kind = "a projection" if seen.logits is not None else "no head"
        parts += [Text(f"{kind}: {len(seen.features)} features of length {norm:.3f}"), Text()]
    times = plain_table("stage", "time", right=["time"])
    for name, seconds in seen.stages:
        times.add_row(name, format_seconds(seconds))
    return Group(*parts, times)


# ---------------------------------------------------------------------------------------- code


def steps(pairs: Iterable[Pair], console: Console) -> Iterator[RenderableType]:
    """Lay out a kernel and its twin: a pair of panels a step, side by side where there is room."""
    side_by_side = console.width >= SIDE_BY_SIDE_WIDTH
    for pair in pairs:
        sides = [
            _code_panel(pair.title, language, piece)
            for language, piece in (("cuda", pair.cuda), ("numba", pair.numba))
        ]
        if side_by_side:
            grid = Table.grid(expand=True)
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            grid.add_row(*sides)
            yield grid
        else:
            yield from sides


def _code_panel(title: str, language: str, piece: Piece | None) -> Panel:
    if piece is None:
        body = Text("(not in this language)", style="dim")
    else:
        lexer = "cuda" if language == "cuda" else "python"
        body = Syntax("", lexer, theme="ansi_dark").highlight(piece.source)
        body.rstrip()
        body.no_wrap, body.overflow = False, "fold"  # no code is cut off
    where = "" if piece is None else f", line {piece.line}"
    return Panel(
        body,
        title=Text(title, style="bold"),
        title_align="left",
        subtitle=Text(f"{LANGUAGE_NAMES[language]}{where}", style="dim"),
        subtitle_align="right",
        border_style="green" if language == "cuda" else "blue",
        padding=(0, 1),
    )


# -------------------------------------------------------------------------------------- doctor


def machine_report(machine: Machine, findings: Sequence[Finding]) -> RenderableType:
    """Lay out what `doctor` saw, and its findings with the commands that mend them."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in facts_of(machine):
        facts.add_row(name, value)
    marks = {
        Verdict.GOOD: Text("ok", "green"),
        Verdict.ABSENT: Text("missing", "yellow"),
        Verdict.WRONG: Text("wrong", "bold red"),
    }
    verdicts = Table.grid(padding=(0, 2, 0, 0))
    verdicts.add_column(no_wrap=True)
    verdicts.add_column()
    for finding in findings:
        verdicts.add_row(marks[finding.verdict], finding.text)
        if finding.command is not None:
            # Not wrapped: it is there to be copied.
            verdicts.add_row("", Text(finding.command, style="cyan", overflow="fold"))
    return Group(facts, Text(), verdicts)
