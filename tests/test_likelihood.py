"""Likelihoods against torch's own losses and distributions, their Fishers against the definition, in float64."""

import itertools
import math

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F

import holdfast
from holdfast.errors import ArgumentError, DataError, HoldfastError
from holdfast.likelihood import EXPECTED_UP_TO
from holdfast.likelihood.base import draw_class

BATCH = 6
IGNORED = -100


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def log_prob(likelihood, output, target):
    """log p(target | output) of one example, from torch.distributions."""
    if likelihood is holdfast.categorical:
        return D.Categorical(logits=output).log_prob(target)
    if likelihood is holdfast.bernoulli:
        return D.Bernoulli(logits=output).log_prob(target).sum()
    return D.Normal(output, likelihood.scale).log_prob(target).sum()


def labels(likelihood, output):
    if likelihood is holdfast.categorical:
        return torch.randint(0, output.shape[-1], output.shape[:1])
    return torch.randint(0, 2, output.shape).double() if likelihood is holdfast.bernoulli else normal(*output.shape)


CASES = [
    (holdfast.categorical, (2,)),
    (holdfast.categorical, (5,)),
    (holdfast.bernoulli, ()),
    (holdfast.bernoulli, (3,)),
    (holdfast.bernoulli, (2, 2)),
    (holdfast.gaussian(), ()),
    (holdfast.gaussian(0.3), (3,)),
    (holdfast.gaussian(2.0), (2, 2)),
]
cases = pytest.mark.parametrize(("likelihood", "inner"), CASES, ids=[f"{c.name}{shape}" for c, shape in CASES])


@cases
def test_nll_is_minus_the_log_probability_of_each_example(likelihood, inner):
    output = 3 * normal(BATCH, *inner)
    target = labels(likelihood, output)
    expected = [-log_prob(likelihood, z, y) for z, y in zip(output, target, strict=True)]
    torch.testing.assert_close(likelihood.nll(output, target), torch.stack(expected))


def test_nll_is_the_loss_of_torch_summed_over_what_belongs_to_an_example():
    z, y = normal(BATCH, 3), torch.rand(BATCH, 3, dtype=torch.float64)
    c = torch.tensor([0, 2, 1, 1, 0, 2])
    torch.testing.assert_close(holdfast.categorical.nll(z, c).mean(), F.cross_entropy(z, c))
    bernoulli = F.binary_cross_entropy_with_logits(z, y, reduction="none").sum(-1)
    torch.testing.assert_close(holdfast.bernoulli.nll(z, y), bernoulli)
    # MSELoss averages over outputs, too, and has neither the ½ nor the constants: design §2.
    constants = 3 * (math.log(0.3) + 0.5 * math.log(2 * math.pi))
    gaussian = 3 * F.mse_loss(z, y) / (2 * 0.3**2) + constants
    torch.testing.assert_close(holdfast.gaussian(0.3).nll(z, y).mean(), gaussian)


def possible(likelihood, output):
    """Every label one example can have."""
    if likelihood is holdfast.categorical:
        return [torch.tensor(c) for c in range(len(output))]
    choices = itertools.product([0.0, 1.0], repeat=output.numel())
    return [torch.tensor(choice, dtype=torch.float64).view(output.shape) for choice in choices]


def output_fisher(likelihood, output):
    """E_y[∇nll ∇nllᵀ] of one example, from its definition."""
    size = output.numel()
    if likelihood not in (holdfast.categorical, holdfast.bernoulli):
        return torch.eye(size, dtype=torch.float64) / likelihood.scale**2
    total = torch.zeros(size, size, dtype=torch.float64)
    for y in possible(likelihood, output):
        z = output.clone().requires_grad_()
        logp = log_prob(likelihood, z, y)
        (score,) = torch.autograd.grad(logp, z)
        total += logp.detach().exp() * torch.outer(score.flatten(), score.flatten())
    return total


