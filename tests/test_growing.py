"""Models that grow between tasks: what is old is held as before, what is new is free, and what is held is told."""

import copy
import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import nn

import holdfast
from cases import Tied, relu_mlp
from oracles import flat

STRUCTURES = {
    "diagonal": holdfast.diagonal_fisher,
    "kronecker": holdfast.kronecker_fisher,
    "lowrank": functools.partial(holdfast.lowrank_fisher, rank=4),
    "dense": holdfast.dense_fisher,
    "mixed": lambda *args: holdfast.mixed_fisher(
        *args, {"*0.*": holdfast.kronecker_fisher, "*": holdfast.diagonal_fisher}
    ),
}
every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)


def points(seed=1, classes=3, count=40):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=draw).double(), torch.randint(0, classes, (count,), generator=draw)


def known(model, fisher=holdfast.diagonal_fisher):
    found = fisher(model, [points()], holdfast.categorical)
    return holdfast.consolidate(holdfast.prior(model), model, found)


def widened(model, outputs):
    """The same model with more classes: old rows in front, as users grow a head."""
    wide = copy.deepcopy(model)
    old = model[-1]
    wide[-1] = nn.Linear(old.in_features, outputs).double()
    with torch.no_grad():
        wide[-1].weight[: old.out_features] = old.weight
        wide[-1].bias[: old.out_features] = old.bias
    return wide


def started(structure=holdfast.diagonal_fisher, outputs=5):
    model = relu_mlp().double()
    posterior = known(model, structure)
    return model, posterior, widened(model, outputs)


