"""attention_flash_mma_bwd: one walk gives dq, dk and dv on tensor cores, in fp16 or bf16.

  p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q

The scores are recomputed from q, k and lse. A block keeps a tile of keys and walks over the
queries that see them. The warps share the scores; then p and ds go through shared memory, and the
warps share the other three products anew, each so that a warp has as square a part as it can. dk
and dv stay in registers; dq is a sum over blocks and is added up in dq_acc, in fp32 and in the
layout of accumulators; attention_dq rounds it and puts its rows in order. With DETERMINISTIC a
counter of each query tile says whose turn it is to add: the order of the keys. Blocks then take
their key tiles from a counter as well: whoever waits for a turn waits for a block that has
started.

Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it
Shared memory: the K and V tiles, two buffers for q, dout, lse and delta, and the p and ds tiles
Registers:     dk and dv of the block's keys, 64 each a thread at most, and one or two products
Twin:          cuda_src/attention_flash_mma_bwd.cu
Launched by:   workbench/launchers.py, attention_flash_mma
"""

from numba import cuda
from numba.cuda import types

from .common import INF, LOG2E, advance, cdiv, div, head_tile, offset_of, reinterpret, rem
from .fragments import (
    ACROSS_FIRST,
    DOWN_FIRST,
    accumulator_col,
    lane_address,
    load_tile,
    multiply_nn,
    multiply_nt,
    multiply_tn,
    row_bytes,
    share,
    share_first_col,
    share_first_row,
    share_warp_col,
    share_warp_row,
    store_accumulators,
    store_tile,
    tile_bytes,
)
from .ptx_sm80 import (
    atom_inc,
    cp_async,
    cp_async_wait_all,
    ex2_approx,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_acquire,
    red_add_x4,
    shared_address,
    st_release,
)
from .scores import (
    BIAS,
    SOFTCAP,
    biased_score,
    capped_score,
    finite_or_zero,
    first_key,
    first_query,
    key_range,
    last_query,
    sees,
    tile_is_unmasked,
    uncapped_gradient,
)


