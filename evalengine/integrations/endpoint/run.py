"""One run of the tasks through an endpoint: plan, ask, score, write. It leaves lm-eval's files, and no digest: an
endpoint shows neither its tokens nor their bits."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from datetime import datetime
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from evalengine.config.schema import Config, selection, to_yaml
from evalengine.errors import EvalEngineError, first_of, listed
from evalengine.harness.judging import Judge, Judgements, find_judge
from evalengine.harness.outcome import Findings, Thought, task_results, uncredited, verdicts
from evalengine.harness.plan import rehearse_judge
from evalengine.harness.requests import Plan
from evalengine.harness.runner import run as run_here
from evalengine.integrations.endpoint.answers import (
    AnswersFile,
    Document,
    EndpointAnswer,
    Place,
    answer_of,
    entries,
    why_unanswered,
)
from evalengine.integrations.endpoint.http import HIDDEN, Client
from evalengine.integrations.endpoint.plan import EndpointPlan, endpoint_plan
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG
from evalengine.records.folder import IDENTITY, LOCK, RunFolder
from evalengine.records.lm_eval import ModelInfo, TaskResult, remove_results, results_dict, write_results
from evalengine.records.lm_eval_file import REJECTED, read_results, results_files, unanswered_words
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import Answer, Answers, RecordKey
from evalengine.records.sealed import canonical
from evalengine.report.read.load import load_run
from evalengine.report.run_table import results_table
from evalengine.report.stats.kappa import judge_lines
from evalengine.report.stats.metric_interval import cut_lines, mean_interval, wilson
from evalengine.util.tables import print_lines

UNPROVED = ("an endpoint shows neither tokens nor bits: there is no digest, and no one can check an answer; what it "
            "said is recorded")  # fmt: skip
MOST_NAMES = 5  # models, fingerprints or errors that are printed

MOST_REJECTED = 100  # rejected requests without a single answer after which the rest is not sent


def run(config: Config) -> Path:
    """Runs the configured tasks through `config.model.api`; returns the run's folder. The same command resumes.

    Raises: ConfigError for settings and tasks that an endpoint cannot do, before a request is sent; EvalEngineError for
    requests that failed after all retries, once the others are stored.
    """
    started, begin = time.time(), time.perf_counter()
    planned = endpoint_plan(config)
    for line in planned.plan.warnings:
        warn(line)
    client = Client(planned.url, config.endpoint)
    judge = find_judge(config, None)
    rehearse_judge(judge, planned.plan)
    identity = _identity(config, planned) | ({} if judge is None else {"judge": judge.identity})
    name = f"{selection(config)}-{config.model.name}"
    with RunFolder.open(config.output_dir, name, config.resume, identity) as folder:
        folder.write_text(CONFIG, to_yaml(config))
        answers, rejected = _answers(config, planned, folder, client)
        seconds = time.perf_counter() - begin
        _write(config, planned, answers, rejected, folder, judge, started, seconds)
        for unfinished in (LOCK, IDENTITY):
            (folder.path / unfinished).unlink(missing_ok=True)
        return folder.path


def _identity(config: Config, planned: EndpointPlan) -> dict[str, Any]:
    """The properties that identify a run: the address, the requests, and how answers are scored."""
    tasks = {name: asdict(task) for name, task in config.tasks.items()}
    plain: dict[str, Any] = json.loads(canonical({
        "harness": "endpoint", "api": planned.url, "requests": planned.sha256, "repeats": config.endpoint.repeats,
        "tasks": tasks, "think_end_token": config.model.think_end_token,
        **({"score_unfinished_thinking": True} if config.score_unfinished_thinking else {}),
    }))  # fmt: skip
    return plain


def _answers(
    config: Config, planned: EndpointPlan, folder: RunFolder, client: Client
) -> tuple[dict[Place, EndpointAnswer], dict[Place, str]]:
    """(every answer, the error of each request that the endpoint rejected). Answers in the folder are not requested
    again; rejected requests are, since the account or the filter may have changed."""
    file = AnswersFile(folder.path, client.cleaner)
    try:
        answers = file.stored
        places = [(number, ask) for ask in range(config.endpoint.repeats) for number in range(len(planned.bodies))]
        todo = [place for place in places if place not in answers]
        if answers and config.progress:
            known = f"{len(answers)} of {len(places)} requests were answered by the interrupted run"
            warn(f"resuming {folder.path}: {known}")
        failed: list[str] = []
        rejected: dict[Place, str] = {}
        for reply in client.ask([planned.bodies[number] for number, _ in todo]):
            place = todo[reply.number]
            if reply.rejected:
                rejected[place] = reply.error
                if len(rejected) == MOST_REJECTED and not answers:
                    break
            elif reply.value is None:
                task, document, *_ = planned.plan.requests[place[0]].key
                failed.append(f"{task}, document {document}: {reply.error} (after {reply.attempts} attempts)")
            else:
                file.append(place, answer_of(reply))
        if rejected and not answers:
            raise EvalEngineError(f"{planned.url} rejected all of the first {len(rejected)} requests, one with: "
                                  f"{next(iter(rejected.values()))}; fix the request (model.name, endpoint.body) or "
                                  "the key's permissions, and rerun the command")  # fmt: skip
        if failed:
            raise EvalEngineError(f"{len(failed)} of {len(places)} requests failed; the same command sends them again:",
                                  *first_of(failed, 10))  # fmt: skip
        return answers, rejected
    finally:
        file.close()


def _write(
    config: Config,
    planned: EndpointPlan,
    answers: Mapping[Place, EndpointAnswer],
    rejected: Mapping[Place, str],
    folder: RunFolder,
    judge: Judge | None,
    started: float,
    seconds: float,
) -> None:
    """Score each repeat, and write the first one's samples and results with what all of them show. A judge scores the
    first one's answers. Documents with a rejected request are in no score."""
    end = config.model.think_end_token
    documents = {planned.plan.requests[number].key[:2] for number, _ in rejected}
    plan = _without(planned.plan, documents)
    by_repeat = [entries(planned.plan.requests, answers, ask, None if end is None else str(end), documents)
            for ask in range(config.endpoint.repeats)]  # fmt: skip
    unanswered = [unanswered_of(planned.plan, answers, one, ask) for ask, one in enumerate(by_repeat)]
    thoughts = [{} if end is None else thoughts_of(planned.plan, answers, one, ask, str(end))
                for ask, one in enumerate(by_repeat)]  # fmt: skip
    denied = [uncredited(own, config) for own in thoughts]
    limited = Counter(key[:2] for key, entry in by_repeat[0].items() if entry.finish_reason == "length")
    results: list[list[TaskResult]] = []
    judgements: Judgements = {}
    of_judge = None
    if judge is not None:
        judgements, of_judge = judge.judge(plan, by_repeat[0], denied[0], folder.path, _judged)
    for number, one in enumerate(by_repeat):
        programs = verdicts(plan, one, config, denied[number])
        judged = {} if number else judgements
        findings = Findings(thoughts[number], denied[number], programs, judged, unanswered[number])
        results.append(task_results(plan, one, findings))
    out, first = Counter(task for task, _ in documents), []
    for result in results[0]:
        rows = [replace(one, length_limited=limited[result.name, one.doc_id]) for one in result.samples]
        rejections = {REJECTED: out[result.name]} if out[result.name] else {}
        first.append(replace(result, samples=rows, unanswered={**rejections, **result.unanswered}))
    facts = endpoint_facts(planned, config.model.name, answers, rejected)
    facts |= {
        "length_limited": sum(entry.finish_reason == "length" for one in by_repeat for entry in one.values()),
        "unanswered": dict(Counter(kind for one in unanswered for kind in one.values())),
        "unfinished_thinking": sum(thought.unfinished for one in thoughts for thought in one.values()),
        "scores_unfinished_thinking": config.score_unfinished_thinking,
        **({"noise": noise(by_repeat, results)} if len(by_repeat) > 1 else {}),
        **({} if of_judge is None else {"judge": of_judge}),
    }
    arguments = {"base_url": planned.url, "model": config.model.name}
    model = ModelInfo(
        config.model.name, planned.url, "", None, None, 0, 0, "", None, program="endpoint", arguments=arguments
    )
    more = {"harness": "endpoint", "endpoint": {**facts, "in_words": lines(facts)}}
    remove_results(folder)
    content = {**results_dict(first, model, config, started, seconds), **more}
    write_results(folder, first, content, datetime.now())


