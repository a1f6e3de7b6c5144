"""The predictive distribution by sampling: the model run at weights drawn from what is known of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import Batch, Forward, read, run
from ..elsewhere import run_at
from ..errors import ArgumentError, DataError, MismatchError, SingularError, require_number
from ..identity import fingerprints, row_sums
from ..likelihood import Bernoulli, Categorical, Gaussian, Likelihood, Tokens
from ..params import all_parameters, buffers, matched, require_shapes, shapes, some, unwrapped
from ..posterior import Memory, Posterior, as_posterior
from ..precision import Sum
from ..untouched import untouched
from .distribution import Classes, Predictive, Regression, YesNo

# Numbers of all predictions together, a gigabyte in float32: of a large vocabulary, some thousand tokens.
_ENTRIES = 2**28


def predictive(
    model: nn.Module,
    memory: Posterior | Memory,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    samples: int = 16,
    temperature: float = 1.0,
    seed: int = 0,
    forward: Forward | None = None,
) -> Predictive:
    """p(y | x) = E_θ[p(y | x, θ)] with θ ~ N(μ, Λ⁻¹), by `samples` draws of θ.

    The model is run in evaluation mode at each draw, one draw in memory at a time, and left as it was: the data is read
    once for each draw, in the same order. What the posterior does not cover stays at its mean; a parameter that it does
    not have stays as it is in the model. Draws depend on `seed` alone, so that data may be given in parts.

    `temperature` T scales the covariance, N(μ, TΛ⁻¹); 1 is the posterior itself. Where Λ is a Fisher with a weak prior
    the directions that the data leaves free are very wide, and draws answer far worse than the mean does; a prior by
    holdfast.prior_precision narrows them, but seldom enough: choose T on held-out data (benchmarks/predictive.py).

        answer = holdfast.predictive(model, memory, loader, holdfast.categorical)
        answer.probabilities, answer.entropy(), answer.nll().mean()
    """
    posterior = as_posterior(memory)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ArgumentError(f"samples is how often weights are drawn, 1 or more, got {samples!r}.")
    temperature = require_number(temperature, "a temperature, by which the covariance is scaled,", positive=True)
    _require_known(likelihood)
    if isinstance(batches, Iterator):
        raise DataError("the data is read once for each draw, and an iterator gives it once. Give a list, or a loader.")
    model = unwrapped(model)
    params, kept = _parameters(model, posterior), _buffers(model, memory)
    generator = torch.Generator().manual_seed(seed)
    posterior = _ready(posterior)

    known: list[_Answer] = []
    with untouched(model), torch.no_grad():
        for _ in range(samples):
            weights = _drawn(posterior, params, temperature, generator)
            answers = _answers(model, weights, kept, batches, likelihood, forward)
            known = _mixed(known, answers) if known else answers
    parts = [answer.said for answer in known]
    return type(parts[0]).stacked(parts)


@dataclass(frozen=True)
class _Answer:
    """What was said of a batch, and a mark of each of its rows."""

    said: Predictive
    marks: Tensor


def _answers(
    model: nn.Module,
    weights: dict[str, Tensor],
    kept: dict[str, Tensor],
    batches: Iterable[Any],
    likelihood: Likelihood,
    forward: Forward | None,
) -> list[_Answer]:
    """What one draw says of each batch."""

    def output(batch: Batch) -> Any:
        return run_at(model, weights, lambda there: run(there, batch, forward), kept)

    found: list[_Answer] = []
    entries = 0
    for batch in read(batches, model):
        rows, target, single = likelihood.each(output(batch), batch.target)
        if not bool(rows.isfinite().all()):
            raise DataError(
                f"batch {batch.index}: the model's output is not finite at a draw. If it is at the mean, the posterior "
                "is too wide to draw from: start from a larger holdfast.prior(model, precision=...), or give a "
                "temperature below 1."
            )
        entries += rows.numel()
        if entries > _ENTRIES:
            raise ArgumentError(
                f"the predictions of {batch.index + 1} batches take {entries:,} numbers, and the limit is "
                f"{_ENTRIES:,}. Give fewer batches at a time: draws depend on the seed alone, so the parts belong "
                "together."
            )
        found.append(_Answer(_said(single, rows, target), row_sums(batch.tensors)))
    return found


def _mixed(known: list[_Answer], answers: list[_Answer]) -> list[_Answer]:
    """The draws of both; raises where they are not of the same data."""
    alike = [torch.equal(one.marks, other.marks) for one, other in zip(known, answers, strict=False)]
    if len(known) != len(answers) or not all(alike):
        raise DataError(
            "the data came differently at another reading, and draws would be averaged over different examples. Give a "
            "loader without shuffling and without random changes of the inputs, or a list of batches."
        )
    return [replace(one, said=one.said.mixed(other.said)) for one, other in zip(known, answers, strict=True)]


def _said(likelihood: Likelihood, rows: Tensor, target: Any) -> Predictive:
    labels = target if isinstance(target, Tensor) and target.shape[:1] == rows.shape[:1] else None
    if isinstance(likelihood, Gaussian):
        return Regression.of(rows, likelihood.scale, labels)
    return YesNo.of(rows, labels) if isinstance(likelihood, Bernoulli) else Classes.of(rows, labels)


def _require_known(likelihood: Likelihood) -> None:
    if not isinstance(likelihood, Likelihood):
        raise ArgumentError(f"a likelihood is needed, such as holdfast.categorical, got {type(likelihood).__name__}.")
    if not isinstance(likelihood, (Categorical, Bernoulli, Gaussian, Tokens)):
        raise ArgumentError(
            f"{likelihood.name} does not say what its outputs predict: nothing is known but its nll. Give categorical, "
            "bernoulli, gaussian or tokens."
        )
    if isinstance(likelihood, Categorical) and likelihood.temperature != 1:
        raise ArgumentError(
            f"{likelihood.name} is to take a Fisher with, and is no distribution of labels. Give holdfast.categorical."
        )


def _parameters(model: nn.Module, posterior: Posterior) -> dict[str, tuple[str, nn.Parameter]]:
    """For each name in the posterior the model's own, and the parameter."""
    if not posterior.precision.shapes:
        raise SingularError(
            "a sample needs a positive definite precision, but this posterior is flat: it covers no parameter. Start "
            "from a proper prior, holdfast.prior(model, precision=...) with a small positive number."
        )
    names = {id(parameter): name for name, parameter in all_parameters(model).items()}
    found = matched(model, shapes(posterior.mean), ties=posterior.ties)
    if any(type(parameter.data) is not Tensor for parameter in found.values()):
        raise ArgumentError("a sharded model is not run at other weights: gather it on one device first.")
    return {name: (names[id(parameter)], parameter) for name, parameter in found.items()}


