"""The derivations' results as tests, by their T-numbers: float64, distinct data for every task."""

import itertools
import math

import pytest
import torch
from torch import nn

import holdfast
from cases import CASES, Case, relu_mlp, vectors
from oracles import flat, hessian

LIKELIHOOD = holdfast.gaussian(0.7)


def linear_tasks(count, n=9):
    """Regression tasks with their own inputs and their own noise."""
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    tasks = []
    for _ in range(count):
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        tasks.append((x, x @ truth + 0.7 * torch.randn(n, 2, generator=generator, dtype=torch.float64)))
    return tasks


def to_map_(model, posterior, x, y, likelihood=LIKELIHOOD, steps=1):
    """Newton's method on nll + penalty: exact in one step where the objective is quadratic."""
    params = list(model.parameters())
    for _ in range(steps):
        loss = likelihood.nll(model(x), y).sum() + holdfast.penalty(model, posterior)
        grads = dict(zip(posterior.mean, torch.autograd.grad(loss, params), strict=True))
        step = (posterior.precision + holdfast.dense_fisher(model, [(x, y)], likelihood)).solve(grads)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= step[name]


def learned(tasks):
    """The posterior after the tasks in turn, and the evidence log p(D) = Σ log p(Dₜ | D₁…ₜ₋₁)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    posterior = holdfast.prior(model, precision=0.3, mean=0.0)
    evidence = torch.zeros((), dtype=torch.float64)
    for x, y in tasks:
        to_map_(model, posterior, x, y)
        after = holdfast.consolidate(posterior, model, holdfast.dense_fisher(model, [(x, y)], LIKELIHOOD))
        evidence = evidence - LIKELIHOOD.nll(model(x), y).sum() + posterior.log_prob(model) - after.log_prob(model)
        posterior = after
    return posterior, evidence.detach()


# T1, T2: the recursion


@pytest.mark.parametrize("order", [1, -1, 7], ids=["as-given", "reversed", "shuffled"])
def test_sequential_equals_joint_for_linear_gaussian_models_over_20_tasks_in_any_order(order):
    tasks = linear_tasks(20)
    joint, evidence = learned([(torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks]))])
    turn = [tasks[(order * i) % 20] for i in range(20)] if order > 0 else tasks[::-1]
    sequential, summed = learned(turn)
    torch.testing.assert_close(flat(sequential.mean), flat(joint.mean), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sequential.precision.dense(), joint.precision.dense(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(summed, evidence, rtol=1e-9, atol=1e-9)
    assert sequential.num_data == joint.num_data == 180


def test_the_evidence_is_that_of_the_marginal_gaussian():
    """Against a computation that shares nothing with the recursion: y ~ N(0, X Xᵀ/0.3 + σ²) for each output."""
    tasks = linear_tasks(3)
    _, evidence = learned(tasks)
    x, y = torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks])
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    covariance = design @ design.T / 0.3 + 0.49 * torch.eye(len(x), dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
    torch.testing.assert_close(evidence, marginal.log_prob(y.T).sum(), rtol=1e-9, atol=1e-9)


# T3, T4, T12: Laplace and the Fisher


def test_log_prob_is_the_normalised_gaussian():
    torch.manual_seed(3)
    model = nn.Linear(2, 2).double()
    root = torch.randn(6, 6, dtype=torch.float64)
    mean = {name: p.detach() + 1 for name, p in model.named_parameters()}
    precision = holdfast.Dense({name: p.shape for name, p in mean.items()}, root @ root.T + torch.eye(6))
    value = holdfast.Posterior(mean, precision).log_prob(model)
    normal = torch.distributions.MultivariateNormal(flat(mean), precision_matrix=precision.matrix)
    torch.testing.assert_close(value, normal.log_prob(flat(dict(model.named_parameters()))))


def test_the_exact_fisher_diagonal_is_the_hessian_diagonal_of_a_relu_network():
    case = CASES[0]
    fisher = holdfast.diagonal_fisher(case.model(), case.batches((30,)), case.likelihood, targets="expected")
    exact = hessian(case, case.model(), case.batches((30,))).diagonal()
    torch.testing.assert_close(flat(fisher.entries), exact, rtol=1e-9, atol=1e-12)


def test_and_is_not_for_a_gelu_network():
    case = Case(
        "gelu", lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)), holdfast.categorical, vectors(5, 3)
    )
    fisher = holdfast.diagonal_fisher(case.model(), case.batches((30,)), case.likelihood, targets="expected")
    exact = hessian(case, case.model(), case.batches((30,))).diagonal()
    assert (flat(fisher.entries) - exact).norm() > 1e-3 * exact.norm()


# T5, T6, T7, T8: EWC with J and with J_original


def pretend_tasks(structure):
    """Three optima of one model with their Fishers, in which some entries are exactly zero."""
    tasks = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).double()
        x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 3, (12,))
        x[:, 1] = 0  # a border pixel: its weights never matter
        tasks.append((model, structure(model, [(x, y)], holdfast.categorical)))
    return tasks


@pytest.mark.parametrize("structure", [holdfast.diagonal_fisher, holdfast.dense_fisher])
@pytest.mark.parametrize("l2", [0.0, 0.4])
def test_j_original_is_the_merged_gaussian_up_to_a_constant(structure, l2):
    strengths = [0.5, 1.0, 20.0]
    tasks = pretend_tasks(structure)
    parts = [
        holdfast.consolidate(holdfast.prior(model, precision=l2), model, strength * fisher)
        for strength, (model, fisher) in zip(strengths, tasks, strict=True)
    ]
    merged = holdfast.merge(*parts)
    pairwise = holdfast.merge(holdfast.merge(parts[0], parts[1]), parts[2])
    gaps, probe = [], nn.Linear(4, 3).double()
    for seed in range(4):
        torch.manual_seed(10 + seed)
        with torch.no_grad():
            for parameter in probe.parameters():
                parameter.copy_(torch.randn_like(parameter))
        # J_original written out: ½ Σₜ (λₜ δᵀFₜδ + ℓ₂ |δ|²), one term per task.
        original = sum(
            0.5 * strength * fisher.quadratic(delta) + 0.5 * l2 * sum(d.square().sum() for d in delta.values())
            for strength, (model, fisher) in zip(strengths, tasks, strict=True)
            for delta in [
                {name: p - dict(model.named_parameters())[name].detach() for name, p in probe.named_parameters()}
            ]
        )
        for one in (merged, pairwise):
            value = holdfast.penalty(probe, one)
            params = list(probe.parameters())
            expected = torch.cat([g.flatten() for g in torch.autograd.grad(original, params, retain_graph=True)])
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, params)])
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)
            gaps.append(float((original - value).detach()))
    assert max(gaps) - min(gaps) < 1e-8
    assert max(gaps) > 1e-3  # the constant is there
    if l2 == 0:  # where nothing is known the mean is the last one given
        last = tasks[-1][0].weight.detach()
        torch.testing.assert_close(merged.mean["weight"][:, 1], last[:, 1], rtol=0, atol=1e-12)


def test_j_is_one_penalty_at_the_last_optimum_with_l2_once():
    strengths, l2 = [0.5, 1.0, 20.0], 0.4
    tasks = pretend_tasks(holdfast.diagonal_fisher)
    posterior = holdfast.prior(tasks[0][0], precision=l2)
    for strength, (model, fisher) in zip(strengths, tasks, strict=True):
        posterior = holdfast.consolidate(posterior, model, strength * fisher)
    probe, last = nn.Linear(4, 3).double(), dict(tasks[-1][0].named_parameters())
    written_out = torch.zeros((), dtype=torch.float64)
    for name, parameter in probe.named_parameters():
        weight = l2 + sum(s * f.entries[name] for s, (_, f) in zip(strengths, tasks, strict=True))
        written_out = written_out + 0.5 * (weight * (parameter - last[name].detach()).square()).sum()
    torch.testing.assert_close(holdfast.penalty(probe, posterior), written_out)
    assert posterior.num_data == pytest.approx(12 * sum(strengths))


def test_a_mean_fisher_needs_lambda_n_for_the_same_penalty():
    (model, fisher), *_ = pretend_tasks(holdfast.diagonal_fisher)
    probe = nn.Linear(4, 3).double()
    mean = (1 / 12) * fisher
    assert mean.num_data == pytest.approx(1)
    bayes = holdfast.consolidate(holdfast.prior(model), model, fisher)
    same = holdfast.consolidate(holdfast.prior(model), model, 12 * mean)
    torch.testing.assert_close(holdfast.penalty(probe, same), holdfast.penalty(probe, bayes))


def test_online_ewc_decays_the_precision_and_its_data():
    (first, f1), (second, f2), _ = pretend_tasks(holdfast.diagonal_fisher)
    one = holdfast.consolidate(holdfast.prior(first), first, f1)
    two = holdfast.consolidate(one, second, f2, decay=0.25)
    torch.testing.assert_close(flat(two.precision.diagonal()), 0.25 * flat(f1.entries) + flat(f2.entries))
    assert two.num_data == pytest.approx(0.25 * 12 + 12)
    assert torch.equal(two.mean["weight"], second.weight)


# T9, T14: the optimization view


def test_the_penalty_is_the_old_loss_where_the_old_loss_is_quadratic():
    """L_A(θ) = L_A(μ) + ½ δᵀHδ: for linear regression at its optimum, exact at any distance."""
    ((x, y),) = linear_tasks(1, n=40)
    model = nn.Linear(4, 2).double()
    flat_prior = holdfast.prior(model)
    to_map_(model, flat_prior, x, y)
    posterior = holdfast.consolidate(flat_prior, model, holdfast.dense_fisher(model, [(x, y)], LIKELIHOOD))
    optimum = LIKELIHOOD.nll(model(x), y).sum()
    for distance in (0.1, 3.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += distance * torch.randn_like(parameter)
        rise = LIKELIHOOD.nll(model(x), y).sum() - optimum
        torch.testing.assert_close(holdfast.penalty(model, posterior), rise, rtol=1e-9, atol=1e-9)


def test_with_a_diagonal_hessian_ewc_is_joint_training():
    """min λL_A + L_B ≡ min L_B + λ/2 Σ F′δ², under A1 and A2: orthogonal inputs, squared loss."""
    x, truth = math.sqrt(8) * torch.eye(4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    (xb, yb), likelihood, strength = linear_tasks(1)[0], holdfast.gaussian(), 3.0
    a, ya = nn.Linear(4, 2, bias=False).double(), x @ truth[:, :2]
    to_map_(a, holdfast.prior(a), x, ya, likelihood)
    second = holdfast.diagonal_hessian(a, [(x, ya)], likelihood)
    held = nn.Linear(4, 2, bias=False).double()
    to_map_(held, holdfast.consolidate(holdfast.prior(a), a, strength * second), xb, yb, likelihood)
    joint = nn.Linear(4, 2, bias=False).double()
    both_x = torch.cat([x * math.sqrt(strength), xb])
    to_map_(joint, holdfast.prior(joint), both_x, torch.cat([ya * math.sqrt(strength), yb]), likelihood)
    torch.testing.assert_close(held.weight, joint.weight, rtol=1e-9, atol=1e-9)


# The held optimum


def test_the_held_optimum_of_a_convex_problem_is_the_map_found_by_lbfgs():
    torch.manual_seed(4)
    model = nn.Linear(4, 3).double()
    old = (torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 3, (30,)))
    x, y = torch.randn(20, 4, dtype=torch.float64) + 1, torch.randint(0, 3, (20,))
    posterior = holdfast.consolidate(
        holdfast.prior(model, precision=0.1), model, holdfast.diagonal_fisher(model, [old], holdfast.categorical)
    )
    twin = nn.Linear(4, 3).double()
    search = torch.optim.LBFGS(twin.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16,
                               line_search_fn="strong_wolfe")  # fmt: skip

    def objective():
        search.zero_grad()
        loss = holdfast.categorical.nll(twin(x), y).sum() + 2.5 * holdfast.penalty(twin, posterior)
        loss.backward()
        return loss

    search.step(objective)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with holdfast.hold(optimizer, model, posterior, num_data=20, strength=2.5):
        for _ in range(1500):
            optimizer.zero_grad()
            holdfast.categorical.nll(model(x), y).mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(model.bias, twin.bias, rtol=1e-7, atol=1e-7)


# T16: distillation to second order


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=str)
def test_the_kl_to_the_old_model_tends_to_half_the_fisher_quadratic(case):
    batches = case.batches((20,))
    model, old = case.model(), case.model()
    fisher = holdfast.dense_fisher(model, batches, case.likelihood, targets="expected")
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    errors = []
    for size in (1e-2, 1e-3):
        with torch.no_grad():
            for (name, parameter), anchor in zip(model.named_parameters(), old.parameters(), strict=True):
                parameter.copy_(anchor + size * direction[name])
        x = batches[0][0]
        divergence = torch.distributions.kl_divergence(_distribution(case, old(x)), _distribution(case, model(x))).sum()
        quadratic = 0.5 * fisher.quadratic({name: size * d for name, d in direction.items()})
        errors.append(abs((divergence / quadratic).item() - 1))
    assert errors[0] < 0.2
    assert errors[1] < max(0.2 * errors[0], 1e-9)


def _distribution(case, output):
    if case.likelihood is holdfast.categorical:
        return torch.distributions.Categorical(logits=output)
    if case.likelihood is holdfast.bernoulli:
        return torch.distributions.Bernoulli(logits=output)
    return torch.distributions.Normal(output, case.likelihood.scale)


def test_fishers_of_separate_data_add_up():
    case = Case("mlp", relu_mlp, holdfast.categorical, vectors(5, 3))
    parts = [holdfast.dense_fisher(case.model(), [batch], case.likelihood) for batch in case.batches((4, 3, 6))]
    whole = holdfast.dense_fisher(case.model(), case.batches((13,)), case.likelihood)
    for order in itertools.permutations(parts):
        total = order[0] + order[1] + order[2]
        torch.testing.assert_close(total.matrix, whole.matrix, rtol=1e-9, atol=1e-12)
        assert total.num_data == 13
