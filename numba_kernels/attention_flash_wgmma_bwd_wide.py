"""attention_flash_wgmma_bwd_wide: Hopper's backward for head_dims to 256, shared by two warpgroups.

  p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q

As attention_flash_wgmma_bwd, but dk and dv of 64 keys take the registers of two warpgroups. Each
has half of their columns, and needs all of p^T and ds^T. Those are formed once: the first
warpgroup forms the scores and p, the second one dout v^T and ds, and both hand on what they have
through shared memory, p as it lies in registers and ds as a tile. The first one is half a step
ahead, so that one has products under way while the other computes. dv is formed as soon as p is
there; then dout is done with, and one slot of it will do. dq leaves in two parts of 64 columns a
warpgroup, each of which has an adder and counters of its own.

Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it: a
               warpgroup of which one thread produces and two add, and two that have half of the
               columns of dk, dv and dq each
Shared memory: the K and V tiles, rings of q with the rows' statistics and of dout, two ds tiles,
               p, ones, and half of dq of one query tile
Registers:     half of dk and dv, and by turns one product of 64 x 64, parts of dq, p in 16 bits
Twin:          cuda_src/attention_flash_wgmma_bwd_wide.cu
Launched by:   workbench/launchers.py, attention_flash_wgmma
"""

from numba import cuda
from numba.cuda import types

from .block_tiles import BEING_STORED, key_tile, turn_of, wait_for_turn
from .common import LOG2E, advance, cdiv, div, offset_of, reinterpret, rem
from .ptx_sm80 import (
    atom_inc,
    cvt_first,
    cvt_rn_x2,
    cvt_second,
    ex2_approx,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shared_address,
    st_release,
)
from .ptx_sm90 import (
    bar_arrive,
    bar_sync,
    cp_async_bulk,
    cp_async_bulk_commit_group,
    cp_async_bulk_store,
    cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read,
    cp_reduce_async_bulk_add,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
    opaque,
    register_copy,
    register_fence,
    setmaxnreg_dec,
    setmaxnreg_inc,
    wgmma_wait_group,
)
from .scores import tile_is_unmasked
from .warpgroups import (
    ONES_BYTES,
    hide_transposed,
    init_barriers,
    load_registers,
    load_tile,
    start_nn,
    start_nt_from,
    start_rn,
    start_tn,
    store_fragments,
    store_ones,
    store_registers,
    store_rows,
)

float32, int32, int64, uint8, uint32 = (
    types.float32, types.int32, types.int64, types.uint8, types.uint32,
)  # fmt: skip


