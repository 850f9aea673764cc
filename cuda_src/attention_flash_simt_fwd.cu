// attention_flash_simt_fwd: tiles and an online softmax on CUDA cores, in exact fp32 or fp64.
//
//   s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))
//
// The scores never leave the chip: a block keeps a tile of query rows and walks over the keys, tile
// by tile, with a softmax of what it has seen so far. All arithmetic is in Acc, on register tiles
// (tiles.cuh). Query tiles are taken from the last row to the first, of all heads at a time: so the
// longest walks start first under a causal mask.
//
// Work split:    a block owns BLOCK_M query rows of one head, each warp its share of them
// Shared memory: the Q, K, V and P tiles; one buffer each is enough, as K is loaded while p v runs
//                and V while q k^T does
// Registers:     ROWS x KEYS scores and ROWS x DIMS outputs a thread, 8 x 8 at best: a 16-byte load
//                from shared memory then feeds 16 multiply-adds
// Twin:          numba_kernels/attention_flash_simt_fwd.py
// Launched by:   workbench/launchers.py, attention_flash_simt
#include "scores.cuh"
#include "tiles.cuh"

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
    attention_flash_simt_fwd(const T* q,     // (batch, heads_q, seqlen_q, head_dim)
                             const T* k,     // (batch, heads_kv, seqlen_k, head_dim)
                             const T* v,     // (batch, heads_kv, seqlen_k, head_dim_v)
                             T* out,         // (batch, heads_q, seqlen_q, head_dim_v)
                             acc_t<T>* lse,  // (batch, heads_q, seqlen_q), contiguous
                             Strides q_strides,
                             Strides k_strides,
                             Strides v_strides,
                             Strides out_strides,
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
  constexpr int WARP_ROWS = BLOCK_M / (THREADS / 32);
  // Threads of a warp that share a row: few, so that a thread has 2W rows, but W keys each.
  constexpr int LANES_COLS = BLOCK_N / W < 64 * W / WARP_ROWS ? BLOCK_N / W : 64 * W / WARP_ROWS;
  constexpr int LANES_ROWS = 32 / LANES_COLS;
  constexpr int ROWS = WARP_ROWS / LANES_ROWS;
  constexpr int KEYS = BLOCK_N / LANES_COLS;
  constexpr int DIMS = HEAD_DIM_V / LANES_COLS;

  extern __shared__ uint4 shared[];
  Acc* q_smem = reinterpret_cast<Acc*>(shared);
  Acc* k_smem = q_smem + tile_size<Acc, BLOCK_M, HEAD_DIM>();
  Acc* v_smem = k_smem + tile_size<Acc, BLOCK_N, HEAD_DIM>();
  Acc* p_smem = v_smem + tile_size<Acc, BLOCK_N, HEAD_DIM_V>();

  // 1. Which rows are ours
  int64 heads_total = batch * heads_q;
  // Unsigned where they are made 64 bits long: that takes no registers.
  uint32 batch_index = blockIdx.x % heads_total / heads_q;
  uint32 head = blockIdx.x % heads_q;
  uint32 head_kv = head / (heads_q / heads_kv);
  int q_start = int(cdiv(seqlen_q, int64(BLOCK_M)) - 1 - blockIdx.x / heads_total) * BLOCK_M;
  int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  int first_row = warp_id * WARP_ROWS + lane_row<LANES_ROWS>(lane_id) * group<Acc, ROWS>();
  int first_col = lane_col<LANES_ROWS>(lane_id) * W;

  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int k_start = first_key<FEATURES>(band, q_start) / BLOCK_N * BLOCK_N;
  int k_end = last_key<FEATURES>(band, q_start + BLOCK_M);

  // 2. Load the Q tile
  load_tile<T, BLOCK_M, HEAD_DIM, VEC, ASYNC, THREADS>(
      q_smem, q + offset_of(q_strides, batch_index, head, q_start), q_strides.row,
      band.q_length - q_start, int(head_dim));
  load_tile<T, BLOCK_N, HEAD_DIM, VEC, ASYNC, THREADS>(
      k_smem, k + offset_of(k_strides, batch_index, head_kv, k_start), k_strides.row,
      k_end - k_start, int(head_dim));

  // 3. Start the running softmax
  Acc row_max[ROWS], row_sum[ROWS], acc[ROWS][DIMS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    row_max[r] = -INF;
    row_sum[r] = 0;  // of this thread's keys alone, until the end
  }

  // 4. Walk over the key/value tiles
  const Acc* q_rows = q_smem + tile_offset<Acc, HEAD_DIM>(first_row, 0);
  const Acc* k_rows = k_smem + tile_offset<Acc, HEAD_DIM>(first_col, 0);
  Acc* p_rows = p_smem + tile_offset<Acc, BLOCK_N>(first_row, 0);
  for (; k_start < k_end; k_start += BLOCK_N) {
    // 4a. Load the K and V tiles
    if (ASYNC) cp_async_wait_all();
    __syncthreads();  // K is there, and V is free: every warp is past the last p v
    load_tile<T, BLOCK_N, HEAD_DIM_V, VEC, ASYNC, THREADS>(
        v_smem, v + offset_of(v_strides, batch_index, head_kv, k_start), v_strides.row,
        k_end - k_start, int(head_dim_v));

    // 4b. s = q k^T, masked
    Acc s[ROWS][KEYS] = {};
    multiply_nt<ROWS, KEYS, LANES_ROWS, HEAD_DIM>(s, q_rows, k_rows);
    bool unmasked =
        tile_is_unmasked<FEATURES>(band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < KEYS; ++c) s[r][c] = capped_score<FEATURES>(score, s[r][c]);
    }
    if (!unmasked || FEATURES & BIAS) {  // a loop of its own: most tiles go past it
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        int row = q_start + first_row + spread<Acc, ROWS, LANES_ROWS>(r);
#pragma unroll
        for (int c = 0; c < KEYS; ++c) {
          int col = k_start + first_col + spread<Acc, KEYS, LANES_COLS>(c);
          bool seen = unmasked || sees<FEATURES>(score, band, batch_index, head, row, col);
          s[r][c] =
              seen ? biased_score<FEATURES>(score, s[r][c], batch_index, head, row, col) : -INF;
        }
      }
    }

    // 4c. Rescale what we have to the new maximum
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      Acc new_max = row_max[r];
#pragma unroll
      for (int c = 0; c < KEYS; ++c) new_max = max(new_max, s[r][c]);
      new_max = row_max_of<LANES_ROWS>(new_max);
      Acc subtrahend = finite_or_zero(new_max);
      Acc rescale = exp_of(row_max[r] - subtrahend);
      row_max[r] = new_max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int c = 0; c < KEYS; ++c) {
        s[r][c] = exp_of(s[r][c] - subtrahend);  // from here on p
        row_sum[r] += s[r][c];
      }