def moved(model, by=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by
    return model


def trained(model, posterior, x, y, steps=20, forward=None, make=lambda p: torch.optim.Adam(p, lr=0.02), **how):
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    with holdfast.hold(optimizer, model, posterior, num_data=len(x), **how) as handle:
        for _ in range(steps):
            optimizer.zero_grad()
            output = model(x) if forward is None else forward(model, x)
            holdfast.categorical.nll(output, y).mean().backward()
            optimizer.step()
    return handle


@every_structure
def test_a_head_with_more_classes_keeps_what_it_had_and_adds_nothing(structure):
    model, posterior, wide = started(structure)
    with pytest.raises(holdfast.MismatchError, match=r"`4.weight` has shape \(5, 4\) .* \(3, 4\) .*expanded\(model\)"):
        holdfast.penalty(wide, posterior)
    larger = posterior.expanded(wide)
    before, after = posterior.precision.diagonal(), larger.precision.diagonal()
    for name, entries in before.items():
        torch.testing.assert_close(after[name][tuple(slice(n) for n in entries.shape)], entries, rtol=1e-6, atol=0)
    assert not after["4.weight"][3:].any()
    assert not after["4.bias"][3:].any()
    assert larger.num_data == posterior.num_data == 40
    for name, mean in larger.mean.items():
        assert torch.equal(mean, dict(wide.named_parameters())[name])  # centered where the model is
    # All of Λ, not the diagonal alone: the same quadratic over the old entries, whatever the new ones do.
    exact = holdfast.penalty(moved(model), posterior)
    torch.testing.assert_close(holdfast.penalty(moved(wide), larger), exact, rtol=1e-6, atol=0)
    pull = holdfast.penalty_gradient(wide, larger)
    assert not pull["4.weight"][3:].any()
    assert pull["4.weight"][:3].any()


@every_structure
def test_new_classes_learn_freely_under_a_strong_hold(structure):
    _, posterior, wide = started(structure)
    x, y = points(2, classes=5)
    larger, begin = posterior.expanded(wide), copy.deepcopy(wide)
    trained(wide, larger, x, y, strength=1e4)
    rows = (wide[4].weight - begin[4].weight).detach().norm(dim=1)
    assert rows[3:].min() > 0.1
    free = copy.deepcopy(begin)
    trained(free, holdfast.prior(free), x, y)
    assert holdfast.penalty(wide, larger) < 0.1 * holdfast.penalty(free, larger)


def test_new_entries_may_have_a_prior_of_their_own():
    _, posterior, wide = started()
    larger = posterior.expanded(wide, precision=2.0)
    entries = larger.precision.diagonal()
    assert torch.equal(entries["4.weight"][3:], torch.full((2, 4), 2.0).double())
    torch.testing.assert_close(entries["4.weight"][:3], posterior.precision.diagonal()["4.weight"])
    moved(wide)
    both = holdfast.penalty(wide, larger) - holdfast.penalty(wide, posterior.expanded(begin_of(wide)))
    torch.testing.assert_close(both, torch.tensor(0.5 * 2.0 * 10 * 0.1**2).double())
    with pytest.raises(holdfast.ArgumentError, match="precision of new entries"):
        posterior.expanded(wide, precision=-1.0)


def test_a_prior_of_new_entries_that_two_children_share_counts_once():
    """Of a flat prior that grew, where nothing else would tell that the two are of one."""
    small, _, wide = started()
    base = holdfast.prior(small).expanded(wide, precision=2.0)
    children = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        moved(wide)
        data = [(torch.randn(8, 5).double(), torch.randint(0, 5, (8,)))]
        children.append(holdfast.consolidate(base, wide, holdfast.diagonal_fisher(wide, data, holdfast.categorical)))
    with pytest.raises(holdfast.MismatchError, match=r"prior\(precision=2.0\) of what is new"):
        holdfast.merge(*children)
    once = holdfast.merge(*children, base=base).precision.entries["4.bias"]
    every = sum(child.precision.entries["4.bias"] for child in children)
    torch.testing.assert_close(once, every - base.precision.entries["4.bias"])
    again = holdfast.prior(small, precision=1.0).expanded(wide, precision=2.0)  # of another one: it counts for itself
    assert not {source.id for source in again.sources} & {source.id for source in base.sources}


def begin_of(model):
    return moved(copy.deepcopy(model), -0.1)


class Heads(nn.Module):
    """A body, and a head for each task."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.heads = nn.ModuleDict({"first": nn.Linear(6, 3)})

    def forward(self, x, task="first"):
        return self.heads[task](self.body(x))


def second(model, x):
    return model(x, "second")


def with_two_heads(structure=holdfast.diagonal_fisher):
    model = Heads().double()
    memory = holdfast.Memory.of(known(model, structure), model)
    model.heads["second"] = nn.Linear(6, 4).double()
    return model, memory


@every_structure
def test_a_new_head_is_free_and_the_old_one_held(structure):
    model, memory = with_two_heads(structure)
    x, y = points(2, classes=4)
    before, begin = model(x).detach(), copy.deepcopy(model)
    for held in (memory, memory.expanded(model)):
        now = copy.deepcopy(begin)
        trained(now, held, x, y, forward=second, strength=1e3)
        assert (now.heads["second"].weight - begin.heads["second"].weight).detach().norm() > 0.1
        free = copy.deepcopy(begin)
        trained(free, holdfast.prior(free), x, y, forward=second)
        assert (now(x) - before).detach().norm() < 0.5 * (free(x) - before).detach().norm()
    after = holdfast.consolidate(
        memory, now, holdfast.diagonal_fisher(now, [(x, y)], holdfast.categorical, forward=lambda m, b: second(m, b[0]))
    )
    assert {"heads.first.weight", "heads.second.weight"} < set(after.mean)


def test_the_old_function_of_a_model_with_a_new_head_is_had_once_the_memory_knows_it():
    model, memory = with_two_heads()
    x, y = points(2, classes=4)
    then = model(x).detach()
    with pytest.raises(holdfast.MismatchError, match=r"`heads.second.weight`.*which trains.*memory.expanded\(model\)"):
        holdfast.recalled(model, memory)
    memory = memory.expanded(model)
    old = holdfast.recalled(model, memory)
    trained(model, memory, x, y, forward=second)
    assert (model(x) - then).abs().max() > 1e-3
    torch.testing.assert_close(old(x), then)


def test_a_layer_that_was_frozen_and_has_changed_does_not_pass_for_old():
    model = relu_mlp().double()
    model[0].requires_grad_(False)
    memory = holdfast.Memory.of(known(model), model)
    model[0].requires_grad_(True)
    assert {"0.weight", "0.bias"} < set(memory.expanded(model).mean)  # thawed, and as it was
    with torch.no_grad():
        model[0].weight += 0.1
    assert set(memory.expanded(model).mean) - set(memory.mean) == {"0.bias"}
    with pytest.raises(holdfast.MismatchError, match=r"does not have `0.weight`, which trains"):
        holdfast.recalled(model, memory.expanded(model))


def test_a_layer_may_be_added():
    """At the end of a model its names do not move; a new layer that starts as nothing changes no answer."""
    model, posterior, _ = started()
    deep = nn.Sequential(*copy.deepcopy(model), nn.Linear(3, 3).double())
    with torch.no_grad():
        deep[5].weight.copy_(torch.eye(3))
        deep[5].bias.zero_()
    assert holdfast.penalty(deep, posterior) == 0
    told = posterior.coverage(deep)
    assert told.new == {"5.weight", "5.bias"} == set(told.free)
    assert told.fraction == pytest.approx(sum(told.held.values()) / 91)
    larger = posterior.expanded(deep, precision=1.0)
    assert sum(larger.coverage(deep).held.values()) == sum(told.held.values()) + 12
    torch.testing.assert_close(
        holdfast.penalty(moved(deep), larger) - holdfast.penalty(deep, posterior),
        torch.tensor(0.5 * 12 * 0.1**2).double(),
    )


@pytest.mark.parametrize("grown", [False, True])
def test_a_frozen_layer_stays_and_is_told_as_frozen(grown):
    _, posterior, wide = started()
    posterior = posterior.expanded(wide) if grown else known(wide)
    wide[0].requires_grad_(False)
    told = posterior.coverage(wide)
    assert told.frozen == {"0.weight", "0.bias"}
    before = wide[0].weight.clone()
    trained(wide, posterior, *points(2, classes=5))
    assert torch.equal(wide[0].weight, before)
    assert holdfast.penalty(wide, posterior) > 0
    wide.requires_grad_(False)
    with pytest.raises(holdfast.InertError, match="frozen"):
        holdfast.hold(torch.optim.SGD(wide.parameters(), lr=0.1), wide, posterior, num_data=1)


def test_statistics_grow_with_their_layer():
    def made(channels):
        return nn.Sequential(nn.Linear(5, channels), nn.BatchNorm1d(channels), nn.ReLU(), nn.Linear(channels, 3))

    model = made(6).double()
    model.train()(points()[0])
    memory = holdfast.Memory.of(known(model.eval()), model)
    wide = made(8).double().eval()
    with torch.no_grad():
        for name, value in (*wide.named_parameters(), *wide.named_buffers()):
            old = dict([*model.named_parameters(), *model.named_buffers()])[name]
            value[tuple(slice(n) for n in old.shape)] = old
        wide[3].weight[:, 6:] = 0
    x = points(2)[0]
    torch.testing.assert_close(wide(x), model(x))
    larger = memory.expanded(wide)
    assert larger.buffers["1.running_mean"].shape == (8,)
    assert torch.equal(larger.buffers["1.running_mean"][:6], memory.buffers["1.running_mean"])
    then = model(x).detach()
    moved(wide)
    wide[1].running_mean += 1
    torch.testing.assert_close(holdfast.recalled(wide, larger)(x), then)
    holdfast.restore_(wide, larger)
    torch.testing.assert_close(wide(x), then)
    # A new layer's statistics join; those that were never kept do not pass for old.
    deep = nn.Sequential(*copy.deepcopy(model), nn.BatchNorm1d(3).double())
    assert "4.running_mean" in memory.expanded(deep).buffers
    bare = holdfast.Memory(memory.posterior).expanded(deep)
    assert {name.split(".")[0] for name in bare.buffers} == {"4"}


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "lowrank"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_token_embedding(structure, tied):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied, **sizes)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(0, 20, (6, 7))
    fisher = STRUCTURES[structure](model, [{"input_ids": ids, "labels": ids}], holdfast.tokens(shift=True))
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    model.resize_token_embeddings(25)
    names = {"transformer.wte.weight"} | (set() if tied else {"lm_head.weight"})
    with pytest.raises(holdfast.MismatchError, match=r"`transformer.wte.weight` has shape \(25, 8\).*expanded"):
        holdfast.penalty(model, posterior)
    larger = posterior.expanded(model)
    before, after = posterior.precision.diagonal(), larger.precision.diagonal()
    for name in names:
        torch.testing.assert_close(after[name][:20], before[name], rtol=1e-6, atol=0)
        assert not after[name][20:].any()
    assert larger.ties == ({"transformer.wte.weight": ("lm_head.weight",)} if tied else {})
    told = larger.coverage(model)
    assert all(told.held[name] <= told.sizes[name] - 5 * 8 for name in names)
    assert told.held["transformer.ln_f.weight"] == 8
    assert ("lm_head.weight" in told.sizes) is not tied
    new = torch.randint(0, 25, (6, 7))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    table = model.get_input_embeddings().weight
    start = table.detach().clone()
    with holdfast.hold(optimizer, model, larger, num_data=36, unit="token", strength=1e4):
        for _ in range(5):
            optimizer.zero_grad()
            logits = model(input_ids=new).logits
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), new[:, 1:].flatten()).backward()
            optimizer.step()
    away = (table.detach() - start).norm(dim=1)
    seen = new.unique()
    assert away[seen[seen >= 20]].min() > 0.02
    if tied:  # an output of every token, so that every old row has a precision
        assert away[:20].max() < 0.5 * away[seen[seen >= 20]].max()


def test_growth_upon_growth_is_growth_at_once():
    model, posterior, wide = started(outputs=7)
    between = widened(model, 5)
    with torch.no_grad():
        between[-1].weight[:] = wide[-1].weight[:5]
        between[-1].bias[:] = wide[-1].bias[:5]
    once, twice = posterior.expanded(wide), posterior.expanded(between).expanded(wide)
    assert once.id == twice.id


def test_a_memory_that_fits_is_expanded_to_itself():
    model, posterior, _ = started()
    assert posterior.expanded(model).id == posterior.id


def test_a_vocabulary_that_grew_stays_tied_or_is_refused():
    posterior = known_text(Tied().double())
    grown = Tied(vocabulary=11).double()
    larger = posterior.expanded(grown)
    assert list(larger.ties) == ["embed.weight"]
    assert larger.coverage(grown).sizes.keys() == larger.mean.keys()
    grown.head.weight = nn.Parameter(grown.embed.weight.detach().clone())
    with pytest.raises(holdfast.MismatchError, match=r"`embed.weight` and `head.weight` were one parameter"):
        posterior.expanded(grown)


def known_text(model):
    ids = torch.randint(0, 9, (8, 5))
    fisher = holdfast.diagonal_fisher(model, [{"input_ids": ids, "labels": ids}], holdfast.tokens(shift=True))
    return holdfast.consolidate(holdfast.prior(model), model, fisher)


def other(outputs=3, inputs=5, hidden=6):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 4), nn.ReLU(), nn.Linear(4, outputs)
    ).double()


class Turned(nn.Module):
    """A layer whose author keeps inputs first, as GPT-2's does."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(5, 6)), nn.Parameter(torch.zeros(6))


def turned():
    model = other()
    model[0] = Turned().double()
    return model


@pytest.mark.parametrize(("make", "said"), [
    (lambda: other(outputs=2), r"`4.weight` has shape \(2, 4\) in the model and \(3, 4\) in the memory; .*new memory"),
    (lambda: other(hidden=5), r"`0.weight` has shape \(5, 5\) .* `2.weight` has shape \(4, 5\) .*make a new memory"),
    (lambda: other(inputs=6, outputs=2), r"`4.weight` has shape \(2, 4\) in the model and \(3, 4\).*make a new memory"),
    (turned, r"`0.weight` has shape \(5, 6\) in the model and \(6, 5\) in the memory, transposed.*make a new memory"),
], ids=["fewer classes", "narrower", "grown and shrunk", "transposed"])  # fmt: skip
def test_what_did_not_grow_is_refused_and_told_by_the_coverage(make, said):
    _, posterior, _ = started()
    model = make()
    for refused in (
        lambda: posterior.expanded(model),
        lambda: holdfast.penalty(model, posterior),
        lambda: holdfast.hold(torch.optim.SGD(model.parameters(), lr=0.1), model, posterior, num_data=1),
    ):
        with pytest.raises(holdfast.MismatchError, match=said):
            refused()
    told = posterior.coverage(model)
    assert told.unfit
    assert all(text in str(told) for text in told.unfit.values())
    assert told.fraction < 1


class Named(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


def test_renamed_layers_are_guessed_at_and_can_be_given_their_new_names():
    model, posterior, _ = started()
    memory = holdfast.Memory.of(posterior, model)
    model.add_module("head", model._modules.pop("4"))
    with pytest.raises(
        holdfast.MismatchError, match=r"`4.bias`, which.*renamed\(\{'4.weight': 'head.weight', '4.bias'"
    ):
        holdfast.penalty(model, posterior)
    now = memory.renamed({"4.weight": "head.weight", "4.bias": "head.bias"})
    assert not now.coverage(model).unfit
    exact = 0.5 * float((flat(posterior.precision.entries) * 0.1**2).sum())
    assert holdfast.penalty(moved(model), now).item() == pytest.approx(exact)
    with pytest.raises(holdfast.InertError, match=r"nothing would be held.*posterior.renamed\(\{'0.weight': 'net.0.w"):
        holdfast.penalty(Named(model), now)
    wrapped = now.renamed({name: f"net.{name}" for name in now.mean})
    torch.testing.assert_close(holdfast.penalty(Named(model), wrapped), holdfast.penalty(model, now))
    with pytest.raises(holdfast.MismatchError, match=r"no `9\.weight` to rename"):
        memory.renamed({"9.weight": "head.weight"})
    with pytest.raises(holdfast.ArgumentError, match=r"both be called `0\.bias`"):
        memory.renamed({"4.bias": "0.bias"})


def test_tied_parameters_are_renamed_together():
    model = Tied().double()
    posterior = known_text(model).renamed({"embed.weight": "table.weight", "head.weight": "out.weight"})
    assert posterior.ties == {"table.weight": ("out.weight",)}
    assert "table.weight" in posterior.precision.shapes


@every_structure
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_dtype_is_no_other_model(structure, dtype):
    model, posterior, wide = started(structure)
    narrow = wide.to(dtype)
    larger = posterior.expanded(narrow)
    assert larger.mean["4.weight"].dtype == torch.float64
    torch.testing.assert_close(larger.mean["4.weight"][3:], narrow[4].weight[3:].double(), rtol=0, atol=0)
    assert torch.equal(larger.mean["4.weight"][:3], model[4].weight)  # as it was, and not rounded
    rounding = holdfast.penalty(narrow, larger).item() / posterior.num_data
    assert rounding < (1e-4 if dtype == torch.bfloat16 else 1e-12)
    assert larger.coverage(narrow).fraction > 0.8


def test_gates_that_are_stacked_cannot_grow_in_place():
    posterior = holdfast.prior(nn.LSTM(3, 2), precision=1.0)
    with pytest.raises(holdfast.MismatchError, match=r"`weight_ih_l0` of LSTM grew .*stacks .*Make a new memory"):
        posterior.expanded(nn.LSTM(3, 4))


def test_a_kronecker_layer_in_groups_does_not_grow():
    model = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 3)).double()
    x, y = torch.randn(10, 4, 1).double(), torch.arange(10) % 3
    posterior = holdfast.consolidate(
        holdfast.prior(model), model, holdfast.kronecker_fisher(model, [(x, y)], holdfast.categorical)
    )
    wide = nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Flatten(), nn.Linear(6, 3)).double()
    with pytest.raises(holdfast.MismatchError, match=r"`0.weight` .*grew from .*Make a new memory"):
        posterior.expanded(wide)


