"""What a hold is given and cannot work with, or is taken from it while it works: handled, or said with what to do."""

import copy
import gc
import io
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import holdfast
from cases import relu_mlp
from oracles import flat

N = 24  # the new data
STRENGTH = 30.0


def start():
    """A model some way from what it knows, its posterior, and new data."""
    torch.manual_seed(0)
    model = relu_mlp().double()
    old = (torch.randn(40, 5).double(), torch.randint(0, 3, (40,)))
    fisher = holdfast.diagonal_fisher(model, [old], holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, posterior, torch.randn(N, 5).double() + 1, torch.randint(0, 3, (N,))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hold(optimizer, model, posterior, **options):
    usual = {"num_data": N, "strength": STRENGTH, "proximal": False}
    return holdfast.hold(optimizer, model, posterior, **{**usual, **options})


def loop(optimizer, model, x, y, steps=3, term=None):
    """Train. With `term`, the penalty is part of the loss."""
    x = x.to(next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = holdfast.categorical.nll(model(x), y).mean()
        (loss if term is None else loss + STRENGTH * holdfast.penalty(model, term) / N).backward()
        optimizer.step()


def weights(model):
    return flat({name: p.detach() for name, p in model.named_parameters()})


def require_same(make, train=lambda model, optimizer, go: go(), atol=1e-12):
    """Training, in which `go()` is a few steps, ends at the same weights held and with the penalty in the loss."""
    ends = []
    for held in (True, False):
        model, posterior, x, y = start()
        optimizer = make(model)
        handle = hold(optimizer, model, posterior) if held else None
        term = None if held else posterior

        def go(optimizer=optimizer, model=model, x=x, y=y, term=term):
            loop(optimizer, model, x, y, term=term)

        train(model, optimizer, go)
        if handle is not None:
            handle.remove()
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=atol)


class TestGradientsElsewhere:
    """Optimizers that do not read `.grad`: see test_hold.TestTheGuard for those that move nothing."""

    def test_those_that_take_them_from_main_grad_are_refused(self):
        """As large-model trainers do, which add up gradients there; made in a way of its own beside."""

        class Main(torch.optim.SGD):
            def __init__(self, params, lr=0.1):
                super().__init__(params, lr=lr)

            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    parameter.grad = parameter.main_grad
                return super().step(closure)

        model, posterior, _, _ = start()
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        with pytest.raises(holdfast.InertError, match=r"Main takes the same step whatever `\.grad` says.*to the loss"):
            hold(Main(model.parameters()), model, posterior)

    def test_one_that_may_read_either_is_judged_by_what_the_parameters_have(self):
        class Either(torch.optim.SGD):
            def __init__(self, params, lr=0.1):
                super().__init__(params, lr=lr)

            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    parameter.grad = getattr(parameter, "main_grad", parameter.grad)
                return super().step(closure)

        require_same(lambda model: Either(model.parameters()))

    def test_settings_that_it_keeps_among_its_defaults_do_not_hide_it(self):
        class Counting(Optimizer):
            def __init__(self, params, lr=0.1):
                super().__init__(params, {"lr": lr, "count": 0})

            @torch.no_grad()
            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    parameter -= self.defaults["lr"]

        model, posterior, _, _ = start()
        with pytest.raises(holdfast.InertError, match="Counting takes the same step"):
            hold(Counting(model.parameters()), model, posterior)


class TestCopies:
    """Copies of an optimizer lose its hooks, and optimizers that are made since have none."""

    def test_a_deep_copy_does_not_step_while_the_first_is_held(self):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        with hold(optimizer, model, posterior):
            loop(optimizer, model, x, y)
            twin, copied = copy.deepcopy((model, optimizer))
            again = copy.deepcopy(copied)
            before = weights(twin)
            for each in (copied, again):
                with pytest.raises(holdfast.InertError, match=r"SGD is a copy of one that is held.*Hold the copy too"):
                    loop(each, twin, x, y)
            assert torch.equal(weights(twin), before)
            loop(optimizer, model, x, y)
        loop(copied, twin, x, y)  # nothing is held any more
        assert not torch.equal(weights(twin), before)
        assert "__deepcopy__" not in vars(optimizer)

    def test_another_that_has_the_parameters_and_does_not_move_them_is_no_matter(self):
        model, posterior, x, y = start()
        optimizer, other = sgd(model), torch.optim.Adam(model.parameters(), lr=0.0)
        with hold(optimizer, model, posterior) as handle:
            loop(other, model, x, y)
            loop(optimizer, model, x, y)
        assert handle.steps

    def test_a_copy_that_is_held_too_steps_as_the_first_does(self):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        with hold(optimizer, model, posterior):
            twin, copied = copy.deepcopy((model, optimizer))
            with hold(copied, twin, posterior) as handle:
                loop(copied, twin, x, y)
            assert handle.steps == 3
            loop(optimizer, model, x, y)
            with pytest.raises(holdfast.InertError, match="a copy of one that is held"):
                loop(copied, twin, x, y)
        assert torch.equal(weights(twin), weights(model))

    def test_a_copy_that_is_only_kept_is_in_nobodys_way(self):
        model, posterior, x, y = start()
        optimizer = torch.optim.Adam(model.parameters())
        with hold(optimizer, model, posterior) as handle:
            loop(optimizer, model, x, y)
            kept = copy.deepcopy(optimizer)
            loop(optimizer, model, x, y)
            optimizer.load_state_dict(kept.state_dict())
            loop(optimizer, model, x, y)
        assert handle.steps == 9

    @pytest.mark.parametrize("other", [copy.copy, lambda optimizer: torch.optim.SGD(optimizer.param_groups, lr=0.1)])
    @pytest.mark.parametrize("last", [True, False])
    def test_another_optimizer_for_the_same_parameters_is_told_of(self, other, last):
        """A shallow copy, or one that was made since: at the next step that is held, or at the end."""
        model, posterior, x, y = start()
        optimizer = sgd(model)
        handle = hold(optimizer, model, posterior)
        loop(optimizer, model, x, y)
        loop(other(optimizer), model, x, y)
        with pytest.raises(holdfast.InertError, match=r"SGD made a step on `0\.weight`.*Give hold the optimizer that"):
            handle.remove() if last else optimizer.step()
        handle.detach()
        loop(other(optimizer), model, x, y)  # it is let go

    def test_a_pickled_one_comes_back_without_the_hold_and_can_be_held(self):
        """Nothing of the hold is in the file, so that it opens without this library."""
        model, posterior, x, y = start()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        with hold(optimizer, model, posterior):
            loop(optimizer, model, x, y)
            stored = pickle.dumps(optimizer)
            assert b"holdfast" not in stored
            file = io.BytesIO()
            torch.save((model, optimizer), file)
            loop(optimizer, model, x, y)
        file.seek(0)
        twin, loaded = torch.load(file, weights_only=False)
        with hold(loaded, twin, posterior) as handle:
            loop(loaded, twin, x, y)
        assert handle.steps == 3
        assert torch.equal(weights(twin), weights(model))

    def test_a_hold_that_nobody_keeps_is_in_nobodys_way(self):
        """Task after task, with a new optimizer for each."""
        model, posterior, x, y = start()
        gone = []
        for _ in range(3):
            optimizer = sgd(model)
            hold(optimizer, model, posterior)
            loop(optimizer, model, x, y)
            gone.append(weakref.ref(optimizer))
        free = torch.optim.Adam(model.parameters())
        loop(free, model, x, y)
        del optimizer
        gc.collect()
        assert [each() for each in gone] == [None, None, None]

    def test_optimizers_of_other_parameters_are_none_of_its_business(self):
        model, posterior, x, y = start()
        other = nn.Linear(5, 3).double()
        optimizer, its = sgd(model), torch.optim.Adam(other.parameters())
        with hold(optimizer, model, posterior) as handle:
            for _ in range(3):
                loop(optimizer, model, x, y, steps=1)
                loop(its, other, x, y, steps=1)
        assert handle.steps == 3


class Around(Optimizer):
    """One that steps by way of another, on the same parameters: as sharpness-aware ones, and those that look ahead."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.base_optimizer = inner
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class TestWrappers:
    @pytest.mark.parametrize("held", ["outer", "inner"])
    def test_a_step_around_another_is_one_step(self, held):
        ends = []
        for wrapped in (True, False):
            model, posterior, x, y = start()
            inner = sgd(model)
            outer = Around(inner) if wrapped else inner
            with hold(outer if held == "outer" else inner, model, posterior) as handle:
                loop(outer, model, x, y)
            assert handle.steps == 3
            ends.append(weights(model))
        assert torch.equal(*ends)

    def test_two_holds_one_around_the_other_are_refused(self):
        model, posterior, x, y = start()
        inner = sgd(model)
        outer = Around(inner)
        hold(inner, model, posterior)
        hold(outer, model, posterior)
        with pytest.raises(holdfast.ArgumentError, match=r"SGD is held, and steps inside another.*Hold one of the two"):
            loop(outer, model, x, y)

    def test_two_holds_by_way_of_a_trainers_wrapper_are_refused(self):
        class Accelerated(Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer

        model, posterior, _, _ = start()
        optimizer = sgd(model)
        hold(optimizer, model, posterior)
        with pytest.raises(holdfast.ArgumentError, match="already held"):
            hold(Accelerated(optimizer), model, posterior)

    def test_one_without_hooks_names_what_to_hold(self):
        class Private(Optimizer):
            """Never calls Optimizer.__init__, as Opacus's does not."""

            def __init__(self, inner):
                self.original_optimizer = inner
                self.param_groups = inner.param_groups

        class Foreign:
            def __init__(self, inner):
                self.base = inner

        model, posterior, _, _ = start()
        with pytest.raises(holdfast.ArgumentError, match=r"Private has none.*give hold its `\.original_optimizer`"):
            hold(Private(sgd(model)), model, posterior)
        with pytest.raises(holdfast.ArgumentError, match=r"got Foreign.*give hold its `\.base`"):
            hold(Foreign(sgd(model)), model, posterior)


class Flat(Optimizer):
    """Steps on one flat copy of all the weights, as DeepSpeed's do, with an optimizer of its own inside."""

    def __init__(self, params):
        self.params = list(params)
        self.master = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in self.params]))
        super().__init__([self.master], {})
        self.optimizer = torch.optim.SGD([self.master], lr=0.1)

    def step(self, closure=None):
        self.master.grad = torch.cat([parameter.grad.flatten() for parameter in self.params])
        self.optimizer.step()
        with torch.no_grad():
            for parameter, new in zip(self.params, self.master.split([p.numel() for p in self.params]), strict=True):
                parameter.copy_(new.view_as(parameter))


