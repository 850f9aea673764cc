"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.simulator import faults, native
from workbench.simulator.decode import Decoder, Getter, builder
from workbench.simulator.engine import Chunk, Group, Step
from workbench.simulator.faults import SimulationError, at
from workbench.simulator.memory import (
    GLOBAL_BASE,
    LOCAL_BASE,
    PARAM_BASE,
    SHARED_BASE,
    Bytes,
    describe,
)
from workbench.simulator.ops import DTYPES, UnknownInstructionError
from workbench.simulator.ptx import SIZES, Imm, Instruction, Mem, Operand, Reg, Sym, Vec

Array = Any  # numpy.ndarray
Addresses = Callable[[Chunk, Group], Array]
_SPACES = ("global", "shared", "local", "param", "const")
_STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")


@dataclass(frozen=True, slots=True)
class Access:
    """What an instruction does to memory, but for the addresses.

    Attributes
    ----------
    space : str
        "global", "shared" (of the own block), "cluster" (of any in the cluster), "local", "param"
        or, where the address itself says it, "".
    size : int
        Bytes a thread.
    flags : int
        STRONG or FLYING, see `native.track`.
    """

    pc: int
    space: str
    size: int
    write: bool
    flags: int = 0


def reach(
    chunk: Chunk, access: Access, addresses: Array, lanes: Array, users: Array | None = None
) -> tuple[Bytes, Array]:
    """The memory of an access and the offsets in it, checked and counted.

    `users` are the lanes that get the data, where others give the addresses.

    Raises
    ------
    SimulationError
        At an address that does not exist or is not aligned and, with checks on, at a race.
    """
    if access.space == "global":
        memory: Bytes = chunk.global_memory
        offsets, bad, code = native.find_in_arena(
            addresses, GLOBAL_BASE, chunk.global_memory.rights, access.size,
            native.READABLE | native.WRITABLE if access.write else native.READABLE,
        )  # fmt: skip
    elif access.space == "shared":
        memory = chunk.shared
        offsets, bad, code = native.find_in_own(
            addresses, chunk.block_of[lanes], chunk.shared_stride, chunk.shared_limit, access.size
        )
    elif access.space == "cluster":
        memory = chunk.shared
        blocks, places = chunk.in_cluster(addresses, lanes)
        offsets, bad, code = native.find_in_own(
            places, blocks, chunk.shared_stride, chunk.shared_limit, access.size
        )
    elif access.space == "param":
        memory = chunk.params
        offsets, bad, code = native.find_in_own(
            addresses, np.zeros_like(addresses), 0, len(chunk.launch.params), access.size
        )
    else:
        memory = chunk.local
        offsets, bad, code = native.find_in_own(
            addresses, lanes, chunk.local_stride, chunk.local_limit, access.size
        )
    if bad >= 0:
        raise bad_address(chunk, access, int(addresses[bad]), int(lanes[bad]), code)
    chunk.launch.writes += access.write
    if chunk.checks is not None and access.space not in ("local", "param"):
        _check(chunk, access, offsets, lanes, lanes if users is None else users)
    return memory, offsets


def _check(chunk: Chunk, access: Access, offsets: Array, lanes: Array, users: Array) -> None:
    checks, counts, pc = chunk.checks, chunk.launch.counts, access.pc
    assert checks is not None
    if access.space == "global":
        regions = chunk.global_memory.region_of
        native.count_sectors(
            offsets,
            lanes,
            access.size,
            regions,
            counts.global_[pc],
            counts.arrays[access.write + 0],
        )
        note = checks.global_
    else:
        native.count_banks(offsets, lanes, access.size, counts.shared[pc])
        note = checks.shared
    code = note(offsets, users, access.size, pc, access.flags, access.write)
    if code:
        raise collision(chunk, access, offsets, users, code)


