"""Models that make drawing hard: weights used where nobody looks, parts run again or mixed, half precision."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holdfast
from variational_cases import REGRESSION, classes, exact, line, perceptron


def field(model: nn.Module, **options) -> holdfast.MeanField:
    options = {"num_data": 16, "deviation": 0.3} | options
    return holdfast.mean_field(model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, **options)


class Product(torch.autograd.Function):
    """A linear layer that no function of torch's is seen to call."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 3, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


def test_weights_used_where_nobody_looks_are_drawn_themselves():
    model, (x, y) = Hidden(), line(0)
    q = holdfast.mean_field(model, holdfast.prior(model, 1.0, mean=0.0), REGRESSION, num_data=120, samples=2)
    optimizer = torch.optim.Adam(q.parameters(), lr=0.03)
    for _ in range(800):
        optimizer.zero_grad()
        q((x, y)).backward()
        optimizer.step()
    _, precision = exact(x, y, 1.0)
    torch.testing.assert_close(q.posterior().precision.entries["weight"][0], precision.diagonal(), rtol=0.4, atol=0)


class Kept(nn.Module):
    """A layer that keeps a reference of its own to its weight, past which nothing else can be put."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0], self.layer.bias)


def test_a_weight_used_past_its_draw_is_refused():
    with pytest.raises(holdfast.ArgumentError, match=r"`layer.weight`.*reference"):
        field(Kept().double())(classes())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(self.reentrant)
        return self.head(checkpoint(lambda given: torch.tanh(self.inner(given)), x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_what_is_run_again_in_the_backward_pass_is_refused(reentrant, local):
    model = Checkpointed(reentrant).double()
    with pytest.raises(holdfast.ArgumentError, match=r"checkpointing.*IVON"):
        field(model, local=local)(classes())


def test_ivon_takes_checkpoints_as_they_are():
    ours, theirs = Checkpointed(False).double(), Checkpointed(False).double()
    theirs.load_state_dict(ours.state_dict())
    x, y = classes()
    for model, plain in ((ours, False), (theirs, True)):
        optimizer = holdfast.IVON(model, holdfast.prior(model, 1.0), holdfast.categorical, num_data=16, start=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.sampled():
                output = model.head(torch.tanh(model.inner(x))) if plain else model(x)
                F.cross_entropy(output, y).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def test_in_front_of_batch_norm_weights_are_drawn_themselves():
    """A bias in front of it does nothing, however wide it is; noise of each example's own would."""
    q = field(normed(), deviation=1e-9)
    still = float(q.expected_nll(classes()).detach())
    with torch.no_grad():
        q._logs["0.bias"].fill_(1.0)
    assert [float(q.expected_nll(classes()).detach()) for _ in range(5)] == pytest.approx(5 * [still], rel=1e-6)


def test_a_call_runs_the_model_once_for_each_draw():
    model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    x, y = classes()
    field(model, samples=2)((x.unsqueeze(1), y))
    assert int(model[2].num_batches_tracked) == 2


def test_small_deviations_are_not_lost_in_half_precision():
    torch.manual_seed(0)
    model = nn.Linear(50, 40, bias=False)
    nn.init.zeros_(model.weight)
    tilt = holdfast.custom(lambda output, target: output.float().square().sum(1), name="squares")
    q = holdfast.mean_field(model, holdfast.prior(model, 1.0), tilt, num_data=16, deviation=1e-3)
    x = torch.ones(16, 50)
    with torch.autocast("cpu", torch.float16):
        loss = q.expected_nll((x, torch.zeros(16)))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(40 * 50 * 1e-6, rel=0.2)
    assert bool(q.log_deviations[0].grad.any())


def test_weights_in_bfloat16():
    q = field(perceptron().bfloat16())
    x, y = classes()
    q((x.bfloat16(), y)).backward()
    assert all(bool(p.grad.any()) for p in q.parameters())


class Sometimes(nn.Module):
    """Stochastic depth: a layer that half of the runs skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.head(self.second(self.first(x)) if self.runs % 2 else self.first(x))


def test_the_runs_of_a_pair_may_differ():
    q = field(Sometimes().double(), samples=2)
    for _ in range(3):
        assert bool(q(classes()).isfinite())


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 3)),
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Flatten(), nn.Linear(12, 3)),
    ],
    ids=["embedding", "attention"],
)
def test_noise_arrives_at_every_weight(model):
    torch.manual_seed(0)
    q = field(model())
    q((torch.arange(48).view(16, 3) % 7, classes()[1])).backward()
    assert all(bool(each.grad.any()) for each in q.log_deviations)


def test_a_field_is_resumed_to_the_last_bit_and_under_no_other_prior():
    def stepped(q: holdfast.MeanField, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        q(classes()).backward()
        optimizer.step()

    first, second = field(perceptron()), field(perceptron())
    optimizers = [torch.optim.SGD(q.parameters(), lr=0.1) for q in (first, second)]
    stepped(first, optimizers[0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    stepped(first, optimizers[0])
    stepped(second, optimizers[1])
    assert first.posterior().id == second.posterior().id
    other = holdfast.mean_field(
        perceptron(), holdfast.prior(perceptron(), 2.0, mean=0.0), holdfast.categorical, num_data=16
    )
    with pytest.raises(holdfast.MismatchError, match="saved under another prior"):
        other.load_state_dict(first.state_dict())


def test_a_batch_without_labels_leaves_the_divergence():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    likelihood = holdfast.tokens(shift=False)
    q = holdfast.mean_field(model, holdfast.prior(model, 1.0), likelihood, num_data=16)
    batch = (torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3), -100))
    torch.testing.assert_close(q(batch), q.divergence() / 16)


def test_what_is_let_train_later_is_refused():
    model = perceptron()
    model[2].requires_grad_(False)
    q = field(model)
    q(classes())
    model[2].requires_grad_(True)
    with pytest.raises(holdfast.MismatchError, match=r"`2.weight`.*trains, and the prior does not have it"):
        q(classes())


def test_batches_that_are_only_judged_are_not_counted():
    q = field(perceptron())
    with torch.no_grad():
        q(classes())
    with pytest.raises(holdfast.InertError, match="no batch was seen"):
        q.posterior()
