"""The rise of a loss by answers and probes: kept answers, moved as the model's answers to like probes have moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MismatchError
from ..likelihood import Likelihood
from ..probes import Answers

NEAR = 10  # probes that an answer is moved by, those that were answered most alike
# Times the larger of two estimates: what the rise was hardly ever above where this was designed (docs/forecast.md).
SAFE = 2.0
_ENTRIES = 2**24  # moved answers at once
_EXACT = "donot_use_mm_for_euclid_dist"  # by products, near ones lose their digits


@dataclass(frozen=True)
class ByProbes:
    """The rise of the old loss in nats per old example, by probes and kept answers.

    Probes are paired with answers by their outputs, and once more by the probabilities these stand for: a sure answer
    and a surer one are far apart in the first way, and side by side in the second.
    """

    by_outputs: float
    by_probabilities: float
    moved: float  # how far outputs to probes moved, against how far they lie from each other
    error: float  # a standard deviation of the mean over answers: what another sample of them would have given

    @property
    def rise(self) -> float:
        """The estimate: by outputs, which came closest most often."""
        return self.by_outputs

    @property
    def safe(self) -> float:
        """A bound that the rise will hardly be above."""
        return SAFE * max(self.by_outputs, self.by_probabilities, 0.0) + 2 * self.error


class Paired:
    """Kept answers beside the probes that the old model answered alike. Made once, asked at any new weights."""

    def __init__(self, answers: Answers, old: Tensor, near: int = NEAR) -> None:
        if old.shape[1:] != answers.outputs.shape[1:]:
            raise MismatchError(
                f"the kept answers have outputs of shape {tuple(answers.outputs.shape[1:])}, the old model's to probes "
                f"{tuple(old.shape[1:])}: are they of the same model, and the same way to call it (`forward`)?"
            )
        self._old = old.unsqueeze(-1) if old.ndim == 1 else old  # one number an example: as a column
        self._parts = [_Alike(part, self._old, near) for part in answers.alike]

    @torch.no_grad()
    def rise(self, new: Tensor) -> ByProbes:
        """From the model's outputs to the same probes now. Classes that were added at the end count as they are."""
        new = (new.unsqueeze(-1) if new.ndim == 1 else new).to(self._old)
        known = self._old.shape[-1]
        if new.shape[:-1] != self._old.shape[:-1] or new.shape[-1] < known:
            raise MismatchError(
                f"the model answers probes with outputs of shape {tuple(new.shape[1:])}, the old one with "
                f"{tuple(self._old.shape[1:])}."
            )
        delta = new[..., :known] - self._old
        each = [torch.cat(rises) for rises in zip(*(part.rises(new) for part in self._parts), strict=True)]
        spread = (self._old - self._old.mean(0)).square().mean().sqrt()
        means = [float(rises.mean()) for rises in each]
        error = max(float(rises.std()) if len(rises) > 1 else 0.0 for rises in each) / len(each[0]) ** 0.5
        moved = float(delta.square().mean().sqrt() / spread.clamp(min=1e-12))
        return ByProbes(means[0], means[-1], moved, error)


class _Alike:
    """Answers of one number of outputs, which may be fewer than the old model has: it grew since they were kept.

    What it answers to probes at the outputs that they do not have, it is taken to answer to their inputs.
    """

    @torch.no_grad()
    def __init__(self, answers: Answers, old: Tensor, near: int) -> None:
        outputs, labels = answers.outputs.to(old), answers.labels.to(old.device)
        if outputs.ndim == 1:
            outputs, labels = outputs.unsqueeze(-1), labels.unsqueeze(-1)
        self._likelihood, self._outputs, self._labels = answers.likelihood, outputs, labels
        self._known = outputs.shape[-1]
        self._old = old[..., : self._known]
        near = min(near, len(old))
        self._pairs = [
            torch.cat([
                torch.cdist(part.flatten(1), probes.flatten(1), compute_mode=_EXACT).topk(near, largest=False).indices
                for part in torch.split(seen, 1000)
            ])
            for seen, probes in zip(
                _views(self._likelihood, outputs), _views(self._likelihood, self._old), strict=True
            )
        ]  # fmt: skip
        self._before = [self._losses(pairs, old) for pairs in self._pairs]

    def rises(self, new: Tensor) -> list[Tensor]:
        """The rise of each answer, for each way to pair them."""
        return [self._losses(pairs, new) - before for pairs, before in zip(self._pairs, self._before, strict=True)]

    def _losses(self, pairs: Tensor, seen: Tensor) -> Tensor:
        """The mean loss of each answer over its probes, (answers,), moved from the old outputs to those `seen`."""
        delta = seen[..., : self._known] - self._old
        # An added class takes probability from those before it; outputs that stand each for itself have no label there.
        added = seen[..., self._known :] if self._likelihood.name == "categorical" else seen[..., :0]
        step, found = max(1, _ENTRIES // (pairs.shape[1] * max(1, seen[0].numel()))), []
        for start in range(0, len(pairs), step):
            near, stop = pairs[start : start + step], start + step
            moved = torch.cat([self._outputs[start:stop].unsqueeze(1) + delta[near], added[near]], -1).flatten(0, 1)
            labels = self._labels[start:stop].repeat_interleave(near.shape[1], 0)
            found.append(self._likelihood.nll(moved, labels).view(near.shape).mean(1))
        return torch.cat(found)


def _views(likelihood: Likelihood, outputs: Tensor) -> list[Tensor]:
    """Where outputs that mean much the same lie close together."""
    if likelihood.name == "categorical":  # the root of probabilities: Hellinger's distance
        return [outputs - outputs.mean(-1, keepdim=True), outputs.softmax(-1).sqrt()]
    return [outputs, outputs.sigmoid()] if likelihood.name == "bernoulli" else [outputs]
