"""Methods: what each holds to, against the same written out by hand."""

import contextlib
import copy
import functools
import math
import operator
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast
from holdfast.bench import Held, Split, Task, Trainer, Training, decayed, diagonal, every_term, kronecker, per_task, run
from holdfast.bench.catalog import METHODS, one_of
from holdfast.bench.discriminant import Discriminant, Gaussian
from holdfast.bench.distilled import Distilled, feature_probes, of_features, own_words, probes, true_inputs
from holdfast.bench.heads import ExactHead, Shell
from holdfast.bench.methods import FineTuning, HeldByPath, batched, evened, hessian, lowrank, nearest, uniform
from holdfast.bench.networks import Gpt
from holdfast.bench.projection import Projected, input_moments
from holdfast.bench.protocols import PROTOCOLS

QUICK = Training(epochs=2, batch_size=64)


@pytest.fixture(scope="module")
def tasks():
    return PROTOCOLS["digits"].changed(tasks=3).sequence(0)


def small():
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def learned(task, seed=0):
    torch.manual_seed(seed)
    model, trainer = small(), Trainer(QUICK, seed)
    trainer.fit(model, task)
    return model, trainer


class TestControls:
    def test_frozen_is_what_the_first_task_left(self, tasks):
        frozen = run(FineTuning(tasks=1), tasks, small, QUICK)
        assert frozen.accuracy[0] == frozen.accuracy[1] == frozen.accuracy[2]
        assert frozen.accuracy[0] == run(FineTuning(), tasks, small, QUICK).accuracy[0]
        assert frozen.lowest == [None] * 3

    def test_a_hold_keeps_more_than_fine_tuning_and_learns_more_than_freezing(self, tasks):
        training = Training(epochs=8, batch_size=64, label_smoothing=0.1)
        tuned, frozen, held = (
            run(method, tasks, small, training) for method in (FineTuning(), FineTuning(tasks=1), Held(kronecker()))
        )
        assert held.average > tuned.average + 0.1
        assert held.average > frozen.average + 0.3
        assert held.forgetting < 0.5 * tuned.forgetting

    def test_a_seed_repeats(self, tasks):
        once, again, other = (run(Held(diagonal()), tasks[:2], small, QUICK, seed=seed) for seed in (1, 1, 2))
        assert once.accuracy == again.accuracy
        assert once.nll == again.nll
        assert once.accuracy != other.accuracy


