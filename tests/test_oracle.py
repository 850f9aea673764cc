"""Tests of the rule itself: right tiled arithmetic passes, every known kind of fault fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import (
    DTYPES,
    PROBLEMS,
    Example,
    accumulator,
    answers,
    assert_close,
    hold,
    plains,
    random_example,
    sum_to,
)

TILE = 32


def tiled(e: Example, fault: str = "") -> dict[str, Any]:
    """Attention as the kernels do it, over tiles of keys; if wished, with a fault."""
    dtype, acc = e.dtype, accumulator(e.dtype)
    keywords = e.keywords()
    if fault in ("diagonal + 1", "diagonal - 1"):
        seqlen_q, seqlen_k = e.score_shape[2:]
        diagonal = seqlen_k - seqlen_q + (1 if fault == "diagonal + 1" else -1)
        keywords["visible"] = np.tri(seqlen_q, seqlen_k, diagonal, dtype=bool)
    visible = np.broadcast_to(keywords["visible"], e.score_shape)
    scale, softcap, bias = (keywords[name] for name in ("scale", "softcap", "bias"))
    scale = {"scale": scale**2, "scale 2 %": scale * 1.02}.get(fault, scale)
    q, k, v, dout, dlse = (
        None if x is None else np.where(np.isfinite(x), x, 0).astype(acc)
        for x in (e.q, e.k, e.v, e.dout, e.dlse)
    )
    heads_q, heads_kv = q.shape[1], k.shape[1]
    head = np.arange(heads_q) * heads_kv // max(heads_q, 1)
    if fault == "heads":
        head = np.arange(heads_q) % heads_kv
    seqlen_k = e.k.shape[2]
    starts = list(range(0, seqlen_k, TILE))
    if fault == "tail" and len(starts) > 1:
        starts.pop()

    def scores(start: int) -> tuple[slice, np.ndarray, Any]:
        cols = slice(start, min(start + TILE, seqlen_k))
        s = (q @ k[:, head, cols].swapaxes(-1, -2)) * acc.type(scale)
        addend = 0 if bias is None else np.broadcast_to(bias, e.score_shape)[..., cols].astype(acc)
        if fault == "cap after bias":
            s = s + addend
        slope: Any = 1
        if softcap:
            capped = np.tanh(s / acc.type(softcap))
            s, slope = acc.type(softcap) * capped, 1 - capped**2
        if fault != "cap after bias":
            s = s + addend
        if fault != "mask":
            s = np.where(visible[..., cols], s, acc.type(-np.inf))
        if fault == "last key" and cols.stop == seqlen_k:
            s[..., -1] = -np.inf
        return cols, s, slope

    row_max = np.full(q.shape[:3], -np.inf, acc)
    row_sum = np.zeros(q.shape[:3], acc)
    total = np.zeros((*q.shape[:3], v.shape[3]), acc)
    for start in starts:
        cols, s, _ = scores(start)
        new_max = np.maximum(row_max, s.max(axis=-1))
        finite_max = np.where(np.isneginf(new_max), acc.type(0), new_max)
        rescale = np.exp(row_max - finite_max)
        p = np.exp(s - finite_max[..., None])
        row_sum = p.sum(axis=-1) + (1 if fault == "rescale of the sum" else rescale) * row_sum
        rows = v[:, head, cols]
        if fault == "stale v" and start:
            rows = np.concatenate([v[:, head, start - 1 : start], rows[:, :, 1:]], axis=2)
        total = total * (1 if fault == "rescale" else rescale[..., None])
        total = total + p.astype(dtype).astype(acc) @ rows
        row_max = new_max
    with np.errstate(divide="ignore"):
        lse = row_max + np.log(row_sum)
    out = (total / np.where(row_sum == 0, acc.type(1), row_sum)[..., None]).astype(dtype)
    if fault == "lse of base 2":
        lse = lse / np.log(acc.type(2))
    results = {"out": out, "lse": lse}
    if dout is None:
        return results

    delta = (dout * out.astype(acc)).sum(axis=-1)
    if fault == "delta":
        delta = delta * 0
    if dlse is not None and fault != "dlse":
        delta = delta - dlse
    finite_lse = np.where(np.isneginf(lse), acc.type(0), lse)
    dq = np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    all_ds = np.zeros(e.score_shape, acc)
    for start in starts:
        cols, s, slope = scores(start)
        p = np.exp(s - finite_lse[..., None])
        ds = p * (dout @ v[:, head, cols].swapaxes(-1, -2) - delta[..., None])
        all_ds[..., cols] = ds
        draw = (ds * (1 if fault == "slope of the cap" else slope)).astype(dtype).astype(acc)
        dq += draw @ k[:, head, cols] * acc.type(scale)
        for h in range(heads_q):
            if fault == "last head of a group only":
                dk[:, head[h], cols] = dv[:, head[h], cols] = 0
            dk[:, head[h], cols] += draw[:, h].swapaxes(-1, -2) @ q[:, h] * acc.type(scale)
            dv[:, head[h], cols] += p[:, h].astype(dtype).astype(acc).swapaxes(-1, -2) @ dout[:, h]
    results |= {"dq": dq.astype(dtype), "dk": dk.astype(dtype), "dv": dv.astype(dtype)}
    if "bias" in e.options:
        results["dbias"] = sum_to(all_ds, e.options["bias"].shape)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_tiled_arithmetic_passes(problem: str, dtype: str) -> None:
    example = random_example(7, dtype=dtype, **PROBLEMS[problem])
    hold(example, tiled(example))


FAULTS = {
    "scale": "square",
    "scale 2 %": "square",
    "diagonal + 1": "causal",
    "diagonal - 1": "causal",
    "heads": "grouped",
    "tail": "odd",
    "last key": "odd",
    "cap after bias": "everything",
    "mask": "mask",
    "rescale of the sum": "square",
    "rescale": "square",
    "stale v": "square",
    "lse of base 2": "square",
    "delta": "square",
    "dlse": "dlse",
    "slope of the cap": "softcap",
    "last head of a group only": "grouped",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail(fault: str, dtype: str) -> None:
    example = random_example(7, dtype=dtype, **PROBLEMS[FAULTS[fault]])
    with pytest.raises(AssertionError):
        hold(example, tiled(example, fault))


def test_the_rule_itself() -> None:
    want = np.array([[1.0, -2.0, np.inf], [0.5, -np.inf, 0.0]])
    got = want.astype(np.float32)
    assert_close(got, want, got, np.float32)

    def fails(got: np.ndarray, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            assert_close(got, want, want, np.float32, name="x")

    fails(got[:1], "shape")
    fails(got.astype(np.float64), "dtype float64")
    for index in np.ndindex(want.shape):  # where a number, inf or -inf is wanted
        wrong = got.copy()
        wrong[index] = np.nan
        fails(wrong, rf"x\({index[0]}, {index[1]}\) is nan")
    wrong = got.copy()
    wrong[1, 1] = -50000
    fails(wrong, "is -50000.0, not -inf")
    wrong = got.copy()
    wrong[0, 2] = np.finfo(np.float32).max
    fails(wrong, "not inf")
    wrong = got.copy()
    wrong[1, 2] = np.inf
    fails(wrong, "is inf, not 0.0")
    wrong = got.copy()
    wrong[0, 1] *= 1 + 2e-6
    fails(wrong, "its error")
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close(got, np.where(want == 0.5, np.nan, want), got, np.float32)


def test_the_bound_grows_with_the_plain_error() -> None:
    want = np.full(3, 1.0)
    plain = np.array([1.0, 1.001, 1.0])
    for error, gradient, passes in (
        (0.0019, False, True),
        (0.0021, False, False),
        (0.0029, True, True),
        (0.0031, True, False),
    ):
        got = (want + np.array([error, 0, 0])).astype(np.float32)
        if passes:
            assert_close(got, want, plain, np.float32, gradient=gradient)
        else:
            with pytest.raises(AssertionError, match="its error"):
                assert_close(got, want, plain, np.float32, gradient=gradient)


def test_an_infinite_plain_error_is_no_excuse() -> None:
    want = np.array([1.0, 2.0])
    got = np.array([1.0, 3.0], np.float32)
    with pytest.raises(AssertionError, match="its error"):
        assert_close(got, want, np.array([np.inf, 2.0]), np.float32)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_what_is_zero_must_be_zero(name: str) -> None:
    example = random_example(3, seqlen_q=9, seqlen_k=12, kv_lengths=[5], q_lengths=[4])
    results = tiled(example)
    hold(example, results)
    results[name][0, 0, -1, 0] = 1e-30
    with pytest.raises(AssertionError, match=f"{name} is not 0"):
        hold(example, results)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_plain_formula_in_float64_is_the_reference(problem: str) -> None:
    # Two formulas that share no code but the one for who sees whom.
    example = random_example(11, dtype="float64", **PROBLEMS[problem])
    for name, answer in answers(example).items():
        plain = plains(example)[name]
        np.testing.assert_allclose(plain, answer.want, rtol=1e-10, atol=1e-12, err_msg=name)
