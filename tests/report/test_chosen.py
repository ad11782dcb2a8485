"""Which choice each metric of a multiple-choice document took, from samples as lm-eval writes them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalengine.report.read.lm_eval import choice_texts, choices_of

TEXTS = ("a", "four", "naïveté", "a longer one")


def row(
    sums: Sequence[float], metrics: dict[str, Any], texts: Sequence[str] = TEXTS, doc: int = 0, **changed: Any
) -> dict[str, Any]:
    """A sample's row; every choice follows the same context, after a space."""
    arguments = {f"gen_args_{i}": {"arg_0": "q", "arg_1": f" {text}"} for i, text in enumerate(texts)}
    pairs = [[str(value), "False"] for value in sums]
    sample = {"doc_id": doc, "filter": "none", "arguments": arguments, "filtered_resps": pairs, "target": "0"}
    return {**sample, "metrics": list(metrics), **metrics, **changed}


def taken(rows: list[dict[str, Any]], delimiter: str | None = None) -> dict[str, dict[int, int]]:
    """Metric -> document -> the choice that was taken."""
    texts = choice_texts(rows, delimiter)
    return {metric: choices for (metric, _), choices in choices_of(rows, texts).items()}


def lm_evals_choice(sums: Sequence[float], free: Sequence[float], metric: str, texts: Sequence[str]) -> int:
    """The gold answer for which lm-eval's own scorer gives 1: the choice that it took."""
    task = pytest.importorskip("lm_eval.api.task").ConfigurableTask
    pairs = [(value, False) for value in (*sums, *free)]
    for gold in range(len(texts)):
        stand_in = SimpleNamespace(
            config=SimpleNamespace(process_results=None),
            OUTPUT_TYPE="multiple_choice",
            _metric_fn_list=dict.fromkeys(("acc", "acc_norm", "acc_bytes", *(["acc_mutual_info"] if free else []))),
            doc_to_choice=lambda doc: list(texts),
            doc_to_target=lambda doc, gold=gold: gold,
            multiple_input=False,
            multiple_target=False,
        )
        if task.process_results(stand_in, {}, pairs)[metric] == 1.0:
            return gold
    raise AssertionError(f"{metric}: no choice is right")


@pytest.mark.parametrize("metric", ["acc", "acc_norm", "acc_bytes", "acc_mutual_info"])
def test_the_choice_is_the_one_that_lm_eval_takes(metric: str) -> None:
    draw = np.random.default_rng(len(metric))
    seen = set()
    for _ in range(50):
        sums, free = (-draw.integers(1, 30, len(TEXTS)).astype(float) for _ in range(2))
        free = free if metric == "acc_mutual_info" else free[:0]
        expected = lm_evals_choice(sums.tolist(), free.tolist(), metric, TEXTS)
        sample = row([*sums, *free], {metric: float(expected == 0)}, [*TEXTS, *TEXTS] if len(free) else TEXTS)
        assert taken([sample]) == {metric: {0: expected}}
        seen.add(expected)
    assert seen == {0, 1, 2, 3}


def test_the_delimiter_is_no_part_of_a_choice() -> None:
    """With the space in the length the first would win (3.0 / 2 beats 9.0 / 5), without it 9.0 / 4 beats 3.0 / 1."""
    sums, metrics = [-3.0, -9.0], {"acc_norm": 0.0}
    assert taken([row(sums, metrics, TEXTS[:2])]) == {"acc_norm": {0: 1}}
    assert choice_texts([row(sums, metrics, TEXTS[:2])], " ") == {0: ("a", "four")}
    assert choice_texts([row(sums, metrics, TEXTS[:2])], "") == {0: (" a", " four")}
    assert choice_texts([row(sums, metrics, ("a", " b")), row(sums, metrics, (" a", " b"), doc=1)], None) == {
        0: ("a", " b"),
        1: (" a", " b"),
    }


def test_a_metric_that_a_score_refutes_is_not_known() -> None:
    """A task scores by a rule of its own if the likeliest choice is 1, the target 0, and yet the score is 1."""
    sums = [-3.0, -1.0]
    assert taken([row(sums, {"acc": 0.0}, TEXTS[:2])]) == {"acc": {0: 1}}
    assert taken([row(sums, {"acc": 1.0}, TEXTS[:2])]) == {}
    assert taken([row(sums, {"acc": 0.0}, TEXTS[:2]), row(sums, {"acc": 1.0}, TEXTS[:2], doc=1)]) == {}
    assert taken([row(sums, {"acc": 0.75}, TEXTS[:2])]) == {}, "truthfulqa_mc2's acc is a share of probability"
    assert taken([row(sums, {"acc": 1.0}, TEXTS[:2], target="[1]")]) == {"acc": {0: 1}}, "nothing says what is right"


def test_choices_that_differ_in_their_context_have_no_length() -> None:
    sample = row([-3.0, -1.0], {"acc": 0.0, "acc_norm": 0.0}, ("it", "it"))
    sample["arguments"]["gen_args_1"]["arg_0"] = "another context"
    sample["target"] = "it"
    assert taken([sample]) == {"acc": {0: 1}}


def test_what_a_corpus_metric_predicted_is_its_choice() -> None:
    sums = [-3.0, -1.0]
    assert taken([row(sums, {"mcc": [0, 1], "f1": [0, "1"]}, TEXTS[:2])]) == {"mcc": {0: 1}, "f1": {0: 1}}
    assert taken([row(sums, {"mcc": [0, 0]}, TEXTS[:2])]) == {}


@pytest.mark.parametrize("sums", [[], [-1.0], [-1.0, -2.0, -3.0]])
def test_responses_that_do_not_fit_the_choices_tell_nothing(sums: list[float]) -> None:
    assert taken([row(sums, {"acc": 1.0}, TEXTS[:2])]) == {}
