"""What a task's class says of the task: class variables, and the methods that a subclass may or must give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from evalengine.config.schema import TaskConfig
from evalengine.tasks.dataset import text_lines
from evalengine.tasks.documents import Doc, Shapes
from evalengine.tasks.fewshot import Chat, Turn
from evalengine.tasks.instance import Instance, OutputType, Response
from evalengine.tasks.metric import Aggregation, Metric, MetricValue


class TaskHooks(ABC):
    """Subclasses of `base.Task` give the class variables that have no value here, `question`, `target`, `requests`,
    `filtered` and `score`."""

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
    # what `instances` leaves in the task, nor where it talks to a process of its own. Each class says so for itself.
    forks: ClassVar[bool] = False
    target_delimiter: ClassVar[str] = " "
    fewshot_delimiter: ClassVar[str] = "\n\n"

    config: TaskConfig
    _chat: Chat | None  # renders messages through the model's chat template

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
    def metric_names(cls, config: TaskConfig) -> list[str]:
        """The metrics that a run of the task reports, as far as its configuration tells."""
        return [*cls.metrics]

    @classmethod
    def filter_names(cls, config: TaskConfig) -> tuple[str, ...]:
        """`filters`, as far as the configuration tells; lm-eval calls the absence of any "none"."""
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
        """The text between a prompt and a scored choice. It is empty after a chat template, which ends with white space
        of its own, unless `gen_prefix` follows the template and ends without any."""
        begun = self.config.gen_prefix
        return self.target_delimiter if self._chat is None or (begun and not begun[-1].isspace()) else ""

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
