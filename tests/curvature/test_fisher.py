import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from cases import CASES, Case, DataParallel, PositionsLookLikeExamples, relu_mlp, vectors
from holdfast.curvature.batches import read
from holdfast.curvature.scores import Scoring
from oracles import fisher_loop, flat

RUNS = [(case, targets) for case in CASES for targets in case.targets]
TWO_CUTS = (5, 2)


def drawn(case: Case, batches: list, seed: int = 0) -> list:
    """The batches with the labels that `targets="sampled"` draws from the model."""
    model = case.model().eval()
    scoring = Scoring(model, case.likelihood, "sampled", seed, case.forward)
    labeled = []
    for batch in read(batches, model):
        batch, _ = scoring.counted(batch)
        content = batch.content
        labeled.append(
            {**content, "labels": batch.target} if isinstance(content, dict) else (*content[:-1], batch.target)
        )
    return labeled


@pytest.mark.parametrize(("case", "targets"), RUNS, ids=lambda v: str(v))
def test_every_fisher_equals_a_loop_over_examples(case, targets):
    batches = case.batches(TWO_CUTS)
    diagonal = holdfast.diagonal_fisher(case.model(), batches, case.likelihood, targets=targets, forward=case.forward)
    dense = holdfast.dense_fisher(case.model(), batches, case.likelihood, targets=targets, forward=case.forward)
    loop = fisher_loop(case, case.model(), drawn(case, batches) if targets == "sampled" else batches, targets)
    torch.testing.assert_close(dense.matrix, loop, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(flat(diagonal.entries), loop.diagonal(), rtol=1e-9, atol=1e-12)
    assert float(loop.abs().max()) > 1e-6


@pytest.mark.parametrize(("case", "targets"), RUNS, ids=lambda v: str(v))
def test_nothing_depends_on_how_the_batches_are_cut(case, targets):
    found = [
        holdfast.diagonal_fisher(
            case.model(), case.batches(cuts), case.likelihood, targets=targets, forward=case.forward
        )
        for cuts in [(7,), (3, 4), (1, 1, 5), (1,) * 7]
    ]
    for other in found[1:]:
        torch.testing.assert_close(flat(other.entries), flat(found[0].entries), rtol=1e-9, atol=1e-12)
        assert other.num_data == found[0].num_data


@pytest.mark.parametrize("cuts", [(5,), (5, 5), (3, 5, 2)])
def test_positions_that_only_look_like_examples_are_left_to_the_general_path(cuts):
    case = Case("positions", PositionsLookLikeExamples, holdfast.categorical, vectors(4, 3))
    fisher = holdfast.diagonal_fisher(case.model(), case.batches(cuts), case.likelihood)
    loop = fisher_loop(case, case.model(), case.batches(cuts), "expected")
    torch.testing.assert_close(flat(fisher.entries), loop.diagonal(), rtol=1e-9, atol=1e-12)


def test_a_layer_with_a_call_that_leads_nowhere_is_left_to_the_general_path():
    class Discards(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.first(2 * x)
            return self.head(torch.tanh(self.first(x)))

    case = Case("discards", Discards, holdfast.categorical, vectors(3, 3))
    fisher = holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood)
    loop = fisher_loop(case, case.model(), case.batches(), "expected")
    torch.testing.assert_close(flat(fisher.entries), loop.diagonal(), rtol=1e-9, atol=1e-12)


def test_the_sampled_fisher_is_within_four_standard_errors_of_the_exact_one():
    case = CASES[0]
    batches = case.batches((40,))
    exact = flat(holdfast.diagonal_fisher(case.model(), batches, case.likelihood, targets="expected").entries)
    draws = torch.stack([
        flat(holdfast.diagonal_fisher(case.model(), batches, case.likelihood, targets="sampled", seed=seed).entries)
        for seed in range(200)
    ])  # fmt: skip
    error = draws.std(0) / 200**0.5
    assert ((draws.mean(0) - exact).abs() <= 4 * error + 1e-12).all()
    assert draws.std(0).max() > 0.1 * exact.max()  # it is random


def test_a_seed_repeats_and_another_differs():
    case = CASES[0]
    once, again, other = (
        flat(holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood, targets="sampled", seed=s).entries)
        for s in (3, 3, 4)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_observed_fisher_fades_with_confidence_faster_than_the_exact_one():
    """As (1−p)² against (1−p)."""
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.zeros(50, dtype=torch.long)
    model = nn.Linear(4, 2).double()
    with torch.no_grad():
        model.weight.zero_()
    found = {}
    for margin in (4.0, 8.0):
        with torch.no_grad():
            model.bias.copy_(torch.tensor([margin, 0.0]))
        for targets in ("expected", "observed"):
            fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical, targets=targets)
            found[margin, targets] = fisher.entries["bias"].sum()
    rest = torch.exp(torch.tensor(-4.0, dtype=torch.float64))
    torch.testing.assert_close(found[8.0, "expected"] / found[4.0, "expected"], rest, rtol=0.05, atol=0)
    torch.testing.assert_close(found[8.0, "observed"] / found[4.0, "observed"], rest**2, rtol=0.05, atol=0)


