"""Turns the engine's answers into a run's records, and into each task's samples and metrics."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from evalengine.errors import EvalEngineError, one_line
from evalengine.harness.judging import NOT_JUDGED, Judgement, Judgements
from evalengine.harness.metrics import summarize
from evalengine.harness.plan import Plan, TaskPlan
from evalengine.harness.thinking import Thought
from evalengine.records.lm_eval import EMPTY_ANSWER, UNENDED_THINKING, Sample, TaskResult
from evalengine.records.schema import Answer, Answers, RecordKey, RequestRecord
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.judge import FILTER as JUDGE
from evalengine.tasks.judge import METRICS as OF_JUDGES
from evalengine.tasks.metric import MetricKey, MetricValue
from evalengine.tasks.programs import ProgramVerdict
from evalengine.tasks.rows import Doc
from evalengine.util.forked import ForkedTask
from evalengine.util.limits import OutOfTime, limited

Thoughts = Mapping[RecordKey, Thought]
Verdicts = Mapping[RecordKey, ProgramVerdict]
NONE: Thoughts = {}
NOT_RUN: Verdicts = {}
NO_ANSWER = Response()  # what is scored of a generation that gets no credit
ANSWER_FIELDS = [item.name for item in fields(Answer)]
NOT_RUN_WORDS = "not run"  # as a program's outcome


def records(
    plan: Plan, answers: Answers, thoughts: Thoughts = NONE, verdicts: Verdicts = NOT_RUN
) -> list[RequestRecord]:
    """A record per request, in the plan's order."""
    result = []
    for item in plan.requests:
        task, doc_id, index, repeat = item.key
        thought, verdict = thoughts.get(item.key), verdicts.get(item.key)
        result.append(
            RequestRecord(
                **{name: getattr(answers[item.key], name) for name in ANSWER_FIELDS},
                task=task,
                doc_id=doc_id,
                request_index=index,
                repeat=repeat,
                kind=item.instance.kind,
                prompt_ids=item.prompt_ids,
                prompt_sha256=item.prompt_sha256,
                truncated=item.truncated,
                thinking=None if thought is None else thought.text,
                thinking_tokens=None if thought is None else thought.num_tokens,
                thinking_truncated=None if thought is None else thought.truncated,
                outcome=None if verdict is None else str(verdict),
            )
        )
    return result


def scorer(
    plan: Plan,
    answers: Answers,
    thoughts: Thoughts = NONE,
    verdicts: Verdicts = NOT_RUN,
    judgements: Judgements = NOT_JUDGED,
    denied: Set[RecordKey] = frozenset(),
    unanswered: Mapping[RecordKey, str] | None = None,
) -> Callable[[TaskPlan], TaskResult]:
    """A function that gives a task's metrics and samples, in lm-eval's terms. A judge's are those of a filter.

    denied: generations that get no credit (`Task.without_credit`). unanswered: the kind (`UNANSWERED`) of each
    generation that an endpoint left without an answer; None for an engine's, whose empty texts only a judge counts.
    """
    by_instance: defaultdict[Instance, list[Answer]] = defaultdict(list)
    thought, verdict = {}, {}
    for item in plan.requests:
        by_instance[item.instance].append(answers[item.key])
        if item.key in thoughts:
            thought[item.instance] = thoughts[item.key]
        if item.key in verdicts:
            verdict[item.instance] = verdicts[item.key]
    refused = {item.instance for item in plan.requests if item.key in denied} if denied else frozenset()
    kinds = None
    if unanswered is not None:
        kinds = {item.instance: unanswered[item.key] for item in plan.requests if item.key in unanswered}

    def task_result(own: TaskPlan) -> TaskResult:
        return _task_result(own, by_instance, thought, verdict, judgements.get(own.task.name, {}), refused, kinds)

    return task_result


def score_tasks(work: Callable[[Sequence[TaskPlan]], list[TaskResult]], tasks: Sequence[TaskPlan]) -> list[TaskResult]:
    """`work(tasks)`, a result per task in their order; tasks that need limits are another process's work. The others
    wait for it, since either work may use all cores."""
    confined = [own for own in tasks if own.task.needs_limits]
    with ForkedTask(partial(work, confined), worthwhile=False, limited=bool(confined)) as elsewhere:
        results = elsewhere.result()
    results += work([own for own in tasks if not own.task.needs_limits])
    by_name = {result.name: result for result in results}
    return [by_name[own.task.name] for own in tasks]


