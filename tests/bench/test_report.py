"""The benchmarks' report: ratios and verdicts, its table, and the checks before a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.report import Failure, Timing, markdown, summary, table, write
from tests.bench.made_up_report import a_report

ABOUT: dict[str, Any] = {
    "command": "python -m benchmarks",
    "date": "2026-01-01T00:00:00+00:00",
    "code": {"commit": "abc", "dirty": True},
    "gpu": "Some GPU (80 GB)",
    "driver": "1.2",
    "cuda": "13.0",
    "libraries": {"torch": "2.11", "flash-attn": None},
}


@pytest.mark.parametrize(
    ("kind", "ours", "reference", "target", "ratio", "passed", "verdict"),
    [
        ("speed", 2.0, 1.9, 0.85, 0.95, True, "reached"),
        ("speed", 2.0, 1.7, 0.85, 0.85, True, "reached"),
        ("speed", 2.0, 1.36, 0.85, 0.68, False, "missed by 20.0%"),
        ("time", 1.0, 2.0, 1.03, 0.5, True, "reached"),
        ("time", 2.06, 2.0, 1.03, 1.03, True, "reached"),
        ("time", 2.266, 2.0, 1.03, 1.133, False, "missed by 10.0%"),
        ("time", 9.0, 1.0, None, 9.0, None, "reported"),
    ],
)
def test_ratio_and_verdict(
    kind: Any, ours: float, reference: float, target: float | None, ratio: float, passed: bool | None, verdict: str
) -> None:
    """A speed must reach a ratio and a time must stay within one; a line without a target is reported only."""
    line = Timing("what", "case", ours, "reference", reference, kind, target)
    assert line.ratio == pytest.approx(ratio)
    assert (line.passed, line.verdict) == (passed, verdict)


def test_table_says_times_rates_targets_and_failures() -> None:
    missed, reached, wrong = table(a_report().lines)[2:]
    assert missed == (
        "| rows | 8 / 9 | 200.0 us, 2.00 TB/s | copy | 100.0 us, 4.00 TB/s | 0.500 | ≥ 0.85 | missed by 41.2% |"
    )
    assert reached == "| step | decode | 2.00 ms | fast | 2.00 ms | 1.000 | ≤ 1.03 | reached |"
    assert "WRONG RESULT: relative error" in wrong and " us" not in wrong  # a wrong result has no time
    assert summary(a_report()) == "1 of 2 targets reached; 1 lines without a time."


def test_report_is_written_as_json_and_markdown(tmp_path: Path) -> None:
    json_file, table_file = write(a_report(), ABOUT, tmp_path / "new" / "folder", "speed")
    assert json_file.name == "speed-some-gpu-80-gb.json" and table_file.name == "speed-some-gpu-80-gb.md"
    content = json.loads(json_file.read_text())
    assert content["environment"] == ABOUT and content["explanations"] == {"profile": {"kernel": 1.5}}
    assert [line.get("passed") for line in content["lines"]] == [False, True, None]
    assert content["lines"][0]["ratio"] == 0.5 and "seconds" not in content["lines"][2]
    text = table_file.read_text()
    assert text == markdown(a_report(), ABOUT) and text.startswith("# Speed on Some GPU (80 GB)\n")
    assert "flash-attn absent" in text and "commit abc (with changes)" in text


def test_check_close_sees_one_wrong_element() -> None:
    truth = torch.randn(64, 128, dtype=torch.float64)
    result = truth.half()
    measure.check_close("x", result, truth)
    result[40, 7] += 0.05
    with pytest.raises(measure.WrongResult, match=r"x: relative error"):
        measure.check_close("x", result, truth)
    result[40, 7] = torch.nan
    with pytest.raises(measure.WrongResult):
        measure.check_close("x", result, truth)


@pytest.mark.gpu
def test_poison_shows_an_element_that_is_not_written() -> None:
    def run(written: int) -> list[torch.Tensor]:
        out, ids = torch.empty(1 << 20, device="cuda"), torch.empty(1 << 20, dtype=torch.int64, device="cuda")
        out[:written], ids[:written] = 1, 1
        return [out, ids]

    out, ids = measure.run_poisoned(lambda: run((1 << 20) - 1))
    assert out[-1].isnan() and ids[-1] == -1 and out[:-1].eq(1).all()
    out, ids = measure.run_poisoned(lambda: run(1 << 20))
    assert out.eq(1).all() and ids.eq(1).all()


def test_a_case_that_breaks_becomes_a_line() -> None:
    def wrong() -> list[Any]:
        raise measure.WrongResult("off by 3")

    def broken() -> list[Any]:
        raise RuntimeError("first line\nsecond")

    assert measure.guarded("what", "case", wrong) == [Failure("what", "case", "off by 3")]
    assert measure.guarded("what", "case", broken) == [Failure("what", "case", "RuntimeError: first line", wrong=False)]
