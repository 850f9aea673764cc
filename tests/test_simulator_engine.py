"""The engine on small kernels in PTX: divergence, waiting, memory, copies and what they cost."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import kernel, run_body, run_text

from workbench.simulator import checks, faults, lines, ops, order
from workbench.simulator.faults import SimulationError
from workbench.simulator.ops import UnknownInstructionError
from workbench.simulator.ptx import Location, PTXError, parse

# %d1 + 4 * number of the thread -> %d10: where a thread's own word of the first array lies
OWN = "mad.wide.u32 %d10, %r0, 4, %d0;\n"
STORE = OWN + "st.global.u32 [%d10], %r1; ret;"
SHARED = ".shared .align 16 .b8 tile[1024];"


def outcome(body: str, threads: int = 32, module: str = "", **options: object) -> np.ndarray:
    """The words, one a thread, that a kernel leaves in %r1."""
    out = np.zeros(threads, np.uint32)
    start = "mov.u32 %r0, %tid.x;"
    text = kernel(f"{start}\n{body}\n{STORE}", ("out",), module)
    run_text(text, {"out": out}, block=threads, **options)
    return out


def fault_of(body: str, threads: int = 32, **options: object) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        outcome(body, threads, **options)
    return caught.value


# -------------------------------------------------------------------------------- divergence


def test_branches_meet_again() -> None:
    body = """
        and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0;
        @%p1 bra EVEN;
        mul.lo.u32 %r1, %r0, 10;
        bra.uni JOIN;
    EVEN:
        add.u32 %r1, %r0, 1000;
    JOIN:
        add.u32 %r1, %r1, 1;
    """
    lane = np.arange(32)
    want = np.where(lane % 2, lane * 10, lane + 1000) + 1
    np.testing.assert_array_equal(outcome(body), want)


def test_loops_of_different_lengths() -> None:
    body = """
        mov.u32 %r1, 0; mov.u32 %r2, 0;
    AGAIN:
        setp.ge.u32 %p1, %r2, %r0;
        @%p1 bra DONE;
        add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1;
        bra.uni AGAIN;
    DONE:
    """
    lane = np.arange(96)
    np.testing.assert_array_equal(outcome(body, 96), lane * (lane - 1) // 2)


def test_guarded_instructions() -> None:
    body = """
        setp.lt.u32 %p1, %r0, 7;
        mov.u32 %r1, 5;
        @%p1 mov.u32 %r1, 6;
        @!%p1 add.u32 %r1, %r1, %r0;
    """
    lane = np.arange(32)
    np.testing.assert_array_equal(outcome(body), np.where(lane < 7, 6, 5 + lane))


def test_some_threads_leave_early() -> None:
    body = "mov.u32 %r1, 3; setp.ge.u32 %p1, %r0, 20; @%p1 ret;"
    np.testing.assert_array_equal(outcome(body), np.where(np.arange(32) < 20, 3, 0))


def test_a_block_that_is_no_multiple_of_a_warp() -> None:
    body = "vote.sync.ballot.b32 %r1, 1, 0xffffffff;"
    np.testing.assert_array_equal(outcome(body, 40), [0xFFFFFFFF] * 32 + [0xFF] * 8)


def test_a_table_of_labels() -> None:
    body = """
    TABLE: .branchtargets A, B, C;
        rem.u32 %r2, %r0, 3;
        brx.idx %r2, TABLE;
    A:  mov.u32 %r1, 100; bra JOIN;
    B:  mov.u32 %r1, 200; bra JOIN;
    C:  mov.u32 %r1, 300;
    JOIN:
    """
    np.testing.assert_array_equal(outcome(body), np.arange(32) % 3 * 100 + 100)


FUNCTION = """
.func (.param .b32 result) square(.param .b32 x, .param .b32 unused)
{
    .reg .b32 %a<4>;
    .reg .pred %q<2>;
    ld.param.b32 %a1, [x];
    mul.lo.s32 %a2, %a1, %a1;
    setp.gt.s32 %q1, %a1, 10;
    @%q1 bra LARGE;
    st.param.b32 [result], %a2;
    ret;
LARGE:
    st.param.b32 [result], %a1;
    ret;
}
"""
CALL = """
    {{ .param .b32 p0; .param .b32 p1; .param .b32 r0;
    st.param.b32 [p0], {0}; st.param.b32 [p1], 0;
    call.uni (r0), square, (p0, p1);
    ld.param.b32 {1}, [r0]; }}
