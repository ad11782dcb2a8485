"""`response_format` and `tool_choice`: answers follow their grammar, with the same bytes on every schedule."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from evalengine import LLM, ConfigError, SamplingParams
from evalengine.engine.execute.processing import DEAD_END
from evalengine.engine.request import GenerateRequest, RequestOutput
from evalengine.engine.submission import check_requests
from evalengine.integrations.openai_server.bodies import ChatBody, read_body
from evalengine.integrations.openai_server.grammars import JSON_OPTIONS, MOST_CHARACTERS, NOT_INSTALLED
from evalengine.integrations.openai_server.request_bodies import chat_request
from evalengine.integrations.openai_server.settings import ServeSettings
from evalengine.models.processors import RequestProcessors, of_plain
from tests.serve.running import Running, running

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'evalengine[serve]'")
import jsonschema  # after the skip

from evalengine.engine.text import grammar  # after the skip

CHAT = "/v1/chat/completions"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    POINT,
    {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2, "$defs": {"one": {"type": "boolean"}}},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]},
    {"const": {"é\u2028\"": [1, "\\n"]}},
]  # fmt: skip
# What a client cannot have: llguidance does not support it, no answer conforms to it, or it is no schema.
REFUSED: dict[str, Any] = {
    "unsupported": {"not": {"type": "integer"}},
    "unsupported, below another's options": {"items": {"uniqueItems": True}, "x-guidance": {"lenient": True}},
    "remote": {"$ref": "http://127.0.0.1:1/x.json"},
    "unknown type": {"type": "objekt"},
    "bad pattern": {"type": "string", "pattern": "(a"},
    "empty": {"type": "integer", "minimum": 2, "maximum": 1},
    "endless": {"allOf": [{"$ref": "#"}]},
    "long": {"const": "a" * MOST_CHARACTERS},
    "deep": json.loads('{"items":' * 150 + "{}" + "}" * 150),
}
SLOW = {"type": "string", "allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(21)]}  # takes 20 s


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def refused(server: Running, **body: Any) -> dict[str, Any]:
    """The error of a chat that must be answered by 400."""
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_conform_to_their_schema(served: Running, schema: dict[str, Any]) -> None:
    body = {"temperature": 1.5, "max_tokens": 60, "n": 2}
    for choice in served.chat("What?", response_format=of_schema(schema), **body)["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    free = [choice["message"]["content"] for choice in served.chat("What?", **body)["choices"]]
    with pytest.raises(ValueError):
        json.loads(free[0])


def test_logprobs_are_the_models(served: Running) -> None:
    """Those of the raw model, also of a token that it would not have chosen."""
    answer = served.chat("3?", response_format={"type": "json_object"}, temperature=0, max_tokens=3, logprobs=True,
                         top_logprobs=1, return_token_ids=True)  # fmt: skip
    (choice,) = answer["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["token"].startswith("{") and first["logprob"] < first["top_logprobs"][0]["logprob"]
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    (scored,) = served.completion(prompt=tokens, max_tokens=0, echo=True, logprobs=0)["choices"]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == scored["logprobs"]["token_logprobs"][-3:]


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused(served: Running, name: str) -> None:
    error = refused(served, response_format=of_schema(REFUSED[name]))
    assert error["param"] == "response_format" and error["message"].startswith("response_format: "), error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        ({"response_format": {"type": "json_object"}, "stop_token_ids": []}, "response_format"),
        # No token is left where the answer is whole and may not end yet.
        ({"response_format": of_schema({"const": 1}), "min_tokens": 9, "max_tokens": 9}, "response_format"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(served: Running, more: dict[str, Any], param: str) -> None:
    error = refused(served, **more)
    assert error["param"] == param and error["message"].startswith(param), error


def test_a_hostile_schema_is_given_up_and_delays_no_other_client(served: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        slow = pool.submit(refused, served, response_format=of_schema(SLOW))
        delays = []
        while not slow.done():
            before = time.monotonic()
            assert served.client.get("/health").status_code == 200
            delays.append(time.monotonic() - before)
            served.completion(prompt="a", max_tokens=1)
            time.sleep(0.02)
        assert "more than 0.5 s" in slow.result()["message"] and time.monotonic() - begin > grammar.SECONDS
    assert len(delays) > 1 and sorted(delays)[len(delays) // 2] < 0.1
    assert (
        served.chat("a", response_format=of_schema({"const": 1}), max_tokens=9)["choices"][0]["finish_reason"] == "stop"
    )


def test_without_the_library_only_these_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "library", lambda: None)
    with running() as server:
        assert NOT_INSTALLED in refused(server, response_format={"type": "json_object"})["message"]
        server.chat("a", response_format={"type": "text"}, max_tokens=1)


def test_the_library_is_part_of_the_request(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version has another id, and a recorded request is not computed by it."""

    def asked() -> Any:
        body = {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}
        return chat_request(read_body(ChatBody, body), "a", served.server.model, ServeSettings())

    ask = asked()
    plain = asdict_of(ask.params)
    assert plain["grammar_library"] == grammar.library() and of_plain(plain) == ask.params.processors
    request = GenerateRequest(
        0, [5], replace(ask.params, max_tokens=2, processors=of_plain({**plain, "grammar_library": "llguidance 0.0.1"}))
    )
    with pytest.raises(ConfigError, match=r"this machine has llguidance"):
        check_requests([request], served.llm.limits)
    monkeypatch.setattr(served.server.model.grammars, "library", "llguidance 0.0.1")
    monkeypatch.setattr("evalengine.engine.submission.library", lambda: "llguidance 0.0.1")
    assert asked().id != ask.id


