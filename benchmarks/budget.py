"""Is a budget kept, and at what price? The old loss may rise by so much; what it did, and what was learned.

    python benchmarks/budget.py --out benchmarks/results/budget.json

Beside each budget are fixed strengths on the same scene: among those that forgot no more, the best one at the new task
is what a budget is measured against. The cases were written down before any of them was run. There are three lists: the
first showed that the strength followed what was spent too slowly; the second, that answers kept of the data trained on
say too little of held-out data, so that now they are of a part that was not, with the estimate's own error added.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from forecast import Made, Scene, loss, made, made_anew, train

import holdfast
from holdfast.bench import Split

FIRST = [
    Scene("fashion", "permuted", "relu", 201),
    Scene("fashion", "rotated", "relu", 202),
    Scene("fashion", "domain", "gelu", 203, 1),
    Scene("fashion", "class", "relu", 204, 1),
    Scene("fashion", "rotated", "conv", 205),
    Scene("mnist", "rotated", "tanh", 206),
    Scene("mnist", "domain", "relu", 207, 1),
    Scene("mnist", "class", "deep", 208, 1),
    Scene("digits", "permuted", "relu", 209),
    Scene("digits", "domain", "tanh", 210, 2),
]
SECOND = [
    Scene("fashion", "permuted", "tanh", 301),
    Scene("fashion", "rotated", "gelu", 302),
    Scene("fashion", "domain", "conv", 303, 2),
    Scene("fashion", "class", "relu", 304, 2),
    Scene("mnist", "rotated", "relu", 305),
    Scene("mnist", "domain", "tanh", 306, 1),
    Scene("mnist", "class", "conv", 307, 2),
    Scene("mnist", "permuted", "deep", 308),
    Scene("digits", "class", "relu", 309, 1),
    Scene("digits", "domain", "gelu", 310),
]
THIRD = [
    Scene("fashion", "permuted", "gelu", 401),
    Scene("fashion", "rotated", "tanh", 402),
    Scene("fashion", "domain", "relu", 403, 3),
    Scene("fashion", "class", "conv", 404),
    Scene("fashion", "permuted", "conv", 405),
    Scene("mnist", "rotated", "gelu", 406),
    Scene("mnist", "domain", "deep", 407, 2),
    Scene("mnist", "class", "tanh", 408, 3),
    Scene("mnist", "domain", "conv", 409),
    Scene("digits", "permuted", "tanh", 410),
    Scene("digits", "class", "gelu", 411, 2),
    Scene("digits", "domain", "relu", 412, 1),
]
LISTS = {"first": FIRST, "second": SECOND, "third": THIRD}
APART = 0.2  # of the old data, not trained on: what its answers are kept of, as a validation set would be
BUDGETS = (0.02, 0.1)
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
HOLDS = ("Kronecker", "answers")


def learned(start: Made, scene: Scene, kind: str, **how: float) -> tuple[Any, Any]:
    """The model after the next task under a hold, and the hold's handle."""
    model, handles = copy.deepcopy(start.model), []
    # Held by answers alone: a flat posterior holds nothing by the weights.
    flat = holdfast.Memory.of(holdfast.prior(start.model), start.model, start.memory.probes, start.memory.answers)
    given = (
        start.memory
        if kind == "Kronecker"
        else [flat, holdfast.distill(model, start.memory, likelihood=start.likelihood, batch=64)]
    )

    def held(optimizer: Any, run: Any) -> Any:
        handles.append(holdfast.hold(optimizer, run, given, num_data=start.count, **how))
        return handles[-1]

    train(model, start.new.train.x, start.new.train.y, start.steps, start.likelihood, scene.seed + 1000, held)
    return model, handles[-1]


def _loss(start: Made, model: Any, data: Split) -> float:
    return loss(model, data.x, data.y, start.likelihood)


@torch.no_grad()
def right(model: Any, x: Any, y: Any) -> float:
    return 100 * float((model(x).argmax(-1) == y).double().mean())


def measured(scene: Scene) -> list[dict[str, Any]]:
    start = made(scene, APART)
    data, old, new = start.old.train, start.old.test, start.new.test
    before, there, found = _loss(start, start.model, old), _loss(start, start.model, data), []
    for kind in HOLDS:
        for how in (*({"budget": each} for each in BUDGETS), *({"strength": each} for each in STRENGTHS)):
            said = ""
            try:
                model, handle = learned(start, scene, kind, **how)
            except holdfast.BudgetError as error:
                found.append({"seed": scene.seed, "hold": kind, **how, "refused": str(error)})
                continue
            said = str(handle.spent) if "budget" in how else ""
            found.append({
                "dataset": scene.dataset, "switch": scene.switch, "network": scene.network, "seed": scene.seed,
                "hold": kind, **how, "rise": _loss(start, model, old) - before,
                "on_old_data": _loss(start, model, data) - there,
                "new": right(model, new.x, new.y), "said": said,
                "spent": handle.spent.rise if handle.spent else None,
                "settled": handle.spent.strength if handle.spent else None,
                "kept": handle.spent.kept if handle.spent else None,
            })  # fmt: skip
            print(scene.dataset, scene.switch, scene.network, kind, how, f"rise {found[-1]['rise']:.4f}", said,
                  f"new {found[-1]['new']:.1f} %", flush=True)  # fmt: skip
    return found


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| switch | network | hold | budget | the rise | strength it settled at | new task, % | fixed strengths, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in (run for run in runs if "budget" in run and "refused" not in run):
        best = against(run, runs)
        cells = [f"{run['budget']:g}", f"{run['rise']:.3f}", f"{run['settled']:.3g}", f"{run['new']:.1f}"]
        cells.append("–" if best is None else f"{best['new']:.1f} (at {best['strength']:g}, {best['rise']:.3f})")
        name = f"{run['dataset']}, {run['switch']} | {run['network']} | {run['hold']}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def against(run: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fixed strength that learned best, of those that forgot no more than this run did."""
    same = [one for one in runs if "strength" in one and (one["seed"], one["hold"]) == (run["seed"], run["hold"])]
    fair = [one for one in same if one["rise"] <= max(run["rise"], 0.002)]
    return max(fair, key=lambda one: one["new"], default=None)


def summary(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| hold | rise on held-out data within 1.2 × budget | on the old data itself "
        "| of the first, under 5 % of the new task right | within a point of the best fixed strength, or better |",
        "|---|---|---|---|---|",
    ]
    for kind in HOLDS:
        mine = [run for run in runs if "budget" in run and "refused" not in run and run["hold"] == kind]
        kept = [run for run in mine if run["rise"] <= 1.2 * run["budget"]]
        fair = [(run, best) for run in mine if (best := against(run, runs)) is not None]
        near = sum(run["new"] >= best["new"] - 1 for run, best in fair)
        empty = sum(run["new"] < 5 for run in kept)
        known = [run for run in mine if "on_old_data" in run]
        seen = sum(run["on_old_data"] <= 1.2 * run["budget"] for run in known)
        cells = [f"{len(kept)} of {len(mine)}", f"{seen} of {len(known)}" if known else "–", str(empty)]
        lines.append(f"| {kind} | {' | '.join(cells)} | {near} of {len(fair)} |")
    refused = sum("refused" in run for run in runs)
    return "\n".join([*lines, "", f"Refused, because nothing would have been learned: {refused}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON; scenes that are there are not run again")
    parser.add_argument("--cases", choices=LISTS, default="third", help="which list of cases")
    options = parser.parse_args()
    kept = made_anew(options.out, LISTS[options.cases], measured)
    print(table(kept), summary(kept), sep="\n\n")


if __name__ == "__main__":
    main()
