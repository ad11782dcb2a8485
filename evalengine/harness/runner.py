"""One run, from its configuration to its folder: prepare, plan, execute, write.

Nothing is written before every setting, row and prompt has been checked; of the evidence, the digest is written last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from evalengine.cache.engine import CachedEngine
from evalengine.config.schema import Config, selection, to_yaml
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.stats import EngineStats
from evalengine.errors import ConfigError
from evalengine.harness.answering import answering
from evalengine.harness.execute import keep, open_answer_cache
from evalengine.harness.extended import continued
from evalengine.harness.finish import EndedRun, engine_facts, finish_run
from evalengine.harness.identity import Facts, run_facts
from evalengine.harness.judging import NOT_JUDGED, Judge, find_judge
from evalengine.harness.outcome import score_tasks, scorer
from evalengine.harness.plan import MANY_DOCUMENTS, Plan, TaskPlan, plan_and_load, prepare
from evalengine.harness.steps import Gate, answered
from evalengine.harness.thinking import answers_alone, thoughts, uncredited
from evalengine.harness.verdicts import verdicts
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG, open_run
from evalengine.records.folder import RunFolder
from evalengine.records.lm_eval import TaskResult, write_samples
from evalengine.records.lm_eval_file import read_results, results_files
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import RecordKey
from evalengine.util.forked import spread
from evalengine.util.libraries import deciding
from evalengine.util.phases import phase
from evalengine.util.relaxed_gc import relaxed_gc


@dataclass(frozen=True)
class RunResult:
    """A finished run's folder, digest and results."""

    folder: Path
    digest: str
    results: dict[str, Mapping[str, float | int | str]]  # task -> "metric,filter" -> value


@dataclass(frozen=True)
class _ResolvedRun:
    """What a run is resolved to before its first answer."""

    config: Config
    command: Sequence[str] | None
    started: float  # UNIX seconds
    begin: float  # seconds of the monotonic clock, as the next
    loaded: float
    plan: Plan
    llm: EngineProtocol
    facts: Facts
    cached: CachedEngine | None
    folder: RunFolder
    kept: Set[RecordKey] = frozenset()  # what a finished run with shorter answers had whole
    judge: Judge | None = None
    lent: bool = False  # whether the engine is somebody else's, and stays open
    elsewhere: Callable[[Config], Path] | None = None  # asks a judge that is behind an API


@relaxed_gc()
def run(
    config: Config,
    on_complete: Callable[[Path], None] = lambda folder: None,
    command: Sequence[str] | None = None,
    llm: EngineProtocol | None = None,
    gate: Gate | None = None,
    elsewhere: Callable[[Config], Path] | None = None,
) -> RunResult:
    """Runs the configured tasks on the configured model. The configuration was checked where it was composed.

    on_complete: writes and shows what stands beside the evidence, such as a page; called with the folder, whose
    evidence is complete. If a run is killed before it is over, the same command computes nothing again and only calls
    it.
    command: the command line's words, for the manifest.
    llm: an engine that is loaded already, with the very settings of `config`; it stays open.
    gate: what orders and ends a run in steps (`config.sequential`).
    elsewhere: makes the run of a judge that is behind an API; returns its folder.

    Raises:
        ConfigError: settings, rows or prompts that cannot be honoured; nothing has been written then.
        EvalEngineError: a damaged file, a failed request, a disk that refuses; the same command resumes.
        KeyboardInterrupt: with the run's folder as its argument, once there is one.
    """
    started, begin = time.time(), time.perf_counter()
    lent = llm is not None
    checkpoint, tasks = prepare(config, None if llm is None else llm.checkpoint)
    with ExitStack() as opened:
        llm = opened.enter_context(answering(config, checkpoint, llm))
        before = replace(llm.stats)
        plan = plan_and_load(config, tasks, llm)
        for line in plan.warnings:
            warn(line)
        judge = find_judge(config, plan, llm)
        ordered_by = None if gate is None else gate.baseline
        facts = run_facts(config, plan, llm, None if judge is None else judge.identity, ordered_by)
        plan, resume, whole = continued(config, plan, facts.identity, llm)
        cached = opened.enter_context(open_answer_cache(config, plan, llm, facts.identity))
        loaded = time.perf_counter()
        name = f"{selection(config)}-{config.model.name}"
        installed = llm.facts().libraries
        versions = {library: installed[library] for library in deciding(llm.settings.numerics)}
        with RunFolder.open(config.output_dir, name, facts.run_id, resume, facts.identity, versions) as folder:
            if folder.finished:
                digest = _own_manifest(folder).digest
            else:
                folder.write_text(CONFIG, to_yaml(config))
                keep(plan, llm, folder, whole)
                known = config, command, started, begin, loaded, plan, llm, facts, cached, folder, {*whole}
                this = _ResolvedRun(*known, judge, lent, elsewhere)
                digest = _answer(this, gate, before)
            on_complete(folder.path)
            opened.close()  # the engine; from here on nothing is left that could end the run unfinished
            folder.tidy()
            values = read_results(results_files(folder.path)[-1])["results"]
            return RunResult(folder.path, digest, {task: _metrics(values[task]) for task in values})


