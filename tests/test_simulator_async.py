"""mbarriers, bulk copies, wgmma and clusters, an instruction at a time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import kernel, run_text, run_with

from workbench.simulator import faults
from workbench.simulator import tensormap as maps
from workbench.simulator.faults import SimulationError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# %r0 is the thread's number in its block; its own word of the output gets %r1 in the end.
START = "mov.u32 %r0, %tid.x; mov.u32 %r1, 0;\n"
STORE = "\nmad.wide.u32 %d10, %r0, 4, %d0; st.global.u32 [%d10], %r1; ret;"
MEMORY = ".shared .align 1024 .b8 tile[16384]; .shared .align 8 .b64 bar[4];\n"
# The first thread makes an mbarrier for `count` arrivals.
MAKE = """
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [bar], {count};
    @%p1 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
WAIT = """
    WAIT{0}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], {1};
    @!%p2 bra WAIT{0};
"""


def words(body: str, threads: int = 32, **options: Any) -> np.ndarray:
    """What a kernel leaves in %r1, of each thread of all blocks."""
    grid = options.pop("grid", 1)
    out = np.zeros(threads * grid, np.uint32)
    place = "mov.u32 %r99, %ctaid.x; mad.lo.u32 %r98, %r99, %ntid.x, %r0;" if grid > 1 else ""
    end = STORE.replace("%r0", "%r98") if grid > 1 else STORE
    if grid > 1:
        place = "mov.u32 %r99, %ctaid.x; mov.u32 %r97, %ntid.x; mad.lo.u32 %r98, %r99, %r97, %r0;\n"
    run_text(kernel(MEMORY + START + place + body + end, ("out",)), {"out": out}, block=threads,
             grid=grid, **options)  # fmt: skip
    return out


def fault_of(body: str, threads: int = 32, **options: Any) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        words(body, threads, **options)
    return caught.value


# ---------------------------------------------------------------------------------- mbarriers

# The upper half of 64 threads writes, arrives and goes on; the lower half reads after the phase.
HANDOVER = (
    (
        MAKE.format(count=32)
        + """
    shl.b32 %r2, %r0, 2;
    setp.ge.u32 %p3, %r0, 32;
    @%p3 bra WRITE;
    LOOK
    xor.b32 %r3, %r2, 128; ld.shared.u32 %r1, [tile+%r3];
    bra END;
WRITE:
    add.u32 %r4, %r2, 0; st.shared.u32 [tile+%r2], %r0;
    ARRIVE
END:
"""
    )
    .replace("tile+%r3", "%r3")
    .replace("tile+%r2", "%r2")
)
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [bar];"


def test_a_phase_hands_over_what_was_written_before_the_arrivals() -> None:
    body = HANDOVER.replace("LOOK", WAIT.format(0, 0)).replace("ARRIVE", ARRIVE)
    np.testing.assert_array_equal(words(body, 64), [*range(32, 64), *[0] * 32])


@pytest.mark.parametrize(
    ("look", "arrive"),
    [
        ("", ARRIVE),
        (WAIT.format(0, 1), ARRIVE),  # the phase before this one has ended already
        (WAIT.format(0, 0), ARRIVE.replace("arrive", "arrive.relaxed.cta")),
        (WAIT.format(0, 0).replace("try_wait", "try_wait.relaxed.cta"), ARRIVE),
    ],
)
def test_what_hands_nothing_over_is_a_race(look: str, arrive: str) -> None:
    error = fault_of(HANDOVER.replace("LOOK", look).replace("ARRIVE", arrive), 64)
    assert error.kind in (faults.RACE, faults.UNWRITTEN)


def test_an_arrival_after_which_a_thread_writes_on() -> None:
    """What it writes after its arrival, nobody has been told of."""
    late = ARRIVE + "st.shared.u32 [%r2], %r0;"
    error = fault_of(HANDOVER.replace("LOOK", WAIT.format(0, 0)).replace("ARRIVE", late), 64)
    assert error.kind == faults.RACE


def test_a_lane_arrives_for_its_warp() -> None:
    """After a barrier of the warp it speaks for all, without one for itself alone."""
    one = "setp.eq.u32 %p4, %r0, 32; @%p4 " + ARRIVE
    body = HANDOVER.replace("32;\n    @%p1 fence", "1;\n    @%p1 fence")
    body = body.replace("LOOK", WAIT.format(0, 0))
    together = body.replace("ARRIVE", "bar.warp.sync 0xffffffff;" + one)
    np.testing.assert_array_equal(words(together, 64)[:32], range(32, 64))
    assert fault_of(body.replace("ARRIVE", one), 64).kind == faults.RACE


def test_flags_order_the_threads_of_a_block_too() -> None:
    """With mbarriers about, every thread's knowledge is kept, and passed on by flags."""
    body = (
        """
        setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [tile], 0;
    """
        + MAKE.format(count=32)
        + """
        setp.ge.u32 %p3, %r0, 32; setp.eq.u32 %p4, %r0, 32;
        @%p3 bra WRITE;
    POLL:
        ld.acquire.cta.shared.u32 %r5, [tile]; setp.ne.u32 %p5, %r5, 7; @%p5 bra POLL;
        ld.shared.u32 %r1, [tile+64];
        bra END;
    WRITE:
        @%p4 st.shared.u32 [tile+64], 99;
        @%p4 st.ORDER.cta.shared.u32 [tile], 7;
    END:
    """
    )
    released = body.replace("ORDER", "release")
    np.testing.assert_array_equal(words(released, 64), [99] * 32 + [0] * 32)
    assert fault_of(body.replace("ORDER", "relaxed"), 64).kind == faults.RACE