class TestFlatCopies:
    def test_they_are_refused(self):
        model, posterior, _, _ = start()
        master = nn.Parameter(weights(model))
        for optimizer in (torch.optim.SGD([master], lr=0.1), Flat(model.parameters())):
            with pytest.raises(holdfast.InertError, match=r"none of the model's.*flat copies.*to the loss"):
                hold(optimizer, model, posterior)

    def test_one_that_goes_over_to_them_is_an_error_at_the_step(self):
        """As an engine does that takes an optimizer, and puts its own buffers into the groups."""
        model, posterior, x, y = start()
        optimizer = sgd(model)
        hold(optimizer, model, posterior)
        optimizer.param_groups[0]["params"] = [nn.Parameter(weights(model))]
        with pytest.raises(holdfast.InertError, match="flat copies"):
            loop(optimizer, model, x, y)


@pytest.fixture
def conversion():
    """How `model.to` and its like put parameters into a model."""
    future = torch.__future__
    yield future
    future.set_overwrite_module_params_on_conversion(False)
    future.set_swap_module_params_on_conversion(False)


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


class TestReplacedParameters:
    def test_one_parameter_set_anew_is_an_error_at_the_step(self):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        hold(optimizer, model, posterior)
        loop(optimizer, model, x, y)
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        with pytest.raises(holdfast.InertError, match=r"`2\.weight` is held.*1 such.*add_param_group"):
            loop(optimizer, model, x, y)

    def test_a_state_that_is_assigned_is_an_error_at_the_step(self):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        hold(optimizer, model, posterior)
        loop(optimizer, model, x, y)
        assign(model)
        with pytest.raises(holdfast.InertError, match=r"before the parameters were replaced\? Make it anew, and hold"):
            loop(optimizer, model, x, y)

    def test_a_new_optimizer_that_goes_on_after_it_is_told_of(self):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        handle = hold(optimizer, model, posterior)
        loop(optimizer, model, x, y)
        assign(model)
        loop(torch.optim.Adam(model.parameters()), model, x, y)
        with pytest.raises(holdfast.InertError, match=r"Adam made a step on `0\.weight`, and the hold is on another"):
            handle.remove()

    def test_those_that_the_optimizer_gets_too_are_held(self):
        def train(model, optimizer, go):
            go()
            assign(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            go()

        require_same(sgd, train)

    def test_a_conversion_that_makes_new_ones_is_an_error_at_the_step(self, conversion):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        conversion.set_overwrite_module_params_on_conversion(True)
        hold(optimizer, model, posterior)
        model.float()
        with pytest.raises(holdfast.InertError, match="before the parameters were replaced"):
            loop(optimizer, model, x, y)

    @pytest.mark.parametrize("swapped", [True, False])
    def test_one_that_keeps_them_is_none(self, conversion, swapped):
        conversion.set_swap_module_params_on_conversion(swapped)

        def train(model, optimizer, go):
            go()
            model.float()
            go()

        require_same(sgd, train, atol=1e-6)  # the rounding of float32

    def test_a_model_that_got_other_names_is_an_error_at_the_step(self):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        hold(optimizer, model, posterior)
        loop(optimizer, model, x, y)
        nn.utils.parametrizations.weight_norm(model[0])
        with pytest.raises(holdfast.MismatchError, match=r"it has `0\.weight`, which the model lacks"):
            loop(optimizer, model, x, y)


class TestGroups:
    def test_a_group_without_parameters_changes_nothing(self):
        require_same(lambda model: torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], lr=0.1))

    def test_no_group_at_all_is_an_error_where_something_trains(self):
        model, posterior, _, _ = start()
        optimizer = sgd(model)
        handle = hold(optimizer, model, posterior)
        optimizer.param_groups.clear()
        model.requires_grad_(False)
        optimizer.step()
        assert handle.steps == 1
        model.requires_grad_(True)
        with pytest.raises(holdfast.InertError, match=r"`0\.weight` is held, but no optimizer"):
            optimizer.step()

    def test_a_layer_that_is_thawed_and_added_is_held_from_then_on(self):
        def make(model):
            model[0].requires_grad_(False)
            return torch.optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.5)

        def train(model, optimizer, go):
            go()
            before = model[0].weight.clone()
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
            go()
            assert not torch.equal(model[0].weight, before)

        require_same(make, train)

    def test_one_that_is_thawed_and_not_added_is_an_error_at_the_step(self):
        model, posterior, x, y = start()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.1)
        hold(optimizer, model, posterior)
        loop(optimizer, model, x, y)
        model[0].requires_grad_(True)
        with pytest.raises(holdfast.InertError, match=r"`0\.weight` is held.*2 such.*add_param_group"):
            loop(optimizer, model, x, y)

    def test_one_that_is_frozen_for_a_while_stays_where_it_is(self):
        def train(model, optimizer, go):
            for frozen in (False, True, False):
                optimizer.zero_grad()
                model[2].requires_grad_(not frozen)
                before = model[2].weight.clone()
                go()
                assert torch.equal(model[2].weight, before) == frozen

        require_same(lambda model: torch.optim.Adam(model.parameters(), lr=0.02), train)


