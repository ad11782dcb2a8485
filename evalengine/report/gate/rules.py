"""A policy's rules, applied to a baseline (A) and a run (B): one check per rule, task and metric.

Nothing passes unseen: a rule that cannot be judged (no digest, no logprobs, no metric with values, or all of them
skipped) raises `ConfigError`, and what a policy leaves out is a separate check with the status "skip".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from evalengine.errors import ConfigError, first_of
from evalengine.report.compare.item_differences import differing_leaves
from evalengine.report.gate.accuracy import accuracy
from evalengine.report.gate.policies import AccuracyRule, AllOf, AnyOf, DigestRule, Policy, Rule, TokensRule
from evalengine.report.gate.report import DECIDED, SHOWN, Check
from evalengine.report.gate.steps import Steps
from evalengine.report.numbers import same_number, same_value
from evalengine.report.read.run import Item, Key, Run


def evaluate(rule: Rule, a: Run, b: Run, steps: Steps | None = None) -> list[Check]:
    """The checks of `rule`: it does not hold if one has the status "fail", and is undecided if one is "undecided".

    steps: the documents of a run in steps, whose part of the baseline is `a` (`steps.steps_of`).
    """
    if isinstance(rule, DigestRule):
        return [*_digest(a, b), *_rescored("digest", a, b)]
    if isinstance(rule, TokensRule):
        return [*_tokens(rule, a, b), *_rescored("tokens", a, b)]
    if isinstance(rule, AccuracyRule):
        return accuracy(rule, a, b, steps)
    branches = [evaluate(part, a, b) for part in rule.rules]
    return _any_of(branches) if isinstance(rule, AnyOf) else [check for branch in branches for check in branch]


def _any_of(branches: Sequence[Sequence[Check]]) -> list[Check]:
    """The branches' checks, by the logic of true, false and unknown (Kleene's): a branch that holds excuses what failed
    or was undecided in the others; if none holds, an undecided branch excuses those that fail, and stays as it is."""
    standings = [standing(branch) for branch in branches]
    best = next((status for status in ("pass", "undecided") if status in standings), "fail")
    checks = []
    for branch, own in zip(branches, standings, strict=True):
        excused = ("fail", "undecided") if own != best != "fail" else ()
        checks += [replace(check, status="excused") if check.status in excused else check for check in branch]
    return checks


def standing(checks: Sequence[Check]) -> Literal["pass", "fail", "undecided"]:
    """The status of checks together. It is "fail" where nothing was tested, so that this excuses no other branch."""
    statuses = {check.status for check in checks}
    if "fail" in statuses or not statuses & set(DECIDED):
        return "fail"
    return "undecided" if "undecided" in statuses else "pass"


def level(policy: Policy, a: Run, b: Run) -> Run:
    """`b` with everything that the policy lets differ set as in `a`: what differs then is not allowed to.

    Tokens, answers and scores of different contract versions are comparable, so that only a policy that requires equal
    digests must allow `contract_version` itself.
    """
    allow = policy.allow if _requires_digest(policy.rule) else (*policy.allow, "contract_version")
    identity = {name: value for name, value in b.identity.items() if name not in allow}
    identity |= {name: a.identity[name] for name in allow if name in a.identity}
    if "prompts" not in policy.allow:
        return replace(b, identity=identity)
    prompts = {key: a.items[key].prompt_sha256 for key in b.items if key in a.items}
    items = {key: replace(item, prompt_sha256=prompts.get(key, "")) for key, item in b.items.items()}
    hashes = {
        task: {doc: (own[0], a.hashes.get(task, {}).get(doc, own)[1], own[2]) for doc, own in documents.items()}
        for task, documents in b.hashes.items()
    }
    return replace(b, identity=identity, items=items, hashes=hashes)


def _requires_digest(rule: Rule) -> bool:
    """Whether a rule cannot hold without equal digests."""
    if isinstance(rule, AnyOf):
        return all(map(_requires_digest, rule.rules))
    return isinstance(rule, DigestRule) or (isinstance(rule, AllOf) and any(map(_requires_digest, rule.rules)))


def _digest(a: Run, b: Run) -> list[Check]:
    """A check per task; each names the first requests whose leaves differ."""
    for run, role in ((a, "baseline"), (b, "run")):
        if run.digest is None:
            raise ConfigError(f"the {role} {run.source} is no run of evalengine, it has no digest; use policy accuracy")
    changed = [] if a.digest == b.digest else differing_leaves(a, b)
    checks = []
    for task in sorted({*a.task_digests, *b.task_digests}):
        old, new = a.task_digests.get(task), b.task_digests.get(task)
        keys = [key for key in changed if key[0] == task]
        count = sum(key[0] == task for key in a.items)
        same = old == new and not keys
        message = f"{old}" if same else f"{len(keys)} of {count} requests differ: digest was {old}, is {new}"
        detects = f"Can detect: any changed token or logprob bit of {count} requests"
        checks.append(Check("digest", task, "", "pass" if same else "fail", message, _first(keys), detects))
    if a.digest != b.digest and all(check.status == "pass" for check in checks):
        checks.append(Check("digest", "", "", "fail", f"digest of the run was {a.digest}, is {b.digest}"))
    return checks


def _tokens(rule: TokensRule, a: Run, b: Run) -> list[Check]:
    """A check per task; each names the first requests that are missing, or whose tokens or logprobs changed."""
    checks = []
    limit = math.inf if rule.epsilon is None else rule.epsilon
    for task in sorted({key[0] for key in a.items}):
        keys = [key for key in a.items if key[0] == task]
        shared = {key: (a.items[key], b.items[key]) for key in keys if key in b.items}
        for run in (a, b):
            if not all(run.items[key].output_sha256 for key in shared):
                raise ConfigError(f"{task}: policy rule tokens needs token ids, which {run.files} does not hold")
        missing = [key for key in keys if key not in shared]
        changed = [key for key, (x, y) in shared.items() if x.output_sha256 != y.output_sha256]
        equal = {key: pair for key, pair in shared.items() if pair[0].output_sha256 == pair[1].output_sha256}
        deltas = {} if rule.epsilon is None else {key: _delta(*pair) for key, pair in equal.items()}
        far = sorted((key for key in deltas if not deltas[key] <= limit), key=lambda key: -deltas[key])
        detects = f"Can detect: any changed token of {len(keys)} requests"
        message = f"{len(changed) + len(missing)} of {len(keys)} requests have other tokens"
        if rule.epsilon is not None:
            detects += f"; a summed logprob that moves by more than {limit:g}"
        if deltas:
            message += f"; largest |change| of a summed logprob {max(deltas.values()):.3g}"
        if far:
            message += f", {len(far)} above epsilon {limit:g}"
        details = (*_first(missing, "missing from the run: "), *_first(changed, "other tokens: "),
                   *_first(far, "logprob moved: ", {key: f" by {deltas[key]:.3g}" for key in far}))  # fmt: skip
        checks.append(Check("tokens", task, "", "fail" if details else "pass", message, details, detects))
    if not checks:
        raise ConfigError(f"{a.source}: holds no requests, so there is nothing to gate")
    return checks


def _rescored(rule: str, a: Run, b: Run) -> Iterator[Check]:
    """A failed check for each metric whose values differ though the answers are equal in every bit: what scores or adds
    them up has changed, of which no digest tells."""
    changed = {key[:2] for key in a.items.keys() & b.items.keys() if a.items[key].leaf != b.items[key].leaf}
    changed |= {key[:2] for key in a.items.keys() ^ b.items.keys()}
    for key in sorted(a.scores.keys() & b.scores.keys()):
        old, new = a.scores[key], b.scores[key]
        docs = [doc for doc in sorted(old.keys() & new.keys()) if (key[0], doc) not in changed]
        other = [doc for doc in docs if not same_value(old[doc], new[doc])]
        if other:
            details = tuple(f"document {doc}: was {old[doc]:g}, is {new[doc]:g}" for doc in other[:SHOWN])
            message = f"{len(other)} of {len(docs)} documents with equal answers have another score: the scorer changed"
            yield Check(rule, key[0], f"{key[1]},{key[2]}", "fail", message, details)
    tasks, moved = {key[0] for key in a.items}, {task for task, _ in changed}
    for key in sorted(a.results.keys() & b.results.keys() - (a.scores.keys() & b.scores.keys())):
        depends_on = {key[0]} if key[0] in tasks else tasks  # a group's results depend on its tasks
        was, now = a.results[key][0], b.results[key][0]
        if not depends_on & moved and not same_value(was, now):
            message = f"was {was:g}, is {now:g}, though the answers are equal: the scorer or the aggregation changed"
            yield Check(rule, key[0], f"{key[1]},{key[2]}", "fail", message)


def _delta(x: Item, y: Item) -> float:
    """|difference| of two summed logprobs; 0 for two equal infinities or two NaNs, infinity for one NaN."""
    if x.sum_logprob is None or y.sum_logprob is None:
        raise ConfigError(f"{x.task}: a side holds no logprobs; set tokens: {{epsilon: null}} to compare tokens alone")
    if same_number(x.sum_logprob, y.sum_logprob):
        return 0.0
    delta = abs(x.sum_logprob - y.sum_logprob)
    return math.inf if math.isnan(delta) else delta


def _first(keys: Sequence[Key], what: str = "", more: Mapping[Key, str] | None = None) -> tuple[str, ...]:
    """The first requests as details of a check, a line each. what: the line's beginning. more: its end, by key."""
    lines = [f"document {key[1]}, request {key[2]}, repeat {key[3]}{(more or {}).get(key, '')}" for key in keys]
    return tuple(f"{what}{line}" for line in first_of(lines, SHOWN))
