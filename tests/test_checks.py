"""Every error of the contract: its type, the words of its message, and that nothing was written.

A row of a table holds what it changes about a call that is right. The message must name the
argument, what came and what would be taken. The rows run on the host and, where they mean
something there, on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from building import missing

import workbench
from workbench import checks
from workbench import compile as compiler
from workbench.arrays import array_module, as_array, overlap
from workbench.problem import DTYPES, LAYOUTS, Problem

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 8, 6
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Row(NamedTuple):
    """What is changed about a right call, and how it must fail.

    A value of `change` that is a function gets the arguments of the right call.
    """

    change: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]
    host_only: bool = False


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def right_attention() -> dict[str, Any]:
    return {"q": array(B, HQ, NQ, D), "k": array(B, HKV, NK, D), "v": array(B, HKV, NK, DV)}


def right_backward() -> dict[str, Any]:
    out, lse = array(B, HQ, NQ, DV), array(B, HQ, NQ)
    return {"dout": array(B, HQ, NQ, DV), **right_attention(), "out": out, "lse": lse}


def changed(
    arguments: dict[str, Any], change: dict[str, Any], move: Callable[[Any], Any] = lambda x: x
) -> dict[str, Any]:
    """The arguments of a row's call, with `move` applied to every array first."""
    arguments = {name: move(x) for name, x in arguments.items()}
    given = {
        name: x(SimpleNamespace(**arguments)) if callable(x) else move(x)
        for name, x in change.items()
    }
    return arguments | given


def fails(function: Callable[..., Any], arguments: dict[str, Any], row: Row) -> None:
    with pytest.raises(row.error) as caught:
        function(**arguments)
    message = str(caught.value)
    for word in row.words:
        assert word in message, f"{word!r} is not in {message!r}"


