"""How often every instruction ran and what its memory accesses cost."""

from __future__ import annotations

from typing import Any

import numpy as np

# Columns of a row of counts. In shared memory a transaction is a wavefront, in global memory a
# sector of 32 bytes; `least` is how many the same bytes need at best.
REQUESTS, THREADS, BYTES, TRANSACTIONS, LEAST = range(5)
COLUMNS = 5


class Counts:
    """Counts of one launch.

    Attributes
    ----------
    warps, threads : int64 arrays
        How often each instruction was issued to a warp, and for how many threads.
    shared, global_ : int64 arrays
        A row an instruction; columns above.
    arrays : int64 array
        A row an array and direction: loads, then stores.
    """

    def __init__(self, instructions: int, regions: int) -> None:
        self.warps = np.zeros(instructions + 1, np.int64)
        self.threads = np.zeros(instructions + 1, np.int64)
        self.shared = np.zeros((instructions, COLUMNS), np.int64)
        self.global_ = np.zeros((instructions, COLUMNS), np.int64)
        self.arrays = np.zeros((2, regions, COLUMNS), np.int64)

    def add(self, start: int, end: int, group: Any) -> None:
        """A group has executed the instructions from `start` to before `end`."""
        # Only where runs begin and end; `finish` adds them up.
        self.warps[start] += group.warps
        self.warps[end] -= group.warps
        self.threads[start] += group.count
        self.threads[end] -= group.count

    def finish(self) -> None:
        """Turn what `add` noted into counts of every instruction."""
        self.warps = np.cumsum(self.warps)[:-1]
        self.threads = np.cumsum(self.threads)[:-1]
