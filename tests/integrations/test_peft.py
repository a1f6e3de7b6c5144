"""Memories under LoRA, in weight space and in adapter space, against the merged model. Skipped without peft."""

import copy

import pytest
import torch
from torch import nn

import holdfast
from holdfast.params import matched, shapes, trainable
from oracles import flat

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
weight_space = pytest.importorskip("holdfast.integrations.peft").weight_space
require_unmerged = pytest.importorskip("holdfast.integrations.peft").require_unmerged

N = 24  # the new data
STRENGTH = 1.7
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def mlp():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=30, num_key_value_heads=1, **SMALL))


def gpt2():
    special = {"bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, **special)
    return transformers.GPT2LMHeadModel(config)


def points(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=draw).double() + seed, torch.randint(0, 3, (count,), generator=draw)


def texts(seed, count):
    ids = torch.randint(0, 30, (count, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


CASES = {
    "mlp": (mlp, points, holdfast.categorical, {"target_modules": ["0", "2"]}),
    "llama": (llama, texts, holdfast.tokens(shift=True), {"target_modules": ["q_proj", "v_proj"]}),
    "gpt2": (gpt2, texts, holdfast.tokens(shift=True), {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


STRUCTURES = {
    "diagonal": (holdfast.diagonal_fisher, 0.0),
    "kronecker": (holdfast.kronecker_fisher, 0.0),
    "kronecker and a prior": (holdfast.kronecker_fisher, 0.3),
    "two kronecker terms": (holdfast.kronecker_fisher, 0.0),
}


def remembered(name="mlp", structure="diagonal"):
    """A plain model, and a memory of it in weight space."""
    make, data, likelihood, _ = CASES[name]
    fisher, precision = STRUCTURES[structure]
    torch.manual_seed(0)
    model = make().double()
    posterior = holdfast.prior(model, precision=precision)
    for seed in (1, 4) if structure.startswith("two") else (1,):
        known = fisher(model, [data(seed, 8)], likelihood)
        posterior = holdfast.consolidate(posterior, model, known, exact=True)
    return model, posterior


def adapted(model, *, filled=True, **config):
    """A PEFT model whose adapters are already somewhere: fresh ones have B = 0."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, **config)).double()
    if filled:
        fill(model)
    return model


def fill(model):
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moving(model).values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter)


def started(name="mlp", structure="diagonal", **more):
    model, posterior = remembered(name, structure)
    return adapted(model, **{**CASES[name][3], **more}), posterior


def moving(model):
    """What trains, by PEFT's own names: those of two adapters that train are told apart by them alone."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged(model):
    return copy.deepcopy(model).merge_and_unload()


def lora_layers(model):
    return [each for each in model.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]


def explicit(model, posterior):
    """The merged model's penalty with a graph to A and B: PEFT's own ΔW of every layer at once."""
    weights = dict(matched(model, shapes(posterior.mean)))
    names = {id(parameter): name for name, parameter in weights.items()}
    for layer in lora_layers(model):
        name = names[id(layer.get_base_layer().weight)]
        for adapter in set(layer.active_adapters) & set(layer.scaling):
            weights[name] = weights[name] + layer.get_delta_weight(adapter)
    return 0.5 * posterior.precision.quadratic(posterior.delta(weights))


def gradients(model, posterior):
    params = moving(model)
    grads = torch.autograd.grad(explicit(model, posterior), list(params.values()), allow_unused=True)
    return {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}


def pulled(model, term, scale=1.0):
    """What a term adds to the gradients, and what it returns."""
    params = moving(model)
    model.zero_grad()
    value = term.add_gradient_(model, scale, {id(parameter) for parameter in params.values()})
    return {name: parameter.grad for name, parameter in params.items() if parameter.grad is not None}, value


def assert_as_merged(model, posterior, **how):
    """The law of this file: the term is the merged model's own penalty, and its gradient that through s·BA."""
    term = weight_space(model, posterior, **how)
    exact = holdfast.penalty(merged(model), posterior)
    assert exact > 1e-4
    torch.testing.assert_close(term.value(model).to(exact), exact.detach(), rtol=1e-10, atol=0)
    expected = gradients(model, posterior)
    found, value = pulled(model, term, 0.7)
    assert set(found) == set(expected)
    assert {id(moving(model)[name]) for name in found} == {id(parameter) for parameter in term.held(model).values()}
    for name, grad in expected.items():
        assert grad.any()
        torch.testing.assert_close(found[name], 0.7 * grad, rtol=1e-8, atol=1e-12, msg=name)
    return term, value


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", CASES)
def test_the_penalty_and_its_gradient_are_the_merged_models(name, structure):
    model, posterior = started(name, structure)
    term, value = assert_as_merged(model, posterior)
    torch.testing.assert_close(value.double(), term.value(model).double())
    assert all(".lora_" in held for held in term.held(model))
    assert (term.num_data, term.unit) == (posterior.num_data, posterior.unit)


def loss_of(model, batch, likelihood):
    if isinstance(batch, dict):
        return likelihood.nll(model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]).mean()
    return likelihood.nll(model(batch[0]), batch[1]).mean()


def train(model, optimizer, batch, likelihood, *, steps=8, term=None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch, likelihood)
        if term is not None:
            loss = loss + STRENGTH * explicit(model, term) / N
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
], ids=["sgd", "adamw"])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_a_held_adapter_ends_where_the_explicit_penalty_does(name, make):
    ends, free = [], None
    _, data, likelihood, _ = CASES[name]
    for way in ("held", "loss", "free"):
        model, posterior = started(name, "kronecker")
        optimizer = make(list(trainable(model).values()))
        if way == "held":
            term = weight_space(model, posterior)
            with holdfast.hold(optimizer, model, term, num_data=N, strength=STRENGTH, unit=term.unit) as handle:
                train(model, optimizer, data(2, N), likelihood)
                exact = float(holdfast.penalty(merged(model), posterior))
                assert handle.penalty == pytest.approx(exact, rel=1e-10)
        else:
            train(model, optimizer, data(2, N), likelihood, term=posterior if way == "loss" else None)
        ends.append(flat({name: p.detach() for name, p in trainable(model).items()}))
    held, loss, free = ends
    torch.testing.assert_close(held, loss, rtol=1e-9, atol=1e-11)
    assert (free - held).norm() > 1e-4 * held.norm()


def test_the_memory_survives_the_merge_and_the_next_adapter():
    """What the first adapter changed counts against the second, and in a hold of the merged model."""
    model, posterior = started("mlp", "kronecker")
    left = float(weight_space(model, posterior).value(model))
    plain = merged(model)
    second = adapted(copy.deepcopy(plain), filled=False, target_modules=["2", "4"])
    term = weight_space(second, posterior)
    assert float(term.value(second)) == pytest.approx(left, rel=1e-10)  # B = 0: it starts at the first one's Δ
    _, value = pulled(second, term)
    assert trainable(second)["2.lora_B.weight"].grad.any()  # and is pulled back from there
    assert not trainable(second)["4.lora_B.weight"].grad.any()  # the first one left this layer as it was
    still = holdfast.penalty(plain, posterior) - value  # "0" cannot move any more
    torch.testing.assert_close(still.detach(), 0.5 * posterior.precision.blocks()[0].quadratic(posterior.delta(plain)))
    fill(second)
    assert_as_merged(second, posterior)

    plain.requires_grad_(True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02)
    with holdfast.hold(optimizer, plain, posterior, num_data=1) as handle:
        assert handle.penalty == pytest.approx(left, rel=1e-10)
        for _ in range(50):
            optimizer.zero_grad()
            optimizer.step()
        assert handle.penalty < 0.5 * left


def test_a_strong_hold_keeps_the_weights_where_the_memory_has_a_say():
    spent = {}
    for strength in (0.0, 1.0, 1e3):
        model, posterior = started("mlp", "kronecker", filled=False)
        optimizer = torch.optim.Adam(list(trainable(model).values()), lr=0.01)
        term = weight_space(model, posterior)
        with holdfast.hold(optimizer, model, term, num_data=N, strength=strength) as handle:
            train(model, optimizer, points(2, N), holdfast.categorical, steps=300)
            spent[strength] = handle.penalty
        moved = posterior.delta(merged(model))
        assert max(float(delta.abs().max()) for delta in moved.values()) > 0.01  # it learned all the same
    assert spent[1e3] < 0.1 * spent[1.0] < 0.1 * spent[0.0]
    assert spent[1e3] < 1e-2 * spent[0.0]


def test_parameters_that_train_as_they_are_are_held_beside_the_adapters():
    """Retrained modules, and a bias that trains in a layer whose weight is adapted."""
    for more in ({"modules_to_save": ["4"]}, {"bias": "lora_only"}):
        model, posterior = started("mlp", "kronecker", **more)
        term, _ = assert_as_merged(model, posterior)
        direct = {"4.weight", "4.bias"} if "bias" not in more else {"0.bias", "2.bias"}
        assert direct == {name for name in term.held(model) if "lora_" not in name}


def two_adapters(structure="diagonal"):
    """Both act, and both train; one layer has both of them."""
    model, posterior = started("mlp", structure)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["2", "4"]))
    model.double().base_model.set_adapter(["default", "second"])
    fill(model)
    return model, posterior


@pytest.mark.parametrize("structure", STRUCTURES)
def test_adapters_that_train_together_are_held_together(structure):
    """Δ = W − μ + Σ sᵢ·BᵢAᵢ, and each has its own gradient of it."""
    model, posterior = two_adapters(structure)
    term, _ = assert_as_merged(model, posterior)
    assert {"0.lora_A.weight", "2.lora_A.default.weight", "2.lora_A.second.weight"} < set(term.held(model))
    ends = []
    for held in (True, False):
        model, posterior = two_adapters(structure)
        optimizer = torch.optim.SGD(list(moving(model).values()), lr=0.05)
        if held:
            with holdfast.hold(optimizer, model, weight_space(model, posterior), num_data=N, strength=STRENGTH):
                train(model, optimizer, points(2, N), holdfast.categorical)
        else:
            train(model, optimizer, points(2, N), holdfast.categorical, term=posterior)
        ends.append(flat({name: p.detach() for name, p in moving(model).items()}))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def test_active_adapters_add_up_and_one_trains():
    model, posterior = started()
    first = copy.deepcopy(model)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["2", "4"]))
    model.double().base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".second." in name)
    fill(model)
    assert_as_merged(model, posterior)
    # By name: as if it alone were active.
    alone = weight_space(model, posterior, adapter="second").value(model)
    both = weight_space(model, posterior, adapter=["default", "second"])
    torch.testing.assert_close(both.value(model), weight_space(model, posterior).value(model))
    model.base_model.set_adapter("second")
    torch.testing.assert_close(alone, weight_space(model, posterior).value(model))
    model.base_model.set_adapter("default")
    torch.testing.assert_close(weight_space(first, posterior).value(first), weight_space(model, posterior).value(model))
    with pytest.raises(holdfast.ArgumentError, match=r"no LoRA adapter `third`: it has `default`, `second`"):
        weight_space(model, posterior, adapter="third")


