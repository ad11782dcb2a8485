"""Runs the programs that the model wrote, and gives their verdicts.

They run once everything is generated and journaled. If a run is killed meanwhile, the same command generates nothing
anew and runs all programs again. A verdict is a function of the program and the limits.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict
from typing import Any

from evalengine.config.schema import Config
from evalengine.harness.plan import Plan, isolated
from evalengine.harness.progress import ProgramProgress
from evalengine.records.schema import Answers, RecordKey
from evalengine.tasks.code import CodeTask
from evalengine.tasks.programs import OUTCOMES, ProgramLimits, ProgramVerdict
from evalengine.util.plugins import load


def verdicts(
    plan: Plan,
    answers: Answers,
    config: Config,
    label: str,
    denied: Set[RecordKey] = frozenset(),
) -> dict[RecordKey, ProgramVerdict]:
    """The verdict on each generation of a task that runs programs; equal programs are run once.

    denied: generations without an answer, whose programs are not run.
    Raises EvalEngineError where a program cannot be run; the same command then goes on from here.
    """
    tasks = {item.task.name: item.task for item in plan.tasks if isinstance(item.task, CodeTask)}
    programs: dict[RecordKey, tuple[str, ProgramLimits]] = {}
    for item in plan.requests:
        if (task := tasks.get(item.key[0])) is not None and item.key not in denied:
            programs[item.key] = task.program(task.docs[item.key[1]], answers[item.key].text), task.limits
    by_program: dict[tuple[str, ProgramLimits], ProgramVerdict] = {}
    batches: dict[ProgramLimits, dict[str, ProgramLimits]] = {}
    for program, limits in programs.values():
        batches.setdefault(limits, {})[program] = limits
    with ProgramProgress(label, sum(map(len, batches.values())), config.progress) as bar:
        for limits, batch in batches.items():
            run_programs = load("evalengine.integrations.sandbox.run:run_programs")
            ended = run_programs(batch, isolated(config), bar.finished)
            by_program.update({(program, limits): verdict for program, verdict in ended.items()})
    return {key: by_program[program] for key, program in programs.items()}


def program_facts(plan: Plan, config: Config, verdict_of: Mapping[RecordKey, ProgramVerdict]) -> dict[str, Any] | None:
    """The manifest's facts about the programs, as plain JSON values; None where none was run."""
    tasks = {item.task.name: item.task for item in plan.tasks if isinstance(item.task, CodeTask)}
    if not tasks:
        return None
    counts = {name: Counter(verdict.outcome for key, verdict in verdict_of.items() if key[0] == name) for name in tasks}
    return {
        "isolated": isolated(config),
        "python": platform.python_version(),
        "limits": {name: asdict(task.limits) for name, task in tasks.items()},
        "outcomes": {name: {kind: count[kind] for kind in OUTCOMES if count[kind]} for name, count in counts.items()},
    }