def asdict_of(params: SamplingParams) -> dict[str, Any]:
    """A request's processors as its record has them."""
    plain: dict[str, Any] = json.loads(json.dumps({**vars(params.processors)}))
    return plain


# -- the engine --------------------------------------------------------------------------------------------------------


def processors(schema: dict[str, Any], after: int | None = None) -> RequestProcessors:
    rule = f"start: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"
    return RequestProcessors(grammar=rule, grammar_library=grammar.library() or "", grammar_after=after)


def requests() -> list[GenerateRequest]:
    """Constrained generations, greedy and sampled, with and without a beginning without grammar, among others."""
    kinds = [None, *map(processors, SCHEMAS[:3]), processors(POINT, after=200)]
    return [
        GenerateRequest(i, [5 + i % 3] * (1 + 9 * (i % 4)), SamplingParams(
            max_tokens=9, temperature=0.9 * (i % 2), seed=i, processors=kinds[i % 5]))
        for i in range(10)
    ]  # fmt: skip


def outputs(asked: list[GenerateRequest], **settings: Any) -> tuple[dict[int, Any], int]:
    """Request -> the bits of its output, and how often one was preempted."""
    with LLM("asset:tinymath", **settings) as llm:
        found: list[RequestOutput] = list(llm.run(asked))
        return {
            o.request_id: (o.token_ids, o.logprobs.tobytes(), o.text, o.error) for o in found
        }, llm.stats.num_preemptions


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_schedule_changes_a_bit(device: str) -> None:
    asked, large = requests(), {"device": device, "num_kv_blocks": 64}
    together, _ = outputs(asked, **large)
    alone, _ = outputs(asked, **large, max_num_seqs=1)
    backwards, preempted = outputs(asked[::-1], device=device, num_kv_blocks=8, block_size=8, max_num_batched_tokens=11)
    assert together == alone == backwards and preempted > 0
    free, _ = outputs([replace(r, params=replace(r.params, processors=None)) for r in asked], **large)
    changed = {i % 5 for i in alone if free[i] != alone[i]}
    assert changed == {1, 2, 3}, "a grammar behind a token that never comes changes nothing but the end"


