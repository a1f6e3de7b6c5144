"""A diagonal plus a few directions: what it alone can do, and what it refuses."""

import pytest
import torch

import holdfast
from holdfast import ArgumentError, Diagonal, LowRank, MismatchError, Posterior, SingularError
from precisions import SHAPES, diagonal, flat, lowrank, vector


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named(flat):
    """A vector (or rows of them) in the parameters' shapes."""
    pieces = flat.split([shape.numel() for shape in SHAPES.values()], -1)
    return {name: piece.reshape((*flat.shape[:-1], *SHAPES[name])) for name, piece in zip(SHAPES, pieces, strict=True)}


def made(diagonal, rows):
    return LowRank(named(diagonal), named(rows))


def decaying(seed=0, rank=7):
    """Directions whose lengths fall by half from one to the next."""
    return made(random(seed, 10).square(), random(seed + 1, rank, 10) * 0.5 ** torch.arange(rank).unsqueeze(1))


def test_no_more_is_made_than_the_directions_themselves():
    """A matrix over these entries would take 149 GiB, and is refused."""
    wide = LowRank({"w": random(0, 200_000).square() + 0.1}, {"w": random(1, 3, 200_000)})
    delta = {"w": random(2, 200_000)}
    torch.testing.assert_close(wide.solve(wide.matvec(delta))["w"], delta["w"])
    torch.testing.assert_close(wide.quadratic(delta), (delta["w"] * wide.matvec(delta)["w"]).sum())
    assert wide.sample()["w"].isfinite().all()
    D, U = wide.entries["w"], wide.factors["w"]
    lemma = D.log().sum() + torch.linalg.slogdet(torch.eye(3).double() + (U / D) @ U.T).logabsdet
    torch.testing.assert_close(wide.logdet(), lemma)
    with pytest.raises(ArgumentError, match="dense matrix over 200,000 entries"):
        wide.dense()


@pytest.mark.parametrize("zeros", range(11))
@pytest.mark.parametrize("rank", [0, 1, 4, 12])
def test_where_the_diagonal_is_zero_it_is_the_pseudo_inverse(zeros, rank):
    entries, rows = random(0, 10).square() + 0.1, random(1, rank, 10)
    entries[:zeros] = 0
    precision = made(entries, rows)
    inverse = torch.linalg.pinv(precision.dense(), hermitian=True, rtol=1e-12)
    torch.testing.assert_close(
        flat(precision, precision.solve(vector())), inverse @ flat(precision, vector()), rtol=1e-7, atol=1e-7
    )
    if zeros <= rank:
        torch.testing.assert_close(precision.logdet(), torch.linalg.slogdet(precision.dense()).logabsdet)
        draws = torch.stack([flat(precision, precision.sample(torch.Generator().manual_seed(s))) for s in range(400)])
        whitened = draws @ torch.linalg.cholesky(precision.dense())
        assert (whitened.T @ whitened / 400 - torch.eye(10)).abs().max() < 5 * (2 / 400) ** 0.5
    else:
        for method in (precision.logdet, precision.sample):
            with pytest.raises(SingularError, match=r"1?\d entries of the diagonal of `w`.*prior"):
                method()


def test_a_zero_that_directions_do_not_reach_is_free():
    entries, rows = random(0, 10).square() + 0.1, random(1, 4, 10)
    entries[:3], rows[:, :2] = 0, 0
    precision = made(entries, rows)
    assert torch.equal(flat(precision, precision.solve(vector()))[:2], torch.zeros(2).double())
    with pytest.raises(SingularError, match="3 entries of the diagonal of `w`"):
        precision.logdet()
    parallel = made(entries, random(2, 1, 10).expand(4, 10) * torch.arange(1.0, 5.0).unsqueeze(1))
    with pytest.raises(SingularError, match="3 entries of the diagonal of `w`"):
        parallel.sample()


