"""The tables of the pages in docs, from the results that the other programs here wrote.

python benchmarks/tables.py            # those of docs/curvature.md
python benchmarks/tables.py head       # that of docs/head.md
python benchmarks/tables.py structures # those of docs/structures.md
python benchmarks/tables.py bench      # that of docs/bench.md
python benchmarks/tables.py leaderboards # those of docs/leaderboards.md
python benchmarks/tables.py distillation # those of docs/distillation.md
python benchmarks/tables.py forecast     # those of docs/forecast.md
python benchmarks/tables.py diagnosis # those of docs/diagnosis.md
python benchmarks/tables.py strength # that of docs/strength.md
python benchmarks/tables.py variational # those of docs/variational.md
python benchmarks/tables.py trainers # that of docs/trainers.md
python benchmarks/tables.py distributed # those of docs/distributed.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.bench.measures import spread
from holdfast.bench.results import collected, grouped
from holdfast.report.cells import Table
from holdfast.report.claims import claims
from holdfast.report.entries import Section
from holdfast.report.sections import sections
from holdfast.report.tables import leaderboard, sweeps
from holdfast.report.texts import grid

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "mlp": "MLP 784-1000-1000-10",
    "cnn": "CNN, 4 convolutions, 2 linear, 32×32",
    "gpt": "GPT 4×256, T 128",
    "gpt-large": "GPT 12×768, V 50257, T 512, bf16 autocast",
}


def curvature(name: str) -> list[str]:
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    columns = list(dict.fromkeys(each for run in found["runs"] for each in run["ratio"] if each != "plain"))
    lines = [
        f"{found['device']}, torch {found['torch']}, {found['date']}:",
        "",
        f"| | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for run in found["runs"]:
        cells = [f"{run['ratio'][each]:.2f}" if each in run["ratio"] else "–" for each in columns]
        title = f"{MODELS[run['model']]}, {run['parameters'] / 1e6:.1f} M, {run['batches']} batches of {run['batch']}"
        lines.append(f"| {title} | {' | '.join(cells)} |")
        if run["peak_bytes"]:
            peaks = [f"{run['peak_bytes'][each] / 2**30:.2f}" if each in run["peak_bytes"] else "–" for each in columns]
            lines.append(f"| peak memory, GiB (plain {run['peak_bytes']['plain'] / 2**30:.2f}) | {' | '.join(peaks)} |")
    return lines


def pull(name: str) -> list[str]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    ratios = found["ratio_to_floor"]
    speed = found["floor_bytes_per_second"] / 1e12
    return [
        f"The pull of a diagonal on all parameters: {found['device']}, {found['parameters'] / 1e6:.0f} M, "
        f"floor {found['milliseconds']['floor']:.2f} ms (20 bytes a parameter at {speed:.1f} TB/s):",
        "",
        "| | one fused pass | `torch._foreach` | autograd |",
        "|---|---|---|---|",
        f"| times the floor | {ratios['fused']:.2f} | {ratios['foreach']:.1f} | {ratios['autograd']:.1f} |",
    ]


def head(name: str) -> list[str]:
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    groups: dict[str, list[Any]] = {}
    for run in found["runs"]:
        groups.setdefault(run["scenario"], []).append(run)
    columns = list(found["runs"][0]["accuracy"])
    seeds = len(next(iter(groups.values())))
    lines = [
        f"{found['runs'][0]['features']} features, {seeds} seeds, {found['device']}, torch {found['torch']}, "
        f"{found['date']}; percent of the test images, mean ± standard deviation:",
        "",
        f"| Split MNIST | {' | '.join(columns)} | weights, in turn against joint |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for scenario, runs in groups.items():
        cells = []
        for each in columns:
            values = [run["accuracy"][each] for run in runs]
            cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
        apart = max(run["weights_apart"] for run in runs)
        lines.append(f"| {scenario}-incremental | {' | '.join(cells)} | {apart:.0e} apart at most |")
    return lines


def structures() -> list[str]:
    from positions import table as positions_table
    from structures import steps_table, sweep_table, table

    found, steps, positions = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("structures-h200", "steps-h200", "positions-cpu")
    )
    lines = [f"{found['protocol']}; {found['device']}, torch {found['torch']}, {found['date']}:", ""]
    lines += [table(found["runs"]), "", "On validation data, five tasks, by strength:", "", sweep_table(found["runs"])]
    first = steps["runs"][0]
    where = f"{steps['device']}, {first['tasks']} tasks of {first['epochs']} epochs, {steps['date']}"
    lines += ["", f"Steps under a Kronecker hold of strength 1 ({where}):", "", steps_table(steps["runs"])]
    lines += ["", f"δᵀ(G ⊗ A)δ / δᵀFδ over positions ({positions['date']}):", "", positions_table(positions["runs"])]
    for name in ("structures-speed-cpu", "structures-speed-h200"):
        lines += ["", "What the Fishers cost, of a plain forward and backward pass. " + curvature(name)[0]]
        lines += curvature(name)[1:]
    lines += ["", *kronecker_pull("kronecker-pull-h200"), *kronecker_pull("kronecker-pull-cpu")[2:]]
    return [*lines, "", *grams("grams-cpu", 0), "", *grams("grams-h200", 1)]


def grams(name: str, digits: int) -> list[str]:
    """What the inputs' factor of a convolution takes, by how it is made."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    ways = list(next(iter(found["layers"].values())))
    on_cpu = found["device"].startswith("CPU")
    device = f"CPU, {found['threads']} threads" if on_cpu else _device(found["device"])
    lines = [
        f"A of a 3×3 convolution, ms for {found['examples']} pictures. {device}, torch {found['torch']}, "
        f"{found['date']}:",
        "",
        f"| layer | {' | '.join(ways)} |",
        "|---|" + "---|" * len(ways),
    ]
    for layer, times in found["layers"].items():
        lines.append(f"| {layer} | {' | '.join(format(times[way]['ms'], f'.{digits}f') for way in ways)} |")
    return lines


