"""What will be forgotten: the quadratic's parts, kept answers moved as probes were, and budgets."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast.hold import budget
from holdfast.rise import ByProbes, Paired


def clouds(turn=0.0, rows=1500):
    """Three classes in ten dimensions, told apart by directions that `turn` turns."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 10, generator=generator)
    z = math.cos(turn) * x[:, :3] + math.sin(turn) * x[:, 3:6]
    return x, z.argmax(1)


def trained(x, y, steps=200):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 3))
    fit(model, x, y, steps)
    return model


def fit(model, x, y, steps, held=None):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = None if held is None else held(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    return handle


def loss(model, x, y):
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def remembered(model, x, y, likelihood):
    """A memory of a diagonal Fisher, probes and answers."""
    fisher = holdfast.diagonal_fisher(model, [(x, y)], likelihood)
    return holdfast.Memory.of(
        holdfast.consolidate(holdfast.prior(model), model, fisher), model, holdfast.gaussian_probes([x]),
        holdfast.kept_answers(model, [(x, y)], likelihood),
    )  # fmt: skip


@pytest.fixture(scope="module")
def scene():
    x, y = clouds()
    model = trained(x, y)
    fisher = holdfast.kronecker_fisher(model, [(x, y)], holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    answers = holdfast.kept_answers(model, [(x, y)], holdfast.categorical)
    return model, holdfast.Memory.of(posterior, model, holdfast.gaussian_probes([(x, y)]), answers), x, y


class TestForecast:
    def test_nothing_moved_and_nothing_is_lost(self, scene):
        model, memory, _, _ = scene
        said = holdfast.forecast(model, memory)
        assert said.quadratic == 0
        assert abs(said.rise) < 1e-8
        assert abs(said.safe) < 1e-8
        assert said.trusted

    def test_the_quadratic_is_the_penalty_per_example_and_its_parts_add_up(self, scene):
        model, memory, _, _ = scene
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.05
        said = holdfast.forecast(other, memory.posterior)
        expected = float(holdfast.penalty(other, memory.posterior).detach()) / memory.num_data
        assert said.quadratic == pytest.approx(expected, rel=1e-5)
        assert sum(said.by_parameter.values()) == pytest.approx(said.quadratic)
        assert set(said.by_layer) == {"0", "2"}
        assert said.by_layer["0"] == pytest.approx(said.by_parameter["0.weight"] + said.by_parameter["0.bias"])

    @pytest.mark.parametrize("steps", [3, 10, 40])
    def test_a_rise_is_foretold_without_the_data(self, scene, steps):
        model, memory, x, y = scene
        other = copy.deepcopy(model)
        fit(other, x, clouds(turn=0.7)[1], steps)
        rise = loss(other, x, y) - loss(model, x, y)
        said = holdfast.forecast(other, memory)
        assert rise > 0.01
        assert rise / 1.5 < said.rise < 1.5 * rise
        assert rise < said.safe

    def test_the_model_is_left_as_it_was(self, scene):
        model, memory, _, _ = scene
        other = copy.deepcopy(model).train()
        before, state = {k: v.clone() for k, v in other.state_dict().items()}, torch.get_rng_state()
        holdfast.forecast(other, memory)
        assert other.training
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())

    def test_what_is_missing_is_said_when_it_is_asked_for(self, scene):
        model, memory, _, _ = scene
        said = holdfast.forecast(model, holdfast.Memory.of(memory.posterior, model, memory.probes))
        assert any("ranks" in doubt for doubt in said.doubts)
        with pytest.raises(holdfast.ArgumentError, match=r"has no answers.*kept_answers"):
            _ = said.safe

    def test_a_new_head_a_prior_another_model_and_broken_weights(self, scene):
        model, memory, _, _ = scene
        grown = nn.Sequential(*copy.deepcopy(model), nn.Linear(3, 3))
        said = holdfast.forecast(grown, memory)
        assert any("new head" in doubt for doubt in said.doubts)
        assert any("could not be asked" in doubt for doubt in said.doubts)
        with pytest.raises(holdfast.ArgumentError, match="which trains"):
            _ = said.by_probes
        with pytest.raises(holdfast.ArgumentError, match="no data"):
            holdfast.forecast(model, holdfast.prior(model))
        with pytest.raises(holdfast.HoldfastError, match="no parameter of the memory"):
            holdfast.forecast(nn.Linear(10, 3), memory)
        broken = copy.deepcopy(model)
        with torch.no_grad():
            broken[0].weight[0, 0] = torch.nan
        with pytest.raises(holdfast.MismatchError, match="not finite"):
            holdfast.forecast(broken, memory)

    def test_far_out_it_says_so_and_advises_to_train_anew(self, scene):
        model, memory, _, _ = scene
        far = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in far.parameters():
                parameter.mul_(-4.0)
        said = holdfast.forecast(far, memory)
        assert not said.trusted
        assert any("train anew" in doubt for doubt in said.doubts)

    def test_probes_at_a_layer_do_not_see_what_is_below(self, scene):
        model, memory, x, _ = scene
        probes = holdfast.gaussian_probes([x], model=model, layer="1")
        said = holdfast.forecast(model, holdfast.Memory.of(memory.posterior, model, probes, memory.answers))
        with pytest.raises(holdfast.ArgumentError, match="below it"):
            _ = said.by_probes

    @pytest.mark.parametrize("likelihood", [holdfast.gaussian(0.5), holdfast.bernoulli])
    def test_other_likelihoods(self, likelihood):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(800, 4, generator=generator)
        y = (x @ torch.randn(4, 2, generator=generator)).sigmoid().round()
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(100):
            optimizer.zero_grad()
            likelihood.nll(model(x), y).mean().backward()
            optimizer.step()
        memory, other = remembered(model, x, y, likelihood), copy.deepcopy(model)
        with torch.no_grad():
            other.weight += 0.4
            rise = float((likelihood.nll(other(x), y) - likelihood.nll(model(x), y)).mean())
        assert rise / 1.6 < holdfast.forecast(other, memory).rise < 1.6 * rise

    def test_one_number_an_example(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
        x, likelihood = torch.randn(500, 4), holdfast.gaussian(0.5)
        y = model(x).detach() + 0.5 * torch.randn(500)
        memory, other = remembered(model, x, y, likelihood), copy.deepcopy(model)
        with torch.no_grad():
            other[0].weight += 0.3
            rise = float((likelihood.nll(other(x), y) - likelihood.nll(model(x), y)).mean())
        assert rise / 1.5 < holdfast.forecast(other, memory).rise < 1.5 * rise

    def test_tokens_are_answered_one_by_one(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        x = torch.randint(0, 11, (50, 6))
        likelihood = holdfast.tokens(shift=True)
        answers = holdfast.kept_answers(model, [(x, x)], likelihood, count=100)
        assert answers.outputs.shape == (100, 11)
        assert (answers.kind, answers.unit, answers.num_data) == ("categorical", "token", 250)
        fisher = holdfast.diagonal_fisher(model, [(x, x)], likelihood, targets="observed")
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
        text = holdfast.own_text(model, count=40, length=6, num_data=250)
        memory = holdfast.Memory.of(posterior, model, text, answers)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[1].weight += 0.3 * torch.randn(11, 8)
            rise = float((likelihood.nll(other(x), x) - likelihood.nll(model(x), x)).sum() / 250)
        said = holdfast.forecast(other, memory)
        assert said.unit == "token"
        assert rise / 2 < said.rise < 2 * rise


class TestPaired:
    def test_where_probes_are_the_answers_themselves_the_rise_is_exact(self):
        """Each answer's nearest probe is its own: z + δ is the new output, and nothing is estimated."""
        generator = torch.Generator().manual_seed(0)
        old, new = torch.randn(2, 60, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (60,), generator=generator)
        answers = holdfast.Answers(old, labels, "categorical", 60)
        found = Paired(answers, old, near=1).rise(new)
        expected = float(F.cross_entropy(new, labels) - F.cross_entropy(old, labels))
        assert found.by_outputs == pytest.approx(expected)
        assert found.by_probabilities == pytest.approx(expected)

    def test_classes_that_were_added_take_their_part(self):
        generator = torch.Generator().manual_seed(0)
        old, new = torch.randn(60, 4, generator=generator), torch.randn(60, 6, generator=generator)
        labels = torch.randint(0, 4, (60,), generator=generator)
        found = Paired(holdfast.Answers(old, labels, "categorical", 60), old, near=1).rise(new)
        expected = float(F.cross_entropy(new, labels) - F.cross_entropy(old, labels))
        assert found.by_outputs == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("likelihood", [holdfast.categorical, holdfast.gaussian(0.5)], ids=["classes", "numbers"])
    def test_answers_of_a_smaller_head_are_completed_by_what_like_probes_were_answered(self, likelihood):
        """The slow twin: answer by answer, its nearest probes by a loop; the model has six outputs now, and had five.

        Numbers stand each for itself: those that an answer never had are no part of its loss.
        """
        generator = torch.Generator().manual_seed(0)
        old, new = (torch.randn(40, width, generator=generator, dtype=torch.float64) for width in (5, 6))
        parts = []
        for width, rows in ((3, 24), (5, 8)):
            outputs = torch.randn(rows, width, generator=generator, dtype=torch.float64)
            classes = torch.randint(0, width, (rows,), generator=generator)
            labels = classes if likelihood is holdfast.categorical else torch.randn_like(outputs)
            parts.append(holdfast.Answers(outputs, labels, likelihood.name, rows))
        whole = holdfast.Answers(
            torch.cat([F.pad(parts[0].outputs, (0, 2)), parts[1].outputs]),
            torch.cat([
                each.labels if each.labels.ndim == 1 else F.pad(each.labels, (0, 5 - each.labels.shape[1]))
                for each in parts
            ]),
            likelihood.name, 32, known=torch.tensor([3] * 24 + [5] * 8),
        )  # fmt: skip
        rises = []
        for part in parts:
            for z, label in zip(part.outputs, part.labels, strict=True):
                width, classes = len(z), label.ndim == 0
                seen = old[:, :width]
                middle = (seen - seen.mean(1, keepdim=True), z - z.mean()) if classes else (seen, z)
                near = (middle[0] - middle[1]).square().sum(1).argsort()[:10]
                each = []
                for probe in near:
                    before = torch.cat([z, old[probe, width:]]) if classes else z
                    after = z + new[probe, :width] - old[probe, :width]
                    after = torch.cat([after, new[probe, width:]]) if classes else after
                    losses = [likelihood.nll(row.unsqueeze(0), label.unsqueeze(0)).item() for row in (after, before)]
                    each.append(losses[0] - losses[1])
                rises.append(sum(each) / len(each))
        assert Paired(whole, old).rise(new).by_outputs == pytest.approx(sum(rises) / len(rises), rel=1e-10)
        assert Paired(whole, old).rise(old).by_outputs == 0

    def test_what_is_softmax_invariant_pairs_alike(self):
        generator = torch.Generator().manual_seed(0)
        old, new = torch.randn(2, 60, 4, generator=generator)
        answers = holdfast.Answers(old, torch.randint(0, 4, (60,), generator=generator), "categorical", 60)
        shifted = Paired(answers, old + 5.0).rise(new + 5.0)
        assert shifted.by_outputs == pytest.approx(Paired(answers, old).rise(new).by_outputs, rel=1e-4)

    def test_outputs_of_another_shape_are_refused(self):
        answers = holdfast.Answers(torch.randn(5, 3), torch.zeros(5).long(), "categorical", 5)
        with pytest.raises(holdfast.MismatchError, match="outputs of shape"):
            Paired(answers, torch.randn(7, 4))
        with pytest.raises(holdfast.MismatchError, match="answers probes with"):
            Paired(answers, torch.randn(7, 3)).rise(torch.randn(7, 2))


class TestAnswers:
    def test_they_are_a_sample_whatever_the_batches_and_go_through_a_file(self, scene, tmp_path):
        model, memory, x, y = scene
        batches = list(zip(x.split(100), y.split(100), strict=True))
        answers = holdfast.kept_answers(model, batches, holdfast.categorical, count=300)
        assert answers.num_data == 1500
        with torch.no_grad():
            every = model(x)
        near = (answers.outputs.unsqueeze(1) - every).abs().amax(-1).min(1)
        assert float(near.values.max()) < 1e-4
        assert len(near.indices.unique()) == 300
        assert 550 < float(near.indices.double().mean()) < 950  # of all batches
        assert torch.equal(y[near.indices], answers.labels)
        holdfast.save(memory.with_answers(answers), tmp_path / "memory")
        found = holdfast.load(tmp_path / "memory").answers
        assert found.num_data == 3000
        assert torch.equal(found.outputs, memory.with_answers(answers).answers.outputs)

    def test_two_tasks_take_no_more_room_and_weigh_by_their_data(self):
        ones = holdfast.Answers(torch.ones(100, 3), torch.zeros(100).long(), "categorical", 900)
        twos = holdfast.Answers(2 * torch.ones(100, 3), torch.ones(100).long(), "categorical", 300)
        both = ones + twos
        assert len(both.outputs) == 100
        assert both.num_data == 1200
        assert int((both.labels == 0).sum()) == 75
        assert torch.equal(both.outputs[:, 0].long() - 1, both.labels)
        half = both.labels[:50].double().mean()
        assert 0.05 < float(half) < 0.5  # mixed

    @pytest.mark.parametrize(
        ("rows", "data"), [((50, 2000), (60000, 10000)), ((40, 700), (30, 3000)), ((1, 9), (5, 5))]
    )
    def test_the_one_with_few_rows_for_its_data_decides_how_many_there_are(self, rows, data):
        """Every row counts the same later: the share of rows is the share of the data, in either order."""
        few, many = (
            holdfast.Answers(torch.randn(count, 3), torch.full((count,), index), "categorical", stands_for)
            for index, (count, stands_for) in enumerate(zip(rows, data, strict=True))
        )
        for both, own in ((few + many, 0), (many + few, 0)):
            share = data[0] / sum(data)
            assert float((both.labels == own).double().mean()) == pytest.approx(share, abs=1 / len(both.labels))
            assert len(both.labels) <= max(rows)
            assert len(both.labels) >= min(rows[0] / share, max(rows)) - 2

    @pytest.mark.parametrize("data", [(1e16, 1.0), (1e-9, 6e4), (1e19, 1e19), (5e307, 5e307)])
    def test_however_far_apart_they_are(self, data):
        one, other = (
            holdfast.Answers(torch.randn(10, 3), torch.full((10,), index), "categorical", each)
            for index, each in enumerate(data)
        )
        for both in (one + other, other + one):
            assert len(both.labels) == 10
            assert both.num_data == sum(data)
            share = data[1] / sum(data)
            assert float(both.labels.double().mean()) == pytest.approx(share, abs=0.1)

    def test_more_than_there_are_numbers_is_refused_and_the_wider_dtype_is_kept(self):
        one = holdfast.Answers(torch.randn(10, 3), torch.zeros(10).long(), "categorical", 1e308)
        with pytest.raises(holdfast.ArgumentError, match="more examples than there are numbers"):
            one + one
        narrow = holdfast.Answers(torch.randn(10, 3).half(), torch.zeros(10).long(), "categorical", 10)
        wide = holdfast.Answers(1e6 * torch.randn(10, 3), torch.zeros(10).long(), "categorical", 10)
        assert (narrow + wide).outputs.dtype == torch.float32

    def test_many_small_tasks_beside_a_large_one_with_few_rows_are_let_in(self):
        """Each has less than half a row of its own."""
        one = holdfast.Answers(torch.randn(20, 3), torch.zeros(20).long(), "categorical", 20000)
        for _ in range(200):
            one += holdfast.Answers(torch.randn(20, 3), torch.ones(20).long(), "categorical", 100)
        assert len(one.labels) == 20
        assert 4 <= int(one.labels.sum()) <= 16  # of half the data

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"kind": "custom"}, "categorical, bernoulli, gaussian"),
            ({"kind": "gaussian(scale=0.5)"}, "shape"),
            ({"labels": torch.full((5,), 7)}, "3 classes"),
            ({"labels": torch.zeros(4).long()}, "labels"),
            ({"outputs": torch.full((5, 3), torch.nan)}, "finite"),
            ({"num_data": 0.0}, "positive"),
        ],
    )
    def test_what_cannot_be(self, change, match):
        given = {"outputs": torch.randn(5, 3), "labels": torch.zeros(5).long(), "kind": "categorical", "num_data": 5.0}
        with pytest.raises(holdfast.HoldfastError, match=match):
            holdfast.Answers(**{**given, **change})

    def test_likelihoods_of_ones_own_and_missing_labels_are_refused(self, scene):
        model, _, x, y = scene
        own = holdfast.custom(lambda output, target: F.cross_entropy(output, target, reduction="none"), name="mine")
        with pytest.raises(holdfast.ArgumentError, match="not for 'mine'"):
            holdfast.kept_answers(model, [(x, y)], own)
        with pytest.raises(holdfast.DataError, match="no labels"):
            holdfast.kept_answers(model, [x], holdfast.categorical)
        with pytest.raises(holdfast.DataError, match="no batches"):
            holdfast.kept_answers(model, [], holdfast.categorical)

    @pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
    def test_those_of_a_head_that_grew_keep_as_many_outputs_as_they_had(self, kind, scene, tmp_path):
        """In either order, three heads after each other, through a file, half as much, and in parts again."""
        generator = torch.Generator().manual_seed(0)
        kept = {}
        for width in (3, 4, 6):
            outputs = torch.randn(90, width, generator=generator)
            labels = torch.full((90,), width - 1) if kind == "categorical" else torch.rand(90, width)
            kept[width] = holdfast.Answers(outputs, labels, kind, 300)
        memory = dataclasses.replace(scene[1], answers=None)
        for order in ((3, 4, 6), (6, 3, 4), (4, 6, 3)):
            grown = memory
            for width in order:
                grown = grown.with_answers(kept[width])
            holdfast.save(dataclasses.replace(grown, answers=grown.answers.thinned(0.5)), tmp_path / "memory")
            found = holdfast.load(tmp_path / "memory").answers
            assert found.num_data == 450
            assert [part.outputs.shape[1] for part in found.alike] == [3, 4, 6]
            for part in found.alike:
                same = (part.outputs.unsqueeze(1) == kept[part.outputs.shape[1]].outputs).all(-1)
                assert torch.equal(part.labels, kept[part.outputs.shape[1]].labels[same.int().argmax(1)])
                assert bool(same.any(1).all())
                assert part.num_data == pytest.approx(150, abs=450 / 90)

    def test_answers_of_two_models_are_not_joined_and_classes_are_among_those_that_were_known(self):
        flat = holdfast.Answers(torch.randn(5), torch.randn(5), "gaussian(scale=1.0)", 5)
        large = holdfast.Answers(torch.randn(5, 4), torch.randn(5, 4), "gaussian(scale=1.0)", 5)
        with pytest.raises(holdfast.MismatchError, match="not of one model"):
            flat + large
        outputs, labels = torch.randn(2, 4), torch.tensor([3, 0])
        with pytest.raises(holdfast.DataError, match="has 3 classes"):
            holdfast.Answers(outputs, labels, "categorical", 2, known=torch.tensor([3, 4]))
        for known in (torch.tensor([4, 5]), torch.tensor([0, 4]), torch.tensor([4]), torch.tensor([4.0, 4.0])):
            with pytest.raises(holdfast.ArgumentError, match="no more than there are"):
                holdfast.Answers(outputs, labels, "categorical", 2, known=known)