class TestDevices:
    """Where there is one device, "meta" stands for another; test_cuda has models spread over two."""

    def test_held_parameters_without_values_are_refused(self):
        for part in (slice(None), slice(1)):
            model, posterior, _, _ = start()
            model[part].to("meta")
            with pytest.raises(holdfast.ArgumentError, match=r"`0\.weight`.* is on the meta device.*Load the weights"):
                hold(sgd(model), model, posterior)

    def test_others_on_another_device_change_nothing(self):
        ends = []
        for more in (False, True):
            model, posterior, x, y = start()
            parts = {str(i): layer for i, layer in enumerate(model)}
            grown = nn.ModuleDict(parts | ({"new": nn.Linear(3, 3, device="meta")} if more else {}))
            optimizer = sgd(grown)
            with hold(optimizer, grown, posterior) as handle:
                for _ in range(3):
                    optimizer.zero_grad()
                    holdfast.categorical.nll(model(x), y).mean().backward()
                    optimizer.step()
            assert handle.metrics()["holdfast/held_parameters"] == 79
            ends.append(weights(model))
        assert torch.equal(*ends)

    def test_a_default_device_is_not_where_the_pull_is(self):
        ends = []
        for default in ("cpu", "meta"):
            model, posterior, x, y = start()
            optimizer = sgd(model)
            with hold(optimizer, model, posterior):
                holdfast.categorical.nll(model(x), y).mean().backward()
                with torch.device(default):
                    optimizer.step()
            ends.append(weights(model))
        assert torch.equal(*ends)


