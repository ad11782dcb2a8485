"""How likely a gate passes without a loss, and what its checks need: by counting, and by the gate itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.statistics_cases import ALPHA, flips, gate_bound, passing
from evalengine.errors import ConfigError
from evalengine.report.gate.planned import AS_SEEN, Plan, plan_of
from evalengine.report.gate.policies import Policy, parse_policy
from evalengine.report.gate.rules import evaluate, standing
from evalengine.report.read.run import Run
from evalengine.report.stats import pass_probability, significance
from evalengine.report.stats.loss_bound import Losses, joined, loss_bound, stratum
from evalengine.report.stats.pass_probability import Design
from tests.report.gate_runs import METRIC, make_run

PASSAGES = np.repeat(np.arange(80), np.resize(np.arange(1, 10), 80))


def unrelated(count: int, changing: float | None = None) -> Design:
    return Design((stratum(np.zeros(count), np.arange(count)),), 1.0, ALPHA, 1.0, changing)


def policy(**accuracy: object) -> Policy:
    return Policy("own", parse_policy({"accuracy": accuracy}, "own").rule)


@pytest.mark.parametrize("margin", [0.01, 0.02])
@pytest.mark.parametrize("changing", [0.0, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("power", [0.8, 0.8 ** (1 / 20)])
def test_unrelated_documents_are_counted(margin: float, changing: float, power: float) -> None:
    """At the number that is needed the gate passes as often as is said; with one document less it passes less often."""
    design = unrelated(500, changing)
    count = design.needed(margin, power)
    assert count is not None
    said, fewer = (passing(gate_bound, n, margin, changing / 2, changing / 2) for n in (count, count - 1))
    assert design.passes(margin, count) == pytest.approx(said, abs=1e-6) and said >= power > fewer
    assert design.passes(margin) == pytest.approx(
        passing(gate_bound, 500, margin, changing / 2, changing / 2), abs=1e-6
    )


def test_an_observed_loss_beyond_its_limit_counts() -> None:
    """Of 400 documents 10 % change: the bound alone lies within 9 points always, and the loss is at most 0 in half."""
    design = unrelated(400, 0.1)
    assert design.passes(0.09) > 0.999
    assert design.passes(0.09, allowed=0.0) == pytest.approx(0.53, abs=0.02), "and 6 % of ties"


def simulated(design: Design, margin: float, draw: object) -> float:
    rng = np.random.default_rng(5)
    bounds = [loss_bound(draw(rng), design.scale, ALPHA).bound for _ in range(300)]  # type: ignore[operator]
    return float(np.mean([bound <= margin for bound in bounds]))


def test_clusters_are_counted_as_the_gate_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about 80 passages: taken as unrelated they would nearly always pass."""
    design = Design((stratum(np.zeros(len(PASSAGES)), PASSAGES),), 1.0, ALPHA, 1.0, 0.05)
    said = design.passes(0.06)
    drawn = simulated(design, 0.06, lambda rng: [stratum(flips(rng, len(PASSAGES), 0.025, 0.025), PASSAGES)])
    assert abs(said - drawn) < 0.08 and 0.4 < said < 0.8 and unrelated(len(PASSAGES), 0.05).passes(0.06) > 0.98
    need = design.needed(0.06, 0.8)
    assert need is not None and need > len(PASSAGES)
    monkeypatch.setattr(pass_probability, "MANY_EQUAL", 1)
    assert design.passes(0.06) == pytest.approx(said, abs=0.05), "of sizes alone"


def test_tasks_of_a_mean_are_fixed_and_share_items() -> None:
    items = [str(item) for item in range(60)]
    layers = {"apart": [[f"{task} {item}" for item in items] for task in range(4)], "shared": [items] * 4}
    passes = {}
    for name, clusters in layers.items():

        def tasks(rng: np.random.Generator, clusters: list[list[str]] = clusters) -> list[Losses]:
            return [Losses(flips(rng, 60, 0.05, 0.05), own, 0.25) for own in clusters]

        shown = joined([task._replace(losses=np.zeros(60)) for task in tasks(np.random.default_rng(0))])
        design = Design(tuple(shown), 1.0, ALPHA, 1.0, 0.1)
        passes[name] = design.passes(0.06)
        assert abs(passes[name] - simulated(design, 0.06, lambda rng, tasks=tasks: joined(tasks(rng)))) < 0.08
    assert passes["shared"] < passes["apart"] - 0.3


