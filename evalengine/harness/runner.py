"""One run, from its configuration to its folder: prepare, plan, execute, write.

Nothing is written before every setting, row and prompt has been checked; of the evidence, the digest is written last.
A run that a gate ends (`config.sequential`) evaluates its documents in steps, in an order that follows from the gate's
baseline, until enough is known. Its plan holds all documents: their prompts are part of the run's identity, and an
interrupted run resumes the same steps. The records contain the documents evaluated up to the decision.

Requests whose answers are known already are skipped: those in the journal, in a cache, or in a finished run with a
shorter `max_gen_toks` (`continued`). A token's bits are a function of the tokens before it, so an answer that continues
where the limit truncated it is that of a run which had the longer limit from the start.
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

from evalengine.cache.engine import CachedEngine, through_cache
from evalengine.config.schema import Config, selection, to_yaml
from evalengine.engine.engine import Engine
from evalengine.engine.expected import ExpectedAnswer
from evalengine.engine.interrupts import Interrupts
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.request import GenerateRequest, Request
from evalengine.engine.settings import uses_ray
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import check_requests
from evalengine.errors import ConfigError, EvalEngineError, ReplicaMismatchError, first_of
from evalengine.harness.finish import EndedRun, finish_run
from evalengine.harness.identity import deferred_llm, identify
from evalengine.harness.judging import find_judge
from evalengine.harness.outcome import find, task_results
from evalengine.harness.plan import plan_and_load, prepare, rehearse_judge, request_names
from evalengine.harness.requests import SERVED, HarnessRequest, Plan, TaskPlan
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG, open_run
from evalengine.records.folder import DIGEST, IDENTITY, RECORDS, RunFolder
from evalengine.records.journal import Expected, Journal
from evalengine.records.lm_eval import TaskResult, write_samples
from evalengine.records.schema import Answer, Answers, RecordKey, ids_sha256, read_records
from evalengine.records.sealed import differences
from evalengine.util.document_order import first_of_order, in_order
from evalengine.util.libraries import deciding
from evalengine.util.phases import phase
from evalengine.util.plugins import load
from evalengine.util.progress import RunProgress

MAX_LISTED = 10
LENGTH = "max_gen_toks"  # the setting of a generation that may differ from a finished run's
Document = tuple[str, int]  # task, document
Scores = dict[tuple[str, str, str], dict[int, float]]  # (task, metric, filter) -> document -> value


@dataclass(frozen=True)
class Gate:
    """The gate that orders and ends a run in steps."""

    baseline: str  # the digest of its baseline, which orders the documents
    decided: Callable[[Scores], bool]  # whether the scores so far are enough


def run(
    config: Config,
    on_complete: Callable[[Path], None] = lambda folder: None,
    command: Sequence[str] | None = None,
    llm: EngineProtocol | None = None,
    gate: Gate | None = None,
    elsewhere: Callable[[Config], Path] | None = None,
) -> Path:
    """Run the configured tasks on the configured model, and return the run's folder. The configuration was checked
    where it was composed.

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
        judge = find_judge(config, engine)
        rehearse_judge(judge, plan)
        if judge is not None:
            judge = replace(judge, engine=None)  # an engine without weights has a tokenizer's memory
        datasets = {own.task.name: own.task.fingerprint(config.limit) for own in plan.tasks}
        definitions = {p.task.name: definition for p in plan.tasks if (definition := p.task.definition())}
        identity = identify(
            config,
            engine,
            plan.prompts_sha256,
            datasets,
            definitions=definitions or None,
            judge=None if judge is None else judge.identity,
            sequential=None if gate is None else {"step": config.sequential.step, "baseline": gate.baseline},
        )
        plan, resume, whole = continued(config, plan, identity, engine)
        names, requests = request_names(plan.requests), [item.request for item in plan.requests]
        cached = opened.enter_context(through_cache(config, engine, identity, names))
        # Requests that fit no pool are rejected before anything is written, as in a run without a cache.
        if cached is not None and cached.look_up(requests) and not engine.facts().loaded:
            engine.load()
            check_requests(requests, engine.facts().limits, names)
        loaded = time.perf_counter()
        name = f"{selection(config)}-{config.model.name}"
        facts = engine.facts()
        versions = {library: facts.libraries[library] for library in deciding(facts.settings.numerics)}

        def judged(config: Config) -> Path:
            """The run of the judge, by this run's engine if both are one model."""
            if config.model.api is not None:
                assert elsewhere is not None, "`api.perform` gives it"
                return elsewhere(config)
            return run(config, llm=engine if judge is not None and judge.shares else None)

        with RunFolder.open(config.output_dir, name, resume, identity, versions) as folder:
            if folder.finished:
                try:
                    open_run(folder.path, page=False)
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
                    judgements, of_judge = judge.judge(plan, answers, findings.denied, folder.path, judged)
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

                finish_run(folder, plan, answers, ended, score)
            on_complete(folder.path)
            opened.close()  # the engine; from here on nothing is left that could end the run unfinished
            folder.tidy()
            return folder.path


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
    expected = expectation(engine, {item.key: item.request for item in plan.requests})
    with Journal.open(folder.journal, folder.identity_sha256, expected) as journal:
        if count := len(journal.finished):
            answered = f"{count} of {len(plan.requests)} requests were answered by the interrupted run"
            if config.progress:
                warn(f"resuming {folder.path}: {answered}")
            if engine.facts().settings.numerics == "fast":
                warn(
                    f"{answered}, and under numerics=fast bits depend on the batch: this run will not be repeatable. "
                    "Set resume=never to run all again, or batch_invariant=true for equal bits after a resume"
                )
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
                    for (metric, name), values in result.scores.items():
                        scores.setdefault((result.name, metric, name), {}).update(values)
                done = documents
                if gate.decided(scores):
                    break
        return part, answers, known & {item.key for item in part.requests}


