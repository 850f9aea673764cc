"""Times and ceilings."""

from __future__ import annotations

import pytest

from workbench import bench
from workbench.problem import DTYPES


def test_host_times_are_median_and_minimum_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9.0, 0.03, 0.01, 0.02] + [0.02] * 7  # the first is the warm-up
    clock = 0.0
    calls = 0

    def call() -> None:
        nonlocal clock, calls
        clock += durations[calls]
        calls += 1

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    timing = bench.time_host(call)
    assert calls == 1 + bench.REPEATS
    assert timing.median == pytest.approx(0.02)
    assert timing.minimum == pytest.approx(0.01)


def test_a_slow_call_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def call() -> None:
        nonlocal clock
        clock += 5.0

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    assert bench.time_host(call).median == 5.0
    assert clock == 10.0


@pytest.mark.parametrize("op", ["attention", "vector_add"])
def test_the_ceiling_of_the_cpu_is_positive(op: str) -> None:
    assert bench.ceiling_host(op, "float32") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ceilings_of_the_gpu_are_positive(dtype: str) -> None:
    assert bench.ceiling_gpu("attention", dtype) > 0.1
    assert bench.ceiling_gpu("vector_add", dtype) > 10


@pytest.mark.gpu
def test_gpu_times_are_of_one_call() -> None:
    import cupy

    source = cupy.ones(2**26, dtype=cupy.float32)
    target = cupy.empty_like(source)
    once = bench.time_gpu(lambda: cupy.copyto(target, source))

    def thrice() -> None:
        for _ in range(3):
            cupy.copyto(target, source)

    assert bench.time_gpu(thrice).median == pytest.approx(3 * once.median, rel=0.3)
