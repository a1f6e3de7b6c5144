"""The Kullback–Leibler divergence between two Gaussians over the same parameters, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import full
from ..errors import MismatchError, SingularError
from ..params import require_shapes, shapes
from ..posterior import Memory, Posterior, as_posterior
from ..precision import Precision
from ..precision.base import counted, require_dense


def divergence(posterior: Posterior | Memory, prior: Posterior | Memory) -> Tensor:
    """KL(q ‖ p) = ½ [tr(Λp Λq⁻¹) + δᵀΛpδ − M + log det Λq − log det Λp], δ = μq − μp, in nats.

    Between diagonals it is Σ log(σp/σ) + (σ² + (μ − μp)²)/(2σp²) − ½ over the weights. A diagonal q has a closed form
    against every structure of p; other structures are inverted as dense matrices, if they are small.
    """
    p = as_posterior(prior)
    q = as_posterior(posterior).named_as(p)
    require_shapes(shapes(q.mean), shapes(p.mean), what="the posterior", than="the prior")
    require_shapes(shapes(p.mean), shapes(q.mean), what="the prior", than="the posterior")
    for each, what in ((q, "the posterior"), (p, "the prior")):
        require_proper(each, what)
    delta = {name: mean - p.mean[name] for name, mean in q.mean.items()}
    size = sum(mean.numel() for mean in q.mean.values())
    apart = p.precision.quadratic(delta) - size + q.precision.logdet() - p.precision.logdet()
    return 0.5 * (_spread(q.precision, p.precision) + apart)


def _spread(narrow: Precision, wide: Precision) -> Tensor:
    """tr(Λp Λq⁻¹)."""
    own = narrow.entrywise()
    if own is not None:
        others = wide.diagonal()
        return torch.stack([(others[name] / each).sum() for name, each in own.items()]).sum()
    if list(narrow.shapes) != list(wide.shapes):
        raise MismatchError("two precisions that are not diagonal must list their parameters in the same order.")
    require_dense(sum(shape.numel() for shape in narrow.shapes.values()))
    found: Tensor = torch.linalg.solve(narrow.dense(), wide.dense()).diagonal().sum()
    return found


def require_proper(posterior: Posterior, what: str) -> None:
    """Raise where a Gaussian has no density: entries without any precision. Of structures, their diagonal tells."""
    free = [name for name in posterior.mean if name not in posterior.precision.shapes]
    entries = posterior.precision.diagonal()
    dead = {name: int(full((each <= 0).sum())) for name, each in entries.items()}
    named = [f"all of `{name}`" for name in free] + [counted(n, name) for name, n in dead.items() if n]
    if named:
        raise SingularError(
            f"{what} has no precision in {', '.join(named[:6])}{' …' if len(named) > 6 else ''}: as a prior it is flat "
            "there, and the divergence from it is infinite. Start from holdfast.prior(model, precision=...) with a "
            "positive number, mean=0.0 for weights near zero; where layers grew, posterior.expanded(model, "
            "precision=...) gives one to what is new."
        )
