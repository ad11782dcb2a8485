"""The reader of long bodies: the library's values and errors, surrogates, and its limits."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from evalengine.integrations.openai_server import bodies
from evalengine.integrations.openai_server.bodies import MOST_VALUES, read_json

PAIR = "\U0001f600"


@pytest.fixture(params=["short", "long"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Any]:
    """Each reader on bodies of any length."""
    monkeypatch.setattr(bodies, "SHORT", 1 << 40 if request.param == "short" else -1)
    return read_json


def random_value(chosen: random.Random, depth: int = 0) -> Any:
    kind = chosen.randrange(9 if depth < 5 else 6)
    if kind == 0:
        return chosen.choice([True, False, None])
    if kind < 3:
        return chosen.choice([0, -1, 10**30, 1.5, -1e-7, 1e300, 12345])
    if kind < 6:
        return "".join(chosen.choice(["a", '"', "\\", "\n", "ä", PAIR, "[1,2]", "{", ",", " "]) for _ in range(kind))
    if kind == 6:
        return {str(chosen.random()): random_value(chosen, depth + 1) for _ in range(chosen.randrange(5))}
    if kind == 7:
        return [chosen.choice([1, 2.5, -3]) for _ in range(chosen.randrange(99))]
    return [random_value(chosen, depth + 1) for _ in range(chosen.randrange(6))]


def test_the_librarys_values(read: Callable[[bytes], Any]) -> None:
    for seed in range(300):
        chosen = random.Random(seed)
        value = random_value(chosen)
        text = json.dumps(value, ensure_ascii=chosen.random() < 0.5, indent=chosen.choice([None, 1]))
        encoding = chosen.choice(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
        assert read(f" {text}\n".encode(encoding)) == value, seed


def test_damaged_json_is_refused_where_the_library_refuses_it(read: Callable[[bytes], Any]) -> None:
    for seed in range(500):
        chosen = random.Random(seed)
        text = json.dumps([random_value(chosen), random_value(chosen)], ensure_ascii=False)
        at = chosen.randrange(len(text))
        new = chosen.choice(["", ",", "]", "}", '"', "[", ":", "x", "1", "-", " ", "\t"])
        damaged = text[:at] + new + text[at + 1 :]
        try:
            value = json.loads(damaged)
        except ValueError:
            with pytest.raises(ValueError, match=r"\w"):
                read(damaged.encode())
        else:
            assert read(damaged.encode()) == value, seed


def test_errors_name_the_place(read: Callable[[bytes], Any]) -> None:
    for text in (
        "",
        " ",
        "[1",
        "[1,",
        "[1,,2]",
        "[1,2 3]",
        "[1,2]]",
        '{"a"}',
        '{"a":1,}',
        "{1:2}",
        "[01]",
        "nul",
        "[1,2",
    ):
        with pytest.raises(json.JSONDecodeError) as expected:
            json.loads(text)
        with pytest.raises(json.JSONDecodeError) as raised:
            read(text.encode())
        if sys.version_info < (3, 13) or ",]" not in text.replace("}", "]"):  # 3.13 names a trailing comma
            assert str(raised.value) == str(expected.value), text


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a\\ud800b"}',
        b'{"\\udfff":"a"}',
        b'{"a":["b",{"c":"\\ud83d"}]}',
        b'{"prompt":"a\xed\xa0\x80b"}',
        b'{"\xed\xa0\x80":1}',
        '{"prompt":"a\ud800b"}'.encode("utf-16-le", "surrogatepass"),
        '{"prompt":"a\udfffb"}'.encode("utf-32", "surrogatepass"),
        '{"prompt":"a\ud83d"}'.encode("utf-16", "surrogatepass"),
        '{"prompt":"é"}'.encode("latin-1"),
    ],
)
def test_half_a_surrogate_pair_is_refused_in_every_encoding(read: Callable[[bytes], Any], body: bytes) -> None:
    with pytest.raises(ValueError, match=r"surrogate|decode"):
        read(body)
    assert read(json.dumps(PAIR).encode()) == PAIR


def test_deep_values_and_long_integers(read: Callable[[bytes], Any]) -> None:
    for text in ("[" * 201 + "]" * 201, "[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
            read(text.encode())
    assert read(b"[" * 190 + b"]" * 190)
    for text in ("9" * 5000, f"[1,{'9' * 5000},1]"):
        with pytest.raises(ValueError, match="thousands of digits"):
            read(text.encode())


@pytest.mark.parametrize("item", ['"a"', "[1]", "{}", "null", "[[]]", '{"a":0}', "true"])
def test_the_number_of_values_is_bounded(item: str) -> None:
    body = f"[{','.join([item] * MOST_VALUES)}]".encode()
    with pytest.raises(ValueError, match="131,072 strings, lists and objects"):
        read_json(body)


def test_the_number_of_names_is_bounded() -> None:
    names = ",".join(f'"{number}":0' for number in range(MOST_VALUES))
    with pytest.raises(ValueError, match="131,072"):
        read_json(f"{{{names}}}".encode())


def test_numbers_are_not_bounded_and_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no call of the library's, which holds the interpreter's lock, is a long one."""
    longest = 0
    loads = json.loads

    def watched(text: str) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return loads(text)

    monkeypatch.setattr(bodies.json, "loads", watched)
    numbers = [number * 7 for number in range(500_000)]
    read = read_json(json.dumps({"prompt": numbers}).encode())
    assert read == {"prompt": numbers} and 0 < longest <= 70_000


def test_the_reader_may_run_in_a_thread() -> None:
    values: list[Any] = []
    body = json.dumps(["a" * 100_000, [1] * 1000]).encode()
    thread = threading.Thread(target=lambda: values.append(read_json(body)))
    thread.start()
    thread.join()
    assert values == [json.loads(body)]