"""


def test_calls_from_several_places() -> None:
    body = f"""
        setp.lt.u32 %p1, %r0, 8;
        @%p1 bra FIRST;
        {CALL.format("%r0", "%r1")}
        bra JOIN;
    FIRST:
        add.u32 %r2, %r0, 1;
        {CALL.format("%r2", "%r1")}
    JOIN:
    """
    lane = np.arange(32)
    x = np.where(lane < 8, lane + 1, lane)
    np.testing.assert_array_equal(outcome(body, module=FUNCTION), np.where(x > 10, x, x * x))


def test_local_memory_is_a_threads_own() -> None:
    body = """
        .local .align 4 .b8 own[64];
        mov.u64 %d2, own; cvta.local.u64 %d3, %d2;
        and.b32 %r2, %r0, 7; mad.wide.u32 %d4, %r2, 4, %d3;
        st.u32 [%d4], %r0;
        mad.wide.u32 %d5, %r2, 4, %d2;
        ld.local.u32 %r1, [%d5];
    """
    np.testing.assert_array_equal(outcome(body, 64), np.arange(64))


def test_generic_addresses_lead_to_every_memory() -> None:
    body = f"""
        {SHARED}
        .local .align 4 .b8 own[4];
        mov.u64 %d2, tile; cvta.shared.u64 %d3, %d2; mad.wide.u32 %d3, %r0, 4, %d3;
        mov.u64 %d4, own; cvta.local.u64 %d4, %d4;
        mad.wide.u32 %d5, %r0, 4, %d0;
        st.u32 [%d3], %r0; st.u32 [%d4], 100; st.u32 [%d5], 1000;
        rem.u32 %r3, %r0, 3;
        setp.eq.u32 %p1, %r3, 0; selp.b64 %d6, %d3, %d4, %p1;
        setp.eq.u32 %p1, %r3, 1; selp.b64 %d6, %d5, %d6, %p1;
        ld.u32 %r1, [%d6];
        isspacep.shared %p2, %d6;
        @%p2 add.u32 %r1, %r1, 10000;
    """
    lane = np.arange(32)
    want = np.choose(lane % 3, [lane + 10000, 1000, 100])
    np.testing.assert_array_equal(outcome(body), want)


def test_constants_of_the_module() -> None:
    module = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};\n.global .align 4 .u32 one = 1;"
    body = """
        and.b32 %r2, %r0, 3; mov.u64 %d2, table; mad.wide.u32 %d2, %r2, 4, %d2;
        ld.const.u32 %r1, [%d2]; ld.global.u32 %r3, [one]; add.u32 %r1, %r1, %r3;
    """
    want = np.arange(32) % 4 * 10 + 11
    np.testing.assert_array_equal(outcome(body, module=module), want)


# ------------------------------------------------------------------------------------ waiting

# Every thread writes its number, all wait, and every thread reads its neighbour's.
EXCHANGE = f"""
    {SHARED}
    shl.b32 %r2, %r0, 2;
    st.shared.u32 [%r2], %r0;
    WAIT
    xor.b32 %r3, %r2, 256;
    ld.shared.u32 %r1, [%r3];
