"""What differs between two runs, counted and said: near-ties, kinds of difference, NaN, p-values, words."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import LEVELS, Comparison, compare
from evalengine.report.compare.item_differences import NEAR_TIE, TIE_CEILING, logprob_change
from evalengine.report.compare.matrix import matrix
from evalengine.report.compare.report import report, value_text, verdict
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.read.lm_eval import ROLLING
from evalengine.report.read.run import Run
from evalengine.util.sheet import Sheet
from tests.report.compared_runs import BASE, BIT, FILTER, KEY, TASK, TOKEN, run


def test_the_ceiling_of_a_near_tie_is_where_two_candidates_fill_the_distribution() -> None:
    """p + p exp(-e) = 1. No distribution has two candidates within e of each other and one of them above it."""
    likelier = math.exp(TIE_CEILING)
    assert likelier * (1 + math.exp(-NEAR_TIE)) == pytest.approx(1, rel=1e-15)
    assert pytest.approx(-0.668, abs=5e-4) == TIE_CEILING
    draw = np.random.default_rng(0)
    for temperature in (0.01, 0.1, 1.0, 3.0):
        logits = draw.standard_normal((20_000, 3)) / temperature
        logprobs = np.sort(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), axis=1)
        tied = logprobs[:, -1] - logprobs[:, -2] <= NEAR_TIE
        assert not tied.any() or logprobs[tied, -1].max() <= TIE_CEILING


@pytest.mark.parametrize(
    ("a", "b", "possible"),
    [
        (-0.0004, -0.0005, False),  # both tokens are decisive: the runner-up is 7.8 nats away
        (-0.65, -0.66, False),
        (-0.66, -0.7, False),  # one of the tokens is decisive enough
        (-0.67, -0.7, True),
        (-1.0, -1.06, False),  # the logprobs are too far apart
    ],
)
def test_a_likely_token_has_no_rival_nearby(a: float, b: float, possible: bool) -> None:
    runs = [run({0: ([1, token], [-0.5, logprob])}) for token, logprob in ((2, a), (3, b))]
    c = compare(*runs)
    (d,) = c.divergences
    assert d.near_tie is possible
    (line,) = [line for line in report(c) if isinstance(line, str) and "near-tie" in line]
    assert line.startswith(f"{int(possible)} of 1 diverging outputs may have diverged at a near-tie")
    table = next(t for t in report(c) if isinstance(t, Sheet) and t.head[0] == "Item")
    cells = [*zip(*table.rows, strict=True)]
    assert cells[-3] == (f"{a:.4f}", f"{b:.4f}") and cells[-1][0] == ("possible" if possible else "no")


def test_a_token_that_processors_chose_is_not_judged() -> None:
    """A repetition penalty chooses by other numbers than the logprobs of the records."""
    runs = [run({0: ([1, token], [-0.5, -1.0])}) for token in (2, 3)]
    penalised = [replace(r, manifest=Manifest({"model": {"processors": {"repetition_penalty": 1.1}}})) for r in runs]
    assert compare(*runs).divergences[0].near_tie is True
    assert compare(*penalised).divergences[0].near_tie is None


def other_prompts(count: int, differing: int) -> tuple[Run, Run]:
    """Two runs of `count` requests, all with other prompts; `differing` outputs differ, each in its last token."""
    outputs = {doc: ([1, 2], [-0.5, -0.5]) for doc in range(count)}
    others = {doc: ([1, 3 if doc < differing else 2], [-0.5, -0.25]) for doc in range(count)}
    return run(outputs), run(others, asks={doc: [doc, 9] for doc in range(count)})


def test_every_kind_of_difference_is_counted() -> None:
    c = compare(*other_prompts(16, 11))
    assert c.verdict == "DIFFERENT" and c.outputs == 11 and {d.kinds[0] for d in c.differences} == {"prompt"}
    counts = {"document": 0, "prompt": 16, "output": 11, "logprobs": 5, "text": 0, "score": 0, "answer": 0}
    assert c.kinds == {**counts, "missing": 0}  # the 5 equal outputs differ in their second logprob
    assert verdict(c) == "DIFFERENT (16 of 16 prompts and 11 of 16 outputs differ; no answer changed)"
    lines = [line for line in report(c) if isinstance(line, str)]
    assert "16 of 16 requests differ: 16 in prompt, 11 in output, 5 in logprobs." in lines
    content = comparison_json(c)
    assert content["differing_in"] == c.kinds and content["differences"][0]["in"] == ["prompt", "output"]
    assert len(c.divergences) == 11 and {d.near_tie for d in c.divergences} == {None}
    assert c.logprobs is None, "logprobs after unlike prompts are not comparable"


def test_missing_requests_and_scores_are_counted() -> None:
    c = compare(run(BASE), run({0: TOKEN[0]}, scores={0: 0.0}, limit=1))
    assert (c.kinds["output"], c.kinds["score"], c.kinds["missing"]) == (1, 1, 2)


def test_another_text_for_the_same_tokens_is_a_difference() -> None:
    b = run(BASE)
    items = {key: replace(i, text="decoded otherwise") if key[1] == 1 else i for key, i in b.items.items()}
    c = compare(run(BASE), replace(b, items=items))
    assert [(d.key[1], d.kinds) for d in c.differences] == [(1, ("text",))]
    assert c.verdict == "SAME TOKENS" and [c.within(level) for level in LEVELS] == [False, True, True]
    assert verdict(c) == "SAME TOKENS (1 texts of the same tokens differ)"


def nan_runs(*values: float) -> list[Run]:
    """Runs of one document, with each of the values as its second logprob."""
    return [run({0: ([1, 2], [-1.0, value])}) for value in values]


def test_nan_against_a_number_is_a_difference_that_is_shown_as_such() -> None:
    c = compare(*nan_runs(-1.0, float("nan")))
    assert c.verdict == "SAME TOKENS" and c.logprobs is not None
    assert (c.logprobs.differing, c.logprobs.not_finite, c.logprobs.largest) == (1, 1, "NaN or infinite in 1")
    assert any("1 of the 1 logprobs that differ have no distance" in str(line) for line in report(c))
    assert "1 of 2 logprobs differ, in requests that differ. Largest |Δ logprob|: NaN or infinite in 1." in [*report(c)]
    assert not any(isinstance(line, Sheet) and line.title == "Logprobs" for line in report(c)), "no distance, no table"
    page = comparison_page(c).render()
    assert "Largest |Δ logprob|: NaN or infinite in 1." in page and "have no distance" in page
    content = comparison_json(c)["logprobs"]
    assert (content["differing"], content["not_finite"], content["max_abs"]) == (1, 1, None)
    some = compare(*(run({0: ([1, 2], values)}) for values in ([-1.0, -1.0], [-1.5, float("inf")])))
    assert some.logprobs is not None and some.logprobs.largest == "NaN or infinite in 1, else 0.5 nat"


def test_nan_is_no_change_of_0_in_a_sweep_either() -> None:
    a, b = nan_runs(-1.0, float("nan"))
    assert compare(a, b).largest == "NaN or infinite in 1" and compare(a, a).largest == "0 nat"
    page = matrix_page(matrix([a, b])).render()
    assert "NaN or infinite in 1" in page and '<td class="number">0 nat</td>' not in page


def test_nan_equals_nan_whatever_its_bits() -> None:
    a, b = nan_runs(float("nan"), float("nan"))
    assert compare(a, b).verdict == "IDENTICAL"
    odd = np.array([0xBF800000, 0x7FC00001], dtype=np.uint32).view(np.float32)
    (key, x), change = next(iter(a.items.items())), logprob_change
    measured = change([(x, replace(x, logprobs=odd))])
    assert measured is not None and measured.differing == 0
    bare = {"leaf": "", "logprobs": None, "output_ids": None}
    sums = [replace(r, items={key: replace(r.items[key], **bare)}, digest=None) for r in (a, b)]  # type: ignore[arg-type]
    assert compare(*sums).differences == []
    (number,) = nan_runs(-1.0)
    other = replace(number, items={key: replace(number.items[key], **bare)}, digest=None)  # type: ignore[arg-type]
    assert [d.kinds for d in compare(sums[0], other).differences] == [("logprobs",)]


def test_the_terminal_shows_no_ulps_no_infinities_and_no_negative_zero() -> None:
    one = {0: ([1], [-1.0])}
    a = replace(run(one, kind="loglikelihood"), scores={}, results={KEY: (0.5, None)})
    pages = [replace(a, items={k: replace(i, kind=ROLLING) for k, i in a.items.items()})] * 2
    b = replace(pages[1], results={KEY: (0.5 - 1e-9, None)})
    shown = _printed(compare(pages[0], b)) + _printed(compare(run(BASE), run(BIT)))
    assert "ulp" not in shown and "-0.0000" not in shown
    assert re.search(r"\b(inf|nan)\b", shown) is None
    assert f"digest {run(BASE).digest}"[:19] + "...)" in shown and str(run(BASE).digest) not in shown


@pytest.mark.parametrize(
    ("number", "sign", "text"),
    [(0.77, "", "0.7700"), (-1e-9, "+", "0.0000"), (122352891515.7528, "", "1.22353e+11"), (math.inf, "", "∞")],
)
def test_values_are_short_whatever_their_size(number: float, sign: str, text: str) -> None:
    assert value_text(number, sign) == text and value_text(math.nan) == "NaN"


def _printed(c: Comparison) -> str:
    """The report's text, its tables cell by cell."""
    lines = [line if isinstance(line, str) else " ".join(map(str, _cells(line))) for line in report(c)]
    return "\n".join(lines)


