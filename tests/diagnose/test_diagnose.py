"""The diagnosis against closed forms and slow twins, in float64."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from cases import CASES, Case, Tied, batchnorm_cnn, regression, relu_mlp, token_rows, vectors
from holdfast.diagnose.fishers import LITERAL, ROW_SUMS, spearman
from holdfast.diagnose.hessian import squares
from holdfast.diagnose.taylor import SECOND_ORDER, Curve, believed
from oracles import fisher_loop, flat, hessian

LINEAR = Case("linear", lambda: nn.Linear(4, 2), holdfast.gaussian(0.5), regression(4, 2))
RELU = Case("relu", relu_mlp, holdfast.categorical, vectors(5, 3))
TANH = Case(
    "tanh", lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), holdfast.categorical, vectors(5, 3)
)


def diagnosed(case, cuts=(10, 20), **options):
    model = case.model()
    return model, holdfast.diagnose(model, case.batches(cuts), case.likelihood, forward=case.forward, **options)


def gradient(case, model, batches):
    total = sum(case.likelihood.nll(model(x), y).sum() for x, y in batches)
    return torch.autograd.grad(total, list(model.parameters()))


def test_for_linear_regression_taylor_is_exact_to_rounding_at_any_distance():
    torch.manual_seed(3)
    _, found = diagnosed(LINEAR, moved=nn.Linear(4, 2).double())
    assert [curve.direction for curve in found.taylor.curves] == [
        "random 1",
        "random 2",
        "random 3",
        "gradient",
        "moved",
    ]
    for curve in found.taylor.curves:
        torch.testing.assert_close(
            torch.tensor(curve.rises), torch.tensor(curve.forecasts[SECOND_ORDER]), rtol=1e-9, atol=1e-13
        )
        radius = curve.radius(SECOND_ORDER, 1.0001)
        assert radius.beyond
        assert radius.rise == curve.rises[-1]
        assert radius.length == pytest.approx(curve.length)


def test_the_gradient_is_autograds_and_its_part_is_its_definition():
    model, found = diagnosed(RELU)
    named = dict(zip(dict(model.named_parameters()), gradient(RELU, model, RELU.batches((30,))), strict=True))
    for name, each in named.items():
        assert found.optimum.by_parameter[name] == pytest.approx(float(each.norm()) / 30, rel=1e-10)
    assert found.optimum.norm == pytest.approx(float(flat(named).norm()) / 30, rel=1e-10)
    layer = torch.cat([named["0.weight"].flatten(), named["0.bias"]])
    assert found.optimum.by_layer["0"] == pytest.approx(float(layer.norm()) / 30, rel=1e-10)
    trace = float(fisher_loop(RELU, model, RELU.batches((30,)), "observed").trace())
    assert found.optimum.aligned == pytest.approx(float(flat(named).square().sum()) / trace, rel=1e-10)
    curve = found.taylor.along("gradient")[0]
    s = math.sqrt(2 * 0.1 / abs(curve.curvature["Hessian"]))
    assert found.optimum.parts["gradient"] == pytest.approx(s * curve.slope / 0.1, rel=1e-10)


def test_at_the_optimum_it_says_so_and_away_from_it_too():
    x, y = LINEAR.batches((60,))[0]
    model = LINEAR.model()
    inputs = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    with torch.no_grad():
        solved = torch.linalg.lstsq(inputs, y).solution.T
        model.weight.copy_(solved[:, :4])
        model.bias.copy_(solved[:, 4])
    at = holdfast.diagnose(model, [(x, y)], LINEAR.likelihood)
    assert at.optimum.norm < 1e-12
    assert "at an optimum" in at.optimum.verdict
    assert at.fishers.of(LITERAL).total < 1e-20
    for curve in at.taylor.along("random"):
        assert curve.radius("½δᵀHδ", 1.0001).beyond
    with torch.no_grad():
        model.bias += 30.0
    away = holdfast.diagnose(model, [(x, y)], LINEAR.likelihood)
    assert "not at an optimum" in away.optimum.verdict
    assert away.optimum.part > 1
    assert "falling learning rate" in " ".join(away.advice)


@pytest.mark.parametrize("case", [LINEAR, RELU, TANH, CASES[3]], ids=str)
def test_the_shares_are_those_of_torch_funcs_hessian(case):
    model, found = diagnosed(case)
    exact = hessian(case, model, case.batches((30,)))
    assert found.structure.exact
    whole = found.structure.all
    assert whole.absolute == pytest.approx(float(exact.diagonal().abs().sum() / exact.abs().sum()), rel=1e-9)
    assert whole.squares == pytest.approx(float(exact.diagonal().square().sum() / exact.square().sum()), rel=1e-9)
    start = 0
    sizes = {}
    for name, p in model.named_parameters():
        layer = name.rpartition(".")[0] or "the model itself"
        sizes[layer] = sizes.get(layer, 0) + p.numel()
    for share, (layer, size) in zip(found.structure.shares[:-1], sizes.items(), strict=True):
        rows = exact[start : start + size]
        block = rows[:, start : start + size]
        start += size
        assert (share.where, share.entries) == (layer, size)
        assert share.absolute == pytest.approx(float(block.diagonal().abs().sum() / block.abs().sum()), rel=1e-9)
        assert share.squares == pytest.approx(float(block.diagonal().square().sum() / rows.square().sum()), rel=1e-9)
        assert share.inside == pytest.approx(float(block.square().sum() / rows.square().sum()), rel=1e-9)


def test_what_structures_recover_is_measured_against_the_hessian():
    model, found = diagnosed(TANH)
    batches = TANH.batches((30,))
    exact = hessian(TANH, model, batches)
    fisher = holdfast.diagonal_fisher(model, batches, TANH.likelihood).dense()
    dense = fisher_loop(TANH, model, batches, "expected")
    for name, matrix in {"diagonal Fisher": fisher, "dense Fisher": dense}.items():
        mine = found.structure.of(name)
        assert mine.cosine == pytest.approx(float((matrix * exact).sum() / matrix.norm() / exact.norm()), rel=1e-8)
        assert mine.error == pytest.approx(float((matrix - exact).norm() / exact.norm()), rel=1e-8)
        assert mine.scale == pytest.approx(float(matrix.trace() / exact.trace()), rel=1e-8)
    for curve in found.taylor.curves:
        assert curve.curvature["dense Fisher"] >= 0


def test_for_linear_regression_the_dense_fisher_is_the_hessian_and_kronecker_too():
    _, found = diagnosed(LINEAR)
    for name in ("dense Fisher", "Kronecker Fisher"):
        assert found.structure.of(name).error < 1e-9
        assert found.structure.of(name).cosine == pytest.approx(1)
    costs = {each.structure: each.cost for each in found.structure.held}
    assert costs["Kronecker Fisher"] == pytest.approx(costs["dense Fisher"], rel=1e-6)
    assert costs["Kronecker Fisher"] < costs["diagonal Fisher"]


def test_what_a_hold_leaves_of_a_moves_cost_is_its_definition():
    model = TANH.model()
    moved = {name: p + torch.randn_like(p) for name, p in model.state_dict().items()}
    found = holdfast.diagnose(model, TANH.batches((30,)), TANH.likelihood, moved=moved)
    move = flat(moved) - flat(model.state_dict())
    fisher = fisher_loop(TANH, model, TANH.batches((30,)), "expected")
    costs = {each.structure: each.cost for each in found.structure.held}
    values, axes = torch.linalg.eigh(hessian(TANH, model, TANH.batches((30,))))
    bent = axes @ torch.diag(values.abs()) @ axes.T
    matrices = {"dense Fisher": fisher, "diagonal Fisher": torch.diag(fisher.diagonal())}
    for name, matrix in matrices.items():
        # Every c on a fine grid: the one that keeps half.
        best = None
        for c in torch.logspace(-8, 8, 4001, dtype=torch.float64):
            delta = torch.linalg.solve(matrix + c * torch.eye(len(move), dtype=torch.float64), c * move)
            off = abs(float(move @ delta / (move @ move)) - 0.5)
            if best is None or off < best[0]:
                best = (off, float(delta @ bent @ delta / (move @ bent @ move)))
        assert best[0] < 0.01
        assert costs[name] == pytest.approx(best[1], rel=0.05)
    assert costs["dense Fisher"] != costs["diagonal Fisher"]


def test_the_estimates_are_within_four_of_their_stated_errors():
    _, exact = diagnosed(TANH, probes=3)
    assert exact.structure.probes == 0
    _, estimate = diagnosed(TANH, probes=400, exact_up_to=0)
    assert not estimate.structure.exact
    for mine, true in zip(estimate.structure.shares, exact.structure.shares, strict=True):
        assert mine.absolute is None
        assert 0 < mine.error < 0.1
        assert abs(mine.squares - true.squares) < 4 * mine.error
    for mine, true in zip(estimate.structure.recovered, exact.structure.recovered, strict=False):
        assert mine.structure == true.structure
        assert mine.cosine == pytest.approx(true.cosine, abs=0.05)
        assert mine.error == pytest.approx(true.error, abs=0.05)
    assert estimate.fishers.negative is None
    assert "by 400 probes" in " ".join(estimate.advice)
    for mine, true in zip(estimate.taylor.curves, exact.taylor.curves, strict=True):
        assert mine.curvature["Hessian"] == pytest.approx(true.curvature["Hessian"], rel=1e-9)


def test_the_stated_error_is_the_spread_of_the_estimate_over_seeds():
    matrix = torch.randn(30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    matrix = matrix + matrix.T + 8 * torch.eye(30, dtype=torch.float64)
    true = float(matrix.diagonal().square().sum() / matrix.square().sum())
    found = []
    for seed in range(200):
        coins = torch.randint(0, 2, (16, 30), generator=torch.Generator().manual_seed(seed))
        signs = (2 * coins - 1).double()
        found.append(squares(signs * (signs @ matrix)))
    values, errors = torch.tensor(found, dtype=torch.float64).T
    assert float(values.mean()) == pytest.approx(true, abs=4 * float(values.std()) / 200**0.5 + 0.01)
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.35)


def test_for_a_relu_network_the_exact_fishers_diagonal_is_the_hessians_and_for_tanh_it_is_not():
    _, relu = diagnosed(RELU)
    same = relu.fishers.of("expected")
    assert (same.scale, same.rank) == (pytest.approx(1, rel=1e-9), pytest.approx(1, abs=1e-3))
    assert relu.fishers.negative == 0
    _, tanh = diagnosed(TANH)
    other = tanh.fishers.of("expected")
    assert abs(other.scale - 1) > 1e-3
    assert 0.5 < other.rank < 0.9999


def test_the_other_diagonals_are_their_definitions():
    model, found = diagnosed(TANH)
    batches = TANH.batches((30,))
    exact = hessian(TANH, model, batches)
    total = torch.cat([each.flatten() for each in gradient(TANH, model, batches)])
    trace = float(exact.trace())
    expected = {
        LITERAL: total.square(),
        ROW_SUMS: exact.sum(1).abs(),
        "observed": fisher_loop(TANH, model, batches, "observed").diagonal(),
        "expected": fisher_loop(TANH, model, batches, "expected").diagonal(),
    }
    for name, entries in expected.items():
        mine = found.fishers.of(name)
        assert mine.total == pytest.approx(float(entries.sum()) / 30, rel=1e-8)
        assert mine.scale == pytest.approx(float(entries.sum()) / trace, rel=1e-8)
        assert mine.rank == pytest.approx(spearman(entries, exact.diagonal()), abs=1e-6)
    assert found.fishers.of("sampled").total != found.fishers.of("expected").total


def test_the_observed_fisher_fades_with_confidence():
    model = nn.Linear(4, 3).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        model.weight *= 6
        y = model(x).argmax(1)
    found = holdfast.diagnose(model, DataLoader(TensorDataset(x, y), 64), holdfast.categorical)
    probabilities = model(x).detach().softmax(-1).amax(-1)
    assert found.fishers.confidence == pytest.approx(float(probabilities.mean()))
    assert [group.examples for group in found.fishers.groups] == [100] * 4
    sure = [group.confidence for group in found.fishers.groups]
    ratios = [group.ratio for group in found.fishers.groups]
    assert sure == sorted(sure)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 0.1 * ratios[0]
    assert "Do not use observed labels" in " ".join(found.advice)


def test_spearman_by_hand():
    a = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spearman(a, torch.tensor([5.0, 6.0, 7.0, 8.0, 7.0])) == pytest.approx(0.8207826816681233)  # a tie
    assert spearman(a, -a.exp()) == pytest.approx(-1)
    assert spearman(a, torch.tensor([2.0, 1.0, 4.0, 3.0, 5.0])) == pytest.approx(0.8)  # 1 − 6·4/(5·24)
    assert spearman(a, torch.ones(5)) == 0


def test_a_forecast_is_believed_within_a_factor_or_a_hundredth_of_a_nat():
    assert believed(1.0, 2.0)
    assert believed(2.0, 1.0)
    assert not believed(2.1, 1.0)
    assert not believed(1.1, 1.0, 1.05)
    assert not believed(-1.0, 1.0)
    assert believed(-0.005, 0.004)
    assert not believed(1.0, math.inf)
    assert not believed(1.0, math.nan)
    curve = Curve("random 1", 3.0, 0.5, (0.25, 0.5, 1.0), (0.3, 1.0, 40.0), 0.0, {"Hessian": 8.0})
    assert curve.forecasts["½δᵀHδ"] == (0.25, 1.0, 4.0)
    radius = curve.radius("½δᵀHδ")
    assert (radius.distance, radius.length, radius.relative, radius.rise, radius.beyond) == (0.5, 1.5, 0.25, 1.0, False)
    assert curve.radius("½δᵀHδ", 1.1).distance == 0
    assert str(curve.radius("½δᵀHδ", 1.1)) == "nowhere"


def test_nothing_depends_on_how_the_batches_are_cut():
    _, one = diagnosed(TANH, (30,))
    _, many = diagnosed(TANH, (7, 11, 12))
    assert many.optimum.norm == pytest.approx(one.optimum.norm, rel=1e-10)
    assert many.structure.shares[-1].squares == pytest.approx(one.structure.shares[-1].squares, rel=1e-10)
    for a, b in zip(one.taylor.curves, many.taylor.curves, strict=True):
        torch.testing.assert_close(torch.tensor(a.rises), torch.tensor(b.rises))
    # 1, 2 and 3 batches: the last is of all data.
    assert [round(data * many.entries) for data, _ in many.structure.growth] == [7, 18, 30]
    assert many.structure.growth[-1][1] == pytest.approx(one.structure.all.absolute)


@pytest.mark.parametrize(
    "case",
    [
        Case("bernoulli", CASES[2].make, holdfast.bernoulli, CASES[2].data),
        Case("tokens", Tied, holdfast.tokens(shift=True), token_rows),
        Case(
            "custom",
            lambda: nn.Linear(4, 2),
            holdfast.custom(lambda output, target: (output - target).abs().exp().sum(-1)),
            regression(4, 2),
        ),
    ],
    ids=str,
)
def test_other_likelihoods_have_the_fishers_that_they_have(case):
    _, found = diagnosed(case, (12, 8))
    has = {name for name in ("observed", "sampled", "expected") if found.fishers.has(name)}
    assert (
        has
        == {
            "bernoulli": {"observed", "sampled", "expected"},
            "tokens": {"observed", "sampled"},
            "custom": {"observed"},
        }[case.name]
    )
    assert found.fishers.best == {"bernoulli": "expected", "tokens": "sampled", "custom": "observed"}[case.name]
    assert (found.fishers.confidence is None) == (case.name == "custom")
    assert all(math.isfinite(rise) for curve in found.taylor.curves for rise in curve.rises)
    assert found.unit == ("token" if case.name == "tokens" else "example")


def everything(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    return state, grads, pointers, modes


@pytest.mark.parametrize("exact_up_to", [2000, 0])
def test_the_model_and_the_random_state_are_left_as_they_were(exact_up_to):
    model = batchnorm_cnn().double()
    x, y = torch.randn(24, 2, 5, 5, dtype=torch.float64), torch.randint(0, 3, (24,))
    nn.functional.cross_entropy(model.train()(x), y).backward()
    model[1].eval()
    loss = model(x).square().sum()
    before, state = everything(model), torch.get_rng_state()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    moved = copy.deepcopy(model).requires_grad_(True)
    with torch.no_grad():
        moved[5].weight += 0.1
    found = holdfast.diagnose(model, loader, holdfast.categorical, moved=moved, exact_up_to=exact_up_to)
    assert found.structure.exact == (exact_up_to > 0)
    assert torch.equal(torch.get_rng_state(), state)
    after = everything(model)
    for mine, theirs in zip(before[:2], after[:2], strict=True):
        for name, tensor in mine.items():
            assert tensor is None or torch.equal(tensor, theirs[name]), name
    assert before[2:] == after[2:]
    loss.backward()  # a graph made before


def test_it_is_the_same_again_and_printed_with_all_its_parts():
    _, one = diagnosed(TANH)
    _, two = diagnosed(TANH)
    assert str(one) == str(two)
    for part in (
        "0. Optimum",
        "1. Taylor",
        "2. Diagonal",
        "2. Structures",
        "3. F against F′",
        "by confidence",
        "Advice",
    ):
        assert part in str(one)
    assert one.taylor.along("random") != diagnosed(TANH, seed=1)[1].taylor.along("random")
    assert "30 examples are few" in str(one)


def test_a_far_fine_tune_is_told_to_retrain_and_a_near_one_to_hold():
    model, batches = TANH.model(), TANH.batches((60,))
    near, far = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300)

    def closure():
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in model.parameters())
        loss = nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]) + 0.01 * decay
        loss.backward()
        return loss

    optimizer.step(closure)
    generator = torch.Generator().manual_seed(4)
    for other, by in ((near, 0.2), (far, 30.0)):
        with torch.no_grad():
            for mine, p in zip(other.parameters(), model.parameters(), strict=True):
                mine.copy_(p + by * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    held = holdfast.diagnose(model, batches, holdfast.categorical, moved=near)
    assert held.advice[-1].startswith(("Hold", "No hold"))
    gone = holdfast.diagnose(model, batches, holdfast.categorical, moved=far.state_dict())
    assert gone.advice[-1].startswith("Train again on everything")
    (curve,) = gone.taylor.along("moved")
    assert curve.radius("½δᵀHδ").distance < 0.25
    # The last point is the moved model itself.
    x, y = batches[0]
    rise = nn.functional.cross_entropy(far(x), y) - nn.functional.cross_entropy(model(x), y)
    assert curve.rises[-1] == pytest.approx(rise.item(), rel=1e-9)


class Scaled(nn.Module):
    """One number for all outputs: a parameter without an axis."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("exact_up_to", [0, 2000])
