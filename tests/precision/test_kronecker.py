"""Kronecker sums, what is made of them in constant memory, and their closed forms, against dense matrices."""

import itertools

import pytest
import torch
from torch import nn

import holdfast
from cases import relu_mlp
from holdfast import ArgumentError, Diagonal, Kronecker, MismatchError, SingularError, Source
from holdfast.precision.layers import Layer
from holdfast.precision.terms import Term
from oracles import flat

# (weight's shape, groups, rows, turned), each with and without a bias
SHAPES = {
    "linear": ((3, 4), 1, 3, False),
    "turned": ((4, 3), 1, 4, True),
    "conv": ((3, 2, 2), 1, 3, False),
    "grouped": ((4, 2, 2), 2, 2, False),
    "heads": ((2, 3, 2), 2, 3, True),
}
LAYERS = {
    f"{name}{' with bias' if bias else ''}": Layer("w", bias, torch.Size(shape), *rest)
    for (name, (shape, *rest)), bias in itertools.product(SHAPES.items(), (None, "b"))
}


def spd(generator, groups, size, wide=False):
    root = torch.randn(groups, size, size + 1, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT
    return matrix.diagonal(dim1=1, dim2=2).clone() if wide else matrix


def made(layer, terms=1, seed=0, wide=(False, False), counts=None):
    """A sum of terms with factors and amounts of data of their own."""
    generator = torch.Generator().manual_seed(seed)
    return Kronecker({layer: tuple(
        Term(spd(generator, layer.groups, layer.outputs, wide[0]), spd(generator, layer.groups, layer.inputs, wide[1]),
             float(5 * (n + 1) if counts is None else counts[n]))
        for n in range(terms)
    )}, (Source(f"task {seed}", 30.0, "example", "categorical", "expected"),))  # fmt: skip


def only_term(kronecker):
    ((term,),) = kronecker.layers.values()
    return term


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def delta_of(layer, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in layer.shapes.items()}


def test_the_dense_matrix_is_that_of_outputs_and_inputs(layer):
    """Entry by entry: Λ[(o, i), (p, j)] = Σₜ Gₜ[o, p] Aₜ[i, j], by where each entry of the parameters sits."""
    kronecker = made(layer, 2)
    matrix, places = kronecker.dense(), layer.places()
    for group, (o, i), (p, j) in itertools.product(
        range(layer.groups), *[list(itertools.product(range(layer.outputs), range(layer.inputs)))[::3]] * 2
    ):
        expected = sum(t.outputs[group, o, p] * t.inputs[group, i, j] for t in kronecker.layers[layer])
        assert matrix[places[group, o, i], places[group, p, j]] == pytest.approx(float(expected))
    between = [matrix[a][:, b] for a, b in itertools.permutations([place.flatten() for place in places], 2)]
    assert not any(block.any() for block in between)
    torch.testing.assert_close(flat(kronecker.matvec(delta_of(layer))), matrix @ flat(delta_of(layer)))
    torch.testing.assert_close(kronecker.logdet(), torch.linalg.slogdet(matrix).logabsdet)


# One term of several


def test_merged_sums_g_and_averages_a_by_the_data(layer):
    kronecker = made(layer, 3)
    terms, one = kronecker.layers[layer], only_term(kronecker.merged())
    torch.testing.assert_close(one.outputs, sum(term.outputs for term in terms))
    torch.testing.assert_close(one.inputs, (5 * terms[0].inputs + 10 * terms[1].inputs + 15 * terms[2].inputs) / 30)
    assert one.num_data == 30
    assert kronecker.merged().sources == kronecker.sources


def test_merged_is_exact_where_inputs_are_alike():
    layer = LAYERS["linear with bias"]
    a, b = made(layer, seed=1), made(layer, seed=2)
    same = Kronecker({layer: (Term(only_term(b).outputs, only_term(a).inputs, 70.0),)}, b.sources)
    torch.testing.assert_close((a + same).merged().dense(), (a + same).dense())


def test_scaling_and_decay_weigh_the_inputs_too():
    layer = LAYERS["linear with bias"]
    old, new = made(layer, seed=1, counts=[40]), made(layer, seed=2, counts=[10])
    one = only_term((0.25 * old + new).merged())
    torch.testing.assert_close(one.outputs, 0.25 * only_term(old).outputs + only_term(new).outputs)
    torch.testing.assert_close(one.inputs, (only_term(old).inputs + only_term(new).inputs) / 2)
    assert one.num_data == 20


def test_merging_without_any_data_weighs_all_alike():
    kronecker = made(LAYERS["linear"], 2, counts=[0, 0])
    one, (a, b) = only_term(kronecker.merged()), kronecker.layers[LAYERS["linear"]]
    torch.testing.assert_close(one.inputs, (a.inputs + b.inputs) / 2)


@pytest.mark.parametrize("wide", list(itertools.product((False, True), repeat=2)))
def test_a_matrix_and_a_diagonal_make_a_matrix(wide):
    layer = LAYERS["linear with bias"]
    total = made(layer, 2, seed=1) + made(layer, 1, seed=2, wide=wide)
    for one in (total.merged(), total.nearest()):
        assert only_term(one).outputs.ndim == only_term(one).inputs.ndim == 3
    terms = total.layers[layer]
    full = [t.inputs if t.inputs.ndim == 3 else torch.diag_embed(t.inputs) for t in terms]
    mean = sum(t.num_data * each for t, each in zip(terms, full, strict=True)) / sum(t.num_data for t in terms)
    torch.testing.assert_close(only_term(total.merged()).inputs, mean)


def test_memory_is_constant_over_fifty_merges():
    layer = LAYERS["linear with bias"]
    kept = made(layer, seed=0)
    tensors, size = len(kept.tensors), sum(t.nbytes for t in kept.tensors.values())
    outputs = only_term(kept).outputs.clone()
    for seed in range(1, 51):
        new = made(layer, seed=seed)
        outputs += only_term(new).outputs
        kept = (kept + new).merged()
        assert len(kept.tensors) == tensors
        assert sum(t.nbytes for t in kept.tensors.values()) == size
    torch.testing.assert_close(only_term(kept).outputs, outputs)
    assert only_term(kept).num_data == 51 * 5
    assert len(kept.sources) == 51


@pytest.mark.parametrize("terms", [2, 3, 5])
def test_nearest_is_van_loans_product(layer, terms):
    """The leading singular pair of the matrix whose rows are blocks, for each group (Van Loan and Pitsianis, 1993)."""
    kronecker = made(layer, terms)
    one = only_term(kronecker.nearest())
    for group in range(layer.groups):
        rearranged = sum(
            torch.outer(t.outputs[group].flatten(), t.inputs[group].flatten()) for t in kronecker.layers[layer]
        )
        u, s, v = torch.linalg.svd(rearranged)
        found = torch.outer(one.outputs[group].flatten(), one.inputs[group].flatten())
        torch.testing.assert_close(found, s[0] * torch.outer(u[:, 0], v[0]), rtol=1e-7, atol=1e-7)
    distance = (kronecker.nearest().dense() - kronecker.dense()).norm()
    assert distance <= (kronecker.merged().dense() - kronecker.dense()).norm() + 1e-9
    for seed in range(20):
        other = made(layer, seed=100 + seed).dense()
        best = (other * kronecker.dense()).sum() / (other * other).sum()  # scaled as well as it can be
        assert distance <= (best * other - kronecker.dense()).norm() + 1e-9
    traces = [each.inputs.diagonal(dim1=1, dim2=2).sum(1) for each in (one, only_term(kronecker.merged()))]
    torch.testing.assert_close(*traces)


def test_nearest_of_one_term_or_of_terms_alike_is_the_sum(layer):
    one = made(layer)
    torch.testing.assert_close(one.nearest().dense(), one.dense())
    torch.testing.assert_close((one + 3 * one).nearest().dense(), 4 * one.dense())
    zero = 0 * one + 0 * made(layer, seed=1)
    assert zero.nearest().is_zero()


# In eigenvectors


def test_rotated_is_exact_for_one_term_and_the_projection_for_several(layer):
    one = made(layer)
    torch.testing.assert_close(one.rotated().dense(), one.dense())
    several = made(layer, 3)
    ((basis, entries),) = several.rotated().layers.values()
    places = layer.places()
    for group in range(layer.groups):
        block = several.dense()[places[group].flatten()][:, places[group].flatten()]
        vectors = torch.kron(basis.outputs[group], basis.inputs[group])
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(vectors), dtype=torch.float64))
        torch.testing.assert_close(entries[group].flatten(), (vectors.T @ block @ vectors).diagonal())
        merged = only_term(several.merged())
        for side, factor in ((basis.outputs, merged.outputs), (basis.inputs, merged.inputs)):
            inside = side[group].T @ factor[group] @ side[group]
            torch.testing.assert_close(inside, inside.diagonal().diag(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("wide", [(False, False), (True, False), (False, True), (True, True)])
def test_turning_into_another_basis_keeps_the_diagonal_there(layer, wide):
    several, other = made(layer, 3).rotated(), made(layer, seed=5, wide=wide).rotated()
    for rotated, target in itertools.product((several, other), repeat=2):
        turned = rotated.turned({layer: target.layers[layer][0]})
        basis, entries = turned.layers[layer]
        unit = holdfast.Rotated({layer: (basis, torch.ones_like(entries))})
        torch.testing.assert_close(unit.dense(), torch.eye(len(unit.dense()), dtype=torch.float64))
        for group, o, i in [(0, 0, 0), (layer.groups - 1, layer.outputs - 1, 1), (0, 1, layer.inputs - 1)]:
            one = torch.zeros_like(entries)
            one[group, o, i] = 1
            direction = layer.tensors(basis.back(one))
            torch.testing.assert_close(entries[group, o, i], rotated.quadratic(direction))
        if target is rotated:
            torch.testing.assert_close(turned.dense(), rotated.dense())


def test_what_is_solved_for_has_nothing_in_free_directions(layer):
    rotated = made(layer).rotated()
    ((basis, entries),) = rotated.layers.values()
    entries[:, 0], entries[:, :, -1] = 0, 0
    free, vector = holdfast.Rotated({layer: (basis, entries)}), delta_of(layer)
    solved = torch.linalg.pinv(free.dense(), hermitian=True) @ flat(vector)
    torch.testing.assert_close(flat(free.solve(vector)), solved)


# Too large for a dense matrix


def large(terms=1, rank=None):
    """300 × 300 with a bias: 90,300 entries."""
    layer = Layer("w", "b", torch.Size([300, 300]), 1, 300, False)
    generator = torch.Generator().manual_seed(0)

    def factor(size):
        root = torch.randn(1, size, rank or size + 5, generator=generator, dtype=torch.float64)
        return root @ root.mT / size

    return layer, Kronecker({layer: tuple(Term(factor(300), factor(301), 10.0) for _ in range(terms))})


def number(layer, value):
    return Diagonal({n: torch.full((), value, dtype=torch.float64).expand(s) for n, s in layer.shapes.items()})


def test_a_large_layer_has_closed_forms_alone_and_with_a_prior():
    layer, kronecker = large()
    g, a = (torch.linalg.eigvalsh(f[0]) for f in (only_term(kronecker).outputs, only_term(kronecker).inputs))
    torch.testing.assert_close(kronecker.logdet(), 301 * g.log().sum() + 300 * a.log().sum())
    for prior in (0.0, 0.3):
        total = kronecker + number(layer, prior) if prior else kronecker
        torch.testing.assert_close(total.logdet(), (torch.outer(g, a) + prior).log().sum())
        x = total.solve(delta_of(layer))
        back = total.matvec(x)
        torch.testing.assert_close(flat(back), flat(delta_of(layer)), rtol=1e-6, atol=1e-6)
        draw = total.sample(torch.Generator().manual_seed(1))
        energy = float(total.quadratic(draw))  # χ² with as many degrees of freedom as entries
        assert abs(energy - 90_300) < 5 * (2 * 90_300) ** 0.5


def test_singular_factors_are_refused_with_the_layer_and_the_count_and_a_prior_helps():
    layer, kronecker = large(rank=10)
    for method in (kronecker.logdet, kronecker.sample):
        with pytest.raises(SingularError, match=r"zero in 90200 of 90300 directions of `w`.*prior\(model, precision="):
            method()
    g, a = (torch.linalg.eigvalsh(f[0])[-10:] for f in (only_term(kronecker).outputs, only_term(kronecker).inputs))
    expected = (torch.outer(g, a) + 2.0).log().sum() + 90_200 * torch.tensor(2.0).double().log()
    torch.testing.assert_close((kronecker + number(layer, 2.0)).logdet(), expected)
    seen = kronecker.matvec(kronecker.solve(kronecker.matvec(delta_of(layer))))  # Λ Λ⁺ Λ = Λ
    torch.testing.assert_close(flat(seen), flat(kronecker.matvec(delta_of(layer))), rtol=1e-6, atol=1e-6)


def test_several_terms_too_large_for_a_dense_inverse_name_the_way_out():
    layer, several = large(terms=2)
    prior = number(layer, 0.3)
    for each in (several, several + prior):
        for method in (each.logdet, each.sample):
            with pytest.raises(ArgumentError, match=r"`w` has 2 Kronecker terms.*90,300 entries.*\.merged\(\)"):
                method()
        assert torch.isfinite(each.merged().logdet())


def test_several_terms_too_large_for_a_dense_inverse_are_solved_step_by_step():
    layer, several = large(terms=2)
    for each in (several + number(layer, 0.3), several + number(layer, 3.0)):
        vector = each.matvec(delta_of(layer))
        found = each.solve(vector)
        rest = flat(each.matvec(found)) - flat(vector)
        assert rest.norm() < 2e-6 * flat(vector).norm()
        torch.testing.assert_close(flat(found), flat(delta_of(layer)), rtol=1e-2, atol=1e-2)


def test_what_cannot_be_solved_says_how_far_it_came(monkeypatch):
    monkeypatch.setattr("holdfast.precision.iterative._STEPS", 2)
    layer, several = large(terms=2)
    with pytest.raises(SingularError, match=r"was not solved.*of v is left after 2 steps.*prior"):
        several.solve(several.matvec(delta_of(layer)))


def test_a_factor_that_is_negative_somewhere_is_no_precisions():
    layer = Layer("w", None, torch.Size([2, 2]), 1, 2, False)
    wrong = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]])
    kronecker = Kronecker({layer: (Term(wrong, torch.eye(2).unsqueeze(0), 1.0),)})
    with pytest.raises(ArgumentError, match=r"G of `w` is no precision's: it is negative in 1 of 2 directions"):
        kronecker.logdet()


