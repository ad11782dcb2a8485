"""Logs of inspect_ai as runs: the numbers in them, and files that are none. inspect_ai itself is not needed."""

from __future__ import annotations

import json
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError
from evalengine.report.read.load import load_run, load_run_data
from tests.e2e.command import call


def sample(identity: int | str, epoch: int, text: Any, value: Any, **more: Any) -> dict[str, Any]:
    output = {"model": "m", "choices": [{"message": {"role": "assistant", "content": text}, "stop_reason": "stop"}]}
    scores = {"match": {"value": value, "answer": str(text)[-1], "explanation": ""}}
    return {"id": identity, "epoch": epoch, "input": f"Question {identity}?", "target": "7", "messages": [],
            "output": output, "scores": scores, **more}  # fmt: skip


def log(values: dict[int, tuple[str, ...]], model: str = "evalengine/tinymath") -> dict[str, Any]:
    """A log of one task; values: sample -> an epoch's grade each."""
    samples = [sample(i, e, f"it is {g}{i}", g) for i, grades in values.items() for e, g in enumerate(grades, 1)]
    spec = {"task": "sums", "task_version": 2, "model": model, "dataset": {"name": "rows"}, "created": "2026-01-01"}
    return {"version": 2, "status": "success", "eval": spec, "samples": samples[::-1]}


def write(file: Path, content: dict[str, Any]) -> Path:
    if file.suffix == ".json":
        file.write_text(json.dumps(content))
        return file
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("header.json", json.dumps({k: v for k, v in content.items() if k != "samples"}))
        for one in content["samples"]:
            packed.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))
    return file


@pytest.mark.parametrize("suffix", [".json", ".eval"])
def test_samples_are_documents_and_epochs_are_repeats(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a{suffix}", log({1: ("C", "C"), 2: ("C", "I"), 10: ("P", "I")}))
    data = load_run_data(file)
    assert data.run.scores == {("sums", "match", "none"): {0: 1.0, 1: 0.5, 2: 0.25}}
    value, error = data.run.results["sums", "match", "none"]
    assert value == pytest.approx(1.75 / 3) and error == pytest.approx((0.14583333333 / 3) ** 0.5)
    assert [item.text for item in data.run.items.values()] == [
        *("it is C1", "it is C1", "it is C2", "it is I2", "it is P10", "it is I10")
    ]
    assert data.run.answers["sums", "none"] == {0: "1", 1: "2", 2: "0"}


def test_scores_whose_sum_overflows_have_a_mean(tmp_path: Path) -> None:
    content = log({1: ("C",), 2: ("C",), 3: ("C",)})
    for one, value in zip(content["samples"], (1e308, 1e308, -1e308), strict=True):
        one["scores"]["match"]["value"] = value
    assert load_run(write(tmp_path / "a.json", content)).results["sums", "match", "none"][0] == pytest.approx(1e308 / 3)


def test_two_logs_compare_document_by_document(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", log({1: ("C",), 2: ("I",), 3: ("C",)}))
    b = write(tmp_path / "b.eval", log({1: ("C",), 2: ("C",), 3: ("C",)}))
    same = call("compare", str(a), str(a), "--level", "answers")
    assert same.code == 0, same.out + same.err
    done = call("compare", str(a), str(b), "--level", "answers")
    assert done.code == 1 and "wrong to right" in done.out, done.out + done.err


def test_logs_of_two_models_are_models(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", log(dict.fromkeys(range(9), ("C",)), "openai/one"))
    b = write(tmp_path / "b.eval", log(dict.fromkeys(range(9), ("I",)), "openai/two"))
    done = call("compare", str(a), str(b))
    assert done.code == 1 and "best on sums match: one" in done.out and "two against one" in done.out, done.err


def test_a_thinking_is_no_part_of_the_answer(tmp_path: Path) -> None:
    content = log({1: ("C",)})
    parts = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "it is 7"}]
    content["samples"][0]["output"]["choices"][0]["message"]["content"] = parts
    run = load_run(write(tmp_path / "a.json", content))
    assert [item.text for item in run.items.values()] == ["it is 7"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "started"}, "did not end"),
        ({"samples": [{"id": 1}]}, "a sample that is none"),
        ({"samples": None}, "no log of inspect_ai"),
        ({"samples": [sample(1, 1, "a", "C")] * 2}, "has epoch 1 twice"),
    ],
)
def test_what_is_no_whole_log_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_run(write(tmp_path / "a.json", {**log({1: ("C",)}), **change}))


def test_damaged_files_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.eval").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ConfigError, match=r"a\.eval: damaged"):
        load_run(tmp_path / "a.eval")
    whole = write(tmp_path / "b.eval", log({1: ("C",)})).read_bytes()
    for cut in range(10, len(whole), 97):
        (tmp_path / "c.eval").write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"c\.eval: (damaged|no log)"):
            load_run(tmp_path / "c.eval")


def test_encrypted_and_scrambled_logs_are_said(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.eval", log({1: ("C",)})).read_bytes()
    # The flag of an entry that needs a password.
    locked = re.sub(rb"(PK\x03\x04..|PK\x01\x02....)\x00", rb"\1" + b"\x01", whole, flags=re.DOTALL)
    (tmp_path / "locked.eval").write_bytes(locked)
    with pytest.raises(ConfigError, match=r"locked\.eval: it cannot be unpacked \(.*encrypted.*; save the log without"):
        load_run(tmp_path / "locked.eval")
    for place in range(0, len(whole), 3):
        (tmp_path / "b.eval").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(ConfigError):  # any other error is a traceback for the user
            load_run(tmp_path / "b.eval")
