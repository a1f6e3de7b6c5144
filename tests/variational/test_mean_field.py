"""Bayes by backprop: the exact posterior where there is one, local noise against drawn weights, chains, refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast import Diagonal, Posterior
from variational_cases import REGRESSION, classes, exact, line, linear, perceptron


def trained(q: nn.Module, batch, steps: int = 1000, lr: float = 0.03) -> None:
    optimizer = torch.optim.Adam(q.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        q(batch).backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("local", [True, False])
def test_of_a_linear_model_it_is_the_exact_posterior(local):
    """The best diagonal Gaussian has the exact mean, and the diagonal of the exact precision."""
    model, (x, y) = linear(), line(0)
    q = holdfast.mean_field(
        model, holdfast.prior(model, 1.0, mean=0.0), REGRESSION, num_data=120, samples=2, local=local
    )
    trained(q, (x, y))
    mean, precision = exact(x, y, 1.0)
    found = q.posterior()
    torch.testing.assert_close(found.mean["weight"], mean, atol=2e-3, rtol=0)
    torch.testing.assert_close(found.precision.entries["weight"][0], precision.diagonal(), rtol=0.2, atol=0)
    assert found.num_data == 120
    assert found.sources[-1].targets == "variational, mean field"


def test_the_last_posterior_is_the_next_prior():
    """Two tasks in turn against both at once, in the exact recursion of diagonal Gaussians."""
    model, first, second = linear(), line(1), line(2)
    before: Posterior = holdfast.prior(model, 1.0, mean=0.0)
    mean, entries = torch.zeros(1, 3, dtype=torch.double), torch.ones(3, dtype=torch.double)
    for x, y in (first, second):
        q = holdfast.mean_field(model, before, REGRESSION, num_data=120, samples=2)
        trained(q, (x, y))
        # The minimum over μ and σ of E nll + KL to N(mean, 1/entries).
        known = x.T @ x / 0.25 + entries.diag()
        mean = torch.linalg.solve(known, x.T @ y / 0.25 + (entries * mean).T).T
        entries = known.diagonal()
        before = q.posterior()
    torch.testing.assert_close(before.mean["weight"], mean, atol=5e-3, rtol=0)
    torch.testing.assert_close(before.precision.entries["weight"][0], entries, rtol=0.1, atol=0)
    assert before.num_data == 240


def losses(local: bool, draws: int, deviation: float = 0.4) -> Tensor:
    model, (x, y) = perceptron(), classes()
    batch = (x, torch.zeros_like(y))  # of one class: what is drawn for one example is drawn for all
    before = holdfast.prior(model, 1.0, mean=0.0)
    q = holdfast.mean_field(model, before, holdfast.categorical, num_data=16, local=local, deviation=deviation)
    return torch.stack([q.expected_nll(batch).detach() for _ in range(draws)])


def test_drawn_outputs_have_the_loss_of_drawn_weights_on_average_and_less_noise():
    by_outputs, by_weights = losses(True, 1500), losses(False, 1500)
    error = float((by_outputs.var() / 1500 + by_weights.var() / 1500).sqrt())
    assert abs(float(by_outputs.mean() - by_weights.mean())) < 4 * error
    assert float(by_outputs.var()) < 0.5 * float(by_weights.var())


def test_drawn_outputs_have_the_gradients_of_drawn_weights_on_average():
    means = []
    for local in (True, False):
        model, batch = perceptron(), classes()
        q = holdfast.mean_field(
            model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=16, local=local, deviation=0.2,
            samples=2,
        )  # fmt: skip
        for _ in range(1500):
            (q.expected_nll(batch) / 1500).backward()
        means.append(torch.cat([p.grad.flatten() for p in q.parameters()]))
    assert float((means[0] - means[1]).norm() / means[1].norm()) < 0.1


def test_a_mirrored_pair_has_no_noise_where_the_loss_is_linear():
    model = linear()
    x, _ = line(3)
    tilt = holdfast.custom(lambda output, target: output.sum(1), name="tilt")
    q = holdfast.mean_field(model, holdfast.prior(model, 1.0), tilt, num_data=120, samples=2, deviation=0.5)
    torch.testing.assert_close(q.expected_nll((x, torch.zeros(120))), model(x).mean())
    single = holdfast.mean_field(model, holdfast.prior(model, 1.0), tilt, num_data=120, samples=1, deviation=0.5)
    assert float((single.expected_nll((x, torch.zeros(120))) - model(x).mean()).detach().abs()) > 1e-4


class Odd(nn.Module):
    """A weight used twice, one that meets positions, a convolution, a plain product, and one layer as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.places = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mixing, self.product = nn.Conv1d(1, 1, 3, padding=1), nn.Parameter(torch.randn(4, 4) / 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x))) @ self.product
        x = self.places(torch.stack([x, 2 * x], 1)).mean(1)
        return self.head(torch.tanh(self.mixing(x.unsqueeze(1)).squeeze(1)))


