"""A label per position, as in language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices import sent
from ..errors import DataError
from .base import (
    Likelihood,
    as_tensor,
    draw_class,
    require_class_labels,
    require_class_range,
    softmax_divergence,
    uniform,
)
from .categorical import categorical


@dataclass(frozen=True)
class Tokens(Likelihood):
    """The cross-entropy of every counted position, summed over a sequence; the unit is the token.

    `shift=True`: the output at position t is for the label at t+1 (labels are the inputs, as Hugging Face's causal
    models take them). `shift=False`: outputs and labels already stand side by side (masked language models,
    tagging). Positions labeled `ignore_index` do not count. A sequence's score is squared whole.
    """

    shift: bool
    ignore_index: int = -100

    _instead = "Use targets='sampled': the square of a sequence's score is unbiased for the sum over its tokens."

    @property
    def unit(self) -> str:
        return "token"

    @property
    def name(self) -> str:
        return f"tokens(shift={self.shift}, ignore_index={self.ignore_index})"

    def nll(self, output: Any, target: Any) -> Tensor:
        output, target = self._aligned(output, target)
        each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none", ignore_index=self.ignore_index)
        return each.view(target.shape).sum(-1)

    def require(self, output: Any, target: Any) -> None:
        output, target = self._aligned(output, target)
        require_class_range(target[target != self.ignore_index], output.shape[-1], self.name)

    def divergence(self, old: Any, new: Any, target: Any = None, temperature: float = 1.0) -> Tensor:
        old, new = as_tensor(old, self.name), as_tensor(new, self.name)
        if new.ndim != 3 or (target is None and new.shape[1] <= int(self.shift)):
            raise DataError(
                f"tokens needs outputs of shape (batch, positions, vocabulary) with a position that counts, got "
                f"{tuple(new.shape)}."
            )
        each = softmax_divergence(old, new, temperature, self.name)
        if target is None:  # every position that has a next one counts, or every one
            return each[:, :-1].sum(-1) if self.shift else each.sum(-1)
        _, labels = self._aligned(new, target)
        return (each[:, : labels.shape[1]] * sent(labels != self.ignore_index, each.device)).sum(-1)

    def each(self, output: Any, target: Any = None) -> tuple[Tensor, Any, Likelihood]:
        if target is None:
            output = as_tensor(output, self.name)
            return (output[:, :-1] if self.shift else output).flatten(0, 1), None, categorical
        output, target = self._aligned(output, target)
        counted = (target != self.ignore_index).flatten()
        return output.flatten(0, 1)[counted], target.flatten()[counted], categorical

    def count(self, size: int, target: Any) -> Tensor:
        counted: Tensor = target[:, 1:] if self.shift else target
        return (counted != self.ignore_index).sum()  # a tensor: to read it now would wait for a GPU

    def default_targets(self, output: Any) -> str:
        return "sampled"

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        logits, aligned = self._aligned(output, target)  # labels may be on the CPU still
        if 0 <= self.ignore_index < logits.shape[-1]:
            raise DataError(
                f"ignore_index={self.ignore_index} is a word of the vocabulary, so a label drawn from the model could "
                "not be told from an ignored one. Set ignored labels to -100 and leave ignore_index alone."
            )
        counted = aligned != self.ignore_index
        # One number per counted label, and none for the others: what is drawn does not depend on the padding.
        heights = torch.zeros(output.shape[:2], dtype=torch.float64, device=target.device)
        drawn = uniform(torch.Size((int(counted.sum()),)), target, generator)
        heights[:, : counted.shape[1]].masked_scatter_(counted, drawn)
        classes = draw_class(output.flatten(0, 1), sent(heights.flatten(), output.device)).view(output.shape[:2])
        # The first label of a shifted sequence is never scored; it and the ignored ones stay what they were.
        kept = F.pad(counted, (int(self.shift), 0))
        moved = classes.roll(int(self.shift), 1)
        return torch.where(sent(kept, output.device), moved, sent(target.long(), output.device))

    def _aligned(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Outputs and labels, position by position."""
        output = as_tensor(output, self.name)
        if output.ndim != 3:
            raise DataError(f"tokens needs outputs of shape (batch, positions, vocabulary), got {tuple(output.shape)}.")
        if target is None:
            raise DataError(
                "tokens needs labels even when they are sampled: they say which positions count. For causal "
                "models give the input ids as labels, with padding set to ignore_index."
            )
        require_class_labels(target, output.shape[:2], self.name)
        target = target.long()
        return (output[:, :-1], target[:, 1:]) if self.shift else (output, target)


def tokens(*, shift: bool, ignore_index: int = -100) -> Tokens:
    """A label per position. `shift` has no default: a wrong guess would be silent (see `Tokens`)."""
    return Tokens(bool(shift), ignore_index)
