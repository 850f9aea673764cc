"""The CPU backend: both of its paths against the rule, and what surrounds the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest

import workbench
from workbench import cpu, reference
from workbench.cpu import kernels, threads

ROOT = Path(__file__).resolve().parents[1]
SMALL_TILES = kernels.Tiles(item_rows=48, rows=16, cols=32)
EVERY_DTYPE = [
    "square",
    "causal-more-keys",
    "grouped",
    "bias-heads",
    "lengths-causal",
    "everything",
]


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest problem goes through the kernels."""
    monkeypatch.setattr(cpu, "DENSE_WORK", -1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles so small that the lengths of `oracle.PROBLEMS` straddle several of them."""
    monkeypatch.setattr(cpu, "DENSE_WORK", -1)
    monkeypatch.setattr(cpu, "_tiles", lambda *_: SMALL_TILES)


def tensors(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) + 0.25).astype(dtype) for shape in shapes]


# -------------------------------------------------------------------------------- values


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", oracle.PROBLEMS)
def test_tiles(name: str) -> None:
    oracle.check(oracle.random_example(3, **oracle.PROBLEMS[name]), backend="cpu")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_tiles_in_other_dtypes(name: str, dtype: str) -> None:
    oracle.check(oracle.random_example(4, dtype=dtype, **oracle.PROBLEMS[name]), backend="cpu")


@pytest.mark.parametrize("name", oracle.PROBLEMS)
def test_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "DENSE_WORK", 1 << 40)
    oracle.check(oracle.random_example(5, **oracle.PROBLEMS[name]), backend="cpu")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_dense_in_other_dtypes(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "DENSE_WORK", 1 << 40)
    oracle.check(oracle.random_example(6, dtype=dtype, **oracle.PROBLEMS[name]), backend="cpu")


# Around the tiles that are really used: 32 x 480 and blocks of 256 rows and more, or 256 x 256.
LARGE: dict[str, dict[str, Any]] = {
    "plain": {"heads_q": 2, "seqlen_q": 481, "seqlen_k": 961},
    "causal": {"heads_q": 1, "seqlen_q": 1030, "causal": True},
    "options": {
        "heads_q": 2,
        "heads_kv": 1,
        "seqlen_q": 515,
        "seqlen_k": 700,
        "window": (300, 100),
        "mask": "qk",
        "bias": "hk",
        "softcap": 3.0,
        "kv_lengths": [690],
    },
    "one-query": {"heads_q": 4, "seqlen_q": 1, "seqlen_k": 5000},
}


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("cores", [cpu._CORES_WITH_SMALL_PRODUCTS | {threads.blas().core}, set()])
@pytest.mark.parametrize("name", LARGE)
def test_real_tiles(name: str, cores: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CORES_WITH_SMALL_PRODUCTS", cores)
    oracle.check(oracle.random_example(7, head_dim=64, **LARGE[name]), backend="cpu")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("number", [1, 2, 7])
def test_any_number_of_threads(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: number)
    example = oracle.random_example(8, heads_q=3, seqlen_q=200, causal=True, bias="hqk")
    first, second = (oracle.run(example, backend="cpu") for _ in range(2))
    oracle.hold(example, first)
    for name, result in first.items():
        np.testing.assert_array_equal(result, second[name], err_msg=name)


@pytest.mark.usefixtures("small_tiles")
def test_one_head_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer key heads than threads: a head's key tiles are split, and its dq is a sum of parts."""
    monkeypatch.setattr(threads, "available", lambda: 3)
    shared: list[tuple[str, int, int]] = []
    run = cpu._run

    def spy(kernel: Any, real: str, arrays: Any, how: Any, items: int) -> None:
        shared.append((kernel.__name__, items, arrays[7].shape[0] if len(arrays) > 7 else 0))
        run(kernel, real, arrays, how, items)

    monkeypatch.setattr(cpu, "_run", spy)
    oracle.check(oracle.random_example(9, heads_q=2, heads_kv=1, seqlen_q=300), backend="cpu")
    assert shared == [("forward", 14, 0), ("backward", 6, 6)]


@pytest.mark.parametrize("limit", [-1, 1 << 40])
def test_strides_are_read_as_they_are(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "DENSE_WORK", limit)
    rng = np.random.default_rng(10)
    packed = rng.standard_normal((2, 70, 3, 4, 24), dtype=np.float32)
    q, k, v = (packed[:, ::-1, i].swapaxes(1, 2) for i in range(3))
    shared = np.broadcast_to(k[:, :1], k.shape)
    mask = rng.random((70, 140))[::-1, ::2] < 0.7
    bias = rng.standard_normal((4, 70, 70), dtype=np.float32).swapaxes(1, 2)
    for x in (q, k, v, shared, mask, bias):
        x.flags.writeable = False
    out = np.full((2, 70, 4, 48), 7.0, np.float32)[..., ::2].swapaxes(1, 2)
    workbench.attention(q, shared, v, mask=mask, bias=bias, out=out, backend="cpu")
    options = {"visible": mask, "bias": bias, "scale": 24**-0.5}
    want, _ = reference.forward(q, shared, v, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)

    known = workbench.attention(q, shared, v, mask=mask, bias=bias, backend="cpu", return_lse=True)
    got = workbench.attention_backward(
        q, q, shared, v, *known, mask=mask, bias=bias, backend="cpu", return_dbias=True
    )
    *wants, ds = reference.backward(q, q, shared, v, **options)
    for gradient, exact in zip(got, (*wants, ds.sum(axis=0)), strict=True):
        np.testing.assert_allclose(gradient, exact, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "shape", [(1,), (1, 70), (70, 1), (3, 1, 70), (2, 1, 1, 1), (2, 3, 70, 70)]
)
def test_gradient_of_a_bias_of_any_shape(shape: tuple[int, ...]) -> None:
    q, bias = tensors(11, (2, 3, 70, 16), shape)
    example = oracle.Example(q, q[:, :, ::-1], q * 0.5, {"bias": bias}, q + 1)
    oracle.check(example, backend="cpu")


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_huge_scores(dtype: str) -> None:
    """Scores whose exponentials overflow, vanish, or differ by less than one can resolve."""
    q = np.array([[300.0, 0.0], [0.0, -300.0], [1e-3, 0.0]], dtype)[None, None]
    k = np.array([[300.0, 1.0], [299.0, 300.0], [-300.0, 5.0]], dtype)[None, None]
    v = np.eye(3, dtype=dtype)[None, None]
    out, lse = workbench.attention(q, k, v, scale=1.0, return_lse=True, backend="cpu")
    want, want_lse = reference.forward(q, k, v, scale=1.0)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    assert out[0, 0, 0, 0] == 1
    assert out[0, 0, 0, 2] == 0


# ------------------------------------------------------------------------------ NaN and inf


HIDING: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "top-left": {"causal": "top_left"},
    "window": {"window": (20, 9)},
    "mask": {"mask": "hqk"},
    "bias": {"bias": "hqk"},
    "bias-by-columns": {"bias": "hqk"},
    "softcap": {"causal": True, "softcap": 1.0},
    "lengths": {"q_lengths": [77], "kv_lengths": [60]},
    "nothing": {},
}


