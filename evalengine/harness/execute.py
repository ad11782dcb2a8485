"""Runs a plan's requests, through the cache if the configuration names one.

Requests that the journal holds are skipped; each that finishes is journaled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from evalengine.cache.engine import CachedEngine
from evalengine.cache.keys import Computer
from evalengine.cache.store import CacheUnavailableError, Store
from evalengine.config.schema import Config
from evalengine.engine.expected import ExpectedAnswer
from evalengine.engine.interrupts import Interrupts
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import check_requests
from evalengine.errors import EvalEngineError, ReplicaMismatchError, first_of
from evalengine.harness.journal import Expected, Journal
from evalengine.harness.plan import Plan, request_names
from evalengine.harness.progress import RunProgress, WorkAmount
from evalengine.harness.requests import HarnessRequest
from evalengine.plain_text import warn
from evalengine.records.folder import RunFolder
from evalengine.records.schema import Answers, RecordKey, ids_sha256
from evalengine.util.phases import phase

MAX_LISTED = 10


@phase("steps")
def execute(
    plan: Plan,
    llm: EngineProtocol,
    cached: CachedEngine | None,
    folder: RunFolder,
    label: str,
    progress: bool,
    part: Plan | None = None,
    ran: Set[RecordKey] = frozenset(),
) -> tuple[Answers, set[RecordKey]]:
    """Every request's answer, and the keys of those that ran now (the others come from the journal).

    part: the part of the plan that is asked now; None: all of it. ran: what this process has journaled before.
    cached: the cache before the engine, if there is one. What it answers is not journaled: a resumed run asks it again.

    Raises EvalEngineError for a journal that is not this run's; and, once all others are done and journaled, if a
    request failed. Raises KeyboardInterrupt for a Ctrl-C, once the answers of the running step are journaled.
    """
    with Journal.open(folder.journal, folder.identity_sha256, _expected(plan, llm)) as journal:
        wanted = (plan if part is None else part).requests
        todo = {item.request.request_id: item for item in wanted if item.key not in journal.finished}
        kept = 0 if ran else len(journal.finished)
        if kept and progress:
            warn(f"resuming {folder.path}: {kept} of {len(plan.requests)} requests are kept from the interrupted run")
        if kept and llm.settings.numerics == "fast":
            _warn_of_mixing(kept, len(plan.requests))
        failed = []
        limits = {request_id: _most_tokens(item, llm) for request_id, item in todo.items()}
        work = _work(todo.values(), limits)
        shown = RunProgress(label, len(wanted), len(wanted) - len(todo), progress, work)
        with shown as bar, Interrupts() as interrupts:

            def after_step(stats: EngineStats) -> None:
                bar.step(stats)
                interrupts.after_a_step()

            answers = (cached or llm).run([item.request for item in todo.values()], after_step)
            read = set() if cached is None else cached.answered
            for output in _undoubted(answers, journal, todo):
                item = todo[output.request_id]
                if output.error:
                    failed.append(f"{item.named}: {output.error}")
                else:
                    if output.request_id in read:
                        journal.note(item.key, output.answer)
                    else:
                        journal.append((item.key, item.prompt_sha256, output.answer))
                bar.finished(max(0, limits[output.request_id] - len(output.token_ids)))
        if failed:
            raise EvalEngineError(f"{len(failed)} requests failed:", *first_of(failed, MAX_LISTED))
        return journal.finished, {item.key for item in todo.values()}


def keep(plan: Plan, llm: EngineProtocol, folder: RunFolder, whole: Answers) -> None:
    """Journals answers of an earlier run that are this one's, too; `execute` then finds them. Raises as `execute`."""
    if not whole:
        return
    with Journal.open(folder.journal, folder.identity_sha256, _expected(plan, llm)) as journal:
        for item in plan.requests:
            if item.key in whole and item.key not in journal.finished:
                journal.append((item.key, item.prompt_sha256, whole[item.key]))


