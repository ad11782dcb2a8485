"""The interface of a task: rows in, requests out, responses in, metric values out.

A task never sees the engine. It turns a document into `Instance`s (text), and the responses to them into metric values;
tokenisation, batching and aggregation are the harness's. Definitions follow lm-evaluation-harness 0.4.13.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from evalengine.config.schema import TaskConfig, TemplateConfig
from evalengine.errors import ConfigError
from evalengine.tasks.dataset import load_rows, text_lines
from evalengine.tasks.fewshot import Chat, Sampler, Turn, joined, prefixed, read_exemplars, render
from evalengine.tasks.instance import MADE_UP, Instance, OutputType, Response
from evalengine.tasks.metric import Aggregation, Metric, MetricKey, MetricValue
from evalengine.tasks.rows import Doc, Rows, Shapes, checked, cluster_names, content_hash, documents_of, reordered
from evalengine.util.limits import LimitExceeded, limited

See = Callable[[int, str], None]  # (document, a text of its requests)


class Task(ABC):
    """One task, built from its configuration; `load` reads the rows, `instances` writes the prompts.

    A subclass gives the class variables that have no value here, `question`, `target`, `requests`, `filtered` and
    `score`; it may replace the methods below these.
    """

    output_type: ClassVar[OutputType]
    metrics: ClassVar[dict[str, Metric]]
    columns: ClassVar[tuple[str, ...]]  # every evaluated row must have these
    fewshot_columns: ClassVar[tuple[str, ...] | None] = None  # an exemplar's columns, where they differ
    shapes: ClassVar[Shapes] = {}  # types of the columns that hold neither text nor number
    takes_fewshot: ClassVar[bool] = True
    extra: ClassVar[str | None] = None  # the extra of this package that the task needs
    limited: ClassVar[bool] = False  # whether templates and patterns of a file make its texts and scores
    takes_templates: ClassVar[bool] = False  # whether `config.template` is read
    runs_programs: ClassVar[bool] = False  # whether the answers are programs to be run (tasks/code.py)
    first_n: ClassVar[bool] = False  # exemplars in file order instead of drawn
    # Whether one exemplar more is drawn, so that the document itself can be dropped. lm-eval does so where the few-shot
    # split equals the test split: both have the same name, or neither is given. None: `draws_spare` decides.
    spare_exemplar: ClassVar[bool | None] = None
    # Whether a forked process may write the task's prompts, and another one score its answers: not where scoring needs
    # what `instances` leaves in the task, nor where it talks to its own process. Each class says so for itself.
    forks: ClassVar[bool] = False
    target_delimiter: ClassVar[str] = " "
    fewshot_delimiter: ClassVar[str] = "\n\n"

    def __init__(
        self,
        name: str,
        config: TaskConfig,
        *,
        data_dir: str | None = None,
        fewshot_seed: int = 1234,
        chat: Chat | None = None,
        fewshot_as_multiturn: bool = True,
        system_instruction: str | None = None,
        allow_code_execution: Any = False,
    ) -> None:
        """chat: renders messages through the model's chat template; None for plain text. allow_code_execution: as in
        `Config`, for tasks whose scorers run programs themselves. Raises ConfigError."""
        self.name = name
        self.config = config
        self.version = config.version
        self.num_fewshot = config.num_fewshot or 0
        self.docs: list[Doc] = []
        self.clusters: list[str] | None = None  # the cluster of each document; None: documents are unrelated
        self._data_dir = data_dir
        self._fewshot_seed = fewshot_seed
        self._chat = chat
        self._multiturn = fewshot_as_multiturn
        self._instruction = system_instruction
        self._rows: Rows | None = None
        self._exemplar_rows: Rows | None = None
        self._exemplars: list[Doc] = []
        self.own_exemplars = 0  # documents that are exemplars in their prompts, as `instances` wrote them
        self._turns: dict[int, list[Turn]] = {}  # id(exemplar) -> its turns, for the exemplars shown so far
        problems = self.problems()
        if problems:
            raise ConfigError([f"tasks.{name}.{problem}" for problem in problems])

    def problems(self) -> list[str]:
        """Settings that this task does not support, each message starting with the setting; ranges are checked
        before."""
        if missing := [name for name in ("output_type", "metrics", "columns") if not hasattr(self, name)]:
            return [f"cls={self.config.cls}: the class does not set {', '.join(missing)}"]  # what follows reads them
        problems = []
        if not self.config.split:
            problems.append("split: is not set")
        if self.num_fewshot and not self.takes_fewshot:
            problems.append(
                f"num_fewshot={self.num_fewshot}: this task has no few-shot form; set tasks.{self.name}.num_fewshot=0, "
                "which holds for it alone"
            )
        elif self.num_fewshot and not (self.config.fewshot_split or self.config.fewshot_file):
            columns = ", ".join(self.fewshot_columns or self.columns) or "the columns of the evaluated ones"
            others = "" if self.fewshot_columns or not self.config.split else (
                f"tasks.{self.name}.fewshot_split={self.config.split} for other evaluated rows, or "
            )  # fmt: skip
            problems.append(
                f"num_fewshot={self.num_fewshot}: no exemplars are given; set {others}tasks.{self.name}.fewshot_file="
                f"FILE (.jsonl or .yaml, rows with {columns}); or none, tasks.{self.name}.num_fewshot=0"
            )
        if self.output_type != "generate_until" and (self.config.repeats or self.config.pass_at):
            problems.append("repeats: is for tasks that generate text; this one scores given texts")
        if self.output_type == "loglikelihood_rolling" and self.config.gen_prefix:
            problems.append("gen_prefix: nothing is answered here; this task scores whole texts")
        if self.config.code_timeout is not None and not self.runs_programs:
            problems.append(f"code_timeout={self.config.code_timeout}: this task runs no programs")
        if not self.takes_templates:
            given, why = vars(replace(self.config.template, spare_exemplar=None)), "is for a subclass of Templated"
            names = [name for name, usual in vars(TemplateConfig()).items() if given[name] != usual]
            problems.extend(f"template.{name}: {why}; cls={self.config.cls} writes its own prompts" for name in names)
        if self.output_type != "generate_until" and any(v is not None for v in vars(self.config.generation).values()):
            problems.append("generation: is for tasks that generate text; this one scores given texts")
        return problems

    @property
    def can_fork(self) -> bool:
        """`forks` of the task's very class: a user's subclass of one that can may not."""
        return bool(vars(type(self)).get("forks"))

    @property
    def needs_limits(self) -> bool:
        """Whether `check` and the scoring of answers must run in a process with limits (`util.limits`). What they did
        for a document there may then be repeated without: it gives the same texts. A user's class is Python code; it
        has limits only if it can fork."""
        return self.limited and (self.can_fork or type(self).__module__.startswith("evalengine.tasks."))

    def load(self) -> None:
        """Reads the evaluated rows, and the exemplars if the task uses any, and checks them. Raises ConfigError."""
        self.read()
        self.check()

    def read(self) -> None:
        """`load` without `check`."""
        with named_errors(f"tasks.{self.name}"):
            self._read_rows()

    def check(self, limit: int | None = None) -> None:
        """Make all texts of the first `limit` rows (None: all) and of the exemplars, so that an error can name the row.
        Nothing is changed, so that another process may do it. Raises ConfigError."""
        with named_errors(f"tasks.{self.name}"):
            self._check_rows(limit)

    def _read_rows(self) -> None:
        assert self.config.split is not None
        self._rows = load_rows(
            self.config.dataset, self.config.split, data_dir=self._data_dir, read_text=self.read_text
        )
        self.docs = documents_of(self._rows, self.columns, self.shapes, self._document)
        self.clusters = cluster_names(self._rows, self.config, self.name)
        if self.num_fewshot == 0:
            return
        self._exemplar_rows = self._load_exemplars()
        columns = self.fewshot_columns or self.columns
        self._exemplars = documents_of(self._exemplar_rows, columns, self.shapes, self._document)

    def _document(self, row: Doc) -> Doc:
        """The document of a row whose options are in the order of `choice_order`: exemplars too, since one that is
        the document itself is known by being equal."""
        order = self.config.choice_order
        return self.document(row if order is None else reordered(row, order))

    def _check_rows(self, limit: int | None) -> None:
        assert self._rows is not None, "read() first"
        for row, doc in limited(enumerate(self.docs[:limit])):
            checked(self._ask, doc, self._rows, row)
        for row, exemplar in limited(enumerate(self._exemplars)):
            assert self._exemplar_rows is not None, "they are read together"
            checked(self._shown, exemplar, self._exemplar_rows, row)

    def _ask(self, doc: Doc) -> None:
        self.target(doc)
        self.description(doc)
        self.gen_prefix(doc)
        requests = self.requests(0, doc, self.questions(doc))
        if self.needs_limits and self.output_type == "generate_until":  # else no pattern reads an answer
            for text in ("", MADE_UP):
                self._try_patterns(doc, [Response(text=text) for _ in requests])

    def _try_patterns(self, doc: Doc, responses: list[Response]) -> None:
        """Raises LimitExceeded; `harness.plan.rehearse` reports other errors."""
        try:
            self.process_results(doc, responses)
        except LimitExceeded:
            raise
        except Exception:
            return

    def _shown(self, exemplar: Doc) -> list[Turn]:
        """The exemplar's turns; its answer begins with the prefix that the documents' answers have."""
        turns, prefix = self.exemplar_turns(exemplar), self.gen_prefix(exemplar)
        return prefixed(turns, prefix, self.target_delimiter) if prefix else turns

    def _load_exemplars(self) -> Rows:
        split, file = self.config.fewshot_split, self.config.fewshot_file
        if file is not None:
            return read_exemplars(file)
        assert split is not None
        if split == self.config.split:
            assert self._rows is not None
            return self._rows
        return load_rows(self.config.dataset, split, data_dir=self._data_dir, read_text=self.read_text, evaluated=False)

    @property
    def draws_spare(self) -> bool:
        """Whether one exemplar more is drawn than is shown (see `spare_exemplar`)."""
        if self.config.fewshot_file is not None:
            return False
        if (chosen := self.config.template.spare_exemplar) is not None:
            return chosen
        same = self.config.fewshot_split == self.config.split
        return same or (self.config.split != "test" if self.spare_exemplar is None else self.spare_exemplar)

    def instances(self, limit: int | None = None, see: See | None = None) -> list[list[Instance]]:
        """The requests of the first `limit` documents (None: all), one list a document.

        see: called with (document, text) for every text that the document's requests are made of, without what the
        chat template adds. Prompt i does not depend on `limit`. Raises ConfigError for a limit below 1, too few
        exemplars, or a template that refuses the messages.
        """
        assert self._rows is not None, "load() first"
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} must be at least 1 document (null: all)")
        first_n = self.first_n or self.config.fewshot_file is not None
        self.own_exemplars = 0
        sampler = Sampler(self._exemplars, seed=self._fewshot_seed, first_n=first_n, spare=self.draws_spare)
        with named_errors(f"tasks.{self.name}"):
            return [
                self._document_instances(i, doc, sampler, see or (lambda i, text: None))
                for i, doc in enumerate(self.docs[:limit])
            ]

    def _document_instances(self, doc_id: int, doc: Doc, sampler: Sampler, see: See) -> list[Instance]:
        """The document's requests: description, exemplars and question, as plain text or through the chat template."""
        system = joined(self._instruction or "", self.description(doc), self.fewshot_delimiter)
        before = [Turn("system", system)] if system else []
        exemplars = sampler.draw(self.num_fewshot, doc)
        self.own_exemplars += doc in exemplars
        for exemplar in exemplars:
            if id(exemplar) not in self._turns:
                self._turns[id(exemplar)] = self._shown(exemplar)
            before.extend(self._turns[id(exemplar)])
        prompts, prefix, questions = [], self.gen_prefix(doc), self.questions(doc)
        # Nothing stands between one of several contexts and its continuation.
        delimiter = self.target_delimiter if len(questions) == 1 else ""
        for question in questions:
            question_turns = [Turn("user", question)]
            turns = [*before, *(prefixed(question_turns, prefix, delimiter) if prefix else question_turns)]
            with named_errors(f"document {doc_id}"):
                prompts.append(render(turns, self._chat, multiturn=self._multiturn))
            for turn in turns:
                see(doc_id, turn.content)
        instances = self.requests(doc_id, doc, prompts)
        for instance in instances:
            see(doc_id, instance.context if instance.kind == "loglikelihood_rolling" else instance.continuation)
        return instances

    def warnings(self, count: int) -> Iterator[str]:
        """Yields what is probably not meant, each starting with the setting. count: the documents whose prompts
        `instances` wrote."""
        if self.own_exemplars:
            yield (
                f"tasks.{self.name}.num_fewshot={self.num_fewshot}: {self.own_exemplars} of {count} prompts contain "
                f"their own document with its answer, since the exemplars are drawn from rows that are evaluated, too; "
                f"{self.other_exemplars}"
            )

    @property
    def other_exemplars(self) -> str:
        """How to keep documents out of their own prompts, for a message."""
        if self.config.fewshot_file is not None:
            return f"remove the evaluated rows from {self.config.fewshot_file}"
        return (
            f"set tasks.{self.name}.template.spare_exemplar=true to exclude it (this draws other exemplars), or "
            f"tasks.{self.name}.fewshot_split=SPLIT for other rows"
        )

    def fingerprint(self, limit: int | None = None) -> dict[str, Any]:
        """Identifies what was evaluated: sources, counts, and SHA-256s of the unprocessed rows in their order."""
        assert self._rows is not None, "load() first"
        evaluated, exemplars = self._rows.rows[:limit], self._exemplar_rows
        return {
            "dataset": self.config.dataset.path,
            "name": self.config.dataset.name,
            "revision": self._rows.revision,
            "split": self.config.split,
            "source": self._rows.source,
            "rows": len(evaluated),
            "sha256": content_hash(evaluated),
            "cluster": self.config.cluster,
            "items": self.config.items,
            "clusters": None if self.clusters is None else len(set(self.clusters[:limit])),
            "fewshot_source": exemplars.source if exemplars else None,
            "fewshot_rows": len(exemplars.rows) if exemplars else 0,
            "fewshot_sha256": content_hash(exemplars.rows) if exemplars else None,
        }

    def process_results(self, doc: Doc, responses: list[Response]) -> dict[MetricKey, MetricValue]:
        """This document's value of every metric under every filter. Filters come in order, metrics within them."""
        answers = self.filtered(doc, responses)
        return {
            (metric, filter_name): value
            for filter_name in self.filters
            for metric, value in self.score(doc, answers[filter_name]).items()
        }

    def without_credit(
        self, doc: Doc, responses: list[Response], scored: list[Response]
    ) -> dict[MetricKey, MetricValue]:
        """`process_results` of a document some of whose responses contain no answer and must get no credit.

        scored: the responses, with an empty one in place of each of these. Their values are those of an empty text. If
        the task gives credit for empty texts, the document gets at most 0. Where lower is better, it gets the worse one
        of this value and that of the written text, since an empty text may be the best one.
        """
        values, nothing = self.process_results(doc, scored), [Response() for _ in responses]
        empty = values if scored == nothing else self.process_results(doc, nothing)
        lower = {key for key in values if not self.higher_is_better().get(key[0], True)}
        written = self.process_results(doc, responses) if lower else {}  # a long thinking may take seconds to score
        for key, value in values.items():
            if key in lower:
                values[key] = _each(max, value, written.get(key))
            elif key in empty and _positive(empty[key]):
                values[key] = _each(min, value, 0.0)
        return values

    @cached_property
    def filters(self) -> tuple[str, ...]:
        """The filters' names, in the order of the results."""
        return self.filter_names(self.config)

    def aggregation(self) -> Mapping[str, str | Aggregation]:
        """Metric -> its aggregation, or the name of one in harness.metrics; a metric without an entry has its mean."""
        return {name: metric.aggregation for name, metric in self.metrics.items()}

    def higher_is_better(self) -> dict[str, bool]:
        return {name: metric.higher_is_better for name, metric in self.metrics.items()}

    def definition(self) -> dict[str, Any]:
        """Identifies code of other packages that decides the scores, by versions and hashes, as plain JSON values.
        A run resumes another only if their definitions are equal."""
        return {}

    @classmethod
    def metrics_of(cls, config: TaskConfig) -> dict[str, Metric]:
        """The metrics that a run of the task reports, if its configuration determines them."""
        return cls.metrics

    @classmethod
    def filter_names(cls, config: TaskConfig) -> tuple[str, ...]:
        """`filters`, if the configuration determines them; lm-eval calls the absence of any "none"."""
        return ("none",)

    def read_text(self, text: str) -> list[Doc]:
        """The rows of a raw text file; by default its lines."""
        return text_lines(text)

    def document(self, row: Doc) -> Doc:
        """The document made of a row; by default the row itself."""
        return row

    def description(self, doc: Doc) -> str:
        """The text before all exemplars; by default the same for all documents."""
        return self.config.description or ""

    def gen_prefix(self, doc: Doc) -> str:
        """The text that starts the assistant's answer; "" for none."""
        return self.config.gen_prefix or ""

    @property
    def choice_delimiter(self) -> str:
        """The text between a prompt and a scored choice. It is empty after a chat template, which ends with white
        space, unless `gen_prefix` follows the template and ends without any."""
        prefix = self.config.gen_prefix
        return self.target_delimiter if self._chat is None or (prefix and not prefix[-1].isspace()) else ""

    def exemplar_turns(self, exemplar: Doc) -> list[Turn]:
        """An exemplar's question and answer."""
        return [
            Turn("user", self.question(exemplar), self.target_delimiter),
            Turn("assistant", self.exemplar_answer(exemplar), self.fewshot_delimiter),
        ]

    def exemplar_answer(self, exemplar: Doc) -> str:
        """The text that follows an exemplar's question; by default its target."""
        return str(self.target(exemplar))

    def questions(self, doc: Doc) -> list[str]:
        """The texts that end the document's prompts, one for each prompt."""
        return [self.question(doc)]

    @abstractmethod
    def question(self, doc: Doc) -> str:
        """The text that ends the prompt (lm-eval's doc_to_text); of an exemplar, the text before its answer."""

    @abstractmethod
    def target(self, doc: Doc) -> Any:
        """The gold answer (lm-eval's doc_to_target): a text, the index of a choice, or a list if several are right."""

    @abstractmethod
    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        """The document's requests, in the order in which `filtered` takes the responses.

        prompts: the whole prompt for each of `questions`.
        """

    @abstractmethod
    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Any]]:
        """Filter -> the answers that it made of the responses (lm-eval's filtered_resps)."""

    @abstractmethod
    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        """Metric -> value, from one filter's answers."""


def _positive(value: MetricValue) -> bool:
    """Whether a number is above 0, or one in a list is."""
    if isinstance(value, list):
        return any(map(_positive, value))
    return isinstance(value, int | float) and value > 0


def _each(choose: Callable[[Any, Any], Any], value: MetricValue, bound: Any) -> MetricValue:
    """`choose(value, bound)` of two numbers; of a list's numbers, each with the bound's own or the one number. Values
    of other kinds stay: an aggregation of the task's reads the text out of them."""
    if isinstance(value, list):
        bounds = bound if isinstance(bound, list) and len(bound) == len(value) else [bound] * len(value)
        return [_each(choose, one, own) for one, own in zip(value, bounds, strict=True)]
    numbers = isinstance(value, int | float) and isinstance(bound, int | float)
    return choose(value, bound) if numbers else value


@contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Puts `where` before each problem of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([f"{where}: {problem}" for problem in error.problems]) from error
