// Tiles that the copy engine of sm_90 moves, and products of warpgroups with them.
// Twin: numba_kernels/warpgroups.py
//
// A tile of ROWS x COLS lies in shared memory as COLS / 64 panels of ROWS x 64, each row of a panel
// in 128 bytes and swizzled as in fragments.cuh:
//
//     | row 0, columns 0 to 63 | row 0, columns 64 to 127 |     a panel is what one copy brings and
//     | row 1                  | row 1                    |     begins at a multiple of 1024 bytes
//     | ...                    | ...                      |
#pragma once

#include "ptx_sm90.cuh"
#include "scores.cuh"

// Initialises barriers that stand one behind the other.
__device__ __forceinline__ void init_barriers(uint32 first, int barriers, int count) {
  for (int i = 0; i < barriers; ++i) mbarrier_init(first + 8 * i, count);
}

// Copies a tile of ROWS x COLS, 64 columns after 64, and lets the barrier count its bytes.
template <int ROWS, int COLS>
__device__ __forceinline__ void load_tile(uint32 tile,
                                          const TensorMap& map,
                                          uint32 full,
                                          int row,
                                          int head,
                                          int batch_index) {
  mbarrier_arrive_expect_tx(full, ROWS * COLS * 2);
#pragma unroll
  for (int col = 0; col < COLS; col += 64) {
    cp_async_bulk_tensor_4d(tile + col * ROWS * 2, map, full, col, row, head, batch_index);
  }
}

// Copies a tile to an array; what would lie outside of it is left out.
template <int ROWS, int COLS>
__device__ __forceinline__ void store_tile(const TensorMap& map,
                                           uint32 tile,
                                           int first_col,
                                           int row,
                                           int head,
                                           int batch_index) {
#pragma unroll
  for (int col = 0; col < COLS; col += 64) {
    cp_async_bulk_tensor_4d_store(map, tile + col * ROWS * 2, first_col + col, row, head,
                                  batch_index);
  }
  cp_async_bulk_commit_group();
}

// Zeros in the rows of a tile from `first` on, for products to come: written by THREADS threads,
// who all have to call this. They meet at a barrier of the block.
template <int ROWS, int COLS, int THREADS>
__device__ __forceinline__ void clear_rows(uint32 tile, int first, int thread, int barrier) {
  for (int chunk = first * 8 + thread; chunk < ROWS * 8; chunk += THREADS) {
#pragma unroll
    for (int col = 0; col < COLS; col += 64) {
      st_shared_x4(tile + col * ROWS * 2 + chunk * 16, 0);
    }
  }
  fence_proxy_async();
  bar_sync(barrier, THREADS);
}

// acc (+)= sum over d < DEPTH of a[row][d] * b[col][d], for 64 rows of a tile of A_ROWS and all
// B_ROWS of b: both have the sums' axis along their rows.
template <typename T, int DEPTH, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void multiply_nt(float (&acc)[B_ROWS / 2],
                                            uint32 a,
                                            uint32 b,
                                            bool accumulate) {
  a = wgmma_address(a, 16);
  b = wgmma_address(b, 16);
#pragma unroll
  for (int d = 0; d < DEPTH; d += 16) {
    int panel = d / 64, col = d % 64 * 2;
    Wgmma<T, B_ROWS>::ss(acc, wgmma_descriptor(a, panel * (A_ROWS * 128) + col),
                         wgmma_descriptor(b, panel * (B_ROWS * 128) + col), accumulate || d > 0);
  }
}

// Starts that product, without what acc held.
template <typename T, int DEPTH, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void start_nt(float (&acc)[B_ROWS / 2], uint32 a, uint32 b) {
  register_fence(acc);
  wgmma_fence();
  multiply_nt<T, DEPTH, A_ROWS, B_ROWS>(acc, a, b, false);
  wgmma_commit_group();
}

// Starts it from a number of each column: the sum of the first three of eight bfloat16, which
// have 16 bytes of shared memory to themselves, `of_cols` and on. It is a product too, of `ones`
// (store_ones) and those: bfloat16 whatever T is, for their range, and a NaN stays in its column.
template <typename T, int DEPTH, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void start_nt_from(float (&acc)[B_ROWS / 2],
                                              uint32 a,
                                              uint32 b,
                                              uint32 ones,
                                              uint32 of_cols) {
  register_fence(acc);
  wgmma_fence();
  // The right half of `ones`, of zeros, meets those bytes again.
  Wgmma<__nv_bfloat16, B_ROWS>::ss(acc, wgmma_plain_descriptor(ones, 128, 0),
                                   wgmma_plain_descriptor(of_cols, 0, 128), false);
  multiply_nt<T, DEPTH, A_ROWS, B_ROWS>(acc, a, b, true);
  wgmma_commit_group();
}

