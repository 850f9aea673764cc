"""The package as a stranger gets it: wheel and sdist, what an import costs, README's examples."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("cuda_src/*.cu", "cuda_src/*.cuh", "cuda_src/*.md", "numba_kernels/*.py")
    for path in ROOT.glob(pattern)
)
SHIPPED = [
    *SOURCES,
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "workbench").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ),
]
# Run by an interpreter that finds only the installed copy: everything must be where it belongs.
LOOK_AROUND = """
import importlib.resources, sys
from pathlib import Path
import workbench
from workbench import show
from workbench.vit.images import portrait

target = Path(sys.argv[1]).resolve()
assert Path(workbench.__file__).resolve().is_relative_to(target), workbench.__file__
for package in ("cuda_src", "numba_kernels"):
    folder = importlib.resources.files(package)
    assert Path(str(next(iter(folder.iterdir())))).resolve().is_relative_to(target), folder
for stem in show.kernel_stems():
    assert show.read_source(stem, "cuda") and show.read_source(stem, "numba"), stem
assert (importlib.resources.files("cuda_src") / "README.md").is_file()
assert portrait().size[0] >= 224
print(len(show.kernel_stems()))
"""


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, check=False, text=True, cwd=cwd, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -------------------------------------------------------------------------- wheel and sdist


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both as a release does: the wheel from the sdist, in an isolated environment."""
    pytest.importorskip("build", reason="the extra 'dev' is not installed")
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--outdir", str(folder), str(ROOT), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def test_both_distributions_hold_every_source(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(distributions["sdist"]) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    assert len(SHIPPED) > 20
    assert [name for name in SHIPPED if name not in in_wheel] == []
    assert [name for name in SHIPPED if name not in in_sdist] == []
    assert {"README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py"} <= in_sdist
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)
    tops = {name.partition("/")[0] for name in in_wheel if ".dist-info/" not in name}
    assert tops == {"workbench", "cuda_src", "numba_kernels"}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_copy_finds_its_files(
    distributions: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    run_python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target),
        str(distributions[kind]), cwd=tmp_path,
    )  # fmt: skip
    # -P and another folder keep the checkout off the path.
    printed = run_python("-P", "-c", LOOK_AROUND, str(target), cwd=tmp_path, PYTHONPATH=str(target))
    assert int(printed) == len(list((ROOT / "cuda_src").glob("*.cu")))


# ----------------------------------------------------------------------------------- imports


def test_import_loads_neither_cupy_nor_numba() -> None:
    heavy = {
        "cupy",
        "numba",
        "numba.cuda",
        "llvmlite",
        "cuda",
        "matplotlib",
        "PIL",
        "typer",
        "rich",
    }
    code = f"import sys, workbench; print(sorted({heavy!r} & set(sys.modules)))"
    assert run_python("-c", code, cwd=ROOT).strip() == "[]"


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_the_command_line_starts_without_the_compilers(command: str) -> None:
    heavy = {"cupy", "numba", "numba.cuda", "llvmlite", "cuda", "matplotlib"}
    code = (
        "import sys\nfrom workbench import cli\n"
        f"sys.argv[1:] = [{command!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert run_python("-c", code, cwd=ROOT).splitlines()[-1] == "[]"


def test_no_framework_is_imported_anywhere() -> None:
    banned = {"torch", "jax", "triton", "tensorflow", "flax"}
    found = []
    files = [
        path
        for folder in ("workbench", "numba_kernels", "cuda_src", "tests", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found += [(path.name, name) for name in names if name.partition(".")[0] in banned]
    assert found == []


# ------------------------------------------------------------------------------ what is written


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_pinned_tools_are_the_same_everywhere() -> None:
    pins = [pin for pin in project()["project"]["optional-dependencies"]["dev"] if "==" in pin]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert {pin.partition("==")[0] for pin in pins} == {"clang-format", "mypy", "ruff"}
    for pin in pins:
        assert pin in hooks
        name = pin.partition("==")[0]
        assert set(re.findall(rf"{name}==[\d.]+", hooks)) == {pin}


def test_every_toolchain_is_empty_where_there_are_no_wheels() -> None:
    requirements = pytest.importorskip("packaging.requirements", reason="comes with pytest")
    extras = project()["project"]["optional-dependencies"]
    there = [("linux", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")]
    elsewhere = [
        ("darwin", "arm64"),
        ("darwin", "x86_64"),
        ("win32", "ARM64"),
        ("linux", "ppc64le"),
    ]
    for extra in ("cuda13", "cuda12", "simulator"):
        for text in extras[extra]:
            marker = requirements.Requirement(text).marker
            for wanted, platforms in ((True, there), (False, elsewhere)):
                for system, machine in platforms:
                    values = {"sys_platform": system, "platform_machine": machine}
                    assert marker.evaluate(values) is wanted, (text, system, machine)


def test_the_changelog_names_this_version() -> None:
    version = project()["project"]["version"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{version}]" in text


def readme_snippets() -> list[str]:
    """README's Python examples; one that needs a GPU says so in its first line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def needs_gpu(snippet: str) -> bool:
    return "import cupy" in snippet


@pytest.mark.parametrize(
    "snippet",
    [pytest.param(s, marks=[pytest.mark.gpu] * needs_gpu(s)) for s in readme_snippets()],
    ids=lambda snippet: snippet.strip().splitlines()[-1][:40],
)
def test_readme_examples_run(snippet: str, tmp_path: Path) -> None:
    # Importing CuPy may warn about the machine; our own side may not.
    strict = [] if needs_gpu(snippet) else ["-W", "error"]
    run_python(*strict, "-c", snippet, cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_readme_has_examples_with_and_without_a_gpu() -> None:
    assert {needs_gpu(snippet) for snippet in readme_snippets()} == {True, False}


def test_files_that_readme_links_to_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "cuda_src/README.md"):
        path = ROOT / name
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{name} links to {target}"
