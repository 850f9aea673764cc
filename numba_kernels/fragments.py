"""Tiles of 16-bit elements in shared memory and their products on tensor cores.

A row of a tile takes a multiple of 128 bytes, and of every eight 16-byte chunks in it chunk c of
row r lies in place c ^ (r % 8):

    row 0 | 0 1 2 3 4 5 6 7      ldmatrix reads eight chunks above each other at a time: so they
    row 1 | 1 0 3 2 5 4 7 6      lie in different banks, as do those that cp.async writes, which
    row 2 | 2 3 0 1 6 7 4 5      are beside each other
    ...

A warp takes a tile by pieces of 16 x 16 elements, one ldmatrix each, and every lane points to 16
bytes of a piece. As rows begin at multiples of 128 bytes, an exclusive or with a column's offset
leads from piece to piece of a row. Warps beside each other take their pieces in turn, so that
neighbours of a warp are as many pieces apart as there are warps: a power of two, which keeps
their offsets apart from that of the warp.

Twin: cuda_src/fragments.cuh.
"""

from collections import namedtuple

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .common import advance, cdiv, copy16, div, reinterpret, rem
from .ptx_sm80 import (
    cp_async,
    cp_async_wait_all,
    cvt_rn_x2,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16,
)

int32, uint32 = types.int32, types.uint32

SIGNS = 0x80008000  # of two elements in a register


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


# x, of which the compiler does not know that it is what it was: what follows from it is computed
# anew where it is used, and takes no register from one use to the next.
@intrinsic
def fresh(_typing, _x):
    def codegen(_context, builder, _signature, args):
        kind = ir.FunctionType(args[0].type, [args[0].type])
        return builder.call(ir.InlineAsm(kind, "", "=r,0", side_effect=True), args)

    return types.uint32(types.uint32), codegen


# Where this lane points in the piece that begins at (row, col), both multiples of 16.
@cuda.jit(device=True, forceinline=True)
def lane_address(ORDER, COLS, tile, row, col):
    lane_id = thread() & 31
    if ORDER == DOWN_FIRST:
        lane_row, lane_chunk = lane_id & 15, lane_id >> 4
    else:
        lane_row, lane_chunk = (lane_id & 7) + (lane_id >> 4) * 8, lane_id >> 3 & 1
    chunk = uint32(lane_chunk + div(col, 8)) ^ lane_id & 7
    return uint32(tile + (row + lane_row) * (cdiv(COLS, 64) * 128) + chunk * 16)


# The same `down` and `right` pieces further on.
@cuda.jit(device=True, forceinline=True)
def piece(COLS, address, down, right):
    further = div(right, 4) * 128 + down * 16 * (cdiv(COLS, 64) * 128)
    return uint32((address ^ rem(right, 4) * 32) + further)


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
                    exists = int32(row + r * STEP) < rows and int32(8 * chunk) < cols
                    to = place + r * STEP * ROW + (chunk ^ row + r * STEP & 7) * 16
                    copy(to, advance(source, 8 * chunk), exists)
            source = advance(source, STEP * row_stride)

    return function


# Changes the sign of what this thread has copied into a tile of T with load_tile.
def negate_copied(ROWS, COLS, THREADS):
    CHUNKS = COLS // 8
    LANES = min(CHUNKS & -CHUNKS, 16)
    ROW = row_bytes(COLS)

    @cuda.jit(device=True, forceinline=True)
    def function(tile):
        cp_async_wait_all()
        row = uint32(div(thread(), LANES))
        while row < ROWS:
            chunk = uint32(rem(thread(), LANES))
            while chunk < CHUNKS:
                at = reinterpret(uint32, advance(tile, row * ROW + (chunk ^ row & 7) * 16))
                for i in range(4):
                    at[i] ^= SIGNS
                chunk = uint32(chunk + LANES)
            row = uint32(row + THREADS // LANES)

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


# Two columns of accumulators, n and n + 1, += a column of pieces times a piece.
def multiply_pieces(T, M, N):
    mma = mma_m16n8k16(T)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, n, a, a_index, b):
        for m in range(M):
            mma(acc, (m * N + n) * 4, a, a_index + m * 4, b[0], b[1])
            mma(acc, (m * N + n + 1) * 4, a, a_index + m * 4, b[2], b[3])

    return function


# acc += sum over d < DEPTH of a[row, d] * b[col, d]; a is DOWN_FIRST and b ACROSS_FIRST.
def multiply_nt(T, DEPTH, A_COLS, B_COLS, BESIDE, M, N):
    A_SHAPE, HALF = (M, 4), DEPTH // 32
    multiply = multiply_pieces(T, M, N)

    @cuda.jit(device=True, forceinline=True)
    def steps(acc, a_tile, b_tile, first, count):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(first, first + count):
            for m in range(M):
                ldmatrix_x4(a, m * 4, piece(A_COLS, a_tile, m, d))
            for n in range(0, N, 2):
                ldmatrix_x4(b, 0, piece(B_COLS, b_tile, div(n, 2) * BESIDE, d))
                multiply(acc, n, a, 0, b)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a_tile, b_tile):  # one loop would be too long for the compiler to unroll
        steps(acc, a_tile, b_tile, 0, HALF)
        steps(acc, a_tile, b_tile, HALF, DEPTH // 16 - HALF)

    return function


# acc += sum over d < DEPTH of a[row, d] * b[d, col]; both are DOWN_FIRST.
def multiply_nn(T, DEPTH, A_COLS, B_COLS, BESIDE, M, N):
    A_SHAPE = (M, 4)
    multiply = multiply_pieces(T, M, N)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a_tile, b_tile):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(DEPTH // 16):
            for m in range(M):
                ldmatrix_x4(a, m * 4, piece(A_COLS, a_tile, m, d))
            for n in range(0, N, 2):
                ldmatrix_x4_trans(b, 0, piece(B_COLS, b_tile, d, div(n, 2) * BESIDE))
                multiply(acc, n, a, 0, b)

    return function


# acc += sum over d < DEPTH of a[d, row] * b[d, col]; a is ACROSS_FIRST and b DOWN_FIRST.
def multiply_tn(T, DEPTH, A_COLS, B_COLS, BESIDE, M, N):
    A_SHAPE = (M, 4)
    multiply = multiply_pieces(T, M, N)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a_tile, b_tile):
        a = cuda.local.array(A_SHAPE, uint32)
        b = cuda.local.array(4, uint32)
        for d in range(DEPTH // 16):
            for m in range(M):
                ldmatrix_x4_trans(a, m * 4, piece(A_COLS, a_tile, d, m))
            for n in range(0, N, 2):
                ldmatrix_x4_trans(b, 0, piece(B_COLS, b_tile, d, div(n, 2) * BESIDE))
                multiply(acc, n, a, 0, b)

    return function


# acc += a b, where a[d] is in registers, a piece for each row of pieces; b is DOWN_FIRST.
def multiply_rn(T, B_COLS, D, M, N):
    multiply = multiply_pieces(T, M, N)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, b_tile):
        b = cuda.local.array(4, uint32)
        for d in range(D):
            for n in range(0, N, 2):
                ldmatrix_x4_trans(b, 0, piece(B_COLS, b_tile, d, div(n, 2)))
                multiply(acc, n, a, d * M * 4, b)

    return function
