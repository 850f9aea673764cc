// attention_merge: one result from partial ones over disjoint keys.
//
//   lse = log(sum(exp(lse_parts))),  out = sum(exp(lse_parts - lse) * out_parts)
//
// Work split:    a thread takes an element of out and adds up all of its parts
// Shared memory: none
// Registers:     a handful
// Twin:          numba_kernels/attention_merge.py
// Launched by:   workbench/launchers.py, attention_flash_mma
#include "scores.cuh"

template <typename T, int HEAD_DIM_V>
__global__ void attention_merge(const acc_t<T>* out_parts,  // (splits, rows of out, HEAD_DIM_V)
                                const acc_t<T>* lse_parts,  // (splits, rows of out)
                                T* out,         // (batch, heads_q, seqlen_q, head_dim_v)
                                acc_t<T>* lse,  // (batch, heads_q, seqlen_q), contiguous
                                Strides out_strides,
                                int64 batch,
                                int64 heads_q,
                                int64 seqlen_q,
                                int64 head_dim_v,
                                int64 splits) {
  using Acc = acc_t<T>;
  int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  int64 rows = batch * heads_q * seqlen_q;
  int64 row = index / HEAD_DIM_V;
  int col = int(index % HEAD_DIM_V);
  if (row >= rows || col >= head_dim_v) return;

  // 1. lse = log(sum(exp(lse_parts)))
  Acc most = -INF, sum = 0, acc = 0;
#pragma unroll 8
  for (int64 split = 0; split < splits; ++split) most = max(most, lse_parts[split * rows + row]);
  Acc subtrahend = finite_or_zero(most);

  // 2. out = sum(exp(lse_parts - lse) * out_parts)
#pragma unroll 8
  for (int64 split = 0; split < splits; ++split) {
    Acc weight = exp_of(lse_parts[split * rows + row] - subtrahend);
    sum += weight;
    acc += weight * out_parts[split * rows * HEAD_DIM_V + index];
  }
  int64 head = row / seqlen_q;  // of all batches
  out += offset_of(out_strides, head / heads_q, head % heads_q, row % seqlen_q);
  out[col] = from_acc<T>(sum == 0 ? Acc(0) : acc / sum);
  if (col == 0) lse[row] = most + log(sum);
}
