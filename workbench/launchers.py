"""From a problem to launches: tiles, grid, block, shared memory, workspaces and arguments.

One launcher a kernel, shared by both languages, so that a twin cannot differ in its launch. A
launcher only computes; `Plan` binds what it returned to a GPU, once, and then runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.compile import Entry, Signature
from workbench.problem import DTYPES, Problem, VectorProblem

# Bits of FEATURES, as in scores.cuh; the last two are for kernels that care.
RANGE, MASK, BIAS, SOFTCAP, ANY_SCALE, KV_LENGTHS = 1, 2, 4, 8, 16, 32
# Kibibytes of shared memory that a block may have; a GPU not listed has at least the last number.
SHARED_LIMITS = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227,
    "sm_100": 227, "sm_103": 227, "sm_110": 227, "sm_120": 99, "sm_121": 99,
}  # fmt: skip
OPEN_WINDOW = 2**30  # scores.cuh: a window without an end

AXES = ("batch", "head", "row", "col")
SIZES = (
    "int64 batch, int64 heads_q, int64 heads_kv, int64 seqlen_q, int64 seqlen_k, "
    "int64 head_dim, int64 head_dim_v, ScoreParams score"
)


def _signature(arrays: str, strided: str, *more: str) -> Signature:
    """Pointers, then the strides of those that have any, then the sizes, the score and the rest."""
    strides = "".join(f"Strides {name}_strides, " for name in strided.split())
    return Signature(", ".join((f"{arrays}, {strides}{SIZES}", *more)))


VECTOR_ADD = Signature("T* a, T* b, T* out, int64 size")
VECTOR_ADD_VEC4 = Signature(
    "T* a, T* b, T* out, int64 size, "
    "Shape4 shape, Strides4 a_strides, Strides4 b_strides, Strides4 out_strides"
)


FLASH_FWD = _signature("T* q, T* k, T* v, T* out, Acc* lse", "q k v out")
WITH_SCORES_FWD = _signature("T* q, T* k, T* v, T* out, Acc* lse, Acc* scores", "q k v out")
WITH_SCORES_DQ = _signature(
    "T* dout, T* q, T* k, T* v, Acc* lse, Acc* delta, Acc* p, Acc* ds, T* dq", "dout q k v dq"
)
WITH_SCORES_DKDV = _signature("T* dout, T* q, Acc* p, Acc* ds, T* dk, T* dv", "dout q dk dv")
FLASH_SIMT_BWD = _signature(
    "T* dout, T* q, T* k, T* v, Acc* lse, Acc* delta, Acc* dq_acc, int* turns, T* dq, T* dk, T* dv",
    "dout q k v dq dk dv",
)
DBIAS = Signature(
    "T* dout, T* q, T* k, T* v, Acc* lse, Acc* delta, Acc* dbias, Strides dout_strides, "
    f"Strides q_strides, Strides k_strides, Strides v_strides, Strides4 dbias_strides, {SIZES}"
)
FLASH_MMA_FWD = _signature(
    "T* q, T* k, T* v, T* out, Acc* lse, Acc* out_parts, Acc* lse_parts", "q k v out",
    "int64 heads_at_a_time",
)  # fmt: skip
FLASH_WGMMA_FWD = _signature(
    "TensorMap q_map, TensorMap k_map, TensorMap v_map, TensorMap out_map, "
    "Acc* lse, int* counter",
    "", "int64 heads_at_a_time",
)  # fmt: skip
FLASH_WGMMA_BWD = _signature(
    "TensorMap q_map, TensorMap k_map, TensorMap v_map, TensorMap dout_map, Acc* stats, "
    "Acc* dq_acc, int* turns, T* dk, T* dv",
    "dk dv", "int64 heads_at_a_time",
)  # fmt: skip
FLASH_MMA_BWD = _signature(
    "T* dout, T* q, T* k, T* v, Acc* lse, Acc* delta, Acc* dq_acc, int* turns, T* dk, T* dv",
    "dout q k v dk dv", "int64 heads_at_a_time",
)  # fmt: skip
ATTENTION_DQ = Signature(
    "Acc* dq_acc, int* turns, T* dq, Strides dq_strides, int64 batch, int64 heads_q, "
    "int64 seqlen_q, int64 head_dim, double scale"
)
ATTENTION_MERGE = Signature(
    "Acc* out_parts, Acc* lse_parts, T* out, Acc* lse, Strides out_strides, int64 batch, "
    "int64 heads_q, int64 seqlen_q, int64 head_dim_v, int64 splits"
)
ATTENTION_DELTA = Signature(
    "T* dout, T* out, Acc* dlse, Acc* delta, Strides dout_strides, Strides out_strides, "
    "int64 batch, int64 heads_q, int64 seqlen_q, int64 head_dim_v"
)
ATTENTION_ROW_STATS = Signature(
    "T* dout, T* out, Acc* lse, Acc* dlse, Acc* stats, int* turns, "
    "Strides dout_strides, Strides out_strides, "
    "int64 batch, int64 heads_q, int64 seqlen_q, int64 head_dim_v, double scale"
)


def cdiv(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a block may have on `arch`."""
    return SHARED_LIMITS.get(arch, SHARED_LIMITS["sm_121"]) * 1024


