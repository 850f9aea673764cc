"""Kernel files as the tests read them: parameters, steps and header of both languages alike."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from workbench import compile as compiler

LANGUAGES = compiler.LANGUAGES
MARK = {"cuda": "//", "numba": "#"}
SUFFIX = {"cuda": ".cu", "numba": ".py"}


@dataclass
class Entry:
    """One kernel of a file: the template or factory, and the function that it makes."""

    name: str
    constants: list[str]
    parameters: list[str]
    types: list[str] = field(default_factory=list)  # CUDA C++ only
    launch_bounds: list[str] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)


def folder(language: str) -> Path:
    return compiler.source_path(language, "common").parent


def is_kernel(path: Path) -> bool:
    return path.suffix == ".cu" or path.name.startswith(("attention_", "vector_"))


def stems(language: str) -> list[str]:
    """Of all kernel files, sorted."""
    paths = folder(language).glob(f"*{SUFFIX[language]}")
    return sorted(path.stem for path in paths if is_kernel(path))


def helpers(language: str) -> list[Path]:
    """The headers, or what they are in Python."""
    suffix = ".cuh" if language == "cuda" else ".py"
    paths = sorted(folder(language).glob(f"*{suffix}"))
    return [path for path in paths if not is_kernel(path) and path.name != "__init__.py"]


def read(language: str, stem: str) -> str:
    return compiler.source_path(language, stem).read_text(encoding="utf-8")


def header(language: str, stem: str) -> list[str]:
    """The lines of the comment that a file begins with, without comment marks."""
    text = read(language, stem)
    if language == "numba":
        return ast.get_docstring(ast.parse(text), clean=False).splitlines()
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").removeprefix(" "))
    return lines


def steps(text: str, mark: str) -> list[tuple[str, str]]:
    """Number and words of each numbered comment, with the lines that continue it.

    A line continues a comment if its words are indented further than the number.
    """
    found: list[tuple[str, str]] = []
    open_step = False
    for line in text.splitlines():
        comment = re.match(rf"\s*{re.escape(mark)} ( *)(.*)", line)
        step = comment and re.match(r"(\d[a-z]?(?: \(\w+\))?)\. (.*)", comment[2])
        if step and not comment[1]:
            found.append((step[1], step[2].strip()))
        elif comment and open_step and len(comment[1]) >= 2:
            number, words = found[-1]
            found[-1] = number, f"{words} {comment[2].strip()}"
        else:
            open_step = False
            continue
        open_step = True
    return found


def split(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += c in "(<["
        depth -= c in ")>]"
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [" ".join(part.split()) for part in parts if part.strip()]


def _balanced(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += text[i] == "("
        depth -= text[i] == ")"
        if depth == 0:
            return i
    raise ValueError("a bracket is not closed")


def cuda_entries(stem: str) -> list[Entry]:
    text = read("cuda", stem)
    bare = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    entries, bodies = [], []
    for match in re.finditer(r"template <([^{};]*?)>\s*__global__ void\s*", bare):
        at = match.end()
        bounds: list[str] = []
        if bare.startswith("__launch_bounds__", at):
            opens = bare.index("(", at)
            closes = _balanced(bare, opens)
            # A comparison is no bracket here.
            bounds = [" ".join(x.split()) for x in bare[opens + 1 : closes].split(",")]
            at = closes + 1
        opens = bare.index("(", at)
        closes = _balanced(bare, opens)
        parameters = [part.rpartition(" ") for part in split(bare[opens + 1 : closes])]
        entries.append(
            Entry(
                name=bare[at:opens].strip(),
                constants=[part.split()[-1] for part in split(match[1])],
                parameters=[name for _, _, name in parameters],
                types=[_plain_type(kind) for kind, _, _ in parameters],
                launch_bounds=bounds,
            )
        )
        bodies.append(closes)
    for entry, start, end in zip(entries, bodies, [*bodies[1:], len(text)], strict=True):
        entry.steps = steps(text[start:end], MARK["cuda"])
    return entries


def _plain_type(kind: str) -> str:
    """The type as `launchers` declares it."""
    kind = (
        kind.removeprefix("const ")
        .removeprefix("__grid_constant__ ")
        .replace("acc_t<T>", "Acc")
        .replace(" *", "*")
    )
    return kind.replace("ScoreParams<Acc>", "ScoreParams")


def numba_entries(stem: str) -> list[Entry]:
    text = read("numba", stem)
    entries = []
    for factory in ast.parse(text).body:
        if not isinstance(factory, ast.FunctionDef):
            continue
        kernels = [x for x in factory.body if isinstance(x, ast.FunctionDef) and x.name == "kernel"]
        for kernel in kernels:
            (decorator,) = kernel.decorator_list
            bounds: list[str] = []
            if isinstance(decorator, ast.Call):
                for keyword in decorator.keywords:
                    if keyword.arg == "launch_bounds":
                        value = keyword.value
                        parts = value.elts if isinstance(value, ast.Tuple) else [value]
                        bounds = [ast.unparse(part) for part in parts]
            lines = text.splitlines()[factory.lineno - 1 : factory.end_lineno]
            entries.append(
                Entry(
                    name=factory.name,
                    constants=[arg.arg for arg in factory.args.args],
                    parameters=[arg.arg for arg in kernel.args.args],
                    launch_bounds=bounds,
                    steps=steps("\n".join(lines), MARK["numba"]),
                )
            )
    return entries


def entries(language: str, stem: str) -> list[Entry]:
    return cuda_entries(stem) if language == "cuda" else numba_entries(stem)
