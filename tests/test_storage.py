"""A memory comes back from its file bit for bit, or not at all."""

import contextlib
import copy
import hashlib
import json
import os
import pickle
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast
from holdfast import Dense, Diagonal, Kronecker, LowRank, Memory, Posterior, Source, file
from holdfast.errors import ArgumentError, HoldfastError, MemoryFileError
from holdfast.precision.layers import Layer
from holdfast.precision.terms import Term
from holdfast.storage import FORMAT, _rebuilt_but_for_id

SOURCES = (
    Source("task-1", 12.5, "example", "categorical", "expected"),
    Source("task-2", 30.0, "example", "gaussian(scale=0.3)", "sampled"),
    Source("prior", 0.0, "", "prior(0.1)", ""),
)
LAYOUT = {"embed.weight": torch.Size([3, 2]), "body.weight": torch.Size([2, 2]), "body.bias": torch.Size([2])}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def diagonal(names=tuple(LAYOUT)):
    return Diagonal({name: normal(*LAYOUT[name]).square() for name in names}, SOURCES)


def dense(names=tuple(LAYOUT)):
    layout = {name: LAYOUT[name] for name in names}
    root = normal(sum(shape.numel() for shape in layout.values()), 4)
    return Dense(layout, root @ root.T, SOURCES)


def lowrank(names=tuple(LAYOUT), spanned=None):
    entries = {name: normal(*LAYOUT[name]).square() for name in names}
    return LowRank(entries, {name: normal(3, *LAYOUT[name]) for name in spanned or names}, 2, SOURCES)


def kronecker(terms=1, bias="body.bias", wide=False):
    layer = Layer("body.weight", bias, LAYOUT["body.weight"], 1, 2, False)

    def factor(size):
        return normal(1, size).square() if wide else torch.cov(normal(size, 5)).view(1, size, size)

    return Kronecker({layer: tuple(Term(factor(2), factor(layer.inputs), 12.5) for _ in range(terms))}, SOURCES)


PRECISIONS = {
    "diagonal": diagonal,
    "dense": dense,
    "kronecker": lambda: kronecker(),
    "kronecker terms": lambda: kronecker(2) + kronecker(1, bias=None),
    "kronecker of wide sides": lambda: kronecker(wide=True),
    "rotated": lambda: kronecker(2).rotated() + diagonal(("embed.weight",)),
    "rotated of wide sides": lambda: kronecker(wide=True).rotated(),
    "sum": lambda: diagonal(("embed.weight", "body.bias")) + dense(("body.weight", "embed.weight")),
    "diagonal of a part": lambda: diagonal(("body.bias",)),
    "low rank": lowrank,
    "low rank of a part": lambda: lowrank(("body.bias", "embed.weight"), ("body.bias",)),
    "low rank in a sum": lambda: lowrank(("body.bias", "embed.weight")) + dense(("embed.weight",)),
    "dense in another order": lambda: dense(("body.bias", "embed.weight")),
}


def posterior(kind="diagonal"):
    torch.manual_seed(0)
    mean = {name: normal(*shape) for name, shape in LAYOUT.items()}
    return Posterior(mean, PRECISIONS[kind](), {"embed.weight": ("head.weight", "tail.weight")}, ("mother", "father"))


def memory(kind="diagonal"):
    buffers = {
        "norm.running_mean": torch.tensor([0.1, -2.0, 3.0]),
        "norm.num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor([True, False]),
    }
    return Memory(posterior(kind), buffers)


def assert_same_tensors(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)  # dtypes, too


def assert_same(found, expected):
    assert_same_tensors(found.buffers, expected.buffers)
    found, expected = found.posterior, expected.posterior
    assert_same_tensors(found.mean, expected.mean)
    assert type(found.precision) is type(expected.precision)
    assert found.precision.shapes == expected.precision.shapes
    assert_same_tensors(found.precision.tensors, expected.precision.tensors)
    assert found.sources == tuple(replace(source, weights={}) for source in expected.sources)
    assert (found.num_data, found.unit) == (expected.num_data, expected.unit)
    assert (found.ties, found.parents, found.id) == (expected.ties, expected.parents, expected.id)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "memory.safetensors"


