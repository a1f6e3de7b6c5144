"""Results as files: what comes back is what was written, and what is damaged is told."""

import errno
import json
import math
import os
import stat
import threading
from dataclasses import fields, replace

import pytest

from holdfast.bench import results
from holdfast.bench.failures import Failed, Failure
from holdfast.bench.jobs import Job
from holdfast.bench.measures import Run
from holdfast.bench.protocols import PROTOCOLS, Protocol
from holdfast.bench.results import Result, bundle, collected, read, with_failures, write
from holdfast.bench.training import Training
from holdfast.errors import ArgumentError, DataError, HoldfastWarning

MADE = {"version": "1", "device": "cpu"}


def result(seed=0, method="ewc", **run):
    job = {"protocol": "toy", "description": "2×100", "method": method, "strength": 1.0, "seed": seed,
           "validating": False}  # fmt: skip
    return Result(job, Run(method, seed, [[0.9, 0.1], [0.7, 0.8]], **run), MADE)


FULL = result(
    nll=[[0.1, 2.0], [0.3, 0.2]], untrained=[0.1, 0.1], lowest=[None, 0.5], learning_seconds=[1.0, 2.0],
    remembering_seconds=[0.0, 0.5], kept_bytes=[1, 2], learning_bytes=[3, 4], remembering_bytes=[5, 6],
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "on_gpu"),
    [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", True), ("Tesla T4", True), ("NVIDIA GeForce RTX 4090", True),
     ("AMD Instinct MI300X", True), ("CPU, x86_64", False), ("CPU, arm64", False)],
)  # fmt: skip
def test_every_device_that_is_no_cpu_is_a_gpu(device, on_gpu):
    assert replace(FULL, made={"device": device}).on_gpu is on_gpu


JOB = Job(PROTOCOLS["vcl"], "ewc", 0).config


def numbered(name, value):
    """The job with another number of its protocol or of its training."""
    numbers = JOB["numbers"]
    inner = {**numbers["training"], name: value} if name in numbers["training"] else numbers["training"]
    outer = {name: value} if name in numbers else {}
    return {**JOB, "numbers": {**numbers, "training": inner, **outer}}


NUMBERS = {each.name for kind in (Protocol, Training) for each in fields(kind)} - {"name", "about", "training"}


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_two_jobs_with_another_number_of_any_kind_are_not_alike(name):
    """Of the protocol and of its training, all but how they are called."""
    assert results.differing([JOB, numbered(name, "another")]) == [name]


def test_what_a_job_is_called_and_which_of_the_grid_it_is_are_no_numbers():
    other = {
        "protocol": "mine", "description": "as it was", "method": "si", "strength": 3.0, "seed": 7, "validating": True,
        "chosen": True, "keeps_data": True, "numbers": {**JOB["numbers"], "name": "mine", "about": "as it was"},
    }  # fmt: skip
    assert other.keys() == JOB.keys()
    assert results.differing([JOB, other]) == []
    assert results.numbers(other).keys() == NUMBERS


def test_what_differs_is_looked_for_in_all_of_the_jobs():
    last = numbered("batch_size", 64)
    assert results.differing([JOB, JOB, last]) == ["batch_size"]
    assert results.differing([JOB, numbered("lr", 0.5), last, JOB]) == ["batch_size", "lr"]