# Of attention and attention_backward alike.
COMMON = {
    # What is no array.
    "q-list": Row({"q": [[1.0]]}, TypeError, ("q is a list", "NumPy or CuPy array")),
    "k-number": Row({"k": 3.0}, TypeError, ("k is a float", "NumPy or CuPy array")),
    "v-none": Row({"v": None}, TypeError, ("v is a NoneType", "NumPy or CuPy array")),
    "q-scalar": Row({"q": np.float32(1)}, TypeError, ("q is a float32", "array")),
    "q-string": Row({"q": "q"}, TypeError, ("q is a str",)),
    "mask-list": Row({"mask": [[True]]}, TypeError, ("mask is a list", "NumPy or CuPy array")),
    "bias-number": Row({"bias": 1.0}, TypeError, ("bias is a float",)),
    "q_lengths-list": Row({"q_lengths": [5, 5]}, TypeError, ("q_lengths is a list",)),
    "kv_lengths-list": Row({"kv_lengths": [7, 7]}, TypeError, ("kv_lengths is a list",)),
    # Dtypes.
    "q-int": Row(
        {"q": array(B, HQ, NQ, D, dtype=np.int32)}, TypeError,
        ("q has dtype int32", "float16, bfloat16, float32, float64"),
    ),
    "q-complex": Row(
        {"q": array(B, HQ, NQ, D, dtype=np.complex64)}, TypeError, ("q has dtype complex64",)
    ),
    "k-half": Row(
        {"k": array(B, HKV, NK, D, dtype=np.float16)}, TypeError,
        ("k must have the dtype of q", "q float32", "k float16", "v float32"),
    ),
    "v-double": Row(
        {"v": array(B, HKV, NK, DV, dtype=np.float64)}, TypeError,
        ("v must have the dtype of q", "v float64"),
    ),
    "halves-mixed": Row(
        {"q": array(B, HQ, NQ, D, dtype=np.float16), "k": array(B, HKV, NK, D, dtype=BFLOAT16)},
        TypeError,
        ("k must have the dtype of q", "q float16", "k bfloat16"),
    ),
    # Numbers of axes and shapes.
    "q-5-axes": Row({"q": array(1, B, HQ, NQ, D)}, ValueError, ("q has 5 axes", "2 to 4")),
    "q-1-axis": Row({"q": array(D)}, ValueError, ("q has 1 axes", "2 to 4", "k (2, 2, 7, 8)")),
    "k-3-axes": Row(
        {"k": array(HKV, NK, D)}, ValueError, ("k must have as many axes as q", "k (2, 7, 8)")
    ),
    "v-2-axes": Row(
        {"v": array(NK, DV)}, ValueError, ("v must have as many axes as q", "v (7, 6)")
    ),
    "k-batch": Row(
        {"k": array(3, HKV, NK, D), "v": array(3, HKV, NK, DV)}, ValueError,
        ("k must have q's batch, 2, but has 3", "q (2, 4, 5, 8), k (3, 2, 7, 8), v (3, 2, 7, 6)"),
    ),
    "v-batch": Row({"v": array(1, HKV, NK, DV)}, ValueError, ("v must have k's batch, 2",)),
    "v-heads": Row({"v": array(B, 1, NK, DV)}, ValueError, ("v must have k's heads, 2",)),
    "v-seqlen": Row({"v": array(B, HKV, 8, DV)}, ValueError, ("v must have k's seqlen, 7",)),
    "k-head_dim": Row({"k": array(B, HKV, NK, 4)}, ValueError, ("k must have q's head_dim, 8",)),
    "heads-not-multiple": Row(
        {"k": array(B, 3, NK, D), "v": array(B, 3, NK, DV)}, ValueError,
        ("q's heads, 4", "multiple", "k and v, 3"),
    ),
    "more-key-heads": Row(
        {"k": array(B, 8, NK, D), "v": array(B, 8, NK, DV)}, ValueError, ("q's heads, 4", "8")
    ),
    "no-key-heads": Row(
        {"k": array(B, 0, NK, D), "v": array(B, 0, NK, DV)}, ValueError, ("q's heads, 4", "0")
    ),
    "head_dim-0": Row(
        {"q": array(B, HQ, NQ, 0), "k": array(B, HKV, NK, 0)}, ValueError,
        ("head_dim must be at least 1",),
    ),
    "head_dim_v-0": Row(
        {"v": array(B, HKV, NK, 0)}, ValueError, ("head_dim must be at least 1", "v (2, 2, 7, 0)")
    ),
    "bnhd-of-bhnd": Row(
        {"layout": "bnhd"}, ValueError, ("q's heads, 5", "multiple", "k and v, 7")
    ),
    # Options.
    "layout": Row({"layout": "nhbd"}, ValueError, ("layout is 'nhbd'", "'bhnd'", "'bnhd'")),
    "layout-none": Row({"layout": None}, ValueError, ("layout is None", "'bhnd'")),
    "layout-list": Row({"layout": ["bhnd"]}, ValueError, ("layout is ['bhnd']", "'bhnd'")),
    "backend": Row(
        {"backend": "gpu"}, ValueError,
        ("backend is 'gpu'", "'auto'", "'cuda'", "'numba'", "'cpu'", "'reference'"),
    ),
    "backend-number": Row({"backend": 0}, ValueError, ("backend is 0", "'auto'")),
    "causal-word": Row({"causal": "bottom"}, ValueError, ("causal is 'bottom'", "'top_left'")),
    "causal-number": Row({"causal": 1}, ValueError, ("causal is 1", "True, False or 'top_left'")),
    "causal-none": Row({"causal": None}, ValueError, ("causal is None", "True, False")),
    "window-number": Row({"window": 3}, TypeError, ("window is 3", "pair (left, right) or None")),
    "window-three": Row({"window": (1, 2, 3)}, TypeError, ("window is (1, 2, 3)", "pair")),
    "window-string": Row({"window": "12"}, TypeError, ("window is '12'", "pair")),
    "window-left": Row({"window": (-2, 0)}, ValueError, ("left end is -2", "0 or more", "-1")),
    "window-right": Row({"window": (0, -3)}, ValueError, ("right end is -3", "0 or more")),
    "window-float": Row({"window": (1.0, 0)}, TypeError, ("left end is 1.0", "integer or None")),
    "window-bool": Row({"window": (0, True)}, TypeError, ("right end is True", "integer")),
    "scale-nan": Row({"scale": float("nan")}, ValueError, ("scale is nan", "finite")),
    "scale-inf": Row({"scale": -np.inf}, ValueError, ("scale is -inf", "finite")),
    "scale-huge": Row({"scale": 10**400}, ValueError, ("scale is inf", "finite")),
    "scale-string": Row({"scale": "1"}, TypeError, ("scale is '1'", "real number")),
    "scale-bool": Row({"scale": True}, TypeError, ("scale is True", "real number")),
    "scale-complex": Row({"scale": 1j}, TypeError, ("scale is 1j", "real number")),
    "scale-complex64": Row({"scale": np.complex64(1)}, TypeError, ("scale is", "real number")),
    "scale-array": Row({"scale": np.ones(1)}, TypeError, ("scale is array([1.])", "real number")),
    "softcap-none": Row({"softcap": None}, TypeError, ("softcap is None", "real number")),
    "softcap-negative": Row({"softcap": -1.0}, ValueError, ("softcap is -1.0", "0 (off)")),
    "softcap-nan": Row({"softcap": np.float32("nan")}, ValueError, ("softcap is nan", "finite")),
    # Masks, biases and lengths.
    "mask-int": Row(
        {"mask": np.ones((NQ, NK), np.int64)}, TypeError, ("mask has dtype int64", "bool")
    ),
    "mask-float": Row({"mask": array(NQ, NK)}, TypeError, ("mask has dtype float32", "bool")),
    "mask-keys": Row(
        {"mask": np.ones((NQ, NK + 1), bool)}, ValueError,
        ("mask has shape (5, 8)", "(batch, heads_q, seqlen_q, seqlen_k) = (2, 4, 5, 7)"),
    ),
    "mask-key-heads": Row(
        {"mask": np.ones((B, HKV, NQ, NK), bool)}, ValueError, ("mask has shape (2, 2, 5, 7)",)
    ),
    "mask-5-axes": Row(
        {"mask": np.ones((1, B, HQ, NQ, NK), bool)}, ValueError, ("mask has shape (1, 2, 4, 5, 7)",)
    ),
    "bias-int": Row(
        {"bias": np.ones((NQ, NK), np.int32)}, TypeError, ("bias has dtype int32", "float16")
    ),
    "bias-bool": Row({"bias": np.ones((NQ, NK), bool)}, TypeError, ("bias has dtype bool",)),
    "bias-transposed": Row(
        {"bias": array(NK, NQ)}, ValueError, ("bias has shape (7, 5)", "(2, 4, 5, 7)")
    ),
    "bias-batch": Row({"bias": array(3, 1, 1, NK)}, ValueError, ("bias has shape (3, 1, 1, 7)",)),
    "q_lengths-float": Row(
        {"q_lengths": array(B)}, TypeError, ("q_lengths has dtype float32", "integer")
    ),
    "kv_lengths-bool": Row(
        {"kv_lengths": np.ones(B, bool)}, TypeError, ("kv_lengths has dtype bool", "integer")
    ),
    "kv_lengths-shape": Row(
        {"kv_lengths": np.ones((B, 1), int)}, ValueError, ("kv_lengths has shape (2, 1)", "(2,)")
    ),
    "q_lengths-0-d": Row(
        {"q_lengths": np.array(3)}, ValueError, ("q_lengths has shape ()", "(batch,) = (2,)")
    ),
    "q_lengths-long": Row(
        {"q_lengths": np.array([5, 6])}, ValueError,
        ("q_lengths is [5, 6]", "from 0 to seqlen_q = 5"), host_only=True,
    ),
    "kv_lengths-long": Row(
        {"kv_lengths": np.array([8, 0], np.uint64)}, ValueError,
        ("kv_lengths is [8, 0]", "from 0 to seqlen_k = 7"), host_only=True,
    ),
    "kv_lengths-negative": Row(
        {"kv_lengths": np.array([7, -1], np.int8)}, ValueError,
        ("kv_lengths is [7, -1]", "from 0 to seqlen_k = 7"), host_only=True,
    ),
}  # fmt: skip

