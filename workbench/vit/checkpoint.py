"""The tensors of a checkpoint: .safetensors, whole or in shards with an index, and .npz.

A checkpoint comes from somewhere else and is not trusted: every file's table of contents is checked
before a tensor is read, and what is wrong is said with the name of the file and of the tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - gives NumPy the bfloat16 that safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
FLOATING = ("F16", "BF16", "F32", "F64")  # safetensors' names
MOST_HEADER = 32 << 20  # bytes: a table of contents of a quarter of a million tensors


class Entry(NamedTuple):
    """A tensor in its file."""

    file: Path
    shape: tuple[int, ...]
    floating: bool


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a checkpoint, which lie in their files until they are asked for.

    Attributes
    ----------
    path : Path
        The file or the folder, for messages.
    entries : dict of str to Entry
        All of them, by name.
    """

    path: Path
    entries: Mapping[str, Entry]

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors of these names."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        found: dict[str, np.ndarray[Any, Any]] = {}
        for file, here in by_file.items():
            if file.suffix == ".npz":
                with _readable(file), np.load(file, allow_pickle=False) as archive:
                    found |= {name: archive[name] for name in here}
            else:
                with _readable(file), safe_open(str(file), framework="numpy") as opened:
                    found |= {name: opened.get_tensor(name) for name in here}
        return found


def open_checkpoint(path: Path) -> Tensors:
    """Find the weights in a folder, or take the file, and read its table of contents.

    Raises
    ------
    FileNotFoundError
        There are no weights.
    ValueError
        A file is damaged, or there is more than one that could be meant.
    """
    if path.is_dir():
        path = _find(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.name.endswith(".json"):
        return Tensors(path, _read_index(path))
    reader = {".safetensors": _read_safetensors, ".npz": _read_npz}.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: weights are read from .safetensors and .npz files")
    return Tensors(path, reader(path))


def read_json(file: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{file}: must hold an object, got {type(entries).__name__}")
    return entries


def _find(folder: Path) -> Path:
    for name in ("model.safetensors", INDEX):
        if (folder / name).is_file():
            return folder / name
    files = sorted(file for suffix in ("safetensors", "npz") for file in folder.glob(f"*.{suffix}"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(
            f"{folder}: which file is meant? It holds {', '.join(file.name for file in files)}"
        )
    pickled = sorted(f.name for suffix in ("bin", "pt", "pth") for f in folder.glob(f"*.{suffix}"))
    hint = f"; {', '.join(pickled)} could run code when read, and is not" if pickled else ""
    raise FileNotFoundError(f"{folder / 'model.safetensors'}: no such file{hint}")


@contextmanager
def _readable(file: Path) -> Any:
    """Say which file it is that cannot be read."""
    try:
        yield
    except (
        SafetensorError,
        OSError,
        EOFError,
        KeyError,
        MemoryError,
        NotImplementedError,
        RuntimeError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        kind = "an .npz" if file.suffix == ".npz" else "a safetensors"
        raise ValueError(f"{file}: not {kind} file that can be read ({error})") from error


# ------------------------------------------------------------------------------------ safetensors


def _read_safetensors(file: Path) -> dict[str, Entry]:
    with _readable(file):
        _check_header(file)
        with safe_open(str(file), framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Entry(file, tuple(s.get_shape()), s.get_dtype() in FLOATING)
                for name, s in slices.items()
            }


def _check_header(file: Path) -> None:
    """Refuse what the safetensors package lets pass: names that come twice, a header of any size.

    It checks the rest when it opens the file: offsets that overlap, leave gaps or do not fit.
    """
    with file.open("rb") as stream:
        first = stream.read(8)
        size = int.from_bytes(first, "little")
        rest = os.fstat(stream.fileno()).st_size - 8
        if len(first) < 8 or size > min(rest, MOST_HEADER):
            raise OSError(f"a header of {size} bytes, in a file of {rest + 8}")
        header = stream.read(size)

    def object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise OSError(f"{twice!r} comes twice")
        return found

    try:
        json.loads(header, object_pairs_hook=object_without_repeats)
    except (ValueError, RecursionError) as error:
        raise OSError(f"its header is not JSON: {error}") from error


def _read_index(file: Path) -> dict[str, Entry]:
    """The tensors of all shards that an index names."""
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ValueError(f"{file}: weight_map must be an object of tensor and file names")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{file}: {name!r} is not the name of a .safetensors file beside it")
    entries: dict[str, Entry] = {}
    for name in names:
        shard = file.parent / name
        if not shard.is_file():
            raise FileNotFoundError(f"{shard}: no such file, but {file.name} names it")
        found = _read_safetensors(shard)
        for tensor in found:
            if shards.get(tensor) != name:
                raise ValueError(f"{shard}: tensor {tensor!r} is not in it by {file.name}")
        entries |= found
    for tensor, name in shards.items():
        if tensor not in entries:
            raise ValueError(f"{file.parent / name}: tensor {tensor!r} is missing")
    return entries


# -------------------------------------------------------------------------------------------- npz


def _read_npz(file: Path) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    with _readable(file), zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in entries:
                raise ValueError(f"{file}: {name!r} comes twice")
            with archive.open(member) as stream:
                shape, dtype, start = _npy_header(file, name, stream)
            # What follows is read in one go: its size must be that of the array.
            if member.file_size - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"{file}: tensor {name!r} has {member.file_size - start} bytes, but is said to "
                    f"be {shape} of {dtype}"
                )
            entries[name] = Entry(file, shape, dtype.kind == "f")
    return entries


def _npy_header(file: Path, name: str, stream: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and size of the header of one array."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(stream)
        shape, _, dtype = readers[version](stream)
    except (ValueError, KeyError, SyntaxError) as error:
        raise ValueError(f"{file}: tensor {name!r} is no array ({error})") from error
    if dtype.hasobject:
        raise ValueError(f"{file}: tensor {name!r} holds pickled objects, which are not read")
    return shape, dtype, stream.tell()
