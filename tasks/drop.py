"""DROP (Dua et al. 2019, arXiv 1903.00161), task version 3.0 of lm-eval 0.4.13: numbers, dates and spans out of a text.

A row: {"query_id": "a1", "passage": "Ann ran 3 miles and Bob ran 5.", "question": "How many more did Bob run?",
"answer": {"number": "2", "date": {"day": "", "month": "", "year": ""}, "spans": []}, "validated_answers":
{"number": ["2"], "date": [{"day": "", "month": "", "year": ""}], "spans": [[]]}}.

em: the answer is one of the gold ones, as a bag of normalised spans. f1: the overlap of their words, each gold span
paired with the predicted one that suits it best; of several gold answers the best one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from evalengine.tasks.filters import WITHOUT_PUNCTUATION
from evalengine.tasks.metric import Metric, MetricValue
from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
DATE = ("day", "month", "year")


class DROP(Templated):
    """The answer is generated up to the first full stop."""

    forks = True
    columns = ("query_id", "passage", "question", "answer", "validated_answers")
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"answer": (dict,), "validated_answers": (dict,)}
    metrics: ClassVar[dict[str, Metric]] = {"em": Metric(), "f1": Metric()}

    def document(self, row: Doc) -> Doc:
        texts = {key: row[key] for key in ("passage", "question")}
        return {**row, "id": row["query_id"], **texts, "answers": [list(spans) for spans in gold_answers(row)]}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        spans, words = _bags(answers)
        best = {"em": 0.0, "f1": 0.0}
        for gold in doc["answers"]:
            if gold[0].strip():
                gold_spans, gold_words = _bags(gold)
                same = {*spans} == {*gold_spans} and len(spans) == len(gold_spans)
                best["em"] = max(best["em"], float(same))
                best["f1"] = max(best["f1"], aligned_f1(words, gold_words))
        return {**best}


def gold_answers(row: Doc) -> list[tuple[str, ...]]:
    """The right answers, each as its spans, without repetitions. Raises ValueError for a span that is no text."""
    validated = row["validated_answers"]
    others = zip(*(validated[key] for key in ("number", "date", "spans")), strict=True)
    candidates = [row["answer"], *({"number": n, "date": date, "spans": spans} for n, date, spans in others)]
    return [*dict.fromkeys(map(_spans, candidates))]


def _spans(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """An answer's spans: its number if it has one, else its spans, else its date."""
    if answer["number"] != "":
        return (str(answer["number"]),)
    spans = tuple(answer["spans"]) or (" ".join(answer["date"][part] for part in DATE).strip(),)
    if wrong := [span for span in spans if not isinstance(span, str)]:
        raise ValueError(f"its answer holds {str(wrong[0])[:60]!r}, which is no text")
    return spans


def normalised(span: str) -> str:
    """The span in lower case, without articles and punctuation; numbers as Python writes floats."""
    return " ".join(filter(None, map(_word, re.split("[ -]", span))))


def _word(token: str) -> str:
    token = token.lower()
    number = _number(token)
    if number is None:  # a number keeps its point and sign
        token = token.translate(WITHOUT_PUNCTUATION)
        number = _number(token)
    return " ".join(ARTICLES.sub(" ", token if number is None else str(number)).split())


def _number(token: str) -> float | None:
    try:
        return float(token)
    except ValueError:
        return None


def _bags(spans: Sequence[str]) -> tuple[list[str], list[set[str]]]:
    """The normalised spans, and the words of each."""
    texts = [normalised(span) for span in spans]
    return texts, [{*text.split()} for text in texts]


def aligned_f1(predicted: Sequence[set[str]], gold: Sequence[set[str]]) -> float:
    """The mean F1 under the assignment of spans that makes it largest, a span without a partner counting 0; rounded to
    two places, as the data set's own scorer does."""
    from scipy.optimize import linear_sum_assignment

    scores = np.array([[_f1(guess, right) for guess in predicted] for right in gold])
    rows, columns = linear_sum_assignment(-scores)
    best = np.zeros(max(len(gold), len(predicted)))
    best[rows] = scores[rows, columns]
    return float(round(np.mean(best), 2))


def _f1(predicted: set[str], gold: set[str]) -> float:
    """F1 of two bags of words; 0 where the gold span has numbers and none of them was predicted."""
    numbers = {*_numbers(gold)}
    common = len(gold & predicted)
    if (numbers and not numbers & {*_numbers(predicted)}) or not (common or not gold or not predicted):
        return 0.0
    precision = common / len(predicted) if predicted else 1.0
    recall = common / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _numbers(words: set[str]) -> Iterator[str]:
    return (word for word in words if _number(word) is not None)
