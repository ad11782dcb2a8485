"""A judge's questions and its verdicts: the task of the run that scores another task's answers by a model.

    scale: [1, 2, 3, 4, 5]                     the verdict is the likeliest of five labels after the judge's prompt
    scale: [1, 2, 3], extract: "Grade: (\\\\d)"  it is read out of a text that the judge writes, at its last match
    scale: pairs                               the answer is A and another one B; judged again with the two exchanged

A row is a document with its answers ({doc, target, responses, reference, label, labelled}), which the harness writes
once they are there. Nothing else enters a prompt: a verdict is a function of the judge, the template and the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from evalengine.config.schema import JudgeConfig, TaskConfig
from evalengine.errors import ConfigError
from evalengine.plain_text import printable
from evalengine.tasks.base import Task
from evalengine.tasks.filters import INVALID, RegexFilter, pattern_problems
from evalengine.tasks.generation import generation_settings
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.metric import Metric, MetricKey, MetricValue
from evalengine.tasks.rows import Doc, Shapes
from evalengine.tasks.templates import Field
from evalengine.util import limits

CLS = "judge:JudgeTask"
FILTER = "judge"  # under which its scores stand among the judged task's
METRICS = {"score": Metric(), "win_rate": Metric(), "flipped": Metric("mean", False), "unread": Metric("mean", False)}
ALIKE = ("doc", "target")  # names in every template, in addition to the row's columns
SINGLE, PAIRED = ("response",), ("response_a", "response_b")
TIE = "tie"
EMPTY = "[empty]"  # the verdict on an answer without a text
OUTCOMES = {"second": 0.0, TIE: 0.5, "first": 1.0}
WORDS = {"yes_no": {"no": 0, "yes": 1}, "pairs": {"A": "first", "B": "second", TIE: TIE}}


@dataclass(frozen=True)
class Scale:
    """The possible verdicts: the labels with their values, in the order in which they are tried."""

    values: Mapping[str, float]  # of a pair: 1 where the text that stands first is better, 0.5 for a tie
    pairs: bool = False

    @property
    def categories(self) -> list[str]:
        """The labels that a verdict can have, the worst first; a pair whose two verdicts part is a tie."""
        tie = {TIE: 0.5} if self.pairs and 0.5 not in self.values.values() else {}
        return sorted([*self.values, *tie], key={**self.values, **tie}.__getitem__)

    @property
    def ordered(self) -> bool:
        """Whether some verdicts are nearer to each other than others."""
        return not self.pairs and len({*self.values.values()}) > 2

    def label(self, value: float) -> str:
        """A pair's label of this value."""
        return next((label for label, own in self.values.items() if own == value), TIE)


def read_scale(written: Any) -> Scale:
    """The scale of a setting. Raises ValueError with a line for each thing that is wrong."""
    given = WORDS.get(written, written) if isinstance(written, str) else written
    if not isinstance(given, list | dict):
        raise ValueError(f"scale: {str(written)[:60]!r} is no list of labels, no {{label: value}}, and none of "
                         f"{', '.join(WORDS)}")  # fmt: skip
    problems = list(_scale_problems(given))
    if problems:
        raise ValueError("\n".join(problems))
    if isinstance(given, list):
        numbers = all(isinstance(label, int | float) for label in given)
        values = [float(label) if numbers else place / (len(given) - 1) for place, label in enumerate(given)]
        return Scale(dict(zip(map(str, given), values, strict=True)))
    if all(value in OUTCOMES for value in given.values()):
        return Scale({str(label): OUTCOMES[value] for label, value in given.items()}, pairs=True)
    return Scale({str(label): float(value) for label, value in given.items()})


