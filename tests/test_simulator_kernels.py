"""Every kernel in both languages, run by the simulator with all its checks, and held to the rule.

On a machine without a GPU this is where the kernels' values are tested: few instances of each, for
compiling takes longer than running, on shapes that straddle their tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from building import needs
from cases import run_case
from oracle import Example, check, example, part_taken, random_example, run

import workbench
from workbench import KERNELS, launchers
from workbench.launchers import Work
from workbench.problem import DTYPES, SIMULATOR_ARCH, VectorProblem
from workbench.simulator import engine
from workbench.simulator import run as simulator

ATTENTION = [row for row in KERNELS if row.op == "attention"]
ADDITION = [row for row in KERNELS if row.op == "vector_add"]
RAGGED = {"heads_q": 2, "heads_kv": 1, "seqlen_q": 70, "seqlen_k": 90, "head_dim": 64}
# All FEATURES at once, none of the sizes a multiple of anything, and no 16-byte accesses.
EVERYTHING = {
    "batch": 2, "heads_q": 2, "heads_kv": 1, "seqlen_q": 37, "seqlen_k": 43, "head_dim": 40,
    "head_dim_v": 23, "causal": True, "window": (30, None), "mask": "bhqk", "bias": "hqk",
    "softcap": 1.5, "kv_lengths": [43, 29], "q_lengths": [37, 11], "dlse": True,
}  # fmt: skip


def targets(rows: list[Any]) -> Any:
    """Parametrise over every kernel in every language."""
    return pytest.mark.parametrize(
        ("row", "language"),
        [
            pytest.param(row, language, id=f"{row.name}-{language}", marks=needs(language))
            for row in rows
            for language in row.languages
        ],
    )


def check_taken(row: Any, language: str, e: Example, **more: Any) -> None:
    """Hold a problem to the rule, as far as the kernel takes it."""
    taken = part_taken(row, e, SIMULATOR_ARCH)
    if taken is None:
        pytest.skip(f"{row.name} declines this")
    check(taken, **how(row, language), **more)


def check_random(row: Any, language: str, seed: int, **problem: Any) -> None:
    """The same with a random problem, in a dtype that the kernel takes."""
    if row.name == "attention_flash_mma":  # its rows begin at multiples of 16 bytes
        problem |= {"head_dim_v": 24} if problem.get("head_dim_v") == 23 else {}
    check_taken(row, language, example(row, seed, **problem))


def how(row: Any, language: str) -> dict[str, Any]:
    return {"backend": f"{language}-simulator", "kernel": row.name}


@targets(ATTENTION)
def test_ragged_tiles(row: Any, language: str) -> None:
    check_random(row, language, 1, **RAGGED)


@targets(ATTENTION)
def test_all_options_at_once(row: Any, language: str) -> None:
    check_random(row, language, 2, **EVERYTHING)


@targets(ATTENTION)
@pytest.mark.parametrize(
    "change",
    [
        {"causal": "top_left", "window": (20, 30)},
        {"heads_q": 4, "heads_kv": 2, "bias": "bk"},
        {"bias": "bhq", "mask": "k"},
        {"bias": "h"},
        # A mask in tiles that no other option touches.
        {
            "seqlen_q": 70,
            "seqlen_k": 150,
            "window": None,
            "q_lengths": [70, 11],
            "kv_lengths": [150, 29],
        },
    ],
    ids=str,
)
def test_other_options_at_once(change: dict[str, Any], row: Any, language: str) -> None:
    """The same instance as `test_all_options_at_once`, with sums over every axis of a bias."""
    check_random(row, language, 7, **EVERYTHING | change)


@targets(ATTENTION)
def test_a_bias_of_minus_infinity_hides_whatever_the_score(row: Any, language: str) -> None:
    """The same instance as `test_all_options_at_once`; in a backward NaN may spread."""
    head_dim_v = 24 if row.name == "attention_flash_mma" else 23
    options = EVERYTHING | {"bias": "k", "dlse": False, "head_dim_v": head_dim_v}
    e = example(row, 10, **options, backward=False)
    e.options["bias"][..., 7] = -np.inf
    e.k[:, :, 7] = np.nan
    check_taken(row, language, e)


@targets([row for row in ATTENTION if row.name.startswith("attention_flash")])
@pytest.mark.parametrize(
    ("seqlen_k", "window"),
    [(192, (62, None)), (192, (None, 62)), (192, (1, 1)), (40, (None, 0))],
)
def test_windows_that_end_at_the_edges_of_tiles(
    seqlen_k: int, window: Any, row: Any, language: str
) -> None:
    """One row or key more or less, and a tile is skipped, or taken for one without an edge."""
    sizes = {"heads_q": 1, "seqlen_q": 192, "seqlen_k": seqlen_k, "head_dim": 64}
    check_random(row, language, 9, window=window, **sizes)


MMA_TILES = [
    pytest.param(forward, head_dim, language, marks=needs(language))
    for forward in (True, False)
    for head_dim in (64, 128)
    for language in ("cuda", "numba")
]


@pytest.mark.parametrize(("forward", "head_dim", "language"), MMA_TILES)
def test_large_tiles_of_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, forward: bool, head_dim: int, language: str
) -> None:
    """What large problems run, in a small one."""
    monkeypatch.setattr(launchers, "FULL_GRID", 0)
    tile = launchers.FLASH_MMA_TILES[forward, head_dim][0]
    e = random_example(
        11, dtype="bfloat16", heads_q=1, head_dim=head_dim, seqlen_q=tile.block_m + 5,
        seqlen_k=tile.block_n + 9, causal=True, backward=not forward,
    )  # fmt: skip
    check(e, backend=f"{language}-simulator", kernel="attention_flash_mma")


HOPPER_TILES = [
    pytest.param(head_dim, tile, language, id=f"{head_dim}-{tuple(tile)}-{language}",
                 marks=needs(language))
    for (forward, head_dim), tiles in launchers.FLASH_WGMMA_TILES.items()
    for tile in tiles
    if forward
    for language in ("cuda", "numba")
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "tile", "language"), HOPPER_TILES)
def test_tiles_of_hopper(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, tile: Any, language: str
) -> None:
    """Two blocks that walk over several query tiles each, some of which see no key."""
    monkeypatch.setattr(launchers, "MULTIPROCESSORS", 2)
    monkeypatch.setitem(launchers.FLASH_WGMMA_TILES, (True, head_dim), (tile,))
    rows, keys = 2 * tile.block_m + 9, 2 * tile.block_n - 3
    for options in (
        {},
        {"softcap": 0.75, "kv_lengths": [keys, tile.block_n + 9]},
        {"seqlen_k": rows, "window": (tile.block_m, None)},  # rows of a tile end at many key tiles
    ):
        problem: dict[str, Any] = {
            "batch": 2, "heads_q": 2, "heads_kv": 1, "head_dim": head_dim, "causal": True,
            "seqlen_q": rows, "seqlen_k": keys, "q_lengths": [rows, 20],
        }  # fmt: skip
        e = random_example(15, dtype="bfloat16", backward=False, **problem | options)
        check(e, backend=f"{language}-simulator", kernel="attention_flash_wgmma")


HOPPER = targets([row for row in ATTENTION if row.name == "attention_flash_wgmma"])
# Two blocks that walk over several query tiles each, and several key tiles.
WALK = {"batch": 2, "heads_q": 2, "heads_kv": 1, "seqlen_q": 140, "seqlen_k": 300, "head_dim": 64}


@HOPPER
@pytest.mark.parametrize(
    "change",
    [
        {"causal": True, "softcap": 0.75, "scale": -0.4, "kv_lengths": [300, 261]},
        # Lengths that end in, with and in front of a tile of 128 keys, the last and the only one.
        {"kv_lengths": [255, 256]},
        {"kv_lengths": [1, 0]},
        # Rows that see nothing beside rows that see everything.
        {"q_lengths": [70, 3]},
        {"q_lengths": [70, 3], "kv_lengths": [300, 255]},
        {"kv_lengths": [127, 129], "q_lengths": [140, 3], "window": (20, 30), "head_dim_v": 104},
        {"softcap": 0.75},
        {"softcap": 30.0, "scale": 2.0},
        {"scale": -0.4},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_all_options_that_hopper_takes(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], row: Any, language: str
) -> None:
    monkeypatch.setattr(launchers, "MULTIPROCESSORS", 2)
    check_random(row, language, 16, **WALK | change)


@targets([row for row in ATTENTION if "mma" in row.name])
def test_e5_exponents_with_the_scale_in_them(row: Any, language: str) -> None:
    """They are multiply-adds, in which a large score and the maximum are rounded differently."""
    dtypes = row.dtypes
    assert run_case("E5", dtype=dtypes[0], dtypes=dtypes, **how(row, language)) == 3


@HOPPER
def test_query_tiles_of_one_key_tile(
    monkeypatch: pytest.MonkeyPatch, row: Any, language: str
) -> None:
    """A block gives each back after its first scores, and soon another one lies in its place."""
    monkeypatch.setattr(launchers, "MULTIPROCESSORS", 1)
    check_random(row, language, 17, **WALK | {"heads_q": 4, "seqlen_k": 30})


@HOPPER
def test_any_stride_along_an_axis_of_length_1(row: Any, language: str) -> None:
    e = example(row, 18, **RAGGED | {"heads_q": 1, "seqlen_k": 1})
    q, k, v = (
        np.lib.stride_tricks.as_strided(x, strides=[
            odd if n == 1 else stride
            for odd, n, stride in zip((0, -6, 2, 2), x.shape, x.strides, strict=True)
        ])
        for x in (e.q, e.k, e.v)
    )  # fmt: skip
    assert part_taken(row, replace(e, q=q, k=k, v=v), SIMULATOR_ARCH) is not None
    check_taken(row, language, replace(e, q=q, k=k, v=v))


@HOPPER
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_of_hopper(
    deterministic: bool, head_dim: int, row: Any, language: str
) -> None:
    """Tails, several tiles of both kinds, and a tile of keys, last or first, that nobody sees."""
    hidden = {"causal": True, "window": (70, None)} if deterministic else {"causal": "top_left"}
    e = example(
        row, 16, dtype="bfloat16", heads_q=2, heads_kv=1, head_dim=head_dim - 8,
        head_dim_v=head_dim - 24, seqlen_q=137, seqlen_k=339, dlse=True, **hidden,
    )  # fmt: skip
    check_taken(row, language, e, deterministic=deterministic)


@HOPPER
@pytest.mark.parametrize("head_dim", [64, 256])
def test_query_tiles_that_see_no_key(head_dim: int, row: Any, language: str) -> None:
    """Nobody adds to their dq, which is 0 nevertheless, and not what the memory held before."""
    e = example(
        row, 20, dtype="bfloat16", causal=True, heads_q=2, heads_kv=1, head_dim=head_dim,
        seqlen_q=290, seqlen_k=30,
    )  # fmt: skip
    check_taken(row, language, e)


@HOPPER
def test_lse_is_subtracted_to_its_last_bits(row: Any, language: str) -> None:
    """Scores of 8010.3, one a query, whose probability is 1: 16 bits of lse would make it 0.94."""
    q = (89.5 * np.eye(64) + 0.24414062 * np.eye(64, k=1))[None, None].astype("bfloat16")
    dout = np.random.default_rng(0).standard_normal(q.shape, np.float32).astype("bfloat16")
    options = {"scale": 1.0, "causal": "top_left", **how(row, language)}
    out, lse = workbench.attention(q, q, dout, return_lse=True, **options)
    grads = workbench.attention_backward(dout, q, q, dout, out, lse, **options)
    np.testing.assert_allclose(grads.dv.astype(float), dout.astype(float), rtol=2**-8)


@HOPPER
def test_groups_of_wide_heads(row: Any, language: str) -> None:
    """The same instance as the backward of head_dim 256 above, with several heads of keys."""
    sizes = {"heads_q": 6, "heads_kv": 2, "seqlen_q": 9, "seqlen_k": 20, "head_dim": 136}
    e = example(row, 19, dtype="bfloat16", causal=True, **sizes)
    assert part_taken(row, e, SIMULATOR_ARCH).dout is not None
    check_taken(row, language, e)


@HOPPER
@pytest.mark.parametrize("head_dim", [128, 256])
def test_blocks_that_run_alone_add_up_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, row: Any, language: str
) -> None:
    """Together, those of later keys have fewer steps and end first, but must add in their turn."""
    sizes = {"heads_q": 1, "seqlen_q": 290, "seqlen_k": 290, "head_dim": head_dim}
    e = example(row, 17, causal=True, **sizes)

    def sums() -> bytes:
        with simulator.recording() as records:
            run(e, deterministic=True, **how(row, language))
        memory = records[-1].launch.memory
        (region,) = (region for region in memory.regions if region.name == "dq_acc")
        return memory.view(region).tobytes()

    together = sums()
    monkeypatch.setattr(engine, "SHARED_PER_CHUNK", 1)
    assert sums() == together


@targets([row for row in ATTENTION if row.name == "attention_flash_mma"])
def test_keys_that_several_blocks_share(row: Any, language: str) -> None:
    few = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 1, "head_dim": 64}
    check_random(row, language, 12, **few, seqlen_k=300, backward=False)
    lengths = {"kv_lengths": [150, 0], "seqlen_k": 150}
    check_random(row, language, 13, **few, **lengths, backward=False)


@targets([row for row in ATTENTION if row.name == "attention_flash_mma"])
def test_deterministic(row: Any, language: str) -> None:
    check_taken(row, language, example(row, 14, **RAGGED | {"heads_kv": 2}), deterministic=True)


@targets(ATTENTION)
def test_groups_of_heads(row: Any, language: str) -> None:
    """The same instance as `test_ragged_tiles`."""
    sizes = RAGGED | {"heads_q": 6, "heads_kv": 2, "seqlen_q": 9, "seqlen_k": 20}
    check_random(row, language, 8, **sizes)


@targets(ATTENTION)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype: str, row: Any, language: str) -> None:
    check_random(row, language, 3, dtype=dtype, **RAGGED | {"seqlen_k": 40})


@targets(ATTENTION)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 65), (65, 1), (3, 0)])
def test_edges(seqlen_q: int, seqlen_k: int, row: Any, language: str) -> None:
    """The same instance as `test_ragged_tiles`."""
    sizes = RAGGED | {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    check_random(row, language, 4, **sizes)


def packed(e: Example) -> Example:
    """The same q, k and v as slices of one array, its rows in reverse order."""
    heads = [x.shape[1] for x in (e.q, e.k, e.v)]
    joined = np.concatenate([e.q, e.k, e.v], axis=1)[:, :, ::-1].copy()
    q, k, v = np.split(joined[:, :, ::-1], np.cumsum(heads)[:-1], axis=1)
    assert q.strides[2] < 0
    assert np.shares_memory(q[0, 0, 0], joined)
    return replace(e, q=q, k=k, v=v)


@targets(ATTENTION)
def test_strides(row: Any, language: str) -> None:
    """Inputs are read where they lie; the same instance as `test_ragged_tiles`."""
    e = packed(example(row, 5, **RAGGED | {"seqlen_k": 70}))
    check_taken(row, language, e)
    check_taken(row, language, e, layout="bnhd")


@targets(ADDITION)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_vector_add(dtype: str, row: Any, language: str) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 31, 1000, 5000):
        a, b = rng.standard_normal((2, size)).astype(DTYPES[dtype])
        np.testing.assert_array_equal(workbench.vector_add(a, b, **how(row, language)), a + b)


@targets([row for row in ADDITION if not row.needs_contiguous])
def test_vector_add_with_strides(row: Any, language: str) -> None:
    a = np.random.default_rng(0).standard_normal((5, 6, 14)).astype(np.float32)
    for x, y in ((a[:, ::-1, ::2], a[:, :, 7:]), (a.T, a.T), (a[1:, 1:], a[:-1, :-1])):
        np.testing.assert_array_equal(workbench.vector_add(x, y, **how(row, language)), x + y)


@targets([row for row in ADDITION if not row.needs_contiguous])
def test_a_small_grid_strides_over_all(row: Any, language: str) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 40_001)).astype(np.float32)
    out = np.full_like(a, np.nan)
    strides = tuple((name, (1,)) for name in ("a", "b", "out"))
    problem = VectorProblem("vector_add", "float32", a.shape, strides)
    (launch,) = row.work(problem, SIMULATOR_ARCH).launches
    assert launch.grid > 2
    work = Work((replace(launch, grid=2),))
    simulator.run(work, problem, language, {"a": a, "b": b, "out": out}, {"out"})
    np.testing.assert_array_equal(out, a + b)


@pytest.mark.parametrize("language", [pytest.param(x, marks=needs(x)) for x in ("cuda", "numba")])
def test_results_are_the_same_every_time(language: str) -> None:
    e = random_example(6, **RAGGED)
    options = how(next(row for row in ATTENTION if row.name == "attention_flash_simt"), language)
    first, second = (workbench.attention(e.q, e.k, e.v, **options) for _ in range(2))
    assert first.tobytes() == second.tobytes()
