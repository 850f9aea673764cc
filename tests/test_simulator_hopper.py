"""A matrix product as Hopper does it, in the simulator: right as it is, and broken line by line."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from building import needs
from ptx_kernels import compile_cuda, run_with

from workbench.simulator import faults, lines
from workbench.simulator import tensormap as maps
from workbench.simulator.engine import Launch
from workbench.simulator.faults import SimulationError

SOURCE = (Path(__file__).parent / "hopper_matmul.cu").read_text()
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHARED = 5 * 64 * 128 + 32

pytestmark = needs("cuda")


@functools.cache
def compiled(source: str, swizzle: int) -> str:
    return compile_cuda(source, SWIZZLE=swizzle)


def multiply(
    shape: tuple[int, int, int] = (100, 72, 200),
    source: str = SOURCE,
    swizzle: int = 1,
    **options: object,
) -> tuple[np.ndarray, np.ndarray, Launch]:
    """What the kernel makes of random matrices, what is right, and the launch."""
    rows, columns, depth = shape
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, depth)).astype(BFLOAT16) for n in (rows, columns))
    out = np.zeros((rows, columns), BFLOAT16)

    def parameters(addresses: dict[str, int]) -> list[bytes | int]:
        tensors = [
            maps.encode_tiled(
                maps.BFLOAT16, 2, addresses[name], x.shape[::-1], [x.strides[0]], [64, 64], [1, 1],
                swizzle=maps.SWIZZLE_128B,
            )
            for name, x in (("a", a), ("b", b), ("out", out))
        ]  # fmt: skip
        return [*tensors, rows, columns, depth]

    text = compiled(source, swizzle)
    arrays = {"a": a, "b": b, "out": out}
    launch = run_with(text, "matmul", arrays, parameters, block=160, shared=SHARED, **options)
    return out.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64).T, launch


@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 72, 200), (8, 8, 8), (130, 64, 320)])
@pytest.mark.parametrize("checks", [True, False])
def test_products(shape: tuple[int, int, int], checks: bool) -> None:
    got, want, _ = multiply(shape, checks=checks)
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-3)


def test_every_order_of_arrival_gives_the_same() -> None:
    results = [multiply(seed=seed)[0].tobytes() for seed in range(4)]
    assert len({*results}) == 1


def test_counts() -> None:
    """Tiles that stick out load what is there; the shared memory that they fill is whole."""
    _, _, launch = multiply()
    arrays = lines.by_array(launch)
    # Two tiles of rows times two of columns; each walks over 100, or 72, rows of 200 elements.
    assert arrays["a"][0].bytes == 2 * 100 * 200 * 2
    assert arrays["b"][0].bytes == 2 * 72 * 200 * 2
    assert arrays["out"][1].bytes == 100 * 72 * 2
    total = lines.total([launch])
    assert total.loads.bytes == arrays["a"][0].bytes + arrays["b"][0].bytes
    assert total.stores.bytes == arrays["out"][1].bytes
    # Tiles, steps in depth, warps, products of depth 16.
    assert total.instructions["matrix"] == 4 * 4 * 4 * 4


@dataclass(frozen=True)
class Fault:
    """What to break, and what must be said about it: of the lines, what the source has there."""

    pattern: str
    replacement: str
    kind: str
    where: str
    other: str = ""
    shape: tuple[int, int, int] = (100, 72, 200)


FAULTS = {
    "no wait for the tiles": Fault(
        r"mbarrier_wait\(full.*", "", faults.IN_FLIGHT, "wgmma.mma_async", "cp.async.bulk.tensor"
    ),
    "the wrong parity": Fault(
        r"(mbarrier_wait\(full.*), phase\)", r"\1, phase ^ 1)", faults.IN_FLIGHT,
        "wgmma.mma_async", "cp.async.bulk.tensor",
    ),
    "too few bytes expected": Fault(
        r"expect\(bar, 2 \* TILE", "expect(bar, TILE", faults.IN_FLIGHT, "wgmma.mma_async",
        "cp.async.bulk.tensor",
    ),
    "too many bytes expected": Fault(
        r"expect\(bar, 2 \* TILE", "expect(bar, 2 * TILE + 16", faults.DEADLOCK, "try_wait",
    ),
    "no wait for a free stage": Fault(
        r"mbarrier_wait\(empty.*", "", faults.MBARRIER, "mbarrier.arrive.expect_tx",
    ),
    "a stage freed too early": Fault(
        r'asm volatile\("wgmma.wait_group.sync.aligned 0;" ::: "memory"\);\n(.*\n)',
        r"\1asm volatile('wgmma.wait_group.sync.aligned 0;' ::: 'memory');".replace("'", '"'),
        faults.STILL_READ, "cp.async.bulk.tensor", "wgmma.mma_async",
    ),
    "arrivals for whole warps": Fault(
        r"if \(lane == 0\) mbarrier_arrive", "mbarrier_arrive", faults.RACE,
        "cp.async.bulk.tensor", "cp.async.bulk.tensor",
    ),
    "no fence for the store": Fault(
        r'asm volatile\("fence.proxy.async.shared::cta;" ::: "memory"\);', "", faults.UNFENCED,
        "bulk_group", "st.shared",
    ),
    "no fence for the mbarriers": Fault(
        r'asm volatile\("fence.mbarrier_init.*', "", faults.UNFENCED, "cp.async.bulk.tensor",
    ),
    "no barrier behind the mbarriers": Fault(
        r"__syncthreads\(\);", "", faults.RACE, "mbarrier.try_wait", "mbarrier.init",
    ),
    "no wait for the product": Fault(
        r'asm volatile\("wgmma.wait_group.*', "", faults.ACCUMULATOR, "cvt.rn",
        "wgmma.mma_async", (64, 64, 64),
    ),
    "one product too many under way": Fault(
        r"wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1", faults.STILL_READ,
        "cp.async.bulk.tensor", "wgmma.mma_async",
    ),
    "no fence for the accumulators": Fault(
        r'asm volatile\("wgmma.fence.*', "", faults.WGMMA_FENCE, "wgmma.mma_async",
    ),
    "no wait for the last store": Fault(
        r"if \(threadIdx.x == 0\) asm volatile\(.cp.async.bulk.wait_group.read.*", "",
        faults.STILL_READ, "st.shared", "bulk_group",
    ),
    "no barrier in front of the staging area": Fault(
        r'asm volatile\("bar.sync 1, 128;" ::: "memory"\);  // the last.*', "", faults.RACE,
        "st.shared", "bulk_group",
    ),
    "no barrier behind the staging area": Fault(
        r'asm volatile\("bar.sync 1, 128;" ::: "memory"\);  // all.*', "", faults.RACE,
        "bulk_group", "st.shared",
    ),
    "an exit before the store has read": Fault(
        r"if \(threadIdx.x == 0\) asm .*// at last", "", faults.STILL_READ, "", "bulk_group",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault(name: str) -> None:
    fault = FAULTS[name]
    broken, count = re.subn(fault.pattern, fault.replacement, SOURCE, count=1)
    assert count == 1
    with pytest.raises(SimulationError) as caught:
        multiply(fault.shape, broken)
    error = caught.value
    assert error.kind == fault.kind, error
    text = broken.splitlines()
    for pattern, place in ((fault.where, error.where), (fault.other, error.other)):
        if pattern:
            assert place is not None, error
            # An instruction stands in the lines behind that of its asm statement.
            found = "\n".join(text[place.line - 1 : place.line + 5])
            assert re.search(pattern, found), (str(error), found)


@pytest.mark.parametrize("swizzle", [0, 2, 3])
def test_the_wrong_swizzle_gives_wrong_values(swizzle: int) -> None:
    got, want, _ = multiply((64, 64, 64), swizzle=swizzle)
    assert np.abs(got - want).max() > 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [("the wrong parity", (64, 64, 64)), ("no wait for the product", (64, 64, 64)),
     ("no wait for the last store", (100, 72, 64))],
)  # fmt: skip
def test_without_checks_a_missing_wait_shows_in_the_values(
    name: str, shape: tuple[int, int, int]
) -> None:
    fault = FAULTS[name]
    broken = re.sub(fault.pattern, fault.replacement, SOURCE, count=1)
    got, want, _ = multiply(shape, broken, checks=False)
    assert not np.allclose(got, want, rtol=2**-6, atol=1e-2)
