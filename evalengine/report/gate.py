"""The gate's judgement: is a run as good as its baseline, by a policy?"""

from __future__ import annotations

from pathlib import Path

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.report.ci import Report
from evalengine.report.comparability import findings, incomparable
from evalengine.report.policies import AllOf, Policy, load_policy
from evalengine.report.rules import evaluate, level
from evalengine.report.runs import Run, load_run
from evalengine.report.unchecked import UNBOUND

SHOWN_PROBLEMS = 20


def gate(baseline: str | Path, run: str | Path, policy: str = "bitwise") -> Report:
    """Judges `run` against `baseline` (run folders, lm-eval folders or baseline files) by a policy's name or file.

    Never raises for what is wrong with them: that becomes `problems`, and exit code 2.
    """
    chosen = Policy(Path(policy).stem, AllOf(()))
    try:
        chosen = load_policy(policy)
        return _judge(chosen, load_run(baseline), load_run(run))
    except EvalEngineError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        names = (chosen.name, chosen.description, str(baseline), str(run))
        return Report("error", *names, problems=tuple(problems))


def _judge(policy: Policy, a: Run, b: Run) -> Report:
    levelled = level(policy, a, b)
    problems = incomparable(a, levelled)
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        problems = [*problems[:SHOWN_PROBLEMS], *([f"and {more} more differences"] if more > 0 else [])]
        hint = f"A is the baseline, B the run; policy {policy.name} lets differ: {', '.join(policy.allow) or 'nothing'}"
        raise ConfigError([*problems, hint])
    checks = tuple(evaluate(policy.rule, a, b))
    if not any(check.status in ("pass", "fail") for check in checks):
        raise ConfigError(f"policy {policy.name}: {a.source} holds nothing that it tests, so nothing was gated")
    failed = any(check.status == "fail" for check in checks)
    left = {finding.text for finding in findings(a, levelled)}
    notes = [finding.text for finding in findings(a, b) if finding.text not in left]
    notes += [f"{run.source}: {UNBOUND}" for run in (a, b) if run.unbound]
    names = (policy.name, policy.description, str(a.source), str(b.source))
    return Report("fail" if failed else "pass", *names, a.digest, b.digest, checks, notes=tuple(notes))