def test_squaring_the_batch_gradient_would_be_something_else():
    """The field's common mistake, shown on the same data: it is a small part of the truth."""
    case = CASES[0]
    ((x, y),) = case.batches((64,))
    model = case.model()
    exact = flat(holdfast.diagonal_fisher(model, [(x, y)], case.likelihood, targets="observed").entries).sum()
    grads = torch.autograd.grad(case.likelihood.nll(model(x), y).mean(), list(model.parameters()))
    squared = 64 * sum(g.square().sum() for g in grads)
    assert squared < 0.2 * exact


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision_models_accumulate_in_float32(dtype, tolerance):
    case = CASES[0]
    ((x, y),) = case.batches((30,))
    low = case.model().to(dtype)
    fisher = holdfast.diagonal_fisher(low, [(x.to(dtype), y)], case.likelihood, targets="observed")
    assert {entries.dtype for entries in fisher.entries.values()} == {torch.float32}
    twin = case.model().to(dtype).double()
    exact = holdfast.diagonal_fisher(twin, [(x.to(dtype).double(), y)], case.likelihood, targets="observed")
    for name, entries in fisher.entries.items():
        assert (entries - exact.entries[name]).norm() <= tolerance * exact.entries[name].norm()


@pytest.mark.parametrize("fisher", [holdfast.diagonal_fisher, holdfast.dense_fisher, holdfast.diagonal_hessian])
def test_autocast_around_the_call_reaches_neither_gradients_nor_sums(fisher):
    """With a model that stays in float32 itself: half precision could only come from the backward pass or the sums."""
    case = CASES[0]
    ((x, y),) = case.batches((30,))
    model = case.model().float()

    def forward(model, batch):
        with torch.autocast("cpu", enabled=False):
            return model(batch[0])

    exact = fisher(model, [(x.float(), y)], case.likelihood, forward=forward)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fisher(model, [(x.float(), y)], case.likelihood, forward=forward)
    for name, tensor in mixed.tensors.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, exact.tensors[name], rtol=1e-4, atol=1e-5)


def test_a_model_under_autocast_is_scored_in_its_own_precision():
    case = CASES[0]
    ((x, y),) = case.batches((30,))
    model = case.model().float()
    exact = holdfast.diagonal_fisher(model, [(x.float(), y)], case.likelihood, targets="observed")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = holdfast.diagonal_fisher(model, [(x.float(), y)], case.likelihood, targets="observed")
    for name, entries in mixed.entries.items():
        assert (entries - exact.entries[name]).norm() <= 0.1 * exact.entries[name].norm()
        assert not torch.equal(entries, exact.entries[name])


def test_compiled_and_wrapped_models_give_the_same_numbers_under_the_same_names():
    case = CASES[0]
    plain = holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood)
    for wrapped in (DataParallel(case.model()), torch.compile(case.model(), backend="eager")):
        fisher = holdfast.diagonal_fisher(wrapped, case.batches(), case.likelihood)
        assert list(fisher.entries) == list(plain.entries)
        assert torch.equal(flat(fisher.entries), flat(plain.entries))
    in_place = case.model()
    in_place.compile(backend="eager")
    fisher = holdfast.diagonal_fisher(in_place, case.batches(), case.likelihood)
    torch.testing.assert_close(flat(fisher.entries), flat(plain.entries))


