"""Jinja2 templates that make a document's texts, with lm-evaluation-harness's meaning (0.4.13, `utils.apply_template`).

A name that is not in the row is an error, a template's last line end stays, and a template that is a column's name
gives that column's value unchanged. Templates come from a user's file and run in Jinja2's sandbox, in a process with
limits first (`Task.needs_limits`); `random` and `lipsum`, which would write another text in every run, are refused.
"""

from __future__ import annotations

import ast
import re
import textwrap  # noqa: F401  # Jinja2 imports it late, which a forked process should not have to do
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, pass_context
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evalengine.util import limits

Row = dict[str, Any]

# The longest literal whose MemoryError means deep nesting, for which Python's parser raises it at once: parsing this
# many characters takes at most half of `limits.BYTES`.
SMALL_LITERAL = 1 << 20


def _refuse_random(*_: Any, **__: Any) -> None:
    raise TemplateError("it uses a random text, so no two runs would have the same prompts")


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)


def _unfolded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter as one that needs the context, which Jinja2 does not call at compile time, where no limits apply."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @wraps(function)
    def called(context: Context, *arguments: Any, **named: Any) -> Any:
        first = {None: (), "context": (context,), "eval_context": (context.eval_ctx,)}
        return function(*first.get(passed, (context.environment,)), *arguments, **named)

    return called


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})  # not computed at compile time, either; their results are the same


ENVIRONMENT = _Environment(undefined=StrictUndefined, keep_trailing_newline=True)
ENVIRONMENT.filters.update(regex_replace=_regex_replace, random=_refuse_random)
ENVIRONMENT.filters.update({name: _unfolded(function) for name, function in ENVIRONMENT.filters.items()})
ENVIRONMENT.globals["lipsum"] = _refuse_random


@lru_cache(1000)
def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """The template, which the tasks of a group mostly share, and the names that it reads. Raises TemplateError,
    RecursionError."""
    return ENVIRONMENT.from_string(source), frozenset(find_undeclared_variables(ENVIRONMENT.parse(source)))


def index_warning(task: str, text: str) -> str:
    """The warning that a template's digits are read as the index of a choice. task: its setting; text: the first
    document's."""
    return (
        f"{task}: doc_to_text writes digits alone ({text} for the first document), and lm-eval reads them as the "
        "index of a choice: the prompt is that choice; if you meant the digits, add a word ('Number: {{n}}')"
    )


def literal_warnings(task: str, choices: Any, setting: str = "doc_to_choice") -> Iterator[str]:
    """Yields a sentence if choices that are written out hold templates, which no rule of lm-eval's renders."""
    listed = [*choices.values()] if isinstance(choices, dict) else choices
    literal = [text for text in listed if isinstance(text, str) and "{{" in text] if isinstance(listed, list) else []
    if literal:
        yield (
            f"{task}: {setting} contains {literal[0][:60]!r}, scored unchanged: templates in a list are not "
            'rendered. Write the list as one template: "{{[a, b]}}"'
        )


class Field:
    """One of a task's template settings, such as `doc_to_text`: compiled once, then rendered for each row."""

    def __init__(self, setting: str, source: Any) -> None:
        """setting: its name, for messages. Raises ValueError if `source` is no template."""
        self.setting = setting
        self.source = source
        self._template: Template | None = None
        self.names: frozenset[str] = frozenset()  # the columns that the template reads
        # The last row, these columns of it if all are texts, and the text made of them.
        self._last: tuple[Row, list[str] | None, str] | None = None
        if isinstance(source, str):
            try:
                self._template, self.names = _compiled(source)
            except TemplateError as error:
                line = getattr(error, "lineno", None)
                where = f" (line {line})" if line else ""
                raise ValueError(f"{setting}: is no Jinja2 template: {error.message}{where}") from error
            except RecursionError as error:
                raise ValueError(f"{setting}: is nested too deeply") from error

    def is_column(self, columns: frozenset[str]) -> bool:
        return isinstance(self.source, str) and self.source in columns

    def render(self, row: Row) -> str:
        """The template's text for a row. Raises ValueError with the template's own error."""
        assert self._template is not None
        if self._last is not None and row is self._last[0]:  # a row is scored by several calls
            return self._last[2]
        # Texts alone are compared: 1 equals 1.0 and true, which are written otherwise.
        read = [value for name in self.names if type(value := row.get(name)) is str]
        comparable = len(read) == len(self.names)
        if comparable and self._last is not None and read == self._last[1]:  # descriptions mostly are all alike
            return self._last[2]
        try:
            with limits.named(self.setting):
                written = self._template.render(row)
            if len(written) > limits.CHARACTERS:
                raise ValueError(f"makes a text of more than {limits.CHARACTERS:,} characters")
            self._last = row, read if comparable else None, written
            return written
        except limits.LimitExceeded:
            raise
        except Exception as error:  # a template can raise whatever Python's own operations raise
            message = " ".join(str(error).split())[:200]
            raise ValueError(f"{self.setting}: {message or type(error).__name__}") from error

    def text(self, row: Row, columns: frozenset[str], *, counts: bool) -> Any:
        """lm-eval's doc_to_text: a text, or the index of the choice that it begins with.

        counts: whether digits alone mean such an index, as they do for a task that has choices.
        """
        if not isinstance(self.source, str):
            return self.source
        if self.is_column(columns):
            return self._column(row)
        written = self.render(row)
        return int(written) if counts and written.isdigit() else written

    def target(self, row: Row, columns: frozenset[str], *, counts: bool) -> Any:
        """lm-eval's doc_to_target: a text, the index of a choice, or a list of either where several are right."""
        value = self.text(row, columns, counts=counts)
        if not isinstance(self.source, str) or self.is_column(columns) or not isinstance(value, str):
            return value
        if len(value) >= 2 and value[0] == "[" and value[-1] == "]":
            try:
                return self._literal(value)
            except limits.LimitExceeded:
                raise
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                return value
        return value

    def choices(self, row: Row, columns: frozenset[str]) -> list[str]:
        """lm-eval's doc_to_choice: the answers to choose from. Raises ValueError where they are no list of texts."""
        answers = self._listed(row, columns)
        if not isinstance(answers, list) or not answers:
            raise ValueError(f"{self.setting}: gives {str(answers)[:80]!r}, not a list of answers")
        return answers

    def _listed(self, row: Row, columns: frozenset[str]) -> Any:
        if isinstance(self.source, dict):
            return [*self.source.values()]
        if not isinstance(self.source, str):
            return self.source
        if self.is_column(columns):
            return self._column(row)
        written = self.render(row)
        try:
            return self._literal(written)
        except limits.LimitExceeded:
            raise
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ValueError(f"{self.setting}: writes {written[:80]!r}, which is no list") from error

    def _literal(self, text: str) -> Any:
        """The value of a Python literal. Raises LimitExceeded, and what `ast.literal_eval` raises for other texts."""
        with limits.named(self.setting):
            try:
                return ast.literal_eval(text)
            except MemoryError as error:
                if len(text) > SMALL_LITERAL:
                    raise
                raise ValueError("is nested too deeply") from error

    def _column(self, row: Row) -> Any:
        if self.source not in row:
            raise ValueError(f"{self.setting}: the row has no column {self.source!r}")
        return row[self.source]
