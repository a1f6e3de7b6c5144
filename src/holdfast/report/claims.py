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
    "training data (over the most tasks, where that was done twice), or, where several were given and none was chosen "
    "so, on the test data, as most of the published ones. The outcome is that of the best strength where there is one. "
    "Reached: at most a point apart, to a tenth. Within chance: the seeds here are too far apart to tell (Student's t "
    "at 5 %). Not even jointly: training on all tasks at once, with all the data, misses it here too."
)


def claims(sections: Sequence[Section]) -> Table | None:
    """A row for each published number and each method of ours that does the same; nothing where none was run."""
    rows: list[Row] = []
    missing: list[str] = []
    for section in sections:
        for each in beside(section):
            mine = [row for method in each.ours if (row := _claim(each, method, section))]
            rows += mine
            if not mine:
                missing.append(f"{each.method} on {section.title}")
    if not rows:
        return None
    notes = [_HOW, *([f"Not run here: {', '.join(missing)}."] if missing else [])]
    return Table("Every protocol", "Published, and here", _HEADINGS, tuple(rows), tuple(notes))


def beside(section: Section) -> list[Published]:
    """What was published on a section's protocol, if any run of it has the protocol's own numbers."""
    return published(section.protocol) if any(entry.by_the_book for entry in section.entries) else []


def _claim(each: Published, method: str, section: Section) -> Row | None:
    """A published number beside one of our methods; nothing where that was not run."""
    mine = _own(section, method)
    plain = _telling(entry for entry in mine if entry.strength in (None, 1))
    tuned, how = _tuned(section, method)
    judged = tuned or plain
    if judged is None:
        return None
    joint = _telling(_own(section, JOINT))
    rivals = [entry for entry in section.rivals if entry.by_the_book]
    best = rivals[0] if rivals and judged is not joint else None
    said = ["strength best on test data"] if each.chosen_on_test else []
    cells = (
        word(section.title),
        word(each.method),
        Cell(f"{each.accuracy:g}", each.accuracy),
        word(method),
        _cell(plain),
        _cell(tuned, how),
        _outcome(each.accuracy / 100, judged, joint),
        _cell(best, "" if best is None else f", {_named(section, best)}"),
        _cell(joint),
        word("; ".join([*said, *([each.note] if each.note else [])]) or DASH),
    )
    return Row(cells)


def _own(section: Section, method: str) -> list[Entry]:
    return [entry for entry in section.entries if entry.method == method and entry.by_the_book]


def _tuned(section: Section, method: str) -> tuple[Entry | None, str]:
    """The entry whose strength was chosen, or the best of several given ones; and what it was chosen on."""
    mine = [entry for entry in _own(section, method) if entry.strength is not None]
    if chosen := [entry for entry in mine if entry.chosen_on]:
        most = max(map(section.chosen_over, chosen))
        found = _telling(entry for entry in chosen if section.chosen_over(entry) == most)
        return found, "" if found is None else f" at {found.strength:g} ({found.chosen_on})"
    several = [entry for entry in mine if len(entry.seeds) > 1] or mine  # one lucky seed is no best
    if len({entry.strength for entry in several}) < 2:
        return None, ""
    best = max(several, key=lambda entry: entry.average)
    return best, f" at {best.strength:g} (test data)"


def _named(section: Section, entry: Entry) -> str:
    """An entry's name, with what its strength was chosen on."""
    tuned, how = _tuned(section, entry.method)
    return f"{entry.method}{how}" if entry is tuned else entry.name


def _outcome(claimed: float, judged: Entry, joint: Entry | None) -> Cell:
    apart = _apart(judged, claimed)
    said = "exceeded by" if apart > _POINT else "reached" if apart >= -_POINT else "missed by"
    if said != "reached":
        said += f" {100 * abs(apart):.1f}"
    if len(judged.seeds) == 1:
        said += ", one seed"
    elif abs(apart) > _POINT and not Paired(apart, *_error(judged)).clear:
        said += ", within chance"
    if apart < -_POINT and joint is not None and _apart(joint, claimed) < -_POINT:
        said += ", not even jointly"
    return Cell(said, 100 * apart)


def _apart(entry: Entry, claimed: float) -> float:
    """How far an entry is above what was published, as exactly as that was told: a tenth of a point."""
    return round(entry.average - claimed, 3)


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
