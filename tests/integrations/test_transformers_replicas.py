"""transformers' Trainer on two processes, held, against one. Skipped where it is not installed."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import holdfast
from oracles import flat
from processes import gathered, main

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from holdfast.integrations.transformers import HoldCallback, memory_from  # noqa: E402
from transformers_cases import (  # noqa: E402
    Counted,
    N,
    arguments,
    batched,
    bert,
    images,
    labeled,
    start,
    statistics,
    trained,
    weights,
)

local = pytest.mark.filterwarnings("ignore:a posterior alone has no probes:holdfast.HoldfastWarning")
far = pytest.mark.filterwarnings("ignore:to stay within:holdfast.HoldfastWarning")


def as_replica(rank):
    """One of two processes that accelerate finds itself in."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )  # fmt: skip


HELD = {"strength": 3.0, "proximal": False}
LOGGED = {"logging_strategy": "steps", "logging_steps": 1, "average_tokens_across_devices": False}


def replicas(rank, name, accumulate=1, rate=0.05, **how):
    as_replica(rank)
    model, posterior, data = start(name)
    callback = HoldCallback(posterior, **how)
    folder = f"{sys.argv[1]}/{name}{accumulate}{len(how)}"
    settings = {"per_device_train_batch_size": 4 // accumulate, "gradient_accumulation_steps": accumulate}
    trainer = trained(folder, model, data, callback, **LOGGED, **settings, learning_rate=rate)
    return {
        "weights": weights(model), "world": trainer.args.world_size, "steps": callback.handle.steps,
        "log": trainer.state.log_history, "wrapped": type(trainer.model_wrapped).__name__,
        "strength": callback.handle.strength, "spent": callback.handle.spent,
    }  # fmt: skip


def tokens(rank):
    return replicas(rank, "llama", **HELD)


def classes(rank):
    return replicas(rank, "bert", accumulate=2, **HELD)


def budgeted(rank):
    return replicas(rank, "bert", rate=0.5, budget=0.004, strength=0.1)


def with_statistics(rank):
    """A budget of a model whose BatchNorm sees another half of the data on each process."""
    as_replica(rank)
    model, posterior, data = start("resnet")
    old = batched(images(7, 40), 40)
    answers = holdfast.kept_answers(model, old, holdfast.categorical)
    memory = holdfast.Memory.of(posterior, model, holdfast.kept_inputs(old[0]["pixel_values"]), answers)
    strengths, before = [], []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            strengths.append(callback.handle.strength)
            if state.global_step < state.max_steps:
                before.append(statistics(model))

    callback = HoldCallback(memory, budget=0.1, freeze_statistics=False)
    trained(f"{sys.argv[1]}/statistics", model, data, callback, Look(), max_steps=16)
    return {
        "strengths": strengths, "before": before[-1], "weights": weights(model), "statistics": statistics(model),
        "spent": callback.handle.spent,
    }  # fmt: skip


def remembered(rank):
    """Memories from a Trainer, of a dataset by place and of one that is read in order, whole or in shares."""
    as_replica(rank)
    found = {}
    for way in ("places", "order", "shares"):
        torch.manual_seed(0)
        rows = labeled(5)
        settings = {"accelerator_config": {"dispatch_batches": False}} if way == "shares" else {}
        trainer = transformers.Trainer(
            bert(),
            arguments(f"{sys.argv[1]}/{way}", **settings),
            train_dataset=rows if way == "places" else Counted(rows),
        )
        memory = memory_from(trainer, fisher=holdfast.diagonal_fisher)
        found[way] = (memory.num_data, flat(memory.precision.entries))
        callback = HoldCallback(memory, strength=3.0)
        trainer.add_callback(callback)
        trainer.train()
        metrics = callback.handle.metrics()
        found[f"new {way}"] = 3.0 * metrics["holdfast/penalty"] / metrics["holdfast/loss"]
    return found


def resumed(rank):
    as_replica(rank)
    saved = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-2}
    straight, posterior, data = start("llama", attention_dropout=0.2)
    trained(f"{sys.argv[1]}/straight", straight, data, HoldCallback(posterior), **saved)
    again, _, _ = start("llama", seed=3, attention_dropout=0.2)
    checkpoint = f"{sys.argv[1]}/straight/checkpoint-3"
    trained(f"{sys.argv[1]}/again", again, data, HoldCallback(posterior), resume=checkpoint, **saved)
    return {"straight": weights(straight), "again": weights(again)}


SCENARIOS = {2: [tokens, classes, budgeted, with_statistics, remembered, resumed]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return gathered(tmp_path_factory, __file__, SCENARIOS)


@pytest.mark.parametrize(("way", "name"), [("tokens", "llama"), ("classes", "bert")])
def test_replicas_are_one_process_with_the_whole_batch(found, way, name, tmp_path):
    model, posterior, data = start(name)
    trained(tmp_path, model, data, HoldCallback(posterior, **HELD), per_device_train_batch_size=8)
    value = holdfast.penalty(model, posterior).item()
    for rank in found[way]:
        assert (rank["world"], rank["wrapped"], rank["steps"]) == (2, "DistributedDataParallel", 6)
        torch.testing.assert_close(rank["weights"], weights(model), rtol=0, atol=1e-6)
    first, second = (rank["log"] for rank in found[way])
    assert [line["step"] for line in first if "holdfast/penalty" in line] == [1, 2, 3, 4, 5, 6]
    assert first[-2]["holdfast/penalty"] == pytest.approx(value)
    assert not any(key.startswith("holdfast/") for line in second for key in line)  # once, and not once a rank


@local
@far
def test_replicas_keep_the_budget_of_one_process(found, tmp_path):
    model, posterior, data = start("bert")
    callback = HoldCallback(posterior, budget=0.004, strength=0.1)
    trained(tmp_path, model, data, callback, per_device_train_batch_size=8, learning_rate=0.5)
    assert callback.handle.spent.kept < 0.95
    for rank in found["budgeted"]:
        torch.testing.assert_close(rank["weights"], weights(model), rtol=0, atol=1e-6)
        assert rank["strength"] == pytest.approx(callback.handle.strength) != 0.1
        assert rank["spent"].rise == pytest.approx(callback.handle.spent.rise)


def test_replicas_with_statistics_of_their_own_keep_a_budget_as_one(found):
    one, other = found["with_statistics"]
    assert not torch.equal(one["before"], other["before"])  # each had seen its half
    assert len(set(one["strengths"])) > 2
    assert one["strengths"] == other["strengths"]
    assert one["spent"].rise <= 0.1
    for kind in ("weights", "statistics"):
        assert torch.equal(one[kind], other[kind])


@pytest.mark.parametrize("way", ["places", "order", "shares"])
def test_a_memory_from_replicas_is_of_all_the_data(found, way, tmp_path):
    torch.manual_seed(0)
    trainer = transformers.Trainer(bert(), arguments(tmp_path), train_dataset=labeled(5))
    alone = memory_from(trainer, fisher=holdfast.diagonal_fisher)
    for rank in found["remembered"]:
        count, entries = rank[way]
        assert count == N
        torch.testing.assert_close(entries, flat(alone.precision.entries), rtol=1e-9, atol=0)
        assert rank[f"new {way}"] == pytest.approx(N)  # and what it is held against is counted whole


def test_replicas_resume_to_the_bit(found):
    for rank in found["resumed"]:
        assert torch.equal(rank["straight"], rank["again"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
