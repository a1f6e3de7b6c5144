"""PEFT: a memory of the base weights that holds a model while LoRA trains it, and what a merge does to a memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..devices import tensor_cores
from ..elsewhere import run_at
from ..errors import ArgumentError, InertError, MismatchError
from ..params import all_parameters, buffers, matched, shapes, some, told_apart, unwrapped
from ..penalty import add_scaled_, require_something_held
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.gaussian import difference
from ..precision import Precision, Sum
from ..precision.base import in_full_precision, inner
from ..untouched import evaluating
from .lora import Product, adapter_parameters, all_outputs, plain_layer, product_of, tuner_layers


def weight_space(
    model: nn.Module, memory: Posterior | Memory, *, adapter: str | Collection[str] | None = None
) -> WeightSpace:
    """A memory of the base weights as a term that holds the LoRA adapters of `model`: ½ ΔᵀΛΔ, Δ = W − μ + s·BA.

    The memory is made of the plain model, before it is adapted. It knows nothing of adapters: after
    `merge_and_unload()` it holds the merged model as it is, or the next adapter, whose Δ then starts at what the last
    one changed. Parameters that train as they are (`modules_to_save`) have Δ = θ − μ. The adapters that count are the
    active ones, or those named by `adapter`: Δ = W − μ + Σ sᵢ·BᵢAᵢ, held by each of them that trains.

        model = peft.get_peft_model(model, peft.LoraConfig(...))
        term = holdfast.integrations.peft.weight_space(model, memory)
        with holdfast.hold(optimizer, model, term, num_data=len(dataset)):
            train(model, optimizer, loader)

    With a `budget`, what is spent is told of W + s·BA, and the finish takes B back toward zero: to W, and no farther.
    A forecast is of the weights as they are stored: `model.merge_adapter()` first, `unmerge_adapter()` after it.
    """
    posterior = as_posterior(memory)
    require_something_held(posterior)
    names = None if adapter is None else (adapter,) if isinstance(adapter, str) else tuple(adapter)
    known = {name: None for layer in tuner_layers(model) for name in getattr(layer, "scaling", ())}
    unknown = [name for name in names or () if name not in known]
    if unknown or names == ():
        raise ArgumentError(f"the model has no LoRA adapter {some(unknown)}: it has {some(known)}.")
    devices = {parameter.device for parameter in model.parameters()}
    there = posterior.to(devices.pop()) if len(devices) == 1 else posterior
    term = WeightSpace(there, names, replace(memory, posterior=there) if isinstance(memory, Memory) else None)
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
    merged = any(layer.merged for layer in tuner_layers(model))
    if gone or (merged and (ours or memory is None)):
        cure = "call model.unmerge_adapter(), or " if merged and not gone else ""
        raise MismatchError(
            "the adapter was merged into the base weights: its memory is of parameters that are gone"
            f"{f' ({some(gone)})' if gone else ''}; {cure}make the memory in weight space, of the model before it is "
            "adapted (holdfast.integrations.peft.weight_space)."
        )


@dataclass(frozen=True)
class WeightSpace:
    """½ ΔᵀΛΔ for Δ = W − μ + s·BA, with its gradient in A and B.

    Λ is gone through by its blocks, of which diagonals have one for each parameter and Kronecker factors one for each
    layer: what is made on the way is of the size of one layer, twice or three times. Dense and low-rank ones are whole.
    """

    posterior: Posterior
    adapters: tuple[str, ...] | None = None
    beside: Memory | None = None  # what else was kept, such as probes: a budget is told by them

    @property
    def memory(self) -> Posterior | Memory:
        """What it holds to, with all that was kept."""
        return self.posterior if self.beside is None else self.beside

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
        names = {id(parameter): name for name, parameter in told_apart(model).items()}
        if not products:
            bases = [p for layer in tuner_layers(model) for p in layer.get_base_layer().parameters()]
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

    def way_back(self, model: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """What trains and where it goes back to: B to zero, which takes s·BA with it, others to the mean.

        So W + s·BA goes back on a straight line to W, where this adapter began.
        """
        names = {id(parameter): name for name, parameter in told_apart(model).items()}
        params = matched(model, shapes(self.posterior.mean), ties=self.posterior.ties)
        found = {name: (p, self.posterior.mean[name]) for name, p in params.items() if p.requires_grad}
        for b in all_outputs(model, self.adapters):
            if b.requires_grad:
                found[names[id(b)]] = (b, torch.zeros_like(b))
        return found

    def recalled(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> Callable[[Any], Any]:
        """The old function: the model at the mean, with adapters that add nothing. No second network.

        Buffers that the memory lacks are taken to be what they are now.
        """
        inner = unwrapped(model)
        inside = {id(parameter) for parameter, _ in self.way_back(inner).values()}
        factors = {id(p) for layer in tuner_layers(inner) for p in adapter_parameters(layer)}
        beside = [n for n, p in told_apart(inner).items() if p.requires_grad and id(p) not in inside | factors]
        if beside:
            raise MismatchError(
                f"{some(beside)} trains beside the adapters, and the memory does not have it: the old function cannot "
                "be had from its mean. Freeze it, or make the memory of a model that has it."
            )
        params = matched(inner, shapes(self.posterior.mean), ties=self.posterior.ties)
        own = {id(parameter): name for name, parameter in inner.named_parameters()}
        values = {own[id(p)]: self.posterior.mean[name].to(p) for name, p in params.items()}
        values |= {own[id(b)]: torch.zeros_like(b) for b in all_outputs(inner, self.adapters)}
        kept = {} if self.beside is None else self.beside.buffers
        then = {id(buffer): kept[name] for name, buffer in buffers(inner).items() if name in kept}
        values |= {
            name: then.get(id(buffer), buffer).detach().to(buffer, copy=True) for name, buffer in inner.named_buffers()
        }

        def old(inputs: Any) -> Any:
            with torch.no_grad(), evaluating(inner):
                return run_at(inner, {}, lambda run: forward(run, inputs), values)

        return old

    def _now(self, model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, list[Product]]]:
        """The parameters that Λ covers, and what adapters add to each."""
        found = matched(model, shapes(self.posterior.mean), ties=self.posterior.ties)
        params = {name: parameter for name, parameter in found.items() if name in self._names}
        names = {id(parameter): name for name, parameter in params.items()}
        modules = list(model.modules())
        owners = Counter(id(parameter) for module in modules for parameter in module._parameters.values())
        products: dict[str, list[Product]] = {}
        for layer in (module for module in modules if isinstance(module, BaseTunerLayer)):
            inside = [names[id(p)] for p in layer.get_base_layer().parameters() if id(p) in names]
            if not inside:
                continue
            plain = plain_layer(layer, inside[0], owners)
            weight = names.get(id(plain.get_base_layer().weight))
            for adapter in self.adapters or plain.active_adapters:
                if weight is not None and adapter in plain.scaling:
                    products.setdefault(weight, []).append(product_of(plain, adapter, weight))
        return params, products

    def _delta(
        self, block: Precision, params: Mapping[str, nn.Parameter], products: Mapping[str, list[Product]]
    ) -> dict[str, Tensor]:
        delta = {name: difference(params[name], self.posterior.mean[name]) for name in block.shapes}
        for name, each in delta.items():
            for product in products.get(name, ()):
                product.add_to_(each)
        return delta
