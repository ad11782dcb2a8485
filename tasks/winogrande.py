"""WinoGrande (Sakaguchi et al. 2019, arXiv 1907.10641), task version 1.0 of lm-eval 0.4.13.

A row: {"sentence": "The trophy did not fit in the suitcase because the _ was too big.", "option1": "trophy",
"option2": "suitcase", "answer": "1"}. Each option fills the blank; the text behind the blank is scored after both
(partial evaluation, Trinh and Le 2018, arXiv 1806.02847).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from evalengine.tasks.documents import Doc
from evalengine.tasks.multiple_choice import ContextChoiceTask

BLANK = "_"


class WinoGrande(ContextChoiceTask):
    """Which of two words fills the blank. The validation split is scored: the test split has no answers."""

    forks = True
    columns = ("sentence", "option1", "option2", "answer")
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"sentence": (str,), "option1": (str,), "option2": (str,)}
    spare_exemplar = True  # lm-eval names neither a test nor a few-shot split

    def contexts(self, doc: Doc) -> list[str]:
        before = doc["sentence"][: self._blank(doc)]
        return [before + doc["option1"], before + doc["option2"]]

    def gold(self, doc: Doc) -> int:
        if doc["answer"] not in ("1", "2"):
            raise ValueError(f'its answer {doc["answer"]!r} is neither "1" nor "2"')
        return int(doc["answer"]) - 1

    def target(self, doc: Doc) -> str:
        return str(doc["sentence"][self._blank(doc) + 1 :].strip())

    def _blank(self, doc: Doc) -> int:
        blank = doc["sentence"].find(BLANK)
        if blank < 0:
            raise ValueError(f"its sentence has no blank ({BLANK})")
        return int(blank)
