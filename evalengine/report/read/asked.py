"""What a run's documents asked: the prompt, its own question without the examples before it, and the target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalengine.errors import ConfigError
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.lm_eval_samples import continuations, target_index
from evalengine.report.read.run import Run

Document = tuple[str, int]  # task, doc_id
SHORTEST = 40  # characters: a question is longer, or has a paragraph before it


@dataclass(frozen=True)
class Asked:
    """One document, for people."""

    question: str  # the end of the prompt, without the examples before it
    target: str  # the right choice, or the target's last line


def asked_of(runs: Sequence[Run], documents: Collection[Document]) -> dict[Document, Asked]:
    """What these documents asked, read anew from the files of the first run that holds texts: a `Run` does not keep
    them. Empty where no run does (baselines), and without a look at the disk where there are no documents."""
    for run in runs if documents else ():
        if run.kind == "baseline":
            continue
        try:
            rows_by_task = newest(run.source)[1]
        except (ConfigError, OSError):
            continue
        rows = {(task, row["doc_id"]): row for task, rows in rows_by_task.items() for row in rows}
        return {document: _asked(rows[document]) for document in documents if document in rows}
    return {}


def prompt_of(sample: Mapping[str, Any]) -> str:
    """The context of the first request; all requests of a sample share it, but for rolling ones, which score it."""
    arguments = sample.get("arguments")
    first: Any = next(iter(arguments.values()), {}) if isinstance(arguments, Mapping) else {}
    return str(first.get("arg_0", "")) if isinstance(first, Mapping) else ""


def target_of(sample: Mapping[str, Any], texts: Sequence[str]) -> str:
    """The right one of the choices `texts` with its number, else the target's last line: a worked solution ends with
    its answer."""
    place = target_index(sample, texts) if len(texts) > 1 else None
    if place is not None:
        return f"{place}: {texts[place].strip()}"
    lines = str(sample.get("target", "")).strip().splitlines()
    return lines[-1] if lines else ""


def _asked(sample: Mapping[str, Any]) -> Asked:
    return Asked(_question(prompt_of(sample)), target_of(sample, continuations(sample)))


def _question(prompt: str) -> str:
    """The end of the prompt, from a paragraph's start on: the examples before it are left out, a bare "Answer:" is not
    all that is left."""
    paragraphs = prompt.strip().split("\n\n")
    at = len(paragraphs) - 1
    while at > 0 and len("\n\n".join(paragraphs[at:])) < SHORTEST:
        at -= 1
    return "\n\n".join(paragraphs[at:])
