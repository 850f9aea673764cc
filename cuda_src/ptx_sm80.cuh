// One function per instruction, named after it: asynchronous copies and tensor cores as of sm_80,
// the ordered loads and stores that blocks use to wait for each other (sm_70), and what launches
// wait for each other with (sm_90). What they do in full: the PTX ISA document, under each name.
// Twin: numba_kernels/ptx_sm80.py
#pragma once

#include "common.cuh"

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return uint32(__cvta_generic_to_shared(pointer));
}

// Copies BYTES (4, 8 or 16) from global to shared memory without passing through registers; both
// addresses must be multiples of BYTES. Where exists is false nothing is read and zeros are
// written. The copy is done for the thread that started it after cp_async_wait_all,
// for others only after a barrier that follows.
template <int BYTES>
__device__ __forceinline__ void cp_async(uint32 shared, const void* global, bool exists) {
  if constexpr (BYTES == 16) {  // past L1: nobody else on this multiprocessor wants it
    asm volatile(
        "{.reg .pred absent; setp.eq.s32 absent, %2, 0; "
        "cp.async.cg.shared.global [%0], [%1], 16, absent;}" ::"r"(shared),
        "l"(global), "r"(int(exists))
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred absent; setp.eq.s32 absent, %2, 0; "
        "cp.async.ca.shared.global [%0], [%1], %3, absent;}" ::"r"(shared),
        "l"(global), "r"(int(exists)), "n"(BYTES)
        : "memory");
  }
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Writes a word four times; the address must be a multiple of 16.
__device__ __forceinline__ void st_shared_x4(uint32 shared, uint32 word) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(word) : "memory");
}

// What another block wrote before its st_release is seen after an ld_acquire that reads its value.
__device__ __forceinline__ int ld_acquire(const int* pointer) {
  int value;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

__device__ __forceinline__ void st_release(int* pointer, int value) {
  asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Puts `value` where `expected` is, and returns what was there; acquires as ld_acquire does.
__device__ __forceinline__ int atom_cas_acquire(int* pointer, int expected, int value) {
  int old;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(pointer), "r"(expected), "r"(value)
               : "memory");
  return old;
}

// Adds one and returns what was there.
__device__ __forceinline__ int atom_inc(int* pointer) { return atomicAdd(pointer, 1); }

// A launch may be allowed to start before the one in front of it has ended. From
// griddepcontrol_launch_dependents on, once every block of the first has come there, the second
// may; griddepcontrol_wait waits until the first has ended and all that it wrote is there. All in
// front of the first has ended then too, but only if each of its blocks has waited as well. Before
// sm_90 no launch is so.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane i points to the 16 bytes of row
// i % 8 of matrix i / 8, and gets the elements marked with its number, two in a register:
//
//     lane |  0   0   1   1   2   2   3   3     register m holds matrix m. With trans the drawing
//          |  4   4   5   5   6   6   7   7     is of the transpose: the lane gets elements below
//          |  ...                               each other.
//          | 28  28  29  29  30  30  31  31
__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// c += a b on the tensor cores: a is 16 x 16, b 16 x 8, both of type T, and c 16 x 8 of float. With
// g = lane / 4 and t = lane % 4 a lane holds
//
//     a   | a[0]: row g,     columns 2t, 2t + 1 | a[2]: row g,     columns 2t + 8, 2t + 9
//         | a[1]: row g + 8, columns 2t, 2t + 1 | a[3]: row g + 8, columns 2t + 8, 2t + 9
//     b   | b0: rows 2t, 2t + 1, column g       | b1: rows 2t + 8, 2t + 9, column g
//     c   | c[0], c[1]: row g, columns 2t, 2t + 1
//         | c[2], c[3]: row g + 8, the same columns
//
// so two neighbours of c, rounded and packed, are an a; and ldmatrix gives a and b their layout.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4],
                                             const uint32 (&a)[4],
                                             uint32 b0,
                                             uint32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4],
                                                     const uint32 (&a)[4],
                                                     uint32 b0,
                                                     uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4],
                                                            const uint32 (&a)[4],
                                                            uint32 b0,
                                                            uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to T in one register, the first in its lower half.
template <typename T>
__device__ __forceinline__ uint32 cvt_rn_x2(float first, float second);

template <>
__device__ __forceinline__ uint32 cvt_rn_x2<__half>(float first, float second) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

template <>
__device__ __forceinline__ uint32 cvt_rn_x2<__nv_bfloat16>(float first, float second) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// The first or the second of two elements in a register, as a float.
template <typename T>
__device__ __forceinline__ float cvt_first(uint32 pair) {
  return to_acc(__builtin_bit_cast(T, static_cast<unsigned short>(pair)));
}

template <typename T>
__device__ __forceinline__ float cvt_second(uint32 pair) {
  return to_acc(__builtin_bit_cast(T, static_cast<unsigned short>(pair >> 16)));
}

template <>  // a bfloat16 is the upper half of a float, and lies there already
__device__ __forceinline__ float cvt_second<__nv_bfloat16>(uint32 pair) {
  return __builtin_bit_cast(float, pair & 0xffff0000u);
}

// 2^x and the logarithm to base 2, right to two units in the last place; subnormal results are 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, right to a unit in the last place.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Adds x to four floats in global memory, in one access from sm_90 on; the address must be a
// multiple of 16. Each addition is atomic.
__device__ __forceinline__ void red_add_x4(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target + i), "f"(x[i]) : "memory");
  }
#endif
}
