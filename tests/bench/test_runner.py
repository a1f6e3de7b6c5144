"""A run: all of its chance is the seed's, and what could not be answered or learned is refused before it starts."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.bench import (
    FineTuning,
    Held,
    Split,
    Task,
    Trainer,
    Training,
    batched,
    diagonal,
    machine,
    run,
    runner,
    save,
)
from holdfast.bench.catalog import METHODS
from holdfast.bench.distilled import true_inputs
from holdfast.bench.tasks import joined
from holdfast.errors import ArgumentError, DataError

TRAINING = Training(epochs=2, batch_size=8)
CPU = torch.device("cpu")


def split(classes=2, count=24, labels=None):
    generator = torch.Generator().manual_seed(count)
    y = torch.arange(count) % classes if labels is None else labels
    return Split(torch.randn(count, 4, generator=generator), y)


def task(name, outputs=None, **options):
    return Task(name, split(**options), split(**options), outputs)


def dropping():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


def deep():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def test_what_a_model_draws_in_training_follows_from_the_seed_too():
    before = torch.random.get_rng_state()
    once, again, other = (
        run(Held(diagonal()), [task("one"), task("two")], dropping, TRAINING, seed=seed) for seed in (1, 1, 2)
    )
    assert once.nll == again.nll
    assert once.nll != other.nll
    assert torch.equal(torch.random.get_rng_state(), before)


def test_outputs_of_a_tasks_own_are_not_taken_for_others():
    """Two tasks with two outputs each, and a model with two: it would answer both with the same ones."""
    tasks = [task("one", (0, 1)), task("two", (2, 3))]
    with pytest.raises(ArgumentError, match="`two` is answered by outputs 2 to 3 and has labels up to 1, and 0 of"):
        run(FineTuning(), tasks, lambda: nn.Linear(4, 2), TRAINING)
    assert len(run(FineTuning(), tasks, lambda: nn.Linear(4, 4), TRAINING).accuracy) == 2


def test_labels_with_gaps_or_of_all_tasks_are_told_how_they_count():
    for task_ in (task("one", labels=5 * (torch.arange(24) % 3)), task("two", (2, 3), labels=2 + torch.arange(24) % 2)):
        with pytest.raises(ArgumentError, match="Labels count from 0 within the outputs of their task"):
            run(FineTuning(), [task_], lambda: nn.Linear(4, 4), TRAINING)


@pytest.mark.parametrize("name", ["fine-tuning", "ewc", "kronecker", "owm", "lwf"])
def test_training_that_diverged_is_no_result(name):
    """A network of nothing but NaN says the first class, whatever is asked: half of it is right."""
    steep = Training(epochs=5, batch_size=8, lr=1e12, optimizer="sgd")
    with pytest.raises(DataError, match=r"training on `one` left `0\.weight` .*: it diverged. Lower its .* 1e\+12"):
        run(METHODS[name].make(1.0), [task("one"), task("two")], deep, steep)


def test_a_hold_that_diverges_is_told_before_the_task_is_over(monkeypatch):
    """A glance at the tasks before is the first to know."""
    judged = []
    monkeypatch.setattr(runner, "_judged", lambda *args: judged.append(args[1].name) or (0.5, 0.5))
    steep = Training(steps=20, batch_size=8, lr=0.1, optimizer="sgd")
    with pytest.raises(DataError, match="training on `two` left"):
        run(Held(diagonal(), strength=1e20), [task("one"), task("two")], deep, steep)
    assert judged.count("two") == 2  # before anything was learned, and after the first


def test_inputs_that_are_no_numbers_are_told():
    bad = split()
    bad.stored[3, 1] = torch.nan
    with pytest.raises(DataError, match=r"training on `b` left .* its inputs have values that are not finite"):
        run(FineTuning(), [task("a"), Task("b", bad, split())], deep, TRAINING)
    with pytest.raises(DataError, match="answers to test data of `b` are no numbers: its inputs have values that"):
        run(FineTuning(), [task("a"), Task("b", split(), bad)], deep, TRAINING)


def test_weights_that_are_too_large_for_any_input_are_told_as_divergence():
    """The last step of all leaves them finite, and their products with sound inputs are not."""
    once = Training(steps=1, lr=1e25, optimizer="sgd")
    with pytest.raises(DataError, match=r"answers to test data of `one` are no numbers: it diverged. Lower .* 1e\+25"):
        run(FineTuning(), [task("one")], deep, once)


def test_a_mask_of_minus_infinity_is_as_it_should_be():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
            self.register_buffer("unused", torch.tensor(torch.nan))

    assert len(run(FineTuning(), [task("one"), task("two")], Masked, TRAINING).accuracy) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dropping().requires_grad_(False), "no weights that train: were all frozen"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)), r"a batch of 1, is of shape \(2,\)"),
    ],
)
def test_models_that_cannot_learn_are_told(make, message):
    with pytest.raises(ArgumentError, match=message):
        run(FineTuning(), [task("one"), task("two")], make, TRAINING)


def test_an_example_left_alone_by_batches_is_told_to_a_network_with_batch_norm():
    def normed():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    with pytest.raises(ArgumentError, match="the last of 25 examples in batches of 8 stands alone"):
        run(FineTuning(), [task("one", count=25)], normed, TRAINING)
    run(FineTuning(), [task("one", count=24)], normed, TRAINING)


@pytest.mark.parametrize("labels", [torch.arange(24) % 2 - 1, torch.zeros(24)])
def test_labels_that_no_output_could_have_are_refused(labels):
    with pytest.raises(ArgumentError, match="`odd` has labels that are no whole numbers from 0"):
        run(FineTuning(), [task("odd", labels=labels)], lambda: nn.Linear(4, 2), TRAINING)


@pytest.mark.parametrize(
    ("loss", "sizes", "message"),
    [
        ("cross-entropy", (24, 1), r"`odd` has labels of shape \(24, 1\), and the loss 'cross-entropy' takes one"),
        ("squared", (24, 1), r"takes one for an example, \(24,\): y.squeeze\(1\)"),
        ("tokens", (24,), r"labels of shape \(24,\), and the model's answers .* are of shape \(24, 4, 2\)"),
        ("tokens", (24, 3), r"are of shape \(24, 4, 2\)"),
    ],
)
def test_labels_that_stand_otherwise_than_answers_are_refused(loss, sizes, message):
    """A column of labels was compared with all the answers, and accuracies were far above 1."""
    labels = torch.zeros(sizes, dtype=torch.long)
    odd = Split(torch.zeros(24, 4, dtype=torch.long if loss == "tokens" else torch.float), labels)
    model = nn.Embedding(3, 2) if loss == "tokens" else nn.Linear(4, 2)
    with pytest.raises(ArgumentError, match=message):
        run(FineTuning(), [Task("odd", odd, odd)], lambda: model, Training(epochs=1, loss=loss))


def test_texts_may_have_labels_that_do_not_count():
    tokens = torch.randint(0, 5, (12, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    words = Task("words", Split(tokens, labels), Split(tokens, tokens.roll(-1, 1)))
    made = run(FineTuning(), [words], lambda: nn.Embedding(5, 5), Training(epochs=1, loss="tokens"))
    assert len(made.accuracy) == 1
    half = tokens.clone()
    half[:, ::2] = -100

    def right():
        model = nn.Embedding(5, 5)
        nn.init.eye_(model.weight)
        return model

    judged = Task("half", Split(tokens, tokens), Split(tokens, half))
    found = run(FineTuning(tasks=0), [judged], right, Training(epochs=1, loss="tokens"))
    assert found.accuracy == [[1.0]]
    assert found.nll[0][0] == pytest.approx(float(nn.functional.cross_entropy(torch.eye(5), torch.arange(5))), rel=1e-5)
    for bad, message in ((half.clamp(max=-100), "no token that counts"), (half.clamp(min=-1), "no whole numbers from")):
        wrong = Task("bad", Split(tokens, bad), Split(tokens, tokens))
        with pytest.raises(ArgumentError, match=message):
            run(FineTuning(), [wrong], right, Training(epochs=1, loss="tokens"))


def test_tasks_may_come_one_by_one_and_a_model_is_new_in_every_run():
    tasks = [task("one"), task("two")]
    assert len(run(FineTuning(), iter(tasks), lambda: nn.Linear(4, 2), TRAINING).accuracy) == 2
    net = nn.Linear(4, 2)
    with pytest.raises(ArgumentError, match="no whole numbers"):  # before it was trained
        run(FineTuning(), [task("odd", labels=torch.zeros(24))], lambda: net, TRAINING)
    run(FineTuning(), tasks, lambda: net, TRAINING)
    for again in (net, nn.Sequential(net)):
        with pytest.raises(ArgumentError, match="a run before has trained"):
            run(FineTuning(), tasks, lambda again=again: again, TRAINING)
    with pytest.raises(ArgumentError, match="makes a model, a torch module, got int"):
        run(FineTuning(), tasks, lambda: 3, TRAINING)


TOKENS = Training(epochs=1, batch_size=4, loss="tokens")


def texts(rows=24, uncounted=12):
    """Words that are their own next ones, and some after them that do not count."""
    tokens = torch.randint(0, 5, (rows, 4), generator=torch.Generator().manual_seed(0))
    after = torch.randint(0, 5, (rows, uncounted), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([tokens, torch.full_like(after, -100)], 1)
    return torch.cat([tokens, after], 1), labels


def test_tokens_that_do_not_count_change_nothing_of_what_is_remembered():
    found = []
    for uncounted in (0, 12):
        x, y = texts(uncounted=uncounted)
        words = Task("words", Split(x, y), Split(x, y))
        torch.manual_seed(0)
        model, trainer = nn.Embedding(5, 5), Trainer(TOKENS)
        fisher = batched(4)(model, words, trainer)
        found.append((fisher.entries["weight"], true_inputs(model, words, trainer).num_data, fisher.num_data))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] == (96, 96)


def test_joint_training_of_texts_with_outputs_of_their_own():
    x, y = texts()
    tasks = [Task(f"{first}", Split(x, y), Split(x, y), tuple(range(first, first + 5))) for first in (0, 5)]
    made = run(FineTuning(), tasks, lambda: nn.Embedding(5, 10), TOKENS, stages=lambda tasks: [joined(tasks)])
    assert len(made.accuracy) == 1


def test_a_look_at_tokens_of_which_none_counts_is_left_out():
    x, y = texts(rows=1100)
    late = y.clone()
    late[torch.arange(1100) % 11 != 10] = -100  # the hundred that a look of a thousand passes over
    made = run(FineTuning(), [Task("late", Split(x, y), Split(x, late)), Task("two", Split(x, y), Split(x, y))],
               lambda: nn.Embedding(5, 5), TOKENS)  # fmt: skip
    assert made.lowest == [None, None]


def test_a_look_is_at_examples_from_all_over_the_test_data():
    """Data that is sorted by its classes, as folders of pictures are: the first thousand are all of one."""
    y = torch.arange(4).repeat_interleave(600)
    x = torch.nn.functional.one_hot(y, 4).float()
    sorted_ = Task("sorted", Split(x, y), Split(x, y))
    constant = Task("constant", Split(x, y * 0 + 3), Split(x, y * 0 + 3))  # after which every answer is 3
    made = run(FineTuning(), [sorted_, constant], lambda: nn.Linear(4, 4), Training(epochs=2, lr=0.1))
    assert made.accuracy[1] == [0.25, 1.0]
    assert made.settled == [None, 0.25]
    one = Split(x, y).spread(7)
    assert one.y.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert torch.equal(one.x, x[[0, 342, 685, 1028, 1371, 1714, 2057]])
    assert Split(x, y).spread(2400).x is x


class Noted(FineTuning):
    """Needs nothing, and notes what is counted while it learns."""

    def learn(self, model, task, trainer):
        for _ in range(2):
            trainer.watch and trainer.watch(1)


def test_looking_at_earlier_tasks_is_no_part_of_what_learning_costs(monkeypatch):
    """Neither in seconds nor in bytes."""
    clock, bytes_now = [0.0], [100]
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(machine, "_peak", lambda device: bytes_now[0])
    judged = runner._judged

    def slow(*args):
        clock[0] += 10
        bytes_now[0] = 5000
        found = judged(*args)
        bytes_now[0] = 100
        return found

    monkeypatch.setattr(runner, "_judged", slow)
    monkeypatch.setattr(runner, "in_use", lambda device: 0)
    made = run(Noted(), [task("one"), task("two")], lambda: nn.Linear(4, 2), TRAINING)
    assert made.learning_seconds == [0.0, 0.0]
    assert made.learning_bytes == [100, 100]
    assert made.lowest[1] is not None


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell the most in use")
def test_the_most_in_use_is_the_same_whatever_ran_before():
    """64 MB in small pieces, which the process would keep when they are freed: a second run took them for its own."""

    class Hoards(FineTuning):
        def remember(self, model, task, trainer):
            pieces = [torch.zeros(1000) for _ in range(16_000)]
            pieces.clear()

    found = [run(Hoards(), [task("one")], deep, TRAINING).remembering_bytes[0] for _ in range(3)]
    assert all(60e6 < most < 90e6 for most in found)


def test_what_is_learned_instead_of_the_tasks_is_made_within_the_run(monkeypatch):
    """So that the data of joint training counts as that of others does."""
    order = []
    monkeypatch.setattr(runner, "in_use", lambda device: order.append("counted") or 0)

    def stages(tasks):
        order.append("made")
        return [joined(tasks)]

    made = run(FineTuning(), [task("one"), task("two")], lambda: nn.Linear(4, 2), TRAINING, stages=stages)
    assert order == ["counted", "made"]
    assert len(made.accuracy) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "ewc"}, "run takes a method"),
        ({"method": FineTuning}, "run takes a method"),
        ({"method": nn.Linear(4, 2)}, "run takes a method"),
        ({"make_model": None}, "run takes a method"),
        ({"stages": [task("all")]}, "stages makes of the tasks"),
        ({"stages": lambda tasks: []}, "nothing would be learned"),
        ({"tasks": []}, "at least one task"),
        ({"tasks": task("one")}, r"in a list, \[first, second\], got Task"),
        ({"make_model": nn.Linear(4, 2)}, "a function that makes a model"),
        ({"device": "tpu"}, "there is no device 'tpu'"),
        ({"device": torch.device("cuda", 99)}, "there is no device 'cuda:99'"),
        ({"tasks": [split()]}, r"run takes tasks, each a Task\(name"),
        ({"training": {"epochs": 2}}, r"how to train: Training\(epochs=10\)"),
        ({"seed": "1"}, "a seed is a whole number from 0 to 2147483647, got '1'"),
        ({"seed": -1}, "a seed is a whole number"),
        ({"seed": 1.5}, "a seed is a whole number"),
    ],
)
def test_what_makes_no_run_is_refused(wrong, message):
    usual = {"method": FineTuning(), "tasks": [task("one")], "make_model": lambda: nn.Linear(4, 2)}
    with pytest.raises(ArgumentError, match=message):
        run(**{**usual, "training": TRAINING, **wrong})


class Wrapped(nn.Module):
    """As models of Hugging Face answer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.inner(x)}


