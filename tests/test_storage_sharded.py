"""A memory in pieces comes back from its folder bit for bit, in as many processes as there are, or not at all.

The processes run this file as a script, all their scenarios one after another; the tests look at what they saved.
"""

import copy
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import stat
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn

import holdfast
from holdfast import Diagonal, Memory, Posterior, Source
from holdfast.devices import full
from holdfast.errors import HoldfastError, MemoryFileError
from holdfast.folder import disk
from holdfast.folder.manifest import NAME, Piece, Spread, _tiled
from holdfast.pieces import cut, in_pieces
from holdfast.precision.layers import Layer
from holdfast.precision.terms import Term
from holdfast.storage import FORMAT, _tensors
from processes import gathered, main
from sharded_cases import Scaled

FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()
SOURCES = (Source("task-1", 12.5, "example", "categorical", "expected"),)


ODD = ["mean", "mean.x", "0.weight", "größe", 'a"b\\c', "two words", "a@0", "\u2028"]


class Normed(nn.Module):
    """What tensor parallelism cuts along either axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5)


def made(kind: type[nn.Module] = Scaled) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def memory(model: nn.Module, factor: float = 1.0, structure: str = "diagonal") -> Memory:
    """The same on all ranks: cut as the parameters of a model are."""
    torch.manual_seed(3)
    params = dict(model.named_parameters())
    mean = {name: torch.randn(p.shape, dtype=torch.float64) for name, p in params.items()}
    entries = {name: factor * torch.rand(p.shape, dtype=torch.float64) for name, p in params.items()}
    rest = None
    if structure == "sum":
        head = Layer("head.weight", "head.bias", torch.Size([3, 7]), 1, 3, False)
        factors = [torch.cov(torch.randn(size, 9, dtype=torch.float64)).view(1, size, size) for size in (3, 8)]
        rest = holdfast.Kronecker({head: (Term(*factors, 12.5),)}, SOURCES)
        entries = {name: value for name, value in entries.items() if not name.startswith("head.")}
    precision = Diagonal({name: cut(value, params[name]) for name, value in entries.items()}, SOURCES)
    posterior = Posterior(
        {name: cut(value, params[name]) for name, value in mean.items()},
        precision if rest is None else precision + rest,
        {"scale": ("other.scale",)},
        ("mother",),
    )
    buffers = {"norm.running_mean": torch.tensor([0.5, -2.0]), "norm.num_batches_tracked": torch.tensor(7)}
    return Memory(posterior, buffers, holdfast.kept_inputs(torch.arange(6.0).view(2, 3)))


# What the processes do. Each function takes the rank and gives what it found.


def sharded(mesh=None, kind: type[nn.Module] = Scaled) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = made(kind)
    if kind is Scaled:
        fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(mesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(made(Normed), mesh, plan)


def laid_out(how: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = distributed.get_world_size()
    if how == "tensor parallel":
        return parallel(init_device_mesh("cpu", (world,)))
    if how == "in two axes":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        return fully_shard(parallel(mesh["tensor"]), mesh=mesh["data"])
    if how == "replicas of pieces":
        return sharded(init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")))
    return sharded()


LAYOUTS = {"sharded": Scaled, "replicas of pieces": Scaled, "tensor parallel": Normed, "in two axes": Normed}


def summary(found: Memory) -> dict:
    tensors = _tensors(found)
    return {
        "tensors": {name: full(tensor) for name, tensor in tensors.items()},
        "pieces": sorted(name for name, tensor in tensors.items() if in_pieces(tensor)),
        "placements": {n: tensor.placements for n, tensor in tensors.items() if in_pieces(tensor)},
        "id": found.posterior.id,
        "facts": (found.posterior.ties, found.posterior.parents, found.num_data, repr(found)),
    }


def fails(function, *args, **options) -> tuple[str, str]:
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def saved(rank: int) -> dict:
    for how in LAYOUTS:
        holdfast.save(memory(laid_out(how)), FOLDER / how)
    holdfast.save(memory(sharded(), structure="sum"), FOLDER / "sum")
    holdfast.save(memory(sharded(), 2.0), FOLDER / "twice")
    holdfast.save(memory(sharded()), FOLDER / "twice")
    return {"path": str(FOLDER), "twice": sorted(os.listdir(FOLDER / "twice"))}


def loaded(rank: int) -> dict:
    hows = list(LAYOUTS) if distributed.get_world_size() > 1 else ["sharded"]
    found = {}
    for how in hows:
        model = laid_out(how)
        params = dict(model.named_parameters())
        found[how] = summary(holdfast.load(FOLDER / how, model))
        for name, placements in found[how].pop("placements").items():
            assert placements == params[name.partition(".")[2]].placements, name
    found["sum"] = summary(holdfast.load(FOLDER / "sum", sharded()))
    found["sum"].pop("placements")
    return found


def in_four(rank: int) -> dict:
    return loaded(rank)


def copies_that_differ(rank: int) -> dict:
    """Of replicas of pieces, one has other numbers than the other."""
    model = laid_out("replicas of pieces")
    path = FOLDER / "copies"
    holdfast.save(memory(model), path)
    other = memory(model)
    other.mean["head.weight"].to_local().add_(float(rank >= 2))
    said = fails(holdfast.save, other, path)
    return {"said": said, "there": holdfast.load(path, model).posterior.id, "was": memory(model).posterior.id}


def in_two(rank: int) -> dict:
    return loaded(rank)


def in_one(rank: int) -> dict:
    found = loaded(rank)
    model = sharded()
    holdfast.save(memory(model), FOLDER / "of one")
    found["of one"] = summary(holdfast.load(FOLDER / "of one", model))
    return found


def read_by_each(rank: int) -> dict:
    """How many bytes a rank takes from the files, and how many its pieces and the whole tensors have."""
    from holdfast.folder import checkpoint

    taken = []

    class Counted:
        def __init__(self, *args, **options) -> None:
            self._file = real(*args, **options)

        def __enter__(self):
            self._content = self._file.__enter__()
            return self

        def __exit__(self, *args) -> None:
            self._file.__exit__(*args)

        def get_tensor(self, key):
            taken.append(self._content.get_tensor(key))
            return taken[-1]

        def get_slice(self, key):
            content = self._content

            class Slice:
                def __getitem__(self, box):
                    taken.append(content.get_slice(key)[box])
                    return taken[-1]

            return Slice()

    real = checkpoint.safe_open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "safe_open", Counted)
        found = _tensors(holdfast.load(FOLDER / "sharded", sharded()))
    needed = sum(t.to_local().nbytes if in_pieces(t) else t.nbytes for t in found.values())
    return {"taken": sum(value.nbytes for value in taken), "needed": needed}


def forms(rank: int) -> dict:
    """Numbers of other kinds under odd names, in many small files, that few may read."""
    from holdfast.folder import checkpoint

    model = sharded()
    like = dict(model.named_parameters())["head.weight"]
    torch.manual_seed(4)
    numbers = {name: torch.randn(3, 7) for name in ODD}
    mean = {
        name: cut(value.to(kind), like)
        for (name, value), kind in zip(numbers.items(), [torch.float16, torch.bfloat16] * 4, strict=True)
    }
    known = Posterior(mean, Diagonal({name: value.square() for name, value in mean.items()}))
    buffers = {
        "mask": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 3),
        "a@0": torch.tensor(3, dtype=torch.int8),
    }
    before = os.umask(0o027)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_LARGEST", 64)
        holdfast.save(Memory(known, buffers), FOLDER / "forms")
    os.umask(before)
    distributed.barrier()
    found = holdfast.load(FOLDER / "forms")
    same = {n: torch.equal(full(value), _tensors(found)[n]) for n, value in _tensors(Memory(known, buffers)).items()}
    files = sorted((FOLDER / "forms").glob("data-*/*"))
    modes = {oct(stat.S_IMODE(each.stat().st_mode)) for each in (*files, FOLDER / "forms" / NAME)}
    return {"same": same, "files": len(files), "modes": modes, "ids": (found.posterior.id, known.id)}


def from_a_file(rank: int) -> dict:
    """A file, which has whole tensors, for a model in pieces; and a folder on one rank alone, for nobody."""
    path = FOLDER / "whole.safetensors"
    if rank == 0:
        holdfast.save(memory(made(), structure="sum"), path)
    distributed.barrier()
    found = {"sum": summary(holdfast.load(path, sharded()))}
    found["sum"].pop("placements")
    if rank == 1:
        found["alone"] = summary(holdfast.load(FOLDER / "sharded"))
    return found


def errors(rank: int) -> dict:
    from holdfast import file
    from holdfast.folder import checkpoint

    model, found = sharded(), {}
    known, good = memory(model), FOLDER / "sharded"
    other = Memory(known.posterior, {**known.buffers, "norm.num_batches_tracked": torch.tensor(7 + rank)})
    found["another buffer"] = fails(holdfast.save, other, FOLDER / "new")
    parents = Posterior(known.mean, known.precision, known.posterior.ties, ("mother",) * (1 + rank))
    found["other parents"] = fails(holdfast.save, parents, FOLDER / "new")
    broken = memory(model)
    if rank:
        broken.mean["head.weight"].to_local()[0, 0] = torch.nan  # a frozen value's tensors can still be written into
    found["not finite"] = fails(holdfast.save, broken, FOLDER / "new")
    found["nothing there"] = ("yes", str((FOLDER / "new").exists()))

    (FOLDER / f"file{rank}").write_text("x")
    found["a file"] = fails(holdfast.save, known, FOLDER / "file0")
    os.makedirs(FOLDER / "others" / f"mine{rank}", exist_ok=True)
    found["other things"] = fails(holdfast.save, known, FOLDER / "others")
    found["nowhere"] = fails(holdfast.save, known, FOLDER / "not" / "there")

    def full_disk(*args) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(checkpoint, "put", full_disk)
        found["a full disk"] = fails(holdfast.save, memory(model, 5.0), good)
        found["a full disk, anew"] = fails(holdfast.save, memory(model, 5.0), FOLDER / "new")
    with pytest.MonkeyPatch.context() as patch:
        synced = file.synced
        patch.setattr(file, "synced", lambda path: full_disk() if path.suffix == ".tmp" else synced(path))
        found["no manifest"] = fails(holdfast.save, memory(model, 5.0), good)
    distributed.barrier()
    found["left by a full disk"] = ("yes", str((len(os.listdir(good)), (FOLDER / "new").exists())))
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Path, "is_dir", lambda self: not self.name.startswith("data-") and os.path.isdir(self))
        found["another disk"] = fails(holdfast.save, memory(model, 5.0), good)
    found["afterwards"] = ("yes", holdfast.load(good, model).posterior.id)

    found["another model"] = fails(holdfast.load, good, sharded(kind=Normed))
    larger = made()
    larger.head = nn.Linear(7, 4).double()
    found["a larger model"] = fails(holdfast.load, good, _whole_sharded(larger))
    found["a device too"] = fails(holdfast.load, good, model, device="cpu")
    found["no folder here"] = fails(holdfast.load, good if rank else FOLDER / "nowhere", model)
    found["no file here"] = fails(holdfast.load, FOLDER / ("whole.safetensors" if rank else "nowhere.pt"), model)
    found["another model here"] = fails(
        holdfast.load, FOLDER / "whole.safetensors", model if rank else sharded(kind=Normed)
    )
    found["a file here"] = fails(holdfast.load, good if rank else FOLDER / "whole.safetensors", model)
    found["two folders"] = fails(holdfast.load, FOLDER / ("sharded" if rank else "sum"), model)
    if rank == 0:
        shutil.copytree(good, FOLDER / "flipped")
        shard = sorted((FOLDER / "flipped").glob("data-*/*"))[-1]
        flip(shard, shard.stat().st_size - 3)
    distributed.barrier()
    found["flipped"] = fails(holdfast.load, FOLDER / "flipped", model)
    return found


def replace_by(other: Path, path: Path) -> None:
    """Have another job save to a folder: as one does that is quick, and was there for long."""
    before = manifest_of(path)["data"]
    data = manifest_of(other)["data"]
    shutil.rmtree(path / data, ignore_errors=True)
    shutil.copytree(other / data, path / data)
    shutil.copy(other / NAME, path / "new")
    os.replace(path / "new", path / NAME)
    if data != before:
        shutil.rmtree(path / before)


def two_jobs(rank: int) -> dict:
    """What another job does in the middle of a save, or of a load."""
    from holdfast.folder import checkpoint, disk

    model, other, path = sharded(), FOLDER / "sum", FOLDER / "shared"
    found = {}
    cleared, synced, require_data = disk.cleared, checkpoint.synced, disk.require_data
    under_way, left = path / "data-0123456789abcdef", path / "data-fedcba9876543210"

    def after_another(*args) -> None:
        replace_by(other, path)
        cleared(*args)

    def beside_another(*args) -> None:
        under_way.mkdir()
        left.mkdir()
        os.utime(left, (0, 0))
        cleared(*args)

    def removed(*args) -> None:
        shutil.rmtree(path / manifest_of(path)["data"])

    def too_early(folder: Path) -> None:
        synced(folder)
        shutil.rmtree(folder)

    def after_a_save(*args) -> None:
        if rank == 0 and manifest_of(path)["data"] != manifest_of(other)["data"]:
            replace_by(other, path)
        distributed.barrier()
        require_data(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "cleared", after_another)
        found["saved after"] = fails(holdfast.save, memory(model), path)
    found["then it is"] = holdfast.load(path, model).posterior.id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "cleared", beside_another)
        found["saved beside"] = fails(holdfast.save, memory(model), path)
    distributed.barrier()
    found["left"] = (under_way.exists(), left.exists())
    distributed.barrier()
    holdfast.save(memory(model), path)
    found["left in the end"] = (under_way.exists(), left.exists())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "synced", too_early)
        found["removed before"] = fails(holdfast.save, memory(model, 2.0), path)
    found["is as it was"] = holdfast.load(path, model).posterior.id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "cleared", removed)
        found["removed after"] = fails(holdfast.save, memory(model, 2.0), path)
    holdfast.save(memory(model), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "require_data", after_a_save)
        found["loaded"] = holdfast.load(path, model).posterior.id
    return found


def _whole_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def flip(file: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


# A process that dies, and what the others say. Each has processes of its own.

DEATHS = {  # who dies, and when
    "before it writes": 1,
    "in the middle of a file": 1,
    "before it vouches": 1,
    "before the manifest": 0,
    "after the manifest": 0,
}


def dying(rank: int, when: str) -> None:
    from holdfast.folder import checkpoint, disk

    torch.set_num_threads(1)
    store = f"file://{FOLDER}/store {when}".replace(" ", "_")
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=20)
    )  # fmt: skip
    model, path = sharded(), FOLDER / f"dead {when}"
    holdfast.save(memory(model), path)
    put, replaced = checkpoint.put, disk.put

    def killed(file, tensors, metadata) -> None:
        if when != "before it writes":
            put(file, tensors, metadata)
        if when == "in the middle of a file":
            os.truncate(file, file.stat().st_size // 2)
        os._exit(9)

    def killed_first(*args) -> None:
        if when == "after the manifest":
            replaced(*args)
        os._exit(9)

    if rank == DEATHS[when] == 1:
        checkpoint.put = killed
    elif rank == DEATHS[when] == 0:
        disk.put = killed_first
    start = time.monotonic()
    found = fails(holdfast.save, memory(model, 7.0), path)
    torch.save((*found, time.monotonic() - start), FOLDER / f"dead {when} {rank}.pt")


def deaths() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    for when in DEATHS:
        children = []
        for rank in range(3):
            child = os.fork()
            if child == 0:
                try:
                    dying(rank, when)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


def after_deaths(rank: int) -> dict:
    """What the survivors said, what loads now, and that the next save clears what was left."""
    found = {}
    for when, dead in DEATHS.items():
        path = FOLDER / f"dead {when}"
        said = [torch.load(FOLDER / f"dead {when} {r}.pt", weights_only=False) for r in range(3) if r != dead]
        left = [entry for entry in os.listdir(path) if entry.startswith("data-")]
        id_ = holdfast.load(path).posterior.id
        holdfast.save(memory(sharded(), 3.0), path)
        found[when] = {"said": said, "left": len(left), "id": id_, "then": sorted(os.listdir(path))}
    return found


SCENARIOS = {
    4: [saved, in_four, read_by_each, copies_that_differ],
    2: [in_two, from_a_file, forms, errors, two_jobs],
    1: [in_one, after_deaths],
}


# What they must have found.


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


@pytest.fixture
def folder(found, tmp_path) -> Path:
    """A good folder, from four processes, to do damage to."""
    shutil.copytree(Path(found["saved"][0]["path"]) / "sharded", tmp_path / "memory")
    return tmp_path / "memory"


def require_same(found: dict, expected: Memory) -> None:
    tensors = _tensors(expected)
    assert set(found["tensors"]) == set(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found["tensors"][name], tensor, rtol=0, atol=0)
    assert found["id"] == expected.posterior.id
    facts = (expected.posterior.ties, expected.posterior.parents, expected.num_data, repr(expected))
    assert found["facts"] == facts


def in_one_piece(model: nn.Module, structure: str = "diagonal") -> Memory:
    return memory(model, structure=structure)


@pytest.mark.parametrize("scenario", ["in_four", "in_two", "in_one"])
def test_what_four_processes_saved_comes_back_bit_for_bit_cut_as_the_model_is(scenario, found):
    for each in found[scenario]:
        for how in LAYOUTS if scenario != "in_one" else ["sharded"]:
            expected = in_one_piece(made(LAYOUTS[how]))
            require_same(each[how], expected)
            pieces = {f"{room}.{name}" for room in ("mean", "precision") for name in expected.mean}
            assert set(each[how]["pieces"]) == pieces


@pytest.mark.parametrize("how", LAYOUTS)
def test_it_comes_back_whole_in_a_process_of_its_own(how, found):
    path = Path(found["saved"][0]["path"]) / how
    for given in (holdfast.load(path), holdfast.load(str(path), made(LAYOUTS[how]))):
        whole = summary(given)
        require_same(whole, in_one_piece(made(LAYOUTS[how])))
        assert whole["pieces"] == []


@pytest.mark.parametrize("scenario", ["in_four", "in_two", "in_one", "from_a_file"])
def test_of_a_sum_the_diagonal_is_cut_and_the_rest_is_whole(scenario, found):
    expected = in_one_piece(made(), "sum")
    for each in found[scenario]:
        require_same(each["sum"], expected)
        cut_ = {f"mean.{name}" for name in expected.mean}
        cut_ |= {f"precision.0.{name}" for name in expected.mean if "head" not in name}
        assert set(each["sum"]["pieces"]) == cut_


def test_one_process_alone_in_its_group_saves_and_loads(found):
    require_same(found["in_one"][0]["of one"], in_one_piece(made()))


def test_one_rank_may_load_a_folder_for_itself(found):
    require_same(found["from_a_file"][1]["alone"], in_one_piece(made()))


def test_a_rank_reads_the_pieces_it_has_and_no_more(found):
    whole = sum(tensor.nbytes for tensor in _tensors(in_one_piece(made())).values())
    for each in found["read_by_each"]:
        assert each["taken"] == each["needed"] < 0.6 * whole


def test_any_numbers_under_any_names_come_back_from_any_number_of_files(found):
    for each in found["forms"]:
        assert len(each["same"]) == 19
        assert all(each["same"].values()), each["same"]
        assert each["ids"][0] == each["ids"][1]
        assert each["files"] > 4
        assert each["modes"] == {"0o640"}


def test_saving_again_leaves_one_memory(found):
    for each in found["saved"]:
        assert [name[:5] for name in each["twice"]] == ["data-", "holdf"]
    path = Path(found["saved"][0]["path"]) / "twice"
    assert holdfast.load(path).posterior.id == in_one_piece(made()).posterior.id


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("another buffer", "MismatchError", "rank 1 differs from rank 0 in `buffers.norm.num_batches_tracked`"),
        ("other parents", "MismatchError", "rank 1 differs from rank 0 in `what it says of itself`"),
        ("not finite", "ArgumentError", "`mean of head.weight` has values that are not finite"),
        ("nothing there", "yes", "False"),
        ("a file", "MemoryFileError", "is a file, and a memory in pieces .* is written as a folder. Give another name"),
        ("other things", "MemoryFileError", "is a folder with other things in it .mine0.. Give the memory a folder"),
        ("nowhere", "MemoryFileError", "could not be written: rank 0: FileNotFoundError"),
        ("a full disk", "MemoryFileError", "rank 1: OSError: .Errno 28. No space left.*before is as it was"),
        ("a full disk, anew", "MemoryFileError", "rank 1: OSError: .Errno 28. No space left"),
        ("no manifest", "MemoryFileError", "rank 0: OSError: .Errno 28. No space left.*before is as it was"),
        ("left by a full disk", "yes", r"\(2, False\)"),
        ("another disk", "MemoryFileError", "rank 1: .* needs a file system that all share"),
        ("another model", "InertError", "no parameter of the memory is in this model.*Without model=, .* whole"),
        ("a larger model", "MismatchError", "`head.weight` has shape .4, 7. in the model and .3, 7. in the memory"),
        ("a device too", "ArgumentError", "give the model, or a device, and not both"),
        ("no folder here", "MemoryFileError", "cannot be read"),
        ("no file here", "MemoryFileError", "cannot be read"),
        ("another model here", "MemoryFileError|InertError", "no parameter of the memory is in this model"),
        ("a file here", "MemoryFileError", "it is not the same file or folder on all processes"),
        ("two folders", "MemoryFileError", "is not the same folder on all processes"),
        ("flipped", "MemoryFileError", r"00003-0.safetensors does not match its checksum.* Use another copy"),
    ],
)
def test_what_is_wrong_for_one_rank_is_an_error_on_all(what, kind, message, found):
    for each in found["errors"]:
        got, said = each[what]
        assert re.fullmatch(kind, got), said
        assert re.search(message, said), said


def test_copies_that_differ_are_not_saved_as_one(found):
    for each in found["copies_that_differ"]:
        kind, said = each["said"]
        assert kind == "MismatchError"
        assert "rank 2 differs from rank 0 in `mean.head.weight`" in said
        assert each["there"] == each["was"]


def test_failed_saves_leave_the_memory_that_was_there(found):
    for each in found["errors"]:
        assert each["afterwards"][1] == in_one_piece(made()).posterior.id


def test_a_save_leaves_what_another_job_has_put_or_is_writing(found):
    for each in found["two_jobs"]:
        assert each["saved after"] == each["saved beside"] == ("nothing", "")
        assert each["then it is"] == in_one_piece(made(), "sum").posterior.id
        assert each["left"] == (True, False)
        assert each["left in the end"] == (False, False)


def test_a_save_whose_files_another_job_removed_is_an_error_on_all(found):
    for each in found["two_jobs"]:
        for when in ("removed before", "removed after"):
            kind, said = each[when]
            assert kind == "MemoryFileError"
            assert re.search("another job saved here at the same time .*lacks 0000.*Save again, one job after", said)
        assert each["is as it was"] == in_one_piece(made()).posterior.id


def test_a_load_in_the_middle_of_a_save_gives_the_memory_that_took_the_place(found):
    for each in found["two_jobs"]:
        assert each["loaded"] == in_one_piece(made(), "sum").posterior.id


@pytest.mark.parametrize("function", ["disk.require_data", "checkpoint.fill_"])
def test_a_load_by_one_process_in_the_middle_of_a_save_does_too(function, folder, found, monkeypatch):
    from holdfast.folder import checkpoint, disk

    module, name = {"disk": disk, "checkpoint": checkpoint}[function.split(".")[0]], function.split(".")[1]
    others = [Path(found["saved"][0]["path"]) / each for each in ("sum", "replicas of pieces")]
    real, calls = getattr(module, name), []

    def after_a_save(*args):
        calls.append(args)
        if len(calls) <= 3 or forever:
            now = manifest_of(folder)["data"]
            replace_by(next(other for other in others if manifest_of(other)["data"] != now), folder)
        return real(*args)

    monkeypatch.setattr(module, name, after_a_save)
    forever = False
    assert holdfast.load(folder).posterior.id == in_one_piece(made(), "sum").posterior.id
    assert len(calls) == 4
    forever = True
    with pytest.raises(MemoryFileError, match="being written"):
        holdfast.load(folder)
    assert len(calls) == 4 + disk.TURNS


@pytest.mark.parametrize("when", DEATHS)
def test_a_process_that_dies_while_saving_leaves_a_whole_memory_and_the_others_hear_of_it(when, found):
    (after,) = found["after_deaths"]
    factor = 7.0 if when == "after the manifest" else 1.0
    assert after[when]["id"] == memory(made(), factor).posterior.id
    for kind, message, seconds in after[when]["said"]:
        assert kind == "MemoryFileError", message
        assert "a process stopped on the way" in message
        assert seconds < 15
    assert after[when]["left"] == 2  # the one that loads, and the other
    assert [name[:5] for name in after[when]["then"]] == ["data-", "holdf"]


# The folder, and damage to it.


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / NAME).read_text())


def test_the_folder_is_safetensors_and_one_line_of_canonical_json(folder):
    said = manifest_of(folder)
    assert json.dumps(said, sort_keys=True, separators=(",", ":")) == (folder / NAME).read_text()
    assert {each.name for each in folder.iterdir()} == {NAME, said["data"]}
    assert sorted(said["files"]) == [f"0000{rank}-0.safetensors" for rank in range(4)]
    for name, mark in said["files"].items():
        assert hashlib.sha256((folder / said["data"] / name).read_bytes()).hexdigest() == mark
    first = load_file(folder / said["data"] / "00000-0.safetensors")
    torch.testing.assert_close(first["mean.body.0.weight@0,0"], in_one_piece(made()).mean["body.0.weight"][:2])


def test_inspect_says_of_a_folder_what_it_says_of_a_file(folder, tmp_path):
    file = tmp_path / "memory.safetensors"
    holdfast.save(in_one_piece(made()), file)
    of_folder, of_file = holdfast.inspect(folder), holdfast.inspect(file)
    assert {k: v for k, v in of_folder.items() if k != "sha256"} == {k: v for k, v in of_file.items() if k != "sha256"}


def test_a_whole_memory_is_not_written_over_a_folder(folder):
    with pytest.raises(MemoryFileError, match="is not a file to write to"):
        holdfast.save(in_one_piece(made()), folder)
    assert holdfast.load(folder).posterior.id == in_one_piece(made()).posterior.id


def outcome(folder: Path) -> Memory | None:
    """What loading gives: the memory, or None where it is refused as it should be."""
    try:
        holdfast.inspect(folder)
        return holdfast.load(folder)
    except MemoryFileError:
        return None


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("data-*/*.safetensors"))


def test_a_folder_without_a_manifest_was_never_finished(folder):
    (folder / NAME).unlink()
    with pytest.raises(MemoryFileError, match=r"without holdfast.json.*never finished. Save it again"):
        holdfast.load(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(MemoryFileError, match="cannot be read"):
        holdfast.inspect(folder)


@pytest.mark.parametrize("place", range(4))
def test_a_missing_shard_is_refused(folder, place):
    shards(folder)[place].unlink()
    with pytest.raises(MemoryFileError, match=rf"lacks 0000{place}-0.safetensors \(1 of 4 files.*Copy it again"):
        holdfast.load(folder)


def test_missing_data_is_refused(folder):
    shutil.rmtree(folder / manifest_of(folder)["data"])
    with pytest.raises(MemoryFileError, match=r"lacks 00000-0.safetensors \(4 of 4 files"):
        holdfast.load(folder)


def test_a_file_more_among_the_data_is_refused_and_other_data_is_not_looked_at(folder):
    other = folder / "data-0123456789abcdef"
    other.mkdir()
    (other / "00000-0.safetensors").write_bytes(b"half of a")
    assert outcome(folder) is not None
    shutil.rmtree(other)
    shutil.copy(shards(folder)[0], shards(folder)[0].with_name("00004-0.safetensors"))
    with pytest.raises(MemoryFileError, match=r"has 00004-0.safetensors in data-.*no part of the memory.*Remove it"):
        holdfast.load(folder)


def test_a_shard_of_another_memory_is_refused(folder, found):
    other = Path(found["saved"][0]["path"]) / "sum"
    shutil.copy(sorted(other.glob("data-*/*"))[1], shards(folder)[1])
    with pytest.raises(MemoryFileError, match=r"00001-0.safetensors does not match .*, or is another memory's"):
        holdfast.load(folder)


def test_a_truncated_or_longer_file_is_refused(folder):
    for file in (*shards(folder), folder / NAME):
        whole = file.read_bytes()
        for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            assert outcome(folder) is None, f"{length} bytes of {file.name} were accepted"
        file.write_bytes(whole + b"\0")
        assert outcome(folder) is None
        file.write_bytes(whole)
    assert outcome(folder) is not None


def test_a_flipped_bit_anywhere_is_refused(folder):
    expected = in_one_piece(made())
    for file in (shards(folder)[2], folder / NAME):
        whole = file.read_bytes()
        for byte in range(0, len(whole), 7):
            flip(file, byte, (3 * byte) % 8)
            assert outcome(folder) is None, f"byte {byte} of {file.name}"
            file.write_bytes(whole)
    require_same(summary(holdfast.load(folder)), expected)


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "opened")


def test_no_pickle_is_opened(folder, tmp_path):
    trap = tmp_path / "trap"
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(trap)))  # where DCP's own format has one
    assert outcome(folder) is not None
    for file in (*shards(folder), folder / NAME):
        whole = file.read_bytes()
        file.write_bytes(pickle.dumps(Trap(trap)))
        if file.suffix == ".safetensors":
            forge(folder, {})
        assert outcome(folder) is None
        file.write_bytes(whole)
    assert not trap.exists()


# Folders made with care by someone else: the checksums are right, what they are over is not.


def forge(folder: Path, change: dict) -> None:
    """Put a manifest with right checksums, of the files as they are and of itself."""
    said = {**manifest_of(folder), **change}
    said.pop("sha256")
    if "files" not in change:
        data = folder / said["data"]
        said["files"] = {
            each: hashlib.sha256((data / each).read_bytes()).hexdigest()
            for each in said["files"]
            if (data / each).exists()
        }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    said["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / NAME).write_text(json.dumps(said, sort_keys=True, separators=(",", ":")))


def test_a_forgery_that_changes_nothing_loads(folder):
    before = (folder / NAME).read_text()
    forge(folder, {})
    assert (folder / NAME).read_text() == before
    assert outcome(folder) is not None


def test_a_newer_format_is_refused_with_both_versions(folder):
    forge(folder, {"memory": {**manifest_of(folder)["memory"], "format": FORMAT + 1}})
    with pytest.raises(MemoryFileError, match=f"format {FORMAT + 1}.*reads up to {FORMAT}.*Update"):
        holdfast.load(folder)


JUNK = [None, True, -1, 0.5, 10**30, "x", [], ["x"], [[]], {}, {"kind": []}, [{}], {"x": {"y": None}}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_one_of_its_parts_is_refused(folder, junk):
    said = manifest_of(folder)
    for key in ("memory", "data", "files", "tensors"):
        forge(folder, {key: junk, **({"files": said["files"]} if key == "data" else {})})
        assert outcome(folder) is None, f"{key!r}: {junk!r} was accepted"
        forge(folder, said)
    for key in said["memory"]:
        if (key, junk) not in [("parents", []), ("parents", ["x"]), ("ties", {}), ("ties", {"kind": []})]:
            forge(folder, {"memory": {**said["memory"], key: junk}})
            assert outcome(folder) is None, f"{key!r}: {junk!r} was accepted"
    for key in ("dtype", "shape", "pieces"):
        tensors = copy.deepcopy(said["tensors"])
        tensors["mean.head.weight"][key] = junk
        forge(folder, {"tensors": tensors})
        assert outcome(folder) is None, f"{key!r}: {junk!r} was accepted"


def without(said: dict, key: str) -> dict:
    return {other: value for other, value in said.items() if other != key}


def test_a_manifest_without_one_of_its_parts_is_refused(folder):
    said = manifest_of(folder)
    for key in said["memory"]:
        forge(folder, {"memory": without(said["memory"], key)})
        assert outcome(folder) is None, f"a manifest without {key!r} was accepted"
    for name in said["tensors"]:
        forge(folder, {"memory": said["memory"], "tensors": without(said["tensors"], name)})
        assert outcome(folder) is None, f"a manifest without {name!r} was accepted"


PLACES = ["../memory", "/etc", "data-../../x", "data-0123456789abcdeg", ".", "", "DATA-0123456789abcdef"]


@pytest.mark.parametrize("name", PLACES)
def test_data_elsewhere_than_in_the_folder_is_refused(folder, name):
    forge(folder, {"data": name, "files": manifest_of(folder)["files"]})
    assert outcome(folder) is None


@pytest.mark.parametrize("name", ["../outside.safetensors", "outside.safetensors", "", "/etc/passwd", "3"])
def test_files_with_names_of_someone_elses_are_refused(folder, name):
    said, first = manifest_of(folder), "00000-0.safetensors"
    for place in (folder, folder / said["data"]):
        shutil.copy(folder / said["data"] / first, place / "outside.safetensors")
    (folder / said["data"] / first).unlink()
    tensors = json.loads(json.dumps(said["tensors"]).replace(json.dumps(first), json.dumps(name)))
    forge(folder, {"files": {**without(said["files"], first), name: said["files"][first]}, "tensors": tensors})
    with pytest.raises(MemoryFileError, match="its manifest is not valid"):
        holdfast.load(folder)


def pieces_of(folder: Path, change) -> None:
    """Put a manifest whose pieces of one tensor are others; the shards' headers stay as they are."""
    tensors = manifest_of(folder)["tensors"]
    change(tensors["mean.head.weight"])
    forge(folder, {"tensors": tensors})


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["pieces"].pop(),
        lambda t: t["pieces"].append(t["pieces"][0]),
        lambda t: t["pieces"][1].__setitem__(1, [0, 0]),
        lambda t: t["pieces"][0].__setitem__(1, [-1, 0]),
        lambda t: t["pieces"][0].__setitem__(1, [2, 0]),
        lambda t: t["pieces"][0].__setitem__(2, [1, 6]),
        lambda t: t["pieces"][0].__setitem__(2, [1, 7, 1]),
        lambda t: t["pieces"][0].__setitem__(0, "00001-0.safetensors"),
        lambda t: t["pieces"][0].__setitem__(0, "00009-0.safetensors"),
        lambda t: t.__setitem__("shape", [3, 2**61]),
        lambda t: t.update(shape=[2**40, 2**40], pieces=[["00000-0.safetensors", [0, 0], [2**40, 2**40]]]),
        lambda t: t.__setitem__("dtype", "float32"),
        lambda t: t.__setitem__("dtype", "save"),
        lambda t: t["pieces"][0].append("more"),
    ],
    ids=["one less", "one twice", "two at one place", "before the start", "elsewhere", "narrower", "an axis more",
         "another file", "no file", "larger", "huge", "another dtype", "no dtype", "more said"],
)  # fmt: skip
def test_pieces_that_do_not_make_up_their_tensor_are_refused(folder, change):
    pieces_of(folder, change)
    assert outcome(folder) is None