def _response(instance: Instance, entries: list[Answer], verdict: ProgramVerdict | None) -> Response:
    """The answer to one instance; a rolling one has an entry per window, and none for an empty text.

    fsum is correctly rounded: a log-likelihood does not depend on the Python version (3.12's sum is compensated).
    """
    loglikelihood = math.fsum(value for entry in entries for value in entry.logprobs.tolist())
    if instance.kind == "generate_until":
        return Response(text=entries[0].text, verdict=verdict)
    return Response(loglikelihood=loglikelihood, is_greedy=all(entry.is_greedy for entry in entries))


def _task_result(
    plan: TaskPlan,
    entries: Mapping[Instance, list[Answer]],
    thought: Mapping[Instance, Thought],
    verdict: Mapping[Instance, ProgramVerdict],
    judged: Mapping[int, Judgement],
    denied: Set[Instance],
    kinds: Mapping[Instance, str] | None,
) -> TaskResult:
    task = plan.task
    per_doc: list[dict[MetricKey, MetricValue]] = []
    hashes: list[SampleHashes] = []
    filters = (*task.filters, JUDGE) if judged else task.filters
    if judged and not task.aggregation():  # nothing but the judge scores it
        filters = (JUDGE,)
    samples: dict[str, list[Sample]] = {name: [] for name in filters}
    for place, instances in limited(enumerate(plan.instances)):
        doc_id = instances[0].doc_id if instances else place  # a run in steps has some of the documents only
        doc = task.docs[doc_id]
        # Where no program ran, nothing is looked up: hashing an instance takes time, and there may be 100,000.
        answers = [_response(i, entries.get(i, []), verdict.get(i) if verdict else None) for i in instances]
        refused = [i in denied for i in instances] if denied else []
        scored = (
            [NO_ANSWER if no else answer for no, answer in zip(refused, answers, strict=True)]
            if any(refused)
            else answers
        )
        try:
            per_doc.append(
                task.without_credit(doc, answers, scored) if any(refused) else task.process_results(doc, answers)
            )
            results: dict[str, list[Any]] = task.filtered(doc, scored)
        # The task's own code may raise anything over a text that no rehearsal tried.
        except (Exception, OutOfTime) as error:
            raise EvalEngineError(
                f"tasks.{task.name}: the answer to document {doc_id} cannot be scored ({one_line(error)}). All answers "
                "are kept: once that is mended, the same command scores them"
            ) from error
        hashes.append(sample_hashes(doc, instances, task.target(doc)))
        thinking = [thought[instance] for instance in instances if instance in thought]
        judgement = judged.get(doc_id)
        if judged:  # without a verdict where the judge's endpoint rejected the request
            results = {**results, JUDGE: [] if judgement is None else judgement.verdicts}
        if judgement is not None:
            per_doc[-1].update({(metric, JUDGE): value for metric, value in judgement.metrics.items()})
        for name in samples:
            values = {metric: value for (metric, where), value in per_doc[-1].items() if where == name}
            sample = _sample(task, doc_id, instances, answers, name, results[name], values, hashes[-1], thinking)
            sample = replace(sample, unanswered=_unanswered(instances, kinds, thought, judgement))
            if judgement is not None and name == JUDGE:
                sample = replace(sample, judge=judgement.shown)
            samples[name].append(sample)
    return TaskResult(
        name=task.name,
        alias=task.config.alias,
        version=task.version if task.version is not None else "N/A",
        num_fewshot=task.num_fewshot,
        metrics=summarize(task, per_doc),
        higher_is_better={
            **task.higher_is_better(),
            **{
                name: metric.higher_is_better
                for name, metric in OF_JUDGES.items()
                if any((name, JUDGE) in doc for doc in per_doc)
            },
        },
        config=asdict(task.config),
        original=len(task.docs),
        effective=len(plan.instances),
        task_hash=task_hash(hashes, len(samples)),
        thinking_truncated=_truncated(plan, thought),
        unanswered=_unanswered([*chain.from_iterable(plan.instances)], kinds, thought, *judged.values()),
        samples=[sample for own in samples.values() for sample in own],
    )


