"""What a model at its present weights will have lost of what a memory knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import require_not_adapted
from ..devices import full
from ..errors import ArgumentError, MismatchError
from ..params import all_parameters, buffers, matched, require_values, shapes, some, unwrapped
from ..pieces import number, resharded
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.placed import placed
from ..posterior.recalled import unkept
from ..precision.applied import applied
from ..probes import Answers
from ..rise import ByProbes, asked, missing
from .checkpoint import in_checkpoint

_DRAWS = 2000
# Where the outputs to probes moved by more than this much of their own spread, a forecast was not checked.
FAR = 6.0
# Fewer answers are no sample.
_FEW = 100


@dataclass(frozen=True)
class Forecast:
    """The predicted rise of the old loss, in nats per old example (or token).

    `quadratic` is ½ δᵀΛδ / N, a local estimate: it ranks weights and checkpoints, and is often far too small. `doubts`
    says in words why not to trust this one.
    """

    quadratic: float
    by_parameter: dict[str, float]  # its parts, which add up to it
    probes: ByProbes | None
    doubts: tuple[str, ...]
    unit: str = "example"
    missing: str = ""  # why there is no estimate by probes

    @property
    def rise(self) -> float:
        """The best estimate there is: by probes if the memory has them, else the quadratic."""
        return self.quadratic if self.probes is None else self.probes.rise

    @property
    def safe(self) -> float:
        """A bound that the rise will hardly be above. The quadratic has none."""
        return self.by_probes.safe

    @property
    def by_probes(self) -> ByProbes:
        """The estimate by probes; raises where the memory had none."""
        if self.probes is None:
            raise ArgumentError(
                f"there is no forecast by probes: {self.missing}. Keep them while the data is there: "
                "Memory.of(posterior, model, gaussian_probes(loader), kept_answers(model, loader, likelihood))."
            )
        return self.probes

    @property
    def by_layer(self) -> dict[str, float]:
        """The quadratic's parts by the module that has the parameters."""
        found: dict[str, float] = {}
        for name, value in self.by_parameter.items():
            layer = name.rpartition(".")[0] or name
            found[layer] = found.get(layer, 0.0) + value
        return found

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.doubts

    def __str__(self) -> str:
        lines = [f"{self.rise:.4f} nats per old {self.unit}"]
        if self.probes is not None:
            lines[0] += f", hardly above {self.safe:.4f}"
        lines.append(f"  the quadratic, a local estimate that ranks: {self.quadratic:.4f}")
        longest = sorted(self.by_layer.items(), key=lambda each: -each[1])[:5]
        lines += [f"    {layer}: {value:.4f}" for layer, value in longest]
        return "\n".join([*lines, *(f"  {doubt}" for doubt in self.doubts)])


