"""`plan`: how many documents a gate's margin needs, said before any run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.cli import plan
from evalengine.report.read.index import FINISHED, Entry


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_need_grows_with_flips_and_is_held_against_the_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, "task=gsm8k", "margin=1")
    rows = re.findall(r"([\d.]+) % +([\d,]+) +(yes|no)", text)
    assert code == 0 and rows == [
        ("0", "322", "yes"), ("0.5", "648", "yes"), ("2", "1,562", "no"), ("5", "3,411", "no"), ("10", "6,500", "no"),
    ]  # fmt: skip
    assert re.search(r"gsm8k +1,319 +2 % +476 +yes", said(capsys, "task=gsm8k", "margin=2", "flips=2%")[1])
    assert re.search(r"mmlu \(57 tasks\) +14,042 +2 % ", said(capsys, "task=mmlu", "margin=2", "flips=0.02")[1])


def test_the_time_is_that_of_the_newest_run_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    runs = [Entry(tmp_path, FINISHED, task="gsm8k", pace=pace) for pace in (0.5, 9.0, None)]
    monkeypatch.setattr(plan, "entries", lambda root: runs)  # the newest first
    assert re.search(r"gsm8k +1,319 +0 % +162 +yes +81 s", said(capsys, "task=gsm8k", "margin=2", "flips=0")[1])


def test_all_problems_are_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "task=nosuch", "flips=3", "power=0.9", "power=0.8", "limit=3", "alpha=x")
    assert code == 2
    for problem in (
        "task=nosuch: no task or group that is shipped", "margin=POINTS is needed", "flips=3: a share",
        "power is given twice", "'limit=3' is none of", "alpha=x: must be a number",
    ):  # fmt: skip
        assert problem in text
    assert "task=NAME is needed" in said(capsys, "margin=1")[1]
    assert "margin=0: must lie in (0, 100] points" in said(capsys, "task=gsm8k", "margin=0")[1]
