"""What the tests of compiled kernels share: where the compilers are, and copies to break."""

from __future__ import annotations

import functools
import shutil
import sysconfig
from pathlib import Path

import pytest

from workbench import compile as compiler


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


def cuobjdump() -> str | None:
    """The program that reads cubins, from a CUDA toolkit or from its wheel."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = shutil.which("cuobjdump"), *map(str, sorted(wheels.glob("*/bin/cuobjdump")))
    return next((path for path in found if path), None)


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
