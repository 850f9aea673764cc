// attention_row_stats: what Hopper's backwards know of a query row, two at a time, and
// zeros for it to add to and to count on.
//
//   delta[row] = rowsum(dout * out) - dlse[row]
//   stats[row pair] = lse[0] * log2(e), lse[1] * log2(e), delta[0], delta[1]
//   dq_acc = 0,  turns = 0
//
// So laid out, the four numbers that a thread needs for its two queries are one access. Rows are
// padded to whole tiles, with lse = inf: there, and where a row sees no key, p = exp(s - lse) is 0.
//
// Work split:    HEAD_DIM / 8 threads take a row, 16 bytes each, and add up by shuffles
// Shared memory: none
// Registers:     a handful
// Twin:          numba_kernels/attention_row_stats.py
// Launched by:   workbench/launchers.py, attention_flash_wgmma, first of its backward
#include "ptx_sm80.cuh"

template <typename T, int BLOCK_M, int HEAD_DIM, int ADDERS>
__global__ void attention_row_stats(const T* dout,         // (batch, heads_q, seqlen_q, head_dim_v)
                                    const T* out,          // (batch, heads_q, seqlen_q, head_dim_v)
                                    const acc_t<T>* lse,   // (batch, heads_q, seqlen_q), contiguous
                                    const acc_t<T>* dlse,  // the same, or null
                                    acc_t<T>* stats,   // (batch, heads_q, query tiles, BLOCK_M * 2)
                                    acc_t<T>* dq_acc,  // (batch, heads_q, tiles, BLOCK_M, HEAD_DIM)
                                    int* turns,  // 1 + (batch, heads_q, tiles, ADDERS), or null
                                    Strides dout_strides,
                                    Strides out_strides,
                                    int64 batch,
                                    int64 heads_q,
                                    int64 seqlen_q,
                                    int64 head_dim_v) {
  constexpr int LANES = HEAD_DIM / 8;
  griddepcontrol_launch_dependents();
  uint32 index = blockIdx.x * blockDim.x + threadIdx.x;  // each is of 32 bytes: 2^32 fit nowhere
  uint32 rows = cdiv(uint32(seqlen_q), uint32(BLOCK_M)) * BLOCK_M;
  uint32 row = index / LANES % rows;
  uint32 head = index / LANES / rows;   // of all batches
  if (head >= batch * heads_q) return;  // the whole warp
  int col = int(index % LANES) * 8;

  // 1. delta = rowsum(dout * out)
  float sum = 0;
  if (row < seqlen_q) {
    uint32 batch_index = head / uint32(heads_q), its_head = head % uint32(heads_q);
    dout += offset_of(dout_strides, batch_index, its_head, row) + col;
    out += offset_of(out_strides, batch_index, its_head, row) + col;
    if (col + 8 <= head_dim_v) {
      float x[8], y[8];
      load16(x, dout);
      load16(y, out);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
    } else {
      for (int i = 0; col + i < head_dim_v; ++i) sum += to_acc(dout[i]) * to_acc(out[i]);
    }
  }
  sum = warp_sum<LANES>(sum);

  // 2. Zero dq_acc: eight elements a thread
  *reinterpret_cast<float4*>(dq_acc + int64(index) * 4) = make_float4(0, 0, 0, 0);
  int64 threads = batch * heads_q * rows * LANES;
  *reinterpret_cast<float4*>(dq_acc + (threads + index) * 4) = make_float4(0, 0, 0, 0);

  // 3. Store
  if (col != 0) return;
  if (turns && index == 0) turns[0] = 0;
  if (turns && row % BLOCK_M < ADDERS) {
    turns[1 + index / LANES / BLOCK_M * ADDERS + row % BLOCK_M] = 0;
  }
  float row_lse = INF;
  if (row < seqlen_q) {
    int64 at = head * seqlen_q + row;
    row_lse = lse[at] == -INF ? INF : lse[at] * LOG2E;
    if (dlse) sum -= dlse[at];
  }
  stats += (int64(head) * rows + row / 2 * 2) * 2 + row % 2;
  stats[0] = row_lse;
  stats[2] = sum;
}
