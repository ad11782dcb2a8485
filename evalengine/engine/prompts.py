"""Reads the arguments of `LLM.generate` and `LLM.score`: texts, token ids, arrays, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, TypeVar

from evalengine.engine.submission import refused
from evalengine.errors import ConfigError
from evalengine.util.validation import integer, is_unicode, shown, token_ids

Prompt = str | list[int]
Message = Mapping[str, str]  # {"role": ..., "content": ...}
T = TypeVar("T")


def prompt_list(prompts: Any) -> list[Any]:
    """The prompts as a list. A single text or sequence of token ids is a batch of one; a two-dimensional array is a
    batch of its rows."""
    if isinstance(prompts, str):
        return [prompts]
    batch = items(prompts, "prompts")
    return [batch] if batch and all(integer(x) is not None for x in batch) else batch


def items(value: Any, name: str) -> list[Any]:
    """The items of any iterable but text, bytes, a mapping or a set, for which ConfigError is raised."""
    no_list = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set) or not isinstance(value, Iterable)
    if no_list or getattr(value, "ndim", 1) == 0:  # an array without dimensions claims to be iterable
        raise ConfigError(f"{name}={shown(value)}: must be a list")
    return list(value)


def text_or_ids(prompt: Any) -> str | list[int]:
    """The prompt as text or as a list of token ids. Raises ConfigError for anything else."""
    if isinstance(prompt, str):
        if not is_unicode(prompt):
            raise ConfigError(f"{shown(prompt)} holds half of a surrogate pair, which no tokenizer takes")
        return prompt
    ids = token_ids(prompt)
    if ids is None:
        raise ConfigError(f"{shown(prompt)} is neither text nor token ids (a sequence of integers)")
    return ids


def context_and_continuation(pair: Any) -> tuple[Prompt, Prompt]:
    """The two sides of a pair, both as text or both as token ids. Raises ConfigError for anything else."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ConfigError(f"{shown(pair)}: must be a context and a continuation")
    context, continuation = (text_or_ids(side) for side in pair)
    if isinstance(context, str) != isinstance(continuation, str):
        raise ConfigError("give both sides as text, or both as token ids")
    return context, continuation


def conversations(messages: Any) -> list[list[dict[str, str]]]:
    """The conversations as lists of messages; a single list of messages is a batch of one.

    Raises ConfigError for anything but texts under role and content.
    """
    batch = items(messages, "messages")
    if batch and all(isinstance(message, Mapping) for message in batch):
        batch = [batch]
    return each(batch, "conversation", lambda _, talk: _conversation(talk))


def _conversation(talk: Any) -> list[dict[str, str]]:
    messages = items(talk, "messages")
    if not messages:
        raise ConfigError("it has no messages")
    for message in messages:
        texts = isinstance(message, Mapping) and all(isinstance(v, str) and is_unicode(v) for v in message.values())
        if not texts or set(message) != {"role", "content"}:
            raise ConfigError(f"{shown(message)}: must be {{'role': ..., 'content': ...}}, both texts")
    return [dict(message) for message in messages]


def each(values: Iterable[Any], what: str, make: Callable[[int, Any], T]) -> list[T]:
    """`make(i, value)` of every value. Raises one ConfigError for all that are wrong, each as `what` and its number."""
    made: list[T] = []
    problems: list[str] = []
    for i, value in enumerate(values):
        try:
            made.append(make(i, value))
        except ConfigError as error:
            problems.extend(f"{what} {i}: {problem}" for problem in error.problems)
    if problems:
        raise refused(problems)
    return made
