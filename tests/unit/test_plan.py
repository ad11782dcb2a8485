"""`plan`: how many documents a gate's margin needs, said before any run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.cli import plan
from evalengine.report.gate import plan_report
from evalengine.report.read.index import FINISHED, Entry
from evalengine.report.read.run import Item, Key, Run, RunData
from evalengine.report.stats.measured import spreads
from tests.report.gate_runs import item, make_run


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_need_grows_with_flips_and_is_held_against_the_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gsm8k has two checks, arc_easy two: each must pass with the root of 0.8."""
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, "task=gsm8k", "margin=1")
    assert code == 0 and text.startswith(
        "policy accuracy: documents needed so that its 2 checks all pass with probability 0.8, "
    )
    for name in ("strict-match", "flexible-extract"):
        needs = re.search(rf"gsm8k exact_match,{name} +1 point +1,319 +(.*)", text)
        assert needs and needs[1].split() == ["299", "793", "2,011*", "4,519*", "8,704*"]
    chances = re.search(r"the whole gate passes \(probability\) +as they are +(.*)", text)
    assert chances and chances[1].split() == ["1.00", "0.98", "0.52", "0.17", "0.07"] and "* more than there" in text
    both = said(capsys, "task=gsm8k,arc_easy", "margin=1", "flips=2%")[1]
    assert "its 4 checks all pass" in both and len(re.findall(r" 2,46\d\*", both)) == 4
    two = said(capsys, "task=mmlu", "flips=0.02", "power=0.9", "alpha=1%")[1]
    assert re.search(r"mmlu acc,none +2 points +14,042 +917 *\n", two), "57 tasks are one check"


def test_the_policys_own_limits_are_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("""
extends: accuracy
any_of:
  - tokens: {}
  - accuracy:
      margin: 3.0
      tasks: {gsm8k: {margin: 1.0, metrics: {"exact_match,strict-match": {skip: true}}}}
      averages: {reasoning: {tasks: ["arc_*"], metric: acc}}
""")
    text = said(capsys, "task=gsm8k,arc_easy,arc_challenge", f"policy={own}", "flips=2%", "margin=4")[1]
    limits = dict(re.findall(r"^ (\S.*?\S) +(\d+) points?", text, re.MULTILINE))
    assert limits == {
        "average reasoning acc, macro mean": "4", "gsm8k exact_match,flexible-extract": "1",
        **{f"arc_{kind} {metric},none": "4" for kind in ("easy", "challenge") for metric in ("acc", "acc_norm")},
    }  # fmt: skip


def test_what_the_settings_do_not_tell_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Passages and log-likelihoods are known from runs alone; the items of translations are known without."""
    text = said(capsys, "task=drop,wikitext,gsm8k", "margin=1", "flips=2%")[1]
    assert re.search(r"drop em,none +1 point +\? +\?", text) and "at most 0.52" in text, "gsm8k's two checks"
    assert "drop em,none, drop f1,none: the gate counts clusters, rows of one 'passage'" in text
    assert re.search(r"wikitext word_perplexity,none +1 % +62 +\?", text) and "are known only from two runs" in text
    shared = said(capsys, "task=mgsm_direct", "flips=2%", "margin=2")[1]
    assert len(re.findall(r"2 points +2,750 in 250 clusters +[\d,]+", shared)) == 2


def test_the_time_is_that_of_the_newest_run_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("task=gsm8k", "margin=2", "flips=0")
    assert "take about" not in said(capsys, *words)[1], "no figure where nothing is known"
    (tmp_path / "results").mkdir()
    runs = [Entry(tmp_path / "newest", FINISHED, task="gsm8k", model="m", pace=pace) for pace in (None, 0.5, 9.0)]
    monkeypatch.setattr(plan_report, "entries", lambda root: runs)  # the newest first
    assert re.search(r"gsm8k: 1,319 documents take about 11 min \(0.5 s each.*newest, m\)", said(capsys, *words)[1])

    def unreadable(root: Path) -> list[Entry]:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(plan_report, "entries", unreadable)
    assert "take about" not in said(capsys, *words)[1], "nor where results/ cannot be read"


def loaded(run: Run) -> RunData:
    return RunData(run, {}, {})


def with_runs(monkeypatch: pytest.MonkeyPatch, *runs: Run) -> str:
    monkeypatch.setattr(plan, "all_runs", list)
    monkeypatch.setattr(plan, "load_data", lambda name: loaded(runs[int(name)]))
    return f"runs={','.join(map(str, range(len(runs))))}"


def test_fast_runs_of_one_configuration_show_the_flips(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three schedules of one model flip 4, 6 and 10 of 200; an invariant run beside them counts for nothing."""
    scores = [[1.0] * 200, [0.0] * 4 + [1.0] * 196, [1.0] * 194 + [0.0] * 6]
    fast = [make_run({"gsm8k": own}, numerics="fast") for own in scores]
    word = with_runs(monkeypatch, *fast, make_run({"gsm8k": [0.0] * 200}))
    text = said(capsys, "task=gsm8k", "margin=2", word)[1]
    assert re.search(r"as the runs differ\n.*\n gsm8k exact_match,strict-match +2 points +200 +\d*\*", text)
    assert "20 of 600 scores flip, measured over 3 pairs of fast runs of one configuration, which differ by sch" in text
    assert "schedule alone (at most 6.3 % at 95 % confidence)" in text, "7 of the 200 documents"
    two = with_runs(monkeypatch, fast[0], make_run({"gsm8k": scores[1]}, weights="other"))
    assert "4 of 200 scores flip, measured over one pair of the runs" in said(capsys, "task=gsm8k", "margin=2", two)[1]
    given = said(capsys, "margin=2", "flips=2%", two)[1]
    assert re.search(r" 2 %\n.* 46\d\*.*more than the runs have", given, re.DOTALL), "flips= goes first"


