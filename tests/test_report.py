"""The bench's report: the numbers in its tables, what a hostile name can do to it, and what a reader's browser does."""

import base64
import csv as csv_module
import io
import itertools
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from holdfast.bench.catalog import METHODS
from holdfast.bench.failures import Failed, Failure
from holdfast.bench.jobs import Job, numbers_of
from holdfast.bench.measures import Run, at_an_end
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.published import PUBLISHED
from holdfast.bench.results import Result, write
from holdfast.errors import ArgumentError, DataError
from holdfast.report import bench_page, csv, markdown, report_command, tables
from holdfast.report.canvas import COLORS, marks, short
from holdfast.report.cells import Cell
from holdfast.report.figures import curves, forgetting
from holdfast.report.fronts import _forgotten, front, timing
from holdfast.report.matrices import matrix
from holdfast.report.sections import sections

MADE = {"version": "1.0", "device": "cpu", "torch": "2.13", "date": "2026-01-01", "command": "holdfast bench"}
HOSTILE = ["<script>alert(1)</script>", "=1+1|x", "$\\frac$", "_hidden", "two\nlines", 'a" onclick="x', '漢字 id="q']


def result(method, seed, accuracy, *, strength=None, protocol="toy", made=None, validating=False, job=None, **run):
    config = {"protocol": protocol, "method": method, "strength": strength, "seed": seed, "validating": validating}
    return Result({**config, **(job or {})}, Run(method, seed, accuracy, **run), {**MADE, **(made or {})})


def measured(seed, accuracy, *, nll, seconds):
    return result(
        "EWC", seed, accuracy, strength=1.0, nll=[[1.0, 1.0], nll], untrained=[0.1, 0.05],
        lowest=[None, 0.6], settled=[None, accuracy[1][0]],
        learning_seconds=seconds, remembering_seconds=[0.0, 0.5], kept_bytes=[1_000_000, 2_000_000],
        learning_bytes=[500_000_000, 400_000_000],
    )  # fmt: skip


@pytest.fixture
def toy():
    """A method on two seeds with everything measured, one on three, one on one, and joint training in one stage."""
    return [
        measured(0, [[0.9, 0.1], [0.7, 0.8]], nll=[0.2, 0.4], seconds=[1.0, 2.0]),
        measured(1, [[0.8, 0.1], [0.8, 0.9]], nll=[0.4, 0.6], seconds=[1.0, 4.0]),
        *(result("fine-tuning", seed, [[0.9, 0.1], [0.3, 0.9]]) for seed in range(3)),
        result("SI", 7, [[0.9, 0.1], [0.5, 0.9]], strength=1.0),
        *(result("joint", seed, [[0.9, 0.98]]) for seed in range(2)),
        *(result("EWC", seed, [[0.9, 0.1], [0.6, 0.8]], strength=10.0, job={"chosen": True}) for seed in range(2)),
    ]


class Reader(HTMLParser):
    """What a browser makes of a page: its tags, the names of their attributes, its texts."""

    def __init__(self):
        HTMLParser.__init__(self)
        self.tags, self.attributes, self.texts = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


def by_first(table):
    return {row.cells[0].text: dict(zip(table.headings, row.cells, strict=True)) for row in reversed(table.rows)}


def test_the_leaderboard_shows_the_numbers_computed_by_hand(toy):
    board, _ = tables(toy)
    row = by_first(board)["EWC"]
    assert {heading: cell.text for heading, cell in row.items()} == {
        "method": "EWC",
        "strength": "1",
        "seeds": "2",
        "average, %": "80.00 ± 7.07",
        "forgotten, points": "10.00 ± 14.14",
        "each when new, %": "85.00 ± 0.00",
        "backward transfer, points": "−10.00 ± 14.14",
        "forward transfer, points": "5.00 ± 0.00",
        "lowest after a switch, %": "60.00 ± 0.00",
        "stability gap, points": "15.00 ± 7.07",
        "nll, nats": "0.400 ± 0.141",
        "learning, s": "4.00 ± 1.41",
        "remembering, s": "0.50",
        "kept, MB": "2.00",
        "peak in learning, MB": "500",
        "peak in remembering, MB": "–",
        "source": "measured",
    }
    assert row["average, %"].sort == pytest.approx(80)
    assert row["backward transfer, points"].sort == pytest.approx(-10)
    assert math.isnan(row["peak in remembering, MB"].sort)


def test_rows_come_best_first_and_each_strength_has_its_own(toy):
    board, _ = tables(toy)
    assert [(row.cells[0].text, row.cells[1].text) for row in board.rows] == [
        ("joint", "–"),
        ("EWC", "1"),
        ("EWC", "10, chosen on validation data"),
        ("SI", "1"),
        ("fine-tuning", "–"),
    ]
    assert board.headings[board.best_first] == "average, %"
    one = by_first(board)["SI"]
    assert (one["seeds"].text, one["average, %"].text) == ("1 seed", "70.00")
    assert by_first(board)["joint"]["forgotten, points"].text == "–"


def test_comparisons_are_seed_by_seed_with_the_best_that_keeps_no_data(toy):
    _, versus = tables(toy)
    assert versus.title == "Compared with EWC, strength 1, seed by seed"
    found = {row.cells[0].text: tuple(cell.text for cell in row.cells[1:]) for row in versus.rows}
    # joint − EWC: 0.94 − (0.75, 0.85) = (0.19, 0.09): mean 0.14, standard error 0.0707/√2.
    # SI shares no seed with it, and is left out.
    assert found == {
        "joint": ("2", "14.00 ± 5.00", "not clear"),
        "EWC, strength 10 (chosen)": ("2", "−10.00 ± 5.00", "not clear"),
        "fine-tuning": ("2", "−20.00 ± 5.00", "not clear"),
    }


def test_what_keeps_old_inputs_is_no_yardstick_for_what_keeps_none():
    """Told by the job, or of an older result by the method's name."""
    runs = [[[0.9, 0.1], [0.9, 0.9]], [[0.9, 0.1], [0.5, 0.9]]]
    for job in ({}, {"keeps_data": True}):
        both = [result("true-inputs", seed, runs[0], job=job) for seed in (0, 1)]
        both += [result("EWC", seed, runs[1]) for seed in (0, 1)]
        assert tables(both)[1].title.startswith("Compared with EWC")
    own = [result("mine", seed, runs[0], job={"keeps_data": True}) for seed in (0, 1)]
    for said, keeps in (({}, True), ({"keeps_data": None}, True), ({"keeps_data": False}, False)):
        ((entry,),) = (each.entries for each in sections([result("Joint posterior", 0, [[0.9, 0.1]] * 2, job=said)]))
        assert entry.keeps_data is keeps
    assert tables([*own, *(result("EWC", seed, runs[1]) for seed in (0, 1))])[1].title.startswith("Compared with EWC")
    # One's own runs on all tasks at once, by what they are called or because they have a single stage.
    for name, accuracy in (("Joint, mine", runs[0]), ("all at once", [[0.9, 0.9]])):
        own = [result(name, seed, accuracy) for seed in (0, 1)]
        both = tables([*own, *(result("EWC", seed, runs[1]) for seed in (0, 1))])
        assert both[1].title.startswith("Compared with EWC")


def test_runs_made_with_something_else_are_told_apart_in_the_leaderboard():
    made = [{"version": "1.0", "device": where} for where in ("CPU", "H200")]
    board, *_ = tables([result("EWC", 0, [[0.9, 0.1], [0.5, 0.9]], made=each) for each in made])
    assert sorted(row.cells[-1].text for row in board.rows) == ["measured, CPU", "measured, H200"]


