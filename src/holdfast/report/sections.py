"""Results sorted into sections and entries: which run of a seed counts, and what may stand together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ..bench.failures import Failed
from ..bench.protocols import PROTOCOLS
from ..bench.results import Result, differing, grouped
from .entries import Entry, Section, by_the_book, device_of, tasks_of

# What of how a run was made tells entries apart, and what is said of it where it differs.
_APART = ("version", "device", "data")
_MADE = {
    "versions of the code": "version", "devices": "device", "files of the data": "data", "versions of torch": "torch",
}  # fmt: skip


def sections(
    results: Sequence[Result], *, across: Collection[str] = (), failed: Sequence[Failed] = ()
) -> list[Section]:
    """The results judged on test data, by protocol; one run with different numbers of tasks is several protocols.

    `across` versions of the code ("version") or devices ("device"), seeds stand in one entry, and a note says of which;
    a seed that several devices have counts by the device that made most of the protocol's runs. The protocols come in
    the bench's own order, those of others after them as they are found. Jobs that `failed` are told with theirs.
    """
    apart = [name for name in _APART if name not in across]
    found = []
    for protocol, group in sorted(grouped(list(results)), key=lambda each: _place(each[0])):
        tried = _tried([one for one in results if one.validating and one.protocol == protocol], apart)
        sizes = sorted({tasks_of(one) for one in group})
        for size in sizes:
            title = protocol if len(sizes) == 1 else f"{protocol}, {size} tasks"
            mine = [one for one in group if tasks_of(one) == size]
            lost = [one for one in failed if one.protocol == protocol and one.tasks in (size, None)]
            if size == sizes[-1]:  # and of the sweep, which is shown with it
                lost += [one for one in failed if one.protocol == protocol and one.tasks not in (*sizes, None)]
            found.append(_section(protocol, title, size, mine, tried if size == sizes[-1] else (), apart, lost))
    return found


def _section(
    protocol: str,
    title: str,
    tasks: int,
    results: list[Result],
    tried: tuple[tuple[Result, ...], ...],
    apart: Sequence[str],
    failed: Sequence[Failed],
) -> Section:
    # One run for a seed: the newest. Counting a seed twice would make the spread look smaller than it is.
    latest: dict[tuple[str, float | None, str, str], dict[int, Result]] = {}
    telling = [name for name in apart if len({str(one.made.get(name)) for one in results}) > 1]
    # Where devices stand together, one of them goes first: costs compare on one device alone.
    first = "" if "device" in apart else _most_used(results)
    for one in sorted(results, key=lambda one: (device_of(one) == first, one.date)):
        made = ", ".join(str(one.made.get(name, "unknown")) for name in telling)
        latest.setdefault((one.run.method, one.strength, _chosen_on(one), made), {})[one.run.seed] = one
    entries = [
        Entry(*key, _alike_in_cost([by_seed[seed] for seed in sorted(by_seed)])) for key, by_seed in latest.items()
    ]
    entries.sort(key=lambda entry: (-entry.average, entry.label))
    kept = [one for entry in entries for one in entry.results]
    notes = _notes(entries, kept, len(results) - len(kept), first if len(_devices(results)) > 1 else "")
    notes += failures(failed)
    said = _description(protocol, kept)
    return Section(protocol, title, tasks, said, tuple(entries), tuple(notes), tried, first, tuple(failed))


def _description(protocol: str, kept: Sequence[Result]) -> str:
    """What the newest run says of its protocol; of one that has the same numbers today, what is said of it today."""
    told = [one for one in sorted(kept, key=lambda one: one.date) if one.job.get("description")]
    if not told:
        return ""
    if by_the_book(told[-1]):
        return PROTOCOLS[protocol].about
    return str(told[-1].job["description"])


def _place(protocol: str) -> tuple[int, str]:
    """Where a protocol stands in the bench's list, those with changed numbers behind the one they were made of."""
    known = list(PROTOCOLS)
    name = protocol.split(" (")[0]
    return (known.index(name), protocol) if name in known else (len(known), "")


