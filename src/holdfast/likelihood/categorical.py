"""One of several classes, by softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError, require_number
from .base import (
    Likelihood,
    as_tensor,
    draw_class,
    few_or_many,
    require_class_labels,
    require_class_range,
    softmax_divergence,
    uniform,
)


@dataclass(frozen=True)
class Categorical(Likelihood):
    """nll = −log softmax(z)_y, which is `F.cross_entropy(z, y, reduction="none")`.

    With a temperature T it is −T log softmax(z/T)_y, whose gradient is softmax(z/T) less the label: what a model was
    sure of, its curvature then still knows (`softened`).
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_number(self.temperature, "a temperature", positive=True)

    @property
    def name(self) -> str:
        return "categorical" if self.temperature == 1 else f"categorical(temperature={float(self.temperature)!r})"

    def nll(self, output: Any, target: Any) -> Tensor:
        output = self._logits(output)
        require_class_labels(target, output.shape[:1], self.name)
        if self.temperature == 1:
            return F.cross_entropy(output, target.long(), reduction="none")
        softer = F.cross_entropy(output / self.temperature, target.long(), reduction="none")
        return self.temperature * softer

    def require(self, output: Any, target: Any) -> None:
        output = self._logits(output)
        require_class_labels(target, output.shape[:1], self.name)
        require_class_range(target, output.shape[-1], self.name)

    def default_targets(self, output: Any) -> str:
        return few_or_many(self._logits(output).shape[-1])

    def divergence(self, old: Any, new: Any, target: Any = None, temperature: float = 1.0) -> Tensor:
        return softmax_divergence(self._logits(old), self._logits(new), temperature * self.temperature, self.name)

    def root(self, output: Tensor) -> Tensor:
        # diag(p) − ppᵀ = Σ_j s_j s_jᵀ with one column fewer than classes: is it j, given that it is none before j?
        # With q_j = 1 − p_1 − … − p_j:  s_j = √(p_j / (q_{j−1} q_j)) · (q_j e_j − Σ_{i>j} p_i e_i).
        logits = self._logits(output) / self.temperature
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if p.shape[-1] == 1:
            return torch.zeros_like(p).unsqueeze(0)  # nothing to be uncertain about
        q = p.flip(-1).cumsum(-1).flip(-1)  # q_{j−1}, summed from the far end: small ones keep their digits
        tiny = torch.finfo(p.dtype).tiny
        likely, rest = (p[:, :-1] / q[:, :-1].clamp(min=tiny)).sqrt(), q[:, 1:].sqrt()
        later = p.unsqueeze(1).expand(-1, p.shape[-1] - 1, -1).triu(1) / rest.clamp(min=tiny).unsqueeze(-1)
        columns = F.pad(torch.diag_embed(rest), (0, 1)) - later
        return (likely.unsqueeze(-1) * columns).movedim(1, 0)  # (classes − 1, batch, classes)

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        logits = self._logits(output) / self.temperature
        return draw_class(logits, uniform(logits.shape[:1], logits, generator))

    def _logits(self, output: Any) -> Tensor:
        logits = as_tensor(output, self.name)
        if logits.ndim != 2:
            raise DataError(
                f"categorical needs outputs of shape (batch, classes), got {tuple(logits.shape)}. For one label per "
                "position give (batch, positions, classes) to holdfast.tokens(shift=False); `forward=` can reshape."
            )
        return logits


categorical = Categorical()


def softened(temperature: float = 4.0) -> Categorical:
    """One of several classes, its curvature taken at softmax(z / temperature).

    Under cross-entropy the Fisher of an example vanishes as 1 − p, p the probability of its label: of what a model
    became sure of, nothing holds it. Give this to a Fisher alone, and train with the cross-entropy as it is.
    """
    return Categorical(temperature)
