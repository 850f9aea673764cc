"""Attention in float64, as the formula reads: the oracle of every other backend.

    s   = scale * q k^T                  what query i thinks of key j
    s   = softcap * tanh(s / softcap)    if there is a cap
    s   = s + bias                       if there is a bias
    s   = -inf                           where query i does not see key j
    p   = softmax(s)                     exp(s) / sum(exp(s)), and lse = log(sum(exp(s)))
    out = p v

There are no tiles and no tricks here: the whole matrix of scores is in memory. Two things are done
with care, because every kernel is measured against them:

- What a query does not see is *selected* away and never multiplied by zero: 0 x NaN is NaN, and
  memory past a length may hold anything.
- A query that sees no key has out = 0, lse = -inf and gradients of exactly 0.

`forward` and `backward` are the pure functions that tests call. The four functions at the end are
the backend ``"reference"``: they fill the outputs of a checked call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import expit

if TYPE_CHECKING:
    from workbench.problem import Arrays, HostArray, Problem

# Hidden scores may overflow, or multiply inf by 0, before they are selected away: no warning for
# those. The logarithm of an empty row's sum, 0, is the -inf that we want.
_quiet = np.errstate(all="ignore")


# ----------------------------------------------------------------------------------- the formula


@_quiet
def forward(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    visible: HostArray | None = None,
    bias: HostArray | None = None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[HostArray, HostArray]:
    """Attention of (batch, heads, seqlen, head_dim) arrays in float64.

    Parameters
    ----------
    q, k, v : ndarray
        Any floating dtype; heads_q is a multiple of heads_kv, and head_dim_v is free.
    visible : ndarray of bool, optional
        Which keys a query sees, broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
    bias : ndarray, optional
        Added to the scores, broadcastable likewise; -inf hides a key as `visible` does.
    scale, softcap : float
        Factor and cap (0 is off) of the scores.

    Returns
    -------
    out, lse : ndarray
        (batch, heads_q, seqlen_q, head_dim_v) and (batch, heads_q, seqlen_q).
    """
    q, k, v = _float64(q, k, v)
    s, _ = _scores(q, _repeat_heads(k, q), visible, bias, scale, softcap)
    p, lse = _softmax(s)
    return _select_matmul(p, _seen(s), _repeat_heads(v, q)), lse


@_quiet
def backward(
    dout: HostArray,
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    visible: HostArray | None = None,
    bias: HostArray | None = None,
    scale: float,
    softcap: float = 0.0,
    dlse: HostArray | None = None,
    out: HostArray | None = None,
    lse: HostArray | None = None,
) -> tuple[HostArray, HostArray, HostArray, HostArray]:
    """Gradients of a loss through `forward`, given its gradient `dout` (and `dlse`) at the results.

    Parameters
    ----------
    dout : ndarray
        d loss / d out, (batch, heads_q, seqlen_q, head_dim_v).
    q, k, v, visible, bias, scale, softcap
        As in `forward`.
    dlse : ndarray, optional
        d loss / d lse, (batch, heads_q, seqlen_q).
    out, lse : ndarray, optional
        Results over more keys than these, if k and v are one part of several (`merge_attention`);
        left out, they are the results over k and v.

    Returns
    -------
    dq, dk, dv, ds : ndarray
        The last, (batch, heads_q, seqlen_q, seqlen_k), is the gradient of the scores after the cap,
        which is that of the bias before it is summed over the axes that it was broadcast along.
    """
    dout, q, k, v = _float64(dout, q, k, v)
    heads_kv = k.shape[1]
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    s, cap_slope = _scores(q, k, visible, bias, scale, softcap)
    seen = _seen(s)
    p, own_lse = _softmax(s)
    if lse is not None:
        p = np.where(seen, p * _share(own_lse, lse)[..., None], 0.0)
    out = _select_matmul(p, seen, v) if out is None else np.asarray(out, dtype=np.float64)

    # out = sum_j p_j v_j and dp_j / ds_l = p_j (delta_jl - p_l), hence
    # ds_j = p_j (dp_j - sum_l p_l dp_l), and that sum is dout . out. Since d lse / d s_j = p_j, the
    # gradient at lse joins it.
    delta = (dout * out).sum(axis=-1)
    if dlse is not None:
        delta = delta - dlse
    dp = dout @ v.swapaxes(-1, -2)
    ds = np.where(seen, p * (dp - delta[..., None]), 0.0)
    draw = np.where(seen, ds * cap_slope * scale, 0.0)  # gradient of q k^T itself

    p_t, draw_t, seen_t = p.swapaxes(-1, -2), draw.swapaxes(-1, -2), seen.swapaxes(-1, -2)
    dq = _select_matmul(draw, seen, k)
    dk = _sum_heads(_select_matmul(draw_t, seen_t, q), heads_kv)
    dv = _sum_heads(_select_matmul(p_t, seen_t, dout), heads_kv)
    return dq, dk, dv, ds


def visible(problem: Problem, arrays: Arrays) -> HostArray:
    """Which keys each query sees: causal, window, lengths and mask together.

    Returns
    -------
    ndarray of bool
        Broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
    """
    q_length = _lengths(arrays.q_lengths, problem.seqlen_q)
    kv_length = _lengths(arrays.kv_lengths, problem.seqlen_k)
    row = np.arange(problem.seqlen_q)[:, None]
    col = np.arange(problem.seqlen_k)
    # The last query stands at the last key, or (top left) the first query at the first key.
    position = row if problem.top_left else row + (kv_length - q_length)
    seen: HostArray = (row < q_length) & (col < kv_length)
    if problem.window_left is not None:
        seen = seen & (col >= position - problem.window_left)
    if problem.window_right is not None:
        seen = seen & (col <= position + problem.window_right)
    return seen if arrays.mask is None else seen & arrays.mask


# ------------------------------------------------------------------------------------- its parts


def _scores(
    q: HostArray,
    k: HostArray,
    visible: HostArray | None,
    bias: HostArray | None,
    scale: float,
    softcap: float,
) -> tuple[HostArray, HostArray | float]:
    """Scores, -inf where hidden, and the slope of the cap at each of them."""
    s = scale * (q @ k.swapaxes(-1, -2))
    cap_slope: HostArray | float = 1.0
    if softcap > 0:
        tanh = np.tanh(s / softcap)
        s, cap_slope = softcap * tanh, 1.0 - tanh**2
    if bias is not None:
        s = np.where(np.isneginf(bias), -np.inf, s + bias)  # a NaN score cannot shine through -inf
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    return s, cap_slope


def _seen(s: HostArray) -> HostArray:
    """Whether a key takes part in a query's softmax; a NaN score does."""
    return ~np.isneginf(s)


