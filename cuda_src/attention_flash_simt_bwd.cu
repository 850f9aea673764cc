// attention_flash_simt_bwd: one walk gives dq, dk and dv on CUDA cores, in exact fp32 or fp64.
//
//   p = exp(s - lse),  dv = p^T dout,  ds = p * (dout v^T - delta),  dq = ds k,  dk = ds^T q
//
// The scores are recomputed from q, k and lse. A block keeps a tile of keys and walks over the
// queries that see them: dk and dv stay in registers, but dq is a sum over blocks. It is added up
// in dq_acc in the order of the keys, without atomics: a counter of each query tile says whose turn
// it is, and the last one writes dq. Blocks take their key tiles from a counter as well: whoever
// waits for a turn waits for a block that has started, so there is always progress.
//
// Work split:    a block owns BLOCK_N keys of one key head, for all query heads that read it
// Shared memory: the K, V, Q and dout tiles and one for p, then ds; the next dout is loaded from
//                when dp is known, the next q while ds k runs
// Registers:     dk and dv of the block's keys, 8 x 4 or 8 x 8 each a thread, and one more product
// Twin:          numba_kernels/attention_flash_simt_bwd.py
// Launched by:   workbench/launchers.py, attention_flash_simt
#include "scores.cuh"
#include "tiles.cuh"

