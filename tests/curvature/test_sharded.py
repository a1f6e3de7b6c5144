"""Squares of batch sums on several processes: the same numbers as from one, and an error where one would be wrong.

The processes run this file as a script, all their scenarios one after another; the tests look at what they saved.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holdfast
from cases import CASES, Case
from oracles import fisher_loop, flat, flat_gradient
from processes import gathered, main
from sharded_cases import Scaled

SIZES = {0: (4, 2, 4), 1: (3, 3, 1)}  # examples in the batches of each rank: batches that differ, as many of them
CASE = CASES[0]


class Checkpointed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * checkpoint(self.head, self.body(x), use_reentrant=True)


class Normed(nn.Module):
    """What tensor and sequence parallelism cut in pieces, with positions as the second axis of x."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.norm(x)))).mean(1))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def share(rank: int, world: int = 2) -> list:
    """The batches of one of the ranks."""
    sizes = [SIZES[r % 2] for r in range(world)]
    whole = CASE.batches(tuple(size for each in sizes for size in each))
    return whole[3 * rank : 3 * rank + 3]


def sequences(seed: int = 0) -> list:
    torch.manual_seed(seed)
    return [(torch.randn(n, 4, 5).double(), torch.randint(0, 3, (n,))) for n in (3, 2)]


# What the processes do. Each function takes the rank and gives what it found.


def summary(estimate: holdfast.Estimate, model: nn.Module) -> dict:
    (source,) = estimate.fisher.sources
    params = dict(model.named_parameters())
    entries = estimate.fisher.entries
    for name, value in entries.items():
        assert getattr(value, "placements", None) == getattr(params[name], "placements", None), name
    return {
        "entries": {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in entries.items()
        },
        "num_data": source.num_data,
        "id": source.id,
        "errors": (estimate.relative_error, dict(estimate.relative_errors)),
        "squares": estimate.squares,
    }


def run(model: nn.Module, batches: list, **options) -> dict:
    """An estimate, and the signs or labels that were drawn for it."""
    signs, labels = [], []
    with pytest.MonkeyPatch.context() as patch:
        randint, sampled = torch.randint, type(holdfast.categorical).sampled
        patch.setattr(torch, "randint", lambda *a, **k: signs.append(randint(*a, **k)) or signs[-1])
        patch.setattr(
            type(holdfast.categorical), "sampled", lambda *a, **k: labels.append(sampled(*a, **k)) or labels[-1]
        )
        estimate = holdfast.batch_sum_fisher(model, batches, holdfast.categorical, **options)
    return {**summary(estimate, getattr(model, "module", model)), "signs": signs, "labels": labels}


def fails(function, *args, **options) -> tuple[str, str]:
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def sharded(mesh=None, kind: type[nn.Module] = Scaled) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = made(kind)
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(rank: int) -> dict:
    model = sharded().train()
    with torch.no_grad():
        model(share(rank)[0][0])  # leaves the root's parameters whole
    model.reshard()
    grads = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]
    with torch.no_grad():
        model(share(rank)[0][0])
    model.set_gradient_divide_factor(3.0)
    observed = run(model, share(rank), targets="observed")
    assert model.training
    assert all(parameter.grad is grads[name] for name, parameter in model.named_parameters())
    assert {g.gradient_divide_factor for g in model._get_fsdp_state()._fsdp_param_groups} == {3.0}
    sampled = run(model, share(rank), targets="sampled", draws=2)
    fisher = holdfast.batch_sum_fisher(model, share(rank), holdfast.categorical).fisher
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    return {"observed": observed, "sampled": sampled, "consolidated": posterior.num_data}


def alike(rank: int) -> dict:
    """Both ranks have the same examples, whose cross terms draws in common would leave."""
    model = sharded()
    data = CASE.batches((3,))
    return {t: summary(holdfast.batch_sum_fisher(model, data, holdfast.categorical, targets=t, draws=80), model)
            for t in ("sampled", "observed")}  # fmt: skip


def checkpointed(rank: int) -> dict:
    return run(sharded(kind=Checkpointed), share(rank), targets="observed")


