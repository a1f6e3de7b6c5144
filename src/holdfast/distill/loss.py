"""The loss alone, for loops of one's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ArgumentError, require_number
from ..likelihood import Likelihood


def distillation_loss(
    old: Any, new: Any, likelihood: Likelihood, *, target: Any = None, temperature: float = 1.0
) -> Tensor:
    """The mean of KL(p_old ‖ p_new) over examples (or tokens), in nats, for two outputs on the same inputs.

    `old` is the teacher's, without a gradient. Classes that it lacks, at the end, had no probability. `temperature`
    softens both, and the loss is multiplied by its square, so that the gradient keeps its size (Hinton 2015). The Bayes
    objective for a mean loss over N new examples is `loss + num_old / N * distillation_loss`.
    """
    require_number(temperature, "temperature", positive=True)
    old = old.detach() if isinstance(old, Tensor) else old
    if not isinstance(likelihood, Likelihood):
        raise ArgumentError(f"a likelihood is needed, such as holdfast.categorical, got {type(likelihood).__name__}.")
    each = likelihood.divergence(old, new, target, temperature)
    count = counted(likelihood, new, target)
    return each.sum() / (count.clamp(min=1) if isinstance(count, Tensor) else count)


def counted(likelihood: Likelihood, output: Tensor, target: Any) -> float | Tensor:
    """How many examples or tokens a batch of outputs is for. Without labels, every position counts that could."""
    if target is None and likelihood.unit == "token":
        return float(output.shape[0] * (output.shape[1] - int(getattr(likelihood, "shift", False))))
    return likelihood.count(len(output), target)
