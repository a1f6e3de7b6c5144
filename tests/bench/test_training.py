"""Training: the same steps as a loop written out, for every loss."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast.bench.tasks import Split, Task, joined
from holdfast.bench.training import Trainer, Training


@pytest.fixture
def task():
    torch.manual_seed(0)
    x, y = torch.randn(50, 6), torch.randint(0, 3, (50,))
    return Task("made", Split(x, y), Split(x[:5], y[:5]))


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


LOSSES = {
    "cross-entropy": lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
    "squared": lambda logits, y: 0.5 * (logits - F.one_hot(y, 3)).square().sum(1).mean(),
}


def test_the_loss_of_several_tasks_at_once_is_over_what_may_answer_and_what_counts():
    """Smoothed over an example's own outputs; a label that does not count costs nothing, and is not in the mean."""
    logits, y = torch.randn(4, 5), torch.tensor([3, 4, -100, 0])
    allowed = torch.tensor([[False] * 3 + [True] * 2] * 3 + [[True] * 3 + [False] * 2])
    training = Training(epochs=1, loss="tokens")
    found = training.losses(logits, y, 0.1, allowed)
    later = F.cross_entropy(logits[:2, 3:], y[:2] - 3, label_smoothing=0.1, reduction="none")
    first = F.cross_entropy(logits[3:, :3], y[3:], label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(found, torch.cat([later, torch.zeros(1), first]))
    torch.testing.assert_close(training.mean(found, y), found.sum() / 3)


def test_the_squared_loss_of_several_tasks_at_once_is_over_what_may_answer():
    logits, y = torch.randn(2, 5), torch.tensor([3, 1])
    allowed = torch.tensor([[False] * 3 + [True] * 2, [True] * 3 + [False] * 2])
    found = Training(epochs=1, loss="squared").losses(logits, y, 0.0, allowed)
    apart = [logits[0, 3:] - torch.tensor([1.0, 0.0]), logits[1, :3] - torch.tensor([0.0, 1.0, 0.0])]
    torch.testing.assert_close(found, torch.stack([0.5 * each.square().sum() for each in apart]))


class TestSteps:
    @pytest.mark.parametrize("loss", list(LOSSES))
    @pytest.mark.parametrize(("kind", "momentum"), [("adam", 0.0), ("sgd", 0.9)])
    def test_a_fit_is_a_plain_loop(self, task, loss, kind, momentum):
        smoothing = 0.1 if loss == "cross-entropy" else 0.0
        training = Training(
            epochs=2, batch_size=16, lr=0.01, optimizer=kind, momentum=momentum, schedule="cosine",
            label_smoothing=smoothing, loss=loss,
        )  # fmt: skip
        fitted, plain = small(), small()
        Trainer(training, seed=3).fit(fitted, task)
        optimizer = (
            torch.optim.Adam(plain.parameters(), lr=0.01)
            if kind == "adam"
            else torch.optim.SGD(plain.parameters(), lr=0.01, momentum=momentum)
        )
        generator, step = torch.Generator().manual_seed(3000), 0
        for _ in range(2):
            for rows in torch.randperm(50, generator=generator).split(16):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * step / 8))
                optimizer.zero_grad()
                LOSSES[loss](plain(task.train.x[rows]), task.train.y[rows]).backward()
                optimizer.step()
                step += 1
        for one, other in zip(fitted.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)

    def test_tokens_count_one_by_one(self):
        training = Training(epochs=1, loss="tokens")
        logits, y = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
        torch.testing.assert_close(
            training.losses(logits, y).mean(), F.cross_entropy(logits.flatten(0, 1), y.flatten())
        )
        assert training.unit == "token"
        assert training.count(y) == 10
        y[0, :3] = -100
        torch.testing.assert_close(
            training.mean(training.losses(logits, y), y), F.cross_entropy(logits.flatten(0, 1), y.flatten())
        )
        assert training.count(y) == 7

    @pytest.mark.parametrize(("training", "steps"), [(Training(epochs=3, batch_size=16), 12), (Training(steps=7), 7)])
    def test_it_lasts_as_long_as_it_says(self, task, training, steps):
        seen = []
        Trainer(training, watch=seen.append).fit(small(), task)
        assert seen == [n for n in range(1, steps + 1) if n in (1, 2, 4, 8) or n == steps]

    def test_a_method_may_have_numbers_of_its_own(self, task):
        seen = []
        Trainer(Training(steps=7), watch=seen.append).fit(small(), task, training=Training(steps=3))
        assert seen == [1, 2, 3]

    def test_counted_in_steps_every_batch_is_full(self, task):
        sizes = []
        model = small()
        model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
        Trainer(Training(steps=8, batch_size=16)).fit(model, task)
        assert sizes == [16] * 8

    def test_watching_changes_nothing_and_leaves_the_model_in_training_while_it_trains(self, task):
        modes, fits = [], []
        for watch in (None, lambda made: None):
            model = small()
            model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
            Trainer(Training(steps=5), watch=watch).fit(model, task)
            fits.append(model)
            assert not model.training
        assert all(modes)
        for one, other in zip(fits[0].parameters(), fits[1].parameters(), strict=True):
            assert torch.equal(one, other)

    def test_a_fit_begins_in_training_mode_after_another_too(self, task):
        """One leaves the model as it is judged, in evaluation mode; dropout in the next would do nothing."""
        modes, model, trainer = [], small(), Trainer(Training(steps=3))
        model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
        for _ in range(2):
            trainer.fit(model, task)
        assert modes == [True] * 6

    def test_what_is_watched_is_in_evaluation_mode(self, task):
        modes, model = [], small()
        Trainer(Training(steps=3), watch=lambda made: modes.append(model.training)).fit(model, task)
        assert modes == [False] * 3

    def test_each_task_has_an_order_of_its_own_and_a_seed_repeats(self, task):
        def orders(seed):
            found, trainer = [], Trainer(Training(steps=3, batch_size=10), seed)
            for _ in range(2):
                model = small()
                model.register_forward_pre_hook(lambda module, args: found.append(args[0].sum().item()))
                trainer.fit(model, task)
            return found

        once, again, other = orders(0), orders(0), orders(1)
        assert once == again
        assert once[:3] != once[3:]
        assert once != other

    def test_examples_of_several_tasks_are_each_answered_by_their_own_outputs(self):
        torch.manual_seed(0)
        parts = [Split(torch.randn(8, 6), torch.randint(0, 2, (8,))) for _ in range(2)]
        tasks = [Task(str(i), part, part, outputs=(2 * i, 2 * i + 1)) for i, part in enumerate(parts)]
        torch.manual_seed(1)
        model = nn.Linear(6, 5)  # an output that no task may use
        plain = copy.deepcopy(model)
        Trainer(Training(steps=3, batch_size=16)).fit(model, joined(tasks))
        optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            losses = [F.cross_entropy(plain(part.x)[:, 2 * i : 2 * i + 2], part.y) for i, part in enumerate(parts)]
            (sum(losses) / 2).backward()
            optimizer.step()
        torch.testing.assert_close(model.weight, plain.weight)
        torch.testing.assert_close(model.bias, plain.bias)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give one of them"),
        ({"epochs": 1, "steps": 1}, "give one of them"),
        ({"epochs": 0}, "epochs is a whole number, 1 or more, got 0"),
        ({"steps": 2, "batch_size": 0}, "batch_size"),
        ({"epochs": 1, "momentum": 0.9}, "momentum 0.9 is for optimizer='sgd': adam takes none"),
        ({"epochs": 1, "loss": "squared", "label_smoothing": 0.1}, "label_smoothing 0.1 does not apply to the squared"),
    ],
)
def test_numbers_that_make_no_run_are_refused(options, match):
    with pytest.raises(holdfast.ArgumentError, match=match):
        Training(**options)
