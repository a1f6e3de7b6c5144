"""Kronecker factors against hooks on modules, an example at a time; what is no layer against the diagonal Fisher."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from cases import Case, Shared, Tied, batchnorm_cnn, images, regression, relu_mlp, token_rows, vectors
from holdfast.curvature.batches import read
from holdfast.curvature.scores import Scoring, in_pieces
from oracles import Sides, flat, kronecker_loop

CLASSES = 3


class Ends(nn.Module):
    """Any body, then a linear head on what it gives."""

    def __init__(self, body: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body(torch.randn(2, *shape)).flatten(1).shape[1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).flatten(1))


class InputsFirst(nn.Module):
    """GPT-2's Conv1D: a linear layer whose weight is inputs × outputs."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inside, outside)), nn.Parameter(torch.randn(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)

    def sides(self, x: Tensor, grad: Tensor) -> Sides:
        return x.flatten(0, -2).unsqueeze(0), grad.flatten(0, -2).unsqueeze(0)


class Bare(nn.Module):
    """A product written by hand: x @ W.T, outputs first; or an einsum."""

    def __init__(self, by_einsum: bool = False) -> None:
        super().__init__()
        self.weight, self.by_einsum = nn.Parameter(torch.randn(4, 5)), by_einsum

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,oi->bto", x, self.weight) if self.by_einsum else x @ self.weight.T

    def sides(self, x: Tensor, grad: Tensor) -> Sides:
        return x.flatten(0, -2).unsqueeze(0), grad.flatten(0, -2).unsqueeze(0)


class Heads(nn.Module):
    """A weight for each head, as one product of batches of matrices."""

    def __init__(self, outputs_first: bool, on_the_left: bool = False) -> None:
        super().__init__()
        self.outputs_first, self.on_the_left = outputs_first, on_the_left
        self.weight = nn.Parameter(torch.randn(2, 4, 3) if outputs_first else torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:  # (batch, positions, heads, inputs)
        if self.on_the_left:
            return torch.bmm(self.weight, x.squeeze(1).permute(1, 2, 0)).permute(2, 0, 1).unsqueeze(1)
        weight = self.weight.mT if self.outputs_first else self.weight
        return torch.bmm(x.movedim(2, 0).flatten(1, 2), weight).unflatten(1, x.shape[:2]).movedim(0, 2)

    def sides(self, x: Tensor, grad: Tensor) -> Sides:
        return x.movedim(2, 0).flatten(1, 2), grad.movedim(2, 0).flatten(1, 2)


def ends(make, *shape: int) -> Case:
    data = lambda n: (torch.randn(n, *shape, dtype=torch.float64), torch.arange(n) % CLASSES)  # noqa: E731
    return Case("", lambda: Ends(make(), shape), holdfast.categorical, data)


class Thrice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class Frames(nn.Module):
    """Frames folded into the batch, with as many channels and places as need no unfolding one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def norms() -> nn.Module:
    """Layers of two kinds, among what is none."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5)
    )


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


