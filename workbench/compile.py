"""From a kernel's source to something that runs: NVRTC and Numba as compilers, CuPy as launcher.

This is the only module that knows a compiler. `build` makes a cubin from a CUDA C++ template or
from a Numba factory without needing a GPU; `load` brings it onto one; `launch` starts it. Both
languages get the same packed argument buffer (`Signature`), so that a twin cannot differ in how
it is called. Compiled kernels are kept in memory and in one disk cache.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import os
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from workbench import cache

LANGUAGES = ("cuda", "numba")
CACHE_FORMAT = 1
CUDA_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}
INSTALL_HINT = (
    "install one toolchain extra: pip install 'kernel-workbench[cuda13]' (driver 580 or newer), "
    "'kernel-workbench[cuda12]' (driver 525 or newer) or, without a GPU, "
    "'kernel-workbench[simulator]'"
)


class CompileError(RuntimeError):
    """A kernel did not compile; the message holds the compiler's log with our files and lines."""


class ToolchainError(RuntimeError):
    """A compiler, a driver or a GPU is missing; the message says which and how to get it."""


# ------------------------------------------------------------------------------------ signatures

TENSOR_MAP_WORDS = 16  # of eight bytes, opaque

# What a struct passed by value holds, in order; `Acc*` is float* or, for float64, double*.
_STRUCTS = {
    "Strides": ("int64 batch", "int64 head", "int64 row"),
    "Strides4": ("int64 batch", "int64 head", "int64 row", "int64 col"),
    "Shape4": ("int64 batch", "int64 head", "int64 row", "int64 col"),
    "ScoreParams": (
        "double scale",
        "double softcap",
        "int64 window_left",
        "int64 window_right",
        "int64 top_left",
        "int* q_lengths",
        "int* kv_lengths",
        "uint8* mask",
        "Strides4 mask_strides",
        "Acc* bias",
        "Strides4 bias_strides",
    ),
}


