"""An endpoint that is somebody else's: it answers otherwise now and then, refuses, fails, and breaks off."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fastapi import FastAPI, Request, Response


class Fake:
    """Answers sums ("What is 3 + 4?"). `app` is the ASGI application; `asked` counts requests by their body."""

    def __init__(self, wrong_every: int = 0, fail_first: int = 0, key: str | None = None, flips: float = 0.0,
                 seconds: float = 0.02, tells: str = "", cut: int = -1) -> None:  # fmt: skip
        """wrong_every: of the asks of one request, every so manieth has another answer. fail_first: every request fails
        so often before it is answered, by a status of its own. key: the one that is asked for. flips: the chance that
        an answer is another one, drawn from the request and how often it was asked. seconds: before an answer. tells:
        what every answer and error holds besides. cut: answers to sums up to this were cut at the limit."""
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._wrong_every, self._fail_first, self._key = wrong_every, fail_first, key
        self.hold_after: int | None = None  # answers, behind which requests wait until this is None again
        self._flips, self._seconds, self._tells, self._cut = flips, seconds, tells, cut
        self.app = FastAPI()
        self.app.add_api_route("/v1/completions", self.answer, methods=["POST"], response_model=None)
        self.app.add_api_route("/v1/chat/completions", self.answer, methods=["POST"], response_model=None)

    async def answer(self, request: Request) -> Any:
        import asyncio

        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self._seconds)
        while self.hold_after is not None and len(self.bodies) >= self.hold_after:
            await asyncio.sleep(0.01)
        with self._lock:
            self.at_once -= 1
        if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
            return Response(json.dumps({"error": {"message": f"a wrong key {self._tells}"}}), 401)
        body = await request.json()
        text = body.get("prompt") or body["messages"][-1]["content"]
        self.asked[text] += 1
        self.bodies.append(body)
        failures = self.asked[text]
        if failures <= self._fail_first:
            status = (429, 500, 503)[failures % 3]
            return Response('{"error": {"message": "later"}}', status, {"retry-after": "0"})
        if "unanswerable" in text:
            return Response('{"error": {"message": "this one never"}}', 501)
        answered = self.asked[text] - self._fail_first
        numbers = [int(word) for word in text.replace("?", " ").split() if word.isdecimal()]
        said = str(sum(numbers[-2:]))
        # By the request's own count, so that it does not matter in which order they come.
        if self._wrong_every and sum(numbers[-2:]) % 2 and answered % self._wrong_every == 0:
            said = "nothing"
        if random.Random(f"{text} {answered}").random() < self._flips:
            said = "another"
        said += self._tells
        message = {"message": {"role": "assistant", "content": said}} if "messages" in body else {"text": said}
        choice = {"index": 0, **message, "finish_reason": "length" if sum(numbers) <= self._cut else "stop"}
        return {"id": "x", "choices": [choice], "system_fingerprint": f"fp_1{self._tells}",
                "usage": {"completion_tokens": 1, "told": self._tells}}  # fmt: skip


@contextmanager
def scripted(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """The address of an endpoint whose responses may be no valid JSON. answer: prompt -> (status, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, content = answer(body.get("prompt") or body["messages"][-1]["content"])
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answered(text: str | None, **of_choice: Any) -> tuple[int, bytes]:
    """A chat's response with this content."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **of_choice}
    return 200, json.dumps({"choices": [choice]}).encode()
