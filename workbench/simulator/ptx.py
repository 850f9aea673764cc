"""A parser for PTX, the assembly language that NVRTC and Numba compile kernels to.

`parse` turns the text of a module into a `Program`: one flat list of instructions, in which every
register is a number, every label an index and every variable an offset. Instructions keep the
source line that they came from, so that whatever is said about them can name it.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

# Bytes of each type; `pred` is a truth value.
SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
    "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2,
}  # fmt: skip


class PTXError(ValueError):
    """PTX that the parser does not understand."""


@dataclass(frozen=True, slots=True)
class Location:
    """A source line; `caller` is the line that it was inlined into."""

    file: str
    line: int
    caller: Location | None = None

    def __str__(self) -> str:
        here = f"{self.file.rpartition('/')[2]}:{self.line}"
        return here if self.caller is None else f"{here} (inlined at {self.caller})"

    def chain(self) -> Iterator[Location]:
        """Itself and the lines that it was inlined into, innermost first."""
        place: Location | None = self
        while place is not None:
            yield place
            place = place.caller


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, by its number, and its type."""

    index: int
    kind: str


@dataclass(frozen=True, slots=True)
class Special:
    """A read-only register of the machine, like ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal number; `bits` is its width if it was written as the bits of a float, else 0."""

    value: int
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    """A name that is no register: a variable, a parameter, a function or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Mem:
    """``[base + offset]``; the base is a register, a name or a number."""

    base: Operand
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, ...}``; also the arguments of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``p|q``: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``."""

    operand: Operand


