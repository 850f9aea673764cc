"""Products of CuPy's halves by cuBLAS itself: `cupy.matmul` does not take bfloat16."""

from __future__ import annotations

import numpy as np

from workbench.problem import Array

_TYPES = {"float16": 2, "bfloat16": 14}  # CUDA_R_16F, CUDA_R_16BF


def times_transposed(a: Array, b: Array, out: Array) -> None:
    """Set ``out = a b^T``, added up in float32.

    Parameters
    ----------
    a, b, out : cupy.ndarray (m, k), (n, k) and (m, n)
        Contiguous, all of float16 or all of bfloat16, on the current GPU.
    """
    from cupy.cuda.device import get_cublas_handle
    from cupy_backends.cuda.libs import cublas

    (m, k), n = a.shape, len(b)
    if not out.size:
        return
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    kind = _TYPES[a.dtype.name]
    # cuBLAS counts by columns: to it our rows are columns, and it is asked for out^T = b a^T.
    cublas.gemmEx(
        get_cublas_handle(), cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, n, m, k,
        one.ctypes.data, b.data.ptr, kind, k, a.data.ptr, kind, k,
        zero.ctypes.data, out.data.ptr, kind, n,
        cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip
