"""lm-evaluation-harness's files, read as evidence: `results_<iso>.json` and `samples_<task>_<iso>.jsonl`, whose rows
give numbers, answers, requests, and which choice each metric takes. Run folders of ours hold the same files.

As in lm_eval 0.4.13: `evaluator.evaluate` (what a sample holds), `loggers/evaluation_tracker.py` (names, the folder
<output_path>/<model>/, responses saved as strings, the task hash), `utils.handle_non_serializable` (scalars of NumPy
become strings). `ConfigurableTask.process_results`: `acc` takes the choice of the highest log-likelihood, `acc_norm`
that of the highest per character of its text, `acc_bytes` per UTF-8 byte, `acc_mutual_info` that of the highest one
less its log-likelihood without the context; `f1` and `mcc` take `acc`'s. The first of equals wins.

A task of another rule may use the same names. So the choices of a metric count as known only where every recorded
score bears them out.

Rolling log-likelihoods: our records hold one item a window, lm-eval's files one a document, the windows' sum.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.records.lm_eval_file import (
    AGAIN,
    LENGTH_LIMITED,
    REJECTED,
    UNANSWERED,
    metrics_of,
    read_results,
    read_samples,
    results_date,
    results_files,
    samples_files,
)
from evalengine.records.manifest_data import Manifest
from evalengine.records.shapes import Count, fits
from evalengine.report.numbers import exact_sum
from evalengine.report.read.groups import groups_of
from evalengine.report.read.run import Item, Key, Run, Samples, ScoreKey

MODEL_KEYS = ("model", "model_args", "model_dtype", "model_revision", "model_sha", "gen_kwargs", "limit")
SEED_KEYS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
# model_name is left out: it is one of the model's arguments, or a random word where they name no model.
RUN_KEYS = ("system_instruction_sha", "chat_template_sha", "fewshot_as_multiturn", "task_hashes")
TASK_KEYS = ("dataset_path", "dataset_name", "test_split", "validation_split", "fewshot_split", "num_fewshot")
PROMPT_KEYS = ("output_type", "description", "doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter")
ROLLING = "loglikelihood_rolling"
_BEYOND = 2**1023  # float() of such an integer may fail
BY_CHOICE = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")  # 1 if the choice is right, else 0
PREDICTED = ("f1", "mcc")  # a document's value is (right choice, choice)
Rows = Sequence[Mapping[str, Any]]


def of_lm_eval(path: Path, results: Mapping[str, Any], samples: Samples) -> Run:
    """The run that `newest` read from `path`: texts, log-likelihoods, scores; no digests, since lm-eval records no
    tokens. lm-eval's own files name no length limits, rejected documents or unanswered ones."""
    types = {task: config.get("output_type") for task, config in results["configs"].items()}
    kinds = {task: "loglikelihood" if name == "multiple_choice" else name for task, name in types.items()}
    items: dict[Key, Item] = {}
    for task, rows in samples.items():
        for row in rows:
            for item in responses(task, row, kinds.get(task)):
                items.setdefault(item.key, item)
    cut = {task: frozenset(row["doc_id"] for row in rows if row.get(LENGTH_LIMITED)) for task, rows in samples.items()}
    unanswered = {
        task: {name: values[name] for name in (REJECTED, *UNANSWERED) if fits(values.get(name), Count)}
        for task, values in results["results"].items()
    }
    return Run(
        source=path,
        kind="lm-eval",
        name=path.resolve().name if path.is_dir() else path.stem,
        digest=None,
        task_digests={},
        identity=_identity(results),
        manifest=Manifest({}),
        items=dict(sorted(items.items())),
        cut={task: documents for task, documents in cut.items() if documents},
        unanswered={task: counts for task, counts in unanswered.items() if counts},
        **outcome_of(results, samples, kinds),
    )


def newest(path: Path) -> tuple[dict[str, Any], Samples]:
    """(results, rows of each task's samples) of a folder's newest run, or of a results file.

    Raises `ConfigError` for what is missing, damaged or edited.
    """
    files = results_files(path)
    if not files:
        raise ConfigError(f"{path}: results_*.json is missing; {AGAIN}")
    file = files[-1]
    results = read_results(file)
    hashes = results.get("task_hashes") or {}
    samples = {task: list(_rows(name, hashes.get(task))) for task, name in samples_files(file).items()}
    missing = sorted({*hashes, *results["n-samples"]} - {*samples})
    if missing or not samples:
        lacking = f"samples_{missing[0] if missing else '<task>'}_{results_date(file)}.jsonl"
        raise ConfigError(f"{file.parent / lacking}: missing; run lm_eval with --log_samples, or copy the file too")
    return results, samples