def _scale_problems(given: Sequence[Any] | Mapping[Any, Any]) -> Iterator[str]:
    if odd := [label for label in given if not isinstance(label, str) and not _is_number(label)]:
        yield (
            f"scale: {printable(str(odd[0]))} is no label; a word that YAML reads as true or false needs quotes, "
            'as in "yes"'
        )
    labels = [str(label) for label in given]
    if len({*labels}) < 2:
        yield f"scale: has {len({*labels})} label, and a verdict needs two or more to choose from"
    folded = [label.casefold() for label in labels]
    if doubled := sorted({label for label, alike in zip(labels, folded, strict=True) if folded.count(alike) > 1}):
        yield f"scale: {printable(', '.join(doubled))}: stands there more than once"
    if any(label != label.strip() or not label for label in labels):
        yield "scale: a label is empty, or begins or ends with white space"
    if isinstance(given, Mapping):
        values = [*given.values()]
        numbers = [_is_number(value) for value in values]
        words = [isinstance(v, str) and v in OUTCOMES for v in values]
        if not all(numbers) and not all(words):
            yield f"scale: its values must all be numbers, or all of {', '.join(OUTCOMES)}"
        elif all(words) and not {"first", "second"} <= {*values}:
            yield "scale: a pair needs a label for first and one for second"


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float64 holds; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1000