class TestHeld:
    def test_the_pull_is_the_penalty_in_the_loss(self, tasks):
        """One step of SGD, held, against the gradient of loss + penalty / N."""
        method, sgd = Held(diagonal(), strength=7.0), Training(steps=1, batch_size=10**6, optimizer="sgd", lr=0.1)
        model, trainer = learned(tasks[0])
        method.remember(model, tasks[0], trainer)
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        loss = nn.functional.cross_entropy(model(tasks[1].train.x), tasks[1].train.y)
        whole = loss + 7.0 * holdfast.penalty(model, method.posterior) / len(tasks[1].train)
        expected = dict(zip(start, torch.autograd.grad(whole, list(model.parameters())), strict=True))
        method.learn(model, tasks[1], Trainer(sgd))
        for name, value in model.named_parameters():
            torch.testing.assert_close(value, start[name] - 0.1 * expected[name], atol=1e-6, rtol=1e-4)

    def test_updates_are_the_public_ones(self, tasks):
        (model, trainer), (other, _) = learned(tasks[0]), learned(tasks[1], seed=1)
        first, second = diagonal()(model, tasks[0], trainer), diagonal()(other, tasks[1], trainer)
        known = holdfast.consolidate(holdfast.prior(model), model, first)
        running = holdfast.consolidate(known, other, second)
        online = decayed(0.5)(known, other, second)
        apart = per_task(known, other, second)
        name = "0.weight"
        torch.testing.assert_close(running.precision.entries[name], first.entries[name] + second.entries[name])
        torch.testing.assert_close(online.precision.entries[name], 0.5 * first.entries[name] + second.entries[name])
        both = first.entries[name] + second.entries[name]
        mean = (first.entries[name] * model[0].weight + second.entries[name] * other[0].weight) / both
        torch.testing.assert_close(apart.mean[name][both > 0], mean.detach()[both > 0])
        torch.testing.assert_close(running.mean[name], other[0].weight.detach())

    def test_kronecker_terms_are_kept_or_made_one(self, tasks):
        model, trainer = learned(tasks[0])
        held = {name: Held(kronecker(), update) for name, update in {"sum": every_term, "nearest": nearest}.items()}
        for method in held.values():
            for task in tasks[:2]:
                method.remember(model, task, trainer)
        count = {name: len(next(iter(each.posterior.precision.layers.values()))) for name, each in held.items()}
        assert count == {"sum": 2, "nearest": 1}

    def test_beside_a_norm_there_is_one_nearest_product_too(self, tasks):
        torch.manual_seed(0)
        model, trainer = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 10)), Trainer(QUICK)
        every, one = Held(kronecker(), every_term), Held(kronecker(), nearest)
        for task in tasks[:2]:
            every.remember(model, task, trainer)
            one.remember(model, task, trainer)
        (factors, norm), (sum_, same) = one.posterior.precision.terms, every.posterior.precision.terms
        assert {len(terms) for terms in factors.layers.values()} == {1}
        assert set(norm.shapes) == {"1.weight", "1.bias"}
        for name, tensor in sum_.nearest().tensors.items():
            torch.testing.assert_close(factors.tensors[name], tensor)
        torch.testing.assert_close(norm.entries["1.weight"], same.entries["1.weight"])

    def test_what_is_kept_is_counted(self, tasks):
        model, trainer = learned(tasks[0])
        method = Held(diagonal())
        assert method.kept == []
        method.remember(model, tasks[0], trainer)
        size = sum(parameter.numel() for parameter in model.parameters())
        assert sum(tensor.numel() for tensor in method.kept) == 2 * size

    @pytest.mark.parametrize("form", ["task", "class"])
    def test_a_task_is_remembered_by_its_own_outputs(self, form):
        first, second, *_ = PROTOCOLS[f"digits-{form}"].sequence(0)
        model, trainer = learned(second)
        entries = diagonal()(model, second, trainer).entries["2.weight"].sum(1)
        inside = set(second.outputs)
        assert all((float(value) > 0) == (output in inside) for output, value in enumerate(entries))
        assert first.outputs == (0, 1)


class TestPath:
    def test_it_holds_to_the_recorded_path_of_each_task_as_the_public_names_do(self, tasks):
        method, trainer, other = HeldByPath(strength=3.0), Trainer(QUICK), Trainer(QUICK)
        torch.manual_seed(0)
        model = small()
        twin = copy.deepcopy(model)
        posterior = holdfast.prior(twin)
        for task in tasks[:2]:
            method.learn(model, task, trainer)
            method.remember(model, task, trainer)
            held, count = posterior, len(task.train)
            paths = []

            @contextlib.contextmanager
            def attached(optimizer, held=held, count=count, paths=paths):
                with (
                    holdfast.hold(optimizer, twin, held, num_data=count, strength=3.0),
                    holdfast.recorded_path(optimizer, twin) as path,
                ):
                    paths.append(path)
                    yield

            other.fit(twin, task, attached)
            posterior = holdfast.consolidate(posterior, twin, paths[0].precision(num_data=count))
        assert method.posterior.num_data == sum(len(task.train) for task in tasks[:2])
        for name, mean in posterior.mean.items():
            torch.testing.assert_close(method.posterior.mean[name], mean)
            entries = posterior.precision.diagonal()[name]
            torch.testing.assert_close(method.posterior.precision.diagonal()[name], entries)