def test_weights_that_are_used_otherwise_are_drawn_themselves():
    torch.manual_seed(2)
    model = Odd().double()
    q = holdfast.mean_field(model, holdfast.prior(model, 4.0), holdfast.categorical, num_data=16, deviation=0.3)
    q(classes()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in q.parameters())
    assert q._draws.local == {"head.weight", "head.bias"}
    # The same on average as drawing every weight.
    plain = holdfast.mean_field(
        model, holdfast.prior(model, 4.0), holdfast.categorical, num_data=16, deviation=0.3, local=False
    )
    ours, theirs = (torch.stack([each.expected_nll(classes()).detach() for _ in range(1500)]) for each in (q, plain))
    error = float((ours.var() / 1500 + theirs.var() / 1500).sqrt())
    assert abs(float(ours.mean() - theirs.mean())) < 4 * error


def test_the_loss_is_what_its_docstring_says():
    model, batch = perceptron(), classes()
    before = holdfast.prior(model, 2.0, mean=0.0)
    q = holdfast.mean_field(model, before, holdfast.categorical, num_data=160, deviation=1e-9, seed=3)
    loss = q(batch)
    torch.testing.assert_close(loss, F.cross_entropy(model(batch[0]), batch[1]) + q.divergence() / 160)
    cold = holdfast.mean_field(model, before, holdfast.categorical, num_data=160, deviation=1e-9, tempering=0.1)
    torch.testing.assert_close(cold(batch), F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * q.divergence() / 160)


def found(**options) -> tuple[nn.Module, holdfast.MeanField]:
    model, batch = perceptron(), classes()
    q = holdfast.mean_field(model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=16, **options)
    trained(q, batch, steps=30)
    return model, q


def test_the_posterior_chains_holds_saves_and_forecasts(tmp_path):
    model, q = found()
    posterior = q.posterior()
    torch.testing.assert_close(holdfast.divergence(posterior, holdfast.prior(model, 1.0, mean=0.0)), q.divergence())
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    again = holdfast.load(tmp_path / "memory.safetensors").posterior
    assert again.id == posterior.id
    x, y = classes()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with holdfast.hold(optimizer, model, again, num_data=16):
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x + 1), y).backward()
            optimizer.step()
    assert holdfast.forecast(model, again).rise > 0
    fisher = holdfast.diagonal_fisher(model, [(x + 1, y)], holdfast.categorical)
    assert holdfast.consolidate(again, model, fisher).num_data == 32


def test_a_tempered_posterior_says_so():
    assert found(tempering=0.5)[1].posterior().sources[-1].targets == "variational, mean field, tempered 0.5"


def test_a_kronecker_prior_pulls_with_all_of_its_structure():
    model, batch = perceptron(), classes()
    fisher = holdfast.kronecker_fisher(model, [batch], holdfast.categorical)
    before = holdfast.consolidate(holdfast.prior(model, 1.0), model, fisher)
    q = holdfast.mean_field(model, before, holdfast.categorical, num_data=16)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    diagonal = Posterior(
        {n: p.detach().clone() for n, p in model.named_parameters()},
        Diagonal({n: each.square().reciprocal().detach() for n, each in q.deviations.items()}),
    )
    torch.testing.assert_close(q.divergence(), holdfast.divergence(diagonal, before))


