"""What tables, panels and numbers look like, on a machine with a GPU as well."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console, RenderableType

from workbench import report
from workbench.comparison import Comparison, Row
from workbench.show import Pair, Piece
from workbench.workload import Workload

ON_GPU = Comparison(
    Workload("attention", "bfloat16", causal=True),
    (
        Row(
            "attention_flash_wgmma", "cuda", 2.1e-3, 1.234e-3, 1.2e-3, 698.0, 796.0, 168, 0, 233472
        ),
        Row("attention_flash_wgmma", "numba", 2.1e-3, 1.5e-3, 1.4e-3, 480.0, 796.0, 255, 16, 49152),
        Row("attention_naive", "cuda", reason="it takes float32, not bfloat16"),
        Row("attention_naive", "numba", reason="it takes float32, not bfloat16"),
        Row(None, "cpu", 2.2e-3, 0.25, 0.24, 0.072, 0.2),
        Row(None, "reference", reason="its seqlen_q x seqlen_k matrices take 61 GiB each"),
    ),
    devices=["NVIDIA H200 (sm_90)", "AMD EPYC, 2 cores"],
    ceilings={"cuBLAS matmul": 796.0, "NumPy matmul": 0.2},
    checked=0.25,
    in_l2=True,
)


def printed(renderable: RenderableType, width: int) -> list[str]:
    stream = io.StringIO()
    report.emit(Console(file=stream, width=width), renderable)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_a_gpus_table_fits_and_nothing_is_cut(width: int) -> None:
    lines = printed(report.comparison_table(ON_GPU), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    fastest = next(line.split() for line in lines if line.startswith("attention_flash_wgmma cuda"))
    assert fastest[2:] == ["2.1e-03", "1.23", "ms", "698", "88", "%", "168", "0", "228.0K"]
    host = next(line.split() for line in lines if line.startswith("- "))
    assert host == ["-", "cpu", "2.2e-03", "250", "ms", "0.072", "36", "%", "-", "-", "-"]


def test_every_reason_is_said_once_with_what_it_stopped() -> None:
    text = "\n".join(printed(report.comparison_table(ON_GPU), 100))
    assert (
        text.count("did not run: it takes float32, not bfloat16\n  attention_naive (cuda, numba)")
        == 1
    )
    assert "did not run: its seqlen_q x seqlen_k matrices take 61 GiB each\n  reference" in text
    assert "cuBLAS matmul at 796 TFLOP/s, NumPy matmul at 0.200 TFLOP/s" in text
    assert "error checked on 25 % of the heads" in text
    assert "the inputs fit in the GPU's L2 cache" in text


def test_a_machine_without_a_gpu_counts_in_gflops() -> None:
    rows = (Row(None, "cpu", 1e-6, 1e-3, 1e-3, 0.088, 0.1),)
    host = Comparison(Workload("attention"), rows, ["a CPU"], {"NumPy matmul": 0.1}, 1.0)
    lines = printed(report.comparison_table(host), 80)
    assert lines[3].split() == ["backend", "error", "time", "GFLOP/s", "share"]
    assert lines[5].split() == ["cpu", "1.0e-06", "1.00", "ms", "88.0", "88", "%"]
    assert "NumPy matmul at 100 GFLOP/s" in lines[6]


def test_json_holds_every_row() -> None:
    answer = json.loads(report.comparison_json(ON_GPU))
    assert len(answer["rows"]) == len(ON_GPU.rows)
    assert answer["rows"][0]["share"] == pytest.approx(698 / 796)
    assert answer["rows"][2]["share"] is None
    assert answer["rows"][2]["reason"] == "it takes float32, not bfloat16"
    assert answer["ceilings"] == ON_GPU.ceilings


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (0.0999, "99.9 ms"), (0.99999, "1000 ms"), (1.5e-5, "15.0 us"),
     (9.999e-6, "10.0 us"), (2.5e-9, "2.50 ns")],
)  # fmt: skip
def test_format_seconds(seconds: float, text: str) -> None:
    assert report.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [(1234.5, "1234"), (99.96, "100"), (99.94, "99.9"), (9.996, "10.0"), (9.994, "9.99"),
     (0.996, "1.00"), (0.0456, "0.046")],
)  # fmt: skip
def test_three_digits(x: float, text: str) -> None:
    assert report.three_digits(x) == text


def test_progress_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    with report.progress(Console(file=terminal, force_terminal=True, width=80), 2) as step:
        step("the first thing")
        step("the second thing")
    assert "the second thing" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()

    monkeypatch.setattr("sys.stderr", io.StringIO())
    pipe = io.StringIO()
    with report.progress(Console(file=pipe), 1) as step:
        step("unseen")
    assert not pipe.getvalue()


def test_a_step_of_one_language_leaves_a_gap() -> None:
    piece = Piece(0, "3. Only here", 7, "x = 1")
    (only,) = report.steps([Pair("3. Only here", None, piece)], Console(width=120))
    lines = printed(only, 120)
    assert "(not in this language)" in lines[1]
    assert "x = 1" in lines[1]
