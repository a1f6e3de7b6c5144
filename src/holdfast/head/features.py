"""Random features: a fixed layer that is never trained, so nothing in it can be forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, DataError
from ..precision.base import require_finite

# Entries of φ at once: enough for a matrix product to run at full speed, few enough for any memory.
_CHUNK = 1 << 23


@dataclass(frozen=True, eq=False, repr=False)
class RandomFeatures:
    """φ(x) = max(0, W x), with W drawn once.

    W itself is kept, and goes into the file of a head: a seed would not do, for torch may draw other numbers from it
    in another version or on another device.
    """

    weight: Tensor  # (features, inputs)

    def __post_init__(self) -> None:
        require_finite("weight of the random features", self.weight)
        if self.weight.ndim != 2 or 0 in self.weight.shape:
            raise ArgumentError(f"random features have a weight (features, inputs), got {tuple(self.weight.shape)}.")

    def __repr__(self) -> str:
        return f"RandomFeatures({self.features} of {self.inputs} inputs)"

    def __call__(self, inputs: Tensor) -> Tensor:
        """φ of each row, in the dtype of the inputs."""
        return (inputs @ self.weight.to(inputs).T).relu()

    @property
    def inputs(self) -> int:
        """How many numbers it takes."""
        return self.weight.shape[1]

    @property
    def features(self) -> int:
        """How many it makes of them."""
        return self.weight.shape[0]

    def to(self, device: torch.device | str | None = None) -> RandomFeatures:
        """The same on another device."""
        return RandomFeatures(self.weight.to(device))


def random_features(inputs: int, features: int, *, seed: int = 0) -> RandomFeatures:
    """Random ReLU features whose size is that of the inputs: W ~ N(0, 2 / inputs) (He et al. 2015).

    >>> random_features(784, 3000)
    RandomFeatures(3000 of 784 inputs)
    """
    require_count(inputs, "random features' inputs")
    require_count(features, "random features' number")
    generator = torch.Generator().manual_seed(seed)
    return RandomFeatures((2 / inputs) ** 0.5 * torch.randn(features, inputs, generator=generator, dtype=torch.float32))


def require_count(value: object, what: str) -> int:
    """`value` as a whole number above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        got = repr(value) if isinstance(value, (int, float, str)) else type(value).__name__
        raise ArgumentError(f"{what} must be a whole number above zero, got {got}.")
    return value


def require_features(inputs: Tensor, width: int, where: str) -> None:
    """Raise unless the inputs are finite floats, (N, width)."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.layout != torch.strided:
        got = f"{inputs.dtype}, {inputs.layout}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(
            f"{where}: features must be a dense tensor of floats, got {got}. Raw images, for one: x.float() / 255."
        )
    if inputs.ndim != 2 or inputs.shape[1] != width:
        cure = " Flatten them: x.flatten(1)." if inputs.ndim > 2 and inputs.shape[1:].numel() == width else ""
        raise DataError(f"{where} has features of shape {tuple(inputs.shape)}; this head takes (N, {width}).{cure}")
    if not bool(inputs.isfinite().all()):
        raise DataError(f"{where} has features that are not finite.")


def designed(inputs: Tensor, random: RandomFeatures | None, like: Tensor) -> Iterator[Tensor]:
    """φ with a constant one, as many rows at a time as are good to have at once: (n, features + 1)."""
    for part in torch.split(inputs.detach(), max(1, _CHUNK // len(like))):
        wide = part.to(like)
        with torch.autocast(wide.device.type, enabled=False):
            phi = wide if random is None else random(wide)
        yield torch.cat([phi, phi.new_ones(len(phi), 1)], 1)
