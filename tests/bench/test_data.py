"""Pictures and text: every form read as it was written, and nothing damaged or hostile read at all."""

import gzip
import hashlib
import heapq
import io
import os
import pickle
import struct
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from holdfast.bench.data import Images, cifar10, digits, fashion_mnist, images, mnist, readers, text, text_domains
from holdfast.bench.data.files import File
from holdfast.errors import DataError, HoldfastError, HoldfastWarning


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No data but what a test makes."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOLDFAST_OFFLINE", "1")
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def idx_files(seed: int) -> dict[str, bytes]:
    random = np.random.default_rng(seed)
    return {
        "train-images-idx3-ubyte": idx(random.integers(0, 256, (6, 4, 5), np.uint8)),
        "train-labels-idx1-ubyte": idx(random.integers(0, 10, 6, np.uint8)),
        "t10k-images-idx3-ubyte": idx(random.integers(0, 256, (3, 4, 5), np.uint8)),
        "t10k-labels-idx1-ubyte": idx(random.integers(0, 10, 3, np.uint8)),
    }


def put(folder, files: dict[str, bytes]):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def known_as(monkeypatch, name: str, files: dict[str, bytes] | None = None):
    """The dataset, with these small files in the place of the real ones."""
    digests = {part: f"sha256:{hashlib.sha256(content).hexdigest()}" for part, content in (files or {}).items()}
    monkeypatch.setattr(images, name, replace(getattr(images, name), digests=digests, shared=()))


@pytest.mark.parametrize(("read", "known"), [(mnist, "MNIST"), (fashion_mnist, "FASHION_MNIST")])
def test_idx_files_are_read_raw_or_gzipped_however_hard(read, known, monkeypatch, tmp_path):
    files = idx_files(0)
    known_as(monkeypatch, known, files)
    put(tmp_path / "raw", files)
    found = read(tmp_path / "raw")
    assert found.train_x.dtype == torch.uint8
    assert found.train_x.shape == (6, 1, 4, 5)
    assert found.train_x.numpy().tobytes() == files["train-images-idx3-ubyte"][16:]
    assert found.test_x.numpy().tobytes() == files["t10k-images-idx3-ubyte"][16:]
    assert found.train_y.tolist() == list(files["train-labels-idx1-ubyte"][8:])
    assert found.test_y.dtype == torch.int64
    for level in (1, 9):
        put(tmp_path / str(level), {f"{name}.gz": gzip.compress(content, level) for name, content in files.items()})
        again = read(str(tmp_path / str(level)))
        assert torch.equal(again.train_x, found.train_x)


def test_a_damaged_gzip_is_named(monkeypatch, tmp_path):
    files = {f"{name}.gz": gzip.compress(content) for name, content in idx_files(0).items()}
    known_as(monkeypatch, "MNIST", idx_files(0))
    put(tmp_path, files | {"t10k-images-idx3-ubyte.gz": files["t10k-images-idx3-ubyte.gz"][:-12]})
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is damaged.*[Rr]eplace it"):
        mnist(tmp_path)


GOOD = idx(np.zeros((2, 3, 3), np.uint8))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "starts with"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "starts with 00000801, not 00000803"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "starts with 00000d03"),
        (GOOD[:9], "header alone takes 16 bytes, it has 9"),
        (GOOD[:-1], "has 33 bytes, but its header says 34"),
        (GOOD + b"x", "has 35 bytes"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, "truncated"),
    ],
)
def test_idx_of_another_kind_or_length_is_refused(content, said):
    with pytest.raises(DataError, match=said) as caught:
        readers.idx(File("/some/file", content), 3)
    assert "/some/file" in str(caught.value)


