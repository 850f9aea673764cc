"""attention_tiled_bwd: the gradients of attention, five matrix products through shared memory.

  p = exp(s - lse),  ds = p * (dout v^T - delta),  dv = p^T dout,  dk = scale ds^T q,
  dq = scale ds k

As in attention_naive_bwd, dq runs first and leaves p and ds in two N x N matrices in global
memory; dk/dv multiplies them. Steps 2 and 4a, loading the tiles, are inside matmul_tile.

Work split:    dq: a block of 256 threads takes BLOCK query rows
               dk/dv: two blocks take BLOCK key rows, one for dv = p^T dout, one for dk = ds^T q
Shared memory: two operands of BLOCK_K x (BLOCK + 1) elements
Registers:     (BLOCK / 16)^2 results of one product or two
Twin:          cuda_src/attention_tiled_bwd.cu
Launched by:   workbench/launchers.py, attention_tiled, after attention_delta
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, advance, cdiv, div, exp_of, from_acc, offset_of, rem
from .matmul import MATMUL_SIDE, MATMUL_THREADS, matmul_tile
from .scores import (
    biased_score,
    capped_score,
    finite_or_zero,
    first_key,
    first_query,
    key_range,
    last_key,
    last_query,
    sees,
    uncapped_gradient,
)


def attention_tiled_bwd_dq(T, BLOCK, BLOCK_K, FEATURES):
    Acc = acc_t(T)
    OWN = BLOCK // MATMUL_SIDE
    int32, int64 = types.int32, types.int64
    TILE = (BLOCK_K, BLOCK + 1)
    RESULTS = (OWN, OWN)
    multiply_nt = matmul_tile(Acc, BLOCK, BLOCK_K, 0, 1)
    multiply_nn = matmul_tile(Acc, BLOCK, BLOCK_K, 0, 0)

    @cuda.jit(launch_bounds=(MATMUL_THREADS, 2))
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q)
        delta,  # (batch, heads_q, seqlen_q)
        p,  # (batch, heads_q, seqlen_q, seqlen_k)
        ds,  # (batch, heads_q, seqlen_q, seqlen_k)
        dq,  # (batch, heads_q, seqlen_q, head_dim)
        dout_strides,
        q_strides,
        k_strides,
        v_strides,
        dq_strides,
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

        # 1. Which query rows are ours
        block = int64(cuda.blockIdx.x)
        q_tiles = cdiv(seqlen_q, BLOCK)
        q_start = int32(rem(block, q_tiles) * BLOCK)
        head = rem(div(block, q_tiles), heads_q)
        head_kv = div(head, div(heads_q, heads_kv))
        batch_index = div(div(block, q_tiles), heads_q)
        rows_before = (batch_index * heads_q + head) * seqlen_q + q_start
        dout = advance(
            dout,
            offset_of(dout_strides, batch_index, head, q_start),
        )
        q = advance(q, offset_of(q_strides, batch_index, head, q_start))
        k = advance(k, offset_of(k_strides, batch_index, head_kv, 0))
        v = advance(v, offset_of(v_strides, batch_index, head_kv, 0))
        dq = advance(dq, offset_of(dq_strides, batch_index, head, q_start))
        lse = advance(lse, rows_before)
        delta = advance(delta, rows_before)
        p = advance(p, rows_before * seqlen_k)
        ds = advance(ds, rows_before * seqlen_k)
        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        k_begin = int32(div(first_key(FEATURES, band, q_start), BLOCK) * BLOCK)
        k_end = last_key(FEATURES, band, q_start + BLOCK)
        rows = int32(min(BLOCK, seqlen_q - q_start))
        y = int32(div(cuda.threadIdx.x, MATMUL_SIDE))
        x = int32(rem(cuda.threadIdx.x, MATMUL_SIDE))

        # 4. Walk over the key/value tiles
        s_acc = cuda.local.array(RESULTS, Acc)
        dp_acc = cuda.local.array(RESULTS, Acc)
        k_start = k_begin
        while k_start < k_end:
            q_rows = int32(band.q_length - q_start)
            k_rows = int32(band.kv_length - k_start)
            k_tile = advance(k, k_start * k_strides.row)
            v_tile = advance(v, k_start * v_strides.row)
            for i in range(OWN):
                for j in range(OWN):
                    s_acc[i, j] = 0
                    dp_acc[i, j] = 0
            multiply_nt(
                s_acc,
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
            multiply_nt(
                dp_acc,
                dout,
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
                    row = int32(y + i * MATMUL_SIDE)
                    col = int32(k_start + x + j * MATMUL_SIDE)
                    p_ij = Acc(0)
                    ds_ij = Acc(0)
                    if sees(FEATURES, score, band, batch_index, head, q_start + row, col):
                        # 4b. p = exp(s - lse)
                        capped = capped_score(FEATURES, score, s_acc[i, j])
                        s = biased_score(
                            FEATURES, score, capped, batch_index, head, q_start + row, col
                        )
                        p_ij = exp_of(s - finite_or_zero(lse[row]))

                        # 4d. ds = p * (dout v^T - delta)
                        ds_ij = p_ij * (dp_acc[i, j] - delta[row])
                        ds_ij = uncapped_gradient(FEATURES, score, ds_ij, capped)
                    # dk/dv reads whole tiles: what is not seen must be 0 there
                    if row < rows and col < seqlen_k:
                        p[row * seqlen_k + col] = p_ij
                        ds[row * seqlen_k + col] = ds_ij
            k_start += int32(BLOCK)

        dq_acc = cuda.local.array(RESULTS, Acc)
        d_start = int64(0)
        while d_start < head_dim:
            # 4f. dq += ds k, with ds written by all threads once matmul_tile passes its barrier
            cols = int32(head_dim - d_start)
            k_tile = advance(k, k_begin * k_strides.row + d_start)
            ds_tile = advance(ds, k_begin)
            for i in range(OWN):
                for j in range(OWN):
                    dq_acc[i, j] = 0
            multiply_nn(
                dq_acc,
                ds_tile,
                seqlen_k,
                k_tile,
                k_strides.row,
                rows,
                cols,
                k_end - k_begin,
                a_smem,
                b_smem,
            )

            # 5. Scale and store
            for i in range(OWN):
                for j in range(OWN):
                    row = y + i * MATMUL_SIDE
                    d = d_start + x + j * MATMUL_SIDE
                    scaled = Acc(score.scale) * dq_acc[i, j]
                    if row < rows and d < head_dim:
                        dq[row * dq_strides.row + d] = from_acc(T, scaled)
            d_start += BLOCK

    return kernel


def attention_tiled_bwd_dkdv(T, BLOCK, BLOCK_K, FEATURES):
    Acc = acc_t(T)
    OWN = BLOCK // MATMUL_SIDE
    int32, int64 = types.int32, types.int64
    TILE = (BLOCK_K, BLOCK + 1)
    RESULTS = (OWN, OWN)
    multiply_tn = matmul_tile(Acc, BLOCK, BLOCK_K, 1, 0)

    @cuda.jit(launch_bounds=(MATMUL_THREADS, 2))
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        q,  # (batch, heads_q, seqlen_q, head_dim)
        p,  # (batch, heads_q, seqlen_q, seqlen_k)
        ds,  # (batch, heads_q, seqlen_q, seqlen_k)
        dk,  # (batch, heads_kv, seqlen_k, head_dim)
        dv,  # (batch, heads_kv, seqlen_k, head_dim_v)
        dout_strides,
        q_strides,
        dk_strides,
        dv_strides,
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

        # 1. Which key rows are ours
        block = int64(cuda.blockIdx.x)
        makes_dv = rem(block, 2) == 0
        k_tiles = cdiv(seqlen_k, BLOCK)
        tile = div(block, 2)
        k_start = int32(rem(tile, k_tiles) * BLOCK)
        head_kv = rem(div(tile, k_tiles), heads_kv)
        batch_index = div(div(tile, k_tiles), heads_kv)
        group = div(heads_q, heads_kv)
        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        q_begin = first_query(FEATURES, band, k_start)
        q_rows = last_query(FEATURES, band, k_start + BLOCK) - q_begin
        rows = int32(min(BLOCK, seqlen_k - k_start))
        y = int32(div(cuda.threadIdx.x, MATMUL_SIDE))
        x = int32(rem(cuda.threadIdx.x, MATMUL_SIDE))

        # The product is left^T right: p and dout for dv, ds and q for dk
        left = p
        right = dout
        grad = dv
        right_strides = dout_strides
        grad_strides = dv_strides
        grad_dim = head_dim_v
        scale = Acc(1)
        if not makes_dv:
            left = ds
            right = q
            grad = dk
            right_strides = q_strides
            grad_strides = dk_strides
            grad_dim = head_dim
            scale = Acc(score.scale)
        right = advance(right, offset_of(right_strides, batch_index, 0, q_begin))
        grad = advance(grad, offset_of(grad_strides, batch_index, head_kv, k_start))

        acc = cuda.local.array(RESULTS, Acc)
        d_start = int64(0)
        while d_start < grad_dim:
            # 3. Start dk and dv
            for i in range(OWN):
                for j in range(OWN):
                    acc[i, j] = 0
            cols = int32(grad_dim - d_start)
            head = head_kv * group
            while head < (head_kv + 1) * group:
                # 4c. dv += p^T dout, in a block that makes dv
                # 4e. dk += ds^T q, in a block that makes dk
                rows_before = (batch_index * heads_q + head) * seqlen_q + q_begin
                left_tile = advance(left, rows_before * seqlen_k + k_start)
                right_tile = advance(right, head * right_strides.head + d_start)
                right_row = right_strides.row
                multiply_tn(
                    acc,
                    left_tile,
                    seqlen_k,
                    right_tile,
                    right_row,
                    rows,
                    cols,
                    q_rows,
                    a_smem,
                    b_smem,
                )
                head += 1

            # 5. Scale and store
            for i in range(OWN):
                for j in range(OWN):
                    row = y + i * MATMUL_SIDE
                    d = d_start + x + j * MATMUL_SIDE
                    if row < rows and d < grad_dim:
                        grad[row * grad_strides.row + d] = from_acc(T, scale * acc[i, j])
            d_start += BLOCK

    return kernel