def ddp(rank: int) -> dict:
    model = nn.parallel.DistributedDataParallel(made(Scaled))
    model(share(rank)[0][0])  # a forward pass alone leaves the averaging of gradients armed
    return run(model, share(rank)[: 3 - rank], targets="observed")


def distilled(rank: int) -> dict:
    """The gradient of answers to inputs that differ between the ranks, and to probes that do not."""
    model, start = nn.parallel.DistributedDataParallel(made(Scaled)), holdfast.prior(made(Scaled))
    sources = {
        "new": holdfast.new_inputs(model, num_data=10),
        "probes": holdfast.gaussian_probes([x for x, _ in share(0)]),
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    model(share(rank)[0][0])
    found = {}
    for name, source in sources.items():
        model.zero_grad()
        term = holdfast.distill(model, start, source, holdfast.categorical)
        term.add_gradient_(model, 1.0, {id(parameter) for parameter in model.parameters()})
        found[name] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return found


def errors(rank: int) -> dict:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, estimate, data = sharded(), holdfast.batch_sum_fisher, share(rank)
    found = {"uneven": fails(estimate, model, data[: 3 - rank], holdfast.categorical)}
    found["none"] = fails(estimate, model, data if rank else [], holdfast.categorical)
    wrong = [data[0], (data[1][0], data[1][1] + 9 * rank), data[2]]
    found["label"] = fails(estimate, model, wrong, holdfast.categorical, targets="observed")
    found["diagonal"] = fails(holdfast.diagonal_fisher, model, data, holdfast.categorical)
    found["afterwards"] = fails(estimate, model, data, holdfast.categorical)
    model.set_requires_gradient_sync(False)
    found["accumulating"] = fails(estimate, model, data, holdfast.categorical)
    half = made(Scaled)
    fully_shard(half.body)
    found["half"] = fails(estimate, half, data, holdfast.categorical)
    inner = made(Scaled)
    inner.body = nn.parallel.DistributedDataParallel(inner.body)
    found["inner ddp"] = fails(estimate, inner, data, holdfast.categorical)
    flat_pieces = FullyShardedDataParallel(made(Scaled), device_id=torch.device("cpu"), use_orig_params=True)
    found["flat"] = fails(estimate, flat_pieces, data, holdfast.categorical)
    hooked = replicate(made(Scaled))
    found["hooked"] = fails(estimate, hooked, data, holdfast.categorical)
    replicas = nn.parallel.DistributedDataParallel(made(Scaled))
    wrong = [(x, y + 9 * rank) for x, y in data]
    found["ddp label"] = fails(estimate, replicas, wrong, holdfast.categorical, targets="observed")
    return found


def parallel(mesh, output: object = None) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = made(Normed)
    cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(model, mesh, cut)
    return parallelize_module(model, mesh, {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=output or Replicate()),
    })  # fmt: skip


def tensor_parallel(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2,))
    model = parallel(mesh)
    found = {targets: run(model, sequences(), targets=targets) for targets in ("sampled", "observed")}
    found["other data"] = fails(holdfast.batch_sum_fisher, model, sequences(rank), holdfast.categorical)
    model = parallel(mesh, Shard(-1))
    data = [(x, 0 * y) for x, y in sequences()]  # a class that every piece of the output has
    found["other output"] = fails(holdfast.batch_sum_fisher, model, data, holdfast.categorical, targets="observed")
    return found


def hybrid(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh

    return run(sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), share(rank, 4))


