"""From the engine's outputs to OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalengine.engine.request import RequestOutput
from evalengine.engine.schedule.sequence import Top
from evalengine.engine.text.detokenizer import end_of_thinking, part
from evalengine.integrations.openai_server.model import ServedModel
from evalengine.integrations.openai_server.request_bodies import Choice, ServerRequest
from evalengine.integrations.openai_server.token_texts import Offsets, TokenTexts
from evalengine.integrations.openai_server.tool_calls import entries

# Seconds since 1970 in OpenAI's shape. An answer says nothing of when it was computed: equal requests, equal bytes.
CREATED = 0


@dataclass(frozen=True)
class Scored:
    """Tokens with their logprobs, of which a prompt's first has none, and their alternatives, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top: Sequence[Top | None]

    @classmethod
    def of(cls, output: RequestOutput, first: int | None = None) -> Scored:
        """An output's tokens; first: the token before them, which has no logprob."""
        values: list[float | None] = plain(output.logprobs)  # type: ignore[assignment]  # a list of floats is one
        top: list[Top | None] = list(output.top_logprobs or [{} for _ in output.token_ids])
        if first is None:
            return cls(output.token_ids, values, top)
        return cls([first, *output.token_ids], [None, *values], [None, *top])

    def __add__(self, other: Scored) -> Scored:
        return Scored([*self.token_ids, *other.token_ids], [*self.logprobs, *other.logprobs], [*self.top, *other.top])


