"""What a hold offers for a Kronecker pull: computed every k steps, and steps in its eigenvectors."""

import copy

import pytest
import torch
from torch import nn

import holdfast
from cases import relu_mlp
from holdfast import Diagonal
from oracles import flat

N = 24  # the new data
STRENGTH = 30.0


def start(structure=holdfast.kronecker_fisher, make=relu_mlp, dtype=torch.float64):
    """A model at its old optimum with its posterior, and new data."""
    torch.manual_seed(0)
    model = make().to(dtype)
    old = (torch.randn(40, 5, dtype=dtype), torch.randint(0, 3, (40,)))
    posterior = holdfast.consolidate(holdfast.prior(model), model, structure(model, [old], holdfast.categorical))
    return model, posterior, torch.randn(N, 5, dtype=dtype) + 1, torch.randint(0, 3, (N,))


def weights(model):
    return flat({name: p.detach().clone() for name, p in model.named_parameters()})


def backward(optimizer, model, x, y, accumulate=1):
    optimizer.zero_grad()
    for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
        (holdfast.categorical.nll(model(xs), ys).mean() / accumulate).backward()
    return torch.zeros(())


def steps(optimizer, model, x, y, *, count=8, accumulate=1, closure=False):
    for _ in range(count):
        if closure:
            optimizer.step(lambda: backward(optimizer, model, x, y, accumulate))
        else:
            backward(optimizer, model, x, y, accumulate)
            optimizer.step()


@pytest.mark.parametrize("structure", [holdfast.kronecker_fisher, holdfast.dense_fisher])
def test_a_closures_loss_has_the_whole_penalty_in_it(structure):
    """Which a line search goes by."""
    model, posterior, x, y = start(structure)
    with torch.no_grad():
        model[0].weight += 0.1
    expected = STRENGTH * float(holdfast.penalty(model, posterior).detach()) / N
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, proximal=False):
        assert float(optimizer.step(lambda: backward(optimizer, model, x, y))) == pytest.approx(expected, rel=1e-6)


SGD = {"lr": 0.02}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, **SGD),
    "momentum": lambda p: torch.optim.SGD(p, **SGD, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
}


def normed():
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


