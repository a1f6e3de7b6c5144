"""A structure for each part of a model, and the whole Fisher of a part, against a loop over examples."""

import functools

import pytest
import torch
from torch import nn

import holdfast
from cases import CASES, Case, relu_mlp, vectors
from oracles import fisher_loop, trained

CASE = {case.name: case for case in CASES}["relu-mlp"]


class Both(nn.Module):
    """Tapped layers around one that no rule serves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pairs, self.head = nn.Linear(5, 3), nn.Bilinear(3, 3, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.head(torch.tanh(self.pairs(x, x.flip(1))))


BOTH = Case("", Both, holdfast.categorical, vectors(5, 3))


def block(case, names, targets="expected", cuts=(5, 2)):
    """The loop's matrix over some parameters, in the order given."""
    model, start, places = case.model(), 0, {}
    for name, parameter in trained(model).items():
        places[name] = torch.arange(start, start + parameter.numel())
        start += parameter.numel()
    index = torch.cat([places[name] for name in names])
    return fisher_loop(case, model, case.batches(cuts), targets)[index][:, index]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("targets", ["expected", "observed"])
@pytest.mark.parametrize("only", ["body.*", "pairs.*", ["pairs.weight", "head.*"], "*", ["body.bias", "pairs.bias"]])
@pytest.mark.parametrize("taps", [True, False])
def test_dense_blocks_of_tapped_and_other_parameters(targets, only, taps):
    found = holdfast.dense_fisher(
        BOTH.model(), BOTH.batches((5, 2)), BOTH.likelihood, targets=targets, only=only, taps=taps
    )
    close(found.matrix, block(BOTH, list(found.shapes), targets))
    general = set(holdfast.coverage(BOTH.model(), BOTH.batches(), BOTH.likelihood).general)
    assert general == {"pairs.weight"}


@pytest.mark.parametrize("cuts", [(7,), (6, 1), (1,) * 7])
def test_a_dense_block_does_not_depend_on_how_the_batches_are_cut(cuts):
    found = holdfast.dense_fisher(BOTH.model(), BOTH.batches(cuts), BOTH.likelihood)
    close(found.matrix, block(BOTH, list(found.shapes)))


def test_an_lstm_beside_its_head_in_one_matrix():
    case = next(case for case in CASES if case.name == "lstm")
    found = holdfast.dense_fisher(case.model(), case.batches((4, 3)), case.likelihood, only=["rnn.*hh*", "head.*"])
    close(found.matrix, block(case, list(found.shapes), cuts=(4, 3)))


@pytest.mark.parametrize("fisher", [holdfast.diagonal_fisher, holdfast.dense_fisher, holdfast.kronecker_fisher])
def test_a_pattern_that_fits_nothing_is_refused_with_what_there_is(fisher):
    with pytest.raises(holdfast.ArgumentError, match=r"only='tail\.\*' fits none.*`0\.weight`"):
        fisher(CASE.model(), CASE.batches(), CASE.likelihood, only="tail.*")
    with pytest.raises(holdfast.ArgumentError, match=r"names or patterns over names, got \[3\]"):
        fisher(CASE.model(), CASE.batches(), CASE.likelihood, only=[3])


def test_each_part_has_its_structure_and_the_first_pattern_that_fits():
    model, batches = CASE.model(), CASE.batches((5, 2))
    structures = {"4.*": holdfast.dense_fisher, "2.weight": holdfast.diagonal_fisher, "*": holdfast.kronecker_fisher}
    found = holdfast.mixed_fisher(model, batches, CASE.likelihood, structures)
    assert {type(term).__name__: sorted(term.shapes) for term in found.terms} == {
        "Dense": ["4.bias", "4.weight"], "Kronecker": ["0.bias", "0.weight"], "Diagonal": ["2.bias", "2.weight"],
    }  # fmt: skip
    parts = {
        "Dense": holdfast.dense_fisher(model, batches, CASE.likelihood, only="4.*"),
        "Kronecker": holdfast.kronecker_fisher(model, batches, CASE.likelihood, only="0.*"),
        "Diagonal": holdfast.diagonal_fisher(model, batches, CASE.likelihood, only="2.*"),
    }
    for term in found.terms:
        part = parts[type(term).__name__]
        close(term.dense(), part.dense())
        close(term.diagonal(), part.diagonal())
    close(parts["Dense"].matrix, block(CASE, ["4.weight", "4.bias"]))
    assert found.num_data == 7  # read three times, and counted once
    assert len(found.sources) == 1
    posterior = holdfast.consolidate(holdfast.prior(model, 0.1), model, found)
    torch.testing.assert_close(
        posterior.precision.logdet(), torch.linalg.slogdet(posterior.precision.dense()).logabsdet
    )


