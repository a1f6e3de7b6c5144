import copy
import pickle

import pytest
import torch
from torch import nn

import holdfast
from cases import CASES, DataParallel, Tied, relu_mlp
from oracles import flat

CASE = CASES[0]


def fisher(model, seed=0, n=12, structure=holdfast.diagonal_fisher):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return structure(model, [(x, torch.randint(0, 3, (n,), generator=generator))], holdfast.categorical)


def _float_fisher(model, seed):
    x, y = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)), torch.arange(6) % 3
    return holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)


def trained(seed, posterior=None, structure=holdfast.diagonal_fisher):
    """A posterior made at random weights of its own."""
    torch.manual_seed(seed)
    model = relu_mlp().double()
    return holdfast.consolidate(posterior or holdfast.prior(model), model, fisher(model, seed, structure=structure))


class TestPrior:
    def test_a_flat_prior_is_centered_at_the_model_and_knows_nothing(self):
        model = CASE.model()
        prior = holdfast.prior(model)
        assert (prior.num_data, prior.unit, prior.sources, prior.precision.shapes) == (0, "", (), {})
        assert all(torch.equal(prior.mean[name], p) for name, p in model.named_parameters())
        assert prior.precision.is_zero()
        assert float(holdfast.penalty(model, prior).detach()) == 0

    def test_l2_toward_the_model_a_number_or_a_given_mean(self):
        model = CASE.model()
        given = {name: torch.full_like(p, 2.0) for name, p in model.named_parameters()}
        for mean, center in [(None, flat(dict(model.named_parameters()))), (0.5, 0.5), (given, 2.0)]:
            prior = holdfast.prior(model, precision=3.0, mean=mean)
            torch.testing.assert_close(flat(prior.mean), torch.zeros_like(flat(prior.mean)) + center)
            delta = flat(dict(model.named_parameters())) - center
            torch.testing.assert_close(holdfast.penalty(model, prior), 1.5 * delta.square().sum())

    def test_a_prior_takes_no_memory_until_something_is_added(self):
        entries = holdfast.prior(nn.Linear(1000, 1000), precision=1.0).precision.diagonal()["weight"]
        assert entries.untyped_storage().nbytes() == 4

    @pytest.mark.parametrize("precision", [-1.0, float("nan"), float("inf")])
    def test_bad_precisions_are_refused(self, precision):
        with pytest.raises(holdfast.ArgumentError, match="finite number ≥ 0"):
            holdfast.prior(CASE.model(), precision=precision)

    def test_a_mean_of_another_model_is_refused(self):
        with pytest.raises(holdfast.MismatchError, match=r"`0.weight`.*mean given nothing"):
            holdfast.prior(CASE.model(), mean={"w": torch.zeros(1)})

    def test_half_precision_models_are_kept_in_float32(self):
        model = nn.Linear(2, 2).bfloat16()
        assert {value.dtype for value in holdfast.prior(model).mean.values()} == {torch.float32}