def test_a_parameter_without_an_axis_and_a_label_that_is_one_number(exact_up_to):
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    found = holdfast.diagnose(Scaled(), [(x, y)], holdfast.categorical, exact_up_to=exact_up_to)
    assert found.entries == 16
    one = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    found = holdfast.diagnose(one, [(x, (y > 0).float())], holdfast.bernoulli, exact_up_to=exact_up_to)
    assert 0.5 <= found.fishers.confidence <= 1


def test_a_fine_tune_that_lowered_the_old_loss_needs_no_hold():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    model = nn.Linear(4, 3)
    moved = copy.deepcopy(model)
    optimizer = torch.optim.Adam(moved.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(moved(x), y).backward()
        optimizer.step()
    found = holdfast.diagnose(model, [(x, y)], holdfast.categorical, moved=moved)
    assert found.advice[-1].startswith("No hold is needed: the fine-tune lowered the old loss by")


def test_a_dead_network_is_not_taken_for_a_sure_one():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    found = holdfast.diagnose(model, [(torch.randn(40, 4), torch.arange(40) % 3)], holdfast.categorical)
    assert "do not depend on its parameters" in found.advice[0]


def test_softened_it_is_the_cross_entropy_that_is_diagnosed():
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 3), [(torch.randn(40, 4), torch.arange(40) % 3)]
    plain, soft = (holdfast.diagnose(model, batches, each) for each in (holdfast.categorical, holdfast.softened()))
    assert soft.advice == plain.advice
    assert "the cross-entropy itself" in soft.doubts[0]


def test_low_rank_figures_do_not_depend_much_on_how_the_data_is_cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(300, 10), torch.arange(300) % 3
    whole, cut = (
        holdfast.diagnose(model, list(zip(x.split(size), y.split(size), strict=True)), holdfast.categorical)
        for size in (300, 30)
    )
    one, other = (found.structure.of("low-rank Fisher") for found in (whole, cut))
    assert one.cosine == pytest.approx(other.cosine, abs=0.05)


def test_where_no_layer_is_factored_kronecker_is_not_advised():
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(0.3 * torch.randn(12, 4, 3))

        def forward(self, x):
            return sum((x[:, i : i + 1] * self.table[i][i % 4].unsqueeze(0)) for i in range(12))

    torch.manual_seed(0)
    model, batches = Picked(), [(torch.randn(250, 12), torch.arange(250) % 3)]
    found = holdfast.diagnose(model, batches, holdfast.categorical, exact_up_to=0)
    assert not found.structure.factored
    assert not any("Use kronecker_fisher" in line for line in found.advice)
