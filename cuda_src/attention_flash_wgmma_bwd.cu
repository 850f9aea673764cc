// attention_flash_wgmma_bwd: Hopper's backward, copies, products and sums in the background.
//
//   p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q
//
// As attention_flash_mma_bwd, a block keeps a tile of keys and walks over the queries that see
// them. The products are wgmmas of transposed scores, keys down and queries across: p^T and ds^T
// then lie in registers as the next products want them, and only ds goes through shared memory, for
// dq. The sums for p and ds start from -lse / scale and from -delta, which attention_row_stats has
// made operands of. A producer's copies keep rings of q and dout filled. dv is started as soon as p
// is there: ds is then made, stored and waited for while the tensor cores have work. The next
// scores are started before this step's dq and dk are there. Between steps nothing is under way, or
// the compiler would wait after every product. dq is added up in dq_acc, in fp32 and in the layout
// of accumulators, by the copy engine: the consumers put it into shared memory and go on, and
// another thread, the adder, sees to the rest. attention_dq rounds it. A counter of each query tile
// says who is the first one there, who stores instead of adding, so that no zeros have to be
// written and read; and with DETERMINISTIC whose turn it is to add: the order of the keys. Blocks
// then take their key tiles from a counter as well: whoever waits for a turn waits for a block that
// has started.
//
// Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it: a
//                warpgroup of which one thread produces and one adds, and two of 64 keys each; of
//                dq each has 64 rows, or with BLOCK_M = 64 half of the columns
// Shared memory: the K and V tiles, rings of q with the rows' statistics and of dout, two ds tiles,
//                ones to multiply the statistics by, and dq of one query tile
// Registers:     dk and dv of 64 keys a warpgroup, two products, and p and ds in 16 bits
// Twin:          numba_kernels/attention_flash_wgmma_bwd.py
// Launched by:   workbench/launchers.py, attention_flash_wgmma
#include "block_tiles.cuh"
#include "warpgroups.cuh"

