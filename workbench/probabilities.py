"""Chosen rows of the attention matrix, from q, k and lse: what `attention` never writes down.

A row is p = exp(s - lse) with the scores s of one query. Nothing but the rows that were asked for
is computed, a tile of keys at a time, on NumPy and CuPy arrays alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.arrays import array_module
from workbench.problem import DTYPES, Array, Arrays, Problem

TILE_ELEMENTS = 1 << 22  # of scores at a time: they and their temporaries stay below 100 MB


# What is hidden may overflow before it is selected away.
@np.errstate(all="ignore")
def weights(
    problem: Problem, arrays: Arrays, rows: np.ndarray[Any, Any], mean_of_heads: bool
) -> Array:
    """Rows of the attention matrix of a checked call.

    Parameters
    ----------
    problem, arrays
        Of the call; ``arrays.out`` and ``v`` are not looked at.
    rows : numpy.ndarray of int
        The queries to look at, each from 0 to seqlen_q - 1.
    mean_of_heads : bool
        Whether to return the mean over the heads instead of every head.

    Returns
    -------
    array (batch, heads_q, len(rows), seqlen_k), or (batch, len(rows), seqlen_k)
        In the dtype of lse.
    """
    xp = array_module(arrays.q)
    real = DTYPES[problem.acc_dtype]
    batch, heads, heads_kv = problem.batch, problem.heads_q, problem.heads_kv
    index = _as_slice(rows)
    rows_of_head = heads // max(1, heads_kv) * len(rows)  # the queries that read one key head
    q = arrays.q[:, :, index].astype(real)
    q = q.reshape(batch, heads_kv, rows_of_head, problem.head_dim)
    lse = arrays.lse[:, :, index, None]
    blind = lse == -xp.inf  # rows that see no key, and may hold anything
    shape = (batch, len(rows), problem.seqlen_k)
    result = xp.empty(shape if mean_of_heads else (batch, heads, *shape[1:]), dtype=real)
    step = max(1, TILE_ELEMENTS // max(1, batch * heads * len(rows)))
    for start in range(0, problem.seqlen_k, step):
        tile = slice(start, min(start + step, problem.seqlen_k))
        k = arrays.k[:, :, tile].astype(real).swapaxes(-1, -2)
        s = (q @ k).reshape(batch, heads, len(rows), tile.stop - tile.start)
        s *= real.type(problem.scale)
        if problem.softcap:
            s = xp.tanh(s / real.type(problem.softcap)) * real.type(problem.softcap)
        hidden = [blind, *_hidden(problem, arrays, rows, tile)]
        if arrays.bias is not None:
            bias = arrays.bias[:, :, index, tile]
            s += bias
            hidden.append(bias == -xp.inf)
        if arrays.mask is not None:
            hidden.append(~arrays.mask[:, :, index, tile])
        p = xp.exp(s - lse)
        for which in hidden:
            p = xp.where(which, 0, p)
        result[..., tile] = p.mean(axis=1) if mean_of_heads else p
    return result


def _as_slice(rows: np.ndarray[Any, Any]) -> Any:
    """An index for the rows that makes a view where they follow each other."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows.tolist()


def _hidden(
    problem: Problem, arrays: Arrays, rows: np.ndarray[Any, Any], tile: slice
) -> list[Array]:
    """Which keys of a tile the rows do not see for their position, broadcastable to the scores."""
    if not problem.has_range:
        return []
    xp = array_module(arrays.q)
    i, j = xp.asarray(rows)[:, None], xp.arange(tile.start, tile.stop)

    def lengths(given: Array | None, seqlen: int) -> Array:
        full = xp.full((problem.batch, 1, 1, 1), seqlen)
        return full if given is None else given.reshape(full.shape).clip(0, seqlen)

    kv_length = lengths(arrays.kv_lengths, problem.seqlen_k)
    position = i
    if not problem.top_left:
        position = i + kv_length - lengths(arrays.q_lengths, problem.seqlen_q)
    hidden = [j >= kv_length]
    if problem.window_left is not None:
        hidden.append(j < position - problem.window_left)
    if problem.window_right is not None:
        hidden.append(j > position + problem.window_right)
    return hidden
