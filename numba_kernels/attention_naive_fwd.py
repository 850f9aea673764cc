"""attention_naive_fwd: attention as the formula reads, from global memory alone.

  s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))

The first attention kernel to read. It keeps a row of scores where the textbook has it, in an
N x N matrix in global memory, and goes over it three times. The steps carry the numbers they
have in all forwards; 2, 4a and 4c come with tiles.

Work split:    a warp takes a query row; a lane takes every 32nd key, then every 32nd column
Shared memory: none
Registers:     a few sums a lane
Twin:          cuda_src/attention_naive_fwd.cu
Launched by:   workbench/launchers.py, attention_naive
"""

import math

from numba import cuda
from numba.cuda import types

from .common import (
    INF,
    acc_t,
    advance,
    div,
    exp_of,
    from_acc,
    offset_of,
    rem,
    to_acc,
    warp_max,
    warp_sum,
)
from .scores import finite_or_zero, first_key, key_range, last_key, score_of, sees


def attention_naive_fwd(T, FEATURES):
    Acc = acc_t(T)
    int32, int64 = types.int32, types.int64

    @cuda.jit
    def kernel(
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q)
        scores,  # (batch, heads_q, seqlen_q, seqlen_k)
        q_strides,
        k_strides,
        v_strides,
        out_strides,
        batch,
        heads_q,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        score,
    ):
        # 1. Which rows are ours
        warp = (int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) >> 5
        lane_id = cuda.threadIdx.x & 31
        if warp >= batch * heads_q * seqlen_q:  # the whole warp
            return
        row = int32(rem(warp, seqlen_q))
        head = rem(div(warp, seqlen_q), heads_q)
        head_kv = div(head, div(heads_q, heads_kv))
        batch_index = div(div(warp, seqlen_q), heads_q)
        q = advance(q, offset_of(q_strides, batch_index, head, row))
        k = advance(k, offset_of(k_strides, batch_index, head_kv, 0))
        v = advance(v, offset_of(v_strides, batch_index, head_kv, 0))
        out = advance(out, offset_of(out_strides, batch_index, head, row))
        scores = advance(scores, warp * seqlen_k)
        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        k_begin = first_key(FEATURES, band, row)
        k_end = last_key(FEATURES, band, row + 1)

        # 4b. s = q k^T, masked
        row_max = Acc(-INF)
        col = int32(k_begin + lane_id)
        while col < k_end:
            s = Acc(-INF)
            if sees(FEATURES, score, band, batch_index, head, row, col):
                key = advance(k, col * k_strides.row)
                dot = Acc(0)
                d = int64(0)
                while d < head_dim:
                    dot += to_acc(q[d]) * to_acc(key[d])
                    d += 1
                s = score_of(FEATURES, score, dot, batch_index, head, row, col)
            scores[col] = s
            row_max = max(row_max, s)
            col += int32(32)
        row_max = warp_max(row_max)

        # p = exp(s - row_max), in place: a lane reads back what it wrote
        shift = finite_or_zero(row_max)
        row_sum = Acc(0)
        col = int32(k_begin + lane_id)
        while col < k_end:
            p = exp_of(scores[col] - shift)
            scores[col] = p
            row_sum += p
            col += int32(32)
        row_sum = warp_sum(row_sum)
        cuda.syncwarp()  # from here on a lane reads what others wrote

        # 4d. acc += p v
        d = int64(lane_id)
        while d < head_dim_v:
            acc = Acc(0)
            col = k_begin
            while col < k_end:
                acc += scores[col] * to_acc(v[col * v_strides.row + d])
                col += int32(1)

            # 5. Normalise and store; a row that saw no key has a sum of 0
            out[d] = from_acc(T, Acc(0) if row_sum == 0 else acc / row_sum)
            d += 32
        if lane_id == 0:
            lse[warp] = Acc(-INF) if row_sum == 0 else row_max + math.log(row_sum)

    return kernel
