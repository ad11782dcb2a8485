"""Policies that extend others, and what is refused of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.errors import ConfigError
from evalengine.report.gate import policies
from evalengine.report.gate.policies import AccuracyRule, AnyOf, load_policy, merged
from evalengine.report.gate.rules import evaluate, standing
from tests.report.gate_runs import METRIC, make_run


def write(folder: Path, **files: str) -> Path:
    """Writes the policies, name -> text, and returns the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


def rule_of(path: Path) -> AccuracyRule:
    rule = load_policy(str(path)).rule
    assert isinstance(rule, AccuracyRule)
    return rule


def test_one_line_makes_a_policy_of_ones_own(tmp_path: Path) -> None:
    """The policy allows a new checkpoint though it repeats no name of `allow`."""
    base = load_policy("accuracy")
    own = load_policy(str(write(tmp_path, own="extends: accuracy\naccuracy: {margin: 0.5}\ninconclusive: fail")))
    assert isinstance(own.rule, AccuracyRule) and isinstance(base.rule, AccuracyRule)
    assert (own.name, own.inconclusive, own.rule.limits.margin) == ("own", "fail", 0.5)
    assert own.allow == base.allow and "weights" in own.allow
    assert own.rule.limits.margin_percent == base.rule.limits.margin_percent, "what is not said stays"


def test_mappings_merge_allow_adds_and_all_else_replaces(tmp_path: Path) -> None:
    base = "allow: [weights, dtype]\naccuracy: {alpha: 0.1, tasks: {a: {alpha: 0.2, margin: 3}, b: {margin: 4}}}"
    own = "extends: base.yaml\nallow: [dtype, prompts]\naccuracy: {tasks: {a: {margin: 1}, c: {skip: true}}}"
    path = write(tmp_path, own=own, base=base)
    rule = rule_of(path)
    assert load_policy(str(path)).allow == ("weights", "dtype", "prompts")
    assert (rule.of("a", "m", "f").alpha, rule.of("a", "m", "f").margin) == (0.2, 1.0)
    assert (rule.of("b", "m", "f").margin, rule.of("c", "m", "f").skip, rule.limits.alpha) == (4.0, True, 0.1)


def test_null_puts_back_the_default_and_takes_averages_away(tmp_path: Path) -> None:
    averages = "{m: {tasks: [a], metric: acc}, n: {tasks: [b], metric: acc}}"
    base = f"accuracy: {{margin: 2, tasks: {{a: {{margin: 1}}}}, averages: {averages}}}"
    own = "extends: base.yaml\naccuracy: {margin: null, tasks: null, averages: {m: null}}"
    rule = rule_of(write(tmp_path, own=own, base=base))
    assert rule.limits.margin is None and rule.tasks == {} and list(rule.averages) == ["n"]


def test_a_pattern_counts_less_than_a_name_and_a_task_less_than_a_metric(tmp_path: Path) -> None:
    patterns = '"arc_*": {margin: 1, metrics: {acc: {alpha: 0.2}}}, "*_easy": {margin: 3, power: 0.7}'
    tasks = f"{{arc_easy: {{alpha: 0.1}}, {patterns}}}"
    rule = rule_of(write(tmp_path, own=f"accuracy: {{margin: 2, tasks: {tasks}}}"))
    easy, hard = (rule.of(task, "acc", "none") for task in ("arc_easy", "arc_challenge"))
    assert (easy.margin, easy.power, easy.alpha) == (3.0, 0.7, 0.2) and rule.of("arc_easy", "f1", "none").alpha == 0.1
    assert (hard.margin, hard.power, rule.of("mmlu", "acc", "none").margin) == (1.0, 0.8, 2.0)


def examples() -> list[str]:
    """Every policy in YAML in the documentation, and each setting's example in the shipped policies' comments."""
    root = Path(__file__).parents[2]
    found = [text for page in [*root.glob("docs/*.md"), root / "README.md"]
             for text in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
             if re.search(r"^(extends|accuracy|tokens|digest|any_of|all_of):", text, re.MULTILINE)]  # fmt: skip
    found.append((policies.__doc__ or "").split("\n\n", 1)[1])
    for file in root.glob("conf/gate/*.yaml"):
        for name, example in re.findall(r"^  (tasks|averages): \{\} +# (.*)$", file.read_text(encoding="utf-8"), re.M):
            found.append(f"extends: accuracy\naccuracy: {{{name}: {{{example}}}}}")
    return found


@pytest.mark.parametrize("text", examples())
def test_every_example_of_a_policy_judges_runs_with_groups(text: str, tmp_path: Path) -> None:
    names = ["gsm8k", "arc_easy", "arc_challenge", "mmlu_law", "mmlu_stem_art"]
    run = make_run(dict.fromkeys(names, [1.0] * 40 + [0.0] * 40))
    metrics = {("acc", "none"): ["mmlu", "mmlu_stem"], ("acc_norm", "none"): []}
    scores = {
        **run.scores,
        **{(name, *metric): run.scores[name, METRIC[0], METRIC[1]] for name in names for metric in metrics},
    }
    groups = {(group, *metric): (0.5, None) for metric, members in metrics.items() for group in members}
    own = replace(
        run, scores=scores, results={**run.results, **groups, **dict.fromkeys(scores, (0.5, None))},
        higher_is_better=dict.fromkeys([*scores, *groups], True),
        groups={"mmlu": ["mmlu_stem", "mmlu_law"], "mmlu_stem": ["mmlu_stem_art"]},
    )  # fmt: skip
    policy = load_policy(str(write(tmp_path, own=text)))
    checks = evaluate(policy.rule, own, replace(own, digest="other", task_digests={}))
    assert standing(checks) in ("pass", "undecided")


