"""Many jobs: in this process, in several, or on any engine with the futures interface; resumed where they stopped."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ArgumentError, DataError, HoldfastError, HoldfastWarning
from . import results
from .catalog import METHODS
from .jobs import Job, chosen, code_version, execute, grid
from .measures import Run
from .protocols import Protocol
from .results import Result

STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
_SWEEP_SEED = 100  # a sequence of tasks that no table is made of


@dataclass
class Outcome:
    """What came of a grid: the results, by job, and the jobs that failed with their errors."""

    found: dict[Job, Result]
    failed: dict[Job, str]


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    executor: Executor | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
    progress: Callable[[Job, Result | None], None] = lambda job, result: None,
) -> Outcome:
    """Run what is not yet in the folder, and write each result there as it comes.

    Without an executor the jobs run here, one after another. `progress` is called after each job, with nothing where
    it failed. A damaged result is told of and its job run again. A failure is noted and the others go on, but not if
    results cannot be written.
    """
    _require_writable(folder)
    outcome = Outcome({}, {})
    waiting = []
    for job in dict.fromkeys(jobs):
        done = _done(job, folder)
        if done is None:
            waiting.append(job)
        else:
            outcome.found[job] = done
            progress(job, done)
    work = functools.partial(execute, device=device, threads=threads)
    for job, finished in _finished(waiting, work, executor):
        try:
            result = finished()
        except HoldfastError as error:
            outcome.failed[job] = str(error)
        except Exception:  # one job's failure is a line of the report, not the end of all
            outcome.failed[job] = traceback.format_exc()
        else:
            results.write(job.path(folder), result)
            outcome.found[job] = result
        progress(job, outcome.found.get(job))
    return outcome


def swept(
    protocols: Sequence[Protocol],
    methods: Sequence[str],
    seeds: Sequence[int],
    strengths: Sequence[float],
    tasks: int,
    runner: Callable[[Sequence[Job]], Outcome],
) -> Outcome:
    """Choose each method's strength on validation data of one sequence's first `tasks` tasks, then run it with that.

    The sequence is not used again, and no test data is looked at. Methods without a strength run as they are.
    """
    short = {each.name: replace(each, tasks=min(tasks, each.tasks)) for each in protocols}
    tunable = [method for method in methods if METHODS[method].has_strength]
    tried = runner(grid(list(short.values()), tunable, [_SWEEP_SEED], strengths, validating=True))
    runs: dict[Job, Run] = {job: result.run for job, result in tried.found.items()}
    final = []
    for job in grid(protocols, methods, seeds):
        if METHODS[job.method].has_strength:
            mine = functools.partial(_same, job)
            if not any(mine(other) for other in runs):
                tried.failed[job] = "no strength could be chosen: every validation run failed"
                continue
            job = replace(job, strength=chosen(runs, mine), chosen=True)
        final.append(job)
    outcome = runner(final)
    return Outcome({**tried.found, **outcome.found}, {**tried.failed, **outcome.failed})


def others(folder: Path) -> dict[str, int]:
    """How many results in a folder are of other versions of the code, by version."""
    counts: dict[str, int] = {}
    for each in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            version = str(results.read(each).made.get("version"))
        except DataError:
            continue
        if version != code_version():
            counts[version] = counts.get(version, 0) + 1
    return counts


@contextmanager
def processes(count: int) -> Iterator[Executor]:
    """Worker processes on this machine. Left by an error or Ctrl-C, they are stopped at once."""
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise


@contextmanager
def dask(address: str) -> Iterator[Executor]:
    """The workers of a dask cluster, by the address of its scheduler."""
    try:
        from distributed import Client
    except ImportError as missing:
        raise ArgumentError(f"{missing.name} is not installed: install holdfast with its `dask` extra.") from missing
    try:
        client = Client(address, timeout=15)
    except (OSError, TimeoutError, ValueError) as error:
        raise ArgumentError(f"no dask scheduler answers at {address!r}: {error}.") from error
    with client:
        yield client.get_executor(retries=1)


def _finished(
    jobs: Sequence[Job], work: Callable[[Job], Result], executor: Executor | None
) -> Iterator[tuple[Job, Callable[[], Result]]]:
    if executor is None:
        for job in jobs:
            yield job, functools.partial(work, job)
        return
    futures: dict[Future[Result], Job] = {executor.submit(work, job): job for job in jobs}
    for future in as_completed(futures):
        yield futures[future], future.result


def _done(job: Job, folder: Path) -> Result | None:
    try:
        return job.done(folder)
    except DataError as error:
        warnings.warn(f"{error} It is run again.", HoldfastWarning, stacklevel=3)
        return None


def _same(job: Job, other: Job) -> bool:
    return other.protocol.name == job.protocol.name and other.method == job.method


def _require_writable(folder: Path) -> None:
    """Before the work, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        raise ArgumentError(f"results cannot be written to {folder}: {error}.") from error


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