@phase("steps")
def execute(
    plan: Plan, llm: EngineProtocol, cached: CachedEngine | None, journal: Journal, label: str, progress: bool
) -> Answers:
    """Run the requests that the journal has no answer to, and return all answers in it.

    cached: the cache before the engine, if there is one. Its answers are not journaled: a resumed run reads them again.

    Raises EvalEngineError, once all others are done and journaled, if a request failed. Raises KeyboardInterrupt for a
    Ctrl-C, once the answers of the running step are journaled.
    """
    todo = {item.request.request_id: item for item in plan.requests if item.key not in journal.finished}
    failed = []
    shown = RunProgress(label, len(plan.requests), len(plan.requests) - len(todo), progress)
    with shown as bar, Interrupts() as interrupts:

        def after_step(stats: EngineStats) -> None:
            bar.step(stats)
            interrupts.after_a_step()

        of_cache = set() if cached is None else cached.answered
        try:
            for output in (cached or llm).run([item.request for item in todo.values()], after_step):
                item = todo[output.request_id]
                if output.error:
                    failed.append(f"{item.named}: {output.error}")
                elif output.request_id in of_cache:
                    journal.note(item.key, output.answer)
                else:
                    journal.append((item.key, item.prompt_sha256, output.answer))
                bar.finished()
        except ReplicaMismatchError as error:  # a resumed run computes both machines' requests again
            journal.forget({todo[number].key for number in error.doubted})
            raise EvalEngineError(f"{todo[error.request_id].named}: {error}") from error
    if failed:
        raise EvalEngineError(f"{len(failed)} requests failed:", *first_of(failed, MAX_LISTED))
    return journal.finished


