"""What came of a bench, in the terminal: a table for each protocol, and the jobs that failed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .console import console, escape

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from ..bench.grid import Outcome

_NAMED = 3  # of the jobs that failed alike


def print_outcome(outcome: Outcome, out: Path, device: str) -> None:
    from ..bench.measures import percent
    from ..bench.results import grouped

    for protocol, results in grouped(list(outcome.found.values())):
        table = Table(title=protocol, title_justify="left", box=SIMPLE_HEAD)
        for heading in ("method", "strength", "average, %", "forgotten,\npoints", "each when\nnew, %", "seeds"):
            width = max(map(len, heading.split("\n")))
            justify: JustifyMethod = "left" if heading == "method" else "right"
            table.add_column(heading, justify=justify, no_wrap=True, min_width=width)
        for method, strength in dict.fromkeys((one.run.method, one.strength) for one in results):
            runs = [one.run for one in results if (one.run.method, one.strength) == (method, strength)]
            cells = [percent([getattr(run, each) for run in runs]) for each in ("average", "forgetting", "newest")]
            table.add_row(method, "" if strength is None else f"{strength:g}", *cells, str(len(runs)))
        console.print(table)
    for line in _ends(outcome):
        console.print(escape(line), soft_wrap=True)
    for error in dict.fromkeys(outcome.failed.values()):  # what befell many is told once
        jobs = [job for job, said in outcome.failed.items() if said == error]
        names = "; ".join(job.name for job in jobs[:_NAMED])
        rest = f"; and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
        which = names if len(jobs) == 1 else f"{len(jobs)} jobs ({names}{rest})"
        written = next((path for job in jobs if (path := job.error_path(out, device)).exists()), None)
        more = f" All of it: {written}" if written else ""
        console.print(f"[red]failed[/red] {escape(f'{which}: {error}{more}')}", soft_wrap=True)
    if outcome.found:
        console.print(
            f"The page of all this: [bold]holdfast report {escape(shlex.quote(str(out)))}[/bold]", soft_wrap=True
        )


def _ends(outcome: Outcome) -> list[str]:
    """Where a sweep's best strength is the last one it was offered."""
    from ..bench.measures import at_an_end, best

    tried: dict[tuple[str, str], dict[float, float]] = {}
    failed = {(job.protocol.name, job.method) for job in outcome.failed if job.validating}
    for job, result in outcome.found.items():
        if job.validating and (job.protocol.name, job.method) not in failed:
            tried.setdefault((job.protocol.name, job.method), {})[job.strength] = result.run.average
    return [
        f"{protocol}: {method} did best at {best(scores):g}, the {end} strength that was tried. Beyond it may be "
        "better ones: give --strengths more."
        for (protocol, method), scores in tried.items()
        if len(scores) > 1 and (end := at_an_end(scores))
    ]
