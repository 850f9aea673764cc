"""From a parsed program to one Python function an instruction.

What can be decided beforehand is decided here, once a program: which function computes, which
registers it reads and as what type. The functions that come out, `Step`s, only compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from workbench.simulator import ops
from workbench.simulator.engine import Chunk, Code, Group, Outcome, Registers, Step
from workbench.simulator.memory import (
    GLOBAL_BASE,
    LOCAL_BASE,
    MODULE_BASE,
    PARAM_BASE,
    RANK,
    SHARED_BASE,
)
from workbench.simulator.native import fma
from workbench.simulator.ops import DTYPES, UnknownInstructionError
from workbench.simulator.ptx import (
    Function,
    Imm,
    Instruction,
    Mem,
    Not,
    Operand,
    Pair,
    Program,
    Reg,
    Special,
    Sym,
    Vec,
)  # fmt: skip

Getter = Callable[[Registers], Any]
Putter = Callable[[Chunk, Any, Group], None]
Builder = Callable[["Decoder", Instruction, int], Step]
BUILDERS: dict[str, Builder] = {}


def builder(*names: str) -> Callable[[Builder], Builder]:
    """Register what makes the steps of some opcodes: their first word, or two: ``st.async``."""

    def register(function: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(names, function))
        return function

    return register


def decode(program: Program) -> Code:
    """Make a program executable.

    Raises
    ------
    UnknownInstructionError
        Naming opcode, source file and line.
    """
    # Their modules fill BUILDERS.
    from workbench.simulator import (  # noqa: F401
        bulk,
        clusters,
        collectives,
        control,
        copies,
        mbarriers,
        tensor,
        transfers,
        warpgroups,
    )

    return Decoder(program).code()


class Decoder:
    """Makes steps; its methods are what builders are written with.

    Attributes
    ----------
    types : list of numpy.dtype
        Of each register.
    fixed : dict
        Registers that hold what no instruction writes, by name.
    watched : dict
        Those that `wgmma` uses, with a number each.
    products : dict
        By index, each addition that is contracted to a multiply-add, and its multiplication.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.types = [DTYPES[kind] for kind in program.registers]
        self.fixed: dict[str, int] = {}
        self.function_at: dict[int, Function] = {}
        starts = sorted(program.functions.values(), key=lambda f: f.start)
        for function, following in zip(starts, [*starts[1:], None], strict=True):
            end = following.start if following else len(program.instructions)
            self.function_at.update(dict.fromkeys(range(function.start, end), function))
        self.module_addresses = _lay_out_module(program)
        self.watched = {register: i for i, register in enumerate(_watched(program))}
        self.products = _contractions(program)
        self.taken_in = set(self.products.values())
        _link_calls(program)

    def code(self) -> Code:
        """The program's steps."""
        steps: list[Step] = []
        for pc, instruction in enumerate(self.program.instructions):
            try:
                step = self._step(instruction, pc)
            except UnknownInstructionError as error:
                raise UnknownInstructionError(
                    f"the simulator does not know {instruction.opcode} at {instruction.where}"
                ) from error
            steps.append(step)
        fixed = [(index, name) for name, index in self.fixed.items()]
        return Code(self.program, steps, fixed, self.types, self.module_addresses, [*self.watched])

    def _step(self, instruction: Instruction, pc: int) -> Step:
        build = BUILDERS.get(".".join((instruction.op, *instruction.mods[:1])))
        build = build or BUILDERS.get(instruction.op, _arithmetic)
        step = build(self, instruction, pc)
        if self.watched:
            from workbench.simulator.warpgroups import watch

            step = watch(step, instruction, self.watched, pc)
        if instruction.guard is None or instruction.op == "bra":
            return step
        return self._guarded(step, self.condition(instruction.guard), pc)

    @staticmethod
    def _guarded(step: Step, condition: Getter, pc: int) -> Step:
        def guarded(chunk: Chunk, group: Group) -> Outcome:
            part = chunk.part(group, condition(chunk.registers))
            if part is None:
                return None
            outcome = step(chunk, part)
            if outcome is None or part is group:
                return outcome
            rest = Group(chunk.mask_without(group, part), group.count - part.count)
            parts = [(outcome, part)] if isinstance(outcome, int) else outcome
            return [(pc + 1, rest), *parts]

        return guarded

    # ------------------------------------------------------------------------------- operands

    def new_register(self, dtype: np.dtype[Any]) -> int:
        """The number of one more register."""
        self.types.append(dtype)
        return len(self.types) - 1

    def fixed_register(self, name: str, kind: str) -> int:
        """The register of something that no instruction writes."""
        if name not in self.fixed:
            self.fixed[name] = self.new_register(DTYPES[kind])
        return self.fixed[name]

    def get(self, operand: Operand, kind: str) -> Getter:
        """A function that reads an operand from the registers as a PTX type."""
        dtype = DTYPES[kind]
        match operand:
            case Reg(index, _):
                return _reader(index, dtype)
            case Special(name):
                wide = name in ("%clock64", "%globaltimer", "%gridid")
                own = "pred" if name == "%is_explicit_cluster" else "u64" if wide else "u32"
                return _reader(self.fixed_register(name, own), dtype)
            case Imm(value, bits):
                return _constant(_literal(value, bits, kind))
            case Not(inner):
                positive = self.get(inner, kind)
                return lambda registers: ~positive(registers)
            case Sym(name):
                return _constant(dtype.type(self.address(name)))
            case Mem(Sym(name), offset):
                return _constant(dtype.type(self.address(name) + offset))
        raise UnknownInstructionError(f"operand {operand}")

    def address(self, name: str) -> int:
        """Address of a variable in its own space; of one of the module's, in global memory."""
        variable = self.program.variables.get(name)
        if name in self.module_addresses:
            return self.module_addresses[name]
        if variable is None:
            raise UnknownInstructionError(f"the address of {name}")
        return variable.offset

    def condition(self, guard: Reg | Not) -> Getter:
        """The predicate of a guarded instruction."""
        return self.get(guard, "pred")

    def put(self, operand: Operand, kind: str) -> Putter:
        """A function that writes a result, computed for all lanes, to a register."""
        if operand is None:
            return lambda chunk, value, group: None
        index, widen = self._target(operand, kind)
        if widen is None:
            return lambda chunk, value, group: chunk.put(index, value, group)
        return lambda chunk, value, group: chunk.put(index, value.astype(widen), group)

    def put_lanes(self, operand: Operand, kind: str) -> Putter:
        """The same for a result that has values for the lanes of the group only."""
        if operand is None:
            return lambda chunk, values, group: None
        index, widen = self._target(operand, kind)
        if widen is None:
            return lambda chunk, values, group: chunk.put_lanes(index, values, group)
        return lambda chunk, values, group: chunk.put_lanes(index, values.astype(widen), group)

    def _target(self, operand: Operand, kind: str) -> tuple[int, np.dtype[Any] | None]:
        """A result's register and, if that is wider, the type to which the result is extended."""
        if not isinstance(operand, Reg):
            raise UnknownInstructionError(f"a result in {operand}")
        width = self.types[operand.index].itemsize
        if kind == "pred" or width <= DTYPES[kind].itemsize:
            return operand.index, None
        sign = "s" if ops.is_signed(kind) else "u"
        return operand.index, DTYPES[f"{sign}{8 * width}"]