def test_embeddings_are_weights_like_others():
    model, posterior = started("llama", "diagonal", target_modules=["embed_tokens"])
    term, _ = assert_as_merged(model, posterior)
    assert set(term.held(model)) == {f"model.embed_tokens.lora_embedding_{factor}" for factor in "AB"}


def test_a_base_that_the_adapter_took_its_start_from_counts_as_it_acts():
    """PiSSA takes s·BA out of the base: the weights differ, what they do does not."""
    model, posterior = remembered()
    model = adapted(model.float(), filled=False, target_modules=["0"], init_lora_weights="pissa")
    stored = 0.5 * posterior.precision.quadratic(posterior.delta(model))
    assert float(weight_space(model, posterior).value(model)) < 1e-8 * float(stored)


def test_dropout_has_no_part_in_the_penalty():
    model, posterior = started("mlp", "kronecker", lora_dropout=0.5)
    assert model.train().training
    before = torch.random.get_rng_state()
    assert_as_merged(model, posterior)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 4e-3), (torch.float32, 1e-5)])
def test_narrow_adapters_are_multiplied_in_the_memorys_precision(dtype, within):
    """Under autocast too. What is added is rounded to the adapter's digits, and no more than that."""
    model, posterior = started("mlp", "kronecker")
    model, posterior = model.float(), posterior.to(dtype=torch.float32)
    for factor in (factor for layer in lora_layers(model) for factor in (layer.lora_A, layer.lora_B)):
        factor.to(dtype)
    wide = copy.deepcopy(model).double()
    exact = float(explicit(wide, posterior).detach())
    term = weight_space(model, posterior)
    with torch.autocast("cpu", torch.bfloat16):
        found, value = pulled(model, term)
        assert float(value) == pytest.approx(exact, rel=1e-5)
        assert float(term.value(model)) == pytest.approx(exact, rel=1e-5)
    for name, grad in gradients(wide, posterior).items():
        assert found[name].dtype == dtype
        assert (found[name].double() - grad).norm() < within * grad.norm(), name


