// vector_add: the first kernel to read. One thread adds one element.
//
//   out[i] = a[i] + b[i]
//
// Work split:    thread i of the whole grid takes element i
// Shared memory: none
// Registers:     a handful
// Twin:          numba_kernels/vector_add.py
// Launched by:   workbench/launchers.py, vector_add
#include "common.cuh"

template <typename T>
__global__ void vector_add(const T* a,    // (size,)
                           const T* b,    // (size,)
                           T* out,        // (size,)
                           int64 size) {  // may pass 2^31
  // 1. Which element is ours
  int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;

  // 2. Add; the last block may reach past the end
  if (i < size) {
    out[i] = from_acc<T>(to_acc(a[i]) + to_acc(b[i]));
  }
}
