"""`explain`: what would run, what it takes, and why not the others; for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from building import languages, needs

import workbench
from workbench import KERNELS, explain
from workbench import compile as compiler

NAMES = [row.name for row in KERNELS if row.op == "attention"]


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def inputs(dtype: Any = np.float32, head_dim: int = 64) -> list[np.ndarray]:
    return [array(2, 4, 100, head_dim, dtype=dtype)] + [
        array(2, 2, 150, head_dim, dtype=dtype) for _ in range(2)
    ]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "gpu_missing", lambda: "no NVIDIA driver is installed")


@pytest.mark.usefixtures("no_gpu")
def test_on_the_host() -> None:
    answer = explain(*inputs())
    assert isinstance(answer, workbench.Explanation)
    assert answer.backend == "cpu"
    assert answer.arch is answer.kernel is None
    assert answer.launches == []
    assert answer.reasons == {x: ["no NVIDIA driver is installed"] for x in ("cuda", "numba")}
    assert str(answer).splitlines()[0] == "backend cpu"
    assert explain(*inputs(), backend="reference").backend == "reference"


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_a_gpu_backend_needs_an_arch() -> None:
    with pytest.raises(workbench.ToolchainError, match="needs a GPU"):
        explain(*inputs(), backend="numba")


@pytest.mark.parametrize("arch", ["90", "sm90", "sm_9", "sm_90a", "hopper", 90, "sm_90\n"])
def test_an_arch_that_is_none(arch: Any) -> None:
    with pytest.raises(ValueError, match="it takes a GPU architecture like 'sm_90'"):
        explain(*inputs(), arch=arch)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_arch_for_a_host_backend(backend: str) -> None:
    with pytest.raises(ValueError, match=rf"'{backend}' runs on the host.*'cuda' or 'numba'"):
        explain(*inputs(), backend=backend, arch="sm_90")


@languages
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_a_gpu_that_is_not_there(arch: str, language: str) -> None:
    q, k, v = inputs()
    answer = explain(q, k, v, causal=True, backend=language, arch=arch, kernel="attention_naive")
    assert (answer.backend, answer.arch, answer.kernel) == (language, arch, "attention_naive")
    assert answer.reasons == {"attention_naive": []}
    (launch,) = answer.launches
    assert launch.name == "attention_naive_fwd"
    assert launch.constants == {"T": "float32", "FEATURES": 1}
    assert launch.grid * launch.block == 2 * 4 * 100 * 32
    assert 16 <= launch.registers <= 255
    assert launch.stack_bytes == 0
    assert answer.workspace_bytes == 2 * 4 * 100 * 150 * 4
    text = str(answer)
    assert f"backend {language} on {arch}: attention_naive" in text
    assert "attention_naive_fwd<T=float32, FEATURES=1>" in text
    assert f"{launch.registers} registers" in text
    assert f"workspace: {answer.workspace_bytes} bytes" in text


@needs("cuda")
def test_the_fastest_kernel_and_why_not_the_others() -> None:
    answer = explain(*inputs(head_dim=300), arch="sm_90")
    assert answer.backend == "cuda"
    assert answer.kernel == "attention_tiled"
    assert list(answer.reasons) == NAMES
    assert answer.reasons["attention_flash_simt"] == ["its head_dim goes to 256, not 300"]
    assert "not attention_flash_simt: its head_dim goes to 256, not 300" in str(answer)
    answer = explain(*inputs(), arch="sm_90")
    assert answer.kernel == "attention_flash_simt"
    declined = {name for name, reasons in answer.reasons.items() if reasons}
    assert declined == {"attention_flash_wgmma", "attention_flash_mma"}  # float32
    assert answer.launches[0].shared_memory > 0


@needs("cuda")
def test_no_kernel_takes_it() -> None:
    answer = explain(*inputs(head_dim=300), arch="sm_90", kernel="attention_flash_simt")
    assert answer.kernel is None
    assert answer.launches == []
    assert "no kernel takes this" in str(answer)
    assert "its head_dim goes to 256" in str(answer)
    with pytest.raises(ValueError, match="kernel is 'nonsense'; it takes 'attention_flash_wgmma'"):
        explain(*inputs(), arch="sm_90", kernel="nonsense")


@needs("cuda")
def test_what_would_be_copied_is_said() -> None:
    q, k, v = inputs()
    q = array(2, 4, 64, 100).swapaxes(2, 3)
    bias = array(100, 150, dtype=ml_dtypes.bfloat16)
    lengths = np.array([3, 4])
    answer = explain(q, k, v, bias=bias, kv_lengths=lengths, arch="sm_90", kernel="attention_naive")
    assert answer.notes == [
        "q is copied: the elements of its last axis are not side by side",
        "bias is converted from bfloat16 to float32",
        "kv_lengths is converted to contiguous int32",
    ]
    assert all(note in str(answer) for note in answer.notes)


@needs("cuda")
def test_strides_and_alignment_of_the_arrays_count() -> None:
    """Aligned rows are read 16 bytes at a time; rows of 65 elements cannot be."""
    whole = explain(*inputs(), arch="sm_90", kernel="attention_flash_simt").launches[0].constants
    q, k, v = inputs(head_dim=65)
    odd = explain(
        q[..., :64], k[..., :64], v[..., :64], arch="sm_90", kernel="attention_flash_simt"
    )
    assert (whole["VEC"], odd.launches[0].constants["VEC"]) == (4, 1)
    assert odd.notes == []


@needs("cuda")
def test_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("launched")

    monkeypatch.setattr(compiler, "prepare", fail)
    explain(*inputs(), arch="sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cuda", "numba"])
def test_on_this_gpu(backend: str) -> None:
    import cupy

    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    for arrays in (inputs(), [cupy.asarray(x) for x in inputs()]):
        answer = explain(*arrays, backend=backend)
        assert answer.backend == ("cuda" if backend == "auto" else backend)
        assert answer.arch == arch
        assert answer.kernel == next(
            row.name for row in KERNELS if row.name in NAMES and "float32" in row.dtypes
        )
        assert explain(*arrays, backend=backend, arch=arch) == answer