def _without(plan: Plan, documents: Set[Document]) -> Plan:
    """The plan without these documents, and without tasks that have no others."""
    tasks = [replace(item, instances=[own for own in item.instances if (own[0].task, own[0].doc_id) not in documents])
             for item in plan.tasks]  # fmt: skip
    requests = [item for item in plan.requests if item.key[:2] not in documents]
    return replace(plan, tasks=[item for item in tasks if item.instances], requests=requests)


def _judged(config: Config) -> Path:
    """The run of a judge: of a model here, or behind an API, too."""
    return run_here(config) if config.model.api is None else run(config)


def print_run(folder: Path) -> None:
    """Prints a run's table, and what is known of its endpoint, to standard output."""
    results = read_results(results_files(folder)[-1])
    print_lines((results_table(results), *cut_lines(load_run(folder)), *lines(results["endpoint"]), str(folder)))


def endpoint_facts(
    planned: EndpointPlan, model: str, answers: Mapping[Place, EndpointAnswer], rejected: Mapping[Place, str]
) -> dict[str, Any]:
    """The endpoint's replies in figures, as plain JSON values. model: the requested one."""
    sent = answers.values()
    return {
        "url": planned.url,
        "model": model,
        "requests": len(sent),
        "retried": sum(answer.attempts > 1 for answer in sent),
        "rejected": _rejected(planned.plan, rejected),
        "with_lone_surrogates": sum(answer.surrogates > 0 for answer in sent),
        "with_the_key": sum(answer.keys > 0 for answer in sent),
        "own_exemplar_prompts": planned.plan.own_exemplars,
        "models": dict(Counter(str(answer.model) for answer in sent)),
        "system_fingerprints": dict(Counter(str(answer.fingerprint) for answer in sent)),
        "unproved": UNPROVED,
    }