def boxes(shape: tuple[int, ...], chance: random.Random) -> list[Piece]:
    """A tensor cut at random, again and again."""
    found = [(tuple(0 for _ in shape), shape)]
    for _ in range(chance.randint(0, 4) if shape else 0):
        start, size = found.pop(chance.randrange(len(found)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, size[axis])
        if 0 < at < size[axis]:
            found.append((start, (*size[:axis], at, *size[axis + 1 :])))
            start = (*start[:axis], start[axis] + at, *start[axis + 1 :])
            size = (*size[:axis], size[axis] - at, *size[axis + 1 :])
        found.append((start, size))
    chance.shuffle(found)
    return [Piece("00000-0.safetensors", *each) for each in found]


def test_pieces_make_a_tensor_up_if_each_of_its_entries_is_in_one_of_them():
    """Against counting: boxes that fit, and the same with one that is moved, stretched, twice there, or not at all."""
    chance, seen = random.Random(0), Counter()
    for _ in range(2000):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(0, 3)))
        pieces = boxes(shape, chance)
        place, damage = chance.randrange(len(pieces)), chance.choice(["moved", "stretched", "twice", "gone", "none"])
        piece = pieces[place]
        if damage == "moved":
            pieces[place] = replace(piece, start=tuple(max(0, at + chance.randint(-1, 1)) for at in piece.start))
        if damage == "stretched":
            pieces[place] = replace(piece, shape=tuple(max(1, size + chance.randint(-1, 1)) for size in piece.shape))
        pieces = [*pieces[:place], *pieces[place + 1 :]] if damage == "gone" else pieces
        pieces += [piece] if damage == "twice" else []
        counts = torch.zeros([size + 9 for size in shape])
        for each in pieces:
            counts[tuple(slice(at, at + size) for at, size in zip(each.start, each.shape, strict=True))] += 1
        expected = torch.zeros_like(counts)
        expected[tuple(slice(size) for size in shape)] = 1
        fits = torch.equal(counts, expected)
        assert _tiled(Spread(torch.float32, shape, tuple(pieces))) == fits, (shape, pieces)
        seen[fits] += 1
    assert min(seen.values()) > 500


