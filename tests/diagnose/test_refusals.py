"""What cannot be diagnosed, and what can but says less than it seems to."""

import copy

import pytest
import torch
from torch import nn

import holdfast

BATCHES = [(torch.randn(10, 4), torch.arange(10) % 3) for _ in range(2)]


class Idle(nn.Module):
    """A parameter that the output does not depend on."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Kinked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(Once.apply(self.body(x)))


def broken():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("model", "batches", "options", "error", "said"),
    [
        (nn.Linear(4, 3), [], {}, holdfast.DataError, "there are no batches"),
        (nn.Linear(4, 3), iter(BATCHES), {}, holdfast.DataError, "several times.*DataLoader or a list"),
        (nn.Linear(4, 3), BATCHES[0], {}, holdfast.DataError, "this is one batch"),
        (
            nn.Linear(4, 3),
            [(torch.randn(5, 4), torch.zeros(5).long())],
            {},
            holdfast.DataError,
            "5 examples are too few",
        ),
        (nn.Linear(4, 3).half(), BATCHES, {}, holdfast.ArgumentError, r"float16.*copy.deepcopy\(model\).float\(\)"),
        (nn.Linear(4, 3).bfloat16(), BATCHES, {}, holdfast.ArgumentError, "bfloat16.*second derivative"),
        (broken(), BATCHES, {}, holdfast.ArgumentError, "`weight` has values that are not finite"),
        (
            nn.Linear(4, 3),
            [(torch.full((9, 4), torch.inf), torch.zeros(9).long())],
            {},
            holdfast.DataError,
            "not finite",
        ),
        (
            nn.Linear(4, 3),
            BATCHES,
            {"moved": nn.Linear(5, 3)},
            holdfast.MismatchError,
            r"`weight` has shape \(3, 4\) in",
        ),
        (nn.Linear(4, 3), BATCHES, {"moved": {}}, holdfast.MismatchError, "`weight`, `bias`, and `moved` nothing"),
        (nn.Linear(4, 3), BATCHES, {"moved": "model.pt"}, holdfast.ArgumentError, "state_dict.* got str"),
        (nn.Linear(4, 3), BATCHES, {"moved": broken()}, holdfast.MismatchError, "not finite in `moved`"),
        (nn.Linear(4, 3), BATCHES, {"probes": 1}, holdfast.ArgumentError, "probes is a whole number, 3 at least"),
        (nn.Linear(4, 3), BATCHES, {"directions": 0}, holdfast.ArgumentError, "directions is a whole number, 1 at"),
        (Kinked(), BATCHES, {}, holdfast.DataError, "cannot be differentiated twice"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_with_the_way_out(model, batches, options, error, said):
    with pytest.raises(error, match=said):
        holdfast.diagnose(model, batches, holdfast.categorical, **options)


def test_a_move_that_is_none_is_refused():
    model = nn.Linear(4, 3)
    with pytest.raises(holdfast.ArgumentError, match="no direction"):
        holdfast.diagnose(model, BATCHES, holdfast.categorical, moved=copy.deepcopy(model))


def test_a_likelihood_is_needed():
    with pytest.raises(holdfast.ArgumentError, match=r"holdfast\.categorical"):
        holdfast.diagnose(nn.Linear(4, 3), BATCHES, nn.CrossEntropyLoss())


@pytest.mark.parametrize("exact_up_to", [2000, 0])
def test_parameters_that_the_loss_does_not_depend_on_are_named_and_do_not_spoil_the_rest(exact_up_to):
    found = holdfast.diagnose(Idle(), BATCHES, holdfast.categorical, exact_up_to=exact_up_to)
    assert "does not depend on `idle.weight`, `idle.bias`" in " ".join(found.doubts)
    shares = {share.where: share for share in found.structure.shares}
    assert shares["idle"].squares != shares["idle"].squares  # 0/0 is no share
    assert 0 < shares["all"].squares <= 1
    assert found.optimum.by_layer["idle"] == 0
    assert "–" in str(found.tables[2])


def test_frozen_parameters_that_moved_are_said():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    moved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.warns(holdfast.HoldfastWarning, match=r"`0.weight`, `0.bias` moved too, but is frozen"):
        found = holdfast.diagnose(model, BATCHES, holdfast.categorical, moved=moved)
    assert found.entries == 15


def test_data_that_changes_between_readings_is_said():
    class Noisy:
        def __iter__(self):
            return iter([(torch.randn(20, 4), torch.arange(20) % 3)])

    found = holdfast.diagnose(nn.Linear(4, 3), Noisy(), holdfast.categorical)
    assert "not the same at every reading" in " ".join(found.doubts)
    again = holdfast.diagnose(nn.Linear(4, 3), BATCHES, holdfast.categorical)
    assert "not the same at every reading" not in " ".join(again.doubts)


def test_a_model_without_layers_to_factor_says_so_among_the_doubts():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x[:, :3] * self.scale

    found = holdfast.diagnose(Scaled(), BATCHES, holdfast.categorical)
    assert "no layer could be factored" in " ".join(found.doubts)


@pytest.mark.parametrize("exact_up_to", [2000, 0])
def test_where_there_is_no_curvature_at_all_the_advice_is_that(exact_up_to):
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([500.0, 0.0, 0.0]))
    data = [(torch.randn(20, 4), torch.zeros(20).long())]
    found = holdfast.diagnose(model, data, holdfast.categorical, exact_up_to=exact_up_to)
    (said,) = found.advice
    assert "a penalty would hold nothing" in said