def test_differences_that_runs_show_are_drawn_again() -> None:
    """Differences of any size; of right or wrong they are the share that flips."""
    nats = np.random.default_rng(1).normal(0, 0.1, 300)
    design = Design((stratum(nats, np.arange(300)),), 0.0, ALPHA)
    need = design.needed(0.01, 0.8)
    exact = ((1.645 + 0.842) * float(np.std(nats)) / 0.01) ** 2
    assert need is not None and 1 < need / exact < 1.2
    seen = np.array([1.0, -1.0] * 5 + [0.0] * 490)
    shown = replace(unrelated(500), strata=(stratum(seen, np.arange(500)),))
    assert shown.needed(0.01, 0.8) == unrelated(500, 0.02).needed(0.01, 0.8)
    variance = Design.of_variance(0.02, ALPHA).needed(0.01, 0.8)
    assert variance == pytest.approx(unrelated(500, 0.02).needed(0.01, 0.8), rel=0.05)


def test_a_cluster_alone_and_a_margin_of_everything() -> None:
    one = Design((stratum(np.zeros(9), np.zeros(9, dtype=np.intp)),), 1.0, ALPHA, 1.0, 0.0)
    assert one.passes(0.5) == 0 and one.passes(1.0) == 1
    assert unrelated(100, 0.5).needed(1e-6, 0.8) is None, "billions"


def test_a_large_cluster_counts_only_where_it_is_drawn() -> None:
    """Twenty clusters without a change, one of them ten times as large: .95^20 of the draws do not have it."""
    codes = np.repeat(np.arange(20), [50, *[5] * 19])
    design = Design((stratum(np.zeros(len(codes)), codes),), 1.0, ALPHA, 1.0)
    assert design.passes(0.15) == pytest.approx(0.95**20, abs=0.035) and design.bound.bound > 0.5


def changed(lost: int, won: int, count: int) -> list[float]:
    """40 right of `count`, of which `lost` get wrong; `won` of the others get right."""
    return [0.0] * lost + [1.0] * (40 - lost + won) + [0.0] * (count - 40 - won)


def test_the_gate_itself_passes_as_often_as_is_said() -> None:
    """Every number of losses and wins among 80 documents, weighted by its probability, judged by the gate."""
    rule, count, changing = policy(margin=9.0, max_regression=2.6, power=0.7), 80, 0.025
    a = make_run({"t": changed(0, 0, count)})
    plan = plan_of(rule, a, (changing,))
    total = 0.0
    for lost in range(7):
        for won in range(7):
            b = make_run({"t": changed(lost, won, count)}, total=-2.5)
            ways = math.comb(count, lost) * math.comb(count - lost, won)
            chance = ways * (changing / 2) ** (lost + won) * (1 - changing) ** (count - lost - won)
            total += chance * (standing(evaluate(rule.rule, a, b)) == "pass")
    assert plan.passes[0] == pytest.approx((total, total), abs=1e-3) and 0.4 < total < 0.95


def runs_of(scores: dict[str, list[float]], **fields: object) -> Run:
    return replace(make_run(scores), **fields)  # type: ignore[arg-type]


def test_all_checks_of_a_gate_pass_together() -> None:
    scores = {f"t{number:02}": [1.0, 0.0] * 300 for number in range(20)}
    plan = plan_of(policy(margin=2.0), make_run(scores), (0.0, 0.02))
    each = passing(gate_bound, 600, 0.02, 0.01, 0.01)
    assert plan.passes[0] == (1, 1) and plan.passes[1][0] == pytest.approx(each**20, abs=1e-4)
    assert each > 0.85 > plan.passes[1][1]
    assert {tuple(check.needs) for check in plan.checks} == {(149, 990)}


def test_what_is_planned_is_what_the_gate_judges() -> None:
    """A group is one check, its tasks are none; an average is one; clusters and items are counted."""
    tasks = ["de_math", "fr_math", "other"]
    scores = {task: [1.0, 0.0] * 30 for task in tasks}
    items = {task: {doc: f"math#{doc}" for doc in range(60)} for task in tasks[:2]}
    group = {("g", *METRIC): (0.5, None)}
    a = make_run(scores)
    a = replace(a, groups={"g": tasks[:2]}, clusters=items, results={**a.results, **group},
                higher_is_better={**a.higher_is_better, **dict.fromkeys(group, True)})  # fmt: skip
    average = {"math": {"tasks": ["*_math"], "metric": METRIC[0], "margin": 20.0}}
    plan = plan_of(policy(margin=9.0, tasks={"other": {"alpha": None, "margin": None, "max_regression": 5.0}},
                          averages=average), a, (0.0,))  # fmt: skip
    found = {check.label.split()[0]: (check.limit, check.documents, check.clusters) for check in plan.checks}
    assert found == {"average": ("20 points", 120, 60), "g": ("9 points", 120, 60), "other": ("", 60, 60)}
    assert "no margin" in next(check.why for check in plan.checks if check.why)
    with pytest.raises(ConfigError, match="margin=100: its scores are shares"):
        plan_of(policy(margin=100.0), a, (0.0,))
    with pytest.raises(ConfigError, match="has no accuracy rule"):
        plan_of(Policy("bits", parse_policy({"digest": "equal"}, "bits").rule), a, (0.0,))


