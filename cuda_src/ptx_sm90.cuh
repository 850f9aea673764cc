// One function per instruction, named after it: what sm_90 adds for tiles that are copied and
// multiplied in the background. In full: the PTX ISA document, under each name.
// Twin: numba_kernels/ptx_sm90.py
#pragma once

#include "ptx_sm80.cuh"

// ------------------------------------------------------------------------------ barriers in memory
//
// An mbarrier counts arrivals and bytes on their way. When `count` threads have arrived and no byte
// is missing, its phase ends and the next one begins. Waiters name the parity of the phase that
// they wait for: 0 for the first. To wait for parity 1 of a fresh barrier is to wait for nothing.

__device__ __forceinline__ void mbarrier_init(uint32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes barriers that were initialised here known to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and says that so many bytes are still to come in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32 barrier, int parity) {
  uint32 done;
  asm volatile(
      "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
      "selp.u32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32 barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// ---------------------------------------------------------------------------------- tensor copies

// What cuTensorMapEncodeTiled makes of an array: its address, shape and strides, and the box that
// one copy takes. A kernel hands it on and never looks into it.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

// Copies the box at (col, row, head, batch) of an array, elements outside of which are 0, and takes
// its bytes off the barrier's count. One thread starts it.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(uint32 shared,
                                                        const TensorMap& map,
                                                        uint32 barrier,
                                                        int col,
                                                        int row,
                                                        int head,
                                                        int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(col), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Copies a box the other way, without what would lie outside of the array. The copy belongs to a
// group of its thread's (cp_async_bulk_commit_group).
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const TensorMap& map,
                                                              uint32 shared,
                                                              int col,
                                                              int row,
                                                              int head,
                                                              int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared), "r"(col), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// ------------------------------------------------------------------------- copies of plain memory
//
// Addresses and sizes are multiples of 16 bytes. One thread starts a copy.

// Copies to shared memory, and takes the bytes off the barrier's count.
__device__ __forceinline__ void cp_async_bulk(uint32 shared,
                                              const void* global,
                                              int bytes,
                                              uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies the other way; the copy belongs to a group of its thread's (cp_async_bulk_commit_group).
__device__ __forceinline__ void cp_async_bulk_store(void* global, uint32 shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// Adds floats in shared memory to those at `global`; each addition is atomic.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* global, uint32 shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most GROUPS of this thread's groups are under way; or with _read, until all others
// have read their shared memory.
template <int GROUPS>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS) : "memory");
}

template <int GROUPS>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}