class Writer:
    """Writes the answers of one model."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self.tokens = model, TokenTexts(model.tokenizer)

    def whole(
        self, ask: ServerRequest, scores: Mapping[int, RequestOutput], outputs: Mapping[int, RequestOutput]
    ) -> dict[str, Any]:
        """The whole answer. scores: prompt -> its logprobs; outputs: choice -> its generation."""
        choices = [self._choice(ask, choice, scores.get(choice.prompt), outputs.get(choice.index))
                   for choice in ask.choices]  # fmt: skip
        return {**self.head(ask), "choices": choices, "usage": usage(ask, outputs)}

    def num_tokens(self, ask: ServerRequest, outputs: Mapping[int, RequestOutput]) -> int:
        """The tokens that the whole answer shows: of the prompts, once for each choice, and of the generations."""
        shows_prompts = ask.echo or ask.token_ids or ask.scores_prompts
        prompts = ask.n * sum(map(len, ask.prompts)) if shows_prompts else 0
        return prompts + sum(len(output.token_ids) for output in outputs.values())

    def head(self, ask: ServerRequest, chunk: bool = False) -> dict[str, Any]:
        """The fields before the choices of an answer, or of a chunk of a streamed one."""
        kind = "chat.completion" if ask.chat else "text_completion"
        return {
            "id": ask.id,
            "object": f"{kind}.chunk" if chunk and ask.chat else kind,
            "created": CREATED,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "seed": ask.seed,
        }

    def _choice(
        self, ask: ServerRequest, choice: Choice, score: RequestOutput | None, output: RequestOutput | None
    ) -> dict[str, Any]:
        prompt = ask.prompts[choice.prompt]
        of_prompt = Scored(prompt[:1], [None], [None]) if score is None else Scored.of(score, prompt[0])
        written: dict[str, Any] = {"index": choice.index}
        reason = "length" if output is None else str(output.finish_reason)
        if ask.chat:
            assert output is not None
            message, reason = self.called(ask, choice.index, output)
            written["message"] = {"role": "assistant", **message}
        else:
            given = ask.texts[choice.prompt]
            before = "" if not ask.echo else self.model.decoded(prompt) if given is None else given
            written["text"] = before + ("" if output is None else output.text)
        scored = Scored([], [], []) if output is None else Scored.of(output)
        offsets = []
        if ask.alternatives is not None and not ask.chat:
            offsets = [len(before) + place for place in Offsets(self.tokens, True).more(scored.token_ids, True)]
            if ask.echo:
                if given is None:
                    offsets = Offsets(self.tokens, False).more(prompt, True) + offsets
                else:
                    offsets = self.tokens.offsets_in(given, prompt) + offsets
            offsets = within(offsets, written["text"])
        written["logprobs"] = self.logprobs(ask, of_prompt + scored if ask.echo else scored, offsets)
        written["finish_reason"] = reason
        if ask.prompt_alternatives is not None:
            written["prompt_logprobs"] = self._prompt_logprobs(of_prompt, ask.prompt_alternatives)
        if ask.token_ids:
            written["prompt_token_ids"] = prompt
            written["token_ids"] = [] if output is None else output.token_ids
        return written

    def message(self, output: RequestOutput) -> dict[str, Any]:
        """A chat's message: its content and, of a model whose end of thinking is known, what it thought before."""
        end = end_of_thinking(self.model.tokenizer, self.model.think_end)
        if end is None:
            return {"content": output.text}
        parts = part(self.model.tokenizer, output.token_ids, end)
        if not parts.ended and output.finish_reason == "length":  # the limit came before the end of the thinking
            thought, answer = self.model.tokenizer.decode(output.token_ids, skip_special_tokens=True), ""
        else:
            thought, answer = parts.thinking, output.text
        return {"content": answer, "reasoning_content": _without_marks(thought, self.model.think_end) or None}

    def called(self, ask: ServerRequest, index: int, output: RequestOutput) -> tuple[dict[str, Any], str]:
        """A chat's message with the tools that it calls, and why it ended; index: its choice's."""
        thinks = ask.params is not None and ask.params.think_end_token is not None
        message = self.message(output) if thinks else {"content": output.text}
        reason = str(output.finish_reason)
        if not ask.tools or self.model.tool_format is None:
            return message, reason
        raw = self.model.tokenizer.decode(output.token_ids, skip_special_tokens=False)
        content, calls = self.model.tool_format.calls(message["content"], raw, ask.tools)
        if not calls:
            return message, reason
        message |= {"content": content or None, "tool_calls": entries(calls, f"{ask.id} {index}")}
        return message, "tool_calls" if reason == "stop" else reason

    def logprobs_of(self, ask: ServerRequest, output: RequestOutput) -> dict[str, Any] | None:
        """The logprobs of one generation, where they are wanted."""
        return self.logprobs(ask, Scored.of(output))

    def logprobs(self, ask: ServerRequest, scored: Scored, offsets: Sequence[int] = ()) -> dict[str, Any] | None:
        """Logprobs in the shape of the endpoint, where they are wanted. offsets: of a completion's tokens."""
        if ask.alternatives is None:
            return None
        return self._chat_logprobs(ask, scored) if ask.chat else self._completion_logprobs(ask, scored, offsets)

    def _completion_logprobs(self, ask: ServerRequest, scored: Scored, offsets: Sequence[int]) -> dict[str, Any]:
        texts = self.tokens.texts(scored.token_ids)
        top = [None if alternatives is None or value is None
               else self._alternatives(alternatives, ask.alternatives or 0, text, value)
               for alternatives, value, text in zip(scored.top, scored.logprobs, texts, strict=True)]  # fmt: skip
        return {
            "tokens": texts,
            "token_logprobs": list(scored.logprobs),
            "top_logprobs": top,
            "text_offset": [*offsets],
        }

    def _alternatives(self, top: Top, most: int, text: str, value: float) -> dict[str, float]:
        """Text -> logprob, best first, and the token itself, as OpenAI has it. Of alternatives that are written alike
        the best one is left."""
        found: dict[str, float] = {}
        some = list(top.items())[:most]
        for name, (_, logprob) in zip(self.tokens.texts([token for token, _ in some]), some, strict=True):
            found.setdefault(name, logprob)
        found.setdefault(text, value)
        return found

    def _chat_logprobs(self, ask: ServerRequest, scored: Scored) -> dict[str, Any]:
        content = []
        for token, logprob, top in zip(scored.token_ids, scored.logprobs, scored.top, strict=True):
            some = list((top or {}).items())[: ask.alternatives]
            content.append({**self._token(token, logprob), "top_logprobs": [self._token(*one) for one in some]})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        (raw,), (text,) = self.tokens.of([token]), self.tokens.texts([token])
        return {"token": text, "logprob": logprob, "bytes": [*raw]}

    def _prompt_logprobs(self, scored: Scored, most: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: of each token but the first, token id -> logprob, rank and text. The rank of a
        token that is none of the alternatives is not known."""
        written: list[dict[str, Any] | None] = []
        for token, logprob, top in zip(scored.token_ids, scored.logprobs, scored.top, strict=True):
            if logprob is None:
                written.append(None)
                continue
            ranked = [*(top or {})]
            some = dict(list((top or {}).items())[:most])
            ids = [*some] if token in some else [*some, token]
            texts = self.tokens.texts(ids)
            written.append({
                str(one): {"logprob": some.get(one, logprob), "rank": ranked.index(one) + 1 if one in ranked else None,
                           "decoded_token": text}
                for one, text in zip(ids, texts, strict=True)
            })  # fmt: skip
        return written


def within(offsets: Sequence[int], text: str) -> list[int]:
    """Offsets of tokens in a text of which a stop string may have cut off the end: at most the text's length."""
    return [min(place, len(text)) for place in offsets]


def plain(logprobs: np.ndarray) -> list[float]:
    """float32 as Python's floats, which JSON writes so that reading gives the same float32 again."""
    values: list[float] = logprobs.tolist()
    return values


def usage(ask: ServerRequest, outputs: Mapping[int, RequestOutput]) -> dict[str, int]:
    """The tokens of the prompts, each once, and of the answers."""
    prompts = sum(map(len, ask.prompts))
    answers = sum(len(outputs[choice.index].token_ids) for choice in ask.choices if choice.index in outputs)
    return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}


def _without_marks(thought: str, end: str | int | None) -> str:
    """A thinking without the tags around it."""
    if isinstance(end, str):
        thought = thought.removesuffix(end).strip()
        if end.startswith("</"):
            thought = thought.removeprefix("<" + end[2:])
    return thought.strip()
