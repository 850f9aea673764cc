// attention_flash_mma_bwd: one walk gives dq, dk and dv on tensor cores, in fp16 or bf16.
//
//   p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q
//
// The scores are recomputed from q, k and lse. A block keeps a tile of keys and walks over the
// queries that see them. The warps share the scores; then p and ds go through shared memory, and
// the warps share the other three products anew, each so that a warp has as square a part as it
// can. dk and dv stay in registers; dq is a sum over blocks and is added up in dq_acc, in fp32 and
// in the layout of accumulators; attention_dq rounds it and puts its rows in order. With
// DETERMINISTIC a counter of each query tile says whose turn it is to add: the order of the keys.
// Blocks then take their key tiles from a counter as well: whoever waits for a turn waits for a
// block that has started.
//
// Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it
// Shared memory: the K and V tiles, two buffers for q, dout, lse and delta, and the p and ds tiles
// Registers:     dk and dv of the block's keys, 64 each a thread at most, and one or two products
// Twin:          numba_kernels/attention_flash_mma_bwd.py
// Launched by:   workbench/launchers.py, attention_flash_mma
#include "fragments.cuh"
#include "scores.cuh"

template <typename T,
          int BLOCK_M,
          int BLOCK_N,
          int HEAD_DIM,
          int HEAD_DIM_V,
          int FEATURES,
          int DETERMINISTIC,
          int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    attention_flash_mma_bwd(const T* dout,          // (batch, heads_q, seqlen_q, head_dim_v)
                            const T* q,             // (batch, heads_q, seqlen_q, head_dim)
                            const T* k,             // (batch, heads_kv, seqlen_k, head_dim)
                            const T* v,             // (batch, heads_kv, seqlen_k, head_dim_v)
                            const acc_t<T>* lse,    // (batch, heads_q, seqlen_q), contiguous
                            const acc_t<T>* delta,  // the same
                            acc_t<T>* dq_acc,  // (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
                            int* turns,        // 1 + (batch, heads_q, tiles), zeroed, or null
                            T* dk,             // as k
                            T* dv,             // as v
                            Strides dout_strides,
                            Strides q_strides,
                            Strides k_strides,
                            Strides v_strides,
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
  using ShareS = Share<BLOCK_M, BLOCK_N, THREADS / 32>;     // scores
  using ShareK = Share<BLOCK_N, HEAD_DIM, THREADS / 32>;    // dk
  using ShareV = Share<BLOCK_N, HEAD_DIM_V, THREADS / 32>;  // dv
  using ShareQ = Share<BLOCK_M, HEAD_DIM, THREADS / 32>;    // dq
  constexpr int M = ShareS::M, N = ShareS::N;
  constexpr bool SCALED = FEATURES & (BIAS | SOFTCAP);  // before they are added up, not after

  // Shared memory: where each tile begins; then two buffers, with the rows' lse and delta.
  constexpr int V_SMEM = tile_bytes<BLOCK_N, HEAD_DIM>();
  constexpr int P_SMEM = V_SMEM + tile_bytes<BLOCK_N, HEAD_DIM_V>();
  constexpr int DS_SMEM = P_SMEM + tile_bytes<BLOCK_M, BLOCK_N>();
  constexpr int Q_SMEM = DS_SMEM + tile_bytes<BLOCK_M, BLOCK_N>();
  constexpr int DOUT_SMEM = Q_SMEM + tile_bytes<BLOCK_M, HEAD_DIM>();
  constexpr int LSE_SMEM = DOUT_SMEM + tile_bytes<BLOCK_M, HEAD_DIM_V>();
  constexpr int BUFFER = LSE_SMEM + 2 * BLOCK_M * int(sizeof(float)) - Q_SMEM;
  extern __shared__ __align__(128) uint4 shared[];
  char* smem = reinterpret_cast<char*>(shared);
  uint32 k_smem = shared_address(shared);

  // 1. Which key rows are ours
  griddepcontrol_launch_dependents();
  uint32 ticket = blockIdx.x;
  if (DETERMINISTIC) {
    int* ticket_smem = reinterpret_cast<int*>(shared);
    if (threadIdx.x == 0) *ticket_smem = atom_inc(turns);
    __syncthreads();
    ticket = *ticket_smem;
    __syncthreads();  // K is about to be loaded there
  }
  uint32 tiles_k = cdiv(uint32(seqlen_k), uint32(BLOCK_N)), heads_total = uint32(batch * heads_kv);
  HeadTile at = head_tile(ticket, tiles_k, heads_total, uint32(heads_at_a_time));
  int heads_each = uint32(heads_q) / uint32(heads_kv);
  int batch_index = at.head / uint32(heads_kv);
  int head_kv = at.head % uint32(heads_kv);
  int k_tile = at.tile;
  int k_start = k_tile * BLOCK_N;

  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int q_first = first_query<FEATURES>(band, k_start);
  int q_last = last_query<FEATURES>(band, k_start + BLOCK_N);
  int tiles_q = int(cdiv(seqlen_q, int64(BLOCK_M)));
  int tile_first = q_first / BLOCK_M;
  int tile_end = q_first < q_last ? cdiv(q_last, BLOCK_M) : tile_first;
  int steps = heads_each * (tile_end - tile_first);
  int head = head_kv * heads_each;
  int q_tile = tile_end - 1;  // last to first, then on to the next head

  // 2. Load the K and V tiles
  load_tile<BLOCK_N, HEAD_DIM, THREADS>(k_smem,
                                        k + offset_of(k_strides, batch_index, head_kv, k_start),
                                        k_strides.row, band.kv_length - k_start, int(head_dim));
  load_tile<BLOCK_N, HEAD_DIM_V, THREADS>(k_smem + V_SMEM,
                                          v + offset_of(v_strides, batch_index, head_kv, k_start),
                                          v_strides.row, band.kv_length - k_start, int(head_dim_v));
  auto load_queries = [&](int buffer, int head, int q_tile) {
    uint32 from_k = buffer * BUFFER + k_smem;
    int q_start = q_tile * BLOCK_M;
    load_tile<BLOCK_M, HEAD_DIM, THREADS>(from_k + Q_SMEM,
                                          q + offset_of(q_strides, batch_index, head, q_start),
                                          q_strides.row, band.q_length - q_start, int(head_dim));
    load_tile<BLOCK_M, HEAD_DIM_V, THREADS>(
        from_k + DOUT_SMEM, dout + offset_of(dout_strides, batch_index, head, q_start),
        dout_strides.row, band.q_length - q_start, int(head_dim_v));
#pragma unroll
    for (int j = 0; j < 2 * BLOCK_M; j += THREADS) {
      int i = int(threadIdx.x) + j;
      if (i >= 2 * BLOCK_M) break;
      int row = q_start + i % BLOCK_M;
      const float* from = (i < BLOCK_M ? lse : delta) + (batch_index * heads_q + head) * seqlen_q;
      cp_async<4>(from_k + LSE_SMEM + i * 4, from + row, row < band.q_length);
    }
  };
  griddepcontrol_wait();  // for delta
  if (steps > 0) load_queries(0, head, q_tile);

  // 3. Start dk and dv
  float dk_acc[ShareK::M][ShareK::N][4] = {}, dv_acc[ShareV::M][ShareV::N][4] = {};

  // 4. Walk over the query tiles
  int first_row = ShareS::first_row(), first_col = ShareS::first_col();
  float to_log2 = SCALED ? LOG2E : float(score.scale) * LOG2E;
  int turn_taken = 0, turn = 0;
  for (int buffer = 0; steps > 0; --steps, buffer ^= 1) {
    int q_start = q_tile * BLOCK_M;
    uint32 q_smem = k_smem + Q_SMEM + buffer * BUFFER;
    uint32 dout_smem = k_smem + DOUT_SMEM + buffer * BUFFER;

    // 4a. Load q, dout, lse and delta
    cp_async_wait_all();
    __syncthreads();  // they are there, and the other buffer, p and ds are free
    if (DETERMINISTIC && threadIdx.x == 0 && turn_taken > 0) {
      st_release(turns + turn_taken, turn + 1);  // everybody has added to the last dq
    }
    bool same_head = q_tile > tile_first;
    int next_tile = same_head ? q_tile - 1 : tile_end - 1;
    int next_head = same_head ? head : head + 1;
    if (steps > 1) load_queries(buffer ^ 1, next_head, next_tile);

    // 4b. p = exp(s - lse)
    float p[M][N][4] = {}, slope[M][N][4];  // the slope of the cap: 1, in no register, without
    multiply_nt<T, HEAD_DIM, HEAD_DIM, HEAD_DIM, ShareS::BESIDE>(
        p, lane_address<DOWN_FIRST, HEAD_DIM>(q_smem, ShareS::warp_row(), 0),
        lane_address<ACROSS_FIRST, HEAD_DIM>(k_smem, ShareS::warp_col(), 0));
    bool unmasked =
        tile_is_unmasked<FEATURES>(band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N);
    const float* row_lse = reinterpret_cast<float*>(smem + LSE_SMEM + buffer * BUFFER) + first_row;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) {
        float subtrahend = finite_or_zero(row_lse[m * 16 + i % 4 / 2 * 8]) * LOG2E;
        int row = q_start + first_row + m * 16 + i % 4 / 2 * 8;
        int col = k_start + first_col + accumulator_col<ShareS::BESIDE>(i / 4) + i % 2;
        float& x = p[m][i / 4][i % 4];
        if (SCALED) {
          x = capped_score<FEATURES>(score, x);
          slope[m][i / 4][i % 4] = uncapped_gradient<FEATURES>(score, 1.0f, x);
        }
        if (FEATURES & BIAS) {
          bool seen = unmasked || sees<FEATURES>(score, band, batch_index, head, row, col);
          x = seen ? biased_score<FEATURES>(score, x, batch_index, head, row, col) : -INF;
        }
        x = ex2_approx(x * to_log2 - subtrahend);
      }
    }
    if (!(FEATURES & BIAS) && !unmasked) {  // a loop of its own: most tiles go past it
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) {
          int row = q_start + first_row + m * 16 + i % 4 / 2 * 8;
          int col = k_start + first_col + accumulator_col<ShareS::BESIDE>(i / 4) + i % 2;
          if (!sees<FEATURES>(score, band, batch_index, head, row, col)) p[m][i / 4][i % 4] = 0;
        }
      }
    }
    store_accumulators<T, BLOCK_N, ShareS::BESIDE>(smem + P_SMEM + first_row * row_bytes<BLOCK_N>(),
                                                   first_col, p, 1.0f);

    // 4d. ds = p * (dout v^T - delta)
    float ds[M][N][4] = {};  // dp, to begin with
    multiply_nt<T, HEAD_DIM_V, HEAD_DIM_V, HEAD_DIM_V, ShareS::BESIDE>(
        ds, lane_address<DOWN_FIRST, HEAD_DIM_V>(dout_smem, ShareS::warp_row(), 0),
        lane_address<ACROSS_FIRST, HEAD_DIM_V>(k_smem + V_SMEM, ShareS::warp_col(), 0));
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) {
        float& x = ds[m][i / 4][i % 4];
        x = p[m][i / 4][i % 4] * (x - row_lse[BLOCK_M + m * 16 + i % 4 / 2 * 8]);
        if (SCALED) x *= slope[m][i / 4][i % 4];
      }
    }
    store_accumulators<T, BLOCK_N, ShareS::BESIDE>(
        smem + DS_SMEM + first_row * row_bytes<BLOCK_N>(), first_col, ds, 1.0f);
    __syncthreads();  // p and ds are there

    // 4c. dv += p^T dout
    multiply_tn<T, BLOCK_M, BLOCK_N, HEAD_DIM_V, ShareV::BESIDE>(
        dv_acc, lane_address<ACROSS_FIRST, BLOCK_N>(k_smem + P_SMEM, 0, ShareV::warp_row()),
        lane_address<DOWN_FIRST, HEAD_DIM_V>(dout_smem, 0, ShareV::warp_col()));

    // 4e. dk += ds^T q
    multiply_tn<T, BLOCK_M, BLOCK_N, HEAD_DIM, ShareK::BESIDE>(
        dk_acc, lane_address<ACROSS_FIRST, BLOCK_N>(k_smem + DS_SMEM, 0, ShareK::warp_row()),
        lane_address<DOWN_FIRST, HEAD_DIM>(q_smem, 0, ShareK::warp_col()));

    // 4f. dq += ds k
    float dq_part[ShareQ::M][ShareQ::N][4] = {};
    multiply_nn<T, BLOCK_N, BLOCK_N, HEAD_DIM, ShareQ::BESIDE>(
        dq_part, lane_address<DOWN_FIRST, BLOCK_N>(k_smem + DS_SMEM, ShareQ::warp_row(), 0),
        lane_address<DOWN_FIRST, HEAD_DIM>(k_smem, 0, ShareQ::warp_col()));
    int query_tile = (batch_index * int(heads_q) + head) * tiles_q + q_tile;
    if (DETERMINISTIC) {
      turn = k_tile - first_key<FEATURES>(band, q_start) / BLOCK_N;
      turn_taken = 1 + query_tile;
      if (threadIdx.x == 0) {
        while (ld_acquire(turns + turn_taken) != turn) {
        }
      }
      __syncthreads();  // it is our turn to add
    }
    float* sum = dq_acc + int64(query_tile) * (BLOCK_M * HEAD_DIM) + threadIdx.x % 32 * 4;