class TestEvery:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("structure", [holdfast.kronecker_fisher, holdfast.diagonal_fisher, holdfast.dense_fisher])
    def test_every_step_is_the_plain_hold_to_the_bit(self, optimizer, structure):
        ends = []
        for options in ({}, {"every": 1}):
            model, posterior, x, y = start(structure)
            made = OPTIMIZERS[optimizer](model.parameters())
            with holdfast.hold(made, model, posterior, num_data=N, strength=STRENGTH, **options):
                steps(made, model, x, y)
            ends.append(weights(model))
        assert torch.equal(*ends)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("accumulate", [1, 4])
    @pytest.mark.parametrize("closure", [False, True])
    def test_every_third_step_is_a_loop_that_keeps_the_pull(self, optimizer, accumulate, closure):
        model, posterior, x, y = start()
        made = OPTIMIZERS[optimizer](model.parameters())
        with holdfast.hold(made, model, posterior, num_data=N, strength=STRENGTH, every=3) as handle:
            steps(made, model, x, y, accumulate=accumulate, closure=closure)
            assert handle.penalty == pytest.approx(holdfast.penalty(model, posterior).item())  # what it is now
        twin, *_ = start()
        made = OPTIMIZERS[optimizer](twin.parameters())
        for step in range(8):
            if step % 3 == 0:
                pull = holdfast.penalty_gradient(twin, posterior)
            backward(made, twin, x, y, accumulate)
            for name, parameter in twin.named_parameters():
                parameter.grad += STRENGTH / N * pull[name]
            made.step()
        torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=1e-12)
        plain, *_ = start()
        made = OPTIMIZERS[optimizer](plain.parameters())
        with holdfast.hold(made, plain, posterior, num_data=N, strength=STRENGTH):
            steps(made, plain, x, y)
        assert (weights(plain) - weights(model)).abs().max() > 1e-6

    def test_two_optimizers_keep_a_pull_each(self):
        model, posterior, x, y = start()
        pair = [torch.optim.SGD(part.parameters(), **SGD) for part in (model[:2], model[2:])]
        with holdfast.hold(pair, model, posterior, num_data=N, strength=STRENGTH, every=2):
            for _ in range(5):
                model.zero_grad()
                holdfast.categorical.nll(model(x), y).mean().backward()
                for each in pair:
                    each.step()
        twin, *_ = start()
        pair = [torch.optim.SGD(part.parameters(), **SGD) for part in (twin[:2], twin[2:])]
        pulls = [{}, {}]
        for step in range(5):
            twin.zero_grad()
            holdfast.categorical.nll(twin(x), y).mean().backward()
            for which, each in enumerate(pair):
                if step % 2 == 0:
                    pulls[which] = holdfast.penalty_gradient(twin, posterior)
                for name, parameter in twin.named_parameters():
                    if any(parameter is other for other in each.param_groups[0]["params"]):
                        parameter.grad += STRENGTH / N * pulls[which][name]
                each.step()
        torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=1e-12)

    def test_a_pull_from_before_a_layer_was_frozen_is_not_used_after(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with holdfast.hold(optimizer, model, posterior, num_data=N, every=2):
            steps(optimizer, model, x, y, count=1)
            model[0].requires_grad_(False)
            steps(optimizer, model, x, y, count=4)
            model[0].requires_grad_(True)
            before = weights(model)
            optimizer.zero_grad()
            expected = before - 0.5 / N * flat(
                {name: holdfast.penalty_gradient(model, posterior)[name] for name, _ in model.named_parameters()}
            )
            optimizer.step()
        torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-12)

    def test_lbfgs_is_refused(self):
        model, posterior, _, _ = start()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(holdfast.ArgumentError, match=r"LBFGS compares losses within a step.*every=1"):
            holdfast.hold(optimizer, model, posterior, num_data=N, every=2)

    @pytest.mark.parametrize("every", [0, -3, 2.0, True, None, "2"])
    def test_what_is_no_number_of_steps_is_refused(self, every):
        model, posterior, _, _ = start()
        with pytest.raises(holdfast.ArgumentError, match=r"every is a number of steps, 1 or more, got"):
            holdfast.hold(OPTIMIZERS["sgd"](model.parameters()), model, posterior, num_data=N, every=every)


def coordinates(model, posterior):
    """The layers of a posterior by their weights, with the eigenvectors of their factors."""
    terms = posterior.precision.terms if isinstance(posterior.precision, holdfast.Sum) else (posterior.precision,)
    (kronecker,) = (term for term in terms if isinstance(term, holdfast.Kronecker))
    return {
        layer: [torch.linalg.eigh(each[0])[1] for each in (term.outputs, term.inputs)]
        for layer, (term,) in kronecker.layers.items()
    }


