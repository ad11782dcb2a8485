"""Tasks whose answer is a program, run with the document's tests: HumanEval and MBPP, in lm-eval 0.4.13's form.

    HumanEval: {"prompt": "def add(a, b):\\n", "test": "def check(f):\\n  assert f(1, 2) == 3", "entry_point": "add"}
    MBPP: {"text": "Write a function to add.", "code": "def add(...", "test_list": ["assert add(1, 2) == 3", ...], ...}

The program is the code, a line end, and the target, which holds the tests. A task never runs it: the harness does
(`evalengine.integrations.sandbox`), if `allow_code_execution` lets it, and gives the verdicts with the responses.
"""

from __future__ import annotations

import platform
import re
from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar

from evalengine.config.schema import TaskConfig
from evalengine.tasks.generation import Repeated, repeats_of
from evalengine.tasks.instance import ProgramLimits, Response
from evalengine.tasks.metric import Metric, MetricKey, MetricValue, pass_at_k
from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

FENCE = "```"
LANGUAGE = re.compile(r"\w+")


class CodeTask(Templated):
    """pass@k: the chance that one of k programs passes its tests, estimated without bias from all samples of a document
    (`metric.pass_at_k`), as `code_eval` of Hugging Face's `evaluate` does for lm-eval."""

    metrics: ClassVar[dict[str, Metric]] = {"pass@1": Metric()}
    filter: ClassVar[str]  # lm-eval's name for the filter that reads the code out of an answer
    runs_programs = True
    always: ClassVar[tuple[str, ...]] = ()  # metrics that mean pass@1, however many samples there are

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        """Raises ConfigError."""
        super().__init__(name, config, **arguments)
        self._passes = self._reported(config)
        vars(self)["metrics"] = dict.fromkeys(self._passes, Metric())

    @classmethod
    def _reported(cls, config: TaskConfig) -> dict[str, int]:
        """Metric -> its k."""
        repeated = Repeated.of(config)
        passes = (1,) if repeated is None else repeated.passes
        names = {f"pass@{k}": k for k in passes if repeated is not None or not cls.always}
        return {**dict.fromkeys(cls.always, 1), **names}

    @classmethod
    def metrics_of(cls, config: TaskConfig) -> dict[str, Metric]:
        return dict.fromkeys(cls._reported(config), Metric())

    def problems(self) -> list[str]:
        problems = super().problems()
        for key in ("filter_list", "metric_list"):
            if getattr(self.config.template, key) is not None:
                problems.append(f"template.{key}: this task runs its answers, and has its own")
        if self.output_type != "generate_until":
            problems.append(f"template.output_type={self.output_type}: programs are generated (generate_until)")
        return problems

    @abstractmethod
    def code(self, doc: Doc, text: str) -> str:
        """The code in a generated text."""

    def program(self, doc: Doc, text: str) -> str:
        """The program that is run for a generated text."""
        return f"{self.code(doc, text)}\n{self.target(doc)}"

    @property
    def limits(self) -> ProgramLimits:
        """The time and memory that a program may use."""
        return ProgramLimits.of_seconds(self.config.code_timeout)

    def definition(self) -> dict[str, Any]:
        """Python's version and the limits. Verdicts depend on both: another Python may refuse a program, and other
        limits may end it."""
        version = ".".join(platform.python_version_tuple()[:2])
        return {"python": f"{platform.python_implementation()} {version}", "limits": asdict(self.limits)}

    @classmethod
    def filter_names(cls, config: TaskConfig) -> tuple[str, ...]:
        return (cls.filter,)

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Any]]:
        return {self.filter: [[self.code(doc, response.text) for response in responses]]}

    def process_results(self, doc: Doc, responses: list[Response]) -> dict[MetricKey, MetricValue]:
        """Scores the verdicts. A response without a verdict counts as wrong; only a rehearsal has such responses."""
        count = repeats_of(self.config)
        right = sum(response.verdict is not None and response.verdict.passed for response in responses)
        return {(name, self.filter): pass_at_k(count, right, k) for name, k in self._passes.items()}


class HumanEval(CodeTask):
    """A function's head and docstring, which the answer goes on with (Chen et al. 2021, arXiv 2107.03374)."""

    columns = ("prompt", "test", "entry_point")
    filter = "create_test"

    def code(self, doc: Doc, text: str) -> str:
        return f"{doc['prompt']}{text}"


class HumanEvalInstruct(HumanEval):
    """The prompt starts the answer with the function's head, in a block of code that it ends itself."""

    def code(self, doc: Doc, text: str) -> str:
        return super().code(doc, text.partition(FENCE)[0])


class MBPP(CodeTask):
    """A task in a sentence, and its tests (Austin et al. 2021, arXiv 2108.07732). The answer is the code."""

    columns = ("test_list",)
    shapes: ClassVar[dict[str, tuple[type, ...]]] = {"test_list": (list,)}
    metrics: ClassVar[dict[str, Metric]] = {"pass_at_1": Metric()}
    filter = "none"
    always = ("pass_at_1",)

    def code(self, doc: Doc, text: str) -> str:
        return text

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Any]]:
        """The first answer, as lm-eval takes it where no filter is named; all answers are run all the same."""
        return {self.filter: [responses[0].text]}


def first_block(text: str) -> str | None:
    """The first whole block of code in Markdown; None without one.

    lm-eval takes the word behind the fence for the block's language, also where it is the code's own first word: an
    answer that follows the fence in the same line loses that word.
    """
    _, opened, rest = text.partition(FENCE)
    block, ended, _ = rest.partition(FENCE)
    if not opened or not ended:
        return None
    if (word := LANGUAGE.match(block)) is not None:
        block = block[word.end() :]
    return block.removeprefix("\n").removesuffix("\n")


class MBPPInstruct(MBPP):
    """The prompt starts the answer with a block of code; its text up to the block's end is the code, or that of the
    first whole block if it does not end."""

    filter = "extract_code"

    def code(self, doc: Doc, text: str) -> str:
        block = first_block(f"{FENCE}{text}")
        return (first_block(text.replace(f"{FENCE}python", FENCE)) if block is None else block) or ""

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Any]]:
        return CodeTask.filtered(self, doc, responses)
