"""holdfast bench as a user runs it: what it refuses, what it survives, what it leaves behind."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from holdfast.bench import grid
from holdfast.bench.jobs import Job, made_on
from holdfast.bench.jobs import grid as combined
from holdfast.bench.measures import Run
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.results import Result, collected, read, write
from holdfast.cli import app
from holdfast.cli.progress import Pace, Shown

runner = CliRunner(env={"COLUMNS": "120"})
QUICK = PROTOCOLS["digits"].changed(tasks=2, epochs=1)
NUMBERS = ["--tasks", "2", "--epochs", "1", "--threads", "1", "--device", "cpu"]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def bench(*words, **options):
    return runner.invoke(app, ["bench", *map(str, words)], **options)


def made(job, version=None):
    made = made_on("cpu") | ({"version": version} if version else {})
    return Result(job.config, Run(job.method, job.seed, [[0.9, 0.1], [0.7, 0.8]]), made)


@pytest.fixture
def executed(monkeypatch):
    """The jobs that were run, each without its work."""
    seen = []

    def execute(job, device, threads):
        seen.append(job)
        return made(job)

    monkeypatch.setattr(grid, "execute", execute)
    return seen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digots"], "there is no protocol 'digots'. Did you mean digits"),
        (["digits", "--methods", "ewk"], "there is no method 'ewk'. Did you mean ewc"),
        (["digits", "--methods", ","], "names no method"),
        (["--seeds", "0"], "--seeds 0 is how many, from 1 to 1000"),
        (["--seeds", "123456789"], "to say which, write a comma after it"),
        (["--seeds", "12345678901,"], "a seed is a whole number from 0"),
        (["--seeds", "12345678901,", "--commands"], "a seed is a whole number from 0"),
        (["--seeds", "x"], "--seeds takes numbers"),
        (["--seeds", "-3"], "--seeds takes numbers"),
        (["--strengths", "-1"], "--strengths takes numbers"),
        (["--strengths", "1,nan"], "--strengths takes numbers"),
        (["--strengths", ""], "--strengths takes numbers"),
        (["--tasks", "1"], "nothing to forget: it takes 2 or more"),
        (["digits-class", "--tasks", "9"], "has no more than 5 tasks"),
        (["--epochs", "1", "--steps", "2"], "give one of them"),
        (["--loss", "nonsense"], "a loss is one of cross-entropy, squared, tokens"),
        (["--loss", "tokens"], "tokens are for text alone"),
        (["text", "--loss", "squared"], "tokens are for text alone"),
        (["--loss", "squared", "--label-smoothing", "0.1"], "does not apply to the squared loss"),
        (["--label-smoothing", "2"], "label_smoothing is 0 or more"),
        (["--device", "nonsense"], "there is no device 'nonsense'"),
        (["--device", "cuda"], "no GPU that torch can use"),
        (["--workers", "2", "--dask", "tcp://127.0.0.1:8786"], "not both"),
        (["digits", "text", "--methods", "mas"], "mas does not apply to text: it is not for text"),
        (["text", "--methods", "ewc", "--sweep"], "text has no validation data to choose a strength on"),
        (["digits", "--methods", "joint,frozen", "--sweep"], "none has one: joint, frozen"),
        (["digits", "--sweep-tasks", "3"], "give both"),
        (["--sweep", "--besides", "{file}"], "give one of the two"),
        (["--besides", "{file}"], "is not a folder of results, nor a file of them"),
        (["--besides", "elsewhere.jsonl", "--device", "cpu"], "is not a folder of results, nor a file of them"),
        (["--besides", "{file}", "--commands"], "auto is another machine's to say: give --device"),
        (["digits", "--methods", "all,kroneker"], "Did you mean kronecker"),
        (["cifar10-class", "--methods", "ewc", "--workers", "2"], "CIFAR-10 was not found"),
        (["--out", "{file}"], "it is a file, not a folder"),
        (["--out", "{file}/below"], "results cannot be written to"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_any_job(tmp_path, executed, monkeypatch, words, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {"HOLDFAST_OFFLINE": "1", "HOLDFAST_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    result = bench(*(word.format(file=tmp_path / "file") for word in words))
    assert result.exit_code == 1
    assert said in result.output
    assert result.output.count("\n") == 1
    assert executed == []


def test_results_of_another_version_and_damaged_ones_are_told_in_a_line_each(tmp_path, executed):
    one, two = combined([QUICK], ["ewc"], [0, 1])
    write(tmp_path / "old.json", made(one, version="0.0.1+abc"))
    two.path(tmp_path).write_text("{", encoding="utf-8")
    result = bench("digits", "--methods", "ewc", "--seeds", "2", "--out", tmp_path, *NUMBERS)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path} has 1 result of holdfast 0.0.1+abc, kept and not used.\n" in result.output
    told = next(line for line in result.output.splitlines() if "Its job is run again." in line)
    assert told.startswith(str(two.path(tmp_path)))
    assert "Warning" not in result.output
    assert executed == [one, two]
    assert read(two.path(tmp_path)) == made(two)
    assert (tmp_path / "old.json").exists()


def test_without_a_terminal_there_is_a_line_for_each_job_and_no_bar(tmp_path, executed):
    words = ["digits", "--methods", "ewc,joint", "--out", tmp_path, *NUMBERS]
    assert bench(*words, "--seeds", "1").exit_code == 0
    result = bench(*words, "--seeds", "2")
    assert re.findall(r"^\d/4 .*", result.output, flags=re.MULTILINE) == [
        "3/4 digits (epochs 1, tasks 2): ewc at 1, seed 1: 75.0 %",
        "4/4 digits (epochs 1, tasks 2): joint, seed 1: 75.0 %",
    ]
    assert "2 of 4 jobs are there already." in result.output
    assert not set(result.output) & set("━╸╺\x1b")


def test_on_a_terminal_a_bar_tells_jobs_done_and_the_time_left():
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    jobs = combined([QUICK], ["ewc"], [0, 1])
    with Shown(screen, 4) as shown:
        shown.planned(waiting=2, done=2)
        shown.finished(jobs[0], made(jobs[0]))
        shown.finished(jobs[1], None)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue()).replace("\r", "\n").splitlines()
    assert "2 of 4 jobs are there already." in lines
    assert f"4/4 {jobs[1].name}: failed" in lines
    last = next(line for line in reversed(lines) if "━" in line)
    assert re.search(r"4/4 +0:00:0\d +0:00:00 left digits \(epochs 1, tasks 2\): ewc at 1, seed 1", last)
    assert len(last) <= 100


def test_the_time_left_is_by_the_jobs_that_were_run_now(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(10)
    now[0] += 7
    pace.found(6)
    assert pace.left == "-:--:--"
    now[0] += 20
    pace.finished()
    assert pace.left == "0:01:00"  # three more at 20 s each
    now[0] += 5
    assert pace.left == "0:00:55"
    now[0] += 600
    assert pace.left == "0:00:00"


def test_methods_that_not_all_protocols_can_have_are_named(tmp_path, executed):
    result = bench("digits", "digits-class", "--methods", "all", "--seeds", "1", "--out", tmp_path / "both", *NUMBERS)
    assert "left out" not in result.output
    executed.clear()
    result = bench("digits", "text", "--methods", "all", "--seeds", "1", "--out", tmp_path / "mixed", "--epochs", "1")
    assert "left out, as not all of these protocols can have it: " in " ".join(result.output.split())
    assert not {"mas", "own-text"} & {job.method for job in executed}


def test_a_sweep_counts_both_its_stages(tmp_path, executed):
    result = bench(
        "digits", "--methods", "ewc,l2,joint", "--seeds", "2", "--sweep", "--strengths", "1,10,10", "--out", tmp_path,
        *NUMBERS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "10/10 " in result.output  # 2 methods × 2 strengths, and 3 methods × 2 seeds
    assert len(executed) == 10
    assert sum(job.validating for job in executed) == 4
    assert "did best at" not in result.output  # all are as good


def test_jobs_that_fail_are_told_and_the_others_go_on(tmp_path, monkeypatch):
    def execute(job, device, threads):
        if job.method == "ewc":
            raise RuntimeError("[red]no luck[/red]\nmore of it")
        return made(job)

    monkeypatch.setattr(grid, "execute", execute)
    words = ["digits", "--methods", "ewc,joint", "--seeds", "1", "--out", tmp_path, *NUMBERS]
    result = bench(*words)
    assert result.exit_code == 1
    failure = Job(QUICK, "ewc", 0).error_path(tmp_path)
    line = f"failed {Job(QUICK, 'ewc', 0).name}: RuntimeError: [red]no luck[/red] All of it: {failure}"
    assert line in result.output.splitlines()
    assert "more of it" in json.loads(failure.read_text(encoding="utf-8"))["traceback"]
    assert len(collected(tmp_path)) == 1
    monkeypatch.setattr(grid, "execute", lambda job, device, threads: made(job))
    assert bench(*words).exit_code == 0
    assert not failure.exists()


@pytest.mark.parametrize(("seeds", "which"), [(2, ""), (5, "; and 2 more")])
def test_jobs_that_fail_alike_are_told_in_one_line(tmp_path, monkeypatch, seeds, which):
    def execute(job, device, threads):
        raise RuntimeError("no luck")

    monkeypatch.setattr(grid, "execute", execute)
    result = bench("digits", "--methods", "ewc", "--seeds", seeds, "--out", tmp_path, *NUMBERS)
    jobs = [Job(QUICK, "ewc", seed) for seed in range(seeds)]
    names = "; ".join(job.name for job in jobs[:3]) + which
    assert [line for line in result.output.splitlines() if line.startswith("failed ")] == [
        f"failed {seeds} jobs ({names}): RuntimeError: no luck All of it: {jobs[0].error_path(tmp_path)}"
    ]


def test_a_failure_on_a_gpu_points_to_all_of_it(tmp_path, monkeypatch):
    def execute(job, device, threads):
        raise RuntimeError("no luck")

    monkeypatch.setattr(grid, "execute", execute)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = bench("digits", "--methods", "ewc", "--seeds", "1", "--out", tmp_path, *NUMBERS[:-1], "auto")
    (written,) = tmp_path.iterdir()
    assert written == Job(QUICK, "ewc", 0).error_path(tmp_path, "cuda")
    assert f"RuntimeError: no luck All of it: {written}\n" in result.output


def test_a_full_disk_is_one_line(tmp_path, executed, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = bench("digits", "--methods", "joint", "--seeds", "3", "--out", tmp_path, *NUMBERS)
    assert result.exit_code == 1
    assert re.fullmatch(r".* could not be written: .*No space left on device.*\n", result.output)
    assert len(executed) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_report_bundles_what_it_reads_and_reads_what_it_bundled(tmp_path, executed):
    pytest.importorskip("matplotlib")
    folder, bundle = tmp_path / "results", tmp_path / "all.jsonl"
    bench("digits", "--methods", "ewc,joint", "--seeds", "2", "--out", folder, *NUMBERS)
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    first = runner.invoke(app, ["report", str(folder), "--out", str(pages[0]), "--bundle", str(bundle)])
    assert first.exit_code == 0, first.output
    assert len(collected(bundle)) == 4
    with open(bundle, "a", encoding="utf-8") as file:
        file.write("{\n")
    second = runner.invoke(app, ["report", str(bundle), "--out", str(pages[1])])
    assert second.exit_code == 0, second.output
    assert f"{bundle}, line 5 is not a result" in second.output
    wrong = runner.invoke(app, ["report", str(folder), "--out", str(pages[0]), "--bundle", str(tmp_path / "all.json")])
    assert wrong.exit_code == 1
    assert "ends in .jsonl" in wrong.output


def test_what_other_results_have_is_left_out_whatever_version_made_it(tmp_path, executed):
    there, known = tmp_path / "results", tmp_path / "known"
    known.mkdir()
    old = made(Job(QUICK, "ewc", 1), "0.0.1+abcdef00")
    write(known / "old.json", old)
    asked = ["digits", "--methods", "ewc,joint", "--seeds", "2", "--besides", known]
    told = bench(*asked, "--commands", *NUMBERS)
    assert "known has 1 of 4 runs." in told.stderr
    assert len(told.stdout.splitlines()) == 3
    assert bench(*asked, "--out", there, *NUMBERS).exit_code == 0
    assert executed == [Job(QUICK, "ewc", 0), Job(QUICK, "joint", 0), Job(QUICK, "joint", 1)]
    write(known / "new.json", replace(old, made={**old.made, "device": "NVIDIA H200"}))
    assert "known has 1 of 4 runs." in bench(*asked, "--commands", *NUMBERS).stderr  # another device's is another run


def test_so_many_seeds_leave_out_the_one_that_strengths_are_chosen_on():
    """Any number is taken: 101 and more were refused, for having seed 100 among them."""
    lines = bench("digits", "--methods", "ewc", "--seeds", "102", "--commands").output.splitlines()
    seeds = [int(line.split("--seeds ")[1].split(",")[0]) for line in lines]
    assert seeds == [*range(100), 101, 102]
    assert bench("digits", "--seeds", "99,100", "--commands").exit_code == 1


def test_the_commands_are_the_jobs_of_the_grid(tmp_path, executed):
    folder = tmp_path / "a folder; with $signs"
    words = ["digits", "--methods", "ewc,joint", "--seeds", "2", "--strengths", "0.1,0.30000000000000004"]
    result = bench(*words, "--tasks", "2", "--epochs", "1", "--label-smoothing", "0.05", "--out", folder, "--commands")
    lines = [shlex.split(line) for line in result.output.splitlines()]
    assert not folder.exists()
    for number, line in enumerate(lines, 1):
        assert line[:2] == ["holdfast", "bench"]
        assert runner.invoke(app, line[1:]).exit_code == 0
        assert len(executed) == number  # each is one job
    protocol = PROTOCOLS["digits"].changed(tasks=2, epochs=1, label_smoothing=0.05)
    assert executed == combined([protocol], ["ewc", "joint"], [0, 1], [0.1, 0.30000000000000004])


def test_a_command_makes_the_result_that_the_grid_looks_for(tmp_path):
    words = ["--methods", "ewc", "--seeds", "1,", "--strengths", "3", "--out", tmp_path, *NUMBERS]
    (line,) = bench("digits", *words, "--commands").output.splitlines()
    subprocess.run([sys.executable, "-m", *shlex.split(line)], check=True, capture_output=True, env=NO_GPU)
    assert [path.name for path in tmp_path.iterdir()] == [Job(QUICK, "ewc", 1, 3.0).path(tmp_path).name]
    assert "1 of 1 jobs are there already." in bench("digits", *words).output


def test_a_sweep_has_a_command_for_each_method_and_says_why(tmp_path, executed):
    sweep = ["--strengths", "1,10", "--sweep", "--sweep-tasks", "2"]
    words = ["digits", "--methods", "ewc,l2,joint", "--seeds", "2", *sweep]
    result = bench(*words, "--out", tmp_path, "--commands")
    assert "A sweep has two stages" in result.stderr
    lines = [shlex.split(line) for line in result.stdout.splitlines()]
    for line in lines:
        assert runner.invoke(app, line[1:]).exit_code == 0
    assert [job.method for job in executed] == ["ewc"] * 4 + ["l2"] * 4 + ["joint"] * 2
    assert sum(job.validating for job in executed) == 4


@pytest.fixture
def started(tmp_path):
    """Starts the command in a session of its own, as a shell does: Ctrl-C reaches all of its processes."""
    processes = []

    def start(seeds, workers):
        words = ["digits", "--methods", "fine-tuning", "--out", tmp_path, "--seeds", seeds, "--workers", workers]
        # Where a shell runs the tests in its background, Ctrl-C is ignored unless it is asked for.
        listening = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        program = f"{listening}runpy.run_module('holdfast', run_name='__main__', alter_sys=True)"
        command = [sys.executable, "-c", program, "bench", *map(str, words), *NUMBERS]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=NO_GPU)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def children(process):
    """The processes that it started and that still run, with their command lines."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{process.pid}\n" in status.read_text():
                found[int(status.parent.name)] = (status.parent / "cmdline").read_text()
        except OSError:
            continue
    return found


