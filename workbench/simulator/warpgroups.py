"""What the four warps of a warpgroup do together: `wgmma`, `setmaxnreg`.

A product of `wgmma.mma_async` is computed when a warp waits for it, and no earlier. Until then
its accumulators may not be read or written, nor registers that hold its matrix A be written. In
shared memory a matrix lies as its descriptor says (PTX document, "Asynchronous Warpgroup Level
Matrix Shared Memory Layout"): start, leading and stride offset in units of 16 bytes, a base offset
and a swizzle. With rows r (of M or N) and depths k, and T elements in 16 bytes, a swizzle over a
span of S bytes puts element (r, k) at

    K-major     (r / 8) stride + (r % 8) S + k itemsize                  or, without swizzle,
                (r / 8) stride + (r % 8) 16 + (k / T) leading + (k % T) itemsize
    MN-major    (r / (S / 2)) leading + (r % (S / 2)) 2 + (k / 8) stride + (k % 8) S    or
                (r / 8) stride + (r % 8) 2 + (k / 8) leading + (k % 8) 16

and then lets chunks of 16 bytes change place, `tensormap.swizzled`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.simulator import faults, native
from workbench.simulator.decode import Decoder, Getter, Putter, builder
from workbench.simulator.engine import NOWHERE, Chunk, Extension, Group, Outcome, Step, group_of
from workbench.simulator.faults import SimulationError, at
from workbench.simulator.native import WARP
from workbench.simulator.ops import DTYPES, UnknownInstructionError
from workbench.simulator.ptx import SIZES, Imm, Instruction, Operand, Pair, Reg, Vec
from workbench.simulator.tensor import C, G, elements_in_register, gather, places_a, scatter
from workbench.simulator.transfers import Access, bad_address, collision

Array = Any  # numpy.ndarray
WARPS = 4
LANES = WARPS * WARP
REGISTERS, MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
_SPAN = {0: 16, 1: 128, 2: 64, 3: 32}  # by the two highest bits of a descriptor
_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


class Warpgroups(Extension):
    """The products under way of the warpgroups of a chunk.

    Attributes
    ----------
    number : int64 array
        Of the warpgroup of each lane, counting those of a block that is no multiple of four warps
        as well.
    committed : int64 array
        How many groups of products each lane has committed.
    issued : int64 array
        Products of each warpgroup so far.
    dirty, writer : arrays of (watched register, warp)
        Registers that have been written since the last `wgmma.fence`, and where.
    granted : int64 array
        Registers of a thread of each warpgroup, where it has asked for some, else 0.
    accumulating, feeding : int64 arrays of (watched register, warp)
        How many products under way have this register among their accumulators, or in matrix A.
    """

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        thread = np.arange(chunk.size) % chunk.threads
        per_block = -(-chunk.threads // LANES)
        self.number = chunk.block_of * per_block + thread // LANES
        self.threads_of = np.bincount(self.number)
        self.committed = np.zeros(chunk.size, np.int64)
        self.issued = np.zeros(self.threads_of.size, np.int64)
        self.under_way: list[Product] = []
        self.parked: dict[int, Step] = {}
        watched = chunk.launch.code.watched
        shape = (len(watched), chunk.size // WARP)
        self.index = {register: i for i, register in enumerate(watched)}
        self.dirty = np.zeros(shape, bool)
        self.writer = np.zeros(len(watched), np.int64)
        self.accumulating, self.feeding = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.fenced = np.zeros(chunk.size // WARP, bool)
        self.granted = np.zeros(self.threads_of.size, np.int64)

    def meet(self, group: Group, pc: int, action: Step) -> Outcome:
        """Let `action` happen once all threads of a warpgroup have come."""
        present = np.bincount(self.number[group.lanes], minlength=self.threads_of.size)
        if ((present == 0) | (present == self.threads_of)).all() and pc not in self.parked:
            return action(self.chunk, group)
        self.chunk.waiting_at[group.lanes] = pc
        waiting = np.flatnonzero(self.chunk.waiting_at == pc)
        present = np.bincount(self.number[waiting], minlength=self.threads_of.size)
        ready = waiting[(present == self.threads_of)[self.number[waiting]]]
        self.parked[pc] = action
        if ready.size == waiting.size:
            del self.parked[pc]
        if not ready.size:
            return []
        self.chunk.waiting_at[ready] = NOWHERE
        mask = np.zeros(self.chunk.size, bool)
        mask[ready] = True
        together = group_of(mask)
        outcome = action(self.chunk, together)
        assert outcome is None
        return [(pc + 1, together)]

    def grant(self, group: Group, count: int, pc: int) -> None:
        """Give warpgroups their registers, of those that the block was started with.

        What ptxas gives a thread to begin with is not in PTX; it is at most an equal share. Once
        every warpgroup of a block has asked, more than that would never come.
        """
        self.granted[self.number[group.lanes]] = count
        threads = self.chunk.threads
        there = threads * min(MOST_REGISTERS, REGISTERS // threads // 8 * 8)
        asked = self.granted.reshape(self.chunk.blocks, -1)
        taken = (self.granted * self.threads_of).reshape(self.chunk.blocks, -1).sum(axis=1)
        lacking = np.flatnonzero((asked > 0).all(axis=1) & (taken > there))
        if lacking.size:
            where = self.chunk.launch.where(pc)
            raise SimulationError(
                faults.DEADLOCK,
                f"block {self.chunk.first + lacking[0]} asks at {at(where)} for what makes "
                f"{taken[lacking[0]]} registers in all, and has {there} at most",
                where,
            )

    def wait(self, group: Group, allowed: int) -> None:
        """Let all products finish but those of the last `allowed` groups."""
        lanes = group.lanes
        due = np.zeros(self.chunk.size, np.int64)
        due[lanes] = self.committed[lanes] - allowed
        warps = np.unique(lanes // WARP)
        for product in self.under_way:
            here = warps[product.has(warps)]
            here = here[product.group < due[here * WARP]]
            if here.size:
                product.land(self, here)
        self.under_way = [x for x in self.under_way if x.missing.any()]

    # ------------------------------------------------------------------------------ registers

    def _warps(self, group: Group) -> Array:
        if group.mask is None:
            return np.arange(self.chunk.size // WARP)
        return np.flatnonzero(group.mask.reshape(-1, WARP).any(1))

    def touch(self, group: Group, pc: int, reads: Array, writes: Array, copies: bool) -> None:
        """An instruction reads and writes some watched registers, by their index."""
        if not self.under_way and (copies or not writes.size):
            return
        warps = self._warps(group)
        if self.under_way:
            for rows, table, did in (
                (reads, self.accumulating, "reads"),
                (writes, self.accumulating, "writes"),
                (writes, self.feeding, "writes"),
            ):
                if rows.size and table[rows[:, None], warps].any():
                    self._fault(pc, warps[table[rows[:, None], warps].any(0)][0], did, rows, table)
        if writes.size and not copies:
            # A copy of a register is the compiler's way to name it anew.
            self.dirty[writes[:, None], warps] = True
            self.writer[writes] = pc

    def _fault(self, pc: int, warp: int, did: str, rows: Array, table: Array) -> None:
        chunk = self.chunk
        row = int(rows[table[rows, warp] > 0][0])
        product = next(x for x in self.under_way if x.holds(row, int(warp)))
        where, other = chunk.launch.where(pc), chunk.launch.where(product.pc)
        role = "an accumulator" if row in product.accumulators else "matrix A"
        raise SimulationError(
            faults.ACCUMULATOR,
            f"{chunk.name(int(warp) * WARP)} {did} {role} of the wgmma at {at(other)} at "
            f"{at(where)}, with no wgmma.wait_group in between",
            where,
            other,
        )

    def demand_fence(self, pc: int, warps: Array, rows: Array) -> None:
        """Registers that a product uses must not have been written since the last fence."""
        wrong = self.dirty[rows[:, None], warps]
        if self.fenced[warps].all() and not wrong.any():
            return
        chunk, where, other = self.chunk, self.chunk.launch.where(pc), None
        words = "before any wgmma.fence"
        lane = int(warps[0]) * WARP
        if wrong.any():
            row = int(rows[wrong.any(1)][0])
            other = chunk.launch.where(int(self.writer[row]))
            lane = int(warps[wrong.any(0)][0]) * WARP
            words = f"whose registers {at(other)} wrote, with no wgmma.fence in between"
        raise SimulationError(
            faults.WGMMA_FENCE,
            f"{chunk.name(lane)} issues wgmma at {at(where)}, {words}",
            where,
            other,
        )


_NONE = np.zeros(0, np.int64)


def watch(step: Step, instruction: Instruction, watched: dict[int, int], pc: int) -> Step:
    """A step that tells the warpgroups which registers of theirs it touches."""
    if instruction.op == "wgmma":
        return step
    targets, sources = _targets_and_sources(instruction)
    writes = np.array(sorted({watched[r] for r in targets if r in watched}), np.int64)
    reads = np.array(sorted({watched[r] for r in sources if r in watched}), np.int64)
    if not writes.size and not reads.size:
        return step
    copies = instruction.op == "mov"

    def watched_step(chunk: Chunk, group: Group) -> Outcome:
        if chunk.checks is not None:
            chunk.extension(Warpgroups).touch(group, pc, reads, writes, copies)
        return step(chunk, group)

    return watched_step


def _registers_in(operand: Operand) -> list[int]:
    match operand:
        case Reg(index, _):
            return [index]
        case Vec(items):
            return [index for item in items for index in _registers_in(item)]
        case Pair(first, second):
            return _registers_in(first) + _registers_in(second)
    return []


def _targets_and_sources(instruction: Instruction) -> tuple[list[int], list[int]]:
    """Numbers of the registers that an instruction writes, and that it reads."""
    operands = instruction.operands
    first = 0 if instruction.op in ("st", "red", "bra", "stmatrix", "bar", "barrier") else 1
    split = [
        [i for x in part for i in _registers_in(x)] for part in (operands[:first], operands[first:])
    ]
    return split[0], split[1]


# --------------------------------------------------------------------------- in shared memory


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a matrix lies in shared memory; offsets in bytes."""

    start: int
    leading: int
    stride: int
    base: int
    span: int

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """From a 64-bit matrix descriptor."""
        low = 0x3FFF
        return cls(
            (bits & low) << 4, (bits >> 16 & low) << 4, (bits >> 32 & low) << 4, bits >> 49 & 7,
            _SPAN[bits >> 62 & 3],
        )  # fmt: skip

    def offsets(self, rows: int, depth: int, itemsize: int, turned: bool) -> Array:
        """Offsets in shared memory of the elements (row, depth); `turned` is MN-major."""
        r, k = np.arange(rows)[:, None], np.arange(depth)
        if turned and self.span > 16:
            across = self.span // itemsize
            place = r // across * self.leading + r % across * itemsize
            place = place + k // 8 * self.stride + k % 8 * self.span
        elif turned:
            place = r // 8 * self.stride + r % 8 * itemsize + k // 8 * self.leading + k % 8 * 16
        elif self.span > 16:
            place = r // 8 * self.stride + r % 8 * self.span + k * itemsize
        else:
            each = 16 // itemsize
            place = r // 8 * self.stride + r % 8 * 16
            place = place + k // each * self.leading + k % each * itemsize
        place = place + self.start
        turn = (place >> 7) - self.base & self.span // 16 - 1
        return place ^ turn << 4


