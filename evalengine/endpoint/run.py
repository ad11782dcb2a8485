"""One run of the tasks through an endpoint: plan, ask, score, write. It leaves lm-eval's files, and no digest: an
endpoint shows neither its tokens nor their bits."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config, selection, to_yaml
from evalengine.endpoint.answers import Answer, AnswersFile, Place, answer_of, entries
from evalengine.endpoint.http import Client
from evalengine.endpoint.noise import noise, noise_lines
from evalengine.endpoint.plan import EndpointPlan, endpoint_plan
from evalengine.endpoint.received import HIDDEN
from evalengine.errors import EvalEngineError, first_of
from evalengine.harness.described import invocation
from evalengine.harness.groups import group_results
from evalengine.harness.judging import NOT_JUDGED, Judge, find_judge
from evalengine.harness.outcome import scorer
from evalengine.harness.runner import run as run_here
from evalengine.harness.verdicts import verdicts
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG
from evalengine.records.folder import IDENTITY, LOCK, RunFolder
from evalengine.records.lm_eval import ModelInfo, TaskResult, remove_results, results_dict, results_name, write_samples
from evalengine.records.lm_eval_file import read_results, results_files
from evalengine.records.manifest_data import Manifest
from evalengine.records.manifest_parts import RunTimings
from evalengine.records.sealed import canonical, content_sha256
from evalengine.report.read.load import load_run
from evalengine.report.stats.kappa import judge_lines
from evalengine.report.stats.metric_interval import cut_lines
from evalengine.report.terminal.run_table import results_table
from evalengine.report.terminal.tables import print_lines

UNPROVED = ("an endpoint shows neither tokens nor bits: there is no digest, and nobody can check an answer; what it "
            "said is recorded")  # fmt: skip


def run(config: Config) -> Path:
    """Runs the configured tasks through `config.model.api`; returns the run's folder. The same command resumes.

    Raises: ConfigError for settings and tasks that an endpoint cannot do, before anything is asked; EvalEngineError for
    requests that failed after all retries, once the others are kept.
    """
    started, begin = time.time(), time.perf_counter()
    asked = endpoint_plan(config)
    client = Client(asked.url, config.endpoint)
    judge = find_judge(config, asked.plan, None)
    identity = _identity(config, asked) | ({} if judge is None else {"judge": judge.identity})
    name = f"{selection(config)}-{config.model.name}"
    run_id = content_sha256(identity)[:8]
    with RunFolder.open(config.output_dir, name, run_id, config.resume, identity) as folder:
        folder.write_text(CONFIG, to_yaml(config))
        answers = _answers(config, asked, folder, client)
        timings = RunTimings(0.0, time.perf_counter() - begin, time.perf_counter() - begin)
        _write(config, asked, answers, folder, judge, started, timings)
        for unfinished in (LOCK, IDENTITY):
            (folder.path / unfinished).unlink(missing_ok=True)
        return folder.path


def _identity(config: Config, asked: EndpointPlan) -> dict[str, Any]:
    """What makes two runs one: the address, what it is asked, and how answers are scored."""
    tasks = {name: asdict(task) for name, task in config.tasks.items()}
    plain: dict[str, Any] = json.loads(canonical({
        "harness": "endpoint", "api": asked.url, "requests": asked.sha256, "repeats": config.endpoint.repeats,
        "tasks": tasks, "think_end_token": config.model.think_end_token,
    }))  # fmt: skip
    return plain


def _answers(config: Config, asked: EndpointPlan, folder: RunFolder, client: Client) -> dict[Place, Answer]:
    """Every answer, of which those that the folder holds are not asked again."""
    file = AnswersFile(folder.path, client.cleaner)
    try:
        answers = dict(file.kept)
        places = [(number, ask) for ask in range(config.endpoint.repeats) for number in range(len(asked.bodies))]
        todo = [place for place in places if place not in answers]
        if answers and config.progress:
            warn(f"resuming {folder.path}: {len(answers)} of {len(places)} answers are kept from the interrupted run")
        failed = []
        for reply in client.ask([asked.bodies[number] for number, _ in todo]):
            place = todo[reply.number]
            if reply.value is None:
                task, document, *_ = asked.plan.requests[place[0]].key
                failed.append(f"{task}, document {document}: {reply.error} (after {reply.attempts} attempts)")
                continue
            answers[place] = answer_of(reply)
            file.append(place, answers[place])
        if failed:
            raise EvalEngineError(f"{len(failed)} of {len(places)} requests failed; the same command asks them again:",
                                  *first_of(failed, 10))  # fmt: skip
        return answers
    finally:
        file.close()


def _write(
    config: Config,
    asked: EndpointPlan,
    answers: Mapping[Place, Answer],
    folder: RunFolder,
    judge: Judge | None,
    started: float,
    timings: RunTimings,
) -> None:
    """Scores each ask, and writes the first one's samples and results with what all of them show. A judge is asked
    about the first one's answers."""
    end = config.model.think_end_token
    asks = [entries(asked.plan.requests, answers, ask, None if end is None else str(end))
            for ask in range(config.endpoint.repeats)]  # fmt: skip
    limited = Counter(key[:2] for key, entry in asks[0].items() if entry.finish_reason == "length")
    results: list[list[TaskResult]] = []
    judgements, told = (NOT_JUDGED, None) if judge is None else judge.judge(asked.plan, asks[0], folder.path, _judged)
    for number, one in enumerate(asks):
        programs = verdicts(asked.plan, one, config, selection(config))
        score = scorer(asked.plan, one, verdicts=programs, judgements=NOT_JUDGED if number else judgements)
        results.append([score(task) for task in asked.plan.tasks])
    finished = datetime.now()
    remove_results(folder)
    for result in results[0]:
        rows = [replace(one, length_limited=limited[result.name, one.doc_id]) for one in result.samples]
        write_samples(folder, replace(result, samples=rows), finished)
    facts = {
        "url": asked.url,
        "model": config.model.name,
        "requests": len(answers),
        "retried": sum(answer.attempts > 1 for answer in answers.values()),
        "length_limited": sum(entry.finish_reason == "length" for one in asks for entry in one.values()),
        "with_lone_surrogates": sum(answer.surrogates > 0 for answer in answers.values()),
        "with_the_key": sum(answer.keys > 0 for answer in answers.values()),
        "system_fingerprints": dict(Counter(str(answer.fingerprint) for answer in answers.values())),
        "unproved": UNPROVED,
        **({"noise": noise(asks, results)} if len(asks) > 1 else {}),
        **({} if told is None else {"judge": told}),
    }
    groups = group_results(config.groups, results[0])
    model = ModelInfo(config.model.name, asked.url, "", None, None, 0, 0, "", None)
    how = invocation(config, started, timings)
    content = results_dict([replace(one, samples=()) for one in results[0]], model, how, groups)
    content["config"] |= {"model": "endpoint", "model_args": {"base_url": asked.url, "model": config.model.name}}
    content["harness"] = "endpoint"
    content["endpoint"] = {**facts, "in_words": lines(facts)}
    folder.write_json(results_name(finished), json.loads(json.dumps(content, default=str)))