@pytest.mark.parametrize("path", ["small_tiles", "dense"])
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", HIDING)
def test_what_a_query_does_not_see_never_matters(
    name: str, value: float, poisoned: str, path: str, request: pytest.FixtureRequest
) -> None:
    if path != "dense":
        request.getfixturevalue(path)
    example = oracle.random_example(
        12, seqlen_q=90, seqlen_k=97, head_dim=8, backward=False, **HIDING[name]
    )
    if name == "bias-by-columns":
        example.options["bias"] = np.asfortranarray(example.options["bias"])
    x = getattr(example, poisoned)
    for row in (3, 33, 70):
        x[:, :, row, row % 8] = value
    got = oracle.run(example, backend="cpu")
    out, lse = reference.forward(example.q, example.k, example.v, **example.keywords())
    for result, want in (("out", out), ("lse", lse)):
        np.testing.assert_allclose(
            got[result], want, rtol=1e-4, atol=1e-5, err_msg=result, equal_nan=True
        )


@pytest.mark.parametrize("path", ["small_tiles", "dense"])
def test_what_does_not_exist_never_matters_backward(
    path: str, request: pytest.FixtureRequest
) -> None:
    if path != "dense":
        request.getfixturevalue(path)
    # The oracle's lengths have NaN past them, in every array.
    example = oracle.random_example(
        13,
        batch=3,
        seqlen_q=70,
        seqlen_k=80,
        q_lengths=[70, 1, 33],
        kv_lengths=[79, 40, 3],
        dlse=True,
        bias="hqk",
    )
    oracle.check(example, backend="cpu")


