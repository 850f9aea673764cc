// attention_row_stats: what Hopper's backwards subtract for a query row, and counters for them.
//
//   delta[row] = rowsum(dout * out) - dlse[row]
//   stats[tile] = -lse / scale of its rows, then -delta of its rows
//   turns = 0
//
// Sums of q k^T and of dout v^T start from those (warpgroups, start_nt_from). Then no thread reads
// them, which would take a twelfth of the time of shared memory, what bounds those kernels. Each is
// the sum of three bfloat16, in 16 bytes: they hold the 24 bits of a float. Rows are padded to
// whole tiles: there, and where a row sees no key, scores are hidden whatever lse is.
//
// Work split:    HEAD_DIM / 8 threads take a row, 16 bytes each, and add up by shuffles
// Shared memory: none
// Registers:     a handful
// Twin:          numba_kernels/attention_row_stats.py
// Launched by:   workbench/launchers.py, attention_flash_wgmma, first of its backward
#include "ptx_sm80.cuh"

// Three bfloat16 that add up to x, and zeros.
__device__ __forceinline__ void store_three_bfloat16(uint4* to, float x) {
  uint32 term[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    term[i] = cvt_rn_x2<__nv_bfloat16>(x, 0);
    x -= cvt_first<__nv_bfloat16>(term[i]);
  }
  *to = make_uint4(term[0] | term[1] << 16, term[2], 0, 0);
}

template <typename T, int BLOCK_M, int HEAD_DIM, int ADDERS>
__global__ void attention_row_stats(const T* dout,         // (batch, heads_q, seqlen_q, head_dim_v)
                                    const T* out,          // (batch, heads_q, seqlen_q, head_dim_v)
                                    const acc_t<T>* lse,   // (batch, heads_q, seqlen_q), contiguous
                                    const acc_t<T>* dlse,  // the same, or null
                                    acc_t<T>* stats,  // (batch, heads_q, query tiles, BLOCK_M * 8)
                                    int* turns,       // 1 + (ADDERS, batch, heads_q, query tiles)
                                    Strides dout_strides,
                                    Strides out_strides,
                                    int64 batch,
                                    int64 heads_q,
                                    int64 seqlen_q,
                                    int64 head_dim_v,
                                    double scale) {
  constexpr int LANES = HEAD_DIM / 8;
  griddepcontrol_launch_dependents();
  uint32 index = blockIdx.x * blockDim.x + threadIdx.x;  // of 32 bytes of dq_acc: 2^32 fit nowhere
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

  // 2. Store
  if (col != 0) return;
  uint32 tile = index / LANES / BLOCK_M, tiles = uint32(batch * heads_q) * (rows / BLOCK_M);
  if (index == 0) turns[0] = 0;
  if (row % BLOCK_M < ADDERS) turns[1 + row % BLOCK_M * tiles + tile] = 0;
  float lse_over_scale = 0;
  if (row < seqlen_q) {
    int64 at = head * seqlen_q + row;
    lse_over_scale = lse[at] / float(scale);
    if (dlse) sum -= dlse[at];
  }
  uint4* of_tile = reinterpret_cast<uint4*>(stats) + int64(tile) * (BLOCK_M * 2);
  of_tile += row % BLOCK_M;
  store_three_bfloat16(of_tile, -lse_over_scale);
  store_three_bfloat16(of_tile + BLOCK_M, -sum);
}
