"""What all pictures share: SVG with text as text, the same for the same runs, and marks that are told apart."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette: told apart by readers who see colors differently.
COLORS = ("#999999", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#0072B2", "#000000")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d")
_LONGEST = 36  # letters of a label; the tables have all of it

# Text as text, and no random ids: the same runs give the same picture. `$` is a letter like others.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Mark:
    """How one method is drawn, in all pictures of a page."""

    color: str
    line: str
    marker: str


def marks(labels: Iterable[str]) -> dict[str, Mark]:
    """A mark for each label: colors first, then lines, and markers in a cycle of their own (104 before any repeats)."""
    once = dict.fromkeys(labels)
    return {label: Mark(COLORS[i % 8], _LINES[i // 8 % 4], _MARKERS[i % 13]) for i, label in enumerate(once)}


def picture(draw: Callable[[Any], None], size: tuple[float, float], about: str, name: str = "") -> str:
    """What `draw` puts on a figure, as an `<svg>`; `name` keeps its ids apart from those of others on the page."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A letter that this machine has no font for: the reader's browser draws it.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)  # measures text
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{html.escape(about)}"', 1)
    return re.sub("<[^>]*>", lambda tag: _IDS.sub(rf"\g<0>{name}-", tag[0]), text) if name else text


_IDS = re.compile(r"""\bid="|href="#|url\(#""")


def short(label: str) -> str:
    """A label on one line, that fits beside a picture: its start, and the end of what is told in brackets at the last,
    for versions of the code differ there."""
    line = " ".join(label.split())
    if len(line) <= _LONGEST:
        return line
    start, bracket, rest = line.rpartition(" [")
    if not bracket or not rest.endswith("]"):
        return f"{line[: _LONGEST - 1].rstrip()}…"
    if len(start) > _LONGEST - 8:
        start = f"{start[: _LONGEST - 9].rstrip()}…"
    return f"{start} […{rest[-(_LONGEST - len(start) - 3) :]}"


def stretched(axis: Any, accuracies: Sequence[float]) -> None:
    """Room towards 100 %, where most methods are good and differ there: half the errors is the same step everywhere."""
    import numpy

    if sum(value > 80 for value in accuracies) * 2 <= len(accuracies):
        return
    lowest, highest = axis.dataLim.ymin, min(axis.dataLim.ymax, 100)
    low, top = max(101 - 1.25 * (101 - lowest), 0), 101 - (101 - highest) / 1.4
    # A band can reach beyond 100 %; the picture ends there.
    there, back = lambda y: -numpy.log(numpy.maximum(101 - y, 0.1)), lambda z: 101 - numpy.exp(-z)
    axis.set_yscale("function", functions=(there, back))
    axis.set_ylim(low, top)
    ticks = (0, 20, 40, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99, 99.5)
    axis.set_yticks([tick for tick in ticks if low <= tick <= top])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def plain(axis: Any, xlabel: str, ylabel: str) -> None:
    """The look of all axes."""
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def beside(figure: Any) -> Any:
    """Axes with room at their right for a legend."""
    width, height = figure.get_size_inches()
    return figure.add_axes((0.65 / width, 0.55 / height, 6.1 / width, 1 - 0.8 / height))


def size(count: int) -> tuple[float, float]:
    """Inches for a picture with a legend of `count` lines beside it."""
    return 10.0, max(4.4, 0.8 + 0.21 * count)


def legend(axis: Any, entries: Sequence[tuple[str, Mark]], *, lines: bool) -> None:
    """The labels at the right of the axes. Lines and markers, or markers alone."""
    from matplotlib.lines import Line2D

    handles: list[Any] = [Line2D([], [], color=mark.color, marker=mark.marker, markersize=5) for _, mark in entries]
    for handle, (_, mark) in zip(handles, entries, strict=True):
        handle.set_linestyle(mark.line if lines else "")
    # Set afterwards: a label that begins with `_` would be left out.
    texts = axis.legend(
        handles,
        ["label"] * len(handles),
        loc="upper left",
        bbox_to_anchor=(1.02, 1.02),
        frameon=False,
        fontsize=9,
        labelspacing=0.35,
        handlelength=3.4 if lines else 1.2,
    ).get_texts()
    for text, (label, _) in zip(texts, entries, strict=True):
        text.set_text(short(label))
