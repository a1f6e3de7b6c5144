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
    for memory in (3000, 6000, 10**6):
        cut = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, memory=memory)
        assert max(relative_errors(cut.entries, whole.entries).values()) <= 1e-12
    with pytest.raises(
        holdfast.ArgumentError, match=r"memory=100 is too small for one example.*`mix\.weight`.*Give as many"
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
    cut = holdfast.diagonal_fisher(model, [batch], likelihood, memory=400)
    assert max(relative_errors(cut.entries, whole.entries).values()) <= 1e-12
    with pytest.raises(holdfast.ArgumentError, match=r"memory=100 is too small.*`2\.weight` takes 192 bytes"):
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
    assert all(not exact[name].any() for name in found.unused)
    assert not set(found.tapped) & {"never.weight", "never.bias"}


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


class Turns(nn.Module):
    """One layer used on the examples in one order and in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)).flip(0))).flip(0))


class Ties(nn.Module):
    """Examples sorted by a key that several share, as encoders of sentences sort by length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def encoded(self, x, key):
        order = key.sort(stable=True).indices
        return torch.tanh(self.layer(x[order]))[order.argsort()]

    def forward(self, x):
        return self.head(self.encoded(x, (x[:, 0] > 0.5).long()) + self.encoded(2 * x, (x[:, 1] > 0.5).long()))


class Counts(nn.Module):
    """As many rows as the examples have parts, which can be as many as there are examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        rows = [n for n, count in enumerate(x[:, 0].tolist()) for _ in range(int(count))]
        owner = torch.tensor(rows, dtype=torch.long)
        return self.head(x.new_zeros(len(x), 4).index_add(0, owner, torch.tanh(self.layer(x[owner]))) + x)


class Dispatches(nn.Module):
    """Experts with as many places as there are examples, each sent to its own by a one-hot matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.Parameter(torch.randn(2, 4, 3))

    def forward(self, x):
        weight, expert = self.gate(x).softmax(-1).max(-1)
        taken = nn.functional.one_hot(expert, 2)
        place = ((taken.cumsum(0) - 1) * taken).sum(-1)
        sent = taken.unsqueeze(-1) * nn.functional.one_hot(place, len(x)).unsqueeze(1).to(x)  # (batch, experts, places)
        found = torch.bmm(torch.einsum("bep,bi->epi", sent, x), self.experts)
        return torch.einsum("bep,epo->bo", sent * weight.view(-1, 1, 1), found)


@pytest.mark.parametrize("seed", range(3))
def test_examples_that_are_sent_to_places_by_a_matrix(seed):
    torch.manual_seed(seed)
    model = Dispatches().double()
    batches = [(torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3) for _ in range(2)]
    fisher = holdfast.dense_fisher(model, batches, holdfast.categorical, targets="observed")
    scores = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        for x, y in batches
        for loss in holdfast.categorical.nll(model(x), y)
    ]
    torch.testing.assert_close(fisher.matrix, sum(torch.outer(score, score) for score in scores))


@pytest.mark.parametrize("kind", [Sorts, Turns, Ties])
@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_examples_that_change_places_inside(kind, size, seed):
    torch.manual_seed(seed)
    model = kind().double()
    batches = [(torch.randn(size, 4, dtype=torch.float64), torch.arange(size) % 3) for _ in range(3)]
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    parts = [squares_loop(model, batch, holdfast.categorical.nll) for batch in batches]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert max(relative_errors(fisher.entries, total).values()) <= 1e-9


@pytest.mark.parametrize(
    "counts", [[(1, 1, 1, 1), (2, 0, 1, 1)], [(2, 0, 1, 1), (1, 1, 1, 1)], [(3, 1, 1, 3), (2, 2, 2, 2)]]
)
def test_rows_that_are_as_many_as_the_examples_and_belong_to_others(counts):
    torch.manual_seed(0)
    model, batches = Counts().double(), []
    for each in counts:
        x = torch.randn(4, 4, dtype=torch.float64)
        x[:, 0] = torch.tensor(each)
        batches.append((x, torch.arange(4) % 3))
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    parts = [
        holdfast.diagonal_fisher(model, [(x[n : n + 1], y[n : n + 1])], holdfast.categorical, targets="observed")
        for x, y in batches for n in range(4) if x[n, 0] > 0
    ]  # fmt: skip
    layer = sum(part.entries["layer.weight"] for part in parts)  # an example without parts has nothing for the layer
    torch.testing.assert_close(fisher.entries["layer.weight"], layer, rtol=1e-9, atol=1e-12)


class Windows(nn.Module):
    """Time first, with windows behind the examples: axes of one in the first batch grow in the next."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.head(torch.tanh(self.layer(x.contiguous() if self.copied else x)).cumsum(0)[-1].mean(1))


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("sizes", [[(4, 1, 3), (4, 2, 3), (5, 3, 3)], [(4, 3, 1), (4, 3, 3), (2, 1, 1), (3, 2, 5)]])
def test_axes_of_one_that_grow_later(copied, sizes):
    torch.manual_seed(0)
    model = Windows(copied).double()
    batches = [(torch.randn(*size, 4, dtype=torch.float64), torch.arange(size[0]) % 3) for size in sizes]
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    parts = [squares_loop(model, batch, holdfast.categorical.nll) for batch in batches]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert max(relative_errors(fisher.entries, total).values()) <= 1e-9


class Packs(nn.Module):
    """Sequences of their own length, packed: as many rows as the lengths add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][0])


