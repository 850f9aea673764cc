// out = a b^T of 16-bit floats as Hopper does it: a warp loads tiles through tensor maps into a ring
// of two, a warpgroup multiplies them, and a third tensor map takes the result. One block walks over
// all tiles. Written for the tests of the simulator, which break it line by line.
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
  u64 opaque[16];
};

constexpr int ROWS = 64, COLUMNS = 64, DEPTH = 64, STAGES = 2, TILE = 64 * 128;  // bytes

__device__ void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ void load(u32 target, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(bar)
      : "memory");
}
__device__ void store(const TensorMap* map, int x, int y, u32 source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(source)
      : "memory");
}
__device__ u64 descriptor(u32 address) {
  return u64(SWIZZLE) << 62 | u64(1024 >> 4) << 32 | u64(1) << 16 | (address & 0x3FFFF) >> 4;
}
#define R4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
__device__ void multiply(float (&c)[32], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : R16(0), R16(16)
      : "l"(a), "l"(b), "r"(add));
}

extern "C" __global__ void __launch_bounds__(160) matmul(const __grid_constant__ TensorMap a,
                                                         const __grid_constant__ TensorMap b,
                                                         const __grid_constant__ TensorMap out,
                                                         int rows,
                                                         int columns,
                                                         int depth) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = u32(__cvta_generic_to_shared(memory));
  const u32 staging = base + 2 * STAGES * TILE, full = staging + TILE, empty = full + 8 * STAGES;
  const int steps = (depth + DEPTH - 1) / DEPTH, across = (columns + COLUMNS - 1) / COLUMNS;
  const int tiles = (rows + ROWS - 1) / ROWS * across;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  int stage = 0, phase = 0;
  if (threadIdx.x >= 128) {
    if (threadIdx.x > 128) return;
    for (int tile = 0; tile < tiles; tile++) {
      for (int step = 0; step < steps; step++) {
        mbarrier_wait(empty + 8 * stage, phase ^ 1);
        const u32 bar = full + 8 * stage, at = base + 2 * TILE * stage;
        mbarrier_expect(bar, 2 * TILE);
        load(at, &a, DEPTH * step, ROWS * (tile / across), bar);
        load(at + TILE, &b, DEPTH * step, COLUMNS * (tile % across), bar);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    return;
  }
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int tile = 0; tile < tiles; tile++) {
    float c[32];
    for (int i = 0; i < 32; i++) c[i] = 0.f;
    for (int step = 0; step < steps; step++) {
      mbarrier_wait(full + 8 * stage, phase);
      const u32 at = base + 2 * TILE * stage;
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int k = 0; k < 4; k++)
        multiply(c, descriptor(at + 32 * k), descriptor(at + TILE + 32 * k), step + k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (lane == 0) mbarrier_arrive(empty + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    asm volatile("bar.sync 1, 128;" ::: "memory");  // the last tile has left the staging area
    for (int j = 0; j < 8; j++) {
      for (int half = 0; half < 2; half++) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(pair)
            : "f"(c[4 * j + 2 * half + 1]), "f"(c[4 * j + 2 * half]));
        const int r = row + 8 * half;
        const u32 to = staging + 128 * r + ((j ^ r % 8) << 4) + lane % 4 * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pair) : "memory");
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, 128;" ::: "memory");  // all have written
    if (threadIdx.x == 0) {
      store(&out, COLUMNS * (tile % across), ROWS * (tile / across), staging);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // at last
}