ATTENTION = COMMON | {
    "return_lse-number": Row({"return_lse": 1}, TypeError, ("return_lse is 1", "True or False")),
    "return_lse-none": Row({"return_lse": None}, TypeError, ("return_lse is None",)),
}

# These bring their own `out`.
OUT = {
    "list": Row({"out": [0.0]}, TypeError, ("out is a list", "array")),
    "shape": Row(
        {"out": array(B, HQ, NQ, D)}, ValueError,
        ("out has shape (2, 4, 5, 8)", "it takes (2, 4, 5, 6)", "v (2, 2, 7, 6)"),
    ),
    "axes": Row({"out": array(HQ, NQ, DV)}, ValueError, ("out has shape (4, 5, 6)",)),
    "dtype": Row(
        {"out": array(B, HQ, NQ, DV, dtype=np.float64)}, TypeError,
        ("out has dtype float64", "float32"),
    ),
    "byte-order": Row(
        {"out": array(B, HQ, NQ, DV, dtype=">f4")}, TypeError, ("out has dtype >f4", "float32"),
        host_only=True,
    ),
    "pair-without-lse": Row(
        {"out": (array(B, HQ, NQ, DV), array(B, HQ, NQ))}, TypeError, ("out is a tuple", "array")
    ),
    "no-pair": Row(
        {"out": array(B, HQ, NQ, DV), "return_lse": True}, TypeError, ("out is a", "(out, lse)")
    ),
    "three": Row(
        {"out": [array(B, HQ, NQ, DV)] * 3, "return_lse": True}, TypeError, ("(out, lse)",)
    ),
    "lse-shape": Row(
        {"out": (array(B, HQ, NQ, DV), array(B, NQ, HQ)), "return_lse": True}, ValueError,
        ("lse has shape (2, 5, 4)", "(2, 4, 5)"),
    ),
    "lse-dtype": Row(
        {"out": (array(B, HQ, NQ, DV), array(B, HQ, NQ, dtype=np.float16)), "return_lse": True},
        TypeError,
        ("lse has dtype float16", "float32"),
    ),
    "read-only": Row(
        {"out": lambda _: np.broadcast_to(np.float32(7), (B, HQ, NQ, DV))}, ValueError,
        ("out is read-only",), host_only=True,
    ),
    "stride-0": Row(
        {"out": lambda a: repeated(a.q[..., :DV])}, ValueError, ("out repeats", "in memory")
    ),
    "is-v": Row(
        {"q": lambda a: a.q[:, :2], "out": lambda a: a.v[:, :, :NQ]}, ValueError,
        ("out overlaps v", "array of its own"),
    ),
    "in-q": Row(
        {"out": lambda a: a.q[..., 1 : 1 + DV]}, ValueError, ("out overlaps q",)
    ),
    "in-bias": Row(
        {
            "q": lambda a: a.q.copy(),
            "bias": lambda a: a.q[..., :NK],
            "out": lambda a: a.q[..., 2:],
        },
        ValueError,
        ("out overlaps bias",),
    ),
    "lse-in-q": Row(
        {"out": lambda a: (a.v[:, :1].repeat(HQ, 1)[:, :, :NQ], a.q[..., 0]), "return_lse": True},
        ValueError,
        ("lse overlaps q", "array of its own"),
    ),
    "lse-in-out": Row(
        {"out": lambda a: pair_in_one(a.q[..., :DV].copy()), "return_lse": True}, ValueError,
        ("out and lse overlap",),
    ),
}  # fmt: skip

BACKWARD = COMMON | {
    "dout-list": Row({"dout": [1.0]}, TypeError, ("dout is a list", "NumPy or CuPy array")),
    "dout-none": Row({"dout": None}, TypeError, ("dout is a NoneType",)),
    "lse-none": Row({"lse": None}, TypeError, ("lse is a NoneType",)),
    "dout-shape": Row(
        {"dout": array(B, HQ, NQ, D)}, ValueError,
        ("dout has shape (2, 4, 5, 8)", "it takes (2, 4, 5, 6)", "v (2, 2, 7, 6)"),
    ),
    "dout-axes": Row({"dout": array(HQ, NQ, DV)}, ValueError, ("dout has shape (4, 5, 6)",)),
    "out-shape": Row(
        {"out": array(B, HKV, NQ, DV)}, ValueError, ("out has shape (2, 2, 5, 6)", "(2, 4, 5, 6)")
    ),
    "dout-dtype": Row(
        {"dout": array(B, HQ, NQ, DV, dtype=np.float16)}, TypeError,
        ("dout must have the dtype of q", "dout float16"),
    ),
    "out-dtype": Row(
        {"out": array(B, HQ, NQ, DV, dtype=np.float64)}, TypeError,
        ("out must have the dtype of q", "out float64"),
    ),
    "lse-shape": Row(
        {"lse": array(B, NQ, HQ)}, ValueError, ("lse has shape (2, 5, 4)", "(2, 4, 5)")
    ),
    "lse-axes": Row({"lse": array(B, HQ, NQ, 1)}, ValueError, ("lse has shape (2, 4, 5, 1)",)),
    "lse-dtype": Row(
        {"lse": array(B, HQ, NQ, dtype=np.float64)}, TypeError,
        ("lse has dtype float64", "it takes float32"),
    ),
    "dlse-shape": Row(
        {"dlse": array(B, HQ)}, ValueError, ("dlse has shape (2, 4)", "(2, 4, 5)")
    ),
    "dlse-dtype": Row(
        {"dlse": array(B, HQ, NQ, dtype=np.float16)}, TypeError, ("dlse has dtype float16",)
    ),
    "dbias-of-nothing": Row({"return_dbias": True}, ValueError, ("return_dbias", "needs a bias")),
    "return_dbias": Row({"return_dbias": 1}, TypeError, ("return_dbias is 1", "True or False")),
    "deterministic": Row(
        {"deterministic": None}, TypeError, ("deterministic is None", "True or False")
    ),
}  # fmt: skip


def right_addition() -> dict[str, Any]:
    return {"a": array(3, 4), "b": array(3, 4)}