def test_the_order_of_the_patterns_decides():
    run = functools.partial(holdfast.mixed_fisher, CASE.model(), CASE.batches(), CASE.likelihood)
    first = run({"*.bias": holdfast.diagonal_fisher, "*": holdfast.kronecker_fisher})
    assert {layer.bias for term in first.terms if isinstance(term, holdfast.Kronecker) for layer in term.layers} == {
        None
    }
    with pytest.raises(holdfast.ArgumentError, match=r"no parameter is left for `\*\.bias`. Left: nothing"):
        run({"*": holdfast.kronecker_fisher, "*.bias": holdfast.diagonal_fisher})


def test_arguments_reach_every_part():
    calls = []

    def fisher(*args, **kwargs):
        calls.append(kwargs)
        return holdfast.diagonal_fisher(*args, **kwargs)

    def forward(model, batch):
        return model(batch[0])

    options = {"targets": "sampled", "seed": 5, "forward": forward, "memory": 1 << 20}
    holdfast.mixed_fisher(CASE.model(), CASE.batches(), CASE.likelihood, {"0.*": fisher, "*": fisher}, **options)
    assert [{key: call[key] for key in options} for call in calls] == [options] * 2
    assert [call["only"] for call in calls] == [
        ["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("structures", "message"),
    [
        ({}, r"needs a structure for each part"),
        ({"4.*": holdfast.dense_fisher}, r"no pattern fits `0\.weight`.*Add \"\*\" as the last one"),
        ({"9.*": holdfast.dense_fisher, "*": holdfast.dense_fisher}, r"no parameter is left for `9\.\*`. Left: `0\."),
        ({"*": "dense"}, r"`\*` needs a function such as holdfast\.kronecker_fisher, got 'dense'"),
    ],
)
def test_parts_that_do_not_make_the_model_are_refused(structures, message):
    with pytest.raises(holdfast.ArgumentError, match=message):
        holdfast.mixed_fisher(CASE.model(), CASE.batches(), CASE.likelihood, structures)


def test_a_one_shot_iterator_is_refused():
    with pytest.raises(holdfast.DataError, match="read once for each pattern, and an iterator can be read once"):
        holdfast.mixed_fisher(
            CASE.model(),
            iter(CASE.batches()),
            CASE.likelihood,
            {"4.*": holdfast.dense_fisher, "*": holdfast.dense_fisher},
        )


def test_a_dense_matrix_or_a_batch_too_large_says_so():
    with pytest.raises(holdfast.ArgumentError, match=r"over 20,200 entries would take 1\.5 GiB; the limit is 16,384"):
        holdfast.dense_fisher(nn.Linear(100, 200), [(torch.randn(2, 100), torch.arange(2))], holdfast.categorical)
    model, batches = CASE.model(), CASE.batches((7,))
    entries = sum(parameter.numel() for parameter in relu_mlp().parameters())
    each = 2 * 8 * entries  # a column for each class but one, in float64
    dense = functools.partial(holdfast.dense_fisher, model, likelihood=CASE.likelihood)
    message = rf"memory={3 * each} is too small for a batch of 7, whose gradients take {7 * each} bytes.*batches of 3"
    with pytest.raises(holdfast.ArgumentError, match=message):
        dense(batches=batches, memory=3 * each)
    close(dense(batches=CASE.batches((3, 2, 2)), memory=3 * each).matrix, dense(batches=batches).matrix)


def test_what_is_said_with_a_structure_holds():
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 3), [(torch.randn(20, 4), torch.randint(3, (20,)))]
    said = {"*": functools.partial(holdfast.diagonal_fisher, targets="observed")}
    found = holdfast.mixed_fisher(model, batches, holdfast.categorical, said)
    plain = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed")
    torch.testing.assert_close(found.diagonal(), plain.diagonal(), rtol=0, atol=0)
    assert found.sources[0].targets == "observed"


@pytest.mark.parametrize(
    ("structure", "message"),
    [(holdfast.lowrank_fisher, "rank="), (holdfast.diagonal_hessian, "does not take only")],
)
def test_a_structure_that_lacks_something_is_refused_before_anything_is_read(structure, message):
    def read():
        raise AssertionError
        yield

    class Once:
        __iter__ = staticmethod(read)

    with pytest.raises(holdfast.ArgumentError, match=message):
        holdfast.mixed_fisher(nn.Linear(4, 3), Once(), holdfast.categorical, {"*": structure})


def test_data_that_changes_from_pass_to_pass_is_refused():
    class Jitter:
        def __init__(self):
            self.times = 0

        def __iter__(self):
            self.times += 1
            yield torch.full((6, 4), float(self.times)), torch.zeros(6, dtype=torch.long)

    parts = {"weight": holdfast.diagonal_fisher, "bias": holdfast.dense_fisher}
    with pytest.raises(holdfast.DataError, match="not the same each time"):
        holdfast.mixed_fisher(nn.Linear(4, 3), Jitter(), holdfast.categorical, parts)
