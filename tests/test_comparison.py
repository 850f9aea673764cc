"""Every kernel and backend on one problem, and what is said of those that do not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from workbench import comparison, report
from workbench import compile as compiler
from workbench.comparison import Row
from workbench.table import KERNELS, NoKernelError
from workbench.workload import Oracle, Workload

SMALL = Workload("attention", batch=2, heads_q=4, heads_kv=2, seqlen_q=19, seqlen_k=23, head_dim=8)
SMALL = replace(SMALL, head_dim_v=6)


def test_twins_stand_next_to_each_other_and_hosts_come_last() -> None:
    which = comparison.targets("attention")
    names = [row.name for row in KERNELS if row.op == "attention"]
    assert which[:2] == [(names[0], "cuda"), (names[0], "numba")]
    assert which[-2:] == [(None, "cpu"), (None, "reference")]
    assert not any("simulator" in backend for _, backend in which)
    assert comparison.targets("attention", ["numba"], [names[1]]) == [(names[1], "numba")]
    with pytest.raises(ValueError, match="no backend 'gpu'"):
        comparison.targets("attention", ["gpu"])
    with pytest.raises(ValueError, match="no vector_add kernel 'attention_naive'"):
        comparison.targets("vector_add", None, ["attention_naive"])


@pytest.mark.parametrize("backward", [False, True])
def test_host_backends_are_compared(backward: bool) -> None:
    workload = replace(SMALL, backward=backward, causal=True)
    told: list[str] = []
    which = comparison.targets("attention", ["cpu", "reference"])
    compared = comparison.compare(workload, which, progress=told.append)
    assert len(told) == comparison.count_steps(which)
    assert [row.backend for row in compared.rows] == ["cpu", "reference"]
    for row in compared.rows:
        assert row.reason is None
        assert row.error is not None
        assert row.error < 1e-5
        assert row.seconds is not None
        assert row.seconds >= row.seconds_min > 0
        assert row.rate == pytest.approx(workload.work / row.seconds / 1e12)
        assert row.share == pytest.approx(row.rate / row.ceiling)


def test_a_vector_add_is_compared() -> None:
    workload = Workload("vector_add", size=1000)
    compared = comparison.compare(workload, comparison.targets("vector_add", ["cpu"]))
    (row,) = compared.rows
    assert row.rate == pytest.approx(workload.work / row.seconds / 1e9)
    assert row.error < 1e-7


def test_a_row_that_declines_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench

    def decline(*_args: object, **_options: object) -> None:
        raise NoKernelError("no cuda kernel takes this problem:\n  some_kernel: it is Tuesday")

    monkeypatch.setattr(workbench, "attention", decline)
    (row,) = comparison.compare(SMALL, [(None, "reference")]).rows
    assert row == Row(None, "reference", reason="it is Tuesday")


def test_a_mistake_is_not_hidden_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench

    def fail(*_args: object, **_options: object) -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(workbench, "attention", fail)
    with pytest.raises(AssertionError, match="a mistake"):
        comparison.compare(SMALL, [(None, "reference")])


def test_the_reference_declines_what_does_not_fit_in_memory() -> None:
    workload = replace(SMALL, heads_q=64, seqlen_q=2**15, seqlen_k=2**15)
    row = comparison._measure(workload, Oracle(SMALL), None, "reference", {})
    assert row.reason is not None
    assert "1024 GiB each" in row.reason


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("language", compiler.LANGUAGES)
def test_simulated_kernels_are_compared_where_they_are_named(language: str, backward: bool) -> None:
    try:
        compiler.compiler_version(language)
    except compiler.ToolchainError as error:
        pytest.skip(str(error))
    workload = replace(SMALL, backward=backward, causal=True)
    which = comparison.targets("attention", [f"{language}-simulator"], ["attention_naive"])
    assert which == [("attention_naive", f"{language}-simulator")]
    compared = comparison.compare(workload, which)
    (row,) = compared.rows
    assert row.reason is None
    assert row.error < 1e-5
    assert row.seconds > 0
    assert row.registers > 0
    assert row.rate is None
    assert row.share is None
    row = replace(row, kernel="attention_flash_wgmma", seconds=0.1234, shared_bytes=99_999)
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(report.comparison_table(replace(compared, rows=[row, row])))
    shown = capture.get()
    assert f"attention_flash_wgmma {language}-simulator" in shown
    assert "…" not in shown


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_every_kernel_is_compared_on_the_gpu(backward: bool) -> None:
    workload = replace(SMALL, backward=backward, causal=True)
    compared = comparison.compare(workload, comparison.targets("attention", ["cuda", "numba"]))
    assert compared.in_l2
    takes = {kernel.name: kernel.dtypes for kernel in KERNELS}
    for row in compared.rows:
        if workload.dtype not in takes[row.kernel]:
            assert row.reason.startswith("it takes float16, bfloat16"), row
            continue
        assert row.reason is None, row
        assert row.error < 1e-5, row
        assert row.share > 0, row
        assert row.registers > 0, row
        assert row.stack_bytes is not None
        assert row.shared_bytes is not None
