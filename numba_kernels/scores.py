"""Which keys a query sees, and the score it gives them. Twin: cuda_src/scores.cuh.

  score(row, col) = cap(scale * q_row . k_col) + bias(row, col)    where row sees col, else -inf
  cap(x)          = softcap * tanh(x / softcap)                    with SOFTCAP, else x

Row i sees keys  max(0, i + lo) <= j < min(kv_length, i + hi)  if i < q_length, and of those the
ones its mask allows. Without a mask that is a band, which also tells the tiles that need no work
and the tiles that need no tests:

          keys
         # # - - - - |      first_key, last_key: the keys that some row of a query tile sees
  rows   # # # - - - |      first_query, last_query: the rows that see some key of a key tile
         - # # # - - |      tile_is_unmasked: all rows of a tile see all keys of it
         - - # # # - | kv_length = 6
         -----------
         q_length = 4       lo = -1, hi = 2

Ends are exclusive. FEATURES is the set of options in use; one that is off costs no instruction.
"""

import math
from collections import namedtuple

from numba import cuda
from numba.cuda import libdevice, types

from .common import INF, is_null, like

RANGE = 1  # causal, windows, lengths
MASK = 2  # boolean mask
BIAS = 4  # added to the score
SOFTCAP = 8  # squashes the score into (-softcap, softcap)
# Of what other kernels take as it comes, a kernel may want to know:
ANY_SCALE = 16  # a scale that may be 0 or negative
KV_LENGTHS = 32  # keys of a batch element may end before those of the array

OPEN_WINDOW = 1 << 30  # a window without an end; sequences are shorter
LIMIT = OPEN_WINDOW - 1  # |lo|, |hi| <= LIMIT, so that row + lo fits in an int32

ScoreParams = namedtuple(  # scores.cuh explains the fields
    "ScoreParams",
    "scale softcap window_left window_right top_left q_lengths kv_lengths "
    "mask mask_strides bias bias_strides",
)
KeyRange = namedtuple("KeyRange", "lo hi q_length kv_length")
Exponent = namedtuple("Exponent", "factor subtrahend")

float32, int32 = types.float32, types.int32


@cuda.jit(device=True, forceinline=True)
def key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k):
    lo = int32(-LIMIT)
    hi = int32(LIMIT)
    q_length = int32(seqlen_q)
    kv_length = int32(seqlen_k)
    if FEATURES & RANGE:
        if not is_null(score.q_lengths):
            q_length = int32(max(0, min(score.q_lengths[batch_index], q_length)))
        if not is_null(score.kv_lengths):
            kv_length = int32(max(0, min(score.kv_lengths[batch_index], kv_length)))
        shift = 0 if score.top_left else kv_length - q_length
        if score.window_left < OPEN_WINDOW:
            lo = int32(max(-LIMIT, shift - score.window_left))
        if score.window_right < OPEN_WINDOW:
            hi = int32(min(LIMIT, shift + score.window_right + 1))
    return KeyRange(lo, hi, q_length, kv_length)


@cuda.jit(device=True, forceinline=True)
def first_key(FEATURES, band, q_start):
    if not FEATURES & RANGE:
        return int32(0)
    start = max(0, q_start + band.lo)
    return int32(start if q_start < band.q_length else band.kv_length)


@cuda.jit(device=True, forceinline=True)
def last_key(FEATURES, band, q_end):
    if not FEATURES & RANGE:
        return band.kv_length
    return int32(min(band.kv_length, min(q_end, band.q_length) - 1 + band.hi))


@cuda.jit(device=True, forceinline=True)
def first_query(FEATURES, band, k_start):
    if not FEATURES & RANGE:
        return int32(0)
    return int32(max(0, k_start - band.hi + 1) if k_start < band.kv_length else band.q_length)


@cuda.jit(device=True, forceinline=True)
def last_query(FEATURES, band, k_end):
    if not FEATURES & RANGE:
        return band.q_length
    return int32(min(band.q_length, min(k_end, band.kv_length) - band.lo))


# Rows q_start .. q_end and keys k_start .. k_end all exist, and all see each other.
@cuda.jit(device=True, forceinline=True)
def tile_is_unmasked(FEATURES, band, q_start, q_end, k_start, k_end):
    if FEATURES & MASK:
        return False
    exists = q_end <= band.q_length and k_end <= band.kv_length
    if not FEATURES & RANGE:
        return exists
    return exists and int32(q_end - 1 + band.lo) <= k_start and k_end <= int32(q_start + band.hi)