class NotWrittenError(Exception):
    """A launcher has no instance of its kernel for a problem; the message is a reason."""


class TensorMap(NamedTuple):
    """An argument that tells the copy engine of sm_90 about an array, and how many rows to copy."""

    parameter: str
    array: str
    rows: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: what to compile and how many threads to start.

    `values` are arguments that differ from those of the problem, by dotted name. A `dependent`
    launch may start before the one in front of it has ended: its kernel waits for that.
    """

    entry: Entry
    grid: int
    block: int
    shared_memory: int = 0
    values: tuple[tuple[str, int], ...] = ()
    maps: tuple[TensorMap, ...] = ()
    dependent: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that launches of one call share: fp32 or int32, never handed to the caller."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * (4 if self.dtype == "int32" else DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that a kernel does for one problem, in order."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()


def features(problem: Problem) -> int:
    """The FEATURES of a problem: an option that is off costs no instruction."""
    return (
        RANGE * problem.has_range
        | MASK * problem.has_mask
        | BIAS * problem.has_bias
        | SOFTCAP * (problem.softcap > 0)
    )


# ------------------------------------------------------------------------------- one a kernel


def _delta(problem: Problem) -> tuple[Launch, Workspace]:
    """delta = rowsum(dout * out) - dlse, which every backward begins with: a warp takes a row."""
    blocks = problem.batch * problem.heads_q * cdiv(problem.seqlen_q, 8)
    entry = Entry("attention_delta", "attention_delta", (("T", problem.dtype),), ATTENTION_DELTA)
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    return Launch(entry, blocks, 256), Workspace("delta", shape, problem.acc_dtype)


def _scores(problem: Problem, *names: str) -> tuple[Workspace, ...]:
    """Workspaces of one number a query and key."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return tuple(Workspace(name, shape, problem.acc_dtype) for name in names)


def _dbias(problem: Problem) -> tuple[Launch, ...]:
    """The bias's gradient, if it was asked for: a block takes a tile of it."""
    if not problem.return_dbias:
        return ()
    constants = _matmul_constants(problem)
    block = dict(constants)["BLOCK"]
    # 0 where the bias was broadcast; a problem that has no arrays yet stands for a whole bias.
    along = dict(problem.strides).get("dbias", (1, 1, 1, 1))
    sizes = (
        problem.batch,
        problem.heads_q,
        cdiv(problem.seqlen_q, block),
        cdiv(problem.seqlen_k, block),
    )
    grid = math.prod(size for size, stride in zip(sizes, along, strict=True) if stride)
    return (Launch(Entry("attention_dbias", "attention_dbias", constants, DBIAS), grid, 256),)


def _matmul_constants(problem: Problem) -> tuple[tuple[str, Any], ...]:
    """Template parameters of the kernels that use matmul.cuh.

    Its 16 x 16 threads have 4 x 4 results each; 2 x 2 where registers are half as many.
    """
    block = 32 if problem.acc_dtype == "float64" else 64
    return (
        ("T", problem.dtype), ("BLOCK", block), ("BLOCK_K", 16), ("FEATURES", features(problem)),
    )  # fmt: skip


def attention_flash_simt(problem: Problem, arch: str) -> Work:
    """Tiles, online softmax and recompute on CUDA cores; fp32 tiles whatever the dtype."""
    forward = problem.op == "attention"
    # The threads share a tile by its width, so one choice of tiles wants one width.
    dims = (_padded(max(problem.head_dim, problem.head_dim_v)),) * 2
    acc_bytes = DTYPES[problem.acc_dtype].itemsize

    def shared_memory(tile: Tile) -> int:
        def size(rows: int, cols: int) -> int:  # tiles.cuh, tile_size
            width = 16 // acc_bytes
            return cdiv(rows, width) * width * (cols + 1)

        held = [(tile.block_n, dims[0]), (tile.block_n, dims[1]), (tile.block_m, dims[0])]
        if not forward:
            held.append((tile.block_m, dims[1]))
        held.append((tile.block_m, tile.block_n))
        return acc_bytes * sum(size(*shape) for shape in held) + (0 if forward else 16)

    tiles = FLASH_SIMT_TILES.get((forward, problem.acc_dtype, dims[0]), ())
    usable = _usable(tiles, problem, arch, shared_memory)
    if not usable:
        raise NotWrittenError(f"it has no {problem.dtype} tiles for head_dim {dims[0]}")
    tile = usable[0]
    # cp.async copies bytes, so it loads no dtype that has to be converted; sm_75 has none.
    cp_async = int(problem.dtype == problem.acc_dtype and int(arch.removeprefix("sm_")) >= 80)
    constants = (
        ("T", problem.dtype), ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n),
        ("HEAD_DIM", dims[0]), ("HEAD_DIM_V", dims[1]), ("FEATURES", features(problem)),
        ("VEC", _vector_length(problem)), ("ASYNC", cp_async), ("THREADS", tile.threads),
    )  # fmt: skip
    tiles_q = cdiv(problem.seqlen_q, tile.block_m)
    if forward:
        entry = Entry("attention_flash_simt_fwd", "attention_flash_simt_fwd", constants, FLASH_FWD)
        grid = problem.batch * problem.heads_q * tiles_q
        return Work((Launch(entry, grid, tile.threads, shared_memory(tile)),))
    entry = Entry("attention_flash_simt_bwd", "attention_flash_simt_bwd", constants, FLASH_SIMT_BWD)
    grid = problem.batch * problem.heads_kv * max(1, cdiv(problem.seqlen_k, tile.block_n))
    delta, delta_space = _delta(problem)
    queries = problem.batch * problem.heads_q * tiles_q
    return Work(
        (delta, Launch(entry, grid, tile.threads, shared_memory(tile)), *_dbias(problem)),
        (
            delta_space,
            Workspace("dq_acc", (queries, tile.block_m, dims[0]), problem.acc_dtype),
            Workspace("turns", (1 + queries,), "int32", zeroed=True),
        ),
    )


