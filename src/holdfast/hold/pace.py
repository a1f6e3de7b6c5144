"""How far an optimizer goes for a gradient of one: its own step size, for each coordinate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import ArgumentError

Pace = float | Tensor

KNOWN = "SGD (with momentum or without), Adam and AdamW of torch.optim"


def require_known_pace(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose step size has no closed form here."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise ArgumentError(
            f"proximal=True needs the step size of every coordinate, which is known for {KNOWN}, and not for "
            f"{type(optimizer).__name__}. Leave it out: the pull is then added to the gradients."
        )
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD) and group["momentum"] >= 1:
            raise ArgumentError(
                f"proximal=True goes by lr / (1 − momentum), and momentum is {group['momentum']:g}. Leave it out: the "
                "pull is then added to the gradients."
            )
        if group.get("maximize"):
            raise ArgumentError("proximal=True is for optimizers that minimize: leave it out with maximize=True.")


def paces(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Pace]:
    """a with Δθ = −a g in the long run: lr/(1 − momentum) of SGD, lr/(√v̂ + ε) of Adam."""
    found: dict[str, Pace] = {}
    for group in optimizer.param_groups:
        inside = {id(parameter) for parameter in group["params"]}
        shared = _momentum(group) if isinstance(optimizer, SGD) else 0.0
        for name, parameter in params.items():
            if id(parameter) in inside and parameter.requires_grad:
                state = optimizer.state.get(parameter, {})
                found[name] = shared if isinstance(optimizer, SGD) else _adam(group, state)
    return found


def _momentum(group: Mapping[str, Any]) -> Pace:
    """v ← βv + (1−τ)g comes to (1−τ)g/(1−β); without momentum, g."""
    rate: Pace = group["lr"]
    beta = group["momentum"]
    return rate * ((1 - group["dampening"]) / (1 - beta)) if beta else rate


def _adam(group: Mapping[str, Any], state: Mapping[str, Any]) -> Pace:
    rate: Pace = group["lr"]
    if "exp_avg_sq" not in state:
        return rate / float(group["eps"])  # no gradient came: v̂ is zero, and nothing but the pull moves it
    squares: Tensor = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    step = state["step"]
    steps = step.to(squares.device, torch.float64) if isinstance(step, Tensor) else step  # β₂ᵗ in all its digits
    root = (squares / (1 - group["betas"][1] ** steps)).sqrt_()
    pace: Tensor = (rate.to(squares.device) if isinstance(rate, Tensor) else rate) / root.add_(group["eps"])
    return pace


def scalar(paces: Mapping[str, Pace]) -> Pace | None:
    """The one step size that all have, if they have one."""
    values = list(paces.values())
    first = values[0]
    if any(isinstance(value, Tensor) and value.ndim for value in values):
        return None
    same = all(value is first or (not isinstance(value, Tensor) and value == first) for value in values)
    return first if same else None
