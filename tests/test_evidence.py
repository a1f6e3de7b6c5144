"""The Laplace evidence: exact for a linear model with Gaussian noise; the prior precision that has the most of it."""

import math

import pytest
import torch
from torch import nn

import holdfast


def regression(rows=40, entries=5, noise=0.5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, entries, generator=generator, dtype=torch.float64)
    weights = 0.7 * torch.randn(entries, generator=generator, dtype=torch.float64)
    y = (x @ weights).unsqueeze(-1) + noise * torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return x, y


def at_the_optimum(x, y, alpha, noise=0.5):
    """The maximum of the posterior."""
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    matrix = x.T @ x / noise**2 + alpha * torch.eye(x.shape[1], dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(matrix, x.T @ y / noise**2).T)
    return model


def exact(x, y, alpha, noise=0.5):
    """log N(y; 0, σ²I + XXᵀ/α)."""
    covariance = noise**2 * torch.eye(len(x), dtype=torch.float64) + x @ x.T / alpha
    mean = torch.zeros(len(x), dtype=torch.float64)
    return float(torch.distributions.MultivariateNormal(mean, covariance).log_prob(y.squeeze(-1)))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 30.0])
def test_it_is_exact_for_a_linear_model(alpha):
    x, y = regression()
    model, likelihood = at_the_optimum(x, y, alpha), holdfast.gaussian(0.5)
    before = holdfast.prior(model, precision=alpha, mean=0.0)
    fisher = holdfast.dense_fisher(model, [(x, y)], likelihood)
    nll = float(likelihood.nll(model(x), y).sum().detach())
    found = holdfast.evidence(holdfast.consolidate(before, model, fisher), before, nll)
    assert found == pytest.approx(exact(x, y, alpha), rel=1e-9)


def test_the_data_came_in_two_parts_and_the_evidence_adds_up():
    """T2: log p(D) = log p(D₁) + log p(D₂ | D₁), each taken at its own optimum."""
    x, y = regression()
    likelihood, alpha = holdfast.gaussian(0.5), 2.0
    first = at_the_optimum(x[:15], y[:15], alpha)
    before = holdfast.prior(first, precision=alpha, mean=0.0)
    between = holdfast.consolidate(before, first, holdfast.dense_fisher(first, [(x[:15], y[:15])], likelihood))
    one = holdfast.evidence(between, before, float(likelihood.nll(first(x[:15]), y[:15]).sum().detach()))
    last = at_the_optimum(x, y, alpha)
    after = holdfast.consolidate(between, last, holdfast.dense_fisher(last, [(x[15:], y[15:])], likelihood))
    two = holdfast.evidence(after, between, float(likelihood.nll(last(x[15:]), y[15:]).sum().detach()))
    assert one + two == pytest.approx(exact(x, y, alpha), rel=1e-9)


@pytest.mark.parametrize("fisher", [holdfast.diagonal_fisher, holdfast.kronecker_fisher, holdfast.dense_fisher])
def test_the_prior_precision_has_the_most_evidence(fisher):
    x, y = regression()
    model, likelihood = at_the_optimum(x, y, 1.0), holdfast.gaussian(0.5)
    curvature = fisher(model, [(x, y)], likelihood)
    nll = float(likelihood.nll(model(x), y).sum().detach())
    best = holdfast.prior_precision(model, curvature, nll)

    def at(alpha):
        before = holdfast.prior(model, precision=alpha, mean=0.0)
        return holdfast.evidence(holdfast.consolidate(before, model, curvature), before, nll)

    assert at(best) >= max(at(best * 1.05), at(best / 1.05))
    assert 0.1 < best < 100


def test_what_has_no_evidence():
    x, y = regression()
    model = at_the_optimum(x, y, 1.0)
    fisher = holdfast.dense_fisher(model, [(x, y)], holdfast.gaussian(0.5))
    flat = holdfast.prior(model)
    with pytest.raises(holdfast.ArgumentError, match="ℓ₂ = 0"):
        holdfast.evidence(holdfast.consolidate(flat, model, fisher), flat, 1.0)
    before = holdfast.prior(model, precision=1.0)
    for nll in (math.nan, "3", True):
        with pytest.raises(holdfast.ArgumentError, match="nll"):
            holdfast.evidence(holdfast.consolidate(before, model, fisher), before, nll)
    with pytest.raises(holdfast.ArgumentError, match="not made from this prior"):
        holdfast.evidence(holdfast.consolidate(before, model, fisher), holdfast.prior(model, precision=2.0), 1.0)


def test_a_softened_fisher_gives_no_evidence():
    model = nn.Linear(4, 3)
    before = holdfast.prior(model, precision=1.0, mean=0.0)
    batches = [(torch.randn(20, 4), torch.arange(20) % 3)]
    after = holdfast.consolidate(before, model, holdfast.dense_fisher(model, batches, holdfast.softened()))
    with pytest.raises(holdfast.ArgumentError, match=r"categorical\(temperature=4.0\), expected"):
        holdfast.evidence(after, before, 10.0)


def test_a_prior_that_was_decayed_since_gives_no_evidence():
    x, y = regression()
    model = at_the_optimum(x, y, 1.0)
    before = holdfast.prior(model, precision=1.0, mean=0.0)
    fisher = holdfast.dense_fisher(model, [(x, y)], holdfast.gaussian(0.5))
    for decay in (0.5, 0.0):
        after = holdfast.consolidate(before, model, fisher, decay=decay)
        with pytest.raises(holdfast.ArgumentError, match=rf"counts 1 times in it and {decay:g} times in the"):
            holdfast.evidence(after, before, 1.0)
