"""The Numba kernels of the CPU backend: tiles of scores, BLAS for their products, no N x N matrix.

Every kernel is one loop that takes work items from a shared counter until none is left. Run on one
thread it does all the work; run on several at once they share it. An item writes what no other
item writes, so the results do not depend on who took which.

Scores are kept in units of log2, so that the softmax needs only exp2: q k^T is multiplied by
scale * log2(e) as BLAS computes it. A hidden score is -inf, always by selection and never by
arithmetic, and exp2(-inf) is exactly 0.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.extending import intrinsic, overload

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
OPEN_WINDOW = 1 << 40

# What LLVM may assume. Sums may be regrouped, which lets loops become vectors, but NaN and inf are
# real: the contract says where they go.
_FAST = {"contract", "reassoc", "nsz", "arcp"}


class Scores(NamedTuple):
    """Which keys a query sees, and the score that it gives them.

    Attributes
    ----------
    factor : float
        What q k^T is multiplied by: scale * log2(e), or with a cap 2 * log2(e) * scale / softcap.
    softcap : float
        softcap * log2(e); 0 without a cap.
    scale : float
        The softmax scale itself, for the gradients.
    window_left, window_right : int
        Keys before and after a query's position that it sees, `OPEN_WINDOW` for all.
    top_left : bool
        A query i stands at p = i, otherwise at p = i + kv_length - q_length.
    q_lengths, kv_lengths : ndarray of int64
        One a batch element.
    mask, bias : int
        Address of element (0, 0, 0, 0), or 0 if there is none.
    mask_strides, bias_strides : tuple of int
        In elements; 0 along an axis that is broadcast.
    """

    factor: float
    softcap: float
    scale: float
    window_left: int
    window_right: int
    top_left: bool
    q_lengths: Any
    kv_lengths: Any
    mask: int
    mask_strides: tuple[int, int, int, int]
    bias: int
    bias_strides: tuple[int, int, int, int]


class Tiles(NamedTuple):
    """Sizes of the work: an item is `item_rows` queries, a score tile `rows` x `cols`."""

    item_rows: int
    rows: int
    cols: int


# ------------------------------------------------------------------------- what Numba does not have


@intrinsic
def _take(_context: Any, counter: Any) -> Any:
    """The next item of the counter, a one-element array that threads share."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(data.type.pointee, 1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def _maximum(_context: Any, a: Any, _b: Any) -> Any:
    """The larger of two numbers; NaN if either is. Unlike ``max``, LLVM makes vectors of it."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = args[0].type
        function = builder.module.declare_intrinsic(
            "llvm.maximum", [kind], fnty=ir.FunctionType(kind, [kind, kind])
        )
        return builder.call(function, args)

    return a(a, a), generate


@intrinsic
def _bits(_context: Any, x: Any) -> Any:
    """The bits of a number as an integer of the same width, and of an integer as a number."""
    other = {
        types.float32: types.int32,
        types.float64: types.int64,
        types.int32: types.float32,
        types.int64: types.float64,
    }[x]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return other(x), generate


@intrinsic
def _pointer(_context: Any, address: Any, index: Any, like: Any) -> Any:
    """A pointer, indexed as in C, to element `index` of what begins at an address.

    The elements are of the dtype of `like`, an array or a scalar type.
    """
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], context.get_value_type(pointer))
        return builder.gep(first, [args[1]])

    return pointer(address, index, like), generate


def _xxgemm(real: Any) -> Any:
    """The function that ``np.dot`` calls, which also takes strided rows, alpha and beta."""
    pointer = types.CPointer(real)
    return types.ExternalFunction(
        "numba_xxgemm",
        types.intc(
            *[types.char] * 3,  # kind, transa, transb
            *[types.intp] * 3,  # m, n, k
            *[pointer, pointer, types.intp],  # alpha, a, lda
            *[pointer, types.intp, pointer],  # b, ldb, beta
            *[pointer, types.intp],  # c, ldc
        ),
    )


_SGEMM, _DGEMM = _xxgemm(types.float32), _xxgemm(types.float64)
_AS_IS, _TRANSPOSED, _SINGLE, _DOUBLE = (ord(letter) for letter in "ntsd")


def _gemm(alpha: Any, a: Any, a_t: bool, b: Any, b_t: bool, beta: Any, c: Any) -> None:
    """Set c to alpha * a @ b + beta * c, with a or b transposed first if `a_t` or `b_t`.

    Rows may be strided; alpha and beta are arrays of one element.
    """
    raise NotImplementedError


@overload(_gemm, jit_options={"forceinline": True})
def _gemm_overload(alpha: Any, a: Any, a_t: Any, b: Any, b_t: Any, beta: Any, c: Any) -> Any:  # noqa: ARG001 - Numba matches the names
    gemm, kind = (_SGEMM, _SINGLE) if c.dtype == types.float32 else (_DGEMM, _DOUBLE)
    size = c.dtype.bitwidth // 8

    # BLAS counts columns first. To it, our c is c^T = b^T a^T.
    def row_major(alpha: Any, a: Any, a_t: Any, b: Any, b_t: Any, beta: Any, c: Any) -> Any:
        gemm(
            kind,
            _TRANSPOSED if b_t else _AS_IS,
            _TRANSPOSED if a_t else _AS_IS,
            c.shape[1],
            c.shape[0],
            a.shape[0] if a_t else a.shape[1],
            alpha.ctypes,
            b.ctypes,
            b.strides[0] // size,
            a.ctypes,
            a.strides[0] // size,
            beta.ctypes,
            c.ctypes,
            c.strides[0] // size,
        )

    return row_major


# -------------------------------------------------------------------------------- exp2 and tanh

# (2**f - 1) / f for f in [-1/2, 1/2], highest power first: minimax to 2e-9 and to 4e-18 of 2**f.
_EXP2_32 = (
    0.000153533605,
    0.0013398875,
    0.00961843692,
    0.0555033237,
    0.240226477,
    0.693147182,
)
_EXP2_64 = (
    4.434840648229934e-10,
    7.073786371805643e-09,
    1.0178199272734345e-07,
    1.3215435263651856e-06,
    1.5252733493263954e-05,
    0.00015403530457152044,
    0.0013333558146775373,
    0.009618129107594084,
    0.05550410866482008,
    0.2402265069591013,
    0.6931471805599453,
)


def _split_exp2(x: Any) -> tuple[Any, Any]:
    """2**x as power * (1 + rest): no branch, no table, no call, so that loops become vectors.

    The power is exactly 0 below the smallest normal number, grows no larger than a power of two
    can be, and is joined by a NaN if x is one.
    """
    raise NotImplementedError


@overload(_split_exp2, jit_options={"forceinline": True, "fastmath": {"contract", "nsz"}})
def _split_exp2_overload(x: Any) -> Any:
    real: Any = np.float32 if x == types.float32 else np.float64
    integer: Any = np.int32 if x == types.float32 else np.int64
    first, *rest = (real(c) for c in (_EXP2_32 if x == types.float32 else _EXP2_64))
    others = tuple(rest)
    info = np.finfo(real)
    bias, fraction_bits = integer(info.maxexp - 1), integer(info.nmant)
    lowest, highest = real(-bias), real(bias)
    magic = real(1.5 * 2.0**info.nmant)  # its lowest bit is worth 1: adding it rounds to an integer

    def split(x: Any) -> Any:
        x = lowest if x < lowest else x  # both are false for NaN
        x = highest if x > highest else x
        rounded = x + magic
        f = x - (rounded - magic)
        p = first
        for c in others:
            p = p * f + c
        return _bits(integer((_bits(rounded) + bias) << fraction_bits)), p * f

    return split


@njit(forceinline=True, fastmath={"contract", "nsz"})
def _exp2(x: Any) -> Any:
    power, rest = _split_exp2(x)
    return power + power * rest


@njit(fastmath=_FAST)
def _cap(row: Any, slope: Any, softcap: Any) -> None:
    """Turn a row from 2 * log2(e) * y into softcap * tanh(y); tanh'(y) goes where `slope` has room.

    tanh(y) = (1 - e) / (1 + e) with e = exp(-2 |y|), where 1 - e is accurate for small y, too.
    """
    one = row.dtype.type(1)
    two = row.dtype.type(2)
    four = row.dtype.type(4)
    for x in range(row.size):
        power, rest = _split_exp2(-abs(row[x]))
        minus = power * rest + (power - one)  # e - 1
        share = one / (two + minus)
        if slope.size:
            slope[x] = four * (one + minus) * share * share
        tanh = -minus * share * softcap
        row[x] = -tanh if row[x] < 0 else tanh


# ----------------------------------------------------------------------------- which keys are seen


@njit
def _offset(b: int, scores: Scores) -> Any:
    """Where query 0 of batch element b stands."""
    return 0 if scores.top_left else scores.kv_lengths[b] - scores.q_lengths[b]


@njit
def _first_key(b: int, i: int, scores: Scores) -> Any:
    return max(0, i + _offset(b, scores) - scores.window_left)


@njit
def _end_key(b: int, i: int, scores: Scores) -> Any:
    """One past the last key that query i may see."""
    return min(scores.kv_lengths[b], i + _offset(b, scores) + scores.window_right + 1)


@njit
def _query_range(b: int, c0: int, c1: int, scores: Scores) -> tuple[int, int]:
    """The queries, from and to, that may see any of the keys c0 to c1."""
    offset = _offset(b, scores)
    first = max(0, c0 - offset - scores.window_right)
    end = min(scores.q_lengths[b], c1 - offset + scores.window_left)
    return first, end


@njit(forceinline=True)
def _row(address: int, strides: Any, b: int, h: int, i: int, j: int, like: Any) -> Any:
    """A pointer to element (b, h, i, j) of the mask or the bias."""
    return _pointer(
        address, b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3], like
    )


@njit
def _hidden_by_mask(b: int, h: int, i0: int, i1: int, c0: int, c1: int, scores: Scores) -> bool:
    """Whether the mask hides all of the keys c0 to c1 from all of the queries i0 to i1."""
    if scores.mask == 0:
        return False
    step = scores.mask_strides[3]
    for i in range(i0, i1):
        mask = _row(scores.mask, scores.mask_strides, b, h, i, c0, np.uint8)
        seen = 0
        if step == 1:
            for x in range(c1 - c0):
                seen |= mask[x]
        else:
            for x in range(c1 - c0):
                seen |= mask[x * step]
        if seen:
            return False
    return True


@njit(fastmath=_FAST)
def _finish_scores(s: Any, slope: Any, b: int, h: int, i0: int, c0: int, scores: Scores) -> None:
    """Cap, bias and masks on a tile of scaled products, in the order of the contract.

    The tile starts at query i0 and key c0. `slope` takes the slope of the cap, or has no columns.
    """
    rows, cols = s.shape
    hidden = s.dtype.type(-np.inf)
    if scores.softcap > 0:
        softcap = s.dtype.type(scores.softcap)
        for r in range(rows):
            _cap(s[r], slope[r], softcap)
    if scores.bias:
        log2e = s.dtype.type(LOG2E)
        step = scores.bias_strides[3]
        for r in range(rows):
            row = s[r]
            bias = _row(scores.bias, scores.bias_strides, b, h, i0 + r, c0, s)
            if step == 1:
                for x in range(cols):
                    row[x] = hidden if bias[x] == hidden else row[x] + bias[x] * log2e
            else:
                for x in range(cols):
                    added = bias[x * step]
                    row[x] = hidden if added == hidden else row[x] + added * log2e
    if c0 < _first_key(b, i0 + rows - 1, scores) or c0 + cols > _end_key(b, i0, scores):
        for r in range(rows):
            row = s[r]
            first = _first_key(b, i0 + r, scores) - c0
            end = max(_end_key(b, i0 + r, scores) - c0, 0)
            for x in range(min(first, cols)):
                row[x] = hidden
            for x in range(end, cols):
                row[x] = hidden
    if scores.mask:
        step = scores.mask_strides[3]
        for r in range(rows):
            row = s[r]
            mask = _row(scores.mask, scores.mask_strides, b, h, i0 + r, c0, np.uint8)
            if step == 1:
                for x in range(cols):
                    row[x] = row[x] if mask[x] else hidden
            else:
                for x in range(cols):
                    row[x] = row[x] if mask[x * step] else hidden


# ----------------------------------------------------------------------------------- small helpers


@njit
def _number(value: float, like: Any) -> Any:
    """A one-element array for `_gemm`."""
    array = np.empty(1, like.dtype)
    array[0] = value
    return array


@njit
def _matrix(buffer: Any, rows: int, cols: int) -> Any:
    """The first elements of a buffer as a contiguous matrix."""
    return buffer[: rows * cols].reshape(rows, cols)


@njit
def _transpose(x: Any, buffer: Any) -> Any:
    """A contiguous transposed copy: BLAS multiplies by it faster than by a transposed view."""
    rows, cols = x.shape
    copy = _matrix(buffer, cols, rows)
    for i in range(rows):
        for j in range(cols):
            copy[j, i] = x[i, j]
    return copy


@njit(fastmath=_FAST)
def _all_finite(x: Any) -> Any:
    rows, cols = x.shape
    zero = x.dtype.type(0)
    total = zero
    for i in range(rows):
        row = x[i]
        for j in range(cols):
            total += row[j] * zero  # NaN for NaN and inf
    return total == zero


# ----------------------------------------------------------------------------------------- forward


@njit(fastmath=_FAST)
def _softmax_step(s: Any, row_max: Any, row_sum: Any, acc: Any) -> None:
    """Turn a tile of scores into weights, and rescale what we have to the new maxima."""
    rows, cols = s.shape
    hidden = s.dtype.type(-np.inf)
    for r in range(rows):
        row = s[r]
        top = row_max[r]
        for x in range(cols):
            top = _maximum(top, row[x])
        if top == hidden:  # nothing seen yet, and (-inf) - (-inf) would be NaN
            for x in range(cols):
                row[x] = 0
            continue
        if top != row_max[r]:
            rescale = _exp2(row_max[r] - top)
            row_max[r] = top
            row_sum[r] *= rescale
            for d in range(acc.shape[1]):
                acc[r, d] *= rescale
        total = s.dtype.type(0)
        for x in range(cols):
            weight = _exp2(row[x] - top)
            row[x] = weight
            total += weight
        row_sum[r] += total


@njit
def _mark_seen(s: Any, buffer: Any) -> Any:
    rows, cols = s.shape
    seen = _matrix(buffer, rows, cols)
    for r in range(rows):
        for x in range(cols):
            seen[r, x] = s[r, x] != -np.inf
    return seen


@njit
def _select_add(weights: Any, seen: Any, v: Any, acc: Any) -> None:
    """Add weights @ v to acc, where v has NaN or inf, which only those who see it may meet."""
    rows, cols = weights.shape
    for r in range(rows):
        for x in range(cols):
            if seen[r, x]:
                for d in range(v.shape[1]):
                    acc[r, d] += weights[r, x] * v[x, d]


def forward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, scores: Scores, tiles: Tiles, counter: Any
) -> None:
    """Attention of contiguous (batch, heads, seqlen, head_dim) arrays; fills `out` and `lse`."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, head_dim_v = k.shape[1], v.shape[3]
    blocks = -(-seqlen_q // tiles.item_rows)

    zero, one, factor = _number(0.0, q), _number(1.0, q), _number(scores.factor, q)
    k_t_buffer = np.empty(head_dim * tiles.cols, q.dtype)
    s_buffer = np.empty(tiles.rows * tiles.cols, q.dtype)
    seen_buffer = np.empty(tiles.rows * tiles.cols, np.uint8)
    acc = np.empty((tiles.item_rows, head_dim_v), q.dtype)
    row_max = np.empty(tiles.item_rows, q.dtype)
    row_sum = np.empty(tiles.item_rows, q.dtype)

    while True:
        # 1. Which rows are ours: the last ones first, which see most keys if the mask is causal
        item = _take(counter)
        if item >= batch * heads_q * blocks:
            break
        block = blocks - 1 - item // (batch * heads_q)
        b, h = item % (batch * heads_q) // heads_q, item % heads_q
        h_kv = h // (heads_q // heads_kv)
        i0 = block * tiles.item_rows
        i1 = max(i0, min(i0 + tiles.item_rows, scores.q_lengths[b]))

        # 2. Load the Q tile: BLAS reads it in place
        # 3. Start the running softmax
        acc[:] = 0
        row_max[:] = -np.inf
        row_sum[:] = 0

        # 4. Walk over the key/value tiles
        start = _first_key(b, i0, scores) // tiles.cols * tiles.cols
        for c0 in range(start, _end_key(b, i1 - 1, scores), tiles.cols):
            # 4a. Load the K and V tiles: K transposed, if enough rows share the work
            c1 = min(c0 + tiles.cols, scores.kv_lengths[b])
            v_tile = v[b, h_kv, c0:c1]
            v_finite = _all_finite(v_tile)
            share_transposed = i1 - i0 > 16
            if share_transposed:
                k_t = _transpose(k[b, h_kv, c0:c1], k_t_buffer)

            for r0 in range(i0, i1, tiles.rows):
                r1 = min(r0 + tiles.rows, i1)
                x0 = max(c0, _first_key(b, r0, scores))
                x1 = min(c1, _end_key(b, r1 - 1, scores))
                if x0 >= x1 or _hidden_by_mask(b, h, r0, r1, x0, x1, scores):
                    continue
                ours = slice(r0 - i0, r1 - i0)

                # 4b. s = q k^T, masked
                s = _matrix(s_buffer, r1 - r0, x1 - x0)
                if share_transposed:
                    _gemm(factor, q[b, h, r0:r1], False, k_t[:, x0 - c0 : x1 - c0], False, zero, s)
                else:
                    _gemm(factor, q[b, h, r0:r1], False, k[b, h_kv, x0:x1], True, zero, s)
                no_slope = _matrix(s_buffer, r1 - r0, 0)
                _finish_scores(s, no_slope, b, h, r0, x0, scores)

                # 4c. Rescale what we have to the new maximum
                # 4d. acc += p v
                if v_finite:
                    _softmax_step(s, row_max[ours], row_sum[ours], acc[ours])
                    _gemm(one, s, False, v[b, h_kv, x0:x1], False, one, acc[ours])
                else:
                    seen = _mark_seen(s, seen_buffer)
                    _softmax_step(s, row_max[ours], row_sum[ours], acc[ours])
                    _select_add(s, seen, v[b, h_kv, x0:x1], acc[ours])

        # 5. Normalise and store
        for i in range(i0, min(i0 + tiles.item_rows, seqlen_q)):
            total = row_sum[i - i0]
            if total == 0:  # no key seen, or no such row
                out[b, h, i] = 0
                lse[b, h, i] = -np.inf
            else:
                for d in range(head_dim_v):
                    out[b, h, i, d] = acc[i - i0, d] / total
                lse[b, h, i] = (np.float64(row_max[i - i0]) + np.log2(np.float64(total))) * LN2


# ---------------------------------------------------------------------------------------- backward


@njit(fastmath=_FAST)
def _weights_and_ds(s: Any, dp: Any, slope: Any, lse: Any, delta: Any) -> None:
    """Put p = exp(s - lse) in s, and ds = p * (dp - delta), times the slope of a cap, in dp."""
    rows, cols = s.shape
    for r in range(rows):
        p, ds, row_lse, row_delta = s[r], dp[r], lse[r], delta[r]
        for x in range(cols):
            weight = _exp2(p[x] - row_lse)
            p[x] = weight
            ds[x] = weight * (ds[x] - row_delta)
        for x in range(slope.shape[1]):
            ds[x] *= slope[r, x]


@njit(fastmath=_FAST)
def _row_terms(
    b: int, h: int, dout: Any, out: Any, lse: Any, dlse: Any, lse2: Any, delta: Any
) -> None:
    """lse2 = lse in units of log2, and delta = rowsum(dout * out) - dlse, of one head.

    A row that sees no key has the lse2 +inf, which makes its weights 0.
    """
    for i in range(lse2.size):
        if lse[b, h, i] == -np.inf:
            lse2[i] = np.inf
            delta[i] = 0
            continue
        total = dout.dtype.type(0)
        for d in range(out.shape[3]):
            total += dout[b, h, i, d] * out[b, h, i, d]
        lse2[i] = lse[b, h, i] * LOG2E
        delta[i] = total - dlse[b, h, i] if dlse.size else total


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    dq_parts: Any,
    dk: Any,
    dv: Any,
    scores: Scores,
    tiles: Tiles,
    counter: Any,
) -> None:
    """Gradients of contiguous arrays; fills `dq_parts`, `dk` and `dv`.

    An item is one key head and every n-th of its key tiles, where n is the length of `dq_parts`:
    item j of a head fills part j of its dq, and their sum is dq. `dlse` may be empty.
    """
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group, parts = heads_q // heads_kv, dq_parts.shape[0]

    zero, one = _number(0.0, q), _number(1.0, q)
    factor, scale = _number(scores.factor, q), _number(scores.scale, q)
    k_t_buffer = np.empty(head_dim * tiles.cols, q.dtype)
    v_t_buffer = np.empty(head_dim_v * tiles.cols, q.dtype)
    p_buffer = np.empty(tiles.rows * tiles.cols, q.dtype)
    ds_buffer = np.empty(tiles.rows * tiles.cols, q.dtype)
    slope_buffer = np.empty(tiles.rows * tiles.cols if scores.softcap > 0 else 0, q.dtype)
    lse2 = np.empty((group, seqlen_q), q.dtype)
    delta = np.empty((group, seqlen_q), q.dtype)

    while True:
        # 1. delta = rowsum(dout * out)
        item = _take(counter)
        if item >= batch * heads_kv * parts:
            break
        b, h_kv, part = item // parts // heads_kv, item // parts % heads_kv, item % parts
        for g in range(group):
            h = h_kv * group + g
            _row_terms(b, h, dout, out, lse, dlse, lse2[g], delta[g])
            dq_parts[part, b, h] = 0

        for c0 in range(part * tiles.cols, seqlen_k, parts * tiles.cols):
            # 2. Load the K and V tiles
            # 3. Start dk and dv
            dk[b, h_kv, c0 : c0 + tiles.cols] = 0
            dv[b, h_kv, c0 : c0 + tiles.cols] = 0
            c1 = min(c0 + tiles.cols, scores.kv_lengths[b])
            if c0 >= c1:
                continue
            k_t = _transpose(k[b, h_kv, c0:c1], k_t_buffer)
            v_t = _transpose(v[b, h_kv, c0:c1], v_t_buffer)

            # 4. Walk over the query tiles
            first, end = _query_range(b, c0, c1, scores)
            for g in range(group):
                h = h_kv * group + g
                for r0 in range(first, end, tiles.rows):
                    r1 = min(r0 + tiles.rows, end)
                    x0 = max(c0, _first_key(b, r0, scores))
                    x1 = min(c1, _end_key(b, r1 - 1, scores))
                    if x0 >= x1 or _hidden_by_mask(b, h, r0, r1, x0, x1, scores):
                        continue

                    # 4a. Load q, dout, lse and delta
                    rows, cols = r1 - r0, x1 - x0
                    ours, seen = slice(r0, r1), slice(x0 - c0, x1 - c0)

                    # 4b. p = exp(s - lse)
                    p = _matrix(p_buffer, rows, cols)
                    _gemm(factor, q[b, h, ours], False, k_t[:, seen], False, zero, p)
                    slope = _matrix(slope_buffer, rows, cols if scores.softcap > 0 else 0)
                    _finish_scores(p, slope, b, h, r0, x0, scores)
                    ds = _matrix(ds_buffer, rows, cols)
                    _gemm(one, dout[b, h, ours], False, v_t[:, seen], False, zero, ds)
                    _weights_and_ds(p, ds, slope, lse2[g, ours], delta[g, ours])

                    # 4c. dv += p^T dout
                    _gemm(one, p, True, dout[b, h, ours], False, one, dv[b, h_kv, x0:x1])
                    # 4d. ds = p * (dout v^T - delta): above
                    # 4e. dk += ds^T q
                    _gemm(scale, ds, True, q[b, h, ours], False, one, dk[b, h_kv, x0:x1])
                    # 4f. dq += ds k
                    k_tile = k[b, h_kv, x0:x1]
                    _gemm(scale, ds, False, k_tile, False, one, dq_parts[part, b, h, ours])


