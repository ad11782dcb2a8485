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
from evalengine.records.schema import read_endings, read_optional
from evalengine.report.read.names import RESULTS, experiment_runs, runs_in, stands_for
from evalengine.report.read.run import Item, Key, Run, Samples, ScoreKey
from evalengine.report.read.run_folder import load_folder, load_results
from evalengine.util.plugins import load


def load_run(path: str | Path, page: bool = True) -> Run:
    """A run folder, an lm-eval output folder (or its results file), a log of inspect_ai, or a baseline file; or a name
    that stands for one (`names`).

    page: whether the `report.html` of a run folder is checked, too.

    Raises `ConfigError` (the file at fault, and the fix) for what is missing, unreadable, unfinished, damaged or
    edited.
    """
    return load_data(path, page).run


def _is_inspect_log(path: Path) -> bool:
    """Whether the file says that it is a log of inspect_ai."""
    if path.suffix != ".json":
        return path.suffix == ".eval"
    with open(path, "rb") as file:
        beginning = file.read(400)
    return b'"eval"' in beginning and b'"version"' in beginning


@dataclass(frozen=True, eq=False)
class RunData:
    """A finished run with its texts, which are read from its files where they are used; a baseline has none."""

    run: Run
    results: dict[str, Any]  # lm-eval's results file
    rows: Samples

    @cached_property
    def samples(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        """Task -> doc_id -> a sample per filter, documents in order."""
        samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for task, rows in self.rows.items():
            documents = samples.setdefault(task, {})
            for row in sorted(rows, key=lambda row: row["doc_id"]):  # the sort is stable, so filters stay in order
                documents.setdefault(row["doc_id"], []).append(row)
        return samples

    def _recorded(self, read: Any, file: str = RECORDS) -> dict[Any, Any]:
        """The content, by `read`, of a file next to the records; empty for a run of another program."""
        found: dict[Any, Any] = read((self.run.records or self.run.source) / file) if self.run.kind == "run" else {}
        return found

    @cached_property
    def endings(self) -> dict[Key, tuple[str, int]]:
        """Request -> (finish reason, prompt tokens)."""
        return self._recorded(read_endings)

    @cached_property
    def thinking(self) -> dict[Key, tuple[int, bool]]:
        """Request -> (tokens of its thinking, whether it was truncated), where the end of thinking is named."""
        found = self._recorded(lambda file: read_optional(file, "thinking_tokens", "thinking_truncated"))
        return {key: (count, bool(truncated)) for key, (count, truncated) in found.items()}

    @cached_property
    def outcomes(self) -> dict[Key, str]:
        """Request -> how the program in it ended, of tasks that run what the model wrote."""
        return {key: end for key, (end,) in self._recorded(lambda file: read_optional(file, "outcome")).items()}

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """Token id -> bytes; empty where the run left no tokens.json."""
        from evalengine.records.tokens import read_tokens

        return self._recorded(read_tokens, TOKENS)

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

    def score_keys(self, task: str) -> list[ScoreKey]:
        """The task's metrics that have a number per document, those of the results first and in their order."""
        reported = [key for key in self.run.results if key[0] == task and key in self.run.scores]
        return reported + sorted(key for key in self.run.scores if key[0] == task and key not in reported)

    def binary(self, key: ScoreKey) -> bool:
        """Whether every document scored 0 or 1; False for a metric without a score per document."""
        return key in self.run.scores and set(self.run.scores[key].values()) <= {0.0, 1.0}


def load_data(name: str | Path, page: bool = True) -> RunData:
    """Read the run that `load_run` reads, with its texts."""
    with readable(name):
        path = Path(stands_for(name))
        if path.is_file():
            if results_files(path):
                return RunData(*load_results(path))
            if _is_inspect_log(path):
                return RunData(*load("evalengine.integrations.inspect_ai.log:load_inspect_log")(path))
            from evalengine.report.read.baseline import is_baseline, load_baseline  # runs of ours need no other reader

            if not is_baseline(path) and is_run_folder(path.parent):
                raise ConfigError(f"{path}: one file of a run; give the folder: {path.parent}")
            return RunData(load_baseline(path), {}, {})
        if not path.is_dir():
            raise ConfigError(
                f"{path}: no such file or folder; name a run's folder, or latest: the newest in {RESULTS}/"
            )
        any(path.iterdir())  # raises where permission is lacking, in place of files that seem to be missing
        if is_run_folder(path):
            return RunData(*load_folder(path, page))
        if results_files(path):
            return RunData(*load_results(path))
        # lm-eval writes into <output_path>/<model>/, and results/ may hold a single run.
        if of_experiment := experiment_runs(path):
            many, first = len(of_experiment), of_experiment[0]
            raise ConfigError(f"{path}: an experiment of {many} runs; name one of them, such as {first}")
        runs, _ = runs_in(path)
        if len(runs) == 1:
            return load_data(runs[0], page)
        if runs:
            names = listed([str(run.relative_to(path)) for run in runs], 4)
            raise ConfigError(f"{path}: it holds {len(runs)} runs ({names}); name one of them")
        raise ConfigError(f"{path}: no run in this folder (neither digest.txt nor results_*.json)")


def load_run_data(path: str | Path, page: bool = True, complete: bool = True) -> RunData:
    """Reads a run with its texts.

    page: whether `report.html` is checked, too. complete: whether the manifest must hold all that a page needs.
    Raises `ConfigError` for what is missing, unfinished, damaged or edited, and for a baseline, which has no texts.
    """
    data = load_data(path, page)
    run = data.run
    if run.kind == "baseline":
        raise ConfigError(f"report: {path}: a baseline holds no texts; name the run's folder")
    if complete and run.kind == "run" and (missing := missing_for_page(run.manifest)):
        raise ConfigError(f"{(run.records or run.source) / MANIFEST}: {missing}; run its command again, or take the "
                          "folder from where it was copied")  # fmt: skip
    return data
