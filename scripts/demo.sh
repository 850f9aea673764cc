#!/usr/bin/env bash
# Installs the workbench into .venv and runs its demo; arguments go to `workbench demo`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

toolchain=$(driver_toolchain)
if [ -n "$toolchain" ]; then
  say "NVIDIA driver found: the GPU backends come with the toolchain '$toolchain'"
else
  say "No NVIDIA driver found: the demo runs on the CPU, the kernels of both languages in the simulator"
fi
prepare_environment "${toolchain:-simulator}"

say "workbench demo${*:+ $*}"
exec "$python" -m workbench.cli demo "$@"
