// attention_flash_wgmma_bwd_wide: Hopper's backward for head_dims to 256, shared by two warpgroups.
//
//   p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q
//
// As attention_flash_wgmma_bwd, but dk and dv of 64 keys take the registers of two warpgroups. Each
// has half of their columns, and needs all of p^T and ds^T. Those are formed once: the first
// warpgroup forms the scores and p, the second one dout v^T and ds, and both hand on what they have
// through shared memory, p as it lies in registers and ds as a tile. The first one is half a step
// ahead, so that one has products under way while the other computes. dv is formed as soon as p is
// there; then dout is done with, and one slot of it will do. dq leaves in two parts of 64 columns a
// warpgroup, each of which has an adder and counters of its own.
//
// Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it: a
//                warpgroup of which one thread produces and two add, and two that have half of the
//                columns of dk, dv and dq each
// Shared memory: the K and V tiles, rings of q with the rows' statistics and of dout, two ds tiles,
//                p, ones, and half of dq of one query tile
// Registers:     half of dk and dv, and by turns one product of 64 x 64, parts of dq, p in 16 bits
// Twin:          numba_kernels/attention_flash_wgmma_bwd_wide.py
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
__global__ void __launch_bounds__(THREADS, 1) attention_flash_wgmma_bwd_wide(
    const __grid_constant__ TensorMap q_map,     // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap k_map,     // of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,     // the same
    const __grid_constant__ TensorMap dout_map,  // as q_map
    const acc_t<T>* stats,                       // (batch, heads_q, query tiles, BLOCK_M * 8)
    acc_t<T>* dq_acc,                            // (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
    int* turns,                                  // 1 + (2, batch, heads_q, query tiles), zeroed
    T* dk,                                       // (batch, heads_kv, seqlen_k, head_dim)
    T* dv,                                       // (batch, heads_kv, seqlen_k, head_dim_v)
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
  constexpr int COLS = HEAD_DIM / 2, PARTS = COLS / 64;  // of a warpgroup: columns, parts of dq
  constexpr int KEY_BYTES = BLOCK_N * HEAD_DIM * 2, QUERY_BYTES = BLOCK_M * HEAD_DIM * 2;
  constexpr int P_BYTES = BLOCK_N * BLOCK_M * 2, STATS_BYTES = BLOCK_M * 32;
  constexpr int DQ = BLOCK_M * HEAD_DIM, PART_BYTES = BLOCK_M * 64 * 4;
  constexpr int P_IS_THERE = 1, DS_IS_THERE = 2, DS_IS_OURS = 3;  // barriers
  extern __shared__ __align__(1024) char shared[];
  uint32 k_smem = shared_address(shared), v_smem = k_smem + KEY_BYTES;
  uint32 q_smem = v_smem + KEY_BYTES, dout_smem = q_smem + Q_STAGES * QUERY_BYTES;
  uint32 ds_smem = dout_smem + DOUT_STAGES * QUERY_BYTES, p_smem = ds_smem + 2 * P_BYTES;
  uint32 stats_smem = p_smem + P_BYTES, ones_smem = stats_smem + Q_STAGES * STATS_BYTES;
  // Memcheck wants something behind operands (scripts/sanitize.py).
  uint32 dq_smem = ones_smem + ONES_BYTES;
  uint32 k_full = dq_smem + 2 * PART_BYTES, v_full = k_full + 8;
  uint32 q_full = v_full + 8, q_empty = q_full + 8 * Q_STAGES;
  uint32 dout_full = q_empty + 8 * Q_STAGES, dout_empty = dout_full + 8 * DOUT_STAGES;
  uint32 dq_full = dout_empty + 8 * DOUT_STAGES, dq_empty = dq_full + 8 * 2;
  char* smem = shared - k_smem;
  int* ticket_smem = reinterpret_cast<int*>(smem + dq_empty + 8 * 2);
  if (threadIdx.x < 16) store_ones(smem + ones_smem, threadIdx.x);
  if (threadIdx.x == 0) {
    init_barriers(k_full, 2, 1);          // and v_full
    init_barriers(q_full, Q_STAGES, 2);   // for q and for the statistics
    init_barriers(q_empty, Q_STAGES, 8);  // of each warp, as those that follow
    init_barriers(dout_full, DOUT_STAGES, 1);
    init_barriers(dout_empty, DOUT_STAGES, 8);
    init_barriers(dq_full, 2, 4);
    init_barriers(dq_empty, 2, 1);
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
  int head_tiles = (batch_index * int(heads_q) + head_kv * heads_each) * tiles_q;
  int q_tile = DETERMINISTIC ? keys.tile_end - 1 : keys.tile_first;
  auto next_query_tile = [&]() {
    if (DETERMINISTIC ? --q_tile < keys.tile_first : ++q_tile == keys.tile_end) {
      q_tile = DETERMINISTIC ? keys.tile_end - 1 : keys.tile_first;
      head_tiles += tiles_q;
    }
  };

  // A multiprocessor has 65536 registers: 24 x 128 + 240 x 256 of them.
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    fence_proxy_async_global();  // the copy engine is to see what ordinary stores wrote
    if (threadIdx.x == 32 || threadIdx.x == 64) {
      // 4f (adder). dq += ds k
      int adder = threadIdx.x / 32 - 1, turn = 0;
      int* counters = turns + 1 + adder * int(batch * heads_q) * tiles_q;
      bool is_first = false;
      for (int part = 0; part < steps * PARTS; ++part) {
        int query_tile = head_tiles + q_tile, panel = adder * PARTS + part % PARTS;
        if (part % PARTS == 0) {
          turn = DETERMINISTIC ? turn_of<BLOCK_M, BLOCK_N, FEATURES>(keys, q_tile) : BEING_STORED;
          is_first = wait_for_turn<DETERMINISTIC>(counters + query_tile, turn);
          fence_proxy_async_global();
        }
        mbarrier_wait(dq_full + 8 * adder, part & 1);
#pragma unroll 1  // for want of registers
        for (int warp = 0; warp < 4; ++warp) {
          acc_t<T>* sum = dq_acc + int64(query_tile) * DQ + (warp * 2 * PARTS + panel) * 1024;
          uint32 from = dq_smem + adder * PART_BYTES + warp * 4096;
          if (is_first) {
            cp_async_bulk_store(sum, from, 4096);
          } else {
            cp_reduce_async_bulk_add(sum, from, 4096);
          }
        }
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        mbarrier_arrive(dq_empty + 8 * adder);
        if (part % PARTS < PARTS - 1) continue;
        if (DETERMINISTIC || is_first) {
          cp_async_bulk_wait_group<0>();
          fence_proxy_async_global();
          st_release(counters + query_tile, turn + 1);
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
      int head = head_tiles / tiles_q - batch_index * int(heads_q), q_start = q_tile * BLOCK_M;
      mbarrier_wait(q_empty + 8 * slot, ~(uint32(step) / Q_STAGES) & 1);
      load_tile<BLOCK_M, HEAD_DIM>(q_smem + slot * QUERY_BYTES, q_map, full, q_start, head,
                                   batch_index);
      mbarrier_arrive_expect_tx(full, STATS_BYTES);
      cp_async_bulk(stats_smem + slot * STATS_BYTES,
                    stats + int64(head_tiles + q_tile) * (BLOCK_M * 8), STATS_BYTES, full);
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
  int first_key_row = k_start + warp * 16 + lane_id / 4, first_col = lane_id % 4 * 2;
  float to_log2 = float(score.scale) * LOG2E;
  char* p_warp = smem + p_smem + warp * (P_BYTES / 4);

  // 3 (consumers). Start dk and dv
  float dk_acc[COLS / 2] = {}, dv_acc[1][COLS / 2] = {};

  // 4 (consumers). Walk over the query tiles
  float s[BLOCK_M / 2], dq[PARTS][32];  // s or dout v^T: keys down, queries across
  uint32 p[BLOCK_M / 4], p_copy[BLOCK_M / 4];
  uint32 step = 0;  // that is being ended; the next one is being begun
  auto free_slot = [&](uint32 empty) {
    if (lane_id == 0) mbarrier_arrive(empty);
  };
  // Where q, or dout, of a step lies in its ring, as soon as it is there.
  auto wait_for_q = [&](uint32 step) {
    mbarrier_wait(q_full + 8 * (step % Q_STAGES), step / Q_STAGES & 1);
    return step % Q_STAGES * QUERY_BYTES;
  };
  auto wait_for_dout = [&](uint32 step) {
    mbarrier_wait(dout_full + 8 * (step % DOUT_STAGES), step / DOUT_STAGES & 1);
    return opaque(step % DOUT_STAGES * QUERY_BYTES);
  };
  auto start_scores = [&](uint32 step) {
    uint32 q_rows = q_smem + wait_for_q(step);
    start_nt_from<T, HEAD_DIM, BLOCK_N, BLOCK_M>(s, opaque(k_smem), q_rows, ones_smem,
                                                 stats_smem + step % Q_STAGES * STATS_BYTES);
  };
  auto start_dp = [&](uint32 step) {
    uint32 dout_rows = dout_smem + wait_for_dout(step);
    wait_for_q(step);  // with which the statistics come
    uint32 deltas = stats_smem + step % Q_STAGES * STATS_BYTES + STATS_BYTES / 2;
    start_nt_from<T, HEAD_DIM, BLOCK_N, BLOCK_M>(s, opaque(v_smem), dout_rows, ones_smem, deltas);
  };
  // 4b (consumers). p = exp(s - lse)
  auto probabilities = [&]() __attribute__((always_inline)) {
    register_fence(s);
    int q_start = q_tile * BLOCK_M, q_end = q_start + BLOCK_M, k_end = k_start + BLOCK_N;
    bool hidden = !tile_is_unmasked<FEATURES>(band, q_start, q_end, k_start, k_end);
    if (hidden) hide_transposed<FEATURES>(s, score, band, q_start + first_col, first_key_row);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 4; ++i) {
      p[i] = cvt_rn_x2<T>(ex2_approx(s[2 * i] * to_log2), ex2_approx(s[2 * i + 1] * to_log2));
    }
    store_registers(p_warp, p);
    bar_arrive(P_IS_THERE, 256);
  };
  // 4c (consumers). dv += p^T dout
  auto start_dv = [&](uint32 step) {
    register_copy(p_copy, p);
    uint32 dout_cols = dout_smem + wait_for_dout(step) + group * (QUERY_BYTES / 2);
    start_rn<T, BLOCK_M, COLS, 1>(dv_acc, p, dout_cols);
  };
  auto dv_is_there = [&](uint32 step) {
    register_fence(dv_acc[0]);
    register_fence(p);
    free_slot(dout_empty + 8 * (step % DOUT_STAGES));
  };
  // 4d (consumers). ds = p * (dout v^T - delta)
  // p is that in 16 bits, as for dv: a copy, since p is being read.
  auto score_gradients = [&](uint32 step) __attribute__((always_inline)) {
    register_fence(s);
    uint32 ds[BLOCK_M / 4];
#pragma unroll
    for (int i = 0; i < BLOCK_M / 4; ++i) {
      ds[i] =
          cvt_rn_x2<T>(cvt_first<T>(p_copy[i]) * s[2 * i], cvt_second<T>(p_copy[i]) * s[2 * i + 1]);
    }
    store_fragments<BLOCK_N>(ds_smem + step % 2 * P_BYTES, warp * 16, ds);
    fence_proxy_async();
    bar_arrive(DS_IS_THERE, 256);
  };
  // 4e (consumers). dk += ds^T q
  auto start_dk = [&]() {
    uint32 q_cols = q_smem + step % Q_STAGES * QUERY_BYTES + group * (QUERY_BYTES / 2);
    start_nn<T, BLOCK_M, COLS>(dk_acc, ds_smem + step % 2 * P_BYTES, q_cols);
  };
  auto dk_is_there = [&]() {
    register_fence(dk_acc);
    free_slot(q_empty + 8 * (step % Q_STAGES));
  };
  // 4f (consumers). dq += ds k
  auto start_dq = [&](int part) __attribute__((always_inline)) {
    uint32 k_cols = opaque(k_smem) + (group * PARTS + part) * (BLOCK_N * 128);
    start_tn<T, BLOCK_N>(dq[part], ds_smem + step % 2 * P_BYTES, k_cols);
  };
  auto add_dq = [&](int part) __attribute__((always_inline)) {
    register_fence(dq[part]);
    mbarrier_wait(dq_empty + 8 * group, ~(step * PARTS + part) & 1);
    store_registers(smem + dq_smem + group * PART_BYTES + warp * 4096, dq[part]);
    fence_proxy_async();
    __syncwarp();
    if (lane_id == 0) mbarrier_arrive(dq_full + 8 * group);
  };
  // All of a step's at once, up to its last part of dq.
  auto gradients = [&]() __attribute__((always_inline)) {
    start_dk();
    start_dq(0);
    start_dq(1);
    wgmma_wait_group<1>();
    dk_is_there();
    add_dq(0);
  };
  if (steps > 0) mbarrier_wait(k_full, 0);
  if (steps > 0 && group == 0) {
    start_scores(0);
    wgmma_wait_group<0>();
    probabilities();
    start_dv(0);
    wgmma_wait_group<0>();
    dv_is_there(0);
    for (; step + 1 < uint32(steps); ++step) {
      next_query_tile();
      start_scores(step + 1);
      bar_sync(DS_IS_THERE, 256);
      start_dk();
      start_dq(0);
      wgmma_wait_group<2>();
      probabilities();
      start_dv(step + 1);
      start_dq(1);
      wgmma_wait_group<2>();
      dk_is_there();
      add_dq(0);
      wgmma_wait_group<1>();
      dv_is_there(step + 1);
      wgmma_wait_group<0>();
      add_dq(1);
    }
    bar_sync(DS_IS_THERE, 256);
  } else if (steps > 0) {
    mbarrier_wait(v_full, 0);
    start_dp(0);
    bar_sync(P_IS_THERE, 256);
    load_registers(p, p_warp);
    start_dv(0);
    wgmma_wait_group<1>();
    score_gradients(0);
    wgmma_wait_group<0>();
    dv_is_there(0);
    for (; step + 1 < uint32(steps); ++step) {
      bar_sync(DS_IS_OURS, 128);
      gradients();
      start_dp(step + 1);
      wgmma_wait_group<1>();
      add_dq(1);
      bar_sync(P_IS_THERE, 256);
      load_registers(p, p_warp);
      start_dv(step + 1);
      wgmma_wait_group<1>();
      score_gradients(step + 1);
      wgmma_wait_group<0>();
      dv_is_there(step + 1);
    }
    bar_sync(DS_IS_OURS, 128);
  }
  if (steps > 0) {  // the last step's, with nothing to begin
    gradients();
    wgmma_wait_group<0>();
    add_dq(1);
  }

  // 5 (consumers). Scale and store
  int key = k_start + warp * 16, rows = int(seqlen_k) - key, col = group * COLS;
  float scale[2] = {float(score.scale), float(score.scale)}, one[2] = {1, 1};
  store_rows(dk + offset_of(dk_strides, batch_index, head_kv, key) + col, dk_strides.row, dk_acc,
             scale, rows, int(head_dim) - col);
  store_rows(dv + offset_of(dv_strides, batch_index, head_kv, key) + col, dv_strides.row, dv_acc[0],
             one, rows, int(head_dim_v) - col);
}
