"""The CUDA C++ sources: their form, and every instance compiled without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import gate, needs, parameters
from oracle import hold, random_example
from sources import cuda_entries, folder, header, helpers, read, stems

from workbench import compile as compiler
from workbench import table
from workbench.launchers import Launch

STEMS = stems("cuda")
FILES = sorted([*folder("cuda").glob("*.cu"), *folder("cuda").glob("*.cuh")])
LONGEST = 350  # lines: a file is read in one sitting

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
every_kernel = pytest.mark.parametrize("stem", STEMS)


@needs("cuda")
@pytest.mark.parametrize(("launch", "arch"), parameters("cuda"))
def test_compiles_within_limits(launch: Launch, arch: str) -> None:
    gate("cuda", launch, arch)


STORING = ("attention_dq", "attention_flash_wgmma_bwd", "attention_flash_wgmma_bwd_wide")


@needs("cuda")
@pytest.mark.parametrize("stem", STORING)
def test_sixteen_bytes_are_stored_at_once(stem: str) -> None:
    """The compiler likes to make four stores of two 16-bit elements of them."""
    launches = table.compile_units("sm_90")["attention_flash_wgmma"]
    entries = {launch.entry for launch in launches if launch.entry.stem == stem}
    assert entries
    for entry in entries:
        text, _ = compiler.build_ptx("cuda", entry, "sm_90")
        assert "st.global.wb.v4.u32" in text, entry.describe()
        assert not re.search(r"st\.global\.v2\.[bu]16", text), entry.describe()


# ---------------------------------------------------------------------------------------- form


@every_file
def test_lines(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert text.endswith("\n")
    assert "\t" not in text
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 100, f"{path.name}:{number}"
        assert line == line.rstrip(), f"{path.name}:{number}"
    assert len(text.splitlines()) <= LONGEST


@every_file
def test_nothing_that_does_not_belong(path: Path) -> None:
    text = path.read_text()
    for word in ("printf", "assert(", "TODO", "FIXME", "XXX", "cstdint", "iostream", "#if 0"):
        assert word not in text, word
    for word in ("torch", "cutlass", "thrust::", "cub::", "cooperative_groups"):
        assert word not in text.lower(), word


def is_code(comment: str) -> bool:
    """Whether a comment looks like a statement that was switched off."""
    return bool(re.search(r"[;{}]\s*$", comment)) and not re.search(r"[a-z] [a-z]+;$", comment)


@every_file
def test_no_code_in_comments(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        comment = re.match(r"\s*// ?(.*)", line)
        if comment:
            assert not is_code(comment[1]), f"{path.name}:{number}: {line.strip()}"


@every_file
def test_includes(path: Path) -> None:
    included = re.findall(r"^#include (.+)$", path.read_text(), re.MULTILINE)
    headers = {f'"{p.name}"' for p in helpers("cuda")}
    system = {"<cuda_fp16.h>", "<cuda_bf16.h>"}
    for name in included:
        assert name in headers | (system if path.name == "common.cuh" else set()), name
    assert len([name for name in included if "ptx_" in name]) <= 1
    assert (path.suffix == ".cu") or "#pragma once" in path.read_text()


HEADER = ("Work split", "Shared memory", "Registers", "Twin", "Launched by")


@every_kernel
def test_headers_say_all_that_they_should(stem: str) -> None:
    lines = header("cuda", stem)
    assert len(lines[0]) > 20, "a title"
    formula = "\n".join(lines)
    assert re.search(r"\n {2}\S.* = ", formula), "a formula"
    places = []
    for words in HEADER:
        found = [i for i, line in enumerate(lines) if line.startswith(words)]
        assert len(found) == 1, f"{words} is there {len(found)} times"
        places += found
    assert places == sorted(places)
    assert f"numba_kernels/{stem}.py" in lines[places[3]]
    assert "workbench/launchers.py" in lines[places[4]]


@every_kernel
def test_about_a_fifth_to_a_third_is_comment(stem: str) -> None:
    """Lines that are a comment or end in one; a short file may explain more than it does."""
    lines = [line for line in read("cuda", stem).splitlines() if line.strip()]
    share = sum("//" in line for line in lines) / len(lines)
    assert share >= 0.18, f"{share:.0%}"
    assert share <= 0.45 or len(lines) < 50, f"{share:.0%}"


@every_kernel
def test_parameters_stand_one_a_line(stem: str) -> None:
    text = re.sub(r"//[^\n]*", "", read("cuda", stem))
    for entry in cuda_entries(stem):
        start = text.index(f" {entry.name}(")
        lines = text[start : text.index("{", start)].strip().splitlines()
        assert sum(not line.endswith("(") for line in lines) == len(entry.parameters)


def test_the_reader_of_comments_knows_code() -> None:
    assert is_code("x = 3;")
    assert is_code("for (int i = 0; i < 3; ++i) {")
    assert not is_code("K is there, and V is free: every warp is past the last p v")
    assert not is_code("first of every backward;")


# ------------------------------------------------------------------------ as a user compiles it


def user_module(stem: str, *expressions: str) -> Any:
    """What anybody can write: CuPy, a file of ours and the folder of our headers."""
    import cupy

    return cupy.RawModule(
        code=read("cuda", stem),
        options=(f"-I{folder('cuda')}", "-std=c++17"),
        name_expressions=expressions,
    )


# CuPy compiles for sm_90 and knows no sm_90a, of which Hopper's kernels are.
@pytest.mark.gpu
@pytest.mark.parametrize("stem", [stem for stem in STEMS if "wgmma" not in stem])
def test_compiles_from_a_users_script(stem: str) -> None:
    import cupy

    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    instances = {
        launch.entry.name: dict(launch.entry.constants)
        for launches in table.compile_units(arch).values()
        for launch in launches
    }
    for entry in cuda_entries(stem):
        values = instances[entry.name].values()
        arguments = ", ".join(compiler.CUDA_TYPES.get(str(v), str(v)) for v in values)
        expression = f"{entry.name}<{arguments}>"
        assert user_module(stem, expression).get_function(expression).num_regs > 0


@pytest.mark.gpu
def test_runs_from_a_users_script() -> None:
    import cupy

    kernel = user_module("vector_add", "vector_add<float>").get_function("vector_add<float>")
    a, b = cupy.arange(1000, dtype=np.float32), cupy.ones(1000, np.float32)
    out = cupy.zeros_like(a)
    kernel((4,), (256,), (a, b, out, np.int64(a.size)))
    np.testing.assert_array_equal(out.get(), np.arange(1000, dtype=np.float32) + 1)


@pytest.mark.gpu
def test_attention_runs_from_a_users_script() -> None:
    """Structs are passed as NumPy records, eight bytes a field."""
    import cupy

    expression = "attention_naive_fwd<float, 0>"
    kernel = user_module("attention_naive_fwd", expression).get_function(expression)
    e = random_example(0, batch=2, heads_q=4, heads_kv=2, seqlen_q=33, seqlen_k=65)
    q, k, v = (cupy.asarray(x) for x in (e.q, e.k, e.v))
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:3], np.float32)
    scores = cupy.empty((*q.shape[:3], k.shape[2]), np.float32)

    def strides(x: Any) -> np.ndarray:
        return np.array([s // x.itemsize for s in x.strides[:3]], np.int64).view("V24")[0]

    score = np.zeros(17, np.int64)
    score[:1].view(np.float64)[0] = q.shape[3] ** -0.5
    sizes = (2, 4, 2, 33, 65, 32, 32)
    kernel(
        (2 * 4 * 33 // 4,),
        (128,),
        (q, k, v, out, lse, scores, *map(strides, (q, k, v, out)), *map(np.int64, sizes),
         score.view("V136")[0]),
    )  # fmt: skip
    hold(replace(e, dout=None), {"out": out, "lse": lse})
