"""The factors in docs/units.md: torch's loss = c · nll.sum() / n + a constant."""

import pytest
import torch
from torch import nn

import holdfast

K, SIGMA = 5, 0.3


def slope(loss, likelihood, outputs, target, units):
    """c, from two outputs: the constant cancels."""
    ours = [likelihood.nll(output, target).sum() / units for output in outputs]
    theirs = [loss(output, target) for output in outputs]
    return float((theirs[1] - theirs[0]) / (ours[1] - ours[0]))


@pytest.mark.parametrize(
    ("loss", "likelihood", "target", "c"),
    [
        (nn.CrossEntropyLoss(), holdfast.categorical, torch.randint(0, K, (8,)), 1),
        (nn.BCEWithLogitsLoss(), holdfast.bernoulli, torch.rand(8, K).double(), 1 / K),
        (nn.MSELoss(), holdfast.gaussian(SIGMA), torch.randn(8, K).double(), 2 * SIGMA**2 / K),
        (
            lambda output, target: nn.GaussianNLLLoss()(output, target, torch.full_like(output, SIGMA**2)),
            holdfast.gaussian(SIGMA),
            torch.randn(8, K).double(),
            1 / K,
        ),
        (nn.CrossEntropyLoss(reduction="sum"), holdfast.categorical, torch.randint(0, K, (8,)), 8),
    ],
    ids=["cross-entropy", "binary", "squared", "gaussian", "sum"],
)
def test_the_factor_of_a_loss(loss, likelihood, target, c):
    outputs = torch.randn(2, 8, K, dtype=torch.float64)
    assert slope(loss, likelihood, outputs, target, 8) == pytest.approx(c, rel=1e-9)


def test_the_factor_of_a_language_models_loss_is_one_per_token():
    ids = torch.randint(0, K, (3, 7))
    labels = ids.clone()
    labels[0, 4:] = -100
    likelihood = holdfast.tokens(shift=True)

    def causal(output, labels):
        return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    outputs = torch.randn(2, 3, 7, K, dtype=torch.float64)
    assert slope(causal, likelihood, outputs, labels, likelihood.count(3, labels)) == pytest.approx(1, rel=1e-9)


def test_strength_c_with_such_a_loss_is_joint_training():
    """Linear regression by MSELoss over two outputs: the held optimum is that of both datasets together."""
    torch.manual_seed(0)
    tasks = [(torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)) for _ in range(2)]
    both = [torch.cat(parts) for parts in zip(*tasks, strict=True)]
    model = nn.Linear(3, 2).double()
    likelihood, c = holdfast.gaussian(SIGMA), 2 * SIGMA**2 / 2

    def fitted(x, y, posterior):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with holdfast.hold(optimizer, model, posterior, num_data=len(x), strength=c):
            for _ in range(2000):
                optimizer.zero_grad()
                nn.MSELoss()(model(x), y).backward()
                optimizer.step()

    fitted(*tasks[0], holdfast.prior(model))
    fisher = holdfast.dense_fisher(model, tasks[:1], likelihood)
    fitted(*tasks[1], holdfast.consolidate(holdfast.prior(model), model, fisher))
    held = model.weight.detach().clone()
    fitted(*both, holdfast.prior(model))
    torch.testing.assert_close(held, model.weight.detach(), rtol=1e-7, atol=1e-7)
