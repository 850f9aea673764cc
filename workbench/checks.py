"""Every check of what a user passed in, and the arrays made ready for a backend.

`prepare_attention`, `prepare_attention_backward`, `prepare_vector_add` and `prepare_merge` raise a
`TypeError` or a `ValueError` that names the argument, what it got and what it takes, or return a
`Problem` (sizes and options, never arrays) and the `Arrays` in one canonical form: 4-D views of
shape (batch, heads, seqlen, head_dim) with a unit stride on the last axis. Nobody behind this
module validates again.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from workbench import compile as compiler
from workbench.arrays import (
    array_module,
    as_array,
    canonical,
    device_of,
    is_device_array,
    native,
    overlap,
    unit_last_stride,
)
from workbench.problem import (
    BACKENDS,
    DEVICE_BACKENDS,
    DTYPES,
    KERNEL_BACKENDS,
    LAYOUTS,
    MAX_ALIGNMENT,
    MAX_AXES,
    Array,
    Arrays,
    HostArray,
    MergeArrays,
    Problem,
    VectorArrays,
    VectorProblem,
)


@dataclass(slots=True)
class Prepared:
    """A checked call: what to compute, on what, and how its results go back to the caller.

    Attributes
    ----------
    backend : str
        Never ``"auto"``.
    outputs : list
        ``(name, filled, target)``: the array that the backend fills, in the caller's layout, and
        the array that the caller gave for it, which takes a copy unless it is the same.
    copied : list of str
        Sentences about inputs that could not be read in place.
    to_host : bool
        Whether host arrays went to the GPU, so that the results go back.
    """

    backend: str
    problem: Any = None
    arrays: Any = None
    outputs: list[tuple[str, Array, Array | None]] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    to_host: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the kernel reads the caller's arrays and its plain outputs are the results."""
        return not self.copied and all(
            target is None and filled.flags.c_contiguous for _, filled, target in self.outputs
        )

    @property
    def device(self) -> int:
        """The GPU that holds the arrays."""
        return int(self.outputs[0][1].data.device_id)


_OPTIONAL = ("mask", "bias", "q_lengths", "kv_lengths", "dlse")