@pytest.fixture
def raw(path):
    """The bytes of a good file."""
    holdfast.save(memory(), path)
    return path.read_bytes()


def header(raw):
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def facts_of(path):
    return json.loads(header(path.read_bytes())["__metadata__"]["holdfast"])


# What comes out is what went in.


@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_memory_is_the_same_after_a_round_trip(path, kind):
    holdfast.save(memory(kind), path)
    assert_same(holdfast.load(path), memory(kind))


class Model(nn.Module):
    """Has the parameters of `LAYOUT`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2, dtype=torch.float64)
        self.body = nn.Linear(2, 2, dtype=torch.float64)


@pytest.mark.parametrize("kind", PRECISIONS)
def test_penalty_and_matrix_are_the_same_after_a_round_trip(path, kind):
    model, before = Model(), posterior(kind)
    holdfast.save(before, path)
    after = holdfast.load(path)
    torch.testing.assert_close(holdfast.penalty(model, after), holdfast.penalty(model, before), rtol=0, atol=0)
    torch.testing.assert_close(after.posterior.precision.dense(), before.precision.dense(), rtol=0, atol=0)


def test_names_keep_their_order_so_that_a_seed_draws_the_same_sample_after_a_round_trip(path):
    before = posterior()
    holdfast.save(before, path)
    after = holdfast.load(path).posterior
    assert (list(after.mean), list(after.precision.shapes)) == (list(before.mean), list(before.precision.shapes))
    assert_same_tensors(*(each.sample(torch.Generator().manual_seed(1)) for each in (after, before)))


def test_what_was_learned_from_data_is_the_same_after_a_round_trip(path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(torch.randn(8, 3))
    before = holdfast.prior(model, precision=0.1)
    for _ in range(2):
        batches = [(torch.randn(5, 3), torch.randint(0, 2, (5,)))]
        fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical)
        before = holdfast.consolidate(before, model, fisher, decay=0.5)
    kept = Memory.of(before, model)
    holdfast.save(kept, path)
    assert_same(holdfast.load(path), kept)
    assert list(kept.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_a_posterior_is_saved_as_a_memory_without_buffers(path):
    holdfast.save(posterior(), str(path))
    assert_same(holdfast.load(str(path)), Memory(posterior()))


ODD = ["mean", "mean.x", "0.weight", "matrix", "größe", 'a"b\\c', "two words", "buffers.", "\u2028"]


def test_any_name_can_be_kept(path):
    mean = {name: normal(2) for name in ODD}
    before = Memory(Posterior(mean, Diagonal({name: normal(2).square() for name in ODD})), {n: normal(1) for n in ODD})
    holdfast.save(before, path)
    assert_same(holdfast.load(path), before)


base = torch.arange(12.0)
FORMS = {
    "a number": torch.tensor(2.0),
    "nothing": torch.zeros(0, 3),
    "transposed": base.view(3, 4).T,
    "a part": base[3:7],
    "every other": base[::2],
    "expanded": torch.tensor(2.0).expand(3, 2),
    "half": base.half(),
    "bfloat16": base.bfloat16(),
    "a parameter": nn.Parameter(base.clone()),
}


@pytest.mark.parametrize("tensor", FORMS.values(), ids=FORMS)
def test_any_tensor_can_be_kept_even_if_two_share_their_memory(path, tensor):
    before = Posterior({"a": tensor, "b": tensor}, Diagonal({"a": tensor}))
    holdfast.save(before, path)
    after = holdfast.load(path).posterior
    for found in (after.mean["a"], after.mean["b"], after.precision.tensors["a"]):
        torch.testing.assert_close(found, tensor.detach(), rtol=0, atol=0)
        assert not found.requires_grad


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_memory_is_loaded_on_the_device_asked_for(path, device):
    holdfast.save(memory(), path)
    loaded = holdfast.load(path, device=device)
    tensors = [*loaded.posterior.mean.values(), *loaded.posterior.precision.tensors.values(), *loaded.buffers.values()]
    assert {tensor.device for tensor in tensors} == {torch.device("cpu")}
    assert_same(loaded, memory())


def test_a_loaded_memory_does_not_change_with_its_file(path, raw):
    loaded = holdfast.load(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * len(raw))
    assert_same(loaded, memory())


# What the file looks like.


@pytest.mark.parametrize("kind", PRECISIONS)
def test_the_same_memory_gives_the_same_bytes(path, kind):
    seen = set()
    holdfast.save(memory(kind), path)
    seen.add(path.read_bytes())
    holdfast.save(memory(kind), path)
    seen.add(path.read_bytes())
    holdfast.save(holdfast.load(path), path)
    seen.add(path.read_bytes())
    assert len(seen) == 1


def canonical(facts):
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def test_the_metadata_is_one_string_of_canonical_json(raw):
    metadata = header(raw)["__metadata__"]
    assert list(metadata) == ["holdfast"]
    assert canonical(json.loads(metadata["holdfast"])) == metadata["holdfast"]


def test_tensors_are_named_by_what_they_are(path):
    holdfast.save(memory(), path)
    assert set(load_file(path)) == {
        *(f"mean.{name}" for name in LAYOUT),
        *(f"precision.{name}" for name in LAYOUT),
        *(f"buffers.{name}" for name in memory().buffers),
    }


def checksum(facts, tensors):
    """SHA-256 over the description without it, then a line per tensor: name, dtype, shape, SHA-256 of the bytes."""
    text = canonical({key: value for key, value in facts.items() if key != "sha256"})
    for name, tensor in sorted(tensors.items()):
        values = hashlib.sha256(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())).hexdigest()
        text += f"{name} {tensor.dtype} {list(tensor.shape)} {values}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def test_many_bytes_are_hashed_by_several_threads_and_the_same(path, monkeypatch):
    monkeypatch.setattr(file, "_MANY", 0)
    holdfast.save(memory(), path)
    facts = facts_of(path)
    assert facts["sha256"] == checksum(facts, load_file(path))
    holdfast.load(path)


def test_a_memory_is_saved_and_loaded_when_the_interpreter_ends(path):
    """When no thread can be started any more."""
    holdfast.save(memory(), path)
    code = (
        "import atexit, sys, holdfast; from holdfast import file; file._MANY = 0; memory = holdfast.load(sys.argv[1]); "
        "atexit.register(lambda: (holdfast.save(memory, sys.argv[1]), holdfast.load(sys.argv[1]), print('saved')))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "saved", ended.stderr


def test_the_checksum_is_over_everything_that_is_said_and_kept(path):
    holdfast.save(memory(), path)
    facts = facts_of(path)
    assert facts["sha256"] == checksum(facts, load_file(path))


def test_inspect_says_what_the_memory_is(path):
    holdfast.save(memory(), path)
    found = holdfast.inspect(path)
    assert found["format"] == FORMAT
    assert (found["num_data"], found["unit"]) == (42.5, "example")
    assert found["likelihood"] == ["categorical", "gaussian(scale=0.3)", "prior(0.1)"]
    assert found["targets"] == ["expected", "sampled"]
    assert found["parents"] == ["mother", "father"]
    assert found["ties"] == {"embed.weight": ["head.weight", "tail.weight"]}
    assert found["id"] == posterior().id
    assert found["shapes"]["mean.embed.weight"] == [3, 2]
    assert found["shapes"]["buffers.norm.num_batches_tracked"] == []


def test_inspect_does_not_read_the_tensors(path, raw):
    before = holdfast.inspect(path)
    data = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:data] + b"\xff" * (len(raw) - data))
    assert holdfast.inspect(path) == before
    with pytest.raises(MemoryFileError, match="damaged: its contents do not match their checksum"):
        holdfast.load(path)


def test_files_load_whatever_the_length_of_their_header(path):
    # A safetensors file starts with that length: its first byte must not be taken for a pickle's.
    starts = set()
    for length in range(1, 270, 4):
        holdfast.save(Posterior({"w" * length: torch.ones(1)}, Diagonal({})), path)
        starts.add(path.read_bytes()[0])
        assert list(holdfast.load(path).posterior.mean) == ["w" * length]
    assert 0x80 in starts


# Damage.


def outcome(path):
    """What loading gives: the memory, or None where it is refused as it should be."""
    with contextlib.suppress(MemoryFileError):
        holdfast.inspect(path)
        return holdfast.load(path)


def test_a_truncated_file_is_refused(path, raw):
    data = 8 + int.from_bytes(raw[:8], "little")
    lengths = [0, 1, 7, 8, 9, data // 2, data - 1, data, data + 1, (data + len(raw)) // 2, len(raw) - 8, len(raw) - 1]
    for length in lengths:
        path.write_bytes(raw[:length])
        assert outcome(path) is None, f"the first {length} of {len(raw)} bytes were accepted"


def test_bytes_at_the_end_are_refused(path, raw):
    path.write_bytes(raw + b"\0")
    assert outcome(path) is None


@pytest.mark.parametrize("region", ["length", "header", "data"])
def test_a_flipped_bit_anywhere_is_refused(path, raw, region):
    data = 8 + int.from_bytes(raw[:8], "little")
    places = {
        "length": [(byte, bit) for byte in range(8) for bit in range(8)],
        "header": [(byte, (3 * byte) % 8) for byte in range(8, data)],
        "data": [(byte, (3 * byte) % 8) for byte in range(data, len(raw))],
    }
    for byte, bit in places[region]:
        flipped = bytearray(raw)
        flipped[byte] ^= 1 << bit
        path.write_bytes(flipped)
        found = outcome(path)
        if found is not None:  # only where it says the same in other letters
            assert_same(found, memory())


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "opened")


def zipped(content, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(content))


@pytest.mark.parametrize(
    "write",
    [
        torch.save,
        lambda content, path: torch.save(content, path, _use_new_zipfile_serialization=False),
        lambda content, path: path.write_bytes(pickle.dumps(content)),
        zipped,
    ],
    ids=["torch.save", "torch.save before 1.6", "pickle", "zip"],
)
def test_a_pickle_is_refused_and_not_opened(path, write):
    trap = path.with_name("trap")
    write({"w": Trap(trap)}, path)
    for read in (holdfast.load, holdfast.inspect):
        with pytest.raises(MemoryFileError, match=r"is a pickle or a zip archive.*never opened"):
            read(path)
    assert not trap.exists()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_of_something_else_is_refused(path, metadata):
    save_file({"mean.w": torch.ones(2)}, path, metadata)
    for read in (holdfast.load, holdfast.inspect):
        with pytest.raises(MemoryFileError, match="not a holdfast memory"):
            read(path)


@pytest.mark.parametrize("name", ["nowhere.safetensors", "."])
def test_a_path_without_a_file_is_refused(tmp_path, name):
    with pytest.raises(MemoryFileError, match="cannot be read"):
        holdfast.load(tmp_path / name)


# Files made with care by someone else: the checksum is right, what it is over is not.


def forged(path, facts=None, tensors=None, text=None, identified=True):
    """Write a file with a right checksum over these facts and tensors, and the identity that they have, if any."""
    tensors = load_file(path) if tensors is None else tensors
    if facts is not None and identified:
        with contextlib.suppress(Exception):
            facts = {**facts, "id": _rebuilt_but_for_id(facts, tensors).posterior.id}
    if text is None:
        text = canonical({**facts, "sha256": checksum(facts, tensors)})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"holdfast": text})


def test_a_forgery_that_changes_nothing_loads(path, raw):
    forged(path, facts_of(path))
    assert path.read_bytes() == raw


def test_a_newer_format_is_refused_with_both_versions(path, raw):
    forged(path, {**facts_of(path), "format": FORMAT + 1})
    for read in (holdfast.load, holdfast.inspect):
        with pytest.raises(MemoryFileError, match=f"format {FORMAT + 1}.*reads up to {FORMAT}.*Update"):
            read(path)


@pytest.mark.parametrize("kind", ["diagonal", "dense", "sum", "kronecker", "rotated"])
def test_a_description_without_one_of_its_parts_is_refused(path, kind):
    holdfast.save(memory(kind), path)
    facts = facts_of(path)
    for key in facts:
        if key != "sha256":
            forged(path, {other: value for other, value in facts.items() if other != key})
            assert outcome(path) is None, f"a description without {key!r} was accepted"


WELL_FORMED = [("parents", []), ("parents", ["x"]), ("ties", {}), ("ties", {"kind": []})]
JUNK = [None, True, -1, 0.5, 10**30, "x", "inf", [], ["x"], [[]], {}, {"kind": []}, [{}], {"x": {"y": None}}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_a_description_with_junk_in_one_of_its_parts_is_refused(path, raw, junk):
    facts = facts_of(path)
    for key in (*facts, "kind"):  # which a memory does not say, for it was the first
        if key != "sha256" and (key, junk) not in WELL_FORMED:
            forged(path, {**facts, key: junk}, identified=key != "id")
            assert outcome(path) is None, f"{key!r}: {junk!r} was accepted"


def test_a_description_of_the_wrong_types_is_not_shown_either(path, raw):
    """What is read by `inspect` alone, without its tensors."""
    facts = facts_of(path)
    for key in set(facts) - {"sha256"}:
        junk = "x" if not isinstance(facts[key], str) else 3
        for forgery in ({**facts, key: junk}, {other: value for other, value in facts.items() if other != key}):
            forged(path, forgery, identified=False)
            with pytest.raises(MemoryFileError, match="its description is not valid"):
                holdfast.inspect(path)


def described(facts):
    """The part of a description that says what the precision is."""
    return next(value for value in facts.values() if isinstance(value, dict) and "kind" in value)


@pytest.mark.parametrize("kind", ["dense", "sum", "kronecker terms", "rotated"])
@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_a_structure_with_junk_in_one_of_its_parts_is_refused(path, kind, junk):
    holdfast.save(memory(kind), path)
    facts = facts_of(path)
    for key in described(facts):
        forgery = copy.deepcopy(facts)
        described(forgery)[key] = junk
        forged(path, forgery)
        assert outcome(path) is None, f"{key!r}: {junk!r} was accepted"


@pytest.mark.parametrize("shape", [[-3, -2], [-1], [2.0], ["2"], [2**62, 2**62], [2**70], "32"], ids=repr)
def test_a_dense_layout_with_impossible_shapes_is_refused(path, shape):
    holdfast.save(memory("dense"), path)
    text = canonical(facts_of(path))
    assert "[3,2]]" in text
    facts = json.loads(text.replace('["embed.weight",[3,2]]', f'["embed.weight",{json.dumps(shape)}]'))
    forged(path, facts)
    assert outcome(path) is None


LAYER_JUNK = [*JUNK, [-1.0], [12.5, 12.5], ["12.5"], [None], [2], [2, 2, 1], [4, 1], "2"]


@pytest.mark.parametrize("kind", ["kronecker", "rotated of wide sides"])
def test_a_layer_with_junk_in_one_of_its_parts_is_refused(path, kind):
    holdfast.save(memory(kind), path)
    facts = facts_of(path)
    (layer,) = described(facts)["layers"]
    for key in layer:
        forged(path, _with_layer(facts, {other: value for other, value in layer.items() if other != key}))
        assert outcome(path) is None, f"a layer without {key!r} was accepted"
        for junk in LAYER_JUNK:
            if junk != layer[key] and (key, junk) != ("turned", True):  # which is another layer
                forged(path, _with_layer(facts, {**layer, key: junk}))
                assert outcome(path) is None, f"{key!r}: {junk!r} was accepted"


def _with_layer(facts, layer):
    forgery = copy.deepcopy(facts)
    described(forgery)["layers"] = [layer]
    return forgery


@pytest.mark.parametrize("kind", ["kronecker", "kronecker of wide sides", "rotated of wide sides", "rotated"])
def test_factors_that_no_precision_has_are_refused_on_the_way_out(path, kind):
    holdfast.save(memory(kind), path)
    facts, tensors = facts_of(path), load_file(path)
    for name in (name for name in tensors if name.startswith("precision.") and "embed" not in name):
        wrong = {
            "nan": tensors[name].clone().index_fill_(-1, torch.tensor([0]), torch.nan),
            "another shape": tensors[name][..., :1],
            "integers": torch.ones(tensors[name].shape, dtype=torch.int64),
        }
        bases = kind == "rotated" and not name.endswith("entries")
        wrong["not orthonormal" if bases else "negative"] = (0.5 if bases else -1) * tensors[name]
        for what, value in wrong.items():
            forged(path, facts, {**tensors, name: value})
            with pytest.raises(MemoryFileError, match="not a valid memory"):
                holdfast.load(path)
            assert what


@pytest.mark.parametrize("depth", [1, 50, 350])
def test_a_sum_of_a_sum_of_a_sum_that_its_tensors_do_not_show_is_refused(path, raw, depth):
    facts = facts_of(path)
    key = next(key for key, value in facts.items() if value == described(facts))
    for _ in range(depth):
        facts[key] = {"kind": "sum", "sources": [], "terms": [facts[key]]}
    forged(path, facts)
    assert outcome(path) is None


@pytest.mark.parametrize("depth", [500, 100_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"format":', "}"), ('{"format":1,"x":', "}")])
def test_json_that_is_nested_deeply_is_refused(path, raw, depth, start, end):
    forged(path, text=start * depth + "1" + end * depth)
    assert outcome(path) is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 5000], ids=lambda n: n[:9])
@pytest.mark.parametrize("key", ["format", "num_data", "stranger"])
def test_numbers_that_json_has_not_are_refused(path, raw, key, number):
    facts = {**facts_of(path), key: "HERE"}
    forged(path, text=canonical(facts).replace('"HERE"', number))
    assert outcome(path) is None


@pytest.mark.parametrize("text", ["", "{", "null", "3", '"x"', "[]", "{}", '{"format":1}', "\x00", '{"format":1}}'])
def test_metadata_that_is_no_description_is_refused(path, raw, text):
    forged(path, text=text)
    assert outcome(path) is None


def test_a_memory_loaded_in_inference_mode_can_be_held_to(tmp_path):
    model = nn.Linear(3, 2)
    data = [(torch.randn(8, 3), torch.arange(8) % 2)]
    fisher = holdfast.kronecker_fisher(model, data, holdfast.categorical)
    holdfast.save(holdfast.consolidate(holdfast.prior(model), model, fisher), tmp_path / "memory")
    with torch.inference_mode():
        memory = holdfast.load(tmp_path / "memory")
    with torch.no_grad():
        model.weight += 1
    holdfast.penalty(model, memory).backward()
    assert float(model.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", ["diagonal", "dense", "sum", "kronecker", "kronecker terms", "rotated"])
def test_a_file_that_lacks_a_tensor_or_has_one_more_is_refused(path, kind):
    holdfast.save(memory(kind), path)
    facts, tensors = facts_of(path), load_file(path)
    for gone in tensors:
        forged(path, facts, {name: tensor for name, tensor in tensors.items() if name != gone})
        assert outcome(path) is None, f"a file without {gone} was accepted"
    extra = ["mean.more", "precision.more", "precision.0.more", "precision.7.more", "precision.matrix.more"]
    for more in [*extra, "buffers.more", "strange.more", "mean", "more", ""]:
        forged(path, facts, {**tensors, more: normal(2).square()})
        assert outcome(path) is None, f"a file with {more!r} was accepted"


@pytest.mark.parametrize(
    "value",
    [
        torch.full((2,), torch.nan, dtype=torch.float64),
        torch.full((2,), torch.inf, dtype=torch.float64),
        torch.full((2,), -1.0, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
    ids=["nan", "infinite", "negative", "another shape", "integers", "complex", "eight bits"],
)
def test_values_that_no_precision_has_are_refused_on_the_way_out(path, raw, value):
    forged(path, facts_of(path), {**load_file(path), "precision.body.bias": value})
    assert outcome(path) is None


@pytest.mark.parametrize("name", ["mean.body.bias", "precision.body.bias", "buffers.norm.running_mean"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_on_the_way_out(path, raw, name, value):
    tensors = load_file(path)
    tensors[name].view(-1)[1] = value
    forged(path, facts_of(path), tensors)
    assert outcome(path) is None


# Writing: whole, or not at all.


@pytest.mark.parametrize("room", ["mean", "precision", "buffers"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_on_the_way_in(path, raw, room, value):
    kept = memory()
    rooms = {"mean": kept.posterior.mean, "precision": kept.posterior.precision.tensors, "buffers": kept.buffers}
    next(iter(rooms[room].values())).view(-1)[0] = value  # a frozen value's tensors can still be written into
    with pytest.raises(HoldfastError, match="not finite"):
        holdfast.save(kept, path)
    assert path.read_bytes() == raw
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("stranger", [{"w": torch.ones(2)}, nn.Linear(1, 1), None], ids=["dict", "model", "None"])
def test_only_a_posterior_or_a_memory_is_saved(path, stranger):
    with pytest.raises(ArgumentError, match=f"a Posterior or a Memory is needed, got {type(stranger).__name__}"):
        holdfast.save(stranger, path)
    assert os.listdir(path.parent) == []


def test_a_folder_that_is_missing_is_an_error_and_is_not_made(tmp_path):
    with pytest.raises(MemoryFileError, match=r"could not be written: its folder \S*missing does not exist, make it"):
        holdfast.save(posterior(), tmp_path / "missing" / "memory.safetensors")
    assert os.listdir(tmp_path) == []


FAULTS = [("replace", 1, OSError("read-only")), ("fsync", 1, OSError("full")), ("fsync", 2, OSError("no such call"))]


@pytest.mark.parametrize(
    ("call", "nth", "fault"), [*FAULTS, ("replace", 1, KeyboardInterrupt()), ("open", 1, OSError())]
)
def test_a_save_that_fails_leaves_the_old_file_and_one_that_returns_the_new(path, raw, monkeypatch, call, nth, fault):
    calls = []
    real = getattr(os, call)

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise fault
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    expected = memory()
    with contextlib.suppress(MemoryFileError if isinstance(fault, OSError) else KeyboardInterrupt):
        holdfast.save(posterior("dense"), path)
        expected = Memory(posterior("dense"))
    monkeypatch.undo()
    assert len(calls) >= nth
    assert os.listdir(path.parent) == [path.name]
    assert_same(holdfast.load(path), expected)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_says_who_may_read_the_file(path, umask, mode):
    before = os.umask(umask)
    try:
        holdfast.save(posterior(), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("name", ["", ".", "/", "a\0b", "x" * 300 + ".safetensors"])
def test_a_path_that_cannot_be_a_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MemoryFileError):
        holdfast.save(posterior(), name)
    with pytest.raises(MemoryFileError):
        holdfast.load(name)
    assert os.listdir(tmp_path) == []


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(path):
    os.mkfifo(path)
    with pytest.raises(MemoryFileError, match="is not a file to write to"):
        holdfast.save(posterior(), path)
    assert path.is_fifo()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_pipe_is_not_read(path):
    """Nobody may ever write to it. Here there are bytes in it, so that it would not be waited for without end."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    try:
        os.write(pipe, b"a" * 100)
        with pytest.raises(MemoryFileError, match="it is no regular file"):
            holdfast.load(path)
    finally:
        os.close(pipe)
