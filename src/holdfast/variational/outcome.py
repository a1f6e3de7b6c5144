"""What variational inference found, as the Gaussian that everything else takes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..identity import digest, fingerprints
from ..likelihood import Likelihood
from ..params import aliases, all_parameters
from ..posterior import Posterior
from ..posterior.gaussian import kept
from ..precision import Diagonal, Source
from .collapse import require_sound


def found_posterior(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    entries: Mapping[str, Tensor],
    prior: Posterior,
    likelihood: Likelihood,
    num_data: float,
    how: str,
) -> Posterior:
    """N(θ, entries⁻¹) at the model's weights: the prior's evidence is in it, and so are the data's `num_data`."""
    wide = prior.precision.diagonal()
    for name, parameter in params.items():
        require_sound(name, parameter.detach(), entries[name].rsqrt(), wide[name].to(parameter.device).rsqrt())
    weights = fingerprints(all_parameters(model))
    source = Source(
        digest(f"{how} {num_data} {prior.id} {sorted(weights.items())}"), num_data, likelihood.unit, likelihood.name,
        f"variational, {how}", weights=weights,
    )  # fmt: skip
    mean = {name: kept(parameter) for name, parameter in params.items()}
    ties = {name: more for name, more in aliases(model).items() if name in mean}
    precision = Diagonal(dict(entries), (*prior.sources, source))
    return Posterior(mean, precision, {**prior.ties, **ties}, (prior.id,))
