"""The public functions on NumPy arrays: signatures, kinds of arrays, layouts, strides and `out`.

Every answer is held against the pure functions of the reference, in both host backends. How exact
the backends are in every dtype is for other tests: these ask whether the right numbers arrive at
the right place.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import sum_to

import workbench
from workbench import (
    attention,
    attention_backward,
    attention_weights,
    merge_attention,
    reference,
    vector_add,
)

HOSTS = ("reference", "cpu")
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 8, 6

backends = pytest.mark.parametrize("backend", HOSTS)


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def inputs(dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Something for q, k, v and dout."""
    return (
        array(B, HQ, NQ, D, seed=1, dtype=dtype),
        array(B, HKV, NK, D, seed=2, dtype=dtype),
        array(B, HKV, NK, DV, seed=3, dtype=dtype),
        array(B, HQ, NQ, DV, seed=4, dtype=dtype),
    )


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Equal but for the rounding to the dtype of `got`, where NaN is as wrong as a wrong shape."""
    tolerance = 20 * float(ml_dtypes.finfo(got.dtype).eps)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(float), want, rtol=tolerance, atol=tolerance)


def answer(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    options = {"scale": q.shape[-1] ** -0.5} | options
    return reference.forward(q, k, v, **options)


# ---------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize(
    ("function", "positional"),
    [
        (attention, ["q", "k", "v"]),
        (attention_backward, ["dout", "q", "k", "v", "out", "lse"]),
        (attention_weights, ["q", "k", "lse"]),
        (merge_attention, ["outs", "lses"]),
        (vector_add, ["a", "b"]),
        (workbench.explain, ["q", "k", "v"]),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_all_but_the_arrays_is_keyword_only(function: Any, positional: list[str]) -> None:
    parameters = inspect.signature(function).parameters
    kinds = {name: p.kind for name, p in parameters.items()}
    assert list(parameters)[: len(positional)] == positional
    for name, kind in kinds.items():
        expected = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if name in positional
            else inspect.Parameter.KEYWORD_ONLY
        )
        assert kind == expected, name


def test_forward_backward_and_explain_take_the_same_masking_arguments() -> None:
    shared = ["causal", "window", "mask", "bias", "scale", "softcap", "q_lengths", "kv_lengths",
              "layout", "backend", "kernel"]  # fmt: skip
    signatures = [
        inspect.signature(f).parameters for f in (attention, attention_backward, workbench.explain)
    ]
    for name in shared:
        assert len({s[name].default for s in signatures}) == 1, name


def test_an_unknown_argument_is_an_error() -> None:
    q, k, v, _ = inputs()
    with pytest.raises(TypeError, match="is_causal"):
        attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError, match="positional"):
        attention(q, k, v, True)


def test_every_parameter_is_documented() -> None:
    for name in workbench.__all__:
        function = getattr(workbench, name)
        if inspect.isfunction(function):
            for parameter in inspect.signature(function).parameters:
                assert parameter in function.__doc__, f"{name} does not speak of {parameter}"


# ------------------------------------------------------------------------------------- results


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_the_results(dtype: Any, backend: str) -> None:
    q, k, v, dout = inputs(dtype)
    acc = np.float64 if dtype == np.float64 else np.float32
    bias = array(NK, dtype=dtype)
    out, lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == acc
    gradients = attention_backward(
        dout, q, k, v, out, lse, bias=bias, return_dbias=True, backend=backend
    )
    assert isinstance(gradients, workbench.Gradients)
    assert [x.dtype for x in gradients] == [np.dtype(dtype)] * 4
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape, bias.shape]
    want, want_lse = answer(q, k, v, bias=bias)
    close(out, want)
    close(lse, want_lse)


@backends
def test_without_lse_only_out_comes_back(backend: str) -> None:
    q, k, v, dout = inputs()
    out = attention(q, k, v, backend=backend)
    assert isinstance(out, np.ndarray)
    both, lse = attention(q, k, v, return_lse=True, backend=backend)
    np.testing.assert_array_equal(out, both)
    gradients = attention_backward(dout, q, k, v, out, lse, backend=backend)
    assert gradients.dbias is None


@backends
def test_inputs_are_left_as_they_are(backend: str) -> None:
    q, k, v, dout = inputs()
    bias, mask = array(HQ, NQ, NK), array(NQ, NK) > 0
    lengths = np.array([3, 5])
    given = [q, k, v, dout, bias, mask, lengths]
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    options = {"bias": bias, "mask": mask, "q_lengths": lengths, "kv_lengths": lengths}
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **options)
    for x in (out, lse):
        x.flags.writeable = False
    attention_backward(dout, q, k, v, out, lse, return_dbias=True, backend=backend, **options)
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)


# ------------------------------------------------------------------------- layouts and strides


def fewer_axes(x: np.ndarray, ndim: int) -> np.ndarray:
    return x[(0,) * (4 - ndim)]


@backends
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_axes_and_layouts(ndim: int, layout: str, backend: str) -> None:
    q, k, v, dout = inputs()
    bias = array(HQ, NQ, NK)
    if ndim == 2:
        bias = bias[0]
    if ndim < 4:
        q, k, v, dout = (x[:1] for x in (q, k, v, dout))
    if ndim < 3:
        q, k, v, dout = (x[:, :1] for x in (q, k, v, dout))

    def given(x: np.ndarray) -> np.ndarray:
        if layout == "bnhd" and ndim > 2:
            x = x.swapaxes(1, 2).copy()
        return x[0, 0] if ndim == 2 else x[0] if ndim == 3 else x

    def back(x: np.ndarray) -> np.ndarray:
        x = x[None, None] if ndim == 2 else x[None] if ndim == 3 else x
        return x.swapaxes(1, 2) if layout == "bnhd" and ndim > 2 else x

    options = {"layout": layout, "backend": backend, "bias": bias, "causal": True}
    args = [given(x) for x in (q, k, v)]
    out, lse = attention(*args, return_lse=True, **options)
    assert out.ndim == ndim
    assert lse.shape == (q.shape[0], q.shape[1], NQ)[4 - ndim :]
    visible = np.tri(NQ, NK, NK - NQ, dtype=bool)
    want, want_lse = answer(q, k, v, visible=visible, bias=bias)
    close(back(out), want)
    close(lse.reshape(want_lse.shape), want_lse)

    dlse = array(*lse.shape, seed=9)
    gradients = attention_backward(
        given(dout), *args, out, lse, dlse=dlse, return_dbias=True, **options
    )
    *wants, ds = reference.backward(
        dout, q, k, v, visible=visible, bias=bias, scale=D**-0.5, dlse=dlse.reshape(want_lse.shape)
    )
    for got, x, y in zip(gradients, wants, args, strict=False):
        assert got.shape == y.shape
        close(back(got), x)
    close(gradients.dbias, sum_to(ds, bias.shape))


def strided(x: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers of x, (batch, heads, seqlen, dim), with strides of many kinds."""
    b, h, n, d = x.shape

    def within(*shape: int) -> np.ndarray:
        return np.full(shape, np.nan, x.dtype)

    views = {
        "permuted": np.ascontiguousarray(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
        "columns-first": np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
        "negative": np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
        "backwards-rows": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "packed": within(b, n, 3 * h, d)[:, :, h : 2 * h].swapaxes(1, 2),
        "every-second": within(2 * b, h, 3 * n, 2 * d)[::2, :, 1::3, ::2],
        "odd-rows": within(b, h, n, d + 1)[..., 1:],
        "byte-swapped": x.astype(x.dtype.newbyteorder()),
        "unaligned": np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape),
    }
    for name in ("packed", "every-second", "odd-rows", "unaligned"):
        views[name][...] = x
    for name, view in views.items():
        np.testing.assert_array_equal(view, x, err_msg=name)
    assert not views["unaligned"].flags.aligned
    return views