def test_a_model_that_cannot_answer_is_told_of_with_what_it_was_asked():
    pictures = Split(torch.zeros(24, 4, dtype=torch.uint8), torch.zeros(24, dtype=torch.long))
    narrow = Split(torch.zeros(24, 3), torch.zeros(24, dtype=torch.long))
    for wrong, message in (
        (
            Task("bytes", pictures, pictures),
            r"an input of `bytes`, \(1, 4\) of torch.uint8: .*such as x.float\(\) / 255",
        ),
        (Task("narrow", narrow, split()), r"an input of `narrow`, \(1, 3\) of torch.float32: .*mat1 and mat2"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run(FineTuning(), [wrong], lambda: nn.Linear(4, 2), TRAINING)
    for outputs in (None, (0, 1)):
        with pytest.raises(ArgumentError, match="answers `one` with a dict, and not with a tensor of outputs"):
            run(FineTuning(), [task("one", outputs)], Wrapped, TRAINING)


class Plain(FineTuning):
    """A method as one would first write it."""

    def kept(self):
        return []


class Without(FineTuning):
    kept = None


@pytest.mark.parametrize(
    ("kind", "got"), [(Plain, "got method: as a function it has @property"), (Without, "NoneType")]
)
def test_what_a_method_keeps_is_a_list(kind, got):
    with pytest.raises(ArgumentError, match=f"`kept` is a list of the tensors it carries on.*{got}"):
        run(kind(), [task("one")], lambda: nn.Linear(4, 2), TRAINING)


def test_a_device_and_a_seed_may_be_torchs_and_numpys(tmp_path):
    made = run(FineTuning(), [task("one")], lambda: nn.Linear(4, 2), TRAINING, seed=np.int64(3), device=CPU)
    assert save(made, tmp_path, protocol="mine", device=CPU) == save(made, tmp_path, protocol="mine")


def test_the_data_is_brought_to_the_device_of_the_run(monkeypatch):
    """Where it may be elsewhere: pictures read from a disk, and a model on a GPU."""
    moved = []
    monkeypatch.setattr(Split, "to", lambda split, device: moved.append(device) or split)
    run(FineTuning(), [task("one"), task("two")], lambda: nn.Linear(4, 2), TRAINING, device=CPU)
    assert moved == ["cpu"] * 4
