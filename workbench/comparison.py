"""One problem on every kernel, language and backend: how fast and how right each of them is.

`compare` runs one `Workload` on everything that takes it here, checks the results against the
float64 reference, and measures the ceilings in the same run on the same devices, so that a share
of them means something.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench import bench, checks
from workbench import compile as compiler
from workbench.arrays import array_module
from workbench.problem import (
    BACKENDS,
    HOST_BACKENDS,
    KERNEL_BACKENDS,
    SIMULATOR_ARCH,
    SIMULATOR_BACKENDS,
    Array,
)
from workbench.workload import Oracle, Workload

if TYPE_CHECKING:
    from workbench.table import Kernel


CEILINGS = {  # by operation and whether it is a GPU's: what its share is of
    ("attention", True): "cuBLAS matmul",
    ("attention", False): "NumPy matmul",
    ("vector_add", True): "device-to-device copy",
    ("vector_add", False): "copy by all cores",
}
REFERENCE_BYTES = 4 * 2**30  # the reference holds this much of N x N matrices at most


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel in one language, or one host backend, on the workload.

    Attributes
    ----------
    error : float, optional
        Largest difference from the float64 oracle, over all results, each in units of its own
        largest value.
    seconds, seconds_min : float, optional
        Median and minimum time of one call.
    rate : float, optional
        In the workload's unit.
    ceiling : float, optional
        What the device reached in the same run, in the same unit.
    registers, stack_bytes, shared_bytes : int, optional
        A thread's registers and local memory (spills included), and a block's shared memory: of
        the launch that takes most.
    reason : str, optional
        Why there are no numbers.
    """

    kernel: str | None
    backend: str
    error: float | None = None
    seconds: float | None = None
    seconds_min: float | None = None
    rate: float | None = None
    ceiling: float | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    reason: str | None = None

    @property
    def share(self) -> float | None:
        """Fraction of the ceiling that was reached."""
        return self.rate / self.ceiling if self.rate and self.ceiling else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of one workload.

    Attributes
    ----------
    devices : list of str
        Names of the GPU and the CPU, as far as they were used.
    ceilings : dict
        What they reached in the same run, in the workload's unit, by what was measured.
    checked : float
        Fraction of the heads, or of the elements of a `vector_add`, that the oracle looked at.
    in_l2 : bool
        Whether repeated calls find their inputs in the GPU's L2 cache: the times are warm ones.
    """

    workload: Workload
    rows: tuple[Row, ...]
    devices: list[str]
    ceilings: dict[str, float]
    checked: float
    in_l2: bool = False


def targets(
    op: str, backends: Sequence[str] | None = None, kernels: Sequence[str] | None = None
) -> list[tuple[str | None, str]]:
    """List (kernel, backend) of everything that could run `op`, twins next to each other.

    The simulators are slow: they are listed only where `backends` names them.

    Raises
    ------
    ValueError
        For a backend or a kernel that there is not.
    """
    from workbench.table import KERNELS

    known = [backend for backend in BACKENDS if backend != "auto"]
    for backend in backends or ():
        if backend not in known:
            raise ValueError(f"there is no backend {backend!r}; there are {', '.join(known)}")
    wanted = backends or [backend for backend in known if backend not in SIMULATOR_BACKENDS]
    names = [row.name for row in KERNELS if row.op == op]
    for name in kernels or ():
        if name not in names:
            raise ValueError(f"there is no {op} kernel {name!r}; there are {', '.join(names)}")
    listed: list[tuple[str | None, str]] = [
        (row.name, backend)
        for row in KERNELS
        if row.op == op and (not kernels or row.name in kernels)
        for backend in KERNEL_BACKENDS
        if _language(backend) in row.languages
    ]
    if not kernels:
        listed += [(None, backend) for backend in HOST_BACKENDS]
    return [target for target in listed if target[1] in wanted]


def compare(
    workload: Workload,
    which: Sequence[tuple[str | None, str]],
    *,
    inputs: dict[str, Array] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run a workload on every (kernel, backend) of `which` that takes it here.

    Parameters
    ----------
    inputs : dict of arrays, optional
        q, k, v (and dout), or a and b; random ones by default.
    progress : callable
        Is told what is about to be done, `count_steps` times.
    """
    gpu_missing = compiler.gpu_missing()
    on_gpu = gpu_missing is None and any(backend in compiler.LANGUAGES for _, backend in which)
    on_host = any(backend not in compiler.LANGUAGES for _, backend in which)
    progress("float64 oracle")
    oracle = Oracle(workload, inputs)
    progress("ceilings")
    ceilings: dict[str, float] = {}
    if on_gpu:
        ceilings[CEILINGS[workload.op, True]] = bench.ceiling_gpu(workload.op, workload.dtype)
    if any(backend in HOST_BACKENDS for _, backend in which):
        ceilings[CEILINGS[workload.op, False]] = bench.ceiling_host(workload.op, workload.dtype)

    rows = []
    for kernel, backend in which:
        progress(backend if kernel is None else f"{kernel} ({backend})")
        if backend in compiler.LANGUAGES and gpu_missing is not None:
            rows.append(Row(kernel, backend, reason=gpu_missing))
            continue
        rows.append(_measure(workload, oracle, kernel, backend, ceilings))
    devices = ([bench.gpu_name()] if on_gpu else []) + ([bench.cpu_name()] if on_host else [])
    nbytes = sum(x.nbytes for x in oracle.inputs.values())
    in_l2 = on_gpu and nbytes <= bench.l2_bytes()
    return Comparison(workload, tuple(rows), devices, ceilings, oracle.checked, in_l2)


