"""Fishers of replicas (DistributedDataParallel): every rank has batches of its own, and all get the Fisher of all.

The processes run this file as a script, all their scenarios one after another; the tests look at what they saved.
"""

import re
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from cases import vectors
from holdfast.identity import fingerprint
from holdfast.precision import Precision
from holdfast.ranks import ranks_of
from oracles import flat
from processes import gathered, main

SIZES = {
    "even": {0: (4, 4), 1: (4, 4)},
    "last batches that differ": {0: (4, 4), 1: (4, 1)},
    "counts that differ": {0: (4, 4, 2), 1: (3,)},
    "a rank without any": {0: (4, 2), 1: ()},
    "the first rank without any": {0: (), 1: (4, 2)},
}


class Net(nn.Module):
    """Layers, a parameter of its own, one laid out in another order than its axes, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.turned = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.body(x)) * self.scale) @ self.turned


class Forked(nn.Module):
    """Whose first layer is multiplied by, or added, as the data has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x) if x.sum() > 0 else x * self.body.weight.sum(0) + self.body.bias
        return self.head(torch.tanh(hidden))


def made(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def share(rank: int, cut: str, world: int = 2) -> list:
    """The batches of one of the ranks; ranks beyond the second have batches as the first two have them."""
    sizes = [SIZES[cut][r % 2] for r in range(world)]
    torch.manual_seed(2)
    x, y = vectors(5, 3)(sum(map(sum, sizes)))
    start, found = sum(map(sum, sizes[:rank])), []
    for size in sizes[rank]:
        found.append((x[start : start + size], y[start : start + size]))
        start += size
    return found


def everything(cut: str, world: int = 2) -> list:
    return [batch for rank in range(world) for batch in share(rank, cut, world)]


# What draws, and draws anew on every rank.
DRAWN = {
    "labels": partial(holdfast.diagonal_fisher, likelihood=holdfast.categorical, targets="sampled"),
    "signs": partial(holdfast.hutchinson_hessian, likelihood=holdfast.categorical, probes=3),
}
MIXED = {"body.*": holdfast.kronecker_fisher, "norm.*": holdfast.dense_fisher, "*": holdfast.diagonal_fisher}
ESTIMATES = {
    "diagonal": partial(holdfast.diagonal_fisher, likelihood=holdfast.categorical),
    "diagonal, observed": partial(holdfast.diagonal_fisher, likelihood=holdfast.categorical, targets="observed"),
    "diagonal, the general way": partial(holdfast.diagonal_fisher, likelihood=holdfast.categorical, taps=False),
    "kronecker": partial(holdfast.kronecker_fisher, likelihood=holdfast.categorical),
    "kronecker, exact trace": partial(holdfast.kronecker_fisher, likelihood=holdfast.categorical, exact_trace=True),
    "low rank, all rows": partial(holdfast.lowrank_fisher, likelihood=holdfast.categorical, rank=36),
    "low rank, twice as many rows": partial(holdfast.lowrank_fisher, likelihood=holdfast.categorical, rank=16),
    "dense": partial(holdfast.dense_fisher, likelihood=holdfast.categorical),
    "mixed": partial(holdfast.mixed_fisher, likelihood=holdfast.categorical, structures=MIXED),
    "Hessian": partial(holdfast.diagonal_hessian, likelihood=holdfast.categorical),
    "sensitivity": holdfast.sensitivity,
}
OF_FOUR, FOURS = ["diagonal", "kronecker", "low rank, twice as many rows", "mixed"], "counts that differ"
CUT_SHORT = partial(holdfast.lowrank_fisher, likelihood=holdfast.categorical, rank=4)


def taken(estimate, model: nn.Module, batches: list) -> Precision:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", holdfast.HoldfastWarning)  # a rank that the data does not fill
        return estimate(model, batches)


def summary(found: Precision) -> dict:
    (source,) = found.sources
    return {
        "dense": found.dense(), "source": (source.id, source.num_data, source.targets, source.likelihood),
        "bits": fingerprint(found.tensors), "kind": repr(found).split("(")[0],
    }  # fmt: skip


# What the processes do. Each function takes the rank and gives what it found.


def fails(function, *args, **options) -> tuple[str, str]:
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def estimated(rank: int, world: int = 2) -> dict:
    model = DistributedDataParallel(made())
    every = [(name, cut) for name in ESTIMATES for cut in SIZES] if world == 2 else [(name, FOURS) for name in OF_FOUR]
    found = {(name, cut): summary(taken(ESTIMATES[name], model, share(rank, cut, world))) for name, cut in every}
    found["cut short"] = summary(taken(CUT_SHORT, model, share(rank, "even", world)))
    return found


def of_four(rank: int) -> dict:
    return estimated(rank, 4)


def sampled(rank: int) -> dict:
    """Every rank has the same examples, so that draws in common would count twice."""
    model, batches = DistributedDataParallel(made()), share(0, "even")
    found = {}
    for name, estimate in DRAWN.items():
        with ranks_of(model) as ranks:
            own = estimate(model.module, batches, seed=ranks.seed(5))
        both = estimate(model, batches, seed=5)
        found[name] = {"own": flat(own.entries), "both": flat(both.entries)}
    return found


def left_alone(rank: int) -> dict:
    """Statistics that are each rank's own, a mode and gradients: used as rank 0 has them, and left as they were."""
    model = DistributedDataParallel(made()).train()
    with torch.no_grad():
        model.module.norm.running_mean += 1 + rank
        model.module.norm.num_batches_tracked += rank
    model.module.scale.grad = torch.ones(4).double()
    found = {
        name: summary(estimate(model, share(rank, "even")))
        for name, estimate in (("taps", ESTIMATES["diagonal"]), ("Hessian", ESTIMATES["Hessian"]))
    }
    batch_sums = holdfast.batch_sum_fisher(model, share(rank, "even"), holdfast.categorical)
    found["batch sums"] = fingerprint(batch_sums.fisher.tensors)
    norm = model.module.norm
    found["after"] = (norm.running_mean, int(norm.num_batches_tracked), model.training, model.module.scale.grad)
    return found


def one_rank_alone(rank: int) -> dict:
    model = DistributedDataParallel(made())
    batches = share(0, "even")
    return {} if rank else summary(holdfast.diagonal_fisher(model.module, batches, holdfast.categorical))


def batch_sums(rank: int) -> dict:
    model = DistributedDataParallel(made())
    found = holdfast.batch_sum_fisher(model, share(rank, "a rank without any"), holdfast.categorical)
    return {"squares": found.squares, **summary(found.fisher)}


def errors(rank: int) -> dict:
    from torch.distributed.fsdp import fully_shard

    model, data = DistributedDataParallel(made()), share(rank, "even")
    wrong = [(x, y + 9 * rank) for x, y in data]
    found = {
        f"label, {name}": fails(estimate, model, wrong) for name, estimate in ESTIMATES.items() if name != "sensitivity"
    }
    found["form, sensitivity"] = fails(holdfast.sensitivity, model, [(x[:, rank:], y) for x, y in data])
    found["no batches"] = fails(holdfast.kronecker_fisher, model, [], holdfast.categorical)
    found["no batches, batch sums"] = fails(holdfast.batch_sum_fisher, model, [], holdfast.categorical)
    found["an iterator"] = fails(ESTIMATES["mixed"], model, iter(data) if rank else data)
    found["an argument"] = fails(holdfast.lowrank_fisher, model, data, holdfast.categorical, rank=10_000 if rank else 3)
    found["labels chosen"] = fails(
        holdfast.diagonal_fisher,
        model,
        data,
        holdfast.categorical,
        forward=lambda m, b: m(b[0]).repeat(1, 1 + 9 * rank),
    )
    forked = DistributedDataParallel(made(Forked))
    way = [((1 - 2 * rank) * torch.ones(2, 3).double(), torch.tensor([0, 2]))]
    found["another way"] = fails(holdfast.kronecker_fisher, forked, way, holdfast.categorical)
    with torch.no_grad():
        forked.module.head.bias += rank
    found["other weights"] = fails(holdfast.diagonal_fisher, forked, way, holdfast.categorical)
    sharded = fully_shard(made(Forked))
    with torch.no_grad():
        sharded(way[0][0])  # leaves its parameters whole
    found["sharded"] = fails(holdfast.diagonal_fisher, sharded, way, holdfast.categorical)
    found["afterwards"] = fails(holdfast.diagonal_fisher, model, data, holdfast.categorical)
    return found


SCENARIOS = {
    2: [estimated, sampled, left_alone, one_rank_alone, batch_sums, errors],
    4: [of_four],
}


# What they must have found.


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


def require_as_in_one_process(ranks: list[dict], single: Precision) -> None:
    expected = summary(single)
    for each in ranks:
        assert each["bits"] == ranks[0]["bits"]
        assert (each["source"], each["kind"]) == (expected["source"], expected["kind"])
        torch.testing.assert_close(each["dense"], expected["dense"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cut", SIZES)
@pytest.mark.parametrize("name", ESTIMATES)
def test_replicas_have_what_one_process_has_from_all_the_data(name, cut, found):
    ranks = [each[name, cut] for each in found["estimated"]]
    require_as_in_one_process(ranks, taken(ESTIMATES[name], made(), everything(cut)))


@pytest.mark.parametrize("name", OF_FOUR)
def test_so_have_four(name, found):
    ranks, batches = [each[name, FOURS] for each in found["of_four"]], everything(FOURS, 4)
    single = taken(ESTIMATES[name], made(), batches)
    if name == "low rank, twice as many rows":  # 52 scores, of which 32 fit
        require_near(name, ranks, single, batches)
    else:
        require_as_in_one_process(ranks, single)


def require_near(name: str, ranks: list[dict], single: Precision, batches: list) -> None:
    """A diagonal that is exact, and directions about as good as one process finds."""
    exact = ESTIMATES["dense"](made(), batches)
    off = (single.dense() - exact.dense()).norm() / exact.dense().norm()
    for each in ranks:
        assert (each["bits"], each["source"]) == (ranks[0]["bits"], summary(single)["source"]), name
        torch.testing.assert_close(each["dense"].diag(), exact.dense().diag())
        assert (each["dense"] - exact.dense()).norm() / exact.dense().norm() <= 1.5 * off + 0.02


@pytest.mark.parametrize(("scenario", "world"), [("estimated", 2), ("of_four", 4)])
def test_rows_that_do_not_fit_are_cut_before_they_are_joined(scenario, world, found):
    batches = everything("even", world)
    ranks = [each["cut short"] for each in found[scenario]]
    require_near("cut short", ranks, taken(CUT_SHORT, made(), batches), batches)


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_drawn_anew_on_every_rank(name, found):
    first, second = (each[name] for each in found["sampled"])
    torch.testing.assert_close(first["both"], first["own"] + second["own"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(first["both"], second["both"], rtol=0, atol=0)
    single = DRAWN[name](made(), share(0, "even"), seed=5)
    torch.testing.assert_close(first["own"], flat(single.entries))  # the first rank draws what one process draws
    assert (first["own"] - second["own"]).norm() > 0.05 * first["own"].norm()


def test_statistics_that_are_a_ranks_own_are_the_first_ranks_and_come_back(found):
    model = made()
    with torch.no_grad():
        model.norm.running_mean += 1
    for name, estimate in (("taps", "diagonal"), ("Hessian", "Hessian")):
        ranks = [each[name] for each in found["left_alone"]]
        require_as_in_one_process(ranks, ESTIMATES[estimate](model, everything("even")))
    assert len({each["batch sums"] for each in found["left_alone"]}) == 1
    for rank, each in enumerate(found["left_alone"]):
        mean, tracked, training, grad = each["after"]
        assert (mean == 1 + rank).all()
        assert (tracked, training, grad.tolist()) == (rank, True, [1.0] * 4)


def test_the_model_inside_is_one_ranks_own(found):
    expected = summary(ESTIMATES["diagonal"](made(), share(0, "even")))
    assert found["one_rank_alone"][0]["bits"] == expected["bits"]
    assert found["one_rank_alone"][0]["source"] == expected["source"]


def test_batch_sums_count_a_rank_without_batches_as_nothing(found):
    single = holdfast.batch_sum_fisher(made(), everything("a rank without any"), holdfast.categorical)
    require_as_in_one_process(found["batch_sums"], single.fisher)
    assert {each["squares"] for each in found["batch_sums"]} == {single.squares}


@pytest.mark.parametrize(
    ("what", "kind", "messages"),
    [
        *((f"label, {name}", "DataError", ["rank 1 of 2 has stopped: batch 0: ", "batch 0: "])
          for name in ESTIMATES if name != "sensitivity"),
        ("form, sensitivity", "RuntimeError", ["rank 1 of 2 has stopped: ", "mat1 and mat2"]),
        ("no batches", "DataError", ["there are no batches"] * 2),
        ("no batches, batch sums", "DataError", ["there are no batches"] * 2),
        ("an iterator", "DataError", ["rank 1 of 2 has stopped: the data is read once", "Give a list, or a loader"]),
        ("an argument", "ArgumentError", ["rank 1 of 2 has stopped: a rank of 10000", "take dense_fisher"]),
        ("labels chosen", "DataError", ["call for expected labels.*targets='sampled'"] * 2),
        ("another way", "DataError", ["`body.weight` is a layer on one rank, and used in another way"] * 2),
        ("other weights", "MismatchError", ["the replicas are not one model: rank 1 has other weights"] * 2),
        ("sharded", "ArgumentError", ["batch_sum_fisher alone takes such models"] * 2),
        ("afterwards", "nothing", [""] * 2),
    ],
)  # fmt: skip
def test_what_stops_one_rank_stops_all(what, kind, messages, found):
    for each, message in zip(found["errors"], messages, strict=True):
        got, said = each[what]
        assert got in (kind, "_Stopped"), said
        assert re.search(message, said), said


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
