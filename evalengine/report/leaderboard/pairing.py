"""Which documents of a task were put to all models, however their prompts were written.

Documents are paired by the hash of the document itself (lm-eval's `doc_hash`); a document that a run holds twice is
paired with the other's second one. A baseline of ours has no such hashes: there documents are paired by number, if the
hash of the dataset's rows is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from evalengine.report.read.run import Run
from evalengine.report.stats.clusters import cluster_names


@dataclass(frozen=True)
class Shared:
    """The documents of a task that every run of it holds, in the first run's order."""

    task: str
    runs: tuple[int, ...]  # places of the runs that ran the task
    rows: list[tuple[int, ...]]  # for each document, its number in each of those runs
    totals: tuple[int, ...]  # documents of each of those runs
    paired: bool  # whether documents could be paired
    by_number: bool = False  # whether they were paired by number, not by hash

    @property
    def whole(self) -> bool:
        """Whether no run holds a document that another one lacks."""
        return self.paired and all(total == len(self.rows) for total in self.totals)

    def documents(self, run: int) -> list[int]:
        """The shared documents' numbers in one of the runs (its place)."""
        column = self.runs.index(run)
        return [row[column] for row in self.rows]


def documents_of(run: Run) -> dict[str, list[int]]:
    """Each task's document numbers, tasks in the results' order; groups of tasks have none and are left out."""
    numbers: dict[str, set[int]] = {}
    for task, number in {key[:2] for key in run.items}:
        numbers.setdefault(task, set()).add(number)
    for task, hashes in run.hashes.items():
        numbers.setdefault(task, set()).update(hashes)
    for key, scores in run.scores.items():
        numbers.setdefault(key[0], set()).update(scores)
    ordered = dict.fromkeys(key[0] for key in run.results)
    tasks = [*(task for task in ordered if task in numbers), *sorted(numbers.keys() - ordered.keys())]
    return {task: sorted(numbers[task]) for task in tasks}


def shared_documents(runs: Sequence[Run], held: Sequence[Mapping[str, list[int]]], task: str) -> Shared:
    """The pairing of a task's documents over the runs that ran it, at least one. held: each run's `documents_of`."""
    places = tuple(place for place, documents in enumerate(held) if task in documents)
    totals = tuple(len(held[place][task]) for place in places)
    by_number = not all(runs[place].hashes.get(task) for place in places)
    columns: list[dict[Hashable, int]]
    if not by_number:
        columns = [_by_hash(runs[place].hashes[task]) for place in places]
    elif len(rows := {_rows_sha256(runs[place], task) for place in places}) == 1 and "" not in rows:
        columns = [{number: number for number in held[place][task]} for place in places]
    else:
        return Shared(task, places, [], totals, False)
    common = [name for name in columns[0] if all(name in column for column in columns[1:])]
    return Shared(task, places, [tuple(column[name] for column in columns) for name in common], totals, True, by_number)


def related(runs: Sequence[Run], shared: Shared) -> list[str] | None:
    """A name for the cluster of each of `Shared.rows`; None if no run says which documents are related.

    Raises `ConfigError` if a run names the clusters of some of its documents only.
    """
    for place in shared.runs if shared.rows else ():
        if names := cluster_names(runs[place], runs[place], shared.task, shared.documents(place)):
            return names
    return None


def pairing_notes(shared: Shared, names: Sequence[str]) -> list[str]:
    """Caveats about the pairing, one sentence each; none where every run has the same documents."""
    ran = [names[place] for place in shared.runs]
    notes = [f"{shared.task}: {name} did not run it" for name in names if name not in ran]
    held = ", ".join(f"{name} {total:,}" for name, total in zip(ran, shared.totals, strict=True))
    if not shared.paired:
        notes.append(f"{shared.task}: its documents cannot be paired, since not every run holds their hashes or the "
                     "same dataset's hash: values are of each run's own documents, unranked and untested")  # fmt: skip
    elif not shared.rows:
        notes.append(f"{shared.task}: the runs share no document ({held}): no ranks and no tests")
    elif not shared.whole:
        notes.append(f"{shared.task}: values, ranks and tests are over the {len(shared.rows):,} documents that every "
                     f"run holds; the runs have {held}")  # fmt: skip
    if shared.paired and shared.by_number and len(shared.runs) > 1:
        notes.append(f"{shared.task}: documents are paired by number, not by their hashes, which a baseline does not "
                     "hold; the dataset's rows have the same hash")  # fmt: skip
    return notes


def _by_hash(hashes: Mapping[int, tuple[str, str, str]]) -> dict[Hashable, int]:
    """Documents' numbers by (document's hash, how many documents with that hash came before)."""
    seen: Counter[str] = Counter()
    numbers: dict[Hashable, int] = {}
    for number in sorted(hashes):
        name = hashes[number][0]
        numbers[name, seen[name]] = number
        seen[name] += 1
    return numbers


def _rows_sha256(run: Run, task: str) -> str:
    datasets = run.identity.get("datasets")
    dataset = datasets.get(task) if isinstance(datasets, Mapping) else None
    return str(dataset.get("sha256") or "") if isinstance(dataset, Mapping) else ""