def kronecker_pull(name: str) -> list[str]:
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    lines = [
        "| the pull, of a training step | first task | last task | kept, MB, first and last |",
        "|---|---|---|---|",
    ]
    for run in found["runs"]:
        (_, *pulls), (first, last) = run["ratio_to_step"].values(), run["precision_bytes"].values()
        tasks = list(run["precision_bytes"])
        title = f"{run['model']}, {run['parameters'] / 1e6:.2f} M, batch {run['batch']}, {found['device']}"
        cells = [f"{pulls[0]:.2f}", f"{pulls[1]:.2f} (task {tasks[-1]})", f"{first / 1e6:.1f}, {last / 1e6:.1f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def bench() -> list[str]:
    """What was published, beside what the same methods come to here."""
    found = claims(measured())
    if found is None:
        raise SystemExit(f"nothing in {RESULTS / 'bench'} has been published.")
    return [grid(found), "", *found.notes]


def measured() -> list[Section]:
    """The runs of the bench, by protocol."""
    found = [one for bundle in sorted((RESULTS / "bench").glob("*.jsonl")) for one in collected(bundle)]
    return sections(found, across=("version", "device"))


def leaderboards() -> list[str]:
    """For each protocol of the bench some columns of its leaderboard, and the strengths that were tried."""
    lines: list[str] = []
    for section in measured():
        newest, about = max(section.results, key=lambda one: one.date), section.description.rstrip("?")
        devices = " and ".join(sorted({_device(one.made["device"]) for one in section.results}))
        lines += [
            f"## {section.title}",
            "",
            f"{about[:1].upper()}{about[1:]}. To {newest.date.date().isoformat()}, {devices}:",
            "",
            grid(_columns(leaderboard(section), SHOWN)),
            "",
        ]
        for strengths in sweeps(section):
            lines += [f"{strengths.title}. {' '.join(strengths.notes)}", "", grid(strengths), ""]
    return lines[:-1]


def _columns(table: Table, headings: tuple[str, ...]) -> Table:
    places = [table.headings.index(heading) for heading in headings]
    rows = (replace(row, cells=tuple(row.cells[place] for place in places)) for row in table.rows)
    return replace(table, headings=headings, rows=tuple(rows))


def _device(told: str) -> str:
    return told.split(",")[0].removeprefix("NVIDIA ")


SHOWN = (
    "method", "strength", "seeds", "average, %", "forgotten, points", "each when new, %", "learning, s",
    "remembering, s", "kept, MB", "source",
)  # fmt: skip


def _two(values: list[float]) -> str:
    mean, deviation = spread([100 * value for value in values])
    few = "" if len(values) > 2 else f" ({len(values)} seed{'s' if len(values) > 1 else ''})"
    return "–" if mean != mean else f"{mean:.2f}{f' ± {deviation:.2f}' if len(values) > 1 else ''}{few}"


def distillation() -> list[str]:
    from equivalence import table
    from hold import table as hold_table

    found, costs = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in ("equivalence", "hold-cpu")
    )
    lines = [f"{found['seeds']} seeds, geometric means, {found['date']}:", "", table(found["runs"]), ""]
    lines += [f"What a hold costs, {costs['date']}:", "", hold_table(costs["runs"], costs["device"]), ""]
    return [*lines, *sequences((5, 10, 20))]


