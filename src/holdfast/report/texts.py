"""Tables as Markdown to read and paste, and runs as CSV to compute with."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from csv import writer

from ..bench.results import Result
from .cells import MEASURES, Table
from .sections import sections


def markdown(tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """The tables in GitHub's Markdown, a heading for each protocol; `notes` are of none of them."""
    parts = []
    protocol = None
    for table in tables:
        if table.protocol != protocol:
            protocol = table.protocol
            parts.append(f"## {_escaped(protocol)}")
        parts += [f"### {_escaped(table.title)}", grid(table), *(_escaped(note) for note in table.notes)]
    parts += [_escaped(note) for note in notes]
    return "\n\n".join(parts) + "\n"


def csv(results: Sequence[Result]) -> str:
    """One line for each run judged on test data, in raw numbers: shares, nats, seconds, bytes. Empty: not measured."""
    buffer = io.StringIO()
    lines = writer(buffer)
    names = [measure.name for measure in MEASURES]
    lines.writerow(
        ["protocol", "tasks", "method", "strength", "strength_chosen_on", "seed", *names, "version", "device", "date"]
    )
    for section in sections(results):
        for entry in section.entries:
            for one in entry.results:
                numbers = [measure.value(one.run) for measure in MEASURES]
                lines.writerow(
                    [
                        _inert(section.protocol),
                        section.tasks,
                        _inert(entry.method),
                        "" if entry.strength is None else entry.strength,
                        _inert(entry.chosen_on),
                        one.run.seed,
                        *("" if math.isnan(number) else number for number in numbers),
                        *(_inert(str(one.made.get(name, ""))) for name in ("version", "device", "date")),
                    ]
                )
    return buffer.getvalue()


def grid(table: Table) -> str:
    """A table in Markdown, without its title and its notes."""
    rule = ["---:" if table.numeric(column) else "---" for column in range(len(table.headings))]
    lines = [[_escaped(heading) for heading in table.headings], rule]
    lines += [[_escaped(cell.text) for cell in row.cells] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no table, no emphasis, no link, no HTML comes of it."""
    line = re.sub(r"([\\`*\[\]|~$#]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))
    return html.escape(line, quote=False)


def _inert(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