def perplexity(seed: int | None, pages: int = 100) -> Run:
    """A perplexity of pages of 50 to 149 words, whose nats per word jitter by 0.03 around 3."""
    key = ("wiki", "word_perplexity", "none")
    jitter = np.zeros(pages) if seed is None else np.random.default_rng(seed).normal(0, 0.03, pages)
    sums = {page: (-(50 + page % 100) * (3 + float(jitter[page])), float(50 + page % 100)) for page in range(pages)}
    value = math.exp(-sum(total for total, _ in sums.values()) / sum(words for _, words in sums.values()))
    return replace(make_run({"wiki": [0.0]}), scores={}, results={key: (value, None)}, weighted={key: sums},
                   higher_is_better={key: False})  # fmt: skip


def test_a_perplexity_is_planned_by_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "FLIPS", 0)  # each test draws 999 flips
    rule, a, b = policy(margin_percent=1.0), perplexity(None, 1000), perplexity(1, 1000)
    (check,) = plan_of(rule, a, (0.0, 0.02)).checks
    assert "the differences of log-likelihoods are known only from two runs" in check.why and not check.needs
    (check,) = plan_of(rule, a, (AS_SEEN,), [(a, b)]).checks
    assert check.limit == "1 %" and check.needs[0] is not None
    passed = [standing(evaluate(rule.rule, perplexity(None, check.needs[0]), perplexity(seed, check.needs[0])))
              for seed in range(2, 62)]  # fmt: skip
    assert 0.65 < passed.count("pass") / 60 < 0.95, "3 sigma are 0.15"


def test_rules_combine_as_the_gate_combines_them() -> None:
    """300 documents, of which 2 % change: a margin of 0.5 seldom passes, one of 2 often, one of 9 always."""
    a = make_run({"t": [1.0] * 240 + [0.0] * 60})
    rule = {margin: {"accuracy": {"margin": margin}} for margin in (0.5, 2.0, 9.0)}

    def plan(policy: dict[str, object]) -> Plan:
        return plan_of(Policy("own", parse_policy(policy, "own").rule), a, (0.02,))

    seldom, often, always = (plan(rule[margin]).passes[0][0] for margin in rule)
    assert seldom < 0.1 < 0.5 < often < 0.8 and always > 0.999
    either = plan({"any_of": [{"digest": "equal"}, rule[0.5], rule[2.0]]})
    assert either.passes[0] == pytest.approx((often, often + seldom)) and either.partial and either.either
    assert [check.each for check in either.checks] == [0.8, 0.8], "as if each were alone"
    assert plan({"any_of": [rule[2.0], rule[2.0]]}).chance(0) == f"at least {often:.2f}"
    assert plan({"any_of": [rule[2.0], rule[9.0]]}).chance(0) == "1.00"
    both = plan({"all_of": [rule[2.0], {"tokens": {}}, {"any_of": [rule[2.0], rule[0.5]]}]})
    assert both.passes[0] == pytest.approx((often**2, often * (often + seldom))) and both.partial
    assert {check.each for check in both.checks} == {0.8**0.5}


def test_each_check_is_planned_for_its_own_power() -> None:
    a = make_run({"s": [1.0, 0.0] * 300, "t": [1.0, 0.0] * 300})
    plan = plan_of(policy(margin=2.0, tasks={"t": {"power": 0.99}}), a, (0.02,))
    assert [(check.limits.power, check.each) for check in plan.checks] == [(0.8, 0.8**0.5), (0.99, 0.99**0.5)]
    assert (plan.checks[0].needs[0] or 0) < (plan.checks[1].needs[0] or 0)


def test_pairs_are_pooled_by_the_baselines_clusters() -> None:
    """The first of three runs names the items that two tasks share; the pair of the others has a stratum more."""
    right = [1.0] * 40 + [0.0] * 10
    first, second, third = (
        make_run({"x": x, "y": y}, total=total)
        for x, y, total in ((right, right, -1.5), ([0.0, *right[1:]], right, -1.6), (right, [0.0, *right[1:]], -1.7))
    )
    means = {("g", *METRIC): (0.8, None)}
    runs = [
        replace(run, groups={"g": ["x", "y"]}, results={**run.results, ("g", *METRIC): (value, None)},
                higher_is_better={**run.higher_is_better, **dict.fromkeys(means, True)})
        for run, value in ((first, 0.8), (second, 0.79), (third, 0.79))
    ]  # fmt: skip
    a = replace(runs[0], clusters={task: {doc: f"it#{doc}" for doc in range(50)} for task in "xy"})
    (check,) = plan_of(policy(margin=9.0), a, (AS_SEEN,), [(a, runs[1]), (a, runs[2]), (runs[1], runs[2])]).checks
    assert (check.label.split()[0], check.documents, check.clusters) == ("g", 100, 50) and check.needs[0]