def split_by_space(access: Access, addresses: Array) -> Iterator[tuple[Access, Array, int]]:
    """For generic addresses: which of them lie in which memory, and where that begins."""
    if access.space:
        yield access, np.ones(addresses.size, bool), 0
        return
    limits = (
        (0, SHARED_BASE, "global", 0),
        (SHARED_BASE, LOCAL_BASE, "cluster", SHARED_BASE),
        (LOCAL_BASE, PARAM_BASE, "local", LOCAL_BASE),
        (PARAM_BASE, GLOBAL_BASE, "param", PARAM_BASE),
        (GLOBAL_BASE, 1 << 63, "global", 0),
    )
    for low, high, space, base in limits:
        chosen = (addresses >= low) & (addresses < high)
        if chosen.any():
            part = Access(access.pc, space, access.size, access.write, access.flags)
            yield part, chosen, base


# ----------------------------------------------------------------------------------- faults


def _verb(access: Access) -> str:
    return "writes" if access.write else "reads"


def bad_address(
    chunk: Chunk, access: Access, address: int, lane: int, code: int
) -> SimulationError:
    """What `native.find_in_arena` and its like found wrong with an address, in words."""
    where = chunk.launch.where(access.pc)
    kind = {
        native.OUT_OF_RANGE: faults.OUT_OF_RANGE,
        native.MISALIGNED: faults.MISALIGNED,
        native.READ_ONLY: faults.READ_ONLY,
    }[code]
    who = f"{chunk.name(lane)} {_verb(access)} {access.size} bytes at {at(where)}"
    if access.space == "global":
        target = describe(chunk.global_memory, address, access.size)
    else:
        space, owner, limit = {
            "shared": ("shared", "its block", chunk.shared_limit),
            "cluster": ("shared", "every block of the cluster", chunk.shared_limit),
            "local": ("local", "the thread", chunk.local_limit),
            "param": ("parameter", "the kernel", len(chunk.launch.params)),
        }[access.space]
        target = f"byte {address} of {space} memory, of which {owner} has {limit}"
    return SimulationError(kind, f"{who}: {target}", where)


def collision(
    chunk: Chunk, access: Access, offsets: Array, lanes: Array, code: int
) -> SimulationError:
    """What `native.track` found wrong with an access, in words."""
    assert chunk.checks is not None
    i, tag, row = (int(x) for x in chunk.checks.fault)
    where, launch = chunk.launch.where(access.pc), chunk.launch
    target = _target(chunk, access, int(offsets[i]), row)
    message = f"{chunk.name(int(lanes[i]))} {_verb(access)} {target} at {at(where)}"
    if code == native.UNWRITTEN:
        return SimulationError(faults.UNWRITTEN, f"{message}: nobody wrote it before", where)
    block, thread = tag >> native.WHO >> native.BLOCK, tag >> native.WHO & native.IN_BLOCK
    pc = tag >> native.PC & native.PC_MASK
    other, earlier = launch.where(pc), launch.code.program.instructions[pc]
    did = "read" if _reads(earlier, access.space) else "wrote"
    who = f"thread {thread} of block {block}"
    missing = f"a copy that {who} started at {at(other)}"
    if thread >= native.FIRST_ENGINE:
        names = {"cp": "a bulk copy", "st": "st.async"}
        who = f"{names.get(earlier.op, earlier.op)} of block {block}"
        missing = f"{who}, started at {at(other)},"
    told = {
        native.IN_FLIGHT: (
            faults.RACE if access.write else faults.IN_FLIGHT,
            f"where {missing} has not arrived",
        ),
        native.STILL_READ: (
            faults.STILL_READ,
            f"which {earlier.opcode} at {at(other)} may not have read yet",
        ),
        native.UNFENCED: (
            faults.UNFENCED,
            f"which {who} wrote at {at(other)}, with no fence.proxy.async in between",
        ),
    }
    if code in told:
        kind, words = told[code]
        return SimulationError(kind, f"{message}, {words}", where, other)
    own = f"block {chunk.first + int(chunk.block_of[lanes[i]])}"
    missing = "no barrier" if own == f"block {block}" else "nothing that orders the blocks"
    return SimulationError(
        faults.RACE,
        f"{message}; {who} {did} it at {at(other)}, with {missing} in between",
        where,
        other,
    )


