"""The command line as a user meets it: what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from workbench import KERNELS, cli, show

ESCAPE = "\x1b"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call ``workbench ARGUMENTS`` in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str, width: int | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["workbench", *arguments])
        monkeypatch.delenv("COLUMNS", raising=False)
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def test_help_names_every_command(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("demo", "list", "compare", "show", "inspect", "vit", "doctor"):
        assert command in out


def test_list_names_every_kernel(run) -> None:
    code, out, _ = run("list")
    assert code == 0
    for kernel in KERNELS:
        assert kernel.name in out
        assert kernel.summary in " ".join(out.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["doctor"],
        ["compare", "--backend", "cpu,reference,cuda", "--seqlen", "16"],
        ["show", "vector_add"],
        ["show", "attention_naive_fwd"],
    ],
    ids=" ".join,
)
def test_output_fits_and_has_no_control_codes_in_a_pipe(
    run, command: list[str], width: int
) -> None:
    _, out, err = run(*command, width=width)
    assert out
    assert ESCAPE not in out + err
    # A command that is there to be copied, or a path, may be longer than a line.
    assert max(len(line) for line in out.splitlines()) <= width
    assert all(line == line.rstrip() for line in out.splitlines())


def test_compare_as_json(run) -> None:
    code, out, _ = run(
        "compare", "attention", "--batch", "2", "--heads", "4", "--heads-kv", "2", "--seqlen", "17",
        "--seqlen-k", "21", "--head-dim", "8", "--head-dim-v", "5", "--dtype", "float64",
        "--causal", "--window", "7,-1", "--softcap", "2.5", "--backward",
        "--backend", "cpu", "--backend", "reference", "--json",
    )  # fmt: skip
    assert code == 0
    answer = json.loads(out)
    assert answer["workload"] == {
        "op": "attention", "dtype": "float64", "batch": 2, "heads_q": 4, "heads_kv": 2,
        "seqlen_q": 17, "seqlen_k": 21, "head_dim": 8, "head_dim_v": 5, "causal": True,
        "window": [7, None], "softcap": 2.5, "backward": True,
    }  # fmt: skip
    assert [row["backend"] for row in answer["rows"]] == ["cpu", "reference"]
    assert all(row["error"] < 1e-12 for row in answer["rows"])


def test_compare_says_what_did_not_run(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.compile.gpu_missing", lambda: "the GPU is on holiday")
    code, out, _ = run("compare", "vector_add", "--size", "1000")
    assert code == 0
    assert "did not run: the GPU is on holiday" in out
    assert "vector_add_vec4, vector_add (cuda, numba)" in out


def test_compare_draws_a_plot(run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    file = tmp_path / "plot.png"
    code, _, err = run(
        "compare", "vector_add", "--size", "1000", "--backend", "cpu", "--plot", str(file)
    )
    assert code == 0
    assert str(file) in err
    with Image.open(file) as picture:
        assert picture.width > 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--window", "3"], "--window is '3'; it takes two integers LEFT,RIGHT"),
        (["compare", "--window", "3,-2"], "0 or more, or -1 for open"),
        (["compare", "--backend", "tpu"], "there is no backend 'tpu'; there are cuda, numba"),
        (["compare", "--kernel", "nothing"], "there is no attention kernel 'nothing'; there are"),
        (["compare", "--heads", "3", "--heads-kv", "2"], "must be a multiple"),
        (["compare", "--plot", "no/such/folder.png"], "there is no folder"),
        (["show", "nothing"], "there is no kernel 'nothing'; there are"),
        (["show", "vector_add", "--step", "9z"], "vector_add has no step '9z'"),
        (["demo", "--out", "no/such/folder/map.png"], "there is no folder"),
        (["demo", "--out", "map.txt"], "not the name of a picture file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line(run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert not out
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["compare", "matmul"], ["compare", "--dtype", "int8"], ["x"]]
)
def test_an_unknown_word_is_no_traceback(run, arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "Traceback" not in err
    assert arguments[-1] in err


def test_plot_without_matplotlib_says_how_to_get_it(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(
        "compare",
        "vector_add",
        "--size",
        "10",
        "--backend",
        "cpu",
        "--plot",
        str(tmp_path / "p.png"),
    )
    assert code == 2
    assert "kernel-workbench[plot]" in err


# ---------------------------------------------------------------------------------------- show


def test_show_is_side_by_side_only_where_there_is_room(run) -> None:
    wide = run("show", "vector_add", width=160)[1].splitlines()
    narrow = run("show", "vector_add", width=80)[1].splitlines()

    def beside(lines: list[str]) -> bool:
        return any("CUDA C++, line" in line and "Numba, line" in line for line in lines)

    assert beside(wide)
    assert not beside(narrow)
    assert any("CUDA C++, line" in line for line in narrow)
    assert any("Numba, line" in line for line in narrow)


@pytest.mark.parametrize("width", [80, 120])
def test_show_loses_no_code(run, width: int) -> None:
    _, out, _ = run("show", "attention_naive_fwd", width=width)
    # Side by side, the lines of both files alternate: count the characters.
    shown = Counter("".join(out.split()))
    for language in ("cuda", "numba"):
        shown.subtract("".join(show.read_source("attention_naive_fwd", language).split()))
    assert min(shown.values()) >= 0


def test_show_takes_a_name_without_its_direction(run) -> None:
    _, out, _ = run("show", "attention_naive")
    assert "attention_naive_fwd" in out
    assert "attention_naive_bwd" in out


def test_show_one_step(run) -> None:
    _, out, _ = run("show", "attention_naive_fwd", "--step", "1")
    titles = {pair.title for pair in show.read_pairs("attention_naive_fwd")}
    assert [title for title in titles if title in out] == [t for t in titles if t.startswith("1.")]


# ----------------------------------------------------------------------------------------- vit

CHECKPOINTS = Path(__file__).parent / "data" / "vit"
PORTRAIT = Path(cli.__file__).parent / "vit" / "data" / "portrait.jpg"


@pytest.mark.parametrize("width", [80, 120])
def test_vit_names_classes_and_times(run, width: int) -> None:
    weights = str(CHECKPOINTS / "hf_dinov2")
    arguments = ["vit", str(PORTRAIT), "--weights", weights, "--top", "3", "--backend", "cpu"]
    code, out, err = run(*arguments, width=width)
    assert (code, err) == (0, "")
    assert all(len(line) <= width for line in out.splitlines())
    shares = [float(x) for x in re.findall(r"^(?:ant|bee|cat|dog|eel) .* ([\d.]+)%$", out, re.M)]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert "2 blocks of 2 heads, 16 wide; 16 x 16 pixels, 4 x 4 patches of 4 x 4" in out
    for stage in ("read the weights", "prepare the picture", r"run the model \(cpu\)"):
        assert re.search(rf"^{stage} +[\d.]+ [mu]?s$", out, re.M), stage
    assert "draw the map" not in out


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("hf_dinov2", [], (904, 448)),
        ("hf_dinov2", ["--rollout", "--mass", "0.6"], (904, 448)),
        ("hf_dinov2", ["--heads", "--query", "1,2", "--block", "0", "--size", "24,16"], (606, 448)),
        ("hf_siglip", ["--backend", "reference"], (904, 448)),
        ("timm_avg_grey", ["--query", "0,3"], (904, 269)),
    ],
    ids=str,
)
def test_vit_draws_maps(
    run, tmp_path: Path, name: str, options: list[str], size: tuple[int, int]
) -> None:
    file = tmp_path / "map.png"
    weights = str(CHECKPOINTS / name)
    options = ["--backend", "cpu", *options]
    code, out, _ = run("vit", str(PORTRAIT), "--weights", weights, "--map", str(file), *options)
    assert code == 0
    assert f"Attention map written to {file}" in " ".join(out.split())
    with Image.open(file) as picture:
        assert picture.size == size
        assert max(band[1] - band[0] for band in picture.getextrema()) > 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--weights": "no/such/folder"}, "no/such/folder: no such file"),
        ({"--weights": __file__}, "weights are read from .safetensors and .npz files"),
        ({"--map": "no/such/folder/map.png"}, "--map: there is no folder"),
        ({"--map": "map.txt"}, "--map: map.txt is not the name of a picture file"),
        ({"--map": "map.png", "--query": "9,9"}, "query (9, 9) lies outside the map"),
        ({"--map": "map.png", "--query": "9"}, "--query is '9'; it takes two integers"),
        ({"--map": "map.png", "--block": "2"}, "block is 2; the model has 2, from 0"),
        ({"--map": "map.png", "--mass": "2"}, "mass must be above 0 and at most 1, got 2.0"),
        ({"--size": "x"}, "--size is 'x'; it takes one integer or two, none negative"),
        ({"--size": "17"}, "divide into patches of (4, 4); got (17, 17)"),
        ({"--size": "0"}, "image_size must be positive"),
        ({"--backend": "gpu"}, "backend is 'gpu'"),
    ],
    ids=str,
)
def test_vit_says_what_is_wrong(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"--weights": str(CHECKPOINTS / "hf_dinov2"), "--backend": "cpu"} | change
    code, _, err = run("vit", str(PORTRAIT), *[x for pair in options.items() for x in pair])
    assert code == 2
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_vit_refuses_what_is_no_picture(run) -> None:
    code, _, err = run("vit", __file__, "--weights", str(CHECKPOINTS / "hf_dinov2"))
    assert code == 2
    assert "not a picture that can be read" in " ".join(err.split())


# -------------------------------------------------------------------------------------- doctor


def test_doctor_clears_the_cache(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))
    code, out, _ = run("doctor", "--clear-cache")
    assert code == 0
    assert out == f"removed 0 compiled kernels from {tmp_path}\n"


def test_doctor_fails_on_a_wrong_mix(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench import doctor

    both = doctor.Machine(packages={"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"})
    monkeypatch.setattr(doctor, "inspect", lambda: both)
    code, out, _ = run("doctor")
    assert code == 1
    assert "cupy-cuda12x and cupy-cuda13x are both installed" in " ".join(out.split())


# ----------------------------------------------------------------------------------- as a process


def test_the_command_runs_as_a_module() -> None:
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "--version"],
        capture_output=True, text=True, check=True, env=environment,
        cwd=Path(cli.__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout.startswith("kernel-workbench ")
    assert not done.stderr


# ---------------------------------------------------------------------------------------- list


@pytest.mark.parametrize(
    ("gpu", "compilers", "here"),
    [
        (None, {"cuda", "numba"}, "runs"),
        ("no GPU found", {"cuda", "numba"}, "compiles"),
        ("no GPU found", set(), "no"),
        (None, {"cuda"}, "only in CUDA C++"),
    ],
)
def test_list_tells_what_runs_from_what_compiles(
    run, monkeypatch: pytest.MonkeyPatch, gpu: str | None, compilers: set[str], here: str
) -> None:
    from workbench import compile as compiler

    def version(language: str) -> str:
        if language not in compilers:
            raise compiler.ToolchainError(f"the {language} compiler is missing")
        return "1.0"

    monkeypatch.setattr(compiler, "gpu_missing", lambda: gpu)
    monkeypatch.setattr(compiler, "compiler_version", version)
    _, out, _ = run("list")
    assert len(re.findall(rf"\s{re.escape(here)}$", out, flags=re.MULTILINE)) == len(KERNELS)
    assert (f"why not more: {gpu}" in out) == (gpu is not None)
    assert ("the numba compiler is missing" in out) == ("numba" not in compilers)
