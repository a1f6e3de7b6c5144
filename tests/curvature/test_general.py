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
    """A checkpoint lets the inputs of its operations be seen once; a reentrant one takes `.backward()` alone."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(checkpoint(self.inner, torch.tanh(self.first(x)), use_reentrant=self.reentrant)))


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
    with pytest.raises(
        holdfast.DataError, match=r"batch 0: the model cannot be differentiated \(Foreign has no gradient"
    ):
        holdfast.diagonal_fisher(model, [(torch.randn(4, 4), torch.arange(4) % 3)], holdfast.categorical)
    assert torch.equal(model.head.weight.grad, torch.ones(3, 4))
    assert model.training


def test_checkpoints_are_named_and_reentrant_ones_refused():
    model, batch = made(Hides)
    found = holdfast.coverage(model, [batch], holdfast.categorical)
    assert "checkpointing" in found.general["inner.weight"]
    model.reentrant = True
    with pytest.raises(holdfast.DataError, match=r"(?s)reentrant checkpoint works.*batch_sum_fisher"):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical)


class Experts(nn.Module):
    """Each example goes to the expert of its own: two of them tell nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(5))
        self.never = nn.Linear(4, 3)

    def forward(self, x):
        chosen = x[:, 0].mul(10).long().remainder(5)
        found = x.new_zeros(len(x), 3)
        for n, expert in enumerate(self.experts):
            if bool((chosen == n).any()):
                found = found.index_add(0, (chosen == n).nonzero()[:, 0], expert(x[chosen == n]))
        return found if float(x.detach().sum()) < 1e9 else self.never(x)


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_parameters_that_only_some_examples_use(size):
    model, batch = made(Experts, size)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9
    found = holdfast.coverage(model, [batch], holdfast.categorical)
    assert {"never.weight", "never.bias"} <= set(found.unused)
    assert all(not exact[name].any() for name in found.unused)


class Heads(nn.Module):
    """One head for each task, chosen by the batch: the graphs of two tasks differ in nothing but the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x, task):
        return self.heads[int(task[0])](torch.tanh(self.body(x)))


def test_a_head_gets_its_own_fisher():
    model, (x, y) = made(Heads, 6)
    batches = [(x.roll(task, 1), torch.full((6,), task), y) for task in (0, 1, 1, 2, 0)]
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    each = [squares_loop(model, batch, holdfast.categorical.nll) for batch in batches]
    total = {name: sum(part[name] for part in each) for name in each[0]}
    assert max(relative_errors(fisher.entries, total).values()) <= 1e-9


class Sorts(nn.Module):
    """One layer used on the examples as they come and as they are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        inside = torch.tanh(self.layer(x[order]))
        return self.head(inside[order.argsort()] + torch.tanh(self.layer(2 * x)))


@pytest.mark.parametrize("seed", range(6))
def test_examples_that_change_places_inside_are_noticed(seed):
    torch.manual_seed(seed)
    model, batch = Sorts().double(), (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3)
    with pytest.raises(holdfast.CheckError, match=r"`layer\.weight`"):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical)
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed", taps=False)
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9
