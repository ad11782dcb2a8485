"""The noise of fast numerics beside a gate's checks: what another schedule of the baseline alone flips.

A run in fast mode changes some answers of a run of the same configuration under another schedule, for no reason but its
batches. That rate is the null: a change that flips no more than it may have changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from evalengine.errors import ConfigError
from evalengine.report.gate.checks import Check
from evalengine.report.read.run import Run
from evalengine.report.stats.paired import mcnemar


def check_noise(a: Run, noise: Run) -> None:
    """Raises ConfigError unless `noise` is the baseline's configuration in fast mode."""
    if a.identity != noise.identity or noise.identity.get("numerics") != "fast":
        raise ConfigError(f"--noise {noise.source}: must be a run of the baseline's configuration, both of "
                          "batch_invariant=false, under another schedule (engine.max_num_seqs=8)")  # fmt: skip


def beside_noise(checks: Iterable[Check], a: Run, b: Run, noise: Run) -> Iterator[Check]:
    """The checks, those of metrics with how many scores flip, and how many the schedule alone does.

    Both are flips of the same documents, so that the test of "no more than the schedule" is McNemar's, exact and
    one-sided, on documents that flip in one of the two only.
    """
    for check in checks:
        key = (check.task, *check.name.partition(",")[::2])
        if check.rule != "accuracy" or any(key not in run.scores for run in (a, b, noise)):
            yield check
            continue
        old, new, other = (run.scores[key] for run in (a, b, noise))
        shared = old.keys() & new.keys() & other.keys()
        flipped, alone = ({doc for doc in shared if old[doc] != scores[doc]} for scores in (new, other))
        p = mcnemar(len(alone - flipped), len(flipped - alone))[1]
        counted = f"{len(flipped)} scores flip, {len(alone)} by another schedule of the baseline alone"
        yield replace(check, message=f"{check.message}; {counted} (one-sided p of no more than that {p:.2g})")
