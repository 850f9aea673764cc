// attention_tiled_fwd: attention whose two matrix products go through shared memory.
//
//   s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))
//
// The three passes of attention_naive_fwd, for a tile of query rows at once: a key that has been
// brought to shared memory now serves BLOCK rows. The scores still travel through an N x N matrix
// in global memory, once for each pass. Steps 2 and 4a, loading the tiles, are inside matmul_tile.
//
// Work split:    a block of 256 threads takes BLOCK query rows, a thread (BLOCK / 16)^2 results
// Shared memory: two operands of BLOCK_K x (BLOCK + 1) elements
// Registers:     the results, and for each of its rows a maximum and a sum
// Twin:          numba_kernels/attention_tiled_fwd.py
// Launched by:   workbench/launchers.py, attention_tiled
#include "matmul.cuh"
#include "scores.cuh"

template <typename T, int BLOCK, int BLOCK_K, int FEATURES>
__global__ void __launch_bounds__(MATMUL_THREADS, 2)
    attention_tiled_fwd(const T* q,        // (batch, heads_q, seqlen_q, head_dim)
                        const T* k,        // (batch, heads_kv, seqlen_k, head_dim)
                        const T* v,        // (batch, heads_kv, seqlen_k, head_dim_v)
                        T* out,            // (batch, heads_q, seqlen_q, head_dim_v)
                        acc_t<T>* lse,     // (batch, heads_q, seqlen_q)
                        acc_t<T>* scores,  // (batch, heads_q, seqlen_q, seqlen_k)
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
  constexpr int OWN = BLOCK / MATMUL_SIDE;
  __shared__ Acc a_smem[BLOCK_K][BLOCK + 1];
  __shared__ Acc b_smem[BLOCK_K][BLOCK + 1];

  // 1. Which rows are ours
  int64 q_tiles = cdiv(seqlen_q, int64(BLOCK));
  int q_start = blockIdx.x % q_tiles * BLOCK;
  int64 head = blockIdx.x / q_tiles % heads_q;
  int64 head_kv = head / (heads_q / heads_kv);
  int64 batch_index = blockIdx.x / q_tiles / heads_q;
  int64 rows_before = (batch_index * heads_q + head) * seqlen_q + q_start;
  q += offset_of(q_strides, batch_index, head, q_start);
  k += offset_of(k_strides, batch_index, head_kv, 0);
  v += offset_of(v_strides, batch_index, head_kv, 0);
  out += offset_of(out_strides, batch_index, head, q_start);
  lse += rows_before;
  scores += rows_before * seqlen_k;
  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int k_begin = first_key<FEATURES>(band, q_start) / BLOCK * BLOCK;
  int k_end = last_key<FEATURES>(band, q_start + BLOCK);
  int rows = min(BLOCK, int(seqlen_q) - q_start);
  int y = threadIdx.x / MATMUL_SIDE;
  int x = threadIdx.x % MATMUL_SIDE;

  // 3. Start the running softmax
  Acc row_max[OWN], row_sum[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    row_max[i] = -INF;
    row_sum[i] = 0;
  }

  // 4. Walk over the key/value tiles
  for (int k_start = k_begin; k_start < k_end; k_start += BLOCK) {
    // 4b. s = q k^T, masked
    int q_rows = band.q_length - q_start;
    int k_rows = band.kv_length - k_start;
    const T* k_tile = k + k_start * k_strides.row;
    Acc acc[OWN][OWN] = {};
    matmul_tile<BLOCK, BLOCK_K, 0, 1>(acc, q, q_strides.row, k_tile, k_strides.row, q_rows, k_rows,
                                      head_dim, a_smem, b_smem);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        int row = y + i * MATMUL_SIDE;
        int col = k_start + x + j * MATMUL_SIDE;
        Acc s = -INF;
        if (sees<FEATURES>(score, band, batch_index, head, q_start + row, col)) {
          s = score_of<FEATURES>(score, acc[i][j], batch_index, head, q_start + row, col);
        }
        if (row < rows && col < seqlen_k) scores[row * seqlen_k + col] = s;
        row_max[i] = max(row_max[i], s);
      }
    }
  }

  // p = exp(s - row_max), in place: a thread reads back what it wrote
#pragma unroll
  for (int i = 0; i < OWN; ++i) row_max[i] = warp_max<MATMUL_SIDE>(row_max[i]);
  for (int k_start = k_begin; k_start < k_end; k_start += BLOCK) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        int row = y + i * MATMUL_SIDE;
        int col = k_start + x + j * MATMUL_SIDE;
        if (row < rows && col < seqlen_k) {
          Acc p = exp_of(scores[row * seqlen_k + col] - finite_or_zero(row_max[i]));
          scores[row * seqlen_k + col] = p;
          row_sum[i] += p;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) row_sum[i] = warp_sum<MATMUL_SIDE>(row_sum[i]);

  for (int d_start = 0; d_start < head_dim_v; d_start += BLOCK) {
    // 4d. acc += p v, with p written by all threads once matmul_tile passes its barrier
    int cols = int(head_dim_v) - d_start;
    const T* v_tile = v + k_begin * v_strides.row + d_start;
    const Acc* p_tile = scores + k_begin;
    Acc acc[OWN][OWN] = {};
    matmul_tile<BLOCK, BLOCK_K, 0, 0>(acc, p_tile, seqlen_k, v_tile, v_strides.row, rows, cols,
                                      k_end - k_begin, a_smem, b_smem);

    // 5. Normalise and store; a row that saw no key has a sum of 0
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        int row = y + i * MATMUL_SIDE;
        int d = d_start + x + j * MATMUL_SIDE;
        Acc normalised = row_sum[i] == 0 ? Acc(0) : acc[i][j] / row_sum[i];
        if (row < rows && d < head_dim_v) out[row * out_strides.row + d] = from_acc<T>(normalised);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    int row = y + i * MATMUL_SIDE;
    if (x == 0 && row < rows) lse[row] = row_sum[i] == 0 ? Acc(-INF) : row_max[i] + log(row_sum[i]);
  }
}