class TestConsolidate:
    def test_it_moves_the_mean_and_adds_the_precision_and_leaves_the_old_value_alone(self):
        model = CASE.model()
        first = holdfast.consolidate(holdfast.prior(model, precision=0.5), model, fisher(model, 1))
        before = copy.deepcopy(first.mean), copy.deepcopy(first.precision.diagonal())
        with torch.no_grad():
            model[0].weight += 1
        second = holdfast.consolidate(first, model, 2 * fisher(model, 2), decay=0.5)
        expected = 0.5 * flat(first.precision.diagonal()) + 2 * flat(fisher(model, 2).entries)
        torch.testing.assert_close(flat(second.precision.diagonal()), expected)
        assert torch.equal(second.mean["0.weight"], model[0].weight)
        assert all(torch.equal(first.mean[name], before[0][name]) for name in before[0])
        assert torch.equal(flat(first.precision.diagonal()), flat(before[1]))
        assert second.num_data == pytest.approx(0.5 * 12 + 2 * 12)
        assert second.parents == (first.id,)

    def test_in_place_gives_the_same_numbers_in_the_same_memory(self):
        for start in (0.0, 0.5):
            model = CASE.model()
            plain = in_place = holdfast.prior(model, precision=start)
            for seed in range(3):
                with torch.no_grad():
                    model[0].weight += 1
                plain = holdfast.consolidate(plain, model, fisher(model, seed), decay=0.7)
                where = {name: value.data_ptr() for name, value in in_place.mean.items()}
                in_place = holdfast.consolidate_(in_place, model, fisher(model, seed), decay=0.7)
                assert {name: value.data_ptr() for name, value in in_place.mean.items()} == where
            torch.testing.assert_close(flat(in_place.mean), flat(plain.mean))
            torch.testing.assert_close(flat(in_place.precision.diagonal()), flat(plain.precision.diagonal()))
            assert in_place.num_data == pytest.approx(plain.num_data)

    def test_a_negative_hessian_is_refused_in_a_sum_too(self):
        mean = {"w": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
        body = holdfast.Diagonal({"w": torch.full((2,), 0.1, dtype=torch.float64)})
        head = holdfast.Dense({"b": torch.Size([2])}, torch.eye(2, dtype=torch.float64))
        posterior = holdfast.Posterior(mean, body + head)
        model = nn.ParameterDict({name: nn.Parameter(value + 1) for name, value in mean.items()})

        def curved(w, b):
            entries = {"w": torch.tensor(w, dtype=torch.float64), "b": torch.tensor(b, dtype=torch.float64)}
            return holdfast.SignedDiagonal(entries)

        with pytest.raises(holdfast.ArgumentError, match=r"negative entries: 1 in `w`"):
            holdfast.consolidate(posterior, model, curved([-5.0, 1.0], [0.0, 0.0]))
        with pytest.raises(holdfast.ArgumentError, match="Hessian"):
            holdfast.Posterior(mean, head + curved([-5.0, 1.0], [0.0, 0.0]))
        after = holdfast.consolidate(posterior, model, curved([1.0, 2.0], [0.5, 0.5]))
        torch.testing.assert_close(flat(after.precision.diagonal()), torch.tensor([1.1, 2.1, 1.5, 1.5]).double())
        whole = holdfast.Dense({"w": torch.Size([2]), "b": torch.Size([2])}, torch.eye(4, dtype=torch.float64))
        less = whole + curved([-0.5, 1.0], [0.0, 0.0])
        torch.testing.assert_close(less.matrix.diagonal(), torch.tensor([0.5, 2.0, 1.0, 1.0]).double())

    def test_values_share_no_memory_with_what_they_were_made_from(self):
        """So that working in place on one changes no other."""
        model = CASE.model()
        first = fisher(model, 1)
        made = holdfast.consolidate(holdfast.prior(model), model, first)
        expanded = made.expanded(model)
        merged = holdfast.merge(holdfast.prior(model), made)
        before = [first.entries["0.weight"].clone(), made.id]
        for value in (made, expanded, merged):
            holdfast.consolidate_(value, model, fisher(model, 2))
            assert torch.equal(first.entries["0.weight"], before[0])
            if value is made:
                before[1] = made.id
            assert made.id == before[1]

    def test_what_is_free_shares_no_memory_either(self):
        """Of a parameter without a precision the mean is handed on: as a copy, which may be written to."""
        free = holdfast.Posterior({"w": torch.ones(2), "b": torch.ones(2)}, holdfast.Diagonal({"w": torch.ones(2)}))
        free.sample(torch.Generator().manual_seed(0))["b"].zero_()
        holdfast.merge(free, free).mean["b"].zero_()
        assert torch.equal(free.mean["b"], torch.ones(2))

    def test_in_place_means_have_all_digits_of_the_model(self):
        """A mean in half precision has no room for a model in float32, which would be pulled before it has moved."""
        model = CASE.model().float()
        entries = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        half = holdfast.consolidate(holdfast.prior(model, 1.0), model, holdfast.Diagonal(entries)).to(
            dtype=torch.bfloat16
        )
        after = holdfast.consolidate_(half, model, holdfast.Diagonal(dict(entries)))
        assert float(holdfast.penalty(model, after).detach()) == 0
        narrow = CASE.model().bfloat16()
        room = holdfast.prior(narrow, 1.0).to(dtype=torch.bfloat16)
        entries = {name: torch.ones(p.shape) for name, p in narrow.named_parameters()}
        kept = holdfast.consolidate_(room, narrow, holdfast.Diagonal(entries))
        assert {mean.dtype for mean in kept.mean.values()} == {torch.bfloat16}  # which is all that the model has

    def test_in_place_checks_everything_before_it_writes(self):
        model = CASE.model()
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher(model))
        second, before = fisher(model, 1), posterior.id
        with torch.no_grad():
            model[0].weight += 1
            model[4].bias[0] = torch.nan
        unchecked = holdfast.Diagonal(second.entries)
        with pytest.raises(holdfast.ArgumentError, match=r"mean of 4.bias.*not finite"):
            holdfast.consolidate_(posterior, model, unchecked)
        assert posterior.id == before

    @pytest.mark.parametrize("verb", [holdfast.consolidate, holdfast.consolidate_])
    def test_half_precision_memories_are_added_to_in_float32(self, verb):
        model = CASE.model().float()
        low = holdfast.consolidate(holdfast.prior(model), model, _float_fisher(model, 1)).to(dtype=torch.bfloat16)
        old = low.precision.diagonal()["0.weight"].float()
        more = _float_fisher(model, 2)
        expected = old + more.entries["0.weight"]
        after = verb(low, model, more).precision.diagonal()["0.weight"]
        assert after.dtype == torch.float32
        torch.testing.assert_close(after, expected)

    @pytest.mark.parametrize("verb", [holdfast.consolidate, holdfast.consolidate_])
    @pytest.mark.parametrize("start", [0.5, None])
    def test_what_the_fisher_does_not_cover_decays_too(self, verb, start):
        model = CASE.model()
        first = trained(3) if start is None else holdfast.prior(model, precision=start)
        old = {name: value.clone() for name, value in first.precision.diagonal().items()}
        holdfast.restore_(model, first)
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        after = verb(first, model, fisher(model, 1), decay=0.25)
        torch.testing.assert_close(after.precision.diagonal()["0.weight"], 0.25 * old["0.weight"])
        assert after.sources[0].factor == 0.25

    def test_in_place_refuses_other_structures_and_changes_nothing(self):
        model = CASE.model()
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher(model))
        before = posterior.id
        with pytest.raises(holdfast.MismatchError, match="Dense"):
            holdfast.consolidate_(posterior, model, fisher(model, 1, structure=holdfast.dense_fisher))
        assert posterior.id == before

    def test_a_fisher_taken_at_other_weights_is_refused(self):
        model = CASE.model()
        stale = fisher(model)
        with torch.no_grad():
            model[2].bias[1] += 1e-6
        for old in (stale, fisher(model, 1) + stale):
            with pytest.raises(holdfast.MismatchError, match=r"other weights.*`2.bias`"):
                holdfast.consolidate(holdfast.prior(model), model, old)

    def test_the_same_evidence_twice_is_refused(self):
        """As when a cell of a notebook is run again."""
        model = CASE.model()
        once = holdfast.consolidate(holdfast.prior(model), model, fisher(model))
        for again in (fisher(model), 3 * fisher(model), fisher(model, structure=holdfast.dense_fisher)):
            with pytest.raises(holdfast.MismatchError, match="already in the posterior"):
                holdfast.consolidate(once, model, again)

    def test_a_new_head_joins_the_posterior(self):
        body = relu_mlp().double()
        first = holdfast.consolidate(holdfast.prior(body), body, fisher(body))
        grown = nn.ModuleDict({"extra": nn.Linear(3, 3)}).double()
        for index, layer in enumerate(body):
            grown.add_module(str(index), layer)
        data = [(torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,)))]
        more = holdfast.diagonal_fisher(
            grown, data, holdfast.categorical, forward=lambda model, batch: model["extra"](body(batch[0]))
        )
        second = holdfast.consolidate(first, grown, more)
        assert set(second.mean) == {*first.mean, "extra.weight", "extra.bias"}
        torch.testing.assert_close(second.precision.diagonal()["extra.bias"], more.entries["extra.bias"])

    @pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
    def test_bad_decay_is_refused(self, decay):
        model = CASE.model()
        with pytest.raises(holdfast.ArgumentError, match="decay"):
            holdfast.consolidate(holdfast.prior(model), model, fisher(model), decay=decay)

    def test_another_models_posterior_is_refused_with_the_names(self):
        other = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        with pytest.raises(holdfast.MismatchError, match=r"`4.weight`.*lacks.*`2.weight` has shape"):
            holdfast.consolidate(trained(0), other, fisher(other))

    def test_one_dataset_seen_by_two_structures_counts_once(self):
        model = CASE.model()
        for parameter in model[4].parameters():
            parameter.requires_grad_(False)
        body = fisher(model)
        for parameter in model.parameters():
            parameter.requires_grad_(not parameter.requires_grad)
        head = fisher(model, structure=holdfast.dense_fisher)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        mixed = holdfast.consolidate(holdfast.prior(model), model, head + body)
        assert mixed.num_data == 12
        torch.testing.assert_close(mixed.precision.diagonal()["0.weight"], body.entries["0.weight"])
        assert (body + body).num_data == 24