CASES = {
    "mlp": Case("", relu_mlp, holdfast.categorical, vectors(5, CLASSES)),
    "regression": Case("", lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)), holdfast.gaussian(0.5),
                       regression(4, 2)),
    "one output": Case("", lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3)), holdfast.categorical,
                       vectors(4, 3)),
    "sequence": ends(lambda: nn.Linear(5, 4), 6, 5),
    "sequence, no bias": ends(lambda: nn.Linear(5, 4, bias=False), 6, 5),
    "three inner axes": ends(lambda: nn.Linear(5, 4), 2, 3, 2, 5),
    "conv1d": ends(lambda: nn.Conv1d(4, 4, 3, stride=2, padding=1, dilation=2, groups=2), 4, 9),
    "conv2d": ends(lambda: nn.Conv2d(3, 4, 3, stride=(2, 1), padding=(2, 1), dilation=(1, 2)), 3, 8, 7),
    "conv2d, no bias, reflected": ends(
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False), 3, 5, 5),
    "conv2d by depth": ends(lambda: nn.Conv2d(4, 8, 3, groups=4), 4, 6, 6),
    "conv2d of one pixel": ends(lambda: nn.Conv2d(3, 4, 1, stride=2), 3, 6, 6),
    "conv2d of many channels": ends(lambda: nn.Conv2d(18, 20, 3, stride=2, padding=1, dilation=2), 18, 9, 8),
    "conv2d of many channels, in lines": ends(lambda: nn.Conv2d(18, 5, 3, padding=1, dilation=(1, 2)), 18, 8, 9),
    "conv2d of many channels, with a stride along one axis": ends(
        lambda: nn.Conv2d(16, 3, 3, padding=1, stride=(1, 2)), 16, 9, 18),
    "conv2d of many channels, in groups": ends(lambda: nn.Conv2d(36, 6, (3, 2), groups=2), 36, 5, 5),
    "conv1d of many channels": ends(lambda: nn.Conv1d(16, 3, 4, padding=2, dilation=3), 16, 20),
    "conv1d of many channels, with a stride": ends(lambda: nn.Conv1d(16, 3, 3, stride=2), 16, 20),
    "frames of many channels": ends(Frames, 2, 16, 8, 9),
    "conv3d": ends(lambda: nn.Conv3d(2, 4, 3, stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2)), 2, 4, 5, 5),
    "conv3d of many channels": ends(lambda: nn.Conv3d(16, 3, (2, 1, 2)), 16, 3, 3, 4),
    "transposed conv1d": ends(lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1), 2, 6),
    "transposed conv2d": ends(
        lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, dilation=(1, 2), groups=2), 4, 5, 4),
    "transposed conv2d of one pixel": ends(lambda: nn.ConvTranspose2d(3, 4, 1, stride=2), 3, 3, 3),
    "transposed conv2d of many channels": ends(lambda: nn.ConvTranspose2d(5, 18, 2, padding=1), 5, 4, 4),
    "inputs first": ends(lambda: InputsFirst(5, 4), 6, 5),
    "by hand": ends(Bare, 6, 5),
    "by einsum": ends(lambda: Bare(by_einsum=True), 6, 5),
    "heads": ends(lambda: Heads(False), 6, 2, 3),
    "heads, outputs first": ends(lambda: Heads(True), 6, 2, 3),
    "heads, on the left": ends(lambda: Heads(True, on_the_left=True), 1, 2, 3),
    "shared": Case("", Shared, holdfast.categorical, vectors(4, CLASSES)),
    "one convolution three times": ends(lambda: Thrice(nn.Conv2d(18, 18, 3, padding=1)), 18, 3, 3),
    "among norms": ends(norms, 2, 5, 5),
    "batch norm": Case("", batchnorm_cnn, holdfast.categorical, images(2, 5, CLASSES)),
    "frozen bias": Case("", lambda: frozen(relu_mlp(), "2.bias"), holdfast.categorical, vectors(5, CLASSES)),
}  # fmt: skip


def parts(fisher: holdfast.Precision) -> tuple[dict, dict]:
    """The layers of a Kronecker Fisher, by weight, each with its one term; and the entries of its diagonal."""
    terms = fisher.terms if isinstance(fisher, holdfast.Sum) else (fisher,)
    layers = {
        layer.weight: (layer, *each)
        for term in terms if isinstance(term, holdfast.Kronecker) for layer, each in term.layers.items()
    }  # fmt: skip
    entries = {k: v for term in terms if isinstance(term, holdfast.Diagonal) for k, v in term.entries.items()}
    return layers, entries


def covered_once(fisher: holdfast.Precision, model: nn.Module) -> None:
    layers, entries = parts(fisher)
    names = [name for layer, _ in layers.values() for name in layer.shapes] + list(entries)
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def agrees(fisher: holdfast.Precision, case: Case, batches: list, targets: str, labeled: list | None = None) -> None:
    """Factors are the loop's, the rest is the diagonal Fisher's, and every parameter is in one of the two."""
    layers, entries = parts(fisher)
    exact = kronecker_loop(case, case.model(), labeled or batches, targets)
    assert set(layers) == set(exact)
    for name, (_, term) in layers.items():
        close(term.outputs, exact[name][0])
        close(term.inputs, exact[name][1])
        assert term.outputs.abs().max() > 1e-9
    diagonal = holdfast.diagonal_fisher(case.model(), batches, case.likelihood, targets=targets)
    for name in entries:
        close(entries[name], diagonal.entries[name])
    covered_once(fisher, case.model())
    assert fisher.sources == diagonal.sources


