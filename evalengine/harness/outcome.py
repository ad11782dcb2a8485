"""Turn the engine's answers into a run's records, and into each task's samples and metrics.

First the facts about the answers that their tokens do not show (`find`): which thinking did not end, and how their
programs ended. Programs run once everything is generated and journaled. If a run is killed meanwhile, the same command
generates nothing anew and runs all programs again: a verdict is a function of the program and the limits.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from evalengine.config.schema import Config, selection
from evalengine.engine.request import GenerateRequest
from evalengine.engine.text.detokenizer import end_of_thinking, part
from evalengine.errors import EvalEngineError, one_line
from evalengine.harness.judging import Judgements
from evalengine.harness.metrics import summarize
from evalengine.harness.plan import MANY_DOCUMENTS, isolated
from evalengine.harness.requests import Plan, TaskPlan
from evalengine.records.lm_eval import Sample, TaskResult
from evalengine.records.lm_eval_file import EMPTY_ANSWER, UNANSWERED, UNENDED_THINKING
from evalengine.records.schema import Answer, Answers, RecordKey, RequestRecord
from evalengine.tasks.base import Task
from evalengine.tasks.code import CodeTask
from evalengine.tasks.instance import OUTCOMES, Instance, ProgramLimits, ProgramVerdict, Response
from evalengine.tasks.judge import FILTER as JUDGE
from evalengine.tasks.judge import METRICS as OF_JUDGES
from evalengine.tasks.metric import MetricKey, MetricValue
from evalengine.tasks.rows import Doc
from evalengine.util.forked import ForkedTask, spread
from evalengine.util.limits import OutOfTime, limited
from evalengine.util.plugins import load
from evalengine.util.progress import RunProgress

TAIL = 256  # tokens at the end of a prompt in which an end of thinking is looked for
NO_ANSWER = Response()  # what is scored of a generation that gets no credit
ANSWER_FIELDS = [item.name for item in fields(Answer)]
NOT_RUN_WORDS = "not run"  # as a program's outcome


@dataclass(frozen=True)
class Thought:
    """One generation's thinking."""

    text: str  # with the text of its end token; "" where the model did not think
    num_tokens: int
    truncated: bool  # the length limit came before the end of thinking
    unended: bool = False  # the model stopped before the end of thinking

    @property
    def unfinished(self) -> bool:
        """Whether the generation has no answer, since its thinking did not end."""
        return self.truncated or self.unended


@dataclass(frozen=True)
class Findings:
    """Facts about a run's answers that are not part of them."""

    thoughts: Mapping[RecordKey, Thought] = field(default_factory=dict)  # empty where no end of thinking is named
    denied: Set[RecordKey] = frozenset()  # generations that get no credit (`Task.without_credit`)
    verdicts: Mapping[RecordKey, ProgramVerdict] = field(default_factory=dict)  # of the programs that were run
    judgements: Judgements = field(default_factory=dict)
    # The kind (`UNANSWERED`) of each generation that an endpoint left without an answer; None for an engine's, whose
    # empty texts only a judge counts.
    unanswered: Mapping[RecordKey, str] | None = None


def find(plan: Plan, answers: Answers, config: Config, tokenizer: Any) -> Findings:
    """The findings about the answers, before a judge's. Raises as `verdicts`."""
    thought = thoughts(plan, answers, tokenizer)
    denied = uncredited(thought, config)
    return Findings(thought, denied, verdicts(plan, answers, config, denied))


