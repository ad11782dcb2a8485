"""Whether two runs may be compared, and which of their settings differ; every difference is one plain sentence.
And what cannot be compared, since a source does not hold it.

Documents and prompts are compared one by one (lm-eval's `doc_hash` and `prompt_hash`, and the SHA-256 of prompt ids),
so that runs of different length still compare on what they share. Settings that only shape prompts (`num_fewshot`, the
chat template, ...) count through the prompts: where those are equal, such a setting changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from evalengine.records.manifest import resumed_fast
from evalengine.report.read.identities import (
    CONTENT,
    DATA_SETTINGS,
    MODEL_NAMES,
    NUMERIC_SETTINGS,
    PROMPT_SETTINGS,
    SEEDS,
    differing_settings,
    said,
    section,
    thing,
)
from evalengine.report.read.lm_eval_samples import BY_CHOICE, ROLLING, aligned
from evalengine.report.read.run import UNBOUND, Item, Key, Run

Subject = Literal["data", "configuration"]


@dataclass(frozen=True)
class Finding:
    """One way in which two runs differ."""

    text: str  # a sentence without its full stop
    subject: Subject
    refused: bool  # the runs are not comparable because of it
    names: tuple[str, ...] = ()  # the things that differ, as `identities.thing` names them; () if they change no record
    task: str | None = None  # the only task that it concerns; None: all


def incomparable(a: Run, b: Run) -> list[str]:
    """Why `a` and `b` must not be compared, a sentence each; empty if they may."""
    return [finding.text for finding in findings(a, b) if finding.refused]


def findings(a: Run, b: Run) -> list[Finding]:
    """Every difference of inputs and settings between two runs, refused ones first."""
    a, b = aligned(a, b)
    unsorted = [*_engines(a, b), *_resumed(a, b), *_tasks(a, b), *_documents(a, b), *_contents(a, b), *_prompts(a, b)]
    unsorted += _settings(a, b)
    return sorted(unsorted, key=lambda finding: not finding.refused)


def data_differs(a: Run, b: Run, x: Item, y: Item) -> bool:
    """Whether one request was asked differently: another document, target or prompt."""
    if x.prompt_sha256 and y.prompt_sha256 and x.prompt_sha256 != y.prompt_sha256:
        return True
    return document_change(a, b, x.task, x.doc_id) is not None


def document_change(a: Run, b: Run, task: str, doc_id: int) -> Literal["documents", "targets", "prompts"] | None:
    """The first of a document's content, target and prompt whose hashes both runs hold, and in which they differ."""
    left, right = (run.hashes.get(task, {}).get(doc_id) for run in (a, b))
    if left is None or right is None:
        return None
    content, prompt, target = (bool(x and y) and x != y for x, y in zip(left, right, strict=True))
    return "documents" if content else "targets" if target else "prompts" if prompt else None


def prompt_differs(a: Run, b: Run, x: Item, y: Item) -> bool:
    """Whether one request's prompts differ: by their ids where both runs hold their hash, else by lm-eval's hash."""
    if x.prompt_sha256 and y.prompt_sha256:
        return x.prompt_sha256 != y.prompt_sha256
    left, right = (run.hashes.get(x.task, {}).get(x.doc_id) for run in (a, b))
    return left is not None and right is not None and left[1] != right[1]


def _engines(a: Run, b: Run) -> Iterator[Finding]:
    if a.program != b.program:
        text = f"A was run by {a.program} and B by {b.program}"
        yield Finding(text, "configuration", False, ("program",))


def _resumed(a: Run, b: Run) -> Iterator[Finding]:
    """Fast numerics depend on the batch, and an interrupted run's batches are no unbroken run's."""
    for label, run in (("A", a), ("B", b)):
        if resumed := resumed_fast(run.manifest):
            yield Finding(f"{label} {resumed_words(run, resumed)}", "configuration", False, ("resumed",))


def resumed_words(run: Run, kept: int) -> str:
    """What an interruption means for the bits of a fast run; completes a sentence about it."""
    return (
        f"was interrupted and resumed under fast numerics ({kept} of {len(run.items)} requests kept), so its batches, "
        "on which such bits depend, were others than those of an unbroken run"
    )


def _tasks(a: Run, b: Run) -> Iterator[Finding]:
    tasks = [{key[0] for key in run.items} | {key[0] for key in run.scores} for run in (a, b)]
    for label, only in (("A", tasks[0] - tasks[1]), ("B", tasks[1] - tasks[0])):
        if only:
            yield Finding(f"Only {label} ran {', '.join(sorted(only))}", "data", True)


