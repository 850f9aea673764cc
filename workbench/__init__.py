"""Exact attention for NumPy and CuPy, from raw CUDA C++ and Numba kernels, without a framework."""

from workbench.api import (
    attention,
    attention_backward,
    attention_weights,
    merge_attention,
    vector_add,
)
from workbench.compile import CompileError, ToolchainError
from workbench.explain import Explanation, explain
from workbench.problem import Gradients
from workbench.simulator.faults import SimulationError
from workbench.table import KERNELS, Kernel, NoKernelError

__all__ = [
    "KERNELS",
    "CompileError",
    "Explanation",
    "Gradients",
    "Kernel",
    "NoKernelError",
    "SimulationError",
    "ToolchainError",
    "attention",
    "attention_backward",
    "attention_weights",
    "explain",
    "merge_attention",
    "vector_add",
]
