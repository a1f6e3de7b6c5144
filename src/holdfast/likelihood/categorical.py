"""One of several classes, by softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from .base import Likelihood, as_tensor, draw_class, few_or_many, require_class_labels, require_class_range, uniform


@dataclass(frozen=True)
class Categorical(Likelihood):
    """nll = −log softmax(z)_y, which is `F.cross_entropy(z, y, reduction="none")`."""

    @property
    def name(self) -> str:
        return "categorical"

    def nll(self, output: Any, target: Any) -> Tensor:
        output = self._logits(output)
        require_class_labels(target, output.shape[:1], self.name)
        return F.cross_entropy(output, target.long(), reduction="none")

    def require(self, output: Any, target: Any) -> None:
        output = self._logits(output)
        require_class_labels(target, output.shape[:1], self.name)
        require_class_range(target, output.shape[-1], self.name)

    def default_targets(self, output: Any) -> str:
        return few_or_many(self._logits(output).shape[-1])

    def root(self, output: Tensor) -> Tensor:
        # diag(p) − ppᵀ = Σ_c p_c (p − e_c)(p − e_c)ᵀ: class c's score, weighted by how likely the model finds it.
        p = self._logits(output).softmax(-1)
        scores = p.unsqueeze(0) - torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).unsqueeze(1)
        return p.T.sqrt().unsqueeze(-1) * scores  # (classes, batch, classes)

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        logits = self._logits(output)
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
