"""Tasks that a YAML file describes by templates, as lm-evaluation-harness's ConfigurableTask does (0.4.13).

    doc_to_text: "Question: {{question}}\\nAnswer:"    of a row {"question": "2 + 2?", "options": ["3", "4"], "gold": 1}
    doc_to_choice: options
    doc_to_target: gold

Four output types: multiple_choice scores each choice after the text, generate_until generates an answer, which filters
read and exact_match compares, loglikelihood scores the target after the text, loglikelihood_rolling the target alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from evalengine.config.schema import FewshotTemplates, TaskConfig, TemplateConfig
from evalengine.tasks.base import Task
from evalengine.tasks.fewshot import Turn
from evalengine.tasks.filters import AS_IT_IS, Pipeline, majority_vote, pipelines
from evalengine.tasks.generation import (
    MATCH,
    Repeated,
    generation_settings,
    repeat_problems,
    repeats_of,
)
from evalengine.tasks.instance import OUTPUT_TYPES, Instance, Response
from evalengine.tasks.lm_eval_yaml import TEXTS, installed
from evalengine.tasks.metric import (
    Metric,
    MetricKey,
    MetricValue,
    Scores,
    choice_scores,
    generated_scores,
    read_metrics,
    rolling_scores,
)
from evalengine.tasks.multiple_choice import checked_gold
from evalengine.tasks.rows import TEXT, Doc, Rows, check_rows
from evalengine.tasks.templates import Field, index_warning, literal_warnings
from evalengine.util import limits
from evalengine.util.plain_files import read_yaml

SAMPLERS = ("default", "first_n")
TYPES = {"text": TEXT, "string": (str,), "list": (list,), "mapping": (dict,)}  # of columns, in this folder's YAML files


class Templated(Task):
    """One task from `config.template`; a subclass may replace any of its methods, and `document` before all."""

    forks = True
    columns: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[dict[str, Metric]] = {}  # a subclass's own, which its `score` computes; else the file's
    takes_templates = True
    limited = True
    fixed: ClassVar[TemplateConfig | None] = None  # replaces the configuration's; its description is a text
    every_sample: ClassVar[bool] = False  # whether a filter without take_first gives an answer per sample

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        """Raises ConfigError that lists everything which is wrong with the templates, filters and metrics."""
        self._wrong: list[str] = []
        template, description = self._read(lambda: installed(config)) or (config.template, config.description)
        template = self.fixed or template
        self._template: TemplateConfig = template
        few = template.fewshot_config
        sources = {
            **({} if self.fixed else {"description": description or None, "gen_prefix": config.gen_prefix or None}),
            **{key: getattr(template, key) for key in TEXTS},
            **{f"fewshot_config.{key}": getattr(few, key) for key in TEXTS},
        }
        self._fields: dict[str, Field] = {
            key: self._read(partial(Field, key, source)) for key, source in sources.items() if source is not None
        }
        by_judge = template.metric_list == []  # alone: it needs no target
        if by_judge:
            self._fields.setdefault("doc_to_target", Field("doc_to_target", ""))
        kind = template.output_type or "generate_until"
        self._pipelines: list[Pipeline] = self._read(lambda: pipelines(template.filter_list)) or [AS_IT_IS]
        self._scores: Scores | None = None
        if kind in OUTPUT_TYPES:
            self._scores = self._read(lambda: read_metrics(template.metric_list, kind, type(self).metrics))
        delimiters = {
            "target_delimiter": template.target_delimiter,
            "fewshot_delimiter": template.fewshot_delimiter,
        }
        vars(self).update({key: value for key, value in delimiters.items() if value is not None})
        vars(self).update(  # attributes that other families of tasks have on their classes
            output_type=kind,
            metrics=self._scores.metrics if self._scores else {},
            first_n=few.sampler == "first_n",
            takes_fewshot=kind != "loglikelihood_rolling",
        )
        super().__init__(name, config, **arguments)
        self._repeated = Repeated.of(config) if kind == "generate_until" and not by_judge else None
        if self._repeated is not None:
            own = type(self).metrics
            vars(self)["metrics"] = {**self.metrics, **self._repeated.metrics(own or MATCH, vote=not own)}

    def _read(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ValueError as error:
            self._wrong.extend(str(error).split("\n"))
            return None

    def problems(self) -> list[str]:
        template, problems = self._template, super().problems()
        few = template.fewshot_config
        if few.samples is not None:  # the template itself holds the exemplars
            problems = [problem for problem in problems if not problem.startswith("num_fewshot=")]
            if not isinstance(few.samples, list) or not all(isinstance(row, dict) for row in few.samples):
                problems.append("template.fewshot_config.samples: must be a list of rows")
        if self.output_type not in OUTPUT_TYPES:
            problems.append(f"template.output_type={self.output_type}: must be one of {', '.join(OUTPUT_TYPES)}")
        if template.metric_list == [] and self.config.judge.scale is None:
            problems.append("template.metric_list: names no metric, and no judge scores the answers")
        needed = {"doc_to_target", *(["doc_to_choice"] if self.output_type == "multiple_choice" else [])}
        without_text = self.output_type == "loglikelihood_rolling" or type(self).text is not Templated.text
        needed |= set() if without_text else {"doc_to_text"}
        if template.lm_eval_file is not None:  # `_wrong` holds what could not be read from that file
            needed -= {*TEXTS}
        problems.extend(f"template.{key}: is not set" for key in sorted(needed - {*self._fields}))
        if few.sampler not in (None, *SAMPLERS):
            problems.append(f"template.fewshot_config.sampler={few.sampler}: must be one of {', '.join(SAMPLERS)}")
        if self.output_type == "generate_until":
            problems.extend(repeat_problems(self.config))
        elif template.filter_list is not None and [p.steps for p in self._pipelines] != [AS_IT_IS.steps]:
            problems.append("template.filter_list: is for tasks that generate text; this one scores given texts")
        return [*problems, *(f"template.{problem}" for problem in self._wrong)]

    @cached_property
    def _columns(self) -> frozenset[str]:
        """The columns of the evaluated rows; a template that is such a name means the column."""
        return frozenset(column for doc in self.docs for column in doc)

    @cached_property
    def _several_contexts(self) -> bool:
        """Whether `doc_to_text` says which of the choices a text begins with (WinoGrande's form); lm-eval calls the
        first document."""
        field = self._fields.get("doc_to_text")
        if field is None or "doc_to_choice" not in self._fields:
            return False
        return _is_index(field.text(self.docs[0], self._columns, counts=True))

    def warnings(self, count: int) -> Iterator[str]:
        place, text = f"tasks.{self.name}.template", self._fields.get("doc_to_text")
        template = text is not None and isinstance(text.source, str) and not text.is_column(self._columns)
        if template and self._several_contexts and self.fixed is None:
            yield index_warning(place, str(self.text(self.docs[0])))
        for key in ("doc_to_choice", "fewshot_config.doc_to_choice"):
            if key in self._fields:
                yield from literal_warnings(place, self._fields[key].source, key)
        yield from super().warnings(count)

    def _load_exemplars(self) -> Rows:
        samples = self._template.fewshot_config.samples
        if samples is None or self.config.fewshot_file is not None or self.config.fewshot_split is not None:
            return super()._load_exemplars()
        return check_rows(Rows([dict(row) for row in samples], f"tasks.{self.name}.template.fewshot_config.samples"))

    def _field(self, key: str, exemplar: bool = False) -> Field | None:
        own = self._fields.get(f"fewshot_config.{key}") if exemplar else None
        return own or self._fields.get(key)

    def text(self, doc: Doc, exemplar: bool = False) -> Any:
        """lm-eval's doc_to_text: a text, or the index of the choice that it begins with."""
        field = self._field("doc_to_text", exemplar)
        return "" if field is None else field.text(doc, self._columns, counts=self._several_contexts)

    def _target(self, doc: Doc, exemplar: bool = False) -> Any:
        field = self._field("doc_to_target", exemplar)
        assert field is not None, "problems() refuses a task without it"
        return field.target(doc, self._columns, counts="doc_to_choice" in self._fields)

    def choices(self, doc: Doc, exemplar: bool = False) -> list[str] | None:
        """The answers to choose from; None for a task that has none."""
        field = self._field("doc_to_choice", exemplar)
        return None if field is None else field.choices(doc, self._columns)

    def description(self, doc: Doc) -> str:
        return super().description(doc) if self.fixed else self._written("description", doc)

    def gen_prefix(self, doc: Doc) -> str:
        return super().gen_prefix(doc) if self.fixed else self._written("gen_prefix", doc)

    def _written(self, key: str, doc: Doc) -> str:
        """The text of a setting that may be absent, the name of a column, or a template."""
        field = self._fields.get(key)
        if field is None:
            return ""
        return str(doc[field.source]) if field.source in doc else field.render(doc)

    def question(self, doc: Doc) -> str:
        return self._worded(self.text(doc), self.choices(doc))

    def questions(self, doc: Doc) -> list[str]:
        """One text, or every choice where the texts begin with the choices."""
        text, choices = self.text(doc), self.choices(doc)
        return choices if self._several_contexts and choices is not None else [self._worded(text, choices)]

    def target(self, doc: Doc) -> Any:
        target = self._target(doc)
        if self.output_type == "multiple_choice":
            self._gold(doc, target)
        elif self.output_type != "generate_until" and not isinstance(target, str):
            raise ValueError(f"doc_to_target: gives {str(target)[:80]!r}, which is no text to score")
        return target

    def _worded(self, text: Any, choices: list[str] | None) -> str:
        if self._several_contexts and choices is not None:
            text = choices[checked_gold(text, choices)]
        if not isinstance(text, str):
            raise ValueError(f"doc_to_text: gives {str(text)[:80]!r}, which is no text")
        return text

    def _gold(self, doc: Doc, target: Any) -> list[int]:
        """The indices of the right choices. Raises ValueError for an answer that is no choice."""
        choices = self.choices(doc)
        assert choices is not None, "problems() refuses multiple choice without them"
        gold = self.text(doc) if self._several_contexts else target
        indices = [_index(value, choices) for value in (gold if isinstance(gold, list) else [gold])]
        if not indices:
            raise ValueError("doc_to_target: names no right answer")
        return [checked_gold(index, choices) for index in indices]

    def exemplar_turns(self, exemplar: Doc) -> list[Turn]:
        few, choices = self._template.fewshot_config, self.choices(exemplar, exemplar=True)
        target, text = self._target(exemplar, exemplar=True), self.text(exemplar, exemplar=True)
        if isinstance(target, list) and target:
            target = target[0]
        if choices and _is_index(target):
            target = choices[checked_gold(target, choices)]
        question = self._worded(text, choices)
        if target is None or target == "":  # lm-eval then shows neither an answer nor delimiters
            return [Turn("user", question)]
        after = self.target_delimiter if few.target_delimiter is None else few.target_delimiter
        between = self.fewshot_delimiter if few.fewshot_delimiter is None else few.fewshot_delimiter
        return [Turn("user", question, after), Turn("assistant", str(target), between)]

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        target = self.target(doc)
        if self.output_type == "generate_until":
            settings = generation_settings(self.config.generation, self.fewshot_delimiter)
            return [
                Instance(self.name, doc_id, 0, "generate_until", prompts[0], generation=settings, repeat=i)
                for i in range(repeats_of(self.config))
            ]
        if self.output_type == "loglikelihood_rolling":
            return [Instance(self.name, doc_id, 0, "loglikelihood_rolling", target)]
        if self.output_type == "loglikelihood":
            return [Instance(self.name, doc_id, 0, "loglikelihood", prompts[0], target)]
        choices = self.choices(doc) or []
        pairs = [(prompts[0], choice) for choice in choices]
        if self._several_contexts:
            pairs = [(prompt, str(target)) for prompt in prompts]
        return [
            Instance(self.name, doc_id, i, "loglikelihood", prompt, f"{self.choice_delimiter}{continuation}")
            for i, (prompt, continuation) in enumerate(pairs)
        ]

    @classmethod
    def metrics_of(cls, config: TaskConfig) -> dict[str, Metric]:
        template = cls.fixed or config.template
        try:
            return read_metrics(template.metric_list, template.output_type or "generate_until", cls.metrics).metrics
        except (KeyError, ValueError):  # only a run lists the problems
            return {"?": Metric()}

    @classmethod
    def filter_names(cls, config: TaskConfig) -> tuple[str, ...]:
        return tuple(pipeline.name for pipeline in pipelines((cls.fixed or config.template).filter_list))

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Any]]:
        if self.output_type == "generate_until":
            texts = [response.text for response in responses]
            answers = {pipeline.name: pipeline(texts, doc) for pipeline in self._pipelines}
            return answers if self.every_sample else {name: [answer] for name, answer in answers.items()}
        if self.output_type == "loglikelihood_rolling":
            return {name: [response.loglikelihood for response in responses] for name in self.filters}
        return {name: [(r.loglikelihood, r.is_greedy) for r in responses] for name in self.filters}

    def process_results(self, doc: Doc, responses: list[Response]) -> dict[MetricKey, MetricValue]:
        """As of any task; with several samples a document, the metrics over samples follow those of the file, for every
        filter that reads each sample separately. A filter that votes or selects samples has the file's metrics only."""
        values = super().process_results(doc, responses)
        if self._repeated is None:
            return values
        texts, results = [response.text for response in responses], dict[MetricKey, MetricValue]()
        for pipeline in self._pipelines:
            results.update({key: value for key, value in values.items() if key[1] == pipeline.name})
            if pipeline.by_sample is not None:
                scores = self._of_samples(doc, pipeline.by_sample(texts, doc), self._repeated)
                results.update({(name, pipeline.name): value for name, value in scores.items()})
        return results

    def _of_samples(self, doc: Doc, answers: list[str], repeated: Repeated) -> dict[str, MetricValue]:
        if own := type(self).metrics:
            return repeated.scores(own, [self.score(doc, [answer]) for answer in answers])
        judge = self.judge(doc)
        (vote,) = majority_vote(answers, doc)
        return repeated.scores(MATCH, [{"exact_match": judge(answer)} for answer in answers], judge(vote))

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        assert self._scores is not None, "problems() refuses unknown output types"
        names, target = [*self._scores.metrics], self._target(doc)
        if self.output_type == "generate_until":
            answer = answers if self.every_sample else answers[0]
            return generated_scores(names, self.judge(doc), len(self._golds(doc, target)) > 1, answer)
        if self.output_type == "loglikelihood_rolling":
            return rolling_scores(names, target, answers[0])
        if self.output_type == "loglikelihood":  # acc: greedy decoding would have written the target
            values = dict(zip(("perplexity", "acc"), answers[0], strict=True))
            return {name: float(values[name]) for name in names}
        return choice_scores(names, self._gold(doc, target), self.choices(doc) or [], answers)

    def judge(self, doc: Doc) -> Callable[[str], float]:
        """A function that gives 1.0 for a right generated answer, else 0.0."""
        assert self._scores is not None, "problems() refuses unknown output types"
        match, golds = self._scores.match, self._golds(doc, self._target(doc))

        def right(text: str) -> float:
            with limits.named("metric_list"):
                return max(match(text, gold) for gold in golds)

        return right

    def _golds(self, doc: Doc, target: Any) -> list[str]:
        """The texts that count as right generated answers."""
        choices = self.choices(doc)
        if choices is not None:
            return [choices[_index(target, choices)]]
        return [str(value) for value in target] if isinstance(target, list) and target else [str(target)]


