"""Weights that are computed from their parameter along several ways: each example's score is counted once."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from oracles import flat

WEIGHTS = {
    "normalized": lambda w: F.normalize(w, dim=1),
    "over its length": lambda w: w / w.norm(),
    "standardized": lambda w: (w - w.mean()) / w.std(),
    "gated by itself": lambda w: w * w.sigmoid(),
    "with its transpose": lambda w: w[:, :3] + w[:, :3].T @ w,
    "six ways": lambda w: functools.reduce(lambda found, _: found * found.tanh(), range(5), w),
}


class Computed(nn.Module):
    """A linear layer of a weight that is computed, beside one that is not."""

    def __init__(self, of):
        super().__init__()
        self.of, self.w, self.head = of, nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.of(self.w).T))


def built(of, seed=0):
    torch.manual_seed(seed)
    model = Computed(of).double()
    batches = [(torch.randn(count, 3).double(), torch.randint(0, 3, (count,))) for count in (4, 3)]
    return model, batches


def outer(model, batches):
    """Σ g gᵀ, an example at a time."""
    total = 0
    for x, y in batches:
        for row in range(len(y)):
            loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            score = flat(dict(enumerate(torch.autograd.grad(loss, list(model.parameters())))))
            total = total + torch.outer(score, score)
    return total


FISHERS = {
    "dense": holdfast.dense_fisher,
    "lowrank, all scores": functools.partial(holdfast.lowrank_fisher, rank=7),
    "mixed": lambda *args, **options: holdfast.mixed_fisher(*args, {"*": holdfast.dense_fisher}, **options),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("fisher", FISHERS.values(), ids=FISHERS)
def test_a_computed_weight_counts_once(weight, fisher):
    model, batches = built(weight)
    found = fisher(model, batches, holdfast.categorical, targets="observed")
    torch.testing.assert_close(found.dense(), outer(model, batches), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_the_diagonal_is_the_same(weight):
    model, batches = built(weight)
    found = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    torch.testing.assert_close(flat(found.entries), outer(model, batches).diagonal(), rtol=1e-9, atol=1e-12)


class Nothing(nn.Module):
    """A parameter without entries, as a layer that was pruned away leaves it."""

    def __init__(self):
        super().__init__()
        self.layer, self.none = nn.Linear(4, 3), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return self.layer(x) + (x @ self.none.T).sum(1, keepdim=True)


def test_a_parameter_without_entries_is_in_the_way_of_no_structure():
    torch.manual_seed(0)
    model, x, y = Nothing(), torch.randn(7, 4), torch.randint(0, 3, (7,))
    exact = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
    lowrank = functools.partial(holdfast.lowrank_fisher, rank=2)
    for fisher in (holdfast.kronecker_fisher, holdfast.dense_fisher, lowrank):
        found = fisher(model, [(x, y)], holdfast.categorical)
        assert found.shapes["none"] == (0, 4)
        assert found.diagonal()["none"].shape == (0, 4)
        if fisher is not holdfast.kronecker_fisher:
            torch.testing.assert_close(flat(found.diagonal()), flat(exact.entries))
