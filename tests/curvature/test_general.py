"""The general path: what taps cannot serve, many examples at once where torch.func can, one by one where it cannot."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.curvature.general import General
from oracles import relative_errors, squares_loop


class Looks(nn.Module):
    """Control flow that looks at the data, which torch.func refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Bilinear(4, 4, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.tanh(self.mix(x, x))
        if float(x.detach().sum()) > 1e9:
            hidden = hidden * 2
        return self.head(hidden)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Bilinear(4, 4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(x, x)))


class Hides(nn.Module):
    """A checkpoint keeps its inside from the graph; it takes `.backward()` alone in its reentrant form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(checkpoint(self.inner, torch.tanh(self.first(x)), use_reentrant=False)))


def made(kind, size=7):
    torch.manual_seed(0)
    batch = (torch.randn(size, 4, dtype=torch.float64), torch.arange(size) % 3)
    return kind().double(), batch


@pytest.mark.parametrize("kind", [Pairs, Looks, Hides])
@pytest.mark.parametrize("targets", ["observed", "expected"])
@pytest.mark.parametrize("taps", [True, False])
def test_what_cannot_be_tapped_is_as_exact(kind, targets, taps):
    model, batch = made(kind)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets=targets, taps=taps)
    if targets == "observed":
        exact = squares_loop(model, batch, holdfast.categorical.nll)
    else:
        dense = holdfast.dense_fisher(model, [batch], holdfast.categorical, targets=targets)
        exact = dense.diagonal()
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9


@pytest.mark.parametrize(("kind", "many"), [(Pairs, True), (Looks, False)])
def test_many_examples_at_once_where_torch_func_can(kind, many, monkeypatch):
    sizes = []
    alone, together = General._one, General._many

    def one(self, *args):
        sizes.append(1)
        return alone(self, *args)

    def several(self, batch, start, stop, named):
        found = together(self, batch, start, stop, named)
        sizes.append(stop - start if found is not None else 0)
        return found

    monkeypatch.setattr(General, "_one", one)
    monkeypatch.setattr(General, "_many", several)
    model, batch = made(kind)
    holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    assert (7 in sizes) == many
    assert (sizes.count(1) >= 7) != many


def test_the_memory_limit_cuts_and_changes_nothing():
    model, batch = made(Pairs)
    whole = holdfast.diagonal_fisher(model, [batch], holdfast.categorical)
    for memory in (1200, 3000, 10**6):
        cut = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, memory=memory)
        assert max(relative_errors(cut.entries, whole.entries).values()) <= 1e-12
    with pytest.raises(
        holdfast.ArgumentError, match=r"memory=100 is too small for one example.*`mix\.weight`.*Give memory="
    ):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical, memory=100)


@pytest.mark.parametrize("memory", [0, -1, 1.5, None, True, "1GB"])
def test_a_memory_that_is_no_number_of_bytes_is_refused(memory):
    model, batch = made(Pairs)
    with pytest.raises(holdfast.ArgumentError, match="number of bytes"):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical, memory=memory)


def test_the_memory_limit_holds_for_taps_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = (torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(0, 3, (6, 4)))
    likelihood = holdfast.tokens(shift=False)
    whole = holdfast.diagonal_fisher(model, [batch], likelihood)
    cut = holdfast.diagonal_fisher(model, [batch], likelihood, memory=200)
    assert max(relative_errors(cut.entries, whole.entries).values()) <= 1e-12
    with pytest.raises(holdfast.ArgumentError, match="memory=100 is too small for one example"):
        holdfast.diagonal_fisher(model, [batch], likelihood, memory=100)


def test_autocast_reaches_the_forward_pass_of_the_general_path_and_no_further():
    torch.manual_seed(0)
    model, batch = Pairs(), (torch.randn(24, 4), torch.arange(24) % 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = squares_loop(model, batch, holdfast.categorical.nll)
        fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    assert max(relative_errors(fisher.entries, exact).values()) <= 3e-2
    assert {entries.dtype for entries in fisher.entries.values()} == {torch.float32}


def test_a_layer_unknown_to_every_path_says_so():
    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight.sum()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("Foreign has no gradient")

    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.ones(3)), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(Foreign.apply(x, self.weight))

    model = Strange()
    model.head.weight.grad = torch.ones(3, 4)
    with pytest.raises(NotImplementedError, match="Foreign has no gradient"):
        holdfast.diagonal_fisher(model, [(torch.randn(4, 4), torch.arange(4) % 3)], holdfast.categorical)
    assert torch.equal(model.head.weight.grad, torch.ones(3, 4))
    assert model.training
