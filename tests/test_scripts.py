"""The environment that README's two commands make, with a Python and a driver that only pretend."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(
    BASH is None or os.name == "nt", reason="needs bash and files that are programs by their mode"
)

# Answers what environment.sh asks of Python, and notes every question.
PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$1 $2" in
"--version "*) echo Python 3.12.0 ;;
"-c import hashlib"*) cksum <"$3" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") [ "$3" = --version ] || [ -z "${PIP_FAILS:-}" ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a space in its path, scripts, a pyproject.toml and a `python3`."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "environment.sh", root / "scripts")
    (root / "pyproject.toml").write_text("first")
    write_program(tmp_path / "programs" / "python3", PYTHON)
    return root


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def bash(root: Path, command: str, **environment: str) -> tuple[int, str, list[str]]:
    """Run a command after environment.sh: (exit code, output, what Python was asked to do)."""
    log = root.parent / "log"
    log.write_text("")
    path = f"{root.parent / 'programs'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [BASH, "-c", f'set -euo pipefail; source scripts/environment.sh; {command}'],
        cwd=root, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PATH": path, "LOG": str(log), "PYTHON": ""} | environment,
    )  # fmt: skip
    asked = [line for line in log.read_text().splitlines() if line.startswith("-m")]
    return done.returncode, done.stdout, [line for line in asked if line != "-m pip --version"]


def prepared(root: Path, arguments: str) -> list[str]:
    """Prepare an environment; "venv" and the extras of each installation, in order."""
    code, out, asked = bash(root, f"prepare_environment {arguments}")
    assert code == 0, out
    install = f"-m pip install -qq --disable-pip-version-check --editable {root}"
    return [
        "venv" if a == f"-m venv {root}/.venv" else a.replace(install, "install") for a in asked
    ]


@pytest.mark.parametrize(
    ("driver", "toolchain"),
    [
        ("580.159.03", "cuda13"),
        ("595.10", "cuda13"),
        ("570.86.15\n570.86.15", "cuda12"),
        ("525.60.13", "cuda12"),
        ("470.82.01", ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", ""),
        ("", ""),
    ],
)
def test_the_driver_chooses_the_toolchain(checkout: Path, driver: str, toolchain: str) -> None:
    programs = checkout.parent / "programs"
    write_program(programs / "nvidia-smi", f"#!/usr/bin/env bash\ncat <<'END'\n{driver}\nEND\n")
    assert bash(checkout, 'echo "<$(driver_toolchain)>"')[:2] == (0, f"<{toolchain}>\n")
    write_program(programs / "nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")
    assert bash(checkout, 'echo "<$(driver_toolchain)>"')[:2] == (0, "<>\n")


def test_a_second_run_installs_nothing(checkout: Path) -> None:
    assert prepared(checkout, "''") == ["venv", "install"]
    assert prepared(checkout, "''") == []
    assert prepared(checkout, "simulator plot dev") == ["install[simulator,plot,dev]"]
    assert prepared(checkout, "simulator dev") == []
    assert prepared(checkout, "''") == []


def test_a_changed_project_is_installed_again_with_the_extras_it_had(checkout: Path) -> None:
    prepared(checkout, "simulator dev")
    (checkout / "pyproject.toml").write_text("second")
    assert prepared(checkout, "''") == ["install[simulator,dev]"]
    assert prepared(checkout, "''") == []


def test_two_toolchains_never_share_an_environment(checkout: Path) -> None:
    prepared(checkout, "simulator dev")
    assert prepared(checkout, "cuda13") == ["venv", "install[cuda13]"]
    assert prepared(checkout, "cuda13 dev") == ["install[cuda13,dev]"]


def test_a_broken_environment_is_made_anew(checkout: Path) -> None:
    prepared(checkout, "''")
    write_program(checkout / ".venv" / "bin" / "python", "#!/nowhere/python\n")
    assert prepared(checkout, "''") == ["venv", "install"]


def test_a_moved_checkout_is_installed_again(checkout: Path) -> None:
    prepared(checkout, "''")
    moved = checkout.rename(checkout.parent / "elsewhere")
    assert prepared(moved, "''") == ["install"]


def test_an_installation_that_failed_is_tried_again(checkout: Path) -> None:
    assert bash(checkout, "prepare_environment ''", PIP_FAILS="yes")[0] != 0
    assert prepared(checkout, "''") == ["install"]


def test_without_a_fitting_python_the_error_says_how_to_name_one(checkout: Path) -> None:
    code, out, _ = bash(checkout, "prepare_environment ''", PYTHON="/nowhere/python3.9")
    assert code == 1
    assert out.startswith("error: no Python 3.11, 3.12 or 3.13 found; name one with PYTHON=")
    assert not (checkout / ".venv").exists()
