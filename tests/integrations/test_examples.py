"""The examples run as they stand, offline, and a hold keeps what would be forgotten without it."""

import os
import re
import runpy
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "loop": "torch",
    "accelerate_loop": "accelerate",
    "lightning_trainer": "lightning.pytorch",
    "peft_lora": "peft",
    "transformers_trainer": "transformers",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),  # lightning's, of torch
]


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_keeps_the_old_and_learns_the_new(name, capsys, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    free, held = (
        [int(number) for number in re.findall(r"(\d+) %", line)]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("free:", "held:"))
    )
    assert held[0] > free[0] + 15
    assert held[1] > 95
    assert free[1] > 95
    assert not list(tmp_path.iterdir())  # nothing is left where it was run