def count_steps(which: Sequence[object]) -> int:
    """Count the calls of `compare`'s progress: the oracle, the ceilings and each row."""
    return 2 + len(which)


def _measure(
    workload: Workload,
    oracle: Oracle,
    kernel: str | None,
    backend: str,
    ceilings: dict[str, float],
) -> Row:
    """Run one row; whatever declines or fails says so in it."""
    on_gpu = backend in compiler.LANGUAGES
    matrices = 8 * workload.batch * workload.heads_q * workload.seqlen_q * workload.seqlen_k
    if backend == "reference" and workload.op == "attention" and matrices > REFERENCE_BYTES:
        size = f"{matrices / 2**30:.0f} GiB"
        return Row(kernel, backend, reason=f"its seqlen_q x seqlen_k matrices take {size} each")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = _placed(oracle.inputs, backend)
            call = prepared_call(workload, x, kernel, backend)
            results = call()
            timing = bench.time_gpu(call) if on_gpu else bench.time_host(call)
        used = _resources(workload, x, kernel, backend) if kernel else (None,) * 3
    except _expected_failures() as error:
        return Row(kernel, backend, reason=_phrase(error))
    rate = workload.work / timing.median / (1e9 if workload.op == "vector_add" else 1e12)
    return Row(
        kernel,
        backend,
        error=oracle.error(results),
        seconds=timing.median,
        seconds_min=timing.minimum,
        # How fast a simulator is says nothing about the kernel.
        rate=None if backend in SIMULATOR_BACKENDS else rate,
        ceiling=ceilings.get(CEILINGS[workload.op, on_gpu]),
        registers=used[0],
        stack_bytes=used[1],
        shared_bytes=used[2],
    )


def _language(backend: str) -> str:
    return backend.removesuffix("-simulator")


def _placed(inputs: dict[str, Array], backend: str) -> dict[str, Array]:
    """Bring the inputs to where a backend reads them without copying."""
    if backend not in compiler.LANGUAGES:
        return inputs
    import cupy

    return {name: cupy.asarray(x) for name, x in inputs.items()}