class Masks(nn.Module):
    """The positions that a mask leaves, in one axis, through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        rows = torch.tanh(self.layer(x[mask]))
        owner = torch.arange(len(x)).unsqueeze(1).expand_as(mask)[mask]
        return self.head(x.new_zeros(len(x), 4).index_add(0, owner, rows))


@pytest.mark.parametrize("kind", [Packs, Masks])
@pytest.mark.parametrize(
    "lengths", [[(4,) * 5, (6, 2, 4, 4, 4)], [(3, 3, 5, 1), (2, 4, 3, 3)], [(1, 1, 1, 1), (2, 1, 0, 1)]]
)
def test_rows_that_divide_evenly_and_are_not_the_examples(kind, lengths):
    torch.manual_seed(0)
    model = kind().double()
    batches = []
    for each in lengths:
        each = tuple(max(1, n) for n in each) if kind is Packs else each
        x = torch.randn(len(each), 6, 4, dtype=torch.float64)
        x[:2] *= 5  # the first two have most to say
        batches.append((x, torch.tensor(each), torch.arange(len(each)) % 3))
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    parts = [squares_loop(model, batch, holdfast.categorical.nll) for batch in batches]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert max(relative_errors(fisher.entries, total).values()) <= 1e-9
    found = holdfast.coverage(model, batches, holdfast.categorical)
    assert not found.tapped
    assert "rows" in found.general["head.weight"]


class Rows(nn.Module):
    """One row of a table for each task, and one offset of a longer table: the same graph, another part."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks, self.places, self.head = (
            nn.Parameter(torch.randn(3, 4)),
            nn.Parameter(torch.randn(9, 4)),
            nn.Linear(4, 3),
        )

    def forward(self, x, task):
        start = int(task[0])
        return self.head(torch.tanh(x + self.tasks[start] + self.places[start : start + 3].sum(0)))


class Flat(nn.Module):
    """A layer's weights kept in one vector; a gate whose halves each see some of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.pair = nn.Parameter(torch.randn(35)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x, task):
        weight, bias, out, last = self.flat.split([16, 4, 12, 3])
        first, second = self.pair.chunk(2)
        gate = (x[:, :1] > 0).to(x)
        hidden = torch.tanh(x @ weight.view(4, 4) + bias) + (x @ first.T) * gate + (x @ second.T) * (1 - gate)
        return hidden @ out.view(4, 3) + last


@pytest.mark.parametrize("kind", [Rows, Flat])
@pytest.mark.parametrize("targets", ["observed", "expected"])
def test_parts_of_parameters_go_where_they_belong(kind, targets):
    model, (x, y) = made(kind, 6)
    batches = [(x.roll(task, 1), torch.full((6,), task), y) for task in (0, 1, 2, 1)]
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets=targets)
    slow = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets=targets, taps=False)
    assert max(relative_errors(fisher.entries, slow.entries).values()) <= 1e-9
    if targets == "observed":
        parts = [squares_loop(model, batch, holdfast.categorical.nll) for batch in batches]
        total = {name: sum(part[name] for part in parts) for name in parts[0]}
        assert max(relative_errors(fisher.entries, total).values()) <= 1e-9
    assert not holdfast.coverage(model, batches, holdfast.categorical).general


class Waves(nn.Module):
    """Complex numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(3, 2)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=4))


class Listed(nn.Module):
    """A parameter that is reached through a plain list, which torch.func cannot replace; example 0 does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head, self.v = nn.Bilinear(4, 4, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(4))
        self.listed = [self.v]

    def forward(self, x):
        return self.head(self.mix(x, x)) * torch.mv(x, self.listed[0]).relu().unsqueeze(1)


@pytest.mark.parametrize("kind", [Waves, Listed])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("taps", [True, False])
def test_complex_numbers_and_hidden_references(kind, seed, taps):
    torch.manual_seed(seed)
    model, batch = kind().double(), (torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3)
    if kind is Listed:
        batch[0][0] = -model.v.detach()
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed", taps=taps)
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9


def test_lists_with_an_element_for_each_example_are_cut_on_every_path():
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.scales = nn.Linear(4, 3), nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(2))

        def forward(self, x, task):
            return self.head(torch.stack([each * self.scales[t] for each, t in zip(x, task, strict=True)]))

    torch.manual_seed(0)
    model = Tagged().double()
    x, tasks, y = torch.randn(6, 4, dtype=torch.float64), [0, 1, 1, 0, 1, 0], torch.arange(6) % 3
    exact = sum(
        holdfast.diagonal_fisher(model, [{"x": x[n : n + 1], "task": [tasks[n]], "labels": y[n : n + 1]}],
                                 holdfast.categorical, targets="observed") for n in range(6)
    )  # fmt: skip
    for taps in (True, False):
        batch = {"x": x, "task": tasks, "labels": y}
        fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed", taps=taps)
        assert max(relative_errors(fisher.entries, exact.entries).values()) <= 1e-9


class Twice(nn.Module):
    """Modules that stand in the model under two names, one of them with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.body = nn.Sequential(layer, norm, nn.Tanh(), layer, norm, nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_module_with_two_names_is_one_and_keeps_its_own_weights():
    model, batch = made(Twice)
    before = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed", taps=False)
    assert max(relative_errors(fisher.entries, squares_loop(model, batch, holdfast.categorical.nll)).values()) <= 1e-9
    after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [(name, id(tensor)) for name, tensor in after] == [(name, id(tensor)) for name, tensor in before]
