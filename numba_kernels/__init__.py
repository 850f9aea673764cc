"""The Numba twins of the kernels in ``cuda_src``: the same stems, names and steps, in Python."""