def test_the_bound_is_twice_the_larger_estimate_and_two_deviations_and_never_below_these():
    assert ByProbes(0.1, 0.3, 1.0, 0.02).safe == pytest.approx(0.64)
    assert ByProbes(0.3, 0.1, 1.0, 0.02).safe == pytest.approx(0.64)
    assert ByProbes(-0.3, -0.1, 1.0, 0.02).safe == pytest.approx(0.04)


LOCAL = pytest.mark.filterwarnings("ignore:.*told by the quadratic")
GOES_BACK = pytest.mark.filterwarnings("ignore:to stay within")  # more than half of the way


def overspent(scene, budget=0.01):
    """A model that four large steps took out of its budget, and the handle that held it."""
    model, memory, x, _ = scene
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    handle = holdfast.hold(optimizer, other, memory, num_data=len(x), strength=1e-3, budget=budget)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(other(x), clouds(turn=1.0)[1]).backward()
        optimizer.step()
    return other, handle


class TestBudget:
    @pytest.mark.parametrize("budget", [0.02, 0.1])
    def test_it_is_kept_on_the_old_data_and_the_new_task_is_learned(self, scene, budget):
        model, memory, x, y = scene
        new = clouds(turn=0.5)[1]
        other = copy.deepcopy(model)
        handle = fit(other, x, new, 300, lambda o: holdfast.hold(o, other, memory, num_data=len(x), budget=budget))
        assert handle.spent.by == "probes"
        assert handle.spent.rise <= budget
        assert loss(other, x, y) - loss(model, x, y) < 1.3 * budget
        assert loss(other, x, new) < loss(model, x, new)

    @GOES_BACK
    def test_the_finish_goes_back_on_the_straight_line_to_the_mean(self, scene):
        memory, (other, handle) = scene[1], overspent(scene)
        before = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
        spent = handle.finish()
        assert 0 < spent.kept < 1
        assert spent.rise <= 0.01
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), torch.lerp(memory.mean[name], before[name], spent.kept), rtol=1e-5, atol=1e-6
            )
        handle.remove()
        assert handle.spent is spent  # nothing is finished twice

    @GOES_BACK
    def test_of_weights_that_were_loaded_the_way_is_their_own(self, scene):
        """A checkpoint that a trainer loads at the end is not what the last finish left; the same weights are."""
        other, handle = overspent(scene)
        trained = copy.deepcopy(other.state_dict())
        first = handle.finish()
        assert handle.finish().kept == first.kept
        other.load_state_dict(trained)
        assert handle.finish().kept == pytest.approx(first.kept, rel=1e-6)
        handle.detach()

    @GOES_BACK
    def test_what_is_trained_after_a_finish_is_brought_back_too(self, scene):
        """As by an evaluation between two epochs: what came after it would be over the budget, and nothing said so."""
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
        with holdfast.hold(optimizer, other, memory, num_data=len(x), strength=1e-3, budget=0.01) as handle:
            for finished in (False, True):
                for _ in range(4):
                    optimizer.zero_grad()
                    F.cross_entropy(other(x), clouds(turn=1.0)[1]).backward()
                    optimizer.step()
                assert handle.spent is None
                assert holdfast.forecast(other, memory).rise > 0.02
                if not finished:
                    handle.finish()
        assert holdfast.forecast(other, memory).rise < 0.012

    def test_a_finish_that_takes_most_of_it_back_says_so(self, scene):
        _, handle = overspent(scene, budget=0.001)
        with pytest.warns(holdfast.HoldfastWarning, match=r"went back \d+ % of its way"):
            spent = handle.finish()
        assert 0.02 < spent.kept < 0.5

    @GOES_BACK
    def test_the_probes_go_through_a_model_in_a_way_of_its_own(self, scene):
        model, memory, x, y = scene

        class Keyed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = copy.deepcopy(model)

            def forward(self, batch):
                return {"scores": self.inner(batch["x"])}

        other = Keyed()
        fisher = holdfast.diagonal_fisher(
            other, [(x, y)], holdfast.categorical, forward=lambda m, batch: m({"x": batch[0]})["scores"]
        )
        posterior = holdfast.consolidate(holdfast.prior(other), other, fisher)
        given = holdfast.Memory.of(posterior, other, memory.probes, memory.answers)
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        with pytest.raises(holdfast.ArgumentError, match="forward=lambda model, inputs"):
            holdfast.hold(optimizer, other, given, num_data=len(x), budget=0.05)
        with pytest.raises(holdfast.ArgumentError, match="forward=lambda model, inputs"):
            holdfast.forecast(other, given)
        assert holdfast.forecast(other, given, forward=lambda m, i: m({"x": i})["scores"]).probes is not None
        with pytest.raises(holdfast.ArgumentError, match="no budget here"):
            holdfast.hold(optimizer, other, given, num_data=len(x), forward=lambda m, i: m({"x": i})["scores"])
        with holdfast.hold(
            optimizer, other, given, num_data=len(x), budget=0.05, forward=lambda m, i: m({"x": i})["scores"]
        ) as handle:
            for _ in range(50):
                optimizer.zero_grad()
                F.cross_entropy(other({"x": x})["scores"], clouds(turn=0.5)[1]).backward()
                optimizer.step()
        assert handle.spent.by == "probes"
        assert loss(other.inner, x, y) - loss(model, x, y) < 0.07

    def test_inside_it_nothing_is_changed_and_the_strength_falls(self, scene):
        model, memory, x, y = scene
        other = copy.deepcopy(model)
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-5)
        with holdfast.hold(optimizer, other, memory, num_data=len(x), budget=5.0) as handle:
            for _ in range(50):
                optimizer.zero_grad()
                F.cross_entropy(other(x), y).backward()
                optimizer.step()
            before = other[0].weight.detach().clone()
        assert handle.spent.kept == 1
        assert torch.equal(other[0].weight, before)
        assert handle.spent.strength < 0.5

    @LOCAL
    def test_without_probes_the_quadratic_tells(self, scene):
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        handle = fit(
            other, x, clouds(turn=0.5)[1], 200,
            lambda o: holdfast.hold(o, other, memory.posterior, num_data=len(x), budget=0.01),
        )  # fmt: skip
        assert "local" in handle.spent.by
        assert float(holdfast.penalty(other, memory.posterior).detach()) / memory.num_data <= 0.0101

    @LOCAL
    def test_of_several_terms_the_largest_estimate_counts(self, scene):
        """A mean of the quadratic and the divergence would hide that one of them is spent."""
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        fit(other, x, clouds(turn=0.5)[1], 20)
        term = holdfast.distill(other, memory, likelihood=holdfast.categorical)
        posterior = memory.posterior
        each = [
            float(holdfast.penalty(other, posterior).detach()) / posterior.num_data,
            float(term.value(other)) / term.num_data,
        ]
        assert max(each) > 1.2 * min(each)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        with holdfast.hold(optimizer, other, [posterior, term], num_data=len(x), budget=10.0) as handle:
            F.cross_entropy(other(x), clouds(turn=0.5)[1]).backward()
            optimizer.step()
        assert handle.spent.rise == pytest.approx(max(each), rel=1e-4)

    def test_a_budget_that_leaves_nothing_is_refused_and_nothing_is_lost(self, scene):
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        optimizer = torch.optim.SGD(other.parameters(), lr=50.0)
        handle = holdfast.hold(optimizer, other, memory, num_data=len(x), strength=0.0, budget=0.001)
        optimizer.zero_grad()
        F.cross_entropy(other(x), clouds(turn=1.5)[1]).backward()
        optimizer.step()
        before = other[0].weight.detach().clone()
        with pytest.raises(holdfast.BudgetError, match="as it was trained"):
            handle.finish()
        assert torch.equal(other[0].weight, before)
        with pytest.raises(holdfast.BudgetError):
            handle.remove()

    @pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), 1e-9])
    def test_what_is_no_budget(self, scene, budget):
        model, memory, x, _ = scene
        optimizer = torch.optim.Adam(model.parameters())
        with pytest.raises(holdfast.ArgumentError, match="budget"):
            holdfast.hold(optimizer, model, memory, num_data=len(x), budget=budget)

    def test_it_needs_one_memory_that_tells_something(self, scene):
        model, memory, x, _ = scene
        optimizer = torch.optim.Adam(model.parameters())
        term = holdfast.distill(model, memory, likelihood=holdfast.categorical)
        with pytest.raises(holdfast.ArgumentError, match="one memory, got 0"):
            holdfast.hold(optimizer, model, term, num_data=len(x), budget=0.1)
        with pytest.raises(holdfast.ArgumentError, match="prior alone"):
            holdfast.hold(optimizer, model, holdfast.prior(model), num_data=len(x), budget=0.1)
        handle = holdfast.hold(optimizer, model, term, num_data=len(x))
        with pytest.raises(holdfast.ArgumentError, match="no budget"):
            handle.finish()
        handle.detach()

    @LOCAL
    def test_a_prior_beside_a_term_spends_nothing(self, scene):
        """It knows no data, per example of which it could be told."""
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        fit(other, x, clouds(turn=0.5)[1], 20)
        term = holdfast.distill(other, memory, likelihood=holdfast.categorical)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        terms = [holdfast.prior(other, precision=5.0, mean=0.0), term]
        with holdfast.hold(optimizer, other, terms, num_data=len(x), budget=10.0) as handle:
            F.cross_entropy(other(x), clouds(turn=0.5)[1]).backward()
            optimizer.step()
        assert handle.spent.rise == pytest.approx(float(term.value(other)) / term.num_data, rel=1e-4)

    def test_what_is_in_nats_and_what_is_not_are_no_budget_together(self, scene):
        model, _, x, y = scene
        known = holdfast.consolidate(
            holdfast.prior(model), model, holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
        )
        both = holdfast.consolidate(known, model, holdfast.sensitivity(model, [(x[:50], y[:50])]))
        optimizer = torch.optim.Adam(model.parameters())
        with pytest.raises(holdfast.ArgumentError, match=r"a sensitivity \(MAS\), which is not"):
            holdfast.hold(optimizer, model, both, num_data=len(x), budget=0.1)

    def test_what_is_not_a_number_is_no_budget_kept(self, scene):
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        handle = holdfast.hold(optimizer, other, memory, num_data=len(x), budget=0.1)
        with torch.no_grad():
            other[0].weight[0, 0] = torch.nan
        with pytest.raises(holdfast.BudgetError, match="not a number"):
            handle.finish()

        def train():
            with handle:
                for _ in range(5):
                    other(x).sum().backward()
                    optimizer.step()

        with pytest.raises(holdfast.BudgetError, match="not a number"):  # no more is said: it would not help
            train()

    def test_a_quadratic_that_does_not_see_what_trains_keeps_no_budget(self, scene):
        model, _, x, y = scene
        fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical, only="2.*")
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
        optimizer = torch.optim.Adam(model.parameters())
        with pytest.raises(holdfast.ArgumentError, match=r"0\.weight.*which trains"):
            holdfast.hold(optimizer, model, posterior, num_data=len(x), budget=0.1)

    def test_without_probes_it_warns_that_it_may_be_overspent_and_of_what_it_does_not_see(self):
        x, y = clouds()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
        fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
        optimizer = torch.optim.Adam(model.parameters())
        with pytest.warns(holdfast.HoldfastWarning, match=r"local estimate.*does not see `1.running_mean`") as said:
            holdfast.hold(optimizer, model, posterior, num_data=len(x), budget=0.05, freeze_statistics=False)
        assert said[0].filename == __file__

    @pytest.mark.parametrize("way", ["finish", "remove", "with"])
    def test_what_is_taken_back_is_said_of_the_users_line(self, scene, way):
        _, handle = overspent(scene, budget=0.001)

        def leave():
            with handle:
                pass

        with pytest.warns(holdfast.HoldfastWarning, match="went back") as said:
            (leave if way == "with" else getattr(handle, way))()
        assert said[0].filename == __file__

    @GOES_BACK
    def test_statistics_go_back_with_the_weights(self):
        x, y = clouds()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
        fit(model, x, y, 200)
        model.eval()
        fisher = holdfast.kronecker_fisher(model, [(x, y)], holdfast.categorical)
        memory = holdfast.Memory.of(
            holdfast.consolidate(holdfast.prior(model), model, fisher), model, holdfast.gaussian_probes([x]),
            holdfast.kept_answers(model, [(x, y)], holdfast.categorical),
        )  # fmt: skip
        before = loss(model, x, y)
        model.train()
        fit(
            model, x + 1.0, clouds(turn=0.8)[1], 60,
            lambda o: holdfast.hold(o, model, memory, num_data=len(x), budget=0.05, freeze_statistics=False),
        )  # fmt: skip
        model.eval()
        assert loss(model, x, y) - before < 0.07

    @GOES_BACK
    def test_finished_twice_it_remembers_how_far_it_went_back(self, scene):
        _, handle = overspent(scene)
        first = handle.finish()
        assert handle.finish().kept == pytest.approx(first.kept)
        handle.remove()

    def test_left_by_an_error_it_says_that_the_budget_is_not_finished(self, scene):
        model, memory, x, y = scene
        other = copy.deepcopy(model)
        optimizer = torch.optim.Adam(other.parameters())

        def interrupted():
            with holdfast.hold(optimizer, other, memory, num_data=len(x), budget=0.1):
                F.cross_entropy(other(x), y).backward()
                optimizer.step()
                raise KeyboardInterrupt

        with (
            pytest.warns(holdfast.HoldfastWarning, match="before its budget was finished"),
            pytest.raises(KeyboardInterrupt),
        ):
            interrupted()

    @GOES_BACK
    def test_of_several_optimizers_each_steps_count(self, scene):
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.05) for part in (other[0], other[2])]
        with holdfast.hold(optimizers, other, memory, num_data=len(x), budget=0.01) as handle:
            for _ in range(20):
                F.cross_entropy(other(x), clouds(turn=1.0)[1]).backward()
                optimizers[0].step()
                optimizers[1].step()
            assert handle.strength > 1
            assert handle.metrics()["holdfast/spent"] > 0.01


