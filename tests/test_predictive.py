"""The predictive distribution: a loop over draws is its slow twin; the closed form of linear models; calibration."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from cases import CASES
from holdfast.predictive import Classes, Regression, YesNo

BY_NAME = {case.name: case for case in CASES}
SAID = [case for case in CASES if case.name != "custom"]


def learned(case, fisher=holdfast.diagonal_fisher):
    model = case.model()
    found = fisher(model, case.batches(), case.likelihood, forward=case.forward)
    return model, holdfast.consolidate(holdfast.prior(model, precision=3.0), model, found)


def drawn(model, posterior, batches, forward, samples, seed=0):
    """The outputs at each draw, by copies of the model."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(samples):
        values, there = posterior.sample(generator), copy.deepcopy(model).eval()
        named = dict(there.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                named[name].copy_(value)
            found.append([_run(there, batch, forward) for batch in batches])
    return found


def _run(model, batch, forward):
    if forward is not None:
        return forward(model, batch)
    return model(batch["input_ids"]) if isinstance(batch, dict) else model(batch[0])


def entropy(p):
    return -(p * p.log()).sum(-1)


def target_of(batch):
    return batch["labels"] if isinstance(batch, dict) else batch[-1]


@pytest.mark.parametrize("case", SAID, ids=str)
def test_it_is_the_average_over_draws(case):
    model, posterior = learned(case)
    batches, samples = case.batches((3, 2, 2)), 5
    found = holdfast.predictive(model, posterior, batches, case.likelihood, samples=samples, forward=case.forward)
    outputs = [torch.cat(each) for each in drawn(model, posterior, batches, case.forward, samples)]
    labels = torch.cat([target_of(batch) for batch in batches])
    assert found.samples == samples
    if isinstance(found, Regression):
        stacked, scale = torch.stack(outputs), case.likelihood.scale
        variance = stacked.var(0, correction=0) + scale**2
        torch.testing.assert_close(found.mean, stacked.mean(0))
        torch.testing.assert_close(found.variance, variance)
        normal = torch.distributions.Normal(stacked.mean(0), variance.sqrt())
        torch.testing.assert_close(found.nll(), -normal.log_prob(labels).sum(-1))
        torch.testing.assert_close(found.entropy(), normal.entropy().sum(-1))
        return
    if isinstance(found, YesNo):
        p = torch.stack([each.sigmoid() for each in outputs]).mean(0)
        torch.testing.assert_close(found.probabilities, p)
        torch.testing.assert_close(found.variance, p * (1 - p))
        torch.testing.assert_close(found.nll(), F.binary_cross_entropy(p, labels, reduction="none").sum(-1))
        torch.testing.assert_close(found.entropy(), entropy(torch.stack([p, 1 - p], -1)).sum(-1))
        return
    if case.name == "tied-tokens":  # the positions that count, one after another
        counted = labels[:, 1:] != -100
        outputs, labels = [each[:, :-1][counted] for each in outputs], labels[:, 1:][counted]
    each = torch.stack([output.softmax(-1) for output in outputs])
    torch.testing.assert_close(found.probabilities, each.mean(0))
    torch.testing.assert_close(found.expected_entropy, entropy(each).mean(0))
    torch.testing.assert_close(found.entropy(), entropy(each.mean(0)))
    torch.testing.assert_close(found.mutual_information(), entropy(each.mean(0)) - entropy(each).mean(0))
    torch.testing.assert_close(found.nll(), -each.mean(0).gather(1, labels.unsqueeze(1)).squeeze(1).log())
    assert bool((found.mutual_information() > 0).all())


FISHERS = {
    "diagonal": holdfast.diagonal_fisher,
    "kronecker": holdfast.kronecker_fisher,
    "lowrank": lambda *given, **options: holdfast.lowrank_fisher(*given, rank=3, **options),
    "dense": holdfast.dense_fisher,
    "rotated": lambda *given, **options: holdfast.kronecker_fisher(*given, **options).rotated(),
    "sum": lambda *given, **options: (
        holdfast.dense_fisher(*given, only="4.*", **options)
        + holdfast.kronecker_fisher(*given, only=["0.*", "2.*"], **options)
    ),
}


@pytest.mark.parametrize("kind", FISHERS)
def test_of_every_structure(kind):
    case = BY_NAME["relu-mlp"]
    model, posterior = learned(case, FISHERS[kind])
    found = holdfast.predictive(model, posterior, case.batches(), case.likelihood, samples=3, seed=4)
    outputs = [torch.cat(each) for each in drawn(model, posterior, case.batches(), None, 3, seed=4)]
    torch.testing.assert_close(found.probabilities, torch.stack([each.softmax(-1) for each in outputs]).mean(0))


def line(alpha=0.7, noise=0.5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    model, likelihood = nn.Linear(3, 1, bias=False).double(), holdfast.gaussian(noise)
    fisher = holdfast.dense_fisher(model, [(x, y)], likelihood)
    return model, holdfast.consolidate(holdfast.prior(model, precision=alpha), model, fisher), x, y, likelihood


def test_a_linear_model_has_the_variance_of_the_closed_form():
    """Var[y] = σ² + xᵀΛ⁻¹x; with 4,000 draws, to within a few of its own deviations √(2/4000)."""
    model, posterior, x, y, likelihood = line()
    found = holdfast.predictive(model, posterior, [(x, y)], likelihood, samples=4000)
    spread = (x @ torch.linalg.inv(posterior.precision.dense()) * x).sum(-1, keepdim=True)
    torch.testing.assert_close(found.variance - 0.25, spread, rtol=5 * math.sqrt(2 / 4000), atol=0)
    assert float(((found.mean - model(x).detach()).abs() / (spread / 4000).sqrt()).max()) < 5
    torch.testing.assert_close(
        found.expected_entropy, torch.full((20,), 0.5 * math.log(2 * math.pi * math.e * 0.25)).double()
    )
    torch.testing.assert_close(found.mutual_information(), 0.5 * (found.variance / 0.25).log().squeeze(-1))


def test_a_temperature_scales_the_covariance():
    model, posterior, x, y, likelihood = line()

    def at(temperature):
        return holdfast.predictive(model, posterior, [(x, y)], likelihood, temperature=temperature)

    torch.testing.assert_close(at(4.0).variance - 0.25, 4 * (at(1.0).variance - 0.25))
    torch.testing.assert_close(at(4.0).mean - model(x), 2 * (at(1.0).mean - model(x)))
    torch.testing.assert_close(at(1e-30).mean, model(x).detach())


def test_at_no_temperature_it_is_the_model_at_the_mean():
    """Wherever the model has gone since; and a loss of 200 nats is not rounded to infinity in float32."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        model.weight *= 400
    posterior = holdfast.prior(model, precision=1.0)
    want = model(x).detach()
    with torch.no_grad():
        model.weight.zero_()
    found = holdfast.predictive(model, posterior, [(x, y)], holdfast.categorical, temperature=1e-20)
    torch.testing.assert_close(found.probabilities, want.softmax(-1))
    torch.testing.assert_close(found.nll(), F.cross_entropy(want, y, reduction="none"))
    assert 200 < float(found.nll().max()) < math.inf
    assert not bool(model.weight.any())


@pytest.mark.parametrize("name", ["relu-mlp", "multilabel", "regression"])
def test_draws_of_two_seeds_mix_to_one(name):
    case = BY_NAME[name]
    model, posterior = learned(case)
    a, b, c = (
        holdfast.predictive(model, posterior, case.batches(), case.likelihood, samples=n, seed=n) for n in (2, 3, 4)
    )
    one, other = a.mixed(b).mixed(c), a.mixed(b.mixed(c))
    outputs = [torch.cat(each) for n in (2, 3, 4) for each in drawn(model, posterior, case.batches(), None, n, seed=n)]
    assert one.samples == other.samples == 9
    torch.testing.assert_close(one.entropy(), other.entropy())
    torch.testing.assert_close(one.expected_entropy, other.expected_entropy)
    if name == "regression":
        torch.testing.assert_close(one.variance, torch.stack(outputs).var(0, correction=0) + 0.25)
    else:
        squash = (lambda z: z.softmax(-1)) if name == "relu-mlp" else torch.sigmoid
        torch.testing.assert_close(one.probabilities, torch.stack([squash(each) for each in outputs]).mean(0))
    with pytest.raises(holdfast.MismatchError, match="not of the same examples"):
        a.mixed(type(a).stacked([b, b]))
    if name == "relu-mlp":  # as a loader that shuffles gives them at another reading
        turned = [tuple(part.flip(0) for part in batch) for batch in case.batches()]
        with pytest.raises(holdfast.MismatchError, match="without shuffling"):
            a.mixed(holdfast.predictive(model, posterior, turned, case.likelihood, samples=2))


def test_neither_batches_nor_parts_change_it():
    case = BY_NAME["relu-mlp"]
    model, posterior = learned(case)

    def of(batches):
        return holdfast.predictive(model, posterior, batches, case.likelihood, samples=3)

    whole = of(case.batches((7,)))
    torch.testing.assert_close(of(case.batches((1, 4, 2))).probabilities, whole.probabilities)
    parts = [of([batch]) for batch in case.batches((3, 4))]
    torch.testing.assert_close(Classes.stacked(parts).nll(), whole.nll())
    inputs = [batch[0] for batch in case.batches((3, 4))]  # without labels
    torch.testing.assert_close(of(inputs).probabilities, whole.probabilities)
    assert of(inputs).targets is None
    with pytest.raises(holdfast.ArgumentError, match="without labels"):
        of(inputs).nll()
    torch.testing.assert_close(of(inputs).nll(whole.targets), whole.nll())


def test_the_model_is_left_as_it_was_and_a_memory_brings_its_buffers():
    case = BY_NAME["batchnorm-cnn"]
    model = case.model().train()
    fisher = holdfast.diagonal_fisher(model, case.batches(), case.likelihood)
    posterior = holdfast.consolidate(holdfast.prior(model, precision=3.0), model, fisher)
    memory = holdfast.Memory.of(posterior, model)
    want = holdfast.predictive(model, memory, case.batches(), case.likelihood, samples=3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(1)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = holdfast.predictive(model, memory, case.batches(), case.likelihood, samples=3)
    torch.testing.assert_close(found.probabilities, want.probabilities)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    alone = holdfast.predictive(model, posterior, case.batches(), case.likelihood, samples=3)
    assert not torch.allclose(alone.probabilities, want.probabilities)  # the statistics that the model has now


def test_what_a_posterior_does_not_cover_stays():
    case = BY_NAME["relu-mlp"]
    model = case.model()
    fisher = holdfast.diagonal_fisher(model, case.batches(), case.likelihood, only="4.bias")
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    found = holdfast.predictive(model, posterior, case.batches(), case.likelihood, samples=2)
    generator, means = torch.Generator().manual_seed(0), []
    for _ in range(2):
        shift = posterior.sample(generator)["4.bias"] - model[-1].bias
        means.append((model(case.batches()[0][0]) + shift).softmax(-1).detach())
    torch.testing.assert_close(found.probabilities, torch.stack(means).mean(0))


def test_a_loader_is_read_once_for_each_draw_in_the_same_order():
    model, posterior, x, y, likelihood = line()
    data = TensorDataset(x, y)
    whole = holdfast.predictive(model, posterior, [(x, y)], likelihood)
    found = holdfast.predictive(model, posterior, DataLoader(data, batch_size=6), likelihood)
    torch.testing.assert_close(found.mean, whole.mean)
    with pytest.raises(holdfast.DataError, match=r"came differently.*without shuffling"):
        holdfast.predictive(model, posterior, DataLoader(data, batch_size=6, shuffle=True), likelihood)
    with pytest.raises(holdfast.DataError, match="once for each draw"):
        holdfast.predictive(model, posterior, iter([(x, y)]), likelihood)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "lowrank", "dense", "rotated"])
def test_a_singular_precision_says_what_to_add(kind):
    """An input that is always zero leaves its weights free."""
    case = BY_NAME["relu-mlp"]
    model, (x, y) = case.model(), case.batches()[0]
    batches = [(x * torch.tensor([1.0, 1, 0, 1, 1]), y)]
    posterior = holdfast.consolidate(holdfast.prior(model), model, FISHERS[kind](model, batches, case.likelihood))
    with pytest.raises(holdfast.SingularError, match=r"a sample needs a positive definite precision.*holdfast\.prior"):
        holdfast.predictive(model, posterior, batches, case.likelihood)
    with pytest.raises(holdfast.SingularError, match=r"flat.*holdfast\.prior"):
        holdfast.predictive(model, holdfast.prior(model), batches, case.likelihood)


def test_what_is_refused():
    model, posterior, x, y, likelihood = line()
    for wrong in (0, 2.5, True):
        with pytest.raises(holdfast.ArgumentError, match="samples is how often"):
            holdfast.predictive(model, posterior, [(x, y)], likelihood, samples=wrong)
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(holdfast.ArgumentError, match=r"temperature.*> 0"):
            holdfast.predictive(model, posterior, [(x, y)], likelihood, temperature=wrong)
    with pytest.raises(holdfast.ArgumentError, match="to take a Fisher with"):
        holdfast.predictive(model, posterior, [(x, y)], holdfast.softened(4.0))
    with pytest.raises(holdfast.ArgumentError, match="does not say what its outputs predict"):
        holdfast.predictive(model, posterior, [(x, y)], holdfast.custom(lambda out, target: out.sum(-1)))
    with pytest.raises(holdfast.ArgumentError, match="Posterior or a Memory"):
        holdfast.predictive(model, posterior.precision, [(x, y)], likelihood)
    with pytest.raises(holdfast.MismatchError, match="another model"):
        holdfast.predictive(nn.Linear(4, 1).double(), posterior, [(x, y)], likelihood)
    with pytest.raises(holdfast.DataError, match=r"not finite.*temperature below 1"):
        holdfast.predictive(model, posterior, [(x / 0, y)], likelihood)
    found = holdfast.predictive(model, posterior, [(x, y)], likelihood)
    with pytest.raises(holdfast.ArgumentError, match="no probabilities"):
        _ = found.probabilities
    with pytest.raises(holdfast.DataError, match="targets of the outputs' shape"):
        found.nll(y.squeeze(-1))
    with pytest.raises(holdfast.DataError, match=r"shape \(examples, classes\)"):
        Classes.of(torch.zeros(3))


def test_what_is_outside_a_memory_must_be_as_it_was():
    case = BY_NAME["frozen-body"]
    model, posterior = learned(case)
    memory = holdfast.Memory.of(posterior, model)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(holdfast.MismatchError, match=r"`0\.weight`, outside the posterior"):
        holdfast.predictive(model, memory, case.batches(), case.likelihood)
    holdfast.predictive(model, memory.posterior, case.batches(), case.likelihood)


def slow_calibration(probabilities, targets, bins):
    """By a loop over bins and examples."""
    error, found = 0.0, []
    for index in range(bins):
        inside = [
            (max(row), float(row.index(max(row)) == target))
            for row, target in zip(probabilities.tolist(), targets.tolist(), strict=True)
            if index / bins < max(row) <= (index + 1) / bins
        ]
        count = len(inside)
        confidence, right = (sum(each[side] for each in inside) / max(count, 1) for side in (0, 1))
        error += count / len(targets) * abs(confidence - right)
        found.append((count, confidence, right))
    return error, found


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_the_calibration_error_is_that_of_a_loop(bins):
    generator = torch.Generator().manual_seed(3)
    p = (3 * torch.randn(200, 4, generator=generator, dtype=torch.float64)).softmax(-1)
    p[0] = torch.tensor([1.0, 0, 0, 0])
    p[1] = torch.tensor([0.25, 0.25, 0.25, 0.25])
    y = torch.randint(0, 4, (200,), generator=generator)
    y[0] = 0
    found = holdfast.calibration(p, y, bins)
    error, want = slow_calibration(p, y, bins)
    assert found.error == pytest.approx(error)
    assert found.accuracy == pytest.approx(float((p.argmax(-1) == y).double().mean()))
    assert found.nll == pytest.approx(float(F.nll_loss(p.log(), y)))
    for each, (count, confidence, right) in zip(found.bins, want, strict=True):
        assert each.count == count
        if count:
            assert (each.confidence, each.accuracy) == pytest.approx((confidence, right))
        else:
            assert math.isnan(each.confidence)
            assert math.isnan(each.accuracy)
    assert sum(each.count for each in found.bins) == 200


def test_a_confidence_on_an_edge_is_in_the_bin_below_it():
    found = holdfast.calibration(torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]), torch.tensor([0, 1, 0]), bins=4)
    assert [each.count for each in found.bins] == [0, 1, 1, 1]


def test_probabilities_that_are_right_have_little_error():
    """Labels drawn from the probabilities themselves: 20,000 of them, and half as sure as they should be."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(20_000, 5, generator=generator)
    y = torch.multinomial((2 * z).softmax(-1), 1, generator=generator).squeeze(-1)
    assert holdfast.calibration((2 * z).softmax(-1), y).error < 0.015
    assert holdfast.calibration(z.softmax(-1), y).error > 0.1
    assert holdfast.calibration((2 * z).softmax(-1), y).nll < holdfast.calibration(z.softmax(-1), y).nll


def test_what_is_no_calibration():
    p, y = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([0, 1])
    with pytest.raises(holdfast.DataError, match=r"row 1 has a sum of 1\.1"):
        holdfast.calibration(torch.tensor([[0.5, 0.5], [0.9, 0.2]]), y)
    with pytest.raises(holdfast.DataError, match="1 of 2 rows are no probabilities"):
        holdfast.calibration(torch.tensor([[0.5, 0.5], [math.nan, 0.2]]), y)
    with pytest.raises(holdfast.DataError, match=r"smallest entry of -0\.2.*softmax"):
        holdfast.calibration(torch.tensor([[1.2, -0.2], [0.5, 0.5]]), y)
    with pytest.raises(holdfast.DataError, match=r"torch\.stack\(\[1 - p, p\], -1\)"):
        holdfast.calibration(p[:, 0], y)
    with pytest.raises(holdfast.DataError, match=r"labels of shape \(2,\)"):
        holdfast.calibration(p, y[:1])
    with pytest.raises(holdfast.DataError, match="2 classes"):
        holdfast.calibration(p, torch.tensor([0, 2]))
    with pytest.raises(holdfast.ArgumentError, match="bins"):
        holdfast.calibration(p, y, bins=0)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_area_is_a_count_of_pairs(levels):
    generator = torch.Generator().manual_seed(levels)
    inside = torch.randint(0, levels, (37,), generator=generator).double()
    outside = torch.randint(0, levels, (23,), generator=generator).double() + levels / 5
    pairs = [1.0 if o > i else 0.5 if o == i else 0.0 for i in inside.tolist() for o in outside.tolist()]
    assert holdfast.auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs))
    assert holdfast.auroc(outside, inside) == pytest.approx(1 - sum(pairs) / len(pairs))
    assert holdfast.auroc(inside, inside) == pytest.approx(0.5)


def test_what_has_no_area():
    with pytest.raises(holdfast.DataError, match="outside has 1 scores that are not numbers"):
        holdfast.auroc(torch.zeros(3), torch.tensor([math.nan]))
    with pytest.raises(holdfast.DataError, match="inside needs one score"):
        holdfast.auroc(torch.zeros(0), torch.zeros(3))
    with pytest.raises(holdfast.DataError, match=r"outside needs.*\(3, 1\)"):
        holdfast.auroc(torch.zeros(3), torch.zeros(3, 1))
