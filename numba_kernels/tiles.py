"""Tiles in shared memory and their products on CUDA cores. Twin: cuda_src/tiles.cuh.

A tile is an array of Acc with COLS columns. After every W rows (W = 16 bytes of elements) comes
a gap of 16 bytes, so that threads that read the same columns of rows r, r + W, r + 2W, ... hit
different banks:

    W = 4   | row 0 | row 1 | row 2 | row 3 |gap| row 4 | row 5 | row 6 | row 7 |gap| ...

A product has R x C results a thread, in registers, and LANES_ROWS x LANES_COLS threads a warp.
Threads own groups of neighbours: the i-th row of a thread is spread(R, LANES, i) after its
first. For R = 8 and four threads (one letter is one row of that thread):

    aaaabbbbccccdddd aaaabbbbccccdddd

Every shared load is one of 16 bytes, and feeds R * C * W / (R + C) multiply-adds. Two more
things hold those back: a register bank, even or odd, gives one operand a cycle, and an operand
is kept for the next instruction if that names it in the same place. So rows are taken there and
back, with one operand in common, or take elements of either parity in turn.

All tiles of a block lie in one shared array: a tile, or a place in one, is an index into it.
"""

from numba import cuda

from .common import acc_t, advance, div, from_acc, load16, rem, store16, to_acc, vec_length
from .ptx_sm80 import cp_async, shared_address


def tile_offset(Acc, COLS, row, col):
    W = vec_length(Acc)
    return row * COLS + row // W * W + col


def tile_size(Acc, ROWS, COLS):
    W = vec_length(Acc)
    return -(-ROWS // W) * W * (COLS + 1)


# How many neighbours a thread that owns COUNT rows or columns owns in a row.
def group(Acc, COUNT):
    return min(COUNT, vec_length(Acc))


# Where a thread stands among the LANES_ROWS (2 or 4) x 32 / LANES_ROWS threads of its warp. Bit 0
# of the lane counts columns and bit 1 rows: of every four neighbours two want the same 16 bytes of
# either operand, and the hardware then serves half a warp at a time.
@cuda.jit(device=True, forceinline=True)
def lane_row(LANES_ROWS, lane):
    if LANES_ROWS == 2:
        return lane >> 1 & 1
    return (lane >> 1 & 1) + (lane >> 4) * 2


@cuda.jit(device=True, forceinline=True)
def lane_col(LANES_ROWS, lane):
    if LANES_ROWS == 2:
        return (lane & 1) + (lane >> 2) * 2
    return (lane & 1) + (lane >> 2 & 3) * 2


# The i-th row or column of a thread, counted from its first; its groups hold G each.
@cuda.jit(device=True, forceinline=True)
def spread(G, LANES, i):
    return div(i, G) * (G * LANES) + rem(i, G)


# Reductions over the threads of a warp that share its rows; every lane must call.
@cuda.jit(device=True, forceinline=True)
def row_max_of(LANES_ROWS, x):
    x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 1))
    bit = 4
    while bit < (32 if LANES_ROWS == 2 else 16):
        x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, bit))
        bit *= 2
    return x


@cuda.jit(device=True, forceinline=True)
def row_sum_of(LANES_ROWS, x):
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
    bit = 4
    while bit < (32 if LANES_ROWS == 2 else 16):
        x += cuda.shfl_xor_sync(0xFFFFFFFF, x, bit)
        bit *= 2
    return x