class TestSteering:
    """The strength from look to look, where what these find is given."""

    @pytest.fixture
    def told(self, scene, monkeypatch):
        """A budget of 0.1 nats and its model, what the looks will find, and how many probes were drawn for them."""
        found, drawn = [], []

        def asked(model, memory, draws, seed, *rest):
            drawn.append((draws, seed))
            return SimpleNamespace(rise=lambda now: found.pop(0)), lambda: None

        monkeypatch.setattr(budget, "asked", asked)
        model, memory, *_ = scene
        return budget.Budget(0.1, memory, []), copy.deepcopy(model), found, drawn

    def looked(self, told, spent, strength):
        """The strength after the fifth step, at which there is a look; the four before leave it as it was."""
        limit, model, found, _ = told
        found.append(ByProbes(spent, 0.0, 1.0, 0.0))
        assert [limit.turn(model, strength) for _ in range(4)] == [strength] * 4
        return limit.turn(model, strength)

    def test_the_larger_estimate_counts_and_a_deviation(self, told):
        limit, model, found, _ = told
        for pair in ((0.3, 0.1), (0.1, 0.3)):
            found.append(ByProbes(*pair, 1.0, 0.02))
            assert limit.ready(model)() == pytest.approx(0.32)

    def test_the_strength_follows_the_logarithm_of_what_is_spent(self, told):
        strength = 2.0
        for spent, factor in ((0.2, 2**0.3), (0.05, 0.5**0.3), (100.0, math.exp(0.3)), (1e-9, math.exp(-0.3))):
            before, strength = strength, self.looked(told, spent, strength)
            assert strength == pytest.approx(before * factor)
        assert self.looked(told, 1e-9, 1e-3) == 1e-3
        assert self.looked(told, 0.2, 1e5) == 1e5

    def test_forty_looks_in_a_row_over_the_budget_at_the_strongest_hold_are_hopeless(self, told):
        for spent in [0.2] * 39 + [0.05] + [0.2] * 39:
            self.looked(told, spent, 1e5)
        with pytest.raises(holdfast.BudgetError, match="cannot be kept with any learning"):
            self.looked(told, 0.2, 1e5)

    def test_it_goes_on_from_its_state(self, told, scene):
        """In the middle between two looks, and one look before there is no hope."""
        limit, model, found, _ = told
        for _ in range(39):
            self.looked(told, 0.2, 1e5)
        assert [limit.turn(model, 1e5) for _ in range(2)] == [1e5] * 2
        again = budget.Budget(0.1, scene[1], [])
        again.load_state_dict(limit.state_dict())
        assert again.spent == 0.2
        found.append(ByProbes(0.2, 0.0, 1.0, 0.0))
        assert [again.turn(model, 1e5) for _ in range(2)] == [1e5] * 2
        with pytest.raises(holdfast.BudgetError, match="cannot be kept with any learning"):
            again.turn(model, 1e5)

    def test_the_finish_is_told_by_more_probes_and_by_others(self, told):
        limit, model, found, drawn = told
        limit.ready(model)
        found.append(ByProbes(0.05, 0.0, 1.0, 0.0))
        limit.finish(model, 1.0, 1)
        (draws, seed), (last_draws, last_seed) = drawn
        assert last_draws > draws
        assert last_seed != seed


