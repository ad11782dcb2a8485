"""The same request has the same bytes: at any load, order and batch, after a restart, beside clients that leave."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.e2e.command import call, finish, start
from tests.serve.running import QUESTION, Running, running, wait_until


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Requests of every kind: texts and ids, greedy and sampled, whole and streamed, echoes and chats."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(4):
        prompt = f"Question: Arlo collects {number + 3} flowers. Diego has 2 fewer. How many are there?\nAnswer:"
        chat = [{"role": "user", "content": f"What is {number} plus 4?"}]
        asked += [
            ("/v1/completions", {"prompt": prompt, "max_tokens": 9, "temperature": 0, "logprobs": 1}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": 5 + number, "n": 2, "stream": number % 2 == 0}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}),
            (
                "/v1/chat/completions",
                {
                    "messages": chat,
                    "max_tokens": 7,
                    "stream": number % 2 == 1,
                    "presence_penalty": number - 2,
                    "logit_bias": {"50": 2 * number},
                    "response_format": {"type": ("text", "json_object")[number % 2]},
                },
            ),
        ]
    return asked


async def ask_all(url: str, asked: list[tuple[str, dict[str, Any]]], at_once: int) -> list[bytes]:
    limits, gate = httpx.Limits(max_connections=at_once), asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(path: str, body: dict[str, Any]) -> bytes:
            async with gate:
                answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.content

        return await asyncio.gather(*(ask(*one) for one in asked))


@pytest.fixture(scope="module")
def alone(served: Running) -> list[bytes]:
    """Each request's bytes when it is asked by itself."""
    return asyncio.run(ask_all(served.url, bodies(), 1))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_crowd_changes_no_byte(served: Running, alone: list[bytes], seed: int) -> None:
    asked = [*enumerate(bodies())] * 3
    random.Random(seed).shuffle(asked)
    before = served.llm.stats.largest_batch
    answers = asyncio.run(ask_all(served.url, [one for _, one in asked], 48))
    for (number, _), answer in zip(asked, answers, strict=True):
        assert answer == alone[number], f"request {number} has another answer in a crowd"
    assert max(served.llm.stats.largest_batch, before) >= 16, "they ran together"


def test_another_engine_changes_no_byte(alone: list[bytes]) -> None:
    """Small batches, short chunks, no prefix cache, preemption: another schedule altogether."""
    schedule = ("engine.max_num_seqs=3", "engine.max_num_batched_tokens=16", "engine.enable_prefix_caching=false")
    with running(*schedule) as server:
        assert asyncio.run(ask_all(server.url, bodies()[:8], 8)) == alone[:8]


def test_two_ranks_change_no_byte_and_one_that_dies_fails_who_waits(alone: list[bytes]) -> None:
    """Two processes share the model, as two GPUs do: the fingerprint is the same, too."""
    with running("engine.tensor_parallel_size=2") as server:
        assert asyncio.run(ask_all(server.url, bodies()[:8], 8)) == alone[:8]
        ranks = server.llm._ranks._children
        assert ranks is not None
        (other,) = ranks.processes
        other.kill()
        other.wait(30)
        for _ in range(2):  # whom the death meets, and who comes later
            failed = server.post(*bodies()[0])
            assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error", failed.text
            assert server.client.get("/health").status_code == 503


def test_graphs_are_captured_before_anyone_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    monkeypatch.setattr("evalengine.engine.llm.LLM.capture_graphs", lambda self: did.append("captured"))
    monkeypatch.setattr("evalengine.integrations.openai_server.cli._listen", lambda *_: did.append("listens"))
    assert call("serve", "port=0", "engine.device=cpu", "engine.num_kv_blocks=64").code == 0
    assert did == ["captured", "listens"]


def test_fast_numerics_are_another_fingerprint_and_differ_in_a_crowd(served: Running) -> None:
    """The comparison above can fail: in the fast mode a crowd changes bytes."""
    with running("batch_invariant=false", "engine.dtype=bfloat16") as server:
        assert server.server.model.fingerprint != served.server.model.fingerprint
        one, many = (asyncio.run(ask_all(server.url, bodies(), at_once)) for at_once in (1, 24))
        assert one != many


def test_a_restart_changes_no_byte_and_ctrl_c_waits_for_answers(alone: list[bytes]) -> None:
    """The program itself: it says where it listens, finishes what is asked when the signal comes, and ends with 0."""
    process = start("serve", "model=tinymath", "port=0", "engine.device=cpu", "engine.num_kv_blocks=64")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split(" at ")[1].split("/v1")[0]
        path, body = bodies()[0]
        assert httpx.post(f"{url}{path}", json=body, timeout=60).content == alone[0]
        long = {"prompt": QUESTION, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.terminate()
            rest = [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        done = finish(process, 60)
        assert done.code == 0 and "ending once the answers that run are finished" in done.err
        assert "Traceback" not in done.err
    finally:
        process.kill()


def test_no_answer_is_lost_or_swapped_while_clients_leave(served: Running, alone: list[bytes]) -> None:
    """Every second client leaves in the middle; the others have their own answers, and no page is kept."""

    async def crowd() -> list[bytes | None]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:

            async def ask(number: int, path: str, body: dict[str, Any]) -> bytes | None:
                if number % 2:
                    try:
                        await client.post(path, json={**body, "max_tokens": 200, "ignore_eos": True}, timeout=0.15)
                    except httpx.TimeoutException:
                        return None
                return (await client.post(path, json=body)).content

            return await asyncio.gather(*(ask(i, *one) for i, one in enumerate(bodies())))

    answers = asyncio.run(crowd())
    assert [a for i, a in enumerate(answers) if i % 2 == 0] == alone[::2]
    manager = served.llm.block_manager
    wait_until(lambda: served.server.engine.num_open == 0 and not served.llm.scheduler.has_work)
    assert manager.num_free_blocks == served.llm.num_kv_blocks
