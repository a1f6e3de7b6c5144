"""Tasks and the sequences they are made into: labels, outputs and views, counted by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.bench.data import Images, digits
from holdfast.bench.data.text import Text
from holdfast.bench.streams import Pixels, Turned, held_out, permuted, rotated, split, texts
from holdfast.bench.tasks import Split, Task, joined, masked


@pytest.fixture
def images():
    """Eighteen pictures of six classes, 2×4×4, twelve to train on."""
    x = torch.arange(18 * 2 * 16, dtype=torch.int64).remainder(251).to(torch.uint8).view(18, 2, 4, 4)
    y = torch.arange(18) % 6
    return Images("made", x[:12], y[:12], x[12:], y[12:], 6)


class TestSplit:
    def test_views_are_made_when_asked_for_and_share_what_is_stored(self, images):
        first, second = permuted(images, 2, seed=0)
        assert first.train.stored is second.train.stored
        assert first.train.x.shape == (12, 32)
        torch.testing.assert_close(first.train.x.sort(1).values, images.train_x.flatten(1).float().sort(1).values / 255)
        assert not torch.equal(first.train.x, second.train.x)

    def test_batches_are_the_whole_in_order(self, images):
        (task,) = permuted(images, 1, seed=0)
        x, y = (torch.cat(part) for part in zip(*task.train.batches(4), strict=True))
        assert torch.equal(x, task.train.x)
        assert torch.equal(y, task.train.y)
        assert torch.equal(task.train.first(5).x, task.train.x[:5])

    def test_a_dataset_of_pairs_is_read_whole(self):
        data = torch.utils.data.TensorDataset(torch.randn(5, 3), torch.arange(5))
        found = Split.of(data)
        assert torch.equal(found.x, data.tensors[0])
        assert torch.equal(found.y, data.tensors[1])

    @pytest.mark.parametrize("sizes", [(3, 2), (0, 0)])
    def test_inputs_without_labels_are_refused(self, sizes):
        with pytest.raises(holdfast.ArgumentError, match=f"{sizes[0]} inputs and {sizes[1]} labels"):
            Split(torch.zeros(sizes[0], 2), torch.zeros(sizes[1]))

    @pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool])
    def test_labels_are_whole_numbers_of_any_kind(self, kind):
        """Losses take one kind alone: others are made that one."""
        found = Split(torch.zeros(3, 2), torch.tensor([0, 1, 1]).to(kind))
        assert found.y.dtype == torch.int64
        assert found.first(2).y.tolist() == [0, 1]
        assert Split(torch.zeros(3, 2), torch.zeros(3)).y.dtype == torch.float32  # no labels: a run refuses them

    @pytest.mark.parametrize("inputs", [np.zeros((3, 2)), [[0.0, 0.0]] * 3])
    def test_arrays_and_lists_are_no_tensors(self, inputs):
        with pytest.raises(holdfast.ArgumentError, match=f"made of tensors, got {type(inputs).__name__}: torch"):
            Split(inputs, torch.zeros(3, dtype=torch.long))
        with pytest.raises(holdfast.ArgumentError, match="made of tensors"):
            Split(torch.zeros(3, 2), inputs)

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            ([(object(), 1)] * 2, "this list does not give .* by their number.* RuntimeError: Could not infer dtype"),
            ([(torch.zeros(2), 0), (torch.zeros(3), 1)], "RuntimeError: stack expects each tensor to be equal size"),
            ([{"x": 1, "y": 2}], "KeyError: 0"),
            (iter([(torch.zeros(2), 0)]), "TypeError: object of type 'list_iterator' has no len"),
            (torch.utils.data.DataLoader([(torch.zeros(2), 0)]), "this DataLoader .* gives its loader.dataset"),
            ([], "at least one example, and this dataset has none"),
        ],
    )
    def test_what_is_no_dataset_of_pairs_is_refused(self, dataset, message):
        with pytest.raises(holdfast.ArgumentError, match=message):
            Split.of(dataset)

    def test_a_task_has_splits(self):
        data = torch.utils.data.TensorDataset(torch.randn(5, 3), torch.arange(5))
        with pytest.raises(holdfast.ArgumentError, match=r"`it` has a TensorDataset for its `test`.* Split.of\("):
            Task("it", Split.of(data), data)

    @pytest.mark.parametrize("outputs", [3, (0.0, 1.0), "ab", (-1, 0)])
    def test_outputs_are_whole_numbers(self, outputs):
        one = Split(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))
        with pytest.raises(holdfast.ArgumentError, match="outputs stand side by side"):
            Task("it", one, one, outputs)


class TestStreams:
    def test_the_same_seed_gives_the_same_orders_and_another_does_not(self, images):
        once, again, other = (permuted(images, 2, seed)[1].train.x for seed in (0, 0, 1))
        assert torch.equal(once, again)
        assert not torch.equal(once, other)

    def test_a_margin_is_black(self, images):
        flat = Pixels(margin=2)(images.train_x).view(12, 2, 8, 8)
        assert torch.equal(flat[:, :, 2:6, 2:6], images.train_x.float() / 255)
        assert float(flat.sum()) == pytest.approx(float(images.train_x.float().sum() / 255), rel=1e-6)

    def test_turned_by_a_right_angle_is_a_turned_picture(self, images):
        whole = images.train_x.float() / 255
        torch.testing.assert_close(Turned(0.0)(images.train_x), whole.flatten(1))
        torch.testing.assert_close(Turned(90.0)(images.train_x), whole.rot90(1, (2, 3)).flatten(1), atol=1e-4, rtol=0)
        names = [task.name for task in rotated(images, [0, 45])]
        assert names == ["0°", "45°"]

    def test_a_turned_task_is_judged_on_images_turned_as_those_it_is_trained_on(self, images):
        for task, quarters in zip(rotated(images, [0, 90, 180, 270]), range(4), strict=True):
            for part, stored in ((task.train, images.train_x), (task.test, images.test_x)):
                turned = (stored.float() / 255).rot90(quarters, (2, 3))
                torch.testing.assert_close(part.x, turned.flatten(1), atol=1e-4, rtol=0)

    def test_every_stream_shows_its_test_images_as_its_training_images(self, images):
        """Of a stream made of the same images twice, both parts of a task are the same."""
        same = replace(images, test_x=images.train_x, test_y=images.train_y)
        streams = [
            permuted(same, 2, seed=0, margin=1), permuted(same, 2, seed=0, scaled=True), rotated(same, [30, 75]),
            *(split(same, form, flat=flat) for form in ("task", "domain", "class") for flat in (True, False)),
        ]  # fmt: skip
        for task in itertools.chain(*streams):
            assert torch.equal(task.train.x, task.test.x)
            assert torch.equal(task.train.y, task.test.y)

    def test_the_forms_of_a_split(self, images):
        told, shared, growing = (split(images, form) for form in ("task", "domain", "class"))
        assert [task.outputs for task in told] == [(0, 1), (2, 3), (4, 5)]
        assert [task.outputs for task in shared] == [None] * 3
        assert [task.outputs for task in growing] == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]
        for first, second in zip(told, shared, strict=True):
            assert set(first.train.y.tolist()) <= {0, 1}
            assert torch.equal(first.train.y, second.train.y)
        assert set(growing[2].train.y.tolist()) == {4, 5}
        kept = torch.cat([task.train.stored for task in told])
        assert sorted(kept.flatten(1).sum(1).tolist()) == sorted(images.train_x.flatten(1).sum(1).tolist())

    def test_colors_are_standardized_by_the_training_data(self, images):
        x = split(images, "domain", classes=6, flat=False)[0].train.x
        assert x.shape == (12, 2, 4, 4)
        torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(2))

    def test_another_form_is_refused(self, images):
        with pytest.raises(holdfast.ArgumentError, match="got 'instance'"):
            split(images, "instance")

    def test_what_is_held_out_is_training_data_and_never_the_test_data(self, images):
        found = held_out(images, 2)
        assert torch.equal(torch.cat([found.train_x, found.test_x]), images.train_x)
        assert len(found.test_y) == 2
        with pytest.raises(holdfast.ArgumentError, match="12 of 12"):
            held_out(images, 12)

    def test_text_is_predicted_byte_by_byte(self):
        data = torch.arange(101, dtype=torch.uint8)
        (task,) = texts(Text("made", {"one": data}), length=10)
        assert task.train.x.shape == (9, 10)
        assert torch.equal(task.train.y, task.train.x + 1)
        assert torch.equal(task.test.x[0], torch.arange(90, 100))

    def test_digits_of_training_and_test_are_apart(self):
        found = digits()
        rows = {tuple(row) for row in found.train_x.flatten(1).tolist()}
        assert not rows & {tuple(row) for row in found.test_x.flatten(1).tolist()}
        assert len(found.train_y) + len(found.test_y) == 1797


class TestOutputs:
    def test_a_task_is_answered_by_its_own_outputs(self, images):
        model = nn.Linear(32, 6)
        task = split(images, "task")[1]
        assert torch.equal(task.logits(model, task.train.x), model(task.train.x)[:, 2:4])
        assert torch.equal(task.forward(model, (task.train.x, task.train.y)), model(task.train.x)[:, 2:4])

    def test_earlier_classes_are_judged_among_all_that_came_since(self, images):
        first, _, third = split(images, "class")
        assert first.judged_after(third).outputs == third.outputs
        assert third.judged_after(first).outputs == third.outputs  # its labels need their outputs
        told = split(images, "task")
        assert told[0].judged_after(told[2]).outputs == (0, 1)

    def test_outputs_stand_side_by_side(self, images):
        part = Split(images.train_x, images.train_y)
        with pytest.raises(holdfast.ArgumentError, match="side by side"):
            Task("odd", part, part, outputs=(0, 2))

    @pytest.mark.parametrize("form", ["task", "domain", "class"])
    def test_all_tasks_at_once_have_the_loss_of_each(self, images, form):
        torch.manual_seed(0)
        tasks, model = split(images, form), nn.Linear(32, 6).double()
        whole = joined(tasks)
        logits = masked(whole.logits(model, whole.train.x.double()), whole.train.allowed)
        together = nn.functional.cross_entropy(logits, whole.train.y, reduction="none")
        latest = tasks[-1]
        apart = [
            nn.functional.cross_entropy(
                task.judged_after(latest).logits(model, task.train.x.double()), task.train.y, reduction="none"
            )
            for task in tasks
        ]
        torch.testing.assert_close(together, torch.cat(apart))


def test_what_is_joined_is_of_one_shape():
    one, other = (Split(torch.zeros(2, width), torch.tensor([0, 1])) for width in (3, 4))
    with pytest.raises(holdfast.ArgumentError, match=r"`a` has inputs of shape \(3,\) and `b` of \(4,\)"):
        joined([Task("a", one, one), Task("b", other, other)])


def test_what_is_joined_already_is_not_joined_again(images):
    """Every example would be answered by all the outputs, and not by its own task's alone."""
    first, second, third = split(images, "task")
    for wrong in ([joined([first, second]), third], []):
        with pytest.raises(holdfast.ArgumentError, match="none is joined already: give it all of them at once"):
            joined(wrong)
