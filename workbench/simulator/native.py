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
OUT_OF_RANGE, MISALIGNED, READ_ONLY, UNWRITTEN = range(1, 5)
IN_FLIGHT, RACE, UNFENCED, STILL_READ = range(5, 9)

READABLE, WRITABLE = 1, 2

# A tag says who touched memory last: who << WHO | instruction << PC | flags. Who is block << BLOCK
# | thread; from FIRST_ENGINE on that is no thread but a stream of asynchronous operations.
WHO, PC, PC_MASK = 26, 2, 2**24 - 1
BLOCK, IN_BLOCK, FIRST_ENGINE = 11, 2**11 - 1, 1024
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
def _clearly_ordered(tag: int, stamp: int, who: int, now: int) -> bool:
    """The most frequent reasons for `_ordered`, apart because this is much faster.

    They are the order of a thread's own program, and a barrier of the block (with clocks, stamps
    are too small for that).
    """
    other = tag >> WHO
    if other == who:
        return other & IN_BLOCK < FIRST_ENGINE
    return other >> BLOCK == who >> BLOCK and stamp >> 32 < now >> 32


@_kept(njit)
def _ordered(
    tag: int, stamp: int, who: int, now: int, clock: Any, owner: Any, line: int, seen: Any,
    lane: int, threads: int,
) -> bool:  # fmt: skip
    """Whether an earlier access is sure to have happened before one of `who`, if not clearly.

    With counters a stamp is barriers << 32 | barriers of the warp; `clock[line]` holds, for every
    other block, up to which of its barriers `who` knows its writes, and `owner[line]` the thread
    that it knows them from. With clocks (`seen` is not empty) a stamp is the other's own time;
    `seen[lane]` holds, for everybody in the cluster, up to when `who` knows what they did, and
    `clock[line]` for all other threads. Where `clock` has one column, it says whether blocks may be
    taken to be in order.
    """
    other = tag >> WHO
    block = other >> BLOCK
    if seen.size > 0:
        column = other & IN_BLOCK
        cluster = seen.shape[1]
        if block // cluster == (who >> BLOCK) // cluster:
            if column >= FIRST_ENGINE:
                column += threads - FIRST_ENGINE
            return bool(seen[lane, block % cluster, column] >= stamp)
        if clock.shape[1] == 1:
            return bool(clock[0, 0])
        return bool(clock[line, block * threads + column] >= stamp)
    if block == who >> BLOCK:
        return other >> 5 == who >> 5 and stamp & 0xFFFFFFFF < now & 0xFFFFFFFF
    if clock.shape[1] == 1:
        return bool(clock[0, 0])
    if stamp >> 32 == clock[line, block]:
        return bool(owner[line, block] == other)
    return bool(stamp >> 32 < clock[line, block])


@_kept(njit)
def _forget_readers(
    shadow: Any, g: int, who: int, now: int, flags: int, clock: Any, owner: Any, line: int,
    seen: Any, lane: int, threads: int,
) -> int:  # fmt: skip
    """Of those that are left, before a write: one that it races with, by its tag, or NOBODY."""
    for column in (READ, WARP_READ, OTHER_READ):
        reader = shadow[g, column]
        if (
            reader >= 0
            and not (reader & flags & STRONG)
            and not _ordered(
                reader, shadow[g, column + 1], who, now, clock, owner, line, seen, lane, threads
            )
        ):
            return int(reader)
        shadow[g, column] = NOBODY
    return NOBODY


@_kept(njit)
def _readers_are_done(shadow: Any, g: int, who: int, now: int) -> bool:
    """Forget those readers that are clearly before a write; whether these are all."""
    done = True
    for column in (READ, WARP_READ, OTHER_READ):
        reader = shadow[g, column]
        if reader >= 0 and not _clearly_ordered(reader, shadow[g, column + 1], who, now):
            done = False
        else:
            shadow[g, column] = NOBODY
    return done


@_kept(njit)
def _note_reader(shadow: Any, g: int, tag: int, now: int) -> None:
    """Remember a read, and two earlier ones by others."""
    reader = shadow[g, READ]
    if reader >= 0 and reader >> WHO != tag >> WHO:
        # Of two readers at least one is another thread than the next writer.
        if reader >> (WHO + 5) == tag >> (WHO + 5):
            shadow[g, WARP_READ] = reader
            shadow[g, WARP_READ + 1] = shadow[g, READ + 1]
        else:
            shadow[g, OTHER_READ] = reader
            shadow[g, OTHER_READ + 1] = shadow[g, READ + 1]
            shadow[g, WARP_READ] = NOBODY
    shadow[g, READ] = tag
    shadow[g, READ + 1] = now