def test_a_rule_of_another_kind_replaces_the_rule(tmp_path: Path) -> None:
    path = write(tmp_path, own="extends: accuracy\nany_of: [{digest: equal}, {accuracy: {margin: 1}}]")
    policy = load_policy(str(path))
    assert isinstance(policy.rule, AnyOf) and policy.allow == load_policy("accuracy").allow


def test_policies_extend_each_other_in_a_chain(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", middle="extends: ../base.yaml\naccuracy: {alpha: 0.02}")
    path = write(tmp_path, own="extends: below/middle.yaml\naccuracy: {margin: 1}", base="accuracy: {power: 0.9}")
    limits = rule_of(path).limits
    assert (limits.alpha, limits.margin, limits.power) == (0.02, 1.0, 0.9)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("extends: own.yaml\ndigest: equal", "these policies extend each other in a circle"),
        ("extends: other.yaml", "own.yaml -> "),
        ("extends: acuracy", "did you mean accuracy?"),
        ("extends: [accuracy]", "name a policy (accuracy, bitwise, tokens) or a file"),
        ("extends: accuracy\nmarjin: 1", "marjin: unknown setting; did you mean margin?"),
        ("extends: accuracy\naccuracy: {marjin: 1}", "did you mean margin?"),
        ("extends: accuracy\naccuracy: {margin: 0}", "accuracy.margin=0: must be greater than 0"),
        ("extends: accuracy\naccuracy: {alpha: null}", "accuracy.margin: needs alpha"),
        (
            "accuracy: {margin: 1e2}",
            "(YAML reads this as text: write a decimal point and a signed exponent, as in 1.0e-4",
        ),
        ("accuracy: {margin: 1.0e308}", "(YAML reads this as text: "),
        ("accuracy: {margin: two}", "accuracy.margin=two: must be a valid number"),
        ("extends: accuracy\ninconclusive: maybe", "fail (exit code 1), report (exit code 3) or pass (exit code 0)"),
        ("extend: accuracy", "did you mean extends?"),
        ("all_of: [{extends: accuracy}]", "all_of[0].extends: not a setting here, but of a policy"),
        ("accuracy: {averages: {m: {tasks: [], metric: acc}}}", "names or patterns of tasks"),
        ("accuracy: {averages: {m: {tasks: a}}}", "accuracy.averages.m.metric: is missing"),
        ("accuracy: {averages: {m: {tasks: a, metric: acc, mean: median}}}", "macro (tasks count alike)"),
        ("accuracy: {averages: {m: {tasks: a, metric: acc, skip: true}}}", "averages.m.skip: not a setting here"),
        (
            "accuracy: {averages: {tasks: {tasks: a, metric: acc, margin_percent: 1}}}",
            "averages.tasks.margin_percent: not a setting here, but of accuracy, tasks, metrics",
        ),
        ("accuracy: {averages: {m: {tasks: a, metric: acc, skp: true}}}", "skp: unknown setting; did you mean skip?"),
        ("margin: 2", "margin: not a setting here, but of accuracy, tasks, metrics, averages"),
        ("any_of: [{tokens: {alpha: 0.1}}]", "tokens.alpha: not a setting here, but of accuracy"),
        ("accuracy: {tasks: {tokens: {metrics: {acc: {epsilon: 1}}}}}", "epsilon: not a setting here, but of tokens"),
    ],
)
def test_bad_policies_are_refused_with_their_files(own: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, own=own, other="extends: own.yaml\ndigest: equal")
    with pytest.raises(ConfigError) as caught:
        load_policy(str(path))
    assert message in str(caught.value) and "own.yaml" in str(caught.value)
    assert ("YAML" in str(caught.value)) == ("YAML" in message)


def test_all_problems_of_a_chain_are_told_with_its_files(tmp_path: Path) -> None:
    path = write(tmp_path, own="extends: base.yaml\nfoo: 1", base="accuracy: {alfa: 1}\nbar: 2")
    with pytest.raises(ConfigError) as caught:
        load_policy(str(path))
    assert len(caught.value.problems) == 3
    assert all("own.yaml" in problem and "base.yaml" in problem for problem in caught.value.problems)


def test_merging_leaves_both_as_they_were() -> None:
    base, own = {"accuracy": {"tasks": {"a": {"alpha": 0.1}}}, "allow": ["dtype"]}, {"accuracy": {"tasks": {"a": {}}}}
    before = repr((base, own))
    assert merged(base, own)["accuracy"]["tasks"]["a"] == {"alpha": 0.1} and repr((base, own)) == before
