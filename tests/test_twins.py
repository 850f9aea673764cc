"""The twin contract: a kernel is one story in two languages.

Same stem, same constants in the same order, same parameters, and the same numbered steps, word for
word. What both languages are launched with is declared once, in `launchers`; both must agree to it.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from building import needs, opcodes
from sources import Entry, cuda_entries, header, helpers, numba_entries, read, stems, steps

from workbench import compile as compiler
from workbench import launchers, table

STEMS = stems("cuda")
ARCHS = ("sm_75", "sm_90")

FORWARD = {
    "1": "Which rows are ours",
    "2": "Load the Q tile",
    "3": "Start the running softmax",
    "4": "Walk over the key/value tiles",
    "4a": "Load the K and V tiles",
    "4b": "s = q k^T, masked",
    "4c": "Rescale what we have to the new maximum",
    "4d": "acc += p v",
    "5": "Normalise and store",
}
BACKWARD_DKDV = {
    "1": "Which key rows are ours",
    "2": "Load the K and V tiles",
    "3": "Start dk and dv",
    "4": "Walk over the query tiles",
    "4a": "Load q, dout, lse and delta",
    "4b": "p = exp(s - lse)",
    "4c": "dv += p^T dout",
    "4d": "ds = p * (dout v^T - delta)",
    "4e": "dk += ds^T q",
    "4f": "dq += ds k",
    "5": "Scale and store",
}
BACKWARD_DQ = {
    "1": "Which query rows are ours",
    "2": "Load the Q and dout tiles",
    "3": "Start dq",
    "4": "Walk over the key/value tiles",
    "4a": "Load the K and V tiles",
    "4b": "p = exp(s - lse)",
    "4d": "ds = p * (dout v^T - delta)",
    "4f": "dq += ds k",
    "5": "Scale and store",
}
DELTA = {"1": "delta = rowsum(dout * out)"}

# What an early rung of the ladder does not do: its header says so.
MISSING: dict[str, set[str]] = {
    "attention_naive_fwd": {"2", "3", "4", "4a", "4c"},
    "attention_naive_bwd_dkdv": {"2", "4", "4a", "4b", "4d", "4f"},
    "attention_naive_bwd_dq": {"2", "3", "4", "4a"},
    "attention_tiled_fwd": {"2", "4a", "4c"},
    "attention_tiled_bwd_dkdv": {"2", "4", "4a", "4b", "4d", "4f"},
    "attention_tiled_bwd_dq": {"2", "3", "4a"},
    "attention_flash_simt_bwd_dkdv": {"4f"},
}

# In how many places a kernel waits for products: after the first ones of a walk, after each one of
# a step, which the forward has in three forms, and at the end. With one Q tile that has two forms
# and one end. NVRTC makes one of the two ends that a forward with lengths has otherwise.
WAITS = {
    "attention_flash_wgmma_fwd": 9,
    "attention_flash_wgmma_bwd": 10,
    "attention_flash_wgmma_bwd_wide": 14,  # of two warpgroups, apart until the last step
}

# Where p and ds wait for one barrier, ds comes before dv.
SWAPPED = {"attention_flash_mma_bwd": ("4c", "4d")}


def expected_steps(name: str) -> dict[str, str] | None:
    """The steps that all kernels of a kind share; None for those that are alone in theirs."""
    if name.endswith("_fwd"):
        return FORWARD
    if name.endswith("_bwd_dq"):
        return BACKWARD_DQ
    if "_bwd" in name:
        return BACKWARD_DKDV
    return DELTA if name == "attention_delta" else None


def twins() -> list[Any]:
    """Every kernel of both languages, for those files that both have."""
    pairs = []
    for stem in STEMS:
        numba = {e.name: e for e in numba_entries(stem)} if stem in stems("numba") else {}
        pairs += [
            pytest.param(e, numba[e.name], id=e.name) for e in cuda_entries(stem) if e.name in numba
        ]
    return pairs


every_twin = pytest.mark.parametrize(("cuda", "numba"), twins())


def test_every_kernel_has_a_twin() -> None:
    assert stems("numba") == STEMS
    for stem in STEMS:
        names = [[e.name for e in find(stem)] for find in (cuda_entries, numba_entries)]
        assert names[0] == names[1], f"{stem}: other kernels, or in another order"
        for name in names[0]:
            assert name.startswith(stem)


def test_every_header_has_a_twin() -> None:
    assert [p.stem for p in helpers("cuda")] == [p.stem for p in helpers("numba")]


@every_twin
def test_constants_are_equal(cuda: Entry, numba: Entry) -> None:
    assert cuda.constants == numba.constants
    assert all(name == name.upper() for name in cuda.constants)


@every_twin
def test_parameters_are_equal(cuda: Entry, numba: Entry) -> None:
    assert cuda.parameters == numba.parameters


@every_twin
def test_steps_are_equal_word_for_word(cuda: Entry, numba: Entry) -> None:
    assert cuda.steps
    assert cuda.steps == numba.steps


def by_role(steps: list[tuple[str, str]]) -> list[list[str]]:
    """The numbers of each role's steps; a step that names no role is everybody's."""
    parts = [re.fullmatch(r"(\w+)(?: \((\w+)\))?", number).groups() for number, _ in steps]
    roles = {role for _, role in parts if role} or {None}
    return [[number for number, whose in parts if whose in (role, None)] for role in roles]


def in_order(name: str, numbers: list[str], reference: list[str]) -> bool:
    """Whether the steps of kernel `name` stand in the order of all kernels, or in its own."""
    places = {number: place for place, number in enumerate(reference)}
    first, second = SWAPPED.get(name, (reference[0],) * 2)
    places |= {first: places[second], second: places[first]}
    return numbers == sorted(numbers, key=places.__getitem__)


@every_twin
def test_steps_are_those_of_all_kernels(cuda: Entry, numba: Entry) -> None:
    expected = expected_steps(cuda.name)
    if expected is None:
        return
    for entry in (cuda, numba):
        found = [re.sub(r" \(\w+\)", "", number) for number, _ in entry.steps]
        for number, words in entry.steps:
            known = expected.get(re.sub(r" \(\w+\)", "", number), "nothing")
            # A step may say more about itself, after the words that all kernels share.
            assert re.match(re.escape(known) + r"($|[;:,(])", words), (
                f"{entry.name} {number}: {words!r}, not {known!r}"
            )
        missing = set(expected) - set(found)
        # Where dq has a kernel of its own, dk/dv need not form it.
        allowed = MISSING.get(cuda.name, set())
        assert missing == allowed, (
            f"{entry.name} lacks {missing - allowed}, has {allowed - missing}"
        )
        for numbers in by_role(entry.steps):
            assert in_order(entry.name, numbers, list(expected)), f"{entry.name}: {numbers}"


@pytest.mark.parametrize("stem", STEMS)
def test_headers_are_equal_word_for_word(stem: str) -> None:
    texts = []
    for language in compiler.LANGUAGES:
        lines = [line for line in header(language, stem) if not line.startswith("Twin")]
        text = " ".join(" ".join(lines).split())
        texts.append(text.rstrip("."))
    # A docstring's first line ends with a full stop, a comment's need not.
    cuda, numba = (text.replace(".", "") for text in texts)
    assert cuda == numba


# ------------------------------------------------------------------- what launchers declare


def launched() -> dict[str, compiler.Entry]:
    """Every kernel that a launcher starts for some instance, by name."""
    return {
        launch.entry.name: launch.entry
        for arch in ARCHS
        for launches in table.compile_units(arch).values()
        for launch in launches
    }


def test_every_kernel_is_launched() -> None:
    names = {e.name for stem in STEMS for e in cuda_entries(stem)}
    assert names == set(launched())


@pytest.mark.parametrize("language", compiler.LANGUAGES)
def test_who_may_start_early_waits(language: str) -> None:
    """And the launch in front of it lets it start."""
    early = set()
    for row in table.KERNELS:
        for problem in table.INSTANCES:
            if row.why_not(problem, "sm_90"):
                continue
            launches = row.work(problem, "sm_90").launches
            assert not launches[0].dependent  # who knows what runs in front of it
            for before, launch in itertools.pairwise(launches):
                stem = launch.entry.stem
                assert launch.dependent == ("griddepcontrol_wait()" in read(language, stem)), stem
                if launch.dependent:
                    first = read(language, before.entry.stem)
                    assert "griddepcontrol_launch_dependents()" in first, before.entry.stem
                    early.add(stem)
    assert "attention_merge" in early


@pytest.mark.parametrize("language", compiler.LANGUAGES)
def test_kernels_take_what_launchers_declare(language: str) -> None:
    find = cuda_entries if language == "cuda" else numba_entries
    for stem in stems(language):
        for found in find(stem):
            declared = launched()[found.name]
            assert declared.stem == stem
            assert found.constants == [name for name, _ in declared.constants], found.name
            names = [name for _, name in declared.signature.parameters]
            assert found.parameters == names, found.name
            if language == "cuda":
                kinds = [kind for kind, _ in declared.signature.parameters]
                assert found.types == kinds, found.name


def test_structs_hold_what_signatures_say() -> None:
    text = "\n".join(path.read_text() for path in helpers("cuda"))
    text = re.sub(r"//[^\n]*", "", text)
    for name, fields in compiler._STRUCTS.items():
        body = re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)[1]
        found = []
        for line in body.split(";"):
            kind, _, names = line.strip().removeprefix("const ").partition(" ")
            found += [f"{kind} {x.strip()}" for x in names.split(",") if kind]
        assert tuple(found) == fields, name


@needs("numba")
def test_named_tuples_hold_what_signatures_say() -> None:
    import importlib

    modules = [importlib.import_module(f"numba_kernels.{p.stem}") for p in helpers("numba")]
    for name, fields in compiler._STRUCTS.items():
        (kind,) = {vars(module)[name] for module in modules if name in vars(module)}
        assert kind._fields == tuple(x.split()[1] for x in fields), name


# --------------------------------------------------------------------------- launch bounds


def constexprs() -> dict[str, int]:
    """The whole numbers that the headers give names to."""
    text = "\n".join(path.read_text() for path in helpers("cuda"))
    found = re.findall(r"constexpr int (\w+) = (\d+);", text)
    return {name: int(value) for name, value in found}


def value_of(expression: str, names: dict[str, Any]) -> int:
    """The value of a C++ expression without side effects."""
    choice = re.fullmatch(r"(.+?) \? (.+) : (.+)", expression)
    if choice:
        return value_of(choice[2 if value_of(choice[1], names) else 3], names)
    return eval(expression.replace("/", "//"), {}, names)


@needs("numba")
@pytest.mark.parametrize("stem", STEMS)
def test_launch_bounds_are_equal(stem: str) -> None:
    import importlib

    from numba.cuda import types

    instances = [
        launch
        for arch in ARCHS
        for launches in table.compile_units(arch).values()
        for launch in launches
        if launch.entry.stem == stem
    ]
    module = importlib.import_module(f"numba_kernels.{stem}")
    for entry in cuda_entries(stem):
        for launch in instances:
            if launch.entry.name != entry.name:
                continue
            constants = dict(launch.entry.constants)
            wanted = [value_of(x, constexprs() | constants) for x in entry.launch_bounds]
            given = {n: getattr(types, str(x)) if n == "T" else x for n, x in constants.items()}
            bounds = getattr(module, entry.name)(**given).targetoptions.get("launch_bounds")
            found = [] if bounds is None else [bounds] if isinstance(bounds, int) else list(bounds)
            assert found == wanted, launch.entry.describe()
            assert launch.block == (wanted or [launch.block])[0], launch.entry.describe()


# ------------------------------------------------------------------- products of warpgroups


@needs("cuda")
@needs("numba")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("more", [0, launchers.SOFTCAP | launchers.KV_LENGTHS])
def test_products_of_warpgroups_run_in_the_background(
    more: int, head_dim: int, tmp_path: Path
) -> None:
    """Where ptxas finds too few registers it waits after every product, and says nothing."""
    launches = table.compile_units("sm_90")["attention_flash_wgmma"]
    chosen = {"T": "bfloat16", "HEAD_DIM": head_dim, "FEATURES": launchers.RANGE | more}
    entries = [x.entry for x in launches if chosen.items() <= dict(x.entry.constants).items()]
    assert entries
    for entry in entries:
        products, waits, arguments_at = [], [], []
        for language in compiler.LANGUAGES:
            binary = compiler.build(language, entry, "sm_90")
            found = opcodes(binary, tmp_path)
            waits.append(sum(op.startswith("WARPGROUP.DEPBAR") for op in found))
            wanted = WAITS[entry.stem]
            if entry.stem == "attention_flash_wgmma_fwd":
                one_q = dict(entry.constants)["Q_STAGES"] == 1
                wanted = 6 if one_q else wanted - (language == "cuda" and more > 0)
            assert waits[-1] == wanted, f"{entry.describe()} in {language}: {waits[-1]}"
            products.append(sum(op.startswith("HGMMA") for op in found))
            arguments_at.append(binary.arguments_at)
        assert min(products) > 0, entry.describe()
        assert waits[0] != waits[1] or products[0] == products[1], entry.describe()
        # A tensor map is passed by value, at a multiple of 64 bytes.
        assert arguments_at[0] == arguments_at[1] > 0, entry.describe()


# -------------------------------------------------------------------------- the reader itself


def test_the_reader_finds_steps_and_their_continuations() -> None:
    text = """
  // 1. Which rows are ours
  int x;  // 2. not a step: it follows code
  //    and this continues nothing
  // 4 (producer). Walk: first
  //    to last
  // plain
  //   4. indented, so no step
"""
    assert steps(text, "//") == [
        ("1", "Which rows are ours"),
        ("4 (producer)", "Walk: first to last"),
    ]


def test_there_are_kernels_to_compare() -> None:
    assert len(STEMS) >= 10
    assert len(twins()) >= len(STEMS)