def expectation(llm: EngineProtocol, requests: Mapping[RecordKey, Request]) -> Callable[[RecordKey], Expected | None]:
    """A function that gives what the journal may hold for a key; None for one that none of the requests has."""
    model, max_model_len = llm.checkpoint, llm.facts().settings.max_model_len

    def expected(key: RecordKey) -> Expected | None:
        if (request := requests.get(key)) is None:
            return None
        answer = ExpectedAnswer.of(request, model.spec, max_model_len, model.tokenizer)
        return ids_sha256(request.prompt_ids), answer.problem

    return expected


def continued(
    config: Config, plan: Plan, identity: Mapping[str, Any], llm: EngineProtocol
) -> tuple[Plan, str, Answers]:
    """(the plan, what `resume` means for its folder, the answers that are known): where `resume` names a finished run,
    truncated answers begin with what is known of them, and the run has a new folder.

    Raises ConfigError for a run that differs in more than its length, and for one whose limit is no shorter.
    """
    folder = Path(config.resume)
    if config.resume in ("auto", "never") or not (folder / DIGEST).exists() or (folder / IDENTITY).exists():
        return plan, config.resume, {}
    named, max_model_len = f"resume={folder}", llm.facts().settings.max_model_len
    recorded = open_run(folder, page=False, judge=False).identity
    problems = []
    if llm.facts().settings.numerics == "fast":
        problems.append("numerics=fast: bits depend on the batch, so that no answer can be continued; set resume=auto")
    if config.logprobs is not None:
        problems.append("logprobs: alternatives are not continued; leave it out, or set resume=auto")
    if llm.checkpoint.spec.short_positions(max_model_len):
        problems.append(
            "the model's positions depend on how long an answer may be: no answer is the beginning of a longer one; "
            "set resume=auto"
        )
    if config.sequential.step is not None:
        problems.append("sequential: a run in steps cannot be continued; set resume=auto")
    if changes := list(differences(_without_length(recorded), _without_length(identity))):
        problems.append(f"it is another run: {'; '.join(first_of(changes, 5))}. Only {LENGTH} may differ")
    if problems:
        raise ConfigError([f"{named}: {problem}" for problem in problems])
    rows = {row.key: row for row in read_records(folder / RECORDS)}
    requests, whole = list[HarnessRequest](), dict[RecordKey, Answer]()
    longest = 0
    for item in plan.requests:
        row, request = rows.get(item.key), item.request
        if row is None or list(row.prompt_ids) != list(item.prompt_ids):
            raise ConfigError(
                f"{named}: it has no answer to this prompt of {item.key[0]}, document {item.key[1]}: a longer {LENGTH} "
                "leaves a long prompt less room; raise engine.max_model_len, or set resume=auto"
            )
        whole[item.key] = row
        if isinstance(request, GenerateRequest) and row.finish_reason == "length":
            room = min(request.params.max_tokens, max_model_len - len(request.prompt_ids))
            longest = max(longest, len(row.output_ids) - room)
            if len(row.output_ids) < room:
                item = replace(item, request=replace(request, partial=row))
                del whole[item.key]
        requests.append(item)
    if longest > 0:
        raise ConfigError(f"{named}: its answers are longer than this run's may be; raise task.generation.{LENGTH}")
    warn(f"continuing {folder}: {len(whole)} answers are complete, {len(requests) - len(whole)} were truncated")
    return replace(plan, requests=requests), "auto", whole


def _without_length(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without the limits of its answers, without the hash of the requests, which holds them too, and
    without how unfinished thinking is scored: all answers are scored again, and older runs do not say it."""
    left_out = ("prompts", "harness", "score_unfinished_thinking")
    plain = {name: value for name, value in identity.items() if name not in left_out}
    if identity.get("harness") == SERVED:
        raise ConfigError("resume: a server's requests come from its clients; give the folder of a run of tasks")
    tasks = {}
    for name, task in (plain.get("tasks") or {}).items():
        generation = {key: value for key, value in (task.get("generation") or {}).items() if key != LENGTH}
        tasks[name] = {**task, "generation": generation}
    return {**plain, "tasks": tasks}


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