def test_a_prior_makes_it_proper():
    entries, rows = torch.zeros(10).double(), random(1, 4, 10)
    proper = made(entries, rows) + Diagonal(named(torch.full((10,), 0.01).double()))
    torch.testing.assert_close(proper.logdet(), torch.linalg.slogdet(proper.dense()).logabsdet)
    torch.testing.assert_close(
        flat(proper, proper.solve(proper.matvec(vector()))), flat(proper, vector()), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_thin_diagonal_costs_no_digits(dtype):
    """D a millionth of UUᵀ, as where directions explain nearly everything."""
    precision = made(1e-6 * (random(0, 10).square() + 0.1), random(1, 4, 10)).to(dtype=dtype)
    exact = precision.to(dtype=torch.float64)
    torch.testing.assert_close(precision.logdet().double(), torch.linalg.slogdet(exact.dense()).logabsdet)
    found = precision.solve({name: value.to(dtype) for name, value in vector().items()})
    wanted = torch.linalg.solve(exact.dense(), flat(exact, {n: v.to(dtype).double() for n, v in vector().items()}))
    assert (flat(precision, found).double() - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("rank", range(1, 8))
def test_merged_is_the_nearest_of_its_rank_and_keeps_the_diagonal(rank):
    full = decaying()
    less = full.merged(rank)
    assert (less.rank, less.kept) == (rank, rank)
    torch.testing.assert_close(flat(less, less.diagonal()), flat(full, full.diagonal()), rtol=1e-13, atol=0)

    def directions(precision):
        return precision.dense() - flat(precision, precision.entries).diag()

    values, vectors = torch.linalg.eigh(directions(full))
    best = vectors[:, -rank:] @ values[-rank:].diag() @ vectors[:, -rank:].T
    torch.testing.assert_close(directions(less), best)
    assert less.sources == full.sources


def test_merged_of_more_than_there_are_is_the_same():
    full = decaying()
    for rank in (7, 8, None):
        assert torch.equal(full.merged(rank).dense(), full.dense())
    assert full.merged(8).kept == 8
    for rank in (0, -1, True, 2.5, "4"):
        with pytest.raises(ArgumentError, match="positive integer"):
            full.merged(rank)


def test_memory_is_constant_over_tasks_and_the_diagonal_is_the_sum():
    total, diagonals = decaying().merged(3), [decaying().diagonal()]
    size = sum(tensor.numel() for tensor in total.tensors.values())
    for seed in range(1, 12):
        task = decaying(10 * seed)
        total = (total + task.merged(3)).merged()
        diagonals.append(task.diagonal())
        assert sum(tensor.numel() for tensor in total.tensors.values()) == size
    assert total.rank == total.kept == 3
    summed = {name: sum(each[name] for each in diagonals) for name in SHAPES}
    torch.testing.assert_close(flat(total, total.diagonal()), flat(total, summed))


def test_a_sum_keeps_as_many_as_the_larger_of_the_two_unless_told():
    few, many = lowrank(1, rank=2), lowrank(2, rank=5)
    assert (few + many).rank == 7
    assert (few + many).merged().rank == 5
    assert (few.merged(2) + few.merged(2)).merged().rank == 2
    assert (few + diagonal(3)).merged().rank == 2


def test_parameters_without_directions_take_no_memory_for_them_and_are_blocks():
    head = LowRank({"b": SHAPES["b"].numel() * torch.ones(3)}, {"b": torch.randn(2, 3)})
    both = head + Diagonal({"w": torch.ones(3, 2)})
    assert set(both.factors) == {"b"}
    assert sorted(map(str, both.blocks())) == [
        "Diagonal(6 entries of 1 parameters, no data)",
        "LowRank(rank 2, 3 entries of 1 parameters, no data)",
    ]
    torch.testing.assert_close(both.logdet(), head.logdet())


def test_save_and_load(tmp_path):
    precision = lowrank(1, zeros=1).merged(3)
    posterior = Posterior({name: random(1, *shape) for name, shape in SHAPES.items()}, precision)
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    found = holdfast.load(tmp_path / "memory.safetensors").precision
    assert (type(found), found.rank, found.kept, found.sources) == (LowRank, 3, 3, precision.sources)
    assert torch.equal(found.dense(), precision.dense())


def test_what_is_no_precision_is_refused():
    one = {"w": torch.ones(3)}
    for entries, factors, message in [
        ({"w": torch.tensor([1.0, -1.0, 1.0])}, {"w": torch.ones(2, 3)}, "diagonal of `w` has 1 negative"),
        ({"w": torch.tensor([1.0, torch.inf, 1.0])}, {"w": torch.ones(2, 3)}, "`w` has values that are not finite"),
        (one, {"w": torch.full((2, 3), torch.nan)}, "`directions of w` has values that are not finite"),
        (one, {"w": torch.ones(2, 4)}, r"directions of `w`, of shape \(3,\).*got \(2, 4\)"),
        (one, {"w": torch.ones(())}, r"got \(\)"),
        (one, {"w": torch.ones(2, 3, dtype=torch.long)}, "floating"),
        (one, {"v": torch.ones(2, 3)}, "directions for `v` and no diagonal"),
        (
            {"w": torch.ones(3), "b": torch.ones(2)},
            {"w": torch.ones(2, 3), "b": torch.ones(4, 2)},
            "`w` has 2 directions and `b` has 4",
        ),
    ]:
        with pytest.raises(ArgumentError, match=message):
            LowRank(entries, factors)
    for kept in (0, -1, 1.5, True):
        with pytest.raises(ArgumentError, match="positive integer"):
            LowRank(one, {"w": torch.ones(2, 3)}, kept)
    with pytest.raises(MismatchError, match="LowRank cannot be taken out of LowRank"):
        lowrank(1) - lowrank(2)
    with pytest.raises(MismatchError, match="more precision in `w`"):
        lowrank(1) - 100 * diagonal(2)
