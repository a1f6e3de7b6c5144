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


class UsedOtherwise(Exception):
    """A weight met something else than one matrix product with a row for each example: it has to be drawn itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class LocalNoise(TorchFunctionMode):
    """x ↦ N(xμᵀ + b, x²(σ²)ᵀ + σ_b²), drawn for each example apart: the same loss on average, with less noise.

    Exact where every example uses the weight once: linear layers on inputs of two axes, a row for each example. A
    weight used twice, at several positions of an example or by any other operation is one draw for all of its uses:
    it raises `UsedOtherwise`.
    """

    def __init__(self, means: Mapping[str, Tensor], deviation: Deviation, noise: Noise, examples: int) -> None:
        super().__init__()
        self._names = {id(mean): name for name, mean in means.items()}
        self._deviation = deviation
        self._noise = noise
        self._examples = examples
        self._used: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        met = [self._names[id(each)] for each in tree_leaves((args, given)) if id(each) in self._names]
        if not met or _looks(func):
            return func(*args, **given)
        x, weight, bias = self._linear(func, args, given, met)
        mean = F.linear(x, weight, bias)
        variance = x.new_zeros(())
        if id(weight) in self._names:
            variance = F.linear(x.square(), self._deviation(self._names[id(weight)]).square())
        if id(bias) in self._names:
            variance = variance + self._deviation(self._names[id(bias)]).square()
        # A row of zeros has a root without a slope: the smallest number keeps its gradient finite.
        tiny = torch.finfo(variance.dtype).tiny
        return mean + variance.clamp(min=tiny).sqrt() * self._noise.like(mean)

    def _linear(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], met: list[str]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The three arguments of a linear layer whose weights were not used before."""
        again = [name for name in met if name in self._used or met.count(name) > 1]
        if func is not F.linear or again:
            raise UsedOtherwise((again or met)[0])
        names = ("input", "weight", "bias")
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        x, weight, bias = found["input"], found["weight"], found.get("bias")
        if x.ndim != 2 or len(x) != self._examples or id(x) in self._names:
            raise UsedOtherwise(met[0])
        self._used.update(met)
        return x, weight, bias


def _looks(func: Any) -> bool:
    """Whether a call only looks at a tensor: its shape, its device, how many axes it has."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", "")
    described = (Tensor.shape, Tensor.device, Tensor.dtype, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda)
    return (name == "__get__" and any(owner is each for each in described)) or func in (
        Tensor.size, Tensor.dim, Tensor.is_floating_point, torch.is_grad_enabled, Tensor.numel,
    )  # fmt: skip
