import copy
import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import holdfast
from cases import DataParallel, relu_mlp
from oracles import flat

N = 24  # the new data
STRENGTH = 1.7


def start(structure=holdfast.diagonal_fisher):
    """A model at its old optimum with its posterior, and new data."""
    torch.manual_seed(0)
    model = relu_mlp().double()
    old = (torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 3, (40,)))
    posterior = holdfast.consolidate(holdfast.prior(model), model, structure(model, [old], holdfast.categorical))
    return model, posterior, torch.randn(N, 5, dtype=torch.float64) + 1, torch.randint(0, 3, (N,))


def weights(model):
    return flat({name: p.detach() for name, p in model.named_parameters()})


def loop(optimizer, model, x, y, *, accumulate=1, closure=False, term=None, steps=6):
    """Train as users do. With `term`, the penalty is part of the loss, which is what a hold must equal."""

    def backward():
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            (holdfast.categorical.nll(model(xs), ys).mean() / accumulate).backward()
        loss = holdfast.categorical.nll(model(x), y).mean().detach()
        if term is not None:
            extra = STRENGTH * holdfast.penalty(model, term) / N
            extra.backward()
            loss = loss + extra.detach()
        return loss

    for _ in range(steps):
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.0),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.0, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


STRUCTURES = {
    "diagonal": holdfast.diagonal_fisher,
    "dense": holdfast.dense_fisher,
    "lowrank": functools.partial(holdfast.lowrank_fisher, rank=6),
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize(("make", "accumulate", "closure"), [
    *itertools.product(OPTIMIZERS, (1, 4), (False, True)),
], ids=str)  # fmt: skip
def test_the_hook_equals_the_loss_term(structure, make, accumulate, closure):
    ends = []
    for held in (True, False):
        model, posterior, x, y = start(structure)
        optimizer = OPTIMIZERS[make](model.parameters())
        if held:
            with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, proximal=False) as handle:
                loop(optimizer, model, x, y, accumulate=accumulate, closure=closure)
                assert handle.penalty > 1e-6
        else:
            loop(optimizer, model, x, y, accumulate=accumulate, closure=closure, term=posterior)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_sees_the_whole_objective(search):
    ends = []
    for held in (True, False):
        model, posterior, x, y = start()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=8, line_search_fn=search)
        if held:
            with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH):
                loop(optimizer, model, x, y, closure=True, steps=3)
        else:
            loop(optimizer, model, x, y, closure=True, steps=3, term=posterior)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-10)


def test_a_closure_may_be_given_by_name_and_return_a_number_or_nothing():
    for value in (1.25, None):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model[0].weight += 0.1
        with holdfast.hold(optimizer, model, posterior, num_data=N, proximal=False) as handle:

            def closure(model=model, optimizer=optimizer, x=x, y=y, value=value):
                optimizer.zero_grad()
                holdfast.categorical.nll(model(x), y).mean().backward()
                return value

            before = handle.penalty / N
            returned = optimizer.step(closure=closure)
        assert returned is None if value is None else returned == pytest.approx(1.25 + before)


def test_what_a_closure_returns_in_place_of_a_loss_goes_through_as_it_is():
    for value in ({"loss": torch.ones(())}, (torch.ones(()), "more")):
        model, posterior, x, y = start()
        other = copy.deepcopy(model)
        for each, returned in ((model, value), (other, 0.0)):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

            def closure(each=each, optimizer=optimizer, x=x, y=y, returned=returned):
                optimizer.zero_grad()
                holdfast.categorical.nll(each(x), y).mean().backward()
                return returned

            with holdfast.hold(optimizer, each, posterior, num_data=N):
                assert (optimizer.step(closure) is value) == (returned is value)
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_does_not_scale_the_penalty(fused):
    """Fused kernels divide by the scale themselves; the others get gradients that were already divided."""
    ends = []
    for scaled in (True, False):
        model, posterior, x, y = start()
        model, posterior, x = model.float(), posterior.to(dtype=torch.float32), x.float()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        with holdfast.hold(optimizer, model, posterior, num_data=N, strength=50.0):
            for step in range(8):
                optimizer.zero_grad()
                loss = holdfast.categorical.nll(model(x), y).mean()
                scaler.scale(loss).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_moves_nothing_and_is_no_error(fused):
    model, posterior, x, y = start()
    model, posterior, x = model.float(), posterior.to(dtype=torch.float32), x.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.no_grad():
        model[0].weight += 0.1
    with holdfast.hold(optimizer, model, posterior, num_data=N):
        for bad in (True, True, True, True, False):
            optimizer.zero_grad()
            scaler.scale(holdfast.categorical.nll(model(x), y).mean()).backward()
            if bad:
                model[0].bias.grad[0] = torch.inf
            before = weights(model)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(weights(model), before) == bad


