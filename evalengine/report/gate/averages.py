"""Which metrics of which tasks a policy's average is made of."""

from __future__ import annotations

from fnmatch import fnmatchcase

from evalengine.errors import ConfigError
from evalengine.report.gate.policies import Average
from evalengine.report.read.run import Run, ScoreKey


def average_keys(name: str, average: Average, a: Run) -> list[ScoreKey]:
    """A metric with a score per document for each task that the average names, in order.

    Raises `ConfigError` for a pattern that no task of the baseline fits, and for a task that has the metric under no
    filter, under several, or over the whole task only.
    """
    where, problems = f"accuracy: averages: {name}", []
    task_names = sorted({key[0] for key in (*a.scores, *a.results)})
    tasks = [task for task in task_names if any(fnmatchcase(task, pattern) for pattern in average.tasks)]
    for pattern in average.tasks:
        if not any(fnmatchcase(task, pattern) for task in task_names):
            problems.append(f"{where}: tasks: {pattern}: no task of the baseline; there is: {', '.join(task_names)}")
    keys = []
    for task in tasks:
        fits = [key for key in sorted(a.scores) if key[0] == task and average.metric in (key[1], f"{key[1]},{key[2]}")]
        if len(fits) == 1:
            keys += fits
            continue
        names = [f"{key[1]},{key[2]}" for key in sorted(a.scores) if key[0] == task]
        why = "several filters have it" if fits else "it has no such metric with a score per document"
        problems.append(f"{where}: metric: {average.metric}: {task}: {why}; there is: {', '.join(names) or 'none'}")
    if problems:
        raise ConfigError(problems)
    return keys
