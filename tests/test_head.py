"""A linear head learned in parts is the head that all data at once would give: weights, precision and evidence."""

import itertools
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import one_hot

import holdfast
from holdfast import LinearHead, linear_head, random_features
from holdfast.errors import ArgumentError, DataError, InertError, MemoryFileError, MismatchError, SingularError
from holdfast.head.statistics import Statistics

PRIOR, NOISE = 0.3, 0.49


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def classes(count=3, n=20, inputs=6, seed=5):
    """A task for each pair of classes: inputs around a center of their own, and labels."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(2 * count, inputs, generator=generator, dtype=torch.float64)
    labels = [torch.randint(2, (n,), generator=generator) + 2 * task for task in range(count)]
    return [(centers[y] + torch.randn(n, inputs, generator=generator, dtype=torch.float64), y) for y in labels]


def numbers(count=3, n=9):
    """Regression tasks of two outputs."""
    generator = torch.Generator().manual_seed(6)
    return [tuple(torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (4, 2)) for _ in range(count)]


def together(tasks):
    return torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks])


def head(**options):
    return linear_head(6, prior=PRIOR, noise=NOISE, **options)


def assert_same(found, expected):
    close(found.mean, expected.mean)
    close(found.precision, expected.precision)
    close(found.log_evidence(), expected.log_evidence())
    assert found.num_data == expected.num_data


def design(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)


# T1, T2: lossless


def test_it_is_ridge_regression_and_its_evidence_that_of_the_marginal_gaussian():
    """Against what shares nothing with it: least squares on extended data, and y ~ N(0, ΦΦᵀ/prior + noise)."""
    x, y = together(numbers())
    found = linear_head(4, outputs=2, prior=PRIOR, noise=NOISE).updated([(x, y)])
    phi, zeros = design(x), torch.zeros(5, 2, dtype=torch.float64)
    root = (PRIOR * NOISE) ** 0.5 * torch.eye(5, dtype=torch.float64)
    close(found.mean, torch.linalg.lstsq(torch.cat([phi, root]), torch.cat([y, zeros])).solution)
    close(found.precision, PRIOR * torch.eye(5, dtype=torch.float64) + phi.T @ phi / NOISE)
    covariance = phi @ phi.T / PRIOR + NOISE * torch.eye(len(x), dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
    close(found.log_evidence(), marginal.log_prob(y.T).sum())


def test_predictions_are_those_of_the_gaussian_conditioned_on_the_data():
    x, y = together(numbers())
    found = linear_head(4, outputs=2, prior=PRIOR, noise=NOISE).updated([(x, y)])
    new = torch.randn(7, 4, dtype=torch.float64)
    both = design(torch.cat([x, new]))
    covariance = both @ both.T / PRIOR + NOISE * torch.eye(len(both), dtype=torch.float64)
    seen, cross = covariance[: len(x), : len(x)], covariance[len(x) :, : len(x)]
    close(found.predict(new), cross @ torch.linalg.solve(seen, y))
    conditional = covariance[len(x) :, len(x) :] - cross @ torch.linalg.solve(seen, cross.T)
    close(found.variance(new), conditional.diagonal())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_tasks_in_any_order_are_joint_training(order):
    tasks = classes()
    joint = head().updated([together(tasks)])
    found = head()
    for task in order:
        found = found.updated([tasks[task]])
    assert_same(found, joint)
    assert found.classes == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 7, 60])
def test_batches_may_be_cut_anywhere(size):
    x, y = together(classes())
    batches = list(zip(x.split(size), y.split(size), strict=True))
    assert_same(head().updated(iter(batches)), head().updated([(x, y)]))


def test_a_class_that_comes_late_is_as_if_it_had_been_there():
    """The one-hot target of a class that is not there yet is 0: closed form over all examples and all six columns."""
    tasks = classes()
    found = head()
    for task in tasks:
        found = found.updated([task])
    x, y = together(tasks)
    phi, ridge = design(x), PRIOR * NOISE * torch.eye(7, dtype=torch.float64)
    close(found.mean, torch.linalg.solve(phi.T @ phi + ridge, phi.T @ one_hot(y, 6).double()))


def test_the_evidence_of_a_part_given_the_rest_is_the_difference():
    """T2: log p(D₂ | D₁) = log p(D) − log p(D₁), against the density of D₂ under the prediction from D₁."""
    (x1, y1), (x2, y2) = numbers(2)
    first = linear_head(4, outputs=2, prior=PRIOR, noise=NOISE).updated([(x1, y1)])
    phi = design(x2)
    covariance = phi @ torch.linalg.inv(first.precision) @ phi.T + NOISE * torch.eye(len(x2), dtype=torch.float64)
    predictive = [torch.distributions.MultivariateNormal(mean, covariance) for mean in first.predict(x2).T]
    expected = sum(each.log_prob(y) for each, y in zip(predictive, y2.T, strict=True))
    close(first.updated([(x2, y2)]).log_evidence() - first.log_evidence(), expected)


def test_a_head_that_has_seen_nothing_has_evidence_zero():
    close(linear_head(4, outputs=2).log_evidence(), torch.tensor(0.0, dtype=torch.float64))


# Merging


def test_heads_learned_apart_merge_into_the_joint_one():
    tasks = classes()
    parts = [head().updated([task]) for task in tasks]
    assert_same(parts[2].merged(parts[0], parts[1]), head().updated([together(tasks)]))


def test_heads_that_went_on_from_one_head_count_it_once():
    tasks = classes()
    base = head().updated([tasks[0]])
    a, b = base.updated([tasks[1]]), base.updated([tasks[2]])
    assert_same(a.merged(b, base=base), head().updated([together(tasks)]))
    more = classes(count=4)[3]
    three = a.merged(b, base.updated([more]), base=base)
    assert_same(three, head().updated([together([*tasks, more])]))
    with pytest.raises(MismatchError, match=r"share 20 examples.*count twice.*base=that_head"):
        a.merged(b)
    with pytest.raises(MismatchError, match="it is not what they share"):
        a.merged(head().updated([tasks[2]]), base=base)


def test_heads_that_do_not_fit_are_not_merged():
    task, other = classes(2)
    one = head().updated([task])
    random = [linear_head(random_features(6, 9, seed=seed)).updated([task]) for seed in (0, 1)]
    for a, b, message in [
        (
            one,
            linear_head(5, prior=PRIOR, noise=NOISE),
            "6 features, 2 classes.*5 features, 0 classes.*one feature map",
        ),
        (random[0], random[1], r"RandomFeatures\(9 of 6 inputs\).*same random_features"),
        (one, head(outputs=2), "2 classes.*2 outputs.*`outputs` must agree"),
        (one, one.with_prior(2.0), r"prior 0.3 and noise 0.49.*2 and 0.49.*with_prior\(head.prior"),
    ]:
        with pytest.raises(MismatchError, match=message):
            a.merged(b)
    with pytest.raises(ArgumentError, match="got list"):
        one.merged([head().updated([other])])


def test_the_same_data_again_is_refused_however_it_is_cut_and_shuffled():
    x, y = together(classes())
    found = head().updated([(x, y)])
    order = torch.randperm(len(x))
    batches = list(zip(x[order].split(7), y[order].split(7), strict=True))
    with pytest.raises(MismatchError, match=r"learned from these 60 examples already.*no epochs"):
        found.updated(batches)
    assert found.updated([(x, y.roll(1))]).num_data == 120  # other labels are other data


# The prior


def test_another_prior_is_as_if_from_the_start():
    data = [together(classes())]
    found = linear_head(6, prior=7.0, noise=3.0).updated(data).with_prior(PRIOR, NOISE)
    assert_same(found, head().updated(data))


def test_tuning_finds_the_top_of_the_evidence():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    w = 2 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
    y = x @ w + 0.5 * torch.randn(4000, 40, generator=generator, dtype=torch.float64)
    ridges = [0.25 / 4 * factor for factor in (0.01, 0.1, 1, 10, 100)]  # noise 0.25, prior precision ¼
    found = linear_head(5, outputs=40).updated([(x, y)]).tuned(ridges)
    assert found.noise == pytest.approx(0.25, rel=0.02)
    assert found.prior == pytest.approx(0.25, rel=0.05)
    for prior, noise in [(1.3, 1), (0.7, 1), (1, 1.05), (1, 0.95)]:
        assert found.with_prior(prior * found.prior, noise * found.noise).log_evidence() < found.log_evidence() + 3
    by_default = linear_head(5, outputs=40).updated([(x, y)]).tuned()
    assert by_default.noise == pytest.approx(0.25, rel=0.02)
    assert by_default.log_evidence() == max(
        by_default.with_prior(by_default.prior * f).log_evidence() for f in (0.01, 1, 100)
    )


def test_tuning_says_when_there_is_nothing_to_tune():
    with pytest.raises(InertError, match="learned nothing yet"):
        head().tuned()
    found = head().updated([together(classes())])
    with pytest.raises(ArgumentError, match="no ridges"):
        found.tuned([])
    with pytest.raises(ArgumentError, match="> 0, got -1"):
        found.tuned([-1])
    x = torch.randn(5, 6)
    with pytest.raises(SingularError, match="fits its targets exactly"):
        linear_head(6, outputs=1).updated([(x, torch.zeros(5, 1))]).tuned()


def test_data_that_do_not_determine_the_weights_need_a_prior():
    x, y = classes(1, n=4)[0]
    flat = linear_head(6, prior=0.0).updated([(x, y)])
    with pytest.raises(SingularError, match=r"4 examples and prior · noise = 0 do not determine 7 weights.*with_prior"):
        flat.predict(x)
    with pytest.raises(SingularError, match="flat prior has no evidence"):
        flat.log_evidence()
    assert flat.with_prior(1e-6).predict(x).shape == (4, 2)
    x, y = together(classes(4))
    close(
        linear_head(6, prior=0.0).updated([(x, y)]).mean,
        torch.linalg.lstsq(design(x), one_hot(y, 8).double()).solution,
    )


# Random features and modules


def test_random_features_are_those_of_the_formula_and_of_a_seed():
    random = random_features(6, 9, seed=3)
    x = torch.randn(5, 6, dtype=torch.float64)
    close(random(x), (x @ random.weight.double().T).clamp(min=0))
    assert torch.equal(random.weight, random_features(6, 9, seed=3).weight)
    assert not torch.equal(random.weight, random_features(6, 9, seed=4).weight)
    assert random_features(200, 500).weight.var().item() == pytest.approx(2 / 200, rel=0.02)
    with pytest.raises(ArgumentError, match="above zero, got 0"):
        random_features(0, 9)


def test_a_head_on_random_features_is_a_head_on_them():
    tasks = classes()
    random = random_features(6, 9)
    found, plain = linear_head(random), linear_head(9)
    for x, y in tasks:
        found, plain = found.updated([(x, y)]), plain.updated([(random(x), y)])
    assert_same(found, plain)
    close(found.predict(tasks[0][0]), plain.predict(random(tasks[0][0])))


@pytest.mark.parametrize("features", [6, random_features(6, 9)], ids=["plain", "random"])
def test_a_module_gives_the_same_scores_and_draws_no_random_numbers(features):
    x, y = together(classes())
    found = linear_head(features).updated([(x, y)])
    state = torch.get_rng_state()
    module = found.module()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(module(x.float()), found.predict(x).float(), rtol=1e-4, atol=1e-5)
    trainable = [tuple(p.shape) for p in module.parameters() if p.requires_grad]
    assert trainable == [(6, found.features), (6,)]


def test_only_classes_that_were_seen_are_predicted():
    x = torch.randn(40, 6, dtype=torch.float64)
    found = head().updated([(x, torch.where(x[:, 0] > 0, 5, 2))])
    assert found.classes == [2, 5]
    assert found.predict(x).shape == (40, 6)
    assert set(found.classify(x).tolist()) == {2, 5}
    assert float((found.classify(x) == torch.where(x[:, 0] > 0, 5, 2)).double().mean()) > 0.9
    apart = linear_head(2, prior=1.0).updated([(torch.eye(2), torch.tensor([2, 5]))])
    away = torch.tensor([[-10.0, -20.0]])  # less than the 0 of those that never came
    assert float(apart.predict(away).max()) == 0
    assert apart.classify(away).tolist() == [2]


def test_half_the_memory_gives_half_the_digits():
    x, y = together(classes())
    wide = head().updated([(x, y)])
    narrow = head().to(dtype=torch.float32).updated([(x, y)])
    assert narrow.mean.dtype == torch.float32
    error = (narrow.mean.double() - wide.mean).norm() / wide.mean.norm()
    assert 1e-9 < error < 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(narrow.predict(x), wide.predict(x).float(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"float64, or all float32; `gram` is torch.bfloat16"):
        head().to(dtype=torch.bfloat16)


def test_a_value_is_not_changed_by_what_is_made_of_it():
    x, y = together(classes())
    before = head().updated([(x, y)])
    gram = before.statistics.gram.clone()
    before.updated([(x + 1, y)]), before.with_prior(9.0), before.tuned()
    assert torch.equal(before.statistics.gram, gram)
    assert (before.num_data, before.prior) == (60, PRIOR)
    model = nn.Linear(3, 6).double()
    after = before.updated((model(z), y[:5]) for z in [torch.randn(5, 3, dtype=torch.float64)])
    assert not after.mean.requires_grad


# Bad input

X, Y = torch.zeros(4, 6), torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ((X, Y), r"this is one batch: give a list, \[\(inputs, targets\)\]"),
        (X, "this is one batch"),
        (3, "got int"),
        ([X], "batch 0 is a Tensor. Give \\(features, targets\\)"),
        ([(X, Y), (X, Y, Y)], "batch 1 is a tuple"),
        ([(X[:0], Y[:0])], "batch 0 is empty"),
        ([(X, Y[:3])], r"inputs \(4, 6\) and targets \(3,\).*as many in both"),
        ([(X[:, :5], Y)], r"shape \(4, 5\); this head takes \(N, 6\)\.$"),
        ([(X.view(4, 1, 2, 3), Y)], r"shape \(4, 1, 2, 3\).*Flatten them: x.flatten\(1\)"),
        ([(X.byte(), Y)], r"floats, got torch.uint8.*x.float\(\) / 255"),
        ([(X.to_sparse(), Y)], "dense tensor of floats, got torch.float32, torch.sparse_coo"),
        ([(X / 0, Y)], "features that are not finite"),
        ([(X, Y - 1)], "the label -1: classes are numbered from 0"),
        ([(X, Y + 10**7)], r"the label 10000001.*10,000,002 classes.*Number the classes"),
        ([(X, Y.unsqueeze(1))], r"labels of shape \(4, 1\)"),
        ([(X, Y.float())], r"targets of torch.float32, but this head learns classes.*outputs=how_many"),
    ],
)
def test_data_that_cannot_be_learned_from_is_refused(batches, message):
    with pytest.raises(DataError, match=message):
        head().updated(batches)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (Y, r"targets of torch.int64, but this head learns 2 numbers.*without `outputs`"),
        (torch.zeros(4), r"shape \(4,\); this head learns \(N, 2\)"),
        (torch.zeros(4, 3), r"shape \(4, 3\); this head learns \(N, 2\)"),
        (torch.full((4, 2), torch.nan), "targets that are not finite"),
    ],
)
def test_targets_that_are_no_such_numbers_are_refused(targets, message):
    with pytest.raises(DataError, match=message):
        head(outputs=2).updated([(X, targets)])


def test_a_head_that_has_learned_nothing_predicts_nothing():
    for call in (lambda h: h.predict(X), lambda h: h.variance(X), lambda h: h.classify(X), lambda h: h.module()):
        with pytest.raises(InertError, match=r"learned nothing yet: head = head.updated"):
            call(head())


def test_inputs_that_do_not_fit_are_not_predicted():
    found = head().updated([together(classes())])
    for inputs, message in [(X[:, :2], r"takes \(N, 6\)"), (X[0], r"shape \(6,\)"), (Y, "int64"), ([1.0], "list")]:
        with pytest.raises(DataError, match=message):
            found.predict(inputs)
    with pytest.raises(ArgumentError, match="learns 2 numbers and knows no classes"):
        head(outputs=2).classify(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features must be a whole number above zero, got 0"),
        ({"features": 2.5}, "got 2.5"),
        ({"features": 3, "outputs": True}, "outputs must be"),
        ({"features": 3, "prior": -1.0}, "prior precision must be a finite number ≥ 0, got -1.0"),
        ({"features": 3, "noise": 0.0}, "noise variance must be a finite number > 0, got 0.0"),
        ({"features": 3, "prior": torch.nan}, "got nan"),
    ],
)
def test_heads_that_cannot_be_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        linear_head(**options)


def test_sums_that_no_data_has_are_refused():
    good = head().updated([together(classes())]).statistics
    lopsided = good.gram.clone()
    lopsided[0, 1] += 1
    for gram, message in [(lopsided, "symmetric"), (-good.gram, "negative"), (2 * good.gram, "Σ1 is 120 over 60")]:
        with pytest.raises(ArgumentError, match=message):
            Statistics(gram, good.cross, good.squares, good.sources)
    with pytest.raises(ArgumentError, match=r"`cross` should be \(7, 6\), and has shape \(6, 6\)"):
        Statistics(good.gram, good.cross[:-1], good.squares, good.sources)


# The file

KINDS = {
    "classes": lambda: head().updated([together(classes())]),
    "numbers": lambda: linear_head(4, outputs=2, prior=1 / 3).updated(numbers()),
    "random": lambda: linear_head(random_features(6, 4)).updated([classes()[0]]).updated([classes()[1]]),
    "nothing yet": head,
    "float32": lambda: head().to(dtype=torch.float32).updated([together(classes())]),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "head.safetensors"


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_the_same_after_a_round_trip(path, kind):
    before = KINDS[kind]()
    before.save(path)
    raw = path.read_bytes()
    after = LinearHead.load(path)
    for name, tensor in before._tensors().items():
        torch.testing.assert_close(after._tensors()[name], tensor, rtol=0, atol=0)
    assert after._facts() == before._facts()
    assert repr(after) == repr(before)
    if before.num_data:
        assert torch.equal(after.mean, before.mean)
    after.save(path)
    assert path.read_bytes() == raw
    assert os.listdir(path.parent) == [path.name]


def test_learning_goes_on_from_a_file(path):
    tasks = classes()
    head().updated([tasks[0]]).save(path)
    found = LinearHead.load(path).updated(tasks[1:])
    assert_same(found, head().updated(tasks))
    with pytest.raises(MismatchError, match="already"):
        LinearHead.load(path).updated([tasks[0]])


def test_a_file_of_the_other_kind_says_what_it_is_and_what_opens_it(path):
    found = KINDS["random"]()
    found.save(path)
    with pytest.raises(MemoryFileError, match=r"holds a linear head, not a memory.*holdfast.LinearHead.load\(path\)"):
        holdfast.load(path)
    assert holdfast.inspect(path)["kind"] == "linear head"
    assert holdfast.inspect(path)["shapes"]["gram"] == [5, 5]
    with pytest.raises(ArgumentError, match=r"head.save\(path\)"):
        holdfast.save(found, path)
    holdfast.save(holdfast.prior(nn.Linear(2, 1)), path)
    with pytest.raises(MemoryFileError, match=r"holds a memory, not a linear head.*holdfast.load\(path\)"):
        LinearHead.load(path)


def refused(path):
    try:
        LinearHead.load(path)
    except MemoryFileError:
        return True
    return False


def test_a_damaged_file_is_refused(path):
    KINDS["random"]().save(path)
    raw = path.read_bytes()
    for length in [0, 8, 9, len(raw) // 2, len(raw) - 1]:
        path.write_bytes(raw[:length])
        assert refused(path), length
    for byte in range(8, len(raw), 3):
        flipped = bytearray(raw)
        flipped[byte] ^= 1 << byte % 8
        path.write_bytes(flipped)
        assert refused(path) or LinearHead.load(path)._facts() == KINDS["random"]()._facts(), byte
    path.write_bytes(pickle.dumps(raw))
    with pytest.raises(MemoryFileError, match="never opened"):
        LinearHead.load(path)


def forged(path, facts, tensors):
    """Write a file with a right checksum over these facts and tensors."""
    text = holdfast.file.canonical({**facts, "sha256": holdfast.file._checksum(facts, tensors)})
    save_file(tensors, path, {"holdfast": text})


JUNK = [None, True, -1, 0.5, 10**30, "x", [], ["x"], {}, {"x": 1}, {"x": -1}, {"x": None}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_a_description_with_junk_in_one_of_its_parts_is_refused(path, junk):
    found = KINDS["random"]()
    found.save(path)
    facts, tensors = found._facts(), load_file(path)
    forged(path, facts, tensors)
    assert not refused(path)
    for key in facts:
        if (key, junk) not in [("prior", 0.5), ("noise", 0.5), ("outputs", None)]:  # such heads could be
            forged(path, {**facts, key: junk}, tensors)
            assert refused(path), f"{key!r}: {junk!r} was accepted"
        forged(path, {other: value for other, value in facts.items() if other != key}, tensors)
        assert refused(path), f"a description without {key!r} was accepted"


def test_tensors_that_no_head_has_are_refused(path):
    found = KINDS["random"]()
    found.save(path)
    facts, tensors = found._facts(), load_file(path)
    for name, tensor in tensors.items():
        for value in (torch.full_like(tensor, torch.nan), -tensor - 1, tensor.half(), tensor[:1], tensor.long()):
            if name in ("cross", "random.weight") and value.shape == tensor.shape and value.dtype != torch.int64:
                if bool(value.isfinite().all()) and value.dtype == tensor.dtype:
                    continue  # such sums, and such features, could be
                if name == "random.weight" and value.dtype == torch.float16:
                    continue
            forged(path, facts, {**tensors, name: value.contiguous()})
            assert refused(path), name
        forged(path, facts, {other: value for other, value in tensors.items() if other != name})
        assert refused(path), name
    forged(path, facts, {**tensors, "more": torch.ones(2)})
    assert refused(path)


def test_the_description_is_one_string_of_json(path):
    KINDS["numbers"]().save(path)
    raw = path.read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    assert list(metadata) == ["holdfast"]
    facts = json.loads(metadata["holdfast"])
    assert (facts["kind"], facts["num_data"], facts["prior"], facts["outputs"]) == ("linear head", 27, 1 / 3, 2)


def test_other_rows_are_not_taken_for_those_that_were_learned():
    """Rows whose places add up alike, and whose squares do."""
    unit = torch.eye(8)
    zeros = torch.zeros(3, dtype=torch.long)
    head = holdfast.linear_head(8).updated([(unit[[1, 5, 6]], zeros)])
    assert head.updated([(unit[[2, 3, 7]], zeros)]).num_data == 6
