"""Run a plan's requests, and find the answers that are known already: in a journal, a cache, or a finished run.

Requests that the journal holds are skipped; each that finishes is journaled at once. A finished run with a shorter
`max_gen_toks` gives its answers, too (`continued`): a token's bits are a function of the tokens before it, so an answer
that continues where the limit cut it is that of a run which had the longer limit from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.cache.engine import CachedEngine, through_cache
from evalengine.config.schema import Config
from evalengine.engine.expected import ExpectedAnswer
from evalengine.engine.interrupts import Interrupts
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.request import GenerateRequest, Request
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import check_requests
from evalengine.errors import ConfigError, EvalEngineError, ReplicaMismatchError, first_of
from evalengine.harness.plan import Plan, request_names
from evalengine.harness.requests import SERVED, HarnessRequest
from evalengine.plain_text import warn
from evalengine.records.evidence import open_run
from evalengine.records.folder import DIGEST, IDENTITY, RECORDS, RunFolder
from evalengine.records.journal import Expected, Journal
from evalengine.records.schema import Answer, Answers, RecordKey, ids_sha256, read_records
from evalengine.records.sealed import differences
from evalengine.util.phases import phase
from evalengine.util.progress import RunProgress

MAX_LISTED = 10
LENGTH = "max_gen_toks"  # the setting of a generation that may differ from a finished run's


def deferred_llm(config: Config, checkpoint: Checkpoint) -> LLM:
    """The engine of the configuration, which loads its weights when they are first needed."""
    mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    return LLM(checkpoint, **mode, engine=config.engine, load=False)


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


def open_journal(plan: Plan, llm: EngineProtocol, folder: RunFolder, progress: bool) -> Journal:
    """The run's journal, with an interrupted run's answers. Raises EvalEngineError for one that is not this run's."""
    expected = expectation(llm, {item.key: item.request for item in plan.requests})
    journal = Journal.open(folder.journal, folder.identity_sha256, expected)
    if count := len(journal.finished):
        resumed = f"{count} of {len(plan.requests)} requests were answered by the interrupted run"
        if progress:
            warn(f"resuming {folder.path}: {resumed}")
        if llm.facts().settings.numerics == "fast":
            warn(
                f"{resumed}, and under numerics=fast bits depend on the batch: this run will not be repeatable. "
                "resume=never runs all of them again; batch_invariant=true makes a resumed run equal an unbroken one"
            )
    return journal


def expectation(llm: EngineProtocol, requests: Mapping[RecordKey, Request]) -> Callable[[RecordKey], Expected | None]:
    """A function that gives what the journal may hold for a key; None for one that none of the requests has."""
    model, max_model_len = llm.checkpoint, llm.facts().settings.max_model_len

    def expected(key: RecordKey) -> Expected | None:
        if (request := requests.get(key)) is None:
            return None
        answer = ExpectedAnswer.of(request, model.spec, max_model_len, model.tokenizer)
        return ids_sha256(request.prompt_ids), answer.problem

    return expected


@contextmanager
def open_answer_cache(
    config: Config, plan: Plan, llm: EngineProtocol, identity: Mapping[str, Any]
) -> Iterator[CachedEngine | None]:
    """`through_cache` for a run's plan. Cached answers are read at once, and the weights are loaded if one is missing:
    requests that no pool can hold are refused before anything is written, as in a run without a cache."""
    name = request_names(plan.requests)
    with through_cache(config, llm, identity, name) as cached:
        requests = [item.request for item in plan.requests]
        if cached is not None and cached.look_up(requests) and not llm.facts().loaded:
            llm.load()
            check_requests(requests, llm.facts().limits, name)
        yield cached


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
    problems = [*_cannot_continue(config, llm)]
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
                item = replace(item, request=replace(request, begun=row))
                del whole[item.key]
        requests.append(item)
    if longest > 0:
        raise ConfigError(f"{named}: its answers are longer than this run's may be; raise task.generation.{LENGTH}")
    warn(f"continuing {folder}: {len(whole)} answers are complete, {len(requests) - len(whole)} were truncated")
    return replace(plan, requests=requests), "auto", whole


def _cannot_continue(config: Config, llm: EngineProtocol) -> Iterable[str]:
    """Why no answer of this run can be the continuation of another one's."""
    settings = llm.facts().settings
    if settings.numerics == "fast":
        yield "numerics=fast: its bits depend on the batch, so that no answer can be continued; set resume=auto"
    if config.logprobs is not None:
        yield "logprobs: alternatives are not continued; leave it out, or set resume=auto"
    if llm.checkpoint.spec.short_positions(settings.max_model_len):
        yield (
            "the model's positions depend on how long an answer may be: no answer is the beginning of a longer one; "
            "set resume=auto"
        )
    if config.sequential.step is not None:
        yield "sequential: a run in steps begins anew; set resume=auto"


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
