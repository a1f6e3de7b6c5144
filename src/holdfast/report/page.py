"""The page: a table, the curves, and what every method knew after every task."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib.resources import files

from ..bench.runner import Run, by_method, spread
from .figures import forgetting


def page(runs: Sequence[Run], *, title: str, about: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    """One HTML text with everything in it. `about` are paragraphs to read first, `facts` what was run, with what."""
    import jinja2

    rows = []
    for name, group in by_method(runs).items():
        tasks = range(len(group[0].accuracy))
        rows.append(
            {
                "method": name,
                "average": _percent([run.average for run in group]),
                "forgetting": _percent([run.forgetting for run in group]),
                "newest": _percent([run.newest for run in group]),
                "matrix": [[100 * statistics.fmean(run.accuracy[i][j] for run in group) for j in tasks] for i in tasks],
            }
        )
    template = files("holdfast.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        title=title, about=about, facts=facts, rows=rows, figure=forgetting(runs)
    )


def _percent(values: Sequence[float]) -> str:
    mean, deviation = spread([100 * value for value in values])
    return f"{mean:.1f} ± {deviation:.1f}"