class TestGrownAndStale:
    def test_a_head_that_grew_is_asked_about_what_it_knew(self, scene):
        model, memory, x, y = scene
        grown = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 5))
        with torch.no_grad():
            grown[0].load_state_dict(model[0].state_dict())
            grown[2].weight[:3], grown[2].bias[:3] = model[2].weight, model[2].bias
            grown[2].weight[3:], grown[2].bias[3:] = 0.0, 1.0
        said = holdfast.forecast(grown, memory.expanded(grown))
        rise = loss(grown, x, y) - loss(model, x, y)
        assert rise > 0.05
        assert rise / 1.5 < said.rise < 1.5 * rise

    def test_after_another_task_both_are_foretold_and_budgeted_by_answers_of_two_heads(self, tmp_path):
        """Three classes, then two more, then two more: the rise of the loss on all five is that since the second."""
        torch.manual_seed(0)
        centers = torch.randn(7, 10)
        y = torch.arange(2100) % 7
        x = centers[y] + 0.6 * torch.randn(2100, 10)
        first, second, third = (torch.isin(y, torch.tensor(of)) for of in ((0, 1, 2), (3, 4), (5, 6)))

        def net(classes):
            return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, classes))

        model = net(3)
        fit(model, x[first], y[first], 100)
        memory = remembered(model, x[first], y[first], holdfast.categorical)
        grown = net(5)
        memory = memory.expanded(grown)
        holdfast.restore_(grown, memory)
        term = holdfast.distill(grown, memory, likelihood=holdfast.categorical)
        fit(grown, x[second], y[second], 100, lambda o: holdfast.hold(o, grown, [memory, term], num_data=600))
        batches = [(x[second], y[second])]
        memory = holdfast.consolidate(
            memory, grown, holdfast.diagonal_fisher(grown, batches, holdfast.categorical)
        ).with_probes(holdfast.gaussian_probes([x[second]]))
        assert any("with_answers" in doubt for doubt in holdfast.forecast(grown, memory).doubts)
        memory = memory.with_answers(holdfast.kept_answers(grown, batches, holdfast.categorical))
        assert memory.answers.num_data == memory.num_data == 1500
        said = holdfast.forecast(grown, memory)
        assert said.rise == 0
        assert said.trusted

        old, last = first | second, net(7)
        known = memory.expanded(last)
        holdfast.restore_(last, known)
        fit(last, x[third], y[third], 8)
        rise, said = loss(last, x[old], y[old]) - loss(grown, x[old], y[old]), holdfast.forecast(last, known)
        assert rise > 0.3
        assert rise / 1.5 < said.rise < 1.5 * rise
        holdfast.save(known, tmp_path / "memory")
        assert holdfast.forecast(last, holdfast.load(tmp_path / "memory")).rise == said.rise

        moved = copy.deepcopy(grown)
        optimizer = torch.optim.Adam(moved.parameters(), lr=0.003)
        with holdfast.hold(optimizer, moved, memory, num_data=600, budget=0.1) as handle:
            for _ in range(60):
                optimizer.zero_grad()
                F.cross_entropy(moved(x[old]), 4 - y[old]).backward()
                optimizer.step()
        assert 0.01 < handle.spent.rise <= 0.1
        assert loss(moved, x[old], y[old]) - loss(grown, x[old], y[old]) < 0.12

    @GOES_BACK
    @pytest.mark.parametrize("likelihood", [holdfast.bernoulli, holdfast.gaussian(0.5)], ids=["yes-no", "numbers"])
    def test_outputs_that_stand_each_for_itself_lose_nothing_to_those_that_were_added(self, likelihood):
        x, y = clouds(rows=300)
        y = F.one_hot(y, 3).float()
        model = trained(x, y.argmax(1), steps=20)
        memory = remembered(model, x, y, likelihood)
        grown = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 5))
        with torch.no_grad():
            grown[0].load_state_dict(model[0].state_dict())
            grown[2].weight[:3], grown[2].bias[:3] = model[2].weight, model[2].bias
            model[2].bias += 0.5
            plain = holdfast.forecast(model, memory).rise
        assert abs(plain) > 0.05
        memory = memory.expanded(grown)
        assert holdfast.forecast(grown, memory).rise == pytest.approx(0.0, abs=1e-5)
        optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
        with holdfast.hold(optimizer, grown, memory, num_data=300, budget=0.1) as handle:
            for _ in range(3):
                optimizer.zero_grad()
                likelihood.nll(grown(x), torch.ones(300, 5)).mean().backward()
                optimizer.step()
        assert handle.spent.rise <= 0.1
        with torch.no_grad():
            grown[0].load_state_dict(model[0].state_dict())
            grown[2].weight[:3], grown[2].bias[:3] = model[2].weight, model[2].bias
        assert holdfast.forecast(grown, memory).rise == pytest.approx(plain, rel=1e-4)

    def test_answers_that_stand_for_less_than_the_memory_are_doubted(self, scene):
        model, memory, x, y = scene
        fisher = holdfast.kronecker_fisher(model, [(x + 1, y)], holdfast.categorical)
        after = holdfast.consolidate(memory, model, fisher)
        assert any("with_answers" in doubt for doubt in holdfast.forecast(model, after).doubts)
        fewer = holdfast.kept_answers(model, [(x, y)], holdfast.categorical, count=20)
        few = holdfast.Memory.of(memory.posterior, model, memory.probes, fewer)
        assert any("Only 20" in doubt for doubt in holdfast.forecast(model, few).doubts)
        thinned = holdfast.consolidate(memory, model, fisher, decay=0.5)
        assert thinned.answers.num_data == pytest.approx(750)


