"""The disk cache of compiled kernels: one file an entry, whole or not there.

An entry is a line of JSON, with the kernel's symbol and a checksum, and the cubin. Several
processes may read and write at once: an entry appears in one atomic step, and one that is damaged
counts as missing and is replaced.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

LIMIT_BYTES = 256 * 2**20
SUFFIX = ".kernel"  # nothing else in the folder is ours to touch
ABANDONED_SECONDS = 3600  # a file still being written after this has lost its writer


def folder() -> Path:
    """Folder of the disk cache: ``WORKBENCH_CACHE_DIR``, or under the user's cache directory."""
    chosen = os.environ.get("WORKBENCH_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kernel-workbench"


def read(name: str) -> tuple[bytes, str] | None:
    """A cached (cubin, symbol), or None; an entry that is damaged counts as missing."""
    path = folder() / (name + SUFFIX)
    try:
        data = path.read_bytes()
        os.utime(path)  # the least recently used are the first to go
    except OSError:
        return None
    head, _, code = data.partition(b"\n")
    try:
        header = json.loads(head)
        if header["sha256"] == _checksum(code, header["symbol"]):
            return code, header["symbol"]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # falls through to a rebuild, which replaces the entry
    return None


def _checksum(code: bytes, symbol: str) -> str:
    return hashlib.sha256(symbol.encode() + b"\n" + code).hexdigest()


def write(name: str, code: bytes, symbol: str) -> None:
    """Add an entry in one atomic step, so that no reader ever sees half of it."""
    place = folder()
    header = json.dumps({"symbol": symbol, "sha256": _checksum(code, symbol)})
    temporary = None
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=place, prefix=".new-", suffix=SUFFIX, delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(header.encode() + b"\n" + code)
        temporary.replace(place / (name + SUFFIX))
        temporary = None
        _trim(place)
    except OSError as error:
        _warn(str(place), str(error))
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@functools.cache
def _warn(place: str, reason: str) -> None:
    warnings.warn(
        f"the kernel cache {place} cannot be written ({reason}): kernels are compiled anew in "
        "every process; WORKBENCH_CACHE_DIR names another folder",
        RuntimeWarning,
        stacklevel=2,
    )


def _entries(place: Path) -> list[tuple[float, int, Path]]:
    """(last use, bytes, path) of every entry; what other processes write or remove is skipped."""
    entries = []
    for path in place.glob(f"*{SUFFIX}"):
        try:
            status = path.stat()
        except OSError:
            continue
        abandoned = time.time() - status.st_mtime > ABANDONED_SECONDS
        if abandoned or not path.name.startswith(".new-"):
            entries.append((status.st_mtime, status.st_size, path))
    return sorted(entries)


def _trim(place: Path) -> None:
    entries = _entries(place)
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if total <= LIMIT_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def usage() -> tuple[int, int]:
    """(entries, bytes) of the disk cache."""
    place = folder()
    entries = _entries(place) if place.is_dir() else []
    return len(entries), sum(size for _, size, _ in entries)


def clear() -> int:
    """Remove every entry of the disk cache; the number of entries removed."""
    place = folder()
    entries = _entries(place) if place.is_dir() else []
    for _, _, path in entries:
        path.unlink(missing_ok=True)
    return len(entries)
