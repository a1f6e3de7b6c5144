"""Holding a model by its answers: the loss, the teacher, the term, and that it agrees with the quadratic (T14–T16)."""

import copy
import gc
import io
import math
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from cases import CASES, DataParallel


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
        coins = holdfast.bernoulli.divergence(old, new, temperature=1e3)  # ½ p (1 − p) of each, p = ½
        torch.testing.assert_close(coins, (old - new).square().sum(-1) / 8, rtol=1e-2, atol=1e-6)
        softened = holdfast.softened(4.0).divergence(old, new, temperature=2.0)
        torch.testing.assert_close(softened, holdfast.categorical.divergence(old, new, temperature=8.0))

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
        with holdfast.hold(optimizer, self.model, [known, term], num_data=20, strength=3.0, proximal=False):
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
        found = term.value(self.model)
        torch.testing.assert_close(found, 100 * OUTPUTS["categorical"][1](small()(x), self.model(x)).mean().detach())
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


class TestTraining:
    """The term where models are wrapped, halved, tied and stepped in other ways."""

    def setup_method(self):
        self.model = small()
        self.posterior = holdfast.prior(self.model)
        self.whole = Whole(torch.randn(40, 5, dtype=torch.float64), 400)
        self.x, self.y = torch.randn(20, 5, dtype=torch.float64), torch.randint(0, 3, (20,))

    def term(self, model=None, **how):
        model = self.model if model is None else model
        return holdfast.distill(model, self.posterior, self.whole, holdfast.categorical, **how)

    def pulled(self, term, model, scale=1.0):
        """The gradient that a term adds."""
        model.zero_grad()
        term.add_gradient_(model, scale, {id(parameter) for parameter in model.parameters()})
        return [parameter.grad for parameter in model.parameters()]

    def away(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.1
        return self.model

    def test_accumulated_gradients_are_held_once_a_step(self):
        term = self.term()
        start = [parameter.detach().clone() for parameter in self.away().parameters()]
        once = self.pulled(term, self.model, 1 / 20)
        self.model.zero_grad()
        loss = F.cross_entropy(self.model(self.x), self.y)
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with holdfast.hold(optimizer, self.model, term, num_data=20):
            for rows in (slice(0, 10), slice(10, 20)):
                (0.5 * F.cross_entropy(self.model(self.x[rows]), self.y[rows])).backward()
            optimizer.step()
        for parameter, before, grad, pull in zip(self.model.parameters(), start, grads, once, strict=True):
            torch.testing.assert_close(parameter, before - 0.1 * (grad + pull))

    def test_a_scale_may_be_a_tensor(self):
        term, model = self.term(), self.away()
        plain, scaled = self.pulled(term, model, 3.0), self.pulled(term, model, torch.tensor(3.0, dtype=torch.float64))
        torch.testing.assert_close(plain, scaled)

    def test_half_precision_and_autocast(self):
        term, model = self.term(), self.away()
        plain = self.pulled(term, model)
        single = copy.deepcopy(small()).float()
        self.whole.inputs = self.whole.inputs.float()
        for dtype in (torch.float32, torch.bfloat16):
            other = copy.deepcopy(single).to(dtype)
            term = holdfast.distill(other, holdfast.prior(other), self.whole, holdfast.categorical)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter += 0.1
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
                found = self.pulled(term, other)
            for mine, theirs in zip(found, plain, strict=True):
                assert mine.dtype == dtype
                assert float((mine.double() - theirs).norm()) < 0.1 * float(theirs.norm())

    def test_probes_are_drawn_in_the_models_dtype(self):
        probes = holdfast.gaussian_probes([self.x.float()])
        term = holdfast.distill(self.model, self.posterior, probes, holdfast.categorical)
        assert term.value(self.away()).dtype == torch.float64

    def test_wrapped_models_are_held_as_they_are(self):
        """Several processes are tested with test_sharded."""
        expected = self.pulled(self.term(), self.away())
        for wrapped in (torch.compile(self.model, backend="eager"), DataParallel(self.model)):
            term = self.term(wrapped)
            torch.testing.assert_close(self.pulled(term, wrapped), expected)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
            with holdfast.hold(optimizer, wrapped, term, num_data=20):
                optimizer.zero_grad()
                optimizer.step()
            torch.testing.assert_close([20 * p.grad for p in self.model.parameters()], expected)

    def test_models_that_are_called_in_another_way(self):
        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = small()

            def forward(self, batch):
                return {"logits": self.inner(batch["x"])}

        model = Named()
        source = holdfast.new_inputs(model, num_data=400)
        given = {"likelihood": holdfast.categorical, "forward": lambda run, x: run({"x": x})["logits"]}
        term = holdfast.distill(model, holdfast.prior(model), self.whole, **given)
        new = holdfast.distill(model, holdfast.prior(model), source, **given)
        model({"x": self.whole.inputs})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
        expected = self.pulled(self.term(), self.away())
        torch.testing.assert_close(self.pulled(term, model), expected)
        torch.testing.assert_close(self.pulled(new, model), expected)

    def test_tied_weights_are_recalled_as_one(self):
        (case,) = (case for case in CASES if case.name == "tied-tokens")
        model = case.model()
        ids = case.batches()[0]["input_ids"]
        before = model(ids).detach()
        text = holdfast.kept_inputs(ids, num_data=35, unit="token")
        term = holdfast.distill(model, holdfast.prior(model), text, case.likelihood)
        with torch.no_grad():
            model.embed.weight.add_(0.3)
        torch.testing.assert_close(term.teacher(model, lambda run, given: run(given), ids), before)
        assert float(term.value(model)) > 0
        pulls = self.pulled(term, model)
        assert len(pulls) == len(list(model.parameters()))

    def test_frozen_parameters_are_not_pulled(self):
        self.model[0].requires_grad_(False)
        posterior = holdfast.prior(self.model)
        term = holdfast.distill(self.model, posterior, self.whole, holdfast.categorical)
        with torch.no_grad():
            self.model[2].weight += 0.1
        found = self.pulled(term, self.model)
        assert found[0] is None
        assert float(found[2].norm()) > 0

    def test_a_line_search_sees_one_objective(self):
        """LBFGS evaluates its closure many times in a step; the term draws once for it."""
        drawn = holdfast.kept_inputs(self.whole.inputs, num_data=400)
        term = holdfast.distill(self.model, self.posterior, drawn, holdfast.categorical, batch=4)
        optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
        batches, losses = [], []

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            losses.append(loss.detach())
            return loss

        mean = term._mean
        term._mean = lambda model, inputs: batches.append(inputs) or mean(model, inputs)
        with holdfast.hold(optimizer, self.model, term, num_data=20):
            for _ in range(2):
                optimizer.step(closure)
        assert len(batches) == len(losses) > 8
        distinct = {id(batch) for batch in batches}
        assert len(distinct) == 2
        assert losses[-1] < losses[0]

    def test_without_a_hold_it_draws_at_every_call(self):
        term = self.term()
        self.pulled(term, self.model)
        self.pulled(term, self.model)
        assert self.whole.draws == 2

    def test_a_term_alone_tells_what_it_costs(self):
        term = self.term()
        optimizer = torch.optim.SGD(self.away().parameters(), lr=0.1)
        with holdfast.hold(optimizer, self.model, term, num_data=20, strength=2.0) as handle:
            told = handle.metrics()
            value = float(term.value(self.model))
            assert told["holdfast/penalty"] == pytest.approx(value)
            assert told["holdfast/rise"] == pytest.approx(value / 400)
            assert told["holdfast/loss"] == pytest.approx(2 * value / 20)
            assert told["holdfast/held_parameters"] == sum(p.numel() for p in self.model.parameters())
            optimizer.step()
            assert handle.generators == [term.generator]
        with (
            pytest.raises(holdfast.InertError, match="never made a step"),
            holdfast.hold(optimizer, self.model, term, num_data=20),
        ):
            pass

    def test_an_optimizer_of_other_parameters_is_let_be(self):
        other = nn.Parameter(torch.zeros(2))
        assert float(self.term().add_gradient_(self.model, 1.0, {id(other)})) == 0
        assert other.grad is None

    def test_new_inputs_are_not_the_terms_own_and_keep_nothing_alive(self):
        source = holdfast.new_inputs(self.model, num_data=400)
        term = holdfast.distill(self.model, self.posterior, source, holdfast.categorical)
        self.model(self.x)
        self.pulled(term, self.model)
        assert torch.equal(source.draw(1, torch.Generator()), self.x)
        gone = weakref.ref(self.model)
        assert len(self.model._forward_pre_hooks) == 1
        del source, term
        gc.collect()
        assert not self.model._forward_pre_hooks
        left = holdfast.new_inputs(self.model, num_data=400)
        self.model = None
        gc.collect()
        assert gone() is None
        left.remove()

    def test_a_teacher_must_fit(self):
        kept = holdfast.kept_inputs(self.whole.inputs)
        with pytest.raises(holdfast.MismatchError, match="Classes may have been added at the end"):
            holdfast.distill(self.model, small(4), kept, holdfast.categorical)
        with pytest.raises(holdfast.MismatchError, match=r"rounded to torch.bfloat16.*teacher="):
            holdfast.distill(self.model, self.posterior.to(dtype=torch.bfloat16), kept, holdfast.categorical)
        with pytest.raises(holdfast.InertError, match="shares weights"):
            holdfast.distill(self.model, nn.Sequential(*self.model), kept, holdfast.categorical)
        fewer = small(2)
        term = holdfast.distill(self.model, fewer, kept, holdfast.categorical, batch=1000)
        x = kept.draw(1000, torch.Generator().manual_seed(0))
        p = F.pad(fewer(x).softmax(-1), (0, 1))
        expected = (torch.special.xlogy(p, p) - p * self.model(x).log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(term._mean(self.model, x), expected)

    def test_a_grown_head_gives_new_classes_nothing_on_old_inputs(self):
        """`classes` cuts what a recalled teacher says of outputs that it did not have."""
        model = small(5)
        kept = holdfast.kept_inputs(self.whole.inputs)
        term = holdfast.distill(model, holdfast.prior(model), kept, holdfast.categorical, classes=3)
        x = kept.inputs
        old = model(x)[:, :3].softmax(-1).detach()
        expected = (old * (old.log() - model(x).log_softmax(-1)[:, :3])).sum(-1).mean()
        torch.testing.assert_close(term._mean(model, x), expected)
        assert float(expected.detach()) > 0.1  # the new classes have probability to give up


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
    mild = holdfast.own_text(Next(), count=500, length=3, num_data=10, temperature=100 / math.log(6), seed=1)
    said = (mild.inputs[:, 1:] == (mild.inputs[:, :-1] + 1) % 7).double().mean()  # e^log 6 against six times 1
    assert abs(float(said) - 0.5) < 5 * 0.5 / 1000**0.5
    with pytest.raises(holdfast.ArgumentError, match="2 tokens or more"):
        holdfast.own_text(Next(), count=5, length=1, num_data=10)


def test_rotated_steps_need_a_posterior_to_turn_to():
    model = small()
    term = holdfast.distill(
        model, holdfast.prior(model), holdfast.kept_inputs(torch.randn(4, 5, dtype=torch.float64)), holdfast.categorical
    )
    with pytest.raises(holdfast.ArgumentError, match="eigenvectors of a posterior"):
        holdfast.hold(torch.optim.SGD(model.parameters(), lr=0.1), model, term, num_data=4, rotate=True)


class TestTheOldFunction:
    """What a teacher that is recalled must not be silently wrong about."""

    def frozen(self):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        return model

    def term(self, model, memory):
        return holdfast.distill(model, memory, holdfast.kept_inputs(torch.randn(20, 5)), holdfast.categorical)

    def test_frozen_parameters_are_those_that_the_memory_was_made_with(self, tmp_path):
        torch.manual_seed(0)
        model = self.frozen()
        holdfast.save(holdfast.Memory.of(holdfast.prior(model), model), tmp_path / "memory")
        memory = holdfast.load(tmp_path / "memory")
        self.term(model, memory)
        with pytest.raises(holdfast.MismatchError, match="other values than when the memory was made"):
            self.term(self.frozen(), memory)

    def test_frozen_parameters_are_watched_and_the_same_values_are_no_change(self):
        torch.manual_seed(0)
        model = self.frozen()
        term = self.term(model, holdfast.Memory.of(holdfast.prior(model), model))
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert float(term.value(model)) == 0
        model[0] = nn.Linear(5, 8)
        with pytest.raises(holdfast.MismatchError, match="has changed"):
            term.value(model)

    def test_statistics_that_were_not_kept_and_have_moved_are_refused(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        posterior = holdfast.prior(model)
        with pytest.warns(holdfast.HoldfastWarning, match=r"no `1.running_mean`, `1.running_var` was kept"):
            self.term(model, posterior)  # as it was: its buffers are those of then
        with pytest.warns(holdfast.HoldfastWarning, match="Memory.of"):
            holdfast.recalled(model, posterior)
        self.term(model, holdfast.Memory.of(posterior, model))
        with torch.no_grad():
            model[0].weight += 1
        with pytest.raises(holdfast.MismatchError, match="Keep buffers"):
            self.term(model, posterior)

    def test_a_lookup_that_writes_does_not_write_to_the_posterior(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 3))
        with torch.no_grad():
            model[0].weight.fill_(5.0)
        posterior = holdfast.prior(model)
        before = posterior.mean["0.weight"].clone()
        holdfast.recalled(model, posterior)(torch.randint(0, 10, (4, 3)))
        assert torch.equal(posterior.mean["0.weight"], before)

    def test_in_a_loop_of_ones_own_it_costs_no_copy(self):
        model = small()
        memory, x = holdfast.Memory.of(holdfast.prior(model), model), torch.randn(9, 5, dtype=torch.float64)
        expected = model(x).detach()
        old = holdfast.recalled(model, memory)
        with torch.no_grad():
            model[0].weight += 0.3
        assert torch.equal(old(x), expected)
        assert not old(x).requires_grad

    def test_a_way_around_a_layer_is_found_behind_a_norm(self):
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.body, self.head = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

            def forward(self, x):
                x = self.norm(x)
                return self.head(x + self.body(x))

        model = Around()
        probes = holdfast.gaussian_probes([torch.randn(50, 6)], model=model, layer="body")
        with pytest.raises(holdfast.ArgumentError, match="shortcut"):
            holdfast.distill(model, holdfast.prior(model), probes, holdfast.categorical)

    def test_probes_at_a_layer_hold_what_is_above_it(self):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        probes = holdfast.gaussian_probes([torch.randn(50, 5)], model=model, layer="1")
        term = holdfast.distill(model, holdfast.prior(model), probes, holdfast.categorical)
        assert set(term.held(model)) == {"2.weight", "2.bias"}

    @pytest.mark.parametrize("inputs", [torch.randn(20, 4), torch.randint(0, 3, (20,))])
    def test_inputs_that_do_not_fit_are_named(self, inputs):
        model = nn.Linear(5, 3)
        with pytest.raises(holdfast.MismatchError, match="do not go through the model"):
            holdfast.distill(model, holdfast.prior(model), holdfast.kept_inputs(inputs), holdfast.categorical)

    def test_text_outside_the_vocabulary_or_too_long_is_named(self):
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
        with pytest.raises(holdfast.ArgumentError, match="outside its vocabulary"):
            holdfast.own_text(model, count=2, length=4, num_data=10, start=9)
        with pytest.raises(holdfast.ArgumentError, match="2 tokens or more"):
            holdfast.own_text(model, count=3.0, length=4, num_data=10)


class TestDivergencesAtTheEdge:
    def test_an_impossible_class_adds_nothing(self):
        a = torch.tensor([[1.0, 2.0, -torch.inf]])
        assert float(holdfast.distillation_loss(a, a, holdfast.categorical)) == 0
        new = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
        loss = holdfast.distillation_loss(a, new, holdfast.categorical)
        p, q = a[0, :2].softmax(0), new[0].softmax(0)
        torch.testing.assert_close(loss, (p * (p.log() - q[:2].log())).sum())
        loss.backward()
        assert bool(new.grad.isfinite().all())

    @pytest.mark.parametrize(
        ("shape", "shift"), [((5, 7), False), ((5, 7), True), ((2, 3, 4, 5), False), ((2, 1, 5), True)]
    )
    def test_tokens_have_positions(self, shape, shift):
        with pytest.raises(holdfast.DataError, match="positions"):
            holdfast.distillation_loss(torch.randn(shape), torch.randn(shape), holdfast.tokens(shift=shift))

    @pytest.mark.parametrize("shift", [True, False])
    def test_of_tokens_it_is_the_mean_over_the_positions_that_have_a_next_one(self, shift):
        old, new = torch.randn(2, 2, 4, 5).requires_grad_().unbind(0)
        each = holdfast.categorical.divergence(old.flatten(0, 1), new.flatten(0, 1)).view(2, 4)
        loss = holdfast.distillation_loss(old, new, holdfast.tokens(shift=shift))
        torch.testing.assert_close(loss, (each[:, :-1] if shift else each).mean())
        assert torch.autograd.grad(loss, old, allow_unused=True) == (None,)  # a teacher is not taught

    def test_nothing_that_counts_costs_nothing(self):
        old, new = torch.randn(2, 2, 3, 5)
        target = torch.full((2, 3), -100)
        assert float(holdfast.distillation_loss(old, new, holdfast.tokens(shift=False), target=target)) == 0

    @pytest.mark.parametrize("likelihood", [holdfast.bernoulli, holdfast.gaussian(0.5)])
    def test_outputs_that_were_added_are_unknown_to_the_old_model(self, likelihood):
        old, new = torch.randn(4, 3), torch.randn(4, 5)
        torch.testing.assert_close(likelihood.divergence(old, new), likelihood.divergence(old, new[:, :3]))
        with pytest.raises(holdfast.MismatchError, match="added at the end"):
            likelihood.divergence(new, old)

    def test_two_sure_answers_that_hardly_differ_are_not_below_zero(self):
        assert float(holdfast.bernoulli.divergence(torch.tensor([[8.0]]), torch.tensor([[8.001]]))) >= 0


class TestNewInputsOfOneModel:
    def made(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        source = holdfast.new_inputs(model, num_data=40)
        model(torch.ones(4, 5))
        return model, source

    def first(self, source):
        return float(source.draw(1, torch.Generator()).flatten()[0])

    def test_a_copys_inputs_are_not_the_models(self):
        model, source = self.made()
        for copied in (copy.deepcopy(model), copy.copy(model), torch.optim.swa_utils.AveragedModel(model)):
            copied.train()(torch.full((4, 5), 99.0))
            assert self.first(source) == 1
        model(torch.full((4, 5), 2.0))
        assert self.first(source) == 2

    def test_calls_that_nothing_is_learned_from_are_not_seen(self):
        """Those of a validation, and of one that leaves the dropout in."""
        model, source = self.made()
        model.eval()(torch.full((4, 5), 99.0))
        model.train()
        with torch.no_grad():
            model(torch.full((4, 5), 99.0))
        assert self.first(source) == 1
        model(torch.full((4, 5), 2.0))
        assert self.first(source) == 2

    def test_it_is_the_first_tensor_however_it_is_given(self):
        class Named(nn.Module):
            def forward(self, way, x, weights, mask=None):
                return x

        model = Named()
        source = holdfast.new_inputs(model, num_data=40)
        one, two, three = (torch.full((4, 5), float(value)) for value in (1, 2, 3))
        for given, named in (
            (("words", one, two), {}), (("words", one), {"weights": two, "mask": three}),
            (("words",), {"x": one, "weights": two}), (("words", {"x": one, "y": two}, three), {}),
        ):  # fmt: skip
            model("words", three, three)
            model(*given, **named)
            assert self.first(source) == 1

    def test_it_is_what_the_model_was_called_with_before_hooks_of_its_own_change_it(self):
        """They change what is drawn as well, when the model is asked about it."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3))
        model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        source = holdfast.new_inputs(model, num_data=40)
        model(torch.ones(4, 5))
        assert self.first(source) == 1

    def test_what_replicas_on_other_gpus_are_called_with_is_the_models(self):
        model, source = self.made()
        model._replicate_for_data_parallel()(torch.full((4, 5), 3.0))
        assert self.first(source) == 3

    def test_the_model_can_be_saved_whole(self):
        model, source = self.made()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        again(torch.full((4, 5), 99.0))
        assert self.first(source) == 1
