"""Independent outputs with targets of the same shape: yes-or-no by sigmoid, and regression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError, DataError, MismatchError, require_number
from .base import Likelihood, as_tensor, few_or_many, found, uniform


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no in each output, by sigmoid: the binary cross-entropy summed over the outputs of an example."""

    @property
    def name(self) -> str:
        return "bernoulli"

    def nll(self, output: Any, target: Any) -> Tensor:
        output, target = _alike(output, target, self.name)
        return _per_example(F.binary_cross_entropy_with_logits(output, target, reduction="none"))

    def require(self, output: Any, target: Any) -> None:
        _, target = _alike(output, target, self.name)
        if not bool(((target >= 0) & (target <= 1)).all()):
            raise DataError("bernoulli needs targets between 0 and 1.")

    def default_targets(self, output: Any) -> str:
        return few_or_many(as_tensor(output, self.name)[0].numel())

    def divergence(self, old: Any, new: Any, target: Any = None, temperature: float = 1.0) -> Tensor:
        old, new = _known(old, new, self.name)
        old, new = old / temperature, new / temperature
        return _per_example(temperature**2 * _coin_divergence(old, new))

    def root(self, output: Tensor) -> Tensor:
        z = as_tensor(output, self.name)
        return _unit_columns(output) * (z.sigmoid() * (-z).sigmoid()).sqrt()  # 1 − p has lost the digits of a small one

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        return (uniform(output.shape, output, generator) < output.sigmoid()).to(output.dtype)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """y = output + noise of standard deviation `scale`: nll = ½((y−f)/σ)² + log σ + ½ log 2π, summed over outputs."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        require_number(self.scale, "the scale of a gaussian, a standard deviation,", positive=True)

    @property
    def name(self) -> str:
        return f"gaussian(scale={float(self.scale)!r})"

    def nll(self, output: Any, target: Any) -> Tensor:
        output, target = _alike(output, target, self.name)
        constant = math.log(self.scale) + 0.5 * math.log(2 * math.pi)
        return _per_example(0.5 * ((target - output) / self.scale).square() + constant)

    def require(self, output: Any, target: Any) -> None:
        _, target = _alike(output, target, self.name)
        if not bool(target.isfinite().all()):
            raise DataError(f"{self.name} needs finite targets.")

    def default_targets(self, output: Any) -> str:
        return few_or_many(as_tensor(output, self.name)[0].numel())

    def divergence(self, old: Any, new: Any, target: Any = None, temperature: float = 1.0) -> Tensor:
        if temperature != 1:
            raise ArgumentError(f"{self.name} has no temperature: its scale says how far apart outputs are.")
        old, new = _known(old, new, self.name)
        return _per_example(0.5 * ((old - new) / self.scale).square())

    def root(self, output: Tensor) -> Tensor:
        return _unit_columns(as_tensor(output, self.name)) / self.scale

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        # By the inverse distribution function, one uniform number each; zero itself would be minus infinity.
        noise: Tensor = torch.special.ndtri(uniform(output.shape, output, generator).clamp(min=2.0**-53))
        return output + self.scale * noise.to(output.dtype)


bernoulli = Bernoulli()


def gaussian(scale: float = 1.0) -> Gaussian:
    """Regression with noise of standard deviation `scale` in every output."""
    return Gaussian(scale)


def _alike(output: Any, target: Any, name: str) -> tuple[Tensor, Tensor]:
    output = as_tensor(output, name)
    if not isinstance(target, Tensor) or target.shape != output.shape:
        raise DataError(
            f"{name} needs targets of the outputs' shape {tuple(output.shape)}, got {found(target)}: broadcasting "
            "would compare every example with every other."
        )
    return output, target.to(output.dtype)


def _known(old: Any, new: Any, name: str) -> tuple[Tensor, Tensor]:
    """Two outputs on the same inputs, in float32 at least. What was added at the end, the old one does not know."""
    old, new = as_tensor(old, name), as_tensor(new, name)
    if new.ndim == old.ndim and new.ndim > 1 and new.shape[-1] > old.shape[-1]:
        new = new[..., : old.shape[-1]]
    if old.shape != new.shape:
        raise MismatchError(
            f"{name}: the old output has shape {tuple(old.shape)}, the new one {tuple(new.shape)}. Outputs may have "
            "been added at the end, and nothing else may differ."
        )
    wide = torch.promote_types(new.dtype, torch.float32)
    return old.to(wide), new.to(wide)


def _per_example(each: Tensor) -> Tensor:
    return each.flatten(1).sum(1) if each.ndim > 1 else each


def _unit_columns(output: Tensor) -> Tensor:
    """e_k in every example, for each output k: (outputs, *output.shape)."""
    inner = output.shape[1:]
    eye = torch.eye(inner.numel(), dtype=output.dtype, device=output.device)
    return eye.view(-1, 1, *inner).expand(-1, *output.shape)


def _coin_divergence(old: Tensor, new: Tensor) -> Tensor:
    """KL of coins by their logits: p (z − z′) + log(1 + eᶻ′) − log(1 + eᶻ), with p = sigmoid(z).

    Those terms are nearly equal for logits that are. With p for the rarer side and d for how far its logit moved, it is
    log(1 + p (eᵈ − 1)) − p d, which keeps its digits.
    """
    rarer = torch.where(old > 0, -1.0, 1.0).to(old.dtype)
    p, d = (rarer * old).sigmoid(), rarer * (new - old)
    near = d.abs() < 1
    close = d.where(near, 0)  # where it is not used it must not overflow, or its gradient is no number
    far = p * -d + F.softplus(rarer * new) - F.softplus(rarer * old)
    return torch.where(near, torch.log1p(p * torch.expm1(close)) - p * close, far)
