"""Logs of inspect_ai and an endpoint's answers meet damage: a sentence, or a run that the commands can compare."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.integrations.endpoint.answers import ANSWERS, AnswersFile
from evalengine.integrations.endpoint.http import Cleaner
from evalengine.report.compare.compare import compared
from evalengine.report.gate.gate import gate
from evalengine.report.gate.report import OUTCOMES
from evalengine.report.read.baseline import FORMAT, to_text
from evalengine.report.read.load import load_run
from tests.fuzz.cases import Case, cases
from tests.fuzz.test_bench_files import mutated
from tests.report.gate_runs import make_run
from tests.report.test_inspect_log import log

POLICIES = ("bitwise", "tokens", "accuracy")
ODD: tuple[Any, ...] = (None, True, 0, -1, 2**70, 1.5, "", "x", "C", [], {}, [None], {"a": 1}, [[]], "1.0", "a (b)")


def ours() -> dict[str, Any]:
    """A log of a run of ours, with what its reader looks at."""
    content = log({1: ("C", "I"), 2: ("C", "C")})
    content["eval"] |= {"packages": {"evalengine": "1"}, "task_version": "1.0", "model_generate_config": {"seed": 1}}
    for sample in content["samples"]:
        sample["scores"] = {"exact_match (strict)": {"value": 1.0, "answer": "7"}, "f1": {"value": 0.5, "answer": None}}
        sample["metadata"] = dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), "a" * 64)
    return content


def change(case: Case, value: Any) -> Any:
    """The value with one part of it, anywhere inside, replaced by something odd, renamed or taken away."""
    if isinstance(value, dict) and value and case.random() < 0.85:
        name = case.choice(list(value))
        if case.random() < 0.1:
            return {case.choice(("doc_id", "filter", "metrics", name)) if one == name else one: item
                    for one, item in value.items()}  # fmt: skip
        if case.random() < 0.1:
            return {one: item for one, item in value.items() if one != name}
        return {**value, name: change(case, value[name])}
    if isinstance(value, list) and value and case.random() < 0.85:
        place = case.randrange(len(value))
        return [*value[:place], change(case, value[place]), *value[place + 1 :]]
    return case.choice(ODD)


@pytest.mark.parametrize("of", ["inspect_ai", "ours"])
def test_a_log_with_odd_values_is_refused_or_compares(tmp_path: Path, of: str) -> None:
    whole, file = ours() if of == "ours" else log({1: ("C", "I"), 2: ("C", "C")}), tmp_path / "log.json"
    for case in cases(f"inspect_log/{of}", 1500):
        file.write_text(json.dumps(change(case, whole)))
        with case.named(file.read_text()):
            try:
                run = load_run(file)
                compared(run, run, allow=True)
            except ConfigError as error:
                assert str(file) in str(error)


def test_a_baseline_with_odd_values_is_refused_or_judged(tmp_path: Path) -> None:
    key, values = ("t", "exact_match", "strict-match"), make_run({"sums": [1.0, 0.0] * 3, "t": [0.5, 1.0]})
    run = replace(values, groups={"all": ["sums", "t"]}, clusters={"t": {0: "a", 1: "b"}}, choices={key: {0: 1, 1: 0}},
                  cut={"t": frozenset({1})}, weighted={key: {0: (-1.0, 2.0), 1: (-1.5, 2.0)}})  # fmt: skip
    base, file = tmp_path / "base.json", tmp_path / "odd.json"
    base.write_text(to_text(run))
    whole = json.loads(base.read_text())
    del whole["sha256"]  # the hash is no signature: an edit may renew it
    for case in cases("baseline", 500):
        name = case.choice(list(whole))
        file.write_text(FORMAT.seal({**whole, name: change(case, whole[name])}))
        with case.named(file.read_text()):
            with suppress(ConfigError):
                compared(load_run(base), load_run(file), allow=True)
            for policy in POLICIES:
                assert {gate(base, file, policy).verdict, gate(file, base, policy).verdict} <= {*OUTCOMES}


def test_scorers_of_any_name_are_metrics(tmp_path: Path) -> None:
    content, names = log({1: ("C",)}), ["doc_id", "filter", "resps", "metrics", "length_limited", "a (b)"]
    content["samples"][0]["scores"] = {name: {"value": 1.0, "answer": "7"} for name in names}
    (tmp_path / "log.json").write_text(json.dumps(content))
    run = load_run(tmp_path / "log.json")
    assert len(run.scores) == len(names) and all(values == {0: 1.0} for values in run.scores.values())
    assert not run.cut


def test_damaged_answers_are_refused_or_are_answers(tmp_path: Path) -> None:
    line = {"number": 0, "ask": 0, "text": "4", "finish_reason": "stop", "attempts": 1, "fingerprint": "f",
            "seconds": 0.1, "reasoning": None, "usage": {"n": 1}}  # fmt: skip
    whole = b"".join(json.dumps({**line, "number": n}).encode() + b"\n" for n in range(3))
    for case in cases("answers", 600):
        (tmp_path / ANSWERS).write_bytes(mutated(case, whole))
        with case.named((tmp_path / ANSWERS).read_bytes()):
            try:
                file = AnswersFile(tmp_path, Cleaner(None))
            except EvalEngineError as error:
                assert ANSWERS in str(error)
                continue
            file.close()
            assert all(isinstance(answer.text, str) and place[0] >= 0 for place, answer in file.stored.items())