class TestCurvatures:
    def test_a_temperature_softens_kronecker_factors(self, tasks):
        model, trainer = learned(tasks[0])
        found = kronecker(temperature=4.0)(model, tasks[0], trainer)
        batch = [(tasks[0].train.x, tasks[0].train.y)]
        want = holdfast.kronecker_fisher(model, batch, holdfast.softened(4.0))
        for name, entries in want.diagonal().items():
            torch.testing.assert_close(found.diagonal()[name], entries, rtol=1e-3, atol=1e-5)

    def test_evened_has_so_much_more_for_every_weight_and_example(self, tasks):
        model, trainer = learned(tasks[0])
        whole = diagonal()(model, tasks[0], trainer)
        found = evened(diagonal(), share=0.25)(model, tasks[0], trainer).diagonal()
        for name, entries in whole.entries.items():
            torch.testing.assert_close(found[name], entries + 0.25 * len(tasks[0].train))

    def test_uniform_has_the_trace_of_the_diagonal(self, tasks):
        model, trainer = learned(tasks[0])
        whole, even = diagonal()(model, tasks[0], trainer), uniform()(model, tasks[0], trainer)
        total = sum(float(each.double().sum()) for each in whole.entries.values())
        assert sum(float(each.double().sum()) for each in even.entries.values()) == pytest.approx(total, rel=1e-4)
        assert len({float(value) for each in even.entries.values() for value in each.unique()}) == 1
        assert even.num_data == len(tasks[0].train)

    def test_batched_is_the_square_of_whole_batches(self, tasks):
        model, trainer = learned(tasks[0])
        found = batched(100)(model, tasks[0], trainer)
        expected = torch.zeros_like(model[2].weight)
        for x, y in tasks[0].train.batches(100):
            (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), [model[2].weight])
            expected += len(y) * grad.square()
        torch.testing.assert_close(found.entries["2.weight"], expected)
        assert float(expected.sum()) < 0.2 * float(
            diagonal("observed")(model, tasks[0], trainer).entries["2.weight"].sum()
        )

    def test_batched_is_of_what_is_trained_and_zero_where_nothing_is_answered(self, tasks):
        """As every other curvature is: a frozen layer is not held, and an unused one has nothing to hold."""

        def partly():
            model = small()
            model[0].requires_grad_(False)
            model[1].unused = nn.Linear(2, 2)
            return model

        model, trainer = partly(), Trainer(QUICK)
        found = batched(100)(model, tasks[0], trainer).entries
        assert found.keys() == diagonal()(model, tasks[0], trainer).diagonal().keys()
        assert not any("0." in name for name in found)
        assert not found["1.unused.weight"].any()
        assert found["2.weight"].any()
        assert len(run(Held(batched()), tasks[:2], partly, QUICK).accuracy) == 2

    def test_the_hessian_is_the_estimate_with_negatives_at_zero(self, tasks):
        model, trainer = learned(tasks[0])
        found, data = hessian(2)(model, tasks[0], trainer), list(tasks[0].train.batches(100))
        plain = holdfast.hutchinson_hessian(model, data, holdfast.categorical, probes=2, seed=0).entries["2.weight"]
        assert bool((plain < 0).any())
        torch.testing.assert_close(found.entries["2.weight"], plain.clamp(min=0), rtol=1e-3, atol=1e-3)

    def test_squared_loss_has_a_fisher_of_its_own(self, tasks):
        """For a linear model under half squared error F = Σ xxᵀ for every output."""
        model, trainer = nn.Linear(64, 10), Trainer(Training(epochs=1, loss="squared"))
        entries = diagonal()(model, tasks[0], trainer).entries
        torch.testing.assert_close(entries["weight"], tasks[0].train.x.square().sum(0).expand(10, 64))
        torch.testing.assert_close(entries["bias"], torch.full((10,), float(len(tasks[0].train))))

    def test_low_rank_keeps_the_diagonal(self, tasks):
        model, trainer = learned(tasks[0])
        found, whole = lowrank(4)(model, tasks[0], trainer), diagonal()(model, tasks[0], trainer)
        torch.testing.assert_close(found.diagonal()["2.weight"], whole.entries["2.weight"], rtol=1e-3, atol=1e-4)


