"""What every likelihood can do, and the checks they share."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from ..devices import sent
from ..errors import ArgumentError, DataError, MismatchError
from ..kernels import block_sums, sums_in_one_pass

# The exact Fisher takes a backward pass per class or output: the default up to this many, sampled labels beyond.
EXPECTED_UP_TO = 16
# Entries of temporaries while labels are drawn.
_AT_ONCE = 1 << 27
_BLOCK = 1024


class Likelihood(abc.ABC):
    """One example's −log p(y | output) in nats, summed over everything that belongs to the example.

    A likelihood says how far off an output is (`nll`), what labels the model itself would give (`sampled`), and the
    exact Fisher of its outputs as a root: columns s_k with Σ_k s_k s_kᵀ = E[∇nll ∇nllᵀ] (`root`).
    """

    _instead = "Use targets='observed'."

    @property
    def unit(self) -> str:
        """What `num_data` counts."""
        return "example"

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What a memory records of it: enough to make it again."""

    @abc.abstractmethod
    def nll(self, output: Any, target: Any) -> Tensor:
        """−log p(target | output) of each example, (batch,). Summed over a batch and divided by its `count`, it is the
        loss that strength 1 is made for: the mean over examples, or over tokens."""

    @abc.abstractmethod
    def default_targets(self, output: Any) -> str:
        """Whose labels a Fisher takes when nobody says: "expected", "sampled" or "observed"."""

    def require(self, output: Any, target: Any) -> None:  # noqa: B027  # not every likelihood can refuse
        """Raise where targets have impossible values. Apart from `nll`, which can then serve as a training loss."""

    def count(self, size: int, target: Any) -> float | Tensor:
        """How many units (examples, or tokens) a batch of `size` examples has."""
        return float(size)

    def divergence(self, old: Any, new: Any, target: Any = None, temperature: float = 1.0) -> Tensor:
        """KL(p_old ‖ p_new) of each example in nats, (batch,), times temperature² of what is softened by it.

        `target` says where labels count, for likelihoods that have positions.
        """
        raise ArgumentError(f"{self.name} does not say how far apart two outputs are: nothing is known but its nll.")

    def each(self, output: Any, target: Any = None) -> tuple[Tensor, Any, Likelihood]:
        """Outputs and labels one by one, as far as they count, and the likelihood of each: of tokens, a class."""
        return as_tensor(output, self.name), target, self

    def root(self, output: Tensor) -> Tensor:
        """Columns s_k with Σ_k s_k s_kᵀ the Fisher of the outputs, shape (columns, *output.shape)."""
        raise ArgumentError(f"{self.name} has no exact Fisher (targets='expected'). {self._instead}")

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Any:
        """Labels drawn from the model. One uniform number per label, in the order of the examples: how the data is
        cut into batches does not change what is drawn."""
        raise ArgumentError(f"{self.name} cannot draw labels (targets='sampled'). {self._instead}")


def few_or_many(columns: int) -> str:
    """The default targets of a likelihood whose exact Fisher takes `columns` passes."""
    return "expected" if columns <= EXPECTED_UP_TO else "sampled"


def softmax_divergence(old: Tensor, new: Tensor, temperature: float, name: str) -> Tensor:
    """Σ p_old (log p_old − log p_new) over the last axis. Classes that the old output lacks had no probability."""
    known = old.shape[-1]
    if old.shape[:-1] != new.shape[:-1] or known > new.shape[-1]:
        raise MismatchError(
            f"{name}: the old output has shape {tuple(old.shape)}, the new one {tuple(new.shape)}. Classes may have "
            "been added at the end, and nothing else may differ."
        )
    wide = torch.promote_types(new.dtype, torch.float32)
    before = (old.to(wide) / temperature).log_softmax(-1)
    now = (new.to(wide) / temperature).log_softmax(-1)[..., :known]
    likely = before.exp()
    # A class that was impossible adds nothing, whatever it is now: 0 · log 0 = 0.
    apart = torch.where(likely > 0, before - now, 0)
    return temperature**2 * (likely * apart).sum(-1)


def as_tensor(output: Any, name: str) -> Tensor:
    """The output, which must be one tensor."""
    if not isinstance(output, Tensor):
        raise DataError(
            f"{name} needs the model's output as one tensor, got {type(output).__name__}. "
            "Give forward=lambda model, batch: ... that returns the logits or the prediction."
        )
    return output


def found(target: Any) -> str:
    """What was given as a target, for an error."""
    return f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__


def require_class_labels(target: Any, shape: torch.Size, name: str) -> None:
    """Raise unless targets are integers of the shape given."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex() or target.shape != shape:
        raise DataError(
            f"{name} needs integer class labels of shape {tuple(shape)}, got {found(target)}. For soft labels give a "
            "holdfast.custom likelihood."
        )


def require_class_range(labels: Tensor, classes: int, name: str) -> None:
    """Raise unless every label is a class."""
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise DataError(
            f"{name} has {classes} classes, but the labels run from {int(labels.min())} to {int(labels.max())}."
        )


def uniform(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers between 0 and 1, drawn on the CPU in float64 so that a seed means the same on every device."""
    return sent(torch.rand(shape, generator=generator, dtype=torch.float64), like.device)


def draw_class(logits: Tensor, heights: Tensor) -> Tensor:
    """For each row of logits the class at which the distribution function reaches a height between 0 and 1."""
    # A large vocabulary a few rows at a time, where their probabilities have to be written.
    step = max(1, len(logits) if sums_in_one_pass(logits) else _AT_ONCE // logits.shape[-1])
    parts = zip(torch.split(logits, step), torch.split(heights, step), strict=True)
    return torch.cat([_at_height(*part) for part in parts])


def _at_height(logits: Tensor, heights: Tensor) -> Tensor:
    """First among blocks of classes, then inside one: a sum over all classes is quicker than a running sum."""
    classes = logits.shape[-1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # Rounding must not carry it past the last class that is possible at all, here or in its block.
    below = 1 - torch.finfo(dtype).eps
    heights = heights.to(dtype).clamp(max=below).unsqueeze(-1)
    if classes <= _BLOCK:
        return _reached(logits.softmax(-1, dtype=dtype).cumsum(-1), heights).squeeze(-1)
    sums, likely = block_sums(logits, _BLOCK)
    above = sums.cumsum(-1)
    block = _reached(above, heights)
    places = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    inside = torch.where(places < classes, likely(places.clamp(max=classes - 1)), 0).cumsum(-1)
    rest = heights * above[:, -1:] - torch.nn.functional.pad(above, (1, 0)).gather(1, block)
    within = (rest / inside[:, -1:]).clamp(min=0, max=below)
    return (block * _BLOCK + _reached(inside, within)).squeeze(-1)


def _reached(running: Tensor, heights: Tensor) -> Tensor:
    """Where a running sum first passes a height, given as a part of its end."""
    found = torch.searchsorted(running, heights * running[:, -1:], right=True)
    return found.clamp(max=running.shape[-1] - 1)
