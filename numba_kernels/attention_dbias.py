"""attention_dbias: the gradient of the bias, for every backward.

  ds = p * (dout v^T - delta),  dbias = sum of ds along the axes that the bias is broadcast along

Scores are recomputed tile by tile, so nothing of N x N is needed. A block owns one tile of dbias
and visits everything that adds to it in a fixed order: the same bits in every run. The smaller
the bias, the fewer blocks there are, and the longer each of them works.

Work split:    a block of 256 threads takes BLOCK x BLOCK elements (1 along a broadcast axis)
Shared memory: two operands of BLOCK_K x (BLOCK + 1) elements
Registers:     (BLOCK / 16)^2 results of three sums
Twin:          cuda_src/attention_dbias.cu
Launched by:   workbench/launchers.py, in a backward that returns dbias, after attention_delta
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, advance, cdiv, div, exp_of, offset_of, rem, warp_sum
from .matmul import MATMUL_SIDE, MATMUL_THREADS, matmul_tile
from .scores import finite_or_zero, first_key, key_range, last_key, score_of, sees


def attention_dbias(T, BLOCK, BLOCK_K, FEATURES):
    Acc = acc_t(T)
    OWN = BLOCK // MATMUL_SIDE
    int32, int64 = types.int32, types.int64
    TILE = (BLOCK_K, BLOCK + 1)
    RESULTS = (OWN, OWN)
    multiply_nt = matmul_tile(Acc, BLOCK, BLOCK_K, 0, 1)

    @cuda.jit(launch_bounds=(MATMUL_THREADS, 1))
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q)
        delta,  # (batch, heads_q, seqlen_q)
        dbias,  # (batch, heads_q, seqlen_q, seqlen_k), any of them 1
        dout_strides,
        q_strides,
        k_strides,
        v_strides,
        dbias_strides,  # 0 along the axes of length 1
        batch,
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

        # 1. Which elements of dbias are ours, and what adds to them
        tile = int64(cuda.blockIdx.x)
        k_tiles = cdiv(seqlen_k, BLOCK) if dbias_strides.col else int64(1)
        q_tiles = cdiv(seqlen_q, BLOCK) if dbias_strides.row else int64(1)
        heads = heads_q if dbias_strides.head else int64(1)
        k_begin = int32(rem(tile, k_tiles) * BLOCK)
        q_begin = int32(rem(div(tile, k_tiles), q_tiles) * BLOCK)
        head_begin = rem(div(div(tile, k_tiles), q_tiles), heads)
        batch_begin = div(div(div(tile, k_tiles), q_tiles), heads)
        k_end = int32(k_begin + BLOCK if dbias_strides.col else seqlen_k)
        q_end = int32(q_begin + BLOCK if dbias_strides.row else seqlen_q)
        head_end = head_begin + 1 if dbias_strides.head else heads_q
        batch_end = batch_begin + 1 if dbias_strides.batch else batch
        y = int32(div(cuda.threadIdx.x, MATMUL_SIDE))
        x = int32(rem(cuda.threadIdx.x, MATMUL_SIDE))

        acc = cuda.local.array(RESULTS, Acc)
        s_acc = cuda.local.array(RESULTS, Acc)
        dp_acc = cuda.local.array(RESULTS, Acc)
        for i in range(OWN):
            for j in range(OWN):
                acc[i, j] = 0
        batch_index = batch_begin
        while batch_index < batch_end:
            band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
            head = head_begin
            while head < head_end:
                head_kv = div(head, div(heads_q, heads_kv))
                rows_before = (batch_index * heads_q + head) * seqlen_q
                q_start = q_begin
                while q_start < q_end:
                    first = first_key(FEATURES, band, q_start)
                    last = min(k_end, last_key(FEATURES, band, q_start + BLOCK))
                    k_start = int32(max(k_begin, div(first, BLOCK) * BLOCK))
                    while k_start < last:
                        q_rows = int32(band.q_length - q_start)
                        k_rows = int32(band.kv_length - k_start)
                        dout_tile = advance(
                            dout, offset_of(dout_strides, batch_index, head, q_start)
                        )
                        q_tile = advance(q, offset_of(q_strides, batch_index, head, q_start))
                        k_tile = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
                        v_tile = advance(v, offset_of(v_strides, batch_index, head_kv, k_start))
                        for i in range(OWN):
                            for j in range(OWN):
                                s_acc[i, j] = 0
                                dp_acc[i, j] = 0
                        multiply_nt(
                            s_acc,
                            q_tile,
                            q_strides.row,
                            k_tile,
                            k_strides.row,
                            q_rows,
                            k_rows,
                            head_dim,
                            a_smem,
                            b_smem,
                        )
                        multiply_nt(
                            dp_acc,
                            dout_tile,
                            dout_strides.row,
                            v_tile,
                            v_strides.row,
                            q_rows,
                            k_rows,
                            head_dim_v,
                            a_smem,
                            b_smem,
                        )
                        for i in range(OWN):
                            for j in range(OWN):
                                row = int32(q_start + y + i * MATMUL_SIDE)
                                col = int32(k_start + x + j * MATMUL_SIDE)
                                if sees(FEATURES, score, band, batch_index, head, row, col):
                                    # 4b. p = exp(s - lse)
                                    s = score_of(
                                        FEATURES, score, s_acc[i, j], batch_index, head, row, col
                                    )
                                    p = exp_of(s - finite_or_zero(lse[rows_before + row]))

                                    # 4d. ds = p * (dout v^T - delta)
                                    acc[i, j] += p * (dp_acc[i, j] - delta[rows_before + row])
                        k_start += int32(BLOCK)
                    q_start += int32(BLOCK)
                head += 1
            batch_index += 1

        # Add up along the axes that the bias is broadcast along
        if dbias_strides.col == 0:
            for i in range(OWN):
                for j in range(1, OWN):
                    acc[i, 0] += acc[i, j]
                acc[i, 0] = warp_sum(acc[i, 0], MATMUL_SIDE)
        if dbias_strides.row == 0:
            # Each row of threads takes a row of a_smem, which has at least 16
            cuda.syncthreads()  # the last product's operands have been read
            for j in range(OWN):
                for i in range(1, OWN):
                    acc[0, j] += acc[i, j]
                a_smem[y, x + j * MATMUL_SIDE] = acc[0, j]
            cuda.syncthreads()
            for j in range(OWN):
                acc[0, j] = 0
                for i in range(MATMUL_SIDE):
                    acc[0, j] += a_smem[i, x + j * MATMUL_SIDE]

        # 5. Store
        dbias = advance(dbias, batch_begin * dbias_strides.batch + head_begin * dbias_strides.head)
        for i in range(OWN):
            for j in range(OWN):
                row = q_begin + y + i * MATMUL_SIDE
                col = k_begin + x + j * MATMUL_SIDE
                owns_row = row < seqlen_q if dbias_strides.row else row == 0
                owns_col = col < seqlen_k if dbias_strides.col else col == 0
                if owns_row and owns_col:
                    dbias[row * dbias_strides.row + col] = acc[i, j]

    return kernel