def attention_flash_wgmma_bwd_wide(
    T, BLOCK_M, BLOCK_N, HEAD_DIM, FEATURES, DETERMINISTIC, Q_STAGES, DOUT_STAGES, THREADS
):
    COLS = HEAD_DIM // 2  # of a warpgroup
    PARTS = COLS // 64  # of its dq
    KEY_BYTES, QUERY_BYTES = BLOCK_N * HEAD_DIM * 2, BLOCK_M * HEAD_DIM * 2
    P_BYTES, STATS_BYTES = BLOCK_N * BLOCK_M * 2, BLOCK_M * 32
    DQ, PART_BYTES = BLOCK_M * HEAD_DIM, BLOCK_M * 64 * 4
    P_IS_THERE, DS_IS_THERE, DS_IS_OURS = 1, 2, 3  # barriers
    ACC, DQ_PARTS, SCORES, P = (1, COLS // 2), (PARTS, 32), BLOCK_M // 2, BLOCK_M // 4

    give_registers, take_registers = setmaxnreg_dec(24), setmaxnreg_inc(240)
    load_keys, load_queries = load_tile(BLOCK_N, HEAD_DIM), load_tile(BLOCK_M, HEAD_DIM)
    multiply_nt = start_nt_from(T, HEAD_DIM, BLOCK_N, BLOCK_M)
    multiply_rn = start_rn(T, BLOCK_M, COLS, 1)
    multiply_nn, multiply_tn = start_nn(T, BLOCK_M, COLS), start_tn(T, BLOCK_N)
    wait_for_all, wait_but_for_one, wait_but_for_two = (wgmma_wait_group(n) for n in range(3))
    wait_for_sums, wait_for_reads = cp_async_bulk_wait_group(0), cp_async_bulk_wait_group_read(0)
    fence_scores, fence_p, copy_p = register_fence(SCORES), register_fence(P), register_copy(P)
    fence_acc, fence_part = register_fence(COLS // 2), register_fence(32)
    pair, first, second = cvt_rn_x2(T), cvt_first(T), cvt_second(T)
    hide, store_dq = hide_transposed(FEATURES, SCORES), store_registers(float32, 32)
    store_p, load_p = store_registers(uint32, P), load_registers(uint32, P)
    store_ds, store_part = store_fragments(BLOCK_N, P), store_rows(T, COLS // 2)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def kernel(
        q_map,  # boxes of BLOCK_M rows
        k_map,  # of BLOCK_N rows
        v_map,  # the same
        dout_map,  # as q_map
        stats,  # (batch, heads_q, query tiles, BLOCK_M * 8)
        dq_acc,  # (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
        turns,  # 1 + (2, batch, heads_q, query tiles), zeroed
        dk,  # (batch, heads_kv, seqlen_k, head_dim)
        dv,  # (batch, heads_kv, seqlen_k, head_dim_v)
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
        shared = cuda.shared.array(0, uint32, 1024)
        k_smem = shared_address(shared, 0)
        v_smem, q_smem = uint32(k_smem + KEY_BYTES), uint32(k_smem + 2 * KEY_BYTES)
        dout_smem = uint32(q_smem + Q_STAGES * QUERY_BYTES)
        ds_smem = uint32(dout_smem + DOUT_STAGES * QUERY_BYTES)
        p_smem, stats_smem = uint32(ds_smem + 2 * P_BYTES), uint32(ds_smem + 3 * P_BYTES)
        ones_smem = uint32(stats_smem + Q_STAGES * STATS_BYTES)
        # Memcheck wants something behind operands (scripts/sanitize.py).
        dq_smem = uint32(ones_smem + ONES_BYTES)
        k_full = uint32(dq_smem + 2 * PART_BYTES)
        v_full, q_full = uint32(k_full + 8), uint32(k_full + 8 * 2)
        q_empty = uint32(q_full + 8 * Q_STAGES)
        dout_full = uint32(q_empty + 8 * Q_STAGES)
        dout_empty = uint32(dout_full + 8 * DOUT_STAGES)
        dq_full = uint32(dout_empty + 8 * DOUT_STAGES)
        dq_empty = uint32(dq_full + 8 * 2)
        smem = advance(reinterpret(uint8, shared), -int64(k_smem))
        ticket_smem = reinterpret(int32, advance(smem, dq_empty + 8 * 2))
        thread = uint32(cuda.threadIdx.x)
        if thread < 16:
            store_ones(advance(smem, ones_smem), thread)
        if thread == 0:
            init_barriers(k_full, 2, 1)  # and v_full
            init_barriers(q_full, Q_STAGES, 2)  # for q and for the statistics
            init_barriers(q_empty, Q_STAGES, 8)  # of each warp, as those that follow
            init_barriers(dout_full, DOUT_STAGES, 1)
            init_barriers(dout_empty, DOUT_STAGES, 8)
            init_barriers(dq_full, 2, 4)
            init_barriers(dq_empty, 2, 1)
            fence_mbarrier_init()
            griddepcontrol_wait()  # for statistics, and zeros in counters
            if DETERMINISTIC:
                ticket_smem[0] = atom_inc(turns)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()

        # 1. Which key rows are ours
        ticket = uint32(ticket_smem[0] if DETERMINISTIC else cuda.blockIdx.x)
        keys = key_tile(
            BLOCK_M, BLOCK_N, FEATURES, ticket, score, batch, heads_kv, seqlen_q, seqlen_k,
            heads_at_a_time,
        )  # fmt: skip
        batch_index, head_kv, _, k_start, tile_first, tile_end, band = keys
        heads_each = int32(div(uint32(heads_q), uint32(heads_kv)))
        tiles_q = int32(cdiv(seqlen_q, BLOCK_M))
        steps = uint32(heads_each * (tile_end - tile_first))
        # First to last, or where the later ones are done first, last to first; then the next head.
        head_tiles = int32((batch_index * int32(heads_q) + head_kv * heads_each) * tiles_q)
        tile_from = q_tile = int32(tile_end - 1 if DETERMINISTIC else tile_first)

        def next_query_tile(q_tile, head_tiles):
            q_tile = int32(q_tile - 1 if DETERMINISTIC else q_tile + 1)
            if q_tile < tile_first if DETERMINISTIC else q_tile == tile_end:
                q_tile = tile_from
                head_tiles = int32(head_tiles + tiles_q)
            return q_tile, head_tiles

        # A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them.
        if thread < 128:
            give_registers()
            fence_proxy_async_global()  # the copy engine is to see what ordinary stores wrote
            if thread == 32 or thread == 64:
                # 4f (adder). dq += ds k
                adder, part = int32((thread >> 5) - 1), uint32(0)
                turn, is_first = int32(BEING_STORED), False
                counters = advance(turns, 1 + adder * int32(batch * heads_q) * tiles_q)
                while part < steps * PARTS:
                    query_tile = int32(head_tiles + q_tile)
                    counter = advance(counters, query_tile)
                    panel = int32(adder * PARTS + rem(part, PARTS))
                    if rem(part, PARTS) == 0:
                        if DETERMINISTIC:
                            turn = turn_of(BLOCK_M, BLOCK_N, FEATURES, keys, q_tile)
                        is_first = wait_for_turn(DETERMINISTIC, counter, turn)
                        fence_proxy_async_global()
                    mbarrier_wait(uint32(dq_full + 8 * adder), part & 1)
                    warp = uint32(0)
                    while warp < 4:
                        panel_at = int64(query_tile) * DQ + (warp * 2 * PARTS + panel) * 1024
                        total = advance(dq_acc, panel_at)
                        of_warp = uint32(dq_smem + adder * PART_BYTES + warp * 4096)
                        if is_first:
                            cp_async_bulk_store(total, of_warp, 4096)
                        else:
                            cp_reduce_async_bulk_add(total, of_warp, 4096)
                        warp = opaque(uint32(warp + 1))  # stays a loop, for want of registers
                    cp_async_bulk_commit_group()
                    wait_for_reads()
                    mbarrier_arrive(uint32(dq_empty + 8 * adder))
                    if rem(part, PARTS) == PARTS - 1:
                        if DETERMINISTIC or is_first:
                            wait_for_sums()
                            fence_proxy_async_global()
                            st_release(counter, int32(turn + 1))
                        q_tile, head_tiles = next_query_tile(q_tile, head_tiles)
                    part = uint32(part + 1)
            if thread != 0 or steps == 0:
                return

            # 2 (producer). Load the K and V tiles
            load_keys(k_smem, k_map, k_full, k_start, head_kv, batch_index)

            # 4 (producer). Walk over the query tiles
            step = uint32(0)
            while step < steps:
                # 4a (producer). Load q, dout, lse and delta
                # To wait for an empty slot is to wait for the phase before: a fresh barrier has
                # had it.
                slot = uint32(rem(step, Q_STAGES))
                full = uint32(q_full + 8 * slot)
                head = int32(div(uint32(head_tiles), uint32(tiles_q)) - batch_index * heads_q)
                q_start = int32(q_tile * BLOCK_M)
                mbarrier_wait(uint32(q_empty + 8 * slot), ~div(step, Q_STAGES) & 1)
                to = uint32(q_smem + slot * QUERY_BYTES)
                load_queries(to, q_map, full, q_start, head, batch_index)
                mbarrier_arrive_expect_tx(full, STATS_BYTES)
                of_tile = advance(stats, int64(int32(head_tiles + q_tile)) * (BLOCK_M * 8))
                cp_async_bulk(uint32(stats_smem + slot * STATS_BYTES), of_tile, STATS_BYTES, full)
                if step == 0:  # the scores come first
                    load_keys(v_smem, v_map, v_full, k_start, head_kv, batch_index)
                slot = uint32(rem(step, DOUT_STAGES))
                mbarrier_wait(uint32(dout_empty + 8 * slot), ~div(step, DOUT_STAGES) & 1)
                full, to = uint32(dout_full + 8 * slot), uint32(dout_smem + slot * QUERY_BYTES)
                load_queries(to, dout_map, full, q_start, head, batch_index)
                q_tile, head_tiles = next_query_tile(q_tile, head_tiles)
                step = uint32(step + 1)
            return

        take_registers()
        group = int32(cuda.shfl_sync(0xFFFFFFFF, int32(thread >> 7), 0) - 1)  # of the whole warp
        lane_id, warp = int32(thread & 31), int32((thread & 127) >> 5)
        first_key_row = int32(k_start + warp * 16 + (lane_id >> 2))
        first_col = int32((lane_id & 3) * 2)
        to_log2 = float32(score.scale) * float32(LOG2E)
        p_warp = advance(smem, uint32(p_smem + warp * (P_BYTES // 4)))

        # 3 (consumers). Start dk and dv
        dk_acc, dv_acc = cuda.local.array(ACC, float32), cuda.local.array(ACC, float32)
        for i in range(COLS // 2):
            dk_acc[0, i] = dv_acc[0, i] = 0

        # 4 (consumers). Walk over the query tiles
        s = cuda.local.array(SCORES, float32)  # s or dout v^T: keys down, queries across
        dq = cuda.local.array(DQ_PARTS, float32)
        p, p_copy = cuda.local.array(P, uint32), cuda.local.array(P, uint32)
        ds = cuda.local.array(P, uint32)
        step = uint32(0)  # that is being ended; the next one is being begun

        def free_slot(empty):
            if lane_id == 0:
                mbarrier_arrive(empty)

        # Where q, or dout, of a step lies in its ring, as soon as it is there.
        def wait_for_q(step):
            slot = rem(step, Q_STAGES)
            mbarrier_wait(uint32(q_full + 8 * slot), div(step, Q_STAGES) & 1)
            return uint32(slot * QUERY_BYTES)

        def wait_for_dout(step):
            slot = rem(step, DOUT_STAGES)
            mbarrier_wait(uint32(dout_full + 8 * slot), div(step, DOUT_STAGES) & 1)
            return opaque(uint32(slot * QUERY_BYTES))

        def start_scores(step):
            q_rows = uint32(q_smem + wait_for_q(step))
            lses = uint32(stats_smem + rem(step, Q_STAGES) * STATS_BYTES)
            multiply_nt(s, opaque(k_smem), q_rows, ones_smem, lses)

        def start_dp(step):
            dout_rows = uint32(dout_smem + wait_for_dout(step))
            wait_for_q(step)  # with which the statistics come
            deltas = uint32(stats_smem + rem(step, Q_STAGES) * STATS_BYTES + STATS_BYTES // 2)
            multiply_nt(s, opaque(v_smem), dout_rows, ones_smem, deltas)

        # 4b (consumers). p = exp(s - lse)
        def probabilities(q_tile):
            fence_scores(s, 0)
            q_start = int32(q_tile * BLOCK_M)
            q_end, k_end = int32(q_start + BLOCK_M), int32(k_start + BLOCK_N)
            if not tile_is_unmasked(FEATURES, band, q_start, q_end, k_start, k_end):
                hide(s, score, band, int32(q_start + first_col), first_key_row)
            for i in range(P):
                p[i] = pair(ex2_approx(s[2 * i] * to_log2), ex2_approx(s[2 * i + 1] * to_log2))
            store_p(p_warp, p, 0)
            bar_arrive(P_IS_THERE, 256)

        # 4c (consumers). dv += p^T dout
        def start_dv(step):
            copy_p(p_copy, 0, p, 0)
            dout_cols = dout_smem + wait_for_dout(step) + group * (QUERY_BYTES // 2)
            multiply_rn(dv_acc, p, 0, uint32(dout_cols))

        def dv_is_there(step):
            fence_acc(dv_acc, 0)
            fence_p(p, 0)
            free_slot(uint32(dout_empty + 8 * rem(step, DOUT_STAGES)))

        # 4d (consumers). ds = p * (dout v^T - delta)
        # p is that in 16 bits, as for dv: a copy, since p is being read.
        def score_gradients(step):
            fence_scores(s, 0)
            for i in range(P):
                ds[i] = pair(first(p_copy[i]) * s[2 * i], second(p_copy[i]) * s[2 * i + 1])
            store_ds(uint32(ds_smem + rem(step, 2) * P_BYTES), warp * 16, ds)
            fence_proxy_async()
            bar_arrive(DS_IS_THERE, 256)

        # 4e (consumers). dk += ds^T q
        def start_dk(step):
            q_cols = q_smem + rem(step, Q_STAGES) * QUERY_BYTES + group * (QUERY_BYTES // 2)
            multiply_nn(dk_acc, uint32(ds_smem + rem(step, 2) * P_BYTES), uint32(q_cols))

        def dk_is_there(step):
            fence_acc(dk_acc, 0)
            free_slot(uint32(q_empty + 8 * rem(step, Q_STAGES)))

        # 4f (consumers). dq += ds k
        def start_dq(step, part):
            k_cols = opaque(k_smem) + (group * PARTS + part) * (BLOCK_N * 128)
            from_ds = uint32(ds_smem + rem(step, 2) * P_BYTES)
            multiply_tn(dq, part * 32, from_ds, uint32(k_cols))

        def add_dq(step, part):
            fence_part(dq, part * 32)
            mbarrier_wait(uint32(dq_empty + 8 * group), ~(step * PARTS + part) & 1)
            dq_warp = uint32(dq_smem + group * PART_BYTES + warp * 4096)
            store_dq(advance(smem, dq_warp), dq, part * 32)
            fence_proxy_async()
            cuda.syncwarp()
            if lane_id == 0:
                mbarrier_arrive(uint32(dq_full + 8 * group))

        # All of a step's at once, up to its last part of dq.
        def gradients(step):
            start_dk(step)
            start_dq(step, 0)
            start_dq(step, 1)
            wait_but_for_one()
            dk_is_there(step)
            add_dq(step, 0)

        if steps > 0:
            mbarrier_wait(k_full, 0)
        if steps > 0 and group == 0:
            start_scores(uint32(0))
            wait_for_all()
            probabilities(q_tile)
            start_dv(uint32(0))
            wait_for_all()
            dv_is_there(uint32(0))
            while uint32(step + 1) < steps:
                following = uint32(step + 1)
                q_tile, head_tiles = next_query_tile(q_tile, head_tiles)
                start_scores(following)
                bar_sync(DS_IS_THERE, 256)
                start_dk(step)
                start_dq(step, 0)
                wait_but_for_two()
                probabilities(q_tile)
                start_dv(following)
                start_dq(step, 1)
                wait_but_for_two()
                dk_is_there(step)
                add_dq(step, 0)
                wait_but_for_one()
                dv_is_there(following)
                wait_for_all()
                add_dq(step, 1)
                step = following
            bar_sync(DS_IS_THERE, 256)
        elif steps > 0:
            mbarrier_wait(v_full, 0)
            start_dp(uint32(0))
            bar_sync(P_IS_THERE, 256)
            load_p(p, p_warp)
            start_dv(uint32(0))
            wait_but_for_one()
            score_gradients(uint32(0))
            wait_for_all()
            dv_is_there(uint32(0))
            while uint32(step + 1) < steps:
                following = uint32(step + 1)
                bar_sync(DS_IS_OURS, 128)
                gradients(step)
                start_dp(following)
                wait_but_for_one()
                add_dq(step, 1)
                bar_sync(P_IS_THERE, 256)
                load_p(p, p_warp)
                start_dv(following)
                wait_but_for_one()
                score_gradients(following)
                wait_for_all()
                dv_is_there(following)
                step = following
            bar_sync(DS_IS_OURS, 128)
        if steps > 0:  # the last step's, with nothing to begin
            gradients(step)
            wait_for_all()
            add_dq(step, 1)

        # 5 (consumers). Scale and store
        key, col = int32(k_start + warp * 16), int32(group * COLS)
        rows = int32(seqlen_k - key)
        scale, one = cuda.local.array(2, float32), cuda.local.array(2, float32)
        for half in range(2):
            scale[half] = float32(score.scale)
            one[half] = 1
        dk_rows = advance(dk, offset_of(dk_strides, batch_index, head_kv, key) + col)
        store_part(dk_rows, dk_strides.row, dk_acc, 0, scale, rows, int32(head_dim - col))
        dv_rows = advance(dv, offset_of(dv_strides, batch_index, head_kv, key) + col)
        store_part(dv_rows, dv_strides.row, dv_acc, 0, one, rows, int32(head_dim_v - col))

    return kernel