def forecast(
    model: nn.Module | Mapping[str, Any],
    posterior: Posterior | Memory,
    *,
    draws: int = _DRAWS,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Forecast:
    """How much the old loss has risen at the model's present weights, without any old data.

    With a memory that has probes of inputs and kept answers, the model and the old one (itself at the mean) are asked
    about `draws` probes, and the kept answers are moved as these were. Any checkpoint of the same model will do; of
    named weights without their model, such as torch.load gives, the quadratic alone is known. `forward(model, inputs)`
    is for models that are called in another way.

        print(holdfast.forecast(model, holdfast.load("memory.safetensors")))
    """
    known = as_posterior(posterior)
    if not known.num_data:
        raise ArgumentError("a prior stands for no data: there is nothing of which a rise could be foretold.")
    if not isinstance(model, nn.Module):
        weights = in_checkpoint(model, known)
        parts = _parts(known, known.delta(weights))
        lacks = "weights alone answer nothing: give the model"
        doubts = (*_doubts(known, [], None), *_of_statistics(posterior, weights, seen=False))
        return Forecast(sum(parts.values()), parts, None, doubts, known.unit, lacks)
    inner = unwrapped(model)
    resharded(inner)
    params = matched(inner, shapes(known.mean), ties=known.ties)
    cure = "Merge it for the forecast, model.merge_adapter(), and take it out again after it."
    require_not_adapted(inner, known.mean, cure)
    require_values(params)
    known = placed(known, inner)
    parts = _parts(known, known.delta({name: p.detach().to(known.mean[name].device) for name, p in params.items()}))
    found, lacks, against = None, missing(posterior), []
    if isinstance(posterior, Memory) and posterior.answers is not None and not lacks:
        try:
            estimate, now = asked(inner, posterior, draws, seed, forward)
            found, against = estimate.rise(now()), _of_sample(posterior.answers, known)
        except MismatchError as error:
            lacks = str(error).rstrip(".")
            against = [f"Its probes could not be asked: {lacks}."]
    if found is not None and not math.isfinite(found.rise):
        raise MismatchError("the model's answers to probes are not finite: there is nothing to forecast.")
    inside = {id(parameter) for parameter in params.values()}
    new = [name for name, p in all_parameters(inner).items() if id(p) not in inside and p.requires_grad]
    moved = _of_statistics(posterior, buffers(inner), seen=found is not None)
    doubts = (*_doubts(known, new, found), *against, *moved)
    return Forecast(sum(parts.values()), parts, found, doubts, known.unit, lacks)


@torch.no_grad()
def _parts(known: Posterior, delta: dict[str, Tensor]) -> dict[str, float]:
    """½ δᵀΛδ / N, parameter by parameter."""
    broken = [name for name, value in delta.items() if not bool(full(value.isfinite().all()))]
    if broken:
        raise MismatchError(f"{some(broken)} of the model is not finite: there is nothing to forecast.")
    pull = applied(known.precision, {name: delta[name] for name in known.precision.shapes})
    return {
        name: 0.5 * number((delta[name].double() * value.double()).sum()) / known.num_data
        for name, value in pull.items()
    }


def _of_sample(answers: Answers, known: Posterior) -> list[str]:
    """What speaks against the kept answers."""
    said = []
    if len(answers.outputs) < _FEW:
        said.append(f"Only {len(answers.outputs)} answers were kept: another sample would have said something else.")
    if not 0.9 <= answers.num_data / known.num_data <= 1.1:
        said.append(
            f"The answers stand for {answers.num_data:g} {answers.unit}s, the memory for {known.num_data:g}: what was "
            "learned without keeping answers of it (memory.with_answers) is not in this."
        )
    return said


def _of_statistics(memory: Posterior | Memory, now: Mapping[str, Tensor], *, seen: bool) -> list[str]:
    """What speaks against a forecast where a model's statistics, such as BatchNorm's, are not what they were.

    Answers to probes have `seen` what became of those that were kept.
    """
    kept = memory.buffers if isinstance(memory, Memory) else {}
    floating = {name: value for name, value in kept.items() if name in now and value.is_floating_point()}
    moved = [name for name, value in floating.items() if not _equal(value, now[name])]
    unknown, said = unkept(memory, now), []
    if moved and not seen:
        said.append(f"{some(moved)} changed since, which the quadratic does not see.")
    if unknown:
        said.append(
            f"No {some(unknown)} was kept, as Memory.of(posterior, model) does: if it changed since, what that does is "
            "not in this."
        )
    return said


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = full(one.detach()), full(other.detach())
    return one.shape == other.shape and torch.equal(one.cpu().to(other.dtype), other.cpu())


def _doubts(known: Posterior, new: list[str], found: ByProbes | None) -> tuple[str, ...]:
    said = []
    free = [name for name in known.mean if name not in known.precision.shapes]
    if new:
        said.append(
            f"The memory knows nothing of {some(new)}, which trains: a new head? What it answers is not in this."
        )
    if free:
        said.append(f"The memory says nothing about {some(free)}: the quadratic does not see them move.")
    said += dict.fromkeys(source.doubt for source in known.precision.sources if source.doubt)
    if found is None:
        said.append("The quadratic alone ranks checkpoints; how much is lost may be many times what it says.")
    elif found.moved > FAR:
        said.append(
            f"The answers to probes moved {found.moved:.1f} times as far as they lie apart, farther than forecasts "
            "were checked: train anew on all of the data, if it can be had."
        )
    return tuple(said)