class TestNotFinite:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_a_memory_that_is_not_is_refused(self, value):
        for place in ("mean", "entries"):
            model, posterior, _, _ = start()
            tensors = posterior.mean if place == "mean" else posterior.precision.entries
            tensors["2.weight"][0, 0] = value
            with pytest.raises(holdfast.ArgumentError, match=r"2\.weight` has values that are not finite"):
                hold(sgd(model), model, posterior)

    @pytest.mark.parametrize("value", [torch.nan, -torch.inf])
    def test_weights_that_are_not_are_refused(self, value):
        model, posterior, _, _ = start()
        with torch.no_grad():
            model[2].bias[1] = value
        with pytest.raises(holdfast.ArgumentError, match=r"`2\.bias` has values that are not finite.*restore_"):
            hold(sgd(model), model, posterior)
        holdfast.restore_(model, posterior)
        hold(sgd(model), model, posterior)

    @pytest.mark.parametrize("cause", ["a gradient", "the steps"])
    def test_weights_that_become_so_are_told_of_at_the_end(self, cause):
        model, posterior, x, y = start()
        optimizer = sgd(model)
        handle = hold(optimizer, model, posterior, strength=1e6 if cause == "the steps" else 1.0)
        loop(optimizer, model, x, y, steps=60 if cause == "the steps" else 1)
        if cause == "a gradient":
            model[2].weight.grad[0, 0] = torch.nan
            optimizer.step()
        with pytest.warns(holdfast.HoldfastWarning, match=r"is not finite any more.*smaller steps.*proximal=True"):
            handle.remove()
        assert math.isnan(handle.metrics()["holdfast/penalty"])

    def test_a_gradient_that_is_not_spoils_its_own_weight_alone(self):
        """As it would without a hold: the pull adds to it, and mixes nothing."""
        model, posterior, x, y = start()
        optimizer = sgd(model)
        handle = hold(optimizer, model, posterior)
        holdfast.categorical.nll(model(x), y).mean().backward()
        model[2].weight.grad[0, 0] = torch.nan
        optimizer.step()
        handle.detach()
        assert int(weights(model).isnan().sum()) == 1


def test_frozen_statistics_are_the_models_and_not_its_copys():
    """An average of the weights is a copy of the model, and gets statistics of its own at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer, data = sgd(model), [torch.randn(16, 4) + 3 for _ in range(4)]
    with holdfast.hold(optimizer, model, holdfast.prior(model, 1.0), num_data=64, freeze_statistics=True):
        average = torch.optim.swa_utils.AveragedModel(model)
        loaded = pickle.loads(pickle.dumps(model))
        model(data[0]).sum().backward()
        optimizer.step()
        average.update_parameters(model)
        torch.optim.swa_utils.update_bn(data, average)
        loaded.train()(data[0])
    assert torch.equal(model[1].running_mean, torch.zeros(6))
    assert not torch.equal(average.module[1].running_mean, torch.zeros(6))
    assert not torch.equal(loaded[1].running_mean, torch.zeros(6))
    assert model[1].training
    assert average.module[1].training
