"""The demonstration: what it compares, and that its progress is told to the end."""

import pytest

from holdfast.bench import grid
from holdfast.bench.demonstration import STRENGTHS, Digits
from holdfast.bench.grid import processes
from holdfast.errors import HoldfastError


def test_progress_is_told_of_every_round():
    experiment = Digits(tasks=2, seeds=1, epochs=1)
    heard = []
    strength, runs = experiment.run(heard.append)
    assert strength in STRENGTHS
    # Where strength 1 is chosen, one method is there already.
    assert len(heard) == experiment.rounds - (experiment.seeds if strength == 1.0 else 0)
    names = [run.method for run in runs]
    assert names == list(dict.fromkeys([
        "fine-tuning", "frozen after task 1", "EWC, J, strength 1", f"EWC, J, strength {strength:g}",
        f"EWC, J_original, {strength:g}", "Kronecker, strength 1", "Kronecker, softened",
        "Kronecker, rotated steps", "joint, all data kept",
    ]))  # fmt: skip
    frozen = runs[names.index("frozen after task 1")]
    assert frozen.accuracy[0] == frozen.accuracy[1] == pytest.approx(runs[0].accuracy[0])


def test_processes_make_the_same_and_a_run_that_fails_is_told_of(monkeypatch):
    experiment = Digits(tasks=2, seeds=2, epochs=1)
    strength, runs = experiment.run()
    with processes(2) as executor:
        again, others = experiment.run(executor=executor)
    assert again == strength
    assert [(run.method, run.seed, run.accuracy) for run in others] == [
        (run.method, run.seed, run.accuracy) for run in runs
    ]

    def fails(job, device, threads):
        raise RuntimeError("no luck")

    monkeypatch.setattr(grid, "execute", fails)
    with pytest.raises(HoldfastError, match="ewc at 1, seed 100, on validation data: RuntimeError: no luck"):
        experiment.run()
