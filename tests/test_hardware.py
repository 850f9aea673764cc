"""The script that holds the simulator against a GPU, with a GPU and an ncu that only pretend."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from building import languages, needs

import workbench
from workbench import compile as compiler
from workbench.problem import DTYPES

SCRIPT = Path(workbench.__file__).parents[1] / "scripts" / "hardware.py"

pytestmark = pytest.mark.skipif(
    not SCRIPT.is_file(), reason="there are no scripts beside the package"
)
on_posix = pytest.mark.skipif(os.name == "nt", reason="needs files that are programs by their mode")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hardware", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hardware"] = module
    spec.loader.exec_module(module)
    return module


HARDWARE: Any = load() if SCRIPT.is_file() else None

RAW = """\
==PROF== Connected to process 77 (/usr/bin/python3.12)
==PROF== Profiling "copy" - 0: 0%....50%....100% - 3 passes
"ID","Process ID","Kernel Name","Block Size","Grid Size","a__x.sum","a__y.sum","sass__inst_executed_per_opcode"
"","","","","","sector","","inst"
"0","77","void copy<float, 4>(float *)","(128, 1, 1)","(6, 1, 1)","12,345","n/a","1,290 (BAR: 90; HMMA: 1,200)"
"1","77","_ZN4copy","(32, 1, 1)","(1, 1, 1)","7.000000","","96"
==PROF== Disconnected from process 77
"""  # noqa: E501


def test_counters_are_read_from_the_csv() -> None:
    first, second = HARDWARE.parse_csv(RAW)
    assert first["Kernel Name"] == "void copy<float, 4>(float *)"
    assert first["Grid Size"] == "(6, 1, 1)"

    def both(counter: str) -> tuple[Any, Any]:
        return HARDWARE.read_counter(first, counter), HARDWARE.read_counter(second, counter)

    assert both("a__x.sum") == (12345, 7)
    assert both("a__y.sum") == (None, None)
    assert both("a__z.sum") == (None, None)
    assert both(HARDWARE.OPCODES) == (1290, 96)
    assert both(HARDWARE.opcode("HMMA")) == (1200, None)
    # Where ncu lists opcodes, one that is not there did not run.
    assert both(HARDWARE.opcode("SHFL")) == (0, None)
    assert HARDWARE.parse_csv("==ERROR== ERR_NVGPUCTRPERM\n") == []


def test_the_first_choice_that_the_gpu_has_counts() -> None:
    every = lambda _: True  # noqa: E731
    choices = (("a__y.sum",), ("a__x.sum", "a__x.sum"), ("a__x.sum",))
    quantity = HARDWARE.Quantity("twice", every, "issued", choices)
    first, second = HARDWARE.parse_csv(RAW)
    assert HARDWARE.read_quantity(first, quantity) == (24690, "a__x.sum + a__x.sum")
    assert HARDWARE.read_quantity(second, quantity)[0] == 14
    none = HARDWARE.Quantity("none", every, "issued", (("a__y.sum",),))
    assert HARDWARE.read_quantity(first, none) == (None, "")


def test_only_counters_that_the_gpu_knows_are_asked_for() -> None:
    listed = HARDWARE.parse_names(
        "Device NVIDIA H200 (GH100)\n-------- ---- ----\n"
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st        Counter  sector  # of sectors\n"
        "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access   Counter\n"
        "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_bypass   Counter\n"
        "sm__sass_l1tex_t_requests_pipe_lsu_mem_global_op_ldgsts_cache_access  Counter\n"
    )
    copies = "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache"
    assert set(HARDWARE.wanted(listed)) == {
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", f"{copies}_access.sum",
        f"{copies}_bypass.sum", HARDWARE.OPCODES,
    }  # fmt: skip
    asked = HARDWARE.wanted(None)
    assert len(asked) == len(set(asked))
    for quantity in HARDWARE.QUANTITIES:
        assert {x.partition("[")[0] for x in quantity.counters[0]} <= set(asked)
    assert "smsp__inst_executed_op_ldsm.sum" in asked  # if ncu does not print opcodes


@languages
def test_what_the_simulator_counts_is_what_arithmetic_says(language: str) -> None:
    _, (record,) = HARDWARE.simulate("vector_add_vec4", language)
    counted = HARDWARE.tally(record.launch)
    size, loads = HARDWARE.CASES["vector_add_vec4"].size, 2
    vectors, rest = divmod(size, 4)
    warps = -(-vectors // 32) + 1  # the rest is added by one warp
    sectors = -(-vectors // 2) + 1
    assert rest == 3
    assert counted["ld.global, LDG"] == counted["global loads: requests"] == loads * warps
    assert counted["st.global, STG"] == counted["global stores: requests"] == warps
    assert counted["global loads: sectors"] == loads * sectors
    assert counted["global stores: sectors"] == sectors
    others = {"all instructions"} | {x for x in counted if "global" in x}
    assert not any(number for name, number in counted.items() if name not in others)


@needs("cuda")
def test_tensor_cores_and_copies_are_counted() -> None:
    _, (record,) = HARDWARE.simulate("attention_flash_mma", "cuda")
    counted, constants = HARDWARE.tally(record.launch), dict(record.entry.constants)
    case = HARDWARE.CASES["attention_flash_mma"]
    rows = -(-case.seqlen_q // constants["BLOCK_M"]) * constants["BLOCK_M"]
    cols = -(-case.seqlen_k // constants["BLOCK_N"]) * constants["BLOCK_N"]
    products = case.heads_q * rows * cols * 2 * case.head_dim
    assert counted["mma.sync, HMMA"] == products // (16 * 8 * 16)
    # Of every array all rows that exist, 32 bytes a sector; k and v for each tile of queries.
    tiles = rows // constants["BLOCK_M"]
    copied = case.heads_q * (case.seqlen_q + 2 * tiles * case.seqlen_k) * case.head_dim * 2
    assert counted["cp.async: sectors"] == copied // 32
    assert counted["ldmatrix: conflicts"] == 0
    assert counted["ldmatrix, LDSM"] * 4 == counted["ldmatrix: wavefronts"]
    both = counted["ldmatrix: wavefronts"] + counted["ld.shared: wavefronts"]
    assert counted["shared loads, all: wavefronts"] == both


def test_values_are_compared_bit_by_bit() -> None:
    ours = np.array([[0.0, 1.0, -2.5], [np.inf, 3.0, np.nan]], DTYPES["bfloat16"])
    theirs = ours.copy()
    theirs[0] = -0.0, 1.0, -2.25
    found = HARDWARE.compare_values("out", ours[:, :2], HARDWARE.bits(theirs[:, :2]))
    assert (found.elements, found.same, found.largest) == (4, 3, 0.0)
    found = HARDWARE.compare_values("out", ours[:1], HARDWARE.bits(theirs[:1]))
    assert (found.same, found.largest, found.scale) == (1, 0.25, 2.5)
    theirs[1, 1] = np.nan
    assert np.isnan(HARDWARE.compare_values("out", ours, HARDWARE.bits(theirs)).largest)


@on_posix
def test_a_program_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    left = tmp_path / "left"
    hangs = ["bash", "-c", f"(sleep 2; touch '{left}') & wait"]
    start = time.monotonic()
    with pytest.raises(HARDWARE.MeasureError, match="ran for more than 1 s"):
        HARDWARE.run_limited(hangs, tmp_path / "log", 0.6)
    assert time.monotonic() - start < 1.9
    time.sleep(2)
    assert not left.exists()
    with pytest.raises(HARDWARE.MeasureError, match="not tried"):
        HARDWARE.run_limited(hangs, tmp_path / "log", 0)


# --------------------------------------------------------------------------------- the command

# Profiles, instead of the program that it is given, the simulator.
NCU = """\
#!{python}
import importlib.util, os, sys
from pathlib import Path
arguments = sys.argv[1:]
if "--query-metrics" in arguments:
    sys.exit(1)  # it does not tell