#pragma unroll
      for (int d = 0; d < DIMS; ++d) acc[r][d] *= rescale;
      store_tile_row<KEYS, LANES_COLS>(
          p_rows + tile_offset<Acc, BLOCK_N>(spread<Acc, ROWS, LANES_ROWS>(r), first_col), s[r]);
    }

    // 4d. acc += p v
    if (ASYNC) cp_async_wait_all();
    __syncthreads();  // V and p are there, and K is free
    int next = k_start + BLOCK_N;
    if (next < k_end) {
      load_tile<T, BLOCK_N, HEAD_DIM, VEC, ASYNC, THREADS>(
          k_smem, k + offset_of(k_strides, batch_index, head_kv, next), k_strides.row, k_end - next,
          int(head_dim));
    }
    multiply_nn<ROWS, DIMS, LANES_ROWS, BLOCK_N, HEAD_DIM_V>(acc, p_rows, v_smem + first_col);
  }
  if (ASYNC) cp_async_wait_all();  // no block may end with copies on their way

  // 5. Normalise and store
  out += offset_of(out_strides, batch_index, head, q_start);
  lse += (batch_index * heads_q + head) * seqlen_q + q_start;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int row = first_row + spread<Acc, ROWS, LANES_ROWS>(r);
    Acc sum = row_sum_of<LANES_ROWS>(row_sum[r]);
    if (q_start + row < seqlen_q) {
      Acc inverse = sum == 0 ? Acc(0) : 1 / sum;  // a row that sees no key gives 0
      store_row<DIMS, LANES_COLS, VEC>(out + row * out_strides.row, acc[r], inverse, first_col,
                                       int(head_dim_v));
      if (first_col == 0) lse[row] = row_max[r] + log(sum);
    }
  }
}
