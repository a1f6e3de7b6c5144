"""Whether probabilities mean what they say, and whether a score tells what is foreign from what is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, DataError
from ..likelihood import categorical


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence: how many, what they said on average, and how often they were right."""

    count: int
    confidence: float  # nan in an empty bin
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """How probabilities compare with what came true."""

    error: float  # Σ_b n_b/n |accuracy_b − confidence_b|
    nll: float  # the mean of −log p(label), in nats
    accuracy: float
    bins: tuple[Bin, ...]

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.2f} % right, {self.nll:.4f} nats, calibration error {100 * self.error:.2f} %"


def calibration(probabilities: Tensor, targets: Tensor, bins: int = 15) -> Calibration:
    """The expected calibration error (Guo et al. 2017), in equal bins of the confidence, which is max_k p(k | x).

    Bin b of B holds confidences in ((b−1)/B, b/B]. Of few examples the error is above zero even where the probabilities
    are right.

    >>> print(calibration(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0])))
    50.00 % right, 0.5697 nats, calibration error 40.00 %
    """
    if not isinstance(bins, int) or isinstance(bins, bool) or bins < 1:
        raise ArgumentError(f"bins is a whole number, 1 or more, got {bins!r}.")
    _require_probabilities(probabilities)
    categorical.require(probabilities, targets)
    given, labels = probabilities.detach().double(), targets.to(probabilities.device).long()
    confidence, answer = given.max(-1)
    right = (answer == labels).double()
    edges = torch.arange(1, bins, dtype=torch.float64, device=given.device) / bins
    place = torch.bucketize(confidence, edges)
    counts = torch.bincount(place, minlength=bins)
    said, true = (torch.bincount(place, each, minlength=bins) for each in (confidence, right))
    found = tuple(
        Bin(int(count), c / count if count else torch.nan, r / count if count else torch.nan)
        for count, c, r in zip(counts.tolist(), said.tolist(), true.tolist(), strict=True)
    )
    nll = -given.gather(-1, labels.unsqueeze(-1)).log().mean()
    error = (said - true).abs().sum() / len(given)
    return Calibration(float(error), float(nll), float(right.mean()), found)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a score is higher outside than inside, ties counted as half: the area under the ROC curve.

    Of a score such as the entropy: 1 where it tells foreign inputs from known ones without fail, ½ where it says
    nothing of them.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, 0.9]))
    0.75
    """
    known, foreign = (_scores(each, what) for each, what in ((inside, "inside"), (outside, "outside")))
    known, foreign = known.sort().values, foreign.to(known.device)
    below, up_to = (torch.searchsorted(known, foreign, right=right).sum() for right in (False, True))
    return float(below + up_to) / (2 * len(known) * len(foreign))


def _scores(given: Tensor, what: str) -> Tensor:
    if not isinstance(given, Tensor) or given.ndim != 1 or not len(given):
        got = f"{tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise DataError(f"{what} needs one score for each example, of shape (examples,); got {got}.")
    if bool(given.isnan().any()):
        raise DataError(f"{what} has {int(given.isnan().sum())} scores that are not numbers.")
    return given.detach().double()


def _require_probabilities(given: Tensor) -> None:
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim != 2 or not given.numel():
        got = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise DataError(
            f"probabilities of shape (examples, classes) are needed, got {got}. Of yes or no give both: "
            "torch.stack([1 - p, p], -1)."
        )
    sums = given.detach().double().sum(-1)
    wrong = ~((sums - 1).abs() <= max(1e-4, 8 * torch.finfo(given.dtype).eps)) | (given < 0).any(-1)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"{int(wrong.sum())} of {len(given)} rows are no probabilities: row {first} has a sum of "
            f"{float(sums[first]):.6g} and a smallest entry of {float(given[first].min()):.6g}. Of logits take "
            ".softmax(-1)."
        )
