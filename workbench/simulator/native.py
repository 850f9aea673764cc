"""The loops over lanes that NumPy has no function for, compiled by Numba and kept on disk.

Every function takes the accesses of one instruction: an offset in bytes and a lane each, in the
order of the lanes, so that those of a warp lie together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, vectorize
from numba.extending import intrinsic

WARP = 32
PAGE_BITS = 9  # regions begin at multiples of 512 bytes, as CuPy's allocations do
SECTOR_BYTES = 32

# What can be wrong with an access.
OUT_OF_RANGE, MISALIGNED, READ_ONLY, UNWRITTEN, IN_FLIGHT, RACE = range(1, 7)

READABLE, WRITABLE = 1, 2

# A tag says who touched memory last: thread << WHO | instruction << PC | flags.
WHO, PC, PC_MASK = 26, 2, 2**24 - 1
FLYING, STRONG = 2, 1
NOBODY, INITIAL = -1, -2  # never written: reading it is a fault, or gives what the host put there
# Columns of the shadow of a piece of memory: tag and stamp of the last write, of the last read, of
# one by another thread of that reader's warp and of one by another warp.
WRITE, READ, WARP_READ, OTHER_READ = 0, 2, 4, 6
SHADOW_COLUMNS = 8
NO_SHADOW = -(2**62)  # of a region that is not watched


def _kept(decorator: Callable[..., Any], *signatures: Any) -> Callable[[Any], Any]:
    """One of Numba's decorators, with its disk cache wherever that can be written to."""

    def compiled(function: Any) -> Any:
        try:
            return decorator(*signatures, cache=True)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return decorator(*signatures)(function)

    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def _fused(_typing: Any, a: Any, _b: Any, _c: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        return builder.fma(*args)

    return a(a, a, a), codegen


@_kept(vectorize, ["f4(f4, f4, f4)", "f8(f8, f8, f8)"])
def _fma(a: Any, b: Any, c: Any) -> Any:
    return _fused(a, b, c)


fma: np.ufunc = _fma.ufunc  # a * b + c, rounded once; Numba's wrapper around it costs twice as much


@_kept(njit)
def find_in_arena(addresses: Any, base: int, rights: Any, size: int, need: int) -> Any:
    """Offsets of accesses to global memory; where the first that is not allowed stands, and why.

    `rights` says of each byte whether it exists and may be written to (READABLE, WRITABLE).
    """
    offsets = np.empty(addresses.size, np.int64)
    for i in range(addresses.size):
        offset = addresses[i] - base
        if offset < 0 or offset + size > rights.size:
            return offsets, i, OUT_OF_RANGE
        if offset % size != 0:
            return offsets, i, MISALIGNED
        both = rights[offset] & rights[offset + size - 1]
        if both & need != need:
            return offsets, i, READ_ONLY if both & READABLE else OUT_OF_RANGE
        offsets[i] = offset
    return offsets, -1, 0


@_kept(njit)
def find_in_own(addresses: Any, owners: Any, stride: int, limit: int, size: int) -> Any:
    """The same in memory of which each block, or each lane, has `limit` bytes of its own."""
    offsets = np.empty(addresses.size, np.int64)
    for i in range(addresses.size):
        offset = addresses[i]
        if offset < 0 or offset + size > limit:
            return offsets, i, OUT_OF_RANGE
        if offset % size != 0:
            return offsets, i, MISALIGNED
        offsets[i] = offset + owners[i] * stride
    return offsets, -1, 0


@_kept(njit)
def granules_of(offsets: Any, regions: Any, starts: Any, shifts: Any, size: int) -> Any:
    """Where the shadow of each access begins, -1 where there is none, and how long it is."""
    first = np.empty(offsets.size, np.int64)
    counts = np.empty(offsets.size, np.int64)
    for i in range(offsets.size):
        region = regions[offsets[i] >> PAGE_BITS]
        first[i] = -1
        if starts[region] != NO_SHADOW:
            first[i] = starts[region] + (offsets[i] >> shifts[region])
        counts[i] = max(1, size >> shifts[region])
    return first, counts


@_kept(njit)
def _ordered(
    tag: int, stamp: int, who: int, now: int, block: int, threads: int, row: Any, owner: Any
) -> bool:
    """Whether an earlier access is sure to have happened before one of thread `who`.

    A stamp is barriers << 32 | barriers of the warp. `row` holds, for every other block, up to
    which of its barriers `who` knows its writes, and `owner` the thread that it knows them from.
    """
    other = tag >> WHO
    if other == who:
        return True
    first = block * threads
    if first <= other < first + threads:
        if stamp >> 32 < now >> 32:
            return True
        return other >> 5 == who >> 5 and stamp & 0xFFFFFFFF < now & 0xFFFFFFFF
    if row.size == 1:
        return False
    other_block = other // threads
    known = row[other_block]
    if stamp >> 32 == known:
        return bool(owner[other_block] == other)
    return bool(stamp >> 32 < known)


@_kept(njit)
def track(
    shadow: Any, first: Any, counts: Any, lanes: Any, base: int, threads: int, barriers: Any,
    warp_barriers: Any, clock: Any, owner: Any, acquired: Any, pc: int, flags: int, write: bool,
    fault: Any,
) -> int:  # fmt: skip
    """Note who reads or writes which piece of memory; what is wrong with it, or 0.

    Parameters
    ----------
    first, counts : int64 arrays
        The rows of `shadow` that each access touches.
    base : int
        Number of lane 0 among all threads of the grid.
    barriers, warp_barriers : int64 arrays
        How many the blocks and the warps of these lanes have passed.
    clock, owner : int64 arrays
        Two rows a block, `_ordered`: what all its threads know, and what those that are
        `acquired` know already.
    flags : int
        STRONG for atomics and ordered accesses, which do not race with each other; FLYING for a
        copy that has not arrived.
    fault : int64 array
        Gets the number of the access, the tag of the other one, and the row of `shadow`.
    """
    for i in range(first.size):
        if first[i] < 0:
            continue
        lane = lanes[i]
        who = base + lane
        local_block = lane // threads
        block = base // threads + local_block
        now = barriers[local_block] << 32 | warp_barriers[lane // WARP]
        tag = who << WHO | pc << PC | flags
        line = 0 if clock.shape[1] == 1 else 2 * block + acquired[lane]
        row, source = clock[line], owner[line]
        for g in range(first[i], first[i] + counts[i]):
            last = shadow[g, WRITE]
            code = 0
            if last >= 0:
                if last & FLYING and not (write and last >> WHO == who):
                    code = IN_FLIGHT
                elif not (last & flags & STRONG) and not _ordered(
                    last, shadow[g, WRITE + 1], who, now, block, threads, row, source
                ):
                    code = RACE
            elif last == NOBODY and not write:
                code = UNWRITTEN
            if code != 0:
                fault[0], fault[1], fault[2] = i, last, g
                return code
            if write:
                for column in (READ, WARP_READ, OTHER_READ):
                    reader = shadow[g, column]
                    if (
                        reader >= 0
                        and not (reader & flags & STRONG)
                        and not _ordered(
                            reader, shadow[g, column + 1], who, now, block, threads, row, source
                        )
                    ):
                        fault[0], fault[1], fault[2] = i, reader, g
                        return RACE
                    shadow[g, column] = NOBODY
                shadow[g, WRITE] = tag
                shadow[g, WRITE + 1] = now
            else:
                reader = shadow[g, READ]
                if reader >= 0 and reader >> WHO != who:
                    # Of two readers at least one is another thread than the next writer.
                    if reader >> (WHO + 5) == who >> 5:
                        shadow[g, WARP_READ] = reader
                        shadow[g, WARP_READ + 1] = shadow[g, READ + 1]
                    else:
                        shadow[g, OTHER_READ] = reader
                        shadow[g, OTHER_READ + 1] = shadow[g, READ + 1]
                        shadow[g, WARP_READ] = NOBODY
                shadow[g, READ] = tag
                shadow[g, READ + 1] = now
    return 0


@_kept(njit)
def _insert(values: Any, count: int, value: int) -> int:
    """Add to a sorted list without repetitions; its new length."""
    at = count
    while at > 0 and values[at - 1] > value:
        at -= 1
    if at > 0 and values[at - 1] == value:
        return count
    for i in range(count, at, -1):
        values[i] = values[i - 1]
    values[at] = value
    return count + 1


@_kept(njit)
def count_sectors(offsets: Any, lanes: Any, size: int, regions: Any, row: Any, table: Any) -> None:
    """Add a global access to `row` and, for each array, to `table`.

    Both count requests of a warp, threads, bytes, sectors of 32 bytes, and the sectors that the
    same bytes would take side by side.
    """
    addresses, sectors = np.empty(WARP, np.int64), np.empty(WARP, np.int64)
    start = 0
    while start < offsets.size:
        warp, end = lanes[start] // WARP, start
        distinct, touched = 0, 0
        while end < offsets.size and lanes[end] // WARP == warp:
            distinct = _insert(addresses, distinct, offsets[end])
            touched = _insert(sectors, touched, offsets[end] // SECTOR_BYTES)
            end += 1
        least = (distinct * size + SECTOR_BYTES - 1) // SECTOR_BYTES
        region = regions[offsets[start] >> PAGE_BITS]
        for counts in (row, table[region]):
            counts[0] += 1
            counts[1] += end - start
            counts[2] += (end - start) * size
            counts[3] += touched
            counts[4] += least
        start = end


@_kept(njit)
def _neighbours_share(offsets: Any, lanes: Any, start: int, end: int, bit: int) -> bool:
    """Whether each pair of lanes that differ in `bit` wants one address, or one of them nothing."""
    where = np.full(WARP, -1, np.int64)
    for i in range(start, end):
        where[lanes[i] % WARP] = offsets[i]
    for lane in range(WARP):
        other = where[lane ^ bit]
        if where[lane] >= 0 and other >= 0 and other != where[lane]:
            return False
    return True


@_kept(njit)
def count_banks(offsets: Any, lanes: Any, size: int, row: Any) -> None:
    """Add a shared-memory access to `row`: requests, threads, bytes, wavefronts, without conflicts.

    A wavefront serves each of the 32 banks of four bytes once. Accesses of 8 bytes go by half
    warps and of 16 bytes by quarters; two of these go together where all neighbours (lanes that
    differ in bit 0, or all that differ in bit 1) want the same.
    """
    addresses = np.empty(WARP, np.int64)
    banks = np.empty(WARP, np.int64)
    start = 0
    while start < offsets.size:
        warp, end = lanes[start] // WARP, start
        while end < offsets.size and lanes[end] // WARP == warp:
            end += 1
        together = WARP if size <= 4 else (16 if size == 8 else 8)
        if size > 4 and (
            _neighbours_share(offsets, lanes, start, end, 1)
            or _neighbours_share(offsets, lanes, start, end, 2)
        ):
            together *= 2
        row[0] += 1
        row[1] += end - start
        row[2] += (end - start) * size
        i = start
        while i < end:
            part = lanes[i] % WARP // together
            distinct = 0
            while i < end and lanes[i] % WARP // together == part:
                distinct = _insert(addresses, distinct, offsets[i] // max(size, 4))
                i += 1
            banks[:] = 0
            words = max(1, size // 4)
            for j in range(distinct):
                for word in range(words):
                    banks[(addresses[j] * words + word) % WARP] += 1
            row[3] += banks.max()
            row[4] += (distinct * words + WARP - 1) // WARP
        start = end
