"""Is ∇L(μ) = 0? The quadratic has no linear term: it is right only where the gradient is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .task import Task
from .taylor import Curve

# A move that matters: the gradient is weighed against the curvature where the curvature costs so much.
NATS = 0.1
# What the gradient may add to the curvature there: up to a tenth is nothing, up to as much again is to be known.
NOTHING, AS_MUCH = 0.1, 1.0


@dataclass(frozen=True)
class Optimum:
    """The gradient of the old loss, in nats per example, and its part in a move that costs NATS by curvature.

    `aligned` is ‖Σₙ gₙ‖² / Σₙ ‖gₙ‖²: 0 at the optimum of these data, about 1 where the gradients of single examples
    point anywhere (fresh data at an optimum), up to N where they all agree.
    """

    norm: float
    by_parameter: Mapping[str, float]
    by_layer: Mapping[str, float]
    aligned: float
    parts: Mapping[str, float]  # by direction: |gᵀδ| / |½ δᵀHδ| where the latter is NATS

    @property
    def part(self) -> float:
        """The largest part along the fine-tune if there is one, else along the random directions."""
        chosen = [part for name, part in self.parts.items() if name == "moved"]
        return max(chosen or [part for name, part in self.parts.items() if name != "gradient"])

    @property
    def verdict(self) -> str:
        """One sentence."""
        where = "the fine-tune" if "moved" in self.parts else "random directions"
        said = f"Along {where}, the gradient adds {_percent(self.part)} to a move that costs {NATS:g} nats by curvature"
        if self.part <= NOTHING:
            return f"The model is at an optimum of these data as far as a penalty is concerned. {said}."
        if self.part <= AS_MUCH:
            return f"The model is near an optimum of these data. {said}."
        return f"The model is not at an optimum of these data. {said}: the quadratic leaves the larger part out."


def optimum(task: Task, gradient: Tensor, num_data: float, squares: float, curves: tuple[Curve, ...]) -> Optimum:
    """`squares` is Σₙ ‖gₙ‖², the trace of the observed Fisher."""
    parts = {name: float(part.norm()) / num_data for name, part in task.parted(gradient).items()}
    layers = {
        layer: sum(parts[name] ** 2 for name in names) ** 0.5 for layer, names in task.layers.items()
    }  # fmt: skip
    return Optimum(
        norm=float(gradient.norm()) / num_data,
        by_parameter=parts,
        by_layer=layers,
        aligned=float(gradient.double().square().sum()) / squares if squares else 0.0,
        parts={curve.direction: _part(curve) for curve in curves},
    )


def _part(curve: Curve) -> float:
    """|s gᵀδ| / NATS at the distance s with ½ s² |δᵀHδ| = NATS."""
    bend = abs(curve.curvature["Hessian"])
    if not bend:
        return float("inf") if curve.slope else 0.0
    return abs(curve.slope) * math.sqrt(2 * NATS / bend) / NATS


def _percent(part: float) -> str:
    return f"{part:.1f} times as much" if part > 2 else f"{100 * part:.2g} %"
