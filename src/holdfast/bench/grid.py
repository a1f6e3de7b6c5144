"""Many jobs: in this process, in several, or on any engine with the futures interface; resumed where they stopped."""

from __future__ import annotations

import functools
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ..errors import ArgumentError, DataError, HoldfastError, HoldfastWarning
from . import data, results
from .catalog import METHODS
from .engines import dask, interrupts_held, processes
from .failures import Failed, Failure, which
from .jobs import Job, chosen, code_version, execute, grid
from .measures import Run
from .protocols import Protocol
from .results import Result, differing

__all__ = ["STRENGTHS", "Failure", "Outcome", "dask", "missing", "others", "processes", "run_all", "swept", "trials"]

STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
SWEEP_SEED = 100  # a sequence of tasks that no table is made of


@dataclass
class Outcome:
    """What came of a grid: the results, by job, and the jobs that failed, with the reason in a line."""

    found: dict[Job, Result]
    failed: dict[Job, str]


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    executor: Executor | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
    planned: Callable[[int, int], None] = lambda waiting, done: None,
    progress: Callable[[Job, Result | None], None] = lambda job, result: None,
) -> Outcome:
    """Run what is not yet in the folder, and write each result there as it comes.

    Without an executor the jobs run here, one after another. `planned` is told how many jobs are to be run and how many
    are there already; `progress` of each job when it has run, with nothing where it failed. A damaged result is told
    of and its job run again. A failure is noted, all of it in a file beside the results, and the others go on; but not
    if results cannot be written.
    """
    _require_writable(folder)
    outcome = Outcome({}, {})
    waiting = []
    for job in dict.fromkeys(jobs):
        done = _done(job, folder, device)
        if done is None:
            waiting.append(job)
        else:
            outcome.found[job] = done
    planned(len(waiting), len(outcome.found))
    work = functools.partial(_attempt, device=device, threads=threads)
    for job, made in _finished(waiting, work, executor):
        if isinstance(made, Failure):
            outcome.failed[job] = made.line
            _write_failure(job, folder, device, made)
        else:
            results.write(job.path(folder, "cuda" if made.on_gpu else "cpu"), made)  # whatever was asked for
            job.error_path(folder, device).unlink(missing_ok=True)
            outcome.found[job] = made
        progress(job, outcome.found.get(job))
    return outcome


def trials(protocols: Sequence[Protocol], methods: Sequence[str], strengths: Sequence[float], tasks: int) -> list[Job]:
    """The runs that a sweep chooses strengths by: on validation data of the first `tasks` tasks of one sequence."""
    short = [_first(each, min(tasks, each.tasks)) for each in protocols]
    tunable = [method for method in methods if METHODS[method].has_strength]
    return grid(short, tunable, [SWEEP_SEED], strengths, validating=True)


def _first(protocol: Protocol, tasks: int) -> Protocol:
    return replace(protocol, tasks=tasks, turn=protocol.angle if protocol.stream == "rotated" else None)


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
    tried = runner(trials(protocols, methods, strengths, tasks))
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


def missing(jobs: Sequence[Job], known: Iterable[Result], device: str = "cpu") -> list[Job]:
    """The jobs that none of these results is of, whatever version of the code made them, on a device of this kind.

    A result from other files of the data than are here is of another job.
    """
    on_gpu = device.startswith("cuda")
    there: dict[tuple[object, ...], list[Result]] = {}
    for one in known:
        if one.on_gpu == on_gpu:
            there.setdefault((*which(one.job), one.chosen), []).append(one)

    def has(job: Job) -> bool:
        here = data.origin(job.protocol.dataset)
        alike = there.get((*which(job.config), job.chosen), ())
        return any(here in (None, one.made.get("data", "")) and not differing([job.config, one.job]) for one in alike)

    return [job for job in jobs if not has(job)]


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


def _attempt(job: Job, device: str, threads: int | None) -> Result | Failure:
    """One job's failure is a line of the report, not the end of all."""
    try:
        return execute(job, device, threads)
    except HoldfastError as error:
        return Failure(str(error), traceback.format_exc())
    except Exception as error:
        return Failure(_said(error), traceback.format_exc())


def _finished(
    jobs: Sequence[Job], work: Callable[[Job], Result | Failure], executor: Executor | None
) -> Iterator[tuple[Job, Result | Failure]]:
    if executor is None:
        for job in jobs:
            yield job, work(job)
        return
    with interrupts_held():  # the first jobs start the workers
        futures = {_submitted(executor, work, job): job for job in jobs}
    for future in as_completed(futures):
        yield futures[future], _received(future)


def _submitted(executor: Executor, work: Callable[[Job], Result | Failure], job: Job) -> Future[Result | Failure]:
    try:
        return executor.submit(work, job)
    except Exception as error:  # its workers are gone already
        future: Future[Result | Failure] = Future()
        future.set_exception(error)
        return future


def _received(future: Future[Result | Failure]) -> Result | Failure:
    """What a worker made of a job. Only what befell the worker itself comes as an error."""
    try:
        made = future.result()
    except CancelledError:
        return Failure("it was called off before it was finished: start the same again.")
    except BrokenExecutor:
        return Failure(
            "its worker process died, twice. It was killed, most likely for want of memory: start the same again, with "
            "fewer workers.",
            traceback.format_exc(),
        )
    except Exception as error:
        return Failure(f"its worker died or could not be reached: {_said(error)}", traceback.format_exc())
    if isinstance(made, Result) and made.made["version"] != code_version():
        return Failure(
            f"its worker has holdfast {made.made['version']}, and this is {code_version()}: install the same on both."
        )
    return made


def _said(error: BaseException) -> str:
    """An error in a line: what kind it is, and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _write_failure(job: Job, folder: Path, device: str, failure: Failure) -> None:
    target = job.error_path(folder, device)
    if failure.traceback:
        made = {"version": code_version(), "device": device, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        results.write(target, Failed(job.config, failure, made))
    else:
        target.unlink(missing_ok=True)  # of an earlier failure


def _done(job: Job, folder: Path, device: str) -> Result | None:
    try:
        return job.done(folder, device)
    except DataError as error:
        warnings.warn(f"{error} Its job is run again.", HoldfastWarning, stacklevel=3)
        return None


def _same(job: Job, other: Job) -> bool:
    return other.protocol.name == job.protocol.name and other.method == job.method


def _require_writable(folder: Path) -> None:
    """Before the work, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except FileExistsError as error:
        raise ArgumentError(f"results cannot be written to {folder}: it is a file, not a folder.") from error
    except OSError as error:
        raise ArgumentError(f"results cannot be written to {folder}: {error}.") from error
