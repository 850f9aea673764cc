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
// A warp takes a tile by pieces of 16 x 16 elements, one ldmatrix each, and every lane points to 16
// bytes of a piece. As rows begin at multiples of 128 bytes, an exclusive or with a column's offset
// leads from piece to piece of a row. Warps beside each other take their pieces in turn, so that
// neighbours of a warp are as many pieces apart as there are warps: a power of two, which keeps
// their offsets apart from that of the warp.
#pragma once

#include "ptx_sm80.cuh"

constexpr uint32 SIGNS = 0x80008000;  // of two elements in a register

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

// x, of which the compiler does not know that it is what it was: what follows from it is computed
// anew where it is used, and takes no register from one use to the next.
__device__ __forceinline__ uint32 fresh(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where this lane points in the piece that begins at (row, col), both multiples of 16.
template <int ORDER, int COLS>
__device__ __forceinline__ uint32 lane_address(uint32 tile, int row, int col) {
  int lane_id = threadIdx.x % 32;
  int lane_row = ORDER == DOWN_FIRST ? lane_id % 16 : lane_id % 8 + lane_id / 16 * 8;
  int lane_chunk = ORDER == DOWN_FIRST ? lane_id / 16 : lane_id / 8 % 2;
  int chunk = (lane_chunk + col / 8) ^ lane_id % 8;
  return tile + (row + lane_row) * row_bytes<COLS>() + chunk * 16;
}

// The same `down` and `right` pieces further on.
template <int COLS>
__device__ __forceinline__ uint32 piece(uint32 address, int down, int right) {
  return (address ^ right % 4 * 32) + right / 4 * 128 + down * 16 * row_bytes<COLS>();
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
      bool exists = row + r < rows && 8 * chunk < cols;
      uint32 to = tile + (row + r) * row_bytes<COLS>() + (chunk ^ (row + r) % 8) * 16;
      cp_async<16>(to, from + 8 * chunk, exists);
    }
    from += STEP * row_stride;
  }
}

// Changes the sign of what this thread has copied into a tile of T with load_tile.
template <int ROWS, int COLS, int THREADS>
__device__ __forceinline__ void negate_copied(char* tile) {
  constexpr int CHUNKS = COLS / 8;
  constexpr int LANES = (CHUNKS & -CHUNKS) < 16 ? (CHUNKS & -CHUNKS) : 16;
  cp_async_wait_all();
  for (int row = threadIdx.x / LANES; row < ROWS; row += THREADS / LANES) {
    for (int chunk = threadIdx.x % LANES; chunk < CHUNKS; chunk += LANES) {
      uint4* at = reinterpret_cast<uint4*>(tile + row * row_bytes<COLS>() + (chunk ^ row % 8) * 16);
      uint4 x = *at;
      *at = make_uint4(x.x ^ SIGNS, x.y ^ SIGNS, x.z ^ SIGNS, x.w ^ SIGNS);
    }
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

// Two columns of accumulators, n and n + 1, += a column of pieces times a piece.
template <typename T, int M, int N>
__device__ __forceinline__ void multiply_pieces(float (&acc)[M][N][4],
                                                int n,
                                                const uint32 (&a)[M][4],
                                                const uint32 (&b)[4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    mma_m16n8k16<T>(acc[m][n], a[m], b[0], b[1]);
    mma_m16n8k16<T>(acc[m][n + 1], a[m], b[2], b[3]);
  }
}

// acc += sum over d < DEPTH of a[row][d] * b[col][d]; a is DOWN_FIRST and b ACROSS_FIRST.
template <typename T, int DEPTH, int A_COLS, int B_COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void multiply_nt(float (&acc)[M][N][4], uint32 a_tile, uint32 b_tile) {
#pragma unroll
  for (int d = 0; d < DEPTH / 16; ++d) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], piece<A_COLS>(a_tile, m, d));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4(b, piece<B_COLS>(b_tile, n / 2 * BESIDE, d));
      multiply_pieces<T>(acc, n, a, b);
    }
  }
}

// acc += sum over d < DEPTH of a[row][d] * b[d][col]; both are DOWN_FIRST.
template <typename T, int DEPTH, int A_COLS, int B_COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void multiply_nn(float (&acc)[M][N][4], uint32 a_tile, uint32 b_tile) {
#pragma unroll
  for (int d = 0; d < DEPTH / 16; ++d) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], piece<A_COLS>(a_tile, m, d));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4_trans(b, piece<B_COLS>(b_tile, d, n / 2 * BESIDE));
      multiply_pieces<T>(acc, n, a, b);
    }
  }
}

// acc += sum over d < DEPTH of a[d][row] * b[d][col]; a is ACROSS_FIRST and b DOWN_FIRST.
template <typename T, int DEPTH, int A_COLS, int B_COLS, int BESIDE, int M, int N>
__device__ __forceinline__ void multiply_tn(float (&acc)[M][N][4], uint32 a_tile, uint32 b_tile) {
#pragma unroll
  for (int d = 0; d < DEPTH / 16; ++d) {
    uint32 a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4_trans(a[m], piece<A_COLS>(a_tile, d, m));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4_trans(b, piece<B_COLS>(b_tile, d, n / 2 * BESIDE));
      multiply_pieces<T>(acc, n, a, b);
    }
  }
}

// acc += a b, where a[d] is in registers, a piece for each row of pieces; b is DOWN_FIRST.
template <typename T, int B_COLS, int D, int M, int N>
__device__ __forceinline__ void multiply_rn(float (&acc)[M][N][4],
                                            const uint32 (&a)[D][M][4],
                                            uint32 b_tile) {
#pragma unroll
  for (int d = 0; d < D; ++d) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32 b[4];
      ldmatrix_x4_trans(b, piece<B_COLS>(b_tile, d, n / 2));
      multiply_pieces<T>(acc, n, a[d], b);
    }
  }
}
