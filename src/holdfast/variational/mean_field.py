"""A Gaussian over the weights with a deviation for each, found by gradient: Bayes by backprop, for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import Batch, read, run
from ..elsewhere import run_at
from ..errors import ArgumentError, DataError, InertError, MismatchError, require_number
from ..likelihood import Likelihood
from ..params import all_parameters, matched, shapes, some, trainable, unwrapped
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.gaussian import difference, kept
from .divergence import require_proper
from .local import LocalNoise, UsedOtherwise
from .noise import Noise
from .outcome import found_posterior

Forward = Callable[[nn.Module, Any], Any]


class MeanField(nn.Module):
    """q(θ) = N(μ, diag σ²): μ is the model's own parameters, and log σ are parameters beside them.

    Called with a batch, it gives the loss to train on, KL(q ‖ p(θ | data)) / N up to a constant:
    E_q[nll] per example (or token) + KL(q ‖ prior) / num_data.
    """

    def __init__(
        self,
        model: nn.Module,
        prior: Posterior,
        likelihood: Likelihood,
        num_data: float,
        *,
        samples: int,
        antithetic: bool,
        local: bool,
        deviation: float,
        tempering: float,
        seed: int,
        forward: Forward | None,
    ) -> None:
        super().__init__()
        self.model = model
        self._prior, self.likelihood, self.num_data = prior, likelihood, num_data
        self.samples, self.antithetic, self.tempering = samples, antithetic, tempering
        self._forward = forward
        self._names = list(prior.mean)
        wide = {name: each.rsqrt() for name, each in prior.precision.diagonal().items()}
        start = {name: each if prior.num_data else each.clamp(max=deviation) for name, each in wide.items()}
        params = self._params()
        self.log_deviations = nn.ParameterList(
            start[name].to(params[name].device, kept(params[name]).dtype).log().clone() for name in self._names
        )
        self._local = {name for name in self._names if local}
        self._generator: torch.Generator | None = None
        self._seed = seed
        self._seen: float | Tensor = 0.0

    def extra_repr(self) -> str:
        """What it is told apart by."""
        return (
            f"{sum(p.numel() for p in self.log_deviations):,} weights, num_data={self.num_data:g}, "
            f"{self.likelihood.name}, prior of {self._prior.num_data:g} {self._prior.unit or 'example'}s"
        )

    @property
    def deviations(self) -> dict[str, Tensor]:
        """σ of each weight."""
        return {name: each.exp() for name, each in zip(self._names, self.log_deviations, strict=True)}

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch, `(inputs, targets)` or a dict with labels, in nats per example (or token)."""
        return self.expected_nll(batch) + self.tempering * self.divergence() / self.num_data

    def divergence(self) -> Tensor:
        """KL(q ‖ prior) = Σ log(σp/σ) + (σ² + (μ − μp)²)/(2σp²) − ½ in nats; in general with the diagonal of Λp."""
        params, prior = self._params(), self._prior
        delta = {name: difference(p, prior.mean[name].to(p.device)) for name, p in params.items()}
        entries = prior.precision.diagonal()
        spread = sum(
            (0.5 * entries[name].to(each.device) * (2 * each).exp() - each).sum()
            for name, each in zip(self._names, self.log_deviations, strict=True)
        )
        constant = 0.5 * (prior.precision.logdet().to(spread.device) + sum(p.numel() for p in params.values()))
        found: Tensor = spread + 0.5 * prior.precision.quadratic(delta) - constant
        return found

    def expected_nll(self, batch: Any) -> Tensor:
        """E_q[nll] per example (or token) of a batch, by sampling."""
        (read_batch,) = read([batch], self.model)
        count = self.likelihood.count(read_batch.size, read_batch.target)
        self._seen = self._seen + count
        losses: list[Tensor] = []
        last: Noise | None = None
        for _ in range(self.samples):
            # Of an antithetic pair, the second draw is the first with its sign turned.
            last = Noise(self._drawer(read_batch)) if last is None else Noise(opposite=last)
            losses.append(self._nll(read_batch, last))
            last = last if self.antithetic and last.drawn else None
        return torch.stack(losses).mean() / count

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Weights drawn from q."""
        noise = Noise(generator)
        return {name: _moved(mean, self.deviations[name], noise) for name, mean in self._params().items()}

    @torch.no_grad()
    def posterior(self) -> Posterior:
        """What was found, as the Gaussian that everything else takes: to hold to, to keep, to be the next prior."""
        seen = float(self._seen)
        if seen == 0:
            raise InertError("no batch was seen: train on mean_field(...)(batch), then ask for the posterior.")
        if seen < self.num_data * (1 - 1e-6):
            raise DataError(
                f"only {seen:g} of num_data={self.num_data:g} {self.likelihood.unit}s were seen: the likelihood "
                "stands for more data than there was. Give num_data as it is, or train for an epoch at least."
            )
        entries = {name: deviation.square().reciprocal() for name, deviation in self.deviations.items()}
        how = "mean field" + (f", tempered {self.tempering:g}" if self.tempering != 1 else "")
        return found_posterior(self.model, self._params(), entries, self._prior, self.likelihood, self.num_data, how)

    def _params(self) -> dict[str, nn.Parameter]:
        return matched(self.model, shapes(self._prior.mean), ties=self._prior.ties)

    def _drawer(self, batch: Batch) -> torch.Generator:
        device = batch.tensors[0].device
        if self._generator is None or self._generator.device.type != device.type:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def _nll(self, batch: Batch, noise: Noise) -> Tensor:
        """The summed nll at one draw."""
        params = self._params()
        canonical = {id(parameter): name for name, parameter in all_parameters(self.model).items()}
        while True:
            before = len(noise.drawn)
            deviations = self.deviations
            values = {
                canonical[id(p)]: p.view_as(p) if name in self._local else _moved(p, deviations[name], noise)
                for name, p in params.items()
            }
            drawn_later = {name: values[canonical[id(params[name])]] for name in self._names if name in self._local}
            try:
                with LocalNoise(drawn_later, deviations.__getitem__, noise, batch.size):
                    output = run_at(self.model, values, lambda model: run(model, batch, self._forward))
                nll: Tensor = self.likelihood.nll(output, batch.target).sum()
                return nll
            except UsedOtherwise as found:
                self._local.discard(found.name)
                del noise.drawn[before:]


def mean_field(
    model: nn.Module,
    prior: Posterior | Memory,
    likelihood: Likelihood,
    *,
    num_data: float,
    samples: int = 1,
    antithetic: bool = True,
    local: bool = True,
    deviation: float = 0.02,
    tempering: float = 1.0,
    seed: int = 0,
    forward: Forward | None = None,
) -> MeanField:
    """A mean-field Gaussian over a model's weights, to be trained: KL(q ‖ p(θ | data)) = E_q[nll] + KL(q ‖ prior) + c.

        q = holdfast.mean_field(model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=len(data))
        optimizer = torch.optim.Adam(q.parameters())
        for batch in loader:
            optimizer.zero_grad()
            q(batch).backward()
            optimizer.step()
        posterior = q.posterior()

    The posterior is the next task's `prior` (variational continual learning: Nguyen et al. 2018). `num_data` is how
    many examples, or tokens, the likelihood stands for: a batch's mean counts that many times against the divergence.
    `samples` draws a step, in antithetic pairs; `local` draws a linear layer's outputs in place of its weights where
    every example uses them once. Deviations start at `deviation`, or at the prior's where it knows data. A `tempering`
    other than 1 multiplies the divergence, which makes the result no posterior; its source says so.
    """
    model = unwrapped(model)
    before = as_posterior(prior)
    if not isinstance(likelihood, Likelihood):
        raise ArgumentError(f"a likelihood is needed, such as holdfast.categorical, got {likelihood!r}.")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ArgumentError(f"samples is a whole number, 1 or more, got {samples!r}.")
    count = require_number(num_data, "num_data, the number of examples (or tokens),", positive=True)
    return MeanField(
        model, fitting(model, before, likelihood.unit), likelihood, count, samples=samples, antithetic=antithetic,
        local=local, deviation=require_number(deviation, "a deviation to start from", positive=True),
        tempering=require_number(tempering, "tempering", positive=True), seed=seed, forward=forward,
    )  # fmt: skip


def fitting(model: nn.Module, prior: Posterior, unit: str) -> Posterior:
    """The prior, checked: over all that trains, proper, counting in the same unit, on the model's devices."""
    params = matched(model, shapes(prior.mean), ties=prior.ties)
    inside = {id(parameter) for parameter in params.values()}
    outside = [name for name, parameter in trainable(model).items() if id(parameter) not in inside]
    if outside:
        raise MismatchError(
            f"{some(outside)} trains, and the prior does not have it. Freeze it, or make the prior of the model as it "
            "is now: holdfast.prior(model, precision=...)."
        )
    frozen = [name for name, parameter in params.items() if not parameter.requires_grad]
    if frozen:
        raise MismatchError(f"{some(frozen)} is in the prior, and frozen in the model. Let it train.")
    if prior.unit and prior.unit != unit:
        raise MismatchError(f"the prior counts {prior.unit}s, and the likelihood {unit}s: take one that fits.")
    require_proper(prior, "the prior")
    devices = {parameter.device for parameter in params.values()}
    return prior.to(devices.pop()) if len(devices) == 1 else prior


def _moved(mean: Tensor, deviation: Tensor, noise: Noise) -> Tensor:
    """μ + σε."""
    return mean + (deviation * noise.like(deviation)).to(mean.dtype)
