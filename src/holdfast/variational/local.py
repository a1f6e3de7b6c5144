"""Local reparameterization (Kingma et al. 2015): a layer's outputs are drawn in place of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .noise import Noise

Deviation = Callable[[str], Tensor]
_Linear = tuple[Tensor, Tensor, Tensor | None]


class UsedOtherwise(Exception):
    """A weight met something else than one matrix product with a row for each example: it has to be drawn itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Uses(TorchFunctionMode):
    """Notes which weights are used once, by a linear layer on a row for each example."""

    def __init__(self, weights: Mapping[str, Tensor], examples: int) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self._examples = examples
        self._once: set[str] = set()
        self._otherwise: set[str] = set()

    @property
    def once(self) -> set[str]:
        """Those that can have their layer's outputs drawn."""
        return self._once - self._otherwise

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        met = _met(self._names, args, given)
        if met and not _looks(func):
            fits = _linear(func, args, given, self._examples) is not None
            again = {name for name in met if name in self._once or met.count(name) > 1}
            self._otherwise.update(again if fits else met)
            self._once.update(met)
        return func(*args, **given)


class LocalNoise(TorchFunctionMode):
    """x ↦ N(xμᵀ + b, x²(σ²)ᵀ + σ_b²), drawn for each example apart: the same loss on average, with less noise.

    The same where every example uses the weight once and no example sees another: linear layers on inputs of two axes,
    a row for each example, and no BatchNorm in training. A weight used twice, at several positions of an example or by
    any other operation is one draw for all of its uses: it raises `UsedOtherwise`.
    """

    def __init__(self, means: Mapping[str, Tensor], deviation: Deviation, noise: Noise, examples: int) -> None:
        super().__init__()
        self._names = {id(mean): name for name, mean in means.items()}
        self._deviation = deviation
        self._noise = noise
        self._examples = examples
        self.used: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        met = _met(self._names, args, given)
        if not met or _looks(func):
            return func(*args, **given)
        layer = _linear(func, args, given, self._examples)
        again = [name for name in met if name in self.used or met.count(name) > 1]
        if layer is None or again:
            raise UsedOtherwise((again or met)[0])
        self.used.update(met)
        mean = F.linear(*layer)
        deviation = self._spread(*layer)
        return mean + (deviation * self._noise.like(" ".join(met), deviation)).to(mean.dtype)

    def _spread(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """√(x²(σ²)ᵀ + σ_b²), in float32 at least: squares of small deviations are zero in half precision."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            variance = torch.zeros(len(x), len(weight), dtype=wide, device=x.device)
            if id(weight) in self._names:
                variance = F.linear(x.to(wide).square(), self._deviation(self._names[id(weight)]).to(wide).square())
            if bias is not None and id(bias) in self._names:
                variance = variance + self._deviation(self._names[id(bias)]).to(wide).square()
            # A row of zeros has a root without a slope: the smallest number keeps its gradient finite.
            return variance.clamp(min=torch.finfo(wide).tiny).sqrt()


def _met(names: Mapping[int, str], args: Any, kwargs: Any) -> list[str]:
    return [names[id(each)] for each in tree_leaves((args, kwargs)) if id(each) in names]


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], examples: int) -> _Linear | None:
    """The three arguments of a linear layer, if a call is one with a row for each example."""
    if func is not F.linear:
        return None
    found = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x = found["input"]
    return (x, found["weight"], found.get("bias")) if x.ndim == 2 and len(x) == examples else None


def _looks(func: Any) -> bool:
    """Whether a call only looks at a tensor: its shape, its device, how many axes it has."""
    owner = getattr(func, "__self__", None)
    described = (Tensor.shape, Tensor.device, Tensor.dtype, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda)
    return (getattr(func, "__name__", "") == "__get__" and any(owner is each for each in described)) or func in (
        Tensor.size, Tensor.dim, Tensor.is_floating_point, torch.is_grad_enabled, Tensor.numel,
    )  # fmt: skip
