"""What a call asks for, in one canonical form: a problem without arrays, and its arrays.

Everything behind the checks speaks of these. Sizes are those of the glossary: batch, heads_q,
heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
LAYOUTS = ("bhnd", "bnhd")
HOST_BACKENDS = ("cpu", "reference")
DEVICE_BACKENDS = ("cuda", "numba")
SIMULATOR_BACKENDS = ("cuda-simulator", "numba-simulator")  # the same kernels, on the host
SIMULATOR_ARCH = "sm_90"  # what they compile kernels for
KERNEL_BACKENDS = (*DEVICE_BACKENDS, *SIMULATOR_BACKENDS)
BACKENDS = ("auto", *DEVICE_BACKENDS, *HOST_BACKENDS, *SIMULATOR_BACKENDS)
MAX_AXES = 4  # what a kernel walks
MAX_ALIGNMENT = 16  # bytes: the widest load or store of one thread

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy is not imported before it is needed
HostArray = npt.NDArray[Any]  # numpy.ndarray alone


@dataclass(frozen=True, slots=True)
class Problem:
    """What one call of `attention` or `attention_backward` asks for, without its arrays.

    Attributes
    ----------
    op : str
        ``"attention"`` or ``"attention_backward"``.
    dtype : str
        Of q, k, v, dout and out: a key of `DTYPES`.
    window_left, window_right : int or None
        Keys before and after a query's position that it sees; None is open, causal is a right 0.
    top_left : bool
        A query i stands at p = i; otherwise at p = i + kv_length - q_length.
    strides : tuple
        ``(name, strides in elements)`` of the arrays that a GPU kernel reads by stride: three for
        (batch, heads, seqlen) arrays, four for mask, bias and dbias. Empty on the host.
    alignment : int
        The largest power of two, up to 16, that divides every address and outer stride in bytes.
    """

    op: str
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    has_mask: bool = False
    has_bias: bool = False
    has_q_lengths: bool = False
    has_kv_lengths: bool = False
    has_dlse: bool = False
    return_dbias: bool = False
    deterministic: bool = False
    strides: tuple[tuple[str, tuple[int, ...]], ...] = ()
    alignment: int = MAX_ALIGNMENT

    @property
    def acc_dtype(self) -> str:
        """Dtype of the accumulation, of lse and of a bias inside the kernels."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def has_range(self) -> bool:
        """Whether anything but the end of the array limits the keys by their position."""
        return (
            self.window_left is not None
            or self.window_right is not None
            or self.has_q_lengths
            or self.has_kv_lengths
        )


@dataclass(frozen=True, slots=True)
class VectorProblem:
    """What one call of `vector_add` asks for: sizes as a GPU kernel walks them.

    Attributes
    ----------
    shape : tuple of int
        At most `MAX_AXES`: axes that all three arrays walk as one are merged.
    strides : tuple
        ``(name, strides in elements)`` of a, b and out, one stride an axis of `shape`.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether all three arrays are one run of elements."""
        return self.size < 2 or (
            len(self.shape) == 1 and all(strides == (1,) for _, strides in self.strides)
        )


class Arrays(NamedTuple):
    """The arrays of one call in canonical form, outputs included; a backend fills the outputs.

    Shapes are (batch, heads, seqlen, head_dim) whatever the caller's layout; mask and bias are
    broadcast views of (batch, heads_q, seqlen_q, seqlen_k); lse and dlse are C-contiguous
    (batch, heads_q, seqlen_q); dbias has the bias's own axes of length 1.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    mask: Array = None
    bias: Array = None
    q_lengths: Array = None
    kv_lengths: Array = None
    dout: Array = None
    dlse: Array = None
    dq: Array = None
    dk: Array = None
    dv: Array = None
    dbias: Array = None


class VectorArrays(NamedTuple):
    """The arrays of one `vector_add`, of equal shape."""

    a: Array
    b: Array
    out: Array


class MergeArrays(NamedTuple):
    """Partial results over disjoint keys and the arrays for their merged result."""

    outs: list[Array]
    lses: list[Array]
    out: Array
    lse: Array


class Gradients(NamedTuple):
    """Gradients of the inputs of `attention`; ``dbias`` is None unless it was asked for."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
