"""Checks of a choice's index, and the documents of HellaSwag."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from evalengine.tasks.rows import Doc


def checked_gold(gold: int, choices: list[str]) -> int:
    """`gold`. Raises ValueError if it is the index of none of the choices, or if a choice is no text."""
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise ValueError(f"choice {number} is {json.dumps(choice)[:80]}, which is no text")
    if not 0 <= gold < len(choices):
        raise ValueError(f"gold answer {gold} is not one of {len(choices)} choices")
    return gold


def whole_number(label: Any) -> int:
    """A label like "3" or 3. Raises ValueError for any other: `int` would cut 3.7."""
    if isinstance(label, int) or (isinstance(label, str) and re.fullmatch(r"-?[0-9]{1,9}", label)):
        return int(label)
    raise ValueError(f"its label {json.dumps(label)[:80]} is no whole number")


def hellaswag(row: Doc) -> Doc:
    """HellaSwag's document of a row. Raises ValueError for an ending or a label that cannot be used."""
    for number, ending in enumerate(row["endings"]):
        if not isinstance(ending, str):
            raise ValueError(f"ending {number} is {json.dumps(ending)[:80]}, which is no text")
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {
        **row,
        "query": clean_wikihow(f"{row['activity_label']}: {context}"),
        "choices": [clean_wikihow(ending) for ending in row["endings"]],
        "gold": whole_number(row["label"]),
    }


def clean_wikihow(text: str) -> str:
    """Drops the WikiHow markup: "[title]" becomes a full stop, other [tags] are cut, double spaces are halved once."""
    text = text.strip().replace(" [title]", ". ")
    return "\n".join(with_enclosed(line, "[", "]", lambda tag: "") for line in text.split("\n")).replace("  ", " ")


def with_enclosed(text: str, opening: str, closing: str, changed: Callable[[str], str]) -> str:
    r"""The text with `changed` of what stands between two marks in place of it and them.

    lm-eval's re.sub(r"\[.*?\]", "", line) and its like do the same, in quadratic or cubic time where marks stay open.
    """
    parts, end = [], 0
    while (start := text.find(opening, end)) >= 0 and (stop := text.find(closing, start + 1)) >= 0:
        parts += [text[end:start], changed(text[start + 1 : stop])]
        end = stop + 1
    return "".join([*parts, text[end:]])
