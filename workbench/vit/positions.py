"""Position embeddings for images of another size, resized as each library resizes them.

Every way is linear along the rows and along the columns: two small matrices, written down here in
float64 from the definition of the filter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# How a library resizes, and its filter: cubic convolution (Keys 1981) with the slope a, whose reach
# grows with the step where antialias is on, or a straight line between the outermost samples.
METHODS = {
    "bicubic": "a = -0.75, no antialias: torch's interpolate, as Hugging Face calls it",
    "bicubic-antialias": "a = -0.5, antialias: torch's interpolate, as timm calls it",
    "linear-corners": "the corners keep their places: SciPy's zoom of order 1, as Google calls it",
}


def resize_positions(
    positions: np.ndarray[Any, Any], grid: tuple[int, int], method: str
) -> np.ndarray[Any, Any]:
    """Position embeddings for another number of rows and columns.

    Parameters
    ----------
    positions : numpy.ndarray (rows, cols, dim)
        As they were learned.
    grid : (int, int)
        Rows and columns that are wanted.
    method : str
        A key of `METHODS`.

    Returns
    -------
    numpy.ndarray (rows, cols, dim)
        In the dtype of `positions`.
    """
    if positions.shape[:2] == grid:
        return positions
    rows, cols = (
        interpolation(old, new, method) for old, new in zip(positions.shape[:2], grid, strict=True)
    )
    resized = np.einsum("ij,jkd,lk->ild", rows, positions.astype(np.float64), cols, optimize=True)
    result: np.ndarray[Any, Any] = resized.astype(positions.dtype)
    return result


def interpolation(old: int, new: int, method: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The matrix (new, old) that resamples one axis."""
    sample = np.arange(old)
    if method == "linear-corners":
        place = np.arange(new) * ((old - 1) / max(new - 1, 1))
        straight: np.ndarray[Any, Any] = np.maximum(0, 1 - np.abs(place[:, None] - sample))
        return straight
    step = old / new
    place = (np.arange(new) + 0.5) * step - 0.5
    if method == "bicubic-antialias":
        # Samples beyond the edge are left out, and the rest weighs the more.
        weights = _cubic((sample - place[:, None]) / max(step, 1), -0.5)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights
    # Samples beyond the edge are the edge's.
    near = np.floor(place).astype(int)[:, None] + np.arange(-1, 3)
    matrix = np.zeros((new, old))
    weights = _cubic(near - place[:, None], -0.75)
    np.add.at(matrix, (np.arange(new)[:, None], near.clip(0, old - 1)), weights)
    return matrix


def _cubic(x: np.ndarray[Any, Any], a: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The kernel of cubic convolution: 1 at 0, 0 at every other integer."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
