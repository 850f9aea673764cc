"""Times of calls on the CPU and the GPU, and the ceilings that they are compared with.

Times on a GPU are CUDA events around back-to-back calls, times on the CPU are `time.perf_counter`;
both are the median of several repeats after a warm-up. A ceiling is what the same device reaches in
a copy, or in a matrix product by cuBLAS or NumPy.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench import compile as compiler
from workbench.blas import times_transposed
from workbench.problem import DTYPES

REPEATS = 10
SECONDS_PER_ROW = 1.0  # a row stops repeating after this; a single slow call may pass it
BATCH_SECONDS = 2e-3  # GPU calls are timed in batches of about this, so that events cost nothing


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
    multiply = times_transposed if dtype == "bfloat16" else cupy.matmul
    return 2e-12 * n**3 / time_gpu(lambda: multiply(a, a, out=out)).minimum


# ------------------------------------------------------------------------------------- devices


def gpu_name() -> str:
    """Name the current GPU: ``NVIDIA H200 (sm_90)``."""
    import cupy

    device = cupy.cuda.Device().id
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return f"{name} ({compiler.device_arch(device)})"


def l2_bytes() -> int:
    """Size of the current GPU's L2 cache."""
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
