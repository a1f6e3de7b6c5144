"""A diagnosis as a page: what to do, in words, and the pictures and tables that it follows from."""

from __future__ import annotations

from ..diagnose import Diagnosis
from .assumptions import fisher_scatter, gradient_bars, share_bars, taylor_curves, trends
from .page import rendered


def diagnosis_page(diagnosis: Diagnosis, *, facts: tuple[tuple[str, str], ...] = ()) -> str:
    """One HTML text with everything in it. `facts` is what was run, with what."""
    tables = {table.title: table for table in diagnosis.tables}
    by_number = {number: [t for title, t in tables.items() if title.startswith(number)] for number in "0123"}
    sections = [
        (
            "Is the gradient zero?",
            "A penalty ½(θ−μ)ᵀΛ(θ−μ) has no slope at μ. If the old loss has one, the penalty is wrong to first order. "
            + diagnosis.optimum.verdict,
            [(gradient_bars(diagnosis), "The norm of the mean gradient, by layer.")],
            by_number["0"],
        ),
        (
            "How far may the quadratic be believed?",
            "The true rise of the old loss, black, against what quadratics say of it. Where a line leaves the black "
            "one, its forecast ends.",
            [(taylor_curves(diagnosis), "Gray: too small to matter. Dotted: as far as ½δᵀHδ is believed.")],
            by_number["1"],
        ),
        (
            "Is the Hessian diagonal?",
            "A diagonal penalty prices every weight by itself. What the Hessian has beside its diagonal, weights know "
            "together; Kronecker factors and low rank keep a part of that.",
            [
                (share_bars(diagnosis), "How much of the Hessian is on its diagonal, by layer."),
                (trends(diagnosis), _trends_said(diagnosis)),
            ],
            by_number["2"],
        ),
        (
            "Is F the second derivative?",
            "A Fisher stands in for F′, the Hessian's diagonal. For piecewise-linear networks the exact one equals "
            "it; observed labels lose mass as the model grows sure; the square of the total gradient is another thing.",
            [(fisher_scatter(diagnosis), "Some entries, per example; the line is equality. Zeros are not drawn.")],
            by_number["3"],
        ),
    ]
    return rendered("diagnosis.html", diagnosis=diagnosis, sections=sections, facts=facts)


def _trends_said(diagnosis: Diagnosis) -> str:
    left = "The diagonal's share of the Hessian as more of the data is read."
    return (
        f"Left: {left} Right: observed labels, from unsure examples to sure ones." if diagnosis.fishers.groups else left
    )
