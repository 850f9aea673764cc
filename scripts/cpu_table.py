"""Compare attention on the CPU with naive NumPy attention: `python scripts/cpu_table.py`.

Naive attention is matmul, softmax, matmul with the whole N x N matrix in memory; its backward gets
the softmax of its forward for free, and its causal mask hides what was computed. Both take turns,
so that whatever else the machine does slows both alike. The speed-up is the ratio of the shortest
times; beside it stands the median of the ratios of the rounds. Errors are the largest ones over the
first head against float64, relative to the largest value.

    python scripts/cpu_table.py --rows "forward.* 1024"     only some rows, by a pattern
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

import workbench
from workbench import reference
from workbench.cpu import threads

HEADS, HEAD_DIM = 8, 64


class Row(NamedTuple):
    """A line of the table, with the speed-up that it must reach."""

    op: str
    seqlen: int
    option: str
    bar: float

    @property
    def title(self) -> str:
        """What the row measures."""
        return f"{self.op} {self.seqlen} {self.option}".rstrip()


ROWS = [
    Row("forward", 197, "", 1.2),
    Row("forward", 1024, "", 2.0),
    Row("forward", 1024, "causal", 5.0),
    Row("forward", 4096, "", 2.0),
    Row("forward", 4096, "causal", 5.0),
    Row("backward", 1024, "", 1.4),
    Row("backward", 1024, "causal", 1.4),
    Row("backward", 4096, "", 2.0),
    Row("backward", 4096, "causal", 5.0),
    *(
        Row(op, 2048, option, 1.0)
        for op in ("forward", "backward")
        for option in ("mask", "bias", "window", "softcap", "grouped")
    ),
]


class Case:
    """The arrays of a row, and the functions that are compared."""

    def __init__(self, row: Row) -> None:
        rng = np.random.default_rng(0)
        n = row.seqlen
        self.group = 4 if row.option == "grouped" else 1

        def tensor(heads: int) -> np.ndarray:
            return rng.standard_normal((1, heads, n, HEAD_DIM), dtype=np.float32)

        self.q, self.dout = tensor(HEADS), tensor(HEADS)
        self.k, self.v = tensor(HEADS // self.group), tensor(HEADS // self.group)
        self.scale = np.float32(HEAD_DIM**-0.5)
        self.softcap, self.bias, visible = np.float32(0), None, None
        self.options: dict[str, Any] = {}
        if row.option == "causal":
            visible = np.tri(n, dtype=bool)
            self.options["causal"] = True
        elif row.option == "window":
            visible = np.tri(n, k=256, dtype=bool) & ~np.tri(n, k=-257, dtype=bool)
            self.options["window"] = (256, 256)
        elif row.option == "mask":
            visible = rng.random((1, HEADS, n, n)) < 0.8
            self.options["mask"] = visible
        elif row.option == "bias":
            self.bias = rng.standard_normal((1, HEADS, n, n), dtype=np.float32)
            self.options["bias"] = self.bias
        elif row.option == "softcap":
            self.softcap = np.float32(20)
            self.options["softcap"] = 20.0
        self.visible = visible
        self.hidden = None if visible is None else ~visible
        self.known = self.ours_forward()
        self.naive_known: tuple[Any, ...] = ()

    def ours_forward(self) -> tuple[np.ndarray, ...]:
        """The out and lse."""
        return workbench.attention(
            self.q, self.k, self.v, backend="cpu", return_lse=True, **self.options
        )

    def ours_backward(self) -> tuple[np.ndarray, ...]:
        """The dq, dk and dv."""
        return workbench.attention_backward(
            self.dout, self.q, self.k, self.v, *self.known, backend="cpu", **self.options
        )[:3]

    def naive_forward(self) -> tuple[np.ndarray, ...]:
        """The out, and what the backward gets for free."""
        k, v = self._repeat(self.k), self._repeat(self.v)
        s = self.q @ k.swapaxes(-1, -2)
        s *= self.scale
        tanh = None
        if self.softcap:
            s /= self.softcap
            tanh = np.tanh(s, out=s)
            s = tanh * self.softcap
        if self.bias is not None:
            s += self.bias
        if self.hidden is not None:
            np.copyto(s, np.float32(-np.inf), where=self.hidden)
        s -= s.max(axis=-1, keepdims=True)
        p = np.exp(s, out=s)
        p /= p.sum(axis=-1, keepdims=True)
        return p @ v, p, tanh

    def naive_backward(self) -> tuple[np.ndarray, ...]:
        """The dq, dk and dv."""
        _, p, tanh = self.naive_known
        k, v = self._repeat(self.k), self._repeat(self.v)
        dv = p.swapaxes(-1, -2) @ self.dout
        ds = self.dout @ v.swapaxes(-1, -2)
        ds -= (ds * p).sum(axis=-1, keepdims=True)
        ds *= p
        if tanh is not None:
            ds *= 1 - tanh * tanh
        ds *= self.scale
        return ds @ k, self._sum(ds.swapaxes(-1, -2) @ self.q), self._sum(dv)

    def _repeat(self, x: np.ndarray) -> np.ndarray:
        return x if self.group == 1 else np.repeat(x, self.group, axis=1)

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return x if self.group == 1 else x.reshape(1, -1, self.group, *x.shape[2:]).sum(axis=2)

    def exact(self, op: str) -> list[np.ndarray]:
        """The first key head's results in float64."""
        heads = slice(0, self.group)

        def first(x: np.ndarray | None) -> np.ndarray | None:
            return x[:, heads] if x is not None and x.ndim == 4 else x

        keywords: dict[str, Any] = {
            "visible": first(self.visible),
            "bias": first(self.bias),
            "scale": float(self.scale),
            "softcap": float(self.softcap),
        }
        q, k, v = self.q[:, heads], self.k[:, :1], self.v[:, :1]
        if op == "forward":
            return [reference.forward(q, k, v, **keywords)[0]]
        return list(reference.backward(self.dout[:, heads], q, k, v, **keywords)[:3])


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def worst_error(results: tuple[np.ndarray, ...], exact: list[np.ndarray]) -> float:
    errors = (
        np.abs(x[:, : want.shape[1]] - want).max() / np.abs(want).max()
        for x, want in zip(results, exact, strict=False)
    )
    return float(max(errors))