@pytest.mark.parametrize("name", CASES)
def test_factors_equal_a_loop_of_hooks(name):
    case = CASES[name]
    batches = case.batches((5, 2))
    fisher = holdfast.kronecker_fisher(case.model(), batches, case.likelihood, targets="observed")
    agrees(fisher, case, batches, "observed")
    assert ("body.bias" in parts(fisher)[1]) == name.startswith("transposed")


@pytest.mark.parametrize("name", ["mlp", "sequence", "conv2d", "shared", "transposed conv2d", "among norms"])
def test_expected_and_sampled_targets(name):
    case, batches = CASES[name], CASES[name].batches((4, 3))
    agrees(
        holdfast.kronecker_fisher(case.model(), batches, case.likelihood, targets="expected"), case, batches, "expected"
    )
    scoring, model = Scoring(case.model(), case.likelihood, "sampled", 3, None), case.model()
    labeled = [(batch.content[0], scoring.counted(batch)[0].target) for batch in read(batches, model)]
    drawn = holdfast.kronecker_fisher(case.model(), batches, case.likelihood, targets="sampled", seed=3)
    for weight, (_, term) in parts(drawn)[0].items():
        close(term.outputs, kronecker_loop(case, case.model(), labeled, "observed")[weight][0])


TRACES = [
    "mlp", "sequence", "conv2d", "conv2d by depth", "conv2d of many channels, in lines", "transposed conv2d",
    "among norms", "frozen bias",
]  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("targets", ["expected", "observed"])
def test_an_exact_trace_is_that_of_the_diagonal_fisher_and_all_else_is_as_it_was(name, targets):
    """A layer is scaled as one, its groups and its bias together; what is no layer has no trace to be scaled to."""
    case, batches = CASES[name], CASES[name].batches((5, 2))
    plain, scaled = (
        holdfast.kronecker_fisher(case.model(), batches, case.likelihood, targets=targets, exact_trace=each)
        for each in (False, True)
    )
    exact = holdfast.diagonal_fisher(case.model(), batches, case.likelihood, targets=targets).entries
    (before, rest), (layers, entries), moved = parts(plain), parts(scaled), []
    for weight, (layer, term) in layers.items():
        traces = [flat(holdfast.Kronecker({layer: (each,)}).diagonal()).sum() for each in (before[weight][1], term)]
        close(traces[1], sum(exact[each].sum() for each in layer.shapes))
        close(term.outputs, before[weight][1].outputs * traces[1] / traces[0])
        close(term.inputs, before[weight][1].inputs)
        moved.append(abs(float(traces[1] / traces[0]) - 1))
    assert max(moved) > 1e-3
    assert list(entries) == list(rest)
    for each in entries:
        close(entries[each], rest[each])


@pytest.mark.parametrize("exact_trace", [False, True])
def test_a_layer_that_no_gradient_reaches_is_zero(exact_trace):
    """Dead units: no position counts, and there is no trace to be scaled to."""
    body = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    nn.init.constant_(body[0].bias, -100.0)
    case = ends(lambda: body, 6, 5)
    fisher = holdfast.kronecker_fisher(case.model(), case.batches((5, 2)), case.likelihood, exact_trace=exact_trace)
    found = fisher.diagonal()
    assert "body.0.weight" in parts(fisher)[0]
    assert not found["body.0.weight"].any()
    assert not found["body.0.bias"].any()
    assert found["head.bias"].any()


