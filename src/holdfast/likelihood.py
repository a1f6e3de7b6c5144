"""What the model's output means: the negative log-likelihood of one example in nats, and its Fisher root.

A likelihood says how far off an output is (`nll`), what labels the model itself would give (`sampled`), and
the exact Fisher of its outputs as a root: columns s_k with Σ_k s_k s_kᵀ = E[∇nll ∇nllᵀ] (`root`).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ArgumentError, DataError

# The exact Fisher takes a backward pass per class or output: the default up to this many, sampled labels beyond.
EXPECTED_UP_TO = 16


class Likelihood(abc.ABC):
    """One example's −log p(y | output), in nats, summed over everything that belongs to the example."""

    @property
    def unit(self) -> str:
        """What `num_data` counts."""
        return "example"

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What a memory records of it."""

    @abc.abstractmethod
    def nll(self, output: Any, target: Any) -> Tensor:
        """−log p(target | output) of each example, shape (batch,). Its mean is the loss that strength 1 is made for."""

    def count(self, size: int, target: Any) -> float:
        """How many units (examples, or tokens) a batch of `size` examples has."""
        return float(size)

    @abc.abstractmethod
    def default_targets(self, output: Any) -> str:
        """Whose labels a Fisher takes when nobody says: "expected", "sampled" or "observed"."""

    def root(self, output: Tensor) -> Tensor:
        """Columns s_k with Σ_k s_k s_kᵀ the Fisher of the outputs, shape (columns, *output.shape)."""
        raise ArgumentError(f"{self.name} has no exact Fisher (targets='expected'). {self._instead}")

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Any:
        """Labels drawn from the model. One uniform number per label, in the order of the examples: how the
        data is cut into batches does not change what is drawn."""
        raise ArgumentError(f"{self.name} cannot draw labels (targets='sampled'). {self._instead}")

    _instead = "Use targets='observed'."


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes by softmax: nll = −log softmax(z)_y, which is `F.cross_entropy(z, y, reduction="none")`."""

    @property
    def name(self) -> str:
        return "categorical"

    def nll(self, output: Any, target: Any) -> Tensor:
        output = _tensor(output, self.name)
        if output.ndim != 2:
            raise DataError(
                f"categorical needs outputs of shape (batch, classes), got {tuple(output.shape)}. For one label per "
                "position give (batch, positions, classes) to holdfast.tokens(shift=False); `forward=` can reshape."
            )
        _class_indices(target, output.shape[:1], output.shape[-1], self.name)
        return F.cross_entropy(output, target, reduction="none")

    def default_targets(self, output: Any) -> str:
        return _few_or_many(_tensor(output, self.name).shape[-1])

    def root(self, output: Tensor) -> Tensor:
        # diag(p) − ppᵀ = Σ_c p_c (p − e_c)(p − e_c)ᵀ: class c's score, weighted by how likely the model finds it.
        p = output.softmax(-1)
        scores = p.unsqueeze(0) - torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).unsqueeze(1)
        return p.T.sqrt().unsqueeze(-1) * scores  # (classes, batch, classes)

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        return _draw_class(output, generator)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent yes-or-no outputs by sigmoid, summed over the outputs of an example."""

    @property
    def name(self) -> str:
        return "bernoulli"

    def nll(self, output: Any, target: Any) -> Tensor:
        output = _tensor(output, self.name)
        target = _same_shape(output, target, self.name)
        if not bool(((target >= 0) & (target <= 1)).all()):
            raise DataError("bernoulli needs targets between 0 and 1.")
        return _per_example(F.binary_cross_entropy_with_logits(output, target, reduction="none"))

    def default_targets(self, output: Any) -> str:
        return _few_or_many(_tensor(output, self.name)[0].numel())

    def root(self, output: Tensor) -> Tensor:
        p = output.sigmoid()
        return _unit_columns(output) * (p * (1 - p)).sqrt()

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        return (_uniform(output.shape, output, generator) < output.sigmoid()).to(output.dtype)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """y = output + noise of standard deviation `scale`: nll = ½((y−f)/σ)² + log σ + ½ log 2π, summed over outputs."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ArgumentError(f"gaussian needs a positive, finite scale (a standard deviation), got {self.scale}.")

    @property
    def name(self) -> str:
        return f"gaussian(scale={self.scale:g})"

    def nll(self, output: Any, target: Any) -> Tensor:
        output = _tensor(output, self.name)
        residual = (_same_shape(output, target, self.name) - output) / self.scale
        constant = math.log(self.scale) + 0.5 * math.log(2 * math.pi)
        return _per_example(0.5 * residual.square() + constant)

    def default_targets(self, output: Any) -> str:
        return _few_or_many(_tensor(output, self.name)[0].numel())

    def root(self, output: Tensor) -> Tensor:
        return _unit_columns(output) / self.scale

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        noise: Tensor = torch.special.ndtri(_uniform(output.shape, output, generator, open_interval=True))
        return output + self.scale * noise.to(output.dtype)


