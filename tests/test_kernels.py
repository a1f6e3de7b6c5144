"""The inner loops against their definitions; on a GPU, against their plain forms."""

import sys

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Diagonal, Logarithmic
from holdfast.kernels import (
    add_gram_,
    add_grams_,
    add_pull_,
    add_squared_products_,
    codes,
    half_squares,
    in_one_pass,
    mirrored,
    shrink_,
)
from holdfast.kernels.codes import Codes
from holdfast.kernels.products import plain_squared_products
from holdfast.kernels.pull import plain_pull

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


# The pull and the step from codes, against the same in float64, of what the codes read as.


def coded_roles(device, dtype=torch.float32, mean=torch.float32, start=0):
    sizes = [(300, 70), (5000,), (1,), (0,), (17, 3, 5), ()]
    draw = torch.Generator().manual_seed(5)
    params = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    grads = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    means = [(param.float() + 0.1 * torch.randn(param.shape, generator=draw)).to(mean) for param in params]
    entries = []
    for size in sizes:
        whole = torch.randn(start + torch.Size(size).numel(), generator=draw).square()
        coded = Logarithmic.of(Diagonal({"w": whole})).coded("w")
        entries.append(Codes(coded.codes[start:].view(size).to(device), coded.tops.to(device), 0.7, start))
    return *([each.to(device) for each in role] for role in (grads, params, means)), entries


KINDS = [
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32), (torch.float64, torch.float32), (torch.float32, torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 7, 112, 1000])  # a multiple of 16 is read by the 16, within a block as well
@pytest.mark.parametrize(("dtype", "mean"), KINDS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("value", [False, True])
def test_the_pull_from_codes(device, start, dtype, mean, scaled, value, monkeypatch):
    monkeypatch.setattr(codes, "PIECE", 1000)
    grads, params, means, entries = coded_roles(device, dtype, mean, start)
    scale = torch.tensor(0.3, dtype=dtype, device=device) if scaled else 0.3
    plain = [[each.double() for each in role] for role in (grads, params, means, [e.unpacked() for e in entries])]
    exact = plain_pull(*plain, float(scale))
    found = add_pull_(grads, params, means, entries, scale, value=value)
    within = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for grad, other in zip(grads, plain[0], strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=within, atol=within)
    assert found is None or float(found) == pytest.approx(float(exact), rel=1e-5)
    assert not value or found is not None
    assert float(half_squares(params, means, entries)) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_the_pull_and_the_step_of_tensors_that_start_anywhere_in_memory(device, dtype, offset):
    torch.manual_seed(0)
    grad, param, mean, entry = (torch.rand(12_304 + offset, device=device).to(dtype)[offset:] for _ in range(4))
    exact = [each.double() for each in (grad, param, mean, entry)]
    add_pull_([grad], [param], [mean], [entry], 0.3)
    shrink_([param], [mean], [entry], [0.3])
    within = 1e-2 if dtype == torch.bfloat16 else 1e-5
    pulled = exact[0] + 0.3 * exact[3] * (exact[1] - exact[2])
    shrunk = exact[2] + (exact[1] - exact[2]) / (1 + 0.3 * exact[3])
    torch.testing.assert_close(grad.double(), pulled, rtol=within, atol=within)
    torch.testing.assert_close(param.double(), shrunk, rtol=within, atol=within)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_the_pull_of_numbers_in_half_precision_is_computed_in_float32(device, kinds):
    """A pull by bfloat16 arithmetic is off by 2⁻⁸; this one is rounded once, as it is added."""
    dtype, narrow = kinds
    grads, params, means, entries = coded_roles(device, dtype, narrow)
    entries = [entry.unpacked().to(narrow) for entry in entries]
    zeros = [torch.zeros_like(grad) for grad in grads]
    exact = [0.5 * e.double() * (p.double() - m.double()) for p, m, e in zip(params, means, entries, strict=True)]
    add_pull_(zeros, params, means, entries, 0.5)
    for found, other in zip(zeros, exact, strict=True):
        torch.testing.assert_close(found.double(), other.to(dtype).double(), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "mean"), KINDS, ids=str)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("start", [0, 7, 112])
