"""attention_flash_wgmma_fwd: Hopper's forward, copies and products in the background.

  s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))

As attention_flash_mma_fwd, with two differences. Tiles are copied by the tensor memory
accelerator, which one thread, the producer, keeps busy: it fills a ring of K and V tiles as fast
as the consumers empty it, from one query tile on to the next without a break. And products are
wgmmas, which run in the background: a consumer starts the next scores, then the product of p
with the last V, and takes its softmax while the latter runs. Consumers take turns at the tensor
cores. A block stays on its multiprocessor and takes query tiles in turn; where they differ in
length from a counter, the longest ones first.

Work split:    a warpgroup of producers, of which one thread works, and consumers of 64 query
               rows each; a block walks over query tiles
Shared memory: the Q tiles and a ring of STAGES tiles of K and of V, each with a barrier that
               says it is full and one that says it is empty
Registers:     scores, p and output of 64 rows a consumer, which the producers leave room for
Twin:          cuda_src/attention_flash_wgmma_fwd.cu
Launched by:   workbench/launchers.py, attention_flash_wgmma
"""

from collections import namedtuple

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
    rem,
    warp_max,
    warp_sum,
)
from .ptx_sm80 import atom_inc, ex2_approx, lg2_approx, rcp_approx, shared_address
from .ptx_sm90 import (
    bar_arrive,
    bar_sync,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_init,
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
    finite_or_zero,
    first_key,
    hide,
    key_range,
    last_key,
    tile_is_unmasked,
)
from .warpgroups import clear_rows, load_tile, round_fragments, start_nt, start_rn, store_rows

float32, int32, uint32 = types.float32, types.int32, types.uint32

# A query tile, the keys that some row of it sees, and which ones a row sees.
QueryTile = namedtuple("QueryTile", "batch_index head q_start k_start k_end band")

TILE_WORDS = 9  # of a QueryTile in shared memory


@cuda.jit(device=True, forceinline=True)
def query_tile(
    BLOCK_M, BLOCK_N, FEATURES, tile, tiles, score, heads_q, seqlen_q, seqlen_k, heads_at_a_time
):
    tiles_q = uint32(cdiv(uint32(seqlen_q), BLOCK_M))
    heads_total = uint32(div(tiles, tiles_q))
    head, tile = head_tile(tile, tiles_q, heads_total, uint32(heads_at_a_time))
    batch_index = int32(div(head, uint32(heads_q)))
    head = int32(rem(head, uint32(heads_q)))
    q_start = int32((tiles_q - 1 - tile) * BLOCK_M)
    band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
    k_start = int32(div(first_key(FEATURES, band, q_start), BLOCK_N) * BLOCK_N)
    k_end = last_key(FEATURES, band, int32(q_start + BLOCK_M))
    return QueryTile(batch_index, head, q_start, k_start, k_end, band)


@cuda.jit(device=True, forceinline=True)
def put_tile(words, start, slot, t):
    at = start + slot * TILE_WORDS
    words[at], words[at + 1], words[at + 2] = t.batch_index, t.head, t.q_start
    words[at + 3], words[at + 4] = t.k_start, t.k_end
    words[at + 5], words[at + 6] = t.band.lo, t.band.hi
    words[at + 7], words[at + 8] = t.band.q_length, t.band.kv_length


@cuda.jit(device=True, forceinline=True)
def get_tile(words, start, slot):
    at = start + slot * TILE_WORDS
    band = KeyRange(words[at + 5], words[at + 6], words[at + 7], words[at + 8])
    return QueryTile(words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4], band)