def attention_flash_wgmma(problem: Problem, arch: str) -> Work:
    """Hopper's own: tiles by the copy engine, products of warpgroups in the background."""
    maps = ("q", "k", "v", "out" if problem.op == "attention" else "dout")
    mapped = [name for name, _ in problem.strides if name in maps]
    reasons = [
        (arch != "sm_90", f"it needs the copy engine and the wgmma of sm_90, not {arch}"),
        (problem.has_mask or problem.has_bias, "it takes no mask and no bias"),
        (
            problem.alignment < 16,
            f"it takes rows at multiples of 16 bytes, not {problem.alignment}",
        ),
        (not all(_map_sizes(problem, "q") + _map_sizes(problem, "k")), "it takes no empty arrays"),
        (
            any(min(_map_strides(problem, name)) <= 0 for name in mapped),
            "it takes no arrays that repeat or run backwards",
        ),
    ]
    for declined, reason in reasons:
        if declined:
            raise NotWrittenError(reason)
    return _flash_wgmma_fwd(problem) if problem.op == "attention" else _flash_wgmma_bwd(problem)


def _flash_wgmma_fwd(problem: Problem) -> Work:
    dims = _padded(problem.head_dim), _padded(problem.head_dim_v)
    options = (
        features(problem)
        | ANY_SCALE * (problem.scale <= 0 and not problem.softcap)
        | KV_LENGTHS * problem.has_kv_lengths
    )
    tile = _flash_wgmma_fwd_tile(problem)
    q_stages, stages = 2 if max(dims) <= 128 else 1, 4 if tile.threads == 640 else 2
    constants = (
        ("T", problem.dtype), ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n),
        ("HEAD_DIM", dims[0]), ("HEAD_DIM_V", dims[1]), ("FEATURES", options),
        ("Q_STAGES", q_stages), ("STAGES", stages), ("THREADS", tile.threads),
    )  # fmt: skip
    entry = Entry(
        "attention_flash_wgmma_fwd", "attention_flash_wgmma_fwd", constants, FLASH_WGMMA_FWD
    )
    shared_memory = (
        2 * (q_stages * tile.block_m * dims[0] + stages * tile.block_n * sum(dims))
        + 2 * tile.block_m * min(dims[1], 128)  # out
        + 8 * (2 * q_stages + 4 * stages)  # barriers
        + 36 * q_stages  # what the consumers are to know of a query tile
    )
    tiles = problem.batch * problem.heads_q * cdiv(problem.seqlen_q, tile.block_m)
    if tiles >= 2**31:
        raise NotWrittenError(f"it counts query tiles to 2**31 - 1, not to {tiles}")
    launch = Launch(
        entry, min(tiles, MULTIPROCESSORS), tile.threads, shared_memory,
        values=_heads_at_a_time(problem, problem.heads_q),
        maps=(
            TensorMap("q_map", "q", tile.block_m), TensorMap("k_map", "k", tile.block_n),
            TensorMap("v_map", "v", tile.block_n), TensorMap("out_map", "out", 16),
        ),
    )  # fmt: skip
    counter = Workspace("counter", (1,), "int32", zeroed=True)
    return Work((launch,), (counter,) if problem.has_range else ())


def _flash_wgmma_fwd_tile(problem: Problem) -> Tile:
    choices = FLASH_WGMMA_TILES[True, _padded(max(problem.head_dim, problem.head_dim_v))]
    few_keys = 2048 if problem.has_range else 256
    # tanh wants registers, which the scores of 128 keys leave to two consumers alone.
    return choices[-1 if problem.seqlen_k <= few_keys or problem.softcap else 0]


