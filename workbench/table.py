"""The table of kernels: what each can do, in sentences, and which one a call gets.

A kernel is used by being listed here; the value tests, `workbench list` and `workbench compare`
are generated from `KERNELS`. There is no other heuristic: the first row without an objection runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench import launchers
from workbench.launchers import Launch, Work
from workbench.problem import Problem, VectorProblem

ALL_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Rows and columns are 32-bit inside a kernel, with room to add a window to them.
SEQLEN_LIMIT = 2**30 - 1
GRID_LIMIT = 2**31 - 1
BOTH_WAYS = ("attention", "attention_backward")
SPELLED_OUT = {
    "attention": "attention forward and backward",
    "vector_add": "the sum of two vectors",
}


class NoKernelError(ValueError):
    """No kernel takes a problem; the message lists why each one declined."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of `KERNELS`: a kernel in both languages.

    Attributes
    ----------
    name : str
        Stem of its files in `cuda_src` and `numba_kernels`, without ``_fwd`` or ``_bwd``.
    op : str
        ``"attention"`` (forward and backward) or ``"vector_add"``.
    summary : str
        What it is about, in a few words.
    work : callable
        Its launcher: ``(problem, arch) -> Work``.
    languages, dtypes : tuple of str
    max_head_dim : int or None
        Of q and k as of v; None is any.
    needs_contiguous : bool
        Whether `vector_add` takes only arrays that are one run of elements.
    slower : callable or None
        ``problem -> str | None``: why a kernel further down is faster, if it is. Only a call that
        names no kernel heeds it.
    """

    name: str
    op: str
    summary: str
    work: Callable[[Any, str], Work]
    languages: tuple[str, ...] = ("cuda", "numba")
    dtypes: tuple[str, ...] = ALL_DTYPES
    max_head_dim: int | None = None
    needs_contiguous: bool = False
    slower: Callable[[Any], str | None] | None = None

    def why_not(self, problem: Any, arch: str) -> list[str]:
        """Sentences saying why this kernel cannot take `problem` on `arch`; none if it can."""
        if problem.op.removesuffix("_backward") != self.op:
            return [f"it computes {SPELLED_OUT[self.op]}"]
        reasons = []
        if problem.dtype not in self.dtypes:
            reasons.append(f"it takes {', '.join(self.dtypes)}, not {problem.dtype}")
        if self.op == "vector_add":
            if self.needs_contiguous and not problem.contiguous:
                reasons.append("it takes contiguous arrays only")
        else:
            head_dim = max(problem.head_dim, problem.head_dim_v)
            if self.max_head_dim is not None and head_dim > self.max_head_dim:
                reasons.append(f"its head_dim goes to {self.max_head_dim}, not {head_dim}")
            reasons += [
                f"{axis} must be below 2**30"
                for axis in ("seqlen_q", "seqlen_k")
                if getattr(problem, axis) > SEQLEN_LIMIT
            ]
        if reasons:
            return reasons
        try:
            launches = self.work(problem, arch).launches
        except launchers.NotWrittenError as error:
            return [str(error)]
        shared = max(launch.shared_memory for launch in launches)
        limit = launchers.shared_limit(arch)
        if shared > limit:
            reasons.append(f"it takes {shared} bytes of shared memory, {arch} has {limit}")
        blocks = max(launch.grid for launch in launches)
        if blocks > GRID_LIMIT:
            reasons.append(f"it would take {blocks} blocks, a grid holds 2**31 - 1")
        return reasons


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "attention_flash_wgmma",
        "attention",
        "Hopper's own: copies and products in the background",
        launchers.attention_flash_wgmma,
        dtypes=("float16", "bfloat16"),
        max_head_dim=256,
        slower=launchers.too_few_queries,
    ),
    Kernel(
        "attention_flash_mma",
        "attention",
        "the same on tensor cores, through mma.sync: sm_80 and newer",
        launchers.attention_flash_mma,
        dtypes=("float16", "bfloat16"),
        max_head_dim=256,
    ),
    Kernel(
        "attention_flash_simt",
        "attention",
        "tiles, online softmax, recompute: exact, on CUDA cores",
        launchers.attention_flash_simt,
        max_head_dim=256,
    ),
    Kernel(
        "attention_tiled",
        "attention",
        "shared-memory tiles; the scores still in device memory",
        launchers.attention_tiled,
    ),
    Kernel(
        "attention_naive",
        "attention",
        "global memory only; the scores in device memory",
        launchers.attention_naive,
    ),
    Kernel(
        "vector_add_vec4",
        "vector_add",
        "16-byte accesses, grid-stride: memory speed",
        launchers.vector_add_vec4,
    ),
    Kernel(
        "vector_add",
        "vector_add",
        "one thread, one element: the first kernel to read",
        launchers.vector_add,
        needs_contiguous=True,
    ),
)


def check_name(op: str, kernel: Any) -> None:
    """Raise unless `kernel` is None or the name of a row that computes `op`."""
    names = [row.name for row in KERNELS if row.op == op.removesuffix("_backward")]
    if kernel is not None and not (isinstance(kernel, str) and kernel in names):
        raise ValueError(f"kernel is {kernel!r}; it takes {', '.join(map(repr, names))} or None")


def objections(
    problem: Any, language: str, arch: str, kernel: str | None = None
) -> dict[str, list[str]]:
    """Reasons of every kernel of the problem's operation, by name; an empty list is a yes."""
    check_name(problem.op, kernel)
    reasons = {}
    for row in KERNELS:
        if row.op != problem.op.removesuffix("_backward"):
            continue
        if kernel is not None and row.name != kernel:
            continue
        reasons[row.name] = row.why_not(problem, arch)
        if row.slower and not kernel and not reasons[row.name]:
            slower = row.slower(problem)
            reasons[row.name] += [slower] if slower else []
        if language not in row.languages:
            reasons[row.name].append(f"it is not written in {language}")
    return reasons


