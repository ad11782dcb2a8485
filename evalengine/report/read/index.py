"""All runs of a folder at a glance: what each was, its results, and whether it still equals the latest baseline.

The list is written after every run, so of each run only the manifest and the results file are read, not the records:
these two files are checked against the manifest's hashes, the others where a run is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config, EngineConfig
from evalengine.errors import ConfigError
from evalengine.errors import listed as listed_words
from evalengine.records.evidence import AGAIN, SHA256, file_sha256, is_bound
from evalengine.records.folder import DIGEST
from evalengine.records.lm_eval_file import metrics_of, read_results, results_files
from evalengine.records.manifest_data import MANIFEST, Manifest, load_manifest, not_run
from evalengine.records.sealed import sha256_of
from evalengine.report.numbers import same_number
from evalengine.report.read.baseline import is_baseline, load_baseline
from evalengine.report.read.groups import below, groups_of, roots_of
from evalengine.report.read.lm_eval import number
from evalengine.report.read.names import runs_below
from evalengine.report.read.run import Run, command_line, parsed
from evalengine.util.validation import shown

NEWEST = 1000  # most runs that are listed
BASELINES = 20  # newest JSON files looked at, in the folder and in the one above it
BASELINE_BYTES = 20_000_000  # a larger file is no baseline for git
MOST_CHANGES = 4  # changed settings that a row names
# Settings that a row may name: those of a run that are part of its identity, and those of its engine.
OF_A_RUN = {setting.name for setting in fields(Config)} - {"tasks", "engine", "numerics"}
OF_THE_ENGINE = [setting.name for setting in fields(EngineConfig) if not setting.metadata.get("resolved")]
FINISHED, UNFINISHED, DAMAGED = "finished", "unfinished", "damaged"


@dataclass(frozen=True)
class RunMetric:
    """One number of a run's results."""

    name: str
    filter: str
    value: float
    stderr: float | None
    documents: int | None = None


@dataclass(frozen=True)
class Entry:
    """One run, or of several tasks and groups that were requested as one; tasks in a group are its parts."""

    folder: Path
    state: str
    started: datetime | None = None
    run_id: str = ""
    command: str | None = None
    model: str = ""
    task: str = ""
    metrics: tuple[RunMetric, ...] = ()
    parts: tuple[tuple[str, RunMetric], ...] = ()  # of a group: (name, metric) of its tasks and groups
    digest: str = ""  # the task's digest; of a group the run's, if the run has nothing else
    problem: str = ""  # what is wrong with a damaged run
    baseline: str = ""  # name of the baseline's file
    verdict: str = ""  # what sets the run apart from the baseline
    numerics: str = ""  # the level: exact, native or fast
    settings: Mapping[str, str] = field(default_factory=dict)  # of the whole run, by their names, as texts
    changed: str = ""  # its settings in which listed runs of the same task and model differ
    cut: int = 0  # answers of the whole run that the length limit ended
    pace: float | None = None  # seconds a document; None where other tasks, a cache or an earlier run had a part in it


def entries(root: Path) -> list[Entry]:
    """A row for each run and task of the newest `NEWEST` runs, the newest first. If a run cannot be read, its row says
    why.

    Raises OSError if the folder itself cannot be read.
    """
    base_runs = baselines(root)
    runs = sorted(runs_below(root), key=_written, reverse=True)[:NEWEST]
    foreign = [child for child in root.iterdir() if child.is_dir() and child not in runs and results_files(child)]
    listed = [entry for folder in (*runs, *foreign) for entry in _entries(folder, folder in runs, base_runs)]
    return sorted(_with_changes(listed), key=_age)


def _with_changes(listed: Sequence[Entry]) -> Iterator[Entry]:
    """The entries, each with its settings in which finished runs of its task and model differ: those of a sweep look
    alike otherwise."""
    alike: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for entry in listed:
        if entry.state == FINISHED:
            alike.setdefault((entry.task, entry.model), []).append(entry.settings)
    for entry in listed:
        settings = alike.get((entry.task, entry.model), [])
        names = dict.fromkeys(name for own in settings for name in own)
        differing = [name for name in names if len({own.get(name, "") for own in settings}) > 1]
        words = [f"{name}={entry.settings[name]}" for name in differing if name in entry.settings]
        yield replace(entry, changed=listed_words(words, MOST_CHANGES))


def settings_of(manifest: Manifest) -> dict[str, str]:
    """A run's settings by their names, as texts, without those that follow from numerics or the machine."""
    identity, engine = manifest.identity, manifest.engine_settings
    given = {name: value for name, value in identity.items() if name in OF_A_RUN}
    given |= {f"engine.{name}": engine[name] for name in OF_THE_ENGINE if name in engine}
    given["tasks"] = identity.get("tasks") or {}
    return {name: _text(value) for name, value in _leaves(given)}