def _watched(program: Program) -> list[int]:
    """The registers that any `wgmma` uses as accumulators or for matrix A."""
    found: set[int] = set()
    for instruction in program.instructions:
        if instruction.op == "wgmma" and "mma_async" in instruction.mods:
            for operand in instruction.operands[:2]:
                if isinstance(operand, Vec):
                    found.update(x.index for x in operand.items if isinstance(x, Reg))
    return sorted(found)


_LEAVES = ("bra", "brx", "call", "ret", "exit", "trap")


def _contractions(program: Program) -> dict[int, int]:
    """The additions that take in a product, and their multiplications, by index.

    Without a rounding modifier the two may become one multiply-add, rounded once (PTX ISA, "add"
    and "mul"), and in one basic block, where nobody else uses the product, ptxas sees to it.
    """
    occurrences = Counter(
        register for x in program.instructions for y in x.operands for register in _registers(y)
    )
    starts = set(program.labels.values())
    found: dict[int, int] = {}
    # Of this basic block: products by their registers, and those that a register goes into.
    products: dict[int, int] = {}
    taking: dict[int, list[int]] = {}
    for pc, instruction in enumerate(program.instructions):
        if pc in starts:
            products, taking = {}, {}
        op, mods, operands = instruction.op, instruction.mods, instruction.operands
        free = instruction.guard is None and mods in (("f32",), ("ftz", "f32"), ("f64",))
        if free and op in ("add", "sub"):
            for operand in operands[1:]:
                product = products.get(operand.index) if isinstance(operand, Reg) else None
                if product is not None and program.instructions[product].mods == mods:
                    found[pc] = product
                    break
        for written in _registers(*operands[:1]):
            for product_register in taking.pop(written, ()):
                products.pop(product_register, None)
        if free and op == "mul":
            target, *factors = operands
            if isinstance(target, Reg) and occurrences[target.index] == 2:
                products[target.index] = pc
                for register in _registers(*factors):
                    taking.setdefault(register, []).append(target.index)
        if op in _LEAVES:
            products, taking = {}, {}
    return found


