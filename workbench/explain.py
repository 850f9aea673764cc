"""Which kernel would run for a call, why the others would not, and what it takes of the GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from workbench import checks, dispatch, table
from workbench import compile as compiler
from workbench.arrays import device_of, is_device_array
from workbench.problem import (
    DEVICE_BACKENDS,
    HOST_BACKENDS,
    SIMULATOR_ARCH,
    SIMULATOR_BACKENDS,
    Array,
)


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One kernel launch.

    Attributes
    ----------
    name : str
        Of the kernel function.
    constants : dict
        Its template parameters: tiles, dtype, features.
    grid, block : int
        Blocks, and threads a block.
    shared_memory : int
        Bytes a block, static and dynamic.
    registers : int
        A thread.
    stack_bytes : int
        Local memory a thread, spills included.
    """

    name: str
    constants: dict[str, int | str]
    grid: int
    block: int
    shared_memory: int
    registers: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Answer of `explain`; `str` of it is a readable summary.

    Attributes
    ----------
    backend : str
        The backend that would run.
    arch : str or None
        The GPU architecture that was asked about; None on the host.
    kernel : str or None
        Name of the row of `KERNELS`; None on the host, or where every kernel declines.
    reasons : dict
        For every kernel considered the sentences why it declines; empty where it would do.
    notes : list of str
        What is copied or converted on the way in.
    launches : list of LaunchReport
    workspace_bytes : int
        Device memory beyond inputs and outputs.
    """

    backend: str
    arch: str | None = None
    kernel: str | None = None
    reasons: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    launches: list[LaunchReport] = field(default_factory=list)
    workspace_bytes: int = 0

    def __str__(self) -> str:
        on_gpu = f" on {self.arch}: {self.kernel or 'no kernel takes this'}" if self.arch else ""
        lines = [f"backend {self.backend}{on_gpu}"]
        for launch in self.launches:
            constants = ", ".join(f"{k}={v}" for k, v in launch.constants.items())
            lines.append(f"  {launch.name}<{constants}>")
            lines.append(
                f"    {launch.grid} blocks of {launch.block} threads, {launch.shared_memory} bytes "
                f"of shared memory, {launch.registers} registers, {launch.stack_bytes} of stack"
            )
        if self.workspace_bytes:
            lines.append(f"  workspace: {self.workspace_bytes} bytes")
        lines += [f"  {note}" for note in self.notes]
        for name, sentences in self.reasons.items():
            if sentences:
                lines.append(f"  not {name}: {'; '.join(sentences)}")
        return "\n".join(lines)


MINIMUM_ARCH = 75  # Turing: what CUDA 13 still compiles for


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    layout: str = "bhnd",
    backend: str = "auto",
    kernel: str | None = None,
    arch: str | None = None,
) -> Explanation:
    """Say what `attention` would do with the same arguments; nothing is computed.

    Parameters
    ----------
    q, k, v, causal, window, mask, bias, scale, softcap, q_lengths, kv_lengths, layout, backend, \
kernel
        As given to `attention`.
    arch : str, optional
        Like ``"sm_90"``: answer for that GPU, which need not be there; its kernels are compiled
        here to learn their registers.

    Returns
    -------
    Explanation

    Raises
    ------
    TypeError, ValueError
        As `attention` does, and for an `arch` that is none.
    ToolchainError
        If the compiler of the language is missing.
    """
    if arch is not None and not (isinstance(arch, str) and re.fullmatch(r"sm_\d{2,3}", arch)):
        raise ValueError(f"arch is {arch!r}; it takes a GPU architecture like 'sm_90', or None")
    if arch is not None and int(arch.removeprefix("sm_")) < MINIMUM_ARCH:
        raise ValueError(f"arch is {arch!r}; the kernels need sm_{MINIMUM_ARCH} or newer")
    if arch is not None and backend in (*HOST_BACKENDS, *SIMULATOR_BACKENDS):
        raise ValueError(f"backend {backend!r} runs on the host; arch goes with 'cuda' or 'numba'")
    named = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias,
             "q_lengths": q_lengths, "kv_lengths": kv_lengths}  # fmt: skip
    options = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "layout": layout,
    }
    named = checks.as_arrays(named)
    on_device = is_device_array(named["q"])
    chosen = checks.resolve_backend(backend, on_device)
    if chosen in SIMULATOR_BACKENDS and arch is None:
        arch = SIMULATOR_ARCH
    if arch is not None and chosen in HOST_BACKENDS:
        chosen = "cuda"
    language = chosen.removesuffix("-simulator")
    # Host arrays are described where they are: what would be copied to the GPU has their strides.
    place = language if on_device or language in HOST_BACKENDS else "reference"
    with device_of(named.values()):
        prepared = checks.prepare_attention(named, return_lse=True, backend=place, **options)
    if language in HOST_BACKENDS:
        dispatch.no_kernel_on_host(kernel, language)
        missing = compiler.gpu_missing()
        reasons = {name: [missing] for name in DEVICE_BACKENDS} if missing else {}
        return Explanation(language, reasons=reasons, notes=prepared.copied)
    if arch is None:
        cupy = compiler.require_gpu(language)
        arch = compiler.device_arch(prepared.device if on_device else cupy.cuda.Device().id)
    problem = checks.with_strides(prepared.problem, prepared.arrays)
    reasons = table.objections(problem, language, arch, kernel)
    row = next((r for r in table.KERNELS if r.name in reasons and not reasons[r.name]), None)
    if row is None:
        return Explanation(chosen, arch, None, reasons, prepared.copied)
    work = row.work(problem, arch)
    return Explanation(
        chosen, arch, row.name, reasons, prepared.copied,
        [_report(language, launch, arch) for launch in work.launches],
        sum(space.nbytes for space in work.workspaces),
    )  # fmt: skip


def _report(language: str, launch: Any, arch: str) -> LaunchReport:
    binary = compiler.build(language, launch.entry, arch)
    return LaunchReport(
        launch.entry.name,
        dict(launch.entry.constants),
        launch.grid,
        launch.block,
        launch.shared_memory + binary.static_shared_bytes,
        binary.registers,
        binary.stack_bytes,
    )