def test_states_counts_and_phases() -> None:
    body = (
        MAKE.format(count=4)
        + """
        @!%p1 bra END;
        mbarrier.arrive.shared::cta.b64 %d20, [bar];
        mbarrier.arrive.noComplete.shared::cta.b64 %d21, [bar], 2;
        mbarrier.pending_count.b64 %r10, %d20; mbarrier.pending_count.b64 %r11, %d21;
        mbarrier.test_wait.shared::cta.b64 %p3, [bar], %d20; selp.u32 %r12, 1, 0, %p3;
        mbarrier.arrive_drop.shared::cta.b64 _, [bar];
        mbarrier.test_wait.shared::cta.b64 %p3, [bar], %d20; selp.u32 %r13, 1, 0, %p3;
        mbarrier.test_wait.parity.shared::cta.b64 %p3, [bar], 0; selp.u32 %r14, 1, 0, %p3;
        mbarrier.test_wait.parity.shared::cta.b64 %p3, [bar], 1; selp.u32 %r15, 1, 0, %p3;
        mbarrier.arrive.shared::cta.b64 %d22, [bar]; mbarrier.pending_count.b64 %r16, %d22;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 48;
        mbarrier.arrive.shared::cta.b64 _, [bar], 2;
        mbarrier.test_wait.shared::cta.b64 %p3, [bar], %d22; selp.u32 %r17, 1, 0, %p3;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 48;
        mbarrier.test_wait.shared::cta.b64 %p3, [bar], %d22; selp.u32 %r18, 1, 0, %p3;
        mbarrier.inval.shared::cta.b64 [bar];
        mov.u32 %r1, 0;
    """
        + "".join(f"mad.lo.u32 %r1, %r1, 8, %r{r};\n" for r in range(10, 19))
        + "END:"
    )
    # Pending before each arrival; three are expected after one has dropped out.
    want = [4, 3, 0, 1, 1, 0, 3, 0, 1]
    assert words(body)[0] == int("".join(map(str, want)), 8)


def test_arrivals_that_end_several_phases_at_once() -> None:
    """Each of eight lanes brings as many as its number modulo 2 and 1 more: twelve in threes."""
    body = (
        MAKE.format(count=3)
        + """
        setp.lt.u32 %p3, %r0, 8; and.b32 %r2, %r0, 1; add.u32 %r2, %r2, 1;
        @%p3 mbarrier.arrive.shared::cta.b64 %d20, [bar], %r2;
        @%p3 mbarrier.pending_count.b64 %r1, %d20;
    """
    )
    np.testing.assert_array_equal(words(body), [3, 2] * 4 + [0] * 24)


MISUSES = {
    "never made": "mbarrier.arrive.shared::cta.b64 _, [bar+8];",
    "made twice": "mbarrier.init.shared::cta.b64 [bar], 1;",
    "no arrivals expected": "mbarrier.init.shared::cta.b64 [bar+8], 0;",
    "too many at once": "mbarrier.arrive.shared::cta.b64 _, [bar], 3;",
    "ends a phase": "mbarrier.arrive.noComplete.shared::cta.b64 %d20, [bar], 2;",
    "too many bytes": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048576;",
    "not there any more": "mbarrier.inval.shared::cta.b64 [bar];" + ARRIVE,
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_of_an_mbarrier(name: str) -> None:
    body = MAKE.format(count=2) + "@!%p1 bra END;" + MISUSES[name] + "END:"
    assert fault_of(body).kind == faults.MBARRIER


def test_a_phase_that_never_ends_is_a_deadlock() -> None:
    error = fault_of(MAKE.format(count=2) + "@%p1 " + ARRIVE + WAIT.format(0, 0))
    assert error.kind == faults.DEADLOCK
    assert "expects 1 more of 2 arrivals and 0 bytes" in str(error)


def test_a_wait_that_may_end_in_vain() -> None:
    """Who does something else after a while is no deadlock."""
    body = (
        MAKE.format(count=1)
        + """
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;
        @%p2 bra END;
        add.u32 %r1, %r1, 1;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [bar];
    """
        + WAIT.format(1, 0)
        + "END:"
    )
    np.testing.assert_array_equal(words(body), np.ones(32))


def test_polling_with_test_wait() -> None:
    look = WAIT.format(0, 0).replace("try_wait", "test_wait")
    body = HANDOVER.replace("LOOK", look).replace("ARRIVE", ARRIVE)
    np.testing.assert_array_equal(words(body, 64)[:32], range(32, 64))


# ---------------------------------------------------------------------------- bulk copies

COPY = (
    MAKE.format(count=1)
    + """
    @!%p1 bra READ;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%d1], 128, [bar];
READ:
    WAIT
    shl.b32 %r2, %r0, 2; ld.shared.u32 %r1, [%r2];
"""
)


def copied(wait: str, copy: str = COPY, **options: Any) -> np.ndarray:
    source, out = np.arange(100, 132, dtype=np.uint32), np.zeros(32, np.uint32)
    text = kernel(MEMORY + START + copy.replace("WAIT", wait) + STORE, ("out", "source"))
    run_text(text, {"out": out, "source": source}, **options)
    return out


def test_a_bulk_copy_arrives_when_it_is_waited_for() -> None:
    np.testing.assert_array_equal(copied(WAIT.format(0, 0)), np.arange(100, 132))
    with pytest.raises(SimulationError) as caught:
        copied("")
    assert caught.value.kind == faults.IN_FLIGHT
    np.testing.assert_array_equal(copied("", checks=False), np.zeros(32))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("[%d1], 128", "[%d1], 120"), faults.BULK),
        (("[%d1], 128", "[%d1+4], 128"), faults.BULK),
        (("[tile], [%d1]", "[tile+8], [%d1]"), faults.BULK),
        (("[%d1], 128", "[%d1+16], 128"), faults.OUT_OF_RANGE),
        (("[tile], [%d1]", "[tile+16384], [%d1]"), faults.OUT_OF_RANGE),
        (("fence.mbarrier_init.release.cluster", "membar.cta"), faults.UNFENCED),
        (("[bar], 128", "[bar], 112"), faults.DEADLOCK),
    ],
)
def test_bulk_copies_that_go_wrong(change: tuple[str, str], kind: str) -> None:
    assert change[0] in COPY
    with pytest.raises(SimulationError) as caught:
        copied(WAIT.format(0, 0), COPY.replace(*change))
    assert caught.value.kind == kind


def test_prefetches_change_nothing() -> None:
    body = """
        cp.async.bulk.prefetch.L2.global [%d0], 64;
        createpolicy.fractional.L2::evict_last.b64 %d5, 1.0; applypriority.global.L2::evict_normal
        [%d0], 128; mov.u32 %r1, 3;
    """
    np.testing.assert_array_equal(words(body), np.full(32, 3))


