"""Run every kernel of both languages under compute-sanitizer: memcheck, then racecheck.

    python scripts/sanitize.py                      # needs a GPU and compute-sanitizer on the PATH
    python scripts/sanitize.py --tool racecheck --kernel attention_tiled

The shapes are small and ragged, with and without options, forward and backward. Memory comes
straight from the driver, so that an access past the end of an array is one past an allocation.

Racecheck does not see that an mbarrier orders a thread's ordinary stores and other warps' reads: of
attention_flash_wgmma it reports what the forward's producer tells of query tiles. The simulator,
which follows mbarriers, finds no race there. Memcheck takes an operand of a wgmma for one piece of
memory, whatever its strides are: none may lie at the very end.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
ERROR = 9  # exit code of compute-sanitizer where it found something


def launch_all(names: list[str]) -> None:
    """Call every kernel; what the sanitizer runs."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import cupy
    import numpy as np
    from oracle import part_taken, random_example, run

    import workbench
    from workbench import launchers

    cupy.cuda.set_allocator(None)
    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    launchers.MULTIPROCESSORS = 2  # so that Hopper's blocks walk over several tiles
    examples = {
        "plain": random_example(1, batch=1, heads_q=2, seqlen_q=70, seqlen_k=140, head_dim=64),
        "options": random_example(
            2, batch=2, heads_q=2, heads_kv=1, seqlen_q=67, seqlen_k=71, head_dim=33, head_dim_v=40,
            causal=True, window=(40, 0), mask="bqk", bias="hk", softcap=2.0, dlse=True,
            q_lengths=True, kv_lengths=True,
        ),
        "aligned": random_example(
            3, batch=1, heads_q=2, heads_kv=1, seqlen_q=150, seqlen_k=140, head_dim=40,
            head_dim_v=24, causal=True,
        ),
        "few": random_example(
            4, batch=2, heads_q=4, heads_kv=2, seqlen_q=1, seqlen_k=300, head_dim=64,
            backward=False,
        ),
    }  # fmt: skip
    for row in workbench.KERNELS:
        for language in row.languages:
            if row.name not in names:
                continue
            if row.op == "vector_add":
                for size in (1, 1003, 4096):
                    a = np.arange(size + 1, dtype=np.float32)[1:]
                    workbench.vector_add(a, a, backend=language, kernel=row.name)
                continue
            for dtype in ("float32", "bfloat16"):
                for example in examples.values():
                    taken = part_taken(row, example.astype(dtype), arch)
                    if taken is None:
                        continue
                    run(taken, backend=language, kernel=row.name)
                    if dtype == "bfloat16" and taken.dout is not None:
                        run(taken, backend=language, kernel=row.name, deterministic=True)
            print(row.name, language, "ran", flush=True)


def main() -> int:
    """Run the tools one after the other; 0 if both found nothing."""
    sys.path.insert(0, str(ROOT))
    import workbench

    names = [row.name for row in workbench.KERNELS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: both")
    parser.add_argument("--kernel", choices=names, action="append", help="default: all")
    parser.add_argument("--launch", action="store_true", help="only launch; under a sanitizer")
    arguments = parser.parse_args()
    chosen = arguments.kernel or names
    if arguments.launch:
        launch_all(chosen)
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    worst = 0
    for tool in arguments.tool or TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERROR), sys.executable,
                   __file__, "--launch"]  # fmt: skip
        for name in chosen:
            command += ["--kernel", name]
        code = subprocess.run(command, check=False).returncode
        print(f"{tool}: {'clean' if code == 0 else f'exit code {code}'}", flush=True)
        worst = max(worst, abs(code))
    return worst


if __name__ == "__main__":
    sys.exit(main())
