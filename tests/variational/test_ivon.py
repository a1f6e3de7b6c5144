"""The variational optimizer: against a loop written out, the exact posterior, chains, resuming, holds, refusals."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast import Diagonal, Posterior
from holdfast.kernels.natural import Natural, natural_step_
from variational_cases import REGRESSION, classes, exact, line, linear, perceptron


def around(model: nn.Module, seed: int = 7) -> Posterior:
    """A prior with a mean and a precision of its own for every weight."""
    generator = torch.Generator().manual_seed(seed)
    mean = {n: torch.randn(p.shape, generator=generator).to(p) for n, p in model.named_parameters()}
    entries = {n: 1 + torch.rand(p.shape, generator=generator).to(p) for n, p in model.named_parameters()}
    return Posterior(mean, Diagonal(entries))


def ivon(model: nn.Module, **options) -> holdfast.IVON:
    defaults = {"num_data": 16, "lr": 0.05, "start": 0.5, "betas": (0.8, 0.95), "radius": math.inf, "seed": 1}
    options = defaults | options
    return holdfast.IVON(model, options.pop("prior", None) or around(model), holdfast.categorical, **options)


def steps(model: nn.Module, optimizer: holdfast.IVON, count: int, draws: int = 1) -> None:
    x, y = classes()
    for _ in range(count):
        optimizer.zero_grad()
        for _ in range(draws):
            with optimizer.sampled():
                (F.cross_entropy(model(x), y) / draws).backward()
        optimizer.step()


@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("radius", [float("inf"), 0.2])
def test_steps_are_those_of_the_equations(draws, radius):
    """Written out weight by weight from the noise that was seen, in float64."""
    model = perceptron()
    prior, n, lr, (b1, b2), h0 = around(model), 16, 0.05, (0.8, 0.95), 0.5
    optimizer = ivon(model, radius=radius)
    x, y = classes()
    m = {k: p.detach().clone() for k, p in model.named_parameters()}
    g, h = ({k: torch.full_like(v, start) for k, v in m.items()} for start in (0.0, h0))
    s = {k: v / n for k, v in prior.precision.entries.items()}
    for t in range(1, 4):
        optimizer.zero_grad()
        total = {k: torch.zeros_like(v) for k, v in m.items()}
        bend = {k: torch.zeros_like(v) for k, v in m.items()}
        for _ in range(draws):
            with optimizer.sampled():
                theta = {k: p.detach().clone() for k, p in model.named_parameters()}
                grads = torch.autograd.grad(F.cross_entropy(model(x), y) / draws, list(model.parameters()))
                (F.cross_entropy(model(x), y) / draws).backward()
            for (k, mean), grad in zip(m.items(), grads, strict=True):
                total[k] += grad
                bend[k] += grad * (theta[k] - mean) * n * (h[k] + s[k])
        optimizer.step()
        for k, mean in m.items():
            g[k] = b1 * g[k] + (1 - b1) * total[k]
            extra = 0.5 * (1 - b2) ** 2 * (h[k] - bend[k]) ** 2 / (h[k] + s[k])
            h[k] = b2 * h[k] + (1 - b2) * bend[k] + extra
            way = (g[k] / (1 - b1**t) + s[k] * (mean - prior.mean[k])) / (h[k] + s[k])
            m[k] = mean - lr * way.clamp(-radius, radius)
        for k, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), m[k])
            torch.testing.assert_close(optimizer.state[p]["curvature"], h[k])
    found = optimizer.posterior()
    torch.testing.assert_close(found.precision.entries["0.weight"], n * (h["0.weight"] + s["0.weight"]))


def test_of_a_linear_model_it_is_the_exact_posterior():
    model, (x, y) = linear(), line(0)
    before = holdfast.prior(model, 1.0, mean=0.0)
    optimizer = holdfast.IVON(model, before, REGRESSION, num_data=120, lr=0.1, start=1.0, betas=(0.9, 0.998))
    for step in range(4000):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 2000 else 0.01
        optimizer.zero_grad()
        for _ in range(2):
            with optimizer.sampled():
                (REGRESSION.nll(model(x), y).mean() / 2).backward()
        optimizer.step()
    mean, precision = exact(x, y, 1.0)
    found = optimizer.posterior()
    torch.testing.assert_close(found.mean["weight"], mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.precision.entries["weight"][0], precision.diagonal(), rtol=0.15, atol=0)
    assert found.num_data == 120
    assert optimizer.start_left < 1e-3


def test_a_draw_has_the_deviation_that_the_curvature_says_and_its_mirror_follows():
    model = nn.Linear(200, 50, bias=False)
    optimizer = holdfast.IVON(model, holdfast.prior(model, 2.0), holdfast.categorical, num_data=100, start=0.3)
    mean, draws = model.weight.detach().clone(), []
    for _ in range(4):
        with optimizer.sampled():
            draws.append(model.weight.detach() - mean)
            model(torch.ones(1, 200)).sum().backward()
        assert torch.equal(model.weight.detach(), mean)  # to the last bit
    assert float(draws[0].std()) == pytest.approx((100 * 0.3 + 2.0) ** -0.5, rel=0.03)
    torch.testing.assert_close(draws[0], -draws[1], atol=1e-6, rtol=1e-4)
    assert not torch.allclose(draws[0], draws[2])


def test_an_error_inside_a_draw_leaves_the_mean():
    model = perceptron()
    optimizer, before = ivon(model), [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), optimizer.sampled():
        raise ZeroDivisionError
    assert all(torch.equal(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True))
    steps(model, optimizer, 1)


def test_a_closure_is_run_at_a_draw_of_its_own():
    ours, theirs = perceptron(), perceptron()
    x, y = classes()
    one, other = ivon(ours), ivon(theirs)
    steps(ours, one, 3)

    def closure() -> Tensor:
        other.zero_grad()
        loss = F.cross_entropy(theirs(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        assert float(other.step(closure).detach()) > 0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_is_resumed_to_the_last_bit_and_under_no_other_prior(tmp_path):
    model = perceptron()
    optimizer = ivon(model)
    steps(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    steps(model, optimizer, 3)
    saved = torch.load(tmp_path / "state.pt")
    again = perceptron()
    again.load_state_dict(saved["model"])
    resumed = ivon(again)
    resumed.load_state_dict(saved["optimizer"])
    steps(again, resumed, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.posterior().id == optimizer.posterior().id
    for key, other in (("prior", ivon(again, prior=around(again, 8))), ("num_data", ivon(again, num_data=17))):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(holdfast.MismatchError, match=f"saved under another {key}"):
            other.load_state_dict(saved["optimizer"])
        torch.testing.assert_close(other.state_dict()["state"], before["state"], atol=0, rtol=0)
        assert other.state_dict()["param_groups"] == before["param_groups"]


def test_a_step_that_was_not_made_leaves_nothing_behind():
    """What a GradScaler skips: infinite gradients, and then zero_grad."""
    ours, theirs = perceptron(), perceptron()
    one, other = ivon(ours), ivon(theirs)
    x, y = classes()
    with one.sampled():
        (float("inf") * F.cross_entropy(ours(x), y)).backward()
    with other.sampled():
        F.cross_entropy(theirs(x), y).backward()
    steps(ours, one, 2)
    steps(theirs, other, 2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_scaled_loss_is_the_same_with_its_scale_given():
    ours, theirs = perceptron(), perceptron()
    one, other = ivon(ours), ivon(theirs)
    x, y = classes()
    steps(ours, one, 1)
    with other.sampled(loss_scale=1024.0):
        (1024 * F.cross_entropy(theirs(x), y)).backward()
    for p in theirs.parameters():
        p.grad /= 1024
    other.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_hold_beside_it_pulls():
    """The pull of another posterior enters at the step, and is no part of the curvature."""
    ours, theirs = perceptron(), perceptron()
    free, pulled = ivon(ours), ivon(theirs)
    far = Posterior(
        {n: p.detach() + 1 for n, p in theirs.named_parameters()},
        Diagonal({n: torch.full_like(p, 3.0) for n, p in theirs.named_parameters()}),
    )
    steps(ours, free, 1)
    with holdfast.hold(pulled, theirs, far, num_data=16):
        steps(theirs, pulled, 1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float((b - a).detach().min()) > 0
        assert torch.equal(free.state[a]["curvature"], pulled.state[b]["curvature"])


def test_a_hold_to_its_own_prior_is_refused():
    model = perceptron()
    known = around(model)
    with pytest.raises(holdfast.ArgumentError, match="count twice"):
        holdfast.hold(ivon(model, prior=known), model, known, num_data=16)


def test_the_posterior_is_the_next_prior_and_goes_everywhere(tmp_path):
    model = perceptron()
    optimizer = ivon(model)
    steps(model, optimizer, 5)
    posterior = optimizer.posterior()
    following = ivon(model, prior=posterior)
    steps(model, following, 5)
    after = following.posterior()
    assert after.num_data == 32
    assert after.parents == (posterior.id,)
    assert all(bool((after.precision.entries[n] > each).all()) for n, each in posterior.precision.entries.items())
    holdfast.save(after, tmp_path / "memory.safetensors")
    assert holdfast.load(tmp_path / "memory.safetensors").posterior.id == after.id
    assert after.sources[-1].targets == "variational, IVON, start 0.5 at 0.77"


def test_a_learning_rate_schedule_and_clipping_work_as_on_any_optimizer():
    model = perceptron()
    optimizer = ivon(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    x, y = classes()
    rates, norms, curvatures = [], [], []
    for _ in range(4):
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        curvatures.append(optimizer.state[model[0].weight]["curvature"].clone())
        rates.append(optimizer.param_groups[0]["lr"])
        norms.append(float(optimizer.state[model[0].weight]["momentum"].norm()))
    assert rates == pytest.approx([0.05 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in (1, 2, 3, 4)])
    assert max(norms) <= 0.1  # the mean goes by clipped gradients, and the curvature by all of them
    free = perceptron()
    other = ivon(free)
    with other.sampled():
        F.cross_entropy(free(x), y).backward()
    other.step()
    first = {"momentum": 0.2 * free[0].weight.grad, "curvature": curvatures[0]}
    assert float(first["momentum"].norm()) > norms[0]
    assert torch.equal(other.state[free[0].weight]["curvature"], curvatures[0])


def test_bad_input_is_refused_with_what_to_do():
    model = perceptron()
    optimizer = ivon(model)
    F.cross_entropy(model(classes()[0]), classes()[1]).backward()
    with pytest.raises(holdfast.InertError, match=r"nothing was drawn.*sampled\(\)"):
        optimizer.step()
    with pytest.raises(holdfast.InertError, match="no step was made"):
        optimizer.posterior()
    with pytest.raises(holdfast.ArgumentError, match="within sampled"), optimizer.sampled(), optimizer.sampled():
        pass
    with pytest.raises(holdfast.ArgumentError, match="a draw there"), optimizer.sampled():
        optimizer.posterior()
    with pytest.raises(holdfast.ArgumentError, match="betas"):
        ivon(model, betas=(0.9, 1.0))
    with pytest.raises(holdfast.ArgumentError, match=r"float32.*autocast"):
        ivon(perceptron().bfloat16())
    fisher = holdfast.kronecker_fisher(model, [classes()], holdfast.categorical)
    with pytest.raises(holdfast.MismatchError, match=r"one precision for each weight.*mean_field"):
        ivon(model, prior=holdfast.consolidate(holdfast.prior(model, 1.0), model, fisher))
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = ivon(sparse, prior=holdfast.prior(sparse, 1.0))
    with pytest.raises(holdfast.ArgumentError, match="sparse=False"), optimizer.sampled():
        sparse(torch.tensor([[1, 2]])).sum().backward()
    softer = holdfast.softened(), r"no distribution of labels.*holdfast.categorical"
    for likelihood, said in (("categorical", "likelihood is needed"), softer):
        with pytest.raises(holdfast.ArgumentError, match=said):
            holdfast.IVON(model, holdfast.prior(model, 1.0), likelihood, num_data=16)


def test_a_curvature_that_explodes_is_named():
    model = perceptron()
    optimizer = ivon(model)
    steps(model, optimizer, 1)
    optimizer.state[model[0].weight]["curvature"][0, 0] = 1e40
    with pytest.raises(holdfast.VarianceError, match=r"1 of 24 weights of `0.weight` collapsed.*loss_scale"):
        optimizer.posterior()


def test_the_curvature_stays_positive_whatever_bends():
    """½(1−β₂)²(h − ĥ)²/(h + s) keeps h + s above half of what it was (Lin et al. 2020)."""
    h, s, bends = torch.full((1000,), 0.1), torch.full((1000,), 0.01), torch.linspace(-1e4, 1e4, 1000)
    zeros = [torch.zeros(1000) for _ in range(4)]
    natural_step_(([zeros[0]], [zeros[1]], [zeros[2]], [h], [bends], [s], [zeros[3]]), Natural(0.1, 0.9, 0.99, 1.0))
    assert float((h + s).min()) >= 0.5 * 0.11 - 1e-6


def test_a_backward_pass_outside_the_draw_is_told():
    model = perceptron()
    optimizer = ivon(model)
    x, y = classes()
    with pytest.raises(holdfast.InertError, match=r"no gradient arrived inside sampled\(\)"), optimizer.sampled():
        F.cross_entropy(model(x), y)
    steps(model, optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad(), optimizer.sampled():
        assert not torch.equal(next(model.parameters()), before[0])  # to look at a draw is no lesson
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(holdfast.InertError, match="nothing was drawn"):
        optimizer.step()


def test_what_no_gradient_reaches_ends_at_its_prior():
    """The loss does not depend on it, so its curvature is zero and its mean goes to the prior's."""
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(2, 2)}).double()
    before = holdfast.prior(model, 2.0, mean=0.0)
    optimizer = ivon(model, prior=before, betas=(0.5, 0.9), lr=0.3)
    x, y = classes()
    for _ in range(300):
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(model["used"](x), y).backward()
        optimizer.step()
    found = optimizer.posterior()
    torch.testing.assert_close(found.precision.entries["unused.weight"], torch.full((2, 2), 2.0, dtype=torch.double))
    torch.testing.assert_close(found.mean["unused.weight"], torch.zeros(2, 2, dtype=torch.double), atol=1e-9, rtol=0)
    assert bool((found.precision.entries["used.weight"] > 2.01).all())


