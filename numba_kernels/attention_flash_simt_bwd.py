"""attention_flash_simt_bwd: one walk gives dq, dk and dv on CUDA cores, in exact fp32 or fp64.

  p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q

The scores are recomputed from q, k and lse. A block keeps a tile of keys and walks over the
queries that see them: dk and dv stay in registers, but dq is a sum over blocks. It is added up
in dq_acc in the order of the keys, without atomics: a counter of each query tile says whose turn
it is, and the last one writes dq. Blocks take their key tiles from a counter as well: whoever
waits for a turn waits for a block that has started, so there is always progress.

Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it
Shared memory: the K, V, Q and dout tiles and one for p, then ds; the next dout is loaded from
               when dp is known, the next q while ds k runs
Registers:     dk and dv of the block's keys, 8 x 4 or 8 x 8 each a thread, and one more product
Twin:          cuda_src/attention_flash_simt_bwd.cu
Launched by:   workbench/launchers.py, attention_flash_simt
"""

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
    vec_length,
)
from .ptx_sm80 import atom_inc, cp_async_wait_all, ld_acquire, st_release
from .scores import (
    BIAS,
    biased_score,
    capped_score,
    finite_or_zero,
    first_key,
    first_query,
    key_range,
    last_key,
    last_query,
    sees,
    tile_is_unmasked,
    uncapped_gradient,
)
from .tiles import (
    group,
    lane_col,
    lane_row,
    load_tile,
    load_tile_row,
    multiply_nn,
    multiply_nt,
    multiply_tn,
    spread,
    store_row,
    store_tile_row,
    tile_size,
)


