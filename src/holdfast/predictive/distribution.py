"""Answers under uncertain weights: mixtures of what single weights answer, with their entropies in nats."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError, DataError, MismatchError
from ..likelihood import bernoulli, categorical, gaussian


class Predictive(abc.ABC):
    """p(y | x) = E_θ[p(y | x, θ)] of each example, over `samples` draws of θ.

    `entropy()` is all that is uncertain about y. Of it `expected_entropy` would stay if θ were known (noise), and
    `mutual_information()` would go (too little data): both are (examples,), in nats. `targets` are the labels that came
    with the batches. Examples with several outputs are taken output by output, and summed.
    """

    expected_entropy: Tensor  # E_θ[H(y | x, θ)]
    samples: int
    targets: Tensor | None

    @property
    def probabilities(self) -> Tensor:
        """Of each class, (examples, classes), or of yes in each output."""
        raise ArgumentError("a regression has no probabilities: it has .mean and .variance.")

    @property
    def mean(self) -> Tensor:
        """E[y]."""
        raise ArgumentError("classes have no mean: they have .probabilities.")

    @property
    def variance(self) -> Tensor:
        """Var[y]: the noise, and the spread of the means between draws."""
        raise ArgumentError("classes have no variance: they have .probabilities, and .entropy().")

    @abc.abstractmethod
    def entropy(self) -> Tensor:
        """H(y | x) of the mixture, (examples,)."""

    @abc.abstractmethod
    def nll(self, targets: Tensor | None = None) -> Tensor:
        """−log p(y | x) of each label, (examples,); without `targets`, of those that came with the batches."""

    @abc.abstractmethod
    def mixed(self, other: Self) -> Self:
        """As if the draws of both had been made in one: of two seeds, or of an ensemble."""

    @classmethod
    @abc.abstractmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """The examples of all parts, one after another."""

    def mutual_information(self) -> Tensor:
        """I(y; θ | x) = H(y | x) − E_θ[H(y | x, θ)], (examples,)."""
        return (self.entropy() - self.expected_entropy).clamp(min=0)

    def __len__(self) -> int:
        return len(self.expected_entropy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} predictions from {self.samples} draws)"

    def _known(self, targets: Tensor | None) -> Tensor:
        found = self.targets if targets is None else targets
        if found is None:
            raise ArgumentError("the batches came without labels: give nll(targets).")
        return found.to(self.expected_entropy.device) if isinstance(found, Tensor) else found


@dataclass(frozen=True, eq=False, repr=False)
class Classes(Predictive):
    """One of several classes in each row: an example, or a token that counts."""

    logs: Tensor  # log p(y | x), (examples, classes): of a class that is all but impossible, the digits stay
    expected_entropy: Tensor
    samples: int = 1
    targets: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor | None = None) -> Self:
        """What one draw says."""
        if logits.ndim != 2:
            raise DataError(
                f"classes need outputs of shape (examples, classes), got {tuple(logits.shape)}. For one label per "
                "position give holdfast.tokens; `forward=` can reshape."
            )
        logs = _wide(logits).log_softmax(-1)
        return cls(logs, _entropy(logs), 1, targets)

    @property
    def probabilities(self) -> Tensor:
        """Of each class, (examples, classes)."""
        return self.logs.exp()

    def entropy(self) -> Tensor:
        return _entropy(self.logs)

    def nll(self, targets: Tensor | None = None) -> Tensor:
        targets = self._known(targets)
        categorical.require(self.logs, targets)
        return F.nll_loss(self.logs, targets.long(), reduction="none")

    def mixed(self, other: Self) -> Self:
        expected, samples = _over_both(self, other)
        return replace(self, logs=_mixed_logs(self, other), expected_entropy=expected, samples=samples)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.logs for part in parts]), *_rows(parts))


@dataclass(frozen=True, eq=False, repr=False)
class YesNo(Predictive):
    """Yes or no in each output, one output by another."""

    logs: Tensor  # log p(no), log p(yes): (examples, *outputs, 2)
    expected_entropy: Tensor
    samples: int = 1
    targets: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor | None = None) -> Self:
        """What one draw says."""
        logits = _wide(logits)
        logs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)
        return cls(logs, _per_example(_entropy(logs)), 1, targets)

    @property
    def probabilities(self) -> Tensor:
        """Of yes, in the outputs' shape."""
        return self.logs[..., 1].exp()

    @property
    def mean(self) -> Tensor:
        return self.probabilities

    @property
    def variance(self) -> Tensor:
        return self.logs.sum(-1).exp()  # p (1 − p)

    def entropy(self) -> Tensor:
        return _per_example(_entropy(self.logs))

    def nll(self, targets: Tensor | None = None) -> Tensor:
        targets = self._known(targets)
        bernoulli.require(self.logs[..., 1], targets)
        yes = targets.to(self.logs.dtype).unsqueeze(-1)
        shares = torch.cat([1 - yes, yes], -1)
        return -_per_example(torch.where(shares > 0, shares * self.logs, 0).sum(-1))  # 0 · log 0 = 0

    def mixed(self, other: Self) -> Self:
        expected, samples = _over_both(self, other)
        return replace(self, logs=_mixed_logs(self, other), expected_entropy=expected, samples=samples)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.logs for part in parts]), *_rows(parts))