class Signature:
    """A kernel's parameters, declared once for both languages.

    Parameters
    ----------
    text : str
        Like ``"T* q, Strides q_strides, int64 batch"``; every leaf of it, structs flattened in
        order, takes eight bytes: a pointer, an int64, a double or a word of a tensor map. Tensor
        maps come first, where they are aligned as they must be.

    Attributes
    ----------
    parameters : tuple of (str, str)
        Type and name of each parameter.
    leaves : tuple of (str, str)
        Type and dotted name of each eight-byte word of the argument buffer.
    """

    def __init__(self, text: str) -> None:
        self.parameters = tuple(_type_and_name(part) for part in text.split(","))
        self.leaves = tuple(leaf for p in self.parameters for leaf in _flatten(*p))
        self.slots = {name: i for i, (_, name) in enumerate(self.leaves)}

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The argument buffer, each word cast to its declared type; pointers start as null."""
        words = bytearray()
        for kind, name in self.leaves:
            if kind.endswith("*") or kind == "word":  # put in when a kernel is launched
                words += struct.pack("<Q", values.get(name, 0))
            elif kind == "double":
                words += struct.pack("<d", values[name])
            else:
                words += struct.pack("<q", values[name])
        return bytes(words)


def _type_and_name(text: str) -> tuple[str, str]:
    kind, _, name = text.strip().rpartition(" ")
    return kind, name


def _flatten(kind: str, name: str) -> Iterator[tuple[str, str]]:
    if kind == "TensorMap":
        yield from (("word", f"{name}.{i}") for i in range(TENSOR_MAP_WORDS))
        return
    if kind not in _STRUCTS:
        yield kind, name
        return
    for part in _STRUCTS[kind]:
        field_kind, field_name = _type_and_name(part)
        yield from _flatten(field_kind, f"{name}.{field_name}")


# -------------------------------------------------------------------------------------- building


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel to compile: a template instance in CUDA C++, or a factory's product in Numba.

    Attributes
    ----------
    stem : str
        File name without its suffix, the same in `cuda_src` and `numba_kernels`.
    name : str
        The template, or the factory.
    constants : tuple of (str, object)
        Template parameters in order; a value is an int or, for a type, a dtype's name.
    signature : Signature
    """

    stem: str
    name: str
    constants: tuple[tuple[str, int | str], ...]
    signature: Signature

    def describe(self) -> str:
        """Like ``attention_naive_fwd<float32, 3>``."""
        return f"{self.name}<{', '.join(str(value) for _, value in self.constants)}>"


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel for one architecture.

    Attributes
    ----------
    registers : int
        Registers a thread.
    stack_bytes : int
        Local memory a thread, spills included.
    static_shared_bytes : int
        Shared memory declared in the kernel, a block.
    arguments_at : int
        Where the first argument lies in the argument buffer, in bytes: not at its beginning if the
        kernel has tensor maps, which want addresses that are multiples of 64.
    """

    code: bytes
    symbol: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    arguments_at: int


_memory: dict[tuple[str, Entry, str], Binary] = {}
_build_lock = threading.RLock()


def build(language: str, entry: Entry, arch: str) -> Binary:
    """Compile `entry` to a cubin for `arch`, or take it from a cache; needs no GPU.

    Parameters
    ----------
    language : {"cuda", "numba"}
    entry : Entry
    arch : str
        Like ``"sm_90"``.

    Raises
    ------
    CompileError
        With the compiler's log.
    ToolchainError
        If the compiler is not installed.
    """
    key = (language, entry, arch)
    binary = _memory.get(key)
    if binary is None:
        # One build at a time: Numba's compiler keeps global state.
        with _build_lock:
            binary = _memory.get(key)
            if binary is None:
                binary = _build_or_read(language, entry, arch)
                _memory[key] = binary
    return binary


def _build_or_read(language: str, entry: Entry, arch: str) -> Binary:
    code, symbol = _compile_or_read(language, entry, arch, ptx=False)
    return Binary(code, symbol, *resources(code, symbol))


def build_ptx(language: str, entry: Entry, arch: str) -> tuple[str, str]:
    """PTX of `entry` for `arch`, with source lines in it, and its symbol: what the simulator runs.

    Parameters, errors and cache are those of `build`; it needs no GPU either.
    """
    with _build_lock:
        code, symbol = _compile_or_read(language, entry, arch, ptx=True)
    return code.rstrip(b"\0").decode(), symbol


def _compile_or_read(language: str, entry: Entry, arch: str, *, ptx: bool) -> tuple[bytes, str]:
    name = _cache_name(language, entry, arch, ptx=ptx)
    cached = cache.read(name)
    if cached is None:
        compiler = _compile_cuda if language == "cuda" else _compile_numba
        cached = compiler(entry, arch, ptx)
        cache.write(name, *cached)
    return cached


def source_path(language: str, stem: str) -> Path:
    """Where the source of a kernel lies, installed or in a checkout."""
    package, suffix = ("cuda_src", ".cu") if language == "cuda" else ("numba_kernels", ".py")
    return Path(str(importlib.resources.files(package))) / f"{stem}{suffix}"


def _shared_sources(language: str) -> list[Path]:
    """The files that any kernel of a language may include."""
    folder = source_path(language, "common").parent
    if language == "cuda":
        return sorted(folder.glob("*.cuh"))
    return sorted(p for p in folder.glob("*.py") if not p.name.startswith(("attention", "vector")))


def _target(arch: str) -> str:
    """The compiler's name of `arch`: from sm_90 on with the features of exactly that chip."""
    number = int(arch.removeprefix("sm_"))
    return f"sm_{number}a" if number >= 90 else f"sm_{number}"


def _nvrtc() -> ModuleType:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ToolchainError(f"NVRTC, the CUDA C++ compiler, is missing: {INSTALL_HINT}") from error
    return nvrtc