def test_arrivals_of_plain_copies() -> None:
    """``cp.async.mbarrier.arrive`` comes when a thread's copies so far have landed."""
    for more, count in (("", 32), (".noinc", 64)):
        copy = (
            MAKE.format(count=count)
            + f"""
            shl.b32 %r2, %r0, 2; cvt.u64.u32 %d3, %r2; add.u64 %d3, %d3, %d1;
            cp.async.ca.shared.global [%r2], [%d3], 4;
            cp.async.mbarrier.arrive{more}.shared.b64 [bar];
            mbarrier.arrive.shared::cta.b64 _, [bar];
            WAIT
            xor.b32 %r2, %r2, 4; ld.shared.u32 %r1, [%r2];
        """
        )
        got = copied(WAIT.format(0, 0), copy)
        np.testing.assert_array_equal(got, np.arange(100, 132).reshape(-1, 2)[:, ::-1].reshape(-1))
        with pytest.raises(SimulationError) as caught:
            copied("", copy)
        assert caught.value.kind == faults.IN_FLIGHT


# What the threads write, one of them copies, or adds, to global memory.
LEAVE = """
    shl.b32 %r2, %r0, 2; cvt.rn.f32.u32 %f1, %r0; st.shared.f32 [%r2], %f1;
    FENCE bar.sync 0;
    setp.eq.u32 %p1, %r0, 0; @!%p1 bra END;
    cp.OP [%d0], [tile], 128;
    cp.async.bulk.commit_group;
    WAIT
    st.shared.f32 [tile], %f1;
END: ret;
"""
PUT = "async.bulk.global.shared::cta.bulk_group"
ADD = "reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
FENCE = "fence.proxy.async.shared::cta;"
READ = "cp.async.bulk.wait_group.read 0;"


def left(operation: str, wait: str, fence: str = FENCE, **options: Any) -> np.ndarray:
    out = np.ones(32, np.float32)
    body = LEAVE.replace("OP", operation).replace("WAIT", wait).replace("FENCE", fence)
    run_text(kernel(MEMORY + START + body, ("out",)), {"out": out}, **options)
    return out


def test_bulk_stores_and_additions() -> None:
    lane = np.arange(32)
    for wait in (READ, "cp.async.bulk.wait_group 0;"):
        np.testing.assert_array_equal(left(PUT, wait), lane)
        np.testing.assert_array_equal(left(ADD, wait), lane + 1)
    np.testing.assert_array_equal(left(ADD, READ, grid=3), 3 * lane + 1)
    with pytest.raises(SimulationError, match="race"):
        left(PUT, READ, grid=2)
    for wait in ("", "cp.async.bulk.wait_group.read 1;"):
        with pytest.raises(SimulationError) as caught:
            left(PUT, wait)
        assert caught.value.kind == faults.STILL_READ
    with pytest.raises(SimulationError) as caught:
        left(PUT, READ, fence="")
    assert caught.value.kind == faults.UNFENCED


def test_what_a_store_writes_is_not_there_before_it_is_waited_for() -> None:
    look = "ld.global.f32 %f2, [%d0+4]; cvt.rzi.u32.f32 %r1, %f2; st.global.u32 [%d0+120], %r1;"
    np.testing.assert_array_equal(
        left(PUT, "cp.async.bulk.wait_group 0;" + look).view(np.uint32)[30], 1
    )
    with pytest.raises(SimulationError) as caught:
        left(PUT, READ + look)
    assert caught.value.kind == faults.IN_FLIGHT


# ------------------------------------------------------------------------------ tensor maps

DTYPES = {
    "float16": (maps.FLOAT16, np.float16), "bfloat16": (maps.BFLOAT16, BFLOAT16),
    "float32": (maps.FLOAT32, np.float32), "float64": (maps.FLOAT64, np.float64),
    "uint8": (0, np.uint8), "int32": (3, np.int32),
}  # fmt: skip


def tensor_kernel(rank: int, corner: tuple[int, ...], size: int, way: str) -> str:
    """A box to shared memory and from there, byte by byte, to `out`; or the way back."""
    coordinates = ", ".join(map(str, corner))
    if way == "in":
        copy = f"""
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {size};
            cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
                [tile], [%d1, {{{coordinates}}}], [bar];
            {WAIT.format(0, 0)}
            mov.u32 %r2, 0;
        AGAIN:
            ld.shared.u32 %r3, [%r2]; cvt.u64.u32 %d3, %r2; add.u64 %d3, %d3, %d0;
            st.global.u32 [%d3], %r3; add.u32 %r2, %r2, 4; setp.lt.u32 %p3, %r2, {size};
            @%p3 bra AGAIN;
        """
    else:
        copy = f"""
            mov.u32 %r2, 0;
        AGAIN:
            cvt.u64.u32 %d3, %r2; add.u64 %d3, %d3, %d0; ld.global.u32 %r3, [%d3];
            st.shared.u32 [%r2], %r3; add.u32 %r2, %r2, 4; setp.lt.u32 %p3, %r2, {size};
            @%p3 bra AGAIN;
            fence.proxy.async;
            cp.{way.replace("RANK", f"{rank}d")} [%d1, {{{coordinates}}}], [tile];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
        """
    body = MEMORY + START + MAKE.format(count=1) + copy + "ret;"
    text = kernel("PLACE", ())
    loads = "ld.param.u64 %d0, [flat]; mov.b64 %d1, map; cvta.param.u64 %d1, %d1;"
    return text.replace(
        "k()", "k(.param .align 64 .b8 map[128], .param .u64 flat)"
    ).replace("PLACE", loads + body)  # fmt: skip


