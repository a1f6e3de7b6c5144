"""Squares of whole batches' gradients: unbiased, with an error that is as large as it says."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from cases import CASES
from oracles import flat

CASE = CASES[0]


def batches(size: int, count: int) -> list:
    return CASE.batches((size,) * count)


@pytest.mark.parametrize("targets", ["sampled", "observed"])
def test_it_is_unbiased_and_its_error_is_what_it_says(targets):
    data = batches(16, 10)
    model = CASE.model()
    of = "expected" if targets == "sampled" else "observed"
    exact = flat(holdfast.diagonal_fisher(model, data, CASE.likelihood, targets=of).entries)
    runs = [holdfast.batch_sum_fisher(model, data, CASE.likelihood, targets=targets, seed=seed) for seed in range(200)]
    found = torch.stack([flat(run.fisher.entries) for run in runs])
    standard = found.std(0) / len(runs) ** 0.5
    assert ((found.mean(0) - exact).abs() <= 4.5 * standard + 1e-12).all()
    realized = (found - exact).square().sum(1).mean().sqrt()
    said = torch.tensor([run.relative_error * flat(run.fisher.entries).norm() for run in runs]).square().mean().sqrt()
    assert 0.75 <= said / realized <= 1.33
    assert all(run.squares == 10 for run in runs)


def test_squares_of_observed_batch_sums_without_signs_would_be_something_else():
    data = batches(64, 1)
    model = CASE.model()
    exact = flat(holdfast.diagonal_fisher(model, data, CASE.likelihood, targets="observed").entries).sum()
    mean = torch.stack([
        flat(holdfast.batch_sum_fisher(model, data, CASE.likelihood, targets="observed", seed=s).fisher.entries).sum()
        for s in range(200)
    ]).mean()  # fmt: skip
    ((x, y),) = data
    grads = torch.autograd.grad(CASE.likelihood.nll(model.eval()(x), y).sum(), list(model.parameters()))
    unsigned = sum(grad.square().sum() for grad in grads)
    assert mean == pytest.approx(float(exact), rel=0.25)
    assert unsigned != pytest.approx(float(exact), rel=0.5)


def test_batches_of_one_with_observed_labels_are_exact():
    data = batches(1, 7)
    model = CASE.model()
    exact = holdfast.diagonal_fisher(model, data, CASE.likelihood, targets="observed")
    found = holdfast.batch_sum_fisher(model, data, CASE.likelihood, targets="observed").fisher
    torch.testing.assert_close(flat(found.entries), flat(exact.entries))


def test_more_draws_and_smaller_batches_are_nearer():
    model = CASE.model()
    whole = CASE.batches((64,))
    few = holdfast.batch_sum_fisher(model, whole, CASE.likelihood)
    many = holdfast.batch_sum_fisher(model, whole, CASE.likelihood, draws=16)
    small = holdfast.batch_sum_fisher(model, CASE.batches((4,) * 16), CASE.likelihood)
    assert (few.squares, many.squares, small.squares) == (1, 16, 16)
    assert few.relative_error == pytest.approx((2 / 3) ** 0.5)
    for better in (many, small):
        assert better.relative_error < 0.6 * few.relative_error
    assert few.fisher.num_data == many.fisher.num_data == small.fisher.num_data == 64


def test_what_it_says_of_itself():
    estimate = holdfast.batch_sum_fisher(CASE.model(), batches(4, 3), CASE.likelihood)
    assert set(estimate.relative_errors) == set(estimate.fisher.entries)
    (source,) = estimate.fisher.sources
    assert (source.num_data, source.unit, source.targets) == (12, "example", "sampled, batch sums")
    assert "3 squares" in repr(estimate)
    twice = holdfast.batch_sum_fisher(CASE.model(), batches(4, 3), CASE.likelihood)
    assert torch.equal(flat(twice.fisher.entries), flat(estimate.fisher.entries))  # a seed repeats
    posterior = holdfast.consolidate(holdfast.prior(CASE.model()), CASE.model(), estimate.fisher)
    assert posterior.num_data == 12


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_works_under_activation_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            inner = lambda hidden: torch.tanh(self.inner(hidden))  # noqa: E731
            return self.head(checkpoint(inner, torch.tanh(self.first(x)), use_reentrant=reentrant))

    torch.manual_seed(0)
    model = Checkpointed().double()
    data = batches(1, 6)
    found = holdfast.batch_sum_fisher(model, data, holdfast.categorical, targets="observed").fisher
    plain = nn.Sequential(model.first, nn.Tanh(), model.inner, nn.Tanh(), model.head)
    exact = holdfast.diagonal_fisher(plain, data, holdfast.categorical, targets="observed")
    torch.testing.assert_close(flat(found.entries), flat(exact.entries))


def test_the_model_is_left_as_found_and_bad_options_are_refused():
    model = CASE.model().train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    holdfast.batch_sum_fisher(model, batches(4, 2), CASE.likelihood)
    assert model.training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None
    for options in ({"targets": "expected"}, {"draws": 0}, {"draws": 1.5}):
        with pytest.raises(holdfast.ArgumentError):
            holdfast.batch_sum_fisher(model, batches(4, 2), CASE.likelihood, **options)
    bad = batches(4, 2)
    bad[1] = (bad[1][0] * torch.nan, bad[1][1])
    with pytest.raises(holdfast.DataError, match=r"batch 1.*not finite"):
        holdfast.batch_sum_fisher(model, bad, CASE.likelihood)
