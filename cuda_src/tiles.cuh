// Tiles in shared memory and their products on CUDA cores. Twin: numba_kernels/tiles.py
//
// A tile is an array of Acc with COLS columns. After every W rows (W = 16 bytes of elements) comes
// a gap of 16 bytes, so that threads that read the same columns of rows r, r + W, r + 2W, ... hit
// different banks:
//
//     W = 4   | row 0 | row 1 | row 2 | row 3 |gap| row 4 | row 5 | row 6 | row 7 |gap| ...
//
// A product has R x C results a thread, in registers, and LANES_ROWS x LANES_COLS threads a warp.
// Threads own groups of neighbours: the i-th row of a thread is spread<R, LANES>(i) after its
// first. For R = 8 and four threads (one letter is one row of that thread):
//
//     aaaabbbbccccdddd aaaabbbbccccdddd
//
// Every shared load is one of 16 bytes, and feeds R * C * W / (R + C) multiply-adds. Two more
// things hold those back: a register bank, even or odd, gives one operand a cycle, and an operand
// is kept for the next instruction if that names it in the same place. So rows are taken there and
// back, with one operand in common, or take elements of either parity in turn.
#pragma once

#include "ptx_sm80.cuh"

template <typename Acc, int COLS>
__host__ __device__ constexpr int tile_offset(int row, int col) {
  constexpr int W = vec_length<Acc>();
  return row * COLS + row / W * W + col;
}

template <typename Acc, int ROWS, int COLS>
__host__ __device__ constexpr int tile_size() {
  constexpr int W = vec_length<Acc>();
  return cdiv(ROWS, W) * W * (COLS + 1);
}

// How many neighbours a thread that owns COUNT rows or columns owns in a row.
template <typename Acc, int COUNT>
__host__ __device__ constexpr int group() {
  return COUNT < vec_length<Acc>() ? COUNT : vec_length<Acc>();
}

template <typename Acc, int COUNT, int LANES>
__host__ __device__ constexpr int spread(int i) {
  constexpr int G = group<Acc, COUNT>();
  return i / G * G * LANES + i % G;
}

// Where a thread stands among the LANES_ROWS (2 or 4) x 32 / LANES_ROWS threads of its warp. Bit 0
// of the lane counts columns and bit 1 rows: of every four neighbours two want the same 16 bytes of
// either operand, and the hardware then serves half a warp at a time.
template <int LANES_ROWS>
__device__ __forceinline__ int lane_row(int lane) {
  return LANES_ROWS == 2 ? lane >> 1 & 1 : (lane >> 1 & 1) + (lane >> 4) * 2;
}

template <int LANES_ROWS>
__device__ __forceinline__ int lane_col(int lane) {
  return (lane & 1) + (LANES_ROWS == 2 ? lane >> 2 : lane >> 2 & 3) * 2;
}

// Reductions over the threads of a warp that share its rows; every lane must call.
template <int LANES_ROWS, typename Acc>
__device__ __forceinline__ Acc row_max_of(Acc x) {
  x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
#pragma unroll
  for (int bit = 4; bit < (LANES_ROWS == 2 ? 32 : 16); bit *= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, bit));
  }
  return x;
}

template <int LANES_ROWS, typename Acc>
__device__ __forceinline__ Acc row_sum_of(Acc x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
#pragma unroll
  for (int bit = 4; bit < (LANES_ROWS == 2 ? 32 : 16); bit *= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, bit);
  }
  return x;
}

// Copies a tile of ROWS x COLS, of which rows x cols exist, the rest becoming 0. A thread moves VEC
// neighbours at a time: with ASYNC by cp.async (T is Acc; done after cp_async_wait_all and a
// barrier), else through registers, where they are converted.
template <typename T, int ROWS, int COLS, int VEC, int ASYNC, int THREADS>
__device__ __forceinline__ void load_tile(acc_t<T>* tile,
                                          const T* source,
                                          int64 row_stride,
                                          int rows,
                                          int cols) {
  using Acc = acc_t<T>;
  constexpr int W = vec_length<Acc>();
  constexpr int VECS = COLS / VEC;
  constexpr int MOST = THREADS / W < 32 ? THREADS / W : 32;
  constexpr int LANES = (VECS & -VECS) < MOST ? (VECS & -VECS) : MOST;  // threads a row
  constexpr int STEP = THREADS / LANES;                                 // a multiple of W
  int row = threadIdx.x / LANES;
#pragma unroll
  for (int c = 0; c < COLS; c += LANES * VEC) {
    int col = threadIdx.x % LANES * VEC + c;
    const T* from = source + row * row_stride + col;
    Acc* to = tile + tile_offset<Acc, COLS>(row, col);
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
      bool exists = row + r < rows && col < cols;
      if constexpr (ROWS % STEP != 0) {
        if (row + r >= ROWS) break;
      }
      if constexpr (ASYNC) {
        cp_async<VEC * sizeof(T)>(shared_address(to), from, exists);
      } else if constexpr (VEC == 1) {
        *to = exists ? to_acc(*from) : Acc(0);
      } else {
        Acc x[VEC] = {};
        if (exists) load16(x, from);
#pragma unroll
        for (int i = 0; i < VEC; i += W) store16(to + i, x + i);
      }
      from += STEP * row_stride;
      to += tile_offset<Acc, COLS>(STEP, 0);
    }
  }
}