def swizzle(image: np.ndarray, span: int) -> np.ndarray:
    """Bytes of shared memory as a swizzle puts them: chunk i of row j (128 bytes) goes to i ^ j."""
    chunks = image.reshape(-1, 16)
    number = np.arange(chunks.shape[0])
    moved = np.empty_like(chunks)
    moved[number ^ (number // 8 % 8 & span // 16 - 1 if span else 0)] = chunks
    return moved.reshape(-1)


def boxed(array: np.ndarray, corner: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...],
          fill: Any) -> np.ndarray:  # fmt: skip
    """A box of an array, all axes outermost first, with what lies outside of it filled."""
    axes = [c + s * np.arange(n) for c, n, s in zip(corner, box, steps, strict=True)]
    inside = [(a >= 0) & (a < n) for a, n in zip(axes, array.shape, strict=True)]
    clipped = [np.clip(a, 0, n - 1) for a, n in zip(axes, array.shape, strict=True)]
    mask = np.ones(box, bool)
    for i, one in enumerate(inside):
        mask &= one.reshape([-1 if j == i else 1 for j in range(len(box))])
    return np.where(mask, array[np.ix_(*clipped)], array.dtype.type(fill))


# dtype, sizes, box, corner, steps (all outermost first), swizzle
BOXES = {
    "one axis": ("float32", (40,), (32,), (5,), (1,), 0),
    "past the end": ("float16", (40,), (32,), (24,), (1,), 0),
    "before the start": ("float32", (12, 40), (8, 16), (-3, -7), (1, 1), 0),
    "32 bytes": ("bfloat16", (20, 40), (16, 16), (10, 8), (1, 1), 1),
    "64 bytes": ("float32", (20, 48), (16, 16), (1, 40), (1, 1), 2),
    "128 bytes": ("float16", (70, 64), (32, 64), (50, 0), (1, 1), 3),
    "three axes": ("int32", (3, 5, 16), (2, 4, 8), (2, 2, 4), (1, 1, 1), 0),
    "four axes": ("bfloat16", (2, 3, 9, 64), (1, 1, 8, 64), (1, 2, 4, 0), (1, 1, 1, 1), 3),
    "five axes": ("float64", (2, 2, 3, 3, 4), (2, 1, 2, 2, 4), (0, 1, 2, -1, 2), (1,) * 5, 0),
    "every other row": ("float32", (20, 16), (8, 16), (2, 0), (2, 1), 0),
    "bytes": ("uint8", (4, 160), (4, 128), (0, 40), (1, 1), 3),
}  # fmt: skip


def encode(array: np.ndarray, number: int, address: int, box: tuple[int, ...],
           steps: tuple[int, ...], **options: int) -> bytes:  # fmt: skip
    return maps.encode_tiled(
        number, array.ndim, address, array.shape[::-1], array.strides[::-1][1:], box[::-1],
        steps[::-1], **options,
    )  # fmt: skip


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("name", BOXES)
def test_boxes_of_tensors(name: str, nan: bool) -> None:
    kind, sizes, box, corner, steps, mode = BOXES[name]
    number, dtype = DTYPES[kind]
    if nan and np.dtype(dtype).kind in "iu":
        with pytest.raises(ValueError, match="only floats have a NaN"):
            maps.encode_tiled(number, 1, 0, [16], [], [16], [1], oob_fill=maps.OOB_FILL_NAN)
        return
    array = np.random.default_rng(0).integers(1, 100, sizes).astype(dtype)
    want = boxed(array, corner, box, steps, np.nan if nan else 0)
    out = np.zeros(want.nbytes, np.uint8)

    def parameters(addresses: dict[str, int]) -> list[bytes | int]:
        tensor = encode(array, number, addresses["array"], box, steps, swizzle=mode, oob_fill=nan)
        return [tensor, addresses["out"].to_bytes(8, "little")]

    text = tensor_kernel(array.ndim, corner[::-1], want.nbytes, "in")
    run_with(text, "k", {"array": array, "out": out}, parameters, block=1)
    image = swizzle(np.frombuffer(want.tobytes(), np.uint8), {0: 0, 1: 32, 2: 64, 3: 128}[mode])
    got, right = (x.view(dtype) for x in (out, image))
    if dtype is BFLOAT16:  # whose NaN NumPy does not know
        got, right = got.astype(np.float32), right.astype(np.float32)
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("operation", ["store", "add", "max"])
@pytest.mark.parametrize("name", [name for name in BOXES if name != "before the start"])
def test_boxes_are_stored_where_the_tensor_is(name: str, operation: str) -> None:
    kind, sizes, box, corner, steps, mode = BOXES[name]
    number, dtype = DTYPES[kind]
    way = {
        "store": "async.bulk.tensor.RANK.global.shared::cta.tile.bulk_group",
        "add": "reduce.async.bulk.tensor.RANK.global.shared::cta.add.tile.bulk_group",
        "max": "reduce.async.bulk.tensor.RANK.global.shared::cta.max.tile.bulk_group",
    }[operation]
    rng = np.random.default_rng(0)
    array = rng.integers(1, 50, sizes).astype(dtype)
    flat = rng.integers(1, 50, box).astype(dtype)
    want = array.copy()
    axes = [c + s * np.arange(n) for c, n, s in zip(corner, box, steps, strict=True)]
    keep = [(a >= 0) & (a < n) for a, n in zip(axes, sizes, strict=True)]
    index = np.ix_(*[a[k] for a, k in zip(axes, keep, strict=True)])
    new = flat[np.ix_(*keep)]
    combine = {"add": np.add, "max": np.maximum}
    want[index] = combine[operation](want[index], new) if operation in combine else new
    image = swizzle(flat.view(np.uint8).reshape(-1), {0: 0, 1: 32, 2: 64, 3: 128}[mode])

    def parameters(addresses: dict[str, int]) -> list[bytes | int]:
        tensor = encode(array, number, addresses["array"], box, steps, swizzle=mode)
        return [tensor, addresses["image"].to_bytes(8, "little")]

    text = tensor_kernel(array.ndim, corner[::-1], flat.nbytes, way)
    arrays = {"array": array, "image": image}
    run_with(text, "k", arrays, parameters, outputs=("array",), block=1)
    np.testing.assert_array_equal(array, want)


def test_a_tensor_map_in_global_memory() -> None:
    array = np.arange(64, dtype=np.float32)
    out, table = np.zeros(128, np.uint8), np.zeros(128, np.uint8)
    text = tensor_kernel(1, (8,), 128, "in")
    text = text.replace("mov.b64 %d1, map; cvta.param.u64 %d1, %d1;", "ld.param.u64 %d1, [map];")

    def parameters(addresses: dict[str, int]) -> list[bytes | int]:
        encoded = encode(array, maps.FLOAT32, addresses["array"], (32,), (1,))
        table[:] = np.frombuffer(encoded, np.uint8)
        return [
            addresses["table"].to_bytes(8, "little").ljust(128),
            addresses["out"].to_bytes(8, "little"),
        ]

    # Addresses are the same every time; the second time the table holds the first one's map.
    arrays = {"array": array, "out": out, "table": table}
    with pytest.raises(SimulationError, match="no tensor map"):
        run_with(text, "k", arrays, parameters, block=1)
    run_with(text, "k", arrays, parameters, block=1)
    np.testing.assert_array_equal(out.view(np.float32), np.arange(8, 40))


GOOD: dict[str, Any] = {
    "data_type": maps.FLOAT16, "rank": 2, "global_address": 1 << 40, "global_dim": [64, 32],
    "global_strides": [128], "box_dim": [64, 16], "element_strides": [1, 1],
    "swizzle": maps.SWIZZLE_128B,
}  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"data_type": 99}, {"rank": 0}, {"rank": 6}, {"rank": 3}, {"global_address": 8},
    {"global_dim": [64]}, {"global_dim": [0, 32]}, {"global_dim": [2**33, 32]},
    {"global_strides": [120]}, {"global_strides": [2**40]}, {"global_strides": []},
    {"box_dim": [64, 257]}, {"box_dim": [64, 0]}, {"box_dim": [4, 16]}, {"box_dim": [72, 16]},
    {"box_dim": [64, 16], "swizzle": maps.SWIZZLE_64B}, {"element_strides": [1, 9]},
    {"element_strides": [0, 1]}, {"interleave": 1}, {"swizzle": 4}, {"l2_promotion": 4},
    {"oob_fill": 2},
]  # fmt: skip


