import itertools

import pytest
import torch
from torch import nn

import holdfast

N = 20
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


def start(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(N, 3).double(), torch.randint(0, 2, (N,))


def loss_of(model, x, y):
    return holdfast.categorical.nll(model(x), y).mean()


def memory(model, x, y):
    """A posterior away from the weights: its pull is not zero from the first step on."""
    fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical, targets="observed")
    posterior = holdfast.consolidate(holdfast.prior(model), model, 10 * fisher)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return posterior


def train(optimizer, model, x, y, *, steps=8, accumulate=1):
    """Minibatches that differ, with gradients that are summed over the parts of each."""
    for step in range(steps):
        optimizer.zero_grad()
        rows = [(2 * step + n) % N for n in range(8)]
        for part in range(accumulate):
            picked = rows[part::accumulate]
            (loss_of(model, x[picked], y[picked]) / accumulate).backward()
        optimizer.step()


def loop(optimizer, model, x, y, *, posterior=None, steps=8, accumulate=1, proximal=False):
    """The same by hand: the data's gradient is looked at, then the pull comes, in it or after it; −g Δθ is summed."""
    omega = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(steps):
        optimizer.zero_grad()
        rows = [(2 * step + n) % N for n in range(8)]
        for part in range(accumulate):
            picked = rows[part::accumulate]
            (loss_of(model, x[picked], y[picked]) / accumulate).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if posterior is not None and not proximal:
            pull = holdfast.penalty_gradient(model, posterior)
            for name, p in model.named_parameters():
                p.grad += pull[name] / N
        optimizer.step()
        for name, p in model.named_parameters() if proximal else ():
            stiff = optimizer.param_groups[0]["lr"] * posterior.precision.entries[name] / N
            p.data = posterior.mean[name] + (p.data - posterior.mean[name]) / (1 + stiff)
        for name, p in model.named_parameters():
            omega[name] -= grads[name] * (p.detach() - before[name])
    return omega


def close(found, want, **options):
    assert list(found) == list(want)
    for name in want:
        torch.testing.assert_close(found[name], want[name], **(options or {"rtol": 1e-10, "atol": 1e-14}))
    assert any(float(each.abs().max()) > 1e-6 for each in want.values())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_path_equals_a_loop_by_hand(make, accumulate):
    model, x, y = start()
    optimizer = OPTIMIZERS[make](model.parameters())
    with holdfast.recorded_path(optimizer, model) as path:
        train(optimizer, model, x, y, accumulate=accumulate)
    assert path.steps == 8
    twin, x, y = start()
    close(path.integral, loop(OPTIMIZERS[make](twin.parameters()), twin, x, y, accumulate=accumulate))


@pytest.mark.parametrize("first", ["path", "hold"])
@pytest.mark.parametrize(("make", "proximal"), [("sgd", False), ("sgd", True), ("adam", False), ("adam-fused", False)])
def test_the_pull_of_a_hold_is_in_the_way_gone_and_not_in_the_gradient(make, proximal, first):
    model, x, y = start()
    posterior = memory(model, x, y)
    optimizer = OPTIMIZERS[make](model.parameters())
    path = holdfast.recorded_path(optimizer, model) if first == "path" else None
    with holdfast.hold(optimizer, model, posterior, num_data=N, proximal=proximal) as handle:
        path = path or holdfast.recorded_path(optimizer, model)
        assert handle.penalty > 0.1
        train(optimizer, model, x, y)
    path.remove()
    twin, x, y = start()
    memory(twin, x, y)
    free = loop(OPTIMIZERS[make](twin.parameters()), twin, x, y)
    twin, x, y = start()
    posterior = memory(twin, x, y)
    want = loop(OPTIMIZERS[make](twin.parameters()), twin, x, y, posterior=posterior, proximal=proximal)
    close(path.integral, want)
    assert float((path.integral["0.weight"] - free["0.weight"]).norm() / free["0.weight"].norm()) > 0.1


