"""Fast exact attention on the CPU: Numba kernels over tiles, BLAS inside, memory linear in N.

The four functions of a host backend fill the outputs of a checked call. Small problems take a plain
NumPy path (`dense`) that neither imports Numba nor compiles anything; the rest goes through the
kernels (`kernels`) on several threads (`threads`). Numba compiles a kernel the first time that it
is needed, which takes some seconds, and keeps it in its cache.

The same inputs and number of threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.cpu import dense

if TYPE_CHECKING:
    from workbench.cpu.kernels import Scores, Tiles
    from workbench.problem import Arrays, HostArray, Problem

# Multiply-adds of both matrix products below which NumPy is done before the threads have begun.
DENSE_WORK = 1 << 21

# OpenBLAS has kernels for small products that pack nothing, on CPUs with AVX-512: up to a million
# multiply-adds. Measured there: 110 GFLOP/s a core, against 80 with the usual kernels at this size.
# The other kernels reach their best, 95 GFLOP/s on the same CPU, with larger tiles only.
_SMALL_PRODUCT = 1_000_000
_SMALL_ROWS = {"attention": 32, "attention_backward": 48}
_LARGE_TILE = 256, 256
_CORES_WITH_SMALL_PRODUCTS = {"SkylakeX", "Cooperlake", "SapphireRapids"}


def attention(problem: Problem, arrays: Arrays) -> None:
    """Fill ``arrays.out`` and ``arrays.lse``."""
    if arrays.lse.size == 0 or problem.seqlen_k == 0:
        arrays.out[...], arrays.lse[...] = 0, -np.inf
        return
    if _is_small(problem):
        dense.forward(problem, arrays)
        return
    from workbench.cpu import kernels, threads

    real = problem.acc_dtype
    tiles = _tiles(problem, threads.available())
    items = problem.batch * problem.heads_q * -(-problem.seqlen_q // tiles.item_rows)
    out = _target(arrays.out, real)
    _run(
        kernels.forward,
        real,
        (*_ready(real, arrays.q, arrays.k, arrays.v), out, arrays.lse),
        (_scores(problem, arrays), tiles),
        items,
    )
    _deliver(out, arrays.out)


def attention_backward(problem: Problem, arrays: Arrays) -> None:
    """Fill ``arrays.dq``, ``dk`` and ``dv``, and ``dbias`` if there is one."""
    if arrays.lse.size == 0 or problem.seqlen_k == 0:
        for gradient in (arrays.dq, arrays.dk, arrays.dv, arrays.dbias):
            if gradient is not None:
                gradient[...] = 0
        return
    if _is_small(problem):
        dense.backward(problem, arrays)
        return
    from workbench.cpu import kernels, threads

    real = problem.acc_dtype
    number = threads.available()
    tiles = _tiles(problem, number)
    q, k, v, out, dout = _ready(real, arrays.q, arrays.k, arrays.v, arrays.out, arrays.dout)
    dlse = np.empty((0, 0, 0), real) if arrays.dlse is None else arrays.dlse
    known = (q, k, v, out, arrays.lse, dout, dlse)
    how = (_scores(problem, arrays), tiles)

    # An item is a key head. Where there are few of them, each is split over its key tiles, and
    # every part has a dq of its own.
    heads = problem.batch * problem.heads_kv
    parts = min(-(-2 * number // heads), -(-problem.seqlen_k // tiles.cols))
    dq, dk, dv = (_target(x, real) for x in (arrays.dq, arrays.dk, arrays.dv))
    dq_parts = dq[None] if parts == 1 else np.empty((parts, *dq.shape), real)
    _run(kernels.backward, real, (*known, dq_parts, dk, dv), how, heads * parts)
    if parts > 1:
        np.add.reduce(dq_parts, axis=0, out=dq)
    for filled, target in ((dq, arrays.dq), (dk, arrays.dk), (dv, arrays.dv)):
        _deliver(filled, target)

    if arrays.dbias is not None:
        dbias = _target(arrays.dbias, real)
        _run(kernels.bias_gradient, real, (*known, dbias), how, dbias.size)
        _deliver(dbias, arrays.dbias)


def vector_add(a: HostArray, b: HostArray, out: HostArray) -> None:
    """Fill `out` with a + b."""
    np.add(a, b, out=out)


def merge_attention(
    outs: Sequence[HostArray], lses: Sequence[HostArray], out: HostArray, lse: HostArray
) -> None:
    """Fill `out` and `lse` with attention over all keys, from results over parts of them.

    A part without keys, (0, -inf), leaves the others as they are to the bit: it adds -0, and the
    logarithm of a sum of 1 is 0. CuPy arrays are welcome.
    """
    top = lses[0]
    for part_lse in lses[1:]:
        top = np.maximum(top, part_lse)
    top = np.where(top == -np.inf, 0, top)  # nobody has keys: (-inf) - (-inf) would be NaN
    weights = [np.exp(part_lse - top) for part_lse in lses]
    total = sum(weights[1:], weights[0])
    empty = total == 0
    with np.errstate(divide="ignore"):
        merged_lse = np.where(empty, -np.inf, top + np.log(total))
    share = np.where(empty, 1, total)
    merged: Any = -0.0
    for part, weight in zip(outs, weights, strict=True):
        weight = (weight / share)[..., None]
        merged = merged + np.where(weight == 0, -0.0, weight * part.astype(lse.dtype))
    out[...] = np.where(empty[..., None], 0, merged)
    lse[...] = merged_lse


def layer_norm(x: HostArray, weight: HostArray, bias: HostArray, eps: float) -> HostArray:
    """Rows of mean 0 and variance 1, in their learned range, from a contiguous float32 matrix."""
    from workbench.cpu import kernels

    out = np.empty_like(x)
    _share(kernels.layer_norm, len(x), x, weight, bias, eps, out)
    return out


def activate(
    x: HostArray, bias: HostArray, width: int, gate: tuple[float, float] | None = None
) -> None:
    """Add a bias to a contiguous float32 matrix and bend its first `width` columns, in place.

    The step of an MLP between its products: by the exact GELU, or with ``gate = (slope, cubic)`` by
    x * sigmoid(slope * x + cubic * x^3).
    """
    from workbench.cpu import kernels

    slope, cubic = gate or (0.0, 0.0)
    _share(kernels.activate, len(x), x, bias, width, gate is None, slope, cubic)


# ------------------------------------------------------------------------------ from call to kernel


def _is_small(problem: Problem) -> bool:
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return pairs * (problem.head_dim + problem.head_dim_v) <= DENSE_WORK


def _tiles(problem: Problem, number: int) -> Tiles:
    """Tile sizes for a number of threads: long tiles, all about equally full."""
    from workbench.cpu import kernels, threads

    rows, cols = _SMALL_ROWS[problem.op], 960
    cols = min(cols, _SMALL_PRODUCT // (rows * max(problem.head_dim, problem.head_dim_v)))
    if cols < 40 or threads.blas().core not in _CORES_WITH_SMALL_PRODUCTS:
        rows, cols = _LARGE_TILE
    rows = _even(problem.seqlen_q, rows, 1)
    cols = min(_even(problem.seqlen_k, cols, 16), cols)

    # An item's rows share the transposed keys, so it has many of them; but every thread shall have
    # some four items, or two if they were short otherwise.
    all_rows = problem.batch * problem.heads_q * problem.seqlen_q
    item_rows = min(1024, max(all_rows // (4 * number), min(256, all_rows // (2 * number)), rows))
    return kernels.Tiles(_even(problem.seqlen_q, item_rows, rows), rows, cols)


def _even(length: int, most: int, multiple: int) -> int:
    """Size of the pieces, a multiple, if a length is cut into as few as `most` allows."""
    pieces = -(-length // most)
    return -(-length // (pieces * multiple)) * multiple


def _scores(problem: Problem, arrays: Arrays) -> Scores:
    from workbench.cpu import kernels

    factor = problem.scale * kernels.LOG2E
    if problem.softcap:
        factor *= 2 / problem.softcap

    def window(end: int | None) -> int:
        return kernels.OPEN_WINDOW if end is None else min(end, kernels.OPEN_WINDOW)

    def lengths(given: HostArray | None, seqlen: int) -> HostArray:
        full = np.full(problem.batch, seqlen)
        return full if given is None else np.minimum(given, full)

    def described(x: HostArray | None) -> tuple[int, tuple[int, int, int, int]]:
        if x is None:
            return 0, (0, 0, 0, 0)
        batch, head, row, col = (stride // x.itemsize for stride in x.strides)
        return x.__array_interface__["data"][0], (batch, head, row, col)

    return kernels.Scores(
        factor,
        problem.softcap * kernels.LOG2E,
        problem.scale,
        window(problem.window_left),
        window(problem.window_right),
        problem.top_left,
        lengths(arrays.q_lengths, problem.seqlen_q),
        lengths(arrays.kv_lengths, problem.seqlen_k),
        *described(arrays.mask),
        *described(arrays.bias),
    )


def _ready(real: str, *inputs: HostArray) -> list[HostArray]:
    """Contiguous in the accumulator's dtype: as they are, or a copy."""
    return [np.ascontiguousarray(x, real) for x in inputs]


def _target(output: HostArray, real: str) -> HostArray:
    """Where a kernel writes an output: the array itself, or one in a kernel's form."""
    if output.dtype == real and output.flags.c_contiguous:
        return output
    return np.empty(output.shape, real)


def _deliver(filled: HostArray, output: HostArray) -> None:
    if filled is not output:
        output[...] = filled


def _run(
    kernel: Callable[..., None],
    real: str,
    arrays: tuple[HostArray, ...],
    how: tuple[Scores, Tiles],
    items: int,
) -> None:
    _share(kernel, items, *arrays, *how, real=real)


def _share(kernel: Callable[..., None], items: int, *arguments: Any, real: str = "float32") -> None:
    """Run a kernel on as many threads as there are, or items for them."""
    from workbench.cpu import kernels, threads

    compiled = kernels.load(kernel, real)
    counter = np.zeros(1, np.int64)  # the next item that nobody has taken
    threads.share(lambda: compiled(*arguments, counter), min(threads.available(), items))
