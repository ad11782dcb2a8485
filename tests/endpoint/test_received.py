"""The strings that an endpoint sends: the API key and lone surrogates are in none that is stored or printed."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
from pathlib import Path

import pytest

from evalengine.config.schema import EndpointConfig
from evalengine.integrations.endpoint.http import HIDDEN, Cleaner, Client
from tests.e2e.command import call
from tests.endpoint.asking import COUNT, ask, only, results
from tests.endpoint.fake import answered, scripted


@pytest.mark.parametrize(
    ("text", "clean", "surrogates"),
    [
        ("4\ud83d", "4\ufffd", 1),
        ("\ude004", "\ufffd4", 1),
        ("\ud83d\ude00", "\U0001f600", 0),  # each half was sent as bytes of its own
        ("a\ufffd\ud800\ud800\udc00", "a\ufffd\ufffd\U00010000", 1),
        ("plain \U0001f600", "plain \U0001f600", 0),
    ],
)
def test_lone_surrogates_become_the_replacement_character(text: str, clean: str, surrogates: int) -> None:
    got = Cleaner(None).clean([{"a": text}, 5, None])
    assert got.value == [{"a": clean}, 5, None] and got.surrogates == surrogates
    assert Cleaner(None).clean({text: 1}).value == {clean: 1}
    got.value[0]["a"].encode()


KEYS = ["sk-test-0123456789abcdefghij", "secret", 'sk"a\\b/c%d', "k1"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_any_length_and_spelling_is_replaced(key: str) -> None:
    quoted = json.dumps(key)[1:-1]
    spellings = [key, quoted, json.dumps(quoted)[1:-1], "".join(f"\\u{ord(char):04X}" for char in key),
                 "".join(f"%{ord(char):02x}" for char in key)]  # fmt: skip
    cleaner = Cleaner(key)
    for text in spellings:
        got = cleaner.clean({f"<{text}>": [f"a {text}, b"]})
        assert got.value == {f"<{HIDDEN}>": [f"a {HIDDEN}, b"]} and got.keys == 2, text
    for cut in range(240, 300):  # the end of an error text may be inside of the key
        line = cleaner.line(f"{'x' * cut} {key} for you")
        assert not line.removeprefix("x" * cut + " ").startswith(key[:2]) and len(line) <= 300


def test_ordinary_words_are_no_keys() -> None:
    assert Cleaner("EMPTY").clean("EMPTY").value == "EMPTY"
    assert Cleaner("1").clean("12 + 1").value == f"12 + {HIDDEN}"
    assert Cleaner(None).clean("None").value == "None"


def response(text: str) -> bytes:
    """A response in which every string contains the text, written as JSON."""
    message = {"role": "assistant", "content": "3 T", "reasoning_content": "T"}
    choice = {"message": message, "finish_reason": "T"}
    value = {"model": "T", "system_fingerprint": "T", "usage": {"T": "T"}, "choices": [choice]}
    return json.dumps(value).replace("T", text).encode()


def test_half_an_emoji_is_scored_stored_and_reported(tmp_path: Path, sums: list[str]) -> None:
    with scripted(lambda prompt: (200, response("\\ud83d") if "What is 1" in prompt else answered("1")[1])) as url:
        done = ask(url, sums, "apply_chat_template=true")
        (folder,) = (path for path in (tmp_path / "results").iterdir() if path.is_dir())
        facts = results(folder)["endpoint"]
        report = call("report", str(folder), "--samples", str(tmp_path / "samples.csv"))
    assert done.code == 0 and report.code == 0, done.err + report.err
    assert facts["with_lone_surrogates"] == 1
    words = "1 answer contained lone surrogates (halves of characters), replaced by U+FFFD"
    assert words in done.out and words in (folder / "report.html").read_text()
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["surrogates"]]
    assert line["text"] == "3 \ufffd" and line["reasoning"] == line["fingerprint"] == "\ufffd"
    (samples,) = folder.glob("samples_*.jsonl")
    assert "3 \ufffd" in samples.read_text(encoding="utf-8")


def test_half_an_emoji_in_an_error_is_printed(sums: list[str]) -> None:
    with scripted(lambda prompt: (404, b'{"error": {"message": "no \\ud83d model"}}')) as url:
        done = ask(url, sums)
    assert done.code == 1 and "no \ufffd model" in done.err, done.err


def test_an_older_file_with_half_an_emoji_is_resumed(tmp_path: Path, sums: list[str]) -> None:
    """Runs that failed before must be finished by the same command, without a new request."""
    asked = []

    def fail(prompt: str) -> tuple[int, bytes]:
        asked.append(prompt)
        return 500, b"{}"

    with scripted(fail) as url:
        assert ask(url, sums, "endpoint.retries=0").code == 1
        folder = only(tmp_path / "results")
        line = '{"number":%d,"ask":0,"text":"%s","finish_reason":"stop","attempts":1,"fingerprint":null}\n'
        (folder / "answers.jsonl").write_text("".join(line % (n, "1\\ud83d") for n in range(COUNT)))
        asked.clear()
        done = ask(url, sums, "endpoint.retries=0")
    assert done.code == 0 and not asked, done.err
    assert results(folder)["endpoint"]["with_lone_surrogates"] == COUNT


@pytest.mark.parametrize("key", ["sk-test-0123456789abcdefghij", "secret"])
def test_an_escaped_key_is_left_nowhere(
    tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("EVALENGINE_API_KEY", key)
    escaped = "".join(f"\\u{ord(char):04x}" for char in key)
    with scripted(lambda prompt: (200, response(escaped))) as url:
        done = ask(url, sums, "apply_chat_template=true")
    assert done.code == 0, done.err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and (path.suffix != ".html" or key != "secret")]
    assert len(files) >= 3
    for text in (done.out, done.err, *(path.read_text(encoding="utf-8") for path in files)):
        assert key not in text and key not in json.loads(json.dumps(text)) and escaped not in text
    (samples,) = tmp_path.rglob("samples_*.jsonl")
    assert f"3 {HIDDEN}" in samples.read_text()
    assert f"{COUNT} answers contained the API key, replaced by {HIDDEN}" in done.out


@pytest.mark.parametrize("status", [200, 400, 404, 503])
def test_a_long_error_text_ends_in_no_half_of_a_key(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    key = "sk-test-0123456789abcdefghij"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for length in range(250, 300, 7):
        body = json.dumps({"error": {"message": f"{'x' * length} {key} for you"}}).encode()
        with scripted(lambda prompt, body=body: (status, body)) as url:  # type: ignore[misc]
            reply = Client(f"{url}/v1", EndpointConfig(retries=0))._reply(0, {"prompt": "x"})
        assert "sk-" not in reply.error and len(reply.error) <= 300 and "xxx" in reply.error


def test_a_key_that_no_header_can_carry_is_named(
    sums: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("sk-one\nsk-two", "sk-\u20ac"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        done = ask("http://127.0.0.1:9", sums)
        assert done.code == 2 and "OPENAI_API_KEY: contains characters" in done.err and "sk-" not in done.err
    assert not (tmp_path / "results").exists()
