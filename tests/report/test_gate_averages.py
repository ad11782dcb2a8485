"""Averages over tasks as a policy holds them: which tasks, what the mean is, and how sure it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.statistics_cases import flips
from evalengine.errors import ConfigError
from evalengine.report.gate import gate as gate_module
from evalengine.report.gate.planned import plan_of
from evalengine.report.gate.policies import Policy, parse_policy
from evalengine.report.gate.report import Check
from evalengine.report.gate.rules import evaluate
from evalengine.report.gate.steps import SEQUENTIAL, ordered_by, steps_of
from evalengine.report.read.baseline import load_baseline, to_text
from evalengine.report.read.run import Run
from evalengine.report.stats.loss_bound import loss_bound, stratum
from tests.report.gate_runs import METRIC, make_run

TASKS = [f"mmlu_{number:02}" for number in range(20)]
AVERAGE = {"tasks": ["mmlu_*"], "metric": "exact_match"}


def average(a: Run, b: Run, rule: dict[str, Any] | None = None, **settings: Any) -> Check:
    """The check of one average over the tasks mmlu_*; rule: other entries of the policy's accuracy."""
    definition = {**AVERAGE, **settings}
    policy = {"accuracy": {"skip": True, "averages": {"mmlu": definition}, **(rule or {})}}
    checks = evaluate(parse_policy(policy, "test").rule, a, b)
    (check,) = (check for check in checks if check.task == "average mmlu")
    return check