class TestMerge:
    @pytest.mark.parametrize("structure", [holdfast.diagonal_fisher, holdfast.dense_fisher])
    def test_two_children_of_one_posterior_count_it_once(self, structure):
        """p(θ|base,A) p(θ|base,B) / p(θ|base), against natural parameters written out."""
        base = trained(0, structure=structure)
        a, b = trained(1, base, structure), trained(2, base, structure)
        with pytest.raises(holdfast.MismatchError, match=r"categorical, 12 examples.*base="):
            holdfast.merge(a, b)
        merged = holdfast.merge(a, b, base=base)
        matrix = a.precision.dense() + b.precision.dense() - base.precision.dense()
        torch.testing.assert_close(merged.precision.dense(), matrix)
        natural = sum(sign * part.precision.dense() @ flat(part.mean) for sign, part in [(1, a), (1, b), (-1, base)])
        torch.testing.assert_close(matrix @ flat(merged.mean), natural, rtol=1e-6, atol=1e-6)
        assert merged.num_data == 36
        assert merged.parents == (a.id, b.id)

    @pytest.mark.parametrize("structure", [holdfast.diagonal_fisher, holdfast.dense_fisher])
    def test_three_children_count_their_base_once(self, structure):
        base = trained(0, structure=structure)
        children = [trained(seed, base, structure) for seed in (1, 2, 3)]
        merged = holdfast.merge(*children, base=base)
        matrix = sum(child.precision.dense() for child in children) - 2 * base.precision.dense()
        torch.testing.assert_close(merged.precision.dense(), matrix)
        natural = sum(child.precision.dense() @ flat(child.mean) for child in children)
        natural = natural - 2 * base.precision.dense() @ flat(base.mean)
        torch.testing.assert_close(matrix @ flat(merged.mean), natural, rtol=1e-6, atol=1e-6)
        assert merged.num_data == 48

    def test_a_flat_base_takes_nothing_out(self):
        prior = holdfast.prior(CASE.model())
        a, b = trained(1, prior, holdfast.dense_fisher), trained(2, prior, holdfast.dense_fisher)
        torch.testing.assert_close(
            holdfast.merge(a, b, base=prior).precision.dense(), holdfast.merge(a, b).precision.dense()
        )

    def test_a_base_of_another_shape_is_refused(self):
        def at(size, seed, start=None):
            torch.manual_seed(seed)
            model = nn.Linear(2, size).double()
            data = [(torch.randn(4, 2, dtype=torch.float64), torch.randn(4, size, dtype=torch.float64))]
            fisher = holdfast.diagonal_fisher(model, data, holdfast.gaussian())
            return holdfast.consolidate(start.expanded(model) if start else holdfast.prior(model), model, fisher)

        base = at(1, 0)
        grown = [at(3, seed, base) for seed in (1, 2)]
        with pytest.raises(holdfast.MismatchError, match=r"\(1, 2\) in the base.*\(3, 2\)"):
            holdfast.merge(*grown, base=base)

    def test_evidence_that_decayed_away_is_no_evidence(self):
        first = trained(0)
        torch.manual_seed(1)
        model = relu_mlp().double()
        gone = holdfast.consolidate(first, model, fisher(model, 1), decay=0.0)
        assert len(gone.sources) == 1
        assert holdfast.merge(first, gone).num_data == 24

    def test_tied_here_and_apart_there_is_refused(self):
        apart = holdfast.Posterior(
            {"a": torch.ones(1), "b": torch.full((1,), 5.0)},
            holdfast.Diagonal({"a": torch.full((1,), 100.0), "b": torch.ones(1)}),
        )
        tied = holdfast.Posterior({"b": torch.zeros(1)}, holdfast.Diagonal({"b": torch.ones(1)}), {"b": ("a",)})
        with pytest.raises(holdfast.MismatchError, match="one tied parameter in one posterior and two in the other"):
            holdfast.merge(apart, tied)

    def test_the_widest_dtype_wins_whatever_the_order(self):
        low, high = trained(0).to(dtype=torch.bfloat16), trained(1)
        for merged in (holdfast.merge(low, high), holdfast.merge(high, low)):
            assert {value.dtype for value in merged.mean.values()} == {torch.float64}
        halves = holdfast.merge(trained(0).to(dtype=torch.bfloat16), trained(1).to(dtype=torch.bfloat16))
        assert {value.dtype for value in halves.mean.values()} == {torch.float32}

    def test_tied_parameters_are_one_whatever_they_are_called(self):
        """The same model with its two tied layers registered in the other order."""

        class Both(nn.Module):
            def __init__(self, order):
                super().__init__()
                for name in order:
                    setattr(self, name, nn.Linear(3, 3, bias=False))
                self.h.weight = self.e.weight
                self.free = nn.Linear(3, 3)

            def forward(self, x):
                return self.free(self.h(torch.tanh(self.e(x))))

        posteriors, models = [], []
        for seed, order in enumerate(["eh", "he"]):
            torch.manual_seed(seed)
            model = Both(order).double()
            data = [(torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 3, (6,)))]
            fisher = holdfast.diagonal_fisher(model, data, holdfast.categorical)
            posteriors.append(holdfast.consolidate(holdfast.prior(model), model, fisher))
            models.append(model)
        assert "e.weight" in posteriors[0].mean
        assert "h.weight" in posteriors[1].mean
        merged = holdfast.merge(*posteriors)
        assert list(merged.mean) == ["h.weight", "free.weight", "free.bias"]
        assert merged.ties == {"h.weight": ("e.weight",)}
        (a, b), (la, lb) = (p.mean for p in posteriors), (p.precision.diagonal() for p in posteriors)
        mean = (la["e.weight"] * a["e.weight"] + lb["h.weight"] * b["h.weight"]) / (la["e.weight"] + lb["h.weight"])
        torch.testing.assert_close(merged.mean["h.weight"], mean)
        holdfast.restore_(models[0], merged)
        torch.testing.assert_close(models[0].e.weight.detach(), mean)
        data = [(torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 3, (7,)))]
        holdfast.restore_(models[1], posteriors[0])
        more = holdfast.diagonal_fisher(models[1], data, holdfast.categorical)
        after = holdfast.consolidate(posteriors[0], models[1], more)
        assert list(after.mean) == ["e.weight", "free.weight", "free.bias"]
        torch.testing.assert_close(after.precision.diagonal()["e.weight"], la["e.weight"] + more.entries["h.weight"])

    def test_a_proper_prior_shared_by_two_children_is_a_base_too(self):
        model = CASE.model()
        prior = holdfast.prior(model, precision=0.3)
        a, b = trained(1, prior), trained(2, prior)
        with pytest.raises(holdfast.MismatchError, match=r"prior\(precision=0.3\)"):
            holdfast.merge(a, b)
        counted_once = holdfast.merge(a, b, base=prior).precision.diagonal()
        expected = flat(a.precision.diagonal()) + flat(b.precision.diagonal()) - 0.3
        torch.testing.assert_close(flat(counted_once), expected)

    def test_a_base_that_was_decayed_since_or_is_not_one_is_refused(self):
        base = trained(0)
        torch.manual_seed(1)
        model = relu_mlp().double()
        decayed = holdfast.consolidate(base, model, fisher(model, 1), decay=0.5)
        with pytest.raises(holdfast.MismatchError, match="decayed or rescaled"):
            holdfast.merge(decayed, trained(2, base), base=base)
        prior = holdfast.prior(CASE.model(), precision=1.0)
        halved = holdfast.consolidate(prior, model, fisher(model, 1), decay=0.5)
        with pytest.raises(holdfast.MismatchError, match="decayed or rescaled"):
            holdfast.merge(halved, trained(2, prior), base=prior)
        with pytest.raises(holdfast.MismatchError, match="is not in"):
            holdfast.merge(trained(3), trained(4), base=base)

    def test_a_base_from_before_the_last_that_they_share_is_refused(self):
        """What came between it and them would count twice."""
        first = trained(0)
        second = trained(1, first)
        with pytest.raises(holdfast.MismatchError, match="not the last posterior they have in common"):
            holdfast.merge(trained(2, second), trained(3, second), base=first)

    def test_the_same_posterior_twice_is_refused(self):
        with pytest.raises(holdfast.MismatchError, match="count twice"):
            holdfast.merge(trained(0), trained(0))

    def test_different_coverage_is_united(self):
        whole, model = trained(0), CASE.model()
        head = {name: p.detach() for name, p in model.named_parameters() if name.startswith("4")}
        part = holdfast.Posterior(head, holdfast.Diagonal({name: torch.ones_like(p) for name, p in head.items()}))
        merged = holdfast.merge(whole, part)
        torch.testing.assert_close(merged.mean["0.weight"], whole.mean["0.weight"])
        old = whole.precision.diagonal()["4.bias"]
        mean = (old * whole.mean["4.bias"] + head["4.bias"]) / (old + 1)
        torch.testing.assert_close(merged.mean["4.bias"], mean)

    def test_one_posterior_or_shapes_that_differ_are_refused(self):
        with pytest.raises(holdfast.ArgumentError, match="at least two"):
            holdfast.merge(trained(0))
        with pytest.raises(holdfast.MismatchError, match=r"different models: one has `0.weight`.*the other `weight`"):
            holdfast.merge(trained(0), holdfast.prior(nn.Linear(5, 6), precision=1.0))
        other = nn.Sequential(nn.Linear(7, 6)).double()
        with pytest.raises(holdfast.MismatchError, match=r"`0.weight` has shape"):
            holdfast.merge(trained(0), holdfast.prior(other, precision=1.0))

    def test_memory_does_not_grow_with_tasks(self):
        merged = trained(0)
        size = sum(t.numel() for t in (*merged.mean.values(), *merged.precision.tensors.values()))
        for seed in range(1, 10):
            merged = holdfast.merge(merged, trained(seed))
        assert sum(t.numel() for t in (*merged.mean.values(), *merged.precision.tensors.values())) == size
        assert merged.num_data == 120

    def test_restoring_the_merged_mean_into_a_model(self):
        merged, model = holdfast.merge(trained(0), trained(1)), CASE.model()
        holdfast.restore_(DataParallel(model), merged)
        torch.testing.assert_close(flat(dict(model.named_parameters())), flat(merged.mean))


