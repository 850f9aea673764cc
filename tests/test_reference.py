"""The float64 oracle against finite differences, brute force, SciPy and known values."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, Example, random_example, sum_to
from scipy.special import logsumexp, softmax

from workbench import reference
from workbench.problem import Arrays, Problem

SMALL: dict[str, Any] = {"dtype": "float64", "seqlen_q": 4, "seqlen_k": 5, "head_dim": 3}

# ------------------------------------------------------------------------------------- gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head_dim_v": {"head_dim_v": 2},
    "causal": {"causal": True},
    "causal-fewer-keys": {"causal": True, "seqlen_q": 5, "seqlen_k": 3},
    "top-left": {"causal": "top_left"},
    "window": {"window": (1, 1)},
    "window-left": {"window": (2, None)},
    "window-empty-rows": {"window": (0, 0), "seqlen_q": 6, "seqlen_k": 3},
    "mask": {"mask": "bhqk"},
    "mask-keys": {"mask": "k"},
    "bias": {"bias": "bhqk"},
    "bias-keys": {"bias": "k", "batch": 2},
    "bias-heads": {"bias": "hq"},
    "softcap": {"softcap": 0.7},
    "softcap-bias": {"softcap": 1.5, "bias": "bhqk"},
    "scale": {"scale": -0.3},
    "scale-zero": {"scale": 0.0},
    "grouped": {"heads_q": 4, "heads_kv": 2, "batch": 2},
    "one-key-head": {"heads_q": 3, "heads_kv": 1},
    "lengths": {"batch": 3, "q_lengths": [4, 2, 0], "kv_lengths": [3, 0, 5]},
    "lengths-causal": {"batch": 2, "q_lengths": [4, 2], "kv_lengths": [3, 5], "causal": True},
    "dlse": {"dlse": True},
    "dlse-mask": {"dlse": True, "mask": "bhqk"},
    "everything": {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim_v": 2,
        "causal": True,
        "window": (3, None),
        "mask": "bhqk",
        "bias": "hqk",
        "softcap": 1.2,
        "scale": 0.8,
        "q_lengths": [4, 3],
        "kv_lengths": [5, 4],
        "dlse": True,
    },
}


def loss(e: Example, **changed: np.ndarray) -> float:
    """A number whose gradient at out is dout and at lse is dlse; rows without keys do not move."""
    arrays = {"q": e.q, "k": e.k, "v": e.v} | changed
    keywords = e.keywords()
    bias = arrays.pop("bias", keywords.pop("bias"))
    out, lse = reference.forward(**arrays, **keywords, bias=bias)
    counts = e.seen().any(axis=-1)
    total = np.sum(e.dout * out, where=counts[..., None])
    if e.dlse is not None:
        total += np.sum(np.where(counts, e.dlse, 0) * np.where(counts, lse, 0))
    return float(total)


def differences(e: Example, name: str, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of the loss along every element of one array."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        if not np.isfinite(x[index]):
            continue  # what nobody sees: the gradient must be 0 there
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            ends.append(loss(e, **{name: moved}))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_the_differences_of_the_loss(options: str) -> None:
    e = random_example(5, **(SMALL | OPTIONS[options]))
    dq, dk, dv, ds = reference.backward(e.dout, e.q, e.k, e.v, dlse=e.dlse, **e.keywords())
    got = {"q": dq, "k": dk, "v": dv}
    arrays = {"q": e.q, "k": e.k, "v": e.v}
    if "bias" in e.options:
        arrays["bias"] = e.options["bias"]
        got["bias"] = sum_to(ds, arrays["bias"].shape)
    for name, x in arrays.items():
        want = differences(e, name, x)
        np.testing.assert_allclose(got[name], want, rtol=0, atol=2e-9, err_msg=name)


# ------------------------------------------------------------------------- who sees whom, slowly


def brute_force(problem: Problem, arrays: Arrays) -> np.ndarray:
    """The contract's sentences about keys, one pair of query and key after another."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    seen = np.zeros(shape, bool)
    for b, h, i, j in np.ndindex(shape):
        q_length = problem.seqlen_q if arrays.q_lengths is None else arrays.q_lengths[b]
        kv_length = problem.seqlen_k if arrays.kv_lengths is None else arrays.kv_lengths[b]
        p = i if problem.top_left else i + (kv_length - q_length)
        sees = i < q_length and j < kv_length
        if problem.window_left is not None:
            sees = sees and j >= p - problem.window_left
        if problem.window_right is not None:
            sees = sees and j <= p + problem.window_right
        if arrays.mask is not None:
            sees = sees and arrays.mask[b, h, i, j]
        seen[b, h, i, j] = sees
    return seen