@functools.cache
def _cuda_include() -> str:
    """The folder of cuda_fp16.h."""
    from cuda.pathfinder import locate_nvidia_header_directory

    located = locate_nvidia_header_directory("cudart")
    candidates = [
        located.abs_path if located else None,
        os.environ.get("CUDA_PATH") and os.environ["CUDA_PATH"] + "/include",
        "/usr/local/cuda/include",
    ]
    for folder in candidates:
        if folder and (Path(folder) / "cuda_fp16.h").is_file():
            return str(folder)
    raise ToolchainError(f"The CUDA headers (cuda_fp16.h) are missing: {INSTALL_HINT}")


def _compile_cuda(entry: Entry, arch: str, ptx: bool = False) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    path = source_path("cuda", entry.stem)
    values = (CUDA_TYPES.get(str(value), str(value)) for _, value in entry.constants)
    expression = f"{entry.name}<{', '.join(values)}>".encode()
    # A virtual architecture stops NVRTC before it assembles.
    target = _target(arch).replace("sm_", "compute_") if ptx else _target(arch)
    options = [
        f"--gpu-architecture={target}",
        "--std=c++17",
        "-lineinfo",
        f"-I{path.parent}",
        f"-I{_cuda_include()}",
    ]

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC: {result[0].name} for {entry.describe()}, {arch}")
        return result[1] if len(result) > 1 else None

    def read(size: Any, fill: Any) -> bytes:
        buffer = bytes(check(size(program)) + 1)  # NVRTC writes into it: it must be nobody else's
        check(fill(program, buffer))
        return buffer[:-1]

    program = check(nvrtc.nvrtcCreateProgram(path.read_bytes(), str(path).encode(), 0, [], []))
    try:
        check(nvrtc.nvrtcAddNameExpression(program, expression))
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            text = log.rstrip(b"\0\n").decode(errors="replace")
            raise CompileError(f"{entry.describe()} does not compile for {arch}:\n{text}")
        symbol = check(nvrtc.nvrtcGetLoweredName(program, expression)).decode()
        if ptx:
            return read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), symbol
        return read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), symbol
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _numba_cuda() -> ModuleType:
    import numpy as np

    if not hasattr(np, "row_stack"):  # numba-cuda 0.30 looks it up; NumPy 2.5 has dropped it
        vars(np)["row_stack"] = np.vstack
    try:
        importlib.metadata.version("numba-cuda")
        with warnings.catch_warnings():
            # With NumPy 2.5 the import meets deprecations, which are no business of the user's.
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module("numba.cuda")
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        raise ToolchainError(f"numba-cuda is missing: {INSTALL_HINT}") from error


def _numba_type(kind: str, dtype: str) -> Any:
    """The Numba type of a parameter; structs become named tuples, which Numba flattens."""
    types = importlib.import_module("numba.cuda.types")
    acc = "float64" if dtype == "float64" else "float32"
    scalars = {
        "int64": types.int64,
        "double": types.float64,
        "int": types.int32,
        "uint8": types.uint8,
        "T": getattr(types, dtype),
        "Acc": getattr(types, acc),
    }
    if kind.endswith("*"):
        return types.CPointer(scalars[kind[:-1]])
    if kind in scalars:
        return scalars[kind]
    if kind == "TensorMap":
        return importlib.import_module("numba_kernels.ptx_sm90").TensorMap
    structs = importlib.import_module(
        "numba_kernels.scores" if kind == "ScoreParams" else "numba_kernels.common"
    )
    fields = [_numba_type(_type_and_name(part)[0], dtype) for part in _STRUCTS[kind]]
    return types.NamedTuple(fields, getattr(structs, kind))