def _truncated(plan: TaskPlan, thought: Mapping[Instance, Thought]) -> int | None:
    """How many of the task's generations never reached the end of their thinking; None where no such end is named."""
    truncated = [thought[i].truncated for instances in plan.instances for i in instances if i in thought]
    return sum(truncated) if truncated else None


def _unanswered(
    instances: Sequence[Instance],
    kinds: Mapping[Instance, str] | None,
    thought: Mapping[Instance, Thought],
    *judged: Judgement | None,
) -> dict[str, int]:
    """How many of the generations contain no answer, by kind; kinds without any are missing."""
    if kinds is None:
        counts = Counter({EMPTY_ANSWER: sum(one.empty for one in judged if one is not None)})
    else:
        counts = Counter(kinds[instance] for instance in instances if instance in kinds)
    counts[UNENDED_THINKING] = sum(thought[i].unended for i in instances if i in thought) if thought else 0
    return {kind: count for kind, count in counts.items() if count}


def _sample(
    task: Task,
    doc_id: int,
    instances: list[Instance],
    answers: list[Response],
    filter_name: str,
    filtered: list[Any],
    values: Mapping[str, MetricValue],
    hashes: SampleHashes,
    thinking: list[Thought],
) -> Sample:
    by_index: dict[int, list[Any]] = defaultdict(list)
    for instance, answer in zip(instances, answers, strict=True):
        by_index[instance.index].append(answer.plain(instance.kind))
    first = {instance.index: instance for instance in reversed(instances)}
    return Sample(
        doc_id=doc_id,
        doc=task.docs[doc_id],
        target=task.target(task.docs[doc_id]),
        arguments=[_arguments(first[index]) for index in by_index],
        resps=list(by_index.values()),
        filtered_resps=filtered,
        filter=filter_name,
        metrics=values,
        doc_hash=hashes.doc,
        prompt_hash=hashes.prompt,
        target_hash=hashes.target,
        cluster=None if task.clusters is None else task.clusters[doc_id],
        thinking=[thought.text for thought in thinking] if thinking else None,
        thinking_truncated=sum(thought.truncated for thought in thinking) if thinking else None,
        outcomes=[NOT_RUN_WORDS if answer.verdict is None else str(answer.verdict) for answer in answers]
        if any(answer.verdict for answer in answers)
        else None,
    )


def _arguments(instance: Instance) -> tuple[Any, ...]:
    if instance.kind == "generate_until":
        assert instance.generation is not None
        settings = asdict(instance.generation)
        return (
            instance.context,
            {**settings, "until": list(settings["until"]), "do_sample": settings["temperature"] > 0},
        )
    return (instance.context, instance.continuation) if instance.kind == "loglikelihood" else (instance.context,)


@dataclass(frozen=True)
class SampleHashes:
    """lm-eval's SHA-256 hex digests of one document, of its first request's context and of its target: two harnesses
    with equal hashes sent the same prompts about the same rows. They do not cover generation settings, filters or the
    model (lm-eval 0.4.13, evaluator.py and evaluation_tracker.py)."""

    doc: str
    prompt: str
    target: str


def hash_string(text: str) -> str:
    """SHA-256 hex of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _plain_json(value: object) -> object:
    """A JSON value for what json cannot write, as lm-eval writes it."""
    if isinstance(value, (np.int32, np.int64)):
        return int(value)
    return list(value) if isinstance(value, set) else str(value)


def sample_hashes(doc: Doc, instances: Sequence[Instance], target: Any) -> SampleHashes:
    """The three hashes of a document (as the task processed it, columns in their order)."""
    text = json.dumps(doc, indent=2, default=_plain_json, ensure_ascii=False)
    return SampleHashes(hash_string(text), hash_string(instances[0].context), hash_string(str(target)))


def task_hash(samples: Sequence[SampleHashes], filters: int = 1) -> str:
    """Hash over all samples in document order; lm-eval logs every document once per filter, filter by filter."""
    return hash_string("".join(s.doc + s.prompt + s.target for s in samples) * filters)
