"""The list of mutants: each still finds the code it changes, and changes it into code."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import workbench

ROOT = Path(workbench.__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutate.py"

pytestmark = pytest.mark.skipif(
    not SCRIPT.is_file(), reason="there are no scripts beside the package"
)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


MUTATE: Any = load() if SCRIPT.is_file() else None
MUTATIONS = MUTATE.mutations() if MUTATE else []
ONCE = list({(m.path, m.name): m for m in MUTATIONS}.values())


@pytest.mark.parametrize("mutation", ONCE, ids=lambda m: f"{m.path.name}-{m.name}")
def test_every_mutant_still_finds_its_code(mutation: Any) -> None:
    text = (ROOT / mutation.path).read_text()
    changed = mutation.apply(text)
    assert changed != text
    if mutation.language == "numba":
        ast.parse(changed)


def test_every_kernel_is_mutated_in_both_languages() -> None:
    mutated = {(m.kernel, m.language) for m in MUTATIONS}
    wanted = {(row.name, language) for row in workbench.KERNELS for language in row.languages}
    assert wanted <= mutated
    stems = {m.path.name for m in MUTATIONS}
    for folder, suffix in (("cuda_src", ".cu"), ("numba_kernels", ".py")):
        for path in (ROOT / folder).glob(f"*{suffix}"):
            if path.name.startswith(("attention_", "vector_")):
                assert path.name in stems, "no mutant of this kernel"


MISTAKES = (
    "scale squared",
    "diagonal + 1",
    "diagonal - 1",
    "dropped tail",
    "cap after the bias",
    "head map",
    "lse in base 2",
    "no delta",
)


NO_BIAS = ("attention_flash_wgmma",)


@pytest.mark.parametrize(
    "row", [r for r in workbench.KERNELS if r.op == "attention"], ids=lambda r: r.name
)
def test_the_mistakes_that_every_attention_kernel_could_make(row: Any) -> None:
    for language in row.languages:
        mutated = [m.name for m in MUTATIONS if (m.kernel, m.language) == (row.name, language)]
        for mistake in MISTAKES:
            if mistake == "cap after the bias" and row.name in NO_BIAS:
                continue
            assert any(mistake in name for name in mutated), f"{language}: {mistake}"


def test_every_barrier_is_a_mutant() -> None:
    for language, folder in (("cuda", "cuda_src"), ("numba", "numba_kernels")):
        found = {(m.path.name, m.nth) for m in MUTATIONS if m.is_barrier and m.language == language}
        for path in (ROOT / folder).glob("*.*"):
            text = path.read_text() if path.suffix in (".cu", ".cuh", ".py") else ""
            count = len(MUTATE.places(MUTATE.BARRIERS[language], text, language))
            assert {nth for name, nth in found if name == path.name} == set(range(count)), path.name


def test_places() -> None:
    text = "a = b+c;  // a = b + c\nab = b;\nx( a ,b );"
    assert MUTATE.places("b + c", text, "cuda") == [(4, 7)]
    assert MUTATE.places("x(a, b)", text, "cuda") == [(text.index("x("), len(text) - 1)]
    assert len(MUTATE.places("b", text, "cuda")) == 3
    assert MUTATE.places("d", text, "cuda") == []
