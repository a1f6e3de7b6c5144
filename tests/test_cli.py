"""The command line as a user runs it, and the page as a reader gets it."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app

runner = CliRunner(env={"COLUMNS": "120"})


@pytest.fixture
def memories(tmp_path):
    """Two memories of one model, made apart, and one of another model."""
    for seed, name in enumerate(["a", "b"]):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        data = [(torch.randn(10, 4), torch.randint(0, 3, (10,)))]
        fisher = holdfast.diagonal_fisher(model, data, holdfast.categorical)
        holdfast.save(holdfast.consolidate(holdfast.prior(model), model, fisher), tmp_path / f"{name}.safetensors")
    holdfast.save(holdfast.prior(nn.Linear(9, 3), precision=1.0), tmp_path / "other.safetensors")
    return tmp_path


def test_the_demo_prints_a_table_and_writes_a_page_that_needs_no_network(tmp_path):
    page, figure = tmp_path / "page.html", tmp_path / "figure.svg"
    result = runner.invoke(
        app, ["demo", "--tasks", "2", "--seeds", "2", "--epochs", "1", "--out", str(page), "--figure", str(figure)]
    )
    assert result.exit_code == 0, result.output
    for method in (
        "fine-tuning", "frozen after task 1", "EWC, J, strength 1", "EWC, J_original, ", "Kronecker, strength 1",
        "joint, all data kept",
    ):  # fmt: skip
        assert method in result.output
    assert re.search(r"Strength \d+ was chosen for the diagonal among 1, 10, 100, 1000 on", result.output)
    assert str(page) in result.output.replace("\n", "")
    text = page.read_text(encoding="utf-8")
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*|@import|url\((?!#)[^)]*""", text)
    assert fetched == []
    assert "<script" not in text
    assert len(re.findall(r"\d+\.\d ± \d+\.\d", text)) >= 15
    lines = ElementTree.fromstring(figure.read_text(encoding="utf-8")).findall(".//{http://www.w3.org/2000/svg}path")
    assert len(lines) > 20
    assert figure.read_text(encoding="utf-8").strip() in text


def test_ctrl_c_ends_the_demo_in_one_line_and_writes_no_page(tmp_path, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.bench.demonstration.run_all", interrupted)
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 130
    assert result.output.strip() == "Stopped: nothing was written."
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    result = runner.invoke(
        app, ["demo", "--tasks", "2", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path / "no" / "page.html")]
    )
    assert result.exit_code == 1
    assert "could not be written" in result.output


def test_inspect_says_what_a_file_holds(memories):
    result = runner.invoke(app, ["inspect", str(memories / "a.safetensors")])
    assert result.exit_code == 0
    assert "10 examples" in result.output
    assert "15 in 2 tensors" in result.output
    assert "diagonal" in result.output


def test_inspect_tells_of_probes(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), torch.randn(10, 4)
    told = {
        "gaussian: inputs of shape 4, rank 2, 16 numbers": holdfast.gaussian_probes([x], rank=2),
        "gaussian: outputs of `0` of shape 6, rank 3, 34": holdfast.gaussian_probes(
            [x], rank=3, model=model, layer="0"
        ),
        "kept: inputs of shape 10×4 as they are, 50 numbers": holdfast.kept_inputs(x),
    }
    for said, probes in told.items():
        holdfast.save(holdfast.Memory(holdfast.prior(model, precision=1.0), {}, probes), tmp_path / "m.safetensors")
        result = runner.invoke(app, ["inspect", str(tmp_path / "m.safetensors")])
        assert result.exit_code == 0, result.output
        assert said in " ".join(result.output.split())


def test_inspect_says_what_a_head_file_holds(tmp_path):
    head = holdfast.linear_head(holdfast.random_features(4, 7), prior=0.5)
    head.updated([(torch.randn(10, 4), torch.arange(10) % 3)]).save(tmp_path / "head.safetensors")
    result = runner.invoke(app, ["inspect", str(tmp_path / "head.safetensors")])
    assert result.exit_code == 0, result.output
    for said in (
        "a linear head: holdfast.LinearHead.load",
        "10 examples in 1 part",
        "7 random ones of 4",
        "3 classes",
    ):
        assert said in result.output


def test_inspect_of_a_description_that_lacks_its_parts_is_one_line(tmp_path):
    path = tmp_path / "broken.safetensors"
    save_file({"mean.w": torch.zeros(1)}, path, {"holdfast": '{"format":1}'})
    result = runner.invoke(app, ["inspect", str(path)])
    assert result.exit_code == 1
    assert "not valid (see id, likelihood" in result.output.replace("\n", " ")