Operand = Reg | Special | Imm | Sym | Mem | Vec | Pair | Not | None  # None is `_`, a result unused


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    op : str
        The first word of the opcode, like ``"ld"``.
    mods : tuple of str
        The other words, like ``("global", "v4", "f32")``.
    operands : tuple
    guard : Reg or Not or None
        The predicate without which a thread skips the instruction.
    where : Location or None
    """

    op: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | Not | None
    where: Location | None

    @property
    def opcode(self) -> str:
        """The whole opcode, like ``ld.global.v4.f32``."""
        return ".".join((self.op, *self.mods)).replace("__", "::")


@dataclass(slots=True)
class Variable:
    """A variable of some state space.

    Attributes
    ----------
    space : str
        global, const, shared, local or param.
    offset : int
        In its space: in a block's shared memory, in a thread's local memory, in the parameters.
    size : int
        In bytes; 0 for dynamic shared memory.
    data : bytes
        What it holds at first, or nothing.
    """

    name: str
    space: str
    size: int
    align: int
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Function:
    """A kernel or a function that one calls; the two differ in who passes the parameters.

    Attributes
    ----------
    start : int
        Index of its first instruction.
    cluster : int
        Blocks of the clusters that a kernel must run in.
    """

    name: str
    params: list[Variable]
    results: list[Variable]
    start: int = 0
    cluster: int = 1


@dataclass(slots=True)
class Program:
    """A kernel and everything that it calls.

    Attributes
    ----------
    registers : list of str
        Type of every register.
    labels : dict
        Index of the instruction after each label.
    variables : dict
        By name: those of the module and of its functions.
    shared_size, local_size : int
        Bytes of a block's static shared memory and of a thread's local memory.
    """

    entry: Function
    functions: dict[str, Function]
    instructions: list[Instruction]
    registers: list[str]
    labels: dict[str, int]
    variables: dict[str, Variable]
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shared_size: int = 0
    local_size: int = 0


_HEADER = re.compile(r"\s*(?:\.\w+\s+)*\.(entry|func)\b")
_PIECE = re.compile(r"\s*(?:([{}])|([$\w]+):(?!:)|([^;]*);)")
_VARIABLE = re.compile(
    r"(?P<words>(?:\.\w+\s+(?:\d+\s+)?)+)(?P<name>[$%\w]+)\s*(?P<dims>(?:\[\d*\]\s*)*)"
    r"(?:=\s*(?P<initial>.*))?$",
    re.DOTALL,
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_SPACES = ("global", "const", "shared", "local", "param")


def parse(text: str, entry: str) -> Program:
    """Parse a module and lay out the kernel named `entry` with all functions of the module.

    Raises
    ------
    PTXError
        If there is no such kernel, or a line that is not PTX.
    """
    return _Parser(text).program(entry)


class _Parser:
    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        self.files: dict[str, str] = dict(
            re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)
        )
        text = re.sub(
            r"^\s*\.(?:file|version|target|address_size)\b.*$", "", text, flags=re.MULTILINE
        )
        text = re.split(r"^\s*\.section\b", text, maxsplit=1, flags=re.MULTILINE)[0]
        # The one kind of line that ends without a semicolon.
        self.text = re.sub(r"^(\s*\.loc\b[^\n]*)$", r"\1;", text, flags=re.MULTILINE)
        self.at = 0
        self.instructions: list[Instruction] = []
        self.registers: list[str] = []
        self.labels: dict[str, int] = {}
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Function] = {}
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self.scopes: list[dict[str, Reg | Sym]] = []
        self.sizes = {"shared": 0, "local": 0}
        self.where: Location | None = None
        self.inlined: dict[tuple[str, int], Location] = {}
        self.unique = 0

    def program(self, entry: str) -> Program:
        while self.text[self.at :].strip():
            header = _HEADER.match(self.text, self.at)
            if header:
                self._function()
            else:
                self._directive(self._statement())
        if entry not in self.functions:
            raise PTXError(f"the module has no kernel {entry}: it has {', '.join(self.functions)}")
        for variable in self.variables.values():
            if variable.space == "shared" and variable.size == 0:
                variable.offset = -(-self.sizes["shared"] // 16) * 16  # after the static ones
        return Program(
            self.functions[entry], self.functions, self.instructions, self.registers, self.labels,
            self.variables, self.branch_targets, self.sizes["shared"], self.sizes["local"],
        )  # fmt: skip

    def _statement(self) -> str:
        end = self.text.find(";", self.at)
        if end < 0:
            raise PTXError(f"unfinished statement: {self.text[self.at :].strip()[:80]!r}")
        statement, self.at = self.text[self.at : end], end + 1
        return statement.strip()

    # ------------------------------------------------------------------------------ functions

    def _function(self) -> None:
        end = min(i for i in (self.text.find(c, self.at) for c in ";{") if i >= 0)
        header, self.at = self.text[self.at : end], end
        match = re.search(
            r"\.(entry|func)\s*(?:\(([^)]*)\))?\s*([$\w]+)\s*(?:\(([^)]*)\))?", header, re.DOTALL
        )
        if match is None:
            raise PTXError(f"not a function: {header.strip()[:80]!r}")
        name = match.group(3)
        if self.text[self.at] == ";":  # only declared: it is defined later, or never called
            self.at += 1
            return
        scope: dict[str, Reg | Sym] = {}
        results, params = (self._parameters(match.group(i) or "") for i in (2, 4))
        if match.group(1) == "func":
            for variable in (*results, *params):
                self._make_local(variable)
        cluster = _cluster(header)
        self.functions[name] = Function(name, params, results, len(self.instructions), cluster)
        self.where, self.inlined = None, {}
        self.at += 1
        self.scopes = [scope]
        while self.scopes:
            self._body_piece()

    def _parameters(self, text: str) -> list[Variable]:
        parameters, offset = [], 0
        for part in filter(None, (p.strip() for p in text.split(","))):
            variable = self._variable(part)
            offset = -(-offset // variable.align) * variable.align
            variable.offset = offset
            offset += variable.size
            parameters.append(variable)
        return parameters

    def _body_piece(self) -> None:
        piece = _PIECE.match(self.text, self.at)
        if piece is None:
            raise PTXError(f"not PTX: {self.text[self.at :].strip()[:80]!r}")
        self.at = piece.end()
        brace, label, statement = piece.groups()
        if brace == "{":
            self.scopes.append({})
        elif brace == "}":
            self.scopes.pop()
        elif label is not None:
            if self.text.startswith(".branchtargets", self._skip()):
                names = self._statement().removeprefix(".branchtargets").split(",")
                self.branch_targets[label] = tuple(name.strip() for name in names)
            else:
                self.labels[self._own_label(label)] = len(self.instructions)
        elif statement.startswith("."):
            self._directive(statement.strip())
        elif statement.strip():
            self._instruction(statement.strip())

    def _skip(self) -> int:
        while self.text[self.at].isspace():
            self.at += 1
        return self.at

    def _own_label(self, name: str) -> str:
        """A label of an inner scope (inline assembly) may be there many times: make it unique."""
        if len(self.scopes) > 1 and not name.startswith("$L__BB"):
            symbol = self.scopes[-1].get(name)
            if not isinstance(symbol, Sym):
                self.unique += 1
                symbol = self.scopes[-1][name] = Sym(f"{name}#{self.unique}")
            return symbol.name
        return name

    # ----------------------------------------------------------------------------- directives

    def _directive(self, text: str) -> None:
        if text.startswith((".loc ", ".loc\t")):
            self._location(text)
        elif text.startswith(".reg"):
            self._declare_registers(text)
        elif any(f".{space} " in text for space in _SPACES):
            variable = self._variable(text)
            if variable.space == "shared" and variable.size:
                variable.offset = -(-self.sizes["shared"] // variable.align) * variable.align
                self.sizes["shared"] = variable.offset + variable.size
            elif variable.space == "local" and "#" not in variable.name:
                self._make_local(variable)

    def _location(self, text: str) -> None:
        match = _LOC.match(text)
        if match is None:
            return
        file, line, caller_file, caller_line = match.groups()
        path: str = self.files.get(file, file)
        if line == "0":  # instructions that belong to no line stay with the last one
            return
        caller = None
        if caller_file is not None:
            # The caller's own chain is the one that its line was last seen with.
            key: tuple[str, int] = (self.files.get(caller_file, caller_file), int(caller_line))
            caller = self.inlined.get(key, Location(*key))
            if any(place.file == path and place.line == int(line) for place in caller.chain()):
                caller = Location(*key)
        self.where = Location(path, int(line), caller)
        if caller is not None:
            self.inlined[path, int(line)] = self.where
        else:
            self.inlined.pop((path, int(line)), None)

    def _declare_registers(self, text: str) -> None:
        match = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)$", text, re.DOTALL)
        if match is None:
            raise PTXError(f"not a declaration: {text!r}")
        kind, names = match.groups()
        for name in (n.strip() for n in names.split(",")):
            many = re.match(r"([%$\w]+)<(\d+)>$", name)
            each = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            for one in each:
                self.scopes[-1][one] = Reg(len(self.registers), kind)
                self.registers.append(kind)

    def _variable(self, text: str) -> Variable:
        match = _VARIABLE.match(text)
        words = match["words"].replace(".", "").split() if match else []
        kind = next((word for word in words if word in SIZES), None)
        if match is None or kind is None:
            raise PTXError(f"not a variable: {text[:80]!r}")
        name, space = match["name"], next(word for word in words if word in _SPACES)
        align = int(words[words.index("align") + 1]) if "align" in words else SIZES[kind]
        counts = [int(n or 0) for n in re.findall(r"\[(\d*)\]", match["dims"])]
        size = SIZES[kind] * math.prod(counts)
        variable = Variable(name, space, size, align, data=_initial(match["initial"], kind))
        if space == "param" and self.scopes:
            # Room for the arguments of one call; every call declares its own.
            self.unique += 1
            variable.name = f"{name}#{self.unique}"
            self.scopes[-1][name] = Sym(variable.name)
            self._make_local(variable)
        self.variables[variable.name] = variable
        return variable

    def _make_local(self, variable: Variable) -> None:
        """Let the parameters of a function lie in a thread's own memory."""
        variable.space = "local"
        variable.offset = -(-self.sizes["local"] // variable.align) * variable.align
        self.sizes["local"] = variable.offset + variable.size

    # --------------------------------------------------------------------------- instructions

    def _instruction(self, text: str) -> None:
        guard: Operand = None
        if text.startswith("@"):
            word, _, text = text[1:].partition(" ")
            guard = self._resolve(_operand(word.strip()))
        opcode, *rest = text.split(None, 1)
        op, *mods = opcode.replace("::", "__").split(".")
        operands = _operands(rest[0]) if rest else ()
        self.instructions.append(
            Instruction(
                op,
                tuple(mods),
                tuple(self._resolve(operand) for operand in operands),
                guard,  # type: ignore[arg-type]
                self.where,
            )
        )

    def _resolve(self, operand: Operand) -> Operand:
        """The same with names looked up: a register, or what the innermost scope calls it."""
        match operand:
            case Sym(name):
                for scope in reversed(self.scopes):
                    if name in scope:
                        return scope[name]
                if name.startswith("%"):
                    return Special(name)
            case Mem(base, offset):
                return Mem(self._resolve(base), offset)
            case Vec(items):
                return Vec(tuple(self._resolve(item) for item in items))
            case Pair(first, second):
                return Pair(self._resolve(first), self._resolve(second))
            case Not(inner):
                return Not(self._resolve(inner))
        return operand


def _cluster(header: str) -> int:
    """How many blocks a kernel's clusters have, all of them neighbours in x."""
    match = re.search(r"\.reqnctapercluster\s+([\d,\s]+)", header)
    sizes = [int(size) for size in re.findall(r"\d+", match[1])] if match else [1]
    if any(size != 1 for size in sizes[1:]):
        raise PTXError(f"a cluster of {sizes} blocks: only those in x are known")
    return sizes[0]


def _initial(text: str | None, kind: str) -> bytes:
    """The bytes of an initialiser, ``5`` or ``{1, 2, 3}``."""
    if text is None:
        return b""
    data = b""
    for word in filter(None, re.split(r"[{},\s]+", text)):
        value = _number(word)
        if value is None:
            raise PTXError(f"an address as an initial value: {word}")
        data += (value.value % (1 << (8 * SIZES[kind]))).to_bytes(SIZES[kind], "little")
    return data


@functools.lru_cache(maxsize=65536)
def _operands(text: str) -> tuple[Operand, ...]:
    """Operands separated by the commas that stand in no brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,])+", text)
    return tuple(_operand(part.strip()) for part in parts if part.strip())


@functools.lru_cache(maxsize=65536)
def _operand(text: str) -> Operand:
    if text == "_":
        return None
    if text[0] in "{(":
        return Vec(_operands(text[1:-1]))
    if text[0] == "[":
        return _address(text[1:-1].strip())
    if text[0] == "!":
        return Not(_operand(text[1:].strip()))
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first.strip()), _operand(second.strip()))
    number = _number(text)
    if number is not None:
        return number
    if re.fullmatch(r"[%$\w.]+", text):
        return Sym(text)
    match = re.fullmatch(r"([$\w]+)\s*\+\s*(\d+)", text)  # the address of an array's element
    if match:
        return Mem(Sym(match[1]), int(match[2]))
    raise PTXError(f"not an operand: {text!r}")


def _address(text: str) -> Operand:
    if "," in text:  # a tensor map and coordinates
        return Vec(_operands(text))
    match = re.fullmatch(r"([%$\w.]+)\s*(?:([+-])\s*(-?\w+))?", text)
    if match is None:
        raise PTXError(f"not an address: [{text}]")
    base, sign, offset = match.groups()
    distance = int(offset, 0) if offset else 0
    return Mem(_operand(base), -distance if sign == "-" else distance)


def _number(text: str) -> Imm | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Imm(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Imm(int(text[2:], 16), 64)
    if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        text = text.rstrip("U")
        octal = re.fullmatch(r"-?0[0-7]+", text)
        return Imm(int(text, 8 if octal else 0))
    if re.fullmatch(r"-?\d*\.\d+(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+", text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None
