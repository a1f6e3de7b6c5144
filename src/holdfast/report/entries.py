"""What a page shows: a section for each protocol, in it an entry for each method at each strength."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..bench.catalog import METHODS
from ..bench.failures import Failed
from ..bench.jobs import numbers_of
from ..bench.measures import Run, best
from ..bench.protocols import PROTOCOLS
from ..bench.results import Result, differing, numbers


@dataclass(frozen=True)
class Entry:
    """One method at one strength: a result for each seed, and what the strength was chosen on, if it was chosen.

    Runs of another version of the code or on another device make an entry of their own, which `made_with` tells apart;
    of what was asked to stand together it is silent.
    """

    method: str
    strength: float | None
    chosen_on: str
    made_with: str
    results: tuple[Result, ...]

    @property
    def label(self) -> str:
        """The method and its strength, where it has one and its name does not say it."""
        said = "" if self.strength is None else f"strength {self.strength:g}"
        return self._called(f", {said}" if said and not self.method.endswith(said) else "")

    @property
    def name(self) -> str:
        """The label for a picture, where room is dear: strength 1 is what is meant when none is told."""
        told = self.strength is not None and (self.strength != 1 or self.chosen_on)
        return self._called(f" at {self.strength:g}" if told else "")

    def _called(self, strength: str) -> str:
        made = f" [{self.made_with}]" if self.made_with else ""
        return self.method + strength + (" (chosen)" if self.chosen_on else "") + made

    @property
    def runs(self) -> list[Run]:
        return [one.run for one in self.results]

    @property
    def seeds(self) -> list[int]:
        return [one.run.seed for one in self.results]

    @property
    def average(self) -> float:
        """The mean over seeds of the average accuracy."""
        return statistics.fmean(run.average for run in self.runs)

    @property
    def devices(self) -> list[str]:
        """What its runs were made on."""
        return sorted({device_of(one) for one in self.results})

    @property
    def by_the_book(self) -> bool:
        """Whether its runs have the protocol's own numbers: what was published is laid beside no others."""
        return all(by_the_book(one) for one in self.results)

    @property
    def in_turn(self) -> bool:
        return all(run.in_turn for run in self.runs)

    @property
    def keeps_data(self) -> bool:
        """Whether it may look at old data, as joint training does: no rival of those that may not."""
        known = METHODS.get(self.method)
        said = self.results[0].job.get("keeps_data")
        if said is None:  # of an older version, or by one who did not say
            said = self.method.lower().startswith("joint") if known is None else known.keeps_data
        return bool(said) or not self.in_turn


@dataclass(frozen=True)
class Section:
    """A protocol with its entries, the best first, and what a reader should know before comparing them.

    `tried` are the runs on validation data by which strengths were chosen, those of each number of tasks together;
    `device` is the one whose runs go first where those of several stand together; `failed` are jobs without a result.
    """

    protocol: str
    title: str
    tasks: int
    description: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    tried: tuple[tuple[Result, ...], ...] = ()
    device: str = ""
    failed: tuple[Failed, ...] = ()

    @property
    def results(self) -> list[Result]:
        return [one for entry in self.entries for one in entry.results]

    @property
    def rivals(self) -> list[Entry]:
        """The entries that keep no data, the best first. One lucky seed makes no yardstick, if others have more."""
        alone = [entry for entry in self.entries if not entry.keeps_data]
        return [entry for entry in alone if len(entry.seeds) > 1] or alone

    def chosen_over(self, entry: Entry) -> int:
        """Of how many tasks an entry's strength is the best one on validation data: the most, and none without runs."""
        found = [(tasks_of(tried[-1]), scores(tried).get(entry.method)) for tried in self.tried]
        return max((tasks for tasks, each in found if each and best(each) == entry.strength), default=0)

    @property
    def timed(self) -> list[Entry]:
        """The entries whose seconds can be compared: those of one device, or all, if every label tells its own."""
        return [entry for entry in self.entries if not self.device or entry.devices == [self.device]]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """What all its jobs have in common: the protocol in its numbers."""
        jobs = [one.job for one in self.results]
        apart = differing(jobs)
        common = {name: value for job in jobs for name, value in numbers(job).items() if name not in apart}
        return [(name.replace("_", " "), _plain(value)) for name, value in common.items() if value not in (None, "")]


def device_of(one: Result) -> str:
    return str(one.made.get("device") or "unknown")


def tasks_of(one: Result) -> int:
    return len(one.run.accuracy[-1])


def by_the_book(one: Result) -> bool:
    """Whether a run has the numbers of the protocol that it names, as the bench has them today."""
    known = PROTOCOLS.get(one.protocol)
    return known is not None and not differing([one.job, {"numbers": numbers_of(known)}])


def scores(tried: Sequence[Result], failed: Sequence[Failed] = ()) -> dict[str, dict[float, float]]:
    """The average accuracy of each method at each strength, by the newest run; nothing is worse than to have failed."""
    found: dict[str, dict[float, float]] = {}
    for other in failed:
        if other.strength is not None:
            found.setdefault(other.method, {})[other.strength] = -math.inf
    for one in tried:
        if one.strength is not None:
            found.setdefault(one.run.method, {})[one.strength] = one.run.average
    return dict(sorted(found.items()))


def distinct(values: Iterable[object]) -> list[str]:
    """What is there, once each and in order; nothing counts for nothing."""
    return sorted({_plain(value) for value in values if value not in (None, "")})


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
