"""Tensor maps: what the copy engine of sm_90 has to know of an array before it copies tiles."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from workbench.compile import DRIVER, TENSOR_MAP_WORDS

_ALIGNMENT = 64  # bytes, of the encoder's output


@functools.cache
def _encoder() -> Any:
    return ctypes.CDLL(DRIVER).cuTensorMapEncodeTiled


def encode_tiled(
    data_type: int,
    rank: int,
    global_address: int,
    global_dim: Sequence[int],
    global_strides: Sequence[int],
    box_dim: Sequence[int],
    element_strides: Sequence[int],
    interleave: int,
    swizzle: int,
    l2_promotion: int,
    oob_fill: int,
) -> bytes:
    """Encode a tensor map for a GPU; the parameters are the driver's, axes innermost first.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    size = 8 * TENSOR_MAP_WORDS
    memory = ctypes.create_string_buffer(size + _ALIGNMENT)
    start = -ctypes.addressof(memory) % _ALIGNMENT

    def array(kind: Any, numbers: Sequence[int]) -> Any:
        return (kind * len(numbers))(*numbers)

    status = _encoder()(
        ctypes.c_void_p(ctypes.addressof(memory) + start), data_type, ctypes.c_uint32(rank),
        ctypes.c_void_p(global_address), array(ctypes.c_uint64, global_dim),
        array(ctypes.c_uint64, global_strides), array(ctypes.c_uint32, box_dim),
        array(ctypes.c_uint32, element_strides), interleave, swizzle, l2_promotion, oob_fill,
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled refuses (CUresult {status}) an array of {tuple(global_dim)} "
            f"elements, strides of {tuple(global_strides)} bytes"
        )
    return memory.raw[start : start + size]
