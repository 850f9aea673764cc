"""attention_flash_mma_fwd: the online softmax on tensor cores, in fp16 or bf16.

  s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))

As attention_flash_simt_fwd, with the products on tensor cores (fragments.cuh). A warp has whole
rows of the scores, and p goes from the accumulators of one product to the operand of the next
without leaving its registers. The softmax is taken to base 2 with the scale in its exponent: one
multiply-add and one exp2 an element. With SPLIT the keys of a row are shared by several blocks,
each with a partial result that attention_merge puts together: for few queries and many keys.

Work split:    a block owns BLOCK_M query rows of one head (SPLIT: and a share of the keys), each
               warp BLOCK_M / warps of the rows: 16 or 32
Shared memory: the Q, K and V tiles; one buffer each is enough, as K is loaded while p v runs and
               V while q k^T does. In the end Q holds the output, to be stored by whole rows
Registers:     the scores and the output of the warp's rows, as accumulators of 16 x 8
Twin:          cuda_src/attention_flash_mma_fwd.cu
Launched by:   workbench/launchers.py, attention_flash_mma
"""

import math

from numba import cuda
from numba.cuda import types

from .common import (
    INF,
    LN2,
    LOG2E,
    advance,
    cdiv,
    div,
    head_tile,
    offset_of,
    reinterpret,
    rem,
    store_x2,
    warp_max,
    warp_sum,
)
from .fragments import (
    ACROSS_FIRST,
    DOWN_FIRST,
    fresh,
    lane_address,
    load_tile,
    multiply_nt,
    multiply_rn,
    negate_copied,
    row_bytes,
    store_accumulators,
    store_tile,
    tile_bytes,
)
from .ptx_sm80 import (
    cp_async_wait_all,
    cvt_rn_x2,
    ex2_approx,
    griddepcontrol_launch_dependents,
    lg2_approx,
    shared_address,
)
from .scores import (
    BIAS,
    SOFTCAP,
    biased_score,
    capped_score,
    exponent_of,
    finite_or_zero,
    first_key,
    key_range,
    last_key,
    sees,
    tile_is_unmasked,
)

SMALLEST = 1.1754944e-38  # normal float