def test_of_a_softened_fisher_the_quadratic_is_said_to_overstate(scene):
    model, memory, x, y = scene
    fisher = holdfast.kronecker_fisher(model, [(x, y)], holdfast.softened())
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    assert any("overstates" in each for each in holdfast.forecast(model, posterior).doubts)
    assert not any("overstates" in each for each in holdfast.forecast(model, memory).doubts)


class TestCheckpoints:
    def test_the_model_is_found_in_what_training_programs_save(self, scene):
        """As the command line finds it: beside a step, inside a dictionary, under a wrapper's name."""
        model, memory, x, _ = scene
        other = copy.deepcopy(model)
        fit(other, x, clouds(turn=0.7)[1], 3)
        state = other.state_dict()
        expected = holdfast.forecast(other, memory.posterior).quadratic
        wrapped = {f"module.{name}": value for name, value in state.items()}
        for saved in (
            state, {**state, "step": 3}, {"model": state, "epoch": 3}, {"state_dict": wrapped, "optimizer": {}}, wrapped
        ):  # fmt: skip
            assert holdfast.forecast(saved, memory).quadratic == pytest.approx(expected)
        with pytest.raises(holdfast.ArgumentError, match=r"several times, inside ema\., module\.\. Say which"):
            holdfast.forecast({**wrapped, **{f"ema.{name}": value for name, value in state.items()}}, memory)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ("x.pt", r"got the path 'x.pt': torch.load.*holdfast forecast"),
            ({"epoch": 3}, "holds no named weights: model.state_dict"),
            ([torch.zeros(3)], "a list, holds no named weights"),
        ],
    )
    def test_what_holds_no_weights_is_told_what_does(self, scene, given, match):
        with pytest.raises(holdfast.ArgumentError, match=match):
            holdfast.forecast(given, scene[1])

    def test_a_model_without_values_is_refused_wherever_they_are_asked_for(self, scene):
        model, memory, x, y = scene
        empty = copy.deepcopy(model).to("meta")
        for asked in (
            lambda: holdfast.forecast(empty, memory),
            lambda: holdfast.forecast(empty.state_dict(), memory),
            lambda: holdfast.penalty(empty, memory),
            lambda: memory.expanded(empty),
            lambda: holdfast.diagonal_fisher(empty, [(x, y)], holdfast.categorical),
            lambda: holdfast.kronecker_fisher(empty, [(x, y)], holdfast.categorical),
        ):
            with pytest.raises(holdfast.ArgumentError, match=r"`0.weight`.* has no values"):
                asked()


