"""Attention of small problems: the whole matrix of scores in NumPy, nothing to compile.

The contract is that of the tiled kernels: what nobody sees is selected away, never multiplied by 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from workbench.problem import Arrays, HostArray, Problem

# What is hidden may overflow before it is selected away; the log of an empty row's sum is -inf.
_quiet = np.errstate(all="ignore")


@_quiet
def forward(problem: Problem, arrays: Arrays) -> None:
    """Fill ``arrays.out`` and ``arrays.lse``."""
    s, _ = _scores(problem, arrays)
    seen = s != -np.inf
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    top[top == -np.inf] = 0  # a row that sees nothing: (-inf) - (-inf) would be NaN
    s -= top
    p = np.exp(s, out=s)
    total = p.sum(axis=-1, keepdims=True)
    arrays.lse[...] = (top + np.log(total))[..., 0]
    total[total == 0] = 1
    v = arrays.v.astype(p.dtype)
    finite = np.isfinite(v)
    out = _times_keys(p, np.where(finite, v, 0))
    if not finite.all():
        rest = np.repeat(np.where(finite, 0, v), problem.heads_q // problem.heads_kv, axis=1)
        for j in np.flatnonzero(rest.any(axis=(0, 1, 3))):
            meets = seen[..., j, None] & (rest[:, :, None, j] != 0)
            out += np.where(meets, p[..., j, None] * rest[:, :, None, j], 0)
    arrays.out[...] = out / total


@_quiet
def backward(problem: Problem, arrays: Arrays) -> None:
    """Fill ``arrays.dq``, ``dk`` and ``dv``, and ``dbias`` if there is one."""
    s, slope = _scores(problem, arrays)
    hidden = s == -np.inf
    q, k, v, dout, out = (
        x.astype(s.dtype) for x in (arrays.q, arrays.k, arrays.v, arrays.dout, arrays.out)
    )
    lse = arrays.lse[..., None]
    s -= np.where(lse == -np.inf, np.inf, lse)
    p = np.exp(s, out=s)
    p[hidden] = 0

    delta = (dout * out).sum(axis=-1, keepdims=True)
    if arrays.dlse is not None:
        delta -= arrays.dlse[..., None]
    ds = _times_keys(dout, v.swapaxes(-1, -2))
    ds -= delta
    ds *= p
    ds[hidden] = 0
    if arrays.dbias is not None:
        broadcast = [a for a in range(4) if arrays.dbias.shape[a] != ds.shape[a]]
        arrays.dbias[...] = ds.sum(axis=tuple(broadcast), keepdims=True)
    if slope is not None:
        ds *= slope
        ds[hidden] = 0

    # Rows past a length may hold NaN, which these products would meet, times 0.
    blind = hidden.all(axis=-1)
    q[blind], dout[blind] = 0, 0
    grouped = hidden.reshape(problem.batch, problem.heads_kv, -1, problem.seqlen_k)
    k[grouped.all(axis=-2)] = 0
    scale = s.dtype.type(problem.scale)
    arrays.dq[...] = _times_keys(ds, k) * scale
    arrays.dk[...] = _times_queries(ds, q, problem.heads_kv) * scale
    arrays.dv[...] = _times_queries(p, dout, problem.heads_kv)


def _scores(problem: Problem, arrays: Arrays) -> tuple[HostArray, HostArray | None]:
    """Scores in the accumulator's dtype, -inf where hidden, and the slope of the cap, if any."""
    real = np.dtype(problem.acc_dtype)
    s = _times_keys(arrays.q.astype(real), arrays.k.astype(real).swapaxes(-1, -2))
    s *= real.type(problem.scale)
    slope = None
    if problem.softcap:
        softcap = real.type(problem.softcap)
        tanh = np.tanh(s / softcap)
        s, slope = softcap * tanh, 1 - tanh * tanh
    if arrays.bias is not None:
        s = np.where(arrays.bias == -np.inf, -np.inf, s + arrays.bias)
    visible = _visible(problem, arrays)
    if arrays.mask is not None:
        visible = arrays.mask if visible is None else visible & arrays.mask
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    return s, slope


def _visible(problem: Problem, arrays: Arrays) -> HostArray | None:
    """Which keys causal, windows and lengths show; None where they show all."""
    if not problem.has_range:
        return None

    def lengths(given: HostArray | None, seqlen: int) -> HostArray:
        full = np.full((problem.batch, 1, 1, 1), seqlen)
        return full if given is None else np.minimum(given.reshape(full.shape), full)

    kv_length = lengths(arrays.kv_lengths, problem.seqlen_k)
    q_length = lengths(arrays.q_lengths, problem.seqlen_q)
    i, j = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_k)
    position = i + (0 if problem.top_left else kv_length - q_length)
    visible: HostArray = (i < q_length) & (j < kv_length)
    if problem.window_left is not None:
        visible &= position - problem.window_left <= j
    if problem.window_right is not None:
        visible &= j <= position + problem.window_right
    return visible


def _times_keys(a: HostArray, x: HostArray) -> HostArray:
    """``a @ x``, where x has one head for every group of a's heads."""
    batch, heads_q, rows, inner = a.shape
    product: HostArray = a.reshape(batch, x.shape[1], -1, inner) @ x
    return product.reshape(batch, heads_q, rows, x.shape[3])


def _times_queries(a: HostArray, x: HostArray, heads_kv: int) -> HostArray:
    """``a^T @ x``, summed over the query heads of each key head."""
    batch = a.shape[0]
    a = a.reshape(batch, heads_kv, -1, a.shape[3])
    product: HostArray = a.swapaxes(-1, -2) @ x.reshape(batch, heads_kv, -1, x.shape[3])
    return product
