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
        likelihood = answers.likelihood
        outputs = answers.outputs.to(old)
        if old.shape[1:] != outputs.shape[1:]:
            raise MismatchError(
                f"the kept answers have outputs of shape {tuple(outputs.shape[1:])}, the old model's to probes "
                f"{tuple(old.shape[1:])}: are they of the same model, and the same way to call it (`forward`)?"
            )
        labels = answers.labels.to(old.device)
        if old.ndim == 1:  # one number an example: as a column
            old, outputs, labels = old.unsqueeze(-1), outputs.unsqueeze(-1), labels.unsqueeze(-1)
        self._likelihood, self._old, self._outputs, self._labels = likelihood, old, outputs, labels
        self._before = likelihood.nll(outputs, self._labels)
        near = min(near, len(old))
        self._pairs = [
            torch.cat([
                torch.cdist(part.flatten(1), probes.flatten(1), compute_mode=_EXACT).topk(near, largest=False).indices
                for part in torch.split(seen, 1000)
            ])
            for seen, probes in zip(_views(likelihood, outputs), _views(likelihood, old), strict=True)
        ]  # fmt: skip

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
        # An added class takes probability from those before it; outputs that stand each for itself have no label there.
        added = new[..., known:] if self._likelihood.name == "categorical" else new[..., :0]
        each = [self._risen(pairs, delta, added) for pairs in self._pairs]
        spread = (self._old - self._old.mean(0)).square().mean().sqrt()
        means = [float(rises.mean()) for rises in each]
        error = max(float(rises.std()) if len(rises) > 1 else 0.0 for rises in each) / len(each[0]) ** 0.5
        moved = float(delta.square().mean().sqrt() / spread.clamp(min=1e-12))
        return ByProbes(means[0], means[-1], moved, error)

    def _risen(self, pairs: Tensor, delta: Tensor, added: Tensor) -> Tensor:
        """The mean rise of each answer over its probes, (answers,)."""
        step, found = max(1, _ENTRIES // (pairs.shape[1] * max(1, delta[0].numel()))), []
        for start in range(0, len(pairs), step):
            near, stop = pairs[start : start + step], start + step
            moved = torch.cat([self._outputs[start:stop].unsqueeze(1) + delta[near], added[near]], -1).flatten(0, 1)
            labels = self._labels[start:stop].repeat_interleave(near.shape[1], 0)
            after = self._likelihood.nll(moved, labels).view(near.shape).mean(1)
            found.append(after - self._before[start:stop])
        return torch.cat(found)


def _views(likelihood: Likelihood, outputs: Tensor) -> list[Tensor]:
    """Where outputs that mean much the same lie close together."""
    if likelihood.name == "categorical":  # the root of probabilities: Hellinger's distance
        return [outputs - outputs.mean(-1, keepdim=True), outputs.softmax(-1).sqrt()]
    return [outputs, outputs.sigmoid()] if likelihood.name == "bernoulli" else [outputs]
