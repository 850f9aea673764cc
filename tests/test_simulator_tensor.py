"""Tensor-core instructions, on matrices whose product NumPy knows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import run_body

from workbench.simulator import faults
from workbench.simulator.faults import SimulationError

# kind, depth: bytes of an element, registers of A and of B
SHAPES = {
    ("f16", 16): (2, 4, 2), ("f16", 8): (2, 2, 1), ("bf16", 16): (2, 4, 2), ("bf16", 8): (2, 2, 1),
    ("tf32", 8): (4, 4, 2), ("tf32", 4): (4, 2, 1), ("s8", 32): (1, 4, 2), ("u8", 16): (1, 2, 1),
}  # fmt: skip
DTYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32,
    "s8": np.int8, "u8": np.uint8,
}  # fmt: skip


def fragments(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each thread's registers of A (M x K) and B (K x N) hold, from the PTX document."""
    each = max(1, 4 // a.itemsize)  # elements in a register
    depth = a.shape[1]
    rows_of_a, rows_of_b = [], []
    for thread in range(32):
        group, place = divmod(thread, 4)
        words = []
        for start in range(place * each, depth, 4 * each):
            words += [a[group + half, start : start + each] for half in (0, 8)]
        rows_of_a.append(np.concatenate(words))
        words = [b[start : start + each, group] for start in range(place * each, depth, 4 * each)]
        rows_of_b.append(np.concatenate(words))
    return np.stack(rows_of_a), np.stack(rows_of_b)


@pytest.mark.parametrize(("kind", "depth"), SHAPES)
def test_products(kind: str, depth: int) -> None:
    itemsize, count_a, count_b = SHAPES[kind, depth]
    rng = np.random.default_rng(0)
    whole = kind in ("s8", "u8")
    a = rng.integers(0, 100, (16, depth)) if whole else rng.standard_normal((16, depth))
    b = rng.integers(0, 100, (depth, 8)) if whole else rng.standard_normal((depth, 8))
    c = rng.integers(-9, 9, (16, 8)) if whole else rng.standard_normal((16, 8))
    a, b = (x.astype(DTYPES[kind]) for x in (a, b))
    if kind == "tf32":
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    acc = np.int32 if whole else np.float32
    c, d = c.astype(acc), np.zeros((16, 8), acc)
    held_a, held_b = fragments(a, b)
    assert held_a.nbytes == 32 * 4 * count_a
    assert held_a.itemsize == itemsize
    result = "s32" if whole else "f32"

    def load(pointer: int, first: int, count: int) -> str:
        lines = f"mad.wide.u32 %d10, %r0, {4 * count}, %d{pointer};"
        for i in range(count):
            lines += f"ld.global.b32 %r{first + i}, [%d10+{4 * i}];"
        return lines

    names = [
        ", ".join(f"%r{first + i}" for i in range(n)) for first, n in ((10, count_a), (20, count_b))
    ]
    body = f"""
        {load(0, 10, count_a)} {load(1, 20, count_b)}
        shr.u32 %r2, %r0, 2; and.b32 %r3, %r0, 3;
        mul.lo.u32 %r4, %r2, 32; mad.lo.u32 %r4, %r3, 8, %r4; cvt.u64.u32 %d5, %r4;
        add.u64 %d6, %d5, %d2; add.u64 %d7, %d5, %d3;
        ld.global.v2.b32 {{%r30, %r31}}, [%d6]; ld.global.v2.b32 {{%r32, %r33}}, [%d6+256];
        mma.sync.aligned.m16n8k{depth}.row.col.{result}.{kind}.{kind}.{result}
            {{%r40, %r41, %r42, %r43}}, {{{names[0]}}}, {{{names[1]}}}, {{%r30, %r31, %r32, %r33}};
        st.global.v2.b32 [%d7], {{%r40, %r41}}; st.global.v2.b32 [%d7+256], {{%r42, %r43}};
        ret;
    """
    arrays = {"a": held_a.view(np.uint32), "b": held_b.view(np.uint32), "c": c, "out": d}
    run_body(body, arrays)
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(d, want, rtol=1e-6, atol=1e-6)


def test_products_in_double() -> None:
    rng = np.random.default_rng(0)
    a, b, out = rng.standard_normal((8, 4)), rng.standard_normal((4, 8)), np.zeros((8, 8))
    body = """
        mad.wide.u32 %d10, %r0, 8, %d0; ld.global.b64 %d11, [%d10];
        mad.wide.u32 %d10, %r0, 8, %d1; ld.global.b64 %d12, [%d10];
        mov.u64 %d13, 0;
        mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d14, %d15}, {%d11}, {%d12}, {%d13, %d13};
        mad.wide.u32 %d10, %r0, 16, %d2; st.global.v2.b64 [%d10], {%d14, %d15}; ret;
    """
    run_body(body, {"a": a, "b": np.ascontiguousarray(b.T), "out": out})
    np.testing.assert_allclose(out, a @ b, rtol=1e-14)


def test_half_accumulators() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 8), (8, 8)))
    held_a, held_b = fragments(a, b)
    out = np.zeros((32, 2, 2), np.float16)
    body = """
        mad.wide.u32 %d10, %r0, 8, %d0; ld.global.v2.b32 {%r10, %r11}, [%d10];
        mad.wide.u32 %d10, %r0, 4, %d1; ld.global.b32 %r20, [%d10]; mov.u32 %r30, 0;
        mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16
            {%r40, %r41}, {%r10, %r11}, {%r20}, {%r30, %r30};
        mad.wide.u32 %d10, %r0, 8, %d2; st.global.v2.b32 [%d10], {%r40, %r41}; ret;
    """
    arrays = {"a": held_a.view(np.uint32), "b": held_b.view(np.uint32), "out": out}
    run_body(body, arrays)
    want = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    got = out.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
    np.testing.assert_array_equal(got, want)


