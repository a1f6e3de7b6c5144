"""Where files are looked for and fetched from, in which order, and what is said when there are none."""

import gzip
import hashlib
import io
import os
import sys
import tarfile
import urllib.request
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from holdfast.bench.data import catalog, files, sources
from holdfast.bench.data.files import Dataset, cache
from holdfast.bench.data.sources import Debian, Mirror, Npm, members
from holdfast.errors import DataError, HoldfastWarning

CONTENTS = {"a-ubyte": b"\x00\x00\x08 first", "b-ubyte": b"\x00\x00\x08 second"}
DIGESTS = {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in CONTENTS.items()}


class Fake:
    """A source that gives `contents`, or fails with `error`, and counts how often it is asked."""

    def __init__(self, contents=CONTENTS, error=None, name="the fake"):
        self.contents, self.error, self.name, self.asked = contents, error, name, 0

    def __str__(self):
        return self.name

    def fetch(self, names):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {name: self.contents[name] for name in names}


def dataset(*fakes, shared=()):
    return Dataset("Toys", ("toys", "toy-set"), (tuple(CONTENTS),), DIGESTS, fakes, shared)


def put(folder: Path, contents=CONTENTS):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No data but what a test makes."""
    for name in ("HOLDFAST_DATA", "HOLDFAST_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def test_the_order_is_the_users_folder_the_cache_the_system_then_the_sources(monkeypatch, tmp_path):
    source, system = Fake(), tmp_path / "system"
    toys = dataset(source, shared=(system,))
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "data"))
    for folder in (tmp_path / "data", tmp_path / "cache" / "toys", system):
        put(folder)
    for folder in (tmp_path / "data", tmp_path / "cache" / "toys", system):
        found = files.files(toys)
        assert {name: file.content for name, file in found.items()} == CONTENTS
        assert {Path(file.place).parent for file in found.values()} == {folder}
        (folder / "a-ubyte").unlink()  # half a dataset is none
    assert source.asked == 0
    assert files.files(toys)["a-ubyte"].content == CONTENTS["a-ubyte"]
    assert source.asked == 1
    files.files(toys)
    assert source.asked == 1  # it was kept
    assert sorted(path.name for path in (tmp_path / "cache" / "toys").iterdir()) == sorted(CONTENTS)


def test_a_folder_that_is_given_is_the_only_one(monkeypatch, tmp_path):
    source = Fake()
    put(tmp_path / "data")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"empty: no such folder\. Put its files \(a-ubyte, b-ubyte\).* there"):
        files.files(dataset(source), tmp_path / "empty")
    assert source.asked == 0


def test_a_subfolder_of_its_name_comes_before_the_folder_itself(tmp_path):
    put(tmp_path, dict.fromkeys(CONTENTS, b"another dataset's"))
    put(tmp_path / "toy-set")
    assert files.files(dataset(), tmp_path)["a-ubyte"].place == str(tmp_path / "toy-set" / "a-ubyte")


def test_a_found_file_of_other_content_is_an_error_that_names_both_digests(monkeypatch, tmp_path):
    put(tmp_path, CONTENTS | {"b-ubyte": b"other"})
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        files.files(dataset(Fake()))
    for part in (str(tmp_path / "b-ubyte"), hashlib.sha256(b"other").hexdigest(), DIGESTS["b-ubyte"][7:], "Replace it"):
        assert part in str(caught.value)


def test_what_is_fetched_is_verified_before_any_of_it_is_kept(tmp_path):
    wrong = Fake(CONTENTS | {"b-ubyte": b"a login page"}, name="the liar")
    broken = Fake({name: gzip.compress(content)[:-6] for name, content in CONTENTS.items()}, name="the stutterer")
    with pytest.raises(DataError, match=r"tried the liar: b-ubyte .*expected.*; tried the stutterer: .*damaged"):
        files.files(dataset(wrong, broken))
    assert not (tmp_path / "cache").exists()
    right = Fake({name: gzip.compress(content) for name, content in CONTENTS.items()})
    found = files.files(dataset(wrong, broken, right))
    assert {name: file.content for name, file in found.items()} == CONTENTS
    assert sorted(path.name for path in (tmp_path / "cache" / "toys").iterdir()) == ["a-ubyte.gz", "b-ubyte.gz"]


def test_when_nothing_is_found_every_place_and_reason_is_told_once(monkeypatch, tmp_path):
    put(tmp_path / "data" / "toys", {"a-ubyte": CONTENTS["a-ubyte"]})
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "data"))
    down, gone = Fake(error=DataError("timed out")), Fake(error=DataError("npm is not installed."), name="npm's toys")
    with pytest.raises(DataError) as caught:
        files.files(dataset(down, gone, shared=(Path("/no/system"),)))
    data, kept = tmp_path / "data", tmp_path / "cache"
    assert str(caught.value) == (
        f"Toys was not found: looked in {data} (HOLDFAST_DATA): {data / 'toys'} lacks b-ubyte; looked in {kept} (the "
        "cache): no such folder; looked in /no/system: no such folder; tried the fake: timed out; tried npm's toys: "
        "npm is not installed. Put its files (a-ubyte, b-ubyte), gzipped or not, in a folder and set HOLDFAST_DATA to "
        "it."
    )


def test_offline_nothing_is_asked(monkeypatch):
    source = Fake()
    monkeypatch.setenv("HOLDFAST_OFFLINE", "1")
    with pytest.raises(DataError, match="fetched nothing, as HOLDFAST_OFFLINE is set"):
        files.files(dataset(source))
    assert source.asked == 0
    monkeypatch.setenv("HOLDFAST_OFFLINE", "0")
    files.files(dataset(source))
    assert source.asked == 1


def test_a_data_folder_that_is_not_there_is_told(monkeypatch, tmp_path):
    put(tmp_path / "cache")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "tpyo"))
    with pytest.warns(HoldfastWarning, match="tpyo, which is not a folder"):
        files.files(dataset())


@pytest.mark.parametrize("moment", ["write_bytes", "replace"])
def test_an_interrupted_fetch_leaves_nothing(moment, monkeypatch, tmp_path):
    seen = []

    def interrupted(*arguments):
        seen.extend((tmp_path / "cache" / "toys").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path if moment == "write_bytes" else os, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.files(dataset(Fake()))
    assert all(path.suffix == ".tmp" for path in seen)  # never under its own name before it is whole
    assert not list((tmp_path / "cache" / "toys").iterdir())


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "occupied"))
    with pytest.warns(HoldfastWarning, match="could not be kept in .*occupied"):
        found = files.files(dataset(Fake()))
    assert found["b-ubyte"].content == CONTENTS["b-ubyte"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache() == tmp_path / "cache"
    monkeypatch.delenv("HOLDFAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache() == tmp_path / "xdg" / "holdfast"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache() == tmp_path / ".cache" / "holdfast"


class Answer(io.BytesIO):
    """What a server sends."""

    def __init__(self, content: bytes, length: int):
        super().__init__(content)
        self.headers = Message()
        self.headers["Content-Length"] = str(length)


def test_a_mirror_is_asked_for_each_file_and_never_waited_for_long(monkeypatch):
    asked = []

    def urlopen(request, timeout):
        asked.append((request.full_url, timeout))
        return Answer(b"content", 7)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert Mirror("https://some.where/", ".gz").fetch(("a", "b")) == {"a": b"content", "b": b"content"}
    assert asked == [("https://some.where/a.gz", 15), ("https://some.where/b.gz", 15)]


def test_without_rich_it_is_fetched_in_silence(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, timeout: Answer(b"content", 7))
    assert Mirror("https://some.where/").fetch(("a",)) == {"a": b"content"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(b"conte", 7), "a stopped after 5 of 7 bytes"),
        (TimeoutError("timed out"), "^timed out$"),
        (URLError("no such host"), "^no such host$"),
        (HTTPError("https://some.where/a", 404, "Not Found", Message(), None), "404"),
        (ConnectionResetError(), "^ConnectionResetError$"),
    ],
)
def test_a_mirror_that_fails_says_why(answer, said, monkeypatch):
    def urlopen(request, timeout):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(DataError, match=said):
        Mirror("https://some.where/").fetch(("a",))


def tarball(contents: dict[str, bytes], *links: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
    return stream.getvalue()


def tool(folder: Path, name: str, script: str):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A folder for tools that the test makes, and the only ones there are besides the shell's."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}")
    return tmp_path / "tools"


def test_a_package_of_npm_is_packed_by_name_in_a_folder_that_goes_away(tools, tmp_path):
    package = {f"package/data/{name}": content for name, content in CONTENTS.items()}
    (tmp_path / "package.tgz").write_bytes(tarball(package))
    tool(
        tools, "npm", f'echo "$@" > {tmp_path}/said; pwd > {tmp_path}/where; /bin/cp {tmp_path}/package.tgz toys-1.tgz'
    )
    assert Npm("toys@1").fetch(tuple(CONTENTS)) == CONTENTS
    assert (tmp_path / "said").read_text().startswith("pack toys@1 --ignore-scripts")
    assert not Path((tmp_path / "where").read_text().strip()).exists()


def test_a_package_of_debian_is_downloaded_and_unpacked_by_name(tools, tmp_path):
    put(tmp_path / "share", {f"{name}.gz": gzip.compress(content) for name, content in CONTENTS.items()})
    tool(tools, "apt-get", f'echo "$@" > {tmp_path}/said; echo > toys_1_all.deb')
    tool(tools, "dpkg-deb", f"test $2 = toys_1_all.deb && /bin/mkdir -p $3/usr && /bin/cp {tmp_path}/share/* $3/usr")
    found = Debian("toys").fetch(tuple(CONTENTS))
    assert {name: gzip.decompress(content) for name, content in found.items()} == CONTENTS
    assert (tmp_path / "said").read_text().endswith(" download toys\n")
    with pytest.raises(DataError, match="holds no c-ubyte"):
        Debian("toys").fetch(("c-ubyte",))


def test_tools_that_are_missing_or_fail_say_so(tools):
    for source in (Npm("toys@1"), Debian("toys")):
        with pytest.raises(DataError, match=r"(npm|apt-get) is not installed"):
            source.fetch(("a-ubyte",))
    tool(tools, "npm", 'echo "npm error code E404"; echo "see the log"; exit 1')
    tool(tools, "apt-get", 'echo "E: Unable to locate package toys" >&2; exit 100')
    with pytest.raises(DataError, match="npm failed with status 1: npm error code E404"):
        Npm("toys@1").fetch(("a-ubyte",))
    with pytest.raises(DataError, match="status 100: E: Unable to locate package toys"):
        Debian("toys").fetch(("a-ubyte",))
    tool(tools, "npm", "exit 0")
    with pytest.raises(DataError, match="left 0 tarballs"):
        Npm("toys@1").fetch(("a-ubyte",))


def test_an_archive_is_read_in_memory_and_its_links_are_not_followed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert members(tarball({"../../a": b"content"}), ("a",)) == {"a": b"content"}
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="holds no b"):
        members(tarball({"a": b"content"}, "b"), ("b",))
    with pytest.raises(DataError, match="cannot be read"):
        members(b"not an archive", ("a",))


def test_what_is_known_has_digests_and_no_registry_is_written_down():
    for known in (catalog.MNIST, catalog.FASHION_MNIST, catalog.CIFAR10):
        assert set(known.forms[0]) <= set(known.digests)
        for digest in known.digests.values():
            kind, _, value = digest.partition(":")
            assert len(value) == {"md5": 32, "sha256": 64}[kind]
    assert not set(catalog.MNIST.digests.values()) & set(catalog.FASHION_MNIST.digests.values())
    for path in Path(sources.__file__).parent.glob("*.py"):
        for host in ("npmjs", "debian.org", "ubuntu.com"):
            assert host not in path.read_text(encoding="utf-8")
