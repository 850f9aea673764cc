"""Threads for the kernels, and SciPy's BLAS held to one thread while they run.

The kernels release the GIL, so plain Python threads run them side by side. Numba's own ``prange``
is not used: of its threading layers one aborts the process when two threads call at once, and
another dies in a child after a fork. Neither is started here, so neither can be in the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any


def available() -> int:
    """How many threads Numba may use: NUMBA_NUM_THREADS, or what `numba.set_num_threads` said."""
    import numba

    try:
        numba.threading_layer()  # raises as long as nobody has used it or set a number of threads
        return int(numba.get_num_threads())
    except ValueError:
        return int(numba.config.NUMBA_NUM_THREADS)


# ------------------------------------------------------------------------------------ the helpers

_lock = threading.Lock()
_helpers: ThreadPoolExecutor | None = None


def share(task: Callable[[], object], threads: int) -> None:
    """Run `task` on this thread and on up to ``threads - 1`` helpers, until all have returned.

    The task takes work until none is left. A helper that is busy with somebody else's is not
    waited for: what it did not begin is done.
    """
    with one_blas_thread():
        futures = [_submit(task) for _ in range(threads - 1)]
        try:
            task()
        finally:
            begun = [future for future in futures if future and not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()


def _submit(task: Callable[[], object]) -> Any:
    global _helpers
    with _lock:
        if _helpers is None:
            import numba

            most = max(1, int(numba.config.NUMBA_NUM_THREADS) - 1)
            _helpers = ThreadPoolExecutor(most, thread_name_prefix="workbench")
        helpers = _helpers
    try:
        return helpers.submit(task)
    except RuntimeError:  # the interpreter shuts down: no new threads, so we do all the work
        return None


# --------------------------------------------------------------------------------------- the BLAS


class Blas:
    """A BLAS library, the first one found among or behind some loaded libraries.

    Attributes
    ----------
    known : bool
        Whether we know how to count its threads; if not, it is left as it is.
    get_threads, set_threads : callable
        The number of threads that a call may use.
    core : str
        For which kind of CPU its kernels are; "" where it does not say.
    """

    # OpenBLAS as in SciPy's wheels, with 64-bit integers, as in distributions; MKL; BLIS.
    _NAMES = (
        ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
        ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
        ("openblas_get_num_threads", "openblas_set_num_threads"),
        ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
        ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
    )

    def __init__(self, libraries: Iterable[ctypes.CDLL]) -> None:
        self.known = False
        self.get_threads: Callable[[], int] = lambda: 1
        self.set_threads: Callable[[int], object] = lambda _: None
        self.core = ""
        for library in libraries:
            for getter, setter in self._NAMES:
                if hasattr(library, getter) and hasattr(library, setter):
                    self.known = True
                    self.get_threads, self.set_threads = library[getter], library[setter]
                    name = getter.replace("num_threads", "corename")
                    if hasattr(library, name):
                        function = library[name]
                        function.restype = ctypes.c_char_p
                        self.core = function().decode()
                    return


def _scipy_libraries() -> Iterator[ctypes.CDLL]:
    import scipy
    from scipy.linalg import cython_blas

    # Numba finds its BLAS through this module; looking a name up in it searches what it is linked
    # with too, except on Windows, where the wheel's own library must be named.
    yield ctypes.CDLL(cython_blas.__file__)
    for path in Path(scipy.__file__).parents[1].glob("scipy.libs/*openblas*"):
        yield ctypes.CDLL(str(path))


@functools.cache
def blas() -> Blas:
    """The library that ``np.dot`` calls inside Numba: SciPy's, which is not NumPy's."""
    return Blas(_scipy_libraries())


_holders = 0
_threads_before = 0


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold the BLAS to one thread; the first to come in saves its number, the last out restores it.

    Our threads are as many as there are cores already, and each calls BLAS by itself.
    """
    global _holders, _threads_before
    library = blas()
    with _lock:
        if _holders == 0:
            _threads_before = library.get_threads()
            library.set_threads(1)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                library.set_threads(_threads_before)


# ------------------------------------------------------------------------------------------ forks


def _before_fork() -> None:
    """Send idle helpers home: newer Pythons warn of a fork in a process with several threads."""
    global _helpers
    with _lock:
        idle, _helpers = (_helpers, None) if _holders == 0 else (None, _helpers)
    if idle is not None:
        idle.shutdown()


def _after_fork() -> None:
    """A child has none of the threads that held something when it was born."""
    global _lock, _helpers, _holders
    _lock = threading.Lock()
    _helpers = None
    if _holders:
        _holders = 0
        blas().set_threads(_threads_before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