def test_inputs_count_once_for_each_example_however_many_classes_are_asked_about():
    """One body under heads of two classes and of four: an exact Fisher has more columns for the second."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(5, 4), nn.ModuleList(nn.Linear(4, classes) for classes in (2, 4))

        def forward(self, task, x):
            return self.heads[int(task[0])](torch.tanh(self.body(x)))

    torch.manual_seed(0)
    model = Turns().double()
    batches = [
        (torch.full((size,), task), torch.randn(size, 5, dtype=torch.float64), torch.arange(size) % 2)
        for task, size in ((0, 4), (1, 5))
    ]
    forward = lambda model, batch: model(batch[0], batch[1])  # noqa: E731
    fisher = holdfast.kronecker_fisher(model, batches, holdfast.categorical, targets="expected", forward=forward)
    every = F.pad(torch.cat([x for _, x, _ in batches]), (0, 1), value=1.0)
    close(parts(fisher)[0]["body.weight"][1].inputs[0], every.T @ every / 9)


CUTS = [(3, 4), (6, 1), (1, 6), (1, 1, 5), (1,) * 7]


@pytest.mark.parametrize("name", ["mlp", "sequence", "conv2d of many channels, in lines", "heads", "among norms"])
@pytest.mark.parametrize("targets", ["observed", "expected"])
def test_nothing_depends_on_how_the_batches_are_cut(name, targets):
    case = CASES[name]
    whole, *others = (
        holdfast.kronecker_fisher(case.model(), case.batches(cuts), case.likelihood, targets=targets)
        for cuts in [(7,), *CUTS]
    )
    for other in others:
        assert list(other.tensors) == list(whole.tensors)
        for key, tensor in whole.tensors.items():
            close(other.tensors[key], tensor)
        assert [source.id for source in other.sources] == [source.id for source in whole.sources]


def test_what_goes_one_example_at_a_time_is_not_counted_twice_in_batches_of_one():
    """A batch of one is run beside itself so that it can be tapped; the general path must not see it so."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs, self.head = nn.Bilinear(4, 4, 5), nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.head(torch.tanh(self.pairs(x, x.flip(1))))

    case = Case("", Pairs, holdfast.categorical, vectors(4, CLASSES))
    for cuts in [(7,), *CUTS]:
        fisher = holdfast.kronecker_fisher(case.model(), case.batches(cuts), case.likelihood)
        agrees(fisher, case, case.batches(cuts), "expected")
        assert set(parts(fisher)[1]) == {"pairs.weight", "pairs.bias"}


