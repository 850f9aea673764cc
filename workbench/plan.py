"""A problem's launches bound to one GPU: loaded, packed, and ready but for the addresses.

This is what a repeated call runs, so it does as little as it can: the allocations and the launches,
which are kept ready for the addresses that came before, and at last are one graph.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from workbench import compile as compiler
from workbench.launchers import (
    Launch,
    TensorMap,
    Work,
    Workspace,
    argument_values,
    tensor_map,
)
from workbench.tensormaps import encode_tiled

_WORKSPACE_ALIGNMENT = 256  # bytes, as of any allocation
_MOST = 1024  # addresses of a plan, as many as a program is likely to go round in
_OFTEN = 16  # calls on the same addresses, after which the time that a graph takes is well spent
_MOST_GRAPHS = 256  # of all plans: each takes some memory of the GPU


@dataclass(frozen=True, slots=True)
class _Bound:
    """A launch whose kernel is loaded and whose packet lacks only addresses."""

    kernel: compiler.Loaded
    launch: Launch
    packet: bytes
    words: type[ctypes.Array[ctypes.c_uint64]]
    dependent: bool
    slots: tuple[tuple[int, str], ...]  # word of the packet, name of the array whose address it is
    maps: tuple[tuple[int, TensorMap], ...]  # first word of a tensor map, and what it is of


@dataclass(slots=True)
class _Call:
    """What a call on certain addresses starts, one by one; and once it is known, as a graph.

    To launch a graph costs the host less than to launch one kernel.
    """

    starts: list[Callable[[], int | None]]  # each returns the driver's CUresult, or None
    uses: int = 0
    graph: Any = None  # cupy.cuda.Graph
    lock: threading.Lock = field(default_factory=threading.Lock)  # no graph is for two threads


_with_graphs: deque[_Call] = deque()  # the oldest graph first


class Plan:
    """The launches of one kind of problem on one GPU.

    Parameters
    ----------
    name : str
        Of the kernel, for messages.
    work : Work
    problem : Problem or VectorProblem
    language : {"cuda", "numba"}
    device : int
    """

    def __init__(self, name: str, work: Work, problem: Any, language: str, device: int) -> None:
        import cupy

        self.name = name
        self.device = device
        self._cupy = cupy
        self._current_stream = cupy.cuda.get_current_stream
        self._current_device = cupy.cuda.runtime.getDevice
        self._offsets, self._workspace_bytes = _offsets(work.workspaces)
        values = argument_values(problem)
        self._problem = problem
        self._tensor_maps: dict[tuple[TensorMap, int], bytes] = {}
        self._calls: dict[Any, _Call] = {}
        self._makes_graphs = True
        with cupy.cuda.Device(device):
            launches = [launch for launch in work.launches if launch.grid]
            # The first one never overlaps: in front of it is what others have launched.
            self._bound = [
                _bind(launch, language, device, values, overlaps=launch.dependent and i > 0)
                for i, launch in enumerate(launches)
            ]

    @contextmanager
    def on_device(self) -> Iterator[bool]:
        """Make the plan's GPU the current one; whether the current stream is being captured.

        During a capture the driver allocates only in CUDA's relaxed capture mode, so the thread
        is put into it.
        """
        if not self.is_current():
            with self._cupy.cuda.Device(self.device), self.on_device() as captured:
                yield captured
        elif self.is_captured():
            with _relaxed_capture():
                yield True
        else:
            yield False

    def is_current(self) -> bool:
        """Whether the plan's GPU is the current one."""
        return bool(self._current_device() == self.device)

    def is_captured(self) -> bool:
        """Whether the current stream is being captured into a graph; stream 0 cannot be."""
        stream = self._current_stream()
        return bool(stream.ptr and stream.is_capturing())

    def run(self, pointers: dict[str, int], captured: bool) -> None:
        """Launch everything on the current stream of the plan's GPU, the current one.

        Parameters
        ----------
        pointers : dict
            Address of each array by its parameter name; what is missing is null.
        captured : bool
            Whether the stream is being captured.
        """
        stream = self._current_stream()
        workspace = 0
        if self._workspace_bytes:
            memory = self._allocate()
            workspace = memory.ptr
            if captured:
                keep(memory)
        key = (stream.ptr, workspace, tuple(pointers), tuple(pointers.values()))
        call = self._calls.get(key)
        if call is None:
            call = _Call(self._starts(stream.ptr, workspace, pointers))
            if len(self._calls) >= _MOST:
                self._calls.clear()
            self._calls[key] = call
        if captured:
            self._start(call.starts)
            return
        graph = call.graph
        if graph is not None:
            with call.lock:
                graph.launch(stream)
            return
        self._start(call.starts)
        call.uses += 1
        if call.uses >= _OFTEN and self._makes_graphs:
            self._give_graph(call, workspace, pointers)

    def _start(self, starts: list[Callable[[], int | None]]) -> None:
        for start in starts:
            if status := start():
                raise self._cupy.cuda.driver.CUDADriverError(status)

    def _give_graph(self, call: _Call, workspace: int, pointers: dict[str, int]) -> None:
        """Make a call one graph, if the driver can; the oldest one of too many goes."""
        with call.lock:
            if call.graph is not None:  # another thread was faster
                return
            call.graph = self._graph(workspace, pointers)
            self._makes_graphs = call.graph is not None
        if self._makes_graphs:
            _with_graphs.append(call)
        if len(_with_graphs) > _MOST_GRAPHS:
            oldest = _with_graphs.popleft()
            oldest.graph, oldest.uses = None, 0

    def _graph(self, workspace: int, pointers: dict[str, int]) -> Any:
        """The launches on these addresses as a graph, or None if the driver cannot make it."""
        cuda = self._cupy.cuda
        with (
            _relaxed_capture(),
            suppress(cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError),
        ):
            stream = cuda.Stream(non_blocking=True)
            starts = self._starts(stream.ptr, workspace, pointers)
            stream.begin_capture()
            try:
                self._start(starts)
            finally:  # a stream must not be left in the middle of a capture
                graph = stream.end_capture()
            return graph
        return None

    def _starts(
        self, stream: int, workspace: int, pointers: dict[str, int]
    ) -> list[Callable[[], int | None]]:
        """What to start on a stream and on these addresses: zeros, then the launches."""
        addresses = pointers | {space.name: workspace + at for space, at in self._offsets}
        starts: list[Callable[[], int | None]] = [
            functools.partial(
                self._cupy.cuda.runtime.memsetAsync, workspace + at, 0, space.nbytes, stream
            )
            for space, at in self._offsets
            if space.zeroed
        ]
        for bound in self._bound:
            words = bound.words.from_buffer_copy(bound.packet)
            for index, name in bound.slots:
                words[index] = addresses.get(name, 0)
            for index, chosen in bound.maps:
                encoded = self._tensor_map(chosen, addresses[chosen.array])
                ctypes.memmove(ctypes.addressof(words) + 8 * index, encoded, len(encoded))
            launch = bound.launch
            start = compiler.prepare(
                bound.kernel, launch.grid, launch.block, launch.shared_memory, stream, words,
                bound.dependent,
            )  # fmt: skip
            starts.append(start)
        return starts

    def _tensor_map(self, chosen: TensorMap, address: int) -> bytes:
        """A map of an array of this kind of problem; all that differs is where it begins."""
        encoded = self._tensor_maps.get((chosen, address))
        if encoded is None:
            if len(self._tensor_maps) >= _MOST:
                self._tensor_maps.clear()
            encoded = encode_tiled(**tensor_map(self._problem, chosen, address))
            self._tensor_maps[chosen, address] = encoded
        return encoded

    def _allocate(self) -> Any:
        """One piece of memory for all workspaces."""
        try:
            return self._cupy.cuda.alloc(self._workspace_bytes)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            spaces = ", ".join(f"{space.name} {space.shape}" for space, _ in self._offsets)
            raise MemoryError(
                f"{self.name} needs workspaces of {self._workspace_bytes / 2**30:.2f} GiB "
                f"({spaces}), more than the GPU has free; attention_flash_simt needs none of "
                "seqlen_q x seqlen_k"
            ) from error


