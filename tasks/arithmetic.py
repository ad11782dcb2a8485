"""The bundled task: word problems of two to four steps that this project's own generator wrote, for its bundled model.

A row: {"question": "Tom has 3 apples. ...", "answer": "Tom has 3 + 4 = 7 apples.\\n#### 7"}. The scorer compares the
integer behind the first "#### " of the generated text with the row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from evalengine.tasks.documents import Doc
from evalengine.tasks.filters import ExactMatch, RegexFilter
from evalengine.tasks.generation import GenerationTask


class Arithmetic(GenerationTask):
    forks = True
    columns = ("question", "answer")
    spare_exemplar = False
    extract: ClassVar[Mapping[str, RegexFilter]] = {"strict-match": RegexFilter(r"#### (-?[0-9]+)")}
    match = ExactMatch(ignore=(r"(?s)\A.*#### ",))

    def question(self, doc: Doc) -> str:
        return f"Question: {doc['question']}\nAnswer:"

    def target(self, doc: Doc) -> str:
        return str(doc["answer"])
