"""attention_tiled_fwd: attention whose two matrix products go through shared memory.

  s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))

The three passes of attention_naive_fwd, for a tile of query rows at once: a key that has been
brought to shared memory now serves BLOCK rows. The scores still travel through an N x N matrix
in global memory, once for each pass. Steps 2 and 4a, loading the tiles, are inside matmul_tile.

Work split:    a block of 256 threads takes BLOCK query rows, a thread (BLOCK / 16)^2 results
Shared memory: two operands of BLOCK_K x (BLOCK + 1) elements
Registers:     the results, and for each of its rows a maximum and a sum
Twin:          cuda_src/attention_tiled_fwd.cu
Launched by:   workbench/launchers.py, attention_tiled
"""

import math

from numba import cuda
from numba.cuda import types

from .common import (
    INF,
    acc_t,
    advance,
    cdiv,
    div,
    exp_of,
    from_acc,
    offset_of,
    rem,
    warp_max,
    warp_sum,
)
from .matmul import MATMUL_SIDE, MATMUL_THREADS, matmul_tile
from .scores import (
    finite_or_zero,
    first_key,
    key_range,
    last_key,
    score_of,
    sees,
)


def attention_tiled_fwd(T, BLOCK, BLOCK_K, FEATURES):
    Acc = acc_t(T)
    OWN = BLOCK // MATMUL_SIDE
    int32, int64 = types.int32, types.int64
    TILE = (BLOCK_K, BLOCK + 1)
    RESULTS = (OWN, OWN)
    multiply_nt = matmul_tile(Acc, BLOCK, BLOCK_K, 0, 1)
    multiply_nn = matmul_tile(Acc, BLOCK, BLOCK_K, 0, 0)

    @cuda.jit(launch_bounds=(MATMUL_THREADS, 2))
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
        batch,  # noqa: ARG001 (all attention kernels take the same sizes)
        heads_q,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        score,
    ):
        a_smem = cuda.shared.array(TILE, Acc)
        b_smem = cuda.shared.array(TILE, Acc)

        # 1. Which rows are ours
        block = int64(cuda.blockIdx.x)
        q_tiles = cdiv(seqlen_q, BLOCK)
        q_start = int32(rem(block, q_tiles) * BLOCK)
        head = rem(div(block, q_tiles), heads_q)
        head_kv = div(head, div(heads_q, heads_kv))
        batch_index = div(div(block, q_tiles), heads_q)
        rows_before = (batch_index * heads_q + head) * seqlen_q + q_start
        q = advance(q, offset_of(q_strides, batch_index, head, q_start))
        k = advance(k, offset_of(k_strides, batch_index, head_kv, 0))
        v = advance(v, offset_of(v_strides, batch_index, head_kv, 0))
        out = advance(
            out,
            offset_of(out_strides, batch_index, head, q_start),
        )
        lse = advance(lse, rows_before)
        scores = advance(scores, rows_before * seqlen_k)
        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        k_begin = int32(div(first_key(FEATURES, band, q_start), BLOCK) * BLOCK)
        k_end = last_key(FEATURES, band, q_start + BLOCK)
        rows = int32(min(BLOCK, seqlen_q - q_start))
        y = int32(div(cuda.threadIdx.x, MATMUL_SIDE))
        x = int32(rem(cuda.threadIdx.x, MATMUL_SIDE))

        # 3. Start the running softmax
        row_max = cuda.local.array(OWN, Acc)
        row_sum = cuda.local.array(OWN, Acc)
        for i in range(OWN):
            row_max[i] = -INF
            row_sum[i] = 0

        # 4. Walk over the key/value tiles
        acc = cuda.local.array(RESULTS, Acc)
        k_start = k_begin
        while k_start < k_end:
            # 4b. s = q k^T, masked
            q_rows = band.q_length - q_start
            k_rows = band.kv_length - k_start
            k_tile = advance(k, k_start * k_strides.row)
            for i in range(OWN):
                for j in range(OWN):
                    acc[i, j] = 0
            multiply_nt(
                acc,
                q,
                q_strides.row,
                k_tile,
                k_strides.row,
                q_rows,
                k_rows,
                head_dim,
                a_smem,
                b_smem,
            )
            for i in range(OWN):
                for j in range(OWN):
                    row = int32(y + i * MATMUL_SIDE)
                    col = int32(k_start + x + j * MATMUL_SIDE)
                    s = Acc(-INF)
                    if sees(FEATURES, score, band, batch_index, head, q_start + row, col):
                        s = score_of(
                            FEATURES, score, acc[i, j], batch_index, head, q_start + row, col
                        )
                    if row < rows and col < seqlen_k:
                        scores[row * seqlen_k + col] = s
                    row_max[i] = max(row_max[i], s)
            k_start += int32(BLOCK)

        # p = exp(s - row_max), in place: a thread reads back what it wrote
        for i in range(OWN):
            row_max[i] = warp_max(row_max[i], MATMUL_SIDE)
        k_start = k_begin
        while k_start < k_end:
            for i in range(OWN):
                for j in range(OWN):
                    row = int32(y + i * MATMUL_SIDE)
                    col = int32(k_start + x + j * MATMUL_SIDE)
                    if row < rows and col < seqlen_k:
                        p = exp_of(scores[row * seqlen_k + col] - finite_or_zero(row_max[i]))
                        scores[row * seqlen_k + col] = p
                        row_sum[i] += p
            k_start += int32(BLOCK)
        for i in range(OWN):
            row_sum[i] = warp_sum(row_sum[i], MATMUL_SIDE)

        d_start = int64(0)
        while d_start < head_dim_v:
            # 4d. acc += p v, with p written by all threads once matmul_tile passes its barrier
            cols = head_dim_v - d_start
            v_tile = advance(v, k_begin * v_strides.row + d_start)
            p_tile = advance(scores, k_begin)
            for i in range(OWN):
                for j in range(OWN):
                    acc[i, j] = 0
            multiply_nn(
                acc,
                p_tile,
                seqlen_k,
                v_tile,
                v_strides.row,
                rows,
                cols,
                k_end - k_begin,
                a_smem,
                b_smem,
            )

            # 5. Normalise and store; a row that saw no key has a sum of 0
            for i in range(OWN):
                for j in range(OWN):
                    row = y + i * MATMUL_SIDE
                    d = d_start + x + j * MATMUL_SIDE
                    normalised = Acc(0) if row_sum[i] == 0 else acc[i, j] / row_sum[i]
                    if row < rows and d < head_dim_v:
                        out[row * out_strides.row + d] = from_acc(T, normalised)
            d_start += BLOCK
        for i in range(OWN):
            row = y + i * MATMUL_SIDE
            if x == 0 and row < rows:
                lse[row] = Acc(-INF) if row_sum[i] == 0 else row_max[i] + math.log(row_sum[i])

    return kernel
