"""Running statistics of BatchNorm are no parameters, and no hold reaches them: they can be frozen meanwhile."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..errors import ArgumentError, HoldfastWarning
from ..params import some

_Norm = nn.modules.batchnorm._BatchNorm


def tracking(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that learn statistics of whatever passes through them."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _Norm) and module.track_running_stats and module.running_mean is not None
    }


class Frozen:
    """Layers that normalize by the statistics they have, in training too, until they are let go."""

    def __init__(self, model: nn.Module) -> None:
        layers = tracking(model)
        if not layers:
            raise ArgumentError("freeze_statistics=True, and the model has no BatchNorm that keeps any: leave it out.")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for layer in layers.values():
            # Before every pass: loops put the whole model into training mode again and again.
            self._hooks.append(layer.register_forward_pre_hook(_evaluated))
            self._hooks.append(layer.register_forward_hook(_as_before))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def warn_of_drift(model: nn.Module, stacklevel: int) -> None:
    """Say that statistics will move with the new data, where nobody has said whether they may."""
    layers = tracking(model)
    if layers:
        warnings.warn(
            f"the running statistics of {some(list(layers))} are not parameters: they follow the new data while you "
            "train, and the old function with them. Give freeze_statistics=True to keep them, False to let them.",
            HoldfastWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip


def _evaluated(layer: nn.Module, args: object) -> None:
    layer.__dict__["_was_training"] = layer.training
    layer.training = False


def _as_before(layer: nn.Module, args: object, output: object) -> None:
    layer.training = layer.__dict__.pop("_was_training", layer.training)
