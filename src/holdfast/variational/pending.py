"""What was drawn for a step that is yet to be made, and whether the gradients are still those of the draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import full, part
from ..errors import ArgumentError, InertError

_Mark = tuple[Any, int] | None  # a gradient, and how often it was written to


class Pending:
    """Draws since the last step. A gradient that was written to in between is no longer theirs."""

    def __init__(self) -> None:
        self.draws = 0
        self._left: dict[nn.Parameter, _Mark] = {}
        self._begun: dict[nn.Parameter, _Mark] = {}
        self._before: dict[nn.Parameter, Tensor] = {}
        self._length: Tensor | None = None

    def kept(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether gradients are as the last draw left them: else they were zeroed, and a new step begins."""
        return not self.draws or all(_same(_mark(p), self._left.get(p)) for p in params)

    def begin(self, params: Sequence[nn.Parameter]) -> None:
        """A draw begins: what was there is not its doing."""
        self._begun = {p: _mark(p) for p in params}
        self._before = {p: p.grad.clone() for p in params if p.grad is not None}

    def new_part(self, p: nn.Parameter, grad: Tensor) -> Tensor:
        """What a draw added to a gradient; all of it, if it was zeroed inside."""
        begun = self._begun.get(p)
        return grad - part(self._before[p]) if begun is not None and begun[0] is p.grad else grad

    def require_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Raise where no gradient arrived since the draw began."""
        if all(_same(_mark(p), self._begun.get(p)) for p in params):
            raise InertError(
                "no gradient arrived inside sampled(): the backward pass belongs inside as well, where the weights are "
                "the draw. To accumulate without synchronization, run all passes of a step inside one sampled(); to "
                "look at a draw, do it under torch.no_grad()."
            )

    def end(self, params: Sequence[nn.Parameter], *, watched: bool) -> None:
        """A draw is over."""
        self.draws += 1
        self._left = {p: _mark(p) for p in params}
        self._begun, self._before = {}, {}
        self._length = _length(params) if watched else None

    def require_scale(self, params: Sequence[nn.Parameter]) -> None:
        """Raise where gradients were divided by a power of two since: the loss had been scaled, and nobody said so."""
        if self._length is None:
            return
        ratio = float(full(self._length / _length(params)))
        power = math.log2(ratio) if math.isfinite(ratio) and ratio > 0 else 0.0
        if power > 1.5 and abs(power - round(power)) < 1e-4:
            raise ArgumentError(
                f"gradients were divided by {2.0 ** round(power):g} between the draw and the step: with a GradScaler, "
                "give its factor to the draw, sampled(loss_scale=scaler.get_scale())."
            )


def _mark(p: nn.Parameter) -> _Mark:
    return None if p.grad is None else (p.grad, part(p.grad)._version)


def _same(one: _Mark, other: _Mark) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def _length(params: Sequence[nn.Parameter]) -> Tensor:
    lengths = [part(p.grad).norm().double().cpu() for p in params if p.grad is not None]
    found: Tensor = torch.stack(lengths).norm()
    return found