def _text(value: Any) -> str:
    """A setting's value as on the command line: true, null, a text without quotes; shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return value[:40] if isinstance(value, str) else shown(value)


def _leaves(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _leaves({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            yield name, value


def baselines(root: Path) -> list[Run]:
    """The baselines in the folder of runs and in the one above it, the newest first; damaged ones are left out."""
    places = {root.resolve(), root.resolve().parent}
    files = [file for place in places for file in place.glob("*.json") if file.is_file()]
    files = [file for file in files if file.stat().st_size <= BASELINE_BYTES]
    loaded = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)[:BASELINES]:
        try:
            if is_baseline(file):
                loaded.append(load_baseline(file))
        except (ConfigError, OSError):
            continue
    return loaded


def _entries(folder: Path, ours: bool, base_runs: Sequence[Run]) -> Iterator[Entry]:
    try:
        if ours and not (folder / DIGEST).is_file():
            yield Entry(folder, UNFINISHED, problem="its command, given again, takes it up")
            return
        manifest = _manifest(folder) if ours else Manifest({})
        file = results_files(folder)[-1]
        results = read_results(file)
        if is_bound(manifest) and (manifest.files or {}).get(file.name) != file_sha256(file):
            raise ConfigError(f"{file}: not the file that the run wrote; {AGAIN}")
        yield from _tasks(folder, manifest, results, base_runs)
    except IndexError:
        yield Entry(folder, DAMAGED, problem=f"results_*.json is missing; {AGAIN}")
    except (ConfigError, OSError) as error:
        yield Entry(folder, DAMAGED, problem=str(error))


def _tasks(folder: Path, manifest: Manifest, results: Mapping[str, Any], base_runs: Sequence[Run]) -> Iterator[Entry]:
    metrics = {name: tuple(_metrics(results, name)) for name in results["results"]}
    groups = groups_of(results)
    roots = roots_of(groups, [name for name, own in metrics.items() if own]) or [*metrics]
    counts, seconds = manifest.counts, manifest.timings.run_seconds
    paced = len(roots) == 1 and counts.documents and seconds > 0 and not not_run(counts)
    endpoint = results.get("endpoint")
    cut = endpoint.get("length_limited") if isinstance(endpoint, Mapping) else None
    whole = Entry(
        folder=folder,
        state=FINISHED,
        started=parsed(manifest.started) or parsed(results.get("date")),
        run_id=manifest.run_id or "",
        command=command_line(manifest.command),
        model=str(manifest.model.name or results.get("model_name") or ""),
        numerics=str(manifest.numerics or ""),
        settings=settings_of(manifest),
        cut=counts.length_limited or (cut if isinstance(cut, int) else 0),
        pace=seconds / counts.documents if paced else None,
    )
    for task in roots:
        inner = tuple(dict.fromkeys(below(groups, task)))
        digest = manifest.task_digests.get(task, manifest.digest if len(roots) == 1 else "")
        baseline, verdict = against(task, digest, metrics.get(task, ()), manifest, base_runs, inner)
        parts = tuple((name, metric) for name in inner for metric in metrics.get(name, ()))
        yield replace(whole, task=task, metrics=metrics.get(task, ()), parts=parts, digest=digest, baseline=baseline,
                      verdict=verdict)  # fmt: skip


def against(
    task: str, digest: str, metrics: Sequence[RunMetric], manifest: Manifest, base_runs: Sequence[Run],
    inner: Sequence[str] = (),
) -> tuple[str, str]:  # fmt: skip
    """(the latest baseline of the task, of the same model if there is one; what sets the run apart from it); empty
    where no baseline holds the task. inner: a group's tasks."""
    holding = [one for one in base_runs if any(key[0] == task for key in one.results)]
    name, identity = manifest.model.name, manifest.identity
    one = next((one for one in holding if one.manifest.model.name == name), holding[0] if holding else None)
    if one is None:
        return "", ""
    moved = ""  # the first metric whose value is not the baseline's
    for place, metric in enumerate(metrics):
        old = one.results.get((task, metric.name, metric.filter))
        if old is not None and not moved and not same_number(old[0], metric.value):
            moved = f"{'' if place == 0 else f'{metric.name} '}was {old[0]:.4f}"
    if digest and digest == one.task_digests.get(task, one.digest if inner else None):
        return one.source.name, f"{moved}: the same bits, scored otherwise" if moved else "same bits"
    if any(_rows(identity, name) != _rows(one.identity, name) for name in (task, *inner)):
        return one.source.name, "other documents"
    for setting, words in (("weights", "another model"), ("prompts", "other prompts")):
        if identity.get(setting) != one.identity.get(setting):
            return one.source.name, f"{moved or 'equal totals'}, {words}"
    return one.source.name, moved or "other bits, equal totals"


def _rows(identity: Mapping[str, Any], task: str) -> tuple[Any, Any]:
    """The settings that name the scored documents: exemplars are part of the prompts."""
    datasets = identity.get("datasets")
    own = datasets.get(task) if isinstance(datasets, Mapping) else None
    return identity.get("limit"), own.get("sha256") if isinstance(own, Mapping) else own


def _metrics(results: Mapping[str, Any], task: str) -> Iterator[RunMetric]:
    values = results["results"].get(task) or {}
    counted = results.get("n-samples")
    sizes = counted.get(task) if isinstance(counted, Mapping) else None
    documents = sizes.get("effective") if isinstance(sizes, Mapping) else values.get("sample_len")
    for name, filter_name, raw, stderr in metrics_of(values):
        if (value := number(raw)) is not None:
            yield RunMetric(name, filter_name, value, number(stderr), documents if isinstance(documents, int) else None)


def _manifest(folder: Path) -> Manifest:
    """The manifest, whose own hash and digest hold. Raises `ConfigError`."""
    manifest = load_manifest(folder / MANIFEST, AGAIN)
    said = manifest.content.get(SHA256)
    if said is not None and said != sha256_of(manifest.unsealed):
        raise ConfigError(f"{folder / MANIFEST}: it was edited or damaged; {AGAIN}")
    if (folder / DIGEST).read_bytes().strip() != manifest.digest.encode():
        raise ConfigError(f"{folder / DIGEST}: not the digest of {MANIFEST}: one of them was edited; {AGAIN}")
    return manifest


def _age(entry: Entry) -> float:
    """A sort key by which the run that began last comes first; a run of unknown start goes by its files."""
    return -(entry.started.timestamp() if entry.started else _written(entry.folder)[0] / 1e9)


def _written(folder: Path) -> tuple[int, str]:
    """When the run ended, or was last worked on."""
    file = folder / DIGEST
    return (file if file.is_file() else folder).stat().st_mtime_ns, folder.name
