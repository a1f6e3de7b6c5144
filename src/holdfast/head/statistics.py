"""What a linear-Gaussian model needs of its data, and nothing else: sums, in which no order is left."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..curvature.batches import require_batches
from ..errors import ArgumentError, DataError, MismatchError
from ..identity import digest, row_sums
from ..precision.base import require_finite
from .features import RandomFeatures, designed, require_features

# A label is a column. Beyond this it is more likely an identifier.
_MOST_CLASSES = 1_000_000


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Σφφᵀ, Σφyᵀ and Σy² over the examples; the last feature is a constant 1, for the bias.

    `sources` are the data by identity, with the number of examples in each, so that none is counted twice.
    """

    gram: Tensor  # (K, K)
    cross: Tensor  # (K, C)
    squares: Tensor  # (C,)
    sources: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = {"gram": self.gram, "cross": self.cross, "squares": self.squares}
        width, outputs = self.gram.shape[-1] if self.gram.ndim else 0, self.squares.numel()
        shapes = {"gram": (width, width), "cross": (width, outputs), "squares": (outputs,)}
        for name, tensor in parts.items():
            require_finite(name, tensor)
            if tensor.dtype != self.gram.dtype or tensor.dtype not in (torch.float64, torch.float32):
                raise ArgumentError(f"a head's sums are all float64, or all float32; `{name}` is {tensor.dtype}.")
            if tensor.shape != shapes[name] or not width:
                raise ArgumentError(f"`{name}` should be {shapes[name]}, and has shape {tuple(tensor.shape)}.")
        if any(count < 1 for count in self.sources.values()):
            raise ArgumentError("a source has at least one example.")
        tolerance = 64 * torch.finfo(self.gram.dtype).eps * float(self.gram.abs().max())
        if float((self.gram - self.gram.T).abs().max()) > tolerance:
            raise ArgumentError("Σφφᵀ must be symmetric; this matrix is not.")
        if bool((self.gram.diagonal() < -tolerance).any()) or bool((self.squares < 0).any()):
            raise ArgumentError("sums of squares cannot be negative.")
        if abs(float(self.gram[-1, -1]) - self.num_data) > tolerance:
            raise ArgumentError(f"Σ1 is {float(self.gram[-1, -1]):g} over {self.num_data} examples.")

    @staticmethod
    def empty(width: int, outputs: int) -> Statistics:
        """Of no data."""
        gram = torch.zeros(width, width, dtype=torch.float64)
        return Statistics(gram, gram.new_zeros(width, outputs), gram.new_zeros(outputs))

    @property
    def num_data(self) -> int:
        """How many examples were summed."""
        return sum(self.sources.values())

    @property
    def outputs(self) -> int:
        """How many there are."""
        return self.squares.numel()

    def grown(self, outputs: int) -> Statistics:
        """With more outputs, whose targets were 0 in all examples so far."""
        more = outputs - self.outputs
        return replace(
            self,
            cross=pad(self.cross, (0, more)),
            squares=pad(self.squares, (0, more)),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Statistics:
        """The same on another device, or in another floating dtype."""
        gram, cross, squares = (part.to(device=device, dtype=dtype) for part in (self.gram, self.cross, self.squares))
        return Statistics(gram, cross, squares, self.sources)


def joined(parts: Sequence[Statistics], base: Statistics | None = None) -> Statistics:
    """Of all their data; what they share must be that of `base`, and counts once."""
    shared = {} if base is None else base.sources
    if any(not shared.keys() <= part.sources.keys() for part in parts):
        raise MismatchError("the base has learned from data that one of the heads has not: it is not what they share.")
    seen = Counter(key for part in parts for key in part.sources if key not in shared)
    known = {key: count for part in parts for key, count in part.sources.items()}
    twice = sum(known[key] for key, times in seen.items() if times > 1)
    if twice:
        raise MismatchError(
            f"these heads share {twice} examples, which would count twice. If they went on from one head, name it: "
            "a.merged(b, base=that_head)."
        )
    like = parts[0].gram
    terms = [(1, part) for part in parts] + ([] if base is None else [(1 - len(parts), base)])
    outputs = max(part.outputs for _, part in terms)
    moved = [(factor, part.grown(outputs).to(like.device, like.dtype)) for factor, part in terms]
    # Summed at once: a difference taken first would have the rounding of what was taken away.
    gram, cross, squares = (
        functools.reduce(torch.add, [factor * getattr(part, name) for factor, part in moved])
        for name in ("gram", "cross", "squares")
    )
    return Statistics(gram, cross, squares, known)


def collected(
    batches: Iterable[Any], random: RandomFeatures | None, width: int, outputs: int | None, like: Tensor
) -> Statistics:
    """The sums over batches of (inputs, targets), of this `width` and into matrices `like` this; they are one source.

    `outputs` None: targets are labels, and count as one-hot vectors; otherwise they are that many numbers.
    """
    require_batches(batches)
    gram = torch.zeros_like(like)
    cross, squares = gram.new_zeros(len(gram), outputs or 0), gram.new_zeros(outputs or 0)
    count, sums = 0, torch.zeros(2, dtype=torch.int64)
    for index, batch in enumerate(batches):
        where = f"batch {index}"
        inputs, targets = _pair(batch, where)
        require_features(inputs, width, where)
        targets = _labels(targets, where) if outputs is None else _values(targets, outputs, where)
        if outputs is None:
            more = (0, max(0, int(targets.max()) + 1 - len(squares)))
            cross, squares = pad(cross, more), pad(squares, more)
        start = 0
        for phi in designed(inputs, random, gram):
            y = targets[start : start + len(phi)].to(gram.device)
            y = one_hot(y, len(squares)).to(gram) if outputs is None else y.to(gram)
            with torch.autocast(gram.device.type, enabled=False):
                gram.addmm_(phi.T, phi)
                cross.addmm_(phi.T, y)
            squares += y.square().sum(0)
            start += len(phi)
        # Sums over rows, so that the data has one identity however it is cut or shuffled; those of squares are 64 bits
        # more of it.
        rows = row_sums([inputs, targets.to(inputs.device)]).cpu()
        sums += torch.stack([rows.sum(), (rows * rows).sum()])
        count += len(inputs)
    if not count:
        raise DataError("there are no batches: the loader is empty, or an iterator that was already used up.")
    return Statistics(gram, cross, squares, {digest(f"{sums.tolist()} {count}"): count})


def _pair(batch: Any, where: str) -> tuple[Tensor, Tensor]:
    both = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)
    if not both:
        raise DataError(f"{where} is a {type(batch).__name__}. Give (features, targets), two tensors.")
    inputs, targets = batch
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise DataError(
            f"{where} has inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: their first axis is the "
            "examples, as many in both."
        )
    if not len(inputs):
        raise DataError(f"{where} is empty.")
    return inputs.detach(), targets.detach()


