"""The experiments: what they measure, and that the controls are what they claim to be."""

import pytest
import torch
from torch import nn

from holdfast.bench.digits import Digits
from holdfast.bench.methods import FineTuning, Frozen, Joint, PerTaskEwc, RunningEwc, Training
from holdfast.bench.runner import Run, by_method, chosen_strength, run, spread
from holdfast.bench.tasks import permuted_digits

QUICK = Training(epochs=3)


def small():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def test_the_measures_of_a_known_matrix():
    known = Run("m", 0, [[0.9, 0.1, 0.1], [0.7, 0.8, 0.1], [0.5, 0.6, 0.7]])
    assert known.average == pytest.approx(0.6)
    assert known.forgetting == pytest.approx(((0.9 - 0.5) + (0.8 - 0.6)) / 2)
    assert known.newest == pytest.approx(0.8)
    assert spread([1.0, 3.0]) == pytest.approx((2.0, 2**0.5))
    assert list(by_method([known, Run("n", 0, [[1.0]]), known])) == ["m", "n"]


def test_permuted_digits_are_the_same_images_in_another_order():
    first, second = permuted_digits(2)
    assert torch.equal(first.train.y, second.train.y)
    assert not torch.equal(first.train.x, second.train.x)
    assert torch.equal(first.train.x.sort(1).values, second.train.x.sort(1).values)
    rows = {tuple(row) for row in first.train.x.tolist()}
    assert not rows & {tuple(row) for row in first.test.x.tolist()}
    assert not rows & {tuple(row) for row in first.validation.x.tolist()}
    assert len(first.train) + len(first.validation) + len(first.test) == 1797


def test_a_seed_repeats():
    tasks = permuted_digits(2)
    once, again = (run(RunningEwc(10.0), tasks, small, QUICK, 1) for _ in range(2))
    assert once == again
    assert run(RunningEwc(10.0), tasks, small, QUICK, 2).accuracy != once.accuracy


def test_the_controls_do_what_they_say():
    tasks = permuted_digits(3)
    frozen = run(Frozen(), tasks, small, QUICK, 0)
    assert frozen.accuracy[0] == frozen.accuracy[1] == frozen.accuracy[2]
    joint = Joint()
    run(joint, tasks, small, QUICK, 0)
    assert [len(part) for part in joint.seen] == [1078] * 3


def test_a_hold_keeps_more_than_fine_tuning_and_learns_more_than_freezing():
    tasks = permuted_digits(3, seed=1)
    tuned, frozen, held = (run(m, tasks, small, Training(), 1) for m in (FineTuning(), Frozen(), RunningEwc(30.0)))
    assert held.average > tuned.average + 0.03
    assert held.average > frozen.average + 0.05
    assert held.forgetting < 0.5 * tuned.forgetting


def test_j_and_j_original_differ_from_the_third_task_on():
    tasks = permuted_digits(3)
    running, per_task = (run(make(30.0), tasks, small, QUICK, 0) for make in (RunningEwc, PerTaskEwc))
    assert running.accuracy[:2] == per_task.accuracy[:2]
    assert running.accuracy[2] != per_task.accuracy[2]


def test_the_strength_is_chosen_on_validation_data_of_two_tasks_only():
    seen = []

    class Spy(RunningEwc):
        def learn(self, model, task, training, seed):
            seen.append((self.strength, task.name, task.test is task.validation))

    chosen = chosen_strength([1.0, 5.0], Spy, [permuted_digits(4)], small, QUICK)
    assert chosen == 1.0  # a tie goes to the first
    assert seen == [(s, name, True) for s in (1.0, 5.0) for name in ("order 1", "order 2")]


def test_progress_is_told_of_every_round():
    experiment = Digits(tasks=2, seeds=1, width=8, training=Training(epochs=1))
    heard = []
    strength, runs = experiment.run(heard.append)
    assert len(heard) == experiment.rounds - (2 if strength == 1.0 else 0)
    assert len(runs) == 6 - (strength == 1.0)
