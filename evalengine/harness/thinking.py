"""The thinking before each answer of a run whose model has a named end of thinking, and which answers it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.request import GenerateRequest
from evalengine.engine.text.thinking import end_of_thinking, part
from evalengine.harness.plan import Plan
from evalengine.harness.requests import HarnessRequest
from evalengine.records.schema import Answer, Answers, RecordKey

TAIL = 256  # tokens at the end of a prompt in which an end of thinking is looked for


@dataclass(frozen=True)
class Thought:
    """One generation's thinking."""

    text: str  # with the text of its end token; "" where the model did not think
    num_tokens: int
    truncated: bool  # the length limit came before the end of thinking
    unended: bool = False  # the model stopped before the end of thinking

    @property
    def unfinished(self) -> bool:
        """Whether the generation has no answer, since its thinking did not end."""
        return self.truncated or self.unended


def thoughts(plan: Plan, answers: Answers, tokenizer: Any) -> dict[RecordKey, Thought]:
    """Request key -> the generation's thinking; empty where no end of thinking is named."""
    by_request = {}
    tasks = {item.task.name: item.task for item in plan.tasks}
    for item in plan.requests:
        if isinstance(item.request, GenerateRequest) and item.request.params.think_end_token is not None:
            end = end_of_thinking(tokenizer, item.request.params.think_end_token)
            assert end is not None
            thought = _thought(answers[item.key], tokenizer, end)
            if thought.unfinished:
                task = tasks.get(item.key[0])
                prefix = "" if task is None else task.gen_prefix(task.docs[item.key[1]])
                if _ended_before(item, tokenizer, end, prefix):
                    thought = Thought("", 0, False)
            by_request[item.key] = thought
    return by_request


def _thought(answer: Answer, tokenizer: Any, end: str | int) -> Thought:
    """The thinking of one generation, whose prompt does not end it."""
    parts = part(tokenizer, [*answer.output_ids], end)
    if parts.ended:
        return Thought(parts.thinking, parts.num_tokens, False)
    if answer.finish_reason != "length":
        return Thought("", 0, False, unended=True)
    return Thought(tokenizer.decode(answer.output_ids, skip_special_tokens=True), len(answer.output_ids), True)


def _ended_before(item: HarnessRequest, tokenizer: Any, end: str | int, prefix: str) -> bool:
    """Whether the prompt already ends the thinking, as chat templates write it for `enable_thinking=false`.

    prefix: the start of the answer, which the prompt may hold after that end.
    """
    before = part(tokenizer, [*item.prompt_ids[-TAIL:]], end)
    return before.ended and before.answer.strip() in ("", prefix.strip())


def uncredited(thoughts: Mapping[RecordKey, Thought], config: Config) -> Set[RecordKey]:
    """The generations that get no credit: their thinking did not end, so they contain no answer."""
    if config.score_unfinished_thinking:
        return frozenset()
    return {key for key, thought in thoughts.items() if thought.unfinished}


def answers_alone(answers: Answers, denied: Set[RecordKey]) -> Answers:
    """The answers, with the empty text for those in `denied`."""
    if not denied:
        return answers
    return {key: replace(entry, text="") if key in denied else entry for key, entry in answers.items()}
