"""What all tests share: the GPU marker and a cache of compiled kernels of their own."""

from __future__ import annotations

import os

import pytest

from workbench.compile import gpu_missing


def pytest_configure(config: pytest.Config) -> None:
    # Kernels compiled by one run serve the next, and never mix with the user's own cache.
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("WORKBENCH_CACHE_DIR", str(cache.mkdir("kernels")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_missing() if on_gpu else None
    if reason is None:
        return
    if config.option.markexpr == "gpu":
        # Asked for by name: a run in which everything is skipped must not look like a success.
        raise pytest.UsageError(f"-m gpu: {reason}")
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=reason))