@dataclass(frozen=True)
class Tokens(Likelihood):
    """A label per position, as in language models; the unit is the token, and a sequence's score is squared whole.

    `shift=True`: the output at position t is for the label at t+1 (labels are the inputs, as Hugging Face's causal
    models take them). `shift=False`: outputs and labels already stand side by side (masked language models,
    tagging). Positions labelled `ignore_index` do not count.
    """

    shift: bool
    ignore_index: int = -100

    @property
    def unit(self) -> str:
        return "token"

    @property
    def name(self) -> str:
        return f"tokens(shift={self.shift})"

    def _aligned(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        output = _tensor(output, self.name)
        if output.ndim != 3:
            raise DataError(f"tokens needs outputs of shape (batch, positions, vocabulary), got {tuple(output.shape)}.")
        if target is None:
            raise DataError(
                "tokens needs labels even when they are sampled: they say which positions count. For causal "
                "models give the input ids as labels, with padding set to ignore_index."
            )
        if not isinstance(target, Tensor) or target.shape != output.shape[:2]:
            got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise DataError(f"tokens needs labels of shape {tuple(output.shape[:2])}, got {got}.")
        if self.shift:
            output, target = output[:, :-1], target[:, 1:]
        counted = target != self.ignore_index
        _class_indices(target[counted], (int(counted.sum()),), output.shape[-1], self.name)
        return output, target

    def nll(self, output: Any, target: Any) -> Tensor:
        output, target = self._aligned(output, target)
        each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none", ignore_index=self.ignore_index)
        return each.view(target.shape).sum(-1)

    def count(self, size: int, target: Any) -> float:
        counted = target[:, 1:] if self.shift else target
        return float((counted != self.ignore_index).sum())

    def sampled(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        logits, aligned = self._aligned(output, target)
        counted = aligned != self.ignore_index
        drawn = aligned.clone()
        drawn[counted] = _draw_class(logits[counted], generator)
        # The first label of a shifted sequence is never scored; it stays what it was.
        return torch.cat([target[:, :1], drawn], dim=1) if self.shift else drawn

    def default_targets(self, output: Any) -> str:
        return "sampled"

    _instead = "Use targets='sampled': the square of a sequence's score is unbiased for the sum over its tokens."


@dataclass(frozen=True)
class Custom(Likelihood):
    """Any negative log-likelihood, as a function (output, target) -> (batch,) in nats. Observed labels only."""

    function: Callable[[Any, Any], Tensor]
    label: str = "custom"
    counted_in: str = "example"

    @property
    def unit(self) -> str:
        return self.counted_in

    @property
    def name(self) -> str:
        return self.label

    def nll(self, output: Any, target: Any) -> Tensor:
        each = self.function(output, target)
        if not isinstance(each, Tensor) or each.ndim != 1:
            got = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise DataError(
                f"{self.label} must return one negative log-likelihood per example, of shape (batch,); got {got}. "
                "With a loss of torch, pass reduction='none' and sum over what belongs to one example."
            )
        return each

    def default_targets(self, output: Any) -> str:
        return "observed"


categorical = Categorical()
bernoulli = Bernoulli()


def gaussian(scale: float = 1.0) -> Gaussian:
    """Regression with noise of standard deviation `scale` in every output."""
    return Gaussian(float(scale))


def tokens(*, shift: bool, ignore_index: int = -100) -> Tokens:
    """A label per position. `shift` has no default: a wrong guess would be silent (see `Tokens`)."""
    return Tokens(bool(shift), ignore_index)


def custom(nll: Callable[[Any, Any], Tensor], *, name: str = "custom", unit: str = "example") -> Custom:
    """A per-example negative log-likelihood of your own, (output, target) -> (batch,) in nats."""
    return Custom(nll, name, unit)


def _tensor(output: Any, name: str) -> Tensor:
    if not isinstance(output, Tensor):
        raise DataError(
            f"{name} needs the model's output as one tensor, got {type(output).__name__}. "
            "Give forward=lambda model, batch: ... that returns the logits or the prediction."
        )
    return output


def _same_shape(output: Tensor, target: Any, name: str) -> Tensor:
    if not isinstance(target, Tensor) or target.shape != output.shape:
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise DataError(
            f"{name} needs targets of the outputs' shape {tuple(output.shape)}, got {got}: broadcasting would compare "
            "every example with every other."
        )
    return target.to(output.dtype)


def _class_indices(target: Any, shape: tuple[int, ...], classes: int, name: str) -> None:
    if not isinstance(target, Tensor) or target.is_floating_point() or tuple(target.shape) != tuple(shape):
        got = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise DataError(
            f"{name} needs integer class labels of shape {tuple(shape)}, got {got}. For soft labels give a "
            "holdfast.custom likelihood."
        )
    if target.numel() and not (int(target.min()) >= 0 and int(target.max()) < classes):
        raise DataError(
            f"{name} has {classes} classes, but the labels run from {int(target.min())} to {int(target.max())}."
        )


def _few_or_many(columns: int) -> str:
    return "expected" if columns <= EXPECTED_UP_TO else "sampled"


def _per_example(each: Tensor) -> Tensor:
    return each.flatten(1).sum(1) if each.ndim > 1 else each


def _unit_columns(output: Tensor) -> Tensor:
    """e_k in every example, for each output k: (outputs, *output.shape)."""
    inner = output.shape[1:]
    eye = torch.eye(inner.numel(), dtype=output.dtype, device=output.device)
    return eye.view(-1, 1, *inner).expand(-1, *output.shape)


def _uniform(shape: torch.Size, like: Tensor, generator: torch.Generator, *, open_interval: bool = False) -> Tensor:
    # Drawn on the CPU in float64 whatever the model's device and dtype, so that a seed means the same everywhere.
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    if open_interval:
        drawn = drawn.clamp(min=2.0**-53)
    return drawn.to(like.device)


def _draw_class(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One class per row, by inverting the distribution function at one uniform number."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    cumulative = logits.to(dtype).softmax(-1).cumsum(-1)
    height = _uniform(logits.shape[:1], logits, generator).to(dtype).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, height, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
