"""The requests whose records differ between two runs, each with every kind of difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.compare.attribution import Attribution
from evalengine.report.compare.comparability import data_differs, document_change, prompt_differs
from evalengine.report.compare.divergence import changed_bits, shared_tokens
from evalengine.report.numbers import same_value
from evalengine.report.read.run import Item, Key, Run

Kind = Literal["document", "prompt", "output", "logprobs", "text"]
KINDS: tuple[Kind, ...] = ("document", "prompt", "output", "logprobs", "text")
SUMS = 1e-15  # relative tolerance: rounding may part equal sums of sums by this (a baseline's windows, `rolling`)


@dataclass(frozen=True)
class ItemDifference:
    """One request whose records differ."""

    key: Key
    # What differs. document: the content or target. output: the tokens, or the text where a run holds no tokens.
    # logprobs: bits, at the tokens that both outputs begin with. text: the text of equal tokens.
    kinds: tuple[Kind, ...]
    cause: str

    @property
    def what(self) -> Kind:
        """The first kind of difference."""
        return self.kinds[0]


def item_differences(a: Run, b: Run, blame: Attribution) -> list[ItemDifference]:
    """Every request of both runs that differs, in key order."""
    changed = []
    for key in _differing_keys(a, b):
        x, y = a.items[key], b.items[key]
        kinds = tuple(_kinds(a, b, x, y)) or ("logprobs",)  # only the leaves differ
        computed = bool({"output", "logprobs", "text"} & {*kinds})
        changed.append(ItemDifference(key, kinds, blame.of(x, y, computed)))
    return changed


def differing_leaves(a: Run, b: Run) -> list[Key]:
    """The requests whose digest leaves differ, or that one run lacks, in key order. Equal digests end it at once.

    Both runs need leaves: lm-eval's have none (`Run.digest` is None), for which this raises `ConfigError`.
    """
    for run in (a, b):
        if run.digest is None or any(not item.leaf for item in run.items.values()):
            raise ConfigError(f"{run.source}: it holds no digests (kind {run.kind}); compare its texts and scores")
    if a.digest == b.digest:
        return []
    return [key for key in sorted({*a.items, *b.items}) if _leaf(a, key) != _leaf(b, key)]


def pairs(a: Run, b: Run) -> Iterator[tuple[Item, Item]]:
    """Each request that both runs hold, as it is in either."""
    return ((item, b.items[key]) for key, item in a.items.items() if key in b.items)


def outputs_known(x: Item, y: Item) -> bool:
    """Whether the runs hold enough to tell if two outputs are equal."""
    hashes = bool(x.output_sha256 and y.output_sha256)
    return hashes or x.kind != "generate_until" or (x.text is not None and y.text is not None)


def _differing_keys(a: Run, b: Run) -> list[Key]:
    """Keys of the requests that differ: by leaves where both runs have them, else by everything that both runs hold. A
    leaf does not hold the text, which is compared by itself."""
    both = list(pairs(a, b))
    texts = {x.key for x, y in both if _other_text(x, y)}
    if all(x.leaf and y.leaf for x, y in both):
        leaves = {key for key in differing_leaves(a, b) if key in a.items and key in b.items}
        return sorted(leaves | texts)
    return sorted(texts | {x.key for x, y in both if data_differs(a, b, x, y) or not _equal_as_far_as_known(x, y)})


def _leaf(run: Run, key: Key) -> str | None:
    return run.items[key].leaf if key in run.items else None


def _kinds(a: Run, b: Run, x: Item, y: Item) -> Iterator[Kind]:
    if document_change(a, b, x.task, x.doc_id) in ("documents", "targets"):
        yield "document"
    if prompt_differs(a, b, x, y):
        yield "prompt"
    if not _same_output(x, y):
        yield "output"
    if _other_logprobs(x, y):
        yield "logprobs"
    if _other_text(x, y):
        yield "text"


def _other_logprobs(x: Item, y: Item) -> bool:
    if x.logprobs is not None and y.logprobs is not None:
        shared = shared_tokens(x, y)
        left, right = (np.asarray(values[:shared], dtype=np.float32) for values in (x.logprobs, y.logprobs))
        return bool(changed_bits(left, right).any())
    return _same_output(x, y) and not _equal_sums(x, y)


def _other_text(x: Item, y: Item) -> bool:
    """Whether equal tokens have differing texts."""
    tokens = bool(x.output_sha256 and y.output_sha256) and x.output_sha256 == y.output_sha256
    have_texts = x.kind == "generate_until" and x.text is not None and y.text is not None
    return tokens and have_texts and x.text != y.text


def _equal_as_far_as_known(x: Item, y: Item) -> bool:
    return _same_output(x, y) and _equal_sums(x, y)


def _equal_sums(x: Item, y: Item) -> bool:
    return x.sum_logprob is None or y.sum_logprob is None or same_value(x.sum_logprob, y.sum_logprob, SUMS)


def _same_output(x: Item, y: Item) -> bool:
    """Whether outputs are equal: by the hash of token ids where both have it, else by text; scored text is input."""
    if x.output_sha256 and y.output_sha256:
        return x.output_sha256 == y.output_sha256
    return x.kind != "generate_until" or x.text is None or y.text is None or x.text == y.text
