"""From source to cubin: signatures, the cache and its key, errors, concurrency and resources."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import struct
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from building import copy_sources, cuda_program, languages, needs, redirect

from workbench import cache, launchers
from workbench import compile as compiler
from workbench.compile import CompileError, Entry, Signature, ToolchainError
from workbench.problem import VectorProblem

ARCH = "sm_80"


def entry(dtype: str = "float32") -> Entry:
    """The smallest kernel that there is."""
    strides = tuple((name, (1,)) for name in ("a", "b", "out"))
    problem = VectorProblem("vector_add", dtype, (100,), strides)
    return launchers.vector_add(problem, ARCH).launches[0].entry


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk cache of one test's own, and nothing in memory."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "_memory", {})
    return folder


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile_cuda", fail)
    monkeypatch.setattr(compiler, "_compile_numba", fail)


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one with every compilation."""
    done: list[str] = []
    for language in compiler.LANGUAGES:
        original = getattr(compiler, f"_compile_{language}")

        def counted(e: Entry, arch: str, ptx: bool, original: Any = original) -> Any:
            done.append(e.describe())
            return original(e, arch, ptx)

        monkeypatch.setattr(compiler, f"_compile_{language}", counted)
    return done


# ---------------------------------------------------------------------------------- signatures


def test_structs_are_flattened_in_order() -> None:
    signature = Signature("T* q, Strides q_strides, int64 batch, ScoreParams score")
    assert signature.parameters == (
        ("T*", "q"), ("Strides", "q_strides"), ("int64", "batch"), ("ScoreParams", "score"),
    )  # fmt: skip
    assert [name for _, name in signature.leaves] == [
        "q", "q_strides.batch", "q_strides.head", "q_strides.row", "batch",
        "score.scale", "score.softcap", "score.window_left", "score.window_right",
        "score.top_left", "score.q_lengths", "score.kv_lengths",
        "score.mask", *(f"score.mask_strides.{axis}" for axis in ("batch", "head", "row", "col")),
        "score.bias", *(f"score.bias_strides.{axis}" for axis in ("batch", "head", "row", "col")),
    ]  # fmt: skip


def test_every_value_is_cast_to_its_declared_type() -> None:
    signature = Signature("T* q, int64 n, double x, Strides s, uint8* mask")
    values = {"n": True, "x": 3, "s.batch": -1, "s.head": 2**40, "s.row": 0, "mask": 2**63}
    packed = signature.pack(values)
    assert struct.unpack("<QqdqqqQ", packed) == (0, 1, 3.0, -1, 2**40, 0, 2**63)


def test_a_value_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(struct.error):
        Signature("int64 n").pack({"n": 2**63})
    with pytest.raises(struct.error):
        Signature("int64 n").pack({"n": 1.5})
    with pytest.raises(KeyError, match="scale"):
        Signature("double scale").pack({})


def test_entries_describe_themselves() -> None:
    assert entry("bfloat16").describe() == "vector_add<bfloat16>"


@pytest.mark.parametrize(
    ("arch", "target"),
    [("sm_75", "sm_75"), ("sm_80", "sm_80"), ("sm_90", "sm_90a"), ("sm_120", "sm_120a")],
)
def test_hopper_and_later_get_all_of_their_features(arch: str, target: str) -> None:
    assert compiler._target(arch) == target


# --------------------------------------------------------------------------------------- cache


@languages
def test_a_second_build_is_the_same_object(language: str, empty_cache: Path) -> None:
    first = compiler.build(language, entry(), ARCH)
    assert compiler.build(language, entry(), ARCH) is first
    assert first.code[:4] == b"\x7fELF"
    assert "vector_add" in first.symbol or "kernel" in first.symbol
    assert len(list(empty_cache.iterdir())) == 1


