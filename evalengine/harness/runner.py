"""One run, from its configuration to its folder: prepare, plan, execute, write.

Nothing is written before every setting, row and prompt has been checked; of the evidence, the digest is written last.
A run that a gate ends (`config.sequential`) evaluates its documents in steps, in an order that follows from the gate's
baseline, until enough is known. Its plan holds all documents: their prompts are part of the run's identity, and an
interrupted run resumes the same steps. The records contain the documents evaluated up to the decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from evalengine.cache.engine import CachedEngine
from evalengine.config.schema import Config, selection, to_yaml
from evalengine.engine.engine import Engine
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.settings import uses_ray
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.harness.execute import continued, deferred_llm, execute, open_answer_cache, open_journal
from evalengine.harness.finish import EndedRun, finish_run
from evalengine.harness.identity import identify
from evalengine.harness.judging import find_judge
from evalengine.harness.outcome import answers_alone, find, task_results
from evalengine.harness.plan import Plan, TaskPlan, plan_and_load, prepare
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG, open_run
from evalengine.records.folder import RECORDS, RunFolder
from evalengine.records.lm_eval import TaskResult, write_samples
from evalengine.records.lm_eval_file import read_results, results_files
from evalengine.records.schema import Answers, RecordKey, read_records
from evalengine.util.asking_order import first_of_order, in_order
from evalengine.util.libraries import deciding
from evalengine.util.plugins import load

Document = tuple[str, int]  # task, document
Scores = dict[tuple[str, str, str], dict[int, float]]  # (task, metric, filter) -> document -> value


@dataclass(frozen=True)
class Gate:
    """The gate that orders and ends a run in steps."""

    baseline: str  # the digest of its baseline, which orders the documents
    decided: Callable[[Scores], bool]  # whether the scores so far are enough


@dataclass(frozen=True)
class RunResult:
    """A finished run's folder, digest and results."""

    folder: Path
    digest: str
    results: dict[str, Mapping[str, float | int | str]]  # task -> "metric,filter" -> value


def run(
    config: Config,
    on_complete: Callable[[Path], None] = lambda folder: None,
    command: Sequence[str] | None = None,
    llm: EngineProtocol | None = None,
    gate: Gate | None = None,
    elsewhere: Callable[[Config], Path] | None = None,
) -> RunResult:
    """Run the configured tasks on the configured model. The configuration was checked where it was composed.

    on_complete: writes and shows what stands next to the evidence, such as a page; called with the folder, whose
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
    checkpoint, tasks = prepare(config, None if llm is None else llm.checkpoint)
    with ExitStack() as opened:
        engine = opened.enter_context(_open_engine(config, checkpoint, llm))
        before = replace(engine.stats)
        plan = plan_and_load(config, tasks, engine)
        for line in plan.warnings:
            warn(line)
        judge = find_judge(config, plan, engine)
        datasets = {own.task.name: own.task.fingerprint(config.limit) for own in plan.tasks}
        identity = identify(
            config,
            plan,
            engine,
            datasets,
            judge=None if judge is None else judge.identity,
            baseline=None if gate is None else gate.baseline,
        )
        plan, resume, whole = continued(config, plan, identity, engine)
        cached = opened.enter_context(open_answer_cache(config, plan, engine, identity))
        loaded = time.perf_counter()
        name = f"{selection(config)}-{config.model.name}"
        facts = engine.facts()
        versions = {library: facts.libraries[library] for library in deciding(facts.settings.numerics)}

        def judged(config: Config) -> Path:
            """The run of the judge, by this run's engine if both are one model."""
            if config.model.api is not None:
                assert elsewhere is not None, "`api.perform` gives it"
                return elsewhere(config)
            return run(config, llm=engine if judge is not None and judge.shares else None).folder

        with RunFolder.open(config.output_dir, name, resume, identity, versions) as folder:
            if folder.finished:
                try:
                    digest = open_run(folder.path, page=False).digest
                except ConfigError as error:
                    raise ConfigError([*error.problems, f"{folder.path}: resume=never runs it again"]) from error
            else:
                folder.write_text(CONFIG, to_yaml(config))
                plan, answers, resumed = _answer(plan, config, engine, cached, whole, folder, gate)
                executed, stats = time.perf_counter(), engine.stats.since(before)
                read = set() if cached is None else cached.answered
                findings, of_judge = find(plan, answers, config, checkpoint.tokenizer), None
                if judge is not None:
                    if llm is None and not judge.shares:
                        engine.close()  # its memory is the judge's
                    scored = answers_alone(answers, findings.denied)
                    judgements, of_judge = judge.judge(plan, scored, folder.path, judged)
                    findings = replace(findings, judgements=judgements)
                ended = EndedRun(
                    config=config,
                    llm=engine,
                    identity=identity,
                    stats=stats,
                    started=started,
                    begin=begin,
                    load_seconds=loaded - begin,
                    run_seconds=executed - loaded,
                    resumed=resumed,
                    cached={item.key for item in plan.requests if item.request.request_id in read},
                    findings=findings,
                    datasets=datasets,
                    command=command,
                    cache=None if cached is None else asdict(cached.counts),
                    judge=of_judge,
                )

                def score(_: object, finished: datetime) -> list[TaskResult]:
                    return task_results(plan, answers, findings, partial(write_samples, folder, finished=finished))

                digest = finish_run(folder, plan, answers, ended, score)
            on_complete(folder.path)
            opened.close()  # the engine; from here on nothing is left that could end the run unfinished
            folder.tidy()
            values = read_results(results_files(folder.path)[-1])["results"]
            # A task's own descriptions have no filter.
            results: dict[str, Mapping[str, Any]] = {}
            for task, own in values.items():
                results[task] = {key: value for key, value in own.items() if "," in key}
            return RunResult(folder.path, digest, results)


