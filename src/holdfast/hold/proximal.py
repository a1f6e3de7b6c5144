"""The pull as a step of its own, after the optimizer's: exact for its quadratic, and stable at any strength."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import full, part
from ..errors import ArgumentError, HoldfastWarning
from ..kernels import FIRM, Codes, in_runs, shrink_
from ..kernels.codes import LARGEST
from ..params import some
from ..penalty import Quadratic
from ..pieces import cut
from ..posterior.gaussian import difference
from ..precision import Diagonal, Kronecker, Logarithmic, Precision, Rotated, Sum
from ..precision.layers import Layer
from .pace import Pace, paces, require_known_pace, scalar


class Proximal:
    """θ ← μ + (1 + a s Λ / N)⁻¹ (θ − μ), a the optimizer's own step size for each coordinate, s the strength.

    Where the optimizer's step is θ − a g, the two together rest where g + s Λ (θ − μ) / N = 0: at the same weights as
    with the pull in the gradients. That one diverges where lr s Λ / N > 2; this one cannot. A diagonal Λ takes any step
    size; Kronecker factors take one for the whole layer (SGD), in their eigenvectors.
    """

    def __init__(
        self, terms: Sequence[Quadratic], optimizers: Sequence[Optimizer], model: nn.Module, asked: bool = True
    ) -> None:
        self._asked, self._told = asked, False
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
        for optimizer in optimizers:
            self._require_whole_layers(optimizer, model)

    @classmethod
    def by_itself(
        cls, terms: Sequence[Quadratic], optimizers: Sequence[Optimizer], model: nn.Module
    ) -> Proximal | None:
        """What is best where nothing is asked for: this step under SGD where it has a closed form, and else none."""
        if not terms or any(type(optimizer) is not torch.optim.SGD for optimizer in optimizers):
            return None
        # What a narrow weight loses to rounding in a step of its own, it keeps where the data's gradient carries it.
        if any(_is_narrow(parameter) for term in terms for parameter in term.held(model).values()):
            return None
        try:
            return cls(terms, optimizers, model, asked=False)
        except ArgumentError:
            return None

    def fits(self, optimizer: Optimizer, model: nn.Module) -> bool:
        """Whether it can make the step that comes; where it was asked for, what is in the way is an error."""
        try:
            require_known_pace(optimizer)
            self._require_whole_layers(optimizer, model)
        except ArgumentError as error:
            if self._asked:
                raise
            if not self._told:
                self._told = True
                warnings.warn(
                    f"the pull was a step of its own, and is added to the gradients from here on: {error}",
                    HoldfastWarning, stacklevel=2,
                )  # fmt: skip
            return False
        return True

    def _require_whole_layers(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Raise for a layer under Kronecker factors that trains in part, or with several step sizes."""
        for term, blocks in self._blocks:
            layers = [layer for block in blocks if isinstance(block, Rotated) for layer in block.layers]
            sizes = paces(optimizer, term.held(model)) if layers else {}
            for layer in layers:
                mine = {name: sizes[name] for name in layer.shapes if name in sizes}
                if mine and (len(mine) < len(layer.shapes) or scalar(mine) is None):
                    raise _parted(layer)

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
                if not isinstance(block, Rotated):
                    _shrink_(term, block, inside, sizes, scale)
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
            if size is None:
                raise _parted(layer)
            delta = {name: full(difference(parameter, mean[name])) for name, parameter in mine.items()}
            with torch.autocast(entries.device.type, enabled=False):
                matrix = basis.into(layer.matrix(delta))
                pull = (min(size * scale, LARGEST) * entries.to(matrix)).clamp(max=FIRM)
                back = layer.tensors(basis.back(matrix * (pull / (1 + pull))))
            for name, parameter in mine.items():
                pulled = part(cut(back[name], parameter))
                local = part(parameter.data)
                local.copy_(local.to(pulled) - pulled)


def _parted(layer: Layer) -> ArgumentError:
    return ArgumentError(
        f"a pull as a step of its own needs all of the layer of `{layer.weight}` in one optimizer, with one step size. "
        "Put it there, or give proximal=False."
    )


def _is_narrow(tensor: Tensor) -> bool:
    """Whether it keeps fewer digits than float32."""
    return torch.finfo(tensor.dtype).eps > torch.finfo(torch.float32).eps


def _shrink_(
    term: Quadratic,
    block: Diagonal | Logarithmic,
    params: Mapping[str, nn.Parameter],
    sizes: Mapping[str, Pace],
    scale: float,
) -> None:
    """θ ← μ + (θ − μ) / (1 + a s Λ / N), on what this process has of each."""
    mean = term.posterior.mean
    together: defaultdict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    for name, parameter in params.items():
        entries = block.coded(name) if isinstance(block, Logarithmic) else part(block.entries[name])
        size = sizes[name]
        row = (part(parameter.data), part(mean[name]), entries, _scaled(size, scale))
        held, center, weight, amount = row
        if not in_runs([held], [center, weight] if term.brought is None else []):
            weight = weight.unpacked() if isinstance(weight, Codes) else weight
            delta = difference(held, center.to(held.device))
            pull = (amount * weight.to(held.device)).clamp(max=FIRM)
            held.copy_(held.to(delta.dtype) - delta * (pull / (1 + pull)))
        else:
            together[None if isinstance(amount, Tensor) else amount, held.device, held.dtype].append(row)
    for members in together.values():
        held_ones, centers, weights, amounts = (list(role) for role in zip(*members, strict=True))
        if term.brought is None:
            shrink_(held_ones, centers, weights, amounts)
            continue
        for lot, steps, means, entries in term.brought(held_ones, amounts, means=centers, entries=weights):
            shrink_(lot, means, entries, steps)


def _scaled(size: Pace, scale: float) -> Pace:
    """a s / N, laid out as this process has it: no number times zero is none, however large."""
    if not isinstance(size, Tensor):
        return min(size * scale, LARGEST)
    return (part(size).contiguous() * min(scale, LARGEST)).clamp_(max=LARGEST)


def _closed(precision: Precision) -> tuple[Diagonal | Logarithmic | Rotated, ...]:
    """The blocks of a precision, each with a closed form."""
    blocks = precision.blocks() if isinstance(precision, Sum) else (precision,)
    found: list[Diagonal | Logarithmic | Rotated] = []
    for block in blocks:
        if isinstance(block, Kronecker) and all(len(terms) == 1 for terms in block.layers.values()):
            found.append(block.rotated())
        elif isinstance(block, (Diagonal, Logarithmic, Rotated)):
            found.append(block)
        else:
            raise ArgumentError(
                f"proximal=True has a closed form for diagonals and for one Kronecker product a layer, and not for "
                f"{type(block).__name__}. Leave it out: the pull is then added to the gradients."
            )
    return tuple(found)
