"""Is H diagonal? What lies beside its diagonal, and what other structures recover of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import Precision
from .hessian import Hessian, absolute, squares
from .task import Task, joined

# The part of a move that a hold is asked to leave.
KEPT = 0.5


@dataclass(frozen=True)
class Share:
    """How much of H is its diagonal, in a layer or in all.

    `absolute` is Σ|H_ii| / Σ|H_ij| over the layer's own block, known where H is computed whole: sums of absolute values
    have no unbiased estimate from products. `squares` is Σ H_ii² / Σ H_ij² over the layer's rows (all j), estimated
    otherwise; `error` is then its standard error. `inside` is what of the squares in the rows is in the layer's block.
    """

    where: str
    entries: int
    absolute: float | None
    squares: float
    inside: float | None
    error: float


@dataclass(frozen=True)
class Recovery:
    """How near a structure Λ is to H: ⟨Λ, H⟩ / ‖Λ‖‖H‖, ‖Λ − H‖ / ‖H‖ in Frobenius' norm, and tr Λ / tr H."""

    structure: str
    cosine: float
    error: float
    scale: float


@dataclass(frozen=True)
class Held:
    """What a hold by Λ leaves of a move's cost when it leaves KEPT of the move: δᵀ|H|δ / mᵀ|H|m.

    |H| is H with the signs of its eigenvalues dropped: to go down where H bends down is no less of a change.

    δ minimizes c‖δ − m‖² + δᵀΛδ, with c such that mᵀδ = KEPT ‖m‖². A hold steers along what Λ does not see, so this
    tells structures apart where a norm of Λ − H, made of the stiffest directions, does not.
    """

    structure: str
    cost: float


@dataclass(frozen=True)
class Structure:
    """The shares by layer and in all, what structures recover, and how the share moves as data comes in."""

    exact: bool
    entries: int
    probes: int  # 0 where exact
    shares: tuple[Share, ...]  # the last is of all
    recovered: tuple[Recovery, ...]
    held: tuple[Held, ...]  # where exact
    growth: tuple[tuple[float, float], ...]  # (data so far / entries, the share of all: absolute if exact)

    @property
    def all(self) -> Share:
        """Of the whole matrix."""
        return self.shares[-1]

    @property
    def factored(self) -> bool:
        """Whether Kronecker factors are more than the diagonal here: some layer could be factored."""
        mine, plain = self.of("Kronecker Fisher"), self.of("diagonal Fisher")
        return not all(
            math.isclose(getattr(mine, each), getattr(plain, each), rel_tol=1e-4) for each in ("cosine", "error")
        )

    def of(self, structure: str) -> Recovery:
        """What one structure recovers."""
        return next(each for each in self.recovered if each.structure == structure)


def structure(task: Task, hessian: Hessian, precisions: Mapping[str, Precision], moves: Sequence[Tensor]) -> Structure:
    """The shares of H's diagonal, the distances of other structures from H, and what they hold of some moves."""
    masks = {layer: task.places(names) for layer, names in task.layers.items()}
    masks["all"] = torch.ones(task.entries, dtype=torch.bool)
    shares = tuple(
        _share(layer, mask.to(hessian.products.device), hessian) for layer, mask in masks.items()
    )  # fmt: skip
    times = {name: _times(task, precision, hessian) for name, precision in precisions.items()}
    recovered = tuple(_recovery(name, each, hessian) for name, each in times.items())
    held: tuple[Held, ...] = ()
    if hessian.exact:
        bends, axes = torch.linalg.eigh((hessian.products + hessian.products.T).double() / 2)
        bent = (axes * bends.abs()) @ axes.T
        held = tuple(Held(name, _cost(each, bent, moves)) for name, each in times.items())
    probes = 0 if hessian.exact else len(hessian.vectors)
    return Structure(hessian.exact, task.entries, probes, shares, recovered, held, hessian.growth)


def _share(where: str, mask: Tensor, hessian: Hessian) -> Share:
    entries = int(mask.sum())
    if not hessian.exact:
        value, error = squares((hessian.vectors * hessian.products)[:, mask])
        return Share(where, entries, None, value, None, error)
    rows = hessian.products[mask]
    block = rows[:, mask]
    whole = rows.double().square().sum()
    return Share(
        where,
        entries,
        absolute=absolute(block),
        squares=float(block.diagonal().double().square().sum() / whole),
        inside=float(block.double().square().sum() / whole),
        error=0.0,
    )


def _cost(matrix: Tensor, bent: Tensor, moves: Sequence[Tensor]) -> float:
    """The mean over moves of δᵀ|H|δ / mᵀ|H|m."""
    values, vectors = torch.linalg.eigh(matrix.double())
    values = values.clamp(min=0)
    costs = []
    for move in (each.double() for each in moves):
        parts = vectors.T @ move
        delta = vectors @ (_weights(values, parts.square()) * parts)
        whole = torch.dot(move, bent @ move)
        costs.append(float(torch.dot(delta, bent @ delta) / whole) if whole > 0 else 0.0)
    return sum(costs) / len(costs)


def _weights(values: Tensor, squares: Tensor) -> Tensor:
    """c / (λ + c) with the c that leaves KEPT of the squares, by bisection of its logarithm."""
    top = float(values.max()) or 1.0
    low, high = -60.0, 60.0
    for _ in range(80):
        c = top * 2 ** ((low + high) / 2)
        weights = c / (values + c)
        enough = float((weights * squares).sum()) >= KEPT * float(squares.sum())
        low, high = (low, (low + high) / 2) if enough else ((low + high) / 2, high)
    return weights


def _times(task: Task, precision: Precision, hessian: Hessian) -> Tensor:
    """Λv for every v: (rows, entries)."""
    if hessian.exact:
        return _dense(task, precision).to(hessian.products)
    found = [precision.matvec(task.parted(vector)) for vector in hessian.vectors]
    return torch.stack([joined({name: each[name] for name in task.named}) for each in found])


def _dense(task: Task, precision: Precision) -> Tensor:
    """Λ in the order of the model's parameters."""
    starts, size = {}, 0
    for name, shape in precision.shapes.items():
        starts[name] = size
        size += shape.numel()
    order = torch.cat([torch.arange(starts[name], starts[name] + p.numel()) for name, p in task.named.items()])
    return precision.dense()[order][:, order]


def _recovery(name: str, mine: Tensor, hessian: Hessian) -> Recovery:
    """By the products with the same vectors: E[Λv·Hv] = ⟨Λ, H⟩."""
    theirs = hessian.products
    norm, other = float(mine.double().norm()), float(theirs.double().norm())
    inner = float((mine.double() * theirs.double()).sum())
    traces = [float((hessian.vectors * each).double().sum()) for each in (mine, theirs)]
    return Recovery(
        name,
        cosine=inner / (norm * other) if norm and other else 0.0,
        error=float((mine - theirs).double().norm()) / other if other else float("nan"),
        scale=traces[0] / traces[1] if traces[1] else float("nan"),
    )
