"""The networks: shapes, sizes and causality, and that every parameter of them gets a Fisher."""

import torch

import holdfast
from holdfast.bench.networks import Gpt, convolutional, perceptron, resnet


def test_shapes_and_sizes():
    assert perceptron(784, (100, 100), 10)(torch.randn(2, 784)).shape == (2, 10)
    assert sum(p.numel() for p in perceptron(784, (100, 100), 10).parameters()) == 89610
    assert convolutional(3, 32, 10)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    net = resnet(3, 10).eval()
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    # One at the start, two in each of eight blocks, and a 1×1 beside the first block of the last three stages.
    assert sum(isinstance(module, torch.nn.Conv2d) for module in net.modules()) == 20


def test_the_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = Gpt(16, 8, 12, 2, 3).eval()
    codes = torch.randint(0, 16, (1, 8))
    changed = codes.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 16
    torch.testing.assert_close(model(codes)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(codes)[:, 5:], model(changed)[:, 5:])


def test_every_parameter_of_a_gpt_is_tapped():
    model = Gpt(16, 8, 12, 1, 3).eval()
    batch = (torch.randint(0, 16, (4, 8)), torch.randint(0, 16, (4, 8)))
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.tokens(shift=False), targets="observed")
    assert set(fisher.entries) == {name for name, _ in model.named_parameters()}
