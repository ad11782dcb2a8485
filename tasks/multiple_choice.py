"""Tasks that score each of several given answers: HellaSwag and ARC, task version 1.0 of lm-eval 0.4.12.

HellaSwag (Zellers et al. 2019, arXiv 1905.07830), a row: {"activity_label": "Roof shingle removal", "ctx_a": "A man is
sitting on a roof.", "ctx_b": "he", "endings": ["is using wrap ...", ...], "label": "3", ...}.
ARC (Clark et al. 2018, arXiv 1803.05457), a row: {"question": "Which ...?", "choices": {"text": ["Sunlight ...", ...],
"label": ["A", ...]}, "answerKey": "A", ...}.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from evalengine.tasks.base import Doc, Instance, Metric, MetricValue, Response, Task


class MultipleChoiceTask(Task):
    """One log-likelihood request for each choice, all with the same context.

    acc: the choice of highest log-likelihood is gold. acc_norm: the same after division by the choice's length in
    characters, delimiter not counted. Ties go to the lower index.
    """

    output_type = "multiple_choice"
    metrics: ClassVar[dict[str, Metric]] = {"acc": Metric(), "acc_norm": Metric()}

    @abstractmethod
    def choices(self, doc: Doc) -> list[str]:
        """The answers to score, at least one."""

    @abstractmethod
    def gold(self, doc: Doc) -> int:
        """The index of the right answer."""

    def target(self, doc: Doc) -> int:
        gold, count = self.gold(doc), len(self.choices(doc))
        if not 0 <= gold < count:
            raise ValueError(f"gold answer {gold} is not one of {count} choices")
        return gold

    def exemplar_answer(self, exemplar: Doc) -> str:
        return self.choices(exemplar)[self.target(exemplar)]

    def requests(self, doc_id: int, doc: Doc, prompt: str) -> list[Instance]:
        delimiter = self.target_delimiter if self._chat is None else ""  # a template ends with its own white space
        return [
            Instance(self.name, doc_id, i, "loglikelihood", prompt, delimiter + choice)
            for i, choice in enumerate(self.choices(doc))
        ]

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[tuple[float, bool]]]:
        return {"none": [(response.loglikelihood, response.is_greedy) for response in responses]}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        logprobs = np.array([loglikelihood for loglikelihood, _ in answers], dtype=np.float64)
        lengths = np.array([float(len(choice)) for choice in self.choices(doc)])
        with np.errstate(divide="ignore", invalid="ignore"):  # an empty choice becomes -inf: never preferred
            normed = logprobs / lengths
        gold = self.target(doc)
        return {"acc": float(np.argmax(logprobs) == gold), "acc_norm": float(np.argmax(normed) == gold)}


class HellaSwag(MultipleChoiceTask):
    """Which of four endings continues the text. The validation split is scored: the test split has no labels."""

    columns = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    spare_exemplar = True

    def document(self, row: Doc) -> Doc:
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
        return {
            **row,
            "query": clean_wikihow(f"{row['activity_label']}: {context}"),
            "choices": [clean_wikihow(ending) for ending in row["endings"]],
            "gold": int(row["label"]),
        }

    def question(self, doc: Doc) -> str:
        return str(doc["query"])

    def choices(self, doc: Doc) -> list[str]:
        return list(doc["choices"])

    def gold(self, doc: Doc) -> int:
        return int(doc["gold"])


def clean_wikihow(text: str) -> str:
    """Drops the WikiHow markup: "[title]" becomes a full stop, other [tags] go, double spaces are halved once."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


class ARC(MultipleChoiceTask):
    """Grade-school science questions. Labels are A, B, ... or 1, 2, ...; the gold one is looked up among them."""

    columns = ("question", "choices", "answerKey")

    def question(self, doc: Doc) -> str:
        return f"Question: {doc['question']}\nAnswer:"

    def choices(self, doc: Doc) -> list[str]:
        return list(doc["choices"]["text"])

    def gold(self, doc: Doc) -> int:
        return int(doc["choices"]["label"].index(doc["answerKey"]))
