"""A model run at other weights: a copy with these weights is its slow twin."""

import copy

import torch
from torch import nn

from holdfast.elsewhere import run_at


class Ties(nn.Module):
    """A module under two names, and two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.body = nn.Sequential(layer, norm, nn.Tanh(), layer, norm)
        self.head = nn.Linear(4, 4)
        self.head.weight = layer.weight

    def forward(self, x):
        return self.head(self.body(x))


def tensors(model):
    return [
        (name, id(tensor))
        for every in (model.named_parameters, model.named_buffers)
        for name, tensor in every(remove_duplicate=False)
    ]


def test_what_is_tied_is_replaced_wherever_it_stands_and_comes_back():
    torch.manual_seed(0)
    model, x = Ties().double().eval(), torch.randn(3, 4, dtype=torch.float64)
    params = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    buffers = {name: torch.rand_like(b) for name, b in model.named_buffers() if b.is_floating_point()}
    other, before = copy.deepcopy(model), tensors(model)
    other.load_state_dict({**params, **buffers}, strict=False)
    for _ in range(2):
        torch.testing.assert_close(run_at(model, params, lambda there: there(x), buffers), other(x))
        assert tensors(model) == before