def test_a_state_saved_between_draw_and_step_leaves_nothing_of_the_draw():
    ours, theirs = perceptron(), perceptron()
    one, other = ivon(ours), ivon(theirs)
    x, y = classes()
    with one.sampled():
        F.cross_entropy(ours(x), y).backward()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    one.zero_grad()
    steps(ours, one, 2)
    steps(theirs, other, 2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_wherever_gradients_are_zeroed_the_draw_counts_alone(inside, to_none):
    ours, theirs = perceptron(), perceptron()
    one, other = ivon(ours), ivon(theirs)
    steps(ours, one, 3)
    x, y = classes()
    for _ in range(3):
        if not inside:
            theirs.zero_grad(set_to_none=to_none)
        with other.sampled():
            if inside:
                theirs.zero_grad() if to_none else other.zero_grad()
            F.cross_entropy(theirs(x), y).backward()
        other.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_overflow_that_the_model_zeroes_in_place_is_forgotten():
    model = perceptron()
    optimizer = ivon(model)
    x, y = classes()
    with optimizer.sampled():
        (float("inf") * F.cross_entropy(model(x), y)).backward()
    for p in model.parameters():
        p.grad.zero_()
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(bool(state["curvature"].isfinite().all()) for state in optimizer.state.values())


def test_a_scale_that_nobody_told_is_found_and_clipping_is_not_taken_for_one():
    model = perceptron()
    x, y = classes()
    optimizer = ivon(model)
    with optimizer.sampled():
        (65536 * F.cross_entropy(model(x), y)).backward()
    for p in model.parameters():
        p.grad /= 65536
    with pytest.raises(holdfast.ArgumentError, match=r"divided by 65536.*loss_scale=scaler"):
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def test_a_closure_beside_a_hold_is_refused():
    model = perceptron()
    optimizer = ivon(model)
    far = Posterior(
        {n: p.detach() + 1 for n, p in model.named_parameters()},
        Diagonal({n: torch.ones_like(p) for n, p in model.named_parameters()}),
    )
    handle = holdfast.hold(optimizer, model, far, num_data=16)
    with pytest.raises(holdfast.ArgumentError, match=r"taken for curvature.*sampled"):
        optimizer.step(lambda: None)
    handle.detach()


def test_some_parameters_have_settings_of_their_own():
    model = perceptron()
    optimizer = ivon(model, options={"2.*": {"lr": 0.0, "start": 2.0}})
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer, 1)
    assert torch.equal(model[2].weight, before["2.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert float(optimizer.state[model[2].weight]["curvature"].min()) > 1.0
    with pytest.raises(holdfast.ArgumentError, match=r"fit none.*`0.weight`"):
        ivon(model, options={"head.*": {"lr": 1.0}})
    with pytest.raises(holdfast.ArgumentError, match=r"no `rate`.*lr, betas"):
        ivon(model, options={"2.*": {"rate": 1.0}})
    with pytest.raises(holdfast.ArgumentError, match="options="):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(holdfast.ArgumentError, match="not copied"):
        copy.deepcopy(optimizer)


def test_a_grown_head_has_a_prior_where_it_is_new():
    model = perceptron()
    optimizer = ivon(model)
    steps(model, optimizer, 2)
    known = optimizer.posterior()
    grown = perceptron()
    grown[2] = nn.Linear(6, 5).double()
    with torch.no_grad():
        grown[2].weight[:3], grown[2].bias[:3] = known.mean["2.weight"], known.mean["2.bias"]
    with pytest.raises(holdfast.SingularError, match=r"expanded\(model, precision="):
        ivon(grown, prior=known.expanded(grown))
    wider = known.expanded(grown, precision=3.0)
    assert wider.precision.entries["2.weight"][3:].tolist() == [[3.0] * 6] * 2
    torch.testing.assert_close(wider.precision.entries["2.weight"][:3], known.precision.entries["2.weight"])
    steps(grown, ivon(grown, prior=wider), 1)


def test_forecasts_doubt_a_start_that_is_left_and_tempering():
    model = perceptron()
    optimizer = ivon(model)
    steps(model, optimizer, 2)
    assert any("IVON started from" in said for said in holdfast.forecast(model, optimizer.posterior()).doubts)
    steps(model, optimizer, 100)
    assert not any("IVON" in said for said in holdfast.forecast(model, optimizer.posterior()).doubts)
    q = holdfast.mean_field(model, around(model), holdfast.categorical, num_data=16, tempering=0.1)
    q(classes())
    assert any("tempered" in said for said in holdfast.forecast(model, q.posterior()).doubts)
    with pytest.raises(holdfast.ArgumentError, match="variational, mean field"):
        holdfast.evidence(q.posterior(), around(model), 1.0)
