"""Launchers: from a problem to grids, shared memory, workspaces and arguments."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from building import ARCHS
from sources import folder, read

from workbench import KERNELS, checks, launchers, table
from workbench.problem import Arrays, Problem, VectorProblem

ATTENTION = [row for row in KERNELS if row.op == "attention"]
ROWS = pytest.mark.parametrize("row", ATTENTION, ids=lambda row: row.name)
OPS = pytest.mark.parametrize("op", ["attention", "attention_backward"])

EVERYTHING = {
    "mask": np.ones((5, 1), bool),
    "bias": np.zeros((4, 5, 7), np.float32),
    "q_lengths": np.array([5, 2], np.int32),
    "kv_lengths": np.array([7, 3], np.int32),
}


# Null where keys are not split, where sums are in any order, where all query tiles are as long.
MAY_BE_NULL = ("out_parts", "lse_parts", "turns", "counter")


def work_of(row: table.Kernel, problem: Any, arch: str = "sm_90") -> launchers.Work:
    """What a launcher makes of a problem whatever its dtype, if it has a kernel for it."""
    try:
        return row.work(problem, arch)
    except launchers.NotWrittenError as error:
        pytest.skip(f"{row.name}: {error}")


def prepared(op: str, everything: bool, dtype: str = "float32") -> checks.Prepared:
    """A checked call on host arrays, with the strides that a GPU kernel would be told."""

    def array(*shape: int, of: str = dtype) -> np.ndarray:
        return np.zeros(shape, of)

    head_dim_v = 6 if dtype == "float32" else 16
    named = {"q": array(2, 4, 5, 8), "k": array(2, 2, 7, 8), "v": array(2, 2, 7, head_dim_v)}
    options: dict[str, Any] = {
        "causal": everything, "window": (3, None) if everything else None, "scale": 0.25,
        "softcap": 2.0 if everything else 0.0, "layout": "bhnd", "backend": "reference",
    }  # fmt: skip
    if everything:
        named |= EVERYTHING
    if op == "attention":
        options["return_lse"] = True
    else:
        named |= {"dout": array(2, 4, 5, head_dim_v), "out": array(2, 4, 5, head_dim_v)}
        named["lse"] = array(2, 4, 5, of="float32")
        if everything:
            named["dlse"] = array(2, 4, 5, of="float32")
        options |= {"deterministic": False, "return_dbias": everything}
    call = checks.PREPARE[op](named, **options)
    call.problem = checks.with_strides(call.problem, call.arrays)
    return call


def test_small_things() -> None:
    assert [launchers.cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    space = launchers.Workspace("x", (3, 5), "float64")
    assert space.nbytes == 120
    assert replace(space, dtype="int32").nbytes == replace(space, dtype="float32").nbytes == 60


def test_constants_are_those_of_the_headers() -> None:
    for language, suffix in (("cuda", ".cuh"), ("numba", ".py")):
        text = (folder(language) / f"scores{suffix}").read_text()
        for name in ("RANGE", "MASK", "BIAS", "SOFTCAP", "ANY_SCALE", "KV_LENGTHS"):
            value = re.search(rf"\b{name} = (\d+)", text)[1]
            assert int(value) == getattr(launchers, name), f"{name} in {language}"
        assert re.search(r"\bOPEN_WINDOW = 1 << 30\b", text)
    assert launchers.OPEN_WINDOW == 1 << 30


@pytest.mark.parametrize(
    ("change", "bits"),
    [
        ({}, 0),
        ({"window_left": 3}, 1),
        ({"window_right": 0}, 1),
        ({"has_q_lengths": True}, 1),
        ({"has_kv_lengths": True}, 1),
        ({"has_mask": True}, 2),
        ({"has_bias": True}, 4),
        ({"softcap": 0.5}, 8),
        ({"has_mask": True, "softcap": 1.0, "window_right": 9}, 11),
        ({"has_dlse": True, "top_left": True, "deterministic": True}, 0),
    ],
)
def test_features(change: dict[str, Any], bits: int) -> None:
    problem = Problem("attention", "float32", 1, 1, 1, 2, 2, 8, 8, 1.0, **change)
    assert launchers.features(problem) == bits


@pytest.mark.parametrize(
    ("change", "bits"),
    [
        ({}, 0),
        ({"window_right": 0}, 1),
        ({"has_kv_lengths": True}, 1 | 32),
        ({"scale": 0.0}, 16),
        ({"scale": -1.0, "has_q_lengths": True}, 1 | 16),
        ({"softcap": 1.0}, 8),
        ({"softcap": 1.0, "scale": -1.0, "has_kv_lengths": True}, 1 | 8 | 32),
    ],
)
def test_features_of_hopper(change: dict[str, Any], bits: int) -> None:
    """Two more bits, for what its registers and its copies do not take as it comes."""
    problem = Problem("attention", "float16", 1, 1, 1, 2, 2, 8, 8, 1.0)
    (launch,) = launchers.attention_flash_wgmma(replace(problem, **change), "sm_90").launches
    assert dict(launch.entry.constants)["FEATURES"] == bits


def test_tensor_maps() -> None:
    """Axes innermost first; along one of length 1 a map has a stride that is allowed."""
    strides = (("q", (0, 5, 48)), ("k", (4096, 64, 128)), ("v", (9, 64, -1)))
    problem = Problem("attention", "bfloat16", 1, 1, 2, 7, 9, 40, 24, 1.0, strides=strides)

    def told(array: str, problem: Problem = problem) -> tuple[Any, ...]:
        chosen = launchers.TensorMap(f"{array}_map", array, 64)
        told = launchers.tensor_map(problem, chosen, 4096)
        assert (told["global_address"], told["box_dim"]) == (4096, (64, 64, 1, 1))
        return told["global_dim"], told["global_strides"]

    assert told("q") == ((40, 7, 1, 1), (96, 16, 16))
    assert told("k") == ((40, 9, 2, 1), (256, 128, 16))
    assert told("k", replace(problem, batch=3)) == ((40, 9, 2, 3), (256, 128, 8192))
    assert told("v", replace(problem, seqlen_k=1)) == ((24, 1, 2, 1), (16, 128, 16))


@ROWS
@OPS
@pytest.mark.parametrize("everything", [False, True])
def test_every_argument_has_a_value(row: table.Kernel, op: str, everything: bool) -> None:
    call = prepared(op, everything, "float32" if "float32" in row.dtypes else "float16")
    if row.why_not(call.problem, "sm_90"):
        pytest.skip(f"{row.name} declines this")
    work = row.work(call.problem, "sm_90")
    values = launchers.argument_values(call.problem)
    spaces = {space.name for space in work.workspaces}
    written: set[str] = set()
    for launch in work.launches:
        signature = launch.entry.signature
        packed = signature.pack(values | dict(launch.values))
        assert len(packed) == 8 * len(signature.leaves)
        written |= {chosen.array for chosen in launch.maps}
        for kind, leaf in signature.leaves:
            name = leaf.removeprefix("score.")
            if kind.endswith("*"):
                assert name in Arrays._fields or name in spaces or name in MAY_BE_NULL, name
                written.add(name)
    # Everything that was given is read, and every result is written, by some kernel.
    needed = {name for name, x in call.arrays._asdict().items() if x is not None}
    if op == "attention_backward" and not everything:
        needed -= {"dbias"}
    assert needed | spaces <= written


def test_the_values_of_arguments() -> None:
    call = prepared("attention_backward", everything=True)
    values = launchers.argument_values(call.problem)
    assert values["score.scale"] == 0.25
    assert values["score.softcap"] == 2.0
    assert (values["score.window_left"], values["score.window_right"]) == (3, 0)
    assert values["score.top_left"] == 0
    assert (values["batch"], values["heads_q"], values["heads_kv"]) == (2, 4, 2)
    assert (values["seqlen_q"], values["seqlen_k"]) == (5, 7)
    assert (values["head_dim"], values["head_dim_v"]) == (8, 6)
    strides = {
        name: tuple(values[f"{name}_strides.{axis}"] for axis in ("batch", "head", "row"))
        for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
    }
    assert strides["q"] == strides["dq"] == (160, 40, 8)
    assert strides["k"] == strides["dk"] == (112, 56, 8)
    assert strides["v"] == strides["dv"] == (84, 42, 6)
    assert strides["dout"] == strides["out"] == (120, 30, 6)
    axes = ("batch", "head", "row", "col")
    assert [values[f"score.mask_strides.{axis}"] for axis in axes] == [0, 0, 1, 0]
    assert [values[f"score.bias_strides.{axis}"] for axis in axes] == [0, 35, 7, 1]
    assert [values[f"dbias_strides.{axis}"] for axis in axes] == [0, 35, 7, 1]


def test_open_and_huge_windows() -> None:
    problem = Problem("attention", "float32", 1, 1, 1, 2, 2, 8, 8, 1.0, top_left=True)
    values = launchers.argument_values(problem)
    assert values["score.window_left"] == values["score.window_right"] == 2**30
    assert values["score.top_left"] == 1
    huge = replace(problem, window_left=2**40, window_right=2**30 - 1)
    values = launchers.argument_values(huge)
    assert (values["score.window_left"], values["score.window_right"]) == (2**30, 2**30 - 1)


def test_vector_add_gets_its_shape_padded_in_front() -> None:
    strides = (("a", (7, 1)), ("b", (1, 3)), ("out", (4, 1)))
    problem = VectorProblem("vector_add", "float16", (3, 4), strides)
    values = launchers.argument_values(problem)
    axes = ("batch", "head", "row", "col")
    assert values["size"] == 12
    assert [values[f"shape.{axis}"] for axis in axes] == [1, 1, 3, 4]
    assert [values[f"a_strides.{axis}"] for axis in axes] == [0, 0, 7, 1]
    assert [values[f"b_strides.{axis}"] for axis in axes] == [0, 0, 1, 3]
    (launch,) = launchers.vector_add_vec4(problem, "sm_90").launches
    assert dict(launch.entry.constants)["STRIDED"] == 1
    launch.entry.signature.pack(values)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 10**6, 2**33])
@pytest.mark.parametrize("name", ["vector_add", "vector_add_vec4"])
def test_vector_add_reaches_every_element(name: str, size: int) -> None:
    strides = tuple((x, (1,)) for x in ("a", "b", "out"))
    problem = VectorProblem("vector_add", "float32", (size,), strides)
    (launch,) = getattr(launchers, name)(problem, "sm_90").launches
    assert launch.grid <= 2**31 - 1
    assert (launch.grid == 0) == (size == 0)
    if name == "vector_add":
        assert launch.grid * launch.block >= size > (launch.grid - 1) * launch.block or size == 0


@ROWS
@OPS
@pytest.mark.parametrize("empty", ["batch", "heads_q", "seqlen_q"])
def test_an_empty_result_takes_no_block(row: table.Kernel, op: str, empty: str) -> None:
    problem = Problem(op, "float32", 2, 4, 2, 5, 7, 8, 8, 1.0)
    problem = replace(problem, **{empty: 0})
    work = work_of(row, problem)
    if op == "attention" or empty == "batch":
        assert all(launch.grid == 0 for launch in work.launches)
    assert all(space.nbytes >= 0 for space in work.workspaces)


@ROWS
@OPS
def test_no_keys_still_gives_zeros(row: table.Kernel, op: str) -> None:
    """Out, or dq, has to be written although there is nothing to add up."""
    problem = Problem(op, "float32", 2, 4, 2, 5, 0, 8, 8, 1.0)
    writers = ("dq" if op == "attention_backward" else "out",)
    for launch in work_of(row, problem).launches:
        names = {name for _, name in launch.entry.signature.parameters}
        if names & set(writers) and launch.entry.name != "attention_delta":
            assert launch.grid > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_kernel_takes_fits_the_gpu(arch: str) -> None:
    """Or it must decline: a launch that cannot start is no answer."""
    for row, problem in itertools.product(KERNELS, table.INSTANCES):
        if row.why_not(problem, arch):
            continue
        work = row.work(problem, arch)
        assert work.launches, row.name
        for launch in work.launches:
            assert 1 <= launch.block <= 1024
            assert launch.block % 32 == 0
            assert 0 < launch.grid < 2**31
            assert launch.shared_memory <= launchers.shared_limit(arch)


@ROWS
@OPS
def test_grids_grow_with_what_they_cover(row: table.Kernel, op: str) -> None:
    small = Problem(op, "float32", 1, 4, 2, 100, 200, 64, 64, 1.0)
    grids = [launch.grid for launch in work_of(row, small).launches]
    twice = work_of(row, replace(small, batch=2)).launches
    assert [launch.grid for launch in twice] == [2 * grid for grid in grids]


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "block_n", "split"),
    [(1, 1024, 32, 1), (1, 8192, 64, 1), (32, 8192, 64, 1), (99, 8192, 64, 0), (100, 8192, 32, 0)],
)
def test_few_queries_take_large_tiles_while_all_run_at_once(
    batch: int, seqlen_k: int, block_n: int, split: int
) -> None:
    problem = Problem("attention", "bfloat16", batch, 8, 8, 1, seqlen_k, 128, 128, 1.0)
    constants = dict(launchers.attention_flash_mma(problem, "sm_90").launches[0].entry.constants)
    assert (constants["BLOCK_N"], constants["SPLIT"]) == (block_n, split)


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "heads"),
    [
        (512, 128, (8, 8, 33, 66)), (4096, 128, (5, 8, 4, 16)), (16384, 128, (2, 8, 2, 8)),
        (512, 256, (8, 8, 16, 33)), (16384, 256, (1, 1, 2, 4)),
    ],
)  # fmt: skip
def test_long_backwards_take_few_heads_at_a_time(
    seqlen: int, head_dim: int, heads: tuple[int, ...]
) -> None:
    causal: dict[str, Any] = {"window_right": 0}
    in_turn: dict[str, Any] = {"deterministic": True}
    sizes = (8, 16, 16, seqlen, seqlen)

    def taken(problem: Problem) -> Any:
        backward = launchers.attention_flash_wgmma(problem, "sm_90").launches[1]
        return dict(backward.values)["heads_at_a_time"]

    for options, want in zip(({}, causal, in_turn, causal | in_turn), heads, strict=True):
        for dims in ((head_dim, head_dim), (head_dim - 56, head_dim)):  # of k and v
            problem = Problem("attention_backward", "bfloat16", *sizes, *dims, 1.0, **options)
            assert taken(problem) == want
    # Of a key head that eight query heads share there is as much to add as of eight heads.
    grouped = Problem(
        "attention_backward", "bfloat16", 64, 16, 2, 512, 512, 128, 128, 1.0, **in_turn
    )
    assert taken(grouped) == 50 * 2**20 // (4 * 128 * (512 + 2 * 8 * 512)) // 2


@ROWS
def test_the_cap_on_blocks_is_asked_of_every_launch(row: table.Kernel) -> None:
    """A backward may have more blocks in its second kernel than in its first."""
    problem = Problem("attention_backward", "float32", 2**20, 1, 1, 1, 2**22, 8, 8, 1.0)
    if max(launch.grid for launch in work_of(row, problem).launches) >= 2**31:
        assert row.why_not(problem, "sm_90")


def test_headers_say_which_launcher() -> None:
    for stem in ("vector_add", "attention_naive_fwd"):
        for language in ("cuda", "numba"):
            head = read(language, stem)[:2000]
            assert re.search(rf"Launched by.*{stem.removesuffix('_fwd')}\b", head)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "numba"])
def test_a_workspace_that_does_not_fit_says_what_to_do(backend: str) -> None:
    import cupy

    import workbench

    q = cupy.zeros((1, 2**20, 1), np.float32)
    with pytest.raises(MemoryError, match=r"attention_naive needs workspaces of 4096.00 GiB") as e:
        workbench.attention(q, q, q, backend=backend, kernel="attention_naive")
    assert "scores (1, 1, 1048576, 1048576)" in str(e.value)
    assert "attention_flash_simt needs none" in str(e.value)
