"""Models that grew: which of their parameters are larger than a memory's, or new to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from ..errors import MismatchError
from ..params import all_parameters, contains
from ..precision.base import grown


def require_plain_growth(model: nn.Module, params: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> None:
    """Raise where old entries do not stay in front: gates, queries, keys and values are stacked in one parameter, and
    so are the groups of a convolution."""
    owned = {id(p): module for module in model.modules() if _stacks(module) for p in module._parameters.values()}
    for name, parameter in params.items():
        if parameter.shape != mean[name].shape and id(parameter) in owned:
            raise MismatchError(
                f"`{name}` of {type(owned[id(parameter)]).__name__} grew from {tuple(mean[name].shape)} to "
                f"{tuple(parameter.shape)}, but stacks several matrices: from its shape it cannot be told where the "
                "old entries are now. Make a new memory of the grown model."
            )


def _stacks(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.conv._ConvNd):  # with a group for each channel, more channels are more groups
        return module.groups > 1 and not module.groups == module.in_channels == module.out_channels
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention))


def new_parameters(model: nn.Module, known: Mapping[str, Tensor], leave: Collection[str]) -> dict[str, nn.Parameter]:
    """The parameters that train, and are neither among the known ones nor to be left."""
    inside = {id(parameter) for parameter in known.values()}
    return {
        name: parameter
        for name, parameter in all_parameters(model).items()
        if parameter.requires_grad and id(parameter) not in inside and name not in leave
    }


def grown_buffers(kept: Mapping[str, Tensor], now: Mapping[str, Tensor], added: Collection[str]) -> dict[str, Tensor]:
    """Statistics of layers that grew, with those that the model has now for what is new, and all of `added` layers."""
    found = {}
    for name, value in kept.items():
        larger = name in now and contains(now[name].shape, value.shape)
        found[name] = grown(value, now[name].shape, now[name]) if larger else value
    layers = {name.rpartition(".")[0] for name in added}
    new = {name for name in now if name not in kept and name.rpartition(".")[0] in layers}
    return found | {name: now[name].detach().clone() for name in new}
