"""The functions that users call. Each says what it takes and hands over; the work is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench import dispatch
from workbench.problem import Array, Gradients

__all__ = ["attention", "attention_backward", "attention_weights", "merge_attention", "vector_add"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    return_lse: bool = False,
    out: Any = None,
    layout: str = "bhnd",
    backend: str = "auto",
    kernel: str | None = None,
) -> Any:
    """Exact softmax attention: ``softmax(scale * q k^T) v``, in O(N) memory.

    The formula and its online evaluation are those of Dao et al., *FlashAttention* (2022) and
    *FlashAttention-2* (2023). The order of operations is scale, cap, bias, masks, softmax.

    Parameters
    ----------
    q : array, shape (batch, heads_q, seqlen_q, head_dim)
        Queries: float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64, NumPy or CuPy, any
        strides. Leading axes may be left out, the same ones in q, k and v.
    k : array, shape (batch, heads_kv, seqlen_k, head_dim)
        Keys, in q's dtype. heads_q is a multiple of heads_kv: query head h reads key head
        ``h // (heads_q // heads_kv)``.
    v : array, shape (batch, heads_kv, seqlen_k, head_dim_v)
        Values, in q's dtype.
    causal : bool or "top_left", default False
        Query i stands at position ``p = i + seqlen_k - seqlen_q`` and sees keys ``j <= p``: the
        last query sees every key. ``"top_left"`` places it at ``p = i``.
    window : (left, right), optional
        Query sees keys ``p - left <= j <= p + right``; None or -1 leaves an end open.
    mask : bool array, broadcastable to (batch, heads_q, seqlen_q, seqlen_k), optional
        True = may attend.
    bias : floating array, broadcastable to (batch, heads_q, seqlen_q, seqlen_k), optional
        Added to the scores after the cap; -inf hides a key.
    scale : float, optional
        Any finite number; ``1 / sqrt(head_dim)`` by default.
    softcap : float, default 0.0
        If positive, scores become ``softcap * tanh(score / softcap)``.
    q_lengths, kv_lengths : integer arrays, shape (batch,), optional
        Queries and keys from the length on do not exist. Values outside [0, seqlen] are an error
        for NumPy arrays; on the GPU they are clamped, since the host does not wait for them.
    return_lse : bool, default False
        Also return the log-sum-exp of every row of scores, which `attention_backward` takes.
    out : array, or pair (out, lse) with ``return_lse=True``, optional
        Where to put the results.
    layout : {"bhnd", "bnhd"}, default "bhnd"
        ``"bnhd"`` takes and returns (batch, seqlen, heads, head_dim); lse, mask and bias stay
        (batch, heads, ...).
    backend : {"auto", "cuda", "numba", "cpu", "reference", "cuda-simulator", "numba-simulator"}
        ``"auto"`` is ``"cuda"`` where there is a usable GPU, else ``"cpu"``. NumPy arrays given to
        a GPU backend are copied there and back. The simulators run the kernels of a GPU backend on
        the CPU, slowly, and raise `SimulationError` where a kernel is at fault.
    kernel : str, optional
        Name of a row of `KERNELS` to use, for the GPU backends and the simulators.

    Returns
    -------
    out : array, shape (batch, heads_q, seqlen_q, head_dim_v)
        In q's dtype and layout, on q's device. A row that sees no key is 0.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with ``return_lse=True``: natural log of the sum of exponentials, float32 (float64 for
        float64). A row that sees no key has -inf.

    Raises
    ------
    TypeError
        For a wrong type or dtype, and for host and device arrays in one call.
    ValueError
        For a wrong shape, value, layout, backend or kernel name, and an `out` that overlaps.
    NoKernelError
        If no kernel takes the problem, with every kernel's reason.
    ToolchainError
        If a GPU, a driver or a compiler is missing.
    """
    result = dispatch.run(
        "attention",
        {"q": q, "k": k, "v": v, "mask": mask, "bias": bias,
         "q_lengths": q_lengths, "kv_lengths": kv_lengths},
        {"causal": causal, "window": window, "scale": scale, "softcap": softcap,
         "return_lse": return_lse, "layout": layout, "backend": backend},
        kernel,
        out,
    )  # fmt: skip
    return result if return_lse else result[0]


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    layout: str = "bhnd",
    backend: str = "auto",
    kernel: str | None = None,
    deterministic: bool = False,
    return_dbias: bool = False,
) -> Gradients:
    """Gradients of `attention`, recomputing the probabilities from q, k and lse.

    With ``p = exp(s - lse)`` and ``delta = rowsum(dout * out) - dlse``: ``dv = p^T dout``,
    ``ds = p * (dout v^T - delta)``, ``dq = scale * ds k`` and ``dk = scale * ds^T q`` (algorithm 2
    of Dao, *FlashAttention-2*, 2023), through the cap where there is one.

    Parameters
    ----------
    dout : array, shape (batch, heads_q, seqlen_q, head_dim_v)
        Gradient arriving at out.
    q, k, v, causal, window, mask, bias, scale, softcap, q_lengths, kv_lengths, layout, backend, \
