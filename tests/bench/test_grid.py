"""Many jobs: resumed where they stopped, whatever happens to one of them."""

import errno
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from holdfast.bench import data, engines, grid
from holdfast.bench.grid import Outcome, dask, missing, others, processes, run_all, swept, trials
from holdfast.bench.jobs import Job, code_version, made_on
from holdfast.bench.jobs import grid as combined
from holdfast.bench.measures import Run
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.results import Result, with_failures, write
from holdfast.errors import ArgumentError, DataError, HoldfastWarning

QUICK = PROTOCOLS["digits"].changed(tasks=2, epochs=1)
DATE = "2026-01-01T00:00:00+00:00"  # of all: results are compared whole
JOBS = combined([QUICK], ["fine-tuning", "ewc"], [0, 1])


def made(job, average=0.5, **changes):
    run = Run(job.method, job.seed, [[average, 0.1], [average, average]])
    return Result(job.config, run, {**made_on("cpu", job.chosen), "date": DATE, **changes})


@pytest.fixture
def executed(monkeypatch):
    """The jobs that were run, each without its work."""
    seen = []

    def execute(job, device, threads):
        seen.append(job)
        return made(job)

    monkeypatch.setattr(grid, "execute", execute)
    return seen


def failing(monkeypatch, error, job=JOBS[1]):
    def execute(one, device, threads):
        if one == job:
            raise error
        return made(one)

    monkeypatch.setattr(grid, "execute", execute)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_there_is_not_run_again(tmp_path, executed):
    planned, heard = [], []
    watch = {"planned": lambda *counts: planned.append(counts), "progress": lambda job, result: heard.append(job)}
    first = run_all(JOBS[:2], tmp_path, **watch)
    second = run_all([*JOBS, *JOBS], tmp_path, **watch)
    assert executed == JOBS == heard
    assert planned == [(2, 0), (2, 2)]
    assert list(first.found) == JOBS[:2]
    assert second == Outcome({job: made(job) for job in JOBS}, {})
    assert files(tmp_path) == sorted(job.path(tmp_path).name for job in JOBS)


def test_what_other_versions_made_is_not_missing_where_all_their_numbers_are_the_same():
    first, second, third, fourth = JOBS
    known = [
        made(first, version="0.0.1"),
        made(second, device="NVIDIA H200"),
        made(replace(third, chosen=True)),
        made(replace(fourth, protocol=replace(QUICK, training=replace(QUICK.training, lr=0.5)))),
    ]
    assert missing(JOBS, known) == [second, third, fourth]
    assert missing(JOBS, known, "cuda:0") == [first, third, fourth]
    for device in ("NVIDIA A100-SXM4-80GB", "Tesla T4"):
        assert missing(JOBS, [made(second, device=device)], "cuda") == [first, third, fourth]
    larger = replace(QUICK, training=replace(QUICK.training, batch_size=QUICK.training.batch_size * 2))
    assert missing([first], [made(replace(first, protocol=larger))]) == [first]
    older = {**first.config, "description": "in other words", "numbers": {**first.config["numbers"]}}
    del older["numbers"]["scaled"], older["chosen"]  # which that version did not have
    assert missing([first], [replace(known[0], job=older)]) == []
    chosen = replace(known[0], job=older, made={**known[0].made, "strength_chosen_on": "validation"})
    assert missing([first, replace(first, chosen=True)], [chosen]) == [first]


def test_a_result_from_other_files_of_the_data_is_none_of_those_that_need_not_be_run(monkeypatch):
    known = [made(JOBS[0]), replace(made(JOBS[1]), made={**made(JOBS[1]).made, "data": "jpegs"})]
    for here, left in (("", [JOBS[1]]), ("jpegs", [JOBS[0]]), ("pixels", [*JOBS[:2]]), (None, [])):
        monkeypatch.setattr(data, "origin", lambda name, here=here: here)
        assert missing(JOBS[:2], known) == left


def test_a_damaged_result_is_told_and_its_job_run_again(tmp_path, executed):
    run_all(JOBS, tmp_path)
    path = JOBS[2].path(tmp_path)
    path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.warns(HoldfastWarning, match=rf"{path.name} is not a result .* Its job is run again"):
        run_all(JOBS, tmp_path)
    assert executed == [*JOBS, JOBS[2]]
    assert run_all(JOBS, tmp_path).found[JOBS[2]] == made(JOBS[2])


