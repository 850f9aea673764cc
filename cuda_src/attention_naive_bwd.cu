// attention_naive_bwd: the gradients of attention, from global memory alone.
//
//   p = exp(s - lse),  ds = p * (dout v^T - delta),  dv = p^T dout,  dk = scale ds^T q,
//   dq = scale ds k
//
// dq runs first and leaves p and ds in two N x N matrices, of which dk/dv then reads columns. The
// steps carry the numbers that they have in all backwards; the others come with tiles.
//
// Work split:    dq: a warp takes a query row; a lane takes every 32nd key, then every 32nd column
//                dk/dv: a block takes a key row, a thread a column; it adds up over all query rows
//                of all query heads that share the key
// Shared memory: none
// Registers:     a few sums a lane
// Twin:          numba_kernels/attention_naive_bwd.py
// Launched by:   workbench/launchers.py, attention_naive, after attention_delta
#include "scores.cuh"

template <typename T, int FEATURES>
__global__ void attention_naive_bwd_dq(const T* dout,  // (batch, heads_q, seqlen_q, head_dim_v)
                                       const T* q,     // (batch, heads_q, seqlen_q, head_dim)
                                       const T* k,     // (batch, heads_kv, seqlen_k, head_dim)
                                       const T* v,     // (batch, heads_kv, seqlen_k, head_dim_v)
                                       const acc_t<T>* lse,    // (batch, heads_q, seqlen_q)
                                       const acc_t<T>* delta,  // (batch, heads_q, seqlen_q)
                                       acc_t<T>* p,   // (batch, heads_q, seqlen_q, seqlen_k)
                                       acc_t<T>* ds,  // (batch, heads_q, seqlen_q, seqlen_k)
                                       T* dq,         // (batch, heads_q, seqlen_q, head_dim)
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

  // 1. Which query rows are ours
  int64 warp = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  int lane_id = threadIdx.x % 32;
  if (warp >= batch * heads_q * seqlen_q) return;  // the whole warp
  int row = warp % seqlen_q;
  int64 head = warp / seqlen_q % heads_q;
  int64 head_kv = head / (heads_q / heads_kv);
  int64 batch_index = warp / seqlen_q / heads_q;
  dout += offset_of(dout_strides, batch_index, head, row);
  q += offset_of(q_strides, batch_index, head, row);
  k += offset_of(k_strides, batch_index, head_kv, 0);
  v += offset_of(v_strides, batch_index, head_kv, 0);
  dq += offset_of(dq_strides, batch_index, head, row);
  p += warp * seqlen_k;
  ds += warp * seqlen_k;
  Acc row_lse = finite_or_zero(lse[warp]);
  Acc row_delta = delta[warp];
  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int k_begin = first_key<FEATURES>(band, row);
  int k_end = last_key<FEATURES>(band, row + 1);

  for (int col = k_begin + lane_id; col < k_end; col += 32) {
    Acc p_col = 0;
    Acc ds_col = 0;
    if (sees<FEATURES>(score, band, batch_index, head, row, col)) {
      const T* key = k + col * k_strides.row;
      const T* value = v + col * v_strides.row;

      // 4b. p = exp(s - lse)
      Acc dot = 0;
      for (int64 d = 0; d < head_dim; ++d) dot += to_acc(q[d]) * to_acc(key[d]);
      Acc capped = capped_score<FEATURES>(score, dot);
      Acc s = biased_score<FEATURES>(score, capped, batch_index, head, row, col);
      p_col = exp_of(s - row_lse);

      // 4d. ds = p * (dout v^T - delta)
      Acc dp = 0;
      for (int64 d = 0; d < head_dim_v; ++d) dp += to_acc(dout[d]) * to_acc(value[d]);
      ds_col = uncapped_gradient<FEATURES>(score, p_col * (dp - row_delta), capped);
    }
    p[col] = p_col;
    ds[col] = ds_col;
  }
  __syncwarp();  // from here on a lane reads what others wrote

  for (int64 d = lane_id; d < head_dim; d += 32) {
    // 4f. dq += ds k
    Acc dq_acc = 0;
    for (int col = k_begin; col < k_end; ++col) {
      dq_acc += ds[col] * to_acc(k[col * k_strides.row + d]);
    }

    // 5. Scale and store
    dq[d] = from_acc<T>(Acc(score.scale) * dq_acc);
  }
}

template <typename T, int FEATURES>
__global__ void attention_naive_bwd_dkdv(
    const T* dout,       // (batch, heads_q, seqlen_q, head_dim_v)
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

  // 1. Which key rows are ours
  int col = int64(blockIdx.x) % seqlen_k;
  int64 head_kv = int64(blockIdx.x) / seqlen_k % heads_kv;
  int64 batch_index = int64(blockIdx.x) / seqlen_k / heads_kv;
  int64 group = heads_q / heads_kv;
  dk += offset_of(dk_strides, batch_index, head_kv, col);
  dv += offset_of(dv_strides, batch_index, head_kv, col);
  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int q_begin = first_query<FEATURES>(band, col);
  int q_end = last_query<FEATURES>(band, col + 1);

  for (int64 d = threadIdx.x; d < max(head_dim, head_dim_v); d += blockDim.x) {
    // 3. Start dk and dv
    Acc dk_acc = 0;
    Acc dv_acc = 0;

    for (int64 head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      const T* dout_head = dout + offset_of(dout_strides, batch_index, head, 0);
      const T* q_head = q + offset_of(q_strides, batch_index, head, 0);
      int64 rows = (batch_index * heads_q + head) * seqlen_q;
      for (int row = q_begin; row < q_end; ++row) {
        int64 at = (rows + row) * seqlen_k + col;

        // 4c. dv += p^T dout
        if (d < head_dim_v) dv_acc += p[at] * to_acc(dout_head[row * dout_strides.row + d]);

        // 4e. dk += ds^T q
        if (d < head_dim) dk_acc += ds[at] * to_acc(q_head[row * q_strides.row + d]);
      }
    }

    // 5. Scale and store
    if (d < head_dim_v) dv[d] = from_acc<T>(dv_acc);
    if (d < head_dim) dk[d] = from_acc<T>(Acc(score.scale) * dk_acc);
  }
}
