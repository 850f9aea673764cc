"""The `workbench` command: demo, list, compare, show, inspect, vit and doctor.

Every command here reads its options, calls the module that does the work and prints what
`workbench.report` makes of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from workbench import report
from workbench.problem import DEVICE_BACKENDS
from workbench.report import UserError

app = typer.Typer(
    help="Attention kernels in CUDA C++ and Numba, side by side, for NumPy and CuPy arrays.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Op(StrEnum):
    """What `compare` can compare."""

    attention = "attention"
    vector_add = "vector_add"


class Dtype(StrEnum):
    """Element types of the arrays."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def main() -> None:
    """Run the command line; what a user can mend ends in one line and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"error: {error}", "red"))
        sys.exit(2)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn the errors that the API documents into the one line that a user sees."""
    from workbench import CompileError, SimulationError, ToolchainError

    expected = (
        ValueError,
        TypeError,
        CompileError,
        ToolchainError,
        SimulationError,
        MemoryError,
        FileNotFoundError,
    )
    try:
        yield
    except expected as error:
        raise UserError(str(error) or type(error).__name__) from error


def _split(values: Sequence[str] | None) -> list[str]:
    """Take ``--kernel a,b --kernel c`` as [a, b, c]."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _show_version(wanted: bool) -> None:
    if wanted:
        from workbench.doctor import version

        typer.echo(f"kernel-workbench {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Hold the options that come before a command; there is nothing else to do."""


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The map's file, or the folder to put it in.")
    ] = Path(),
) -> None:
    """Show a photograph's attention: every backend that runs here, a ViT, and a map as a PNG."""
    from workbench.demo import run

    run(report.make_console(), out)


@app.command("list")
def list_kernels() -> None:
    """List the kernels: what they take, and whether they run here."""
    from workbench import KERNELS
    from workbench.comparison import availability

    console = report.make_console()
    report.emit(console, report.kernels_table(KERNELS, [availability(row) for row in KERNELS]))


@app.command()
def compare(
    op: Annotated[Op, typer.Argument(help="What to compute.")] = Op.attention,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    heads_kv: Annotated[
        int | None, typer.Option(min=1, help="Key and value heads.", show_default="heads")
    ] = None,
    seqlen: Annotated[int, typer.Option(min=1, help="Queries.")] = 1024,
    seqlen_k: Annotated[
        int | None, typer.Option(min=1, help="Keys.", show_default="seqlen")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Of queries and keys.")] = 64,
    head_dim_v: Annotated[
        int | None, typer.Option(min=1, help="Of values.", show_default="head-dim")
    ] = None,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.float32,
    causal: Annotated[
        bool, typer.Option("--causal", help="Query i sees keys up to i + seqlen_k - seqlen.")
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(metavar="LEFT,RIGHT", help="Keys a query sees on each side; -1 for all."),
    ] = None,
    softcap: Annotated[float, typer.Option(min=0.0, help="Cap of the scores; 0 is none.")] = 0.0,
    backward: Annotated[
        bool, typer.Option("--backward", help="The gradients instead of the result.")
    ] = False,
    size: Annotated[int, typer.Option(min=1, help="Elements, for vector_add.")] = 2**24,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: cuda, numba, cpu, reference; or cuda-simulator, numba-simulator.",
            show_default="the first four",
        ),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Only these (see `workbench list`).", show_default="all"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw the rates.")
    ] = None,
) -> None:
    """Compare every kernel in every language: error, time, rate and resources on one problem."""
    from workbench import comparison, inspection
    from workbench import compile as compiler
    from workbench.workload import Workload

    if plot is not None and not plot.parent.is_dir():
        raise UserError(f"--plot: there is no folder {plot.parent}")
    workload = Workload(
        op=op.value,
        dtype=dtype.value,
        batch=batch,
        heads_q=heads,
        heads_kv=heads_kv or heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen_k or seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        causal=causal,
        window=None if window is None else _parse_window(window),
        softcap=softcap,
        backward=backward,
        size=size,
    )
    with _user_errors():
        which = comparison.targets(workload.op, _split(backend), _split(kernel))
    console = report.make_console()
    with _user_errors(), report.progress(console, comparison.count_steps(which)) as step:
        result = comparison.compare(workload, which, progress=step)
    stopped = [
        (row.kernel, row.backend)
        for row in result.rows
        if row.kernel and row.reason and row.backend in DEVICE_BACKENDS
    ]
    simulation = None
    if not as_json:
        report.emit(console, report.comparison_table(result))
    if stopped and compiler.gpu_missing() is not None:
        with _user_errors(), report.progress(console, len(stopped)) as step:
            simulation = inspection.simulate(workload, stopped, progress=step)
    if as_json:
        typer.echo(report.comparison_json(result, simulation))
    elif simulation is not None:
        report.emit(console, Text(), inspection.simulation_table(simulation))
    if plot is not None:
        report.save_plot(result, plot)
        typer.echo(f"plot written to {plot}", err=True)


