// attention_tiled_bwd: the gradients of attention, five matrix products through shared memory.
//
//   p = exp(s - lse),  ds = p * (dout v^T - delta),  dv = p^T dout,  dk = scale ds^T q,
//   dq = scale ds k
//
// As in attention_naive_bwd, dq runs first and leaves p and ds in two N x N matrices in global
// memory; dk/dv multiplies them. Steps 2 and 4a, loading the tiles, are inside matmul_tile.
//
// Work split:    dq: a block of 256 threads takes BLOCK query rows
//                dk/dv: two blocks take BLOCK key rows, one for dv = p^T dout, one for dk = ds^T q
// Shared memory: two operands of BLOCK_K x (BLOCK + 1) elements
// Registers:     (BLOCK / 16)^2 results of one product or two
// Twin:          numba_kernels/attention_tiled_bwd.py
// Launched by:   workbench/launchers.py, attention_tiled, after attention_delta
#include "matmul.cuh"
#include "scores.cuh"

template <typename T, int BLOCK, int BLOCK_K, int FEATURES>
__global__ void __launch_bounds__(MATMUL_THREADS, 2)
    attention_tiled_bwd_dq(const T* dout,          // (batch, heads_q, seqlen_q, head_dim_v)
                           const T* q,             // (batch, heads_q, seqlen_q, head_dim)
                           const T* k,             // (batch, heads_kv, seqlen_k, head_dim)
                           const T* v,             // (batch, heads_kv, seqlen_k, head_dim_v)
                           const acc_t<T>* lse,    // (batch, heads_q, seqlen_q)
                           const acc_t<T>* delta,  // (batch, heads_q, seqlen_q)
                           acc_t<T>* p,            // (batch, heads_q, seqlen_q, seqlen_k)
                           acc_t<T>* ds,           // (batch, heads_q, seqlen_q, seqlen_k)
                           T* dq,                  // (batch, heads_q, seqlen_q, head_dim)
                           Strides dout_strides,
                           Strides q_strides,
                           Strides k_strides,
                           Strides v_strides,
                           Strides dq_strides,
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

  // 1. Which query rows are ours
  int64 q_tiles = cdiv(seqlen_q, int64(BLOCK));
  int q_start = blockIdx.x % q_tiles * BLOCK;
  int64 head = blockIdx.x / q_tiles % heads_q;
  int64 head_kv = head / (heads_q / heads_kv);
  int64 batch_index = blockIdx.x / q_tiles / heads_q;
  int64 rows_before = (batch_index * heads_q + head) * seqlen_q + q_start;
  dout += offset_of(dout_strides, batch_index, head, q_start);
  q += offset_of(q_strides, batch_index, head, q_start);
  k += offset_of(k_strides, batch_index, head_kv, 0);
  v += offset_of(v_strides, batch_index, head_kv, 0);
  dq += offset_of(dq_strides, batch_index, head, q_start);
  lse += rows_before;
  delta += rows_before;
  p += rows_before * seqlen_k;
  ds += rows_before * seqlen_k;
  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int k_begin = first_key<FEATURES>(band, q_start) / BLOCK * BLOCK;
  int k_end = last_key<FEATURES>(band, q_start + BLOCK);
  int rows = min(BLOCK, int(seqlen_q) - q_start);
  int y = threadIdx.x / MATMUL_SIDE;
  int x = threadIdx.x % MATMUL_SIDE;

  // 4. Walk over the key/value tiles
  for (int k_start = k_begin; k_start < k_end; k_start += BLOCK) {
    int q_rows = band.q_length - q_start;
    int k_rows = band.kv_length - k_start;
    const T* k_tile = k + k_start * k_strides.row;
    const T* v_tile = v + k_start * v_strides.row;
    Acc s_acc[OWN][OWN] = {};
    Acc dp_acc[OWN][OWN] = {};
    matmul_tile<BLOCK, BLOCK_K, 0, 1>(s_acc, q, q_strides.row, k_tile, k_strides.row, q_rows,
                                      k_rows, head_dim, a_smem, b_smem);
    matmul_tile<BLOCK, BLOCK_K, 0, 1>(dp_acc, dout, dout_strides.row, v_tile, v_strides.row, q_rows,
                                      k_rows, head_dim_v, a_smem, b_smem);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        int row = y + i * MATMUL_SIDE;
        int col = k_start + x + j * MATMUL_SIDE;
        Acc p_ij = 0;
        Acc ds_ij = 0;
        if (sees<FEATURES>(score, band, batch_index, head, q_start + row, col)) {
          // 4b. p = exp(s - lse)
          Acc capped = capped_score<FEATURES>(score, s_acc[i][j]);
          Acc s = biased_score<FEATURES>(score, capped, batch_index, head, q_start + row, col);
          p_ij = exp_of(s - finite_or_zero(lse[row]));

          // 4d. ds = p * (dout v^T - delta)
          ds_ij = p_ij * (dp_acc[i][j] - delta[row]);
          ds_ij = uncapped_gradient<FEATURES>(score, ds_ij, capped);
        }
        // dk/dv reads whole tiles: what is not seen must be 0 there
        if (row < rows && col < seqlen_k) {
          p[row * seqlen_k + col] = p_ij;
          ds[row * seqlen_k + col] = ds_ij;
        }
      }
    }
  }

  for (int d_start = 0; d_start < head_dim; d_start += BLOCK) {
    // 4f. dq += ds k, with ds written by all threads once matmul_tile passes its barrier
    int cols = int(head_dim) - d_start;
    const T* k_tile = k + k_begin * k_strides.row + d_start;
    const Acc* ds_tile = ds + k_begin;
    Acc dq_acc[OWN][OWN] = {};
    matmul_tile<BLOCK, BLOCK_K, 0, 0>(dq_acc, ds_tile, seqlen_k, k_tile, k_strides.row, rows, cols,
                                      k_end - k_begin, a_smem, b_smem);

    // 5. Scale and store
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        int row = y + i * MATMUL_SIDE;
        int d = d_start + x + j * MATMUL_SIDE;
        Acc scaled = Acc(score.scale) * dq_acc[i][j];
        if (row < rows && d < head_dim) dq[row * dq_strides.row + d] = from_acc<T>(scaled);
      }
    }
  }
}