def _reads(instruction: Instruction, space: str) -> bool:
    """Whether an instruction reads from the memory of a space and does not write to it."""
    mods = instruction.mods
    if instruction.op == "cp":  # what is written is named first
        named = [m.partition("__")[0] for m in mods if m.startswith(("global", "shared"))]
        space = space.replace("cluster", "shared")
        return len(named) == 2 and named[0] != named[1] and named[0] != space
    if instruction.op == "mbarrier":
        return mods[0] not in ("init", "inval")
    return instruction.op in ("ld", "ldu", "ldmatrix", "wgmma")


def _target(chunk: Chunk, access: Access, offset: int, row: int) -> str:
    """The memory that an access collides in, by name."""
    if access.space == "global":
        memory = chunk.global_memory
        region = memory.regions[int(memory.region_of[offset >> native.PAGE_BITS])]
        return region.element(offset)
    assert chunk.checks is not None
    byte = (row << chunk.checks.shift) % chunk.shared_stride
    variables = [
        v
        for v in chunk.launch.code.program.variables.values()
        if v.space == "shared" and v.offset <= byte
    ]
    if not variables:
        return f"byte {byte} of shared memory"
    variable = max(variables, key=lambda v: v.offset)
    return f"byte {byte - variable.offset} of {plain_name(variable.name)} (shared)"


def plain_name(name: str) -> str:
    """A variable's name in the source: of ``_ZZ...E6a_smem``, as C++ calls it, that is a_smem."""
    for match in re.finditer(r"E(\d+)", name) if name.startswith("_Z") else ():
        rest = name[match.end() :]
        if len(rest) == int(match[1]):
            return rest
    return name


# -------------------------------------------------------------------------- loads and stores


def addresses_of(decoder: Decoder, operand: Operand) -> Addresses:
    """A function that gives the addresses of an operand in the lanes of a group."""
    if not isinstance(operand, Mem):
        raise UnknownInstructionError(f"address {operand}")
    base, offset = operand.base, operand.offset
    if isinstance(base, (Sym, Imm)):
        start = decoder.address(base.name) if isinstance(base, Sym) else base.value
        return lambda chunk, group: np.full(group.count, start + offset)
    if not isinstance(base, Reg):
        raise UnknownInstructionError(f"address {operand}")
    index, wide = base.index, decoder.types[base.index].itemsize == 8

    def addresses(chunk: Chunk, group: Group) -> Array:
        x = chunk.of_lanes(chunk.registers[index], group)
        x = x.view(np.int64) if wide else x.view(np.uint32).astype(np.int64)
        return x + offset if offset else x

    return addresses


def _space(decoder: Decoder, instruction: Instruction, operand: Operand) -> str:
    """The memory that an instruction names; parameters of functions lie in local memory."""
    if any(m in ("async", "bulk") for m in instruction.mods):
        raise UnknownInstructionError(instruction.opcode)
    if "shared__cluster" in instruction.mods:
        return "cluster"
    named = [m.partition("__")[0] for m in instruction.mods]
    space = next((s for s in _SPACES if s in named), "")
    if space == "param":
        base = operand.base if isinstance(operand, Mem) else None
        variable = decoder.program.variables.get(base.name) if isinstance(base, Sym) else None
        return variable.space if variable is not None else "param"
    return "global" if space == "const" else space


def _vector(instruction: Instruction) -> int:
    return next((int(m[1:]) for m in instruction.mods if m in ("v2", "v4", "v8")), 1)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


