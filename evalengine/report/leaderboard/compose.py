"""Makes the comparison of models from runs: pairing, metrics, groups and subjects, the family of tests, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import findings
from evalengine.report.leaderboard.board import Contest, contests, measured, with_family
from evalengine.report.leaderboard.means import Group, average_parts, group, group_tasks, subjects
from evalengine.report.leaderboard.models import labels, steps
from evalengine.report.leaderboard.pairing import Shared, documents_of, pairing_notes, shared_documents
from evalengine.report.read.identities import CONTENT
from evalengine.report.read.run import UNBOUND, Run, ScoreKey
from evalengine.report.stats.pass_at_k import with_pass_at_k
from evalengine.report.stats.scores import Scores
from evalengine.report.stats.significance import holm

FEW = 10  # most tasks that are tested in addition to their average; of more, only averages are tested
LISTED = 3  # intervals that a caution names
EXPECTED = tuple(text for name, text in CONTENT.items() if name != "contract_version")  # models differ in these


@dataclass(frozen=True, eq=False)
class Board:
    """Several models, compared. Models are numbered from 1, in their order here."""

    runs: list[Run]
    names: list[str]
    steps: list[int] | None  # how far each was trained, where all say so
    contests: list[Contest]  # single metrics, those of a group's tasks left out
    groups: list[Group]
    notes: list[str]  # what a reader must know, a sentence each
    shared: Mapping[str, Shared]  # task -> the documents that all its runs hold

    @property
    def tested(self) -> list[Contest]:
        """Every contest whose pairs are tested."""
        return [*self.contests, *(mean for members in self.groups for mean in members.means)]

    @property
    def family(self) -> int:
        """How many tests Holm's correction is over."""
        return sum(len(entry.tests) for entry in self.tested)

    @property
    def significant(self) -> int:
        return sum(test.significant for entry in self.tested for test in entry.tests)


def board(runs: Sequence[Run], names: Sequence[str] | None = None, by: str | None = None) -> Board:
    """Compares the models. names: what to call them. by: a field of the documents whose values are subjects.

    Raises `ConfigError` for runs without a common task, and for a field that no document has.
    """
    runs = [with_pass_at_k(run) for run in runs]
    held = [documents_of(run) for run in runs]
    labels_ = list(names or labels(runs))
    tasks = list(dict.fromkeys(task for own in held for task in own))
    if not any(all(task in own for own in held) for task in tasks):
        ran = "; ".join(f"{name} ran {', '.join(own) or 'nothing'}" for name, own in zip(labels_, held, strict=True))
        raise ConfigError(f"the models have no task in common: {ran}; compare runs of the same tasks")
    shared = {task: shared_documents(runs, held, task) for task in tasks}
    metrics = {task: measured(runs, shared[task]) for task in tasks}
    parts = {task: _parts(metrics[task], shared[task]) for task in tasks}
    members = group_tasks(runs, tasks)
    grouped = {task for names_ in members.values() for task in names_}
    groups = [*_groups(members, parts, len(runs)), *_subjects(runs, shared, parts, by)]
    alone = {task: parts[task] for task in tasks if task not in grouped}
    groups += _averages(alone, len(runs))
    listed = {key for entry in groups for key in entry.untested} if len(alone) > FEW else set()
    single = [entry for task in alone for entry in contests(runs, shared[task], metrics[task], listed)]
    notes = [note for task in tasks for note in pairing_notes(shared[task], labels_)]
    notes += [*_unmeasured(single), *_asked(runs, labels_, shared)]
    notes += [f"{name}: {UNBOUND}" for run, name in zip(runs, labels_, strict=True) if run.unbound]
    tested = [*single, *(mean for members_ in groups for mean in members_.means)]
    notes += [note for entry in tested for note in _cautions(entry, labels_)]
    return adjusted(Board(runs, labels_, steps(runs, labels_), single, groups, notes, shared))


def _averages(parts: Mapping[str, Sequence[Scores]], count: int) -> Iterator[Group]:
    """Means over tasks: of a few tasks, of each one's first metric; of many, of each metric that several have."""
    chosen = [list(average_parts(parts))]
    if len(parts) > FEW:
        names = dict.fromkeys(part.key[1:] for own in parts.values() for part in own)
        chosen = [[part for own in parts.values() for part in own if part.key[1:] == name] for name in names]
    for averaged in chosen:
        if len(averaged) > 1:
            yield group(f"average of {len(averaged)} tasks", {part.key[0]: part for part in averaged}, count)


def adjusted(raw: Board) -> Board:
    """The board with Holm's correction over all its tests, and the ranks and ties that they leave."""
    p_values = holm([test.result.p_value for entry in raw.tested for test in entry.tests])
    done = with_family(raw.tested, p_values)
    single, rest = done[: len(raw.contests)], iter(done[len(raw.contests) :])
    groups = [replace(entry, means=[next(rest) for _ in entry.means]) for entry in raw.groups]
    return replace(raw, contests=single, groups=groups)


