// attention_dq: rounds the sum that a backward on tensor cores has formed, and puts it in rows.
//
//   dq = scale * dq_acc, or 0 in a query tile to which nobody has added
//
// Of several adders' counters (turns) the first one's are read: all have added to the same tiles.
// dq_acc holds accumulators of 16 x 8 (ptx_sm80.cuh, mma_m16n8k16), four floats of each lane after
// each other: so every addition to it was one access, and the lanes' accesses lay side by side.
//
// Work split:    a thread takes two rows, 8 apart, of an accumulator: 16 floats after each other
// Shared memory: none
// Registers:     a handful
// Twin:          numba_kernels/attention_dq.py
// Launched by:   workbench/launchers.py, attention_flash_mma and attention_flash_wgmma
#include "ptx_sm80.cuh"

template <typename T, int BLOCK_M, int HEAD_DIM>
__global__ void attention_dq(const acc_t<T>* dq_acc,  // (batch, heads_q, query tiles, BLOCK_M, ..)
                             const int* turns,  // 1 + (.., batch, heads_q, query tiles), or null
                             T* dq,             // (batch, heads_q, seqlen_q, head_dim)
                             Strides dq_strides,
                             int64 batch,
                             int64 heads_q,
                             int64 seqlen_q,
                             int64 head_dim,
                             double scale) {
  constexpr int ACROSS = HEAD_DIM / 8;                   // accumulators beside each other
  uint32 index = blockIdx.x * blockDim.x + threadIdx.x;  // each is of 64 bytes: 2^32 fit nowhere
  uint32 accumulator = index / 8;
  uint32 down = cdiv(uint32(seqlen_q), uint32(BLOCK_M)) * (BLOCK_M / 16);  // below each other
  int row = accumulator / ACROSS % down * 16 + index % 8;
  int col = accumulator % ACROSS * 8;
  uint32 head = accumulator / ACROSS / down;  // of all batches
  if (head >= batch * heads_q || col >= head_dim) return;
  dq += offset_of(dq_strides, head / uint32(heads_q), head % uint32(heads_q), row) + col;

  // 1. dq = scale * dq_acc
  griddepcontrol_wait();  // for the sum
  acc_t<T> x[16] = {};
  if (!turns || turns[1 + accumulator / ACROSS / (BLOCK_M / 16)] > 0) {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      load16(x + 4 * lane, dq_acc + int64(index) * 16 + 4 * lane);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    acc_t<T> y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = x[i / 2 * 4 + 2 * half + i % 2] * acc_t<T>(scale);
    if (row + 8 * half < seqlen_q) {
      T* to = dq + 8 * half * dq_strides.row;
      if (col + 8 <= head_dim) {
        store16(to, y);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (col + i < head_dim) to[i] = from_acc<T>(y[i]);
        }
      }
    }
  }
}