def python2_batch(x: np.ndarray, labels: list[int], fortran: bool = False) -> bytes:
    """A batch opcode by opcode as Python 2 pickled it, in which every string is bytes."""

    def short(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = x.tobytes(order="F" if fortran else "C")
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|") + b"NNNJ" + b"\xff" * 4
    dtype += b"J" + b"\xff" * 4 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R(K\x01"
    array += b"M" + struct.pack("<H", x.shape[0]) + b"M" + struct.pack("<H", x.shape[1]) + b"\x86" + dtype
    array += (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<I", len(raw)) + raw + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    name = short(b"batch_label") + short(b"testing batch 1 of 1")
    return b"\x80\x02}(" + name + short(b"labels") + listed + short(b"data") + array + b"u."


@pytest.mark.parametrize("fortran", [False, True])
def test_a_batch_as_python_2_wrote_it(fortran):
    x = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    found, labels = readers.batch(File("batch", python2_batch(x, [3, 0, 9, 3], fortran)))
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), x.reshape(4, 3, 32, 32))
    assert labels.tolist() == [3, 0, 9, 3]


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_batch_pickled_again_by_todays_numpy(protocol):
    x = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
    found, labels = readers.batch(File("batch", pickle.dumps({b"data": x, b"labels": [1, 2]}, protocol)))
    assert np.array_equal(found.numpy(), x.reshape(2, 3, 32, 32))
    assert labels.tolist() == [1, 2]


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_hostile_pickle_runs_nothing(tmp_path):
    victim = str(tmp_path / "victim")
    for call in (Calls(os.mkdir, victim), Calls(eval, f"__import__('os').mkdir({victim!r})"), Calls(np.save, victim)):
        for contents in (call, {b"data": call, b"labels": [0]}, {b"data": np.array([call], object), b"labels": [0]}):
            with pytest.raises(DataError, match=r"/some/batch .*which is refused"):
                readers.batch(File("/some/batch", pickle.dumps(contents, 4)))
    assert not os.path.exists(victim)
    # The stand-ins cannot be turned into something else: what BUILD is given never becomes an attribute of theirs.
    for opcodes in (b"cnumpy\nndarray\nN}U\x01xK\x01s\x86b.", b"cnumpy\ndtype\n}U\x01xK\x01sb."):
        with pytest.raises(DataError, match="TypeError"):
            readers.batch(File("/some/batch", b"\x80\x02" + opcodes))
    assert not hasattr(readers._Array, "x")
    assert not hasattr(readers._Dtype, "x")


@pytest.mark.parametrize(
    "contents",
    [
        [], {}, {b"data": 1, b"labels": []}, {b"data": np.zeros((2, 3072), np.int16), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]}, {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": np.zeros(3072, np.uint8), b"labels": [0]}, {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
    ],
)  # fmt: skip
def test_a_pickle_of_something_else_is_refused(contents):
    pickled = pickle.dumps(contents, 4)
    for content in (pickled, pickled[:-3], b""):
        with pytest.raises(DataError, match="/some/batch is not one of CIFAR-10's batches"):
            readers.batch(File("/some/batch", content))


def batches(seed: int) -> dict[str, bytes]:
    random = np.random.default_rng(seed)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    x = {name: random.integers(0, 256, (2, 3072), np.uint8) for name in names}
    return {name: python2_batch(x[name], random.integers(0, 10, 2).tolist()) for name in names}


def test_cifar10_from_its_archive_or_its_batches(monkeypatch, tmp_path):
    known_as(monkeypatch, "CIFAR10")
    files = batches(0)
    put(tmp_path / "extracted" / "cifar-10-batches-py", files)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    put(tmp_path / "archive", {"cifar-10-python.tar.gz": packed.getvalue()})
    put(tmp_path / "cut", {"cifar-10-python.tar.gz": packed.getvalue()[:-400]})
    extracted, archived = cifar10(tmp_path / "extracted"), cifar10(tmp_path / "archive")
    assert extracted.train_x.shape == (10, 3, 32, 32)
    assert extracted.test_x.shape == (2, 3, 32, 32)
    assert torch.equal(extracted.train_x[2], readers.batch(File("", files["data_batch_2"]))[0][0])
    for part in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(extracted, part), getattr(archived, part))
    with pytest.raises(DataError, match="archive cannot be read"):
        cifar10(tmp_path / "cut")
    assert not (tmp_path / "cache").exists()


def npz(colors: list[tuple[int, int, int]], side: int = 32, **arrays: np.ndarray) -> bytes:
    """Pictures of one color each, their labels 0, 1, 2, …"""
    pictures = []
    for color in colors:
        stream = io.BytesIO()
        Image.new("RGB", (side, side), color).save(stream, "JPEG", quality=95)
        pictures.append(stream.getvalue())
    plain = {
        "jpeg": np.frombuffer(b"".join(pictures), np.uint8),
        "offset": np.cumsum([0, *map(len, pictures)]),
        "label": np.arange(len(colors), dtype=np.uint8),
        "classes": np.array(["plane", "car"]),
    }
    stream = io.BytesIO()
    np.savez(stream, **(plain | arrays))
    return stream.getvalue()


