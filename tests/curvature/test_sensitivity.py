from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast
from cases import CASES, Recurrent, Shared, Tied, relu_mlp
from holdfast.curvature import Products
from holdfast.curvature.forms import Limit
from holdfast.curvature.magnitudes import Magnitudes, add_magnitudes_
from oracles import call, examples, trained

TWO_CUTS = (5, 2)


def loop(model, batches, forward):
    """2 Σₙ |∂‖f(xₙ)‖²/∂θ|: a batch of one, a gradient, its absolute value, after another."""
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in trained(model).items()}
    for example in examples(batches):
        length = forward(model, example).square().sum()
        grads = torch.autograd.grad(length, list(trained(model).values()), materialize_grads=True)
        for entries, grad in zip(total.values(), grads, strict=True):
            entries += 2 * grad.abs()
    return total


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, stride=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def at_one_place():
    """Convolutions with one position: of few channels, of many, and in groups."""
    return nn.Sequential(
        nn.Conv2d(2, 32, 3), nn.ReLU(), nn.Conv2d(32, 34, 4), nn.Tanh(), nn.Flatten(2), nn.Conv1d(34, 6, 1, groups=2),
        nn.Tanh(), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def embedding():
    return nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))


def words(n):
    return torch.randint(0, 7, (n, 5))  # five of seven words: some come twice


MODELS = {
    "perceptron": (relu_mlp, lambda n: torch.randn(n, 5).double()),
    "convolutional": (convolutional, lambda n: torch.randn(n, 2, 6, 6).double()),
    "at one place": (at_one_place, lambda n: torch.randn(n, 2, 6, 6).double()),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 4, 3).double()),
    "embedding": (embedding, words),
    "used twice": (Shared, lambda n: torch.randn(n, 4).double()),
    "tied": (Tied, words),
}


def made(name):
    torch.manual_seed(1)
    build, data = MODELS[name]
    model = build().double()
    torch.manual_seed(2)
    return model, data(7)


def check(found, want):
    assert list(found) == list(want)
    for name, entries in want.items():
        torch.testing.assert_close(found[name], entries, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        assert float(entries.max()) > 1e-6, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("taps", [True, False])
def test_it_is_the_sum_of_absolute_gradients_of_single_examples(name, taps, monkeypatch):
    model, x = made(name)
    plain, score = [], Magnitudes.score
    monkeypatch.setattr(Magnitudes, "score", lambda self, name, each: plain.append(name) or score(self, name, each))
    found = holdfast.sensitivity(model, [(x[:5],), (x[5:],)], taps=taps)
    check(found.entries, loop(model, [(x,)], lambda model, example: model(example[0])))
    assert set(plain) == (set() if taps else set(found.entries))  # nothing that has a rule goes the slow way


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kind_of_model_equals_a_loop_over_examples(case):
    batches = case.batches(TWO_CUTS)
    found = holdfast.sensitivity(case.model(), batches, forward=case.forward)
    want = loop(case.model(), batches, lambda model, example: call(case, model, example)[0])
    for name, entries in want.items():
        torch.testing.assert_close(found.entries[name], entries, rtol=1e-9, atol=1e-12)


def in_little_memory(model, x):
    """With the least memory, of powers of two, that is not refused: an example or two at a time."""
    for power in range(30):
        try:
            return holdfast.sensitivity(model, [(x,)], memory=1 << power)
        except holdfast.ArgumentError:  # too small for one example
            assert power < 20


@pytest.mark.parametrize("name", MODELS)
def test_neither_cuts_nor_memory_change_it(name):
    model, x = made(name)
    whole = holdfast.sensitivity(model, [(x,)])
    for found in (
        holdfast.sensitivity(model, [(x[n : n + 1],) for n in range(7)]),
        in_little_memory(model, x),
    ):
        check(found.entries, whole.entries)
        assert found.num_data == 7


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_unfolded_for_one_place_is_taken_some_examples_at_a_time(groups):
    """Five examples, of which two fit into the memory."""
    torch.manual_seed(0)
    left, right = (torch.randn(5, groups, 1, size, dtype=torch.float64) for size in (4, 3))
    form = replace(Products.of(left, right, torch.Size((groups * 4, 3)), inputs_left=False), share=100)
    total = torch.ones(form.shape, dtype=torch.float64)
    add_magnitudes_(total, form, Limit(200), "a weight")
    torch.testing.assert_close(total, 1 + form.scores(0, 5).abs().sum(0))


def test_a_linear_map_has_it_in_closed_form():
    """f = Wx: ∂‖f‖²/∂W = 2 f xᵀ, and so Λ = 4 Σₙ |fₙ| |xₙ|ᵀ. Outputs twice as long have four times as much."""
    model = nn.Linear(4, 3, bias=False).double()
    x = torch.randn(6, 4).double()
    found = holdfast.sensitivity(model, [(x,)]).entries["weight"]
    torch.testing.assert_close(found, 4 * model(x).detach().abs().T @ x.abs())
    longer = holdfast.sensitivity(model, [(x,)], forward=lambda model, batch: 2 * model(batch[0])).entries["weight"]
    torch.testing.assert_close(longer, 4 * found)


def test_labels_are_left_out_whatever_form_batches_have():
    model, x = made("perceptron")
    y = torch.randint(0, 3, (7,))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, pixels):
            return self.inner(pixels)

    alone = holdfast.sensitivity(model, [(x,)])
    for batches in ([x], [(x, y)], [(x, torch.randn(7, 2))], [[x]]):
        check(holdfast.sensitivity(model, batches).entries, alone.entries)
    named = holdfast.sensitivity(Named(), [{"pixels": x, "labels": y}])
    check({name.removeprefix("inner."): entries for name, entries in named.entries.items()}, alone.entries)


