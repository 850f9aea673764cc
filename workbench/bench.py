"""How fast and how right every backend and kernel is on one problem, and how fast it could be.

`compare` runs one `Workload` on everything that takes it here. Times on a GPU are CUDA events
around back-to-back calls, times on the CPU are `time.perf_counter`; both are the median of several
repeats after a warm-up. The ceilings (copy bandwidth, matrix products by cuBLAS or NumPy) are
measured in the same run on the same device, so that a share of them means something.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench import compile as compiler
from workbench import reference
from workbench.checks import DTYPES

if TYPE_CHECKING:
    from workbench.table import Kernel

Array = Any

OPS = ("attention", "vector_add")
HOST_BACKENDS = ("cpu", "reference")
CEILINGS = {  # by operation and whether it is a GPU's: what its share is of
    ("attention", True): "cuBLAS matmul",
    ("attention", False): "NumPy matmul",
    ("vector_add", True): "device-to-device copy",
    ("vector_add", False): "copy by all cores",
}
REPEATS = 10
SECONDS_PER_ROW = 1.0  # a row stops repeating after this; a single slow call may pass it
BATCH_SECONDS = 2e-3  # GPU calls are timed in batches of about this, so that events cost nothing
ORACLE_FLOPS = 2e10  # about a second: the oracle checks the heads that this buys, one at least
ORACLE_ELEMENTS = 2**22  # of vector_add, at either end
ORACLE_ROWS = 1024  # rows of one head at a time
DRAWN_ELEMENTS = 2**24 + 1  # of each input; odd, so that repetitions do not line up with tiles
REFERENCE_BYTES = 4 * 2**30  # the reference holds this much of N x N matrices at most


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem to compare backends and kernels on.

    Attributes
    ----------
    window : tuple, optional
        Keys before and after a query's position that it sees; None is open.
    size : int
        Elements of `vector_add`; the other sizes are those of attention.
    """

    op: str
    dtype: str = "float32"
    batch: int = 1
    heads_q: int = 8
    heads_kv: int = 8
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    backward: bool = False
    size: int = 2**24

    @property
    def title(self) -> str:
        """One line for the head of a table."""
        if self.op == "vector_add":
            return f"vector_add, {self.size:,} elements, {self.dtype}"
        parts = [f"attention {'backward' if self.backward else 'forward'}", f"batch {self.batch}"]
        grouped = "" if self.heads_q == self.heads_kv else f"/{self.heads_kv}"
        parts.append(f"heads {self.heads_q}{grouped}")
        same = self.seqlen_q == self.seqlen_k
        parts.append(f"seqlen {self.seqlen_q}" + ("" if same else f"/{self.seqlen_k}"))
        same = self.head_dim == self.head_dim_v
        parts.append(f"head_dim {self.head_dim}" + ("" if same else f"/{self.head_dim_v}"))
        parts.append(self.dtype)
        if self.causal:
            parts.append("causal")
        if self.window is not None:
            ends = ("all" if end is None else str(end) for end in self.window)
            parts.append(f"window {','.join(ends)}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        return ", ".join(parts)

    def asdict(self) -> dict[str, Any]:
        """Give the fields that mean something for the operation."""
        fields = dataclasses.asdict(self)
        if self.op == "vector_add":
            return {name: fields[name] for name in ("op", "dtype", "size")}
        del fields["size"]
        return fields

    @property
    def unit(self) -> str:
        """Of `Row.rate` and of the ceiling that it is compared with."""
        return "GB/s" if self.op == "vector_add" else "TFLOP/s"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attention` that choose the masking."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    def visible(self, start: int, stop: int) -> Array:
        """Which keys the query rows from `start` to `stop` see, as booleans; None for all."""
        if not self.causal and self.window is None:
            return None
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        position = np.arange(start, stop)[:, None] + (self.seqlen_k - self.seqlen_q)
        key = np.arange(self.seqlen_k)[None, :]
        seen = np.ones((stop - start, self.seqlen_k), dtype=bool)
        if left is not None:
            seen &= key >= position - left
        if right is not None:
            seen &= key <= position + right
        return seen

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that are not hidden."""
        total = 0
        for start, stop in _chunks(self.seqlen_q):
            seen = self.visible(start, stop)
            total += (stop - start) * self.seqlen_k if seen is None else int(seen.sum())
        return total

    @property
    def work(self) -> float:
        """Floating-point operations of one call, or bytes moved by a `vector_add`.

        Only visible pairs count: 2 (head_dim + head_dim_v) operations each in the forward, and five
        products instead of two in the backward.
        """
        if self.op == "vector_add":
            return 3.0 * self.size * DTYPES[self.dtype].itemsize
        a_pair = 2 * (self.head_dim + self.head_dim_v)
        if self.backward:
            a_pair = 2 * (3 * self.head_dim + 2 * self.head_dim_v)
        return float(self.batch * self.heads_q * self.pairs * a_pair)


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


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call."""

    median: float
    minimum: float


# ------------------------------------------------------------------------------------- timing


def time_host(call: Callable[[], object]) -> Timing:
    """Time a call on the CPU, after one call that warms up."""
    call()
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < SECONDS_PER_ROW:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), min(seconds))


def time_gpu(call: Callable[[], object]) -> Timing:
    """Time a call that launches kernels on CuPy's current stream, by CUDA events.

    Calls are queued back to back: the time is the device's, unless the host takes longer to queue
    a call than the device to run it.
    """
    import cupy

    def batch(calls: int) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        milliseconds: float = cupy.cuda.get_elapsed_time(start, end)
        return milliseconds * 1e-3 / calls

    call()
    once = batch(1)
    calls = max(1, min(1000, round(BATCH_SECONDS / max(once, 1e-7))))
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) * calls < SECONDS_PER_ROW:
        seconds.append(batch(calls))
    return Timing(statistics.median(seconds), min(seconds))


# ------------------------------------------------------------------------------------ ceilings


def ceiling_host(op: str, dtype: str) -> float:
    """Measure GB/s of a copy by all cores, or TFLOP/s of NumPy's matrix product, on the CPU.

    The CPU computes in float32 what it is given in 16 bits.
    """
    if op == "vector_add":
        cores = os.cpu_count() or 1
        source = np.ones(2**25, dtype=np.float32)
        target = np.empty_like(source)
        parts = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
        with ThreadPoolExecutor(cores) as pool:
            timing = time_host(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))
        return 2e-9 * source.nbytes / timing.minimum
    n = 1536
    a = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
    if dtype == "float64":
        a = a.astype(np.float64)
    out = np.empty_like(a)
    return 2e-12 * n**3 / time_host(lambda: np.matmul(a, a, out=out)).minimum


def ceiling_gpu(op: str, dtype: str) -> float:
    """Measure GB/s of a copy, or TFLOP/s of cuBLAS, on the current GPU."""
    import cupy

    if op == "vector_add":
        source = cupy.ones(2**28, dtype=cupy.float32)
        target = cupy.empty_like(source)
        moved = 2e-9 * int(source.nbytes)
        return moved / time_gpu(lambda: cupy.copyto(target, source)).minimum
    n = 8192 if dtype in ("float16", "bfloat16") else 4096
    # Random data: a GPU clocks higher on zeros, and no kernel is timed on those.
    strip = np.random.default_rng(0).standard_normal((512, n), dtype=np.float32)
    a = cupy.asarray(np.tile(strip.astype(DTYPES[dtype]), (n // 512, 1)))
    out = cupy.empty_like(a)
    multiply = _gemm_bfloat16 if dtype == "bfloat16" else cupy.matmul
    return 2e-12 * n**3 / time_gpu(lambda: multiply(a, a, out=out)).minimum


def _gemm_bfloat16(a: Array, b: Array, out: Array) -> None:
    """Multiply square bfloat16 matrices by cuBLAS; `cupy.matmul` does not take them."""
    from cupy.cuda.device import get_cublas_handle
    from cupy_backends.cuda.libs import cublas

    bfloat16 = 14  # CUDA_R_16BF
    n = len(a)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    handle = get_cublas_handle()
    # cuBLAS counts by columns: the transposed product b^T a^T lands as the rows of a b.
    cublas.gemmEx(
        handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, n, n,
        one.ctypes.data, b.data.ptr, bfloat16, n, a.data.ptr, bfloat16, n,
        zero.ctypes.data, out.data.ptr, bfloat16, n,
        cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


# -------------------------------------------------------------------------------------- oracle


class Oracle:
    """The inputs of a workload, and the float64 results that every backend is measured against.

    The oracle walks over whole heads in chunks of rows, so that no more than a strip of a head's
    score matrix is in memory, and stops after about a second's worth of heads.
    """

    def __init__(self, workload: Workload, inputs: dict[str, Array] | None = None) -> None:
        self.workload = workload
        self.inputs = random_inputs(workload) if inputs is None else inputs
        self.checked = 0.0
        self._wanted: list[tuple[Any, dict[str, Array]]] = []
        if workload.op == "vector_add":
            ends = {(0, min(workload.size, ORACLE_ELEMENTS)),
                    (max(0, workload.size - ORACLE_ELEMENTS), workload.size)}  # fmt: skip
            for start, stop in ends:
                a, b = (self.inputs[name][start:stop].astype(np.float64) for name in ("a", "b"))
                self._wanted.append(((start, stop), {"out": a + b}))
            self.checked = min(1.0, 2 * ORACLE_ELEMENTS / workload.size)
            return
        heads = [(b, h) for b in range(workload.batch) for h in range(workload.heads_kv)]
        a_head = workload.work / max(1, len(heads))
        count = min(len(heads), max(1, int(ORACLE_FLOPS / max(1.0, a_head))))
        for batch, head in heads[:count]:
            self._wanted.append(((batch, head), self._results_of(batch, head)))
        self.checked = count / max(1, len(heads))

    def error(self, results: dict[str, Array]) -> float:
        """Measure the largest error over all results, each in units of its largest value."""
        errors = dict.fromkeys(results, (0.0, 0.0))
        for where, wanted in self._wanted:
            for name, want in wanted.items():
                got = _to_host(results[name][self._slices(where, name)]).astype(np.float64)
                difference, scale = errors[name]
                worst = float(np.abs(got - want).max(initial=0.0))
                if not np.isfinite(got).all():
                    worst = float("inf")
                errors[name] = (
                    max(difference, worst),
                    max(scale, float(np.abs(want).max(initial=0.0))),
                )
        return max((d / s if s else d for d, s in errors.values()), default=0.0)

    def _slices(self, where: Any, name: str) -> Any:
        if self.workload.op == "vector_add":
            return slice(*where)
        batch, head = where
        group = self.workload.heads_q // self.workload.heads_kv
        if name in ("k", "v", "dk", "dv"):
            return slice(batch, batch + 1), slice(head, head + 1)
        return slice(batch, batch + 1), slice(head * group, (head + 1) * group)

    def _results_of(self, batch: int, head: int) -> dict[str, Array]:
        workload = self.workload
        where = (batch, head)
        parts = {
            name: x[self._slices(where, name)].astype(np.float64) for name, x in self.inputs.items()
        }
        q, k, v = parts["q"], parts["k"], parts["v"]
        chunks: list[tuple[Array, ...]] = []
        for start, stop in _chunks(workload.seqlen_q):
            rows = (slice(None), slice(None), slice(start, stop))
            options: dict[str, Any] = {
                "visible": workload.visible(start, stop),
                "scale": workload.head_dim**-0.5,
                "softcap": workload.softcap,
            }
            if workload.backward:
                dq, dk, dv, _ = reference.backward(parts["dout"][rows], q[rows], k, v, **options)
                chunks.append((dq, dk, dv))
            else:
                chunks.append(reference.forward(q[rows], k, v, **options)[:1])
        along_rows = np.concatenate([chunk[0] for chunk in chunks], axis=2)
        if not workload.backward:
            return {"out": along_rows}
        # A key's gradient is a sum over the query rows.
        dk, dv = (sum(chunk[i] for chunk in chunks) for i in (1, 2))
        return {"dq": along_rows, "dk": dk, "dv": dv}


def random_inputs(workload: Workload, seed: int = 0) -> dict[str, Array]:
    """Draw the arrays that a workload takes, standard normal, in its dtype."""
    rng = np.random.default_rng(seed)
    if workload.op == "vector_add":
        shapes: dict[str, tuple[int, ...]] = {"a": (workload.size,), "b": (workload.size,)}
    else:
        batch, heads_q, heads_kv = workload.batch, workload.heads_q, workload.heads_kv
        shapes = {
            "q": (batch, heads_q, workload.seqlen_q, workload.head_dim),
            "k": (batch, heads_kv, workload.seqlen_k, workload.head_dim),
            "v": (batch, heads_kv, workload.seqlen_k, workload.head_dim_v),
        }
        if workload.backward:
            shapes["dout"] = (batch, heads_q, workload.seqlen_q, workload.head_dim_v)
    dtype = DTYPES[workload.dtype]

    def draw(shape: tuple[int, ...]) -> Array:
        # What is long repeats itself: a gigabyte of random numbers takes longer than the rest.
        some = rng.standard_normal(min(math.prod(shape), DRAWN_ELEMENTS), dtype=np.float32)
        return np.resize(some.astype(dtype), shape)

    return {name: draw(shape) for name, shape in shapes.items()}


def _chunks(rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, ORACLE_ROWS):
        yield start, min(start + ORACLE_ROWS, rows)


# ------------------------------------------------------------------------------------- compare


def targets(
    op: str, backends: Sequence[str] | None = None, kernels: Sequence[str] | None = None
) -> list[tuple[str | None, str]]:
    """List (kernel, backend) of everything that could run `op`, twins next to each other.

    Raises
    ------
    ValueError
        For a backend or a kernel that there is not.
    """
    from workbench.table import KERNELS

    known = (*compiler.LANGUAGES, *HOST_BACKENDS)
    for backend in backends or ():
        if backend not in known:
            raise ValueError(f"there is no backend {backend!r}; there are {', '.join(known)}")
    names = [row.name for row in KERNELS if row.op == op]
    for name in kernels or ():
        if name not in names:
            raise ValueError(f"there is no {op} kernel {name!r}; there are {', '.join(names)}")
    listed: list[tuple[str | None, str]] = [
        (row.name, language)
        for row in KERNELS
        if row.op == op and (not kernels or row.name in kernels)
        for language in row.languages
    ]
    if not kernels:
        listed += [(None, backend) for backend in HOST_BACKENDS]
    return [target for target in listed if not backends or target[1] in backends]


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
    on_host = any(backend in HOST_BACKENDS for _, backend in which)
    progress("float64 oracle")
    oracle = Oracle(workload, inputs)
    progress("ceilings")
    ceilings: dict[str, float] = {}
    if on_gpu:
        ceilings[CEILINGS[workload.op, True]] = ceiling_gpu(workload.op, workload.dtype)
    if on_host:
        ceilings[CEILINGS[workload.op, False]] = ceiling_host(workload.op, workload.dtype)

    rows = []
    for kernel, backend in which:
        progress(backend if kernel is None else f"{kernel} ({backend})")
        if backend in compiler.LANGUAGES and gpu_missing is not None:
            rows.append(Row(kernel, backend, reason=gpu_missing))
            continue
        rows.append(_measure(workload, oracle, kernel, backend, ceilings))
    devices = ([gpu_name()] if on_gpu else []) + ([cpu_name()] if on_host else [])
    nbytes = sum(x.nbytes for x in oracle.inputs.values())
    in_l2 = on_gpu and nbytes <= _l2_bytes()
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
            call = _prepared_call(workload, oracle.inputs, kernel, backend)
            results = call()
            timing = time_gpu(call) if on_gpu else time_host(call)
        used = _resources(workload, oracle.inputs, kernel, backend) if kernel else (None,) * 3
    except _expected_failures() as error:
        return Row(kernel, backend, reason=_phrase(error))
    rate = workload.work / timing.median / (1e9 if workload.op == "vector_add" else 1e12)
    return Row(
        kernel,
        backend,
        error=oracle.error(results),
        seconds=timing.median,
        seconds_min=timing.minimum,
        rate=rate,
        ceiling=ceilings[CEILINGS[workload.op, on_gpu]],
        registers=used[0],
        stack_bytes=used[1],
        shared_bytes=used[2],
    )


def _prepared_call(
    workload: Workload, inputs: dict[str, Array], kernel: str | None, backend: str
) -> Callable[[], dict[str, Array]]:
    """Bind the call to time: inputs on the device, outputs of `vector_add` allocated once."""
    import workbench

    x = dict(inputs)
    if backend in compiler.LANGUAGES:
        import cupy

        x = {name: cupy.asarray(value) for name, value in inputs.items()}
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
    workload: Workload, inputs: dict[str, Array], kernel: str, language: str
) -> tuple[int, int, int]:
    """Find the most registers, stack and shared memory that a launch of a call takes."""
    import cupy

    from workbench import checks
    from workbench.table import KERNELS

    x = {name: cupy.asarray(value) for name, value in inputs.items()}
    options: dict[str, Any] = {"backend": language}
    op = workload.op
    if op == "attention":
        options |= workload.options | {"scale": None, "layout": "bhnd"}
        if workload.backward:
            op = "attention_backward"
            x["out"] = cupy.empty_like(x["dout"])
            shape = x["dout"].shape[:-1]
            x["lse"] = cupy.empty(shape, "float64" if workload.dtype == "float64" else "float32")
            options |= {"deterministic": False, "return_dbias": False}
        else:
            options["return_lse"] = False
    problem = checks.PREPARE[op](x, **options).problem
    row = next(row for row in KERNELS if row.name == kernel)
    arch = compiler.device_arch(cupy.cuda.Device().id)
    launches = row.work(problem, arch).launches
    built = [compiler.build(language, launch.entry, arch) for launch in launches]
    return (
        max(binary.registers for binary in built),
        max(binary.stack_bytes for binary in built),
        max(
            launch.shared_memory + binary.static_shared_bytes
            for launch, binary in zip(launches, built, strict=True)
        ),
    )


def _to_host(x: Array) -> Array:
    return x.get() if hasattr(x, "get") else x


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


# ------------------------------------------------------------------------------------- devices


def gpu_name() -> str:
    """Name the current GPU: ``NVIDIA H200 (sm_90)``."""
    import cupy

    device = cupy.cuda.Device().id
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return f"{name} ({compiler.device_arch(device)})"


def _l2_bytes() -> int:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return int(properties["l2CacheSize"])


def cpu_name() -> str:
    """Name the processor as far as it can be known, and count its cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        name = next(models, f":{name}").partition(":")[2].strip()
    cores = os.cpu_count() or 1
    return f"{name}, {cores} core{'s' if cores > 1 else ''}"


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