class TestProjection:
    def test_moments_are_means_over_inputs(self, tasks):
        model, _ = learned(tasks[0])
        found = input_moments(model, tasks[0], batch=100)
        x = torch.cat([tasks[0].train.x, torch.ones(len(tasks[0].train), 1)], 1)
        torch.testing.assert_close(found["0"], x.T @ x / len(x), rtol=1e-4, atol=1e-5)
        hidden = torch.relu(model[0](tasks[0].train.x)).detach()
        torch.testing.assert_close(found["2"][:24, :24], hidden.T @ hidden / len(x), rtol=1e-4, atol=1e-5)

    def test_moments_of_a_convolution_are_those_of_its_patches(self):
        torch.manual_seed(0)
        x = torch.randn(3, 2, 5, 5)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Flatten(), nn.Linear(36, 2))
        part = Split(x, torch.zeros(3, dtype=torch.long))
        found = input_moments(model, Task("made", part, part))["0"]
        padded = nn.functional.pad(x, (1, 1, 1, 1))
        rows = [
            torch.cat([padded[n, :, i : i + 3, j : j + 3].flatten(), torch.ones(1)])
            for n in range(3) for i in range(0, 5, 2) for j in range(0, 5, 2)
        ]  # fmt: skip
        expected = torch.stack(rows).T @ torch.stack(rows) / len(rows)
        torch.testing.assert_close(found, expected)

    def test_what_it_leaves_free_is_told(self):
        part = Split(torch.randn(20, 6), torch.arange(20) % 2)
        tasks = [Task(name, part, part) for name in "ab"]
        with pytest.warns(holdfast.HoldfastWarning, match=r"leaves `1\.weight`, `1\.bias` free"):
            run(Projected(), tasks, lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2)), QUICK)

    def test_a_weight_that_is_computed_is_refused(self):
        """Its gradient is not there to be projected: it was passed over."""
        part = Split(torch.randn(20, 6), torch.arange(20) % 2)
        normed = nn.utils.parametrizations.weight_norm
        with pytest.raises(holdfast.ArgumentError, match="the weight of `0` is computed"):
            run(Projected(), [Task("a", part, part)], lambda: nn.Sequential(normed(nn.Linear(6, 2))), QUICK)

    def test_a_strong_projection_leaves_the_answers_to_old_inputs(self):
        """Where the old inputs span few directions, new ones are learned in the others, and the old answers stay."""
        torch.manual_seed(0)
        old = Split(torch.cat([torch.randn(40, 3), torch.zeros(40, 5)], 1), torch.randint(0, 2, (40,)))
        new = Split(torch.randn(40, 8), torch.randint(0, 2, (40,)))
        first, second = Task("old", old, old), Task("new", new, new)
        model, method = nn.Linear(8, 2, bias=False), Projected(strength=1e6)
        trainer = Trainer(Training(epochs=5, batch_size=10))
        method.learn(model, first, trainer)
        method.remember(model, first, trainer)
        before, weight = model(old.x).detach(), model.weight.detach().clone()
        method.learn(model, second, trainer)
        torch.testing.assert_close(model(old.x), before, atol=1e-4, rtol=0)
        assert float((model.weight.detach() - weight).abs().max()) > 0.05

    def test_it_leaves_those_of_every_old_task_and_counts_the_bias_among_the_inputs(self):
        torch.manual_seed(0)
        y = torch.randint(0, 2, (40,))
        places = [torch.tensor([1.0, 1, 0, 0, 0, 0]), torch.tensor([0.0, 0, 1, 1, 0, 0]), torch.ones(6)]
        parts = [Split(torch.randn(40, 6) * place, y) for place in places]
        model, method = nn.Linear(6, 2), Projected(strength=1e6)
        trainer = Trainer(Training(epochs=5, batch_size=10))
        for part in parts[:2]:
            method.learn(model, Task("old", part, part), trainer)
            method.remember(model, Task("old", part, part), trainer)
        before = [model(part.x).detach() for part in parts]
        method.learn(model, Task("new", parts[2], parts[2]), trainer)
        for part, then in zip(parts[:2], before, strict=False):
            torch.testing.assert_close(model(part.x).detach(), then, atol=1e-4, rtol=0)
        assert float((model(parts[2].x).detach() - before[2]).abs().max()) > 0.05


class TestExactHead:
    def test_in_turn_it_is_what_all_at_once_gives(self):
        tasks = PROTOCOLS["digits-class"].changed(loss="squared").sequence(0)
        training = Training(epochs=1, loss="squared")
        made = run(ExactHead(features=200), tasks, lambda: Shell(10), training)
        method, model, trainer = ExactHead(features=200), Shell(10), Trainer(training)
        for task in tasks:
            method.learn(model, task, trainer)
        x = torch.cat([task.train.x for task in tasks])
        y = torch.cat([task.train.y for task in tasks])
        head = holdfast.linear_head(holdfast.random_features(64, 200, seed=0)).updated([(x, y)])
        tested = torch.cat([task.test.x for task in tasks])
        torch.testing.assert_close(method.head.predict(tested), head.predict(tested))
        assert made.average > 0.9

    def test_it_asks_for_squared_loss(self):
        tasks = PROTOCOLS["digits"].sequence(0)
        with pytest.raises(holdfast.ArgumentError, match="--loss squared"):
            run(ExactHead(), tasks, lambda: Shell(10), QUICK)


