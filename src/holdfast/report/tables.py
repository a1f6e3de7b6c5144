"""The tables of a report: what was published, and for each protocol a leaderboard, comparisons and the strengths."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..bench.failures import Failed
from ..bench.measures import at_an_end, paired
from ..bench.published import Published, published
from ..bench.results import Result
from .cells import DASH, MEASURES, Cell, Row, Table, counted, shown, word
from .claims import beside, claims
from .entries import Entry, Section, scores, tasks_of
from .sections import sections

_KEPT = [measure.name for measure in MEASURES].index("kept_bytes")


def tables(results: Sequence[Result], *, across: Collection[str] = (), failed: Sequence[Failed] = ()) -> list[Table]:
    """What was published, then for each protocol the leaderboard, the comparisons and the strengths, if there are."""
    found = sections(results, across=across, failed=failed)
    made = [
        claims(found),
        *(table for each in found for table in (leaderboard(each), comparisons(each), *sweeps(each))),
    ]
    return [table for table in made if table is not None]


def leaderboard(section: Section) -> Table:
    """Every method by its average accuracy, ours and the published ones, the best first."""
    # Labels do not tell devices that stand together, and seconds compare on one alone.
    together = bool(section.device) and any(entry.devices != [section.device] for entry in section.entries)
    rows = [*(_measured(entry, together) for entry in section.entries), *map(_published, beside(section))]
    average = 3
    rows.sort(key=lambda row: -float(row.cells[average].sort))
    return Table(
        section.title,
        "Leaderboard",
        ("method", "strength", "seeds", *(measure.heading for measure in MEASURES), "source"),
        tuple(rows),
        (*section.notes, *_not_beside(section)),
        best_first=average,
    )


def _not_beside(section: Section) -> list[str]:
    """That what was published on a protocol is of other numbers than all the runs here, where it is."""
    if beside(section) or not published(section.protocol):
        return []
    return [
        f"What was published on {section.protocol} is not laid beside these runs: their numbers are not the protocol's "
        "own, as this version has them."
    ]


def comparisons(section: Section) -> Table | None:
    """Every method against the best one that keeps no data, seed by seed; nothing where there is no other."""
    rivals = section.rivals
    if not rivals:
        return None
    passed_over = len(rivals) < sum(not entry.keeps_data for entry in section.entries)
    best, several = rivals[0], " and have more than one seed" if passed_over else ""
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


def sweeps(section: Section) -> list[Table]:
    """What each method came to on validation data at each strength: a table for each number of tasks that was tried."""
    return [table for tried in section.tried if (table := _sweep(section, tried)) is not None]


def _sweep(section: Section, tried: Sequence[Result]) -> Table | None:
    average, size = MEASURES[0], tasks_of(tried[-1])
    failed = [one for one in section.failed if one.validating and one.tasks in (size, None)]
    cells = {(one.method, one.strength): Cell("failed", math.nan) for one in failed}
    cells |= {(one.run.method, one.strength): average.cell([one.run]) for one in tried}
    methods = sorted({method for method, strength in cells if strength is not None})
    strengths = sorted({strength for _, strength in cells if strength is not None})
    if not methods:
        return None
    ends = [
        f"{method} did best at the {end} strength that was tried: beyond it may be better ones."
        for method, each in scores(tried, failed).items()
        if len(each) > 1 and max(each.values()) >= 0 and (end := at_an_end(each))
    ]
    return Table(
        section.title,
        "Strengths on validation data" + (f", {size} tasks" if len(section.tried) > 1 else ""),
        ("method", *(f"{strength:g}" for strength in strengths)),
        tuple(
            Row((word(method), *(cells.get((method, strength), Cell(DASH, math.nan)) for strength in strengths)))
            for method in methods
        ),
        (
            f"Average accuracy in percent on held-out training data, {size} tasks, seed {tried[-1].run.seed}. "
            "Where a strength is chosen, it is the best one, and of equals the smallest.",
            *_chosen_otherwise(section, methods),
            *ends,
        ),
    )


def _chosen_otherwise(section: Section, methods: Collection[str]) -> list[str]:
    """Which strengths that were chosen are the best of no table here."""
    chosen = [entry for entry in section.entries if entry.chosen_on and entry.method in methods]
    said = (
        f"{entry.method} stands at {entry.strength:g}: it was chosen from other runs than these."
        for entry in chosen
        if entry.strength is not None and not section.chosen_over(entry)
    )
    return list(dict.fromkeys(said))


def _measured(entry: Entry, together: bool) -> Row:
    count = len(entry.seeds)
    chosen = f", chosen on {entry.chosen_on}" if entry.chosen_on else ""
    strength = Cell(DASH, math.nan) if entry.strength is None else Cell(f"{entry.strength:g}{chosen}", entry.strength)
    numbers = [measure.cell(entry.runs) for measure in MEASURES]
    if any(run.at_once for run in entry.runs):
        numbers[_KEPT] = Cell("all data", math.inf)
    source = ", ".join(filter(None, ["measured", entry.made_with, " and ".join(entry.devices) if together else ""]))
    return Row((word(entry.method), strength, counted(count), *numbers, word(source)))


def _published(one: Published) -> Row:
    dash = Cell(DASH, math.nan)
    strength = Cell("chosen on test data", math.nan) if one.chosen_on_test else dash
    source = f"{one.source}; {one.note}" if one.note else one.source
    average = Cell(f"{one.accuracy:g}", one.accuracy)
    rest = [dash] * (len(MEASURES) - 1)
    return Row((word(f"{one.method} (published)"), strength, dash, average, *rest, word(source)), published=True)


def _against(entry: Entry, best: Entry) -> Row | None:
    found = paired(entry.runs, best.runs)
    if found is None:
        return None
    difference, error = 100 * found.difference, 100 * found.error
    text = shown(difference, 2) + (f" ± {shown(error, 2)}" if found.seeds > 1 else "")
    verdict = ("better" if difference > 0 else "worse") if found.clear else "not clear"
    return Row((word(entry.label), counted(found.seeds), Cell(text, difference), word(verdict)))