MATRICES = """
    .shared .align 16 .b8 tile[512];
    shl.b32 %r2, %r0, 4; cvt.u64.u32 %d3, %r2; add.u64 %d3, %d3, %d0;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d3];
    st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};
    WAIT
    ldmatrix.sync.aligned.m8n8.x4TRANS.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];
    mad.wide.u32 %d5, %r0, 16, %d1;
    st.global.v4.b32 [%d5], {%r10, %r11, %r12, %r13}; ret;
"""


@pytest.mark.parametrize("turned", [False, True])
def test_loads_of_matrices(turned: bool) -> None:
    table = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((32, 4, 2), np.uint16)
    body = MATRICES.replace("TRANS", ".trans" if turned else "")
    run_body(body.replace("WAIT", "bar.warp.sync 0xffffffff;"), {"table": table, "out": out})
    for thread in range(32):
        group, place = divmod(thread, 4)
        for i in range(4):
            matrix = table[i].T if turned else table[i]
            np.testing.assert_array_equal(out[thread, i], matrix[group, 2 * place : 2 * place + 2])
    with pytest.raises(SimulationError) as caught:
        run_body(body.replace("WAIT", ""), {"table": table, "out": out})
    assert caught.value.kind == faults.RACE


def test_stores_and_turns_of_matrices() -> None:
    """What stmatrix stores, ldmatrix loads; movmatrix does in registers what .trans does."""
    words, out = np.arange(1000, 1032, dtype=np.uint32), np.zeros((32, 2), np.uint32)
    body = """
        .shared .align 16 .b8 tile[128];
        mad.wide.u32 %d10, %r0, 4, %d0; ld.global.b32 %r2, [%d10];
        and.b32 %r3, %r0, 7; shl.b32 %r3, %r3, 4;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r2};
        bar.warp.sync 0xffffffff;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r4}, [%r3];
        movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r2;
        mad.wide.u32 %d10, %r0, 8, %d1; st.global.v2.b32 [%d10], {%r4, %r5}; ret;
    """
    run_body(body, {"words": words, "out": out})
    want = np.ascontiguousarray(words.view(np.uint16).reshape(8, 8).T).view(np.uint32).reshape(-1)
    np.testing.assert_array_equal(out, np.stack([want, want], axis=1))