def _rows(file: Path, task_hash: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a samples file. The task hash, where the results hold one, is over the hashes of every row."""
    hasher, seen = hashlib.sha256(), set()
    for row in read_samples(file):
        if (row["doc_id"], row["filter"]) in seen:
            raise ConfigError(f"{file}: document {row['doc_id']} a second time; {AGAIN}")
        seen.add((row["doc_id"], row["filter"]))
        hasher.update(f"{row['doc_hash']}{row['prompt_hash']}{row['target_hash']}".encode())
        yield row
    if task_hash is not None and hasher.hexdigest() != task_hash:
        raise ConfigError(f"{file}: not the samples of its results (lines are missing or edited); {AGAIN}")


def outcome_of(results: Mapping[str, Any], samples: Samples, kinds: Mapping[str, str | None]) -> dict[str, Any]:
    """`Run`'s scores, results, answers, hashes and what depends on them, from what `newest` read.

    kinds: each task's kind of request.
    """
    scores: dict[ScoreKey, dict[int, float]] = defaultdict(dict)
    answers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    hashes: dict[str, dict[int, tuple[str, str, str]]] = defaultdict(dict)
    weighted: dict[ScoreKey, dict[int, tuple[float, float]]] = defaultdict(dict)
    clusters: dict[str, dict[int, str]] = defaultdict(dict)
    texts: dict[str, dict[int, tuple[str, ...]]] = {}
    choices: dict[ScoreKey, dict[int, int]] = {}
    for task, rows in samples.items():
        for row in rows:
            doc, name = row["doc_id"], row["filter"]
            hashes[task][doc] = (row["doc_hash"], row["prompt_hash"], row["target_hash"])
            for metric in row["metrics"]:
                if (value := number(row.get(metric))) is not None:
                    scores[task, metric, name][doc] = value
                elif kinds.get(task) == ROLLING and (pair := weighted_pair(row.get(metric))) is not None:
                    weighted[task, metric, name][doc] = pair
            if (text := answer(row, kinds.get(task))) is not None:
                answers[task, name][doc] = text
            if row.get("doc_cluster") is not None:
                clusters[task][doc] = row["doc_cluster"]
        if kinds.get(task) in ("loglikelihood", None):  # None: older files do not name it
            texts[task] = choice_texts(rows, _delimiter(results, task))
            choices |= {(task, *key): chosen for key, chosen in choices_of(rows, texts[task]).items()}
    aggregated = {
        (task, metric, name): (value, number(stderr))
        for task, values in results["results"].items()
        for metric, name, raw, stderr in metrics_of(values)
        if (value := number(raw)) is not None
    }
    better = results["higher_is_better"]
    directions = {key: (better.get(key[0]) or {}).get(key[1]) for key in {*scores, *aggregated}}
    return {
        "scores": dict(scores),
        "results": aggregated,
        "higher_is_better": {key: value for key, value in sorted(directions.items()) if isinstance(value, bool)},
        "answers": dict(answers),
        "hashes": dict(hashes),
        "weighted": dict(weighted),
        "choices": choices,
        "choice_texts": texts,
        "clusters": dict(clusters),
        "groups": groups_of(results),
    }


def _delimiter(results: Mapping[str, Any], task: str) -> str | None:
    """The text that lm-eval puts before each choice; None where the results do not say. Under a chat template it is
    empty, unless it follows a prefix of the answer that does not end in white space (`construct_requests`)."""
    config = results["configs"].get(task) or {}
    delimiter, prefix = config.get("target_delimiter"), config.get("gen_prefix")
    if results.get("chat_template_sha") and not (isinstance(prefix, str) and prefix and not prefix[-1].isspace()):
        return ""
    return delimiter if isinstance(delimiter, str) else None


def _identity(results: Mapping[str, Any]) -> dict[str, Any]:
    """The model, seeds, tasks and prompts that lm-eval's results record."""
    config = results["config"]
    tasks = {
        task: {
            "version": results["versions"].get(task),
            **{key: settings.get(key) for key in (*TASK_KEYS, *PROMPT_KEYS, "generation_kwargs") if key in settings},
        }
        for task, settings in sorted(results["configs"].items())
    }
    recorded = {key: config.get(key) for key in (*MODEL_KEYS, *SEED_KEYS)}
    harness = {"harness": results["harness"]} if "harness" in results else {}  # an endpoint's, or inspect_ai's
    return {**recorded, **{key: results.get(key) for key in RUN_KEYS}, **harness, "tasks": tasks}


def number(value: Any) -> float | None:
    """A metric's value, or None if it is no number: "N/A", a pair of sums as perplexities have, missing, an integer
    beyond float64."""
    if isinstance(value, (bool, int, float)):
        return float(value) if isinstance(value, float) or abs(value) < _BEYOND else None
    if value in ("True", "False"):  # lm-eval writes NumPy's scalars as strings
        return float(value == "True")
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def weighted_pair(value: Any) -> tuple[float, float] | None:
    """(log-likelihood, weight) of a document, as perplexities by word or byte have it; None for anything else."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    total, weight = map(number, value)
    return (total, weight) if total is not None and weight is not None and weight > 0 else None


def answer(row: Mapping[str, Any], kind: str | None) -> str | None:
    """A document's answer under a filter, as text that may flip; None where there is only a number.

    A generated text as it is; several texts as a JSON list; for scored choices, the text of the likeliest (the first
    of equals, as in lm-eval's argmax); for a single scored continuation, whether it is the greedy one.
    """
    filtered = row["filtered_resps"]
    if kind == ROLLING or not isinstance(filtered, list) or not filtered:
        return None
    pairs = [scored_pair(response) for response in filtered]
    if kind == "generate_until" or None in pairs:
        if len(filtered) == 1:
            return filtered[0] if isinstance(filtered[0], str) else json.dumps(filtered[0], ensure_ascii=False)
        return json.dumps(filtered, ensure_ascii=False)
    if len(pairs) == 1:
        return str(pairs[0][1])  # type: ignore[index]  # no pair is None
    if "acc_mutual_info" in row["metrics"]:  # the second half is the choices without their context
        pairs = pairs[: len(pairs) // 2]
    best = int(np.argmax([pair[0] for pair in pairs if pair is not None]))
    text = str((row.get("arguments") or {}).get(f"gen_args_{best}", {}).get("arg_1", ""))
    return f"{best}: {text.strip()}"


def responses(task: str, row: Mapping[str, Any], kind: str | None) -> Iterator[Item]:
    """The document's requests, without tokens, which lm-eval does not record."""
    for index, repeats in enumerate(row["resps"]):
        for repeat, response in enumerate(repeats if isinstance(repeats, list) else [repeats]):
            pair = None if kind == "generate_until" else scored_pair(response)
            value = number(response) if kind == ROLLING else pair[0] if pair else None
            yield Item(
                task=task,
                doc_id=row["doc_id"],
                request_index=index,
                repeat=repeat,
                kind=kind or ("loglikelihood" if pair else "generate_until"),
                sum_logprob=value,
                text=response if value is None and isinstance(response, str) else None,
            )


def scored_pair(response: Any) -> tuple[float, bool] | None:
    """(log-likelihood, is_greedy), or None if the response is no such pair."""
    if not isinstance(response, list) or len(response) != 2 or str(response[1]) not in ("True", "False"):
        return None
    value = number(response[0])
    return None if value is None else (value, str(response[1]) == "True")


def choice_texts(rows: Rows, delimiter: str | None) -> dict[int, tuple[str, ...]]:
    """The texts of each document's choices, without the delimiter before them. rows: of one task.

    delimiter: None takes the white space that all of the task's texts begin with.
    """
    texts = {row["doc_id"]: continuations(row) for row in rows}
    every = [text for listed in texts.values() for text in listed]
    if delimiter is None:
        delimiter = every[0][: len(every[0]) - len(every[0].lstrip())] if every else ""
        while not all(text.startswith(delimiter) for text in every):
            delimiter = delimiter[:-1]
    cut = len(delimiter) if all(text.startswith(delimiter) for text in every) else 0
    return {doc: tuple(text[cut:] for text in listed) for doc, listed in texts.items() if len(listed) > 1}


def choices_of(rows: Rows, texts: Mapping[int, Sequence[str]]) -> dict[tuple[str, str], dict[int, int]]:
    """The number of each document's choice, by (metric, filter). rows and texts: of one task."""
    choices: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    refuted: set[tuple[str, str]] = set()
    for row in rows:
        doc, name = row["doc_id"], row["filter"]
        metrics = [metric for metric in row["metrics"] if metric in (*BY_CHOICE, *PREDICTED)]
        taken = dict(_taken(row, metrics, texts.get(doc, ())))
        for metric in metrics:
            if metric in taken and _bears_out(row, metric, taken[metric], texts[doc]):
                choices[metric, name][doc] = taken[metric]
            else:
                refuted.add((metric, name))
    return {key: chosen for key, chosen in choices.items() if key not in refuted}


def continuations(row: Mapping[str, Any]) -> list[str]:
    """The text of each choice of a sample; those without their context (acc_mutual_info's second half) left out."""
    texts = [str(value.get("arg_1", "")) for value in requests_of(row)]
    return texts[: len(texts) // 2] if "acc_mutual_info" in row["metrics"] else texts


def target_index(row: Mapping[str, Any], texts: Sequence[str]) -> int | None:
    """Which choice is right: the target is its number, or its text. None where it could be either (choices that are
    numbers themselves): lm-eval's files do not say which."""
    target = str(row.get("target", "")).strip()
    places = {place for place, text in enumerate(texts) if text.strip() == target}
    if target.isascii() and target.isdigit() and int(target) < len(texts):
        places.add(int(target))
    return places.pop() if len(places) == 1 else None


def _taken(row: Mapping[str, Any], metrics: Collection[str], texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(metric, choice) of these metrics that the sample records."""
    filtered = row["filtered_resps"]
    pairs = [scored_pair(response) for response in filtered] if isinstance(filtered, list) else []
    sums = np.array([np.nan if pair is None else pair[0] for pair in pairs], dtype=np.float64)
    if len(texts) < 2 or None in pairs or len(sums) not in (len(texts), 2 * len(texts)):
        return
    conditional, free = sums[: len(texts)], sums[len(texts) :]
    yield from ((metric, int(np.argmax(conditional))) for metric in ("acc", *PREDICTED) if metric in metrics)
    if len(free) and "acc_mutual_info" in metrics:
        with np.errstate(invalid="ignore"):  # -inf less -inf is NaN
            yield "acc_mutual_info", int(np.argmax(conditional - free))
    if len({value.get("arg_0") for value in requests_of(row)[: len(texts)]}) > 1:
        return  # one text after several contexts: the choices, whose lengths would count, are no continuations
    for metric, length in (("acc_norm", len), ("acc_bytes", lambda text: len(text.encode("utf-8", "surrogatepass")))):
        if metric in metrics:
            with np.errstate(divide="ignore", invalid="ignore"):  # an empty choice
                yield metric, int(np.argmax(conditional / np.array([*map(length, texts)], dtype=np.float64)))


def _bears_out(row: Mapping[str, Any], metric: str, choice: int, texts: Sequence[str]) -> bool:
    """Whether the recorded value is the one that this choice gives, if the sample has the target."""
    if metric in PREDICTED:
        pair = row.get(metric)
        return isinstance(pair, list) and len(pair) == 2 and number(pair[1]) == choice
    score, target = number(row.get(metric)), target_index(row, texts)
    return score in (0.0, 1.0) and (target is None or score == float(choice == target))


def requests_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Each request's arguments, in order."""
    return [*(row.get("arguments") or {}).values()]


NOTHING = hashlib.sha256(b"").hexdigest()  # the prompt hash of an empty text


def asks_nothing(hashes: tuple[str, str, str]) -> bool:
    """Whether a rolling document's text is empty: lm-eval's files hold a response to it, our records no request."""
    return hashes[1] == NOTHING


def aligned(a: Run, b: Run) -> tuple[Run, Run]:
    """Both runs with one item a rolling document if lm-eval ran either; two runs of ours as they are."""
    return (_by_document(a), _by_document(b)) if a.by_lm_eval or b.by_lm_eval else (a, b)


def _by_document(run: Run) -> Run:
    """The run with a rolling document's windows as one item, as lm-eval has it: without the windows' hashes, which say
    nothing of the document, and with their sum over all tokens at once where they are known (a sum of sums would be
    rounded twice)."""
    items: dict[Key, Item] = {}
    for (task, doc), group in groupby(run.items.values(), key=lambda item: (item.task, item.doc_id)):  # in key order
        own = list(group)
        if own[0].kind != ROLLING:
            items.update((item.key, item) for item in own)
        elif not asks_nothing(run.hashes.get(task, {}).get(doc, ("", "", ""))):
            parts = [[w.sum_logprob] if w.logprobs is None else w.logprobs.tolist() for w in own]
            values: list[Any] = [value for part in parts for value in part]
            total = None if None in values else exact_sum(values)
            truncated = sum(window.truncated for window in own)
            items[task, doc, 0, 0] = Item(
                task, doc, 0, 0, ROLLING, sum_logprob=total, text=own[0].text, truncated=truncated
            )
    return replace(run, items=items)
