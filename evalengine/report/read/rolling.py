"""Rolling log-likelihoods: our records hold one item a window, lm-eval's files one a document, the windows' sum."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import groupby

from evalengine.report.numbers import exact_sum
from evalengine.report.read.lm_eval_samples import ROLLING
from evalengine.report.read.run import Item, Key, Run

NOTHING = hashlib.sha256(b"").hexdigest()  # the prompt hash of an empty text


def asks_nothing(hashes: tuple[str, str, str]) -> bool:
    """Whether a rolling document's text is empty: lm-eval's files hold a response to it, our records no request."""
    return hashes[1] == NOTHING


def aligned(a: Run, b: Run) -> tuple[Run, Run]:
    """Both runs with one item a rolling document if lm-eval ran either; two runs of ours as they are."""
    return (_by_document(a), _by_document(b)) if a.by_lm_eval or b.by_lm_eval else (a, b)


def _by_document(run: Run) -> Run:
    items: dict[Key, Item] = {}
    for (task, doc_id), group in groupby(run.items.values(), key=lambda item: (item.task, item.doc_id)):  # in key order
        own = list(group)
        if own[0].kind == ROLLING and asks_nothing(run.hashes.get(task, {}).get(doc_id, ("", "", ""))):
            continue
        whole = [_sum(own)] if own[0].kind == ROLLING else own
        items.update((item.key, item) for item in whole)
    return replace(run, items=items)


def _sum(windows: list[Item]) -> Item:
    """The document's item, as lm-eval has it, without the windows' hashes, which say nothing of the document."""
    return replace(
        windows[0],
        request_index=0,
        repeat=0,
        leaf="",
        prompt_sha256="",
        output_sha256="",
        output_ids=None,
        logprobs=None,
        sum_logprob=_sum_logprob(windows),
        truncated=sum(window.truncated for window in windows),
    )


def _sum_logprob(windows: list[Item]) -> float | None:
    """The windows' sum, over all tokens at once where they are known: a sum of sums would be rounded twice."""
    values: list[float] = []
    for window in windows:
        if window.logprobs is not None:
            values += window.logprobs.tolist()
        elif window.sum_logprob is not None:
            values.append(window.sum_logprob)
        else:
            return None
    return exact_sum(values)
