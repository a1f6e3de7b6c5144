"""Small models of transformers with what they know and new data, and a Trainer to train them."""

import itertools

import torch
import transformers

import holdfast
from oracles import flat

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


def resnet(**more):
    """With BatchNorm."""
    sizes = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=3, **sizes, **more)
    ).double()  # fmt: skip


def images(seed, count=N):
    """The brightest of three bands is the class."""
    pixels = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bands = pixels[:, 0, :6].reshape(count, 3, -1).mean(2)
    return [{"pixel_values": row, "labels": band.argmax()} for row, band in zip(pixels, bands, strict=True)]


MODELS = {
    "llama": (llama, texts, holdfast.tokens(shift=True), holdfast.diagonal_fisher),
    "bert": (bert, labeled, holdfast.categorical, holdfast.kronecker_fisher),
}

OTHERS = {"resnet": (resnet, images, holdfast.categorical, holdfast.kronecker_fisher)}


def batched(rows, size):
    parts = [rows[n : n + size] for n in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def start(name, seed=0, **more):
    """A model, what it knows of old data, and new data."""
    make, data, likelihood, fisher = {**MODELS, **OTHERS}[name]
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
    num_items_in_batch (BERT's): the data's own gradient would be k times too large. So it would be on k processes,
    where average_tokens_across_devices is not turned off."""

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


def statistics(model):
    return flat({name: value.double() for name, value in model.named_buffers()})


class Counted(torch.utils.data.IterableDataset):
    """Read in its order, of known length: of such a dataset every process may have a share as its loader's own."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)