@cases
def test_the_root_squares_to_the_exact_fisher_of_the_outputs(likelihood, inner):
    output = 2 * normal(BATCH, *inner)
    root = likelihood.root(output)
    assert root.shape[1:] == output.shape
    columns = root.flatten(2) if root.ndim > 2 else root.unsqueeze(-1)  # (columns, batch, outputs)
    found = torch.einsum("kni,knj->nij", columns, columns)
    torch.testing.assert_close(found, torch.stack([output_fisher(likelihood, z) for z in output]))


@cases
def test_the_root_is_finite_where_the_model_is_certain(likelihood, inner):
    assert likelihood.root(1e4 * normal(BATCH, *inner)).isfinite().all()


CUTS = [[40], [1] * 40, [20, 20], [1, 15, 16, 8], [17, 23]]


@cases
def test_sampled_labels_depend_on_the_seed_and_not_on_how_the_data_is_cut(likelihood, inner):
    output = normal(40, *inner)
    draws = []
    for cut in CUTS:
        source = generator(3)
        draws.append(torch.cat([likelihood.sampled(part, None, source) for part in output.split(cut)]))
    for drawn in draws[1:]:
        torch.testing.assert_close(drawn, draws[0], rtol=0, atol=0)
    assert not torch.equal(likelihood.sampled(output, None, generator(4)), draws[0])


@cases
def test_sampling_draws_nothing_from_the_global_generator(likelihood, inner):
    output = normal(4, *inner)
    before = torch.get_rng_state()
    likelihood.sampled(output, None, generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_frequencies_of_drawn_classes_are_their_probabilities(dtype):
    n = 20_000
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0], dtype=dtype)
    p = logits.double().softmax(-1)
    drawn = holdfast.categorical.sampled(logits.expand(n, -1), None, generator())
    frequency = torch.bincount(drawn, minlength=4) / n
    assert ((frequency - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all()


def test_a_class_of_probability_zero_is_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf], dtype=torch.float64)
    drawn = holdfast.categorical.sampled(logits.expand(5_000, -1), None, generator())
    assert set(drawn.tolist()) == {1, 3}