def test_runs_tell_the_clusters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A baseline of drop is enough: its 200 questions are about 20 passages. Another task comes from its settings."""
    run = make_run({"drop": [1.0, 0.0] * 100})
    run = replace(run, clusters={"drop": {doc: f"passage {doc // 10}" for doc in range(200)}})
    word = with_runs(monkeypatch, run)
    text = said(capsys, "task=drop,gsm8k", "margin=9", "flips=1%", word)[1]
    found = re.search(r"drop exact_match,strict-match +9 points +200 in 20 clusters +([\d,]+)\*", text)
    assert found and int(found[1].replace(",", "")) > 350 and "unknown" not in text and " ?" not in text
    assert len(re.findall(r"gsm8k exact_match,\S+ +9 points +1,319", text)) == 2
    assert "drop exact_match" in said(capsys, word)[1], "without task= all that the run holds"


def test_samples_are_worth_documents_where_answers_are_sampled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document is right in half of 8 samples: all variance is within, 8/7 of 1/4, and k samples divide it."""
    run = make_run({"gsm8k": [0.5] * 100})
    key = ("gsm8k", "avg@8", "strict-match")
    run = replace(run, scores={key: dict.fromkeys(range(100), 0.5)}, results={key: (0.5, None)},
                  higher_is_better={key: True})  # fmt: skip
    text = said(capsys, "task=gsm8k", "margin=2", with_runs(monkeypatch, run))[1]
    assert "the variance is 0 between documents and 0.286 within one (8 samples each)" in text
    needs = {int(k): int(n.replace(",", "")) for n, k in re.findall(r"([\d,]+) \((\d+)\)", text)}
    assert [*needs] == [1, 2, 4, 8, 16] and needs[1] > 1.9 * needs[2] > 3.4 * needs[4] and needs[16] < 800
    greedy = make_run({"gsm8k": [1.0, 0.0] * 50})
    assert "samples each" not in said(capsys, "task=gsm8k", "margin=2", with_runs(monkeypatch, greedy))[1]


def test_every_accuracy_rule_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Samples were planned for the first rule alone. A percent of a value needs the value, which settings lack."""
    key, own = ("gsm8k", "avg@8", "strict-match"), tmp_path / "own.yaml"
    run = replace(make_run({"gsm8k": [0.5] * 100}), scores={key: dict.fromkeys(range(100), 0.5)},
                  results={key: (0.5, None)}, higher_is_better={key: True})  # fmt: skip
    needs = []
    for margins in ((2, 4), (4, 2), (2, 2)):
        rules = "".join(f"  - accuracy: {{margin: {margin}}}\n" for margin in margins)
        own.write_text(f"all_of:\n{rules}")
        text = said(capsys, "task=gsm8k", f"policy={own}", with_runs(monkeypatch, run))[1]
        needs.append(re.findall(r"([\d,]+) \(\d+\)", text))
    assert needs[0] == needs[1] == needs[2] and len(needs[0]) == 5
    own.write_text("accuracy: {margin: 2, max_regression_percent: 1}")
    text = said(capsys, "task=gsm8k", f"policy={own}")[1]
    assert "exact_match,strict-match: max_regression_percent is of the baseline's value, which only a run has" in text
    assert "only a run has" not in said(capsys, "task=gsm8k", f"policy={own}", with_runs(monkeypatch, run))[1]


def test_the_probability_of_the_right_choice_needs_fewer_documents(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two choices that all but tie: each run takes the other one, and their probabilities differ by 0.02."""

    def run(first: float) -> RunData:
        items: dict[Key, Item] = {}
        samples: list[dict[str, Any]] = []
        for doc in range(50):
            for index, total in enumerate((first, -1.0)):
                own = replace(item("sciq", doc, total=total), request_index=index, kind="loglikelihood")
                items[own.key] = own
            arguments = {f"gen_args_{n}": {"arg_0": "q", "arg_1": f" {text}"} for n, text in enumerate("xy")}
            row = {"doc_id": doc, "filter": "none", "metrics": ["acc"], "target": "x", "arguments": arguments}
            samples.append(row)
        return replace(loaded(replace(make_run({"sciq": [0.0] * 50}), items=items)), rows={"sciq": samples})

    runs = run(-0.98), run(-1.02)
    assert spreads(*runs, "sciq") == (1.0, pytest.approx(0.01**2, rel=0.01))
    monkeypatch.setattr(plan, "all_runs", list)
    monkeypatch.setattr(plan, "load_data", lambda name: runs[int(name)])
    text = said(capsys, "task=sciq", "margin=2", "runs=0,1")[1]
    found = re.search(r"by that probability, ([\d,]+) documents are enough instead of ([\d,]+), for", text)
    assert found and int(found[1]) < 200 < 10_000 < int(found[2].replace(",", ""))


