// attention_merge: one result from partial ones over disjoint keys.
//
//   lse = log(sum(exp(lse_parts))),  out = sum(exp(lse_parts - lse) * out_parts)
//
// Work split:    a block takes a row of out; its threads share the columns, four each, and the
//                parts, which they merge among themselves in the end
// Shared memory: a row, its maximum and its sum from each group of threads
// Registers:     a handful
// Twin:          numba_kernels/attention_merge.py
// Launched by:   workbench/launchers.py, attention_flash_mma
#include "ptx_sm80.cuh"
#include "scores.cuh"

template <typename T, int HEAD_DIM_V, int THREADS>
__global__ void __launch_bounds__(THREADS)
    attention_merge(const acc_t<T>* out_parts,  // (splits, batch, heads_q, seqlen_q, HEAD_DIM_V)
                    const acc_t<T>* lse_parts,  // (splits, batch, heads_q, seqlen_q)
                    T* out,                     // (batch, heads_q, seqlen_q, head_dim_v)
                    acc_t<T>* lse,              // (batch, heads_q, seqlen_q), contiguous
                    Strides out_strides,
                    int64 batch,
                    int64 heads_q,
                    int64 seqlen_q,
                    int64 head_dim_v,
                    int64 splits) {
  using Acc = acc_t<T>;
  constexpr int COLS = HEAD_DIM_V / 4;    // threads across
  constexpr int GROUPS = THREADS / COLS;  // that take parts in turn
  constexpr int AT_ONCE = 8;              // parts under way a thread
  __shared__ __align__(16) Acc rows[GROUPS][HEAD_DIM_V];
  __shared__ Acc row_max[GROUPS], row_sum[GROUPS];
  int64 row = blockIdx.x, rows_total = batch * heads_q * seqlen_q;
  int group = threadIdx.x / COLS, col = threadIdx.x % COLS * 4;

  // 1. Merge the parts of each group
  griddepcontrol_wait();  // for them
  if (group < GROUPS) {
    Acc most = -INF, sum = 0, acc[4] = {};
    for (int64 first = group; first < splits; first += AT_ONCE * GROUPS) {
      Acc part_lse[AT_ONCE], part[AT_ONCE][4] = {}, new_max = most;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {  // all loads before the first use
        int64 index = (first + i * GROUPS) * rows_total + row;
        bool exists = first + i * GROUPS < splits;
        part_lse[i] = exists ? lse_parts[index] : -INF;
        if (exists) load16(part[i], out_parts + index * HEAD_DIM_V + col);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) new_max = max(new_max, part_lse[i]);
      Acc subtrahend = finite_or_zero(new_max);
      Acc rescale = exp_of(most - subtrahend);
      most = new_max;
      sum *= rescale;
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[j] *= rescale;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        Acc weight = exp_of(part_lse[i] - subtrahend);
        sum += weight;
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[j] += weight * part[i][j];
      }
    }
    store16(&rows[group][col], acc);
    if (col == 0) {  // all threads of the group have the same
      row_max[group] = most;
      row_sum[group] = sum;
    }
  }
  __syncthreads();

  // 2. Merge the groups
  uint32 head = uint32(row) / uint32(seqlen_q);  // of all batches
  out += offset_of(out_strides, head / uint32(heads_q), head % uint32(heads_q),
                   uint32(row) % uint32(seqlen_q));
  Acc most = -INF, sum = 0;
  for (int g = 0; g < GROUPS; ++g) most = max(most, row_max[g]);
  Acc subtrahend = finite_or_zero(most);
  for (int g = 0; g < GROUPS; ++g) sum += exp_of(row_max[g] - subtrahend) * row_sum[g];
  for (int d = threadIdx.x; d < head_dim_v; d += THREADS) {
    Acc total = 0;
    for (int g = 0; g < GROUPS; ++g) total += exp_of(row_max[g] - subtrahend) * rows[g][d];
    out[d] = from_acc<T>(sum == 0 ? Acc(0) : total / sum);
  }
  if (threadIdx.x == 0) lse[row] = most + log(sum);
}