KINDS = list(strided(array(1, 1, 2, 2)))


@backends
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind: str, dtype: Any, backend: str) -> None:
    plain = inputs(dtype)
    q, k, v, dout = (strided(x)[kind] for x in plain)
    bias = strided(array(B, HQ, NQ, NK, dtype=dtype))[kind]
    want = answer(*plain[:3], bias=np.array(bias, float))
    out, lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    close(out, want[0])
    close(lse, want[1])
    out, lse = strided(out)[kind], strided(lse[None])[kind][0]
    gradients = attention_backward(
        dout, q, k, v, out, lse, bias=bias, return_dbias=True, backend=backend
    )
    wants = reference.backward(
        plain[3], *plain[:3], bias=np.array(bias, float), scale=D**-0.5, out=out, lse=lse
    )
    for got, x in zip(gradients, wants, strict=True):
        assert got.dtype.isnative
        close(got, x)


@backends
def test_repeated_inputs(backend: str) -> None:
    q = np.broadcast_to(array(1, 1, NQ, D), (B, HQ, NQ, D))
    k = np.broadcast_to(array(B, HKV, 1, D), (B, HKV, NK, D))
    v = np.broadcast_to(array(1, HKV, NK, 1), (B, HKV, NK, DV))
    mask = np.broadcast_to(array(1, 1, 1, NK) > 0, (B, HQ, NQ, NK))
    out, lse = attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    want, want_lse = answer(q, k, v, visible=mask)
    close(out, want)
    close(lse, want_lse)


