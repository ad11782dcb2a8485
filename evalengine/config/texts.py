r"""What `\n` means in texts that become part of a prompt or stop an answer, and where it cannot be meant.

A shell has no escapes in its quotes, and Hydra's grammar has none for `\n`: `task.description='Solve.\n\n'` would put a
backslash and an n into every prompt, and `task.generation.until=["\n\n"]` would stop none. So the command line's texts
are read as people mean them. YAML and Python have quoting of their own, `"\n"`; where a text of theirs still holds the
two characters, it is refused. LaTeX's commands stay as they are, and so does Jinja's code, whose texts Jinja reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

TEXTS = (  # settings whose values, at any depth, are such texts
    *("description", "gen_prefix", "until", "doc_to_text", "doc_to_target", "doc_to_choice"),
    *("target_delimiter", "fewshot_delimiter", "system_instruction", "think_end_token", "chat_template_args"),
)
LATEX = (  # its commands that begin with \n; those with \r and \t are too many, and small letters follow these
    "abla|e|eq|eg|u|ot|otin|earrow|warrow|ewline|ewcommand|oindent|onumber|exists|leq|geq|mid|subseteq|supseteq"
)
# Jinja's code, which holds no other beginning of code, so that no text takes minutes; or an escape.
TOKEN = re.compile(
    r"\{\{(?:(?!\{\{).)*?\}\}|\{%(?:(?!\{%).)*?%\}"
    rf"|(?<!\\)(?P<slashes>\\\\?)(?P<letter>n(?!(?:{LATEX})(?![A-Za-z]))|[rt](?![a-z]))",
    re.DOTALL,
)
MEANT = {"n": "\n", "r": "\r", "t": "\t"}


def is_text(name: str) -> bool:
    """Whether a setting's value is such a text, or holds some."""
    return name.endswith("judge.template") or not {*name.split(".")}.isdisjoint(TEXTS)


def read_texts(node: Any, typed: Set[str], problems: list[str], where: str = "") -> Any:
    r"""A copy of the composed settings with the command line's `\n` read, and `\\n` as a backslash and an n.

    typed: the names of the settings that the command line sets. Each other text that holds a `\n` adds a sentence to
    `problems`.
    """
    if isinstance(node, dict):
        below = {name: f"{where}.{name}" if where else str(name) for name in node}
        return {name: read_texts(value, typed, problems, below[name]) for name, value in node.items()}
    if isinstance(node, list):
        return [read_texts(value, typed, problems, where) for value in node]
    if not isinstance(node, str) or not is_text(where):
        return node
    if where in typed:
        return TOKEN.sub(_meant, node)
    problems.extend(escape_problems(node, where, r'YAML reads \n in double quotes, as "\n", and in no others'))
    return node


def escape_problems(text: str, where: str, cure: str) -> Iterator[str]:
    r"""Yields a sentence if the text holds a `\n`, `\r` or `\t` of two characters."""
    for found in TOKEN.finditer(text):
        if found["slashes"] == "\\":
            near = text[max(0, found.start() - 20) : found.end() + 10].replace("\n", " ")
            yield f"{where}: in {near!s} the {found[0]} is two characters, a backslash and {found['letter']}; {cure}"
            return


def _meant(found: re.Match[str]) -> str:
    """The meaning of an escape: a doubled backslash is one. Jinja's code has its own rules."""
    if not found["letter"]:
        return found[0]
    return MEANT[found["letter"]] if found["slashes"] == "\\" else found[0][1:]
