"""attention_naive_bwd: the gradients of attention, from global memory alone.

  p = exp(s - lse),  ds = p * (dout v^T - delta),  dv = p^T dout,  dk = scale ds^T q,
  dq = scale ds k

dq runs first and leaves p and ds in two N x N matrices, of which dk/dv then reads columns. The
steps carry the numbers that they have in all backwards; the others come with tiles.

Work split:    dq: a warp takes a query row; a lane takes every 32nd key, then every 32nd column
               dk/dv: a block takes a key row, a thread a column; it adds up over all query rows
               of all query heads that share the key
Shared memory: none
Registers:     a few sums a lane
Twin:          cuda_src/attention_naive_bwd.cu
Launched by:   workbench/launchers.py, attention_naive, after attention_delta
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, advance, div, exp_of, from_acc, offset_of, rem, to_acc
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


def attention_naive_bwd_dq(T, FEATURES):
    Acc = acc_t(T)
    int32, int64 = types.int32, types.int64

    @cuda.jit
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
        batch,
        heads_q,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        score,
    ):
        # 1. Which query rows are ours
        warp = (int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) >> 5
        lane_id = cuda.threadIdx.x & 31
        if warp >= batch * heads_q * seqlen_q:  # the whole warp
            return
        row = int32(rem(warp, seqlen_q))
        head = rem(div(warp, seqlen_q), heads_q)
        head_kv = div(head, div(heads_q, heads_kv))
        batch_index = div(div(warp, seqlen_q), heads_q)
        dout = advance(
            dout,
            offset_of(dout_strides, batch_index, head, row),
        )
        q = advance(q, offset_of(q_strides, batch_index, head, row))
        k = advance(k, offset_of(k_strides, batch_index, head_kv, 0))
        v = advance(v, offset_of(v_strides, batch_index, head_kv, 0))
        dq = advance(dq, offset_of(dq_strides, batch_index, head, row))
        p = advance(p, warp * seqlen_k)
        ds = advance(ds, warp * seqlen_k)
        row_lse = finite_or_zero(lse[warp])
        row_delta = delta[warp]
        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        k_begin = first_key(FEATURES, band, row)
        k_end = last_key(FEATURES, band, row + 1)

        col = int32(k_begin + lane_id)
        while col < k_end:
            p_col = Acc(0)
            ds_col = Acc(0)
            if sees(FEATURES, score, band, batch_index, head, row, col):
                key = advance(k, col * k_strides.row)
                value = advance(v, col * v_strides.row)

                # 4b. p = exp(s - lse)
                dot = Acc(0)
                d = int64(0)
                while d < head_dim:
                    dot += to_acc(q[d]) * to_acc(key[d])
                    d += 1
                capped = capped_score(FEATURES, score, dot)
                s = biased_score(FEATURES, score, capped, batch_index, head, row, col)
                p_col = exp_of(s - row_lse)

                # 4d. ds = p * (dout v^T - delta)
                dp = Acc(0)
                d = int64(0)
                while d < head_dim_v:
                    dp += to_acc(dout[d]) * to_acc(value[d])
                    d += 1
                ds_col = uncapped_gradient(FEATURES, score, p_col * (dp - row_delta), capped)
            p[col] = p_col
            ds[col] = ds_col
            col += int32(32)
        cuda.syncwarp()  # from here on a lane reads what others wrote

        d = int64(lane_id)
        while d < head_dim:
            # 4f. dq += ds k
            dq_acc = Acc(0)
            col = k_begin
            while col < k_end:
                dq_acc += ds[col] * to_acc(k[col * k_strides.row + d])
                col += int32(1)

            # 5. Scale and store
            dq[d] = from_acc(T, Acc(score.scale) * dq_acc)
            d += 32

    return kernel


def attention_naive_bwd_dkdv(T, FEATURES):
    Acc = acc_t(T)
    int32, int64 = types.int32, types.int64

    @cuda.jit
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
        # 1. Which key rows are ours
        block = int64(cuda.blockIdx.x)
        col = int32(rem(block, seqlen_k))
        head_kv = rem(div(block, seqlen_k), heads_kv)
        batch_index = div(div(block, seqlen_k), heads_kv)
        group = div(heads_q, heads_kv)
        dk = advance(dk, offset_of(dk_strides, batch_index, head_kv, col))
        dv = advance(dv, offset_of(dv_strides, batch_index, head_kv, col))
        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        q_begin = first_query(FEATURES, band, col)
        q_end = last_query(FEATURES, band, col + 1)

        d = int64(cuda.threadIdx.x)
        while d < max(head_dim, head_dim_v):
            # 3. Start dk and dv
            dk_acc = Acc(0)
            dv_acc = Acc(0)

            head = head_kv * group
            while head < (head_kv + 1) * group:
                dout_head = advance(dout, offset_of(dout_strides, batch_index, head, 0))
                q_head = advance(q, offset_of(q_strides, batch_index, head, 0))
                rows = (batch_index * heads_q + head) * seqlen_q
                row = q_begin
                while row < q_end:
                    at = (rows + row) * seqlen_k + col

                    # 4c. dv += p^T dout
                    if d < head_dim_v:
                        dv_acc += p[at] * to_acc(dout_head[row * dout_strides.row + d])

                    # 4e. dk += ds^T q
                    if d < head_dim:
                        dk_acc += ds[at] * to_acc(q_head[row * q_strides.row + d])
                    row += int32(1)
                head += 1

            # 5. Scale and store
            if d < head_dim_v:
                dv[d] = from_acc(T, dv_acc)
            if d < head_dim:
                dk[d] = from_acc(T, Acc(score.scale) * dk_acc)
            d += cuda.blockDim.x

    return kernel
