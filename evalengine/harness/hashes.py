"""lm-eval's hashes: two harnesses with equal task hashes sent the same prompts about the same rows.

They do not cover generation settings, filters or the model (lm-eval 0.4.13, evaluator.py and evaluation_tracker.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalengine.tasks.documents import Doc
from evalengine.tasks.instance import Instance


@dataclass(frozen=True)
class SampleHashes:
    """SHA-256 hex digests of one document, of its first request's context and of its target."""

    doc: str
    prompt: str
    target: str


def hash_string(text: str) -> str:
    """SHA-256 hex of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _plain(value: object) -> object:
    """A JSON value for what json cannot write, as lm-eval writes it."""
    if isinstance(value, (np.int32, np.int64)):
        return int(value)
    return list(value) if isinstance(value, set) else str(value)


def sample_hashes(doc: Doc, instances: Sequence[Instance], target: Any) -> SampleHashes:
    """The three hashes of a document (as the task processed it, columns in their order)."""
    text = json.dumps(doc, indent=2, default=_plain, ensure_ascii=False)
    return SampleHashes(hash_string(text), hash_string(instances[0].context), hash_string(str(target)))


def task_hash(samples: Sequence[SampleHashes], filters: int = 1) -> str:
    """Hash over all samples in document order; lm-eval logs every document once per filter, filter by filter."""
    return hash_string("".join(s.doc + s.prompt + s.target for s in samples) * filters)