def make_problem(seqlen_q: int, seqlen_k: int, op: str = "attention", **more: Any) -> Problem:
    sizes = {"batch": 3, "heads_q": 2, "heads_kv": 1, "head_dim": 3, "head_dim_v": 2}
    sizes |= {"dtype": "float32", "scale": 0.5}
    return Problem(op=op, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **(sizes | more))


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("lengths", ["", "q", "k", "qk"])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (6, 3), (1, 5), (0, 2), (2, 0)])
def test_visible(sizes: tuple[int, int], lengths: str, top_left: bool) -> None:
    rng = np.random.default_rng(0)
    seqlen_q, seqlen_k = sizes
    ends = (None, 0, 1, 2, 7)
    for left, right, masked in itertools.product(ends, ends, (False, True)):
        problem = make_problem(
            *sizes, window_left=left, window_right=right, top_left=top_left, has_mask=masked
        )
        given: dict[str, np.ndarray] = {}
        if "q" in lengths:
            given["q_lengths"] = np.array([seqlen_q, 0, seqlen_q // 2], np.int32)
        if "k" in lengths:
            given["kv_lengths"] = np.array([seqlen_k // 2, seqlen_k, 0], np.int32)
        if masked:
            keep = rng.random((1, 2, seqlen_q, seqlen_k)) < 0.7
            given["mask"] = np.broadcast_to(keep, (3, 2, seqlen_q, seqlen_k))
        arrays = Arrays(None, None, None, None, None, **given)
        want = brute_force(problem, arrays)
        got = np.broadcast_to(reference.visible(problem, arrays), want.shape)
        np.testing.assert_array_equal(got, want)


def test_lengths_past_the_array_are_its_end() -> None:
    problem = make_problem(2, 3, window_right=0)
    q_lengths, kv_lengths = np.array([2, 9, 2], np.int32), np.array([3, 3, 9], np.int32)
    arrays = Arrays(None, None, None, None, None, q_lengths=q_lengths, kv_lengths=kv_lengths)
    got = np.broadcast_to(reference.visible(problem, arrays), (3, 2, 2, 3))
    np.testing.assert_array_equal(got, np.broadcast_to(np.tri(2, 3, 1, dtype=bool), got.shape))


# ------------------------------------------------------------------------------------ the values


def test_against_scipy() -> None:
    e = random_example(1, dtype="float64", batch=2, seqlen_q=7, seqlen_k=9, bias="hqk")
    bias = np.nan_to_num(e.options["bias"], neginf=-3.0)
    s = 0.3 * np.einsum("bhqd,bhkd->bhqk", e.q, e.k)
    s = 1.5 * np.tanh(s / 1.5) + bias
    out, lse = reference.forward(e.q, e.k, e.v, bias=bias, scale=0.3, softcap=1.5)
    want = np.einsum("bhqk,bhkd->bhqd", softmax(s, axis=-1), e.v)
    np.testing.assert_allclose(out, want, rtol=1e-13)
    np.testing.assert_allclose(lse, logsumexp(s, axis=-1), rtol=1e-13)


def test_query_heads_read_their_own_key_head() -> None:
    v = np.arange(4.0).reshape(1, 4, 1, 1)
    q, k = np.ones((1, 12, 1, 2)), np.ones((1, 4, 1, 2))
    out, _ = reference.forward(q, k, v, scale=1.0)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    *_, dv, _ = reference.backward(np.arange(12.0).reshape(1, 12, 1, 1), q, k, v, scale=1.0)
    np.testing.assert_array_equal(dv.ravel(), [3, 12, 21, 30])


@pytest.mark.parametrize("score", [5e3, -6e4, 1e12, 1e300])
def test_large_scores_keep_their_softmax(score: float) -> None:
    q = np.ones((1, 1, 1, 1))
    k = np.full((1, 1, 2, 1), score)
    v = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    out, lse = reference.forward(q, k, v, scale=1.0)
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(score + np.log(2), rel=1e-15)


def test_a_real_score_beats_every_hidden_one() -> None:
    q, k = np.ones((1, 1, 1, 1)), np.array([-6e4, 0.0, 0.0]).reshape(1, 1, 3, 1)
    v = np.array([2.0, 8.0, 9.0]).reshape(1, 1, 3, 1)
    visible, bias = np.array([True, False, True]), np.array([0.0, 0.0, -np.inf])
    out, lse = reference.forward(q, k, v, visible=visible, bias=bias, scale=1.0)
    assert out.item() == 2.0
    assert lse.item() == -6e4


# -------------------------------------------------------------------------------------- the edges


@pytest.mark.parametrize("seqlen_k", [0, 4])
def test_rows_without_keys(seqlen_k: int) -> None:
    e = random_example(2, seqlen_q=3, seqlen_k=seqlen_k, dlse=True, bias="qk")
    keywords = e.keywords() | {"visible": np.zeros((3, seqlen_k), bool)}
    out, lse = reference.forward(e.q, e.k, e.v, **keywords)
    assert out.shape == e.q.shape
    assert not out.any()
    assert np.isneginf(lse).all()
    for given in ({}, {"out": out, "lse": lse}, {"out": out, "lse": lse.astype(np.float32)}):
        gradients = reference.backward(e.dout, e.q, e.k, e.v, dlse=e.dlse, **given, **keywords)
        for gradient in gradients:
            assert not gradient.any()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"heads_q": 0}, {"heads_q": 0, "heads_kv": 2}])
def test_empty_arrays(sizes: dict[str, int]) -> None:
    e = random_example(2, seqlen_q=3, seqlen_k=4, dlse=True, **sizes)
    out, lse = reference.forward(e.q, e.k, e.v, **e.keywords())
    assert out.shape == e.q.shape
    assert lse.shape == e.q.shape[:3]
    dq, dk, dv, ds = reference.backward(e.dout, e.q, e.k, e.v, dlse=e.dlse, **e.keywords())
    assert (dq.shape, dk.shape, dv.shape) == (e.q.shape, e.k.shape, e.v.shape)
    assert ds.shape == e.score_shape
    assert not dk.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hidden_by", ["visible", "bias"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_poison_reaches_those_who_see_it(poison: float, hidden_by: str, softcap: float) -> None:
    # Keys 0-2 are seen by queries 0-1, keys 3-5 by queries 2-3: two islands in one problem.
    e = random_example(4, dtype="float64", seqlen_q=4, seqlen_k=6, head_dim=3, dlse=True)
    visible = np.kron(np.eye(2, dtype=bool), np.ones((2, 3), bool))
    keywords: dict[str, Any] = {"scale": 0.5, "softcap": softcap, "visible": visible}
    if hidden_by == "bias":
        keywords |= {"visible": None, "bias": np.where(visible, 0.5, -np.inf)}
    arrays = {"dout": e.dout, "q": e.q, "k": e.k, "v": e.v, "dlse": e.dlse}

    def results(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        out, lse = reference.forward(arrays["q"], arrays["k"], arrays["v"], **keywords)
        dq, dk, dv, _ = reference.backward(**arrays, **keywords)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    good = results(arrays)
    for name, x in arrays.items():
        poisoned = x.copy()
        poisoned[:, 0, -1] = poison  # of the second island: its last query or key, head 0
        bad = results(arrays | {name: poisoned})
        for result, value in bad.items():
            half = value.shape[2] // 2
            where = f"{name} -> {result}"
            np.testing.assert_array_equal(value[:, 1], good[result][:, 1], err_msg=where)
            clean = value[:, 0, :half]
            np.testing.assert_array_equal(clean, good[result][:, 0, :half], err_msg=where)
    if np.isnan(poison):
        for name, rows in (("q", [3]), ("k", [2, 3])):
            poisoned = arrays[name].copy()
            poisoned[:, 0, -1] = poison
            bad = results(arrays | {name: poisoned})
            assert np.isnan(bad["out"][0, 0, rows]).all()
            assert np.isnan(bad["lse"][0, 0, rows]).all()
        poisoned = e.v.copy()
        poisoned[0, 0, -1, 1] = poison
        out = results(arrays | {"v": poisoned})["out"]
        np.testing.assert_array_equal(np.isnan(out[0, 0]), [[0, 0, 0]] * 2 + [[0, 1, 0]] * 2)


def test_inputs_stay_as_they_are() -> None:
    e = random_example(6, dtype="float64", dlse=True, mask="bhqk", bias="bhqk", softcap=1.0)
    arrays = [e.q, e.k, e.v, e.dout, e.dlse, e.options["mask"], e.options["bias"]]
    for x in arrays:
        x.flags.writeable = False  # writing would raise
    reference.forward(e.q, e.k, e.v, **e.keywords())
    reference.backward(e.dout, e.q, e.k, e.v, dlse=e.dlse, **e.keywords())


# ------------------------------------------------------------------------------------ the backend


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backend_fills_and_rounds(dtype: str) -> None:
    e = random_example(
        8, dtype=dtype, batch=3, heads_kv=1, seqlen_q=5, seqlen_k=7, bias="hk", dlse=True
    )
    acc = np.float64 if dtype == "float64" else np.float32
    keywords = e.keywords()
    scale = keywords["scale"]
    problem = make_problem(5, 7, dtype=dtype, head_dim=32, head_dim_v=32, scale=scale)
    bias = np.broadcast_to(e.options["bias"], e.score_shape)
    out, lse = np.full_like(e.q, np.nan), np.full(e.q.shape[:3], np.nan, acc)
    arrays = Arrays(e.q, e.k, e.v, out, lse, bias=bias)
    assert reference.attention(problem, arrays) is None
    want_out, want_lse = reference.forward(e.q, e.k, e.v, **keywords)
    np.testing.assert_array_equal(out, want_out.astype(out.dtype))
    np.testing.assert_array_equal(lse, want_lse.astype(acc))

    filled = {"d" + name: np.full_like(getattr(e, name), np.nan) for name in "qkv"}
    filled["dbias"] = np.full(e.options["bias"].shape, np.nan, acc)
    arrays = arrays._replace(dout=e.dout, dlse=e.dlse, **filled)
    assert reference.attention_backward(problem, arrays) is None
    dq, dk, dv, ds = reference.backward(
        e.dout, e.q, e.k, e.v, dlse=e.dlse, out=out, lse=lse, **keywords
    )
    for name, want in (("dq", dq), ("dk", dk), ("dv", dv)):
        got = filled[name]
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=name)
    assert filled["dbias"].shape == (1, 2, 1, 7)
    np.testing.assert_array_equal(filled["dbias"], sum_to(ds, (1, 2, 1, 7)).astype(acc))


def test_overflow_of_the_output_is_quiet() -> None:
    ones = np.ones((1, 1, 3, 1), np.float16)
    sizes = {"batch": 1, "heads_q": 1, "head_dim": 1, "head_dim_v": 1, "dtype": "float16"}
    problem = make_problem(3, 1, "attention_backward", **sizes)
    lse = np.full((1, 1, 3), 0.5, np.float32)
    dq, dk, dv = np.empty_like(ones), np.empty_like(ones[:, :, :1]), np.empty_like(ones[:, :, :1])
    key = ones[:, :, :1]
    for dout, want in ((2e4, 6e4), (3e4, np.inf)):  # one key gets the gradients of three queries
        given = {"dout": ones * np.float16(dout), "dq": dq, "dk": dk, "dv": dv}
        reference.attention_backward(problem, Arrays(ones, key, key, ones, lse, **given))
        np.testing.assert_array_equal(dv.ravel(), np.float16(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_add(dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 70)).astype(DTYPES[dtype]) for _ in range(2))
    a[0, :3], b[0, :3] = [np.inf, -np.inf, np.nan], [-np.inf, -np.inf, 1]
    out = np.empty((70, 3), a.dtype).T
    assert reference.vector_add(a[:, ::-1], b[:, ::-1], out) is None
    with np.errstate(invalid="ignore"):
        want = a + b
    np.testing.assert_array_equal(out[:, ::-1].astype(float), want.astype(float))


# ------------------------------------------------------------------------------------------ merge


def parts(e: Example, edges: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results over slices of the keys."""
    keywords = e.keywords()
    visible = np.broadcast_to(keywords.pop("visible"), e.score_shape)
    return [
        reference.forward(
            e.q, e.k[:, :, a:b], e.v[:, :, a:b], visible=visible[..., a:b], **keywords
        )
        for a, b in itertools.pairwise(edges)
    ]


def merge(outs: Any, lses: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.full_like(outs[0], np.nan), np.full_like(lses[0], np.nan)
    assert reference.merge_attention(outs, lses, out, lse) is None
    return out, lse


@pytest.mark.parametrize("edges", [[0, 4, 9], [0, 0, 2, 2, 7, 9, 9]])
def test_merged_parts_are_the_whole(edges: list[int]) -> None:
    e = random_example(9, dtype="float64", seqlen_q=5, seqlen_k=9, causal=True)
    want_out, want_lse = reference.forward(e.q, e.k, e.v, **e.keywords())
    out, lse = merge(*zip(*parts(e, edges), strict=True))
    np.testing.assert_allclose(out, want_out, rtol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13)


def test_gradients_of_parts_add_up_to_the_whole() -> None:
    e = random_example(9, dtype="float64", seqlen_q=5, seqlen_k=9, causal=True, dlse=True)
    keywords = e.keywords()
    visible = np.broadcast_to(keywords.pop("visible"), e.score_shape)
    out, lse = reference.forward(e.q, e.k, e.v, visible=visible, **keywords)
    whole = reference.backward(e.dout, e.q, e.k, e.v, visible=visible, dlse=e.dlse, **keywords)
    dqs = []
    for keys in (slice(0, 4), slice(4, 9)):
        dq, dk, dv, ds = reference.backward(
            e.dout,
            e.q,
            e.k[:, :, keys],
            e.v[:, :, keys],
            visible=visible[..., keys],
            dlse=e.dlse,
            out=out,
            lse=lse,
            **keywords,
        )
        dqs.append(dq)
        np.testing.assert_allclose(dk, whole[1][:, :, keys], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(dv, whole[2][:, :, keys], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(ds, whole[3][..., keys], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(sum(dqs), whole[0], rtol=1e-12, atol=1e-15)


def test_a_large_lse_need_not_be_exact() -> None:
    # lse is 1e11, which float32 knows to 8192: the weights are 1/2 and 1/2 all the same.
    x = np.full((1, 1, 2, 64), 133120.0)
    v = x * np.array([1, -1]).reshape(1, 1, 2, 1)
    dout = np.ones_like(x)
    out, lse = reference.forward(x, x, v, scale=0.123)
    assert lse.astype(np.float32).astype(np.float64)[0, 0, 0] != lse[0, 0, 0]
    want = reference.backward(dout, x, x, v, scale=0.123)
    given = {"out": out, "lse": lse.astype(np.float32)}
    for got, gradient in zip(
        reference.backward(dout, x, x, v, scale=0.123, **given), want, strict=True
    ):
        np.testing.assert_array_equal(got, gradient)
    np.testing.assert_array_equal(want[2], dout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_part_is_neutral_to_the_bit(dtype: str) -> None:
    kind, acc = DTYPES[dtype], np.float64 if dtype == "float64" else np.float32
    rng = np.random.default_rng(3)
    x, a = rng.standard_normal((2, 3, 5, 8)).astype(kind), rng.standard_normal((2, 3, 5))
    x[0, 0, 0, :2] = [-0.0, ml_dtypes.finfo(kind).smallest_subnormal]
    a[0, 0, :3] = [-0.0, 3e38, -3e38]
    a = a.astype(acc)
    nothing = np.zeros_like(x), np.full_like(a, -np.inf)
    for outs, lses in (
        ((x, nothing[0]), (a, nothing[1])),
        ((nothing[0], x), (nothing[1], a)),
        ((nothing[0], x, nothing[0]), (nothing[1], a, nothing[1])),
    ):
        out, lse = merge(outs, lses)
        assert out.tobytes() == x.tobytes()
        assert lse.tobytes() == a.tobytes()
    out, lse = merge((nothing[0],) * 3, (nothing[1],) * 3)
    assert out.tobytes() == nothing[0].tobytes()
    assert lse.tobytes() == nothing[1].tobytes()


def test_merge_of_far_apart_parts() -> None:
    outs = np.array([1.0, 3.0]).reshape(2, 1, 1, 1, 1)
    for lses, out_want, lse_want in (
        ((1e12, 1e12), 2.0, 1e12 + np.log(2)),
        ((-1e30, 1e30), 3.0, 1e30),
        ((800.0, 0.0), 1.0, 800.0),
    ):
        out, lse = merge(outs, np.array(lses).reshape(2, 1, 1, 1))
        assert out.item() == out_want
        assert lse.item() == pytest.approx(lse_want, rel=1e-15)
