// Attention on CUDA cores, backward: one walk gives dq, dk and dv, in exact fp32 (or fp64)
//
//   p = exp(score(q k^T) - lse)            dv = p^T dout
//   ds = p * (dout v^T - delta)            dq = scale ds k,   dk = scale ds^T q
//
// Work split       a block owns BLOCK_N key rows of one key head and walks over the query tiles that
//                  see them, of every query head that reads this key head.
// dq               is a sum over blocks. It is added up in fp32 in dq_acc, in the order of the keys
//                  and without atomics: each query tile has a counter that says whose turn it is, and
//                  the last block to add writes dq. Blocks take their key tiles from a counter too,
//                  so who waits, waits for a block that started before: there is always progress.
// Shared memory    k, v, q and dout tiles and one that holds p, then ds. The next dout is loaded
//                  from the moment dp is known, the next q while ds k runs.
// Registers        dk and dv of the thread's keys, 8 x 4 or 8 x 8 each.
// Twin             numba_kernels/attention_flash_simt_bwd.py
// Launched by      attention_flash_simt in workbench/launchers.py
#include "common.cuh"
#include "scores.cuh"
#include "tiles.cuh"

// How the threads of a block share ROWS x COLS results: 2W rows each if that leaves a warp no more
// rows than there are, and as many columns as it takes.
template <typename Acc, int ROWS, int COLS, int THREADS>
struct Share {
  static constexpr int MOST = ROWS / (8 * vec_length<Acc>());
  static constexpr int WARPS = THREADS / 32;
  static constexpr int WARPS_ROWS = MOST < 1 ? 1 : MOST < WARPS ? MOST : WARPS;
  static constexpr int WARPS_COLS = WARPS / WARPS_ROWS;
  static constexpr int R = ROWS / (4 * WARPS_ROWS), C = COLS / (8 * WARPS_COLS);

  static __device__ __forceinline__ int first_row() {
    return threadIdx.x / 32 % WARPS_ROWS * (4 * R) +
           lane_row<4>(threadIdx.x % 32) * group<Acc, R>();
  }
  static __device__ __forceinline__ int first_col() {
    return threadIdx.x / 32 / WARPS_ROWS * (8 * C) +
           lane_col<4>(threadIdx.x % 32) * group<Acc, C>();
  }
};