"""


def test_a_barrier_puts_accesses_in_order() -> None:
    lane = np.arange(128)
    np.testing.assert_array_equal(outcome(EXCHANGE.replace("WAIT", "bar.sync 0;"), 128), lane ^ 64)


def test_a_missing_barrier_is_a_race_though_the_values_are_right() -> None:
    error = fault_of(EXCHANGE.replace("WAIT", ""), 128)
    assert error.kind == faults.RACE
    assert "of tile (shared)" in str(error)
    assert "no barrier" in str(error)


def test_a_warp_barrier_orders_a_warp_only() -> None:
    body = EXCHANGE.replace("WAIT", "bar.warp.sync 0xffffffff;")
    assert fault_of(body, 128).kind == faults.RACE
    inside = body.replace("256", "4")
    np.testing.assert_array_equal(outcome(inside, 128), np.arange(128) ^ 1)
    assert fault_of(inside.replace("bar.warp.sync 0xffffffff;", "")).kind == faults.RACE


def test_barriers_in_divergent_branches() -> None:
    """The two halves of a block arrive at different instructions, at different times."""
    body = f"""
        {SHARED}
        shl.b32 %r2, %r0, 2; setp.lt.u32 %p1, %r0, 64;
        @%p1 bra LOW;
        st.shared.u32 [%r2], %r0;
        bar.sync 0;
        bra JOIN;
    LOW:
        add.u32 %r4, %r0, 1; st.shared.u32 [%r2], %r4;
        bar.sync 0;
    JOIN:
        xor.b32 %r3, %r2, 256; ld.shared.u32 %r1, [%r3];
    """
    lane = np.arange(128)
    np.testing.assert_array_equal(outcome(body, 128), np.where(lane < 64, lane ^ 64, lane - 63))


def test_a_warp_at_two_barriers() -> None:
    body = """
        setp.lt.u32 %p1, %r0, 10;
        @%p1 bra LOW;
        bar.sync 0;
        bra JOIN;
    LOW: bar.sync 0;
    JOIN:
    """
    assert fault_of(body).kind == faults.SPLIT_WARP


def test_a_barrier_that_some_never_reach() -> None:
    error = fault_of("setp.ge.u32 %p1, %r0, 40; @%p1 ret; bar.sync 0;", 64)
    assert error.kind == faults.DEADLOCK
    assert "threads 0-39 wait at bar.sync" in str(error)
    assert "threads 40-63 exited" in str(error)


def test_a_shuffle_that_some_never_reach() -> None:
    """Some wait for the others at a shuffle, those for them at a barrier."""
    body = """
        setp.ge.u32 %p1, %r0, 8;
        @%p1 bra HIGH;
        shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffffffff;
    HIGH:
        bar.sync 0;
    """
    error = fault_of(body)
    assert error.kind == faults.DEADLOCK
    assert "threads 0-7 wait at shfl.sync.bfly.b32" in str(error)
    assert "threads 8-31 wait at bar.sync" in str(error)


def test_nobody_waits_for_threads_that_have_exited() -> None:
    shuffle = "mov.u32 %r2, %r0; shfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffffffff;"
    lane = np.arange(32)
    want = np.where(lane < 8, lane ^ 1, 0)
    early = "mov.u32 %r1, 0; setp.ge.u32 %p1, %r0, 8; @%p1 ret;"
    np.testing.assert_array_equal(outcome(early + shuffle), want)
    late = f"""
        mov.u32 %r1, 0; setp.ge.u32 %p1, %r0, 8;
        @%p1 bra HIGH;
        {shuffle}
        bra JOIN;
    HIGH:
        add.u32 %r3, %r0, 1; ret;
    JOIN:
    """
    np.testing.assert_array_equal(outcome(late), want)
    assert fault_of(early + shuffle.replace("1, 31", "16, 31")).kind == faults.SHUFFLE
    matrix = f"{SHARED} {early} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r3}}, [tile];"
    assert fault_of(matrix).kind == faults.DEADLOCK


def test_lanes_wait_for_a_shuffle_behind_a_branch() -> None:
    """Lanes that come from code at a higher address arrive later than lanes that fell through."""
    body = """
        setp.ge.u32 %p1, %r0, 16;
        mov.u32 %r2, %r0;
        @%p1 bra FAR;
    BACK:
        shfl.sync.idx.b32 %r1, %r2, 31, 31, 0xffffffff;
        bra.uni END;
    FAR:
        add.u32 %r2, %r2, 100;
        bra BACK;
    END:
    """
    np.testing.assert_array_equal(outcome(body), np.full(32, 131))


def test_a_shuffle_among_some() -> None:
    body = """
        setp.ge.u32 %p1, %r0, 16; mov.u32 %r1, 7;
        @%p1 bra END;
        shfl.sync.bfly.b32 %r1, %r0, 8, 31, 0xffff;
    END:
    """
    lane = np.arange(32)
    np.testing.assert_array_equal(outcome(body), np.where(lane < 16, lane ^ 8, 7))
    error = fault_of(body.replace("%r0, 8, 31", "%r0, 16, 31"))
    assert error.kind == faults.SHUFFLE


def test_reducing_barriers() -> None:
    count = "setp.lt.u32 %p1, %r0, 50; bar.red.popc.u32 %r1, 0, %p1;"
    np.testing.assert_array_equal(outcome(count, 96), np.full(96, 50))
    for op, want in (("and", 0), ("or", 1)):
        body = f"setp.lt.u32 %p1, %r0, 50; bar.red.{op}.pred %p2, 0, %p1; selp.u32 %r1, 1, 0, %p2;"
        np.testing.assert_array_equal(outcome(body, 96), np.full(96, want))


def test_named_barriers_of_some_threads() -> None:
    """The upper half waits for what the lower half, which does not wait, has written."""
    body = f"""
        {SHARED}
        shl.b32 %r2, %r0, 2; xor.b32 %r3, %r2, 256; mov.u32 %r1, 1;
        setp.lt.u32 %p1, %r0, 64;
        @%p1 bra LOW;
        bar.sync 3, 128;
        ld.shared.u32 %r1, [%r3];
        bra JOIN;
    LOW:
        st.shared.u32 [%r2], %r0;
        bar.arrive 3, 128;
    JOIN:
        bar.sync 0;
    """
    lane = np.arange(128)
    np.testing.assert_array_equal(outcome(body, 128), np.where(lane < 64, 1, lane - 64))


def test_exits_and_traps() -> None:
    np.testing.assert_array_equal(
        outcome("mov.u32 %r1, 3; setp.ge.u32 %p1, %r0, 20; @%p1 exit;"),
        np.where(np.arange(32) < 20, 3, 0),
    )
    for stop in ("trap", "brkpt"):
        error = fault_of(f"setp.eq.u32 %p1, %r0, 7; @%p1 {stop};")
        assert error.kind == faults.TRAP
        assert "thread 7 of block 0" in str(error)


def test_advice_changes_nothing() -> None:
    body = f"""
        {OWN} prefetch.global.L2 [%d0]; prefetchu.L1 [%d0]; nanosleep.u32 100; pmevent 1;
        griddepcontrol.wait; setmaxnreg.inc.sync.aligned.u32 200; membar.gl;
        ldu.global.u32 %r1, [%d10];
    """
    np.testing.assert_array_equal(outcome(body), np.zeros(32))


def test_every_opcode_is_tested() -> None:
    from workbench.simulator import bits, conversions  # noqa: F401
    from workbench.simulator.decode import BUILDERS

    known = {*BUILDERS, *ops._FINDERS}
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("*simulator*.py"))
    assert len(known) > 70
    assert [op for op in sorted(known) if not re.search(rf"\b{op}\b", text)] == []


# ------------------------------------------------------------------------------- of warps


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(mode: str, width: int) -> None:
    """What CUDA C++ calls width is a segment mask and a clamp in PTX."""
    clamp = (32 - width) << 8 | (0 if mode == "up" else width - 1)
    body = f"""
        add.u32 %r2, %r0, 500;
        shfl.sync.{mode}.b32 %r1|%p1, %r2, 3, {clamp}, 0xffffffff;
        @%p1 add.u32 %r1, %r1, 1000;
    """
    want = []
    for lane in range(64):
        place, first = lane % width, lane - lane % width
        source = {"up": place - 3, "down": place + 3, "bfly": place ^ 3, "idx": 3}[mode]
        inside = 0 <= source < width
        want.append((first + source + 1500) if inside else lane + 500)
    np.testing.assert_array_equal(outcome(body, 64), want)


def test_votes() -> None:
    lane = np.arange(64)
    votes = {
        "ballot.b32 %r1": sum(1 << i for i in range(0, 32, 3)),
        "any.pred %p2": 1, "all.pred %p2": 0, "uni.pred %p2": 0,
    }  # fmt: skip
    for vote, want in votes.items():
        body = f"""
            and.b32 %r2, %r0, 31; rem.u32 %r2, %r2, 3; setp.eq.u32 %p1, %r2, 0;
            vote.sync.{vote}, %p1, 0xffffffff;
            {"" if "%r1" in vote else "selp.u32 %r1, 1, 0, %p2;"}
        """
        np.testing.assert_array_equal(outcome(body, 64), np.full(lane.size, want), vote)


def test_matches_and_reductions() -> None:
    lane = np.arange(32)
    body = "rem.u32 %r2, %r0, 5; match.any.sync.b32 %r1, %r2, 0xffffffff;"
    want = [sum(1 << j for j in lane if j % 5 == i % 5) for i in lane]
    np.testing.assert_array_equal(outcome(body), want)
    body = "mov.u32 %r2, 4; match.all.sync.b32 %r1|%p1, %r2, 0xffffffff;"
    np.testing.assert_array_equal(outcome(body), np.full(32, 0xFFFFFFFF))
    reductions = {
        "add.u32": 496,
        "max.u32": 31,
        "min.u32": 0,
        "or.b32": 31,
        "and.b32": 0,
        "xor.b32": 0,
    }
    for op, value in reductions.items():
        body = f"redux.sync.{op} %r1, %r0, 0xffffffff;"
        np.testing.assert_array_equal(outcome(body), np.full(32, value), op)
    body = "elect.sync %r2|%p1, 0xffffffff; selp.u32 %r1, 1, 0, %p1;"
    np.testing.assert_array_equal(outcome(body), lane == 0)
    body = "setp.lt.u32 %p1, %r0, 5; mov.u32 %r1, 0; @%p1 activemask.b32 %r1;"
    np.testing.assert_array_equal(outcome(body), np.where(lane < 5, 31, 0))


def test_special_registers() -> None:
    names = {
        "%laneid": np.arange(64) % 32, "%warpid": np.arange(64) // 32, "%ntid.x": 64,
        "%nctaid.x": 1, "%ctaid.x": 0, "%lanemask_lt": (1 << (np.arange(64) % 32)) - 1,
    }  # fmt: skip
    for name, want in names.items():
        got = outcome(f"mov.u32 %r1, {name};", 64)
        np.testing.assert_array_equal(got, np.broadcast_to(want, 64), name)


# ------------------------------------------------------------------------------- global memory


def test_what_is_too_large_to_be_checked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    out = np.zeros(64, np.uint32)
    body = "st.global.u32 [%d0], 1; ret;"
    monkeypatch.setattr(checks, "MAX_SHADOW", 32)
    with pytest.warns(checks.UncheckedWarning, match=r"races in out \(64,\) are not looked for"):
        run_body(body, {"out": out}, block=1, grid=2)
    monkeypatch.setattr(order, "MAX_KNOWN", 10)
    arrays = {"out": np.zeros(1, np.uint32), "turn": np.zeros(1, np.uint32)}
    with pytest.warns(checks.UncheckedWarning, match="races between the 7 blocks of k"):
        run_body(SPIN, arrays, outputs=("out", "turn"), grid=7)


def test_atomics_one_after_the_other() -> None:
    for op, start, want in (("add", 5, 5 + 496), ("max", 7, 31), ("min", 7, 0), ("or", 0, 31)):
        counter = np.full(1, start, np.uint32)
        kind = "b32" if op == "or" else "u32"
        run_body(f"red.global.{op}.{kind} [%d0], %r0; ret;", {"out": counter})
        assert counter[0] == want, op
    tickets, counter = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
    body = "atom.global.add.u32 %r1, [%d1], 1; mad.wide.u32 %d10, %r0, 4, %d0; "
    arrays = {"out": tickets, "counter": counter}
    run_body(body + "st.global.u32 [%d10], %r1; ret;", arrays, outputs=("out", "counter"), grid=2)
    assert sorted(tickets) == list(range(64))
    body = "atom.global.cas.b32 %r1, [%d0], 3, 9; atom.global.exch.b32 %r2, [%d0], 4; ret;"
    one = np.full(1, 3, np.uint32)
    run_body(body, {"out": one}, block=1)
    assert one[0] == 4
    floats = np.zeros(1, np.float32)
    run_body("mov.f32 %f1, 0f3F000000; red.global.add.f32 [%d0], %f1; ret;", {"out": floats})
    assert floats[0] == 16


def test_vectors_and_pairs_are_added_number_by_number() -> None:
    lane = np.arange(32)
    out = np.zeros(4, np.float32)
    add = "cvt.rn.f32.u32 %f1, %r0; mov.f32 %f2, 0f3F800000;"
    run_body(f"{add} red.global.add.v4.f32 [%d0], {{%f1, %f2, %f1, %f2}}; ret;", {"out": out})
    np.testing.assert_array_equal(out, [496, 32, 496, 32])
    out, old = np.zeros(2, np.float32), np.zeros((32, 2), np.float32)
    body = f"""{add} atom.global.add.v2.f32 {{%f3, %f4}}, [%d0], {{%f1, %f2}};
        mad.wide.u32 %d10, %r0, 8, %d1; st.global.v2.f32 [%d10], {{%f3, %f4}}; ret;"""
    run_body(body, {"out": out, "old": old}, outputs=("out", "old"))
    np.testing.assert_array_equal(old, np.stack([np.cumsum(lane) - lane, lane], axis=-1))
    for kind, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        halves = np.zeros(4, dtype)
        convert = f"cvt.rn.{kind}x2.f32 %r5, %f2, %f1;"
        one = f"red.global.add.noftz.{kind}x2 [%d0], %r5;"
        two = f"red.global.add.noftz.v2.{kind}x2 [%d0], {{%r5, %r5}};"
        run_body(f"{add} {convert} {one} {two} ret;", {"out": halves}, block=8)
        np.testing.assert_array_equal(halves.astype(np.float32), [56, 16, 28, 8])
    body = f"{add} red.global.add.v4.f32 [%d0+8], {{%f1, %f2, %f1, %f2}}; ret;"
    with pytest.raises(SimulationError) as caught:
        run_body(body, {"out": np.zeros(8, np.float32)})
    assert caught.value.kind == faults.MISALIGNED


def test_additions_to_global_memory_flush_subnormal_numbers() -> None:
    tiny, out = np.full(1, 2.0**-130, np.float32), np.zeros(2, np.float32)
    body = f"""
        {SHARED}
        ld.global.f32 %f1, [%d1]; st.shared.f32 [tile], %f1; bar.warp.sync 0xffffffff;
        atom.shared.add.f32 %f2, [tile], %f1; ld.volatile.shared.f32 %f3, [tile];
        st.global.f32 [%d0+4], %f3; red.global.add.f32 [%d0], %f1; ret;
    """
    run_body(body, {"out": out, "tiny": tiny}, block=1)
    np.testing.assert_array_equal(out, [0, 2.0**-129])


def test_grids_and_blocks_of_several_axes() -> None:
    """What a thread and its block are numbered by, and how large the axes are."""
    body = """
        mov.u32 %r2, %tid.x; mov.u32 %r3, %tid.y; mov.u32 %r4, %tid.z;
        mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %ctaid.z;
        mov.u32 %r8, %ntid.x; mov.u32 %r9, %ntid.y; mov.u32 %r10, %nctaid.x;
        mov.u32 %r11, %nctaid.y; mov.u32 %r12, %ntid.z;
        mad.lo.u32 %r13, %r4, %r9, %r3; mad.lo.u32 %r13, %r13, %r8, %r2;
        mad.lo.u32 %r14, %r7, %r11, %r6; mad.lo.u32 %r14, %r14, %r10, %r5;
        mul.lo.u32 %r15, %r8, %r9; mul.lo.u32 %r15, %r15, %r12;
        mad.lo.u32 %r16, %r14, %r15, %r13; mad.wide.u32 %d10, %r16, 4, %d0;
        mad.lo.u32 %r17, %r4, 10, %r3; mad.lo.u32 %r17, %r17, 10, %r2;
        mad.lo.u32 %r18, %r7, 10, %r6; mad.lo.u32 %r18, %r18, 10, %r5;
        mad.lo.u32 %r17, %r18, 1000, %r17; st.global.u32 [%d10], %r17; ret;
    """
    grid, block = (3, 2, 2), (8, 3, 2)
    out = np.zeros(12 * 48, np.uint32)
    run_text(kernel(body, ("out",)), {"out": out}, grid=grid, block=block)
    index = np.indices((2, 2, 3, 2, 3, 8)).reshape(6, -1)
    digits = index * np.array([100000, 10000, 1000, 100, 10, 1])[:, None]
    np.testing.assert_array_equal(out, digits.sum(0))


SPIN = """
    setp.ne.u32 %p1, %r122, 0;
    @%p1 ret;
    mov.u32 %r5, %nctaid.x; sub.u32 %r5, %r5, 1; sub.u32 %r5, %r5, %r120;
