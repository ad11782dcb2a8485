"""A run from disk, whatever it is: a run folder of ours, an output folder of lm-evaluation-harness, a baseline file;
with its texts for the HTML report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, listed, readable
from evalengine.records.evidence import TOKENS, is_run_folder
from evalengine.records.folder import RECORDS
from evalengine.records.lm_eval_file import results_files
from evalengine.records.manifest_data import MANIFEST, missing_for_page
from evalengine.records.schema import read_endings, read_outcomes, read_thinking
from evalengine.report.read.names import RESULTS, experiment_runs, runs_in, stands_for
from evalengine.report.read.run import Item, Key, Loaded, Run, ScoreKey
from evalengine.report.read.run_folder import load_folder
from evalengine.util.plugins import load


def load_run(path: str | Path, page: bool = True) -> Run:
    """A run folder, an lm-eval output folder (or its results file), a log of inspect_ai, or a baseline file; or a name
    that stands for one (`names`).

    page: whether the `report.html` of a run folder is checked, too.

    Raises `ConfigError` (the file at fault, and the cure) for what is missing, unreadable, unfinished, damaged or
    edited.
    """
    return load_with_samples(path, page).run


def load_with_samples(path: str | Path, page: bool = True) -> Loaded:
    """What `load_run` reads, and lm-eval's files that it was read from."""
    with readable(path):
        return _load(Path(stands_for(path)), page)


def _load(path: Path, page: bool) -> Loaded:
    if path.is_dir() and is_run_folder(path):
        return load_folder(path, page)
    from evalengine.report.read.baseline import is_baseline, load_baseline  # runs of ours need no other reader
    from evalengine.report.read.lm_eval_records import load_results

    if path.is_file():
        if results_files(path):
            return load_results(path)
        if _is_inspect_log(path):
            loaded: Loaded = load("evalengine.integrations.inspect_ai.log:load_inspect_log")(path)
            return loaded
        if not is_baseline(path) and is_run_folder(path.parent):
            raise ConfigError(f"{path}: one file of a run; give the folder: {path.parent}")
        return Loaded(load_baseline(path), {}, {})
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder; name a run's folder, or latest: the newest in {RESULTS}/")
    any(path.iterdir())  # raises where permission is lacking, in place of files that seem to be missing
    if results_files(path):
        return load_results(path)
    return _only_run_inside(path, page)


def _is_inspect_log(path: Path) -> bool:
    """Whether the file says that it is a log of inspect_ai."""
    if path.suffix != ".json":
        return path.suffix == ".eval"
    with open(path, "rb") as file:
        beginning = file.read(400)
    return b'"eval"' in beginning and b'"version"' in beginning


def _only_run_inside(path: Path, page: bool) -> Loaded:
    """The only run in a folder: lm-eval writes into <output_path>/<model>/, and results/ may hold a single run."""
    if of_experiment := experiment_runs(path):
        many, first = len(of_experiment), of_experiment[0]
        raise ConfigError(f"{path}: an experiment of {many} runs; name one of them, such as {first}")
    runs, _ = runs_in(path)
    if len(runs) == 1:
        return load_with_samples(runs[0], page)
    if runs:
        names = listed([str(run.relative_to(path)) for run in runs], 4)
        raise ConfigError(f"{path}: it holds {len(runs)} runs ({names}); name one of them")
    raise ConfigError(f"{path}: no run in this folder (neither digest.txt nor results_*.json)")


@dataclass(frozen=True, eq=False)
class RunData:
    """A finished run, ours or lm-eval's, with its samples."""

    run: Run
    results: dict[str, Any]  # lm-eval's results file
    samples: dict[str, dict[int, list[dict[str, Any]]]]  # task -> doc_id -> a sample per filter
    endings: dict[Key, tuple[str, int]]  # request -> (finish reason, prompt tokens); lm-eval's files hold none
    thinking: dict[Key, tuple[int, bool]]  # (tokens of a thinking, cut short?); none where no end is named
    outcomes: dict[Key, str]  # how the program in a generation ended, of tasks that run what the model wrote
    pieces: dict[int, bytes]  # token id -> bytes; empty where the run left no tokens.json

    @property
    def tasks(self) -> list[str]:
        """The tasks with samples, in the results' order."""
        return [task for task in self.results["results"] if task in self.samples]

    @cached_property
    def documents(self) -> dict[tuple[str, int], list[Item]]:
        """Each document's requests by (task, doc_id), in order; none for a document with an empty text."""
        requests: dict[tuple[str, int], list[Item]] = {(t, doc): [] for t, docs in self.samples.items() for doc in docs}
        for item in self.run.items.values():
            requests[item.task, item.doc_id].append(item)
        return requests

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Each task's kind of request; tasks without a request are missing."""
        return {item.task: item.kind for item in self.run.items.values()}

    def items(self, task: str) -> list[Item]:
        """The task's requests."""
        return self._items.get(task, [])

    @cached_property
    def _items(self) -> dict[str, list[Item]]:
        by_task: dict[str, list[Item]] = {}
        for item in self.run.items.values():
            by_task.setdefault(item.task, []).append(item)
        return by_task

    def score_keys(self, task: str) -> list[ScoreKey]:
        """The task's metrics that have a number per document, those of the results first and in their order."""
        reported = [key for key in self.run.results if key[0] == task and key in self.run.scores]
        return reported + sorted(key for key in self.run.scores if key[0] == task and key not in reported)

    def binary(self, key: ScoreKey) -> bool:
        """Whether every document scored 0 or 1; False for a metric without a score per document."""
        return key in self.run.scores and set(self.run.scores[key].values()) <= {0.0, 1.0}

    def filters(self, task: str) -> list[str]:
        """The task's filters in the samples' order."""
        rows = next(iter(self.samples[task].values()), [])
        return [row["filter"] for row in rows]


def load_run_data(path: str | Path, page: bool = True, complete: bool = True) -> RunData:
    """Reads a run with its texts.

    page: whether `report.html` is checked, too. complete: whether the manifest must hold all that a page needs.
    Raises `ConfigError` for what is missing, unfinished, damaged or edited, and for a baseline, which has no texts.
    """
    loaded = load_with_samples(path, page)
    run = loaded.run
    if run.kind == "baseline":
        raise ConfigError(f"report: {path}: a baseline holds no texts; name the run's folder")
    if complete and run.kind == "run" and (missing := missing_for_page(run.manifest)):
        raise ConfigError(f"{(run.records or run.source) / MANIFEST}: {missing}; run its command again, or take the "
                          "folder from where it was copied")  # fmt: skip
    from evalengine.records.tokens import read_tokens

    samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for task, unsorted in loaded.samples.items():
        documents = samples.setdefault(task, {})
        for row in sorted(unsorted, key=lambda row: row["doc_id"]):  # the sort is stable, so filters stay in order
            documents.setdefault(row["doc_id"], []).append(row)
    ours, place = run.kind == "run", run.records or run.source
    endings = loaded.endings
    if endings is None:
        endings = read_endings(place / RECORDS) if ours else {}
    return RunData(
        run=run,
        results=loaded.results,
        samples=samples,
        endings=endings,
        thinking=read_thinking(place / RECORDS) if ours else {},
        outcomes=read_outcomes(place / RECORDS) if ours else {},
        pieces=read_tokens(place / TOKENS) if ours else {},
    )
