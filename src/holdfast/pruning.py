"""Which weights are worth keeping, by what a posterior says of them, and a model without the others."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .devices import full
from .errors import ArgumentError, require_number
from .params import Only, all_parameters, chosen, require_shapes, shapes, some
from .posterior import Memory, Posterior, as_posterior
from .precision.base import counted, singular


def signal_to_noise(posterior: Posterior | Memory) -> dict[str, Tensor]:
    """|μ| / σ of each weight that the posterior covers, which is small where zero is well within the noise.

    Graves (2011), Blundell et al. (2015). σ⁻² is the diagonal of Λ: of a diagonal posterior the variance is σ², of
    any other it is the variance of a weight while all the rest stay where they are. Where Λ is zero, so is this.
    """
    known = as_posterior(posterior)
    return {name: known.mean[name].abs() * entries.sqrt() for name, entries in _diagonal(known).items()}


def density_at_zero(posterior: Posterior | Memory) -> dict[str, Tensor]:
    """−log N(0; μ, σ²) = μ²/2σ² + log σ + ½ log 2π of each weight: low where the posterior's density at zero is high.

    Its sign makes it, as |μ|/σ, what a weight is worth: the lowest go first. The density is in the weight's own units,
    so a narrow posterior near zero goes before a wide one at it. σ is as in `signal_to_noise`.
    """
    known, diagonal = as_posterior(posterior), _diagonal(as_posterior(posterior))
    dead = {name: int(full((entries == 0).sum())) for name, entries in diagonal.items()}
    if any(dead.values()):
        raise singular("a density", (counted(count, name) for name, count in dead.items() if count))
    return {
        name: 0.5 * (known.mean[name].square() * entries - entries.log() + math.log(2 * math.pi))
        for name, entries in diagonal.items()
    }


def pruned_(model: nn.Module, scores: Mapping[str, Tensor], *, fraction: float, only: Only = None) -> dict[str, Tensor]:
    """Set the `fraction` of weights that are worth least to zero, and give the masks of those that are left.

    `scores` say what each weight is worth: |μ|/σ, the density at zero, or magnitudes, {name: p.abs()}. They are
    compared over all parameters together, or over those that fit `only` ("*.weight"); of equal ones the first go. The
    model should be at the posterior's mean (`restore_`). To train on without the others coming back, apply the masks
    after each step; their names are those of the model without wrappers.

        masks = holdfast.pruned_(model, holdfast.signal_to_noise(posterior), fraction=0.75, only="*.weight")
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)
    """
    fraction = require_number(fraction, "the fraction of weights to remove")
    if fraction > 1:
        raise ArgumentError(f"the fraction of weights to remove is between 0 and 1, got {fraction!r}.")
    params = _scored(model, scores, only)
    values = {name: scores[name].detach() for name in params}
    broken = [name for name, each in values.items() if not bool(each.isfinite().all())]
    if broken:
        raise ArgumentError(f"the scores of {some(broken)} are not all finite: which weights go first cannot be said.")
    device = next(iter(values.values())).device
    flat = torch.cat([each.flatten().to(device) for each in values.values()])
    kept = torch.ones(len(flat), dtype=torch.bool, device=device)
    kept[flat.argsort(stable=True)[: round(fraction * len(flat))]] = False
    parts = torch.split(kept, [each.numel() for each in values.values()])
    masks = {}
    with torch.no_grad():
        for (name, parameter), part in zip(params.items(), parts, strict=True):
            masks[name] = part.view(parameter.shape).to(parameter.device)
            parameter.masked_fill_(~masks[name], 0)
    return masks


def _diagonal(known: Posterior) -> dict[str, Tensor]:
    if not known.precision.shapes:
        raise singular("a weight's σ", ("all of its parameters",))
    return {name: entries.detach() for name, entries in known.precision.diagonal().items()}


def _scored(model: nn.Module, scores: Mapping[str, Tensor], only: Only) -> dict[str, nn.Parameter]:
    """The parameters to prune, by their names in the scores."""
    if not isinstance(scores, Mapping) or not scores or not all(isinstance(each, Tensor) for each in scores.values()):
        raise ArgumentError(
            "scores are tensors by parameter name, as holdfast.signal_to_noise(posterior) gives them, got "
            f"{type(scores).__name__}."
        )
    known = all_parameters(model)
    require_shapes(shapes(scores), shapes(known), what="the set of scores", than="the model")
    params = {name: known[name] for name in scores}
    found = params if only is None else chosen(params, only)
    if not found:
        raise ArgumentError(f"only={only!r} fits none of the parameters that have scores: {some(params)}.")
    return found
