"""Trainers of transformers and TRL, held, against loops of one's own. Skipped where they are not installed."""

import copy
import functools
import math
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from oracles import flat

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from holdfast.integrations.transformers import HoldCallback, memory_from  # noqa: E402
from transformers_cases import (  # noqa: E402
    MODELS,
    Counted,
    N,
    T,
    arguments,
    batched,
    bert,
    images,
    labeled,
    llama,
    looped,
    start,
    statistics,
    texts,
    trained,
    weights,
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"proximal": False}, {"strength": 3.0, "proximal": False}], ids=str)
def test_a_held_trainer_is_a_held_loop(name, options, tmp_path):
    """Tokens are counted as the loop's are by hand, N sequences of T - 1 predictions; examples are N."""
    ends = []
    for way in ("trainer", "loop", "free"):
        model, posterior, data = start(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if way == "trainer":
            callback = HoldCallback(posterior, **options)
            trained(tmp_path, model, data, callback)
            assert 1e-3 < callback.handle.penalty < 10  # it moved, and was not blown up
        elif way == "loop":
            count = N * (T - 1) if posterior.unit == "token" else N
            with holdfast.hold(optimizer, model, posterior, num_data=count, unit=posterior.unit, **options):
                looped(optimizer, model.train(), data)
        else:
            looped(optimizer, model.train(), data)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    assert float((ends[0] - ends[2]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_accumulation_changes_nothing(name, tmp_path):
    ends = []
    for accumulate in (1, 4):
        model, posterior, data = start(name)
        sizes = {"per_device_train_batch_size": 8 // accumulate, "gradient_accumulation_steps": accumulate}
        trained(tmp_path, model, data, HoldCallback(posterior, strength=3.0, proximal=False), **sizes)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ignored", [0, 3])
def test_tokens_are_those_that_are_predicted(ignored, tmp_path):
    """Of every second sequence the first labels are ignored; of the others the first has nothing before it."""
    model, posterior, _ = start("llama")
    data = texts(8, ignored=ignored)
    trainer = trained(tmp_path, model, data, HoldCallback(posterior), logging_strategy="steps", logging_steps=1)
    line = trainer.state.log_history[-2]
    by_hand = sum(int(label) != -100 for row in data for label in row["labels"][1:])
    assert by_hand == N * (T - 1) - N // 2 * max(0, ignored - 1)
    assert line["holdfast/penalty"] / line["holdfast/loss"] == pytest.approx(by_hand)


def test_what_is_drawn_is_as_without_a_hold(tmp_path):
    """Counting tokens takes nothing from the generator of shuffling and dropout: strength 0 is no hold, to the bit."""
    ends = []
    for held in (True, False):
        model, posterior, data = start("llama", attention_dropout=0.2)
        callbacks = [HoldCallback(posterior, strength=0.0)] if held else []
        trained(tmp_path, model, data, *callbacks, train_sampling_strategy="random")
        ends.append(weights(model))
    assert torch.equal(*ends)


class Heard(transformers.TrainerCallback):
    """What a reporter such as TensorBoard's, which stands before a user's callbacks, gets to log."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.lines.append((state.global_step, dict(logs)))


def test_the_log_has_the_metrics_once_a_step_and_the_forecast_where_it_evaluates(tmp_path):
    model, posterior, data = start("bert")
    old = batched(labeled(7, 40), 40)
    answers = holdfast.kept_answers(model, old, holdfast.categorical)
    memory = holdfast.Memory.of(posterior, model, holdfast.kept_inputs(old[0]["input_ids"]), answers)
    heard = Heard()
    every = {"logging_strategy": "steps", "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    trainer = transformers.Trainer(
        model, arguments(tmp_path, **every), train_dataset=data, eval_dataset=data, callbacks=[HoldCallback(memory)]
    )
    trainer.callback_handler.callbacks.insert(1, heard)
    trainer.train()
    history = trainer.state.log_history
    assert [line["step"] for line in history if "holdfast/penalty" in line] == [2, 3, 4, 6]
    assert [line["step"] for line in history if "holdfast/forecast" in line] == [3, 6, 6]  # and in the last line
    assert [(line["step"], {k: v for k, v in line.items() if k != "step"}) for line in history] == heard.lines
    told = holdfast.forecast(model, memory)
    assert history[-1]["holdfast/forecast"] == pytest.approx(told.rise)
    assert history[-1]["holdfast/forecast_safe"] == pytest.approx(told.safe)
    last = next(line for line in history if line["step"] == 6 and "holdfast/penalty" in line)
    assert last["holdfast/penalty"] == pytest.approx(holdfast.penalty(model, posterior).item())


@pytest.mark.parametrize(("name", "restore"), [("llama", False), ("bert", True)])
def test_resumed_to_the_bit_with_the_same_memory_alone(name, restore, tmp_path):
    """AdamW, dropout, shuffled data, a rate that falls; saved at the third of eight steps."""
    more = {"dropout": 0.2} if name == "bert" else {"attention_dropout": 0.2}
    saved = {
        "optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "save_strategy": "steps",
        "save_steps": 3, "max_steps": 8, "train_sampling_strategy": "random",
        "restore_callback_states_from_checkpoint": restore,
    }  # fmt: skip
    model, posterior, data = start(name, **more)
    trained(tmp_path, model, data, HoldCallback(posterior), **saved)
    straight, checkpoint = weights(model), tmp_path / "checkpoint-3"
    torch.manual_seed(123)
    again, _, _ = start(name, seed=3, **more)
    trained(tmp_path / "again", again, data, HoldCallback(posterior), resume=str(checkpoint), **saved)
    assert torch.equal(weights(again), straight)
    # One that had ended is not an error: there is nothing left to hold.
    trained(tmp_path / "ended", again, data, HoldCallback(posterior), resume=str(tmp_path / "checkpoint-8"), **saved)
    assert torch.equal(weights(again), straight)
    other = holdfast.Posterior(posterior.mean, 2 * posterior.precision)
    with pytest.raises(holdfast.MismatchError, match=f"hold to the memory {posterior.id}, .* holds to {other.id}"):
        trained(tmp_path / "other", again, data, HoldCallback(other), resume=str(checkpoint), **saved)


local = pytest.mark.filterwarnings("ignore:a posterior alone has no probes:holdfast.HoldfastWarning")
far = pytest.mark.filterwarnings("ignore:to stay within:holdfast.HoldfastWarning")


def on_disk(folder, model):
    """A checkpoint's weights, in the model's order."""
    found = load_file(folder / "model.safetensors")
    return flat({name: found[name] for name, _ in model.named_parameters()})


class Stop(transformers.TrainerCallback):
    """Stops after so many steps, and saves then, as a limit on time does; or after an evaluation."""

    def __init__(self, at, evaluation=False):
        self.at, self.evaluation = at, evaluation

    def stop(self, state, control):
        if state.global_step == self.at:
            control.should_training_stop = control.should_save = True

    def on_step_end(self, args, state, control, **kwargs):
        if not self.evaluation:
            self.stop(state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        if self.evaluation:
            self.stop(state, control)


@local
@far
@pytest.mark.parametrize(("callbacks", "more", "last"), [
    ([], {"save_strategy": "steps", "save_steps": 4}, 6),
    ([], {"save_strategy": "epoch", "max_steps": 8}, 8),
    ([Stop(3)], {"save_strategy": "steps", "save_steps": 3}, 3),
    ([Stop(2, evaluation=True)], {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
                                  "save_steps": 2}, 2),
], ids=["steps", "epoch", "stopped", "stopped-by-evaluation"])  # fmt: skip
def test_a_budget_is_finished_before_the_last_checkpoint(callbacks, more, last, tmp_path):
    model, posterior, data = start("bert")
    budget = HoldCallback(posterior, budget=0.004, strength=1e-3)
    trained(tmp_path, model, data, budget, *callbacks, evaluated=data, learning_rate=0.5, **more)
    assert budget.handle.spent.kept < 0.9  # there was something to finish
    rise = holdfast.penalty(model, posterior).item() / posterior.num_data
    assert 0.0035 < rise <= 0.004
    assert max(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == last
    assert torch.equal(on_disk(tmp_path / f"checkpoint-{last}", model), weights(model))


@local
@far
def test_the_best_weights_are_brought_inside_their_budget_too(tmp_path):
    model, posterior, data = start("bert")
    budget = HoldCallback(posterior, budget=0.004, strength=1e-3)
    best = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.5,
    }  # fmt: skip
    trainer = trained(tmp_path, model, data, budget, evaluated=data, **best)
    assert trainer.state.best_global_step == 4
    assert holdfast.penalty(model, posterior).item() / posterior.num_data <= 0.004


@local
@far
def test_a_budget_is_resumed_to_the_bit(tmp_path):
    """The strength follows every fifth step, and 7 is not one of them."""
    saved = {"save_strategy": "steps", "save_steps": 7, "max_steps": 12}
    model, posterior, data = start("bert")
    straight = HoldCallback(posterior, budget=0.02, strength=0.1)
    trained(tmp_path, model, data, straight, **saved)
    again, resumed = start("bert", seed=3)[0], HoldCallback(posterior, budget=0.02, strength=0.1)
    trained(tmp_path / "again", again, data, resumed, resume=str(tmp_path / "checkpoint-7"), **saved)
    assert torch.equal(weights(again), weights(model))
    assert resumed.handle.strength == straight.handle.strength != 0.1


def test_a_term_beside_the_memory_pulls_too(tmp_path):
    """Two posteriors, the second among the terms, are as one that is their sum."""
    ends = []
    for way in ("beside", "sum"):
        model, posterior, data = start("bert")
        beside = holdfast.prior(model, precision=3.0)
        whole = holdfast.Posterior(posterior.mean, posterior.precision + beside.precision)
        known, terms = (posterior, [beside]) if way == "beside" else (whole, [])
        held = HoldCallback(known, terms=terms, proximal=False)
        trained(tmp_path, model, data, held)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_a_memory_of_the_weights_holds_a_trainer_with_lora(tmp_path):
    peft = pytest.importorskip("peft")
    weight_space = pytest.importorskip("holdfast.integrations.peft").weight_space
    ends = []
    for way in ("trainer", "loop", "free"):
        model, posterior, data = start("llama")
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).double()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        term = weight_space(model, posterior)
        if way == "trainer":
            trainer = trained(tmp_path, model, data, HoldCallback(term, strength=10.0))
            assert trainer.state.log_history[-1]["holdfast/penalty"] > 1e-2
        else:
            strength = 10.0 if way == "loop" else 0.0
            with holdfast.hold(optimizer, model, term, num_data=N * (T - 1), unit="token", strength=strength):
                looped(optimizer, model.train(), data)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    assert (ends[0] - ends[2]).abs().max() > 1e-4


def t5(**more):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    config = transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config).double()


def shifted(batch):
    start = torch.zeros_like(batch["labels"][:, :1])
    return {**batch, "decoder_input_ids": torch.cat([start, batch["labels"].clamp(min=0)[:, :-1]], 1)}


MADE = {
    "llama": (llama, functools.partial(texts, ignored=3), holdfast.tokens(shift=True), lambda batch: batch),
    "bert": (bert, labeled, holdfast.categorical, lambda batch: batch),
    "t5": (t5, functools.partial(texts, ignored=3), holdfast.tokens(shift=False), shifted),
}


@pytest.mark.parametrize("fisher", [None, holdfast.diagonal_fisher], ids=["default", "diagonal"])
@pytest.mark.parametrize("name", MADE)
def test_a_memory_from_a_trainer_is_the_fisher_of_its_batches(name, fisher, tmp_path):
    """In the dataset's order, by its collator, without a column that the model does not take."""
    make, data, likelihood, prepared = MADE[name]
    model, rows = make(), data(5)
    odd = [{**row, "length": 3} for row in rows]
    trainer = transformers.Trainer(
        model, arguments(tmp_path, train_sampling_strategy="random"), train_dataset=odd,
    )  # fmt: skip
    before = torch.get_rng_state(), model.training
    memory = memory_from(trainer, **({} if fisher is None else {"fisher": fisher}))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert model.training == before[1]
    by_hand = (fisher or holdfast.kronecker_fisher)(model, [prepared(each) for each in batched(rows, 4)], likelihood)
    assert memory.precision.tensors.keys() == by_hand.tensors.keys()
    for key, value in by_hand.tensors.items():
        torch.testing.assert_close(memory.precision.tensors[key], value, rtol=1e-9, atol=1e-15)
    counted = {"llama": N * (T - 1) - N // 2 * 2, "bert": N, "t5": N * T - N // 2 * 3}
    assert memory.num_data == counted[name]
    for key, mean in memory.mean.items():
        assert torch.equal(mean, dict(model.named_parameters())[key])


def measured(seed, count=N, labels=1):
    """Texts with one number each, or several."""
    numbers = torch.randn(count, labels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = zip(texts(seed, count), numbers.squeeze(1), strict=True)
    return [{"input_ids": row["input_ids"], "labels": number} for row, number in rows]


@pytest.mark.parametrize("labels", [1, 2])
def test_a_regression_is_remembered_with_what_its_forecast_needs(labels, tmp_path):
    """transformers squeezes the one column of outputs for its loss: labels are (batch,), and each has its example."""
    torch.manual_seed(0)
    model, rows = bert(num_labels=labels, problem_type="regression"), measured(5, 40, labels)
    trainer = trained(tmp_path, model, rows)
    with pytest.raises(holdfast.ArgumentError, match=r"not told by its class.*holdfast\.gaussian\(scale\)"):
        memory_from(trainer)
    likelihood, (whole,) = holdfast.gaussian(0.5), batched(rows, 40)
    probes = holdfast.kept_inputs(whole["input_ids"])
    memory = memory_from(
        trainer, likelihood=likelihood, fisher=functools.partial(holdfast.diagonal_fisher, targets="observed"),
        probes=probes,
    )  # fmt: skip
    # ½((y − f)/σ)² of transformers' own loss, the mean of (y − f)² over examples and outputs, for one at a time.
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batched(rows, 1):
        loss = model(**batch).loss * labels / (2 * 0.5**2)
        for name, grad in zip(squares, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            squares[name] += grad.square()
    for name, square in squares.items():
        torch.testing.assert_close(memory.precision.entries[name], square)
    assert memory.answers.outputs.shape == memory.answers.labels.shape == (40, labels)
    with torch.no_grad():
        before = model(**whole).loss
        model.classifier.bias += 0.5
        risen = float(model(**whole).loss - before) * labels / (2 * 0.5**2)
    told = holdfast.forecast(model, memory)
    assert told.probes.rise == pytest.approx(risen)  # all outputs move alike, so that probes tell it exactly


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_fishers_own_forward_is_used(squeezed, tmp_path):
    """Outputs three times as large have nine times the Fisher; the labels are then as the collator gives them."""
    model, rows = bert(num_labels=1 if squeezed else 2, problem_type="regression"), measured(5, labels=2 - squeezed)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=rows)

    def forward(model, batch):
        found = 3 * model(input_ids=batch["input_ids"]).logits
        return found.squeeze(1) if squeezed else found

    given = functools.partial(holdfast.diagonal_fisher, forward=forward)
    plain, ours = (
        memory_from(trainer, likelihood=holdfast.gaussian(), fisher=each) for each in (holdfast.diagonal_fisher, given)
    )
    for name, entries in plain.precision.entries.items():
        torch.testing.assert_close(ours.precision.entries[name], 9 * entries)


def test_a_memory_of_a_part_stands_for_all(tmp_path):
    model = bert()
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=labeled(5, 64))
    whole, part = (memory_from(trainer, fisher=holdfast.diagonal_fisher, limit=limit) for limit in (None, 32))
    assert part.num_data == whole.num_data == 64
    ratio = flat(part.precision.entries).sum() / flat(whole.precision.entries).sum()
    assert 0.8 < ratio < 1.25


def test_task_after_task(tmp_path):
    """The README's program: the second memory has both tasks, and says so where the first is left out."""
    model = bert()
    trainer = trained(tmp_path, model, labeled(5))
    memory = memory_from(trainer)
    trainer = trained(tmp_path, model, labeled(6), HoldCallback(memory))
    both = memory_from(trainer, memory)
    assert both.num_data == 2 * N
    assert both.posterior.parents == (memory.posterior.id,)
    with pytest.warns(holdfast.HoldfastWarning, match="held to a memory that is not given"):
        assert memory_from(trainer).num_data == N


@far
def test_a_memory_of_texts_has_the_models_own_in_their_place(tmp_path):
    """And is enough for a budget that is told by probes, and for a forecast in the log."""
    model = llama()
    rows = texts(5, ignored=3)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=rows)
    state = torch.get_rng_state()
    memory = memory_from(trainer, fisher=holdfast.diagonal_fisher, probes=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert memory.probes.shape == (T,)
    assert memory.probes.unit == memory.answers.unit == "token"
    assert memory.probes.num_data == memory.answers.num_data == memory.num_data == N * (T - 1) - N // 2 * 2
    given = {tuple(row["input_ids"].tolist()) for row in rows}
    assert not {tuple(text.tolist()) for text in memory.probes.inputs} & given
    assert {int(text[0]) for text in memory.probes.inputs} <= {int(row["input_ids"][0]) for row in rows}
    plain = memory_from(trainer, fisher=holdfast.diagonal_fisher)
    assert plain.posterior.id == memory.posterior.id
    assert plain.probes is None
    callback = HoldCallback(memory, budget=0.02, strength=1e-3)
    trainer = trained(tmp_path, model, texts(8), callback, learning_rate=0.5, max_steps=20)
    assert callback.handle.spent.by == "probes"
    assert 0.01 < callback.handle.spent.rise <= 0.02
    assert trainer.state.log_history[-1]["holdfast/forecast"] == pytest.approx(holdfast.forecast(model, memory).rise)
    # The next task's texts are as long as the first one's: they go on together.
    longer = [{key: torch.cat([value, value]) for key, value in row.items()} for row in texts(9)]
    both = memory_from(
        transformers.Trainer(model, arguments(tmp_path), train_dataset=longer), memory, probes=True,
        fisher=holdfast.diagonal_fisher,
    )  # fmt: skip
    assert both.probes.shape == (T,)
    assert both.probes.num_data == pytest.approx(both.num_data)
    assert both.answers.num_data == both.num_data == memory.num_data + N * (2 * T - 1)


def test_texts_that_are_padded_begin_with_their_first_word(tmp_path):
    rows = [
        {"input_ids": torch.tensor([0, 0, 7 + n, 3, 4]), "attention_mask": torch.tensor([0, 0, 1, 1, 1]),
         "labels": torch.tensor([-100, -100, 7 + n, 3, 4])}
        for n in range(4)
    ]  # fmt: skip
    trainer = transformers.Trainer(llama(), arguments(tmp_path), train_dataset=rows)
    memory = memory_from(trainer, fisher=holdfast.diagonal_fisher, probes=True)
    assert {int(text[0]) for text in memory.probes.inputs} == {7, 8, 9, 10}


def test_a_memory_of_pictures_has_two_moments_in_their_place(tmp_path):
    model = start("resnet")[0]
    rows = images(5, 64)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=rows)
    memory = memory_from(trainer, fisher=holdfast.diagonal_fisher, probes=True, limit=32)
    assert memory.probes.shape == (1, 8, 8)
    assert memory.probes.num_data == memory.answers.num_data == memory.num_data == 64
    moved = copy.deepcopy(model)
    assert holdfast.forecast(moved, memory).probes.rise == pytest.approx(0, abs=1e-6)
    callback = HoldCallback(memory, budget=0.05, freeze_statistics=True)
    trained(tmp_path, model, images(8), callback)
    assert callback.handle.spent.by == "probes"


def test_a_classifier_with_more_labels_than_before_is_remembered_beside_what_it_was(tmp_path):
    old, model = bert(), bert(num_labels=5)
    ids = torch.stack([row["input_ids"] for row in labeled(5)])
    trainer = transformers.Trainer(old, arguments(tmp_path), train_dataset=labeled(5))
    memory = memory_from(trainer, fisher=holdfast.diagonal_fisher, probes=holdfast.kept_inputs(ids)).expanded(model)
    holdfast.restore_(model, memory)
    rows = [{**row, "labels": row["labels"] % 2 + 3} for row in labeled(6)]
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=rows)
    given = holdfast.kept_inputs(torch.stack([row["input_ids"] for row in rows]))
    both = memory_from(trainer, memory, fisher=holdfast.diagonal_fisher, probes=given)
    assert both.answers.num_data == both.probes.num_data == both.num_data == 2 * N
    assert [part.outputs.shape[1] for part in both.answers.alike] == [3, 5]
    assert holdfast.forecast(model, both).probes.rise == 0

    def longer(*args, **more):
        raise AssertionError("the longer pass")

    unlike = torch.zeros(4, T + 1, dtype=torch.long)
    with pytest.raises(holdfast.MismatchError, match="shape"):  # before it
        memory_from(trainer, memory, fisher=longer, probes=holdfast.kept_inputs(unlike))


def test_of_other_inputs_some_must_be_given(tmp_path):
    model = bert()
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=labeled(5))
    with pytest.raises(holdfast.ArgumentError, match=r"stands for the inputs \(`input_ids`\) of BertFor.*kept_inputs"):
        memory_from(trainer, probes=True)
    given = holdfast.kept_inputs(torch.stack([row["input_ids"] for row in labeled(5)]))
    memory = memory_from(trainer, fisher=holdfast.diagonal_fisher, probes=given)
    assert memory.probes is given
    assert memory.answers.num_data == N
    assert holdfast.forecast(model, memory).probes is not None
    with pytest.raises(holdfast.ArgumentError, match="probes is True, or probes such as"):
        memory_from(trainer, probes=torch.zeros(3))


class Copied(transformers.TrainerCallback):
    """Trains with a copy of the optimizer, which has lost its hooks."""

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        optimizer.step = copy.deepcopy(optimizer.optimizer).step


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
def test_a_trainer_that_steps_with_another_optimizer_is_told_so(tmp_path):
    model, posterior, data = start("bert")
    with pytest.raises(holdfast.InertError, match="a copy of one that is held"):
        trained(tmp_path, model, data, HoldCallback(posterior), Copied())


class Streamed(torch.utils.data.IterableDataset):
    def __init__(self, rows=()):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_what_does_not_fit_is_said(tmp_path):
    model, posterior, data = start("bert")
    with pytest.raises(holdfast.MismatchError, match="another model"):
        trained(tmp_path, bert(num_labels=5), data, HoldCallback(posterior))
    with pytest.raises(holdfast.ArgumentError, match=r"Streamed has no length, .* Give num_data="):
        trained(tmp_path, model, Streamed(data), HoldCallback(posterior))
    with pytest.raises(holdfast.ArgumentError, match=r"got str.* a file by holdfast.load"):
        HoldCallback("memory.safetensors")
    counts_tokens = start("llama")[1]
    with pytest.raises(holdfast.ArgumentError, match=r"labels of shape \(4,\) \(torch.int64\). Give num_data="):
        trained(tmp_path, model, data, HoldCallback(counts_tokens))
    trainer = transformers.Trainer(bert(num_labels=1), arguments(tmp_path), train_dataset=data)
    with pytest.raises(holdfast.ArgumentError, match=r"give likelihood=, such as holdfast.gaussian"):
        memory_from(trainer)
    with pytest.raises(holdfast.ArgumentError, match="has no length"):
        memory_from(transformers.Trainer(model, arguments(tmp_path), train_dataset=Streamed(data)))
    with pytest.raises(holdfast.ArgumentError, match="limit is how many"):
        memory_from(trainer, limit=0)


def test_a_training_left_by_an_error_is_no_hold_on_the_next(tmp_path):
    class Broken(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    ends = []
    for broken in (True, False):
        model, posterior, data = start("bert")
        begun = {name: value.clone() for name, value in model.state_dict().items()}
        trainer = transformers.Trainer(
            model, arguments(tmp_path), train_dataset=data, callbacks=[HoldCallback(posterior)]
        )
        if broken:
            trainer.add_callback(Broken())
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            trainer.pop_callback(Broken)
            model.load_state_dict(begun)
        trainer.train()
        ends.append(weights(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_trl_is_held_as_a_loop_is(accumulate, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(30)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    ends = []
    for way in ("trl", "loop"):
        model, posterior, _ = start("llama")
        rows = texts(8, ignored=3)
        if way == "trl":
            plain = arguments(tmp_path).to_dict()
            sizes = {"per_device_train_batch_size": 4 // accumulate, "gradient_accumulation_steps": accumulate}
            keys = ("output_dir", "use_cpu", "report_to", "disable_tqdm", "save_strategy", "optim", "learning_rate",
                    "lr_scheduler_type", "max_grad_norm", "max_steps", "train_sampling_strategy", "logging_strategy",
                    "dataloader_pin_memory")  # fmt: skip
            config = trl.SFTConfig(
                **{key: plain[key] for key in keys}, **sizes, bf16=False, gradient_checkpointing=False
            )
            data = datasets.Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in rows])
            trainer = trl.SFTTrainer(
                model, config, train_dataset=data, processing_class=tokenizer, callbacks=[HoldCallback(posterior)]
            )
            trainer.train()
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            count = N * (T - 1) - N // 2 * 2
            with holdfast.hold(optimizer, model, posterior, num_data=count, unit="token"):
                looped(optimizer, model.train(), rows)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate_alone(when, accumulate):
    """A manual loop, held before or after `prepare`, is the loop without accelerate."""
    ends = []
    for way in ("accelerate", "plain"):
        model, posterior, data = start("bert")
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        held = functools.partial(holdfast.hold, posterior=posterior, num_data=N)
        if way == "plain":
            with held(optimizer, model):
                for batch in batched(data, 4 * accumulate):
                    optimizer.zero_grad()
                    model(**batch).loss.backward()
                    optimizer.step()
        else:
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
            handle = held(optimizer, model) if when == "before" else None
            model, optimizer = accelerator.prepare(model, optimizer)
            handle = handle or held(optimizer, model)
            for batch in batched(data, 4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            assert handle.steps == math.ceil(N / 4 / accumulate)
            handle.remove()
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


def test_statistics_are_warned_of_or_kept(tmp_path):
    """BatchNorm in a Trainer: left alone they drift, which is said; kept, the model is the loop's that keeps them."""
    model, posterior, data = start("resnet")
    before = statistics(model)
    with pytest.warns(holdfast.HoldfastWarning, match="statistics of `resnet.* are not parameters"):
        trained(tmp_path, model, data, HoldCallback(posterior))
    assert (statistics(model) - before).abs().max() > 1e-3
    model, posterior, data = start("resnet")
    callback = HoldCallback(posterior, freeze_statistics=True, proximal=False)
    trained(tmp_path, model, data, callback, evaluated=data, eval_strategy="steps", eval_steps=2)
    assert torch.equal(statistics(model), before)
    twin, _, _ = start("resnet")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    with holdfast.hold(optimizer, twin, posterior, num_data=N, freeze_statistics=True, proximal=False):
        looped(optimizer, twin.train(), data)
    torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=1e-6)
    model.train()(torch.randn(4, 1, 8, 8).double())  # let go
    assert not torch.equal(statistics(model), before)


def test_a_dataset_that_is_read_in_order_is_counted_and_not_drawn_from(tmp_path):
    model = bert()
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=Counted(labeled(5)))
    assert memory_from(trainer, fisher=holdfast.diagonal_fisher).num_data == N
    with pytest.raises(holdfast.ArgumentError, match=r"Counted is read in its order, .*: no limit="):
        memory_from(trainer, limit=4)


def drawn(model, posterior):
    """What the old model answered to inputs that are drawn anew at every step."""
    inputs = holdfast.kept_inputs(torch.stack([row["input_ids"] for row in labeled(11)]))
    return holdfast.distill(
        model, posterior, inputs, holdfast.categorical, batch=4, forward=lambda m, ids: m(input_ids=ids).logits
    )


def gone_on(folder, at, terms=False, named=str, **how):
    """Weights after twelve steps, straight and from the checkpoint at a step."""
    saved = {
        "optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": at, "max_steps": 12,
    }  # fmt: skip
    ends = []
    for way in ("straight", "again"):
        model, posterior, data = start("bert")
        if way == "again":
            model = start("bert", seed=3)[0]
        callback = HoldCallback(posterior, terms=[drawn(model, posterior)] if terms else [], **how)
        resume = None if way == "straight" else named(folder / "straight" / f"checkpoint-{at}")
        trained(folder / way, model, data, callback, resume=resume, **saved)
        ends.append(weights(model))
    return ends


@pytest.mark.parametrize("how", [{"rotate": True}, {"every": 3}], ids=str)
@pytest.mark.parametrize("at", [3, 6])
def test_other_ways_to_pull_are_resumed_to_the_bit(how, at, tmp_path):
    straight, again = gone_on(tmp_path, at, **how)
    assert torch.equal(straight, again)


@pytest.mark.parametrize(("at", "options"), [
    (4, {"every": 3}), (5, {"every": 3}), (4, {"terms": True}), (4, {"terms": True, "every": 3}),
], ids=str)  # fmt: skip
def test_pulls_in_use_and_draws_to_come_are_resumed_to_the_bit(at, options, tmp_path):
    straight, again = gone_on(tmp_path, at, **options)
    assert torch.equal(straight, again)
    assert (tmp_path / "straight" / f"checkpoint-{at}" / "holdfast.pt").is_file()


def test_a_checkpoint_that_is_named_by_a_path_has_its_file_too(tmp_path):
    straight, again = gone_on(tmp_path, 4, every=3, named=pathlib.Path)
    assert torch.equal(straight, again)


def test_a_checkpoint_that_lost_its_file_says_so(tmp_path):
    model, posterior, data = start("bert")
    saved = {"save_strategy": "steps", "save_steps": 4}
    trained(tmp_path, model, data, HoldCallback(posterior, every=3), **saved)
    (tmp_path / "checkpoint-4" / "holdfast.pt").unlink()
    with pytest.warns(holdfast.HoldfastWarning, match=r"has lost its holdfast\.pt"):
        trained(
            tmp_path / "again", model, data, HoldCallback(posterior, every=3), resume=str(tmp_path / "checkpoint-4")
        )


def test_a_checkpoint_of_another_memory_is_refused_with_every_too(tmp_path):
    model, posterior, data = start("bert")
    trained(tmp_path, model, data, HoldCallback(posterior, every=3), save_strategy="steps", save_steps=4)
    other = holdfast.Posterior(posterior.mean, 2 * posterior.precision)
    with pytest.raises(holdfast.MismatchError, match=f"hold to the memory {posterior.id}, .* holds to {other.id}"):
        trained(tmp_path, model, data, HoldCallback(other, every=3), resume=str(tmp_path / "checkpoint-4"))