def sequences(lengths: tuple[int, ...]) -> list[str]:
    """How the holds fare as a sequence of tasks grows: one run of twenty, looked at on the way."""
    found = [
        one for one in collected(RESULTS / "bench" / "h200.jsonl") if one.protocol == f"vcl (tasks {max(lengths)})"
    ]
    made, seeds = found[0].made, len({one.run.seed for one in found})
    lines = [
        f"Permuted MNIST, 2×100, all at strength 1, {seeds} seeds; the mean accuracy over the tasks so far, and how "
        f"much the earlier ones fell from their best ({made['device']}, {made['date'][:10]}):",
        "",
        f"| held by | {' | '.join(f'after {each}, % | fell, points' for each in lengths)} |",
        "|---|" + "---|---|" * len(lengths),
    ]
    for method in dict.fromkeys(one.run.method for one in found):
        runs = [one.run for one in found if one.run.method == method]
        cells = []
        for length in lengths:
            part = [replace(run, accuracy=[row[:length] for row in run.accuracy[:length]]) for run in runs]
            cells += [_two([run.average for run in part]), _two([run.forgetting for run in part])]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def forecast() -> list[str]:
    from budget import summary as budget_summary
    from budget import table as budget_table
    from forecast import summary, table

    first, found, spent, *earlier = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("forecast-first", "forecast", "budget", "budget-first", "budget-second")
    )
    lines = [f"The rise / its forecast, nats per old example; ✗ where it is off ({found['date']}):", ""]
    lines += [
        table(found["runs"]),
        "",
        summary(found["runs"]),
        "",
        "The first list, after which the estimate was changed:",
    ]
    lines += ["", summary(first["runs"]), "", f"Budgets ({spent['date']}):", "", budget_table(spent["runs"]), ""]
    lines += [budget_summary(spent["runs"])]
    why = (
        "The first list, after which the strength was made to follow faster:",
        "The second list, after which answers were kept of data that was not trained on:",
    )
    for said, before in zip(why, earlier, strict=True):
        lines += ["", said, "", budget_summary(before["runs"])]
    return lines


def strength() -> list[str]:
    """The Fisher as it is and softened, side by side, at strength 1."""
    found = collected(RESULTS / "strength-cpu.jsonl")
    made, seeds = found[0].made, len({one.run.seed for one in found})
    lines = [
        f"Kronecker factors at strength 1, {seeds} seeds; percent right over all tasks, and in brackets how much the "
        f"earlier ones fell ({made['device']}, {made['date'][:10]}):",
        "",
        "| protocol | as it is | softened, T = 4 | difference, seed by seed |",
        "|---|---|---|---|",
    ]
    for protocol, every in grouped(found):
        by_name = {
            name: {one.run.seed: one.run for one in every if one.run.method == name}
            for name in ("kronecker", "kronecker-softened")
        }
        plain, soft = by_name.values()
        cells = [
            f"{_two([run.average for run in runs.values()])} ({_two([run.forgetting for run in runs.values()])})"
            for runs in (plain, soft)
        ]
        cells.append(_two([soft[seed].average - plain[seed].average for seed in sorted(plain.keys() & soft.keys())]))
        lines.append(f"| {protocol} | {' | '.join(cells)} |")
    return lines


# A diagonal over the weights, found and carried on in several ways.
DIAGONALS = (
    "ewc", "ewc-even", "si", "mas", "mean-field", "ivon", "ivon-laplace", "ivon-laplace-even", "fine-tuning", "joint",
)  # fmt: skip


