"""A model run at weights that are drawn: of some layers their outputs, of all others the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ..curvature.batches import Batch, run
from ..elsewhere import run_at
from ..errors import ArgumentError
from ..likelihood import Likelihood
from ..params import all_parameters, some
from ..untouched import untouched
from .local import LocalNoise, UsedOtherwise, Uses
from .noise import Noise

Forward = Callable[[nn.Module, Any], Any]


class Draws:
    """The loss of a model at one draw after another of its weights, θ = μ + σε."""

    def __init__(self, model: nn.Module, likelihood: Likelihood, forward: Forward | None, local: bool) -> None:
        self._model, self._likelihood, self._forward = model, likelihood, forward
        self._local: set[str] | None = None if local else set()
        self._checked = False

    @property
    def local(self) -> set[str]:
        """The weights whose layers have their outputs drawn, as far as it is known."""
        return set(self._local or ())

    def nll(self, batch: Batch, params: Mapping[str, nn.Parameter], logs: Mapping[str, Tensor], noise: Noise) -> Tensor:
        """The summed negative log-likelihood at one draw, with the logarithms of σ given."""
        own = {id(parameter): name for name, parameter in all_parameters(self._model).items()}
        names = {name: own[id(parameter)] for name, parameter in params.items()}
        if self._local is None:
            self._local = self._used_once(batch, params, names)
        deviations = {name: each.exp() for name, each in logs.items()}
        while True:
            local = set() if _couples(self._model) else self._local
            values = {
                name: p.view_as(p) if name in local else moved(name, p, deviations[name], noise)
                for name, p in params.items()
            }
            means = {name: values[name] for name in local}
            mode = LocalNoise(means, deviations.__getitem__, noise, batch.size) if local else None
            try:
                with _eager(self._model), mode or nullcontext():
                    output = self._run(batch, {names[name]: value for name, value in values.items()})
            except UsedOtherwise as found:
                self._local.discard(found.name)
                continue
            unseen = local - mode.used if mode is not None else set()
            nll: Tensor = self._likelihood.nll(output, batch.target).sum()
            if torch.is_grad_enabled() and not self._checked and nll.requires_grad:
                # Weights that no layer was seen to use may be used where nobody looks: they are drawn themselves.
                self._local -= unseen
                if unseen:
                    continue
                self._require_reached(nll, params, logs)
                self._checked = True
            return nll

    def _run(self, batch: Batch, values: Mapping[str, Tensor]) -> Any:
        return run_at(self._model, values, lambda model: run(model, batch, self._forward))

    def _used_once(self, batch: Batch, params: Mapping[str, nn.Parameter], names: Mapping[str, str]) -> set[str]:
        """One pass that nothing is left of, to see what uses which weight."""
        with untouched(self._model), torch.no_grad():
            values = {name: p.view_as(p) for name, p in params.items()}
            uses = Uses(values, batch.size)
            with uses:
                self._run(batch, {names[name]: value for name, value in values.items()})
        return uses.once

    def _require_reached(self, nll: Tensor, params: Mapping[str, nn.Parameter], logs: Mapping[str, Tensor]) -> None:
        """Raise where the loss depends on a weight and not on its σ: it was used past its draw."""
        # A reentrant checkpoint is a node that leads to no parameter: what it will run is not in the graph.
        again = [name for name in _operations(nll) if "CheckpointFunction" in name]
        plain = [module for module in self._model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        hooks = [module.register_forward_pre_hook(lambda *_: again.append("a module")) for module in plain]
        try:
            every = [*params.values(), *logs.values()]
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(nll, every, retain_graph=True, allow_unused=True)
        except CheckpointError:
            again, grads = ["a checkpoint"], ()
        finally:
            for hook in hooks:
                hook.remove()
        if again:
            raise ArgumentError(
                "the model runs parts of itself again in the backward pass (activation checkpointing), where the "
                "weights are no longer the draw. Turn that off, or train with holdfast.IVON, whose backward pass is "
                "inside the draw."
            )
        pairs = zip(params, grads[: len(params)], grads[len(params) :], strict=True)
        past = [name for name, mean, log in pairs if mean is not None and log is None]
        if past:
            raise ArgumentError(
                f"the loss depends on {some(past)}, and not on what was drawn for it: TorchScript, and code that keeps "
                "its own reference to a parameter, cannot be run at other weights. Use the plain module, or IVON."
            )


def moved(name: str, mean: Tensor, deviation: Tensor, noise: Noise) -> Tensor:
    """μ + σε."""
    return mean + (deviation * noise.like(name, deviation)).to(mean.dtype)


def _couples(model: nn.Module) -> bool:
    """Whether examples see each other: noise of their own would then be other than noise of the weights."""
    return any(module.training and isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _operations(output: Tensor) -> set[str]:
    """The names of all that a tensor was made by."""
    names, seen, ahead = set(), set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            ahead += [following for following, _ in node.next_functions]
    return names


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Compiled code would be compiled again for every draw."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
