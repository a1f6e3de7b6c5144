"""The variational optimizer on several processes: replicas go in step, and shards draw noise of their own."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from processes import gathered, main
from variational_cases import classes, perceptron

STEPS = 4


def trained(model: nn.Module, trains: nn.Module, rows: slice, *, memory: float = 0.95, num_data: float = 16) -> dict:
    """Some steps on a part of the batch; the posterior, whole, and what this rank drew of the first weight."""
    optimizer = holdfast.IVON(
        model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=num_data, lr=0.05, start=0.5,
        betas=(0.9, memory), radius=math.inf,
    )  # fmt: skip
    x, y = (each[rows] for each in classes())
    moves, draws = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with optimizer.sampled():
            draws.append({name: whole(p.detach() - before[name]) for name, p in model.named_parameters()})
            moves.append(local(next(model.parameters()).detach() - next(iter(before.values()))))
            F.cross_entropy(trains(x), y).backward()
        optimizer.step()
    found = optimizer.posterior()
    return {
        "mean": {name: whole(each) for name, each in found.mean.items()},
        "entries": {name: whole(each) for name, each in found.precision.entries.items()},
        "moves": moves,
        "draws": draws,
        "id": found.id,
    }


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ddp(rank: int) -> dict:
    model = perceptron()
    return trained(model, nn.parallel.DistributedDataParallel(model), slice(8 * rank, 8 * rank + 8))


def unsynced(rank: int) -> dict:
    """Two backward passes a step, of which only the last is synchronized: in one draw, and in one draw each."""
    x, y = (each[8 * rank : 8 * rank + 8] for each in classes())
    model = perceptron()
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = holdfast.IVON(
        replica, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=16, lr=0.05, start=0.5
    )
    with optimizer.sampled():
        with replica.no_sync():
            (F.cross_entropy(replica(x[:4]), y[:4]) / 2).backward()
        (F.cross_entropy(replica(x[4:]), y[4:]) / 2).backward()
    optimizer.step()
    found = optimizer.posterior()
    said = ""
    optimizer.zero_grad()
    try:
        with replica.no_sync(), optimizer.sampled():
            F.cross_entropy(replica(x), y).backward()
    except holdfast.ArgumentError as error:
        said = str(error)
    return {"mean": found.mean, "entries": found.precision.entries, "said": said}


def field(rank: int) -> dict:
    """Bayes by backprop in replicas: each sees half of the data."""
    model = perceptron()
    q = holdfast.mean_field(model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=16)
    replica = nn.parallel.DistributedDataParallel(q)
    replica(tuple(each[8 * rank : 8 * rank + 8] for each in classes())).backward()
    return {"num_data": q.posterior().num_data, "grads": [p.grad for p in q.parameters()]}


def sharded(rank: int) -> dict:
    from torch.distributed.fsdp import fully_shard

    model = perceptron()
    fully_shard(model[0])
    fully_shard(model)
    # So much data that a draw is next to the mean, and so long a memory that the curvature stays: no noise is left.
    calm = trained(model, model, slice(8 * rank, 8 * rank + 8), memory=1 - 1e-15, num_data=1e20)
    model = perceptron()
    fully_shard(model)
    return {"calm": calm, "drawn": trained(model, model, slice(8 * rank, 8 * rank + 8)), "resumed": resumed(rank)}


def resumed(rank: int) -> list[list[torch.Tensor]]:
    """Weights after some steps, gone straight through and by way of torch's distributed state dicts."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    x, y = (each[8 * rank : 8 * rank + 8] for each in classes())

    def made() -> tuple[nn.Module, holdfast.IVON]:
        model = fully_shard(perceptron())
        before = holdfast.prior(model, 1.0, mean=0.0)
        return model, holdfast.IVON(model, before, holdfast.categorical, num_data=16, start=0.5)

    def stepped(model: nn.Module, optimizer: holdfast.IVON) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

    first, second = made(), made()
    stepped(*first)
    weights, state = copy.deepcopy(get_state_dict(*first))
    set_state_dict(*second, model_state_dict=weights, optim_state_dict=state)
    stepped(*first)
    stepped(*second)
    return [[whole(p.detach()) for p in model.parameters()] for model, _ in (first, second)]


SCENARIOS = {2: [ddp, unsynced, field, sharded]}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


def test_replicas_are_one_process_with_the_whole_batch(found):
    model = perceptron()
    alone = trained(model, model, slice(0, 16))
    for rank in found["ddp"]:
        assert rank["id"] == found["ddp"][0]["id"]
        torch.testing.assert_close(rank["mean"], alone["mean"], atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(rank["entries"], alone["entries"], atol=1e-9, rtol=1e-9)


def test_shards_step_as_one_process_does_where_there_is_no_noise(found):
    model = perceptron()
    alone = trained(model, model, slice(0, 16), memory=1 - 1e-15, num_data=1e20)
    for rank in found["sharded"]:
        torch.testing.assert_close(rank["calm"]["mean"], alone["mean"], atol=1e-6, rtol=1e-6)


def test_shards_step_by_the_equations_from_the_noise_that_was_drawn(found):
    """Written out in one process, on the whole batch."""
    model, n, lr, (b1, b2) = perceptron(), 16, 0.05, (0.9, 0.95)
    x, y = classes()
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum, h = ({name: torch.full_like(p, start) for name, p in mean.items()} for start in (0.0, 0.5))
    one, other = (rank["drawn"] for rank in found["sharded"])
    for t, draw in enumerate(one["draws"], 1):
        theta = {name: (p + draw[name]).requires_grad_() for name, p in mean.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, theta, (x,)), y)
        for (name, old), grad in zip(mean.items(), torch.autograd.grad(loss, list(theta.values())), strict=True):
            bend = grad * draw[name] * n * (h[name] + 1 / n)
            momentum[name] = b1 * momentum[name] + (1 - b1) * grad
            extra = 0.5 * (1 - b2) ** 2 * (h[name] - bend) ** 2 / (h[name] + 1 / n)
            h[name] = b2 * h[name] + (1 - b2) * bend + extra
            mean[name] = old - lr * (momentum[name] / (1 - b1**t) + old / n) / (h[name] + 1 / n)
    torch.testing.assert_close(one["mean"], mean)
    torch.testing.assert_close(one["entries"], {name: n * each + 1 for name, each in h.items()})
    for ours, theirs in zip(one["moves"], other["moves"], strict=True):
        assert ours.shape == theirs.shape
        assert not torch.allclose(ours, theirs)  # two parts of one weight, and not one draw twice


def test_passes_without_synchronization_belong_into_one_draw(found):
    model = perceptron()
    optimizer = holdfast.IVON(
        model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=16, lr=0.05, start=0.5
    )
    x, y = classes()
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    alone = optimizer.posterior()
    for rank in found["unsynced"]:
        torch.testing.assert_close(rank["mean"], alone.mean)
        torch.testing.assert_close(rank["entries"], alone.precision.entries)
        assert "no_sync" in rank["said"]
        assert "inside one sampled()" in rank["said"]


def test_a_field_in_replicas_counts_the_data_of_all(found):
    one, other = found["field"]
    assert one["num_data"] == other["num_data"] == 16
    torch.testing.assert_close(one["grads"], other["grads"], atol=0, rtol=0)


def test_a_sharded_state_is_resumed_to_the_last_bit(found):
    for rank in found["sharded"]:
        straight, again = rank["resumed"]
        torch.testing.assert_close(straight, again, atol=0, rtol=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
