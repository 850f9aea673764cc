"""Faults planted in the kernels: each must be found, and at its line."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import copy_sources, needs, redirect
from oracle import Example, random_example, run

import workbench
from workbench.simulator import faults, lines
from workbench.simulator import run as simulator
from workbench.simulator.faults import SimulationError

SUFFIX = {"cuda": ".cu", "numba": ".py"}
RAGGED = {"heads_q": 2, "heads_kv": 1, "seqlen_q": 70, "seqlen_k": 90, "head_dim": 64}


@dataclass(frozen=True)
class Fault:
    """What to break, and what must be said about it.

    Attributes
    ----------
    edits : tuple of (str, str, str)
        File, pattern and replacement: the first place that matches.
    where, other : str
        What the reported lines of the broken source hold.
    """

    kernel: str
    language: str
    edits: tuple[tuple[str, str, str], ...]
    kind: str
    where: str
    other: str = ""
    backward: bool = False


FAULTS = {
    "tiles-barrier-cuda": Fault(
        "attention_tiled", "cuda",
        (("matmul.cuh", r"__syncthreads\(\);  // these are complete", ""),),
        faults.RACE, r"_frag\[i\] = [ab]_smem", r"tile\[d\]\[i\] =",
    ),
    "tiles-barrier-numba": Fault(
        "attention_tiled", "numba",
        (("matmul.py", r"cuda.syncthreads\(\)  # these are complete", "pass"),),
        faults.RACE, r"multiply_nt\(", r"multiply_nt\(",
    ),
    "barrier-of-some-cuda": Fault(
        "attention_tiled", "cuda",
        (("matmul.cuh", r"(__sync.*// these)", r"if (threadIdx.x < 100) \1"),),
        faults.RACE, r"_frag\[i\] = [ab]_smem", r"tile\[d\]\[i\] =",
    ),
    "no-wait-cuda": Fault(
        "attention_flash_simt", "cuda",
        (("attention_flash_simt_fwd.cu", r"if \(ASYNC\) cp_async_wait_all\(\);", ""),),
        faults.IN_FLIGHT, r"multiply_nt<", r"load_tile<",
    ),
    "no-wait-numba": Fault(
        "attention_flash_simt", "numba",
        (("attention_flash_simt_fwd.py", r"cp_async_wait_all\(\)", "pass"),),
        faults.IN_FLIGHT, r"multiply_", r"load_",
    ),
    "probabilities-barrier-cuda": Fault(
        "attention_flash_simt", "cuda",
        (("attention_flash_simt_fwd.cu", r"__syncthreads\(\);  // V and p are there.*", ""),),
        faults.RACE, r"multiply_|load_tile", r"multiply_|load_tile",
    ),
    "off-by-one-cuda": Fault(
        "attention_flash_simt", "cuda",
        (("tiles.cuh", r"row \+ r < rows", "row + r <= rows"),),
        faults.OUT_OF_RANGE, r"load_tile<",
    ),
    "off-by-one-numba": Fault(
        "attention_tiled", "numba",
        (("matmul.py", r"if i < vectors", "if i <= vectors"),),
        faults.OUT_OF_RANGE, r"multiply_nt\(",
    ),
    "turn-barrier-cuda": Fault(
        "attention_flash_simt", "cuda",
        (("attention_flash_simt_bwd.cu", r"__syncthreads\(\);  // q is free, and it is.*", ""),),
        faults.RACE, r"load_", r"multiply_", backward=True,
    ),
    "turn-not-passed-on-cuda": Fault(
        "attention_flash_simt", "cuda",
        (("ptx_sm80.cuh", r'asm volatile\("st.release.gpu.s32[^;]*;"[^;]*;', ""),),
        faults.DEADLOCK, r"ld.acquire|ld_acquire", backward=True,
    ),
}  # fmt: skip


def forget_modules() -> dict[str, Any]:
    """Let the Numba kernels be imported anew; what was there is returned."""
    names = [name for name in sys.modules if name.partition(".")[0] == "numba_kernels"]
    importlib.invalidate_caches()
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test import Numba kernels from its copy, and the others from the checkout."""
    before = forget_modules()
    monkeypatch.syspath_prepend(tmp_path)
    yield
    forget_modules()
    sys.modules.update(before)