def option(name):
    return arguments[arguments.index(name) + 1]
report, kernel, language = Path(option("--log-file")), option("--kernel"), option("--backend")
assert option("--clock-control") == "none"
if os.environ.get("REFUSES"):
    report.write_text("==ERROR== ERR_NVGPUCTRPERM - no permission\\n")
    sys.exit(1)
metrics = option("--metrics").split(",")
if "smsp__inst_executed_op_ldsm.sum" in metrics:
    report.write_text("==ERROR== Failed to find metric regex:^smsp__inst_executed_op_ldsm\\\\.sum$\\n")
    sys.exit(1)
spec = importlib.util.spec_from_file_location("hardware", {script!r})
hardware = sys.modules["hardware"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hardware)
results, records = hardware.simulate(kernel, language)
folder = Path(option("--launch"))
hardware.np.savez(folder / hardware.RESULTS, **{{n: hardware.bits(x) for n, x in results.items()}})
heads = ["ID", "Kernel Name", "Block Size", "Grid Size", *metrics]
rows = [heads, [""] * len(heads), ["0", "fill_kernel", "(64, 1, 1)", "(1, 1, 1)"] + ["n/a"] * len(metrics)]
for record in records:
    counted = hardware.tally(record.launch)
    cells = {{q.counters[0][0]: counted[q.name] for q in hardware.QUANTITIES}}
    parts = "; ".join(f"{{x.split('[')[1][:-1]}}: {{n}}" for x, n in cells.items() if "[" in x)
    cells = {{x: f"{{n:,}}" for x, n in cells.items()}} | {{hardware.OPCODES: f"9 ({{parts}})"}}
    sizes = [f"({{n}}, 1, 1)" for n in (record.launch.block, record.launch.grid)]
    rows.append(["1", f"void {{record.entry.name}}<float>", *sizes, *(cells.get(m, "n/a") for m in metrics)])
