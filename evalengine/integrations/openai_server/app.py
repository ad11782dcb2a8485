"""The server's paths."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalengine.engine.stats import EngineStats
from evalengine.engine.text.grammar import Grammar
from evalengine.engine.thread import EngineThread
from evalengine.errors import ConfigError
from evalengine.integrations.openai_server.answering import (
    ClientGone,
    Mailbox,
    Submission,
    as_json,
    in_pieces,
    streamed,
    unless_gone,
)
from evalengine.integrations.openai_server.answers import CREATED, Writer, usage
from evalengine.integrations.openai_server.bodies import (
    SHORT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
    read_json,
)
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.model import MOST_TOKENIZED, ServedModel
from evalengine.integrations.openai_server.recorder import Recorder
from evalengine.integrations.openai_server.request_bodies import (
    ServerRequest,
    chat_request,
    check_counts,
    completion_request,
)
from evalengine.integrations.openai_server.settings import ServeSettings

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
logger = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)  # paths that need no key
GONE = 499  # nginx's status of a request whose client left
SHORT_ANSWER = 2048  # tokens: with twenty alternatives each they are written in 50 ms
SHORT_THREADS, LONG_THREADS = 4, 2  # that read and tokenize short and long bodies
MOST_COMPILING = 64  # grammars that wait to be compiled, each for seconds at most
Answer = Callable[[Request, bytes], Awaitable[Response]]


class Server:
    """The paths of one model. `app` is the ASGI application.

    Bodies are read, checked and tokenized, and long answers written, in threads, so that the event loop stays free.
    Short bodies have separate threads, so that they do not wait for long ones.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        settings: ServeSettings,
        api_key: str | None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.engine, self.settings, self.recorder = model, engine, settings, recorder
        self.writer, self.metrics = Writer(model), Metrics(engine)
        self._mailbox: Mailbox | None = None  # of the event loop, once it runs
        self._short = ThreadPoolExecutor(SHORT_THREADS, "short-requests")
        self._long = ThreadPoolExecutor(LONG_THREADS, "long-requests")
        self._compilers = ThreadPoolExecutor(1, "grammars")  # a slow grammar makes only other grammars wait
        self._num_compiling = 0
        self._key = None if api_key is None else api_key.encode()
        self.app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        posts: dict[str, Answer] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Answer] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.one_model,
            "/tokenizer_info": self.tokenizer_info,
            "/health": self.health,
            "/metrics": self.prometheus,
        }
        for path, answer in posts.items():  # plain routes: FastAPI's own read a function's parameters at each request
            self.app.add_route(path, self._answered(path, answer, True), ["POST"])
        for path, answer in gets.items():
            self.app.add_route(path, self._answered(path, answer, False), ["GET"])
        self.app.add_middleware(OriginForm)
        self.app.add_exception_handler(HTTPException, _not_a_path)
        self.app.add_exception_handler(404, _not_a_path)

    def _answered(self, path: str, answer: Answer, has_body: bool) -> Callable[[Request], Awaitable[Response]]:
        """The path's function: it checks the key, reads the body, and turns what is raised into an answer."""

        async def answered(request: Request) -> Response:
            begin = time.perf_counter()
            try:
                if path not in OPEN_PATHS:
                    self._check_key(request)
                body = await self._body(request) if has_body else b""
                response = await answer(request, body)
            except ConfigError as error:
                response = _refused(ApiError.of(error))
            except ApiError as error:
                response = _refused(error)
            except ClientGone:
                self.metrics.gone.inc()
                response = Response(status_code=GONE)
            except Exception:
                logger.exception("a request failed")
                response = _refused(ApiError(500, "the server failed; its log has why"))
            self.metrics.requests.labels(path, str(response.status_code)).inc()
            if has_body:
                self.metrics.seconds.labels(path).observe(time.perf_counter() - begin)
            return response

        return answered

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
            raise ApiError(401, "this server wants its API key: Authorization: Bearer KEY", None, "invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """The body. Raises ApiError for one that is too long or slow, ClientGone for half of one."""
        try:
            return await asyncio.wait_for(self._read(request), self.settings.client_seconds)
        except ClientDisconnect as error:
            raise ClientGone from error
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body did not come within {self.settings.client_seconds} s") from error

    async def _read(self, request: Request) -> bytes:
        parts, size = [], 0
        too_long = ApiError(413, f"the body is longer than {self.settings.max_body_mb} MiB")
        if int(request.headers.get("content-length", 0)) > self.settings.max_body:  # the protocol has read a number
            raise too_long
        async for part in request.stream():
            size += len(part)
            if size > self.settings.max_body:
                raise too_long
            parts.append(part)
        return b"".join(parts)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request, content: bytes) -> Response:
        return await self._run(request, *await self._in_thread(self._completion, content))

    async def chat(self, request: Request, content: bytes) -> Response:
        ask, headers = await self._in_thread(self._chat, content)
        return await self._run(request, ask, headers, await self._compiled(ask))

    async def _compiled(self, ask: ServerRequest) -> Grammar | None:
        """The ask's grammar, compiled. Raises ApiError."""
        if ask.grammar is None:
            return None
        if self._num_compiling >= MOST_COMPILING:
            raise ApiError(429, f"{self._num_compiling} grammars wait to be compiled already; come back later", None,
                           "rate_limit_exceeded")  # fmt: skip
        self._num_compiling += 1
        try:
            loop, compiled = asyncio.get_running_loop(), self.model.grammars.compiled
            count = len(ask.generations([*range(len(ask.choices))]))
            return await loop.run_in_executor(self._compilers, compiled, ask.grammar, count)
        finally:
            self._num_compiling -= 1

    def _in_thread(self, work: Callable[[bytes], T], content: bytes) -> Awaitable[T]:
        """`work(content)` outside the event loop."""
        pool = self._short if len(content) <= SHORT else self._long
        return asyncio.get_running_loop().run_in_executor(pool, work, content)

    def _completion(self, content: bytes) -> tuple[ServerRequest, dict[str, str]]:
        body = self._checked(CompletionBody, content)
        return self._with_headers(completion_request(body, self.model, self.settings))

    def _chat(self, content: bytes) -> tuple[ServerRequest, dict[str, str]]:
        body = self._checked(ChatBody, content)
        tools = None if body.tool_choice == "none" else body.tools
        prompt = self.model.templated(body.messages, tools, body.chat_template_kwargs)
        return self._with_headers(chat_request(body, prompt, self.model, self.settings))

    def _checked(self, kind: type[Body], content: bytes) -> Body:
        """The body that bytes are. Raises ApiError."""
        try:
            value = read_json(content)
        except ValueError as error:
            raise ApiError(400, f"the body cannot be read: {error}") from error
        check_counts(value, self.model, self.settings)
        body = read_body(kind, value)
        self.model.check_name(getattr(body, "model", None))
        return body

    def _with_headers(self, ask: ServerRequest) -> tuple[ServerRequest, dict[str, str]]:
        """A request, and the headers of its answer. Both take hashes of all prompts."""
        assert ask.id, "it is computed here, outside the event loop"
        return ask, {} if self.recorder is None else self.recorder.headers(ask)

    async def _run(
        self, request: Request, ask: ServerRequest, headers: Mapping[str, str], grammar: Grammar | None = None
    ) -> Response:
        if self.engine.num_open + len(ask.choices) > self.settings.max_open:
            raise ApiError(429, f"{self.engine.num_open} choices wait or run already; come back later", None,
                           "rate_limit_exceeded")  # fmt: skip
        if not self.engine.alive:
            raise ApiError(503, "the server is being shut down")
        if self.recorder is not None:
            self.recorder.check()
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        submission = Submission(ask, self.engine, self._mailbox, grammar)
        if ask.stream:
            return EventStream(self._events(submission), submission, self, headers)
        try:
            await unless_gone(submission.whole(), request.receive)
        finally:
            submission.close()
        self._keep(submission)
        if self.writer.num_tokens(ask, submission.outputs) <= SHORT_ANSWER:
            return self._whole(submission, headers)
        return await asyncio.get_running_loop().run_in_executor(self._long, self._whole, submission, headers)

    def _whole(self, submission: Submission, headers: Mapping[str, str]) -> Response:
        return _json(self.writer.whole(submission.ask, submission.scores, submission.outputs), headers=headers)

    async def _events(self, submission: Submission) -> AsyncIterator[bytes]:
        """A streamed answer's bytes. An error in the middle of it is its last event."""
        try:
            async for piece in streamed(submission, self.writer):
                yield b"data: " + as_json(piece) + b"\n\n"
            self._keep(submission)
        except ApiError as error:
            yield b"data: " + as_json(error.body) + b"\n\n"
            return
        yield b"data: [DONE]\n\n"

    def _keep(self, submission: Submission) -> None:
        """Records and counts an answer."""
        if self.recorder is not None:
            self.recorder.add(submission)
        counts = usage(submission.ask, submission.outputs)
        self.metrics.tokens.labels("prompt").inc(counts["prompt_tokens"])
        self.metrics.tokens.labels("answer").inc(counts["completion_tokens"])

    # -- the model, its tokenizer, and the server itself ---------------------------------------------------------------

    async def models(self, request: Request, _: bytes) -> Response:
        return _json({"object": "list", "data": [self._model]})

    async def one_model(self, request: Request, _: bytes) -> Response:
        self.model.check_name(request.path_params["name"])
        return _json(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        return {"id": self.model.name, "object": "model", "created": CREATED, "owned_by": "evalengine",
                "max_model_len": self.model.limits.max_model_len}  # fmt: skip

    async def tokenize(self, request: Request, content: bytes) -> Response:
        return await self._in_thread(self._tokenized, content)

    def _tokenized(self, content: bytes) -> Response:
        body = self._checked(TokenizeBody, content)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        text = body.prompt or ""
        if body.messages is not None:
            given = body.messages, body.tools, body.chat_template_kwargs, body.add_generation_prompt
            text = self.model.templated(*given)
        if len(text) > MOST_TOKENIZED:
            raise ApiError(400, f"a text of {len(text)} characters: at most {MOST_TOKENIZED} are tokenized", "prompt")
        ids = self.model.encoded(text, body.add_special_tokens)
        texts = {"token_strs": self.writer.tokens.texts(ids)} if body.return_token_strs else {}
        return _json({"count": len(ids), "max_model_len": self.model.limits.max_model_len, "tokens": ids, **texts})

    async def detokenize(self, request: Request, content: bytes) -> Response:
        return await self._in_thread(self._detokenized, content)

    def _detokenized(self, content: bytes) -> Response:
        return _json({"prompt": self.model.decoded(self._checked(DetokenizeBody, content).tokens)})

    async def tokenizer_info(self, request: Request, _: bytes) -> Response:
        return _json(self.model.tokenizer_info())

    async def health(self, request: Request, _: bytes) -> Response:
        if not self.engine.healthy:
            raise ApiError(503, "the engine does not run, or its last step failed; the server's log has why")
        if self.recorder is not None:
            self.recorder.check(thorough=True)
        return _json({"status": "ok"})

    async def prometheus(self, request: Request, _: bytes) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class OriginForm:
    """Takes a target that is a whole URI, as clients of a proxy send it (`GET http://host/v1/models`), for its path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := re.match("https?://[^/]*", scope["path"], re.I)):
            scope = {**scope, "path": scope["path"][found.end() :] or "/"}
        await self._app(scope, receive, send)


class EventStream(StreamingResponse):
    """A stream whose requests are dropped when it ends, however it ends; a client that takes nothing for too long ends
    it."""

    def __init__(
        self, events: AsyncIterator[bytes], submission: Submission, server: Server, headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._submission, self._server = submission, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self._server.settings.client_seconds

        async def in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), seconds)

        try:
            await super().__call__(scope, receive, in_time)
        except asyncio.TimeoutError:
            logger.warning("a client took nothing of its answer for %d s", seconds)
        finally:
            if self._submission.unfinished:
                self._server.metrics.gone.inc()
            self._submission.close()


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(in_pieces(value), status, headers, media_type="application/json")


def _refused(error: ApiError) -> Response:
    response = _json(error.body, error.status)
    if error.status == 429:
        response.headers["retry-after"] = "1"
    if error.status == 408:
        response.headers["connection"] = "close"  # the rest of the body may come for ever
    return response


async def _not_a_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = {404: "there is no such path here", 405: "this path takes another method"}
    response = _refused(ApiError(status, what.get(status, "the request cannot be answered")))
    if isinstance(error, HTTPException) and error.headers:  # `Allow` of a 405
        response.headers.update(error.headers)
    return response


class Metrics:
    """Counters of the requests, and the engine's own."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = CollectorRegistry()
        of = self._registry
        self.requests = Counter("evalengine_requests", "Requests", ["path", "status"], registry=of)
        self.seconds = Histogram("evalengine_request_seconds", "From a request's head to its answer, or its answer's "
                                 "beginning", ["path"], buckets=SECONDS, registry=of)  # fmt: skip
        self.tokens = Counter("evalengine_tokens", "Tokens of prompts and answers", ["kind"], registry=of)
        self.gone = Counter("evalengine_clients_gone", "Requests whose client left before the answer", registry=of)
        self._registry.register(_EngineGauges(engine))

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)


class _EngineGauges(Collector):
    """The engine's state at the moment of the question."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        scheduler, stats = engine.engine.scheduler, engine.engine.stats
        now = {
            "requests_open": (engine.num_open, "Choices and scores without an answer yet"),
            "sequences_running": (len(scheduler.running), "Sequences that hold pages"),
            "sequences_waiting": (len(scheduler.waiting), "Sequences that wait for room"),
            "kv_pages_free": (scheduler.block_manager.num_free_blocks, "Pages of the KV pool that are free"),
        }
        for item in fields(EngineStats):
            now[f"engine_{item.name}"] = (getattr(stats, item.name), "The engine's own counter since it was loaded")
        for name, (value, meaning) in now.items():
            yield GaugeMetricFamily(f"evalengine_{name}", meaning, value)