def damaged(path, change):
    """The file of a sound result, with a change to what it says."""
    write(path, FULL)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_result_comes_back_as_it_was(tmp_path):
    write(tmp_path / "one.json", FULL)
    assert read(tmp_path / "one.json") == FULL
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_likelihood_that_is_no_number_comes_back_from_strict_json(tmp_path):
    diverged = result(nll=[[0.1, math.inf], [math.nan, -math.inf]])
    write(tmp_path / "one.json", diverged)
    text = (tmp_path / "one.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (low, high), (none, least) = read(tmp_path / "one.json").run.nll
    assert (low, high, least) == (0.1, math.inf, -math.inf)
    assert math.isnan(none)


def test_the_key_depends_on_all_of_the_job_and_on_the_version():
    job = dict(FULL.job)
    keys = {results.key(job, "1"), results.key(job, "2"), results.key({**job, "seed": 1}, "1"),
            results.key({**job, "numbers": {"epochs": 2}}, "1")}  # fmt: skip
    assert len(keys) == 4
    assert results.key(dict(reversed(job.items())), "1") in keys


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("run", "accuracy", []), ("run", "accuracy", [[]]), ("run", "accuracy", [[0.9, 0.1], [0.7]]),
        ("run", "accuracy", [[0.9, 1.1], [0.7, 0.8]]), ("run", "accuracy", [[0.9, None], [0.7, 0.8]]),
        ("run", "accuracy", [[0.9, True], [0.7, 0.8]]), ("run", "accuracy", [["0.9", 0.1], [0.7, 0.8]]),
        ("run", "accuracy", 0.9), ("run", "accuracy", {"0": [0.5]}), ("run", "accuracy", None),
        ("run", "nll", [[0.1, 0.2]]), ("run", "nll", [[0.1], [0.2]]), ("run", "nll", [[0.1, "x"], [0.1, 0.2]]),
        ("run", "nll", [[], []]), ("run", "nll", 3), ("run", "untrained", [0.1]), ("run", "untrained", [0.1, None]),
        ("run", "lowest", [None, 2.0]), ("run", "lowest", [None]), ("run", "lowest", None),
        ("run", "learning_seconds", [1.0, None]), ("run", "learning_seconds", [1.0, -1.0]),
        ("run", "learning_seconds", [1.0, math.inf]), ("run", "learning_seconds", [10**400, 1.0]),
        ("run", "learning_seconds", [5e-324, 0]), ("run", "learning_seconds", [1e308, 1e308]),
        ("run", "remembering_seconds", [0.0, 9e-10]), ("run", "remembering_seconds", [0.0, 1.1e15]),
        ("run", "kept_bytes", [1, 10**15 + 1]), ("run", "nll", [[1e308, 1e308]] * 2),
        ("run", "nll", [[0.1, -1.1e100], [0.1, 0.2]]), ("run", "nll", [["inf", "-inf"], [0.1, 0.2]]),
        ("run", "remembering_seconds", [1.0, 2.0, 3.0]), ("run", "kept_bytes", [1.5, 2]),
        ("run", "kept_bytes", [10**400, 2]), ("run", "learning_bytes", "12"), ("run", "remembering_bytes", [-1, 2]),
        ("run", "seed", "0"), ("run", "seed", 0.0), ("run", "method", None), ("run", "method", "\ud800"),
        ("job", "strength", "1"), ("job", "strength", -1.0), ("job", "strength", math.nan), ("job", "seed", None),
        ("job", "validating", "no"), ("job", "protocol", 3), ("job", "method", []),
        (None, "made", None), (None, "made", [1]), (None, "job", None), (None, "run", []), (None, "format", 2),
        (None, "format", None),
    ],
)  # fmt: skip
def test_a_file_that_parses_and_cannot_be_shown_is_told_of_with_its_name(tmp_path, part, name, value):
    def change(content):
        (content if part is None else content[part])[name] = value

    path = damaged(tmp_path / "bad.json", change)
    with pytest.raises(DataError, match=r"bad\.json"):
        read(path)
    write(tmp_path / "good.json", FULL)
    with pytest.warns(HoldfastWarning, match=r"left out: .*bad\.json"):
        assert collected(tmp_path) == [FULL]


def test_the_most_and_the_least_that_can_be_shown_come_back(tmp_path):
    edge = result(
        nll=[[1e100, -1e100], [math.inf, 0.1]], learning_seconds=[1e-9, 1e15], remembering_seconds=[0, 0.0],
        kept_bytes=[0, 10**15],
    )  # fmt: skip
    write(tmp_path / "edge.json", edge)
    assert read(tmp_path / "edge.json") == edge


def test_an_amount_that_cannot_be_shown_is_named(tmp_path):
    def change(content):
        content["run"]["learning_seconds"] = [5e-324, 0]

    with pytest.raises(DataError, match=r"bad\.json is not a result .*: its `learning_seconds` cannot be 5e-324\."):
        read(damaged(tmp_path / "bad.json", change))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe with a name")
@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_what_is_no_regular_file_is_told_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder.json").mkdir()
    write(tmp_path / "good.json", FULL)
    finished = threading.Timer(10, lambda: os.close(os.open(tmp_path / name, os.O_WRONLY | os.O_NONBLOCK)))
    finished.start()  # whoever waits at the pipe is let go
    try:
        with pytest.warns(HoldfastWarning) as told:
            assert collected(tmp_path) == [FULL]
    finally:
        finished.cancel()
    said = [str(each.message) for each in told]
    assert f"left out: {tmp_path / name} could not be read: it is no regular file." in said
    assert any(line.startswith(f"left out: {tmp_path / 'folder.json'} could not be read: ") for line in said)
    assert len(said) == 2


@pytest.mark.parametrize("name", ["accuracy", "method", "seed"])
def test_a_run_without_its_essentials_is_told_of(tmp_path, name):
    with pytest.raises(DataError, match=rf"(?s)bad\.json.*{name}"):
        read(damaged(tmp_path / "bad.json", lambda content: content["run"].pop(name)))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'])