@pytest.mark.parametrize("path", ["small_tiles", "dense"])
def test_a_row_whose_lse_is_that_of_no_keys_has_no_gradient(
    path: str, request: pytest.FixtureRequest
) -> None:
    if path != "dense":
        request.getfixturevalue(path)
    q, k = tensors(14, *[(1, 2, 40, 8)] * 2)
    out, lse = workbench.attention(q, k, k, backend="cpu", return_lse=True)
    lse[:, :, 7] = -np.inf
    dq, dk, dv, _ = workbench.attention_backward(q, q, k, k, out, lse, backend="cpu")
    rest = [i for i in range(40) if i != 7]
    want = reference.backward(q[:, :, rest], q[:, :, rest], k, k, scale=8**-0.5)
    assert not dq[:, :, 7].any()
    for got, exact in zip((dq[:, :, rest], dk, dv), want[:3], strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------- small functions


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2(dtype: Any) -> None:
    from numba import njit

    @njit
    def evaluate(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = kernels._exp2(x[i])

    info = np.finfo(dtype)
    x = np.linspace(info.minexp, 0, 100_001).astype(dtype)
    y = np.empty_like(x)
    evaluate(x, y)
    exact = np.exp2(x.astype(np.longdouble))
    assert np.abs(y / exact - 1).max() < 1.5 * info.eps
    assert y[-1] == 1
    special = np.array([-np.inf, -1e30, info.minexp - 1, np.nan, 1e30, np.inf], dtype)
    y = np.empty_like(special)
    evaluate(special, y)
    largest = 2.0 ** (info.maxexp - 1)
    np.testing.assert_array_equal(y, np.array([0, 0, 0, np.nan, largest, largest], dtype))


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_vector_add(dtype: str) -> None:
    a, b = tensors(14, (5, 6), (6, 5), dtype=oracle.DTYPES[dtype])
    out = workbench.vector_add(a, b.T, backend="cpu")
    assert out.dtype == a.dtype
    np.testing.assert_array_equal(out, (a.astype(np.float64) + b.T).astype(a.dtype))


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_merge_equals_attention_over_all_keys(dtype: str) -> None:
    q, k, v = tensors(15, *[(2, 3, 40, 16)] * 3, dtype=oracle.DTYPES[dtype])
    mask = np.random.default_rng(15).random((40, 40)) < 0.2
    mask[7] = False
    parts = [
        workbench.attention(
            q, k[:, :, part], v[:, :, part], mask=mask[:, part], return_lse=True, backend="cpu"
        )
        for part in (slice(0, 5), slice(5, 12), slice(12, 40))
    ]
    out, lse = workbench.merge_attention(*zip(*parts, strict=True), backend="cpu")
    want, want_lse = reference.forward(q, k, v, visible=mask, scale=0.25)
    tolerance = 8 * oracle.roundoff(dtype)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=3 * tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-6)
    assert out.dtype == q.dtype


def test_merge_with_nothing_is_neutral_to_the_bit() -> None:
    out, lse = tensors(16, (1, 2, 9, 4), (1, 2, 9))
    out[0, 0, 0] = -0.0
    lse[0, 1, 2] = -90.5
    nothing, nowhere = np.zeros_like(out), np.full_like(lse, -np.inf)
    for first, second in (
        ([out, nothing], [lse, nowhere]),
        ([nothing, out], [nowhere, lse]),
        ([nothing, out, nothing], [nowhere, lse, nowhere]),
    ):
        merged, merged_lse = workbench.merge_attention(first, second, backend="cpu")
        assert merged.tobytes() == out.tobytes()
        assert merged_lse.tobytes() == lse.tobytes()
    merged, merged_lse = workbench.merge_attention([nothing] * 2, [nowhere] * 2, backend="cpu")
    assert merged.tobytes() == nothing.tobytes()
    assert merged_lse.tobytes() == nowhere.tobytes()


# -------------------------------------------------------------------------- threads and the BLAS


@pytest.fixture
def two_blas_threads() -> Iterator[threads.Blas]:
    """SciPy's BLAS, allowed two threads for the test."""
    library = threads.blas()
    if not library.known:
        pytest.skip("SciPy's BLAS here is of no kind whose threads can be counted")
    before = library.get_threads()
    library.set_threads(2)
    yield library
    library.set_threads(before)


@pytest.mark.usefixtures("tiled")
def test_blas_threads_are_restored(two_blas_threads: threads.Blas) -> None:
    during: list[int] = []
    threads.share(lambda: during.append(two_blas_threads.get_threads()), 2)
    assert set(during) == {1}
    assert two_blas_threads.get_threads() == 2

    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        threads.share(fail, 2)
    assert two_blas_threads.get_threads() == 2

    q = tensors(17, (1, 2, 50, 8))[0]
    workbench.attention(q, q, q, backend="cpu")
    assert two_blas_threads.get_threads() == 2


def test_last_one_out_restores_the_blas(two_blas_threads: threads.Blas) -> None:
    second_is_in, first_is_out = threading.Event(), threading.Event()
    seen = []

    def first() -> None:
        with threads.one_blas_thread():
            assert second_is_in.wait(10)
        first_is_out.set()

    def second() -> None:
        with threads.one_blas_thread():
            second_is_in.set()
            assert first_is_out.wait(10)
            seen.append(two_blas_threads.get_threads())

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result()
    assert seen == [1]
    assert two_blas_threads.get_threads() == 2


def test_an_error_in_a_helper_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.get_ident()
    helper_began = threading.Event()

    def task() -> None:
        if threading.get_ident() != caller:
            helper_began.set()
            raise MemoryError("no room in the helper")
        assert helper_began.wait(10)

    monkeypatch.setattr(threads, "_helpers", ThreadPoolExecutor(1))
    with pytest.raises(MemoryError, match="in the helper"):
        threads.share(task, 2)


def test_numba_settings_are_heeded_and_kept() -> None:
    code = """
        import numba
        from workbench.cpu import threads
        assert threads.available() == numba.config.NUMBA_NUM_THREADS == 3
        numba.set_num_threads(2)
        assert threads.available() == 2
        attend()
        assert numba.get_num_threads() == 2
    """
    run_python(code, NUMBA_NUM_THREADS="3", NUMBA_THREADING_LAYER="workqueue")


@pytest.mark.usefixtures("small_tiles")
def test_calls_from_several_threads() -> None:
    examples = [
        oracle.random_example(20 + i, heads_q=4, seqlen_q=150 + i, causal=True) for i in range(4)
    ]
    alone = [oracle.run(example, backend="cpu") for example in examples]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = pool.map(lambda example: oracle.run(example, backend="cpu"), examples)
            for one, other in zip(alone, together, strict=True):
                for name, result in one.items():
                    np.testing.assert_array_equal(result, other[name], err_msg=name)


# ---------------------------------------------------------------------------- in other processes


PRELUDE = """
    import numpy as np
    import workbench

    def attend(n=300, seed=0):
        q = np.random.default_rng(seed).standard_normal((1, 2, n, 32), dtype=np.float32)
        out, lse = workbench.attention(q, q, q, causal=True, return_lse=True, backend="cpu")
        dq, dk, dv, _ = workbench.attention_backward(
            q, q, q, q, out, lse, causal=True, backend="cpu"
        )
        return [x.tobytes() for x in (out, lse, dq, dk, dv)]
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; fail with what it wrote if it fails."""
    import textwrap

    source = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    finished = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, f"exit status {finished.returncode}\n{finished.stderr}"
    return finished


def test_small_problems_import_and_compile_nothing() -> None:
    run_python(
        """
        import sys
        attend(n=20)
        assert "numba" not in sys.modules
        """
    )


def test_compilation_is_announced_and_kept(tmp_path: Path) -> None:
    code = """
        from workbench.cpu import kernels
        kernels.load(kernels.bias_gradient, "float32")
    """
    cold, warm = (run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert cold.stderr.count("compiling the CPU kernels") == 1
    assert warm.stderr == ""
    assert cold.stdout == warm.stdout == ""


def test_only_the_first_compilation_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels._Announcement, "made", False)
    for _ in range(2):
        kernels._Announcement().on_start(None)
    assert capsys.readouterr().err.count("compiling the CPU kernels") == 1


def test_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import types
    from numba.core import caching

    def kernel(x: Any) -> None:
        x[0] = 1

    monkeypatch.setattr(kernels, "_signatures", lambda real: {kernel: types.void(real[:])})
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    compiled: Any = kernels.load(kernel, "float32")
    x = np.zeros(1, np.float32)
    compiled(x)
    assert x[0] == 1
    assert compiled.stats.cache_path is None


LAYERS = """
    import numba, os, threading, warnings
    from concurrent.futures import ThreadPoolExecutor

    @numba.njit(parallel=True)
    def total(x):
        t = 0.0
        for i in numba.prange(x.size):
            t += x[i]
        return t

    assert total(np.ones(1000)) == 1000  # the layer has begun
    assert numba.threading_layer() == LAYER
    want = attend()
    with ThreadPoolExecutor(4) as pool:  # at once, beside the user's own parallel loop
        futures = [pool.submit(attend) for _ in range(8)]
        assert total(np.ones(1000)) == 1000
        assert all(future.result() == want for future in futures)

    def fork(action):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
            child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if action() else 2
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1]

    def in_child():
        with ThreadPoolExecutor(3) as pool:
            return all(result == want for result in pool.map(lambda _: attend(), range(3)))

    from workbench.cpu import threads
    before = threads.blas().get_threads()
    assert any(thread.name.startswith("workbench") for thread in threading.enumerate())
    assert fork(in_child) == 0
    assert not any(thread.name.startswith("workbench") for thread in threading.enumerate())
    # And while another thread is inside a call, and holds the BLAS.
    with threads.one_blas_thread():
        assert fork(lambda: threads.blas().get_threads() == before) == 0
        assert fork(in_child) == 0
    assert attend() == want
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("layer", ["workqueue", "omp", "tbb"])
def test_threads_and_forks_on_every_threading_layer(layer: str) -> None:
    pool = {"omp": "omppool", "tbb": "tbbpool"}.get(layer, layer)
    try:
        __import__(f"numba.np.ufunc.{pool}")
    except ImportError as error:
        pytest.skip(f"Numba's threading layer {layer} is not installed ({error})")
    run_python(
        f"\n    LAYER = {layer!r}" + LAYERS, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
def test_memory_is_linear_in_the_number_of_keys() -> None:
    """The matrix of scores would take 1600 MB, and the arrays take some 20."""
    run_python(
        """
        import resource
        attend(n=1000)  # compiled by now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend(n=14_200)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 150_000, grown
        """
    )


def test_a_call_while_the_interpreter_shuts_down() -> None:
    run_python(
        """
        import atexit
        want = attend()
        def last():
            if attend() != want:
                import os
                os._exit(3)
        atexit.register(last)
        """
    )