# --------------------------------------------------------------------------------- products


@dataclass(slots=True)
class Form:
    """What the opcode of a `wgmma.mma_async` says, and how to get at its registers."""

    pc: int
    n: int
    k: int
    kinds: tuple[str, str, str]
    puts: list[Putter]
    accumulators: list[Getter]
    fragment: list[Getter] | None
    turned: tuple[bool, bool]
    signs: tuple[int, int]
    watched_d: Array
    watched_a: Array


def _places_d(registers: int, elements: int) -> tuple[Array, Array]:
    """Row and column of each (register, lane, element) of the accumulators of a warp."""
    r, e = np.arange(registers)[:, None, None], np.arange(elements)
    if elements == 2:
        return G[:, None] + 8 * (r % 2) + 0 * e, 8 * (r // 2) + 2 * C[:, None] + e
    return G[:, None] + 8 * (r // 2 % 2) + 0 * e, 8 * (r // 4) + 2 * C[:, None] + r % 2 + 0 * e


@dataclass(slots=True)
class Product:
    """A `wgmma.mma_async` of one warpgroup under way.

    Attributes
    ----------
    warps : int64 array
        Its four warps.
    missing : bool array
        Which of them have not waited for it.
    group : int
        How many groups had been committed before: the one that it belongs to.
    sequence : int
        The how manieth of its warpgroup it is.
    left : int64 array of (row, depth), or of (register, lane)
        Offsets in shared memory of A, or what its registers held.
    right : int64 array of (column, depth)
        Offsets of B.
    adds : bool
        Whether the accumulators are added to, not replaced.
    """

    form: Form
    warps: Array
    group: int
    sequence: int
    left: Array
    right: Array
    adds: bool
    block: int
    rows: Array | None = None
    missing: Array = field(default_factory=lambda: np.ones(WARPS, bool))

    @property
    def pc(self) -> int:
        """Where it was issued."""
        return self.form.pc

    @property
    def accumulators(self) -> Array:
        """The watched registers that it adds to, by index."""
        return self.form.watched_d

    def has(self, warps: Array) -> Array:
        """Which of some warps have not waited for it."""
        return np.isin(warps, self.warps[self.missing])

    def holds(self, row: int, warp: int) -> bool:
        """Whether it uses a watched register of a warp."""
        used = row in self.form.watched_d or row in self.form.watched_a
        return used and bool(np.isin(warp, self.warps[self.missing]))

    def land(self, owner: Warpgroups, warps: Array) -> None:
        """Compute the rows of some of its warps, which wait for them."""
        chunk, form = owner.chunk, self.form
        mask = np.zeros(chunk.size, bool)
        lanes = (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)
        mask[lanes] = True
        group = group_of(mask)
        d_kind, a_kind, b_kind = form.kinds
        ranks: Array = np.searchsorted(self.warps, warps)
        if form.fragment is None:
            rows = (16 * ranks[:, None] + np.arange(16)).reshape(-1)
            left = _load(chunk, self.left[rows], a_kind).reshape(-1, 16, form.k)
        else:
            count = len(form.fragment)
            words = self.left.reshape(count, WARPS, WARP)[:, ranks].reshape(count, -1)
            places = places_a(count, elements_in_register(a_kind))
            left = gather([*words], a_kind, (16, form.k), places)
        right = _load(chunk, self.right, b_kind)
        result = form.signs[0] * form.signs[1] * (left @ right.T)
        places_d = _places_d(len(form.puts), elements_in_register(d_kind))
        if self.adds:
            words_d = [chunk.of_lanes(get(chunk.registers), group) for get in form.accumulators]
            result = result + gather(words_d, d_kind, (16, form.n), places_d)
        scatter(chunk, group, form.puts, d_kind, result, places_d)
        owner.accumulating[form.watched_d[:, None], warps] -= 1
        owner.feeding[form.watched_a[:, None], warps] -= 1
        self.missing[ranks] = False
        if chunk.checks is not None:
            clocks = chunk.checks.clocks
            engine = clocks.engine(self.block, ("wgmma", int(owner.number[lanes[0]])))
            clocks.see(lanes, self.block, engine, self.sequence)
            if self.rows is not None and not self.missing.any():
                chunk.checks.end_reading(self.rows)


def _load(chunk: Chunk, offsets: Array, kind: str) -> Array:
    """Elements of shared memory in float64, or int64."""
    dtype = DTYPES[kind]
    values = chunk.shared.bytes.view(f"u{dtype.itemsize}")[offsets // dtype.itemsize]
    if kind == "tf32":  # what is below its fraction is not looked at
        values = values & np.uint32(0xFFFFE000)
    values = values.view(dtype)
    return values.astype(np.int64 if dtype.kind in "iu" else np.float64)


@builder("wgmma")
def _wgmma(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    kind = instruction.mods[0]
    if kind == "fence":
        return _fence
    if kind == "commit_group":
        return _commit
    if kind == "wait_group":
        operand = instruction.operands[0]
        if not isinstance(operand, Imm):
            raise UnknownInstructionError(instruction.opcode)
        allowed = operand.value

        def wait(chunk: Chunk, group: Group) -> None:
            chunk.extension(Warpgroups).wait(group, allowed)

        return wait
    if kind != "mma_async" or "sp" in instruction.mods:
        raise UnknownInstructionError(instruction.opcode)
    return _mma_async(decoder, instruction, pc)


def _fence(chunk: Chunk, group: Group) -> Outcome:
    owner = chunk.extension(Warpgroups)
    warps = np.unique(group.lanes // WARP)
    owner.fenced[warps] = True
    owner.dirty[:, warps] = False
    return None


def _commit(chunk: Chunk, group: Group) -> Outcome:
    chunk.extension(Warpgroups).committed[group.lanes] += 1
    return None


def _mma_async(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    mods = instruction.mods
    size = next((m for m in (re.fullmatch(r"m64n(\d+)k(\d+)", x) for x in mods) if m), None)
    kinds = [m for m in mods if m in SIZES]
    if size is None or len(kinds) != 3 or any(m in mods for m in ("satfinite", "and")):
        raise UnknownInstructionError(instruction.opcode)
    d_kind, a_kind, b_kind = kinds
    n, k = int(size[1]), int(size[2])
    if _DEPTH.get(a_kind) != k or SIZES[a_kind] != SIZES[b_kind] or n % 8 or not 8 <= n <= 256:
        raise UnknownInstructionError(instruction.opcode)
    d, a, b, scale, *flags = instruction.operands
    numbers = [x.value if isinstance(x, Imm) else 0 for x in flags]
    from_registers = isinstance(a, Vec)
    # Integer products have no signs; only 16-bit elements can be turned.
    turns = [0] * from_registers + (numbers[2:] if SIZES[a_kind] == 2 else []) + [0, 0]
    signs = [x if x < 2 else x - (1 << 32) for x in numbers[:2]] or [1, 1]
    word = "b32"
    items_d = d.items if isinstance(d, Vec) else ()
    items_a = a.items if isinstance(a, Vec) else ()
    form = Form(
        pc, n, k, (d_kind, a_kind, b_kind),
        [decoder.put_lanes(x, word) for x in items_d], [decoder.get(x, word) for x in items_d],
        [decoder.get(x, word) for x in items_a] if from_registers else None,
        (bool(turns[0]), bool(turns[1])), (signs[0], signs[1]),
        np.array([decoder.watched[x.index] for x in items_d if isinstance(x, Reg)], np.int64),
        np.array([decoder.watched[x.index] for x in items_a if isinstance(x, Reg)], np.int64),
    )  # fmt: skip
    if len(items_d) * elements_in_register(d_kind) * LANES != 64 * n:
        raise UnknownInstructionError(instruction.opcode)
    get_a = None if from_registers else decoder.get(a, "u64")
    get_b, get_scale = decoder.get(b, "u64"), decoder.get(scale, "pred")

    def issue(chunk: Chunk, group: Group) -> Outcome:
        owner = chunk.extension(Warpgroups)
        lanes = group.lanes
        for number in np.unique(owner.number[lanes]).tolist():
            _issue(owner, form, lanes[owner.number[lanes] == number], get_a, get_b, get_scale)
        return None

    return lambda chunk, group: chunk.extension(Warpgroups).meet(group, pc, issue)


def _issue(
    owner: Warpgroups,
    form: Form,
    lanes: Array,
    get_a: Getter | None,
    get_b: Getter,
    get_scale: Getter,
) -> None:
    """One warpgroup issues a product."""
    chunk, pc = owner.chunk, form.pc
    if lanes.size != LANES:
        raise _unequal(chunk, pc, int(lanes[0]), f"only {lanes.size} threads are in the warpgroup")

    def same(get: Getter, what: str) -> int:
        values = chunk.spread(get(chunk.registers))[lanes]
        if (values != values[0]).any():
            lane = int(lanes[np.flatnonzero(values != values[0])[0]])
            raise _unequal(
                chunk, pc, lane, f"its {what} is not that of the warpgroup's first thread"
            )
        return int(values[0])

    warps = lanes[::WARP] // WARP
    if chunk.checks is not None:
        owner.demand_fence(pc, warps, np.concatenate([form.watched_d, form.watched_a]))
        owner.touch(_group(chunk, lanes), pc, form.watched_a, _NONE, copies=True)
    itemsize, block = SIZES[form.kinds[1]], int(chunk.block_of[lanes[0]])
    operands = []
    if form.fragment is not None:
        left = np.stack([chunk.spread(get(chunk.registers))[lanes] for get in form.fragment])
    else:
        assert get_a is not None
        descriptor = Descriptor.decode(same(get_a, "descriptor of A"))
        left = descriptor.offsets(64, form.k, itemsize, form.turned[0])
        operands.append(left)
    descriptor = Descriptor.decode(same(get_b, "descriptor of B"))
    right = descriptor.offsets(form.n, form.k, itemsize, form.turned[1])
    operands.append(right)
    units = np.unique(np.concatenate([x.reshape(-1) for x in operands]) >> 4)
    if units.max() + 1 > chunk.shared_limit >> 4:
        access = Access(pc, "shared", 16, False)
        beyond = int(units[units + 1 > chunk.shared_limit >> 4][0]) << 4
        raise bad_address(chunk, access, beyond, int(lanes[0]), native.OUT_OF_RANGE)
    base = block * chunk.shared_stride
    number = int(owner.number[lanes[0]])
    owner.issued[number] += 1
    product = Product(
        form, warps, int(owner.committed[lanes[0]]), int(owner.issued[number]),
        left + base if form.fragment is None else left, right + base,
        bool(same(get_scale, "scale-d")), block,
    )  # fmt: skip
    if chunk.checks is not None:
        _note(owner, product, lanes, (units << 4) + base)
    owner.accumulating[form.watched_d[:, None], warps] += 1
    owner.feeding[form.watched_a[:, None], warps] += 1
    owner.under_way.append(product)


def _group(chunk: Chunk, lanes: Array) -> Group:
    mask = np.zeros(chunk.size, bool)
    mask[lanes] = True
    return group_of(mask)


def _note(owner: Warpgroups, product: Product, lanes: Array, units: Array) -> None:
    """A product reads some 16 bytes each of shared memory from now on."""
    chunk, pc = owner.chunk, product.pc
    checks = chunk.checks
    assert checks is not None
    size = units.size * 16
    chunk.launch.counts.shared[pc] += np.array([1, LANES, size, size // 128, size // 128])
    rows = ((units >> checks.shift)[:, None] + np.arange(max(1, 16 >> checks.shift))).reshape(-1)
    engine = checks.clocks.engine(product.block, ("wgmma", int(owner.number[lanes[0]])))
    who = checks.clocks.who(product.block, engine)
    code = checks.engine(rows, lanes, who, product.sequence, pc, 0, False)
    if code:
        access = Access(pc, "shared", 16, False)
        raise collision(chunk, access, rows << checks.shift, lanes[:1].repeat(rows.size), code)
    product.rows = rows
    checks.begin_reading(rows, who, pc)


def _unequal(chunk: Chunk, pc: int, lane: int, words: str) -> SimulationError:
    where = chunk.launch.where(pc)
    return SimulationError(
        faults.ACCUMULATOR, f"{chunk.name(lane)} issues wgmma at {at(where)}, but {words}", where
    )


# -------------------------------------------------------------------------------- registers


@builder("setmaxnreg")
def _setmaxnreg(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """All threads of a warpgroup ask for more registers, or give some back."""
    operand = instruction.operands[0]
    count = operand.value if isinstance(operand, Imm) else 0
    if not 24 <= count <= 256 or count % 8:
        raise UnknownInstructionError(f"{instruction.opcode} {count}")

    def grant(chunk: Chunk, group: Group) -> Outcome:
        chunk.extension(Warpgroups).grant(group, count, pc)
        return None

    return lambda chunk, group: chunk.extension(Warpgroups).meet(group, pc, grant)