POLL:
    ld.acquire.gpu.global.u32 %r1, [%d1];
    setp.ne.u32 %p2, %r1, %r5;
    @%p2 bra POLL;
    ld.global.u32 %r2, [%d0]; mad.lo.u32 %r2, %r2, 3, %r120; st.global.u32 [%d0], %r2;
    add.u32 %r1, %r1, 1;
    st.release.gpu.global.u32 [%d1], %r1;
    ret;
"""


@pytest.mark.parametrize("lanes_per_chunk", [32, 64, 8192])
def test_blocks_wait_for_later_blocks(lanes_per_chunk: int) -> None:
    """The last block goes first, though it is in the last chunk."""
    total, turn = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    arrays = {"out": total, "turn": turn}
    options = {"outputs": ("out", "turn"), "grid": 7, "lanes_per_chunk": lanes_per_chunk}
    run_body(SPIN, arrays, **options)
    want = 0
    for block in reversed(range(7)):
        want = want * 3 + block
    assert (total[0], turn[0]) == (want, 7)


def test_unordered_blocks_race() -> None:
    relaxed = SPIN.replace("acquire", "relaxed").replace("release", "relaxed")
    arrays = {"out": np.zeros(1, np.uint32), "turn": np.zeros(1, np.uint32)}
    with pytest.raises(SimulationError, match="nothing that orders the blocks") as caught:
        run_body(relaxed, arrays, outputs=("out", "turn"), grid=3)
    assert caught.value.kind == faults.RACE
    fenced = relaxed.replace("ld.global.u32 %r2", "fence.acq_rel.gpu; ld.global.u32 %r2")
    fenced = fenced.replace("st.relaxed", "fence.acq_rel.gpu; st.relaxed")
    run_body(fenced, arrays, outputs=("out", "turn"), grid=3)


def test_polling_for_ever_is_a_deadlock() -> None:
    body = SPIN.replace("sub.u32 %r5, %r5, %r120", "add.u32 %r5, %r5, 100")
    arrays = {"out": np.zeros(1, np.uint32), "turn": np.zeros(1, np.uint32)}
    with pytest.raises(SimulationError, match="poll memory") as caught:
        run_body(body, arrays, outputs=("out", "turn"), grid=3)
    assert caught.value.kind == faults.DEADLOCK


def test_an_endless_loop_meets_the_step_limit() -> None:
    with pytest.raises(SimulationError, match="1000 instructions") as caught:
        run_body("AGAIN: add.u32 %r1, %r1, 1; bra AGAIN;", {"out": np.zeros(1)}, max_steps=1000)
    assert caught.value.kind == faults.STEP_LIMIT


def test_blocks_that_write_the_same_place_race() -> None:
    with pytest.raises(SimulationError, match=r"out\[0\]") as caught:
        run_body("st.global.u32 [%d0], 1; ret;", {"out": np.zeros(1, np.uint32)}, block=1, grid=2)
    assert caught.value.kind == faults.RACE


ACCESSES = {
    "past the end": ("[%d10+4]", faults.OUT_OF_RANGE, "4 bytes past the end of out"),
    "before the start": ("[%d10+-4]", faults.OUT_OF_RANGE, "4 bytes before the start of out"),
    "misaligned": ("[%d10+2]", faults.MISALIGNED, "reads 4 bytes"),
    "null": ("[4]", faults.OUT_OF_RANGE, "null pointer"),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_bad_addresses(name: str) -> None:
    address, kind, words = ACCESSES[name]
    body = OWN + f"ld.global.u32 %r1, {address}; ret;"
    with pytest.raises(SimulationError, match=words) as caught:
        run_body(body, {"out": np.zeros(32, np.uint32)}, checks=False)
    assert caught.value.kind == kind


def test_between_the_elements_of_a_view() -> None:
    """Only what belongs to the array exists, not what lies between its rows."""
    whole = np.zeros((4, 8), np.float32)
    view = whole[:, 2:5]
    run_body("ld.global.f32 %f1, [%d0+8]; ret;", {"out": view}, block=1)
    with pytest.raises(SimulationError, match="between the elements of out"):
        run_body("ld.global.f32 %f1, [%d0+12]; ret;", {"out": view}, block=1)
    backwards = whole[::-1]
    run_body("st.global.u32 [%d0+-32], 7; ret;", {"out": backwards}, block=1)
    assert whole.view(np.uint32)[2, 0] == 7
    assert np.count_nonzero(whole) == 1


def test_reads_of_what_nobody_wrote() -> None:
    options = {"outputs": ("out",), "unwritten": ("out",)}
    body = OWN + "ld.global.u32 %r1, [%d10]; ret;"
    with pytest.raises(SimulationError, match=r"out\[0\]") as caught:
        run_body(body, {"out": np.zeros(32, np.uint32)}, **options)
    assert caught.value.kind == faults.UNWRITTEN
    run_body(OWN + "st.global.u32 [%d10], 1; ld.global.u32 %r1, [%d10]; ret;",
             {"out": np.zeros(32, np.uint32)}, **options)  # fmt: skip
    error = fault_of(f"{SHARED} ld.shared.u32 %r1, [tile+8];")
    assert error.kind == faults.UNWRITTEN


# ------------------------------------------------------------------------------ shared memory


def test_the_end_of_shared_memory() -> None:
    error = fault_of(f"{SHARED} st.shared.u32 [tile+1024], %r0;")
    assert error.kind == faults.OUT_OF_RANGE
    assert "of which its block has 1024" in str(error)
    assert fault_of(f"{SHARED} st.shared.v4.u32 [tile+8], {{%r0,%r0,%r0,%r0}};").kind == (
        faults.MISALIGNED
    )


def test_dynamic_shared_memory_follows_the_static() -> None:
    module = ".extern .shared .align 16 .b8 dynamic[];"
    body = """
        .shared .align 4 .b8 small[20];
        shl.b32 %r2, %r0, 2; mov.u32 %r3, dynamic; add.u32 %r2, %r2, %r3;
        st.shared.u32 [%r2], %r0; ld.shared.u32 %r1, [%r2]; add.u32 %r1, %r1, %r3;
    """
    np.testing.assert_array_equal(outcome(body, module=module, shared=128), np.arange(32) + 32)
    assert fault_of(body, module=module, shared=124).kind == faults.OUT_OF_RANGE


def test_vectors_and_narrow_types() -> None:
    body = f"""
        {SHARED}
        shl.b32 %r2, %r0, 3; not.b32 %r3, %r0;
        st.shared.v2.u32 [%r2], {{%r0, %r3}};
        ld.shared.s8 %r4, [%r2+4]; ld.shared.u16 %r5, [%r2+4];
        add.u32 %r1, %r4, %r5;
    """
    lane = np.arange(32)
    want = (~lane).astype(np.int8).astype(np.int64) + (~lane & 0xFFFF)
    np.testing.assert_array_equal(outcome(body), want)


COPY = f"""
    {SHARED}
    shl.b32 %r2, %r0, 4; cvt.u64.u32 %d3, %r2; add.u64 %d3, %d3, %d0;
    cp.async.cg.shared.global [%r2], [%d3], 16, %r20;
    cp.async.commit_group;
    WAIT
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2];
    mad.wide.u32 %d5, %r0, 16, %d1;
    st.global.v4.u32 [%d5], {{%r4, %r5, %r6, %r7}}; ret;
