"""One of every structure of Λ over the same three parameters, and what the tests compare them by."""

import torch

from holdfast import Dense, Diagonal, Kronecker, LowRank, Precision, Source
from holdfast.precision.layers import Layer
from holdfast.precision.terms import Term

SHAPES = {"w": torch.Size([3, 2]), "b": torch.Size([3]), "s": torch.Size([])}


def source(name, num_data=10.0, unit="example"):
    return (Source(name, num_data, unit, "categorical", "expected"),)


def diagonal(seed, names=("w", "b", "s"), label=None):
    generator = torch.Generator().manual_seed(seed)
    entries = {n: torch.rand(SHAPES[n], generator=generator, dtype=torch.float64) + 0.1 for n in names}
    return Diagonal(entries, source(label or f"diagonal {seed}"))


def dense(seed, names=("w", "b", "s"), label=None):
    shapes = {name: SHAPES[name] for name in names}
    size = sum(shape.numel() for shape in shapes.values())
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Dense(shapes, root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64), source(label or f"dense {seed}"))


def kronecker(seed, terms=1, bias="b", wide=(), label=None):
    """Over w and b as one layer; the scalar s beside it."""
    generator = torch.Generator().manual_seed(seed)

    def factor(size, side):
        root = torch.randn(1, size, size + 1, generator=generator, dtype=torch.float64)
        matrix = root @ root.mT
        return matrix.diagonal(dim1=1, dim2=2).clone() if side in wide else matrix

    layer = Layer("w", bias, SHAPES["w"], 1, 3, False)
    parts = tuple(Term(factor(3, "outputs"), factor(layer.inputs, "inputs"), 10.0) for _ in range(terms))
    found = Kronecker({layer: parts}, source(label or f"kronecker {seed}"))
    names = ("s",) if bias else ("b", "s")
    return found + diagonal(seed + 20, names, label or f"kronecker {seed}")


def rotated(seed, **options):
    kron = kronecker(seed, **options)
    return kron.terms[0].rotated() + kron.terms[1]


def lowrank(seed, names=("w", "b", "s"), rank=4, zeros=0, spanned=None, label=None):
    """With the first `zeros` entries of each parameter zero on the diagonal, directions over the names `spanned`."""
    generator = torch.Generator().manual_seed(seed)
    entries = {n: torch.rand(SHAPES[n], generator=generator, dtype=torch.float64) + 0.1 for n in names}
    for each in entries.values():
        each.view(-1)[:zeros] = 0
    factors = {n: torch.randn(rank, *SHAPES[n], generator=generator, dtype=torch.float64) for n in spanned or names}
    return LowRank(entries, factors, None, source(label or f"lowrank {seed}"))


STRUCTURES = {
    "kronecker": lambda seed: kronecker(seed),
    "kronecker-terms": lambda seed: kronecker(seed, 3),
    "kronecker-no-bias": lambda seed: kronecker(seed, bias=None),
    "kronecker-wide-outputs": lambda seed: kronecker(seed, wide=("outputs",)),
    "kronecker-wide-inputs": lambda seed: kronecker(seed, wide=("inputs",)),
    "kronecker-prior": lambda seed: (
        kronecker(seed)
        + Diagonal({n: torch.full(s, 0.5, dtype=torch.float64) for n, s in SHAPES.items()}, source(f"prior {seed}"))
    ),
    "rotated": lambda seed: rotated(seed),
    "rotated-wide-inputs": lambda seed: rotated(seed, wide=("inputs",)),
    "diagonal": lambda seed: diagonal(seed),
    "dense": lambda seed: dense(seed),
    "dense-other-order": lambda seed: dense(seed, ("s", "b", "w")),
    "blocks": lambda seed: diagonal(seed, ("w",)) + dense(seed + 50, ("b", "s")),
    "overlap": lambda seed: dense(seed, ("w", "b")) + diagonal(seed + 50, ("b", "s")),
    "lowrank": lambda seed: lowrank(seed),
    "lowrank-of-a-part": lambda seed: lowrank(seed, ("s", "b", "w"), spanned=("w", "s")),
    "lowrank-with-zeros": lambda seed: lowrank(seed, zeros=1),
    "lowrank-and-diagonal": lambda seed: diagonal(seed + 50, ("b", "s")) + lowrank(seed, ("w", "s")),
    "lowrank-blocks": lambda seed: lowrank(seed, ("w", "b")) + lowrank(seed + 50, ("s",), rank=2),
    "lowrank-overlap": lambda seed: lowrank(seed) + dense(seed + 50, ("b",)),
}


def vector(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def flat(precision: Precision, tensors):
    return torch.cat([tensors[name].flatten() for name in precision.shapes])


def aligned(precision: Precision, order) -> torch.Tensor:
    """The dense matrix with rows and columns in the order of the names given."""
    place, start = {}, 0
    for name, shape in precision.shapes.items():
        place[name] = torch.arange(start, start + shape.numel())
        start += shape.numel()
    index = torch.cat([place[name] for name in order])
    return precision.dense()[index][:, index]