@pytest.mark.parametrize(
    ("outputs", "inputs", "count", "message"),
    [
        (torch.eye(3)[None], torch.eye(4)[None], 1.0, r"G of `w` is 1×2×2, or its diagonal 1×2; got 1×3×3"),
        (torch.eye(2)[None], torch.eye(4), 1.0, r"A of `w` is 1×4×4.*got 4×4"),
        (torch.eye(2)[None] * torch.nan, torch.eye(4)[None], 1.0, r"`G of `w`` has values that are not finite"),
        (torch.triu(torch.ones(1, 2, 2)), torch.eye(4)[None], 1.0, r"G of `w` must be symmetric"),
        (-torch.ones(1, 2), torch.eye(4)[None], 1.0, r"G of `w` has a negative diagonal"),
        (torch.eye(2)[None], torch.eye(4)[None], -1.0, r"a term of `w` stands for -1.0 examples"),
        (torch.eye(2)[None], torch.eye(4)[None], float("nan"), r"a term of `w` stands for nan examples"),
    ],
)  # fmt: skip
def test_factors_that_do_not_fit_are_refused(outputs, inputs, count, message):
    layer = Layer("w", "b", torch.Size([2, 3]), 1, 2, False)
    with pytest.raises(ArgumentError, match=message):
        Kronecker({layer: (Term(outputs, inputs, count),)})


