"""MATH with Minerva's prompts (Hendrycks et al. 2021, arXiv 2103.03874; Lewkowycz et al. 2022, arXiv 2206.14858), task
version 3.1 of lm-eval 0.4.13.

A row: {"problem": "What is $2 + 2$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{4}$."}.

exact_match: what follows "Final Answer: The final answer is" is, after Minerva's clean-up, the text of the gold answer,
or sympy finds their difference to be 0. math_verify: the library of that name finds the whole answer to say what the
solution says. Both are lm-eval's own code, as are the four exemplars: called and read, not copied.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from evalengine.config.schema import TaskConfig
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.tasks.lm_eval_scorer import ScoredByLmEval
from evalengine.tasks.lm_eval_yaml import installed_file
from evalengine.tasks.metric import Metric, MetricValue
from evalengine.tasks.rows import Doc, Rows
from evalengine.util.line_worker import LineWorker

SCORER = "minerva_math/utils.py"
WORKER = Path(__file__).with_name("math_worker.py")
WRONG = {"exact_match": 0.0, "math_verify": 0.0}
logger = logging.getLogger(__name__)


class Minerva(ScoredByLmEval):
    """A problem, and a solution that ends with its answer."""

    columns = ("problem", "solution")
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"problem": (str,), "solution": (str,)}
    extra = "math"
    packages = ("math_verify", "sympy", "latex2sympy2_extended")
    scorer = (SCORER,)
    metrics: ClassVar[dict[str, Metric]] = {"exact_match": Metric(), "math_verify": Metric()}

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        super().__init__(name, config, **arguments)
        self._judge = MathScorer()

    def problems(self) -> list[str]:
        # lm-eval's own exemplars serve, so missing ones are no problem.
        return [problem for problem in super().problems() if not problem.startswith("num_fewshot=")]

    def document(self, row: Doc) -> Doc:
        if "few_shot" in row:  # the row is an exemplar, whose solution is shown as it is
            return row
        if (answer := self._judge.ask({"solution": row["solution"]})["answer"]) is None:
            raise ValueError("its solution has no \\boxed{} answer")
        return {**row, "answer": answer}

    def _load_exemplars(self) -> Rows:
        if self.config.fewshot_file is not None or self.config.fewshot_split is not None:
            rows = super()._load_exemplars()
            return replace(rows, rows=[{**row, "few_shot": "1"} for row in rows.rows])
        return Rows(self._judge.ask({})["samples"], f"lm-eval:{SCORER}")

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        return {**self._judge.scores(doc, answers[0])}


class MathScorer:
    """lm-eval's scorer, in a process that starts with the first question; a process that ends is replaced."""

    def __init__(self) -> None:
        self._worker: LineWorker | None = None

    def scores(self, doc: Doc, answer: str) -> dict[str, float]:
        """The two scores of an answer; 0 for one that cannot be compared within the worker's limits."""
        try:
            reply = self.ask({"doc": {key: doc[key] for key in ("solution", "answer")}, "answer": answer})
        except WorkerDied as error:
            logger.warning("%s: counted as wrong", error)
            return WRONG
        if reply.pop("timed_out"):
            logger.warning(
                "comparing with %r was ended after five seconds, and what was not found equal by then counted as "
                "different; a machine of another speed may get further",
                doc["answer"],
            )
        return {name: float(value) for name, value in reply.items()}

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's reply. Raises ConfigError if lm-eval's code refuses the question, WorkerDied if it ended."""
        if self._worker is None:
            code = f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_path({str(WORKER)!r}, {{}}, '__main__')"
            hashing = {"PYTHONHASHSEED": "0"}  # sympy iterates over sets, whose order depends on the hashes
            self._worker = LineWorker(["-c", code, str(installed_file(SCORER))], {**os.environ, **hashing})
            self._understood(self._worker.read())  # its first line says that it is ready
        return self._understood(self._worker.ask(question))

    def _understood(self, reply: dict[str, Any] | None) -> dict[str, Any]:
        if reply is None:
            assert self._worker is not None
            code, self._worker = self._worker.exit_code(), None
            raise WorkerDied(f"comparing an answer ended the process that compares (exit code {code})")
        if "error" in reply:
            raise ConfigError(f"lm-eval's {SCORER} cannot be used: {reply['error']}")
        return reply


class WorkerDied(EvalEngineError):
    """An answer took more memory or time than the worker may have."""
