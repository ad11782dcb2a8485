"""Asks a run's documents in steps, in an order that follows from a gate's baseline, until enough is known.

The plan holds all documents: their prompts are part of the run's identity, and an interrupted run takes up the same
steps. What was asked when it was decided is what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace

from evalengine.cache.engine import CachedEngine
from evalengine.config.schema import Config, selection
from evalengine.engine.protocol import EngineProtocol
from evalengine.harness.execute import execute
from evalengine.harness.outcome import score_tasks, scorer
from evalengine.harness.plan import Plan, TaskPlan
from evalengine.harness.thinking import thoughts, uncredited
from evalengine.harness.verdicts import verdicts
from evalengine.records.folder import RunFolder
from evalengine.records.lm_eval import TaskResult
from evalengine.records.schema import Answers, RecordKey
from evalengine.util.asking_order import first_of_order, in_order

Document = tuple[str, int]  # task, document
Scores = dict[tuple[str, str, str], dict[int, float]]  # (task, metric, filter) -> document -> value
Answered = tuple[Answers, set[RecordKey]]


@dataclass(frozen=True)
class Gate:
    """The gate that orders and ends a run in steps."""

    baseline: str  # the digest of its baseline, which orders the documents
    decided: Callable[[Scores], bool]  # whether the scores so far are enough


def answered(
    plan: Plan,
    config: Config,
    llm: EngineProtocol,
    cached: CachedEngine | None,
    folder: RunFolder,
    gate: Gate | None,
    kept: Set[RecordKey] = frozenset(),
) -> tuple[Plan, Answered]:
    """What was asked of the plan, with its answers: all of it, or as many steps as it took to decide. gate: of a run in
    steps. kept: what the journal has of an earlier run."""
    asking = (llm, cached, folder, selection(config), config.progress)
    if config.sequential.step is None or gate is None:
        return plan, execute(plan, *asking, ran=kept)

    def score(part: Plan, answers: Answers) -> list[TaskResult]:
        thought = thoughts(part, answers, llm.tokenizer)
        denied = uncredited(thought, config)
        judged = verdicts(part, answers, config, selection(config), denied)
        score_task = scorer(part, answers, thought, judged, denied=denied)
        return score_tasks(lambda tasks: [*map(score_task, tasks)], [own for own in part.tasks if own.instances])

    return in_steps(
        plan, config.sequential.step, gate, lambda part, ran: execute(plan, *asking, part=part, ran=ran), score
    )


def in_steps(
    plan: Plan,
    step: int,
    gate: Gate,
    ask: Callable[[Plan, Set[RecordKey]], Answered],
    score: Callable[[Plan, Answers], list[TaskResult]],
) -> tuple[Plan, Answered]:
    """The part of the plan that was asked, its answers, and the keys of those that ran now.

    step: documents of each task in a step. ask: answers a part of the plan; its second argument holds what ran before.
    score: scores a part, each document once.
    """
    scores: Scores = {}
    done: set[Document] = set()
    ran: set[RecordKey] = set()
    part = plan
    answers: Answers = {}
    for documents in _steps(plan, step, gate.baseline):
        part = cut(plan, documents)
        answers, now = ask(part, ran)
        ran |= now
        for result in score(cut(plan, documents - done), answers):
            for sample in result.samples:
                for metric, value in sample.metrics.items():
                    if isinstance(value, int | float):
                        scores.setdefault((result.name, metric, sample.filter), {})[sample.doc_id] = float(value)
        done = documents
        if gate.decided(scores):
            break
    return part, (answers, ran)


def cut(plan: Plan, documents: Set[Document]) -> Plan:
    """The plan of some of its documents; its hash of the prompts stays that of all."""
    tasks = [TaskPlan(own.task, [i for i in own.instances if i and (own.task.name, i[0].doc_id) in documents])
             for own in plan.tasks]  # fmt: skip
    return replace(plan, tasks=tasks, requests=[item for item in plan.requests if item.key[:2] in documents])


def _steps(plan: Plan, step: int, baseline: str) -> Iterator[set[Document]]:
    """Growing sets of documents, the last of which has all: `step` more of each task at a time."""
    orders = {}
    for own in plan.tasks:
        asked = [instances[0].doc_id for instances in own.instances if instances]
        names = own.task.clusters
        clusters = None if names is None else {doc: names[doc] for doc in asked}
        orders[own.task.name] = in_order(baseline, own.task.name, asked, clusters)
    count, total = 0, sum(len(cluster) for order in orders.values() for cluster in order)
    while True:
        count += step
        documents = {(task, doc) for task, order in orders.items() for doc in first_of_order(order, count)}
        yield documents
        if len(documents) == total:
            return
