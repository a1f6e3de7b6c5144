"""Λδ over one flat vector against its slow twins: `matvec` layer by layer, and the penalty's own gradient."""

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Diagonal, Kronecker
from holdfast.precision.layers import Layer
from holdfast.precision.packed import packed
from holdfast.precision.terms import Term, padded_inputs

DTYPE = torch.float64

# Two alike with a bias and one like them without; weights that are turned, of a convolution, in groups, in heads.
LAYERS = [
    Layer("a", "a.bias", torch.Size([3, 4]), 1, 3, False),
    Layer("c", None, torch.Size([3, 4]), 1, 3, False),
    Layer("b", "b.bias", torch.Size([3, 4]), 1, 3, False),
    Layer("turned", "turned.bias", torch.Size([4, 3]), 1, 4, True),
    Layer("conv", "conv.bias", torch.Size([3, 2, 2, 2]), 1, 3, False),
    Layer("grouped", "grouped.bias", torch.Size([4, 2, 2]), 2, 2, False),
    Layer("heads", None, torch.Size([2, 3, 2]), 2, 3, True),
]
REST = {"norm": torch.Size([3]), "norm.bias": torch.Size([3]), "scale": torch.Size([]), "table": torch.Size([5, 2])}
SHAPES = {name: shape for layer in LAYERS for name, shape in layer.shapes.items()} | REST


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that was not written to is nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(seed, shapes=SHAPES, of=torch.randn):
    generator = torch.Generator().manual_seed(seed)
    return {name: of(shape, generator=generator, dtype=DTYPE) for name, shape in shapes.items()}


def kronecker(seed, terms=1, wide=""):
    generator = torch.Generator().manual_seed(seed)

    def factor(groups, size, side):
        root = torch.randn(groups, size, size + 1, generator=generator, dtype=DTYPE)
        matrix = root @ root.mT
        return matrix.diagonal(dim1=1, dim2=2).clone() if side == wide else matrix

    return Kronecker({
        layer: tuple(
            Term(factor(layer.groups, layer.outputs, "outputs"), factor(layer.groups, layer.inputs, "inputs"), 5.0)
            for _ in range(terms)
        )
        for layer in LAYERS
    })  # fmt: skip


def diagonal(seed, shapes):
    return Diagonal(random(seed, shapes, torch.rand))


STRUCTURES = {
    "one term": lambda: kronecker(1),
    "three terms": lambda: kronecker(1, 3),
    "wide outputs": lambda: kronecker(1, 2, wide="outputs"),
    "wide inputs": lambda: kronecker(1, 2, wide="inputs"),
    "and the rest": lambda: kronecker(1) + diagonal(2, REST),
    "and a prior": lambda: kronecker(1) + diagonal(2, SHAPES),
    "and a part": lambda: kronecker(1) + diagonal(2, {name: SHAPES[name] for name in ("table", "conv", "a.bias")}),
    "a number for all": lambda: (
        kronecker(1) + Diagonal({name: torch.tensor(0.5, dtype=DTYPE).expand(shape) for name, shape in SHAPES.items()})
    ),
}


def widened(precision):
    """The same with inputs padded as they are on a GPU."""
    for term in precision.terms if isinstance(precision, holdfast.Sum) else (precision,):
        if isinstance(term, Kronecker):
            term.__dict__["aligned"] = padded_inputs(term.layers, 32)
    return precision


@pytest.mark.parametrize("small", [0, 4, 2**14])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_the_product_layer_by_layer(structure, pad, small, monkeypatch):
    monkeypatch.setattr("holdfast.precision.packed._SMALL", small)
    precision, params, mean = STRUCTURES[structure](), random(3), random(4)
    delta = {name: params[name] - mean[name] for name in precision.shapes}
    expected, value = precision.matvec(delta), 0.5 * precision.quadratic(delta)
    one = packed(widened(precision) if pad else precision, mean)
    assert bool(one.pads) == pad
    pulls, found = one.pull(params)
    assert set(pulls) == set(expected)
    for name, pull in pulls.items():
        torch.testing.assert_close(pull, expected[name])
    torch.testing.assert_close(found, value)


