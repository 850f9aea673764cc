// attention_flash_wgmma_fwd: Hopper's forward, copies and products in the background.
//
//   s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))
//
// As attention_flash_mma_fwd, with two differences. Tiles are copied by the tensor memory
// accelerator, which one thread, the producer, keeps busy: it fills a ring of K and V tiles as fast
// as the consumers empty it. And products are wgmmas, which run in the background: a consumer
// starts the next scores, then the product of p with the last V, and takes its softmax while the
// latter runs. Where there is room for two Q tiles, the next scores may be another query tile's.
// Two or three consumers take turns at the tensor cores. A block stays on its multiprocessor and
// takes query tiles in turn; where they differ in length from a counter, the longest ones first.
//
// Work split:    a warpgroup of producers, of which one thread works, and consumers of 64 query
//                rows each, up to the last key that these see; a block walks over query tiles
// Shared memory: the Q tiles and a ring of STAGES tiles of K and of V, each with a barrier that
//                says it is full and one that says it is empty; 16 rows of output a warp
// Registers:     scores, p and output of 64 rows a consumer, which the producers leave room for
// Twin:          numba_kernels/attention_flash_wgmma_fwd.py
// Launched by:   workbench/launchers.py, attention_flash_wgmma
#include "block_tiles.cuh"
#include "warpgroups.cuh"

template <typename T,
          int BLOCK_M,
          int BLOCK_N,
          int HEAD_DIM,
          int HEAD_DIM_V,
          int FEATURES,
          int Q_STAGES,
          int STAGES,
          int THREADS>