def test_a_part_of_the_model_is_taken_by_name_and_the_model_is_left_as_it_was():
    model, x = made("perceptron")
    model.train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    whole = holdfast.sensitivity(model, [(x,)])
    part = holdfast.sensitivity(model, [(x,)], only="4.*")
    check(part.entries, {name: whole.entries[name] for name in ("4.weight", "4.bias")})
    assert model.training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


def test_it_is_taken_in_evaluation_mode():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).double()
    x = torch.randn(9, 4).double()
    model.train()
    found = holdfast.sensitivity(model, [(x,)])
    check(found.entries, loop(model, [(x,)], lambda model, example: model(example[0])))


def test_half_precision_is_added_up_in_single():
    model, x = made("perceptron")
    exact = holdfast.sensitivity(model, [(x,)])
    rough = holdfast.sensitivity(model.to(torch.bfloat16), [(x.to(torch.bfloat16),)])
    for name, entries in rough.entries.items():
        assert entries.dtype == torch.float32
        assert float((entries - exact.entries[name]).norm() / exact.entries[name].norm()) < 0.05


def test_at_strength_one_it_is_the_published_penalty():
    """mean loss + Σ Ω δ² with Ω the mean over examples, for as many new examples as old ones."""
    model, x = made("perceptron")
    omega = {n: each / 2 / len(x) for n, each in loop(model, [(x,)], lambda m, example: m(example[0])).items()}
    found = holdfast.sensitivity(model, [(x,)])
    posterior = holdfast.consolidate(holdfast.prior(model), model, found)
    moves = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += moves[name]
    published = sum((omega[name] * delta.square()).sum() for name, delta in moves.items())
    torch.testing.assert_close(holdfast.penalty(model, posterior) / len(x), published)


def test_its_source_says_that_it_is_not_in_nats_and_where_it_was_taken():
    model, x = made("perceptron")
    found = holdfast.sensitivity(model, [(x,)])
    (source,) = found.sources
    assert (source.likelihood, source.targets) == ("sensitivity", "MAS, not in nats")
    assert (source.num_data, source.unit) == (7, "example")
    start = holdfast.prior(model)
    assert holdfast.consolidate(start, model, found).num_data == 7
    with torch.no_grad():
        model[0].bias += 0.1
    with pytest.raises(holdfast.MismatchError, match="other weights"):
        holdfast.consolidate(start, model, found)


def test_online_it_is_a_running_sum_that_fades():
    model, x = made("perceptron")
    first, second = holdfast.sensitivity(model, [(x[:4],)]), holdfast.sensitivity(model, [(x[4:],)])
    posterior = holdfast.consolidate(holdfast.prior(model), model, first)
    posterior = holdfast.consolidate(posterior, model, second, decay=0.5)
    want = {name: 0.5 * first.entries[name] + second.entries[name] for name in first.entries}
    check(posterior.precision.entries, want)
    assert posterior.num_data == 0.5 * 4 + 3


def test_what_cannot_be_used_is_refused():
    model, x = made("perceptron")
    with pytest.raises(holdfast.DataError, match="loader is empty"):
        holdfast.sensitivity(model, [])
    with pytest.raises(holdfast.DataError, match="output is not finite, because the batch itself is not"):
        holdfast.sensitivity(model, [(x * torch.nan,)])
    with pytest.raises(holdfast.DataError, match="sensitivity needs the model's output as one tensor, got tuple"):
        holdfast.sensitivity(model, [(x,)], forward=lambda model, batch: (model(batch[0]), 0))
    with pytest.raises(holdfast.DataError, match="the first axis must be the examples"):
        holdfast.sensitivity(model, [(x,)], forward=lambda model, batch: model(batch[0]).sum())
    with pytest.raises(holdfast.ArgumentError, match="fits none"):
        holdfast.sensitivity(model, [(x,)], only="head")
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    with pytest.raises(holdfast.InertError, match="outputs that are zero have no sensitivity"):
        holdfast.sensitivity(model, [(x,)])