def test_a_difference_that_every_seed_shows_is_clear():
    good = [result("good", seed, [[0.9, 0.1], [0.9, 0.80 + 0.01 * seed]]) for seed in range(3)]
    poor = [result("poor", seed, [[0.9, 0.1], [0.7, 0.81 + 0.01 * seed]]) for seed in range(3)]
    _, versus = tables(good + poor)
    assert [cell.text for cell in versus.rows[0].cells] == ["poor", "3", "−9.50 ± 0.00", "worse"]


def test_what_a_reader_must_know_is_said_under_the_table(toy):
    board, _ = tables([*toy, result("MAS", 0, [[0.9, 0.1], [0.5, 0.9]], made={"version": "0.9", "device": "cuda"})])
    said = " ".join(board.notes)
    assert "different versions of the code: 0.9, 1.0." in said
    assert "different devices: cpu, cuda." in said
    assert "Not every method has run on the same seeds" in said


def test_what_is_learned_all_at_once_is_told_to_keep_all_data_and_never_sorts_as_the_cheapest():
    runs = [
        result("joint", 0, [[0.9, 0.9]], kept_bytes=[0]),
        result("fine-tuning", 0, [[0.9, 0.1], [0.3, 0.9]], kept_bytes=[0, 0]),
        result("one", 0, [[0.9]], kept_bytes=[0], protocol="of one task"),
    ]
    board, *_, alone = tables(runs)
    column = board.headings.index("kept, MB")
    assert [(row.cells[column].text, row.cells[column].key) for row in board.rows] == [
        ("all data", "Infinity"), ("0", "0.0"),
    ]  # fmt: skip
    assert board.numeric(column)
    assert alone.rows[0].cells[column].text == "0"
    lines = list(csv_module.DictReader(io.StringIO(csv(runs), newline="")))
    assert sorted((line["method"], line["kept_bytes"]) for line in lines) == [
        ("fine-tuning", "0"), ("joint", ""), ("one", "0"),
    ]  # fmt: skip


def test_what_is_kept_is_what_is_carried_on_at_the_end_and_not_the_most_of_any_time():
    (board,) = tables([result("EWC", 0, [[0.9, 0.1], [0.8, 0.9]], kept_bytes=[3_000_000, 2_000_000])])
    assert by_first(board)["EWC"]["kept, MB"].text == "2.00"


def test_the_likelihood_of_training_that_diverged_is_told_by_its_size():
    board, *_ = tables([result("EWC", seed, [[0.9, 0.1], [0.8, 0.8]], nll=[[1e30, 1e30]] * 2) for seed in range(2)])
    cell = board.rows[0].cells[board.headings.index("nll, nats")]
    assert (cell.text, cell.sort) == ("1.00e+30 ± 0.000", 1e30)


def test_a_seed_counts_once_and_the_newest_run_of_it():
    old = result("EWC", 0, [[0.5, 0.1], [0.5, 0.5]], made={"date": "2025-01-01"})
    new = result("EWC", 0, [[0.9, 0.1], [0.8, 0.8]], job={"epochs": 2})
    other = result("EWC", 1, [[0.9, 0.1], [0.8, 0.8]], job={"epochs": 1})
    (board,) = tables([new, old, other])
    assert board.rows[0].cells[3].text == "80.00 ± 0.00"
    assert any("1 other run" in note and "left out: the newest" in note for note in board.notes)
    assert "The runs of EWC differ in more than the seed: epochs." in board.notes


def test_strengths_tried_on_validation_data_are_shown_beside_what_was_chosen(toy):
    tried = [
        result("EWC", 100, [[0.9], [0.5, 0.7]], strength=1.0, validating=True, made={"date": "2026-01-01"}),
        result("EWC", 100, [[0.9], [0.7, 0.9]], strength=10.0, validating=True),
        result("EWC", 100, [[0.9], [0.5, 0.9]], strength=1.0, validating=True, made={"date": "2026-01-02"}),
        result("SI", 100, [[0.9], [0.6, 0.6]], strength=10.0, validating=True),
        result("SI", 100, [[0.9], [0.1, 0.1]], strength=3.0, validating=True, protocol="another"),
        # Other settings, before these: not to be compared with them.
        result("SI", 100, [[0.9], [0.9, 0.9]], strength=100.0, validating=True, job={"epochs": 2}, made={"date": ""}),
        *(
            result("SI", 100, [[0.9], [0.9, 0.9]], strength=10.0, validating=True, made={"date": "2025-01-01", **made})
            for made in ({"version": "0.9"}, {"device": "cuda"}, {"data": "other files"})
        ),
    ]
    *before, table = tables([*toy, *tried])
    assert before == tables(toy)
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["EWC", "70.00", "80.00"],
        ["SI", "–", "60.00"],
    ]
    assert table.headings == ("method", "1", "10")
    assert "2 tasks, seed 100" in table.notes[0]
    assert table.notes[1:] == ("EWC did best at the largest strength that was tried: beyond it may be better ones.",)
    # Where versions stand together, so do the strengths that they tried, the newest of each.
    *_, table = tables([*toy, *tried, result(
        "MAS", 100, [[0.9], [0.3, 0.5]], strength=10.0, validating=True, made={"date": "2025-01-01", "version": "0.9"},
    )], across=["version"])  # fmt: skip
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["EWC", "70.00", "80.00"], ["MAS", "–", "40.00"], ["SI", "–", "60.00"],
    ]  # fmt: skip
    better = result("EWC", 100, [[0.9], [0.9, 0.9]], strength=1.0, validating=True, made={"date": "2026-01-03"})
    noted = tables([*toy, *tried, better])[-1].notes
    assert noted[1:] == (
        "EWC stands at 10: it was chosen from other runs than these.",
        "EWC did best at the smallest strength that was tried: beyond it may be better ones.",
    )
    between = [
        result("EWC", 100, [[0.9], [0.1, 0.1]], strength=strength, validating=True) for strength in (0.1, 1000.0)
    ]
    assert len(tables([*toy, *tried, *between])[-1].notes) == 1
    page = bench_page([*toy, *tried])
    assert table.title in page
    assert table.title not in bench_page(toy)


def lost(method, seed, strength, line, *, validating=False, tasks=None, protocol="toy"):
    numbers = {} if tasks is None else {"numbers": {"tasks": tasks}}
    job = result(method, seed, [[0.9]], strength=strength, validating=validating, protocol=protocol).job
    return Failed({**job, **numbers}, Failure(line), MADE)


def test_jobs_that_failed_are_told_with_their_protocol(toy):
    failed = [
        *(lost("Kronecker", seed, 1e7, "no luck") for seed in (1, 0)),
        lost("MAS", 0, None, "no luck"),
        lost("MAS", 1, None, "other words"),
        lost("EWC", 100, 1.0, "no luck", validating=True),
        lost("EWC", 0, 1.0, "elsewhere", protocol="other"),
    ]
    told = [
        "Failed: Kronecker at 1e+07 (seeds 0, 1), MAS (seed 0): no luck",
        "Failed: MAS (seed 1): other words",
        "Failed on validation data: EWC at 1 (seed 100): no luck",
    ]
    board = tables(toy, failed=failed)[0]
    assert list(board.notes[-3:]) == told
    assert not any("Failed" in note for note in tables(toy)[0].notes)
    page = bench_page(toy, failed=failed)
    assert all(line in page for line in (*told, "other: Failed: EWC at 1 (seed 0): elsewhere"))