def _softmax(s: HostArray) -> tuple[HostArray, HostArray]:
    """Weights p and lse of each row; of a row without keys, 0 and -inf."""
    row_max = s.max(axis=-1, keepdims=True, initial=-np.inf)
    row_max = np.where(np.isneginf(row_max), 0.0, row_max)  # (-inf) - (-inf) would be NaN
    weights = np.exp(s - row_max)
    row_sum = weights.sum(axis=-1, keepdims=True)
    lse = (row_max + np.log(row_sum))[..., 0]
    # Selected, not just divided: in a row with a NaN, and in one without keys, that gives NaN.
    return np.where(_seen(s), weights / row_sum, 0.0), lse


def _share(own_lse: HostArray, lse: HostArray) -> HostArray:
    """The part, 0 to 1, of a merged softmax's denominator that these keys hold.

    Our lse is rounded as the given one was: without a merge the two are equal, and the part is 1
    whatever a lse of float32 can resolve.
    """
    ours = own_lse.astype(lse.dtype).astype(np.float64)
    return np.where(np.isneginf(lse), 0.0, np.exp(ours - lse))


def _select_matmul(weights: HostArray, seen: HostArray, x: HostArray) -> HostArray:
    """``weights @ x``, where only seen entries of x count: 0 x NaN does not join the sum."""
    finite = np.isfinite(x)
    total: HostArray = weights @ np.where(finite, x, 0.0)
    rest = np.where(finite, 0.0, x)  # NaN and inf, and 0 elsewhere
    for j in np.flatnonzero(rest.any(axis=(0, 1, 3))):
        total += np.where(seen[..., j, None], weights[..., j, None] * rest[:, :, None, j], 0.0)
    return total