def measure(row: Row, seconds: float) -> bool:
    """Print a row; say whether it reaches its bar."""
    case = Case(row)
    ours, naive = getattr(case, f"ours_{row.op}"), getattr(case, f"naive_{row.op}")
    if row.op == "backward":
        case.naive_known = case.naive_forward()
    exact = case.exact(row.op)
    errors = [worst_error(function(), exact) for function in (ours, naive)]
    del exact
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append((timed(ours), timed(naive)))
    best_ours, best_naive = (min(column) for column in zip(*times, strict=True))
    speed = best_naive / best_ours
    median = statistics.median(n / o for o, n in times)
    print(
        f"{row.title:24}{best_ours * 1e3:9.2f}{best_naive * 1e3:10.2f}{speed:8.2f}{median:8.2f}"
        f"{row.bar:6.1f}  {'ok  ' if speed >= row.bar else 'LESS'}"
        f"{errors[0]:9.1e}{errors[1]:9.1e}{len(times):6}",
        flush=True,
    )
    return speed >= row.bar


def described(library: threads.Blas) -> str:
    return f"BLAS kernels for {library.core or 'an unknown CPU'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", default="", help="only rows whose title has this pattern")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for each row; at least 3 rounds"
    )
    arguments = parser.parse_args()
    numpy_blas = threads.Blas([ctypes.CDLL(np._core._multiarray_umath.__file__)])
    print(f"float32, batch 1, {HEADS} heads, head_dim {HEAD_DIM}")
    print(f"ours:  {threads.available()} threads of our own; SciPy's {described(threads.blas())}")
    print(f"naive: {numpy_blas.get_threads()} threads in BLAS; NumPy's {described(numpy_blas)}")
    print(
        f"\n{'':24}{'ours ms':>9}{'naive ms':>10}{'faster':>8}{'median':>8}{'bar':>6}"
        f"{'':6}{'error':>9}{'naive':>9}{'rounds':>7}"
    )
    rows = [row for row in ROWS if re.search(arguments.rows, row.title)]
    reached = [measure(row, arguments.seconds) for row in rows]
    print(f"\n{sum(reached)} of {len(reached)} rows reach their bar")


if __name__ == "__main__":
    main()
