"""Three verdicts: passed, failed, and undecided, which is neither; and how a terminal and machines show each."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.statistics_cases import flips
from evalengine.__main__ import main
from evalengine.errors import ConfigError
from evalengine.report.cli import gate as gate_cli
from evalengine.report.gate.gate import could_not_judge
from evalengine.report.gate.policies import parse_policy
from evalengine.report.gate.report import (
    STYLES,
    Check,
    Report,
    headline,
    junit,
    markdown,
    report_lines,
    workflow_commands,
)
from evalengine.report.gate.rules import evaluate
from evalengine.report.stats.loss_bound import loss_bound, stratum
from evalengine.report.stats.significance import mcnemar
from evalengine.util.sheet import escaped
from tests.report.gate_runs import item, make_run


def checked(rule: dict[str, Any], **tasks: tuple[int, int, int]) -> dict[str, Check]:
    """Task -> its check. tasks: (documents, lost, won), where the old run had three of four documents right."""
    old = {task: [1.0] * (n * 3 // 4) + [0.0] * (n - n * 3 // 4) for task, (n, _, _) in tasks.items()}
    new = {task: [0.0] * lost + old[task][lost : n - won] + [1.0] * won for task, (n, lost, won) in tasks.items()}
    checks = evaluate(parse_policy({"accuracy": rule}, "test").rule, make_run(old), make_run(new, total=-1.6))
    return {check.task: check for check in checks}


def report(*statuses: str, inconclusive: str = "report") -> Report:
    """A report with one accuracy check per status."""
    verdict = "fail" if "fail" in statuses else "inconclusive" if "undecided" in statuses else "pass"
    checks = tuple(Check("accuracy", f"t{i}", "acc", status, "said") for i, status in enumerate(statuses))  # type: ignore[arg-type]
    return Report(verdict, "own", "", "a", "b", checks=checks, inconclusive=inconclusive)  # type: ignore[arg-type]


def test_a_margin_passes_fails_or_is_undecided() -> None:
    tasks = checked({"margin": 2.0}, large=(2000, 20, 20), small=(100, 1, 1), worse=(2000, 90, 20))
    statuses = {task: check.status for task, check in tasks.items()}
    assert statuses == {"large": "pass", "small": "undecided", "worse": "fail"}
    assert tasks["large"].detects == "Excluded at 95 %: losses above 0.61 points"
    assert tasks["small"].message.startswith("a loss up to 4.46 points is not excluded (limit 2); about ")
    assert "documents would settle it with probability 0.8, if there is no loss" in tasks["small"].message
    assert tasks["worse"].message.startswith("a loss above the limit is statistically significant (p = ")


def test_a_bound_is_shown_as_compare_shows_it_and_one_cluster_is_named() -> None:
    """31.234 points: the gate said 31.3, and `compare` 31.2."""
    assert checked({"margin": 40.0}, t=(8, 0, 0))["t"].detects == "Excluded at 95 %: losses above 31.24 points"
    a, b = (make_run({"t": [1.0] * 60 + [0.0] * 40}, total=total) for total in (-1.5, -1.6))
    related = replace(a, clusters={"t": dict.fromkeys(range(100), "x")})
    (check,) = evaluate(parse_policy({"accuracy": {"margin": 2.0}}, "test").rule, related, b)
    assert check.message.startswith("no loss can be excluded by 100 documents in 1 cluster alone: ")


def test_the_first_line_says_how_many_documents_would_tell_and_each_check_is_one_short_line() -> None:
    tasks = checked({"margin": 2.0}, large=(2000, 20, 20), small=(100, 1, 1), worse=(2000, 90, 20))
    undecided = replace(report("pass", "undecided"), checks=(tasks["large"], tasks["small"]))
    first, *lines = map(str, report_lines(undecided))
    need = re.search(r"about ([0-9,]+) documents would settle it", tasks["small"].message)
    assert need is not None and first.endswith(f"1 of 2 have too few documents (largest need: about {need[1]})")
    assert [line[:9] for line in lines] == ["UNDECIDED", "PASS     "] and "(limit 2); about" in lines[0]
    assert lines[1].endswith("0.7500 -> 0.7500 (+0.00 points); Excluded at 95 %: losses above 0.61 points")
    failed = replace(report("fail"), checks=(tasks["worse"], Check("accuracy", "left", "", "skip", "out")))
    (line,) = [text for text in map(str, report_lines(failed)) if text.startswith("FAIL")]
    assert line.endswith("3.50 points, limit 2") and "better" not in line
    assert "\n".join(map(str, report_lines(failed, verbose=True))).count("SKIP") == 1
    assert any("1 not judged" in text for text in map(str, report_lines(failed)))


def test_a_margin_that_no_share_can_lose_is_refused() -> None:
    with pytest.raises(ConfigError, match="margin=300: its scores are shares, which can lose no more than 100 points"):
        checked({"margin": 300}, t=(100, 1, 1))
    rule, run = parse_policy({"accuracy": {"margin": 300}}, "test").rule, make_run({"t": [1.0, 0.0, 1.0]})
    with pytest.raises(ConfigError, match="margin=300"):
        evaluate(rule, run, run)  # equal bits, too


def test_no_sink_calls_an_excluded_loss_one_that_it_can_detect() -> None:
    """It read "can detect: excluded at 95 %: ..."."""
    gated = Report("pass", "own", "", "a", "b", checks=(checked({"margin": 2.0}, t=(2000, 20, 20))["t"],))
    texts = ["\n".join(map(str, report_lines(gated, verbose=True))), markdown(gated), junit(gated)]
    assert all("Excluded at 95 %: losses above 0.61 points" in text and "an detect" not in text for text in texts)


def test_the_risk_of_a_check_agrees_with_its_status() -> None:
    tasks = checked({"margin": 2.0}, large=(2000, 20, 20), small=(100, 1, 1), worse=(2000, 90, 20))
    large, small, worse = (tasks[name].risk or 0.0 for name in ("large", "small", "worse"))
    assert 0 < large <= 0.05 < small < 0.95 <= worse < 1
    assert checked({}, t=(400, 3, 1))["t"].risk is None, "there is no margin"


def test_a_loss_that_is_there_may_lie_within_the_margin_and_is_said() -> None:
    """60 lost and 20 won of 10,000: p is 5e-6, and the loss no more than 0.57 points."""
    check = checked({"margin": 2.0}, large=(10_000, 60, 20))["large"]
    assert check.status == "pass" and check.message.startswith("a loss is statistically significant, but within ")
    assert checked({}, large=(10_000, 60, 20))["large"].status == "fail"


@pytest.mark.parametrize(("case", "p"), [("avg@64", "2.8e-05"), ("clusters", "0.0002"), ("uniform", "2.4e-12")])
def test_a_loss_in_many_small_parts_fails_without_a_margin(case: str, p: str) -> None:
    """30 documents of 64 samples that lose 10.8 points; 15 clusters of which each loses a sixth; 50 that lose 5 points
    each. A rare total loss, of which none was seen, could not take that back, but the p allowed for one: it was .06 to
    .11. What could not have been seen is a caution, of losses alone."""
    rng, names = np.random.default_rng(0), {}
    rates = rng.beta(1, 1, 30)
    old, new = ((rng.binomial(64, share) / 64).tolist() for share in (rates, np.clip(rates - 0.1, 0, 1)))
    if case == "clusters":
        old, new = [1.0] * 200 + [0.0] * 100, [0.0] * 50 + [1.0] * 150 + [0.0] * 100
        names = {"t": {doc: f"c{doc % 15}" for doc in range(300)}}
    if case == "uniform":
        old, new = [0.5] * 50, [0.45] * 50
    a, b = (replace(make_run({"t": x}, total=total), clusters=names) for x, total in ((old, -1.5), (new, -1.6)))
    rule = parse_policy({"accuracy": {}}, "test").rule
    (check,), (gain,) = evaluate(rule, a, b), evaluate(rule, b, a)
    assert check.status == "fail" and f"(p = {p})" in check.message, check.message
    assert check.cautions[-1].endswith(" would not have been seen")
    assert gain.status == "pass" and not any("would not have been seen" in why for why in gain.cautions)
    if case == "avg@64":
        (beyond,) = evaluate(parse_policy({"accuracy": {"margin": 2.0}}, "test").rule, a, b)
        assert beyond.status == "fail" and (beyond.risk or 0.0) > 0.99, "it was undecided"
        assert check.cautions == ("a change larger than 0.27 in fewer than 3 in 30 documents would not have been seen",)


def test_raw_and_corrected_p_are_both_said() -> None:
    alone = checked({}, one=(100, 5, 0))["one"]
    assert "one-sided p of no loss 0.0312 (exact McNemar); one metric, so no correction" in alone.message
    both = checked({}, one=(100, 5, 0), two=(100, 0, 0))["one"]
    assert "one-sided p of no loss 0.0312 (exact McNemar), 0.0625 after Holm over 2 metrics" in both.message
    assert both.status == "pass" and alone.status == "fail"


@pytest.mark.parametrize(
    ("rule", "status"),
    [
        ({"max_regression": 2.0}, "undecided"),
        ({"max_regression": 9.0}, "pass"),
        ({}, "pass"),
        ({"max_regression": 2.0, "require_power": True}, "fail"),
        ({"max_regression_percent": 2.0, "require_power": True}, "fail"),  # 1.5 points; the policy was rejected
        ({"margin": 2.0, "require_power": True}, "fail"),
    ],
)
def test_undecided_is_what_could_not_see_the_loss_that_the_policy_names(rule: dict[str, Any], status: str) -> None:
    assert checked(rule, t=(100, 0, 0))["t"].status == status


def test_four_documents_can_see_nothing_and_are_no_pass() -> None:
    check = checked({}, t=(4, 0, 0))["t"]
    assert check.status == "undecided" and "cannot show any loss" in check.message


def test_what_can_be_detected_says_at_which_rate_of_flips() -> None:
    check = checked({}, t=(1319, 0, 0))["t"]
    assert "a loss of 0.51 points or more with probability 0.8 at the 0.0 % of answers that flip here" in check.detects
    assert "among 10 % flips it would take 2.19 points" in check.detects


def test_the_claim_without_flips_is_none_about_a_loss_among_many() -> None:
    """A loss of 0.51 points among 10 % flips is found one time in ten: the claim names its rate of flips for that."""
    rng, draws = np.random.default_rng(0), 400
    rate = sum(mcnemar(*_counts(flips(rng, 1319, 0.05255, 0.04745)))[1] <= 0.05 for _ in range(draws)) / draws
    assert 0.05 < rate < 0.2


def test_a_margin_needs_no_claim_about_the_rate_of_flips() -> None:
    """A true loss of the margin among 10 % flips: it passes one time in twenty (3 sigma of 1000: 2.1 points)."""
    rng, codes = np.random.default_rng(1), np.arange(1319)
    bounds = [loss_bound([stratum(flips(rng, 1319, 0.06, 0.04), codes)], 1.0, 0.05).bound for _ in range(1000)]
    assert 0.01 < sum(bound <= 0.02 for bound in bounds) / 1000 <= 0.05 + 0.021


def _counts(drawn: np.ndarray) -> tuple[int, int]:
    """(wins, losses) of the draws of `flips`: a win is -1, a loss 1."""
    return int(np.sum(drawn == -1)), int(np.sum(drawn == 1))


@pytest.mark.parametrize(
    ("statuses", "text", "code"),
    [
        (("pass", "pass"), "PASS (2 of 2 checks)", 0),
        (("pass", *["undecided"] * 4, "pass"), "INCONCLUSIVE: no check failed; 4 of 6 are undecided", 3),
        (("undecided", "fail", "pass", "skip"), "FAIL: 1 of 3 checks failed (accuracy t1 acc); 1 undecided", 1),
        (
            ("fail",) * 4,
            "FAIL: 4 of 4 checks failed (accuracy t0 acc; accuracy t1 acc; accuracy t2 acc; ... and 1 more)",
            1,
        ),
    ],
)
def test_the_headline_counts_and_the_exit_code_tells(statuses: tuple[str, ...], text: str, code: int) -> None:
    gated = report(*statuses)
    assert headline(gated) == f"gate own: {text}" and gated.exit_code == code


@pytest.mark.parametrize(("setting", "code"), [("fail", 1), ("report", 3), ("pass", 0)])
def test_the_policy_says_what_inconclusive_means(setting: str, code: int) -> None:
    gated = report("pass", "undecided", inconclusive=setting)
    assert (gated.verdict, gated.exit_code) == ("inconclusive", code)
    case = ElementTree.fromstring(junit(gated).encode()).findall(".//testcase")[1]
    assert [child.tag for child in case] == [{"fail": "failure", "report": "skipped", "pass": "skipped"}[setting]]
    assert case[0].attrib["type"] == "undecided" and case[0].attrib["message"].startswith("undecided: ")
    (line,) = workflow_commands(gated)
    assert line.startswith({"fail": "::error ", "report": "::warning ", "pass": "::notice "}[setting])
    policy = parse_policy({"digest": "equal", "inconclusive": setting}, "own")
    assert could_not_judge(policy, "a", "b", "no run", []).inconclusive == setting, "as its sweep's annotations have it"


def test_every_verdict_has_its_own_colour_and_sign() -> None:
    assert len(set(STYLES.values())) == len(STYLES) == 4
    signs = {markdown(report(*statuses)).split()[1] for statuses in (("pass",), ("fail",), ("undecided",))}
    assert len(signs) == 3
    rows = [line for line in markdown(report("pass", "undecided", "fail")).splitlines() if line.startswith("| ")][2:]
    statuses = [row.split("|")[1].split()[-1] for row in rows]
    assert statuses == ["fail", "undecided", "pass"], "what needs a reader is first"


def test_markdown_is_readable_as_text() -> None:
    text = "0.7700 -> 0.7050 (-6.50 points): exact_match,strict-match, p 0.03; document 3 was 'a'; [66.6, \u22121.9]"
    assert escaped(text) == text
    for odd in ("_x_ *y* [z](u) `w` <b> | &#64;a &amp; #1 @me $x$ ~t~", "1. one", "- two", "> three", "[ ] four"):
        assert escaped(odd) != odd
    for link in ("[1](u)", "[1][2]", "[1]: u", "[z]", "[^1]"):
        assert "[" not in escaped(link)[:1]


def test_an_inconclusive_gate_exits_with_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    undecided = report("pass", "undecided")
    risky = replace(undecided, checks=tuple(replace(check, risk=0.123) for check in undecided.checks))
    monkeypatch.setattr(gate_cli, "gate", lambda *_: risky)
    assert main(["gate", "a", "b", "--no-annotations", "--risk"]) == 3
    assert capsys.readouterr().out.count("P(loss > margin) = 0.12\n") == 2
    assert main(["gate", "a", "b", "--no-annotations"]) == 3
    out = capsys.readouterr().out
    assert "P(loss" not in out
    assert "UNDECIDED accuracy t1 acc" in out and out.startswith("gate own: INCONCLUSIVE: no check failed; 1 of 2 are ")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("fail", "pass", ("excused", "pass")),
        ("undecided", "pass", ("excused", "pass")),
        ("fail", "undecided", ("excused", "undecided")),
        ("fail", "fail", ("fail", "fail")),
        ("undecided", "undecided", ("undecided", "undecided")),
    ],
)
def test_any_of_is_true_false_or_unknown(first: str, second: str, expected: tuple[str, str]) -> None:
    rules = {"pass": {"margin": 9.0}, "undecided": {"margin": 0.5}, "fail": {"max_regression": 0.1}}
    old, new = make_run({"t": [1.0] * 200}), make_run({"t": [0.0] + [1.0] * 199})
    policy = {"any_of": [{"accuracy": rules[first]}, {"accuracy": rules[second]}]}
    checks = evaluate(parse_policy(policy, "test").rule, old, new)
    assert tuple(check.status for check in checks) == expected


def test_all_of_is_undecided_beside_a_pass() -> None:
    old, new = make_run({"t": [1.0] * 50}), make_run({"t": [1.0] * 50}, [item("t", 3, total=-2.0)])
    policy = {"all_of": [{"tokens": {"epsilon": 1}}, {"accuracy": {"margin": 1}}]}
    checks = evaluate(parse_policy(policy, "test").rule, old, new)
    assert [check.status for check in checks] == ["pass", "undecided"]
