"""The event loop stays free: bodies are read and tokenized in threads, after counts and lengths are checked."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from evalengine.integrations.openai_server import app
from evalengine.integrations.openai_server.answering import PIECE, as_json, in_pieces
from evalengine.integrations.openai_server.bodies import MOST_UNKNOWN, SHORT, ChatBody, CompletionBody, read_body
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.model import CHARACTERS_FIRST, MOST_DETOKENIZED, MOST_TOKENIZED
from evalengine.integrations.openai_server.request_bodies import MOST_STOPS, completion_request
from evalengine.integrations.openai_server.settings import ServeSettings
from evalengine.records.sealed import canonical
from tests.serve.running import QUESTION, Running

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"user": "x" * SHORT}  # makes a body a long one
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": "a", "max_tokens": 1}),
    (COMPLETION, {"prompt": ["a", "b"], "max_tokens": 1, "stream": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 1}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.fixture
def threads(served: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[int]]]:
    """The threads that ran the event loop, and those that read bodies, tokenized and wrote whole answers."""
    found: dict[str, set[int]] = {"loop": set(), "work": set()}

    def watch(owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            found[kind].add(threading.get_ident())
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(served.server, "_check_key", "loop")
    for name in ("encoded", "templated", "decoded"):
        watch(served.server.model, name, "work")
    for name in ("read_json", "read_body", "check_counts", "completion_request", "chat_request"):
        watch(app, name, "work")
    yield found


@pytest.mark.parametrize("further", [{}, LONG], ids=["short", "long"])
def test_bodies_are_read_and_tokenized_in_threads(
    served: Running, threads: dict[str, set[int]], further: dict[str, Any]
) -> None:
    for path, body in BODIES:
        threads["work"].clear()
        answer = served.post(path, {**body, **further})
        assert answer.status_code == 200, answer.text
        assert threads["work"] and len(threads["loop"]) == 1 and not threads["work"] & threads["loop"], (path, body)


def test_a_slow_tokenizer_stops_no_other_client(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many long requests as there are threads for them wait inside the tokenizer."""
    waiting, go_on = threading.Semaphore(0), threading.Event()
    encoded = served.server.model.encoded

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("slow"):
            waiting.release()
            assert go_on.wait(60)
        return encoded(text, add_special_tokens)

    monkeypatch.setattr(served.server.model, "encoded", slow)
    body = {"prompt": "slow flowers", "max_tokens": 1, **LONG}
    with ThreadPoolExecutor(app.LONG_THREADS) as pool:
        answers = [pool.submit(served.post, COMPLETION, body) for _ in range(app.LONG_THREADS)]
        try:
            for _ in answers:
                assert waiting.acquire(timeout=60)
            assert served.client.get("/health").status_code == 200
            assert served.completion(prompt="a", max_tokens=1)["choices"]
            assert not any(answer.done() for answer in answers)
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * app.LONG_THREADS


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETION, {"prompt": ["a"] * 1025}, "1025 choices"),
        (COMPLETION, {"prompt": ["a"] * 2, "n": 600}, "1200 choices"),
        (COMPLETION, {"prompt": "a", "n": 1025}, "n=1025: must be an integer from 1 to 1024"),
        (CHAT, {"messages": MESSAGES, "n": 1025}, "n=1025: must be an integer from 1 to 1024"),
        (COMPLETION, {"prompt": [[1]] * 30_000}, "30000 choices"),
        (COMPLETION, {"prompt": [1] * 1_000_000}, "1000000 tokens; it and its answer may have 1024"),
        (COMPLETION, {"prompt": [[1], [1] * 5000]}, "5000 tokens"),
        (COMPLETION, {"prompt": "a" * 1_000_000}, "1000000 characters, more than 1024 tokens stand for"),
        (COMPLETION, {"prompt": "a", "stop": ["x"] * (MOST_STOPS + 1)}, "stop: 1025 are too many"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [1] * (MOST_STOPS + 1)}, "stop_token_ids: 1025 are too many"),
        ("/tokenize", {"prompt": "a" * (MOST_TOKENIZED + 1)}, "at most 4194304 are tokenized"),
        ("/detokenize", {"tokens": [5] * (MOST_DETOKENIZED + 1)}, "tokens: 131073 are too many"),
        (COMPLETION, {"prompt": ["a"] * 300_000}, "more than 131,072 strings, lists and objects"),
    ],
)
def test_counts_and_lengths_are_checked_before_the_tokenizer_runs(
    served: Running, path: str, body: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the tokenizer ran")

    for name in ("encode", "decode"):
        monkeypatch.setattr(served.server.model.tokenizer, name, fail)
    if path == CHAT:
        monkeypatch.setattr(served.server.model, "templated", fail)
    refused = served.post(path, body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and said in error["message"], refused.text
    assert error["type"] == "invalid_request_error"


def test_of_a_long_prompt_the_beginning_is_encoded_first(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = served.server.model, list[int]()
    encoded = model.encoded

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encoded(text, add_special_tokens)

    monkeypatch.setattr(model, "encoded", watched)
    first = CHARACTERS_FIRST * model.limits.max_model_len
    with pytest.raises(ApiError, match="more than 2048 tokens"):
        model.prompt_ids("7" * (first + 2000))
    assert lengths == [first]
    longest = max((model.decoded([token]) for token in range(model.spec.vocab_size)), key=len)
    text = longest * (first // len(longest) + 9)  # has more characters, and few tokens
    assert model.prompt_ids(text) == encoded(text) and lengths[1:] == [first, len(text)]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_few_errors_of_a_body_are_enough(kind: Any) -> None:
    """pydantic has one for each unknown field and each wrong element; a million took 18 s."""
    unknown = {f"k{number}": 1 for number in range(100_000)}
    wrong = {"prompt": [[["x"]]] * 9999, "messages": [1] * 9999, "stop": [1] * 9999, "stream_options": unknown}
    for body in (unknown, wrong, {**unknown, **wrong}):
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        assert raised.value.error_count() <= 2 * MOST_UNKNOWN + 10
        with pytest.raises(ApiError) as refused:
            read_body(kind, body)
        assert len(refused.value.message) < 1000 and refused.value.param in ("prompt", "messages", "stop")


def test_hashes_are_those_of_the_whole_json(served: Running) -> None:
    """They are taken prompt by prompt; ids and seeds are the same as ever."""
    prompts = [[1, 2, 3], [4], [1, 2, 3]]
    body = CompletionBody(prompt=prompts, temperature=0.5, top_p=0.9, logprobs=2)
    ask = completion_request(body, served.server.model, ServeSettings())
    assert ask.params is not None
    drawn = canonical([prompts, 0.5, 0.9, 0])
    assert ask.seed == int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:4], "big") >> 1
    asked = {
        "alternatives": 2, "chat": False, "echo": False, "first_sample": 0, "n": 1, "params": vars(ask.params),
        "prompt_alternatives": None, "prompts": prompts, "texts": [None] * 3, "token_ids": False,
    }  # fmt: skip
    assert ask.id == f"cmpl-{hashlib.sha256(canonical(asked).encode()).hexdigest()[:24]}"


def test_long_answers_are_written_in_a_thread_to_the_same_bytes(
    served: Running, threads: dict[str, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [QUESTION, "a"], "max_tokens": 4, "echo": True, "logprobs": 3, "return_token_ids": True}
    writers = []
    whole = served.server.writer.whole

    def watched(*args: Any) -> Any:
        writers.append(threading.get_ident())
        return whole(*args)

    monkeypatch.setattr(served.server.writer, "whole", watched)
    short = served.post(COMPLETION, body).content
    monkeypatch.setattr(app, "SHORT_ANSWER", 10)
    assert served.post(COMPLETION, body).content == short
    assert writers[0] in threads["loop"] and writers[1] not in threads["loop"]


def test_json_in_pieces_is_the_same_json() -> None:
    values: list[Any] = [
        {}, [], 1, "a", None, {"a": []}, {"a": {}, "b": [1]}, [{"a": [1.5, "ü"]}, None], [None, {"a": 1}, {}],
        {"tokens": [*range(3 * PIECE + 5)], "texts": ["ü"] * (PIECE + 1)}, [[1] * (PIECE + 1), [2]],
        {"choices": [{"logprobs": {"content": [{"token": '"', "top": [{}]}] * 9}}] * 3, "usage": {"a": 1}},
    ]  # fmt: skip
    for value in values:
        assert in_pieces(value) == as_json(value)


HALVES = {
    "escaped": ('"a\\ud800b"', "utf-8"),
    "raw": ('"a\ud800b"', "utf-8"),
    "in a list": ('["a\udc00"]', "utf-8"),
    "in a name": ('{"\ud800":1}', "utf-8"),
    "UTF-16": ('"a\ud800b"', "utf-16-le"),
    "UTF-32": ('"a\udfffb"', "utf-32"),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("padding", ["", " " * SHORT], ids=["short", "long"])
def test_half_a_surrogate_pair_is_refused_wherever_a_text_comes_in(served: Running, half: str, padding: str) -> None:
    """It got into the record, which could then never be finished."""
    value, encoding = HALVES[half]
    for path, body in BODIES:
        for place in ("stop", "model", "user", "prompt", "messages", "tools", "chat_template_kwargs", "metadata"):
            rest = {name: json.dumps(other) for name, other in body.items() if name != place}
            fields = ",".join(f'"{name}":{written}' for name, written in {**rest, place: value}.items())
            content = f"{{{padding}{fields}}}".encode(encoding, "surrogatepass")
            refused = served.client.post(path, content=content)
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["message"].startswith("the body cannot be read"), refused.text
            assert {*error} == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
