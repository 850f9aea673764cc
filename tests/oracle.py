"""What all value tests share: the one rule for "how right", and random problems to apply it to.

The rule: a result's error against the float64 reference is at most twice (a gradient's: three
times) the error of the plain formula, evaluated in the result's own dtype with float32 accumulation
(`plain_forward`, `plain_backward`), plus a few units of roundoff of the size of the terms that were
added up to the result. NaN never passes, shapes and dtypes must be right, and what the contract
says is 0 must be exactly 0.

    example = random_example(seed, seqlen_q=33, causal=True, dtype="float16")
    check(example, backend="cuda", kernel="attention_flash_simt")

`PROBLEMS` names the keyword arguments of a set of examples that covers every option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from workbench import checks, reference

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOOR_UNITS = 4.0

# Lengths around the edges of tiles of 16, 32, 64 and 128.
LENGTHS = (1, 15, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


# -------------------------------------------------------------------------------------- the rule


def accumulator(dtype: Any) -> np.dtype:
    """Dtype of the accumulation and of lse: float32, or float64's own."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next number of the dtype."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps) / 2


def as_numpy(x: Any) -> np.ndarray:
    """A NumPy array of what may live on a GPU."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def assert_close(
    got: Any,
    want: np.ndarray,
    plain: np.ndarray,
    dtype: Any,
    *,
    gradient: bool = False,
    scale: float | None = None,
    name: str = "result",
) -> None:
    """Hold `got` to the rule.

    `want` is the float64 answer, `plain` the plain formula's, `dtype` what `got` must have, and
    `scale` the size of the terms that were added up (the largest answer, where it is left out).
    """
    got = as_numpy(got)
    dtype = np.dtype(dtype)
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    assert got.dtype == dtype, f"{name} has dtype {got.dtype}, not {dtype}"
    assert plain.shape == want.shape, f"{name}: the plain formula has shape {plain.shape}"
    assert not np.isnan(want).any(), f"{name}: NaN is nothing to compare with"
    if not want.size:
        return

    got, plain = got.astype(np.float64), plain.astype(np.float64)
    with np.errstate(over="ignore"):
        rounded = want.astype(dtype).astype(np.float64)  # infinite where the dtype ends
    finite = np.isfinite(rounded)
    wrong = ~finite & (got != rounded)
    if wrong.any():
        index = _first(wrong)
        raise AssertionError(f"{name}{index} is {got[index]}, not {rounded[index]}")

    error = _distance(got, want, finite)
    plain_error = _distance(plain, want, finite & np.isfinite(plain)).max()
    if scale is None:
        scale = _distance(want, np.zeros_like(want), finite).max()
    factor = GRADIENT_FACTOR if gradient else FORWARD_FACTOR
    bound = factor * plain_error + FLOOR_UNITS * roundoff(dtype) * scale + _smallest(dtype)
    wrong = ~(error <= bound)  # not (error > bound): NaN must be wrong
    if wrong.any():
        index = _first(wrong)
        raise AssertionError(
            f"{name}{index} is {got[index]}, not {want[index]}: its error {error[index]:.3g} "
            f"(the largest is {error.max():.3g}) passes {bound:.3g}, {factor:g} x the plain "
            f"formula's {plain_error:.3g} and a floor; {wrong.sum()} of {want.size} are wrong"
        )


def _distance(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> np.ndarray:
    """|a - b|, and 0 outside `where`."""
    return np.abs(np.subtract(a, b, where=where, out=np.zeros(b.shape)))


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])


def _smallest(dtype: np.dtype) -> float:
    """Numbers this small may be flushed to 0: CuPy compiles float32 kernels with -ftz=true."""
    info = ml_dtypes.finfo(dtype)
    return float(info.smallest_subnormal if dtype == np.float16 else info.smallest_normal)


# ----------------------------------------------------------------- the plain formula in any dtype


def _weights(
    q: np.ndarray,
    k: np.ndarray,
    *,
    visible: np.ndarray,
    bias: np.ndarray | None,
    scale: float,
    softcap: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | float]:
    """Scores, softmax, lse and the slope of the cap, in the accumulator of q's dtype."""
    acc = accumulator(q.dtype)
    s = (q.astype(acc) @ k.astype(acc).swapaxes(-1, -2)) * acc.type(scale)
    slope: np.ndarray | float = 1.0
    if softcap:
        tanh = np.tanh(s / acc.type(softcap))
        s, slope = acc.type(softcap) * tanh, 1 - tanh * tanh
    if bias is not None:
        s = s + bias.astype(acc)
    s = np.where(visible, s, acc.type(-np.inf))
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), acc.type(0), top)
    e = np.exp(s - top)
    total = _sum_over_keys(e, np.ones((*e.shape[:2], e.shape[-1], 1), acc))
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return s, e / np.where(total == 0, acc.type(1), total), lse, slope


