"""The layers of a vision transformer, on NumPy and CuPy arrays of any dtype that attention takes.

Products take their operands in the dtype of the computation, T, and add in float32 or wider. What
lies between them, the residual stream, norms and activations, is kept in R: float64 for float64,
else float32. NumPy has no fast product of halves: its weights of float16 and bfloat16 are rounded
to T and held in float32.

On the GPU every function is one or two kernels of CuPy's, which read and write an array once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from workbench.arrays import array_module
from workbench.blas import times_transposed
from workbench.problem import Array

# x * sigmoid(slope * x + cubic * x^3): the slope and the cubic factor.
GATED = {
    "gelu_tanh": (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715),
    "quick_gelu": (1.702, 0.0),
    "silu": (1.0, 0.0),
}
ACTIVATIONS = ("gelu", *GATED)

# Elements from which on a kernel on several threads is faster than SciPy, and worth its import.
COMPILED_ELEMENTS = 1 << 16


def wide(dtype: Any) -> np.dtype[Any]:
    """R, the dtype of what is added up in a computation of this dtype."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _is_compiled(x: Array) -> bool:
    """Whether an array is for the compiled kernels of the CPU."""
    here = array_module(x) is np and x.dtype == np.float32
    return here and x.size >= COMPILED_ELEMENTS