@pytest.mark.parametrize(
    "piece",
    [
        Piece("f", (0,), (4,)), Piece("f", (0, 0, 0), (4, 3, 1)), Piece("f", (0,), (4, 3)), Piece("f", (0, 0), (4,)),
        Piece("f", (0, 0), (2, 6)), Piece("f", (0, 0), (12, 1)),
    ],
)  # fmt: skip
def test_a_piece_with_other_axes_or_as_many_entries_elsewhere_does_not_make_it_up(piece):
    assert _tiled(Spread(torch.float32, (4, 3), (Piece("f", (0, 0), (4, 3)),)))
    assert not _tiled(Spread(torch.float32, (4, 3), (piece,)))
    assert not _tiled(Spread(torch.float32, (4, 3), (Piece("f", (0, 0), (4, 3)), Piece("f", (0, 0), (4, 0)))))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0, 1e300])
def test_values_that_no_memory_has_are_refused_on_the_way_out(folder, value):
    file = shards(folder)[1]
    tensors = load_file(file)
    tensors["precision.head.weight@1,0"][0, 0] = value
    save_file(tensors, file)
    forge(folder, {})
    assert outcome(folder) is None


def test_a_tensor_more_in_a_shard_is_refused(folder):
    file = shards(folder)[1]
    save_file({**load_file(file), "mean.more@0": torch.ones(2)}, file)
    forge(folder, {})
    with pytest.raises(MemoryFileError, match=r"00001-0.safetensors does not hold what the manifest says"):
        holdfast.load(folder)