class Cell(nn.Module):
    """A recurrent network of torch's own, in one call or step by step; or its twin, whose products are modules."""

    def __init__(self, kind: str, twin: bool) -> None:
        super().__init__()
        self.kind, self.twin = kind, twin
        gates = {"LSTM": 4, "GRU": 3}[kind]
        if twin:
            self.ih, self.hh = nn.Linear(5, gates * 4), nn.Linear(4, gates * 4)
        else:
            self.cell = getattr(nn, f"{kind}Cell")(5, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            if not self.twin:
                found = self.cell(step, (h, c) if self.kind == "LSTM" else h)
                h, c = found if self.kind == "LSTM" else (found, c)
            elif self.kind == "LSTM":
                i, f, g, o = (self.ih(step) + self.hh(h)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                (r, z, n), (rh, zh, nh) = self.ih(step).chunk(3, 1), self.hh(h).chunk(3, 1)
                z = (z + zh).sigmoid()
                h = (1 - z) * (n + (r + rh).sigmoid() * nh).tanh() + z * h
        return self.head(h)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_cells_are_layers_used_at_every_step(kind):
    data = lambda n: (torch.randn(n, 4, 5, dtype=torch.float64), torch.arange(n) % CLASSES)  # noqa: E731
    case = Case("", lambda: Cell(kind, False), holdfast.categorical, data)
    twin = Case("", lambda: Cell(kind, True), holdfast.categorical, data)
    model, other = case.model(), twin.model()
    for side in ("ih", "hh"):
        for part in ("weight", "bias"):
            getattr(getattr(other, side), part).data = getattr(model.cell, f"{part}_{side}").data
    other.head = model.head
    exact = kronecker_loop(twin, other, case.batches((5, 2)), "observed")
    fisher = holdfast.kronecker_fisher(model, case.batches((5, 2)), case.likelihood, targets="observed")
    for name, (layer, term) in parts(fisher)[0].items():
        g, a = exact[f"{name[-2:]}.weight" if "cell" in name else name]
        assert layer.bias is not None
        close(term.outputs, g)
        close(term.inputs, a)
    covered_once(fisher, model)


@pytest.mark.parametrize("name", ["mlp", "inputs first", "conv2d of one pixel", "one output"])
def test_for_one_example_at_one_position_it_is_the_exact_block(name):
    """G ⊗ A = E[ggᵀ] ⊗ aaᵀ = E[(g ⊗ a)(g ⊗ a)ᵀ]."""
    case = {
        **CASES, "inputs first": ends(lambda: InputsFirst(5, 4), 5),
        "conv2d of one pixel": ends(lambda: nn.Conv2d(3, 4, 2), 3, 2, 2),
    }[name]  # fmt: skip
    model, batches = case.model(), case.batches((1,))
    fisher = holdfast.kronecker_fisher(model, batches, case.likelihood)
    for layer, term in parts(fisher)[0].values():
        exact = holdfast.dense_fisher(model, batches, case.likelihood, only=list(layer.shapes))
        block = holdfast.Kronecker({layer: (term,)})
        assert list(block.shapes) == list(exact.shapes)
        close(block.dense(), exact.matrix)


def test_a_tied_embedding_and_what_is_looked_up_stay_diagonal():
    case = Case("", Tied, holdfast.tokens(shift=True), token_rows)
    model = case.model()
    fisher = holdfast.kronecker_fisher(model, case.batches((5, 2)), case.likelihood, targets="observed")
    diagonal = holdfast.diagonal_fisher(model, case.batches((5, 2)), case.likelihood, targets="observed")
    layers, entries = parts(fisher)
    assert set(layers) == {"mix.weight"}
    assert {"embed.weight", "position.weight", "norm.weight", "norm.bias"} == set(entries)
    for name in entries:
        close(entries[name], diagonal.entries[name])
    assert layers["mix.weight"][1].num_data == fisher.num_data == diagonal.num_data


@pytest.mark.parametrize("axes", ["in the order of a product", "kernel before channels"])
def test_a_kernel_kept_in_another_order_stays_diagonal(axes):
    class Kernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 2))

        def forward(self, x):
            return F.conv1d(x, self.weight.mT if axes.startswith("kernel") else self.weight.view(4, 2, 3))

    case = ends(Kernel, 2, 6)
    fisher = holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood)
    assert ("body.weight" in parts(fisher)[0]) == (not axes.startswith("kernel"))
    diagonal = holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood)
    if "body.weight" in parts(fisher)[1]:
        close(parts(fisher)[1]["body.weight"], diagonal.entries["body.weight"])


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_kernel_that_goes_one_way_and_back_stays_diagonal(kernel):
    """An autoencoder's: what are inputs one way are outputs the other, and a factor would be of both."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 3, kernel, kernel)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return F.conv_transpose2d(torch.tanh(F.conv2d(x, self.weight, self.bias)), self.weight)

    case = ends(Both, 3, 5, 5)
    fisher = holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood)
    diagonal = holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood)
    assert {"body.weight", "body.bias"} == set(parts(fisher)[1])
    for name, entries in parts(fisher)[1].items():
        close(entries, diagonal.entries[name])


@pytest.mark.parametrize(("alpha", "beta", "size"), [(1, 1, 4), (2, 1, 4), (1, 3, 4), (2, 2, 4), (1, 1, 1)])
def test_a_bias_is_folded_in_only_where_it_is_added_to_each_output_as_the_product_is(alpha, beta, size):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(size))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight, alpha=alpha, beta=beta)

    case = ends(Scaled, 5)
    model, batches = case.model(), case.batches((1,))
    fisher = holdfast.kronecker_fisher(model, batches, case.likelihood)
    layer, term = parts(fisher)[0]["body.weight"]
    assert layer.bias == ("body.bias" if alpha == beta and size == 4 else None)
    exact = holdfast.dense_fisher(model, batches, case.likelihood, only=list(layer.shapes))
    close(holdfast.Kronecker({layer: (term,)}).dense(), exact.matrix)
    close(
        fisher.diagonal()["body.bias"], holdfast.diagonal_fisher(model, batches, case.likelihood).entries["body.bias"]
    )


def test_heads_that_take_turns_are_all_layers():
    """A head for each task: batch after batch another is used."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(2))

        def forward(self, task, x):
            return self.heads[int(task[0])](x)

    def forward(model, batch):
        return model(batch[0], batch[1])

    model = Turns().double()
    batches = [
        (torch.full((4,), task), torch.randn(4, 5, dtype=torch.float64), torch.arange(4) % 3) for task in (0, 1, 0)
    ]
    fisher = holdfast.kronecker_fisher(model, batches, holdfast.categorical, forward=forward)
    assert isinstance(fisher, holdfast.Kronecker)
    for task, head in enumerate(model.heads):
        alone = holdfast.kronecker_fisher(
            head, [(x, y) for t, x, y in batches if int(t[0]) == task], holdfast.categorical
        )
        layer, term = parts(fisher)[0][f"heads.{task}.weight"]
        assert layer.bias == f"heads.{task}.bias"
        close(term.outputs, parts(alone)[0]["weight"][1].outputs)
        close(term.inputs, parts(alone)[0]["weight"][1].inputs)


