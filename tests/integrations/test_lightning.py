"""A Trainer with the callback against a plain loop with a hold. Skipped where lightning is not installed."""

import copy
import csv
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import holdfast
from cases import Tied, relu_mlp
from oracles import flat
from processes import gathered, main

pytest.importorskip("lightning.pytorch")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from holdfast.integrations.lightning import HoldCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),  # lightning's, of torch
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint:UserWarning"),  # the saver
    pytest.mark.filterwarnings("ignore:.*exists and is not empty:UserWarning"),  # the checkpoints' folder
]

N = 24  # the new data
STRENGTH = 1.7


def start(dtype=torch.float64):
    """A model at its old optimum with its posterior, and new data."""
    torch.manual_seed(0)
    net = relu_mlp().to(dtype)
    old = (torch.randn(40, 5, dtype=dtype), torch.randint(0, 3, (40,)))
    fisher = holdfast.diagonal_fisher(net, [old], holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(net), net, fisher)
    data = TensorDataset(torch.randn(N, 5, dtype=dtype) + 1, torch.randint(0, 3, (N,)))
    return net, posterior, data


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Automatic(LightningModule):
    def __init__(self, net, make=sgd):
        super().__init__()
        self.net, self.make = net, make

    def loss(self, batch):
        x, y = batch
        return holdfast.categorical.nll(self.net(x), y).mean()

    def training_step(self, batch):
        return self.loss(batch)

    def configure_optimizers(self):
        return self.make(self.net.parameters())


class Manual(Automatic):
    def __init__(self, net, make=sgd):
        super().__init__(net, make)
        self.automatic_optimization = False

    def training_step(self, batch):
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()


class Validated(Automatic):
    def validation_step(self, batch):
        self.log("old", self.loss(batch))


def inner(module):
    return module.net


def trained(module, loader, *callbacks, validate=None, ckpt_path=None, **settings):
    """A trainer that has fitted the module, with nothing on the screen or the disk."""
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "accelerator": "cpu", **settings}
    trainer = Trainer(
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **settings,
    )  # fmt: skip
    trainer.fit(module, loader, validate, ckpt_path=ckpt_path)
    return trainer


def plain(net, posterior, loader, make=sgd, *, epochs=2, clip=None, half=False, **how):
    """The same by hand."""
    optimizers = make(parameter for parameter in net.parameters() if parameter.requires_grad)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    with holdfast.hold(optimizers, net, posterior, num_data=N, strength=STRENGTH, **how):
        for _ in range(epochs):
            for x, y in loader:
                net.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = holdfast.categorical.nll(net(x), y).mean()
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                for optimizer in optimizers:
                    optimizer.step()
    return weights(net)


def weights(model):
    return flat({name: p.detach() for name, p in model.named_parameters()})


def held(posterior, **how):
    return HoldCallback(posterior, strength=STRENGTH, model=inner, **how)


@pytest.mark.parametrize("way", [Automatic, Manual])
@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_a_held_fit_is_a_held_loop(way, precision):
    dtype = torch.float64 if precision == "64-true" else torch.float32
    net, posterior, data = start(dtype)
    twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8))
    free = copy.deepcopy(net)
    callback = held(posterior)
    trained(way(net), DataLoader(data, 8), callback, precision=precision)
    trained(way(free), DataLoader(data, 8), precision=precision)
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)
    assert (weights(free) - twin).abs().max() > 0.01
    assert callback.handle.steps == 6


def test_the_memory_may_be_of_the_lightning_module_itself():
    net, _, data = start()
    module = Automatic(net)
    old = [tuple(data.tensors)]
    fisher = holdfast.diagonal_fisher(
        module, old, holdfast.categorical, forward=lambda module, batch: module.net(batch[0])
    )
    posterior = holdfast.consolidate(holdfast.prior(module), module, fisher)
    assert all(name.startswith("net.") for name in posterior.mean)
    part = holdfast.consolidate(holdfast.prior(net), net, holdfast.diagonal_fisher(net, old, holdfast.categorical))
    twin = plain(copy.deepcopy(net), part, DataLoader(data, 8))
    trained(module, DataLoader(data, 8), HoldCallback(posterior, strength=STRENGTH))
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)


