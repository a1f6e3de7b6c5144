"""Models as people have them, small and random, against a loop of one. Skipped where transformers is not installed."""

import pytest
import torch

import holdfast
from holdfast.params import all_parameters, trainable
from oracles import relative_errors, squares_loop

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


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 60}
    config = transformers.T5Config(decoder_start_token_id=0, feed_forward_proj="gated-gelu", **sizes)
    return transformers.T5ForConditionalGeneration(config)


CAUSAL = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": LABELS}
MODELS = {
    "gpt2": (gpt2, CAUSAL, holdfast.tokens(shift=True)),
    "llama": (llama, CAUSAL, holdfast.tokens(shift=True)),
    "bert": (bert, {**CAUSAL, "labels": CLASSES}, holdfast.categorical),
    "t5": (t5, {**CAUSAL, "decoder_input_ids": IDS.roll(1, 1)}, holdfast.tokens(shift=False)),
    "vit": (vit, {"pixel_values": torch.randn(4, 3, 16, 16).double(), "labels": CLASSES}, holdfast.categorical),
}


def exact(model, batch, likelihood):
    def forward(model, row):
        return model(**{key: value for key, value in row.items() if key != "labels"}).logits

    return squares_loop(model, batch, likelihood.nll, forward)


def made(name, dtype):
    make, batch, likelihood = MODELS[name]
    torch.manual_seed(1)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return make().to(dtype), batch, likelihood


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_every_parameter_is_tapped_and_exact(name, dtype, within):
    """Tied embeddings, positions looked up once for all examples, hand-written norms, packed projections."""
    model, batch, likelihood = made(name, dtype)
    fisher = holdfast.diagonal_fisher(model, [batch], likelihood, targets="observed")
    errors = relative_errors(fisher.entries, exact(model, batch, likelihood))
    assert max(errors.values()) <= within, errors
    found = holdfast.coverage(model, [batch], likelihood)
    assert not found.general
    assert not found.unused


@pytest.mark.parametrize("name", MODELS)
def test_every_model_under_bfloat16_autocast(name):
    """Eight times as many examples as above: the rounding of single ones averages out."""
    model, batch, likelihood = made(name, torch.float32)
    batch = {
        key: torch.cat([value.roll(n, -1) if value.ndim > 1 else value for n in range(8)])
        for key, value in batch.items()
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fisher = holdfast.diagonal_fisher(model, [batch], likelihood, targets="observed")
        errors = relative_errors(fisher.entries, exact(model, batch, likelihood))
    # But for those that are zero but for rounding: an attention's key biases.
    mass = {key: float(entries.sum()) for key, entries in fisher.entries.items()}
    significant = {key: error for key, error in errors.items() if mass[key] > 1e-6 * sum(mass.values())}
    assert max(significant.values()) <= 3e-2, significant


@pytest.mark.parametrize("name", MODELS)
def test_a_fisher_from_a_collators_dict_a_hold_and_a_file(name, tmp_path):
    model, batch, likelihood = made(name, torch.float64)
    fisher = holdfast.diagonal_fisher(model, [batch], likelihood, targets="observed")
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
    assert loaded.num_data == {"gpt2": 32, "llama": 32, "t5": 36, "bert": 4, "vit": 4}[name]
    ties = {
        "gpt2": {"transformer.wte.weight": ("lm_head.weight",)},
        "t5": {"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")},
    }
    assert loaded.posterior.ties == ties.get(name, {})


def covered(fisher):
    """The layers and the diagonal's entries of a Kronecker Fisher, and every name that it covers."""
    terms = fisher.terms if isinstance(fisher, holdfast.Sum) else (fisher,)
    layers = {layer: each for t in terms if isinstance(t, holdfast.Kronecker) for layer, (each,) in t.layers.items()}
    entries = {name: each for t in terms if isinstance(t, holdfast.Diagonal) for name, each in t.entries.items()}
    return layers, entries, [*(name for layer in layers for name in layer.shapes), *entries]