def test_the_allowed_tokens_depend_on_the_tokens_alone(served: Running) -> None:
    """Step by step, all at once, and after another sequence of the same grammar: equal masks. None of the tokens that
    are not allowed continues the answer."""
    llm, rng = served.llm, random.Random(3)
    model = llm.tokenizer, processors(POINT).grammar, llm.spec.vocab_size, llm.spec.eos_token_ids
    compiled = grammar.compiled(*model)
    assert grammar.compiled(*model) is compiled
    ends = llm.spec.eos_token_ids
    for after in (None, 200):
        tokens = [] if after is None else [7, after]
        stepwise = compiled.constraint(llm.spec.vocab_size, ends, after)
        masks = [stepwise.allowed(tokens[:i]) for i in range(len(tokens) + 1)]
        while not masks[-1][list(ends)].all():
            assert len(tokens) < 200
            tokens.append(rng.choice(masks[-1].nonzero()[0].tolist()))
            masks.append(stepwise.allowed(tokens))
        at_once = compiled.constraint(llm.spec.vocab_size, ends, after)
        assert (at_once.allowed(tokens) == masks[-1]).all() and not stepwise.error
        jsonschema.validate(json.loads(llm.tokenizer.decode(tokens[2:] if after else tokens)), POINT)
        first = masks[0] if after is None else masks[2]
        starts = [llm.tokenizer.decode([i]) for i in range(3, llm.spec.vocab_size) if first[i]]
        assert starts and all(text.strip()[0] == "{" for text in starts)
        assert not any(mask[list(ends)].any() for mask in masks[:-1]), "no end before the answer is whole"


def test_a_limit_of_the_library_depends_on_the_tokens_alone(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one sequence has computed saves no other any fuel."""
    import llguidance

    few = llguidance.LLParserLimits(precompute_large_lexemes=False, step_lexer_fuel=700)
    monkeypatch.setattr(grammar, "_limits", lambda: few)
    spec, steps = served.llm.spec, []
    text = processors({"type": "string", "pattern": "(a|b)*a(a|b){14}c"}).grammar
    compiled = grammar.compiled(served.llm.tokenizer, text, spec.vocab_size, spec.eos_token_ids)
    compiled.prepare(1)
    for _ in range(3):
        rng = random.Random(0)
        constraint, ids = compiled.constraint(spec.vocab_size, spec.eos_token_ids, None), []
        while (allowed := constraint.allowed(ids)).any() and len(ids) < 60:
            ids.append(rng.choice([i for i in allowed.nonzero()[0].tolist() if i not in spec.eos_token_ids]))
        steps.append(ids)
        assert constraint.error
    assert len(steps[0]) > 1 and steps[0] == steps[1] == steps[2]


def test_a_grammar_that_ends_in_a_dead_end_fails_its_request_alone(served: Running) -> None:
    broken = replace(processors(POINT), grammar="start: %json {")
    with LLM("asset:tinymath", device="cpu", num_kv_blocks=64) as llm:
        asked = [
            GenerateRequest(i, [5], SamplingParams(max_tokens=2, processors=p)) for i, p in enumerate((broken, None))
        ]
        failed, fine = sorted(llm.run(asked), key=lambda output: output.request_id)
    assert failed.error is not None and failed.error.startswith(DEAD_END) and fine.error is None


def test_the_grammar_applies_behind_the_thinking() -> None:
    with running("model.think_end_token=' ='") as server:
        (choice,) = server.chat("What is 3 plus 4?", response_format=of_schema({"const": 7}), max_tokens=60, n=1)[
            "choices"
        ]
        message = choice["message"]
        assert message["reasoning_content"] and message["content"] == "7" and choice["finish_reason"] == "stop"
        (short,) = server.chat("3 =", response_format=of_schema({"const": 7}), max_tokens=1)["choices"]
        assert short["finish_reason"] == "length"
