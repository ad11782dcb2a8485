"""Grade-school math word problems (Cobbe et al. 2021, arXiv 2110.14168), task version 3.0 of lm-eval 0.4.13.

A row: {"question": "Janet's ducks lay 16 eggs per day. ...", "answer": "She sells <<16-3-4=9>>9 ...\\n#### 18"}.
The scorer reads a number out of the generated text in two ways and compares it with the number behind "####".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from evalengine.tasks.documents import Doc
from evalengine.tasks.filters import ExactMatch, RegexFilter
from evalengine.tasks.generation import GenerationTask

FLEXIBLE = RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", select=-1)


class GSM8K(GenerationTask):
    """Exemplars drawn from the training split, answers with their rationale."""

    forks = True
    columns = ("question", "answer")
    spare_exemplar = False  # lm-eval's task names both splits, and they differ
    extract: ClassVar[Mapping[str, RegexFilter]] = {
        "strict-match": RegexFilter(r"#### (\-?[0-9\.\,]+)"),
        "flexible-extract": FLEXIBLE,
    }
    match = ExactMatch(ignore=(",", r"\$", r"(?s)\A.*#### ", r"\.$"), ignore_case=True)

    def question(self, doc: Doc) -> str:
        return f"Question: {doc['question']}\nAnswer:"

    def target(self, doc: Doc) -> str:
        return str(doc["answer"])


class GSM8KCoT(GSM8K):
    """Chain of thought after fixed exemplars: the user's file of {"question", "target"} rows, taken in file order.

    A target ends with "The answer is 18.", which is what strict extraction looks for.
    """

    fewshot_columns = ("question", "target")
    first_n = True
    extract: ClassVar[Mapping[str, RegexFilter]] = {
        "strict-match": RegexFilter(r"The answer is (\-?[0-9\.\,]+)."),
        "flexible-extract": FLEXIBLE,
    }

    def question(self, doc: Doc) -> str:
        return f"Q: {doc['question']}\nA:"

    def target(self, doc: Doc) -> str:
        return str(doc["answer"]).split("####")[-1].strip()

    def exemplar_answer(self, exemplar: Doc) -> str:
        return str(exemplar["target"])
