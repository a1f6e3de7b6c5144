"""What others have published, beside what the same methods come to here: reached, exceeded, or missed by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..bench.catalog import JOINT
from ..bench.measures import Paired, spread
from ..bench.published import Published, published
from .cells import DASH, MEASURES, Cell, Row, Table, word
from .entries import Entry, Section

_POINT = 0.01
_AVERAGE = MEASURES[0]
_HEADINGS = (
    "protocol", "published for", "published, %", "here as", "at strength 1, %", "at the best strength (chosen on), %",
    "outcome", "best here without old data, %", "joint here, %", "of the published",
)  # fmt: skip
_HOW = (
    "Here: the same method at strength 1, where nothing is chosen, and at the best strength: chosen on held-out "
    "training data, or, where several were given and none was chosen so, on the test data, as most of the published "
    "ones. The outcome is that of the best strength where there is one. Reached: at most a point apart. Within chance: "
    "the seeds here are too far apart to tell (Student's t at 5 %). Not even jointly: training on all tasks at once, "
    "with all the data, misses it here too."
)


def claims(sections: Sequence[Section]) -> Table | None:
    """A row for each published number and each method of ours that does the same; nothing where none was run."""
    rows: list[Row] = []
    missing: list[str] = []
    for section in sections:
        for each in published(section.protocol):
            mine = [row for method in each.ours if (row := _claim(each, method, section))]
            rows += mine
            if not mine:
                missing.append(f"{each.method} on {section.title}")
    if not rows:
        return None
    notes = [_HOW, *([f"Not run here: {', '.join(missing)}."] if missing else [])]
    return Table("Every protocol", "Published, and here", _HEADINGS, tuple(rows), tuple(notes))


def _claim(each: Published, method: str, section: Section) -> Row | None:
    """A published number beside one of our methods; nothing where that was not run."""
    mine = [entry for entry in section.entries if entry.method == method]
    plain = _telling(entry for entry in mine if entry.strength in (None, 1))
    tuned, how = _tuned(mine)
    judged = tuned or plain
    if judged is None:
        return None
    joint = _telling(entry for entry in section.entries if entry.method == JOINT)
    best = section.rivals[0] if section.rivals and judged is not joint else None
    said = ["strength best on test data"] if each.chosen_on_test else []
    cells = (
        word(section.title),
        word(each.method),
        Cell(f"{each.accuracy:.1f}", each.accuracy),
        word(method),
        _cell(plain),
        _cell(tuned, how),
        _outcome(each.accuracy / 100, judged, joint),
        _cell(best, "" if best is None else f", {best.name}"),
        _cell(joint),
        word("; ".join([*said, *([each.note] if each.note else [])]) or DASH),
    )
    return Row(cells)


def _tuned(mine: Sequence[Entry]) -> tuple[Entry | None, str]:
    """The entry whose strength was chosen, or the best of several given ones; and what it was chosen on."""
    if chosen := _telling(entry for entry in mine if entry.chosen_on):
        return chosen, f" at {chosen.strength:g} ({chosen.chosen_on})"
    if len({entry.strength for entry in mine}) < 2:
        return None, ""
    best = max(mine, key=lambda entry: entry.average)
    return best, f" at {best.strength:g} (test data)"


def _outcome(claimed: float, judged: Entry, joint: Entry | None) -> Cell:
    apart = judged.average - claimed
    said = "exceeded by" if apart > _POINT else "reached" if apart >= -_POINT else "missed by"
    if said != "reached":
        said += f" {100 * abs(apart):.1f}"
        if not Paired(apart, *_error(judged)).clear:
            said += ", within chance" if len(judged.seeds) > 1 else ", one seed"
    if apart < -_POINT and joint is not None and joint.average - claimed < -_POINT:
        said += ", not even jointly"
    return Cell(said, 100 * apart)


def _error(entry: Entry) -> tuple[float, int]:
    """The standard error of an entry's average, and over how many seeds."""
    _, deviation = spread([run.average for run in entry.runs])
    return deviation / math.sqrt(len(entry.runs)), len(entry.runs)


def _cell(entry: Entry | None, told: str = "") -> Cell:
    if entry is None:
        return Cell(DASH, math.nan)
    cell = _AVERAGE.cell(entry.runs)
    return Cell(cell.text + told, cell.sort)


def _telling(entries: Iterable[Entry]) -> Entry | None:
    """Of a method's entries that stand apart, by version or device, the one of most seeds; of equals the newest."""
    return max(entries, key=lambda e: (len(e.seeds), max(one.date for one in e.results)), default=None)
