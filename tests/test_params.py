"""Canonical names do not depend on what a model is wrapped in, and one function compares them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast import identity
from holdfast.errors import ArgumentError, InertError, MismatchError
from holdfast.identity import fingerprint, fingerprints, row_sums
from holdfast.params import aliases, all_parameters, buffers, matched, shapes, trainable


class Net(nn.Module):
    """A tied head, a buffer, and a layer that its author called `module`."""

    def __init__(self, vocabulary=5, tied=True):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4)
        self.module = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, vocabulary)
        if tied:
            self.head.weight = self.embed.weight


NAMES = ["embed.weight", "module.weight", "module.bias", "norm.weight", "norm.bias", "head.bias"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


# PEFT's classes, known by name: adapters sit beside the layer they adapt, under the adapter's own name.
class BaseTunerLayer:
    pass


class LoraLinear(nn.Module, BaseTunerLayer):
    def __init__(self, base_layer, adapters):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({name: nn.Linear(base_layer.in_features, 1, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(1, base_layer.out_features, bias=False) for name in adapters})


class LoraEmbedding(nn.Module, BaseTunerLayer):
    def __init__(self, base_layer, adapters):
        super().__init__()
        self.base_layer = base_layer
        self.lora_embedding_A = nn.ParameterDict({name: torch.zeros(1, base_layer.num_embeddings) for name in adapters})


class ModulesToSaveWrapper(nn.Module):
    def __init__(self, module, adapters):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({name: copy.deepcopy(module) for name in adapters})


class BaseTuner(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


class LoraModel(BaseTuner):
    pass


class PeftModel(nn.Module):
    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model


class PeftModelForCausalLM(PeftModel):
    pass


def adapted(*adapters, trained):
    """What PEFT makes of a `Net`: everything frozen but the adapters in `trained`."""
    model = Net(tied=False).requires_grad_(False)
    model.embed = LoraEmbedding(model.embed, adapters)
    model.module = LoraLinear(model.module, adapters)
    model.head = ModulesToSaveWrapper(model.head, adapters)
    model = PeftModelForCausalLM(LoraModel(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not set(trained).isdisjoint(name.split(".")))
    return model


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model):
    return torch.compile(model, backend="eager")  # a wrapper until it is called


def inside(wrap):
    """Wrap a layer inside the model rather than the model."""

    def wrapped(model):
        model.module = wrap(model.module)
        return model

    return wrapped


WRAPPINGS = {
    "none": [],
    "data-parallel": [nn.DataParallel],
    "ddp": [DistributedDataParallel],
    "compiled": [compiled],
    "averaged": [AveragedModel],
    "checkpointed": [checkpoint_wrapper],
    "peft": [LoraModel, PeftModelForCausalLM],
    "compiled ddp": [DistributedDataParallel, compiled],
    "ddp of compiled": [compiled, DistributedDataParallel],
    "averaged compiled data-parallel": [nn.DataParallel, compiled, AveragedModel],
    "a layer checkpointed": [inside(checkpoint_wrapper)],
    "a layer compiled and checkpointed, in ddp": [
        inside(checkpoint_wrapper),
        inside(compiled),
        DistributedDataParallel,
    ],
    "a layer data-parallel, checkpointed peft": [inside(nn.DataParallel), LoraModel, PeftModel, checkpoint_wrapper],
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrappers", WRAPPINGS.values(), ids=WRAPPINGS)
def test_wrapping_a_model_changes_no_name(wrappers):
    model = Net()
    for wrap in wrappers:
        model = wrap(model)
    assert list(trainable(model)) == NAMES
    assert list(all_parameters(model)) == NAMES
    assert aliases(model) == {"embed.weight": ("head.weight",)}
    assert list(buffers(model)) == BUFFERS


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [nn.DataParallel, DistributedDataParallel, compiled, checkpoint_wrapper])
def test_the_parameters_of_a_wrapped_model_are_the_models_own(wrap):
    model = Net()
    own = dict(model.named_parameters())
    found = trainable(wrap(model))
    assert all(found[name] is own[name] for name in NAMES)


def test_names_are_those_of_named_parameters_when_nothing_is_wrapped():
    model = nn.Sequential(
        Net(tied=False), nn.ModuleDict({"module": nn.Linear(2, 1)}), nn.ParameterList([torch.ones(2)])
    )
    assert list(trainable(model)) == [name for name, _ in model.named_parameters()]


def test_an_attribute_of_the_users_called_like_a_wrappers_child_is_kept():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("module", "_orig_mod", "base_model", "model", "base_layer", "modules_to_save"):
                self.add_module(name, nn.Linear(1, 1, bias=False))

    kept = ["module", "_orig_mod", "base_model", "model", "base_layer", "modules_to_save"]
    assert list(trainable(nn.DataParallel(Own()))) == [f"{name}.weight" for name in kept]


def test_a_module_used_twice_has_one_name_and_aliases_for_each_parameter():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Sequential(layer))
    assert list(trainable(model)) == ["0.weight", "0.bias"]
    assert aliases(model) == {"0.weight": ("2.weight", "3.0.weight"), "0.bias": ("2.bias", "3.0.bias")}


def test_a_module_that_holds_its_parent_does_not_recurse_for_ever():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model
    assert list(trainable(model)) == ["0.weight", "0.bias"]


def test_adapters_are_named_as_if_they_were_part_of_their_layer():
    assert list(trainable(adapted("default", trained=["default"]))) == [
        "embed.lora_embedding_A",
        "module.lora_A.weight",
        "module.lora_B.weight",
        "head.weight",
        "head.bias",
    ]
    frozen = all_parameters(adapted("default", trained=["default"]))
    assert {"embed.weight", "module.weight", "module.bias", "norm.weight", "norm.bias"} <= set(frozen)


def test_the_name_of_the_adapter_does_not_matter():
    assert list(trainable(adapted("a", trained=["a"]))) == list(trainable(adapted("b", trained=["b"])))


@pytest.mark.parametrize("used", ["a", "b"])
def test_of_two_adapters_the_trainable_one_has_the_name(used):
    model = adapted("a", "b", trained=[used])
    lora = model.base_model.model.module.lora_A[used].weight
    assert trainable(model)["module.lora_A.weight"] is lora
    assert all_parameters(model)["module.lora_A.weight"] is lora


def test_two_trainable_adapters_collide_and_the_error_names_the_parameter():
    with pytest.raises(MismatchError, match=r"`embed\.lora_embedding_A`.*Freeze the adapter"):
        trainable(adapted("a", "b", trained=["a", "b"]))


def test_frozen_parameters_are_not_trainable():
    model = Net()
    model.module.requires_grad_(False)
    assert list(trainable(model)) == [name for name in NAMES if not name.startswith("module.")]
    assert list(all_parameters(model)) == NAMES


@pytest.mark.parametrize("model", [nn.Linear(2, 1).requires_grad_(False), nn.ReLU()], ids=["frozen", "empty"])
def test_a_model_without_trainable_parameters_is_inert(model):
    with pytest.raises(InertError, match=f"{type(model).__name__} has no trainable parameters"):
        trainable(model)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_is_named_with_the_way_out():
    with pytest.raises(ArgumentError, match=r"`1\.weight` has no shape yet.*Run the model once"):
        trainable(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_that_has_run_is_like_any_other():
    model = nn.LazyLinear(3)
    model(torch.ones(1, 2))
    assert shapes(trainable(model)) == {"weight": (3, 2), "bias": (3,)}


def test_buffers_outside_the_state_dict_are_not_kept():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("cache", torch.ones(1), persistent=False)
    model.register_buffer("unset", None)
    assert list(buffers(model)) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def test_matched_gives_the_models_parameters_in_the_memorys_order_and_may_cover_fewer():
    model = Net()
    found = matched(model, {"head.bias": torch.Size([5]), "module.weight": torch.Size([4, 4])})
    assert list(found) == ["head.bias", "module.weight"]
    assert found["head.bias"] is model.head.bias
    assert found["module.weight"] is model.module.weight


def test_a_memorys_name_may_be_an_alias_in_the_model():
    model = Net()
    assert matched(model, {"head.weight": torch.Size([5, 4])})["head.weight"] is model.embed.weight


WANTED = shapes(dict(Net().named_parameters()))
ANOTHER = "Use the model the memory was made from"
GREW = r"call posterior\.expanded\(model\) first"


@pytest.mark.parametrize(
    ("model", "wanted", "says"),
    [
        (Net(), {**WANTED, "ghost": torch.Size([1])}, rf"it has `ghost`, which the model lacks.*{ANOTHER}"),
        (Net(vocabulary=7), WANTED, rf"`embed.weight` has shape \(7, 4\) in the model and \(5, 4\).*{GREW}"),
        (Net(vocabulary=7), WANTED, r"`head.bias` has shape \(7,\) in the model and \(5,\) in the memory"),
        (Net(vocabulary=3), WANTED, rf"`embed.weight` has shape \(3, 4\) in the model and \(5, 4\).*{ANOTHER}"),
        (Net(vocabulary=7), {**WANTED, "module.bias": torch.Size([4, 1])}, ANOTHER),
        (Net(vocabulary=7), {**WANTED, "ghost": torch.Size([1])}, ANOTHER),
        (nn.Linear(1, 1), {"weight": torch.Size([1, 1]), **{f"x{i}": torch.Size([1]) for i in range(9)}}, "3 more"),
    ],
    ids=["missing", "grew", "all are named", "shrank", "grew and another rank", "grew and missing", "many missing"],
)
def test_what_differs_is_named_with_both_values_and_a_cure(model, wanted, says):
    with pytest.raises(MismatchError, match=says):
        matched(model, wanted)


def test_a_memory_that_shares_no_name_with_the_model_is_inert():
    with pytest.raises(InertError, match=r"The memory has `old\.weight`; the model has `weight`, `bias`"):
        matched(nn.Linear(2, 1), {"old.weight": torch.Size([1, 2])})


def test_growth_is_accepted_where_it_was_asked_for_and_shrinking_is_not():
    assert matched(Net(vocabulary=7), WANTED, grown=True)["head.bias"].shape == (7,)
    with pytest.raises(MismatchError, match=r"\(3, 4\) in the model and \(5, 4\) in the memory"):
        matched(Net(vocabulary=3), WANTED, grown=True)


def test_ties_that_were_parted_are_named():
    ties = aliases(Net())
    assert list(matched(Net(), WANTED, ties=ties)) == NAMES
    with pytest.raises(MismatchError, match=r"`embed\.weight` and `head\.weight` were one parameter"):
        matched(Net(tied=False), WANTED, ties=ties)


def test_parameters_that_were_tied_since_are_named():
    """Two means for one parameter: a step of its own, toward the one and then the other, would rest at neither."""
    apart = {name: parameter.shape for name, parameter in Net(tied=False).named_parameters()}
    assert list(matched(Net(tied=False), apart)) == list(apart)
    with pytest.raises(MismatchError, match=r"`embed\.weight`, `head\.weight` were apart .* are one parameter now"):
        matched(Net(), apart)


TENSORS = {"a": torch.arange(6, dtype=torch.float64).view(3, 2), "b": torch.tensor([0.5, -1.25, 3.0, 7.0])}
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 1, 3, -1])
def test_one_flipped_bit_changes_the_fingerprint(dtype, place):
    tensor = torch.randn(7).to(dtype)
    seen = {fingerprint({"w": tensor})}
    width = 8 * tensor.element_size()
    for bit in range(width):
        flipped = tensor.clone()
        flipped.view(INTEGER[tensor.element_size()])[place] ^= torch.iinfo(torch.int64).min if bit == 63 else 1 << bit
        seen.add(fingerprint({"w": flipped}))
    assert len(seen) == width + 1


ALIKE = [  # sums of their entries, weighted by place, are the same
    ([1, 4, 1], [2, 1, 2]), ([0, 1, 1, 0], [1, 0, 0, 1]), ([0, 1, 1, 0] * 5, [1, 0, 0, 1] * 5),
    (torch.eye(4).tolist(), torch.eye(4).flip(0).tolist()), ([3, 0, 0, 3], [0, 3, 3, 0]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_tensors_with_a_pattern_are_told_apart(dtype):
    for one, other in ALIKE:
        one, other = torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype)
        assert fingerprint({"w": one}) != fingerprint({"w": other})
        assert int(row_sums([one.reshape(1, -1)])) != int(row_sums([other.reshape(1, -1)]))
    bits = ((torch.arange(2**14).unsqueeze(1) >> torch.arange(14)) & 1).to(dtype)
    assert len(row_sums([bits]).unique()) == 2**14


@pytest.mark.parametrize("shape", [(3, 40_000), (2**18 + 5,), (1, 2**14), (2**14 + 1, 3), (0, 5), (5, 0), ()], ids=str)
def test_a_fingerprint_is_the_sum_that_it_is_said_to_be(shape, monkeypatch):
    """However many entries are taken at once, and wherever a piece of it starts."""
    tensor = torch.randn(shape)
    known, rows = fingerprints({"w": tensor}), row_sums([tensor])
    for size in (1, 1000, 2**15):
        monkeypatch.setattr(identity, "_FOR_A_CORE", size)
        assert fingerprints({"w": tensor}) == known
        assert torch.equal(row_sums([tensor]), rows)
    flat = identity._integers(tensor).reshape(1, -1)
    whole = identity._weighted(flat)
    for cut in (0, 1, 100, 2**14, 2**14 + 7):
        parted = identity._weighted(flat[:, :cut]) + identity._weighted(flat[:, cut:], cut)
        assert torch.equal(parted, whole)


def test_copies_have_the_fingerprint_of_the_original_whatever_their_memory_and_order():
    copies = {"b": TENSORS["b"].clone(), "a": TENSORS["a"].T.contiguous().T}
    assert fingerprint(copies) == fingerprint(TENSORS)
    assert fingerprints(copies) == fingerprints(TENSORS)


@pytest.mark.parametrize(
    "other",
    [
        {"a": TENSORS["a"], "c": TENSORS["b"]},
        {"a": TENSORS["a"]},
        {"a": TENSORS["a"].view(2, 3), "b": TENSORS["b"]},
        {"a": TENSORS["a"], "b": torch.zeros(4)},
        {"a": TENSORS["a"], "b": TENSORS["b"].double()},
        {"a": TENSORS["a"], "b": TENSORS["b"].flip(0)},
    ],
    ids=["name", "fewer", "shape", "values", "dtype", "places"],
)
def test_other_names_shapes_values_dtypes_or_places_have_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(TENSORS)
