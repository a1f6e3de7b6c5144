"""Steps in the eigenvectors of what is held, where a stiff pull is one number per coordinate."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import full
from ..errors import ArgumentError
from ..params import some
from ..pieces import cut
from ..precision import Kronecker, Precision, Rotated, Sum
from ..precision.layers import Layer
from ..precision.rotated import Basis
from .moments import Moments


class Rotation:
    """Turns the gradients of held layers before a step, and what the step did to their parameters after it.

    An optimizer such as Adam scales every coordinate by itself. Under G ⊗ A the stiff directions lie across the
    coordinates, and one that is stiff slows all; in the eigenvectors of G and A each has a scale of its own.

    So have the moments that it gathers. They are good for such steps alone: it begins without those of others, and at
    the `end` it is left without ours. `resumed` says that it has ours already, from a checkpoint.
    """

    def __init__(
        self, precisions: Sequence[Precision], optimizers: Sequence[Optimizer], params: Iterable[Tensor]
    ) -> None:
        self._bases: dict[Layer, Basis] = {}
        # As wide as the parameters: the vectors stay orthogonal to their rounding.
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in params), torch.float32)
        for precision in precisions:
            for term in precision.terms if isinstance(precision, Sum) else (precision,):
                found = term.merged().rotated() if isinstance(term, Kronecker) else term
                if isinstance(found, Rotated):
                    self._add(found.to(dtype=dtype))
        if not self._bases:
            raise ArgumentError(
                "rotate=True takes steps in the eigenvectors of Kronecker factors, and this posterior has none. Use "
                "kronecker_fisher, or leave it out."
            )
        _require_turnable(optimizers)
        self._optimizers = optimizers
        self._began = Moments()
        self.resumed = False
        self._before: dict[Layer, dict[str, tuple[Tensor, Tensor | None]]] = {}

    def _add(self, rotated: Rotated) -> None:
        """Bases of layers whose parameters have none yet: what is turned twice is turned back in the wrong order."""
        turned = {name for layer in self._bases for name in layer.shapes}
        self._bases |= {layer: basis for layer, (basis, _) in rotated.layers.items() if not turned & set(layer.shapes)}

    def start(self) -> None:
        """A step begins; what one that failed has left is forgotten."""
        self._before.clear()

    @torch.no_grad()
    def before(self, optimizer: Optimizer, held: Mapping[str, nn.Parameter], ours: Collection[int]) -> None:
        """Give the optimizer gradients as the basis has them."""
        if self._before:
            raise ArgumentError(
                "the optimizer evaluates its closure more than once in a step, between which it has moved by turned "
                "gradients: leave rotate=True out."
            )
        for layer, basis in self._bases.items():
            params = {name: held[name] for name in layer.shapes if name in held and id(held[name]) in ours}
            if not params:
                continue
            if len(params) < len(layer.shapes) or any(parameter.grad is None for parameter in params.values()):
                absent = [name for name in layer.shapes if name not in params or params[name].grad is None]
                raise ArgumentError(
                    f"rotate=True needs the gradients of a whole layer in one optimizer, and {some(absent)} has none "
                    "there. Train it too, or leave rotate out."
                )
            self._require_one_way(params)
            self._began.note(optimizer, params, ours=self.resumed)
            grads = {name: full(parameter.grad.to(parameter.dtype)) for name, parameter in params.items()}  # type: ignore[union-attr]
            self._before[layer] = {name: (p.detach().clone(), p.grad) for name, p in params.items()}
            turned = layer.tensors(_wide(layer.matrix(grads), basis.into))
            for name, parameter in params.items():
                parameter.grad = cut(turned[name].to(parameter.device, parameter.dtype).contiguous(), parameter)

    def _require_one_way(self, params: Mapping[str, nn.Parameter]) -> None:
        """A layer's parameters are turned into each other, so one group's options cannot be for some of them."""
        ids = {id(parameter) for parameter in params.values()}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if any(id(parameter) in ids for parameter in group["params"])
        ]
        first = groups[0]
        # The very same value is not compared: a learning rate on a GPU would be waited for.
        other = [k for group in groups for k in group if group[k] is not first.get(k) and group[k] != first.get(k)]
        if other:
            raise ArgumentError(
                f"rotate=True turns {some(list(params))} into each other, and they are in parameter groups with "
                f"another {other[0]}. Put a layer's parameters into one group, or leave rotate out."
            )

    @torch.no_grad()
    def after(self, held: Mapping[str, nn.Parameter]) -> None:
        """Turn back what the step did, and put the gradients back."""
        for layer, kept in self._before.items():
            moves = {name: full(held[name].detach() - old) for name, (old, _) in kept.items()}
            moves = layer.tensors(_wide(layer.matrix(moves), self._bases[layer].back))
            for name, (old, grad) in kept.items():
                held[name].copy_(old + cut(moves[name].to(old.device, old.dtype).contiguous(), old))
                held[name].grad = grad
        self._before.clear()

    def end(self) -> None:
        """Leave no moments behind that were gathered in the basis: steps to come are in other coordinates."""
        self._began.restore()
        self.resumed = False

    @property
    def gathered(self) -> bool:
        """Whether the optimizers have moments of the basis."""
        return self.resumed or bool(self._began)


def _require_turnable(optimizers: Sequence[Optimizer]) -> None:
    """Raise for optimizers that do more in a step than to move by their gradients."""
    decayed = [group for each in optimizers for group in each.param_groups if group.get("weight_decay")]
    if decayed:
        raise ArgumentError(
            f"rotate=True turns what a step does, and weight decay {decayed[0]['weight_decay']} would be turned "
            "with it. Set weight_decay=0 while holding."
        )
    for each in optimizers:
        if isinstance(each, torch.optim.LBFGS):
            raise ArgumentError("LBFGS moves within a step, by gradients as they are: leave rotate=True out.")
        if getattr(each, "closure_at_a_draw", False):
            raise ArgumentError("IVON learns curvature of the weights as they are: leave rotate=True out.")
        # Averages, and the points between which schedule-free ones step.
        if isinstance(each, torch.optim.ASGD) or any("train_mode" in group for group in each.param_groups):
            raise ArgumentError(
                f"{type(each).__name__} keeps other weights beside those that train, which would not be turned back: "
                "leave rotate=True out."
            )


def _wide(matrix: Tensor, change: object) -> Tensor:
    with torch.autocast(matrix.device.type, enabled=False):
        found: Tensor = change(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))  # type: ignore[operator]
    return found
