"""The gate: policies are checked, rules pass what they should and fail what they should, nothing unlike is judged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.errors import ConfigError
from evalengine.report.gate.policies import POLICIES, AccuracyRule, Policy, available, load_policy, parse_policy
from evalengine.report.gate.report import Check, markdown, report_lines
from evalengine.report.gate.rules import evaluate, level, standing
from evalengine.report.read.run import Run
from tests.report.gate_runs import METRIC, RIGHT, item, judge, make_run

KEY = ("sums", *METRIC)


def checks(rule: dict[str, Any], a: Run, b: Run) -> list[Check]:
    return evaluate(parse_policy(rule, "test").rule, a, b)


def worse(count: int, better: int = 0) -> Run:
    """`RIGHT` with the first `count` documents lost and the last `better` won."""
    return make_run({"sums": [0.0] * count + RIGHT[count : 100 - better] + [1.0] * better})


def test_the_shipped_policies_have_descriptions() -> None:
    assert available() == ["accuracy", "bitwise", "tokens"]
    for name in available():
        assert load_policy(name).description, name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digest: same", "must be: equal"),
        ("digest: equal\ntokens: {}", "exactly one of"),
        ("description: nothing", "has none"),
        ("digest: equal\nalow: [dtype]", "alow: unknown setting; did you mean allow?"),
        ("digest: equal\nallow: [dtypes]", "did you mean dtype?"),
        ("digest: equal\nallow: [seed]", "allow[0]=seed: cannot be allowed to differ"),
        ("tokens: {epsilon: -1}", "must be greater than or equal to 0"),
        ("tokens: {epsilon: 1e-4}", "as in 1.0e-4"),
        ("tokens: {epsilon: .nan}", "must be a finite number"),
        ("accuracy: {alfa: 0.1}", "did you mean alpha?"),
        ("accuracy: {alpha: 1.0}", "alpha=1.0: must be less than 1"),
        ("accuracy: {alpha: true}", "alpha=True: must be a valid number"),
        ("accuracy: {alpha: 0.9}", "power: 0.8 must be above alpha 0.9"),
        ("accuracy: {alpha: null}", "could never fail"),
        ("accuracy: {require_power: true}", "accuracy.require_power: needs alpha, and margin, max_regression or"),
        ("accuracy: {margin_percent: 1, require_power: true}", "accuracy.require_power: needs alpha, and margin, "),
        ("accuracy: {alpha: 0.6, margin: 1, tasks: {a: {power: 0.3}}}", "accuracy.tasks.a.power: 0.3 must be above"),
        ("accuracy: {skip: true}", "no metric is tested"),
        ("accuracy: {skip: true, tasks: {gsm8k: {metrics: {acc: {alpha: 0.1}}}}}", "no metric is tested"),
        ("accuracy: {skip: 3}", "must be true or false"),
        ("accuracy: {tasks: {gsm8k: {metrics: {acc: {alpha: null}}}}}", "could never fail"),
        ("accuracy: {tasks: {gsm8k: {max_regresion: 1}}}", "did you mean max_regression?"),
        ("accuracy: {tasks: [gsm8k]}", "accuracy.tasks=['gsm8k']: must be a mapping of names to values"),
        ("all_of: []", "all_of=[]: must have at least 1 item"),
        ("any_of: {digest: equal}", "must be a valid list"),
        ("any_of: [{digest: equal}, {digets: equal}]", "any_of[1].digets: unknown setting; did you mean digest?"),
        ("- digest", "must be a mapping of names to values"),
        ("digest: [", "not YAML"),
    ],
)
def test_bad_policies_are_refused_with_the_cure(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(str(file))
    assert message in str(caught.value) and "own.yaml" in str(caught.value)


def test_an_unknown_policy_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean bitwise"):
        load_policy("bitwize")


def test_the_innermost_limit_counts() -> None:
    tasks = {"t": {"alpha": 0.01, "metrics": {"acc": {"max_regression": 1}, "acc,none": {"max_regression": 2}}}}
    rule = parse_policy({"accuracy": {"alpha": 0.1, "max_regression": 9, "tasks": tasks}}, "test").rule
    assert isinstance(rule, AccuracyRule)
    chosen = [rule.of("other", "acc", "none"), rule.of("t", "f1", "none"), rule.of("t", "acc", "x")]
    assert [(limits.alpha, limits.max_regression) for limits in chosen] == [(0.1, 9), (0.01, 9), (0.01, 1)]
    assert rule.of("t", "acc", "none").max_regression == 2


@pytest.mark.parametrize("policy", ["bitwise", "tokens", "accuracy"])
def test_equal_runs_pass_every_policy(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy accuracy's margin is 2 points: the bound of n documents without a flip, 3.22 / n, is less from 162 on."""
    a, b = make_run({"sums": RIGHT * 2, "other": [1.0] * 162}), make_run({"sums": RIGHT * 2, "other": [1.0] * 162})
    report = judge(monkeypatch, a, b, policy)
    assert (report.verdict, report.exit_code, report.problems, report.notes) == ("pass", 0, (), ())
    assert len(report.checks) == 2 and all(check.detects for check in report.checks)


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        (item("sums", 7, total=-1.5 - 1e-5), ["bitwise"]),
        (item("sums", 7, total=-1.6), ["bitwise", "tokens"]),
        (item("sums", 7, total=math.nan), ["bitwise", "tokens"]),
        (item("sums", 7, output="other"), ["bitwise", "tokens"]),
    ],
)
def test_a_changed_request_fails_what_it_should(
    changed: Any, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_run({"sums": RIGHT * 2}), make_run({"sums": RIGHT * 2}, [changed])
    reports = {policy: judge(monkeypatch, a, b, policy) for policy in ("bitwise", "tokens", "accuracy")}
    assert [policy for policy, report in reports.items() if report.verdict == "fail"] == failing
    for policy in failing:
        assert any("document 7" in detail for detail in reports[policy].of("fail")[0].details), policy


def test_a_missing_request_fails_tokens() -> None:
    a, b = make_run({"sums": [1.0, 1.0]}), make_run({"sums": [1.0]})
    (check,) = checks({"tokens": {}}, a, b)
    assert check.status == "fail" and check.details == ("missing from the run: document 1, request 0, repeat 0",)


def test_epsilon_null_compares_tokens_alone() -> None:
    b = make_run({"sums": RIGHT}, [item("sums", 7, total=None)])
    assert checks({"tokens": {"epsilon": None}}, make_run({"sums": RIGHT}), b)[0].status == "pass"
    with pytest.raises(ConfigError, match="epsilon: null"):
        checks({"tokens": {"epsilon": 1}}, make_run({"sums": RIGHT}), b)


@pytest.mark.parametrize(("lost", "won", "status"), [(4, 0, "pass"), (5, 0, "fail"), (5, 1, "pass"), (0, 9, "pass")])
def test_one_sided_mcnemar(lost: int, won: int, status: str) -> None:
    """k lost and none won: p = 0.5^k, so 0.0625 for four and 0.03125 for five; five lost and one won: 7 / 64."""
    (check,) = checks({"accuracy": {"alpha": 0.05}}, make_run({"sums": RIGHT}), worse(lost, won))
    assert check.status == status
    if status == "fail":
        assert check.details[0] == "document 0 got worse: was '1.0', is '0.0'" and "p = 0.031" in check.message


def test_lower_may_be_better() -> None:
    def flip(run: Run) -> Run:
        return replace(run, higher_is_better={KEY: False})

    a, b = flip(make_run({"sums": RIGHT})), flip(worse(10))
    assert checks({"accuracy": {}}, a, b)[0].status == "pass"
    assert checks({"accuracy": {}}, b, a)[0].status == "fail"
    unknown = replace(a, higher_is_better={})
    with pytest.raises(ConfigError, match="higher_is_better"):
        checks({"accuracy": {}}, unknown, b)
    lower = {"accuracy": {"tasks": {"sums": {"higher_is_better": False}}}}
    assert checks(lower, unknown, b)[0].status == "pass"


def test_holm_counts_the_metrics() -> None:
    """Five lost fail alone (p 1/32) and not as one of two metrics (p 2/32)."""
    a, lost = make_run({"sums": RIGHT, "other": RIGHT}), [0.0] * 5 + RIGHT[5:]
    b = make_run({"sums": lost, "other": RIGHT})
    assert [check.status for check in checks({"accuracy": {}}, a, b)] == ["pass", "pass"]
    left_out = {"accuracy": {"tasks": {"other": {"skip": True}}}}
    assert [check.status for check in checks(left_out, a, b)] == ["skip", "fail"]


@pytest.mark.parametrize(("limit", "status"), [(1.9, "fail"), (2.0, "undecided"), (9.0, "pass")])
def test_a_regression_beyond_the_allowed_one_fails(limit: float, status: str) -> None:
    (check,) = checks({"accuracy": {"max_regression": limit}}, make_run({"sums": RIGHT}), worse(2))
    assert check.status == status and "-2.00 points" in check.message
    assert ("a loss of 2.00 points, 1.9 allowed" in check.message) == (status == "fail")


def test_an_undecided_gate_fails_where_power_is_required() -> None:
    a, same = make_run({"sums": RIGHT}), make_run({"sums": RIGHT}, total=-1.6)
    undecided = {"accuracy": {"max_regression": 2.0, "require_power": True}}
    (check,) = checks(undecided, a, same)
    assert check.status == "fail" and check.message.startswith("undecided: the policy allows losses of 2 points")
    least = float(check.detects.split("loss of ")[1].split()[0])
    assert 5 < least < 10, "five losses are the fewest that can be significant"
    seeing = {"accuracy": {"max_regression": least + 0.01, "require_power": True}}
    assert checks(seeing, a, same)[0].status == "pass"
    few = [make_run({"sums": [1.0] * 4}, total=total) for total in (-1.5, -1.6)]
    assert "4 documents cannot show any loss" in checks(undecided, *few)[0].message


def scored(right: int, of: int, total: float = -1.5, **tasks: list[float]) -> Run:
    """A run of a task "sums" with so many right answers, and of `tasks`."""
    return make_run({"sums": [1.0] * right + [0.0] * (of - right), **tasks}, total=total)


@pytest.mark.parametrize("limit", [2.0, 100.0])
def test_a_total_loss_of_too_little_is_no_pass_where_power_is_required(limit: float) -> None:
    """Two right answers of 200 can be lost with p = 1/4 at best, whatever the run's size."""
    rule = {"accuracy": {"max_regression": limit, "require_power": True}}
    for b in (scored(0, of=200), scored(2, of=200, total=-1.6)):
        (check,) = checks(rule, scored(2, of=200), b)
        assert check.status == "fail" and "require_power: false for the task" in check.message
        assert check.detects == (
            "200 documents cannot show any loss: the baseline has only 2 right answers, and a run that lost them all "
            "would have p 0.25, above alpha 0.05"
        )
    (check,) = checks({"accuracy": {}}, scored(2, of=200), scored(0, of=200))
    assert check.status == "undecided" and check.message.startswith(check.detects)
    assert "cannot show any" in check.detects


def test_what_can_be_lost_counts_after_holm() -> None:
    """Five right answers are enough alone (p 1/32) and not for one of two metrics (0.05 / 2)."""
    rule = {"accuracy": {"max_regression": 2.5, "require_power": True}}
    (check,) = checks(rule, scored(5, of=200), scored(5, of=200, total=-1.6))
    assert check.status == "pass" and "a loss of 2.39 points" in check.detects
    two = [scored(5, of=200, total=total, other=RIGHT) for total in (-1.5, -1.6)]
    sums = checks({"accuracy": {}}, *two)[1]
    assert "p 0.0312, above alpha 0.05 / 2 metrics" in sums.detects
    six = checks({"accuracy": {}}, scored(6, of=200, other=RIGHT), scored(0, of=200, other=RIGHT))[1]
    assert six.status == "fail" and "show a loss of" in six.detects


def test_metrics_without_a_value_per_document_are_limited_in_percent() -> None:
    key = ("text", "word_perplexity", "none")
    lower = {"results": {key: (20.0, None)}, "higher_is_better": {key: False}, "scores": {}}
    a = replace(make_run({"text": [0.0]}), **lower)
    rule = {"accuracy": {"max_regression_percent": 1.0}}
    for value, status in ((20.1, "pass"), (20.3, "fail"), (15.0, "pass"), (math.nan, "fail")):
        assert [check.status for check in checks(rule, a, replace(a, results={key: (value, None)}))] == [status], value
    assert checks(rule, a, replace(a, results={}))[0].message == "missing from the run"
    with pytest.raises(ConfigError, match="no metric could be tested"):
        checks({"accuracy": {}}, a, a)
    margin, other = {"accuracy": {"margin": 1.0, "margin_percent": 1.0}}, replace(a, results={key: (20.1, None)})
    assert [checks(margin, a, b)[0].status for b in (a, other)] == ["pass", "undecided"]
    assert "without a spread" in checks(margin, a, other)[0].message


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "missing from the run"),
        ({KEY: {0: 1.0}}, "99 documents"),
        ({KEY: dict.fromkeys(range(100), math.nan)}, "no finite value"),
    ],
)
def test_pairs_that_cannot_be_formed_fail(scores: Any, message: str) -> None:
    a = make_run({"sums": RIGHT})
    (check,) = checks({"accuracy": {}}, a, replace(a, scores=scores))
    assert check.status == "fail" and message in check.message