def test_bad_input_is_refused_with_what_to_do():
    model = perceptron()
    proper = holdfast.prior(model, 1.0)
    with pytest.raises(holdfast.InertError, match="no batch was seen"):
        holdfast.mean_field(model, proper, holdfast.categorical, num_data=16).posterior()
    q = holdfast.mean_field(model, proper, holdfast.categorical, num_data=1000)
    q(classes())
    with pytest.raises(holdfast.DataError, match="only 16 of num_data=1000"):
        q.posterior()
    with pytest.raises(holdfast.ArgumentError, match="samples"):
        holdfast.mean_field(model, proper, holdfast.categorical, num_data=16, samples=0)
    with pytest.raises(holdfast.ArgumentError, match="likelihood"):
        holdfast.mean_field(model, proper, "categorical", num_data=16)
    with pytest.raises(holdfast.ArgumentError, match=r"no distribution of labels.*holdfast.categorical"):
        holdfast.mean_field(model, proper, holdfast.softened(), num_data=16)
    with pytest.raises(holdfast.InertError, match="no parameter of the memory is in this model"):
        holdfast.mean_field(linear(), proper, holdfast.categorical, num_data=16)
    part = Posterior({"0.weight": proper.mean["0.weight"]}, Diagonal({"0.weight": torch.ones(6, 4)}))
    with pytest.raises(holdfast.MismatchError, match=r"`0.bias`.*trains, and the prior does not have it"):
        holdfast.mean_field(model, part, holdfast.categorical, num_data=16)
    known = found()[1].posterior()
    with pytest.raises(holdfast.MismatchError, match="counts examples, and the likelihood tokens"):
        holdfast.mean_field(perceptron(), known, holdfast.tokens(shift=True), num_data=16)


@pytest.mark.parametrize("resumed", [False, True])
def test_deviations_that_nobody_trained_are_no_posterior(resumed):
    """An optimizer of the model's parameters alone leaves σ where it began, whatever the data say."""
    q = holdfast.mean_field(model := perceptron(), holdfast.prior(model, 1.0), holdfast.categorical, num_data=16)
    q(classes()).backward()
    start = q.posterior().precision.entries  # nothing was trained, and nothing is claimed: 1/0.02² each
    assert {float(each.round()) for entries in start.values() for each in entries.flatten()} == {2500.0}
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        q(classes()).backward()
        optimizer.step()
    if resumed:
        state, model = q.state_dict(), perceptron()
        q = holdfast.mean_field(model, holdfast.prior(model, 1.0), holdfast.categorical, num_data=16)
        q.load_state_dict(state)
    with pytest.raises(holdfast.InertError, match=r"none of the deviations was.*q\.parameters\(\)"):
        q.posterior()
    trained(q, classes(), steps=1)
    assert all((each.round() != 2500).all() for each in q.posterior().precision.entries.values())


def test_a_trained_field_is_resumed_into_another_model_without_alarm():
    fields = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).double()
        prior = holdfast.prior(model, 1.0, mean=0.0)
        fields.append(holdfast.mean_field(model, prior, holdfast.categorical, num_data=16))
    trained(fields[0], classes(), steps=3)
    fields[1].load_state_dict(fields[0].state_dict())
    assert fields[1].posterior().id == fields[0].posterior().id


def test_deviations_that_collapse_or_explode_are_named_with_the_cure():
    _, q = found()
    with torch.no_grad():
        q.log_deviations[0][0, 0] = -80.0
    with pytest.raises(holdfast.VarianceError, match=r"1 of 24 weights of `0.weight` collapsed.*num_data"):
        q.posterior()
    with torch.no_grad():
        q.log_deviations[0][0, 0] = 30.0
    with pytest.raises(holdfast.VarianceError, match=r"1 of 24 weights of `0.weight` exploded.*learning rate"):
        q.posterior()
    with torch.no_grad():
        q.log_deviations[0][0, 0] = float("nan")
    with pytest.raises(holdfast.VarianceError, match="no longer finite"):
        q.posterior()
