"""The divergence's pull on a deviation: ½λσ² − log σ, least where σ is the prior's own, 1/√λ.

    python benchmarks/pull_on_deviations.py --figure docs/deviations.svg

The numbers come from `holdfast.divergence` of one weight at zero, with the terms that do not depend on σ taken off.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.report.canvas import COLORS, picture, plain

PRECISIONS = (0.25, 1.0, 4.0)
DEVIATIONS = [0.02 * step for step in range(5, 151)]


def term(deviation: float, precision: float) -> float:
    """½λσ² − log σ."""
    q, p = (
        holdfast.Posterior(
            {"w": torch.zeros(1, dtype=torch.double)},
            holdfast.Diagonal({"w": torch.tensor([each], dtype=torch.double)}),
        )
        for each in (deviation**-2, precision)
    )
    return float(holdfast.divergence(q, p)) + 0.5 * (1 + math.log(precision))


def table() -> str:
    lines = ["| λ | σ = 1/√λ | ½λσ² − log σ there | at half of it | at twice it |", "|---|---|---|---|---|"]
    for precision in PRECISIONS:
        best = precision**-0.5
        values = [term(factor * best, precision) for factor in (1.0, 0.5, 2.0)]
        lines.append(f"| {precision:g} | {best:g} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(lines)


def drawn() -> str:
    def draw(figure: Any) -> None:
        axis = figure.subplots()
        for color, precision in zip((COLORS[2], COLORS[6], COLORS[5]), PRECISIONS, strict=True):
            values = [term(each, precision) for each in DEVIATIONS]
            axis.plot(DEVIATIONS, values, color=color, label=f"λ = {precision:g}")
            axis.plot([precision**-0.5], [term(precision**-0.5, precision)], "o", color=color, markersize=5)
        axis.set_ylim(-1, 6)
        axis.legend(frameon=False)
        plain(axis, "σ", "½λσ² − log σ")
        figure.tight_layout()

    return picture(draw, (6, 3.6), "½λσ² − log σ by σ for three λ, with a dot at each least value, σ = 1/√λ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="draw it")
    options = parser.parse_args()
    print(table())
    if options.figure:
        options.figure.write_text(drawn() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
