"""Running statistics of BatchNorm are no parameters, and no hold reaches them: they can be frozen meanwhile."""

from __future__ import annotations

import warnings
from weakref import WeakSet

import torch
from torch import nn

from ..devices import part
from ..errors import ArgumentError, HoldfastWarning, InertError
from ..params import some

_Norm = nn.modules.batchnorm._NormBase  # of BatchNorm, and of InstanceNorm, which may keep statistics too
_frozen: WeakSet[nn.Module] = WeakSet()  # a copy of the model takes the hooks with it, and is not in here


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
            raise ArgumentError(
                "freeze_statistics=True, and the model has no BatchNorm, or InstanceNorm, that keeps any: leave it out."
            )
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._layers = list(layers.values())
        for layer in self._layers:
            _frozen.add(layer)
            # Before every pass: loops put the whole model into training mode again and again.
            self._hooks.append(layer.register_forward_pre_hook(_evaluated))
            self._hooks.append(layer.register_forward_hook(_as_before, always_call=True))
        self._were = [(name, layer, _statistics(layer)) for name, layer in layers.items()]
        # Compiled code does not look whether hooks have come or gone.
        self._compiled = any(type(module).__name__ == "OptimizedModule" for module in model.modules()) or any(
            module._compiled_call_impl is not None for module in model.modules()
        )
        if self._compiled:
            torch.compiler.reset()

    def require_kept(self) -> None:
        """Raise where statistics have moved all the same."""
        moved = [name for name, layer, were in self._were if not all(map(torch.equal, were, _statistics(layer)))]
        if moved:
            raise InertError(
                f"the running statistics of {some(moved)} moved, though freeze_statistics=True was to keep them. Was "
                "the model compiled or scripted before the hold? Hold first; and put them back with "
                "holdfast.restore_(model, memory)."
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers if self._hooks else ():
            _frozen.discard(layer)
        if self._compiled and self._hooks:
            torch.compiler.reset()
        self._hooks.clear()


def _statistics(layer: nn.Module) -> list[torch.Tensor]:
    found = [layer.running_mean, layer.running_var]
    return [part(each.detach()).clone() for each in found if isinstance(each, torch.Tensor)]


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
    if layer in _frozen:
        layer.__dict__.setdefault("_was_training", layer.training)
        layer.training = False


def _as_before(layer: nn.Module, args: object, output: object) -> None:
    layer.training = layer.__dict__.pop("_was_training", layer.training)
