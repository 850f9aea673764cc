// Tiles of 16-bit elements in shared memory and their products on tensor cores.
// Twin: numba_kernels/fragments.py
//
// A row of a tile takes a multiple of 128 bytes, and of every eight 16-byte chunks in it chunk c of
// row r lies in place c ^ (r % 8):
//
//     row 0 | 0 1 2 3 4 5 6 7      ldmatrix reads eight chunks above each other at a time: so they
//     row 1 | 1 0 3 2 5 4 7 6      lie in different banks, as do those that cp.async writes, which
//     row 2 | 2 3 0 1 6 7 4 5      are beside each other
//     ...
//
// A warp takes a tile by pieces of 16 x 16 elements, one ldmatrix each. For the piece `down` rows
// and `right` columns of pieces away from where the warp begins, a lane points to
//
//     rows + down * 16 rows + (chunk ^ right * 32)
//
// with a `rows` and a `chunk` of its own. Warps beside each other take their pieces in turn, so
// that neighbours of a warp are as many pieces apart as there are warps: a power of two, as the
// exclusive or asks for.
#pragma once

#include "ptx_sm80.cuh"

template <int COLS>
__host__ __device__ constexpr int row_bytes() {
  return cdiv(COLS, 64) * 128;
}

template <int ROWS, int COLS>
__host__ __device__ constexpr int tile_bytes() {
  return ROWS * row_bytes<COLS>();
}

// How many warps of a block stand below each other when they share a product of ROWS x COLS: each
// has 32 rows, if that leaves a piece to everybody.
template <int ROWS, int COLS, int WARPS>
__host__ __device__ constexpr int warps_down() {
  int down = ROWS < 64 ? 1 : ROWS / 32;
  while (COLS / 16 % (WARPS / down) != 0) down *= 2;
  return down;
}

// A warp's share of such a product: M x N accumulators of 16 x 8.
template <int ROWS, int COLS, int WARPS>
struct Share {
  static constexpr int BELOW = warps_down<ROWS, COLS, WARPS>(), BESIDE = WARPS / BELOW;
  static constexpr int M = ROWS / 16 / BELOW, N = COLS / 8 / BESIDE;

  // The first row of this warp, and the first row of this lane's accumulators.
  static __device__ __forceinline__ int warp_row() {
    return int(threadIdx.x) / 32 / BESIDE * (16 * M);
  }
  static __device__ __forceinline__ int first_row() {
    return warp_row() + int(threadIdx.x) % 32 / 4;
  }
  // The same of columns; accumulator n begins accumulator_col<BESIDE>(n) further on.
  static __device__ __forceinline__ int warp_col() { return int(threadIdx.x) / 32 % BESIDE * 16; }
  static __device__ __forceinline__ int first_col() {
    return warp_col() + int(threadIdx.x) % 4 * 2;
  }
};

template <int BESIDE>
__host__ __device__ constexpr int accumulator_col(int n) {
  return n / 2 * 16 * BESIDE + n % 2 * 8;
}

// The order in which a piece's four 8 x 8 matrices, top left first, go to an operand's registers:
// down and then across for the rows of a, or for b if it is to be transposed; else across first.
constexpr int DOWN_FIRST = 0, ACROSS_FIRST = 1;

template <int ORDER, int COLS>
__device__ __forceinline__ uint32 lane_rows(uint32 tile, int row) {
  int lane_id = threadIdx.x % 32;
  int lane_row = ORDER == DOWN_FIRST ? lane_id % 16 : lane_id % 8 + lane_id / 16 * 8;
  return tile + (row + lane_row) * row_bytes<COLS>();
}

template <int ORDER>
__device__ __forceinline__ uint32 lane_chunk(int col) {
  int lane_id = threadIdx.x % 32;
  int half = ORDER == DOWN_FIRST ? lane_id / 16 : lane_id / 8 % 2;
  return (half ^ lane_id % 8) * 16 ^ col * 2;
}

// Copies a tile of ROWS x COLS, of which rows x cols exist, the rest becoming 0; it is there after
// cp_async_wait_all and a barrier. Rows begin at multiples of 16 bytes.
template <int ROWS, int COLS, int THREADS, typename T>
__device__ __forceinline__ void load_tile(uint32 tile,
                                          const T* source,
                                          int64 row_stride,
                                          int rows,
                                          int cols) {
  constexpr int CHUNKS = COLS / 8;
  constexpr int LANES = (CHUNKS & -CHUNKS) < 16 ? (CHUNKS & -CHUNKS) : 16;  // threads a row
  constexpr int STEP = THREADS / LANES;
  int row = threadIdx.x / LANES;
  const T* from = source + row * row_stride;
#pragma unroll
  for (int r = 0; r < ROWS; r += STEP) {
    if (ROWS % STEP != 0 && row + r >= ROWS) break;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += LANES) {
      int chunk = threadIdx.x % LANES + c;
      int existing = row + r < rows ? max(0, min(16, 2 * cols - 16 * chunk)) : 0;
      uint32 to = tile + (row + r) * row_bytes<COLS>() + (chunk ^ (row + r) % 8) * 16;
      cp_async<16>(to, from + 8 * chunk, existing);
    }
    from += STEP * row_stride;
  }
}