ADDITION = {
    "a-list": Row({"a": [1.0]}, TypeError, ("a is a list", "NumPy or CuPy array")),
    "b-none": Row({"b": None}, TypeError, ("b is a NoneType",)),
    "a-int": Row(
        {"a": np.ones((3, 4), int)}, TypeError,
        ("a has dtype int64", "float16, bfloat16, float32, float64"),
    ),
    "b-dtype": Row(
        {"b": array(3, 4, dtype=np.float64)}, TypeError,
        ("b must have the dtype of a", "a float32", "b float64"),
    ),
    "b-broadcast": Row(
        {"b": array(1, 4)}, ValueError,
        ("b must have a's shape", "nothing is broadcast", "a (3, 4), b (1, 4)"),
    ),
    "b-axes": Row({"b": array(12)}, ValueError, ("b must have a's shape", "b (12,)")),
    "backend": Row({"backend": "host"}, ValueError, ("backend is 'host'", "'cpu'")),
    "out-list": Row({"out": [1.0]}, TypeError, ("out is a list",)),
    "out-shape": Row({"out": array(4, 3)}, ValueError, ("out has shape (4, 3)", "takes (3, 4)")),
    "out-dtype": Row(
        {"out": array(3, 4, dtype=np.float16)}, TypeError, ("out has dtype float16", "float32")
    ),
    "out-int": Row({"out": np.ones((3, 4), int)}, TypeError, ("out has dtype int64", "float32")),
    "out-is-a": Row({"out": lambda a: a.a}, ValueError, ("out overlaps a",)),
    "out-in-b": Row({"out": lambda a: a.b[::-1]}, ValueError, ("out overlaps b",)),
    "out-stride-0": Row({"out": lambda a: repeated(a.a)}, ValueError, ("out repeats", "in memory")),
    "out-read-only": Row(
        {"out": lambda _: np.broadcast_to(np.float32(7), (3, 4))}, ValueError,
        ("out is read-only",), host_only=True,
    ),
}  # fmt: skip


def right_merge() -> dict[str, Any]:
    return {
        "outs": [array(HQ, NQ, DV), array(HQ, NQ, DV)],
        "lses": [array(HQ, NQ), array(HQ, NQ)],
    }


MERGE = {
    "array": Row({"outs": array(2, 5, 6)}, TypeError, ("outs is a", "sequence of arrays")),
    "lses-none": Row({"lses": None}, TypeError, ("lses is a NoneType", "sequence of arrays")),
    "one": Row(
        {"outs": [array(5, 6)], "lses": [array(5)]}, ValueError,
        ("two or more", "1 outs", "1 lses"),
    ),
    "none": Row({"outs": [], "lses": []}, ValueError, ("two or more", "0 outs")),
    "counts": Row({"lses": [array(HQ, NQ)] * 3}, ValueError, ("2 outs", "3 lses")),
    "list": Row({"outs": [[1.0], [2.0]]}, TypeError, ("outs[0] is a list",)),
    "part-none": Row(
        {"outs": [array(HQ, NQ, DV), None]}, TypeError, ("outs[1] is a NoneType",)
    ),
    "dtype": Row(
        {"outs": [array(HQ, NQ, DV, dtype=np.int16)] * 2}, TypeError, ("outs[0] has dtype int16",)
    ),
    "dtypes": Row(
        {"outs": [array(HQ, NQ, DV), array(HQ, NQ, DV, dtype=np.float16)]}, TypeError,
        ("outs[1] must have the dtype of outs[0]", "outs[1] float16"),
    ),
    "shapes": Row(
        {"outs": [array(HQ, NQ, DV), array(HQ, NQ, D)]}, ValueError,
        ("outs[1] has shape (4, 5, 8)", "it takes (4, 5, 6)"),
    ),
    "no-axes": Row(
        {"outs": [array(), array()], "lses": [array(), array()]}, ValueError,
        ("outs[0] has no axes", "(..., seqlen_q, head_dim_v)"),
    ),
    "lse-shape": Row(
        {"lses": [array(HQ, NQ), array(NQ, HQ)]}, ValueError,
        ("lses[1] has shape (5, 4)", "it takes (4, 5)"),
    ),
    "lse-dtype": Row(
        {"lses": [array(HQ, NQ, dtype=np.float16), array(HQ, NQ)]}, TypeError,
        ("lses[0] has dtype float16", "it takes float32"),
    ),
    "backend": Row({"backend": None}, ValueError, ("backend is None", "'auto'")),
}  # fmt: skip

FUNCTIONS = {
    "attention": (workbench.attention, right_attention),
    "attention_backward": (workbench.attention_backward, right_backward),
    "vector_add": (workbench.vector_add, right_addition),
    "merge_attention": (workbench.merge_attention, right_merge),
    "explain": (workbench.explain, right_attention),
}
TABLES = {
    "attention": ATTENTION | {f"out-{name}": row for name, row in OUT.items()},
    "attention_backward": BACKWARD,
    "vector_add": ADDITION,
    "merge_attention": MERGE,
    "explain": COMMON,
}
EVERY_ROW = [(function, name) for function, table in TABLES.items() for name in table]
ROWS_WITHOUT_OUT = [
    ("attention", name) for name in ATTENTION if not name.startswith("return_lse")
] + [("vector_add", name) for name in ADDITION if not name.startswith("out")]


def repeated(x: Any) -> Any:
    """A writeable array of x's shape in which the elements of the first axis are one."""
    xp = array_module(x)
    return xp.lib.stride_tricks.as_strided(x.copy(), x.shape, (0, *x.strides[1:]))


def pair_in_one(x: Any) -> tuple[Any, Any]:
    return x, x[..., 0]


def contents(arguments: Any) -> list[bytes]:
    """The bytes of every array among the arguments, to see whether any of them changed."""
    if isinstance(arguments, dict):
        arguments = arguments.values()
    found = []
    for x in arguments:
        if isinstance(x, (tuple, list)):
            found += contents(x)
        elif hasattr(x, "tobytes"):
            found.append(x.tobytes())
    return found