@_kept(njit)
def track(
    shadow: Any, busy: Any, first: Any, counts: Any, lanes: Any, first_block: int, threads: int,
    barriers: Any, warp_barriers: Any, times: Any, seen: Any, clock: Any, owner: Any,
    acquired: Any, pc: int, flags: int, write: bool, fault: Any,
) -> int:  # fmt: skip
    """Note who reads or writes which piece of memory; what is wrong with it, or 0.

    Parameters
    ----------
    busy : int64 array
        Of each row of `shadow` the tag of an asynchronous read under way, or NOBODY; may be empty.
    first, counts : int64 arrays
        The rows of `shadow` that each access touches.
    first_block : int
        Number of the block that lane 0 belongs to.
    barriers, warp_barriers : int64 arrays
        How many the blocks and the warps of these lanes have passed.
    times, seen : arrays
        With clocks, the own time of each lane and what it has seen, else empty: see `_ordered`.
    clock, owner : int64 arrays
        The last two of `_ordered`'s for each block; with counters two rows a block, what all its
        threads know, and what those that are `acquired` know already.
    flags : int
        STRONG for atomics and ordered accesses, which do not race with each other; FLYING for a
        copy that has not arrived.
    fault : int64 array
        Gets the number of the access, the tag of the other one, and the row of `shadow`.
    """
    clocks = seen.size > 0
    for i in range(first.size):
        if first[i] < 0:
            continue
        lane = lanes[i]
        local_block = lane // threads
        block = first_block + local_block
        who = block << BLOCK | (lane - local_block * threads)
        tag = who << WHO | pc << PC | flags
        if clocks:
            now, line = times[lane], block
        else:
            now = barriers[local_block] << 32 | warp_barriers[lane // WARP]
            line = 2 * block + acquired[lane]
        for g in range(first[i], first[i] + counts[i]):
            last = shadow[g, WRITE]
            code = 0
            if last >= 0:
                if last & FLYING and not (write and last >> WHO == who):
                    code = IN_FLIGHT
                elif (
                    not (last & flags & STRONG)
                    and not _clearly_ordered(last, shadow[g, WRITE + 1], who, now)
                    and not _ordered(
                        last, shadow[g, WRITE + 1], who, now, clock, owner, line, seen, lane,
                        threads,
                    )
                ):  # fmt: skip
                    code = RACE
            elif last == NOBODY and not write:
                code = UNWRITTEN
            if code == 0 and write:
                if busy.size > 0 and busy[g] >= 0:
                    last, code = busy[g], STILL_READ
                elif not _readers_are_done(shadow, g, who, now):
                    last = _forget_readers(
                        shadow, g, who, now, flags, clock, owner, line, seen, lane, threads
                    )
                    code = RACE if last >= 0 else 0
            if code != 0:
                fault[0], fault[1], fault[2] = i, last, g
                return code
            if write:
                shadow[g, WRITE] = tag
                shadow[g, WRITE + 1] = now
            else:
                _note_reader(shadow, g, tag, now)
    return 0


@_kept(njit)
def track_engine(
    shadow: Any, busy: Any, first: Any, counts: Any, who: int, now: int, threads: int, seen: Any,
    fenced: Any, clock: Any, line: int, pc: int, flags: int, write: bool, fault: Any,
) -> int:  # fmt: skip
    """The same for an asynchronous operation, which begins after what its issuer has seen.

    Parameters
    ----------
    who, now : int
        The stream of operations that it is counted for, and its number there.
    seen, fenced : arrays of shape (1, blocks of a cluster, threads + engines)
        What the issuer knows, `_ordered`; and which of the writes in shared memory it knows to be
        fenced, so that they are visible to asynchronous operations. Empty: no fence is needed.
    """
    tag = who << WHO | pc << PC | flags
    for i in range(first.size):
        if first[i] < 0:
            continue
        for g in range(first[i], first[i] + counts[i]):
            last, code = shadow[g, WRITE], 0
            if last >= 0:
                stamp, column = shadow[g, WRITE + 1], (last >> WHO) & IN_BLOCK
                if last & FLYING:
                    code = IN_FLIGHT
                elif not (last & flags & STRONG):
                    if not _clearly_ordered(last, stamp, who, now) and not _ordered(
                        last, stamp, who, now, clock, clock, line, seen, 0, threads
                    ):
                        code = RACE
                    elif column < FIRST_ENGINE and fenced.size > 0:
                        rank = (last >> WHO >> BLOCK) % fenced.shape[1]
                        if fenced[0, rank, column] < stamp:
                            code = UNFENCED
            elif last == NOBODY and not write:
                code = UNWRITTEN
            if code == 0 and write:
                if busy.size > 0 and busy[g] >= 0:
                    last, code = busy[g], STILL_READ
                elif not _readers_are_done(shadow, g, who, now):
                    last = _forget_readers(
                        shadow, g, who, now, flags, clock, clock, line, seen, 0, threads
                    )
                    code = RACE if last >= 0 else 0
            if code != 0:
                fault[0], fault[1], fault[2] = i, last, g
                return code
            if write:
                shadow[g, WRITE] = tag
                shadow[g, WRITE + 1] = now
            else:
                _note_reader(shadow, g, tag, now)
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
