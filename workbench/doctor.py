"""What this machine has for running the kernels, what is missing or does not fit, and the cure.

`inspect` looks at the machine; `diagnose` is a pure function from what it saw to findings, so that
every mix of packages can be tested on any machine.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from workbench import cache
from workbench import compile as compiler

MIN_DRIVER = {13: 580, 12: 525}  # CUDA major version -> first NVIDIA driver branch that runs it
NUMBA_CUDA = "0.30."
NUMPY_LIMIT = (2, 5)  # numba-cuda 0.30 looks up np.row_stack, which NumPy 2.5 has dropped
SHOWN_PACKAGES = (
    "numpy", "scipy", "ml-dtypes", "numba", "llvmlite", "numba-cuda",
    "cupy", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12", "nvidia-nvvm", "nvidia-cublas", "nvidia-cublas-cu12", "matplotlib",
    "pillow", "safetensors",
)  # fmt: skip


class Verdict(Enum):
    """How bad a finding is."""

    GOOD = "ok"
    ABSENT = "missing"  # everything else works without it
    WRONG = "wrong"  # something that is there will not work


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about the machine, and the command that mends it."""

    verdict: Verdict
    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    capability: str
    memory: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that `diagnose` looks at.

    Attributes
    ----------
    packages : dict
        Version by normalised distribution name, of everything installed.
    driver : str, optional
        Release of the NVIDIA driver, like ``"580.159.03"``.
    compilers : dict
        By language: the compiler's version, or the error that says what is missing.
    gpu_missing : str, optional
        Why kernels cannot run on a GPU.
    """

    packages: dict[str, str]
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    compilers: dict[str, str | Exception] = field(default_factory=dict)
    gpu_missing: str | None = None
    wheels: bool = True  # NVIDIA makes wheels for this platform
    install: Callable[[str], str] = lambda extra: f"pip install 'kernel-workbench[{extra}]'"

    @property
    def driver_branch(self) -> int | None:
        """Major release of the driver."""
        return int(self.driver.partition(".")[0]) if self.driver else None

    @property
    def toolchain(self) -> str:
        """The extra that suits this machine."""
        for cuda, branch in MIN_DRIVER.items():
            if self.driver_branch is not None and self.driver_branch >= branch:
                return f"cuda{cuda}"
        return "simulator"


def inspect() -> Machine:
    """Look at this machine."""
    packages = {
        normalise(dist.name): dist.version
        for dist in importlib.metadata.distributions()
        if dist.name
    }
    driver, gpus = _nvidia_smi()
    compilers: dict[str, str | Exception] = {}
    for language in compiler.LANGUAGES:
        try:
            compilers[language] = compiler.compiler_version(language)
        except Exception as error:  # noqa: BLE001 - a broken install can raise anything: we report it
            compilers[language] = error
    return Machine(
        packages,
        driver,
        gpus,
        compilers,
        compiler.gpu_missing(),
        (sys.platform, platform.machine())
        in {("linux", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")},
        install_command,
    )


def normalise(name: str) -> str:
    """Spell a distribution's name as PyPI compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def install_command(extra: str) -> str:
    """Give the command that adds an extra to the environment that runs us."""
    checkout = Path(__file__).parent.parent
    editable = (checkout / "pyproject.toml").is_file()
    target = f"-e '{checkout}[{extra}]'" if editable else f"'kernel-workbench[{extra}]'"
    return f"{sys.executable} -m pip install {target}"


def version() -> str:
    """Give our own version, from a checkout that is not installed as well."""
    try:
        return importlib.metadata.version("kernel-workbench")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def facts_of(machine: Machine) -> list[tuple[str, str]]:
    """List what the machine is and has, as (name, value)."""
    facts = [
        ("workbench", f"{version()} in {Path(__file__).parent}"),
        ("python", f"{platform.python_version()} in {sys.prefix}"),
        ("platform", platform.platform()),
        ("NVIDIA driver", machine.driver or "none"),
    ]
    facts += [
        ("GPU", f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory}")
        for gpu in machine.gpus
    ]
    packages = machine.packages
    shown = [f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages]
    facts.append(("packages", ", ".join(shown)))
    entries, size = cache.usage()
    plural = "kernel" if entries == 1 else "kernels"
    facts.append(
        ("kernel cache", f"{entries} {plural}, {size / 2**20:.1f} MiB in {cache.folder()}")
    )
    return facts


def diagnose(machine: Machine) -> list[Finding]:
    """Say what works, what is missing and what does not fit together, worst first."""
    findings = [
        *_wrong_mixes(machine),
        *_compilers(machine),
        *_gpu(machine),
        Finding(Verdict.GOOD, "the CPU and reference backends work"),
    ]
    order = [Verdict.WRONG, Verdict.ABSENT, Verdict.GOOD]
    return sorted(findings, key=lambda finding: order.index(finding.verdict))


