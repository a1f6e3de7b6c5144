"""transformers' Trainer: a memory from one training set, and one callback that holds to it on the next.

A model that is sure of its texts has little curvature to be held by: it is held by its answers too, on text that it
wrote itself while the old texts were there.
"""

import copy
import tempfile

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import holdfast
from holdfast.integrations.transformers import HoldCallback, memory_from

WORDS = 24


def counting(by: int, seed: int) -> list[dict[str, Tensor]]:
    """Texts that count up by so much: the model has to see by how much, and to go on."""
    starts = torch.randint(0, WORDS, (400, 1), generator=torch.Generator().manual_seed(seed))
    texts = (starts + by * torch.arange(8)) % WORDS
    return [{"input_ids": text, "labels": text} for text in texts]


def trained(model: LlamaForCausalLM, data: list[dict[str, Tensor]], *callbacks: HoldCallback) -> Trainer:
    args = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=50, num_train_epochs=10, learning_rate=5e-3, weight_decay=0.0,
        lr_scheduler_type="constant", logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return trainer


def answers(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


@torch.no_grad()
def percent(model: LlamaForCausalLM, data: list[dict[str, Tensor]]) -> float:
    ids = torch.stack([row["input_ids"] for row in data])
    said = answers(model.eval(), ids)[:, 2:-1].argmax(-1)  # from the third word on it can be known
    return 100 * (said == ids[:, 3:]).double().mean().item()


transformers.set_seed(0)
old, new = counting(1, seed=1), counting(2, seed=2)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))

trainer = trained(model, old)
memory = memory_from(trainer, probes=True)  # in tokens, by the trainer's own collator

free, held = copy.deepcopy(model), model
trained(free, new)
own = holdfast.distill(held, memory, likelihood=holdfast.tokens(shift=True), forward=answers)
trained(held, new, HoldCallback(memory, terms=[own]))
print(f"free: old texts {percent(free, old):.0f} %, new texts {percent(free, new):.0f} %")
print(f"held: old texts {percent(held, old):.0f} %, new texts {percent(held, new):.0f} %")
