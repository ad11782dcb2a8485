"""Reads `results_<iso>.json` and the rows of `samples_<task>_<iso>.jsonl`, ours and lm-eval's.

An error is a sentence that names the file. Types are checked where a reader relies on them:
lm-eval's own files hold more, and may hold it in other ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.shapes import AsciiText, Count, Text, Writable, each, with_fields, wrong
from evalengine.util.plain_files import parse_json, read_bytes, read_json

ISO = r"(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)"
AGAIN = "run the evaluation again, or take the folder from where it was copied"
THINKING_TRUNCATED = "thinking_truncated"  # key of a task's results and of a sample
LENGTH_LIMITED = "length_limited"  # key of a sample without a record
UNANSWERED = ("content_filter", "null_content", "empty_answer", "unended_thinking")
CONTENT_FILTER, NULL_CONTENT, EMPTY_ANSWER, UNENDED_THINKING = UNANSWERED
REJECTED = "rejected"  # key of a task's results: documents that an endpoint rejected, which are in no score
SAMPLE_KEYS = ("doc_id", "filter", "metrics", "resps", "filtered_resps", "doc_hash", "prompt_hash", "target_hash")
_RESULTS = with_fields(
    {
        "results": dict[str, dict[str, Writable]],
        "configs?": each(with_fields({"output_type?": Text})),
        "versions?": dict,
        "n-shot?": dict,
        "n-samples?": dict,
        "higher_is_better?": dict[str, dict | None],
        "task_hashes?": dict[str, Text],
        "config?": dict,
        "model_name?": Text,
    }
)
_SAMPLE = with_fields(
    {
        "doc_id": Count,
        "filter": Text,
        "metrics": list[Text],
        "resps": list[Any],
        "filtered_resps": Any,
        "doc_hash": AsciiText,
        "prompt_hash": AsciiText,
        "target_hash": AsciiText,
        "doc_cluster?": Text,
        "doc?": dict,
        "arguments?": dict[str, dict],
    }
)
_METRICS = dict[str, Writable]
_SECTIONS = ("configs", "versions", "n-shot", "n-samples", "higher_is_better", "config")


def results_files(path: Path) -> list[Path]:
    """The results files of a folder, oldest first; or `path` itself, if it is one (`--output_path x.json` names it
    x_<iso>.json)."""
    if path.is_dir():
        return sorted((f for f in path.glob("*.json") if re.search(rf"_{ISO}\.json$", f.name)), key=results_date)
    return [path] if re.search(rf"_{ISO}\.json$", path.name) else []


def results_date(file: Path) -> str:
    """The time in a results file's name."""
    match = re.search(rf"_{ISO}\.json$", file.name)
    assert match is not None, file
    return match[1]


def samples_files(results: Path) -> dict[str, Path]:
    """Each task's samples file that was written with these results: older files belong to another run."""
    named = ((re.fullmatch(rf"samples_(.+)_{ISO}\.jsonl", file.name), file) for file in results.parent.iterdir())
    date = results_date(results)
    return {m[1]: file for m, file in sorted(named, key=lambda pair: pair[1].name) if m and m[2] == date}


def read_results(file: Path) -> dict[str, Any]:
    """A results file; its sections that are missing or null are empty. Raises `ConfigError`."""
    try:
        results = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: damaged ({error}); {AGAIN}") from error
    if not isinstance(results, dict) or not isinstance(results.get("results"), dict):
        raise ConfigError(f"{file}: no results of lm-eval (it has no `results`); {AGAIN}")
    if problem := wrong(results, _RESULTS):
        raise ConfigError(f"{file}: no results of lm-eval ({problem}): it was edited; {AGAIN}")
    return {**results, **{name: results.get(name) or {} for name in _SECTIONS}}


def metrics_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """(metric, filter, value, standard error) of one task's results; None for an error that they lack."""
    for key, value in values.items():
        metric, comma, name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            yield metric, name, value, values.get(f"{metric}_stderr,{name}")


def read_samples(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a samples file. Raises `ConfigError` that names the line."""
    try:
        lines = read_bytes(file).decode("utf-8").split("\n")  # not `splitlines`: a text's U+2028 ends no line
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: damaged ({error}); {AGAIN}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _sample(line, f"{file}, line {number}")


def _sample(line: str, where: str) -> dict[str, Any]:
    """A row of samples. where: the file and the line, for the `ConfigError` that it raises."""
    try:
        row: Any = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: damaged or cut short ({error}); {AGAIN}") from error
    if not isinstance(row, dict) or any(key not in row for key in SAMPLE_KEYS):
        missing = [key for key in SAMPLE_KEYS if not isinstance(row, dict) or key not in row]
        raise ConfigError(f"{where}: no sample of lm-eval 0.4.12 or newer ({', '.join(missing)} missing)")
    if problem := wrong(row, _SAMPLE) or wrong({name: row.get(name) for name in row["metrics"]}, _METRICS):
        raise ConfigError(f"{where}: {problem}: it was edited; {AGAIN}")
    return row


def unanswered_words(values: Mapping[str, Any]) -> str:
    """The counts that stand next to a task's scores: `1 rejected, 2 empty_answer`; "" where there are none. values: its
    entry in the results file."""
    return ", ".join(f"{values[name]} {name}" for name in (REJECTED, *UNANSWERED) if values.get(name))