@builder("ld", "ldu")
def _ld(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    target, source = instruction.operands[:2]
    kind, count, mods = instruction.mods[-1], _vector(instruction), instruction.mods
    space, element = _space(decoder, instruction, source), SIZES[kind]
    puts = [decoder.put_lanes(item, kind) for item in _items(target)]
    if space == "param":
        return _ld_param(decoder, target, source, kind, count)
    strong = any(m in _STRONG for m in mods)
    access = Access(pc, space, element * count, False, native.STRONG if strong else 0)
    addresses, dtype = addresses_of(decoder, source), DTYPES[kind]

    def load(chunk: Chunk, group: Group) -> None:
        where = addresses(chunk, group)
        memory, offsets = reach(chunk, access, where, group.lanes)
        for put, values in zip(puts, memory.load(offsets, element, count), strict=True):
            put(chunk, values.view(dtype), group)

    def load_anywhere(chunk: Chunk, group: Group) -> None:
        where, lanes = addresses(chunk, group), group.lanes
        results = [np.empty(group.count, f"u{element}") for _ in puts]
        for part, chosen, base in split_by_space(access, where):
            memory, offsets = reach(chunk, part, where[chosen] - base, lanes[chosen])
            loaded = memory.load(offsets, element, count)
            for result, values in zip(results, loaded, strict=True):
                result[chosen] = values
        for put, values in zip(puts, results, strict=True):
            put(chunk, values.view(dtype), group)

    plain = load if space else load_anywhere
    if not strong:
        return plain

    def load_in_order(chunk: Chunk, group: Group) -> None:
        where = addresses(chunk, group)  # before the load replaces the register
        plain(chunk, group)
        chunk.polled = True
        if chunk.checks is not None:
            chunk.checks.order.acquire(group.lanes, where, "acquire" not in mods)

    return load_in_order


def _ld_param(decoder: Decoder, target: Operand, source: Operand, kind: str, count: int) -> Step:
    """A kernel's parameters: the same for all threads."""
    element, dtype = SIZES[kind], DTYPES[kind]
    puts = [decoder.put(item, kind) for item in _items(target)]
    if isinstance(source, Mem) and isinstance(source.base, Sym):
        start = decoder.address(source.base.name) + source.offset

        def load(chunk: Chunk, group: Group) -> None:
            values = np.frombuffer(chunk.launch.params, dtype, count, start)
            for put, value in zip(puts, values, strict=True):
                put(chunk, value, group)

        return load
    addresses = addresses_of(decoder, source)
    put_lanes = [decoder.put_lanes(item, kind) for item in _items(target)]

    def load_by_address(chunk: Chunk, group: Group) -> None:
        data = np.frombuffer(chunk.launch.params, np.uint8)
        rows = addresses(chunk, group)[:, None] + np.arange(element * count)
        table = data[rows].view(dtype)
        for i, put in enumerate(put_lanes):
            put(chunk, table[:, i].copy(), group)

    return load_by_address


@builder("st")
def _st(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    target, source = _without_hint(instruction)
    kind, count, mods = instruction.mods[-1], _vector(instruction), instruction.mods
    space, element = _space(decoder, instruction, target), SIZES[kind]
    strong = any(m in _STRONG for m in mods)
    access = Access(pc, space, element * count, True, native.STRONG if strong else 0)
    addresses = addresses_of(decoder, target)
    getters = [decoder.get(item, kind) for item in _items(source)]

    def store(chunk: Chunk, group: Group) -> None:
        where = addresses(chunk, group)
        memory, offsets = reach(chunk, access, where, group.lanes)
        values = [chunk.of_lanes(get(chunk.registers), group) for get in getters]
        memory.store(offsets, values, element)

    def store_anywhere(chunk: Chunk, group: Group) -> None:
        where, lanes = addresses(chunk, group), group.lanes
        values = [chunk.of_lanes(get(chunk.registers), group) for get in getters]
        for part, chosen, base in split_by_space(access, where):
            memory, offsets = reach(chunk, part, where[chosen] - base, lanes[chosen])
            memory.store(offsets, [value[chosen] for value in values], element)

    plain = store if space else store_anywhere
    if not strong:
        return plain

    def store_in_order(chunk: Chunk, group: Group) -> None:
        plain(chunk, group)
        if chunk.checks is not None:
            chunk.checks.order.release(group.lanes, addresses(chunk, group), "release" not in mods)

    return store_in_order


# ---------------------------------------------------------------------------------- atomics

_ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, a: old + a,
    "exch": lambda old, a: a,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda old, a: old & a,
    "or": lambda old, a: old | a,
    "xor": lambda old, a: old ^ a,
    "inc": lambda old, a: np.where(old >= a, 0, old + 1).astype(old.dtype),
    "dec": lambda old, a: np.where((old == 0) | (old > a), a, old - 1).astype(old.dtype),
    "cas": lambda old, compare, new: np.where(old == compare, new, old),
}


def _flushed(x: Array) -> Array:
    """Subnormal numbers become zeros of their sign, as in additions to float32 in global memory."""
    tiny = np.abs(x) < np.finfo(np.float32).smallest_normal
    return np.where(tiny, np.copysign(np.float32(0), x), x)


def _in_turns(cells: Array) -> Iterator[Array]:
    """Positions of equal numbers in different turns, the first of each in the first."""
    order = np.argsort(cells, kind="stable")
    ordered = cells[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    turn = np.arange(cells.size) - np.repeat(first, np.diff([*first, cells.size]))
    for number in range(int(turn.max(initial=-1)) + 1):
        yield order[turn == number]


@builder("atom", "red")
def _atom(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """One lane after the other, as the memory does; of a vector, each number by itself."""
    mods, kind, count = instruction.mods, instruction.mods[-1], _vector(instruction)
    operands = list(_without_hint(instruction))
    target = operands.pop(0) if instruction.op == "atom" else None
    name = next((m for m in mods if m in _ATOMICS), "")
    if not name or "async" in mods:
        raise UnknownInstructionError(instruction.opcode)
    change, word = _ATOMICS[name], DTYPES[kind]
    dtype = DTYPES[kind.removesuffix("x2")]
    space, size = _space(decoder, instruction, operands[0]), SIZES[kind] * count
    access = Access(pc, space, size, True, native.STRONG)
    addresses = addresses_of(decoder, operands[0])
    puts = [decoder.put_lanes(item, kind) for item in _items(target)] if target else []
    getters = [[decoder.get(item, kind) for item in _items(x)] for x in operands[1:]]
    acquires = any(m in mods for m in ("acquire", "acq_rel"))
    releases = any(m in mods for m in ("release", "acq_rel"))
    flushes = (name, kind) == ("add", "f32")

    def values_of(chunk: Chunk, group: Group, part: list[Getter]) -> Array:
        table = np.stack([chunk.of_lanes(get(chunk.registers), group) for get in part], axis=-1)
        return np.ascontiguousarray(table).view(dtype)

    def update(chunk: Chunk, group: Group) -> None:
        where, lanes = addresses(chunk, group), group.lanes
        writes = chunk.launch.writes
        values = [values_of(chunk, group, part) for part in getters]
        old = np.empty_like(values[0])
        changed = False
        for part, chosen, base in split_by_space(access, where):
            memory, offsets = reach(chunk, part, where[chosen] - base, lanes[chosen])
            cells = memory.bytes.view(dtype)
            places = np.flatnonzero(chosen)
            numbers = offsets[:, None] // dtype.itemsize + np.arange(old.shape[1])
            for turn in _in_turns(offsets):
                index, here = numbers[turn], places[turn]
                before = cells[index]
                after = change(before, *(value[here] for value in values))
                if flushes and part.space == "global":
                    added = values[0][here]
                    after = _flushed(_flushed(before) + _flushed(added))
                old[here] = before
                cells[index] = after
                changed |= bool((cells[index] != before).any())
        # Who polls with an atomic that changes nothing gives nobody anything new to see.
        chunk.launch.writes = writes + changed
        words = old.view(word)
        for i, put in enumerate(puts):
            put(chunk, np.ascontiguousarray(words[:, i]), group)
        chunk.polled = True
        if chunk.checks is not None:
            chunk.checks.order.acquire(lanes, where, not acquires)
            chunk.checks.order.release(lanes, where, not releases)

    return update


def _without_hint(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands without a cache policy, which changes nothing here."""
    hinted = "L2__cache_hint" in instruction.mods
    return instruction.operands[:-1] if hinted else instruction.operands


@builder("createpolicy")
def _createpolicy(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    put = decoder.put(instruction.operands[0], "b64")

    def create(chunk: Chunk, group: Group) -> None:
        put(chunk, np.uint64(0), group)

    return create


@builder("membar", "fence")
def _fence(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    def fence(chunk: Chunk, group: Group) -> None:
        if chunk.checks is not None:
            chunk.checks.order.fence(group.lanes)

    return fence