def test_a_strength_that_failed_was_tried(toy):
    tried = [
        result(method, 100, [[0.9], [share, share]], strength=strength, validating=True)
        for method, strength, share in (("EWC", 1.0, 0.6), ("EWC", 10.0, 0.8), ("SI", 1.0, 0.7))
    ]
    failed = [
        lost("EWC", 100, 1e3, "no luck", validating=True, tasks=2),
        lost("MAS", 100, 1e3, "no luck", validating=True),
        lost("EWC", 100, 1e4, "of another number of tasks", validating=True, tasks=5),
    ]
    assert tables([*toy, *tried])[-1].notes[-1].startswith("EWC did best at the largest")
    table = tables([*toy, *tried], failed=failed)[-1]
    assert table.headings == ("method", "1", "10", "1000")
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["EWC", "60.00", "80.00", "failed"], ["MAS", "–", "–", "failed"], ["SI", "70.00", "–", "–"],
    ]  # fmt: skip
    assert not any("did best" in note for note in table.notes)


def test_strengths_tried_stand_under_the_longest_protocol_and_those_of_another_seed_do_not(toy):
    longer = result("EWC", 0, [[0.9, 0.9, 0.9]] * 3, strength=1.0)
    tried = [
        result("EWC", seed, [[0.9], [0.7, 0.7]], strength=strength, validating=True, made=made)
        for seed, strength, made in (
            (99, 30.0, {"date": "2025-01-02"}),
            (100, 300.0, {"date": "2025-01-01", "version": "0.9"}),
            (100, 1.0, {}),
            (100, 10.0, {}),
        )
    ]
    found = tables([*toy, longer, *tried])
    (table,) = (each for each in found if each.title.startswith("Strengths"))
    assert (table.protocol, table.headings) == ("toy, 3 tasks", ("method", "1", "10"))


def test_strengths_tried_on_other_numbers_of_tasks_stand_apart(toy):
    """EWC stands at 10, which is the best over two tasks; over three it is 1, and nothing was chosen from there."""
    three = [
        result("EWC", 100, [[0.9]] * 2 + [[0.9, 0.9, last]], strength=strength, validating=True, made={"date": date})
        for strength, last, date in ((1.0, 0.9, "2025-01-01"), (10.0, 0.6, "2025-01-02"), (30.0, 0.3, "2025-01-03"))
    ]
    two = [
        result("EWC", 100, [[0.9], [0.7, last]], strength=s, validating=True) for s, last in ((1.0, 0.6), (10.0, 0.7))
    ]
    *before, first, second = tables([*toy, *three, *two])
    assert before == tables(toy)
    assert [table.title for table in (first, second)] == [
        "Strengths on validation data, 2 tasks", "Strengths on validation data, 3 tasks",
    ]  # fmt: skip
    assert [cell.text for cell in first.rows[0].cells] == ["EWC", "65.00", "70.00"]
    assert [cell.text for cell in second.rows[0].cells] == ["EWC", "90.00", "80.00", "70.00"]
    assert not any("chosen from other runs" in note for table in (first, second) for note in table.notes)
    other = [result("EWC", 100, [[0.9], [0.7, 0.9]], strength=1.0, validating=True, made={"date": "2027-01-01"})]
    *_, first, second = tables([*toy, *three, *two, *other])
    assert all(
        "EWC stands at 10: it was chosen from other runs than these." in table.notes for table in (first, second)
    )
    page = bench_page([*toy, *three, *two])
    assert first.title in page
    assert second.title in page


def test_published_numbers_stand_among_ours_and_say_what_they_were_chosen_on():
    (board,) = tables(told("EWC", 0.85))
    assert [row.cells[0].text for row in board.rows] == [
        "improved VCL (published)", "VCL (published)", "SI (published)", "EWC", "EWC (published)",
    ]  # fmt: skip
    ewc = board.rows[-1]
    assert ewc.published
    assert (ewc.cells[1].text, ewc.cells[3].text) == ("chosen on test data", "84")
    assert "Nguyen" in ewc.cells[-1].text
    assert "800 epochs" in board.rows[0].cells[-1].text


def told(method, *averages, strength=None, chosen=False, protocol="vcl", made=None, job=None, tasks=2, **more):
    """Runs with these averages at the end, a seed each, and the protocol's own numbers."""
    numbers = numbers_of(PROTOCOLS[protocol]) if protocol in PROTOCOLS else {}
    return [
        result(method, seed, [[0.99] * tasks] * (tasks - 1) + [[average] * tasks], strength=strength, protocol=protocol,
               made=made, job={"chosen": chosen, "numbers": numbers, **(job or {})}, **more)
        for seed, average in enumerate(averages)
    ]  # fmt: skip


def claimed(*results):
    """What is said beside the published numbers: by what was published and our method, cells 4 to 7."""
    first, *_ = tables([one for each in results for one in each])
    assert first.title == "Published, and here"
    return {(row.cells[1].text, row.cells[3].text): tuple(cell.text for cell in row.cells[4:8]) for row in first.rows}


def test_published_numbers_are_judged_by_the_method_that_does_the_same():
    results = [
        *told("joint", 0.97, 0.97),
        *told("ewc", 0.79, 0.78, strength=1.0),
        *told("ewc", 0.88, 0.89, strength=10.0, chosen=True),  # published: 84.0
        *told("ewc-original", 0.70, 0.80, strength=1.0),  # 9 points below, and the seeds 10 apart
        *told("ewc-original", 0.74, 0.74, strength=0.1),
        *told("si", 0.851, 0.853, strength=1.0),  # 86.0
        *told("ivon", 0.895),  # 90.0, improved 93.0
        *told("kronecker", 0.94, 0.96, strength=1.0),
        *told("ewc", 0.83, 0.84, strength=1.0, protocol="avalanche-ewc-sgd"),  # 94.0
        *told("joint", 0.87, 0.88, protocol="avalanche-ewc-sgd"),
    ]
    first, *_ = tables(results)
    assert first.title == "Published, and here"
    rows = [tuple(cell.text for cell in row.cells[:9]) for row in first.rows]
    best, joint = "95.00 ± 1.41, kronecker", "97.00 ± 0.00"
    assert rows == [
        ("vcl", "EWC", "84", "ewc-original", "75.00 ± 7.07", "75.00 ± 7.07 at 1 (test data)",
         "missed by 9.0, within chance", best, joint),
        ("vcl", "EWC", "84", "ewc", "78.50 ± 0.71", "88.50 ± 0.71 at 10 (validation data)",
         "exceeded by 4.5, within chance", best, joint),
        ("vcl", "SI", "86", "si", "85.20 ± 0.14", "–", "reached", best, joint),
        ("vcl", "VCL", "90", "ivon", "89.50", "–", "reached, one seed", best, joint),
        ("vcl", "improved VCL", "93", "ivon", "89.50", "–", "missed by 3.5, one seed", best, joint),
        ("avalanche-ewc-sgd", "EWC", "94", "ewc", "83.50 ± 0.71", "–", "missed by 10.5, not even jointly",
         "83.50 ± 0.71, ewc", "87.50 ± 0.71"),
    ]  # fmt: skip
    assert first.rows[0].cells[9].text == "strength best on test data"
    assert first.rows[4].cells[9].text == "800 epochs a task"
    assert [row.cells[6].sort for row in first.rows][:3] == pytest.approx([-9.0, 4.5, -0.8])
    assert len(first.notes) == 1


@pytest.mark.parametrize(
    ("averages", "outcome"),
    [
        ((0.8347, 0.8302, 0.8521), "reached"),  # one point below 84.9, and in floating point a little more
        ((0.838, 0.8380, 0.8380), "missed by 1.1"),
        ((0.859, 0.8590, 0.8590), "reached"),
        ((0.860, 0.8600, 0.8600), "exceeded by 1.1"),
        ((0.800, 0.8100, 0.8200), "missed by 3.9"),  # beyond 2.5 deviations, which three seeds tell from chance
        ((0.815, 0.8250, 0.8350), "missed by 2.4, within chance"),
        ((0.845,), "reached, one seed"),
        ((0.900,), "exceeded by 5.1, one seed"),
    ],
)
def test_what_is_a_point_apart_is_reached_and_what_is_farther_may_be_chance(averages, outcome):
    found = claimed(told("ewc", *averages, strength=1.0, protocol="fisher"))
    assert found["EWC, exact Fisher", "ewc"][2] == outcome


