// attention_delta: what every backward subtracts from dp, computed once.
//
//   delta[row] = rowsum(dout * out) - dlse[row]
//
// Work split:    a warp takes a row: its lanes read neighbouring elements, then add up by shuffles
// Shared memory: none
// Registers:     a handful
// Twin:          numba_kernels/attention_delta.py
// Launched by:   workbench/launchers.py, first of every backward but attention_flash_wgmma's
#include "ptx_sm80.cuh"

template <typename T>
__global__ void attention_delta(const T* dout,         // (batch, heads_q, seqlen_q, head_dim_v)
                                const T* out,          // (batch, heads_q, seqlen_q, head_dim_v)
                                const acc_t<T>* dlse,  // (batch, heads_q, seqlen_q), or null
                                acc_t<T>* delta,       // (batch, heads_q, seqlen_q)
                                Strides dout_strides,
                                Strides out_strides,
                                int64 batch,
                                int64 heads_q,
                                int64 seqlen_q,
                                int64 head_dim_v) {
  using Acc = acc_t<T>;
  griddepcontrol_launch_dependents();
  // A block is of one head: so no division is of 64 bits, which takes a hundred instructions.
  uint32 warps = blockDim.x / 32, blocks = cdiv(uint32(seqlen_q), warps);
  uint32 head = blockIdx.x / blocks;  // of all batches
  uint32 row = blockIdx.x % blocks * warps + threadIdx.x / 32;
  int lane_id = threadIdx.x % 32;
  if (row >= seqlen_q) return;  // the whole warp
  dout += offset_of(dout_strides, head / uint32(heads_q), head % uint32(heads_q), row);
  out += offset_of(out_strides, head / uint32(heads_q), head % uint32(heads_q), row);

  // 1. delta = rowsum(dout * out)
  Acc sum = 0;
  for (int64 d = lane_id; d < head_dim_v; d += 32) sum += to_acc(dout[d]) * to_acc(out[d]);
  sum = warp_sum(sum);
  int64 at = head * seqlen_q + row;
  if (lane_id == 0) delta[at] = dlse ? sum - dlse[at] : sum;
}
