"""What a kernel did wrong, told with its threads and its source lines."""

from __future__ import annotations

from workbench.simulator.ptx import Location

OUT_OF_RANGE = "out of range"
MISALIGNED = "misaligned"
READ_ONLY = "write to an input"
UNWRITTEN = "read of unwritten memory"
IN_FLIGHT = "read before the copy arrived"
STILL_READ = "overwritten before it was read"
UNFENCED = "missing fence.proxy.async"
RACE = "race"
BARRIER = "misuse of a barrier"
MBARRIER = "misuse of an mbarrier"
ACCUMULATOR = "registers of a wgmma under way"
WGMMA_FENCE = "missing wgmma.fence"
BULK = "bulk copy"
DEADLOCK = "deadlock"
SPLIT_WARP = "threads of one warp at different barriers"
STEP_LIMIT = "step limit"
TRAP = "trap"
SHUFFLE = "shuffle from an absent lane"


class SimulationError(RuntimeError):
    """A fault of the simulated kernel.

    Attributes
    ----------
    kind : str
        One of the constants of this module.
    where : Location or None
        The line of the access, or of a barrier that was waited at.
    other : Location or None
        The line of the access that it collides with, or where the missing threads are.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        where: Location | None = None,
        other: Location | None = None,
    ) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.where = where
        self.other = other


def at(where: Location | None) -> str:
    """A source line as it is read in a message."""
    return "an unknown line" if where is None else str(where)