def test_joint_training_a_point_below_misses_nothing_and_is_held_to_joint_training():
    below = told("ewc", 0.83, 0.83, strength=1.0, protocol="hsu-class")
    found = claimed(below, told("joint", 0.97, 0.97, protocol="hsu-class"))
    assert found["joint", "joint"] == ("97.00 ± 0.00", "–", "reached", "–")
    check = told("ewc", 0.83, 0.83, strength=1.0, protocol="avalanche-ewc-sgd")  # 94
    for joint, more in ((0.931, ""), (0.929, ", not even jointly")):
        found = claimed(check, told("joint", joint, joint, protocol="avalanche-ewc-sgd"))
        assert found["EWC", "ewc"][2] == f"missed by 11.0{more}"


def test_published_numbers_are_laid_beside_no_other_numbers():
    """A run of one's own under a protocol's name, and one with more epochs."""
    numbers = numbers_of(PROTOCOLS["vcl"])
    for other in ({}, {**numbers, "training": {**numbers["training"], "epochs": 20}}):
        (board,) = tables(told("si", 0.85, strength=1.0, job={"numbers": other}))
        assert [row.published for row in board.rows] == [False]
        assert "published on vcl is not laid beside" in board.notes[-1]
    own = told("si", 0.99, 0.99, strength=1.0, made={"version": "2"}, job={"numbers": {}})
    first, *_ = tables([*told("si", 0.85, 0.85, strength=1.0), *own])
    assert [cell.text for cell in first.rows[0].cells[4:8]] == [
        "85.00 ± 0.00",
        "–",
        "reached",
        "85.00 ± 0.00, si [1.0]",
    ]


def test_of_strengths_that_were_chosen_the_one_over_the_most_tasks_stands():
    two, three, four = (
        [
            result("si", 100, [[0.9]] * (tasks - 1) + [[average] * tasks], strength=strength, validating=True,
                   protocol="vcl")
            for strength, average in zip((10.0, 100.0), averages, strict=True)
        ]
        for tasks, averages in ((2, (0.9, 0.8)), (3, (0.8, 0.9)), (4, (0.9, 0.8)))
    )  # fmt: skip
    at_ten = told("si", 0.85, 0.85, strength=10.0, chosen=True)
    at_hundred = told("si", 0.80, 0.80, strength=100.0, chosen=True, made={"date": "2027-01-01"})
    found = claimed(at_ten, at_hundred, two, three, four)
    assert found["SI", "si"][1:3] == ("85.00 ± 0.00 at 10 (validation data)", "reached")
    found = claimed(at_ten, at_hundred, two, three)
    assert found["SI", "si"][1] == "80.00 ± 0.00 at 100 (validation data)"


def test_a_best_strength_is_of_several_and_no_lucky_seed():
    one = told("si", 0.80, 0.80, strength=1.0)
    assert claimed(one, told("si", 0.86, strength=10.0))["SI", "si"] == (
        "80.00 ± 0.00", "–", "missed by 6.0", "80.00 ± 0.00, si",
    )  # fmt: skip
    assert claimed(one, told("si", 0.86, 0.86, strength=10.0))["SI", "si"][1:] == (
        "86.00 ± 0.00 at 10 (test data)", "reached", "86.00 ± 0.00, si at 10 (test data)",
    )  # fmt: skip
    # The same strength by two versions is one; without a strength there is nothing that could be the best.
    newer = told("si", 0.81, 0.81, strength=1.0, made={"version": "2", "date": "2027-01-01"})
    assert claimed(one, newer)["SI", "si"][:2] == ("81.00 ± 0.00", "–")
    worse = told("si", 0.78, 0.78, strength=1.0, made={"version": "2", "date": "2027-01-01"})
    assert claimed(one, worse)["SI", "si"][0] == "78.00 ± 0.00"
    alone = told("si", 0.80, strength=1.0), told("si", 0.86, strength=10.0)
    assert claimed(*alone)["SI", "si"][1:3] == ("86.00 at 10 (test data)", "reached, one seed")
    more = told("si", 0.79, 0.79, 0.79, strength=1.0, made={"version": "0.9", "date": "2025-01-01"})
    assert claimed(one, newer, more)["SI", "si"][0] == "79.00 ± 0.00"
    assert claimed(one, told("si", 0.90, 0.90))["SI", "si"][1] == "–"


def test_what_is_missing_is_named_by_its_section():
    first, *_ = tables([*told("si", 0.85), *told("si", 0.85, tasks=3)])
    assert "SI on" not in first.notes[1]
    assert "EWC on vcl, 2 tasks, " in first.notes[1]
    assert first.notes[1].endswith("improved VCL on vcl, 3 tasks.")


def test_published_numbers_whose_methods_were_not_run_are_named_and_a_control_has_no_rival():
    """The published joint training is held to joint training alone."""
    (row,), (how, missing) = (part := tables(told("joint", 0.979, 0.98, protocol="hsu-class"))[0]).rows, part.notes
    assert [cell.text for cell in row.cells[6:8]] == ["reached", "–"]
    assert "Student" in how
    assert missing == ("Not run here: EWC on hsu-class, online EWC on hsu-class, LwF on hsu-class, MAS on hsu-class.")


def test_what_was_published_is_what_was_written_down_a_second_time():
    """The accuracy, our methods that do the same, and whether its strength was the best one on test data."""
    ewc, running, fields = ("ewc-original", "ewc"), ("ewc", "ewc-online"), ("mean-field", "ivon")
    assert [(one.protocol, one.method, one.accuracy, one.ours, one.chosen_on_test) for one in PUBLISHED] == [
        ("vcl", "EWC", 84.0, ewc, True),
        ("vcl", "SI", 86.0, ("si",), True),
        ("vcl", "VCL", 90.0, fields, False),
        ("vcl", "improved VCL", 93.0, fields, False),
        ("vandeven", "EWC", 94.3, ewc, True),
        ("vandeven", "online EWC", 94.4, running, True),
        ("vandeven", "SI", 95.3, ("si",), True),
        ("vandeven", "joint", 97.6, ("joint",), False),
        ("zenke", "SI", 96.9, ("si",), True),
        ("zenke", "joint", 98.3, ("joint",), False),
        ("ritter", "Kronecker Laplace", 90.0, ("kronecker", "kronecker-rotated"), False),
        ("hsu-task", "EWC", 98.6, ewc, True),
        ("hsu-task", "online EWC", 99.1, running, True),
        ("hsu-task", "LwF", 99.6, ("lwf",), True),
        ("hsu-task", "MAS", 99.2, ("mas",), True),
        ("hsu-task", "joint", 99.7, ("joint",), False),
        ("hsu-domain", "EWC", 58.9, ewc, True),
        ("hsu-domain", "online EWC", 57.0, running, True),
        ("hsu-domain", "LwF", 71.0, ("lwf",), True),
        ("hsu-domain", "MAS", 69.0, ("mas",), True),
        ("hsu-domain", "joint", 98.4, ("joint",), False),
        ("hsu-class", "EWC", 19.8, ewc, True),
        ("hsu-class", "online EWC", 20.0, running, True),
        ("hsu-class", "LwF", 24.0, ("lwf",), True),
        ("hsu-class", "MAS", 20.0, ("mas",), True),
        ("hsu-class", "joint", 97.9, ("joint",), False),
        ("fisher", "EWC, exact Fisher", 84.9, ewc, True),
        ("fisher", "EWC, sampled Fisher", 83.8, ("ewc-sampled",), True),
        ("fisher", "EWC, observed Fisher", 83.3, ("ewc-observed",), True),
        ("fisher", "EWC, squares of batches of 128", 83.4, ("ewc-batched",), True),
        ("fisher", "fine-tuning", 69.5, ("fine-tuning",), False),
        ("avalanche-ewc", "EWC", 94.0, ewc, False),
        ("avalanche-ewc-sgd", "EWC", 94.0, ewc, False),
        ("avalanche-si", "SI", 95.0, ("si",), False),
    ]