def test_names_that_the_baseline_lacks_are_refused() -> None:
    a = make_run({"sums": RIGHT})
    for tasks, message in (
        ({"sum": {"alpha": 0.1}}, "there is: sums"),
        ({"sums": {"metrics": {"acc": {}}}}, "acc: not in"),
    ):
        with pytest.raises(ConfigError, match=message):
            checks({"accuracy": {"tasks": tasks}}, a, a)


def test_rules_combine_by_all_of_and_any_of() -> None:
    a, b = make_run({"sums": RIGHT}), make_run({"sums": RIGHT}, [item("sums", 7, output="other")])
    rules = [{"digest": "equal"}, {"accuracy": {}}]
    assert [check.status for check in checks({"any_of": rules}, a, b)] == ["excused", "pass"]
    assert [check.status for check in checks({"all_of": rules}, a, b)] == ["fail", "pass"]
    nested = {"all_of": [{"any_of": rules}, {"tokens": {}}]}
    assert [check.status for check in checks(nested, a, b)] == ["excused", "pass", "fail"]
    assert [check.status for check in checks({"any_of": [rules[0], {"tokens": {}}]}, a, b)] == ["fail", "fail"]


def test_a_policy_that_tests_nothing_is_no_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such a policy excuses no failing digest, and such a rule is refused beside a passing one, too."""
    a = make_run({"sums": RIGHT})
    b = make_run({"sums": RIGHT}, [item("sums", doc, output="other") for doc in range(100)])
    nothing = {"accuracy": {"tasks": {"sums": {"skip": True}}}}
    for rule in (nothing, {"any_of": [{"digest": "equal"}, nothing]}, {"all_of": [{"digest": "equal"}, nothing]}):
        file = tmp_path / "own.yaml"
        file.write_text(yaml.safe_dump({"allow": ["weights"], **rule}))
        for run in (a, b):
            report = judge(monkeypatch, a, run, str(file))
            assert (report.verdict, report.exit_code) == ("error", 2), rule
            assert "no metric is tested" in report.problems[0] and "tasks: sums" in report.problems[0]
    rule = {"accuracy": {"skip": True, "tasks": {"sums": {"skip": False}}}}
    assert [check.status for check in checks(rule, a, b)] == ["pass"]


def test_only_what_was_tested_excuses() -> None:
    """No rule gives skips alone today; if one did, they would excuse nothing."""
    skip, passed, failed = (Check("accuracy", "sums", "", status, "") for status in ("skip", "pass", "fail"))
    assert standing([]) == standing([skip]) == standing([passed, failed]) == "fail"
    assert standing([skip, passed]) == "pass"


def test_nothing_tested_is_nothing_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = replace(make_run({"sums": RIGHT}), items={}, scores={}, results={}, task_digests={})
    report = judge(monkeypatch, empty, empty, "bitwise")
    assert report.exit_code == 2 and "contains nothing that it tests" in report.problems[0]


def test_what_is_asked_must_be_equal_and_who_answers_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    a = make_run({"sums": RIGHT * 2})
    other_model = judge(monkeypatch, a, make_run({"sums": RIGHT * 2}, weights="v"), "bitwise")
    assert other_model.verdict == "pass" and "weights" in other_model.notes[0]
    failed = judge(monkeypatch, a, make_run({"sums": RIGHT * 2}, [item("sums", 0, "other")], weights="v"), "bitwise")
    assert failed.verdict == "fail" and failed.notes == other_model.notes
    for text in (markdown(failed), "\n".join(map(str, report_lines(failed)))):
        assert f"note: {failed.notes[0]}" in text and "allows" not in text, "a verdict of FAIL allows nothing"
    other_tokenizer = judge(monkeypatch, a, make_run({"sums": RIGHT * 2}, tokenizer="u"), "bitwise")
    assert other_tokenizer.exit_code == 2 and "tokenizer" in other_tokenizer.problems[0]
    assert judge(monkeypatch, a, make_run({"sums": RIGHT * 2}, tokenizer="u"), "accuracy").verdict == "pass"
    fewer = judge(monkeypatch, a, make_run({"sums": RIGHT[:50]}), "accuracy")
    assert fewer.exit_code == 2 and "A has 200 requests, B 50" in fewer.problems[0]


@pytest.mark.parametrize(("policy", "verdict"), [("bitwise", "fail"), ("tokens", "pass"), ("accuracy", "pass")])
def test_a_different_contract_is_named(policy: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = make_run({"sums": RIGHT * 2}, contract_version=3)
    b = make_run({"sums": RIGHT * 2}, total=-1.5005, contract_version=4)
    report = judge(monkeypatch, a, b, policy)
    assert report.verdict == verdict and "contract_version is 3 in A and 4 in B" in report.notes[0]
    assert "bits are not comparable" in report.notes[0] and "evalengine baseline RUN -o FILE" in report.notes[0]
    assert "--allow" not in report.compare, "compare accepts runs of different contracts"


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ("accuracy: {margin: 2.0}", "pass"),
        ("tokens: {epsilon: 0.1}", "pass"),
        ("any_of: [{digest: equal}, {tokens: {epsilon: 0.1}}]", "pass"),
        ("digest: equal", "error"),
        ("all_of: [{digest: equal}, {tokens: {epsilon: 0.1}}]", "error"),
    ],
)
def test_only_equal_digests_need_an_allowed_contract(
    rule: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.yaml").write_text(f"allow: [weights]\n{rule}\n")
    a = make_run({"sums": RIGHT * 2}, contract_version=3)
    b = make_run({"sums": RIGHT * 2}, total=-1.5005, contract_version=4)
    report = judge(monkeypatch, a, b, str(tmp_path / "own.yaml"))
    (named,) = [text for text in (*report.notes, *report.problems) if "contract_version is 3 in A and 4 in B" in text]
    assert report.verdict == verdict and "evalengine baseline RUN -o FILE" in named


@pytest.mark.parametrize("policy", ["bitwise", "tokens", "accuracy"])
def test_the_other_mode_and_another_gpu_may_answer(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native, other, fast = (
        make_run({"sums": RIGHT * 2}, **identity)
        for identity in (
            {"numerics": "native", "gpu_architecture": "sm_90"},
            {"numerics": "native", "gpu_architecture": "sm_100"},
            {"numerics": "fast", "attention_backend": "flash_attn"},
        )
    )
    for run in (other, fast):
        assert judge(monkeypatch, native, run, policy).verdict == "pass"


def test_prompts_differ_only_where_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    a = make_run({"sums": RIGHT * 2})
    b = make_run({"sums": RIGHT * 2}, [replace(item("sums", 3), prompt_sha256="0" * 64)])
    assert judge(monkeypatch, a, b, "tokens").exit_code == 2
    assert judge(monkeypatch, a, b, "accuracy").verdict == "pass"
    assert (
        level(Policy("p", AccuracyRule(), ("prompts",)), a, b).items[("sums", 3, 0, 0)].leaf
        == b.items[("sums", 3, 0, 0)].leaf
    )


def test_no_digest_is_no_pass() -> None:
    a = make_run({"sums": RIGHT * 2})
    with pytest.raises(ConfigError, match="it has no digest"):
        checks({"digest": "equal"}, a, replace(a, digest=None))


@pytest.mark.parametrize("name", ["bitwise", "tokens", "accuracy"])
def test_shipped_policies_are_what_their_files_say(name: str) -> None:
    value = yaml.safe_load((POLICIES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert load_policy(name) == parse_policy(value, name)
