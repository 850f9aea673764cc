"""Value tests of every kernel in every language, generated from `KERNELS`, and of the hosts.

On a GPU all that a call allocates, inputs, results and workspaces, lies in an `Arena`: memory that
is NaN wherever nothing was written, with a gap around every array. What a kernel forgets to write
is NaN, what it reads outside of an array is NaN, and what it writes there is seen.

How right a result must be is for `oracle` to say. Few kernels are compiled, for many shapes each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import (
    DTYPES,
    PROBLEMS,
    Example,
    as_numpy,
    check,
    example,
    hold,
    part_taken,
    random_example,
    run,
)

import workbench
from workbench import KERNELS, dispatch, launchers
from workbench.plan import Plan
from workbench.problem import VectorProblem

ATTENTION = [row for row in KERNELS if row.op == "attention"]
ADDITION = [row for row in KERNELS if row.op == "vector_add"]
HOSTS = ("reference", "cpu")


# ---------------------------------------------------------------------------- memory with gaps


class Arena:
    """GPU memory that hands out arrays with gaps between them, all of it NaN to begin with."""

    SIZE = 256 * 2**20
    GAP = 1024

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.memory = cupy.cuda.Memory(self.SIZE)
        self.bytes = cupy.ndarray((self.SIZE,), np.uint8, cupy.cuda.MemoryPointer(self.memory, 0))
        self.bytes.fill(255)  # NaN, whatever the floating dtype
        self.taken: list[tuple[int, int]] = []
        self.top = self.GAP

    def malloc(self, size: int) -> Any:
        """An allocator for CuPy: addresses are multiples of 512, as those of its own pool."""
        start = -(-self.top // 512) * 512
        self.top = start + size + self.GAP
        assert self.top <= self.SIZE, "the arena is too small"
        self.taken.append((start, start + size))
        return self.cupy.cuda.MemoryPointer(self.memory, start)

    def check_gaps(self) -> None:
        """Fail if anything was written between the arrays."""
        used = self.bytes[: self.top].get()
        for start, end in self.taken:
            used[start:end] = 255
        wrong = np.flatnonzero(used != 255)
        assert not wrong.size, f"{wrong.size} bytes were written outside of all arrays"

    def reset(self) -> None:
        """Take everything back; whoever still has an array of it may not use it any more."""
        self.bytes[: self.top].fill(255)
        self.taken.clear()
        self.top = self.GAP


_arenas: list[Arena] = []


@contextmanager
def gaps(backend: str) -> Iterator[None]:
    """Let a GPU backend work in an arena, and look at the gaps afterwards."""
    if backend in HOSTS:
        yield
        return
    import cupy

    if not _arenas:
        _arenas.append(Arena())
    (arena,) = _arenas
    try:
        with cupy.cuda.using_allocator(arena.malloc):
            yield
            cupy.cuda.Device().synchronize()
        arena.check_gaps()
    finally:
        arena.reset()


def on_device(x: np.ndarray) -> Any:
    """A CuPy array with the strides of `x`: what it is a view of goes to the GPU whole."""
    import cupy

    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    if not base.flags.c_contiguous or base.dtype.itemsize not in (1, x.itemsize):
        base = x = np.ascontiguousarray(x)
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    there = cupy.asarray(base.view(np.uint8) if base.ndim else base)
    return cupy.ndarray(x.shape, x.dtype, there.data + start, strides=x.strides)


def how(row: Any, backend: str) -> dict[str, Any]:
    """Keyword arguments of `oracle.run` and `oracle.check`."""
    if backend in HOSTS:
        return {"backend": backend}
    return {"backend": backend, "kernel": row.name, "transfer": on_device}


def targets(rows: list[Any], *, hosts: bool = True) -> Any:
    """Parametrise over every kernel in every language, and over the host backends."""
    chosen = [pytest.param(None, host, id=host) for host in HOSTS if hosts]
    chosen += [
        pytest.param(row, language, id=f"{row.name}-{language}", marks=pytest.mark.gpu)
        for row in rows
        for language in row.languages
    ]
    return pytest.mark.parametrize(("row", "backend"), chosen)


attention_targets = targets(ATTENTION)


def what_it_takes(row: Any, e: Example) -> Example | None:
    """The part of an example that a kernel takes on this GPU."""
    if row is None:
        return e
    import cupy

    return part_taken(row, e, f"sm_{cupy.cuda.Device().compute_capability}")


def check_what_it_takes(row: Any, backend: str, e: Example, **more: Any) -> None:
    taken = what_it_takes(row, e)
    if taken is None:
        pytest.skip(f"{row.name} declines this")
    with gaps(backend):
        check(taken, **how(row, backend), **more)


def try_all(row: Any, backend: str, problems: dict[str, dict[str, Any]], seed: int = 0) -> None:
    """Check many small problems; the message says which one failed.

    Kernels that do not take every dtype may decline problems too.
    """
    taken = {name: what_it_takes(row, example(row, seed, **x)) for name, x in problems.items()}
    declined = [name for name, e in taken.items() if e is None]
    if len(declined) == len(problems):
        pytest.skip(f"{row.name} declines these")
    assert not declined or len(row.dtypes) < len(DTYPES), f"{row.name} declines {declined}"
    failed = []
    for name, e in taken.items():
        if e is None:
            continue
        try:
            with gaps(backend):
                check(e, **how(row, backend))
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, f"{len(failed)} of {len(problems)} fail\n" + "\n".join(failed[:5])


# --------------------------------------------------------------------------- every kind of problem

# For the dtypes other than float32: a few kernels to compile, everything that the dtype matters to.
FEW = ("square", "odd", "grouped", "causal", "lengths-causal", "everything", "very-wide", "no-keys")


@attention_targets
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_option(problem: str, row: Any, backend: str) -> None:
    check_what_it_takes(row, backend, example(row, 1, **PROBLEMS[problem]))


@attention_targets
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
@pytest.mark.parametrize("problem", FEW)
def test_every_dtype(problem: str, dtype: str, row: Any, backend: str) -> None:
    if row is not None and dtype not in row.dtypes:
        pytest.skip(f"{row.name} takes {row.dtypes}")
    check_what_it_takes(row, backend, example(row, 2, dtype=dtype, **PROBLEMS[problem]))


COMBINED: tuple[dict[str, Any], ...] = (
    {"causal": True, "window": (40, None)},
    {"mask": "bhqk"},
    {"bias": "hqk"},
    {"softcap": 1.5},
)


@attention_targets
@pytest.mark.parametrize("chosen", ["".join(x) for x in itertools.product("-+", repeat=4)])
def test_every_combination_of_options(chosen: str, row: Any, backend: str) -> None:
    """Range, mask, bias and cap: each FEATURES is a kernel of its own."""
    problem: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 2, "dlse": True}
    problem |= {"seqlen_q": 70, "seqlen_k": 97, "head_dim": 40, "head_dim_v": 24}
    for take, option in zip(chosen, COMBINED, strict=True):
        problem |= option if take == "+" else {}
    check_what_it_takes(row, backend, example(row, 3, **problem))


# ---------------------------------------------------------------------------------------- sizes


@attention_targets
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_ragged_lengths(causal: Any, row: Any, backend: str) -> None:
    """Lengths around the edges of tiles, of queries and keys independently."""
    lengths = (31, 64, 129) if backend in HOSTS else (1, 31, 64, 65, 127, 129, 200)
    problems = {
        f"{nq} x {nk}": {
            "heads_q": 1, "seqlen_q": nq, "seqlen_k": nk, "head_dim": 64, "causal": causal,
        }
        for nq, nk in itertools.product(lengths, lengths)
    }  # fmt: skip
    try_all(row, backend, problems)


@attention_targets
def test_many_windows(row: Any, backend: str) -> None:
    """Windows that end inside, at and beyond the edges of tiles, with lengths that shift them."""
    problems = {}
    for left, right in itertools.product((None, 0, 31, 64, 65), (None, 0, 1, 63)):
        problem: dict[str, Any] = {"seqlen_q": 130, "seqlen_k": 150, "window": (left, right)}
        problems[f"{left}, {right}"] = problem
        lengths = {"batch": 2, "heads_q": 1, "q_lengths": [130, 65], "kv_lengths": [64, 150]}
        problems[f"{left}, {right}, lengths"] = problem | lengths
    for window in ((62, None), (None, 62), (1, 1), (0, 127)):
        problems[f"{window}, square"] = {"seqlen_q": 192, "seqlen_k": 192, "window": window}
    if backend in HOSTS:
        problems = dict(itertools.islice(problems.items(), 0, None, 5))
    try_all(row, backend, problems)


@attention_targets
def test_head_dims(row: Any, backend: str) -> None:
    sizes = [(1, 1), (7, 64), (33, 33), (64, 5), (8, 24), (72, 40), (80, 128), (96, 96), (128, 96),
             (192, 128), (200, 200), (256, 64), (300, 20), (520, 520)]  # fmt: skip
    problems = {
        f"{d}, {dv}": {"seqlen_q": 33, "seqlen_k": 70, "head_dim": d, "head_dim_v": dv}
        for d, dv in sizes
        if row is None or max(d, dv) <= (row.max_head_dim or max(d, dv))
    }
    assert len(problems) >= 12
    try_all(row, backend, problems)


@attention_targets
def test_few_queries_and_many_keys(row: Any, backend: str) -> None:
    """Keys that several blocks share, heads that one block takes together."""
    problems: dict[str, dict[str, Any]] = {
        "alone": {},
        "grouped": {"heads_q": 8, "heads_kv": 2},
        "grouped, no layout": {"heads_q": 6, "heads_kv": 3, "bias": "hk", "mask": "bhk"},
        "causal": {"heads_q": 8, "heads_kv": 2, "causal": True},
        "top left": {"heads_q": 8, "heads_kv": 2, "causal": "top_left"},
        "window": {"heads_q": 8, "heads_kv": 2, "window": (300, 0)},
        "lengths": {"heads_q": 8, "heads_kv": 2, "kv_lengths": [700, 0, 64]},
        "query lengths": {"heads_q": 8, "heads_kv": 2, "q_lengths": [1, 0, 1]},
        "twenty queries": {"seqlen_q": 20, "heads_q": 1, "batch": 1, "seqlen_k": 2000},
        "nine queries": {"seqlen_q": 9, "heads_q": 4, "heads_kv": 1, "causal": True},
    }
    few: dict[str, Any] = {"batch": 3, "seqlen_q": 1, "seqlen_k": 700, "head_dim": 64}
    try_all(row, backend, {name: few | x for name, x in problems.items()})


@attention_targets
def test_head_groups(row: Any, backend: str) -> None:
    heads = [(1, 1), (4, 4), (4, 2), (4, 1), (12, 4), (6, 3), (7, 7), (5, 1)]
    problems = {
        f"{hq}, {hkv}": {"batch": 2, "heads_q": hq, "heads_kv": hkv, "seqlen_k": 40, "causal": True}
        for hq, hkv in heads
    }
    try_all(row, backend, problems)


TILES = [
    pytest.param(row, language, tiles, key, tile, id=f"{row.name}-{language}-{key}-{tuple(tile)}")
    for row, tiles in (
        (row, getattr(launchers, f"{row.name.removeprefix('attention_').upper()}_TILES"))
        for row in ATTENTION
        if row.name.startswith("attention_flash")
    )
    for language in row.languages
    for key, choices in tiles.items()
    for tile in choices
]


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "language", "tiles", "key", "tile"), TILES)
def test_every_tile(
    monkeypatch: pytest.MonkeyPatch, row: Any, language: str, tiles: Any, key: Any, tile: Any
) -> None:
    """Small problems would not get large tiles, nor would this GPU need those of small memory."""
    monkeypatch.setitem(tiles, key, (tile,))
    monkeypatch.setattr(launchers, "FULL_GRID", 0)
    monkeypatch.setattr(launchers, "MULTIPROCESSORS", 2)  # so that blocks walk over several
    for cache in ("_plans", "_repeats"):
        monkeypatch.setattr(dispatch, cache, {})
    forward, *dtype, head_dim = key
    options: dict[str, Any] = {"causal": True, "heads_q": 2, "heads_kv": 1}
    if tile.features != launchers.RANGE:
        options |= {"mask": "qk", "bias": "hk", "softcap": 3.0}
    e = random_example(
        16, dtype=dtype[0] if dtype else "bfloat16", backward=not forward, head_dim=head_dim,
        seqlen_q=3 * tile.block_m + 5, seqlen_k=3 * tile.block_n - 7, **options,
    )  # fmt: skip
    check_what_it_takes(row, language, e)


# --------------------------------------------------------------------------- biases and masks


@attention_targets
def test_every_shape_of_a_bias_and_its_gradient(row: Any, backend: str) -> None:
    problems = {}
    for n in range(5):
        for axes in itertools.combinations("bhqk", n):
            problems["".join(axes) or "none"] = {
                "batch": 3, "heads_q": 4, "heads_kv": 2, "seqlen_q": 33, "seqlen_k": 70,
                "bias": "".join(axes), "dlse": True,
            }  # fmt: skip
    assert len(problems) == 16
    try_all(row, backend, problems)


@attention_targets
def test_a_bias_of_fewer_axes(row: Any, backend: str) -> None:
    for ndim in range(1, 4):
        e = example(row, 5, batch=2, seqlen_q=33, seqlen_k=70, bias="bhqk"[4 - ndim :])
        bias = e.options["bias"].reshape(e.options["bias"].shape[4 - ndim :])
        check_what_it_takes(row, backend, replace(e, options=e.options | {"bias": bias}))


@attention_targets
def test_masks_of_every_shape_and_stride(row: Any, backend: str) -> None:
    for axes in ("", "b", "h", "q", "k", "bh", "qk", "hq", "bhk", "bhqk"):
        e = example(row, 6, batch=2, heads_q=3, seqlen_q=33, seqlen_k=70, mask=axes)
        mask = e.options["mask"]
        for given in (
            mask,
            np.ascontiguousarray(mask.T).T,
            np.ascontiguousarray(mask[..., ::-1])[..., ::-1],
        ):
            check_what_it_takes(row, backend, replace(e, options={"mask": given}))


@attention_targets
def test_a_row_that_a_bias_shuts_sees_nothing(row: Any, backend: str) -> None:
    e = example(row, 7, seqlen_q=70, seqlen_k=65, bias="qk")
    bias = e.options["bias"].copy()
    bias[:, :, [0, 33, 69]] = -np.inf
    bias[:, :, 40, :64] = -np.inf
    check_what_it_takes(row, backend, replace(e, options={"bias": bias}))


# -------------------------------------------------------------------------------------- numbers


@attention_targets
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(sign: int, row: Any, backend: str) -> None:
    """Scores near +-60000: no stand-in for a masked score may come near."""
    e = example(row, 8, seqlen_q=40, seqlen_k=70, head_dim=64, causal=True)
    q = np.full_like(e.q, 30)
    k = (sign * (31.25 + 0.01 * e.k.astype(np.float32))).astype(e.k.dtype)
    check_what_it_takes(row, backend, replace(e, q=q, k=k, options=e.options | {"scale": 1.0}))


@attention_targets
def test_a_growing_maximum_rescales_what_was_added_up(row: Any, backend: str) -> None:
    """The maximum grows with every tile of keys, in the second of two heads it shrinks."""
    e = example(row, 9, heads_q=2, seqlen_q=33, seqlen_k=400, head_dim=32)
    slope = np.linspace(-3, 3, 400, dtype=np.float32)[:, None]
    k = (e.k + np.stack([slope, -slope])[None]).astype(e.k.dtype)
    q = (np.abs(e.q) + 0.5).astype(e.q.dtype)
    check_what_it_takes(row, backend, replace(e, q=q, k=k))


@attention_targets
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_seen_does_not_matter(poison: float, row: Any, backend: str) -> None:
    """NaN and inf in q and k reach exactly the rows that see them."""
    e = example(row, 10, seqlen_q=129, seqlen_k=129, head_dim=64, causal=True, backward=False)
    with gaps(backend):
        plain = {n: as_numpy(x) for n, x in run(e, **how(row, backend)).items()}
    q, k = e.q.copy(), e.k.copy()
    q[0, 0, 17] = poison
    k[0, 1, 70] = poison
    with gaps(backend):
        results = {
            n: as_numpy(x) for n, x in run(replace(e, q=q, k=k), **how(row, backend)).items()
        }
    touched = np.zeros(e.q.shape[:3], bool)
    touched[0, 0, 17] = True
    touched[0, 1, 70:] = True
    for name in ("out", "lse"):
        np.testing.assert_array_equal(results[name][~touched], plain[name][~touched])
    if np.isnan(poison):
        assert np.isnan(results["out"][touched]).all()


@attention_targets
def test_a_bias_of_minus_infinity_hides_whatever_the_score(row: Any, backend: str) -> None:
    e = example(row, 15, seqlen_q=65, seqlen_k=70, head_dim=64, bias="k", backward=False)
    bias = e.options["bias"].copy()
    bias[..., [3, 66]] = -np.inf
    e = replace(e, options=e.options | {"bias": bias})
    if what_it_takes(row, e) is None:
        pytest.skip(f"{row.name} declines this")
    with gaps(backend):
        plain = {n: as_numpy(x) for n, x in run(e, **how(row, backend)).items()}
    k = e.k.copy()
    k[:, :, 3] = np.nan
    k[:, :, 66] = np.inf
    with gaps(backend):
        results = run(replace(e, k=k), **how(row, backend))
        for name, x in results.items():
            np.testing.assert_array_equal(as_numpy(x), plain[name])


# --------------------------------------------------------------------------- strides and addresses


def strided(e: Example) -> dict[str, Example]:
    """The same numbers, as arrays that lie in memory in many ways."""

    def each(function: Any) -> Example:
        arrays = {name: function(getattr(e, name)) for name in ("q", "k", "v", "dout")}
        return replace(e, **arrays)

    def within(x: np.ndarray, shape: tuple[int, ...], where: Any, move: Any = lambda y: y) -> Any:
        view = move(np.full(shape, np.nan, x.dtype)[where])
        view[...] = x
        return view

    def swap(x: np.ndarray) -> np.ndarray:
        return x.swapaxes(1, 2)

    everything = slice(None)
    b, h, n, d = range(4)
    return {
        "bnhd": each(lambda x: np.ascontiguousarray(swap(x)).swapaxes(1, 2)),
        "packed": each(
            lambda x: within(
                x, (x.shape[b], x.shape[n], 3 * x.shape[h], x.shape[d]),
                (everything, everything, slice(x.shape[h], 2 * x.shape[h])), swap,
            )
        ),
        "backwards": each(
            lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
        ),
        "batch-last": each(
            lambda x: np.ascontiguousarray(x.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
        ),
        "odd-address": each(
            lambda x: within(x, (x.size + 1,), slice(1, None), lambda y: y.reshape(x.shape))
        ),
        "odd-rows": each(
            lambda x: within(x, (*x.shape[:3], x.shape[d] + 1), (..., slice(0, x.shape[d])))
        ),
        "every-second": each(
            lambda x: within(x, (*x.shape[:3], 2 * x.shape[d]), (..., slice(0, None, 2)))
        ),
    }  # fmt: skip


@attention_targets
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides_and_addresses(dtype: str, row: Any, backend: str) -> None:
    problem = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 40, "seqlen_k": 70}
    if row is not None and dtype not in row.dtypes:
        pytest.skip(f"{row.name} takes {row.dtypes}")
    e = example(row, 11, dtype=dtype, head_dim=64, causal=True, **problem)
    views = {name: what_it_takes(row, view) for name, view in strided(e).items()}
    views = {name: view for name, view in views.items() if view is not None}
    assert len(views) >= 4
    for name, view in views.items():
        with gaps(backend):
            results = run(view, **how(row, backend))
            try:
                hold(e if view.dout is not None else replace(e, dout=None), results)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@attention_targets
def test_repeated_heads_and_rows(row: Any, backend: str) -> None:
    """Strides of 0, in every input at once."""
    e = example(row, 12, batch=2, heads_q=3, seqlen_q=33, seqlen_k=65, head_dim=64)
    e = replace(
        e,
        q=np.broadcast_to(e.q[:, :, :1], e.q.shape),
        k=np.broadcast_to(e.k[:, :1], e.k.shape),
        v=np.broadcast_to(e.v[:1], e.v.shape),
        dout=np.broadcast_to(e.dout[:1, :1], e.dout.shape),
    )
    check_what_it_takes(row, backend, e)


@attention_targets
def test_layout_bnhd(row: Any, backend: str) -> None:
    for name in ("grouped", "everything", "odd"):
        e = what_it_takes(row, example(row, 13, **PROBLEMS[name]))
        if e is not None:
            with gaps(backend):
                check(e, layout="bnhd", **how(row, backend))


# ----------------------------------------------------------------------------------- determinism


@targets(ATTENTION, hosts=False)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_every_time(dtype: str, row: Any, backend: str) -> None:
    if dtype not in row.dtypes:
        pytest.skip(f"{row.name} takes {row.dtypes}")
    hopper = row.name == "attention_flash_wgmma"  # it takes no bias
    e = example(
        row, 14, dtype=dtype, batch=2, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=400,
        head_dim=64, causal=True, bias=None if hopper else "hqk", dlse=True,
    )  # fmt: skip
    if what_it_takes(row, e) is None:
        pytest.skip(f"{row.name} declines this")
    with gaps(backend):
        first, *others = (
            {n: as_numpy(x) for n, x in run(e, deterministic=True, **how(row, backend)).items()}
            for _ in range(4)
        )
        loose = {n: as_numpy(x) for n, x in run(e, **how(row, backend)).items()}
        hold(e, first)
    for other in others:
        for name, x in first.items():
            assert other[name].tobytes() == x.tobytes(), f"{name} changed"
    # Hopper's walks over the queries the other way round.
    for name in ("out", "lse") if hopper else ("out", "lse", "dk", "dv"):
        assert loose[name].tobytes() == first[name].tobytes(), f"{name} changed"


# ------------------------------------------------------------------------------------ vector_add


def sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums as they must be, to the bit: one rounding."""
    return (a.astype(np.float64) + b.astype(np.float64)).astype(a.dtype)