def test_what_was_published_is_laid_beside_methods_that_there_are():
    assert {method for one in PUBLISHED for method in one.ours} <= METHODS.keys()
    assert {one.protocol for one in PUBLISHED} <= PROTOCOLS.keys()


def test_published_numbers_come_first_on_the_page_and_are_left_out_where_there_are_none(toy):
    page = bench_page(told("si", 0.85, 0.86, strength=1.0))
    assert page.index('<h2 id="published">Published, and here</h2>') < page.index('<h2 id="protocol-1">')
    assert "reached</td>" in page
    assert 'id="published"' not in bench_page(toy)
    assert [" in italics" in each for each in (page, bench_page(toy))] == [True, False]


def test_a_diverged_likelihood_is_shown_as_such():
    board, *_ = tables([result("EWC", seed, [[0.9, 0.1], [0.8, 0.9]], nll=[[1.0, math.inf]]) for seed in range(2)])
    assert by_first(board)["EWC"]["nll, nats"].text == "∞"


def test_numbers_of_tasks_that_differ_are_told_apart():
    results = [
        result("EWC", 0, [[0.9, 0.1], [0.8, 0.9]]),
        result("EWC", 0, [[0.9, 0.1, 0.1], [0.8, 0.9, 0.1], [0.8, 0.8, 0.9]]),
    ]
    assert [table.protocol for table in tables(results)] == ["toy, 2 tasks", "toy, 3 tasks"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_out_of_the_page_the_markdown_or_the_csv(name):
    results = [
        result(name, seed, [[0.9, 0.1], [0.8, 0.9]], protocol=name, job={"description": name}) for seed in (0, 1)
    ]
    results += [result("EWC", seed, [[0.9, 0.1], [0.8, 0.8]], protocol=name, strength=1.0) for seed in (0, 1)]
    page = bench_page(results)
    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("script") == 1
    assert "onclick" not in reader.attributes
    assert " ".join(name.split()) in " ".join(" ".join(reader.texts).split())

    lines = markdown(tables(results)).splitlines()
    assert not any("<script" in line for line in lines)
    grid = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in grid} == {18, 5}  # the leaderboard's, the comparisons'

    rows = list(csv_module.DictReader(io.StringIO(csv(results), newline="")))
    assert rows[0]["method"] == (f"'{name}" if name.startswith("=") else name)
    assert [row["seed"] for row in rows] == ["0", "1", "0", "1"]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_name_that_a_spreadsheet_would_compute_is_a_text(start):
    name = f"{start}cmd|' /C calc'!A0"
    (row,) = csv_module.DictReader(io.StringIO(csv([result(name, 0, [[0.9, 0.1], [0.8, 0.9]])]), newline=""))
    assert row["method"] == f"'{name}"


def test_the_csv_has_a_line_for_each_run_in_raw_numbers(toy):
    rows = list(csv_module.DictReader(io.StringIO(csv(toy), newline="")))
    assert len(rows) == len(toy)
    (ewc,) = (row for row in rows if row["method"] == "EWC" and row["seed"] == "0" and row["strength"] == "1.0")
    assert float(ewc["average"]) == pytest.approx(0.75)
    assert float(ewc["backward"]) == pytest.approx(-0.2)
    assert int(ewc["kept_bytes"]) == 2_000_000
    assert (ewc["tasks"], ewc["version"], ewc["remembering_bytes"]) == ("2", "1.0", "")
    (chosen,) = {row["strength_chosen_on"] for row in rows if row["strength"] == "10.0"}
    assert chosen == "validation data"


def test_the_markdown_aligns_numbers_and_keeps_underscores_inside_words():
    text = markdown(tables([result("J_original _x_", 0, [[0.9, 0.1], [0.8, 0.9]], strength=1.0)]))
    assert "| method | strength | seeds |" in text
    assert "| --- | ---: | ---: |" in text
    assert r"| J_original \_x\_ | 1 | 1 seed | 85.00 |" in text


def test_the_page_needs_no_network_and_is_the_same_each_time(toy):
    page = bench_page(toy, title="A & B")
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:image/png)[^"']*|@import|url\((?!#)[^)]*""", page)
    assert fetched == []
    assert "<h1>A &amp; B</h1>" in page
    ids = re.findall(r"""\sid="([^"]*)""", page)
    assert len(ids) == len(set(ids))
    used = re.findall(r"""(?:href="|url\()#([^")]*)""", page)
    assert set(used) <= set(ids)
    assert page == bench_page(toy, title="A & B")
    assert page.count('role="img"') == 3
    assert 'aria-sort="descending"' in page


def test_fifty_tasks_are_pictures_and_not_thousands_of_cells():
    def table(drop):
        return [[0.97 - drop * (i - j) if j <= i else 0.1 for j in range(50)] for i in range(50)]

    results = [result(f"method {k}", seed, table(k / 4000)) for k in range(20) for seed in range(2)]
    page = bench_page(results)
    assert page.count("data:image/png;base64,") == 20
    assert len(page) < 800_000
    assert "accuracy on each of 50 tasks after 50 stages; 97.0 % on average at the end" in page


def test_a_matrix_is_the_mean_over_seeds_and_joint_training_has_one_row():
    results = [result("EWC", 0, [[0.9, 0.1], [0.7, 0.8]]), result("EWC", 1, [[0.8, 0.3], [0.8, 0.9]])]
    page = bench_page([*results, result("joint", 0, [[0.91, 0.97]])])
    cells = re.findall(r"""<td( class="ahead")? style="--ink:[\d.]+">(\d+)</td>""", page)
    assert [text for _, text in cells] == ["91", "97", "85", "20", "75", "85"]  # joint first: it is better
    assert [text for ahead, text in cells if ahead] == ["20"]


@pytest.mark.parametrize(
    "accuracies",
    [
        [[[0.9]]],  # a single task: nothing in turn
        [[[0.9, 0.98]]],  # joint training alone
        [[[1.0, 0.1], [1.0, 1.0]], [[1.0, 0.1], [0.9, 0.9]], [[1.0, 0.1], [1.0, 1.0]]],  # a band beyond 100 %
        [[[0.0, 0.0], [0.0, 0.0]]],  # nothing learned
        [[[0.9, 0.1], [0.8, 0.9]], [[0.8, 0.9]]],  # runs of one method that differ in their stages
    ],
)
def test_the_pictures_stand_odd_runs_without_a_warning(accuracies):
    results = [result("EWC", seed, table, learning_seconds=[1.0]) for seed, table in enumerate(accuracies)]
    page = bench_page(results)
    assert page.count('role="img"') == (3 if all(len(table) > 1 for table in accuracies) else 1)


