// attention_dbias: the gradient of the bias, for every backward.
//
//   ds = p * (dout v^T - delta),  dbias = sum of ds along the axes that the bias is broadcast along
//
// Scores are recomputed tile by tile, so nothing of N x N is needed. A block owns one tile of dbias
// and visits everything that adds to it in a fixed order: the same bits in every run. The smaller
// the bias, the fewer blocks there are, and the longer each of them works.
//
// Work split:    a block of 256 threads takes BLOCK x BLOCK elements (1 along a broadcast axis)
// Shared memory: two operands of BLOCK_K x (BLOCK + 1) elements
// Registers:     (BLOCK / 16)^2 results of three sums
// Twin:          numba_kernels/attention_dbias.py
// Launched by:   workbench/launchers.py, in a backward that returns dbias, after attention_delta
#include "matmul.cuh"
#include "scores.cuh"

template <typename T, int BLOCK, int BLOCK_K, int FEATURES>
__global__ void __launch_bounds__(MATMUL_THREADS, 1)
    attention_dbias(const T* dout,          // (batch, heads_q, seqlen_q, head_dim_v)
                    const T* q,             // (batch, heads_q, seqlen_q, head_dim)
                    const T* k,             // (batch, heads_kv, seqlen_k, head_dim)
                    const T* v,             // (batch, heads_kv, seqlen_k, head_dim_v)
                    const acc_t<T>* lse,    // (batch, heads_q, seqlen_q)
                    const acc_t<T>* delta,  // (batch, heads_q, seqlen_q)
                    acc_t<T>* dbias,        // (batch, heads_q, seqlen_q, seqlen_k), any of them 1
                    Strides dout_strides,
                    Strides q_strides,
                    Strides k_strides,
                    Strides v_strides,
                    Strides4 dbias_strides,  // 0 along the axes of length 1
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

  // 1. Which elements of dbias are ours, and what adds to them
  int64 tile = blockIdx.x;
  int64 k_tiles = dbias_strides.col ? cdiv(seqlen_k, int64(BLOCK)) : 1;
  int64 q_tiles = dbias_strides.row ? cdiv(seqlen_q, int64(BLOCK)) : 1;
  int64 heads = dbias_strides.head ? heads_q : 1;
  int k_begin = tile % k_tiles * BLOCK;
  int q_begin = tile / k_tiles % q_tiles * BLOCK;
  int64 head_begin = tile / k_tiles / q_tiles % heads;
  int64 batch_begin = tile / k_tiles / q_tiles / heads;
  int k_end = dbias_strides.col ? k_begin + BLOCK : seqlen_k;
  int q_end = dbias_strides.row ? q_begin + BLOCK : seqlen_q;
  int64 head_end = dbias_strides.head ? head_begin + 1 : heads_q;
  int64 batch_end = dbias_strides.batch ? batch_begin + 1 : batch;
  int y = threadIdx.x / MATMUL_SIDE;
  int x = threadIdx.x % MATMUL_SIDE;

  Acc acc[OWN][OWN] = {};
  for (int64 batch_index = batch_begin; batch_index < batch_end; ++batch_index) {
    KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
    for (int64 head = head_begin; head < head_end; ++head) {
      int64 head_kv = head / (heads_q / heads_kv);
      int64 rows_before = (batch_index * heads_q + head) * seqlen_q;
      for (int q_start = q_begin; q_start < q_end; q_start += BLOCK) {
        int first = first_key<FEATURES>(band, q_start);
        int last = min(k_end, last_key<FEATURES>(band, q_start + BLOCK));
        for (int k_start = max(k_begin, first / BLOCK * BLOCK); k_start < last; k_start += BLOCK) {
          int q_rows = band.q_length - q_start;
          int k_rows = band.kv_length - k_start;
          const T* dout_tile = dout + offset_of(dout_strides, batch_index, head, q_start);
          const T* q_tile = q + offset_of(q_strides, batch_index, head, q_start);
          const T* k_tile = k + offset_of(k_strides, batch_index, head_kv, k_start);
          const T* v_tile = v + offset_of(v_strides, batch_index, head_kv, k_start);
          Acc s_acc[OWN][OWN] = {};
          Acc dp_acc[OWN][OWN] = {};
          matmul_tile<BLOCK, BLOCK_K, 0, 1>(s_acc, q_tile, q_strides.row, k_tile, k_strides.row,
                                            q_rows, k_rows, head_dim, a_smem, b_smem);
          matmul_tile<BLOCK, BLOCK_K, 0, 1>(dp_acc, dout_tile, dout_strides.row, v_tile,
                                            v_strides.row, q_rows, k_rows, head_dim_v, a_smem,
                                            b_smem);
#pragma unroll
          for (int i = 0; i < OWN; ++i) {
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
              int row = q_start + y + i * MATMUL_SIDE;
              int col = k_start + x + j * MATMUL_SIDE;
              if (sees<FEATURES>(score, band, batch_index, head, row, col)) {
                // 4b. p = exp(s - lse)
                Acc s = score_of<FEATURES>(score, s_acc[i][j], batch_index, head, row, col);
                Acc p = exp_of(s - finite_or_zero(lse[rows_before + row]));

                // 4d. ds = p * (dout v^T - delta)
                acc[i][j] += p * (dp_acc[i][j] - delta[rows_before + row]);
              }
            }
          }
        }
      }
    }
  }

  // Add up along the axes that the bias is broadcast along
  if (dbias_strides.col == 0) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 1; j < OWN; ++j) acc[i][0] += acc[i][j];
      acc[i][0] = warp_sum<MATMUL_SIDE>(acc[i][0]);
    }
  }
  if (dbias_strides.row == 0) {
    // Each row of threads takes a row of a_smem, which has at least 16
    __syncthreads();  // the last product's operands have been read
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
#pragma unroll
      for (int i = 1; i < OWN; ++i) acc[0][j] += acc[i][j];
      a_smem[y][x + j * MATMUL_SIDE] = acc[0][j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      acc[0][j] = 0;
      for (int i = 0; i < MATMUL_SIDE; ++i) acc[0][j] += a_smem[i][x + j * MATMUL_SIDE];
    }
  }

  // 5. Store
  dbias += batch_begin * dbias_strides.batch + head_begin * dbias_strides.head;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      int row = q_begin + y + i * MATMUL_SIDE;
      int col = k_begin + x + j * MATMUL_SIDE;
      bool owns_row = dbias_strides.row ? row < seqlen_q : row == 0;
      bool owns_col = dbias_strides.col ? col < seqlen_k : col == 0;
      if (owns_row && owns_col) dbias[row * dbias_strides.row + col] = acc[i][j];
    }
  }
}