#pragma unroll
    for (int m = 0; m < ShareQ::M; ++m) {
#pragma unroll
      for (int n = 0; n < ShareQ::N; ++n) {
        int col = ShareQ::warp_col() + accumulator_col<ShareQ::BESIDE>(n);
        int row = ShareQ::warp_row() + m * 16;
        red_add_x4(sum + row * HEAD_DIM + col * 16, dq_part[m][n]);
      }
    }
    q_tile = next_tile;
    head = next_head;
  }
  cp_async_wait_all();
  __syncthreads();  // K and V are free
  if (DETERMINISTIC && threadIdx.x == 0 && turn_taken > 0) {
    st_release(turns + turn_taken, turn + 1);
  }

  // 5. Scale and store
  store_accumulators<T, HEAD_DIM, ShareK::BESIDE>(
      smem + ShareK::first_row() * row_bytes<HEAD_DIM>(), ShareK::first_col(), dk_acc,
      float(score.scale));
  store_accumulators<T, HEAD_DIM_V, ShareV::BESIDE>(
      smem + V_SMEM + ShareV::first_row() * row_bytes<HEAD_DIM_V>(), ShareV::first_col(), dv_acc,
      1.0f);
  __syncthreads();
  store_tile<BLOCK_N, HEAD_DIM, THREADS>(dk + offset_of(dk_strides, batch_index, head_kv, k_start),
                                         smem, dk_strides.row, int(seqlen_k) - k_start,
                                         int(head_dim), threadIdx.x);
  store_tile<BLOCK_N, HEAD_DIM_V, THREADS>(
      dv + offset_of(dv_strides, batch_index, head_kv, k_start), smem + V_SMEM, dv_strides.row,
      int(seqlen_k) - k_start, int(head_dim_v), threadIdx.x);
}
