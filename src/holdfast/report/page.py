"""The demo's page: a table, the curves, and what every method knew after every task."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from ..bench.measures import Run, by_method, percent
from .figures import forgetting
from .matrices import matrix


def page(runs: Sequence[Run], *, title: str, about: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    """One HTML text with everything in it. `about` are paragraphs to read first, `facts` what was run, with what."""
    methods = by_method(runs)
    rows = [
        {
            "method": name,
            "average": percent([run.average for run in group]),
            "forgetting": percent([run.forgetting for run in group]),
            "newest": percent([run.newest for run in group]),
        }
        for name, group in methods.items()
    ]
    known = [matrix(name, group) for name, group in methods.items()]
    return rendered("page.html", title=title, about=about, facts=facts, rows=rows, known=known, figure=forgetting(runs))


def rendered(template: str, **values: object) -> str:
    """A template of this room, filled in; text is escaped."""
    import jinja2

    folder = files("holdfast.report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
    )
    return environment.get_template(template).render(**values)
