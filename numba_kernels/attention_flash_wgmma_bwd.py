"""attention_flash_wgmma_bwd: Hopper's backward, copies, products and sums in the background.

  p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q

As attention_flash_mma_bwd, a block keeps a tile of keys and walks over the queries that see
them. The products are wgmmas of transposed scores, keys down and queries across: p^T and ds^T
then lie in registers as the next products want them, and only ds goes through shared memory, for
dq. The sums for p and ds start from -lse / scale and from -delta, which attention_row_stats has
made operands of. A producer's copies keep rings of q and dout filled. dv is started as soon as p
is there: ds is then made, stored and waited for while the tensor cores have work. The next
scores are started before this step's dq and dk are there. Between steps nothing is under way, or
the compiler would wait after every product. dq is added up in dq_acc, in fp32 and in the layout
of accumulators, by the copy engine: the consumers put it into shared memory and go on, and
another thread, the adder, sees to the rest. attention_dq rounds it. A counter of each query tile
says who is the first one there, who stores instead of adding, so that no zeros have to be
written and read; and with DETERMINISTIC whose turn it is to add: the order of the keys. Blocks
then take their key tiles from a counter as well: whoever waits for a turn waits for a block that
has started.

Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it: a
               warpgroup of which one thread produces and one adds, and two of 64 keys each; of
               dq each has 64 rows, or with BLOCK_M = 64 half of the columns
Shared memory: the K and V tiles, rings of q with the rows' statistics and of dout, two ds tiles,
               ones to multiply the statistics by, and dq of one query tile
Registers:     dk and dv of 64 keys a warpgroup, two products, and p and ds in 16 bits
Twin:          cuda_src/attention_flash_wgmma_bwd.cu
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
    mbarrier_init,
    mbarrier_wait,
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
    load_tile,
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


def attention_flash_wgmma_bwd(
    T, BLOCK_M, BLOCK_N, HEAD_DIM, FEATURES, DETERMINISTIC, Q_STAGES, DOUT_STAGES, THREADS
):
    WARPS = THREADS // 32 - 4  # of consumers
    KEY_BYTES, QUERY_BYTES = BLOCK_N * HEAD_DIM * 2, BLOCK_M * HEAD_DIM * 2
    DS_BYTES, STATS_BYTES = BLOCK_N * BLOCK_M * 2, BLOCK_M * 32
    DQ = BLOCK_M * HEAD_DIM  # elements, 1024 of them a warp's
    PARTS = BLOCK_M // 64  # of 64 queries; with two of them HEAD_DIM is 64
    ACC, SCORES, P = (1, HEAD_DIM // 2), BLOCK_M // 2, BLOCK_M // 4

    give_registers, take_registers = setmaxnreg_dec(24), setmaxnreg_inc(240)
    load_keys, load_queries = load_tile(BLOCK_N, HEAD_DIM), load_tile(BLOCK_M, HEAD_DIM)
    multiply_nt = start_nt_from(T, HEAD_DIM, BLOCK_N, BLOCK_M)
    multiply_ds_q = start_rn(T, BLOCK_M, HEAD_DIM, 1)
    multiply_p_dout = start_rn(T, 64, HEAD_DIM, 1)
    multiply_tn = start_tn(T, BLOCK_N)
    wait_for_all, wait_but_for_one, wait_but_for_two = (wgmma_wait_group(n) for n in range(3))
    wait_but_for_dv = wgmma_wait_group(PARTS)
    wait_for_sums, wait_for_reads = cp_async_bulk_wait_group(0), cp_async_bulk_wait_group_read(0)
    fence_scores, fence_p = register_fence(SCORES), register_fence(P)
    fence_acc, fence_part = register_fence(HEAD_DIM // 2), register_fence(32)
    copy_p = register_copy(16)
    pair, first, second = cvt_rn_x2(T), cvt_first(T), cvt_second(T)
    hide, store_dq = hide_transposed(FEATURES, SCORES), store_registers(float32, 32)
    store_ds, store_part = store_fragments(BLOCK_N, P), store_rows(T, HEAD_DIM // 2)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def kernel(
        q_map,  # boxes of BLOCK_M rows
        k_map,  # of BLOCK_N rows
        v_map,  # the same
        dout_map,  # as q_map
        stats,  # (batch, heads_q, query tiles, BLOCK_M * 8)
        dq_acc,  # (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
        turns,  # 1 + (batch, heads_q, query tiles), zeroed
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
        v_smem = uint32(k_smem + KEY_BYTES)
        q_smem = uint32(v_smem + KEY_BYTES)
        dout_smem = uint32(q_smem + Q_STAGES * QUERY_BYTES)
        ds_smem = uint32(dout_smem + DOUT_STAGES * QUERY_BYTES)
        stats_smem = uint32(ds_smem + 2 * DS_BYTES)
        ones_smem = uint32(stats_smem + Q_STAGES * STATS_BYTES)
        # Memcheck wants something behind operands (scripts/sanitize.py).
        dq_smem = uint32(ones_smem + ONES_BYTES)
        k_full = uint32(dq_smem + DQ * 4)
        v_full = uint32(k_full + 8)
        q_full = uint32(v_full + 8)
        q_empty = uint32(q_full + 8 * Q_STAGES)
        dout_full = uint32(q_empty + 8 * Q_STAGES)
        dout_empty = uint32(dout_full + 8 * DOUT_STAGES)
        dq_full = uint32(dout_empty + 8 * DOUT_STAGES)
        dq_empty = uint32(dq_full + 8)
        smem = advance(reinterpret(uint8, shared), -int64(k_smem))
        ticket_smem = reinterpret(int32, advance(smem, dq_empty + 8))
        thread = uint32(cuda.threadIdx.x)
        if thread < 16:
            store_ones(advance(smem, ones_smem), thread)
        if thread == 0:
            init_barriers(k_full, 2, 1)  # and v_full
            init_barriers(q_full, Q_STAGES, 2)  # for q and for the statistics
            init_barriers(q_empty, Q_STAGES, WARPS)
            init_barriers(dout_full, DOUT_STAGES, 1)
            init_barriers(dout_empty, DOUT_STAGES, WARPS)
            mbarrier_init(dq_full, WARPS)
            mbarrier_init(dq_empty, 1)
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
        head = int32(head_kv * heads_each)
        tile_from = int32(tile_end - 1 if DETERMINISTIC else tile_first)
        q_tile = tile_from

        def next_query_tile(q_tile, head):
            q_tile = int32(q_tile - 1 if DETERMINISTIC else q_tile + 1)
            if q_tile < tile_first if DETERMINISTIC else q_tile == tile_end:
                q_tile = tile_from
                head = int32(head + 1)
            return q_tile, head

        # A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them.
        if thread < 128:
            give_registers()
            fence_proxy_async_global()  # the copy engine is to see what ordinary stores wrote
            if thread == 32:
                # 4f (adder). dq += ds k
                step = uint32(0)
                while step < steps:
                    query_tile = int32((batch_index * int32(heads_q) + head) * tiles_q + q_tile)
                    counter = advance(turns, 1 + query_tile)
                    total = advance(dq_acc, int64(query_tile) * DQ)
                    turn = int32(BEING_STORED)
                    if DETERMINISTIC:
                        turn = turn_of(BLOCK_M, BLOCK_N, FEATURES, keys, q_tile)
                    is_first = wait_for_turn(DETERMINISTIC, counter, turn)
                    fence_proxy_async_global()
                    mbarrier_wait(dq_full, step & 1)
                    if is_first:
                        cp_async_bulk_store(total, dq_smem, DQ * 4)
                    else:
                        cp_reduce_async_bulk_add(total, dq_smem, DQ * 4)
                    cp_async_bulk_commit_group()
                    wait_for_reads()
                    mbarrier_arrive(dq_empty)
                    if DETERMINISTIC or is_first:
                        wait_for_sums()
                        fence_proxy_async_global()
                        st_release(counter, int32(turn + 1))
                    q_tile, head = next_query_tile(q_tile, head)
                    step = uint32(step + 1)
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
                query_tile = int32((batch_index * int32(heads_q) + head) * tiles_q + q_tile)
                q_start = int32(q_tile * BLOCK_M)
                mbarrier_wait(uint32(q_empty + 8 * slot), ~div(step, Q_STAGES) & 1)
                load_queries(
                    uint32(q_smem + slot * QUERY_BYTES), q_map, full, q_start, head, batch_index
                )
                mbarrier_arrive_expect_tx(full, STATS_BYTES)
                of_tile = advance(stats, int64(query_tile) * (BLOCK_M * 8))
                cp_async_bulk(uint32(stats_smem + slot * STATS_BYTES), of_tile, STATS_BYTES, full)
                if step == 0:  # the scores come first
                    load_keys(v_smem, v_map, v_full, k_start, head_kv, batch_index)
                slot = uint32(rem(step, DOUT_STAGES))
                mbarrier_wait(uint32(dout_empty + 8 * slot), ~div(step, DOUT_STAGES) & 1)
                load_queries(
                    uint32(dout_smem + slot * QUERY_BYTES), dout_map,
                    uint32(dout_full + 8 * slot), q_start, head, batch_index,
                )  # fmt: skip
                q_tile, head = next_query_tile(q_tile, head)
                step = uint32(step + 1)
            return

        take_registers()
        group = int32(cuda.shfl_sync(0xFFFFFFFF, int32(thread >> 7), 0) - 1)  # of the whole warp
        lane_id, warp = int32(thread & 31), int32((thread & 127) >> 5)
        warp_key = int32(group * 64 + warp * 16)
        first_key_row = int32(k_start + warp_key + (lane_id >> 2))
        first_col = int32((lane_id & 3) * 2)
        to_log2 = float32(score.scale) * float32(LOG2E)
        k_rows, v_rows = uint32(k_smem + group * (64 * 128)), uint32(v_smem + group * (64 * 128))
        # Our part of dq: queries from 64 * group, or where there are 64, the columns from there.
        ds_part = uint32(ds_smem + (group * (BLOCK_N * 128) if BLOCK_M == 128 else 0))
        k_part = uint32(k_smem + (0 if BLOCK_M == 128 else group * (BLOCK_N * 128)))
        part = group * 4 + warp if BLOCK_M == 128 else warp * 2 + group
        dq_warp = uint32(dq_smem + part * 4096)

        # 3 (consumers). Start dk and dv
        dk_acc = cuda.local.array(ACC, float32)
        dv_acc = cuda.local.array(ACC, float32)
        for i in range(HEAD_DIM // 2):
            dk_acc[0, i] = 0
            dv_acc[0, i] = 0

        # 4 (consumers). Walk over the query tiles
        s = cuda.local.array(SCORES, float32)  # keys down, queries across
        dp = cuda.local.array(SCORES, float32)
        dq_part = cuda.local.array(32, float32)
        p = cuda.local.array(P, uint32)
        p_copy = cuda.local.array(P, uint32)
        ds = cuda.local.array(P, uint32)
        step = uint32(0)  # that is being ended; the next one is being begun

        def free_slot(empty):
            if lane_id == 0:
                mbarrier_arrive(empty)

        def start_scores(step):
            slot = uint32(rem(step, Q_STAGES))
            mbarrier_wait(uint32(q_full + 8 * slot), div(step, Q_STAGES) & 1)
            lses = uint32(stats_smem + slot * STATS_BYTES)
            multiply_nt(s, k_rows, uint32(q_smem + slot * QUERY_BYTES), ones_smem, lses)

        def wait_for_dout(step):
            slot = uint32(rem(step, DOUT_STAGES))
            mbarrier_wait(uint32(dout_full + 8 * slot), div(step, DOUT_STAGES) & 1)

        def start_dp(step):
            dout_rows = uint32(dout_smem + rem(step, DOUT_STAGES) * QUERY_BYTES)
            deltas = uint32(stats_smem + rem(step, Q_STAGES) * STATS_BYTES + STATS_BYTES // 2)
            multiply_nt(dp, v_rows, dout_rows, ones_smem, deltas)

        # 4b (consumers). p = exp(s - lse)
        def hide_unseen(q_tile):
            fence_scores(s, 0)
            q_start, k_first = int32(q_tile * BLOCK_M), int32(k_start + group * 64)
            q_end, k_end = int32(q_start + BLOCK_M), int32(k_first + 64)
            if not tile_is_unmasked(FEATURES, band, q_start, q_end, k_first, k_end):
                hide(s, score, band, int32(q_start + first_col), first_key_row)

        # Of one part of the queries.
        def probabilities(part):
            for i in range(16 * part, 16 * part + 16):
                p[i] = pair(ex2_approx(s[2 * i] * to_log2), ex2_approx(s[2 * i + 1] * to_log2))

        # 4c (consumers). dv += p^T dout
        # Of the same part. Meanwhile ds is made of p: of the copy, since p is being read.
        def start_dv(step, part):
            copy_p(p_copy, 16 * part, p, 16 * part)
            rows = uint32(dout_smem + rem(step, DOUT_STAGES) * QUERY_BYTES + part * (64 * 128))
            multiply_p_dout(dv_acc, p, 16 * part, rows)

        def dv_is_there(step):
            wait_for_all()
            fence_acc(dv_acc, 0)
            fence_p(p, 0)
            free_slot(uint32(dout_empty + 8 * rem(step, DOUT_STAGES)))

        # 4d (consumers). ds = p * (dout v^T - delta)
        # p is that in 16 bits, as for dv: there is no room for both.
        def score_gradients(step):
            fence_scores(dp, 0)
            for i in range(P):
                ds[i] = pair(first(p_copy[i]) * dp[2 * i], second(p_copy[i]) * dp[2 * i + 1])
            store_ds(uint32(ds_smem + rem(step, 2) * DS_BYTES), warp_key, ds)
            fence_proxy_async()
            bar_sync(1, 32 * WARPS)  # ds of all keys is there, and the other tile of it is free

        # 4e (consumers). dk += ds^T q
        def start_dk(step):
            multiply_ds_q(dk_acc, ds, 0, uint32(q_smem + rem(step, Q_STAGES) * QUERY_BYTES))

        def dk_is_there(step):
            fence_acc(dk_acc, 0)
            fence_p(ds, 0)
            free_slot(uint32(q_empty + 8 * rem(step, Q_STAGES)))

        # 4f (consumers). dq += ds k
        def start_dq(step):
            multiply_tn(dq_part, 0, uint32(ds_part + rem(step, 2) * DS_BYTES), k_part)

        def add_dq(step):
            fence_part(dq_part, 0)
            mbarrier_wait(dq_empty, ~step & 1)
            store_dq(advance(smem, dq_warp), dq_part, 0)
            fence_proxy_async()
            cuda.syncwarp()
            if lane_id == 0:
                mbarrier_arrive(dq_full)

        if steps > 0:
            mbarrier_wait(k_full, 0)
            start_scores(uint32(0))
            mbarrier_wait(v_full, 0)
            wait_for_dout(uint32(0))
            start_dp(uint32(0))
            wait_but_for_one()
            hide_unseen(q_tile)
            for part in range(PARTS):
                probabilities(part)
                start_dv(uint32(0), part)
            wait_but_for_dv()
            score_gradients(uint32(0))
            dv_is_there(uint32(0))
        while uint32(step + 1) < steps:
            q_tile, head = next_query_tile(q_tile, head)
            following = uint32(step + 1)
            start_dq(step)
            start_scores(following)
            start_dk(step)
            wait_but_for_two()
            add_dq(step)
            if BLOCK_M == 64:
                wait_for_dout(following)
                start_dp(following)
                wait_but_for_two()
                hide_unseen(q_tile)
                probabilities(0)
                start_dv(following, 0)
                wait_but_for_two()
                dk_is_there(step)
            else:  # dp has to wait for the registers that half of the scores and ds leave
                wait_but_for_one()
                hide_unseen(q_tile)
                probabilities(0)
                wait_for_dout(following)
                start_dv(following, 0)
                wait_but_for_one()
                dk_is_there(step)
                start_dp(following)
                probabilities(1)
                start_dv(following, 1)
            wait_but_for_one()
            score_gradients(following)
            dv_is_there(following)
            step = following
        if steps > 0:
            start_dq(step)
            start_dk(step)
            wait_but_for_one()
            add_dq(step)
            wait_for_all()
            dk_is_there(step)

        # 5 (consumers). Scale and store
        rows = int32(seqlen_k - (k_start + warp_key))
        scale = cuda.local.array(2, float32)
        one = cuda.local.array(2, float32)
        for half in range(2):
            scale[half] = float32(score.scale)
            one[half] = 1
        first_row = int32(k_start + warp_key)
        dk_rows = advance(dk, offset_of(dk_strides, batch_index, head_kv, first_row))
        store_part(dk_rows, dk_strides.row, dk_acc, 0, scale, rows, int32(head_dim))
        dv_rows = advance(dv, offset_of(dv_strides, batch_index, head_kv, first_row))
        store_part(dv_rows, dv_strides.row, dv_acc, 0, one, rows, int32(head_dim_v))

    return kernel