def _rejected(plan: Plan, rejected: Mapping[Place, str]) -> dict[str, Any]:
    """The rejected requests. documents: task -> [how many are in no score for it, how many the task has]."""
    errors = [dict(zip(("task", "document", "request", "repeat"), plan.requests[number].key, strict=True))
              | {"ask": ask, "error": error} for (number, ask), error in sorted(rejected.items())]  # fmt: skip
    out = Counter(task for task, _ in {(error["task"], error["document"]) for error in errors})
    documents = {item.task.name: [out[item.task.name], len(item.instances)] for item in plan.tasks}
    return {"requests": len(errors), "documents": {task: pair for task, pair in documents.items() if pair[0]},
            "errors": errors}  # fmt: skip


def unanswered_of(
    plan: Plan, answers: Mapping[Place, EndpointAnswer], scored: Answers, ask: int
) -> dict[RecordKey, str]:
    """Key -> which of `UNANSWERED` the answer of one ask is; answers with a text are missing."""
    kinds = {item.key: why_unanswered(answers[number, ask], scored[item.key].text)
             for number, item in enumerate(plan.requests) if item.key in scored}  # fmt: skip
    return {key: kind for key, kind in kinds.items() if kind is not None}


def thoughts_of(
    plan: Plan, answers: Mapping[Place, EndpointAnswer], scored: Answers, ask: int, end: str
) -> dict[RecordKey, Thought]:
    """Key -> the thinking of one ask's answer, which `end` or the endpoint itself separates from the text."""
    return {item.key: _thought(answers[number, ask], end, item.instance.context, scored[item.key].finish_reason)
            for number, item in enumerate(plan.requests) if item.key in scored}  # fmt: skip


def _thought(answer: EndpointAnswer, end: str, prompt: str, finish_reason: str) -> Thought:
    before, ended, _ = answer.text.rpartition(end)
    if ended:
        return Thought(before + ended, 0, False)
    if answer.reasoning is not None or prompt.rstrip().endswith(end):
        return Thought(answer.reasoning or "", 0, finish_reason == "length" and not answer.text.strip())
    if finish_reason == "length":
        return Thought(answer.text, 0, True)
    return Thought("", 0, False, unended=bool(answer.text.strip()))  # without a text it is an empty answer


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Sentences below a run's table, on the terminal and on the page. facts: `endpoint` of its results."""
    said = [f"{facts['requests']:,} answers of {facts['url']}, {facts['retried']} after retries, "
            f"{facts['length_limited']} cut at the limit"]  # fmt: skip
    rejected = facts["rejected"]
    for task, (out, of) in rejected["documents"].items():
        errors = Counter(error["error"] for error in rejected["errors"] if error["task"] == task)
        score = "the task has no score" if out == of else "no score includes them"
        said.append(f"{task}: the endpoint rejected {out} of {of} documents, so {score}: {_counts(errors, '; ')}")
    if facts["unanswered"]:
        said.append(f"of all answers, {unanswered_words(facts['unanswered'])}: withheld or without a text, and scored "
                    "as they are")  # fmt: skip
    if count := facts.get("unfinished_thinking"):
        credit = "scored as if they were answers" if facts["scores_unfinished_thinking"] else "no credit"
        said.append(f"{_counted(count)} ended before the end of their thinking ({credit}); raise "
                    "task.generation.max_gen_toks, or check model.think_end_token")  # fmt: skip
    if own := facts.get("own_exemplar_prompts"):
        said.append(f"{own} prompts contain their own document among the exemplars: their scores say little")
    if count := facts["with_lone_surrogates"]:
        said.append(f"{_counted(count)} contained lone surrogates (halves of characters), replaced by U+FFFD")
    if count := facts["with_the_key"]:
        said.append(f"{_counted(count)} contained the API key, replaced by {HIDDEN}")
    for name, counts in (("model", facts["models"]), ("system_fingerprint", facts["system_fingerprints"])):
        if len(counts) > 1:
            said.append(f"the endpoint changed during the run: its {name} was {_counts(counts)}")
    if list(facts["models"]) not in ([facts["model"]], ["None"]) and len(facts["models"]) == 1:
        said.append(f"the endpoint named its model {next(iter(facts['models']))}; {facts['model']} was requested")
    said += judge_lines(Manifest({"judge": facts.get("judge")}))
    return [*said, *(noise_lines(facts["noise"]) if "noise" in facts else []), f"not proved: {facts['unproved']}"]