@pytest.mark.parametrize(("function", "name"), EVERY_ROW)
def test_errors(function: str, name: str) -> None:
    call, right = FUNCTIONS[function]
    row = TABLES[function][name]
    arguments = changed({**right(), "backend": "reference"}, row.change)
    before = contents(arguments)
    fails(call, arguments, row)
    assert contents(arguments) == before, "a call that failed wrote to an array"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("function", "name"), ROWS_WITHOUT_OUT)
def test_nothing_is_written_to_out(function: str, name: str, backend: str) -> None:
    call, right = FUNCTIONS[function]
    row = TABLES[function][name]
    shape = (B, HQ, NQ, DV) if function == "attention" else (3, 4)
    out = np.full(shape, 7, np.float32)
    with pytest.raises(row.error):
        call(**changed({**right(), "out": out, "backend": backend}, row.change))
    assert (out == 7).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_right_calls_are_right(function: str) -> None:
    call, right = FUNCTIONS[function]
    call(**right(), backend="reference")


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "name"), EVERY_ROW)
def test_errors_of_gpu_arrays(function: str, name: str) -> None:
    import cupy

    def move(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return cupy.asarray(x)
        return type(x)(move(part) for part in x) if isinstance(x, (tuple, list)) else x

    call, right = FUNCTIONS[function]
    row = TABLES[function][name]
    if row.host_only or "scale-array" in name:
        pytest.skip("NumPy arrays only")
    arguments = changed({**right(), "backend": "cuda"}, row.change, move)
    before = contents(arguments)
    fails(call, arguments, row)
    assert contents(arguments) == before


@pytest.mark.gpu
def test_host_and_gpu_arrays_do_not_mix() -> None:
    import cupy

    host, device = right_attention(), {n: cupy.asarray(x) for n, x in right_attention().items()}
    out = array(B, HQ, NQ, DV)
    rows = {
        "q": (host | {"q": device["q"]}, TypeError, ("do not mix", "q is a CuPy array")),
        "v": (device | {"v": host["v"]}, TypeError, ("do not mix", "v is a NumPy array")),
        "mask": (device | {"mask": np.ones((NQ, NK), bool)}, TypeError, ("mask is a NumPy",)),
        "bias": (host | {"bias": cupy.ones((NQ, NK))}, TypeError, ("bias is a CuPy array",)),
        "out": (device | {"out": out}, TypeError, ("out must be", "as q is", "ndarray")),
        "out-device": (host | {"out": cupy.asarray(out)}, TypeError, ("out must be", "as q is")),
        "cpu": (device | {"backend": "cpu"}, ValueError, ("'cpu' takes NumPy arrays", "'cuda'")),
        "reference": (device | {"backend": "reference"}, ValueError, ("cupy.asnumpy",)),
    }
    for arguments, error, words in rows.values():
        fails(workbench.attention, arguments, Row({}, error, words))
    with pytest.raises(TypeError, match="do not mix"):
        workbench.vector_add(array(3), cupy.ones(3, np.float32))
    with pytest.raises(TypeError, match="out must be a NumPy or CuPy array as a is"):
        workbench.vector_add(array(3), array(3), out=cupy.ones(3, np.float32))
    with pytest.raises(TypeError, match="do not mix"):
        workbench.merge_attention([array(5, 6)] * 2, [array(5), cupy.zeros(5, np.float32)])


# --------------------------------------------------------------------------- without a GPU


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "gpu_missing", lambda: "no NVIDIA driver is installed")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("backend", ["cuda", "numba"])
@pytest.mark.parametrize(
    "function", ["attention", "attention_backward", "vector_add", "merge_attention", "explain"]
)
def test_a_gpu_backend_without_a_gpu(function: str, backend: str) -> None:
    call, right = FUNCTIONS[function]
    arguments = {**right(), "backend": backend}
    if function in ("attention", "vector_add"):
        arguments["out"] = np.full((B, HQ, NQ, DV) if function == "attention" else (3, 4), 7, "f4")
    before = contents(arguments)
    words = (repr(backend), "needs a GPU", "no NVIDIA driver", "workbench doctor")
    fails(call, arguments, Row({}, workbench.ToolchainError, words))
    assert contents(arguments) == before


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_is_the_cpu() -> None:
    assert checks.resolve_backend("auto", on_device=False) == "cpu"


class OnAGpu:
    """Says that it is on a GPU, through the CUDA array interface or through DLPack."""

    def __init__(self, kind: str) -> None:
        if kind == "interface":
            self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "version": 3}

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not reached")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("kind", ["interface", "dlpack"])
def test_a_gpu_array_without_a_gpu(kind: str) -> None:
    row = Row({}, workbench.ToolchainError, ("k is on a GPU", "no NVIDIA driver"))
    fails(workbench.attention, right_attention() | {"k": OnAGpu(kind)}, row)


# ----------------------------------------------------------------------- what a backend gets


def prepare(named: dict[str, Any], **options: Any) -> checks.Prepared:
    defaults = {"causal": False, "window": None, "scale": None, "softcap": 0.0, "layout": "bhnd"}
    return checks.prepare_attention(
        named, return_lse=True, backend="reference", **(defaults | options)
    )


def test_the_problem_of_a_plain_call() -> None:
    problem = prepare(right_attention()).problem
    assert problem == Problem(
        "attention", "float32", B, HQ, HKV, NQ, NK, D, DV, scale=1 / math.sqrt(D)
    )
    assert problem.acc_dtype == "float32"
    assert not problem.has_range


@pytest.mark.parametrize(
    ("options", "left", "right", "top_left"),
    [
        ({"causal": True}, None, 0, False),
        ({"causal": np.True_}, None, 0, False),
        ({"causal": "top_left"}, None, 0, True),
        ({"causal": np.False_}, None, None, False),
        ({"window": (None, -1)}, None, None, False),
        ({"window": [3, 0]}, 3, 0, False),
        ({"window": (np.int64(3), np.int8(-1))}, 3, None, False),
        ({"window": (3, 2), "causal": True}, 3, 0, False),
        ({"window": (-1, 2), "causal": "top_left"}, None, 0, True),
        ({"window": (2**62, 10**30)}, None, None, False),
    ],
)
def test_windows(
    options: dict[str, Any], left: int | None, right: int | None, top_left: bool
) -> None:
    problem = prepare(right_attention(), **options).problem
    assert (problem.window_left, problem.window_right, problem.top_left) == (left, right, top_left)
    assert problem.has_range == (left is not None or right is not None)