# Sums and differences


def test_taking_a_kept_term_out_is_exact(layer):
    a, b = made(layer, 2, seed=1), made(layer, 1, seed=2)
    rest = (a + b) - b
    torch.testing.assert_close(rest.dense(), a.dense())
    assert rest.sources == a.sources
    assert ((b + b) - b).dense().equal(b.dense())  # one of the two
    with pytest.raises(MismatchError, match=r"Kronecker cannot be taken out.*exact=True"):
        (a + b).merged() - b


def test_layers_that_fold_differently_stay_apart_and_add_up():
    folded, bare = LAYERS["linear with bias"], LAYERS["linear"]
    total = made(folded) + made(bare, seed=1)
    assert isinstance(total, holdfast.Sum)
    delta = delta_of(folded)
    torch.testing.assert_close(
        total.quadratic(delta), made(folded).quadratic(delta) + made(bare, seed=1).quadratic(delta)
    )
    torch.testing.assert_close(total.logdet(), torch.linalg.slogdet(total.dense()).logabsdet)


# Growth

GROWN = {
    "linear": (5, 4), "linear with bias": (5, 6), "turned": (4, 5), "turned with bias": (6, 5),
    "conv": (5, 3, 2), "conv with bias": (4, 2, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("rotate", [False, True])
def test_a_layer_that_grew_is_free_in_its_new_entries(name, rotate):
    layer, new = LAYERS[name], torch.Size(GROWN[name])
    outputs = new[1] if layer.turned else new[0]
    old = made(layer, 2).rotated() if rotate else made(layer, 2)
    bigger = old.expanded({"w": new, **({"b": torch.Size([outputs])} if layer.bias else {})})
    assert bigger.shapes["w"] == new
    small = delta_of(layer)
    large = {name: torch.randn(shape, dtype=torch.float64) for name, shape in bigger.shapes.items()}
    for key, value in small.items():
        large[key][tuple(slice(size) for size in value.shape)] = value
    torch.testing.assert_close(bigger.quadratic(large), old.quadratic(small))
    torch.testing.assert_close(bigger.dense().diagonal(), flat(bigger.diagonal()))
    for key, value in bigger.matvec(large).items():
        value[tuple(slice(size) for size in small[key].shape)] = 0
        assert not value.any()


@pytest.mark.parametrize(("layer", "advice"), [
    (Layer("w", None, torch.Size([4, 2, 2]), 2, 2, False), "Make a new memory"),
    (Layer("w", None, torch.Size([2, 3, 2]), 1, 6, False), r"diagonal\(\)"),
], ids=["groups", "rows of two axes"])  # fmt: skip
def test_growth_that_would_move_old_rows_is_refused(layer, advice):
    """(2, 3, 2) used as 6 × 2: with (2, 4, 2), what was its fourth row would be its fifth."""
    with pytest.raises(MismatchError, match=rf"`w` grew from .* old rows would not stay in front.*{advice}"):
        made(layer).expanded({"w": torch.Size([layer.shape[0], layer.shape[1] + 1, 2])})
    assert made(layer).expanded({"w": layer.shape}).shapes == {"w": layer.shape}


def test_a_bias_that_did_not_grow_with_its_weight_is_refused():
    with pytest.raises(MismatchError, match=r"`w` grew to \(5, 4\) and `b` to \(3,\): they do not belong together"):
        made(LAYERS["linear with bias"]).expanded({"w": torch.Size([5, 4]), "b": torch.Size([3])})


# With data


def fisher(model, seed, structure=holdfast.kronecker_fisher, n=12):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return structure(model, [(x, torch.randint(0, 3, (n,), generator=generator))], holdfast.categorical)


def at(seed):
    torch.manual_seed(seed)
    return relu_mlp().double()


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


class TestConsolidate:
    @pytest.mark.parametrize("precision", [0.0, 0.7])
    @pytest.mark.parametrize("make", [lambda: at(0), normed], ids=["mlp", "normed"])
    def test_data_counts_once_whatever_it_is_added_to(self, precision, make):
        """A prior's diagonal overlaps a Kronecker Fisher's layers and its diagonal alike."""
        model = make()
        found = fisher(model, 1)
        assert found.num_data == 12
        posterior = holdfast.consolidate(holdfast.prior(model, precision), model, found)
        assert posterior.num_data == 12
        torch.testing.assert_close(
            aligned(posterior.precision, list(posterior.mean)),
            aligned(found, list(posterior.mean))
            + precision * torch.eye(sum(v.numel() for v in posterior.mean.values()), dtype=torch.float64),
        )
        with pytest.raises(MismatchError, match="already in the posterior, and would count twice"):
            holdfast.consolidate(posterior, model, found)
        again = holdfast.consolidate(posterior, model, fisher(model, 2), decay=0.5)
        assert again.num_data == 18
        assert [source.num_data for source in again.sources if source.unit] == [6, 12]

    @pytest.mark.parametrize("precision", [0.0, 0.7])
    def test_memory_is_flat_from_the_first_task_to_the_fiftieth(self, precision):
        model = normed()
        posterior = holdfast.prior(model, precision)
        sizes, g = [], 0
        for task in range(50):
            new = fisher(model, task, n=4)
            g = g + next(iter(kronecker_of(new).layers.values()))[0].outputs
            posterior = holdfast.consolidate(posterior, model, new)
            tensors = posterior.precision.tensors
            sizes.append((len(tensors), sum(tensor.nbytes for tensor in tensors.values())))
        assert set(sizes) == {sizes[0]}
        assert posterior.num_data == 200
        torch.testing.assert_close(next(iter(kronecker_of(posterior.precision).layers.values()))[0].outputs, g)

    def test_exact_keeps_the_terms_and_their_sum(self):
        model = normed()
        posterior, fishers = holdfast.prior(model, 0.1), [fisher(model, seed) for seed in range(3)]
        for each in fishers:
            posterior = holdfast.consolidate(posterior, model, each, exact=True)
        assert {len(terms) for terms in kronecker_of(posterior.precision).layers.values()} == {3}
        order = list(posterior.mean)
        total = sum(aligned(each, order) for each in fishers)
        torch.testing.assert_close(
            aligned(posterior.precision, order), total + 0.1 * torch.eye(len(total), dtype=torch.float64)
        )
        merged = holdfast.consolidate(posterior, model, fisher(model, 7))
        assert {len(terms) for terms in kronecker_of(merged.precision).layers.values()} == {1}

    def test_density_and_samples_with_a_prior(self):
        model = normed()
        posterior = holdfast.consolidate(holdfast.prior(model, 0.5), model, fisher(model, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        order = list(posterior.mean)
        gaussian = torch.distributions.MultivariateNormal(
            flat(posterior.mean), precision_matrix=aligned(posterior.precision, order)
        )
        theta = flat({name: model.get_parameter(name).detach() for name in order})
        torch.testing.assert_close(posterior.log_prob(model).detach(), gaussian.log_prob(theta))
        generator = torch.Generator().manual_seed(0)
        draws = torch.stack([flat(posterior.sample(generator)) for _ in range(1500)]) - gaussian.mean
        white = draws @ torch.linalg.cholesky(gaussian.precision_matrix)
        assert (white.T @ white / 1500 - torch.eye(len(theta))).abs().max() < 6 * (2 / 1500) ** 0.5
        flat_prior = holdfast.consolidate(holdfast.prior(model), model, fisher(model, 1))
        with pytest.raises(SingularError, match=r"directions of `0\.weight`.*proper prior"):
            flat_prior.sample()

    def test_structures_that_do_not_match_are_named(self):
        model = at(0)
        posterior = holdfast.consolidate(holdfast.prior(model), model, fisher(model, 1))
        with pytest.raises(MismatchError, match=r"works on diagonals, got Kronecker and Kronecker.*Use consolidate"):
            holdfast.consolidate_(posterior, model, fisher(model, 2))
        diagonal = holdfast.consolidate(posterior, model, fisher(model, 2, holdfast.diagonal_fisher))
        torch.testing.assert_close(
            diagonal.precision.dense(),
            posterior.precision.dense() + fisher(model, 2, holdfast.diagonal_fisher).dense(),
        )


class TestMerge:
    @pytest.mark.parametrize("precision", [0.0, 0.3])
    def test_two_posteriors_are_multiplied_as_dense_ones(self, precision):
        parts = []
        for seed in (1, 2):
            model = at(seed)
            prior = holdfast.prior(model, precision) if precision else holdfast.prior(model)
            parts.append(holdfast.consolidate(prior, model, fisher(model, seed)))
        merged = holdfast.merge(*parts)
        matrices = [part.precision.dense() for part in (aligned_posterior(part) for part in parts)]
        total = sum(matrices)
        last = flat(parts[-1].mean)
        natural = sum(m @ (flat(part.mean) - last) for m, part in zip(matrices, parts, strict=True))
        torch.testing.assert_close(
            flat(merged.mean), last + torch.linalg.pinv(total, hermitian=True, rtol=1e-12) @ natural, rtol=1e-5,
            atol=1e-6,
        )  # fmt: skip
        torch.testing.assert_close(aligned(merged.precision, list(merged.mean)), total)
        assert merged.num_data == 24

    @pytest.mark.parametrize("children", [2, 3])
    def test_a_base_that_was_kept_as_a_term_is_counted_once(self, children):
        base = holdfast.consolidate(holdfast.prior(at(0), 0.3), at(0), fisher(at(0), 0), exact=True)
        parts = [
            holdfast.consolidate(base, at(seed), fisher(at(seed), seed), exact=True) for seed in range(1, children + 1)
        ]
        merged = holdfast.merge(*parts, base=base)
        order = list(base.mean)
        matrices = [aligned(part.precision, order) for part in parts]
        total = sum(matrices) - (children - 1) * aligned(base.precision, order)
        natural = sum(m @ flat(part.mean) for m, part in zip(matrices, parts, strict=True))
        natural = natural - (children - 1) * aligned(base.precision, order) @ flat(base.mean)
        torch.testing.assert_close(aligned(merged.precision, order), total)
        torch.testing.assert_close(flat(merged.mean), torch.linalg.solve(total, natural), rtol=1e-6, atol=1e-7)
        assert merged.num_data == 12 * (children + 1)

    def test_a_base_that_was_merged_away_cannot_be_taken_out(self):
        base = holdfast.consolidate(holdfast.prior(at(0)), at(0), fisher(at(0), 0))
        parts = [holdfast.consolidate(base, at(seed), fisher(at(seed), seed)) for seed in (1, 2)]
        with pytest.raises(MismatchError, match=r"Kronecker cannot be taken out of Kronecker.*exact=True"):
            holdfast.merge(*parts, base=base)


def kronecker_of(precision):
    terms = precision.terms if isinstance(precision, holdfast.Sum) else (precision,)
    (found,) = (term for term in terms if isinstance(term, Kronecker))
    return found


def aligned(precision, order):
    """The dense matrix with rows and columns in the order of the names given."""
    places, start = {}, 0
    for name, shape in precision.shapes.items():
        places[name] = torch.arange(start, start + shape.numel())
        start += shape.numel()
    index = torch.cat([places[name] for name in order])
    return precision.dense()[index][:, index]


def aligned_posterior(posterior):
    matrix = aligned(posterior.precision, list(posterior.mean))
    layout = {name: value.shape for name, value in posterior.mean.items()}
    return holdfast.Posterior(posterior.mean, holdfast.Dense(layout, matrix))


def test_small_eigenvalues_count_under_a_prior():
    """In float32 a factor's small eigenvalues are far below eps · size of the largest, and still above a prior."""
    torch.manual_seed(0)
    rows = torch.randn(400, 200) * torch.logspace(0, -3, 200)
    layer = Layer("w", None, torch.Size([3, 200]), 1, 3, False)
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = (rows.to(dtype).T @ rows.to(dtype)).unsqueeze(0)
        kronecker = Kronecker({layer: (Term(torch.eye(3, dtype=dtype).unsqueeze(0), inputs, 1.0),)})
        prior = Diagonal({"w": torch.full((3, 200), 1e-6, dtype=dtype)})
        found.append(kronecker + prior)
    torch.testing.assert_close(found[0].logdet().double(), found[1].logdet(), rtol=0, atol=1.0)
    sample = found[0].sample(torch.Generator().manual_seed(0))
    assert sample["w"].dtype == torch.float32
    torch.testing.assert_close(
        found[0].to(dtype=torch.float64).logdet(), found[0].logdet().double(), rtol=1e-6, atol=1e-3
    )


def test_rotated_sums_are_merged_in_the_memory_of_one():
    torch.manual_seed(0)
    layer = Layer("w", None, torch.Size([3, 4]), 1, 3, False)

    def one(seed):
        generator = torch.Generator().manual_seed(seed)
        g, a = (torch.randn(1, n, n + 1, generator=generator, dtype=torch.float64) for n in (3, 4))
        source = (Source(f"task {seed}", 5.0, "example", "categorical", "expected"),)
        return Kronecker({layer: (Term(g @ g.mT, a @ a.mT, 5.0),)}, source).rotated()

    both = (one(1) + one(2)).merged()
    assert sum(t.numel() for t in both.tensors.values()) == sum(t.numel() for t in one(1).tensors.values())
    assert both.num_data == 10
    basis = one(2).layers[layer][0]
    vectors = torch.kron(basis.outputs[0], basis.inputs[0])
    exact = (vectors.T @ (one(1).dense() + one(2).dense()) @ vectors).diagonal()
    torch.testing.assert_close((vectors.T @ both.dense() @ vectors).diagonal(), exact)


def test_a_rotated_layer_counts_its_data_by_itself():
    """In a sum, the sum counts for it."""
    one = made(Layer("w", None, torch.Size([3, 4]), 1, 3, False)).rotated()
    other = made(Layer("v", None, torch.Size([3, 4]), 1, 3, False), seed=1).rotated()
    assert one.num_data == 30
    assert (0.5 * one).num_data == 15
    assert [source.num_data for source in (one + other).sources] == [30, 30]


def test_taking_all_of_a_term_out_leaves_the_rest():
    layer, kronecker = large()
    prior = number(layer, 0.3)
    rest = (prior + kronecker) - kronecker
    assert {type(term).__name__ for term in rest.terms} == {"Diagonal"}


def test_two_structures_without_a_closed_form_are_named():
    layer, kronecker = large()
    uneven = Diagonal({name: torch.rand(shape).double() for name, shape in layer.shapes.items()})
    with pytest.raises(ArgumentError, match=r"Kronecker and Diagonal over `w` have no closed form.*diagonal\(\)"):
        (kronecker + uneven).logdet()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["rotated", "wide"])
def test_free_directions_are_free_in_another_form_or_dtype_too(seed, kind):
    """Softmax gradients sum to zero, so that a head is free in as many directions as it has inputs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    batches = [(torch.randn(64, 8), torch.randint(3, (64,))) for _ in range(4)]
    fisher = holdfast.kronecker_fisher(model, batches, holdfast.categorical)
    other = fisher.rotated() if kind == "rotated" else fisher.to(dtype=torch.float64)
    for precision in (fisher, other):
        with pytest.raises(holdfast.SingularError, match=r"17 of 51 directions of `2\.weight`"):
            precision.logdet()
    vector = fisher.matvec({name: torch.ones(shape) for name, shape in fisher.shapes.items()})
    one, two = (each.solve(vector) for each in (fisher, other))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name].to(tensor), tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", [1e-1, 1e-2, 1e-3])
def test_a_weak_prior_is_not_lost_beside_a_dense_matrix(precision):
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    x = torch.randn(1000, 64)
    fisher = holdfast.dense_fisher(model, [(x, torch.randint(10, (1000,)))], holdfast.categorical)
    found = holdfast.consolidate(holdfast.prior(model, precision=precision), model, fisher).precision
    exact = fisher.dense().double() + precision * torch.eye(650, dtype=torch.float64)
    assert float(found.logdet()) == pytest.approx(float(exact.logdet()), rel=1e-4)
    free = {"weight": torch.zeros(10, 64), "bias": torch.ones(10)}  # all outputs alike: the data says nothing of it
    torch.testing.assert_close(found.solve(free)["bias"].float(), torch.full((10,), 1 / precision), rtol=1e-2, atol=0)


def test_a_sum_with_a_diagonal_is_rotated_and_made_one_product_as_its_factors_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    batches = [(torch.randn(40, 6).double(), torch.randint(3, (40,)))]
    fisher = holdfast.kronecker_fisher(model, batches, holdfast.categorical)
    assert isinstance(fisher, holdfast.Sum)
    for other in (fisher.rotated(), fisher.nearest()):
        torch.testing.assert_close(other.dense(), fisher.dense())
    twice = (fisher.rotated() + fisher.scaled(2.0).rotated()).merged()
    assert sum(isinstance(term, holdfast.Rotated) for term in twice.terms) == 1
    flat = holdfast.lowrank_fisher(model, batches, holdfast.categorical, rank=2)
    with pytest.raises(holdfast.ArgumentError, match="no Kronecker factors"):
        holdfast.Sum((flat, holdfast.prior(model, precision=1.0).precision)).rotated()
