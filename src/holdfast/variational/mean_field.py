"""A Gaussian over the weights with a deviation for each, found by gradient: Bayes by backprop, for any model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..curvature.batches import Batch, read
from ..errors import ArgumentError, DataError, InertError, require_number
from ..likelihood import Likelihood
from ..params import matched, shapes, unwrapped
from ..pieces import in_pieces
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.gaussian import difference, kept
from .began import Began
from .draws import Draws, Forward, moved
from .given import fitting, require_distribution, require_same
from .noise import Noise
from .outcome import found_posterior


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
        if any(map(in_pieces, model.parameters())):
            raise ArgumentError("mean_field draws whole weights, and this model is in pieces: train it by IVON.")
        self.model = model
        self._prior, self.likelihood, self.num_data = prior, likelihood, num_data
        self.samples, self.antithetic, self.tempering = samples, antithetic, tempering
        self._names = list(prior.mean)
        self._read_prior()
        params = self._params()
        start = {name: each.rsqrt() for name, each in self._entries.items()}
        start = start if prior.num_data else {name: each.clamp(max=deviation) for name, each in start.items()}
        self.log_deviations = nn.ParameterList(
            start[name].to(params[name].device, kept(params[name]).dtype).log().clone() for name in self._names
        )
        self._draws = Draws(model, likelihood, forward, local)
        self._generator: torch.Generator | None = None
        self._seed = seed
        self._seen: float | Tensor = 0.0
        self._began: Began | None = None

    def extra_repr(self) -> str:
        """What it is told apart by."""
        return (
            f"{sum(p.numel() for p in self.log_deviations):,} weights, num_data={self.num_data:g}, "
            f"{self.likelihood.name}, prior of {self._prior.num_data:g} {self._prior.unit or 'example'}s"
        )

    @property
    def deviations(self) -> dict[str, Tensor]:
        """σ of each weight."""
        return {name: each.exp() for name, each in self._logs.items()}

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch, `(inputs, targets)` or a dict with labels, in nats per example (or token)."""
        return self.expected_nll(batch) + self.tempering * self.divergence() / self.num_data

    def divergence(self) -> Tensor:
        """KL(q ‖ prior) = Σ log(σp/σ) + (σ² + (μ − μp)²)/(2σp²) − ½ in nats; in general with the diagonal of Λp."""
        params = self._params()
        delta = {name: difference(p, self._prior.mean[name].to(p.device)) for name, p in params.items()}
        home = params[self._names[0]].device
        terms = [
            (0.5 * self._entries[name].to(each.device) * (2 * each).exp() - each).sum().to(home)
            for name, each in self._logs.items()
        ]
        spread = torch.stack(terms).sum()
        return spread + 0.5 * self._prior.precision.quadratic(delta) - self._constant

    def expected_nll(self, batch: Any) -> Tensor:
        """E_q[nll] per example (or token) of a batch, by sampling."""
        (given,) = read([batch], self.model)
        count = self.likelihood.count(given.size, given.target)
        params = self._params()
        losses: list[Tensor] = []
        last: Noise | None = None
        for _ in range(self.samples):
            # Of an antithetic pair, the second draw is the first with its sign turned.
            first = last is None
            last = Noise(self._drawer(given), opposite=last)
            losses.append(self._draws.nll(given, params, self._logs, last))
            last = last if self.antithetic and first else None
        if torch.is_grad_enabled():
            self._seen = self._seen + count
            self._began = self._began or Began.at(params, self._logs)
        # A batch in which every label is ignored says nothing.
        return torch.stack(losses).mean() / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Weights drawn from q."""
        noise, deviations = Noise(generator), self.deviations
        return {name: moved(name, mean, deviations[name], noise) for name, mean in self._params().items()}

    @torch.no_grad()
    def posterior(self) -> Posterior:
        """What was found, as the Gaussian that everything else takes: to hold to, to keep, to be the next prior."""
        # Of several processes each sees its share.
        seen = float(self._seen) * (distributed.get_world_size() if distributed.is_initialized() else 1)
        if seen == 0:
            raise InertError("no batch was seen: train on mean_field(...)(batch), then ask for the posterior.")
        if seen < self.num_data * (1 - 1e-6):
            raise DataError(
                f"only {seen:g} of num_data={self.num_data:g} {self.likelihood.unit}s were seen: the likelihood "
                "stands for more data than there was. Give num_data as it is, or train for an epoch at least."
            )
        params = self._params()
        if self._began is not None:
            self._began.require_trained(params, self._logs)
        entries = {name: deviation.square().reciprocal() for name, deviation in self.deviations.items()}
        how = "mean field" + (f", tempered {self.tempering:g}" if self.tempering != 1 else "")
        return found_posterior(self.model, params, entries, self._prior, self.likelihood, self.num_data, how)

    def get_extra_state(self) -> dict[str, Any]:
        """What resuming needs besides weights and deviations."""
        drawer = None if self._generator is None else self._generator.get_state()
        began = {} if self._began is None else {"means": self._began.means, "logs": self._began.logs}
        seen = float(self._seen)
        return {"prior": self._prior_id, "num_data": self.num_data, "seen": seen, "noise": drawer, "began": began}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, under the same prior and the same `num_data`."""
        require_same(state, prior=self._prior_id, num_data=self.num_data)
        self._seen = state["seen"]
        self._began = Began(**state["began"]) if state.get("began") else None
        if state["noise"] is not None:
            device = next(iter(self._params().values())).device
            self._generator = torch.Generator(device)
            self._generator.set_state(state["noise"].cpu())

    @property
    def _logs(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self.log_deviations, strict=True))

    def _read_prior(self) -> None:
        """What every step needs of the prior, computed once."""
        self._entries = self._prior.precision.diagonal()
        size = sum(mean.numel() for mean in self._prior.mean.values())
        self._constant = 0.5 * (self._prior.precision.logdet().detach() + size)
        self._prior_id = self._prior.id

    def _params(self) -> dict[str, nn.Parameter]:
        params = matched(self.model, shapes(self._prior.mean), ties=self._prior.ties)
        inside = {id(parameter) for parameter in params.values()}
        if any(parameter.requires_grad and id(parameter) not in inside for parameter in self.model.parameters()):
            fitting(self.model, self._prior, self.likelihood.unit)  # which says what trains without a prior
        devices = {parameter.device for parameter in params.values()}
        if len(devices) == 1 and next(iter(self._prior.mean.values())).device not in devices:
            self._prior = self._prior.to(devices.pop())  # the model has been moved since
            self._read_prior()
        return params

    def _drawer(self, batch: Batch) -> torch.Generator:
        device = batch.tensors[0].device
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator


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
    every example uses them once. Give the optimizer no weight decay, which the prior is. Deviations start at
    `deviation`, or at the prior's own if it knows data. A `tempering` other than 1 multiplies the divergence, which
    makes the result no posterior; its source says so.
    """
    model = unwrapped(model)
    before = as_posterior(prior)
    require_distribution(likelihood)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ArgumentError(f"samples is a whole number, 1 or more, got {samples!r}.")
    count = require_number(num_data, "num_data, the number of examples (or tokens),", positive=True)
    return MeanField(
        model, fitting(model, before, likelihood.unit), likelihood, count, samples=samples, antithetic=antithetic,
        local=local, deviation=require_number(deviation, "a deviation to start from", positive=True),
        tempering=require_number(tempering, "tempering", positive=True), seed=seed, forward=forward,
    )  # fmt: skip