def test_a_forecast_is_of_merged_weights():
    model, posterior = started()
    term = weight_space(model, posterior)
    rise = float(term.value(model)) / posterior.num_data
    model.merge_adapter()
    assert holdfast.forecast(model, posterior).quadratic == pytest.approx(rise, rel=1e-10)
    model.unmerge_adapter()
    assert float(term.value(model)) / posterior.num_data == pytest.approx(rise, rel=1e-10)


def test_a_flat_memory_holds_nothing_and_an_inert_one_is_refused():
    model, _ = remembered()
    flat_one = holdfast.prior(model)
    nothing = holdfast.Posterior(
        flat_one.mean, 0.0 * holdfast.diagonal_fisher(model, [points(1, 8)], holdfast.categorical)
    )
    assert nothing.num_data == 0
    model = adapted(model, **CASES["mlp"][3])
    for posterior in (flat_one, nothing):
        term = weight_space(model, posterior)
        assert term.held(model) == {}
        assert pulled(model, term)[0] == {}


@pytest.mark.parametrize(("config", "said"), [
    (peft.LoraConfig(r=2, target_modules=["0"], use_dora=True), r"`default` of `0.weight` has DoraLinearVariant"),
    (peft.LoraConfig(r=2, target_modules=["0"], lora_bias=True), r"`default` of `0.weight` has lora_bias"),
    (peft.LoHaConfig(r=2, target_modules=["0"]), r"`0.weight` is adapted by peft.*loha.*Linear"),
    (peft.AdaLoraConfig(init_r=2, target_modules=["0"], total_step=10), r"`0.weight` is adapted by peft.*adalora"),
], ids=["dora", "lora_bias", "loha", "adalora"])  # fmt: skip
def test_what_is_not_a_product_of_two_factors_is_refused(config, said):
    model, posterior = remembered()
    model = peft.get_peft_model(model, config)
    with pytest.raises(holdfast.ArgumentError, match=said):
        weight_space(model, posterior)


