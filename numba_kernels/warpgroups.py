"""Tiles that the copy engine of sm_90 moves, and products of warpgroups with them.

A tile of ROWS x COLS lies in shared memory as COLS / 64 panels of ROWS x 64, each row of a panel
in 128 bytes and swizzled as in fragments.cuh:

    | row 0, columns 0 to 63 | row 0, columns 64 to 127 |     a panel is what one copy brings and
    | row 1                  | row 1                    |     begins at a multiple of 1024 bytes
    | ...                    | ...                      |

Twin: cuda_src/warpgroups.cuh.
"""

from numba import cuda
from numba.cuda import types

from .common import INF, advance, copy16, reinterpret, store16, warp_max
from .ptx_sm80 import cvt_rn_x2, ex2_approx, st_shared_x4
from .ptx_sm90 import (
    bar_sync,
    cp_async_bulk_commit_group,
    cp_async_bulk_tensor_4d,
    cp_async_bulk_tensor_4d_store,
    cp_async_bulk_wait_group_read,
    fence_proxy_async,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    pin,
    register_fence,
    stmatrix_x4,
    wgmma_address,
    wgmma_commit_group,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_plain_descriptor,
    wgmma_rs,
    wgmma_ss,
    wgmma_ss_trans,
    wgmma_ss_trans_b,
)
from .scores import exponent_of, finite_or_zero, sees

float32, int32, uint32 = types.float32, types.int32, types.uint32


# Initialises barriers that stand one behind the other.
@cuda.jit(device=True, forceinline=True)
def init_barriers(first, barriers, count):
    for i in range(barriers):
        mbarrier_init(uint32(first + 8 * i), count)


# Copies a tile of ROWS x COLS, 64 columns after 64, and lets the barrier count its bytes.
def load_tile(ROWS, COLS):
    @cuda.jit(device=True, forceinline=True)
    def function(tile, tensor_map, full, row, head, batch_index):
        mbarrier_arrive_expect_tx(full, ROWS * COLS * 2)
        for col in range(0, COLS, 64):
            to = uint32(tile + col * ROWS * 2)
            cp_async_bulk_tensor_4d(to, tensor_map, full, col, row, head, batch_index)

    return function


# Copies a tile to an array; what would lie outside of it is left out.
def store_tile(ROWS, COLS):
    @cuda.jit(device=True, forceinline=True)
    def function(tensor_map, tile, first_col, row, head, batch_index):
        for col in range(0, COLS, 64):
            source, its_col = uint32(tile + col * ROWS * 2), int32(first_col + col)
            cp_async_bulk_tensor_4d_store(tensor_map, source, its_col, row, head, batch_index)
        cp_async_bulk_commit_group()

    return function


# Zeros in the rows of a tile from `first` on, for products to come: written by THREADS threads, who
# all have to call this. They meet at a barrier of the block.
def clear_rows(ROWS, COLS, THREADS):
    @cuda.jit(device=True, forceinline=True)
    def function(tile, first, thread, barrier):
        chunk = int32(first * 8 + thread)
        while chunk < ROWS * 8:
            for col in range(0, COLS, 64):
                st_shared_x4(uint32(tile + col * ROWS * 2 + chunk * 16), 0)
            chunk = int32(chunk + THREADS)
        fence_proxy_async()
        bar_sync(barrier, THREADS)

    return function