def _counts(counts: Mapping[str, int], between: str = ", ") -> str:
    """`a (3), b (1) and 2 more`, the most frequent first."""
    return listed([f"{name} ({count})" for name, count in Counter(counts).most_common()], MOST_NAMES, between)


def _counted(count: int) -> str:
    return f"{count:,} answer{'s' * (count != 1)}"


def noise(by_repeat: Sequence[Mapping[Any, Answer]], results: Sequence[Sequence[TaskResult]]) -> dict[str, Any]:
    """Return what repeats of the same requests show, as plain JSON values. results: of each repeat, the tasks' results
    with their samples.

    Of texts and of each metric: which of all changed at least once, their share with Wilson's 95 % interval, and
    `between`; of a metric also its value in each repeat.
    """
    keys = [*by_repeat[0]]
    texts = [[answers[key].text for answers in by_repeat] for key in keys]
    changed = [list(key) for key, own in zip(keys, texts, strict=True) if len(set(own)) > 1]
    documents = [f"{task}/{document}" for task, document, *_ in keys]
    return {
        "asks": len(by_repeat),
        "texts": {"requests_changed": changed, **_share(len(changed), len(keys)), **between(texts, documents)},
        "metrics": [entry for place in range(len(results[0])) for entry in _of_task([own[place] for own in results])],
    }


def between(outcomes: Sequence[Sequence[Hashable]], documents: Sequence[str] | None = None) -> dict[str, Any]:
    """The chance that two identical repeats of a request differ: the mean over requests of the share of its pairs of
    repeats that do, which estimates it without bias, with the 95 % interval of such a mean (`mean_interval`).

    outcomes: of each request, the outcome of every repeat. documents: each request's, where a document has several.
    """
    shares = [fmean(one != other for one, other in combinations(own, 2)) for own in outcomes]
    bounds = mean_interval(shares, clusters=documents)
    return {"between_two_asks": fmean(shares), "between_interval": None if bounds is None else list(bounds)}


def _of_task(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """One task's metrics."""
    scores, entries = [result.scores for result in results], []
    for metric, name in dict.fromkeys(key for own in scores for key in own):
        by_repeat = [values.get((metric, name), {}) for values in scores]
        documents = [doc for doc in by_repeat[0] if all(doc in one for one in by_repeat)]
        if not documents:
            continue
        scored = [[one[doc] for one in by_repeat] for doc in documents]
        changed = [doc for doc, own in zip(documents, scored, strict=True) if len(set(own)) > 1]
        values = [math.fsum(one[doc] for doc in documents) / len(documents) for one in by_repeat]
        entries.append({"task": results[0].name, "metric": metric, "filter": name, "values": values,
                        "documents_changed": changed, **_share(len(changed), len(documents)),
                        **between(scored)})  # fmt: skip
    return entries


def _share(changed: int, count: int) -> dict[str, Any]:
    return {"changed": changed, "of": count, "interval": list(wilson(changed, count))}


def noise_lines(found: Mapping[str, Any]) -> list[str]:
    """The noise in sentences."""
    texts = found["texts"]
    changed = f"{texts['changed']} of {texts['of']} texts changed {_at(texts['interval'])}"
    lines = [f"{found['asks']} identical requests: {changed}; {_between(texts)}"]
    for one in found["metrics"]:
        low, high = min(one["values"]), max(one["values"])
        named = f"{one['task']} {one['metric']}, {one['filter']}"
        lines.append(
            f"{named}: {one['changed']} of {one['of']} scores changed {_at(one['interval'])}; {_between(one)}; "
            f"the value is in {low:.4f} to {high:.4f}"
        )
    return lines


def _between(share: Mapping[str, Any]) -> str:
    differing = f"{100 * share['between_two_asks']:.2g} % {_at(share['between_interval'])}"
    return f"two identical requests differ in {differing}".rstrip()


def _at(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"(95 %: {100 * interval[0]:.2g} to {100 * interval[1]:.2g} %)"
