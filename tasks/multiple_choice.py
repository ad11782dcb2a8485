"""Tasks that score each of several given answers: HellaSwag and ARC, task version 1.0 of lm-eval 0.4.13.

HellaSwag (Zellers et al. 2019, arXiv 1905.07830), a row: {"activity_label": "Roof shingle removal", "ctx_a": "A man is
sitting on a roof.", "ctx_b": "he", "endings": ["is using wrap ...", ...], "label": "3", ...}.
ARC (Clark et al. 2018, arXiv 1803.05457), a row: {"question": "Which ...?", "choices": {"text": ["Sunlight ...", ...],
"label": ["A", ...]}, "answerKey": "A", ...}.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from evalengine.tasks.base import Task
from evalengine.tasks.documents import Doc
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.metric import Metric, MetricValue


def checked_gold(gold: int, choices: list[str]) -> int:
    """`gold`. Raises ValueError if it is the index of none of the choices, or if a choice is no text."""
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise ValueError(f"choice {number} is {json.dumps(choice)[:80]}, which is no text")
    if not 0 <= gold < len(choices):
        raise ValueError(f"gold answer {gold} is not one of {len(choices)} choices")
    return gold


def whole_number(label: Any) -> int:
    """A label like "3" or 3. Raises ValueError for any other: `int` would cut 3.7."""
    if isinstance(label, int) or (isinstance(label, str) and re.fullmatch(r"-?[0-9]{1,9}", label)):
        return int(label)
    raise ValueError(f"its label {json.dumps(label)[:80]} is no whole number")


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
        return checked_gold(self.gold(doc), self.choices(doc))

    def exemplar_answer(self, exemplar: Doc) -> str:
        return self.choices(exemplar)[self.target(exemplar)]

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        (prompt,) = prompts
        return [
            Instance(self.name, doc_id, i, "loglikelihood", prompt, self.choice_delimiter + choice)
            for i, choice in enumerate(self.choices(doc))
        ]

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[tuple[float, bool]]]:
        return {"none": [(response.loglikelihood, response.is_greedy) for response in responses]}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        logprobs = np.array([loglikelihood for loglikelihood, _ in answers], dtype=np.float64)
        lengths = np.array([float(len(choice)) for choice in self.choices(doc)])
        with np.errstate(divide="ignore", invalid="ignore"):  # an empty choice becomes -inf, which is never the highest
            normed = logprobs / lengths
        gold = self.target(doc)
        return {"acc": float(np.argmax(logprobs) == gold), "acc_norm": float(np.argmax(normed) == gold)}


class ContextChoiceTask(Task):
    """One text, scored after each of several contexts: the choices are the contexts (WinoGrande).

    acc: the context under which the text has its highest log-likelihood is gold. Ties go to the lower index.
    """

    output_type = "multiple_choice"
    metrics: ClassVar[dict[str, Metric]] = {"acc": Metric()}

    @abstractmethod
    def contexts(self, doc: Doc) -> list[str]:
        """The contexts to compare, at least one."""

    @abstractmethod
    def gold(self, doc: Doc) -> int:
        """The index of the right context."""

    @abstractmethod
    def target(self, doc: Doc) -> str:
        """The text that follows each context (lm-eval's doc_to_target)."""

    def question(self, doc: Doc) -> str:
        """The right context, which an exemplar shows."""
        contexts = self.contexts(doc)
        return contexts[checked_gold(self.gold(doc), contexts)]

    def questions(self, doc: Doc) -> list[str]:
        checked_gold(self.gold(doc), self.contexts(doc))
        return self.contexts(doc)

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        continuation = self.choice_delimiter + self.target(doc)
        return [
            Instance(self.name, doc_id, i, "loglikelihood", prompt, continuation) for i, prompt in enumerate(prompts)
        ]

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[tuple[float, bool]]]:
        return {"none": [(response.loglikelihood, response.is_greedy) for response in responses]}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        best = int(np.argmax(np.array([loglikelihood for loglikelihood, _ in answers], dtype=np.float64)))
        return {"acc": float(best == self.gold(doc))}


class HellaSwag(MultipleChoiceTask):
    """Which of four endings continues the text. The validation split is scored: the test split has no labels."""

    forks = True
    columns = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"ctx_a": (str,), "ctx_b": (str,), "endings": (list,)}
    spare_exemplar = True

    def document(self, row: Doc) -> Doc:
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
        return {
            **row,
            "query": clean_wikihow(f"{row['activity_label']}: {context}"),
            "choices": [clean_wikihow(_text(ending, number)) for number, ending in enumerate(row["endings"])],
            "gold": whole_number(row["label"]),
        }

    def question(self, doc: Doc) -> str:
        return str(doc["query"])

    def choices(self, doc: Doc) -> list[str]:
        return list(doc["choices"])

    def gold(self, doc: Doc) -> int:
        return int(doc["gold"])


def _text(ending: Any, number: int) -> str:
    if not isinstance(ending, str):
        raise ValueError(f"ending {number} is {json.dumps(ending)[:80]}, which is no text")
    return ending


def clean_wikihow(text: str) -> str:
    """Drops the WikiHow markup: "[title]" becomes a full stop, other [tags] are cut, double spaces are halved once."""
    text = text.strip().replace(" [title]", ". ")
    return "\n".join(map(_without_tags, text.split("\n"))).replace("  ", " ")


def _without_tags(line: str) -> str:
    r"""lm-eval's re.sub(r"\[.*?\]", "", line), in linear time where brackets stay open."""
    parts, end = [], 0
    while (start := line.find("[", end)) >= 0 and (stop := line.find("]", start + 1)) >= 0:
        parts.append(line[end:start])
        end = stop + 1
    return "".join([*parts, line[end:]])


class ARC(MultipleChoiceTask):
    """Grade-school science questions. Labels are A, B, ... or 1, 2, ...; the gold one is looked up among them."""

    forks = True
    columns = ("question", "choices", "answerKey")
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"choices": (dict,)}
    spare_exemplar = False  # lm-eval's test split and few-shot split have different names

    def question(self, doc: Doc) -> str:
        return f"Question: {doc['question']}\nAnswer:"

    def choices(self, doc: Doc) -> list[str]:
        texts = doc["choices"]["text"]
        if not isinstance(texts, list) or not texts:
            raise ValueError(f"its choices' text is {json.dumps(texts)[:80]}, not a list of texts")
        return texts

    def gold(self, doc: Doc) -> int:
        labels, key = doc["choices"]["label"], doc["answerKey"]
        if not isinstance(labels, list) or key not in labels:
            raise ValueError(f"the answer {key!r} is not one of the labels {json.dumps(labels)[:80]}")
        if len(labels) != len(self.choices(doc)):
            raise ValueError(f"it has {len(labels)} labels for {len(self.choices(doc))} choices")
        return labels.index(key)