class TestExpanded:
    @pytest.mark.parametrize("structure", [holdfast.diagonal_fisher, holdfast.dense_fisher])
    def test_a_grown_head_is_free_in_its_new_entries(self, structure):
        model = CASE.model()
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher(model, structure=structure))
        wide = relu_mlp().double()
        wide[4] = nn.Linear(4, 5).double()
        with torch.no_grad():
            for name, parameter in wide.named_parameters():
                parameter[tuple(slice(size) for size in posterior.mean[name].shape)] = posterior.mean[name] + 0.1
        with pytest.raises(holdfast.MismatchError, match=r"`4.weight` has shape \(5, 4\).*\(3, 4\).*expanded"):
            holdfast.penalty(wide, posterior)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
        expanded = posterior.expanded(wide)
        torch.testing.assert_close(holdfast.penalty(wide, expanded), holdfast.penalty(model, posterior))
        assert torch.equal(expanded.mean["4.weight"][3:], wide[4].weight[3:])
        gradient = holdfast.penalty_gradient(wide, expanded)
        assert gradient["4.weight"][3:].abs().max() == 0
        assert gradient["4.weight"][:3].abs().max() > 0

    def test_a_layer_that_stacks_matrices_cannot_grow_in_place(self):
        """A recurrent layer's gates are rows of one parameter: the old ones would not stay in front."""
        posterior = holdfast.prior(nn.LSTM(3, 2), precision=1.0)
        with pytest.raises(holdfast.MismatchError, match=r"`weight_ih_l0` of LSTM grew.*stacks"):
            posterior.expanded(nn.LSTM(3, 4))

    def test_a_shrunk_layer_is_refused(self):
        small = relu_mlp().double()
        small[4] = nn.Linear(4, 2).double()
        with pytest.raises(holdfast.MismatchError, match=r"`4.weight` has shape \(2, 4\)"):
            trained(0).expanded(small)

    def test_a_grown_vocabulary_stays_tied(self):
        model = Tied()
        posterior = holdfast.prior(model, precision=1.0)
        assert posterior.ties == {"embed.weight": ("head.weight",)}
        expanded = posterior.expanded(Tied(vocabulary=11))
        assert expanded.mean["embed.weight"].shape == (11, 6)
        assert expanded.precision.diagonal()["embed.weight"][9:].sum() == 0
        untied = Tied()
        untied.head = nn.Linear(6, 9, bias=False)
        attempts = [
            lambda: holdfast.penalty(untied, posterior),
            lambda: posterior.expanded(untied),
            lambda: holdfast.restore_(untied, posterior),
            lambda: holdfast.consolidate(posterior, untied, holdfast.Diagonal({"mix.bias": torch.ones(6)})),
            lambda: holdfast.hold(torch.optim.SGD(untied.parameters(), lr=0.1), untied, posterior, num_data=1),
        ]
        for attempt in attempts:
            with pytest.raises(holdfast.MismatchError, match=r"`embed.weight` and `head.weight` were one parameter"):
                attempt()