def select(problem: Any, language: str, arch: str, kernel: str | None = None) -> Kernel:
    """The first row that takes `problem`, or the row that `kernel` names if it does.

    Raises
    ------
    ValueError
        If no row has the name.
    NoKernelError
        Listing why every candidate declined.
    """
    reasons = objections(problem, language, arch, kernel)
    for row in KERNELS:
        if row.name in reasons and not reasons[row.name]:
            return row
    listed = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())
    raise NoKernelError(f"no {language} kernel takes this problem:\n{listed}\n  for {problem}")


# ------------------------------------------------------------------ what the tests compile

# Options that set each bit of FEATURES.
_RANGE: dict[str, Any] = {"window_right": 0}
_EACH = (_RANGE, {"has_mask": True}, {"has_bias": True}, {"softcap": 30.0})
_EVERYTHING: dict[str, Any] = {name: value for option in _EACH for name, value in option.items()}


def _attention_problems() -> Iterator[Problem]:
    # Enough for the tiles of large problems.
    sizes = {"batch": 64, "heads_q": 4, "heads_kv": 2, "seqlen_q": 200, "seqlen_k": 300}

    def problems(
        dtype: str, head_dim: int, ops: tuple[str, ...] = BOTH_WAYS, **options: Any
    ) -> Iterator[Problem]:
        for op in ops:
            dbias = op == "attention_backward" and options.get("has_bias", False)
            usual = {"head_dim": head_dim, "head_dim_v": head_dim, "scale": head_dim**-0.5}
            yield Problem(op, dtype, return_dbias=dbias, **sizes | usual | options)

    for dtype in ALL_DTYPES:
        for head_dim in (64, 128, 256):
            yield from problems(dtype, head_dim)
            yield from problems(dtype, head_dim, **_RANGE)
            yield from problems(dtype, head_dim, **_EVERYTHING)
        yield from problems(dtype, 40, **_EVERYTHING, alignment=2)
    for option in _EACH[1:]:
        for dtype in ("bfloat16", "float32"):
            yield from problems(dtype, 64, **option)
    # What tensor cores have of their own: small grids, split keys, other widths, an order of dq.
    for head_dim in (64, 128, 256):
        yield from problems("bfloat16", head_dim, batch=1, **_RANGE)
    for head_dim in (96, 192):
        yield from problems("bfloat16", head_dim, **_RANGE)
    # What wgmma has of its own: other tiles for long sequences, more bits of FEATURES.
    all_but_arrays = _RANGE | {"has_kv_lengths": True, "softcap": 30.0, "ops": BOTH_WAYS[:1]}
    for head_dim in (64, 256):
        yield from problems("bfloat16", head_dim, seqlen_k=8192, **_RANGE)
        yield from problems("bfloat16", head_dim, seqlen_k=8192, **all_but_arrays)
    for head_dim in (64, 128, 256):
        yield from problems("bfloat16", head_dim, **all_but_arrays)
    yield from problems("bfloat16", 128, BOTH_WAYS[:1], has_kv_lengths=True)
    yield from problems("bfloat16", 128, BOTH_WAYS[:1], scale=-1.0)
    few: dict[str, Any] = {"batch": 1, "seqlen_q": 1, "seqlen_k": 4096}
    yield from problems("bfloat16", 128, **few, has_kv_lengths=True)
    yield from problems("bfloat16", 128, **few | {"batch": 4})
    yield from problems("bfloat16", 128, BOTH_WAYS[:1], **few | {"batch": 800})
    for head_dim in (64, 128, 256):
        yield from problems("bfloat16", head_dim, deterministic=True, **_RANGE)


def _vector_problems() -> Iterator[VectorProblem]:
    for dtype in ALL_DTYPES:
        for stride in (1, 2):
            strides = tuple((name, (stride,)) for name in ("a", "b", "out"))
            yield VectorProblem("vector_add", dtype, (1000,), strides)


# Problems that together reach every template parameter of every kernel; the full product would
# take hours to compile. Which of them a kernel takes depends on the GPU.
INSTANCES: tuple[Problem | VectorProblem, ...] = (*_attention_problems(), *_vector_problems())


def compile_units(arch: str) -> dict[str, list[Launch]]:
    """What `INSTANCES` makes each kernel launch on `arch`: every compiled kernel once."""
    units: dict[str, list[Launch]] = {}
    seen = set()
    for row in KERNELS:
        for problem in INSTANCES:
            if row.why_not(problem, arch):
                continue
            for launch in row.work(problem, arch).launches:
                if launch.entry not in seen:
                    seen.add(launch.entry)
                    units.setdefault(row.name, []).append(launch)
    return units