def test_what_a_tensor_map_may_not_be() -> None:
    assert len(maps.encode_tiled(**GOOD)) == 128
    for change in BAD:
        with pytest.raises(ValueError, match=r"tensor map: \w+ is .*, but must be"):
            maps.encode_tiled(**GOOD | change)


def test_what_is_no_tensor_map() -> None:
    out = np.zeros(64, np.uint8)
    text = tensor_kernel(1, (0,), 64, "in")
    with pytest.raises(SimulationError, match="no tensor map") as caught:
        run_with(
            text, "k", {"out": out}, lambda x: [bytes(128), x["out"].to_bytes(8, "little")], block=1
        )
    assert caught.value.kind == faults.BULK


# ------------------------------------------------------------------------------------- wgmma

# T is the number of 16-bit elements in 16 bytes. Layouts of 8 x 8 or wider tiles, from the PTX
# document's canonical layouts, written out as the place of element (row, depth) in units of T.


def place_of(row: int, depth: int, span: int, turned: bool, leading: int, stride: int) -> int:
    """Byte offset, before the swizzle, of an element of a matrix of 16-bit floats."""
    if not turned:
        core, inside = divmod(row, 8)
        if span == 0:
            return core * stride + inside * 16 + depth // 8 * leading + depth % 8 * 2
        return core * stride + inside * span + depth * 2
    core, inside = divmod(depth, 8)
    if span == 0:
        return row // 8 * stride + row % 8 * 2 + core * leading + inside * 16
    block, within = divmod(row, span // 2)
    return block * leading + within * 2 + core * stride + inside * span


def lay_out(matrix: np.ndarray, span: int, turned: bool) -> tuple[np.ndarray, int, int]:
    """A matrix in shared memory as wgmma reads it, with leading and stride offset."""
    rows, depth = matrix.shape
    if not turned:
        leading, stride = (rows * 16, 128) if span == 0 else (16, 8 * span)
    elif span == 0:
        leading, stride = 128, 128 * (depth // 8)
    else:
        leading, stride = depth * span, 8 * span
    image = np.zeros(8192, np.uint8)
    for row in range(rows):
        for k in range(depth):
            place = place_of(row, k, span, turned, leading, stride)
            image[place : place + 2] = np.frombuffer(matrix[row, k].tobytes(), np.uint8)
    return swizzle(image, span), leading, stride


MODES = {0: 0, 128: 1, 64: 2, 32: 3}


@pytest.mark.parametrize("span", MODES)
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_descriptors(kind: str, turned: tuple[int, int], span: int) -> None:
    """Matrices in every layout, with signs, with and without what is added to."""
    dtype: Any = np.float16 if kind == "f16" else BFLOAT16
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 16)).astype(dtype), rng.standard_normal((32, 16)).astype(dtype)
    start = rng.standard_normal((64, 32)).astype(np.float32)
    image_a, leading_a, stride_a = lay_out(a, span, bool(turned[0]))
    image_b, leading_b, stride_b = lay_out(b, span, bool(turned[1]))
    base = [
        MODES[span] << 62 | stride >> 4 << 32 | leading >> 4 << 16 | at >> 4
        for stride, leading, at in ((stride_a, leading_a, 0), (stride_b, leading_b, 8192))
    ]
    product = a.astype(np.float64) @ b.astype(np.float64).T
    for add, signs in ((0, (1, 1)), (1, (1, -1)), (1, (-1, -1))):
        got = wgmma(kind, np.concatenate([image_a, image_b]), base, start, add, signs, turned)
        want = product * signs[0] * signs[1] + add * start.astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each (thread, register) of a 64 x N matrix of float32."""
    thread, register = np.arange(128)[:, None], np.arange(columns // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
    return row, register // 4 * 8 + thread % 4 * 2 + register % 2


def accumulators(matrix: np.ndarray) -> np.ndarray:
    """What each thread's registers hold of a 64 x N matrix of float32."""
    return matrix[accumulator_places(matrix.shape[1])]


FILL = (
    "shl.b32 %r2, %r0, 7; cvt.u64.u32 %d3, %r2; add.u64 %d4, %d3, %d1;"
    + "".join(
        f"ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d4+{i}];"
        f"st.shared.v4.u32 [%r2+{i}], {{%r4, %r5, %r6, %r7}};"
        for i in range(0, 128, 16)
    )
    + "fence.proxy.async; bar.sync 0;"
)


def wgmma(kind: str, image: np.ndarray, descriptors: list[int], start: np.ndarray, add: int,
          signs: tuple[int, int], turned: tuple[int, int]) -> np.ndarray:  # fmt: skip
    """One product of what lies in shared memory; A is 64 x 16, B 16 x N."""
    count = start.shape[1] // 2
    names = [f"%f{i}" for i in range(count)]
    loads = [f"ld.global.f32 {name}, [%d7+{4 * i}];" for i, name in enumerate(names)]
    stores = [f"st.global.f32 [%d7+{4 * i}], {name};" for i, name in enumerate(names)]
    body = f"""
        {MEMORY} {START} {FILL}
        mad.wide.u32 %d7, %r0, {4 * count}, %d2; {"".join(loads)}
        mov.u64 %d5, {descriptors[0]}; mov.u64 %d6, {descriptors[1]}; setp.ne.u32 %p3, {add}, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{kind}.{kind} {{{", ".join(names)}}},
            %d5, %d6, %p3, {signs[0]}, {signs[1]}, {turned[0]}, {turned[1]};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mad.wide.u32 %d7, %r0, {4 * count}, %d0; {"".join(stores)}
        ret;
    """
    out = np.zeros((128, count), np.float32)
    arrays = {"out": out, "image": image, "start": accumulators(start)}
    run_text(kernel(body, tuple(arrays)), arrays, block=128)
    whole = np.zeros(start.shape)
    whole[accumulator_places(start.shape[1])] = out
    return whole


