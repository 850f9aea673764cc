"""vector_add: the first kernel to read. One thread adds one element.

  out[i] = a[i] + b[i]

Work split:    thread i of the whole grid takes element i
Shared memory: none
Registers:     a handful
Twin:          cuda_src/vector_add.cu
Launched by:   workbench/launchers.py, vector_add
"""

from numba import cuda
from numba.cuda import types

from .common import from_acc, to_acc


def vector_add(T):
    int64 = types.int64

    @cuda.jit
    def kernel(
        a,  # (size,)
        b,  # (size,)
        out,  # (size,)
        size,  # may pass 2^31
    ):
        # 1. Which element is ours
        i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x

        # 2. Add; the last block may reach past the end
        if i < size:
            out[i] = from_acc(T, to_acc(a[i]) + to_acc(b[i]))

    return kernel