@lru_cache(None)
def class_of_file(module: str, name: str) -> type[Templated] | None:
    """The class that `<module>.yaml` of this folder describes under `name`; None if there is none.

    The file has lm-eval's settings of texts, filters and metrics, and settings of ours: the `columns` that rows must
    have ({name: type}), `fewshot_columns` and `spare_exemplar`. `process_docs` names a function of <module>.py.
    """
    file = Path(__file__).with_name(f"{module}.yaml")
    content = (read_yaml(file) if file.is_file() else {}).get(name)
    if content is None:
        return None
    columns, shown = content.pop("columns"), content.pop("fewshot_columns", None)
    document = content.pop("process_docs", None)
    members: dict[str, Any] = {
        "columns": tuple(columns),
        "fewshot_columns": shown and tuple(shown),
        "shapes": {column: TYPES[kind] for column, kind in {**columns, **(shown or {})}.items()},
        "spare_exemplar": content.pop("spare_exemplar"),
        "forks": True,
        "limited": False,  # the templates are this package's
        "takes_templates": False,
        "every_sample": True,
        "fixed": TemplateConfig(**{**content, "fewshot_config": FewshotTemplates(**content.get("fewshot_config", {}))}),
    }
    if document is not None:
        function = getattr(import_module(f"evalengine.tasks.{module}"), document)
        members["document"] = lambda self, row: function(row)
    return type(name, (Templated,), members)


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _index(value: Any, choices: list[str]) -> int:
    """`value` if it is an index, else the index of the choice that equals it. Raises ValueError if there is none."""
    if _is_index(value):
        return int(value)
    if value in choices:
        return choices.index(value)
    raise ValueError(f"gold answer {str(value)[:80]!r} is none of {len(choices)} choices")
