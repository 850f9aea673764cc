"""attention_flash_wgmma_fwd: Hopper's forward, copies and products in the background.

  s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))

As attention_flash_mma_fwd, with two differences. Tiles are copied by the tensor memory
accelerator, which one thread, the producer, keeps busy: it fills a ring of K and V tiles as fast
as the consumers empty it. And products are wgmmas, which run in the background: a consumer
starts the next scores, then the product of p with the last V, and takes its softmax while the
latter runs. Where there is room for two Q tiles, the next scores may be another query tile's.
Two or three consumers take turns at the tensor cores. A block stays on its multiprocessor and
takes query tiles in turn; where they differ in length from a counter, the longest ones first.

Work split:    a warpgroup of producers, of which one thread works, and consumers of 64 query
               rows each, up to the last key that these see; a block walks over query tiles
Shared memory: the Q tiles and a ring of STAGES tiles of K and of V, each with a barrier that
               says it is full and one that says it is empty; 16 rows of output a warp
Registers:     scores, p and output of 64 rows a consumer, which the producers leave room for
Twin:          cuda_src/attention_flash_wgmma_fwd.cu
Launched by:   workbench/launchers.py, attention_flash_wgmma
"""

from numba import cuda
from numba.cuda import types

from .block_tiles import QueryTile, get_tile, own_end, put_tile, query_tile
from .common import INF, LN2, LOG2E, cdiv, div, rem, warp_sum
from .ptx_sm80 import atom_inc, lg2_approx, rcp_approx, shared_address
from .ptx_sm90 import (
    bar_arrive,
    bar_sync,
    cp_async_bulk_wait_group_read,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_wait,
    register_fence,
    setmaxnreg_dec,
    setmaxnreg_inc,
    wgmma_wait_group,
)
from .scores import (
    ANY_SCALE,
    KV_LENGTHS,
    RANGE,
    SOFTCAP,
    KeyRange,
    capped_score,
    hide,
    tile_is_unmasked,
)
from .warpgroups import (
    clear_rows,
    init_barriers,
    load_tile,
    round_fragments,
    running_softmax,
    send_rows,
    start_nt,
    start_rn,
)

float32, int32, uint32 = types.float32, types.int32, types.uint32


