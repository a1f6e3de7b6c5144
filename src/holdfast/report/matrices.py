"""What was known, when: the accuracies after every stage, as small tables or, of many tasks, as small pictures."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.measures import Run

_DIGITS = 12  # tasks up to which a cell has room for its number
_LEARNED, _AHEAD = (0, 114, 178), (87, 96, 106)  # as in style.css
_FULL = 0.7  # the ink of 100 %


@dataclass(frozen=True)
class Matrix:
    """The mean over seeds, in percent: a row after each stage, a column for each task; of many tasks, a PNG too."""

    title: str
    rows: list[list[float]]
    image: str

    @property
    def in_turn(self) -> bool:
        return len(self.rows) > 1

    def ink(self, value: float) -> float:
        """How dark a cell is: by the square, because it is among the high ones that methods differ."""
        return round(_FULL * (value / 100) ** 2, 2)


def matrix(title: str, runs: Sequence[Run]) -> Matrix:
    """The mean of the runs; of runs that differ in their stages, what was known at the end alone."""
    alike = len({len(run.accuracy) for run in runs}) == 1
    tables = [run.accuracy if alike else run.accuracy[-1:] for run in runs]
    rows = [[100 * statistics.fmean(cell) for cell in zip(*line, strict=True)] for line in zip(*tables, strict=True)]
    return Matrix(title, rows, _png(rows) if len(rows[0]) > _DIGITS else "")


def _png(rows: Sequence[Sequence[float]]) -> str:
    """A picture with one pixel for each cell, in base64."""
    import numpy
    from matplotlib.image import imsave

    share = _FULL * (numpy.asarray(rows)[..., None] / 100) ** 2
    ahead = numpy.triu(numpy.ones((len(rows), len(rows[0])), dtype=bool), 1)[..., None] & (len(rows) > 1)
    share = numpy.where(ahead, 0.08 + share, share)  # never white: it has to be seen that its turn has not come
    ink = numpy.where(ahead, _AHEAD, _LEARNED)
    nameless: dict[str, Any] = {"Software": None}  # the same runs, the same bytes, whatever matplotlib's version
    buffer = io.BytesIO()
    imsave(buffer, (255 - share * (255 - ink)).round().astype("uint8"), metadata=nameless)
    return base64.b64encode(buffer.getvalue()).decode()