def _most_used(results: Sequence[Result]) -> str:
    """The device that made most runs, a seed counted once however often it was run; of equals the one used last."""
    runs: dict[str, set[tuple[object, ...]]] = {}
    for one in results:
        runs.setdefault(device_of(one), set()).add((one.run.method, one.strength, _chosen_on(one), one.run.seed))
    latest = {device_of(one): one.date for one in sorted(results, key=lambda one: one.date)}
    return max(sorted(runs), key=lambda device: (len(runs[device]), latest[device]))


def _tried(results: Sequence[Result], apart: Sequence[str]) -> tuple[tuple[Result, ...], ...]:
    """The runs on validation data, made as the newest was but for method, strength and number of tasks: by that number,
    those that can be compared."""
    in_time = sorted(results, key=lambda one: one.date)
    alike: dict[int, list[Result]] = {}
    for one in in_time:
        if all(one.made.get(name) == in_time[-1].made.get(name) for name in apart):
            alike.setdefault(tasks_of(one), []).append(one)
    return tuple(
        tuple(one for one in group if one.run.seed == group[-1].run.seed and not differing([one.job, group[-1].job]))
        for _, group in sorted(alike.items())
    )


def _alike_in_cost(results: Sequence[Result]) -> tuple[Result, ...]:
    """The results, less their seconds and peaks where they are of several devices: those make no mean."""
    if len(_devices(results)) < 2:
        return tuple(results)
    free = [
        replace(one.run, learning_seconds=[], remembering_seconds=[], learning_bytes=[], remembering_bytes=[])
        for one in results
    ]
    return tuple(replace(one, run=run) for one, run in zip(results, free, strict=True))


def _devices(results: Iterable[Result]) -> set[str]:
    return {device_of(one) for one in results}


def _notes(entries: Sequence[Entry], kept: Sequence[Result], others: int, device: str) -> list[str]:
    notes = []
    for what, name in _MADE.items():
        values = sorted({str(one.made.get(name) or "unknown") for one in kept})
        if len(values) > 1:
            notes.append(f"These runs were made with different {what}: {', '.join(values)}.")
    if len({tuple(entry.seeds) for entry in entries}) > 1:
        notes.append(
            "Not every method has run on the same seeds: a mean is over the seeds its method has, and the paired "
            "comparisons are over those that two methods share."
        )
    mixed: dict[str, list[str]] = {}
    for entry in entries:
        mixed.setdefault(", ".join(differing([one.job for one in entry.results])), []).append(entry.label)
    for names, labels in mixed.items():
        if names:
            notes.append(f"The runs of {', '.join(labels)} differ in more than the seed: {names}.")
    if others:
        runs = "1 other run" if others == 1 else f"{others} other runs"
        first = f"those on {device} go first, and of several " if device else ""
        notes.append(f"{runs} of the same method, strength and seed left out: {first}the newest counts.")
    return notes


def failures(failed: Iterable[Failed]) -> list[str]:
    """What failed, a line for all that failed alike."""
    alike: dict[tuple[str, bool], dict[str, list[int]]] = {}
    for one in failed:
        label = one.method + ("" if one.strength is None else f" at {one.strength:g}")
        alike.setdefault((one.how.line, one.validating), {}).setdefault(label, []).append(one.job["seed"])
    lines = []
    for (line, validating), labels in alike.items():
        of_each = [f"{label} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))})"
                   for label, seeds in labels.items()]  # fmt: skip
        where = " on validation data" if validating else ""
        lines.append(f"Failed{where}: {', '.join(of_each)}: {line}")
    return lines


def _chosen_on(result: Result) -> str:
    found = result.made.get("strength_chosen_on")
    return found if isinstance(found, str) and found else "validation data" if result.chosen else ""