def sharded_and_parallel(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = fully_shard(parallel(mesh["tensor"]), mesh=mesh["data"])
    return run(model, sequences(rank // 2), targets="observed")


def alone(rank: int) -> dict:
    return run(sharded(), share(0), targets="observed")


SCENARIOS = {
    1: [alone],
    2: [fsdp, checkpointed, alike, ddp, distilled, errors, tensor_parallel],
    4: [hybrid, sharded_and_parallel],
}


# What they must have found.


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


def by_hand(model: nn.Module, steps: list[list[tuple[Tensor, Tensor, Tensor]]]) -> Tensor:
    """Σ over steps of (Σ s ∇nll)², from all the batches of a step with their labels and signs."""
    squares = []
    for step in steps:
        losses = [(s * holdfast.categorical.nll(model(x), y)).sum() for x, y, s in step]
        squares.append(flat_gradient(sum(losses), model).square())
    return sum(squares)


def require_same_on_all(ranks: list[dict]) -> dict:
    for other in ranks[1:]:
        for key in ("num_data", "id", "errors", "squares"):
            assert other[key] == ranks[0][key], key
        torch.testing.assert_close(other["entries"], ranks[0]["entries"], rtol=0, atol=0)
    return ranks[0]


def signed(data: list, signs: list) -> list:
    return [(x, y, 2 * s - 1) for (x, y), s in zip(data, signs, strict=True)]


def drawn(data: list, labels: list, draws: int = 1) -> list:
    inputs = [x for x, _ in data for _ in range(draws)]
    return [(x, y, torch.ones(len(x))) for x, y in zip(inputs, labels, strict=True)]


def in_one_process(model: nn.Module, data: list) -> holdfast.Source:
    return holdfast.batch_sum_fisher(model, data, holdfast.categorical).fisher.sources[0]


def test_a_sharded_model_squares_the_sum_over_all_ranks(found):
    model = made(Scaled)
    observed = require_same_on_all([each["observed"] for each in found["fsdp"]])
    shares = [signed(share(rank), found["fsdp"][rank]["observed"]["signs"]) for rank in (0, 1)]
    torch.testing.assert_close(flat(observed["entries"]), by_hand(model, list(zip(*shares, strict=True))))
    sampled = require_same_on_all([each["sampled"] for each in found["fsdp"]])
    shares = [drawn(share(rank), found["fsdp"][rank]["sampled"]["labels"], 2) for rank in (0, 1)]
    torch.testing.assert_close(flat(sampled["entries"]), by_hand(model, list(zip(*shares, strict=True))) / 2)
    assert (observed["squares"], sampled["squares"]) == (3, 6)


def test_reentrant_checkpoints_change_nothing(found):
    for plain, checkpointed in zip(found["fsdp"], found["checkpointed"], strict=True):
        torch.testing.assert_close(flat(checkpointed["entries"]), flat(plain["observed"]["entries"]))
        assert checkpointed["id"] == plain["observed"]["id"]


def test_the_source_is_that_of_all_the_data_in_one_process(found):
    source = in_one_process(made(Scaled), share(0) + share(1))
    for name, ranks in (("fsdp", [each["observed"] for each in found["fsdp"]]), ("hybrid", found["hybrid"])):
        whole = source if name == "fsdp" else in_one_process(made(Scaled), [b for r in range(4) for b in share(r, 4)])
        assert {(each["id"], each["num_data"]) for each in ranks} == {(whole.id, whole.num_data)}
    assert {each["consolidated"] for each in found["fsdp"]} == {source.num_data}


def test_its_errors_are_those_of_the_squares(found):
    model = made(Scaled)
    ranks = [each["observed"] for each in found["fsdp"]]
    shares = [signed(share(rank), ranks[rank]["signs"]) for rank in (0, 1)]
    steps = [by_hand(model, [step]) for step in zip(*shares, strict=True)]
    expected = (2 / 3 * sum(each.square().sum() for each in steps)).sqrt() / sum(steps).norm()
    assert ranks[0]["errors"][0] == pytest.approx(float(expected))


@pytest.mark.parametrize("targets", ["sampled", "observed"])
def test_it_is_unbiased_where_ranks_have_the_same_examples(targets, found):
    estimate = require_same_on_all([each[targets] for each in found["alike"]])
    case = Case("scaled", Scaled, holdfast.categorical, CASE.data)
    of = "expected" if targets == "sampled" else "observed"
    exact = 2 * fisher_loop(case, made(Scaled), CASE.batches((3,)), of).diag()
    error = (flat(estimate["entries"]) - exact).norm() / exact.norm()
    assert error <= 2 * estimate["errors"][0] <= 0.5  # draws in common would double it: an error of 1
    assert estimate["num_data"] == 6


def test_replicas_square_apart_and_add(found):
    estimate = require_same_on_all(found["ddp"])
    shares = [signed(share(rank)[: 3 - rank], found["ddp"][rank]["signs"]) for rank in (0, 1)]
    torch.testing.assert_close(flat(estimate["entries"]), by_hand(made(Scaled), [[b] for each in shares for b in each]))
    source = in_one_process(made(Scaled), share(0) + share(1)[:2])
    assert (estimate["id"], estimate["num_data"], estimate["squares"]) == (source.id, source.num_data, 5)


def test_replicas_held_by_their_answers_stay_alike(found):
    old, new = made(Scaled), made(Scaled)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.1
    inputs = [share(rank)[0][0] for rank in (0, 1)]
    losses = [holdfast.distillation_loss(old(x), new(x), holdfast.categorical) for x in inputs]
    expected = flat_gradient(10 * sum(losses) / 2, new)
    for rank in found["distilled"]:
        torch.testing.assert_close(rank["new"], expected)
        torch.testing.assert_close(rank["probes"], found["distilled"][0]["probes"], rtol=0, atol=0)


def test_tensor_parallel_ranks_are_one_model_on_one_share_of_the_data(found):
    model = made(Normed)
    for targets in ("sampled", "observed"):
        estimate = require_same_on_all([each[targets] for each in found["tensor_parallel"]])
        single = holdfast.batch_sum_fisher(model, sequences(), holdfast.categorical, targets=targets)
        torch.testing.assert_close(flat(estimate["entries"]), flat(single.fisher.entries))
        assert estimate["errors"][0] == pytest.approx(single.relative_error)
        assert (estimate["id"], estimate["num_data"]) == (single.fisher.sources[0].id, 5)


def test_meshes_of_two_axes(found):
    estimate = require_same_on_all(found["hybrid"])
    shares = [drawn(share(rank, 4), found["hybrid"][rank]["labels"]) for rank in range(4)]
    torch.testing.assert_close(flat(estimate["entries"]), by_hand(made(Scaled), list(zip(*shares, strict=True))))
    ranks = found["sharded_and_parallel"]
    estimate = require_same_on_all(ranks)
    shares = [signed(sequences(rank // 2), ranks[rank]["signs"]) for rank in (0, 2)]
    torch.testing.assert_close(flat(estimate["entries"]), by_hand(made(Normed), list(zip(*shares, strict=True))))
    assert estimate["num_data"] == 10
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["signs"], ranks[1]["signs"], strict=True))


def test_one_rank_alone_is_as_if_it_were_not_sharded(found):
    single = holdfast.batch_sum_fisher(made(Scaled), share(0), holdfast.categorical, targets="observed")
    torch.testing.assert_close(flat(found["alone"][0]["entries"]), flat(single.fisher.entries))
    assert found["alone"][0]["id"] == single.fisher.sources[0].id


@pytest.mark.parametrize(
    ("what", "kind", "messages"),
    [
        ("uneven", "DataError", ["1 of 2 ranks have a batch more"] * 2),
        ("none", "DataError", ["there are no batches", "rank 0 of 2 has stopped: there are no batches"]),
        ("label", "DataError", ["rank 1 of 2 has stopped: batch 1", "batch 1: "]),
        ("ddp label", "DataError", ["rank 1 of 2 has stopped: batch 0", "batch 0: "]),
        ("diagonal", "ArgumentError", ["batch_sum_fisher alone takes such models"] * 2),
        ("afterwards", "nothing", [""] * 2),
        ("accumulating", "ArgumentError", [r"set_requires_gradient_sync\(True\)"] * 2),
        ("half", "ArgumentError", ["`scale` is not in fully_shard's hands"] * 2),
        ("flat", "ArgumentError", ["the model` is a FullyShardedDataParallel"] * 2),
        ("hooked", "ArgumentError", ["Wrap it in DistributedDataParallel instead"] * 2),
        ("inner ddp", "ArgumentError", ["a part of the model is wrapped"] * 2),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(what, kind, messages, found):
    for each, message in zip(found["errors"], messages, strict=True):
        got, said = each[what]
        assert got in (kind, "_Stopped"), said
        assert re.search(message, said), said


def test_tensor_parallel_ranks_that_differ_are_refused(found):
    for each in found["tensor_parallel"]:
        assert "batch 0 differs on tensor-parallel ranks" in each["other data"][1]
        assert "batch 0 has different losses on tensor-parallel ranks" in each["other output"][1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
