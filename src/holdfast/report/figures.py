"""Pictures of runs over the tasks learned, as SVG text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..bench.measures import Run, by_method, spread
from .canvas import COLORS, Mark, beside, legend, picture, plain, size, stretched
from .entries import Section


def forgetting(runs: Sequence[Run]) -> str:
    """Two curves per method over the tasks learned: accuracy on the first task, and on all tasks so far.

    Joint training has no tasks in turn: a level line at where it ends.
    """
    panels: list[tuple[str, Callable[[Run, int], float]]] = [
        ("Accuracy on the first task", lambda run, i: run.accuracy[i][0]),
        (
            "Average accuracy on the tasks so far",
            lambda run, i: statistics.fmean(run.accuracy[i][: i + 1]) if run.in_turn else run.average,
        ),
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (title, value) in zip(axes, panels, strict=True):
            _panel(axis, title, value, by_method(runs))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.16, 1, 1))

    about = "Accuracy on the first task, and on average over the tasks so far, after each task learned, by method"
    return picture(draw, (10, 4.2), about)


def curves(section: Section, marked: Mapping[str, Mark], name: str) -> str:
    """The mean accuracy on the tasks so far, a line and a band for each method; one level for those not in turn.

    Empty where nothing was learned in turn.
    """

    def draw(figure: Any) -> None:
        axis = beside(figure)
        steps = range(1, section.tasks + 1)
        for entry in section.entries:
            mark = marked[entry.label]
            if not entry.in_turn:
                axis.axhline(100 * entry.average, color=mark.color, linestyle=mark.line, linewidth=1.2)
                continue
            points = [spread([100 * run.so_far[step - 1] for run in entry.runs]) for step in steps]
            axis.plot(
                steps,
                [mean for mean, _ in points],
                color=mark.color,
                linestyle=mark.line,
                marker=mark.marker,
                markersize=4,
                markevery=max(1, section.tasks // 10),
            )
            _band(axis, steps, points, mark.color)
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, 0), min(high, 100.5))
        stretched(axis, [100 * entry.average for entry in section.entries])
        _ticks(axis, section.tasks)
        plain(axis, "tasks learned", "average accuracy on the tasks so far, %")
        # In the order of the lines at their right end.
        legend(axis, [(entry.name, marked[entry.label]) for entry in section.entries], lines=True)

    about = f"{section.title}: average accuracy on the tasks so far after each task learned, by method"
    if not any(entry.in_turn for entry in section.entries):
        return ""
    return picture(draw, size(len(section.entries)), about, name)


def _panel(axis: Any, title: str, value: Callable[[Run, int], float], methods: dict[str, list[Run]]) -> None:
    for color, (name, runs) in zip(COLORS, methods.items(), strict=False):
        steps = range(1, len(runs[0].accuracy) + 1)
        points = [spread([100 * value(run, i - 1) for run in runs]) for i in steps]
        if not runs[0].in_turn:
            axis.axhline(points[-1][0], color=color, linestyle="--", linewidth=1.2, label=name)
            continue
        axis.plot(steps, [mean for mean, _ in points], marker="o", markersize=4, color=color, label=name)
        _band(axis, steps, points, color)
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xticks(list(range(1, len(next(iter(methods.values()))[0].accuracy) + 1)))
    axis.set_ylim(0, 102)
    plain(axis, "tasks learned", "% right on the test split")


def _band(axis: Any, steps: Sequence[int], points: Sequence[tuple[float, float]], color: str) -> None:
    low, high = [m - s for m, s in points], [m + s for m, s in points]
    axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _ticks(axis: Any, tasks: int) -> None:
    every = next(step for step in (1, 2, 5, 10, 20, 50, tasks) if tasks / step <= 12)
    axis.set_xticks([1, *range(every, tasks + 1, every)] if every > 1 else list(range(1, tasks + 1)))
