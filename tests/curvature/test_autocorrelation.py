"""What a kernel saw, multiplied without unfolding it, against what it saw, unfolded."""

import itertools

import pytest
import torch
from torch import nn

import holdfast
from holdfast.curvature.autocorrelation import Patches
from oracles import relative_errors

# kernel, dilation, places, groups
SETTINGS = {
    "1-d": ((3,), (1,), (20,), 1),
    "1-d, dilated, wider than its input": ((4,), (3,), (5,), 2),
    "2-d": ((3, 3), (1, 1), (9, 7), 1),
    "in groups": ((3, 3), (1, 1), (6, 8), 3),
    "dilated": ((3, 2), (2, 3), (8, 9), 1),
    "one row": ((1, 3), (1, 2), (6, 7), 1),
    "one column": ((3, 1), (2, 1), (6, 7), 1),
    "one entry": ((1, 1), (1, 1), (4, 5), 1),
    "even": ((2, 4), (1, 1), (7, 7), 1),
    "5×5 over little": ((5, 5), (1, 1), (2, 3), 2),
    "one row of places": ((1, 3), (1, 1), (1, 7), 1),
    "one place": ((3, 3), (2, 2), (1, 1), 1),
    "3-d": ((3, 2, 3), (1, 2, 1), (4, 5, 3), 1),
}


def patches(name: str, dtype: torch.dtype) -> Patches:
    kernel, dilation, places, groups = SETTINGS[name]
    axes = enumerate(zip(kernel, dilation, places, strict=True))
    space = [n + (k - 1) * g + spare for spare, (k, g, n) in axes]  # some that the kernel never reached
    return Patches(torch.randn(5, groups, 4, *space, dtype=dtype), kernel, dilation, places)


def unfolded(patches: Patches) -> torch.Tensor:
    """Every a, as it is: (groups, channels · kernel, examples · places)."""
    under, seen = patches.under.transpose(0, 1), []
    for offset in itertools.product(*map(range, patches.kernel)):
        axes = zip(offset, patches.dilation, patches.places, strict=True)
        seen.append(under[(..., *(slice(at * gap, at * gap + places) for at, gap, places in axes))])
    return torch.stack(seen, 3).movedim(1, 3).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("step", [5, 2])
def test_products_of_what_a_kernel_saw(name, dtype, error, step):
    torch.manual_seed(0)
    some = patches(name, dtype)
    every = unfolded(some)
    total = torch.zeros(len(every), *2 * every.shape[1:2], dtype=dtype)
    some.add_grams_(total, step)
    wanted = (every.double() @ every.double().mT).to(dtype)
    torch.testing.assert_close(total, wanted, rtol=0, atol=error * wanted.abs().max().item())
    sums = every.double().sum(-1).to(dtype)
    torch.testing.assert_close(some.sums(dtype), sums, rtol=0, atol=error * 10 * sums.abs().max().item())


def test_a_sum_of_squares_is_not_negative_where_all_of_it_leaves_the_window():
    torch.manual_seed(0)
    under = torch.zeros(64, 1, 16, 34, 34)
    under[..., 1] = torch.randn(64, 1, 16, 34)
    total = torch.zeros(1, 144, 144)
    Patches(under, (3, 3), (1, 1), (32, 32)).add_grams_(total, 64)
    assert total.diagonal(dim1=1, dim2=2).min() >= 0
    assert torch.linalg.eigvalsh(total.double()).min() > -1e-6 * total.max()


def test_it_pays_where_the_places_are_many():
    under = torch.zeros(1, 1, 1, 99, 99)
    pays = {n: Patches(under, (3, 3), (1, 1), (n, n)).pays for n in (1, 3, 4, 8, 16, 32)}
    assert pays == {1: False, 3: False, 4: False, 8: True, 16: True, 32: True}
    assert not Patches(under, (1, 1), (1, 1), (32, 32)).pays
    assert Patches(under[0], (3,), (1,), (32,)).pays


class Convolutions(nn.Module):
    """The second is used twice, the third transposed, the fourth dilated: all with enough channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 16, 3), nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular")
        self.third, self.fourth = nn.ConvTranspose2d(16, 16, 3), nn.Conv2d(16, 16, 3, dilation=2, bias=False)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.second(self.first(x)).tanh()).tanh()
        return self.last(self.fourth(self.third(x).tanh()).tanh().mean((2, 3)))


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("targets", ["observed", "expected"])
def test_factors_are_the_same_as_unfolded(monkeypatch, size, targets):
    torch.manual_seed(0)
    model = Convolutions().double()
    batch = torch.randn(size, 2, 14, 12, dtype=torch.float64), torch.randint(0, 3, (size,))
    used = []
    add = Patches.add_grams_
    monkeypatch.setattr(Patches, "add_grams_", lambda self, *rest: used.append(self) or add(self, *rest))
    fast = holdfast.kronecker_fisher(model, [batch], holdfast.categorical, targets=targets).tensors
    assert used
    monkeypatch.setattr(Patches, "pays", False)
    slow = holdfast.kronecker_fisher(model, [batch], holdfast.categorical, targets=targets).tensors
    assert max(relative_errors(fast, slow).values()) < 1e-12