@pytest.mark.parametrize("name", MODELS)
def test_kronecker_factors_of_every_model(name):
    """A weight is a layer's or the diagonal's; a layer's trace is Σ‖g‖² times the mean of ‖a‖², by hooks."""
    model, batch, likelihood = made(name, torch.float64)
    fisher = holdfast.kronecker_fisher(model, [batch], likelihood, targets="observed")
    layers, entries, names = covered(fisher)
    assert sorted(names) == sorted(trainable(model))
    diagonal = holdfast.diagonal_fisher(model, [batch], likelihood, targets="observed")
    errors = relative_errors(entries, {name: diagonal.entries[name] for name in entries})
    assert max(errors.values(), default=0.0) <= 1e-9
    linear = {f"{n}.weight" for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D", "Conv2d")}
    tied = {"lm_head.weight"} if name in ("gpt2", "t5") else set()
    assert linear - tied == {layer.weight for layer in layers}
    seen = {}

    def heard(module, args, out, name):
        inputs = args[0].detach()
        seen.setdefault(name, []).append((inputs, out))

    modules = {layer: model.get_submodule(layer.weight.removesuffix(".weight")) for layer in layers}
    hooks = [
        module.register_forward_hook(lambda m, args, out, key=layer: heard(m, args, out, key))
        for layer, module in modules.items()
        if type(module).__name__ != "Conv2d"
    ]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    loss = likelihood.nll(model.eval()(**inputs).logits, batch["labels"]).sum()
    for hook in hooks:
        hook.remove()
    flat = [(layer, *call) for layer, calls in seen.items() for call in calls]
    grads = torch.autograd.grad(loss, [out for *_, out in flat])
    for layer in seen:
        g = sum(grad.square().sum() for (key, *_), grad in zip(flat, grads, strict=True) if key == layer)
        mine = [(x, grad) for (key, x, _), grad in zip(flat, grads, strict=True) if key == layer]
        # Positions without a gradient are no inputs.
        rows = [x[(grad != 0).any(-1)] if x.ndim > 2 else x for x, grad in mine]
        a = sum(x.square().sum() for x in rows) / sum(map(len, rows)) + (layer.bias is not None)
        term = layers[layer]
        torch.testing.assert_close(term.outputs.diagonal(dim1=1, dim2=2).sum(), g, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(term.inputs.diagonal(dim1=1, dim2=2).sum(), a, rtol=1e-9, atol=1e-12)


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
    torch.manual_seed(0)
    with torch.no_grad():
        for name in adapters:
            trainable(adapted)[name].normal_()  # the second factors are zero in a fresh adapter
    assert not holdfast.coverage(adapted, batches, likelihood).general
    diagonal = holdfast.diagonal_fisher(adapted, batches, likelihood)
    dense = holdfast.dense_fisher(adapted, batches, likelihood)
    for name, entries in diagonal.entries.items():
        torch.testing.assert_close(entries, dense.diagonal()[name])
    layers, entries, every = covered(holdfast.kronecker_fisher(adapted, batches, likelihood))
    assert {layer.weight for layer in layers} == adapters
    assert sorted(every) == sorted(trainable(adapted))
    assert set(entries) == {"transformer.ln_f.weight", "transformer.ln_f.bias"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_causal_model_is_held_by_text_of_its_own(name):
    """The gradient against the divergence of the two models' logits, written out; one has tied embeddings."""
    model, batch, likelihood = made(name, torch.float64)
    model.eval()
    old = made(name, torch.float64)[0].eval()

    def forward(model, ids):
        return model(input_ids=ids).logits

    text = holdfast.own_text(model, count=6, length=8, num_data=1000, start=batch["input_ids"][:, :2], forward=forward)
    assert text.inputs.shape == (6, 8)
    term = holdfast.distill(model, holdfast.prior(model), text, likelihood, batch=16, forward=forward)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    term.add_gradient_(model, 1.0, {id(parameter) for parameter in model.parameters()})
    drawn = text.draw(16, torch.Generator().manual_seed(0))
    before, now = (forward(each, drawn)[:, :-1].log_softmax(-1) for each in (old, model))
    loss = 1000 * (before.exp() * (before - now)).sum(-1).mean()
    params = trainable(model)
    for (_, parameter), grad in zip(params.items(), torch.autograd.grad(loss, list(params.values())), strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)  # rotary angles are float32
