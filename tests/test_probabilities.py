"""`attention_weights`: rows of the attention matrix against the whole of it, in float64."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import PROBLEMS, random_example

from workbench import attention, attention_weights, probabilities, reference


def whole(example: Any) -> tuple[np.ndarray, np.ndarray]:
    """The matrix itself, as attention over values that are the unit vectors, and its lse."""
    batch, heads_kv, seqlen_k, _ = example.k.shape
    eye = np.broadcast_to(np.eye(seqlen_k), (batch, heads_kv, seqlen_k, seqlen_k))
    return reference.forward(example.q, example.k, eye, **example.keywords())


def options_of(example: Any, dtype: Any) -> dict[str, Any]:
    options = dict(example.options)
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    return options


@pytest.mark.parametrize("tile", [probabilities.TILE_ELEMENTS, 700])
@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_of_every_problem(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probabilities, "TILE_ELEMENTS", tile)
    example = random_example(7, dtype="float64", **PROBLEMS[name])
    want, lse = whole(example)
    options = options_of(example, np.float64)
    got = attention_weights(example.q, example.k, lse, **options)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-14)
    seqlen = example.q.shape[2]
    rows = [0, seqlen - 1, seqlen // 2, -1] if seqlen else []
    some = attention_weights(example.q, example.k, lse, rows=rows, **options)
    np.testing.assert_allclose(some, want[:, :, rows], rtol=1e-11, atol=1e-14)
    if example.q.shape[1]:
        mean = attention_weights(example.q, example.k, lse, rows=rows, reduce="mean", **options)
        np.testing.assert_allclose(mean, want[:, :, rows].mean(axis=1), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_it_takes_the_lse_of_every_backend(dtype: Any, backend: str) -> None:
    example = random_example(3, batch=2, heads_q=4, heads_kv=2, seqlen_q=65).astype(dtype)
    _, lse = attention(
        example.q, example.k, example.v, causal=True, return_lse=True, backend=backend
    )
    got = attention_weights(example.q, example.k, lse, causal=True)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got.sum(axis=-1), 1, rtol=1e-5)
    upper = np.triu(np.ones((65, 65), bool), 1)
    np.testing.assert_array_equal(got[..., upper], 0)


def test_layouts_and_leading_axes() -> None:
    example = random_example(5, dtype="float64", heads_q=4, heads_kv=2, seqlen_q=9, seqlen_k=7)
    want, lse = whole(example)
    q, k = (x.swapaxes(1, 2) for x in (example.q, example.k))
    close = np.testing.assert_allclose
    close(attention_weights(q, k, lse, layout="bnhd"), want, rtol=1e-12)
    close(attention_weights(q[0], k[0], lse[0], layout="bnhd"), want[0], rtol=1e-12)
    close(attention_weights(example.q[0], example.k[0], lse[0]), want[0], rtol=1e-12)
    close(attention_weights(example.q[0, 0], example.k[0, 0], lse[0, 0]), want[0, 0], rtol=1e-12)
    mean = attention_weights(example.q[0], example.k[0], lse[0], rows=2, reduce="mean")
    close(mean, want[0, :, 2].mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize(
    "rows",
    [0, -1, np.int64(3), [2, 2, 0], (1,), [], slice(2, 5), slice(None, None, -2), range(1, 4),
     np.array([4, -2])],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_rows(rows: Any) -> None:
    example = random_example(6, dtype="float64", seqlen_q=9)
    want, lse = whole(example)
    index = np.array(rows, int) if isinstance(rows, (list, tuple, range)) else rows
    got = attention_weights(example.q, example.k, lse, rows=rows)
    np.testing.assert_allclose(got, want[:, :, index])


def test_a_few_rows_of_a_long_sequence_need_little_memory() -> None:
    q = np.ones((1, 2, 20_000, 8), np.float32)
    lse = np.zeros((1, 2, 20_000), np.float32)
    attention_weights(q[:, :, :8], q[:, :, :8], lse[:, :, :8], rows=0)
    tracemalloc.start()
    attention_weights(q, q, lse, rows=[5, 19_999])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6, "the matrix of one head alone is 1.6 GB"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rows": 9}, ValueError, r"rows is 9; each must be from -9 to seqlen_q - 1 = 8"),
        ({"rows": [0, -10]}, ValueError, "each must be from -9"),
        ({"rows": 1.0}, TypeError, "rows is 1.0; it takes an integer"),
        ({"rows": True}, TypeError, "rows is True"),
        ({"rows": [[1]]}, TypeError, "a sequence of them"),
        ({"rows": slice(0.5)}, TypeError, "slice"),
        ({"reduce": "sum"}, ValueError, "reduce is 'sum'; it takes one of 'mean'"),
        ({"lse": np.zeros((1, 2, 8), np.float64)}, ValueError, r"lse has shape \(1, 2, 8\)"),
        ({"lse": np.zeros((1, 2, 9), np.float32)}, TypeError, "lse has dtype float32"),
        ({"lse": [0.0]}, TypeError, "lse is a list"),
        ({"k": np.zeros((1, 2, 4, 31))}, ValueError, "k must have q's head_dim"),
        ({"k": np.zeros((1, 2, 9, 32), np.float32)}, TypeError, "k must have the dtype of q"),
        ({"mask": np.zeros(9)}, TypeError, "mask has dtype float64"),
        ({"layout": "nhd"}, ValueError, "layout is 'nhd'"),
        ({"scale": np.inf}, ValueError, "scale is inf"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    example = random_example(6, dtype="float64", seqlen_q=9)
    arguments = {"q": example.q, "k": example.k, "lse": np.zeros((1, 2, 9))} | change
    with pytest.raises(kind, match=message):
        attention_weights(**arguments)


def test_the_mean_needs_heads() -> None:
    with pytest.raises(ValueError, match="reduce='mean' needs a heads axis"):
        attention_weights(np.ones((3, 2)), np.ones((3, 2)), np.zeros(3), reduce="mean")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["everything", "grouped", "lengths-causal", "window-top-left"])
def test_rows_on_the_gpu(name: str) -> None:
    import cupy

    example = random_example(7, dtype="float64", **PROBLEMS[name])
    want, lse = whole(example)
    options = {
        key: cupy.asarray(x) if isinstance(x, np.ndarray) else x
        for key, x in options_of(example, np.float64).items()
    }
    q, k = cupy.asarray(example.q), cupy.asarray(example.k)
    got = attention_weights(q, k, cupy.asarray(lse), rows=[0, -1], **options)
    assert isinstance(got, cupy.ndarray)
    np.testing.assert_allclose(got.get(), want[:, :, [0, -1]], rtol=1e-11, atol=1e-14)
