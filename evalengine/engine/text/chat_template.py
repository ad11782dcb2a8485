"""The model's chat template: from messages to a prompt, within limits, and the same text on every day.

A template is a program that came with the model. It may read the clock (Llama 3.2's writes today's date), loop for ever
or allocate all memory, so it runs in a separate process (`template_worker`), for `chat_template_date`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.util.line_worker import LineWorker

# Far above what a real template takes: 1 ms, 20 MiB and some 10,000 characters for 25 exemplars.
LIMITS = {"seconds": 10, "bytes": 1 << 30, "characters": 1 << 24}
OPEN_END = "EVALENGINE_THE_MESSAGE_GOES_ON "  # the space at its end tells whether a template strips messages
WORKER = Path(__file__).with_name("template_worker.py")
# The names of days and months and the time zone must not change with the machine.
FIXED_ENVIRONMENT = {"TZ": "UTC", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Wording:
    """Phrases for a caller's errors: where the template was requested, and what the user can do instead."""

    where: str
    without_template: str
    without_system: str
    as_one_message: str


OF_A_RUN = Wording(
    where="apply_chat_template=true",
    without_template="apply_chat_template=false does without it",
    without_system="system_instruction=null and task.description=null send no system message",
    as_one_message="fewshot_as_multiturn=false sends one user message",
)


class ChatTemplate:
    """Renders messages as transformers' `apply_chat_template` does."""

    def __init__(
        self, tokenizer: Any, date: str, wording: Wording = OF_A_RUN, variables: Mapping[str, Any] | None = None
    ) -> None:
        """tokenizer: transformers'. date: what the template's clock shows, as YYYY-MM-DD. variables: further variables
        of the template, as `enable_thinking`; plain JSON values.

        Raises ConfigError without a template, and for one that is no template; the process starts with the first call.
        """
        if tokenizer is None or not tokenizer.chat_template:
            raise ConfigError(f"{wording.where}: the model's tokenizer has no chat template")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # the tokenizer has several templates, and none is called "default"
            raise ConfigError(f"{wording.where}: {' '.join(str(error).split())}") from error
        if not isinstance(template, str):
            raise ConfigError(f"{wording.where}: the chat template is no text; {wording.without_template}")
        special = {name: _plain(value) for name, value in tokenizer.special_tokens_map.items()}
        self._wording = wording
        template_variables = {**special, **(variables or {})}
        self._setup = {"template": template, "variables": template_variables, "date": date, "limits": LIMITS}
        self._worker: LineWorker | None = None
        self._reads: frozenset[str] = frozenset()

    def __call__(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt: with what opens the model's answer, or the messages alone.

        variables: of these messages alone, as `tools`; plain JSON values.
        Raises: ConfigError with what the template said.
        """
        self._begin(messages)
        question: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        if variables:
            question["variables"] = dict(variables)
        return self._result(self._ask(question), messages)

    def reads(self) -> frozenset[str]:
        """The names of the variables that the template reads. Raises: ConfigError for one that is no template."""
        self._begin([])
        return self._reads

    def _begin(self, messages: list[dict[str, Any]]) -> None:
        """Starts the worker process, if it does not run."""
        if self._worker is not None:
            return
        self._worker = _start()
        if "error" in (answer := self._ask(self._setup)):
            self._worker = None
            self._result(answer, messages)
        self._reads = frozenset(json.loads(answer["text"]))

    def continued(self, messages: list[dict[str, str]]) -> str:
        """The messages with the last one left open, for the model to go on with it
        (`continue_final_message=True`). Raises ConfigError with what the template said, or if it drops that message."""
        *before, last = messages
        text = self([*before, {**last, "content": last["content"] + OPEN_END}], add_generation_prompt=False)
        end = text.rfind(OPEN_END.rstrip())
        if end < 0 or last["content"].strip() not in text:
            raise ConfigError(
                f"the model's chat template drops the last message, so it cannot be continued; "
                f"{self._wording.without_template}"
            )
        rendered = text[:end]
        return rendered if text.startswith(OPEN_END, end) else rendered.rstrip()  # a stripping template drops the space

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; an "error" if it died over the question."""
        assert self._worker is not None
        if (answer := self._worker.ask(question)) is not None:
            return answer
        code, self._worker = self._worker.exit_code(), None
        return {"error": "limit", "message": _epitaph(code)}

    def _result(self, answer: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        if "error" not in answer:
            text: str = answer["text"]
            return text
        raise ConfigError(_sentence(answer["error"], _short(answer["message"]), messages, self._wording))


def _start() -> LineWorker:
    import jinja2
    import markupsafe

    # With -I Python imports nothing of the user's environment or folder; jinja2 may be in its own folder.
    places = sorted({str(Path(module.__file__ or "").parents[1]) for module in (jinja2, markupsafe)})
    code = f"import runpy, sys; sys.path += {places!r}; runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    return LineWorker(["-I", "-c", code], {**os.environ, **FIXED_ENVIRONMENT})


def _epitaph(code: int) -> str:
    """Why the worker died, by its exit code."""
    if code == -signal.SIGPROF:
        return f"it was not finished after {LIMITS['seconds']} s"
    return f"it ended the process that renders it (exit code {code}); it may need too much memory"


def _sentence(kind: str, said: str, messages: list[dict[str, Any]], wording: Wording) -> str:
    fixes = []
    if kind == "raised":
        if any(message["role"] == "system" for message in messages):
            fixes.append(wording.without_system)
        if sum(message["role"] != "system" for message in messages) > 1:
            fixes.append(wording.as_one_message)
    phrases = {"raised": f"refuses the messages: {said}", "syntax": f"is not valid: {said}", "limit": f"fails: {said}"}
    fixes.append(wording.without_template)
    return f"the model's chat template {phrases.get(kind, f'fails: {said} ({kind})')}; {', '.join(fixes)}"


def _plain(value: Any) -> Any:
    """Special tokens as plain texts: a tokenizer may hold them as objects."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _short(text: str) -> str:
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= 200 else f"{line[:200]}..."