@pytest.mark.parametrize(
    "scale",
    [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.array(0.5), BFLOAT16.type(0.5)],
)
def test_numbers_of_any_kind(scale: Any) -> None:
    problem = prepare(right_attention(), scale=scale, softcap=scale).problem
    assert (problem.scale, problem.softcap) == (0.5, 0.5)
    assert type(problem.scale) is type(problem.softcap) is float


def test_whole_numbers() -> None:
    problem = prepare(right_attention(), scale=-2, softcap=np.int16(3)).problem
    assert (problem.scale, problem.softcap) == (-2.0, 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str) -> None:
    named = {name: x.astype(DTYPES[dtype]) for name, x in right_attention().items()}
    prepared = prepare(named)
    assert prepared.problem.dtype == dtype
    assert prepared.arrays.out.dtype == DTYPES[dtype]
    acc = "float64" if dtype == "float64" else "float32"
    assert prepared.problem.acc_dtype == prepared.arrays.lse.dtype == acc


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_arrays_are_views_whatever_the_layout(ndim: int, layout: str) -> None:
    batch, heads = (B, HQ) if ndim == 4 else (1, HQ if ndim == 3 else 1)
    four = array(batch, NQ, heads, D) if layout == "bnhd" else array(batch, heads, NQ, D)
    x = four[:, 0, :] if ndim == 2 and layout == "bhnd" else four
    x = four.reshape(NQ, D) if ndim == 2 else four[0] if ndim == 3 else four
    prepared = prepare({"q": x, "k": x, "v": x}, layout=layout)
    want = four.swapaxes(1, 2) if layout == "bnhd" else four
    for name in ("q", "k", "v"):
        got = getattr(prepared.arrays, name)
        assert got.shape == (batch, heads, NQ, D)
        assert np.shares_memory(got, x)
        np.testing.assert_array_equal(got, want)
    assert prepared.arrays.out.shape == (batch, heads, NQ, D)
    assert prepared.arrays.lse.shape == (batch, heads, NQ)
    assert prepared.arrays.lse.flags.c_contiguous
    (_, out, _), (_, lse, _) = prepared.outputs
    assert out.shape == x.shape
    assert lse.shape == (batch, heads, NQ)[4 - ndim :]
    assert np.shares_memory(out, prepared.arrays.out)
    assert np.shares_memory(lse, prepared.arrays.lse)
    assert not prepared.copied


def strided() -> dict[str, np.ndarray]:
    """Arrays of one shape, (2, 4, 5, 8), that are read in place."""
    shape = (B, HQ, NQ, D)
    packed = array(B, NQ, 3 * HQ, D)
    return {
        "permuted": array(NQ, HQ, D, B).transpose(3, 1, 0, 2).swapaxes(-1, -1),
        "slice-of-packed": packed[:, :, HQ : 2 * HQ].swapaxes(1, 2),
        "negative": array(*shape)[::-1, ::-1, ::-1],
        "repeated-heads": np.broadcast_to(array(B, 1, NQ, D), shape),
        "repeated-rows": np.broadcast_to(array(B, HQ, 1, D), shape),
        "every-second-row": array(B, HQ, 2 * NQ, D)[:, :, ::2],
        "part-of-a-row": array(B, HQ, NQ, 3 * D)[..., D : 2 * D],
    }


@pytest.mark.parametrize("kind", [k for k in strided() if k != "permuted"])
def test_strides_are_read_in_place(kind: str) -> None:
    x = strided()[kind]
    prepared = prepare({"q": x, "k": x, "v": x})
    assert prepared.arrays.q.strides == x.strides
    assert np.shares_memory(prepared.arrays.q, x)
    assert not prepared.copied


@pytest.mark.parametrize(
    "x",
    [
        strided()["permuted"],
        array(B, HQ, NQ, 2 * D)[..., ::2],
        array(B, HQ, NQ, D)[..., ::-1],
        np.broadcast_to(array(B, HQ, NQ, 1), (B, HQ, NQ, D)),
    ],
    ids=["permuted", "every-second", "backwards", "stride-0"],
)
def test_a_last_axis_with_gaps_is_copied_and_said(x: np.ndarray) -> None:
    prepared = prepare({"q": x, "k": array(B, HQ, NQ, D), "v": x})
    assert prepared.copied == [
        f"{name} is copied: the elements of its last axis are not side by side" for name in "qv"
    ]
    assert prepared.arrays.q.flags.c_contiguous
    np.testing.assert_array_equal(prepared.arrays.q, x)
    assert not prepared.in_place


def test_one_column_is_read_in_place_whatever_its_stride() -> None:
    x = array(B, HQ, NQ, D)[..., 3:4]
    prepared = prepare({"q": x, "k": x, "v": x})
    assert np.shares_memory(prepared.arrays.q, x)
    assert not prepared.copied


def unaligned(x: np.ndarray) -> np.ndarray:
    """The same numbers at an address that no vector of them may have."""
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    assert not view.flags.aligned
    return view


def test_foreign_bytes_are_copied() -> None:
    right = right_attention()
    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in right.items()}
    for named in (swapped, {name: unaligned(x) for name, x in right.items()}):
        arrays = prepare(named).arrays
        for name, x in right.items():
            got = getattr(arrays, name)
            assert got.dtype.isnative
            assert got.flags.aligned
            np.testing.assert_array_equal(got, x)


