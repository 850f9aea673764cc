"""What attention looked at: rows of its map from q, k and lse, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from workbench.api import attention, attention_weights
from workbench.arrays import array_module
from workbench.problem import Array
from workbench.vit.images import Picture, Preprocessing, preprocess, resize_and_crop
from workbench.vit.model import Result, split_patches

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
SEEN = Preprocessing((224, 224))
# A patch of the portrait's dark uniform, as (row, col): what it finds is plain to see.
PORTRAIT_QUERY = (11, 4)


def attention_map(
    result: Result,
    query: tuple[int, int] | None = None,
    *,
    block: int = -1,
    reduce: str | None = None,
) -> Array:
    """What one token looked at, as a picture of the patches.

    Only this token's row of the attention matrix is computed (`workbench.attention_weights`). What
    went to the tokens before the patches is left out, so a map sums to less than 1 there.

    Parameters
    ----------
    result : Result
        Of a model that was called with the block in ``return_attention``.
    query : (int, int), optional
        Row and column of the patch that asks. By default the class token asks or, in a model
        without one, the probe that pools the patches.
    block : int
        Which block to look into; -1 is the last. The probe comes after all of them.
    reduce : {"mean"}, optional
        The mean of the heads instead of every head.

    Returns
    -------
    array (batch, heads, rows, cols), or (batch, rows, cols) with ``reduce="mean"``
    """
    q, k, lse, row = _asked(result, query, block)
    weights = attention_weights(q, k, lse, rows=row, reduce=reduce)
    return _on_patches(result, weights, k.shape[2])


def rollout(
    result: Result,
    query: tuple[int, int] | None = None,
    *,
    residual: float = 0.5,
    tile: int = 256,
) -> Array:
    """How much of every patch arrived in one token through all blocks: attention rollout.

    With a block's attention A, the mean of its heads, and the residual connection as an identity of
    the share ``residual``, the blocks mix tokens by the product of all
    ``(1 - residual) A + residual I`` (Abnar and Zuidema, *Quantifying Attention Flow in
    Transformers*, 2020, section 3). One row of the product is wanted, so a row is multiplied by one
    block after the other, from the last to the first, and A is computed a tile of rows at a time.

    Parameters
    ----------
    result : Result
        Of a model that was called with all of its blocks in ``return_attention``.
    query : (int, int), optional
        Row and column of the patch that asks; by default the class token or, in a model without
        one, the probe that pools the patches.
    residual : float
        From 0 to 1; the authors take a half.
    tile : int
        Rows of A at a time.

    Returns
    -------
    array (batch, rows, cols)
    """
    if not 0 <= residual <= 1:
        raise ValueError(f"residual must be from 0 to 1, got {residual}")
    if tile < 1:
        raise ValueError(f"tile must be positive, got {tile}")
    blocks = sorted(result.attention)
    if blocks != list(range(len(blocks))) or result.depth != len(blocks):
        raise ValueError(
            f"rollout needs return_attention=range({result.depth}), the result has blocks {blocks}"
        )
    if not blocks:
        raise ValueError("rollout needs a model with blocks")
    q, k, lse, row = _asked(result, query, -1)
    flow = attention_weights(q, k, lse, rows=row, reduce="mean")
    if result.pool_attention is not None and query is None and not result.has_class_token:
        # The probe looks at the patches through the blocks, and has no residual of its own.
        before = array_module(flow).zeros_like(flow, shape=(len(flow), result.tokens.shape[1]))
        before[:, result.tokens.shape[1] - flow.shape[1] :] = flow
        flow = before
    else:
        blocks = blocks[:-1]
        flow = (1 - residual) * flow
        flow[:, row] += residual
    for block in reversed(blocks):
        q, k, lse = result.attention[block]
        mixed = residual * flow
        for start in range(0, q.shape[2], tile):
            rows = slice(start, min(start + tile, q.shape[2]))
            weights = attention_weights(q, k, lse, rows=rows, reduce="mean")
            mixed += (1 - residual) * (flow[:, None, rows] @ weights)[:, 0]
        flow = mixed
    return _on_patches(result, flow, flow.shape[1])


def keep_mass(weights: Array, mass: float) -> Array:
    """The largest weights of every map that together hold a share of it; all others become 0.

    The thresholded maps of Caron et al., *Emerging Properties in Self-Supervised Vision
    Transformers* (DINO, 2021), figure 1, have a mass of 0.6.

    Parameters
    ----------
    weights : array (..., rows, cols)
        Maps, none negative.
    mass : float
        Above 0 and at most 1.

    Returns
    -------
    array (..., rows, cols)
    """
    if not 0 < mass <= 1:
        raise ValueError(f"mass must be above 0 and at most 1, got {mass}")
    xp = array_module(weights)
    flat = weights.reshape(*weights.shape[:-2], -1)
    order = xp.argsort(-flat, axis=-1)
    largest = xp.take_along_axis(flat, order, axis=-1)
    before = xp.cumsum(largest, axis=-1) - largest
    kept = before < mass * largest.sum(axis=-1, keepdims=True)
    masked = xp.empty_like(flat)
    xp.put_along_axis(masked, order, xp.where(kept, largest, 0), axis=-1)
    return masked.reshape(weights.shape)


def _asked(
    result: Result, query: tuple[int, int] | None, block: int
) -> tuple[Array, Array, Array, int]:
    """q, k and lse of the attention that was asked for, and its row."""
    if query is None and not result.has_class_token:
        if result.pool_attention is None:
            raise ValueError(
                "the model has no class token and no probe, or was called without "
                "return_attention; name the patch that asks as query=(row, col)"
            )
        return (*result.pool_attention, 0)
    number = range(result.depth)[block]
    if number not in result.attention:
        raise ValueError(
            f"block {number} is not in the result: call the model with return_attention=[{block}]"
        )
    row = 0
    if query is not None:
        rows, cols = result.grid
        _check_query(query, rows, cols)
        row = result.prefix_tokens + query[0] * cols + query[1]
    return (*result.attention[number], row)


def _on_patches(result: Result, weights: Array, tokens: int) -> Array:
    """Weights of tokens, the patches last, as weights of a grid."""
    rows, cols = result.grid
    return weights[..., tokens - rows * cols :].reshape(*weights.shape[:-1], rows, cols)


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
    weights = attention_weights(q, q, lse, rows=query[0] * cols + query[1], reduce="mean")
    seen: np.ndarray[Any, np.dtype[np.float32]] = weights[0].reshape(rows, cols)
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
    colour = replace(preprocessing.for_size((height, width)), mean=(0.5,) * 3, std=(0.5,) * 3)
    plain = resize_and_crop(image, colour)

    shares = np.sqrt(weights / (weights.max() or 1)).astype(np.float32)
    smooth = Image.fromarray(shares).resize((width, height), Image.Resampling.BICUBIC)
    shares = np.asarray(smooth).clip(0, 1)  # bicubic interpolation overshoots beside a peak
    opacity = (0.35 + 0.5 * shares)[..., None]
    grey = np.asarray(plain.convert("L"), dtype=np.float64)[..., None]
    pixels = (1 - opacity) * grey + opacity * colours(shares)
    panels = [Image.fromarray(pixels.round().astype(np.uint8))]
    if beside:
        panels.insert(0, plain)
    if query is not None:
        for panel in panels:
            _frame(panel, query, (rows, cols))
    return contact_sheet(panels, len(panels))


def contact_sheet(panels: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Pictures of one size side by side, row by row: the maps of all heads, say.

    Parameters
    ----------
    panels : sequence of PIL.Image.Image
        At least one.
    columns : int, optional
        As many as make the sheet about square, unless given.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, on white.
    """
    if not panels or len({panel.size for panel in panels}) != 1:
        raise ValueError(f"panels must be pictures of one size, got {[p.size for p in panels]}")
    columns = columns or math.ceil(math.sqrt(len(panels)))
    if columns < 1:
        raise ValueError(f"columns must be positive, got {columns}")
    columns = min(columns, len(panels))
    width, height = panels[0].size
    gap = max(1, max(width, height) // 56)
    lines = -(-len(panels) // columns)
    size = (columns * (width + gap) - gap, lines * (height + gap) - gap)
    sheet = Image.new("RGB", size, "white")
    for i, panel in enumerate(panels):
        sheet.paste(panel, (i % columns * (width + gap), i // columns * (height + gap)))
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