def _labels(targets: Tensor, where: str) -> Tensor:
    """Class labels as int64, checked."""
    if targets.is_floating_point() or targets.is_complex():
        raise DataError(
            f"{where} has targets of {targets.dtype}, but this head learns classes: integer labels (N,). For numbers, "
            "make it with linear_head(features, outputs=how_many)."
        )
    if targets.ndim != 1:
        raise DataError(f"{where} has labels of shape {tuple(targets.shape)}. Give one for each example, (N,).")
    labels = targets.to(torch.int64)
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise DataError(f"{where} has the label {low}: classes are numbered from 0. Leave out what has no label.")
    if high >= _MOST_CLASSES:
        raise DataError(
            f"{where} has the label {high}, which would make a head of {high + 1:,} classes; the limit is "
            f"{_MOST_CLASSES:,}. Number the classes 0, 1, 2, …"
        )
    return labels


def _values(targets: Tensor, outputs: int, where: str) -> Tensor:
    """Targets of a regression, checked."""
    if not targets.is_floating_point():
        raise DataError(
            f"{where} has targets of {targets.dtype}, but this head learns {outputs} numbers: give floats "
            f"(N, {outputs}). For class labels, make it without `outputs`."
        )
    if targets.shape[1:] != (outputs,):
        raise DataError(f"{where} has targets of shape {tuple(targets.shape)}; this head learns (N, {outputs}).")
    if not bool(targets.isfinite().all()):
        raise DataError(f"{where} has targets that are not finite.")
    return targets
