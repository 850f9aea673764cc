"""Break every kernel in many small ways, and see that the tests notice each of them.

A mutant is a copy of the sources with one change: a wrong scale, a diagonal moved by one, a dropped
tail (mutations.toml lists them), or one barrier less. The value tests of the kernel must fail on
it. What survives is a hole in the tests, or a line of a kernel that does nothing.

    python scripts/mutate.py --list
    python scripts/mutate.py --kernel attention_flash_simt --language cuda --jobs 8
    python scripts/mutate.py --where simulator

On a GPU a missing barrier need not show in the values: there compute-sanitizer must see the race.
The simulator, which needs no GPU, sees races itself. The checkout is never changed.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
COPIED = ("workbench", "cuda_src", "numba_kernels", "tests", "pyproject.toml")
LANGUAGES = ("cuda", "numba")
ATTENTION = ("attention_flash_mma", "attention_flash_simt", "attention_tiled", "attention_naive")

# Whose tests must notice a fault in a file that belongs to no single kernel.
SHARED = {
    "scores": ATTENTION,
    "fragments": ("attention_flash_mma",),
    "block_tiles": ("attention_flash_wgmma",),
    "warpgroups": ("attention_flash_wgmma",),
    "attention_dq": ("attention_flash_mma",),
    "attention_merge": ("attention_flash_mma",),
    "tiles": ("attention_flash_simt",),
    "matmul": ("attention_tiled",),
    "attention_row_stats": ("attention_flash_wgmma",),
    "attention_flash_wgmma_bwd_wide": ("attention_flash_wgmma",),
    "attention_delta": ("attention_naive",),
    "attention_dbias": ("attention_naive",),
}
BARRIERS = {"cuda": "__syncthreads();", "numba": "cuda.syncthreads()"}
NOTHING = {"cuda": "", "numba": "pass"}

KILLED, RACE, TIMED_OUT = "killed", "killed by racecheck", "killed by the clock"
SURVIVED, BROKEN, LOST = "SURVIVED", "DOES NOT COMPILE", "NO LONGER MATCHES"
GOOD = (KILLED, RACE, TIMED_OUT)

# The tests that run: on a GPU, or in the simulator.
TESTS = {
    "gpu": ("tests/test_kernels.py", "tests/test_cases.py", "-m", "gpu"),
    "simulator": ("tests/test_simulator_kernels.py",),
}

# Forward and backward over several tiles, for the race detector.
RACECHECK = """
import sys
sys.path[:0] = [".", "tests"]
from oracle import random_example, run
e = random_example(1, seqlen_q=70, seqlen_k=140, head_dim=64, causal=True, bias="k", batch=1)
run(e, backend=sys.argv[2], kernel=sys.argv[1])
"""


@dataclass(frozen=True)
class Mutation:
    """One change of one file, and the kernel whose tests must notice it.

    Attributes
    ----------
    kernel, language : str
        Row of `KERNELS` and the language of the file: their value tests run.
    file : str
        Its stem.
    name : str
        What is wrong with the mutant.
    before, after : str
        The code and what replaces it; any white space in the code is as good as any other.
    nth : int
        Which of the places where it stands, from 0.
    quick : str
        Which problems to try first, an expression for pytest's ``-k``.
    """

    kernel: str
    language: str
    file: str
    name: str
    before: str
    after: str
    nth: int = 0
    quick: str = "square or odd"

    @property
    def row(self) -> tuple[str, str]:
        """Whose tests run."""
        return self.kernel, self.language

    @property
    def path(self) -> Path:
        """The file, from the root of the repository."""
        return path_of(self.language, self.file)

    @property
    def is_barrier(self) -> bool:
        """Whether a race detector is asked too."""
        return self.before == BARRIERS[self.language]

    def __str__(self) -> str:
        return f"{self.kernel:22} {self.language:6} {self.path.name:30} {self.name}"

    def apply(self, text: str) -> str:
        """The text of the file with the change.

        Raises
        ------
        ValueError
            If the code to change is not there.
        """
        found = places(self.before, text, self.language)
        if len(found) <= self.nth:
            raise ValueError(f"{self.path}: {self.before!r} is there {len(found)} times")
        start, end = found[self.nth]
        return text[:start] + self.after + text[end:]


def path_of(language: str, file: str) -> Path:
    """A source file, from the root of the repository."""
    if language == "numba":
        return Path("numba_kernels", f"{file}.py")
    kernel = Path("cuda_src", f"{file}.cu")
    return kernel if (ROOT / kernel).exists() else kernel.with_suffix(".cuh")


def places(code: str, text: str, language: str) -> list[tuple[int, int]]:
    """Where `code` stands in a file, comments left out, with any white space between its words."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    if language == "numba":
        text = re.sub(r'\A""".*?"""', blank, text, count=1, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*" if language == "cuda" else r"#[^\n]*", blank, text)
    words = [re.escape(word) for word in re.findall(r"\w+|[^\w\s]", code)]
    # Two words need a space between them; a sign may touch whatever is beside it.
    pattern = r"\s*".join(words)
    first, last = code.strip()[0], code.strip()[-1]
    pattern = rf"\b{pattern}" if first.isalnum() or first == "_" else pattern
    pattern = rf"{pattern}\b" if last.isalnum() or last == "_" else pattern
    return [match.span() for match in re.finditer(pattern, text)]


def mutations() -> list[Mutation]:
    """Every mutant of every kernel."""
    faults = tomllib.loads((ROOT / "scripts" / "mutations.toml").read_text())["fault"]
    listed = []
    for fault in faults:
        for kernel in fault.get("kernels", kernels_of(fault["file"])):
            for language in LANGUAGES:
                more = {name: fault[name] for name in ("nth", "quick") if name in fault}
                listed.append(
                    Mutation(
                        kernel, language, fault["file"], fault["name"], *fault[language], **more
                    )
                )
    return [*listed, *barriers()]


def kernels_of(file: str) -> tuple[str, ...]:
    """Whose tests must notice a fault in a file."""
    return SHARED.get(file, (file.removesuffix("_fwd").removesuffix("_bwd"),))


def barriers() -> Iterator[Mutation]:
    """A mutant for every barrier, wherever there is one."""
    for language, folder in (("cuda", "cuda_src"), ("numba", "numba_kernels")):
        for path in sorted((ROOT / folder).glob("*.cu*" if language == "cuda" else "*.py")):
            code = BARRIERS[language]
            found = places(code, path.read_text(), language)
            for nth, (start, _) in enumerate(found):
                line = path.read_text()[:start].count("\n") + 1
                for kernel in kernels_of(path.stem):
                    yield Mutation(
                        kernel, language, path.stem, f"barrier of line {line}",
                        code, NOTHING[language], nth,
                    )  # fmt: skip


# ----------------------------------------------------------------------------- running a mutant


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, and how long that took."""

    mutation: Mutation
    result: str
    seconds: float
    detail: str = ""


class Workplace:
    """A copy of the sources that one mutant after the other is made in."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder = folder
        self.where = where
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / name, ignore=ignore)
            else:
                shutil.copy(source, folder / name)

    def judge(self, mutation: Mutation, limit: float) -> Verdict:
        """Make the mutant, run the tests on it, and undo it."""
        start = time.monotonic()

        def verdict(result: str, detail: str = "") -> Verdict:
            return Verdict(mutation, result, time.monotonic() - start, detail)

        path = self.folder / mutation.path
        original = path.read_text()
        try:
            path.write_text(mutation.apply(original))
        except (ValueError, OSError) as error:
            return verdict(LOST, str(error))
        try:
            which = f"{mutation.kernel}-{mutation.language}"
            first = {
                "gpu": f"test_every_option and ({mutation.quick})",
                "simulator": "test_ragged or test_all_options",
            }
            for chosen in (first[self.where], "test_"):
                code, output = self.test(f"{which} and ({chosen})", limit)
                if code is None:
                    return verdict(TIMED_OUT)
                if code == 1:
                    if "CompileError" in output:
                        return verdict(BROKEN, _tail(output))
                    return verdict(KILLED, _failed(output))
                if code not in (0, 5):  # 5: no test has such a problem, as for vector_add
                    return verdict(BROKEN, _tail(output))
                if mutation.is_barrier and self.races(mutation, limit):
                    return verdict(RACE)
            return verdict(SURVIVED)
        finally:
            path.write_text(original)

    def test(self, expression: str, limit: float) -> tuple[int | None, str]:
        """Run the value tests that match; the exit code, None past the limit, and the output."""
        command = [sys.executable, "-m", "pytest", *TESTS[self.where], "-x", "-q"]
        return self.run([*command, "-p", "no:cacheprovider", "-k", expression], limit)

    def races(self, mutation: Mutation, limit: float) -> bool:
        """Whether compute-sanitizer sees a race; False where it cannot look."""
        program = shutil.which("compute-sanitizer")
        if program is None or self.where != "gpu":
            return False
        command = [program, "--tool", "racecheck", "--error-exitcode", "9", sys.executable]
        code, _ = self.run(
            [*command, "-c", RACECHECK, mutation.kernel, mutation.language], 3 * limit
        )
        return code == 9

    def run(self, command: list[str], limit: float) -> tuple[int | None, str]:
        """Run a command in the copy, and end it with all that it started after `limit` seconds."""
        cache = {"WORKBENCH_CACHE_DIR": str(self.folder / "cache"), "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | cache | {"PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""


def _failed(output: str) -> str:
    """The test that noticed."""
    found = re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", output, re.MULTILINE)
    return found[1] if found else ""


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-15:])


