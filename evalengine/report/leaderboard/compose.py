"""From runs to the whole comparison of models: pairing, metrics, groups and subjects, the family of tests, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import findings
from evalengine.report.leaderboard.board import Contest, contests, values_of, with_family
from evalengine.report.leaderboard.means import Group, Part, average_parts, group
from evalengine.report.leaderboard.models import labels, steps
from evalengine.report.leaderboard.pairing import Shared, documents_of, pairing_notes, related, shared_documents
from evalengine.report.leaderboard.subjects import group_tasks, subjects
from evalengine.report.read.identities import CONTENT
from evalengine.report.read.run import UNBOUND, Run
from evalengine.report.stats.paired import holm
from evalengine.report.stats.pass_at_k import with_pass_at_k

FEW = 10  # tasks that are each tested beside their average; of more, the averages alone, with the tasks as their parts
EXPECTED = tuple(text for name, text in CONTENT.items() if name != "contract_version")  # other models differ in these


@dataclass(frozen=True, eq=False)
class Board:
    """Several models, compared. Models are numbered from 1, in their order here."""

    runs: list[Run]
    names: list[str]
    steps: list[int] | None  # how far each was trained, where all say so
    contests: list[Contest]  # single metrics, those of a group's tasks left out
    groups: list[Group]
    notes: list[str]  # what a reader must know, a sentence each

    @property
    def tested(self) -> list[Contest]:
        """Every contest whose pairs are tested."""
        return [*self.contests, *(mean for one in self.groups for mean in one.means)]

    @property
    def family(self) -> int:
        """How many tests Holm's correction is over."""
        return sum(len(one.tests) for one in self.tested)

    @property
    def significant(self) -> int:
        return sum(test.significant for one in self.tested for test in one.tests)


def board(runs: Sequence[Run], names: Sequence[str] | None = None, by: str | None = None) -> Board:
    """Compares the models. names: what to call them. by: a field of the documents whose values are subjects.

    Raises `ConfigError` for runs without a common task, and for a field that no document has.
    """
    runs = [with_pass_at_k(run) for run in runs]
    held = [documents_of(run) for run in runs]
    called = list(names or labels(runs))
    tasks = list(dict.fromkeys(task for mine in held for task in mine))
    if not any(all(task in mine for mine in held) for task in tasks):
        ran = "; ".join(f"{name} ran {', '.join(mine) or 'nothing'}" for name, mine in zip(called, held, strict=True))
        raise ConfigError(f"compare: the models have no task in common: {ran}; compare runs of the same tasks")
    shared = {task: shared_documents(runs, held, task) for task in tasks}
    parts = {task: list(_parts(runs, shared[task])) for task in tasks}
    members = group_tasks(runs, tasks)
    grouped = {task for names_ in members.values() for task in names_}
    groups = [*_groups(members, parts, len(runs)), *_subjects(runs, shared, parts, by)]
    alone = {task: parts[task] for task in tasks if task not in grouped}
    groups += _averages(alone, len(runs))
    listed = {key for one in groups for key in one.untested} if len(alone) > FEW else set()
    single = [one for task in alone for one in contests(runs, shared[task], listed)]
    notes = [note for task in tasks for note in pairing_notes(shared[task], called)]
    notes += [*_unmeasured(single), *_asked(runs, called, shared), *_unbound(runs, called)]
    return _adjusted(Board(runs, called, steps(runs, called), single, groups, notes))


def _averages(parts: Mapping[str, Sequence[Part]], count: int) -> Iterator[Group]:
    """Of a few tasks, the mean of each one's first metric; of many, the mean of each metric that several have."""
    chosen = [list(average_parts(parts))]
    if len(parts) > FEW:
        names = dict.fromkeys(part.key[1:] for mine in parts.values() for part in mine)
        chosen = [[part for mine in parts.values() for part in mine if part.key[1:] == name] for name in names]
    for found in chosen:
        if len(found) > 1:
            yield group(f"average of {len(found)} tasks", found, count)


def _adjusted(found: Board) -> Board:
    """Holm's correction over every test there is."""
    adjusted = holm([test.result.p_value for one in found.tested for test in one.tests])
    done = with_family(found.tested, adjusted)
    single, rest = done[: len(found.contests)], iter(done[len(found.contests) :])
    groups = [replace(one, means=[next(rest) for _ in one.means]) for one in found.groups]
    return replace(found, contests=single, groups=groups)