def until(happened, process):
    deadline = time.monotonic() + 60
    while not (found := happened()):
        assert time.monotonic() < deadline, "it took too long"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found


def workers(process):
    return [pid for pid, command in children(process).items() if "spawn_main" in command]


def gone(pids):
    deadline = time.monotonic() + 60  # a worker that is about to import torch sees it afterwards
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for processes in /proc")


@on_linux
@pytest.mark.parametrize(("count", "moment"), [(0, "result"), (2, "result"), (2, "workers")])
def test_ctrl_c_keeps_what_is_finished_and_leaves_nothing_else(tmp_path, started, count, moment):
    seeds = 40
    process = started(seeds, count)
    until(lambda: len(workers(process)) == count and (moment == "workers" or list(tmp_path.glob("*.json"))), process)
    if moment == "workers":
        time.sleep(0.5)  # they import torch, and have not yet been told to leave Ctrl-C to the command
    pids = children(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.splitlines()[-1] == "Stopped. What was finished is kept: the same command goes on from there."
    assert err == ""
    assert gone(pids) == []
    kept = list(tmp_path.iterdir())
    assert all(path.suffix == ".json" for path in kept)
    assert (1 if moment == "result" else 0) <= len(kept) < seeds
    again = bench("digits", "--methods", "fine-tuning", "--seeds", len(kept) + 1, "--out", tmp_path, *NUMBERS)
    assert again.exit_code == 0, again.output
    assert len(collected(tmp_path)) >= len(kept) + 1
    assert (" jobs are there already." in again.output) == bool(kept)


@on_linux
@pytest.mark.parametrize("name", ["torch", "typer", "holdfast.cli.bench"])
def test_ctrl_c_while_the_command_imports_what_it_needs_ends_it_without_a_word(name):
    program = (
        "import os, signal, sys, holdfast_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Now:\n"
        "    def find_spec(self, name, *more):\n"
        f"        if name == {name!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Now())\n"
        "holdfast_command.main()"
    )
    found = subprocess.run([sys.executable, "-c", program, "bench"], capture_output=True, text=True, env=NO_GPU)
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "")