# What opcodes name: NumPy's type, depth; A and B lie K-major, rows of 32 bytes, without a swizzle.
KINDS: dict[str, tuple[Any, int]] = {
    "f32.f16.f16": (np.float16, 16), "f16.f16.f16": (np.float16, 16),
    "f32.bf16.bf16": (BFLOAT16, 16), "f32.tf32.tf32": (np.float32, 8),
    "f32.e4m3.e4m3": (ml_dtypes.float8_e4m3fn, 32), "f32.e5m2.e5m2": (ml_dtypes.float8_e5m2, 32),
    "s32.s8.s8": (np.int8, 32), "s32.u8.u8": (np.uint8, 32),
}  # fmt: skip


def fragment(a: np.ndarray) -> np.ndarray:
    """What each thread's four registers hold of a 64 x K matrix A."""
    each = 4 // a.itemsize
    thread, register = np.arange(128)[:, None, None], np.arange(4)[:, None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
    depth = each * (thread % 4) + np.arange(each) + 4 * each * (register // 2)
    return np.ascontiguousarray(a[row, depth]).view(np.uint32)[..., 0]


@pytest.mark.parametrize("columns", [8, 64, 256])
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_types_and_sizes(kinds: str, from_registers: bool, columns: int) -> None:
    dtype, depth = KINDS[kinds]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 5, (n, depth)).astype(dtype) for n in (64, columns))
    image = np.zeros(16384, np.uint8)
    for matrix, start in ((a, 0), (b, 2048)):
        chunks = np.ascontiguousarray(matrix).view(np.uint8).reshape(matrix.shape[0], 2, 16)
        flat = chunks.transpose(1, 0, 2).reshape(-1)
        image[start : start + flat.size] = flat
    half = kinds.startswith("f16")
    count = columns // (4 if half else 2)
    words = [f"%r{i}" for i in range(20, 20 + count)]
    # Signs of A and B, and of 16-bit elements in shared memory whether they are turned.
    flags = "" if kinds.startswith("s32") else ", 1, 1"
    if np.dtype(dtype).itemsize == 2:
        flags += ", 0" if from_registers else ", 0, 0"
    descriptor = [
        128 >> 4 << 32 | rows * 16 >> 4 << 16 | start >> 4
        for rows, start in ((64, 0), (columns, 2048))
    ]
    source = "{%r4, %r5, %r6, %r7}" if from_registers else "%d5"
    body = f"""
        {MEMORY} {START} {FILL}
        mad.wide.u32 %d7, %r0, 16, %d2; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d7];
        mov.u64 %d5, {descriptor[0]}; mov.u64 %d6, {descriptor[1]}; setp.ne.u32 %p3, 0, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{kinds} {{{", ".join(words)}}},
            {source}, %d6, %p3{flags};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mad.wide.u32 %d7, %r0, {4 * count}, %d0;
        {"".join(f"st.global.u32 [%d7+{4 * i}], {word};" for i, word in enumerate(words))}
        ret;
    """
    out = np.zeros((128, count), np.uint32)
    arrays = {"out": out, "image": image, "fragment": fragment(a)}
    text = kernel(body, tuple(arrays)).replace("%r<128>", "%r<160>")
    run_text(text, arrays, block=128)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    if half:
        thread, register = np.arange(128)[:, None, None], np.arange(count)[:, None]
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
        column = register // 2 * 8 + thread % 4 * 2 + np.arange(2)
        np.testing.assert_array_equal(
            out.view(np.float16).reshape(128, count, 2), want[row, column]
        )
        return
    result = np.zeros(want.shape)
    result[accumulator_places(columns)] = out.view(np.int32 if kinds[0] == "s" else np.float32)
    np.testing.assert_array_equal(result, want)