@pytest.mark.parametrize("widest", [5, 4, 3, 1])
def test_sides_that_are_too_wide_are_their_diagonals(widest):
    case, batches = CASES["mlp"], CASES["mlp"].batches((5, 2))
    whole = parts(holdfast.kronecker_fisher(case.model(), batches, case.likelihood))[0]
    with pytest.warns(holdfast.HoldfastWarning, match=r"too wide for a matrix.*`0.weight` \(6 outputs\)"):
        narrow = parts(holdfast.kronecker_fisher(case.model(), batches, case.likelihood, widest=widest))[0]
    for name, (layer, term) in narrow.items():
        sizes = layer.outputs, layer.inputs - 1
        for found, full, size in zip(
            (term.outputs, term.inputs), (whole[name][1].outputs, whole[name][1].inputs), sizes, strict=True
        ):
            close(found, full if size <= widest else full.diagonal(dim1=1, dim2=2))
            assert (found.ndim == 3) == (size <= widest)


def test_a_kernel_too_wide_for_a_matrix_is_its_diagonal_though_its_patches_need_no_unfolding():
    case = ends(lambda: nn.Conv2d(16, 3, 3, padding=1), 16, 8, 8)
    batches = case.batches((5, 2))
    whole = parts(holdfast.kronecker_fisher(case.model(), batches, case.likelihood))[0]["body.weight"][1]
    with pytest.warns(holdfast.HoldfastWarning, match=r"too wide for a matrix.*`body.weight` \(145 inputs\)"):
        narrow = holdfast.kronecker_fisher(case.model(), batches, case.likelihood, widest=100)
    term = parts(narrow)[0]["body.weight"][1]
    close(term.outputs, whole.outputs)
    close(term.inputs, whole.inputs.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("widest", [0, -1, 2.0, True, None])
def test_a_width_that_is_none_is_refused(widest):
    case = CASES["mlp"]
    with pytest.raises(holdfast.ArgumentError, match=r"widest is the number of directions.*got"):
        holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood, widest=widest)


def test_a_model_without_layers_gets_its_diagonal_and_is_told_why():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * self.scale + self.shift

    case = Case("", Scales, holdfast.categorical, vectors(3, 3))
    with pytest.warns(
        holdfast.HoldfastWarning, match=r"no layer could be factored.*`scale`: it is used in MulBackward0"
    ):
        fisher = holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood)
    assert isinstance(fisher, holdfast.Diagonal)
    close(flat(fisher.entries), flat(holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood).entries))


def test_a_frozen_weight_leaves_its_bias_a_diagonal():
    case = Case("", lambda: frozen(relu_mlp(), "2.weight"), holdfast.categorical, vectors(5, CLASSES))
    fisher = holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood)
    diagonal = holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood)
    assert set(parts(fisher)[1]) == {"2.bias"}
    close(parts(fisher)[1]["2.bias"], diagonal.entries["2.bias"])
    covered_once(fisher, case.model())


@pytest.mark.parametrize("name", ["mlp", "sequence", "conv2d", "conv2d of many channels"])
def test_under_bfloat16_autocast_factors_are_summed_in_float32(name):
    case = CASES[name]
    model = case.model().float()
    batches = [(x.float(), y) for x, y in case.batches((32,))]
    exact = parts(holdfast.kronecker_fisher(model, batches, case.likelihood, targets="observed"))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = parts(holdfast.kronecker_fisher(model, batches, case.likelihood, targets="observed"))[0]
    for name, (_, term) in found.items():
        for a, b in ((term.outputs, exact[name][1].outputs), (term.inputs, exact[name][1].inputs)):
            assert a.dtype == torch.float32
            assert (a - b).norm() <= 3e-2 * b.norm()