def _registers(*operands: Operand) -> Iterator[int]:
    """The numbers of the registers in some operands, as often as they are there."""
    for operand in operands:
        match operand:
            case Reg(index, _):
                yield index
            case Vec(items):
                yield from _registers(*items)
            case Pair(first, second):
                yield from _registers(first, second)
            case Not(inner):
                yield from _registers(inner)
            case Mem(base, _):
                yield from _registers(base)


def _lay_out_module(program: Program) -> dict[str, int]:
    """Where in global memory each variable of the module lies."""
    addresses, end = {}, MODULE_BASE
    for variable in program.variables.values():
        if variable.space in ("global", "const"):
            end = -(-end // variable.align) * variable.align
            addresses[variable.name] = end
            end += variable.size
    return addresses


def _reader(index: int, dtype: np.dtype[Any]) -> Getter:
    def read(registers: Registers) -> Any:
        x = registers[index]
        return x if x.dtype is dtype else _seen_as(x, dtype)

    return read


def _seen_as(x: Any, dtype: np.dtype[Any]) -> Any:
    """The bits of a register as another type; of a wider register, the lower ones."""
    if x.dtype.itemsize == dtype.itemsize:
        return x.view(dtype)
    if x.dtype.itemsize < dtype.itemsize:
        return x.view(f"u{x.dtype.itemsize}").astype(f"u{dtype.itemsize}").view(dtype)
    return x.view(f"u{x.dtype.itemsize}").astype(f"u{dtype.itemsize}").view(dtype)


def _constant(value: Any) -> Getter:
    return lambda registers: value


def _literal(value: int, bits: int, kind: str) -> Any:
    """A literal as a NumPy scalar of a PTX type."""
    dtype = DTYPES[kind]
    if kind == "pred":
        return np.bool_(value != 0)
    if bits == 64 and dtype == np.float32:  # a decimal fraction
        return np.uint64(value).view(np.float64).astype(np.float32)
    if bits == 32 and dtype == np.float64:
        return np.uint32(value).view(np.float32).astype(np.float64)
    if bits == 0 and kind in ("f32", "f64"):
        return dtype.type(value)
    width = 8 * dtype.itemsize
    return np.array(value % (1 << width), f"u{dtype.itemsize}").view(dtype)[()]


# ------------------------------------------------------------------------------- arithmetic


def _arithmetic(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    if pc in decoder.taken_in:
        return _nothing
    if pc in decoder.products:
        product = decoder.program.instructions[decoder.products[pc]]
        return _contracted(decoder, instruction, product)
    if "cc" in instruction.mods or instruction.op in ("addc", "subc", "madc"):
        return _with_carry(decoder, instruction)
    operation = ops.find(instruction.op, instruction.mods)
    target, *sources = instruction.operands
    kinds = operation.sources
    if len(sources) != len(kinds):
        raise UnknownInstructionError(instruction.opcode)
    getters = [decoder.get(source, kind) for source, kind in zip(sources, kinds, strict=True)]
    if isinstance(target, Pair):
        return _two_predicates(decoder, instruction, target, getters)
    put, function = decoder.put(target, operation.result), operation.function
    plain = isinstance(target, Reg) and decoder._target(target, operation.result)[1] is None
    if operation.function is fma and plain and all(isinstance(x, Reg) for x in sources):
        numbers = tuple(x.index for x in sources)  # type: ignore[union-attr]
        return _multiply_add(target.index, numbers, DTYPES[kinds[0]])  # type: ignore[union-attr]
    if plain and len(getters) in (2, 3):
        return _fast(target.index, function, getters)  # type: ignore[union-attr]

    def compute(chunk: Chunk, group: Group) -> None:
        registers = chunk.registers
        put(chunk, function(*[get(registers) for get in getters]), group)

    return compute


def _fast(index: int, function: Callable[..., Any], getters: list[Getter]) -> Step:
    """The same for the most frequent forms, with fewer calls."""
    if len(getters) == 2:
        first, second = getters

        def binary(chunk: Chunk, group: Group) -> None:
            registers = chunk.registers
            value = function(first(registers), second(registers))
            if group.mask is None:
                registers[index] = value
            else:
                chunk.put(index, value, group)

        return binary
    first, second, third = getters

    def ternary(chunk: Chunk, group: Group) -> None:
        registers = chunk.registers
        value = function(first(registers), second(registers), third(registers))
        if group.mask is None:
            registers[index] = value
        else:
            chunk.put(index, value, group)

    return ternary


def _multiply_add(target: int, sources: tuple[int, ...], dtype: np.dtype[Any]) -> Step:
    """An `fma` of registers: nine of ten instructions of a matrix product."""
    i, j, k = sources

    def multiply_add(chunk: Chunk, group: Group) -> None:
        registers = chunk.registers
        a, b, c = registers[i], registers[j], registers[k]
        if a.dtype is not dtype:
            a = _seen_as(a, dtype)
        if b.dtype is not dtype:
            b = _seen_as(b, dtype)
        if c.dtype is not dtype:
            c = _seen_as(c, dtype)
        if group.mask is None:
            registers[target] = fma(a, b, c)
        else:
            chunk.put(target, fma(a, b, c), group)

    return multiply_add


def _nothing(chunk: Chunk, group: Group) -> None:
    """A multiplication whose product only an addition needs, which computes it anew."""


def _contracted(decoder: Decoder, addition: Instruction, product: Instruction) -> Step:
    """An addition or subtraction together with the multiplication of what it takes."""
    kind = addition.mods[-1]
    function = ops.find("fma", ("rn", *addition.mods)).function
    put = decoder.put(addition.operands[0], kind)
    first = addition.operands[1] == product.operands[0]
    other = addition.operands[2 if first else 1]
    a, b, c = (decoder.get(x, kind) for x in (*product.operands[1:], other))
    subtracts = addition.op == "sub"

    def compute(chunk: Chunk, group: Group) -> None:
        registers = chunk.registers
        x, y, z = a(registers), b(registers), c(registers)
        if subtracts and first:
            z = -z
        elif subtracts:
            x = -x
        put(chunk, function(x, y, z), group)

    return compute


def _two_predicates(
    decoder: Decoder, instruction: Instruction, target: Pair, getters: list[Getter]
) -> Step:
    """``setp`` with ``p|q``: q gets the opposite comparison, combined like p's."""
    mods = instruction.mods
    compare, kind = ops.comparison(mods[0], mods[-1]), mods[-1]
    combine = ops.BOOLEAN.get(mods[1])
    put_p, put_q = decoder.put(target.first, "pred"), decoder.put(target.second, "pred")
    del kind

    def compute(chunk: Chunk, group: Group) -> None:
        a, b, *rest = (get(chunk.registers) for get in getters)
        p = compare(a, b)
        q = ~p
        if combine is not None:
            p, q = combine(p, rest[0]), combine(q, rest[0])
        put_p(chunk, p, group)
        put_q(chunk, q, group)

    return compute


def _with_carry(decoder: Decoder, instruction: Instruction) -> Step:
    """Sums of many words: ``.cc`` leaves a carry, ``addc`` and its like take it in."""
    op, mods, kind = instruction.op, instruction.mods, instruction.mods[-1]
    unsigned = DTYPES[f"u{8 * DTYPES[kind].itemsize}"]
    carry = decoder.fixed_register("%carry", "pred")
    name = op.removesuffix("c") if op != "madc" else "mad"
    takes_in, leaves = op in ("addc", "subc", "madc"), "cc" in mods
    plain = tuple(m for m in mods if m != "cc")
    getters = [decoder.get(x, kind) for x in instruction.operands[1:]]
    put = decoder.put(instruction.operands[0], kind)
    multiply = ops.find("mul", plain).function if name == "mad" else None

    def compute(chunk: Chunk, group: Group) -> None:
        values = [get(chunk.registers) for get in getters]
        if multiply is not None:
            values = [multiply(values[0], values[1]), values[2]]
        a, b = (x.view(unsigned) for x in values)
        before = chunk.registers[carry].astype(unsigned) if takes_in else unsigned.type(0)
        if name == "sub":
            result = a - b - before
            out = (a < b) | ((a == b) & (before > 0))
        else:
            result = a + b + before
            out = (result < a) | ((result == a) & (before > 0))
        put(chunk, result, group)
        if leaves:
            chunk.put(carry, out, group)

    return compute


@builder("mov")
def _mov(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    target, source = instruction.operands
    kind = instruction.mods[-1]
    if isinstance(target, Vec) or isinstance(source, Vec):
        return _pack(decoder, target, source, kind)
    get, put = decoder.get(source, kind), decoder.put(target, kind)

    def move(chunk: Chunk, group: Group) -> None:
        put(chunk, get(chunk.registers), group)

    return move


def _pack(decoder: Decoder, target: Operand, source: Operand, kind: str) -> Step:
    """Join registers into a wider one, or take a wide one apart; the first is the lowest."""
    parts = (target if isinstance(target, Vec) else source).items  # type: ignore[union-attr]
    wide, width = DTYPES[kind], DTYPES[kind].itemsize // len(parts)
    narrow = f"b{8 * width}"
    shifts = [wide.type(8 * width * i) for i in range(len(parts))]
    if isinstance(target, Vec):
        get = decoder.get(source, kind)
        puts = [decoder.put(part, narrow) for part in parts]

        def take_apart(chunk: Chunk, group: Group) -> None:
            word = get(chunk.registers)
            for put, shift in zip(puts, shifts, strict=True):
                put(chunk, (word >> shift).astype(DTYPES[narrow]), group)

        return take_apart
    getters, put = [decoder.get(part, narrow) for part in parts], decoder.put(target, kind)

    def join(chunk: Chunk, group: Group) -> None:
        word = wide.type(0)
        for get_part, shift in zip(getters, shifts, strict=True):
            word = word | get_part(chunk.registers).astype(wide) << shift
        put(chunk, word, group)

    return join


@builder("cvta")
def _cvta(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    """Between an address in one memory and one that says by itself which memory it is in."""
    bases = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}
    spaces = (m.partition("__")[0] for m in instruction.mods)
    base = np.uint64(next((bases[space] for space in spaces if space in bases), 0))
    if "to" in instruction.mods:
        base = np.uint64(-int(base) % (1 << 64))
    get = decoder.get(instruction.operands[1], "u64")
    put = decoder.put(instruction.operands[0], "u64")

    def convert(chunk: Chunk, group: Group) -> None:
        put(chunk, get(chunk.registers) + base, group)

    return convert


@builder("isspacep")
def _isspacep(decoder: Decoder, instruction: Instruction, pc: int) -> Step:
    limits = {
        "shared": (SHARED_BASE, LOCAL_BASE),
        "shared__cta": (SHARED_BASE, SHARED_BASE + (1 << RANK)),
        "shared__cluster": (SHARED_BASE, LOCAL_BASE),
        "local": (LOCAL_BASE, PARAM_BASE),
        "param": (PARAM_BASE, GLOBAL_BASE),
        "global": (GLOBAL_BASE, 1 << 63),
    }
    low, high = (np.uint64(limit) for limit in limits[instruction.mods[0]])
    get = decoder.get(instruction.operands[1], "u64")
    put = decoder.put(instruction.operands[0], "pred")

    def test(chunk: Chunk, group: Group) -> None:
        address = get(chunk.registers)
        put(chunk, (address >= low) & (address < high), group)

    return test


# ----------------------------------------------------------------------------- the module


def callee_of(instruction: Instruction) -> str:
    """Name of the function that a call calls."""
    return next((x.name for x in instruction.operands if isinstance(x, Sym)), "")


def _link_calls(program: Program) -> None:
    """Let the arguments of every call lie where the function looks for them."""
    for instruction in program.instructions:
        if instruction.op != "call" or callee_of(instruction) not in program.functions:
            continue
        function = program.functions[callee_of(instruction)]
        lists = [x.items for x in instruction.operands if isinstance(x, Vec)]
        for given, own in zip(
            lists, (function.results, function.params)[-len(lists) :], strict=True
        ):
            for actual, formal in zip(given, own, strict=True):
                program.variables[actual.name].offset = formal.offset  # type: ignore[union-attr]
