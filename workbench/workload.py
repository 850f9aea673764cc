"""Problems to compare kernels on: their sizes, their inputs, their work and their right answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench import reference
from workbench.problem import DTYPES, Array

ORACLE_FLOPS = 2e10  # about a second: the oracle checks the heads that this buys, one at least
ORACLE_ELEMENTS = 2**22  # of vector_add, at either end
ORACLE_ROWS = 1024  # rows of one head at a time
DRAWN_ELEMENTS = 2**24 + 1  # of each input; odd, so that repetitions do not line up with tiles


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem to compare backends and kernels on.

    Attributes
    ----------
    window : tuple, optional
        Keys before and after a query's position that it sees; None is open.
    size : int
        Elements of `vector_add`; the other sizes are those of attention.
    """

    op: str
    dtype: str = "float32"
    batch: int = 1
    heads_q: int = 8
    heads_kv: int = 8
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    backward: bool = False
    size: int = 2**24

    @property
    def title(self) -> str:
        """One line for the head of a table."""
        if self.op == "vector_add":
            return f"vector_add, {self.size:,} elements, {self.dtype}"
        parts = [f"attention {'backward' if self.backward else 'forward'}", f"batch {self.batch}"]
        grouped = "" if self.heads_q == self.heads_kv else f"/{self.heads_kv}"
        parts.append(f"heads {self.heads_q}{grouped}")
        same = self.seqlen_q == self.seqlen_k
        parts.append(f"seqlen {self.seqlen_q}" + ("" if same else f"/{self.seqlen_k}"))
        same = self.head_dim == self.head_dim_v
        parts.append(f"head_dim {self.head_dim}" + ("" if same else f"/{self.head_dim_v}"))
        parts.append(self.dtype)
        if self.causal:
            parts.append("causal")
        if self.window is not None:
            ends = ("all" if end is None else str(end) for end in self.window)
            parts.append(f"window {','.join(ends)}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        return ", ".join(parts)

    def asdict(self) -> dict[str, Any]:
        """Give the fields that mean something for the operation."""
        fields = dataclasses.asdict(self)
        if self.op == "vector_add":
            return {name: fields[name] for name in ("op", "dtype", "size")}
        del fields["size"]
        return fields

    @property
    def unit(self) -> str:
        """Of `Row.rate` and of the ceiling that it is compared with."""
        return "GB/s" if self.op == "vector_add" else "TFLOP/s"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attention` that choose the masking."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    def visible(self, start: int, stop: int) -> Array:
        """Which keys the query rows from `start` to `stop` see, as booleans; None for all."""
        if not self.causal and self.window is None:
            return None
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        position = np.arange(start, stop)[:, None] + (self.seqlen_k - self.seqlen_q)
        key = np.arange(self.seqlen_k)[None, :]
        seen = np.ones((stop - start, self.seqlen_k), dtype=bool)
        if left is not None:
            seen &= key >= position - left
        if right is not None:
            seen &= key <= position + right
        return seen

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that are not hidden."""
        total = 0
        for start, stop in _chunks(self.seqlen_q):
            seen = self.visible(start, stop)
            total += (stop - start) * self.seqlen_k if seen is None else int(seen.sum())
        return total

    @property
    def work(self) -> float:
        """Floating-point operations of one call, or bytes moved by a `vector_add`.

        Only visible pairs count: 2 (head_dim + head_dim_v) operations each in the forward, and five
        products instead of two in the backward.
        """
        if self.op == "vector_add":
            return 3.0 * self.size * DTYPES[self.dtype].itemsize
        a_pair = 2 * (self.head_dim + self.head_dim_v)
        if self.backward:
            a_pair = 2 * (3 * self.head_dim + 2 * self.head_dim_v)
        return float(self.batch * self.heads_q * self.pairs * a_pair)


# -------------------------------------------------------------------------------------- oracle


class Oracle:
    """The inputs of a workload, and the float64 results that every backend is measured against.

    The oracle walks over whole heads in chunks of rows, so that no more than a strip of a head's
    score matrix is in memory, and stops after about a second's worth of heads.
    """

    def __init__(self, workload: Workload, inputs: dict[str, Array] | None = None) -> None:
        self.workload = workload
        self.inputs = random_inputs(workload) if inputs is None else inputs
        self.checked = 0.0
        self._wanted: list[tuple[Any, dict[str, Array]]] = []
        if workload.op == "vector_add":
            ends = {(0, min(workload.size, ORACLE_ELEMENTS)),
                    (max(0, workload.size - ORACLE_ELEMENTS), workload.size)}  # fmt: skip
            for start, stop in ends:
                a, b = (self.inputs[name][start:stop].astype(np.float64) for name in ("a", "b"))
                self._wanted.append(((start, stop), {"out": a + b}))
            self.checked = min(1.0, 2 * ORACLE_ELEMENTS / workload.size)
            return
        heads = [(b, h) for b in range(workload.batch) for h in range(workload.heads_kv)]
        a_head = workload.work / max(1, len(heads))
        count = min(len(heads), max(1, int(ORACLE_FLOPS / max(1.0, a_head))))
        for batch, head in heads[:count]:
            self._wanted.append(((batch, head), self._results_of(batch, head)))
        self.checked = count / max(1, len(heads))

    def error(self, results: dict[str, Array]) -> float:
        """Measure the largest error over all results, each in units of its largest value."""
        errors = dict.fromkeys(results, (0.0, 0.0))
        for where, wanted in self._wanted:
            for name, want in wanted.items():
                got = _to_host(results[name][self._slices(where, name)]).astype(np.float64)
                difference, scale = errors[name]
                worst = float(np.abs(got - want).max(initial=0.0))
                if not np.isfinite(got).all():
                    worst = float("inf")
                errors[name] = (
                    max(difference, worst),
                    max(scale, float(np.abs(want).max(initial=0.0))),
                )
        return max((d / s if s else d for d, s in errors.values()), default=0.0)

    def _slices(self, where: Any, name: str) -> Any:
        if self.workload.op == "vector_add":
            return slice(*where)
        batch, head = where
        group = self.workload.heads_q // self.workload.heads_kv
        if name in ("k", "v", "dk", "dv"):
            return slice(batch, batch + 1), slice(head, head + 1)
        return slice(batch, batch + 1), slice(head * group, (head + 1) * group)

    def _results_of(self, batch: int, head: int) -> dict[str, Array]:
        workload = self.workload
        where = (batch, head)
        parts = {
            name: x[self._slices(where, name)].astype(np.float64) for name, x in self.inputs.items()
        }
        q, k, v = parts["q"], parts["k"], parts["v"]
        chunks: list[tuple[Array, ...]] = []
        for start, stop in _chunks(workload.seqlen_q):
            rows = (slice(None), slice(None), slice(start, stop))
            options: dict[str, Any] = {
                "visible": workload.visible(start, stop),
                "scale": workload.head_dim**-0.5,
                "softcap": workload.softcap,
            }
            if workload.backward:
                dq, dk, dv, _ = reference.backward(parts["dout"][rows], q[rows], k, v, **options)
                chunks.append((dq, dk, dv))
            else:
                chunks.append(reference.forward(q[rows], k, v, **options)[:1])
        along_rows = np.concatenate([chunk[0] for chunk in chunks], axis=2)
        if not workload.backward:
            return {"out": along_rows}
        # A key's gradient is a sum over the query rows.
        dk, dv = (sum(chunk[i] for chunk in chunks) for i in (1, 2))
        return {"dq": along_rows, "dk": dk, "dv": dv}


def random_inputs(workload: Workload, seed: int = 0) -> dict[str, Array]:
    """Draw the arrays that a workload takes, standard normal, in its dtype."""
    rng = np.random.default_rng(seed)
    if workload.op == "vector_add":
        shapes: dict[str, tuple[int, ...]] = {"a": (workload.size,), "b": (workload.size,)}
    else:
        batch, heads_q, heads_kv = workload.batch, workload.heads_q, workload.heads_kv
        shapes = {
            "q": (batch, heads_q, workload.seqlen_q, workload.head_dim),
            "k": (batch, heads_kv, workload.seqlen_k, workload.head_dim),
            "v": (batch, heads_kv, workload.seqlen_k, workload.head_dim_v),
        }
        if workload.backward:
            shapes["dout"] = (batch, heads_q, workload.seqlen_q, workload.head_dim_v)
    dtype = DTYPES[workload.dtype]

    def draw(shape: tuple[int, ...]) -> Array:
        # What is long repeats itself: a gigabyte of random numbers takes longer than the rest.
        some = rng.standard_normal(min(math.prod(shape), DRAWN_ELEMENTS), dtype=np.float32)
        return np.resize(some.astype(dtype), shape)

    return {name: draw(shape) for name, shape in shapes.items()}


def _chunks(rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, ORACLE_ROWS):
        yield start, min(start + ORACLE_ROWS, rows)


def _to_host(x: Array) -> Array:
    return x.get() if hasattr(x, "get") else x