def test_the_frequencies_of_drawn_yeses_are_their_probabilities():
    n = 20_000
    logits = torch.tensor([[2.0, -1.0], [0.0, 5.0]], dtype=torch.float64)
    p = logits.sigmoid()
    drawn = holdfast.bernoulli.sampled(logits.expand(n, -1, -1), None, generator())
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert ((drawn.mean(0) - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all()


def test_gaussian_draws_have_the_outputs_mean_and_the_scales_variance():
    n, scale = 20_000, 0.3
    output = torch.tensor([10.0, -2.0], dtype=torch.float64)
    drawn = holdfast.gaussian(scale).sampled(output.expand(n, -1), None, generator())
    assert ((drawn.mean(0) - output).abs() < 4 * scale / math.sqrt(n)).all()
    assert ((drawn.var(0) - scale**2).abs() < 4 * scale**2 * math.sqrt(2 / n)).all()
    correlation = torch.corrcoef(drawn.T)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(n)


@pytest.mark.parametrize(
    ("likelihood", "shape", "targets"),
    [
        (holdfast.categorical, (2, EXPECTED_UP_TO), "expected"),
        (holdfast.categorical, (2, EXPECTED_UP_TO + 1), "sampled"),
        (holdfast.bernoulli, (2,), "expected"),
        (holdfast.bernoulli, (2, 4, 4), "expected"),
        (holdfast.bernoulli, (2, 17), "sampled"),
        (holdfast.gaussian(), (2, 16), "expected"),
        (holdfast.gaussian(), (99,), "expected"),
        (holdfast.gaussian(), (2, 3, 6), "sampled"),
        (holdfast.tokens(shift=True), (2, 3, 4), "sampled"),
        (holdfast.custom(lambda output, target: output), (2, 3), "observed"),
    ],
)
def test_by_default_the_fisher_is_exact_up_to_sixteen_columns(likelihood, shape, targets):
    assert EXPECTED_UP_TO == 16
    assert likelihood.default_targets(torch.zeros(shape)) == targets


# Position t is certain of label t: read without a shift it costs nothing, read with one it costs `CERTAIN`.
CERTAIN = 50.0
SEQUENCE = torch.tensor([[0, 1, 2, 3]])
ALIGNED = CERTAIN * F.one_hot(SEQUENCE, 5).double()  # (1, 4, 5)
AHEAD = CERTAIN * F.one_hot(SEQUENCE.roll(-1), 5).double()  # position t is certain of label t+1


@pytest.mark.parametrize(
    ("shift", "output", "expected"),
    [(False, ALIGNED, 0.0), (True, AHEAD, 0.0), (True, ALIGNED, 3 * CERTAIN), (False, AHEAD, 4 * CERTAIN)],
    ids=["side by side", "one ahead", "side by side, read as one ahead", "one ahead, read as side by side"],
)
def test_an_off_by_one_between_outputs_and_labels_would_show(shift, output, expected):
    found = holdfast.tokens(shift=shift).nll(output, SEQUENCE)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-12)


PADDED = torch.tensor([[4, 1, 2, 0, 3], [2, 2, 1, IGNORED, IGNORED], [IGNORED, 0, IGNORED, 4, IGNORED]])
COUNTED = {True: [4, 2, 2], False: [5, 3, 2]}


@pytest.mark.parametrize("shift", [True, False])
def test_a_sequences_nll_is_the_sum_over_the_labels_that_count(shift):
    output = normal(3, 5, 6)
    expected = torch.zeros(3, dtype=torch.float64)
    for n, t in itertools.product(range(3), range(5)):
        source = t - 1 if shift else t
        if source >= 0 and PADDED[n, t] != IGNORED:
            expected[n] -= output[n, source].log_softmax(-1)[PADDED[n, t]]
    torch.testing.assert_close(holdfast.tokens(shift=shift).nll(output, PADDED), expected)


@pytest.mark.parametrize("shift", [True, False])
def test_the_unit_is_the_token_and_ignored_ones_do_not_count(shift):
    tokens = holdfast.tokens(shift=shift)
    assert tokens.unit == "token"
    assert tokens.count(3, PADDED) == sum(COUNTED[shift])
    assert [tokens.count(1, row.unsqueeze(0)) for row in PADDED] == COUNTED[shift]
    assert holdfast.categorical.unit == "example"
    assert holdfast.categorical.count(3, torch.zeros(3, dtype=torch.long)) == 3


@pytest.mark.parametrize("shift", [True, False])
def test_one_by_one_they_are_the_outputs_that_have_a_label(shift):
    """Without labels all that could have one: of shifted ones the last says what nobody has written."""
    output, target = torch.randn(2, 4, 3), torch.tensor([[0, 1, -100, 2], [2, -100, 1, 0]])
    rows, labels, single = holdfast.tokens(shift=shift).each(output, target)
    places = [(0, 0), (0, 2), (1, 1), (1, 2)] if shift else [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2), (1, 3)]
    assert torch.equal(rows, torch.stack([output[at] for at in places]))
    assert labels.tolist() == ([1, 2, 1, 0] if shift else [0, 1, 2, 2, 1, 0])
    assert single is holdfast.categorical
    every, nothing, _ = holdfast.tokens(shift=shift).each(output)
    assert torch.equal(every, output[:, : 3 if shift else 4].flatten(0, 1))
    assert nothing is None


def test_another_ignore_index_means_the_same():
    output = normal(3, 5, 6)
    other = PADDED.where(PADDED != IGNORED, -1)
    tokens = holdfast.tokens(shift=True, ignore_index=-1)
    torch.testing.assert_close(tokens.nll(output, other), holdfast.tokens(shift=True).nll(output, PADDED))
    assert tokens.count(3, other) == 8