@pytest.mark.parametrize("junk", [
    {"num_data": 10**400}, {"probes": {"kind": "gaussian"}},
], ids=str)  # fmt: skip
def test_inspect_of_a_description_with_impossible_numbers_is_one_line(memories, junk):
    said = holdfast.inspect(memories / "a.safetensors")
    facts = {**{key: value for key, value in said.items() if key != "shapes"}, **junk}
    path = memories / "junk.safetensors"
    save_file({"mean.w": torch.zeros(1), "probes.0.factors": torch.zeros(())}, path, {"holdfast": json.dumps(facts)})
    result = runner.invoke(app, ["inspect", str(path)])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    assert "is not a valid memory" in result.output.replace("\n", " ")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a memory at all"])
def test_inspect_of_something_else_is_one_line_and_status_one(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    result = runner.invoke(app, ["inspect", str(path)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "broken.safetensors" in result.output


def test_merge_writes_the_product(memories):
    out = memories / "merged.safetensors"
    a, b = (str(memories / f"{name}.safetensors") for name in "ab")
    result = runner.invoke(app, ["merge", a, b, "--out", str(out)])
    assert result.exit_code == 0, result.output
    expected = holdfast.merge(holdfast.load(a), holdfast.load(b))
    assert holdfast.load(out).posterior.id == expected.id
    assert holdfast.load(out).num_data == 20


def test_merge_of_what_does_not_fit_is_one_line(memories):
    a, other = (str(memories / f"{name}.safetensors") for name in ("a", "other"))
    for files, message in [
        ([a, a], "count twice"),
        ([a, other], "has shape"),
        ([a], "two memory files or more"),
        ([a, a, "--base", str(memories / "x.safetensors")], "files to read"),
    ]:
        result = runner.invoke(app, ["merge", *files, "--out", str(memories / "x.safetensors")])
        assert result.exit_code == 1
        assert message in result.output.replace("\n", " ")
    assert not (memories / "x.safetensors").exists()


def test_the_command_is_installed_and_knows_its_version():
    result = subprocess.run([sys.executable, "-m", "holdfast", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"holdfast {holdfast.__version__}"


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_forecast_ranks_the_layers_of_a_checkpoint(tmp_path, suffix):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = [(torch.randn(50, 4), torch.randint(0, 3, (50,)))]
    fisher = holdfast.diagonal_fisher(model, data, holdfast.categorical)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    with torch.no_grad():
        model[2].weight += 0.2
    weights = tmp_path / f"weights.{suffix}"
    save_file(model.state_dict(), weights) if suffix == "safetensors" else torch.save(model.state_dict(), weights)
    result = runner.invoke(app, ["forecast", str(tmp_path / "memory.safetensors"), str(weights)])
    assert result.exit_code == 0, result.output
    said = float(re.search(r"([0-9.e-]+) nats per old example", result.output)[1])
    assert said == pytest.approx(float(holdfast.penalty(model, posterior).detach()) / 50, rel=1e-3)
    assert "ranks" in result.output
    wrapped = {"state_dict": {f"module.{name}": value for name, value in model.state_dict().items()}, "step": 3}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    again = runner.invoke(app, ["forecast", str(tmp_path / "memory.safetensors"), str(tmp_path / "wrapped.pt")])
    assert again.output == result.output
    inside = {"state_dict": {f"net.encoder.{name}": value for name, value in model.state_dict().items()}}
    inside["state_dict"]["net.head.0.weight"] = torch.ones(2)
    torch.save(inside, tmp_path / "inside.ckpt")
    again = runner.invoke(app, ["forecast", str(tmp_path / "memory.safetensors"), str(tmp_path / "inside.ckpt")])
    assert again.output == result.output
    twice = {f"ema.{name}": value for name, value in posterior.mean.items()}
    twice |= {f"student.{name}": value for name, value in model.state_dict().items()}
    torch.save({**twice, "a.0.weight": torch.ones(1), "a.0.bias": torch.ones(1)}, tmp_path / "twice.pt")
    words = ["forecast", str(tmp_path / "memory.safetensors"), str(tmp_path / "twice.pt")]
    asked = runner.invoke(app, words)
    assert asked.exit_code == 1
    assert "several times, inside ema., student.. Say which: --inside" in " ".join(asked.output.split())
    assert runner.invoke(app, [*words, "--inside", "student."]).output == result.output
    assert "0 nats" in runner.invoke(app, [*words, "--inside", "ema."]).output
    assert "no such model inside 'a.'" in runner.invoke(app, [*words, "--inside", "a."]).output
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(model, tmp_path / "whole.pt")
    for other in [tmp_path / name for name in ("missing.pt", "junk.pt", "empty.pt", "whole.pt")]:
        result = runner.invoke(app, ["forecast", str(tmp_path / "memory.safetensors"), str(other)])
        assert result.exit_code == 1
        assert "Traceback" not in result.output
        assert result.output.count("\n") == 1
    assert "holds more than named tensors" in result.output
    assert "weights_only" not in result.output
    for name in ("later.safetensors", "later.memory"):
        holdfast.save(holdfast.prior(model), tmp_path / name)
        later = runner.invoke(app, ["forecast", str(tmp_path / "memory.safetensors"), str(tmp_path / name)])
        assert later.output == again.output  # another memory's mean is a checkpoint too


@pytest.mark.parametrize(("change", "message"), [
    (lambda weight: weight.to(torch.float8_e4m3fn), "is in torch.float8_e4m3fn, which needs scales"),
    (lambda weight: weight.to("meta"), "has no values there"),
], ids=["eight bits", "meta"])  # fmt: skip
def test_weights_that_are_no_numbers_by_themselves_are_refused(memories, change, message):
    torch.save({"weight": change(torch.ones(3, 4)), "bias": torch.ones(3)}, memories / "weights.pt")
    result = runner.invoke(app, ["forecast", str(memories / "a.safetensors"), str(memories / "weights.pt")])
    assert isinstance(result.exception, SystemExit)
    assert message in result.output.replace("\n", " ")


def test_a_link_that_leads_to_itself_is_one_line(memories):
    loop = memories / "loop"
    loop.symlink_to(loop)
    a, b, out = (str(memories / name) for name in ("a.safetensors", "b.safetensors", "out.safetensors"))
    for given in ([a, str(loop), "--out", out], [a, b, "--base", str(loop), "--out", out]):
        result = runner.invoke(app, ["merge", *given])
        assert isinstance(result.exception, SystemExit)
        assert "loop cannot be read" in result.output.replace("\n", " ")


def test_a_checkpoint_whose_statistics_moved_is_doubted(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    data = [(torch.randn(50, 4), torch.randint(0, 3, (50,)))]
    posterior = holdfast.consolidate(
        holdfast.prior(model), model, holdfast.diagonal_fisher(model, data, holdfast.categorical)
    )
    holdfast.save(holdfast.Memory.of(posterior, model), tmp_path / "with.safetensors")
    holdfast.save(posterior, tmp_path / "without.safetensors")
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "same.pt")
    model.train()(data[0][0] + 3)
    torch.save(model.state_dict(), tmp_path / "moved.pt")

    def said(memory, weights):
        found = runner.invoke(app, ["forecast", str(tmp_path / memory), str(tmp_path / weights)])
        assert found.exit_code == 0, found.output
        return " ".join(found.output.split())

    changed = "`1.running_mean`, `1.running_var` changed since, which the quadratic does not see."
    assert changed not in said("with.safetensors", "same.pt")
    assert changed in said("with.safetensors", "moved.pt")
    assert "No `1.running_mean`, `1.running_var` was kept" in said("without.safetensors", "moved.pt")


def test_what_a_file_says_does_not_reach_the_terminal_as_it_is(tmp_path):
    torch.manual_seed(0)
    evil = "\x1b[31mred\x1b]0;title\x07"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(2, 2))
    data = [(torch.randn(8, 2), torch.randint(0, 2, (8,)))]
    posterior = holdfast.consolidate(
        holdfast.prior(model), model, holdfast.diagonal_fisher(model, data, holdfast.categorical)
    )
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "other.pt")
    for words in (["inspect"], ["forecast", "weights.pt"], ["forecast", "other.pt"]):
        command, *files = words
        paths = [str(tmp_path / name) for name in ("memory.safetensors", *files)]
        result = runner.invoke(app, [command, *paths])
        assert not set(result.output) & {"\x1b", "\x07"}, words
    assert "\\x1b[31mred" in result.output


def test_inspect_says_that_it_did_not_look_at_the_checksum_and_looks_if_asked(tmp_path):
    path = tmp_path / "memory.safetensors"
    holdfast.save(holdfast.prior(nn.Linear(3, 2), precision=1.0), path)
    assert "not looked at: --verify" in runner.invoke(app, ["inspect", str(path)]).output
    assert re.search(r"checksum +right", runner.invoke(app, ["inspect", str(path), "--verify"]).output)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert runner.invoke(app, ["inspect", str(path)]).exit_code == 0
    found = runner.invoke(app, ["inspect", str(path), "--verify"])
    assert (found.exit_code, "is damaged" in found.output) == (1, True)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        found = runner.invoke(app, ["inspect", str(tmp_path / "pipe.safetensors")])
        assert (found.exit_code, "no regular file" in found.output) == (1, True)
