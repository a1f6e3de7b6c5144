"""Do the assumptions behind the quadratic hold, for this model and these data?"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature import dense_fisher, kronecker_fisher, lowrank_fisher
from ..curvature.batches import Forward
from ..errors import ArgumentError, HoldfastWarning
from ..likelihood import Likelihood, categorical
from ..likelihood.categorical import Categorical
from ..params import some
from ..precision import Diagonal, Precision
from ..untouched import untouched
from .advice import advice
from .derivatives import Start, products, start
from .directions import directions as paths_of
from .fishers import Fishers, diagonals, fishers
from .hessian import hessian
from .optimum import Optimum, optimum
from .structure import Structure, structure
from .tables import Table, confidence_table, fisher_table, optimum_table, recovery_table, share_table, taylor_table
from .task import Task, task
from .taylor import Taylor, taylor

RANK = 16
ROWS = 256  # sums of scores a batch gives to find them by: few would blur them, and look like the structure's fault
SOFT = ("a softened likelihood is for holds: what is diagnosed here is the cross-entropy itself.",)
EXACT_UP_TO = 2000
# Fewer examples than this say little of the next ones.
FEW = 200


@dataclass(frozen=True)
class Diagnosis:
    """Whether ∇L(μ) = 0, how far the quadratic is believed, what the diagonal leaves out, and F against F′.

    Printed, it is the tables and the advice; `holdfast.report.diagnosis_page` makes a page with pictures of it.
    """

    model: str
    likelihood: str
    num_data: float
    unit: str
    nll: float  # per example (or token)
    entries: int
    optimum: Optimum
    taylor: Taylor
    structure: Structure
    fishers: Fishers
    advice: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def tables(self) -> tuple[Table, ...]:
        """The numbers, in order."""
        found = [
            optimum_table(self.optimum, self.unit),
            taylor_table(self.taylor, self.optimum),
            share_table(self.structure),
            recovery_table(self.structure),
            fisher_table(self.fishers, self.unit),
        ]
        return (*found, confidence_table(self.fishers)) if self.fishers.groups else tuple(found)

    @property
    def title(self) -> str:
        """What was diagnosed."""
        return (
            f"{self.model}, {self.entries:,} entries, on {self.num_data:,.0f} {self.unit}s, {self.likelihood}: "
            f"{self.nll:.4g} nats per {self.unit}"
        )

    def __str__(self) -> str:
        said = [f"- {line}" for line in self.advice]
        unsure = [f"- {line}" for line in self.doubts]
        tables = [f"{table}\n  {table.note}" for table in self.tables]
        doubts = [*(["\n".join(["Doubts", *unsure])] if unsure else [])]
        return "\n\n".join([self.title, *tables, "\n".join(["Advice", *said]), *doubts])


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    moved: nn.Module | Mapping[str, Tensor] | None = None,
    seed: int = 0,
    directions: int = 3,
    probes: int = 16,
    exact_up_to: int = EXACT_UP_TO,
    forward: Forward | None = None,
) -> Diagnosis:
    """Check on old data what a penalty ½(θ−μ)ᵀΛ(θ−μ) takes for granted: ∇L = 0, Taylor, the diagonal, F = F′.

    `moved` is the same model after a fine-tune (or its state dict): the way it went is looked at beside `directions`
    random ones and the gradient. Up to `exact_up_to` entries the Hessian is computed whole, a second-order pass for
    each; beyond, by `probes` random sign vectors, and estimates come with their error. The data is read some ten
    times, with 13 forward passes for every direction: a few thousand examples are plenty. The model is left as it was.
    """
    for name, value, least in (("directions", directions, 1), ("probes", probes, 3), ("exact_up_to", exact_up_to, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name} is a whole number, {least} at least, got {value!r}.")
    soft = isinstance(likelihood, Categorical) and likelihood.temperature != 1
    if soft:  # a curvature to hold by, and no loss that anyone trains with
        likelihood = categorical
    if not isinstance(seed, int):
        raise ArgumentError(f"a seed is an integer, got {seed!r}.")
    mine = task(model, batches, likelihood, forward)
    exact = mine.entries <= exact_up_to
    with untouched(mine.model):
        begun = start(mine)
        paths = paths_of(mine, begun.gradient, moved, directions, seed)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", HoldfastWarning)
            precisions = _precisions(mine, seed, exact=exact)
        steady = precisions["Kronecker Fisher"].sources[0].id == begun.data
        labels = diagonals(mine, begun, seed, grouped=steady)
        precisions = {"diagonal Fisher": Diagonal(mine.parted(labels.entries[labels.best])), **precisions}
        curvature = hessian(mine, exact=exact, probes=probes, seed=seed)
        vectors = torch.stack([*(path.delta for path in paths), torch.ones_like(begun.gradient)])
        *bent, row_sums = products(mine, vectors)
        followed = taylor(mine, paths, begun.gradient, torch.stack(bent), precisions, begun.num_data)
    trace = float(labels.entries["observed"].double().sum())
    settled = optimum(mine, begun.gradient, begun.num_data, trace, followed.curves)
    telling = {curve.direction for curve in followed.telling}
    built = structure(mine, curvature, precisions, [path.delta for path in paths if path.name in telling])
    compared = fishers(mine, begun, labels, curvature, row_sums, seed)
    return Diagnosis(
        type(mine.model).__name__,
        likelihood.name,
        begun.num_data,
        begun.unit,
        begun.nll / begun.num_data,
        mine.entries,
        settled,
        followed,
        built,
        compared,
        advice(settled, followed, built, compared, begun.unit),
        _doubts(begun, [*(SOFT if soft else ()), *(str(each.message) for each in said)], steady=steady),
    )


def _precisions(task: Task, seed: int, *, exact: bool) -> dict[str, Precision]:
    """The best Fisher that the likelihood has, in every structure beyond the diagonal, from the cheapest on."""
    given = (task.model, task.batches, task.likelihood)
    found: dict[str, Precision] = {
        "Kronecker Fisher": kronecker_fisher(*given, seed=seed, forward=task.forward),
        "low-rank Fisher": lowrank_fisher(
            *given, rank=min(RANK, task.entries), rows=ROWS if exact else 2 * RANK, seed=seed, forward=task.forward
        ),
    }
    return {**found, "dense Fisher": dense_fisher(*given, seed=seed, forward=task.forward)} if exact else found


def _doubts(start: Start, said: list[str], *, steady: bool) -> tuple[str, ...]:
    """What makes the numbers say less than they seem to."""
    found = list(dict.fromkeys(said))
    if start.examples < FEW:
        found.append(
            f"{start.examples} examples are few: the curvature of the next {start.examples} may look different."
        )
    if start.unused:
        found.append(f"the loss does not depend on {some(list(start.unused))}: no penalty holds it, and none needs to.")
    if not steady:
        found.append(
            "the data was not the same at every reading (augmentation, or a shuffling loader that drops some), "
            "so its parts do not fit together to the last digit."
        )
    return tuple(found)
