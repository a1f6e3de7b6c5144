"""Whatever happens inside `untouched`, the model and the random generator come out as they went in."""

import contextlib

import pytest
import torch
from torch import nn

from holdfast.untouched import untouched


class Rolling(nn.Module):
    """A forward that changes a buffer in place, replaces another, and sets one that was empty."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(2))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        x = self.drop(self.norm(self.linear(x)))
        self.count += 1
        self.latest = x.detach().mean(0)
        self.cache = x.detach()
        return x


@pytest.fixture
def model():
    model = Rolling()
    model(torch.randn(8, 3)).sum().backward()  # gradients, and statistics that are not 0 and 1
    model.cache = None
    model.norm.eval()  # a mixture of modes, as with frozen statistics
    model.linear.bias.requires_grad_(False)
    model.norm.bias.grad = None
    return model


def disturb(model):
    """Everything that a curvature could do to a model, and more."""
    model.train()
    model(torch.randn(8, 3)).square().sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    torch.manual_seed(99)
    torch.rand(5)


@pytest.fixture(params=["returns", "raises"])
def visit(request):
    """Disturb a model inside `untouched`, by a body that ends well or badly."""

    def visited(model):
        with contextlib.suppress(ZeroDivisionError), untouched(model):
            disturb(model)
            if request.param == "raises":
                raise ZeroDivisionError

    return visited


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def buffers(model):
    """Those that are empty, too."""
    return {(name, key): value for name, module in model.named_modules() for key, value in module._buffers.items()}


def copies(tensors):
    return {key: None if tensor is None else tensor.clone() for key, tensor in tensors.items()}


def test_every_module_is_in_evaluation_mode_inside_and_in_its_own_afterwards(model, visit):
    before = modes(model)
    assert set(before.values()) == {True, False}
    with untouched(model):
        assert not any(modes(model).values())
    visit(model)
    assert modes(model) == before


def test_gradients_are_the_same_tensors_with_the_same_values(model, visit):
    before = {name: p.grad for name, p in model.named_parameters()}
    values = copies(before)
    assert any(grad is None for grad in before.values())
    visit(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name], name
        assert (parameter.grad is None) == (values[name] is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, values[name], rtol=0, atol=0)


def test_requires_grad_is_as_before(model, visit):
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    assert set(before.values()) == {True, False}
    visit(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_buffers_are_the_same_tensors_with_the_same_values_though_forward_changed_or_replaced_them(model, visit):
    before = buffers(model)
    values = copies(before)
    visit(model)
    after = buffers(model)
    assert list(after) == list(before)
    for key, buffer in after.items():
        assert buffer is before[key], key
        if buffer is not None:
            torch.testing.assert_close(buffer, values[key], rtol=0, atol=0)


def test_the_random_state_goes_on_as_if_nothing_had_been_drawn(model, visit):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    visit(model)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_can_be_taken_inside_whatever_holds_outside(outside):
    linear = nn.Linear(3, 1).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with outside():
        was = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with untouched(linear):
            (gradient,) = torch.autograd.grad(linear(x).sum(), [linear.weight])
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == was
    torch.testing.assert_close(gradient, x.sum(0, keepdim=True))


def test_dropout_is_off_and_the_output_of_an_example_does_not_depend_on_the_others(model):
    model.train().double()
    x = torch.randn(6, 3, dtype=torch.float64)
    with untouched(model):
        torch.testing.assert_close(torch.cat([model(row.unsqueeze(0)) for row in x]), model(x))


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_made_before_can_still_be_differentiated_after(training):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().train(training)
    x = torch.randn(5, 3, dtype=torch.float64)
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    loss = model(x).square().sum()
    with untouched(model):
        model(x)
    for found, expected in zip(torch.autograd.grad(loss, list(model.parameters())), plain, strict=True):
        torch.testing.assert_close(found, expected)


def test_an_untouched_inside_an_untouched_changes_nothing_for_the_outer_one(model):
    with untouched(model):
        with untouched(model):
            disturb(model)
        assert not any(modes(model).values())
        assert torch.is_grad_enabled()
