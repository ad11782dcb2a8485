"""`plan`: how many documents a gate's margin needs, said before any run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.cli import paces, plan
from evalengine.report.read.index import FINISHED, Entry
from evalengine.report.read.load import RunData
from evalengine.report.read.run import Run
from evalengine.report.stats.measured import spreads
from tests.report.gate_runs import item, make_run


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
    runs = [Entry(tmp_path / "newest", FINISHED, task="gsm8k", model="m", pace=pace) for pace in (None, 0.5, 9.0)]
    monkeypatch.setattr(paces, "entries", lambda root: runs)  # the newest first
    text = said(capsys, "task=gsm8k", "margin=2", "flips=0")[1]
    assert re.search(r"gsm8k +1,319 +0 % +162 +yes +81 s", text)
    assert "gsm8k: time by" in text and "newest, m: 0.5 s a document" in text


def test_without_a_run_the_time_is_a_reference_records_or_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "task=gsm8k", "margin=2", "flips=0")[1]
    found = re.search(r"time by results/reference/(\S+\.json), qwen3-0.6b on NVIDIA H200: ([\d.]+) s a document", text)
    assert found and re.search(r"162 +yes +\d+ s", text)
    rows = json.loads((paces.REFERENCE / found[1]).read_text())["rows"]
    times = [row["wall_s"] / row["requests"] for row in rows if row["workload"] == "gsm8k" and row["mode"] != "fast"]
    assert float(found[2]) in [pytest.approx(time, rel=0.01) for time in times]
    monkeypatch.setattr(paces, "REFERENCE", tmp_path)
    text = said(capsys, "task=gsm8k", "margin=2", "flips=0")[1]
    assert "time by" not in text and re.search(r"162 +yes *\n", text), "no figure where nothing is known"


def loaded(run: Run) -> RunData:
    return RunData(run, {}, {}, {}, {}, {}, {})


def with_runs(monkeypatch: pytest.MonkeyPatch, *runs: Run) -> str:
    monkeypatch.setattr(plan, "named_runs", list)
    monkeypatch.setattr(plan, "load_run_data", lambda name: loaded(runs[int(name)]))
    return f"runs={','.join(map(str, range(len(runs))))}"


def test_fast_runs_of_one_configuration_show_the_flips(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three schedules of one model flip 4, 6 and 10 of 200; an invariant run beside them counts for nothing."""
    scores = [[1.0] * 200, [0.0] * 4 + [1.0] * 196, [1.0] * 194 + [0.0] * 6]
    fast = [make_run({"gsm8k": own}, numerics="fast") for own in scores]
    word = with_runs(monkeypatch, *fast, make_run({"gsm8k": [0.0] * 200}))
    text = said(capsys, "task=gsm8k", "margin=2", word)[1]
    assert re.search(r"gsm8k +1,319 +3.33 % +679 +yes", text)
    assert "flips measured: 20 of 600 scores over 3 pairs of fast runs of one configuration, by the schedule" in text
    assert "alone (at most 6.3 % at 95 %)" in text, "7 of the 200 documents"
    two = with_runs(monkeypatch, fast[0], make_run({"gsm8k": scores[1]}, weights="other"))
    assert "4 of 200 scores over a pair of the runs" in said(capsys, "task=gsm8k", "margin=2", two)[1]
    assert re.search(r" 2 % +476 ", said(capsys, "task=gsm8k", "margin=2", "flips=2%", two)[1]), "what was said counts"


def test_samples_are_worth_documents_where_answers_are_sampled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document is right in half of 8 samples: all variance is within, 8/7 of 1/4, and k samples divide it."""
    run = make_run({"gsm8k": [0.5] * 100})
    key = ("gsm8k", "avg@8", "strict-match")
    run = replace(run, scores={key: dict.fromkeys(range(100), 0.5)}, results={key: (0.5, None)})
    text = said(capsys, "task=gsm8k", "margin=2", with_runs(monkeypatch, run))[1]
    assert "a variance of 0 between documents and of 0.286 within (8 samples each)" in text
    needs = {int(k): int(n.replace(",", "")) for n, k in re.findall(r"([\d,]+) \((\d+)\)", text)}
    assert [*needs] == [1, 2, 4, 8, 16] and needs[1] > 1.9 * needs[2] > 3.4 * needs[4] and needs[16] < 800
    greedy = make_run({"gsm8k": [1.0, 0.0] * 50})
    assert "samples each" not in said(capsys, "task=gsm8k", "margin=2", with_runs(monkeypatch, greedy))[1]


def test_the_probability_of_the_right_choice_needs_fewer_documents(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two choices that all but tie: each run takes the other one, and their probabilities differ by 0.02."""

    def run(first: float) -> RunData:
        items, samples = {}, {}
        for doc in range(50):
            for index, total in enumerate((first, -1.0)):
                own = replace(item("sciq", doc, total=total), request_index=index, kind="loglikelihood")
                items[own.key] = own
            arguments = {f"gen_args_{n}": {"arg_0": "q", "arg_1": f" {text}"} for n, text in enumerate("xy")}
            row = {"doc_id": doc, "filter": "none", "metrics": ["acc"], "target": "x", "arguments": arguments}
            samples[doc] = [row]
        return replace(loaded(replace(make_run({"sciq": [0.0] * 50}), items=items)), samples={"sciq": samples})

    runs = run(-0.98), run(-1.02)
    assert spreads(*runs, "sciq") == (1.0, pytest.approx(0.01**2, rel=0.01))
    monkeypatch.setattr(plan, "named_runs", list)
    monkeypatch.setattr(plan, "load_run_data", lambda name: runs[int(name)])
    text = said(capsys, "task=sciq", "margin=2", "runs=0,1")[1]
    found = re.search(r"scored by that, ([\d,]+) documents do in place of ([\d,]+), for", text)
    assert found and int(found[1]) < 200 < 10_000 < int(found[2].replace(",", ""))


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