// VEC: elements that global memory is read by, 16 bytes' worth where addresses, strides and head
// dims allow it, else 1. ASYNC: 1 where cp.async can load the tiles, which does not convert.
template <typename T,
          int BLOCK_M,
          int BLOCK_N,
          int HEAD_DIM,
          int HEAD_DIM_V,
          int FEATURES,
          int VEC,
          int ASYNC,
          int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS < 256 ? 256 / THREADS : 1)
    attention_flash_simt_bwd(const T* dout,          // (batch, heads_q, seqlen_q, head_dim_v)
                             const T* q,             // (batch, heads_q, seqlen_q, head_dim)
                             const T* k,             // (batch, heads_kv, seqlen_k, head_dim)
                             const T* v,             // (batch, heads_kv, seqlen_k, head_dim_v)
                             const acc_t<T>* lse,    // (batch, heads_q, seqlen_q), contiguous
                             const acc_t<T>* delta,  // the same
                             acc_t<T>* dq_acc,  // (batch, heads_q, query tiles, BLOCK_M, HEAD_DIM)
                             int* turns,        // 1 + (batch, heads_q, query tiles), zeroed
                             T* dq,             // as q
                             T* dk,             // as k
                             T* dv,             // as v
                             Strides dout_strides,
                             Strides q_strides,
                             Strides k_strides,
                             Strides v_strides,
                             Strides dq_strides,
                             Strides dk_strides,
                             Strides dv_strides,
                             int64 batch,
                             int64 heads_q,
                             int64 heads_kv,
                             int64 seqlen_q,
                             int64 seqlen_k,
                             int64 head_dim,
                             int64 head_dim_v,
                             ScoreParams<acc_t<T>> score) {
  using Acc = acc_t<T>;
  constexpr int W = vec_length<Acc>();
  using ShareS = Share<Acc, BLOCK_M, BLOCK_N, THREADS>;     // scores
  using ShareK = Share<Acc, BLOCK_N, HEAD_DIM, THREADS>;    // dk
  using ShareV = Share<Acc, BLOCK_N, HEAD_DIM_V, THREADS>;  // dv
  using ShareQ = Share<Acc, BLOCK_M, HEAD_DIM, THREADS>;    // dq
  constexpr int ROWS = ShareS::R, KEYS = ShareS::C;

  extern __shared__ uint4 shared[];
  Acc* k_smem = reinterpret_cast<Acc*>(shared);
  Acc* v_smem = k_smem + tile_size<Acc, BLOCK_N, HEAD_DIM>();
  Acc* q_smem = v_smem + tile_size<Acc, BLOCK_N, HEAD_DIM_V>();
  Acc* dout_smem = q_smem + tile_size<Acc, BLOCK_M, HEAD_DIM>();
  Acc* p_smem = dout_smem + tile_size<Acc, BLOCK_M, HEAD_DIM_V>();
  int* ticket_smem = reinterpret_cast<int*>(p_smem + tile_size<Acc, BLOCK_M, BLOCK_N>());

  // 1. Which key rows are ours
  if (threadIdx.x == 0) *ticket_smem = atom_inc(turns);
  __syncthreads();
  int64 ticket = *ticket_smem;
  int64 heads_total = batch * heads_kv;
  int64 heads_each = heads_q / heads_kv;
  int64 batch_index = ticket % heads_total / heads_kv;
  int64 head_kv = ticket % heads_kv;
  int k_tile = int(ticket / heads_total);
  int k_start = k_tile * BLOCK_N;
  int first_row = ShareS::first_row(), first_col = ShareS::first_col();

  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int q_first = first_query<FEATURES>(band, k_start);
  int q_last = last_query<FEATURES>(band, k_start + BLOCK_N);
  int tiles_q = int(cdiv(seqlen_q, int64(BLOCK_M)));
  int tiles_seen = q_first < q_last ? cdiv(q_last, BLOCK_M) - q_first / BLOCK_M : 0;
  int steps = int(heads_each) * tiles_seen;
  int64 head = head_kv * heads_each;
  int q_tile = q_first / BLOCK_M + tiles_seen - 1;  // last to first, then on to the next head

  dout += batch_index * dout_strides.batch;
  q += batch_index * q_strides.batch;
  k += batch_index * k_strides.batch + head_kv * k_strides.head + k_start * k_strides.row;
  v += batch_index * v_strides.batch + head_kv * v_strides.head + k_start * v_strides.row;
  dq += batch_index * dq_strides.batch;
  dk += batch_index * dk_strides.batch + head_kv * dk_strides.head + k_start * dk_strides.row;
  dv += batch_index * dv_strides.batch + head_kv * dv_strides.head + k_start * dv_strides.row;
  lse += batch_index * heads_q * seqlen_q;
  delta += batch_index * heads_q * seqlen_q;
  dq_acc += batch_index * heads_q * tiles_q * (BLOCK_M * HEAD_DIM);
  turns += 1 + batch_index * heads_q * tiles_q;

  // 2. Load the K and V tiles
  load_tile<T, BLOCK_N, HEAD_DIM, VEC, ASYNC, THREADS>(k_smem, k, k_strides.row,
                                                       band.kv_length - k_start, int(head_dim));
  load_tile<T, BLOCK_N, HEAD_DIM_V, VEC, ASYNC, THREADS>(v_smem, v, v_strides.row,
                                                         band.kv_length - k_start, int(head_dim_v));

  // 3. Start dk and dv
  Acc dk_acc[ShareK::R][ShareK::C] = {}, dv_acc[ShareV::R][ShareV::C] = {};

  // 4. Walk over the query tiles
  const Acc* q_rows = q_smem + tile_offset<Acc, HEAD_DIM>(first_row, 0);
  const Acc* k_rows = k_smem + tile_offset<Acc, HEAD_DIM>(first_col, 0);
  const Acc* dout_rows = dout_smem + tile_offset<Acc, HEAD_DIM_V>(first_row, 0);
  const Acc* v_rows = v_smem + tile_offset<Acc, HEAD_DIM_V>(first_col, 0);
  Acc* p_rows = p_smem + tile_offset<Acc, BLOCK_N>(first_row, first_col);
  int* turn_taken = nullptr;
  int turn = 0;
  for (int step = 0; step < steps; ++step) {
    int q_start = q_tile * BLOCK_M;
    // 4a. Load q, dout, lse and delta
    if (step == 0) {
      load_tile<T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS>(
          q_smem, q + head * q_strides.head + q_start * q_strides.row, q_strides.row,
          band.q_length - q_start, int(head_dim));
      load_tile<T, BLOCK_M, HEAD_DIM_V, VEC, ASYNC, THREADS>(
          dout_smem, dout + head * dout_strides.head + q_start * dout_strides.row, dout_strides.row,
          band.q_length - q_start, int(head_dim_v));
    }
    Acc row_lse[ROWS], row_delta[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int row = q_start + first_row + spread<Acc, ROWS, 4>(r);
      bool exists = row < band.q_length;
      row_lse[r] = exists ? finite_or_zero(lse[head * seqlen_q + row]) : Acc(0);
      row_delta[r] = exists ? delta[head * seqlen_q + row] : Acc(0);
    }
    if (ASYNC) cp_async_wait_all();
    __syncthreads();  // q and dout are there; everybody has added to the last dq
    if (threadIdx.x == 0 && step > 0) st_release(turn_taken, turn + 1);

    // 4b. p = exp(s - lse)
    Acc p[ROWS][KEYS] = {};
    multiply_nt<ROWS, KEYS, 4, HEAD_DIM>(p, q_rows, k_rows);
    bool unmasked =
        tile_is_unmasked<FEATURES>(band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int row = q_start + first_row + spread<Acc, ROWS, 4>(r);
      Acc slope[KEYS];  // p times the slope of the cap: what is left to do for ds
#pragma unroll
      for (int c = 0; c < KEYS; ++c) {
        int col = k_start + first_col + spread<Acc, KEYS, 8>(c);
        Acc capped = capped_score<FEATURES>(score, p[r][c]);
        if (unmasked) {
          Acc s = biased_score<FEATURES>(score, capped, batch_index, head, row, col);
          p[r][c] = exp_of(s - row_lse[r]);
        } else {
          bool seen = sees<FEATURES>(score, band, batch_index, head, row, col);
          Acc s = seen ? biased_score<FEATURES>(score, capped, batch_index, head, row, col) : -INF;
          p[r][c] = exp_of(s - row_lse[r]);
        }
        slope[c] = uncapped_gradient<FEATURES>(score, p[r][c], capped);
      }
      store_tile_row<KEYS, 8>(p_rows + tile_offset<Acc, BLOCK_N>(spread<Acc, ROWS, 4>(r), 0), p[r]);
#pragma unroll
      for (int c = 0; c < KEYS; ++c) p[r][c] = slope[c];
    }
    __syncthreads();  // p is there

    // 4c. dv += p^T dout
    multiply_tn<ShareV::R, ShareV::C, 4, BLOCK_M, BLOCK_N, HEAD_DIM_V>(
        dv_acc, p_smem + ShareV::first_row(), dout_smem + ShareV::first_col());

    // 4d. ds = p * (dout v^T - delta)
    Acc dp[ROWS][KEYS] = {};
    multiply_nt<ROWS, KEYS, 4, HEAD_DIM_V>(dp, dout_rows, v_rows);
    __syncthreads();  // p and dout are free
    int next_tile = q_tile > q_first / BLOCK_M ? q_tile - 1 : q_first / BLOCK_M + tiles_seen - 1;
    int64 next_head = head + (q_tile > q_first / BLOCK_M ? 0 : 1);
    int next_start = next_tile * BLOCK_M;
    if (step + 1 < steps) {
      load_tile<T, BLOCK_M, HEAD_DIM_V, VEC, ASYNC, THREADS>(
          dout_smem, dout + next_head * dout_strides.head + next_start * dout_strides.row,
          dout_strides.row, band.q_length - next_start, int(head_dim_v));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < KEYS; ++c) dp[r][c] = p[r][c] * (dp[r][c] - row_delta[r]);
      store_tile_row<KEYS, 8>(p_rows + tile_offset<Acc, BLOCK_N>(spread<Acc, ROWS, 4>(r), 0),
                              dp[r]);
    }
    __syncthreads();  // ds is there

    // 4e. dk += ds^T q
    multiply_tn<ShareK::R, ShareK::C, 4, BLOCK_M, BLOCK_N, HEAD_DIM>(
        dk_acc, p_smem + ShareK::first_row(), q_smem + ShareK::first_col());

    // 4f. dq += ds k
    turn = k_tile - first_key<FEATURES>(band, q_start) / BLOCK_N;
    turn_taken = turns + head * tiles_q + q_tile;
    bool last_turn = k_start + BLOCK_N >= last_key<FEATURES>(band, q_start + BLOCK_M);
    if (threadIdx.x == 0) {
      while (ld_acquire(turn_taken) != turn) {
      }
    }
    __syncthreads();  // q is free, and it is our turn to add
    if (step + 1 < steps) {
      load_tile<T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS>(
          q_smem, q + next_head * q_strides.head + next_start * q_strides.row, q_strides.row,
          band.q_length - next_start, int(head_dim));
    }
    Acc dq_part[ShareQ::R][ShareQ::C] = {};
    multiply_nn<ShareQ::R, ShareQ::C, 4, BLOCK_N, HEAD_DIM>(
        dq_part, p_smem + tile_offset<Acc, BLOCK_N>(ShareQ::first_row(), 0),
        k_smem + ShareQ::first_col());
    Acc* sum = dq_acc + (head * tiles_q + q_tile) * (BLOCK_M * HEAD_DIM);
#pragma unroll
    for (int r = 0; r < ShareQ::R; ++r) {
      int row = ShareQ::first_row() + spread<Acc, ShareQ::R, 4>(r);
      Acc* sum_row = sum + row * HEAD_DIM + ShareQ::first_col();
#pragma unroll
      for (int c = 0; c < ShareQ::C; c += W) {
        Acc before[W] = {};
        if (turn > 0) load16(before, sum_row + spread<Acc, ShareQ::C, 8>(c));
#pragma unroll
        for (int i = 0; i < W; ++i)
          dq_part[r][c + i] = before[i] + Acc(score.scale) * dq_part[r][c + i];
      }
      if (!last_turn) {
        store_tile_row<ShareQ::C, 8>(sum_row, dq_part[r]);
      } else if (q_start + row < seqlen_q) {
        store_row<ShareQ::C, 8, VEC>(dq + head * dq_strides.head + (q_start + row) * dq_strides.row,
                                     dq_part[r], Acc(1), ShareQ::first_col(), int(head_dim));
      }
    }
    q_tile = next_tile;
    head = next_head;
  }
  if (ASYNC) cp_async_wait_all();
  __syncthreads();
  if (threadIdx.x == 0 && steps > 0) st_release(turn_taken, turn + 1);

  // 5. Scale and store