@pytest.mark.parametrize("shift", [True, False])
def test_sampling_changes_only_the_labels_that_count(shift):
    output = normal(3, 5, 1000)
    drawn = holdfast.tokens(shift=shift).sampled(output, PADDED, generator())
    counts = PADDED != IGNORED
    if shift:
        counts[:, 0] = False
    assert torch.equal(drawn[~counts], PADDED[~counts])
    assert (drawn[counts] != PADDED[counts]).all()  # of 1000 words, by this seed
    assert ((drawn[counts] >= 0) & (drawn[counts] < 1000)).all()


@pytest.mark.parametrize("shift", [True, False])
def test_drawn_tokens_are_those_of_the_output_at_their_own_position(shift):
    output = AHEAD if shift else ALIGNED
    start = torch.tensor([[0, 4, 4, 4]]) if shift else torch.full((1, 4), 4)
    assert torch.equal(holdfast.tokens(shift=shift).sampled(output, start, generator()), SEQUENCE)


@pytest.mark.parametrize("shift", [True, False])
def test_drawn_tokens_do_not_depend_on_padding_or_on_how_the_batch_is_cut(shift):
    tokens = holdfast.tokens(shift=shift)
    output = normal(3, 5, 6)
    whole = tokens.sampled(output, PADDED, generator())
    source = generator()
    rows = [tokens.sampled(z.unsqueeze(0), y.unsqueeze(0), source) for z, y in zip(output, PADDED, strict=True)]
    assert torch.equal(torch.cat(rows), whole)
    wider = tokens.sampled(F.pad(output, (0, 0, 0, 3)), F.pad(PADDED, (0, 3), value=IGNORED), generator())
    assert torch.equal(wider, F.pad(whole, (0, 3), value=IGNORED))