def test_memory_too_small_for_an_example_says_what_it_takes():
    case = CASES["conv2d of many channels"]
    with pytest.raises(
        holdfast.ArgumentError, match=r"memory=100 is too small for one example: .*`.*` takes \d+ bytes"
    ):
        holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood, memory=100)
    small = holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood, memory=60_000)
    for key, tensor in holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood).tensors.items():
        close(small.tensors[key], tensor)


def test_a_gradient_that_is_not_finite_names_batch_and_layer():
    class Sharp(nn.Module):
        """Its gradient at zero is infinite, and its value is not."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.body(x).abs().sqrt())

    model = Sharp().double()
    good, bad = torch.randn(4, 2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    labels = torch.arange(4) % 2
    with pytest.raises(
        holdfast.DataError, match=r"batch 1: the gradients of `body\.weight \(outputs\)` are not finite"
    ):
        holdfast.kronecker_fisher(model, [(good, labels), (bad, labels)], holdfast.categorical)
    with pytest.raises(holdfast.DataError, match="batch 1"):
        holdfast.kronecker_fisher(model, [(good, labels), (bad * torch.nan, labels)], holdfast.categorical)


def test_a_sharded_model_is_refused(tmp_path):
    from torch.distributed.tensor import DeviceMesh, distribute_module

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = distribute_module(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
        for fisher in (holdfast.kronecker_fisher, holdfast.dense_fisher):
            with pytest.raises(holdfast.ArgumentError, match=r"`weight` is sharded.*batch_sum_fisher"):
                fisher(model, [(torch.randn(4, 3), torch.arange(4) % 2)], holdfast.categorical)
    finally:
        torch.distributed.destroy_process_group()


def test_the_model_and_its_gradients_are_left_as_found():
    case = CASES["among norms"]
    model = case.model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    holdfast.kronecker_fisher(model, case.batches(), case.likelihood)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_part_of_a_model():
    case = CASES["mlp"]
    whole = parts(holdfast.kronecker_fisher(case.model(), case.batches(), case.likelihood))[0]
    kronecker = functools.partial(holdfast.kronecker_fisher, case.model(), case.batches(), case.likelihood)
    (layer, term) = parts(kronecker(only="2.*"))[0]["2.weight"]
    assert layer.bias == "2.bias"
    close(term.outputs, whole["2.weight"][1].outputs)
    close(term.inputs, whole["2.weight"][1].inputs)
    bare = parts(kronecker(only=["2.weight", "4.bias"]))
    assert bare[0]["2.weight"][0].bias is None
    close(bare[0]["2.weight"][1].inputs, whole["2.weight"][1].inputs[:, :-1, :-1])
    assert set(bare[1]) == {"4.bias"}


def test_padding_is_no_input():
    """Positions without a label have no gradient; counted in A's mean, they would weaken the hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6, padding_idx=0), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    x, y = torch.randint(1, 7, (8, 4)), torch.randint(0, 7, (8, 4))
    found = []
    for pad in (0, 4, 12):
        batches = [(F.pad(x, (0, pad)), F.pad(y, (0, pad), value=-100))]
        fisher = holdfast.kronecker_fisher(model, batches, holdfast.tokens(shift=False), targets="observed")
        found.append(fisher.diagonal())
    for padded in found[1:]:
        for name, entries in found[0].items():
            close(padded[name], entries)