def _parts(metrics: Mapping[ScoreKey, Scores], shared: Shared) -> list[Scores]:
    """A task's metrics as parts of a mean: those with a number for each document in every run that ran the task."""
    return [own for own in metrics.values()
            if shared.rows and own.higher_is_better is not None and len(own.columns) == len(shared.runs)]  # fmt: skip


def _groups(members: Mapping[str, Sequence[str]], parts: Mapping[str, Sequence[Scores]], count: int) -> Iterator[Group]:
    """The groups of tasks, one for each metric that all of a group's tasks have."""
    for name, tasks in members.items():
        metrics = [{part.key[1:]: part for part in parts[task]} for task in tasks]
        for metric in metrics[0]:
            if all(metric in own for own in metrics):
                yield group(name, {task: own[metric] for task, own in zip(tasks, metrics, strict=True)}, count)


def _subjects(
    runs: Sequence[Run], shared: Mapping[str, Shared], parts: Mapping[str, Sequence[Scores]], by: str | None
) -> Iterator[Group]:
    """The groups of subjects: each metric of a task whose documents have the field, split by the field's values."""
    rows_by_task = subjects(runs, shared, by)
    for task, rows in rows_by_task.items():
        for part in parts[task]:
            split = {
                label: replace(
                    part,
                    columns={p: [v[r] for r in chosen] for p, v in part.columns.items()},
                    clusters=None if part.clusters is None else [part.clusters[r] for r in chosen],
                )
                for label, chosen in rows.items()
            }
            if len(split) > 1:
                yield group(f"{task} by {by or 'subject'}", split, len(runs), of_one_task=True)


def _unmeasured(single: Sequence[Contest]) -> Iterator[str]:
    """Notes on metrics without an interval, and on those whose tests are of log-likelihoods."""
    bare = [entry.name for entry in single if all(score is None or score.interval is None for score in entry.scores)]
    if bare:
        yield f"no interval for {', '.join(bare)}: no mean of numbers that several documents have"
    if nats := [entry.name for entry in single if any(test.nats for test in entry.tests)]:
        yield f"{', '.join(nats)}: tests are of the documents' log-likelihoods, in nats"


def _cautions(entry: Contest, names: Sequence[str]) -> Iterator[str]:
    """Why a metric's intervals, of values and of differences, may be too narrow."""
    found: dict[str, list[str]] = {}
    for name, score in zip(names, entry.scores, strict=True):
        for why in () if score is None else score.cautions:
            found.setdefault(why, []).append(name)
    for test in entry.tests:
        for why in test.result.cautions:
            found.setdefault(why, []).append(f"{names[test.b - 1]} against {names[test.a - 1]}")
    for why, whose in found.items():
        more = f" and {len(whose) - LISTED} more" if len(whose) > LISTED else ""
        yield f"{entry.name} ({', '.join(whose[:LISTED])}{more}): {why}"


def _asked(runs: Sequence[Run], names: Sequence[str], shared: Mapping[str, Shared]) -> Iterator[str]:
    """How models' requests differ from the first model's: prompts, templates, settings."""
    texts = [_by_text(run) for run in runs]
    for place in range(1, len(runs)):
        who = f"{names[0]} (A) and {names[place]} (B)"
        sentences = [finding.text for finding in findings(texts[0], texts[place])]
        reordered = any(" differ in content" in text for text in sentences)  # findings by number then mean nothing
        for text in sentences:
            by_number = reordered and any(f" differ in {what}" in text for what in ("content", "target"))
            expected = text.startswith((*EXPECTED, "Only A ran", "Only B ran")) or " requests, B " in text
            if not (expected or by_number or (reordered and " prompts differ" in text)):
                yield f"{who}: {text}"
        for common in shared.values() if reordered else ():
            if count := _other_prompts(runs, common, place):
                yield f"{who}: {common.task}: {count} of {len(common.rows)} prompts differ"


def _other_prompts(runs: Sequence[Run], shared: Shared, place: int) -> int:
    """How many documents that both runs hold have differing prompts."""
    if shared.by_number or not {0, place} <= {*shared.runs}:
        return 0
    pairs = zip(shared.documents(0), shared.documents(place), strict=True)
    return sum(runs[0].hashes[shared.task][x][1] != runs[place].hashes[shared.task][y][1] for x, y in pairs)


def _by_text(run: Run) -> Run:
    """The run with prompts known by their texts where those have hashes: another tokenizer makes no other prompt."""
    items = {
        key: replace(item, prompt_sha256="") if key[1] in run.hashes.get(key[0], {}) else item
        for key, item in run.items.items()
    }
    return replace(run, items=items)