def test_accumulation_does_not_change_the_hold():
    ends = []
    for size, accumulate in ((8, 1), (2, 4)):
        net, posterior, data = start()
        trained(Automatic(net), DataLoader(data, size), held(posterior), accumulate_grad_batches=accumulate)
        ends.append(weights(net))
    net, posterior, data = start()
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(ends[0], plain(net, posterior, DataLoader(data, 8)), rtol=0, atol=1e-6)


def test_the_pull_comes_after_clipping():
    net, posterior, data = start()
    twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8), clip=0.05)
    trained(Automatic(net), DataLoader(data, 8), held(posterior), gradient_clip_val=0.05)
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)


def test_all_the_optimizers_are_held():
    def two(parameters):
        first, *rest = parameters
        return [torch.optim.SGD([first], lr=0.2), torch.optim.Adam(rest, lr=0.01)]

    net, posterior, data = start()
    twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8), two)
    callback = held(posterior)
    trained(Manual(net, two), DataLoader(data, 8), callback)
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)
    assert callback.handle.steps == 12


@pytest.mark.parametrize("how", [{"proximal": True}, {"every": 2}], ids=str)
def test_other_ways_to_pull(how):
    net, posterior, data = start()
    twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8), **how)
    trained(Automatic(net), DataLoader(data, 8), held(posterior, **how))
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)


def test_terms_are_held_to_beside_the_memory():
    net, posterior, data = start()
    before = holdfast.Quadratic(holdfast.prior(net, precision=5.0))
    alone = plain(copy.deepcopy(net), posterior, DataLoader(data, 8))
    twin = plain(copy.deepcopy(net), [posterior, before], DataLoader(data, 8))
    trained(Automatic(net), DataLoader(data, 8), held(posterior, terms=[before]))
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)
    assert (weights(net) - alone).abs().max() > 1e-3


def test_a_term_may_stand_in_the_memorys_place():
    """A memory of the weights, held in weight space while LoRA trains."""
    peft = pytest.importorskip("peft")
    weight_space = pytest.importorskip("holdfast.integrations.peft").weight_space
    ends = []
    for way in ("trainer", "loop", "free"):
        net, posterior, data = start()
        torch.manual_seed(1)
        net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "2"])).double()
        if way == "loop":
            plain(net, weight_space(net, posterior), DataLoader(data, 8))
        else:
            callbacks = [held(weight_space(net, posterior))] if way == "trainer" else []
            trained(Automatic(net), DataLoader(data, 8), *callbacks)
        ends.append(weights(net))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    assert (ends[0] - ends[2]).abs().max() > 1e-4


def test_statistics_may_be_kept_through_validation_and_training():
    net, _, data = start()
    net = nn.Sequential(net[0], nn.BatchNorm1d(6).double(), *net[1:])
    posterior = learned(net).posterior
    before = net[1].running_mean.clone()
    twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8), freeze_statistics=True)
    callback = held(posterior, freeze_statistics=True)
    trained(Validated(net), DataLoader(data, 8), callback, validate=DataLoader(data, 8))
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)
    torch.testing.assert_close(net[1].running_mean, before, rtol=0, atol=0)
    assert net[1].training


def test_statistics_that_nobody_asked_about_drift_with_a_warning():
    net, _, data = start()
    net = nn.Sequential(net[0], nn.BatchNorm1d(6).double(), *net[1:])
    posterior, before = learned(net).posterior, net[1].running_mean.clone()
    with pytest.warns(holdfast.HoldfastWarning, match="statistics of `1` are not parameters.*freeze_statistics"):
        trained(Automatic(net), DataLoader(data, 8), held(posterior))
    assert (net[1].running_mean - before).abs().max() > 1e-2


def test_half_precision_is_that_of_the_loop_and_close_to_whole():
    ends = []
    for precision in ("bf16-mixed", "32-true"):
        net, posterior, data = start(torch.float32)
        twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8), half=precision == "bf16-mixed")
        trained(Automatic(net), DataLoader(data, 8), held(posterior), precision=precision)
        assert next(net.parameters()).dtype == torch.float32
        torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)
        ends.append(weights(net))
    before = weights(start(torch.float32)[0])
    assert 0 < (ends[0] - ends[1]).norm() < 0.15 * (ends[1] - before).norm()