class Ways(nn.Module):
    """One weight and one bias, used in the ways that the first input says."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        way = int(x[0, 0])
        if way == 0:
            return self.head(torch.tanh(self.layer(x)))
        if way == 1:
            return self.head(torch.tanh(x @ self.layer.weight.T))
        if way == 2:
            return self.head(torch.tanh(self.layer(x) + torch.tanh(x + self.layer.bias)))
        return self.head(torch.tanh(F.linear(x, self.layer.weight.T, self.layer.bias)))


@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_layer_that_a_later_batch_uses_in_another_way_is_refused(way):
    torch.manual_seed(0)
    model = Ways().double()
    batches = []
    for each in (0, way):
        x = torch.randn(5, 4).double()
        x[:, 0] = each
        batches.append((x, torch.randint(0, 3, (5,))))
    with pytest.raises(holdfast.DataError, match=r"`layer.weight` is a layer with `layer.bias`.*diagonal_fisher"):
        holdfast.kronecker_fisher(model, batches, holdfast.categorical)


def test_tensors_in_pieces_are_checked_together_and_each_for_itself():
    matrix = torch.arange(12.0).view(1, 3, 4)
    tensors = [torch.ones(2, 2), matrix.diagonal(dim1=1, dim2=2), matrix.mT, torch.ones(3)]
    found = in_pieces(tensors)
    assert all(each.is_contiguous() for each in found)
    assert [sorted(each.flatten().tolist()) for each in found] == [sorted(each.flatten().tolist()) for each in tensors]
    assert found[0] is tensors[0]
    assert found[1].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()


class Pooled(nn.Module):
    """Words, a layer at each, and the mean over those that are no padding."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, words):
        real = (words != 0).unsqueeze(-1)
        return self.last((torch.tanh(self.first(self.table(words))) * real).sum(1) / real.sum(1))


@pytest.mark.parametrize("targets", ["expected", "sampled", "observed"])
def test_a_classifier_does_not_count_padding_either(targets):
    torch.manual_seed(0)
    model = Pooled().double()
    words, y = torch.randint(1, 20, (30, 4)), torch.randint(3, (30,))
    found = [
        holdfast.kronecker_fisher(model, [(F.pad(words, (0, more)), y)], holdfast.categorical, targets=targets)
        for more in (0, 9)
    ]
    short, long = (each.tensors for each in found)
    for name, tensor in short.items():
        torch.testing.assert_close(tensor, long[name])


@pytest.mark.parametrize("out", [0, 1, 2])
def test_a_position_counts_if_any_class_has_a_gradient_there(out):
    """A class that is out of the question has none, whether it comes first or last."""
    torch.manual_seed(0)
    model = Pooled()
    with torch.no_grad():
        model.last.weight.mul_(0.1)
        model.last.bias.copy_(-1e4 * F.one_hot(torch.tensor(out), 3))
    words, y = torch.randint(1, 20, (30, 4)), torch.randint(1, 3, (30,))
    fisher = holdfast.kronecker_fisher(model, [(words, y)], holdfast.categorical, targets="expected")
    (kron,) = [term for term in fisher.terms if isinstance(term, holdfast.Kronecker)]
    (inputs,) = [term.inputs for layer, (term,) in kron.layers.items() if layer.weight == "first.weight"]
    looked = F.pad(model.table(words).detach().flatten(0, 1), (0, 1), value=1.0)
    torch.testing.assert_close(inputs[0], looked.T @ looked / len(looked), rtol=1e-4, atol=1e-5)


def test_a_recurrent_cell_does_not_count_steps_behind_the_last_label():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.cell, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 9)

        def forward(self, words):
            return self.head(self.cell(self.table(words))[0])

    torch.manual_seed(0)
    model = Recurrent().double()
    words = torch.randint(9, (10, 5))
    found = []
    for more in (0, 7):
        y = F.pad(torch.roll(words, -1, 1), (0, more), value=-100)
        batches = [(F.pad(words, (0, more)), y)]
        found.append(holdfast.kronecker_fisher(model, batches, holdfast.tokens(shift=False), targets="observed"))
    short, long = (each.tensors for each in found)
    for name, tensor in short.items():
        torch.testing.assert_close(tensor, long[name])


def test_an_empty_sequence_adds_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), Summed(), nn.Linear(4, 3))
    words, y = torch.randint(10, (4, 5)), torch.randint(3, (4,))
    both = [(words, y), (torch.zeros(4, 0, dtype=torch.long), y)]
    first, second = (holdfast.diagonal_fisher(model, batches, holdfast.categorical) for batches in (both[:1], both))
    torch.testing.assert_close(first.entries["0.weight"], second.entries["0.weight"])


class Summed(nn.Module):
    def forward(self, x):
        return x.sum(1)
