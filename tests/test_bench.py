"""Timing, counting and checking of `workbench.bench`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench import bench, reference
from workbench.bench import Oracle, Row, Workload
from workbench.checks import DTYPES
from workbench.table import KERNELS, NoKernelError

SMALL = Workload("attention", batch=2, heads_q=4, heads_kv=2, seqlen_q=19, seqlen_k=23, head_dim=8)
SMALL = replace(SMALL, head_dim_v=6)


# ----------------------------------------------------------------------------------- counting


def test_flops_are_counted_as_the_flashattention_papers_count_them() -> None:
    full = Workload("attention", batch=2, heads_q=3, heads_kv=3, seqlen_q=64, seqlen_k=64)
    assert full.work == 4 * 2 * 3 * 64 * 64 * 64
    assert replace(full, backward=True).work == 2.5 * full.work
    # The papers take half for causal; what a query sees is that and the diagonal.
    assert replace(full, causal=True).work == full.work * (64 * 65 / 2) / 64**2


def test_a_vector_add_moves_three_arrays() -> None:
    assert Workload("vector_add", "float64", size=10).work == 3 * 10 * 8


@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, (3, 5)), (False, (None, 2)), (False, (4, None)), (True, (6, 2))],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(19, 23), (23, 19)])
def test_visible_agrees_with_the_reference(
    causal: bool, window: Any, seqlen_q: int, seqlen_k: int
) -> None:
    workload = replace(SMALL, causal=causal, window=window, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    left, right = window or (None, None)
    problem: Any = SimpleNamespace(
        batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, top_left=False, window_left=left,
        window_right=min(right or 0, 0) if causal else right,
    )  # fmt: skip
    arrays: Any = SimpleNamespace(mask=None, q_lengths=None, kv_lengths=None)
    want = np.broadcast_to(reference.visible(problem, arrays), (1, 1, seqlen_q, seqlen_k))[0, 0]
    got = np.concatenate([workload.visible(0, 7), workload.visible(7, seqlen_q)])
    np.testing.assert_array_equal(got, want)
    assert workload.pairs == want.sum()


# -------------------------------------------------------------------------------------- oracle


def exact(workload: Workload, inputs: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "visible": workload.visible(0, workload.seqlen_q),
        "scale": workload.head_dim**-0.5,
        "softcap": workload.softcap,
    }
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if not workload.backward:
        return {"out": reference.forward(q, k, v, **options)[0]}
    dq, dk, dv, _ = reference.backward(inputs["dout"], q, k, v, **options)
    return {"dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_is_the_reference_head_by_head(
    monkeypatch: pytest.MonkeyPatch, backward: bool, causal: bool
) -> None:
    monkeypatch.setattr(bench, "ORACLE_ROWS", 7)
    workload = replace(SMALL, backward=backward, causal=causal, softcap=3.0)
    oracle = Oracle(workload)
    assert oracle.checked == 1.0
    results = exact(workload, oracle.inputs)
    assert oracle.error(results) < 1e-14
    for name, x in results.items():
        for index in (0, -1):
            wrong = x.copy()
            wrong.flat[index] += 0.5 * np.abs(x).max()
            assert oracle.error(results | {name: wrong}) == pytest.approx(0.5)
            wrong.flat[index] = np.nan
            assert oracle.error(results | {name: wrong}) == np.inf


def test_the_oracle_stops_after_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ORACLE_FLOPS", 1.0)
    oracle = Oracle(SMALL)
    assert oracle.checked == 1 / 4  # one of two batch elements with two key heads
    results = exact(SMALL, oracle.inputs)
    results["out"][1] = np.nan  # not looked at
    assert oracle.error(results) < 1e-14
    results["out"][0, 1] += 1.0  # the second query head of the first key head
    assert oracle.error(results) > 0.1


def test_the_oracle_of_a_long_vector_add_looks_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "ORACLE_ELEMENTS", 10)
    monkeypatch.setattr(bench, "DRAWN_ELEMENTS", 7)
    oracle = Oracle(Workload("vector_add", "float64", size=100))
    assert oracle.checked == 0.2
    right = oracle.inputs["a"] + oracle.inputs["b"]
    assert oracle.error({"out": right}) == 0.0
    for index, seen in ((0, True), (9, True), (10, False), (89, False), (90, True), (99, True)):
        wrong = right.copy()
        wrong[index] += 1.0
        assert (oracle.error({"out": wrong}) > 0) is seen


def test_the_oracle_of_vector_add() -> None:
    oracle = Oracle(Workload("vector_add", "float16", size=100))
    a, b = (oracle.inputs[name].astype(np.float64) for name in ("a", "b"))
    assert oracle.error({"out": a + b}) == 0.0
    assert 0.0 < oracle.error({"out": (a + b).astype(np.float16)}) < 1e-3
    assert oracle.error({"out": a - b}) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_have_the_workloads_dtype_and_shapes(dtype: str) -> None:
    inputs = bench.random_inputs(replace(SMALL, dtype=dtype, backward=True))
    assert {x.dtype for x in inputs.values()} == {DTYPES[dtype]}
    assert {name: x.shape for name, x in inputs.items()} == {
        "q": (2, 4, 19, 8),
        "k": (2, 2, 23, 8),
        "v": (2, 2, 23, 6),
        "dout": (2, 4, 19, 6),
    }


# -------------------------------------------------------------------------------------- timing


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


@pytest.mark.parametrize("op", bench.OPS)
def test_the_ceiling_of_the_cpu_is_positive(op: str) -> None:
    assert bench.ceiling_host(op, "float32") > 0


# ------------------------------------------------------------------------------------- compare


def test_twins_stand_next_to_each_other_and_hosts_come_last() -> None:
    which = bench.targets("attention")
    names = [row.name for row in KERNELS if row.op == "attention"]
    assert which[:2] == [(names[0], "cuda"), (names[0], "numba")]
    assert which[-2:] == [(None, "cpu"), (None, "reference")]
    assert bench.targets("attention", ["numba"], [names[1]]) == [(names[1], "numba")]
    with pytest.raises(ValueError, match="no backend 'gpu'"):
        bench.targets("attention", ["gpu"])
    with pytest.raises(ValueError, match="no vector_add kernel 'attention_naive'"):
        bench.targets("vector_add", None, ["attention_naive"])


@pytest.mark.parametrize("backward", [False, True])
def test_host_backends_are_compared(backward: bool) -> None:
    workload = replace(SMALL, backward=backward, causal=True)
    told: list[str] = []
    which = bench.targets("attention", ["cpu", "reference"])
    comparison = bench.compare(workload, which, progress=told.append)
    assert len(told) == bench.count_steps(which)
    assert [row.backend for row in comparison.rows] == ["cpu", "reference"]
    for row in comparison.rows:
        assert row.reason is None
        assert row.error is not None
        assert row.error < 1e-5
        assert row.seconds is not None
        assert row.seconds >= row.seconds_min > 0
        assert row.rate == pytest.approx(workload.work / row.seconds / 1e12)
        assert row.share == pytest.approx(row.rate / row.ceiling)


def test_a_vector_add_is_compared() -> None:
    workload = Workload("vector_add", size=1000)
    comparison = bench.compare(workload, bench.targets("vector_add", ["cpu"]))
    (row,) = comparison.rows
    assert row.rate == pytest.approx(workload.work / row.seconds / 1e9)
    assert row.error < 1e-7


def test_a_row_that_declines_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench

    def decline(*_args: object, **_options: object) -> None:
        raise NoKernelError("no cuda kernel takes this problem:\n  some_kernel: it is Tuesday")

    monkeypatch.setattr(workbench, "attention", decline)
    (row,) = bench.compare(SMALL, [(None, "reference")]).rows
    assert row == Row(None, "reference", reason="it is Tuesday")


def test_a_mistake_is_not_hidden_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench

    def fail(*_args: object, **_options: object) -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(workbench, "attention", fail)
    with pytest.raises(AssertionError, match="a mistake"):
        bench.compare(SMALL, [(None, "reference")])


def test_the_reference_declines_what_does_not_fit_in_memory() -> None:
    workload = replace(SMALL, heads_q=64, seqlen_q=2**15, seqlen_k=2**15)
    row = bench._measure(workload, Oracle(SMALL), None, "reference", {})
    assert row.reason is not None
    assert "1024 GiB each" in row.reason


# ----------------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ceilings_of_the_gpu_are_positive(dtype: str) -> None:
    assert bench.ceiling_gpu("attention", dtype) > 0.1
    assert bench.ceiling_gpu("vector_add", dtype) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_every_kernel_is_compared_on_the_gpu(backward: bool) -> None:
    workload = replace(SMALL, backward=backward, causal=True)
    comparison = bench.compare(workload, bench.targets("attention", ["cuda", "numba"]))
    assert comparison.in_l2
    for row in comparison.rows:
        assert row.reason is None, row
        assert row.error < 1e-5, row
        assert row.share > 0, row
        assert row.registers > 0, row
        assert row.stack_bytes is not None
        assert row.shared_bytes is not None


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