def test_masks_and_biases_are_never_made_large() -> None:
    for shape in ((NQ, NK), (NK,), (), (B, 1, 1, NK), (1, HQ, NQ, 1), (B, HQ, NQ, NK)):
        mask, bias = np.ones(shape, bool), array(*shape)
        arrays = prepare(right_attention() | {"mask": mask, "bias": bias}).arrays
        full = (1,) * (4 - len(shape)) + shape
        for x, given in ((arrays.mask, mask), (arrays.bias, bias)):
            assert x.shape == (B, HQ, NQ, NK)
            assert np.shares_memory(x, given)
            assert [s == 0 for s in x.strides] == [n == 1 for n in full]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float64])
def test_a_bias_is_converted_before_it_is_repeated(dtype: Any) -> None:
    prepared = prepare(right_attention() | {"bias": array(NK, dtype=dtype)})
    assert prepared.arrays.bias.dtype == np.float32
    assert prepared.arrays.bias.strides == (0, 0, 0, 4)
    assert prepared.copied == [f"bias is converted from {np.dtype(dtype)} to float32"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_lengths_of_any_integers(dtype: Any) -> None:
    lengths = np.array([3, 0], dtype)
    prepared = prepare(right_attention() | {"q_lengths": lengths, "kv_lengths": lengths})
    for x in (prepared.arrays.q_lengths, prepared.arrays.kv_lengths):
        assert x.dtype == np.int32
        assert x.tolist() == [3, 0]
        assert (x is lengths) == (dtype == np.int32)
    # A repeated call reads the caller's arrays: it must know that these were not read in place.
    assert len(prepared.copied) == (0 if dtype == np.int32 else 2)
    assert prepared.in_place == (dtype == np.int32)


def test_lengths_with_gaps_are_copied_and_said() -> None:
    lengths = np.array([3, 9, 0, 9], np.int32)[::2]
    prepared = prepare(right_attention() | {"kv_lengths": lengths})
    assert prepared.arrays.kv_lengths.flags.c_contiguous
    assert prepared.arrays.kv_lengths.tolist() == [3, 0]
    assert prepared.copied == ["kv_lengths is converted to contiguous int32"]


def test_backward_outputs() -> None:
    named = right_backward() | {"bias": array(1, NQ, NK, dtype=np.float16)}
    prepared = checks.prepare_attention_backward(
        named, backend="reference", deterministic=True, return_dbias=True,
        causal=True, window=None, scale=None, softcap=0, layout="bhnd",
    )  # fmt: skip
    problem, arrays = prepared.problem, prepared.arrays
    assert problem.op == "attention_backward"
    assert problem.deterministic
    assert problem.return_dbias
    assert problem.has_bias
    assert not problem.has_dlse
    for name in ("q", "k", "v"):
        gradient = getattr(arrays, f"d{name}")
        assert gradient.shape == getattr(arrays, name).shape
        assert gradient.dtype == np.float32
    assert arrays.dbias.shape == (1, 1, NQ, NK)
    assert arrays.dbias.dtype == np.float32
    name, filled, target = prepared.outputs[-1]
    assert (name, filled.shape, target.dtype) == ("dbias", (1, NQ, NK), np.float16)


# ------------------------------------------------------------------------- for the GPU kernels


def device_view(named: dict[str, Any], **options: Any) -> Problem:
    prepared = prepare(named, **options)
    return checks.with_strides(prepared.problem, prepared.arrays)


def aligned(*shape: int, dtype: Any = np.float32, shift: int = 0) -> np.ndarray:
    """Zeros at an address that is `shift` bytes past a multiple of 64."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.zeros(size + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + shift
    return buffer[start : start + size].view(dtype).reshape(shape)


def test_strides_are_in_elements() -> None:
    q = aligned(B, NQ, HQ, D).swapaxes(1, 2)
    k, v = aligned(B, HKV, NK, D)[:, :, ::-1], aligned(B, HKV, NK, D)
    bias, mask = aligned(HQ, 1, NK), np.ones((B, 1, NQ, NK), bool)
    problem = device_view({"q": q, "k": k, "v": v, "bias": bias, "mask": mask})
    strides = dict(problem.strides)
    assert strides["q"] == (NQ * HQ * D, D, HQ * D)
    assert strides["k"] == (HKV * NK * D, NK * D, -D)
    assert strides["v"] == (HKV * NK * D, NK * D, D)
    assert strides["bias"] == (0, NK, 0, 1)
    assert strides["mask"] == (NQ * NK, 0, NK, 1)
    assert strides["out"] == (HQ * NQ * D, NQ * D, D)


@pytest.mark.parametrize(
    ("dtype", "shift", "row", "want"),
    [
        (np.float32, 0, 8, 16),
        (np.float32, 4, 8, 4),
        (np.float32, 8, 8, 8),
        (np.float32, 0, 6, 8),
        (np.float32, 0, 5, 4),
        (np.float16, 0, 8, 16),
        (np.float16, 2, 8, 2),
        (np.float16, 0, 7, 2),
        (np.float64, 8, 8, 8),
    ],
)
def test_alignment_is_that_of_the_worst(dtype: Any, shift: int, row: int, want: int) -> None:
    head_dim = 4
    q = aligned(B, HQ, NQ, row, dtype=dtype, shift=shift)[..., :head_dim]
    # One row, so that the outputs have no stride to speak of and 64-byte blocks to lie in.
    rest = aligned(B, HQ, NQ, 8, dtype=dtype)[..., :head_dim]
    prepared = prepare({"q": q, "k": rest, "v": rest})
    arrays = prepared.arrays._replace(out=rest)
    assert checks.with_strides(prepared.problem, arrays).alignment == want


def test_strides_of_axes_of_length_one_do_not_count_for_alignment() -> None:
    x = aligned(1, 1, NQ, 8)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (4, 12, *x.strides[2:]))
    prepared = prepare({"q": odd, "k": odd, "v": odd})
    arrays = prepared.arrays._replace(out=x)
    assert checks.with_strides(prepared.problem, arrays).alignment == 16


@pytest.mark.parametrize(
    ("views", "shape", "strides"),
    [
        ([array(3, 4), array(3, 4)], (12,), [(1,), (1,)]),
        ([array(3, 8)[:, :4], array(3, 4)], (3, 4), [(8, 1), (4, 1)]),
        ([array(2, 3, 4)[:, ::-1], array(2, 3, 4)], (2, 3, 4), [(12, -4, 1), (12, 4, 1)]),
        ([array(2, 3, 4)[:, :, ::2]] * 2, (12,), [(2,), (2,)]),
        ([array(1, 5, 1), array(1, 5, 1)], (5,), [(1,), (1,)]),
        ([array(1, 1), array(1, 1)], (1,), [(1,), (1,)]),
        ([array(), array()], (1,), [(1,), (1,)]),
        ([np.broadcast_to(array(4), (3, 4)), array(3, 4)], (3, 4), [(0, 1), (4, 1)]),
        ([array(2, 2, 2, 2, 2), array(2, 2, 2, 2, 2)], (32,), [(1,), (1,)]),
        # The axes are taken in the order that the last array has them in memory.
        ([array(4, 3).T, array(4, 3).T], (12,), [(1,), (1,)]),
        ([array(3, 4), array(4, 3).T], (4, 3), [(1, 4), (3, 1)]),
    ],
)
def test_axes_that_are_walked_as_one_are_merged(views: Any, shape: Any, strides: Any) -> None:
    assert checks._merge_axes(tuple(views)) == (shape, strides)


def test_an_empty_array_stays_empty() -> None:
    shape, _ = checks._merge_axes((array(3, 0), array(3, 0)))
    assert math.prod(shape) == 0


def test_the_problem_of_an_addition() -> None:
    named = {"a": array(4, 6)[:, :3].T, "b": array(3, 4)}
    prepared = checks.prepare_vector_add(named, backend="reference")
    problem = prepared.problem
    assert (problem.op, problem.dtype, problem.size) == ("vector_add", "float32", 12)
    assert not problem.contiguous
    assert dict(problem.strides)["a"] == (6, 1)
    whole = checks.prepare_vector_add({"a": array(3, 4), "b": array(3, 4)}, backend="reference")
    assert whole.problem.contiguous


# ------------------------------------------------------------------------------ taking arrays


class Subclass(np.ndarray):
    """A subclass of ndarray."""


class OnlyDlpack:
    """Has DLPack and nothing else."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


def test_arrays_of_other_kinds_are_viewed() -> None:
    x = array(3, 4)
    assert as_array("x", x) is x
    for other in (x.view(Subclass), OnlyDlpack(x)):
        view = as_array("x", other)
        assert type(view) is np.ndarray
        assert np.shares_memory(view, x)


def test_a_dlpack_export_that_fails_says_so() -> None:
    read_only = array(3)
    read_only.flags.writeable = False

    class Refuses(OnlyDlpack):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(TypeError, match="a: its DLPack export cannot be read: not today"):
        workbench.vector_add(Refuses(read_only), array(3), backend="reference")


# --------------------------------------------------------------------------------- overlapping


def test_interleaved_arrays_do_not_overlap() -> None:
    x = np.zeros((4, 6), np.float32)
    assert not overlap(x[:, :3], x[:, 3:])
    assert not overlap(x[::2], x[1::2])
    assert not overlap(x[:, ::2], x[:, 1::2])
    assert overlap(x[:, :3], x[:, 2:])
    assert overlap(x[::-1], x[0])
    assert not overlap(x[:0], x)


# --------------------------------------------------------------------- what was found by using it


@pytest.mark.parametrize(
    "strides", [(8, 4), (4, 4), (0, 4), (4, 8)], ids=["rows", "both", "still", "columns"]
)
def test_an_out_whose_elements_overlap_is_refused(strides: tuple[int, int]) -> None:
    memory = np.zeros(64, np.float32)
    out = np.lib.stride_tricks.as_strided(memory, (4, 4), strides)
    a = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match="out repeats elements in memory"):
        workbench.vector_add(a, a, out=out, backend="reference")
    assert not memory.any()


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [1e39, 1e300, 1e-300])
def test_a_number_that_float32_cannot_hold(name: str, value: float) -> None:
    x = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(ValueError, match=f"{name} is .* float32 holds"):
        workbench.attention(x, x, x, backend="reference", **{name: value})
    double = x.astype(np.float64)
    assert workbench.attention(double, double, double, backend="reference", **{name: value}).all()


