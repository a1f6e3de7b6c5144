"""Pictures of a diagnosis: curves of the loss, bars by layer, one diagonal against another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..diagnose import Curve, Diagnosis, Share
from ..diagnose.fishers import HESSIAN, LITERAL, ROW_SUMS
from ..diagnose.taylor import NEGLIGIBLE, SECOND_ORDER
from .canvas import picture, plain, short

# The same color for the same thing in every picture.
_TRUE = "#000000"
_COLORS = {
    SECOND_ORDER: "#56B4E9",
    "½δᵀHδ": "#0072B2",
    "½δᵀFδ, diagonal": "#D55E00",
    "½δᵀFδ, low-rank": "#CC79A7",
    "½δᵀFδ, Kronecker": "#009E73",
    "½δᵀFδ, dense": "#E69F00",
}
_MOST = 24  # layers in a picture: those with the most entries


def taylor_curves(diagnosis: Diagnosis) -> str:
    """The true rise and every forecast, along a random direction, the gradient and the fine-tune."""
    taylor = diagnosis.taylor
    curves = [*taylor.along("random")[:1], *taylor.along("gradient"), *taylor.along("moved")]

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(curves), squeeze=False)[0]
        for axis, curve in zip(axes, curves, strict=True):
            _curve(axis, curve, diagnosis.unit)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0.17, 1, 1))

    said = ", ".join(curve.direction for curve in curves)
    return picture(
        draw, (10, 4.3), f"True rise of the old loss and forecasts of it by distance, along: {said}", "taylor"
    )


def _curve(axis: Any, curve: Curve, unit: str) -> None:
    away = [s * curve.relative for s in curve.distances]
    axis.axhspan(-NEGLIGIBLE, NEGLIGIBLE, color="#57606a", alpha=0.12, linewidth=0)
    for name, values in curve.forecasts.items():
        axis.plot(away, values, color=_COLORS[name], linewidth=1.4, label=name)
    axis.plot(away, curve.rises, color=_TRUE, marker="o", markersize=4, linewidth=1.2, label="true rise")
    radius = curve.radius("½δᵀHδ")
    if radius.distance:
        axis.axvline(radius.relative, color=_COLORS["½δᵀHδ"], linestyle=":", linewidth=1.2)
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=NEGLIGIBLE)
    _logarithmic(axis.xaxis)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plain(axis, "‖δ‖ / ‖μ‖", f"nats per {unit}")
    axis.set_title(curve.direction, fontsize=11)


def gradient_bars(diagnosis: Diagnosis) -> str:
    """The gradient's norm by layer."""
    shown = _shown(diagnosis)
    values = {"": [diagnosis.optimum.by_layer[share.where] for share in shown]}
    return _bars(shown, values, [], f"‖g‖, nats per {diagnosis.unit}", "The gradient by layer", "gradient")


def share_bars(diagnosis: Diagnosis) -> str:
    """The diagonal's share of H, by layer: of squares in its rows, and where exact of absolute values in its block."""
    shown = _shown(diagnosis)
    values = {"ΣH²ᵢᵢ / ΣH²ᵢⱼ, a layer's rows": [share.squares for share in shown]}
    if diagnosis.structure.exact:
        values = {"Σ|Hᵢᵢ| / Σ|Hᵢⱼ|, a layer's block": [share.absolute or 0 for share in shown], **values}
    errors = [share.error for share in shown]
    return _bars(shown, values, errors, "the diagonal's share of H", "The diagonal's share of H, by layer", "shares")


def _shown(diagnosis: Diagnosis) -> list[Share]:
    """The layers with the most entries, in the model's order."""
    *layers, _ = diagnosis.structure.shares
    most = sorted(layers, key=lambda share: -share.entries)[:_MOST]
    return [share for share in layers if share in most]


