"""How far the quadratic may be believed: its forecast against the true loss, at growing distances from μ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import Precision
from .directions import Direction
from .task import Task, rises

DISTANCES = tuple(2.0**-power for power in range(12, -1, -1))
# A forecast is believed within a factor of the truth; and wherever it is no farther off than this, in nats per example.
FACTOR, NEGLIGIBLE = 2.0, 1e-2
# The forecasts: the two terms of Taylor's, and what a penalty has.
SECOND_ORDER = "gᵀδ + ½δᵀHδ"


@dataclass(frozen=True)
class Radius:
    """How far a forecast may be believed: the last distance of the grid before it fails, and all that is nearer."""

    distance: float  # of the direction's own length
    length: float  # ‖δ‖
    relative: float  # ‖δ‖ / ‖μ‖
    rise: float  # what it costs there, in nats per example
    beyond: bool  # nothing failed as far as was looked

    def __str__(self) -> str:
        if not self.distance:
            return "nowhere"
        more = "≥ " if self.beyond else ""
        return f"{more}{self.relative:.2g}"


@dataclass(frozen=True)
class Curve:
    """The true rise of the old loss along a direction, and what each quadratic says, in nats per example."""

    direction: str
    length: float  # ‖δ‖ at distance 1
    relative: float  # ‖δ‖ / ‖μ‖ at distance 1
    distances: tuple[float, ...]
    rises: tuple[float, ...]  # L(μ + sδ) − L(μ)
    slope: float  # gᵀδ
    curvature: Mapping[str, float]  # δᵀΛδ by what Λ is: "Hessian", "diagonal Fisher", "Kronecker Fisher"

    @property
    def forecasts(self) -> dict[str, tuple[float, ...]]:
        """What is forecast at each distance, by what forecasts it."""
        halves = [0.5 * s * s for s in self.distances]
        squares = {forecast_by(name): tuple(half * bend for half in halves) for name, bend in self.curvature.items()}
        slopes = [s * self.slope for s in self.distances]
        return {SECOND_ORDER: tuple(map(sum, zip(slopes, squares["½δᵀHδ"], strict=True))), **squares}

    def radius(self, forecast: str, factor: float = FACTOR) -> Radius:
        """As far as `forecast` is within `factor` of the truth, or within NEGLIGIBLE nats of it."""
        last = -1
        for index, (said, true) in enumerate(zip(self.forecasts[forecast], self.rises, strict=True)):
            if not believed(said, true, factor):
                break
            last = index
        if last < 0:
            return Radius(0.0, 0.0, 0.0, 0.0, beyond=False)
        s = self.distances[last]
        beyond = last == len(self.distances) - 1
        return Radius(s, s * self.length, s * self.relative, self.rises[last], beyond)


@dataclass(frozen=True)
class Taylor:
    """A curve for each direction."""

    curves: tuple[Curve, ...]

    def along(self, kind: str) -> tuple[Curve, ...]:
        """The curves of "random", "gradient" or "moved"."""
        return tuple(curve for curve in self.curves if curve.direction.startswith(kind))

    @property
    def telling(self) -> tuple[Curve, ...]:
        """Those that advice is taken from: the fine-tune's if there is one, else the random ones."""
        return self.along("moved") or self.along("random")

    def nearest(self, forecast: str, factor: float = FACTOR) -> Radius:
        """The smallest radius of a forecast among the telling curves."""
        return min((curve.radius(forecast, factor) for curve in self.telling), key=lambda radius: radius.relative)


def believed(said: float, true: float, factor: float = FACTOR) -> bool:
    """Whether a forecast is within a factor of the truth, or negligibly far from it."""
    if not math.isfinite(true):
        return False
    if abs(said - true) <= NEGLIGIBLE:
        return True
    return said * true > 0 and 1 / factor <= said / true <= factor


def taylor(
    task: Task,
    paths: Sequence[Direction],
    gradient: Tensor,
    products: Tensor,  # Hδ of each path
    precisions: Mapping[str, Precision],
    num_data: float,
) -> Taylor:
    """Follow the old loss along every path, and what was said of it."""
    weights = float(task.weights.norm()) or 1.0
    true = rises(task, [path.delta for path in paths], DISTANCES) / num_data
    curves = []
    for path, product, row in zip(paths, products, true.tolist(), strict=True):
        bends = {"Hessian": float(torch.dot(path.delta, product))}
        delta = task.parted(path.delta)
        bends |= {name: float(precision.quadratic(delta)) for name, precision in precisions.items()}
        length = float(path.delta.norm())
        curves.append(
            Curve(
                direction=path.name,
                length=length,
                relative=length / weights,
                distances=DISTANCES,
                rises=tuple(row),
                slope=float(torch.dot(gradient, path.delta)) / num_data,
                curvature={name: bend / num_data for name, bend in bends.items()},
            )
        )
    return Taylor(tuple(curves))


def forecast_by(name: str) -> str:
    """What the quadratic of a Hessian, or of a Fisher, is called among the forecasts."""
    return {"Hessian": "½δᵀHδ"}.get(name, f"½δᵀFδ, {name.removesuffix(' Fisher')}")