def _parse_window(text: str) -> tuple[int | None, int | None]:
    """Parse ``LEFT,RIGHT``; -1 is open."""
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--window is {text!r}; it takes two integers LEFT,RIGHT") from None
    if min(left, right) < -1:
        raise UserError(f"--window is {text!r}; its ends are 0 or more, or -1 for open")
    return (None if left < 0 else left), (None if right < 0 else right)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A kernel, with or without _fwd or _bwd.")],
    step: Annotated[
        str | None, typer.Option(help="Only this step: 4b.", show_default="all")
    ] = None,
) -> None:
    """Show a kernel and its twin side by side, step by step."""
    from workbench import show as source

    console = report.make_console()
    with _user_errors():
        stems = source.find_stems(name)
    shown = 0
    for stem in stems:
        pairs = source.read_pairs(stem)
        if step is not None:
            pairs = [pair for pair in pairs if source.is_step(pair.title, step)]
        if pairs:
            report.emit(console, Text(stem, style="bold underline"))
            for panel in report.steps(pairs, console):
                report.emit(console, panel)
        shown += len(pairs)
    if not shown:
        raise UserError(f"{', '.join(stems)} has no step {step!r}")


@app.command()
def inspect(
    name: Annotated[str, typer.Argument(help="A kernel, with or without _fwd or _bwd.")],
    heads: Annotated[int, typer.Option(min=1, help="Query, key and value heads.")] = 2,
    seqlen: Annotated[int, typer.Option(min=1, help="Queries.")] = 128,
    seqlen_k: Annotated[
        int | None, typer.Option(min=1, help="Keys.", show_default="seqlen")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[
        Dtype | None, typer.Option(show_default="float32, or what the kernel takes")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Query i sees keys up to i + seqlen_k - seqlen.")
    ] = False,
    size: Annotated[int, typer.Option(min=1, help="Elements, for vector_add.")] = 2**16,
    step: Annotated[
        str | None, typer.Option(help="Only this step: 4b.", show_default="all")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE.cuh", help="A header instead of the kernel; it has no steps."),
    ] = None,
) -> None:
    """Show what every line of a kernel costs: instructions, traffic and bank conflicts, simulated.

    Beside each line stand the instructions issued to warps, the 32-byte sectors of global memory
    and the wavefronts of shared memory; in red where the same bytes would need fewer.
    """
    from workbench import inspection
    from workbench import show as source
    from workbench.workload import Workload

    console = report.make_console()
    if file is not None and step is not None:
        raise UserError("--step goes with a kernel, --file with a header: give one of them")
    with _user_errors():
        stems = source.find_stems(name)
        if step is not None:
            stems = [stem for stem in stems if _has_step(stem, step)]
    if not stems:
        raise UserError(f"{name} has no step {step!r}")
    for stem in stems:
        workload = Workload(
            op="vector_add" if stem.startswith("vector_") else "attention",
            dtype=inspection.usual_dtype(stem) if dtype is None else dtype.value,
            heads_q=heads,
            heads_kv=heads,
            seqlen_q=seqlen,
            seqlen_k=seqlen_k or seqlen,
            head_dim=head_dim,
            head_dim_v=head_dim,
            causal=causal,
            backward=not stem.endswith(("_fwd", "_merge")),
            size=size,
        )
        with _user_errors():
            found = inspection.inspect(stem, workload)
        report.emit(console, inspection.summary(found), Text())
        if file is not None:
            with _user_errors():
                report.emit(console, inspection.included(found, file))
            continue
        for panel in inspection.listing(found, console, step):
            report.emit(console, panel)


def _has_step(stem: str, step: str) -> bool:
    """Whether a kernel file has a step of that number."""
    from workbench import show as source

    return any(source.is_step(pair.title, step) for pair in source.read_pairs(stem))


@app.command()
def vit(
    image: Annotated[Path, typer.Argument(help="A picture file.")],
    weights: Annotated[
        Path, typer.Option(help="A checkpoint's folder or file: timm, Hugging Face or Google.")
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--map", metavar="FILE.png", help="Draw what it looked at.")
    ] = None,
    block: Annotated[int, typer.Option(help="Which block to look into; -1 is the last.")] = -1,
    query: Annotated[
        str | None,
        typer.Option(metavar="ROW,COL", help="The patch that asks.", show_default="class token"),
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="A map of every head.")] = False,
    rollout: Annotated[
        bool, typer.Option("--rollout", help="The flow through all blocks instead of one.")
    ] = False,
    mass: Annotated[
        float | None,
        typer.Option(help="Show only the largest weights, which hold this share: 0.6."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="N or HEIGHT,WIDTH", help="Pixels to look at.", show_default="checkpoint's"
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Of attention: cuda, numba, cpu, reference, or auto.")
    ] = "auto",
) -> None:
    """Run a vision transformer on a picture: its classes, what it looked at, and the time."""
    from workbench.vit.images import check_picture_path, save_picture
    from workbench.vit.look import STAGES, MapChoice, look

    which = None
    if out is not None:
        try:
            check_picture_path(out)
        except ValueError as error:
            raise UserError(f"--map: {error}") from error
        asked = None if query is None else _parse_pair("--query", query)
        which = MapChoice(asked, block, heads, rollout, mass)
    pixels = None if size is None else _parse_pair("--size", size, single=True)
    console = report.make_console()
    with _user_errors(), report.progress(console, STAGES + (which is not None)) as step:
        seen = look(image, weights, which=which, image_size=pixels, backend=backend, step=step)
    report.emit(console, report.look_report(seen, top))
    if out is not None and seen.map is not None:
        try:
            save_picture(seen.map, out)
        except OSError as error:
            raise UserError(f"the map cannot be written to {out}: {error}") from error
        report.emit(console, f"\nAttention map written to {out}")


def _parse_pair(option: str, text: str, *, single: bool = False) -> tuple[int, int]:
    """Parse ``A,B``, or ``A`` for both where a single one is welcome."""
    try:
        first, *rest = (int(part) for part in text.split(","))
    except ValueError:
        first, rest = -1, []
    if single and not rest:
        rest = [first]
    if len(rest) != 1 or min(first, *rest) < 0:
        kind = "one integer or two" if single else "two integers"
        raise UserError(f"{option} is {text!r}; it takes {kind}, none negative")
    return first, rest[0]


@app.command()
def doctor(
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Remove all compiled kernels and stop.")
    ] = False,
) -> None:
    """Look at GPU, driver, compilers, packages and caches; say what is missing and the cure."""
    from workbench import cache
    from workbench import doctor as examination

    if clear_cache:
        removed = cache.clear()
        typer.echo(f"removed {removed} compiled kernels from {cache.folder()}")
        return
    machine = examination.inspect()
    findings = examination.diagnose(machine)
    report.emit(report.make_console(), report.machine_report(machine, findings))
    if any(finding.verdict is examination.Verdict.WRONG for finding in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
