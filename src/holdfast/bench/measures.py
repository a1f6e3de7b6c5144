"""What a run is judged by: what is known at the end, what was forgotten on the way, and what it cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """One method, one seed. `accuracy[i][j]` is the share right on task j after the ith stage, every task tested.

    A stage is a task learned; joint training has a single stage, in which all are. `nll` is the same table in nats per
    example (or token) of the test data. `untrained` is the accuracy before anything was learned; `lowest[i]` is the
    lowest that the mean accuracy on the earlier tasks fell to while task i was learned, and `settled[i]` what it came
    to at the end of that, both on a part of the test data. Seconds and bytes are given stage by stage: `kept_bytes` is
    what is carried on, the others the most that was in use beyond what was before the run.
    """

    method: str
    seed: int
    accuracy: list[list[float]]
    nll: list[list[float]] = field(default_factory=list)
    untrained: list[float] = field(default_factory=list)
    lowest: list[float | None] = field(default_factory=list)
    settled: list[float | None] = field(default_factory=list)
    learning_seconds: list[float] = field(default_factory=list)
    remembering_seconds: list[float] = field(default_factory=list)
    kept_bytes: list[int] = field(default_factory=list)
    learning_bytes: list[int] = field(default_factory=list)
    remembering_bytes: list[int] = field(default_factory=list)

    @property
    def in_turn(self) -> bool:
        """Whether the tasks were learned one after another, so that there is something to forget."""
        return len(self.accuracy) == len(self.accuracy[-1]) > 1

    @property
    def at_once(self) -> bool:
        """Whether all tasks were learned together, which keeps the data of all of them."""
        return len(self.accuracy) < len(self.accuracy[-1])

    @property
    def average(self) -> float:
        """The mean accuracy over all tasks at the end."""
        return statistics.fmean(self.accuracy[-1])

    @property
    def average_nll(self) -> float:
        """The mean negative log-likelihood over all tasks at the end."""
        return statistics.fmean(self.nll[-1]) if self.nll else math.nan

    @property
    def forgetting(self) -> float:
        """How far the earlier tasks fell, on average, from their best since they were learned (Chaudhry 2018)."""
        if not self.in_turn:
            return math.nan
        last = len(self.accuracy) - 1
        best = [max(row[task] for row in self.accuracy[task:last]) for task in range(last)]
        return statistics.fmean(high - end for high, end in zip(best, self.accuracy[-1], strict=False))

    @property
    def newest(self) -> float:
        """The mean accuracy on each task right after learning it: how well it still learns."""
        return statistics.fmean(row[task] for task, row in enumerate(self.accuracy)) if self.in_turn else math.nan

    @property
    def backward(self) -> float:
        """Backward transfer: what learning on did to the earlier tasks since each was new (Lopez-Paz 2017)."""
        if not self.in_turn:
            return math.nan
        end = self.accuracy[-1]
        return statistics.fmean(end[task] - row[task] for task, row in enumerate(self.accuracy[:-1]))

    @property
    def forward(self) -> float:
        """Forward transfer: how much better a task is known just before its turn than by the untrained model."""
        if not self.in_turn or not self.untrained:
            return math.nan
        return statistics.fmean(
            row[task] - self.untrained[task] for task, row in enumerate(self.accuracy[:-1], 1)
        )  # fmt: skip

    @property
    def lowest_after_a_switch(self) -> float:
        """How low the earlier tasks fell, on average over the switches, while a new one was learned."""
        found = [low for low in self.lowest if low is not None]
        return statistics.fmean(found) if found else math.nan

    @property
    def gap(self) -> float:
        """The stability gap: how far the earlier tasks dipped, at worst after a switch, below where they ended up."""
        pairs = zip(self.settled, self.lowest, strict=False)
        dips = [end - low for end, low in pairs if end is not None and low is not None]
        return statistics.fmean(dips) if dips else math.nan

    @property
    def seconds(self) -> float:
        """All the learning and remembering."""
        return sum(self.learning_seconds) + sum(self.remembering_seconds)

    @property
    def peak_bytes(self) -> int:
        """The most memory in use at any time: a GPU's, or the whole process's. 0 where nothing tells."""
        return max([*self.learning_bytes, *self.remembering_bytes], default=0)

    @property
    def so_far(self) -> list[float]:
        """After each stage, the mean accuracy on the tasks learned until then."""
        return [statistics.fmean(row[: stage + 1]) for stage, row in enumerate(self.accuracy)] if self.in_turn else []


def best(scores: Mapping[float, float]) -> float:
    """The strength with the best score; of several such, the smallest."""
    return max(sorted(scores), key=lambda strength: scores[strength])


def at_an_end(scores: Mapping[float, float]) -> str:
    """Whether the best strength is the "largest" or the "smallest" of those tried, beyond which none was; else "".

    Nothing is beyond 0, and where several are the best, there is no telling.
    """
    taken = best(scores)
    if not taken or list(scores.values()).count(scores[taken]) > 1:
        return ""
    return "largest" if taken == max(scores) else "smallest" if taken == min(scores) else ""


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; not a number where one of them is none."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percent(values: Sequence[float]) -> str:
    """Shares as a mean in percent ± the standard deviation over seeds; a dash where there is nothing to tell."""
    mean, deviation = spread([100 * value for value in values])
    if math.isnan(mean):
        return "–"
    return f"{mean:.1f} ± {deviation:.1f}" if len(values) > 1 else f"{mean:.1f}"


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each method, in the order the methods first appear."""
    groups: dict[str, list[Run]] = {}
    for one in runs:
        groups.setdefault(one.method, []).append(one)
    return groups


@dataclass(frozen=True)
class Paired:
    """Two methods on the same seeds: the mean of the differences in average accuracy, and its standard error."""

    difference: float
    error: float
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the difference is beyond chance: Student's t at 5 %, both sides."""
        return self.seeds > 1 and abs(self.difference) > _t(self.seeds - 1) * self.error


def paired(first: Sequence[Run], second: Sequence[Run]) -> Paired | None:
    """`first` minus `second`, seed by seed; nothing where they share no seed."""
    other = {run.seed: run.average for run in second}
    differences = [run.average - other[run.seed] for run in first if run.seed in other]
    if not differences:
        return None
    mean, deviation = spread(differences)
    return Paired(mean, deviation / math.sqrt(len(differences)), len(differences))


# Student's t, two-sided 5 %, by degrees of freedom; beyond, from the normal's, in falling powers of them (Cornish and
# Fisher 1937): to 2e-4.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def _t(freedom: int) -> float:
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2 + 2.5559 / freedom**3