@pytest.mark.usefixtures("empty_cache")
@languages
def test_another_process_reads_from_disk(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.build(language, entry(), ARCH)
    compiler._memory.clear()
    no_compiler(monkeypatch)
    second = compiler.build(language, entry(), ARCH)
    assert second is not first
    assert second == first


@pytest.mark.usefixtures("empty_cache")
@languages
def test_what_differs_is_compiled_again(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.build(language, entry(), ARCH)
    done = count_compilations(monkeypatch)
    compiler.build(language, entry("float64"), ARCH)
    compiler.build(language, entry(), "sm_90")
    assert done == ["vector_add<float64>", "vector_add<float32>"]


@languages
def test_a_damaged_entry_is_compiled_again(
    language: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.build(language, entry(), ARCH)
    (path,) = empty_cache.iterdir()
    data = path.read_bytes()
    done = count_compilations(monkeypatch)
    for damaged in (b"", data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 255])):
        path.write_bytes(damaged)
        compiler._memory.clear()
        assert compiler.build(language, entry(), ARCH).registers == first.registers
    assert len(done) == 3
    compiler._memory.clear()
    no_compiler(monkeypatch)
    compiler.build(language, entry(), ARCH)


@languages
def test_a_cache_that_cannot_be_written_only_warns(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiler, "_memory", {})
    with pytest.warns(RuntimeWarning, match="WORKBENCH_CACHE_DIR"):
        binary = compiler.build(language, entry(), ARCH)
    assert binary.registers > 0
    assert compiler.build(language, entry(), ARCH) is binary


# ----------------------------------------------------------------------------------- cache key


@languages
def test_the_key_holds_every_source_that_takes_part(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_sources(language, tmp_path)
    redirect(monkeypatch, language, folder)
    keys = {compiler._cache_name(language, entry(), ARCH)}
    suffix = ".cuh" if language == "cuda" else ".py"
    shared = [p for p in folder.glob(f"*{suffix}") if p.stem in ("common", "scores")]
    own = compiler.source_path(language, "vector_add")
    assert len(shared) == 2
    assert own.is_file()
    for path in (*shared, own):
        path.write_bytes(path.read_bytes() + b"\n")
        keys.add(compiler._cache_name(language, entry(), ARCH))
    assert len(keys) == 4
    other = compiler.source_path(language, "attention_delta")
    other.write_bytes(other.read_bytes() + b"\n")
    assert compiler._cache_name(language, entry(), ARCH) in keys


def test_every_included_file_is_a_shared_source() -> None:
    """Or an edit of it would go unnoticed."""
    patterns = {"cuda": r'#include "(.+)"', "numba": r"^(?:from \.|import )(\w+) import"}
    for language, pattern in patterns.items():
        shared = {path.name for path in compiler._shared_sources(language)}
        folder = compiler.source_path(language, "common").parent
        included = set()
        for path in folder.glob("*.cu*" if language == "cuda" else "*.py"):
            for name in re.findall(pattern, path.read_text(), re.MULTILINE):
                included.add(name if language == "cuda" else f"{name}.py")
        assert "common.cuh" in included or "common.py" in included
        assert included <= shared


@languages
def test_the_key_holds_what_is_no_source(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(e: Entry, arch: str = ARCH) -> str:
        return compiler._cache_name(language, e, arch)

    plain = entry()
    keys = [key(plain), key(entry("float16")), key(plain, "sm_75"), key(plain, "sm_90")]
    other = Entry(plain.stem, plain.name, plain.constants, Signature("T* a, int64 b"))
    keys.append(key(other))
    monkeypatch.setattr(compiler, "compiler_version", lambda _: "another")
    keys.append(key(plain))
    monkeypatch.setattr(compiler, "CACHE_FORMAT", -1)
    keys.append(key(plain))
    assert len(set(keys)) == len(keys)


@languages
def test_ptx_has_source_lines_and_its_own_place_in_the_cache(
    language: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, symbol = compiler.build_ptx(language, entry(), "sm_80")
    source = compiler.source_path(language, "vector_add")
    assert f".entry {symbol}(" in text
    assert re.search(r"^\t\.loc\t1 \d+ ", text, re.MULTILINE)
    assert f'"{source}"' in text
    assert compiler.build(language, entry(), "sm_80").code.startswith(b"\x7fELF")
    assert len(list(empty_cache.iterdir())) == 2
    no_compiler(monkeypatch)
    assert compiler.build_ptx(language, entry(), "sm_80") == (text, symbol)


@needs("numba")
@pytest.mark.usefixtures("empty_cache")
def test_numba_says_nothing_of_variables_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have names that an assembler refuses, and only source lines are wanted."""
    nvvm = importlib.import_module("numba.cuda.cudadrv.nvvm")
    seen = []
    original = nvvm.compile_ir
    monkeypatch.setattr(nvvm, "compile_ir", lambda ir, **o: (seen.append(ir), original(ir, **o))[1])
    compiler.build("numba", entry(), "sm_80")
    text = "".join(module for ir in seen for module in ([ir] if isinstance(ir, str) else ir))
    assert "!dbg" in text
    assert not re.search(r"call .*llvm\.dbg\.", text)


def test_the_languages_do_not_share_entries() -> None:
    for language in compiler.LANGUAGES:
        try:
            compiler.compiler_version(language)
        except ToolchainError as error:
            pytest.skip(str(error))
    assert len({compiler._cache_name(x, entry(), ARCH) for x in compiler.LANGUAGES}) == 2


# -------------------------------------------------------------------------------------- errors


def break_line(path: Path, marker: str, replacement: str) -> int:
    """Replace a line of a file; its number."""
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if marker in line)
    lines[number] = replacement
    path.write_text("\n".join(lines) + "\n")
    return number + 1


@needs("cuda")
@pytest.mark.parametrize(
    ("name", "marker", "replacement", "words"),
    [
        ("vector_add.cu", "int64 i =", "  int64 i = no_such_thing;", "no_such_thing"),
        ("common.cuh", "return T(x);", "  return T(x) + nothing_of_the_kind;", "nothing_of"),
    ],
)
def test_nvrtc_errors_name_our_file_and_line(
    name: str, marker: str, replacement: str, words: str, tmp_path: Path, empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = copy_sources("cuda", tmp_path)
    redirect(monkeypatch, "cuda", folder)
    line = break_line(folder / name, marker, replacement)
    with pytest.raises(CompileError) as caught:
        compiler.build("cuda", entry(), ARCH)
    message = str(caught.value)
    assert f"{folder / name}({line}): error" in message
    assert words in message
    assert f"vector_add<float32> does not compile for {ARCH}" in message
    assert not empty_cache.exists(), "an error was cached"


def load_as(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a file as the module `name`, for the time of a test."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


@needs("numba")
@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        ("out[i] = no_such_thing(a[i])", "no_such_thing"),  # a name
        ("out[i] = a[i].no_such_thing", "no_such_thing"),  # an attribute
        ("out[i] = cuda.shfl_xor_sync(1, a, 1)", "shfl_xor_sync"),  # a type, in Numba's own code
    ],
)
def test_numba_errors_name_our_file_and_line(
    replacement: str, words: str, tmp_path: Path, empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = copy_sources("numba", tmp_path)
    redirect(monkeypatch, "numba", folder)
    path = folder / "vector_add.py"
    line = break_line(path, "out[i] = from_acc", " " * 12 + replacement)
    load_as("numba_kernels.vector_add", path, monkeypatch)
    with pytest.raises(CompileError) as caught:
        compiler.build("numba", entry(), ARCH)
    message = str(caught.value)
    assert f"{path}({line})" in message or f'vector_add.py", line {line}' in message
    assert words in message
    assert f"vector_add<float32> does not compile for {ARCH}" in message
    assert not empty_cache.exists(), "an error was cached"


@needs("numba")
def test_numba_errors_in_a_helper_name_its_caller_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_sources("numba", tmp_path)
    redirect(monkeypatch, "numba", folder)
    path = folder / "vector_add.py"
    text = path.read_text()
    helper = (
        "@cuda.jit(device=True)\ndef helper(x):\n    return cuda.shfl_xor_sync(1, x, 1)\n\n\n"
        "def vector_add("
    )
    path.write_text(text.replace("def vector_add(", helper))
    inner = next(i for i, x in enumerate(path.read_text().splitlines()) if "shfl_xor" in x) + 1
    outer = break_line(path, "out[i] = from_acc", " " * 12 + "out[i] = helper(a)")
    load_as("numba_kernels.vector_add", path, monkeypatch)
    with pytest.raises(CompileError) as caught:
        compiler._compile_numba(entry(), ARCH)
    message = str(caught.value)
    assert f"called from {path}({outer})\n{path}({inner}): " in message


@pytest.fixture
def no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that a compiler was found."""
    monkeypatch.setattr(compiler, "compiler_version", compiler.compiler_version.__wrapped__)
    monkeypatch.setattr(compiler, "_cuda_include", compiler._cuda_include.__wrapped__)


def hint(message: str) -> bool:
    return all(f"kernel-workbench[{x}]" in message for x in ("cuda13", "cuda12", "simulator"))


@pytest.mark.usefixtures("empty_cache", "no_versions")
def test_nvrtc_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ToolchainError, match="NVRTC, the CUDA C\\+\\+ compiler, is missing") as e:
        compiler.build("cuda", entry(), ARCH)
    assert hint(str(e.value))


@needs("cuda")
@pytest.mark.usefixtures("empty_cache", "no_versions")
def test_the_library_of_nvrtc_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def fail() -> Any:
        raise RuntimeError("libnvrtc.so.13 cannot be loaded")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    with pytest.raises(ToolchainError, match="NVRTC"):
        compiler.build("cuda", entry(), ARCH)


@needs("cuda")
@pytest.mark.usefixtures("empty_cache", "no_versions")
def test_headers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(type(Path())):
        def is_file(self) -> bool:
            return False

    monkeypatch.setattr(compiler, "Path", Nothing)
    with pytest.raises(ToolchainError, match=r"cuda_fp16\.h") as caught:
        compiler._cuda_include()
    assert hint(str(caught.value))


@pytest.mark.usefixtures("empty_cache", "no_versions")
def test_numba_cuda_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ToolchainError, match="numba-cuda is missing") as caught:
        compiler.build("numba", entry(), ARCH)
    assert hint(str(caught.value))


@pytest.mark.parametrize(
    ("library", "count", "words"),
    [
        ("libmissing.so.1", None, "no NVIDIA driver is installed"),
        (None, "no cupy", "CuPy is missing"),
        (None, 0, "finds no GPU"),
        (None, "error", "the NVIDIA driver cannot be used: too old"),
    ],
)
def test_what_is_missing_of_a_gpu(
    library: str | None, count: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Error(Exception):
        pass

    def devices() -> int:
        if count == "error":
            raise Error("too old")
        return count

    class Runtime:
        CUDARuntimeError = Error
        getDeviceCount = staticmethod(devices)  # noqa: N815 - CuPy's name

    class Cupy:
        class cuda:  # noqa: N801 - CuPy's name
            runtime = Runtime

    def load(name: str) -> Any:
        if library is not None:
            raise OSError(name)

    monkeypatch.setattr(compiler.ctypes, "CDLL", load)
    monkeypatch.setitem(sys.modules, "cupy", None if count == "no cupy" else Cupy)
    message = compiler.gpu_missing.__wrapped__()
    assert words in message
    monkeypatch.setattr(compiler, "gpu_missing", lambda: message)
    with pytest.raises(ToolchainError, match="backend 'numba' needs a GPU"):
        compiler.require_gpu("numba")


# --------------------------------------------------------------------------------- concurrency


@pytest.mark.usefixtures("empty_cache")
@languages
def test_threads_share_one_compilation(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = count_compilations(monkeypatch)
    start = threading.Barrier(4)
    built = []

    def work() -> None:
        start.wait()
        built.append(compiler.build(language, entry(), ARCH))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1
    assert len({id(x) for x in built}) == 1


BUILDER = """
import sys
from workbench import compile as compiler
from workbench.launchers import VECTOR_ADD
entry = compiler.Entry("vector_add", "vector_add", (("T", "float32"),), VECTOR_ADD)
print(compiler.build(sys.argv[1], entry, "sm_80").registers)
"""


@languages
def test_processes_share_one_cache(language: str, empty_cache: Path) -> None:
    root = Path(compiler.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, language],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [builder.communicate(timeout=120)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(set(answers)) == 1
    assert int(answers[0]) > 0
    (path,) = empty_cache.iterdir()
    assert path.suffix == cache.SUFFIX


# ----------------------------------------------------------------------------------- resources

PROBE = """#include "common.cuh"
template <typename T, int N>
__global__ void probe(T* a, int64 n) {
  __shared__ T tile[N];
  T local[64];
  for (int i = 0; i < 64; ++i) local[i] = a[i];
  for (int64 i = 0; i < n; ++i) local[int(a[i]) & 63] += a[i + 1];
  tile[threadIdx.x % N] = local[int(a[n]) & 63];
  __syncthreads();
  a[threadIdx.x] = tile[(threadIdx.x + 1) % N];
}
"""


@pytest.mark.usefixtures("empty_cache")
@needs("cuda")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_resources_of_a_kernel_that_has_them_all(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_sources("cuda", tmp_path)
    redirect(monkeypatch, "cuda", folder)
    (folder / "probe.cu").write_text(PROBE)
    probe = Entry("probe", "probe", (("T", "float32"), ("N", 256)), Signature("T* a, int64 n"))
    binary = compiler.build("cuda", probe, arch)
    assert 8 < binary.registers < 64
    assert binary.stack_bytes == 256
    reserved = 1024 if int(arch[3:]) >= 90 else 0  # of every block, by the system
    assert binary.static_shared_bytes == 1024 + reserved
    compare_with_cuobjdump(binary, tmp_path)


def compare_with_cuobjdump(binary: compiler.Binary, folder: Path) -> None:
    program = cuda_program("cuobjdump")
    if program is None:
        pytest.skip("cuobjdump is not installed")
    path = folder / "kernel.cubin"
    path.write_bytes(binary.code)
    report = subprocess.run(
        [program, "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    after = report[report.index(f"Function {binary.symbol}:") :]
    found = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", after.split("Function ")[1]))
    assert {name: int(x) for name, x in found.items()} == {
        "REG": binary.registers,
        "STACK": binary.stack_bytes,
        "SHARED": binary.static_shared_bytes,
    }


@languages
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_resources_are_those_that_cuobjdump_reads(language: str, arch: str, tmp_path: Path) -> None:
    compare_with_cuobjdump(compiler.build(language, entry("float16"), arch), tmp_path)


# ---------------------------------------------------------------------------------- NumPy 2.5


@needs("numba")
def test_numba_cuda_finds_what_numpy_has_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    if hasattr(np, "row_stack"):
        monkeypatch.delattr(np, "row_stack")
    monkeypatch.setattr(np, "__getattr__", missing_attribute)
    compiler._numba_cuda()
    assert vars(np)["row_stack"] is np.vstack


def missing_attribute(name: str) -> Any:
    raise AttributeError(name)


@needs("numba")
@pytest.mark.usefixtures("empty_cache")
def test_what_the_linker_cannot_optimise_is_linked_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nvJitLink 13.5 fails on some kernels when it optimises at link time, and only then."""
    compiler._numba_cuda()
    from numba.cuda.codegen import CUDACodeLibrary

    failure = type("nvJitLinkError", (Exception,), {})
    original = CUDACodeLibrary.get_cubin
    tried = []

    def get_cubin(self: Any, cc: Any = None) -> Any:
        tried.append(self._lto)
        if self._lto:
            raise failure("ERROR_PTX_COMPILE: Unknown symbol '$L__BB0_34'")
        return original(self, cc=cc)

    monkeypatch.setattr(CUDACodeLibrary, "get_cubin", get_cubin)
    assert compiler.build("numba", entry(), ARCH).registers > 0
    assert tried == [True, False]


@pytest.mark.usefixtures("empty_cache")
def test_compiling_changes_no_warning_filters() -> None:
    before = list(warnings.filters)
    for language in compiler.LANGUAGES:
        try:
            compiler.build(language, entry(), ARCH)
        except ToolchainError as error:
            pytest.skip(str(error))
    assert list(warnings.filters) == before


def test_a_dependent_launch_says_so_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def driver(config: Any, function: Any, parameters: Any, extra: Any) -> int:
        words = ctypes.string_at(ctypes.addressof(config._obj), 56)
        attribute = ctypes.string_at(struct.unpack_from("<Q", words, 40)[0], 72)
        told.append((struct.unpack("<7I4xQ8xI4x", words), attribute, function.value, parameters))
        assert extra._obj is packet
        return len(told) - 1  # CUDA_SUCCESS, then an error

    monkeypatch.setattr(compiler, "_launch_kernel_ex", lambda: driver)
    packet = (ctypes.c_uint64 * 8).from_buffer_copy(compiler.packet(bytes(16)))
    kernel = compiler.Loaded(1234, None, 0)
    start = compiler.prepare(kernel, 5, 128, 1000, 77, packet, dependent=True)
    assert not told
    assert not start()
    ((config, attribute, function, parameters),) = told
    assert config == (5, 1, 1, 128, 1, 1, 1000, 77, 1)
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
    assert attribute == struct.pack("<IIQ56x", 6, 0, 1)
    assert (function, parameters) == (1234, None)
    assert start() == 1
    compiler.prepare(kernel, 5, 128, 1000, 77, packet)()
    assert told[-1][0] == (5, 1, 1, 128, 1, 1, 1000, 77, 0)