report.write_text("==PROF== Connected\\n" + "".join(
    ",".join('"' + cell + '"' for cell in row) + "\\n" for row in rows))
"""  # noqa: E501


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU and ncu; the folder of the latter."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ncu").write_text(NCU.format(python=sys.executable, script=str(SCRIPT)))
    (programs / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(compiler, "gpu_missing", lambda: None)
    monkeypatch.setattr(HARDWARE, "device_name", lambda: "a GPU (sm_90)")
    return programs


@on_posix
@needs("cuda")
def test_both_sides_are_shown_and_written(
    pretended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretended
    out = tmp_path / "found.json"
    asked = ["--kernel", "vector_add_vec4", "--backend", "cuda", "--out", str(out)]
    assert HARDWARE.main(asked) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a GPU (sm_90), and the simulator running PTX for sm_90")
    assert "10,007 (100.0 %)" in shown
    assert "global loads: sectors        2,504  2,504    1.000" in shown
    assert "HMMA" not in shown  # neither side has any
    assert "of 6 counts that can be compared, 6 are the same and 6 within 1 %" in shown
    found = json.loads(out.read_text())
    (case,) = found["cases"]
    assert (case["kernel"], case["backend"], case["failures"]) == ("vector_add_vec4", "cuda", [])
    assert case["launches"][0]["raw"]["Grid Size"] == "(3, 1, 1)"
    assert case["values"][0]["same"] == 10_007
    assert list(tmp_path.glob(".hardware-*")) == []


@on_posix
@needs("cuda")
def test_what_fails_is_told_and_the_rest_goes_on(
    pretended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretended
    monkeypatch.setenv("REFUSES", "yes")
    monkeypatch.setattr(HARDWARE, "_launching", _without_results)
    assert HARDWARE.main(["--kernel", "vector_add_vec4", "--backend", "cuda"]) == 1
    shown = capsys.readouterr().out
    assert "no counters: ==ERROR== ERR_NVGPUCTRPERM - no permission" in shown
    assert "no results: out of luck" in shown
    assert "of 0 counts" in shown


def _without_results(kernel: str, language: str, folder: Path) -> list[str]:
    options = ["--kernel", kernel, "--backend", language, "--launch", str(folder)]
    return [sys.executable, "-c", "import sys; sys.exit('out of luck')", *options]


@needs("cuda")
def test_other_launches_are_not_compared() -> None:
    results, (record,) = HARDWARE.simulate("vector_add_vec4", "cuda")
    row = {"Kernel Name": "vector_add_vec4", "Grid Size": "(4, 1, 1)", "Block Size": "(512, 1, 1)"}
    with pytest.raises(HARDWARE.MeasureError, match=r"\[\(3, 1024\)\], and the GPU \[\(4, 512\)\]"):
        HARDWARE.compare_launches([record], [row])
    measured = HARDWARE.Measured({n: HARDWARE.bits(x) for n, x in results.items()}, [row])
    report = HARDWARE.compare("vector_add_vec4", "cuda", lambda: measured)
    assert report.values[0].same == 10_007
    assert "not compared" in report.failures[0]


def test_without_a_gpu_or_ncu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "gpu_missing", lambda: "there is none")
    with pytest.raises(SystemExit, match="2"):
        HARDWARE.main([])
    assert "compares the simulator with a GPU, but there is none" in capsys.readouterr().err
    monkeypatch.setattr(compiler, "gpu_missing", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        HARDWARE.main([])
    assert "ncu is not on the PATH" in capsys.readouterr().err
