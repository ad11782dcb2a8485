"""May two runs be compared, and which of their settings differ? Every difference is one plain sentence.

Documents and prompts are compared one by one (lm-eval's `doc_hash` and `prompt_hash`, and the SHA-256 of prompt ids),
so that runs of different length still compare on what they share. Settings that only shape prompts (`num_fewshot`, the
chat template, ...) count through the prompts: where those are equal, such a setting changed nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from evalengine.records.manifest import resumed_fast
from evalengine.report.rolling import aligned
from evalengine.report.runs import Item, Run

Subject = Literal["data", "configuration"]
# May differ between comparable runs: they change how numbers are computed, not what is asked.
NUMERIC_SETTINGS = ("numerics", "dtype", "attention_backend", "gpu_architecture", "engine", "model", "model_dtype")
# Their effect is in the prompts, whose hashes are compared.
PROMPT_SETTINGS = (
    *("apply_chat_template", "chat_template", "chat_template_date", "fewshot_as_multiturn", "fewshot_seed"),
    *("long_prompts", "system_instruction", "limit", "num_fewshot", "description", "fewshot_split"),
    *("system_instruction_sha", "chat_template_sha"),
    *("doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter"),
)
CONTENT = {  # identity key -> what its difference means
    "weights": "The model weights differ",
    "model_spec": "The models differ besides their weights",
    "tokenizer": "The tokenizers differ",
    "contract_version": "The numerics contracts differ",
    "model_sha": "The model weights differ",
    "model_revision": "The model revisions differ",
    "model_args": "The model arguments differ",
}
DATA_SETTINGS = ("dataset_path", "dataset_name", "test_split", "validation_split")  # rows are compared by their hashes
SEEDS = ("seed", "random_seed", "numpy_seed", "torch_seed")
PLACES = ("datasets", "prompts", "tasks", "task_hashes")  # compared by document, by item, by setting
# lm-eval's model arguments that say which model it is; the others say how it was run.
MODEL_NAMES = ("pretrained", "model", "revision", "tokenizer", "peft", "delta", "gguf_file", "subfolder")


@dataclass(frozen=True)
class Finding:
    """One way in which two runs differ."""

    text: str  # a sentence without its full stop
    subject: Subject
    refused: bool  # the runs are not comparable because of it


def incomparable(a: Run, b: Run) -> list[str]:
    """Why `a` and `b` must not be compared, a sentence each; empty if they may."""
    return [finding.text for finding in findings(a, b) if finding.refused]


def findings(a: Run, b: Run) -> list[Finding]:
    """Every difference of inputs and settings between two runs, refused ones first."""
    a, b = aligned(a, b)
    found = [*_engines(a, b), *_resumed(a, b), *_tasks(a, b), *_documents(a, b), *_contents(a, b), *_prompts(a, b)]
    found += _settings(a, b)
    return sorted(found, key=lambda finding: not finding.refused)


def data_differs(a: Run, b: Run, x: Item, y: Item) -> bool:
    """Whether one request was asked differently: another document, target or prompt."""
    if x.prompt_sha256 and y.prompt_sha256 and x.prompt_sha256 != y.prompt_sha256:
        return True
    return document_differs(a, b, x.task, x.doc_id)


def document_differs(a: Run, b: Run, task: str, doc_id: int) -> bool:
    """Whether both runs hold hashes of this document, prompt and target, and one of them differs."""
    left, right = (run.hashes.get(task, {}).get(doc_id) for run in (a, b))
    return left is not None and right is not None and any(x != y for x, y in zip(left, right, strict=True) if x and y)


def differing(old: Any, new: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path of names, value in `old`, value in `new`) of the plain JSON values that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differing(old.get(name), new.get(name), (*where, name))
    elif old != new:
        yield where, old, new


def said(path: tuple[str, ...], old: Any, new: Any) -> str:
    """`name is 1 in A and 2 in B`, hashes shortened."""
    return f"{'.'.join(path)} is {short(old)} in A and {short(new)} in B"


def short(value: Any) -> str:
    """A setting's value for a sentence: JSON, hashes shortened, `none` where it is not set."""
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False, default=str)
    whole = text.strip('"')
    return f"{whole[:12]}..." if len(whole) == 64 and all(c in "0123456789abcdef" for c in whole) else text


def _engines(a: Run, b: Run) -> Iterator[Finding]:
    if a.by_lm_eval != b.by_lm_eval:
        by = {True: "lm-eval", False: "evalengine"}
        yield Finding(f"A was run by {by[a.by_lm_eval]} and B by {by[b.by_lm_eval]}", "configuration", False)


def _resumed(a: Run, b: Run) -> Iterator[Finding]:
    """Fast numerics depend on the batch, and an interrupted run's batches are no unbroken run's."""
    for label, run in (("A", a), ("B", b)):
        if kept := resumed_fast(run.manifest):
            yield Finding(f"{label} {resumed_words(run, kept)}", "configuration", False)