@contextmanager
def _open_engine(config: Config, checkpoint: Checkpoint, loaded: EngineProtocol | None) -> Iterator[EngineProtocol]:
    """An engine for this run alone, its weights yet to be loaded, or replicas, as its cluster settings say; or the one
    that is loaded already, with its prefix cache emptied: under fast numerics bits could depend on cached prefixes."""
    with ExitStack() as opened:
        if loaded is not None:
            engine = loaded
            engine.reset_prefix_cache()
        elif uses_ray(config):
            engine = opened.enter_context(load("evalengine.integrations.ray.engines:RayEngines")(config, checkpoint))
        else:
            engine = opened.enter_context(deferred_llm(config, checkpoint))
        if config.drafts is not None and isinstance(engine, Engine):
            file = Path(config.drafts) / RECORDS
            try:
                rows = [row for row in read_records(file) if row.kind == "generate_until"]
            except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
                raise EvalEngineError(f"drafts={config.drafts}: its {RECORDS} cannot be read: {error}; name another "
                                      "run") from error  # fmt: skip
            engine.learn_answers((row.prompt_ids, row.output_ids) for row in rows)
        yield engine


def _answer(
    plan: Plan,
    config: Config,
    engine: EngineProtocol,
    cached: CachedEngine | None,
    whole: Answers,
    folder: RunFolder,
    gate: Gate | None,
) -> tuple[Plan, Answers, Set[RecordKey]]:
    """(the evaluated part of the plan: all of it, or as many steps as it took to decide; its answers; the requests
    whose answers were known). whole: answers of an earlier run that are this one's, too."""
    with open_journal(plan, engine, folder, config.progress) as journal:
        for item in plan.requests if whole else ():
            if item.key in whole and item.key not in journal.finished:
                journal.append((item.key, item.prompt_sha256, whole[item.key]))
        known = {*journal.finished}

        def ask(part: Plan) -> Answers:
            return execute(part, engine, cached, journal, selection(config), config.progress)

        part, step = plan, config.sequential.step
        if step is None or gate is None:
            answers = ask(plan)
        else:
            scores: Scores = {}
            done: set[Document] = set()
            for documents in _steps(plan, step, gate.baseline):
                part, new = _documents_of(plan, documents), _documents_of(plan, documents - done)
                answers = ask(part)
                for result in task_results(new, answers, find(new, answers, config, engine.checkpoint.tokenizer)):
                    for sample in result.samples:
                        for metric, value in sample.metrics.items():
                            if isinstance(value, int | float):
                                of_metric = scores.setdefault((result.name, metric, sample.filter), {})
                                of_metric[sample.doc_id] = float(value)
                done = documents
                if gate.decided(scores):
                    break
        return part, answers, known & {item.key for item in part.requests}


def _documents_of(plan: Plan, documents: Set[Document]) -> Plan:
    """The plan of some of its documents; its hash of the prompts stays that of all."""
    tasks = [TaskPlan(own.task, [i for i in own.instances if i and (own.task.name, i[0].doc_id) in documents])
             for own in plan.tasks]  # fmt: skip
    return replace(plan, tasks=tasks, requests=[item for item in plan.requests if item.key[:2] in documents])


def _steps(plan: Plan, step: int, baseline: str) -> Iterator[set[Document]]:
    """Growing sets of documents, the last of which has all: `step` more of each task at a time."""
    orders = {}
    for own in plan.tasks:
        docs = [instances[0].doc_id for instances in own.instances if instances]
        names = own.task.clusters
        clusters = None if names is None else {doc: names[doc] for doc in docs}
        orders[own.task.name] = in_order(baseline, own.task.name, docs, clusters)
    count, total = 0, sum(len(cluster) for order in orders.values() for cluster in order)
    while True:
        count += step
        documents = {(task, doc) for task, order in orders.items() for doc in first_of_order(order, count)}
        yield documents
        if len(documents) == total:
            return