def bias_gradient(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    dbias: Any,
    scores: Scores,
    tiles: Tiles,
    counter: Any,
) -> None:
    """The gradient of the bias, summed over what it was broadcast along; fills `dbias`.

    An item is one part of `dbias`, and walks over all scores that this part was added to.
    """
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    bias_batch, bias_heads, bias_rows, bias_cols = dbias.shape
    # An axis of length 1 was broadcast (or is all there is): its item has all of it.
    item_rows = tiles.item_rows if bias_rows > 1 else seqlen_q
    item_cols = tiles.cols if bias_cols > 1 else seqlen_k
    row_blocks, col_blocks = -(-seqlen_q // item_rows), -(-seqlen_k // item_cols)

    zero, one, factor = _number(0.0, q), _number(1.0, q), _number(scores.factor, q)
    k_t_buffer = np.empty(head_dim * tiles.cols, q.dtype)
    v_t_buffer = np.empty(head_dim_v * tiles.cols, q.dtype)
    p_buffer = np.empty(tiles.rows * tiles.cols, q.dtype)
    ds_buffer = np.empty(tiles.rows * tiles.cols, q.dtype)
    lse2 = np.empty(seqlen_q, q.dtype)
    delta = np.empty(seqlen_q, q.dtype)

    while True:
        item = _take(counter)
        if item >= bias_batch * bias_heads * row_blocks * col_blocks:
            break
        i0 = item % row_blocks * item_rows
        j0 = item // row_blocks % col_blocks * item_cols
        bias_h = item // (row_blocks * col_blocks) % bias_heads
        bias_b = item // (row_blocks * col_blocks * bias_heads)
        i1, j1 = min(i0 + item_rows, seqlen_q), min(j0 + item_cols, seqlen_k)
        ours = dbias[
            bias_b,
            bias_h,
            (i0 if bias_rows > 1 else 0) : (i1 if bias_rows > 1 else 1),
            (j0 if bias_cols > 1 else 0) : (j1 if bias_cols > 1 else 1),
        ]
        ours[:] = 0
        for b in range(bias_b, bias_b + 1 if bias_batch > 1 else batch):
            for h in range(bias_h, bias_h + 1 if bias_heads > 1 else heads_q):
                _row_terms(b, h, dout, out, lse, dlse, lse2, delta)
                h_kv = h // (heads_q // heads_kv)
                for c0 in range(j0, min(j1, scores.kv_lengths[b]), tiles.cols):
                    c1 = min(c0 + tiles.cols, j1, scores.kv_lengths[b])
                    k_t = _transpose(k[b, h_kv, c0:c1], k_t_buffer)
                    v_t = _transpose(v[b, h_kv, c0:c1], v_t_buffer)
                    first, end = _query_range(b, c0, c1, scores)
                    for r0 in range(max(first, i0), min(end, i1), tiles.rows):
                        r1 = min(r0 + tiles.rows, end, i1)
                        if _hidden_by_mask(b, h, r0, r1, c0, c1, scores):
                            continue
                        p = _matrix(p_buffer, r1 - r0, c1 - c0)
                        _gemm(factor, q[b, h, r0:r1], False, k_t, False, zero, p)
                        _finish_scores(p, _matrix(p_buffer, r1 - r0, 0), b, h, r0, c0, scores)
                        ds = _matrix(ds_buffer, r1 - r0, c1 - c0)
                        _gemm(one, dout[b, h, r0:r1], False, v_t, False, zero, ds)
                        no_slope = _matrix(p_buffer, r1 - r0, 0)  # the bias comes after the cap
                        _weights_and_ds(p, ds, no_slope, lse2[r0:r1], delta[r0:r1])
                        _add_broadcast(ds, ours, r0 - i0, c0 - j0)


@njit(fastmath=_FAST)
def _add_broadcast(ds: Any, total: Any, r0: int, c0: int) -> None:
    """Add a tile to its place in `total`, which has one row or column where it was broadcast."""
    rows, cols = ds.shape
    for r in range(rows):
        to = total[r0 + r if total.shape[0] > 1 else 0]
        if to.size > 1:
            for x in range(cols):
                to[c0 + x] += ds[r, x]
        else:
            row_total = ds.dtype.type(0)
            for x in range(cols):
                row_total += ds[r, x]
            to[0] += row_total


# ------------------------------------------------------------ between the products of a transformer

# log2(P(X < -t)) + t^2 * log2(e) / 2 of a normal X, for t from 0 to `_NORMAL_END`, highest power
# first: minimax, so that t * P is within 2e-9. Beyond, the square decides and P vanishes.
_NORMAL_TAIL = (
    3.66886707e-07,
    -7.36897671e-06,
    6.14111030e-05,
    -0.000239383246,
    -7.19382308e-05,
    0.00703106613,
    -0.0525015736,
    0.262150302,
    -1.15110838,
    -0.999999772,
)
_NORMAL_END = 6.0

_ITEM_ROWS = 8  # of a matrix of tokens: some microseconds


@njit(forceinline=True, fastmath={"contract", "nsz"})
def _gelu(x: Any) -> Any:
    """x times the probability that a normal variable is smaller, in float32."""
    half = np.float32(0.5)
    t = abs(x)
    near = min(t, np.float32(_NORMAL_END))
    tail = np.float32(_NORMAL_TAIL[0])
    for c in _NORMAL_TAIL[1:]:
        tail = tail * near + np.float32(c)
    below = _exp2(tail - t * t * np.float32(LOG2E / 2))  # P(X < -t), exactly 0 from 13 on
    # x P(X < x) is x - x P(X < -x) on the right, -t P(X < -t) on the left.
    return half * x + half * t - min(t, np.float32(16)) * below


@njit(forceinline=True, fastmath={"contract", "nsz"})
def _gated(x: Any, slope: Any, cubic: Any) -> Any:
    """x * sigmoid(slope * x + cubic * x^3), with both factors in units of log2."""
    return x / (np.float32(1) + _exp2(-x * (slope + cubic * (x * x))))


def activate(
    x: Any, bias: Any, width: int, exact: bool, slope: float, cubic: float, counter: Any
) -> None:
    """Add a bias to every row of x, and bend its first `width` columns in place.

    With `exact` by the GELU, else by x * sigmoid(slope * x + cubic * x^3).
    """
    rows, cols = x.shape
    steep, bent = np.float32(slope * LOG2E), np.float32(cubic * LOG2E)
    while True:
        first = _take(counter) * _ITEM_ROWS
        if first >= rows:
            break
        for r in range(first, min(first + _ITEM_ROWS, rows)):
            row = x[r]
            if exact:
                for c in range(width):
                    row[c] = _gelu(row[c] + bias[c])
            else:
                for c in range(width):
                    row[c] = _gated(row[c] + bias[c], steep, bent)
            for c in range(width, cols):
                row[c] += bias[c]


@njit(fastmath=_FAST)
def _normalise_row(row: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    size = row.dtype.type(row.size)
    total = row.dtype.type(0)
    for x in range(row.size):
        total += row[x]
    mean = total / size
    squares = row.dtype.type(0)
    for x in range(row.size):
        squares += (row[x] - mean) * (row[x] - mean)
    factor = row.dtype.type(1) / np.sqrt(squares / size + row.dtype.type(eps))
    for x in range(row.size):
        out[x] = (row[x] - mean) * factor * weight[x] + bias[x]


def layer_norm(x: Any, weight: Any, bias: Any, eps: float, out: Any, counter: Any) -> None:
    """Shift and scale every row of x to mean 0 and variance 1, then to its learned range."""
    rows = x.shape[0]
    while True:
        first = _take(counter) * _ITEM_ROWS
        if first >= rows:
            break
        for r in range(first, min(first + _ITEM_ROWS, rows)):
            _normalise_row(x[r], weight, bias, eps, out[r])


# ------------------------------------------------------------------------------------- compilation


def _signatures(real: Any) -> dict[Callable[..., None], Any]:
    """What each kernel takes; said here, so that no array of a caller starts a compilation."""

    def taken(ndim: int) -> Any:
        return types.Array(real, ndim, "C", readonly=True)

    def filled(ndim: int) -> Any:
        return types.Array(real, ndim, "C")

    described = types.UniTuple(types.int64, 4)
    fields = [
        *[types.float64] * 3,
        *[types.int64] * 2,
        types.boolean,
        *[types.Array(types.int64, 1, "C")] * 2,
        *[types.int64, described] * 2,
    ]
    how = (
        types.NamedTuple(fields, Scores),
        types.NamedUniTuple(types.int64, 3, Tiles),
        types.Array(types.int64, 1, "C"),
    )
    q_k_v = [taken(4)] * 3
    known = (*q_k_v, taken(4), taken(3), taken(4), taken(3))  # and out, lse, dout, dlse
    return {
        forward: types.void(*q_k_v, filled(4), filled(3), *how),
        backward: types.void(*known, filled(5), filled(4), filled(4), *how),
        bias_gradient: types.void(*known, filled(4), *how),
        layer_norm: types.void(taken(2), taken(1), taken(1), types.float64, filled(2), how[-1]),
        activate: types.void(
            filled(2), taken(1), types.int64, types.boolean, *[types.float64] * 2, how[-1]
        ),
    }


class _Announcement(event.Listener):  # type: ignore[misc]
    """Says that a compilation begins, once; a kernel that is in Numba's cache begins none."""

    made = False

    def on_start(self, _event: Any) -> None:
        if not _Announcement.made:
            _Announcement.made = True
            sys.stderr.write(
                "workbench: compiling the CPU kernels (some seconds; later runs find them in "
                "Numba's cache)\n"
            )
            sys.stderr.flush()

    def on_end(self, _event: Any) -> None:
        pass


_loaded: dict[tuple[Callable[..., None], str], Callable[..., None]] = {}
_loading = threading.Lock()


def load(kernel: Callable[..., None], dtype: str) -> Callable[..., None]:
    """Load a kernel for "float32" or "float64": from Numba's cache, or compiled and put there."""
    loaded = _loaded.get((kernel, dtype))
    if loaded is None:
        with _loading:
            loaded = _loaded.get((kernel, dtype)) or _compile(kernel, dtype)
            _loaded[kernel, dtype] = loaded
    return loaded


def _compile(kernel: Callable[..., None], dtype: str) -> Callable[..., None]:
    signature = _signatures({"float32": types.float32, "float64": types.float64}[dtype])[kernel]
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    compiled: Callable[..., None]
    with event.install_listener("numba:compile", _Announcement()):
        try:
            compiled = njit(signature, cache=True, **options)(kernel)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            compiled = njit(signature, **options)(kernel)  # nowhere to write: kept in memory only
    return compiled