@pytest.mark.parametrize("count", [13, 20])
def test_the_picture_of_many_tasks_has_a_row_for_each_stage_and_a_column_for_each_task(count):
    """Written out: blue by the square of what is known; before its turn grey, and never white."""
    from matplotlib.image import imread

    generator = random.Random(count)
    cells = [[generator.random() for _ in range(count)] for _ in range(count)]
    for table in (cells, cells[:1]):
        runs = [
            Run("EWC", seed, [[part * each for each in row] for row in table]) for seed, part in ((0, 0.8), (1, 1.0))
        ]
        pixels = 255 * imread(io.BytesIO(base64.b64decode(matrix("EWC", runs).image)))
        assert pixels.shape[:2] == (len(table), count)
        for stage, task in itertools.product(range(len(table)), range(count)):
            ahead = len(table) > 1 and task > stage
            ink, share = ((87, 96, 106), 0.08) if ahead else ((0, 114, 178), 0.0)
            share += 0.7 * (0.9 * table[stage][task]) ** 2
            expected = [255 - share * (255 - each) for each in ink]
            assert list(pixels[stage, task, :3]) == pytest.approx(expected, abs=0.51)


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the pictures that are made: what is drawn, before it is written down."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes = []

    def picture(draw, size, about, name=""):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)  # measures text
        draw(figure)
        axes.extend(figure.axes)
        return about

    for module in ("figures", "fronts"):
        monkeypatch.setattr(f"holdfast.report.{module}.picture", picture)
    return axes


def three():
    """Three tasks in turn on two seeds and on one, and all of them at once.

    On EWC's second seed the first task is known best after the second one: more is forgotten than backward transfer
    tells. Its averages so far are 90, 75, 60 and 80, 90, 75.
    """
    return [
        result("EWC", 0, [[0.9, 0.1, 0.1], [0.7, 0.8, 0.1], [0.5, 0.6, 0.7]],
               learning_seconds=[1.0, 2.0, 3.0], remembering_seconds=[0.5, 0.5, 1.0]),
        result("EWC", 1, [[0.8, 0.1, 0.1], [0.9, 0.9, 0.1], [0.6, 0.8, 0.85]],
               learning_seconds=[2.0, 4.0, 4.0], remembering_seconds=[1.0, 0.5, 0.5]),
        result("SI", 0, [[0.9, 0.1, 0.1], [0.8, 0.9, 0.1], [0.7, 0.9, 0.6]]),
        result("joint", 0, [[0.95, 0.97, 0.99]], learning_seconds=[1.0]),
        result("joint", 1, [[0.91, 0.95, 0.99]], learning_seconds=[90.0], remembering_seconds=[9.0]),
    ]  # fmt: skip


STEPS = [1, 2, 3]
APART = 2**-0.5  # the deviation of two numbers, of how far they are apart
LEVEL = 100 * (0.97 + 0.95) / 2


def line(axis, color):
    """The only line of a color: where it goes."""
    (found,) = (each for each in axis.lines if each.get_color() == color)
    return list(found.get_xdata()), list(found.get_ydata())


def band(axis, color):
    """The only band of a color: its lower and its upper end at every step."""
    from matplotlib.colors import to_rgb

    (found,) = (each for each in axis.collections if tuple(each.get_facecolor()[0][:3]) == to_rgb(color))
    ends = {}
    for x, y in found.get_paths()[0].vertices:
        ends.setdefault(x, []).append(y)
    return [[edge(ends[step]) for step in STEPS] for edge in (min, max)]


def around(middles, deviations):
    """A band's lower and upper ends."""
    return [
        pytest.approx([middle + side * deviation for middle, deviation in zip(middles, deviations, strict=True)])
        for side in (-1, 1)
    ]


def test_the_curves_are_the_means_so_far_with_a_deviation_around_them_and_joint_trainings_level(drawn):
    (section,) = sections(three())
    marked = marks(entry.label for entry in section.entries)
    assert curves(section, marked, "x")
    (axis,) = drawn
    means = [85.0, 82.5, 67.5]
    assert line(axis, marked["EWC"].color) == (STEPS, pytest.approx(means))
    assert band(axis, marked["EWC"].color) == around(means, [10 * APART, 15 * APART, 15 * APART])
    assert line(axis, marked["SI"].color) == (STEPS, pytest.approx([90.0, 85.0, 100 * 2.2 / 3]))
    assert line(axis, marked["joint"].color)[1] == pytest.approx([LEVEL, LEVEL])
    assert len(axis.lines) == 3


def test_what_is_forgotten_is_drawn_of_the_first_task_and_of_all_so_far(drawn):
    assert forgetting([one.run for one in three()])
    first, every = drawn
    color = COLORS[0]
    means = [85.0, 80.0, 55.0]
    assert line(first, color) == (STEPS, pytest.approx(means))
    assert band(first, color) == around(means, [10 * APART, 20 * APART, 10 * APART])
    assert line(first, COLORS[1]) == (STEPS, pytest.approx([90.0, 80.0, 70.0]))
    assert line(first, COLORS[2])[1] == pytest.approx([93.0, 93.0])
    means = [85.0, 82.5, 67.5]
    assert line(every, color) == (STEPS, pytest.approx(means))
    assert band(every, color) == around(means, [10 * APART, 15 * APART, 15 * APART])
    assert line(every, COLORS[1]) == (STEPS, pytest.approx([90.0, 85.0, 100 * 2.2 / 3]))
    assert line(every, COLORS[2])[1] == pytest.approx([LEVEL, LEVEL])


def points(axis):
    """The marks by their colors: where they stand, and from where to where their bars go."""
    found = {}
    for container in axis.containers:
        mark, _, bars = container.lines
        ((x,), (y,)) = mark.get_xdata(), mark.get_ydata()
        (((left, low), (right, high)),) = bars[0].get_segments()
        (((middle, bottom), (center, top)),) = bars[1].get_segments()
        assert (low, high, middle, center) == (y, y, x, x)
        found[mark.get_color()] = (x, left, right, y, bottom, top)
    return found


def spanned(x, dx, y, dy):
    """A mark and the ends of its bars, as `points` tells them."""
    return pytest.approx((x, x - dx, x + dx, y, y - dy, y + dy), abs=1e-6)


def test_the_front_is_what_is_forgotten_against_each_task_when_new(drawn):
    """EWC forgets (40 + 20) / 2 and (30 + 10) / 2 of 80 and 85 when new, SI (20 + 0) / 2 of 80."""
    (section,) = sections(three())
    marked = marks(entry.label for entry in section.entries)
    assert front(section, marked, "x")
    (axis,) = drawn
    assert points(axis) == {
        marked["EWC"].color: spanned(25.0, 10 * APART, 82.5, 5 * APART),
        marked["SI"].color: spanned(10.0, 0.0, 80.0, 0.0),
    }


def test_the_time_is_that_of_learning_and_of_remembering_against_the_average(drawn):
    """EWC takes 8 and 12 seconds; joint training 1 and 99, whose bar ends above zero; of SI none are told."""
    (section,) = sections(three())
    marked = marks(entry.label for entry in section.entries)
    assert timing(section, marked, "x")
    (axis,) = drawn
    assert points(axis) == {
        marked["EWC"].color: spanned(10.0, 4 * APART, 67.5, 15 * APART),
        marked["joint"].color: spanned(50.0, 45.0, LEVEL, 2 * APART),
    }


def saved(folder, results):
    folder.mkdir()
    for number, one in enumerate(results):
        write(folder / f"{number}.json", one)
    return folder