def _parts(runs: Sequence[Run], shared: Shared) -> Iterator[Part]:
    """A task's metrics as parts of a mean: those that every run which ran it has a number a document for."""
    for key in dict.fromkeys(key for place in shared.runs for key in runs[place].results if key[0] == shared.task):
        columns = {place: values for place in shared.runs if (values := values_of(runs[place], key, shared, place))}
        better = next((runs[p].higher_is_better[key] for p in shared.runs if key in runs[p].higher_is_better), None)
        if shared.rows and better is not None and len(columns) == len(shared.runs):
            yield Part(shared.task, key, better, columns, related(runs, shared))


def _groups(members: Mapping[str, Sequence[str]], parts: Mapping[str, Sequence[Part]], count: int) -> Iterator[Group]:
    """Of each group of tasks, each metric that all of its tasks have."""
    for name, tasks in members.items():
        metrics = [{part.key[1:]: part for part in parts[task]} for task in tasks]
        for metric in metrics[0]:
            if all(metric in mine for mine in metrics):
                yield group(name, [mine[metric] for mine in metrics], count)


def _subjects(
    runs: Sequence[Run], shared: Mapping[str, Shared], parts: Mapping[str, Sequence[Part]], by: str | None
) -> Iterator[Group]:
    """Of each task whose documents have the field, each metric by its values."""
    found = subjects(runs, shared, by)
    for task, rows in found.items():
        for part in parts[task]:
            split = [
                Part(
                    label,
                    part.key,
                    part.better,
                    {p: [v[r] for r in chosen] for p, v in part.columns.items()},
                    None if part.clusters is None else [part.clusters[r] for r in chosen],
                )
                for label, chosen in rows.items()
            ]
            if len(split) > 1:
                yield group(f"{task} by {by or 'subject'}", split, len(runs), of_one_task=True)


def _unmeasured(found: Sequence[Contest]) -> Iterator[str]:
    """Metrics without an interval, and those whose test is of something else."""
    bare = [one.name for one in found if all(score is None or score.interval is None for score in one.scores)]
    if bare:
        yield f"no interval for {', '.join(bare)}: no mean of numbers that several documents have"
    if nats := [one.name for one in found if any(test.nats for test in one.tests)]:
        yield f"{', '.join(nats)}: tests are of the documents' log-likelihoods, in nats"


def _asked(runs: Sequence[Run], names: Sequence[str], shared: Mapping[str, Shared]) -> Iterator[str]:
    """In what the models were asked otherwise than the first: prompts, templates, settings."""
    texts = [_by_text(run) for run in runs]
    for place in range(1, len(runs)):
        who = f"{names[0]} (A) and {names[place]} (B)"
        found = [one.text for one in findings(texts[0], texts[place])]
        reordered = any(
            " differ in content" in text for text in found
        )  # what is said by number is then beside the point
        for text in found:
            by_number = reordered and any(f" differ in {what}" in text for what in ("content", "target"))
            said = text.startswith((*EXPECTED, "Only A ran", "Only B ran")) or " requests, B " in text
            if not (said or by_number or (reordered and " prompts differ" in text)):
                yield f"{who}: {text}"
        for one in shared.values() if reordered else ():
            if count := _other_prompts(runs, one, place):
                yield f"{who}: {one.task}: {count} of {len(one.rows)} prompts differ"


def _other_prompts(runs: Sequence[Run], shared: Shared, place: int) -> int:
    """Of how many documents that both runs hold the prompts differ."""
    if shared.by_number or not {0, place} <= {*shared.runs}:
        return 0
    pairs = zip(shared.documents(0), shared.documents(place), strict=True)
    return sum(runs[0].hashes[shared.task][x][1] != runs[place].hashes[shared.task][y][1] for x, y in pairs)


def _by_text(run: Run) -> Run:
    """Prompts known by their texts where those have hashes: another tokenizer makes no other prompt."""
    items = {
        key: replace(item, prompt_sha256="") if key[1] in run.hashes.get(key[0], {}) else item
        for key, item in run.items.items()
    }
    return replace(run, items=items)


def _unbound(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    return (f"{name}: {UNBOUND}" for run, name in zip(runs, names, strict=True) if run.unbound)