def rows(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_are_logged_when_the_trainer_logs(tmp_path):
    net, posterior, data = start()
    logger = CSVLogger(tmp_path)
    callback = held(posterior)
    trainer = trained(Automatic(net), DataLoader(data, 4), callback, logger=logger, log_every_n_steps=4)
    assert [row["step"] for row in rows(logger.log_dir)] == ["3", "7", "11"]
    assert [float(row["holdfast/steps"]) for row in rows(logger.log_dir)] == [4, 8, 12]
    value = holdfast.penalty(net, posterior).item()
    assert value > 1e-3
    assert float(trainer.callback_metrics["holdfast/penalty"]) == pytest.approx(value, rel=1e-5)
    assert float(trainer.callback_metrics["holdfast/rise"]) == pytest.approx(value / 40, rel=1e-5)
    assert float(rows(logger.log_dir)[-1]["holdfast/penalty"]) == pytest.approx(value, rel=1e-5)
    assert float(trainer.callback_metrics["holdfast/loss"]) == pytest.approx(STRENGTH * value / N, rel=1e-5)


def test_the_forecast_is_logged_where_the_model_is_validated():
    net, posterior, data = start()
    loader = DataLoader(data, 4)
    trainer = trained(Validated(net), loader, held(posterior), validate=loader)
    assert float(trainer.callback_metrics["holdfast/forecast"]) == pytest.approx(
        holdfast.forecast(net, posterior).rise, rel=1e-4
    )
    net, posterior, data = start()
    trainer = trained(Validated(net), loader, held(posterior, forecast=False), validate=loader)
    assert "holdfast/forecast" not in trainer.callback_metrics


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
def test_a_budget_is_not_kept_where_weights_are_averaged_at_the_end():
    net, posterior, data = start()
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(holdfast.ArgumentError, match="StochasticWeightAveraging puts other weights"):
        trained(Automatic(net), DataLoader(data, 4), averaging, held(posterior, budget=0.1))


def learned(net):
    """A memory, of a task that the model has learned, that tells by probes what is spent."""
    x = torch.randn(200, 5, dtype=torch.float64)
    y = x[:, :3].argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        holdfast.categorical.nll(net(x), y).mean().backward()
        optimizer.step()
    old = [(x, y)]
    fisher = holdfast.diagonal_fisher(net, old, holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(net), net, fisher)
    answers = holdfast.kept_answers(net, old, holdfast.categorical)
    return holdfast.Memory.of(posterior, net, holdfast.gaussian_probes(old), answers)


ENDINGS = {
    "epochs": ({}, {"max_epochs": 2}),
    "steps": ({"every_n_train_steps": 1}, {"max_epochs": -1, "max_steps": 5}),
    "validated": ({"monitor": "old", "save_top_k": -1}, {"max_epochs": 2}),
    "limited": ({"save_weights_only": True}, {"max_epochs": 2, "limit_train_batches": 2}),
    "stopped": ({}, {"max_epochs": 9}),
    "stopped, weights alone": ({"save_weights_only": True}, {"max_epochs": 9}),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_budget_is_finished_before_the_last_checkpoint(tmp_path, ending):
    """Steps too long for their budget: without the finish, far more would be spent."""
    how, settings = ENDINGS[ending]
    net, _, data = start()
    memory = learned(net)
    seen = []

    class Module(Validated):
        def on_validation_epoch_end(self):
            seen.append(weights(self.net))

    module = Module(net, lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    callback = HoldCallback(memory, budget=0.02, model=inner)
    saver = ModelCheckpoint(tmp_path, save_last=True, **how)
    others = [EarlyStopping("old", divergence_threshold=-1.0)] if ending.startswith("stopped") else []
    with pytest.warns(holdfast.HoldfastWarning, match="went back"):
        trained(
            module, DataLoader(data, 8), callback, saver, *others, validate=DataLoader(data, 8), **settings,
            enable_checkpointing=True,
        )  # fmt: skip
    spent = callback.handle.spent
    assert 0 < spent.kept < 0.5
    assert spent.rise <= 0.02
    saved = torch.load(saver.last_model_path, weights_only=True)["state_dict"]
    assert saved.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)
    if ending != "steps" and not others:  # in the midst of an epoch, and decided by the validation itself
        torch.testing.assert_close(seen[-1], weights(net), rtol=0, atol=0)


def test_a_budget_that_is_finished_after_the_last_checkpoint_says_so(tmp_path):
    net, _, data = start()
    memory = learned(net)

    class Late(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    module = Automatic(net, lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    callback = HoldCallback(memory, budget=0.02, model=inner)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.warns(holdfast.HoldfastWarning) as said:
        trained(module, DataLoader(data, 8), callback, Late(), saver, max_epochs=9, enable_checkpointing=True)
    assert any("trainer.save_checkpoint" in str(each.message) for each in said)
    assert callback.handle.spent.rise <= 0.02
    assert not module._state_dict_pre_hooks


def test_a_budget_that_cannot_be_kept_is_an_error_of_its_own():
    net, _, data = start()
    memory = learned(net)
    module = Automatic(net, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    with pytest.raises(holdfast.BudgetError, match="nothing is learned"):
        trained(module, DataLoader(data, 8), HoldCallback(memory, budget=0.01, proximal=False, model=inner))


def test_training_goes_on_from_a_checkpoint_to_the_last_bit(tmp_path):
    net, posterior, data = start()
    straight = copy.deepcopy(net)
    trained(Automatic(straight), DataLoader(data, 8), held(posterior), max_epochs=4)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    first, second = Automatic(net), Automatic(relu_mlp().double())
    trained(first, DataLoader(data, 8), held(posterior), saver, enable_checkpointing=True)
    assert (weights(net) - weights(straight)).abs().max() > 1e-3
    callback = held(posterior)
    trained(second, DataLoader(data, 8), callback, max_epochs=4, ckpt_path=saver.last_model_path)
    assert callback.handle.steps == 6
    torch.testing.assert_close(weights(second.net), weights(straight), rtol=0, atol=0)


def test_a_budget_goes_on_with_its_strength(tmp_path):
    net, _, data = start()
    memory = learned(net)
    callback = HoldCallback(memory, budget=0.05, model=inner)
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trained(
        Automatic(net, lambda p: torch.optim.SGD(p, lr=0.05)), DataLoader(data, 4), callback, saver, max_epochs=6,
        enable_checkpointing=True,
    )  # fmt: skip
    states = torch.load(tmp_path / "epoch=4.ckpt", weights_only=True)["callbacks"]
    at_five = states["HoldCallback"]["strength"]
    assert at_five != 1.0
    began = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            began.append(again.handle.strength)

    again = HoldCallback(memory, budget=0.05, model=inner)
    other = Automatic(relu_mlp().double(), lambda p: torch.optim.SGD(p, lr=0.05))
    trained(other, DataLoader(data, 4), again, Look(), max_epochs=6, ckpt_path=tmp_path / "epoch=4.ckpt")
    assert began == [at_five]
    torch.testing.assert_close(weights(other.net), weights(net), rtol=0, atol=0)


def test_a_checkpoint_of_another_memory_is_refused(tmp_path):
    net, posterior, data = start()
    more = holdfast.diagonal_fisher(net, [tuple(data.tensors)], holdfast.categorical)
    other = holdfast.consolidate(posterior, net, more)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trained(Automatic(net), DataLoader(data, 8), held(posterior), saver, enable_checkpointing=True)
    with pytest.raises(holdfast.MismatchError) as said:
        trained(Automatic(net), DataLoader(data, 8), held(other), max_epochs=4, ckpt_path=saver.last_model_path)
    assert posterior.id in str(said.value)
    assert other.id in str(said.value)


def test_one_callback_holds_one_fit_after_another():
    """And nothing stays on the optimizer of the first."""
    net, posterior, data = start()
    twin = copy.deepcopy(net)
    for _ in range(2):
        plain(twin, posterior, DataLoader(data, 8))
    callback = held(posterior)
    for _ in range(2):
        trainer = trained(Automatic(net), DataLoader(data, 8), callback)
        assert not trainer.optimizers[0]._optimizer_step_pre_hooks
    torch.testing.assert_close(weights(net), weights(twin), rtol=0, atol=1e-6)


def test_an_error_in_training_is_the_one_that_is_seen():
    net, posterior, data = start()

    class Broken(Automatic):
        def training_step(self, batch):
            raise FloatingPointError("no loss today")

    optimizer = sgd(net.parameters())
    with pytest.raises(FloatingPointError, match="no loss today"):
        trained(Broken(net, lambda _: optimizer), DataLoader(data, 8), held(posterior))
    assert not optimizer._optimizer_step_pre_hooks


def test_a_memory_of_another_model_is_refused():
    net, posterior, data = start()
    with pytest.raises(holdfast.MismatchError, match=r"of `net`.*model=lambda module: module\.net"):
        trained(Automatic(net), DataLoader(data, 8), HoldCallback(posterior))
    wide = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    with pytest.raises(holdfast.MismatchError, match=r"another model: .*\(7, 5\).*\(6, 5\)"):
        trained(Automatic(wide), DataLoader(data, 8), held(posterior))
    with pytest.raises(holdfast.InertError, match=r"`other\.weight`"):
        trained(Automatic(nn.ModuleDict({"other": nn.Linear(2, 1)})), DataLoader(data, 8), held(posterior))
    with pytest.raises(holdfast.ArgumentError, match="got str"):
        HoldCallback("memory.safetensors")


def test_without_a_length_the_number_is_asked_for():
    net, posterior, data = start()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

    with pytest.raises(holdfast.ArgumentError, match=r"Stream does not tell how many examples.*num_data="):
        trained(Automatic(net), DataLoader(Stream(), 8), held(posterior))
    twin = plain(copy.deepcopy(net), posterior, DataLoader(data, 8))
    trained(Automatic(net), DataLoader(Stream(), 8), held(posterior, num_data=N))
    torch.testing.assert_close(weights(net), twin, rtol=0, atol=1e-6)
    with pytest.raises(holdfast.ArgumentError, match="> 0, got 0"):
        held(posterior, num_data=0)


@pytest.mark.parametrize("shift", [True, False])
def test_tokens_are_counted_by_their_labels(shift):
    likelihood = holdfast.tokens(shift=shift)
    ids = torch.randint(0, 9, (10, 5))
    labels = torch.where(torch.rand(10, 5) < 0.3, -100, ids)
    texts = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
    model = Tied().double()
    fisher = holdfast.diagonal_fisher(model, [{"input_ids": ids, "labels": ids}], likelihood)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    count = int(((labels[:, 1:] if shift else labels) != -100).sum())
    assert 0 < count < 40

    class Language(Automatic):
        def loss(self, batch):
            return likelihood.nll(self.net(batch["input_ids"]), batch["labels"]).sum() / 20

    ends = []
    for given in (None, count, 10):
        torch.manual_seed(3)  # the order of the texts must not depend on whether they were counted
        module = Language(copy.deepcopy(model))
        trained(module, DataLoader(texts, 3, shuffle=True), held(posterior, num_data=given))
        ends.append(weights(module))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    assert (ends[0] - ends[2]).abs().max() > 1e-4
    with pytest.raises(holdfast.ArgumentError, match=r"no `labels`.*num_data="):
        trained(Automatic(model), DataLoader(TensorDataset(ids, labels), 3), held(posterior))


@pytest.mark.parametrize("nothing", [{"max_steps": 0}, {"max_epochs": 0}, {"limit_train_batches": 0}], ids=str)
def test_a_fit_without_a_step_says_that_nothing_was_held(nothing):
    net, posterior, data = start()
    with pytest.raises(holdfast.InertError, match=r"made no step.*max_steps="):
        trained(Automatic(net), DataLoader(data, 8), held(posterior), **nothing)


def test_manual_optimization_that_never_steps_is_an_error():
    net, posterior, data = start()

    class Idle(Manual):
        def training_step(self, batch):
            self.manual_backward(self.loss(batch))

    with pytest.raises(holdfast.InertError, match="SGD never made a step"):
        trained(Idle(net), DataLoader(data, 8), held(posterior))


def as_replica(rank: int) -> None:
    """One of two processes that lightning finds itself in."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def replicas(rank: int, way) -> dict:
    as_replica(rank)
    net, posterior, data = start()
    callback = held(posterior)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank, shuffle=False))  # lightning's own shuffles
    logger = CSVLogger(sys.argv[1], name=way.__name__, version=0)
    trainer = trained(
        way(net),
        loader,
        callback,
        use_distributed_sampler=False,
        strategy="ddp",
        devices=2,
        logger=logger,
        log_every_n_steps=1,
    )
    return {
        "weights": weights(net), "steps": callback.handle.steps, "world": trainer.world_size,
        "rise": float(trainer.callback_metrics["holdfast/rise"]), "folder": logger.log_dir,
    }  # fmt: skip


def budgeted(rank: int) -> dict:
    """With BatchNorm, whose statistics each replica has its own of."""
    as_replica(rank)
    net, _, data = start()
    net = nn.Sequential(net[0], nn.BatchNorm1d(6).double(), *net[1:])
    memory = learned(net)
    strengths, before = [], []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            strengths.append(callback.handle.strength)
            if trainer.max_epochs > trainer.current_epoch + 1:  # and not yet finished
                before.append(weights(net))

    callback = HoldCallback(memory, budget=0.1, proximal=True, freeze_statistics=False, model=inner)
    module = Automatic(net, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    trained(module, DataLoader(data, 4), callback, Look(), strategy="ddp", devices=2, max_epochs=14)
    after = torch.cat([weights(net), net[1].running_mean, net[1].running_var])
    return {"strengths": strengths, "before": before[-1], "after": after, "rise": callback.handle.spent.rise}


def automatic(rank: int) -> dict:
    return replicas(rank, Automatic)


def manual(rank: int) -> dict:
    return replicas(rank, Manual)


SCENARIOS = {2: [automatic, manual, budgeted]}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


@pytest.mark.parametrize("way", ["automatic", "manual"])
def test_replicas_are_one_process_with_the_whole_batch(found, way):
    net, posterior, data = start()
    alone = plain(net, posterior, DataLoader(data, 8))
    value = holdfast.penalty(net, posterior).item()
    for rank in found[way]:
        assert rank["world"] == 2
        assert rank["steps"] == 6
        torch.testing.assert_close(rank["weights"], alone, rtol=0, atol=1e-6)
        assert rank["rise"] == pytest.approx(value / 40, rel=1e-5)
    logged = [float(row["holdfast/steps"]) for row in rows(found[way][0]["folder"])]
    assert logged == [1, 2, 3, 4, 5, 6]  # once, and not once a rank


def test_replicas_keep_a_budget_with_one_strength(found):
    one, other = found["budgeted"]
    assert len(set(one["strengths"])) > 3
    assert one["strengths"] == other["strengths"]
    for when in ("before", "after"):
        torch.testing.assert_close(one[when], other[when], rtol=0, atol=0)
    assert one["rise"] <= 0.1


def drawn(net, posterior):
    """What the old model answered to inputs that are drawn anew at every step."""
    inputs = holdfast.kept_inputs(torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))
    return holdfast.distill(net, posterior, inputs, holdfast.categorical, batch=4)


def halves(parameters):
    first, *rest = parameters
    return [torch.optim.Adam([first], lr=0.02), torch.optim.Adam(rest, lr=0.01)]


def gone_on(folder, epoch, terms=False, several=False, **how):
    """Weights after three epochs of four steps, straight and from the checkpoint at the end of one."""
    ends = []
    for way in ("straight", "again"):
        net, _, data = start()
        old = [tuple(data.tensors)]
        known = holdfast.kronecker_fisher(net, old, holdfast.categorical)
        posterior = holdfast.consolidate(holdfast.prior(net), net, known)
        if way == "again":
            net = relu_mlp().double()
        callback = held(posterior, terms=[drawn(net, posterior)] if terms else [], **how)
        saver = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
        path = None if way == "straight" else folder / f"epoch={epoch}.ckpt"
        trained(
            Manual(net, halves) if several else Automatic(net, lambda p: torch.optim.Adam(p, lr=0.01)),
            DataLoader(data, 6), callback, saver, max_epochs=3, enable_checkpointing=True, ckpt_path=path,
        )  # fmt: skip
        ends.append(weights(net))
    return ends


@pytest.mark.parametrize("how", [{"rotate": True}, {"every": 2}], ids=str)
def test_other_ways_to_pull_go_on_from_a_checkpoint_to_the_last_bit(how, tmp_path):
    straight, again = gone_on(tmp_path, 0, **how)
    assert torch.equal(straight, again)


@pytest.mark.parametrize(("epoch", "options"), [
    (0, {"every": 3}), (1, {"every": 3}), (0, {"terms": True}), (0, {"terms": True, "every": 3}),
    (0, {"every": 3, "several": True}), (0, {"terms": True, "every": 3, "several": True}),
], ids=str)  # fmt: skip
def test_pulls_in_use_and_draws_to_come_go_on_to_the_last_bit(epoch, options, tmp_path):
    straight, again = gone_on(tmp_path, epoch, **options)
    assert torch.equal(straight, again)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
