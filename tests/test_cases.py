"""The cases of `cases.py` over every backend, and on a GPU over every kernel in both languages."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from building import needs
from cases import CASES, run_case
from oracle import DTYPES, Example, answers, as_numpy, hold, part_taken, random_example, run

import workbench

HOSTS = ("reference", "cpu")
KERNELS = [row for row in workbench.KERNELS if row.op == "attention"]


def on_device(x: np.ndarray) -> Any:
    """A CuPy array with the strides of `x`: its whole base goes to the GPU, and is viewed there."""
    import cupy

    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    if not base.flags.c_contiguous:  # from broadcast_to, whose memory no array in the chain owns
        low, high = np.lib.array_utils.byte_bounds(x)
        base = np.frombuffer((ctypes.c_char * (high - low)).from_address(low), np.uint8)
    offset = x.ctypes.data - base.ctypes.data
    return cupy.ndarray(x.shape, x.dtype, cupy.asarray(base).data + offset, strides=x.strides)


def as_it_is(x: np.ndarray) -> np.ndarray:
    return x


# Keyword arguments of `oracle.run`, and the dtypes that go with them.
Target = tuple[dict[str, Any], tuple[str, ...]]
TARGETS = [pytest.param(({"backend": host}, tuple(DTYPES)), id=host) for host in HOSTS]
TARGETS += [
    pytest.param(
        ({"backend": language, "kernel": row.name, "transfer": on_device}, row.dtypes),
        id=f"{row.name}-{language}",
        marks=pytest.mark.gpu,
    )
    for row in KERNELS
    for language in row.languages
]
BACKENDS = [pytest.param(host, id=host) for host in HOSTS]
BACKENDS += [pytest.param(x, id=x, marks=pytest.mark.gpu) for x in ("cuda", "numba")]


def first_dtype(dtypes: tuple[str, ...]) -> str:
    """float32, or what a kernel takes in its place."""
    return "float32" if "float32" in dtypes else dtypes[0]


def part_for(how: dict[str, Any]) -> Callable[[Example], Example | None]:
    """What a kernel takes of an example on this GPU; a host backend takes all of it."""
    if "kernel" not in how:
        return lambda e: e
    import cupy

    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    row = next(row for row in KERNELS if row.name == how["kernel"])
    return lambda e: part_taken(row, e, arch)


# The cases of which a kernel takes nothing: they have masks, biases, or rows that are no multiples
# of 16 bytes throughout.
DECLINED = {
    "attention_flash_wgmma": {"D1", "D3", "D5", "D6", "D8", "D11", "E7", "E11", "E14"},
    "attention_flash_mma": {"D1", "D5", "D6", "D8", "D11", "E6"},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, target: Target) -> None:
    how, dtypes = target
    made = run_case(case, dtype=first_dtype(dtypes), dtypes=dtypes, part=part_for(how), **how)
    if not made:
        pytest.skip(f"{how['kernel']} declines all of it")  # test_what_is_declined knows which


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
def test_what_is_declined(row: Any) -> None:
    """No more than that is skipped where there is a GPU."""

    def taken(e: Example) -> bool:
        return e.dtype in [DTYPES[d] for d in row.dtypes] and bool(part_taken(row, e, "sm_90"))

    dtype = first_dtype(row.dtypes)
    nothing = {
        name
        for name, calls in CASES.items()
        if not any(call.raises or taken(call.example) for call in calls(dtype))
    }
    assert nothing == DECLINED.get(row.name, set())
    for head_dim in E13_HEAD_DIMS:
        aligned = head_dim % 8 == 0 or row.name not in DECLINED
        assert taken(framed(e13(33, head_dim, row.dtypes), row.dtypes)) == aligned


# What the simulator runs: not the cases all of whose calls are too large, nor D12, whose calls are
# many and like those of test_simulator_kernels.py; in Numba, which compiles slowly, a few.
SIMULATED = {
    "cuda": [x for x in CASES if x not in ("D4", "D12", "E2", "E7", "E8", "E10", "E15")],
    "numba": ["D1", "D3", "D5", "E1", "E4", "E6"],
}


def small(e: Example) -> Example | None:
    """An example for which the simulator needs a fraction of a second."""
    batch, heads, seqlen_q, head_dim = e.q.shape
    seqlen_k = e.k.shape[2]
    work = batch * heads * seqlen_q * seqlen_k * head_dim
    return e if max(seqlen_q, seqlen_k) <= 70 and work <= 300_000 else None


@pytest.mark.parametrize(
    ("language", "case"),
    [
        pytest.param(language, case, marks=needs(language))
        for language, cases in SIMULATED.items()
        for case in cases
    ],
)
def test_case_in_the_simulator(language: str, case: str) -> None:
    how = {"backend": f"{language}-simulator", "kernel": "attention_flash_simt"}
    assert run_case(case, part=small, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["D1", "D7", "E8", "E9", "E14"])
@pytest.mark.parametrize("backend", ["cuda", "numba"])
def test_case_with_numpy_arrays_on_the_gpu(case: str, backend: str) -> None:
    assert run_case(case, backend=backend)


# ------------------------------------------------------------------------------------------- D9


@pytest.mark.gpu
@pytest.mark.parametrize("language", ["cuda", "numba"])
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
def test_d9_more_elements_than_31_bits_count(row: Any, language: str) -> None:
    if language not in row.languages or "float16" not in row.dtypes:
        pytest.skip(f"{row.name} takes {row.dtypes} in {row.languages}")
    import cupy

    seqlen_k, head_dim = 2**25 + 64, 64
    needed = 2 * 2 * seqlen_k * head_dim + 4 * seqlen_k
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 1.2 * needed:
        pytest.skip(f"{needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")
    q = cupy.zeros((1, 1, 1, head_dim), cupy.float16)
    k = cupy.zeros((1, 1, seqlen_k, head_dim), cupy.float16)
    v = cupy.zeros_like(k)
    q[..., 0] = 8
    k[..., -1, 0] = 200
    v[..., -1, :] = 1
    out, lse = workbench.attention(q, k, v, return_lse=True, backend=language, kernel=row.name)
    # A score of 200 against 2^25 scores of 0: the others' weights are below 1e-79.
    np.testing.assert_array_equal(out.get(), np.ones((1, 1, 1, head_dim), np.float16))
    np.testing.assert_array_equal(lse.get(), np.full((1, 1, 1), 200, np.float32))


# ------------------------------------------------------------------------------------------- E3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_e3_nothing_merges_to_nothing(dtype: str, backend: str) -> None:
    how = {"backend": backend}
    e = random_example(3, dtype=dtype, batch=2, seqlen_q=5)
    x, a = (as_numpy(y) for y in workbench.attention(e.q, e.k, e.v, return_lse=True, **how))
    a[0, 0, 0], x[0, 0, 0] = -np.inf, 0  # one row of it sees nothing either
    x[1, 1, 1, 0] = -0.0
    nothing = np.zeros_like(x), np.full_like(a, -np.inf)
    for outs, lses, want in (
        ([x, nothing[0]], [a, nothing[1]], (x, a)),
        ([nothing[0], x], [nothing[1], a], (x, a)),
        ([nothing[0], x, nothing[0]], [nothing[1], a, nothing[1]], (x, a)),
        ([nothing[0], nothing[0]], [nothing[1], nothing[1]], nothing),
    ):
        out, lse = workbench.merge_attention(outs, lses, **how)
        assert (out.shape, out.dtype, lse.dtype) == (x.shape, x.dtype, a.dtype)
        assert out.tobytes() == want[0].tobytes()
        assert lse.tobytes() == want[1].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edges", [(0, 20, 33), (0, 0, 1, 7, 33)])
def test_e3_merged_parts_are_the_whole(edges: tuple[int, ...], dtype: str, backend: str) -> None:
    e = random_example(3, dtype=dtype, batch=2, seqlen_q=9, seqlen_k=33, backward=False)
    parts = [
        workbench.attention(e.q, e.k[:, :, a:b], e.v[:, :, a:b], return_lse=True, backend=backend)
        for a, b in itertools.pairwise(edges)
    ]
    out, lse = workbench.merge_attention(*zip(*parts, strict=True), backend=backend)
    hold(e, {"out": out, "lse": lse})


# ------------------------------------------------------------------------------------------ E12


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_e12_a_wrong_scale_is_seen(dtype: str, target: Target) -> None:
    how, dtypes = target
    if dtype not in dtypes:
        pytest.skip(f"the kernel takes {dtypes}")
    rng = np.random.default_rng(12)
    q, k, v = (rng.random((1, 2, 65, 64)).astype(DTYPES[dtype]) for _ in range(3))
    right, wrong = Example(q, k, v), Example(q, k, v, {"scale": 1 / 64})
    hold(right, run(right, **how))
    results = run(wrong, **how)
    for name, answer in answers(right).items():
        with pytest.raises(AssertionError, match="its error"):
            answer.hold(results[name], name)


# ------------------------------------------------------------------------------------------ E13


def guarded(x: np.ndarray, guard: float, side: int) -> np.ndarray:
    """A view that equals `x` inside an array of guard values: around it, and beside each row."""
    frame = np.full((*x.shape[:2], x.shape[2] + 4, x.shape[3] + 2 * side), guard, x.dtype)
    view = frame[:, :, 2:-2, side:-side]
    view[...] = x
    return view


E13_HEAD_DIMS = (56, 63, 64)


def e13(seqlen_q: int, head_dim: int, dtypes: tuple[str, ...]) -> Example:
    dtype = first_dtype(dtypes)
    return random_example(13, dtype=dtype, seqlen_q=seqlen_q, seqlen_k=33, head_dim=head_dim)


def margin(dtypes: tuple[str, ...]) -> int:
    """Elements beside each row: not every kernel takes rows that begin anywhere."""
    return 3 if "float32" in dtypes else 8


def framed(e: Example, dtypes: tuple[str, ...]) -> Example:
    """An example in NaN, so that what is read there shows."""
    names = ("q", "k", "v", "dout")
    return Example(**{x: guarded(getattr(e, x), np.nan, margin(dtypes)) for x in names})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", E13_HEAD_DIMS)
@pytest.mark.parametrize("seqlen_q", [31, 33, 63])
def test_e13_nothing_outside_the_arrays(seqlen_q: int, head_dim: int, target: Target) -> None:
    how, dtypes = target
    e, side = e13(seqlen_q, head_dim, dtypes), margin(dtypes)
    inputs = part_for(how)(framed(e, dtypes))
    if inputs is None:  # test_what_is_declined knows when
        pytest.skip(f"{how['kernel']} declines rows of {head_dim}")
    hold(replace(e, dout=inputs.dout), run(inputs, **how))

    transfer: Callable[[np.ndarray], Any] = how.get("transfer", as_it_is)
    frame = np.full((1, 2, seqlen_q + 4, head_dim + 2 * side), 7, e.dtype)
    lse_frame = np.full((5, 2, seqlen_q), 7, np.float32)
    frame_there, lse_there = transfer(frame), transfer(lse_frame)
    out, lse = frame_there[:, :, 2:-2, side:-side], lse_there[2:3]
    arrays = [transfer(x) for x in (inputs.q, inputs.k, inputs.v)]
    options = {name: value for name, value in how.items() if name != "transfer"}
    got = workbench.attention(*arrays, out=(out, lse), return_lse=True, **options)
    assert got[0] is out
    assert got[1] is lse
    frame, lse_frame = as_numpy(frame_there), as_numpy(lse_there)
    forward = Example(e.q, e.k, e.v)
    hold(forward, {"out": frame[:, :, 2:-2, side:-side].copy(), "lse": lse_frame[2:3].copy()})
    frame[:, :, 2:-2, side:-side] = lse_frame[2:3] = 7
    assert (frame == 7).all()
    assert (lse_frame == 7).all()


# ------------------------------------------------------------------------------------------ E16


@pytest.mark.parametrize("target", TARGETS)
def test_e16_threads(target: Target) -> None:
    how, dtypes = target
    examples = [
        random_example(seed, dtype=first_dtype(dtypes), seqlen_q=n, causal=True, heads_q=3)
        for seed, n in enumerate((65, 129, 65, 33))
    ]
    how = how | {"deterministic": True}  # or the next call's dq may differ in its last bit
    one_by_one = [run(e, **how) for e in examples]
    for e, results in zip(examples, one_by_one, strict=True):
        hold(e, results)

    def work(e: Example) -> list[dict[str, Any]]:
        if "transfer" not in how:
            return [run(e, **how) for _ in range(5)]
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            repeated = [run(e, **how) for _ in range(5)]
            stream.synchronize()
            return repeated

    with ThreadPoolExecutor(len(examples)) as pool:
        together = list(pool.map(work, examples))
    for repeated, want in zip(together, one_by_one, strict=True):
        for results in repeated:
            for name, x in want.items():
                np.testing.assert_array_equal(as_numpy(results[name]), as_numpy(x), err_msg=name)