kernel
        As given to `attention`.
    out : array, shape (batch, heads_q, seqlen_q, head_dim_v)
        Result of `attention`.
    lse : array, shape (batch, heads_q, seqlen_q)
        Its log-sum-exp, from ``return_lse=True``. The probabilities are as exact as it is: where a
        whole row of scores lies near -1e6, say, float32 leaves them two digits.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient arriving at lse, in lse's dtype.
    deterministic : bool, default False
        The same inputs give the same bits on the same GPU. dk and dv always do.
    return_dbias : bool, default False
        Also return the gradient of the bias, in the bias's own shape and dtype.

    Returns
    -------
    Gradients
        Named tuple (dq, dk, dv, dbias) in the shapes and dtypes of q, k, v and bias; dbias is
        None unless asked for.

    Raises
    ------
    TypeError, ValueError, NoKernelError, ToolchainError
        As `attention` does.
    """
    result = dispatch.run(
        "attention_backward",
        {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse, "mask": mask,
         "bias": bias, "q_lengths": q_lengths, "kv_lengths": kv_lengths},
        {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "layout": layout,
         "backend": backend, "deterministic": deterministic, "return_dbias": return_dbias},
        kernel,
    )  # fmt: skip
    return Gradients(*result)


def attention_weights(
    q: Array,
    k: Array,
    lse: Array,
    *,
    rows: int | slice | Sequence[int] | None = None,
    reduce: str | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    layout: str = "bhnd",
) -> Array:
    """Rows of the matrix that `attention` multiplies v by, without the rest of it.

    A row of softmax is ``exp(s - lse)`` with the query's scores ``s`` and the log-sum-exp that
    `attention` returns (equation 12 of Dao, *FlashAttention-2*, 2023). Time and memory are those of
    the rows that were asked for; the scores are never held for more than a tile of keys.

    Parameters
    ----------
    q, k, causal, window, mask, bias, scale, softcap, q_lengths, kv_lengths, layout
        As given to `attention`.
    lse : array, shape (batch, heads_q, seqlen_q)
        Its log-sum-exp, from ``return_lse=True``.
    rows : int, slice or sequence of int, optional
        The queries to look at; negative ones count from the end. By default all of them: the whole
        matrix, N x N numbers a head.
    reduce : {"mean"}, optional
        The mean over the heads instead of every head.

    Returns
    -------
    array, shape (batch, heads_q, rows, seqlen_k)
        In the dtype of lse, on q's device. A row sums to 1, or is 0 if it sees no key. The heads
        axis is missing with ``reduce="mean"``, the rows axis with an integer.

    Raises
    ------
    TypeError, ValueError
        As `attention` does, and for rows that are none of q's.
    """
    return dispatch.weights(
        {"q": q, "k": k, "lse": lse, "mask": mask, "bias": bias,
         "q_lengths": q_lengths, "kv_lengths": kv_lengths},
        rows,
        reduce,
        {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "layout": layout},
    )  # fmt: skip


def merge_attention(
    outs: Sequence[Array], lses: Sequence[Array], *, backend: str = "auto"
) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) out_i``.

    Parameters
    ----------
    outs : sequence of arrays, shape (..., seqlen_q, head_dim_v)
        Two or more partial results, of equal shapes and dtype, as ``layout="bhnd"`` has them.
    lses : sequence of arrays, shape (..., seqlen_q)
        Their log-sum-exps, float32 (float64 for float64). A part with ``(0, -inf)`` changes no bit.
    backend : {"auto", "cuda", "numba", "cpu", "reference", "cuda-simulator", "numba-simulator"}
        As in `attention`.

    Returns
    -------
    out : array, shape (..., seqlen_q, head_dim_v)
    lse : array, shape (..., seqlen_q)

    Raises
    ------
    TypeError, ValueError
        For parts that do not fit together.
    """
    return dispatch.merge(outs, lses, backend)


def vector_add(
    a: Array,
    b: Array,
    *,
    out: Array | None = None,
    backend: str = "auto",
    kernel: str | None = None,
) -> Array:
    """Element-wise ``a + b``: the smallest kernel of the workbench.

    Parameters
    ----------
    a, b : arrays of one shape and dtype
        float16, bfloat16, float32 or float64; any strides. Nothing is broadcast.
    out : array, optional
        Where to put the result; it overlaps neither a nor b.
    backend : {"auto", "cuda", "numba", "cpu", "reference", "cuda-simulator", "numba-simulator"}
        As in `attention`.
    kernel : {"vector_add_vec4", "vector_add"}, optional
        For the GPU backends; the first one that takes the arrays by default.

    Returns
    -------
    array
        The sum, in the dtype of a.

    Raises
    ------
    TypeError, ValueError, NoKernelError, ToolchainError
        As `attention` does.
    """
    return dispatch.run("vector_add", {"a": a, "b": b}, {"backend": backend}, kernel, out)[0]