def test_all_problems_are_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "margin=1%", "flips=3", "power=0.9", "power=0.8", "limit=3", "alpha=x", "policy=nosuch")
    assert code == 2
    for problem in (
        "margin='1%': must be a number alone, more than 0 and finite; margin=1 is one",
        "flips='3': must be a share from 0 to 1", "power is given twice", "limit: no such setting; there is: margin, ",
        "alpha=x: must be more than 0 and less than 1",
    ):  # fmt: skip
        assert problem in text
    for words, problem in (
        (("margin=1",), "task=NAME or runs=RUN is needed"),
        (("task=gsm8k", "policy=nosuch"), "plan: policy=nosuch: no such policy or file"),
        (("task=nosuch",), "task=nosuch: no such task or group, neither shipped (`python"),
        (("task=gsm8k", "margin=0"), "plan: margin='0': must be a number alone, more than 0 and finite"),
        (("task=gsm8k", "margin=nan"), "plan: margin=nan: must be a number alone, more than 0 and finite"),
        (("task=gsm8k", "power=100%"), "plan: power='100%': must be more than 0 and less than 1"),
        (("task=gsm8k", "margin=100"), "margin=100: its scores are shares"),
        (("task=gsm8k", "alpha=0.9"), "plan: alpha=0.9: accuracy.power: 0.8 must be above alpha 0.9"),
        (("task=gsm8k", "policy=bitwise"), "policy=bitwise: has no accuracy rule"),
    ):
        code, text = said(capsys, *words)
        assert code == 2 and problem in text and "accuracy.yaml" not in text, text


def test_a_folder_of_runs_is_its_runs_and_no_run_counts_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "digest.txt").touch()
    made = {"one": make_run({"t": [1.0] * 300}), "two": make_run({"t": [0.0] * 3 + [1.0] * 297}, weights="other")}
    monkeypatch.setattr(plan, "load_data", lambda name: loaded(made[Path(name).name]))
    text = said(capsys, f"runs={tmp_path / 'sweep'}", "margin=1")[1]
    assert "3 of 300 scores flip, measured over one pair of the runs" in text
    assert re.search(r"t exact_match,strict-match +1 point +300 ", text)
    one = tmp_path / "sweep" / "one"
    code, text = said(capsys, f"runs={one},{one}/")
    assert code == 2 and "plan: runs: " in text and "one is named twice" in text


def test_tasks_given_twice_and_small_numbers_read_well(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "task=gsm8k,gsm8k", "margin=1", "flips=-0.0")[1]
    assert "its 2 checks all pass" in text
    assert " 0 % (bits)" in text and "-0 %" not in text
    assert "Answers that are equal in every bit always pass. 0 % (bits): bits change, but no answer does." in text


def test_lambadas_perplexity_is_planned_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "task=lambada_openai", "flips=2%")[1]
    assert re.search(r"lambada_openai perplexity,none +1 % +5,153 +\?", text) and "one value" not in text
    assert re.search(r"passes \(probability\) +as they are +unknown *\n", text), "it said: at most 1.00"
    alone = said(capsys, "task=wikitext", "power=0.9")[1]
    assert "all pass with probability 0.9, if nothing is lost" in alone, "it spoke of several powers"
    assert "lambada_openai perplexity,none: the differences of log-likelihoods are known only from two runs" in text