@pytest.mark.parametrize("what", ["another job", "another version", "another device"])
def test_a_result_that_is_not_what_its_name_says_is_told_and_its_job_run_again(tmp_path, executed, what):
    run_all(JOBS, tmp_path)
    path, right = JOBS[2].path(tmp_path), made(JOBS[2])
    wrong = {
        "another job": made(JOBS[0]),
        "another version": replace(right, made={**right.made, "version": "0.0.1+abc"}),
        "another device": replace(right, made={**right.made, "device": "NVIDIA H200"}),
    }
    write(path, wrong[what])
    with pytest.warns(HoldfastWarning, match=rf"{path.name} holds another run's result .* Its job is run again"):
        run_all(JOBS, tmp_path)
    assert executed == [*JOBS, JOBS[2]]
    assert run_all(JOBS, tmp_path).found[JOBS[2]] == right


def test_results_of_another_version_are_counted_and_left_alone(tmp_path, executed):
    old = tmp_path / "old.json"
    write(old, made(JOBS[0], version="0.0.1+abc"))
    content = old.read_bytes()
    assert others(tmp_path) == {"0.0.1+abc": 1}
    assert others(tmp_path / "none") == {}
    run_all(JOBS[:1], tmp_path)
    assert executed == JOBS[:1]
    assert others(tmp_path) == {"0.0.1+abc": 1}
    assert old.read_bytes() == content


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DataError("no data here."), "no data here."),
        (RuntimeError("\nCUDA error: out of luck\nCompile with more\n"), "RuntimeError: CUDA error: out of luck"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_a_failure_is_a_line_and_a_file_and_the_others_go_on(tmp_path, monkeypatch, error, line):
    failing(monkeypatch, error)
    heard = []
    outcome = run_all(JOBS, tmp_path, progress=lambda job, result: heard.append(result is not None))
    assert outcome.failed == {JOBS[1]: line}
    assert heard == [True, False, True, True]
    assert list(outcome.found) == [JOBS[0], *JOBS[2:]]
    _, (failed,) = with_failures(tmp_path)
    assert failed.job == JOBS[1].config
    assert failed.how.line == line
    assert failed.how.traceback.startswith("Traceback")
    assert "in execute" in failed.how.traceback
    assert failed.made["version"] == code_version()
    monkeypatch.setattr(grid, "execute", lambda job, device, threads: made(job))
    assert run_all(JOBS, tmp_path).failed == {}
    assert not JOBS[1].error_path(tmp_path).exists()
    assert with_failures(tmp_path)[1] == []


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_stops_all_at_once(tmp_path, executed, monkeypatch, name):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    run_all(JOBS[:1], tmp_path)
    monkeypatch.setattr(os, name, full)
    with pytest.raises(DataError, match="No space left on device"):
        run_all(JOBS, tmp_path)
    assert executed == JOBS[:2]
    assert files(tmp_path) == [JOBS[0].path(tmp_path).name]


def test_a_failure_that_cannot_be_written_down_stops_all_too(tmp_path, monkeypatch):
    failing(monkeypatch, RuntimeError("x"))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    run_all(JOBS[:1], tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"error\.json could not be written: .*No space left"):
        run_all(JOBS, tmp_path)


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_job(tmp_path, executed):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ArgumentError, match="it is a file, not a folder"):
        run_all(JOBS, tmp_path / "file")
    with pytest.raises(ArgumentError, match="results cannot be written to"):
        run_all(JOBS, tmp_path / "file" / "below")
    assert executed == []


class Broken(ThreadPoolExecutor):
    """Runs the first job; then its workers are dead, and those who come later are told so at once."""

    submitted = 0

    def submit(self, work, job):
        self.submitted += 1
        future = Future()
        if self.submitted == 1:
            future.set_result(work(job))
        elif self.submitted == 2:
            future.set_exception(BrokenProcessPool("A process in the process pool was terminated abruptly"))
        elif self.submitted == 3:
            future.cancel()
            future.set_running_or_notify_cancel()
        else:
            raise BrokenProcessPool("A child process terminated abruptly, the process pool is not usable anymore")
        return future


