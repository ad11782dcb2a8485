"""One row of `samples_<task>_<iso>.jsonl`: its numbers, its answer, its requests. lm-eval saves responses as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from evalengine.report.read.run import Item

ROLLING = "loglikelihood_rolling"
_BEYOND = 2**1023  # float() of such an integer may fail


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
    scored = [(pair, _continuation(row, place)) for place, pair in enumerate(pairs) if pair is not None]
    if len(scored) == 1:
        return str(scored[0][0][1])
    if "acc_mutual_info" in row["metrics"]:  # the second half is the choices without their context
        scored = scored[: len(scored) // 2]
    best = int(np.argmax([pair[0] for pair, _ in scored]))
    return f"{best}: {scored[best][1].strip()}"


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
                leaf="",
                prompt_sha256="",
                output_sha256="",
                output_ids=None,
                logprobs=None,
                sum_logprob=value,
                text=response if value is None and isinstance(response, str) else None,
                truncated=0,
            )


def scored_pair(response: Any) -> tuple[float, bool] | None:
    """(log-likelihood, is_greedy), or None if the response is no such pair."""
    if not isinstance(response, list) or len(response) != 2 or str(response[1]) not in ("True", "False"):
        return None
    value = number(response[0])
    return None if value is None else (value, str(response[1]) == "True")


def _continuation(row: Mapping[str, Any], place: int) -> str:
    return str((row.get("arguments") or {}).get(f"gen_args_{place}", {}).get("arg_1", ""))