class TestRotate:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
    @pytest.mark.parametrize("accumulate", [1, 4])
    @pytest.mark.parametrize("closure", [False, True])
    @pytest.mark.parametrize("make", [relu_mlp, normed])
    def test_gradient_steps_are_the_same_in_every_basis(self, dtype, optimizer, accumulate, closure, make):
        ends = []
        for rotate in (False, True):
            model, posterior, x, y = start(make=make, dtype=dtype)
            made = OPTIMIZERS[optimizer](model.parameters())
            with holdfast.hold(made, model, posterior, num_data=N, strength=STRENGTH, rotate=rotate, proximal=False):
                steps(made, model, x, y, accumulate=accumulate, closure=closure)
            ends.append(weights(model))
        torch.testing.assert_close(*ends, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5)
        assert (ends[0] - weights(start(make=make, dtype=dtype)[0])).abs().max() > 1e-3

    @pytest.mark.parametrize("closure", [False, True])
    @pytest.mark.parametrize("make", [relu_mlp, normed])
    def test_adam_steps_in_the_eigenvectors(self, closure, make):
        """Its moments are of the turned gradients, and its step is turned back; what is no layer is as it was."""
        model, posterior, x, y = start(make=make)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, rotate=True):
            steps(optimizer, model, x, y, closure=closure)
        twin, *_ = start(make=make)
        layers = coordinates(twin, posterior)
        folded = {name for layer in layers for name in layer.shapes}
        moments = {}
        for t in range(1, 9):
            loss = holdfast.categorical.nll(twin(x), y).mean() + STRENGTH * holdfast.penalty(twin, posterior) / N
            params = dict(twin.named_parameters())
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
            for key in [*layers, *(name for name in params if name not in folded)]:
                if key in layers:
                    q, r = layers[key]
                    g = q.T @ torch.cat([grads[key.weight], grads[key.bias].unsqueeze(1)], 1) @ r
                else:
                    g = grads[key]
                m, v = moments.get(key, (0.0, 0.0))
                m, v = moments[key] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                move = -0.02 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                with torch.no_grad():
                    if key in layers:
                        move = q @ move @ r.T
                        params[key.weight] += move[:, :-1]
                        params[key.bias] += move[:, -1]
                    else:
                        params[key] += move
        torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=1e-8)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_gradients_are_put_back_after_the_step(self, optimizer):
        model, posterior, x, y = start()
        made = OPTIMIZERS[optimizer](model.parameters())
        with torch.no_grad():
            model[0].weight += 0.1
        pull = holdfast.penalty_gradient(model, posterior)
        with holdfast.hold(made, model, posterior, num_data=N, strength=STRENGTH, rotate=True):
            backward(made, model, x, y)
            given = {name: p.grad for name, p in model.named_parameters()}
            expected = {name: grad + STRENGTH / N * pull[name] for name, grad in given.items()}
            made.step()
        for name, parameter in model.named_parameters():
            assert parameter.grad is given[name]
            torch.testing.assert_close(parameter.grad, expected[name])

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_step_that_the_scaler_skips_moves_nothing(self, fused):
        model, posterior, x, y = start(dtype=torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True):
            for bad in (True, False, True, False):
                optimizer.zero_grad()
                scaler.scale(holdfast.categorical.nll(model(x), y).mean()).backward()
                if bad:
                    model[0].bias.grad[0] = torch.inf
                before = weights(model)
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(weights(model), before) == bad
        assert bool(weights(model).isfinite().all())

    def test_every_and_rotate_go_together(self):
        ends = []
        for rotate in (False, True):
            model, posterior, x, y = start()
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, every=3, rotate=rotate):
                steps(optimizer, model, x, y)
            ends.append(weights(model))
        torch.testing.assert_close(*ends, rtol=0, atol=1e-12)

    def test_two_posteriors_over_the_same_layers_turn_them_once(self):
        """One folds the bias in, and the other was taken of the weights alone."""
        ends = []
        for rotate in (False, True):
            model, posterior, x, y = start()
            old = (torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 3, (30,)))
            fisher = holdfast.kronecker_fisher(model, [old], holdfast.categorical, only="*.weight")
            other = holdfast.consolidate(holdfast.prior(model), model, fisher)
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            with holdfast.hold(optimizer, model, [posterior, other], num_data=N, strength=STRENGTH, rotate=rotate):
                steps(optimizer, model, x, y)
            given = [p.grad.clone() for p in model.parameters()]
            ends.append((weights(model), flat(dict(enumerate(given)))))
        for plain, turned in zip(*ends, strict=True):
            torch.testing.assert_close(plain, turned, rtol=0, atol=1e-10)

    def test_a_bias_that_had_no_curvature_trains_beside_and_one_that_is_frozen_later_is_refused(self):
        ends = []
        for rotate in (False, True):
            model, _, x, y = start()
            model[0].bias.requires_grad_(False)
            old = (torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 3, (30,)))
            fisher = holdfast.kronecker_fisher(model, [old], holdfast.categorical)
            posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
            model[0].bias.requires_grad_(True)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            with holdfast.hold(
                optimizer, model, posterior, num_data=N, strength=STRENGTH, rotate=rotate, proximal=False
            ):
                steps(optimizer, model, x, y)
            ends.append(weights(model))
        torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
        model, posterior, x, y = start()
        model[0].bias.requires_grad_(False)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with (
            pytest.raises(holdfast.ArgumentError, match=r"gradients of a whole layer.*`0\.bias` has none.*rotate"),
            holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True),
        ):
            steps(optimizer, model, x, y)

    def test_a_layer_that_is_frozen_whole_is_left_alone(self):
        model, posterior, x, y = start()
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        with holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True):
            steps(optimizer, model, x, y)
        assert torch.equal(model[0].weight, before)

    def test_what_it_cannot_turn_is_refused(self):
        model, posterior, _, _ = start()
        decayed = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        with pytest.raises(holdfast.ArgumentError, match=r"weight decay 0\.01 would be turned.*weight_decay=0"):
            holdfast.hold(decayed, model, posterior, num_data=N, rotate=True)
        with pytest.raises(holdfast.ArgumentError, match=r"LBFGS moves within a step.*rotate=True"):
            holdfast.hold(torch.optim.LBFGS(model.parameters()), model, posterior, num_data=N, rotate=True)
        _, diagonal, _, _ = start(holdfast.diagonal_fisher)
        with pytest.raises(holdfast.ArgumentError, match=r"this posterior has none\. Use kronecker_fisher"):
            holdfast.hold(OPTIMIZERS["adam"](model.parameters()), model, diagonal, num_data=N, rotate=True)

    @pytest.mark.parametrize("optimizer", ["momentum", "adam", "fused adam"])
    def test_moments_of_other_coordinates_are_refused(self, optimizer):
        model, posterior, x, y = start()
        made = OPTIMIZERS[optimizer](model.parameters())
        steps(made, model, x, y, count=2)
        before = weights(model)
        key = "momentum_buffer" if optimizer == "momentum" else "exp_avg"
        with (
            pytest.raises(holdfast.ArgumentError, match=rf"has `{key}` of `0\.weight` from steps in other.*fresh opt"),
            holdfast.hold(made, model, posterior, num_data=N, rotate=True),
        ):
            steps(made, model, x, y)
        assert torch.equal(weights(model), before)
        with holdfast.hold(made, model, posterior, num_data=N, proximal=False):  # as it is without turning
            steps(made, model, x, y)

    def test_ivon_is_refused(self):
        model, posterior, _, _ = start()
        prior = holdfast.prior(model, 1.0)
        optimizer = holdfast.IVON(model, prior, holdfast.categorical, num_data=N)
        with pytest.raises(holdfast.ArgumentError, match=r"IVON learns curvature.*leave rotate=True out"):
            holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True)

    @pytest.mark.parametrize("free", [False, True])
    def test_optimizers_that_keep_other_weights_are_refused(self, free):
        model, posterior, _, _ = start()
        kind = pytest.importorskip("schedulefree").SGDScheduleFree if free else torch.optim.ASGD
        with pytest.raises(holdfast.ArgumentError, match=rf"{kind.__name__} keeps other weights.*leave rotate=True"):
            holdfast.hold(kind(model.parameters(), lr=0.02), model, posterior, num_data=N, rotate=True)

    @pytest.mark.parametrize("make", [relu_mlp, normed])
    @pytest.mark.parametrize(
        "made",
        [
            OPTIMIZERS["momentum"],
            OPTIMIZERS["adam"],
            OPTIMIZERS["fused adam"],
            lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1),
        ],
        ids=["momentum", "adam", "fused adam", "adagrad"],
    )
    def test_what_comes_after_steps_as_a_fresh_optimizer_does(self, made, make):
        """In the layers that were turned; what else was held, LayerNorm's scales, goes on as it was."""
        ends = []
        for fresh in (False, True):
            model, posterior, x, y = start(make=make)
            optimizer = made(model.parameters())
            with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, rotate=True):
                steps(optimizer, model, x, y)
                inside = optimizer.state_dict()["state"]
            assert any(value.ndim and value.any() for value in inside[0].values())  # what was saved is not taken back
            if fresh:
                layers = {name for layer in coordinates(model, posterior) for name in layer.shapes}
                kept = {p: optimizer.state[p] for name, p in model.named_parameters() if name not in layers}
                assert len(kept) == (2 if make is normed else 0)
                optimizer = made(model.parameters())
                optimizer.state.update(kept)
            steps(optimizer, model, x, y)
            ends.append(weights(model))
        assert torch.equal(*ends)

    def test_a_hold_after_a_hold_begins_anew(self):
        """An optimizer for several holds in turn, each of which leaves it as it found it."""
        model, posterior, x, y = start()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        for _ in range(2):
            with holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True):
                steps(optimizer, model, x, y, count=2)
        assert not optimizer.state

    @pytest.mark.parametrize("first", ["optimizer", "hold"])
    def test_moments_of_its_own_are_gone_on_with_to_the_bit(self, first):
        ends = []
        for broken in (False, True):
            model, posterior, x, y = start()
            optimizer = OPTIMIZERS["adam"](model.parameters())
            options = {"num_data": N, "strength": STRENGTH, "rotate": True}
            handle = holdfast.hold(optimizer, model, posterior, **options)
            assert "rotated" not in handle.state_dict()
            steps(optimizer, model, x, y, count=4)
            if broken:
                moments, state = copy.deepcopy(optimizer.state_dict()), handle.state_dict()
                handle.remove()
                optimizer = OPTIMIZERS["adam"](model.parameters())
                if first == "optimizer":
                    optimizer.load_state_dict(moments)
                handle = holdfast.hold(optimizer, model, posterior, **options)
                if first == "hold":
                    optimizer.load_state_dict(moments)
                handle.load_state_dict(state)
            steps(optimizer, model, x, y, count=4)
            assert handle.state_dict()["rotated"]
            handle.remove()
            assert "rotated" not in handle.state_dict()
            assert not optimizer.state
            ends.append(weights(model))
        assert torch.equal(*ends)

    def test_moments_of_one_basis_are_not_gone_on_with_in_another(self):
        states = {}
        for rotate in (False, True):
            model, posterior, x, y = start()
            optimizer = OPTIMIZERS["adam"](model.parameters())
            with holdfast.hold(optimizer, model, posterior, num_data=N, rotate=rotate) as handle:
                steps(optimizer, model, x, y, count=2)
                states[rotate] = copy.deepcopy(optimizer.state_dict()), handle.state_dict()
        for rotate in (False, True):
            model, posterior, x, y = start()
            optimizer = OPTIMIZERS["adam"](model.parameters())
            moments, state = states[not rotate]
            optimizer.load_state_dict(moments)
            handle = holdfast.hold(optimizer, model, posterior, num_data=N, rotate=rotate)
            if rotate:
                handle.load_state_dict(state)
                with pytest.raises(holdfast.ArgumentError, match="from steps in other coordinates"):
                    steps(optimizer, model, x, y)
            else:
                with pytest.raises(holdfast.MismatchError, match=r"a hold with rotate=True.*Hold with rotate=True"):
                    handle.load_state_dict(state)
            handle.detach()

    def test_an_optimizer_that_evaluates_its_closure_twice_is_refused(self):
        class Twice(torch.optim.SGD):
            def step(self, closure):
                closure()
                super().step()
                closure()
                return super().step()

        model, posterior, x, y = start()
        optimizer = Twice(model.parameters(), lr=0.01)
        with (
            pytest.raises(holdfast.ArgumentError, match=r"closure more than once in a step.*rotate=True"),
            holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True),
        ):
            steps(optimizer, model, x, y, closure=True)

    def test_a_step_that_failed_does_not_spoil_the_next(self):
        class Broken(torch.optim.SGD):
            broken = False

            def step(self, closure=None):
                if self.broken:
                    raise KeyError
                return super().step(closure)

        ends = []
        for rotate in (False, True):
            model, posterior, x, y = start()
            optimizer = Broken(model.parameters(), lr=0.02)
            with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, rotate=rotate):
                steps(optimizer, model, x, y, count=2)
                optimizer.broken = True
                with pytest.raises(KeyError):
                    steps(optimizer, model, x, y, count=1)
                optimizer.broken = False
                steps(optimizer, model, x, y, count=2)
            ends.append(weights(model))
        torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_parameter_groups_that_differ_within_a_layer_are_refused():
    model, posterior, x, y = start()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, **SGD)
    with (
        pytest.raises(holdfast.ArgumentError, match="parameter groups with another lr"),
        holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True),
    ):
        steps(optimizer, model, x, y)


