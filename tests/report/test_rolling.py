"""Rolling log-likelihoods: windows beside lm-eval's documents, and their paired statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.compare import compare
from evalengine.report.compare.report import report
from evalengine.report.gate.gate import gate
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.read.lm_eval import ROLLING, aligned
from evalengine.report.read.run import Item, Run
from evalengine.report.stats.paired import paired
from tests.report.compared_runs import TASK, item, record, run

PAGES = {0: [[-1.5, -2.0], [-3.0]], 1: [[-0.25, -0.5], [-0.125, -4.0], [-1.0]], 2: [[-2.0]]}
NAME = (TASK, "loglikelihood per window", "none")


def rolling(pages: Mapping[int, Sequence[Sequence[float]]]) -> Run:
    """A run of evalengine: it has one item per window, and its perplexity has no number per document."""
    items: list[Item] = []
    for doc, windows in pages.items():
        for place, logprobs in enumerate(windows):
            made = replace(record(doc, [7] * len(logprobs), logprobs, ROLLING, [doc, place]), request_index=place)
            items.append(item(made))
    base = run({doc: ([7], [-1.0]) for doc in pages}, kind=ROLLING)
    key = (TASK, "word_perplexity", "none")
    total = sum(map(sum, (window for windows in pages.values() for window in windows)))
    results = {"results": {key: (-total, None)}, "higher_is_better": {key: False}}
    return replace(base, items={i.key: i for i in items}, scores={}, answers={}, **results)  # type: ignore[arg-type]


def lm_eval(pages: Mapping[int, Sequence[Sequence[float]]], kind: str = "lm-eval") -> Run:
    """A run of lm-eval: it has one sum per document."""
    summed = rolling({doc: [[sum(map(sum, windows))]] for doc, windows in pages.items()})
    bare = {"leaf": "", "prompt_sha256": "", "output_sha256": "", "output_ids": None, "logprobs": None}
    items = {key: replace(i, **bare) for key, i in summed.items.items()}  # type: ignore[arg-type]
    return replace(summed, kind=kind, digest=None, identity={}, manifest=Manifest({}), items=items)  # type: ignore[arg-type]


def moved(pages: Mapping[int, Sequence[Sequence[float]]], by: Mapping[int, float]) -> dict[int, list[list[float]]]:
    """The pages with `by[doc]` added to every logprob of the document."""
    return {doc: [[value + by.get(doc, 0.0) for value in w] for w in windows] for doc, windows in pages.items()}


@pytest.mark.parametrize("kind", ["lm-eval", "baseline"])
def test_windows_are_summed_beside_lm_evals_documents(kind: str) -> None:
    foreign, own = lm_eval(PAGES, kind), rolling(PAGES)
    for a, b in ((foreign, own), (own, foreign)):
        assert incomparable(a, b) == []
        c = compare(a, b)
        assert (c.verdict, c.common, c.partial, c.differences) == ("SAME TOKENS", 3, False, [])
        assert f"{TASK}: lm-eval's files hold a log-likelihood a document, so the other run's windows were summed" in (
            c.unchecked
        )
    other = compare(foreign, rolling(moved(PAGES, {1: -0.5})))
    assert [(d.key, d.kinds[0]) for d in other.differences] == [((TASK, 1, 0, 0), "logprobs")]
    metric = other.metrics[-1]
    assert metric.key[1] == "loglikelihood per document" and metric.paired is not None
    assert (metric.paired.n, metric.paired.clusters, metric.paired.losses) == (3, 3, 1)
    assert metric.value_b == pytest.approx((metric.value_a or 0.0) - 2.5 / 3)


def test_two_runs_of_evalengine_stay_as_they_are() -> None:
    a, b = rolling(PAGES), rolling(PAGES)
    assert aligned(a, b) == (a, b)
    assert compare(a, b).verdict == "IDENTICAL" and compare(a, b).common == 6


def test_a_baselines_sums_are_summed_and_unknown_ones_stay_unknown() -> None:
    a = rolling(PAGES)
    items = {key: replace(i, output_ids=None, logprobs=None) for key, i in a.items.items()}
    kept = replace(a, kind="baseline", items=items)
    assert compare(kept, lm_eval(PAGES)).differences == []
    first = TASK, 0, 0, 0
    lacking = replace(kept, items={**items, first: replace(items[first], sum_logprob=None)})
    assert aligned(lacking, lm_eval(PAGES))[0].items[first].sum_logprob is None
    assert compare(lacking, lm_eval(PAGES)).metrics[-1].left_out == 1


def test_the_gate_takes_lm_evals_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"lm": lm_eval(PAGES), "same": rolling(PAGES), "worse": rolling(moved(PAGES, dict.fromkeys(PAGES, -1.0)))}
    monkeypatch.setattr("evalengine.report.gate.gate.load_run", lambda path: runs[path])
    assert [gate("lm", name, "accuracy").verdict for name in ("same", "worse")] == ["pass", "fail"]


def test_windows_of_a_document_are_one_cluster() -> None:
    a, b = rolling(PAGES), rolling(moved(PAGES, {0: -0.25, 1: 0.125}))
    c = compare(a, b)
    metric = c.metrics[-1]
    assert metric.nats and not c.metrics[0].nats
    assert (metric.key, metric.unit, metric.higher_is_better, metric.left_out) == (NAME, "window", True, 0)
    sums = [np.array([i.sum_logprob for i in r.items.values()]) for r in (a, b)]
    assert metric.paired == paired(sums[0], sums[1], clusters=[0, 0, 1, 1, 1, 2], unbounded=True)
    assert metric.paired is not None and (metric.paired.n, metric.paired.clusters) == (6, 3)
    assert (metric.paired.wins, metric.paired.losses, metric.paired.ties) == (3, 2, 1)
    lines = [line for line in report(c) if isinstance(line, str)]
    clustered = "6 windows of 3 documents; interval, p and MDE take each document as one (clustered)."
    assert f"sums, loglikelihood per window, none: {clustered}" in lines
    assert any("equal: documents (of log-likelihoods per window: windows)" in line for line in lines)
    assert clustered in comparison_page(c).render()
    content = json.loads(json.dumps(comparison_json(c), allow_nan=False))["metrics"][-1]
    assert (content["metric"], content["unit"], content["paired"]["clusters"]) == (NAME[1], "window", 3)


def test_windows_of_other_tokens_or_without_a_finite_sum_are_left_out() -> None:
    a, b = rolling(PAGES), rolling({**PAGES, 0: [[-1.5, -2.0], [float("-inf")]], 1: [[-0.25], *PAGES[1][1:]]})
    c = compare(a, b)
    metric = c.metrics[-1]
    assert metric.left_out == 2 and metric.paired is not None and metric.paired.n == 4
    assert any("2 windows without a finite log-likelihood of the same tokens" in str(line) for line in report(c))