def resumed_words(run: Run, kept: int) -> str:
    """Of a fast run that was interrupted: what that means for its bits."""
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
        left, right = ({key for key in run.items if key[0] == task} for run in (a, b))
        if left != right:
            limits = [run.identity.get("limit") for run in (a, b)]
            why = f" ({said(('limit',), *limits)})" if limits[0] != limits[1] else ""
            yield Finding(
                f"{task}: A has {len(left)} requests, B {len(right)}, and they share {len(left & right)}{why}",
                "data",
                True,
            )


def _contents(a: Run, b: Run) -> Iterator[Finding]:
    """Rows of the datasets: by document where hashes are at hand, else by the dataset's own hash."""
    for task in sorted({*a.hashes, *b.hashes} | {*_section(a, "datasets"), *_section(b, "datasets")}):
        shared = sorted({*a.hashes.get(task, {})} & {*b.hashes.get(task, {})})
        for place, label in ((0, "content"), (2, "target")):
            changed = [doc for doc in shared if a.hashes[task][doc][place] != b.hashes[task][doc][place]]
            if changed:
                yield Finding(
                    f"{task}: {len(changed)} of {len(shared)} documents differ in {label} (first: doc {changed[0]})",
                    "data",
                    True,
                )
        old, new = (_section(run, "datasets").get(task, {}).get("sha256") for run in (a, b))
        if not shared and old and new and old != new:
            yield Finding(f"{task}: the dataset's rows differ ({said(('sha256',), old, new)})", "data", True)


def _prompts(a: Run, b: Run) -> Iterator[Finding]:
    """Prompts of the requests that both runs have, with the settings that may have made the difference."""
    shared = sorted(a.items.keys() & b.items.keys())
    for task, keys in groupby(shared, key=lambda key: key[0]):
        asked = list(keys)
        changed = [key for key in asked if _prompt_differs(a, b, a.items[key], b.items[key])]
        if not changed:
            continue
        settings = [
            said(path, old, new)
            for path, old, new in _all_settings(a, b)
            if path[-1] in (*PROMPT_SETTINGS, "max_model_len") and path[-1] != "limit"
            if path[0] != "tasks" or path[1] == task
        ]
        why = f": {'; '.join(settings)}" if settings else ""
        yield Finding(
            f"{task}: {len(changed)} of {len(asked)} prompts differ (the first is of doc {changed[0][1]}){why}",
            "data",
            True,
        )


def _prompt_differs(a: Run, b: Run, x: Item, y: Item) -> bool:
    if x.prompt_sha256 and y.prompt_sha256:
        return x.prompt_sha256 != y.prompt_sha256
    left, right = (run.hashes.get(x.task, {}).get(x.doc_id) for run in (a, b))
    return left is not None and right is not None and left[1] != right[1]


def _settings(a: Run, b: Run) -> Iterator[Finding]:
    """Everything else of the two identities."""
    sampled = any(
        (task.get("generation") or task.get("generation_kwargs") or {}).get("temperature")
        for run in (a, b)
        for task in _section(run, "tasks").values()
        if isinstance(task, Mapping)
    )
    for path, old, new in _all_settings(a, b):
        top, leaf, difference = path[0], path[-1], said(path, old, new)
        if leaf in (*PROMPT_SETTINGS, *DATA_SETTINGS) or top in ("datasets", "prompts", "task_hashes"):
            continue
        if top in NUMERIC_SETTINGS or (top == "model_args" and leaf not in MODEL_NAMES):
            yield Finding(difference, "configuration", False)
        elif top in SEEDS:
            yield Finding(f"The seeds differ ({difference})", "configuration", sampled)
        elif top in CONTENT:
            yield Finding(f"{CONTENT[top]} ({difference})", "configuration", True)
        else:
            yield Finding(f"The settings differ ({difference})", "configuration", True)


def _all_settings(a: Run, b: Run) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Identity entries that differ. Of two sources of unlike kinds, those that both record."""
    alike = a.by_lm_eval == b.by_lm_eval
    tasks = {key[0] for key in a.items} & {key[0] for key in b.items}
    for path, old, new in differing(_identity(a, alike), _identity(b, alike)):
        if not alike and (old is None or new is None):
            continue
        if path[0] not in PLACES or len(path) < 2 or path[1] in tasks:  # `_tasks` says which task one run lacks
            yield path, old, new


def _identity(run: Run, alike: bool) -> dict[str, Any]:
    """The run's identity; lm-eval's model arguments taken apart, and its generation settings under our name
    where it meets a run of ours."""
    identity = dict(run.identity)
    if isinstance(identity.get("model_args"), str):  # "pretrained=...,dtype=..."
        parts = (part.partition("=") for part in identity["model_args"].split(","))
        identity["model_args"] = {name: value for name, _, value in parts}
    if not alike and run.by_lm_eval:
        identity["tasks"] = {
            task: {**settings, "generation": settings.get("generation_kwargs")}
            for task, settings in _section(run, "tasks").items()
        }
    return identity


def _section(run: Run, name: str) -> Mapping[str, Any]:
    section = run.identity.get(name)
    return section if isinstance(section, Mapping) else {}