@pytest.mark.parametrize("first", ["path", "hold"])
def test_steps_in_turned_coordinates_are_recorded_where_they_end(first):
    """A hold with rotate=True turns what a step did after it: ω is −g Δθ of what came of it."""
    model, x, y = start()
    fisher = holdfast.kronecker_fisher(model, [(x, y)], holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with torch.no_grad():
        model[0].weight += 0.3
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    path = holdfast.recorded_path(optimizer, model) if first == "path" else None
    with holdfast.hold(optimizer, model, posterior, num_data=N, rotate=True):
        path = path or holdfast.recorded_path(optimizer, model)
        loss_of(model, x, y).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    close(path.integral, {name: -grads[name] * (p.detach() - begun[name]) for name, p in model.named_parameters()})


def test_the_integral_that_is_given_is_a_copy():
    model, x, y = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.recorded_path(optimizer, model) as path:
        train(optimizer, model, x, y, steps=1)
        given = path.integral
        once = {name: omega.clone() for name, omega in given.items()}
        train(optimizer, model, x, y, steps=1)
    close(given, once)
    assert not torch.equal(path.integral["0.weight"], once["0.weight"])


def test_with_small_steps_the_path_adds_up_to_the_fall_of_the_loss():
    model, x, y = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = loss_of(model, x, y).item()
    with holdfast.recorded_path(optimizer, model) as path:
        for _ in range(400):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    fall = before - loss_of(model, x, y).item()
    assert fall > 0.01
    assert sum(float(omega.sum()) for omega in path.integral.values()) == pytest.approx(fall, rel=1e-3)


class Bowl(nn.Module):
    """½ Σ hᵢ (θᵢ − cᵢ)²: a mean loss whose Hessian is h."""

    def __init__(self, h, center, begin):
        super().__init__()
        self.h, self.center = h, center
        self.theta = nn.Parameter(begin.clone())

    def forward(self):
        return 0.5 * (self.h * (self.theta - self.center).square()).sum()


def walked(bowl, optimizer, steps):
    with holdfast.recorded_path(optimizer, bowl) as path:
        for _ in range(steps):
            optimizer.zero_grad()
            bowl().backward()
            optimizer.step()
    return path


def test_a_bowl_walked_down_in_small_steps_has_its_summed_curvature():
    """ω = ½ h Δ², so Λ = 2NΩ → N h: what a Fisher summed over N examples would be."""
    h = torch.tensor([1.0, 2.0, 3.0, 10.0]).double()
    center = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    bowl = Bowl(h, center, torch.zeros(4).double())
    path = walked(bowl, torch.optim.SGD(bowl.parameters(), lr=1e-3), 6_000)
    Λ = path.precision(num_data=700, damping=1e-9).entries["theta"]
    torch.testing.assert_close(Λ, 700 * h, rtol=0.01, atol=0)
    # With damping ξ each entry is less, by Δ² / (Δ² + ξ).
    went = (bowl.theta.detach()).square()
    damped = path.precision(num_data=700).entries["theta"]
    torch.testing.assert_close(damped, Λ * went / (went + 0.1), rtol=1e-6, atol=0)


def test_large_steps_overstate_the_fall():
    """A step of SGD with rate a down a bowl has −g Δθ = a g², and the loss falls by a g² (1 − a h / 2)."""
    h = torch.tensor([1.0, 2.0]).double()
    bowl = Bowl(h, torch.zeros(2).double(), torch.ones(2).double())
    path = walked(bowl, torch.optim.SGD(bowl.parameters(), lr=0.4), 60)
    Λ = path.precision(num_data=1, damping=1e-12).entries["theta"]
    torch.testing.assert_close(Λ, h / (1 - 0.4 * h / 2), rtol=1e-6, atol=0)


def test_minibatch_noise_adds_its_variance():
    """At the minimum of noisy gradients −g Δθ = lr g² all the same: ω grows by lr · variance at every step."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    noise = torch.randn(4000).double()
    with holdfast.recorded_path(optimizer, model) as path:
        for each in noise:
            model.weight.grad = each.view(1, 1)
            optimizer.step()
    torch.testing.assert_close(path.integral["weight"].squeeze(), 1e-3 * noise.square().sum())


def test_an_optimizer_that_climbs_has_the_same_path():
    paths = []
    for maximize in (False, True):
        model, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, maximize=maximize)
        with holdfast.recorded_path(optimizer, model) as path:
            for _ in range(4):
                optimizer.zero_grad()
                ((-1 if maximize else 1) * loss_of(model, x, y)).backward()
                optimizer.step()
        paths.append(path.integral)
    close(paths[1], paths[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradient_scaling_does_not_scale_the_path(fused, unscale):
    paths = []
    for scaled in (False, True):
        model, x, y = start()
        model, x = model.float(), x.float()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        with holdfast.recorded_path(optimizer, model) as path:
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x, y)).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        paths.append(path.integral)
    close(paths[1], paths[0], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_adds_nothing(fused):
    model, x, y = start()
    model, x = model.float(), x.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with holdfast.recorded_path(optimizer, model) as path:
        for bad in (False, True):
            before = path.integral
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            if bad:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    assert all(torch.equal(path.integral[name], before[name]) for name in before)
    assert float(before["0.weight"].abs().max()) > 0


def test_a_subclass_that_calls_its_parents_step_is_recorded_once():
    class Child(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            if self.broken:
                raise KeyError
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p *= 0.99  # moved within the step, before the parent's
            return super().step(closure)

    model, x, y = start()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on its step fires hooks too
    optimizer = Child(model.parameters(), lr=0.1)
    with holdfast.recorded_path(optimizer, model) as path:
        train(optimizer, model, x, y, steps=2)
        optimizer.broken = True
        with pytest.raises(KeyError):
            optimizer.step()
        optimizer.broken = False
        train(optimizer, model, x, y, steps=2)
    assert path.steps == 4
    twin, x, y = start()
    optimizer = Child(twin.parameters(), lr=0.1)
    want = loop(optimizer, twin, x, y, steps=2)
    again = loop(optimizer, twin, x, y, steps=2)
    close(path.integral, {name: want[name] + again[name] for name in want})


def test_several_optimizers_are_one_path():
    model, x, y = start()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.05), torch.optim.SGD(model[2].parameters(), lr=0.05)]
    with holdfast.recorded_path(optimizers, model) as path:
        for _ in range(3):
            model.zero_grad()
            loss_of(model, x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
    twin, x, y = start()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    with holdfast.recorded_path(optimizer, twin) as whole:
        for _ in range(3):
            twin.zero_grad()
            loss_of(twin, x, y).backward()
            optimizer.step()
    close(path.integral, whole.integral)
    assert path.steps == 6


def test_frozen_parameters_and_those_without_gradients_add_nothing():
    model, x, y = start()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    with holdfast.recorded_path(optimizer, model) as path:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if step == 2:
                steady = path.integral["2.bias"]
            model[2].bias.grad = model[2].bias.grad if step < 2 else None
            optimizer.step()
    assert "0.bias" not in path.integral
    assert torch.equal(path.integral["2.bias"], steady)
    assert float(steady.abs().max()) > 0
    # One that is unfrozen on the way has a path from there on.
    with holdfast.recorded_path(optimizer, model) as path:
        for step in range(2):
            model[0].bias.requires_grad_(step == 1)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    assert float(path.integral["0.bias"].abs().max()) > 0
    assert float(path.precision(num_data=N).entries["0.bias"].max()) > 0


def test_weights_in_half_precision_have_their_path_in_single():
    model, x, y = start()
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model[2].bias.detach().clone()
    with holdfast.recorded_path(optimizer, model) as path:
        holdfast.categorical.nll(model(x), y).mean().backward()
        grad = model[2].bias.grad.clone()
        optimizer.step()
    want = -grad.float() * (model[2].bias.detach().float() - before.float())
    assert torch.equal(path.integral["2.bias"], want)
    assert path.precision(num_data=N).entries["2.bias"].dtype == torch.float32


def test_sparse_gradients_are_recorded():
    torch.manual_seed(0)
    model = nn.Embedding(6, 2, sparse=True).double()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with holdfast.recorded_path(optimizer, model) as path:
        model(torch.tensor([0, 3, 3])).square().sum().backward()
        grad = model.weight.grad.to_dense()
        optimizer.step()
    close(path.integral, {"weight": -grad * (model.weight.detach() - before)})


def test_its_precision_fits_the_weights_where_it_was_taken_and_no_others():
    model, x, y = start()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    path = holdfast.recorded_path(optimizer, model)
    train(optimizer, model, x, y)
    Λ = path.precision(num_data=N, damping=0.01, unit="token")
    (source,) = Λ.sources
    assert (source.likelihood, source.targets) == ("path integral", "SI, damping 0.01")
    assert (Λ.num_data, Λ.unit) == (N, "token")
    want = {
        name: 2 * N * path.integral[name].clamp(min=0) / ((p.detach() - begun[name]).square() + 0.01)
        for name, p in model.named_parameters()
    }
    close(Λ.entries, want)
    flat = holdfast.prior(model)
    posterior = holdfast.consolidate(flat, model, Λ)
    assert posterior.num_data == N
    with pytest.raises(holdfast.MismatchError, match="already in the posterior"):
        holdfast.consolidate(posterior, model, path.precision(num_data=N, damping=0.1, unit="token"))
    path.remove()
    train(optimizer, model, x, y, steps=1)
    with pytest.raises(holdfast.MismatchError, match="taken at other weights"):
        holdfast.consolidate(flat, model, Λ)
    # What was removed ended where it was removed, whatever became of the model.
    close(path.precision(num_data=N, damping=0.01, unit="token").entries, want)
    assert path.steps == 8


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_online_a_running_sum_over_tasks(decay):
    """Ω_t = γ Ω_{t−1} + ω_t / (Δ_t² + ξ), each task with a recording of its own and held to the ones before."""
    model, x, y = start()
    posterior = holdfast.prior(model)
    running = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for task in range(3):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        begun = {name: p.detach().clone() for name, p in model.named_parameters()}
        with (
            holdfast.recorded_path(optimizer, model) as path,
            holdfast.hold(optimizer, model, posterior, num_data=N),
        ):
            train(optimizer, model, x.roll(task, 1), y)
        posterior = holdfast.consolidate(posterior, model, path.precision(num_data=N), decay=decay)
        for name, p in model.named_parameters():
            mine = path.integral[name].clamp(min=0) / ((p.detach() - begun[name]).square() + 0.1)
            running[name] = decay * running[name] + mine
    close(posterior.precision.entries, {name: 2 * N * each for name, each in running.items()})
    assert posterior.num_data == pytest.approx(N * sum(decay**k for k in range(3)))


def test_it_saves_and_loads(tmp_path):
    model, x, y = start()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with holdfast.recorded_path(optimizer, model) as path:
        train(optimizer, model, x, y)
    posterior = holdfast.consolidate(holdfast.prior(model), model, path.precision(num_data=N))
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    loaded = holdfast.load(tmp_path / "memory.safetensors").posterior
    assert [str(source) for source in loaded.sources] == ["path integral, 20 examples"]
    assert [source.targets for source in loaded.sources] == ["SI, damping 0.1"]
    close(loaded.precision.entries, posterior.precision.entries)


def test_nothing_is_left_on_the_optimizer():
    model, x, y = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.recorded_path(optimizer, model) as path:
        train(optimizer, model, x, y, steps=1)
    with pytest.raises(KeyError), holdfast.recorded_path(optimizer, model):
        raise KeyError
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    path.remove()
    with pytest.raises(holdfast.InertError, match="has ended"):
        path.__enter__()


class TestRefusals:
    def test_a_closure(self):
        model, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.recorded_path(optimizer, model):
            with pytest.raises(holdfast.ArgumentError, match=r"SGD.step was given a closure.*loss.backward\(\) before"):
                optimizer.step(lambda: loss_of(model, x, y))
            with pytest.raises(holdfast.ArgumentError, match="automatic_optimization"):
                optimizer.step(closure=lambda: loss_of(model, x, y))
        with pytest.raises(holdfast.ArgumentError, match="LBFGS computes gradients within its steps"):
            holdfast.recorded_path(torch.optim.LBFGS(model.parameters()), model)

    def test_an_optimizer_of_another_model(self):
        model, _, _ = start()
        other, _, _ = start()
        with pytest.raises(holdfast.InertError, match="no trainable parameter of the model"):
            holdfast.recorded_path(torch.optim.SGD(other.parameters(), lr=0.1), model)
        with pytest.raises(holdfast.InertError, match="no trainable parameter"):
            holdfast.recorded_path([], model)

    def test_what_is_no_optimizer_or_no_model(self):
        model, _, _ = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(holdfast.ArgumentError, match="takes the optimizer, then the model; got SGD"):
            holdfast.recorded_path(model, optimizer)
        with pytest.raises(holdfast.ArgumentError, match="or a list of them, got Linear"):
            holdfast.recorded_path(model[0], model)

    def test_a_path_without_steps_or_without_a_way(self):
        model, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        path = holdfast.recorded_path(optimizer, model)
        with pytest.raises(holdfast.InertError, match="no step was recorded"):
            path.precision(num_data=N)
        train(optimizer, model, x, y, steps=1)
        with pytest.raises(holdfast.InertError, match="is the learning rate zero"):
            path.precision(num_data=N)
        optimizer.param_groups[0]["lr"] = -0.1
        train(optimizer, model, x, y, steps=1)
        with pytest.raises(holdfast.InertError, match="the loss fell along no weight"):
            path.precision(num_data=N)

    @pytest.mark.parametrize("where", ["on the way and at its end", "on the way", "at its end"])
    def test_a_path_that_is_not_finite(self, where):
        model, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.recorded_path(optimizer, model) as path:
            train(optimizer, model, x, y, steps=1)
            kept = model[2].bias.detach().clone()
            if where.startswith("on the way"):
                model[2].bias.grad.fill_(torch.nan)
                optimizer.step()
            if not where.endswith("at its end"):
                model[2].bias.data.copy_(kept)  # a checkpoint from before
            elif where == "at its end":
                model[2].bias.data[0] = torch.inf
        with pytest.raises(holdfast.DataError, match=r"path of `2.bias` is not finite.*diverge"):
            path.precision(num_data=N)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"num_data": 0}, "num_data"),
            ({"num_data": -3}, "num_data"),
            ({"num_data": "all"}, "num_data"),
            ({"num_data": N, "damping": 0.0}, "damping"),
            ({"num_data": N, "damping": float("nan")}, "damping"),
            ({"num_data": N, "unit": ""}, "unit says what num_data counts"),
        ],
    )
    def test_numbers_out_of_range(self, options, said):
        model, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.recorded_path(optimizer, model) as path:
            train(optimizer, model, x, y, steps=1)
        with pytest.raises(holdfast.ArgumentError, match=said):
            path.precision(**options)

    def test_a_parameter_that_changes_its_shape_on_the_way(self):
        model, x, y = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.recorded_path(optimizer, model):
            train(optimizer, model, x, y, steps=1)
            model[2] = nn.Linear(4, 3).double()
            optimizer.add_param_group({"params": list(model[2].parameters())})
            with pytest.raises(holdfast.MismatchError, match=r"`2.weight` was \(2, 4\).*is now \(3, 4\)"):
                train(optimizer, model, x, y, steps=1)
            model[2] = nn.Linear(4, 2).double()  # so that the path can end


def test_distributed_parameters_have_distributed_paths(tmp_path):
    """DTensors of a mesh of one: the numbers of plain tensors, with the parameters' placements."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        paths = []
        for spread in (False, True):
            model, _, _ = start()
            if spread:
                for module, place in itertools.product(model, ("weight", "bias")):
                    if hasattr(module, place):
                        placements = [Shard(0)] if place == "weight" else [Replicate()]
                        value = distribute_tensor(getattr(module, place).detach(), mesh, placements)
                        setattr(module, place, nn.Parameter(value))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            with holdfast.recorded_path(optimizer, model) as path:
                for step in range(3):
                    optimizer.zero_grad()
                    for index, p in enumerate(model.parameters()):
                        torch.manual_seed(10 * step + index)
                        noise = torch.randn(p.shape).double()
                        # Sequence parallelism leaves gradients of replicated parameters as sums yet to be made.
                        way = [Partial()] if p.ndim == 1 else [Shard(0)]
                        p.grad = DTensor.from_local(noise, mesh, way) if spread else noise
                    optimizer.step()
            precision = path.precision(num_data=N)
            assert all(isinstance(each, DTensor) == spread for each in precision.entries.values())
            paths.append((path.integral, precision.entries))
        for plain, spread in zip(*paths, strict=True):
            close({name: each.full_tensor() for name, each in spread.items()}, plain)
    finally:
        distributed.destroy_process_group()
