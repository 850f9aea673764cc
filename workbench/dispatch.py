"""One call, from checked arguments to its results; what a repeated call looks up.

The first call of a kind is checked, gets its kernel and leaves a `_Repeat` behind under everything
that decided about it: shapes, strides, dtypes, alignments, device and options. A further call on
the GPU is that look-up, the allocation of its outputs and the launch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from workbench import checks, probabilities, table
from workbench import compile as compiler
from workbench.arrays import device_of
from workbench.checks import Prepared
from workbench.plan import Plan, keep
from workbench.problem import (
    HOST_BACKENDS,
    KERNEL_BACKENDS,
    MAX_ALIGNMENT,
    SIMULATOR_ARCH,
    SIMULATOR_BACKENDS,
)

_KEPT = 4096  # each a few kilobytes; more kinds of call than this start over


@dataclass(frozen=True, slots=True)
class _Repeat:
    """All that a further call of the same kind needs."""

    plan: Plan
    ndarray: Any  # cupy.ndarray: allocates without initialising
    allocate: Any  # cupy.cuda.alloc
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...]  # name, the caller's shape, dtype
    unasked: tuple[tuple[str, int], ...]  # name and bytes of what the caller does not get

    def __call__(self, pointers: dict[str, int]) -> tuple[Any, ...]:
        plan = self.plan
        if plan.is_current() and not plan.is_captured():
            return self._run(pointers, captured=False)
        with plan.on_device() as captured:
            return self._run(pointers, captured)

    def _run(self, pointers: dict[str, int], captured: bool) -> tuple[Any, ...]:
        results = []
        for name, shape, dtype in self.outputs:
            result = self.ndarray(shape, dtype)
            pointers[name] = result.data.ptr
            results.append(result)
        unasked = [(name, self.allocate(nbytes)) for name, nbytes in self.unasked]
        for name, memory in unasked:
            pointers[name] = memory.ptr
            if captured:
                keep(memory)
        self.plan.run(pointers, captured)
        return tuple(results)


_repeats: dict[Any, _Repeat] = {}
_plans: dict[Any, Plan] = {}


def _key(
    op: str, named: Mapping[str, Any], options: Mapping[str, Any], kernel: Any
) -> tuple[Any, dict[str, int]]:
    """What decides about a call on CuPy arrays, or None if it is no such call; their addresses."""
    pointers: dict[str, int] = {}
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None, pointers
    ndarray = cupy.ndarray
    window = options.get("window")
    if window is not None:  # a list has no hash, and both ends have types, too
        options = {**options, "window": repr(window)}
    # True == 1 == 1.0, yet only one of them may be right: the type belongs to the key.
    values = options.values()
    parts: list[Any] = [op, kernel, *values, *map(type, values)]
    for name, x in named.items():
        if x is None:
            parts.append(None)
        elif type(x) is ndarray:
            data = x.data
            pointers[name] = pointer = data.ptr
            parts += (x.shape, x.strides, x.dtype, pointer % MAX_ALIGNMENT, data.device_id)
        else:
            return None, pointers
    return tuple(parts), pointers


def run(
    op: str,
    named: Mapping[str, Any],
    options: Mapping[str, Any],
    kernel: str | None = None,
    out: Any = None,
) -> tuple[Any, ...]:
    """Carry out one call of `attention`, `attention_backward` or `vector_add`."""
    key, pointers = (None, {}) if out is not None else _key(op, named, options, kernel)
    if key is not None:
        try:
            repeat = _repeats.get(key)
        except TypeError:  # something in it has no hash
            key = repeat = None
        if repeat is not None:
            return repeat(pointers)
    arrays = checks.as_arrays(named)
    with device_of(arrays.values()):
        return _run(op, arrays, options, kernel, out, key)


def _run(
    op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], kernel: Any, out: Any, key: Any
) -> tuple[Any, ...]:
    """A call of a new kind, with the device of its arrays as the current one."""
    targets = {} if out is None else {"out": out}
    prepared = checks.PREPARE[op](arrays, **targets, **options)
    if prepared.backend in HOST_BACKENDS:
        no_kernel_on_host(kernel, prepared.backend)
        _run_on_host(op, prepared)
        return checks.hand_back(prepared)
    if prepared.backend in SIMULATOR_BACKENDS:
        _run_in_simulator(prepared, kernel)
        return checks.hand_back(prepared)
    plan = _plan(prepared, kernel)
    asked = 1 if op == "attention" and not options["return_lse"] else len(prepared.outputs)
    unasked = prepared.outputs[asked:]
    with plan.on_device() as captured:
        if captured and prepared.copied:
            keep(prepared.arrays)
        if captured and unasked:
            keep(unasked)
        plan.run(_pointers(prepared.arrays), captured)
    if key is not None and prepared.in_place:
        if len(_repeats) >= _KEPT:
            _repeats.clear()
        cupy = sys.modules["cupy"]
        _repeats[key] = _Repeat(
            plan,
            cupy.ndarray,
            cupy.cuda.alloc,
            tuple((name, x.shape, x.dtype) for name, x, _ in prepared.outputs[:asked]),
            tuple((name, x.nbytes) for name, x, _ in unasked),
        )
    return checks.hand_back(prepared)


def no_kernel_on_host(kernel: Any, backend: str) -> None:
    """Refuse `kernel` where a host backend runs: nothing is accepted and ignored."""
    if kernel is not None:
        raise ValueError(
            f"kernel is {kernel!r}, but backend {backend!r} has no kernels to choose from; it goes "
            f"with backend {', '.join(map(repr, KERNEL_BACKENDS))}"
        )


def host(backend: str) -> ModuleType:
    """The module of a host backend, imported when first used."""
    return importlib.import_module(f"workbench.{backend}")


def _plan(prepared: Prepared, kernel: str | None) -> Plan:
    problem, language = prepared.problem, prepared.backend
    table.check_name(problem.op, kernel)
    device = prepared.device
    key = (problem, language, kernel, device)
    plan = _plans.get(key)
    if plan is None:
        arch = compiler.device_arch(device)
        row = table.select(problem, language, arch, kernel)
        plan = Plan(row.name, row.work(problem, arch), problem, language, device)
        if len(_plans) >= _KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


def _pointers(arrays: Any) -> dict[str, int]:
    return {name: x.data.ptr for name, x in arrays._asdict().items() if x is not None}


def _run_on_host(op: str, prepared: Prepared) -> None:
    module = host(prepared.backend)
    if op == "vector_add":
        module.vector_add(*prepared.arrays)
    else:
        getattr(module, op)(prepared.problem, prepared.arrays)


def _run_in_simulator(prepared: Prepared, kernel: str | None) -> None:
    """Run a kernel as on a GPU, but by the simulator, on the arrays where they lie."""
    simulator = importlib.import_module("workbench.simulator.run")
    problem, language = prepared.problem, prepared.backend.removesuffix("-simulator")
    table.check_name(problem.op, kernel)
    arch = SIMULATOR_ARCH
    try:
        row = table.select(problem, language, arch, kernel)
    except table.NoKernelError as error:
        raise table.NoKernelError(f"{prepared.backend}: {error}") from None
    outputs = {name for name, _, _ in prepared.outputs}
    work = row.work(problem, arch)
    simulator.run(work, problem, language, prepared.arrays._asdict(), outputs)


def weights(named: Mapping[str, Any], rows: Any, reduce: Any, options: Mapping[str, Any]) -> Any:
    """Carry out one call of `attention_weights`: array operations, on whichever side q is."""
    arrays = checks.as_arrays(named)
    with device_of(arrays.values()):
        prepared, chosen = checks.prepare_attention_weights(
            arrays, rows=rows, reduce=reduce, **options
        )
        result = probabilities.weights(prepared.problem, prepared.arrays, chosen, reduce == "mean")
        # As the caller has it: without the leading axes that q has not, nor that of a single row.
        result = result.reshape(result.shape[4 - arrays["q"].ndim :])
        return result[..., 0, :] if isinstance(rows, (int, np.integer)) else result


def merge(outs: Any, lses: Any, backend: Any) -> tuple[Any, Any]:
    """Carry out one call of `merge_attention`."""
    with device_of(outs if isinstance(outs, (tuple, list)) else ()):
        prepared = checks.prepare_merge(outs, lses, backend=backend)
        arrays = prepared.arrays
        # On the GPU the formula runs on CuPy arrays as on NumPy's: a few element-wise steps.
        module = host(prepared.backend if prepared.backend in HOST_BACKENDS else "cpu")
        module.merge_attention(arrays.outs, arrays.lses, arrays.out, arrays.lse)
        out, lse = checks.hand_back(prepared)
        return out, lse
