"""Tensor maps: what a bulk tensor copy has to know about an array in global memory.

On a GPU the driver encodes them, `cuTensorMapEncodeTiled`; `encode_tiled` takes the same parameters
under the same restrictions (CUDA Driver API, "Tensor Map Object Management") and gives as many
bytes, whose content is the simulator's own: kernels only pass them on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BYTES = 128
_MAGIC = 0x50414D52534E4554
_FORMAT = struct.Struct("<Q8BQ5Q4Q5B3x")
_BOX = struct.Struct("<5H")

# The driver's numbers.
DATA_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype(np.uint8), 1: np.dtype(np.uint16), 2: np.dtype(np.uint32), 3: np.dtype(np.int32),
    4: np.dtype(np.uint64), 5: np.dtype(np.int64), 6: np.dtype(np.float16),
    7: np.dtype(np.float32), 8: np.dtype(np.float64), 9: np.dtype(ml_dtypes.bfloat16),
    10: np.dtype(np.float32), 11: np.dtype(np.float32), 12: np.dtype(np.float32),
}  # fmt: skip
FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = 6, 7, 8, 9
INTERLEAVE_NONE = 0
SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = range(4)
L2_PROMOTION_NONE, L2_PROMOTION_64B, L2_PROMOTION_128B, L2_PROMOTION_256B = range(4)
OOB_FILL_NONE, OOB_FILL_NAN = range(2)
_SPANS = {SWIZZLE_32B: 32, SWIZZLE_64B: 64, SWIZZLE_128B: 128}  # bytes in which chunks change place


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A decoded tensor map; axes are innermost first.

    Attributes
    ----------
    dtype : numpy.dtype
    address : int
        Of element 0.
    sizes, box, steps : tuple of int
        Elements of the array and of a box, and every how many of them a box takes.
    strides : tuple of int
        In bytes, of all axes: the innermost one's is the size of an element.
    swizzle : int
    nan : bool
        Whether elements outside of the array are NaN, not 0.
    """

    dtype: np.dtype[Any]
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    nan: bool

    @property
    def bytes(self) -> int:
        """Of a box in shared memory."""
        return int(np.prod(self.box)) * self.dtype.itemsize


