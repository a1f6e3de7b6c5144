"""Every structure × every law, against the dense matrix it stands for."""

import itertools

import pytest
import torch

from holdfast import (
    ArgumentError,
    Dense,
    Diagonal,
    LowRank,
    MismatchError,
    SingularError,
    Sum,
)
from precisions import SHAPES, STRUCTURES, aligned, dense, diagonal, flat, lowrank, source, vector


@pytest.fixture(params=STRUCTURES, ids=str)
def precision(request):
    return STRUCTURES[request.param](1)


def test_it_is_symmetric_and_positive(precision):
    matrix = precision.dense()
    torch.testing.assert_close(matrix, matrix.T)
    assert torch.linalg.eigvalsh(matrix).min() > 0


def test_matvec_and_quadratic(precision):
    delta = vector()
    product = precision.dense() @ flat(precision, delta)
    torch.testing.assert_close(flat(precision, precision.matvec(delta)), product)
    torch.testing.assert_close(precision.quadratic(delta), flat(precision, delta) @ product)


def test_the_quadratic_is_differentiable_and_its_gradient_is_twice_the_matvec(precision):
    delta = {name: value.requires_grad_() for name, value in vector().items()}
    grads = torch.autograd.grad(precision.quadratic(delta), list(delta.values()))
    pull = precision.matvec({name: value.detach() for name, value in delta.items()})
    for (name, _), grad in zip(delta.items(), grads, strict=True):
        torch.testing.assert_close(grad, 2 * pull[name])


def test_solve_inverts(precision):
    solution = precision.solve(vector())
    torch.testing.assert_close(
        flat(precision, solution),
        torch.linalg.solve(precision.dense(), flat(precision, vector())),
        rtol=1e-8,
        atol=1e-8,
    )


def test_diagonal_and_logdet(precision):
    torch.testing.assert_close(flat(precision, precision.diagonal()), precision.dense().diagonal())
    torch.testing.assert_close(precision.logdet(), torch.linalg.slogdet(precision.dense()).logabsdet)


def test_samples_have_the_inverse_as_covariance(precision):
    generator = torch.Generator().manual_seed(3)
    draws = torch.stack([flat(precision, precision.sample(generator)) for _ in range(4000)])
    whitened = draws @ torch.linalg.cholesky(precision.dense())
    error = (whitened.T @ whitened / len(draws) - torch.eye(draws.shape[1])).abs()
    assert error.max() < 5 * (2 / 4000) ** 0.5
    again = flat(precision, precision.sample(torch.Generator().manual_seed(3)))
    assert torch.equal(again, draws[0])


def test_scaling_scales_the_matrix_and_the_data(precision):
    for scaled in (2.5 * precision, precision * 2.5, precision / 0.4):
        torch.testing.assert_close(scaled.dense(), 2.5 * precision.dense())
        assert scaled.num_data == pytest.approx(2.5 * precision.num_data)
    assert (0 * precision).is_zero()


@pytest.mark.parametrize("pair", list(itertools.product(STRUCTURES, STRUCTURES)), ids="+".join)
def test_sums_are_exact_between_any_two_structures(pair):
    a, b = STRUCTURES[pair[0]](1), STRUCTURES[pair[1]](2)
    total, order = a + b, list(SHAPES)
    torch.testing.assert_close(aligned(total, order), aligned(a, order) + aligned(b, order))
    torch.testing.assert_close(total.quadratic(vector()), a.quadratic(vector()) + b.quadratic(vector()))
    torch.testing.assert_close(total.logdet(), torch.linalg.slogdet(total.dense()).logabsdet)
    assert total.num_data == a.num_data + b.num_data
    assert len(total.sources) == len(a.sources) + len(b.sources)


def test_sums_of_like_structures_stay_one_structure():
    assert isinstance(diagonal(1) + diagonal(2), Diagonal)
    assert isinstance(dense(1) + dense(2), Dense)
    assert isinstance(diagonal(1) + dense(2), Dense)
    assert isinstance(lowrank(1) + dense(2), Dense)
    for other in (lowrank(2), diagonal(2), lowrank(2, ("b",)), diagonal(2, ("b",))):
        assert isinstance(lowrank(1) + other, LowRank)
        assert isinstance(other + lowrank(1), LowRank)
    many = dense(1, ("w", "b")) + diagonal(2, ("b", "s"))
    for seed in range(3, 9):
        many = many + dense(seed, ("w", "b")) + diagonal(seed, ("b", "s"))
    assert isinstance(many, Sum)
    assert len(many.terms) == 2


def test_taking_a_part_out_again_is_exact():
    pairs = [(diagonal(1), diagonal(2)), (dense(1), dense(2)), (dense(1), diagonal(2)), (lowrank(1), diagonal(2))]
    for whole, part in pairs:
        rest = (whole + part) - part
        torch.testing.assert_close(rest.dense(), whole.dense())
        assert rest.sources == whole.sources
    with pytest.raises(MismatchError, match="more precision in `w`"):
        diagonal(1) - 10 * diagonal(2)
    with pytest.raises(MismatchError, match="cannot be taken out"):
        diagonal(1) - dense(2)


def test_growing_adds_free_entries_at_the_end(precision):
    bigger = precision.expanded({**SHAPES, "w": torch.Size([4, 3]), "b": torch.Size([4])})
    assert bigger.shapes["w"] == (4, 3)
    delta = vector()
    padded = {
        "w": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64), "s": delta["s"],
    }  # fmt: skip
    padded["w"][:3, :2], padded["b"][:3] = delta["w"], delta["b"]
    torch.testing.assert_close(bigger.quadratic(padded), precision.quadratic(delta))
    with pytest.raises(MismatchError, match="shrink"):
        precision.expanded({**SHAPES, "w": torch.Size([2, 9]), "b": torch.Size([2])})