def test_dead_workers_fail_what_was_not_finished_and_nothing_else(tmp_path, executed):
    JOBS[1].error_path(tmp_path).write_text("of another time", encoding="utf-8")
    outcome = run_all(JOBS, tmp_path, Broken())
    assert list(outcome.found) == JOBS[:1]
    assert "fewer workers" in outcome.failed[JOBS[1]]
    assert "called off" in outcome.failed[JOBS[2]]
    assert "fewer workers" in outcome.failed[JOBS[3]]
    assert [one.how.line for one in with_failures(tmp_path)[1]] == [outcome.failed[JOBS[1]], outcome.failed[JOBS[3]]]


def test_a_worker_that_an_engine_lost_is_told_with_what_the_engine_says(tmp_path):
    class Lost(ThreadPoolExecutor):
        def submit(self, work, job):
            future = Future()
            future.set_exception(KeyError("four workers died\nwhile running it"))
            return future

    outcome = run_all(JOBS[:1], tmp_path, Lost())
    assert "its worker died or could not be reached: KeyError: " in outcome.failed[JOBS[0]]
    assert "four workers died" in JOBS[0].error_path(tmp_path).read_text(encoding="utf-8")


def test_a_worker_with_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "execute", lambda job, device, threads: made(job, version="9+abc"))
    outcome = run_all(JOBS[:1], tmp_path, ThreadPoolExecutor(1))
    assert outcome.failed[JOBS[0]] == (
        f"its worker has holdfast 9+abc, and this is {code_version()}: install the same on both."
    )
    assert files(tmp_path) == []


def test_a_sweep_chooses_on_validation_data_and_runs_what_it_chose():
    seen = []

    def runner(jobs):
        seen.append(jobs)
        best = {"ewc": 10.0, "l2": 1.0}
        return Outcome({job: made(job, 0.9 if job.strength == best.get(job.method) else 0.2) for job in jobs}, {})

    full = PROTOCOLS["digits"]
    outcome = swept([full], ["ewc", "joint", "l2"], [0, 1], [1.0, 10.0], 3, runner)
    tried, final = seen
    assert tried == trials([full], ["ewc", "joint", "l2"], [1.0, 10.0], 3)
    assert {(job.method, job.strength, job.protocol.tasks, job.validating) for job in tried} == {
        (method, strength, 3, True) for method in ("ewc", "l2") for strength in (1.0, 10.0)
    }
    assert not {job.seed for job in tried} & {0, 1}
    assert {(job.method, job.strength, job.chosen) for job in final} == {
        ("ewc", 10.0, True), ("joint", 1.0, False), ("l2", 1.0, True),
    }  # fmt: skip
    assert all(job.protocol == full and not job.validating for job in final)
    assert len(outcome.found) == 4 + 6


def test_a_sweep_whose_trials_all_failed_runs_the_rest():
    def runner(jobs):
        return Outcome(
            {job: made(job) for job in jobs if not job.validating}, {job: "no" for job in jobs if job.validating}
        )

    outcome = swept([QUICK], ["ewc", "joint"], [0], [1.0], 2, runner)
    assert [job.method for job in outcome.found] == ["joint"]
    assert "no strength could be chosen" in outcome.failed[Job(QUICK, "ewc", 0)]


def test_processes_make_the_same_runs(tmp_path):
    here = run_all(JOBS[:2], tmp_path / "here", threads=1)
    with processes(1) as pool:
        there = run_all(JOBS[:2], tmp_path / "there", pool, threads=1)
    assert [one.run.accuracy for one in there.found.values()] == [one.run.accuracy for one in here.found.values()]
    assert {one.made["version"] for one in there.found.values()} == {code_version()}
    assert files(tmp_path / "there") == files(tmp_path / "here")


def test_a_process_that_was_killed_is_replaced(tmp_path):
    with processes(1) as pool:
        os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
        with pytest.warns(HoldfastWarning, match="a worker process died.* its job is tried once more"):
            outcome = run_all(JOBS[:2], tmp_path, pool, threads=1)
    assert list(outcome.found) == JOBS[:2]
    assert outcome.failed == {}