def test_the_command_writes_all_three_files_and_says_what_it_left_out(toy, tmp_path, capsys):
    folder = saved(tmp_path / "results", toy)
    (folder / "broken.json").write_text("{", encoding="utf-8")
    page, text, lines = tmp_path / "page.html", tmp_path / "tables.md", tmp_path / "runs.csv"
    report_command(folder, page, text, lines)
    assert "broken.json" in capsys.readouterr().err
    assert "broken.json" in page.read_text(encoding="utf-8")
    write(folder / "9.error.json", lost("MAS", 0, 1.0, "no luck at all"))
    write(folder / "other.error.json", lost("MAS", 0, 1.0, "no luck there", protocol="other"))
    bundled = tmp_path / "all.jsonl"
    report_command(folder, page, tmp_path / "failed.md", bundled=bundled)
    assert "other: Failed: MAS at 1 (seed 0): no luck there" in (tmp_path / "failed.md").read_text(encoding="utf-8")
    assert "other: Failed: MAS at 1 (seed 0): no luck there" in page.read_text(encoding="utf-8")
    assert "Failed: MAS at 1 (seed 0): no luck at all" in page.read_text(encoding="utf-8")
    (folder / "9.error.json").unlink()
    report_command(bundled, page)
    assert "Failed: MAS at 1 (seed 0): no luck at all" in page.read_text(encoding="utf-8")
    assert text.read_text(encoding="utf-8") == markdown(tables(toy))
    with open(lines, encoding="utf-8", newline="") as file:
        assert len(list(csv_module.DictReader(file))) == len(toy)


def test_where_nothing_can_be_read_it_is_said_why(tmp_path, capsys):
    (tmp_path / "older.json").write_text('{"format": 0}', encoding="utf-8")
    with pytest.raises(DataError, match="has no results that can be read"):
        report_command(tmp_path, tmp_path / "page.html")
    assert f"left out: {tmp_path / 'older.json'} has format 0" in capsys.readouterr().err