// Puts ordinary accesses to shared memory, or to global memory, and those of copies and of wgmmas
// in order, each before this on one side and after it on the other.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements, as ldmatrix_x4 (ptx_sm80.cuh) loads them.
__device__ __forceinline__ void stmatrix_x4(uint32 shared, const uint32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// -------------------------------------------------------------------------- products of warpgroups
//
// A wgmma multiplies a 64 x 16 by a 16 x N tile for the 128 threads of a warpgroup, in the
// background: between wgmma_commit_group and a wgmma_wait_group that leaves fewer groups under way,
// nobody may touch its registers or shared memory. Accumulators lie as those of mma_m16n8k16
// (ptx_sm80.cuh), 16 rows a warp.

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int GROUPS>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Keeps the waits that follow behind the instructions that x comes from. Without it they are moved
// to the front, since nothing there waits for them, and what was to be done meanwhile is done
// afterwards. No x is below -inf: nothing is ever stored.
__device__ __forceinline__ void pin(float x) {
  asm volatile(
      "{.reg .pred never; .reg .b32 nowhere; setp.lt.f32 never, %0, 0fFF800000; "
      "mov.b32 nowhere, 0; @never st.shared.f32 [nowhere], %0;}" ::"f"(x)
      : "memory");
}

// Keeps the compiler from moving what reads or writes these registers over this place.
template <int N>
__device__ __forceinline__ void register_fence(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int N>
__device__ __forceinline__ void register_fence(uint32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// x, of which the compiler now knows nothing: what a loop makes of it is made in the loop, and not
// ahead of it, to be kept in registers.
__device__ __forceinline__ uint32 opaque(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A copy of registers, to be read while a product reads `x`. The compiler cannot see that it is
// one, or it would have `x` itself read; ptxas, which may do that, makes no instruction of it.
template <int N>
__device__ __forceinline__ void register_copy(uint32 (&copy)[N], const uint32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(copy[i]) : "r"(x[i]));
}

// Where an operand lies in shared memory: tiles of rows of 128 bytes, swizzled as in fragments.cuh,
// the first at a multiple of 1024 bytes. Eight rows are 1024 bytes. Of an operand whose rows are
// the sums' axis (V), `leading` is the distance from 64 of its columns to the next 64. This is the
// lower half of its descriptor.
__device__ __forceinline__ uint32 wgmma_address(uint32 shared, int leading) {
  return uint32(leading >> 4) << 16 | (shared & 0x3ffff) >> 4;
}

// The descriptor of what lies `offset` bytes on. No address carries out of its field, so that the
// steps of a product are one addition apart: there is hardly time for more between two wgmmas.
__device__ __forceinline__ uint64 wgmma_descriptor(uint32 address, int offset) {
  uint64 swizzle_128 = uint64(1) << 62, stride = uint64(1024 >> 4) << 32;
  return swizzle_128 | stride | (address + (offset >> 4));
}

// The descriptor of an operand that is not swizzled: of its 8 x 8 matrices, each in 128 bytes, the
// next one along the sums' axis is `leading` bytes on, and the next one across it `stride`.
__device__ __forceinline__ uint64 wgmma_plain_descriptor(uint32 shared, int leading, int stride) {
  return uint64(stride >> 4) << 32 | uint32(leading >> 4) << 16 | (shared & 0x3ffff) >> 4;
}

// acc (+)= a b, where a is 64 x 16 and b 16 x N. Both lie in shared memory with the sums' axis
// along their rows (ss); or b has the sums' axis down its columns, and a is in shared memory
// (ss_trans_b) or in registers, as those of mma_m16n8k16 (rs). Without `accumulate` what acc held
// is forgotten.
template <typename T, int N>
struct Wgmma;

#define ACC_8(i)                                                                        \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), \
      "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define ACC_32(i) ACC_8(i), ACC_8(i + 8), ACC_8(i + 16), ACC_8(i + 24)
#define NAMES_0_TO_31                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_32_TO_63                                                          \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"

// A, B, FLAG and A0 to A3: the numbers of the operands that follow N / 2 accumulators.
#define WGMMA(T, TYPE, N, NAMES, ACC, A0, A1, A2, A3, B, FLAG)                                  \
  template <>                                                                                   \
  struct Wgmma<T, N> {                                                                          \
    static __device__ __forceinline__ void ss(float (&acc)[N / 2],                              \
                                              uint64 a,                                         \
                                              uint64 b,                                         \
                                              bool accumulate) {                                \
      asm volatile("{.reg .pred accumulate; setp.ne.b32 accumulate, %" A2                       \
                   ", 0; "                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES   \
                   "}, %" A0 ", %" A1 ", accumulate, 1, 1, 0, 0;}"                              \
                   : ACC()                                                                      \
                   : "l"(a), "l"(b), "r"(int(accumulate)));                                     \
    }                                                                                           \
    static __device__ __forceinline__ void ss_trans_b(float (&acc)[N / 2],                      \
                                                      uint64 a,                                 \
                                                      uint64 b,                                 \
                                                      bool accumulate) {                        \
      asm volatile("{.reg .pred accumulate; setp.ne.b32 accumulate, %" A2                       \
                   ", 0; "                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES   \
                   "}, %" A0 ", %" A1 ", accumulate, 1, 1, 0, 1;}"                              \
                   : ACC()                                                                      \
                   : "l"(a), "l"(b), "r"(int(accumulate)));                                     \
    }                                                                                           \
    static __device__ __forceinline__ void rs(float (&acc)[N / 2],                              \
                                              const uint32* a,                                  \
                                              uint64 b,                                         \
                                              bool accumulate) {                                \
      asm volatile("{.reg .pred accumulate; setp.ne.b32 accumulate, %" FLAG                     \
                   ", 0; "                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES   \
                   "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", accumulate, 1, 1, 1;}"     \
                   : ACC()                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate))); \
    }                                                                                           \
  };
#define WGMMA_OF_16_BITS(N, NAMES, ACC, ...)       \
  WGMMA(__half, "f16", N, NAMES, ACC, __VA_ARGS__) \
  WGMMA(__nv_bfloat16, "bf16", N, NAMES, ACC, __VA_ARGS__)

#define ACC_64() ACC_32(0)
WGMMA_OF_16_BITS(64, NAMES_0_TO_31, ACC_64, "32", "33", "34", "35", "36", "37")
#define ACC_128() ACC_32(0), ACC_32(32)
WGMMA_OF_16_BITS(128,
                 NAMES_0_TO_31 ", " NAMES_32_TO_63,
                 ACC_128,
                 "64",
                 "65",
                 "66",
                 "67",
                 "68",
                 "69")

// acc (+)= a b, where both lie in shared memory with the sums' axis down their columns: the
// transpose of a 16 x 64 tile times a 16 x 64 tile.
template <typename T>
__device__ __forceinline__ void wgmma_ss_trans(float (&acc)[32],
                                               uint64 a,
                                               uint64 b,
                                               bool accumulate);

#define WGMMA_TRANS(T, TYPE)                                                              \
  template <>                                                                             \
  __device__ __forceinline__ void wgmma_ss_trans<T>(float (&acc)[32], uint64 a, uint64 b, \
                                                    bool accumulate) {                    \
    asm volatile(                                                                         \
        "{.reg .pred accumulate; setp.ne.b32 accumulate, %34, 0; "                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_0_TO_31    \
        "}, %32, %33, accumulate, 1, 1, 1, 1;}"                                           \
        : ACC_32(0)                                                                       \
        : "l"(a), "l"(b), "r"(int(accumulate)));                                          \
  }
WGMMA_TRANS(__half, "f16")
WGMMA_TRANS(__nv_bfloat16, "bf16")

// -------------------------------------------------------------------------------- warps and roles

// Hands the registers of this warpgroup over what `COUNT` a thread leave, or takes so many.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Barrier `id` (1 to 15) of a block: opens when so many threads have come. Who arrives goes on.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