def test_an_ignore_index_that_is_a_word_is_refused_when_labels_are_drawn():
    # A draw of that word would be dropped, and the Fisher would be of a part of the distribution.
    tokens = holdfast.tokens(shift=True, ignore_index=0)
    with pytest.raises(HoldfastError, match="ignore_index"):
        tokens.sampled(normal(2, 4, 3), torch.ones(2, 4, dtype=torch.long), generator())


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_may_be_integers_of_any_width(dtype):
    z, y = normal(4, 3), torch.tensor([0, 2, 1, 2])
    torch.testing.assert_close(holdfast.categorical.nll(z, y.to(dtype)), F.cross_entropy(z, y, reduction="none"))
    each = holdfast.tokens(shift=False).nll(z.unsqueeze(0), y.to(dtype).unsqueeze(0))
    torch.testing.assert_close(each, F.cross_entropy(z, y, reduction="sum").unsqueeze(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_yes_or_no_may_be_written_in_any_dtype(dtype):
    z, y = normal(4), torch.tensor([0, 1, 1, 0])
    expected = F.binary_cross_entropy_with_logits(z, y.double(), reduction="none")
    torch.testing.assert_close(holdfast.bernoulli.nll(z, y.to(dtype)), expected)


CLASSES = torch.tensor([0, 1])
SIDE_BY_SIDE = holdfast.tokens(shift=False)


@pytest.mark.parametrize("check", ["nll", "require"])
@pytest.mark.parametrize(
    ("likelihood", "output", "target", "says"),
    [
        (holdfast.categorical, normal(2, 3), CLASSES.double(), r"integer class labels of shape \(2,\).*torch.float64"),
        (holdfast.categorical, normal(2, 3), normal(2, 3).softmax(-1), r"soft labels give a holdfast\.custom"),
        (holdfast.categorical, normal(2, 3), CLASSES.unsqueeze(1), r"shape \(2,\), got.* \(2, 1\)"),
        (holdfast.categorical, normal(2, 3), CLASSES.to(torch.complex64), "integer class labels"),
        (holdfast.categorical, normal(2, 3), [0, 1], "got list"),
        (holdfast.categorical, normal(2, 3), None, "got NoneType"),
        (holdfast.categorical, normal(2), CLASSES, r"\(batch, classes\), got \(2,\)"),
        (holdfast.categorical, normal(2, 5, 3), CLASSES, r"holdfast\.tokens\(shift=False\)"),
        (holdfast.categorical, (normal(2, 3),), CLASSES, "as one tensor, got tuple.*forward="),
        (holdfast.bernoulli, normal(2, 1), torch.ones(2), r"shape \(2, 1\), got.* \(2,\): broadcasting"),
        (holdfast.bernoulli, normal(2), 1.0, "got float"),
        (holdfast.gaussian(), normal(2, 1), normal(2), r"shape \(2, 1\), got.* \(2,\): broadcasting"),
        (holdfast.gaussian(), {"logits": normal(2)}, normal(2), "as one tensor, got dict"),
        (SIDE_BY_SIDE, normal(2, 3), CLASSES, r"\(batch, positions, vocabulary\), got \(2, 3\)"),
        (SIDE_BY_SIDE, normal(2, 4, 3), CLASSES, r"labels of shape \(2, 4\), got.* \(2,\)"),
        (SIDE_BY_SIDE, normal(2, 4, 3), None, "which positions count"),
        (SIDE_BY_SIDE, normal(1, 2, 3), CLASSES.unsqueeze(0).double(), "integer class labels"),
    ],
)
def test_data_of_the_wrong_form_is_refused_with_what_was_got_and_what_is_needed(
    check, likelihood, output, target, says
):
    with pytest.raises(DataError, match=says):
        getattr(likelihood, check)(output, target)


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "says"),
    [
        (holdfast.categorical, normal(2, 3), torch.tensor([0, 3]), "3 classes, but the labels run from 0 to 3"),
        (holdfast.categorical, normal(2, 3), torch.tensor([-1, 2]), "3 classes, but the labels run from -1 to 2"),
        (holdfast.bernoulli, normal(2), torch.tensor([0.0, 2.0]), "between 0 and 1"),
        (holdfast.bernoulli, normal(2), torch.tensor([-1.0, 1.0]), "between 0 and 1"),
        (holdfast.bernoulli, normal(2), torch.tensor([math.nan, 1.0]), "between 0 and 1"),
        (holdfast.gaussian(), normal(2), torch.tensor([math.nan, 1.0]), "finite"),
        (holdfast.gaussian(), normal(2), torch.tensor([math.inf, 1.0]), "finite"),
        (SIDE_BY_SIDE, normal(1, 2, 3), torch.tensor([[0, 3]]), "3 classes, but the labels run from 0 to 3"),
        (SIDE_BY_SIDE, normal(1, 2, 3), torch.tensor([[-1, 2]]), "3 classes, but the labels run from -1 to 2"),
        (holdfast.tokens(shift=True), normal(1, 2, 3), torch.tensor([[0, 3]]), "the labels run from 3 to 3"),
    ],
)
def test_labels_that_cannot_be_are_refused_with_what_was_got(likelihood, output, target, says):
    with pytest.raises(DataError, match=says):
        likelihood.require(output, target)


def test_labels_that_can_be_are_accepted():
    assert holdfast.categorical.require(normal(2, 3), torch.tensor([0, 2])) is None
    assert holdfast.bernoulli.require(normal(2), torch.tensor([0.0, 0.5])) is None
    # The first label of a shifted sequence is never scored, and ignored ones are no classes.
    assert holdfast.tokens(shift=True).require(normal(1, 3, 3), torch.tensor([[99, 2, IGNORED]])) is None


@pytest.mark.parametrize("verb", ["root", "sampled"])
@pytest.mark.parametrize("output", [normal(2, 5, 3), normal(2)], ids=["positions", "no classes"])
def test_categorical_outputs_of_the_wrong_shape_are_refused_without_labels_too(verb, output):
    arguments = (output,) if verb == "root" else (output, None, generator())
    with pytest.raises(DataError, match=r"\(batch, classes\)"):
        getattr(holdfast.categorical, verb)(*arguments)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_gaussian_needs_a_positive_scale(scale):
    with pytest.raises(ArgumentError, match=f"standard deviation.*> 0, got {scale}"):
        holdfast.gaussian(scale)


def laplace(output, target):
    return -D.Laplace(output, 1.0).log_prob(target).sum(-1)


