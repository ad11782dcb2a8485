"""What a task asks and what it gets back: the requests of a document, and the engine's answers to them, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from evalengine.tasks.programs import ProgramVerdict

OutputType = Literal["generate_until", "loglikelihood", "multiple_choice", "loglikelihood_rolling"]
OUTPUT_TYPES = get_args(OutputType)
MADE_UP = "So it is. The answer is 42."  # an answer for trials of what scores the model's


@dataclass(frozen=True)
class Generation:
    """lm-eval's generation_kwargs, resolved."""

    until: tuple[str, ...]
    max_gen_toks: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Instance:
    """One request of one document, as text. `index` counts the requests of the document from 0."""

    task: str
    doc_id: int
    index: int
    kind: Literal["generate_until", "loglikelihood", "loglikelihood_rolling"]
    context: str  # for a rolling request the whole text
    continuation: str = ""  # for loglikelihood requests only
    generation: Generation | None = None  # for generate_until requests only
    repeat: int = 0


@dataclass(frozen=True)
class Response:
    """What the engine answered to one instance."""

    text: str = ""  # what generate_until made, cut at the stop strings
    loglikelihood: float = 0.0  # set for loglikelihood and rolling requests only
    is_greedy: bool = False  # set for loglikelihood requests only
    verdict: ProgramVerdict | None = None  # the verdict on the program in the text; None where none was run

    def plain(self, kind: str) -> str | float | tuple[float, bool]:
        """The answer to an instance of this kind, in the form that lm-eval's filters and sample files have."""
        if kind == "generate_until":
            return self.text
        return (self.loglikelihood, self.is_greedy) if kind == "loglikelihood" else self.loglikelihood