def test_convolutions_and_tied_weights_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    posterior = holdfast.prior(model, precision=1.0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["0"]))
    with pytest.raises(holdfast.ArgumentError, match=r"`0.weight` is adapted by .*Conv2d.*target_modules"):
        weight_space(model, posterior)
    model = gpt2()
    posterior = holdfast.prior(model, precision=1.0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["wte"]))
    with pytest.raises(holdfast.ArgumentError, match=r"`transformer.wte.weight` is tied.*untie it"):
        weight_space(model, posterior)


def test_memories_that_do_not_fit_are_refused_with_what_to_do():
    model, posterior = started()
    _, other = remembered("llama")
    with pytest.raises(holdfast.InertError, match="no parameter of the memory is in this model"):
        weight_space(model, other)
    wider = holdfast.prior(nn.Sequential(nn.Linear(7, 6)), precision=1.0)
    with pytest.raises(holdfast.MismatchError, match=r"`0.weight` has shape \(6, 5\) in the model and \(6, 7\)"):
        weight_space(model, wider)
    only = holdfast.Diagonal({"4.weight": posterior.precision.entries["4.weight"]})
    head = holdfast.Posterior(posterior.mean, only)
    with pytest.raises(holdfast.InertError, match=r"The memory has `4.weight`; adapters are on `0.weight`, `0.bias`"):
        weight_space(model, head)
    own = holdfast.prior(model, precision=1.0)
    with pytest.raises(holdfast.InertError, match=r"A memory of adapters is held as it is: holdfast.hold"):
        weight_space(model, own)
    with pytest.raises(holdfast.InertError, match=r"An? .*merged is held as it is: holdfast.hold"):
        weight_space(merged(model), posterior)