def attention_flash_wgmma_fwd(
    T, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, FEATURES, Q_STAGES, STAGES, THREADS
):
    CONSUMERS = THREADS // 128 - 1
    DIMS = min(HEAD_DIM_V, 128)  # of one product with V
    PARTS = HEAD_DIM_V // DIMS
    Q_BYTES, K_BYTES = BLOCK_M * HEAD_DIM * 2, BLOCK_N * HEAD_DIM * 2
    V_BYTES = BLOCK_N * HEAD_DIM_V * 2
    SCALED = FEATURES & (SOFTCAP | ANY_SCALE)  # before the largest is looked for
    # A query tile's last step is the next one's first, if its Q can be there by then.
    SEAMLESS = Q_STAGES > 1
    # Of four consumers there is always one that has something to multiply: they take no turns.
    TURNS = CONSUMERS < 4
    TURN = 128 * CONSUMERS  # threads at the barrier of a turn
    BARRIERS = 2 * Q_STAGES + 4 * STAGES
    OUT_BYTES = BLOCK_M * DIMS * 2
    # Words of shared memory before those that say what a query tile is.
    TILES_AT = (Q_STAGES * Q_BYTES + STAGES * (K_BYTES + V_BYTES) + OUT_BYTES + 8 * BARRIERS) // 4
    ACC, SCORES, P = (PARTS, DIMS // 2), BLOCK_N // 2, BLOCK_N // 4

    give_registers = setmaxnreg_dec(32 if CONSUMERS == 3 else 24)
    take_registers = setmaxnreg_inc((240, 160, 112)[CONSUMERS - 2])
    load_q, load_k = load_tile(BLOCK_M, HEAD_DIM), load_tile(BLOCK_N, HEAD_DIM)
    load_v, clear_v = load_tile(BLOCK_N, HEAD_DIM_V), clear_rows(BLOCK_N, HEAD_DIM_V, TURN)
    multiply_qk = start_nt(T, HEAD_DIM, BLOCK_M, BLOCK_N)
    multiply_pv = start_rn(T, BLOCK_N, DIMS, PARTS)
    wait_for_scores, wait_for_all = wgmma_wait_group(1), wgmma_wait_group(0)
    fence_s, fence_acc = register_fence(SCORES), register_fence(PARTS * (DIMS // 2))
    hide_scores, softmax = hide(FEATURES, SCORES), running_softmax(SCORES)
    round_scores, send = round_fragments(T, P), send_rows(T, DIMS // 2)
    wait_for_reads = cp_async_bulk_wait_group_read(0)

    # Functions of their own, and no closures, which would take the compiler twice as long.
    @cuda.jit(device=True, forceinline=True)
    def take_turn(consumer):
        if TURNS:
            bar_sync(1 + consumer, TURN)
        else:
            cuda.syncwarp()  # as turns do: all lanes have seen what they waited for

    @cuda.jit(device=True, forceinline=True)
    def pass_turn(consumer):
        if TURNS:
            for i in range(1, CONSUMERS):
                bar_arrive(1 + rem(consumer + i, CONSUMERS), TURN)

    @cuda.jit(device=True, forceinline=True)
    def free_slot(empty, slot):
        if uint32(cuda.threadIdx.x) & 31 == 0:
            mbarrier_arrive(uint32(empty + 8 * slot))

    @cuda.jit(device=True, forceinline=True)
    def start_rows(row_max, row_sum):
        for half in range(2):
            row_max[half] = -INF
            row_sum[half] = 0

    @cuda.jit(launch_bounds=(THREADS, 1))
    def kernel(
        q_map,  # boxes of BLOCK_M rows
        k_map,  # of BLOCK_N rows
        v_map,  # the same
        out_map,  # of 16 rows, a warp's
        lse,  # (batch, heads_q, seqlen_q), contiguous
        counter,  # of query tiles that blocks have taken, zeroed, or null
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
        shared = cuda.shared.array(0, int32, 1024)
        q_smem = shared_address(shared, 0)
        k_smem = uint32(q_smem + Q_STAGES * Q_BYTES)
        v_smem = uint32(k_smem + STAGES * K_BYTES)
        out_smem = uint32(v_smem + STAGES * V_BYTES)
        q_full = uint32(out_smem + OUT_BYTES)
        q_empty = uint32(q_full + 8 * Q_STAGES)
        k_full = uint32(q_empty + 8 * Q_STAGES)
        k_empty = uint32(k_full + 8 * STAGES)
        v_full = uint32(k_empty + 8 * STAGES)
        v_empty = uint32(v_full + 8 * STAGES)
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            init_barriers(q_full, Q_STAGES, 1)
            init_barriers(q_empty, Q_STAGES, 4 * CONSUMERS)  # one arrival a warp
            init_barriers(k_full, STAGES, 1)
            init_barriers(k_empty, STAGES, 4 * CONSUMERS)
            init_barriers(v_full, STAGES, 1)
            init_barriers(v_empty, STAGES, 4 * CONSUMERS)
            fence_mbarrier_init()
        cuda.syncthreads()

        # 1. Which rows are ours
        tiles = uint32(batch * heads_q * cdiv(seqlen_q, BLOCK_M))
        blocks = uint32(cuda.gridDim.x)
        tile = uint32(cuda.blockIdx.x)
        # K tiles and Q tiles so far: they tell stage and phase.
        loaded, tiles_loaded = uint32(0), uint32(0)

        # A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them, or 32 x 128 +
        # 160 x 384. With 640 threads they are 96 each, shared out as 24 x 128 + 112 x 512.
        if thread < 128:
            give_registers()
            if thread != 0:
                return
            # A V tile is wanted a step after its K tile, and asked for after the next K tile: in
            # the order in which their slots become free.
            v_loaded = uint32(0)
            v_row, v_head, v_batch = int32(0), int32(0), int32(0)

            def request_v(v_loaded, v_row, v_head, v_batch):
                stage = uint32(rem(v_loaded, STAGES))
                mbarrier_wait(uint32(v_empty + 8 * stage), ~div(v_loaded, STAGES) & 1)
                load_v(
                    uint32(v_smem + stage * V_BYTES), v_map, uint32(v_full + 8 * stage),
                    v_row, v_head, v_batch,
                )  # fmt: skip

            taken = uint32(tile - blocks)
            while uint32(blocks + taken) < tiles:
                tile = uint32(blocks + taken)
                # Long before it is needed.
                taken = uint32(atom_inc(counter)) if FEATURES & RANGE else tile
                t = query_tile(
                    BLOCK_M, BLOCK_N, FEATURES,
                    tile, tiles, score, heads_q, seqlen_q, seqlen_k, heads_at_a_time,
                )  # fmt: skip
                if t.k_start >= t.k_end:
                    continue

                # 2 (producer). Load the Q tile
                # To wait for an empty slot is to wait for the phase before: a fresh barrier has
                # had it.
                if not SEAMLESS and v_loaded != loaded:
                    request_v(v_loaded, v_row, v_head, v_batch)
                    v_loaded = loaded
                slot = uint32(rem(tiles_loaded, Q_STAGES))
                mbarrier_wait(uint32(q_empty + 8 * slot), ~div(tiles_loaded, Q_STAGES) & 1)
                tiles_loaded = uint32(tiles_loaded + 1)
                put_tile(shared, TILES_AT, slot, t)  # which spares the consumers the divisions
                load_q(
                    uint32(q_smem + slot * Q_BYTES), q_map, uint32(q_full + 8 * slot),
                    t.q_start, t.head, t.batch_index,
                )  # fmt: skip

                # 4 (producer). Walk over the key/value tiles
                head_kv = int32(div(uint32(t.head), div(uint32(heads_q), uint32(heads_kv))))
                k_start = t.k_start
                while k_start < t.k_end:
                    # 4a (producer). Load the K and V tiles: V of the key tile before
                    stage = uint32(rem(loaded, STAGES))
                    mbarrier_wait(uint32(k_empty + 8 * stage), ~div(loaded, STAGES) & 1)
                    load_k(
                        uint32(k_smem + stage * K_BYTES), k_map, uint32(k_full + 8 * stage),
                        k_start, head_kv, t.batch_index,
                    )  # fmt: skip
                    if v_loaded != loaded:
                        request_v(v_loaded, v_row, v_head, v_batch)
                        v_loaded = loaded
                    v_row, v_head, v_batch = k_start, head_kv, t.batch_index
                    loaded = uint32(loaded + 1)
                    k_start = int32(k_start + BLOCK_N)
            if v_loaded != loaded:
                request_v(v_loaded, v_row, v_head, v_batch)
            slot = uint32(rem(tiles_loaded, Q_STAGES))
            mbarrier_wait(uint32(q_empty + 8 * slot), ~div(tiles_loaded, Q_STAGES) & 1)
            none = int32(0)
            no_key = QueryTile(none, none, none, none, none, KeyRange(none, none, none, none))
            put_tile(shared, TILES_AT, slot, no_key)  # the end
            mbarrier_arrive(uint32(q_full + 8 * slot))
            return

        take_registers()
        consumer = int32(cuda.shfl_sync(0xFFFFFFFF, int32(thread >> 7), 0) - 1)  # of the whole warp
        lane_id = int32(thread & 31)
        warp_row = int32(consumer * 64 + ((thread & 127) >> 5) * 16)
        first_row, first_col = int32(warp_row + (lane_id >> 2)), int32((lane_id & 3) * 2)
        q_rows = uint32(q_smem + consumer * (64 * 128))
        out_warp = uint32(out_smem + warp_row * (DIMS * 2))
        to_log2 = float32(LOG2E) if SCALED else float32(score.scale) * float32(LOG2E)
        row_max = cuda.local.array(2, float32)
        row_sum = cuda.local.array(2, float32)
        rescale = cuda.local.array(2, float32)
        done_max = cuda.local.array(2, float32)
        done_sum = cuda.local.array(2, float32)
        inverse = cuda.local.array(2, float32)
        acc = cuda.local.array(ACC, float32)
        s = cuda.local.array(SCORES, float32)
        p = cuda.local.array(P, uint32)  # of the key tile before, until it is multiplied by its V
        # Barrier 1 + c is the turn of consumer c: all others arrive there, and it comes last.
        if TURNS:
            for other in range(CONSUMERS - 1):
                if other < consumer:
                    bar_arrive(1 + other, TURN)

        # What step 5 does with a tile, and zeros for the next one.
        def store(t, row_max, row_sum):
            for half in range(2):
                total = warp_sum(row_sum[half], 4)
                # A row that sees no key gives 0.
                inverse[half] = float32(0) if total == 0 else rcp_approx(total)
                row = int32(t.q_start + first_row + 8 * half)
                if row < seqlen_q and first_col == 0:
                    at = (t.batch_index * heads_q + t.head) * seqlen_q + row
                    lse[at] = (row_max[half] * to_log2 + lg2_approx(total)) * float32(LN2)
            row = int32(t.q_start + warp_row)
            for part in range(PARTS):
                send(out_map, out_warp, acc, part, inverse, part * DIMS, row, t.head, t.batch_index)
                for i in range(DIMS // 2):
                    acc[part, i] = 0

        def start_scores(stage, tiles_loaded):
            q_tile = uint32(q_rows + rem(tiles_loaded, Q_STAGES) * Q_BYTES)
            multiply_qk(s, q_tile, uint32(k_smem + stage * K_BYTES))

        def start_output(stage):
            multiply_pv(acc, p, 0, uint32(v_smem + stage * V_BYTES))

        def unmasked(t, k_start):
            q_first = int32(t.q_start + consumer * 64)
            q_last = int32(min(q_first + 64, seqlen_q))
            k_end = int32(k_start + BLOCK_N)
            return tile_is_unmasked(FEATURES, t.band, q_first, q_last, k_start, k_end)

        def scores_are_there(stage, masked, t, k_start):
            fence_s(s, 0)
            free_slot(k_empty, stage)
            if SCALED:
                for i in range(SCORES):
                    s[i] = capped_score(FEATURES, score, s[i])
            if masked:
                hide_scores(s, t.band, int32(t.q_start + first_row), int32(k_start + first_col))

        def output_is_there(stage):
            fence_acc(acc, 0)
            free_slot(v_empty, stage)

        # Rows of V past a length may hold anything, and 0 times NaN is NaN. They are in the last
        # key tile of a query tile; every consumer has to come, so nobody's turn may be open.
        def clear_past_length(before, stage):
            rows = int32(before.band.kv_length - div(before.k_end - 1, BLOCK_N) * BLOCK_N)
            if FEATURES & KV_LENGTHS and rows < BLOCK_N:
                v_tile = uint32(v_smem + stage * V_BYTES)
                clear_v(v_tile, rows, int32(thread - 128), 1 + CONSUMERS)

        # 3 (consumers). Start the running softmax
        for part in range(PARTS):
            for i in range(DIMS // 2):
                acc[part, i] = 0
        p_is_left = False
        mbarrier_wait(q_full, 0)
        t = get_tile(shared, TILES_AT, 0)
        before = t
        k_start = t.k_start

        # 4 (consumers). Walk over the key/value tiles: of one query tile of ours after the other
        # A step begins a key tile and ends the one before, which for the first key tile of a query
        # tile is the last one of the query tile before. Compiled once for each way in which it is
        # called.
        def step(new_tile, masked, t, before, k_start, loaded, tiles_loaded):
            v_stage, v_phase = uint32(rem(loaded, STAGES)), div(loaded, STAGES) & 1
            loaded = uint32(loaded + 1)
            stage = uint32(rem(loaded, STAGES))

            # 4b (consumers). s = q k^T, masked; meanwhile acc += p v of the key tile before
            mbarrier_wait(uint32(k_full + 8 * stage), div(loaded, STAGES) & 1)
            if FEATURES & KV_LENGTHS and new_tile:
                mbarrier_wait(uint32(v_full + 8 * v_stage), v_phase)
                clear_past_length(before, v_stage)
            take_turn(consumer)
            start_scores(stage, tiles_loaded)
            mbarrier_wait(uint32(v_full + 8 * v_stage), v_phase)
            start_output(v_stage)
            pass_turn(consumer)
            wait_for_scores()
            scores_are_there(stage, masked, t, k_start)

            # 4c (consumers). Rescale what we have to the new maximum
            for half in range(2):
                done_max[half], done_sum[half] = row_max[half], row_sum[half]
            if new_tile:
                start_rows(row_max, row_sum)
            softmax(s, row_max, row_sum, rescale, to_log2, masked)

            # 4d (consumers). acc += p v: it is there
            # Only now p may be written over, and V loaded over.
            wait_for_all()
            output_is_there(v_stage)
            if new_tile:
                store(before, done_max, done_sum)
            else:
                for part in range(PARTS):
                    for i in range(DIMS // 2):
                        acc[part, i] *= rescale[i >> 1 & 1]
            round_scores(p, s)

        # A step without a key tile before it, and one without a key tile after it.
        def begin(t, k_start, loaded, tiles_loaded):
            stage = uint32(rem(loaded, STAGES))
            mbarrier_wait(uint32(k_full + 8 * stage), div(loaded, STAGES) & 1)
            take_turn(consumer)
            start_scores(stage, tiles_loaded)
            pass_turn(consumer)
            wait_for_all()
            scores_are_there(stage, not unmasked(t, k_start), t, k_start)
            start_rows(row_max, row_sum)
            softmax(s, row_max, row_sum, rescale, to_log2, True)
            round_scores(p, s)

        def finish(before, loaded):
            stage = uint32(rem(loaded, STAGES))
            mbarrier_wait(uint32(v_full + 8 * stage), div(loaded, STAGES) & 1)
            clear_past_length(before, stage)
            start_output(stage)
            wait_for_all()
            output_is_there(stage)
            store(before, row_max, row_sum)

        # A key tile that only other consumers' rows see.
        def pass_over(loaded):
            stage, phase = uint32(rem(loaded, STAGES)), div(loaded, STAGES) & 1
            mbarrier_wait(uint32(k_full + 8 * stage), phase)
            take_turn(consumer)
            pass_turn(consumer)
            free_slot(k_empty, stage)
            mbarrier_wait(uint32(v_full + 8 * stage), phase)
            cuda.syncwarp()  # all lanes have seen it full
            free_slot(v_empty, stage)

        while k_start < t.k_end:
            if p_is_left:
                step(True, not unmasked(t, k_start), t, before, k_start, loaded, tiles_loaded)
                loaded = uint32(loaded + 1)
            else:
                begin(t, k_start, loaded, tiles_loaded)
                p_is_left = True
            # With lengths everybody stays to the last key tile, which everybody has to clear.
            q_first = int32(t.q_start + consumer * 64)
            k_end = t.k_end if FEATURES & KV_LENGTHS else own_end(FEATURES, t, q_first)
            k_start = int32(k_start + BLOCK_N)
            while k_start < k_end:
                if unmasked(t, k_start):
                    step(False, False, t, before, k_start, loaded, tiles_loaded)
                else:
                    step(False, True, t, before, k_start, loaded, tiles_loaded)
                loaded = uint32(loaded + 1)
                k_start = int32(k_start + BLOCK_N)
            before = t
            cuda.syncwarp()  # all lanes are done with it: the next Q comes during the last product
            free_slot(q_empty, uint32(rem(tiles_loaded, Q_STAGES)))
            if not SEAMLESS or k_start < t.k_end:
                finish(before, loaded)
                loaded = uint32(loaded + 1)
                p_is_left = False
            while k_start < t.k_end:
                pass_over(loaded)
                loaded = uint32(loaded + 1)
                k_start = int32(k_start + BLOCK_N)
            tiles_loaded = uint32(tiles_loaded + 1)
            slot = uint32(rem(tiles_loaded, Q_STAGES))
            mbarrier_wait(uint32(q_full + 8 * slot), div(tiles_loaded, Q_STAGES) & 1)
            t = get_tile(shared, TILES_AT, slot)
            k_start = t.k_start

        # 5 (consumers). Normalise and store
        if p_is_left:
            finish(before, loaded)
        # What the producer has passed over: query tiles that see no key.
        if FEATURES & RANGE:
            start_rows(row_max, row_sum)
            while tile < tiles:
                t = query_tile(
                    BLOCK_M, BLOCK_N, FEATURES,
                    tile, tiles, score, heads_q, seqlen_q, seqlen_k, heads_at_a_time,
                )  # fmt: skip
                if t.k_start >= t.k_end:
                    store(t, row_max, row_sum)
                tile = uint32(tile + blocks)
        if lane_id == 0:
            wait_for_reads()  # shared memory ends with the block

    return kernel
