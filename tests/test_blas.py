"""Products of halves by cuBLAS, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from workbench.blas import times_transposed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 128, 32), (1, 1, 1), (0, 4, 4), (33, 1, 257)])
def test_times_transposed(dtype: type, shape: tuple[int, int, int]) -> None:
    import cupy

    m, n, k = shape
    rng = np.random.default_rng(sum(shape))
    a, b = (rng.standard_normal((rows, k)).astype(dtype) for rows in (m, n))
    out = cupy.empty((m, n), dtype)
    times_transposed(cupy.asarray(a), cupy.asarray(b), out)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    scale = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(out.get().astype(np.float64) - exact) <= unit * (scale + 1e-3)).all()
