"""The parts of a report's tables as plain data: what a cell shows, what it is sorted by, what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..bench.measures import Run, spread

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """A text, and the number or word it is sorted by. NaN, where there is nothing to sort by, comes last."""

    text: str
    sort: float | str

    @property
    def key(self) -> str:
        """What it is sorted by, as a browser reads it."""
        if self.sort in (math.inf, -math.inf):
            return "Infinity" if self.sort == math.inf else "-Infinity"
        return "" if self.sort != self.sort else str(self.sort)


@dataclass(frozen=True)
class Row:
    """Cells under the headings; `published` where others measured it."""

    cells: tuple[Cell, ...]
    published: bool = False


@dataclass(frozen=True)
class Table:
    """A table of one protocol. `best_first` is the column in whose falling order the rows come."""

    protocol: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    best_first: int | None = None

    def numeric(self, column: int) -> bool:
        """Whether a column is one of numbers."""
        return all(isinstance(row.cells[column].sort, float) for row in self.rows)


@dataclass(frozen=True)
class Measure:
    """A number of a run: its heading and its unit, its raw name, and how many digits it is worth."""

    heading: str
    name: str
    value: Callable[[Run], float]
    scale: float = 1.0
    digits: int | None = None

    def cell(self, runs: Sequence[Run]) -> Cell:
        """Mean ± standard deviation over the runs; of a single one, the number alone."""
        values = [self.scale * self.value(run) for run in runs]
        if any(map(math.isnan, values)):
            return Cell(DASH, math.nan)
        if any(map(math.isinf, values)):
            return Cell("∞", math.inf)
        mean, deviation = spread(values)
        digits = _digits(mean) if self.digits is None else self.digits
        alone = len(values) == 1 or (deviation == 0 and self.digits is None)  # a size is what it is, in every run
        return Cell(shown(mean, digits) + ("" if alone else f" ± {shown(deviation, digits)}"), mean)


MEASURES: tuple[Measure, ...] = (
    Measure("average, %", "average", lambda run: run.average, 100, 2),
    Measure("forgotten, points", "forgetting", lambda run: run.forgetting, 100, 2),
    Measure("each when new, %", "newest", lambda run: run.newest, 100, 2),
    Measure("backward transfer, points", "backward", lambda run: run.backward, 100, 2),
    Measure("forward transfer, points", "forward", lambda run: run.forward, 100, 2),
    Measure("lowest after a switch, %", "lowest", lambda run: run.lowest_after_a_switch, 100, 2),
    Measure("stability gap, points", "gap", lambda run: run.gap, 100, 2),
    Measure("nll, nats", "nll", lambda run: run.average_nll, 1, 3),
    Measure("learning, s", "learning_seconds", lambda run: _total(run.learning_seconds)),
    Measure("remembering, s", "remembering_seconds", lambda run: _total(run.remembering_seconds)),
    Measure("kept, MB", "kept_bytes", lambda run: _kept(run.kept_bytes, run.at_once), 1e-6),
    Measure("peak in learning, MB", "learning_bytes", lambda run: _most(run.learning_bytes), 1e-6),
    Measure("peak in remembering, MB", "remembering_bytes", lambda run: _most(run.remembering_bytes), 1e-6),
)


def shown(number: float, digits: int) -> str:
    """A number for reading: a true minus sign, thousands apart, no minus before a zero; of what diverged the size."""
    return (f"{number:z,.{digits}f}" if abs(number) < 1e9 else f"{number:.2e}").replace("-", "−")


def word(text: str) -> Cell:
    return Cell(text, text.casefold())


def counted(seeds: int) -> Cell:
    return Cell("1 seed" if seeds == 1 else str(seeds), float(seeds))


def _digits(amount: float) -> int:
    """Of seconds and megabytes, about three digits that count."""
    return next((digits for below, digits in ((0.1, 4), (10, 2), (100, 1)) if 0 < abs(amount) < below), 0)


def _kept(amounts: Sequence[float], at_once: bool) -> float:
    """What is carried on at the end. Tasks learned at once carry nothing on: their data is kept, and not counted."""
    return amounts[-1] if amounts and not at_once else math.nan


def _most(amounts: Sequence[float]) -> float:
    return max(amounts, default=0) or math.nan  # 0: nothing told


def _total(amounts: Sequence[float]) -> float:
    return math.fsum(amounts) if amounts else math.nan
