"""Tiles of 16-bit elements in shared memory and their products on tensor cores.

A row of a tile takes a multiple of 128 bytes, and of every eight 16-byte chunks in it chunk c of
row r lies in place c ^ (r % 8):

    row 0 | 0 1 2 3 4 5 6 7      ldmatrix reads eight chunks above each other at a time: so they
    row 1 | 1 0 3 2 5 4 7 6      lie in different banks, as do those that cp.async writes, which
    row 2 | 2 3 0 1 6 7 4 5      are beside each other
    ...

A warp takes a tile by pieces of 16 x 16 elements, one ldmatrix each. For the piece `down` rows
and `right` columns of pieces away from where the warp begins, a lane points to

    rows + down * 16 rows + (chunk ^ right * 32)

with a `rows` and a `chunk` of its own. Warps beside each other take their pieces in turn, so
that neighbours of a warp are as many pieces apart as there are warps: a power of two, as the
exclusive or asks for.

Twin: cuda_src/fragments.cuh.
"""

from collections import namedtuple

from numba import cuda
from numba.cuda import types

from .common import advance, cdiv, copy16, div, reinterpret, rem
from .ptx_sm80 import cp_async, cvt_rn_x2, ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k16

int32, uint32 = types.int32, types.uint32


def row_bytes(COLS):
    return -(-COLS // 64) * 128


def tile_bytes(ROWS, COLS):
    return ROWS * row_bytes(COLS)


# How many warps of a block stand below each other when they share a product of ROWS x COLS: each
# has 32 rows, if that leaves a piece to everybody.
def warps_down(ROWS, COLS, WARPS):
    down = 1 if ROWS < 64 else ROWS // 32
    while COLS // 16 % (WARPS // down) != 0:
        down *= 2
    return down


# An index without a sign stays one of 32 bits when it is divided.
@cuda.jit(device=True, forceinline=True)
def thread():
    return uint32(cuda.threadIdx.x)


# A warp's share of such a product: M x N accumulators of 16 x 8.
Share = namedtuple("Share", "BELOW BESIDE M N")


def share(ROWS, COLS, WARPS):
    BELOW = warps_down(ROWS, COLS, WARPS)
    BESIDE = WARPS // BELOW
    return Share(BELOW, BESIDE, ROWS // 16 // BELOW, COLS // 8 // BESIDE)


# The first row of this warp, and the first row of this lane's accumulators.
@cuda.jit(device=True, forceinline=True)
def share_warp_row(SHARE):
    return uint32(div(thread() >> 5, SHARE.BESIDE) * (16 * SHARE.M))


@cuda.jit(device=True, forceinline=True)
def share_first_row(SHARE):
    return uint32(share_warp_row(SHARE) + (thread() >> 2 & 7))


# The same of columns; accumulator n begins accumulator_col(BESIDE, n) further on.
@cuda.jit(device=True, forceinline=True)
def share_warp_col(SHARE):
    return uint32(rem(thread() >> 5, SHARE.BESIDE) * 16)


@cuda.jit(device=True, forceinline=True)
def share_first_col(SHARE):
    return uint32(share_warp_col(SHARE) + (thread() & 3) * 2)


@cuda.jit(device=True, forceinline=True)
def accumulator_col(BESIDE, n):
    return div(n, 2) * 16 * BESIDE + rem(n, 2) * 8


# The order in which a piece's four 8 x 8 matrices, top left first, go to an operand's registers:
# down and then across for the rows of a, or for b if it is to be transposed; else across first.
DOWN_FIRST, ACROSS_FIRST = 0, 1


@cuda.jit(device=True, forceinline=True)
def lane_rows(ORDER, COLS, tile, row):
    lane_id = thread() & 31
    if ORDER == DOWN_FIRST:
        lane_row = lane_id & 15
    else:
        lane_row = (lane_id & 7) + (lane_id >> 4) * 8
    return uint32(tile + (row + lane_row) * (cdiv(COLS, 64) * 128))


@cuda.jit(device=True, forceinline=True)
def lane_chunk(ORDER, col):
    lane_id = thread() & 31
    half = lane_id >> 4 if ORDER == DOWN_FIRST else lane_id >> 3 & 1
    return uint32((half ^ lane_id & 7) * 16 ^ col * 2)


# Copies a tile of ROWS x COLS, of which rows x cols exist, the rest becoming 0; it is there after
# cp_async_wait_all and a barrier. Rows begin at multiples of 16 bytes.
def load_tile(ROWS, COLS, THREADS):
    CHUNKS = COLS // 8
    LANES = min(CHUNKS & -CHUNKS, 16)  # threads a row
    STEP = THREADS // LANES
    STEPS, PASSES = -(-ROWS // STEP), CHUNKS // LANES
    ROW = row_bytes(COLS)
    copy = cp_async(16)

    @cuda.jit(device=True, forceinline=True)
    def function(tile, source, row_stride, rows, cols):
        rows, cols = int32(rows), int32(cols)
        row = uint32(div(thread(), LANES))
        place = uint32(tile + row * ROW)
        source = advance(source, row * row_stride)
        for r in range(STEPS):
            if ROWS % STEP == 0 or row + r * STEP < ROWS:
                for c in range(PASSES):
                    chunk = uint32(rem(thread(), LANES) + c * LANES)
                    wanted = max(int32(0), min(int32(16), int32(2 * cols - 16 * chunk)))
                    existing = wanted if int32(row + r * STEP) < rows else int32(0)
                    to = place + r * STEP * ROW + (chunk ^ row + r * STEP & 7) * 16
                    copy(to, advance(source, 8 * chunk), existing)
            source = advance(source, STEP * row_stride)

    return function


# Writes the first rows x cols of a tile of ROWS x COLS to global memory; `thread` of THREADS.
def store_tile(T, ROWS, COLS, THREADS):
    CHUNKS = COLS // 8
    LANES = min(CHUNKS & -CHUNKS, 16)
    STEP = THREADS // LANES
    STEPS, PASSES = -(-ROWS // STEP), CHUNKS // LANES
    ROW = row_bytes(COLS)

    @cuda.jit(device=True, forceinline=True)
    def function(target, tile, row_stride, rows, cols, thread):
        for r in range(STEPS):
            row = int32(div(thread, LANES) + r * STEP)
            if row < ROWS and row < rows:
                for c in range(PASSES):
                    chunk = int32(rem(thread, LANES) + c * LANES)
                    source = reinterpret(T, advance(tile, row * ROW + (chunk ^ row & 7) * 16))
                    to = advance(target, row * row_stride + 8 * chunk)
                    if 8 * chunk + 8 <= cols:
                        copy16(to, 0, source, 0)
                    else:
                        i = 0
                        while 8 * chunk + i < cols:
                            to[i] = source[i]
                            i += 1

    return function


# Writes this lane's M x N accumulators, times factor and rounded to T, into a tile: `rows` is the
# offset of its first row there, and col its first column.
def store_accumulators(T, COLS, BESIDE, M, N):
    ROW = row_bytes(COLS)
    pair = cvt_rn_x2(T)

    @cuda.jit(device=True, forceinline=True)
    def function(rows, col, acc, factor):
        # Rows of a lane are 8 apart, so they all swizzle alike.
        chunk = uint32((col >> 3 ^ (thread() & 31) >> 2) * 16 + (col & 7) * 2)
        for m in range(M):
            for n in range(N):
                at = m * 16 * ROW + uint32(chunk ^ accumulator_col(BESIDE, n) * 2)
                upper = reinterpret(uint32, advance(rows, at))
                lower = reinterpret(uint32, advance(rows, at + 8 * ROW))
                upper[0] = pair(acc[m, n, 0] * factor, acc[m, n, 1] * factor)
                lower[0] = pair(acc[m, n, 2] * factor, acc[m, n, 3] * factor)

    return function


# acc += sum over d < DEPTH of a[row, d] * b[col, d], both ACROSS_FIRST but a DOWN_FIRST.
def multiply_nt(T, DEPTH, A_COLS, B_COLS, BESIDE, M, N):
    A_ROW, B_ROW = row_bytes(A_COLS), row_bytes(B_COLS)
    A_SHAPE = (M, 4)
    mma = mma_m16n8k16(T)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a_rows, a_chunk, b_rows, b_chunk):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(DEPTH // 16):
            for m in range(M):
                ldmatrix_x4(a, m * 4, a_rows + m * 16 * A_ROW + (a_chunk ^ d * 32))
            for n in range(0, N, 2):
                ldmatrix_x4(b, 0, b_rows + div(n, 2) * BESIDE * 16 * B_ROW + (b_chunk ^ d * 32))
                for m in range(M):
                    mma(acc, (m * N + n) * 4, a, m * 4, b[0], b[1])
                    mma(acc, (m * N + n + 1) * 4, a, m * 4, b[2], b[3])

    return function


# acc += sum over d < DEPTH of a[row, d] * b[d, col], both DOWN_FIRST.
def multiply_nn(T, DEPTH, A_COLS, B_COLS, BESIDE, M, N):
    A_ROW, B_ROW = row_bytes(A_COLS), row_bytes(B_COLS)
    A_SHAPE = (M, 4)
    mma = mma_m16n8k16(T)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a_rows, a_chunk, b_rows, b_chunk):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(DEPTH // 16):
            for m in range(M):
                ldmatrix_x4(a, m * 4, a_rows + m * 16 * A_ROW + (a_chunk ^ d * 32))
            for n in range(0, N, 2):
                ldmatrix_x4_trans(b, 0, b_rows + d * 16 * B_ROW + (b_chunk ^ n * BESIDE * 16))
                for m in range(M):
                    mma(acc, (m * N + n) * 4, a, m * 4, b[0], b[1])
                    mma(acc, (m * N + n + 1) * 4, a, m * 4, b[2], b[3])

    return function


# acc += sum over d < DEPTH of a[d, row] * b[d, col]; a is ACROSS_FIRST and b DOWN_FIRST.
def multiply_tn(T, DEPTH, A_COLS, B_COLS, BESIDE, M, N):
    A_ROW, B_ROW = row_bytes(A_COLS), row_bytes(B_COLS)
    A_SHAPE = (M, 4)
    mma = mma_m16n8k16(T)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a_rows, a_chunk, b_rows, b_chunk):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(DEPTH // 16):
            for m in range(M):
                ldmatrix_x4_trans(a, m * 4, a_rows + d * 16 * A_ROW + (a_chunk ^ m * 32))
            for n in range(0, N, 2):
                ldmatrix_x4_trans(b, 0, b_rows + d * 16 * B_ROW + (b_chunk ^ n * BESIDE * 16))
                for m in range(M):
                    mma(acc, (m * N + n) * 4, a, m * 4, b[0], b[1])
                    mma(acc, (m * N + n + 1) * 4, a, m * 4, b[2], b[3])

    return function


# acc += p b, where p[row, d] are accumulators, rounded to T here: they have the layout of an a.
def multiply_accumulators_n(T, B_COLS, M, N, D):
    B_ROW = row_bytes(B_COLS)
    A_SHAPE = (M, 4)
    mma, pair = mma_m16n8k16(T), cvt_rn_x2(T)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, p, b_rows, b_chunk):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(0, D, 2):
            for m in range(M):
                for i in range(4):
                    k, j = d + (i >> 1), (i & 1) * 2
                    a[m, i] = pair(p[m, k, j], p[m, k, j + 1])
            for n in range(0, N, 2):
                ldmatrix_x4_trans(b, 0, b_rows + d * 8 * B_ROW + (b_chunk ^ n * 16))
                for m in range(M):
                    mma(acc, (m * N + n) * 4, a, m * 4, b[0], b[1])
                    mma(acc, (m * N + n + 1) * 4, a, m * 4, b[2], b[3])

    return function
