"""What attention looked at: rows of its map from q, k and lse, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from workbench.api import attention
from workbench.vit.images import Picture, Preprocessing, preprocess, resize_and_crop
from workbench.vit.model import Array, array_module, split_patches

# Dark to bright through purple, red and orange, in sRGB. The steps are equal in OKLab lightness,
# from 0.18 to 0.96, so that equal differences of a map look equal, in grey print as well.
COLOURS = np.array(
    [
        (18, 0, 61),
        (55, 0, 98),
        (100, 6, 124),
        (153, 15, 134),
        (208, 40, 108),
        (249, 82, 65),
        (254, 147, 78),
        (255, 199, 113),
        (254, 247, 149),
    ],
    dtype=np.float64,
)

# What the demo sees of a picture: 14 x 14 patches of 16 x 16, the classic ViT's.
PATCH = (16, 16)
PATCH_HEADS = 12
SEEN = Preprocessing(image_size=(224, 224), crop_pct=1.0)
# A patch of the portrait's dark uniform, as (row, col): what it finds is plain to see.
PORTRAIT_QUERY = (11, 4)


def attention_map(
    q: Array,
    k: Array,
    lse: Array,
    rows: int | Sequence[int],
    *,
    scale: float | None = None,
    tile: int = 4096,
) -> Array:
    """Rows of softmax(scale * q k^T), from the lse that `workbench.attention` returned.

    A row of the map is exp(scale * q_row k^T - lse_row): no other row is computed, and of these no
    more than a tile of keys at a time.

    Parameters
    ----------
    q : array (..., heads_q, seqlen_q, head_dim)
        Queries.
    k : array (..., heads_kv, seqlen_k, head_dim)
        Keys; query head h reads key head h // (heads_q // heads_kv).
    lse : array (..., heads_q, seqlen_q)
        Natural logarithm of every row's sum.
    rows : int or sequence of int
        The queries to look at; negative ones count from the end.
    scale : float, optional
        1 / sqrt(head_dim) unless given.
    tile : int
        Keys at a time.

    Returns
    -------
    array (..., heads_q, len(rows), seqlen_k)
        Weights in lse's dtype, which sum to 1 over the keys (to 0 for a row that sees no key). One
        row alone comes without its axis.
    """
    xp = array_module(q)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    chosen = [range(seqlen_q)[row] for row in ([rows] if isinstance(rows, int) else rows)]
    dtype = lse.dtype
    q_rows = q[..., chosen, :].astype(dtype)
    # A row that sees nothing has lse = -inf; its scores less infinity are weights of 0.
    lse_rows = xp.where(xp.isneginf(lse), xp.inf, lse)[..., chosen, None].astype(dtype)
    weights = xp.empty((*q_rows.shape[:-1], seqlen_k), dtype=dtype)
    for start in range(0, seqlen_k, tile):
        part = slice(start, start + tile)
        k_tile = k[..., part, :].astype(dtype)
        if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            k_tile = xp.repeat(k_tile, q.shape[-3] // k.shape[-3], axis=-3)
        scores = (q_rows * dtype.type(scale)) @ k_tile.swapaxes(-1, -2)
        weights[..., part] = xp.exp(scores - lse_rows)
    return weights[..., 0, :] if isinstance(rows, int) else weights


def patch_heads(image: Picture) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A picture's own patches as queries and keys of 12 heads, where no trained model is at hand.

    The picture is resized to 224 x 224 and cut into 14 x 14 patches of 16 x 16 pixels. A patch is a
    vector of 768 numbers; the mean patch is subtracted and the whole is scaled to variance 1. Each
    head gets 64 of the numbers: four rows of the patch in one colour.

    Parameters
    ----------
    image : PIL.Image.Image or numpy.ndarray (height, width[, 3 or 4]) of uint8
        The picture.

    Returns
    -------
    numpy.ndarray (1, 12, 196, 64) of float32
    """
    patches = split_patches(preprocess(image, SEEN), PATCH)
    patches -= patches.mean(axis=1, keepdims=True)
    spread = patches.std()
    if spread > 0:
        patches /= spread
    batch, tokens, dim = patches.shape
    heads = patches.reshape(batch, tokens, PATCH_HEADS, dim // PATCH_HEADS)
    return np.ascontiguousarray(heads.swapaxes(1, 2))


def patch_attention(
    image: Picture,
    query: tuple[int, int] = PORTRAIT_QUERY,
    *,
    backend: str = "auto",
    kernel: str | None = None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Where a picture resembles one of its patches: attention with q = k = v = `patch_heads`.

    Parameters
    ----------
    image : PIL.Image.Image or numpy.ndarray (height, width[, 3 or 4]) of uint8
        The picture.
    query : (int, int), optional
        Row and column of the patch that asks, in the 14 x 14 grid.
    backend, kernel : str, optional
        Passed on to `workbench.attention`.

    Returns
    -------
    numpy.ndarray (14, 14) of float32
        The mean of the heads' weights, which sums to 1.
    """
    rows, cols = (n // p for n, p in zip(SEEN.image_size, PATCH, strict=True))
    _check_query(query, rows, cols)
    q = patch_heads(image)
    _, lse = attention(q, q, q, return_lse=True, backend=backend, kernel=kernel)
    weights = attention_map(q, q, lse, query[0] * cols + query[1])
    seen: np.ndarray[Any, np.dtype[np.float32]] = weights[0].mean(axis=0).reshape(rows, cols)
    return seen


def overlay(
    image: Picture,
    weights: np.ndarray[Any, Any],
    *,
    query: tuple[int, int] | None = None,
    preprocessing: Preprocessing = SEEN,
    size: int = 448,
    beside: bool = False,
) -> Image.Image:
    """Lay an attention map over the picture it came from.

    The picture turns grey and the map's colours lie on it, the more opaque the larger the weight.
    The largest weight is the brightest colour; square roots are shown, so that weights far below
    it are seen too.

    Parameters
    ----------
    image : PIL.Image.Image or numpy.ndarray (height, width[, 3 or 4]) of uint8
        The picture as it was read.
    weights : numpy.ndarray (rows, cols)
        A weight a patch, none negative.
    query : (int, int), optional
        Row and column of the patch that asked; it gets a frame.
    preprocessing : Preprocessing, optional
        How the picture was prepared: only the part that was seen is shown. By default, that of
        `patch_heads`; a model has its own in ``model.preprocessing``.
    size : int
        The longer side of the map in pixels.
    beside : bool
        Put the picture in its own colours to the left of the map.

    Returns
    -------
    PIL.Image.Image
        Mode RGB; ``.save("map.png")`` writes it.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim != 2 or 0 in weights.shape:
        raise ValueError(f"weights must be (rows, cols) and not empty, got {weights.shape}")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise ValueError("weights must be finite and not negative")
    rows, cols = weights.shape
    if query is not None:
        _check_query(query, rows, cols)
    if size < 1:
        raise ValueError(f"size must be positive, got {size}")

    # Cut from the picture at the size shown: what the model saw may be much coarser.
    zoom = size / max(preprocessing.image_size)
    height, width = (max(1, round(side * zoom)) for side in preprocessing.image_size)
    shown = Preprocessing((height, width), preprocessing.crop_pct, preprocessing.interpolation)
    plain = resize_and_crop(image, shown)

    shares = np.sqrt(weights / (weights.max() or 1)).astype(np.float32)
    smooth = Image.fromarray(shares).resize((width, height), Image.Resampling.BICUBIC)
    shares = np.asarray(smooth).clip(0, 1)  # bicubic interpolation overshoots beside a peak
    opacity = (0.35 + 0.5 * shares)[..., None]
    grey = np.asarray(plain.convert("L"), dtype=np.float64)[..., None]
    pixels = (1 - opacity) * grey + opacity * colours(shares)
    panels = [Image.fromarray(pixels.round().astype(np.uint8))]
    if beside:
        panels.insert(0, plain)
    gap = max(1, size // 56)
    sheet = Image.new("RGB", (len(panels) * (width + gap) - gap, height), "white")
    for i, panel in enumerate(panels):
        if query is not None:
            _frame(panel, query, (rows, cols))
        sheet.paste(panel, (i * (width + gap), 0))
    return sheet


def colours(shares: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The colours of numbers from 0 (dark) to 1 (bright).

    Parameters
    ----------
    shares : numpy.ndarray
        Numbers; those outside [0, 1] get the nearest end's colour.

    Returns
    -------
    numpy.ndarray (..., 3)
        sRGB from 0 to 255.
    """
    steps = np.linspace(0, 1, len(COLOURS))
    return np.stack([np.interp(shares, steps, channel) for channel in COLOURS.T], axis=-1)


def _frame(picture: Image.Image, patch: tuple[int, int], grid: tuple[int, int]) -> None:
    """A white frame with a dark edge around one patch, to be seen on any background."""
    (row, col), (rows, cols) = patch, grid
    height, width = picture.height / rows, picture.width / cols
    left, top = round(col * width), round(row * height)
    right, bottom = round((col + 1) * width) - 1, round((row + 1) * height) - 1
    stroke = max(2, round(min(height, width) / 12))
    draw = ImageDraw.Draw(picture)
    edge = (left - 1, top - 1, right + 1, bottom + 1)
    draw.rectangle(edge, outline=(0, 0, 0), width=stroke + 2)
    draw.rectangle((left, top, right, bottom), outline=(255, 255, 255), width=stroke)


def _check_query(query: tuple[int, int], rows: int, cols: int) -> None:
    if not (0 <= query[0] < rows and 0 <= query[1] < cols):
        raise ValueError(f"query {query} lies outside the map of {rows} x {cols} patches")
