"""The demo: attention over the patches of a photograph, on everything that runs here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console, RenderableType
from rich.text import Text

from workbench import KERNELS, comparison, inspection, report
from workbench import compile as compiler
from workbench.problem import HOST_BACKENDS
from workbench.report import UserError
from workbench.vit.images import check_picture_path, portrait, preprocess, save_picture
from workbench.vit.maps import PORTRAIT_QUERY, overlay, patch_attention, patch_heads
from workbench.vit.weights import random_model
from workbench.workload import Workload, random_inputs

FILE_NAME = "workbench-demo.png"
SIMULATED_HEADS = 2
MODEL = "vit_base_patch16_224"


def run(console: Console, out: Path) -> None:
    """Compare every backend on the photograph's patches, run a ViT on it, and write the map.

    Parameters
    ----------
    out : Path
        The map's file, or a folder for it.
    """
    target = _target(out)
    picture = portrait()
    tokens = patch_heads(picture)
    _, heads, seqlen, head_dim = tokens.shape
    report.emit(
        console,
        Text(
            f"A photograph of 224 x 224 pixels, cut into {seqlen} patches of 16 x 16: as queries, "
            f"keys and values of {heads} heads of {head_dim} they ask which patches are alike.\n"
        ),
    )
    which = comparison.targets("attention")
    simulate = compiler.gpu_missing() is not None and _compilers_are_here()
    steps = 2 * comparison.count_steps(which) + len(_model_backends()) + 2
    steps += simulate * sum(len(_twins(backward)) for backward in (False, True))
    with report.progress(console, steps) as step:
        for backward in (False, True):
            report.emit(console, report.comparison_table(_compare(tokens, backward, step)))
            report.emit(console)
        if simulate:
            for renderable in _simulated(tokens, step):
                report.emit(console, renderable, Text())
        elif compiler.gpu_missing() is not None:
            report.emit(
                console,
                "The kernels of both languages also run without a GPU, in the simulator:\n"
                "pip install 'kernel-workbench[simulator]' brings their compilers.\n",
            )
        report.emit(console, _vision_transformer(picture, step))
        step("attention map")
        weights = patch_attention(picture)
        image = overlay(picture, weights, query=PORTRAIT_QUERY, beside=True)
    try:
        save_picture(image, target)
    except OSError as error:
        raise UserError(f"the map cannot be written to {target}: {error}") from error
    row, column = PORTRAIT_QUERY
    report.emit(
        console,
        f"\nAttention map written to {target}: where the picture resembles the framed patch "
        f"(row {row + 1}, column {column + 1}), the mean of {heads} heads.",
    )


def _target(out: Path) -> Path:
    target = out / FILE_NAME if out.is_dir() else out
    try:
        check_picture_path(target)
    except ValueError as error:
        raise UserError(f"--out: {error}") from error
    return target


def _compare(
    tokens: np.ndarray[Any, Any], backward: bool, step: Callable[[str], None]
) -> comparison.Comparison:
    _, heads, seqlen, head_dim = tokens.shape
    workload = Workload(
        "attention",
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
        backward=backward,
    )
    inputs = dict.fromkeys(("q", "k", "v"), tokens)
    if backward:
        inputs["dout"] = random_inputs(workload)["dout"]
    return comparison.compare(
        workload, comparison.targets("attention"), inputs=inputs, progress=step
    )


def _simulated(
    tokens: np.ndarray[Any, Any], step: Callable[[str], None]
) -> Iterator[RenderableType]:
    """Run kernels of both languages on a few heads of the picture, without a GPU."""
    heads, seqlen, head_dim = SIMULATED_HEADS, tokens.shape[2], tokens.shape[3]
    for backward in (False, True):
        workload = Workload(
            "attention", heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen,
            head_dim=head_dim, head_dim_v=head_dim, backward=backward,
        )  # fmt: skip
        inputs = dict.fromkeys(("q", "k", "v"), tokens[:, :heads])
        if backward:
            inputs["dout"] = random_inputs(workload)["dout"]
        yield Text(f"In the simulator: {workload.title}", style="bold")
        counts = inspection.simulate(workload, _twins(backward), inputs=inputs, progress=step)
        yield inspection.simulation_table(counts)


def _twins(backward: bool) -> list[tuple[str, str]]:
    """What is simulated, in both languages: all forwards, and the fastest backward."""
    names = [row.name for row in KERNELS if row.op == "attention" and "float32" in row.dtypes]
    chosen = names[:1] if backward else names
    return [(name, language) for name in chosen for language in compiler.LANGUAGES]


def _compilers_are_here() -> bool:
    try:
        for language in compiler.LANGUAGES:
            compiler.compiler_version(language)
    except compiler.ToolchainError:
        return False
    return True


def _model_backends() -> list[str]:
    on_gpu = compiler.gpu_missing() is None
    return [*(compiler.LANGUAGES if on_gpu else ()), *HOST_BACKENDS]


def _vision_transformer(picture: Image.Image, step: Callable[[str], None]) -> RenderableType:
    """Run a whole ViT on the picture with every backend's attention, and compare its features."""
    step(f"{MODEL}, random weights")
    model = random_model(MODEL)
    images = preprocess(picture, model.preprocessing)
    features: dict[str, np.ndarray[Any, Any]] = {}
    seconds: dict[str, float] = {}
    for backend in _model_backends():
        step(f"{MODEL} ({backend})")
        on_device = images
        if backend in compiler.LANGUAGES:
            import cupy

            on_device = cupy.asarray(images)
        model(on_device, backend=backend)  # compiles and copies the weights
        start = time.perf_counter()
        answer = model(on_device, backend=backend).features
        features[backend] = answer.get() if hasattr(answer, "get") else answer
        seconds[backend] = time.perf_counter() - start
    wanted = features["reference"]
    rows = [
        (backend, seconds[backend], float(np.abs(x - wanted).max() / np.abs(wanted).max()))
        for backend, x in features.items()
    ]
    title = f"Vision transformer {MODEL}, seeded random weights: trained on nothing"
    return report.model_table(title, rows)
