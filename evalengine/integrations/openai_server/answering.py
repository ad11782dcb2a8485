"""Runs one request on the engine: whole, or token by token; a client that is gone is dropped."""

from __future__ import annotations

import asyncio
import json
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from evalengine.engine.execute.processing import DEAD_END
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.schedule.sequence import Top
from evalengine.engine.text.grammar import Grammar
from evalengine.engine.thread import EngineEnded, EngineFailure, EngineThread, Event, NewTokens
from evalengine.integrations.openai_server.answers import Scored, Writer, plain, usage, within
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.request_bodies import Choice, ServerRequest
from evalengine.integrations.openai_server.token_texts import GrowingText, Offsets, next_part

T = TypeVar("T")
PIECE = 1 << 14  # elements of a list that are written at once, in some milliseconds


class ClientGone(Exception):
    """The client closed its connection before its answer was there."""


class Mailbox:
    """Carries the engine thread's events into an event loop, which is woken once for all events of a step: waking it is
    a system call, for which the engine's thread would wait each time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._pending: list[tuple[asyncio.Queue[Event], Event]] = []

    def put(self, to: asyncio.Queue[Event], event: Event) -> None:
        """Called in any thread."""
        with self._lock:
            is_first = not self._pending  # else the loop has been woken already, and has yet to empty the box
            self._pending.append((to, event))
        if is_first:
            with suppress(RuntimeError):  # the loop is closed: the server ended without waiting
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            events, self._pending = self._pending, []
        for to, event in events:
            to.put_nowait(event)


class Submission:
    """One request's engine requests. `close` drops those that still run."""

    def __init__(
        self, ask: ServerRequest, engine: EngineThread, mailbox: Mailbox | None = None, grammar: Grammar | None = None
    ) -> None:
        """mailbox: of the event loop that runs, shared by its requests; None: one of its own. grammar: the compiled one
        of the ask, referenced here so that the engine does not compile it."""
        self.grammar = grammar
        self.ask, self._engine = ask, engine
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._mailbox = mailbox or Mailbox(asyncio.get_running_loop())
        self._open: set[int] = set()
        self.scores: dict[int, RequestOutput] = {}  # prompt -> the logprobs of its tokens
        self.outputs: dict[int, RequestOutput] = {}  # choice -> its generation

    async def whole(self) -> None:
        """Answers everything. Raises ApiError if the engine fails."""
        scores = self.ask.scores(self._engine.new_ids(len(self.ask.prompts)))
        self._submit([*scores.values()])  # first: the generations then find the prompts in the prefix cache
        self.scores = await self._outputs({request.request_id: place for place, request in scores.items()})
        generations = self.ask.generations(self._engine.new_ids(len(self.ask.choices)))
        self._submit([*generations.values()])
        answered = await self._outputs({request.request_id: place for place, request in generations.items()})
        if generations:
            self.outputs = {choice.index: answered[self.ask.answered_by(choice)] for choice in self.ask.choices}

    async def _outputs(self, places: Mapping[int, int]) -> dict[int, RequestOutput]:
        """Place -> output, once all are there. places: request id -> place."""
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(places):
            event = await self._event()
            if isinstance(event, RequestOutput):
                outputs[places[event.request_id]] = event
        return outputs

    async def tokens(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, new tokens or the output) as they come."""
        generations = self.ask.generations(self._engine.new_ids(len(self.ask.choices)))
        places = {request.request_id: place for place, request in generations.items()}
        self._submit([*generations.values()], tokens=True)
        while self._open:
            event = await self._event()
            yield places[event.request_id], event

    async def _event(self) -> Event:
        event = await self._events.get()
        if isinstance(event, NewTokens):
            return event
        self._open.discard(event.request_id)
        if isinstance(event, EngineFailure):
            if isinstance(event.error, EngineEnded):
                raise ApiError(503, "the server is being shut down")
            raise ApiError(500, "the engine failed over a step that this request was part of; the server's log has why")
        if event.error is not None and event.error.startswith(DEAD_END):
            param = None if self.ask.grammar is None else self.ask.grammar.param
            raise ApiError(400, f"{param}: {event.error}", param)
        if event.error is not None:
            raise ApiError(500, f"the model gives no finite answer: {event.error}")
        return event

    def _submit(self, requests: Sequence[Request], tokens: bool = False) -> None:
        if requests:
            self._open |= {request.request_id for request in requests}
            self._engine.submit(requests, partial(self._mailbox.put, self._events), tokens)

    @property
    def unfinished(self) -> bool:
        """Whether some of it still runs."""
        return bool(self._open)

    def close(self) -> None:
        """Drops what still runs."""
        if self._open:
            self._engine.drop(self._open)
            self._open = set()


async def unless_gone(work: Awaitable[T], receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> T:
    """Return the work's result. Raises ClientGone as soon as the client's connection is closed; the work is cancelled
    then.

    receive: of the request, whose body has been read.
    """

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(working, gone, return_exceptions=True)


class Growing:
    """One choice of a stream: its tokens so far, and the parts of them that have been given."""

    def __init__(self, ask: ServerRequest, choice: Choice, writer: Writer) -> None:
        self._ask, self._choice, self._writer = ask, choice, writer
        assert ask.params is not None
        calls = writer.model.tool_format if ask.tools else None
        opening = () if calls is None or calls.opening is None else (calls.opening,)
        self._text = GrowingText(writer.model.tokenizer, (*ask.params.stop, *opening))
        thinks = ask.chat and writer.model.think_end is not None
        self._whole_at_the_end = thinks or (calls is not None and not opening)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[Top] = []
        self._offsets = Offsets(writer.tokens, True)
        self._given = 0  # tokens whose text has been looked at
        self._scored = 0  # tokens whose logprobs have been given
        self.output: RequestOutput | None = None

    def add(self, event: Event) -> None:
        """Adds new tokens, or the whole output."""
        if isinstance(event, RequestOutput):
            self.output = event
            self._ids, self._logprobs = list(event.token_ids), plain(event.logprobs)
            self._top = event.top_logprobs or [{} for _ in self._ids]
        elif isinstance(event, NewTokens):
            self._ids += event.token_ids
            self._logprobs += event.logprobs
            self._top += event.top

    def parts(self) -> list[dict[str, Any]]:
        """The parts that can be given now. Which they are depends on the tokens alone, not on when they came."""
        parts = []
        unfinished = len(self._ids) - (self.output is not None)  # the last token's part tells how the choice ended
        while (end := next_part(self._given)) <= unfinished:
            text = "" if self._whole_at_the_end else self._text.more(self._ids[:end])
            parts += self._part(end, {"content": text} if text else {}, None)
        if self.output is not None:
            parts += self._last(self.output)
        return parts

    def _last(self, output: RequestOutput) -> list[dict[str, Any]]:
        if not self._ask.chat:
            return self._part(len(self._ids), {"content": self._text.rest(output.text)}, output.finish_reason)
        message, reason = self._writer.called(self._ask, self._choice.index, output)
        thought, content = message.get("reasoning_content"), message["content"] or ""
        parts = [self._written({"reasoning_content": thought}, None, None)] if thought else []
        delta = {"content": content if self._whole_at_the_end else self._text.rest(content)}
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
        return parts + self._part(len(self._ids), {**delta, **({"tool_calls": calls} if calls else {})}, reason)

    def _part(self, end: int, delta: dict[str, Any], reason: str | None) -> list[dict[str, Any]]:
        """The part with the text of the tokens before number `end`; none if it would say nothing."""
        self._given = end
        offsets: list[int] = []
        if not self._ask.chat and self._ask.alternatives is not None:
            offsets = self._offsets.more(self._ids[:end], ended=reason is not None)
            if reason is None:  # tokens whose text is held back wait for it: a stop string may yet cut it off
                end = max(self._scored, bisect_right(offsets, len(self._text.given)))
            offsets = within(offsets, self._text.given)
        own = slice(self._scored, end)
        self._scored = end
        scored = Scored(self._ids[own], self._logprobs[own], self._top[own])
        logprobs = self._writer.logprobs(self._ask, scored, offsets[own])
        if not delta and (logprobs is None or own.start == own.stop) and reason is None:
            return []
        return [self._written(delta, logprobs, reason)]

    def _written(self, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        said = {"delta": delta} if self._ask.chat else {"text": delta.get("content", "")}
        return {"index": self._choice.index, **said, "logprobs": logprobs, "finish_reason": reason}


async def streamed(submission: Submission, writer: Writer) -> AsyncIterator[dict[str, Any]]:
    """The pieces of a streamed answer: the choices one after another, so that the pieces are the same at any load."""
    ask = submission.ask
    growing = {choice.index: Growing(ask, choice, writer) for choice in ask.choices}
    answers: defaultdict[int, list[int]] = defaultdict(list)  # a generation's choice -> all choices that it answers
    for choice in ask.choices:
        answers[ask.answered_by(choice)].append(choice.index)
    left = [*growing]
    started = False
    head = writer.head(ask, chunk=True)
    async for place, event in submission.tokens():
        for index in answers[place]:
            growing[index].add(event)
        while left:
            if ask.chat and not started:
                role = {"index": left[0], "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                yield {**head, "choices": [{**role, "finish_reason": None}]}
                started = True
            one = growing[left[0]]
            for part in one.parts():
                yield {**head, "choices": [part]}
            if one.output is None:
                break
            submission.outputs[left.pop(0)] = one.output
            started = False
    if ask.include_usage:
        yield {**head, "choices": [], "usage": usage(ask, submission.outputs)}


def as_json(value: Any) -> bytes:
    """A value as the bytes of an answer. Floats are written so that reading gives the same ones again."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def in_pieces(value: Any) -> bytes:
    """`as_json`, which does not let other threads run, piece by piece for long lists."""
    if isinstance(value, dict) and any(isinstance(inner, list | dict) for inner in value.values()):
        return b"{%s}" % b",".join(as_json(name) + b":" + in_pieces(inner) for name, inner in value.items())
    if isinstance(value, list) and len(value) > 1 and isinstance(value[-1], dict):
        return b"[%s]" % b",".join(map(in_pieces, value))
    if isinstance(value, list) and len(value) > PIECE:
        return b"[%s]" % b",".join(as_json(value[at : at + PIECE])[1:-1] for at in range(0, len(value), PIECE))
    return as_json(value)