// How the warps of a block share ROWS x COLS results: a thread has 2W rows, or fewer so that it has
// W columns.
template <typename Acc, int ROWS, int COLS, int THREADS>
struct Share {
  static constexpr int WARPS = THREADS / 32, SPAN = 8 * vec_length<Acc>();
  static constexpr int TALL = ROWS / SPAN;  // warps above each other for 2W rows a thread
  static constexpr int WIDE = cdiv(SPAN * WARPS, COLS);  // and for W columns
  static constexpr int WANTED = TALL > WIDE ? TALL : WIDE;
  static constexpr int MOST = ROWS / 4 < WARPS ? ROWS / 4 : WARPS;
  static constexpr int WARPS_ROWS = WANTED < MOST ? WANTED : MOST;
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

// x[r] = source of this thread's r-th row, 0 where that does not exist.
template <int ROWS, typename Acc>
__device__ __forceinline__ void load_rows(Acc (&x)[ROWS], const Acc* source, int row, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int at = row + spread<Acc, ROWS, 4>(r);
    x[r] = at < rows ? source[at] : Acc(0);
  }
}

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
  // Unsigned where they are made 64 bits long: that takes no registers.
  uint32 heads_each = heads_q / heads_kv;
  uint32 batch_index = ticket % heads_total / heads_kv;
  uint32 head_kv = ticket % heads_kv;
  int k_tile = int(ticket / heads_total);
  int k_start = k_tile * BLOCK_N;

  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int q_first = first_query<FEATURES>(band, k_start);
  int q_last = last_query<FEATURES>(band, k_start + BLOCK_N);
  int tiles_q = int(cdiv(seqlen_q, int64(BLOCK_M)));
  int tile_first = q_first / BLOCK_M;
  int tile_end = q_first < q_last ? cdiv(q_last, BLOCK_M) : tile_first;
  int steps = int(heads_each) * (tile_end - tile_first);
  uint32 head = head_kv * heads_each;
  int q_tile = tile_end - 1;  // last to first, then on to the next head

  // 2. Load the K and V tiles
  load_tile<T, BLOCK_N, HEAD_DIM, VEC, ASYNC, THREADS>(
      k_smem, k + offset_of(k_strides, batch_index, head_kv, k_start), k_strides.row,
      band.kv_length - k_start, int(head_dim));
  load_tile<T, BLOCK_N, HEAD_DIM_V, VEC, ASYNC, THREADS>(
      v_smem, v + offset_of(v_strides, batch_index, head_kv, k_start), v_strides.row,
      band.kv_length - k_start, int(head_dim_v));
  if (steps > 0) {
    int q_start = q_tile * BLOCK_M;
    load_tile<T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS>(
        q_smem, q + offset_of(q_strides, batch_index, head, q_start), q_strides.row,
        band.q_length - q_start, int(head_dim));
    load_tile<T, BLOCK_M, HEAD_DIM_V, VEC, ASYNC, THREADS>(
        dout_smem, dout + offset_of(dout_strides, batch_index, head, q_start), dout_strides.row,
        band.q_length - q_start, int(head_dim_v));
  }

  // 3. Start dk and dv
  Acc dk_acc[ShareK::R][ShareK::C] = {}, dv_acc[ShareV::R][ShareV::C] = {};

  // 4. Walk over the query tiles
  int first_row = ShareS::first_row(), first_col = ShareS::first_col();
  Acc* p_rows = p_smem + tile_offset<Acc, BLOCK_N>(first_row, first_col);
  int turn_taken = 0, turn = 0;
  for (; steps > 0; --steps) {
    int q_start = q_tile * BLOCK_M;
    uint32 query_head = batch_index * uint32(heads_q) + head;
    // 4a. Load q, dout, lse and delta
    Acc row_lse[ROWS], row_delta[ROWS];
    load_rows<ROWS>(row_lse, lse + query_head * seqlen_q, q_start + first_row, band.q_length);
    if (ASYNC) cp_async_wait_all();
    __syncthreads();  // q and dout are there; everybody has added to the last dq
    if (threadIdx.x == 0 && turn_taken > 0) st_release(turns + turn_taken, turn + 1);

    // 4b. p = exp(s - lse)
    Acc p[ROWS][KEYS] = {}, slope[ROWS][KEYS];  // the slope of the cap: 1, in no register, without
    multiply_nt<ROWS, KEYS, 4, HEAD_DIM>(p, q_smem + tile_offset<Acc, HEAD_DIM>(first_row, 0),
                                         k_smem + tile_offset<Acc, HEAD_DIM>(first_col, 0));
    bool unmasked =
        tile_is_unmasked<FEATURES>(band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < KEYS; ++c) {
        p[r][c] = capped_score<FEATURES>(score, p[r][c]);
        slope[r][c] = uncapped_gradient<FEATURES>(score, Acc(1), p[r][c]);
      }
    }
    if (!unmasked || FEATURES & BIAS) {  // a loop of its own: most tiles go past it
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        int row = q_start + first_row + spread<Acc, ROWS, 4>(r);
#pragma unroll
        for (int c = 0; c < KEYS; ++c) {
          int col = k_start + first_col + spread<Acc, KEYS, 8>(c);
          bool seen = unmasked || sees<FEATURES>(score, band, batch_index, head, row, col);
          p[r][c] =
              seen ? biased_score<FEATURES>(score, p[r][c], batch_index, head, row, col) : -INF;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      Acc subtrahend = finite_or_zero(row_lse[r]);
#pragma unroll
      for (int c = 0; c < KEYS; ++c) p[r][c] = exp_of(p[r][c] - subtrahend);
      store_tile_row<KEYS, 8>(p_rows + tile_offset<Acc, BLOCK_N>(spread<Acc, ROWS, 4>(r), 0), p[r]);
    }
    __syncthreads();  // p is there

    // 4c. dv += p^T dout
    load_rows<ROWS>(row_delta, delta + query_head * seqlen_q, q_start + first_row, band.q_length);
    multiply_tn<ShareV::R, ShareV::C, 4, BLOCK_M, BLOCK_N, HEAD_DIM_V>(
        dv_acc, p_smem + ShareV::first_row(), dout_smem + ShareV::first_col());

    // 4d. ds = p * (dout v^T - delta)
    Acc dp[ROWS][KEYS] = {};
    multiply_nt<ROWS, KEYS, 4, HEAD_DIM_V>(dp,
                                           dout_smem + tile_offset<Acc, HEAD_DIM_V>(first_row, 0),
                                           v_smem + tile_offset<Acc, HEAD_DIM_V>(first_col, 0));
    __syncthreads();  // p and dout are free
    bool same_head = q_tile > tile_first;
    int next_tile = same_head ? q_tile - 1 : tile_end - 1;
    uint32 next_head = same_head ? head : head + 1;
    int next_start = next_tile * BLOCK_M;
    if (steps > 1) {
      load_tile<T, BLOCK_M, HEAD_DIM_V, VEC, ASYNC, THREADS>(
          dout_smem, dout + offset_of(dout_strides, batch_index, next_head, next_start),
          dout_strides.row, band.q_length - next_start, int(head_dim_v));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      Acc* p_row = p_rows + tile_offset<Acc, BLOCK_N>(spread<Acc, ROWS, 4>(r), 0);
      Acc ds[KEYS];
      load_tile_row<KEYS, 8>(ds, p_row);  // our own p: registers are scarcer than these loads
#pragma unroll
      for (int c = 0; c < KEYS; ++c) ds[c] *= slope[r][c] * (dp[r][c] - row_delta[r]);
      store_tile_row<KEYS, 8>(p_row, ds);
    }
    __syncthreads();  // ds is there

    // 4e. dk += ds^T q
    turn = k_tile - first_key<FEATURES>(band, q_start) / BLOCK_N;
    uint32 query_tile = query_head * tiles_q + q_tile;
    turn_taken = int(1 + query_tile);
    if (threadIdx.x == 0) {
      while (ld_acquire(turns + turn_taken) != turn) {
      }
    }
    __syncwarp();
    multiply_tn<ShareK::R, ShareK::C, 4, BLOCK_M, BLOCK_N, HEAD_DIM>(
        dk_acc, p_smem + ShareK::first_row(), q_smem + ShareK::first_col());

    // 4f. dq += ds k
    __syncthreads();  // q is free, and it is our turn to add
    if (steps > 1) {
      load_tile<T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS>(
          q_smem, q + offset_of(q_strides, batch_index, next_head, next_start), q_strides.row,
          band.q_length - next_start, int(head_dim));
    }
    Acc* sum = dq_acc + int64(query_tile) * (BLOCK_M * HEAD_DIM) + ShareQ::first_row() * HEAD_DIM +
               ShareQ::first_col();
    Acc dq_part[ShareQ::R][ShareQ::C] = {};  // and what the blocks before us have added
    if (turn > 0) {
#pragma unroll
      for (int r = 0; r < ShareQ::R; ++r) {
        load_tile_row<ShareQ::C, 8>(dq_part[r], sum + spread<Acc, ShareQ::R, 4>(r) * HEAD_DIM);
      }
    }
    multiply_nn<ShareQ::R, ShareQ::C, 4, BLOCK_N, HEAD_DIM>(
        dq_part, p_smem + tile_offset<Acc, BLOCK_N>(ShareQ::first_row(), 0),
        k_smem + ShareQ::first_col());
    bool last_turn = k_start + BLOCK_N >= last_key<FEATURES>(band, q_start + BLOCK_M);
#pragma unroll
    for (int r = 0; r < ShareQ::R; ++r) {
      int row = q_start + ShareQ::first_row() + spread<Acc, ShareQ::R, 4>(r);
      if (!last_turn) {
        store_tile_row<ShareQ::C, 8>(sum + spread<Acc, ShareQ::R, 4>(r) * HEAD_DIM, dq_part[r]);
      } else if (row < seqlen_q) {
        store_row<ShareQ::C, 8, VEC>(dq + offset_of(dq_strides, batch_index, head, row), dq_part[r],
                                     Acc(score.scale), ShareQ::first_col(), int(head_dim));
      }
    }
    q_tile = next_tile;
    head = next_head;
  }
  if (ASYNC) cp_async_wait_all();
  __syncthreads();
  if (threadIdx.x == 0 && turn_taken > 0) st_release(turns + turn_taken, turn + 1);

  // 5. Scale and store
  dk += offset_of(dk_strides, batch_index, head_kv, k_start);
  dv += offset_of(dv_strides, batch_index, head_kv, k_start);
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
    for (uint32 h = head_kv * heads_each; h < (head_kv + 1) * heads_each; ++h) {
      for (int row = q_start; row < min(int64(q_start + BLOCK_M), seqlen_q); ++row) {
        for (int col = threadIdx.x; col < head_dim; col += THREADS) {
          dq[offset_of(dq_strides, batch_index, h, row) + col] = from_acc<T>(Acc(0));
        }
      }
    }
  }
}