def _undoubted(
    answers: Iterator[RequestOutput], journal: Journal, todo: Mapping[int, HarnessRequest]
) -> Iterator[RequestOutput]:
    """The answers. If two machines disagree, the doubted answers are taken out of the journal: a resumed run asks those
    requests again."""
    try:
        yield from answers
    except ReplicaMismatchError as error:
        journal.forget({todo[number].key for number in error.doubted})
        raise EvalEngineError(f"{todo[error.request_id].named}: {error}") from error


def _expected(plan: Plan, llm: EngineProtocol) -> Callable[[RecordKey], Expected | None]:
    requests = {item.key: item.request for item in plan.requests}
    return lambda key: expected_entry(requests[key], llm) if key in requests else None


def expected_entry(request: Request, llm: EngineProtocol) -> Expected:
    """Return what the journal may hold for the request."""
    answer = ExpectedAnswer.of(request, llm.spec, llm.settings.max_model_len, llm.tokenizer)
    return ids_sha256(request.prompt_ids), answer


def _most_tokens(item: HarnessRequest, llm: EngineProtocol) -> int:
    """How many tokens the request adds to its prompt: the most that it may generate, or those that it scores."""
    request = item.request
    if not isinstance(request, GenerateRequest):
        return len(request.continuation_ids)
    return min(request.params.max_tokens, llm.settings.max_model_len - len(request.prompt_ids))


def _work(todo: Iterable[HarnessRequest], limits: Mapping[int, int]) -> WorkAmount:
    """The tokens of the requests, by what is done with them."""
    requests, read, generated = 0, 0, 0
    for item in todo:
        requests, read = requests + 1, read + len(item.prompt_ids)
        if isinstance(item.request, GenerateRequest):
            generated += limits[item.request.request_id]
        else:
            read += limits[item.request.request_id]
    return WorkAmount(requests, read, generated)


def _warn_of_mixing(done: int, requests: int) -> None:
    warn(
        f"{done} of {requests} requests are kept from the interrupted run, and under numerics=fast bits "
        "depend on the batch: this run will not be repeatable. resume=never runs all of them again; "
        "batch_invariant=true makes a resumed run equal an unbroken one"
    )


@contextmanager
def through_cache(
    config: Config, llm: EngineProtocol, identity: Mapping[str, Any], name: Callable[[Request], str]
) -> Iterator[CachedEngine | None]:
    """The engine whose answers `cache.path` keeps; None where no cache is set.

    identity: that of the engine (`engine_identity`), or a whole run's. name: gives a request's name in messages.
    Raises ConfigError for a folder that can be no cache. One that is locked, or whose disk is full, is done without.
    """
    if config.cache.path is None:
        yield None
        return
    failed = None
    try:
        opened = Store.open(config.cache.path)
    except CacheUnavailableError as error:  # the cache only saves time: its failure must not end a run
        opened, failed = Store.empty(config.cache.path), str(error)
        warn(f"{error}; the run goes on without the cache")
    with opened as store:
        computer = Computer.of(config.model.name, identity, llm.facts().libraries)
        cached = CachedEngine(llm, store, computer, audit=config.cache.audit, seed=config.seed, name=name)
        cached.counts.failed = failed
        yield cached


@contextmanager
def open_answer_cache(
    config: Config, plan: Plan, llm: EngineProtocol, identity: Mapping[str, Any]
) -> Iterator[CachedEngine | None]:
    """`through_cache` for a run's plan. Kept answers are read at once, and the weights are loaded if one is missing:
    requests that no pool can hold are refused before anything is written, as in a run without a cache."""
    name = request_names(plan.requests)
    with through_cache(config, llm, identity, name) as cached:
        requests = [item.request for item in plan.requests]
        if cached is not None and cached.look_up(requests) and not llm.loaded:
            llm.load()
            check_requests(requests, llm.limits, name)
        yield cached