COLORS = [(200, 0, 0), (0, 200, 0), (10, 20, 230)]


def test_packed_jpegs_are_decoded():
    x, y = readers.packed(File("train.npz", npz(COLORS)))
    assert x.shape == (3, 3, 32, 32)
    assert y.tolist() == [0, 1, 2]
    expected = torch.tensor(COLORS)[:, :, None, None].expand(3, 3, 32, 32)
    assert (x.int() - expected).abs().max() <= 3  # JPEG loses a little


@pytest.mark.parametrize(
    "content",
    [
        npz(COLORS, label=np.array([{}, {}, {}], object)),
        npz(COLORS, offset=np.array([0, 1])),
        npz(COLORS, offset=np.array([0, -5, 9, 10**9])),
        npz(COLORS, jpeg=np.zeros(10)),
        npz(COLORS, side=1),
        npz(COLORS, jpeg=np.zeros(30, np.uint8), offset=np.array([0, 10, 20, 30])),
        npz(COLORS)[:-200],
        b"",
    ],
    ids=["objects", "few offsets", "wild offsets", "floats", "one pixel", "no jpeg", "truncated", "empty"],
)
def test_a_packed_file_of_something_else_is_refused(content):
    with pytest.raises(DataError, match=r"/some/train.npz is not a file of packed JPEGs"):
        readers.packed(File("/some/train.npz", content))


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(HoldfastError, match=r"Pillow.*holdfast\[bench\]"):
        readers.packed(File("train.npz", b""))


@pytest.fixture
def decodings(monkeypatch, tmp_path):
    """A folder of packed pictures, and the list of the files that were decoded."""
    put(tmp_path / "packed" / "cifar10", {"train.npz": npz(COLORS), "test.npz": npz(COLORS[:2])})
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "packed"))
    known_as(monkeypatch, "CIFAR10")
    seen: list[str] = []
    packed = readers.packed
    monkeypatch.setattr(images, "packed", lambda file: (seen.append(file.place), packed(file))[1])
    return seen


def test_pictures_are_decoded_once(decodings, tmp_path):
    first, second = cifar10(), cifar10()
    assert len(decodings) == 2
    assert torch.equal(first.train_x, second.train_x)
    assert torch.equal(first.test_y, second.test_y)
    put(tmp_path / "packed" / "cifar10", {"test.npz": npz(COLORS[1:])})
    assert not torch.equal(cifar10().test_x, first.test_x)  # other files, other pixels
    assert len(decodings) == 4
    assert len(list((tmp_path / "cache" / "cifar10").iterdir())) == 2


def test_packed_pictures_are_known_by_what_is_in_them(decodings, tmp_path, monkeypatch):
    first = images.origin("cifar10")
    assert len(first) == 64
    put(tmp_path / "packed" / "cifar10", {"test.npz": npz(COLORS[1:])})
    assert images.origin("cifar10") not in (first, "")
    put(tmp_path / "packed" / "cifar10", {"test.npz": npz(COLORS[:2])})
    assert images.origin("cifar10") == first
    assert decodings == []
    assert images.origin("digits") == ""
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "nowhere"))
    with pytest.warns(HoldfastWarning, match="not a folder"):
        assert images.origin("cifar10") is None


def test_files_that_are_verified_need_no_other_name(monkeypatch, tmp_path):
    put(tmp_path / "mnist", idx_files(0))
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    known_as(monkeypatch, "MNIST", idx_files(0))
    assert images.origin("mnist") == ""
    images.prepare("mnist")
    images.prepare("digits")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    monkeypatch.setenv("HOLDFAST_OFFLINE", "1")
    with pytest.raises(DataError, match="was not found"):
        images.prepare("mnist")