def _cells(table: Sheet) -> list[str]:
    return [cell for row in table.rows for cell in row]


def test_both_p_values_are_given_and_named() -> None:
    """Two metrics of the same documents: each p by itself, and Holm's over the two."""
    more = (TASK, "other", FILTER)
    docs = range(12)
    a = run({doc: ([doc + 1], [-0.5]) for doc in docs})
    b = run({doc: ([doc + 1], [-0.25]) for doc in docs}, scores=dict.fromkeys(range(6), 0.0))
    rival = {doc: 1.0 - (doc < 4) for doc in docs}
    runs = [
        replace(r, scores={**r.scores, more: s}, results={**r.results, more: (float(np.mean([*s.values()])), None)})
        for r, s in ((a, dict.fromkeys(docs, 1.0)), (b, rival))
    ]
    c = compare(*runs)
    assert [m.paired.p_value for m in c.metrics if m.paired] == [2 * 0.5**6, 2 * 0.5**4]
    assert [m.p_holm for m in c.metrics] == [2 * 2 * 0.5**6, 2 * 0.5**4]  # Holm doubles the smaller, keeps the larger
    table = [t for t in report(c) if isinstance(t, Sheet)][-1]
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=True))
    assert columns["p"] == ("0.031", "0.12") and columns["p (Holm)"] == ("0.062", "0.12")
    assert any("p (Holm): adjusted for the 2 tests of this comparison" in str(line) for line in report(c))
    assert [m["p_holm"] for m in comparison_json(c)["metrics"]] == [0.0625, 0.125]
    assert "p (Holm)" in comparison_page(c).render()