def numbers(*shape: int, seed: int, dtype: str) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(DTYPES[dtype])


@targets(ADDITION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_add_sizes(dtype: str, row: Any, backend: str) -> None:
    kernel = None if row is None else row.name
    place = on_device if row is not None else np.asarray
    for size in (0, 1, 2, 3, 7, 8, 9, 63, 1000, 4095, 4096, 4097, 70_001, 1_000_003):
        a, b = numbers(size, seed=1, dtype=dtype), numbers(size, seed=2, dtype=dtype)
        with gaps(backend):
            got = workbench.vector_add(place(a), place(b), backend=backend, kernel=kernel)
            np.testing.assert_array_equal(as_numpy(got), sums(a, b), err_msg=str(size))


@targets(ADDITION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_add_addresses(dtype: str, row: Any, backend: str) -> None:
    """Each of the three arrays may begin at any element."""
    kernel = None if row is None else row.name
    size = 1100
    a, b = numbers(size + 9, seed=1, dtype=dtype), numbers(size + 9, seed=2, dtype=dtype)
    shifts = [
        (0, 0, 0),
        (1, 1, 1),
        (3, 3, 3),
        (8, 8, 8),
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (5, 1, 3),
    ]
    for i, j, o in shifts:
        with gaps(backend):
            place = on_device if row is not None else np.array
            x, y, out = place(a)[i:], place(b)[j:], place(np.full_like(a, 7))
            target = out[o : o + size]
            workbench.vector_add(x[:size], y[:size], out=target, backend=backend, kernel=kernel)
            want = sums(a[i : i + size], b[j : j + size])
            np.testing.assert_array_equal(as_numpy(target), want, err_msg=f"{i, j, o}")
            rest = np.delete(as_numpy(out), slice(o, o + size))
            assert (rest == 7).all(), f"{i, j, o}: wrote around out"


@targets(ADDITION)
def test_vector_add_strides(row: Any, backend: str) -> None:
    a, b = (
        numbers(6, 5, 4, 7, seed=1, dtype="float32"),
        numbers(6, 5, 4, 7, seed=2, dtype="float32"),
    )
    odd = numbers(6, 5, 4, 15, seed=3, dtype="float32")
    views = {
        "both-permuted": (a.T, b.T),
        "one-permuted": (a, np.ascontiguousarray(b.T).T),
        "backwards": (a[::-1, :, ::-1], b),
        "columns-backwards": (a[..., ::-1], b[:, ::-1]),
        "every-second": (odd[..., ::2][..., :7], odd[..., 1::2]),
        "repeated": (np.broadcast_to(a[:1, :, :1], a.shape), b),
        "one-number": (np.broadcast_to(a[0, 0, 0, 0], a.shape), b),
        "five-axes": (a.reshape(6, 5, 2, 2, 7).transpose(4, 1, 3, 0, 2), b.reshape(7, 5, 2, 6, 2)),
    }
    place = on_device if row is not None else np.asarray
    for name, (x, y) in views.items():
        # Five axes that do not merge are copied for either kernel.
        taken = ("both-permuted", "five-axes")
        if row is not None and row.needs_contiguous and name not in taken:
            with pytest.raises(workbench.NoKernelError, match="contiguous arrays only"):
                workbench.vector_add(on_device(x), on_device(y), backend=backend, kernel=row.name)
            continue
        kernel = None if row is None else row.name
        with gaps(backend):
            got = workbench.vector_add(place(x), place(y), backend=backend, kernel=kernel)
            np.testing.assert_array_equal(as_numpy(got), sums(x, y), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("language", ["cuda", "numba"], ids=lambda x: f"vector_add_vec4-{x}")
@pytest.mark.parametrize("stride", [1, 2])
def test_a_small_grid_strides_over_all(stride: int, language: str) -> None:
    """Only vectors of billions of elements fill the largest grid: here it has three blocks."""
    import cupy

    size = 100_003
    strides = tuple((name, (stride,)) for name in ("a", "b", "out"))
    problem = VectorProblem("vector_add", "float32", (size,), strides)
    (launch,) = launchers.vector_add_vec4(problem, "sm_80").launches
    assert launch.grid > 3
    work = launchers.Work((replace(launch, grid=3),))
    plan = Plan("vector_add_vec4", work, problem, language, cupy.cuda.Device().id)
    a, b = (numbers(size * stride, seed=seed, dtype="float32") for seed in (1, 2))
    with gaps(language):
        there = {"a": on_device(a), "b": on_device(b), "out": on_device(np.full_like(a, 7))}
        with plan.on_device() as captured:
            plan.run({name: x.data.ptr for name, x in there.items()}, captured)
        want = np.full_like(a, 7)
        want[::stride] = sums(a[::stride], b[::stride])
        np.testing.assert_array_equal(as_numpy(there["out"]), want)


@targets(ADDITION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_add_of_what_is_no_number(dtype: str, row: Any, backend: str) -> None:
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    special = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, largest, -largest]
    a, b = (x.ravel().astype(DTYPES[dtype]) for x in np.meshgrid(special, special))
    place = on_device if row is not None else np.asarray
    kernel = None if row is None else row.name
    with gaps(backend), np.errstate(all="ignore"):
        got = workbench.vector_add(place(a), place(b), backend=backend, kernel=kernel)
        # As float64, where NumPy knows that NaN is NaN.
        np.testing.assert_array_equal(as_numpy(got).astype(float), sums(a, b).astype(float))


# ------------------------------------------------------------------------------------- the arena


@pytest.mark.gpu
@pytest.mark.parametrize(("element", "inside"), [(0, True), (99, True), (100, False), (-1, False)])
def test_the_arena_sees_what_is_written(element: int, inside: bool) -> None:
    import cupy

    def write() -> None:
        with gaps("cuda"):
            x = cupy.empty(100, np.float32)
            assert cupy.isnan(x).all()
            cupy.ndarray((1,), np.float32, x.data + 4 * element)[0] = 1

    if inside:
        write()
    else:
        with pytest.raises(AssertionError, match="4 bytes were written outside"):
            write()
    assert not _arenas[0].taken


def test_every_kernel_is_tested() -> None:
    assert {row.op for row in KERNELS} == {"attention", "vector_add"}
    assert len(ATTENTION) + len(ADDITION) == len(KERNELS)