def test_clipping_leaves_the_penalty_whole():
    """The pull is added after clipping: with the data's gradient clipped to nothing, only the pull remains."""
    model, posterior, x, y = start()
    with torch.no_grad():
        model[0].weight += 0.1
    expected = model[0].weight - 0.5 * STRENGTH / N * holdfast.penalty_gradient(model, posterior)["0.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, proximal=False):
        holdfast.categorical.nll(model(x), y).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-20)
        optimizer.step()
    torch.testing.assert_close(model[0].weight, expected, rtol=0, atol=1e-15)


def test_several_optimizers_share_one_hold():
    ends = []
    for held in (True, False):
        model, posterior, x, y = start()
        pair = [torch.optim.SGD(model[:2].parameters(), lr=0.1), torch.optim.Adam(model[2:].parameters(), lr=0.01)]
        handle = holdfast.hold(pair, model, posterior, num_data=N, strength=STRENGTH, proximal=False) if held else None
        for _ in range(5):
            for optimizer in pair:
                optimizer.zero_grad()
            loss = holdfast.categorical.nll(model(x), y).mean()
            (loss if held else loss + STRENGTH * holdfast.penalty(model, posterior) / N).backward()
            for optimizer in pair:
                optimizer.step()
        if handle is not None:
            handle.remove()
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("closure", [False, True])
def test_a_subclass_that_calls_its_parents_step_is_pulled_once(closure):
    """Torch hooks the step of every class that was ever instantiated: a step within a step fires them twice."""

    class Child(torch.optim.SGD):
        def step(self, closure=None):
            if self.broken:
                raise KeyError
            return super().step(closure)

    ends = []
    for make in (torch.optim.SGD, Child):
        model, posterior, x, y = start()
        optimizer = make(model.parameters(), lr=0.1)
        optimizer.broken = False
        with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH, proximal=False) as handle:
            loop(optimizer, model, x, y, closure=closure, steps=2)
            if make is Child:  # a step that failed is not a step under way
                before, optimizer.broken = handle.steps, True
                with pytest.raises(KeyError):
                    optimizer.step()
                optimizer.broken = False
                optimizer.zero_grad()
                assert handle.steps == before + 1
            loop(optimizer, model, x, y, closure=closure, steps=2)
            assert handle.steps == (4 if make is torch.optim.SGD else 5)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])


def test_a_step_may_take_something_else_than_a_closure():
    class Told(torch.optim.SGD):
        def step(self, scale=1.0):
            return super().step() or scale

    model, posterior, _, _ = start()
    with torch.no_grad():
        model[0].weight += 0.1
    optimizer = Told(model.parameters(), lr=0.1)
    expected = model[0].weight - 0.1 * holdfast.penalty_gradient(model, posterior)["0.weight"] / N
    with holdfast.hold(optimizer, model, posterior, num_data=N):
        assert optimizer.step(3.0) == 3.0
    torch.testing.assert_close(model[0].weight, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_climbs_is_held_too(closure):
    ends = []
    for held in (True, False):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=held)
        handle = holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH) if held else None

        def backward(optimizer=optimizer, model=model, x=x, y=y, held=held, posterior=posterior):
            optimizer.zero_grad()
            loss = holdfast.categorical.nll(model(x), y).mean()
            objective = -loss if held else loss + STRENGTH * holdfast.penalty(model, posterior) / N
            objective.backward()
            return objective

        for _ in range(5):
            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
        if handle is not None:
            assert handle.penalty > 0
            handle.remove()
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