def test_the_coverage_reads_as_a_table():
    model, posterior, wide = started()
    wide.add_module("extra", nn.Linear(2, 2).double())
    wide[0].requires_grad_(False)
    entries = {name: value.clamp(min=1e-9) for name, value in posterior.precision.entries.items() if name != "2.bias"}
    posterior = holdfast.Posterior(posterior.mean, holdfast.Diagonal(entries, posterior.sources))
    assert (
        str(posterior.coverage(wide))
        == """\
0.weight                30  frozen
0.bias                   6  frozen
2.weight                24  held
2.bias                   4  free
4.weight                20  has shape (5, 4) in the model and (3, 4) in the memory: posterior.expanded(model)
4.bias                   5  has shape (5,) in the model and (3,) in the memory: posterior.expanded(model)
extra.weight             4  new, free
extra.bias               2  new, free
40.7 % of 59 entries that train are held; 36 are frozen"""
    )
    larger = posterior.expanded(wide)
    assert str(larger.coverage(nn.DataParallel(wide))).splitlines()[4:] == [
        "4.weight                20  held, but for 8 free entries",
        "4.bias                   5  held, but for 2 free entries",
        "extra.weight             4  free",
        "extra.bias               2  free",
        "66.1 % of 59 entries that train are held; 36 are frozen",
    ]
    del model[4]
    assert str(posterior.coverage(model)).splitlines()[-3:-1] == [
        "4.weight                in the memory, not in the model",
        "4.bias                  in the memory, not in the model",
    ]