def _documents(a: Run, b: Run) -> Iterator[Finding]:
    """Requests that only one run has, in tasks that both ran."""
    shared = {key[0] for key in a.items} & {key[0] for key in b.items}
    for task in sorted(shared):
        left, right = (_requests(run, task) for run in (a, b))
        if left != right:
            limits = _limits(a, b)
            yield Finding(
                f"{task}: A has {len(left)} requests, B {len(right)}, and they share {len(left & right)}"
                f"{f' ({limits})' if limits else ''}",
                "data",
                True,
            )


def _requests(run: Run, task: str) -> set[Key]:
    return {key for key in run.items if key[0] == task}


def _limits(a: Run, b: Run) -> str:
    """How the limits of documents differ; "" if they are equal."""
    limits = [run.identity.get("limit") for run in (a, b)]
    return said(("limit",), *limits) if limits[0] != limits[1] else ""


def _contents(a: Run, b: Run) -> Iterator[Finding]:
    """Differing rows of the datasets: by document where hashes are at hand, else by the hash of all evaluated rows,
    which tells nothing where a different limit has evaluated different rows."""
    for task in sorted({*a.hashes, *b.hashes} | {*section(a, "datasets"), *section(b, "datasets")}):
        shared = sorted({*a.hashes.get(task, {})} & {*b.hashes.get(task, {})})
        for place, label in ((0, "content"), (2, "target")):
            changed = [doc for doc in shared if a.hashes[task][doc][place] != b.hashes[task][doc][place]]
            if changed:
                yield Finding(
                    f"{task}: {len(changed)} of {len(shared)} documents differ in {label} (first: doc {changed[0]})",
                    "data",
                    True,
                )
        old, new = (section(run, "datasets").get(task, {}).get("sha256") for run in (a, b))
        if not shared and old and new and old != new:
            if _limits(a, b) and _requests(a, task) != _requests(b, task):
                continue
            text = f"{task}: the dataset's rows differ ({said(('sha256',), old, new)})"
            yield Finding(text, "data", True, ("documents",), task)


def _prompts(a: Run, b: Run) -> Iterator[Finding]:
    """Differing prompts of requests that both runs have, with the settings that may have made the difference."""
    shared = sorted(a.items.keys() & b.items.keys())
    for task, keys in groupby(shared, key=lambda key: key[0]):
        task_keys = list(keys)
        changed = [key for key in task_keys if prompt_differs(a, b, a.items[key], b.items[key])]
        if not changed:
            continue
        settings = [
            (path, said(path, old, new))
            for path, old, new in differing_settings(a, b)
            if path[-1] in (*PROMPT_SETTINGS, "max_model_len") and path[-1] != "limit"
            if path[0] != "tasks" or path[1] == task
        ]
        why = f": {'; '.join(text for _, text in settings)}" if settings else ""
        yield Finding(
            f"{task}: {len(changed)} of {len(task_keys)} prompts differ (the first is of doc {changed[0][1]}){why}",
            "data",
            True,
            tuple(dict.fromkeys(thing(path) for path, _ in settings)) or ("prompts",),
            task,
        )


def _settings(a: Run, b: Run) -> Iterator[Finding]:
    """Every other difference between the two identities."""
    sampled = any(
        (task.get("generation") or task.get("generation_kwargs") or {}).get("temperature")
        for run in (a, b)
        for task in section(run, "tasks").values()
        if isinstance(task, Mapping)
    )
    for path, old, new in differing_settings(a, b):
        top, leaf, difference = path[0], path[-1], said(path, old, new)
        if leaf in (*PROMPT_SETTINGS, *DATA_SETTINGS) or top in ("datasets", "prompts", "task_hashes"):
            continue
        of_a_level = top in ("attention_backend", "gpu_architecture") and None in (old, new)  # `numerics` differs, too
        names, task = () if of_a_level else (thing(path),), path[1] if top == "tasks" and len(path) > 1 else None
        if top in NUMERIC_SETTINGS or (top == "model_args" and leaf not in MODEL_NAMES):
            yield Finding(difference, "configuration", False, names)
        elif top in SEEDS:
            matters = sampled or a.by_lm_eval  # some of lm-eval's kinds of models may draw by it
            yield Finding(f"The seeds differ ({difference})", "configuration", sampled, names if matters else ())
        elif top in CONTENT:
            merged = [run.manifest.model.adapter.get("source") for run in (a, b)] if top == "weights" else [None]
            note = f"; {said(('adapter',), *merged)}" if any(merged) else ""
            yield Finding(f"{CONTENT[top]} ({difference}{note})", "configuration", True, names)
        else:
            yield Finding(f"The settings differ ({difference})", "configuration", True, names, task)


