"""The command and the page of a diagnosis, as a user gets them."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.report import diagnosis_page

runner = CliRunner(env={"COLUMNS": "160"})
SVG = "{http://www.w3.org/2000/svg}"

FILE = """
import torch
from torch import nn
import holdfast
import neighbor

def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(60, 4, dtype=torch.float64)
    return model, [(x[:30], x[:30].argmax(1) % 3), (x[30:], x[30:].argmax(1) % 3)], holdfast.categorical

def tuned():
    torch.manual_seed(1)
    moved = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return (*task(), moved.state_dict())

def taskless(): return 3
def two(): return nn.Linear(2, 2), []
def no_model(): return {}, [], holdfast.categorical
def no_likelihood(): return nn.Linear(2, 2), [], nn.CrossEntropyLoss()
def nothing_to_read(): return nn.Linear(2, 2), [], holdfast.categorical
def fails(): return 1 / 0
def too_narrow(): return nn.Linear(2, 2), [(torch.zeros(9, 3), torch.zeros(9).long())], holdfast.categorical
class Ends:
    def __iter__(self): raise OSError("the disk is gone")
def ends(): return nn.Linear(2, 2), Ends(), holdfast.categorical
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbor.py").write_text("x = 1")
    path = tmp_path / "old task.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_the_command_prints_the_tables_and_writes_a_page_that_needs_no_network(file, tmp_path):
    page = tmp_path / "page.html"
    result = runner.invoke(app, ["diagnose", f"{file}:tuned", "--out", str(page), "--seed", "3"])
    assert result.exit_code == 0, result.output
    for part in ("0. Optimum", "1. Taylor", "2. Diagonal", "2. Structures", "3. F against F′", "What to do", "moved"):
        assert part in result.output
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*|@import|url\((?!#)[^)]*""", text) == []
    assert "<script" not in text
    assert "old task.py:tuned --seed 3" in text
    model, batches, likelihood, moved = _given(file)
    found = holdfast.diagnose(model, batches, likelihood, moved=moved, seed=3)
    for line in found.advice:
        assert line in " ".join(result.output.split())


def _given(file):
    names = {}
    exec(FILE.replace("import neighbor", ""), names)
    return names["tuned"]()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "missing.py does not exist. Give a Python file whose function `task` returns (model, batches"),
        (["FILE:tusk"], "has no function `tusk`. It has `task`"),
        (["FILE:nn"], "has no function `nn`. It has `"),
        (["FILE:taskless"], "must return (model, batches, likelihood), and a fine-tuned model"),
        (["FILE:two"], "it returned 2 things"),
        (["FILE:no_model"], "must return a model (nn.Module) first, not dict"),
        (["FILE:no_likelihood"], "likelihood third, such as holdfast.categorical, not CrossEntropyLoss"),
        (["FILE:nothing_to_read"], "there are no batches"),
        (["FILE:fails"], "line 23: ZeroDivisionError: division by zero"),
        (["FILE:too_narrow"], "as the model was run on the batches: RuntimeError: "),
        (["FILE:ends"], "line 26 as the model was run on the batches: OSError: the disk is gone"),
        (["FILE", "--probes", "1"], "probes is a whole number, 3 at least"),
        (["FILE", "--out", "no/page.html"], "its folder does not exist"),
        (["FOLDER/broken.py"], "broken.py, line 2: SyntaxError"),
        (["FOLDER/broken.txt"], "is not a Python file"),
    ],
)
def test_what_goes_wrong_is_one_line(file, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    for name in ("broken.py", "broken.txt"):
        (tmp_path / name).write_text("x = 1\ndef task(:\n")
    given = [each.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)) for each in arguments]
    result = runner.invoke(app, ["diagnose", *given])
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "holdfast-diagnosis.html").exists()


@pytest.mark.parametrize("exact_up_to", [2000, 0])
@pytest.mark.parametrize("likelihood", [holdfast.categorical, holdfast.gaussian(1.0)], ids=["categorical", "gaussian"])
def test_the_page_has_its_words_its_pictures_and_its_tables(likelihood, exact_up_to):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(40, 4)
    y = torch.arange(40) % 3 if likelihood is holdfast.categorical else torch.randn(40, 3)
    found = holdfast.diagnose(model, [(x, y)], likelihood, exact_up_to=exact_up_to)
    page = diagnosis_page(found, facts=(("seed", "<0>"),))
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    names = ["The gradient by layer", "True rise", "share of H, by layer", "by data size", "entry by entry, against"]
    assert len(pictures) == len(names)
    for drawn, name in zip(pictures, names, strict=True):
        root = ElementTree.fromstring(drawn)
        assert name in root.get("aria-label")
        assert len(root.findall(f".//{SVG}path")) > 5
        assert "mathdefault" not in drawn
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for heading in ("Is the gradient zero?", "How far", "Is the Hessian diagonal?", "Is F the second derivative?"):
        assert heading in page
    for table in found.tables:
        assert page.count(f"<caption>{table.title}") == 1
        assert len(table.rows) > 0
    assert ("by confidence" in page) == (likelihood is holdfast.categorical)
    assert "&lt;0&gt;" in page
    assert page == diagnosis_page(found, facts=(("seed", "<0>"),))


def test_a_model_that_is_all_but_certain_and_one_with_idle_parameters_have_pages_too():
    x = torch.randn(40, 4)
    sure = nn.Linear(4, 3)
    with torch.no_grad():
        sure.weight *= 1e5
        y = sure(x).argmax(1)
    found = holdfast.diagnose(sure, [(x, y)], holdfast.categorical)
    assert found.fishers.confidence > 0.99
    assert found.fishers.of("observed").total <= found.fishers.of("expected").total
    assert diagnosis_page(found).count("<svg") == 5
    idle = nn.ModuleDict({"head": nn.Linear(4, 3), "idle": nn.Linear(2, 2)})
    idle.forward = lambda x: idle["head"](x)
    found = holdfast.diagnose(idle, [(x, y)], holdfast.categorical)
    assert "the loss does not depend on `idle.weight`, `idle.bias`" in diagnosis_page(found)