def attention_flash_mma_fwd(T, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, FEATURES, SPLIT, THREADS):
    float32, int32, uint8, uint32 = types.float32, types.int32, types.uint8, types.uint32
    M = BLOCK_M // 16 // (THREADS // 32)  # accumulators of 16 x 8 a warp, downwards
    KEYS, DIMS = BLOCK_N // 8, HEAD_DIM_V // 8  # and across
    Q_DIM = max(HEAD_DIM, HEAD_DIM_V)
    SCALED = FEATURES & (BIAS | SOFTCAP)  # before they are added up, not after
    ROWS, SCORES, OUTPUTS = (M, 2), (M, KEYS, 4), (M, DIMS, 4)
    P_SHAPE = (KEYS // 2, M, 4)

    # Shared memory: where the K and V tiles begin, after Q.
    K_SMEM = tile_bytes(BLOCK_M, Q_DIM)
    V_SMEM = K_SMEM + tile_bytes(BLOCK_N, HEAD_DIM)
    OUT_ROW = row_bytes(HEAD_DIM_V)

    load_q = load_tile(BLOCK_M, HEAD_DIM, THREADS)
    load_k = load_tile(BLOCK_N, HEAD_DIM, THREADS)
    load_v = load_tile(BLOCK_N, HEAD_DIM_V, THREADS)
    multiply_qk = multiply_nt(T, HEAD_DIM, HEAD_DIM, HEAD_DIM, 1, M, KEYS)
    multiply_pv = multiply_rn(T, HEAD_DIM_V, KEYS // 2, M, DIMS)
    negate_q = negate_copied(BLOCK_M, HEAD_DIM, THREADS)
    pair = cvt_rn_x2(T)
    stage_out = store_accumulators(T, HEAD_DIM_V, 1, M, DIMS)
    store_out = store_tile(T, 16 * M, HEAD_DIM_V, 32)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def kernel(
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        out_parts,  # (splits, batch, heads_q, seqlen_q, HEAD_DIM_V)
        lse_parts,  # (splits, batch, heads_q, seqlen_q)
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
        heads_at_a_time,
    ):
        row_max = cuda.local.array(ROWS, float32)
        row_sum = cuda.local.array(ROWS, float32)
        acc = cuda.local.array(OUTPUTS, float32)
        s = cuda.local.array(SCORES, float32)
        p = cuda.local.array(P_SHAPE, uint32)  # in the layout of an operand

        shared = cuda.shared.array(0, uint32, 128)
        q_smem = shared_address(shared, 0)
        k_smem = uint32(q_smem + K_SMEM)
        v_smem = uint32(q_smem + V_SMEM)

        # 1. Which rows are ours
        if SPLIT:
            griddepcontrol_launch_dependents()
        heads_total, tiles_q = uint32(batch * heads_q), uint32(cdiv(uint32(seqlen_q), BLOCK_M))
        tiles = uint32(div(uint32(cuda.gridDim.x), heads_total))  # with those of splits
        splits = uint32(div(tiles, tiles_q))
        block = uint32(cuda.blockIdx.x)
        head, tile = head_tile(block, tiles, heads_total, uint32(heads_at_a_time))
        split = uint32(div(tile, tiles_q)) if SPLIT else uint32(0)
        batch_index = uint32(div(head, uint32(heads_q)))
        head = uint32(rem(head, uint32(heads_q)))
        head_kv = uint32(div(head, uint32(div(uint32(heads_q), uint32(heads_kv)))))
        tile_of_split = rem(tile, tiles_q) if SPLIT else tile
        q_start = int32((tiles_q - 1 - tile_of_split) * BLOCK_M)
        warp_id, lane_id = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        warp_row = int32(warp_id * (16 * M))
        first_row, first_col = int32(q_start + warp_row + (lane_id >> 2)), (lane_id & 3) * 2

        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        k_start = int32(div(first_key(FEATURES, band, q_start), BLOCK_N) * BLOCK_N)
        k_end = last_key(FEATURES, band, q_start + BLOCK_M)
        if SPLIT and k_start < k_end:
            share = cdiv(cdiv(k_end - k_start, BLOCK_N), splits) * BLOCK_N
            k_start = int32(k_start + split * share)
            k_end = int32(min(k_end, k_start + share))

        # 2. Load the Q tile
        q_from = advance(q, offset_of(q_strides, batch_index, head, q_start))
        load_q(q_smem, q_from, q_strides.row, band.q_length - q_start, head_dim)
        k_from = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
        load_k(k_smem, k_from, k_strides.row, k_end - k_start, head_dim)

        # 3. Start the running softmax
        for m in range(M):
            for half in range(2):
                row_max[m, half] = -INF
                row_sum[m, half] = 0  # of this thread's keys alone, until the end
            for n in range(DIMS):
                for i in range(4):
                    acc[m, n, i] = 0
        # s * to_log2 is the exponent of two. The largest s is to be the largest score, so a
        # negative scale goes with -q; and 0 times -inf would be NaN, so a scale of 0 is a tiny one.
        to_log2 = float32(LOG2E)
        if not SCALED:
            to_log2 = max(float32(math.fabs(score.scale)) * to_log2, float32(SMALLEST))
            if score.scale < 0:
                negate_q(reinterpret(uint8, shared))

        # 4. Walk over the key/value tiles
        q_lane = lane_address(DOWN_FIRST, HEAD_DIM, q_smem, warp_row, 0)
        k_lane = lane_address(ACROSS_FIRST, HEAD_DIM, k_smem, 0, 0)
        v_lane = lane_address(DOWN_FIRST, HEAD_DIM_V, v_smem, 0, 0)
        while k_start < k_end:
            q_lane, k_lane = fresh(q_lane), fresh(k_lane)

            # 4a. Load the K and V tiles
            cp_async_wait_all()
            cuda.syncthreads()  # K is there, and V is free: every warp is past the last p v
            v_from = advance(v, offset_of(v_strides, batch_index, head_kv, k_start))
            load_v(v_smem, v_from, v_strides.row, k_end - k_start, head_dim_v)

            # 4b. s = q k^T, masked
            for m in range(M):
                for n in range(KEYS):
                    for i in range(4):
                        s[m, n, i] = 0
            multiply_qk(s, q_lane, k_lane)
            unmasked = tile_is_unmasked(
                FEATURES,
                band,
                q_start,
                int32(q_start + BLOCK_M),
                k_start,
                int32(k_start + BLOCK_N),
            )
            if SCALED:
                for m in range(M):
                    for n in range(KEYS):
                        for i in range(4):
                            s[m, n, i] = capped_score(FEATURES, score, s[m, n, i])
            if not unmasked or FEATURES & BIAS:  # a loop of its own: most tiles go past it
                for m in range(M):
                    for n in range(KEYS):
                        for i in range(4):
                            row = int32(first_row + m * 16 + (i >> 1) * 8)
                            col = int32(k_start + first_col + n * 8 + (i & 1))
                            if unmasked or sees(FEATURES, score, band, batch_index, head, row, col):
                                s[m, n, i] = biased_score(
                                    FEATURES, score, s[m, n, i], batch_index, head, row, col
                                )
                            else:
                                s[m, n, i] = -INF

            # 4c. Rescale what we have to the new maximum
            for m in range(M):
                for half in range(2):
                    tile_max = float32(-INF)
                    for n in range(KEYS):
                        pair_max = max(s[m, n, 2 * half], s[m, n, 2 * half + 1])
                        tile_max = max(tile_max, pair_max)
                    new_max = max(row_max[m, half], warp_max(tile_max, 4))
                    shift = finite_or_zero(new_max)
                    of = exponent_of(shift, to_log2)
                    rescale = ex2_approx((row_max[m, half] - shift) * to_log2)
                    row_max[m, half] = new_max
                    sum_of_tile = float32(0)
                    for n in range(KEYS):
                        x = ex2_approx(cuda.fma(s[m, n, 2 * half], of.factor, -of.subtrahend))
                        y = ex2_approx(cuda.fma(s[m, n, 2 * half + 1], of.factor, -of.subtrahend))
                        sum_of_tile += x + y
                        p[n >> 1, m, (n & 1) * 2 + half] = pair(x, y)
                    row_sum[m, half] = row_sum[m, half] * rescale + sum_of_tile
                    for n in range(DIMS):
                        acc[m, n, 2 * half] *= rescale
                        acc[m, n, 2 * half + 1] *= rescale

            # 4d. acc += p v
            cp_async_wait_all()
            cuda.syncthreads()  # V is there, and K is free
            k_start = int32(k_start + BLOCK_N)
            if k_start < k_end:
                k_from = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
                load_k(k_smem, k_from, k_strides.row, k_end - k_start, head_dim)
            multiply_pv(acc, p, v_lane)
        cp_async_wait_all()
        cuda.syncthreads()  # Q is free: without a tile nobody has waited for it

        # 5. Normalise and store
        row_index = (batch_index * heads_q + head) * seqlen_q
        if SPLIT:
            row_index += split * heads_total * seqlen_q
            lse = lse_parts
        for m in range(M):
            for half in range(2):
                row = first_row + m * 16 + half * 8
                total = warp_sum(row_sum[m, half], 4)
                # A row that sees no key gives 0.
                inverse = float32(0) if total == 0 else float32(1) / total
                for n in range(DIMS):
                    acc[m, n, 2 * half] *= inverse
                    acc[m, n, 2 * half + 1] *= inverse
                if row < seqlen_q and first_col == 0:
                    log2_sum = row_max[m, half] * to_log2 + lg2_approx(total)
                    lse[row_index + row] = log2_sum * float32(LN2)
        if SPLIT:
            for m in range(M):
                for n in range(DIMS):
                    for i in range(0, 4, 2):
                        row = first_row + m * 16 + (i >> 1) * 8
                        to = (row_index + row) * HEAD_DIM_V + first_col + n * 8
                        if row < seqlen_q:
                            store_x2(out_parts, to, acc[m, n, i], acc[m, n, i + 1])
        else:
            staged = advance(reinterpret(uint8, shared), warp_row * OUT_ROW)
            stage_out(advance(staged, (lane_id >> 2) * OUT_ROW), first_col, acc, float32(1))
            cuda.syncwarp()  # a warp stores its own rows
            out_from = advance(out, offset_of(out_strides, batch_index, head, q_start + warp_row))
            rows = seqlen_q - q_start - warp_row
            store_out(out_from, staged, out_strides.row, rows, head_dim_v, lane_id)

    return kernel