def attention_flash_mma_bwd(
    T, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, FEATURES, DETERMINISTIC, THREADS
):
    float32, int32, int64, uint8, uint32 = (
        types.float32, types.int32, types.int64, types.uint8, types.uint32,
    )  # fmt: skip
    SHARE_S = share(BLOCK_M, BLOCK_N, THREADS // 32)  # scores
    SHARE_K = share(BLOCK_N, HEAD_DIM, THREADS // 32)  # dk
    SHARE_V = share(BLOCK_N, HEAD_DIM_V, THREADS // 32)  # dv
    SHARE_Q = share(BLOCK_M, HEAD_DIM, THREADS // 32)  # dq
    S_SHAPE, K_SHAPE, V_SHAPE, Q_SHAPE = (
        (own.M, own.N, 4) for own in (SHARE_S, SHARE_K, SHARE_V, SHARE_Q)
    )
    M, N, S_BESIDE = SHARE_S.M, SHARE_S.N, SHARE_S.BESIDE
    Q_M, Q_N, Q_BESIDE = SHARE_Q.M, SHARE_Q.N, SHARE_Q.BESIDE
    K_M, K_N, K_BESIDE = SHARE_K.M, SHARE_K.N, SHARE_K.BESIDE
    V_M, V_N, V_BESIDE = SHARE_V.M, SHARE_V.N, SHARE_V.BESIDE
    SCALED = FEATURES & (BIAS | SOFTCAP)  # before they are added up, not after

    # Shared memory: where each tile begins; then two buffers, with the rows' lse and delta.
    V_SMEM = tile_bytes(BLOCK_N, HEAD_DIM)
    P_SMEM = V_SMEM + tile_bytes(BLOCK_N, HEAD_DIM_V)
    DS_SMEM = P_SMEM + tile_bytes(BLOCK_M, BLOCK_N)
    Q_SMEM = DS_SMEM + tile_bytes(BLOCK_M, BLOCK_N)
    DOUT_SMEM = Q_SMEM + tile_bytes(BLOCK_M, HEAD_DIM)
    LSE_SMEM = DOUT_SMEM + tile_bytes(BLOCK_M, HEAD_DIM_V)
    BUFFER = LSE_SMEM + 2 * BLOCK_M * 4 - Q_SMEM
    P_ROW, K_ROW, V_ROW = row_bytes(BLOCK_N), row_bytes(HEAD_DIM), row_bytes(HEAD_DIM_V)
    LSE_PASSES = -(-2 * BLOCK_M // THREADS)

    load_k = load_tile(BLOCK_N, HEAD_DIM, THREADS)
    load_v = load_tile(BLOCK_N, HEAD_DIM_V, THREADS)
    load_q = load_tile(BLOCK_M, HEAD_DIM, THREADS)
    load_dout = load_tile(BLOCK_M, HEAD_DIM_V, THREADS)
    load_float = cp_async(4)
    multiply_qk = multiply_nt(T, HEAD_DIM, HEAD_DIM, HEAD_DIM, S_BESIDE, M, N)
    multiply_dout_v = multiply_nt(T, HEAD_DIM_V, HEAD_DIM_V, HEAD_DIM_V, S_BESIDE, M, N)
    multiply_p_dout = multiply_tn(T, BLOCK_M, BLOCK_N, HEAD_DIM_V, V_BESIDE, V_M, V_N)
    multiply_ds_q = multiply_tn(T, BLOCK_M, BLOCK_N, HEAD_DIM, K_BESIDE, K_M, K_N)
    multiply_ds_k = multiply_nn(T, BLOCK_N, BLOCK_N, HEAD_DIM, Q_BESIDE, Q_M, Q_N)
    store_scores = store_accumulators(T, BLOCK_N, S_BESIDE, M, N)
    stage_dk = store_accumulators(T, HEAD_DIM, K_BESIDE, K_M, K_N)
    stage_dv = store_accumulators(T, HEAD_DIM_V, V_BESIDE, V_M, V_N)
    store_dk = store_tile(T, BLOCK_N, HEAD_DIM, THREADS)
    store_dv = store_tile(T, BLOCK_N, HEAD_DIM_V, THREADS)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        delta,  # the same
        dq_acc,  # (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
        turns,  # 1 + (batch, heads_q, tiles), zeroed, or null
        dk,  # as k
        dv,  # as v
        dout_strides,
        q_strides,
        k_strides,
        v_strides,
        dk_strides,
        dv_strides,
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
        dk_acc = cuda.local.array(K_SHAPE, float32)
        dv_acc = cuda.local.array(V_SHAPE, float32)
        p = cuda.local.array(S_SHAPE, float32)
        slope = cuda.local.array(S_SHAPE, float32)
        ds = cuda.local.array(S_SHAPE, float32)
        dq_part = cuda.local.array(Q_SHAPE, float32)

        shared = cuda.shared.array(0, uint32, 128)
        smem = reinterpret(uint8, shared)
        k_smem = shared_address(shared, 0)

        # 1. Which key rows are ours
        griddepcontrol_launch_dependents()
        ticket = uint32(cuda.blockIdx.x)
        if DETERMINISTIC:
            ticket_smem = reinterpret(int32, shared)
            if cuda.threadIdx.x == 0:
                ticket_smem[0] = atom_inc(turns)
            cuda.syncthreads()
            ticket = uint32(ticket_smem[0])
            cuda.syncthreads()  # K is about to be loaded there
        heads_total, heads_kv = uint32(batch * heads_kv), uint32(heads_kv)
        tiles_k = uint32(cdiv(uint32(seqlen_k), BLOCK_N))
        head, tile = head_tile(ticket, tiles_k, heads_total, uint32(heads_at_a_time))
        heads_each = int32(div(uint32(heads_q), heads_kv))
        batch_index = uint32(div(head, heads_kv))
        head_kv = uint32(rem(head, heads_kv))
        k_tile = int32(tile)
        k_start = int32(k_tile * BLOCK_N)

        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        q_first = first_query(FEATURES, band, k_start)
        q_last = last_query(FEATURES, band, k_start + BLOCK_N)
        tiles_q = int32(cdiv(seqlen_q, BLOCK_M))
        tile_first = int32(div(q_first, BLOCK_M))
        tile_end = int32(cdiv(q_last, BLOCK_M) if q_first < q_last else tile_first)
        head = uint32(head_kv * heads_each)
        head_end = uint32(head + heads_each)
        more = tile_first < tile_end
        q_tile = int32(tile_end - 1)  # last to first, then on to the next head

        # 2. Load the K and V tiles
        k_from = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
        load_k(k_smem, k_from, k_strides.row, band.kv_length - k_start, head_dim)
        v_from = advance(v, offset_of(v_strides, batch_index, head_kv, k_start))
        load_v(k_smem + V_SMEM, v_from, v_strides.row, band.kv_length - k_start, head_dim_v)

        def load_queries(buffer, head, q_tile):
            from_k = uint32(buffer * BUFFER + k_smem)
            q_start = int32(q_tile * BLOCK_M)
            rows = int32(band.q_length - q_start)
            q_from = advance(q, offset_of(q_strides, batch_index, head, q_start))
            load_q(from_k + Q_SMEM, q_from, q_strides.row, rows, head_dim)
            dout_from = advance(dout, offset_of(dout_strides, batch_index, head, q_start))
            load_dout(from_k + DOUT_SMEM, dout_from, dout_strides.row, rows, head_dim_v)
            for j in range(LSE_PASSES):
                i = int32(cuda.threadIdx.x + j * THREADS)
                if i < 2 * BLOCK_M:
                    row = int32(rem(i, BLOCK_M))
                    offset = uint32(batch_index * heads_q + head) * seqlen_q + q_start + row
                    source = advance(lse if i < BLOCK_M else delta, offset)
                    load_float(from_k + LSE_SMEM + i * 4, source, row < rows)

        griddepcontrol_wait()  # for delta
        if more:
            load_queries(0, head, q_tile)

        # 3. Start dk and dv
        for m in range(K_M):
            for n in range(K_N):
                for i in range(4):
                    dk_acc[m, n, i] = 0
        for m in range(V_M):
            for n in range(V_N):
                for i in range(4):
                    dv_acc[m, n, i] = 0

        # 4. Walk over the query tiles
        first_row, first_col = share_first_row(SHARE_S), share_first_col(SHARE_S)
        to_log2 = float32(LOG2E) if SCALED else float32(score.scale) * float32(LOG2E)
        turn_taken, turn, buffer = int32(0), int32(0), uint32(0)
        while more:
            q_start, this_head = int32(q_tile * BLOCK_M), head
            q_smem = uint32(k_smem + Q_SMEM + buffer * BUFFER)
            dout_smem = uint32(k_smem + DOUT_SMEM + buffer * BUFFER)

            # 4a. Load q, dout, lse and delta
            cp_async_wait_all()
            cuda.syncthreads()  # they are there, and the other buffer, p and ds are free
            if DETERMINISTIC and cuda.threadIdx.x == 0 and turn_taken > 0:
                # Everybody has added to the last dq.
                st_release(advance(turns, turn_taken), turn + 1)
            query_tile = int32(uint32(batch_index * heads_q + head) * tiles_q + q_tile)
            same_head = q_tile > tile_first
            q_tile = int32(q_tile - 1 if same_head else tile_end - 1)
            head = uint32(head if same_head else head + 1)
            more = head < head_end
            if more:
                load_queries(buffer ^ 1, head, q_tile)

            # 4b. p = exp(s - lse)
            for m in range(M):
                for n in range(N):
                    for i in range(4):
                        p[m, n, i] = 0
            s_rows = share_warp_row(SHARE_S)
            s_cols = share_warp_col(SHARE_S)
            multiply_qk(
                p,
                lane_address(DOWN_FIRST, HEAD_DIM, q_smem, s_rows, 0),
                lane_address(ACROSS_FIRST, HEAD_DIM, k_smem, s_cols, 0),
            )
            unmasked = tile_is_unmasked(
                FEATURES,
                band,
                q_start,
                int32(q_start + BLOCK_M),
                k_start,
                int32(k_start + BLOCK_N),
            )
            row_lse = advance(
                reinterpret(float32, advance(smem, LSE_SMEM + buffer * BUFFER)), first_row
            )
            for m in range(M):
                for n in range(N):
                    for i in range(4):
                        subtrahend = finite_or_zero(row_lse[m * 16 + (i >> 1) * 8]) * float32(LOG2E)
                        x = p[m, n, i]
                        if SCALED:
                            x = capped_score(FEATURES, score, x)
                            # The slope of the cap: 1, in no register, without.
                            slope[m, n, i] = uncapped_gradient(FEATURES, score, float32(1), x)
                        if FEATURES & BIAS:
                            row = int32(q_start + first_row + m * 16 + (i >> 1) * 8)
                            col = int32(
                                k_start + first_col + accumulator_col(S_BESIDE, n) + (i & 1)
                            )
                            if unmasked or sees(
                                FEATURES, score, band, batch_index, this_head, row, col
                            ):
                                x = biased_score(
                                    FEATURES, score, x, batch_index, this_head, row, col
                                )
                            else:
                                x = float32(-INF)
                        p[m, n, i] = ex2_approx(x * to_log2 - subtrahend)
            if not FEATURES & BIAS and not unmasked:  # a loop of its own: most tiles go past it
                for m in range(M):
                    for n in range(N):
                        for i in range(4):
                            row = int32(q_start + first_row + m * 16 + (i >> 1) * 8)
                            col = int32(
                                k_start + first_col + accumulator_col(S_BESIDE, n) + (i & 1)
                            )
                            if not sees(FEATURES, score, band, batch_index, this_head, row, col):
                                p[m, n, i] = 0
            store_scores(advance(smem, P_SMEM + first_row * P_ROW), first_col, p, float32(1))

            # 4d. ds = p * (dout v^T - delta)
            for m in range(M):
                for n in range(N):
                    for i in range(4):
                        ds[m, n, i] = 0  # dp, to begin with
            multiply_dout_v(
                ds,
                lane_address(DOWN_FIRST, HEAD_DIM_V, dout_smem, s_rows, 0),
                lane_address(ACROSS_FIRST, HEAD_DIM_V, k_smem + V_SMEM, s_cols, 0),
            )
            for m in range(M):
                for n in range(N):
                    for i in range(4):
                        row_delta = row_lse[BLOCK_M + m * 16 + (i >> 1) * 8]
                        ds[m, n, i] = p[m, n, i] * (ds[m, n, i] - row_delta)
                        if SCALED:
                            ds[m, n, i] *= slope[m, n, i]
            store_scores(advance(smem, DS_SMEM + first_row * P_ROW), first_col, ds, float32(1))
            cuda.syncthreads()  # p and ds are there

            # 4c. dv += p^T dout
            multiply_p_dout(
                dv_acc,
                lane_address(ACROSS_FIRST, BLOCK_N, k_smem + P_SMEM, 0, share_warp_row(SHARE_V)),
                lane_address(DOWN_FIRST, HEAD_DIM_V, dout_smem, 0, share_warp_col(SHARE_V)),
            )

            # 4e. dk += ds^T q
            multiply_ds_q(
                dk_acc,
                lane_address(ACROSS_FIRST, BLOCK_N, k_smem + DS_SMEM, 0, share_warp_row(SHARE_K)),
                lane_address(DOWN_FIRST, HEAD_DIM, q_smem, 0, share_warp_col(SHARE_K)),
            )

            # 4f. dq += ds k
            for m in range(Q_M):
                for n in range(Q_N):
                    for i in range(4):
                        dq_part[m, n, i] = 0
            multiply_ds_k(
                dq_part,
                lane_address(DOWN_FIRST, BLOCK_N, k_smem + DS_SMEM, share_warp_row(SHARE_Q), 0),
                lane_address(DOWN_FIRST, HEAD_DIM, k_smem, 0, share_warp_col(SHARE_Q)),
            )
            if DETERMINISTIC:
                turn = int32(k_tile - div(first_key(FEATURES, band, q_start), BLOCK_N))
                turn_taken = int32(1 + query_tile)
                if cuda.threadIdx.x == 0:
                    while ld_acquire(advance(turns, turn_taken)) != turn:
                        pass
                cuda.syncthreads()  # it is our turn to add
            total = advance(
                dq_acc, int64(query_tile) * (BLOCK_M * HEAD_DIM) + (cuda.threadIdx.x & 31) * 4
            )
            for m in range(Q_M):
                for n in range(Q_N):
                    col = share_warp_col(SHARE_Q) + accumulator_col(Q_BESIDE, n)
                    row = share_warp_row(SHARE_Q) + m * 16
                    to = advance(total, row * HEAD_DIM + col * 16)
                    red_add_x4(to, dq_part, (m * Q_N + n) * 4)
            buffer = uint32(buffer ^ 1)
        cp_async_wait_all()
        cuda.syncthreads()  # K and V are free
        if DETERMINISTIC and cuda.threadIdx.x == 0 and turn_taken > 0:
            st_release(advance(turns, turn_taken), turn + 1)

        # 5. Scale and store
        dk_rows = advance(smem, share_first_row(SHARE_K) * K_ROW)
        stage_dk(dk_rows, share_first_col(SHARE_K), dk_acc, float32(score.scale))
        dv_rows = advance(smem, V_SMEM + share_first_row(SHARE_V) * V_ROW)
        stage_dv(dv_rows, share_first_col(SHARE_V), dv_acc, float32(1))
        cuda.syncthreads()
        rows = seqlen_k - k_start
        dk_to = advance(dk, offset_of(dk_strides, batch_index, head_kv, k_start))
        store_dk(dk_to, smem, dk_strides.row, rows, head_dim, cuda.threadIdx.x)
        dv_to = advance(dv, offset_of(dv_strides, batch_index, head_kv, k_start))
        store_dv(dv_to, advance(smem, V_SMEM), dv_strides.row, rows, head_dim_v, cuda.threadIdx.x)

    return kernel