template <typename T,
          int BLOCK_M,
          int BLOCK_N,
          int HEAD_DIM,
          int FEATURES,
          int DETERMINISTIC,
          int Q_STAGES,
          int DOUT_STAGES,
          int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    attention_flash_wgmma_bwd(const __grid_constant__ TensorMap q_map,     // boxes of BLOCK_M rows
                              const __grid_constant__ TensorMap k_map,     // of BLOCK_N rows
                              const __grid_constant__ TensorMap v_map,     // the same
                              const __grid_constant__ TensorMap dout_map,  // as q_map
                              const acc_t<T>* stats,  // (batch, heads_q, query tiles, BLOCK_M * 8)
                              acc_t<T>* dq_acc,  // (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
                              int* turns,        // 1 + (batch, heads_q, query tiles), zeroed
                              T* dk,             // (batch, heads_kv, seqlen_k, head_dim)
                              T* dv,             // (batch, heads_kv, seqlen_k, head_dim_v)
                              Strides dk_strides,
                              Strides dv_strides,
                              int64 batch,
                              int64 heads_q,
                              int64 heads_kv,
                              int64 seqlen_q,
                              int64 seqlen_k,
                              int64 head_dim,
                              int64 head_dim_v,
                              ScoreParams<acc_t<T>> score,
                              int64 heads_at_a_time) {
  constexpr int WARPS = THREADS / 32 - 4;  // of consumers
  constexpr int KEY_BYTES = BLOCK_N * HEAD_DIM * 2, QUERY_BYTES = BLOCK_M * HEAD_DIM * 2;
  constexpr int DS_BYTES = BLOCK_N * BLOCK_M * 2, STATS_BYTES = BLOCK_M * 32;
  constexpr int DQ = BLOCK_M * HEAD_DIM;  // elements, 1024 of them a warp's
  constexpr int PARTS = BLOCK_M / 64;     // of 64 queries; with two of them HEAD_DIM is 64

  extern __shared__ __align__(1024) char shared[];
  uint32 k_smem = shared_address(shared);
  uint32 v_smem = k_smem + KEY_BYTES;
  uint32 q_smem = v_smem + KEY_BYTES;
  uint32 dout_smem = q_smem + Q_STAGES * QUERY_BYTES;
  uint32 ds_smem = dout_smem + DOUT_STAGES * QUERY_BYTES;
  uint32 stats_smem = ds_smem + 2 * DS_BYTES;
  uint32 ones_smem = stats_smem + Q_STAGES * STATS_BYTES;
  // Memcheck wants something behind operands (scripts/sanitize.py).
  uint32 dq_smem = ones_smem + ONES_BYTES;
  uint32 k_full = dq_smem + DQ * 4, v_full = k_full + 8;
  uint32 q_full = v_full + 8, q_empty = q_full + 8 * Q_STAGES;
  uint32 dout_full = q_empty + 8 * Q_STAGES, dout_empty = dout_full + 8 * DOUT_STAGES;
  uint32 dq_full = dout_empty + 8 * DOUT_STAGES, dq_empty = dq_full + 8;
  char* smem = shared - k_smem;
  int* ticket_smem = reinterpret_cast<int*>(smem + dq_empty + 8);
  if (threadIdx.x < 16) store_ones(smem + ones_smem, threadIdx.x);
  if (threadIdx.x == 0) {
    init_barriers(k_full, 2, 1);         // and v_full
    init_barriers(q_full, Q_STAGES, 2);  // for q and for the statistics
    init_barriers(q_empty, Q_STAGES, WARPS);
    init_barriers(dout_full, DOUT_STAGES, 1);
    init_barriers(dout_empty, DOUT_STAGES, WARPS);
    mbarrier_init(dq_full, WARPS);
    mbarrier_init(dq_empty, 1);
    fence_mbarrier_init();
    griddepcontrol_wait();  // for statistics, and zeros in counters
    if (DETERMINISTIC) *ticket_smem = atom_inc(turns);
  }
  __syncthreads();
  griddepcontrol_launch_dependents();

  // 1. Which key rows are ours
  uint32 ticket = DETERMINISTIC ? *ticket_smem : blockIdx.x;
  KeyTile keys = key_tile<BLOCK_M, BLOCK_N, FEATURES>(ticket, score, batch, heads_kv, seqlen_q,
                                                      seqlen_k, heads_at_a_time);
  KeyRange band = keys.band;
  int batch_index = keys.batch_index, head_kv = keys.head, k_start = keys.k_start;
  int heads_each = uint32(heads_q) / uint32(heads_kv), tiles_q = cdiv(seqlen_q, int64(BLOCK_M));
  int steps = heads_each * (keys.tile_end - keys.tile_first);
  // First to last, or where the later ones are done first, last to first; then the next head.
  int head = head_kv * heads_each;
  int q_tile = DETERMINISTIC ? keys.tile_end - 1 : keys.tile_first;
  auto next_query_tile = [&]() {
    if (DETERMINISTIC ? --q_tile < keys.tile_first : ++q_tile == keys.tile_end) {
      q_tile = DETERMINISTIC ? keys.tile_end - 1 : keys.tile_first;
      ++head;
    }
  };

  // A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them.
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    fence_proxy_async_global();  // the copy engine is to see what ordinary stores wrote
    if (threadIdx.x == 32) {
      // 4f (adder). dq += ds k
      for (int step = 0; step < steps; ++step) {
        int query_tile = (batch_index * int(heads_q) + head) * tiles_q + q_tile;
        int* counter = turns + 1 + query_tile;
        acc_t<T>* sum = dq_acc + int64(query_tile) * DQ;
        int turn = DETERMINISTIC ? turn_of<BLOCK_M, BLOCK_N, FEATURES>(keys, q_tile) : BEING_STORED;
        bool is_first = wait_for_turn<DETERMINISTIC>(counter, turn);
        fence_proxy_async_global();
        mbarrier_wait(dq_full, step & 1);
        if (is_first) {
          cp_async_bulk_store(sum, dq_smem, DQ * 4);
        } else {
          cp_reduce_async_bulk_add(sum, dq_smem, DQ * 4);
        }
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        mbarrier_arrive(dq_empty);
        if (DETERMINISTIC || is_first) {
          cp_async_bulk_wait_group<0>();
          fence_proxy_async_global();
          st_release(counter, turn + 1);
        }
        next_query_tile();
      }
    }
    if (threadIdx.x != 0 || steps == 0) return;

    // 2 (producer). Load the K and V tiles
    load_tile<BLOCK_N, HEAD_DIM>(k_smem, k_map, k_full, k_start, head_kv, batch_index);

    // 4 (producer). Walk over the query tiles
    for (int step = 0; step < steps; ++step) {
      // 4a (producer). Load q, dout, lse and delta
      // To wait for an empty slot is to wait for the phase before: a fresh barrier has had it.
      uint32 slot = uint32(step) % Q_STAGES, full = q_full + 8 * slot;
      int query_tile = (batch_index * int(heads_q) + head) * tiles_q + q_tile;
      int q_start = q_tile * BLOCK_M;
      mbarrier_wait(q_empty + 8 * slot, ~(uint32(step) / Q_STAGES) & 1);
      load_tile<BLOCK_M, HEAD_DIM>(q_smem + slot * QUERY_BYTES, q_map, full, q_start, head,
                                   batch_index);
      mbarrier_arrive_expect_tx(full, STATS_BYTES);
      cp_async_bulk(stats_smem + slot * STATS_BYTES, stats + int64(query_tile) * (BLOCK_M * 8),
                    STATS_BYTES, full);
      if (step == 0) {  // the scores come first
        load_tile<BLOCK_N, HEAD_DIM>(v_smem, v_map, v_full, k_start, head_kv, batch_index);
      }
      slot = uint32(step) % DOUT_STAGES;
      mbarrier_wait(dout_empty + 8 * slot, ~(uint32(step) / DOUT_STAGES) & 1);
      load_tile<BLOCK_M, HEAD_DIM>(dout_smem + slot * QUERY_BYTES, dout_map, dout_full + 8 * slot,
                                   q_start, head, batch_index);
      next_query_tile();
    }
    return;
  }

  setmaxnreg_inc<240>();
  int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // the same for the whole warp
  int lane_id = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  int warp_key = group * 64 + warp * 16;
  int first_key_row = k_start + warp_key + lane_id / 4, first_col = lane_id % 4 * 2;
  float to_log2 = float(score.scale) * LOG2E;
  uint32 k_rows = k_smem + group * (64 * 128), v_rows = v_smem + group * (64 * 128);
  // Our part of dq: queries from 64 * group, or where there are 64, the columns from there.
  uint32 ds_part = ds_smem + (BLOCK_M == 128 ? group * (BLOCK_N * 128) : 0);
  uint32 k_part = k_smem + (BLOCK_M == 128 ? 0 : group * (BLOCK_N * 128));
  int part = BLOCK_M == 128 ? group * 4 + warp : warp * 2 + group;
  uint32 dq_warp = dq_smem + part * 4096;

  // 3 (consumers). Start dk and dv
  float dk_acc[1][HEAD_DIM / 2] = {}, dv_acc[1][HEAD_DIM / 2] = {};

  // 4 (consumers). Walk over the query tiles
  float s[BLOCK_M / 2], dp[BLOCK_M / 2], dq_part[32];  // keys down, queries across
  uint32 p[BLOCK_M / 4], p_copy[BLOCK_M / 4], ds[BLOCK_M / 4];
  uint32 step = 0;  // that is being ended; the next one is being begun
  auto free_slot = [&](uint32 empty) {
    if (lane_id == 0) mbarrier_arrive(empty);
  };
  auto start_scores = [&](uint32 step) {
    uint32 slot = step % Q_STAGES;
    mbarrier_wait(q_full + 8 * slot, step / Q_STAGES & 1);
    start_nt_from<T, HEAD_DIM, BLOCK_N, BLOCK_M>(s, k_rows, q_smem + slot * QUERY_BYTES, ones_smem,
                                                 stats_smem + slot * STATS_BYTES);
  };
  auto wait_for_dout = [&](uint32 step) {
    mbarrier_wait(dout_full + 8 * (step % DOUT_STAGES), step / DOUT_STAGES & 1);
  };
  auto start_dp = [&](uint32 step) {
    uint32 dout_rows = dout_smem + step % DOUT_STAGES * QUERY_BYTES;
    uint32 deltas = stats_smem + step % Q_STAGES * STATS_BYTES + STATS_BYTES / 2;
    start_nt_from<T, HEAD_DIM, BLOCK_N, BLOCK_M>(dp, v_rows, dout_rows, ones_smem, deltas);
  };
  // 4b (consumers). p = exp(s - lse)
  auto hide_unseen = [&]() {
    register_fence(s);
    int q_start = q_tile * BLOCK_M, k_first = k_start + group * 64;
    if (tile_is_unmasked<FEATURES>(band, q_start, q_start + BLOCK_M, k_first, k_first + 64)) return;
    hide_transposed<FEATURES>(s, score, band, q_start + first_col, first_key_row);
  };
  // Of one part of the queries.
  auto probabilities = [&](int part) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 16 * part; i < 16 * part + 16; ++i) {
      p[i] = cvt_rn_x2<T>(ex2_approx(s[2 * i] * to_log2), ex2_approx(s[2 * i + 1] * to_log2));
    }
  };
  // 4c (consumers). dv += p^T dout
  // Of the same part. Meanwhile ds is made of p: of the copy, since p is being read.
  auto start_dv = [&](uint32 step, int part) __attribute__((always_inline)) {
    auto& of_part = reinterpret_cast<uint32(&)[16]>(p[16 * part]);
    register_copy(reinterpret_cast<uint32(&)[16]>(p_copy[16 * part]), of_part);
    uint32 rows = dout_smem + step % DOUT_STAGES * QUERY_BYTES + part * (64 * 128);
    start_rn<T, 64, HEAD_DIM, 1>(dv_acc, of_part, rows);
  };
  auto dv_is_there = [&](uint32 step) {
    wgmma_wait_group<0>();
    register_fence(dv_acc[0]);
    register_fence(p);
    free_slot(dout_empty + 8 * (step % DOUT_STAGES));
  };
  // 4d (consumers). ds = p * (dout v^T - delta)
  // p is that in 16 bits, as for dv: there is no room for both.
  auto score_gradients = [&](uint32 step) __attribute__((always_inline)) {
    register_fence(dp);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 4; ++i) {
      ds[i] = cvt_rn_x2<T>(cvt_first<T>(p_copy[i]) * dp[2 * i],
                           cvt_second<T>(p_copy[i]) * dp[2 * i + 1]);
    }
    store_fragments<BLOCK_N>(ds_smem + step % 2 * DS_BYTES, warp_key, ds);
    fence_proxy_async();
    bar_sync(1, 32 * WARPS);  // ds of all keys is there, and the other tile of it is free
  };
  // 4e (consumers). dk += ds^T q
  auto start_dk = [&]() {
    start_rn<T, BLOCK_M, HEAD_DIM, 1>(dk_acc, ds, q_smem + step % Q_STAGES * QUERY_BYTES);
  };
  auto dk_is_there = [&]() {
    register_fence(dk_acc[0]);
    register_fence(ds);
    free_slot(q_empty + 8 * (step % Q_STAGES));
  };
  // 4f (consumers). dq += ds k
  auto start_dq = [&]() { start_tn<T, BLOCK_N>(dq_part, ds_part + step % 2 * DS_BYTES, k_part); };
  auto add_dq = [&]() {
    register_fence(dq_part);
    mbarrier_wait(dq_empty, ~step & 1);
    store_registers(smem + dq_warp, dq_part);
    fence_proxy_async();
    __syncwarp();
    if (lane_id == 0) mbarrier_arrive(dq_full);
  };
  if (steps > 0) {
    mbarrier_wait(k_full, 0);
    start_scores(0);
    mbarrier_wait(v_full, 0);
    wait_for_dout(0);
    start_dp(0);
    wgmma_wait_group<1>();
    hide_unseen();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      probabilities(part);
      start_dv(0, part);
    }
    wgmma_wait_group<PARTS>();
    score_gradients(0);
    dv_is_there(0);
  }
  for (; step + 1 < uint32(steps); ++step) {
    next_query_tile();
    start_dq();
    start_scores(step + 1);
    start_dk();
    wgmma_wait_group<2>();
    add_dq();
    if constexpr (BLOCK_M == 64) {
      wait_for_dout(step + 1);
      start_dp(step + 1);
      wgmma_wait_group<2>();
      hide_unseen();
      probabilities(0);
      start_dv(step + 1, 0);
      wgmma_wait_group<2>();
      dk_is_there();
    } else {  // dp has to wait for the registers that half of the scores and ds leave
      wgmma_wait_group<1>();
      hide_unseen();
      probabilities(0);
      wait_for_dout(step + 1);
      start_dv(step + 1, 0);
      wgmma_wait_group<1>();
      dk_is_there();
      start_dp(step + 1);
      probabilities(1);
      start_dv(step + 1, 1);
    }
    wgmma_wait_group<1>();
    score_gradients(step + 1);
    dv_is_there(step + 1);
  }
  if (steps > 0) {
    start_dq();
    start_dk();
    wgmma_wait_group<1>();
    add_dq();
    wgmma_wait_group<0>();
    dk_is_there();
  }

  // 5 (consumers). Scale and store
  int rows = int(seqlen_k) - (k_start + warp_key);
  float scale[2] = {float(score.scale), float(score.scale)}, one[2] = {1, 1};
  store_rows(dk + offset_of(dk_strides, batch_index, head_kv, k_start + warp_key), dk_strides.row,
             dk_acc[0], scale, rows, int(head_dim));
  store_rows(dv + offset_of(dv_strides, batch_index, head_kv, k_start + warp_key), dv_strides.row,
             dv_acc[0], one, rows, int(head_dim_v));
}