def _flash_wgmma_bwd(problem: Problem) -> Work:
    head_dim = max(problem.head_dim, problem.head_dim_v)
    if problem.softcap or problem.has_q_lengths or problem.has_kv_lengths:
        raise NotWrittenError("its backward takes no softcap, no q_lengths and no kv_lengths")
    if problem.scale < 1e-30:  # lse / scale is to be a float32
        raise NotWrittenError(f"its backward takes scales from 1e-30 on, not {problem.scale}")
    dim = _padded(head_dim)
    tile = FLASH_WGMMA_TILES[False, dim][0]
    wide = dim == 256  # more of dk and dv than a warpgroup has registers for
    q_stages, dout_stages = (2, 1) if wide else (3, 2)
    adders = 2 if wide else 1
    constants = (
        ("T", problem.dtype), ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n),
        ("HEAD_DIM", dim), ("FEATURES", features(problem)),
        ("DETERMINISTIC", int(problem.deterministic)), ("Q_STAGES", q_stages),
        ("DOUT_STAGES", dout_stages), ("THREADS", tile.threads),
    )  # fmt: skip
    stem = "attention_flash_wgmma_bwd_wide" if wide else "attention_flash_wgmma_bwd"
    entry = Entry(stem, stem, constants, FLASH_WGMMA_BWD)
    keys, queries = 2 * tile.block_n * dim, 2 * tile.block_m * dim  # bytes of a tile
    shared_memory = (
        2 * keys
        + (q_stages + dout_stages) * queries
        + (3 if wide else 2) * (2 * tile.block_n * tile.block_m)  # ds, and p
        + q_stages * 32 * tile.block_m  # lse and delta
        + 256  # ones
        + 4 * tile.block_m * dim // adders  # dq
        + 8 * (2 + 2 * q_stages + 2 * dout_stages + 2 * adders)
        + 8
    )
    heads_total = problem.batch * problem.heads_kv
    tiles = problem.batch * problem.heads_q * cdiv(problem.seqlen_q, tile.block_m)
    if tiles >= 2**31:
        raise NotWrittenError(f"it counts query tiles to 2**31 - 1, not to {tiles}")
    tiles_each = cdiv(problem.seqlen_k, tile.block_n)
    at_a_time = _heads_at_a_time(problem, problem.heads_kv, tiles_each)
    rows = (
        ("T", problem.dtype), ("BLOCK_M", tile.block_m), ("HEAD_DIM", dim), ("ADDERS", adders),
    )  # fmt: skip
    stats = Entry("attention_row_stats", "attention_row_stats", rows, ATTENTION_ROW_STATS)
    maps = (("q", tile.block_m), ("k", tile.block_n), ("v", tile.block_n), ("dout", tile.block_m))
    return Work(
        (
            Launch(stats, cdiv(tiles * tile.block_m * dim // 8, 256), 256),
            Launch(
                entry, heads_total * tiles_each, tile.threads, shared_memory, at_a_time,
                tuple(TensorMap(f"{name}_map", name, rows) for name, rows in maps),
                dependent=True,
            ),
            _round_dq(problem, tiles, tile.block_m, dim),
        ),
        (
            Workspace("stats", (tiles, 8 * tile.block_m), problem.acc_dtype),
            Workspace("dq_acc", (tiles, tile.block_m, dim), problem.acc_dtype),
            Workspace("turns", (1 + adders * tiles,), "int32"),
        ),
    )  # fmt: skip


def too_few_queries(problem: Problem) -> str | None:
    """Why `attention_flash_wgmma` would be slower than the next kernel, if it would.

    Its tiles are high and each takes a whole multiprocessor.
    """
    if problem.op == "attention_backward":
        return None
    rows = _flash_wgmma_fwd_tile(problem).block_m
    tiles = problem.batch * problem.heads_q * cdiv(problem.seqlen_q, rows)
    if problem.seqlen_q > 64 and tiles >= MULTIPROCESSORS // 2:
        return None
    return f"its {tiles} tiles of {rows} queries would leave most multiprocessors without work"


def _heads_each(problem: Problem) -> int:
    """How many query heads share a key head."""
    return max(1, problem.heads_q // max(1, problem.heads_kv))


def _heads_at_a_time(problem: Problem, heads: int, blocks: int = 1) -> tuple[tuple[str, int]]:
    """How many of `heads` a batch blocks should go through at a time (common.cuh, head_tile).

    Few, so that what several blocks read, and in the backward add to, stays in the L2 cache: there,
    with `blocks` a head, no more heads than all multiprocessors work on at once. But with tiles of
    all lengths the long ones should come first, of so many heads that short ones are left to fill
    up the end (not with wide heads, whose dq fills the cache). And blocks that add in turn wait for
    others of their head: then as many heads as the cache holds, half of it where all tiles are
    long, but never so few that all blocks of a head would start together.
    """
    at_once = cdiv(MULTIPROCESSORS, max(1, blocks))
    dim = _padded(max(problem.head_dim, problem.head_dim_v))
    if problem.op == "attention":
        most = 32 if problem.has_range else 16
    elif problem.deterministic:
        # k and v; and of each query head q and dout, and dq in fp32
        rows = problem.seqlen_k + 2 * _heads_each(problem) * problem.seqlen_q
        in_cache = L2_BYTES // (4 * dim * rows)
        most = max(in_cache, min(16, 4 * at_once)) if problem.has_range else max(2, in_cache // 2)
    elif problem.has_range and dim <= 128:
        most = min(8, 4 * at_once)
    else:
        most = min(8, at_once)
    return (("heads_at_a_time", max(1, min(problem.batch * heads, most))),)


def _map_sizes(problem: Problem, array: str) -> tuple[int, int, int]:
    """Batch, heads and rows of q, k, v, out or dout."""
    if array in ("q", "out", "dout"):
        return problem.batch, problem.heads_q, problem.seqlen_q
    return problem.batch, problem.heads_kv, problem.seqlen_k


def _map_strides(problem: Problem, array: str) -> list[int]:
    """Bytes along the same axes, as a tensor map takes them.

    An axis of length 1 may have any stride: none is ever taken, so it gets one that is allowed.
    """
    strides = dict(problem.strides)[array]
    sizes = _map_sizes(problem, array)
    return [2 * s if n > 1 else 16 for s, n in zip(strides, sizes, strict=True)]


def tensor_map(problem: Problem, chosen: TensorMap, address: int) -> dict[str, Any]:
    """What ``cuTensorMapEncodeTiled`` is to be told: axes innermost first, strides in bytes.

    A box is 64 columns wide, 128 bytes, and swizzled (fragments.cuh).
    """
    batch, heads, rows = _map_sizes(problem, chosen.array)
    cols = problem.head_dim_v if chosen.array in ("v", "out", "dout") else problem.head_dim
    batch_stride, head_stride, row_stride = _map_strides(problem, chosen.array)
    return {
        "data_type": {"float16": 6, "bfloat16": 9}[problem.dtype], "rank": 4,
        "global_address": address, "global_dim": (cols, rows, heads, batch),
        "global_strides": (row_stride, head_stride, batch_stride),
        "box_dim": (64, chosen.rows, 1, 1),
        "element_strides": (1, 1, 1, 1), "interleave": 0, "swizzle": 3, "l2_promotion": 3,
        "oob_fill": 0,
    }  # fmt: skip


def attention_flash_mma(problem: Problem, arch: str) -> Work:
    """Tiles, online softmax and recompute on tensor cores, through mma.sync."""
    if int(arch.removeprefix("sm_")) < 80:
        raise NotWrittenError(f"it needs the tensor cores of sm_80 or newer, not {arch}")
    if problem.alignment < 16:
        raise NotWrittenError(
            f"it takes rows that begin at multiples of 16 bytes, not {problem.alignment}"
        )
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        raise NotWrittenError("it takes a head_dim and a head_dim_v that are multiples of 8")
    if problem.op == "attention":
        return _flash_mma_fwd(problem, arch)
    return _flash_mma_bwd(problem, arch)


def _flash_mma_dims(problem: Problem) -> tuple[int, int]:
    """The head_dim and head_dim_v that tiles have room for."""

    def padded(head_dim: int) -> int:
        return next(size for size in (64, 96, 128, 192, 256, head_dim) if size >= head_dim)

    return padded(problem.head_dim), padded(problem.head_dim_v)


def _tile_bytes(rows: int, cols: int) -> int:
    """Shared memory of a tile of 16-bit elements: fragments.cuh, tile_bytes."""
    return rows * cdiv(cols, 64) * 128


def _usable(
    tiles: tuple[Tile, ...], problem: Problem, arch: str, shared_memory: Callable[[Tile], int]
) -> list[Tile]:
    """The tiles whose registers and shared memory suffice; if there are none, the last one."""
    roomy = [tile for tile in tiles if not features(problem) & ~tile.features]
    return [tile for tile in roomy if shared_memory(tile) <= shared_limit(arch)] or roomy[-1:]


def _flash_mma_fwd(problem: Problem, arch: str) -> Work:
    dims = _flash_mma_dims(problem)

    def shared_memory(tile: Tile) -> int:
        return (
            _tile_bytes(tile.block_m, max(dims))
            + _tile_bytes(tile.block_n, dims[0])
            + _tile_bytes(tile.block_n, dims[1])
        )

    rows, heads, values = _rows_of_a_head(problem)
    heads_total = problem.batch * heads
    if rows <= FEW_QUERIES[0].block_m:
        key_tiles = heads_total * (problem.seqlen_k // FEW_QUERIES[0].block_n)
        large = key_tiles >= SPLIT_BLOCKS // 2 and heads_total <= LARGE_AT_ONCE
        tile = FEW_QUERIES[0] if large else FEW_QUERIES[1]
        wanted, shortest = SPLIT_BLOCKS, tile.block_n
    else:
        tiles = FLASH_MMA_TILES[True, max(dims)]
        if heads_total * cdiv(rows, tiles[0].block_m) < FULL_GRID:
            tiles = tuple(tile for tile in tiles if tile.block_m <= 64)
        usable = _usable(tiles, problem, arch, shared_memory)
        # Of tiles as high as the first, the one that wastes least on keys that do not exist.
        tile = min(
            (tile for tile in usable if tile.block_m == usable[0].block_m),
            key=lambda tile: cdiv(problem.seqlen_k, tile.block_n) * tile.block_n,
        )
        wanted, shortest = FULL_GRID, SPLIT_KEYS
    blocks = heads_total * cdiv(rows, tile.block_m)
    splits = max(1, min(wanted // max(1, blocks), problem.seqlen_k // shortest))
    constants = (
        ("T", problem.dtype), ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n),
        ("HEAD_DIM", dims[0]), ("HEAD_DIM_V", dims[1]), ("FEATURES", features(problem)),
        ("SPLIT", int(splits > 1)), ("THREADS", tile.threads),
    )  # fmt: skip
    entry = Entry("attention_flash_mma_fwd", "attention_flash_mma_fwd", constants, FLASH_MMA_FWD)
    values += _heads_at_a_time(problem, heads)
    forward = Launch(entry, blocks * splits, tile.threads, shared_memory(tile), values)
    if splits == 1:
        return Work((forward,))
    shape = (splits, problem.batch, problem.heads_q, problem.seqlen_q)
    threads = 256
    merged = (("T", problem.dtype), ("HEAD_DIM_V", dims[1]), ("THREADS", threads))
    entry = Entry("attention_merge", "attention_merge", merged, ATTENTION_MERGE)
    return Work(
        (
            forward,
            Launch(
                entry, math.prod(shape[1:]), threads, values=(("splits", splits),), dependent=True
            ),
        ),
        (
            Workspace("out_parts", (*shape, dims[1]), problem.acc_dtype),
            Workspace("lse_parts", shape, problem.acc_dtype),
        ),
    )


def _rows_of_a_head(problem: Problem) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Query rows and heads as the forward is to see them, and the arguments that tell it.

    One query of several heads that share a key head is as good as several queries of one head, and
    then keys are loaded once for all of them; unless it matters at which position a query stands.
    """
    group = _heads_each(problem)
    at_the_end = problem.window_right is None or (
        problem.window_right == 0 and not problem.top_left
    )
    if (
        problem.seqlen_q != 1
        or group == 1
        or problem.has_q_lengths
        or problem.window_left is not None
        or not at_the_end
    ):
        return problem.seqlen_q, problem.heads_q, ()
    values = {"heads_q": problem.heads_kv, "seqlen_q": group, "score.window_right": OPEN_WINDOW}
    for name, strides in problem.strides:
        if name in ("q", "out", "mask", "bias"):
            prefix = f"score.{name}_strides" if name in ("mask", "bias") else f"{name}_strides"
            values[f"{prefix}.row"] = strides[1]
            values[f"{prefix}.head"] = strides[1] * group
    return group, problem.heads_kv, tuple(values.items())


def _flash_mma_bwd(problem: Problem, arch: str) -> Work:
    dims = _flash_mma_dims(problem)

    def shared_memory(tile: Tile) -> int:
        keys = _tile_bytes(tile.block_n, dims[0]) + _tile_bytes(tile.block_n, dims[1])
        queries = _tile_bytes(tile.block_m, dims[0]) + _tile_bytes(tile.block_m, dims[1])
        scores = _tile_bytes(tile.block_m, tile.block_n)
        return keys + 2 * scores + 2 * (queries + 2 * tile.block_m * 4)

    tiles = FLASH_MMA_TILES[False, max(dims)]
    heads_total = problem.batch * problem.heads_kv
    blocks = heads_total * cdiv(problem.seqlen_k, tiles[0].block_n)
    if blocks < FULL_GRID and problem.seqlen_q <= SHORT:
        tiles = tiles[-1:]
    tile = _usable(tiles, problem, arch, shared_memory)[0]
    constants = (
        ("T", problem.dtype), ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n),
        ("HEAD_DIM", dims[0]), ("HEAD_DIM_V", dims[1]), ("FEATURES", features(problem)),
        ("DETERMINISTIC", int(problem.deterministic)), ("THREADS", tile.threads),
    )  # fmt: skip
    entry = Entry("attention_flash_mma_bwd", "attention_flash_mma_bwd", constants, FLASH_MMA_BWD)
    tiles_each = cdiv(problem.seqlen_k, tile.block_n)
    queries = problem.batch * problem.heads_q * cdiv(problem.seqlen_q, tile.block_m)
    delta, delta_space = _delta(problem)
    if problem.deterministic:  # all: who waits for a turn here holds up the block's products
        at_a_time = (("heads_at_a_time", max(1, heads_total)),)
    else:
        at_a_time = _heads_at_a_time(problem, problem.heads_kv, tiles_each)
    return Work(
        (
            delta,
            Launch(
                entry, heads_total * tiles_each, tile.threads, shared_memory(tile), at_a_time,
                dependent=True,
            ),
            _round_dq(problem, queries, tile.block_m, dims[0]),
            *_dbias(problem),
        ),
        (
            delta_space,
            Workspace("dq_acc", (queries, tile.block_m, dims[0]), problem.acc_dtype, zeroed=True),
            *_turns(problem, queries),
        ),
    )  # fmt: skip


def _turns(problem: Problem, counters: int) -> tuple[Workspace, ...]:
    """A ticket and the counters by which blocks wait for their turn to add, if they are to."""
    if not problem.deterministic:
        return ()
    return (Workspace("turns", (1 + counters,), "int32", zeroed=True),)


def _round_dq(problem: Problem, tiles: int, block_m: int, head_dim: int) -> Launch:
    """From dq_acc to dq."""
    constants = (("T", problem.dtype), ("BLOCK_M", block_m), ("HEAD_DIM", head_dim))
    entry = Entry("attention_dq", "attention_dq", constants, ATTENTION_DQ)
    return Launch(entry, cdiv(tiles * block_m * head_dim // 16, 256), 256, dependent=True)


def _vector_length(problem: Problem) -> int:
    """Elements in the 16 bytes that a thread moves at once, or 1 where rows do not allow it."""
    length = 16 // DTYPES[problem.dtype].itemsize
    if problem.alignment < 16 or problem.head_dim % length or problem.head_dim_v % length:
        return 1
    return length


class Tile(NamedTuple):
    """A choice of tiles: which FEATURES its registers have room for, beside the sizes."""

    block_m: int
    block_n: int
    threads: int
    features: int = RANGE | MASK | BIAS | SOFTCAP


# (forward, dtype of the tiles, padded head_dim) -> tiles, fastest first. The first one runs whose
# shared memory the GPU has and which spills no registers with the problem's FEATURES.
FLASH_SIMT_TILES = {
    (True, "float32", 64): (Tile(128, 64, 128, RANGE), Tile(64, 32, 128), Tile(32, 32, 64)),
    (True, "float32", 128): (Tile(64, 64, 128), Tile(64, 32, 128), Tile(32, 32, 128)),
    (True, "float32", 256): (Tile(64, 64, 256), Tile(64, 32, 256), Tile(16, 32, 128)),
    (True, "float64", 64): (Tile(64, 32, 128), Tile(32, 32, 128)),
    (True, "float64", 128): (Tile(64, 32, 256), Tile(32, 32, 256)),
    (True, "float64", 256): (Tile(32, 32, 256), Tile(32, 16, 256), Tile(16, 16, 128)),
    (False, "float32", 64): (Tile(64, 64, 128), Tile(32, 32, 64)),
    (False, "float32", 128): (Tile(64, 128, 256, RANGE), Tile(64, 32, 128), Tile(32, 32, 128)),
    (False, "float32", 256): (Tile(64, 32, 256), Tile(16, 32, 128)),
    (False, "float64", 64): (Tile(32, 32, 128),),
    (False, "float64", 128): (Tile(32, 32, 256),),
}


# (forward, larger padded head_dim) -> tiles, as above. Only those of 64 rows, in the backward of 32
# keys, are for grids that would not keep every multiprocessor busy.
FLASH_MMA_TILES = {
    (True, 64): (
        Tile(128, 128, 128, RANGE), Tile(128, 112, 128, RANGE),
        Tile(64, 96, 128, RANGE), Tile(64, 112, 128, RANGE), Tile(64, 64, 128),
    ),
    (True, 96): (Tile(128, 64, 128, RANGE), Tile(64, 96, 128, RANGE), Tile(64, 64, 128)),
    (True, 128): (Tile(128, 64, 128, RANGE), Tile(64, 96, 128, RANGE), Tile(64, 64, 128)),
    (True, 192): (Tile(64, 64, 128),),
    (True, 256): (Tile(64, 64, 128),),
    (False, 64): (Tile(128, 128, 256, RANGE), Tile(64, 128, 256), Tile(32, 32, 64)),
    (False, 96): (
        Tile(64, 128, 256, RANGE), Tile(64, 64, 256), Tile(32, 64, 128), Tile(32, 32, 64)
    ),
    (False, 128): (
        Tile(64, 128, 256, RANGE), Tile(64, 64, 256), Tile(32, 64, 128), Tile(32, 32, 64)
    ),
    (False, 192): (Tile(64, 64, 256), Tile(32, 64, 256), Tile(32, 32, 128)),
    (False, 256): (Tile(64, 64, 256), Tile(32, 64, 256), Tile(32, 32, 128)),
}  # fmt: skip
# (forward, larger padded head_dim) -> tiles of queries and keys, and for the forward others for few
# keys or a softcap; a warpgroup of producers and one of consumers for each 64 queries, in the
# backward for each 64 keys, or two that share 64 wide ones.
FLASH_WGMMA_TILES = {
    (True, 64): (Tile(192, 128, 512, RANGE), Tile(256, 64, 640, RANGE)),
    (True, 128): (Tile(128, 128, 384, RANGE),),
    (True, 256): (Tile(128, 64, 384, RANGE),),
    (False, 64): (Tile(128, 128, 384, RANGE),),
    (False, 128): (Tile(64, 128, 384, RANGE),),
    (False, 256): (Tile(64, 64, 384, RANGE),),
}
MULTIPROCESSORS = 132  # of an H100 or H200: each has one block, that stays
L2_BYTES = 50 * 2**20  # of the same
FULL_GRID = 264  # blocks: two for each multiprocessor of a large GPU
SHORT = 2048  # queries, above which a partly filled grid of large tiles is faster than small ones
# Few queries: a warp a block and several blocks a multiprocessor, so that loads are always under
# way. The first tile is for long sequences, while all of its blocks run at once; the second one for
# the rest. Keys are split until there are as many blocks as keep a large GPU busy; with more
# queries, while each block has as many keys as are worth a merge.
FEW_QUERIES = (Tile(16, 64, 32), Tile(16, 32, 32))
LARGE_AT_ONCE = 6 * MULTIPROCESSORS  # blocks of the first of them, with 36 KB of shared memory each
SPLIT_BLOCKS = 512
SPLIT_KEYS = 512


def _padded(head_dim: int) -> int:
    """The head_dim that a tile has room for."""
    return next(size for size in (64, 128, 256, head_dim) if size >= head_dim)


def attention_naive(problem: Problem, arch: str) -> Work:
    """Global memory only: a warp takes a query row, in the last kernel a block a key row."""
    del arch  # the same on every GPU
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    keys = problem.batch * problem.heads_kv * problem.seqlen_k
    constants = (("T", problem.dtype), ("FEATURES", features(problem)))
    if problem.op == "attention":
        entry = Entry("attention_naive_fwd", "attention_naive_fwd", constants, WITH_SCORES_FWD)
        return Work((Launch(entry, cdiv(rows, 4), 128),), _scores(problem, "scores"))
    stem = "attention_naive_bwd"
    delta, delta_space = _delta(problem)
    return Work(
        (
            delta,
            Launch(Entry(stem, f"{stem}_dq", constants, WITH_SCORES_DQ), cdiv(rows, 4), 128),
            Launch(Entry(stem, f"{stem}_dkdv", constants, WITH_SCORES_DKDV), keys, 64),
            *_dbias(problem),
        ),
        (delta_space, *_scores(problem, "p", "ds")),
    )


def attention_tiled(problem: Problem, arch: str) -> Work:
    """Shared-memory tiles for the matrix products; the scores in device memory."""
    del arch
    constants = _matmul_constants(problem)
    block, threads = dict(constants)["BLOCK"], 256
    q_tiles = problem.batch * problem.heads_q * cdiv(problem.seqlen_q, block)
    k_tiles = problem.batch * problem.heads_kv * cdiv(problem.seqlen_k, block)
    if problem.op == "attention":
        entry = Entry("attention_tiled_fwd", "attention_tiled_fwd", constants, WITH_SCORES_FWD)
        return Work((Launch(entry, q_tiles, threads),), _scores(problem, "scores"))
    stem = "attention_tiled_bwd"
    delta, delta_space = _delta(problem)
    return Work(
        (
            delta,
            Launch(Entry(stem, f"{stem}_dq", constants, WITH_SCORES_DQ), q_tiles, threads),
            Launch(Entry(stem, f"{stem}_dkdv", constants, WITH_SCORES_DKDV), 2 * k_tiles, threads),
            *_dbias(problem),
        ),
        (delta_space, *_scores(problem, "p", "ds")),
    )


def vector_add_vec4(problem: VectorProblem, arch: str) -> Work:
    """16-byte accesses in a grid-stride loop."""
    del arch  # the same on every GPU
    # On an H200 every full grid is within 1 % of the next; many threads beat many loads each.
    threads, unroll = 1024, 1
    strided = not problem.contiguous
    per_thread = 1 if strided else unroll * 16 // DTYPES[problem.dtype].itemsize
    entry = Entry(
        "vector_add_vec4",
        "vector_add_vec4",
        (("T", problem.dtype), ("STRIDED", int(strided)), ("UNROLL", unroll)),
        VECTOR_ADD_VEC4,
    )
    # Enough blocks to fill any GPU many times over; the rest is what the grid strides for.
    grid = min(cdiv(problem.size, threads * per_thread), 2**20)
    return Work((Launch(entry, grid, threads),))


def vector_add(problem: VectorProblem, arch: str) -> Work:
    """One thread, one element."""
    del arch
    threads = 256
    entry = Entry("vector_add", "vector_add", (("T", problem.dtype),), VECTOR_ADD)
    return Work((Launch(entry, cdiv(problem.size, threads), threads),))


# ------------------------------------------------------------------------------------- arguments


def argument_values(problem: Any) -> dict[str, Any]:
    """The value of every argument that is not an array's address, by dotted name."""
    values: dict[str, Any] = {}
    if isinstance(problem, VectorProblem):
        shaped = (
            ("shape", problem.shape, 1),
            *((f"{n}_strides", s, 0) for n, s in problem.strides),
        )
        for name, numbers, missing in shaped:
            padded = (missing,) * (len(AXES) - len(numbers)) + numbers
            values |= {f"{name}.{axis}": n for axis, n in zip(AXES, padded, strict=True)}
        return values | {"size": problem.size}
    for name, strides in problem.strides:
        axes = AXES[: len(strides)]
        prefix = f"score.{name}_strides" if name in ("mask", "bias") else f"{name}_strides"
        values |= {f"{prefix}.{axis}": s for axis, s in zip(axes, strides, strict=True)}
    for axis in AXES:
        values.setdefault(f"score.mask_strides.{axis}", 0)
        values.setdefault(f"score.bias_strides.{axis}", 0)
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        values[name] = getattr(problem, name)
    left, right = problem.window_left, problem.window_right
    return values | {
        "scale": problem.scale,
        "score.scale": problem.scale,
        "score.softcap": problem.softcap,
        "score.window_left": OPEN_WINDOW if left is None else min(left, OPEN_WINDOW),
        "score.window_right": OPEN_WINDOW if right is None else min(right, OPEN_WINDOW),
        "score.top_left": int(problem.top_left),
    }
