// vector_add_vec4: the sum of two arrays at the speed of the memory.
//
//   out[i] = a[i] + b[i]
//
// A GPU moves memory fastest in 16-byte accesses with many of them under way, so each thread first
// starts all its loads, UNROLL from each array, and only then adds and stores.
//
// Work split:    a block takes UNROLL * blockDim.x vectors of 16 bytes at a time, then strides over
//                the grid; elements before the first and after the last vector go one a thread
// Shared memory: none
// Registers:     2 * UNROLL vectors
// Twin:          numba_kernels/vector_add_vec4.py
// Launched by:   workbench/launchers.py, vector_add_vec4
#include "common.cuh"

// Where element i of a C-contiguous array of this shape lies in one with these strides.
__device__ __forceinline__ int64 strided_offset(int64 i, Shape4 shape, Strides4 strides) {
  int64 rows = i / shape.col;
  int64 heads = rows / shape.row;
  int64 batches = heads / shape.head;
  return batches * strides.batch + (heads - batches * shape.head) * strides.head +
         (rows - heads * shape.row) * strides.row + (i - rows * shape.col) * strides.col;
}

template <typename T, int STRIDED, int UNROLL>
__global__ void __launch_bounds__(1024)
    vector_add_vec4(const T* a,  // shape; contiguous unless STRIDED
                    const T* b,
                    T* out,
                    int64 size,
                    Shape4 shape,  // read only if STRIDED, as are the strides
                    Strides4 a_strides,
                    Strides4 b_strides,
                    Strides4 out_strides) {
  using Acc = acc_t<T>;
  constexpr int LENGTH = vec_length<T>();
  int64 threads = int64(gridDim.x) * blockDim.x;
  int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x;

  // 1. How many elements come before the first whole vector: all, if the addresses do not
  //    reach a multiple of 16 together
  uint64 address = reinterpret_cast<uint64>(out);
  bool together = !STRIDED && (reinterpret_cast<uint64>(a) - address) % 16 == 0 &&
                  (reinterpret_cast<uint64>(b) - address) % 16 == 0;
  int64 head = together ? min(size, int64((0 - address) % 16 / sizeof(T))) : size;
  int64 vectors = (size - head) / LENGTH;

  // 2. Add whole vectors
  if (!STRIDED) {
#pragma unroll 1  // most threads walk once: registers are worth more
    for (int64 tile = blockIdx.x; tile * blockDim.x * UNROLL < vectors; tile += gridDim.x) {
      int64 first = tile * blockDim.x * UNROLL + threadIdx.x;
      Acc a_frag[UNROLL][LENGTH];
      Acc b_frag[UNROLL][LENGTH];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        int64 vector = first + u * blockDim.x;
        if (vector < vectors) {
          load16(a_frag[u], a + head + vector * LENGTH);
          load16(b_frag[u], b + head + vector * LENGTH);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        int64 vector = first + u * blockDim.x;
        if (vector < vectors) {
#pragma unroll
          for (int i = 0; i < LENGTH; ++i) a_frag[u][i] += b_frag[u][i];
          store16(out + head + vector * LENGTH, a_frag[u]);
        }
      }
    }
  }

  // 3. Add the elements outside of them
  for (int64 single = thread; single < size - vectors * LENGTH; single += threads) {
    int64 i = single < head ? single : single + vectors * LENGTH;
    if (STRIDED) {
      Acc sum = to_acc(a[strided_offset(i, shape, a_strides)]) +
                to_acc(b[strided_offset(i, shape, b_strides)]);
      out[strided_offset(i, shape, out_strides)] = from_acc<T>(sum);
    } else {
      out[i] = from_acc<T>(to_acc(a[i]) + to_acc(b[i]));
    }
  }
}