_WEIGHTS = ("weights", "model_sha")


def unchecked(a: Run, b: Run) -> list[str]:
    """What was not compared, a sentence each."""
    notes = []
    for label, run in (("A", a), ("B", b)):
        if run.kind == "lm-eval":
            notes.append(
                f"{label} is {run.files}: it holds texts, log-likelihood sums and scores, but no token ids, "
                "no logprobs by token and no digest; two such outputs are equal as far as those tell"
            )
        elif run.unbound:
            notes.append(f"{label}: {UNBOUND}")
        elif run.by_lm_eval:
            notes.append(
                f"{label} is a baseline of {run.files}: it holds log-likelihood sums, answers and scores, but no "
                "outputs and no digest; what was generated cannot be compared"
            )
        elif run.kind == "baseline":
            notes.append(f"{label} is a baseline: it holds hashes and scores, no tokens and no logprobs by token")
    for label, run in (("A", a), ("B", b)):
        if read := run.manifest.from_cache:
            notes.append(
                f"{label} read {read} of its {len(run.items)} answers from a cache: an earlier run computed them, and "
                "what this one would have computed is not compared"
            )
    for names, label in ((_WEIGHTS, "the model weights"), (("tokenizer",), "the tokenizer")):
        if lacking := _lacking(a, b, names):
            notes.append(f"{lacking} did not record a hash of {label}: equality was not checked")
    notes += [f"{task}: no hashes of documents or prompts that both hold: equality was not checked"
              for task in sorted(_unhashed(a, b))]  # fmt: skip
    notes += _unknown_choices(a, b)
    if a.by_lm_eval != b.by_lm_eval:
        notes += [f"{task}: lm-eval's files hold a log-likelihood a document, so the other run's windows were summed"
                  for task in sorted({item.task for item in a.items.values() if item.kind == ROLLING})]  # fmt: skip
    return notes


def unrecorded_weights(a: Run, b: Run) -> str:
    """Which of two runs recorded no hash of its weights that can be compared with the other's; "" if both did."""
    lacking = _lacking(a, b, _WEIGHTS)
    return f"{lacking} did not record a hash of the model weights" if lacking else ""


def _lacking(a: Run, b: Run, names: tuple[str, ...]) -> str:
    """Which runs lack a hash, such as `A and B`. lm-eval's model_sha, a commit on the Hub, compares with its like."""
    comparable = names if a.by_lm_eval == b.by_lm_eval else names[:1]
    return " and ".join(
        label for label, run in (("A", a), ("B", b)) if not any(run.identity.get(name) for name in comparable)
    )


def _unhashed(a: Run, b: Run) -> set[str]:
    """Tasks with a shared request that no hash in both runs covers: a baseline of ours and lm-eval's files hold unlike
    hashes."""
    tasks = set()
    for key in a.items.keys() & b.items.keys():
        prompts = a.items[key].prompt_sha256 and b.items[key].prompt_sha256
        documents = all(key[1] in run.hashes.get(key[0], {}) for run in (a, b))
        if not prompts and not documents:
            tasks.add(key[0])
    return tasks


def _unknown_choices(a: Run, b: Run) -> Iterator[str]:
    """Multiple-choice metrics whose choices a run does not hold, so that another wrong choice would pass unseen."""
    several = {key[0] for key, item in a.items.items() if item.kind == "loglikelihood" and key[2] > 0}
    shared = a.scores.keys() & b.scores.keys()
    for task in sorted(several):
        metrics = sorted(key for key in shared if key[0] == task and key[1] in BY_CHOICE)
        metrics = [key for key in metrics if {*a.scores[key].values(), *b.scores[key].values()} <= {0.0, 1.0}]
        for label, run in (("A", a), ("B", b)):
            if unknown := [key[1] for key in metrics if key not in run.choices]:
                why = (
                    "its baseline was written without" if run.kind == "baseline" else "its scores follow no known rule"
                )
                yield (
                    f"{task}: {label} does not say which choice {' and '.join(dict.fromkeys(unknown))} took ({why}): "
                    "another wrong one would pass unseen"
                )