def test_a_custom_likelihood_is_the_function_it_was_given():
    z, y = normal(4, 2), normal(4, 2)
    custom = holdfast.custom(laplace, name="laplace", unit="reading", count=lambda y: y.numel())
    torch.testing.assert_close(custom.nll(z, y), (z - y).abs().sum(-1) + 2 * math.log(2))
    assert (custom.name, custom.unit) == ("laplace", "reading")


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (F.mse_loss, r"got.* \(\)"),
        (lambda output, target: (output - target).square(), r"got.* \(4, 2\)"),
        (lambda output, target: 1.0, "got float"),
    ],
    ids=["averaged", "not summed", "a number"],
)
def test_a_custom_likelihood_must_give_a_number_per_example(function, got):
    with pytest.raises(DataError, match=rf"{got}.*reduction='none' and sum over what belongs to one example"):
        holdfast.custom(function).nll(normal(4, 2), normal(4, 2))


@pytest.mark.parametrize(
    ("likelihood", "verb", "cure"),
    [
        (holdfast.custom(laplace), "root", "Use targets='observed'"),
        (holdfast.custom(laplace), "sampled", "Use targets='observed'"),
        (holdfast.tokens(shift=True), "root", "Use targets='sampled'"),
    ],
)
def test_what_a_likelihood_cannot_do_is_refused_with_what_it_can(likelihood, verb, cure):
    arguments = (normal(2, 3, 4),) if verb == "root" else (normal(2, 3, 4), None, generator())
    with pytest.raises(ArgumentError, match=cure):
        getattr(likelihood, verb)(*arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("logits", [[8.0, 0, 0, 0], [0, 0, -1, 6], [60.0, 1, 0, -1], [-1.0, 0, 1, 60], [0.0, 0, 0, 0]])
def test_the_root_keeps_its_digits_where_the_model_is_certain(dtype, logits):
    """diag(p) − ppᵀ, its diagonal p(1−p) taken from the small side."""
    z = torch.tensor([logits], dtype=dtype)
    root = holdfast.categorical.root(z)
    assert root.shape == (3, 1, 4)
    exact = z.double().softmax(-1)[0]
    rest = torch.stack([exact[torch.arange(4) != c].sum() for c in range(4)])
    found = torch.einsum("kni,knj->ij", root.double(), root.double())
    within = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.diagonal(), exact * rest, rtol=within, atol=0)
    off = found - torch.diag(found.diagonal()) + torch.outer(exact, exact) - torch.diag(exact**2)
    assert float(off.abs().max()) <= within * float((exact * rest).max())