# ------------------------------------------------------------------------------------------ main


def chosen_by(arguments: argparse.Namespace) -> list[Mutation]:
    return [
        m
        for m in mutations()
        if (arguments.kernel is None or m.kernel in arguments.kernel.split(","))
        and (arguments.language is None or m.language == arguments.language)
        and (arguments.file is None or m.file == arguments.file)
        and (arguments.name is None or arguments.name in m.name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the mutants, run nothing")
    parser.add_argument("--kernel", help="only of these rows of KERNELS (a,b)")
    parser.add_argument("--language", choices=LANGUAGES)
    parser.add_argument("--file", help="only of this file (its stem)")
    parser.add_argument("--name", help="only those whose name holds this")
    parser.add_argument(
        "--where", choices=TESTS, default="gpu", help="whose tests must notice (default gpu)"
    )
    parser.add_argument("--jobs", type=int, default=4, help="mutants at a time (default 4)")
    parser.add_argument(
        "--time-limit", type=float, default=120, help="seconds a run of the tests (default 120)"
    )
    parser.add_argument("--deadline", type=float, help="start no mutant after so many seconds")
    arguments = parser.parse_args()
    chosen = chosen_by(arguments)
    if arguments.list:
        for mutation in chosen:
            print(mutation)
        print(f"{len(chosen)} mutants")
        return 0
    if not chosen:
        parser.error("no mutant matches")

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        idle: queue.Queue[Workplace] = queue.Queue()
        for i in range(arguments.jobs):
            idle.put(Workplace(Path(folder) / str(i), arguments.where))

        def borrow(work: Callable[[Workplace], T]) -> T:
            place = idle.get()
            try:
                return work(place)
            finally:
                idle.put(place)

        def unchanged(row: tuple[str, str]) -> str:
            """What the tests of a kernel say of the kernel as it is, if they fail."""
            expression = f"{row[0]}-{row[1]} and test_"
            code, output = borrow(lambda p: p.test(expression, 10 * arguments.time_limit))
            return "" if code == 0 else f"{row} fails without any change:\n{_tail(output)}"

        def judge(mutation: Mutation) -> Verdict | None:
            if arguments.deadline and time.monotonic() - began > arguments.deadline:
                return None
            return borrow(lambda place: place.judge(mutation, arguments.time_limit))

        bad = judged = 0
        with ThreadPoolExecutor(arguments.jobs) as pool:
            failures = [x for x in pool.map(unchanged, sorted({m.row for m in chosen})) if x]
            if failures:
                print("\n".join(failures))
                return 2
            for verdict in pool.map(judge, chosen):
                if verdict is None:
                    continue
                judged += 1
                bad += verdict.result not in GOOD
                print(
                    f"{verdict.mutation!s:90} {verdict.result:20} {verdict.seconds:5.0f} s  ",
                    end="",
                )
                detail = verdict.detail
                print(detail if verdict.result in GOOD else f"\n{detail}", flush=True)
    print(f"{judged} of {len(chosen)} mutants judged, {judged - bad} killed, {bad} not")
    return 1 if bad or judged < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
