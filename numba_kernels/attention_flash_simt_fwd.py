"""attention_flash_simt_fwd: tiles and an online softmax on CUDA cores, in exact fp32 or fp64.

  s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))

The scores never leave the chip: a block keeps a tile of query rows and walks over the keys, tile
by tile, with a softmax of what it has seen so far. All arithmetic is in Acc, on register tiles
(tiles.cuh). Query tiles are taken from the last row to the first, of all heads at a time: so the
longest walks start first under a causal mask.

Work split:    a block owns BLOCK_M query rows of one head, each warp its share of them
Shared memory: the Q, K, V and P tiles; one buffer each is enough, as K is loaded while p v runs
               and V while q k^T does
Registers:     ROWS x KEYS scores and ROWS x DIMS outputs a thread, 8 x 8 at best: a 16-byte load
               from shared memory then feeds 16 multiply-adds
Twin:          cuda_src/attention_flash_simt_fwd.cu
Launched by:   workbench/launchers.py, attention_flash_simt
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
    offset_of,
    rem,
    vec_length,
)
from .ptx_sm80 import cp_async_wait_all
from .scores import (
    BIAS,
    biased_score,
    capped_score,
    finite_or_zero,
    first_key,
    key_range,
    last_key,
    sees,
    tile_is_unmasked,
)
from .tiles import (
    group,
    lane_col,
    lane_row,
    load_tile,
    multiply_nn,
    multiply_nt,
    row_max_of,
    row_sum_of,
    spread,
    store_row,
    store_tile_row,
    tile_size,
)


# VEC: elements that global memory is read by, 16 bytes' worth where addresses, strides and head
# dims allow it, else 1. ASYNC: 1 where cp.async can load the tiles, which does not convert.
def attention_flash_simt_fwd(
    T, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, FEATURES, VEC, ASYNC, THREADS
):
    Acc = acc_t(T)
    int32, uint32 = types.int32, types.uint32
    W = vec_length(Acc)
    WARP_ROWS = BLOCK_M // (THREADS // 32)
    # Threads of a warp that share a row: few, so that a thread has 2W rows, but W keys each.
    LANES_COLS = min(BLOCK_N // W, 64 * W // WARP_ROWS)
    LANES_ROWS = 32 // LANES_COLS
    ROWS = WARP_ROWS // LANES_ROWS
    KEYS = BLOCK_N // LANES_COLS
    DIMS = HEAD_DIM_V // LANES_COLS
    ROW_GROUP = group(Acc, ROWS)
    SCORES, OUTPUTS = (ROWS, KEYS), (ROWS, DIMS)

    # Shared memory: where each tile begins.
    Q_SMEM = 0
    K_SMEM = Q_SMEM + tile_size(Acc, BLOCK_M, HEAD_DIM)
    V_SMEM = K_SMEM + tile_size(Acc, BLOCK_N, HEAD_DIM)
    P_SMEM = V_SMEM + tile_size(Acc, BLOCK_N, HEAD_DIM_V)

    load_q = load_tile(T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS)
    load_k = load_tile(T, BLOCK_N, HEAD_DIM, VEC, ASYNC, THREADS)
    load_v = load_tile(T, BLOCK_N, HEAD_DIM_V, VEC, ASYNC, THREADS)
    multiply_qk = multiply_nt(Acc, ROWS, KEYS, LANES_ROWS, HEAD_DIM)
    multiply_pv = multiply_nn(Acc, ROWS, DIMS, LANES_ROWS, BLOCK_N, HEAD_DIM_V)
    store_out = store_row(T, DIMS, LANES_COLS, VEC)

    @cuda.jit(launch_bounds=(THREADS, 256 // THREADS if THREADS < 256 else 1))
    def kernel(
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
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
        shared = cuda.shared.array(0, Acc, 16)
        row_max = cuda.local.array(ROWS, Acc)
        row_sum = cuda.local.array(ROWS, Acc)
        acc = cuda.local.array(OUTPUTS, Acc)
        s = cuda.local.array(SCORES, Acc)

        # 1. Which rows are ours
        heads_total = batch * heads_q
        # Unsigned where they are made 64 bits long: that takes no registers.
        batch_index = uint32(div(rem(cuda.blockIdx.x, heads_total), heads_q))
        head = uint32(rem(cuda.blockIdx.x, heads_q))
        head_kv = uint32(div(head, div(heads_q, heads_kv)))
        q_tile = cdiv(seqlen_q, BLOCK_M) - 1 - div(cuda.blockIdx.x, heads_total)
        q_start = int32(q_tile * BLOCK_M)
        warp_id, lane_id = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        first_row = int32(warp_id * WARP_ROWS + lane_row(LANES_ROWS, lane_id) * ROW_GROUP)
        first_col = int32(lane_col(LANES_ROWS, lane_id) * W)

        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        k_start = int32(div(first_key(FEATURES, band, q_start), BLOCK_N) * BLOCK_N)
        k_end = last_key(FEATURES, band, q_start + BLOCK_M)

        # 2. Load the Q tile
        q = advance(q, offset_of(q_strides, batch_index, head, q_start))
        load_q(shared, Q_SMEM, q, q_strides.row, band.q_length - q_start, head_dim)
        k_from = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
        load_k(shared, K_SMEM, k_from, k_strides.row, k_end - k_start, head_dim)

        # 3. Start the running softmax
        for r in range(ROWS):
            row_max[r] = -INF
            row_sum[r] = 0  # of this thread's keys alone, until the end
            for d in range(DIMS):
                acc[r, d] = 0

        # 4. Walk over the key/value tiles
        q_rows = int32(Q_SMEM + first_row * HEAD_DIM + div(first_row, W) * W)
        k_rows = int32(K_SMEM + first_col * HEAD_DIM + first_col)
        p_rows = int32(P_SMEM + first_row * BLOCK_N + div(first_row, W) * W)
        while k_start < k_end:
            # 4a. Load the K and V tiles
            if ASYNC:
                cp_async_wait_all()
            cuda.syncthreads()  # K is there, and V is free: every warp is past the last p v
            v_from = advance(v, offset_of(v_strides, batch_index, head_kv, k_start))
            load_v(shared, V_SMEM, v_from, v_strides.row, k_end - k_start, head_dim_v)

            # 4b. s = q k^T, masked
            for r in range(ROWS):
                for c in range(KEYS):
                    s[r, c] = 0
            multiply_qk(s, shared, q_rows, k_rows)
            unmasked = tile_is_unmasked(
                FEATURES, band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N
            )
            for r in range(ROWS):
                for c in range(KEYS):
                    s[r, c] = capped_score(FEATURES, score, s[r, c])
            if not unmasked or FEATURES & BIAS:  # a loop of its own: most tiles go past it
                for r in range(ROWS):
                    row = int32(q_start + first_row + spread(ROW_GROUP, LANES_ROWS, r))
                    for c in range(KEYS):
                        col = int32(k_start + first_col + spread(W, LANES_COLS, c))
                        if unmasked or sees(FEATURES, score, band, batch_index, head, row, col):
                            s[r, c] = biased_score(
                                FEATURES, score, s[r, c], batch_index, head, row, col
                            )
                        else:
                            s[r, c] = -INF

            # 4c. Rescale what we have to the new maximum
            for r in range(ROWS):
                new_max = row_max[r]
                for c in range(KEYS):
                    new_max = max(new_max, s[r, c])
                new_max = row_max_of(LANES_ROWS, new_max)
                subtrahend = finite_or_zero(new_max)
                rescale = exp_of(row_max[r] - subtrahend)
                row_max[r] = new_max
                row_sum[r] *= rescale
                for c in range(KEYS):
                    s[r, c] = exp_of(s[r, c] - subtrahend)  # from here on p
                    row_sum[r] += s[r, c]
                for d in range(DIMS):
                    acc[r, d] *= rescale
                row = spread(ROW_GROUP, LANES_ROWS, r)
                p_row = p_rows + row * BLOCK_N + div(row, W) * W + first_col
                store_tile_row(W, KEYS, LANES_COLS, shared, p_row, s, r)

            # 4d. acc += p v
            if ASYNC:
                cp_async_wait_all()
            cuda.syncthreads()  # V and p are there, and K is free
            k_start = int32(k_start + BLOCK_N)
            if k_start < k_end:
                k_from = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
                load_k(shared, K_SMEM, k_from, k_strides.row, k_end - k_start, head_dim)
            multiply_pv(acc, shared, p_rows, V_SMEM + first_col)
        if ASYNC:
            cp_async_wait_all()  # no block may end with copies on their way

        # 5. Normalise and store
        out = advance(out, offset_of(out_strides, batch_index, head, q_start))
        lse = advance(lse, (batch_index * heads_q + head) * seqlen_q + q_start)
        for r in range(ROWS):
            row = first_row + spread(ROW_GROUP, LANES_ROWS, r)
            total = row_sum_of(LANES_ROWS, row_sum[r])
            if q_start + row < seqlen_q:
                inverse = Acc(0) if total == 0 else Acc(1) / total  # a row that sees no key gives 0
                store_out(out, row * out_strides.row, acc, r, inverse, first_col, head_dim_v)
                if first_col == 0:
                    lse[row] = row_max[r] + math.log(total)

    return kernel
