// One tile of a matrix product, through shared memory. Twin: numba_kernels/matmul.py
//
//   acc += a b        a: rows x depth,  b: depth x cols, both in global memory
//
// A block of 256 threads owns BLOCK x BLOCK results, in registers: thread (y, x) of 16 x 16 keeps
// rows y, y + 16, ... and columns x, x + 16, ... of them. The depth is walked in steps of BLOCK_K:
// the block copies that much of a and of b to shared memory, where it is then read 16 times.
//
//                    b_smem   x . x . x . x .      thread (y, x), here of 2 x 2, reads the marked
//                             x . x . x . x .      elements, BLOCK / 16 of either operand for each
//     a_smem  y y             * . * . * . * .      step of the depth, and makes a product of each
//             . .             . . . . . . . .      pair
//             y y     acc     * . * . * . * .
//             . .             . . . . . . . .
//
// In shared memory both operands lie depth first, with a gap of one element after each BLOCK: so
// threads that copy neighbours along the depth write to different banks.
#pragma once

#include "common.cuh"

constexpr int MATMUL_THREADS = 256;
constexpr int MATMUL_SIDE = 16;

// tile[d][i] = element d of vector i of source, or 0 where that does not exist. With DEPTH_INNER
// the elements of a vector are neighbours in memory, else equal elements of all vectors are; stride
// leads from one such run to the next.
template <int BLOCK, int BLOCK_K, int DEPTH_INNER, typename T>
__device__ __forceinline__ void load_operand(acc_t<T> (&tile)[BLOCK_K][BLOCK + 1],
                                             const T* source,
                                             int64 stride,
                                             int vectors,
                                             int depth) {
  constexpr int RUN = DEPTH_INNER ? BLOCK_K : BLOCK;
  constexpr int STEP = MATMUL_THREADS / RUN;
  int along = threadIdx.x % RUN;  // neighbouring threads read neighbours
  const T* from = source + threadIdx.x / RUN * stride + along;
#pragma unroll
  for (int run = threadIdx.x / RUN; run < BLOCK * BLOCK_K / RUN; run += STEP) {
    int i = DEPTH_INNER ? run : along;
    int d = DEPTH_INNER ? along : run;
    bool exists = i < vectors && d < depth;
    tile[d][i] = exists ? to_acc(*from) : 0;
    from += STEP * stride;
  }
}

// A_TRANSPOSED: a lies in memory as depth x rows; B_TRANSPOSED: b lies there as cols x depth. All
// threads of the block must call. A barrier comes first, so a and b may be what they just wrote.
template <int BLOCK, int BLOCK_K, int A_TRANSPOSED, int B_TRANSPOSED, typename A, typename B>
__device__ __forceinline__ void matmul_tile(
    acc_t<A> (&acc)[BLOCK / MATMUL_SIDE][BLOCK / MATMUL_SIDE],
    const A* a,
    int64 a_stride,
    const B* b,
    int64 b_stride,
    int rows,
    int cols,
    int depth,
    acc_t<A> (&a_smem)[BLOCK_K][BLOCK + 1],
    acc_t<A> (&b_smem)[BLOCK_K][BLOCK + 1]) {
  constexpr int OWN = BLOCK / MATMUL_SIDE;
  int y = threadIdx.x / MATMUL_SIDE;
  int x = threadIdx.x % MATMUL_SIDE;
  for (int d_start = 0; d_start < depth; d_start += BLOCK_K) {
    const A* a_step = a + (A_TRANSPOSED ? d_start * a_stride : d_start);
    const B* b_step = b + (B_TRANSPOSED ? d_start : d_start * b_stride);
    __syncthreads();  // the last step's operands have been read
    load_operand<BLOCK, BLOCK_K, !A_TRANSPOSED>(a_smem, a_step, a_stride, rows, depth - d_start);
    load_operand<BLOCK, BLOCK_K, B_TRANSPOSED>(b_smem, b_step, b_stride, cols, depth - d_start);
    __syncthreads();  // these are complete
                      // Unrolled it would not fit in 128 registers
#pragma unroll 1
    for (int d = 0; d < BLOCK_K; ++d) {
      acc_t<A> a_frag[OWN], b_frag[OWN];
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        a_frag[i] = a_smem[d][y + i * MATMUL_SIDE];
        b_frag[i] = b_smem[d][x + i * MATMUL_SIDE];
      }
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) acc[i][j] += a_frag[i] * b_frag[j];
      }
    }
  }
}