LONG = 1024  # keys from which on the order of a sum shows in its error


def _sum_over_keys(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """weights @ x; over many keys one after the other, as whoever walks over them adds up.

    BLAS and NumPy sum in blocks and pairs, whose error hardly grows with the number of keys.
    """
    if x.shape[2] < LONG:
        return weights @ x
    total = np.zeros((*weights.shape[:3], x.shape[-1]), x.dtype)
    for key in range(x.shape[2]):
        total += weights[..., key, None] * x[..., key, None, :]
    return total


def _grouped(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    heads_q, heads_kv = q.shape[1], x.shape[1]
    return x[:, np.arange(heads_q) * heads_kv // max(heads_q, 1)]


def _ungrouped(dx: np.ndarray, like: np.ndarray) -> np.ndarray:
    total = np.zeros((*like.shape[:3], dx.shape[-1]), dx.dtype)
    for head in range(dx.shape[1]):
        total[:, head * like.shape[1] // dx.shape[1]] += dx[:, head]
    return total


def plain_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, **keywords: Any
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse as a straightforward low-precision implementation computes them."""
    acc = accumulator(q.dtype)
    _, p, lse, _ = _weights(q, _grouped(k, q), **keywords)
    out = _sum_over_keys(p.astype(q.dtype).astype(acc), _grouped(v, q).astype(acc))
    return out.astype(q.dtype), lse


def plain_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    dlse: np.ndarray | None,
    **keywords: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv and ds likewise: p and ds are rounded before they are multiplied."""
    dtype, acc = q.dtype, accumulator(q.dtype)
    out, _ = plain_forward(q, k, v, **keywords)
    q_acc, dout_acc = q.astype(acc), dout.astype(acc)
    k_acc, v_acc = _grouped(k, q).astype(acc), _grouped(v, q).astype(acc)
    s, p, _, slope = _weights(q, _grouped(k, q), **keywords)
    delta = (dout_acc * out.astype(acc)).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta = delta - dlse[..., None]
    hidden = np.isneginf(s)
    ds = np.where(hidden, 0, p * (dout_acc @ v_acc.swapaxes(-1, -2) - delta)).astype(acc)
    draw = np.where(hidden, 0, ds * slope).astype(dtype).astype(acc)
    scale = acc.type(keywords["scale"])
    dq = (draw @ k_acc) * scale
    dk = _ungrouped(draw.swapaxes(-1, -2) @ q_acc, k) * scale
    dv = _ungrouped(p.astype(dtype).astype(acc).swapaxes(-1, -2) @ dout_acc, k)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), ds


# ------------------------------------------------------------------------------------- a problem


@dataclass(frozen=True)
class Example:
    """The arrays of one call, (batch, heads, seqlen, head_dim), and the options that users give.

    `options` may hold causal, window, mask, bias, scale, softcap, q_lengths and kv_lengths. With a
    `dout` the example has a backward too.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    dout: np.ndarray | None = None
    dlse: np.ndarray | None = None

    @property
    def dtype(self) -> np.dtype:
        return self.q.dtype

    def astype(self, dtype: Any) -> Example:
        """The same problem in another dtype."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}
        arrays = {name: None if x is None else x.astype(dtype) for name, x in arrays.items()}
        return replace(self, **arrays)

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        return (*self.q.shape[:3], self.k.shape[2])

    def keywords(self) -> dict[str, Any]:
        """The options as `reference.forward` and `backward` take them."""
        options = self.options
        causal = options.get("causal", False)
        left, right = (None if end == -1 else end for end in options.get("window") or (-1, -1))
        problem: Any = SimpleNamespace(
            seqlen_q=self.score_shape[2],
            seqlen_k=self.score_shape[3],
            window_left=left,
            window_right=0 if causal else right,
            top_left=causal == "top_left",
        )
        arrays: Any = SimpleNamespace(
            q_lengths=options.get("q_lengths"),
            kv_lengths=options.get("kv_lengths"),
            mask=options.get("mask"),
        )
        bias, scale = options.get("bias"), options.get("scale")
        return {
            "visible": reference.visible(problem, arrays),
            "bias": None if bias is None else bias.astype(np.float64),
            "scale": float(self.q.shape[3] ** -0.5 if scale is None else scale),
            "softcap": float(options.get("softcap", 0.0)),
        }

    def seen(self) -> np.ndarray:
        """Which keys each query sees, of `score_shape`; -inf in a bias hides a key too."""
        keywords = self.keywords()
        seen = np.broadcast_to(keywords["visible"], self.score_shape)
        return seen if keywords["bias"] is None else seen & ~np.isneginf(keywords["bias"])


@dataclass(frozen=True)
class Answer:
    """What one result of a problem is held against: the arguments of `assert_close`."""

    want: np.ndarray
    plain: np.ndarray
    dtype: np.dtype
    gradient: bool
    scale: float

    def hold(self, got: Any, name: str) -> None:
        assert_close(
            got,
            self.want,
            self.plain,
            self.dtype,
            gradient=self.gradient,
            scale=self.scale,
            name=name,
        )


def answers(example: Example) -> dict[str, Answer]:
    """Answers named out and lse and, of an example with a dout, dq, dk, dv and dbias."""
    e, dtype, acc = example, example.dtype, accumulator(example.dtype)
    want, sizes = wants(e), _term_sizes(e)
    plain = _scaled_plains(e, want) if dtype == np.float64 else plains(e)
    dtypes = {"lse": acc}
    if "dbias" in want:
        dtypes["dbias"] = e.options["bias"].dtype
    return {
        name: Answer(want[name], plain[name], dtypes.get(name, dtype), name[0] == "d", sizes[name])
        for name in want
    }


def wants(e: Example) -> dict[str, np.ndarray]:
    """The answers of the reference, in float64."""
    keywords = e.keywords()
    results = dict(zip(("out", "lse"), reference.forward(e.q, e.k, e.v, **keywords), strict=True))
    if e.dout is not None:
        *gradients, ds = reference.backward(e.dout, e.q, e.k, e.v, dlse=e.dlse, **keywords)
        results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        if "bias" in e.options:
            results["dbias"] = sum_to(ds, e.options["bias"].shape)
    return results


def plains(e: Example) -> dict[str, np.ndarray]:
    """The answers of the plain formula, in the example's own dtype."""
    keywords = e.keywords()
    # Where nobody looks there may be NaN, which the reference selects away: here it is cleared.
    q, k, v, dout, dlse = (_cleared(x) for x in (e.q, e.k, e.v, e.dout, e.dlse))
    results = dict(zip(("out", "lse"), plain_forward(q, k, v, **keywords), strict=True))
    if dout is not None:
        *gradients, ds = plain_backward(dout, q, k, v, dlse=dlse, **keywords)
        results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        if "bias" in e.options:
            results["dbias"] = sum_to(ds, e.options["bias"].shape)
    return results


def _scaled_plains(e: Example, want: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The plain formula's loss in float32, scaled: in float64 it is as exact as the reference."""
    ratio = roundoff(np.float64) / roundoff(np.float32)
    rough = e.astype(np.float32)
    results, exact = plains(rough), wants(rough)
    for name, x in results.items():
        finite = np.isfinite(x) & np.isfinite(exact[name])
        lost = np.subtract(x, exact[name], where=finite, out=np.zeros(x.shape))
        results[name] = want[name] + ratio * lost
    return results


def sum_to(ds: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of `shape` was broadcast to that of `ds`."""
    full = (1,) * (ds.ndim - len(shape)) + shape
    axes = tuple(a for a in range(ds.ndim) if full[a] != ds.shape[a])
    return ds.sum(axis=axes, keepdims=True).reshape(shape)


def _cleared(x: Any) -> Any:
    return None if x is None else np.where(np.isfinite(x), x, np.zeros_like(x))


def _term_sizes(e: Example) -> dict[str, float]:
    """How large the terms are that each result adds up: its roundoff is a few units of this.

    A gradient is often the small difference of two large sums, as where one key has all the weight.
    """
    keywords = e.keywords()
    q, k, v = (_cleared(x.astype(np.float64)) for x in (e.q, e.k, e.v))
    k, v = _grouped(k, q), _grouped(v, q)
    s, p, lse, slope = _weights(q, k, **keywords)
    terms = abs(keywords["scale"]) * (abs(q) @ abs(k).swapaxes(-1, -2))
    if keywords["bias"] is not None:
        terms = terms + abs(keywords["bias"])
    score = np.max(np.where(np.isneginf(s), 0.0, terms), initial=0.0)
    # The roundoff of a score, in the accumulator, is a relative one of its weight.
    slack = 1.0 + score * roundoff(accumulator(e.dtype)) / roundoff(e.dtype)
    sizes = {"out": slack * (p @ abs(v)), "lse": 1.0 + score + abs(_cleared(lse))}
    if e.dout is not None:
        dout = abs(_cleared(e.dout.astype(np.float64)))
        ds = p * (dout @ abs(v).swapaxes(-1, -2) + (dout * (p @ abs(v))).sum(-1, keepdims=True))
        if e.dlse is not None:
            ds = ds + p * abs(_cleared(e.dlse))[..., None]
        draw = ds * abs(keywords["scale"]) * (slope + roundoff(accumulator(e.dtype)))
        sizes["dq"] = slack * (draw @ abs(k))
        sizes["dk"] = slack * _ungrouped(draw.swapaxes(-1, -2) @ abs(q), e.k)
        sizes["dv"] = slack * _ungrouped(p.swapaxes(-1, -2) @ dout, e.k)
        if "bias" in e.options:
            bias = e.options["bias"]
            # Whatever dtype dbias has, its delta comes from an out that was rounded to q's. Those
            # roundings are independent, so their squares add up (a row has one delta: p, not p**2).
            squares = p * ((dout * (p @ abs(v))) ** 2).sum(-1, keepdims=True)
            ratio = roundoff(e.dtype) / roundoff(bias.dtype)
            rounded = ratio * np.sqrt(sum_to(squares, bias.shape))
            sizes["dbias"] = slack * sum_to(ds, bias.shape) + rounded
    return {name: float(np.max(size, initial=0.0)) for name, size in sizes.items()}


# ------------------------------------------------------------------------------ running a problem


def run(
    example: Example,
    *,
    backend: str,
    kernel: str | None = None,
    layout: str = "bhnd",
    deterministic: bool = False,
    transfer: Callable[[np.ndarray], Any] = lambda x: x,
) -> dict[str, Any]:
    """Results by name, in the layout "bhnd", of the public functions.

    `transfer` brings an array to where the backend shall find it (`cupy.asarray`).
    """
    import workbench

    def move(x: np.ndarray) -> Any:
        return transfer(np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bnhd" else x)

    def back(x: Any) -> Any:
        return x.swapaxes(1, 2) if layout == "bnhd" else x

    q, k, v = (move(x) for x in (example.q, example.k, example.v))
    options = {
        name: transfer(x) if isinstance(x, np.ndarray) and x.ndim else x
        for name, x in example.options.items()
    }
    options |= {"layout": layout, "backend": backend, "kernel": kernel}
    out, lse = workbench.attention(q, k, v, return_lse=True, **options)
    results = {"out": back(out), "lse": lse}
    if example.dout is not None:
        dq, dk, dv, dbias = workbench.attention_backward(
            move(example.dout),
            q,
            k,
            v,
            out,
            lse,
            dlse=None if example.dlse is None else transfer(example.dlse),
            deterministic=deterministic,
            return_dbias="bias" in options,
            **options,
        )
        results |= {"dq": back(dq), "dk": back(dk), "dv": back(dv)}
        if dbias is not None:
            results["dbias"] = dbias
    return results


def hold(example: Example, results: dict[str, Any]) -> None:
    """Hold results to the rule, and to exact zeros where nothing is seen."""
    expected = answers(example)
    assert results.keys() == expected.keys(), f"results are {list(results)}, not {list(expected)}"
    for name, answer in expected.items():
        answer.hold(results[name], name)
    seen = example.seen()
    blind = ~seen.any(axis=-1)  # queries without keys
    unseen = ~_ungrouped(seen.swapaxes(-1, -2), example.k).any(axis=-1)  # keys without queries
    for name, rows in (("out", blind), ("dq", blind), ("dk", unseen), ("dv", unseen)):
        if name in results:
            assert not as_numpy(results[name])[rows].any(), f"{name} is not 0 where nothing is seen"


def check(example: Example, **how: Any) -> None:
    """Run an example through the public functions (`run`) and hold every result to the rule."""
    hold(example, run(example, **how))


# -------------------------------------------------------------------------------- random problems


def random_example(
    seed: int,
    *,
    dtype: str = "float32",
    batch: int = 1,
    heads_q: int = 2,
    heads_kv: int | None = None,
    seqlen_q: int = 33,
    seqlen_k: int | None = None,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    backward: bool = True,
    dlse: bool = False,
    mask: str | None = None,
    bias: str | None = None,
    q_lengths: bool | list[int] = False,
    kv_lengths: bool | list[int] = False,
    **options: Any,
) -> Example:
    """A random problem, with other options (causal, window, scale, softcap) taken as they are.

    `mask` and `bias` name the axes that they have of "bhqk", so "k" is one row for all queries.
    Lengths are random, or as given; what lies past them is NaN.
    """
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    heads_kv = heads_q if heads_kv is None else heads_kv
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    axes = {"b": batch, "h": heads_q, "q": seqlen_q, "k": seqlen_k}

    def tensor(*shape: int, offset: float) -> np.ndarray:
        # The offset shows a wrong scale, a wrong denominator and a row that is not there.
        return (rng.standard_normal(shape) + offset).astype(kind)

    def score_shape(letters: str) -> tuple[int, ...]:
        return tuple(n if axis in letters else 1 for axis, n in axes.items())

    q = tensor(batch, heads_q, seqlen_q, head_dim, offset=0.5)
    k = tensor(batch, heads_kv, seqlen_k, head_dim, offset=0.25)
    v = tensor(batch, heads_kv, seqlen_k, head_dim_v, offset=0.5)
    dout = tensor(batch, heads_q, seqlen_q, head_dim_v, offset=0.5) if backward else None
    at_lse = None
    if backward and dlse:
        at_lse = (rng.standard_normal(q.shape[:3]) + 0.5).astype(accumulator(kind))
    if mask is not None:
        keep = rng.random(score_shape(mask)) < 0.7
        if keep.shape[2] > 1:
            keep[:, :, rng.integers(keep.shape[2])] = False  # a query that sees no key
        options["mask"] = keep
    if bias is not None:
        addend = rng.standard_normal(score_shape(bias)) + 0.5
        addend[rng.random(addend.shape) < 0.05] = -np.inf
        options["bias"] = addend.astype(accumulator(kind))
    for name, given, seqlen, tensors in (
        ("q_lengths", q_lengths, seqlen_q, (q, dout, at_lse)),
        ("kv_lengths", kv_lengths, seqlen_k, (k, v)),
    ):
        if given is False:
            continue
        drawn = rng.integers(0, seqlen + 1, batch) if given is True else given
        lengths = np.asarray(drawn, dtype=np.int32)
        for b, length in enumerate(lengths):
            for x in tensors:
                if x is not None:
                    x[b, :, length:] = np.nan
        options[name] = lengths
    return Example(q, k, v, options, dout, at_lse)


# Each option alone, then together, with lengths that straddle tiles. Small enough for all of them
# to run over every kernel, language and dtype.
def example(row: Any, seed: int, **problem: Any) -> Example:
    """A random problem, of float32 unless it says otherwise or the kernel does not take that."""
    usual = "float32" if row is None or "float32" in row.dtypes else row.dtypes[0]
    return random_example(seed, **{"dtype": usual} | problem)


def part_taken(row: Any, e: Example, arch: str) -> Example | None:
    """The example, without its backward where the kernel declines that, or None."""
    named = {"q": e.q, "k": e.k, "v": e.v} | {
        name: x for name, x in e.options.items() if isinstance(x, np.ndarray) and x.ndim
    }
    options: dict[str, Any] = {"causal": False, "window": None, "scale": None, "softcap": 0.0}
    options = {name: e.options.get(name, x) for name, x in options.items()} | {"layout": "bhnd"}
    call = checks.prepare_attention(named, return_lse=True, backend="reference", **options)
    problem = checks.with_strides(call.problem, call.arrays)
    if row.why_not(problem, arch):
        return None
    backward = replace(problem, op="attention_backward", return_dbias=problem.has_bias)
    declined = row.why_not(backward, arch)
    return replace(e, dout=None, dlse=None) if declined else e


PROBLEMS: dict[str, dict[str, Any]] = {
    "square": {"seqlen_q": 64, "head_dim": 64},
    "odd": {"seqlen_q": 33, "seqlen_k": 129, "head_dim": 33, "head_dim_v": 65},
    "one-query": {"seqlen_q": 1, "seqlen_k": 257},
    "one-key": {"seqlen_q": 65, "seqlen_k": 1, "head_dim": 1},
    "wide": {"seqlen_q": 63, "seqlen_k": 31, "head_dim": 128, "head_dim_v": 1},
    "very-wide": {"seqlen_q": 17, "seqlen_k": 70, "head_dim": 192, "head_dim_v": 256},
    "grouped": {"batch": 2, "heads_q": 6, "heads_kv": 2, "seqlen_q": 31, "seqlen_k": 65},
    "one-key-head": {"batch": 2, "heads_q": 3, "heads_kv": 1, "seqlen_q": 65},
    "causal": {"seqlen_q": 129, "causal": True, "head_dim": 64},
    "causal-more-keys": {"seqlen_q": 33, "seqlen_k": 127, "causal": True},
    "causal-fewer-keys": {"seqlen_q": 127, "seqlen_k": 65, "causal": True},
    "top-left": {"seqlen_q": 65, "seqlen_k": 97, "causal": "top_left"},
    "top-left-fewer-keys": {"seqlen_q": 97, "seqlen_k": 33, "causal": "top_left"},
    "window": {"seqlen_q": 129, "window": (17, 5)},
    "window-left": {"seqlen_q": 65, "seqlen_k": 129, "window": (32, None)},
    "window-right": {"seqlen_q": 129, "seqlen_k": 65, "window": (-1, 3)},
    "window-causal": {"seqlen_q": 129, "window": (33, 9), "causal": True},
    "window-top-left": {"seqlen_q": 70, "seqlen_k": 129, "window": (7, None), "causal": "top_left"},
    "window-self": {"seqlen_q": 33, "window": (0, 0)},
    "mask": {"batch": 2, "seqlen_q": 33, "seqlen_k": 65, "mask": "bhqk"},
    "mask-keys": {"batch": 2, "seqlen_q": 65, "mask": "bk"},
    "mask-queries": {"batch": 2, "seqlen_q": 65, "seqlen_k": 31, "mask": "hq"},
    "bias": {"batch": 2, "seqlen_q": 33, "seqlen_k": 65, "bias": "bhqk"},
    "bias-keys": {"batch": 2, "seqlen_q": 65, "bias": "k"},
    "bias-heads": {"batch": 2, "seqlen_q": 65, "seqlen_k": 33, "bias": "hqk"},
    "bias-queries": {"batch": 2, "seqlen_q": 33, "bias": "bq"},
    "softcap": {"seqlen_q": 65, "softcap": 0.75},
    "softcap-large": {"seqlen_q": 33, "softcap": 30.0, "scale": 2.0},
    "scale": {"seqlen_q": 65, "scale": 0.3},
    "scale-negative": {"seqlen_q": 33, "scale": -0.25},
    "scale-zero": {"seqlen_q": 33, "seqlen_k": 65, "scale": 0.0},
    "lengths": {"batch": 3, "seqlen_q": 65, "q_lengths": [65, 0, 33], "kv_lengths": [31, 40, 65]},
    "lengths-causal": {
        "batch": 4,
        "seqlen_q": 65,
        "seqlen_k": 70,
        "causal": True,
        "q_lengths": [65, 12, 33, 40],
        "kv_lengths": [70, 64, 0, 17],
    },
    "kv-lengths": {"batch": 3, "seqlen_q": 33, "seqlen_k": 129, "kv_lengths": True},
    "q-lengths": {"batch": 3, "seqlen_q": 70, "seqlen_k": 33, "q_lengths": True},
    "dlse": {"seqlen_q": 65, "seqlen_k": 33, "dlse": True, "causal": True},
    "no-keys": {"seqlen_q": 33, "seqlen_k": 0, "dlse": True},
    "no-queries": {"seqlen_q": 0, "seqlen_k": 33},
    "no-batch": {"batch": 0, "seqlen_q": 33},
    "no-heads": {"heads_q": 0, "seqlen_q": 33},
    "everything": {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 65,
        "seqlen_k": 97,
        "head_dim": 40,
        "head_dim_v": 24,
        "causal": True,
        "window": (40, None),
        "mask": "bhqk",
        "bias": "hqk",
        "softcap": 2.0,
        "scale": 0.4,
        "q_lengths": [65, 33],
        "kv_lengths": [97, 70],
        "dlse": True,
    },
}