def test_adapters_that_do_not_act_or_do_not_train_are_refused():
    model, posterior = started()
    optimizer = torch.optim.SGD(list(trainable(model).values()), lr=0.1)
    term = weight_space(model, posterior)
    with model.disable_adapter(), pytest.raises(holdfast.ArgumentError, match="is disabled"):
        weight_space(model, posterior)
    holdfast.hold(optimizer, model, term, num_data=N)
    model.merge_adapter()
    with pytest.raises(holdfast.ArgumentError, match=r"is merged into it.*unmerge_adapter\(\); or merge_and_unload"):
        optimizer.step()
    model.unmerge_adapter()
    optimizer.step()
    with pytest.raises(holdfast.InertError, match="is held, but no optimizer"):
        holdfast.hold(torch.optim.SGD(lora_layers(model)[0].parameters(), lr=0.1), model, term, num_data=N)
    model.requires_grad_(False)
    with pytest.raises(holdfast.InertError, match=r"`0.weight`, `2.weight` are frozen.*is_trainable=True"):
        weight_space(model, posterior)


def in_adapter_space():
    model, _ = started()
    known = holdfast.diagonal_fisher(model, [points(1, 8)], holdfast.categorical)
    return model, holdfast.consolidate(holdfast.prior(model), model, known)


def test_a_memory_of_the_adapter_holds_the_adapter():
    ends = []
    for held in (True, False):
        model, posterior = in_adapter_space()
        assert set(posterior.mean) == {f"{layer}.lora_{factor}.weight" for layer in (0, 2) for factor in "AB"}
        require_unmerged(model, posterior)
        optimizer = torch.optim.SGD(list(trainable(model).values()), lr=0.1)
        x, y = points(2, N)
        how = {"num_data": N, "strength": STRENGTH, "proximal": False}
        handle = holdfast.hold(optimizer, model, posterior, **how) if held else None
        for _ in range(6):
            optimizer.zero_grad()
            loss = holdfast.categorical.nll(model(x), y).mean()
            (loss if held else loss + STRENGTH * holdfast.penalty(model, posterior) / N).backward()
            optimizer.step()
        if handle is not None:
            handle.remove()
        ends.append(flat({name: p.detach() for name, p in trainable(model).items()}))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_a_memory_of_a_merged_adapter_is_refused():
    reason = (
        "the adapter was merged into the base weights: its memory is of parameters that are gone"
        ".*make the memory in weight space"
    )
    model, posterior = in_adapter_space()
    plain = merged(model).requires_grad_(True)
    with pytest.raises(holdfast.MismatchError, match=reason):
        require_unmerged(plain, posterior)
    for refused in (
        lambda: holdfast.hold(torch.optim.SGD(plain.parameters(), lr=0.1), plain, posterior, num_data=N),
        lambda: holdfast.forecast(plain, posterior),
    ):
        with pytest.raises(holdfast.InertError, match=r"no parameter of the memory is in this model.*lora_A"):
            refused()
    model.merge_adapter()
    with pytest.raises(holdfast.MismatchError, match=reason):
        require_unmerged(model, posterior)
    with pytest.raises(holdfast.MismatchError, match="unmerge_adapter"):
        require_unmerged(model)
    _, base = remembered()
    require_unmerged(model, base)  # in weight space a merged model is what it is
    model.unmerge_adapter()
    require_unmerged(model, posterior)