# False where row or col does not exist, and only then is the mask not read.
@cuda.jit(device=True, forceinline=True)
def sees(FEATURES, score, band, batch_index, head, row, col):
    seen = row < band.q_length and col < band.kv_length
    if FEATURES & RANGE:
        seen = seen and int32(row + band.lo) <= col and col < int32(row + band.hi)
    if FEATURES & MASK:
        at = score.mask_strides
        offset = batch_index * at.batch + head * at.head + row * at.row + col * at.col
        seen = seen and score.mask[offset] != 0
    return seen


# Hides what rows and keys do not see of each other in accumulators (ptx_sm80.py), where no mask
# does; row and col are those of s[0]. Counted from col, a score's column is a constant: one
# comparison each, and a second one only where a window begins.
def hide(FEATURES, N):
    @cuda.jit(device=True, forceinline=True)
    def function(s, band, row, col):
        for half in range(2):
            begin, end = int32(0), int32(band.kv_length)
            if FEATURES & RANGE:
                begin, end = int32(row + band.lo - col), min(end, int32(row + band.hi))
            end = int32(end - col) if row < band.q_length else int32(0)
            for n in range(N // 4):
                for i in range(2):
                    if int32(n * 8 + i) >= end:
                        s[4 * n + 2 * half + i] = -INF
            if begin > 0:
                for n in range(N // 4):
                    for i in range(2):
                        if int32(n * 8 + i) < begin:
                            s[4 * n + 2 * half + i] = -INF
            row = int32(row + 8)

    return function


# The score before the bias; dot is q_row . k_col.
@cuda.jit(device=True, forceinline=True)
def capped_score(FEATURES, score, dot):
    s = dot * like(dot, score.scale)
    if FEATURES & SOFTCAP:
        softcap = like(dot, score.softcap)
        s = softcap * math.tanh(s * (like(dot, 1) / softcap))  # one division for all elements
    return s


# Adds the bias of a row and a col that exist. A bias of -inf hides the key, whatever its score.
@cuda.jit(device=True, forceinline=True)
def biased_score(FEATURES, score, capped, batch_index, head, row, col):
    s = capped
    if FEATURES & BIAS:
        at = score.bias_strides
        offset = batch_index * at.batch + head * at.head + row * at.row + col * at.col
        bias = score.bias[offset]
        s = bias if bias == -INF else s + bias
    return s


# The score that a row gives a col which it sees.
@cuda.jit(device=True, forceinline=True)
def score_of(FEATURES, score, dot, batch_index, head, row, col):
    capped = capped_score(FEATURES, score, dot)
    return biased_score(FEATURES, score, capped, batch_index, head, row, col)


# Backward through the cap: from the gradient of capped_score to that of scale * dot.
@cuda.jit(device=True, forceinline=True)
def uncapped_gradient(FEATURES, score, ds, capped):
    if FEATURES & SOFTCAP:
        t = capped * (like(ds, 1) / like(ds, score.softcap))
        ds *= like(ds, 1) - t * t
    return ds


# What to subtract from the scores of a row, given their maximum or lse. That is -inf where the row
# saw nothing: with 0 in its place exp(-inf - 0) is 0, where (-inf) - (-inf) would be NaN.
@cuda.jit(device=True, forceinline=True)
def finite_or_zero(x):
    return like(x, 0) if x == -INF else x


# A score's exponent of two is score * factor - row_max * factor in one multiply-add: factor is
# log2(e) times a scale. Of the two products only the second is rounded on its own, and of numbers
# from 2^28 on by 16 and more: the largest exponent would not be 0, and p could overflow. There a
# power of two is the factor, which rounds nothing. Scores of that size differ by 16 or not at all,
# so that either factor leaves the smaller ones no weight.
@cuda.jit(device=True, forceinline=True)
def exponent_of(row_max, to_log2):
    bits = int32((libdevice.float_as_int(to_log2) + int32(0x7FFFFF)) & int32(0x7F800000))
    power_of_two = libdevice.int_as_float(bits)
    scaled, scaled_exactly = row_max * to_log2, row_max * power_of_two
    huge = math.fabs(scaled) >= float32(2.0**28)
    return Exponent(power_of_two if huge else to_log2, scaled_exactly if huge else scaled)