def _buffers(model: nn.Module, memory: Posterior | Memory) -> dict[str, Tensor]:
    """The memory's buffers under the names that the model itself has for them; none of a posterior alone.

    Raises where what is outside the posterior has other values than when the memory was made.
    """
    if not isinstance(memory, Memory):
        return {}
    now = all_parameters(model)
    marks = fingerprints({name: now[name] for name in memory.frozen if name in now})
    other = [name for name, mark in marks.items() if memory.frozen[name] != mark]
    if other:
        raise MismatchError(
            f"{some(other)}, outside the posterior, has other values than when the memory was made, and would answer "
            "for it. Load the weights it was made with, or give memory.posterior to run it with these."
        )
    found = buffers(model)
    require_shapes(shapes(memory.buffers), shapes(found), what="the memory's buffers", than="the model")
    then = {id(buffer): memory.buffers[name] for name, buffer in found.items() if name in memory.buffers}
    return {
        name: then[id(buffer)].to(buffer, copy=True) for name, buffer in model.named_buffers() if id(buffer) in then
    }


def _ready(posterior: Posterior) -> Posterior:
    """A sum in the blocks that it is drawn from: their eigenvectors are found once, and not for each draw."""
    if not isinstance(posterior.precision, Sum):
        return posterior
    return replace(posterior, precision=Sum(posterior.precision.blocks(), posterior.precision.sources))


def _drawn(
    posterior: Posterior, params: dict[str, tuple[str, nn.Parameter]], temperature: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """μ + √T (θ − μ) with θ from the posterior, under the model's names and in its dtypes."""
    noise = posterior.precision.sample(generator)
    found = {}
    for name, mean in posterior.mean.items():
        own, parameter = params[name]
        value = mean + math.sqrt(temperature) * noise[name] if name in noise else mean.clone()
        found[own] = value.to(parameter.device, parameter.dtype)
    return found
