"""The requests of a document, the engine's answers to them as text, and the
verdicts on the programs in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

OutputType = Literal["generate_until", "loglikelihood", "multiple_choice", "loglikelihood_rolling"]
OUTPUT_TYPES = get_args(OutputType)
MADE_UP = "So it is. The answer is 42."  # an answer for trials of what scores the model's
CPU_SECONDS = 3  # code_eval's timeout is 3 s too, but of elapsed time
WALL = 10  # elapsed over processor time: a busy machine must not decide, sleepers must end
OUTCOMES = ("passed", "failed", "timeout", "memory", "refused")
MAX_PROGRAM = 1 << 20  # bytes of a program's text


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

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.task, self.doc_id, self.index, self.repeat


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program. Memory, processor time and open files are limited per process; the
    other limits hold for all of the program's processes together."""

    cpu_seconds: int = CPU_SECONDS
    wall_seconds: int = WALL * CPU_SECONDS
    memory_bytes: int = 2 << 30  # the most address space
    processes: int = 32  # processes and threads together
    file_bytes: int = 16 << 20  # the largest size of one file
    open_files: int = 64
    files_bytes: int = 64 << 20  # size of all files together, which are in memory; only under isolation
    files: int = 4096  # number of files; only under isolation

    @classmethod
    def of_seconds(cls, seconds: int | None) -> ProgramLimits:
        """The limits with `seconds` of processor time; None: the usual time."""
        return cls() if seconds is None else cls(cpu_seconds=seconds, wall_seconds=WALL * seconds)


@dataclass(frozen=True)
class ProgramVerdict:
    """How a program ended. `timeout` is no `failed`: on a faster machine it might have passed."""

    outcome: str  # one of OUTCOMES; refused: the program was not run
    detail: str = ""  # one short line: the exception, or which limit

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail}" if self.detail else self.outcome


@dataclass(frozen=True)
class Response:
    """The engine's answer to one instance."""

    text: str = ""  # what generate_until made, cut at the stop strings
    loglikelihood: float = 0.0  # set for loglikelihood and rolling requests only
    is_greedy: bool = False  # set for loglikelihood requests only
    verdict: ProgramVerdict | None = None  # the verdict on the program in the text; None where none was run

    def plain(self, kind: str) -> str | float | tuple[float, bool]:
        """The answer to an instance of this kind, in the form that lm-eval's filters and sample files have."""
        if kind == "generate_until":
            return self.text
        return (self.loglikelihood, self.is_greedy) if kind == "loglikelihood" else self.loglikelihood
