"""What every Λ can do, whatever its structure."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from ..devices import full
from ..errors import ArgumentError, MismatchError, SingularError, require_number
from ..params import contains, require_shapes
from ..pieces import cut, in_pieces
from .source import Source

# A matrix over more entries than this is refused: in float32 it would take over a gigabyte.
DENSE_LIMIT = 16_384


class Precision(abc.ABC):
    """Λ over named parameters: symmetric, positive semi-definite, a sum over examples in nats.

    Deltas are `dict[str, Tensor]` and may hold more names than Λ covers; where Λ covers nothing it is zero.
    """

    @property
    @abc.abstractmethod
    def sources(self) -> tuple[Source, ...]:
        """The data and priors it was computed from."""

    @property
    @abc.abstractmethod
    def shapes(self) -> dict[str, torch.Size]:
        """The parameters it covers."""

    @property
    @abc.abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What it keeps, by name."""

    @abc.abstractmethod
    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Λδ."""

    @abc.abstractmethod
    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Λ⁺v, the smallest x with Λx = v; zero where Λ is zero."""

    @abc.abstractmethod
    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of Λ, in the parameters' shapes."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """Λ as one matrix, over the flattened parameters in the order of `shapes`."""

    @abc.abstractmethod
    def logdet(self) -> Tensor:
        """log det Λ. A singular Λ raises `SingularError`."""

    @abc.abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """A draw from N(0, Λ⁻¹). A singular Λ raises `SingularError`."""

    @abc.abstractmethod
    def expanded(self, shapes: Mapping[str, torch.Size]) -> Precision:
        """Λ for parameters that grew to `shapes`, zero on the new entries."""

    @abc.abstractmethod
    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same Λ with parameters under new names."""

    @abc.abstractmethod
    def scaled(self, factor: float) -> Self:
        """factor · Λ, and as much of its data. Written `factor * Λ`."""

    @abc.abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same on another device, or in another floating dtype."""

    @abc.abstractmethod
    def plus(self, other: Precision) -> Precision | None:
        """The exact sum as one structure, or None where only a sum of terms is exact."""

    def minus(self, part: Precision) -> Precision | None:
        """Λ without a part of it, exact, or None where there is no closed form. Written `Λ - part`."""
        return None

    @abc.abstractmethod
    def structure(self) -> dict[str, Any]:
        """What a file must say, besides its tensors and sources, for `rebuilt` to make it again."""

    @classmethod
    @abc.abstractmethod
    def rebuilt(cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]) -> Self:
        """The inverse of `structure` and `tensors`."""

    @property
    def num_data(self) -> float:
        """How many examples (or tokens) it stands for."""
        return sum(source.num_data for source in self.sources)

    @property
    def unit(self) -> str:
        """What `num_data` counts: "example", "token", or nothing for a prior alone."""
        return next((source.unit for source in self.sources if source.unit), "")

    def entrywise(self) -> dict[str, Tensor] | None:
        """Λ's diagonal if it is all there is to Λ: then its pull on each entry is that entry's own affair."""
        return None

    def quadratic(self, delta: Mapping[str, Tensor]) -> Tensor:
        """δᵀΛδ."""
        return inner(delta, self.matvec(delta))

    def is_zero(self) -> bool:
        """Whether it holds nothing at all."""
        return not any(bool(full(tensor.any())) for tensor in self.tensors.values())

    def merged(self) -> Precision:
        """Λ in memory that does not grow with the number of its terms: an approximation where there are several."""
        return self

    def unpacked(self) -> Precision:
        """The same in ordinary numbers, where it is kept in codes."""
        return self

    def blocks(self) -> tuple[Precision, ...]:
        """Parts over separate parameters that Λ is the sum of, as many as its structure has."""
        return (self,)

    def __add__(self, other: object) -> Precision:
        if not isinstance(other, Precision):
            return NotImplemented
        from .sum import Sum  # the one structure that knows every other

        if not self.shapes or not other.shapes:  # a copy: a sum shares no memory with its terms
            return 1.0 * (other if other.shapes else self)
        common = {name: shape for name, shape in self.shapes.items() if name in other.shapes}
        require_shapes(common, other.shapes, what="one precision", than="the other")
        one, more = self.unpacked(), other.unpacked()
        return one.plus(more) or more.plus(one) or Sum.of(one, more)

    def __sub__(self, part: object) -> Precision:
        if not isinstance(part, Precision):
            return NotImplemented
        rest = self.unpacked().minus(part.unpacked()) if part.shapes else 1.0 * self
        if rest is None:
            raise MismatchError(
                f"{type(part).__name__} cannot be taken out of {type(self).__name__} exactly. Diagonals can be taken "
                "out of diagonal, dense and low-rank precisions, dense ones out of dense ones that cover the same "
                "parameters, and a Kronecker product out of a sum that keeps it as a term: consolidate(..., "
                "exact=True) does."
            )
        return rest

    def __radd__(self, other: object) -> Precision:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # where sum() starts

    def __mul__(self, factor: object) -> Self:
        if not isinstance(factor, Real):
            return NotImplemented
        return self.scaled(require_number(factor, "what a precision is multiplied by"))

    def __rmul__(self, factor: object) -> Self:
        return self * factor

    def __truediv__(self, divisor: object) -> Self:
        return self * (1 / require_number(divisor, "what a precision is divided by", positive=True))

    def __repr__(self) -> str:
        entries = sum(shape.numel() for shape in self.shapes.values())
        data = f"{self.num_data:g} {self.unit}s" if self.unit else "no data"
        return f"{type(self).__name__}({entries:,} entries of {len(self.shapes)} parameters, {data})"


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Σ aᵢbᵢ over the names of b, all of it: of tensors in pieces on several processes, the sum of all pieces."""
    parts = [(a[name] * b[name]).sum() for name in b]
    if any(in_pieces(part) for part in parts):
        return _whole_sum(parts)
    alike = len({(part.device, part.dtype) for part in parts}) == 1
    return torch.stack(parts).sum() if alike else sum(parts, start=torch.zeros(()))


def _whole_sum(parts: list[Any]) -> Tensor:
    """A sum of numbers in pieces: those that are cut alike are added up first, and then sent once."""
    cut_alike: dict[Any, Any] = {}
    for each in parts:
        key = (each.device_mesh, each.placements) if in_pieces(each) else None
        cut_alike[key] = cut_alike[key] + each if key in cut_alike else each
    whole: list[Tensor] = [full(each) for each in cut_alike.values()]
    return sum(whole[1:], start=whole[0])


def added(*parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors added up, over all the names."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def require_growth(old: torch.Size, new: torch.Size) -> None:
    """Raise where an axis would shrink."""
    if not contains(new, old):
        raise MismatchError(f"shape {tuple(old)} cannot grow to {tuple(new)}: an axis would shrink.")


def grown(tensor: Tensor, shape: torch.Size, fill: Tensor | None = None) -> Tensor:
    """`tensor` in the first entries of a larger one, `fill` (or zero) in the rest."""
    require_growth(tensor.shape, shape)
    larger = tensor.new_zeros(shape) if fill is None else fill.to(tensor).clone()
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger


def require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ArgumentError(f"`{name}` must hold floating-point numbers, got {tensor.dtype}.")
    # The sum tells in one pass and without temporaries, unless it overflows.
    if not bool(full(tensor.sum().isfinite())) and not bool(full(tensor.isfinite().all())):
        raise ArgumentError(f"`{name}` has values that are not finite.")


def in_full_precision(like: Tensor) -> torch.autocast:
    """Under autocast a matmul would run in half precision, whatever the matrix is kept in."""
    return torch.autocast(like.device.type, enabled=False)


def require_dense(size: int) -> None:
    if size > DENSE_LIMIT:
        raise ArgumentError(
            f"a dense matrix over {size:,} entries would take {size**2 * 4 / 2**30:.1f} GiB; the limit is "
            f"{DENSE_LIMIT:,} entries. Use a structured precision, or freeze all but the parameters it is for."
        )


def counted(entries: int, name: str) -> str:
    """So many entries of a parameter, for an error."""
    return f"{entries} {'entry' if entries == 1 else 'entries'} of `{name}`"


def singular(what: str, where: Iterable[str]) -> SingularError:
    return SingularError(
        f"{what} needs a positive definite precision, but it is zero in {', '.join(where)}. Start from a proper prior, "
        "holdfast.prior(model, precision=...) with a small positive number, so that no direction is free."
    )


def standard_normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None and in_pieces(like):
        raise ArgumentError(
            "processes that hold pieces of one draw must draw alike: give a generator with one seed on all of them."
        )
    # Drawn where the generator lives, so that one seed gives one draw on every device, and on every process.
    device = generator.device if generator is not None else like.device
    return cut(torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device).to(like.device), like)


def require_nonnegative(rest: Tensor, whole: Tensor, name: str) -> Tensor:
    """`rest` of a subtraction from `whole`, rounding errors below zero set to zero; more than that raises."""
    rounding = 64 * torch.finfo(whole.dtype).eps * whole
    if bool((rest < -rounding).any()):
        raise MismatchError(
            f"the base has more precision in `{name}` than what was made from it: it is not where they came from."
        )
    return rest.clamp(min=0)