def _judged(config: Config) -> Path:
    """The run of a judge: of a model here, or behind an API, too."""
    return run_here(config).folder if config.model.api is None else run(config)


def print_run(folder: Path) -> None:
    """Prints a run's table, and what is known of its endpoint, to standard output."""
    results = read_results(results_files(folder)[-1])
    print_lines((results_table(results), *cut_lines(load_run(folder)), *lines(results["endpoint"]), str(folder)))


def _answers_of(count: int) -> str:
    return f"{count:,} answer{'s' * (count != 1)}"


def lines(facts: Mapping[str, Any]) -> list[str]:
    """What the terminal says of a run besides its table. facts: `endpoint` of its results."""
    prints = facts["system_fingerprints"]
    said = [f"{facts['requests']:,} answers of {facts['url']}, {facts['retried']} after retries, "
            f"{facts['length_limited']} cut at the limit"]  # fmt: skip
    if len(prints) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in prints.items())
        said.append(f"the endpoint changed while it was asked: its system_fingerprint was {counts}")
    if count := facts["with_lone_surrogates"]:
        said.append(f"{_answers_of(count)} contained lone surrogates (halves of characters), replaced by U+FFFD")
    if count := facts["with_the_key"]:
        said.append(f"{_answers_of(count)} contained the API key, replaced by {HIDDEN}")
    said += judge_lines(Manifest({"judge": facts.get("judge")}))
    return [*said, *(noise_lines(facts["noise"]) if "noise" in facts else []), f"not proved: {facts['unproved']}"]