# s becomes p; rescale is what the sums so far have to be multiplied by.
# All to base 2, as in attention_flash_mma_fwd: row_max is that of the scores times log2(e).
def running_softmax(N):
    @cuda.jit(device=True, forceinline=True)
    def function(s, row_max, row_sum, rescale, to_log2):
        for half in range(2):
            tile_max = float32(-INF)
            for n in range(N // 4):
                i = 4 * n + 2 * half
                pair_max = max(s[i], s[i + 1])
                tile_max = max(tile_max, pair_max)
            new_max = max(row_max[half], warp_max(tile_max, 4) * to_log2)
            subtrahend = finite_or_zero(new_max)
            rescale[half] = ex2_approx(row_max[half] - subtrahend)
            row_max[half] = new_max
            total = float32(0)
            for n in range(N // 4):
                i = 4 * n + 2 * half
                s[i] = ex2_approx(s[i] * to_log2 - subtrahend)
                s[i + 1] = ex2_approx(s[i + 1] * to_log2 - subtrahend)
                total += s[i] + s[i + 1]
            row_sum[half] = row_sum[half] * rescale[half] + total

    return function


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
    TURN = 128 * CONSUMERS  # threads at the barrier of a turn
    BARRIERS = 2 * Q_STAGES + 4 * STAGES
    # Words of shared memory before those that say what a query tile is.
    TILES_AT = (Q_STAGES * Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 8 * BARRIERS) // 4
    ACC, SCORES, P = (PARTS, DIMS // 2), BLOCK_N // 2, BLOCK_N // 4

    give_registers = setmaxnreg_dec(32 if CONSUMERS == 3 else 24)
    take_registers = setmaxnreg_inc(160 if CONSUMERS == 3 else 240)
    load_q, load_k = load_tile(BLOCK_M, HEAD_DIM), load_tile(BLOCK_N, HEAD_DIM)
    load_v = load_tile(BLOCK_N, HEAD_DIM_V)
    multiply_qk = start_nt(T, HEAD_DIM, BLOCK_M, BLOCK_N)
    multiply_pv = start_rn(T, BLOCK_N, DIMS, PARTS)
    wait_for_scores, wait_for_all = wgmma_wait_group(1), wgmma_wait_group(0)
    fence_s, fence_acc = register_fence(SCORES), register_fence(PARTS * (DIMS // 2))
    hide_scores, softmax = hide(FEATURES, SCORES), running_softmax(SCORES)
    clear_v = clear_rows(BLOCK_N, HEAD_DIM_V, TURN)
    round_scores, store_part = round_fragments(T, P), store_rows(T, DIMS // 2)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def kernel(
        q_map,  # boxes of BLOCK_M rows
        k_map,  # of BLOCK_N rows
        v_map,  # the same
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        counter,  # of query tiles that blocks have taken, zeroed, or null
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
        shared = cuda.shared.array(0, int32, 1024)
        q_smem = shared_address(shared, 0)
        k_smem = uint32(q_smem + Q_STAGES * Q_BYTES)
        v_smem = uint32(k_smem + STAGES * K_BYTES)
        q_full = uint32(v_smem + STAGES * V_BYTES)
        q_empty = uint32(q_full + 8 * Q_STAGES)
        k_full = uint32(q_empty + 8 * Q_STAGES)
        k_empty = uint32(k_full + 8 * STAGES)
        v_full = uint32(k_empty + 8 * STAGES)
        v_empty = uint32(v_full + 8 * STAGES)
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(Q_STAGES):
                mbarrier_init(uint32(q_full + 8 * stage), 1)
                mbarrier_init(uint32(q_empty + 8 * stage), 4 * CONSUMERS)  # one arrival a warp
            for stage in range(STAGES):
                mbarrier_init(uint32(k_full + 8 * stage), 1)
                mbarrier_init(uint32(v_full + 8 * stage), 1)
                mbarrier_init(uint32(k_empty + 8 * stage), 4 * CONSUMERS)
                mbarrier_init(uint32(v_empty + 8 * stage), 4 * CONSUMERS)
            fence_mbarrier_init()
        cuda.syncthreads()

        # 1. Which rows are ours
        tiles = uint32(batch * heads_q * cdiv(seqlen_q, BLOCK_M))
        blocks = uint32(cuda.gridDim.x)
        tile = uint32(cuda.blockIdx.x)
        # K tiles and Q tiles so far: they tell stage and phase.
        loaded, tiles_loaded = uint32(0), uint32(0)

        # A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them, or 32 x 128 +
        # 160 x 384.
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

            following = tile
            while following < tiles:
                tile = following
                taken = uint32(atom_inc(counter)) if FEATURES & RANGE else tile
                following = uint32(blocks + taken)  # before it is needed
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
                    # 4a (producer). Load the K tile, and the V tile before it
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
        other = int32(0)
        while other < consumer:
            bar_arrive(1 + other, TURN)
            other = int32(other + 1)

        # What step 5 does with a tile, and zeros for the next one.
        def store(t, row_max, row_sum):
            for half in range(2):
                total = warp_sum(row_sum[half], 4)
                # A row that sees no key gives 0.
                inverse[half] = float32(0) if total == 0 else rcp_approx(total)
                row = int32(t.q_start + first_row + 8 * half)
                if row < seqlen_q and first_col == 0:
                    at = (t.batch_index * heads_q + t.head) * seqlen_q + row
                    lse[at] = (row_max[half] + lg2_approx(total)) * float32(LN2)
            row = int32(t.q_start + warp_row)
            rows = advance(out, offset_of(out_strides, t.batch_index, t.head, row))
            left = int32(seqlen_q - row)
            store_part(rows, out_strides.row, acc, 0, inverse, left, int32(head_dim_v))
            if PARTS == 2:  # a loop would be too long for the compiler to unroll
                rest = int32(head_dim_v - DIMS)
                store_part(advance(rows, DIMS), out_strides.row, acc, 1, inverse, left, rest)
            for part in range(PARTS):
                for i in range(DIMS // 2):
                    acc[part, i] = 0

        # The K tile may be loaded over, after the last one of a query tile Q too.
        def scores_are_there(t, k_start, loaded, tiles_loaded):
            fence_s(s, 0)
            if lane_id == 0:
                mbarrier_arrive(uint32(k_empty + 8 * rem(loaded, STAGES)))
                if k_start + BLOCK_N >= t.k_end:
                    mbarrier_arrive(uint32(q_empty + 8 * rem(tiles_loaded, Q_STAGES)))
            if SCALED:
                for i in range(SCORES):
                    s[i] = capped_score(FEATURES, score, s[i])
            q_end, k_end = int32(t.q_start + BLOCK_M), int32(k_start + BLOCK_N)
            if not tile_is_unmasked(FEATURES, t.band, t.q_start, q_end, k_start, k_end):
                hide_scores(
                    s, score, t.band, int32(t.q_start + first_row), int32(k_start + first_col)
                )

        # Rows of V past a length may hold anything, and 0 times NaN is NaN. They are in the last
        # key tile of a query tile; every consumer has to come, so nobody's turn may be open.
        def clear_past_length(t, stage):
            rows = int32(t.band.kv_length - div(t.k_end - 1, BLOCK_N) * BLOCK_N)
            if FEATURES & KV_LENGTHS and rows < BLOCK_N:
                v_tile = uint32(v_smem + stage * V_BYTES)
                clear_v(v_tile, rows, int32(thread - 128), 1 + CONSUMERS)

        def start_rows():
            for half in range(2):
                row_max[half] = -INF
                row_sum[half] = 0

        # The first key tile, without a p v to run beside.
        def begin(t, k_start, loaded, tiles_loaded):
            start_rows()
            stage = uint32(rem(loaded, STAGES))
            mbarrier_wait(uint32(k_full + 8 * stage), div(loaded, STAGES) & 1)
            multiply_qk(
                s, uint32(q_rows + rem(tiles_loaded, Q_STAGES) * Q_BYTES),
                uint32(k_smem + stage * K_BYTES),
            )  # fmt: skip
            wait_for_all()
            cuda.syncwarp()  # all lanes have read t; in a step they have their turn in between
            scores_are_there(t, k_start, loaded, tiles_loaded)
            softmax(s, row_max, row_sum, rescale, to_log2)
            round_scores(p, s)

        # The last p v, without scores to run beside.
        def finish(before, loaded):
            stage = uint32(rem(loaded, STAGES))
            mbarrier_wait(uint32(v_full + 8 * stage), div(loaded, STAGES) & 1)
            clear_past_length(before, stage)
            multiply_pv(acc, p, 0, uint32(v_smem + stage * V_BYTES))
            wait_for_all()
            fence_acc(acc, 0)
            if lane_id == 0:
                mbarrier_arrive(uint32(v_empty + 8 * stage))
            store(before, row_max, row_sum)

        # 3 (consumers). Start the running softmax
        for part in range(PARTS):
            for i in range(DIMS // 2):
                acc[part, i] = 0
        mbarrier_wait(q_full, 0)
        t = get_tile(shared, TILES_AT, 0)
        before = t
        k_start = t.k_start

        # 4 (consumers). Walk over the key/value tiles: of all our query tiles, without a break
        # A step begins a key tile and ends the one before, which for the first key tile of a query
        # tile is the last one of the query tile before. `new_tile` is known where this is compiled:
        # twice.
        def step(new_tile, t, before, k_start, loaded, tiles_loaded):
            v_stage, v_phase = uint32(rem(loaded, STAGES)), div(loaded, STAGES) & 1
            loaded = uint32(loaded + 1)
            stage = uint32(rem(loaded, STAGES))

            # 4b (consumers). s = q k^T, masked; meanwhile acc += p v of the key tile before
            mbarrier_wait(uint32(k_full + 8 * stage), div(loaded, STAGES) & 1)
            if FEATURES & KV_LENGTHS and new_tile:
                mbarrier_wait(uint32(v_full + 8 * v_stage), v_phase)
                clear_past_length(before, v_stage)
            bar_sync(1 + consumer, TURN)  # our turn
            multiply_qk(
                s, uint32(q_rows + rem(tiles_loaded, Q_STAGES) * Q_BYTES),
                uint32(k_smem + stage * K_BYTES),
            )  # fmt: skip
            mbarrier_wait(uint32(v_full + 8 * v_stage), v_phase)
            multiply_pv(acc, p, 0, uint32(v_smem + v_stage * V_BYTES))
            for i in range(1, CONSUMERS):
                bar_arrive(1 + rem(consumer + i, CONSUMERS), TURN)
            wait_for_scores()
            scores_are_there(t, k_start, loaded, tiles_loaded)

            # 4c (consumers). Rescale what we have to the new maximum
            for half in range(2):
                done_max[half], done_sum[half] = row_max[half], row_sum[half]
            if new_tile:
                start_rows()
            softmax(s, row_max, row_sum, rescale, to_log2)

            # 4d (consumers). acc += p v: it is there
            # Only now p may be written over, and V loaded over.
            wait_for_all()
            fence_acc(acc, 0)
            if lane_id == 0:
                mbarrier_arrive(uint32(v_empty + 8 * v_stage))
            if new_tile:
                store(before, done_max, done_sum)
            else:
                for part in range(PARTS):
                    for i in range(DIMS // 2):
                        acc[part, i] *= rescale[i >> 1 & 1]
            round_scores(p, s)

        some_key = k_start < t.k_end
        if some_key:
            begin(t, k_start, loaded, tiles_loaded)
        while some_key:
            k_start = int32(k_start + BLOCK_N)
            while k_start < t.k_end:
                step(False, t, before, k_start, loaded, tiles_loaded)
                loaded = uint32(loaded + 1)
                k_start = int32(k_start + BLOCK_N)
            before = t
            if not SEAMLESS:
                finish(before, loaded)
                loaded = uint32(loaded + 1)
            tiles_loaded = uint32(tiles_loaded + 1)
            slot = uint32(rem(tiles_loaded, Q_STAGES))
            mbarrier_wait(uint32(q_full + 8 * slot), div(tiles_loaded, Q_STAGES) & 1)
            t = get_tile(shared, TILES_AT, slot)
            k_start = t.k_start
            if k_start >= t.k_end:
                break
            if SEAMLESS:
                step(True, t, before, k_start, loaded, tiles_loaded)
                loaded = uint32(loaded + 1)
            else:
                begin(t, k_start, loaded, tiles_loaded)

        # 5 (consumers). Normalise and store
        if SEAMLESS and some_key:
            finish(before, loaded)
        # What the producer has passed over: query tiles that see no key.
        if FEATURES & RANGE:
            start_rows()
            while tile < tiles:
                t = query_tile(
                    BLOCK_M, BLOCK_N, FEATURES,
                    tile, tiles, score, heads_q, seqlen_q, seqlen_k, heads_at_a_time,
                )  # fmt: skip
                if t.k_start >= t.k_end:
                    store(t, row_max, row_sum)
                tile = uint32(tile + blocks)

    return kernel
