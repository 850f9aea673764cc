"""What all tests share: the GPU marker and a cache of compiled kernels of their own."""

from __future__ import annotations

import importlib
import os

import pytest


def one_blas_thread() -> None:
    """Load NumPy's and SciPy's BLAS with one thread, and leave subprocesses their own choice.

    The workers of pytest-xdist are as many as the cores; with a pool of BLAS threads in each, the
    threads spin for each other and everything takes two and a half times as long.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        importlib.import_module("numpy")
        importlib.import_module("scipy.linalg")


if "PYTEST_XDIST_WORKER" in os.environ:
    one_blas_thread()


def pytest_configure(config: pytest.Config) -> None:
    # Kernels compiled by one run serve the next, and never mix with the user's own cache.
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("WORKBENCH_CACHE_DIR", str(cache.mkdir("kernels")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from workbench.compile import gpu_missing

    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_missing() if on_gpu else None
    if reason is None:
        return
    if config.option.markexpr == "gpu":
        # Asked for by name: a run in which everything is skipped must not look like a success.
        raise pytest.UsageError(f"-m gpu: {reason}")
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=reason))