def test_what_a_fisher_says_of_itself():
    case = CASES[0]
    (source,) = holdfast.diagonal_fisher(case.model(), case.batches((4, 3)), case.likelihood).sources
    assert (source.num_data, source.unit, source.likelihood, source.targets) == (
        7,
        "example",
        "categorical",
        "expected",
    )
    tokens = next(case for case in CASES if case.name == "tied-tokens")
    fisher = holdfast.diagonal_fisher(tokens.model(), tokens.batches((4, 3)), tokens.likelihood)
    labels = torch.cat([batch["labels"][:, 1:] for batch in tokens.batches((4, 3))])
    assert (fisher.num_data, fisher.unit) == (int((labels != -100).sum()), "token")
    assert fisher.sources[0].targets == "sampled"


def test_batches_may_be_triples_bare_inputs_or_on_a_generator():
    case = CASES[0]
    ((x, y),) = case.batches()
    expected = flat(holdfast.diagonal_fisher(case.model(), [(x, y)], case.likelihood).entries)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = case.model()

        def forward(self, x, mask):
            return self.net(x * mask)

    triple = holdfast.diagonal_fisher(Masked(), [(x, torch.ones_like(x), y)], case.likelihood)
    torch.testing.assert_close(flat(triple.entries), expected)
    for batches in ([x], [(x,)], (pair for pair in [(x[:3], y[:3]), (x[3:], y[3:])])):
        torch.testing.assert_close(
            flat(holdfast.diagonal_fisher(case.model(), batches, case.likelihood).entries), expected
        )


@pytest.mark.parametrize(
    "function",
    [holdfast.diagonal_fisher, holdfast.kronecker_fisher, holdfast.dense_fisher, holdfast.diagonal_hessian],
)
def test_batches_made_under_inference_mode_are_batches(function):
    model, (x, y) = relu_mlp().double(), (torch.randn(6, 5, dtype=torch.double), torch.arange(6) % 3)
    with torch.inference_mode():
        made = (x.clone(), y.clone())
    found, expected = (function(model, [batch], holdfast.categorical).dense() for batch in (made, (x, y)))
    assert torch.equal(found, expected)


def test_a_likelihood_that_was_not_called_is_told_so_among_all_there_are():
    with pytest.raises(holdfast.ArgumentError, match=r"got <function softened.*holdfast\.softened\(\) for"):
        holdfast.diagonal_fisher(relu_mlp(), [], holdfast.softened)


@pytest.mark.parametrize("function", [holdfast.diagonal_fisher, holdfast.dense_fisher, holdfast.diagonal_hessian])
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ([(torch.zeros(0, 5).double(), torch.zeros(0, dtype=torch.long))], "batch 0 is empty"),
        ([(torch.zeros(3, 5).double(), torch.zeros(2, dtype=torch.long))], "first axes"),
        ([("text", "label")], "without tensors"),
        ([(torch.full((3, 5), torch.nan).double(), torch.zeros(3, dtype=torch.long))], "batch 0.*not finite.*itself"),
        ([(torch.zeros(3, 5).double(), torch.full((3,), 7))], "run from 7 to 7"),
    ],
)
def test_bad_batches_are_named(function, batches, message):
    kwargs = {} if function is holdfast.diagonal_hessian else {"targets": "observed"}
    with pytest.raises(holdfast.DataError, match=message):
        function(relu_mlp().double(), batches, holdfast.categorical, **kwargs)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (TensorDataset(torch.zeros(3, 5), torch.zeros(3, dtype=torch.long)), "DataLoader"),
        ((torch.zeros(3, 5), torch.zeros(3, dtype=torch.long)), r"this is one batch"),
        ({"x": torch.zeros(3, 5)}, r"this is one batch"),
        (None, "got NoneType"),
        ([{"x": torch.zeros(3, 5), "labels": torch.zeros(3, dtype=torch.long)}], r"keys \['x'\].*forward="),
        ([(torch.zeros(3, 5), torch.zeros(3, 5), torch.zeros(3, dtype=torch.long))], "could not be called"),
    ],
)
def test_what_is_not_batches_is_named(batches, message):
    with pytest.raises(holdfast.DataError, match=message):
        holdfast.diagonal_fisher(relu_mlp(), batches, holdfast.categorical)


