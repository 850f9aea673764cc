"""The memories of the simulated GPU: global, one of each block, one of each thread.

Global memory is one run of bytes with a region for each array of the call. Bytes between the
regions, and those between the elements of an array with strides, do not exist: touching them is a
fault, as is an access that is not aligned to its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.simulator import native

Array = Any  # numpy.ndarray

# Where the memories lie in one address space, for pointers that may lead into any of them.
SHARED_BASE = 1 << 34
LOCAL_BASE = 1 << 35
PARAM_BASE = 1 << 36
GLOBAL_BASE = 1 << 40
# An address in the shared memory of block r of a cluster is (r + 1) << RANK | offset; a block's own
# addresses are offsets alone.
RANK = 24
ALIGNMENT = 1 << native.PAGE_BITS
# A module's own variables and constants come first in global memory, behind a page of nothing.
MODULE_START, MODULE_BYTES = ALIGNMENT, 1 << 16
MODULE_BASE = GLOBAL_BASE + MODULE_START
_WIDEST = 32  # bytes of the widest access


class Bytes:
    """A run of bytes that is read and written in elements of any size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._words = np.zeros(-(-max(size, 1) // _WIDEST) * _WIDEST // 8, np.uint64)
        self.bytes: Array = self._words.view(np.uint8)
        self._elements = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self._vectors = {n: self.bytes.view(f"V{n}") for n in (2, 4, 8, 16, 32)}

    def load(self, offsets: Array, element: int, count: int) -> list[Array]:
        """`count` neighbouring elements of `element` bytes at each offset, as unsigned numbers."""
        if count == 1:
            return [self._elements[element].take(offsets // element)]
        vectors = self._vectors[element * count].take(offsets // (element * count))
        table = vectors.view(f"u{element}").reshape(-1, count)
        return [table[:, i].copy() for i in range(count)]

    def store(self, offsets: Array, values: list[Array], element: int) -> None:
        """The opposite; of several writes to one place the last lane's stays."""
        count = len(values)
        if count == 1:
            self._elements[element][offsets // element] = values[0].view(f"u{element}")
            return
        table = np.empty((offsets.size, count), f"u{element}")
        for i, value in enumerate(values):
            table[:, i] = value.view(f"u{element}")
        vectors = table.view(f"V{element * count}")[:, 0]
        self._vectors[element * count][offsets // (element * count)] = vectors


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array that a kernel gets a pointer to.

    Attributes
    ----------
    array : numpy.ndarray
        Of any strides.
    writable : bool
        Whether a kernel may write to it.
    written : bool
        Whether what it holds means anything: a kernel must not read from it before it wrote.
    """

    array: Array
    writable: bool = False
    written: bool = True


@dataclass(frozen=True, slots=True)
class Region:
    """Where a buffer lies in global memory: from its first element in memory to its last."""

    name: str
    start: int
    size: int
    buffer: Buffer

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.buffer.array.itemsize)

    def element(self, offset: int) -> str:
        """The element at an offset in global memory, like ``q[0, 1, 17, 3]``."""
        array = self.buffer.array
        distance = offset - self.start
        index = [0] * array.ndim
        for axis in sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])):
            stride = array.strides[axis]
            if stride != 0:
                steps = min(distance // abs(stride), array.shape[axis] - 1)
                distance -= steps * abs(stride)
                index[axis] = steps if stride > 0 else array.shape[axis] - 1 - steps
        return f"{self.name}[{', '.join(map(str, index))}]"


def _lowest(array: Array) -> int:
    """Distance from the first element in memory to element 0, never negative."""
    steps = zip(array.shape, array.strides, strict=True)
    return -sum(min(0, int(stride * (n - 1))) for n, stride in steps)


def _extent(array: Array) -> int:
    """Bytes from an array's first element in memory to the end of its last."""
    if array.size == 0:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return sum(int(abs(stride) * (n - 1)) for n, stride in steps) + int(array.itemsize)


def _place_in_page(array: Array) -> int:
    """Where an array begins in a page of global memory: this decides on its alignment.

    The memory that it is a view of begins at the start of a page, as what CuPy allocates does; at
    a distance only if it is not aligned to 16 bytes even on the host.
    """
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = int(base.__array_interface__["data"][0])
    return int(array.__array_interface__["data"][0]) - start + start % 16


class GlobalMemory(Bytes):
    """Global memory with the buffers of one call.

    Attributes
    ----------
    addresses : dict
        Of element 0 of each buffer.
    rights : uint8 array
        What may be done with each byte: see `native.find_in_arena`.
    region_of : int64 array
        Number of the region that each page of 512 bytes belongs to.
    regions : list of Region
        The first one holds the module's own variables.
    """

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.regions: list[Region] = []
        self.addresses: dict[str, int] = {}
        starts, end = [], MODULE_START + MODULE_BYTES
        for buffer in buffers.values():
            begin = end + (_place_in_page(buffer.array) - _lowest(buffer.array)) % ALIGNMENT
            starts.append(begin)
            # Two pages between neighbours: a small step too far never lands in another array.
            end = (-(-(begin + _extent(buffer.array)) // ALIGNMENT) + 2) * ALIGNMENT
        super().__init__(end)
        self.rights = np.zeros(self.bytes.size, np.uint8)
        self.region_of = np.zeros(-(-self.bytes.size // ALIGNMENT), np.int64)
        module = Buffer(self.bytes[MODULE_START : MODULE_START + MODULE_BYTES], writable=True)
        self.regions.append(Region("module", MODULE_START, MODULE_BYTES, module))
        for (name, buffer), start in zip(buffers.items(), starts, strict=True):
            self._place(name, buffer, start)

    def _place(self, name: str, buffer: Buffer, start: int) -> None:
        array = buffer.array
        self.addresses[name] = GLOBAL_BASE + start + _lowest(array)
        region = Region(name, start, _extent(array), buffer)
        first, last = start // ALIGNMENT, (start + region.size) // ALIGNMENT
        self.region_of[first : last + 1] = len(self.regions)
        self.regions.append(region)
        if array.size:
            self.view(region)[...] = array
            rights = native.READABLE | native.WRITABLE * buffer.writable
            element = np.dtype(f"V{array.itemsize}")
            self._view(self.rights, region, element)[...] = np.full(
                array.itemsize, rights, np.uint8
            ).view(element)[0]

    def view(self, region: Region) -> Array:
        """A region as an array like its buffer's."""
        return self._view(self.bytes, region, region.buffer.array.dtype)

    @staticmethod
    def _view(memory: Array, region: Region, dtype: Any) -> Array:
        array = region.buffer.array
        return np.ndarray(
            array.shape, dtype, memory, region.start + _lowest(array), array.strides
        )  # fmt: skip

    def copy_back(self) -> None:
        """Bring what the kernels wrote to the arrays of the caller."""
        for region in self.regions[1:]:
            if region.buffer.writable and region.buffer.array.size:
                region.buffer.array[...] = self.view(region)

    def set_module(self, address: int, data: bytes) -> None:
        """Give a variable of the module its initial value."""
        start = address - GLOBAL_BASE
        if start + len(data) > MODULE_START + MODULE_BYTES:
            raise MemoryError(f"a module's variables take more than {MODULE_BYTES} bytes")
        self.bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)
        self.rights[start : start + len(data)] = native.READABLE | native.WRITABLE


def describe(memory: GlobalMemory, address: int, size: int) -> str:
    """What an access to global memory hits, for a message."""
    if 0 <= address < 4096:
        return f"address {address}: a null pointer"
    offset = address - GLOBAL_BASE
    closest, distance = None, math.inf
    for region in memory.regions[1:]:
        gap = max(region.start - offset, offset + size - region.start - region.size, 0)
        if gap < distance:
            closest, distance = region, gap
    if closest is None or distance > 1 << 20:
        return f"address {address:#x}, far from every array"
    shape = closest.buffer.array.shape
    if distance == 0 and memory.rights[offset]:
        return closest.element(offset)
    if distance == 0:
        return f"between the elements of {closest.name} {shape}"
    side = "before" if offset < closest.start else "past"
    end = "start" if side == "before" else "end"
    return f"{distance} bytes {side} the {end} of {closest.name} {shape}"