# acc (+)= sum over d < DEPTH of a[row, d] * b[col, d], for 64 rows of a tile of A_ROWS and all
# B_ROWS of b: both have the sums' axis along their rows.
def multiply_nt(T, DEPTH, A_ROWS, B_ROWS):
    multiply = wgmma_ss(T, B_ROWS)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, b, accumulate):
        a = wgmma_address(a, 16)
        b = wgmma_address(b, 16)
        for d in range(DEPTH // 16):
            col, panel = (d & 3) * 32, d >> 2
            from_a = wgmma_descriptor(a, panel * (A_ROWS * 128) + col)
            from_b = wgmma_descriptor(b, panel * (B_ROWS * 128) + col)
            multiply(acc, 0, from_a, from_b, accumulate or d > 0)

    return function


# Starts that product, without what acc held.
def start_nt(T, DEPTH, A_ROWS, B_ROWS):
    multiply, fence = multiply_nt(T, DEPTH, A_ROWS, B_ROWS), register_fence(B_ROWS // 2)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, b):
        fence(acc, 0)
        wgmma_fence()
        multiply(acc, a, b, False)
        wgmma_commit_group()

    return function


# Starts it from a number of each column: the sum of the first three of eight bfloat16, which have
# 16 bytes of shared memory to themselves, `of_cols` and on. It is a product too, of `ones`
# (store_ones) and those: bfloat16 whatever T is, for their range, and a NaN stays in its column.
def start_nt_from(T, DEPTH, A_ROWS, B_ROWS):
    multiply, fence = multiply_nt(T, DEPTH, A_ROWS, B_ROWS), register_fence(B_ROWS // 2)
    multiply_ones = wgmma_ss(types.bfloat16, B_ROWS)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, b, ones, of_cols):
        fence(acc, 0)
        wgmma_fence()
        # The right half of `ones`, of zeros, meets those bytes again.
        from_ones = wgmma_plain_descriptor(ones, 128, 0)
        multiply_ones(acc, 0, from_ones, wgmma_plain_descriptor(of_cols, 0, 128), False)
        multiply(acc, a, b, True)
        wgmma_commit_group()

    return function


# What `ones` stands for: 64 rows of three ones and 13 zeros, as bfloat16. All rows are the same,
# so that eight of them will do, left half and right half, each in 128 bytes. By 16 threads, in
# front of a barrier.
#
#     | 1 1 1 0 0 0 0 0 | 0 0 0 0 0 0 0 0 |
#     | ...  eight rows |                 |
ONES_BYTES = 256


@cuda.jit(device=True, forceinline=True)
def store_ones(ones, thread):
    row = cuda.local.array(4, uint32)
    for i in range(4):
        row[i] = 0
    if thread < 8:  # as bfloat16
        row[0] = 0x3F803F80
        row[1] = 0x3F80
    store16(reinterpret(uint32, ones), thread * 4, row, 0)
    fence_proxy_async()


# Starts acc += sum over d < DEPTH of a[row, d] * b[d, col], where a is in registers and b has COLS
# columns a part, 64 after 64.
def start_rn(T, DEPTH, COLS, PARTS):
    multiply = wgmma_rs(T, COLS)
    fence_acc, fence_a = register_fence(PARTS * (COLS // 2)), register_fence(DEPTH // 4)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, a_index, b):
        b = wgmma_address(b, DEPTH * 128)
        fence_acc(acc, 0)
        fence_a(a, a_index)
        wgmma_fence()
        for d in range(DEPTH // 16):
            for part in range(PARTS):
                offset = d * 16 * 128 + part * (COLS // 64) * (DEPTH * 128)
                from_b = wgmma_descriptor(b, offset)
                multiply(acc, part * (COLS // 2), a, a_index + d * 4, from_b, True)
        wgmma_commit_group()

    return function


# Starts acc += sum over d < DEPTH of a[row, d] * b[d, col], for 64 rows of a panel of a, which has
# the sums' axis along its rows, and COLS columns of b.
def start_nn(T, DEPTH, COLS):
    multiply, fence = wgmma_ss_trans_b(T, COLS), register_fence(COLS // 2)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, b):
        a = wgmma_address(a, 16)
        b = wgmma_address(b, DEPTH * 128)
        fence(acc, 0)
        wgmma_fence()
        for d in range(DEPTH // 16):
            from_a = wgmma_descriptor(a, d * 16 * 2)
            from_b = wgmma_descriptor(b, d * 16 * 128)
            multiply(acc, 0, from_a, from_b, True)
        wgmma_commit_group()

    return function


# Starts acc = sum over d < DEPTH of a[d, row] * b[d, col], for 64 rows and 64 columns: a panel of
# a and one of b, both with the sums' axis down their columns.
def start_tn(T, DEPTH):
    multiply, fence = wgmma_ss_trans(T), register_fence(32)

    @cuda.jit(device=True, forceinline=True)
    def function(acc, at, a, b):
        a = wgmma_address(a, 16)
        b = wgmma_address(b, 16)
        fence(acc, at)
        wgmma_fence()
        for d in range(0, DEPTH, 16):
            from_a = wgmma_descriptor(a, d * 128)
            from_b = wgmma_descriptor(b, d * 128)
            multiply(acc, at, from_a, from_b, d > 0)
        wgmma_commit_group()

    return function


# s becomes p; rescale is what the sums so far have to be multiplied by.
# All to base 2, as in attention_flash_mma_fwd. Only a masked tile may have rows that see no key.
def running_softmax(N):
    @cuda.jit(device=True, forceinline=True)
    def function(s, row_max, row_sum, rescale, to_log2, masked):
        for half in range(2):
            tile_max = float32(-INF)
            for n in range(N // 4):
                i = 4 * n + 2 * half
                pair_max = max(s[i], s[i + 1])
                tile_max = max(tile_max, pair_max)
            new_max = max(row_max[half], warp_max(tile_max, 4))
            shift = finite_or_zero(new_max) if masked else new_max
            of = exponent_of(shift, to_log2)
            rescale[half] = ex2_approx((row_max[half] - shift) * to_log2)
            row_max[half] = new_max
            total = float32(0)
            for n in range(N // 4):
                i = 4 * n + 2 * half
                s[i] = ex2_approx(cuda.fma(s[i], of.factor, -of.subtrahend))
                s[i + 1] = ex2_approx(cuda.fma(s[i + 1], of.factor, -of.subtrahend))
                total += s[i] + s[i + 1]
                if half == 0 and i == N // 4:
                    pin(total)  # here the wait for p v stands best
            row_sum[half] = row_sum[half] * rescale[half] + total

    return function


# Rounds accumulators to T: then they are fragments of an operand.
def round_fragments(T, N):
    pair = cvt_rn_x2(T)

    @cuda.jit(device=True, forceinline=True)
    def function(x, acc):
        for i in range(N):
            x[i] = pair(acc[2 * i], acc[2 * i + 1])

    return function


# Stores 16 rows of 16-bit fragments, from `row` on, into a tile of ROWS rows.
def store_fragments(ROWS, N):
    @cuda.jit(device=True, forceinline=True)
    def function(tile, row, x):
        lane_id = uint32(cuda.threadIdx.x) & 31
        row = uint32(row + (lane_id & 15))
        for i in range(0, N, 4):  # four registers are 16 columns, two chunks of a row
            chunk = (i >> 1) + (lane_id >> 4)
            at = (chunk >> 3) * (ROWS * 128) + row * 128 + ((chunk & 7) ^ (row & 7)) * 16
            stmatrix_x4(uint32(tile + at), x, i)

    return function


# Sixteen rows of accumulators, times their factors, to an array from `col` on, through shared
# memory of the warp's own. That this has been read is for the caller to await in the end
# (cp_async_bulk_wait_group_read).
def send_rows(T, N):
    PAIRS = N // 2
    pair, wait_for_reads = cvt_rn_x2(T), cp_async_bulk_wait_group_read(0)
    share, send = store_fragments(16, PAIRS), store_tile(16, N * 2)

    @cuda.jit(device=True, forceinline=True)
    def function(tensor_map, shared, acc, part, factor, col, row, head, batch_index):
        rounded = cuda.local.array(PAIRS, uint32)
        for i in range(PAIRS):
            its_factor = factor[i & 1]
            rounded[i] = pair(acc[part, 2 * i] * its_factor, acc[part, 2 * i + 1] * its_factor)
        first = uint32(cuda.threadIdx.x) & 31 == 0
        if first:
            wait_for_reads()  # what was here before has left
        cuda.syncwarp()
        share(shared, 0, rounded)
        fence_proxy_async()
        cuda.syncwarp()
        if first:
            send(tensor_map, shared, col, row, head, batch_index)

    return function


# N registers (R) of a warp, from x[at] on, to shared memory as they lie, 16 bytes of each lane
# after each other; and back.
def store_registers(R, N):
    @cuda.jit(device=True, forceinline=True)
    def function(to, x, at):
        lane_id = uint32(cuda.threadIdx.x) & 31
        for i in range(0, N, 4):
            copy16(reinterpret(R, advance(to, i * 128 + lane_id * 16)), 0, x, at + i)

    return function


def load_registers(R, N):
    @cuda.jit(device=True, forceinline=True)
    def function(x, start):
        lane_id = uint32(cuda.threadIdx.x) & 31
        for i in range(0, N, 4):
            copy16(x, i, reinterpret(R, advance(start, i * 128 + lane_id * 16)), 0)

    return function


# Hides those of a thread's N transposed scores that its queries, from `query` on, do not see.
def hide_transposed(FEATURES, N):
    @cuda.jit(device=True, forceinline=True)
    def function(s, score, band, query, key):
        for n in range(N // 4):
            for i in range(4):
                row, col = int32(query + 8 * n + (i & 1)), int32(key + (i >> 1) * 8)
                if not sees(FEATURES, score, band, 0, 0, row, col):
                    s[4 * n + i] = -INF

    return function


# Two rows of accumulators, times their factors, to global memory. Four lanes share a row: they
# exchange chunks of eight columns until each has whole ones. All exchanges come before the first
# store, so that one's latency hides the others.
def store_rows(T, N):
    pair, WORDS = cvt_rn_x2(T), N // 2

    @cuda.jit(device=True, forceinline=True)
    def function(out, row_stride, acc, part, factor, rows, cols):
        # Of both rows, four columns apart; then the same of whole chunks.
        x = cuda.local.array(WORDS, uint32)
        lane_id = uint32(cuda.threadIdx.x) & 31
        quarter = lane_id & 3
        for half in range(2):
            for n in range(N // 16):
                group = (half * (N // 16) + n) * 4
                for i in range(4):
                    at = 16 * n + 4 * i + 2 * half
                    x[group + i] = pair(
                        acc[part, at] * factor[half], acc[part, at + 1] * factor[half]
                    )
                for bit in range(1, 3):
                    upper = quarter & bit != 0
                    for i in range(4):
                        if not i & bit:
                            first, second = group + i, group + i + bit
                            given = int32(x[first] if upper else x[second])
                            other = uint32(cuda.shfl_xor_sync(0xFFFFFFFF, given, bit))
                            if upper:
                                x[first] = other
                            else:
                                x[second] = other
        for half in range(2):
            row = int32((lane_id >> 2) + 8 * half)
            if row < rows:
                for n in range(N // 16):
                    col, chunk = int32(32 * n + 8 * quarter), (half * (N // 16) + n) * 4
                    to = advance(out, row * row_stride + col)
                    if int32(col + 8) <= cols:
                        copy16(reinterpret(uint32, to), 0, x, chunk)
                    else:
                        elements = reinterpret(T, x)
                        for i in range(8):
                            if int32(col + i) < cols:
                                to[i] = elements[2 * chunk + i]

    return function
