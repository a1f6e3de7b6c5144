"""What LoRA adds to a model's weights, layer by layer, by PEFT's own modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..errors import ArgumentError


@dataclass(frozen=True)
class Product:
    """s·BA, which an adapter adds to a weight; s·(BA)ᵀ where the weight has its inputs first."""

    outputs: nn.Parameter  # B: (outputs, rank)
    inputs: nn.Parameter  # A: (rank, inputs)
    scaling: float
    turned: bool

    def add_to_(self, delta: Tensor) -> None:
        b, a = self.outputs.to(delta), self.inputs.to(delta)
        # In place, which autocast leaves alone, and without a BA of its own.
        delta.addmm_(*((a.mT, b.mT) if self.turned else (b, a)), alpha=self.scaling)

    def pulls(self, pull: Tensor, only: Collection[int]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """dA = s·Bᵀ(ΛΔ) and dB = s·(ΛΔ)Aᵀ, of those in `only`."""
        pull = pull.mT if self.turned else pull
        if id(self.inputs) in only:
            yield self.inputs, self.scaling * (self.outputs.to(pull).mT @ pull)
        if id(self.outputs) in only:
            yield self.outputs, self.scaling * (pull @ self.inputs.to(pull).mT)


def tuner_layers(model: nn.Module) -> Iterator[BaseTunerLayer]:
    """Every layer that has adapters, of whatever kind."""
    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))


def adapter_parameters(layer: BaseTunerLayer) -> Iterator[nn.Parameter]:
    """Those of the adapters of a layer, and not of what they are added to."""
    for name in layer.adapter_layer_names:
        yield from getattr(layer, name).parameters()


def all_outputs(model: nn.Module, adapters: Collection[str] | None) -> Iterator[nn.Parameter]:
    """B of every LoRA adapter that acts: what they add is in proportion to it."""
    for layer in tuner_layers(model):
        if not isinstance(layer, LoraLayer):
            raise ArgumentError(f"{type(layer).__module__} is no LoRA: there is no B to take it back by.")
        for adapter in adapters or layer.active_adapters:
            _require_product(layer, adapter, "a layer")
            found: Any = None
            if adapter in layer.lora_B:
                found = layer.lora_B[adapter].weight
            elif adapter in layer.lora_embedding_B:
                found = layer.lora_embedding_B[adapter]
            if found is not None:
                yield found


def _require_product(layer: LoraLayer, adapter: str, where: str) -> None:
    variant = layer.lora_variant.get(adapter)
    if variant is not None or layer.use_dora.get(adapter) or layer.lora_bias.get(adapter):
        what = "lora_bias" if layer.lora_bias.get(adapter) else type(variant).__name__ if variant else "DoRA"
        raise ArgumentError(
            f"adapter `{adapter}` of {where} has {what}, which changes more than s·BA. Use plain LoRA (without "
            "use_dora, lora_bias or another variant), or a memory of the adapters themselves."
        )


def product_of(layer: Linear | Embedding, adapter: str, name: str) -> Product:
    """What an adapter adds to the weight of a layer; raises where that is something else."""
    _require_product(layer, adapter, f"`{name}`")
    if isinstance(layer, Embedding):  # (tokens, features): its inputs first
        b, a, turned = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter], True
    else:
        b, a, turned = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, layer.fan_in_fan_out
    return Product(b, a, float(layer.scaling[adapter]), turned)


def plain_layer(layer: BaseTunerLayer, name: str, owners: Mapping[int, int]) -> Linear | Embedding:
    """The layer, if the weights that act in it are W + s·BA; raises, and says why, if not."""
    if not isinstance(layer, (Linear, Embedding)) or type(layer) not in (Linear, Embedding):
        raise ArgumentError(
            f"`{name}` is adapted by {type(layer).__module__}.{type(layer).__name__}, and s·BA is known for LoRA on "
            "linear layers and embeddings alone. Leave it out of target_modules, or make a memory of the adapters."
        )
    if layer.merged:
        raise ArgumentError(
            f"the adapter of `{name}` is merged into it, and no step on the adapter would change the model. Call "
            "model.unmerge_adapter(); or merge_and_unload(), and hold the merged model to the memory itself."
        )
    if layer.disable_adapters:
        raise ArgumentError(f"the adapter of `{name}` is disabled. Call model.enable_adapter_layers() first.")
    weight = layer.get_base_layer().weight
    if type(weight.data) is not Tensor:
        raise ArgumentError(f"`{name}` is a {type(weight.data).__name__}: sharded or quantized bases are not held.")
    if owners[id(weight)] > 1:
        raise ArgumentError(
            f"`{name}` is tied, and an adapter changes one of its uses alone: it has no one value any more. Leave it "
            "out of target_modules, or untie it before the memory is made."
        )
    return layer
