"""Adapters that are added to parameters as a model runs (PEFT's): a memory of the weights does not see them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from .errors import MismatchError
from .params import some, walked


def adapted(model: nn.Module) -> list[str]:
    """The parameters that adapters are added to as they run (LoRA, not merged): their values are not what is used."""
    found = []
    for prefix, module, _ in walked(model):
        kinds = {base.__name__ for base in type(module).__mro__}
        if "BaseTunerLayer" not in kinds or module.merged or module.disable_adapters:
            continue
        layer: Any = module
        here = {key for name in layer.adapter_layer_names for key in getattr(layer, name, ())}
        active = [adapter for adapter in layer.active_adapters if adapter in here]
        # LoRA leaves a bias as it is, unless it is told to add to it.
        biases = "LoraLayer" not in kinds or any(getattr(layer, "lora_bias", {}).get(adapter) for adapter in active)
        for key, _ in layer.base_layer.named_parameters(recurse=False) if active else ():
            if biases or not key.endswith("bias"):
                found.append(f"{prefix}{key}")
    return found


def require_not_adapted(model: nn.Module, names: Collection[str], cure: str) -> None:
    """Raise where an adapter is added to one of these parameters as the model runs."""
    beside = [name for name in adapted(model) if name in names]
    if beside:
        raise MismatchError(
            f"an adapter is added to {some(beside)} as the model runs, which a memory of the weights does not see. "
            f"{cure}"
        )
