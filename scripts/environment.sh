# Sourced by demo.sh and test.sh: makes .venv at the repository's root and installs the package in it.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/.workbench-installed # what was installed, for which pyproject.toml, where

say() { printf '\n==> %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# cuda13, cuda12 or nothing: the newest toolchain that the NVIDIA driver here can run.
driver_toolchain() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) ||
    return 0
  driver=${driver%%.*}
  case $driver in '' | *[!0-9]*) return 0 ;; esac
  if [ "$driver" -ge 580 ]; then # the first driver branch of CUDA 13
    echo cuda13
  elif [ "$driver" -ge 525 ]; then # the first one of CUDA 12
    echo cuda12
  fi
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if supported "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 found; name one with PYTHON=/path/to/python3.12"
}

# Windows (Git Bash) keeps a venv's programs in Scripts, everybody else in bin.
find_venv_programs() {
  programs=$venv/bin
  if [ -d "$venv/Scripts" ]; then programs=$venv/Scripts; fi
  python=$programs/python
}

make_venv() {
  local base
  base=$(find_python)
  rm -rf "$venv"
  say "Making .venv with $("$base" --version) ($base)"
  "$base" -m venv "$venv" ||
    die "$base cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"
  find_venv_programs
}

# prepare_environment TOOLCHAIN EXTRA...: afterwards $python runs an environment that has them.
# TOOLCHAIN is cuda13, cuda12, simulator or '' for whatever is there. A second call with the same
# pyproject.toml installs nothing.
prepare_environment() {
  local toolchain=$1 key installed_key="" installed="" extra missing="" quiet
  shift
  find_venv_programs
  if ! { supported "$python" && "$python" -m pip --version >/dev/null 2>&1; }; then
    make_venv
  fi

  key="$root $("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
    "$root/pyproject.toml")"
  if [ -f "$stamp" ]; then
    { read -r installed_key && read -r installed; } <"$stamp" || true
  fi
  for extra in cuda13 cuda12 simulator; do
    case " $installed " in *" $extra "*)
      if [ -n "$toolchain" ] && [ "$toolchain" != "$extra" ]; then
        say "The environment has the toolchain '$extra', this machine wants '$toolchain'"
        make_venv
        installed_key="" installed=""
      fi
      ;;
    esac
  done

  for extra in ${toolchain:+"$toolchain"} "$@"; do
    case " $installed " in *" $extra "*) ;; *) missing="$missing $extra" ;; esac
  done
  if [ "$installed_key" = "$key" ] && [ -z "$missing" ]; then
    say "The environment in .venv is up to date (${installed:-no extras})"
    return
  fi
  installed=$(echo $installed $missing) # unquoted: one space between the words
  say "Installing kernel-workbench${installed:+[${installed// /,}]} into .venv (once; some minutes on a slow line)"
  rm -f "$stamp"
  # A person sees pip's progress, a log only its errors.
  if [ -t 1 ]; then quiet=""; else quiet=-qq; fi
  "$python" -m pip install $quiet --disable-pip-version-check \
    --editable "$root${installed:+[${installed// /,}]}"
  printf '%s\n%s\n' "$key" "$installed" >"$stamp"
}