def _cupy_packages(machine: Machine) -> list[str]:
    return [name for name in machine.packages if name == "cupy" or name.startswith("cupy-cuda")]


def _wrong_mixes(machine: Machine) -> Iterator[Finding]:
    packages = machine.packages
    pip = f"{sys.executable} -m pip"
    cupy = _cupy_packages(machine)
    if len(cupy) > 1:
        yield Finding(
            Verdict.WRONG,
            f"{' and '.join(sorted(cupy))} are both installed and overwrite each other's files",
            f"{pip} uninstall -y {' '.join(sorted(cupy))} && {machine.install(machine.toolchain)}",
        )
    if "numba-cuda" in packages:
        if not packages["numba-cuda"].startswith(NUMBA_CUDA):
            yield Finding(
                Verdict.WRONG,
                f"numba-cuda is {packages['numba-cuda']}; the workbench is built for {NUMBA_CUDA}*",
                f"{pip} install 'numba-cuda=={NUMBA_CUDA}*'",
            )
        numpy = tuple(int(part) for part in packages.get("numpy", "0.0").split(".")[:2])
        if numpy >= NUMPY_LIMIT:
            yield Finding(
                Verdict.WRONG,
                f"numpy is {packages['numpy']}, numba-cuda {NUMBA_CUDA}* is made for versions "
                "below 2.5 (it runs only because the workbench puts np.row_stack back)",
                f"{pip} install 'numpy<2.5'",
            )
    for name, cuda in (("cupy-cuda12x", 12), ("cupy-cuda13x", 13)):
        if name not in packages or len(cupy) > 1:
            continue
        branch = machine.driver_branch
        if branch is not None and branch < MIN_DRIVER[cuda]:
            yield Finding(
                Verdict.WRONG,
                f"{name} needs NVIDIA driver {MIN_DRIVER[cuda]} or newer, this is {machine.driver}",
                f"{pip} uninstall -y {name} && {machine.install(machine.toolchain)}",
            )
        bindings = packages.get("cuda-bindings", "")
        if "numba-cuda" not in packages:
            yield Finding(
                Verdict.WRONG,
                f"{name} is installed without numba-cuda: the extra cuda{cuda} holds both",
                machine.install(f"cuda{cuda}"),
            )
        elif bindings and bindings.partition(".")[0] != str(cuda):
            yield Finding(
                Verdict.WRONG,
                f"{name} is for CUDA {cuda}, but numba-cuda's cuda-bindings are {bindings}",
                machine.install(f"cuda{cuda}"),
            )


def _compilers(machine: Machine) -> Iterator[Finding]:
    names = {"cuda": "CUDA C++ (NVRTC)", "numba": "Numba"}
    for language, found in machine.compilers.items():
        name = names[language]
        if isinstance(found, str):
            yield Finding(Verdict.GOOD, f"{name} kernels compile: {found}")
        elif not machine.wheels:
            yield Finding(
                Verdict.ABSENT, f"{name} kernels do not compile: no CUDA wheels for this platform"
            )
        elif isinstance(found, compiler.ToolchainError):
            command = machine.install(machine.toolchain)
            yield Finding(Verdict.ABSENT, f"{name} kernels do not compile here", command)
        else:
            yield Finding(
                Verdict.WRONG,
                f"the {name} compiler fails: {type(found).__name__}: {found}",
                machine.install(machine.toolchain),
            )


def _gpu(machine: Machine) -> Iterator[Finding]:
    if machine.gpu_missing is None:
        yield Finding(Verdict.GOOD, "kernels run on the GPU: backends cuda and numba")
        return
    text = f"kernels do not run on a GPU: {machine.gpu_missing.partition(': install')[0]}"
    if not _cupy_packages(machine) and machine.driver is not None and machine.wheels:
        yield Finding(Verdict.ABSENT, text, machine.install(machine.toolchain))
    elif machine.driver is not None and machine.toolchain == "simulator":
        yield Finding(
            Verdict.WRONG,
            f"NVIDIA driver {machine.driver} is too old: {MIN_DRIVER[12]} is the oldest that works",
        )
    else:
        yield Finding(Verdict.ABSENT, text)


def _nvidia_smi() -> tuple[str | None, tuple[Gpu, ...]]:
    """Ask nvidia-smi for the driver and the GPUs; (None, ()) where there is none."""
    fields = "driver_version,name,compute_cap,memory.total"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None, ()
    lines = [
        [part.strip() for part in line.split(",")]
        for line in answer.stdout.splitlines()
        if line.count(",") == fields.count(",")
    ]
    gpus = tuple(Gpu(name, capability, memory) for _, name, capability, memory in lines)
    return (lines[0][0] if lines else None), gpus
