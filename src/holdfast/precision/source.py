"""Where a precision came from: which data, how much of it, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import MismatchError


@dataclass(frozen=True)
class Source:
    """One dataset, or one prior, that a precision was computed from.

    `size` is how much data there was and `factor` how much of it counts now, after scaling and decay. `id` is a
    digest of the data and the weights, so that the same evidence is recognized when it comes by two ways; `weights`
    are fingerprints of the weights it was taken at. `added` says how often it was added to itself as it is: what is
    weighted, such as an average of draws, is meant to be, and is 0.
    """

    id: str
    size: float
    unit: str
    likelihood: str
    targets: str
    factor: float = 1.0
    weights: Mapping[str, str] = field(default_factory=dict, repr=False)
    added: int = field(default=1, repr=False, compare=False)

    @property
    def num_data(self) -> float:
        """How many units it stands for."""
        return self.size * self.factor

    @property
    def doubt(self) -> str:
        """Why it is to hold by and no curvature of the data's loss, in nats; nothing where it is one."""
        if self.likelihood.startswith("categorical(temperature="):
            return "The Fisher is of softened answers, which holds more: the quadratic overstates the rise."
        if not self.in_nats:
            return "The precision is a sensitivity (MAS) and not in nats: the quadratic ranks, and says no more."
        if self.likelihood == "path integral":
            return "The precision is a path integral (SI), with its damping and the noise of its steps: it is rough."
        if self.targets.startswith("variational, IVON, start"):
            return "The precision has in it what IVON started from: the quadratic overstates the rise."
        if ", tempered" in self.targets:
            return "The posterior was tempered, and is of other data than it counts: the quadratic is as far off."
        return ""

    @property
    def in_nats(self) -> bool:
        """Whether what it holds by is a loss at all."""
        return self.likelihood != "sensitivity"

    def __str__(self) -> str:
        return f"{self.likelihood}, {self.num_data:g} {self.unit}s" if self.unit else self.likelihood


def thinned(sources: tuple[Source, ...], factor: float) -> tuple[Source, ...]:
    """The sources counted `factor` times as much; what counts for nothing is no source."""
    if factor == 1:
        return sources
    return tuple(replace(source, factor=source.factor * factor, added=0) for source in sources if factor)


def joined(*parts: tuple[Iterable[str], tuple[Source, ...]]) -> tuple[Source, ...]:
    """The sources of a sum of parts, each given as the parameters it covers and its sources.

    One source over separate parameters is one dataset seen by two structures and counts once; over the same parameters
    it counts twice. Data counted in different units cannot be added.
    """
    found: dict[str, Source] = {}
    covered: dict[str, set[str]] = {}
    for names, sources in parts:
        for source in sources:
            known, here = found.get(source.id), covered.setdefault(source.id, set())
            if known is not None:
                twice = here & set(names)
                factor = known.factor + source.factor if twice else max(known.factor, source.factor)
                added = known.added + source.added if twice else max(known.added, source.added)
                source = replace(source, factor=factor, added=added)
            found[source.id] = source
            here.update(names)
    units = sorted({source.unit for source in found.values() if source.unit})
    if len(units) > 1:
        raise MismatchError(
            f"one precision counts {units[0]}s and the other {units[1]}s; their sum would have no unit. Recompute one "
            "of them with a likelihood of the other's unit."
        )
    return tuple(found.values())


def parted(sources: tuple[Source, ...], out: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources without what `out` counts of them."""
    gone = {source.id: source.factor for source in out}
    rest = (
        replace(source, factor=source.factor - gone[source.id], added=0) if source.id in gone else source
        for source in sources
    )
    return tuple(source for source in rest if source.factor > 1e-9)