// What `ones` stands for: 64 rows of three ones and 13 zeros, as bfloat16. All rows are the same,
// so that eight of them will do, left half and right half, each in 128 bytes. By 16 threads, in
// front of a barrier.
//
//     | 1 1 1 0 0 0 0 0 | 0 0 0 0 0 0 0 0 |
//     | ...  eight rows |                 |
constexpr int ONES_BYTES = 256;
__device__ __forceinline__ void store_ones(char* ones, int thread) {
  uint4 three = make_uint4(0x3f803f80, 0x3f80, 0, 0);  // as bfloat16
  reinterpret_cast<uint4*>(ones)[thread] = thread < 8 ? three : make_uint4(0, 0, 0, 0);
  fence_proxy_async();
}

// Starts acc += sum over d < DEPTH of a[row][d] * b[d][col], where a is in registers and b has COLS
// columns a part, 64 after 64.
template <typename T, int DEPTH, int COLS, int PARTS>
__device__ __forceinline__ void start_rn(float (&acc)[PARTS][COLS / 2],
                                         uint32 (&a)[DEPTH / 4],
                                         uint32 b) {
  b = wgmma_address(b, DEPTH * 128);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) register_fence(acc[part]);
  register_fence(a);
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < DEPTH; d += 16) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      int offset = d * 128 + part * (COLS / 64) * (DEPTH * 128);
      Wgmma<T, COLS>::rs(acc[part], a + d / 4, wgmma_descriptor(b, offset), true);
    }
  }
  wgmma_commit_group();
}

// Starts acc += sum over d < DEPTH of a[row][d] * b[d][col], for 64 rows of a panel of a, which has
// the sums' axis along its rows, and COLS columns of b.
template <typename T, int DEPTH, int COLS>
__device__ __forceinline__ void start_nn(float (&acc)[COLS / 2], uint32 a, uint32 b) {
  a = wgmma_address(a, 16);
  b = wgmma_address(b, DEPTH * 128);
  register_fence(acc);
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < DEPTH; d += 16) {
    Wgmma<T, COLS>::ss_trans_b(acc, wgmma_descriptor(a, d * 2), wgmma_descriptor(b, d * 128), true);
  }
  wgmma_commit_group();
}

// Starts acc = sum over d < DEPTH of a[d][row] * b[d][col], for 64 rows and 64 columns: a panel of
// a and one of b, both with the sums' axis down their columns.
template <typename T, int DEPTH>
__device__ __forceinline__ void start_tn(float (&acc)[32], uint32 a, uint32 b) {
  a = wgmma_address(a, 16);
  b = wgmma_address(b, 16);
  register_fence(acc);
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < DEPTH; d += 16) {
    wgmma_ss_trans<T>(acc, wgmma_descriptor(a, d * 128), wgmma_descriptor(b, d * 128), d > 0);
  }
  wgmma_commit_group();
}

// s becomes p; rescale is what the sums so far have to be multiplied by.
// All to base 2, as in attention_flash_mma_fwd. Only a masked tile may have rows that see no key.
template <int N>
__device__ __forceinline__ void running_softmax(float (&s)[N],
                                                float (&row_max)[2],
                                                float (&row_sum)[2],
                                                float (&rescale)[2],
                                                float to_log2,
                                                bool masked) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float tile_max = -INF;
#pragma unroll
    for (int i = 2 * half; i < N; i += 4) tile_max = max(tile_max, max(s[i], s[i + 1]));
    float new_max = max(row_max[half], warp_max<4>(tile_max));
    float shift = masked ? finite_or_zero(new_max) : new_max;
    Exponent of = exponent_of(shift, to_log2);
    rescale[half] = ex2_approx((row_max[half] - shift) * to_log2);
    row_max[half] = new_max;
    float sum = 0;
#pragma unroll
    for (int i = 2 * half; i < N; i += 4) {
      s[i] = ex2_approx(fmaf(s[i], of.factor, -of.subtrahend));
      s[i + 1] = ex2_approx(fmaf(s[i + 1], of.factor, -of.subtrahend));
      sum += s[i] + s[i + 1];
      if (half == 0 && i == N / 4) pin(sum);  // here the wait for p v stands best
    }
    row_sum[half] = row_sum[half] * rescale[half] + sum;
  }
}