def thoughts(plan: Plan, answers: Answers, tokenizer: Any) -> dict[RecordKey, Thought]:
    """Request key -> the generation's thinking; empty where no end of thinking is named."""
    by_request = {}
    tasks = {item.task.name: item.task for item in plan.tasks}
    for item in plan.requests:
        if isinstance(item.request, GenerateRequest) and item.request.params.think_end_token is not None:
            end = end_of_thinking(tokenizer, item.request.params.think_end_token)
            assert end is not None
            thought = _thought(answers[item.key], tokenizer, end)
            if thought.unfinished:
                # The prompt may end the thinking, as chat templates write it for `enable_thinking=false`, and contain
                # the start of the answer after that.
                task, before = tasks.get(item.key[0]), part(tokenizer, [*item.prompt_ids[-TAIL:]], end)
                prefix = "" if task is None else task.gen_prefix(task.docs[item.key[1]])
                if before.ended and before.answer.strip() in ("", prefix.strip()):
                    thought = Thought("", 0, False)
            by_request[item.key] = thought
    return by_request


def _thought(answer: Answer, tokenizer: Any, end: str | int) -> Thought:
    """The thinking of one generation, whose prompt does not end it."""
    parts = part(tokenizer, [*answer.output_ids], end)
    if parts.ended:
        return Thought(parts.thinking, parts.num_tokens, False)
    if answer.finish_reason != "length":
        return Thought("", 0, False, unended=True)
    return Thought(tokenizer.decode(answer.output_ids, skip_special_tokens=True), len(answer.output_ids), True)


def uncredited(thoughts: Mapping[RecordKey, Thought], config: Config) -> Set[RecordKey]:
    """The generations that get no credit: their thinking did not end, so they contain no answer."""
    if config.score_unfinished_thinking:
        return frozenset()
    return {key for key, thought in thoughts.items() if thought.unfinished}


