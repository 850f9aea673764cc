"""A kernel and its twin, cut into the steps that their comments number.

Every kernel file tells its story in the same numbered comments (``// 4b. s = q k^T, masked`` in
CUDA C++, ``# 4b. s = q k^T, masked`` in Numba). This module cuts both files there and lays the
pieces side by side.
"""

from __future__ import annotations

import importlib.resources
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

HEADER = "What it does"
SETUP = "Before the steps"

_STEP = re.compile(r"^\s*(?://|#)\s+(\d+[a-z]?)((?: \([^)]*\))?)\. (.+?)\s*$")
_SUFFIXES = ("_fwd", "_bwd", "_bwd_wide")
# An entry point starts at the first of these lines in column 0.
_ENTRY = re.compile(r"^(?:template\b|__global__|extern\b|static\b|__device__|@|def |class )")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of lines of one file: its entry point (0, 1, ...), its title and its first line."""

    entry: int
    title: str
    line: int
    source: str


@dataclass(frozen=True, slots=True)
class Pair:
    """The same step in both languages; a side is None where only the other one has it."""

    title: str
    cuda: Piece | None
    numba: Piece | None


def kernel_stems() -> list[str]:
    """List every file stem that is a kernel in either language: ``attention_naive_fwd``."""
    stems = {path.removesuffix(".cu") for path in _names("cuda_src") if path.endswith(".cu")}
    stems |= {
        path.removesuffix(".py")
        for path in _names("numba_kernels")
        if path.startswith(("attention_", "vector_")) and path.endswith(".py")
    }
    return sorted(stems)


def find_stems(name: str) -> list[str]:
    """Find the files of a kernel that is named with or without its ``_fwd`` or ``_bwd``.

    Raises
    ------
    ValueError
        If there is no such kernel; the message lists those there are.
    """
    stems = kernel_stems()
    found = [stem for stem in (name, *(name + suffix for suffix in _SUFFIXES)) if stem in stems]
    if not found:
        raise ValueError(f"there is no kernel {name!r}; there are {', '.join(stems)}")
    return sorted(found, key=lambda stem: "_bwd" in stem)


def read_source(stem: str, language: str) -> str | None:
    """Read a kernel's file, or None where the language (``cuda`` or ``numba``) does not have it."""
    package, ending = {"cuda": ("cuda_src", ".cu"), "numba": ("numba_kernels", ".py")}[language]
    file = importlib.resources.files(package) / (stem + ending)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def read_pairs(stem: str) -> list[Pair]:
    """Read a kernel's two files and pair their pieces."""
    cuda, numba = (read_source(stem, language) for language in ("cuda", "numba"))
    return list(pair(cut(cuda or ""), cut(numba or "")))


def is_step(title: str, step: str) -> bool:
    """Whether a piece's title is that of a step: 4b, or 4 with all its letters."""
    return re.match(rf"{re.escape(step)}(?![0-9])[a-z]?\b", title) is not None


def cut(source: str) -> list[Piece]:
    """Cut a kernel file at its step comments and where a further entry point starts."""
    lines = source.splitlines()
    cuts = [(0, 0, HEADER)]  # (line, entry, title)
    after_header = _header_end(lines)
    cuts.append((after_header, 0, SETUP))
    entry, stepped = 0, False
    for number, line in enumerate(lines[after_header:], after_header):
        if match := _STEP.match(line):
            label, role, words = match.groups()
            cuts.append((number, entry, f"{label}{role}. {words}"))
            stepped = True
        elif stepped and _ENTRY.match(line):
            entry, stepped = entry + 1, False
            cuts.append((_with_comments_above(lines, number), entry, SETUP))

    ends = [start for start, _, _ in cuts[1:]] + [len(lines)]
    pieces = []
    for (start, entry, title), end in zip(cuts, ends, strict=True):
        block = lines[start:end]
        while block and not block[0].strip():
            start, block = start + 1, block[1:]
        text = textwrap.dedent("\n".join(block)).rstrip()
        if text:
            pieces.append(Piece(entry, title, start + 1, text))
    return pieces


def pair(cuda: Iterable[Piece], numba: Iterable[Piece]) -> Iterator[Pair]:
    """Bring the pieces of both languages together, in the order of the CUDA C++ file.

    A title may return in one entry point (a step told once for each role): the first is paired
    with the first, the second with the second.
    """
    waiting = list(numba)
    for left in cuda:
        key = (left.entry, left.title)
        index = next((i for i, p in enumerate(waiting) if (p.entry, p.title) == key), None)
        if index is None:
            yield Pair(left.title, left, None)
            continue
        for extra in waiting[:index]:
            yield Pair(extra.title, None, extra)
        yield Pair(left.title, left, waiting[index])
        waiting = waiting[index + 1 :]
    for extra in waiting:
        yield Pair(extra.title, None, extra)


def _names(package: str) -> list[str]:
    return [entry.name for entry in importlib.resources.files(package).iterdir()]


def _header_end(lines: list[str]) -> int:
    """Count the lines of the comment (or docstring) that the file opens with."""
    quotes = '"""'
    if lines and lines[0].startswith(quotes):
        if lines[0].count(quotes) > 1:
            return 1
        return next((n + 1 for n, line in enumerate(lines[1:], 1) if quotes in line), len(lines))
    return next((n for n, line in enumerate(lines) if not line.startswith("//")), len(lines))


def _with_comments_above(lines: list[str], number: int) -> int:
    while number > 0 and lines[number - 1].startswith(("//", "#", "@")):
        number -= 1
    return number
