"""Inputs that broke attention libraries elsewhere, each with its right answer, as data.

A case is a list of calls, made one after another; its name is kept by every test that runs it. A
call's results are held to the rule of `oracle`, against the answer written here where there is one
(a closed form, or the float64 reference on a simpler problem) and against the reference otherwise.

    run_case("D1", backend="cuda", kernel="attention_flash_simt")

Not here, because a call with an answer is not what they are: D9, E3, E12, E13 and E16, which
`test_cases.py` has as tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, Example, answers, hold, random_example, run, wants


@dataclass(frozen=True)
class Call:
    """One call, what is known of its results by name, or the error that it must raise."""

    label: str
    example: Example
    want: dict[str, Any] = field(default_factory=dict)
    raises: tuple[type[Exception], str] | None = None


Case = Callable[[str], Iterator[Call]]


def run_case(
    name: str,
    *,
    dtype: str = "float32",
    dtypes: Any = tuple(DTYPES),
    part: Callable[[Example], Example | None] = lambda e: e,
    **how: Any,
) -> int:
    """Make the calls of a case, in `dtype` unless it says otherwise, by `oracle.run(**how)`.

    Of each call's example the `part` that shall run is taken; a call without one, or in a dtype
    that is not among `dtypes`, is left out. Returns the number of calls that were made.
    """
    made = 0
    for call in CASES[name](dtype):
        known = call.example.dtype in [DTYPES[d] for d in dtypes]
        taken = part(call.example) if known and call.raises is None else call.example
        if not known or taken is None:
            continue
        made += 1
        try:
            _run_call(replace(call, example=taken), how)
        except Exception as error:
            error.add_note(f"in case {name}, {call.label}")
            raise
    return made


def _run_call(call: Call, how: dict[str, Any]) -> None:
    if call.raises is not None:
        with pytest.raises(call.raises[0], match=call.raises[1]):
            run(call.example, **how)
        return
    results = run(call.example, **how)
    hold(call.example, results)
    known = answers(call.example) if call.want else {}
    for name in call.want.keys() & known.keys():  # a part may have no backward
        want = call.want[name]
        full = np.broadcast_to(np.asarray(want, np.float64), known[name].want.shape)
        replace(known[name], want=full).hold(results[name], name)


def example(
    q: Any, k: Any, v: Any, dtype: str, dout: Any = None, dlse: Any = None, **options: Any
) -> Example:
    """An example from nested lists or arrays of up to four axes, leading ones left out."""
    q, k, v, dout = (
        None if x is None else np.array(x, DTYPES[dtype], ndmin=4) for x in (q, k, v, dout)
    )
    return Example(q, k, v, options, dout, dlse)


def with_options(e: Example, **options: Any) -> Example:
    """The same arrays with other options added."""
    return replace(e, options=e.options | options)


def keys(e: Example, chosen: Any) -> Example:
    """The same problem, without options, over some of the keys."""
    return replace(e, k=e.k[:, :, chosen], v=e.v[:, :, chosen], options={})


# -------------------------------------------------------------------------------------- first set


def d1(dtype: str) -> Iterator[Call]:
    """Causal is aligned at the bottom right: the last query sees every key."""

    def call(label: str, seqlen_q: int, values: list[int], causal: Any, **want: Any) -> Call:
        v = np.zeros((len(values), 2))
        v[:, 0] = values
        q, k = np.zeros((seqlen_q, 2)), np.zeros((len(values), 2))
        out = np.zeros((1, 1, seqlen_q, 2))
        out[..., 0] = want.pop("out")
        return Call(label, example(q, k, v, dtype, causal=causal), {"out": out} | want)

    ln = np.log
    four = [1, 2, 4, 8]
    yield call("2 queries, 4 keys", 2, four, True, out=[7 / 3, 15 / 4], lse=ln([3, 4]))
    rows = {"out": [0, 0, 1, 1.5], "lse": [-np.inf, -np.inf, 0, ln(2)]}
    yield call("4 queries, 2 keys", 4, [1, 2], True, **rows)
    yield call("1 query, 4 keys", 1, four, True, out=[15 / 4], lse=ln([4]))
    yield call("3 queries, 4 keys", 3, four, True, out=[1.5, 7 / 3, 15 / 4], lse=ln([2, 3, 4]))
    yield call("top left", 2, four, "top_left", out=[1, 1.5], lse=ln([1, 2]))
    rows = {"out": [1, 1.5, 1.5, 1.5], "lse": ln([1, 2, 2, 2])}
    yield call("top left, 4 queries, 2 keys", 4, [1, 2], "top_left", **rows)


def d2(dtype: str) -> Iterator[Call]:
    """One query, one key: all the weight is there, so q and k have no gradient."""
    for kind in dict.fromkeys((dtype, "float16", "float32", "bfloat16")):
        for seed in range(4):
            rng = np.random.default_rng(seed)
            q, k, v = 3 * rng.standard_normal((3, 1, 1, 1, 16))
            e = example(q, k, v, kind, dout=np.ones_like(v))
            score = (e.q.astype(np.float64) * e.k.astype(np.float64)).sum(axis=-1) / 4
            want = {"out": e.v, "lse": score, "dq": 0, "dk": 0, "dv": 1}
            yield Call(f"{kind}, seed {seed}", e, want)


def d3(dtype: str) -> Iterator[Call]:
    """A mask that leaves whole rows and columns empty."""
    for n, seen in ((8, 4), (70, 33)):
        e = random_example(3, dtype=dtype, heads_q=1, seqlen_q=n, head_dim=8)
        mask = np.zeros((n, n), bool)
        mask[:seen, :seen] = True
        corner = Example(
            e.q[:, :, :seen], e.k[:, :, :seen], e.v[:, :, :seen], {}, e.dout[:, :, :seen]
        )
        want = {}
        for name, x in wants(corner).items():
            want[name] = np.full((*x.shape[:2], n, *x.shape[3:]), -np.inf if name == "lse" else 0.0)
            want[name][:, :, :seen] = x
        yield Call(f"{n} queries and keys, {seen} seen", with_options(e, mask=mask), want)


def d4(dtype: str) -> Iterator[Call]:
    """A window is inclusive at both ends, and -1 leaves one open."""
    n = 200
    e = random_example(4, dtype=dtype, seqlen_q=n, head_dim=16)
    causal = wants(with_options(e, causal=True))
    for window in ((-1, 0), (n, 0), (n - 1, 0), (None, 0)):
        yield Call(f"window {window}", with_options(e, window=window), causal)
    last = replace(keys(e, slice(1, None)), q=e.q[:, :, -1:], dout=None)
    all_but_first = {name: causal[name].copy() for name in ("out", "lse")}
    for name, x in wants(last).items():
        all_but_first[name][:, :, -1:] = x
    yield Call("one key less", with_options(e, window=(n - 2, 0)), all_but_first)
    score = (e.q.astype(np.float64) * e.k.astype(np.float64)).sum(axis=-1) / 4
    itself = {"out": e.v, "lse": score, "dq": 0, "dk": 0, "dv": e.dout}
    yield Call("window (0, 0)", with_options(e, window=(0, 0)), itself)


def d5(dtype: str) -> Iterator[Call]:
    """Lse is a natural logarithm."""
    zeros = np.zeros((4, 4))
    yield Call("zeros", example(zeros[:1], zeros, zeros, dtype), {"lse": np.log(4)})
    q, k = [[2, 0, 0, 0]], [[3, 0, 0, 0], [0, 0, 0, 0]]
    e = example(q, k, zeros[:2], dtype)
    yield Call("a score of 3 and one of 0", e, {"lse": np.log(np.exp(3) + 1)})


def d6(dtype: str) -> Iterator[Call]:
    """The cap comes before bias and mask: what they shut stays shut."""
    e = random_example(6, dtype=dtype, seqlen_q=3, seqlen_k=6, head_dim=8, head_dim_v=4)
    e.v[:, :, 4:] = 1000
    first = with_options(keys(e, slice(0, 4)), softcap=0.5)
    want = {name: x for name, x in wants(first).items() if name in ("out", "lse", "dq")}
    open_keys = np.arange(6) < 4
    for label, bias in (("-inf", -np.inf), ("-1e30", -1e30)):
        shut = np.where(open_keys, 0, bias).astype(np.float32)
        yield Call(f"bias {label}", with_options(e, softcap=0.5, bias=shut), want)
    yield Call("mask", with_options(e, softcap=0.5, mask=open_keys), want)
    yield Call("lengths", with_options(e, softcap=0.5, kv_lengths=np.array([4])), want)


def d7(dtype: str) -> Iterator[Call]:
    """Slices of one packed array, in its layout, forwards and backwards."""
    for n, d in ((65, 16), (33, 20), (64, 64)):
        rng = np.random.default_rng(7)
        packed = (rng.standard_normal((2, n, 3, 3 * d)) + 0.25).astype(DTYPES[dtype])
        dout = rng.standard_normal((2, 3, n, d)).astype(DTYPES[dtype])
        q, k, v = (packed[..., i * d : (i + 1) * d].swapaxes(1, 2) for i in range(3))
        yield Call(f"slices, d {d}", Example(q, k, v, {"causal": True}, dout))
        q, k, v, dout = (x[:, :, ::-1] for x in (q, k, v, dout))
        yield Call(f"reversed slices, d {d}", Example(q, k, v, {"causal": True}, dout))


def d8(dtype: str) -> Iterator[Call]:
    """Numbers come in many types."""
    e = random_example(8, dtype=dtype, seqlen_q=9, head_dim=4)
    default = wants(e)
    for scale in (0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), np.float16(0.5)):
        kind = type(scale).__name__
        yield Call(f"scale {kind}", with_options(e, scale=scale), default)
    for scale, softcap in ((1, 2), (np.int64(1), np.int32(2)), (1.0, np.float32(2))):
        want = wants(with_options(e, scale=1.0, softcap=2.0))
        yield Call(f"scale {scale!r}", with_options(e, scale=scale, softcap=softcap), want)


def d10(dtype: str) -> Iterator[Call]:
    """A mask of keys alone, another for each batch element."""
    e = random_example(10, dtype=dtype, batch=4, heads_q=4, seqlen_q=32, head_dim=16)
    counts = (1, 31, 7, 32)
    mask = np.arange(32) < np.array(counts)[:, None, None, None]
    parts = [
        wants(keys(Example(e.q[b, None], e.k[b, None], e.v[b, None]), slice(0, n)))
        for b, n in enumerate(counts)
    ]
    want = {name: np.concatenate([part[name] for part in parts]) for name in ("out", "lse")}
    yield Call("mask", with_options(e, mask=mask), want)
    yield Call("lengths", with_options(e, kv_lengths=np.array(counts)), want)
    shut = np.where(mask, 0, -np.inf).astype(np.float32)
    yield Call("bias", with_options(e, bias=shut), want)


def d11(dtype: str) -> Iterator[Call]:
    """The gradient goes through the cap."""
    e = example([[1]], [[1], [-1]], [[1], [0]], dtype, dout=[[1]], scale=1.0, softcap=1.0)
    p = 1 / (1 + np.exp(-2 * np.tanh(1)))
    ds = p * (1 - p) * (1 - np.tanh(1) ** 2)
    want = {
        "out": p,
        "lse": np.log(2 * np.cosh(np.tanh(1))),
        "dq": 2 * ds,
        "dk": [[[[ds], [-ds]]]],
        "dv": [[[[p], [1 - p]]]],
    }
    yield Call("softcap 1", e, want)


def d12(dtype: str) -> Iterator[Call]:
    """Every combination of lengths around tiles: nothing is dropped at an end, nothing added."""
    for head_dim in (1, 33, 64):
        for seqlen_q in (1, 31, 32, 33, 63, 64, 65, 127, 129):
            for seqlen_k in (1, 31, 33, 38, 63, 64, 65, 70, 127, 129, 257):
                sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim}
                e = random_example(12, dtype=dtype, heads_q=1, backward=False, **sizes)
                yield Call(f"{sizes}, ones", replace(e, v=np.ones_like(e.v)), {"out": 1})
                yield Call(f"{sizes}, random", e)


# ------------------------------------------------------------------------------------- second set


def e1(dtype: str) -> Iterator[Call]:
    """Batch elements without queries, and without keys; NaN where nothing exists."""
    for q_lengths, kv_lengths in (
        ([0, 3], [2, 2]),
        ([3, 0], [2, 2]),
        ([2, 2], [0, 3]),
        ([2, 2], [3, 0]),
        ([0, 3], [2, 0]),
        ([33, 1], [1, 70]),
    ):
        for causal in (False, True, "top_left"):
            e = random_example(
                1,
                dtype=dtype,
                batch=2,
                seqlen_q=max(q_lengths),
                seqlen_k=max(kv_lengths),
                head_dim=8,
                dlse=True,
                q_lengths=q_lengths,
                kv_lengths=kv_lengths,
                causal=causal,
            )
            yield Call(f"{q_lengths} queries, {kv_lengths} keys, causal={causal}", e)


def e2(dtype: str) -> Iterator[Call]:
    """A query or two over many keys, which some kernels split."""
    for seqlen_q, seqlen_k in ((1, 257), (1, 255), (1, 256), (2, 257), (1, 1025), (3, 2049)):
        e = random_example(2, dtype=dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=32)
        yield Call(f"{seqlen_q} queries, {seqlen_k} keys", e)


def e4(dtype: str) -> Iterator[Call]:
    """Queries in front of the first key see nothing."""
    for seqlen_q, seqlen_k in ((5, 2), (129, 1), (70, 33)):
        e = random_example(4, dtype=dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
        blind = seqlen_q - seqlen_k
        want = wants(with_options(e, mask=np.tri(seqlen_q, seqlen_k, -blind, bool), causal=False))
        assert np.isneginf(want["lse"][:, :, :blind]).all()
        yield Call(f"{seqlen_q} queries, {seqlen_k} keys", e, want)


def e5(dtype: str) -> Iterator[Call]:
    """Scores of 1e11: one key has all the weight still."""
    for kind, size in (("bfloat16", 133120.0), ("float16", 61440.0), (dtype, 2.0**15)):
        x = np.full((1, 64), size)
        want = {"out": size, "lse": size**2 * 8}
        yield Call(f"{kind}, {size:g}", example(x, x, x, kind), want)


def e6(dtype: str) -> Iterator[Call]:
    """A score far beyond the cap is the cap, up and down."""
    for raw in (5000.0, -5000.0, 1e30):
        sign = np.sign(raw)
        ones = np.ones((1, 4))
        e = example(ones * sign, ones, ones, dtype, dout=ones, scale=abs(raw) / 4, softcap=50)
        want = {"out": 1, "lse": 50 * sign, "dq": 0, "dk": 0, "dv": 1}
        yield Call(f"score {raw:g}", e, want)
        e = example([[1], [-1]], [[1], [-1]], [[1], [3]], dtype, [[1], [1]], scale=raw, softcap=0.5)
        p = 1 / (1 + np.exp(-sign))
        near, far = p + 3 * (1 - p), 3 * p + (1 - p)
        want = {"out": [[[[near], [far]]]], "lse": np.log(2 * np.cosh(0.5)), "dq": 0, "dk": 0}
        yield Call(f"scores of +-{raw:g}", e, want)


def e7(dtype: str) -> Iterator[Call]:
    """More keys than 16 bits count."""
    for seqlen_k in (65535, 65536, 65537):
        e = random_example(
            7, dtype=dtype, heads_q=1, seqlen_q=2, seqlen_k=seqlen_k, head_dim=8, bias="k"
        )
        e.options["bias"][..., -1] = 12.0  # half of the weight, more or less, is on the last key
        yield Call(f"{seqlen_k} keys", e)


def e8(dtype: str) -> Iterator[Call]:
    """Arrays that are not what they seem to be: permuted, sliced, repeated."""
    rng = np.random.default_rng(8)

    def tensor(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) + 0.25).astype(DTYPES[dtype])

    packed = tensor(84, 3, 3, 64)
    q, k, v = (packed[:, i].swapaxes(0, 1)[None] for i in range(3))
    yield Call("packed (84, 3, 3, 64)", Example(q, k, v, {}, tensor(1, 3, 84, 64)))

    q, k, dout = tensor(1, 3, 70, 64), tensor(1, 3, 62, 64), tensor(1, 3, 70, 64)
    for label, v in (
        ("(62, 3, 64) permuted", tensor(62, 3, 64).swapaxes(0, 1)[None]),
        ("rows of 67 elements", tensor(1, 3, 62, 67)[..., 1:65]),
        ("every second row", tensor(1, 3, 124, 64)[:, :, ::2]),
        ("(64, 62) transposed", tensor(1, 3, 64, 62).swapaxes(2, 3)),
        ("every second column", tensor(1, 3, 62, 128)[..., ::2]),
        ("columns reversed", tensor(1, 3, 62, 64)[..., ::-1]),
        ("heads reversed", tensor(1, 3, 62, 64)[:, ::-1]),
    ):
        yield Call(f"v is {label}", Example(q, k, v, {}, dout))
        yield Call(f"dout is {label}", Example(v, q, q, {}, v))

    q, dout = tensor(2, 4, 33, 64), tensor(2, 4, 33, 64)
    k, v = (np.broadcast_to(tensor(2, 1, 62, 64), (2, 4, 62, 64)) for _ in range(2))
    yield Call("heads repeated", Example(q, k, v, {}, dout))
    k, v = (np.broadcast_to(tensor(1, 4, 62, 64), (2, 4, 62, 64)) for _ in range(2))
    yield Call("batch repeated", Example(q, k, v, {}, dout))
    dout = np.broadcast_to(tensor(2, 4, 1, 64), (2, 4, 33, 64))
    yield Call("rows of dout repeated", Example(q, k, v, {"causal": True}, dout))


def e9(dtype: str) -> Iterator[Call]:
    """Calls that differ in one thing each: no plan of another call may serve."""
    e = random_example(9, dtype=dtype, batch=2, heads_q=2, seqlen_q=33, head_dim=32)
    yield Call("contiguous", e)

    def permuted(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)

    strides = {name: permuted(getattr(e, name)) for name in ("q", "k", "v", "dout")}
    yield Call("other strides", replace(e, **strides))
    yield Call("other strides of k", replace(e, k=strides["k"]))
    for kind in DTYPES:
        yield Call(kind, e.astype(DTYPES[kind]))
    for options in (
        {"causal": True},
        {"causal": "top_left"},
        {"window": (1, 0)},
        {"window": (0, 1)},
        {"scale": 0.5},
        {"scale": 0.25},
        {"softcap": 0.5},
        {"mask": np.tri(33, dtype=bool)},
        {"mask": np.tri(33, dtype=bool)[:, ::-1]},
        {"mask": np.arange(33) < 20},
        {"bias": np.tri(33, dtype=np.float32)},
        {"bias": np.tri(33, dtype=np.float32).T},
        {"q_lengths": np.array([20, 33])},
        {"kv_lengths": np.array([20, 33])},
        {"kv_lengths": np.array([33, 20])},
        {},
    ):
        yield Call(f"{options}", with_options(e, **options))


def e10(dtype: str) -> Iterator[Call]:
    """Causal and a bias at once, backward, in the second batch element too."""
    for axes in ("bhqk", "bk", "qk"):
        e = random_example(
            10,
            dtype=dtype,
            batch=2,
            heads_q=1,
            seqlen_q=129,
            seqlen_k=1025,
            head_dim=16,
            causal=True,
            bias=axes,
        )
        yield Call(f"bias {axes}", e)
    for name, bad in (
        ("mask", np.ones((2, 1, 129, 1026), bool)),
        ("bias", np.ones((1, 1, 1, 1026), np.float32)),
        ("mask", np.ones((3, 1, 1, 1025), bool)),
    ):
        wrong = with_options(replace(e, options={}), **{name: bad})
        yield Call(f"{name} of {bad.shape}", wrong, raises=(ValueError, name))


def e11(dtype: str) -> Iterator[Call]:
    """Gradients respect the mask of the forward."""
    for axes in ("bhqk", "qk", "k", "bq", "h"):
        e = random_example(11, dtype=dtype, batch=2, seqlen_q=38, seqlen_k=65, mask=axes)
        yield Call(f"mask {axes}", e)
    e = random_example(11, dtype=dtype, seqlen_q=65)
    yield Call("mask transposed", with_options(e, mask=np.tri(65, dtype=bool).T))
    mask = np.random.default_rng(11).random((65, 130)) < 0.5
    yield Call("mask sliced", with_options(e, mask=mask[:, ::2]))


def e14(dtype: str) -> Iterator[Call]:
    """A bias broadcasts as any array does, whatever its strides."""
    sizes = {"batch": 2, "heads_q": 3, "seqlen_q": 33, "seqlen_k": 37}
    for axes in ("k", "bk", "h", "bhq", "qk", "bqk", ""):
        yield Call(f"bias {axes}", random_example(14, dtype=dtype, bias=axes, **sizes))
    e = random_example(14, dtype=dtype, **sizes)
    rng = np.random.default_rng(14)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    for label, bias in (
        ("(37,)", normal(37)),
        ("(33, 1)", normal(33, 1)),
        ("rows of 40", normal(33, 40)[:, :37]),
        ("every second column", normal(3, 1, 74)[..., ::2]),
        ("transposed", normal(37, 33).T),
        ("reversed", normal(33, 37)[::-1, ::-1]),
        ("repeated", np.broadcast_to(normal(33, 1), (2, 3, 33, 37))),
    ):
        yield Call(f"bias {label}", with_options(e, bias=bias))
    for kind in ("float16", "bfloat16", "float64"):
        yield Call(f"bias in {kind}", with_options(e, bias=normal(33, 37).astype(DTYPES[kind])))


def e15(dtype: str) -> Iterator[Call]:
    """Three query heads read one key head."""
    sizes = {"batch": 2, "heads_q": 12, "heads_kv": 4, "seqlen_q": 33, "head_dim": 16}
    e = random_example(15, dtype=dtype, **sizes)
    yield Call("random", e)
    head = np.arange(4.0)[:, None, None]
    value = np.broadcast_to(head, e.v.shape).astype(e.dtype)
    want = np.broadcast_to((np.arange(12) // 3)[:, None, None], e.q.shape)
    yield Call("values are head numbers", replace(e, v=value), {"out": want})
    yield Call("causal", with_options(e, causal=True))


CASES: dict[str, Case] = {
    "D1": d1,
    "D2": d2,
    "D3": d3,
    "D4": d4,
    "D5": d5,
    "D6": d6,
    "D7": d7,
    "D8": d8,
    "D10": d10,
    "D11": d11,
    "D12": d12,
    "E1": e1,
    "E2": e2,
    "E4": e4,
    "E5": e5,
    "E6": e6,
    "E7": e7,
    "E8": e8,
    "E9": e9,
    "E10": e10,
    "E11": e11,
    "E14": e14,
    "E15": e15,
}