def answers(lost: int, won: int, documents: int = 200, tasks: list[str] = TASKS) -> tuple[Run, Run]:
    """Two runs; in each task the second loses and wins so many documents."""
    old = [1.0] * (documents // 2) + [0.0] * (documents // 2)
    new = [0.0] * lost + old[lost : documents - won] + [1.0] * won
    return make_run(dict.fromkeys(tasks, old)), make_run(dict.fromkeys(tasks, new))


def test_half_a_point_on_the_average_is_seen_where_no_task_alone_can() -> None:
    a, b = answers(lost=3, won=3)
    check = average(a, b, margin=0.8)
    assert check.status == "pass", check.message
    assert "0.5000 -> 0.5000 (+0.00 points), 60 better, 60 worse of 4000 documents of 20 tasks" in check.message
    single = evaluate(parse_policy({"accuracy": {"margin": 0.8}}, "test").rule, a, b)
    assert {task_check.status for task_check in single} == {"undecided"}
    worse = average(*answers(lost=9, won=3), margin=0.5)
    assert worse.status == "fail" and "(-3.00 points)" in worse.message
    assert "a loss above the limit is statistically significant" in worse.message and "limit 0.5" in worse.message
    between = average(*answers(lost=5, won=3), margin=0.5)
    assert between.status == "undecided" and between.message.startswith("a loss is statistically significant (p = ")


def test_a_macro_mean_counts_tasks_and_a_micro_mean_documents() -> None:
    old = {"mmlu_large": [1.0] * 900, "mmlu_small": [1.0] * 100}
    a, b = make_run(old), make_run({**old, "mmlu_small": [0.0] * 10 + [1.0] * 90})
    assert "(-5.00 points)" in average(a, b, margin=1.0).message
    assert "(-1.00 points)" in average(a, b, margin=1.0, mean="micro").message
    assert "macro mean" in average(a, b, margin=1.0).name


def test_an_averages_p_is_one_of_holms_family() -> None:
    a, b = answers(lost=3, won=3)
    check = average(a, b, {"skip": False, "margin": 2.0}, margin=1.0)
    assert "after Holm over 21 metrics" in check.message and "(exact McNemar), of a loss" in check.message


def grouped(run: Run, groups: dict[str, list[str]]) -> Run:
    """The run with groups, each with the mean over its tasks' documents."""
    values = {
        name: [score for task in tasks for score in run.scores[task, METRIC[0], METRIC[1]].values()]
        for name, tasks in groups.items()
    }
    results = {(name, *METRIC): (sum(scores) / len(scores), None) for name, scores in values.items()}
    better = dict.fromkeys(results, True)
    return replace(
        run,
        groups=groups,
        results={**run.results, **results},
        higher_is_better={**run.higher_is_better, **better},
    )


def group_checks(a: Run, b: Run, **rule: Any) -> dict[str, Check]:
    """The checks by task of two runs whose tasks are a group, half of which is a group inside it."""
    groups = {"mmlu": TASKS, "mmlu_stem": TASKS[:10]}
    a, b = (replace(grouped(run, groups), groups={"mmlu": ["mmlu_stem", *TASKS[10:]], "mmlu_stem": TASKS[:10]})
            for run in (a, b))  # fmt: skip
    checks = evaluate(parse_policy({"accuracy": {"margin": 0.8, **rule}}, "test").rule, a, b)
    return {check.task: check for check in checks}


def test_a_group_is_one_check_and_its_tasks_are_reported() -> None:
    checks = group_checks(*answers(lost=3, won=3))
    assert {name: check.status for name, check in checks.items() if check.status != "skip"} == {"mmlu": "pass"}
    assert len(checks) == 22 and "0.5000 -> 0.5000" in checks["mmlu_07"].message
    assert "60 better, 60 worse of 4000 documents of 20 tasks" in checks["mmlu"].message
    assert "Holm" not in checks["mmlu"].message, "its tasks are not in the family"
    worse = group_checks(*answers(lost=9, won=3))
    assert worse["mmlu"].status == "fail" and "(-3.00 points)" in worse["mmlu"].message
    between = group_checks(*answers(lost=5, won=3))
    assert between["mmlu"].status == "undecided", "one value decided it"


def test_parts_of_a_group_are_judged_where_the_policy_names_them() -> None:
    checks = group_checks(
        *answers(lost=3, won=3), tasks={"mmlu_stem": {}, "mmlu_1*": {"margin": 9.0}, "mmlu_11": {"margin": 0.1}}
    )
    judged = {name: check.status for name, check in checks.items() if check.status != "skip"}
    assert judged.pop("mmlu") == judged.pop("mmlu_stem") == "pass"
    assert judged == {f"mmlu_{n}": "undecided" if n == 11 else "pass" for n in range(10, 20)}


def test_a_group_with_pairs_is_held_to_points_and_percents() -> None:
    """It loses 3 points, 6 % of its value: a percent for values must not excuse what the pairs show."""
    runs = answers(lost=9, won=3)
    for entries in ({"max_regression_percent": 9.0}, {"tasks": {"mmlu": {"max_regression_percent": 9.0}}}):
        checks = group_checks(*runs, **entries)
        assert checks["mmlu"].status == "fail" and "above the limit is stat" in checks["mmlu"].message, entries
        assert checks["mmlu_15"].status == "skip"
    by_value = group_checks(*runs, margin=9.0, max_regression_percent=5.0)["mmlu"]
    assert by_value.status == "fail" and "a loss of 3.00 points, 2.5 allowed" in by_value.message
    assert group_checks(*runs, margin=9.0, max_regression_percent=7.0)["mmlu"].status == "pass"


@pytest.mark.parametrize(("percent", "status"), [(5.0, "fail"), (7.0, "pass")])
def test_a_percent_limits_tasks_and_averages_too(percent: float, status: str) -> None:
    """A loss of 3 points, 6 % of the value, passed: the percent held for groups and perplexities only."""
    runs = answers(lost=9, won=3)
    rule = {"alpha": None, "margin": None, "max_regression_percent": percent}
    tasks = evaluate(parse_policy({"accuracy": rule}, "test").rule, *runs)
    inherited = average(*runs, rule)
    own = average(*runs, alpha=None, max_regression_percent=percent)
    assert {check.status for check in (*tasks, inherited, own)} == {status}
    said = "a loss of 3.00 points, 2.5 allowed" if status == "fail" else "(-3.00 points)"
    assert all(said in check.message for check in (*tasks, inherited, own))


def test_a_group_whose_documents_cannot_be_paired_fails(tmp_path: Path) -> None:
    """One test was of the value alone if the run named no groups, or had another number of documents in a task."""
    a, b = answers(lost=3, won=3)
    fewer = {**b.scores, (TASKS[3], *METRIC): dict(enumerate([1.0] * 100 + [0.0] * 98))}
    checks = group_checks(a, replace(b, scores=fewer))
    assert checks["mmlu"].status == checks[TASKS[3]].status == "fail"
    assert "2 documents have a value in one of the two only" in checks["mmlu"].message
    groups = {"mmlu": TASKS}
    a, b = (grouped(run, groups) for run in answers(lost=9, won=3))
    (tmp_path / "a.json").write_text(to_text(replace(a, kind="run")), encoding="utf-8")
    assert load_baseline(tmp_path / "a.json").groups == groups
    rule = parse_policy({"accuracy": {"margin": 0.8, "max_regression_percent": 9.0}}, "test").rule
    lost = dict([*b.scores[TASKS[3], METRIC[0], METRIC[1]].items()][1:])
    for old, new, why in (
        (a, replace(b, scores={**b.scores, (TASKS[3], *METRIC): lost}), "mmlu_03: 1 document has a value in one"),
        (a, replace(b, groups={}), "above the limit is statistically significant"),
        (replace(a, groups={}), b, "above the limit is statistically significant"),
    ):
        (check,) = (check for check in evaluate(rule, old, new) if check.task == "mmlu")
        assert check.status == "fail" and why in check.message


def test_a_groups_weights_are_those_that_give_both_runs_values() -> None:
    """Where all tasks of the baseline score alike, its value does not tell a macro mean from a micro mean."""
    old = {"big": [1.0] * 190, "small": [1.0] * 10}
    new = {**old, "small": [0.0] * 10}
    macro = {"results": {("g", *METRIC): (0.5, None)}}
    a, b = (replace(grouped(make_run(scores, total=total), {"g": members}), groups={"g": members})
            for scores, total, members in ((old, -1.5, ["big", "small"]), (new, -2.5, ["small", "big"])))  # fmt: skip
    b = replace(b, results={**b.results, **macro["results"]})
    (check,) = (check for check in evaluate(parse_policy({"accuracy": {"margin": 2.0}}, "t").rule, a, b)
                if check.task == "g")  # fmt: skip
    assert check.status == "fail" and "1.0000 -> 0.5000 (-50.00 points)" in check.message


def test_a_parts_own_setting_says_what_is_better_in_it() -> None:
    a, b = (replace(run, higher_is_better={}) for run in answers(lost=9, won=3))
    with pytest.raises(ConfigError, match="do not say which way is better"):
        group_checks(a, b, skip=False)
    entries = {"metrics": {METRIC[0]: {"higher_is_better": True}}}
    named = group_checks(a, b, tasks={**dict.fromkeys(TASKS, entries), "mmlu_stem": entries})
    assert named["mmlu"].status == "fail"


def test_a_gate_in_steps_does_not_judge_a_group() -> None:
    a, b = (grouped(run, {"mmlu": TASKS}) for run in answers(lost=3, won=3))
    b = replace(b, identity={**b.identity, SEQUENTIAL: {"step": 50, "baseline": ordered_by(a)}})
    with pytest.raises(ConfigError, match="mmlu exact_match: a group is judged over whole sets; set skip: true"):
        steps_of(parse_policy({"accuracy": {"margin": 0.8}}, "test"), a, b)
    skipped = {"accuracy": {"margin": 0.8, "tasks": {"mmlu": {"skip": True}}}}
    assert steps_of(parse_policy(skipped, "test"), a, b) is not None


def test_the_documents_needed_are_those_of_what_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    a = grouped(answers(lost=3, won=3)[0], {"mmlu": TASKS})
    monkeypatch.setattr(gate_module, "load_run", lambda name: a)
    (line,) = gate_module.needs("a", "accuracy")
    said = ("policy accuracy: 1 check; without a loss it passes with probability 1.00 if 0 % of answers change and "
            "1.00 if 2 % of answers change; equal bits always pass")  # fmt: skip
    assert gate_module.needs("a", "bitwise") == [], "no number of documents matters to it"
    assert line == said, "a group with enough documents takes no line"
    monkeypatch.setattr(
        gate_module,
        "load_policy",
        lambda name: parse_policy(
            {"all_of": [{"tokens": {}}, {"accuracy": {"margin": 0.5, "tasks": {"*_07": {}}}}]}, name
        ),
    )
    whole, few = gate_module.needs("a", "own")
    assert (
        whole.startswith("policy own: 2 checks; without a loss its accuracy rules pass with ")
        and " 0.01 if 2 % of answers change; " in whole
    )
    assert few == (
        "too few documents for mmlu exact_match,strict-match, mmlu_07 exact_match,strict-match; "
        "`evalengine plan runs=BASELINE` says how many they need"
    )


def test_a_pattern_of_an_average_leaves_out_the_group_that_it_fits() -> None:
    a, b = (grouped(run, {"mmlu_all": TASKS}) for run in answers(lost=3, won=3))
    assert "4000 documents of 20 tasks" in average(a, b, margin=0.8).message


def test_scores_beyond_shares_have_their_own_scale() -> None:
    """A loss of everything on scores up to 10 is bounded by their range, as for one task."""
    old = {task: [10.0] * 30 + [0.0] * 30 for task in TASKS[:2]}
    a, b = make_run(old), make_run(old, total=-2.5)
    alone = evaluate(parse_policy({"accuracy": {"margin": 1.0}}, "test").rule, a, b)[0]
    check = average(a, b, margin=1.0, tasks=TASKS[:1])
    assert check.detects.split("losses above ")[1] == alone.detects.split("losses above ")[1]
    (planned,) = plan_of(Policy("own", parse_policy({"accuracy": {"margin": 1.0}}, "test").rule),
                         make_run({"t": old[TASKS[0]]}), (0.0,)).checks  # fmt: skip
    assert planned.limit == "1 hundredth" and {check.unit, alone.unit} == {"hundredths"}
    for said in (check.message, check.brief, alone.message, alone.brief, alone.detects):
        assert "hundredths" in said and "points" not in said, "compare shows the metric's units"


def test_related_documents_widen_the_limit_of_an_average() -> None:
    """Pairs of documents that flip together count once."""
    old = {task: [1.0] * 100 for task in TASKS}
    a, b = make_run(old), make_run({task: [0.0] * 2 + [1.0] * 98 for task in TASKS})
    groups = {task: {doc: str(doc // 2) for doc in range(100)} for task in TASKS}
    alone, grouped = average(a, b, margin=9.0), average(replace(a, clusters=groups), b, margin=9.0)
    assert "2000 documents of 20 tasks" in alone.message and "2000 documents in 1000 clusters" in grouped.message
    limits = [float(check.detects.split("losses above ")[1].split()[0]) for check in (alone, grouped)]
    assert limits[1] > limits[0] > 2.0


def test_translations_of_one_item_count_once() -> None:
    """Twenty tasks that lose the same ten items are no more evidence than one of them."""
    old = {task: [1.0] * 100 for task in TASKS}
    a, b = make_run(old), make_run({task: [0.0] * 4 + [1.0] * 96 for task in TASKS})
    shared = {task: {doc: f"problems#{doc}" for doc in range(100)} for task in TASKS}
    own = {task: {doc: f"{task}#{doc}" for doc in range(100)} for task in TASKS}
    apart, alike, alone = (average(replace(a, clusters=names), b, margin=9.0) for names in (own, shared, {}))
    assert apart.detects == alone.detects and "2000 documents in 100 clusters" in alike.message
    one = evaluate(parse_policy({"accuracy": {"margin": 9.0}}, "test").rule, a, b)[0]
    assert alike.detects == one.detects != alone.detects


def test_the_tasks_limits_hold_for_an_average_without_its_own() -> None:
    a, b = answers(lost=3, won=3)
    assert average(a, b, {"margin": 0.8}).status == "pass"
    assert average(a, b, {"margin": 0.8}, margin=0.1).status == "undecided"
    assert average(*answers(lost=4, won=3), {"margin": 9.0}, max_regression=0.4).status == "fail"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["mmul_*"]}, "mmul_*: no task of the baseline; there is: mmlu_00"),
        ({"metric": "acc"}, "acc: mmlu_00: it has no such metric with a score per document"),
        ({"metric": "exact_match,strict"}, "there is: exact_match,strict-match"),
    ],
)
def test_misspelt_tasks_and_metrics_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        average(*answers(1, 1), margin=1.0, **settings)
    assert message in str(caught.value) and "accuracy: averages: mmlu" in str(caught.value)


