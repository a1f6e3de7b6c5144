"""The pull as a step of its own, after the optimizer's: exact for its quadratic, and stable at any strength."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import part
from ..errors import ArgumentError
from ..params import some
from ..penalty import Quadratic
from ..posterior.gaussian import difference
from ..precision import Diagonal, Kronecker, Precision, Rotated, Sum
from .pace import Pace, paces, require_known_pace, scalar


class Proximal:
    """θ ← μ + (1 + a s Λ / N)⁻¹ (θ − μ), a the optimizer's own step size for each coordinate, s the strength.

    Where the optimizer's step is θ − a g, the two together rest where g + s Λ (θ − μ) / N = 0: at the same weights as
    with the pull in the gradients. That one diverges where lr s Λ / N > 2; this one cannot. A diagonal Λ takes any step
    size; Kronecker factors take one for the whole layer (SGD), in their eigenvectors.
    """

    def __init__(self, terms: Sequence[Quadratic], optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            require_known_pace(optimizer)
        self._blocks = [(term, _closed(term.posterior.precision)) for term in terms]
        every = [name for _, blocks in self._blocks for block in blocks for name in block.shapes]
        twice = sorted({name for name in every if every.count(name) > 1})
        if twice:
            raise ArgumentError(
                f"proximal=True takes one term for each parameter, and {some(twice)} has several. Merge the posteriors "
                "(holdfast.merge), or leave it out."
            )
        adaptive = [each for each in optimizers if not isinstance(each, torch.optim.SGD)]
        if adaptive and any(isinstance(block, Rotated) for _, blocks in self._blocks for block in blocks):
            raise ArgumentError(
                f"proximal=True solves Kronecker factors for one step size, and {type(adaptive[0]).__name__} has one "
                "for each coordinate. Leave it out: the pull is then added to the gradients."
            )

    @torch.no_grad()
    def after(self, optimizer: Optimizer, model: nn.Module, scale: float, ours: Collection[int]) -> None:
        """The step, on the parameters of an optimizer that has just made its own; `scale` is s/N."""
        skipped = getattr(optimizer, "found_inf", None)
        for term, blocks in self._blocks:
            params = {name: p for name, p in term.held(model).items() if id(p) in ours}
            sizes = paces(optimizer, params)
            for block in blocks:
                inside = {name: params[name] for name in block.shapes if name in sizes}
                if not inside:
                    continue
                before = [parameter.detach().clone() for parameter in inside.values()] if skipped is not None else []
                if isinstance(block, Diagonal):
                    _shrink_(block, term.posterior.mean, inside, sizes, scale)
                else:
                    self._turn(block, term.posterior.mean, inside, sizes, scale)
                for parameter, old in zip(inside.values(), before, strict=bool(before)):
                    # A fused optimizer does nothing where a scaled gradient overflowed; neither must this.
                    parameter.copy_(torch.where(skipped.to(old.device) > 0, old, parameter))  # type: ignore[union-attr]

    def _turn(
        self,
        block: Rotated,
        mean: Mapping[str, Tensor],
        params: Mapping[str, nn.Parameter],
        sizes: Mapping[str, Pace],
        scale: float,
    ) -> None:
        for layer, (basis, entries) in block.layers.items():
            mine = {name: params[name] for name in layer.shapes if name in params}
            if not mine:
                continue
            size = scalar({name: sizes[name] for name in mine})
            if len(mine) < len(layer.shapes) or size is None:
                raise ArgumentError(
                    f"proximal=True needs all of the layer of `{layer.weight}` in one parameter group, with one step "
                    "size. Put it there, or leave proximal out."
                )
            delta = {name: difference(parameter, mean[name]) for name, parameter in mine.items()}
            with torch.autocast(entries.device.type, enabled=False):
                matrix = basis.into(layer.matrix(delta))
                moved = layer.tensors(basis.back(matrix / (1 + size * scale * entries.to(matrix))))
            for name, parameter in mine.items():
                parameter.copy_(mean[name] + moved[name])


def _shrink_(
    block: Diagonal,
    mean: Mapping[str, Tensor],
    params: Mapping[str, nn.Parameter],
    sizes: Mapping[str, Pace],
    scale: float,
) -> None:
    """θ ← μ + (θ − μ) / (1 + a s Λ / N), on what this process has of each."""
    for name, parameter in params.items():
        center, entries, size = part(mean[name]), part(block.entries[name]), sizes[name]
        size = part(size) if isinstance(size, Tensor) else size
        held = part(parameter.data)
        held.copy_(center + difference(held, center) / (1 + size * scale * entries.to(held.device)))


def _closed(precision: Precision) -> tuple[Diagonal | Rotated, ...]:
    """The blocks of a precision, each with a closed form."""
    blocks = precision.blocks() if isinstance(precision, Sum) else (precision,)
    found: list[Diagonal | Rotated] = []
    for block in blocks:
        if isinstance(block, Kronecker) and all(len(terms) == 1 for terms in block.layers.values()):
            found.append(block.rotated())
        elif isinstance(block, (Diagonal, Rotated)):
            found.append(block)
        else:
            raise ArgumentError(
                f"proximal=True has a closed form for diagonals and for one Kronecker product a layer, and not for "
                f"{type(block).__name__}. Leave it out: the pull is then added to the gradients."
            )
    return tuple(found)
