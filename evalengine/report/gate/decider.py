"""Says of a run in steps, while it goes on, whether its gate is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from evalengine.config.schema import SequentialConfig
from evalengine.report.gate.gate import baseline_of
from evalengine.report.gate.policy_files import load_policy
from evalengine.report.gate.rules import evaluate, standing
from evalengine.report.gate.steps import SEQUENTIAL, steps_of
from evalengine.report.read.run import ScoreKey

Scores = Mapping[ScoreKey, Mapping[int, float]]


def decider(settings: SequentialConfig) -> Callable[[Scores], bool]:
    """A function that says whether a run's scores so far decide the gate that its settings name."""
    assert settings.baseline is not None
    policy = load_policy(settings.policy)
    a, _ = baseline_of(settings.baseline, settings.base)
    identity = {**a.identity, SEQUENTIAL: {"step": settings.step, "seed": settings.seed}}

    def decided(scores: Scores) -> bool:
        if not a.scores.keys() <= scores.keys():  # a metric that only a finished run has
            return False
        own = {key: dict(values) for key, values in scores.items() if key in a.scores}
        b = replace(a, digest=None, task_digests={}, identity=identity, items={}, scores=own, results={}, answers={},
                    choices={}, weighted={})  # fmt: skip
        steps = steps_of(policy, a, b)
        assert steps is not None
        return standing(evaluate(policy.rule, steps.part, b, steps)) != "undecided"

    return decided
