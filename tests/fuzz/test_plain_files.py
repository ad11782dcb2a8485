"""JSON and YAML readers meet mutated, nested and growing files: a value or a ValueError, nothing else, and soon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evalengine.util.plain_files import parse_json, read_json, read_yaml
from tests.fuzz.cases import cases

SEEDS = (
    b"a: &x [1, 2]\nb: *x\nc: {d: 2026-01-01, e: ~}\n",
    b'{"a": [1, 2.5, "\\u00e9"], "b": {"c": null, "d": true}}',
    b"- !!set {a, b}\n- ? [k]\n  : v\n- <<: {x: 1}\n",
)


def test_mutations_give_a_value_or_a_value_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for case in cases("plain_files", 400):
        data = bytearray(case.choice(SEEDS))
        for _ in range(case.randint(1, 6)):
            at = case.randrange(len(data))
            if case.random() < 0.5:
                data[at] = case.randrange(256)
            else:
                data[at:at] = case.choice([b"&x ", b"*x ", b"[", b"{", b"\xff", b"? ", b"!!python/name:os ", b"\n"])
        file.write_bytes(data)
        for read in (read_json, read_yaml):
            with case.named(bytes(data)):
                try:
                    read(file)
                except ValueError:
                    continue


def test_deep_json_and_long_integers_are_value_errors(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, "1" * 5_000, b"\xff\xfe{"):
        with pytest.raises(ValueError):
            parse_json(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
            "aliases expand",
        ),
        ("a: &a [*a]", "holds the alias itself"),
        ("[" * 500 + "]" * 500, "nested too deeply"),
        ("{[1]: 2}", "unhashable"),
        ("a: [1", "expected"),
        ("a: 1\nb: {c: 1, c: 2}", "the key 'c' stands twice in one mapping, line 2"),
        ("a: " + "1" * 5_000, "an integer of thousands of digits"),
    ],
)
def test_yaml_that_cannot_be_meant_is_a_sentence(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=why):
        read_yaml(file)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "pipe")


def test_what_is_right_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps({"a": [1, None, "x"]}))
    assert read_json(file) == read_yaml(file) == {"a": [1, None, "x"]}
    file.write_text("a: &x {b: 1}\nc: *x\n")
    assert read_yaml(file) == {"a": {"b": 1}, "c": {"b": 1}}
