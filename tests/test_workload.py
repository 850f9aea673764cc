"""Counting the work of a workload, and its right answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench import reference
from workbench import workload as workloads
from workbench.problem import DTYPES
from workbench.workload import Oracle, Workload, random_inputs

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
    monkeypatch.setattr(workloads, "ORACLE_ROWS", 7)
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
    monkeypatch.setattr(workloads, "ORACLE_FLOPS", 1.0)
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
    monkeypatch.setattr(workloads, "ORACLE_ELEMENTS", 10)
    monkeypatch.setattr(workloads, "DRAWN_ELEMENTS", 7)
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
    inputs = random_inputs(replace(SMALL, dtype=dtype, backward=True))
    assert {x.dtype for x in inputs.values()} == {DTYPES[dtype]}
    assert {name: x.shape for name, x in inputs.items()} == {
        "q": (2, 4, 19, 8),
        "k": (2, 2, 23, 8),
        "v": (2, 2, 23, 6),
        "dout": (2, 4, 19, 6),
    }