class Subclass(np.ndarray):
    """A subclass of ndarray."""


class OnlyDlpack:
    """Has DLPack and nothing else."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


@backends
@pytest.mark.parametrize("kind", [lambda x: x.view(Subclass), OnlyDlpack], ids=["sub", "dlpack"])
def test_other_kinds_of_arrays(kind: Any, backend: str) -> None:
    q, k, v, dout = inputs()
    bias, lengths = array(NK), np.array([3, 7])
    options = {"bias": kind(bias), "kv_lengths": kind(lengths), "backend": backend}
    out, lse = attention(kind(q), kind(k), kind(v), return_lse=True, **options)
    assert type(out) is type(lse) is np.ndarray
    visible = np.arange(NK) < lengths[:, None, None, None]
    want, _ = answer(q, k, v, visible=visible, bias=bias)
    close(out, want)
    gradients = attention_backward(
        *(kind(x) for x in (dout, q, k, v, out, lse)), return_dbias=True, **options
    )
    *wants, ds = reference.backward(dout, q, k, v, visible=visible, bias=bias, scale=D**-0.5)
    for got, x in zip(gradients, [*wants, sum_to(ds, bias.shape)], strict=True):
        close(got, x)
    close(vector_add(kind(q), kind(q), backend=backend), q.astype(float) * 2)
    target = np.zeros_like(q)
    vector_add(q, q, out=kind(target), backend=backend)
    close(target, q.astype(float) * 2)


# ------------------------------------------------------------------------------------- options


@backends
@pytest.mark.parametrize("window", [None, (None, None), (-1, -1), [None, -1], (100, 2**63 - 1)])
def test_open_windows(window: Any, backend: str) -> None:
    q, k, v, _ = inputs()
    close(attention(q, k, v, window=window, backend=backend), answer(q, k, v)[0])


@backends
@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize(("nq", "nk"), [(5, 7), (7, 5), (6, 6), (1, 4), (4, 1)])
def test_causal_alignments(nq: int, nk: int, causal: Any, backend: str) -> None:
    q, k, v = array(HQ, nq, D), array(HQ, nk, D, seed=1), array(HQ, nk, D, seed=2)
    shift = 0 if causal == "top_left" else nk - nq
    visible = np.array([[j <= i + shift for j in range(nk)] for i in range(nq)])
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend=backend)
    want, want_lse = answer(q[None], k[None], v[None], visible=visible)
    close(out, want[0])
    close(lse, want_lse[0])


@backends
def test_window_ends_are_inclusive(backend: str) -> None:
    q, k, v, _ = inputs()
    for left, right in [(0, 0), (2, 1), (1, None), (None, 3), (0, -1)]:
        visible = np.zeros((NQ, NK), bool)
        for i in range(NQ):
            p = i + NK - NQ
            first = 0 if left in (None, -1) else p - left
            last = NK if right in (None, -1) else p + right
            visible[i, max(0, first) : max(0, last + 1)] = True
        out = attention(q, k, v, window=(left, right), backend=backend)
        close(out, answer(q, k, v, visible=visible)[0])


@backends
@pytest.mark.parametrize(
    "scale", [-0.5, np.float32(-0.5), np.float64(-0.5), np.array(-0.5), np.array([[-0.5]])[0, 0]]
)
def test_scales(scale: Any, backend: str) -> None:
    q, k, v, _ = inputs()
    out = attention(q, k, v, scale=scale, softcap=abs(scale), backend=backend)
    assert out.dtype == np.float32
    close(out, answer(q, k, v, scale=-0.5, softcap=0.5)[0])
    close(attention(q, k, v, scale=0, backend=backend), answer(q, k, v, scale=0.0)[0])


@backends
@pytest.mark.parametrize(
    "shape", [(), (1,), (NK,), (NQ, 1), (NQ, NK), (HQ, 1, 1), (1, NQ, NK), (B, 1, 1, NK),
              (1, HQ, NQ, 1), (B, HQ, NQ, NK)]
)  # fmt: skip
def test_masks_and_biases_broadcast(shape: tuple[int, ...], backend: str) -> None:
    q, k, v, dout = inputs()
    mask = np.asarray(array(*shape, seed=5) > -0.5)
    bias = array(*shape, seed=6, dtype=np.float64)
    options = {"mask": mask, "bias": bias, "backend": backend}
    out, lse = attention(q, k, v, return_lse=True, **options)
    bias32 = bias.astype(np.float32)
    want, want_lse = answer(q, k, v, visible=mask, bias=bias32)
    close(out, want)
    close(lse, want_lse)
    gradients = attention_backward(dout, q, k, v, out, lse, return_dbias=True, **options)
    *_, ds = reference.backward(dout, q, k, v, visible=mask, bias=bias32, scale=D**-0.5)
    assert gradients.dbias.dtype == np.float64
    assert gradients.dbias.shape == shape
    np.testing.assert_allclose(gradients.dbias, sum_to(ds, shape), rtol=1e-5, atol=1e-5)


@backends
def test_dlse_reaches_the_gradients(backend: str) -> None:
    q, k, v, dout = inputs()
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    dlse = array(*lse.shape, seed=8)
    gradients = attention_backward(dout, q, k, v, out, lse, dlse=dlse, backend=backend)
    *wants, _ = reference.backward(dout, q, k, v, scale=D**-0.5, dlse=dlse)
    for got, want in zip(gradients, wants, strict=False):
        close(got, want)


# ---------------------------------------------------------------------------------------- empty


@backends
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, HQ, NQ, D), (0, HKV, NK, D)),
        ((B, 0, NQ, D), (B, 0, NK, D)),
        ((B, 0, NQ, D), (B, HKV, NK, D)),
        ((B, HQ, 0, D), (B, HKV, NK, D)),
        ((B, HQ, NQ, D), (B, HKV, 0, D)),
        ((0, D), (0, D)),
        ((0, 3, D), (0, 0, D)),
    ],
)
def test_empty_arrays(q_shape: Any, k_shape: Any, backend: str) -> None:
    q, k = array(*q_shape), array(*k_shape)
    out, lse = attention(q, k, k, return_lse=True, causal=True, backend=backend)
    assert out.shape == q_shape
    assert lse.shape == q_shape[:-1]
    assert not out.any()
    assert np.isneginf(lse).all()
    gradients = attention_backward(out, q, k, k, out, lse, causal=True, backend=backend)
    for got, x in zip(gradients, (q, k, k), strict=False):
        assert got.shape == x.shape
        assert not got.any()


@backends
def test_rows_that_see_nothing(backend: str) -> None:
    q, k, v, dout = inputs()
    out, lse = attention(q, k, v, kv_lengths=np.array([0, NK]), return_lse=True, backend=backend)
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    gradients = attention_backward(
        dout, q, k, v, out, lse, kv_lengths=np.array([0, NK]), backend=backend
    )
    assert not any(x[0].any() for x in gradients[:3])
    close(out[1], answer(q, k, v)[0][1])


# ------------------------------------------------------------------------------------------ out


def targets(shape: tuple[int, ...], dtype: Any) -> dict[str, np.ndarray]:
    """Arrays to write to, all of them 7 now, with strides of many kinds."""
    views = strided(np.full(shape, 7, dtype))
    del views["byte-swapped"]
    views["whole"] = np.full(shape, 7, dtype)
    return views


@backends
@pytest.mark.parametrize("kind", targets((1, 1, 1, 1), np.float32))
def test_out_of_any_strides(kind: str, backend: str) -> None:
    q, k, v, _ = inputs()
    want, want_lse = answer(q, k, v)
    out = targets((B, HQ, NQ, DV), np.float32)[kind]
    around = None if out.base is None else out.base.copy()
    assert attention(q, k, v, out=out, backend=backend) is out
    close(out, want)
    if kind in ("packed", "every-second", "odd-rows"):
        # What lies between the elements of out is none of our business: it was NaN.
        assert np.isnan(around).sum() == np.isnan(out.base).sum()
    out[...] = 0
    lse = targets((1, B, HQ, NQ), np.float32)[kind][0]
    got = attention(q, k, v, out=(out, lse), return_lse=True, backend=backend)
    assert isinstance(got, tuple)
    assert got[0] is out
    assert got[1] is lse
    close(out, want)
    close(lse, want_lse)


@backends
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_out_in_the_layout_of_the_call(ndim: int, layout: str, backend: str) -> None:
    q = fewer_axes(array(1, 1, NQ, D), ndim)
    if ndim == 3:
        q = np.concatenate([q, q + 1])
    if ndim == 4:
        q = np.concatenate([q, q + 1], axis=1)
    if layout == "bnhd" and ndim > 2:
        q = q.swapaxes(-2, -3)
    want = attention(q, q, q, layout=layout, backend=backend)
    out = np.full(q.shape, 7, np.float32)
    lse = np.full(
        attention(q, q, q, layout=layout, return_lse=True, backend=backend)[1].shape, 7.0, "f4"
    )
    attention(q, q, q, layout=layout, return_lse=True, out=[out, lse], backend=backend)
    np.testing.assert_array_equal(out, want)
    assert np.isfinite(lse).all()
    assert not (lse == 7).any()


@backends
def test_out_beside_its_inputs_in_one_array(backend: str) -> None:
    packed = array(B, NQ, 4, HQ, D)
    q, k, v, out = (packed[:, :, i].swapaxes(1, 2) for i in range(4))
    want, _ = answer(q, k, v)
    before = packed[:, :, :3].copy()
    attention(q, k, v, out=out, backend=backend)
    close(out, want)
    np.testing.assert_array_equal(packed[:, :, :3], before)


# --------------------------------------------------------------------------- the other functions


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (2, 1, 2, 2, 3), (0,), (3, 0)]
)
def test_vector_add(shape: tuple[int, ...], dtype: Any, backend: str) -> None:
    a, b = array(*shape, dtype=dtype), array(*shape, seed=1, dtype=dtype)
    got = vector_add(a, b, backend=backend)
    assert got.dtype == dtype
    assert got.shape == shape
    np.testing.assert_array_equal(got, (a.astype(np.float64) + b.astype(np.float64)).astype(dtype))
    out = np.full(shape, 7, dtype)
    assert vector_add(a, b, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, got)


@backends
@pytest.mark.parametrize("kind", KINDS)
def test_vector_add_of_any_strides(kind: str, backend: str) -> None:
    a, b = array(2, 3, 4, 5), array(2, 3, 4, 5, seed=1)
    for x, y in ((strided(a)[kind], b), (a, strided(b)[kind]), (strided(a)[kind],) * 2):
        got = vector_add(x, y, backend=backend)
        assert got.dtype.isnative
        np.testing.assert_array_equal(got, np.asarray(x) + np.asarray(y))
    if kind != "byte-swapped":
        out = targets(a.shape, np.float32)[kind]
        vector_add(a, b, out=out, backend=backend)
        np.testing.assert_array_equal(out, a + b)


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_merging_parts_is_attention_over_all(parts: int, dtype: Any, backend: str) -> None:
    q, _, _, _ = inputs(dtype)
    k, v = array(B, HQ, 23, D, dtype=dtype), array(B, HQ, 23, DV, seed=1, dtype=dtype)
    ends = np.linspace(0, 23, parts + 1).astype(int)
    pairs = [
        attention(q, k[:, :, i:j], v[:, :, i:j], return_lse=True, backend=backend)
        for i, j in itertools.pairwise(ends)
    ]
    out, lse = merge_attention(*zip(*pairs, strict=True), backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    want, want_lse = answer(q, k, v)
    close(out, want)
    close(lse, want_lse)


@backends
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 1, 3, 4), (0, 3)])
def test_merging_takes_any_leading_axes(shape: tuple[int, ...], backend: str) -> None:
    outs = [array(*shape, DV, seed=i) for i in range(2)]
    lses = [array(*shape, seed=i + 2) for i in range(2)]
    out, lse = merge_attention(outs, lses, backend=backend)
    weights = np.exp(np.array(lses, float))
    close(lse, np.log(weights.sum(0)))
    share = weights / weights.sum(0)
    close(out, (share[..., None] * np.array(outs, float)).sum(0))


@backends
def test_an_empty_part_is_neutral_to_the_bit(backend: str) -> None:
    x, lse = array(HQ, NQ, DV), 100 * array(HQ, NQ)
    empty, nothing = np.zeros_like(x), np.full_like(lse, -np.inf)
    for outs, lses in (([x, empty], [lse, nothing]), ([empty, x, empty], [nothing, lse, nothing])):
        got, got_lse = merge_attention(outs, lses, backend=backend)
        np.testing.assert_array_equal(got, x)
        np.testing.assert_array_equal(got_lse, lse)
    got, got_lse = merge_attention([empty, empty], [nothing, nothing], backend=backend)
    assert not got.any()
    assert np.isneginf(got_lse).all()


def test_merging_strided_parts() -> None:
    outs, lses = array(2, HQ, DV, NQ).swapaxes(-1, -2), array(NQ, HQ, 2).T
    for backend in HOSTS:
        got = merge_attention(list(outs), tuple(lses), backend=backend)
        want = merge_attention(list(outs.copy()), list(lses.copy()), backend=backend)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)