def test_the_step_from_codes(device, dtype, mean, each, start, monkeypatch):
    monkeypatch.setattr(codes, "PIECE", 1000)
    _, params, means, entries = coded_roles(device, dtype, mean, start)
    scales = [
        torch.rand(p.shape, generator=torch.Generator().manual_seed(8)).to(device) if each else 3.0 for p in params
    ]
    exact = [
        m.double() + (p.double() - m.double()) / (1 + e.unpacked().double() * s)
        for p, m, e, s in zip(params, means, entries, scales, strict=True)
    ]
    shrink_(params, means, entries, scales)
    within = 5e-3 if dtype == torch.bfloat16 else 1e-6
    for one, other in zip(params, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=within, atol=within)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("each", [False, True])
def test_no_stiffness_is_too_much_for_a_step(device, dtype, each):
    """It ends at the mean, and not at numbers that are none; what is not held stays."""
    entries = torch.tensor([0.0, 1.0, 1e30, 1e36, 1e38], device=device)
    for scale in (1.0, 1e10, 1e38, 1e200):
        params = torch.full((5,), 1000.0, dtype=dtype, device=device)
        many = torch.full((5,), min(scale, 3e38), device=device)
        shrink_([params], [torch.full_like(params, 2.0)], [entries], [many if each else scale])
        assert params[0] == 1000
        assert params[2:].tolist() == [2.0] * 3
        assert float(params[1]) == pytest.approx(2 + 998 / (1 + scale), rel=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_several_dtypes_and_factors_and_those_without_entries(device):
    """On a GPU they are several launches, and where nothing is left there is none."""
    lots = [coded_roles(device, *kinds) for kinds in KINDS[:3]]
    grads, params, means, entries = ([each for lot in lots for each in lot[role]] for role in range(4))
    entries = [entry._replace(factor=2.0) if row % 2 else entry for row, entry in enumerate(entries)]
    entries[:3] = [entry.unpacked().half() for entry in entries[:3]]
    plain = [getattr(entry, "unpacked", lambda entry=entry: entry)().double() for entry in entries]
    others = [[each.double() for each in role] for role in (grads, params, means)]
    exact = plain_pull(*others, plain, 0.3)
    found = add_pull_(grads, params, means, entries, 0.3)
    assert float(found) == pytest.approx(float(exact), rel=1e-5)
    for grad, other in zip(grads, others[0], strict=True):
        within = 1e-2 if grad.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(grad.double(), other, rtol=within, atol=within)
    empty = [[torch.empty(0, device=device)] for _ in range(4)]
    assert float(add_pull_(*empty, 0.3)) == 0
    shrink_(*empty[:3], [0.3])


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
    counted = lambda *args, **how: calls.append(1) or one_pass(*args, **how)  # noqa: E731
    for way in (counted, lambda *args, **how: NotImplemented):
        monkeypatch.setattr(penalty, "add_pull_", way)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("positions", "size"), [(9, 4), (4, 9), (4, 4), (1, 5), (5, 1), (7, 300)])
@pytest.mark.parametrize("lying", ["rows", "columns", "neither"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_over_examples_are_the_same_whichever_way_they_lie(device, positions, size, lying, dtype):
    """Columns, as a convolution unfolds them, are never copied together on a CPU, nor taken one by one on a GPU."""
    torch.manual_seed(0)
    rows = torch.randn(5, positions, size, device=device).to(dtype)
    if lying == "columns":
        rows = rows.mT.contiguous().mT
    elif lying == "neither":
        rows = torch.stack([rows, rows], 2)[:, :, 0]
    total = torch.full((size, size), 2.0, dtype=torch.promote_types(dtype, torch.float32), device=device)
    add_grams_(total, rows)
    exact = 2 + torch.einsum("npi,npj->ij", rows.double(), rows.double())
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(total.triu().double(), exact.triu(), **close)