def judge_problems(config: JudgeConfig) -> list[str]:
    """Problems of a judge's settings, taken alone, each starting with the setting."""
    problems = [f"{name}: is not set" for name in ("model", "template", "scale") if getattr(config, name) is None]
    scale = None
    try:
        scale = read_scale(config.scale) if config.scale is not None else None
    except ValueError as error:
        problems += str(error).split("\n")
    try:
        Field("template", config.template)
    except ValueError as error:
        problems.append(str(error))
    if config.api is not None and config.extract is None:
        problems.append("extract: is not set, and an endpoint (api) only writes")
    if config.extract is not None:
        problems += pattern_problems("extract", config.extract)
    elif any(value is not None for value in vars(config.generation).values()):
        problems.append("generation: nothing is written where the likeliest label is the verdict; set extract, too")
    if config.generation.repeats is not None:
        problems.append("generation.repeats: a verdict is requested once; omit it")
    if scale is not None and scale.pairs != (config.against is not None):
        problems.append("against: names the other answer of a pair (a column, or a run's folder); "
                        + ("it is not set" if scale.pairs else "this scale grades one answer"))  # fmt: skip
    if config.labelled is not None and config.labels is None:
        problems.append("labelled: is the column of the texts that `labels` are of; set labels, too")
    return problems


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on one answer."""

    label: str  # of a pair: as with the answer standing first
    value: float
    flipped: bool = False  # of a pair: whether it hung on which of the two stood first
    unread: bool = False  # whether a text held no label: the lowest value, or a tie

    def __str__(self) -> str:
        return self.label


class JudgeTask(Task):
    """A judge's run of one task."""

    forks = True
    columns: ClassVar[tuple[str, ...]] = ("doc", "responses")
    shapes: ClassVar[Shapes] = {"doc": (dict,), "responses": (list,)}
    takes_fewshot = False
    limited = True

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        """Raises ConfigError."""
        own = config.judge
        try:
            self._scale, self._template = read_scale(own.scale), Field("template", own.template)
        except ValueError as error:
            raise ConfigError([f"tasks.{name}.judge.{line}" for line in str(error).split("\n")]) from error
        self._extract = None if own.extract is None else RegexFilter(own.extract, -1)
        self._labels = {label.casefold(): label for label in self._scale.values}
        names = ["win_rate", "flipped"] if self._scale.pairs else ["score"]
        names += [] if self._extract is None else ["unread"]
        vars(self).update(
            output_type="multiple_choice" if self._extract is None else "generate_until",
            metrics={metric: METRICS[metric] for metric in names},
        )
        super().__init__(name, config, **arguments)

    @classmethod
    def filter_names(cls, config: TaskConfig) -> tuple[str, ...]:
        return (FILTER,)

    def question(self, doc: Doc) -> str:
        return self.questions(doc)[0]

    def questions(self, doc: Doc) -> list[str]:
        """A prompt for each answer; of a pair two, the second with the texts exchanged."""
        return [self._template.render(names) for names in prompt_names(doc, self._scale.pairs)]

    def target(self, doc: Doc) -> str:
        return "" if doc.get("label") is None else str(doc["label"])

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        if self._extract is not None:
            settings = generation_settings(self.config.generation, self.fewshot_delimiter)
            return [Instance(self.name, doc_id, place, "generate_until", prompt, generation=settings)
                    for place, prompt in enumerate(prompts)]  # fmt: skip
        pairs = [(prompt, label) for prompt in prompts for label in self._scale.values]
        return [Instance(self.name, doc_id, place, "loglikelihood", prompt, f"{self.choice_delimiter}{label}")
                for place, (prompt, label) in enumerate(pairs)]  # fmt: skip

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Verdict]]:
        size = len(self._scale.values) if self._extract is None else 1
        labels = [self._label(responses[place : place + size]) for place in range(0, len(responses), size)]
        if self._scale.pairs:
            verdicts = [self._of_pair(*both) for both in zip(labels[::2], labels[1::2], strict=True)]
        else:
            unread, values = Verdict(INVALID, min(self._scale.values.values()), unread=True), self._scale.values
            verdicts = [unread if label is None else Verdict(label, values[label]) for label in labels]
        texts = texts_of(doc)
        return {FILTER: [verdict if text.strip() else self._of_empty(doc)
                         for text, verdict in zip(texts, verdicts, strict=True)]}  # fmt: skip

    def without_credit(
        self, doc: Doc, responses: list[Response], scored: list[Response]
    ) -> dict[MetricKey, MetricValue]:
        """A judge's text without an answer holds no label: it is unread."""
        return self.process_results(doc, scored)

    def score(self, doc: Doc, answers: list[Verdict]) -> dict[str, MetricValue]:
        own = answers[: len(doc["responses"])]  # behind them stands the verdict on the text that was labelled
        mean = math.fsum(verdict.value for verdict in own) / len(own)
        values = {
            "score": mean,
            "win_rate": mean,
            "flipped": sum(verdict.flipped for verdict in own) / len(own),
            "unread": sum(verdict.unread for verdict in own) / len(own),
        }
        return {metric: values[metric] for metric in self.metrics}

    def _label(self, responses: list[Response]) -> str | None:
        """The likeliest label, of equals the first; or the one that the judge wrote, None if it wrote none."""
        if self._extract is not None:
            with limits.named("judge.extract"):
                return self._labels.get(self._extract(responses[0].text).casefold())
        return max(zip(self._scale.values, responses, strict=True), key=lambda pair: pair[1].loglikelihood)[0]

    def _of_empty(self, doc: Doc) -> Verdict:
        """The verdict on an answer without a text, whatever the judge said: the lowest value. Of a pair it loses, and
        ties if the other answer is empty, too."""
        if not self._scale.pairs:
            return Verdict(EMPTY, min(self._scale.values.values()))
        return Verdict(EMPTY, OUTCOMES["second" if str(doc["reference"]).strip() else TIE])

    def _of_pair(self, first: str | None, exchanged: str | None) -> Verdict:
        if first is None or exchanged is None:
            return Verdict(INVALID, OUTCOMES[TIE], unread=True)
        value = self._scale.values[first]
        flipped = value != 1 - self._scale.values[exchanged]
        return Verdict(self._scale.label(0.5), OUTCOMES[TIE], flipped=True) if flipped else Verdict(first, value)


def prompt_names(row: Mapping[str, Any], pairs: bool) -> Iterator[dict[str, Any]]:
    """The variables of each prompt of a row. The judge's names take precedence over the row's columns, which are in
    `doc`."""
    common = {**row["doc"], "doc": row["doc"], "target": row.get("target", "")}
    for response in texts_of(row):
        if not pairs:
            yield {**common, "response": response}
            continue
        for texts in ((response, row["reference"]), (row["reference"], response)):
            yield {**common, **dict(zip(PAIRED, texts, strict=True))}


def texts_of(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row that are judged: the answers, and the one that was labelled if it is another."""
    return [*row["responses"], *([] if row.get("labelled") is None else [row["labelled"]])]