#pragma unroll
  for (int r = 0; r < ShareK::R; ++r) {
    int row = ShareK::first_row() + spread<Acc, ShareK::R, 4>(r);
    if (k_start + row < seqlen_k) {
      store_row<ShareK::C, 8, VEC>(dk + row * dk_strides.row, dk_acc[r], Acc(score.scale),
                                   ShareK::first_col(), int(head_dim));
    }
  }
#pragma unroll
  for (int r = 0; r < ShareV::R; ++r) {
    int row = ShareV::first_row() + spread<Acc, ShareV::R, 4>(r);
    if (k_start + row < seqlen_k) {
      store_row<ShareV::C, 8, VEC>(dv + row * dv_strides.row, dv_acc[r], Acc(1),
                                   ShareV::first_col(), int(head_dim_v));
    }
  }
  // Query tiles that see no key have no block to add: theirs is the first one of the head.
  if (k_tile > 0) return;
  for (int q_start = 0; q_start < seqlen_q; q_start += BLOCK_M) {
    if (first_key<FEATURES>(band, q_start) < last_key<FEATURES>(band, q_start + BLOCK_M)) continue;
    for (int64 h = head_kv * heads_each; h < (head_kv + 1) * heads_each; ++h) {
      for (int row = q_start; row < min(int64(q_start + BLOCK_M), seqlen_q); ++row) {
        for (int col = threadIdx.x; col < head_dim; col += THREADS) {
          dq[h * dq_strides.head + row * dq_strides.row + col] = from_acc<T>(Acc(0));
        }
      }
    }
  }
}
