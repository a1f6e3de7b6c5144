"""The inner loops against their definitions; on a GPU, against their plain forms."""

import sys

import pytest
import torch
from torch import nn

import holdfast
from holdfast.kernels import add_gram_, add_pull_, add_squared_products_, codes, in_one_pass, mirrored, shrink_
from holdfast.kernels.products import plain_squared_products
from holdfast.kernels.pull import plain_pull, takes_pull

penalty = sys.modules["holdfast.penalty"]  # the front door has a function of that name

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SHAPES = [(5, 1, 7, 6, 4), (3, 2, 9, 4, 5), (4, 1, 33, 130, 200), (2, 1, 64, 129, 257), (17, 1, 40, 64, 64)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_squared_products(device, shape, dtype, within):
    """bfloat16 factors have exact products: only the sums are rounded."""
    batch, groups, positions, rows, columns = shape
    torch.manual_seed(0)
    left = torch.randn(batch, groups, positions, rows, device=device).to(dtype)
    right = torch.randn(batch, groups, positions, columns, device=device).to(dtype)
    total = torch.ones(groups, rows, columns, device=device, dtype=torch.promote_types(dtype, torch.float32))
    exact = 1 + torch.einsum("bgtr,bgtc->bgrc", left.double(), right.double()).square().sum(0)
    for add in (add_squared_products_, plain_squared_products):
        found = total.clone()
        add(found, left, right)
        assert float((found - exact).norm() / exact.norm()) <= within
        add(found, left, right)  # it adds
        assert float((found - (2 * exact - 1)).norm() / exact.norm()) <= 2 * within


@pytest.mark.parametrize("device", DEVICES)
def test_squared_products_of_sides_that_are_views(device):
    torch.manual_seed(0)
    left = torch.randn(50, 4, 96, device=device).transpose(0, 1).unsqueeze(1)  # time first
    right = torch.randn(4, 128, 50, device=device).mT.unsqueeze(1)
    total = torch.zeros(1, 96, 128, device=device)
    add_squared_products_(total, left, right)
    exact = torch.einsum("bgtr,bgtc->bgrc", left.double(), right.double()).square().sum(0)
    assert float((total - exact).norm() / exact.norm()) <= 1e-5


def roles(device, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = [(300, 70), (5000,), (1,), (0,), (17, 3, 5)]
    return [[torch.randn(size, device=device, dtype=dtype) for size in sizes] for _ in range(4)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_pull_on_all_parameters(device, scaled, dtype, within, monkeypatch):
    monkeypatch.setattr(codes, "PIECE", 1000)
    grads, params, means, entries = roles(device, dtype)
    scale = torch.tensor(0.3, device=device, dtype=dtype) if scaled else 0.3
    exact = [g + 0.3 * e * (p - m) for g, p, m, e in zip(grads, params, means, entries, strict=True)]
    value = sum(0.5 * (e * (p - m) ** 2).sum() for p, m, e in zip(params, means, entries, strict=True))
    for add in (add_pull_, plain_pull):
        found = [grad.clone() for grad in grads]
        assert float(add(found, params, means, entries, scale)) == pytest.approx(float(value), rel=1e-4)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_shrinking_all_parameters(device, dtype, monkeypatch):
    monkeypatch.setattr(codes, "PIECE", 1000)
    params, means, entries, _ = roles(device, dtype)
    entries = [entry.square() for entry in entries]
    exact = [
        m.double() + (p.double() - m.double()) / (1 + 3.0 * e.double())
        for p, m, e in zip(params, means, entries, strict=True)
    ]
    shrink_(params, means, entries, [3.0] * len(params))
    for one, other in zip(params, exact, strict=True):
        within = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(one.double(), other, rtol=within, atol=within)
    stay = [param.clone() for param in params]
    shrink_(params, means, [torch.zeros_like(entry) for entry in entries], [3.0] * len(params))
    assert all(torch.equal(one, other) for one, other in zip(params, stay, strict=True))


def test_what_one_pass_can_serve():
    grads, params, means, entries = roles("cpu")
    assert in_one_pass(grads, params, means, entries)
    assert not in_one_pass(grads, params, [mean.double() for mean in means], entries)
    assert not in_one_pass([grad.to("meta") for grad in grads], params, means, entries)
    assert not in_one_pass([*grads[:-1], torch.eye(3).to_sparse()], params, means, entries)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hold_pulls_the_same_in_one_pass_and_parameter_by_parameter(device, monkeypatch):
    calls, ends = [], []
    one_pass = penalty.add_pull_
    monkeypatch.setattr(penalty, "add_pull_", lambda *args, **how: calls.append(1) or one_pass(*args, **how))
    for allowed in (True, False):
        monkeypatch.setattr(penalty, "takes_pull", takes_pull if allowed else lambda *roles: False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
        x, y = torch.randn(12, 6, device=device), torch.arange(12, device=device) % 3
        fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.hold(optimizer, model, posterior, num_data=12, strength=3.0, proximal=False):
            for step in range(5):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.roll(step, 1)), y).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert len(calls) == 5  # in the first run alone
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


def test_small_sums_do_not_lose_digits_to_the_total_they_are_added_to():
    """Products added row by row to a total that has grown large are rounded to it: relative errors of 1e-4."""
    torch.manual_seed(0)
    total, exact = torch.zeros(10, 10), torch.zeros(10, 10, dtype=torch.float64)
    for _ in range(400):
        rows = torch.randn(1000, 10)
        rows -= rows.mean(1, keepdim=True)  # one direction is zero, as in the gradients of a softmax
        add_gram_(total, rows)
        exact += rows.double().T @ rows.double()
    assert (mirrored(total) - exact).norm() < 2e-6 * exact.norm()
    assert torch.linalg.eigvalsh(mirrored(total).double())[0] > -1e-5 * exact.norm()
