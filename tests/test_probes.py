"""What stands for old inputs: moments that are those of the data, draws that have them, and files that keep them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.file import _checksum, canonical
from holdfast.probes.gaussian import Component, GaussianProbes
from holdfast.probes.layer import captured, replaced


def inputs(rows=300, entries=6, seed=0):
    """Correlated, off center."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(entries, entries, generator=generator, dtype=torch.float64)
    return torch.randn(rows, entries, generator=generator, dtype=torch.float64) @ mixing + torch.arange(entries)


def covariance(probes):
    (one,) = probes.components
    return one.factors.T @ one.factors + torch.diag(one.rest)


def exact(x):
    return torch.cov(x.T, correction=0).float()


def draws(probes, count, seed=0):
    return probes.draw(count, torch.Generator().manual_seed(seed))


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


class TestMoments:
    @pytest.mark.parametrize("cuts", [[300], [1, 299], [7] * 42 + [6], [100, 100, 100]])
    def test_with_every_direction_they_are_those_of_the_data_however_it_is_cut(self, cuts):
        x = inputs()
        probes = holdfast.gaussian_probes(torch.split(x, cuts), rank=6)
        torch.testing.assert_close(probes.components[0].mean, x.mean(0).float(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(covariance(probes), exact(x), rtol=1e-5, atol=1e-5)
        assert (probes.components[0].low, probes.components[0].high) == (float(x.min()), float(x.max()))
        assert probes.num_data == 300

    def test_many_cut_rows_lose_nothing_that_fits(self):
        """Data of 5 directions in 40 entries: more rows than are kept at once, and nothing to lose."""
        x = inputs(2000, 5) @ torch.randn(5, 40, dtype=torch.float64)
        for size in (3, 64, 2000):
            probes = holdfast.gaussian_probes(torch.split(x, size), rank=5)
            torch.testing.assert_close(covariance(probes), exact(x), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("rank", [1, 2, 5])
    def test_the_diagonal_is_exact_at_any_rank(self, rank):
        x = inputs(500)
        probes = holdfast.gaussian_probes(torch.split(x, 50), rank=rank)
        torch.testing.assert_close(covariance(probes).diag(), exact(x).diag(), rtol=1e-5, atol=1e-5)
        assert len(probes.components[0].factors) == rank

    def test_directions_are_the_longest(self):
        """All rows in one batch: UᵀU is the best approximation of that rank, which the spectrum gives."""
        x = inputs(200)
        found = holdfast.gaussian_probes([x], rank=2).components[0].factors
        values, vectors = torch.linalg.eigh(torch.cov(x.T, correction=0))
        best = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T
        torch.testing.assert_close(found.T @ found, best.float(), rtol=1e-5, atol=1e-5)

    def test_fewer_examples_than_the_default_rank(self):
        x = inputs(5, 40)
        probes = holdfast.gaussian_probes([x])
        torch.testing.assert_close(covariance(probes), exact(x), rtol=1e-4, atol=1e-4)

    def test_images_keep_their_shape_and_labels_are_not_looked_at(self):
        x = torch.randn(20, 1, 4, 3)
        probes = holdfast.gaussian_probes([(x, torch.zeros(20))], rank=3, num_data=1000)
        assert probes.shape == (1, 4, 3)
        assert draws(probes, 7).shape == (7, 1, 4, 3)
        assert probes.num_data == 1000
        assert "rank 3" in repr(probes)

    @pytest.mark.parametrize(
        "labels", [torch.zeros(20, dtype=torch.long), torch.randn(20, 2)], ids=["classes", "numbers"]
    )
    def test_of_a_dict_the_labels_are_no_inputs(self, labels):
        x = inputs(20)
        probes = holdfast.gaussian_probes([{"x": x, "labels": labels}])
        torch.testing.assert_close(probes.components[0].mean, x.mean(0).float())

    @pytest.mark.parametrize(
        ("given", "how", "match"),
        [
            ([torch.zeros(3, 4, dtype=torch.long)], {}, "own_text"),
            ([torch.zeros(3, 4, dtype=torch.uint8)], {}, "convert them as the model takes them"),
            ([], {}, "there are no batches"),
            ([torch.randn(1, 4)], {}, "one example has no covariance"),
            ([torch.randn(3, 4)], {"rank": 5}, "rank=5, and an input has 4 entries"),
            ([torch.randn(3, 4)], {"rank": 3}, "vary in 2 directions"),
            ([torch.randn(3, 4)], {"rank": 0}, "1 or more"),
            ([torch.randn(3, 4)], {"rank": True}, "1 or more"),
            ([torch.randn(3, 4)], {"num_data": 0}, "num_data"),
            ([torch.randn(3, 4), torch.randn(3, 5)], {}, r"batch 1 has inputs of shape \(5,\)"),
            ([torch.full((3, 4), float("nan"))], {}, "not all finite"),
            ([torch.randn(3)], {}, "a tensor"),
            ([{"input_ids": torch.zeros(3, 4, dtype=torch.long), "labels": torch.randn(3, 2)}], {}, "got dict"),
            (["text"], {}, "got str"),
            ([torch.randn(3, 4)], {"layer": "0"}, "`model` and `layer`"),
            ([torch.randn(3, 6)], {"layer": "5", "model": small()}, "has no module `5`. It has"),
        ],
    )
    def test_bad_input(self, given, how, match):
        with pytest.raises(holdfast.HoldfastError, match=match):
            holdfast.gaussian_probes(given, **how)


class TestDraws:
    def test_they_have_the_mean_and_the_covariance_that_were_kept(self):
        probes = holdfast.gaussian_probes([inputs()], rank=3)
        count = 40_000
        x = draws(probes, count).double()
        claimed = covariance(probes).double()
        deviations = claimed.diag().sqrt()
        mean = probes.components[0].mean
        assert bool(((x.mean(0) - mean).abs() < 5 * deviations / count**0.5).all())
        # Var of a product of two centered normals: Σᵢᵢ Σⱼⱼ + Σᵢⱼ².
        error = ((claimed.diag().outer(claimed.diag()) + claimed.square()) / count).sqrt()
        assert bool(((torch.cov(x.T, correction=0) - claimed).abs() < 5 * error).all())

    def test_several_are_drawn_by_how_much_there_was_of_each(self):
        apart = GaussianProbes((point(0.0, 300), point(1.0, 100)), torch.Size([2]))
        share = float(draws(apart, 20_000)[:, 0].mean())
        assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 20_000) ** 0.5
        assert apart.num_data == 400

    def test_each_part_of_a_mixture_has_its_own_moments(self):
        one, other = (holdfast.gaussian_probes([inputs(seed=seed)], rank=4) for seed in (0, 1))
        both = GaussianProbes((one.components[0], replace_mean(other.components[0], 1e4)), one.shape)
        x = draws(both, 40_000).double()
        for part, rows in ((one, x[:, 0] < 5e3), (other, x[:, 0] > 5e3)):
            claimed, count = covariance(part).double(), int(rows.sum())
            error = ((claimed.diag().outer(claimed.diag()) + claimed.square()) / count).sqrt()
            assert bool(((torch.cov(x[rows].T, correction=0) - claimed).abs() < 5 * error + 1e-3).all())

    def test_kept_inputs_are_drawn_by_their_weights(self):
        kept = holdfast.kept_inputs(torch.tensor([[0.0]]), num_data=30).plus(
            holdfast.kept_inputs(torch.tensor([[1.0], [2.0]]), num_data=10)
        )
        x = draws(kept, 20_000).flatten()
        assert kept.num_data == pytest.approx(40)
        for value, share in ((0, 0.75), (1, 0.125), (2, 0.125)):
            assert abs(float((x == value).double().mean()) - share) < 5 * (share * (1 - share) / 20_000) ** 0.5

    def test_a_seed_repeats(self):
        probes = holdfast.gaussian_probes([inputs()])
        assert torch.equal(draws(probes, 5), draws(probes, 5))
        assert not torch.equal(draws(probes, 5), draws(probes, 5, seed=1))


def point(value, num_data):
    return Component(torch.full((2,), value), torch.zeros(1, 2), torch.zeros(2), num_data, 0.0, 1.0)


def replace_mean(component, value):
    mean = torch.full_like(component.mean, value)
    return Component(mean, component.factors, component.rest, component.num_data, component.low, component.high)


class TestJoined:
    def test_the_same_data_counts_once(self):
        a, b = (holdfast.gaussian_probes([inputs(seed=seed)]) for seed in (0, 1))
        assert (a + a).num_data == 300
        assert ((a + b) + a).num_data == 600
        assert (a + holdfast.gaussian_probes([inputs()], rank=2)).num_data == 600  # another covariance: not the same

    @pytest.mark.parametrize(
        "probes", [holdfast.gaussian_probes([torch.arange(12.0).view(4, 3)]), holdfast.kept_inputs(torch.ones(4, 3))]
    )
    def test_the_same_data_in_two_amounts_is_refused(self, probes):
        """Decayed in one of two memories: neither amount is right for both, and their sum counts it twice."""
        for first, second in ((probes, probes.thinned(0.5)), (probes.thinned(0.5), probes)):
            with pytest.raises(
                holdfast.MismatchError, match=f"for {first.num_data:g} of the old data .* {second.num_data:g}"
            ):
                first + second
        assert (probes.thinned(0.5) + probes.thinned(0.5)).num_data == 2

    def test_merged_has_the_moments_of_all_the_data(self):
        parts = [inputs(100), inputs(300, seed=1) + 2]
        probes = [holdfast.gaussian_probes([part], rank=6) for part in parts]
        one = (probes[0] + probes[1]).merged()
        whole = torch.cat(parts)
        torch.testing.assert_close(one.components[0].mean, whole.mean(0).float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(covariance(one), exact(whole), rtol=1e-4, atol=1e-4)
        assert (one.components[0].low, one.components[0].high) == (float(whole.min()), float(whole.max()))
        assert one.num_data == 400
        assert len(one.components) == 1

    def test_merged_by_hand(self):
        """Two points, a quarter and three quarters: mean ¾, variance ¼·¾ in each entry and between them."""
        one = GaussianProbes((point(0.0, 100), point(1.0, 300)), torch.Size([2])).merged()
        torch.testing.assert_close(one.components[0].mean, torch.full((2,), 0.75))
        torch.testing.assert_close(covariance(one), torch.full((2, 2), 0.1875))

    def test_merged_keeps_memory_constant_and_the_variances_exact(self):
        parts = [inputs(100, seed=seed) for seed in range(6)]
        probes = [holdfast.gaussian_probes([part], rank=2) for part in parts]
        running = probes[0]
        for each in probes[1:]:
            running = (running + each).merged()
        assert running.components[0].factors.shape == (2, 6)
        torch.testing.assert_close(covariance(running).diag(), exact(torch.cat(parts)).diag(), rtol=1e-4, atol=1e-4)
        assert (probes[0] + probes[1]).merged(rank=4).components[0].factors.shape == (4, 6)
        assert (probes[0] + holdfast.gaussian_probes([parts[1]], rank=3)).merged().components[0].factors.shape == (3, 6)

    @pytest.mark.parametrize(
        ("one", "other", "match"),
        [
            (torch.rand(9, 4), torch.rand(9, 5), r"differ in their shape, \(4,\) and \(5,\)"),
            (torch.rand(9, 4), 255 * torch.rand(9, 4), "preprocessed in another way"),
            (torch.rand(99, 4), (torch.rand(99, 4) - 0.13) / 0.3, "preprocessed in another way"),
            (torch.rand(9, 4), torch.rand(9, 4) + 5, "preprocessed in another way"),
        ],
    )
    def test_what_is_not_of_one_preprocessing_is_refused(self, one, other, match):
        with pytest.raises(holdfast.MismatchError, match=match):
            holdfast.gaussian_probes([one]) + holdfast.gaussian_probes([other])

    def test_what_is_not_of_one_kind_is_refused(self):
        with pytest.raises(holdfast.MismatchError, match="give both as terms"):
            holdfast.gaussian_probes([torch.rand(9, 4)]) + holdfast.kept_inputs(torch.rand(9, 4))
        with pytest.raises(holdfast.MismatchError, match="unit, 'example' and 'token'"):
            holdfast.kept_inputs(torch.zeros(2, 3)) + holdfast.kept_inputs(torch.zeros(2, 3), unit="token")
        model, x = small(), torch.randn(9, 6)
        with pytest.raises(holdfast.MismatchError, match="layer, '0' and '1'"):
            holdfast.gaussian_probes([x], model=model, layer="0") + holdfast.gaussian_probes(
                [x], model=model, layer="1"
            )

    @pytest.mark.parametrize(
        ("given", "how"),
        [
            ([1, 2], {}),
            (torch.zeros(0, 3), {}),
            (torch.full((2, 3), float("inf")), {}),
            (torch.zeros(2), {"num_data": -1}),
        ],
    )
    def test_kept_inputs_that_are_none(self, given, how):
        with pytest.raises(holdfast.ArgumentError):
            holdfast.kept_inputs(given, **how)


class TestLayer:
    def test_what_is_captured_is_the_modules_output_and_put_in_again_gives_the_models(self):
        model, x = small(), torch.randn(9, 6)
        seen = captured(model, "3", (x,), x, None)
        torch.testing.assert_close(seen, model[:4](x).detach())
        with replaced(model, "3", seen):
            torch.testing.assert_close(model(torch.zeros(9, 6)), model[4](seen))
        torch.testing.assert_close(model(x), model[4](seen))
        assert not any(module._forward_hooks for module in model.modules())

    def test_the_model_is_left_as_it_was(self):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        model[3].eval()
        running = model[1].running_mean.clone()
        holdfast.gaussian_probes([torch.randn(9, 6)], model=model, layer="2")
        assert torch.equal(model[1].running_mean, running)
        assert [module.training for module in model] == [True, True, True, False]

    def test_moments_are_those_of_the_features(self):
        model, x = small(), torch.randn(50, 6)
        probes = holdfast.gaussian_probes(x.split(20), model=model, layer="1", rank=8)
        features = model[:2](x).detach().double()
        torch.testing.assert_close(covariance(probes), exact(features), rtol=1e-4, atol=1e-5)
        assert probes.blank.shape == (1, 6)

    def test_the_rest_of_the_model_is_held_and_what_is_below_is_not(self):
        """Against the divergence of the last layers alone, on features written out."""
        model, x = small(), torch.randn(50, 6)
        probes = holdfast.gaussian_probes([x], model=model, layer="1")
        posterior, old = holdfast.prior(model), small()
        term = holdfast.distill(model, posterior, probes, holdfast.categorical, batch=32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        term.add_gradient_(model, 1.0, {id(p) for p in model.parameters()})
        drawn = probes.draw(32, torch.Generator().manual_seed(0))
        loss = holdfast.distillation_loss(old[2:](drawn), model[2:](drawn), holdfast.categorical)
        grads = torch.autograd.grad(50 * loss, list(model[2:].parameters()))
        for parameter, grad in zip(model[2:].parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        assert model[0].weight.grad is None

    def test_words_have_probes_after_their_embedding(self):
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

            def forward(self, batch):
                return self.head(self.embed(batch["ids"]).mean(1))

        model, ids = Reader(), torch.randint(0, 9, (50, 5))
        given = {"model": model, "layer": "embed", "forward": lambda run, batch: run({"ids": batch[0]})}
        probes = holdfast.gaussian_probes([(ids,)], **given)
        features = model.embed(ids).detach().flatten(1).double()
        torch.testing.assert_close(covariance(probes), exact(features), rtol=1e-4, atol=1e-5)
        term = holdfast.distill(
            model, holdfast.prior(model), probes, holdfast.categorical, forward=lambda run, ids: run({"ids": ids})
        )
        with torch.no_grad():
            model.head.weight += 0.3
        term.add_gradient_(model, 1.0, {id(parameter) for parameter in model.parameters()})
        assert float(model.head.weight.grad.norm()) > 0
        assert model.embed.weight.grad is None

    def test_a_way_around_the_layer_is_found(self):
        class Shortcut(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

            def forward(self, x):
                return self.head(x + self.body(x))

        model = Shortcut()
        probes = holdfast.gaussian_probes([torch.randn(9, 6)], model=model, layer="body")
        with pytest.raises(holdfast.ArgumentError, match="a shortcut around it"):
            holdfast.distill(model, holdfast.prior(model), probes, holdfast.categorical)

    def test_what_cannot_be_had_is_said(self):
        model = small()
        named = nn.ModuleDict({"head": nn.Linear(6, 2), "body": nn.Linear(6, 2)})
        with pytest.raises(holdfast.ArgumentError, match=r"no module `heda`. It has .*head"):
            holdfast.gaussian_probes([torch.randn(9, 6)], model=named, layer="heda")
        twice = nn.Sequential(shared := nn.Linear(6, 6), nn.Tanh(), shared)
        with pytest.raises(holdfast.DataError, match="ran 2 times"):
            holdfast.gaussian_probes([torch.randn(9, 6)], model=twice, layer="0")
        folded = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1), nn.Linear(3, 3))
        with pytest.raises(holdfast.DataError, match="is no tensor with the examples first"):
            holdfast.gaussian_probes([torch.randn(9, 6)], model=folded, layer="2")
        probes = holdfast.gaussian_probes([torch.randn(9, 6)], model=model, layer="1")
        for parameter in model[2:].parameters():
            parameter.requires_grad_(False)
        term = holdfast.distill(model, holdfast.prior(model), probes, holdfast.categorical)
        with pytest.raises(holdfast.InertError, match="after `1`: unfreeze"):
            term.add_gradient_(model, 1.0, {id(p) for p in model.parameters()})


def memory(probes):
    model = small()
    return holdfast.Memory.of(holdfast.prior(model, precision=1.0), model, probes)


PROBES = {
    "gaussian": lambda: holdfast.gaussian_probes([inputs()], rank=3) + holdfast.gaussian_probes([inputs(seed=1)]),
    "at a layer": lambda: holdfast.gaussian_probes([torch.randn(9, 6)], model=small(), layer="1"),
    "kept": lambda: holdfast.kept_inputs(torch.randn(7, 6), num_data=100),
    "text": lambda: holdfast.kept_inputs(torch.randint(0, 9, (7, 6)), unit="token"),
}


class TestFiles:
    @pytest.mark.parametrize("kind", list(PROBES))
    def test_they_come_back_as_they_were(self, kind, tmp_path):
        probes = PROBES[kind]()
        holdfast.save(memory(probes), tmp_path / "memory.safetensors")
        found = holdfast.load(tmp_path / "memory.safetensors").probes
        assert torch.equal(draws(found, 9), draws(probes, 9))
        assert found.facts == probes.facts
        assert found.num_data == probes.num_data
        assert found.tensors.keys() == probes.tensors.keys()
        for name, tensor in probes.tensors.items():
            assert torch.equal(found.tensors[name], tensor)
        assert torch.equal(draws(probes.to("cpu"), 9), draws(probes, 9))

    def test_a_file_cut_short_or_changed_is_refused(self, tmp_path):
        path = tmp_path / "memory.safetensors"
        holdfast.save(memory(PROBES["gaussian"]()), path)
        whole = path.read_bytes()
        for broken in (whole[:-10], whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
            path.write_bytes(broken)
            with pytest.raises(holdfast.MemoryFileError):
                holdfast.load(path)

    @pytest.mark.parametrize(
        ("tensors", "facts"),
        [
            ({"probes.0.rest": -torch.ones(6)}, {}),
            ({"probes.0.mean": torch.full((6,), float("nan"))}, {}),
            ({"probes.0.factors": torch.full((3, 6), float("inf"))}, {}),
            ({"probes.0.mean": torch.zeros(5)}, {}),
            ({"probes.0.factors": torch.zeros(3, 5)}, {}),
            ({"probes.0.factors": torch.zeros(3)}, {}),
            ({"probes.0.rest": torch.zeros(6, dtype=torch.long)}, {}),
            ({"probes.0.mean": torch.zeros(6, dtype=torch.float64)}, {}),
            ({"probes.9.mean": torch.zeros(6)}, {}),
            ({}, {"kind": "unknown"}),
            ({}, {"kind": ["gaussian"]}),
            ({}, {"shape": [7]}),
            ({}, {"shape": [-6]}),
            ({}, {"shape": "6"}),
            ({}, {"parts": []}),
            ({}, {"parts": [[0.0, 0.0, 1.0]]}),
            ({}, {"parts": [[-3.0, 0.0, 1.0]]}),
            ({}, {"parts": [[300.0, 2.0, 1.0]]}),
            ({}, {"parts": [[300.0, 0.0]]}),
            ({}, {"parts": [[300.0, 0.0, 1.0]] * 3}),
            ({}, {"layer": "1"}),
            ({}, {"more": 1}),
        ],
        ids=str,
    )
    def test_what_is_signed_but_false_is_refused(self, tensors, facts, tmp_path):
        path = tmp_path / "memory.safetensors"
        holdfast.save(memory(holdfast.gaussian_probes([inputs()], rank=3)), path)
        forge(path, tensors, facts)
        with pytest.raises(holdfast.MemoryFileError, match=r"memory\.safetensors"):
            holdfast.load(path)

    @pytest.mark.parametrize(
        "tensors",
        [
            {"probes.weights": -torch.ones(7)},
            {"probes.weights": torch.ones(6)},
            {"probes.weights": torch.ones(7, dtype=torch.long)},
            {"probes.weights": torch.full((7,), float("nan"))},
            {"probes.inputs": torch.full((7, 6), float("nan"))},
        ],
        ids=str,
    )
    def test_kept_inputs_that_are_signed_but_false_are_refused(self, tensors, tmp_path):
        path = tmp_path / "memory.safetensors"
        holdfast.save(memory(PROBES["kept"]()), path)
        forge(path, tensors, {})
        with pytest.raises(holdfast.MemoryFileError, match="not a valid memory"):
            holdfast.load(path)


def forge(path, tensors, facts):
    """Write a file again with other contents, under a checksum that is right for them."""
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["holdfast"])
        held = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
    said["probes"] |= facts
    said["order"] += [name for name in tensors if name not in said["order"]]
    said["sha256"] = _checksum(said, held)
    save_file(held, path, {"holdfast": canonical(said)})


class TestMemory:
    def test_probes_go_with_a_memory_from_task_to_task(self):
        model, x = small(), torch.randn(20, 6)
        y = torch.randint(0, 3, (20,))
        first = holdfast.gaussian_probes([x])
        known = holdfast.Memory.of(holdfast.prior(model), model, first)
        fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
        after = holdfast.consolidate(known, model, fisher)
        assert after.probes is first
        more = after.with_probes(holdfast.gaussian_probes([x + 0.1]))
        assert more.probes.num_data == 40
        assert more.posterior is after.posterior
        assert holdfast.Memory(more.posterior, more.buffers).probes is None
        again = holdfast.diagonal_fisher(model, [(x + 0.1, y)], holdfast.categorical)
        assert holdfast.consolidate_(more, model, again).probes is more.probes

    def test_a_memory_holds_by_its_own_probes(self):
        model, x = small(), torch.randn(20, 6)
        y = torch.randint(0, 3, (20,))
        known = holdfast.consolidate(
            holdfast.Memory.of(holdfast.prior(model), model, holdfast.gaussian_probes([x])), model,
            holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        term = holdfast.distill(model, known, likelihood=holdfast.categorical)
        with holdfast.hold(optimizer, model, [known, term], num_data=20) as handle:
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x + 1), y).backward()
                optimizer.step()
            expected = float(term.value(model)) + float(holdfast.penalty(model, known).detach())
            assert handle.metrics()["holdfast/penalty"] == pytest.approx(expected)
            assert handle.metrics()["holdfast/rise"] == pytest.approx(expected / 40)

    def test_what_is_no_probe_is_refused(self):
        model = small()
        with pytest.raises(holdfast.ArgumentError, match="got Tensor"):
            holdfast.Memory.of(holdfast.prior(model), model, torch.zeros(3, 6))
        with pytest.raises(holdfast.ArgumentError, match="got str"):
            memory(None).with_probes("x")


class TestWhatIsKept:
    @pytest.mark.parametrize("cut", [60, 16, 1])
    def test_no_input_is_among_the_directions_even_where_there_are_few(self, cut):
        x = torch.rand(60, 200, generator=torch.Generator().manual_seed(0))
        (one,) = holdfast.gaussian_probes(x.split(cut)).components
        assert len(one.factors) == 59
        torch.testing.assert_close(one.factors.T @ one.factors + torch.diag(one.rest), exact(x), rtol=1e-4, atol=1e-5)
        centered = x - x.mean(0)
        apart = torch.cat([centered, x[:cut] - x[:cut].mean(0)])
        alike = torch.nn.functional.cosine_similarity(apart.unsqueeze(1), one.factors.unsqueeze(0), dim=-1).abs()
        assert float(alike.max()) < 0.9

    def test_a_tensor_alone_is_no_iterable_of_batches(self):
        with pytest.raises(holdfast.DataError, match=r"give \[x\]"):
            holdfast.gaussian_probes(torch.rand(50, 1, 8, 8))

    @pytest.mark.parametrize("rank", [0, -1, True, 2.5, "3", 7])
    def test_a_merge_takes_a_rank_that_is_one(self, rank):
        both = holdfast.gaussian_probes([inputs()]) + holdfast.gaussian_probes([inputs(seed=1)])
        with pytest.raises(holdfast.ArgumentError, match="rank"):
            both.merged(rank)

    def test_two_preprocessings_are_not_joined_unless_one_says_so(self):
        a = torch.rand(100, 10, generator=torch.Generator().manual_seed(0))
        for first, second in (
            (holdfast.gaussian_probes([a]), holdfast.gaussian_probes([2 * a - 1])),
            (holdfast.kept_inputs(a), holdfast.kept_inputs(255 * a)),
        ):
            with pytest.raises(holdfast.MismatchError, match=r"first\.plus\(second\)"):
                first + second
            assert first.plus(second).num_data == pytest.approx(200)
        with pytest.raises(holdfast.MismatchError, match="one preprocessing"):
            holdfast.kept_inputs(a) + holdfast.kept_inputs((255 * a).long())
        assert (holdfast.kept_inputs(a) + holdfast.kept_inputs(a.clone())).num_data == pytest.approx(100)

    def test_a_layer_is_found_inside_a_wrapper(self):
        model = small()
        inside = holdfast.gaussian_probes([inputs().float()], model=torch.nn.DataParallel(model), layer="1")
        plain = holdfast.gaussian_probes([inputs().float()], model=model, layer="1")
        assert torch.equal(inside.components[0].mean, plain.components[0].mean)

    def test_what_counts_less_after_a_decay_counts_less_in_the_probes(self):
        model, x = small(), inputs().float()
        fisher = holdfast.diagonal_fisher(model, [(x, torch.zeros(300).long())], holdfast.categorical)
        memory = holdfast.Memory.of(
            holdfast.consolidate(holdfast.prior(model), model, fisher), model, holdfast.gaussian_probes([x])
        )
        other = holdfast.diagonal_fisher(model, [(x + 1, torch.zeros(300).long())], holdfast.categorical)
        after = holdfast.consolidate(memory, model, other, decay=0.1)
        assert after.num_data == pytest.approx(330)
        assert after.probes.num_data == pytest.approx(30)

    def test_merging_says_that_probes_are_left_out(self):
        model, x = small(), inputs().float()
        parts = []
        for seed in range(2):
            fisher = holdfast.diagonal_fisher(
                model, [(inputs(seed=seed).float(), torch.zeros(300).long())], holdfast.categorical
            )
            posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
            parts.append(holdfast.Memory.of(posterior, model, holdfast.gaussian_probes([x])))
        with pytest.warns(holdfast.HoldfastWarning, match="probes and answers are not in"):
            holdfast.merge(*parts)
