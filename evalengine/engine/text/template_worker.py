"""Renders a chat template in its own process, whose time and memory end before the machine's do.

`evalengine.engine.text.chat_template` starts this file by its path, so it imports the standard library and jinja2 only.
It reads JSON lines and answers each with one. The first is {"template", "variables", "date", "limits"}; its answer has
the names that the template reads. Each further one is {"messages", "add_generation_prompt"}; its answer has the prompt.

The environment is that of transformers' `apply_chat_template` (tests/unit/test_chat_template.py compares the two),
but no text may change from run to run: the clock shows the given date, and random choices are refused.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")  # the address of an object that was printed instead of its content


class Unrepeatable(jinja2.exceptions.TemplateError):
    """The template would give another text in every run."""


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; its text stays as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        text: str = caller()
        return text


class TemplateDict:
    """The `dict` that a template can call: its constructor and `fromkeys`, nothing else of the class."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments, **named)


class TemplateNamespace(jinja2.utils.Namespace):
    """A namespace whose attributes do not begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:  # no `self`, so that `namespace(self=...)` works
        self, *rest = arguments
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute that begins with an underscore ({name!r})")


def environment(date: datetime) -> jinja2.Environment:
    """transformers' environment for chat templates, on a given day."""

    def raise_exception(message: Any) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse_random(*_: Any, **__: Any) -> None:
        raise Unrepeatable("it uses a random text, so no two runs would have the same prompts")

    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    jinja.filters["tojson"] = tojson
    jinja.filters["random"] = refuse_random
    jinja.globals.update(
        raise_exception=raise_exception,
        strftime_now=date.strftime,
        dict=TemplateDict(),
        namespace=TemplateNamespace,
        lipsum=refuse_random,
    )
    return jinja


def _without_addresses(text: str, messages: list[dict[str, Any]]) -> str:
    """The text as it is. Raises Unrepeatable if an object's address in memory, which changes with every process, is
    part of it."""
    for address in ADDRESS.findall(text):
        if not any(address in json.dumps(message, ensure_ascii=False) for message in messages):
            raise Unrepeatable("it prints an object's address in memory, which no run repeats")
    return text


def _answer(work: Any, limits: dict[str, int]) -> dict[str, Any]:
    """{"text": what `work` returns}, or {"error", "message"} if it fails or exceeds a limit."""
    signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # SIGPROF ends this process, whatever it is doing
    try:
        text = work()
        if len(text) > limits["characters"]:
            return {"error": "limit", "message": f"it made a text of more than {limits['characters']:,} characters"}
        text.encode("utf-8")
        return {"text": text}
    except MemoryError:
        return {"error": "limit", "message": f"it needs more than {limits['bytes'] >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "limit", "message": "it is nested too deeply, or calls itself without end"}
    except Unrepeatable as error:
        return {"error": "limit", "message": str(error)}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"{error.message} (line {error.lineno})"}
    except Exception as error:  # a template can raise whatever Python's own operations raise
        own = type(error) is jinja2.exceptions.TemplateError
        return {"error": "raised" if own else type(error).__name__, "message": str(error)[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answers until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the parent's to handle: this process ends with it
        signal.signal(number, signal.SIG_IGN)
    setup = json.loads(sys.stdin.readline())
    limits = setup["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled: list[jinja2.Template] = []

    def compile_template() -> str:
        """The names of the variables that the template reads, as JSON."""
        jinja = environment(datetime.fromisoformat(setup["date"]))
        compiled.append(jinja.from_string(setup["template"]))
        return json.dumps(sorted(jinja2.meta.find_undeclared_variables(jinja.parse(setup["template"]))))

    reply = _answer(compile_template, limits)
    while True:
        print(json.dumps(reply), flush=True)
        if not (line := sys.stdin.readline()):
            return
        question = json.loads(line)
        messages = question["messages"]
        arguments = {"tools": None, "documents": None, "add_generation_prompt": question["add_generation_prompt"]}
        variables = {**arguments, **setup["variables"], **question.get("variables", {})}
        reply = _answer(
            lambda messages=messages, variables=variables: _without_addresses(
                compiled[0].render(messages=messages, **variables), messages
            ),
            limits,
        )


if __name__ == "__main__":
    main()