def test_what_is_wrong_is_one_line(toy, tmp_path):
    page = tmp_path / "page.html"
    with pytest.raises(ArgumentError, match="not a folder of results"):
        report_command(tmp_path / "none", page)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no results"):
        report_command(tmp_path / "empty", page)
    folder = saved(tmp_path / "results", toy)
    with pytest.raises(ArgumentError, match="its folder does not exist"):
        report_command(folder, tmp_path / "no" / "page.html")
    with pytest.raises(ArgumentError, match="could not be written"):
        report_command(folder, tmp_path / "empty")
    with pytest.raises(ArgumentError, match="a file each"):
        report_command(folder, page, page)
    content = (folder / "0.json").read_bytes()
    for target in (folder / "0.json", folder):
        with pytest.raises(ArgumentError, match="among the results that the report is made of"):
            report_command(folder, target)
    with pytest.raises(ArgumentError, match="among the results that the report is made of"):
        report_command(folder / "0.json", page, csv=folder / "0.json")
    assert (folder / "0.json").read_bytes() == content
    trial = saved(tmp_path / "trial", [result("EWC", 0, [[0.9, 0.1], [0.8, 0.9]], strength=1.0, validating=True)])
    with pytest.raises(DataError, match="only validation runs here"):
        report_command(trial, page)
    assert not page.exists()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_click_on_a_heading_sorts_with_dashes_last_both_ways(toy, tmp_path):
    probe = """<script>
      const table = document.querySelector("table.sortable");
      const told = [];
      for (const column of [4, 4, 0, 0]) {
        const button = table.tHead.rows[0].cells[column].querySelector("button");
        button.focus();
        button.click();
        const names = [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
        told.push(button.parentNode.getAttribute("aria-sort") + ": " + names.join("; "));
      }
      document.body.innerHTML = "<pre>" + told.join("\\n") + "</pre>";
    </script></body>"""
    page = tmp_path / "page.html"
    page.write_text(bench_page(toy).replace("</body>", probe), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    found = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    lines = re.search(r"<pre>(.*?)</pre>", found, re.S)[1].splitlines()
    order = [line.split(": ")[1].split("; ") for line in lines]
    assert [line.split(":")[0] for line in lines] == ["descending", "ascending", "ascending", "descending"]
    # Forgotten, in points: fine-tuning 60, SI 40, EWC at strength 10 30, EWC at strength 1 10; joint has nothing.
    assert order[0] == ["fine-tuning", "SI", "EWC", "EWC", "joint"]
    assert order[1] == ["EWC", "EWC", "SI", "fine-tuning", "joint"]
    assert order[2] == ["EWC", "EWC", "fine-tuning", "joint", "SI"]
    assert order[3] == ["SI", "joint", "fine-tuning", "EWC", "EWC"]


def test_what_is_endless_sorts_as_a_number_and_versions_of_the_code_keep_their_ends():
    assert [Cell("", each).key for each in (math.inf, -math.inf, math.nan, 1.5, "a")] == [
        "Infinity", "-Infinity", "", "1.5", "a",
    ]  # fmt: skip
    labels = [
        f"kronecker-softened at {strength} [{device}0.1.0+{digest}]"
        for strength in (0.1, 10, 100000)
        for digest in ("cb25fc9b", "1f00ba42")
        for device in ("", "CPU, x86_64, ")
    ]
    shown = {each: short(each) for each in labels if "CPU" not in each}
    assert len(set(shown.values())) == len(shown)
    assert all(len(short(each)) <= 36 for each in labels)
    assert short("a name of one's own that is far too long for a legend") == "a name of one's own that is far too…"
    rows = [[0.9, 0.1], [0.8, 0.9]]
    several = [result("ewc", 0, rows, strength=s, made={"version": v}) for s in (1.0, 10.0) for v in ("1", "2")]
    assert [entry.name for entry in sections(several)[0].entries] == [
        "ewc [1]", "ewc [2]", "ewc at 10 [1]", "ewc at 10 [2]",
    ]  # fmt: skip


def test_the_newest_of_two_runs_is_so_by_the_clock_of_both():
    rows = [[0.9, 0.1], [0.8, 0.9]]
    old, new = (
        result("ewc", 0, rows, strength=1.0, made={"date": date})
        for date in ("2026-11-16T00:30:00+02:00", "2026-11-15T23:30:00+00:00")
    )
    (section,) = sections([old, new])
    assert section.entries[0].results == (new,)


def test_runs_from_files_that_were_not_recorded_are_not_mixed_with_others():
    rows = [[0.9, 0.1], [0.8, 0.9]]
    known = [result("EWC", seed, rows, made={"data": "a1b2"}) for seed in range(2)]
    board, *_ = tables([*known, *(result("EWC", seed, [[0.9, 0.1], [0.6, 0.7]]) for seed in range(2))])
    assert len(board.rows) == 2
    assert any("different files of the data: a1b2, unknown." in note for note in board.notes)


def test_where_several_strengths_are_the_best_or_none_is_below_there_is_no_end():
    assert at_an_end({1.0: 0.5, 10.0: 0.7}) == "largest"
    assert at_an_end({1.0: 0.7, 10.0: 0.5}) == "smallest"
    assert at_an_end({1.0: 0.7, 10.0: 0.7}) == at_an_end({0.0: 0.7, 10.0: 0.5}) == ""


def test_runs_of_several_versions_or_devices_stand_together_where_that_is_asked_for():
    rows = {0: [[0.9, 0.1], [0.8, 0.9]], 1: [[0.9, 0.1], [0.7, 0.9]]}
    results = [
        result("EWC", 0, [[0.9, 0.1], [0.1, 0.1]], made={"version": "1", "date": "2025-01-01"}),
        result("EWC", 0, rows[0], made={"version": "2"}),
        result("EWC", 1, rows[1], made={"version": "1"}),
        result("EWC", 2, rows[1], made={"version": "1", "device": "H200"}),
    ]
    assert len(tables(results)[0].rows) == 3
    board, *_ = tables(results, across=["version"])
    # A seed counts once, by its newest run; another device's runs stay apart.
    assert [[cell.text for cell in row.cells[:4]] for row in board.rows] == [
        ["EWC", "–", "2", "82.50 ± 3.54"], ["EWC", "–", "1 seed", "80.00"],
    ]  # fmt: skip
    assert any("different versions of the code: 1, 2." in note for note in board.notes)
    board, *_ = tables(results, across=["version", "device"])
    assert [[cell.text for cell in row.cells[:4]] for row in board.rows] == [["EWC", "–", "3", "81.67 ± 2.89"]]
    assert any("different devices: H200, cpu." in note for note in board.notes)
    assert bench_page(results, across=["version"]) != bench_page(results)


@pytest.mark.parametrize(
    ("last", "told"), [("2026-01-01T22:00:00+00:00", "2026-01-01"), ("2026-01-03", "2026-01-01 to 2026-01-03")]
)
def test_when_runs_were_made_is_told_in_days(last, told):
    dates = ("2026-01-01T03:00:00+00:00", last)
    page = bench_page([result("EWC", seed, [[0.9]], made={"date": date}) for seed, date in enumerate(dates)])
    assert f"<dt>date</dt><dd>{told}</dd>" in page


def test_a_seed_of_several_devices_counts_by_the_one_with_most_runs_however_old():
    right = {"cpu": [[0.9, 0.1], [0.8, 0.9]], "H200": [[0.9, 0.1], [0.4, 0.9]]}
    made = [("EWC", 0, "cpu"), ("EWC", 1, "cpu"), ("SI", 0, "cpu"), ("EWC", 0, "H200"), ("EWC", 2, "H200")]
    results = [
        result(method, seed, right[device], made={"device": device, "date": f"2026-01-0{day}"})
        for day, (method, seed, device) in enumerate(made, 1)
    ]
    board, *_ = tables(results, across=["device"])
    assert [[cell.text for cell in row.cells[:4]] for row in board.rows] == [
        ["SI", "–", "1 seed", "85.00"], ["EWC", "–", "3", "78.33 ± 11.55"],
    ]  # fmt: skip
    assert any("1 other run" in note and "those on cpu go first" in note for note in board.notes)
    assert [row.cells[-1].text for row in board.rows] == ["measured, cpu", "measured, H200 and cpu"]
    assert len(tables(results)[0].rows) == 3


def test_a_run_made_again_is_one_run_of_its_device_and_of_devices_with_as_many_the_one_used_last_counts():
    def made(seed, device, day, version="1"):
        right = {"cpu": [[0.9, 0.1], [0.8, 0.9]], "H200": [[0.9, 0.1], [0.4, 0.9]]}[device]
        how = {"device": device, "version": version, "date": f"2026-01-{day:02}"}
        return result("EWC", seed, right, made=how)

    def average(results):
        boards = [tables(each, across=["device", "version"])[0] for each in (results, results[::-1])]
        return [board.rows[0].cells[3].text for board in boards]

    again = [made(0, "cpu", day, str(day)) for day in range(1, 6)]
    assert average([*again, made(0, "H200", 8), made(1, "H200", 9)]) == ["65.00 ± 0.00"] * 2
    assert average([made(0, "cpu", 1), made(0, "H200", 2)]) == ["65.00"] * 2
    assert average([made(0, "cpu", 2), made(0, "H200", 1)]) == ["85.00"] * 2


def test_protocols_come_in_the_benchs_order_and_those_of_others_last_as_they_are_found():
    names = ["theirs", "hsu-class", "vcl (tasks 20)", "own", "vandeven", "vcl", "digits"]
    found = [section.title for section in sections([result("EWC", 0, [[0.9]], protocol=name) for name in names])]
    assert found == ["digits", "vcl", "vcl (tasks 20)", "vandeven", "hsu-class", "theirs", "own"]


def test_a_protocol_is_described_as_its_newest_run_has_it_and_a_known_one_with_the_same_numbers_as_today():
    now = PROTOCOLS["avalanche-si"]
    numbers = Job(now, "si", 0).config["numbers"]

    def made(words, day, protocol=now.name, **changed):
        job = {"description": words, "numbers": {**numbers, **changed}}
        return result("si", day, [[0.9]], protocol=protocol, job=job, made={"date": f"2026-01-0{day}"})

    def told(*runs):
        return sections(runs)[0].description

    assert told(made("as it was", 2, "mine"), made("in other words", 1, "mine")) == "as it was"
    assert told(made("as it was", 1)) == now.about
    assert told(made("as it was", 1, tasks=3)) == "as it was"
    assert told(result("si", 1, [[0.9]])) == ""


def test_seconds_of_several_devices_make_no_mean_and_the_picture_is_of_one_unless_each_row_tells_its_own():
    rows = [[0.9, 0.1], [0.8, 0.9]]
    methods = (("EWC", 0, "cpu"), ("EWC", 1, "H200"), ("SI", 0, "cpu"))
    results = [
        result(method, seed, rows, made={"device": device}, learning_seconds=[1.0], learning_bytes=[10**6])
        for method, seed, device in methods
    ]
    costs = ("learning, s", "peak in learning, MB")
    for across, seen in ((["device"], ["–", "1.00"]), ([], ["1.00", "1.00", "1.00"])):
        board, *_ = tables(results, across=across)
        for cost in costs:
            assert [row.cells[board.headings.index(cost)].text for row in board.rows] == seen
    for across, on, timed in (
        (["device"], results, ["SI"]), ([], results, ["EWC", "EWC", "SI"]),
        (["device"], [results[0], results[2]], ["EWC", "SI"]),
    ):  # fmt: skip
        (section,) = sections(on, across=across)
        assert [entry.method for entry in section.timed] == timed
        page = bench_page(on, across=across)
        assert "What it costs against what is known" in page
        assert ("On cpu alone." in page) is (timed == ["SI"])
    apart = [replace(one, made={**one.made, "device": one.run.method}) for one in results[1:]]
    assert [row.cells[-1].text for row in tables(apart, across=["device"])[0].rows] == ["measured, EWC", "measured, SI"]


def test_what_an_older_version_had_no_number_for_is_no_difference_and_what_differs_is_told_by_name():
    rows = [[0.9, 0.1], [0.8, 0.9]]

    def numbers(**given):
        return {"job": {"numbers": {"about": f"{given}", "training": given}}}

    older = [result(method, 0, rows, **numbers(lr=0.1)) for method in ("EWC", "SI")]
    newer = [result(method, 1, rows, **numbers(lr=0.1, momentum=0.0)) for method in ("EWC", "SI")]
    board, *_ = tables([*older, *newer])
    assert board.notes == ()
    board, *_ = tables(
        [*older, *(result(method, 1, rows, **numbers(lr=0.2, momentum=0.9)) for method in ("EWC", "SI"))]
    )
    assert board.notes == ("The runs of EWC, SI differ in more than the seed: lr, momentum.",)
    (section,) = sections([*older, *newer])
    assert section.settings == [("lr", "0.1"), ("momentum", "0")]
    other = [result("EWC", 1, rows, **numbers(lr=0.2, epochs=None, batch_size=64))]
    (section,) = sections([*older, *other])
    assert section.settings == []  # one alone says how large its batches are


def test_the_numbers_of_a_stretched_axis_have_room_side_by_side():
    from matplotlib.figure import Figure

    usual = [0.3, 0.3, 2, 2, 5, 5, 7, 10, 17, 19, 20, 23, 25, 27, 60]
    for values in (usual, [each / 10 for each in usual], [0.1, 0.1, 60.0]):
        axis = Figure(figsize=(6.1, 4)).subplots()
        axis.set_xlim(-0.12 * max(values), 1.12 * max(values))
        _forgotten(axis, values)
        places = sorted(axis.transData.transform([(tick, 0) for tick in axis.get_xticks()])[:, 0])
        assert 0 in axis.get_xticks()
        assert min(right - left for left, right in itertools.pairwise(places)) > 0.2 * axis.figure.dpi
