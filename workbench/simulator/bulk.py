"""Bulk copies, with and without a tensor map: `cp.async.bulk`, `cp.reduce.async.bulk`, `st.async`.

Loads into shared memory, and copies to another block's, arrive when nothing else can happen, in an
order drawn from the launch's seed, and then count their bytes at an mbarrier. Stores and reductions
to global memory belong to groups of the thread that started them; they read shared memory when
that thread waits for having read, and write when it waits for all or exits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.simulator import faults, native
from workbench.simulator.decode import Decoder, builder
from workbench.simulator.engine import Chunk, Extension, Group, Outcome, Step
from workbench.simulator.faults import SimulationError, at
from workbench.simulator.mbarriers import MBarrier, MBarriers
from workbench.simulator.memory import GLOBAL_BASE, PARAM_BASE, RANK
from workbench.simulator.ops import DTYPES, UnknownInstructionError
from workbench.simulator.ptx import SIZES, Imm, Instruction, Mem, Operand, Vec
from workbench.simulator.tensormap import BYTES, TensorMap, decode_tiled, span_of, swizzled
from workbench.simulator.transfers import Access, addresses_of, bad_address, collision

Array = Any  # numpy.ndarray
UNIT = 16  # bytes: what stays together in shared memory
WORD = np.dtype(np.uint64)  # what is copied at a time where no type is named
_REDUCTIONS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@dataclass(slots=True)
class Tile:
    """The two ends of a copy, one element (of `dtype`) after the other.

    Attributes
    ----------
    units : int64 array
        Where each 16 bytes lie in shared memory, as an offset in that of the block.
    sources : int64 array
        Address in global memory of each element; for those outside of the array it means nothing.
    inside : bool array or None
        Which elements are in the array; None is all.
    fill : number
        What is loaded for the others.
    """

    dtype: np.dtype[Any]
    units: Array
    sources: Array
    inside: Array | None = None
    fill: Any = 0

    @property
    def bytes(self) -> int:
        """Of the part in shared memory."""
        return int(self.units.size) * UNIT


def _tile_of_map(tensor: TensorMap, corner: list[int], shared: int) -> Tile:
    """The box of a tensor map that begins at `corner`, and its place in shared memory."""
    sources = np.zeros(1, np.int64)
    inside = np.ones(1, bool)
    for first, size, stride, count, step in zip(
        corner, tensor.sizes, tensor.strides, tensor.box, tensor.steps, strict=True
    ):
        index = first + step * np.arange(count)
        sources = (index[:, None] * stride + sources).reshape(-1)
        inside = (((index >= 0) & (index < size))[:, None] & inside).reshape(-1)
    units = shared + UNIT * np.arange(tensor.bytes // UNIT)
    return Tile(
        tensor.dtype,
        swizzled(units, span_of(tensor.swizzle)),
        sources + tensor.address,
        None if inside.all() else inside,
        np.nan if tensor.nan else 0,
    )


def _tile_of_bytes(address: int, size: int, shared: int, dtype: np.dtype[Any]) -> Tile:
    """A run of bytes."""
    units = shared + UNIT * np.arange(size // UNIT)
    return Tile(dtype, units, address + dtype.itemsize * np.arange(size // dtype.itemsize))


# ------------------------------------------------------------------------------------- checks


class Ends:
    """What happens at the two ends of a copy: addresses, checks, counts, the data itself."""

    def __init__(self, chunk: Chunk, pc: int, lane: int, tile: Tile) -> None:
        self.chunk, self.pc, self.lane, self.tile = chunk, pc, lane, tile

    def find_global(self, write: bool) -> Array:
        """Offsets in global memory of the elements inside the array; counts them."""
        chunk, tile, pc = self.chunk, self.tile, self.pc
        addresses = tile.sources if tile.inside is None else tile.sources[tile.inside]
        access = Access(pc, "global", tile.dtype.itemsize, write)
        need = native.READABLE | native.WRITABLE if write else native.READABLE
        offsets, bad, code = native.find_in_arena(
            addresses, GLOBAL_BASE, chunk.global_memory.rights, access.size, need
        )
        if bad >= 0:
            raise bad_address(chunk, access, int(addresses[bad]), self.lane, code)
        if offsets.size and chunk.checks is not None:
            size = tile.dtype.itemsize
            sectors = np.unique(offsets // native.SECTOR_BYTES).size
            least = -(-offsets.size * size // native.SECTOR_BYTES)
            row = np.array([1, 1, offsets.size * size, sectors, least])
            region = int(chunk.global_memory.region_of[offsets[0] >> native.PAGE_BITS])
            chunk.launch.counts.global_[pc] += row
            chunk.launch.counts.arrays[write + 0, region] += row
        return offsets

    def note_global(self, offsets: Array, write: bool, flags: int) -> None:
        """The thread that starts the copy is taken to access global memory."""
        checks, lane = self.chunk.checks, self.lane
        if checks is None or not offsets.size:
            return
        access = Access(self.pc, "global", self.tile.dtype.itemsize, write, flags)
        lanes = np.full(offsets.size, lane)
        code = checks.global_(offsets, lanes, access.size, access.pc, access.flags, write)
        if code:
            raise collision(self.chunk, access, offsets, lanes, code)

    def rows(self, block: int) -> Array:
        """The rows of the shadow of shared memory that the tile covers in a block."""
        checks = self.chunk.checks
        assert checks is not None
        first = self.tile.units + block * self.chunk.shared_stride >> checks.shift
        return (first[:, None] + np.arange(max(1, UNIT >> checks.shift))).reshape(-1)

    def find_shared(self, write: bool) -> None:
        """The part in shared memory must exist."""
        chunk, units = self.chunk, self.tile.units
        if units.size and (units.min() < 0 or units.max() + UNIT > chunk.shared_limit):
            wrong = int(units[(units < 0) | (units + UNIT > chunk.shared_limit)][0])
            access = Access(self.pc, "shared", UNIT, write)
            raise bad_address(chunk, access, wrong, self.lane, native.OUT_OF_RANGE)
        row = np.array([1, 1, self.tile.bytes, self.tile.bytes // 128, self.tile.bytes // 128])
        if chunk.checks is not None:
            chunk.launch.counts.shared[self.pc] += row

    def note_shared(self, block: int, write: bool, who: int, now: int, flags: int) -> Array:
        """An asynchronous access to the tile in a block, by `who`; its rows of the shadow."""
        checks = self.chunk.checks
        assert checks is not None
        rows = self.rows(block)
        code = checks.engine(rows, np.array([self.lane]), who, now, self.pc, flags, write)
        if code:
            access = Access(self.pc, "shared", UNIT, write, flags)
            offsets = rows << checks.shift
            raise collision(self.chunk, access, offsets, np.full(rows.size, self.lane), code)
        return rows

    def places(self, block: int) -> Array:
        """Where in the chunk's shared memory each unit lies, counted in units."""
        return (self.tile.units + block * self.chunk.shared_stride) // UNIT

    def load_shared(self, block: int) -> Array:
        """The tile in a block, as elements."""
        table = self.chunk.shared.bytes.reshape(-1, UNIT)[self.places(block)]
        return table.reshape(-1).view(self.tile.dtype)

    def store_shared(self, block: int, values: Array) -> None:
        """Put elements into the tile in a block."""
        table = np.ascontiguousarray(values).view(np.uint8).reshape(-1, UNIT)
        self.chunk.shared.bytes.reshape(-1, UNIT)[self.places(block)] = table

    def load_global(self, offsets: Array) -> Array:
        """All elements of the tile, from those at `offsets` that are inside the array."""
        tile = self.tile
        cells = self.chunk.global_memory.bytes.view(tile.dtype)[offsets // tile.dtype.itemsize]
        if tile.inside is None:
            return cells
        values = np.full(tile.inside.size, tile.fill, tile.dtype)
        values[tile.inside] = cells
        return values

    def store_global(self, offsets: Array, values: Array, reduce: Any) -> None:
        """Write, or combine with what is there, the elements that are inside the array."""
        tile = self.tile
        cells = self.chunk.global_memory.bytes.view(tile.dtype)
        if tile.inside is not None:
            values = values[tile.inside]
        index = offsets // tile.dtype.itemsize
        cells[index] = values if reduce is None else reduce(cells[index], values)
        self.chunk.launch.writes += 1


# ---------------------------------------------------------------------------- into shared memory


@dataclass(slots=True)
class Arrival:
    """A copy into shared memory under way.

    Attributes
    ----------
    block : int
        Where it arrives.
    fetch : callable
        Gives the elements when it does.
    rows : int64 array or None
        Rows of the shadow that it writes.
    reading : int64 array or None
        Rows that it reads.
    """

    ends: Ends
    block: int
    barrier: MBarrier
    fetch: Callable[[], Array]
    rows: Array | None
    reading: Array | None = None

    def land(self, chunk: Chunk) -> list[tuple[int, Group]]:
        """Let it arrive; who has waited for it."""
        ends, barrier = self.ends, self.barrier
        ends.store_shared(self.block, self.fetch())
        if chunk.checks is not None and self.rows is not None:
            chunk.checks.arrived(self.rows, barrier.phase + 1)
            if self.reading is not None:
                chunk.checks.end_reading(self.reading)
        barriers = chunk.extension(MBarriers)
        barriers.count_bytes(barrier, -ends.tile.bytes, ends.pc, ends.lane)
        return barriers.end_phase(barrier)


def _start_arrival(
    ends: Ends,
    block: int,
    barrier: MBarrier,
    fetch: Callable[[], Array],
    reading: Array | None = None,
) -> None:
    """A copy sets out for a block."""
    chunk = ends.chunk
    if barrier.maker is not None and chunk.checks is not None:
        where = chunk.launch.where(ends.pc)
        raise SimulationError(
            faults.UNFENCED,
            f"{chunk.name(ends.lane)} starts a copy at {at(where)} for the mbarrier at byte "
            f"{barrier.offset}, with neither fence.mbarrier_init nor fence.proxy.async after its "
            "mbarrier.init",
            where,
        )
    ends.find_shared(True)
    arrival = Arrival(ends, block, barrier, fetch, None, reading)
    if chunk.checks is not None:
        who, now = chunk.checks.clocks.who(barrier.block, barrier.engine), barrier.phase + 1
        arrival.rows = ends.note_shared(block, True, who, now, native.FLYING)
    chunk.pending.append(arrival)


# -------------------------------------------------------------------------- out of shared memory


@dataclass(slots=True)
class Departure:
    """A copy from shared to global memory under way, of one thread's bulk group `number`."""

    ends: Ends
    block: int
    number: int
    offsets: Array
    reduce: Any
    rows: Array | None
    values: Array | None = None

    def read(self) -> None:
        """Let it read shared memory, if it has not."""
        if self.values is None:
            chunk, ends = self.ends.chunk, self.ends
            self.values = ends.load_shared(self.block)
            if chunk.checks is not None and self.rows is not None:
                chunk.checks.end_reading(self.rows)
                clocks = chunk.checks.clocks
                thread = ends.lane % chunk.threads
                who = clocks.who(self.block, thread)
                ends.note_shared(self.block, False, who, int(clocks.times[ends.lane]), 0)

    def write(self) -> None:
        """Let it write."""
        self.read()
        self.ends.store_global(self.offsets, self.values, self.reduce)
        checks = self.ends.chunk.checks
        if checks is not None and self.reduce is None:
            checks.arrived_global(self.offsets, self.ends.tile.dtype.itemsize)


class Departures(Extension):
    """The bulk groups of the threads of a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        self.under_way: list[Departure] = []
        self.committed = np.zeros(chunk.size, np.int64)

    def start(self, ends: Ends, block: int, reduce: Any) -> None:
        """A copy sets out for global memory."""
        chunk, lane = self.chunk, ends.lane
        ends.find_shared(False)
        offsets = ends.find_global(True)
        # Additions do not get into each other's way; who writes shall not be read from before.
        flags = native.FLYING if reduce is None else native.STRONG
        departure = Departure(ends, block, int(self.committed[lane]), offsets, reduce, None)
        if chunk.checks is not None:
            ends.note_global(offsets, True, flags)
            clocks = chunk.checks.clocks
            who = clocks.who(block, lane % chunk.threads)
            rows = ends.note_shared(block, False, who, int(clocks.times[lane]), 0)
            departure.rows = rows
            chunk.checks.begin_reading(rows, who, ends.pc)
        self.under_way.append(departure)

    def wait(self, lanes: Array, allowed: int, only_read: bool) -> None:
        """Lanes wait until at most `allowed` of their last groups are under way."""
        present = set(lanes.tolist())
        done = [
            x for x in self.under_way
            if x.ends.lane in present and x.number < self.committed[x.ends.lane] - allowed
        ]  # fmt: skip
        self._let_go(done, only_read)

    def _let_go(self, done: list[Departure], only_read: bool) -> None:
        self.chunk.random.shuffle(done)
        for departure in done:
            departure.read() if only_read else departure.write()
        if not only_read:
            gone = {id(x) for x in done}
            self.under_way = [x for x in self.under_way if id(x) not in gone]

    def leave(self, lanes: Array, pc: int) -> None:
        """A block that ends takes its shared memory with it."""
        present = set(lanes.tolist())
        done = [x for x in self.under_way if x.ends.lane in present]
        unread = [x for x in done if x.values is None]
        if unread and self.chunk.checks is not None:
            ends, launch = unread[0].ends, self.chunk.launch
            where, other = launch.where(pc), launch.where(ends.pc)
            raise SimulationError(
                faults.STILL_READ,
                f"{self.chunk.name(ends.lane)} exits at {at(where)}, and nothing waits until the "
                f"copy that it started at {at(other)} has read shared memory",
                where,
                other,
            )
        self._let_go(done, False)


# -------------------------------------------------------------------------------- instructions


def bulk_copy(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """All of ``cp.async.bulk`` and ``cp.reduce.async.bulk``."""
    mods = instruction.mods
    if "commit_group" in mods:
        return _commit
    if "wait_group" in mods:
        return _waiting(instruction)
    if "prefetch" in mods:
        return lambda chunk, group: None
    if any(m.startswith(("im2col", "cta_group", "tile__", "cp_mask")) for m in mods):
        raise UnknownInstructionError(instruction.opcode)
    if "bulk_group" in mods:
        return _store(decoder, instruction, pc)
    if mods[0] == "reduce":
        raise UnknownInstructionError(instruction.opcode)
    return _load(decoder, instruction, pc)


def _commit(chunk: Chunk, group: Group) -> Outcome:
    chunk.extension(Departures).committed[group.lanes] += 1
    return None


def _waiting(instruction: Instruction) -> Step:
    operand, only_read = instruction.operands[0], "read" in instruction.mods
    if not isinstance(operand, Imm):
        raise UnknownInstructionError(instruction.opcode)
    allowed = operand.value

    def wait(chunk: Chunk, group: Group) -> None:
        chunk.extension(Departures).wait(group.lanes, allowed, only_read)

    return wait


Corners = Callable[[Chunk, Group], tuple[list[TensorMap], list[list[int]]]]


def _corners(decoder: Decoder, instruction: Instruction, operand: Operand, pc: int) -> Corners:
    """A function that gives tensor map and coordinates of each lane of a group."""
    if not isinstance(operand, Vec) or len(operand.items) != 2:
        raise UnknownInstructionError(instruction.opcode)
    address, coordinates = operand.items
    if not isinstance(coordinates, Vec):
        raise UnknownInstructionError(instruction.opcode)
    addresses = addresses_of(decoder, address if isinstance(address, Mem) else Mem(address, 0))
    getters = [decoder.get(x, "s32") for x in coordinates.items]

    def corners(chunk: Chunk, group: Group) -> tuple[list[TensorMap], list[list[int]]]:
        maps = []
        for lane, place in zip(group.lanes, addresses(chunk, group).tolist(), strict=True):
            maps.append(_map_at(chunk, pc, int(lane), place, len(getters)))
        columns = [chunk.of_lanes(get(chunk.registers), group) for get in getters]
        return maps, np.stack(columns, axis=-1).tolist()

    return corners


def _map_at(chunk: Chunk, pc: int, lane: int, address: int, rank: int) -> TensorMap:
    """The tensor map at an address among the parameters or in global memory."""
    where = chunk.launch.where(pc)
    if PARAM_BASE <= address < GLOBAL_BASE:
        data = chunk.launch.params[address - PARAM_BASE :][:BYTES]
    else:
        access = Access(pc, "global", BYTES, False)
        _, bad, code = native.find_in_arena(
            np.array([address]), GLOBAL_BASE, chunk.global_memory.rights, 64, native.READABLE
        )
        if bad >= 0:
            raise bad_address(chunk, access, address, lane, code)
        start = address - GLOBAL_BASE
        data = chunk.global_memory.bytes[start : start + BYTES].tobytes()
    wrong = ""
    try:
        tensor = decode_tiled(data.ljust(BYTES, b"\0"))
        if len(tensor.sizes) != rank:
            wrong = f"a tensor map of {len(tensor.sizes)} axes, with {rank} coordinates"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise SimulationError(
            faults.BULK, f"{chunk.name(lane)} copies at {at(where)} through {wrong}", where
        )
    return tensor


def _demand(chunk: Chunk, pc: int, lane: int, condition: bool, words: str) -> None:
    if not condition:
        where = chunk.launch.where(pc)
        raise SimulationError(
            faults.BULK, f"{chunk.name(lane)} copies at {at(where)} {words}", where
        )


def _sizes(chunk: Chunk, pc: int, lane: int, address: int, size: int) -> None:
    _demand(chunk, pc, lane, size % UNIT == 0 and size > 0, f"{size} bytes, no multiple of 16")
    _demand(chunk, pc, lane, address % UNIT == 0, "global memory not aligned to 16 bytes")


def _load(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """Into shared memory, of this block or of others in the cluster."""
    mods, tensor = instruction.mods, "tensor" in instruction.mods
    operands = list(instruction.operands)
    target, source = operands[:2]
    size = None if tensor else decoder.get(operands[2], "u32")
    rest = operands[2 if tensor else 3 :]
    targets, barriers_at = addresses_of(decoder, target), addresses_of(decoder, rest[0])
    mask = decoder.get(rest[1], "u16") if "multicast__cluster" in mods else None
    corners = _corners(decoder, instruction, source, pc) if tensor else None
    sources = None if tensor else addresses_of(decoder, source)
    between = mods[-1] != "global" and "global" not in mods
    aligned = 128 if tensor else UNIT

    def start(chunk: Chunk, group: Group) -> None:
        lanes = group.lanes
        blocks, places = chunk.in_cluster(targets(chunk, group), lanes)
        barrier_blocks, offsets = chunk.in_cluster(barriers_at(chunk, group), lanes)
        maps, first = corners(chunk, group) if corners is not None else ([], [])
        starts = sources(chunk, group) if sources is not None else None
        counts = chunk.of_lanes(size(chunk.registers), group) if size is not None else None
        masks = chunk.of_lanes(mask(chunk.registers), group) if mask is not None else None
        for i, lane in enumerate(lanes.tolist()):
            place = int(places[i])
            _demand(chunk, pc, lane, place % aligned == 0,
                    f"to byte {place} of shared memory, no multiple of {aligned}")  # fmt: skip
            if starts is None:
                tile = _tile_of_map(maps[i], first[i], place)
            else:
                assert counts is not None
                _sizes(chunk, pc, lane, int(starts[i]), int(counts[i]))
                tile = _tile_of_bytes(int(starts[i]), int(counts[i]), place, WORD)
            ends = Ends(chunk, pc, lane, tile)
            own = int(chunk.block_of[lane])
            ranks = [int(blocks[i])]
            if masks is not None:
                cluster = chunk.launch.cluster
                ranks = [own // cluster * cluster + r for r in range(16) if masks[i] >> r & 1]
                _demand(chunk, pc, lane, all(r < own // cluster * cluster + cluster for r in ranks),
                        "to blocks that the cluster does not have")  # fmt: skip
            for block in ranks:
                at_block = int(barrier_blocks[i]) if masks is None else block
                barrier = chunk.extension(MBarriers).find(pc, at_block, int(offsets[i]), lane)
                if between:
                    assert starts is not None
                    _start_exchange(ends, own, block, barrier, int(starts[i]))
                else:
                    found = ends.find_global(False)
                    ends.note_global(found, False, 0)
                    _start_arrival(ends, block, barrier, _fetcher(ends, found))

    return start


def _fetcher(ends: Ends, offsets: Array) -> Callable[[], Array]:
    return lambda: ends.load_global(offsets)


def _start_exchange(ends: Ends, own: int, block: int, barrier: MBarrier, start: int) -> None:
    """A copy from a block's own shared memory to that of another one."""
    chunk = ends.chunk
    tile = _tile_of_bytes(0, ends.tile.bytes, start & (1 << RANK) - 1, WORD)
    source = Ends(chunk, ends.pc, ends.lane, tile)
    source.find_shared(False)
    reading = None
    if chunk.checks is not None:
        clocks = chunk.checks.clocks
        who = clocks.who(barrier.block, barrier.engine)
        reading = source.note_shared(own, False, who, barrier.phase + 1, 0)
        chunk.checks.begin_reading(reading, who, ends.pc)
    _start_arrival(ends, block, barrier, lambda: source.load_shared(own), reading)


def _store(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """From shared memory to global memory, or added to what is there."""
    mods, tensor = instruction.mods, "tensor" in instruction.mods
    target, source, *rest = instruction.operands
    name = next((m for m in mods if m in _REDUCTIONS), "") if mods[0] == "reduce" else ""
    if mods[0] == "reduce" and not name:
        raise UnknownInstructionError(instruction.opcode)
    reduce = _REDUCTIONS[name] if name else None
    dtype = DTYPES[mods[-1]] if mods[-1] in SIZES else WORD
    size = None if tensor else decoder.get(rest[0], "u32")
    sources = addresses_of(decoder, source)
    corners = _corners(decoder, instruction, target, pc) if tensor else None
    targets = None if tensor else addresses_of(decoder, target)
    aligned = 128 if tensor else UNIT

    def start(chunk: Chunk, group: Group) -> None:
        lanes, departures = group.lanes, chunk.extension(Departures)
        blocks, places = chunk.in_cluster(sources(chunk, group), lanes)
        maps, first = corners(chunk, group) if corners is not None else ([], [])
        starts = targets(chunk, group) if targets is not None else None
        counts = chunk.of_lanes(size(chunk.registers), group) if size is not None else None
        for i, lane in enumerate(lanes.tolist()):
            place = int(places[i])
            _demand(chunk, pc, lane, place % aligned == 0,
                    f"from byte {place} of shared memory, no multiple of {aligned}")  # fmt: skip
            if starts is None:
                tile = _tile_of_map(maps[i], first[i], place)
            else:
                assert counts is not None
                _sizes(chunk, pc, lane, int(starts[i]), int(counts[i]))
                tile = _tile_of_bytes(int(starts[i]), int(counts[i]), place, dtype)
            departures.start(Ends(chunk, pc, lane, tile), int(blocks[i]), reduce)

    return start


@dataclass(slots=True)
class AsyncStore:
    """An ``st.async`` of one thread under way."""

    pc: int
    lane: int
    barrier: MBarrier
    offset: int
    data: bytes
    rows: Array | None = None

    def land(self, chunk: Chunk) -> list[tuple[int, Group]]:
        """Let it arrive; who has waited for it."""
        size = len(self.data)
        chunk.shared.bytes[self.offset : self.offset + size] = np.frombuffer(self.data, np.uint8)
        if chunk.checks is not None and self.rows is not None:
            chunk.checks.arrived(self.rows, self.barrier.phase + 1)
        barriers = chunk.extension(MBarriers)
        barriers.count_bytes(self.barrier, -size, self.pc, self.lane)
        return barriers.end_phase(self.barrier)


@builder("st.async")
def _store_async(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """``st.async``: a few bytes to another block of the cluster, counted at its mbarrier."""
    mods = instruction.mods
    if "mbarrier__complete_tx__bytes" not in mods:
        raise UnknownInstructionError(instruction.opcode)
    target, source, barrier_operand = instruction.operands
    items = source.items if isinstance(source, Vec) else (source,)
    kind = mods[-1]
    targets = addresses_of(decoder, target)
    barriers_at = addresses_of(decoder, barrier_operand)
    getters = [decoder.get(item, kind) for item in items]
    access = Access(pc, "cluster", SIZES[kind] * len(items), True, native.FLYING)

    def start(chunk: Chunk, group: Group) -> None:
        lanes = group.lanes
        blocks, places = chunk.in_cluster(targets(chunk, group), lanes)
        offsets, bad, code = native.find_in_own(
            places, blocks, chunk.shared_stride, chunk.shared_limit, access.size
        )
        if bad >= 0:
            raise bad_address(chunk, access, int(places[bad]), int(lanes[bad]), code)
        barrier_blocks, barrier_places = chunk.in_cluster(barriers_at(chunk, group), lanes)
        values = [chunk.of_lanes(get(chunk.registers), group) for get in getters]
        for i, lane in enumerate(lanes.tolist()):
            place = int(barrier_blocks[i]), int(barrier_places[i])
            barrier = chunk.extension(MBarriers).find(pc, *place, lane)
            data = b"".join(value[i].tobytes() for value in values)
            store = AsyncStore(pc, lane, barrier, int(offsets[i]), data)
            if chunk.checks is not None:
                checks = chunk.checks
                count = max(1, access.size >> checks.shift)
                rows = (store.offset >> checks.shift) + np.arange(count)
                who = checks.clocks.who(barrier.block, barrier.engine)
                one = lanes[i : i + 1]
                wrong = checks.engine(rows, one, who, barrier.phase + 1, pc, native.FLYING, True)
                if wrong:
                    raise collision(chunk, access, rows << checks.shift, one.repeat(count), wrong)
                store.rows = rows
            chunk.pending.append(store)

    return start