def _compile_numba(entry: Entry, arch: str, ptx: bool = False) -> tuple[bytes, str]:
    cuda = _numba_cuda()
    types = cuda.types
    compiler = importlib.import_module("numba.cuda.compiler")
    nvvm = importlib.import_module("numba.cuda.cudadrv.nvvm")
    factory = getattr(importlib.import_module(f"numba_kernels.{entry.stem}"), entry.name)
    dtype = next((str(v) for _, v in entry.constants if v in CUDA_TYPES), "float32")
    constants = {
        name: getattr(types, str(value)) if value in CUDA_TYPES else value
        for name, value in entry.constants
    }
    number = int(arch.removeprefix("sm_"))
    cc = (number // 10, number % 10)

    def link(lto: bool) -> tuple[bytes, str]:
        kernel = factory(**constants)
        options = kernel.targetoptions
        signature = tuple(_numba_type(kind, dtype) for kind, _ in entry.signature.parameters)
        fastmath = options.get("fastmath", False)
        compiled = compiler.compile_cuda(
            kernel.py_func,
            types.void,
            signature,
            lineinfo=True,
            fastmath=fastmath,
            cc=cc,
            lto=lto,
            nvvm_options={"fastmath": bool(fastmath), "opt": 3},
        )
        library = compiled.library
        function = library.get_function(compiled.fndesc.llvm_func_name)
        library._entry_name = function.name
        for module in library.modules:
            _forget_variables(module)
        compiler.kernel_fixup(function, False)
        nvvm.set_launch_bounds(function, options.get("launch_bounds"))
        kinds = [kind for kind, _ in entry.signature.parameters]
        _pass_by_value(function, kinds.count("TensorMap"))
        target = (*cc, "a") if number >= 90 else cc
        if ptx:
            return library.get_lto_ptx(cc=target).encode(), function.name
        return bytes(library.get_cubin(cc=target).code), function.name

    try:
        with _pretend_device(cc), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return link(lto=True)
            except Exception as error:
                # Optimising at link time, nvJitLink 13.5 loses a label of a kernel now and then
                # ("Unknown symbol $L__BB0_34"); the same kernel links without.
                if ptx or "jitlink" not in f"{type(error)} {error}".lower():
                    raise
                return link(lto=False)
    except ToolchainError:
        raise
    except Exception as error:
        path = source_path("numba", entry.stem)
        place, *callers = _numba_places(error, path.parent) or [str(path)]
        raise CompileError(
            f"{entry.describe()} does not compile for {arch}:\n"
            + "".join(f"called from {caller}\n" for caller in callers[::-1])
            + f"{place}: {type(error).__name__}: {error}"
        ) from error


def _forget_variables(module: Any) -> None:
    """Leave of what Numba tells a debugger the source lines alone.

    NVVM 13.0 makes symbols of some variables that the assembler then refuses ("Symbol name with
    unsupported characters").
    """

    def names_a_variable(instruction: Any) -> bool:
        called = getattr(instruction, "callee", None)  # inline PTX has no name
        return getattr(called, "name", "").startswith("llvm.dbg.")

    for function in module.functions:
        for block in function.blocks:
            block.instructions = [i for i in block.instructions if not names_a_variable(i)]


def _pass_by_value(function: Any, tensor_maps: int) -> None:
    """Make a Numba kernel's first parameters, pointers to it, what C++ calls ``__grid_constant__``.

    That is a byval pointer in NVVM IR, and a note that the kernel does not write to it: without, it
    would get a copy in local memory, which the copy engine cannot read.
    """
    if not tensor_maps:
        return
    ir = importlib.import_module("llvmlite.ir")

    class Attributes(ir.values.ArgumentAttributes):  # type: ignore[misc, name-defined]
        _known: ClassVar = {"byval": False}  # NVVM's dialect says it without the type

    for argument in function.args[:tensor_maps]:
        argument.attributes = Attributes(["byval"])
        argument.attributes.align = 64
    module = function.module
    numbers = module.add_metadata([ir.IntType(32)(i + 1) for i in range(tensor_maps)])
    name = ir.MetaDataString(module, "grid_constant")
    note = module.add_metadata((function, name, numbers))
    module.get_named_metadata("nvvm.annotations").add(note)


def _numba_places(error: Exception, folder: Path) -> list[str]:
    """The lines of our files that Numba was typing, innermost first: its message may not say."""
    places: dict[str, None] = {}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in ("inst", "self"):
            location = getattr(frame.f_locals.get(name), "loc", None)
            if location is not None and Path(location.filename).parent == folder:
                places[f"{location.filename}({location.line})"] = None
    return list(places)


@contextmanager
def _pretend_device(cc: tuple[int, int]) -> Iterator[None]:
    """Let Numba compile device functions without a GPU: it asks the driver for its capability."""
    modules = [
        importlib.import_module(name) for name in ("numba.cuda.dispatcher", "numba.cuda.compiler")
    ]
    patched = [m for m in modules if hasattr(m, "get_current_device")]
    saved = [m.get_current_device for m in patched]
    device = SimpleNamespace(compute_capability=cc, id=0)
    for module in patched:
        module.get_current_device = lambda: device  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, function in zip(patched, saved, strict=True):
            module.get_current_device = function  # type: ignore[attr-defined]


_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_EIATTR_FRAME_SIZE, _EIATTR_KPARAM_INFO, _EIATTR_REGCOUNT = 0x11, 0x17, 0x2F


def resources(code: bytes, symbol: str) -> tuple[int, int, int, int]:
    """The last four fields of a `Binary`, read from a cubin's ELF.

    The notes in ``.nv.info`` are (format, attribute, size) headers; of the attributes wanted, two
    hold a symbol's index and a value, and the third, in the kernel's own notes, the number of a
    parameter and its offset.
    """
    (offset,) = struct.unpack_from("<Q", code, 40)
    size, count, names_at = struct.unpack_from("<HHH", code, 58)
    sections = [_ELF_SECTION.unpack_from(code, offset + i * size) for i in range(count)]

    def text(base: int) -> str:
        return code[base : code.index(b"\0", base)].decode()

    named = {text(sections[names_at][4] + s[0]): s for s in sections}
    symbols = next(s for s in sections if s[1] == 2)
    strings = sections[symbols[6]][4]

    def notes(section: str) -> Iterator[tuple[int, bytes]]:
        at, length = named[section][4:6]
        end = at + length
        while at < end:
            kind, attribute, value = struct.unpack_from("<BBH", code, at)
            at += 4
            if kind == 4:  # else the value is all there is
                yield attribute, code[at : at + value]
                at += value

    found = {_EIATTR_FRAME_SIZE: 0, _EIATTR_REGCOUNT: 0}
    for attribute, note in notes(".nv.info"):
        if attribute in found and len(note) == 8:
            index, number = struct.unpack("<II", note)
            (name_at,) = struct.unpack_from("<I", code, symbols[4] + index * 24)
            if text(strings + name_at) == symbol:
                found[attribute] = number
    arguments_at = 0
    for attribute, note in notes(f".nv.info.{symbol}"):
        if attribute == _EIATTR_KPARAM_INFO:
            _, parameter, parameter_at = struct.unpack_from("<IHH", note)
            if parameter == 0:
                arguments_at = parameter_at
    shared = named.get(f".nv.shared.{symbol}")
    static = shared[5] if shared else 0
    return found[_EIATTR_REGCOUNT], found[_EIATTR_FRAME_SIZE], static, arguments_at


@functools.cache
def compiler_version(language: str) -> str:
    """Everything about the installed compiler that can change its output."""
    if language == "cuda":
        _, major, minor = _nvrtc().nvrtcVersion()
        return f"nvrtc {major}.{minor}"
    _numba_cuda()
    packages = ("numba", "numba-cuda", "llvmlite", "cuda-core")
    parts = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    for name in ("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def _cache_name(language: str, entry: Entry, arch: str, *, ptx: bool = False) -> str:
    parts = [
        str(CACHE_FORMAT),
        language,
        entry.describe(),
        _target(arch),
        "ptx" if ptx else "cubin",
        compiler_version(language),
    ]
    parts += [f"{kind} {name}" for kind, name in entry.signature.leaves]
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(Path(__file__).read_bytes())  # the options given to the compilers
    for path in (source_path(language, entry.stem), *_shared_sources(language)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


# ----------------------------------------------------------------------------- loading, launching

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@functools.cache
def gpu_missing() -> str | None:
    """None where kernels can run on a GPU; otherwise a sentence saying what is missing."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"no NVIDIA driver is installed ({DRIVER} is missing)"
    try:
        import cupy
    except ImportError:
        return f"CuPy is missing: {INSTALL_HINT}"
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return None
        return "the NVIDIA driver finds no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the NVIDIA driver cannot be used: {error}"


def require_gpu(backend: str) -> ModuleType:
    """CuPy, or an error saying why `backend` cannot run here."""
    missing = gpu_missing()
    if missing is not None:
        raise ToolchainError(
            f"backend {backend!r} needs a GPU, but {missing}; `workbench doctor` tells more"
        )
    import cupy

    return cupy  # type: ignore[no-any-return]


@functools.cache
def device_arch(device: int) -> str:
    """Architecture of a GPU, like ``"sm_90"``."""
    import cupy

    return f"sm_{cupy.cuda.Device(device).compute_capability}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel on a GPU; `module` keeps it there."""

    function: int
    module: Any
    arguments_at: int


@functools.cache
def load(language: str, entry: Entry, device: int, shared_memory: int) -> Loaded:
    """Bring a kernel onto `device`, which must be the current one, with its shared memory set."""
    import cupy

    binary = build(language, entry, device_arch(device))
    module = cupy.cuda.function.Module()
    module.load(binary.code)
    function = module.get_function(binary.symbol)
    if shared_memory > 48 * 1024:  # what every kernel may have unasked
        driver = cupy.cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, shared_memory)
    return Loaded(function.ptr, module, binary.arguments_at)


# A launch's packet is the list that cuLaunchKernelEx takes as `extra`, the size of the arguments,
# and the arguments, in one piece of memory: a copy of it, some addresses, and it is ready.
PACKET_HEADER = 6  # words before the first argument
_SIZE_WORD = 5
_PARAM_END, _PARAM_BUFFER_POINTER, _PARAM_BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*


def packet(arguments: bytes) -> bytes:
    """A launch packet around packed arguments; its own addresses are put in by `prepare`."""
    header = (_PARAM_BUFFER_POINTER, 0, _PARAM_BUFFER_SIZE, 0, _PARAM_END, len(arguments))
    return struct.pack(f"<{PACKET_HEADER}Q", *header) + arguments


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: programmatic stream serialization, allowed."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, flat."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint32) for what in ("grid", "block") for axis in "xyz"),
        ("shared_memory", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


_SERIALIZATION_ALLOWED = _LaunchAttribute(id=6, value=(1,))
_ATTRIBUTES = ctypes.addressof(_SERIALIZATION_ALLOWED)


@functools.cache
def _launch_kernel_ex() -> Any:
    return ctypes.CDLL(DRIVER).cuLaunchKernelEx


def prepare(
    kernel: Loaded,
    grid: int,
    block: int,
    shared_memory: int,
    stream: int,
    words: Any,
    dependent: bool = False,
) -> Callable[[], int]:
    """A kernel's launch on a stream, ready to be carried out as often as one likes.

    Parameters
    ----------
    words : ctypes array of c_uint64
        A copy of a `packet` with the arrays' addresses in it, not to be changed any more.
    dependent : bool
        Let it start before the launch in front of it has ended: the kernel waits for that itself.
        CUDA Programming Guide, "Programmatic Dependent Launch"; from sm_90 on.

    Returns
    -------
    callable
        Starts the kernel; threads may share it. It returns the driver's CUresult, which may be that
        of an earlier launch.
    """
    base = ctypes.addressof(words)
    words[1] = base + 8 * PACKET_HEADER
    words[3] = base + 8 * _SIZE_WORD
    shape = (grid, 1, 1, block, 1, 1, shared_memory)
    config = ctypes.byref(_LaunchConfig(*shape, stream, _ATTRIBUTES, int(dependent)))
    function = ctypes.c_void_p(kernel.function)
    return functools.partial(_launch_kernel_ex(), config, function, None, ctypes.byref(words))
