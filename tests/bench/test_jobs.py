"""Jobs: keyed by all that decides them, the same on every machine."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.bench import data, jobs, results
from holdfast.bench.jobs import Job, chosen, code_version, execute, grid, save
from holdfast.bench.machine import present
from holdfast.bench.measures import Run
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.results import collected
from holdfast.errors import ArgumentError, DataError
from holdfast.report.sections import sections

QUICK = PROTOCOLS["digits"].changed(tasks=2, epochs=1)


def test_a_grid_has_every_combination_once_seeds_outermost():
    found = grid([QUICK], ["joint", "ewc"], [0, 1], [1.0, 10.0])
    assert [(job.seed, job.method, job.strength) for job in found] == [
        (0, "joint", 1.0), (0, "ewc", 1.0), (0, "ewc", 10.0), (1, "joint", 1.0), (1, "ewc", 1.0), (1, "ewc", 10.0),
    ]  # fmt: skip


def test_a_job_is_known_by_its_numbers_and_not_by_how_they_were_written(tmp_path):
    one = Job(QUICK, "ewc", 0, 1.0)
    assert Job(QUICK, "ewc", 0, 1).path(tmp_path) == one.path(tmp_path)
    assert Job(QUICK, "ewc", 0, 1.0, chosen=True).path(tmp_path) != one.path(tmp_path)  # the table says which it is
    assert one.path(tmp_path, "cuda:1") == one.path(tmp_path, "cuda") != one.path(tmp_path)
    others = [
        Job(QUICK, "ewc", 0, 2.0), Job(QUICK, "ewc", 1), Job(QUICK, "l2", 0), Job(QUICK, "ewc", 0, validating=True),
        Job(PROTOCOLS["digits"].changed(tasks=2, epochs=2), "ewc", 0),
    ]  # fmt: skip
    assert len({job.path(tmp_path) for job in [one, *others]}) == 6
    # What holds nothing has no strength.
    assert Job(QUICK, "joint", 0, 2.0).path(tmp_path) == Job(QUICK, "joint", 0, 1.0).path(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "ewk"}, "Did you mean ewc"),
        ({"strength": -1.0}, "a strength must be"),
        ({"strength": float("nan")}, "a strength must be"),
        ({"seed": -1}, "a seed is"),
        ({"seed": 0.5}, "a seed is"),
        ({"seed": 2**40}, "a seed is"),
        ({"method": "own-text"}, "own-text does not apply to .*: it is for text"),
        ({"method": "exact-head"}, "it needs --loss squared"),
        ({"method": "probes-feature"}, "it is for convolutional networks"),
        ({"method": "mas", "protocol": PROTOCOLS["text"]}, "mas does not apply to text: it is not for text"),
        ({"protocol": PROTOCOLS["text"], "validating": True}, "text has no validation data"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        Job(**{"protocol": QUICK, "method": "ewc", "seed": 0, **wrong})


def test_a_run_repeats_and_tells_what_it_is_a_run_of():
    job = Job(QUICK, "ewc", 3, 10.0, chosen=True)
    once, again = execute(job, threads=1), execute(job, threads=1)
    assert once.run.accuracy == again.run.accuracy
    assert once.run.nll == again.run.nll
    assert once.job == job.config
    assert (once.run.method, once.run.seed) == ("ewc", 3)
    assert once.made["version"] == code_version()
    assert once.made["strength_chosen_on"] == "validation"


def test_threads_of_one_process_take_turns(monkeypatch):
    """Two at once would draw their models' weights from the same random numbers."""
    running, most = [], []

    def slow(*args, name, seed, **options):
        running.append(seed)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(seed)
        return Run(name, seed, [[0.5, 0.5]])

    monkeypatch.setattr(jobs, "run", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: execute(Job(QUICK, "ewc", seed)), range(6)))
    assert [one.run.seed for one in found] == list(range(6))
    assert max(most) == 1


def test_joint_training_has_one_stage_with_the_steps_of_all():
    protocol = PROTOCOLS["digits"].changed(tasks=2, steps=3)
    assert jobs._training(Job(protocol, "joint", 0)).steps == 6
    assert jobs._training(Job(protocol, "ewc", 0)).steps == 3
    assert len(execute(Job(protocol, "joint", 0), threads=1).run.accuracy) == 1


def test_the_strength_is_chosen_among_validation_runs_and_the_smallest_wins_a_tie():
    def runs(averages):
        return {
            Job(QUICK, "ewc", seed, strength, validating=True): Run("ewc", seed, [[value]])
            for strength, values in averages.items()
            for seed, value in enumerate(values)
        }

    assert chosen(runs({1.0: [0.5, 0.7], 10.0: [0.9, 0.5], 100.0: [0.1, 0.1]}), lambda job: True) == 10.0
    assert chosen(runs({10.0: [0.5], 1.0: [0.5]}), lambda job: True) == 1.0  # whichever came first
    tested = {Job(QUICK, "ewc", 0, 1000.0): Run("ewc", 0, [[1.0]])}
    assert chosen({**runs({1.0: [0.5]}), **tested}, lambda job: True) == 1.0


