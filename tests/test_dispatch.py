"""One call from its arguments to its results: on the host, and above all on a GPU.

On a GPU a repeated call skips everything but a look-up. The tests here repeat calls that differ in
one thing each, from other streams, threads and devices, and inside a graph.
"""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import as_numpy

import workbench
from workbench import (
    attention,
    attention_backward,
    dispatch,
    merge_attention,
    plan,
    reference,
    vector_add,
)

LANGUAGES = ("cuda", "numba")
B, HQ, HKV, NQ, NK, D = 2, 4, 2, 33, 65, 32

languages = pytest.mark.parametrize("backend", LANGUAGES)


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def inputs(dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    """Something for q, k and v."""
    return [
        array(B, HQ, NQ, D, seed=seed, dtype=dtype),
        array(B, HKV, NK, D, seed=seed + 1, dtype=dtype),
        array(B, HKV, NK, D, seed=seed + 2, dtype=dtype),
    ]


def close(got: Any, want: np.ndarray, dtype: Any = None) -> None:
    got = as_numpy(got)
    tolerance = 30 * float(ml_dtypes.finfo(dtype or got.dtype).eps)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(float), want, rtol=tolerance, atol=tolerance)


def answer(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (as_numpy(x) for x in (q, k, v))
    return reference.forward(q, k, v, **({"scale": q.shape[-1] ** -0.5} | options))


# ----------------------------------------------------------------------------------- on the host


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kernel", ["attention_flash_simt", "no_such_kernel", 3, ["vector_add"]])
def test_a_host_backend_has_no_kernels_to_choose(backend: str, kernel: Any) -> None:
    out = np.full((B, HQ, NQ, D), 7, np.float32)
    words = rf"kernel is .*, but backend '{backend}' has no kernels.*'cuda', 'numba', "
    with pytest.raises(ValueError, match=words):
        attention(*inputs(), out=out, backend=backend, kernel=kernel)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=words):
        vector_add(out, out, backend=backend, kernel=kernel)
    lse = array(B, HQ, NQ)
    with pytest.raises(ValueError, match=words):
        attention_backward(out, *inputs(), out, lse, backend=backend, kernel=kernel)
    with pytest.raises(ValueError, match=words):
        workbench.explain(*inputs(), backend=backend, kernel=kernel)


LAZY = """
import sys
import numpy as np
import workbench
q = np.ones((1, 1, 3, 4), np.float32)
workbench.attention(q, q, q, backend="reference")
loaded = [x for x in ("cupy", "numba", "workbench.cpu") if x in sys.modules]
assert not loaded, loaded
"""


def test_a_backend_loads_only_what_it_needs() -> None:
    root = Path(workbench.__file__).parents[1]
    subprocess.run([sys.executable, "-c", LAZY], check=True, cwd=root)


class _Stream:
    """A stream that can be captured, and gives its graph or none."""

    def __init__(self, graph: Any = None, **_: Any) -> None:
        self.ptr, self.graph, self.ended = id(self), graph, False

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        self.ended = True
        if self.graph is None:
            raise RuntimeError("no graphs here")
        return self.graph


class _Driver:
    """A plan without a GPU: what it starts and launches, and whether it can have graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, possible: bool = True) -> None:
        self.started: list[int] = []  # streams
        self.launched: list[Any] = []
        self.made: list[_Stream] = []
        self.fails_at = 0  # the how manieth stream's launches fail
        graph = SimpleNamespace(launch=self.launched.append) if possible else None

        def stream(**_: Any) -> _Stream:
            self.made.append(_Stream(graph))
            return self.made[-1]

        monkeypatch.setattr(plan, "_relaxed_capture", nullcontext)
        monkeypatch.setattr(plan, "_with_graphs", deque())
        self.current = _Stream()
        cuda = SimpleNamespace(
            Stream=stream,
            driver=SimpleNamespace(CUDADriverError=OSError),
            runtime=SimpleNamespace(CUDARuntimeError=RuntimeError),
        )
        self.plan = object.__new__(plan.Plan)
        self.plan._cupy = SimpleNamespace(cuda=cuda)
        self.plan._current_stream = lambda: self.current
        self.plan._workspace_bytes, self.plan._calls, self.plan._makes_graphs = 0, {}, True
        monkeypatch.setattr(self.plan, "_starts", lambda on, *_: [lambda: self.start(on)])

    def start(self, stream: int) -> int:
        self.started.append(stream)
        return int(stream != self.current.ptr and len(self.made) == self.fails_at)

    def run(self, q: int, times: int = 1, *, captured: bool = False) -> None:
        for _ in range(times):
            self.plan.run({"q": q}, captured)


@pytest.mark.parametrize("possible", [True, False])
def test_a_plan_makes_a_graph_of_what_comes_often(
    possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU. Where the driver cannot make one, it is asked once and all goes on."""
    driver = _Driver(monkeypatch, possible=possible)
    current, started = driver.current, driver.started
    driver.run(1, plan._OFTEN)
    assert started == [current.ptr] * plan._OFTEN + [driver.made[0].ptr]
    driver.run(1, 3)
    assert driver.launched == ([current] * 3 if possible else [])
    assert len(started) == plan._OFTEN + 1 + (0 if possible else 3)
    driver.run(1, captured=True)  # into the caller's graph, kernel by kernel
    driver.run(2)
    assert started[-2:] == [current.ptr] * 2
    assert len(driver.made) == 1


