"""Pictures of runs, as SVG text."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..bench.runner import Run, by_method, spread

# Okabe and Ito's palette: told apart by readers who see colors differently.
_COLORS = ("#999999", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#0072B2", "#000000")


def forgetting(runs: Sequence[Run]) -> str:
    """Two curves per method over the tasks learned: accuracy on the first task, and on all tasks so far."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text as text, and no random ids: the same runs give the same picture.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "holdfast", "font.family": "sans-serif", "font.size": 10}
    panels: list[tuple[str, Callable[[Run, int], float]]] = [
        ("Accuracy on the first task", lambda run, i: run.accuracy[i][0]),
        ("Average accuracy on the tasks so far", lambda run, i: statistics.fmean(run.accuracy[i][: i + 1])),
    ]
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
        for axis, (title, value) in zip(axes, panels, strict=True):
            _panel(axis, title, value, by_method(runs))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.16, 1, 1))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        pyplot.close(figure)
    text = buffer.getvalue()
    label = "Accuracy on the first task, and on average over the tasks so far, after each task learned, by method"
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _panel(axis: Any, title: str, value: Callable[[Run, int], float], methods: dict[str, list[Run]]) -> None:
    for color, (name, runs) in zip(_COLORS, methods.items(), strict=False):
        steps = range(1, len(runs[0].accuracy) + 1)
        points = [spread([100 * value(run, i - 1) for run in runs]) for i in steps]
        means = [mean for mean, _ in points]
        axis.plot(steps, means, marker="o", markersize=4, color=color, label=name)
        axis.fill_between(
            steps, [m - s for m, s in points], [m + s for m, s in points], color=color, alpha=0.15, linewidth=0
        )
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("tasks learned")
    axis.set_ylabel("% right on the test split")
    axis.set_xticks(list(range(1, len(next(iter(methods.values()))[0].accuracy) + 1)))
    axis.set_ylim(0, 102)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