def test_a_flat_prior_has_nothing_to_turn_to():
    model, _, x, y = start()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with holdfast.hold(optimizer, model, holdfast.prior(model), num_data=N, rotate=True):
        steps(optimizer, model, x, y)


class TestPull:
    """What a step adds, against the penalty differentiated."""

    @staticmethod
    def moved(make=normed, dtype=torch.float64):
        """Two tasks, the terms kept apart, over layers, a norm and a prior; away from the mean."""
        model, posterior, x, y = start(make=make, dtype=dtype)
        fisher = holdfast.kronecker_fisher(model, [(x, y)], holdfast.categorical)
        posterior = holdfast.consolidate(posterior, model, fisher, exact=True)
        prior = Diagonal({name: torch.full_like(mean, 0.3) for name, mean in posterior.mean.items()})
        posterior = holdfast.Posterior(posterior.mean, posterior.precision + prior)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        return model, posterior

    @staticmethod
    def expected(model, posterior, scale):
        params = dict(model.named_parameters())
        value = holdfast.penalty(model, posterior)
        grads = torch.autograd.grad(value, list(params.values()))
        had = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params.items()}
        return value.detach(), {name: had[name] + float(scale) * grad for name, grad in zip(params, grads, strict=True)}

    @pytest.mark.parametrize("scale", [0.7, -0.7, torch.tensor(0.7)])
    @pytest.mark.parametrize("make", [relu_mlp, normed])
    def test_it_is_added_to_what_is_there(self, scale, make):
        model, posterior = self.moved(make)
        term = holdfast.Quadratic(posterior)
        assert term._packed is not None
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn_like(parameter) if index % 2 else None
        value, grads = self.expected(model, posterior, scale)
        found = term.add_gradient_(model, scale, {id(parameter) for parameter in model.parameters()})
        torch.testing.assert_close(found, value)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name])

    def test_others_are_left_alone_and_count_in_the_pull(self):
        model, posterior = self.moved()
        _, grads = self.expected(model, posterior, 0.7)
        ours = {id(model[0].weight), id(model[1].bias), id(model[3].bias)}
        holdfast.Quadratic(posterior).add_gradient_(model, 0.7, ours)
        for name, parameter in model.named_parameters():
            if id(parameter) in ours:
                torch.testing.assert_close(parameter.grad, grads[name])
            else:
                assert parameter.grad is None
        assert holdfast.Quadratic(posterior).add_gradient_(model, 0.7, set()) > 0

    def test_a_parameter_that_was_replaced_is_found(self):
        model, posterior = self.moved()
        term = holdfast.Quadratic(posterior)
        term.add_gradient_(model, 0.7, {id(parameter) for parameter in model.parameters()})
        model.zero_grad()
        model[0].weight = nn.Parameter(model[0].weight.detach() + 1)
        model[3] = nn.Linear(6, 3).double()
        value, grads = self.expected(model, posterior, 0.7)
        found = term.add_gradient_(model, 0.7, {id(parameter) for parameter in model.parameters()})
        torch.testing.assert_close(found, value)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name])

    @pytest.mark.parametrize("scale", [0.7, torch.tensor(0.7)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_parameters_in_half_precision_move_by_the_pull_of_float32(self, dtype, scale):
        model, posterior = self.moved(dtype=torch.float32)
        model = model.to(dtype)
        wide = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
        exact = posterior.precision.matvec(posterior.delta(wide))
        term = holdfast.Quadratic(posterior)
        assert term._packed.takes(model.parameters())
        term.add_gradient_(model, scale, {id(parameter) for parameter in model.parameters()})
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == dtype
            torch.testing.assert_close(parameter.grad, (0.7 * exact[name]).to(dtype), rtol=1e-2, atol=1e-4)

    def test_a_half_precision_memory_is_pulled_to_by_the_general_way(self):
        model, posterior = self.moved(dtype=torch.float32)
        posterior = posterior.to(dtype=torch.bfloat16)
        term = holdfast.Quadratic(posterior)
        assert term._packed is None
        exact = posterior.to(dtype=torch.float32)
        _, grads = self.expected(model, exact, 0.7)
        term.add_gradient_(model, 0.7, {id(parameter) for parameter in model.parameters()})
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-2, atol=1e-2)

    def test_under_autocast_it_keeps_its_precision(self):
        model, posterior = self.moved(dtype=torch.float32)
        value, grads = self.expected(model, posterior, 0.7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = holdfast.Quadratic(posterior).add_gradient_(model, 0.7, {id(p) for p in model.parameters()})
        torch.testing.assert_close(found, value, rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-4)


def test_rotated_steps_under_a_prior_alone_are_plain_ones():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    optimizer = torch.optim.Adam(model.parameters())
    with holdfast.hold(optimizer, model, holdfast.prior(model, precision=1e-3), num_data=20, rotate=True) as handle:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert handle.steps == 1
