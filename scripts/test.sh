#!/usr/bin/env bash
# Checks everything: formatting, lint, types and tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Without a driver the toolchain still comes along: every kernel is compiled without a GPU.
toolchain=$(driver_toolchain)
prepare_environment "${toolchain:-simulator}" plot onnx dev
cd "$root"

say "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .

say "clang-format"
"$programs/clang-format" --dry-run --Werror cuda_src/*.cu cuda_src/*.cuh tests/*.cu

say "mypy"
"$python" -m mypy

say "pytest${*:+ $*}"
exec "$python" -m pytest --numprocesses auto --maxprocesses 8 "$@"