def verdicts(
    plan: Plan, answers: Answers, config: Config, denied: Set[RecordKey] = frozenset()
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
    distinct = dict.fromkeys(programs.values())
    with RunProgress(selection(config), len(distinct), 0, config.progress and bool(distinct), "programs run") as bar:

        def finished() -> None:
            bar.finished()
            bar.step()

        for limits in dict.fromkeys(limits for _, limits in distinct):
            run_programs = load("evalengine.integrations.sandbox.run:run_programs")
            batch = {program: limits for program, its_limits in distinct if its_limits == limits}
            ended = run_programs(batch, isolated(config), finished)
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


def records(plan: Plan, answers: Answers, findings: Findings) -> list[RequestRecord]:
    """A record per request, in the plan's order."""
    result = []
    for item in plan.requests:
        place: dict[str, Any] = dict(zip(("task", "doc_id", "request_index", "repeat"), item.key, strict=True))
        thought, verdict = findings.thoughts.get(item.key), findings.verdicts.get(item.key)
        result.append(
            RequestRecord(
                **{name: getattr(answers[item.key], name) for name in ANSWER_FIELDS},
                **place,
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


def task_results(
    plan: Plan,
    answers: Answers,
    findings: Findings | None = None,
    write: Callable[[TaskResult], object] | None = None,
) -> list[TaskResult]:
    """The metrics and samples of the plan's tasks that have documents, in lm-eval's terms. A judge's are of a filter.

    write: receives each result as soon as it is complete; the results returned then have no samples. Tasks that need
    limits are scored by a separate process. The others wait for it, since either work may use all cores.
    """
    keys_of: defaultdict[RecordKey, list[RecordKey]] = defaultdict(list)  # instance -> its requests
    for item in plan.requests:
        keys_of[item.instance.key].append(item.key)

    def score(tasks: Sequence[TaskPlan]) -> list[TaskResult]:
        results = []
        for own in tasks:
            result = _task_result(own, keys_of, answers, findings or Findings())
            if write is not None:
                write(result)
                result = replace(result, samples=())
            results.append(result)
        return results

    def spread_score(tasks: Sequence[TaskPlan]) -> list[TaskResult]:
        if not tasks or not all(own.task.can_fork for own in tasks):
            return score(tasks)
        return spread(score, tasks, MANY_DOCUMENTS, [len(own.instances) for own in tasks])

    tasks = [own for own in plan.tasks if own.instances]
    confined = [own for own in tasks if own.task.needs_limits]
    with ForkedTask(partial(spread_score, confined), worthwhile=False, limited=bool(confined)) as elsewhere:
        results = elsewhere.result()
    results += spread_score([own for own in tasks if not own.task.needs_limits])
    by_name = {result.name: result for result in results}
    return [by_name[own.task.name] for own in tasks]


def _task_result(
    own: TaskPlan, keys_of: Mapping[RecordKey, Sequence[RecordKey]], answers: Answers, findings: Findings
) -> TaskResult:
    task, judged = own.task, findings.judgements.get(own.task.name)
    filters = (*task.filters, JUDGE) if judged else task.filters
    if judged and not task.aggregation():  # nothing but the judge scores it
        filters = (JUDGE,)
    per_doc: list[dict[MetricKey, MetricValue]] = []
    samples: dict[str, list[Sample]] = {name: [] for name in filters}
    for number, instances in limited(enumerate(own.instances)):
        doc_id = instances[0].doc_id if instances else number  # a run in steps has some of the documents only
        keys = [keys_of.get(instance.key, ()) for instance in instances]
        scores, filtered, sample = _score_document(task, doc_id, instances, keys, answers, findings)
        judgement = judged.get(doc_id) if judged else None
        if judged:  # without a verdict where the judge's endpoint rejected the request
            filtered = {**filtered, JUDGE: [] if judgement is None else judgement.verdicts}
        if judgement is not None:
            scores.update({(metric, JUDGE): value for metric, value in judgement.metrics.items()})
        per_doc.append(scores)
        for name in filters:
            values = {metric: value for (metric, where), value in scores.items() if where == name}
            shown = judgement.shown if judgement is not None and name == JUDGE else None
            found = replace(sample, filtered_resps=filtered[name], filter=name, metrics=values, judge=shown)
            samples[name].append(found)
    better = {name: of_judge.higher_is_better for name, of_judge in OF_JUDGES.items()
              if any((name, JUDGE) in doc for doc in per_doc)}  # fmt: skip
    documents = samples[filters[0]]
    truncated = [count for one in documents if (count := one.thinking_truncated) is not None]
    return TaskResult(
        name=task.name,
        alias=task.config.alias,
        version=task.version if task.version is not None else "N/A",
        num_fewshot=task.num_fewshot,
        metrics=summarize(task, per_doc),
        higher_is_better={**task.higher_is_better(), **better},
        config=asdict(task.config),
        original=len(task.docs),
        effective=len(own.instances),
        task_hash=task_hash([(one.doc_hash, one.prompt_hash, one.target_hash) for one in documents], len(samples)),
        thinking_truncated=sum(truncated) if truncated else None,
        unanswered={kind: n for kind in UNANSWERED if (n := sum(one.unanswered.get(kind, 0) for one in documents))},
        samples=[sample for of_filter in samples.values() for sample in of_filter],
    )


def _score_document(
    task: Task,
    doc_id: int,
    instances: Sequence[Instance],
    keys: Sequence[Sequence[RecordKey]],
    answers: Answers,
    findings: Findings,
) -> tuple[dict[MetricKey, MetricValue], dict[str, list[Any]], Sample]:
    """Score a document: (its metrics, its responses after each filter, what its samples share under all filters).

    keys: each instance's requests.
    """
    doc, target = task.docs[doc_id], task.target(task.docs[doc_id])
    responses = [_response(*pair, answers, findings) for pair in zip(instances, keys, strict=True)]
    scored, denied = responses, [not findings.denied.isdisjoint(own) for own in keys]
    try:
        if any(denied):
            scored = [NO_ANSWER if no else response for no, response in zip(denied, responses, strict=True)]
            scores = task.without_credit(doc, responses, scored)
        else:
            scores = task.process_results(doc, responses)
        filtered: dict[str, list[Any]] = task.filtered(doc, scored)
    # The task's own code may raise anything over a text that no rehearsal tried.
    except (Exception, OutOfTime) as error:
        raise EvalEngineError(
            f"tasks.{task.name}: the answer to document {doc_id} cannot be scored ({one_line(error)}). All answers "
            "are saved: fix this and rerun the command to score them"
        ) from error
    by_index: dict[int, list[Any]] = defaultdict(list)
    first: dict[int, Instance] = {}
    for instance, response in zip(instances, responses, strict=True):
        by_index[instance.index].append(response.plain(instance.kind))
        first.setdefault(instance.index, instance)
    every = [key for own in keys for key in own]
    thinking = [findings.thoughts[key] for key in every if key in findings.thoughts]
    if findings.unanswered is None:
        judgement = findings.judgements.get(task.name, {}).get(doc_id)
        unanswered = Counter({EMPTY_ANSWER: 0 if judgement is None else judgement.empty})
    else:
        unanswered = Counter(findings.unanswered[key] for key in every if key in findings.unanswered)
    unanswered[UNENDED_THINKING] = sum(thought.unended for thought in thinking)
    outcomes = [NOT_RUN_WORDS if response.verdict is None else str(response.verdict) for response in responses]
    doc_hash, prompt_hash, target_hash = sample_hashes(doc, instances, target)
    sample = Sample(
        doc_id=doc_id,
        doc=doc,
        target=target,
        arguments=[_arguments(instance) for instance in first.values()],
        resps=[*by_index.values()],
        filtered_resps=(),
        filter="",
        metrics={},
        doc_hash=doc_hash,
        prompt_hash=prompt_hash,
        target_hash=target_hash,
        doc_cluster=None if task.clusters is None else task.clusters[doc_id],
        thinking=[thought.text for thought in thinking] if thinking else None,
        thinking_truncated=sum(thought.truncated for thought in thinking) if thinking else None,
        outcomes=outcomes if any(response.verdict for response in responses) else None,
        unanswered={kind: unanswered[kind] for kind in UNANSWERED if unanswered[kind]},
    )
    return scores, filtered, sample


def _response(instance: Instance, keys: Sequence[RecordKey], answers: Answers, findings: Findings) -> Response:
    """The answer to one instance; a rolling one has a request per window, and none for an empty text.

    fsum is correctly rounded: a log-likelihood does not depend on the Python version (3.12's sum is compensated).
    """
    if instance.kind == "generate_until":
        return Response(text=answers[keys[0]].text, verdict=findings.verdicts.get(keys[0]))
    loglikelihood = math.fsum(value for key in keys for value in answers[key].logprobs.tolist())
    return Response(loglikelihood=loglikelihood, is_greedy=all(answers[key].is_greedy for key in keys))


def _arguments(instance: Instance) -> tuple[Any, ...]:
    if instance.kind == "generate_until":
        assert instance.generation is not None
        settings = asdict(instance.generation)
        settings |= {"until": list(settings["until"]), "do_sample": settings["temperature"] > 0}
        return instance.context, settings
    return (instance.context, instance.continuation) if instance.kind == "loglikelihood" else (instance.context,)


def hash_string(text: str) -> str:
    """SHA-256 hex of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _plain_json(value: object) -> object:
    """A JSON value for what json cannot write, as lm-eval writes it."""
    if isinstance(value, (np.int32, np.int64)):
        return int(value)
    return list(value) if isinstance(value, set) else str(value)


def sample_hashes(doc: Doc, instances: Sequence[Instance], target: Any) -> tuple[str, str, str]:
    """lm-eval's SHA-256 hex digests of one document (as the task processed it, columns in their order), of its first
    request's context and of its target: two harnesses with equal hashes sent the same prompts about the same rows. They
    do not cover generation settings, filters or the model (lm-eval 0.4.13, evaluator.py and evaluation_tracker.py)."""
    text = json.dumps(doc, indent=2, default=_plain_json, ensure_ascii=False)
    return hash_string(text), hash_string(instances[0].context), hash_string(str(target))


def task_hash(samples: Sequence[tuple[str, str, str]], filters: int = 1) -> str:
    """Hash over all samples in document order; lm-eval logs every document once per filter, filter by filter."""
    return hash_string("".join(map("".join, samples)) * filters)
