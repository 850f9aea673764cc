// attention_naive_fwd: attention as the formula reads, from global memory alone.
//
//   s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))
//
// The first attention kernel to read. It keeps a row of scores where the textbook has it, in an
// N x N matrix in global memory, and goes over it three times. The steps carry the numbers they
// have in all forwards; 2, 4a and 4c come with tiles.
//
// Work split:    a warp takes a query row; a lane takes every 32nd key, then every 32nd column
// Shared memory: none
// Registers:     a few sums a lane
// Twin:          numba_kernels/attention_naive_fwd.py
// Launched by:   workbench/launchers.py, attention_naive
#include "scores.cuh"

template <typename T, int FEATURES>
__global__ void attention_naive_fwd(const T* q,        // (batch, heads_q, seqlen_q, head_dim)
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

  // 1. Which rows are ours
  int64 warp = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  int lane_id = threadIdx.x % 32;
  if (warp >= batch * heads_q * seqlen_q) return;  // the whole warp
  int row = warp % seqlen_q;
  int64 head = warp / seqlen_q % heads_q;
  int64 head_kv = head / (heads_q / heads_kv);
  int64 batch_index = warp / seqlen_q / heads_q;
  q += offset_of(q_strides, batch_index, head, row);
  k += offset_of(k_strides, batch_index, head_kv, 0);
  v += offset_of(v_strides, batch_index, head_kv, 0);
  out += offset_of(out_strides, batch_index, head, row);
  scores += warp * seqlen_k;
  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int k_begin = first_key<FEATURES>(band, row);
  int k_end = last_key<FEATURES>(band, row + 1);

  // 4b. s = q k^T, masked
  Acc row_max = -INF;
  for (int col = k_begin + lane_id; col < k_end; col += 32) {
    Acc s = -INF;
    if (sees<FEATURES>(score, band, batch_index, head, row, col)) {
      const T* key = k + col * k_strides.row;
      Acc dot = 0;
      for (int64 d = 0; d < head_dim; ++d) dot += to_acc(q[d]) * to_acc(key[d]);
      s = score_of<FEATURES>(score, dot, batch_index, head, row, col);
    }
    scores[col] = s;
    row_max = max(row_max, s);
  }
  row_max = warp_max(row_max);

  // p = exp(s - row_max), in place: a lane reads back what it wrote
  Acc shift = finite_or_zero(row_max);
  Acc row_sum = 0;
  for (int col = k_begin + lane_id; col < k_end; col += 32) {
    Acc p = exp_of(scores[col] - shift);
    scores[col] = p;
    row_sum += p;
  }
  row_sum = warp_sum(row_sum);
  __syncwarp();  // from here on a lane reads what others wrote

  // 4d. acc += p v
  for (int64 d = lane_id; d < head_dim_v; d += 32) {
    Acc acc = 0;
    for (int col = k_begin; col < k_end; ++col) {
      acc += scores[col] * to_acc(v[col * v_strides.row + d]);
    }

    // 5. Normalise and store; a row that saw no key has a sum of 0
    out[d] = from_acc<T>(row_sum == 0 ? Acc(0) : acc / row_sum);
  }
  if (lane_id == 0) lse[warp] = row_sum == 0 ? Acc(-INF) : row_max + log(row_sum);
}
