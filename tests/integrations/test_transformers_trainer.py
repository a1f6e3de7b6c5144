"""Trainers of transformers and TRL, held, against loops of one's own. Skipped where they are not installed."""

import copy
import functools
import itertools
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from oracles import flat

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from holdfast.integrations.transformers import HoldCallback, memory_from  # noqa: E402

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
N = 16  # sequences of new data
T = 6


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SMALL, **more)).double()


def bert(dropout=0.0, **more):
    config = transformers.BertConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **{**SMALL, "num_labels": 3, **more}
    )
    return transformers.BertForSequenceClassification(config).double()


def texts(seed, count=N, ignored=0):
    """Sequences with labels; of some, the first `ignored` labels do not count."""
    ids = torch.randint(0, 30, (count, T), generator=torch.Generator().manual_seed(seed))
    return [
        {"input_ids": row, "labels": torch.where(torch.arange(T) < ignored * (n % 2), -100, row)}
        for n, row in enumerate(ids)
    ]


def labeled(seed, count=N):
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"].sum() % 3} for row in texts(seed, count)]


MODELS = {
    "llama": (llama, texts, holdfast.tokens(shift=True), holdfast.diagonal_fisher),
    "bert": (bert, labeled, holdfast.categorical, holdfast.kronecker_fisher),
}


def batched(rows, size):
    parts = [rows[n : n + size] for n in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def start(name, seed=0, **more):
    """A model, what it knows of old data, and new data."""
    make, data, likelihood, fisher = MODELS[name]
    torch.manual_seed(seed)
    model = make(**more)
    found = fisher(model, batched(data(seed + 7, 40), 8), likelihood)
    # A fresh model knows little: its Fisher is made to hold as if there had been more data.
    return model, holdfast.consolidate(holdfast.prior(model), model, 10 * found), data(seed + 8)


def arguments(folder, **more):
    usual = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 6,
        "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**usual, **more})


class Trainer(transformers.Trainer):
    """Divides the loss of a classifier over the batches of a step, which 5.22 leaves out for those that ignore
    num_items_in_batch (BERT's): the data's own gradient would be k times too large."""

    @property
    def loss_is_scaled_for_ga(self):
        return not isinstance(self.model, transformers.BertForSequenceClassification)


def trained(folder, model, data, *callbacks, resume=None, evaluated=None, **more):
    trainer = Trainer(
        model, arguments(folder, **more), train_dataset=data, eval_dataset=evaluated, callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model):
    return flat({name: p.detach() for name, p in model.named_parameters()})


def looped(optimizer, model, data, steps=6, size=4):
    for _, batch in zip(range(steps), itertools.cycle(batched(data, size)), strict=False):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"strength": 3.0, "proximal": False}], ids=str)
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
        held = HoldCallback(posterior, terms=[beside]) if way == "beside" else HoldCallback(whole)
        trained(tmp_path, model, data, held)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


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


class Copied(transformers.TrainerCallback):
    """Trains with a copy of the optimizer, which has lost its hooks."""

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        optimizer.step = copy.deepcopy(optimizer.optimizer).step


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
def test_a_trainer_that_steps_with_another_optimizer_is_told_so(tmp_path):
    model, posterior, data = start("bert")
    with pytest.raises(holdfast.InertError, match="never made a step while it was held"):
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
