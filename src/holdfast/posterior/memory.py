"""What is kept of a model and its data: the posterior, and what else there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..adapters import require_not_adapted
from ..devices import part
from ..errors import ArgumentError, MismatchError
from ..identity import fingerprints
from ..params import all_parameters, buffers, matched, require_shapes, shapes, some
from ..pieces import cut, resharded
from ..precision import Precision
from ..precision.base import require_finite
from ..probes import Answers, Probes
from ..ranks import require_one
from .covered import Covered
from .gaussian import Posterior
from .growth import grown_buffers
from .moved import moved

# What torch's layers call the statistics that they count as they train.
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """What is kept of a model and its data: the posterior, the buffers (BatchNorm statistics) it ran with; and, if
    there are any, probes that stand for its inputs and a few of its answers, which a forecast is made from."""

    posterior: Posterior
    buffers: dict[str, Tensor] = field(default_factory=dict)
    probes: Probes | None = None
    answers: Answers | None = None
    frozen: dict[str, str] = field(default_factory=dict)  # marks of the parameters outside the posterior

    def __post_init__(self) -> None:
        if self.answers is not None and not isinstance(self.answers, Answers):
            raise ArgumentError(f"a memory's answers are kept_answers(...), got {type(self.answers).__name__}.")
        if self.probes is not None and not isinstance(self.probes, Probes):
            raise ArgumentError(
                f"a memory's probes are gaussian_probes(...) or kept_inputs(...), got {type(self.probes).__name__}."
            )
        for name, value in self.buffers.items():
            if value.is_floating_point():
                require_finite(f"buffer {name}", value)

    def __repr__(self) -> str:
        more = "".join(f", {each!r}" for each in (self.probes, self.answers) if each is not None)
        return f"Memory({self.posterior!r}, {len(self.buffers)} buffers{more})"

    @property
    def mean(self) -> dict[str, Tensor]:
        """The posterior's."""
        return self.posterior.mean

    @property
    def precision(self) -> Precision:
        """The posterior's."""
        return self.posterior.precision

    @property
    def num_data(self) -> float:
        """The posterior's."""
        return self.posterior.num_data

    @property
    def unit(self) -> str:
        """The posterior's."""
        return self.posterior.unit

    def expanded(self, model: nn.Module, precision: float = 0.0) -> Memory:
        """The memory for a model that grew, see `Posterior.expanded`; its buffers grow alike."""
        now = fingerprints({name: p for name, p in all_parameters(model).items() if name in self.frozen})
        # What was frozen then and has changed since is not as the old model had it, and stays outside.
        changed = [name for name, mark in now.items() if mark != self.frozen[name]]
        posterior = self.posterior.expanded(model, precision, leave=changed)
        added = [name for name in posterior.mean if name not in self.posterior.mean]
        return replace(self, posterior=posterior, buffers=grown_buffers(self.buffers, buffers(model), added))

    def coverage(self, model: nn.Module) -> Covered:
        """Which parameters of a model it holds: `Posterior.coverage`."""
        return self.posterior.coverage(model)

    def renamed(self, names: Mapping[str, str]) -> Memory:
        """The memory for a model whose parameters (and buffers) have new names; see `Posterior.renamed`."""
        ours = {name: new for name, new in names.items() if name not in self.buffers and name not in self.frozen}
        return replace(
            self,
            posterior=self.posterior.renamed(ours),
            buffers={names.get(name, name): value for name, value in self.buffers.items()},
            frozen={names.get(name, name): mark for name, mark in self.frozen.items()},
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Memory:
        """The same on another device, the posterior in another floating dtype."""
        moved = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        probes = self.probes if self.probes is None or device is None else self.probes.to(device)
        answers = self.answers if self.answers is None or device is None else self.answers.to(device)
        return replace(self, posterior=self.posterior.to(device, dtype), buffers=moved, probes=probes, answers=answers)

    def compact(self) -> Memory:
        """The same with its posterior in less memory: `Posterior.compact`."""
        return replace(self, posterior=self.posterior.compact())

    def with_probes(self, probes: Probes) -> Memory:
        """The memory with probes of another task's inputs beside those it has."""
        return replace(self, probes=probes if self.probes is None else self.probes + probes)

    def with_answers(self, answers: Answers) -> Memory:
        """The memory with answers on another task's data beside those it has, in no more memory."""
        return replace(self, answers=answers if self.answers is None else self.answers + answers)

    @staticmethod
    def of(
        posterior: Posterior, model: nn.Module, probes: Probes | None = None, answers: Answers | None = None
    ) -> Memory:
        """The posterior together with the buffers the model has now, and probes and answers if they are given.

        All of it is of the model at the posterior's mean: of one that has moved since, nothing is kept.
        """
        kept = {name: buffer.detach().clone() for name, buffer in buffers(model).items()}
        named = {*posterior.mean, *(other for more in posterior.ties.values() for other in more)}
        outside = {name: parameter for name, parameter in all_parameters(model).items() if name not in named}
        _require_at_mean(posterior, model, [name for name in kept if name.endswith(STATISTICS)], answers)
        return Memory(posterior, kept, probes, answers, fingerprints(outside))


def _require_at_mean(posterior: Posterior, model: nn.Module, counted: list[str], answers: Answers | None) -> None:
    """Raise where what is kept beside a posterior would be of other weights than its mean.

    A prior may be centered anywhere; what is merged is at no task's weights, and is kept beside answers of each.
    """
    apart = answers is not None and len(posterior.parents) < 2
    away = moved(posterior.mean, model) if posterior.num_data and (counted or apart) else []
    if away:
        what, cure = ("answers", "") if not counted else (some(counted), ", and count these anew with data")
        raise MismatchError(
            f"{some(away)} of the model is not at the posterior's mean, and its {what} would be kept beside weights "
            "that they are not of. Make the memory where the posterior is made, before training goes on; or go back "
            f"first, holdfast.restore_(model, posterior){cure}."
        )


def as_posterior(memory: Posterior | Memory) -> Posterior:
    """The posterior of either."""
    if isinstance(memory, Memory):
        return memory.posterior
    if not isinstance(memory, Posterior):
        raise ArgumentError(
            f"a Posterior or a Memory is needed, got {type(memory).__name__}. A Fisher becomes one by "
            "consolidate(prior(model), model, fisher), a file by holdfast.load(path)."
        )
    return memory


def restore_(model: nn.Module, memory: Posterior | Memory) -> None:
    """Put the memory's mean, and its buffers if it has any, into the model."""
    posterior = as_posterior(memory)
    resharded(model)
    params = matched(model, shapes(posterior.mean), ties=posterior.ties)
    empty = [name for name, parameter in params.items() if parameter.is_meta]
    if empty:  # where a copy would go nowhere, and be no error
        raise ArgumentError(
            f"{some(empty)} is on the meta device, with no room for values: model.to_empty(device=...)."
        )
    require_not_adapted(model, posterior.precision.shapes, "Take it off, model = model.unload(), and restore that.")
    kept_buffers = memory.buffers if isinstance(memory, Memory) else {}
    found = buffers(model)
    require_shapes(shapes(kept_buffers), shapes(found), what="the memory's buffers", than="the model")
    require_one({**posterior.tensors, **kept_buffers}, params.values(), "memories")
    with torch.no_grad():
        values = {name: cut(posterior.mean[name], parameter) for name, parameter in params.items()}
        for name, parameter in params.items():
            part(parameter.data).copy_(part(values[name]))
        for name, value in kept_buffers.items():
            found[name].copy_(value)