@on_linux
def test_ctrl_c_while_python_imports_the_package_ends_it_without_a_word(tmp_path):
    """`python -m holdfast` imports the package, and torch with it, before a line of the command's is run."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored, where the tests run in the background
        "class Now:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Now())\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "holdfast", "bench", "--list"]
    found = subprocess.run(words, capture_output=True, text=True, env={**NO_GPU, "PYTHONPATH": path})
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_as_the_command_reads_its_words_is_one_line():
    program = (
        "import signal, typer.main, holdfast_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def now(*words): signal.raise_signal(signal.SIGINT)\n"
        "typer.main.get_command = now\n"
        "holdfast_command.main()"
    )
    found = subprocess.run([sys.executable, "-c", program, "bench"], capture_output=True, text=True, env=NO_GPU)
    assert (found.returncode, found.stdout, found.stderr) == (130, "Stopped.\n", "")


def test_ctrl_c_that_is_ignored_stays_so():
    program = (
        "import signal, sys, holdfast_command\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv[1:] = ['bench', '--list']\n"
        "try: holdfast_command.main()\n"
        "finally: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=NO_GPU)
    assert (found.returncode, found.stderr) == (0, "")


@on_linux
def test_a_worker_that_is_killed_is_replaced_and_costs_nothing(tmp_path, started):
    seeds = 12
    process = started(seeds, 2)
    until(lambda: list(tmp_path.glob("*.json")), process)
    os.kill(workers(process)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "failed" not in out
    assert "a worker process died" in out + err
    assert {one.run.seed for one in collected(tmp_path)} == set(range(seeds))
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


@on_linux
def test_workers_do_not_outlive_a_command_that_is_killed(started):
    process = started(40, 2)
    pids = until(lambda: workers(process), process)
    process.kill()
    assert gone(pids) == []


def test_a_sweep_says_where_its_best_strength_is_the_last_one(tmp_path, monkeypatch):
    def execute(job, device, threads):
        right = min(0.9, 0.1 * job.strength)
        return Result(job.config, Run(job.method, job.seed, [[0.9, 0.1], [right, 0.8]]), made_on("cpu"))

    monkeypatch.setattr(grid, "execute", execute)
    words = ["digits", "--methods", "ewc,l2", "--seeds", "1", "--sweep", "--out", tmp_path, *NUMBERS]
    result = bench(*words, "--strengths", "1,2,4")
    said = " ".join(result.output.split())
    assert "ewc did best at 4, the largest strength that was tried. Beyond it may be better ones" in said
    assert "did best" not in bench(*words, "--strengths", "1,20,40").output


def test_one_dataset_that_is_not_there_keeps_no_other_from_running(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFFLINE", "1")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    words = ["--methods", "fine-tuning", "--seeds", "1", "--out", tmp_path / "results", *NUMBERS]
    result = bench("digits", "cifar10-class", *words)
    assert result.exit_code == 1
    assert "failed cifar10-class" in " ".join(result.output.split())
    assert len(collected(tmp_path / "results")) == 1