# How the warps of a block share ROWS x COLS results: a thread has 2W rows, or fewer so that it has
# W columns. Gives their numbers, and functions for the first of each.
def share(Acc, ROWS, COLS, THREADS):
    WARPS, SPAN = THREADS // 32, 8 * vec_length(Acc)
    TALL = ROWS // SPAN  # warps above each other for 2W rows a thread
    WIDE = -(-SPAN * WARPS // COLS)  # and for W columns
    WARPS_ROWS = min(max(TALL, WIDE), ROWS // 4, WARPS)
    WARPS_COLS = WARPS // WARPS_ROWS
    R, C = ROWS // (4 * WARPS_ROWS), COLS // (8 * WARPS_COLS)
    R_GROUP, C_GROUP = group(Acc, R), group(Acc, C)

    @cuda.jit(device=True, forceinline=True)
    def first_row():
        warp_id, lane_id = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        return rem(warp_id, WARPS_ROWS) * (4 * R) + lane_row(4, lane_id) * R_GROUP

    @cuda.jit(device=True, forceinline=True)
    def first_col():
        warp_id, lane_id = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        return div(warp_id, WARPS_ROWS) * (8 * C) + lane_col(4, lane_id) * C_GROUP

    return R, C, first_row, first_col


# VEC: elements that global memory is read by, 16 bytes' worth where addresses, strides and head
# dims allow it, else 1. ASYNC: 1 where cp.async can load the tiles, which does not convert.
def attention_flash_simt_bwd(
    T, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, FEATURES, VEC, ASYNC, THREADS
):
    Acc = acc_t(T)
    int32, uint32, int64 = types.int32, types.uint32, types.int64
    W = vec_length(Acc)
    ROWS, KEYS, s_row, s_col = share(Acc, BLOCK_M, BLOCK_N, THREADS)  # scores
    K_ROWS, K_COLS, k_row, k_col = share(Acc, BLOCK_N, HEAD_DIM, THREADS)  # dk
    V_ROWS, V_COLS, v_row, v_col = share(Acc, BLOCK_N, HEAD_DIM_V, THREADS)  # dv
    Q_ROWS, Q_COLS, q_row, q_col = share(Acc, BLOCK_M, HEAD_DIM, THREADS)  # dq
    S_SHAPE, K_SHAPE, V_SHAPE, Q_SHAPE = (
        (ROWS, KEYS), (K_ROWS, K_COLS), (V_ROWS, V_COLS), (Q_ROWS, Q_COLS),
    )  # fmt: skip
    ROW_GROUP, KEY_GROUP = group(Acc, ROWS), group(Acc, KEYS)
    K_GROUP, V_GROUP, Q_GROUP = group(Acc, K_ROWS), group(Acc, V_ROWS), group(Acc, Q_ROWS)

    # Shared memory: where each tile begins, and the ticket as an int.
    K_SMEM = 0
    V_SMEM = K_SMEM + tile_size(Acc, BLOCK_N, HEAD_DIM)
    Q_SMEM = V_SMEM + tile_size(Acc, BLOCK_N, HEAD_DIM_V)
    DOUT_SMEM = Q_SMEM + tile_size(Acc, BLOCK_M, HEAD_DIM)
    P_SMEM = DOUT_SMEM + tile_size(Acc, BLOCK_M, HEAD_DIM_V)
    TICKET_SMEM = (P_SMEM + tile_size(Acc, BLOCK_M, BLOCK_N)) * (Acc.bitwidth // 32)

    load_k = load_tile(T, BLOCK_N, HEAD_DIM, VEC, ASYNC, THREADS)
    load_v = load_tile(T, BLOCK_N, HEAD_DIM_V, VEC, ASYNC, THREADS)
    load_q = load_tile(T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS)
    load_dout = load_tile(T, BLOCK_M, HEAD_DIM_V, VEC, ASYNC, THREADS)
    multiply_qk = multiply_nt(Acc, ROWS, KEYS, 4, HEAD_DIM)
    multiply_dout_v = multiply_nt(Acc, ROWS, KEYS, 4, HEAD_DIM_V)
    multiply_p_dout = multiply_tn(Acc, V_ROWS, V_COLS, 4, BLOCK_M, BLOCK_N, HEAD_DIM_V)
    multiply_ds_q = multiply_tn(Acc, K_ROWS, K_COLS, 4, BLOCK_M, BLOCK_N, HEAD_DIM)
    multiply_ds_k = multiply_nn(Acc, Q_ROWS, Q_COLS, 4, BLOCK_N, HEAD_DIM)
    store_dq = store_row(T, Q_COLS, 8, VEC)
    store_dk = store_row(T, K_COLS, 8, VEC)
    store_dv = store_row(T, V_COLS, 8, VEC)

    # x[r] = source of this thread's r-th row, 0 where that does not exist.
    @cuda.jit(device=True, forceinline=True)
    def load_rows(x, source, row, rows):
        for r in range(ROWS):
            at = row + spread(ROW_GROUP, 4, r)
            x[r] = source[at] if at < rows else Acc(0)

    @cuda.jit(launch_bounds=(THREADS, 256 // THREADS if THREADS < 256 else 1))
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        q,  # (batch, heads_q, seqlen_q, head_dim)
        k,  # (batch, heads_kv, seqlen_k, head_dim)
        v,  # (batch, heads_kv, seqlen_k, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        delta,  # the same
        dq_acc,  # (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
        turns,  # 1 + (batch, heads_q, query tiles), zeroed
        dq,  # as q
        dk,  # as k
        dv,  # as v
        dout_strides,
        q_strides,
        k_strides,
        v_strides,
        dq_strides,
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
    ):
        shared = cuda.shared.array(0, Acc, 16)
        shared_ints = cuda.shared.array(0, int32, 16)
        dk_acc = cuda.local.array(K_SHAPE, Acc)
        dv_acc = cuda.local.array(V_SHAPE, Acc)
        p = cuda.local.array(S_SHAPE, Acc)
        dp = cuda.local.array(S_SHAPE, Acc)
        dq_part = cuda.local.array(Q_SHAPE, Acc)
        slope = cuda.local.array(S_SHAPE, Acc)
        ds = cuda.local.array(S_SHAPE, Acc)
        row_lse = cuda.local.array(ROWS, Acc)
        row_delta = cuda.local.array(ROWS, Acc)

        # 1. Which key rows are ours
        if cuda.threadIdx.x == 0:
            shared_ints[TICKET_SMEM] = atom_inc(turns)
        cuda.syncthreads()
        ticket = shared_ints[TICKET_SMEM]
        heads_total = batch * heads_kv
        # Unsigned where they are made 64 bits long: that takes no registers.
        heads_each = uint32(div(heads_q, heads_kv))
        batch_index = uint32(div(rem(ticket, heads_total), heads_kv))
        head_kv = uint32(rem(ticket, heads_kv))
        k_tile = int32(div(ticket, heads_total))
        k_start = int32(k_tile * BLOCK_N)

        band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
        q_first = first_query(FEATURES, band, k_start)
        q_last = last_query(FEATURES, band, k_start + BLOCK_N)
        tiles_q = int32(cdiv(seqlen_q, BLOCK_M))
        tile_first = int32(div(q_first, BLOCK_M))
        tile_end = int32(cdiv(q_last, BLOCK_M) if q_first < q_last else tile_first)
        steps = int32(heads_each * (tile_end - tile_first))
        head = uint32(head_kv * heads_each)
        q_tile = int32(tile_end - 1)  # last to first, then on to the next head

        # 2. Load the K and V tiles
        k = advance(k, offset_of(k_strides, batch_index, head_kv, k_start))
        load_k(shared, K_SMEM, k, k_strides.row, band.kv_length - k_start, head_dim)
        v = advance(v, offset_of(v_strides, batch_index, head_kv, k_start))
        load_v(shared, V_SMEM, v, v_strides.row, band.kv_length - k_start, head_dim_v)
        if steps > 0:
            rows = band.q_length - q_tile * BLOCK_M
            q_from = advance(q, offset_of(q_strides, batch_index, head, q_tile * BLOCK_M))
            load_q(shared, Q_SMEM, q_from, q_strides.row, rows, head_dim)
            dout_from = advance(dout, offset_of(dout_strides, batch_index, head, q_tile * BLOCK_M))
            load_dout(shared, DOUT_SMEM, dout_from, dout_strides.row, rows, head_dim_v)

        # 3. Start dk and dv
        for r in range(K_ROWS):
            for c in range(K_COLS):
                dk_acc[r, c] = 0
        for r in range(V_ROWS):
            for c in range(V_COLS):
                dv_acc[r, c] = 0

        # 4. Walk over the query tiles
        first_row, first_col = int32(s_row()), int32(s_col())
        row_gaps, col_gaps = div(first_row, W) * W, div(first_col, W) * W
        p_rows = P_SMEM + first_row * BLOCK_N + row_gaps + first_col
        turn_taken, turn = int32(0), int32(0)
        while steps > 0:
            q_start = int32(q_tile * BLOCK_M)
            query_head = uint32(batch_index * heads_q + head)
            # 4a. Load q, dout, lse and delta
            lse_from = advance(lse, query_head * seqlen_q)
            load_rows(row_lse, lse_from, q_start + first_row, band.q_length)
            if ASYNC:
                cp_async_wait_all()
            cuda.syncthreads()  # q and dout are there; everybody has added to the last dq
            if cuda.threadIdx.x == 0 and turn_taken > 0:
                st_release(advance(turns, turn_taken), turn + 1)

            # 4b. p = exp(s - lse)
            for r in range(ROWS):
                for c in range(KEYS):
                    p[r, c] = 0
            q_rows = Q_SMEM + first_row * HEAD_DIM + row_gaps
            k_rows = K_SMEM + first_col * HEAD_DIM + col_gaps
            multiply_qk(p, shared, q_rows, k_rows)
            unmasked = tile_is_unmasked(
                FEATURES, band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N
            )
            for r in range(ROWS):
                for c in range(KEYS):
                    p[r, c] = capped_score(FEATURES, score, p[r, c])
                    # The slope of the cap: 1, in no register, without.
                    slope[r, c] = uncapped_gradient(FEATURES, score, Acc(1), p[r, c])
            if not unmasked or FEATURES & BIAS:  # a loop of its own: most tiles go past it
                for r in range(ROWS):
                    row = int32(q_start + first_row + spread(ROW_GROUP, 4, r))
                    for c in range(KEYS):
                        col = int32(k_start + first_col + spread(KEY_GROUP, 8, c))
                        if unmasked or sees(FEATURES, score, band, batch_index, head, row, col):
                            p[r, c] = biased_score(
                                FEATURES, score, p[r, c], batch_index, head, row, col
                            )
                        else:
                            p[r, c] = -INF
            for r in range(ROWS):
                subtrahend = finite_or_zero(row_lse[r])
                for c in range(KEYS):
                    p[r, c] = exp_of(p[r, c] - subtrahend)
                p_row = spread(ROW_GROUP, 4, r)
                p_row = p_rows + p_row * BLOCK_N + div(p_row, W) * W
                store_tile_row(W, KEYS, 8, shared, p_row, p, r)
            cuda.syncthreads()  # p is there

            # 4c. dv += p^T dout
            delta_from = advance(delta, query_head * seqlen_q)
            load_rows(row_delta, delta_from, q_start + first_row, band.q_length)
            multiply_p_dout(dv_acc, shared, P_SMEM + v_row(), DOUT_SMEM + v_col())

            # 4d. ds = p * (dout v^T - delta)
            for r in range(ROWS):
                for c in range(KEYS):
                    dp[r, c] = 0
            dout_rows = DOUT_SMEM + first_row * HEAD_DIM_V + row_gaps
            v_rows = V_SMEM + first_col * HEAD_DIM_V + col_gaps
            multiply_dout_v(dp, shared, dout_rows, v_rows)
            cuda.syncthreads()  # p and dout are free
            same_head = q_tile > tile_first
            next_tile = int32(q_tile - 1 if same_head else tile_end - 1)
            next_head = uint32(head if same_head else head + 1)
            next_start = int32(next_tile * BLOCK_M)
            if steps > 1:
                dout_from = advance(
                    dout, offset_of(dout_strides, batch_index, next_head, next_start)
                )
                rows = band.q_length - next_start
                load_dout(shared, DOUT_SMEM, dout_from, dout_strides.row, rows, head_dim_v)
            for r in range(ROWS):
                p_row = spread(ROW_GROUP, 4, r)
                p_row = p_rows + p_row * BLOCK_N + div(p_row, W) * W
                # Our own p: registers are scarcer than these loads.
                load_tile_row(W, KEYS, 8, ds, r, shared, p_row)
                for c in range(KEYS):
                    ds[r, c] *= slope[r, c] * (dp[r, c] - row_delta[r])
                store_tile_row(W, KEYS, 8, shared, p_row, ds, r)
            cuda.syncthreads()  # ds is there

            # 4e. dk += ds^T q
            turn = int32(k_tile - div(first_key(FEATURES, band, q_start), BLOCK_N))
            query_tile = uint32(query_head * tiles_q + q_tile)
            turn_taken = int32(1 + query_tile)
            if cuda.threadIdx.x == 0:
                while ld_acquire(advance(turns, turn_taken)) != turn:
                    pass
            cuda.syncwarp()
            multiply_ds_q(dk_acc, shared, P_SMEM + k_row(), Q_SMEM + k_col())

            # 4f. dq += ds k
            cuda.syncthreads()  # q is free, and it is our turn to add
            if steps > 1:
                q_from = advance(q, offset_of(q_strides, batch_index, next_head, next_start))
                load_q(shared, Q_SMEM, q_from, q_strides.row, band.q_length - next_start, head_dim)
            total = advance(dq_acc, query_tile * (BLOCK_M * HEAD_DIM))
            total_row = q_row() * HEAD_DIM + q_col()
            # dq, and what the blocks before us have added
            for r in range(Q_ROWS):
                for c in range(Q_COLS):
                    dq_part[r, c] = 0
            if turn > 0:
                for r in range(Q_ROWS):
                    row = total_row + spread(Q_GROUP, 4, r) * HEAD_DIM
                    load_tile_row(W, Q_COLS, 8, dq_part, r, total, row)
            ds_rows = P_SMEM + q_row() * BLOCK_N + div(q_row(), W) * W
            multiply_ds_k(dq_part, shared, ds_rows, K_SMEM + q_col())
            last_turn = k_start + BLOCK_N >= last_key(FEATURES, band, q_start + BLOCK_M)
            for r in range(Q_ROWS):
                row = q_start + q_row() + spread(Q_GROUP, 4, r)
                if not last_turn:
                    to = total_row + spread(Q_GROUP, 4, r) * HEAD_DIM
                    store_tile_row(W, Q_COLS, 8, total, to, dq_part, r)
                elif row < seqlen_q:
                    to = offset_of(dq_strides, batch_index, head, row)
                    store_dq(dq, to, dq_part, r, Acc(score.scale), q_col(), head_dim)
            q_tile = next_tile
            head = next_head
            steps = int32(steps - 1)
        if ASYNC:
            cp_async_wait_all()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0 and turn_taken > 0:
            st_release(advance(turns, turn_taken), turn + 1)

        # 5. Scale and store
        dk = advance(dk, offset_of(dk_strides, batch_index, head_kv, k_start))
        dv = advance(dv, offset_of(dv_strides, batch_index, head_kv, k_start))
        for r in range(K_ROWS):
            row = k_row() + spread(K_GROUP, 4, r)
            if k_start + row < seqlen_k:
                offset = row * dk_strides.row
                store_dk(dk, offset, dk_acc, r, Acc(score.scale), k_col(), head_dim)
        for r in range(V_ROWS):
            row = v_row() + spread(V_GROUP, 4, r)
            if k_start + row < seqlen_k:
                store_dv(dv, row * dv_strides.row, dv_acc, r, Acc(1), v_col(), head_dim_v)
        # Query tiles that see no key have no block to add: theirs is the first one of the head.
        if k_tile > 0:
            return
        q_start = int32(0)
        while q_start < seqlen_q:
            q_end = int32(q_start + BLOCK_M)
            if first_key(FEATURES, band, q_start) >= last_key(FEATURES, band, q_end):
                for h in range(head_kv * heads_each, (head_kv + 1) * heads_each):
                    for row in range(q_start, min(q_end, seqlen_q)):
                        dq_row = advance(dq, offset_of(dq_strides, batch_index, h, row))
                        col = int64(cuda.threadIdx.x)
                        while col < head_dim:
                            dq_row[col] = from_acc(T, Acc(0))
                            col += THREADS
            q_start = q_end

    return kernel
