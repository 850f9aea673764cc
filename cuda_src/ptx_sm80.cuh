// One function per instruction, named after it: asynchronous copies, new in sm_80, and the ordered
// loads and stores that blocks use to wait for each other (sm_70). Twin: numba_kernels/ptx_sm80.py
#pragma once

#include "common.cuh"

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return uint32(__cvta_generic_to_shared(pointer));
}

// Copies BYTES (4, 8 or 16) from global to shared memory without passing through registers; both
// addresses must be multiples of BYTES. Where exists is false nothing is read and zeros are
// written. The copy is done for the thread that started it after cp_async_wait_all, for others only
// after a barrier that follows.
template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool exists) {
  int bytes = exists ? BYTES : 0;
  if constexpr (BYTES == 16) {  // past L1: nobody else on this multiprocessor wants it
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "n"(BYTES)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
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

// Adds one and returns what was there.
__device__ __forceinline__ int atom_inc(int* pointer) { return atomicAdd(pointer, 1); }