@pytest.mark.parametrize(
    ("likelihood", "target"),
    [
        (holdfast.bernoulli, torch.tensor([0, 1, 2])),
        (holdfast.gaussian(), torch.tensor([0, 1, 2])),
        (holdfast.categorical, torch.tensor([[0], [1], [2]])),
        (holdfast.categorical, torch.tensor([0, 1, 3])),
    ],
)
@pytest.mark.parametrize("targets", ["expected", "sampled", "observed"])
def test_labels_that_do_not_fit_the_likelihood_are_refused_even_if_they_are_not_needed(likelihood, target, targets):
    with pytest.raises(holdfast.DataError, match="batch 0"):
        holdfast.diagonal_fisher(relu_mlp(), [(torch.zeros(3, 5), target)], likelihood, targets=targets)


def test_a_gradient_that_is_not_finite_names_batch_and_parameter_and_changes_nothing():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 3)
            self.power = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.net(x) + self.power.abs().sqrt()  # infinite slope at 0, finite value

    model = Root()
    model.net.weight.grad = torch.ones(3, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    good = (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(holdfast.DataError, match=r"batch 0: the gradients of `power` are not finite"):
        holdfast.diagonal_fisher(model, [good], holdfast.categorical)
    assert model.training
    assert torch.equal(model.net.weight.grad, torch.ones(3, 3))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_unusable_models_and_options_are_refused():
    x, y = torch.randn(3, 5), torch.zeros(3, dtype=torch.long)
    with pytest.raises(holdfast.InertError, match="no trainable parameters"):
        holdfast.diagonal_fisher(relu_mlp().requires_grad_(False), [(x, y)], holdfast.categorical)
    with pytest.raises(holdfast.ArgumentError, match="'expected', 'sampled' or 'observed'"):
        holdfast.diagonal_fisher(relu_mlp(), [(x, y)], holdfast.categorical, targets="empirical")
    with pytest.raises(holdfast.ArgumentError, match=r"holdfast\.custom"):
        holdfast.diagonal_fisher(relu_mlp(), [(x, y)], nn.CrossEntropyLoss())
    with pytest.raises(holdfast.InertError, match="does not depend"):
        holdfast.diagonal_fisher(
            relu_mlp(), [(x, y)], holdfast.categorical, forward=lambda model, batch: model(batch[0]).detach()
        )
    with pytest.raises(holdfast.DataError, match="needs labels"):
        holdfast.diagonal_fisher(relu_mlp(), [x], holdfast.categorical, targets="observed")
    with pytest.raises(holdfast.ArgumentError, match="limit"):
        holdfast.dense_fisher(nn.Linear(200, 200), [(torch.randn(2, 200), y[:2])], holdfast.categorical)
    tokens = next(case for case in CASES if case.name == "tied-tokens")
    with pytest.raises(holdfast.ArgumentError, match="sampled"):
        holdfast.diagonal_fisher(tokens.model(), tokens.batches(), tokens.likelihood, targets="expected")


@pytest.mark.parametrize(
    "function",
    [holdfast.diagonal_fisher, holdfast.dense_fisher, holdfast.diagonal_hessian, holdfast.hutchinson_hessian],
)
@pytest.mark.parametrize("case", [case for case in CASES if case.forward is None], ids=str)
def test_the_model_is_left_as_found(function, case):
    model = case.model()
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0  # a mixture that no call to train() or eval() would give
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(parameter.requires_grad and index != 1)
        parameter.grad = torch.ones_like(parameter) if index % 2 else None

    def state():
        return (
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            [None if parameter.grad is None else id(parameter.grad) for parameter in model.parameters()],
            [parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None],
            [parameter.detach().clone().tolist() for parameter in model.parameters()],
            [buffer.clone().tolist() for buffer in model.buffers()],
            torch.get_rng_state().tolist(),
            len([hook for module in model.modules() for hook in module._forward_hooks]),
        )

    batches = case.batches((3, 2))
    before = state()
    function(model, batches, case.likelihood)
    assert state() == before