class TestDensity:
    def test_a_flat_direction_has_no_density(self):
        model = CASE.model()
        with pytest.raises(holdfast.MismatchError, match="says nothing about"):
            holdfast.prior(model).log_prob(model)
        dead = holdfast.Posterior({"w": torch.zeros(3)}, holdfast.Diagonal({"w": torch.tensor([1.0, 0.0, 2.0])}))
        with pytest.raises(holdfast.SingularError, match=r"1 entry of `w`"):
            dead.log_prob({"w": torch.ones(3)})

    def test_the_same_values_of_other_data_are_another_posterior(self):
        """A checkpoint, or a second hold, is told by the id whose memory it is of."""
        twins = [
            holdfast.Posterior({"w": torch.zeros(2)}, holdfast.Diagonal({"w": torch.ones(2)}, (source,)))
            for source in (holdfast.Source("a", size, "example", "gaussian", "expected") for size in (10.0, 20.0))
        ]
        assert twins[0].id != twins[1].id

    def test_samples_scatter_around_the_mean(self):
        posterior = holdfast.Posterior(
            {"w": torch.full((2000,), 3.0)}, holdfast.Diagonal({"w": torch.full((2000,), 4.0)})
        )
        drawn = posterior.sample(torch.Generator().manual_seed(0))["w"]
        assert abs(float(drawn.mean()) - 3) < 4 * 0.5 / 2000**0.5
        assert float(drawn.std()) == pytest.approx(0.5, rel=0.1)

    @pytest.mark.parametrize(
        ("mean", "message"),
        [
            ({}, "at least one"),
            ({"w": torch.tensor([torch.nan])}, "not finite"),
            ({"v": torch.zeros(1)}, "nothing"),
        ],
    )
    def test_values_that_are_no_posterior_are_refused(self, mean, message):
        with pytest.raises((holdfast.ArgumentError, holdfast.MismatchError), match=message):
            holdfast.Posterior(mean, holdfast.Diagonal({"w": torch.ones(1)}))


