import pytest
import torch
from torch import nn

import holdfast
from cases import CASES, Case, relu_mlp, vectors
from holdfast.curvature.hessian import random_signs
from oracles import flat, hessian

SMOOTH = [case for case in CASES if case.forward is None]


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_the_diagonal_hessian_equals_that_of_torch_func(case):
    exact = hessian(case, case.model(), case.batches()).diagonal()
    found = holdfast.diagonal_hessian(case.model(), case.batches((3, 4)), case.likelihood, forward=case.forward)
    torch.testing.assert_close(flat(found.entries), exact, rtol=1e-9, atol=1e-11)
    assert found.sources[0].targets == "observed"


def test_hutchinson_is_within_four_standard_errors_and_the_more_batches_the_nearer():
    case = CASES[3]
    exact = hessian(case, case.model(), case.batches()).diagonal()
    errors = []
    for sizes in ((7,), (2, 5), (1,) * 7):
        batches = case.batches(sizes)
        parts = [hessian(case, case.model(), [each]) for each in batches]
        expected = sum((each.square().sum(1) - each.diagonal().square()) / 400 for each in parts).sqrt()
        estimate = holdfast.hutchinson_hessian(case.model(), batches, case.likelihood, probes=400)
        assert ((flat(estimate.entries) - exact).abs() <= 4 * expected + 1e-9).all()
        errors.append(float(expected.norm()))
        again = holdfast.hutchinson_hessian(case.model(), batches, case.likelihood, probes=400)
        assert torch.equal(flat(again.entries), flat(estimate.entries))
        other = holdfast.hutchinson_hessian(case.model(), batches, case.likelihood, probes=400, seed=1)
        assert not torch.equal(flat(other.entries), flat(estimate.entries))
    assert errors == sorted(errors, reverse=True)


def test_signs_are_even_and_apart():
    """Of any two entries, in one word of the generator's or in two, as many agree as not; and no draw is the last."""
    coins = torch.Generator().manual_seed(0)
    draws = torch.stack([random_signs(torch.empty(3, 43), coins) for _ in range(4000)]).flatten(
        1
    )  # two words and a bit
    assert set(draws.unique().tolist()) == {-1.0, 1.0}
    together = draws.T @ draws / len(draws)
    assert (together - torch.eye(129)).abs().max() < 5.5 / len(draws) ** 0.5  # of 8256 pairs: 4 are within chance
    assert draws.mean(0).abs().max() < 4.5 / len(draws) ** 0.5
    assert (draws[1:] * draws[:-1]).mean().abs() < 4 / draws.numel() ** 0.5
    assert random_signs(torch.empty(0, 3, dtype=torch.float64), coins).shape == (0, 3)


def test_attention_is_differentiated_twice():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x):
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            return self.head(nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2)))

    case = Case("attention", Attends, holdfast.categorical,
                lambda n: (torch.randn(n, 5, 4, dtype=torch.float64), torch.randint(0, 3, (n,))))  # fmt: skip
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = hessian(case, case.model(), case.batches()).diagonal()
    found = holdfast.diagonal_hessian(case.model(), case.batches(), case.likelihood)
    torch.testing.assert_close(flat(found.entries), exact, rtol=1e-9, atol=1e-11)


def test_negative_curvature_is_kept_refused_and_clamped_by_name():
    case = Case(
        "mlp", lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), holdfast.categorical, vectors(5, 3)
    )
    model = case.model()
    found = holdfast.diagonal_hessian(model, case.batches((30,)), case.likelihood)
    assert sum(found.negative.values()) > 0
    with pytest.raises(holdfast.ArgumentError, match=r"negative entries: .*`0.weight`.*clamped"):
        holdfast.consolidate(holdfast.prior(model), model, found)
    clamped = holdfast.consolidate(holdfast.prior(model), model, found.clamped())
    assert torch.equal(flat(clamped.precision.diagonal()), flat(found.entries).clamp(min=0))
    # Where the prior is stronger than the negative curvature, the sum is a precision and is exact.
    lowest = -float(flat(found.entries).min())
    exact = holdfast.consolidate(holdfast.prior(model, precision=lowest + 1), model, found)
    torch.testing.assert_close(flat(exact.precision.diagonal()), flat(found.entries) + lowest + 1)


def test_at_a_minimum_it_takes_the_fishers_place():
    model = nn.Linear(5, 3).double()
    batches = Case("", relu_mlp, holdfast.categorical, vectors(5, 3)).batches((40,))
    posterior = holdfast.consolidate(
        holdfast.prior(model), model, 2.0 * holdfast.diagonal_hessian(model, batches, holdfast.categorical)
    )
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical)
    torch.testing.assert_close(flat(posterior.precision.diagonal()), 2 * flat(fisher.entries))
    assert posterior.num_data == 80


def test_at_least_one_probe():
    with pytest.raises(holdfast.ArgumentError, match="at least one probe"):
        holdfast.hutchinson_hessian(relu_mlp(), [], holdfast.categorical, probes=0)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.parametrize(
    "hessian", [holdfast.diagonal_hessian, lambda *given: holdfast.hutchinson_hessian(*given, seed=0)]
)
def test_an_operation_without_a_second_derivative_is_refused(hessian):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.second(_Once.apply(self.first(x)))

    with pytest.raises(holdfast.DataError, match="once_differentiable"):
        hessian(Model(), [(torch.randn(10, 3), torch.randn(10, 2))], holdfast.gaussian(1.0))


@pytest.mark.parametrize("hessian", [holdfast.diagonal_hessian, holdfast.hutchinson_hessian])
def test_an_operation_that_torch_cannot_differentiate_twice_is_refused(hessian):
    model = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 2))
    batch = (torch.tensor([[0, 1], [2, 3], [4, 4]]), torch.tensor([0, 1, 1]))
    with pytest.raises(holdfast.DataError, match=r"batch 0: .* twice .*embedding_bag.* Freeze"):
        hessian(model, [batch], holdfast.categorical)


class Bilinear(nn.Module):
    """A loss that is linear in each of its layers, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 1), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_a_loss_that_is_linear_in_a_parameter_has_no_curvature_there():
    torch.manual_seed(0)
    hinge = holdfast.custom(lambda output, y: (1 - (2 * y - 1) * output[:, 0]).clamp(min=0))
    batch = (torch.randn(6, 3), torch.randint(0, 2, (6,)))
    found = holdfast.diagonal_hessian(Bilinear(), [batch], hinge)
    assert not flat(found.entries).any()
    assert found.entries["unused"].shape == (2,)
