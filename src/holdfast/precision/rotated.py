"""A diagonal in another basis: the eigenvectors of a layer's outputs and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .base import Precision, in_full_precision, require_dense, require_finite, singular, standard_normal
from .diagonal import Diagonal
from .layers import Layer
from .source import Source, joined, thinned


@dataclass(frozen=True)
class Basis:
    """Orthonormal directions over a layer's outputs and its inputs, the columns of matrices; None: its own axes."""

    outputs: Tensor | None  # (groups, outputs, outputs)
    inputs: Tensor | None  # (groups, inputs, inputs)

    def into(self, matrix: Tensor) -> Tensor:
        """Q_Gᵀ M Q_A: a layer's matrix as the basis has it."""
        matrix = matrix if self.inputs is None else matrix @ self.inputs.to(matrix)
        return matrix if self.outputs is None else self.outputs.to(matrix).mT @ matrix

    def back(self, matrix: Tensor) -> Tensor:
        """Q_G M Q_Aᵀ."""
        matrix = matrix if self.inputs is None else matrix @ self.inputs.to(matrix).mT
        return matrix if self.outputs is None else self.outputs.to(matrix) @ matrix

    def squared(self) -> Basis:
        """Squares of the entries, which carry a diagonal from one basis to another."""
        return Basis(*(None if side is None else side.square() for side in (self.outputs, self.inputs)))

    def seen_from(self, other: Basis) -> Basis:
        """This basis in the coordinates of another."""

        def side(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
            if mine is None or theirs is None:
                return mine if theirs is None else theirs.mT
            return theirs.to(mine).mT @ mine

        return Basis(side(self.outputs, other.outputs), side(self.inputs, other.inputs))


@dataclass(frozen=True, eq=False, repr=False)
class Rotated(Precision):
    """Λ = (Q_G ⊗ Q_A) diag(entries) (Q_G ⊗ Q_A)ᵀ for each layer, entries ≥ 0.

    What a Kronecker product is in the eigenvectors of its factors; with entries of its own it is the eigenvalue-
    corrected form (George et al., 2018), and rotated EWC (Liu et al., 2018).
    """

    layers: dict[Layer, tuple[Basis, Tensor]]  # entries: (groups, outputs, inputs)
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        for layer, (basis, entries) in self.layers.items():
            require_finite(layer.weight, entries)
            if entries.shape != (layer.groups, layer.outputs, layer.inputs) or bool((entries < 0).any()):
                raise ArgumentError(f"the entries for `{layer.weight}` have another shape, or are negative.")
            for side, size in ((basis.outputs, layer.outputs), (basis.inputs, layer.inputs)):
                if side is not None:
                    require_finite(layer.weight, side)
                    if side.shape != (layer.groups, size, size):
                        raise ArgumentError(f"the basis for `{layer.weight}` does not fit its {size} directions.")

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape for layer in self.layers for name, shape in layer.shapes.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, (basis, entries) in self.layers.items():
            parts = {"entries": entries, "outputs": basis.outputs, "inputs": basis.inputs}
            found |= {f"{layer.weight}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        return found

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._mapped(delta, lambda entries, matrix: entries.to(matrix) * matrix)

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._mapped(
            vector, lambda entries, matrix: torch.where(entries > 0, matrix / entries.where(entries > 0, 1), 0)
        )

    def diagonal(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, (basis, entries) in self.layers.items():
            with in_full_precision(entries):
                found |= layer.tensors(basis.squared().back(entries))
        return found

    def dense(self) -> Tensor:
        require_dense(sum(shape.numel() for shape in self.shapes.values()))
        blocks = [_block(layer, basis, entries) for layer, (basis, entries) in self.layers.items()]
        return stacked(blocks)

    def logdet(self) -> Tensor:
        self._require_positive("log det")
        return sum((entries.log().sum() for _, entries in self.layers.values()), start=torch.zeros(()))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        self._require_positive("a sample")
        found: dict[str, Tensor] = {}
        for layer, (basis, entries) in self.layers.items():
            with in_full_precision(entries):
                found |= layer.tensors(basis.back(standard_normal(entries, generator) / entries.sqrt()))
        return found

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Rotated:
        grown = {}
        for layer, (basis, entries) in self.layers.items():
            larger, *places = layer.expanded(shapes)
            sizes = larger.outputs, larger.inputs
            wide = entries.new_zeros(layer.groups, *sizes)
            sides = (basis.outputs, basis.inputs)
            # Old directions come first in a basis, and the new axes behind them; without one, axes are directions.
            rows, columns = (
                (place if side is None else torch.arange(len(place))).to(entries.device)
                for side, place in zip(sides, places, strict=True)
            )
            wide[:, rows.unsqueeze(1), columns] = entries
            widened = (
                None if side is None else _widened(side, place.to(side.device), size)
                for side, place, size in zip(sides, places, sizes, strict=True)
            )
            grown[larger] = (Basis(*widened), wide)
        return Rotated(grown, self.sources)

    def renamed(self, names: Mapping[str, str]) -> Rotated:
        return Rotated({layer.renamed(names): each for layer, each in self.layers.items()}, self.sources)

    def scaled(self, factor: float) -> Rotated:
        layers = {layer: (basis, factor * entries) for layer, (basis, entries) in self.layers.items()}
        return Rotated(layers, thinned(self.sources, factor))

    def turned(self, bases: Mapping[Layer, Basis]) -> Rotated:
        """The diagonal that Λ has in other bases, what is off it left out. Exact in its own."""
        layers = {}
        for layer, (basis, entries) in self.layers.items():
            with in_full_precision(entries):
                layers[layer] = (bases[layer], basis.seen_from(bases[layer]).squared().back(entries))
        return Rotated(layers, self.sources)

    def merged_with(self, newer: Rotated) -> Rotated | None:
        """The sum's diagonal in the newer one's basis, in the memory of one; None if they are of other layers."""
        if set(self.layers) != set(newer.layers):
            return None
        old = self.turned({layer: basis for layer, (basis, _) in newer.layers.items()})
        layers = {
            layer: (basis, entries + old.layers[layer][1].to(entries))
            for layer, (basis, entries) in newer.layers.items()
        }
        return Rotated(layers, joined((self.shapes, self.sources), (newer.shapes, newer.sources)))

    def shifted(self, layer: Layer, amount: Tensor, sources: tuple[Source, ...]) -> Rotated:
        """Λ + c·I over one layer: the identity is the same in every basis."""
        basis, entries = self.layers[layer]
        return Rotated({**self.layers, layer: (basis, entries + amount.to(entries))}, sources)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Rotated:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        layers = {
            layer: (Basis(moved(basis.outputs), moved(basis.inputs)), entries.to(device=device, dtype=dtype))
            for layer, (basis, entries) in self.layers.items()
        }
        return Rotated(layers, self.sources)

    def plus(self, other: Precision) -> Precision | None:
        if not isinstance(other, Rotated) or set(self.shapes) & set(other.shapes):
            return None
        return Rotated({**self.layers, **other.layers}, joined(*((x.shapes, x.sources) for x in (self, other))))

    def is_zero(self) -> bool:
        return not any(bool(entries.any()) for _, entries in self.layers.values())

    def blocks(self) -> tuple[Precision, ...]:
        return tuple(Rotated({layer: each}, self.sources) for layer, each in self.layers.items())

    def structure(self) -> dict[str, Any]:
        return {"layers": [layer.described() for layer in self.layers]}

    @classmethod
    def rebuilt(
        cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]
    ) -> Rotated:
        layers = {}
        for facts in structure["layers"]:
            layer = Layer.made(facts)
            outputs, inputs = (tensors.get(f"{layer.weight}.{part}") for part in ("outputs", "inputs"))
            for side in (outputs, inputs):
                _require_orthonormal(side, layer.weight)
            layers[layer] = (Basis(outputs, inputs), tensors[f"{layer.weight}.entries"])
        return Rotated(layers, sources)

    def _mapped(self, tensors: Mapping[str, Tensor], change: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, (basis, entries) in self.layers.items():
            with in_full_precision(entries):
                matrix = layer.matrix(tensors)
                found |= layer.tensors(basis.back(change(entries, basis.into(matrix))))
        return found

    def _require_positive(self, what: str) -> None:
        where = [
            f"{int((entries == 0).sum())} of {entries.numel()} directions of `{layer.weight}`"
            for layer, (_, entries) in self.layers.items()
            if not bool(entries.all())
        ]
        if where:
            raise singular(what, where)


def with_shift(members: Sequence[Precision]) -> Rotated | None:
    """A rotated block and diagonals that are one number over the whole of it, as one rotated block; else None."""
    rotated = [member for member in members if isinstance(member, Rotated)]
    diagonals = [member for member in members if isinstance(member, Diagonal)]
    if len(rotated) != 1 or len(diagonals) != len(members) - 1 or len(rotated[0].layers) != 1:
        return None
    (layer,) = rotated[0].layers
    covered = {name: entries for member in diagonals for name, entries in member.entries.items()}
    if len(covered) < sum(len(member.entries) for member in diagonals) or set(covered) != set(layer.shapes):
        return None
    amount = covered[layer.weight].flatten()[0]
    if not all(bool((entries == amount).all()) for entries in covered.values()):
        return None
    return rotated[0].shifted(layer, amount, joined(*((each.shapes, each.sources) for each in members)))


def stacked(blocks: Sequence[Tensor]) -> Tensor:
    """Matrices along a diagonal."""
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found


def _block(layer: Layer, basis: Basis, entries: Tensor) -> Tensor:
    size = sum(shape.numel() for shape in layer.shapes.values())
    matrix, places = entries.new_zeros(size, size), layer.places().to(entries.device)
    for group, place in enumerate(places):
        sides = [
            torch.eye(count, dtype=entries.dtype, device=entries.device) if side is None else side[group].to(entries)
            for side, count in ((basis.outputs, layer.outputs), (basis.inputs, layer.inputs))
        ]
        vectors, at = torch.kron(*(side.contiguous() for side in sides)), place.flatten()
        matrix[at.unsqueeze(1), at] = (vectors * entries[group].flatten()) @ vectors.T
    return matrix


def _require_orthonormal(side: Tensor | None, name: str) -> None:
    """Raise unless the columns are orthonormal but for rounding: the inverse is written with their transpose."""
    if side is not None:
        error = (side.mT.double() @ side.double() - torch.eye(side.shape[-1], dtype=torch.float64)).abs().max()
        if not bool(error <= 100 * side.shape[-1] * torch.finfo(side.dtype).eps):
            raise ArgumentError(f"the basis for `{name}` is not orthonormal.")


def _widened(side: Tensor, places: Tensor, size: int) -> Tensor:
    """An orthonormal basis with the axes that are new."""
    new = torch.ones(size, dtype=torch.bool, device=side.device)
    new[places] = False
    fresh, old = new.nonzero().flatten(), slice(0, side.shape[-1])
    larger = side.new_zeros(len(side), size, size)
    larger[:, places, old] = side
    larger[:, fresh, torch.arange(side.shape[-1], size, device=side.device)] = 1
    return larger
