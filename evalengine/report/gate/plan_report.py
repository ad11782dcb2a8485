"""A gate's plan as lines of the terminal, and what runs show of its tasks. `gate` itself, which plans too, needs none
of this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations

from evalengine.report.gate.planned import RATES, Plan, accuracy_rules
from evalengine.report.gate.policies import Policy
from evalengine.report.numbers import counted
from evalengine.report.read.groups import below
from evalengine.report.read.index import Entry, entries
from evalengine.report.read.names import RESULTS
from evalengine.report.read.run import Run, RunData, ScoreKey
from evalengine.report.stats.measured import flips, sampled, spreads
from evalengine.report.stats.pass_probability import Design
from evalengine.util.progress import duration
from evalengine.util.sheet import Line, Sheet

SAMPLES = (1, 2, 4, 8, 16)  # samples a document for which the need is given, where runs have several


def plan_lines(policy: str, plan: Plan, by_runs: bool) -> Iterator[Line]:
    """Yield the plan of the policy of that name, for the terminal. by_runs: whether runs gave the documents."""
    count = len(plan.checks)
    powers = {check.limits.power for check in plan.checks}
    power = f"probability {max(powers):g}" if len(powers) == 1 else "the power that the policy sets for each"
    passes = "its one check passes" if count == 1 else f"its {count} checks all pass"
    if plan.either:
        passes = f"all checks of one rule ({count} checks in all) pass"
    yield (f"policy {policy}: documents needed so that {passes} with {power}, if nothing is lost, by the share of "
           "answers that change")  # fmt: skip
    rows = []
    for check in plan.checks:
        has = "?" if check.documents is None else f"{check.documents:,}"
        if check.clusters is not None and check.clusters != check.documents:
            has += f" in {counted(check.clusters, 'cluster')}"
        cells = ["too many" if need is None else f"{need:,}" + "*" * (need > (check.documents or 0))
                 for need in check.needs]  # fmt: skip
        rows.append([check.label, check.limit, has, *(cells or "?" * len(plan.rates))])
    if any(check.passes for check in plan.checks):
        whole = "the accuracy rules pass" if plan.either else "all accuracy checks pass"
        label = f"{whole if plan.partial else 'the whole gate passes'} (probability)"
        rows.append([label, "", "as they are", *map(plan.chance, range(len(plan.rates)))])
    rates = [
        "as the runs differ" if rate is None else f"{100 * rate:.3g} %{' (bits)' * (not rate)}" for rate in plan.rates
    ]
    yield Sheet("Documents", ("Check", "Margin", "Documents", *rates), rows, (0, 1, 2))
    if any(cell.endswith("*") for row in rows for cell in row):
        yield f"* more than {'the runs have' if by_runs else 'there are'}"
    reasons: dict[str, list[str]] = {}
    for check in plan.checks:
        if check.why:
            reasons.setdefault(check.why, []).append(check.label)
    yield from (f"{', '.join(labels)}: {why}" for why, labels in reasons.items())
    if 0.0 in plan.rates:
        yield "Answers that are equal in every bit always pass. 0 % (bits): bits change, but no answer does."
    if plan.rates == RATES:
        yield ("Half of the changed answers become right and half become wrong, each by a whole score. Exact and "
               "native runs with equal weights change none, two checkpoints often 2 to 10 %.")  # fmt: skip


def further_facts(names: Sequence[str], a: Run, policy: Policy, plan: Plan, runs: Sequence[RunData]) -> Iterator[str]:
    """Yield what else is known of the tasks: how long they take, how much their runs differ, and which scores would
    need fewer documents."""
    listed: Sequence[Entry] = ()
    with suppress(OSError):  # there is no such folder, it cannot be read, or another process removes a run meanwhile
        listed = entries(RESULTS)
    for name in names:
        tasks = [name, *below(a.groups, name)]
        keys = [key for key in (*a.weighted, *a.scores) if key[0] in tasks]
        counts = {key[0]: len(a.scores.get(key) or a.weighted[key]) for key in keys}
        for entry in [entry for entry in listed if entry.task == name and entry.pace is not None][:1]:  # the newest
            count, seconds = sum(counts.values()), entry.pace or 0.0
            yield (f"{name}: {counted(count, 'document')} take{'s' * (count == 1)} about {duration(seconds * count)} "
                   f"({seconds:.3g} s each, without loading; by {entry.folder}, {entry.model or '?'})")  # fmt: skip
        seen = flips([data.run for data in runs], tasks)
        if seen is not None:
            pairs = "one pair" if seen.pairs == 1 else f"{seen.pairs} pairs"
            between = "fast runs of one configuration, which differ by schedule alone" if seen.schedule else "the runs"
            yield (f"{name}: {seen.flipped} of {counted(seen.documents, 'score')} flip, measured over {pairs} of "
                   f"{between} (at most {100 * seen.most:.2g} % at 95 % confidence)")  # fmt: skip
        for data in runs:
            for (task, metric, filter_name), (count, parts) in sampled(data.run, tasks).items():
                needs = ", ".join(f"{_needed(2 * parts.within / k, policy, (task, metric, filter_name), plan)} ({k})"
                                  for k in SAMPLES)  # fmt: skip
                yield (f"{task} {metric}, {data.run.name}: the variance is {parts.between:.3g} between documents and "
                       f"{parts.within:.3g} within one ({count} samples each). Runs of one model differ only by the "
                       "variance within, which k samples divide by k. Documents needed (samples each): "
                       f"{needs}")  # fmt: skip
        for task in counts:
            apart = [found for pair in combinations(runs, 2) if (found := spreads(*pair, task)) is not None]
            if any(right for right, _ in apart):
                right, likely = (sum(pair[which] for pair in apart) / len(apart) for which in (0, 1))
                key = next(key for key in a.scores if key[0] == task)
                better, plain = (_needed(variance, policy, key, plan) for variance in (likely, right))
                yield (f"{task}: the mean squared difference of these runs is {right:.3g} in right or wrong, and "
                       f"{likely:.3g} in the probability of the right choice. Scored by that probability, {better} "
                       f"documents are enough instead of {plain}, for a margin in points of probability")  # fmt: skip


def _needed(variance: float, policy: Policy, key: ScoreKey, plan: Plan) -> str:
    """Return the documents that a metric's checks need, one for each accuracy rule, if its differences have this
    variance. A part of a group has no check: those that one would need."""
    label = f"{key[0]} {key[1]},{key[2]}"
    checks = [(check.limits, check.each) for check in plan.checks if check.label == label]
    if not checks:
        checks = [(own, own.power) for own in (rule.of(*key) for rule in accuracy_rules(policy.rule))]
    needs = [Design.of_variance(variance, limits.alpha).needed(limits.margin / 100, power)
             for limits, power in checks if limits.margin is not None and limits.alpha is not None]  # fmt: skip
    if not needs:
        return "?"
    return "too many" if None in needs else f"{max(need for need in needs if need is not None):,}"