def encode_tiled(
    data_type: int,
    rank: int,
    global_address: int,
    global_dim: Sequence[int],
    global_strides: Sequence[int],
    box_dim: Sequence[int],
    element_strides: Sequence[int],
    interleave: int = INTERLEAVE_NONE,
    swizzle: int = SWIZZLE_NONE,
    l2_promotion: int = L2_PROMOTION_NONE,
    oob_fill: int = OOB_FILL_NONE,
) -> bytes:
    """A tensor map for the simulator, from what ``cuTensorMapEncodeTiled`` takes.

    Parameters
    ----------
    data_type : int
        The driver's ``CUtensorMapDataType``; its packed 4 and 6-bit types are not known.
    rank : int
        Number of axes, 1 to 5; all sequences are innermost axis first.
    global_address : int
        Where element 0 is; a multiple of 16.
    global_dim : sequence of int
        Sizes of the array.
    global_strides : sequence of int
        In bytes, of all axes but the innermost: rank - 1 multiples of 16.
    box_dim : sequence of int
        Sizes of a box, up to 256. The innermost is a multiple of 16 bytes and, with a swizzle, not
        more than its span.
    element_strides : sequence of int
        Every how many elements of an axis a box takes one, 1 to 8; the innermost is ignored.
    interleave : int
        Only 0.
    swizzle : int
        0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes.
    l2_promotion : int
        0 to 3; changes nothing here.
    oob_fill : int
        What loads take for elements outside of the array: 0 zeros, 1 NaN.

    Returns
    -------
    bytes
        128 of them.

    Raises
    ------
    ValueError
        At the first parameter that the driver would not take.
    """
    dtype = DATA_TYPES.get(data_type)
    _demand(dtype is not None, "data_type", data_type, f"one of {sorted(DATA_TYPES)}")
    assert dtype is not None
    _demand(1 <= rank <= 5, "rank", rank, "1 to 5")
    for name, given, count in (
        ("global_dim", global_dim, rank),
        ("global_strides", global_strides, rank - 1),
        ("box_dim", box_dim, rank),
        ("element_strides", element_strides, rank),
    ):
        _demand(len(given) == count, name, list(given), f"{count} numbers for rank {rank}")
    _demand(interleave == INTERLEAVE_NONE, "interleave", interleave, "0, none")
    _demand(swizzle in range(4), "swizzle", swizzle, "0 to 3")
    _demand(l2_promotion in range(4), "l2_promotion", l2_promotion, "0 to 3")
    _demand(oob_fill in (OOB_FILL_NONE, OOB_FILL_NAN), "oob_fill", oob_fill, "0 or 1")
    if oob_fill == OOB_FILL_NAN:
        floats = dtype.kind == "f" or dtype == np.dtype(ml_dtypes.bfloat16)
        _demand(floats, "oob_fill", oob_fill, f"0 for {dtype}: only floats have a NaN")
    _demand(global_address % 16 == 0, "global_address", global_address, "a multiple of 16")
    for size in global_dim:
        _demand(1 <= size <= 2**32, "global_dim", list(global_dim), "1 to 2**32 each")
    for stride in global_strides:
        allowed = stride % 16 == 0 and 0 <= stride < 2**40
        _demand(allowed, "global_strides", list(global_strides), "multiples of 16 below 2**40")
    for size in box_dim:
        _demand(1 <= size <= 256, "box_dim", list(box_dim), "1 to 256 each")
    for step in element_strides:
        _demand(1 <= step <= 8, "element_strides", list(element_strides), "1 to 8 each")
    inner = box_dim[0] * dtype.itemsize
    _demand(inner % 16 == 0, "box_dim", list(box_dim), "a multiple of 16 bytes in its first axis")
    span = _SPANS.get(swizzle, inner)
    _demand(inner <= span, "box_dim", list(box_dim), f"at most the swizzle's {span} bytes in its "
            "first axis")  # fmt: skip
    dims = [size - 1 for size in global_dim] + [0] * (5 - rank)
    strides = [*global_strides, *[0] * (5 - rank)][:4]
    steps = [1, *element_strides[1:], *[1] * (5 - rank)]
    head = _FORMAT.pack(
        _MAGIC, data_type, rank, interleave, swizzle, l2_promotion, oob_fill, 0, 0,
        global_address, *dims, *strides, *steps,
    )  # fmt: skip
    return (head + _BOX.pack(*box_dim, *[1] * (5 - rank))).ljust(BYTES, b"\0")


def _demand(condition: bool, name: str, given: Any, wanted: str) -> None:
    if not condition:
        raise ValueError(f"tensor map: {name} is {given}, but must be {wanted}")


def decode_tiled(data: bytes) -> TensorMap:
    """What `encode_tiled` encoded.

    Raises
    ------
    ValueError
        If these bytes are none.
    """
    fields = _FORMAT.unpack_from(data)
    if fields[0] != _MAGIC:
        raise ValueError("no tensor map of workbench.simulator.tensormap.encode_tiled")
    data_type, rank, _, swizzle, _, oob_fill = fields[1:7]
    dtype = DATA_TYPES[data_type]
    address, sizes, strides = fields[9], fields[10:15], fields[15:19]
    box = _BOX.unpack_from(data, _FORMAT.size)
    return TensorMap(
        dtype, address, tuple(size + 1 for size in sizes[:rank]),
        (dtype.itemsize, *strides[: rank - 1]), box[:rank], tuple(fields[19 : 19 + rank]),
        swizzle, oob_fill == OOB_FILL_NAN,
    )  # fmt: skip


def swizzled(addresses: Any, span: int) -> Any:
    """Where a byte of shared memory goes: chunks of 16 bytes change place in `span` bytes.

    Of the address, bits 4 and up are combined by exclusive or with bits 7 and up: one bit for a
    span of 32 bytes, two for 64, three for 128.
    """
    return addresses ^ (addresses >> 7 & span // 16 - 1) << 4 if span > 16 else addresses


def span_of(swizzle: int) -> int:
    """Bytes in which a swizzle lets chunks change place."""
    return _SPANS.get(swizzle, 16)