def test_a_graph_that_lacks_a_launch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture of it may well succeed; it is ended in any case."""
    driver = _Driver(monkeypatch)
    driver.fails_at = 1
    driver.run(1, plan._OFTEN + 5)
    assert driver.made[0].ended
    assert not driver.launched
    assert len(driver.made) == 1


def test_the_oldest_of_too_many_graphs_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_GRAPHS", 2)
    driver = _Driver(monkeypatch)
    for q in range(3):
        driver.run(q, plan._OFTEN)
    calls = list(driver.plan._calls.values())
    assert [call.graph is not None for call in calls] == [False, True, True]
    driver.run(0)
    assert not driver.launched
    driver.run(0, plan._OFTEN)  # and comes again
    assert [call.graph is not None for call in calls] == [True, False, True]


def test_the_host_answers_the_same_from_many_threads() -> None:
    problems = [inputs(seed=10 * i) for i in range(4)]
    for backend in ("reference", "cpu"):
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda x, b=backend: attention(*x, backend=b), problems * 3))
        for got, x in zip(together, problems * 3, strict=True):
            close(got, answer(*x)[0])


# ----------------------------------------------------------------------------------- on a GPU


def to_gpu(*arrays: np.ndarray) -> list[Any]:
    import cupy

    return [cupy.asarray(x) for x in arrays]


@pytest.fixture
def fresh() -> None:
    """Forget all plans, so that a test sees the first call and the second."""
    dispatch._repeats.clear()
    dispatch._plans.clear()


@pytest.mark.gpu
@languages
def test_results_are_where_the_inputs_are(backend: str) -> None:
    import cupy

    q, k, v = to_gpu(*inputs())
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    gradients = attention_backward(out, q, k, v, out, lse, backend=backend)
    total = vector_add(q, q, backend=backend)
    merged = merge_attention([out, out], [lse, lse], backend=backend)
    for x in (out, lse, *gradients[:3], total, *merged):
        assert type(x) is cupy.ndarray
        assert x.device == q.device
    close(out, answer(q, k, v)[0])
    close(merged[0], as_numpy(out).astype(float))
    close(merged[1], as_numpy(lse).astype(float) + np.log(2))


@pytest.mark.gpu
@languages
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_numpy_arrays_go_there_and_back(dtype: Any, backend: str) -> None:
    q, k, v = inputs(dtype)
    bias = np.broadcast_to(array(1, HQ, 1, NK, dtype=dtype), (B, HQ, NQ, NK))
    options = {"bias": bias, "backend": backend}
    out, lse = attention(q, k, v, return_lse=True, **options)
    dq, dk, dv, dbias = attention_backward(out, q, k, v, out, lse, return_dbias=True, **options)
    for x, like in ((out, q), (dq, q), (dk, k), (dv, v), (dbias, bias)):
        assert type(x) is np.ndarray
        assert (x.dtype, x.shape) == (like.dtype, like.shape)
    close(out, answer(q, k, v, bias=bias.astype(float))[0])
    target = np.full((B, NQ, HQ, D), 7, dtype).swapaxes(1, 2)
    assert attention(q, k, v, out=target, **options) is target
    np.testing.assert_array_equal(target, out)
    pair = np.full(lse.shape, 7, lse.dtype)
    attention(q, k, v, out=(target, pair), return_lse=True, **options)
    np.testing.assert_array_equal(pair, lse)
    close(vector_add(q, q, backend=backend), q.astype(float) * 2)
    merged, _ = merge_attention([out, out], [lse, lse], backend=backend)
    assert type(merged) is np.ndarray


@pytest.mark.gpu
def test_auto_is_cuda() -> None:
    q, k, v = inputs()
    want = attention(q, k, v, backend="cuda")
    np.testing.assert_array_equal(attention(q, k, v), want)
    got = attention(*to_gpu(q, k, v), backend="auto")
    np.testing.assert_array_equal(as_numpy(got), want)


@pytest.mark.gpu
@languages
@pytest.mark.usefixtures("fresh")
def test_a_repeated_call_reads_its_own_arrays(backend: str) -> None:
    bias, lengths = array(HQ, NQ, NK), np.array([NK, 7], np.int32)
    visible = np.arange(NK) < lengths[:, None, None, None]
    for seed in range(3):
        q, k, v = to_gpu(*inputs(seed=seed))
        b, n = to_gpu(bias * (seed - 1), lengths)
        out, lse = attention(q, k, v, bias=b, kv_lengths=n, return_lse=True, backend=backend)
        want, want_lse = answer(q, k, v, bias=as_numpy(b), visible=visible)
        close(out, want)
        close(lse, want_lse)
    assert len(dispatch._repeats) == 1


@pytest.mark.gpu
@languages
@pytest.mark.usefixtures("fresh")
def test_what_differs_uses_no_plan_of_another_call(backend: str) -> None:
    """E9: the same shapes with other strides, addresses, dtypes and options, over and over."""
    import cupy

    plain = inputs()
    bias = array(NQ, NK)

    def variants() -> list[tuple[list[Any], dict[str, Any]]]:
        permuted = [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in to_gpu(*plain)]
        backwards = [x[:, :, ::-1] for x in to_gpu(*(x[:, :, ::-1].copy() for x in plain))]
        odd = [cupy.empty(x.size + 1, x.dtype)[1:].reshape(x.shape) for x in plain]
        for x, y in zip(odd, plain, strict=True):
            x[...] = cupy.asarray(y)
        gpu = to_gpu(*plain)
        fewer = [gpu[0], *(cupy.broadcast_to(x[:, :1], x.shape) for x in gpu[1:])]
        options: list[dict[str, Any]] = [
            {}, {"causal": True}, {"causal": "top_left"}, {"window": (3, None)}, {"scale": 0.5},
            {"window": [3, 0]}, {"softcap": 2.0}, {"bias": cupy.asarray(bias)}, {"scale": 1},
            {"scale": 1.0}, {"bias": cupy.asarray(bias.T.copy()).T},
            {"bias": cupy.asarray(bias.astype(np.float64))}, {"return_lse": True},
        ]  # fmt: skip
        calls = [(gpu, x) for x in options]
        calls += [(arrays, {}) for arrays in (permuted, backwards, odd, fewer)]
        calls += [([x.astype(t) for x in gpu], {}) for t in (np.float16, np.float64)]
        return calls

    def expected(arrays: list[Any], options: dict[str, Any]) -> np.ndarray:
        host = [as_numpy(x) for x in arrays]
        given = {n: as_numpy(x) if n == "bias" else x for n, x in options.items()}
        given.pop("return_lse", None)
        return attention(*host, backend="reference", **given).astype(float)

    calls = variants()
    wants = [expected(*call) for call in calls]
    for _ in range(3):
        for (arrays, options), want in zip(calls, wants, strict=True):
            got = attention(*arrays, backend=backend, **options)
            close(got[0] if isinstance(got, tuple) else got, want, arrays[0].dtype)


@pytest.mark.gpu
@languages
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_repeated_lengths_of_any_integers(dtype: Any, backend: str) -> None:
    q, k, v = to_gpu(*inputs())
    for lengths in ([NK, 3], [1, 40], [0, NK]):
        (n,) = to_gpu(np.array(lengths, dtype))
        visible = np.arange(NK) < np.array(lengths)[:, None, None, None]
        for given in (n, to_gpu(np.repeat(np.array(lengths, dtype), 2))[0][::2]):
            out = attention(q, k, v, kv_lengths=given, backend=backend)
            close(out, answer(q, k, v, visible=visible)[0])


@pytest.mark.gpu
@languages
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_lengths_on_the_gpu_are_clamped(dtype: Any, backend: str) -> None:
    q, k, v = to_gpu(*inputs())
    big = 2**40 if dtype == np.int64 else 2**31 - 1
    out = attention(q, k, v, kv_lengths=to_gpu(np.array([big, -5], dtype))[0], backend=backend)
    close(out[0], answer(q, k, v)[0][0])
    assert not out[1].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
def test_the_type_of_an_option_counts_in_a_repeated_call() -> None:
    q, k, v = to_gpu(*inputs())
    attention(q, k, v, causal=True, return_lse=False)
    attention(q, k, v, causal=True, return_lse=True)
    with pytest.raises(ValueError, match="causal is 1"):
        attention(q, k, v, causal=1)
    with pytest.raises(TypeError, match="return_lse is 1"):
        attention(q, k, v, causal=True, return_lse=1)
    with pytest.raises(TypeError, match="scale is True"):
        attention(q, k, v, scale=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
def test_the_plans_of_many_kinds_of_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_KEPT", 4)
    q, k, v = to_gpu(*inputs())
    for i in range(1, 12):
        close(attention(q, k, v, scale=i / 10), answer(q, k, v, scale=i / 10)[0])
        assert len(dispatch._repeats) <= 4
        assert len(dispatch._plans) <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["no_such_kernel", 3, ["attention_naive"], "vector_add"])
def test_unknown_kernels(kernel: Any) -> None:
    import cupy

    q, k, v = to_gpu(*inputs())
    out = cupy.full(q.shape, 7, np.float32)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"kernel is .*'attention_flash_simt'.* or None"):
            attention(q, k, v, out=out, kernel=kernel)
    assert (out == 7).all()


@pytest.mark.gpu
@languages
@pytest.mark.parametrize("kind", ["interface", "dlpack"])
def test_arrays_of_other_libraries_are_viewed(kind: str, backend: str) -> None:
    import cupy

    class Foreign:
        """Holds memory of a GPU and says so in one way."""

        def __init__(self, x: Any) -> None:
            self.x = x
            if kind == "interface":
                self.__cuda_array_interface__ = x.__cuda_array_interface__

    class WithDlpack(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

    wrap = Foreign if kind == "interface" else WithDlpack
    q, k, v = to_gpu(*inputs())
    out = attention(wrap(q), wrap(k), wrap(v), backend=backend)
    assert type(out) is cupy.ndarray
    close(out, answer(q, k, v)[0])
    target = cupy.zeros_like(q)
    attention(q, k, v, out=wrap(target), backend=backend)
    np.testing.assert_array_equal(as_numpy(target), as_numpy(out))


# ------------------------------------------------------------------------------------------ out


@pytest.mark.gpu
@languages
def test_out_of_any_strides(backend: str) -> None:
    import cupy

    q, k, v = to_gpu(*inputs())
    want, want_lse = answer(q, k, v)
    shape = q.shape
    views = {
        "whole": cupy.full(shape, 7, np.float32),
        "permuted": cupy.full((B, NQ, HQ, D), 7, np.float32).swapaxes(1, 2),
        "packed": cupy.full((B, NQ, 3, HQ, D), 7, np.float32)[:, :, 1].swapaxes(1, 2),
        "negative": cupy.full(shape, 7, np.float32)[::-1, :, ::-1],
        "every-second": cupy.full((*shape[:3], 2 * D), 7, np.float32)[..., ::2],
        "odd": cupy.full((*shape[:3], D + 1), 7, np.float32)[..., 1:],
    }
    for name, out in views.items():
        # Twice: the second call is of a kind that is known.
        for _ in range(2):
            out[...] = 7
            assert attention(q, k, v, out=out, backend=backend) is out, name
            close(out, want)
        base = out if out.base is None else out.base
        around = int((base == 7).sum())
        assert around == base.size - out.size, f"{name}: wrote around out"
    lse = cupy.full((B, NQ, HQ), 7, np.float32).swapaxes(1, 2)
    got = attention(q, k, v, out=(views["odd"], lse), return_lse=True, backend=backend)
    assert got[1] is lse
    close(lse, want_lse)


@pytest.mark.gpu
@languages
def test_out_beside_its_inputs_in_one_array(backend: str) -> None:
    (packed,) = to_gpu(array(B, NQ, 4, HQ, D))
    q, k, v, out = (packed[:, :, i].swapaxes(1, 2) for i in range(4))
    want, _ = answer(q, k, v)
    before = as_numpy(packed[:, :, :3])
    attention(q, k, v, out=out, backend=backend)
    close(out, want)
    np.testing.assert_array_equal(as_numpy(packed[:, :, :3]), before)


# ------------------------------------------------------------- streams, graphs, threads, devices


@pytest.mark.gpu
@languages
def test_a_call_runs_on_the_current_stream(backend: str) -> None:
    """A slow kernel in front on the same stream: a call on another one would read too early."""
    import cupy

    q, k, v = inputs()
    want, _ = answer(q, k, v)
    attention(*to_gpu(q, k, v), backend=backend)
    wait = cupy.RawKernel(
        'extern "C" __global__ void wait() {'
        " long long start = clock64(); while (clock64() - start < 50000000) {} }",
        "wait",
    )
    wait.compile()
    late = to_gpu(q, k, v)
    early = [cupy.full_like(x, 7) for x in late]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        wait((1,), (1,), ())
        for x, y in zip(early, late, strict=True):
            x[...] = y
        out = attention(*early, backend=backend)
    stream.synchronize()
    close(out, want)


@pytest.mark.gpu
@languages
def test_a_captured_call_is_replayed_with_new_data(backend: str) -> None:
    """Forward and backward of every kernel, by name: graphs keep the workspaces alive."""
    import cupy

    for row in workbench.KERNELS:
        if row.op != "attention":
            continue
        options = {"backend": backend, "kernel": row.name, "causal": True}
        dtype = np.float32 if "float32" in row.dtypes else np.float16
        q, k, v, dout = to_gpu(*inputs(dtype), array(B, HQ, NQ, D, seed=9, dtype=dtype))
        stream = cupy.cuda.Stream(non_blocking=True)

        def both(
            q: Any = q, k: Any = k, v: Any = v, dout: Any = dout, options: Any = options
        ) -> Any:
            out, lse = attention(q, k, v, return_lse=True, **options)
            return out, lse, *attention_backward(dout, q, k, v, out, lse, **options)[:3]

        with stream:
            both()
            stream.synchronize()
            stream.begin_capture()
            results = both()
            graph = stream.end_capture()
        for seed in (20, 30):
            new = [*inputs(dtype, seed), array(B, HQ, NQ, D, seed=seed + 9, dtype=dtype)]
            for x, y in zip((q, k, v, dout), new, strict=True):
                x[...] = cupy.asarray(y)
            for x in results:
                x[...] = np.nan
            # Whatever the pool hands out next must not be what the graph works in.
            litter = [cupy.full(n, np.nan, np.float32) for n in (1000, 10_000, 100_000)]
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            visible = np.tri(NQ, NK, NK - NQ, dtype=bool)
            want, want_lse = answer(*new[:3], visible=visible)
            *wants, _ = reference.backward(new[3], *new[:3], visible=visible, scale=D**-0.5)
            for got, x in zip(results, (want, want_lse, *wants), strict=True):
                close(got, x, dtype)
            assert all(cupy.isnan(x).all() for x in litter), f"{row.name} wrote elsewhere"


@pytest.mark.gpu
@languages
def test_a_captured_call_keeps_what_its_caller_does_not_get(backend: str) -> None:
    """The lse, of a first call and of a repeated one: the graph goes on writing there."""
    import cupy

    q, k, v = to_gpu(*inputs())
    attention(q, k, v, return_lse=True, backend=backend)
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(2):
        with stream:
            stream.begin_capture()
            out = attention(q, k, v, backend=backend)
            graph = stream.end_capture()
            litter = [cupy.full((B, HQ, NQ), np.nan, np.float32) for _ in range(20)]
            graph.launch(stream)
            stream.synchronize()
        close(out, answer(q, k, v)[0])
        assert all(cupy.isnan(x).all() for x in litter)


@pytest.mark.gpu
@languages
def test_vector_add_is_captured_too(backend: str) -> None:
    import cupy

    for kernel in ("vector_add", "vector_add_vec4"):
        a, b = to_gpu(array(1001), array(1001, seed=1))
        vector_add(a, b, backend=backend, kernel=kernel)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            out = vector_add(a, b, backend=backend, kernel=kernel)
            graph = stream.end_capture()
        a[...] = 5
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(as_numpy(out), as_numpy(b) + np.float32(5))


def _graphs() -> int:
    calls = [call for p in dispatch._plans.values() for call in p._calls.values()]
    return sum(call.graph is not None for call in calls)


@pytest.mark.gpu
@languages
@pytest.mark.usefixtures("fresh")
def test_a_call_that_comes_often_is_one_graph(backend: str) -> None:
    """New data at the same addresses, on both kinds of stream; and a capture of such a call."""
    import cupy

    q, k, v, dout = to_gpu(*inputs(np.float16), array(B, HQ, NQ, D, seed=9, dtype=np.float16))
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        before = _graphs()
        for seed in range(3 * plan._OFTEN):
            new = [*inputs(np.float16, seed), array(B, HQ, NQ, D, seed=seed, dtype=np.float16)]
            for x, y in zip((q, k, v, dout), new, strict=True):
                x.set(y)
            cupy.cuda.Device().synchronize()
            with stream:
                out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
                grads = attention_backward(
                    dout, q, k, v, out, lse, causal=True, deterministic=True, backend=backend
                )[:3]
                stream.synchronize()
            visible = np.tri(NQ, NK, NK - NQ, dtype=bool)
            wants = reference.backward(new[3], *new[:3], visible=visible, scale=D**-0.5)[:3]
            close(out, answer(*new[:3], visible=visible)[0], np.float16)
            for got, want in zip(grads, wants, strict=True):
                close(got, want, np.float16)
            del out, lse, grads
        assert _graphs() >= before + 2
    with stream:
        stream.begin_capture()
        out = attention(q, k, v, causal=True, backend=backend)
        graph = stream.end_capture()
        out[...] = np.nan
        graph.launch(stream)
        stream.synchronize()
    close(out, answer(*new[:3], visible=visible)[0], np.float16)


@pytest.mark.gpu
@languages
def test_threads_may_share_an_output(backend: str) -> None:
    """The same sum into the same array: the same addresses, and so the same graph."""
    import cupy

    a, b = to_gpu(array(1000, seed=1), array(1000, seed=2))
    out = cupy.empty_like(a)

    def work(_: int) -> None:
        for _ in range(200):
            vector_add(a, b, out=out, backend=backend)

    for factor in (1, 2):
        a *= factor
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        np.testing.assert_array_equal(out.get(), a.get() + b.get())
    assert _graphs() > 0


@pytest.mark.gpu
@languages
@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_four_threads_on_four_streams(known: bool, backend: str) -> None:
    """E16: the same call from four threads on four streams, and calls that differ."""
    import cupy

    problems = [inputs(seed=10 * i) for i in range(4)]
    wants = [answer(*x)[0] for x in problems]
    gpu = [to_gpu(*x) for x in problems]
    cupy.cuda.Device().synchronize()
    dispatch._repeats.clear()
    dispatch._plans.clear()
    if known:
        attention(*gpu[0], backend=backend)
        cupy.cuda.Device().synchronize()

    def work(i: int) -> list[np.ndarray]:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            outs = [attention(*gpu[i], backend=backend) for _ in range(8)]
            for _ in range(2 * plan._OFTEN):  # at the same addresses
                last = attention(*gpu[i], backend=backend)
                stream.synchronize()
                del last
            outs.append(attention(*gpu[i], scale=0.1 * (i + 1), backend=backend))
            stream.synchronize()
            return [x.get(stream=stream) for x in outs]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert _graphs() > 0
    for i, outs in enumerate(results):
        for out in outs[:-1]:
            close(out, wants[i])
            np.testing.assert_array_equal(out, outs[0])
        close(outs[-1], answer(*problems[i], scale=0.1 * (i + 1))[0])


@pytest.mark.gpu
@languages
def test_arrays_on_another_device(backend: str) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    want, want_lse = answer(*inputs())
    with cupy.cuda.Device(1):
        q, k, v = to_gpu(*inputs())
        swapped = [cupy.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k, v)]
        lengths = cupy.asarray(np.array([NK, NK]))
        cupy.cuda.Device().synchronize()
    for arrays in ((q, k, v), swapped, (q, k, v)):
        out, lse = attention(*arrays, kv_lengths=lengths, return_lse=True, backend=backend)
        gradients = attention_backward(out, *arrays, out, lse, backend=backend)
        merged = merge_attention([out, out], [lse, lse], backend=backend)
        total = vector_add(out, out, backend=backend)
        for x in (out, lse, *gradients[:3], *merged, total):
            assert x.device.id == 1
        assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(1):
            cupy.cuda.Device().synchronize()
            close(out, want)
            close(lse, want_lse)
    there = attention(*to_gpu(*inputs()), backend=backend)
    assert there.device.id == 0
    close(there, want)
    mixed = [to_gpu(inputs()[0])[0], k, v]
    with pytest.raises(ValueError, match=r"one GPU.*q is on GPU 0, k is on GPU 1"):
        attention(*mixed, backend=backend)
    pair = [cupy.empty(q.shape, np.float32)]
    with pytest.raises(ValueError, match=r"one GPU.*q is on GPU 1, out is on GPU 0"):
        attention(q, k, v, out=pair[0], backend=backend)
