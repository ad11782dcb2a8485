"""Facts about a run through an endpoint, besides its scores: `endpoint` of its results, and the same in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from evalengine.endpoint.answers import Answer, Place, why_unanswered
from evalengine.endpoint.noise import noise_lines
from evalengine.endpoint.plan import EndpointPlan
from evalengine.endpoint.received import HIDDEN
from evalengine.errors import listed
from evalengine.harness.journal import JournalEntry
from evalengine.harness.plan import Plan
from evalengine.harness.thinking import Thought
from evalengine.records.lm_eval import unanswered_words
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import RecordKey
from evalengine.report.stats.kappa import judge_lines

UNPROVED = ("an endpoint shows neither tokens nor bits: there is no digest, and nobody can check an answer; what it "
            "said is recorded")  # fmt: skip
MOST_NAMES = 5  # models, fingerprints or errors that are printed


def endpoint_facts(
    asked: EndpointPlan, model: str, answers: Mapping[Place, Answer], rejected: Mapping[Place, str]
) -> dict[str, Any]:
    """What the endpoint sent, as plain JSON values. model: the requested one."""
    sent = answers.values()
    return {
        "url": asked.url,
        "model": model,
        "requests": len(sent),
        "retried": sum(answer.attempts > 1 for answer in sent),
        "rejected": _rejected(asked.plan, rejected),
        "with_lone_surrogates": sum(answer.surrogates > 0 for answer in sent),
        "with_the_key": sum(answer.keys > 0 for answer in sent),
        "own_exemplar_prompts": asked.plan.own_exemplars,
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
    plan: Plan, answers: Mapping[Place, Answer], scored: Mapping[RecordKey, JournalEntry], ask: int
) -> dict[RecordKey, str]:
    """Key -> which of `UNANSWERED` the answer of one ask is; answers with a text are missing."""
    kinds = {item.key: why_unanswered(answers[number, ask], scored[item.key].text)
             for number, item in enumerate(plan.requests) if item.key in scored}  # fmt: skip
    return {key: kind for key, kind in kinds.items() if kind is not None}


def thoughts_of(
    plan: Plan, answers: Mapping[Place, Answer], scored: Mapping[RecordKey, JournalEntry], ask: int, end: str
) -> dict[RecordKey, Thought]:
    """Key -> the thinking of one ask's answer, which `end` or the endpoint itself separates from the text."""
    return {item.key: _thought(answers[number, ask], end, item.instance.context, scored[item.key].finish_reason)
            for number, item in enumerate(plan.requests) if item.key in scored}  # fmt: skip


def _thought(answer: Answer, end: str, prompt: str, finish_reason: str) -> Thought:
    before, ended, _ = answer.text.rpartition(end)
    if ended:
        return Thought(before + ended, 0, False)
    if answer.reasoning is not None or prompt.rstrip().endswith(end):
        return Thought(answer.reasoning or "", 0, finish_reason == "length" and not answer.text.strip())
    if finish_reason == "length":
        return Thought(answer.text, 0, True)
    return Thought("", 0, False, unended=bool(answer.text.strip()))  # without a text it is an empty answer


def lines(facts: Mapping[str, Any]) -> list[str]:
    """What the terminal and the page report of a run besides its table. facts: `endpoint` of its results."""
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
        said.append(f"{_answers(count)} ended before the end of their thinking ({credit}); raise "
                    "task.generation.max_gen_toks, or check model.think_end_token")  # fmt: skip
    if own := facts.get("own_exemplar_prompts"):
        said.append(f"{own} prompts contain their own document among the exemplars: their scores say little")
    if count := facts["with_lone_surrogates"]:
        said.append(f"{_answers(count)} contained lone surrogates (halves of characters), replaced by U+FFFD")
    if count := facts["with_the_key"]:
        said.append(f"{_answers(count)} contained the API key, replaced by {HIDDEN}")
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


def _answers(count: int) -> str:
    return f"{count:,} answer{'s' * (count != 1)}"
