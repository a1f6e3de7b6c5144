"""Pictures in which a method is a point: what it forgets against what it learns, its cost against what it knows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench.measures import Run, spread
from .canvas import Mark, beside, legend, picture, plain, short, size, stretched
from .entries import Entry, Section

# Where a label may stand, in points from its mark: near before far, at the right before elsewhere.
_WAYS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_PLACES = [(x * far, y * far) for far in (6, 12, 20, 30) for x, y in _WAYS]
_FORGOTTEN = (-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 40, 80)  # points that an axis may be marked with
_LED = 12  # points beyond which a thin line leads from the label to its mark
_LEADER = {"arrowstyle": "-", "color": "#8a939b", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}


@dataclass(frozen=True)
class _Point:
    label: str
    name: str
    x: tuple[float, float]  # mean and standard deviation over seeds
    y: tuple[float, float]

    @property
    def bars(self) -> list[list[tuple[float, float]]]:
        """The ends of its two error bars."""
        (x, dx), (y, dy) = self.x, self.y
        return [[(x - dx, y), (x + dx, y)], [(x, y - dy), (x, y + dy)]]


def front(section: Section, marked: Mapping[str, Mark], name: str) -> str:
    """Forgetting against plasticity, up and to the left the better; empty where nothing was learned in turn."""
    points = _points(section.entries, lambda run: 100 * run.forgetting, lambda run: 100 * run.newest)
    about = f"{section.title}: points of accuracy forgotten against accuracy on each task when new, by method"
    return _scatter(points, marked, about, name, "forgotten, points", "each task when new, %", log=False)


def timing(section: Section, marked: Mapping[str, Mark], name: str) -> str:
    """Seconds of learning and remembering against average accuracy, on one device; empty where no time was taken."""
    points = _points(section.timed, lambda run: run.seconds or math.nan, lambda run: 100 * run.average)
    # A bar on a logarithmic axis ends above zero.
    points = [replace(point, x=(point.x[0], min(point.x[1], 0.9 * point.x[0]))) for point in points]
    about = f"{section.title}: seconds spent against average accuracy after the last task, by method"
    return _scatter(points, marked, about, name, "learning and remembering, s", "average accuracy, %", log=True)


def _points(entries: Sequence[Entry], x: Callable[[Run], float], y: Callable[[Run], float]) -> list[_Point]:
    found = []
    for entry in entries:
        across, up = [x(run) for run in entry.runs], [y(run) for run in entry.runs]
        if all(map(math.isfinite, across + up)):
            found.append(_Point(entry.label, entry.name, spread(across), spread(up)))
    return found


def _scatter(
    points: Sequence[_Point], marked: Mapping[str, Mark], about: str, name: str, xlabel: str, ylabel: str, *, log: bool
) -> str:
    def draw(figure: Any) -> None:
        axis = beside(figure)
        if log:
            _seconds(axis, points)
        for point in points:
            mark = marked[point.label]
            (x, dx), (y, dy) = point.x, point.y
            axis.errorbar(x, y, dy, dx, color=mark.color, marker=mark.marker, markersize=6, elinewidth=0.9)
        axis.margins(0.12, 0.12)
        axis.set_ylim(top=min(axis.get_ylim()[1], 101))
        stretched(axis, [point.y[0] for point in points])
        plain(axis, xlabel, ylabel)
        if not log:
            _forgotten(axis, [point.x[0] for point in points])
        legend(axis, [(point.name, marked[point.label]) for point in points], lines=False)
        _name(axis, points)

    return picture(draw, size(len(points)), about, name) if points else ""


def _forgotten(axis: Any, values: Sequence[float]) -> None:
    """Room towards zero, where one method forgets far more than most."""
    usual = statistics.median(map(abs, values))
    if max(values) < 4 * usual or usual == 0:
        return
    low, high = axis.get_xlim()
    axis.set_xscale("asinh", linear_width=usual)
    axis.set_xlim(low, high * 1.3)
    place = {tick: math.asinh(tick / usual) for tick in _FORGOTTEN if low <= tick <= high}
    least = (math.asinh(high / usual) - math.asinh(low / usual)) / 20  # two numbers side by side
    ticks: list[int] = []
    for tick in sorted(place, key=abs):
        if all(abs(place[tick] - place[other]) > least for other in ticks):
            ticks.append(tick)
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
    axis.minorticks_off()


def _seconds(axis: Any, points: Sequence[_Point]) -> None:
    """A logarithmic axis: seconds as people write them, and enough of them where it spans about a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(p.x[0] - p.x[1] for p in points), max(p.x[0] + p.x[1] for p in points)
    room = max((high / low) ** 0.12, 1.6)
    axis.set_xscale("log")
    axis.set_xlim(low / room, high * room)
    few = high / low < 30
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _name(axis: Any, points: Sequence[_Point]) -> None:
    """Write each label at the first place where it covers nothing; where there is none, the legend has to do."""
    from matplotlib.transforms import Bbox

    renderer = axis.figure.canvas.get_renderer()
    axis.figure.draw_without_rendering()
    inside = axis.get_window_extent(renderer)
    dots = [axis.transData.transform((point.x[0], point.y[0])) for point in points]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    taken += [Bbox(axis.transData.transform(bar)) for point in points for bar in point.bars]
    # Crowded marks choose last: a lonely one has room anywhere, but must not take theirs.
    pixels = axis.figure.dpi / 72
    for i in sorted(range(len(points)), key=lambda i: _crowd(dots[i], dots)):
        (x, y), at = dots[i], (points[i].x[0], points[i].y[0])
        for dx, dy in _PLACES:
            text = axis.annotate(short(points[i].name), at, **_placed(dx, dy))
            box = text.get_window_extent(renderer).padded(1)
            far = max(abs(dx), abs(dy)) > _LED
            steps = [0.1 * part * pixels for part in range(3, 11)] if far else []
            line = [Bbox.from_bounds(x + dx * step - 1, y + dy * step - 1, 2, 2) for step in steps]
            others = taken[:i] + taken[i + 1 :]
            free = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            # Without a line, it must be plain whose label it is.
            ours = far or all(_apart(dots[i], box) < _apart(dot, box) for k, dot in enumerate(dots) if k != i)
            if free and ours and not any(part.overlaps(other) for part in (box, *line) for other in others):
                if far:
                    axis.annotate("", at, (dx, dy), textcoords="offset points", arrowprops=_LEADER)
                taken += [box, *line]
                break
            text.remove()


def _crowd(dot: Any, dots: Sequence[Any]) -> int:
    return sum(math.dist(dot, other) < 60 for other in dots)


def _apart(dot: Any, box: Any) -> float:
    """How far a point is from a box; zero inside it."""
    return math.hypot(max(box.x0 - dot[0], 0, dot[0] - box.x1), max(box.y0 - dot[1], 0, dot[1] - box.y1))


def _placed(x: int, y: int) -> dict[str, Any]:
    return {
        "xytext": (x, y),
        "textcoords": "offset points",
        "fontsize": 8.5,
        "color": "#1b1f24",
        "ha": "left" if x > 0 else "right" if x < 0 else "center",
        "va": "bottom" if y > 0 else "top" if y < 0 else "center",
    }