def _bars(
    shown: Sequence[Share], values: dict[str, list[float]], errors: Sequence[float], about: str, said: str, name: str
) -> str:
    def draw(figure: Any) -> None:
        axis = figure.subplots()
        _grouped(axis, values, errors)
        axis.set_yticks(range(len(shown)), [short(share.where) for share in shown])
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        plain(axis, about, "")
        if len(values) > 1:
            axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.tight_layout()

    return picture(draw, (10, 1.1 + 0.4 * len(shown)), said, name)


def _grouped(axis: Any, values: dict[str, list[float]], errors: Sequence[float]) -> None:
    height = 0.7 / len(values)
    for index, (label, row) in enumerate(values.items()):
        places = [place + (index - (len(values) - 1) / 2) * height for place in range(len(row))]
        spread = list(errors) if any(errors) else None
        axis.barh(places, row, height=height, label=label, color=("#D55E00", "#E69F00")[index], xerr=spread)


def _logarithmic(axis: Any) -> None:
    """Powers of ten along an axis, as plain numbers: letters between dollars stay letters here."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(numticks=5))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def fisher_scatter(diagnosis: Diagnosis) -> str:
    """Entries of each diagonal against the Hessian's, or against the best Fisher's where the Hessian's is estimated."""
    fishers = diagnosis.fishers
    base = HESSIAN if fishers.exact_hessian else fishers.best
    names = [name for name in (fishers.best, "observed", LITERAL, ROW_SUMS) if name != base and fishers.has(name)]
    names = list(dict.fromkeys(names))

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            pairs = zip(fishers.shown[base], fishers.shown[name], strict=True)
            points = [(a, b) for a, b in pairs if a > 0 and b > 0]
            axis.set_xscale("log")
            axis.set_yscale("log")
            _logarithmic(axis.xaxis)
            _logarithmic(axis.yaxis)
            if points:
                axis.scatter(*zip(*points, strict=True), s=5, alpha=0.35, color="#0072B2", linewidths=0)
                ends = [min(a for a, _ in points), max(a for a, _ in points)]
                axis.plot(ends, ends, color="#000000", linewidth=1)
            plain(axis, base, "per entry" if axis is axes[0] else "")
            axis.set_title(name, fontsize=10)
        figure.tight_layout()

    return picture(draw, (10, 3.4), f"{', '.join(names)}, entry by entry, against {base}", "fishers")


def trends(diagnosis: Diagnosis) -> str:
    """The diagonal's share as data comes in, and the observed Fisher as the model grows sure."""
    growth, groups = diagnosis.structure.growth, diagnosis.fishers.groups
    measure = "Σ|Hᵢᵢ| / Σ|Hᵢⱼ|" if diagnosis.structure.exact else "ΣH²ᵢᵢ / ΣH²ᵢⱼ"

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2 if groups else 1, squeeze=False)[0]
        axes[0].plot([x for x, _ in growth], [y for _, y in growth], marker="o", color="#D55E00")
        axes[0].set_xscale("log")
        axes[0].set_xticks([x for x, _ in growth], [f"{x:.2g}" for x, _ in growth])
        axes[0].minorticks_off()
        axes[0].set_ylim(0, 1.15 * max((y for _, y in growth if y > 0), default=0.0) or 1)
        plain(axes[0], f"{diagnosis.unit}s / entries", f"{measure} of all")
        if groups:
            # Where the model is certain to the last digit, both traces are zero and nothing can be drawn.
            points = [(max(1 - group.confidence, 1e-9), group.ratio) for group in groups if group.ratio > 0]
            if points:
                axes[1].plot(*zip(*points, strict=True), marker="o", color="#0072B2")
                axes[1].set_xscale("log")
                axes[1].set_yscale("log")
                _logarithmic(axes[1].xaxis)
                _logarithmic(axes[1].yaxis)
                axes[1].invert_xaxis()
            plain(axes[1], "1 − confidence", f"tr observed / tr {diagnosis.fishers.best}")
        figure.tight_layout()

    about = "The diagonal's share by data size" + (", and the observed Fisher by confidence" if groups else "")
    return picture(draw, (10, 3.2), about, "trends")