def variational() -> list[str]:
    from predictive import table as predictive_table
    from pruning import table as pruning_table
    from variational_steps import table as cost_table

    lines = [
        "Ten permutations of MNIST, 2×100, ten epochs each (`vcl`); split MNIST (`hsu-…`); percent right at the end:"
    ]
    lines += ["", *diagonals(("vcl", "hsu-task", "hsu-domain", "hsu-class"))]
    for name in ("variational-h200", "variational-cpu"):
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        lines += ["", f"{found['device']}, torch {found['torch']}, {found['date']}:", "", cost_table(found["models"])]
    for what, table in (("predictive", predictive_table), ("pruning", pruning_table)):
        for data in (each for each in ("", "-mnist") if (RESULTS / f"{what}{each}.json").exists()):
            found = json.loads((RESULTS / f"{what}{data}.json").read_text(encoding="utf-8"))
            seeds = len({run["seed"] for run in found["runs"]})
            kind = {"predictive": "predictions", "pruning": "accuracy in % with weights removed"}[what]
            said = f"{found['data']}, {kind}, {seeds} seed{'s' if seeds > 1 else ''} ({found['date']}):"
            lines += ["", said, "", table(found["runs"])]
    return lines


def trainers() -> list[str]:
    from hold import table as hold_table
    from proximal import table

    found, *costs = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("proximal", "hold-cpu", "hold-h200")
    )
    seeds = len({one["seed"] for one in found["runs"]})
    said = f"Percent right over all tasks by strength, {seeds} seeds, {found['device']}, {found['date']}:"
    lines = [said, "", table(found["runs"]), "", "What a hold costs, medians and quartiles:"]
    for cost in costs:
        lines += ["", hold_table(cost["runs"], f"{cost['device']}, torch {cost['torch']}, {cost['date']}")]
    return lines


def distributed() -> list[str]:
    from large import table as large_table
    from storage import plan, table

    lines = []
    for name in ("storage-cpu", "storage-h200"):
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        said = f"{found['device']}, torch {found['torch']}, {found['date']}; a step as a ratio to the plain one"
        size = f"{found['timed']['parameters'] / 1e6:.1f} M parameters"
        plain = [row for row in found["timed"]["steps"] if row["stored"] == "nothing held"]
        size += "".join(f", {row['optimizer']} {1e3 * row['seconds']:.1f} ms" for row in plain)
        lines += [f"{said}, {found.get('model', 'mlp')}, {size}:", "", table(found), ""]
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("large-h200*.json")]
    runs.sort(key=lambda run: int(run["parameters"]))
    lines += [f"{runs[0]['device']}, torch {runs[0]['torch']}, {runs[0]['date']}, weights in bfloat16:", ""]
    return [*lines, large_table(runs), "", "On paper:", "", plan()]


def diagonals(protocols: tuple[str, ...]) -> list[str]:
    """The bench's runs at strength 1 of everything that keeps a number for each weight, those that its page counts."""
    entries = {
        (section.protocol, entry.method): entry
        for section in measured()
        for entry in section.entries
        if entry.strength in (None, 1) and not entry.chosen_on
    }
    lines = [f"| | {' | '.join(protocols)} | `vcl`: learning, s |", "|---|" + "---|" * (len(protocols) + 1)]
    for method in DIAGONALS:
        cells, seconds = [], ""
        for protocol in protocols:
            entry = entries.get((protocol, method))
            if entry is None:
                cells.append("–")
                continue
            where = " and ".join(map(_device, entry.devices))
            there = f" ({where})" if where != "H200" and protocol != "vcl" else ""
            cells.append(_two([run.average for run in entry.runs]) + there)
            if protocol == "vcl":
                seconds = f"{statistics.fmean(sum(run.learning_seconds) for run in entry.runs):.0f} ({where})"
        lines.append(f"| {method} | {' | '.join([*cells, seconds])} |")
    return lines


def diagnosis() -> list[str]:
    from assumptions import tables
    from second_derivatives import tables as others

    first, second = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("assumptions", "second-derivatives")
    )
    return [*tables(first), "", *others(second)]


PAGES = {
    "curvature": lambda: [*curvature("curvature-cpu"), "", *curvature("curvature-h200"), "", *pull("pull-h200")],
    "head": lambda: head("head-cpu"),
    "structures": structures,
    "bench": bench,
    "leaderboards": leaderboards,
    "distillation": distillation,
    "forecast": forecast,
    "diagnosis": diagnosis,
    "strength": strength,
    "variational": variational,
    "trainers": trainers,
    "distributed": distributed,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", default="curvature", choices=PAGES)
    print("\n".join(PAGES[parser.parse_args().page]()))