def test_a_device_is_one_that_is_there(monkeypatch):
    assert present("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert present("auto") == "cpu"
    with pytest.raises(ArgumentError, match="no GPU that torch can use"):
        present("cuda")
    for wrong in ("nonsense", "cpu:1", "", "meta"):
        with pytest.raises(ArgumentError, match="there is no device"):
            present(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [present(each) for each in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    with pytest.raises(ArgumentError, match="has 2, counted from 0"):
        present("cuda:2")


def test_the_version_tells_what_decides_a_run_and_not_how_it_is_shown(tmp_path, monkeypatch):
    root = Path(holdfast.__file__).parent
    for prefix in jobs._SHOWN_ONLY:
        assert (root / prefix).exists(), prefix
    copy = tmp_path / "holdfast"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jobs, "__file__", str(copy / "bench" / "jobs.py"))

    def version():
        return code_version.__wrapped__()

    before = version()
    assert before == code_version()
    for name in (
        "cli/bench.py",
        "report/tables.py",
        "bench/published.py",
        "bench/demonstration.py",
        "bench/results.py",
    ):
        (copy / name).write_text("# another", encoding="utf-8")
        assert version() == before, name
    for name in ("bench/methods.py", "precision/kronecker.py", "bench/data/images.py"):
        (copy / name).write_text("# another", encoding="utf-8")
        assert version() != before, name
        before = version()


def test_a_run_of_ones_own_is_found_by_the_report(tmp_path):
    made = Run("mine", 3, [[0.9, 0.2], [0.7, 0.8]])
    target = save(made, tmp_path / "new", protocol="clouds", strength=2.0)
    (found,) = collected(tmp_path / "new")
    assert target.exists()
    assert (found.protocol, found.strength, found.run) == ("clouds", 2.0, made)
    assert "mine, strength 2" in {entry.label for entry in sections([found])[0].entries}


def test_a_run_of_ones_own_is_not_written_over_by_another(tmp_path):
    made, other = Run("Held", 3, [[0.9, 0.2], [0.7, 0.8]]), Run("Held", 3, [[0.9, 0.2], [0.6, 0.8]])
    target = save(made, str(tmp_path), protocol="clouds")
    assert save(made, tmp_path, protocol="clouds") == target  # the same again
    with pytest.raises(ArgumentError, match=r"has a run of 'Held' with seed 3 on 'clouds'.*name=\.\.\."):
        save(other, tmp_path, protocol="clouds")
    assert [one.run for one in collected(tmp_path)] == [made]
    with pytest.raises(ArgumentError, match="and this is another one"):
        save(replace(made, nll=[[0.1, 0.2], [0.3, 0.4]]), tmp_path, protocol="clouds")
    save(other, tmp_path, protocol="clouds", strength=2.0, keeps_data=True)
    assert {bool(one.job["keeps_data"]) for one in collected(tmp_path)} == {False, True}
    assert len(collected(tmp_path)) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"strength": -1.0}, {"strength": "high"}, {"strength": True}, {"strength": float("nan")}, {"protocol": 5},
        {"protocol": "half a pair \ud800"}, {"keeps_data": np.bool_(True)}, {"device": "gpu"}, {"device": "cuda:9"},
    ],
)  # fmt: skip
def test_a_run_that_could_not_be_read_again_is_not_kept(tmp_path, wrong):
    with pytest.raises(ArgumentError):
        save(Run("mine", 3, [[0.9, 0.2], [0.7, 0.8]]), tmp_path, **{"protocol": "clouds", **wrong})
    with pytest.raises(ArgumentError, match="seed"):
        save(Run("mine", -1, [[0.9]]), tmp_path, protocol="clouds")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ArgumentError, match="cannot be kept in"):
        save(Run("mine", 3, [[0.9]]), tmp_path / "file", protocol="clouds")


def test_a_run_whose_likelihood_is_no_number_is_the_same_as_itself(tmp_path):
    made = Run("mine", 3, [[0.9]], nll=[[float("nan")]])
    assert save(made, tmp_path, protocol="clouds") == save(made, tmp_path, protocol="clouds")


def test_a_run_of_ones_own_is_kept_under_any_name_and_over_no_damaged_file(tmp_path):
    made = Run("方法" * 60, 3, [[0.9, 0.2], [0.7, 0.8]])
    target = save(made, tmp_path, protocol="clouds", strength=np.float32(2.0))
    assert [one.run for one in collected(tmp_path)] == [made]
    target.write_text("{", encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"damaged.*Remove it, or save to another folder"):
        save(made, tmp_path, protocol="clouds", strength=2.0)


def test_a_text_is_known_by_what_it_is():
    job = Job(PROTOCOLS["text"], "fine-tuning", 0)
    assert data.text_domains().digest.startswith(data.origin("text"))
    assert len(data.origin("text")) == 12
    assert job.config["python"]


def test_a_result_asked_for_anywhere_is_known_by_the_device_that_made_it(tmp_path):
    job = Job(QUICK, "fine-tuning", 0)
    assert job.done(tmp_path, "auto") is None
    results.write(job.path(tmp_path, "cpu"), execute(job, threads=1))
    assert job.done(tmp_path, "auto") is not None
    assert job.done(tmp_path, "cuda") is None


def test_a_run_from_other_files_of_the_data_is_made_again(tmp_path, monkeypatch):
    job = Job(QUICK, "fine-tuning", 0)
    monkeypatch.setattr(data, "origin", lambda name: "one")
    results.write(job.path(tmp_path), execute(job, threads=1))
    assert job.done(tmp_path).made["data"] == "one"
    monkeypatch.setattr(data, "origin", lambda name: "other")
    with pytest.raises(DataError, match="was made from other files of digits than are here"):
        job.done(tmp_path)
    monkeypatch.setattr(data, "origin", lambda name: "")  # verified ones
    with pytest.raises(DataError, match="was made from other files"):
        job.done(tmp_path)
    monkeypatch.setattr(data, "origin", lambda name: None)  # none here to compare with
    assert job.done(tmp_path) is not None


def test_text_has_no_validation_data_to_be_taken_for_test_data():
    with pytest.raises(ArgumentError, match="text has no validation data"):
        PROTOCOLS["text"].sequence(0, validating=True)
