"""The evidence of data under a prior, by Laplace, and the prior precision that has the most of it."""

from __future__ import annotations

import math

from torch import nn

from ..errors import ArgumentError
from ..precision import Precision
from .gaussian import Posterior, prior
from .memory import Memory, as_posterior
from .recursion import consolidate

_RANGE = (1e-6, 1e8)
_STEPS = 48
_GOLDEN = (math.sqrt(5) - 1) / 2


def evidence(posterior: Posterior | Memory, before: Posterior | Memory, nll: float) -> float:
    """log p(D) ≈ −NLL(μ) + log p(μ) + ½ log((2π)ᴹ / |Λ|) in nats, exact where the posterior is Gaussian.

    `posterior` is what `before` became by the data, and `nll` the loss at its mean, summed over the data in nats. Both
    need a density: a flat prior has none, and gives no evidence.
    """
    after, known = as_posterior(posterior), as_posterior(before)
    if isinstance(nll, bool) or not isinstance(nll, (int, float)) or not math.isfinite(nll):
        raise ArgumentError(f"nll is the loss at the mean, summed over the data in nats, got {nll!r}.")
    if after.parents and known.id not in after.parents:
        raise ArgumentError("the posterior was not made from this prior: give what consolidate started from.")
    if known.precision.is_zero():
        raise ArgumentError(
            "a flat prior has no density, and no evidence: ℓ₂ = 0. Start from holdfast.prior(model, precision=...), "
            "a positive number of it."
        )
    counted = {source.id: source.factor for source in after.sources}
    for source in known.sources:
        now = counted.get(source.id, 0.0)
        if not math.isclose(now, source.factor, rel_tol=1e-9):
            raise ArgumentError(
                f"what was known before ({source}) counts {source.factor:g} times in it and {now:g} times in the "
                "posterior (decay): they differ by more than the data. Consolidate with decay=1 for an evidence."
            )
    earlier = {source.id for source in known.precision.sources}
    for source in (each for each in after.precision.sources if each.id not in earlier):
        if source.doubt or source.targets.startswith("variational"):
            raise ArgumentError(
                "evidence needs the curvature of the data's own loss at the mean, and this posterior is of "
                f"{source.likelihood}, {source.targets}. Take a Fisher at these weights, of the data's likelihood."
            )
    # log p(D) = log p(D|θ) + log p(θ) − log p(θ|D), at θ = μ
    return -float(nll) + float(known.log_prob(after.mean)) - float(after.log_prob(after.mean))


def prior_precision(model: nn.Module, fisher: Precision, nll: float, *, mean: float = 0.0) -> float:
    """The precision of a prior around `mean` under which the data has the most evidence, the weights as they are.

    Over ten orders of magnitude and more, by golden section in its logarithm (MacKay 1992). `fisher` and `nll` are of
    the model's data at its present weights. An end of the range means that the data does not say.
    """

    def found(log: float) -> float:
        start = prior(model, precision=math.exp(log), mean=mean)
        return evidence(consolidate(start, model, fisher, exact=True), start, nll)

    low, high = (math.log(end) for end in _RANGE)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = found(left), found(right)
    for _ in range(_STEPS):
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = found(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = found(right)
    return math.exp((low + high) / 2)
