"""compare: verdicts, causes, divergences, flips and the matrix, on runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.item_differences import logprob_change, ulps
from evalengine.report.compare.matrix import matrix, matrix_json, matrix_report, matrix_table, runs_table
from evalengine.report.compare.report import report, verdict
from evalengine.report.read.run import Run
from tests.report.compared_runs import BASE, BIT, IDENTITY, KEY, NEXT, TASK, TOKEN, run


def levels(c: Comparison) -> list[bool]:
    """Whether the runs agree in their bits, in their tokens and in their answers."""
    return [c.within("bitwise"), c.within("tokens"), c.within("answers")]


def test_equal_runs_are_identical() -> None:
    c = compare(run(BASE), run(BASE))
    assert (c.verdict, c.differences, c.flips, c.causes, c.a.digest == c.b.digest) == ("IDENTICAL", [], [], {}, True)
    assert levels(c) == [True, True, True]
    assert verdict(c) == "IDENTICAL (every bit of 3 outputs and their logprobs)"


def test_one_bit_of_one_logprob_is_found_and_measured() -> None:
    c = compare(run(BASE), run(BIT))
    assert c.verdict == "SAME TOKENS" and levels(c) == [False, True, True]
    assert [(d.key, d.kinds[0], d.cause) for d in c.differences] == [((TASK, 0, 0, 0), "logprobs", "unknown")]
    assert c.logprobs is not None and c.a.digest != c.b.digest
    assert (c.logprobs.compared, c.logprobs.differing, c.logprobs.max_ulps) == (3, 1, 1)
    assert c.logprobs.max_abs == abs(NEXT + 0.25) == c.logprobs.percentiles["p50"]
    assert verdict(c) == "SAME TOKENS (1 of 6 logprobs differ)"


def test_a_divergence_has_its_token_continuations_and_gap() -> None:
    c = compare(run(BASE), run(TOKEN, answers={0: "5"}))
    (d,) = c.divergences
    assert c.verdict == "DIFFERENT" and levels(c) == [False, False, True]
    assert (d.position, d.tokens_a, d.tokens_b, d.near_tie) == (2, [7], [3], True)
    assert (d.before, d.text_a, d.text_b) == ("t5 t6 t", "7", "3")
    assert d.gap == pytest.approx(0.03)
    assert c.logprobs is not None and (c.logprobs.compared, c.logprobs.differing) == (2, 0)  # these precede token 2


@pytest.mark.parametrize(
    ("logprob", "temperature", "expected"), [(-1.03, 0.0, True), (-1.06, 0.0, False), (-1.03, 0.7, None)]
)
def test_a_near_tie_is_a_small_gap_of_greedy_choices(logprob: float, temperature: float, expected: bool | None) -> None:
    tasks = {TASK: {**IDENTITY["tasks"][TASK], "generation": {"temperature": temperature}}}
    other = {**BASE, 0: ([5, 6, 3], [-0.5, -0.25, logprob])}
    (d,) = compare(run(BASE, tasks=tasks), run(other, tasks=tasks)).divergences
    assert d.near_tie is expected


def test_an_output_that_just_ends_has_no_gap() -> None:
    (d,) = compare(run(BASE), run({**BASE, 0: ([5, 6], [-0.5, -0.25])})).divergences
    assert (d.position, d.tokens_b, d.logprob_b, d.gap, d.near_tie) == (2, [], None, None, None)


def test_each_difference_has_its_cause() -> None:
    assert compare(run(BASE), run(BIT, numerics="fast")).causes == {"numerics level": 1}
    assert compare(run(BASE), run(BIT)).causes == {"unknown": 1}
    assert compare(run(BASE), run(BASE, asks={1: [9]})).causes == {"prompts": 1}
    scorer = compare(run(BASE), run(BASE, scores={2: 0.0}))
    assert scorer.causes == {"scorer": 1} and scorer.a.digest == scorer.b.digest
    assert scorer.verdict == "DIFFERENT" and levels(scorer) == [False, False, False]
    both = compare(run(BASE), run(TOKEN, scores={0: 0.0, 2: 0.0}))
    assert both.causes == {"unknown": 1, "scorer": 1}
    assert {flip.doc_id: flip.cause for flip in both.flips} == {0: "unknown", 2: "scorer"}


@pytest.mark.parametrize(("kind", "cause"), [("generate_until", "scorer"), ("loglikelihood", "numerics level")])
def test_logprobs_change_answers_only_where_given_texts_are_scored(kind: str, cause: str) -> None:
    """Where the tokens are equal, a generated answer can change only by how it was scored."""
    a, b = run(BASE, kind=kind), run(BIT, kind=kind, scores={0: 0.0}, answers={0: "[invalid]"}, numerics="fast")
    c = compare(a, b)
    assert [(flip.doc_id, flip.cause) for flip in c.flips] == [(0, cause)] and c.verdict == "DIFFERENT"
    assert c.causes == {"numerics level": 1} | ({"scorer": 1} if cause == "scorer" else {})


def test_results_of_equal_tokens_are_rescored_whatever_the_logprobs() -> None:
    other = (0.5, None)
    for kind, expected in (("generate_until", True), ("loglikelihood", False)):
        c = compare(run(BASE, kind=kind), replace(run(BIT, kind=kind), results={KEY: other}))
        assert c.rescored == expected and c.verdict == ("DIFFERENT" if expected else "SAME TOKENS")
    assert not compare(run(BASE), replace(run(TOKEN), results={KEY: other})).rescored
    group = ("a_group", *KEY[1:])  # a group's result is made of all tasks
    a = replace(run(BASE), results={group: (1.0, None)})
    assert compare(a, replace(run(BIT), results={group: other})).rescored
    assert not compare(a, replace(run(TOKEN), results={group: other})).rescored


def test_outputs_that_no_run_holds_leave_the_cause_unknown() -> None:
    """A baseline of an lm-eval folder has answers, and neither texts nor token ids."""
    a, b = as_lm_eval(run(BASE)), as_lm_eval(run(TOKEN, scores={0: 0.0}))
    a = replace(a, kind="baseline", items={key: replace(i, text=None) for key, i in a.items.items()})
    c = compare(a, b)
    assert [(flip.doc_id, flip.cause) for flip in c.flips] == [(0, "unknown")] and c.causes == {"unknown": 1}
    assert any(isinstance(line, str) and line.startswith("Cause: unknown (1): a run holds no") for line in report(c))


def test_results_aggregated_otherwise_are_different() -> None:
    a = run(BASE)
    b = replace(a, results={KEY: (0.5, None)})
    c = compare(a, b)
    assert c.rescored and c.causes == {"scorer": 1} and c.verdict == "DIFFERENT"
    assert not c.within("answers")
    assert not compare(a, replace(a, results={KEY: (1.0 + 2e-16, None)})).rescored


def test_flips_hold_answers_and_correctness() -> None:
    changed = {**TOKEN, 1: ([2, 9], [-0.125, -2.0])}
    c = compare(run(BASE, scores={1: 0.0}), run(changed, scores={0: 0.0, 1: 0.0}, answers={0: "3"}))
    assert [(f.doc_id, f.answer_a, f.answer_b, f.value_a, f.value_b) for f in c.flips] == [
        (0, "5", "3", 1.0, 0.0),
        (1, "8", "2", 0.0, 0.0),  # the answer is another one, as wrong as before
    ]
    (metric,) = c.metrics
    assert metric.paired is not None
    assert (metric.paired.wins, metric.paired.losses, metric.paired.ties) == (0, 1, 2)
    assert metric.paired.difference == pytest.approx(-1 / 3)


def test_documents_without_a_finite_score_are_counted() -> None:
    c = compare(run(BASE), run(TOKEN, scores={0: float("nan")}))
    (metric,) = c.metrics
    assert metric.left_out == 1 and metric.paired is not None and metric.paired.n == 2
    lines = [line for line in report(c) if isinstance(line, str) and "left out of the statistics" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "sums, exact_match, strict-match: 1 documents without a finite score"
    )


def test_log_likelihood_tasks_flip_by_score_not_by_the_last_digit() -> None:
    a = run(BASE, kind="loglikelihood", scores={0: 0.25})
    noise = run(BIT, kind="loglikelihood", scores={0: 0.2500001}, answers={0: "(-3.25, True)"})
    assert compare(a, noise).verdict == "SAME TOKENS"
    flipped = compare(a, run(BIT, kind="loglikelihood", scores={0: 0.25, 1: 0.0}))
    assert flipped.verdict == "DIFFERENT" and [f.doc_id for f in flipped.flips] == [1]


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (1.0, np.nextafter(np.float32(1), np.float32(2)), 1),
        (-1.0, np.nextafter(np.float32(-1), np.float32(0)), 1),
        (0.0, -0.0, 0),
        (np.float32(-1e-45), np.float32(1e-45), 2),  # the smallest of either sign have zero between them
        (1.0, 2.0, 2**23),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max, 2 * 0x7F7FFFFF),
    ],
)
def test_ulps_count_the_float32_steps_between_two_numbers(a: float, b: float, steps: int) -> None:
    left, right = np.array([a], dtype=np.float32), np.array([b], dtype=np.float32)
    assert ulps(left, right).tolist() == ulps(right, left).tolist() == [steps]


def test_nan_logprobs_are_counted_not_measured() -> None:
    a, b = (run({0: ([1, 2], [-1.0, x])}).items[TASK, 0, 0, 0] for x in (float("nan"), -1.0))
    change = logprob_change([(a, b)])
    assert change is not None and (change.differing, change.not_finite, change.max_abs) == (1, 1, 0.0)
    assert logprob_change([(a, a)]).differing == 0  # type: ignore[union-attr]


def test_runs_of_other_length_compare_on_what_they_share() -> None:
    c = compare(run(BASE), run({0: BASE[0], 1: BASE[1]}, limit=2))
    assert (c.verdict, c.common, c.only_a, c.only_b) == ("IDENTICAL", 2, 1, 0)
    assert "on the 2 requests of both" in verdict(c)


def as_lm_eval(r: Run) -> Run:
    """What an lm-eval folder tells of the same run."""
    bare = {"leaf": "", "prompt_sha256": "", "output_sha256": "", "output_ids": None, "logprobs": None}
    items = {key: replace(i, sum_logprob=None, **bare) for key, i in r.items.items()}  # type: ignore[arg-type]
    return replace(r, kind="lm-eval", digest=None, task_digests={}, manifest=Manifest({}), identity={}, items=items)


def test_lm_eval_folders_are_compared_by_text_and_never_called_identical() -> None:
    a = run(BASE)
    c = compare(a, as_lm_eval(a))
    assert c.verdict == "SAME TOKENS" and c.differences == [] and "no bits to compare" in verdict(c)
    assert any("no token ids" in line for line in c.unchecked)
    assert any("weights" in line for line in c.unchecked)
    other = compare(as_lm_eval(a), as_lm_eval(run(TOKEN)))
    assert other.verdict == "DIFFERENT" and [d.kinds[0] for d in other.differences] == ["output"]
    assert other.divergences == [] and other.logprobs is None


def test_the_table_of_runs_has_their_scores_and_short_digests() -> None:
    m = matrix([run(BASE), run(TOKEN, scores={0: 0.0})])
    assert ("100.0 %", "66.7 %") in [*zip(*runs_table(m.runs).rows, strict=True)]
    digests = [line for line in matrix_report(m) if isinstance(line, str) and "digest" in line]
    assert digests[0] == f"Run 1: digest {(m.runs[0].digest or '')[:12]}"


def test_a_matrix_groups_equal_digests() -> None:
    m = matrix([run(BASE), run(BIT), run(BASE), run({0: BASE[0]})])
    assert [members for _, members in m.groups()] == [[1, 3], [2], [4]]
    assert {pair: c.verdict for pair, c in m.pairs.items()} == {
        (1, 2): "SAME TOKENS",
        (1, 3): "IDENTICAL",
        (2, 3): "SAME TOKENS",
    }
    assert sorted(m.refused) == [(1, 4), (2, 4), (3, 4)] and not m.within("tokens")
    assert m.verdict == "SAME TOKENS where compared" and not m.whole
    assert matrix([run(BASE), run(BIT)]).within("tokens") and not matrix([run(BASE), run(BIT)]).within("bitwise")


def test_a_matrix_of_unlike_runs_says_what_was_left_out() -> None:
    short = run({0: BASE[0]}, limit=1)
    m = matrix([run(BASE), run(BASE), short], allow=True)
    why = ["sums: A has 3 requests, B 1, and they share 1 (limit is none in A and 1 in B)"]
    assert m.unlike == {(1, 3): why, (2, 3): why}
    lines = [line for line in matrix_report(m) if isinstance(line, str)]
    assert lines[2:6] == [
        "Runs 1 (A) and 3 (B) were compared although they are unlike:",
        f"  - {why[0]}",
        "Runs 2 (A) and 3 (B) were compared although they are unlike:",
        f"  - {why[0]}",
    ]
    evidence = "1 of 3 pairs identical, 2 identical on the requests that they share, 2 digests"
    assert lines[-1] == f"verdict: IDENTICAL where compared ({evidence})"
    cells = [cell for row in matrix_table(m).rows for cell in row]
    assert cells.count("IDENTICAL") == 2 and cells.count("IDENTICAL on 1/3") == 4
    content = matrix_json(m)
    assert content["verdict"] == "IDENTICAL where compared"
    assert [pair["unlike"] for pair in content["pairs"]] == [[], why, why]
    apart = matrix([run(BASE), run({0: TOKEN[0]}, limit=1)], allow=True)
    assert apart.verdict == "DIFFERENT"  # a shared request differs, whatever else the runs hold
    assert "DIFFERENT 1/1 on 1/3" in [cell for row in matrix_table(apart).rows for cell in row]


def resumed(kept: int, outputs: Any = BIT) -> Run:
    """A fast run that was resumed and kept so many requests."""
    return _recorded(run(outputs, numerics="fast"), numerics="fast", counts={"resumed_requests": kept})


def _recorded(base: Run, **changes: Any) -> Run:
    """The run with these changes of its manifest."""
    return replace(base, manifest=Manifest({**base.manifest.content, **changes}))


def test_a_fast_run_that_was_resumed_is_named_as_the_cause() -> None:
    whole = run(BASE, numerics="fast")
    c = compare(whole, resumed(2))
    sentence = "B was interrupted and resumed under fast numerics (2 of 3 requests resumed), so its batches"
    assert any(line.startswith(sentence) for line in c.settings) and c.causes == {"resumed": 1}
    assert any(sentence in line for line in report(c) if isinstance(line, str))
    assert not compare(whole, resumed(0)).settings and compare(whole, resumed(0)).causes == {"batches": 1}
    exact = _recorded(run(BIT), numerics="exact", counts={"resumed_requests": 2})
    assert not compare(run(BASE), exact).settings, "exact numerics do not depend on the batch"
    lines = [line for line in matrix_report(matrix([whole, resumed(2)])) if isinstance(line, str)]
    assert any("Run 2 was interrupted and resumed under fast numerics" in line for line in lines)
    assert matrix_json(matrix([whole, resumed(2)]))["runs"][1]["resumed_fast"] is True


def test_a_run_whose_files_are_not_bound_says_so() -> None:
    unlisted = {name: value for name, value in run(BASE).manifest.content.items() if name != "files"}
    old = replace(run(BASE), manifest=Manifest(unlisted))
    c = compare(run(BASE), old)
    assert any(note.startswith("B: its files are not bound") and "pass unseen" in note for note in c.unchecked)
    assert comparison_json(c)["runs"]["b"]["bound"] is False and comparison_json(c)["runs"]["a"]["bound"] is True
