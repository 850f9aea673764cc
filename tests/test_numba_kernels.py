"""The Numba sources: their form, and every instance compiled without a GPU."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from building import gate, needs, parameters
from sources import folder, header, helpers, numba_entries, read, stems

from workbench.launchers import Launch

STEMS = stems("numba")
FILES = sorted(path for path in folder("numba").glob("*.py") if path.name != "__init__.py")
LONGEST = 450  # lines: Python needs more than C++ for the same, a parameter a line twice

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
every_kernel = pytest.mark.parametrize("stem", STEMS)


@needs("numba")
@pytest.mark.parametrize(("launch", "arch"), parameters("numba"))
def test_compiles_within_limits(launch: Launch, arch: str) -> None:
    gate("numba", launch, arch)


# ---------------------------------------------------------------------------------------- form


@every_file
def test_lines(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 100, f"{path.name}:{number}"
    assert len(text.splitlines()) <= LONGEST


@every_file
def test_nothing_that_does_not_belong(path: Path) -> None:
    """A twin is Python: no linked C++, no text of PTX beyond single instructions."""
    text = path.read_text()
    for word in (
        "print(",
        "TODO",
        "FIXME",
        "XXX",
        "declare_device",
        "CUSource",
        "link=",
        "import cupy",
    ):
        assert word not in text, word
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert (
                node.value.count(";") <= 1
                or "asm" not in text
                or node.value in (ast.get_docstring(ast.parse(text), clean=False),)
            ), node.value


def comments(path: Path) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [
        (token.start[0], token.string.lstrip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
    ]


def is_code(comment: str) -> bool:
    """Whether a comment is a statement that was switched off."""
    try:
        body = ast.parse(comment).body
    except SyntaxError:
        return bool(re.match(r"(if|for|while|def|with) .*:$", comment))
    return any(
        isinstance(node, (ast.Assign, ast.AugAssign, ast.Return, ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        for node in body
    )


@every_file
def test_no_code_in_comments(path: Path) -> None:
    for number, comment in comments(path):
        assert not is_code(comment), f"{path.name}:{number}: {comment}"


@every_file
def test_imports(path: Path) -> None:
    allowed = {"math", "collections", "llvmlite", "numba", "numba.cuda", "numba.cuda.extending"}
    allowed |= {"numba.cuda.core.targetconfig"}  # knows what GPU is compiled for
    own = {helper.stem for helper in helpers("numba")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module in (own if node.level == 1 else allowed), node.module
        elif isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed


HEADER = ("Work split", "Shared memory", "Registers", "Twin", "Launched by")


@every_kernel
def test_headers_say_all_that_they_should(stem: str) -> None:
    lines = header("numba", stem)
    places = []
    for words in HEADER:
        found = [i for i, line in enumerate(lines) if line.startswith(words)]
        assert len(found) == 1, f"{words} is there {len(found)} times"
        places += found
    assert places == sorted(places)
    assert f"cuda_src/{stem}.cu" in lines[places[3]]
    assert "workbench/launchers.py" in lines[places[4]]


@every_kernel
def test_every_factory_returns_its_kernel(stem: str) -> None:
    assert numba_entries(stem)
    for node in ast.parse(read("numba", stem)).body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(x, ast.FunctionDef) and x.name == "kernel" for x in node.body
        ):
            last = node.body[-1]
            assert isinstance(last, ast.Return)
            assert isinstance(last.value, ast.Name)
            assert last.value.id == "kernel"


def test_the_reader_of_comments_knows_code() -> None:
    for code in ("x = 3", "x += y", "return x", "import math", "cuda.syncthreads()", "if x > 3:"):
        assert is_code(code), code
    for words in (
        "p is there",
        "s = q k^T, masked",
        "4a. Load q",
        "(batch, heads_q)",
        "p, then ds",
    ):
        assert not is_code(words), words