// acc[r][c] += sum over d < DEPTH of a[r][d] * b[c][d]; a and b point to the thread's first rows.
template <int R, int C, int LANES_ROWS, int DEPTH, typename Acc>
__device__ __forceinline__ void multiply_nt(Acc (&acc)[R][C], const Acc* a, const Acc* b) {
  constexpr int W = vec_length<Acc>();
#pragma unroll(DEPTH > 64 ? 1 : 2)
  for (int d = 0; d < DEPTH; d += W) {
    Acc x[R][W], y[W];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      load16(x[r], a + tile_offset<Acc, DEPTH>(spread<Acc, R, LANES_ROWS>(r), d));
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      load16(y, b + tile_offset<Acc, DEPTH>(spread<Acc, C, 32 / LANES_ROWS>(c), d));
#pragma unroll
      for (int i = 0; i < W; ++i) {
#pragma unroll
        for (int r = 0; r < R; ++r) acc[r][c] += x[r][i ^ r % 2] * y[i ^ r % 2];
      }
    }
  }
}

// acc[r][c] += sum over d < DEPTH of a[r][d] * b[d][c]; b has COLS columns, a has DEPTH.
template <int R, int C, int LANES_ROWS, int DEPTH, int COLS, typename Acc>
__device__ __forceinline__ void multiply_nn(Acc (&acc)[R][C], const Acc* a, const Acc* b) {
  constexpr int W = vec_length<Acc>();
#pragma unroll 2
  for (int d = 0; d < DEPTH; d += W) {
    Acc x[R][W], y[C];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      load16(x[r], a + tile_offset<Acc, DEPTH>(spread<Acc, R, LANES_ROWS>(r), d));
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
#pragma unroll
      for (int c = 0; c < C; c += W) {
        load16(y + c, b + tile_offset<Acc, COLS>(d, spread<Acc, C, 32 / LANES_ROWS>(c)) + i * COLS);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int j = 0; j < C; ++j) {
          int c = r % 2 ? C - 1 - j : j;
          acc[r][c] += x[r][i] * y[c];
        }
      }
    }
  }
}

// acc[r][c] += sum over d < DEPTH of a[d][r] * b[d][c]; a has COLS_A columns and b COLS_B.
template <int R, int C, int LANES_ROWS, int DEPTH, int COLS_A, int COLS_B, typename Acc>
__device__ __forceinline__ void multiply_tn(Acc (&acc)[R][C], const Acc* a, const Acc* b) {
  constexpr int W = vec_length<Acc>();
#pragma unroll 2
  for (int d = 0; d < DEPTH; d += W) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      Acc x[R], y[C];
#pragma unroll
      for (int r = 0; r < R; r += W) {
        load16(x + r, a + tile_offset<Acc, COLS_A>(d, spread<Acc, R, LANES_ROWS>(r)) + i * COLS_A);
      }
#pragma unroll
      for (int c = 0; c < C; c += W) {
        load16(y + c,
               b + tile_offset<Acc, COLS_B>(d, spread<Acc, C, 32 / LANES_ROWS>(c)) + i * COLS_B);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int j = 0; j < C; ++j) {
          int c = r % 2 ? C - 1 - j : j;
          acc[r][c] += x[r] * y[c];
        }
      }
    }
  }
}

// Reads this thread's C columns of one row of a tile, of which source is the first.
template <int C, int LANES_COLS, typename Acc>
__device__ __forceinline__ void load_tile_row(Acc (&x)[C], const Acc* source) {
  constexpr int W = vec_length<Acc>();
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const Acc* from = source + spread<Acc, C, LANES_COLS>(c);
    if (C % W != 0) {
      x[c] = *from;
    } else if (c % W == 0) {
      load16(x + c, from);
    }
  }
}

// Writes x, this thread's C columns of one row of a tile, of which target is the first.
template <int C, int LANES_COLS, typename Acc>
__device__ __forceinline__ void store_tile_row(Acc* target, const Acc (&x)[C]) {
  constexpr int W = vec_length<Acc>();
#pragma unroll
  for (int c = 0; c < C; ++c) {
    Acc* to = target + spread<Acc, C, LANES_COLS>(c);
    if (C % W != 0) {
      *to = x[c];
    } else if (c % W == 0) {
      store16(to, x + c);
    }
  }
}

// Writes factor * x, this thread's C columns of a row, of which cols exist; VEC as in load_tile.
template <int C, int LANES_COLS, int VEC, typename T>
__device__ __forceinline__ void store_row(T* target,
                                          const acc_t<T> (&x)[C],
                                          acc_t<T> factor,
                                          int first_col,
                                          int cols) {
  using Acc = acc_t<T>;
  constexpr int W = vec_length<Acc>();
#pragma unroll
  for (int c = 0; c < C; c += W) {
    int col = first_col + spread<Acc, C, LANES_COLS>(c);
    Acc y[W];
#pragma unroll
    for (int i = 0; i < W; ++i) y[i] = factor * x[c + i];
    if (VEC == W) {
      if (col < cols) store16(target + col, y);
    } else {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (col + i < cols) target[col + i] = from_acc<T>(y[i]);
      }
    }
  }
}
