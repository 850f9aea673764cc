"""One tile of a matrix product, through shared memory. Twin: cuda_src/matmul.cuh.

  acc += a b        a: rows x depth,  b: depth x cols, both in global memory

A block of 256 threads owns BLOCK x BLOCK results, in registers: thread (y, x) of 16 x 16 keeps
rows y, y + 16, ... and columns x, x + 16, ... of them. The depth is walked in steps of BLOCK_K:
the block copies that much of a and of b to shared memory, where it is then read 16 times.

                   b_smem   x . x . x . x .      thread (y, x), here of 2 x 2, reads the marked
                            x . x . x . x .      elements, BLOCK / 16 of either operand for each
    a_smem  y y             * . * . * . * .      step of the depth, and makes a product of each
            . .             . . . . . . . .      pair
            y y     acc     * . * . * . * .
            . .             . . . . . . . .

In shared memory both operands lie depth first, with a gap of one element after each BLOCK: so
threads that copy neighbours along the depth write to different banks.
"""

from numba import cuda
from numba.cuda import types

from .common import advance, div, like, rem, to_acc

MATMUL_THREADS = 256
MATMUL_SIDE = 16

int32 = types.int32


# tile[d, i] = element d of vector i of source, or 0 where that does not exist. With DEPTH_INNER
# the elements of a vector are neighbours in memory, else equal elements of all vectors are; stride
# leads from one such run to the next.
@cuda.jit(device=True, forceinline=True)
def load_operand(BLOCK, BLOCK_K, DEPTH_INNER, tile, source, stride, vectors, depth):
    RUN = BLOCK_K if DEPTH_INNER else BLOCK
    STEP = div(MATMUL_THREADS, RUN)
    along = int32(rem(cuda.threadIdx.x, RUN))  # neighbouring threads read neighbours
    run = int32(div(cuda.threadIdx.x, RUN))
    source = advance(source, run * stride + along)
    for _ in range(div(BLOCK * BLOCK_K, MATMUL_THREADS)):
        i = run if DEPTH_INNER else along
        d = along if DEPTH_INNER else run
        x = like(tile[0, 0], 0)
        if i < vectors and d < depth:
            x = to_acc(source[0])
        tile[d, i] = x
        run = int32(run + STEP)
        source = advance(source, STEP * stride)


# A_TRANSPOSED: a lies in memory as depth x rows; B_TRANSPOSED: b lies there as cols x depth. All
# threads of the block must call. A barrier comes first, so a and b may be what they just wrote.
def matmul_tile(Acc, BLOCK, BLOCK_K, A_TRANSPOSED, B_TRANSPOSED):
    OWN = BLOCK // MATMUL_SIDE

    @cuda.jit(device=True, forceinline=True)
    def function(acc, a, a_stride, b, b_stride, rows, cols, depth, a_smem, b_smem):
        y = int32(div(cuda.threadIdx.x, MATMUL_SIDE))
        x = int32(rem(cuda.threadIdx.x, MATMUL_SIDE))
        a_frag = cuda.local.array(OWN, Acc)
        b_frag = cuda.local.array(OWN, Acc)
        d_start = int32(0)
        while d_start < depth:
            a_step = advance(a, d_start * a_stride if A_TRANSPOSED else d_start)
            b_step = advance(b, d_start if B_TRANSPOSED else d_start * b_stride)
            cuda.syncthreads()  # the last step's operands have been read
            load_operand(
                BLOCK, BLOCK_K, not A_TRANSPOSED, a_smem, a_step, a_stride, rows, depth - d_start
            )
            load_operand(
                BLOCK, BLOCK_K, B_TRANSPOSED, b_smem, b_step, b_stride, cols, depth - d_start
            )
            cuda.syncthreads()  # these are complete
            for d in range(BLOCK_K):
                for i in range(OWN):
                    a_frag[i] = a_smem[d, y + i * MATMUL_SIDE]
                    b_frag[i] = b_smem[d, x + i * MATMUL_SIDE]
                for i in range(OWN):
                    for j in range(OWN):
                        acc[i, j] += a_frag[i] * b_frag[j]
            d_start += int32(BLOCK_K)

    return function