@pytest.mark.parametrize("height", [0.0, 0.5, 1 - 1e-9, 1 - 1e-17])
@pytest.mark.parametrize("classes", [5, 1024, 2053, 5000])
def test_an_impossible_class_is_never_drawn(classes, height):
    z = torch.full((2, classes), -torch.inf)
    z[0, 2:4], z[1, classes // 2] = 0.0, 0.0
    drawn = draw_class(z, torch.full((2,), height, dtype=torch.float64)).tolist()
    assert drawn[0] in (2, 3)
    assert drawn[1] == classes // 2


def test_classes_are_drawn_as_often_as_they_are_likely():
    """Beyond one block of classes too."""
    torch.manual_seed(0)
    z = torch.randn(1, 3000)
    counts = torch.bincount(draw_class(z.expand(200_000, -1), torch.rand(200_000, dtype=torch.float64)), minlength=3000)
    expected = 200_000 * z[0].softmax(-1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 2999) < 5 * (2 * 2999) ** 0.5


class TestSoftened:
    """The Fisher of softmax(z / T), its scale that of the logits."""

    def test_its_root_is_that_of_softer_probabilities(self):
        z = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        p = (z / 4).softmax(-1)
        columns = holdfast.softened(4.0).root(z)
        found = torch.einsum("kni,knj->nij", columns, columns)
        torch.testing.assert_close(found, torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))

    def test_its_scores_are_softer_probabilities_less_the_label(self):
        z = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        y = torch.randint(0, 4, (6,))
        (grad,) = torch.autograd.grad(holdfast.softened(4.0).nll(z, y).sum(), z)
        torch.testing.assert_close(grad, ((z / 4).softmax(-1) - torch.nn.functional.one_hot(y, 4)).detach())

    def test_labels_are_drawn_from_what_its_fisher_is_of(self):
        z = torch.tensor([[4.0, 0.0]]).expand(20_000, 2)
        drawn = holdfast.softened(4.0).sampled(z, None, torch.Generator().manual_seed(0))
        p = float(torch.tensor([1.0, 0.0]).softmax(0)[1])
        assert abs(float(drawn.double().mean()) - p) < 5 * (p * (1 - p) / 20_000) ** 0.5

    def test_of_a_sure_model_more_is_left(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4).double()
        with torch.no_grad():
            model.weight.mul_(20)
        batches = [(torch.randn(50, 3, dtype=torch.float64), torch.randint(0, 4, (50,)))]
        sure, softer = (
            sum(float(each.sum()) for each in holdfast.diagonal_fisher(model, batches, likelihood).entries.values())
            for likelihood in (holdfast.categorical, holdfast.softened())
        )
        assert softer > 1.5 * sure

    def test_it_says_its_temperature_and_takes_no_other_number(self):
        assert holdfast.softened(4).name == "categorical(temperature=4.0)"
        assert holdfast.softened(1.0) == holdfast.categorical
        with pytest.raises(holdfast.ArgumentError, match="temperature"):
            holdfast.softened(0.0)


@pytest.mark.parametrize("moved", [1e-1, 1e-3, 1e-5])
def test_the_divergence_of_coins_keeps_its_digits_where_little_moved(moved):
    """In float32 against float64: its value, and its gradient, sigmoid(new) − sigmoid(old)."""
    old = 5 * normal(2000, 10)
    new = old + moved * torch.randn(old.shape, generator=generator(1), dtype=old.dtype)
    old, new = old.float(), new.float().requires_grad_()
    value = holdfast.bernoulli.divergence(old, new).sum()
    (gradient,) = torch.autograd.grad(value, new)
    p, q = old.double().sigmoid(), new.detach().double().sigmoid()
    d = new.detach().double() - old.double()
    # log(1 + p (eᵈ − 1)) − p d, as a series where even float64 would cancel
    exact = (p * (1 - p) * d**2 / 2 + p * (1 - p) * (1 - 2 * p) * d**3 / 6).sum()
    if moved == 1e-1:
        exact = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum()
    assert float(value.detach()) == pytest.approx(float(exact), rel=1e-3)
    assert float((gradient - (q - p)).norm() / (q - p).norm()) < 0.02
    assert bool(gradient.isfinite().all())


def test_the_divergence_of_coins_is_right_far_away_too():
    old, new = torch.tensor([[-300.0, 20.0, 2.0, 0.0], [300.0, -20.0, 2.9, 0.0]], dtype=torch.float64)
    new.requires_grad_()
    found = holdfast.bernoulli.divergence(old.unsqueeze(1), new.unsqueeze(1))
    p, q = old.sigmoid(), new.detach().sigmoid()
    exact = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())[1:]
    torch.testing.assert_close(
        found.detach(), torch.cat([torch.tensor([300.0]).double(), exact]), rtol=1e-6, atol=1e-12
    )
    (gradient,) = torch.autograd.grad(found.sum(), new)
    torch.testing.assert_close(gradient, q - p)


@pytest.mark.parametrize("z", [-18.0, 14.0, 16.0, 18.0])
def test_sure_answers_keep_their_fisher_on_both_sides(z):
    root = holdfast.bernoulli.root(torch.full((1, 1), z))
    wide = torch.tensor(z, dtype=torch.float64)
    assert float(root.square().sum()) == pytest.approx(float(wide.sigmoid() * (-wide).sigmoid()), rel=1e-5)