# Copies a tile of ROWS x COLS, of which rows x cols exist, the rest becoming 0. A thread moves VEC
# neighbours at a time: with ASYNC by cp.async (T is Acc; done after cp_async_wait_all and a
# barrier), else through registers, where they are converted.
def load_tile(T, ROWS, COLS, VEC, ASYNC, THREADS):
    Acc = acc_t(T)
    W = vec_length(Acc)
    VECS = COLS // VEC
    MOST = min(THREADS // W, 32)
    LANES = min(VECS & -VECS, MOST)  # threads a row
    STEP = THREADS // LANES  # a multiple of W
    ROW_GAP, STEP_GAP = tile_offset(Acc, COLS, W, 0), tile_offset(Acc, COLS, STEP, 0)
    PASSES, STEPS = VECS // LANES, -(-ROWS // STEP)
    copy = cp_async(VEC * T.bitwidth // 8) if ASYNC else None

    @cuda.jit(device=True, forceinline=True)
    def function(shared, tile, source, row_stride, rows, cols):
        x = cuda.local.array(VEC, Acc)
        row = div(cuda.threadIdx.x, LANES)
        for c in range(PASSES):
            col = rem(cuda.threadIdx.x, LANES) * VEC + c * (LANES * VEC)
            source_index = row * row_stride + col
            to = tile + div(row, W) * ROW_GAP + rem(row, W) * COLS + col
            for r in range(STEPS):
                exists = row + r * STEP < rows and col < cols
                if ROWS % STEP == 0 or row + r * STEP < ROWS:
                    if ASYNC:
                        copy(shared_address(shared, to), advance(source, source_index), exists)
                    elif VEC == 1:
                        x[0] = to_acc(source[source_index]) if exists else Acc(0)
                        shared[to] = x[0]
                    else:
                        for i in range(VEC):
                            x[i] = 0
                        if exists:
                            load16(x, 0, source, source_index)
                        for i in range(0, VEC, W):
                            store16(shared, to + i, x, i)
                source_index += STEP * row_stride
                to += STEP_GAP

    return function


# acc[r, c] += sum over d < DEPTH of a[r, d] * b[c, d]; a and b are the thread's first rows.
def multiply_nt(Acc, R, C, LANES_ROWS, DEPTH):
    W = vec_length(Acc)
    LANES_COLS = 32 // LANES_ROWS
    A_ROW, B_ROW = group(Acc, R), group(Acc, C)

    @cuda.jit(device=True, forceinline=True)
    def step(acc, shared, a, b, d):
        x = cuda.local.array((R, W), Acc)
        y = cuda.local.array(W, Acc)
        for r in range(R):
            row = spread(A_ROW, LANES_ROWS, r)
            load16(x, r * W, shared, a + row * DEPTH + div(row, W) * W + d)
        for c in range(C):
            row = spread(B_ROW, LANES_COLS, c)
            load16(y, 0, shared, b + row * DEPTH + div(row, W) * W + d)
            for i in range(W):
                for r in range(R):
                    acc[r, c] += x[r, i ^ r & 1] * y[i ^ r & 1]

    @cuda.jit(device=True, forceinline=True)
    def function(acc, shared, a, b):
        d = 0
        while d < DEPTH:
            step(acc, shared, a, b, d)
            if DEPTH <= 64:  # two steps at a time, unless registers are scarce
                d += W
                step(acc, shared, a, b, d)
            d += W

    return function


# acc[r, c] += sum over d < DEPTH of a[r, d] * b[d, c]; b has COLS columns, a has DEPTH.
def multiply_nn(Acc, R, C, LANES_ROWS, DEPTH, COLS):
    W = vec_length(Acc)
    LANES_COLS = 32 // LANES_ROWS
    A_ROW = group(Acc, R)

    @cuda.jit(device=True, forceinline=True)
    def step(acc, shared, a, b, d):
        x = cuda.local.array((R, W), Acc)
        y = cuda.local.array(C, Acc)
        for r in range(R):
            row = spread(A_ROW, LANES_ROWS, r)
            load16(x, r * W, shared, a + row * DEPTH + div(row, W) * W + d)
        for i in range(W):
            for c in range(0, C, W):
                col = spread(W, LANES_COLS, c)
                load16(y, c, shared, b + d * COLS + d + i * COLS + col)
            for r in range(R):
                for j in range(C):
                    c = C - 1 - j if r & 1 else j
                    acc[r, c] += x[r, i] * y[c]

    @cuda.jit(device=True, forceinline=True)
    def function(acc, shared, a, b):
        d = 0
        while d < DEPTH:  # two steps at a time: the loads of one run under the other
            step(acc, shared, a, b, d)
            step(acc, shared, a, b, d + W)
            d += 2 * W

    return function


# acc[r, c] += sum over d < DEPTH of a[d, r] * b[d, c]; a has COLS_A columns and b COLS_B.
def multiply_tn(Acc, R, C, LANES_ROWS, DEPTH, COLS_A, COLS_B):
    W = vec_length(Acc)
    LANES_COLS = 32 // LANES_ROWS

    @cuda.jit(device=True, forceinline=True)
    def row(acc, shared, a, b):
        x = cuda.local.array(R, Acc)
        y = cuda.local.array(C, Acc)
        for r in range(0, R, W):
            load16(x, r, shared, a + spread(W, LANES_ROWS, r))
        for c in range(0, C, W):
            load16(y, c, shared, b + spread(W, LANES_COLS, c))
        for r in range(R):
            for j in range(C):
                c = C - 1 - j if r & 1 else j
                acc[r, c] += x[r] * y[c]

    @cuda.jit(device=True, forceinline=True)
    def step(acc, shared, a, b):  # a loop over rows would be too long for the compiler to unroll
        row(acc, shared, a, b)
        row(acc, shared, a + COLS_A, b + COLS_B)
        if W == 4:
            row(acc, shared, a + 2 * COLS_A, b + 2 * COLS_B)
            row(acc, shared, a + 3 * COLS_A, b + 3 * COLS_B)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, shared, a, b):
        d = 0
        while d < DEPTH:  # two steps at a time: the loads of one run under the other
            step(acc, shared, a + d * COLS_A + d, b + d * COLS_B + d)
            step(acc, shared, a + (d + W) * COLS_A + d + W, b + (d + W) * COLS_B + d + W)
            d += 2 * W

    return function


# Reads this thread's C columns of one row of a tile, of which source[index] is the first, to x[r].
@cuda.jit(device=True, forceinline=True)
def load_tile_row(W, C, LANES_COLS, x, r, source, index):
    if C % W == 0:
        for c in range(0, C, W):
            load16(x, r * C + c, source, index + spread(W, LANES_COLS, c))
    else:
        for c in range(C):
            x[r, c] = source[index + spread(min(C, W), LANES_COLS, c)]


# Writes x[r], this thread's C columns of one row of a tile, of which target[index] is the first.
@cuda.jit(device=True, forceinline=True)
def store_tile_row(W, C, LANES_COLS, target, index, x, r):
    if C % W == 0:
        for c in range(0, C, W):
            store16(target, index + spread(W, LANES_COLS, c), x, r * C + c)
    else:
        for c in range(C):
            target[index + spread(min(C, W), LANES_COLS, c)] = x[r, c]


# Writes factor * x[r], this thread's C columns of a row, of which cols exist; VEC as in load_tile.
def store_row(T, C, LANES_COLS, VEC):
    Acc = acc_t(T)
    W = vec_length(Acc)

    @cuda.jit(device=True, forceinline=True)
    def function(target, index, x, r, factor, first_col, cols):
        y = cuda.local.array(W, Acc)
        for c in range(0, C, W):
            col = first_col + spread(W, LANES_COLS, c)
            for i in range(W):
                y[i] = factor * x[r, c + i]
            if VEC == W:
                if col < cols:
                    store16(target, index + col, y, 0)
            else:
                for i in range(W):
                    if col + i < cols:
                        target[index + col + i] = from_acc(T, y[i])

    return function