@pytest.mark.parametrize("structure", [holdfast.diagonal_fisher, holdfast.kronecker_fisher, holdfast.dense_fisher])
def test_a_fisher_added_to_itself_is_said_and_an_average_or_a_strength_is_none(structure, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batches, others = ([(torch.randn(9, 3), torch.randint(0, 2, (9,)))] for _ in range(2))

    def drawn(seed=0, batches=batches, **more):
        return structure(model, batches, holdfast.categorical, targets="sampled", seed=seed, **more)

    def learned(fisher):
        return holdfast.consolidate(holdfast.prior(model), model, fisher)

    for twice in (drawn() + drawn(), 1.0 * (drawn() + drawn(1)), sum([drawn(), drawn()])):
        with pytest.warns(holdfast.HoldfastWarning, match="2 times the same examples.* count as 18 and are 9") as said:
            known = learned(twice)
        assert said[0].filename == __file__
        assert known.num_data == 18
    holdfast.save(known, tmp_path / "memory")  # what was said once is not in a file
    assert holdfast.load(tmp_path / "memory").posterior.id == known.id
    for found, count in (
        (0.5 * (drawn() + drawn(1)), 9),
        (0.5 * drawn() + 0.5 * drawn(1), 9),
        (10 * (0.5 * (drawn() + drawn(1))), 90),
        (2 * drawn(), 18),
        (drawn(only="0.*") + drawn(only="2.*"), 9),
        (drawn() + drawn(batches=others), 18),
    ):
        assert learned(found).num_data == count


class TestFishersOfAPart:
    def parts(self, known):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        first, second = ([(torch.randn(9, 3), torch.randint(0, 2, (9,)))] for _ in range(2))
        posterior = known(model, first)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
        return model, posterior, second

    @staticmethod
    def learned(model, batches):
        fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical)
        return holdfast.consolidate(holdfast.prior(model), model, fisher)

    @pytest.mark.parametrize("how", [holdfast.consolidate, holdfast.consolidate_])
    def test_what_moved_and_has_no_fisher_is_named(self, how):
        """As PEFT leaves it: what was merged is frozen, and the Fisher is of the head alone."""
        model, posterior, batches = self.parts(self.learned)
        model[0].requires_grad_(False)
        fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical)
        with pytest.warns(holdfast.HoldfastWarning, match=r"^`0.weight`, `0.bias` moved.*merge_and_unload") as said:
            after = how(posterior, model, fisher)
        assert said[0].filename == __file__
        assert after.num_data == 18

    def test_a_part_that_stayed_or_that_no_data_held_needs_none(self):
        model, posterior, batches = self.parts(self.learned)
        with torch.no_grad():
            model[0].weight -= 0.1
            model[0].bias -= 0.1
        fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, only="2.*")
        assert holdfast.consolidate(posterior, model, fisher).num_data == 18
        for precision in (0.0, 1.0):
            model, start, batches = self.parts(lambda model, _, l2=precision: holdfast.prior(model, precision=l2))
            fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, only="2.*")
            assert holdfast.consolidate(start, model, fisher).num_data == 9


