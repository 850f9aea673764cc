"""The disk cache: whole entries only, safe for many processes, bounded, touching nothing else."""

import os
import stat
import subprocess
import sys
import warnings

import pytest

from workbench import cache


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(folder))
    return folder


def test_an_entry_comes_back_as_it_was_written(place):
    code = bytes(range(256)) * 3 + b"\n\n"
    assert cache.read("a" * 64) is None
    cache.write("a" * 64, code, "kernel_symbol")
    assert cache.read("a" * 64) == (code, "kernel_symbol")
    assert cache.usage()[0] == 1
    if os.name == "posix":
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def damaged_versions(data):
    yield "empty", b""
    yield "half", data[: len(data) // 2]
    yield "no newline", data.replace(b"\n", b" ")
    yield "a flipped bit of the code", data[:-1] + bytes([data[-1] ^ 1])
    yield "another symbol", data.replace(b"kernel_symbol", b"kernel_symbox")
    yield "no header", b"[]\n" + data
    yield "a header of another kind", b'{"sha256": 3, "symbol": null}\n' + data


def test_a_damaged_entry_counts_as_missing_and_is_replaced(place):
    cache.write("b" * 64, b"code", "kernel_symbol")
    (path,) = place.iterdir()
    whole = path.read_bytes()
    for what, data in damaged_versions(whole):
        path.write_bytes(data)
        assert cache.read("b" * 64) is None, what
        cache.write("b" * 64, b"code", "kernel_symbol")
        assert cache.read("b" * 64) == (b"code", "kernel_symbol"), what


def test_clearing_removes_entries_and_nothing_else(place):
    cache.write("c" * 64, b"code", "s")
    keep = place / "holiday.jpg"
    keep.write_bytes(b"picture")
    fresh = place / ".new-abc.kernel"  # another process is writing it
    fresh.write_bytes(b"half")
    abandoned = place / ".new-def.kernel"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    assert cache.clear() == 2
    assert sorted(p.name for p in place.iterdir()) == [".new-abc.kernel", "holiday.jpg"]


def test_the_least_recently_used_go_first(place, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT_BYTES", 2500)
    for i, name in enumerate("abc"):
        cache.write(name * 64, bytes(1000), "s")
        if name != "c":
            os.utime(place / (name * 64 + cache.SUFFIX), (1000 + i, 1000 + i))
    assert cache.read("a" * 64) is None
    assert cache.read("b" * 64) is not None
    assert cache.read("c" * 64) is not None


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(blocker / "cache"))
    with pytest.warns(RuntimeWarning, match="WORKBENCH_CACHE_DIR"):
        cache.write("d" * 64, b"code", "s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("d" * 64, b"code", "s")
    assert cache.read("d" * 64) is None


WRITER = """
import sys
from workbench import cache
for i in range(200):
    cache.write("e" * 64, bytes([i]) * 10_000, "s")
    found = cache.read("e" * 64)
    assert found is not None and len(found[0]) == 10_000 and len(set(found[0])) == 1
"""


def test_many_processes_write_and_read_at_once(place):
    env = os.environ | {"WORKBENCH_CACHE_DIR": str(place)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER], env=env) for _ in range(3)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    assert [p.suffix for p in place.iterdir()] == [cache.SUFFIX]
