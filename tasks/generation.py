"""Tasks whose answer is generated text: stop strings and sampling in, extraction filters and exact match out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from evalengine.config.schema import GenerationConfig, TaskConfig
from evalengine.tasks.base import Task
from evalengine.tasks.filters import ExactMatch, RegexFilter
from evalengine.tasks.instance import Generation, Instance, Response
from evalengine.tasks.metric import Metric, MetricValue
from evalengine.tasks.repeats import Repeated, repeat_problems, repeats_of
from evalengine.tasks.rows import Doc


def generation_settings(config: GenerationConfig, fewshot_delimiter: str) -> Generation:
    """The settings with lm-eval's defaults: greedy, at most 256 tokens, until the delimiter between exemplars."""
    return Generation(
        until=(fewshot_delimiter,) if config.until is None else tuple(config.until),
        max_gen_toks=256 if config.max_gen_toks is None else config.max_gen_toks,
        temperature=config.temperature or 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
    )


def generation_problems(config: GenerationConfig) -> Iterator[str]:
    """Yields what is wrong with the settings; each problem starts with the setting's name. Ranges are checked earlier,
    where settings are composed."""
    if "" in (config.until or ()):
        yield "generation.until: holds an empty string, which would stop at once"


class GenerationTask(Task):
    """A task whose answer is generated, extracted by each of `extract` and compared with the target.

    With `repeats` above 1 every document is sampled that often, one instance a sample; exact_match is then the mean
    over the samples (lm-eval 0.4.13 runs the repeats but scores the first only), and `Repeated` adds its metrics.
    """

    output_type = "generate_until"
    metrics: ClassVar[dict[str, Metric]] = {"exact_match": Metric()}
    extract: ClassVar[Mapping[str, RegexFilter]]  # filter -> how it reads the answer out of the text
    match: ClassVar[ExactMatch]

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        """Raises ConfigError."""
        super().__init__(name, config, **arguments)
        self._repeated = Repeated.of(config)
        # A subclass with its own `score` computes its own metrics.
        if self._repeated is not None and type(self).score is GenerationTask.score:
            vars(self)["metrics"] = {**self.metrics, **self._repeated.metrics}

    @classmethod
    def filter_names(cls, config: TaskConfig) -> tuple[str, ...]:
        return tuple(cls.extract)

    def problems(self) -> list[str]:
        kind = type(self)
        reads, compares = kind.filtered is GenerationTask.filtered, kind.score is GenerationTask.score
        return [
            *super().problems(),
            *self.not_set(*["extract"] * reads, *["match"] * compares),
            *repeat_problems(self.config),
            *generation_problems(self.config.generation),
        ]

    @property
    def generation(self) -> Generation:
        return generation_settings(self.config.generation, self.fewshot_delimiter)

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        (prompt,) = prompts
        return [
            Instance(self.name, doc_id, 0, "generate_until", prompt, generation=self.generation, repeat=i)
            for i in range(repeats_of(self.config))
        ]

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[str]]:
        return {name: [extract(response.text) for response in responses] for name, extract in self.extract.items()}

    def score(self, doc: Doc, answers: list[str]) -> dict[str, MetricValue]:
        reference = str(self.target(doc))
        values = {"exact_match": math.fsum(self.match(answer, reference) for answer in answers) / len(answers)}
        if self._repeated is None:
            return {**values}
        return {**values, **self._repeated.scores(answers, lambda answer: self.match(answer, reference))}