// Rounds accumulators to T: then they are fragments of an operand.
template <typename T, int N>
__device__ __forceinline__ void round_fragments(uint32 (&x)[N], const float (&acc)[2 * N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = cvt_rn_x2<T>(acc[2 * i], acc[2 * i + 1]);
}

// Stores 16 rows of 16-bit fragments, from `row` on, into a tile of ROWS rows.
template <int ROWS, int N>
__device__ __forceinline__ void store_fragments(uint32 tile, int row, const uint32 (&x)[N]) {
  int lane_id = threadIdx.x % 32;
  row += lane_id % 16;
#pragma unroll
  for (int i = 0; i < N; i += 4) {  // four registers are 16 columns, two chunks of a row
    int chunk = i / 2 + lane_id / 16;
    stmatrix_x4(tile + chunk / 8 * (ROWS * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16, x + i);
  }
}

// Sixteen rows of accumulators, times their factors, to an array from `col` on, through shared
// memory of the warp's own. That this has been read is for the caller to await in the end
// (cp_async_bulk_wait_group_read).
template <typename T, int N>
__device__ __forceinline__ void send_rows(const TensorMap& map,
                                          uint32 shared,
                                          const float (&acc)[N],
                                          const float (&factor)[2],
                                          int col,
                                          int row,
                                          int head,
                                          int batch_index) {
  uint32 rounded[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    rounded[i] = cvt_rn_x2<T>(acc[2 * i] * factor[i % 2], acc[2 * i + 1] * factor[i % 2]);
  }
  bool first = threadIdx.x % 32 == 0;
  if (first) cp_async_bulk_wait_group_read<0>();  // what was here before has left
  __syncwarp();
  store_fragments<16>(shared, 0, rounded);
  fence_proxy_async();
  __syncwarp();
  if (first) store_tile<16, N * 2>(map, shared, col, row, head, batch_index);
}

// Registers of a warp to shared memory as they lie, 16 bytes of each lane after each other; back.
template <typename R, int N>
__device__ __forceinline__ void store_registers(char* to, const R (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    *reinterpret_cast<uint4*>(to + i * 128 + threadIdx.x % 32 * 16) =
        *reinterpret_cast<const uint4*>(x + i);
  }
}

template <typename R, int N>
__device__ __forceinline__ void load_registers(R (&x)[N], const char* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    *reinterpret_cast<uint4*>(x + i) =
        *reinterpret_cast<const uint4*>(from + i * 128 + threadIdx.x % 32 * 16);
  }
}

// Hides those of a thread's transposed scores that its queries, from `query` on, do not see.
template <int FEATURES, int N>
__device__ __forceinline__ void hide_transposed(float (&s)[N],
                                                const ScoreParams<float>& score,
                                                const KeyRange& band,
                                                int query,
                                                int key) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int row = query + i / 4 * 8 + i % 2, col = key + i % 4 / 2 * 8;
    if (!sees<FEATURES>(score, band, 0, 0, row, col)) s[i] = -INF;
  }
}

// Two rows of accumulators, times their factors, to global memory. Four lanes share a row: they
// exchange chunks of eight columns until each has whole ones. All exchanges come before the first
// store, so that one's latency hides the others.
template <typename T, int N>
__device__ __forceinline__ void store_rows(T* out,
                                           int64 row_stride,
                                           const float (&acc)[N],
                                           const float (&factor)[2],
                                           int rows,
                                           int cols) {
  int lane_id = threadIdx.x % 32, quarter = lane_id % 4;
  uint32 x[2][N / 16][4];  // of both rows, four columns apart; then the same of whole chunks
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      uint32(&group)[4] = x[half][n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = acc + 16 * n + 4 * i + 2 * half;
        group[i] = cvt_rn_x2<T>(pair[0] * factor[half], pair[1] * factor[half]);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i & bit) continue;
          bool upper = quarter & bit;
          uint32 other = __shfl_xor_sync(0xffffffffu, upper ? group[i] : group[i + bit], bit);
          (upper ? group[i] : group[i + bit]) = other;
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = lane_id / 4 + 8 * half;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      int col = 32 * n + 8 * quarter;
      const uint32(&chunk)[4] = x[half][n];
      T* to = out + row * row_stride + col;
      if (col + 8 <= cols) {
        __stwb(reinterpret_cast<uint4*>(to), make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]));
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (col + i < cols) to[i] = reinterpret_cast<const T*>(chunk)[i];
        }
      }
    }
  }
}
