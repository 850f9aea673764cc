"""What the tests of compiled kernels share: where the compilers are, and copies to break."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from workbench import compile as compiler
from workbench import launchers, table
from workbench.launchers import Launch


@functools.cache
def missing(language: str) -> str | None:
    """Say what is missing to compile a language here, or None."""
    try:
        compiler.compiler_version(language)
        if language == "cuda":
            compiler._cuda_include()
    except compiler.ToolchainError as error:
        return str(error)
    return None


def needs(language: str) -> pytest.MarkDecorator:
    """Mark a test that compiles; the base installation has no compiler."""
    reason = missing(language)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


languages = pytest.mark.parametrize(
    "language", [pytest.param(name, marks=needs(name)) for name in compiler.LANGUAGES]
)


def cuda_program(name: str) -> str | None:
    """Where a program of the CUDA toolkit is, from the toolkit itself or from its wheel."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = shutil.which(name), *map(str, sorted(wheels.glob(f"*/bin/{name}")))
    return next((path for path in found if path), None)


def opcodes(binary: compiler.Binary, folder: Path) -> list[str]:
    """The instructions of a cubin, in order; skip the test where nothing can read it."""
    readers = (("cuobjdump", "-sass"), ("nvdisasm", "-c"))
    command = next(([path, x] for name, x in readers if (path := cuda_program(name))), None)
    if command is None:
        pytest.skip("neither cuobjdump nor nvdisasm is installed")
    path = folder / "kernel.cubin"
    path.write_bytes(binary.code)
    text = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text)


def copy_sources(language: str, folder: Path) -> Path:
    """Copy the sources of a language into a package of the same name in `folder`."""
    source = compiler.source_path(language, "common").parent
    target = folder / source.name
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def redirect(monkeypatch: pytest.MonkeyPatch, language: str, folder: Path) -> None:
    """Let the compiler find the sources of one language in `folder`."""
    original = compiler.source_path

    def source_path(wanted: str, stem: str) -> Path:
        path = original(wanted, stem)
        return folder / path.name if wanted == language else path

    monkeypatch.setattr(compiler, "source_path", source_path)


ARCHS = ("sm_75", "sm_80", "sm_90", "sm_120")
REGISTERS = 65536  # of a multiprocessor, on all of these
# A kernel that uses every register that a thread of its block can have may keep a few addresses in
# local memory, read once a tile. An array that was not promoted to registers takes hundreds of
# bytes.
LEFT_OVER = 64


def gate(language: str, launch: Launch, arch: str) -> None:
    """Compile a kernel and hold what it takes of a multiprocessor to what there is."""
    binary = compiler.build(language, launch.entry, arch)
    what = f"{launch.entry.describe()} in {language} for {arch}"
    available = min(254, REGISTERS // launch.block // 8 * 8)
    allowed = LEFT_OVER if binary.registers >= available else 0
    assert binary.stack_bytes <= allowed, f"{what} has {binary.stack_bytes} bytes of stack"
    # A warp gets its registers by eights of each thread.
    warps = -(-launch.block // 32)
    taken = -(-binary.registers // 8) * 8 * 32 * warps
    assert 0 < taken <= REGISTERS, f"{what}: a block takes {taken} registers"
    shared = binary.static_shared_bytes + launch.shared_memory
    assert shared <= launchers.shared_limit(arch) + 1024, f"{what}: {shared} bytes of shared memory"


def units(language: str, arch: str) -> list[Launch]:
    """What to compile of a language for one GPU.

    In CUDA C++ that is all of `table.INSTANCES` for sm_90, and for the other GPUs what is likely to
    take as much as any instance of its kernel. Numba takes three times as long, so it compiles all
    of float32 and, of the other dtypes, the kernels with every option; Hopper's forward, which no
    option may cost a register that it does not use, with a range alone too.
    """
    rows = {row.name: row for row in table.KERNELS}
    chosen = []
    for name, launches in table.compile_units(arch).items():
        constants = [dict(launch.entry.constants) for launch in launches]
        every = {max(x.get("FEATURES", 0) for x in constants)}
        if name == "attention_flash_wgmma":
            every.add(launchers.RANGE)
        if language in rows[name].languages:
            chosen += [
                launch
                for launch, x in zip(launches, constants, strict=True)
                if _is_compiled(language, arch, x, every)
            ]
    return chosen


def _is_compiled(language: str, arch: str, constants: dict[str, Any], every: set[int]) -> bool:
    """Whether the tests compile an instance; `every` are FEATURES with all that its row takes."""
    dtype, features, head_dim = (constants.get(x) for x in ("T", "FEATURES", "HEAD_DIM"))
    full = features is None or features in every  # of a kernel without options too
    if arch != "sm_90":
        # bfloat16 has no conversions of its own on sm_75.
        main = ("float32", "bfloat16") if language == "cuda" else ("float32",)
        return dtype in main and full and head_dim in (None, 128)
    if language == "cuda" or dtype == "float32":
        return True
    return full and constants.get("VEC") != 1 and (dtype != "float16" or head_dim in (None, 64))


def parameters(language: str) -> list[Any]:
    """The arguments of `gate` as a test takes them: everything for sm_90, less for the others."""
    return [
        pytest.param(launch, arch, id=f"{arch}-{launch.entry.describe()}")
        for arch in ARCHS
        for launch in units(language, arch)
    ]
