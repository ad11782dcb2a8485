"""From the engine's answers to metrics: what the end-to-end runs cannot reach."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from evalengine.config import DatasetConfig, TaskConfig
from evalengine.engine.request import ScoreRequest
from evalengine.harness.journal import JournalEntry
from evalengine.harness.outcome import scorer
from evalengine.harness.plan import Plan, TaskPlan
from evalengine.harness.requests import HarnessRequest
from evalengine.records.schema import ids_sha256
from evalengine.tasks.registry import load_task


def test_an_empty_page_has_no_request_and_adds_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "test.jsonl"
    rows.write_text('{"page": ""}\n{"page": "two words"}\n')
    config = TaskConfig(cls="wikitext:WikiText", version=2.0, dataset=DatasetConfig(path=str(rows)), split="test")
    task = load_task("wikitext", config)
    task.load()
    instances = task.instances(None)
    key = ("wikitext", 1, 0, 0)
    answer = JournalEntry(key, ids_sha256([0]), [5, 6], np.array([-1, -2], dtype=np.float32), "length", "", False)
    plan = Plan([TaskPlan(task, instances)], [HarnessRequest(key, instances[1][0], ScoreRequest(0, [0], [5, 6]), 0)])
    result = scorer(plan, {key: answer})(plan.tasks[0])
    assert result.metrics["bits_per_byte,none"] == pytest.approx(3 / len("two words") / math.log(2))
    assert result.effective == 2
