from __future__ import annotations

import json
import re
from typing import Any

import pytest
from building import missing, needs
from rich.console import Console
from typer.testing import CliRunner

from workbench import compile as compiler
from workbench import inspection, show
from workbench.cli import app
from workbench.simulator.lines import by_array, by_line, total
from workbench.workload import Workload

SMALL: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "seqlen_q": 64, "seqlen_k": 64}
pytestmark = [needs("cuda"), needs("numba")]


def text_of(renderables: Any, width: int = 220) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    return capture.get()


def test_traffic_of_vector_add_is_what_arithmetic_says() -> None:
    size = 4096
    found = inspection.inspect("vector_add", Workload("vector_add", size=size))
    for language, records in found.records.items():
        (record,) = records
        arrays = by_array(record.launch)
        for name, (loads, stores) in arrays.items():
            moved, idle = (stores, loads) if name == "out" else (loads, stores)
            assert (moved.bytes, moved.transactions, moved.least) == (
                4 * size,
                size // 8,
                size // 8,
            )
            assert moved.requests == size // 32, language
            assert idle.requests == 0
        assert set(arrays) == {"a", "b", "out"}
        assert total([record.launch]).instructions["global"] == 3 * size // 32


def test_every_count_belongs_to_a_line() -> None:
    """What the lines cost is what the launch cost: inlined code counts where it was called."""
    found = inspection.inspect("attention_naive_fwd", Workload("attention", **SMALL))
    endings = {"cuda": ".cu", "numba": ".py"}
    for language, records in found.records.items():
        launches = [record.launch for record in records]
        lines = by_line(launches, found.stem + endings[language])
        whole = total(launches)
        assert sum(line.issued for line in lines.values()) >= 0.95 * whole.issued
        for name in ("loads", "stores", "shared"):
            parts = sum(getattr(line, name).transactions for line in lines.values())
            assert parts == getattr(whole, name).transactions, name
        source = show.read_source(found.stem, language)
        assert source is not None
        assert max(lines) <= len(source.splitlines())


def test_both_languages_ask_for_the_same_traffic() -> None:
    found = inspection.inspect("attention_tiled_fwd", Workload("attention", **SMALL))
    cuda, numba = (total(record.launch for record in found.records[x]) for x in ("cuda", "numba"))
    assert cuda.loads == numba.loads
    assert cuda.stores == numba.stores
    assert cuda.shared == numba.shared


def test_what_is_shown() -> None:
    workload = Workload("attention", **SMALL, backward=True)
    found = inspection.inspect("attention_delta", workload)
    shown = text_of([inspection.summary(found)])
    assert shown.startswith("attention_delta: attention backward, batch 1, heads 1, seqlen 64")
    assert "sectors loaded" in shown
    wide = text_of(inspection.listing(found, Console(width=220), None))
    narrow = text_of(inspection.listing(found, Console(width=100), None), width=100)
    for shown in (wide, narrow):
        assert "CUDA C++, line" in shown
        assert "Numba, line" in shown
    assert len(wide.splitlines()) < len(narrow.splitlines())
    assert not text_of(inspection.listing(found, Console(width=220), "9z"))


@pytest.mark.parametrize(
    ("count", "shown"), [(0, ""), (999, "999"), (12345, "12.3k"), (2e6, "2.00M")]
)
def test_short_counts(count: float, shown: str) -> None:
    assert inspection.short(int(count)) == shown


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["inspect", "vector_add_vec4", "--size", "3000"])
    assert result.exit_code == 0, result.output
    assert "vector_add_vec4: vector_add, 3,000 elements, float32" in result.output
    assert "instructions of a warp" in result.output
    result = CliRunner().invoke(app, ["inspect", "vector_multiply"])
    assert result.exit_code != 0


def test_kernels_that_others_launch() -> None:
    for stem in show.kernel_stems():
        assert inspection.usual_dtype(stem) in ("float32", "float16")
    small = ["--heads", "1", "--seqlen", "64"]
    result = CliRunner().invoke(app, ["inspect", "attention_row_stats", *small])
    assert result.exit_code == 0, result.output
    assert "attention_row_stats: attention backward" in result.output
    assert "float16" in result.output
    result = CliRunner().invoke(app, ["inspect", "attention_merge", *small])
    assert "does without attention_merge for these sizes" in str(result.exception)


def test_counts_beside_a_comparison() -> None:
    small = Workload("vector_add", size=5000)
    both = [("vector_add", language) for language in ("cuda", "numba")]
    shown = text_of([inspection.simulation_table(inspection.simulate(small, both))])
    assert re.search(r"vector_add +cuda .* 39\.1 KiB +19\.5 KiB", shown), shown
    assert re.search(r"vector_add +numba .* 39\.1 KiB +19\.5 KiB", shown)
    large = inspection.simulate(Workload("vector_add"), both)
    assert "for small problems" in text_of([inspection.simulation_table(large)])


def test_names_are_whole_at_80_columns() -> None:
    row = inspection.Counts("attention_flash_wgmma", "numba", 10**9, 10**8, 10**8, 10**9, 10**9, 1)
    shown = text_of([inspection.simulation_table(inspection.Simulation([row], []))], width=80)
    assert "attention_flash_wgmma" in shown
    assert "…" not in shown


def test_steps_that_are_not_there() -> None:
    for arguments in (["--step", "99"], ["--step", "4", "--file", "tiles.cuh"]):
        result = CliRunner().invoke(app, ["inspect", "attention_naive_fwd", *arguments])
        assert result.exit_code != 0
        assert re.search(r"--file|has no step '99'", str(result.exception))


@pytest.mark.skipif(compiler.gpu_missing() is None, reason="a GPU is there to be timed")
def test_compare_shows_counts_where_there_is_no_gpu() -> None:
    result = CliRunner().invoke(app, ["compare", "vector_add", "--size", "5000"])
    assert result.exit_code == 0, result.output
    assert "counted by the simulator" in result.output
    result = CliRunner().invoke(app, ["compare", "vector_add", "--size", "5000", "--json"])
    counts = json.loads(result.stdout)["simulated"]["rows"]
    assert [(row["kernel"], row["language"]) for row in counts][:2] == [
        ("vector_add_vec4", "cuda"), ("vector_add_vec4", "numba"),
    ]  # fmt: skip
    assert counts[0]["loaded_bytes"] == 2 * counts[0]["stored_bytes"] == 40000
    few = ["compare", "vector_add", "--size", "5000", "--backend", "cpu"]
    assert "simulator" not in CliRunner().invoke(app, few).output


def test_a_compiler_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("numba") is None
    original = compiler.build_ptx

    def without_numba(language: str, *rest: Any) -> Any:
        if language == "numba":
            raise compiler.ToolchainError("numba-cuda is missing")
        return original(language, *rest)

    from workbench.simulator import run

    monkeypatch.setattr(run, "load", run.load.__wrapped__)
    monkeypatch.setattr(compiler, "build_ptx", without_numba)
    found = inspection.inspect("vector_add", Workload("vector_add", size=100))
    assert list(found.records) == ["cuda"]
    assert "no numba: numba-cuda is missing" in text_of([inspection.summary(found)])
