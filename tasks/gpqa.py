"""GPQA (Rein et al. 2023, arXiv 2311.12022) without exemplars, task version 2.2 of lm-eval 0.4.13.

A row (made up, since the data set's authors ask not to publish its rows): {"Question": "What is 2 + 2?", "Correct
Answer": "4", "Incorrect Answer 1": "3", "Incorrect Answer 2": "5", "Incorrect Answer 3": "22", ...}. The four answers
are shuffled, and each letter's log-likelihood is compared, or a letter is read out of an answer in words.
"""

from __future__ import annotations

import random
from typing import Any

from evalengine.config.schema import TaskConfig
from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

ANSWERS = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3", "Correct Answer")
SEED = 0  # lm-eval shuffles by Python's global generator, to which it gives this seed


class GPQA(Templated):
    """Rows in file order decide the shuffles: a question's letters depend on those before it, as in lm-eval."""

    forks = True
    columns = ("Question", "Correct Answer")

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        super().__init__(name, config, **arguments)
        self._random = random.Random(SEED)
        self._made: dict[int, Doc] = {}  # id(row) -> its document; a row has the same letters as an exemplar

    def document(self, row: Doc) -> Doc:
        if id(row) not in self._made:
            given = [row.get(column) for column in ANSWERS]
            answers = [" " if x is None else str(x).strip().replace(" [title]", ". ").replace("  ", " ") for x in given]
            right = answers[-1]
            self._random.shuffle(answers)
            letters = {f"choice{number}": answer for number, answer in enumerate(answers, 1)}
            self._made[id(row)] = {**row, **letters, "answer": f"({'ABCD'[answers.index(right)]})"}
        return self._made[id(row)]


class GPQAInWords(GPQA):
    """The same, generated; the filter that reads the letter knows it by the answer's text, too."""

    forks = True

    def document(self, row: Doc) -> Doc:
        doc = dict(super().document(row))
        answer = doc.pop("answer")  # the last of the columns, as in lm-eval
        return {**doc, "choices": [doc[f"choice{number}"] for number in range(1, 5)], "answer": answer}
