"""A product of two small matrices per layer, one over its outputs and one over its inputs: Λ = G ⊗ A."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .base import DENSE_LIMIT, Precision, in_full_precision, require_dense
from .dense import Dense
from .factors import diagonal, eigen, embedded, full, require_factor, sandwiched
from .iterative import conjugate_gradients
from .layers import Layer
from .rotated import Basis, Rotated, stacked
from .source import Source, joined, parted, thinned
from .terms import Term, averaged, diagonal_in, nearest_product, padded_inputs


@dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Precision):
    """Λ = Σₜ Gₜ ⊗ Aₜ for each layer, which for a layer's matrix is δ ↦ Σₜ Gₜ δ Aₜ.

    `+` keeps the terms; `merged()` makes one of them. Without a prior a factor is often singular (an input that is
    always zero); with one that is a single number everything has a closed form in the factors' eigenvectors.
    """

    layers: dict[Layer, tuple[Term, ...]]
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        for layer, terms in self.layers.items():
            for term in terms:
                require_factor(term.outputs, layer.groups, layer.outputs, f"G of `{layer.weight}`")
                require_factor(term.inputs, layer.groups, layer.inputs, f"A of `{layer.weight}`")
                if not (0 <= term.num_data < float("inf")):
                    raise ArgumentError(f"a term of `{layer.weight}` stands for {term.num_data} examples.")
        names = [name for layer in self.layers for name in layer.shapes]
        if len(set(names)) < len(names) or not all(self.layers.values()):
            raise ArgumentError("a Kronecker precision has each parameter in one layer, and a term for every layer.")

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape for layer in self.layers for name, shape in layer.shapes.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, terms in self.layers.items():
            for index, term in enumerate(terms):
                found[f"{layer.weight}.{index}.outputs"] = term.outputs
                found[f"{layer.weight}.{index}.inputs"] = term.inputs
        return found

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, terms in self.aligned.items():
            matrix = layer.matrix(delta, terms[0].inputs.shape[-1])
            with in_full_precision(matrix):
                products = [sandwiched(term.outputs.to(matrix), matrix, term.inputs.to(matrix)) for term in terms]
                product = products[0] if len(products) == 1 else torch.stack(products).sum(0)
            found |= layer.tensors(product[..., : layer.inputs])
        return found

    @cached_property
    def aligned(self) -> dict[Layer, tuple[Term, ...]]:
        """The terms; on a GPU with inputs padded to eights, which its matrix units want: a bias makes an odd number."""
        on_gpu = any(tensor.is_cuda for tensor in self.tensors.values())
        return padded_inputs(self.layers, 8) if on_gpu else self.layers

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, terms in self.layers.items():
            block, size = Kronecker({layer: terms}), sum(shape.numel() for shape in layer.shapes.values())
            if len(terms) == 1:
                found |= block.in_eigenvectors(cut=True).solve(vector)
            elif size <= DENSE_LIMIT:
                found |= Dense(layer.shapes, block.dense()).solve(vector)
            else:
                found |= conjugate_gradients(block.matvec, vector, list(layer.shapes))
        return found

    def diagonal(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, terms in self.layers.items():
            entries = [diagonal(term.outputs).unsqueeze(-1) * diagonal(term.inputs).unsqueeze(-2) for term in terms]
            found |= layer.tensors(torch.stack(entries).sum(0))
        return found

    def dense(self) -> Tensor:
        require_dense(sum(shape.numel() for shape in self.shapes.values()))
        return stacked([_block(layer, terms) for layer, terms in self.layers.items()])

    def logdet(self) -> Tensor:
        return sum((block.logdet() for block in self._apart()), start=torch.zeros(()))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        dtype = _dtype(self.tensors)
        return {name: value.to(dtype) for block in self._apart() for name, value in block.sample(generator).items()}

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Kronecker:
        grown = {}
        for layer, terms in self.layers.items():
            larger, outputs, inputs = layer.expanded(shapes)
            grown[larger] = tuple(
                Term(
                    embedded(term.outputs, outputs, larger.outputs),
                    embedded(term.inputs, inputs, larger.inputs),
                    term.num_data,
                )
                for term in terms
            )
        return Kronecker(grown, self.sources)

    def renamed(self, names: Mapping[str, str]) -> Kronecker:
        return Kronecker({layer.renamed(names): terms for layer, terms in self.layers.items()}, self.sources)

    def scaled(self, factor: float) -> Kronecker:
        def scale(term: Term) -> Term:
            return Term(factor * term.outputs, term.inputs, factor * term.num_data)

        return self._each(scale, thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Kronecker:
        def move(term: Term) -> Term:
            return replace(
                term,
                outputs=term.outputs.to(device=device, dtype=dtype),
                inputs=term.inputs.to(device=device, dtype=dtype),
            )

        return self._each(move, self.sources)

    def plus(self, other: Precision) -> Precision | None:
        if not isinstance(other, Kronecker):
            return None
        alike, apart = set(self.layers) & set(other.layers), set(self.layers) ^ set(other.layers)
        if len({name for layer in apart for name in layer.shapes}) < sum(len(layer.shapes) for layer in apart) or any(
            name in layer.shapes for each in apart for name in each.shapes for layer in alike
        ):
            return None  # one folds a bias in, or parts a weight, as the other does not
        layers = {layer: terms + other.layers.get(layer, ()) for layer, terms in self.layers.items()}
        layers |= {layer: terms for layer, terms in other.layers.items() if layer not in layers}
        return Kronecker(layers, joined(*((each.shapes, each.sources) for each in (self, other))))

    def minus(self, part: Precision) -> Precision | None:
        if not isinstance(part, Kronecker):
            return None
        rest = {layer: list(terms) for layer, terms in self.layers.items()}
        for layer, terms in part.layers.items():
            for term in terms:
                found = next((at for at, each in enumerate(rest.get(layer, [])) if _same(each, term)), None)
                if found is None:
                    return None
                del rest[layer][found]  # one of them, where it is there twice
        left = {layer: tuple(terms) for layer, terms in rest.items() if terms}
        return Kronecker(left, parted(self.sources, part.sources))

    def merged(self) -> Kronecker:
        """One term per layer: G = ΣGₜ and A = Σ NₜAₜ / ΣNₜ. Exact if the As are alike.

        Its cross terms Gₛ ⊗ Aₜ are what recent tasks say of the curvature at the inputs of old ones, whose own G is of
        weights long left: it holds better than the exact sum (benchmarks/structures.py).
        """
        return self._one(averaged)

    def nearest(self) -> Kronecker:
        """One term per layer: the Kronecker product nearest to the sum, in the Frobenius norm."""
        return self._one(nearest_product)

    def rotated(self) -> Rotated:
        """The sum's own diagonal in the eigenvectors of the merged factors; exact where there is one term."""
        return self.in_eigenvectors(cut=True).to(dtype=_dtype(self.tensors))

    def in_eigenvectors(self, *, cut: bool) -> Rotated:
        """The same in float64; with `cut`, directions that cannot be told from free ones are free."""
        layers = {}
        for layer, terms in self.layers.items():
            one = terms[0] if len(terms) == 1 else averaged(terms)
            g, outputs = eigen(one.outputs, f"G of `{layer.weight}`", cut=cut)
            a, inputs = eigen(one.inputs, f"A of `{layer.weight}`", cut=cut)
            basis = Basis(outputs, inputs)
            if len(terms) == 1:
                layers[layer] = (basis, g.unsqueeze(-1) * a.unsqueeze(-2))
                continue
            parts = [
                diagonal_in(term.outputs, outputs).unsqueeze(-1) * diagonal_in(term.inputs, inputs).unsqueeze(-2)
                for term in terms
            ]
            layers[layer] = (basis, torch.stack(parts).sum(0))
        return Rotated(layers, self.sources)

    def is_zero(self) -> bool:
        return not any(
            bool(term.outputs.any()) and bool(term.inputs.any()) for terms in self.layers.values() for term in terms
        )

    def blocks(self) -> tuple[Precision, ...]:
        return tuple(Kronecker({layer: terms}, self.sources) for layer, terms in self.layers.items())

    def structure(self) -> dict[str, Any]:
        counts = {layer: [term.num_data for term in terms] for layer, terms in self.layers.items()}
        return {"layers": [{**layer.described(), "num_data": each} for layer, each in counts.items()]}

    @classmethod
    def rebuilt(
        cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]
    ) -> Kronecker:
        layers = {}
        for facts in structure["layers"]:
            layer = Layer.made(facts)
            layers[layer] = tuple(
                Term(
                    tensors[f"{layer.weight}.{index}.outputs"], tensors[f"{layer.weight}.{index}.inputs"], float(count)
                )
                for index, count in enumerate(facts["num_data"])
            )
        return Kronecker(layers, sources)

    def _each(self, change: Callable[[Term], Term], sources: tuple[Source, ...]) -> Kronecker:
        return Kronecker({layer: tuple(map(change, terms)) for layer, terms in self.layers.items()}, sources)

    def _one(self, join: Callable[[tuple[Term, ...]], Term]) -> Kronecker:
        layers: dict[Layer, tuple[Term, ...]] = {
            layer: terms if len(terms) == 1 else (join(terms),) for layer, terms in self.layers.items()
        }
        return Kronecker(layers, self.sources)

    def _apart(self) -> list[Precision]:
        """Each layer in a form that has an inverse: in its eigenvectors, or dense where terms do not share them."""
        found: list[Precision] = []
        for layer, terms in self.layers.items():
            block = Kronecker({layer: terms}, self.sources)
            if len(terms) > 1:
                require_dense_terms(layer, len(terms))
            found.append(
                block.in_eigenvectors(cut=True) if len(terms) == 1 else Dense(layer.shapes, block.dense(), self.sources)
            )
        return found


def require_dense_terms(layer: Layer, terms: int) -> None:
    """Raise where several terms' sum, which has no closed inverse, is too large for a dense one."""
    size = sum(shape.numel() for shape in layer.shapes.values())
    try:
        require_dense(size)
    except ArgumentError as error:
        raise ArgumentError(
            f"`{layer.weight}` has {terms} Kronecker terms, whose sum has no closed inverse, and is too large for a "
            f"dense one ({size:,} entries). Make one term of them: .merged()."
        ) from error


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The widest there is."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.float32)


def _same(a: Term, b: Term) -> bool:
    return torch.equal(a.outputs, b.outputs) and torch.equal(a.inputs, b.inputs)


def _block(layer: Layer, terms: tuple[Term, ...]) -> Tensor:
    size = sum(shape.numel() for shape in layer.shapes.values())
    like = terms[0].outputs
    matrix, places = like.new_zeros(size, size), layer.places().to(like.device)
    for group, place in enumerate(places):
        at = place.flatten()
        for term in terms:
            matrix[at.unsqueeze(1), at] += torch.kron(full(term.outputs)[group], full(term.inputs)[group])
    return matrix