// Writes the first rows x cols of a tile of ROWS x COLS to global memory; `thread` of THREADS.
template <int ROWS, int COLS, int THREADS, typename T>
__device__ __forceinline__ void store_tile(T* target,
                                           const char* tile,
                                           int64 row_stride,
                                           int rows,
                                           int cols,
                                           int thread) {
  constexpr int CHUNKS = COLS / 8;
  constexpr int LANES = (CHUNKS & -CHUNKS) < 16 ? (CHUNKS & -CHUNKS) : 16;
  constexpr int STEP = THREADS / LANES;
#pragma unroll
  for (int r = 0; r < ROWS; r += STEP) {
    int row = thread / LANES + r;
    if (row >= ROWS || row >= rows) break;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += LANES) {
      int chunk = thread % LANES + c;
      const T* from =
          reinterpret_cast<const T*>(tile + row * row_bytes<COLS>() + (chunk ^ row % 8) * 16);
      T* to = target + row * row_stride + 8 * chunk;
      if (8 * chunk + 8 <= cols) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; 8 * chunk + i < cols; ++i) to[i] = from[i];
      }
    }
  }
}

// Writes this lane's M x N accumulators, times factor and rounded to T, into a tile: `rows` is the
// offset of its first row there, and col its first column.
template <typename T, int COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void store_accumulators(char* rows,
                                                   int col,
                                                   const float (&acc)[M][N][4],
                                                   float factor) {
  // Rows of a lane are 8 apart, so they all swizzle alike.
  int chunk = (col / 8 ^ int(threadIdx.x) % 32 / 4) * 16 + col % 8 * 2;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      char* at = rows + m * 16 * row_bytes<COLS>() + (chunk ^ accumulator_col<BESIDE>(n) * 2);
      *reinterpret_cast<uint32*>(at) = cvt_rn_x2<T>(acc[m][n][0] * factor, acc[m][n][1] * factor);
      *reinterpret_cast<uint32*>(at + 8 * row_bytes<COLS>()) =
          cvt_rn_x2<T>(acc[m][n][2] * factor, acc[m][n][3] * factor);
    }
  }
}

// acc += sum over d < DEPTH of a[row][d] * b[col][d], both ACROSS_FIRST but a DOWN_FIRST.
template <typename T, int DEPTH, int A_COLS, int B_COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void multiply_nt(float (&acc)[M][N][4],
                                            uint32 a_rows,
                                            uint32 a_chunk,
                                            uint32 b_rows,
                                            uint32 b_chunk) {
#pragma unroll
  for (int d = 0; d < DEPTH / 16; ++d) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ldmatrix_x4(a[m], a_rows + m * 16 * row_bytes<A_COLS>() + (a_chunk ^ d * 32));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4(b, b_rows + n / 2 * BESIDE * 16 * row_bytes<B_COLS>() + (b_chunk ^ d * 32));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<T>(acc[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc += sum over d < DEPTH of a[row][d] * b[d][col], both DOWN_FIRST.
template <typename T, int DEPTH, int A_COLS, int B_COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void multiply_nn(float (&acc)[M][N][4],
                                            uint32 a_rows,
                                            uint32 a_chunk,
                                            uint32 b_rows,
                                            uint32 b_chunk) {
#pragma unroll
  for (int d = 0; d < DEPTH / 16; ++d) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ldmatrix_x4(a[m], a_rows + m * 16 * row_bytes<A_COLS>() + (a_chunk ^ d * 32));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4_trans(b, b_rows + d * 16 * row_bytes<B_COLS>() + (b_chunk ^ n * BESIDE * 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<T>(acc[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc += sum over d < DEPTH of a[d][row] * b[d][col]; a is ACROSS_FIRST and b DOWN_FIRST.
template <typename T, int DEPTH, int A_COLS, int B_COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void multiply_tn(float (&acc)[M][N][4],
                                            uint32 a_rows,
                                            uint32 a_chunk,
                                            uint32 b_rows,
                                            uint32 b_chunk) {
#pragma unroll
  for (int d = 0; d < DEPTH / 16; ++d) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ldmatrix_x4_trans(a[m], a_rows + d * 16 * row_bytes<A_COLS>() + (a_chunk ^ m * 32));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4_trans(b, b_rows + d * 16 * row_bytes<B_COLS>() + (b_chunk ^ n * BESIDE * 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<T>(acc[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc += p b, where p[row][d] are accumulators, rounded to T here: they have the layout of an a.
template <typename T, int B_COLS, int M, int N, int D>
__device__ __forceinline__ void multiply_accumulators_n(float (&acc)[M][N][4],
                                                        const float (&p)[M][D][4],
                                                        uint32 b_rows,
                                                        uint32 b_chunk) {
#pragma unroll
  for (int d = 0; d < D; d += 2) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[m][i] = cvt_rn_x2<T>(p[m][d + i / 2][i % 2 * 2], p[m][d + i / 2][i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4_trans(b, b_rows + d * 8 * row_bytes<B_COLS>() + (b_chunk ^ n * 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<T>(acc[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