class TestMemory:
    def test_it_is_taken_wherever_a_posterior_is_and_stays_a_memory(self):
        case = next(case for case in CASES if case.name == "batchnorm-cnn")
        model = case.model()
        first = holdfast.diagonal_fisher(model, case.batches(), case.likelihood)
        memory = holdfast.Memory.of(holdfast.consolidate(holdfast.prior(model), model, first), model)
        model(torch.randn(8, 2, 5, 5, dtype=torch.float64))  # the statistics drift
        assert not torch.equal(memory.buffers["1.running_mean"], model[1].running_mean)
        later = holdfast.consolidate(
            memory, model, holdfast.diagonal_fisher(model, case.batches((3,)), case.likelihood)
        )
        assert isinstance(later, holdfast.Memory)
        assert torch.equal(later.buffers["1.running_mean"], model[1].running_mean)
        assert (later.num_data, later.unit) == (10, "example")
        torch.testing.assert_close(holdfast.penalty(model, later), holdfast.penalty(model, later.posterior))
        assert isinstance(memory.expanded(model), holdfast.Memory)
        holdfast.restore_(model, memory)
        assert torch.equal(memory.buffers["1.running_mean"], model[1].running_mean)

    def test_statistics_or_answers_of_weights_that_have_moved_since_are_not_kept_beside_it(self):
        plain, counting = (
            nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)) for norm in (nn.Tanh(), nn.BatchNorm1d(4))
        )
        batches = [(torch.randn(9, 3), torch.randint(0, 2, (9,)))]
        for model, what in ((plain, "answers"), (counting, r"`1.running_mean`, `1.running_var`")):
            posterior = holdfast.consolidate(
                holdfast.prior(model), model, holdfast.diagonal_fisher(model, batches, holdfast.categorical)
            )
            answers = holdfast.kept_answers(model, batches, holdfast.categorical)
            holdfast.Memory.of(posterior, model, answers=answers)
            with torch.no_grad():
                model[2].weight += 1e-3
            with pytest.raises(holdfast.MismatchError, match=f"`2.weight` of the model is not at .* its {what}"):
                holdfast.Memory.of(posterior, model, answers=answers)
            holdfast.restore_(model, posterior)
            holdfast.Memory.of(posterior, model, answers=answers)

    @pytest.mark.parametrize("change", ["narrow posterior", "narrow model", "compact", "there and back", "zero"])
    def test_rounding_is_no_move_and_a_prior_is_centered_anywhere(self, change):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        batches = [(torch.randn(9, 3), torch.randint(0, 2, (9,)))]
        posterior = holdfast.consolidate(
            holdfast.prior(model), model, holdfast.diagonal_fisher(model, batches, holdfast.categorical)
        )
        if change == "narrow posterior":
            posterior = posterior.to(dtype=torch.bfloat16)
        elif change == "narrow model":
            model = model.bfloat16()
        elif change == "compact":
            posterior = posterior.compact()
        elif change == "there and back":  # as an adapter is merged, and taken out again
            with torch.no_grad():
                model[0].weight.add_(0.3).sub_(0.3)
            assert not torch.equal(model[0].weight, posterior.mean["0.weight"])
        else:
            posterior = holdfast.prior(model, precision=1.0, mean=0.0)
        memory = holdfast.Memory.of(posterior, model)
        assert torch.equal(memory.buffers["1.running_mean"], model[1].running_mean)

    def test_constants_of_a_model_are_kept_wherever_it_is(self):
        """A mean that inputs are centered by is of no weights, and nothing to count anew."""
        model = nn.Linear(3, 2)
        model.register_buffer("center", torch.tensor([0.5]))
        batch = [(torch.randn(8, 3), torch.arange(8) % 2)]
        fisher = holdfast.diagonal_fisher(model, batch, holdfast.categorical)
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
        with torch.no_grad():
            model.weight.add_(1.0)
        assert holdfast.Memory.of(posterior, model).buffers["center"] == 0.5

    def test_what_is_merged_is_kept_beside_answers_of_each_and_statistics_of_its_own_mean(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        parts, kept = [], []
        for _ in range(2):
            batches = [(torch.randn(9, 3), torch.randint(0, 2, (9,)))]
            with torch.no_grad():
                model[0].weight += 0.1
            fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical)
            parts.append(holdfast.consolidate(holdfast.prior(model), model, fisher))
            kept.append(holdfast.kept_answers(model, batches, holdfast.categorical))
        merged = holdfast.merge(*parts)
        with pytest.raises(holdfast.MismatchError, match="count these anew with data"):
            holdfast.Memory.of(merged, model, answers=kept[0] + kept[1])
        model[1] = nn.Identity()
        memory = holdfast.Memory.of(merged, model, answers=kept[0] + kept[1])
        assert memory.answers.num_data == memory.num_data == 18

    def test_values_can_be_copied_and_sent_to_other_processes(self):
        posterior = trained(0)
        for twin in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
            assert twin.id == posterior.id