def test_a_memory_of_the_weights_does_not_see_an_adapter_and_says_so():
    """Neither a hold nor a forecast passes over what an unmerged adapter adds."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = [(torch.randn(20, 4).double(), torch.arange(20) % 3)]
    memory = holdfast.consolidate(
        holdfast.prior(plain), plain, holdfast.diagonal_fisher(plain, data, holdfast.categorical)
    )
    model = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(holdfast.MismatchError, match=r"added to `0.weight`.*weight_space"):
        holdfast.hold(optimizer, model, memory, num_data=20)
    with pytest.raises(holdfast.MismatchError, match=r"added to `0.weight`.*merge_adapter"):
        holdfast.forecast(model, memory)
    for penalty in (holdfast.penalty, holdfast.penalty_gradient):
        with pytest.raises(holdfast.MismatchError, match=r"added to `0.weight`.*weight_space"):
            penalty(model, memory)
    fisher = holdfast.diagonal_fisher(model, data, holdfast.categorical)
    with pytest.raises(holdfast.MismatchError, match=r"added to `0.weight`.*merge_and_unload"):
        holdfast.consolidate(memory, model, fisher)
    with pytest.raises(holdfast.MismatchError, match=r"added to `0.weight`.*model.unload\(\)"):
        holdfast.restore_(model, memory)
    model.merge_adapter()
    assert holdfast.forecast(model, memory).rise > 0
    model.unmerge_adapter()
    term = weight_space(model, memory)
    with pytest.raises(holdfast.ArgumentError, match="none is held to here"):
        holdfast.hold(optimizer, model, term, num_data=20, proximal=True)


def kept(model, posterior):
    """A memory of the plain model that has probes and answers."""
    x, y = points(1, 200)
    answers = holdfast.kept_answers(model, [(x, y)], holdfast.categorical)
    return holdfast.Memory.of(posterior, model, holdfast.gaussian_probes([(x, y)]), answers)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["4"]}], ids=str)
def test_the_old_function_is_had_from_an_adapted_model(more):
    """At the mean, with adapters that add nothing; and from a base that is not at the mean any more."""
    assert_recalled(more)


def assert_recalled(more):
    plain, posterior = remembered()
    x = points(5, 7)[0]
    then = plain(x).detach()
    first = adapted(copy.deepcopy(plain), target_modules=["0", "2"]).merge_and_unload()
    for base in (copy.deepcopy(plain), first):
        if "second" in more:
            model = adapted(base, target_modules=["0"])
            model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["0", "2"]))
            model.double().base_model.set_adapter(["default", "second"])
            fill(model)
        else:
            model = adapted(base, **{"target_modules": ["0", "2"], **more})
        term = weight_space(model, posterior)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert (model(x) - then).abs().max() > 1e-3
        torch.testing.assert_close(term.recalled(model, lambda run, given: run(given))(x), then)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            for parameter, start in term.way_back(model).values():
                parameter.copy_(start)
        if base is not first:
            torch.testing.assert_close(model(x), then)


def test_what_trains_beside_adapters_and_is_not_known_is_said():
    plain, posterior = remembered()
    model = adapted(plain, target_modules=["0"])
    model.base_model.model.extra = nn.Linear(3, 3).double()
    with pytest.raises(holdfast.MismatchError, match=r"`extra.weight`, `extra.bias` trains beside the adapters"):
        weight_space(model, posterior).recalled(model, lambda run, given: run(given))


def test_the_old_function_is_had_from_a_model_with_two_adapters_that_train():
    assert_recalled({"second": True})


local = pytest.mark.filterwarnings("ignore:a posterior alone has no probes:holdfast.HoldfastWarning")
far = pytest.mark.filterwarnings("ignore:to stay within:holdfast.HoldfastWarning")


@local
@far
@pytest.mark.parametrize("way", ["one", "two", "beside"])
def test_a_budget_of_the_merged_weights_by_the_quadratic(way):
    if way == "two":
        model, posterior = two_adapters()
    else:
        model, posterior = started(filled=False, **({"modules_to_save": ["4"]} if way == "beside" else {}))
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.Adam(list(moving(model).values()), lr=0.05)
    term = weight_space(model, posterior)
    with holdfast.hold(optimizer, model, term, num_data=N, strength=1e-3, budget=0.05) as handle:
        train(model, optimizer, points(2, N), holdfast.categorical, steps=20)
        assert term.value(model) / posterior.num_data > 0.06
    assert 0.1 < handle.spent.kept < 0.95
    rise = holdfast.penalty(merged(model), posterior).item() / posterior.num_data
    assert 0.045 < rise <= 0.05
    assert handle.spent.rise == pytest.approx(rise)
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in base.items())


@far
@pytest.mark.parametrize("again", [False, True])
def test_a_budget_of_the_merged_weights_by_probes(again):
    """With a second adapter on a base that the first has moved, too: what both have changed is counted."""
    plain, posterior = remembered()
    memory = kept(plain, posterior)
    if again:
        plain = adapted(plain, target_modules=["2"], filled=True).merge_and_unload()
    model = adapted(plain, target_modules=["0", "2", "4"], filled=False)
    optimizer = torch.optim.Adam(list(moving(model).values()), lr=0.02)
    term = weight_space(model, memory)
    with holdfast.hold(optimizer, model, term, num_data=N, strength=1e-3, budget=0.2) as handle:
        train(model, optimizer, points(2, N), holdfast.categorical, steps=60)
    assert handle.spent.by == "probes"
    assert 0.1 < handle.spent.rise <= 0.2
    assert handle.spent.kept < 1
    told = holdfast.forecast(merged(model), memory).by_probes
    assert max(told.by_outputs, told.by_probabilities) < 0.22


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_a_memory_of_adapters_and_of_the_biases_that_train_beside_them(bias):
    """LoRA adds nothing to a bias: what trains of it is remembered, held and restored as it is."""
    plain, _ = remembered()
    model = adapted(plain, target_modules=["0", "2"], filled=True, bias=bias)
    data = [points(1, 20)]
    fisher = holdfast.diagonal_fisher(model, data, holdfast.categorical)
    assert ("0.bias" in fisher.shapes) == (bias != "none")
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    before = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    optimizer = torch.optim.SGD(list(trainable(model).values()), lr=1e-2)
    with holdfast.hold(optimizer, model, posterior, num_data=N):
        train(model, optimizer, points(2, N), holdfast.categorical, steps=3)
    assert float(holdfast.penalty(model, posterior).detach()) > 0
    assert holdfast.forecast(model, posterior).rise > 0
    holdfast.restore_(model, posterior)
    assert all(torch.equal(before[name], parameter) for name, parameter in trainable(model).items())


def test_an_adapter_that_a_layer_does_not_have_adds_nothing_there():
    plain, posterior = remembered()
    model = adapted(plain, target_modules=["0"], filled=True)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["2"]))
    with pytest.raises(holdfast.MismatchError, match=r"added to `0.weight`"):
        holdfast.penalty(model, posterior)
    model.set_adapter("other")
    with pytest.raises(holdfast.MismatchError, match=r"added to `2.weight` as"):
        holdfast.penalty(model, posterior)


def test_a_flat_prior_of_the_weights_is_no_memory_of_them():
    """Made before there were adapters: it knows nothing of W, and nothing is said of W."""
    plain, _ = remembered()
    flat_prior = holdfast.prior(plain)
    model = adapted(plain, target_modules=["0"], filled=True)
    fisher = holdfast.diagonal_fisher(model, [points(1, 20)], holdfast.categorical)
    assert holdfast.consolidate(flat_prior, model, fisher).num_data == 20


@far
@pytest.mark.parametrize("kept_with", [True, False])
def test_a_budget_of_the_merged_weights_sees_statistics_that_the_memory_lacks(kept_with):
    """They are what they were at the start, and go back with the adapters at the end."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    old, labels = points(1, 200)
    plain(old)
    plain.eval()
    data = [(old, labels)]
    fisher = holdfast.diagonal_fisher(plain, data, holdfast.categorical)
    memory = holdfast.Memory.of(
        holdfast.consolidate(holdfast.prior(plain), plain, fisher), plain, holdfast.kept_inputs(old),
        holdfast.kept_answers(plain, data, holdfast.categorical),
    )  # fmt: skip
    if not kept_with:
        memory = holdfast.Memory(memory.posterior, {}, memory.probes, memory.answers)
    before = nn.functional.cross_entropy(plain(old), labels)
    model = adapted(plain, target_modules=["0", "3"], filled=False)
    optimizer = torch.optim.Adam(list(moving(model).values()), lr=1e-3)
    term = weight_space(model, memory)
    with holdfast.hold(optimizer, model, term, num_data=N, budget=0.02, freeze_statistics=False) as handle:
        model.train()
        new, others = points(4, N)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(9 * new), others).backward()
            optimizer.step()
    model.eval()
    assert handle.spent.kept < 1
    assert float((nn.functional.cross_entropy(model(old), labels) - before).detach()) < 0.04