def test_a_hold_tells_what_it_holds():
    """Of all its terms together: an entry is held where one of them holds it."""
    _, posterior, wide = started()
    larger = posterior.expanded(wide)
    wide[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in wide.parameters() if p.requires_grad], lr=0.01)
    for how in ({}, {"every": 3}):
        handle = holdfast.hold(optimizer, wide, larger, num_data=10, **how)
        assert str(handle.coverage) == str(larger.coverage(wide))
        handle.detach()
    inputs = holdfast.kept_inputs(points()[0])
    term = holdfast.distill(wide, larger, inputs, holdfast.categorical)
    for terms in ([larger, term], [term, larger]):
        handle = holdfast.hold(optimizer, wide, terms, num_data=10)
        assert handle.coverage.fraction == 1
        assert handle.coverage.frozen == {"0.weight", "0.bias"}
        handle.detach()
    handle = holdfast.hold(optimizer, wide, holdfast.prior(wide), num_data=10)
    assert handle.coverage.fraction == 0
    assert handle.coverage.free == ("2.weight", "2.bias", "4.weight", "4.bias")
    handle.detach()


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_in_groups_grows_where_each_channel_is_one_or_not_at_all(kind):
    """Its rows are the groups' one behind the other: more rows in each move those of the second, more groups do not,
    and a shape does not tell which it was."""
    old, new = (kind(4, outputs, 1, groups=2) for outputs in (4, 8))
    with pytest.raises(holdfast.MismatchError, match=r"`weight` of Conv.*grew .*stacks .*Make a new memory"):
        holdfast.prior(old, 1.0).expanded(new)
    narrow, wide = (kind(channels, channels, 3, groups=channels) for channels in (4, 6))
    with torch.no_grad():
        wide.weight[:4], wide.bias[:4] = narrow.weight, narrow.bias
    grown = holdfast.prior(narrow, 1.0).expanded(wide)
    assert float(holdfast.penalty(wide, grown).detach()) == 0
