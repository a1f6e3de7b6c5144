"""The numbers of a diagnosis as tables of words, for a terminal, a text and a page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .fishers import Fishers
from .optimum import NATS, Optimum
from .structure import Structure
from .taylor import FACTOR, NEGLIGIBLE, SECOND_ORDER, Taylor


@dataclass(frozen=True)
class Table:
    """Rows of words under headings, and what they mean."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    def __str__(self) -> str:
        lines = [self.headings, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headings))]
        shown = [
            "  ".join(
                cell.ljust(width) if not column else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *(f"  {line}" for line in shown)])


def optimum_table(optimum: Optimum, unit: str) -> Table:
    """The gradient's norm by layer."""
    rows = [(layer, number(norm)) for layer, norm in optimum.by_layer.items()]
    return Table(
        "0. Optimum: the gradient by layer",
        ("layer", f"‖g‖, nats per {unit}"),
        (*rows, ("all", number(optimum.norm))),
        f"‖Σg‖²/Σ‖g‖² is {number(optimum.aligned)}: 0 at the optimum of these data, 1 by chance, N where all agree.",
    )


def taylor_table(taylor: Taylor, optimum: Optimum) -> Table:
    """How far each forecast is believed along each direction."""
    curves = taylor.curves
    rows = (
        ("looked to", *(number(curve.relative) for curve in curves)),
        ("true rise there, nats", *(number(curve.rises[-1]) for curve in curves)),
        *((name, *(str(curve.radius(name)) for curve in curves)) for name in curves[0].forecasts),
        (f"{SECOND_ORDER}, to 20 %", *(str(curve.radius(SECOND_ORDER, 1.2)) for curve in curves)),
        (f"|gᵀδ|/½δᵀHδ at {NATS:g} nats", *(number(optimum.parts[curve.direction]) for curve in curves)),
    )
    return Table(
        "1. Taylor: how far each forecast may be believed, as ‖δ‖/‖μ‖",
        ("along", *(curve.direction for curve in curves)),
        rows,
        f"Believed: within a factor of {FACTOR:g} of the true rise, or {NEGLIGIBLE:g} nats, at that distance and all "
        "nearer ones; distances double.",
    )


def share_table(structure: Structure) -> Table:
    """What of H is its diagonal, by layer."""
    rows = tuple(
        (
            share.where,
            f"{share.entries:,}",
            "–" if share.absolute is None else number(share.absolute),
            number(share.squares) + (f" ± {share.error:.2g}" if share.error else ""),
            "–" if share.inside is None else number(share.inside),
        )
        for share in structure.shares
    )
    how = (
        "Exact."
        if structure.exact
        else f"Estimated with {structure.probes} random sign vectors, ± a standard error; Σ|H_ij| has no such estimate."
    )
    return Table(
        "2. Diagonal: its share of H, by layer",
        ("layer", "entries", "Σ|H_ii|/Σ|H_ij|", "ΣH_ii²/ΣH_ij²", "in the layer's block"),
        rows,
        f"{how} Absolute values: within a layer's block. Squares: over a layer's rows, all columns.",
    )


def recovery_table(structure: Structure) -> Table:
    """What each structure has of H."""
    held = {each.structure: number(each.cost) for each in structure.held}
    rows = tuple(
        (
            each.structure,
            number(each.cosine),
            number(each.error),
            number(each.scale),
            held.get(each.structure, "–"),
        )
        for each in structure.recovered
    )
    return Table(
        "2. Structures against H",
        ("structure", "cosine", "‖Λ−H‖/‖H‖", "tr Λ/tr H", "cost left at half the move"),
        rows,
        "Cosine and distance in Frobenius' norm, where the stiffest directions count most. Cost: a hold by Λ that "
        "leaves half of the fine-tune (or of random moves) leaves so much of what it costs.",
    )


def fisher_table(fishers: Fishers, unit: str) -> Table:
    """Every diagonal against F′."""
    rows = tuple(
        (each.name, number(each.total), number(each.scale), number(each.rank), number(each.rank_fisher))
        for each in fishers.compared
    )
    how = (
        "F′ is an estimate here: its sum is good, its ranks are blurred."
        if fishers.negative is None
        else f"{100 * fishers.negative:.2g} % of F′'s entries are negative."
    )
    return Table(
        "3. F against F′",
        ("diagonal", f"sum, per {unit}", "of F′'s sum", "rank with F′", f"rank with {fishers.best}"),
        rows,
        how,
    )


def confidence_table(fishers: Fishers) -> Table:
    """The observed Fisher by how sure the model is."""
    rows = tuple(
        (f"{group.confidence:.4f}", f"{group.examples:,}", number(group.ratio)) for group in fishers.groups
    )  # fmt: skip
    return Table(
        f"3. Observed over {fishers.best}, by confidence",
        ("mean confidence", "examples", "tr observed/tr " + fishers.best),
        rows,
        "The observed Fisher falls as (1−p)², the exact one as 1−p.",
    )


def number(value: float) -> str:
    """Three digits."""
    return "–" if math.isnan(value) else f"{value:.3g}"