def _float64(*arrays: HostArray) -> tuple[HostArray, ...]:
    return tuple(np.asarray(x, dtype=np.float64) for x in arrays)


def _repeat_heads(x: HostArray, q: HostArray) -> HostArray:
    """A key head for every query head: head h reads key head h // (heads_q // heads_kv)."""
    return np.repeat(x, q.shape[1] // max(x.shape[1], 1), axis=1)


def _sum_heads(dx: HostArray, heads_kv: int) -> HostArray:
    """The reverse: what all query heads of a group send to their key head."""
    batch, heads_q, seqlen, head_dim = dx.shape
    group = heads_q // max(heads_kv, 1)
    total: HostArray = dx.reshape(batch, heads_kv, group, seqlen, head_dim).sum(axis=2)
    return total


def _lengths(lengths: HostArray | None, seqlen: int) -> HostArray:
    """Lengths as (batch, 1, 1, 1), never past the array; (1, 1, 1, 1) where all are `seqlen`."""
    given: HostArray = np.asarray([seqlen]) if lengths is None else np.clip(lengths, 0, seqlen)
    return given.astype(np.int64).reshape(-1, 1, 1, 1)


# ----------------------------------------------------------------------------------- the backend


@_quiet
def attention(problem: Problem, arrays: Arrays) -> None:
    """Fill ``arrays.out`` and ``arrays.lse``."""
    arrays.out[...], arrays.lse[...] = forward(
        arrays.q,
        arrays.k,
        arrays.v,
        visible=visible(problem, arrays),
        bias=arrays.bias,
        scale=problem.scale,
        softcap=problem.softcap,
    )


@_quiet
def attention_backward(problem: Problem, arrays: Arrays) -> None:
    """Fill ``arrays.dq``, ``dk`` and ``dv``, and ``dbias`` if there is one."""
    arrays.dq[...], arrays.dk[...], arrays.dv[...], ds = backward(
        arrays.dout,
        arrays.q,
        arrays.k,
        arrays.v,
        visible=visible(problem, arrays),
        bias=arrays.bias,
        scale=problem.scale,
        softcap=problem.softcap,
        dlse=arrays.dlse,
        out=arrays.out,
        lse=arrays.lse,
    )
    if arrays.dbias is not None:
        broadcast = [a for a in range(4) if arrays.dbias.shape[a] != ds.shape[a]]
        arrays.dbias[...] = ds.sum(axis=tuple(broadcast), keepdims=True)


@_quiet
def vector_add(a: HostArray, b: HostArray, out: HostArray) -> None:
    """Fill `out` with a + b."""
    out[...] = a.astype(np.float64) + b.astype(np.float64)


@_quiet
def merge_attention(
    outs: Sequence[HostArray], lses: Sequence[HostArray], out: HostArray, lse: HostArray
) -> None:
    """Fill `out` and `lse` with attention over all keys, from results over parts of them."""
    total, total_lse = _float64(outs[0], lses[0])
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        part, part_lse = _float64(part, part_lse)
        # expit(a - b) = exp(a) / (exp(a) + exp(b)): the part of the keys that each side holds.
        weight = expit(total_lse - part_lse)[..., None]
        both = weight * total + expit(part_lse - total_lse)[..., None] * part
        both_lse = np.logaddexp(total_lse, part_lse)
        # A side without keys, (0, -inf), leaves the other as it is, to the bit.
        total_empty, part_empty = np.isneginf(total_lse), np.isneginf(part_lse)
        total = np.select([part_empty[..., None], total_empty[..., None]], [total, part], both)
        total_lse = np.select([part_empty, total_empty], [total_lse, part_lse], both_lse)
    out[...], lse[...] = total, total_lse