def prepared_call(
    workload: Workload, x: dict[str, Array], kernel: str | None, backend: str
) -> Callable[[], dict[str, Array]]:
    """Bind the call to time; `vector_add` gets its output allocated once."""
    import workbench

    chosen: dict[str, Any] = {"backend": backend, "kernel": kernel}
    if workload.op == "vector_add":
        out = workbench.vector_add(x["a"], x["b"], **chosen)
        return lambda: {"out": workbench.vector_add(x["a"], x["b"], out=out, **chosen)}
    q, k, v = x["q"], x["k"], x["v"]
    chosen |= workload.options
    if not workload.backward:
        return lambda: {"out": workbench.attention(q, k, v, **chosen)}
    dout = x["dout"]
    out, lse = workbench.attention(q, k, v, return_lse=True, **chosen)

    def backward() -> dict[str, Array]:
        gradients = workbench.attention_backward(dout, q, k, v, out, lse, **chosen)
        return {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}

    return backward


def _resources(
    workload: Workload, x: dict[str, Array], kernel: str, backend: str
) -> tuple[int, int, int]:
    """Find the most registers, stack and shared memory that a launch of a call takes."""
    from workbench.table import KERNELS

    xp = array_module(next(iter(x.values())))
    op, named = workload.op, dict(x)
    options: dict[str, Any] = {"backend": backend}
    if op == "attention":
        options |= workload.options | {"scale": None, "layout": "bhnd"}
        if workload.backward:
            op = "attention_backward"
            named["out"] = xp.empty_like(x["dout"])
            accumulator = "float64" if workload.dtype == "float64" else "float32"
            named["lse"] = xp.empty(x["dout"].shape[:-1], accumulator)
            options |= {"deterministic": False, "return_dbias": False}
        else:
            options["return_lse"] = False
    prepared = checks.PREPARE[op](named, **options)
    row = next(row for row in KERNELS if row.name == kernel)
    simulated = backend in SIMULATOR_BACKENDS
    arch = SIMULATOR_ARCH if simulated else compiler.device_arch(prepared.device)
    launches = row.work(prepared.problem, arch).launches
    built = [compiler.build(_language(backend), launch.entry, arch) for launch in launches]
    return (
        max(binary.registers for binary in built),
        max(binary.stack_bytes for binary in built),
        max(
            launch.shared_memory + binary.static_shared_bytes
            for launch, binary in zip(launches, built, strict=True)
        ),
    )


def _expected_failures() -> tuple[type[Exception], ...]:
    """What may stop one row without being a mistake of the program: it becomes the row's reason."""
    from workbench.table import NoKernelError

    failures: list[type[Exception]] = [
        NoKernelError, compiler.CompileError, compiler.ToolchainError, MemoryError,
    ]  # fmt: skip
    if compiler.gpu_missing() is None:
        memory = importlib.import_module("cupy.cuda.memory")
        failures.append(memory.OutOfMemoryError)
    return tuple(failures)


def _phrase(error: Exception) -> str:
    """The one line of an error that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    # A NoKernelError lists one reason a kernel; the caller asked for just one kernel.
    listed = lines[0].endswith(":") and len(lines) > 1
    return lines[1].partition(": ")[2] or lines[1] if listed else lines[0]


@dataclass(frozen=True, slots=True)
class Availability:
    """In which languages a kernel compiles here, whether it runs, and what is missing for more."""

    compiles: list[str]
    runs: bool
    reasons: list[str]


def availability(row: Kernel) -> Availability:
    """Find out what of a row of `KERNELS` works on this machine."""
    compiles, reasons = [], []
    for language in row.languages:
        try:
            compiler.compiler_version(language)
        except compiler.ToolchainError as error:
            reasons.append(str(error))
        else:
            compiles.append(language)
    missing = compiler.gpu_missing()
    if missing is not None:
        reasons.append(missing)
    return Availability(compiles, missing is None, reasons)