class TestStatisticsThatWereNotKept:
    """A model with BatchNorm, and a posterior saved without what its layers have counted."""

    def made(self):
        torch.manual_seed(0)
        x = torch.randn(300, 5)
        y = (x @ torch.randn(5, 3)).argmax(1)
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        self.train(model, optimizer, x, y, 100)
        posterior = holdfast.consolidate(
            holdfast.prior(model), model, holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
        )
        probes, answers = holdfast.gaussian_probes([x]), holdfast.kept_answers(model, [(x, y)], holdfast.categorical)
        whole = holdfast.Memory.of(posterior, model, probes, answers)
        return model, x, y, whole, dataclasses.replace(whole, buffers={})

    def train(self, model, optimizer, x, y, steps):
        model.train()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    @GOES_BACK
    def test_a_budget_is_kept_to_its_end(self):
        model, x, y, _, memory = self.made()
        means = model[1].running_mean.clone()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        options = {"num_data": 300, "budget": 0.05, "freeze_statistics": False}
        with holdfast.hold(optimizer, model, memory, **options) as handle:
            self.train(model, optimizer, x + 1, y, 40)
        assert handle.spent.rise <= 0.05
        assert not torch.equal(model[1].running_mean, means)

    @GOES_BACK
    def test_so_it_is_with_a_buffer_that_no_layer_counts(self):
        torch.manual_seed(0)
        x = torch.randn(200, 5)
        y = (x @ torch.randn(5, 3)).argmax(1)
        model = nn.Linear(5, 3)
        model.register_buffer("scale", torch.ones(()))
        self.train(model, torch.optim.Adam(model.parameters(), 0.05), x, y, 60)
        fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
        memory = holdfast.Memory.of(
            holdfast.consolidate(holdfast.prior(model), model, fisher), model, holdfast.gaussian_probes([x]),
            holdfast.kept_answers(model, [(x, y)], holdfast.categorical),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        with holdfast.hold(
            optimizer, model, dataclasses.replace(memory, buffers={}), num_data=200, budget=0.05
        ) as handle:
            self.train(model, optimizer, x, y.roll(1), 30)
        assert handle.spent.rise <= 0.05

    def test_a_forecast_says_what_it_does_not_see(self):
        model, x, _, whole, memory = self.made()
        model.train()
        for _ in range(20):
            model(3 * x + 2)
        model.eval()
        assert holdfast.forecast(model, whole).rise > 0.1  # what was kept is compared
        blind = holdfast.forecast(model, memory)
        assert blind.rise < 1e-6
        assert any("No `1.running_mean`, `1.running_var` was kept" in doubt for doubt in blind.doubts)
        quadratic = holdfast.forecast(model, dataclasses.replace(whole, probes=None, answers=None))
        assert any("changed since, which the quadratic does not see" in doubt for doubt in quadratic.doubts)
