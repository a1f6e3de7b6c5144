"""A number per parameter in a byte: the logarithms of a diagonal's entries, in blocks of 256."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2
from typing import Any, Self

import torch
from torch import Tensor

from ..devices import full, part
from ..errors import ArgumentError, require_number
from ..kernels.codes import BLOCK, HIGHEST, LARGEST, LOWEST, STEPS, ZERO, Codes, packed, unpacked
from ..pieces import box, cut, largest, spread
from .base import Precision, require_growth
from .diagonal import Diagonal
from .source import Source, thinned

_GRID = {"block": BLOCK, "steps": STEPS}


@dataclass(frozen=True, eq=False, repr=False)
class Logarithmic(Precision):
    """Λ = diag(entries), the entries kept as codes: 1.01 bytes each.

    They are off by at most 2 % within 2¹⁴ of the largest in their block of 256 (of the flattened parameter), by at
    most 2⁻¹⁴ of it below; zeros are zero, and what is positive stays positive: what float32 has no number for is
    refused. Scaling is exact, by a factor beside the codes; sums and differences are of the entries as they are read,
    and so diagonals of ordinary numbers. Of a parameter in pieces each process has its own codes, and the tops of all
    blocks.

    >>> Λ = Logarithmic.of(Diagonal({"w": torch.tensor([1.0, 4.0, 0.0])}))
    >>> Λ.diagonal()["w"], Λ.codes["w"]
    (tensor([1., 4., 0.]), tensor([ 36,   0, 255], dtype=torch.uint8))
    """

    codes: dict[str, Tensor]  # uint8, as the parameters
    tops: dict[str, Tensor]  # int16, one for each block
    factor: float = 1.0
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        require_number(self.factor, "the factor of a precision in codes")
        if set(self.codes) != set(self.tops):
            raise ArgumentError("a precision in codes has the tops of its blocks for each parameter.")
        for name, codes in self.codes.items():
            tops, blocks = self.tops[name], -(-codes.numel() // BLOCK)
            if codes.dtype != torch.uint8 or tops.dtype != torch.int16 or tops.shape != (blocks,):
                raise ArgumentError(
                    f"`{name}` must have codes in torch.uint8 and {blocks} tops in torch.int16, one for each {BLOCK}; "
                    f"got {codes.dtype}, and {tops.dtype} of shape {tuple(tops.shape)}. "
                    "holdfast.Logarithmic.of(diagonal) makes them."
                )
            # Half a step beyond the largest number is how far it may have been rounded.
            scaled = max(0.0, STEPS * log2(self.factor)) if self.factor else 0.0
            if blocks and int(tops.max()) + scaled > STEPS * log2(LARGEST) + 0.6:
                raise ArgumentError(f"`{name}` has values that are not finite.")

    @staticmethod
    def of(diagonal: Precision) -> Logarithmic:
        """A diagonal in codes; one that is in codes already as it is."""
        if isinstance(diagonal, Logarithmic):
            return diagonal
        if not isinstance(diagonal, Diagonal):
            raise ArgumentError(
                f"a diagonal can be kept in codes of 8 bits, and this is {type(diagonal).__name__}, whose matrices "
                "cannot. In half precision it takes half the memory: .to(dtype=torch.bfloat16)."
            )
        codes, tops = {}, {}
        for name, entries in diagonal.entries.items():
            here, top, lowest = packed(part(entries), box(entries), lambda mine, like=entries: largest(mine, like))  # type: ignore[misc]
            if lowest < LOWEST or (len(top) and int(top.max()) > HIGHEST):
                much = "small" if lowest < LOWEST else "large"
                raise ArgumentError(
                    f"`{name}` has values too {much} to be kept in codes, which are read in float32: from 1.2e-38 to "
                    "3.4e38, and zero. Keep the memory as it is, a Diagonal."
                )
            codes[name], tops[name] = spread(here, entries), top
        return Logarithmic(codes, tops, 1.0, diagonal.sources)

    @cached_property
    def _runs(self) -> dict[str, Codes]:
        """What was asked for before: at every step of a hold."""
        return {}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: codes.shape for name, codes in self.codes.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, codes in self.codes.items():
            found[f"{name}.code"], found[f"{name}.top"] = codes, self.tops[name]
        device = next((tops.device for tops in self.tops.values()), None)
        return {**found, "factor": torch.tensor(self.factor, dtype=torch.float64, device=device)}

    def coded(self, name: str) -> Codes | Tensor:
        """What this process has of a parameter's entries: in codes, if they follow each other, and else read."""
        if name not in self._runs:
            codes, start = self.codes[name], box(self.codes[name]).start
            if start is None:
                return part(self._read(name))
            self._runs[name] = Codes(part(codes).contiguous(), self.tops[name], self.factor, start)
        return self._runs[name]

    def unpacked(self) -> Diagonal:
        """The same in ordinary numbers, four bytes each."""
        return Diagonal(self.diagonal(), self.sources)

    def diagonal(self) -> dict[str, Tensor]:
        return {name: self._read(name) for name in self.codes}

    def entrywise(self) -> dict[str, Tensor] | None:
        return self.diagonal()

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._read(name) * delta[name] for name in self.codes}

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.unpacked().solve(vector)

    def dense(self) -> Tensor:
        return self.unpacked().dense()

    def logdet(self) -> Tensor:
        return self.unpacked().logdet()

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return self.unpacked().sample(generator)

    def is_zero(self) -> bool:
        return not self.factor or not any(bool(full((codes != ZERO).any())) for codes in self.codes.values())

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Precision:
        """As others do. What grows is in other blocks then, and all of it a diagonal of ordinary numbers."""
        for name, shape in self.shapes.items():
            require_growth(shape, shapes.get(name, shape))
        same = all(shapes.get(name, shape) == shape for name, shape in self.shapes.items())
        return self if same else self.unpacked().expanded(shapes)

    def renamed(self, names: Mapping[str, str]) -> Self:
        codes, tops = (
            {names.get(name, name): tensor for name, tensor in each.items()} for each in (self.codes, self.tops)
        )
        return replace(self, codes=codes, tops=tops)

    def scaled(self, factor: float) -> Self:
        return replace(self, factor=factor * self.factor, sources=thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same on another device. Codes have no floating dtype to change."""
        codes, tops = ({name: tensor.to(device) for name, tensor in each.items()} for each in (self.codes, self.tops))
        return replace(self, codes=codes, tops=tops)

    def cut(self, like: Mapping[str, Tensor]) -> Logarithmic:
        """The same in pieces as other tensors are, not an entry of it changed."""
        return replace(self, codes={name: cut(codes, like[name]) for name, codes in self.codes.items()})

    def plus(self, other: Precision) -> Precision | None:
        plain = other.unpacked()
        return self.unpacked().plus(plain) or plain.plus(self.unpacked())

    def minus(self, part: Precision) -> Precision | None:
        return self.unpacked().minus(part.unpacked())

    def blocks(self) -> tuple[Precision, ...]:
        return tuple(replace(self, codes={n: codes}, tops={n: self.tops[n]}) for n, codes in self.codes.items())

    def structure(self) -> dict[str, Any]:
        return dict(_GRID)

    @classmethod
    def rebuilt(cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]) -> Self:
        if any(structure[key] != value for key, value in _GRID.items()):
            raise ArgumentError(f"its codes are on another grid than {STEPS} steps to an octave, in blocks of {BLOCK}.")
        codes, tops = (
            {key.removesuffix(end): tensor for key, tensor in tensors.items() if key.endswith(end)}
            for end in (".code", ".top")
        )
        return cls(codes, tops, float(tensors["factor"]), sources)

    def _read(self, name: str) -> Tensor:
        codes = self.codes[name]
        return spread(unpacked(part(codes), self.tops[name], self.factor, box(codes)), codes)


def weights(precision: Precision, like: Mapping[str, Any]) -> list[Tensor | Codes] | None:
    """What this process has of the entries of a precision, in codes where they are, for parameters that it covers.

    None where it is more than entries, or where they are not in pieces as the parameters are.
    """
    held = precision.codes if isinstance(precision, Logarithmic) else precision.entrywise()
    if held is None or any(_layout(held[name]) != _layout(each) for name, each in like.items()):
        return None
    return [precision.coded(n) if isinstance(precision, Logarithmic) else part(held[n]) for n in like]


def _layout(tensor: Any) -> Any:
    return getattr(tensor, "placements", None)
