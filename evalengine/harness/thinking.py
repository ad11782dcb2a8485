"""The thinking before each answer of a run whose model has a named end of thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalengine.engine.request import GenerateRequest
from evalengine.engine.text.thinking import end_of_thinking, part
from evalengine.harness.journal import JournalEntry
from evalengine.harness.plan import Plan
from evalengine.records.schema import RecordKey


@dataclass(frozen=True)
class Thought:
    """One generation's thinking."""

    text: str  # with the text of its end token; "" where the model did not think
    num_tokens: int
    truncated: bool  # the length limit came before the end of thinking


def thoughts(plan: Plan, answers: Mapping[RecordKey, JournalEntry], tokenizer: Any) -> dict[RecordKey, Thought]:
    """Request key -> the generation's thinking; empty where no end of thinking is named."""
    by_request = {}
    for item in plan.requests:
        if isinstance(item.request, GenerateRequest) and item.request.params.think_end_token is not None:
            end = end_of_thinking(tokenizer, item.request.params.think_end_token)
            assert end is not None
            by_request[item.key] = _thought(answers[item.key], tokenizer, end)
    return by_request


def _thought(answer: JournalEntry, tokenizer: Any, end: str | int) -> Thought:
    """The thinking of one generation. One that stops without an end of thinking did not think: it is all answer."""
    parts = part(tokenizer, answer.output_ids, end)
    if parts.ended or answer.finish_reason != "length":
        return Thought(parts.thinking, parts.num_tokens, False)
    return Thought(tokenizer.decode(answer.output_ids, skip_special_tokens=True), len(answer.output_ids), True)