def test_a_decay_of_zero_forgets_what_was_kept_beside_the_posterior_too():
    model = CASE.model()
    batches = CASE.batches()
    memory = holdfast.Memory.of(
        holdfast.consolidate(holdfast.prior(model), model, fisher(model)), model, holdfast.gaussian_probes(batches)
    )
    after = holdfast.consolidate(memory, model, fisher(model, 1), decay=0)
    assert after.probes is None
    assert after.posterior.num_data == fisher(model, 1).num_data


def test_a_model_without_values_has_no_prior():
    with pytest.raises(holdfast.ArgumentError, match="`weight`, `bias` is on the meta device"):
        holdfast.prior(nn.Linear(2, 3, device="meta"))


def test_a_model_without_room_for_values_is_not_restored_in_silence():
    posterior, model = holdfast.prior(nn.Linear(2, 3)), nn.Linear(2, 3, device="meta")
    with pytest.raises(holdfast.ArgumentError, match=r"`weight`, `bias` is on the meta device.*to_empty"):
        holdfast.restore_(model, posterior)
    holdfast.restore_(model.to_empty(device="cpu"), posterior)
    assert torch.equal(model.weight, posterior.mean["weight"])


def test_curvature_says_that_it_needs_gradients():
    model = CASE.model()
    with torch.inference_mode(), pytest.raises(holdfast.ArgumentError, match="curvature is made of gradients"):
        holdfast.diagonal_fisher(model, CASE.batches(), CASE.likelihood)


def test_merging_memories_says_that_statistics_are_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    batches = [[(torch.randn(9, 3), torch.randint(0, 2, (9,)))] for _ in range(2)]
    first, second = (
        holdfast.Memory.of(
            holdfast.consolidate(
                holdfast.prior(model), model, holdfast.diagonal_fisher(model, each, holdfast.categorical)
            ), model,
        )
        for each in batches
    )  # fmt: skip
    with pytest.warns(holdfast.HoldfastWarning, match="statistics, such as BatchNorm's, have no product"):
        holdfast.merge(first, second)