class TestDistilled:
    """Methods that hold by answers, on two digits at a time."""

    TRAINING = Training(epochs=8, batch_size=32, label_smoothing=0.1)

    def made(self, name, form="class", **changes):
        protocol = PROTOCOLS[f"digits-{form}"].changed(**{"tasks": 3, **changes})
        tasks, entry = protocol.sequence(0), METHODS[name]
        own = entry.model
        method = entry.make(1.0)
        run_ = run(method, tasks, lambda: own(10) if own else protocol.model(tasks), self.TRAINING, name=name)
        return run_, method

    def test_probes_keep_what_fine_tuning_loses_and_true_inputs_more(self):
        tuned, lwf, held, merged, true = (
            self.made(name)[0].average for name in ("fine-tuning", "lwf", "probes", "probes-merged", "true-inputs")
        )
        assert tuned < 0.4
        assert held > 0.85
        assert merged > 0.8
        assert held > lwf + 0.1
        assert true > held - 0.02

    @pytest.mark.parametrize("form", ["class", "task"])
    @pytest.mark.parametrize("by", ["probes", "new inputs"])
    @pytest.mark.parametrize("weights", [False, True])
    @pytest.mark.parametrize("sizes", [(150, 150, 150, 150), (150, 120, 150, 150)])
    def test_it_holds_to_what_the_public_names_make_of_the_old_tasks(self, form, by, weights, sizes):
        """Written out: which outputs are asked about, on what, for how much data, and how strongly.

        By SGD: where a task begins, old answers pull by no more than a rounding, which Adam would make a whole step of.
        """
        numbers = Training(steps=4, batch_size=32, lr=0.1, optimizer="sgd")
        tasks = PROTOCOLS[f"digits-{form}"].sequence(0)
        tasks = [replace(task, train=task.train.first(size)) for task, size in zip(tasks, sizes, strict=False)]
        method = Distilled(
            probes(5) if by == "probes" else None, diagonal() if weights else None, strength=3.0, batch=16
        )
        torch.manual_seed(0)
        model = small()
        twin = copy.deepcopy(model)
        trainer, other = Trainer(numbers, seed=2), Trainer(numbers, seed=2)
        posterior = holdfast.prior(twin)
        for index, task in enumerate(tasks):
            method.learn(model, task, trainer)
            method.remember(model, task, trainer)
            if not index:
                other.fit(twin, task)
            else:
                other.fit(twin, task, self.by_hand(twin, posterior, tasks[: index + 1], by, weights))
            fisher = diagonal()(twin, task, other)
            posterior = holdfast.consolidate(posterior, twin, fisher) if weights else holdfast.prior(twin)
        for one, another in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, another)

    def by_hand(self, model, posterior, tasks, by, weights):
        """Of tasks in one head all old ones are asked about at once; those with outputs of their own each by those."""
        *old, new = tasks
        groups = [old] if new.grows else [[task] for task in old]
        terms = [posterior] if weights else []
        for group in groups:
            first, *_, last = (new if new.grows else group[0]).outputs
            count = sum(len(task.train) for task in group)
            inputs = holdfast.new_inputs(model, num_data=count)
            if by == "probes":
                inputs = functools.reduce(
                    operator.add, [holdfast.gaussian_probes([task.train.x], rank=5) for task in group]
                )
            terms.append(holdfast.distill(
                model, posterior, inputs, holdfast.categorical, batch=16, seed=2,
                classes=len(group[-1].outputs) if new.grows else None,
                forward=lambda run, x, first=first, last=last: run(x)[:, first : last + 1],
            ))  # fmt: skip
        return lambda optimizer: holdfast.hold(
            optimizer, model, terms, num_data=len(new.train), strength=3.0, proximal=False
        )

    def test_merged_probes_do_not_grow(self):
        (apart, each), (merged, one) = self.made("probes", tasks=5), self.made("probes-merged", tasks=5)
        (((_, several),), ((_, single),)) = each.parts.values(), one.parts.values()
        assert [len(several.components), len(single.components)] == [5, 1]
        assert merged.kept_bytes[0] == merged.kept_bytes[-1] < apart.kept_bytes[-1]
        sizes = [len(task.train) for task in PROTOCOLS["digits-class"].sequence(0)]
        assert single.num_data == several.num_data == sum(sizes)
        with_outputs_of_their_own = self.made("probes-merged", "task")[1]
        assert len(with_outputs_of_their_own.parts) == 3

    def test_the_weights_beside_them(self):
        run_, method = self.made("probes+kronecker")
        assert run_.average > 0.85
        assert method.known.num_data > 0

    def test_what_is_kept_is_the_model_to_ask_and_what_stands_for_the_inputs(self, tasks):
        """4 bytes a number: of 64-24-10 the weights, and beside them Λ; of the probes a mean, a remainder, the rank."""
        weights = 64 * 24 + 24 + 24 * 10 + 10
        factors = 65**2 + 24**2 + 25**2 + 10**2  # of inputs with a 1 for the bias, and of outputs
        gaussian = 64 + 64 + 5 * 64
        for keep, curvature, numbers in (
            (None, None, [weights] * 2),
            (None, kronecker(), [weights + factors] * 2),
            (probes(5), kronecker(), [weights + factors + gaussian, weights + factors + 2 * gaussian]),
        ):
            made = run(Distilled(keep, curvature), tasks[:2], small, Training(steps=1))
            assert made.kept_bytes == [4 * each for each in numbers]

    @pytest.mark.parametrize(("rank", "kept"), [(5, 5), (None, 100)])
    def test_probes_of_features_have_the_largest_directions_of_their_covariance(self, rank, kept):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        part = Split(torch.randn(300, 1, 8, 8), torch.arange(300) % 3)
        found = (feature_probes() if rank is None else feature_probes(rank))(model, Task("made", part, part), None)
        (component,) = found.components
        seen = model[:3](part.x).detach()
        covariance = torch.cov(seen.T, correction=0)
        variances, directions = torch.linalg.eigh(covariance)
        largest = directions[:, -kept:] * variances[-kept:].sqrt()
        torch.testing.assert_close(component.mean, seen.mean(0), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(component.factors.T @ component.factors, largest @ largest.T, rtol=1e-3, atol=1e-4)

    def test_probes_of_features_and_the_weights_below_them(self):
        changes = {"network": "convolutional", "hidden": (8,)}
        tuned, (held, method) = self.made("fine-tuning", **changes)[0], self.made("probes-feature", **changes)
        assert held.average > tuned.average + 0.2
        ((_, kept),) = method.parts.values()
        assert kept.layer == "10"
        assert kept.shape == (64,)
        assert [len(each.factors) for each in kept.components] == [64] * 3  # all there are
        covered = {name.split(".")[0] for name in method.known.precision.shapes}
        assert covered == {"0", "2", "5", "7"}
        assert {name.split(".")[0] for name in method.known.mean} == {"0", "2", "5", "7", "11", "13"}

    def test_the_weights_below_features_are_held_by_what_they_do_to_them(self):
        """By a Gaussian of three tenths of the features' deviation, over what the first linear layer takes."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        part = Split(torch.randn(30, 1, 8, 8), torch.arange(30) % 3)
        found = of_features(model, Task("made", part, part), Trainer(QUICK, seed=3))
        seen = model[:3](part.x).detach()
        scale = 0.3 * float(seen.var(0, correction=0).mean().sqrt())
        expected = holdfast.kronecker_fisher(
            model[:3], [(part.x, seen)], holdfast.gaussian(scale), targets="sampled", seed=3
        )
        assert list(found.tensors) == list(expected.tensors)
        for name, tensor in expected.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor)

    def test_features_are_those_of_a_convolutional_network(self, tasks):
        with pytest.raises(holdfast.ArgumentError, match="use a convolutional network"):
            run(METHODS["probes-feature"].make(1.0), tasks, small, QUICK)

    @pytest.mark.parametrize(("form", "least"), [("class", 0.9), ("domain", 0.9), ("task", 0.95)])
    def test_the_discriminant_answers_by_density(self, form, least):
        run_, method = self.made("discriminant", form, tasks=5)
        assert run_.average > least
        assert len(method.classes) == 10
        assert len({label for label, *_ in method.classes}) == (2 if form == "domain" else 10)

    def test_the_discriminants_scores_are_log_densities(self):
        torch.manual_seed(0)
        part = Split(torch.randn(60, 3), (torch.arange(60) % 3 == 0).long())  # one class twice as often
        shell, method = Shell(2), Discriminant(rank=3)
        method.learn(shell, Task("made", part, part), Trainer(QUICK))
        scores = []
        for label in (0, 1):
            x = part.x[part.y == label]
            spread = torch.cov(x.T, correction=0) + part.x.var(0, correction=0).mean() * torch.eye(3)
            gaussian = torch.distributions.MultivariateNormal(x.mean(0), spread)
            scores.append(gaussian.log_prob(part.x) + math.log(len(x)))
        found = shell(part.x)
        torch.testing.assert_close(found[:, 0] - found[:, 1], scores[0] - scores[1], rtol=1e-3, atol=1e-3)

    def test_its_gaussians_are_those_of_torch(self):
        torch.manual_seed(0)
        mean, factors, rest = torch.randn(40).double(), torch.randn(5, 40).double(), torch.rand(40).double() + 0.1
        x = 3 * torch.randn(70, 40).double()
        slow = torch.distributions.LowRankMultivariateNormal(mean, factors.T, rest).log_prob(x)
        torch.testing.assert_close(Gaussian(mean, factors, rest).log_prob(x), slow)

    def test_own_text_holds_a_language_model(self):
        """Two languages of one byte after another, counting up and down: its own text keeps the first."""
        tasks = _languages()
        training = Training(epochs=25, batch_size=16, loss="tokens", lr=3e-3)

        def model():
            return Gpt(16, 8, 32, 1, 2)

        entry = METHODS["own-text"]
        method = entry.make(1.0)
        held, tuned = run(method, tasks, model, training), run(FineTuning(), tasks, model, training)
        assert held.accuracy[0][0] > 0.95
        assert held.nll[1][0] < tuned.nll[1][0]
        ((_, kept),) = method.parts.values()
        assert kept.unit == "token"
        assert kept.num_data == pytest.approx(2 * 512, rel=1e-4)
        first = kept.inputs[: len(kept.inputs) // 2]
        assert float(((first[:, 1:] - first[:, :-1]) % 16 == 1).double().mean()) > 0.9  # it counts up

    def test_what_is_kept_of_text_begins_as_the_tasks_sequences_do_and_stands_for_all_tokens(self):
        rows = torch.cat([torch.full((20, 1), 3), torch.full((20, 7), 5)], 1)
        part, trainer = Split(rows, rows), Trainer(Training(steps=1, loss="tokens"))
        for keep, count in ((own_words(10), 10), (true_inputs, 20)):
            found = keep(Gpt(16, 8, 8, 1, 2), Task("made", part, part), trainer)
            assert found.inputs.shape == (count, 8)
            assert set(found.inputs[:, 0].tolist()) == {3}
            assert (found.num_data, found.unit) == (pytest.approx(160), "token")


def _languages():
    """Sequences of bytes that count up, and down."""
    up = torch.arange(8).expand(64, 8) + torch.arange(64).unsqueeze(1)
    parts = [Split(rows % 16, (rows + step) % 16) for rows, step in ((up, 1), (16 + up.flip(1), -1))]
    return [Task(str(index), part, part) for index, part in enumerate(parts)]


@pytest.mark.parametrize(
    "name", [name for name, entry in METHODS.items() if entry.fits(PROTOCOLS["text"]) and name not in ("joint", "owm")]
)
def test_every_method_for_text_takes_tokens(name):
    made = run(
        METHODS[name].make(1.0), _languages(), lambda: Gpt(16, 8, 8, 1, 2), Training(steps=2, loss="tokens"), name=name
    )
    assert len(made.nll) == 2


@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "own-text"])
def test_text_is_held_by_the_number_of_its_tokens(name, monkeypatch):
    """64 sequences of 8: a pull for 64 new examples would be eight times too strong, for 64 old ones too weak."""
    counts = []

    def counted(optimizer, model, terms, *, num_data, unit, **options):
        held = terms if isinstance(terms, list) else [terms]
        counts.append((*(pytest.approx(term.num_data, rel=1e-4) for term in held), num_data, unit))
        return holdfast.hold(optimizer, model, terms, num_data=num_data, unit=unit, **options)

    for module in ("methods", "distilled"):
        monkeypatch.setattr(f"holdfast.bench.{module}.hold", counted)
    run(METHODS[name].make(1.0), _languages(), lambda: Gpt(16, 8, 8, 1, 2), Training(steps=2, loss="tokens"))
    assert counts == [(512, 512, "token")]


@pytest.mark.parametrize("name", ["ewc", "kronecker", "si", "lwf", "probes+kronecker"])
def test_all_that_hold_do_so_by_the_gradient_whatever_the_optimizer(name, monkeypatch):
    """By itself a hold takes a step of its own under SGD: methods that let it would be held in another way."""
    handles = []

    def held(*args, **options):
        handles.append(holdfast.hold(*args, **options))
        return handles[-1]

    for module in ("methods", "distilled"):
        monkeypatch.setattr(f"holdfast.bench.{module}.hold", held)
    tasks = PROTOCOLS["digits-class"].sequence(0)[:2]
    sgd = Training(steps=3, optimizer="sgd", lr=0.1)
    run(METHODS[name].make(1.0), tasks, lambda: PROTOCOLS["digits-class"].model(tasks), sgd)
    assert [handle.proximal for handle in handles] == [False]


def test_heads_are_asked_together_where_they_are_alike_in_everything():
    """Outputs that grew had no others beside them when they were learned; a head of its own is as it was."""
    x = torch.randn(20, 6)
    part = Split(x, torch.arange(20) % 2)
    grew, apart, alike = Task("grew", part, part, (0, 1), True), Task("apart", part, part, (2, 3)), Task(
        "alike", part, part, (4, 5)
    )  # fmt: skip
    model, method, trainer = nn.Linear(6, 6), METHODS["lwf"].make(1.0), Trainer(QUICK)
    for task in (grew, apart, alike):
        method.remember(model, task, trainer)
    found = [([old.name for old in olds], count) for olds, count in method._asked()]
    assert found == [(["grew"], 20.0), (["apart", "alike"], 40.0)]


ELSEWHERE = ("joint", "exact-head", "ewc-hessian", "probes-feature", "own-text", "discriminant")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ELSEWHERE])
def test_every_method_learns_two_tasks(name, tasks):
    epochs = 20 if name.startswith("ivon") else 1  # its curvature has to be learned as well
    made = run(METHODS[name].make(1.0), tasks[:2], small, Training(epochs=epochs, batch_size=64), name=name)
    assert made.method == name
    assert len(made.accuracy) == len(made.nll) == 2
    assert made.accuracy[0][0] > 0.25  # the first task was learned
    assert METHODS[name].about


def test_a_field_is_trained_on_the_labels_that_the_others_are(tasks):
    """Smoothed labels, where the protocol has them, and no others."""
    ends = [
        run(METHODS["mean-field"].make(1.0), tasks[:1], small, Training(epochs=30, label_smoothing=each)).nll[0][0]
        for each in (0.0, 0.9)
    ]
    assert ends[0] < ends[1] - 0.1


def test_an_unknown_method_is_told_the_nearest():
    with pytest.raises(holdfast.ArgumentError, match=r"no method 'kroneker'. Did you mean kronecker"):
        one_of("kroneker", METHODS, "method")
    with pytest.raises(holdfast.ArgumentError, match=r"There are fine-tuning, frozen"):
        one_of("xyzzy", METHODS, "method")


def test_permuted_and_split_protocols_make_models_that_fit():
    for name in ("digits", "digits-task", "digits-domain", "digits-class"):
        protocol = PROTOCOLS[name]
        tasks = protocol.sequence(0)
        assert protocol.model(tasks)(tasks[0].train.x[:2]).shape == (2, protocol.outputs(tasks))


@pytest.mark.parametrize(("form", "asked_of"), [("class", [1]), ("task", [0, 1])])
def test_a_method_that_distills_carries_no_data_on(form, asked_of):
    method, protocol = METHODS["lwf"].make(1.0), PROTOCOLS[f"digits-{form}"]
    tasks = protocol.sequence(0)[:2]
    run(method, tasks, lambda: protocol.model(tasks), Training(epochs=1))
    for (old, _), index in zip(method.parts.values(), asked_of, strict=True):
        assert old.outputs == tasks[index].outputs
        assert not old.train.stored.any()
        assert old.train.stored.untyped_storage().nbytes() == old.train.stored.nbytes
