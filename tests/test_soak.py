"""A long run under FSDP2, held to a memory, broken off in the middle and resumed: as if nothing had happened.

The processes run this file as a script; the tests look at what they saved.
"""

import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import holdfast
from holdfast import Posterior
from holdfast.devices import full
from holdfast.pieces import cut
from processes import gathered, main
from sharded_cases import Scaled

FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()
STEPS, BATCH, EXAMPLES = 500, 16, 512


def made() -> nn.Module:
    torch.manual_seed(1)
    return Scaled().double()


def examples(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def old_memory() -> Posterior:
    """What the first weights knew of other data."""
    model = made()
    return holdfast.consolidate(
        holdfast.prior(model), model, holdfast.diagonal_fisher(model, [examples(7)], holdfast.categorical)
    )


def trained(model: nn.Module, optimizer, start: int, stop: int, rank: int = 0, world: int = 1) -> None:
    """Steps on mean losses over batches of all ranks' examples; each rank has its share."""
    x, y = examples(5)
    share = BATCH // world
    for step in range(start, stop):
        first = BATCH * step % EXAMPLES + rank * share
        nn.functional.cross_entropy(model(x[first : first + share]), y[first : first + share]).backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module, posterior) -> tuple[torch.optim.Optimizer, holdfast.Handle]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return optimizer, holdfast.hold(optimizer, model, posterior, num_data=EXAMPLES, strength=2.0)


def outcome(model: nn.Module, handle: holdfast.Handle) -> dict:
    weights = {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return {"weights": weights, "penalty": handle.penalty, "hold": handle.state_dict()}


# What the processes do.


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(made())


def state(model: nn.Module, optimizer, handle: holdfast.Handle) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "hold": handle.state_dict()}


def broken_off(rank: int) -> dict:
    """Half of the run, and a checkpoint; then what goes on past it is lost."""
    from torch.distributed import checkpoint

    signal.alarm(300)
    model = sharded()
    params, old = dict(model.named_parameters()), old_memory()
    known = Posterior(
        {name: cut(value, params[name]) for name, value in old.mean.items()},
        holdfast.Diagonal({n: cut(e, params[n]) for n, e in old.precision.tensors.items()}, old.sources),
    )
    holdfast.save(known, FOLDER / "memory")
    optimizer, handle = held(model, known)
    trained(model, optimizer, 0, STEPS // 2, rank, distributed.get_world_size())
    checkpoint.save(state(model, optimizer, handle), checkpoint_id=FOLDER / "checkpoint")
    trained(model, optimizer, STEPS // 2, STEPS // 2 + 7, rank, distributed.get_world_size())
    handle.remove()
    return {}


def resumed(rank: int) -> dict:
    """The other half, from the files alone."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    signal.alarm(300)
    model = sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer, handle = held(model, holdfast.load(FOLDER / "memory", model))
    found = state(model, optimizer, handle)
    checkpoint.load(found, checkpoint_id=FOLDER / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    handle.load_state_dict(found["hold"])
    trained(model, optimizer, STEPS // 2, STEPS, rank, distributed.get_world_size())
    return outcome(model, handle)


def resumed_alone(rank: int) -> dict:
    return resumed(rank)


SCENARIOS = {2: [broken_off, resumed], 1: [resumed_alone]}


# What they must have found.


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


@pytest.fixture(scope="module")
def expected() -> dict:
    """The whole run, in one process and without a break."""
    model = made()
    optimizer, handle = held(model, old_memory())
    trained(model, optimizer, 0, STEPS)
    return outcome(model, handle)


@pytest.mark.parametrize("scenario", ["resumed", "resumed_alone"])
def test_a_run_that_was_broken_off_and_resumed_ends_where_one_process_ends(scenario, found, expected):
    start = dict(made().named_parameters())
    for each in found[scenario]:
        torch.testing.assert_close(each["weights"], expected["weights"], rtol=0, atol=1e-9)
    moved = max(float((value - start[name]).detach().abs().max()) for name, value in expected["weights"].items())
    assert moved > 0.05


@pytest.mark.parametrize("scenario", ["resumed", "resumed_alone"])
def test_it_says_the_same_of_the_hold(scenario, found, expected):
    for each in found[scenario]:
        assert each["hold"] == expected["hold"]
        assert each["penalty"] == pytest.approx(expected["penalty"], rel=1e-9)
    assert expected["penalty"] > 0.01


if __name__ == "__main__":
    main(FOLDER, SCENARIOS)