@pytest.mark.parametrize(("at_once", "stacks"), [(2**26, [1, 1, 1, 1, 1, 2]), (1, [1] * 7)])
def test_layers_alike_go_through_one_product_where_their_inputs_were_padded(at_once, stacks, monkeypatch):
    monkeypatch.setattr("holdfast.precision.packed._AT_ONCE", at_once)
    precision, params, mean = kronecker(1, 2), random(3), random(4)
    expected = precision.matvec({name: params[name] - mean[name] for name in precision.shapes})
    one = packed(widened(precision), mean)
    assert sorted(len(round_.inputs) for _, rounds in one.layers for round_ in rounds[:1]) == stacks
    for name, pull in one.pull(params)[0].items():
        torch.testing.assert_close(pull, expected[name])


@pytest.mark.parametrize("small", [0, 2**14])
def test_parameters_laid_out_otherwise_and_narrower_ones_are_taken(small, monkeypatch):
    monkeypatch.setattr("holdfast.precision.packed._SMALL", small)
    precision, params, mean = STRUCTURES["and a prior"](), random(3), random(4)
    params["conv"] = params["conv"].contiguous(memory_format=torch.channels_last)
    params["a"], params["table"] = params["a"].mT.contiguous().mT, params["table"].bfloat16()
    one = packed(precision, mean)
    assert one.takes(params.values())
    expected = precision.matvec({name: params[name].to(DTYPE) - mean[name] for name in SHAPES})
    for name, pull in one.pull(params)[0].items():
        torch.testing.assert_close(pull, expected[name])


def test_a_long_sum_in_float32_keeps_its_digits():
    layer = Layer("w", None, torch.Size([600, 1000]), 1, 600, False)
    ones = (torch.ones(1, 600), torch.ones(1, 1000))
    mean = {"w": torch.zeros(600, 1000)}
    params = {"w": torch.rand(600, 1000, generator=torch.Generator().manual_seed(0)) + 1}
    _, value = packed(Kronecker({layer: (Term(*ones, 1.0),)}), mean).pull(params)
    torch.testing.assert_close(value.double(), 0.5 * params["w"].double().square().sum(), rtol=2e-6, atol=0)


class Sub(torch.Tensor):
    pass


def test_what_it_does_not_take():
    mean = random(4)
    precision = kronecker(1)
    assert packed(diagonal(2, SHAPES), mean) is None
    assert packed(precision.rotated() + diagonal(2, SHAPES), mean) is None
    assert packed(precision.to(dtype=torch.float32), mean) is None
    half = {name: value.bfloat16() for name, value in mean.items()}
    assert packed(precision.to(dtype=torch.bfloat16), half) is None
    apart = Layer("w", None, torch.Size([4, 2, 2]), 2, 2, True)  # a transposed convolution in groups
    eyes = [torch.eye(size, dtype=DTYPE).expand(2, size, size) for size in (apart.outputs, apart.inputs)]
    assert packed(Kronecker({apart: (Term(*eyes, 1.0),)}), random(4, apart.shapes)) is None
    bare = Layer("a", None, torch.Size([3, 4]), 1, 3, False)
    other = Kronecker({bare: (Term(torch.eye(3, dtype=DTYPE)[None], torch.eye(4, dtype=DTYPE)[None], 1.0),)})
    assert packed(precision + other, mean) is None
    one = packed(precision.to(dtype=torch.float32), {name: value.float() for name, value in mean.items()})
    assert one.takes([torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2).half()])
    for odd in (torch.ones(2).double(), torch.ones(2).as_subclass(Sub), torch.ones(2, device="meta")):
        assert not one.takes([torch.ones(2), odd])