def _answer(run: _ResolvedRun, gate: Gate | None, before: EngineStats) -> str:
    """Asks what is missing, scores the answers and writes the evidence; returns the digest."""
    config, llm, cached = run.config, run.llm, run.cached
    plan, (answers, ran) = answered(run.plan, config, llm, cached, run.folder, gate, run.kept)
    executed, engine = time.perf_counter(), engine_facts(llm, llm.stats.since(before))
    thought = thoughts(plan, answers, llm.tokenizer)
    denied = uncredited(thought, config)
    judgements, facts = NOT_JUDGED, None
    if run.judge is not None:
        if not run.lent and not run.judge.shares:
            llm.close()  # its memory is the judge's
        judgements, facts = run.judge.judge(
            plan, answers_alone(answers, denied), run.folder.path, lambda config: _judged(config, run)
        )
    with phase("records"):
        judged = verdicts(plan, answers, config, selection(config), denied)
        read = set() if cached is None else {i.key for i in plan.requests if i.request.request_id in cached.answered}

        def score(_: object, finished: datetime) -> list[TaskResult]:
            return _score(plan, scorer(plan, answers, thought, judged, judgements, denied), run.folder, finished)

        ended = EndedRun(
            config=config,
            llm=llm,
            identity=run.facts.identity,
            engine=engine,
            started=run.started,
            begin=run.begin,
            load_seconds=run.loaded - run.begin,
            run_seconds=executed - run.loaded,
            resumed={item.key for item in plan.requests} - ran,
            cached=read,
            thoughts=thought,
            verdicts=judged,
            datasets=run.facts.datasets,
            command=run.command,
            cache=None if cached is None else asdict(cached.counts),
            judge=facts,
        )
        return finish_run(run.folder, plan, answers, ended, score)


def _judged(config: Config, whose: _ResolvedRun) -> Path:
    """The run of a judge, by the engine of the run that it judges if both are one model."""
    assert whose.judge is not None
    if config.model.api is not None:
        assert whose.elsewhere is not None, "`api.perform` gives it"
        return whose.elsewhere(config)
    return run(config, llm=whose.llm if whose.judge.shares else None).folder


def _own_manifest(folder: RunFolder) -> Manifest:
    """The manifest of a folder that this command finished before it was killed. Raises ConfigError."""
    try:
        return open_run(folder.path, page=False)
    except ConfigError as error:
        raise ConfigError([*error.problems, f"{folder.path}: resume=never runs it again"]) from error


def _metrics(results: Mapping[str, Any]) -> dict[str, Any]:
    """A task's entry of the results file without its own descriptions, which have no filter."""
    return {name: value for name, value in results.items() if "," in name}


def _score(
    plan: Plan, score: Callable[[TaskPlan], TaskResult], folder: RunFolder, finished: datetime
) -> list[TaskResult]:
    """Writes every task's samples and returns its metrics, without its samples."""

    def work(tasks: Sequence[TaskPlan]) -> list[TaskResult]:
        results = []
        for task in tasks:
            result = score(task)
            write_samples(folder, result, finished)
            results.append(replace(result, samples=()))
        return results

    def spread_work(tasks: Sequence[TaskPlan]) -> list[TaskResult]:
        if not tasks or not all(task.task.can_fork for task in tasks):
            return work(tasks)
        return spread(work, tasks, MANY_DOCUMENTS, [len(task.instances) for task in tasks])

    return score_tasks(spread_work, plan.tasks)
