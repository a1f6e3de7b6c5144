"""The tables of a report as plain data: what a cell shows, and what it is sorted by."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..bench.measures import Run, at_an_end, best, paired, spread
from ..bench.published import Published, published
from ..bench.results import Result
from .entries import Entry, Section
from .sections import sections

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
    Measure("kept, MB", "kept_bytes", lambda run: run.kept_bytes[-1] if run.kept_bytes else math.nan, 1e-6),
    Measure("peak in learning, MB", "learning_bytes", lambda run: _most(run.learning_bytes), 1e-6),
    Measure("peak in remembering, MB", "remembering_bytes", lambda run: _most(run.remembering_bytes), 1e-6),
)

_KEPT = [measure.name for measure in MEASURES].index("kept_bytes")


def tables(results: Sequence[Result], *, across: Collection[str] = ()) -> list[Table]:
    """For each protocol the leaderboard, the paired comparisons and the strengths tried, where there are any."""
    found = sections(results, across=across)
    made = [table(section) for section in found for table in (leaderboard, comparisons, sweep)]
    return [table for table in made if table is not None]


def leaderboard(section: Section) -> Table:
    """Every method by its average accuracy, ours and the published ones, the best first."""
    # Labels do not tell devices that stand together, and seconds compare on one alone.
    together = bool(section.device) and any(entry.devices != [section.device] for entry in section.entries)
    rows = [*(_measured(entry, together) for entry in section.entries), *map(_published, published(section.protocol))]
    average = 3
    rows.sort(key=lambda row: -float(row.cells[average].sort))
    return Table(
        section.title,
        "Leaderboard",
        ("method", "strength", "seeds", *(measure.heading for measure in MEASURES), "source"),
        tuple(rows),
        section.notes,
        best_first=average,
    )


def comparisons(section: Section) -> Table | None:
    """Every method against the best one that keeps no data, seed by seed; nothing where there is no other."""
    alone = [entry for entry in section.entries if not entry.keeps_data]
    # One lucky seed makes no yardstick, if there are methods with more.
    rivals = [entry for entry in alone if len(entry.seeds) > 1] or alone
    if not rivals:
        return None
    best, several = rivals[0], " and have more than one seed" if len(rivals) < len(alone) else ""
    rows = [row for entry in section.entries if entry is not best and (row := _against(entry, best))]
    if not rows:
        return None
    return Table(
        section.title,
        f"Compared with {best.label}, seed by seed",
        ("method", "shared seeds", "difference, points", "beyond chance"),
        tuple(sorted(rows, key=lambda row: -float(row.cells[2].sort))),
        (
            f"{best.label} has the best average accuracy of the methods that keep no data{several}. Difference: the "
            "mean over shared seeds, ± its standard error. Beyond chance: Student's t at 5 %, each comparison for "
            "itself, so one in twenty is beyond it by chance.",
        ),
        best_first=2,
    )


def sweep(section: Section) -> Table | None:
    """What each method came to on validation data at each strength; nothing where none was chosen so."""
    newest = {(one.run.method, one.strength): one for one in section.tried if one.strength is not None}
    if not newest:
        return None
    strengths = sorted({strength for _, strength in newest})
    methods = sorted({method for method, _ in newest})
    rows = [[newest.get((method, strength)) for strength in strengths] for method in methods]
    average = MEASURES[0]
    run = section.tried[-1].run
    scores = {
        method: {s: one.run.average for s, one in zip(strengths, row, strict=True) if one}
        for method, row in zip(methods, rows, strict=True)
    }
    others = [
        f"{entry.method} stands at {entry.strength:g}: it was chosen from other runs than these."
        for entry in section.entries
        if entry.chosen_on and entry.method in scores and entry.strength != best(scores[entry.method])
    ]
    ends = [
        f"{method} did best at the {end} strength that was tried: beyond it may be better ones."
        for method, each in scores.items()
        if len(each) > 1 and (end := at_an_end(each))
    ]
    return Table(
        section.title,
        "Strengths on validation data",
        ("method", *(f"{strength:g}" for strength in strengths)),
        tuple(
            Row((_word(method), *(average.cell([one.run]) if one else Cell(DASH, math.nan) for one in row)))
            for method, row in zip(methods, rows, strict=True)
        ),
        (
            f"Average accuracy in percent on held-out training data, {len(run.accuracy[-1])} tasks, seed {run.seed}. "
            "Where a strength is chosen, it is the best one, and of equals the smallest.",
            *dict.fromkeys(others),
            *ends,
        ),
    )


def shown(number: float, digits: int) -> str:
    """A number for reading: a true minus sign, thousands apart, no minus before a zero; of what diverged the size."""
    return (f"{number:z,.{digits}f}" if abs(number) < 1e9 else f"{number:.2e}").replace("-", "−")


def _measured(entry: Entry, together: bool) -> Row:
    count = len(entry.seeds)
    chosen = f", chosen on {entry.chosen_on}" if entry.chosen_on else ""
    strength = Cell(DASH, math.nan) if entry.strength is None else Cell(f"{entry.strength:g}{chosen}", entry.strength)
    numbers = [measure.cell(entry.runs) for measure in MEASURES]
    if any(len(run.accuracy) < len(run.accuracy[-1]) for run in entry.runs):  # all at once: it carries nothing on
        numbers[_KEPT] = Cell("all data", math.inf)
    source = ", ".join(filter(None, ["measured", entry.made_with, " and ".join(entry.devices) if together else ""]))
    return Row((_word(entry.method), strength, _count(count), *numbers, _word(source)))


def _published(one: Published) -> Row:
    dash = Cell(DASH, math.nan)
    strength = Cell("chosen on test data", math.nan) if one.chosen_on_test else dash
    source = f"{one.source}; {one.note}" if one.note else one.source
    average = Cell(shown(one.accuracy, 1), one.accuracy)
    rest = [dash] * (len(MEASURES) - 1)
    return Row((_word(f"{one.method} (published)"), strength, dash, average, *rest, _word(source)), published=True)


def _against(entry: Entry, best: Entry) -> Row | None:
    found = paired(entry.runs, best.runs)
    if found is None:
        return None
    difference, error = 100 * found.difference, 100 * found.error
    text = shown(difference, 2) + (f" ± {shown(error, 2)}" if found.seeds > 1 else "")
    verdict = ("better" if difference > 0 else "worse") if found.clear else "not clear"
    return Row((_word(entry.label), _count(found.seeds), Cell(text, difference), _word(verdict)))


def _word(text: str) -> Cell:
    return Cell(text, text.casefold())


def _count(seeds: int) -> Cell:
    return Cell("1 seed" if seeds == 1 else str(seeds), float(seeds))


def _digits(amount: float) -> int:
    """Of seconds and megabytes, about three digits that count."""
    return next((digits for below, digits in ((0.1, 4), (10, 2), (100, 1)) if 0 < abs(amount) < below), 0)


def _most(amounts: Sequence[float]) -> float:
    return max(amounts, default=0) or math.nan  # 0: nothing told


def _total(amounts: Sequence[float]) -> float:
    return math.fsum(amounts) if amounts else math.nan