def _offsets(workspaces: tuple[Workspace, ...]) -> tuple[list[tuple[Workspace, int]], int]:
    """Where each workspace begins in the memory that they share, and its size in bytes."""
    placed, end = [], 0
    for space in workspaces:
        placed.append((space, end))
        end += -(-space.nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return placed, end


def _bind(
    launch: Launch, language: str, device: int, values: dict[str, Any], *, overlaps: bool
) -> _Bound:
    signature = launch.entry.signature
    kernel = compiler.load(language, launch.entry, device, launch.shared_memory)
    arguments = signature.pack(values | dict(launch.values))
    packet = compiler.packet(bytes(kernel.arguments_at) + arguments)
    first = compiler.PACKET_HEADER + kernel.arguments_at // 8
    slots = tuple(
        (first + i, leaf.removeprefix("score."))
        for i, (kind, leaf) in enumerate(signature.leaves)
        if kind.endswith("*")
    )
    maps = tuple((first + signature.slots[f"{x.parameter}.0"], x) for x in launch.maps)
    dependent = overlaps and int(compiler.device_arch(device).removeprefix("sm_")) >= 90
    words = ctypes.c_uint64 * (len(packet) // 8)
    return _Bound(kernel, launch, packet, words, dependent, slots, maps)


_kept: list[Any] = []


def keep(memory: Any) -> None:
    """Keep memory for ever that a captured call uses and its caller does not hold.

    A graph that replays the call writes there again, long after the call has returned; nobody tells
    us when the graph is gone.
    """
    _kept.append(memory)


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
