"""Cutting kernels and their twins into steps."""

from __future__ import annotations

import pytest

from workbench import show

CUDA = """\
// A kernel of two entries.
// It does nothing.
#include "common.cuh"

template <typename T>
__global__ void made_up_dkdv(T* out) {
  // 1. Which rows are ours
  int row = 0;
  // 4 (producer). Walk over the tiles
  // 4a. Load the tile
  out[row] = 0;
}

// The mirror image.
template <typename T>
__global__ void made_up_dq(T* out) {
  // 1. Which rows are ours
  int row = 1;
}
"""
NUMBA = '''\
"""A kernel of two entries.

It does nothing.
"""

from numba import cuda


def made_up_dkdv(T):
    @cuda.jit
    def kernel(out):
        # 1. Which rows are ours
        row = 0
        # 4 (producer). Walk over the tiles
        # 4a. Load the tile
        out[row] = 0

    return kernel


# The mirror image.
def made_up_dq(T):
    @cuda.jit
    def kernel(out):
        # 1. Which rows are ours
        row = 1

    return kernel
'''
TITLES = [
    (0, show.HEADER),
    (0, show.SETUP),
    (0, "1. Which rows are ours"),
    (0, "4 (producer). Walk over the tiles"),
    (0, "4a. Load the tile"),
    (1, show.SETUP),
    (1, "1. Which rows are ours"),
]


@pytest.mark.parametrize("source", [CUDA, NUMBA], ids=["cuda", "numba"])
def test_a_file_is_cut_at_steps_and_entries(source: str) -> None:
    pieces = show.cut(source)
    assert [(piece.entry, piece.title) for piece in pieces] == TITLES
    lines = source.splitlines()
    for piece in pieces:
        # Every piece starts where it says.
        assert lines[piece.line - 1].strip() == piece.source.splitlines()[0].strip()
    kept = "".join("".join(piece.source.split()) for piece in pieces)
    assert kept == "".join(source.split()), "a line was lost"


def test_the_comment_above_an_entry_goes_with_it() -> None:
    assert show.cut(CUDA)[5].source.startswith("// The mirror image.")
    assert show.cut(NUMBA)[5].source.startswith("# The mirror image.")


def test_pairs_are_complete_where_the_twins_agree() -> None:
    pairs = list(show.pair(show.cut(CUDA), show.cut(NUMBA)))
    assert [pair.title for pair in pairs] == [title for _, title in TITLES]
    assert all(pair.cuda and pair.numba for pair in pairs)


def test_a_step_of_one_language_stands_alone_and_in_its_place() -> None:
    more = NUMBA.replace("        # 4a.", "        # 3. Only here\n        # 4a.")
    pairs = list(show.pair(show.cut(CUDA), show.cut(more)))
    (alone,) = [pair for pair in pairs if pair.cuda is None]
    assert alone.title == "3. Only here"
    assert pairs[pairs.index(alone) + 1].title == "4a. Load the tile"
    assert len(pairs) == len(TITLES) + 1


@pytest.mark.parametrize(
    ("step", "title", "same"),
    [
        ("4", "4 (producer). Walk", True),
        ("4", "4b. s = q k^T", True),
        ("4b", "4b. s = q k^T", True),
        ("4b", "4a. Load", False),
        ("1", "10. Last", False),
        ("1", show.SETUP, False),
    ],
)
def test_is_step(step: str, title: str, same: bool) -> None:
    assert show.is_step(title, step) is same


@pytest.mark.parametrize("stem", show.kernel_stems())
def test_every_kernel_can_be_shown(stem: str) -> None:
    pairs = show.read_pairs(stem)
    titles = [pair.title for pair in pairs]
    assert titles[:2] == [show.HEADER, show.SETUP]
    assert any(show.is_step(title, "1") for title in titles)
    assert all(pair.cuda and pair.numba for pair in pairs), titles


def test_a_kernel_is_found_with_and_without_its_direction() -> None:
    assert show.find_stems("attention_naive") == ["attention_naive_fwd", "attention_naive_bwd"]
    assert show.find_stems("attention_naive_bwd") == ["attention_naive_bwd"]
    assert show.find_stems("vector_add") == ["vector_add"]
    with pytest.raises(ValueError, match=r"no kernel 'nothing'.*vector_add"):
        show.find_stems("nothing")