def deadly(folder, name, times):
    """Kills the process that it runs in, so many times; each is written down."""
    with open(folder / name, "a", encoding="utf-8") as file:
        file.write("x")
    if (folder / name).stat().st_size <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def test_a_job_whose_process_dies_is_tried_twice_and_the_others_once(tmp_path):
    times = {"good": 0, "unlucky": 1, "deadly": 9, "patient": 0}

    def outcomes(pool):
        futures = {name: pool.submit(deadly, tmp_path, name, count) for name, count in times.items()}
        return {name: future.exception() or future.result() for name, future in futures.items()}

    with processes(2) as pool, pytest.warns(HoldfastWarning, match="a worker process died"):
        made = outcomes(pool)
    assert isinstance(made.pop("deadly"), BrokenProcessPool)
    assert made == {name: name for name in ("good", "unlucky", "patient")}
    begun = {name: (tmp_path / name).stat().st_size for name in times}
    assert begun == {"good": 1, "unlucky": 2, "deadly": 2, "patient": 1}


def test_processes_that_are_left_by_an_error_are_stopped_and_not_replaced():
    waiting = []

    def leave():
        with processes(1) as pool:
            pool.submit(os.getpid).result()
            waiting.extend(pool.submit(time.sleep, 60) for _ in range(3))
            raise ZeroDivisionError

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        leave()
    assert all(future.done() for future in waiting)
    assert multiprocessing.active_children() == []
    assert time.monotonic() - start < 30


@pytest.fixture
def distributed():
    return pytest.importorskip("distributed")


def test_dask_makes_the_same_runs_and_the_results_are_written_here(tmp_path, distributed):
    here = run_all(JOBS, tmp_path / "here", threads=1)
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        dask(cluster.scheduler_address) as executor,
    ):
        there = run_all(JOBS, tmp_path / "there", executor, threads=1)
        broken = replace(QUICK, dataset="nothing")
        failed = run_all([Job(broken, "ewc", 0)], tmp_path / "there", executor, threads=1)
    assert there.found.keys() == here.found.keys()
    assert all(there.found[job].run.accuracy == here.found[job].run.accuracy for job in JOBS)
    assert set(files(tmp_path / "there")) > set(files(tmp_path / "here"))
    assert list(failed.failed.values()) == ["KeyError: 'nothing'"]


def test_dask_without_workers_is_told_and_without_a_scheduler_refused(distributed, monkeypatch):
    cluster = distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=None)
    with cluster, pytest.warns(HoldfastWarning, match="has no workers yet"), dask(cluster.scheduler_address):
        pass
    monkeypatch.setattr(engines, "_ANSWER", 0.5)
    for address in ("tcp://127.0.0.1:9", "nowhere", "http://127.0.0.1:9", "tcp://no.host.invalid:8786"):
        with pytest.raises(ArgumentError, match="no dask scheduler answers at") as told, dask(address):
            pass
        assert "\n" not in str(told.value)


def test_dask_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ArgumentError, match="`dask` extra"), dask("tcp://127.0.0.1:8786"):
        pass


def test_a_sweep_looks_at_the_first_tasks_of_those_that_follow():
    protocol = PROTOCOLS["mnist-rotated"]
    (short,) = {job.protocol for job in trials([protocol], ["ewc"], [1.0, 10.0], 3)}
    assert (short.tasks, short.angle) == (3, protocol.angle) == (3, 36.0)
    assert protocol.changed(tasks=10).angle == 18.0  # half a turn in all
    assert protocol.changed(turn=10.0).changed(tasks=3).angle == 10.0
    with pytest.raises(ArgumentError, match="nothing to forget"):
        protocol.changed(tasks=0)
    with pytest.raises(ArgumentError, match="vcl turns no images"):
        PROTOCOLS["vcl"].changed(turn=10.0)
    for pixels in ({"scaled": True}, {"margin": 2}):
        with pytest.raises(ArgumentError, match="takes its pixels as they are"):
            PROTOCOLS["hsu-task"].changed(**pixels)
