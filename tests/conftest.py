"""What all tests share: the GPU marker and a cache of compiled kernels of their own."""

from __future__ import annotations

import os
import warnings

import pytest


def missing_gpu() -> str | None:
    """Say why no test can use a GPU here, or None where one can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns when it finds no toolkit; that is our answer
        try:
            import cupy
        except ImportError as error:
            return f"CuPy cannot be imported ({error})"
        try:
            if cupy.cuda.runtime.getDeviceCount() == 0:
                return "no NVIDIA GPU found"
            cupy.zeros(1).sum().item()
        except Exception as error:  # noqa: BLE001 - whatever CuPy raises, the GPU is not usable
            return f"no usable NVIDIA GPU ({type(error).__name__}: {error})"
    return None


def pytest_configure(config: pytest.Config) -> None:
    # Kernels compiled by one run serve the next, and never mix with the user's own cache.
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("WORKBENCH_CACHE_DIR", str(cache.mkdir("kernels")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if on_gpu else None
    if reason is None:
        return
    if config.option.markexpr == "gpu":
        # Asked for by name: a run in which everything is skipped must not look like a success.
        raise pytest.UsageError(f"-m gpu: {reason}")
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=reason))
