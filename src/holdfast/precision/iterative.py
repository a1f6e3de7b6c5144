"""Solving where there is no closed form and no room for a matrix: conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import SingularError
from .base import inner

# How small the rest Λx − v is made, of v; and how small it must be.
_ENOUGH, _REQUIRED = 1e-6, 1e-3
_STEPS = 5000


@torch.no_grad()
def conjugate_gradients(
    matvec: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], vector: Mapping[str, Tensor], names: list[str]
) -> dict[str, Tensor]:
    """The smallest x with Λx = v, from products with Λ alone, in float64. Raises where it does not get there.

    Starting at zero it stays in Λ's range, so that what Λ leaves free stays zero.
    """
    rest = {name: vector[name].double() for name in names}
    x = {name: torch.zeros_like(value) for name, value in rest.items()}
    direction = {name: value.clone() for name, value in rest.items()}
    size = start = float(inner(rest, rest))
    best, smallest = x, size
    for _ in range(_STEPS if start else 0):
        turned = matvec(direction)
        curvature = float(inner(direction, turned))
        if not curvature > 0:  # rounding is all that is left
            break
        step = size / curvature
        x = {name: value + step * direction[name] for name, value in x.items()}
        rest = {name: value - step * turned[name] for name, value in rest.items()}
        before, size = size, float(inner(rest, rest))
        if size < smallest:
            best, smallest = x, size
        if size <= _ENOUGH**2 * start:
            break
        direction = {name: value + size / before * direction[name] for name, value in rest.items()}
    left = (smallest / start) ** 0.5 if start else 0.0
    if left > _REQUIRED:
        raise SingularError(
            f"Λx = v over {names[0]} (and {len(names) - 1} more) was not solved: {left:.1e} of v is left after {_STEPS}"
            " steps. Λ is too close to singular: start from a prior, holdfast.prior(model, precision=...), or make one "
            "term of several, .merged()."
        )
    return {name: value.to(vector[name].dtype) for name, value in best.items()}
