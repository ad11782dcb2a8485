"""IFEval (Zhou et al. 2023, arXiv 2311.07911), task version 4.0 of lm-eval 0.4.13: does an answer follow instructions?

A row: {"key": 7, "prompt": "Name three birds. Use no comma.", "instruction_id_list": ["punctuation:no_comma"],
"kwargs": [{}]}. Each instruction has its own check, a program of the data set's authors, of which lm-eval has a
mended copy; that one is called.

strict: the answer as it is; loose: also without its first or last line, or its asterisks. prompt_level: every
instruction is followed; inst_level: the share of all instructions of all prompts, which has no standard error.

Two of the 541 prompts (keys 1122 and 1129) ask for how often "#" and "!" occur; the check takes letters only and draws
one instead. In lm-eval the letter depends on the prompts before; here each prompt draws anew from lm-eval's seed, so
that its score depends on nothing but its answer. The scores of these two prompts may therefore differ from lm-eval's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from evalengine.tasks.lm_eval_quiet import RandomNumbers, quiet
from evalengine.tasks.lm_eval_scorer import ScoredByLmEval
from evalengine.tasks.metric import Aggregation, Metric, MetricValue
from evalengine.tasks.rows import Doc

SENTENCES = "tokenizers/punkt_tab"  # NLTK's data, which the checks that count sentences need
PROMPT_LEVEL = ("prompt_level_strict_acc", "prompt_level_loose_acc")
LANGUAGE_SEED = 0  # langdetect draws random numbers; unseeded it may name another language in every run


def _mean_of_all(values: list[list[bool]]) -> float:
    flat = [value for inner in values for value in inner]
    return sum(flat) / len(flat)


FLAT = Aggregation(_mean_of_all, lambda values, iterations: None)


class IFEval(ScoredByLmEval):
    """A prompt and the instructions in it."""

    columns = ("key", "prompt", "instruction_id_list", "kwargs")
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"instruction_id_list": (list,), "kwargs": (list,)}
    extra = "ifeval"
    packages = ("langdetect", "immutabledict", "nltk")
    scorer = tuple(f"ifeval/{n}.py" for n in ("utils", "instructions", "instructions_registry", "instructions_util"))
    metrics: ClassVar[dict[str, Metric]] = {
        "prompt_level_strict_acc": Metric(),
        "inst_level_strict_acc": Metric(FLAT),
        "prompt_level_loose_acc": Metric(),
        "inst_level_loose_acc": Metric(FLAT),
    }

    def _scorer_problems(self) -> Iterator[str]:
        yield from list(super()._scorer_problems()) or _data_problems()

    def document(self, row: Doc) -> Doc:
        ids, arguments = row["instruction_id_list"], row["kwargs"]
        if not ids or len(ids) != len(arguments):
            raise ValueError(f"it has {len(ids)} instructions and arguments for {len(arguments)}")
        checkers = self._checks.instructions_registry.INSTRUCTION_DICT
        if unknown := [str(name)[:60] for name in ids if not isinstance(name, str) or name not in checkers]:
            raise ValueError(f"its instruction {unknown[0]!r} is none that lm-eval checks")
        try:  # scoring a sample answer here finds bad arguments while the row's place is known
            self._scores_of(row, "So it is.")
        except Exception as error:  # a check may raise anything over its arguments, which may be regular expressions
            raise ValueError(f"its instructions cannot be checked: {type(error).__name__}: {error}") from error
        return row

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        scores = self._scores_of(doc, answers[0])
        return {name: float(value) if name in PROMPT_LEVEL else value for name, value in scores.items()}

    def _scores_of(self, doc: Doc, answer: str) -> dict[str, Any]:
        with quiet(), RandomNumbers().used():  # a check whose instruction has no argument draws one
            scores: dict[str, Any] = self._checks.process_results(doc, [answer])
        return scores

    @cached_property
    def _checks(self) -> Any:
        """lm-eval's module of the task. Importing it imports all of lm-eval, which takes seconds."""
        import langdetect

        langdetect.DetectorFactory.seed = LANGUAGE_SEED
        with quiet():
            return import_module("lm_eval.tasks.ifeval.utils")


def _data_problems() -> Iterator[str]:
    import nltk

    try:
        nltk.data.find(SENTENCES)
    except LookupError:
        yield (
            "cls: counting sentences needs NLTK's punkt_tab, which is not on this machine: python -m nltk.downloader "
            "punkt_tab (or set NLTK_DATA to the folder that holds it)"
        )
