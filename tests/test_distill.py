"""Holding a model by its answers: the loss, the teacher, the term, and that it agrees with the quadratic (T14–T16)."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from cases import CASES


def small(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def moved(model, size, seed=1):
    """A copy a little way off, in what trains."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (each for each in other.parameters() if each.requires_grad):
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


OUTPUTS = {
    "categorical": (
        holdfast.categorical,
        lambda o, n: (o.softmax(-1) * (o.log_softmax(-1) - n.log_softmax(-1))).sum(-1),
    ),
    "bernoulli": (
        holdfast.bernoulli,
        lambda o, n: torch.distributions.kl_divergence(
            torch.distributions.Bernoulli(logits=o), torch.distributions.Bernoulli(logits=n)
        ).sum(-1),
    ),
    "gaussian": (
        holdfast.gaussian(0.5),
        lambda o, n: torch.distributions.kl_divergence(
            torch.distributions.Normal(o, 0.5), torch.distributions.Normal(n, 0.5)
        ).sum(-1),
    ),
}


class TestDivergence:
    @pytest.mark.parametrize("name", list(OUTPUTS))
    def test_it_is_the_divergence_of_torch(self, name):
        likelihood, expected = OUTPUTS[name]
        old, new = torch.randn(2, 7, 4, dtype=torch.float64)
        torch.testing.assert_close(likelihood.divergence(old, new), expected(old, new))
        torch.testing.assert_close(likelihood.divergence(old, old), torch.zeros(7, dtype=torch.float64))

    def test_tokens_add_up_over_the_positions_that_count(self):
        old, new = torch.randn(2, 3, 5, 4, dtype=torch.float64)
        each = OUTPUTS["categorical"][1](old, new)
        labels = torch.randint(0, 4, (3, 5))
        labels[0, 2] = -100
        torch.testing.assert_close(holdfast.tokens(shift=False).divergence(old, new), each.sum(-1))
        torch.testing.assert_close(holdfast.tokens(shift=True).divergence(old, new), each[:, :-1].sum(-1))
        counted = (labels != -100).double()
        torch.testing.assert_close(holdfast.tokens(shift=False).divergence(old, new, labels), (each * counted).sum(-1))
        torch.testing.assert_close(
            holdfast.tokens(shift=True).divergence(old, new, labels), (each[:, :-1] * counted[:, 1:]).sum(-1)
        )

    def test_a_temperature_keeps_the_gradients_size(self):
        """As T grows, T² KL(softmax(z/T) ‖ softmax(z′/T)) goes to half the squared distance over the classes."""
        old, new = torch.randn(2, 6, 4, dtype=torch.float64)
        found = holdfast.categorical.divergence(old, new, temperature=1e3)
        apart = (old - old.mean(-1, keepdim=True)) - (new - new.mean(-1, keepdim=True))
        torch.testing.assert_close(found, apart.square().mean(-1) / 2, rtol=1e-2, atol=1e-6)

    def test_classes_that_came_later_had_no_probability(self):
        old, new = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
        p = F.pad(old.softmax(-1), (0, 2))
        expected = torch.special.xlogy(p, p).sum(-1) - (p * new.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(holdfast.categorical.divergence(old, new), expected)
        with pytest.raises(holdfast.MismatchError, match="added at the end"):
            holdfast.categorical.divergence(new, old)

    def test_what_has_none_says_so(self):
        with pytest.raises(holdfast.ArgumentError, match="how far apart"):
            holdfast.custom(lambda o, y: o[:, 0]).divergence(torch.zeros(2, 1), torch.zeros(2, 1))
        with pytest.raises(holdfast.ArgumentError, match="no temperature"):
            holdfast.gaussian().divergence(torch.zeros(2, 1), torch.zeros(2, 1), temperature=2.0)


class TestEquivalence:
    """T16: N · E KL / (½ δᵀFδ) → 1 as δ → 0, F the exact Fisher on the same inputs."""

    @pytest.mark.parametrize(
        "case", [case for case in CASES if "expected" in case.targets and case.forward is None], ids=str
    )
    def test_the_ratio_goes_to_one(self, case):
        model, batches = case.model(), case.batches()
        fisher = holdfast.dense_fisher(model, batches, case.likelihood, targets="expected")
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
        model.eval()
        ratios = []
        for size in (1e-3, 1e-4, 1e-5):
            other = moved(model, size).eval()
            with torch.no_grad():
                kl = sum(case.likelihood.divergence(model(x), other(x)).sum() for x, _ in batches)
            ratios.append(float(kl / holdfast.penalty(other, posterior).detach()))
        # What is left is of third order in δ, so its share falls as δ does: ten times smaller, ten times nearer.
        assert abs(ratios[2] - 1) < 2e-4
        for nearer, farther in zip(ratios[1:], ratios, strict=False):
            assert abs(nearer - 1) <= 0.2 * abs(farther - 1) + 1e-6

    def test_the_first_steps_agree_and_other_inputs_say_something_else(self):
        model = small()
        old, new = torch.randn(2, 200, 5, dtype=torch.float64)
        new = 3 * new + 1
        labels = torch.zeros(200, dtype=torch.long)
        posterior = holdfast.consolidate(
            holdfast.prior(model), model,
            holdfast.dense_fisher(model, [(old, labels)], holdfast.categorical, targets="expected"),
        )  # fmt: skip
        other = moved(model, 1e-5)
        quadratic = holdfast.penalty_gradient(other, posterior)

        def gradient(x):
            loss = holdfast.distillation_loss(model(x), other(x), holdfast.categorical)
            return dict(zip(quadratic, torch.autograd.grad(200 * loss, list(other.parameters())), strict=True))

        def apart(x):
            return max(
                float((value - quadratic[name]).norm() / quadratic[name].norm()) for name, value in gradient(x).items()
            )

        assert apart(old) < 1e-3
        assert apart(new) > 0.3


@dataclass
class Whole:
    """A source of one's own, that gives all it has: nothing is left to chance."""

    inputs: torch.Tensor
    num_data: float
    unit: str = "example"
    layer: str = ""
    blank: None = None
    draws: int = 0

    def draw(self, count, generator):
        self.draws += 1
        return self.inputs


class TestTerm:
    def setup_method(self):
        self.model = small()
        self.posterior = holdfast.prior(self.model)
        self.inputs = holdfast.kept_inputs(torch.randn(40, 5, dtype=torch.float64), num_data=400)
        self.whole = Whole(self.inputs.inputs, 400)
        self.term = holdfast.distill(self.model, self.posterior, self.whole, holdfast.categorical)
        self.other = moved(self.model, 0.1)
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.other.parameters(), strict=True):
                mine.copy_(theirs)

    def expected(self):
        """N · mean KL over all the kept inputs, of the model as it is against a copy of the old one."""
        x, old = self.inputs.inputs, small()
        return 400 * OUTPUTS["categorical"][1](old(x).detach(), self.model(x)).mean()

    def test_value_and_gradient_are_those_of_the_divergence(self):
        torch.testing.assert_close(self.term.value(self.model), self.expected().detach())
        grads = torch.autograd.grad(self.expected(), list(self.model.parameters()))
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        value = self.term.add_gradient_(self.model, 2.0, {id(p) for p in self.model.parameters()})
        torch.testing.assert_close(value, self.expected().detach())
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, 1 + 2 * grad)

    def test_what_is_drawn_is_right_on_average(self):
        """Means of 200 batches against the whole, within five standard errors of each entry."""
        drawn = holdfast.distill(self.model, self.posterior, self.inputs, holdfast.categorical, batch=16)
        weight, found = self.model[0].weight, []
        for _ in range(200):
            weight.grad = None
            drawn.add_gradient_(self.model, 1.0, {id(weight)})
            found.append(weight.grad)
        (expected,) = torch.autograd.grad(self.expected(), [weight])
        error = torch.stack(found).std(0) / 200**0.5
        assert bool(((torch.stack(found).mean(0) - expected).abs() < 5 * error).all())

    def test_only_what_is_asked_for_is_pulled(self):
        first, *others = self.model.parameters()
        self.term.add_gradient_(self.model, 1.0, {id(first)})
        assert first.grad is not None
        assert all(other.grad is None for other in others)

    def test_the_old_function_is_the_model_at_the_mean_with_its_buffers(self):
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        x = torch.randn(30, 5)
        model(x)
        model.eval()
        before = model(x).detach()
        memory = holdfast.Memory.of(holdfast.prior(model), model)
        term = holdfast.distill(model, memory, holdfast.kept_inputs(x), holdfast.categorical)
        model.train()
        with torch.no_grad():
            model(5 * x + 3)  # the running statistics move
            model[0].weight.add_(1.0)
        running = model[1].running_mean.clone()
        old = term.teacher(model, lambda run, given: run(given), x)
        torch.testing.assert_close(old, before)
        assert model.training
        assert torch.equal(model[1].running_mean, running)
        term.add_gradient_(model, 1.0, {id(p) for p in model.parameters()})
        assert torch.equal(model[1].running_mean, running)
        assert all(module.training for module in model.modules())

    def test_what_trains_outside_the_posterior_needs_a_teacher(self):
        body, head = nn.Linear(5, 4), nn.Linear(4, 3)
        posterior = holdfast.prior(nn.Sequential(body))
        model = nn.Sequential(body, head)
        inputs = holdfast.kept_inputs(torch.randn(4, 5))
        with pytest.raises(holdfast.MismatchError, match=r"`1.weight`.*teacher="):
            holdfast.distill(model, posterior, inputs, holdfast.categorical)
        head.requires_grad_(False)
        term = holdfast.distill(model, posterior, inputs, holdfast.categorical)
        term.value(model)
        with torch.no_grad():
            head.weight.add_(1.0)
        with pytest.raises(holdfast.MismatchError, match="has changed"):
            term.value(model)

    def test_a_given_teacher_is_asked(self):
        teacher = moved(self.model, 0.3)
        term = holdfast.distill(self.model, teacher, self.inputs, holdfast.categorical)
        found = term.teacher(self.model, lambda run, given: run(given), self.inputs.inputs)
        torch.testing.assert_close(found, teacher(self.inputs.inputs).detach())
        with pytest.raises(holdfast.InertError, match="never differ"):
            holdfast.distill(self.model, self.model, self.inputs, holdfast.categorical)

    def test_held_alone_and_beside_the_quadratic(self):
        """One step of SGD against the gradient of the whole objective, written out."""
        x, y = torch.randn(20, 5, dtype=torch.float64), torch.randint(0, 3, (20,))
        whole = [holdfast.kept_inputs(self.inputs.inputs[:1], num_data=400)]
        fisher = holdfast.diagonal_fisher(self.model, [(x, y)], holdfast.categorical)
        known = holdfast.consolidate(holdfast.prior(self.model), self.model, fisher)
        old = copy.deepcopy(self.model)
        term = holdfast.distill(self.model, known, whole[0], holdfast.categorical)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05
        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        kl = OUTPUTS["categorical"][1](old(whole[0].inputs).detach(), self.model(whole[0].inputs)).mean()
        loss = F.cross_entropy(self.model(x), y) + 3.0 * (400 * kl + holdfast.penalty(self.model, known)) / 20
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        with holdfast.hold(optimizer, self.model, [known, term], num_data=20, strength=3.0):
            F.cross_entropy(self.model(x), y).backward()
            optimizer.step()
        for parameter, before, grad in zip(self.model.parameters(), start, grads, strict=True):
            torch.testing.assert_close(parameter, before - 0.01 * grad)

    def test_new_inputs_are_those_that_the_model_was_trained_on(self):
        source = holdfast.new_inputs(self.model, num_data=100)
        term = holdfast.distill(self.model, self.posterior, source, holdfast.categorical)
        with pytest.raises(holdfast.DataError, match="not called in training mode"):
            term.value(self.model)
        x = torch.randn(7, 5, dtype=torch.float64)
        self.model.train()(x)
        self.model.eval()(torch.randn(3, 5, dtype=torch.float64))
        expected = 100 * OUTPUTS["categorical"][1](small()(x), self.model(x)).mean()
        torch.testing.assert_close(term.value(self.model), expected.detach())
        source.remove()

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"inputs": torch.zeros(3, 5)}, holdfast.ArgumentError, "gaussian_probes"),
            ({"batch": 0}, holdfast.ArgumentError, "batch"),
            ({"temperature": 0.0}, holdfast.ArgumentError, "temperature"),
            ({"likelihood": holdfast.tokens(shift=False)}, holdfast.MismatchError, "counts tokens"),
            ({"inputs": None}, holdfast.ArgumentError, "no probes of its own"),
            ({"likelihood": None}, holdfast.ArgumentError, "likelihood=holdfast.categorical"),
            ({"classes": 0}, holdfast.ArgumentError, "classes is a whole number"),
            ({"classes": 4}, holdfast.MismatchError, "classes=4, and the teacher has 3"),
        ],
    )
    def test_bad_input(self, change, error, match):
        given = {"inputs": self.inputs, "likelihood": holdfast.categorical, **change}
        with pytest.raises(error, match=match):
            holdfast.distill(self.model, self.posterior, **given)


def test_own_text_is_drawn_from_the_model():
    """A model that always says the next number: its text counts up."""

    class Next(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(100.0))

        def forward(self, codes):
            return self.scale * F.one_hot((codes + 1) % 7, 7).float()

    text = holdfast.own_text(Next(), count=5, length=6, num_data=1000, start=torch.tensor([[0], [3]]))
    assert text.inputs.shape == (5, 6)
    assert torch.equal(text.inputs[:, 1:], (text.inputs[:, :-1] + 1) % 7)
    assert set(text.inputs[:, 0].tolist()) <= {0, 3}
    assert text.num_data == pytest.approx(1000)
    assert text.unit == "token"
    with pytest.raises(holdfast.ArgumentError, match="2 tokens or more"):
        holdfast.own_text(Next(), count=5, length=1, num_data=10)
