"""What the doctor says about every mix of packages, driver and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench import compile as compiler
from workbench import doctor
from workbench.doctor import Machine, Verdict

GOOD = Machine(
    packages={
        "numpy": "2.4.6",
        "numba-cuda": "0.30.4",
        "cuda-bindings": "13.5.0",
        "cupy-cuda13x": "14.2.0",
    },
    driver="580.159.03",
    gpus=(doctor.Gpu("NVIDIA H200", "9.0", "143771 MiB"),),
    compilers={"cuda": "nvrtc 13.5", "numba": "numba 0.68"},
    gpu_missing=None,
)


def without(machine: Machine, *names: str, **more: str) -> Machine:
    packages = {k: v for k, v in machine.packages.items() if k not in names}
    return replace(machine, packages=packages | {k.replace("_", "-"): v for k, v in more.items()})


def verdicts(machine: Machine) -> list[Verdict]:
    return [finding.verdict for finding in doctor.diagnose(machine)]


def test_a_good_machine_has_nothing_to_mend() -> None:
    findings = doctor.diagnose(GOOD)
    assert {finding.verdict for finding in findings} == {Verdict.GOOD}
    assert not [finding for finding in findings if finding.command]


@pytest.mark.parametrize(
    ("machine", "text", "command"),
    [
        (
            without(GOOD, cupy_cuda12x="14.2.0"),
            "cupy-cuda12x and cupy-cuda13x are both installed",
            "uninstall -y cupy-cuda12x cupy-cuda13x",
        ),
        (without(GOOD, "numba-cuda"), "without numba-cuda", "[cuda13]"),
        (
            without(GOOD, "cupy-cuda13x", cupy_cuda12x="14.2.0"),
            "for CUDA 12, but numba-cuda's cuda-bindings are 13.5.0",
            "[cuda12]",
        ),
        (without(GOOD, "numpy", numpy="2.5.2"), "numpy is 2.5.2", "numpy<2.5"),
        (
            without(GOOD, "numba-cuda", **{"numba-cuda": "0.31.0"}),
            "numba-cuda is 0.31.0",
            "numba-cuda==0.30.*",
        ),
        (
            replace(GOOD, driver="550.54.15"),
            "needs NVIDIA driver 580 or newer, this is 550.54.15",
            "[cuda12]",
        ),
        (
            replace(GOOD, compilers={"cuda": OSError("damaged"), "numba": "numba 0.68"}),
            "OSError: damaged",
            "[cuda13]",
        ),
    ],
    ids=["two cupys", "no numba-cuda", "12 and 13", "numpy", "numba-cuda", "driver", "compiler"],
)
def test_a_wrong_mix_is_named_first_with_its_cure(
    machine: Machine, text: str, command: str
) -> None:
    first = doctor.diagnose(machine)[0]
    assert first.verdict is Verdict.WRONG
    assert text in first.text
    assert first.command is not None
    assert command in first.command


def test_each_wrong_mix_is_named_once() -> None:
    assert verdicts(without(GOOD, cupy_cuda12x="14.2.0")).count(Verdict.WRONG) == 1


def test_a_machine_without_gpu_or_toolchain_is_not_wrong() -> None:
    missing = compiler.ToolchainError("NVRTC is missing")
    machine = Machine(
        packages={"numpy": "2.4.6"},
        compilers={"cuda": missing, "numba": missing},
        gpu_missing="no NVIDIA driver is installed",
    )
    findings = doctor.diagnose(machine)
    assert Verdict.WRONG not in verdicts(machine)
    assert [f.command for f in findings if f.command] == [
        "pip install 'kernel-workbench[simulator]'"
    ] * 2
    assert any("no NVIDIA driver" in finding.text for finding in findings)


def test_a_gpu_without_cupy_gets_the_command_for_its_driver() -> None:
    machine = replace(without(GOOD, "cupy-cuda13x"), gpu_missing="CuPy is missing: install it")
    (finding,) = [f for f in doctor.diagnose(machine) if f.verdict is not Verdict.GOOD]
    assert finding.command == "pip install 'kernel-workbench[cuda13]'"


def test_a_driver_that_is_too_old_is_said_to_be() -> None:
    machine = replace(GOOD, driver="470.82.01", gpu_missing="the driver cannot be used")
    assert any("470.82.01 is too old" in finding.text for finding in doctor.diagnose(machine))


def test_no_wheels_means_no_command() -> None:
    missing = compiler.ToolchainError("NVRTC is missing")
    machine = Machine(
        packages={}, compilers={"cuda": missing, "numba": missing}, gpu_missing="none", wheels=False
    )
    findings = doctor.diagnose(machine)
    assert not [finding for finding in findings if finding.command]
    assert any("no CUDA wheels for this platform" in finding.text for finding in findings)


def test_this_machine_can_be_looked_at() -> None:
    machine = doctor.inspect()
    assert machine.packages["numpy"]
    names = [name for name, _ in doctor.facts_of(machine)]
    assert names[:2] == ["workbench", "python"]
    assert "kernel cache" in names


@pytest.mark.gpu
def test_the_doctor_sees_the_gpu() -> None:
    machine = doctor.inspect()
    assert machine.gpu_missing is None
    assert machine.driver
    assert machine.gpus