def product(x: Array, weight: Array) -> Array:
    """X W^T over the last axis: all tokens of all images in one matrix product.

    Parameters
    ----------
    x : array (..., inputs)
        In T.
    weight : array (outputs, inputs)
        As the model holds it.

    Returns
    -------
    array (..., outputs)
        In the dtype of `weight`.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(weight.dtype, copy=False)
    xp = array_module(x)
    if xp is np or weight.dtype in (np.float32, np.float64):
        y = rows @ weight.T
    else:
        y = xp.empty((len(rows), len(weight)), weight.dtype)
        times_transposed(xp.ascontiguousarray(rows), weight, y)
    return y.reshape(*x.shape[:-1], len(weight))


def linear(x: Array, weight: Array, bias: Array | None, dtype: Any) -> Array:
    """X W^T + b in `dtype`, with b where the layer has one."""
    y = product(x, weight)
    if bias is None:
        pass
    elif array_module(y) is not np and y.dtype.itemsize == 2:
        y = _gpu("add_halves")(y, bias)
    else:
        y += bias
    return y.astype(dtype, copy=False)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float, dtype: Any) -> Array:
    """Shift and scale every token to mean 0 and variance 1, then to its learned range.

    Parameters
    ----------
    x : array (..., dim)
        Tokens.
    weight, bias : array (dim,)
        The learned range.
    eps : float
        Added to the variance.
    dtype : dtype
        Of the result; the mean and the variance are computed in R.

    Returns
    -------
    array (..., dim)
    """
    x = x.astype(wide(dtype), copy=False)
    if _is_compiled(x):
        from workbench.cpu import layer_norm as compiled

        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        return compiled(rows, weight, bias, eps).reshape(x.shape).astype(dtype, copy=False)
    mean = x.mean(axis=-1, keepdims=True)
    if array_module(x) is not np:
        real = x.dtype.type
        squares = _gpu("squares")(x, mean, axis=-1, keepdims=True)
        numbers = real(1 / x.shape[-1]), real(eps)
        normed = array_module(x).empty(x.shape, dtype)
        return _gpu("normalise")(x, mean, squares, weight, bias, *numbers, normed)
    centred = x - mean
    variance = np.einsum("...i,...i->...", centred, centred)[..., None] / x.shape[-1]
    centred *= 1 / np.sqrt(variance + x.dtype.type(eps))
    centred *= weight
    centred += bias
    return centred.astype(dtype, copy=False)


def add_scaled(x: Array, y: Array, bias: Array, scale: Array | None) -> Array:
    """The residual connection x + scale * (y + bias), in the dtype of x; y may be written to."""
    if array_module(x) is not np:
        out = array_module(x).empty_like(x)
        if scale is None:
            return _gpu("add")(x, y, bias, out)
        return _gpu("add_scaled")(x, y, bias, scale, out)
    y = y.astype(x.dtype, copy=False)
    y += bias
    if scale is not None:
        y *= scale
    y += x
    return y


def activate(y: Array, bias: Array, name: str, dtype: Any) -> Array:
    """Add the bias and bend: act(y + bias) in `dtype`; y may be written to.

    Parameters
    ----------
    y : array (..., dim)
        What a product gave.
    bias : array (dim,)
        Added first.
    name : str
        One of `ACTIVATIONS`, or ``"swiglu"``: silu of the first half, times the second.
    dtype : dtype
        Of the result.

    Returns
    -------
    array (..., dim), or (..., dim / 2) for ``"swiglu"``
    """
    width = y.shape[-1] // 2 if name == "swiglu" else y.shape[-1]
    slope, cubic = GATED["silu"] if name == "swiglu" else GATED.get(name, (0.0, 0.0))
    xp = array_module(y)
    if xp is not np:
        out = xp.empty((*y.shape[:-1], width), dtype)
        if name == "gelu":
            return _gpu("gelu")(y, bias, math.sqrt(0.5), out)
        if name == "swiglu":
            gate, value = y[..., :width], y[..., width:]
            return _gpu("swiglu")(gate, bias[:width], value, bias[width:], out)
        return _gpu("gated")(y, bias, slope, cubic, out)
    if _is_compiled(y):
        from workbench.cpu import activate as compiled

        gated = None if name == "gelu" else (slope, cubic)
        compiled(y.reshape(-1, y.shape[-1]), bias, width, gated)
    else:
        y += bias
        bent = y[..., :width]
        bent[...] = _gelu(bent) if name == "gelu" else _gated(bent, slope, cubic)
    if name == "swiglu":
        y = y[..., :width] * y[..., width:]
    return y.astype(dtype, copy=False)


def _gelu(x: np.ndarray[Any, Any]) -> Any:
    from scipy.special import ndtr

    return x * ndtr(x)


def _gated(x: np.ndarray[Any, Any], slope: float, cubic: float) -> Any:
    from scipy.special import expit

    real = x.dtype.type
    return x * expit(x * (real(slope) + real(cubic) * x * x))


_WIDE = """
template <typename T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };
"""


@functools.cache
def _gpu(name: str) -> Any:
    """A kernel for CuPy arrays: T is the dtype of products and R that of everything else."""
    import cupy

    if name == "squares":
        step = "(x - mean) * (x - mean)"
        return cupy.ReductionKernel(
            "R x, R mean", "R y", step, "a + b", "y = a", "0", f"vit_{name}"
        )
    arguments, result, code = {
        "normalise": (
            "R x, R mean, R squares, W weight, W bias, R share, R eps",
            "T y",
            "y = T((x - mean) * rsqrt(squares * share + eps) * R(weight) + R(bias))",
        ),
        "add_halves": ("T x, T y", "T z", "z = T(float(x) + float(y))"),
        "add": ("R x, T y, W bias", "R z", "z = x + (R(y) + R(bias))"),
        "add_scaled": (
            "R x, T y, W bias, W scale",
            "R z",
            "z = x + R(scale) * (R(y) + R(bias))",
        ),
        "gelu": (
            "S x, W bias, float64 root",
            "T y",
            "R t = R(x) + R(bias); y = T(t * R(0.5) * (R(1) + erf(t * R(root))))",
        ),
        "gated": (
            "S x, W bias, float64 slope, float64 cubic",
            "T y",
            "R t = R(x) + R(bias); y = T(t / (R(1) + exp(-t * (R(slope) + R(cubic) * t * t))))",
        ),
        "swiglu": (
            "S gate, W bias, S value, W value_bias",
            "T y",
            "R t = R(gate) + R(bias); y = T(t / (R(1) + exp(-t)) * (R(value) + R(value_bias)))",
        ),
    }[name]
    # CuPy learns a type from arrays alone, and where no array is of type R, T tells which it is.
    wide_of_t = {"preamble": _WIDE, "loop_prep": "typedef Wide<T>::type R"}
    more = {} if "R x" in arguments else wide_of_t
    return cupy.ElementwiseKernel(arguments, result, code, f"vit_{name}", **more)