def test_several_filters_must_be_told_apart() -> None:
    a, b = answers(1, 1)
    more = {(task, METRIC[0], "flexible"): dict(enumerate([1.0] * 200)) for task in TASKS}
    better = {**a.higher_is_better, **dict.fromkeys(more, True)}
    a, b = (replace(run, scores={**run.scores, **more}, higher_is_better=better) for run in (a, b))
    with pytest.raises(ConfigError, match="several filters have it"):
        average(a, b, margin=1.0)
    assert average(a, b, margin=1.0, metric="exact_match,flexible").status == "pass"


def test_a_broken_task_breaks_its_average() -> None:
    a, b = answers(1, 1)
    lacking = replace(b, scores={key: values for key, values in b.scores.items() if key[0] != TASKS[3]})
    check = average(a, lacking, margin=1.0)
    assert check.status == "fail" and check.message == f"{TASKS[3]}: missing from the run" in check.message


def test_a_loss_of_the_margin_passes_seldom() -> None:
    """Ten tasks of 60 documents that lose 2 or 4 % beside wins of 1 %: 3 sigma of 1000 draws are 2.1 points."""
    rng, codes, wrong = np.random.default_rng(0), np.arange(60), 0
    for _ in range(1000):
        tasks = [flips(rng, 60, 0.02 + 0.02 * (number % 2), 0.01) for number in range(10)]
        wrong += loss_bound([stratum(losses, codes, 0.1) for losses in tasks], 1.0, 0.05).bound <= 0.02
    assert wrong / 1000 <= 0.05 + 0.021