"""


def copied(wait: str, lengths: str = "mov.u32 %r20, 16;") -> np.ndarray:
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    run_body(lengths + COPY.replace("WAIT", wait), {"source": source, "out": out})
    return out


def test_copies_arrive_when_they_are_waited_for() -> None:
    np.testing.assert_array_equal(copied("cp.async.wait_group 0;"), np.arange(128))
    np.testing.assert_array_equal(copied("cp.async.wait_all;"), np.arange(128))
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(SimulationError) as caught:
            copied(wait)
        assert caught.value.kind == faults.IN_FLIGHT


def test_copies_that_are_cut_short_end_in_zeros() -> None:
    lengths = "and.b32 %r20, %r0, 1; mul.lo.u32 %r20, %r20, 8;"
    want = np.arange(128).reshape(32, 4)
    want[::2] = 0
    want[:, 2:] = 0
    np.testing.assert_array_equal(copied("cp.async.wait_all;", lengths), want.reshape(-1))


def test_a_copy_that_is_cut_short_at_the_end_of_an_array() -> None:
    """It reads no more than it says."""
    source, out = np.arange(126, dtype=np.uint32), np.ones(128, np.uint32)
    lengths = "setp.eq.u32 %p1, %r0, 31; selp.u32 %r20, 8, 16, %p1;"
    body = lengths + COPY.replace("WAIT", "cp.async.wait_all;")
    run_body(body, {"source": source, "out": out})
    np.testing.assert_array_equal(out, [*range(126), 0, 0])
    with pytest.raises(SimulationError, match="past the end of source"):
        run_body(body.replace("8, 16", "9, 16"), {"source": source, "out": out})


def test_a_copy_into_what_others_still_read_is_a_race() -> None:
    body = f"""
        {SHARED}
        xor.b32 %r2, %r0, 1; shl.b32 %r2, %r2, 4; shl.b32 %r3, %r0, 4;
        st.shared.v4.u32 [%r3], {{%r0, %r0, %r0, %r0}};
        bar.sync 0;
        ld.shared.u32 %r1, [%r2];
        cvt.u64.u32 %d3, %r3; add.u64 %d3, %d3, %d0;
        cp.async.cg.shared.global [%r3], [%d3], 16;
        cp.async.wait_all;
        ret;
    """
    with pytest.raises(SimulationError) as caught:
        run_body(body, {"source": np.zeros(128, np.uint32)}, outputs=())
    assert caught.value.kind == faults.RACE


# -------------------------------------------------------------------------------------- counts

# Stride in bytes of neighbouring threads: sectors a request, wavefronts a request.
SECTORS = {4: 4, 8: 8, 32: 32, 64: 32, 0: 1}
WAVEFRONTS = {4: 1, 8: 2, 16: 4, 128: 32, 132: 1}


@pytest.mark.parametrize("stride", SECTORS)
def test_sectors(stride: int) -> None:
    body = f"mad.wide.u32 %d10, %r0, {stride}, %d0; ld.global.u32 %r1, [%d10]; ret;"
    launch = run_body(body, {"out": np.zeros(1024, np.uint32)})
    loads = lines.by_array(launch)["out"][0]
    assert (loads.requests, loads.threads, loads.bytes) == (1, 32, 128)
    assert loads.transactions == SECTORS[stride]
    assert loads.least == (4 if stride else 1)


@pytest.mark.parametrize("stride", WAVEFRONTS)
def test_bank_conflicts(stride: int) -> None:
    body = f"""
        .shared .align 16 .b8 large[8192];
        mul.lo.u32 %r2, %r0, {stride};
        st.shared.u32 [%r2], %r0; ld.shared.u32 %r1, [%r2]; ret;
    """
    launch = run_body(body, {"out": np.zeros(1)})
    shared = lines.total([launch]).shared
    assert shared.requests == 2
    assert shared.transactions == 2 * WAVEFRONTS[stride]
    assert shared.excess == 2 * (WAVEFRONTS[stride] - 1)


# Lane -> which 16 bytes it reads: wavefronts of the request.
WIDE = {
    "side by side": (lambda lane: lane, 4),
    "all the same": (lambda lane: 0 * lane, 2),
    "pairs": (lambda lane: lane // 2, 2),
    "halves of fours": (lambda lane: lane // 4 * 2 + lane % 2, 2),
    "same banks": (lambda lane: lane * 8, 32),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_accesses_go_by_quarters_of_a_warp(name: str) -> None:
    place, wavefronts = WIDE[name]
    table = (place(np.arange(32)) * 16).astype(np.uint32)
    fill = "shl.b32 %r3, %r0, 7;" + "".join(
        f"st.shared.v4.u32 [%r3+{16 * i}], {{%r0,%r0,%r0,%r0}};" for i in range(8)
    )
    body = f"""
        .shared .align 16 .b8 large[4096];
        {fill} bar.sync 0;
        mad.wide.u32 %d10, %r0, 4, %d0; ld.global.u32 %r2, [%d10];
        ld.shared.v4.u32 {{%r4,%r5,%r6,%r7}}, [%r2]; ret;
    """
    launch = run_body(body, {"out": table}, outputs=())
    program = launch.code.program.instructions
    pc = next(i for i, x in enumerate(program) if x.opcode == "ld.shared.v4.u32")
    assert launch.counts.shared[pc][3] == wavefronts


def test_instructions_are_counted_for_warps_and_threads() -> None:
    body = """
        setp.lt.u32 %p1, %r122, 40;
        @!%p1 bra END;
        add.u32 %r1, %r0, 1;
    END: ret;
    """
    launch = run_body(body, {"out": np.zeros(1)}, block=96, grid=2)
    program = launch.code.program.instructions
    pc = next(i for i, x in enumerate(program) if x.opcode == "add.u32")
    assert launch.counts.warps[pc] == 4
    assert launch.counts.threads[pc] == 80
    assert launch.counts.warps[pc + 1] == 6
    assert launch.counts.threads[pc + 1] == 192


# -------------------------------------------------------------------------------------- parser


def test_source_lines_with_what_they_were_inlined_into() -> None:
    text = (
        kernel(
            """
        .loc 1 10 3
        mov.u32 %r1, 1;
        .loc 2 5 1, function_name $L__info0, inlined_at 1 11 3
        mov.u32 %r2, 1;
        .loc 3 7 1, function_name $L__info1, inlined_at 2 5 1
        mov.u32 %r3, 1;
        .loc 1 12 3
        frobnicate.u32 %r4, 1;
        ret;
        """
        )
        + '.file 1 "/a/main.cu"\n.file 2 "/a/common.cuh"\n.file 3 "/a/deep.cuh"\n'
    )
    program = parse(text, "k")
    outer = Location("/a/common.cuh", 5, Location("/a/main.cu", 11))
    assert [i.where for i in program.instructions[:3]] == [
        Location("/a/main.cu", 10), outer, Location("/a/deep.cuh", 7, outer),
    ]  # fmt: skip
    assert str(program.instructions[2].where) == (
        "deep.cuh:7 (inlined at common.cuh:5 (inlined at main.cu:11))"
    )
    assert lines.line_in(program.instructions[2].where, "main.cu") == 11
    with pytest.raises(UnknownInstructionError, match=r"frobnicate\.u32 at main\.cu:12"):
        run_text(text, {})


def test_registers_of_inner_scopes() -> None:
    body = """
        mov.u32 %r1, 1;
        { .reg .b32 %r1; mov.u32 %r1, 5; add.u32 %r2, %r1, 0; }
        { .reg .b32 low; mov.u32 low, 7; add.u32 %r2, %r2, low; }
        add.u32 %r1, %r1, %r2;
    """
    np.testing.assert_array_equal(outcome(body), np.full(32, 13))


def test_what_is_no_ptx() -> None:
    with pytest.raises(PTXError, match="no kernel other"):
        parse(kernel("ret;"), "other")
    with pytest.raises(PTXError):
        parse(kernel("mov.u32 %r1, [%r2 * 3]; ret;"), "k")
