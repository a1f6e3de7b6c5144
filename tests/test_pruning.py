"""Pruning: scores by their formulas, and what is removed by hand."""

import math

import pytest
import torch
from torch import nn

import holdfast
from precisions import STRUCTURES, vector


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_scores_are_those_of_independent_normals(kind):
    """With the diagonal of Λ for σ⁻², whatever the structure."""
    precision, mean = STRUCTURES[kind](3), vector(1)
    posterior = holdfast.Posterior(mean, precision)
    ratio, worth = holdfast.signal_to_noise(posterior), holdfast.density_at_zero(posterior)
    assert set(ratio) == set(worth) == set(mean)
    for name, entries in precision.diagonal().items():
        normal = torch.distributions.Normal(mean[name], entries.rsqrt())
        torch.testing.assert_close(ratio[name], mean[name].abs() / normal.stddev)
        torch.testing.assert_close(worth[name], -normal.log_prob(torch.zeros_like(mean[name])))


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 3, (40,))
    fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
    return model, holdfast.consolidate(holdfast.prior(model, precision=0.1), model, fisher)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_lowest_go_first(fraction):
    model, posterior = network()
    scores = holdfast.signal_to_noise(posterior)
    masks = holdfast.pruned_(model, scores, fraction=fraction)
    kept = torch.cat([mask.flatten() for mask in masks.values()])
    flat = torch.cat([scores[name].flatten() for name in masks])
    assert int((~kept).sum()) == round(fraction * 57)
    if 0 < fraction < 1:
        assert float(flat[~kept].max()) < float(flat[kept].min())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), posterior.mean[name] * masks[name])


def test_by_signal_to_noise_the_penalty_of_what_is_gone_is_the_least():
    """½ (|μ|/σ)² is what zero costs under a diagonal posterior: ½ δᵀΛδ, which no other choice makes smaller."""
    model, posterior = network()
    ratio = holdfast.signal_to_noise(posterior)
    masks = holdfast.pruned_(model, ratio, fraction=0.6)
    least = holdfast.penalty(model, posterior).detach()
    gone = sum(0.5 * ratio[name][~mask].square().sum() for name, mask in masks.items())
    torch.testing.assert_close(least, gone)
    for scores in (holdfast.density_at_zero(posterior), {name: mean.abs() for name, mean in posterior.mean.items()}):
        holdfast.restore_(model, posterior)
        holdfast.pruned_(model, scores, fraction=0.6)
        assert float(holdfast.penalty(model, posterior).detach()) > float(least)


def test_with_one_deviation_for_all_the_orders_agree():
    model, _ = network()
    posterior = holdfast.prior(model, precision=7.0)
    found = []
    for scores in (
        holdfast.signal_to_noise(posterior),
        holdfast.density_at_zero(posterior),
        {name: mean.abs() for name, mean in posterior.mean.items()},
    ):
        holdfast.restore_(model, posterior)
        found.append(torch.cat([mask.flatten() for mask in holdfast.pruned_(model, scores, fraction=0.4).values()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_only_some_of_the_parameters_and_of_equal_scores_the_first():
    model, posterior = network()
    masks = holdfast.pruned_(model, holdfast.signal_to_noise(posterior), fraction=0.5, only="*.weight")
    assert list(masks) == ["0.weight", "2.weight"]
    assert sum(int((~mask).sum()) for mask in masks.values()) == 24
    torch.testing.assert_close(model[0].bias.detach(), posterior.mean["0.bias"])
    even = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    masks = holdfast.pruned_(model, even, fraction=0.5, only=["2.weight", "2.bias"])
    assert torch.cat([mask.flatten() for mask in masks.values()]).tolist() == [False] * 10 + [True] * 11


def test_what_is_refused():
    model, posterior = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scores = holdfast.signal_to_noise(posterior)
    for wrong in (-0.1, 1.5, math.nan, True, "half"):
        with pytest.raises(holdfast.ArgumentError, match="fraction of weights to remove"):
            holdfast.pruned_(model, scores, fraction=wrong)
    with pytest.raises(holdfast.ArgumentError, match=r"`2\.bias` are not all finite"):
        holdfast.pruned_(model, {**scores, "2.bias": torch.full((3,), math.nan)}, fraction=0.5)
    with pytest.raises(holdfast.MismatchError, match="the set of scores has `head`, and the model nothing"):
        holdfast.pruned_(model, {**scores, "head": torch.zeros(3)}, fraction=0.5)
    with pytest.raises(holdfast.MismatchError, match=r"`2\.bias` has shape \(4,\)"):
        holdfast.pruned_(model, {**scores, "2.bias": torch.zeros(4)}, fraction=0.5)
    with pytest.raises(holdfast.ArgumentError, match="fits none of the parameters that have scores"):
        holdfast.pruned_(model, scores, fraction=0.5, only="head.*")
    with pytest.raises(holdfast.ArgumentError, match=r"as holdfast\.signal_to_noise"):
        holdfast.pruned_(model, posterior, fraction=0.5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)


def test_where_nothing_is_known():
    """|μ|/σ is zero where Λ is, and there is no density."""
    free = holdfast.Diagonal({"w": torch.tensor([0.0, 4.0])})
    posterior = holdfast.Posterior({"w": torch.tensor([3.0, -1.0]), "b": torch.ones(1)}, free)
    torch.testing.assert_close(holdfast.signal_to_noise(posterior), {"w": torch.tensor([0.0, 2.0])})
    with pytest.raises(holdfast.SingularError, match=r"a density.*1 entry of `w`.*holdfast\.prior"):
        holdfast.density_at_zero(posterior)
    with pytest.raises(holdfast.SingularError, match=r"holdfast\.prior"):
        holdfast.signal_to_noise(holdfast.prior(nn.Linear(2, 1)))
