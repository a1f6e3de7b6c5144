"""What jobs run on: worker processes of this machine, or a dask cluster. Both have the futures interface."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..errors import ArgumentError, HoldfastWarning

_ANSWER = 15.0  # seconds that a scheduler is given to answer
_ENDING = 5.0  # seconds that a worker is given to end
_TRIES = 2  # of a job whose worker dies


@contextmanager
def processes(count: int) -> Iterator[Executor]:
    """Worker processes on this machine. Left by an error or Ctrl-C, they are stopped at once.

    One that is killed is replaced. The job that it was at is tried once more, and the others never hear of it.
    """
    others = set(multiprocessing.active_children())
    pool = _Processes(count)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.stop()
        workers = [child for child in multiprocessing.active_children() if child not in others]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(_ENDING)
            if worker.is_alive():
                worker.kill()
        pool.shutdown(cancel_futures=True)  # to its end: Python's own exit trips over a pool that is half closed
        raise


class _Processes(Executor):
    """Pools of one process each, with a thread that waits for it: a process that dies breaks no pool but its own."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count)
        self._idle = [_pool() for _ in range(count)]
        self._starting, self._stopped = threading.Lock(), False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._made, work, *args, **kwargs)

    def stop(self) -> None:
        """From now on no process is started and no job is begun."""
        with self._starting:
            self._stopped = True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        for pool in self._idle:
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _made(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a process makes of a job, and another one where the first dies."""
        pool, died = self._idle.pop(), 0
        try:
            while True:
                try:
                    return self._begun(pool, work, *args, **kwargs).result()
                except BrokenExecutor:
                    pool.shutdown()
                    pool, died = _pool(), died + 1
                    if died == _TRIES:
                        raise
                    if not self._stopped:
                        warnings.warn(
                            "a worker process died, most likely for want of memory, and was replaced: its job is tried "
                            "once more.", HoldfastWarning, stacklevel=2,
                        )  # fmt: skip
        finally:
            self._idle.append(pool)

    def _begun(self, pool: Executor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        with self._starting, interrupts_held():  # a pool's first job starts its process
            if self._stopped:
                raise CancelledError
            return pool.submit(work, *args, **kwargs)


def _pool() -> Executor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)


@contextmanager
def dask(address: str) -> Iterator[Executor]:
    """The workers of a dask cluster, by the address of its scheduler. Left by an error, its jobs are called off."""
    try:
        from distributed import Client
        from distributed.comm import resolve_address
    except ImportError as missing:
        raise ArgumentError(f"{missing.name} is not installed: install holdfast with its `dask` extra.") from missing
    try:
        resolve_address(address)  # a client that cannot read its address waits half a minute before it ends
        client = Client(address, timeout=_ANSWER, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(f"no dask scheduler answers at {address!r}: {said.rstrip('.')}.") from error
    with client:
        if not client.nthreads():
            warnings.warn(f"{address} has no workers yet: the jobs wait for one.", HoldfastWarning, stacklevel=3)
        executor = client.get_executor(pure=False)
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False)
            raise


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes that are started meanwhile never hear of Ctrl-C: it is for the one that started them to tell them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where `_begin` has to do
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """In a worker: leave Ctrl-C to the main process, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
