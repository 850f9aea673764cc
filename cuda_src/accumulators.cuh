// Sums that are kept in global memory as they lie in registers.
// Twin: numba_kernels/accumulators.py
//
// They are accumulators of 16 x 8 (ptx_sm80.cuh, mma_m16n8k16), four floats of each lane after each
// other: so every addition to one is one access, and the lanes' accesses lie side by side.
#pragma once

#include "common.cuh"

// Where the sums of a row of an accumulator begin: two floats of four lanes.
__device__ __forceinline__ int sums_of_row(int row) { return row % 8 * 16 + row / 8 * 2; }

// Stores eight sums of a row, times scale; `cols` of the columns exist.
template <typename T>
__device__ __forceinline__ void store_sums(T* to, const float* sums, float scale, int cols) {
  float x[8];
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    float2 pair = *reinterpret_cast<const float2*>(sums + 4 * lane);
    x[2 * lane] = pair.x * scale;
    x[2 * lane + 1] = pair.y * scale;
  }
  if (cols >= 8) {
    store16(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < cols) to[i] = from_acc<T>(x[i]);
    }
  }
}
