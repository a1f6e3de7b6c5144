"""Where one may go from μ: at random, up the gradient, and where a fine-tune went."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HoldfastWarning, MismatchError
from ..params import all_parameters, require_shapes, shapes, some, unwrapped
from .task import Task, joined


@dataclass(frozen=True)
class Direction:
    """δ by a name; at distance 1 it is as long as μ, or the whole move of a fine-tune."""

    name: str
    delta: Tensor  # (entries,)


def directions(
    task: Task, gradient: Tensor, moved: nn.Module | Mapping[str, Tensor] | None, count: int, seed: int
) -> tuple[Direction, ...]:
    """`count` at random, isotropic; the gradient, where there is any; and the move to `moved`, where given."""
    weights = task.weights
    length = float(weights.norm()) or 1.0
    found = []
    for index in range(count):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
        drawn = torch.randn(len(weights), generator=generator, dtype=torch.float64).to(weights)
        found.append(Direction(f"random {index + 1}", drawn * (length / float(drawn.norm()))))
    if float(gradient.norm()) > 0:
        found.append(Direction("gradient", gradient * (length / float(gradient.norm()))))
    if moved is not None:
        found.append(Direction("moved", _move(task, moved)))
    return tuple(found)


def _move(task: Task, moved: nn.Module | Mapping[str, Tensor]) -> Tensor:
    if isinstance(moved, nn.Module):
        there: dict[str, Tensor] = dict(all_parameters(unwrapped(moved)))
    elif isinstance(moved, Mapping):
        there = {name: tensor for name, tensor in moved.items() if isinstance(tensor, Tensor)}
    else:
        raise ArgumentError(f"moved is a model, its state_dict() or a posterior's mean, got {type(moved).__name__}.")
    require_shapes(shapes(task.named), {name: there[name].shape for name in there}, what="the model", than="`moved`")
    broken = [name for name in task.named if not bool(there[name].isfinite().all())]
    if broken:
        raise MismatchError(f"{some(broken)} has values that are not finite in `moved`.")
    frozen = {name: p for name, p in all_parameters(task.model).items() if name not in task.named and name in there}
    left = [name for name, p in frozen.items() if not torch.equal(p.detach().to(there[name]), there[name].detach())]
    if left:
        warnings.warn(
            f"{some(left)} moved too, but is frozen in the model: the move is taken without it.",
            HoldfastWarning,
            stacklevel=4,
        )
    delta = joined({name: there[name].detach().to(p) - p.detach() for name, p in task.named.items()})
    if not bool(delta.any()):
        raise ArgumentError("`moved` has the very weights of the model: that is no direction. Leave it out.")
    return delta