@dataclass(frozen=True, eq=False, repr=False)
class Regression(Predictive):
    """A number in each output, taken for a Gaussian with the mixture's mean and variance (by moments)."""

    moments: tuple[Tensor, Tensor]  # E[y] and Var[y], in the outputs' shape
    expected_entropy: Tensor
    samples: int = 1
    targets: Tensor | None = None

    @classmethod
    def of(cls, output: Tensor, scale: float, targets: Tensor | None = None) -> Self:
        """What one draw says, with noise of standard deviation `scale`."""
        output = _wide(output)
        variance = torch.full_like(output, scale**2)
        return cls((output, variance), _per_example(_gaussian_entropy(variance)), 1, targets)

    @property
    def mean(self) -> Tensor:
        return self.moments[0]

    @property
    def variance(self) -> Tensor:
        return self.moments[1]

    def entropy(self) -> Tensor:
        return _per_example(_gaussian_entropy(self.variance))

    def nll(self, targets: Tensor | None = None) -> Tensor:
        targets = self._known(targets)
        gaussian().require(self.mean, targets)
        apart = (targets.to(self.mean.dtype) - self.mean).square() / self.variance
        return _per_example(0.5 * (apart + (2 * math.pi * self.variance).log()))

    def mixed(self, other: Self) -> Self:
        expected, samples = _over_both(self, other)
        ours, theirs = self.samples / samples, other.samples / samples
        apart = other.mean - self.mean
        mean = self.mean + theirs * apart
        # Var[y] = E[Var[y | draw]] + Var[E[y | draw]], without a difference of squares
        variance = ours * self.variance + theirs * other.variance + ours * theirs * apart.square()
        return replace(self, moments=(mean, variance), expected_entropy=expected, samples=samples)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        mean, variance = (torch.cat([part.moments[side] for part in parts]) for side in (0, 1))
        return cls((mean, variance), *_rows(parts))


def _wide(output: Tensor) -> Tensor:
    return output.detach().to(torch.promote_types(output.dtype, torch.float32))


def _per_example(each: Tensor) -> Tensor:
    return each.flatten(1).sum(1) if each.ndim > 1 else each


def _entropy(logs: Tensor) -> Tensor:
    """−Σ p log p over the last axis."""
    each: Tensor = torch.special.entr(logs.exp())
    return each.sum(-1)


def _gaussian_entropy(variance: Tensor) -> Tensor:
    return 0.5 * (2 * math.pi * math.e * variance).log()


def _mixed_logs(one: Classes | YesNo, other: Classes | YesNo) -> Tensor:
    """log of the mean of two probabilities, each counted as often as it was drawn."""
    total = one.samples + other.samples
    return torch.logaddexp(one.logs + math.log(one.samples / total), other.logs + math.log(other.samples / total))


def _over_both(one: Predictive, other: Predictive) -> tuple[Tensor, int]:
    """The expected entropy over the draws of both, and how many they are; raises where they are not of one kind."""
    if type(one) is not type(other) or len(one) != len(other):
        raise MismatchError(f"{one!r} and {other!r} are not of the same examples.")
    if one.targets is not None and other.targets is not None and not _equal(one.targets, other.targets):
        raise MismatchError(
            f"{one!r} and {other!r} are not of the same examples: their labels differ. Give both the batches in one "
            "order, by a loader without shuffling."
        )
    total = one.samples + other.samples
    return (one.samples * one.expected_entropy + other.samples * other.expected_entropy) / total, total


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether labels are the same, those that are no numbers too."""
    return torch.equal(one.nan_to_num(), other.to(one).nan_to_num())


def _rows(parts: Sequence[Predictive]) -> tuple[Tensor, int, Tensor | None]:
    """The expected entropies and the labels, if all of them have any, one after another."""
    labels = [part.targets for part in parts if part.targets is not None]
    targets = torch.cat(labels) if len(labels) == len(parts) else None
    return torch.cat([part.expected_entropy for part in parts]), parts[0].samples, targets