# One product with A in registers; faults are planted around it.
PRODUCT = f"""
    mov.u64 %d6, {128 >> 4 << 32 | 128 >> 4 << 16}; setp.ne.u32 %p3, 0, 0;
    mov.u32 %r4, 0; mov.u32 %r5, 0; mov.f32 %f0, 0f00000000;
    BEFORE
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}},
        {{%r4, %r5, %r4, %r5}}, %d6, %p3, 1, 1, 0;
    AFTER
    wgmma.wait_group.sync.aligned 0;
    cvt.rzi.u32.f32 %r1, %f0;
"""
FENCE_FIRST, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
PRODUCTS = {
    "right": (FENCE_FIRST, COMMIT, None),
    "no fence": ("", COMMIT, faults.WGMMA_FENCE),
    "A written after the fence": (
        FENCE_FIRST + "add.u32 %r4, %r4, 1;", COMMIT, faults.WGMMA_FENCE
    ),
    "an accumulator written after the fence": (
        FENCE_FIRST + "add.f32 %f1, %f1, %f1;", COMMIT, faults.WGMMA_FENCE
    ),
    "no commit": (FENCE_FIRST, "", faults.ACCUMULATOR),
    "an accumulator read": (FENCE_FIRST, COMMIT + "add.f32 %f9, %f1, %f1;", faults.ACCUMULATOR),
    "an accumulator written": (FENCE_FIRST, COMMIT + "mov.f32 %f1, %f9;", faults.ACCUMULATOR),
    "A written": (FENCE_FIRST, COMMIT + "add.u32 %r5, %r5, 1;", faults.ACCUMULATOR),
    "A read": (FENCE_FIRST, COMMIT + "add.u32 %r9, %r5, 1;", None),
    "an accumulator written by a shuffle": (
        FENCE_FIRST, COMMIT + "shfl.sync.bfly.b32 %f1|%p5, %f9, 1, 31, 0xffffffff;",
        faults.ACCUMULATOR,
    ),
    "B overwritten": (FENCE_FIRST, COMMIT + "@%p6 st.shared.u32 [tile], 1;", faults.STILL_READ),
    "another depth in a warp": (
        FENCE_FIRST + "setp.eq.u32 %p4, %r0, 40; @%p4 add.u64 %d6, %d6, 1;", COMMIT,
        faults.ACCUMULATOR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_registers_of_a_product(name: str) -> None:
    before, after, kind = PRODUCTS[name]
    fill = "shl.b32 %r2, %r0, 7;" + "".join(
        f"st.shared.u32 [%r2+{i}], 0;" for i in range(0, 128, 4)
    )
    body = fill + "fence.proxy.async; bar.sync 0; setp.eq.u32 %p6, %r0, 0;" + PRODUCT
    body = body.replace("BEFORE", before)
    body = body.replace("AFTER", after)
    if kind is None:
        np.testing.assert_array_equal(words(body, 128), np.zeros(128))
        return
    assert fault_of(body, 128).kind == kind


def test_what_threads_wrote_must_be_fenced_for_a_product() -> None:
    fill = "shl.b32 %r2, %r0, 7;" + "".join(
        f"st.shared.u32 [%r2+{i}], 0;" for i in range(0, 128, 4)
    )
    product = PRODUCT.replace("BEFORE", FENCE_FIRST).replace("AFTER", COMMIT)
    assert fault_of(fill + "bar.sync 0;" + product, 128).kind == faults.UNFENCED
    # One thread may fence what it knows of for all who know of that.
    words(fill + "bar.sync 0; fence.proxy.async;" + product, 128)
    unordered = fill + "fence.proxy.async;" + product
    assert fault_of(unordered, 128).kind == faults.RACE


def test_a_product_needs_a_whole_warpgroup() -> None:
    body = PRODUCT.replace("BEFORE", FENCE_FIRST).replace("AFTER", COMMIT)
    assert fault_of(body, 96).kind == faults.ACCUMULATOR
    some = "setp.ge.u32 %p5, %r0, 96; @%p5 bra END;" + body + "END: bar.sync 0;"
    assert fault_of(some, 128).kind == faults.DEADLOCK


# -------------------------------------------------------------------------------- clusters

CLUSTER = """
    mov.u32 %r10, %cluster_ctarank; xor.b32 %r11, %r10, 1; shl.b32 %r2, %r0, 2;
    mov.u32 %r12, %ctaid.x; mad.lo.u32 %r13, %r12, 100, %r0;
"""
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def test_blocks_of_a_cluster_read_each_others_memory() -> None:
    body = (
        CLUSTER
        + f"""
        st.shared.u32 [%r2], %r13;
        {MEET}
        mapa.shared::cluster.u32 %r14, %r2, %r11; ld.shared::cluster.u32 %r1, [%r14];
        getctarank.shared::cluster.u32 %r15, %r14; mad.lo.u32 %r1, %r15, 1000, %r1;
        {MEET}
    """
    )
    got = words(body, grid=4, cluster=2).reshape(4, 32)
    for block in range(4):
        want = 100 * (block ^ 1) + np.arange(32) + 1000 * ((block ^ 1) % 2)
        np.testing.assert_array_equal(got[block], want)
    assert fault_of(body.replace(MEET, "", 1), grid=4, cluster=2).kind in (
        faults.RACE, faults.UNWRITTEN,
    )  # fmt: skip
    relaxed = body.replace("arrive.release", "arrive.relaxed", 1)
    assert fault_of(relaxed, grid=2, cluster=2).kind == faults.RACE
    alone = body.replace("%r2, %r11;", "%r2, 2;")
    assert fault_of(alone, grid=2, cluster=2).kind == faults.OUT_OF_RANGE
    own = body.replace("ld.shared::cluster", "ld.shared")
    assert fault_of(own, grid=2, cluster=2).kind == faults.OUT_OF_RANGE


def test_generic_addresses_lead_to_other_blocks() -> None:
    body = (
        CLUSTER
        + f"""
        cvt.u64.u32 %d3, %r2; cvta.shared.u64 %d4, %d3; st.u32 [%d4], %r13;
        {MEET}
        mapa.u64 %d5, %d4, %r11; ld.u32 %r1, [%d5];
        isspacep.shared::cta %p3, %d5; @%p3 mov.u32 %r1, 7777;
        isspacep.shared::cluster %p3, %d5; @%p3 add.u32 %r1, %r1, 1;
        {MEET}
    """
    )
    got = words(body, grid=2, cluster=2)
    np.testing.assert_array_equal(got, [*range(101, 133), *range(1, 33)])


EXCHANGE = (
    CLUSTER
    + MAKE.format(count=1)
    + """
    st.shared.u32 [%r2], %r13;
    fence.proxy.async;
    """
    + MEET
    + """
    setp.eq.u32 %p1, %r0, 0; @!%p1 bra READ;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
    mov.u32 %r3, bar; mapa.shared::cluster.u32 %r16, %r3, %r11;
    mov.u32 %r3, tile; add.u32 %r3, %r3, 1024; mapa.shared::cluster.u32 %r17, %r3, %r11;
    SEND
READ:
    WAIT
    ld.shared.u32 %r1, [%r2+1024];
    """
    + MEET
)
SEND = """cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
    [%r17], [tile], 128, [%r16];"""


def test_copies_between_blocks_of_a_cluster() -> None:
    body = EXCHANGE.replace("SEND", SEND)
    got = words(body.replace("WAIT", WAIT.format(0, 0)), grid=2, cluster=2)
    np.testing.assert_array_equal(got, [*range(100, 132), *range(32)])
    error = fault_of(body.replace("WAIT", ""), grid=2, cluster=2)
    assert error.kind in (faults.IN_FLIGHT, faults.UNWRITTEN)
    unfenced = body.replace("WAIT", WAIT.format(0, 0)).replace("fence.proxy.async;", "")
    assert fault_of(unfenced, grid=2, cluster=2).kind == faults.UNFENCED


def test_a_few_bytes_to_another_block() -> None:
    body = EXCHANGE.replace("@!%p1 bra READ;", "")
    body = body.replace("mbarrier.arrive.expect", "@%p1 mbarrier.arrive.expect")
    send = """add.u32 %r17, %r17, %r2;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r17], %r13, [%r16];"""
    body = body.replace("SEND", send)
    got = words(body.replace("WAIT", WAIT.format(0, 0)), grid=2, cluster=2)
    np.testing.assert_array_equal(got, [*range(100, 132), *range(32)])
    assert fault_of(body.replace("WAIT", ""), grid=2, cluster=2).kind in (
        faults.IN_FLIGHT, faults.UNWRITTEN,
    )  # fmt: skip


def test_arrivals_at_another_blocks_mbarrier() -> None:
    send = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r16];"
    body = EXCHANGE.replace("mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;", "")
    body = body.replace("SEND", "st.shared::cluster.u32 [%r17+4], 55;" + send)
    body = body.replace("ld.shared.u32 %r1, [%r2+1024]", "ld.shared.u32 %r1, [tile+1028]")
    got = words(body.replace("WAIT", WAIT.format(0, 0)), grid=2, cluster=2)
    np.testing.assert_array_equal(got, np.full(64, 55))
    assert fault_of(body.replace("WAIT", ""), grid=2, cluster=2).kind in (
        faults.RACE, faults.UNWRITTEN,
    )  # fmt: skip


def test_a_copy_for_all_blocks_of_a_cluster() -> None:
    """Each block waits at its own mbarrier for the bytes that one of them sends to all."""
    copy = (
        CLUSTER
        + MAKE.format(count=1)
        + """
        setp.eq.u32 %p1, %r0, 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
        """
        + MEET
        + """
        setp.eq.u32 %p4, %r10, 0; and.pred %p4, %p4, %p1; mov.u16 %h1, 3;
        @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [tile], [%d1], 128, [bar], %h1;
        """
        + WAIT.format(0, 0)
        + "ld.shared.u32 %r1, [%r2];"
    )
    source, out = np.arange(100, 132, dtype=np.uint32), np.zeros(64, np.uint32)
    end = STORE.replace("%r0", "%r98")
    place = "mov.u32 %r99, %ctaid.x; mad.lo.u32 %r98, %r99, 32, %r0;"
    text = kernel(MEMORY + START + place + copy + end, ("out", "source"))
    run_text(text, {"out": out, "source": source}, grid=2, cluster=2)
    np.testing.assert_array_equal(out, np.tile(np.arange(100, 132), 2))
    text = text.replace("mov.u16 %h1, 3", "mov.u16 %h1, 7")
    with pytest.raises(SimulationError, match="blocks that the cluster does not have"):
        run_text(text, {"out": out, "source": source}, grid=2, cluster=2)


def test_where_a_block_is_in_its_cluster() -> None:
    names = {
        "%cluster_ctarank": [0, 1, 0, 1], "%cluster_ctaid.x": [0, 1, 0, 1],
        "%cluster_nctarank": [2] * 4, "%cluster_nctaid.y": [1] * 4,
        "%clusterid.x": [0, 0, 1, 1], "%nclusterid.x": [2] * 4,
    }  # fmt: skip
    for name, want in names.items():
        got = words(f"mov.u32 %r1, {name};", 32, grid=4, cluster=2)
        np.testing.assert_array_equal(got, np.repeat(want, 32), name)
    body = "mov.pred %p3, %is_explicit_cluster; selp.u32 %r1, 1, 0, %p3;"
    np.testing.assert_array_equal(words(body, grid=2, cluster=2), np.ones(64))
    with pytest.raises(ValueError, match="no multiple of the cluster"):
        words(body, grid=3, cluster=2)


def test_who_has_exited_is_not_waited_for_in_a_cluster() -> None:
    body = CLUSTER + "setp.eq.u32 %p3, %r10, 1; @%p3 bra END;" + MEET + "mov.u32 %r1, 5; END:"
    np.testing.assert_array_equal(words(body, grid=2, cluster=2), [5] * 32 + [0] * 32)


# ------------------------------------------------------------------------------ warpgroups


def test_all_of_a_warpgroup_change_their_registers() -> None:
    body = "setp.ge.u32 %p3, %r0, 64; @%p3 bra END; setmaxnreg.dec.sync.aligned.u32 40; END: "
    assert fault_of(body + "bar.sync 0;", 128).kind == faults.DEADLOCK
    whole = "setp.ge.u32 %p3, %r0, 128; @%p3 bra END; setmaxnreg.dec.sync.aligned.u32 40; END: "
    words(whole + "bar.sync 0;", 256)
    for count in (20, 42, 264):
        with pytest.raises(NotImplementedError):
            words(whole.replace("40", str(count)), 256)


def test_a_block_asks_for_no_more_registers_than_it_has() -> None:
    """Three warpgroups of a multiprocessor's 65536 have 168 each: 504 together."""
    body = """
        setp.ge.u32 %p3, %r0, 128; @%p3 bra MORE; setmaxnreg.dec.sync.aligned.u32 GIVEN; bra END;
    MORE: setmaxnreg.inc.sync.aligned.u32 240;
    END: bar.sync 0;
    """
    words(body.replace("GIVEN", "24"), 384)
    error = fault_of(body.replace("GIVEN", "32"), 384)
    assert error.kind == faults.DEADLOCK
    assert "65536 registers in all, and has 64512 at most" in str(error)


def test_the_other_name_of_barriers() -> None:
    body = """
        setp.lt.u32 %p3, %r0, 64; shl.b32 %r2, %r0, 2; @%p3 bra LOW;
        barrier.cta.sync.aligned 3, 128; xor.b32 %r3, %r2, 256; ld.shared.u32 %r1, [%r3];
        bra END;
    LOW:
        st.shared.u32 [%r2], %r0; barrier.cta.arrive.aligned 3, 128;
    END: barrier.cta.sync.aligned 0;
    """
    np.testing.assert_array_equal(words(body, 128), [0] * 64 + [*range(64)])


@pytest.mark.parametrize(
    "body",
    [
        "bar.sync 16, 64;",
        "bar.sync 3, 40;",
        "bar.sync 3, 0;",
        "shr.u32 %r3, %r0, 5; mad.lo.u32 %r3, %r3, 32, 64; bar.sync 3, %r3;",
        "setp.lt.u32 %p3, %r0, 32; @%p3 bar.arrive 3, 64; @!%p3 bar.sync 3;",
    ],
)
def test_misuse_of_a_barrier(body: str) -> None:
    assert fault_of(body, 96).kind == faults.BARRIER


def test_named_barriers_order_whom_they_let_meet() -> None:
    """Two pairs of warps, each with a barrier of its own; what one pair writes, it may read."""
    body = """
        shr.u32 %r3, %r0, 6; add.u32 %r3, %r3, 1; shl.b32 %r2, %r0, 2;
        st.shared.u32 [%r2], %r0;
        bar.sync %r3, 64;
        xor.b32 %r4, %r2, MASK; ld.shared.u32 %r1, [%r4];
    """
    got = words(body.replace("MASK", "128"), 128)
    np.testing.assert_array_equal(got, np.arange(128) ^ 32)
    assert fault_of(body.replace("MASK", "256"), 128).kind == faults.RACE