__global__ void __launch_bounds__(THREADS, 1) attention_flash_wgmma_fwd(
    const __grid_constant__ TensorMap q_map,    // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap k_map,    // of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,    // the same
    const __grid_constant__ TensorMap out_map,  // of 16 rows, a warp's
    acc_t<T>* lse,                              // (batch, heads_q, seqlen_q), contiguous
    int* counter,  // of query tiles that blocks have taken, zeroed, or null
    int64 batch,
    int64 heads_q,
    int64 heads_kv,
    int64 seqlen_q,
    int64 seqlen_k,
    int64 head_dim,
    int64 head_dim_v,
    ScoreParams<acc_t<T>> score,
    int64 heads_at_a_time) {
  constexpr int CONSUMERS = THREADS / 128 - 1;
  constexpr int REGISTERS[] = {240, 160, 112};  // of a thread, with 2, 3 or 4 consumers
  constexpr int DIMS = HEAD_DIM_V < 128 ? HEAD_DIM_V : 128;  // of one product with V
  constexpr int PARTS = HEAD_DIM_V / DIMS;
  constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2;
  constexpr int V_BYTES = BLOCK_N * HEAD_DIM_V * 2;
  constexpr bool SCALED = FEATURES & (SOFTCAP | ANY_SCALE);  // before the largest is looked for
  // A query tile's last step is the next one's first, if its Q can be there by then.
  constexpr bool SEAMLESS = Q_STAGES > 1;
  // Of four consumers there is always one that has something to multiply: they take no turns.
  constexpr bool TURNS = CONSUMERS < 4;

  extern __shared__ __align__(1024) char shared[];
  uint32 q_smem = shared_address(shared);
  uint32 k_smem = q_smem + Q_STAGES * Q_BYTES;
  uint32 v_smem = k_smem + STAGES * K_BYTES;
  uint32 out_smem = v_smem + STAGES * V_BYTES;
  uint32 q_full = out_smem + BLOCK_M * DIMS * 2, q_empty = q_full + 8 * Q_STAGES;
  uint32 k_full = q_empty + 8 * Q_STAGES, k_empty = k_full + 8 * STAGES;
  uint32 v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  QueryTile* tile_smem = reinterpret_cast<QueryTile*>(shared + (v_empty + 8 * STAGES - q_smem));
  if (threadIdx.x == 0) {
    init_barriers(q_full, Q_STAGES, 1);
    init_barriers(q_empty, Q_STAGES, 4 * CONSUMERS);  // one arrival a warp
    init_barriers(k_full, STAGES, 1);
    init_barriers(k_empty, STAGES, 4 * CONSUMERS);
    init_barriers(v_full, STAGES, 1);
    init_barriers(v_empty, STAGES, 4 * CONSUMERS);
    fence_mbarrier_init();
  }
  __syncthreads();

  // 1. Which rows are ours
  uint32 tiles = uint32(batch * heads_q * cdiv(seqlen_q, int64(BLOCK_M)));
  uint32 loaded = 0, tiles_loaded = 0;  // K tiles and Q tiles so far: they tell stage and phase

  // A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them, or 32 x 128 + 160 x 384.
  // With 640 threads they are 96 each, shared out as 24 x 128 + 112 x 512.
  if (threadIdx.x < 128) {
    setmaxnreg_dec<CONSUMERS == 3 ? 32 : 24>();
    if (threadIdx.x != 0) return;
    // A V tile is wanted a step after its K tile, and asked for after the next K tile: in the order
    // in which their slots become free.
    uint32 v_loaded = 0;
    int v_row, v_head, v_batch;
    auto load_v = [&]() {
      if (v_loaded == loaded) return;
      uint32 stage = v_loaded % STAGES;
      mbarrier_wait(v_empty + 8 * stage, ~(v_loaded / STAGES) & 1);
      load_tile<BLOCK_N, HEAD_DIM_V>(v_smem + stage * V_BYTES, v_map, v_full + 8 * stage, v_row,
                                     v_head, v_batch);
      ++v_loaded;
    };
    for (uint32 tile = blockIdx.x, taken; tile < tiles; tile = gridDim.x + taken) {
      taken = FEATURES & RANGE ? atom_inc(counter) : tile;  // long before it is needed
      QueryTile t = query_tile<BLOCK_M, BLOCK_N, FEATURES>(tile, tiles, score, heads_q, seqlen_q,
                                                           seqlen_k, heads_at_a_time);
      if (t.k_start >= t.k_end) continue;

      // 2 (producer). Load the Q tile
      // To wait for an empty slot is to wait for the phase before: a fresh barrier has had it.
      if (!SEAMLESS) load_v();
      uint32 slot = tiles_loaded % Q_STAGES;
      mbarrier_wait(q_empty + 8 * slot, ~(tiles_loaded++ / Q_STAGES) & 1);
      tile_smem[slot] = t;  // which spares the consumers the divisions
      load_tile<BLOCK_M, HEAD_DIM>(q_smem + slot * Q_BYTES, q_map, q_full + 8 * slot, t.q_start,
                                   t.head, t.batch_index);

      // 4 (producer). Walk over the key/value tiles
      int head_kv = uint32(t.head) / (uint32(heads_q) / uint32(heads_kv));
      for (int k_start = t.k_start; k_start < t.k_end; k_start += BLOCK_N) {
        // 4a (producer). Load the K and V tiles: V of the key tile before
        uint32 stage = loaded % STAGES;
        mbarrier_wait(k_empty + 8 * stage, ~(loaded / STAGES) & 1);
        load_tile<BLOCK_N, HEAD_DIM>(k_smem + stage * K_BYTES, k_map, k_full + 8 * stage, k_start,
                                     head_kv, t.batch_index);
        load_v();
        v_row = k_start, v_head = head_kv, v_batch = t.batch_index;
        ++loaded;
      }
    }
    load_v();
    uint32 slot = tiles_loaded % Q_STAGES;
    mbarrier_wait(q_empty + 8 * slot, ~(tiles_loaded / Q_STAGES) & 1);
    tile_smem[slot] = {};  // no key: the end
    mbarrier_arrive(q_full + 8 * slot);
    return;
  }

  setmaxnreg_inc<REGISTERS[CONSUMERS - 2]>();
  int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // the same for the whole warp
  int lane_id = threadIdx.x % 32, warp_row = consumer * 64 + threadIdx.x % 128 / 32 * 16;
  int first_row = warp_row + lane_id / 4, first_col = lane_id % 4 * 2;
  uint32 out_warp = out_smem + warp_row * (DIMS * 2);
  float to_log2 = SCALED ? LOG2E : float(score.scale) * LOG2E;
  // Barrier 1 + c is the turn of consumer c: all others arrive there, and it comes last.
  for (int other = 0; TURNS && other < CONSUMERS - 1; ++other) {
    if (other < consumer) bar_arrive(1 + other, 128 * CONSUMERS);
  }

  // What step 5 does with a tile, and zeros for the next one.
  auto store = [&](const QueryTile& t, float (&acc)[PARTS][DIMS / 2], const float (&row_max)[2],
                   const float (&row_sum)[2]) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = warp_sum<4>(row_sum[half]);
      inverse[half] = sum == 0 ? 0.0f : rcp_approx(sum);  // a row that sees no key gives 0
      int row = t.q_start + first_row + 8 * half;
      if (row < seqlen_q && first_col == 0) {
        lse[(t.batch_index * heads_q + t.head) * seqlen_q + row] =
            (row_max[half] * to_log2 + lg2_approx(sum)) * LN2;
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      send_rows<T>(out_map, out_warp, acc[part], inverse, part * DIMS, t.q_start + warp_row, t.head,
                   t.batch_index);
#pragma unroll
      for (int i = 0; i < DIMS / 2; ++i) acc[part][i] = 0;
    }
  };

  // 3 (consumers). Start the running softmax
  float row_max[2], row_sum[2], rescale[2], acc[PARTS][DIMS / 2] = {};
  float s[BLOCK_N / 2];
  uint32 p[BLOCK_N / 4];  // of the key tile before, until it is multiplied by its V
  bool p_is_left = false;
  mbarrier_wait(q_full, 0);
  QueryTile t = tile_smem[0], before = t;
  int k_start = t.k_start;
  auto take_turn = [&]() {
    if (TURNS) {
      bar_sync(1 + consumer, 128 * CONSUMERS);
    } else {
      __syncwarp();  // as turns do: all lanes have seen what they waited for
    }
  };
  auto pass_turn = [&]() {
    for (int i = 1; TURNS && i < CONSUMERS; ++i) {
      bar_arrive(1 + (consumer + i) % CONSUMERS, 128 * CONSUMERS);
    }
  };
  auto free_slot = [&](uint32 empty, uint32 slot) {
    if (lane_id == 0) mbarrier_arrive(empty + 8 * slot);
  };
  auto start_scores = [&](uint32 stage) {
    start_nt<T, HEAD_DIM, BLOCK_M, BLOCK_N>(
        s, q_smem + tiles_loaded % Q_STAGES * Q_BYTES + consumer * (64 * 128),
        k_smem + stage * K_BYTES);
  };
  auto start_output = [&](uint32 stage) {
    start_rn<T, BLOCK_N, DIMS, PARTS>(acc, p, v_smem + stage * V_BYTES);
  };
  auto start_rows = [&]() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[half] = -INF, row_sum[half] = 0;
  };
  auto unmasked = [&]() {
    int q_first = t.q_start + consumer * 64, q_last = min(q_first + 64, int(seqlen_q));
    return tile_is_unmasked<FEATURES>(t.band, q_first, q_last, k_start, k_start + BLOCK_N);
  };
  auto scores_are_there = [&](uint32 stage, bool masked) __attribute__((always_inline)) {
    register_fence(s);
    free_slot(k_empty, stage);
    if (SCALED) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = capped_score<FEATURES>(score, s[i]);
    }
    if (masked) hide<FEATURES>(s, t.band, t.q_start + first_row, k_start + first_col);
  };
  auto output_is_there = [&](uint32 stage) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) register_fence(acc[part]);
    free_slot(v_empty, stage);
  };
  // Rows of V past a length may hold anything, and 0 times NaN is NaN. They are in the last key
  // tile of a query tile; every consumer has to come, so nobody's turn may be open.
  auto clear_past_length = [&](uint32 stage) {
    int rows = before.band.kv_length - (before.k_end - 1) / BLOCK_N * BLOCK_N;
    if (FEATURES & KV_LENGTHS && rows < BLOCK_N) {
      clear_rows<BLOCK_N, HEAD_DIM_V, 128 * CONSUMERS>(v_smem + stage * V_BYTES, rows,
                                                       threadIdx.x - 128, 1 + CONSUMERS);
    }
  };

  // 4 (consumers). Walk over the key/value tiles: of one query tile of ours after the other
  // A step begins a key tile and ends the one before, which for the first key tile of a query tile
  // is the last one of the query tile before. Compiled once for each way in which it is called.
  auto step = [&](bool new_tile, bool masked) __attribute__((always_inline)) {
    uint32 v_stage = loaded % STAGES, v_phase = loaded / STAGES & 1;
    ++loaded;
    uint32 stage = loaded % STAGES;

    // 4b (consumers). s = q k^T, masked; meanwhile acc += p v of the key tile before
    mbarrier_wait(k_full + 8 * stage, loaded / STAGES & 1);
    if (FEATURES & KV_LENGTHS && new_tile) {
      mbarrier_wait(v_full + 8 * v_stage, v_phase);
      clear_past_length(v_stage);
    }
    take_turn();
    start_scores(stage);
    mbarrier_wait(v_full + 8 * v_stage, v_phase);
    start_output(v_stage);
    pass_turn();
    wgmma_wait_group<1>();
    scores_are_there(stage, masked);

    // 4c (consumers). Rescale what we have to the new maximum
    float done_max[2] = {row_max[0], row_max[1]}, done_sum[2] = {row_sum[0], row_sum[1]};
    if (new_tile) start_rows();
    running_softmax(s, row_max, row_sum, rescale, to_log2, masked);

    // 4d (consumers). acc += p v: it is there
    // Only now p may be written over, and V loaded over.
    wgmma_wait_group<0>();
    output_is_there(v_stage);
    if (new_tile) {
      store(before, acc, done_max, done_sum);
    } else {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < DIMS / 2; ++i) acc[part][i] *= rescale[i / 2 % 2];
      }
    }
    round_fragments<T>(p, s);
  };
  // A step without a key tile before it, and one without a key tile after it.
  auto begin = [&]() {
    uint32 stage = loaded % STAGES;
    mbarrier_wait(k_full + 8 * stage, loaded / STAGES & 1);
    take_turn();
    start_scores(stage);
    pass_turn();
    wgmma_wait_group<0>();
    scores_are_there(stage, !unmasked());
    start_rows();
    running_softmax(s, row_max, row_sum, rescale, to_log2, true);
    round_fragments<T>(p, s);
    p_is_left = true;
  };
  auto finish = [&]() {
    uint32 stage = loaded % STAGES;
    mbarrier_wait(v_full + 8 * stage, loaded / STAGES & 1);
    clear_past_length(stage);
    start_output(stage);
    wgmma_wait_group<0>();
    output_is_there(stage);
    store(before, acc, row_max, row_sum);
    ++loaded;
    p_is_left = false;
  };
  // A key tile that only other consumers' rows see.
  auto pass_over = [&]() {
    uint32 stage = loaded % STAGES, phase = loaded / STAGES & 1;
    mbarrier_wait(k_full + 8 * stage, phase);
    take_turn();
    pass_turn();
    free_slot(k_empty, stage);
    mbarrier_wait(v_full + 8 * stage, phase);
    __syncwarp();  // all lanes have seen it full
    free_slot(v_empty, stage);
    ++loaded;
  };
  while (k_start < t.k_end) {
    if (p_is_left) {
      step(true, !unmasked());
    } else {
      begin();
    }
    // With lengths everybody stays to the last key tile, which everybody has to clear.
    int k_end = FEATURES & KV_LENGTHS ? t.k_end : own_end<FEATURES>(t, t.q_start + consumer * 64);
    for (k_start += BLOCK_N; k_start < k_end; k_start += BLOCK_N) {
      if (unmasked()) {
        step(false, false);
      } else {
        step(false, true);
      }
    }
    before = t;
    __syncwarp();  // all lanes are done with it: the next Q comes during the last product
    free_slot(q_empty, tiles_loaded % Q_STAGES);
    if (!SEAMLESS || k_start < t.k_end) finish();
    for (; k_start < t.k_end; k_start += BLOCK_N) pass_over();
    ++tiles_loaded;
    mbarrier_wait(q_full + 8 * (tiles_loaded % Q_STAGES), tiles_loaded / Q_STAGES & 1);
    t = tile_smem[tiles_loaded % Q_STAGES];
    k_start = t.k_start;
  }

  // 5 (consumers). Normalise and store
  if (p_is_left) finish();
  // What the producer has passed over: query tiles that see no key.
  for (uint32 tile = blockIdx.x; FEATURES & RANGE && tile < tiles; tile += gridDim.x) {
    t = query_tile<BLOCK_M, BLOCK_N, FEATURES>(tile, tiles, score, heads_q, seqlen_q, seqlen_k,
                                               heads_at_a_time);
    start_rows();
    if (t.k_start >= t.k_end) store(t, acc, row_max, row_sum);
  }
  if (lane_id == 0) cp_async_bulk_wait_group_read<0>();  // shared memory ends with the block
}
