"""/v1/chat/completions by OpenAI's own client, and the paths around it by curl."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from evalengine import LLM, SamplingParams
from tests.e2e.command import with_more_template
from tests.serve.running import Running, running

openai = pytest.importorskip("openai", reason="needs openai: pip install openai")
ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]


@pytest.fixture
def client(served: Running) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_openais_client_chats(served: Running, client: Any) -> None:
    answer = client.chat.completions.create(
        model="tinymath", messages=ASKED, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2, seed=7
    )
    with LLM("asset:tinymath", device="cpu", num_kv_blocks=64) as llm:
        (output,) = llm.chat(ASKED, SamplingParams(max_tokens=8, logprobs=2))
    (choice,) = answer.choices
    assert choice.message.content == output.text and choice.finish_reason == output.finish_reason
    assert [one.logprob for one in choice.logprobs.content] == output.logprobs.tolist()
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode() == output.text
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob
               for one in choice.logprobs.content)  # fmt: skip
    assert answer.system_fingerprint.startswith("fp_") and answer.created == 0


def test_openais_client_streams_and_completes(served: Running, client: Any) -> None:
    asked: dict[str, Any] = {"model": "tinymath", "messages": ASKED, "max_tokens": 8, "n": 2}
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        own = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
    completion = client.completions.create(model="tinymath", prompt="1 + 1 =", max_tokens=3, temperature=0)
    assert (
        completion.choices[0].text
        == served.completion(prompt="1 + 1 =", max_tokens=3, temperature=0)["choices"][0]["text"]
    )
    assert [model.id for model in client.models.list()] == ["tinymath"]


def test_openais_client_reads_our_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here"):
        client.chat.completions.create(model="gpt-4", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty: Input should be less"):
        client.chat.completions.create(model="tinymath", messages=ASKED, frequency_penalty=2.5)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(served: Running) -> None:
    body = json.dumps({"prompt": "1 + 1 =", "max_tokens": 3, "temperature": 0})
    command = ["curl", "-s", f"{served.url}/v1/completions", "-d", body]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    assert json.loads(said)["choices"][0]["text"]
    assert said == subprocess.run(command, capture_output=True, check=True).stdout, "the same request, the same bytes"


def test_texts_in_parts_are_their_lines(served: Running) -> None:
    parts = [{"type": "text", "text": "What is 3"}, {"type": "text", "text": "plus 4?"}]
    bodies = [
        {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        for content in (parts, "What is 3\nplus 4?")
    ]
    first, second = (served.post("/v1/chat/completions", body).content for body in bodies)
    assert first == second
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    refused = served.post("/v1/chat/completions", image)
    assert refused.status_code == 400 and "'image_url' is not built" in refused.json()["error"]["message"]


def test_tokenize_and_back(served: Running) -> None:
    ids = served.post("/tokenize", {"prompt": "45 flowers", "return_token_strs": True}).json()
    assert ids["count"] == len(ids["tokens"]) and "".join(ids["token_strs"]) == "45 flowers"
    assert served.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "45 flowers"}
    chat = served.post("/tokenize", {"messages": ASKED}).json()["tokens"]
    assert served.chat("What is 3 plus 4?", max_tokens=1)["usage"]["prompt_tokens"] == len(chat)
    info = httpx.get(f"{served.url}/tokenizer_info").json()
    assert info["chat_template"] and info["eos_token"] == served.llm.tokenizer.eos_token


def test_tools_go_to_the_template_that_reads_them(served: Running, tmp_path: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    refused = served.post("/v1/chat/completions", {"messages": ASKED, "tools": [tool], "max_tokens": 2})
    assert refused.status_code == 400 and "tools: the model's chat template does not read it" in refused.text
    folder = with_more_template(
        tmp_path / "tooled", "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    )
    with running(f"model.path={folder}", "engine.max_model_len=128") as server:
        asked = [
            {"messages": ASKED, **more} for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "none"})
        ]
        bare, with_tool, without = (
            server.post("/tokenize", body).json().get("count") for body in asked[:2] + asked[:1]
        )
        assert with_tool > bare == without
        texts = [server.post("/v1/chat/completions", {**body, "max_tokens": 2}).json()["usage"] for body in asked]
        assert texts[1]["prompt_tokens"] == with_tool and texts[2]["prompt_tokens"] == bare


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A model for which the first space ends a thinking: it always thinks."""
    with running('model.think_end_token=" = "', "engine.max_model_len=256") as server:
        yield server


def test_a_thinking_is_told_apart(thinking: Running, served: Running) -> None:
    body = {"temperature": 0, "max_tokens": 24}
    whole = served.chat("What is 3 plus 4?", **body)["choices"][0]["message"]
    assert " = " in whole["content"] and "reasoning_content" not in whole
    parted = thinking.chat("What is 3 plus 4?", **body)["choices"][0]["message"]
    before, _, after = whole["content"].rpartition(" = ")
    assert parted["content"] == after.lstrip() and parted["reasoning_content"] == before.strip()
    unfinished = thinking.chat("What is 3 plus 4?", temperature=0, max_tokens=2)["choices"][0]["message"]
    assert unfinished["content"] == "" and whole["content"].startswith(unfinished["reasoning_content"])
    asked = {"messages": ASKED, **body, "stream": True}
    lines = thinking.post("/v1/chat/completions", asked).text.split("\n\n")
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines if "{" in line]
    joined = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content")}
    assert joined == {name: parted[name] for name in joined}
