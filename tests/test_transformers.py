"""Models as people have them, small and random, against a loop of one. Skipped where transformers is not installed."""

import pytest
import torch

import holdfast
from holdfast.params import all_parameters, trainable

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 60, (4, 10), generator=torch.Generator().manual_seed(0))
LABELS = torch.where((torch.arange(4).view(4, 1) == 1) & (torch.arange(10) > 5), -100, IDS)
CLASSES = torch.tensor([0, 1, 2, 1])
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2():
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2, **special)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, num_key_value_heads=1, **SMALL))


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=60, num_labels=3, **SMALL))


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SMALL)
    return transformers.ViTForImageClassification(config)


CAUSAL = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": LABELS}
MODELS = {
    "gpt2": (gpt2, CAUSAL, holdfast.tokens(shift=True)),
    "llama": (llama, CAUSAL, holdfast.tokens(shift=True)),
    "bert": (bert, {**CAUSAL, "labels": CLASSES}, holdfast.categorical),
    "vit": (vit, {"pixel_values": torch.randn(4, 3, 16, 16).double(), "labels": CLASSES}, holdfast.categorical),
}


def squares_one_by_one(model, batch, likelihood):
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(4):
        row = {key: value[n : n + 1] for key, value in batch.items()}
        model.zero_grad()
        likelihood.nll(model(**{k: v for k, v in row.items() if k != "labels"}).logits, row["labels"]).sum().backward()
        for name, parameter in model.named_parameters():
            total[name] += 0 if parameter.grad is None else parameter.grad.square()
    model.zero_grad()
    return total


@pytest.mark.parametrize("name", MODELS)
def test_a_fisher_from_a_collators_dict_a_hold_and_a_file(name, tmp_path):
    make, batch, likelihood = MODELS[name]
    torch.manual_seed(1)
    model = make().double()
    fisher = holdfast.diagonal_fisher(model, [batch], likelihood, targets="observed")
    for parameter, expected in squares_one_by_one(model, batch, likelihood).items():
        torch.testing.assert_close(fisher.entries[parameter], expected, rtol=1e-9, atol=1e-15)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with holdfast.hold(optimizer, model, posterior, num_data=100, unit=likelihood.unit) as handle:
        for _ in range(3):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        assert handle.penalty > 0
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    loaded = holdfast.load(tmp_path / "memory.safetensors")
    assert holdfast.penalty(model, loaded).item() == pytest.approx(handle.penalty)
    assert loaded.num_data == (32 if likelihood.unit == "token" else 4)
    assert loaded.posterior.ties == ({"transformer.wte.weight": ("lm_head.weight",)} if name == "gpt2" else {})


def test_adapters_keep_the_names_of_the_model_they_adapt():
    peft = pytest.importorskip("peft")
    model = gpt2()
    names = set(all_parameters(model))
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, config).double()
    assert names <= set(all_parameters(adapted))
    adapters = {f"transformer.h.{i}.attn.c_attn.lora_{ab}.weight" for i in (0, 1) for ab in "AB"}
    assert set(trainable(adapted)) == adapters | {"transformer.ln_f.weight", "transformer.ln_f.bias"}
    batches, likelihood = [{"input_ids": IDS, "labels": LABELS}], holdfast.tokens(shift=True)
    diagonal = holdfast.diagonal_fisher(adapted, batches, likelihood)
    dense = holdfast.dense_fisher(adapted, batches, likelihood)
    for name, entries in diagonal.entries.items():
        torch.testing.assert_close(entries, dense.diagonal()[name])