@pytest.mark.parametrize("text", ["", "{", "null", "3", "[]", "{}", '{"sha256":1}', "\x00", "[" * 100_000])
def test_what_is_no_manifest_is_refused(folder, text):
    (folder / NAME).write_text(text)
    assert outcome(folder) is None


def test_what_earlier_saves_left_is_cleared_and_nothing_else(tmp_path):
    """Where a manifest cannot be read, any data may be what it names."""
    memory, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    kept, old, link = (f"data-{digit * 16}" for digit in "abc")
    for each in (memory, elsewhere, memory / kept, memory / old):
        each.mkdir()
    (memory / link).symlink_to(elsewhere)
    (memory / f".{'d' * 16}.tmp").write_text("half a manifest")
    for each in (elsewhere / "theirs", memory / "notes"):
        each.write_text("mine")
    began = 1 + max(entry.stat(follow_symlinks=False).st_mtime_ns for entry in os.scandir(memory))
    (memory / NAME).write_bytes(b"\xff")
    os.utime(memory / NAME, (0, 0))
    disk.cleared(memory, kept, began)
    assert {each.name for each in memory.iterdir()} == {kept, old, link, "notes", NAME}
    (memory / NAME).unlink()
    disk.cleared(memory, kept, began)
    assert {each.name for each in memory.iterdir()} == {kept, link, "notes"}
    assert (elsewhere / "theirs").exists()


def test_every_refusal_is_an_error_of_this_library(folder):
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    with pytest.raises(HoldfastError):
        holdfast.load(folder)


if __name__ == "__main__":
    main(FOLDER, {4: SCENARIOS[4]})
    deaths()
    main(FOLDER, {world: SCENARIOS[world] for world in (2, 1)})