def as_arrays(named: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of a call, without the optional ones that were left out."""
    return {
        name: as_array(name, x)
        for name, x in named.items()
        if not (x is None and name in _OPTIONAL)
    }


def _take_arrays(named: Mapping[str, Any]) -> dict[str, Array]:
    """All arrays of a call, of one kind and on one device."""
    arrays = as_arrays(named)
    on_device = {name: is_device_array(x) for name, x in arrays.items()}
    if len(set(on_device.values())) > 1:
        kinds = ", ".join(
            f"{n} is a {'CuPy' if d else 'NumPy'} array" for n, d in on_device.items()
        )
        raise TypeError(f"host and device arrays do not mix: {kinds}")
    devices = {name: x.data.device_id for name, x in arrays.items() if on_device[name]}
    if len(set(devices.values())) > 1:
        raise ValueError(
            "all arrays must be on one GPU: "
            + ", ".join(f"{name} is on GPU {device}" for name, device in devices.items())
        )
    return {name: native(x) for name, x in arrays.items()}


def _shapes(arrays: dict[str, Array], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {arrays[name].shape}" for name in names if name in arrays)


def dtype_name(name: str, x: Array) -> str:
    """The key of `DTYPES` for the dtype of `x`."""
    for key, dtype in DTYPES.items():
        if x.dtype == dtype:
            return key
    raise TypeError(f"{name} has dtype {x.dtype}; it takes {', '.join(DTYPES)}")


def _same_dtype(arrays: dict[str, Array], names: tuple[str, ...]) -> str:
    present = [name for name in names if name in arrays]
    dtype = dtype_name(present[0], arrays[present[0]])
    for name in present[1:]:
        if dtype_name(name, arrays[name]) != dtype:
            kinds = ", ".join(f"{n} {arrays[n].dtype}" for n in present)
            raise TypeError(f"{name} must have the dtype of {present[0]}; got {kinds}")
    return dtype


# --------------------------------------------------------------------------------------- options


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it takes True or False")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name} is {value!r}; it takes one of {', '.join(map(repr, choices))}")


def _number(name: str, value: Any) -> float:
    """A finite real number as a Python float; NumPy scalars and 0-d arrays are numbers too."""
    # A complex NumPy scalar and an array of one element would convert, with a warning at most.
    misfit = np.iscomplexobj(value) or getattr(value, "ndim", 0) != 0
    if misfit or isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} is {value!r}; it takes a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {value!r}; it takes a real number") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it takes a finite number")
    return number


def _fits_float32(name: str, value: float) -> None:
    info = np.finfo(np.float32)
    if value and not float(info.tiny) <= abs(value) <= float(info.max):
        raise ValueError(
            f"{name} is {value}; with arrays other than float64 it takes 0 or what float32 holds, "
            f"{info.tiny} to {info.max}"
        )


def _window_end(side: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        end = operator.index(value)
    except TypeError as error:
        raise TypeError(f"window's {side} end is {value!r}; it takes an integer or None") from error
    if end < -1:
        raise ValueError(
            f"window's {side} end is {end}; it takes 0 or more, or -1 or None for open"
        )
    # Further than any sequence is long: open, before a position plus it overflows.
    return None if end == -1 or end >= 2**62 else end


def _key_window(causal: Any, window: Any) -> tuple[int | None, int | None, bool]:
    """(left, right, top_left) of the keys around a query's position."""
    if not (
        isinstance(causal, (bool, np.bool_)) or (isinstance(causal, str) and causal == "top_left")
    ):
        raise ValueError(f"causal is {causal!r}; it takes True, False or 'top_left'")
    left: int | None = None
    right: int | None = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window is {window!r}; it takes a pair (left, right) or None")
        left, right = _window_end("left", window[0]), _window_end("right", window[1])
    return left, 0 if causal else right, isinstance(causal, str)


def _check_lengths(name: str, x: Array, batch: int, seqlen: int, axis: str) -> None:
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {x.dtype}; it takes an integer array of shape (batch,)")
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {x.shape}; it takes (batch,) = ({batch},)")
    # Lengths on the GPU are clamped by the kernels: a check here would make the host wait.
    if isinstance(x, np.ndarray) and x.size and (x.min() < 0 or x.max() > seqlen):
        raise ValueError(f"{name} is {x.tolist()}; each must be from 0 to {axis} = {seqlen}")


def _int32_lengths(x: Array, seqlen: int) -> Array:
    """`x`, or a contiguous int32 copy; what was not checked is clamped before it is narrowed."""
    if x.dtype != np.int32:
        x = x.astype(np.int64, copy=False).clip(0, seqlen).astype(np.int32)
    return array_module(x).ascontiguousarray(x)


def _broadcast(name: str, x: Array, shape: tuple[int, int, int, int]) -> Array:
    """`x` as a 4-D view of `shape`, with stride 0 along every axis that it is broadcast over."""
    fits = x.ndim <= 4 and all(
        n in (1, want) for n, want in zip(x.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {x.shape}; it must broadcast to (batch, heads_q, seqlen_q, seqlen_k)"
            f" = {shape}"
        )
    return array_module(x).broadcast_to(x, shape)


# ------------------------------------------------------------------------------------- attention

_INPUTS = ("q", "k", "v")


def resolve_backend(backend: str, on_device: bool) -> str:
    """The backend that runs a call; ``"auto"`` is a GPU's where there is one."""
    _choice("backend", backend, BACKENDS)
    if backend == "auto":
        return "cuda" if on_device or compiler.gpu_missing() is None else "cpu"
    if on_device and backend not in DEVICE_BACKENDS:
        raise ValueError(
            f"backend {backend!r} takes NumPy arrays, but the arrays are on a GPU; "
            "use 'cuda' or 'numba', or copy them with cupy.asnumpy"
        )
    return backend


class _Sizes(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int


def _sizes(arrays: dict[str, Array], layout: str) -> _Sizes:
    """The sizes that q, k and v agree on; where there are no values, k's stand in for them."""
    shown = _shapes(arrays, _INPUTS)
    present = [name for name in _INPUTS if name in arrays]
    for name in present:
        if not 2 <= arrays[name].ndim <= 4:
            raise ValueError(f"{name} has {arrays[name].ndim} axes; it takes 2 to 4: {shown}")
        if arrays[name].ndim != arrays["q"].ndim:
            raise ValueError(f"{name} must have as many axes as q: {shown}")
    q, k, *values = (canonical(arrays[name], layout).shape for name in present)
    v = values[0] if values else k
    for axis, label in ((0, "batch"), (1, "heads"), (2, "seqlen")):
        if k[axis] != v[axis]:
            raise ValueError(f"v must have k's {label}, {k[axis]}, but has {v[axis]}: {shown}")
    if k[0] != q[0]:
        raise ValueError(f"k must have q's batch, {q[0]}, but has {k[0]}: {shown}")
    if k[3] != q[3]:
        raise ValueError(f"k must have q's head_dim, {q[3]}, but has {k[3]}: {shown}")
    if q[3] == 0 or v[3] == 0:
        raise ValueError(f"head_dim must be at least 1: {shown}")
    if q[1] != k[1] and (k[1] == 0 or q[1] % k[1]):
        raise ValueError(
            f"q's heads, {q[1]}, must be a multiple of the heads of k and v, {k[1]}: {shown}"
        )
    return _Sizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])


def _expect_shape(name: str, x: Array, shape: tuple[int, ...], context: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; it takes {shape}: {context}")


def _expect_lse(call: _Call, name: str, context: str) -> None:
    _expect_shape(name, call.given[name], call.lse_shape, context)
    if call.given[name].dtype != call.acc:
        raise TypeError(f"{name} has dtype {call.given[name].dtype}; it takes {call.acc}")


@dataclass(slots=True)
class _Call:
    """A call whose arguments have all been checked, before any array is copied or allocated."""

    given: dict[str, Array]
    layout: str
    ndim: int
    sizes: _Sizes
    dtype: str
    options: dict[str, Any]

    @property
    def acc(self) -> np.dtype[Any]:
        return DTYPES["float64" if self.dtype == "float64" else "float32"]

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        sizes = self.sizes
        return sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.score_shape[:3][4 - self.ndim :]

    def tensor_shape(self, name: str) -> tuple[int, int, int, int]:
        """Canonical shape of q, k, v, out or one of their gradients."""
        batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = self.sizes
        return {
            "q": (batch, heads_q, seqlen_q, head_dim),
            "k": (batch, heads_kv, seqlen_k, head_dim),
            "v": (batch, heads_kv, seqlen_k, head_dim_v),
            "out": (batch, heads_q, seqlen_q, head_dim_v),
        }[name.removeprefix("d") if name != "dout" else "out"]

    def user_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the same array in the caller's layout and number of axes."""
        batch, heads, seqlen, dim = self.tensor_shape(name)
        if self.ndim == 2:
            return (seqlen, dim)
        four = (batch, heads, seqlen, dim) if self.layout == "bhnd" else (batch, seqlen, heads, dim)
        return four[4 - self.ndim :]


def _check(
    named: Mapping[str, Any],
    tensors: tuple[str, ...],
    *,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    layout: Any,
) -> _Call:
    """Check what forward and backward have in common."""
    _choice("layout", layout, LAYOUTS)
    given = _take_arrays(named)
    dtype = _same_dtype(given, tensors)
    sizes = _sizes(given, layout)
    left, right, top_left = _key_window(causal, window)
    softcap = _number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; it takes 0 (off) or a positive number")
    scale = 1.0 / math.sqrt(sizes.head_dim) if scale is None else _number("scale", scale)
    if dtype != "float64":  # computed in float32
        _fits_float32("scale", scale)
        _fits_float32("softcap", softcap)
    call = _Call(given, layout, given["q"].ndim, sizes, dtype, {})
    call.options = {
        "scale": scale,
        "softcap": softcap,
        "window_left": left,
        "window_right": right,
        "top_left": top_left,
    }
    if "mask" in given and given["mask"].dtype != np.bool_:
        raise TypeError(f"mask has dtype {given['mask'].dtype}; it takes bool, True = may attend")
    if "bias" in given:
        dtype_name("bias", given["bias"])
    for name in ("mask", "bias"):
        if name in given:
            _broadcast(name, given[name], call.score_shape)
    for name, axis, seqlen in (
        ("q_lengths", "seqlen_q", sizes.seqlen_q),
        ("kv_lengths", "seqlen_k", sizes.seqlen_k),
    ):
        if name in given:
            _check_lengths(name, given[name], sizes.batch, seqlen, axis)
    return call


def _check_target(
    name: str, x: Any, shape: tuple[int, ...], dtype: Any, given: dict[str, Array]
) -> Array:
    """Check an array that the caller gave for a result."""
    x = as_array(name, x)
    first = next(iter(given))
    if is_device_array(x) != is_device_array(given[first]):
        raise TypeError(
            f"{name} must be a NumPy or CuPy array as {first} is; got a {type(x).__name__}"
        )
    if is_device_array(x) and x.data.device_id != given[first].data.device_id:
        raise ValueError(
            f"all arrays must be on one GPU: {first} is on GPU {given[first].data.device_id}, "
            f"{name} is on GPU {x.data.device_id}"
        )
    _expect_shape(name, x, shape, _shapes(given, tuple(given)))
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; it takes {dtype}")
    _check_writable(name, x, given)
    return x


def _check_writable(name: str, x: Array, inputs: dict[str, Array]) -> None:
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if x.size and _repeats_elements(x):
        raise ValueError(f"{name} repeats elements in memory, so it cannot be written to")
    for other, array in inputs.items():
        if overlap(x, array):
            raise ValueError(f"{name} overlaps {other} in memory; it takes an array of its own")


def _repeats_elements(x: Array) -> bool:
    """Whether an axis of `x` steps back into what the axes of smaller steps span."""
    span = x.itemsize
    axes = ((abs(stride), n) for stride, n in zip(x.strides, x.shape, strict=True) if n > 1)
    for step, n in sorted(axes):
        if step < span:
            return True
        span += step * (n - 1)
    return False


def _place(given: dict[str, Array], backend: Any) -> Prepared:
    """Resolve the backend and bring host arrays to the GPU where that backend needs them."""
    on_device = is_device_array(next(iter(given.values())))
    prepared = Prepared(resolve_backend(backend, on_device))
    if prepared.backend in DEVICE_BACKENDS and not on_device:
        cupy = compiler.require_gpu(prepared.backend)
        prepared.to_host = True
        given.update({name: cupy.asarray(x) for name, x in given.items()})
        prepared.copied.append("NumPy arrays are copied to the GPU and the results back")
    return prepared


def _ready_inputs(call: _Call, tensors: tuple[str, ...], copied: list[str]) -> dict[str, Array]:
    """Canonical views of the inputs; what no kernel can read in place is copied, and said."""
    ready: dict[str, Array] = {}
    xp = array_module(call.given["q"])
    for name in tensors:
        view = canonical(call.given[name], call.layout)
        ready[name] = unit_last_stride(view)
        if ready[name] is not view:
            copied.append(f"{name} is copied: the elements of its last axis are not side by side")
    for name in ("lse", "dlse"):
        if name in call.given:
            ready[name] = xp.ascontiguousarray(call.given[name].reshape(call.score_shape[:3]))
            if not call.given[name].flags.c_contiguous:
                copied.append(f"{name} is copied: it is not contiguous")
    if "mask" in call.given:
        ready["mask"] = _broadcast("mask", call.given["mask"], call.score_shape)
    if "bias" in call.given:
        bias = call.given["bias"]
        if bias.dtype != call.acc:
            copied.append(f"bias is converted from {bias.dtype} to {call.acc}")
        # Converted before it is broadcast: a copy of what the caller holds, never of N x N.
        ready["bias"] = _broadcast("bias", bias.astype(call.acc, copy=False), call.score_shape)
    for name, seqlen in (
        ("q_lengths", call.sizes.seqlen_q),
        ("kv_lengths", call.sizes.seqlen_k),
    ):
        if name in call.given:
            ready[name] = _int32_lengths(call.given[name], seqlen)
            if ready[name] is not call.given[name]:
                copied.append(f"{name} is converted to contiguous int32")
    return ready


def _add_tensor(
    prepared: Prepared, call: _Call, ready: dict[str, Array], name: str, target: Array | None
) -> None:
    """Allocate the output `name` in the caller's layout, or write into the caller's array."""
    fresh = target
    if fresh is None or prepared.to_host or not _writable_in_place(fresh):
        xp = array_module(call.given["q"])
        fresh = xp.empty(call.user_shape(name), DTYPES[call.dtype])
    ready[name] = canonical(fresh, call.layout)
    prepared.outputs.append((name, fresh, target))


def _writable_in_place(x: Array) -> bool:
    aligned = is_device_array(x) or x.flags.aligned
    return bool(aligned) and unit_last_stride(x) is x


def _finish(
    prepared: Prepared, op: str, call: _Call, ready: dict[str, Array], **more: Any
) -> Prepared:
    prepared.arrays = Arrays(**ready)
    problem = Problem(
        op=op, dtype=call.dtype, **call.sizes._asdict(), **call.options, **more,
        has_mask="mask" in ready, has_bias="bias" in ready,
        has_q_lengths="q_lengths" in ready, has_kv_lengths="kv_lengths" in ready,
        has_dlse="dlse" in ready, return_dbias="dbias" in ready,
    )  # fmt: skip
    for_kernels = prepared.backend in KERNEL_BACKENDS
    prepared.problem = with_strides(problem, prepared.arrays) if for_kernels else problem
    return prepared


def with_strides(problem: Problem, arrays: Arrays) -> Problem:
    """The problem with what a GPU kernel must know of its arrays: strides and alignment."""
    strides, alignment = _device_strides(arrays)
    return dataclasses.replace(problem, strides=strides, alignment=alignment)


def _device_strides(arrays: Arrays) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], int]:
    """Strides in elements of what a kernel reads by stride, and the alignment of all tensors."""
    strides = []
    bits = MAX_ALIGNMENT
    for name, x in arrays._asdict().items():
        if x is None or x.ndim != 4:
            continue
        if name in ("mask", "bias", "dbias"):
            # 0 along every axis of length 1, so that a dbias repeats where the bias did.
            steps = (0 if n == 1 else s for s, n in zip(x.strides, x.shape, strict=True))
        else:
            steps = (s for s in x.strides[:3])
            bits |= x.data.ptr if is_device_array(x) else x.ctypes.data
            for n, stride in zip(x.shape[:3], x.strides, strict=False):
                bits |= stride if n > 1 else 0
        strides.append((name, tuple(s // x.itemsize for s in steps)))
    return tuple(strides), bits & -bits


def prepare_attention(
    named: Mapping[str, Any], *, out: Any = None, return_lse: Any, backend: Any, **options: Any
) -> Prepared:
    """Check a call of `attention` and make its arrays ready."""
    call = _check(named, _INPUTS, **options)
    _flag("return_lse", return_lse)
    targets: dict[str, Array] = {}
    if out is not None:
        pair = out if return_lse else (out,)
        if return_lse and not (isinstance(out, (tuple, list)) and len(out) == 2):
            raise TypeError(
                f"out is a {type(out).__name__}; with return_lse=True it takes the pair (out, lse)"
            )
        shapes = (call.user_shape("out"), call.lse_shape)
        dtypes = (DTYPES[call.dtype], call.acc)
        for name, x, shape, dtype in zip(("out", "lse"), pair, shapes, dtypes, strict=False):
            targets[name] = _check_target(name, x, shape, dtype, call.given)
        if len(targets) == 2 and overlap(targets["out"], targets["lse"]):
            raise ValueError("out and lse overlap in memory; each takes an array of its own")
    prepared = _place(call.given, backend)
    ready = _ready_inputs(call, _INPUTS, prepared.copied)
    _add_tensor(prepared, call, ready, "out", targets.get("out"))
    target = targets.get("lse")
    lse = target
    if lse is None or prepared.to_host or not lse.flags.c_contiguous:
        lse = array_module(call.given["q"]).empty(call.lse_shape, call.acc)
    ready["lse"] = lse.reshape(call.score_shape[:3])
    prepared.outputs.append(("lse", lse, target))
    return _finish(prepared, "attention", call, ready)


def prepare_attention_backward(
    named: Mapping[str, Any], *, backend: Any, deterministic: Any, return_dbias: Any, **options: Any
) -> Prepared:
    """Check a call of `attention_backward` and make its arrays ready."""
    tensors = (*_INPUTS, "dout", "out")
    call = _check(named, tensors, **options)
    _flag("deterministic", deterministic)
    context = _shapes(call.given, _INPUTS)
    for name in ("dout", "out"):
        _expect_shape(name, call.given[name], call.user_shape("out"), context)
    for name in ("lse", "dlse"):
        if name in call.given:
            _expect_lse(call, name, context)
    if _flag("return_dbias", return_dbias) and "bias" not in call.given:
        raise ValueError("return_dbias=True needs a bias")
    prepared = _place(call.given, backend)
    ready = _ready_inputs(call, tensors, prepared.copied)
    for name in ("dq", "dk", "dv"):
        _add_tensor(prepared, call, ready, name, None)
    if return_dbias:
        bias = call.given["bias"]
        xp = array_module(bias)
        ready["dbias"] = xp.empty((1,) * (4 - bias.ndim) + bias.shape, call.acc)
        # Accumulated in float32 (float64) and handed back in the bias's own dtype.
        own = np if prepared.to_host else xp
        target = None if bias.dtype == call.acc else own.empty(bias.shape, bias.dtype)
        prepared.outputs.append(("dbias", ready["dbias"].reshape(bias.shape), target))
    return _finish(prepared, "attention_backward", call, ready, deterministic=bool(deterministic))


def prepare_attention_weights(
    named: Mapping[str, Any], *, rows: Any, reduce: Any, **options: Any
) -> tuple[Prepared, HostArray]:
    """Check a call of `attention_weights`; also returns the rows as integers from 0."""
    call = _check(named, ("q", "k"), **options)
    _expect_lse(call, "lse", _shapes(call.given, ("q", "k")))
    if reduce is not None:
        _choice("reduce", reduce, ("mean",))
        if call.ndim == 2:
            raise ValueError("reduce='mean' needs a heads axis; q and k have 2 axes")
    chosen = _rows(rows, call.sizes.seqlen_q)
    prepared = Prepared("reference")
    ready = _ready_inputs(call, ("q", "k"), prepared.copied)
    return _finish(prepared, "attention", call, {**ready, "v": None, "out": None}), chosen


def _rows(rows: Any, seqlen: int) -> HostArray:
    """The rows that an integer, a slice, a sequence or None (all of them) asks for."""
    numbers = np.arange(seqlen)
    if rows is None:
        return numbers
    if isinstance(rows, slice):
        try:
            return numbers[rows]
        except (TypeError, ValueError) as error:
            raise TypeError(f"rows is {rows}; {error}") from error
    index = np.asarray(rows)
    if index.size == 0 and not isinstance(rows, np.ndarray):
        index = index.astype(np.intp)
    if index.dtype.kind not in "iu" or index.ndim > 1:
        raise TypeError(f"rows is {rows!r}; it takes an integer, a sequence of them, or a slice")
    index = index.reshape(-1)
    if index.size and not (-seqlen <= index.min() and index.max() < seqlen):
        raise ValueError(
            f"rows is {rows!r}; each must be from {-seqlen} to seqlen_q - 1 = {seqlen - 1}"
        )
    chosen: HostArray = numbers[index]
    return chosen


# ----------------------------------------------------------------------- vector_add and merging


def prepare_vector_add(named: Mapping[str, Any], *, out: Any = None, backend: Any) -> Prepared:
    """Check a call of `vector_add` and make its arrays ready."""
    given = _take_arrays(named)
    dtype = _same_dtype(given, ("a", "b"))
    shown = _shapes(given, ("a", "b"))
    if given["a"].shape != given["b"].shape:
        raise ValueError(f"b must have a's shape, nothing is broadcast: {shown}")
    target = None
    if out is not None:
        target = _check_target("out", out, given["a"].shape, DTYPES[dtype], given)
    prepared = _place(given, backend)
    xp = array_module(given["a"])
    with device_of(given.values()):
        filled = target
        if filled is None or prepared.to_host:
            # The axes in the order that a has them in memory, as NumPy's a + b does.
            filled = xp.empty_like(given["a"])
        walk = _merge_axes((given["a"], given["b"], filled))
        if len(walk[0]) > MAX_AXES and prepared.backend in KERNEL_BACKENDS:
            prepared.copied.append(f"arrays of more than {MAX_AXES} separate axes are copied")
            given = {name: xp.ascontiguousarray(x) for name, x in given.items()}
            filled = xp.empty(given["a"].shape, DTYPES[dtype])
            walk = _merge_axes((given["a"], given["b"], filled))
    prepared.outputs.append(("out", filled, target))
    prepared.arrays = VectorArrays(given["a"], given["b"], filled)
    shape, strides = walk
    prepared.problem = VectorProblem(
        "vector_add", dtype, shape, tuple(zip(("a", "b", "out"), strides, strict=True))
    )
    return prepared


def _merge_axes(arrays: tuple[Array, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Shape and strides, in elements, after merging the axes that all arrays walk as one."""
    shape: list[int] = []
    strides: list[list[int]] = [[] for _ in arrays]
    last = arrays[-1]
    for axis in sorted(range(last.ndim), key=lambda axis: -abs(last.strides[axis])):
        n = last.shape[axis]
        if n == 1:
            continue
        steps = [x.strides[axis] // x.itemsize for x in arrays]
        if shape and all(s[-1] == step * n for s, step in zip(strides, steps, strict=True)):
            shape[-1] *= n
            for s, step in zip(strides, steps, strict=True):
                s[-1] = step
        else:
            shape.append(n)
            for s, step in zip(strides, steps, strict=True):
                s.append(step)
    if not shape:
        return (1,), [(1,) for _ in arrays]
    return tuple(shape), [tuple(s) for s in strides]


def prepare_merge(outs: Any, lses: Any, *, backend: Any) -> Prepared:
    """Check a call of `merge_attention` and make its arrays ready."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (tuple, list)):
            raise TypeError(f"{name} is a {type(parts).__name__}; it takes a sequence of arrays")
    if len(outs) < 2 or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention takes two or more (out, lse) pairs; got {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    named = {f"outs[{i}]": x for i, x in enumerate(outs)}
    named |= {f"lses[{i}]": x for i, x in enumerate(lses)}
    given = _take_arrays(named)
    names = tuple(f"outs[{i}]" for i in range(len(outs)))
    dtype = _same_dtype(given, names)
    acc = DTYPES["float64" if dtype == "float64" else "float32"]
    first = given["outs[0]"]
    context = _shapes(given, tuple(given))
    if first.ndim < 1:
        raise ValueError(f"outs[0] has no axes; it takes (..., seqlen_q, head_dim_v): {context}")
    for name in names:
        _expect_shape(name, given[name], first.shape, context)
    for i in range(len(lses)):
        name = f"lses[{i}]"
        _expect_shape(name, given[name], first.shape[:-1], context)
        if given[name].dtype != acc:
            raise TypeError(f"{name} has dtype {given[name].dtype}; it takes {acc}")
    prepared = _place(given, backend)
    xp = array_module(given["outs[0]"])
    with device_of(given.values()):
        out, lse = xp.empty(first.shape, DTYPES[dtype]), xp.empty(first.shape[:-1], acc)
    prepared.outputs = [("out", out, None), ("lse", lse, None)]
    prepared.arrays = MergeArrays(
        [given[f"outs[{i}]"] for i in range(len(outs))],
        [given[f"lses[{i}]"] for i in range(len(lses))],
        out,
        lse,
    )
    return prepared


def hand_back(prepared: Prepared) -> tuple[Array, ...]:
    """The results as the caller gets them: in the arrays that he gave, on the side he is on."""
    handed = []
    for _, filled, target in prepared.outputs:
        result = filled.get() if prepared.to_host else filled
        if target is not None and target is not filled:
            target[...] = result
            result = target
        handed.append(result)
    return tuple(handed)


PREPARE: dict[str, Callable[..., Prepared]] = {
    "attention": prepare_attention,
    "attention_backward": prepare_attention_backward,
    "vector_add": prepare_vector_add,
}
