"""The table of kernels: what each can do, in sentences, and which one a problem gets."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from building import ARCHS
from sources import stems

from workbench import KERNELS, NoKernelError, launchers, table
from workbench.problem import Problem, VectorProblem

PROBLEM = Problem("attention", "float32", 2, 4, 2, 100, 200, 64, 64, 0.125)
STRIDES = tuple((name, (1,)) for name in ("a", "b", "out"))
VECTOR = VectorProblem("vector_add", "float32", (1000,), STRIDES)
ATTENTION = [row for row in KERNELS if row.op == "attention"]
ROWS = pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)


def named(name: str) -> table.Kernel:
    return next(row for row in KERNELS if row.name == name)


def test_names_are_unique_and_ordered() -> None:
    names = [row.name for row in KERNELS]
    assert len(set(names)) == len(names)
    attention = [row.name for row in ATTENTION]
    fastest = ["attention_flash_wgmma", "attention_flash_mma", "attention_flash_simt"]
    assert attention[:3] == fastest
    assert attention[-1] == "attention_naive"


@ROWS
def test_a_name_is_one_word_everywhere(row: table.Kernel) -> None:
    assert row.work is getattr(launchers, row.name)
    assert row.name.startswith(row.op)
    suffixes = ("_fwd", "_bwd") if row.op == "attention" else ("",)
    for language in row.languages:
        for suffix in suffixes:
            assert row.name + suffix in stems(language)
    assert row.summary
    assert set(row.languages) <= {"cuda", "numba"}
    assert set(row.dtypes) <= set(table.ALL_DTYPES)


def test_every_kernel_file_belongs_to_a_row() -> None:
    names = {row.name for row in KERNELS}
    # Of every backward; of those on tensor cores, of Hopper's, of forwards that split their keys.
    shared = {"attention_delta", "attention_dbias", "attention_dq", "attention_row_stats"}
    shared |= {"attention_merge", "attention_flash_wgmma_bwd_wide"}
    for stem in stems("cuda"):
        assert stem.removesuffix("_fwd").removesuffix("_bwd") in names | shared


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
@pytest.mark.parametrize("dtype", table.ALL_DTYPES)
def test_every_problem_has_a_kernel(dtype: str, op: str, arch: str) -> None:
    options: list[dict[str, Any]] = [
        {}, {"head_dim": 1, "head_dim_v": 513}, {"head_dim": 1000}, {"seqlen_k": 0}, {"batch": 0},
        {"heads_q": 0}, {"seqlen_q": 0}, {"softcap": 1.0, "has_mask": True}, {"window_left": 0},
        {"alignment": 2}, {"deterministic": True},
    ]  # fmt: skip
    for option in options:
        problem = replace(PROBLEM, dtype=dtype, op=op, **option)
        for language in ("cuda", "numba"):
            row = table.select(problem, language, arch)
            assert row.op == "attention"
            if max(problem.head_dim, problem.head_dim_v) > 256:
                assert "flash" not in row.name


def test_the_first_row_without_an_objection_runs() -> None:
    assert table.select(PROBLEM, "cuda", "sm_90").name == "attention_flash_simt"
    half = replace(PROBLEM, dtype="bfloat16")
    assert table.select(half, "cuda", "sm_90").name == "attention_flash_mma"
    assert table.select(half, "cuda", "sm_75").name == "attention_flash_simt"
    assert table.select(replace(half, alignment=8), "cuda", "sm_90").name == "attention_flash_simt"
    wide = replace(PROBLEM, head_dim=300)
    assert table.select(wide, "cuda", "sm_90").name == "attention_tiled"
    assert table.select(PROBLEM, "cuda", "sm_90", "attention_naive").name == "attention_naive"
    assert table.select(VECTOR, "numba", "sm_75").name == "vector_add_vec4"
    assert table.select(VECTOR, "numba", "sm_75", "vector_add").name == "vector_add"


@pytest.mark.parametrize("kernel", ["", "attention", "vector_add", 3, ["attention_naive"]])
def test_unknown_names(kernel: Any) -> None:
    with pytest.raises(ValueError, match="it takes 'attention_flash_wgmma', ") as caught:
        table.select(PROBLEM, "cuda", "sm_90", kernel)
    assert not isinstance(caught.value, NoKernelError)
    for row in ATTENTION:
        assert repr(row.name) in str(caught.value)
    assert "vector_add'," not in str(caught.value)


def reason(row: str, problem: Any, arch: str = "sm_90") -> str:
    return "; ".join(named(row).why_not(problem, arch))


def test_a_kernel_that_would_be_slower_steps_back_unless_it_is_named() -> None:
    large = replace(PROBLEM, dtype="bfloat16", batch=64, seqlen_q=1000)
    assert table.select(large, "cuda", "sm_90").name == "attention_flash_wgmma"
    small = replace(large, batch=1)
    assert table.select(small, "cuda", "sm_90").name == "attention_flash_mma"
    why = table.objections(small, "cuda", "sm_90")["attention_flash_wgmma"]
    assert why == ["its 16 tiles of 256 queries would leave most multiprocessors without work"]
    named = table.select(small, "cuda", "sm_90", "attention_flash_wgmma")
    assert named.name == "attention_flash_wgmma"


def test_what_hopper_declines() -> None:
    half = replace(PROBLEM, dtype="float16", seqlen_q=1000)
    assert reason("attention_flash_wgmma", half) == ""
    for change, why in (
        ({"has_mask": True}, "no mask and no bias"),
        ({"has_bias": True}, "no mask and no bias"),
        ({"alignment": 8}, "multiples of 16 bytes, not 8"),
        ({"seqlen_k": 0}, "no empty arrays"),
        ({"seqlen_q": 0}, "no empty arrays"),
        ({"strides": (("k", (0, 64, 64)),)}, "repeat or run backwards"),
        ({"strides": (("q", (6400, 64, -64)),)}, "repeat or run backwards"),
    ):
        assert why in reason("attention_flash_wgmma", replace(half, **change)), change
    for change in (
        {"softcap": 1.0, "scale": -1.0},
        {"scale": 0.0},
        {"has_kv_lengths": True, "has_q_lengths": True, "window_left": 3, "top_left": True},
        # No step is ever taken along an axis of length 1.
        {"batch": 1, "heads_kv": 1, "strides": (("k", (0, -7, 64)), ("q", (3, 64, 256)))},
    ):
        assert reason("attention_flash_wgmma", replace(half, **change)) == "", change
    assert "of sm_90, not sm_100" in reason("attention_flash_wgmma", half, "sm_100")
    backward = replace(half, op="attention_backward")
    assert reason("attention_flash_wgmma", backward) == ""
    for change, why in (
        ({"softcap": 2.0}, "its backward takes no softcap"),
        ({"scale": -1.0}, "its backward takes scales from 1e-30 on, not -1.0"),
        # Its grid covers keys; a tensor map of no queries cannot be made.
        ({"seqlen_q": 0}, "no empty arrays"),
        ({"heads_q": 0}, "no empty arrays"),
        ({"has_q_lengths": True}, "its backward takes no softcap, no q_lengths"),
        ({"strides": (("dout", (64, 0, 64)),)}, "repeat or run backwards"),
    ):
        assert why in reason("attention_flash_wgmma", replace(backward, **change)), change


def test_reasons_are_sentences() -> None:
    assert reason("attention_flash_simt", PROBLEM) == ""
    assert "it takes float16, bfloat16, not float32" in reason("attention_flash_mma", PROBLEM)
    half = replace(PROBLEM, dtype="float16")
    assert reason("attention_flash_mma", half) == ""
    assert "tensor cores of sm_80 or newer, not sm_75" in reason(
        "attention_flash_mma", half, "sm_75"
    )
    assert "multiples of 16 bytes, not 8" in reason(
        "attention_flash_mma", replace(half, alignment=8)
    )
    assert "head_dim goes to 256, not 300" in reason(
        "attention_flash_simt", replace(PROBLEM, head_dim_v=300)
    )
    assert "sum of two vectors" in reason("vector_add", PROBLEM)
    assert "attention forward and backward" in reason("attention_naive", VECTOR)
    long = replace(PROBLEM, seqlen_k=2**30)
    assert "seqlen_k must be below 2**30" in reason("attention_naive", long)
    assert reason("attention_naive", replace(PROBLEM, seqlen_k=2**30 - 1)) == ""
    long = replace(PROBLEM, seqlen_q=2**30)
    assert "seqlen_q must be below 2**30" in reason("attention_flash_simt", long)
    many = replace(PROBLEM, batch=2**31)
    for row in ATTENTION:
        taken = replace(many, dtype=row.dtypes[0])
        assert re.search(
            r"(a grid holds|it counts query tiles to) 2\*\*31 - 1", reason(row.name, taken)
        )
    strided = replace(VECTOR, strides=tuple((name, (2,)) for name, _ in STRIDES))
    assert "contiguous" in reason("vector_add", strided)
    assert reason("vector_add_vec4", strided) == ""
    odd = replace(PROBLEM, dtype="int8")
    assert "it takes float16, bfloat16, float32, float64, not int8" in reason(
        "attention_naive", odd
    )


def test_too_much_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "SHARED_LIMITS", {"sm_90": 227, "sm_121": 1})
    assert launchers.shared_limit("sm_90") == 227 * 1024
    assert launchers.shared_limit("sm_999") == 1024
    why = reason("attention_flash_simt", PROBLEM, "sm_999")
    assert re.fullmatch(r"it takes \d+ bytes of shared memory, sm_999 has 1024", why)


def test_no_kernel_lists_the_reasons_of_all() -> None:
    problem = replace(PROBLEM, seqlen_k=2**30, head_dim=300)
    with pytest.raises(NoKernelError) as caught:
        table.select(problem, "numba", "sm_90")
    lines = str(caught.value).splitlines()
    assert lines[0] == "no numba kernel takes this problem:"
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [row.name for row in ATTENTION]
    assert "head_dim goes to 256" in lines[1]
    assert "head_dim goes to 256" in lines[2]
    assert all("seqlen_k must be below" in line for line in lines[1:-1])
    assert "seqlen_k=1073741824" in lines[-1]
    assert isinstance(caught.value, ValueError)


def test_a_named_kernel_that_declines_says_only_its_own_reason() -> None:
    wide = replace(PROBLEM, head_dim=300)
    with pytest.raises(NoKernelError) as caught:
        table.select(wide, "cuda", "sm_90", "attention_flash_simt")
    assert "attention_flash_simt: its head_dim goes to 256, not 300" in str(caught.value)
    assert "attention_naive" not in str(caught.value)


def test_a_language_that_a_kernel_is_not_written_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(replace(row, languages=("cuda",)) for row in KERNELS)
    monkeypatch.setattr(table, "KERNELS", rows)
    assert table.select(PROBLEM, "cuda", "sm_90").name == "attention_flash_simt"
    with pytest.raises(NoKernelError, match="it is not written in numba"):
        table.select(PROBLEM, "numba", "sm_90")


# ----------------------------------------------------------------------- what the tests compile


@pytest.mark.parametrize("arch", ARCHS)
def test_instances_reach_every_kernel_dtype_and_feature(arch: str) -> None:
    units = table.compile_units(arch)
    needs = {"attention_flash_wgmma": ("sm_90",), "attention_flash_mma": ARCHS[1:]}
    rows = [row for row in KERNELS if arch in needs.get(row.name, ARCHS)]
    assert list(units) == [row.name for row in rows]
    for row in rows:
        entries = [launch.entry for launch in units[row.name]]
        assert {dict(e.constants)["T"] for e in entries if e.stem.startswith(row.name)} == set(
            row.dtypes
        )
        features = [dict(e.constants).get("FEATURES", 0) for e in entries]
        if row.op == "attention":
            hopper = launchers.RANGE | launchers.SOFTCAP | launchers.KV_LENGTHS
            assert max(features) == (hopper if row.name == "attention_flash_wgmma" else 15)
            assert min(features) == 0
    flash = {dict(x.entry.constants)["FEATURES"] for x in units["attention_flash_simt"]
             if "flash" in x.entry.name}  # fmt: skip
    assert flash >= {0, 1, 2, 4, 8, 15}
    every = [launch.entry for launches in units.values() for launch in launches]
    assert len(set(every)) == len(every)
    assert 100 <= len(every) <= 340


def test_instances_are_problems_that_users_can_have() -> None:
    for problem in table.INSTANCES:
        if isinstance(problem, Problem):
            assert problem.heads_q % problem.heads_kv == 0
            assert not problem.return_dbias or problem.has_bias