def test_an_unaligned_out_is_written() -> None:
    x = np.ones((1, 1, 2, 4), np.float32)
    memory = np.zeros(x.nbytes + 1, np.uint8)
    out = memory[1:].view(np.float32).reshape(x.shape)
    assert workbench.attention(x, x, x, out=out, backend="cpu") is out
    np.testing.assert_array_equal(out, x)


def test_a_kernel_that_is_no_name() -> None:
    x = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="kernel is array"):
        workbench.attention(x, x, x, backend="cuda-simulator", kernel=np.array([1, 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"arch": "sm_70"}, {"arch": "sm_90", "backend": "cuda-simulator"}]
)
def test_explain_refuses_what_no_kernel_runs_on(options: dict[str, Any]) -> None:
    x = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="arch"):
        workbench.explain(x, x, x, **options)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_lse_past_the_length_does_not_matter(backend: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 1, 8, 4), dtype=np.float32)
    options = {"q_lengths": np.array([4]), "backend": backend}
    out, lse = workbench.attention(q, k, v, return_lse=True, **options)
    want = workbench.attention_backward(dout, q, k, v, out, lse, **options)
    lse[..., 4:] = np.nan
    got = workbench.attention_backward(dout, q, k, v, out, lse, **options)
    for g, w in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda-simulator", "numba-simulator"])
def test_a_bias_of_minus_infinity_hides_any_key(backend: str) -> None:
    """Behind a mask or a bias of -inf even a NaN key is not there."""
    if backend.endswith("simulator") and missing(backend.removesuffix("-simulator")):
        pytest.skip("the compiler of this language is not installed")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 8, 8), dtype=np.float32)
    k[..., -1, :] = np.nan
    bias = np.zeros(8, np.float32)
    bias[-1] = -np.inf
    want = workbench.attention(q, k[:, :, :7], v[:, :, :7], backend="reference")
    got = workbench.attention(q, k, v, bias=bias, backend=backend)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
