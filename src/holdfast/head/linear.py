"""The exact posterior of a linear layer on frozen features, under squared loss."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import file
from ..errors import ArgumentError, InertError, MismatchError, SingularError, require_number
from .features import RandomFeatures, designed, require_count, require_features
from .ridge import Ridge
from .statistics import Statistics, collected, joined

KEYS: file.Keys = {
    "format": int, "kind": str, "inputs": int, "features": int, "outputs": (int, type(None)), "columns": int,
    "prior": float, "noise": float, "num_data": int, "sources": dict, "sha256": str,
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class LinearHead:
    """y = Wᵀφ + ε, W ~ N(0, 1/prior), ε ~ N(0, noise): the posterior over W is Gaussian, and exact.

    Kept are sums over the examples, in which their order is lost: learned in parts, in any order, or merged from
    several places, it is the head that all data at once would give. A class that comes late is no exception, for its
    target was 0 in every example before. Sums are in float64, for Σφφᵀ squares the condition number of the features;
    `head.to(dtype=torch.float32)` takes half the memory and leaves the weights fewer digits.
    """

    statistics: Statistics
    prior: float = 1.0
    noise: float = 1.0
    outputs: int | None = None  # None: classes, as many as came
    random: RandomFeatures | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prior", require_number(self.prior, "a head's prior precision"))
        object.__setattr__(self, "noise", require_number(self.noise, "a head's noise variance", positive=True))
        if self.outputs is not None and self.statistics.outputs != require_count(self.outputs, "a head's outputs"):
            raise ArgumentError(f"the head has {self.outputs} outputs, its statistics {self.statistics.outputs}.")
        if self.random is not None and self.random.features != self.features:
            raise ArgumentError(f"there are {self.random.features} random features, and statistics of {self.features}.")

    def __repr__(self) -> str:
        features = repr(self.random) if self.random else f"{self.features} features"
        outputs = f"{len(self.classes)} classes" if self.outputs is None else f"{self.outputs} outputs"
        return f"LinearHead({features}, {outputs}, {self.num_data} examples)"

    @property
    def features(self) -> int:
        """How many the layer works on, without the constant one for its bias."""
        return len(self.statistics.gram) - 1

    @property
    def inputs(self) -> int:
        """How many numbers an input has."""
        return self.features if self.random is None else self.random.inputs

    @property
    def num_data(self) -> int:
        """How many examples it has learned from."""
        return self.statistics.num_data

    @property
    def classes(self) -> list[int]:
        """The labels it has seen."""
        if self.outputs is not None:
            raise ArgumentError(f"this head learns {self.outputs} numbers and knows no classes: use predict.")
        return [int(label) for label in self.statistics.squares.nonzero().flatten()]

    # Learning

    def updated(self, batches: Iterable[Any]) -> LinearHead:
        """What it knows after more data: an iterable of (features, targets), each example once.

        A call is one dataset, and is recognized when it comes again, however it is cut or shuffled.
        """
        new = collected(batches, self.random, self.inputs, self.outputs, self.statistics.gram)
        if new.sources.keys() & self.statistics.sources.keys():
            raise MismatchError(
                f"this head has learned from these {new.num_data} examples already, and would count them twice. One "
                "pass is exact: there are no epochs. Other data that happens to be the same belongs in one call."
            )
        return replace(self, statistics=joined([self.statistics, new]))

    def merged(self, *others: LinearHead, base: LinearHead | None = None) -> LinearHead:
        """The head that all their data at once would give; the prior they share counts once.

        Heads that went on from one head share its data: name it as `base`, and it counts once.
        """
        for other in (*others, *([] if base is None else [base])):
            self._require_alike(other)
        parts = [head.statistics for head in (self, *others)]
        return replace(self, statistics=joined(parts, None if base is None else base.statistics))

    def with_prior(self, prior: float, noise: float | None = None) -> LinearHead:
        """The same data under another prior precision, and another noise variance: as if from the start."""
        return replace(self, prior=prior, noise=self.noise if noise is None else noise)

    def tuned(self, ridges: Iterable[float] | None = None) -> LinearHead:
        """The prior and the noise of highest evidence, from what is kept: no data is needed, and none held out.

        For each ridge λ = prior · noise the best noise is (Σy² − Σφyᵀ·W) / (N·C). Without `ridges`, decades from the
        mean of Σφ² down are tried, nine or as many as the sums have digits for.
        """
        self._require_data()
        scale = float(self.statistics.gram.diagonal().mean())
        tried = [scale / 10**k for k in range(9)] if ridges is None else list(ridges)
        if not tried:
            raise ArgumentError("there are no ridges to choose from.")
        found: list[tuple[float, float, float]] = []
        for value in tried:
            ridge = Ridge(self.statistics, require_number(value, "a ridge", positive=True))
            try:
                noise = ridge.best_noise()
            except SingularError:
                if ridges is None and found:  # smaller ones will not do either
                    break
                raise
            found.append((float(ridge.log_evidence(noise)), ridge.value, noise))
        _, best, noise = max(found)
        return self.with_prior(best / noise, noise)

    # What it knows

    @property
    def precision(self) -> Tensor:
        """Λ = prior·I + Σφφᵀ / noise, of each output's weights; the last is its bias."""
        eye = torch.eye(len(self.statistics.gram)).to(self.statistics.gram)
        return self.prior * eye + self.statistics.gram / self.noise

    @property
    def mean(self) -> Tensor:
        """Λ⁻¹ Σφyᵀ / noise: (features + 1, outputs)."""
        self._require_data()
        return self._ridge.solution

    def predict(self, inputs: Tensor) -> Tensor:
        """The mean of each output, Wᵀφ: (N, outputs); for classes, a score each."""
        mean = self.mean
        with torch.autocast(mean.device.type, enabled=False):
            return torch.cat([phi @ mean for phi in self._designed(inputs)])

    def variance(self, inputs: Tensor) -> Tensor:
        """The variance of any of the outputs, φᵀΛ⁻¹φ + noise: (N,)."""
        self._require_data()
        return self.noise * (1 + torch.cat([self._ridge.spread(phi) for phi in self._designed(inputs)]))

    def classify(self, inputs: Tensor) -> Tensor:
        """The class of the highest score, among those seen: (N,)."""
        known = torch.tensor(self.classes, device=self.statistics.gram.device)
        return known[self.predict(inputs)[:, known].argmax(1)]

    def log_evidence(self) -> Tensor:
        """log p(targets | inputs) in nats, exact: the sum, over the data in any order, of each given what came before.

        Heads are compared by it at one number of outputs.
        """
        if not self.prior:
            raise SingularError("a flat prior has no evidence. Give a proper one: head.with_prior(1e-3).")
        return self._ridge.log_evidence(self.noise)

    def module(self) -> nn.Module:
        """The mean as an `nn.Linear` to put on a model; with random features, they and a ReLU stand in front."""
        last = _linear(self.mean[:-1].T, self.mean[-1])
        if self.random is None:
            return last
        return nn.Sequential(_linear(self.random.weight).requires_grad_(False), nn.ReLU(), last)

    # The file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head to `path`, whole or not at all."""
        file.write(path, self._facts(), self._tensors(), _rebuilt)

    @staticmethod
    def load(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> LinearHead:
        """Read a head, checking its form, its checksum and its values; nothing in it is executed."""
        return file.read(path, file.HEAD, KEYS, _rebuilt).to(device)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LinearHead:
        """The same on another device, or with sums in another floating dtype."""
        random = None if self.random is None else self.random.to(device)
        return replace(self, statistics=self.statistics.to(device, dtype), random=random)

    def _facts(self) -> dict[str, Any]:
        return {
            "format": file.FORMAT, "kind": file.HEAD, "inputs": self.inputs, "features": self.features,
            "outputs": self.outputs, "columns": self.statistics.outputs, "prior": self.prior, "noise": self.noise,
            "num_data": self.num_data, "sources": self.statistics.sources,
        }  # fmt: skip

    def _tensors(self) -> dict[str, Tensor]:
        known = self.statistics
        random = {} if self.random is None else {"random.weight": self.random.weight}
        return {"gram": known.gram, "cross": known.cross, "squares": known.squares, **random}

    @functools.cached_property
    def _ridge(self) -> Ridge:
        return Ridge(self.statistics, self.prior * self.noise)

    def _designed(self, inputs: Tensor) -> Iterator[Tensor]:
        """φ of checked inputs, some thousand rows at a time: random features are many more than the inputs."""
        require_features(inputs, self.inputs, "the batch")
        return designed(inputs, self.random, self.statistics.gram)

    def _require_data(self) -> None:
        if not self.num_data:
            raise InertError("this head has learned nothing yet: head = head.updated(batches).")

    def _require_alike(self, other: LinearHead) -> None:
        """Raise unless the two are heads of one model: the same features, outputs, prior and noise."""
        if not isinstance(other, LinearHead):
            raise ArgumentError(f"a LinearHead merges with its like, got {type(other).__name__}.")
        if (self.features, self.inputs) != (other.features, other.inputs) or not _same(self.random, other.random):
            raise MismatchError(
                f"{self!r} and {other!r} work on different features. Make them from one feature map: the same "
                "backbone, or the same random_features(..., seed=...)."
            )
        if self.outputs != other.outputs:
            raise MismatchError(f"{self!r} and {other!r} learn different things: their `outputs` must agree.")
        if (self.prior, self.noise) != (other.prior, other.noise):
            raise MismatchError(
                f"one head has prior {self.prior:g} and noise {self.noise:g}, the other {other.prior:g} and "
                f"{other.noise:g}. Make them agree first: other.with_prior(head.prior, head.noise)."
            )


def linear_head(
    features: int | RandomFeatures, *, outputs: int | None = None, prior: float = 1.0, noise: float = 1.0
) -> LinearHead:
    """A head that has learned nothing yet, on so many features or on random ones made of its inputs.

    Without `outputs` it learns classes, which join as they come; with them, so many numbers. Its weights start as
    N(0, 1/prior), the bias too; `noise` is the variance of the targets. Predictions depend on prior · noise alone.

    >>> head = linear_head(2).updated([(torch.eye(2), torch.tensor([0, 1]))])
    >>> head.classify(torch.eye(2))
    tensor([0, 1])
    """
    random = features if isinstance(features, RandomFeatures) else None
    width = require_count(features, "a head's features") if random is None else random.features
    columns = 0 if outputs is None else require_count(outputs, "a head's outputs")
    return LinearHead(Statistics.empty(width + 1, columns), prior, noise, outputs, random)


def _rebuilt(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LinearHead:
    """The head that `facts` and `tensors` describe; the values check themselves as they are made."""
    sources = {str(key): int(count) for key, count in facts["sources"].items()}
    statistics = Statistics(tensors["gram"], tensors["cross"], tensors["squares"], sources)
    random = RandomFeatures(tensors["random.weight"]) if "random.weight" in tensors else None
    head = LinearHead(statistics, facts["prior"], facts["noise"], facts["outputs"], random)
    said, found = (file.canonical(each) for each in (file.unsigned(facts), head._facts()))
    if said != found or head._tensors().keys() != tensors.keys():
        raise ArgumentError("what it says of itself is not what it holds.")
    return head


def _same(a: RandomFeatures | None, b: RandomFeatures | None) -> bool:
    return torch.equal(a.weight.cpu(), b.weight.cpu()) if a and b else a is b


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer with these weights, in torch's default dtype; making it draws no random numbers."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer = layer.to_empty(device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer
