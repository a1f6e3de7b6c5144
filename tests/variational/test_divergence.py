"""The divergence between Gaussians: term by term, against torch's own, and where it is infinite."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import holdfast
from holdfast import Dense, Diagonal, Kronecker, Posterior


def gaussian(seed: int, scale: float = 1.0) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (2, 3), "b": (2,)}
    mean = {n: torch.randn(s, generator=generator, dtype=torch.double) for n, s in shapes.items()}
    entries = {n: scale * (0.1 + torch.rand(s, generator=generator, dtype=torch.double)) for n, s in shapes.items()}
    return Posterior(mean, Diagonal(entries))


def flat(tensors) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors.values()])


def test_between_diagonals_it_is_torchs_own():
    q, p = gaussian(0, 5.0), gaussian(1)

    def normal(each: Posterior) -> Independent:
        return Independent(Normal(flat(each.mean), flat(each.precision.entries).rsqrt()), 1)

    torch.testing.assert_close(holdfast.divergence(q, p), kl_divergence(normal(q), normal(p)))
    assert holdfast.divergence(q, q).abs() < 1e-12


def test_against_a_zero_mean_prior_it_is_the_derivations_sum_term_by_term():
    """KL = Σ −log σ + ½λσ² + ½λμ² + const, the constant −½ (1 + log λ) for each weight."""
    q, lam = gaussian(0, 5.0), 0.7
    mean, deviation = flat(q.mean), flat(q.precision.entries).rsqrt()
    zero = Posterior(
        {n: torch.zeros_like(m) for n, m in q.mean.items()},
        Diagonal({n: torch.full_like(m, lam) for n, m in q.mean.items()}),
    )
    terms = (-deviation.log()).sum() + (0.5 * lam * deviation**2).sum() + (0.5 * lam * mean**2).sum()
    constant = -0.5 * len(mean) * (1 + math.log(lam))
    torch.testing.assert_close(holdfast.divergence(q, zero), terms + constant)


@pytest.mark.parametrize("lam", [0.25, 1.0, 4.0])
def test_the_term_in_sigma_pulls_it_to_the_priors(lam):
    """½λσ² − log σ falls up to σ = 1/√λ, where it is ½ + ½ log λ, and rises after it."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    before = holdfast.prior(model, lam, mean=0.0)
    q = holdfast.mean_field(model, before, holdfast.gaussian(1.0), num_data=1)

    def term(sigma: float) -> float:
        with torch.no_grad():
            q.log_deviations[0].fill_(math.log(sigma))
            return float(q.divergence()) + 0.5 * (1 + math.log(lam))

    sigmas = [0.1 * k for k in range(1, 41)]
    values = [term(sigma) for sigma in sigmas]
    assert values == pytest.approx([0.5 * lam * s**2 - math.log(s) for s in sigmas])
    best = 1 / math.sqrt(lam)
    assert term(best) == pytest.approx(0.5 + 0.5 * math.log(lam))
    falling = [v for s, v in zip(sigmas, values, strict=True) if s <= best + 1e-9]
    rising = [v for s, v in zip(sigmas, values, strict=True) if s >= best - 1e-9]
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)


def structured(seed: int) -> Posterior:
    """A mean, and a Kronecker precision over a weight with its bias."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).double()
    data = [(torch.randn(20, 3, dtype=torch.double), torch.randint(0, 2, (20,)))]
    fisher = holdfast.kronecker_fisher(model, data, holdfast.categorical)
    assert isinstance(fisher, Kronecker)
    return holdfast.consolidate(holdfast.prior(model, 0.5), model, fisher)


def test_a_diagonal_has_a_closed_form_against_every_structure():
    p = structured(0)
    q = Posterior(
        {n: m + 0.1 for n, m in p.mean.items()}, Diagonal({n: torch.full_like(m, 3.0) for n, m in p.mean.items()})
    )
    order = list(p.precision.shapes)
    ours = MultivariateNormal(
        torch.cat([q.mean[n].flatten() for n in order]),
        precision_matrix=torch.diag(torch.cat([q.precision.entries[n].flatten() for n in order])),
    )
    theirs = MultivariateNormal(torch.cat([p.mean[n].flatten() for n in order]), precision_matrix=p.precision.dense())
    torch.testing.assert_close(holdfast.divergence(q, p), kl_divergence(ours, theirs))


def test_dense_ones_are_inverted():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(4, 4, generator=generator, dtype=torch.double) for _ in range(2))
    q, p = (
        Posterior({"w": mean}, Dense({"w": torch.Size([4])}, m @ m.T + torch.eye(4, dtype=torch.double)))
        for mean, m in ((torch.zeros(4, dtype=torch.double), a), (torch.ones(4, dtype=torch.double), b))
    )
    expected = kl_divergence(
        MultivariateNormal(q.mean["w"], precision_matrix=q.precision.dense()),
        MultivariateNormal(p.mean["w"], precision_matrix=p.precision.dense()),
    )
    torch.testing.assert_close(holdfast.divergence(q, p), expected)


def test_a_prior_without_precision_is_refused_by_name():
    model = nn.Linear(2, 1)
    flat_prior = holdfast.prior(model)
    with pytest.raises(holdfast.SingularError, match=r"all of `weight`.*infinite.*precision="):
        holdfast.divergence(holdfast.prior(model, 1.0), flat_prior)
    partial = Posterior(
        {n: p.detach() for n, p in model.named_parameters()},
        Diagonal({"weight": torch.tensor([[1.0, 0.0]]), "bias": torch.ones(1)}),
    )
    with pytest.raises(holdfast.SingularError, match="1 entry of `weight`"):
        holdfast.mean_field(model, partial, holdfast.categorical, num_data=10)
    with pytest.raises(holdfast.SingularError, match="all of `weight`"):
        holdfast.IVON(model, flat_prior, holdfast.categorical, num_data=10)
