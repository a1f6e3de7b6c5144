"""Small problems for variational inference: one whose posterior is known, and one of classes."""

import torch
from torch import Tensor, nn

import holdfast

REGRESSION = holdfast.gaussian(0.5)


def line(seed: int, count: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.double)
    noise = torch.randn(count, 1, generator=generator, dtype=torch.double)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.double) + 0.5 * noise


def exact(x: Tensor, y: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """The mean of the exact posterior, and its precision."""
    known = x.T @ x / 0.25 + precision * torch.eye(3, dtype=torch.double)
    return torch.linalg.solve(known, x.T @ y / 0.25).T, known


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def classes(count: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(count, 4, generator=generator, dtype=torch.double),
        torch.randint(0, 3, (count,), generator=generator),
    )
