"""The demonstration: what it compares, and that its progress is told to the end."""

import pytest

from holdfast.bench.demonstration import STRENGTHS, Digits


def test_progress_is_told_of_every_round():
    experiment = Digits(tasks=2, seeds=1, epochs=1)
    heard = []
    strength, runs = experiment.run(heard.append)
    assert strength in STRENGTHS
    # Where strength 1 is chosen, one method is there already.
    assert len(heard) == experiment.rounds - (2 if strength == 1.0 else 0)
    names = [run.method for run in runs]
    assert names == list(dict.fromkeys([
        "fine-tuning", "frozen after task 1", "EWC, J, strength 1", f"EWC, J, strength {strength:g}",
        f"EWC, J_original, {strength:g}", "Kronecker, strength 1", "Kronecker, softened",
        "Kronecker, rotated steps", "joint, all data kept",
    ]))  # fmt: skip
    frozen = runs[names.index("frozen after task 1")]
    assert frozen.accuracy[0] == frozen.accuracy[1] == pytest.approx(runs[0].accuracy[0])