def test_changing_dtype_changes_the_numbers_only_by_rounding(precision):
    low = precision.to(dtype=torch.float32)
    assert {tensor.dtype for tensor in low.tensors.values()} == {torch.float32}
    torch.testing.assert_close(low.dense().double(), precision.dense(), rtol=1e-6, atol=1e-6)
    assert low.sources == precision.sources


def test_zero_directions_are_refused_by_name_and_left_alone_by_solve():
    entries = diagonal(1).entries
    dead = Diagonal({**entries, "b": torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)})
    for method in (dead.logdet, dead.sample):
        with pytest.raises(SingularError, match=r"2 entries of `b`.*prior"):
            method()
    solution = dead.solve({name: torch.ones_like(value) for name, value in entries.items()})
    assert solution["b"].tolist() == [0.0, 0.5, 0.0]
    flat_direction = Dense({"b": torch.Size([3])}, torch.ones(3, 3, dtype=torch.float64))
    for method in (flat_direction.logdet, flat_direction.sample):
        with pytest.raises(SingularError, match="2 of the 3 directions of `b`"):
            method()
    found = flat_direction.solve({"b": torch.ones(3, dtype=torch.float64)})["b"]
    torch.testing.assert_close(found, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_values_that_are_no_precision_are_refused():
    with pytest.raises(ArgumentError, match=r"1 in `w`.*clamped"):
        Diagonal({"w": torch.tensor([1.0, -1.0])})
    with pytest.raises(ArgumentError, match="`w` has values that are not finite"):
        Diagonal({"w": torch.tensor([1.0, torch.nan])})
    with pytest.raises(ArgumentError, match="symmetric"):
        Dense({"b": torch.Size([2])}, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(ArgumentError, match="2×2"):
        Dense({"b": torch.Size([2])}, torch.eye(3))
    with pytest.raises(ArgumentError, match="floating"):
        Diagonal({"w": torch.tensor([1, 2])})
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="multiplied by must be a finite number ≥ 0"):
            factor * diagonal(1)
    with pytest.raises(TypeError):
        diagonal(1) + 1


def test_sums_that_make_no_sense_are_refused():
    with pytest.raises(MismatchError, match=r"`w` has shape \(3, 2\).*expanded"):
        diagonal(1) + Diagonal({"w": torch.ones(4, 2)})
    per_token = Diagonal({"w": torch.ones(3, 2)}, source("text", 100, "token"))
    with pytest.raises(MismatchError, match="counts examples and the other tokens"):
        diagonal(1) + per_token


def test_a_dense_sum_too_large_is_refused_with_its_size():
    wide = Diagonal({"w": torch.ones(200_000)})
    with pytest.raises(ArgumentError, match=r"200,000 entries would take 149\.0 GiB"):
        wide.dense()


def test_a_matrix_that_is_negative_somewhere_is_no_precision():
    wrong = Dense({"b": torch.Size([2])}, torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    for method in (wrong.logdet, wrong.sample, lambda: wrong.solve({"b": torch.ones(2)})):
        with pytest.raises(ArgumentError, match="negative in 1 of 2 directions"):
            method()


def test_taking_out_leaves_no_rounding_below_zero_and_no_more_than_there_is():
    whole, part = diagonal(1).to(dtype=torch.float32), diagonal(2).to(dtype=torch.float32)
    rest = (whole + 1e6 * part) - 1e6 * part
    assert all(bool((entries >= 0).all()) for entries in rest.entries.values())
    with pytest.raises(MismatchError, match="more precision"):
        dense(1) - 1000 * diagonal(2)


def test_autocast_does_not_reach_the_matrix(precision):
    full = precision.to(dtype=torch.float32)
    delta = {name: value.float() for name, value in vector().items()}
    calls = {
        "matvec": lambda: full.matvec(delta),
        "quadratic": lambda: dict.fromkeys(full.shapes, full.quadratic(delta)),
        "solve": lambda: full.solve(delta),
        "diagonal": full.diagonal,
        "sample": lambda: full.sample(torch.Generator().manual_seed(0)),
    }
    exact = {name: call() for name, call in calls.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, call in calls.items():
            assert torch.equal(flat(full, call()), flat(full, exact[name])), name


def test_nothing_is_a_precision_too():
    nothing, some = Diagonal({}), diagonal(1)
    assert float(nothing.quadratic({})) == float(nothing.logdet()) == 0
    assert nothing.is_zero()
    assert nothing.dense().shape == (0, 0)
    for same in (nothing + some, some + nothing, some - nothing):
        assert torch.equal(same.dense(), some.dense())
        assert same.entries["w"] is not some.entries["w"]
    assert sum([some, some]).num_data == 20


def test_one_dataset_over_separate_parameters_counts_the_most_that_either_counts():
    for first, second in [(0.5, 1.0), (1.0, 0.5)]:
        parts = first * diagonal(1, ("w",), "task") + second * diagonal(2, ("b",), "task")
        assert parts.num_data == 10
    assert (diagonal(1, ("w",), "task") + dense(2, ("b", "s"), "task")).num_data == 10


def test_the_same_evidence_twice_is_one_source_with_twice_the_data():
    twice = diagonal(1, label="task") + diagonal(1, label="task")
    assert [(s.id, s.num_data) for s in twice.sources] == [("task", 20.0)]