def test_several_posteriors_add_up():
    model, posterior, x, y = start()
    toward_zero = holdfast.prior(model, precision=2.0, mean=0.0)
    with torch.no_grad():
        model[0].weight += 0.1
    both = holdfast.penalty(model, posterior) + holdfast.penalty(model, toward_zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.hold(optimizer, model, [posterior, toward_zero], num_data=N, proximal=False) as handle:
        assert handle.penalty == pytest.approx(both.item())
        loop(optimizer, model, x, y)


def test_a_term_that_holds_nothing_may_stand_beside_one_that_does():
    model, posterior, x, y = start()
    old = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 3, (9,))
    nothing = 0 * holdfast.diagonal_fisher(model, [old], holdfast.categorical)
    empty = holdfast.consolidate(holdfast.prior(model), model, nothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.hold(optimizer, model, [empty, holdfast.prior(model), posterior], num_data=N) as handle:
        loop(optimizer, model, x, y)
        assert handle.penalty == pytest.approx(holdfast.penalty(model, posterior).item())


def test_a_parameter_the_data_does_not_touch_is_pulled_too():
    model, posterior, _, _ = start()
    with torch.no_grad():
        model[0].weight += 0.1
    expected = model[0].weight - 0.1 * holdfast.penalty_gradient(model, posterior)["0.weight"] / N
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.hold(optimizer, model, posterior, num_data=N, proximal=False):
        optimizer.step()  # no backward at all
    torch.testing.assert_close(model[0].weight, expected, rtol=0, atol=1e-15)


def test_sparse_gradients_are_held():
    table = nn.Embedding(6, 2, sparse=True).double()
    posterior = holdfast.prior(table, precision=4.0)
    with torch.no_grad():
        table.weight += 1
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with holdfast.hold(optimizer, table, posterior, num_data=8, proximal=False):
        (table(torch.tensor([1, 1])) * 0).sum().backward()
        optimizer.step()
    torch.testing.assert_close(table.weight, posterior.mean["weight"] + 1 - 0.1 * 4 / 8, rtol=0, atol=1e-12)


def test_a_posterior_over_less_than_the_model_leaves_the_rest_free():
    model, posterior, x, y = start()
    grown = nn.ModuleDict({str(i): layer for i, layer in enumerate(model)} | {"extra": nn.Linear(3, 3).double()})
    optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
    with holdfast.hold(optimizer, grown, posterior, num_data=N) as handle:
        holdfast.categorical.nll(grown["extra"](model(x)), y).mean().backward()
        free = grown["extra"].weight - 0.1 * grown["extra"].weight.grad
        optimizer.step()
    torch.testing.assert_close(grown["extra"].weight, free)
    assert handle.metrics()["holdfast/held_parameters"] == sum(v.numel() for v in posterior.mean.values())


def test_wrapped_models_and_optimizers_are_held():
    class Accelerated(torch.optim.Optimizer):
        """As a trainer's wrapper: an Optimizer without hooks of its own."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self, closure=None):
            return self.optimizer.step(closure)

        def zero_grad(self, set_to_none=True):
            self.optimizer.zero_grad(set_to_none)

    ends = []
    for wrap in (False, True):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = Accelerated(optimizer) if wrap else optimizer
        seen = DataParallel(model) if wrap else model
        with holdfast.hold(outer, seen, posterior, num_data=N, strength=STRENGTH):
            loop(outer, model, x, y)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])


class TestTheHandle:
    def test_letting_go_ends_the_pull(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = holdfast.hold(optimizer, model, posterior, num_data=N, strength=100.0)
        loop(optimizer, model, x, y, steps=2)
        handle.remove()
        handle.remove()  # twice is harmless
        twin = copy.deepcopy(model)
        loop(optimizer, model, x, y, steps=1)
        loop(torch.optim.SGD(twin.parameters(), lr=0.1), twin, x, y, steps=1)
        assert torch.equal(weights(model), weights(twin))
        assert handle.steps == 2

    def test_its_numbers(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.hold(optimizer, model, posterior, num_data=N, strength=STRENGTH) as handle:
            loop(optimizer, model, x, y, steps=3)
        value = holdfast.penalty(model, posterior).item()
        assert handle.penalty == pytest.approx(value)
        assert handle.metrics() == pytest.approx({
            "holdfast/penalty": value, "holdfast/loss": STRENGTH * value / N, "holdfast/rise": value / 40,
            "holdfast/strength": STRENGTH, "holdfast/steps": 3.0, "holdfast/held_parameters": 79.0,
        })  # fmt: skip

    def test_the_strength_can_change_while_training(self):
        model, posterior, _, _ = start()
        with torch.no_grad():
            model[0].weight += 0.1
        pull = holdfast.penalty_gradient(model, posterior)["0.weight"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.hold(optimizer, model, posterior, num_data=N, proximal=False) as handle:
            handle.strength = 3.0
            before = model[0].weight.detach().clone()
            optimizer.step()
            torch.testing.assert_close(model[0].weight, before - 0.1 * 3 * pull / N)
            with pytest.raises(holdfast.ArgumentError, match="finite number ≥ 0"):
                handle.strength = -1.0

    def test_a_flat_posterior_holds_nothing_and_says_so(self):
        """The first task of the shortest program."""
        ends = []
        for held in (True, False):
            model, _, x, y = start()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            if held:
                with holdfast.hold(optimizer, model, holdfast.prior(model), num_data=N) as handle:
                    loop(optimizer, model, x, y)
                assert handle.penalty == 0
                assert handle.metrics()["holdfast/held_parameters"] == 0
            else:
                loop(optimizer, model, x, y)
            ends.append(weights(model))
        assert torch.equal(ends[0], ends[1])

    def test_an_error_in_the_loop_is_the_one_seen_and_the_optimizer_is_free_again(self):
        model, posterior, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(KeyError), holdfast.hold(optimizer, model, posterior, num_data=N):
            raise KeyError
        holdfast.hold(optimizer, model, posterior, num_data=N)


def with_a_new_first_layer(model):
    model[0] = nn.Linear(5, 6).double()
    return model


class TestTheGuard:
    def test_no_step_at_all_is_an_error(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stray = copy.deepcopy(optimizer)
        with (
            pytest.raises(holdfast.InertError, match="never made a step"),
            holdfast.hold(optimizer, model, posterior, num_data=N),
        ):
            loop(stray, model, x, y)  # a copy has no hooks

    def test_one_of_two_optimizers_that_never_steps_is_an_error(self):
        model, posterior, x, y = start()
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
        with (
            pytest.raises(holdfast.InertError, match="SGD never made a step"),
            holdfast.hold([first, second], model, posterior, num_data=N),
        ):
            loop(first, model, x, y)

    def test_unless_what_it_holds_is_frozen(self):
        model, posterior, x, y = start()
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
        model[:2].requires_grad_(False)
        with holdfast.hold([first, second], model, posterior, num_data=N):
            loop(second, model, x, y)

    def test_a_hold_that_nobody_keeps_goes_with_its_model(self):
        def held():
            model, posterior, x, y = start()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            holdfast.hold(optimizer, model, posterior, num_data=N)
            loop(optimizer, model, x, y)
            return weakref.ref(model)

        gone = held()
        gc.collect()
        assert gone() is None

    def test_what_was_held_is_freed_at_once_when_it_is_let_go(self):
        """Memories are large: they must not wait for the garbage collector, nor steps make work for it."""

        def held():
            model, posterior, x, y = start()
            optimizer = torch.optim.Adam(model.parameters())
            with holdfast.hold(optimizer, model, posterior, num_data=N) as handle:
                loop(optimizer, model, x, y)
            return [weakref.ref(each) for each in (model, posterior, optimizer, handle)]

        held()  # what is imported at the first one leaves its frames to the collector
        gc.collect()
        gc.disable()
        try:
            assert [each() for each in held()] == [None] * 4
        finally:
            gc.enable()

    def test_no_parameter_in_common_is_an_error(self):
        _, posterior, _, _ = start()
        other = nn.Linear(2, 2)
        with pytest.raises(holdfast.InertError, match="no parameter of the memory is in this model"):
            holdfast.hold(torch.optim.SGD(other.parameters(), lr=0.1), other, posterior, num_data=N)

    def test_a_held_parameter_in_no_optimizer_is_an_error(self):
        model, posterior, _, _ = start()
        with pytest.raises(holdfast.InertError, match=r"`0.weight` is held.*2 such.*as a list"):
            holdfast.hold(torch.optim.SGD(model[2:].parameters(), lr=0.1), model, posterior, num_data=N)
        foreign = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
        with pytest.raises(holdfast.InertError, match="none of the model's"):
            holdfast.hold(foreign, model, posterior, num_data=N)

    def test_frozen_parameters_need_no_optimizer_unless_all_are(self):
        model, posterior, x, y = start()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
        with holdfast.hold(optimizer, model, posterior, num_data=N):
            loop(optimizer, model, x, y)
        model.requires_grad_(False)
        with pytest.raises(holdfast.InertError, match="every held parameter is frozen"):
            holdfast.hold(optimizer, model, posterior, num_data=N)

    def test_a_parameter_replaced_after_the_hold_is_an_error_at_the_step(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            pytest.raises(holdfast.InertError, match=r"`0.weight` is held"),
            holdfast.hold(optimizer, model, posterior, num_data=N),
        ):
            loop(optimizer, with_a_new_first_layer(model), x, y)

    @pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.0)])
    def test_an_optimizer_that_moves_nothing_is_an_error(self, rates):
        class Deaf(torch.optim.SGD):
            """Made in a way of its own, so that it is not tried beforehand."""

            def __init__(self, params, *, needed):
                super().__init__(params, lr=needed)

            def step(self, closure=None):
                pass

        model, posterior, x, y = start()
        with torch.no_grad():
            model[0].weight += 0.1
        groups = zip((model[0].parameters(), model[1:].parameters()), rates, strict=True)
        deaf = Deaf([{"params": list(params), "lr": rate} for params, rate in groups], needed=0.1)
        with (
            pytest.raises(holdfast.InertError, match="100 steps of Deaf left"),
            holdfast.hold(deaf, model, posterior, num_data=N),
        ):
            loop(deaf, model, x, y, steps=101)

    @pytest.mark.parametrize("named", [True, False])
    def test_an_optimizer_that_does_not_read_the_gradients_is_an_error(self, named):
        class Elsewhere(torch.optim.Optimizer):
            """Moves the parameters by gradients kept in another place, as some large-model trainers do."""

            def __init__(self, params, lr=0.1):
                super().__init__(params, {"lr": lr})

            @torch.no_grad()
            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    parameter -= self.defaults["lr"] * getattr(parameter, "main_grad", torch.ones_like(parameter))

        class Another(Elsewhere):
            def __init__(self, params, **options):
                super().__init__(params, options["lr"])

        model, posterior, _, _ = start()
        optimizer = (Elsewhere if named else Another)(model.parameters(), lr=0.1)
        with pytest.raises(holdfast.InertError, match=r"takes the same step whatever `\.grad` says"):
            holdfast.hold(optimizer, model, posterior, num_data=N)

    def test_an_optimizer_of_ones_own_that_does_is_not(self):
        class Plain(torch.optim.Optimizer):
            def __init__(self, params, lr=0.1):
                super().__init__(params, {"lr": lr})

            @torch.no_grad()
            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    parameter -= self.defaults["lr"] * parameter.grad.sign()

        class Unusual(Plain):
            """Cannot be made from its defaults, so nothing is tried on it."""

            def __init__(self, params, needed):
                super().__init__(params)

        for make in (Plain, lambda params: Unusual(params, needed=1)):
            model, posterior, x, y = start()
            optimizer = make(model.parameters())
            with holdfast.hold(optimizer, model, posterior, num_data=N):
                loop(optimizer, model, x, y)

    def test_one_that_gathers_gradients_or_steps_tinily_is_not(self):
        class Gathers(torch.optim.SGD):
            """Steps every eighth time."""

            def __init__(self, params, lr=0.1):
                super().__init__(params, lr=lr)
                self.calls = 0

            def step(self, closure=None):
                self.calls += 1
                return super().step(closure) if self.calls % 8 == 0 else None

        for make in (Gathers, lambda params: Gathers(params, lr=1e-12)):
            model, posterior, x, y = start()
            optimizer = make(model.parameters())
            with holdfast.hold(optimizer, model, posterior, num_data=N):
                loop(optimizer, model, x, y, steps=20)

    @pytest.mark.parametrize(
        "reason", ["an overflow", "a rate of zero", "no pull", "rounding", "another way", "one moves", "a look back"]
    )
    def test_one_that_may_leave_them_or_that_moves_them_in_another_way_is_not(self, reason):
        """At the hundredth such step of a training that is in order it would be an error."""

        class Own(torch.optim.SGD):
            def __init__(self, params, *, needed):
                super().__init__(params, lr=needed)

            @torch.no_grad()
            def step(self, closure=None):
                if reason == "one moves":
                    self.param_groups[0]["params"][1].sub_(1e-3)
                if reason == "a look back":  # at the loss where it has come to
                    for length in (1e-3, 0.0):
                        with torch.enable_grad():
                            closure()
                        for parameter in self.param_groups[0]["params"] if length else ():
                            parameter -= length * parameter.grad
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    if reason == "rounding":
                        parameter -= 1e-30 * parameter.grad
                    if reason == "another way":  # of which no version tells
                        parameter.data.sub_(1e-3 * parameter.grad)

        model, posterior, x, y = start()
        optimizer = Own(model.parameters(), needed=0.0 if reason == "a rate of zero" else 0.1)
        if reason == "an overflow":
            optimizer.found_inf = torch.ones(())  # as a gradient scaler tells one that unscales by itself
        if reason != "no pull":
            with torch.no_grad():
                model[0].weight += 0.1
        with holdfast.hold(optimizer, model, posterior, num_data=N):
            loop(optimizer, model, x, y, closure=reason == "a look back", steps=101)

    def test_trying_an_optimizer_draws_no_random_numbers(self):
        class Noisy(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    parameter += 0.01 * torch.randn_like(parameter)

        model, posterior, _, _ = start()
        optimizer = Noisy(model.parameters(), lr=0.1)
        state = torch.get_rng_state()
        holdfast.hold(optimizer, model, posterior, num_data=N)
        assert torch.equal(torch.get_rng_state(), state)

    def test_all_may_be_frozen_for_a_while(self):
        """As when a new head is trained first."""
        model, posterior, x, y = start()
        grown = nn.Sequential(*model, nn.Linear(3, 3).double())
        optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
        with holdfast.hold(optimizer, grown, posterior, num_data=N):
            grown[:5].requires_grad_(False)
            loop(optimizer, grown, x, y, steps=2)
            grown[:5].requires_grad_(True)
            loop(optimizer, grown, x, y, steps=2)

    def test_an_optimizer_that_has_converged_is_not(self):
        """LBFGS without a line search evaluates its closure many times in a step, and may end where it began."""
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        posterior = holdfast.prior(model, precision=1.0, mean=0.0)
        x, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(0, 2, (30,))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_change=1e-14)
        with holdfast.hold(optimizer, model, posterior, num_data=30):
            loop(optimizer, model, x, y, closure=True, steps=6)
        again = torch.optim.LBFGS(model.parameters(), tolerance_grad=1.0)
        with holdfast.hold(again, model, posterior, num_data=30):
            loop(again, model, x, y, closure=True, steps=6)

    def test_a_warm_up_from_zero_is_not(self):
        model, posterior, x, y = start()
        with torch.no_grad():
            model[0].weight += 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with holdfast.hold(optimizer, model, posterior, num_data=N):
            loop(optimizer, model, x, y)

    def test_weight_decay_on_held_parameters_is_warned_of(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
        with pytest.warns(holdfast.HoldfastWarning, match="weight decay 0.01 acts on 6 held parameters"):
            handle = holdfast.hold(optimizer, model, posterior, num_data=N)
        loop(optimizer, model, x, y)
        handle.remove()
        holdfast.hold(optimizer, model, holdfast.prior(model), num_data=N).remove()  # nothing held, nothing to warn of
        fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical, only="0.*")
        part = holdfast.consolidate(holdfast.prior(model), model, fisher)
        groups = [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[1:].parameters()}]
        holdfast.hold(torch.optim.AdamW(groups, weight_decay=0.01), model, part, num_data=N).detach()  # of what is free

    def test_what_would_be_pulled_twice_is_refused(self):
        model, posterior, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(holdfast.MismatchError, match="share evidence"):
            holdfast.hold(optimizer, model, [posterior, posterior], num_data=N)
        second = torch.optim.SGD(model[:1].parameters(), lr=0.1)
        with pytest.raises(holdfast.ArgumentError, match=r"`0.weight` is in two of the optimizers"):
            holdfast.hold([optimizer, second], model, posterior, num_data=N)

    def test_optimizers_that_cannot_be_held_are_refused(self):
        table = nn.Embedding(4, 2, sparse=True)
        with pytest.raises(holdfast.ArgumentError, match="SparseAdam"):
            holdfast.hold(torch.optim.SparseAdam(table.parameters()), table, holdfast.prior(table, 1.0), num_data=1)
        model, posterior, x, y = start()
        groups = [{"params": model[:1].parameters(), "maximize": True}, {"params": model[1:].parameters()}]
        both_ways = torch.optim.SGD(groups, lr=0.1)
        with (
            pytest.raises(holdfast.ArgumentError, match="maximize and others minimize"),
            holdfast.hold(both_ways, model, posterior, num_data=N),
        ):
            loop(both_ways, model, x, y)

    def test_a_frozen_parameter_in_the_optimizer_is_left_alone(self):
        model, posterior, x, y = start()
        with torch.no_grad():
            model[0].weight += 0.1
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.hold(optimizer, model, posterior, num_data=N):
            loop(optimizer, model, x, y)
        assert model[0].weight.grad is None
        assert torch.equal(model[0].weight, before)

    def test_a_second_hold_is_refused(self):
        model, posterior, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        holdfast.hold(optimizer, model, posterior, num_data=N)
        with pytest.raises(holdfast.ArgumentError, match="already held"):
            holdfast.hold(optimizer, model, posterior, num_data=N)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_data": 0}, r"num_data.*> 0, got 0"),
            ({"num_data": -5}, r"num_data.*> 0, got -5"),
            ({"num_data": float("nan")}, "num_data"),
            ({"strength": -0.5}, r"strength must be a finite number ≥ 0, got -0\.5"),
            ({"strength": float("inf")}, "strength"),
            ({"strength": "1"}, "strength must be a finite number ≥ 0, got '1'"),
            ({"num_data": [1, 2]}, "num_data.*got list"),
        ],
    )
    def test_numbers_out_of_range_are_refused(self, change, message):
        model, posterior, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(holdfast.ArgumentError, match=message):
            holdfast.hold(optimizer, model, posterior, **{"num_data": N, **change})

    def test_a_hold_that_was_removed_cannot_be_entered(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.hold(optimizer, model, posterior, num_data=N) as handle:
            loop(optimizer, model, x, y)
        with pytest.raises(holdfast.InertError, match=r"removed.*hold again"):
            handle.__enter__()

    def test_things_of_the_wrong_kind_are_refused(self):
        model, posterior, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(holdfast.ArgumentError, match=r"a Posterior, a Memory or a term.*consolidate\(prior"):
            holdfast.hold(optimizer, model, posterior.precision, num_data=N)
        with pytest.raises(holdfast.ArgumentError, match=r"got str.*holdfast\.load"):
            holdfast.hold(optimizer, model, "memory.safetensors", num_data=N)
        with pytest.raises(holdfast.ArgumentError, match="the optimizer, then the model; got SGD"):
            holdfast.hold(model, optimizer, posterior, num_data=N)
        with pytest.raises(holdfast.ArgumentError, match=r"torch\.optim\.Optimizer"):
            holdfast.hold("adam", model, posterior, num_data=N)
        with pytest.raises(holdfast.ArgumentError, match="at least one"):
            holdfast.hold([], model, posterior, num_data=N)

    def test_tokens_and_examples_are_not_mixed(self):
        model, posterior, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            holdfast.MismatchError, match="counts in units of 'example', and num_data=24 is said to count in 'token'"
        ):
            holdfast.hold(optimizer, model, posterior, num_data=N, unit="token")


class TestStatistics:
    """BatchNorm's running statistics, which no parameter holds."""

    def made(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        data = [(torch.randn(30, 4).double(), torch.arange(30) % 3)]
        posterior = holdfast.consolidate(
            holdfast.prior(model), model, holdfast.diagonal_fisher(model, data, holdfast.categorical)
        )
        return model, posterior, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, model, optimizer):
        model.train()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(5 + torch.randn(8, 4).double()), torch.arange(8) % 3)
        loss.backward()
        optimizer.step()

    def test_drift_is_told_and_frozen_statistics_stay_and_are_used(self):
        model, posterior, optimizer = self.made()
        with pytest.warns(holdfast.HoldfastWarning, match=r"`1` are not parameters.*freeze_statistics=True"):
            holdfast.hold(optimizer, model, posterior, num_data=30).detach()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with holdfast.hold(optimizer, model, posterior, num_data=30, freeze_statistics=True):
            self.step(model, optimizer)
            assert model[1].training  # the loop's own mode is left alone
            x = torch.randn(8, 4).double()
            torch.testing.assert_close(model.train()(x), model.eval()(x))
            self.step(model, optimizer)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name
        with holdfast.hold(optimizer, model, posterior, num_data=30, freeze_statistics=False):
            self.step(model, optimizer)
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])

    def test_an_instance_norm_that_keeps_statistics_is_told_of_and_frozen_too(self):
        model, posterior, optimizer = self.made()
        norm = nn.InstanceNorm1d(2, track_running_stats=True).double()
        model[1] = nn.Sequential(nn.Unflatten(1, (2, -1)), norm, nn.Flatten(), model[1])
        posterior = posterior.renamed({"1.weight": "1.3.weight", "1.bias": "1.3.bias"})
        with pytest.warns(holdfast.HoldfastWarning, match=r"`1\.1`, `1\.3` are not parameters"):
            holdfast.hold(optimizer, model, posterior, num_data=30).detach()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with holdfast.hold(optimizer, model, posterior, num_data=30, freeze_statistics=True):
            self.step(model, optimizer)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name

    def test_a_model_that_was_compiled_before_keeps_its_statistics_too(self):
        model, posterior, optimizer = self.made()
        compiled = torch.compile(model, backend="eager")
        self.step(compiled, optimizer)
        before = model[1].running_mean.clone()
        with holdfast.hold(optimizer, compiled, posterior, num_data=30, freeze_statistics=True):
            self.step(compiled, optimizer)
        assert torch.equal(model[1].running_mean, before)
        self.step(compiled, optimizer)
        assert not torch.equal(model[1].running_mean, before)

    def test_statistics_that_move_all_the_same_are_an_error(self):
        model, posterior, optimizer = self.made()
        handle = holdfast.hold(optimizer, model, posterior, num_data=30, freeze_statistics=True)
        self.step(model, optimizer)
        model[1].running_mean += 1
        with pytest.raises(holdfast.InertError, match="statistics of `1` moved"):
            handle.remove()
        handle.detach()

    def test_a_pass_that_fails_leaves_the_mode_as_it_was(self):
        model, posterior, optimizer = self.made()
        with holdfast.hold(optimizer, model, posterior, num_data=30, freeze_statistics=True):
            model.train()
            with pytest.raises(RuntimeError):
                model[1](torch.randn(8, 3).double())
            assert model[1].training
            self.step(model, optimizer)

    def test_nothing_to_freeze_is_an_error(self):
        model = nn.Linear(2, 2)
        with pytest.raises(holdfast.ArgumentError, match="has no BatchNorm"):
            holdfast.hold(
                torch.optim.SGD(model.parameters(), lr=0.1), model, holdfast.prior(model, 1.0), num_data=3,
                freeze_statistics=True,
            )  # fmt: skip


def test_a_hold_goes_on_from_its_state_and_under_no_other_memory():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    known = holdfast.prior(model, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.hold(optimizer, model, known, num_data=10, strength=3.0) as first:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = first.state_dict()
    second = holdfast.hold(optimizer, model, known, num_data=10)
    second.load_state_dict(state)
    assert second.strength == 3.0
    second.detach()
    other = holdfast.hold(optimizer, model, holdfast.prior(model, 1.0), num_data=10)
    with pytest.raises(holdfast.MismatchError, match=f"memory {known.id}, and this one holds to"):
        other.load_state_dict(state)
    other.detach()