@local
def test_a_budget_with_adapters_that_took_their_start_out_of_the_weights_is_refused():
    plain, posterior = remembered()
    model = adapted(plain.float(), target_modules=["0", "2"], filled=False, init_lora_weights="olora")
    optimizer = torch.optim.SGD(list(moving(model).values()), lr=0.05)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(holdfast.ArgumentError, match=r"where the adapters do nothing.*init_lora_weights=True"):
        holdfast.hold(optimizer, model, weight_space(model, posterior), num_data=N, budget=1e-3)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@local
def test_a_budget_that_does_not_see_all_that_trains_is_refused():
    plain, posterior = remembered()
    near = holdfast.prior(plain, precision=1.0)
    part = {name: entries for name, entries in posterior.precision.entries.items() if not name.startswith("2.")}
    posterior = holdfast.Posterior(posterior.mean, holdfast.Diagonal(part, posterior.sources))
    model = adapted(plain, target_modules=["0", "2"])
    optimizer = torch.optim.SGD(list(moving(model).values()), lr=0.05)
    with pytest.raises(holdfast.ArgumentError, match=r"says nothing of `2.lora_A.weight`, `2.lora_B.weight`, which"):
        holdfast.hold(optimizer, model, weight_space(model, posterior), num_data=N, budget=0.05)
    twice = [weight_space(model, posterior), weight_space(model, near)]
    with pytest.raises(holdfast.ArgumentError, match="of one memory, got 2"):
        holdfast.hold(optimizer, model, twice, num_data=N, budget=0.05)


def test_a_hold_in_weight_space_tells_which_factors_it_holds():
    model, posterior = two_adapters()
    optimizer = torch.optim.SGD(list(moving(model).values()), lr=0.05)
    told = holdfast.hold(optimizer, model, weight_space(model, posterior), num_data=N).coverage
    assert told.fraction == 1
    assert {"2.lora_A.default.weight", "2.lora_B.second.weight"} < set(told.held)
    assert {"0.weight", "4.bias"} < told.frozen