def break_it(
    fault_edits: tuple[tuple[str, str, str], ...],
    language: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Compile from a copy of the sources with some places changed."""
    sources = copy_sources(language, folder)
    for name, pattern, replacement in fault_edits:
        text = (sources / name).read_text()
        changed, count = re.subn(pattern, replacement, text, count=1)
        assert count == 1, f"{name} has no {pattern}"
        (sources / name).write_text(changed)
    redirect(monkeypatch, language, sources)
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(folder / "cache"))
    forget_modules()
    monkeypatch.setattr(simulator, "load", simulator.load.__wrapped__)
    return sources


def texts(location: Any, sources: Path) -> list[str]:
    """The source lines of a location and of those that it was inlined into."""
    return [
        (sources / Path(place.file).name).read_text().splitlines()[place.line - 1]
        for place in location.chain()
        if (sources / Path(place.file).name).is_file()
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs(fault.language)) for n, fault in FAULTS.items()]
)
def test_a_planted_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    sources = break_it(fault.edits, fault.language, tmp_path, monkeypatch)
    e = random_example(1, **RAGGED, backward=fault.backward)
    with pytest.raises(SimulationError) as caught:
        run(e, backend=f"{fault.language}-simulator", kernel=fault.kernel)
    error = caught.value
    assert error.kind == fault.kind, error
    found = texts(error.where, sources)
    assert any(re.search(fault.where, text) for text in found), (str(error), found)
    if fault.other:
        found = texts(error.other, sources)
        assert any(re.search(fault.other, text) for text in found), (str(error), found)


def forward(e: Example, language: str, kernel: str) -> lines.Line:
    """Counts of a forward."""
    with simulator.recording() as records:
        run(e, backend=f"{language}-simulator", kernel=kernel)
    return lines.total([record.launch for record in records])


# Everywhere in the file.
UNPADDED = {
    "cuda": [("matmul.cuh", "[BLOCK + 1]", "[BLOCK]"),
             ("attention_tiled_fwd.cu", "[BLOCK + 1]", "[BLOCK]")],
    "numba": [("attention_tiled_fwd.py", "(BLOCK_K, BLOCK + 1)", "(BLOCK_K, BLOCK)")],
}  # fmt: skip


@pytest.mark.parametrize("language", [pytest.param(x, marks=needs(x)) for x in UNPADDED])
def test_an_unpadded_tile_shows_as_bank_conflicts(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that write a column of it then all hit the same bank or two."""
    e = random_example(1, heads_q=1, seqlen_q=64, head_dim=64, backward=False)
    before = forward(e, language, "attention_tiled")
    sources = break_it((), language, tmp_path, monkeypatch)
    for name, padded, bare in UNPADDED[language]:
        text = (sources / name).read_text()
        assert padded in text
        (sources / name).write_text(text.replace(padded, bare))
    after = forward(e, language, "attention_tiled")
    assert after.shared.requests == before.shared.requests
    assert before.shared.excess < 0.1 * before.shared.transactions
    assert after.shared.excess > 4 * before.shared.excess


@needs("cuda")
def test_a_write_to_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = (("vector_add.cu", r"out\[i\] = from", "const_cast<T*>(a)[i] = from"),)
    break_it(edits, "cuda", tmp_path, monkeypatch)
    a = np.ones(100, np.float32)
    with pytest.raises(SimulationError, match=r"write to an input: thread 0 .* a\[0\]"):
        workbench.vector_add(a, a, backend="cuda-simulator", kernel="vector_add")
