"""PEFT: a memory of the base weights that holds a model while LoRA trains it, and what a merge does to a memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from peft.tuners.lora import Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..devices import tensor_cores
from ..errors import ArgumentError, InertError, MismatchError
from ..params import all_parameters, matched, shapes, some
from ..penalty import add_scaled_, require_something_held
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.gaussian import difference
from ..precision import Precision, Sum
from ..precision.base import in_full_precision, inner


def weight_space(
    model: nn.Module, memory: Posterior | Memory, *, adapter: str | Collection[str] | None = None
) -> WeightSpace:
    """A memory of the base weights as a term that holds the LoRA adapters of `model`: ½ ΔᵀΛΔ, Δ = W − μ + s·BA.

    The memory is made of the plain model, before it is adapted. It knows nothing of adapters: after
    `merge_and_unload()` it holds the merged model as it is, or the next adapter, whose Δ then starts at what the last
    one changed. Parameters that train as they are (`modules_to_save`) have Δ = θ − μ. The adapters that count are the
    active ones, or those named by `adapter`; one of them trains.

        model = peft.get_peft_model(model, peft.LoraConfig(...))
        term = holdfast.integrations.peft.weight_space(model, memory)
        with holdfast.hold(optimizer, model, term, num_data=len(dataset)):
            train(model, optimizer, loader)

    A forecast is of the weights as they are stored: `model.merge_adapter()` first, `unmerge_adapter()` after it.
    """
    posterior = as_posterior(memory)
    require_something_held(posterior)
    names = None if adapter is None else (adapter,) if isinstance(adapter, str) else tuple(adapter)
    known = {name: None for layer in _tuner_layers(model) for name in getattr(layer, "scaling", ())}
    unknown = [name for name in names or () if name not in known]
    if unknown or names == ():
        raise ArgumentError(f"the model has no LoRA adapter {some(unknown)}: it has {some(known)}.")
    devices = {parameter.device for parameter in model.parameters()}
    term = WeightSpace(posterior.to(devices.pop()) if len(devices) == 1 else posterior, names)
    term.held(model)
    return term


def require_unmerged(model: nn.Module, memory: Posterior | Memory | None = None) -> None:
    """Raise where an adapter was merged, for good or for now, into the base weights, and `memory` is of the adapter.

    Without a memory, raise where one is merged for now (`merge_adapter()`): steps on it would not change the model.
    """
    mean = {} if memory is None else as_posterior(memory).mean
    ours = [name for name in mean if any(part.startswith("lora_") for part in name.split("."))]
    present = all_parameters(model)
    gone = [name for name in ours if name not in present]
    merged = any(layer.merged for layer in _tuner_layers(model))
    if gone or (merged and (ours or memory is None)):
        cure = "call model.unmerge_adapter(), or " if merged and not gone else ""
        raise MismatchError(
            "the adapter was merged into the base weights: its memory is of parameters that are gone"
            f"{f' ({some(gone)})' if gone else ''}; {cure}make the memory in weight space, of the model before it is "
            "adapted (holdfast.integrations.peft.weight_space)."
        )


@dataclass(frozen=True)
class _Product:
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


@dataclass(frozen=True)
class WeightSpace:
    """½ ΔᵀΛΔ for Δ = W − μ + s·BA, with its gradient in A and B.

    Λ is gone through by its blocks, of which diagonals have one for each parameter and Kronecker factors one for each
    layer: what is made on the way is of the size of one layer, twice or three times. Dense and low-rank ones are whole.
    """

    posterior: Posterior
    adapters: tuple[str, ...] | None = None

    @property
    def num_data(self) -> float:
        return self.posterior.num_data

    @property
    def unit(self) -> str:
        return self.posterior.unit

    @cached_property
    def _blocks(self) -> tuple[Precision, ...]:
        """Parts that add up to Λ. Not a Sum's own blocks: those are over separate parameters, some of them dense."""
        precision = self.posterior.precision
        terms = precision.terms if isinstance(precision, Sum) else (precision,)
        return () if precision.is_zero() else tuple(block for term in terms for block in term.blocks())

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for block in self._blocks for name in block.shapes)

    def held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The factors that train, and the parameters that train as they are."""
        if not self._blocks:
            return {}
        params, products = self._now(model)
        names = {id(parameter): name for name, parameter in all_parameters(model).items()}
        if not products:
            bases = [p for layer in _tuner_layers(model) for p in layer.get_base_layer().parameters()]
            on = [names[id(parameter)] for parameter in bases if id(parameter) in names]
            raise InertError(
                f"no adapted layer is in the memory, so no adapter would be held. The memory has {some(list(params))}; "
                f"adapters are on {some(on)}. "
                + ("A memory of adapters" if on else "A model into which an adapter was merged")
                + " is held as it is: holdfast.hold(optimizer, model, memory)."
            )
        factors = [factor for each in products.values() for p in each for factor in (p.inputs, p.outputs)]
        trained = {names[id(factor)]: factor for factor in factors if factor.requires_grad}
        if not trained:
            raise InertError(
                f"the adapters of {some(list(products))} are frozen, so there is nothing to hold. "
                "Load them with PeftModel.from_pretrained(..., is_trainable=True), or unfreeze them."
            )
        return trained | {name: parameter for name, parameter in params.items() if parameter.requires_grad}

    @torch.no_grad()
    def value(self, model: nn.Module) -> Tensor:
        """The penalty of the merged model, without merging it."""
        value = torch.zeros(())
        params, products = self._now(model)
        for block in self._blocks:
            value = value + 0.5 * block.quadratic(self._delta(block, params, products))
        return value

    @torch.no_grad()
    def add_gradient_(self, model: nn.Module, scale: float | Tensor, only: Collection[int]) -> Tensor:
        """As every term does; blocks that nothing in `only` moves, a constant, are left out of the value returned."""
        value = torch.zeros(())
        params, products = self._now(model)
        for block in self._blocks:
            added = [(name, product) for name in block.shapes for product in products.get(name, ())]
            factors = [factor for _, product in added for factor in (product.inputs, product.outputs)]
            if not any(id(parameter) in only for parameter in (*factors, *(params[name] for name in block.shapes))):
                continue
            delta = self._delta(block, params, products)
            with tensor_cores(), in_full_precision(next(iter(delta.values()))):
                pull = block.matvec(delta)
                grads = {name: (params[name], each) for name, each in pull.items()}
                for at, (name, product) in enumerate(added):
                    grads |= {f"{name} {at}{i}": pair for i, pair in enumerate(product.pulls(pull[name], only))}
            value = value + 0.5 * inner(delta, pull)
            targets = {name: parameter for name, (parameter, _) in grads.items()}
            add_scaled_(targets, {name: gradient for name, (_, gradient) in grads.items()}, scale, only)
        return value

    def _now(self, model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, list[_Product]]]:
        """The parameters that Λ covers, and what adapters add to each."""
        found = matched(model, shapes(self.posterior.mean), ties=self.posterior.ties)
        params = {name: parameter for name, parameter in found.items() if name in self._names}
        names = {id(parameter): name for name, parameter in params.items()}
        modules = list(model.modules())
        owners = Counter(id(parameter) for module in modules for parameter in module._parameters.values())
        products: dict[str, list[_Product]] = {}
        for layer in (module for module in modules if isinstance(module, BaseTunerLayer)):
            inside = [names[id(p)] for p in layer.get_base_layer().parameters() if id(p) in names]
            if not inside:
                continue
            plain = _plain(layer, inside[0], owners)
            weight = names.get(id(plain.get_base_layer().weight))
            for adapter in self.adapters or plain.active_adapters:
                if weight is not None and adapter in plain.scaling:
                    products.setdefault(weight, []).append(_product(plain, adapter, weight))
        return params, products

    def _delta(
        self, block: Precision, params: Mapping[str, nn.Parameter], products: Mapping[str, list[_Product]]
    ) -> dict[str, Tensor]:
        delta = {name: difference(params[name], self.posterior.mean[name]) for name in block.shapes}
        for name, each in delta.items():
            for product in products.get(name, ()):
                product.add_to_(each)
        return delta


def _tuner_layers(model: nn.Module) -> Iterator[BaseTunerLayer]:
    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))


def _product(layer: Linear | Embedding, adapter: str, name: str) -> _Product:
    variant = layer.lora_variant.get(adapter)
    if variant is not None or layer.use_dora.get(adapter) or layer.lora_bias.get(adapter):
        what = "lora_bias" if layer.lora_bias.get(adapter) else type(variant).__name__ if variant else "DoRA"
        raise ArgumentError(
            f"adapter `{adapter}` of `{name}` has {what}, which changes more than s·BA. Use plain LoRA (without "
            "use_dora, lora_bias or another variant), or a memory of the adapters themselves."
        )
    if isinstance(layer, Embedding):  # (tokens, features): its inputs first
        b, a, turned = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter], True
    else:
        b, a, turned = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, layer.fan_in_fan_out
    return _Product(b, a, float(layer.scaling[adapter]), turned)


def _plain(layer: BaseTunerLayer, name: str, owners: Mapping[int, int]) -> Linear | Embedding:
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
