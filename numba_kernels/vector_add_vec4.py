"""vector_add_vec4: the sum of two arrays at the speed of the memory.

  out[i] = a[i] + b[i]

A GPU moves memory fastest in 16-byte accesses with many of them under way, so each thread first
starts all its loads, UNROLL from each array, and only then adds and stores.

Work split:    a block takes UNROLL * blockDim.x vectors of 16 bytes at a time, then strides over
               the grid; elements before the first and after the last vector go one a thread
Shared memory: none
Registers:     2 * UNROLL vectors
Twin:          cuda_src/vector_add_vec4.cu
Launched by:   workbench/launchers.py, vector_add_vec4
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, address_of, div, from_acc, load16, store16, to_acc, vec_length


# Where element i of a C-contiguous array of this shape lies in one with these strides.
@cuda.jit(device=True, forceinline=True)
def strided_offset(i, shape, strides):
    rows = div(i, shape.col)
    heads = div(rows, shape.row)
    batches = div(heads, shape.head)
    return (
        batches * strides.batch
        + (heads - batches * shape.head) * strides.head
        + (rows - heads * shape.row) * strides.row
        + (i - rows * shape.col) * strides.col
    )


def vector_add_vec4(T, STRIDED, UNROLL):
    Acc = acc_t(T)
    LENGTH = vec_length(T)
    SIZE = T.bitwidth // 8
    FRAG = UNROLL * LENGTH
    int64, uint64 = types.int64, types.uint64

    @cuda.jit(launch_bounds=1024)
    def kernel(
        a,  # shape; contiguous unless STRIDED
        b,
        out,
        size,
        shape,  # read only if STRIDED, as are the strides
        a_strides,
        b_strides,
        out_strides,
    ):
        block_dim = int64(cuda.blockDim.x)
        threads = cuda.gridDim.x * block_dim
        thread = cuda.blockIdx.x * block_dim + cuda.threadIdx.x

        # 1. How many elements come before the first whole vector: all, if the addresses do not
        #    reach a multiple of 16 together
        address = address_of(out)
        together = (
            not STRIDED
            and (address_of(a) - address) % uint64(16) == 0
            and (address_of(b) - address) % uint64(16) == 0
        )
        head = min(size, div((uint64(0) - address) % uint64(16), SIZE)) if together else size
        vectors = div(size - head, LENGTH)

        # 2. Add whole vectors
        if not STRIDED:
            tile = int64(cuda.blockIdx.x)
            while tile * block_dim * UNROLL < vectors:
                first = tile * block_dim * UNROLL + cuda.threadIdx.x
                a_frag = cuda.local.array(FRAG, Acc)
                b_frag = cuda.local.array(FRAG, Acc)
                for u in range(UNROLL):
                    vector = first + u * block_dim
                    if vector < vectors:
                        load16(a_frag, u * LENGTH, a, head + vector * LENGTH)
                        load16(b_frag, u * LENGTH, b, head + vector * LENGTH)
                for u in range(UNROLL):
                    vector = first + u * block_dim
                    if vector < vectors:
                        for i in range(LENGTH):
                            a_frag[u * LENGTH + i] += b_frag[u * LENGTH + i]
                        store16(out, head + vector * LENGTH, a_frag, u * LENGTH)
                tile += cuda.gridDim.x

        # 3. Add the elements outside of them
        single = thread
        while single < size - vectors * LENGTH:
            i = single if single < head else single + vectors * LENGTH
            if STRIDED:
                total = to_acc(a[strided_offset(i, shape, a_strides)])
                total += to_acc(b[strided_offset(i, shape, b_strides)])
                out[strided_offset(i, shape, out_strides)] = from_acc(T, total)
            else:
                out[i] = from_acc(T, to_acc(a[i]) + to_acc(b[i]))
            single += threads

    return kernel
