"""The pull as a step of its own: the same end as in the gradients, by the equations, at any strength."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast import Dense, Diagonal, Posterior

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.0),
    "fused": lambda params: torch.optim.Adam(params, lr=0.05, fused=True),
}

# Of which one step tells as much as many.
OTHERS = {
    "dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.6),
    "large epsilon": lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1),
}


def line(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, 3, generator=generator, dtype=torch.double)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.double)


def made() -> tuple[nn.Linear, Posterior]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1, bias=False).double()
    mean = {"weight": torch.tensor([[0.5, 0.5, 0.5]], dtype=torch.double)}
    return model, Posterior(mean, Diagonal({"weight": torch.tensor([[1.0, 30.0, 200.0]], dtype=torch.double)}))


def trained(model, posterior, optimizer, steps: int, **options) -> None:
    x, y = line()
    with holdfast.hold(optimizer, model, posterior, num_data=50, proximal=True, **options):
        for step in range(steps):
            if step == steps // 2:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.02
            optimizer.zero_grad()
            (0.5 * (model(x) - y).square().mean()).backward()
            optimizer.step()


@pytest.mark.parametrize("strength", [1.0, 1e6])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_rests_at_the_maximum_of_the_posterior(name, strength):
    model, posterior = made()
    trained(model, posterior, OPTIMIZERS[name](model.parameters()), 3000, strength=strength)
    x, y = line()
    held = strength * posterior.precision.entries["weight"][0] / 50
    best = torch.linalg.solve(x.T @ x / 50 + held.diag(), x.T @ y / 50 + (held * 0.5).unsqueeze(1)).T
    torch.testing.assert_close(model.weight.detach(), best, atol=2e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:`weight` is not finite any more:holdfast.HoldfastWarning")
def test_where_the_gradient_diverges_it_does_not():
    ends = []
    for proximal in (False, True):
        model, posterior = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = line()
        handle = holdfast.hold(optimizer, model, posterior, num_data=50, strength=1e4, proximal=proximal)
        for _ in range(100):
            optimizer.zero_grad()
            (0.5 * (model(x) - y).square().mean()).backward()
            optimizer.step()
        handle.remove()
        ends.append(model.weight.detach())
    assert not bool(ends[0].isfinite().all())
    torch.testing.assert_close(ends[1], posterior.mean["weight"], atol=0.02, rtol=0)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_a_step_is_that_of_the_equation(name):
    """θ ← μ + (θ' − μ)/(1 + a s Λ/N), θ' and a from the optimizer alone."""
    free, _ = made()
    model, posterior = made()
    x, y = line()
    make = (OPTIMIZERS | OTHERS)[name]
    other, optimizer = make(free.parameters()), make(model.parameters())
    with holdfast.hold(optimizer, model, posterior, num_data=50, strength=7.0, proximal=True):
        for net, each in ((free, other), (model, optimizer)):
            (0.5 * (net(x) - y).square().mean()).backward()
            each.step()
    group, state = other.param_groups[0], other.state[free.weight]
    if "momentum" in group:
        size = group["lr"] * (1 - group["dampening"]) / (1 - group["momentum"])
    else:
        size = group["lr"] / ((state["exp_avg_sq"] / (1 - group["betas"][1])).sqrt() + group["eps"])
    mean, entries = posterior.mean["weight"], posterior.precision.entries["weight"]
    expected = mean + (free.weight.detach() - mean) / (1 + size * 7.0 * entries / 50)
    torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_parameter_the_data_does_not_touch_is_pulled_too(name):
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(2, 2)}).double()
    known = holdfast.prior(model, 5.0, mean=0.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = model["unused"].weight.detach().clone()
    with holdfast.hold(optimizer, model, known, num_data=5, proximal=True):
        for _ in range(3):
            optimizer.zero_grad()
            model["used"](line()[0]).square().mean().backward()
            optimizer.step()
    assert float(model["unused"].weight.detach().norm()) < 0.5 * float(before.norm())


def kronecker() -> tuple[nn.Module, Posterior, list]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(30, 4, dtype=torch.double), torch.arange(30) % 3)]
    fisher = holdfast.kronecker_fisher(model, data, holdfast.categorical)
    return model, holdfast.consolidate(holdfast.prior(model, 0.5), model, fisher), data


def test_kronecker_factors_are_solved_in_their_eigenvectors():
    model, posterior, data = kronecker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    x, y = data[0]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with holdfast.hold(optimizer, model, posterior, num_data=30, strength=50.0, proximal=True):
        F.cross_entropy(model(x + 1), y).backward()
        optimizer.step()
    order, after = list(posterior.precision.shapes), dict(model.named_parameters())
    free = torch.cat([(before[n] - 0.1 * after[n].grad - posterior.mean[n]).flatten() for n in order])
    matrix = torch.eye(len(free), dtype=torch.double) + 0.2 * 50.0 / 30 * posterior.precision.dense()
    expected = torch.linalg.solve(matrix, free)
    found = torch.cat([(after[n].detach() - posterior.mean[n]).flatten() for n in order])
    torch.testing.assert_close(found, expected)


def test_kronecker_factors_at_a_million_stay():
    model, posterior, data = kronecker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data[0]
    with holdfast.hold(optimizer, model, posterior, num_data=30, strength=1e6, proximal=True) as handle:
        for _ in range(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x + 1), y).backward()
            optimizer.step()
        assert handle.penalty < 1e-3
        assert handle.metrics()["holdfast/steps"] == 50


def test_a_closure_and_accumulation_change_nothing():
    ends = []
    for how in ("plain", "closure", "accumulated"):
        model, posterior = made()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x, y = line()

        def closure(model=model, optimizer=optimizer, x=x, y=y):
            optimizer.zero_grad()
            loss = 0.5 * (model(x) - y).square().mean()
            loss.backward()
            return loss

        with holdfast.hold(optimizer, model, posterior, num_data=50, strength=3.0, proximal=True):
            for _ in range(5):
                if how == "closure":
                    optimizer.step(closure)
                    continue
                optimizer.zero_grad()
                for rows in (slice(0, 50),) if how == "plain" else (slice(0, 25), slice(25, 50)):
                    (0.5 * (model(x[rows]) - y[rows]).square().sum() / 50).backward()
                optimizer.step()
        ends.append(model.weight.detach())
    torch.testing.assert_close(ends[1], ends[0])
    torch.testing.assert_close(ends[2], ends[0])


def test_a_step_that_a_fused_optimizer_skips_is_skipped():
    model, posterior = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    x, y = line()
    with holdfast.hold(optimizer, model, posterior, num_data=50, strength=3.0, proximal=True):
        for skipped in (0.0, 1.0):
            optimizer.zero_grad()
            (0.5 * (model(x) - y).square().mean()).backward()
            before = model.weight.detach().clone()
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(skipped)
            optimizer.step()
            assert torch.equal(model.weight.detach(), before) == bool(skipped)
        del optimizer.grad_scale, optimizer.found_inf


def test_other_terms_stay_in_the_gradients():
    model, posterior = made()
    x, _ = line()
    probes = holdfast.kept_inputs(x)
    term = holdfast.distill(model, holdfast.prior(model), probes, holdfast.gaussian(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.add_(1.0)
    before = model.weight.detach().clone()
    with holdfast.hold(optimizer, model, [posterior, term], num_data=50, proximal=True):
        (0.0 * model.weight.sum()).backward()
        optimizer.step()
    free = before - 0.1 * model.weight.grad
    assert bool(model.weight.grad.any())
    mean, entries = posterior.mean["weight"], posterior.precision.entries["weight"]
    torch.testing.assert_close(model.weight.detach(), mean + (free - mean) / (1 + 0.1 * entries / 50))


def test_what_has_no_closed_form_is_refused_with_what_to_do():
    model, posterior, _ = kronecker()
    with pytest.raises(holdfast.ArgumentError, match=r"Adam has one for each coordinate.*Leave it out"):
        holdfast.hold(torch.optim.Adam(model.parameters()), model, posterior, num_data=30, proximal=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(holdfast.ArgumentError, match="neither turned"):
        holdfast.hold(sgd, model, posterior, num_data=30, proximal=True, rotate=True)
    line_model, diagonal = made()
    with pytest.raises(holdfast.ArgumentError, match=r"RMSprop.*Leave it out"):
        holdfast.hold(torch.optim.RMSprop(line_model.parameters()), line_model, diagonal, num_data=30, proximal=True)
    climbing = torch.optim.SGD(line_model.parameters(), lr=0.1, maximize=True)
    with pytest.raises(holdfast.ArgumentError, match="maximize"):
        holdfast.hold(climbing, line_model, diagonal, num_data=30, proximal=True)
    dense = Posterior(diagonal.mean, holdfast.Dense({"weight": torch.Size([1, 3])}, torch.eye(3, dtype=torch.double)))
    plain = torch.optim.SGD(line_model.parameters(), lr=0.1)
    with pytest.raises(holdfast.ArgumentError, match="not for Dense"):
        holdfast.hold(plain, line_model, dense, num_data=30, proximal=True)
    parted = torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())], lr=0.1)
    with pytest.raises(holdfast.ArgumentError, match=r"`0.weight` in one optimizer.*proximal=False"):
        holdfast.hold(parted, model, posterior, num_data=30, proximal=True)
    handle = holdfast.hold(sgd, model, posterior, num_data=30, proximal=True)
    model[0].bias.requires_grad_(False)  # later
    model(torch.randn(2, 4, dtype=torch.double)).sum().backward()
    before = model[0].weight.detach().clone()
    with pytest.raises(holdfast.ArgumentError, match=r"`0.weight` in one optimizer.*proximal=False"):
        sgd.step()
    assert torch.equal(model[0].weight, before)  # said before anything moved
    handle.detach()
    fast = torch.optim.SGD(line_model.parameters(), lr=0.1, momentum=1.0)
    with pytest.raises(holdfast.ArgumentError, match=r"momentum is 1.*Leave it out"):
        holdfast.hold(fast, line_model, diagonal, num_data=30, proximal=True)


class TestWithoutBeingAsked:
    def held(self, optimizer, model, posterior, **options):
        handle = holdfast.hold(optimizer, model, posterior, num_data=50, **options)
        handle.detach()
        return handle.proximal

    def test_sgd_steps_so_and_others_do_not(self):
        model, posterior = made()
        assert self.held(OPTIMIZERS["momentum"](model.parameters()), model, posterior)
        assert not self.held(OPTIMIZERS["momentum"](model.parameters()), model, posterior, proximal=False)
        assert not self.held(OPTIMIZERS["adam"](model.parameters()), model, posterior)
        layered, factors, _ = kronecker()
        assert self.held(OPTIMIZERS["sgd"](layered.parameters()), layered, factors)

    def test_a_strength_at_which_the_gradient_diverges_is_no_matter(self):
        model, posterior = made()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        x, y = line()
        with holdfast.hold(optimizer, model, posterior, num_data=50, strength=1e6):
            for _ in range(200):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(model.weight.detach(), posterior.mean["weight"], atol=1e-3, rtol=0)

    def test_what_has_no_closed_form_is_in_the_gradients(self):
        model, posterior = made()
        sgd = OPTIMIZERS["sgd"](model.parameters())
        dense = Posterior(posterior.mean, holdfast.Dense({"weight": torch.Size([1, 3])}, torch.eye(3).double()))
        twice = Posterior({name: mean + 1 for name, mean in posterior.mean.items()}, posterior.precision)
        assert not self.held(sgd, model, dense)
        assert not self.held(sgd, model, [posterior, twice])
        assert not self.held(sgd, model, posterior, every=2)
        assert not self.held(torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), model, posterior)
        layered, factors, _ = kronecker()
        parted = torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(layered.parameters())])
        assert not self.held(parted, layered, factors)
        assert not self.held(torch.optim.SGD(model.parameters(), lr=0.1, momentum=1.0), model, posterior)
        layered[0].bias.requires_grad_(False)
        assert not self.held(OPTIMIZERS["sgd"](layered.parameters()), layered, factors)

    def test_groups_with_one_step_size_are_one(self):
        model, posterior, _ = kronecker()
        parted = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
        assert self.held(parted, model, posterior)
        rate = torch.tensor(0.1, dtype=torch.double)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        with holdfast.hold(optimizer, model, posterior, num_data=30) as handle:
            assert handle.proximal
            model(torch.randn(2, 4, dtype=torch.double)).sum().backward()
            optimizer.step()

    def test_narrow_weights_are_pulled_by_their_gradients(self):
        """What is less than half a digit would be rounded away at every step."""
        model = nn.Linear(20, 20, bias=False).bfloat16()
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        torch.manual_seed(0)
        with holdfast.hold(optimizer, model, holdfast.prior(model, precision=100.0), num_data=1000) as handle:
            assert not handle.proximal
            for _ in range(5000):
                model.weight.grad = (0.05 + torch.randn(20, 20)).bfloat16()
                optimizer.step()
        assert float((model.weight.detach().float() - 1).mean()) == pytest.approx(-0.5, abs=0.08)

    def test_a_layer_that_is_frozen_in_part_later_is_pulled_by_its_gradients(self):
        ends = []
        for proximal in (None, False):
            model, posterior, _ = kronecker()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model[0].bias.requires_grad_(proximal is None)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1
            with holdfast.hold(optimizer, model, posterior, num_data=30, proximal=proximal) as handle:
                assert handle.proximal == (proximal is None)
                model[0].bias.requires_grad_(False)
                optimizer.zero_grad()
                model(torch.ones(2, 4, dtype=torch.double)).sum().backward()
                if proximal is None:
                    with pytest.warns(holdfast.HoldfastWarning, match=r"gradients from here on.*`0.weight`"):
                        optimizer.step()
                else:
                    optimizer.step()
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
        torch.testing.assert_close(*ends, rtol=0, atol=0)

    def test_the_loss_of_a_closure_has_the_penalty_in_it(self):
        told = []
        for proximal in (True, False):
            model, posterior = made()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with holdfast.hold(optimizer, model, posterior, num_data=50, proximal=proximal) as handle:
                penalty = handle.penalty
                told.append(float(optimizer.step(lambda: torch.tensor(1.0))))
        assert told[0] == pytest.approx(1 + penalty / 50)
        assert told[0] == pytest.approx(told[1])


def test_a_strength_that_no_gradient_can_have_is_refused():
    """In place of what torch says of a number that overflows, or of weights that are none after the step."""
    for precision in (Diagonal, lambda entries: Dense({"weight": torch.Size((2, 3))}, torch.eye(6))):
        model = nn.Linear(3, 2, bias=False)
        posterior = Posterior({"weight": torch.zeros(2, 3)}, precision({"weight": torch.ones(2, 3)}))
        optimizer = torch.optim.Adam(model.parameters())
        with holdfast.hold(optimizer, model, posterior, num_data=1, strength=1e300, proximal=False) as handle:
            model(torch.ones(1, 3)).sum().backward()
            with pytest.raises(holdfast.ArgumentError, match=r"strength / num_data is 1e\+300.*proximal=True"):
                optimizer.step()
            handle.strength = 1.0
            optimizer.step()


def test_nor_can_the_gradient_of_a_term_beside_a_step_of_its_own_have_it():
    model = nn.Linear(3, 2)
    batch = [(torch.randn(8, 3), torch.arange(8) % 2)]
    fisher = holdfast.diagonal_fisher(model, batch, holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    term = holdfast.distill(model, posterior, holdfast.kept_inputs(batch[0][0]), holdfast.categorical)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.hold(optimizer, model, [posterior, term], num_data=1, strength=1e300, proximal=True) as handle:
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(holdfast.ArgumentError, match=r"strength / num_data is 1e\+300"):
            optimizer.step()
        handle.strength = 1.0
        optimizer.step()


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_at_any_strength_the_free_stays_free_and_the_held_at_the_mean(name, layout):
    """Infinity times zero is no number, and neither is infinity by infinity."""
    model, free = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    for each in (model, free):
        values = torch.arange(6.0)
        each.weight.data = values.view(2, 3).clone() if layout == "rows" else values.view(3, 2).clone().T
    entries = torch.tensor([[0.0, 1.0, 1e30], [1e38, 0.0, 1e-3]])
    posterior = Posterior({"weight": torch.full((2, 3), 0.5)}, Diagonal({"weight": entries}))
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](free.parameters())
    with holdfast.hold(optimizer, model, posterior, num_data=1, strength=1e305, proximal=True):
        for net, each in ((model, optimizer), (free, other)):
            net(torch.ones(1, 3)).sum().backward()
            each.step()
    torch.testing.assert_close(model.weight.detach(), torch.where(entries == 0, free.weight.detach(), 0.5))
