"""MuSR (Sprague et al. 2023, arXiv 2310.16049) with the Open LLM Leaderboard's prompts, task version 1.0 of lm-eval
0.4.13.

A row: {"narrative": "Ann left the key in the hall. ...", "question": "Where does Bob look for it?", "choices":
"['hall', 'shed']", "answer_index": 0, "answer_choice": "hall"}. The choices are a list written as a text.
"""

from __future__ import annotations

from typing import Any

from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated


class MuSR(Templated):
    """A long story, a question and its numbered choices; each choice's text is scored."""

    forks = True
    columns = ("narrative", "question", "choices", "answer_choice")

    def text(self, doc: Doc, exemplar: bool = False) -> Any:
        choices = "".join(f"{number} - {choice}\n" for number, choice in enumerate(self.choices(doc) or [], 1))
        return f"{doc['narrative']}\n\n{doc['question']}\n\n{choices}\nAnswer:"
