"""Arrays as users bring them: NumPy's, CuPy's, or anything that can be viewed as one.

CuPy is imported only where an array of its own, or one on a GPU, asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from workbench import compile as compiler
from workbench.problem import Array


def is_device_array(x: Any) -> bool:
    """Whether `x` is a CuPy array, without importing CuPy for those who have none."""
    return type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "data")


def array_module(x: Array) -> ModuleType:
    """The module, numpy or cupy, that `x` belongs to."""
    if is_device_array(x):
        import cupy

        return cupy  # type: ignore[no-any-return]
    return np


def as_array(name: str, x: Any) -> Array:
    """Take `x` as a NumPy or CuPy array without a copy; anything with DLPack or CAI is viewed."""
    if type(x) is np.ndarray or is_device_array(x):
        return x
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if hasattr(x, "__cuda_array_interface__"):
        return _cupy_for(name).asarray(x)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        try:
            if x.__dlpack_device__()[0] == 1:  # kDLCPU
                return np.from_dlpack(x)
            return _cupy_for(name).from_dlpack(x)
        except compiler.ToolchainError:
            raise
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(f"{name}: its DLPack export cannot be read: {error}") from error
    raise TypeError(
        f"{name} is a {type(x).__name__}; it takes a NumPy or CuPy array, or an object with "
        "__dlpack__ or __cuda_array_interface__"
    )


def _cupy_for(name: str) -> ModuleType:
    """CuPy, which the argument `name` needs."""
    missing = compiler.gpu_missing()
    if missing is not None:
        raise compiler.ToolchainError(f"{name} is on a GPU, but {missing}")
    import cupy

    return cupy  # type: ignore[no-any-return]


def device_of(arrays: Iterable[Array]) -> AbstractContextManager[Any]:
    """Make the GPU of the first CuPy array the current one: outputs belong beside the inputs."""
    for x in arrays:
        if is_device_array(x):
            return x.device  # type: ignore[no-any-return]
    return nullcontext()


def native(x: Array) -> Array:
    """Copy a NumPy array that no kernel can read: foreign byte order or unaligned elements."""
    if isinstance(x, np.ndarray) and not (x.dtype.isnative and x.flags.aligned):
        return x.astype(x.dtype.newbyteorder("="), order="C")
    return x


def canonical(x: Array, layout: str) -> Array:
    """View (…, seqlen, head_dim) of 2 to 4 axes as (batch, heads, seqlen, head_dim)."""
    if layout == "bnhd":
        if x.ndim == 2:
            x = x[:, None]
        if x.ndim == 3:
            x = x[None]
        return x.swapaxes(1, 2)
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x


def unit_last_stride(x: Array) -> Array:
    """`x`, or a contiguous copy where a row's elements do not lie side by side."""
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize and x.size:
        return array_module(x).ascontiguousarray(x)
    return x


class _Span:
    """The memory of an array as NumPy sees addresses: never read, on a GPU or not."""

    def __init__(self, x: Array) -> None:
        pointer = x.data.ptr if is_device_array(x) else x.ctypes.data
        self.__array_interface__ = {
            "data": (pointer, False),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.itemsize}",
            "version": 3,
        }


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays have an element of memory in common, however their strides interlace."""
    if is_device_array(a) != is_device_array(b) or not (a.size and b.size):
        return False
    x, y = np.asarray(_Span(a)), np.asarray(_Span(b))
    try:
        return np.shares_memory(x, y, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return np.may_share_memory(x, y)
