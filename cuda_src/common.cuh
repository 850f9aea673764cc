// Types, constants and small helpers that every kernel uses. Twin: numba_kernels/common.py
//
// T is the type arrays are stored in: float, double, __half or __nv_bfloat16. Arithmetic is done in
// acc_t<T>, double for double and else float; to_acc(x) and from_acc<T>(x) lead there and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccOf<T>::type;

template <typename T>
__device__ __forceinline__ acc_t<T> to_acc(T x) {
  return acc_t<T>(x);
}

template <typename T>
__device__ __forceinline__ T from_acc(acc_t<T> x) {
  return T(x);
}

// Distances in elements between neighbours along each axis. Element (b, h, i, j) of an attention
// array lies at b * batch + h * head + i * row + j: the last axis always has stride one.
struct Strides {
  int64 batch, head, row;
};

__device__ __forceinline__ int64 offset_of(Strides strides,
                                           int64 batch_index,
                                           int64 head,
                                           int64 row) {
  return batch_index * strides.batch + head * strides.head + row * strides.row;
}

// The same with a free last axis, for masks and biases; 0 along every axis that is broadcast.
struct Strides4 {
  int64 batch, head, row, col;
};

struct Shape4 {
  int64 batch, head, row, col;
};

template <typename I>
__host__ __device__ constexpr I cdiv(I a, I b) {
  return (a + b - 1) / b;
}

// A head (of all batches) and a tile of it.
struct HeadTile {
  uint32 head, tile;
};

// Blocks go through `at_a_time` heads tile by tile, the same tile of all of these heads after each
// other, and then on to the next heads: so what the blocks of a moment read is little enough to
// stay in the L2 cache.
__device__ __forceinline__ HeadTile head_tile(uint32 index,
                                              uint32 tiles,
                                              uint32 heads_total,
                                              uint32 at_a_time) {
  uint32 first_head = index / (at_a_time * tiles) * at_a_time;
  uint32 heads = min(at_a_time, heads_total - first_head);
  uint32 rest = index - first_head * tiles;
  return {first_head + rest % heads, rest / heads};
}

// exp(x) by the hardware's exp2, right to two units in the last place; below 2^-126 it is 0.
__device__ __forceinline__ float exp_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2E));
  return y;
}
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

// Reductions over groups of LANES neighbouring threads of a warp; LANES is a power of two, and
// every lane of the warp must call. Each lane gets the result of its own group.
template <int LANES = 32, typename Acc>
__device__ __forceinline__ Acc warp_max(Acc x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

template <int LANES = 32, typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Sixteen bytes of elements, moved by one instruction and converted on the way: x, usually in
// registers, is an array of vec_length<T>() values of type T or acc_t<T>. The addresses of source
// and target must be multiples of 16, and a target of 16-bit elements lies in global memory.
template <typename T>
__host__ __device__ constexpr int vec_length() {
  return 16 / sizeof(T);
}

template <typename T>
union Vec16 {
  uint4 bits;
  T elements[vec_length<T>()];
};

template <typename X, typename T>
__device__ __forceinline__ void load16(X* x, const T* source) {
  Vec16<T> vec;
  vec.bits = *reinterpret_cast<const uint4*>(source);
#pragma unroll
  for (int i = 0; i < vec_length<T>(); ++i) x[i] = X(vec.elements[i]);
}

template <typename X, typename T>
__device__ __forceinline__ void store16(T* target, const X* x) {
  Vec16<T> vec;
#pragma unroll
  for (int i = 0; i < vec_length<T>(); ++i) vec.elements[i] = T(x[i]);
  if constexpr (sizeof(T) == 2) {  // an assignment may become four stores of two elements
    __stwb(reinterpret_cast<uint4*>(target), vec.bits);
  } else {
    *reinterpret_cast<uint4*>(target) = vec.bits;
  }
}