template <typename T, int BLOCK, int BLOCK_K, int FEATURES>
__global__ void __launch_bounds__(MATMUL_THREADS, 2)
    attention_tiled_bwd_dkdv(const T* dout,       // (batch, heads_q, seqlen_q, head_dim_v)
                             const T* q,          // (batch, heads_q, seqlen_q, head_dim)
                             const acc_t<T>* p,   // (batch, heads_q, seqlen_q, seqlen_k)
                             const acc_t<T>* ds,  // (batch, heads_q, seqlen_q, seqlen_k)
                             T* dk,               // (batch, heads_kv, seqlen_k, head_dim)
                             T* dv,               // (batch, heads_kv, seqlen_k, head_dim_v)
                             Strides dout_strides,
                             Strides q_strides,
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
  constexpr int OWN = BLOCK / MATMUL_SIDE;
  __shared__ Acc a_smem[BLOCK_K][BLOCK + 1];
  __shared__ Acc b_smem[BLOCK_K][BLOCK + 1];

  // 1. Which key rows are ours
  bool makes_dv = blockIdx.x % 2 == 0;
  int64 k_tiles = cdiv(seqlen_k, int64(BLOCK));
  int64 tile = blockIdx.x / 2;
  int k_start = tile % k_tiles * BLOCK;
  int64 head_kv = tile / k_tiles % heads_kv;
  int64 batch_index = tile / k_tiles / heads_kv;
  int64 group = heads_q / heads_kv;
  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int q_begin = first_query<FEATURES>(band, k_start);
  int q_rows = last_query<FEATURES>(band, k_start + BLOCK) - q_begin;
  int rows = min(BLOCK, int(seqlen_k) - k_start);
  int y = threadIdx.x / MATMUL_SIDE;
  int x = threadIdx.x % MATMUL_SIDE;

  // The product is left^T right: p and dout for dv, ds and q for dk
  const Acc* left = p;
  const T* right = dout;
  T* grad = dv;
  Strides right_strides = dout_strides;
  Strides grad_strides = dv_strides;
  int grad_dim = head_dim_v;
  Acc scale = 1;
  if (!makes_dv) {
    left = ds;
    right = q;
    grad = dk;
    right_strides = q_strides;
    grad_strides = dk_strides;
    grad_dim = head_dim;
    scale = score.scale;
  }
  right += offset_of(right_strides, batch_index, 0, q_begin);
  grad += offset_of(grad_strides, batch_index, head_kv, k_start);

  for (int d_start = 0; d_start < grad_dim; d_start += BLOCK) {
    // 3. Start dk and dv
    Acc acc[OWN][OWN] = {};
    for (int64 head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      // 4c. dv += p^T dout, in a block that makes dv
      // 4e. dk += ds^T q, in a block that makes dk
      int64 rows_before = (batch_index * heads_q + head) * seqlen_q + q_begin;
      const Acc* left_tile = left + rows_before * seqlen_k + k_start;
      const T* right_tile = right + head * right_strides.head + d_start;
      matmul_tile<BLOCK, BLOCK_K, 1, 0>(acc, left_tile, seqlen_k, right_tile, right_strides.row,
                                        rows, grad_dim - d_start, q_rows, a_smem, b_smem);
    }

    // 5. Scale and store
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        int row = y + i * MATMUL_SIDE;
        int d = d_start + x + j * MATMUL_SIDE;
        if (row < rows && d < grad_dim) {
          grad[row * grad_strides.row + d] = from_acc<T>(scale * acc[i][j]);
        }
      }
    }
  }
}