@pytest.mark.parametrize("damage", [lambda raw: raw[:-7], lambda raw: raw[:-9] + b"\x07" + raw[-8:], lambda raw: b""])
def test_damaged_pixels_are_decoded_again_and_it_is_said(damage, decodings, tmp_path):
    first = cifar10()
    (kept,) = (tmp_path / "cache" / "cifar10").iterdir()
    sound = kept.read_bytes()
    kept.write_bytes(damage(sound))
    with pytest.warns(HoldfastWarning, match=f"Decoding again: {kept}"):
        again = cifar10()
    assert len(decodings) == 4
    assert torch.equal(again.train_x, first.train_x)
    assert torch.equal(cifar10().train_x, first.train_x)
    assert len(decodings) == 4
    assert kept.read_bytes() == sound


def test_pixels_of_other_files_under_this_name_are_not_taken(decodings, tmp_path):
    cifar10()
    (kept,) = (tmp_path / "cache" / "cifar10").iterdir()
    put(tmp_path / "packed" / "cifar10", {"test.npz": npz(COLORS[1:])})
    other = cifar10()
    (new,) = set((tmp_path / "cache" / "cifar10").iterdir()) - {kept}
    os.replace(kept, new)
    with pytest.warns(HoldfastWarning, match="made from other files"):
        assert torch.equal(cifar10().test_x, other.test_x)


def test_a_cache_that_cannot_be_written_is_done_without(decodings, monkeypatch, tmp_path):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "occupied"))
    with pytest.warns(HoldfastWarning, match="decoded pictures are not kept"):
        assert len(cifar10().train_y) == 3


def test_digits_are_bytes_in_one_fixed_split():
    found = digits()
    assert found.train_x.shape == (1348, 1, 8, 8)
    assert found.test_x.shape == (449, 1, 8, 8)
    values = sorted(set(found.train_x.flatten().tolist()))
    assert values == [round(value * 255 / 16) for value in range(17)]
    rows = {row.numpy().tobytes() for row in found.train_x}
    assert len(rows | {row.numpy().tobytes() for row in found.test_x}) == 1797  # no picture twice
    assert torch.equal(digits().test_x, found.test_x)
    assert found.test_y[:8].tolist() == [4, 9, 4, 4, 0, 7, 0, 9]


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(HoldfastError, match=r"scikit-learn.*holdfast\[bench\]"):
        digits()


X, Y = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((X.float(), Y, X, Y), "train has pictures .* of torch.float32"),
        ((X[0], Y, X, Y), r"pictures \(1, 4, 4\)"),
        ((X, Y, X, Y[:1]), r"test has .* labels \(1,\)"),
        ((X, Y.int(), X, Y), "torch.int32"),
        ((X, Y, X, Y + 1), "test has labels from 1 to 2; expected labels from 0 to 1"),
        ((X, Y, X[:0], Y[:0]), "no pictures"),
        ((X, Y, X[..., :3], Y), "expected one shape"),
    ],
)
def test_images_that_do_not_fit_are_refused(parts, said):
    with pytest.raises(DataError, match=said):
        Images("mine", *parts, classes=2)


def test_text_is_bytes_of_one_length_the_same_every_time():
    first, second = text_domains(), text_domains()
    assert sorted(first.domains) == ["code", "prose"]
    assert {(len(part), part.dtype, part.ndim) for part in first.domains.values()} == {(400_000, torch.uint8, 1)}
    assert first.digest == second.digest
    code, prose = (bytes(first.domains[name].tolist()).decode(errors="ignore") for name in ("code", "prose"))
    assert code.count("def ") > 500 > 5 * prose.count("def ")
    assert "Beautiful is better than ugly." in prose
    changed = replace(first, domains=first.domains | {"code": first.domains["prose"]})
    assert changed.digest != first.digest


def test_a_python_with_less_text_gives_less_of_both_and_says_so(monkeypatch):
    monkeypatch.setattr(text, "_MODULES", ("heapq", "no_such_module"))
    with pytest.warns(HoldfastWarning, match="bytes of each domain, not 400000"):
        found = text_domains()
    size = len(Path(heapq.__file__).read_text(encoding="utf-8").encode())
    assert {len(part) for part in found.domains.values()} == {size}


def test_a_stripped_python_is_named(monkeypatch):
    monkeypatch.setattr(text, "_MODULES", ())
    with pytest.raises(DataError, match="no code to make a text of"):
        text_domains()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="pydoc_data"):
        text_domains()
