"""The bench's page, and the command that writes it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..bench.failures import Failed
from ..bench.results import Result, bundle, with_failures, write_whole
from ..errors import ArgumentError, DataError
from .canvas import Mark, marks
from .claims import beside, claims
from .entries import Section, distinct
from .figures import curves
from .fronts import front, timing
from .matrices import matrix
from .page import rendered
from .sections import failures, sections
from .tables import comparisons, leaderboard, sweeps, tables
from .texts import csv as as_csv
from .texts import markdown as as_markdown

_SHOWN = 4  # values of a fact; of more, how many there are
_NAMES = {
    "version": "holdfast", "command": "command", "device": "device", "torch": "torch",
    "data": "digest of the files of the data", "date": "date",
}  # fmt: skip


def bench_page(
    results: Sequence[Result],
    *,
    title: str = "What is kept, what it costs",
    left_out: Sequence[str] = (),
    across: Collection[str] = (),
    failed: Sequence[Failed] = (),
) -> str:
    """One HTML text with everything in it; `left_out` says what else was found and could not be read.

    Jobs that `failed` are told where their protocol is. Runs `across` versions of the code ("version") or devices
    ("device") stand together.
    """
    found = sections(results, across=across, failed=failed)
    if not found:
        raise DataError(
            f"There are only validation runs here ({len(results)}), made to choose a strength: nothing was judged on "
            "test data. Run the bench to its end first."
        )
    marked = marks(entry.label for section in found for entry in section.entries)
    runs = [one for section in found for one in section.results]
    alone = _alone(found, failed)
    facts = [*_facts(runs), *((name, list(said)) for name, said in (("left out", left_out), ("failed", alone)) if said)]
    parts = [_part(section, marked, f"p{number}") for number, section in enumerate(found, 1)]
    among = any(beside(section) for section in found)
    return rendered(
        "bench.html", title=title, count=len(runs), facts=facts, claims=claims(found), parts=parts, among=among
    )


def report_command(
    results: Path,
    out: Path,
    markdown: Path | None = None,
    csv: Path | None = None,
    bundled: Path | None = None,
    *,
    across: Collection[str] = (),
) -> None:
    """Read a folder of results or a bundle, and write the page; if asked for, the tables as Markdown and CSV.

    `bundled` is written with all the results, validation runs too: one file to keep instead of a folder.
    """
    targets = [path for path in (out, markdown, csv, bundled) if path is not None]
    if len({path.resolve() for path in targets}) < len(targets):
        raise ArgumentError("The page, the tables and the bundle need a file each: two of them have the same name.")
    for path in targets:  # before the work, not after it
        _require_apart(path, results, bundling=path is bundled)
        if not path.resolve().parent.is_dir():
            raise ArgumentError(f"{path} could not be written: its folder does not exist.")
    found, failed, left_out = _read(results)
    if bundled is not None:
        bundle([*found, *failed], bundled)
    _write(out, bench_page(found, left_out=left_out, across=across, failed=failed))
    if markdown is not None:
        alone = _alone(sections(found, across=across, failed=failed), failed)
        _write(markdown, as_markdown(tables(found, across=across, failed=failed), alone))
    if csv is not None:
        _write(csv, as_csv(found))


def _alone(found: Sequence[Section], failed: Sequence[Failed]) -> list[str]:
    """What failed of protocols that nothing came of."""
    left = [one for one in failed if not any(one in section.failed for section in found)]
    names = dict.fromkeys(one.protocol for one in left)
    return [f"{name}: {line}" for name in names for line in failures(one for one in left if one.protocol == name)]


def _read(results: Path) -> tuple[list[Result], list[Failed], list[str]]:
    """The results, what failed, and what else is there and is left out: told here, for where there is nothing else."""
    left_out: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return *with_failures(results), left_out
        finally:
            left_out += [str(warning.message).removeprefix("left out: ") for warning in caught]
            for line in left_out:
                print(f"left out: {line}", file=sys.stderr)


def _require_apart(target: Path, results: Path, bundling: bool) -> None:
    """Raise where something would be written over the results that it is made of; a bundle in their folder may."""
    inside = results.resolve() in target.resolve().parents and target.exists() and target.suffix in (".json", ".jsonl")
    if target.resolve() == results.resolve() or (inside and not bundling):
        raise ArgumentError(f"{target} is among the results that the report is made of: give another name.")


def _part(section: Section, marked: Mapping[str, Mark], name: str) -> dict[str, object]:
    alone = f" On {section.device} alone." if len(section.timed) < len(section.entries) else ""
    figures = [
        (
            curves(section, marked, f"{name}-curves"),
            "Over the tasks",
            "Mean over seeds; the bands are one standard deviation. A level line: learned all at once. Strength 1 "
            "where none is told. Where most methods are above 80 %, axes are stretched towards 100.",
        ),
        (
            front(section, marked, f"{name}-front"),
            "What is forgotten against what is learned",
            "Up and to the left is better: it learns the new and keeps the old. Bars are one standard deviation. Where "
            "some forget far more than most, that axis has more room towards zero.",
        ),
        (
            timing(section, marked, f"{name}-timing"),
            "What it costs against what is known",
            f"All seconds of learning and remembering, on a logarithmic axis. Bars are one standard deviation.{alone}",
        ),
    ]
    return {
        "section": section,
        "board": leaderboard(section),
        "versus": comparisons(section),
        "sweeps": sweeps(section),
        "figures": [figure for figure in figures if figure[0]],
        "known": [matrix(entry.name, entry.runs) for entry in section.entries],
    }


def _facts(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """What was run, with what, on what, when: everything the results tell of their making."""
    names = dict.fromkeys([*_NAMES, *(name for one in results for name in one.made)])
    facts = []
    for name in names:
        values = distinct(one.made.get(name) for one in results)
        if name == "date" and len(values) > 1:
            days = distinct(value.split("T")[0] for value in values)
            values = [" to ".join(dict.fromkeys((days[0], days[-1])))]
        if len(values) > _SHOWN:
            values = [*values[:_SHOWN], f"and {len(values) - _SHOWN} more"]
        if values:
            facts.append((_NAMES.get(name, name.replace("_", " ")), values))
    seeds = sorted({one.run.seed for one in results})
    return [*facts, ("seeds", [", ".join(map(str, seeds))])]


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise ArgumentError(f"{path} could not be written: {error}") from error
