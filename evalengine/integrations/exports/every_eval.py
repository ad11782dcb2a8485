"""A run as Every Eval Ever's records: all results, and a line for each document and result, laid as its datastore has
them.

Both forms are those of evaleval/every_eval_ever 0.3.0 (eval.schema.json, instance_level_eval.schema.json); names of
files and the hash of a sample are those of its converters.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from evalengine.errors import ConfigError
from evalengine.integrations.exports.files import HUB_ID, check_kind, few_shot, given, on_hub
from evalengine.integrations.exports.inspect_log import questions_of, said_of
from evalengine.records.folder import TextFile, sanitise
from evalengine.records.manifest_data import Dataset, Judged, read_part
from evalengine.report.numbers import counted
from evalengine.report.read.groups import roots_of
from evalengine.report.read.run import Run, RunData, ScoreKey, parsed
from evalengine.report.stats.metric_interval import CONFIDENCE, cut_of, interval_cautions, metric_interval
from evalengine.version import __version__

SCHEMA = "0.3.0"
LOCAL = "local"  # instead of a developer, for a model that is not on the Hub
Details = dict[str, str]


def every_eval(data: RunData, folder: Path) -> list[TextFile]:
    """`data/COLLECTION/DEVELOPER/MODEL/UUID_samples.jsonl` and `UUID.json` in `folder`. The same run has the same names
    and bytes, whenever it is written.

    Raises `ConfigError` for a run that is not ours, or has no finite results.
    """
    run = data.run
    check_kind(run, "--every-eval")
    assert run.digest is not None
    keys = [key for key, (value, _) in run.results.items() if math.isfinite(value)]
    if not keys:
        raise ConfigError(f"report: --every-eval: {run.source} holds no finite results")
    collection = "+".join(roots_of(run.groups, [key[0] for key in keys]))
    model, name = _model_id(run), _uuid(run.digest, run.manifest.judge)
    developer, _, rest = model.partition("/")
    place = Path("data", sanitise(collection), sanitise(developer), sanitise(rest))
    identity = f"{collection}/{model}/{_seconds(run)}"
    lines = [json.dumps(row, allow_nan=False) + "\n" for key in keys for row in _rows(data, key, identity, model)]
    samples, text = place / f"{name}_samples.jsonl", "".join(lines)
    detailed = {"format": "jsonl", "file_path": samples.as_posix(), "hash_algorithm": "sha256",
                "checksum": hashlib.sha256(text.encode()).hexdigest(), "total_rows": len(lines)}  # fmt: skip
    record = _record(data, keys, identity, model) | ({"detailed_evaluation_results": detailed} if lines else {})
    content = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files = [TextFile(folder / samples, text, counted(len(lines), "sample"))] if lines else []
    return [*files, TextFile(folder / place / f"{name}.json", content, counted(len(keys), "result"))]


def _uuid(digest: str, judge: Judged | None) -> UUID:
    """The run's name: of its digest, and of the judge's run: the same answers have other scores by another."""
    content = bytes.fromhex(digest) if judge is None else hashlib.sha256(f"{digest} {judge.run}".encode()).digest()
    return UUID(bytes=content[:16], version=4)


def _model_id(run: Run) -> str:
    source = run.manifest.model.source
    return source if isinstance(source, str) and on_hub(source) else f"{LOCAL}/{sanitise(str(run.manifest.model.name))}"


def _seconds(run: Run) -> str:
    started = parsed(run.manifest.started)
    return f"{started.timestamp():.0f}" if started is not None else "0"


def _record(data: RunData, keys: list[ScoreKey], identity: str, model: str) -> dict[str, Any]:
    run = data.run
    version, public = run.manifest.code.version or __version__, not model.startswith(f"{LOCAL}/")
    about = {"deployment_type": "self_deployed", "model_availability": "open_weights" if public else "unknown",
             "numerics": run.identity.get("numerics"), "weights_sha256": run.manifest.model.weights_sha256,
             "contract_version": run.identity.get("contract_version"), "digest": run.digest}  # fmt: skip
    return {
        "schema_version": SCHEMA,
        "evaluation_id": identity,
        **given(evaluation_timestamp=run.manifest.started),
        "retrieved_timestamp": _seconds(run),
        "source_metadata": {"source_name": "evalengine", "source_type": "evaluation_run",
                            "source_organization_name": "unknown", "evaluator_relationship": "other",
                            "additional_details": _texts({"run": run.name, "digest": run.digest})},
        "eval_library": {"name": "evalengine", "version": version},
        "model_info": {"name": run.manifest.model.name, "id": model,
                       "inference_engine": {"name": "evalengine", "version": version},
                       "additional_details": _texts(about)},
        "evaluation_results": [_result(data, key) for key in keys],
    }  # fmt: skip


def _result(data: RunData, key: ScoreKey) -> dict[str, Any]:
    run, (task, metric, name) = data.run, key
    value, stderr = run.results[key]
    scores, interval, cut = run.scores.get(key, {}), metric_interval(run, key), cut_of(run, key)
    uncertainty: dict[str, Any] = {} if stderr is None else {"standard_error": {"value": stderr}}
    if interval is not None and all(map(math.isfinite, interval)):
        low, high = interval
        uncertainty["confidence_interval"] = {"lower": low, "upper": high, "confidence_level": CONFIDENCE}
    if scores:
        uncertainty["num_samples"] = len(scores)
    details = {"few_shot": few_shot(data, task), "filter": name, "task_digest": run.task_digests.get(task),
               "cut_at_the_limit": None if cut is None else cut.words,
               "cautions": "; ".join(interval_cautions(run, key)) or None}  # fmt: skip
    return {
        "evaluation_result_id": "/".join(key),
        "evaluation_name": task,
        "source_data": _source(run, task),
        "metric_config": {"evaluation_description": f"{metric}, {name}", "metric_id": metric, "metric_name": metric,
                          "lower_is_better": not run.higher_is_better.get(key, True), **_scale(value, scores)},
        "score_details": {"score": value, "details": _texts(details), **given(uncertainty=uncertainty or None)},
        **_generation(run, task),
    }  # fmt: skip


def _generation(run: Run, task: str) -> dict[str, Any]:
    """How answers were generated, for a task that has some."""
    settings = (run.identity.get("tasks") or {}).get(task) or {}
    generation = settings.get("generation") or {}
    if not isinstance(generation.get("max_gen_toks"), int) or not any(
        item.kind == "generate_until" for item in run.items.values() if item.task == task
    ):
        return {}
    known = given(
        temperature=generation.get("temperature"), top_p=generation.get("top_p"), top_k=generation.get("top_k")
    )
    more = _texts({"seed": run.identity.get("seed"), "until": json.dumps(generation.get("until"))})
    return {"generation_config": {"generation_args": {**known, "max_tokens": generation["max_gen_toks"]},
                                  "additional_details": more}}  # fmt: skip


def _scale(value: float, scores: Mapping[int, float]) -> dict[str, Any]:
    """The kind of score, and its limits, without which the schema takes it for one with named levels."""
    values = {value, *scores.values()}
    if scores and {*scores.values()} <= {0.0, 1.0}:
        return {"score_type": "binary", "min_score": 0, "max_score": 1}
    share = all(0 <= one <= 1 for one in values)
    return {"score_type": "continuous", "min_score": 0 if min(values) >= 0 else "-Infinity",
            "max_score": 1 if share else "Infinity"}  # fmt: skip


def _source(run: Run, task: str) -> dict[str, Any]:
    rows = run.manifest.datasets.get(task) or read_part(Dataset, None)
    if rows.dataset is None or not (on_hub(rows.dataset) and HUB_ID.fullmatch(rows.dataset)):
        return {"dataset_name": task, "source_type": "other"}
    about = _texts({"revision": rows.revision, "config": rows.name, "sha256": rows.sha256})
    return {"dataset_name": task, "source_type": "hf_dataset", "hf_repo": rows.dataset, "samples_number": rows.rows,
            **given(hf_split=rows.split), "additional_details": about}  # fmt: skip


def _rows(data: RunData, key: ScoreKey, identity: str, model: str) -> Iterator[dict[str, Any]]:
    """A line for each document that a result is made of; none for a result without scores by document."""
    task, metric, name = key
    rows = {doc: row for doc, listed in data.samples.get(task, {}).items() for row in listed if row["filter"] == name}
    for doc, value in data.run.scores.get(key, {}).items():
        if doc not in rows or not math.isfinite(value):
            continue
        row, items = rows[doc], data.documents[task, doc]
        prompt, choices = questions_of(row)
        target = {"raw": prompt, "reference": [str(row["target"])]}
        hashed = json.dumps(target, sort_keys=True, separators=(",", ":"))
        said = [text for text, _ in said_of(data, task, doc, row)]
        extracted = data.run.answers.get((task, name), {}).get(doc, "")
        tokens = [sum(data.endings[item.key][1] for item in items), sum(len(item.output_ids or ()) for item in items)]
        about = {"digest": data.run.digest, "leaves": " ".join(item.leaf for item in items), "filter": name,
                 "metric": metric, "doc_hash": row["doc_hash"], "prompt_hash": row["prompt_hash"],
                 "endings": " ".join(data.endings[item.key][0] for item in items)}  # fmt: skip
        yield {
            "schema_version": SCHEMA,
            "evaluation_id": identity,
            "model_id": model,
            "evaluation_name": task,
            "evaluation_result_id": "/".join(key),
            "sample_id": str(doc),
            "sample_hash": hashlib.sha256(hashed.encode()).hexdigest(),
            "interaction_type": "single_turn",
            "input": {**target, **given(choices=choices or None)},
            "output": {"raw": said, **given(reasoning_trace=row.get("thinking"))},
            "answer_attribution": [{"turn_idx": 0, "source": "output.raw", "extracted_value": extracted,
                                    "extraction_method": name, "is_terminal": True}],
            "evaluation": {"score": value, "is_correct": value == 1.0},
            "token_usage": {"input_tokens": tokens[0], "output_tokens": tokens[1], "total_tokens": sum(tokens)},
            "metadata": _texts(about),
        }  # fmt: skip


def _texts(values: Mapping[str, Any]) -> Details:
    """The known values, as strings."""
    return {name: str(value) for name, value in values.items() if value is not None}
