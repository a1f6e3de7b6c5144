"""Whatever torch's default dtype is, a float32 model is remembered and held in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Diagonal, Logarithmic
from holdfast.kernels import codes
from holdfast.pieces import Box

FISHERS = {
    "diagonal": holdfast.diagonal_fisher,
    "Kronecker": holdfast.kronecker_fisher,
    "low rank": partial(holdfast.lowrank_fisher, rank=2),
}


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(16, 5, dtype=torch.float32), torch.randint(3, (16,))) for _ in range(4)]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).float()


def held(fisher: str, small: bool, optimizer: type[torch.optim.Optimizer], within: torch.dtype) -> list[torch.Tensor]:
    """What a model's weights are after a few held steps."""
    model, batches = net(), data()
    with default(within):
        found = FISHERS[fisher](model, batches, holdfast.categorical)
        known = holdfast.consolidate(holdfast.prior(model), model, found)
        known = known.compact() if small else known
        trained = optimizer(model.parameters(), lr=0.05)
        with holdfast.hold(trained, model, known, num_data=64, strength=10.0) as handle:
            for x, y in batches:
                trained.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                trained.step()
            rise = holdfast.forecast(model, known).rise
            numbers = torch.tensor([handle.penalty, rise], dtype=torch.float64)
    return [*(p.detach().clone() for p in model.parameters()), numbers]


@pytest.mark.parametrize("within", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(("fisher", "small"), [(name, False) for name in FISHERS] + [("diagonal", True)])
def test_a_hold_is_the_same(fisher, small, optimizer, within):
    for found, exact in zip(
        held(fisher, small, optimizer, within), held(fisher, small, optimizer, torch.float32), strict=True
    ):
        assert found.dtype == exact.dtype
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


def test_codes_of_pieces_that_do_not_follow_each_other_are_read_in_float32():
    values = torch.rand(6, 50, dtype=torch.float32)
    small = Logarithmic.of(Diagonal({"w": values}))
    columns = Box((6, 50), (0, 10), (6, 20))
    assert columns.start is None
    with default(torch.bfloat16):
        found = codes.unpacked(small.codes["w"][:, 10:30], small.tops["w"], 1.0, columns)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, small.unpacked().entries["w"][:, 10:30], rtol=0, atol=0)


def test_weights_of_kept_inputs_keep_their_digits():
    with default(torch.bfloat16):
        kept = holdfast.kept_inputs(torch.randn(3, 5), num_data=1001)
    assert kept.weights.dtype == torch.float32
    assert float(kept.weights.sum()) == pytest.approx(1001, rel=1e-6)


def test_weights_of_own_text_keep_their_digits():
    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 4))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table[tokens]

    model = Next()
    with default(torch.bfloat16):
        text = holdfast.own_text(model, count=3, length=2, num_data=1001, start=torch.tensor([[0]]))
    assert text.weights.dtype == torch.float32
    assert float(text.weights.sum()) == pytest.approx(1001, rel=1e-6)