def test_anything_else_is_a_data_error(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.json"):
        read(tmp_path / "bad.json")


def test_what_was_not_measured_may_be_missing_and_what_is_new_is_passed_over(tmp_path):
    def change(content):
        content["run"] = {name: content["run"][name] for name in ("method", "seed", "accuracy")} | {"later": 1}

    assert read(damaged(tmp_path / "old.json", change)) == result()


def test_a_bundle_is_the_same_for_any_order_and_comes_back_whole(tmp_path):
    many = [result(seed, method, nll=[[0.1, math.nan]] * 2) for seed in range(3) for method in ("ewc", "joint")]
    bundle(many, tmp_path / "a.jsonl")
    bundle([*reversed(many), many[0]], tmp_path / "b.jsonl")
    text = (tmp_path / "a.jsonl").read_bytes()
    assert text == (tmp_path / "b.jsonl").read_bytes()
    assert text.count(b"\n") == 6
    found = collected(tmp_path / "a.jsonl")
    assert {(one.run.seed, one.run.method) for one in found} == {(one.run.seed, one.run.method) for one in many}
    assert list(found[0].job) == list(many[0].job)


def test_a_folder_is_read_with_its_subfolders_and_bundles_each_result_once(tmp_path):
    one, two = result(0), result(1)
    (tmp_path / "inner").mkdir()
    write(tmp_path / "one.json", one)
    write(tmp_path / "inner" / "two.json", two)
    bundle([one, two], tmp_path / "inner" / "both.jsonl")
    (tmp_path / "one.txt").write_text("not a result", encoding="utf-8")
    assert sorted(each.run.seed for each in collected(tmp_path)) == [0, 1]
    assert collected(tmp_path / "one.json") == [one]


def failed(seed, strength=1.0, line="no luck", date="2026-01-01"):
    return Failed(result(seed).job | {"strength": strength}, Failure(line, "Traceback\nof it"), {**MADE, "date": date})


def test_jobs_that_failed_are_read_beside_the_results_until_a_run_makes_up_for_them(tmp_path):
    write(tmp_path / "0.json", replace(result(0), made={**MADE, "date": "2026-01-02"}))
    write(tmp_path / "0.error.json", failed(0))
    write(tmp_path / "1.error.json", failed(1, 1e300, "older"))
    bundle([failed(1, 1e300, "newer", "2026-01-02"), result(2)], tmp_path / "many.jsonl")
    found, (one,) = with_failures(tmp_path)
    assert sorted(each.run.seed for each in found) == [0, 2]
    assert one == failed(1, 1e300, "newer", "2026-01-02")
    assert (one.method, one.strength, one.validating) == (result(1).run.method, 1e300, False)
    with pytest.raises(DataError, match="a job that failed"):
        read(tmp_path / "1.error.json")
    (tmp_path / "2.error.json").write_text('{"format": 1, "job": {"protocol": 3}, "made": {}, "failed": "x"}')
    with pytest.warns(HoldfastWarning, match=r"2\.error\.json is not a result of the bench, or is damaged"):
        with_failures(tmp_path)


@pytest.mark.parametrize(
    ("job", "made", "told"),
    [
        ({}, {"date": "2026-01-02", "device": "CPU, x86_64"}, 0),
        ({}, {"date": "2025-12-31", "device": "CPU, x86_64"}, 1),
        ({}, {"date": "2026-01-02", "device": "NVIDIA H200"}, 1),
        ({"numbers": {"tasks": 3}}, {"date": "2026-01-02", "device": "CPU, x86_64"}, 1),
    ],
)
def test_only_a_later_run_of_the_very_job_makes_up_for_a_failure(tmp_path, job, made, told):
    lost = failed(0)
    write(tmp_path / "0.error.json", replace(lost, made={**lost.made, "device": "cpu"}))
    write(tmp_path / "0.json", replace(result(0), job={**lost.job, **job}, made=made))
    assert len(with_failures(tmp_path)[1]) == told


def test_where_every_job_failed_the_first_reason_is_told(tmp_path):
    write(tmp_path / "0.error.json", failed(0))
    with pytest.raises(DataError, match=r"has no results: every job failed \(1\), the first with: no luck"):
        collected(tmp_path)


def test_a_damaged_line_is_told_by_its_number_and_left_out(tmp_path):
    path = tmp_path / "many.jsonl"
    bundle([result(seed) for seed in range(3)], path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"", lines[1][:50], b"\xff", lines[2]]))
    with pytest.warns(HoldfastWarning) as told:
        found = collected(path)
    assert [one.run.seed for one in found] == [0, 2]
    assert [str(each.message).split(" is not")[0] for each in told] == [
        f"left out: {path}, line 3", f"left out: {path}, line 4",
    ]  # fmt: skip


def test_what_is_no_source_or_target_of_results_is_told(tmp_path):
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    for source in ("none", "notes.txt"):
        with pytest.raises(ArgumentError, match="is not a folder of results"):
            collected(tmp_path / source)
    with pytest.raises(DataError, match="has no results"):
        collected(tmp_path)
    with pytest.raises(ArgumentError, match=r"ends in \.jsonl"):
        bundle([FULL], tmp_path / "many.json")
    with pytest.raises(DataError, match="could not be written"):
        bundle([FULL], tmp_path / "none" / "many.jsonl")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name):
    target = tmp_path / "one.json"
    write(target, FULL)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(DataError, match=r"one\.json could not be written: .*No space left .* make room"):
        write(target, replace(FULL, made={}))
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    assert read(target) == FULL


def test_a_text_takes_the_place_of_another_whole_or_not_at_all(tmp_path, monkeypatch):
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    results.write_whole(page, "first\r\n")
    page.chmod(0o600)
    link.symlink_to(page)
    results.write_whole(link, "second\r\n")
    assert link.is_symlink()
    assert page.read_bytes() == b"second\r\n"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        results.write_whole(page, "third")
    assert page.read_bytes() == b"second\r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]
    results.write_whole(tmp_path / os.devnull, "nothing is left of it")
