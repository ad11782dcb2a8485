"""Models compared: which runs are models, how documents are paired, ranks, the family of tests, means by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.comparability import are_models
from evalengine.report.leaderboard.compose import Board, board
from evalengine.report.leaderboard.means import group
from evalengine.report.leaderboard.models import labels, steps
from evalengine.report.leaderboard.sheets import signed, verdict
from evalengine.report.read.run import Run
from evalengine.report.stats.metric_interval import wilson
from evalengine.report.stats.paired import paired
from evalengine.report.stats.pass_at_k import with_pass_at_k
from evalengine.report.stats.scores import Scores
from evalengine.report.stats.significance import holm
from evalengine.tasks.metric import pass_at_k
from tests.report.compared_runs import BASE, run
from tests.report.model_runs import model, rolling

GOOD, MIDDLE, BAD = [1.0] * 18 + [0.0] * 2, [1.0] * 9 + [0.0] * 11, [0.0] * 20


def three() -> Board:
    """The board of a bad, a good and a middling model."""
    return board([model(name, {"sums": values}) for name, values in (("bad", BAD), ("good", GOOD), ("mid", MIDDLE))])


# -- which runs are models ---------------------------------------------------------------------------------------------


def test_other_weights_make_models_and_nothing_else_does() -> None:
    a, b = run(BASE), run(BASE, weights="e" * 64)
    assert are_models([a, b]) and are_models([a, a, b])
    assert not are_models([a, run(BASE, dtype="float32", tokenizer={"sha256": "x"})])
    assert not are_models([a, run(BASE, weights=None)]), "not known to be another"


def test_lm_evals_models_are_told_by_name_and_commit() -> None:
    def foreign(**identity: object) -> Run:
        return replace(run(BASE), kind="lm-eval", digest=None, identity=dict(identity))

    a = foreign(model_args="pretrained=org/a,dtype=float32", model_sha="1")
    assert are_models([a, foreign(model_args={"pretrained": "org/b", "dtype": "float32"})])
    assert are_models([a, foreign(model_args="pretrained=org/a", model_sha="2")])
    assert not are_models([a, foreign(model_args="pretrained=org/a,dtype=bfloat16", model_sha="1")])
    assert not are_models([a, run(BASE, weights="e" * 64)]), "ours beside lm-eval's: neither holds what the other does"
    assert labels([a, foreign(model_args={"pretrained": "org/b"})]) == ["a", "b"]


def test_names_differ_whatever_the_models_are_called() -> None:
    def named(source: str, run_id: str) -> Run:
        return replace(run(BASE), manifest=Manifest({"model": {"name": "m", "source": source}, "run_id": run_id}))

    assert labels([named("out/step-1/m", "x"), named("out/step-2/m", "y")]) == ["m (step-1)", "m (step-2)"]
    assert labels([named("m", "x"), named("m", "y")]) == ["m (x)", "m (y)"]
    assert labels([named("m", "x"), named("m", "x")]) == ["m (x)", "m (x) #2"]


def test_steps_are_read_from_names() -> None:
    runs = [model(name, {"sums": GOOD}) for name in ("a-step-500", "a-step2k", "a-checkpoint_010000")]
    assert steps(runs, labels(runs)) == [500, 2000, 10000]
    assert steps(runs[:2], ["first", "second"]) == [500, 2000], "of the paths, where the names hold none"
    assert steps([*runs, model("final", {"sums": GOOD})], [*labels(runs), "final"]) is None
    assert steps([runs[0], runs[0]], ["a", "b"]) is None, "two of one step are no history"


# -- values, ranks and tests -------------------------------------------------------------------------------------------


def test_values_intervals_ranks_and_the_family() -> None:
    table = three()
    (row,) = table.contests
    assert table.names == ["bad", "good", "mid"] and row.share and row.documents == 20 and not table.notes
    assert [score and score.value for score in row.scores] == [0.0, 0.9, 0.45]
    assert [score and score.interval for score in row.scores] == [wilson(n, 20) for n in (0, 18, 9)]
    assert [score and score.ranks for score in row.scores] == [(3, 3), (1, 1), (2, 2)]
    known = [paired(x, y) for x, y in ((BAD, GOOD), (BAD, MIDDLE), (GOOD, MIDDLE))]
    assert [test.result for test in row.tests] == known
    assert [test.p_adjusted for test in row.tests] == holm([result.p_value for result in known])
    assert [test.p_adjusted for test in row.tests] != [result.p_value for result in known]
    assert known[2].p_value == pytest.approx(stats.binomtest(0, 9).pvalue)


def test_wrong_answers_that_all_changed_are_counted() -> None:
    """150 of 200 answers, wrong in both, are others: equal scores hide it."""
    values = {"sums": [1.0] * 50 + [0.0] * 150}
    answers = [{("sums", "none"): {n: f"{n}{word if n >= 50 else ''}" for n in range(200)}} for word in ("x", "y")]
    changed = board([replace(model(name, values), answers=own) for name, own in zip("ab", answers, strict=True)])
    (test,) = changed.contests[0].tests
    assert (test.changed, test.result.wins, test.result.losses) == (150, 0, 0)
    assert "150 of 200 answers changed" in verdict(changed)
    same = board([replace(model(name, values), answers=answers[0]) for name in "ab"])
    assert "0 of 200 answers changed" in verdict(same)
    assert "answers changed" not in verdict(board([model(name, values) for name in "ab"])), "no run holds any"


def test_documents_are_paired_by_their_hashes_in_any_order() -> None:
    docs = [f"d{n}" for n in range(20)]
    order = np.random.default_rng(1).permutation(20).tolist()
    a, b = model("a", {"t": GOOD}), model("b", {"t": MIDDLE})
    mixed = model("b", {"t": [MIDDLE[n] for n in order]}, docs={"t": [docs[n] for n in order]})
    straight, crossed = board([a, b]), board([a, mixed])
    assert [t.result for t in crossed.contests[0].tests] == [t.result for t in straight.contests[0].tests]
    assert not crossed.notes, "what differs by number is the same by hash"
    wrong = board([a, model("b", {"t": [MIDDLE[n] for n in order]})])
    assert wrong.contests[0].tests[0].result != straight.contests[0].tests[0].result


def test_only_shared_documents_are_compared_and_it_is_said() -> None:
    a, b = model("a", {"t": GOOD}), model("b", {"t": [0.0] * 10})
    table = board([a, b])
    (row,) = table.contests
    assert row.documents == 10 and [s and s.value for s in row.scores] == [1.0, 0.0]
    assert table.notes == ["t: values, ranks and tests are over the 10 documents that every run holds; the runs have a "
                           "20, b 10"]  # fmt: skip
    twice = model("a", {"t": [1.0, 0.0, 1.0]}, docs={"t": ["x", "x", "y"]})
    again = model("b", {"t": [0.0, 1.0, 1.0]}, docs={"t": ["y", "x", "x"]})
    (test,) = board([twice, again]).contests[0].tests
    assert (test.result.wins, test.result.losses, test.result.n) == (1, 1, 3), "the second of two equal documents"


def test_documents_that_cannot_be_paired_are_neither_ranked_nor_tested() -> None:
    bare = replace(model("b", {"t": BAD}), hashes={}, kind="baseline")
    table = board([model("a", {"t": GOOD}), bare])
    (row,) = table.contests
    assert [s and s.value for s in row.scores] == [0.9, 0.0] and not row.tests and table.family == 0
    assert [s and s.ranks for s in row.scores] == [None, None] and "cannot be paired" in table.notes[0]
    same = {"datasets": {"t": {"sha256": "d" * 64}}}
    a = model("a", {"t": GOOD}, **same)
    table = board([a, replace(bare, identity={**bare.identity, **same})])
    assert table.family == 1 and "paired by number" in table.notes[0]


def test_nothing_in_common_is_refused_and_a_missing_task_is_said() -> None:
    with pytest.raises(ConfigError, match="no task in common: a ran t; b ran u"):
        board([model("a", {"t": GOOD}), model("b", {"u": GOOD})])
    table = board([model("a", {"t": GOOD, "u": GOOD}), model("b", {"t": MIDDLE})])
    assert "u: b did not run it" in table.notes and table.contests[1].scores[1] is None and not table.contests[1].tests
    apart = board([model("a", {"t": GOOD}), model("b", {"t": BAD}, docs={"t": [f"e{n}" for n in range(20)]})])
    assert apart.family == 0 and "share no document" in apart.notes[0]


def test_other_prompts_are_said_and_compared() -> None:
    table = board([model("a", {"t": GOOD}), model("b", {"t": MIDDLE}, prompts="<chat>", apply_chat_template=True)])
    assert table.family == 1
    (note,) = [note for note in table.notes if "prompts differ" in note]
    assert note.startswith("a (A) and b (B): t: 20 of 20 prompts differ") and "apply_chat_template" in note
    assert not [note for note in table.notes if "weights" in note], "that models differ is no news"


def test_other_tokens_of_the_same_prompts_are_no_other_prompts() -> None:
    a, b = (model(name, {"t": GOOD}) for name in "ab")
    a, b = (replace(r, items={k: replace(i, prompt_sha256=r.name) for k, i in r.items.items()}) for r in (a, b))
    assert not board([a, b]).notes


def test_perplexities_are_tested_by_their_documents_log_likelihoods() -> None:
    draw = np.random.default_rng(0)
    sums = [[float(v) for v in draw.normal(-50, 5, 3)] for _ in range(12)]
    closer = [[v + 1.0 for v in doc[:2]] + [doc[2]] for doc in sums]
    table = board([rolling("a", sums, 20.0), rolling("b", closer, 18.0)])
    word, bits = table.contests
    (test,) = word.tests
    assert test.nats and word.wins(test) and not bits.tests and table.family == 1
    assert test.result == paired(*([math.fsum(d) for d in x] for x in (sums, closer)), unbounded=True)
    assert [s and s.ranks for s in (*word.scores, *bits.scores)] == [(2, 2), (1, 1)] * 2, "one test ranks both"
    assert [s and s.interval for s in word.scores] == [None, None]
    assert any(note.startswith("no interval for pages word_perplexity, pages bits_per_byte") for note in table.notes)
    one_page = board([rolling("a", sums[:1], 20.0), rolling("b", closer[:1], 18.0)])
    assert one_page.family == 0


def test_a_result_that_is_no_mean_has_no_interval_and_no_test() -> None:
    a, b = (model(name, {"t": values}, metric="mcc") for name, values in (("a", GOOD), ("b", BAD)))
    b = replace(b, results={("t", "mcc", "none"): (0.31, None)})
    a = replace(a, results={("t", "mcc", "none"): (0.52, None)})
    table = board([a, b])
    (row,) = table.contests
    assert [s and (s.value, s.interval, s.ranks) for s in row.scores] == [(0.52, None, None), (0.31, None, None)]
    assert not row.tests and any("no interval for t mcc" in note for note in table.notes)


def test_a_score_that_is_not_finite_is_neither_ranked_nor_tested() -> None:
    (row,) = board([model("a", {"t": GOOD}), model("b", {"t": [*BAD[:-1], math.nan]}), model("c", {"t": BAD})]).contests
    assert [s and s.ranks for s in row.scores] == [(1, 1), None, (2, 2)] and [(t.a, t.b) for t in row.tests] == [(1, 3)]


def test_related_documents_are_counted_as_clusters() -> None:
    """Ten documents of two passages count as two."""
    a, b = model("a", {"t": [1.0] * 10, "u": GOOD}), model("b", {"t": [0.0] * 5 + [1.0] * 5, "u": MIDDLE})
    names = {"t": {doc: f"passage {doc // 5}" for doc in range(10)}}
    plain, clustered = board([a, b]), board([replace(a, clusters=names), b])
    assert [table.contests[0].tests[0].result.clusters for table in (plain, clustered)] == [10, 2]
    assert clustered.contests[0].tests[0].result.p_value == 1.0 > plain.contests[0].tests[0].result.p_value
    assert [mean.tests[0].result.clusters for mean in clustered.groups[0].means] == [22, 22]
    widths = [score.interval[1] - score.interval[0] for table in (plain, clustered)
              if (score := table.contests[0].scores[1]) and score.interval]  # fmt: skip
    assert widths[0] < widths[1]


# -- means -------------------------------------------------------------------------------------------------------------


def test_the_average_of_tasks_by_hand() -> None:
    a = model("a", {"t": [1.0, 1.0, 0.0, 0.0], "u": [1.0] * 8, "v": [0.0, 0.0]})
    b = model("b", {"t": [1.0, 0.0, 0.0, 0.0], "u": [1.0] * 4 + [0.0] * 4, "v": [1.0, 0.0]})
    table = board([a, b])
    (group,) = table.groups
    macro, micro = group.means
    assert group.name == "average of 3 tasks" and (macro.mean, micro.mean) == ("macro", "micro")
    assert [s and s.value for s in macro.scores] == pytest.approx([(0.5 + 1 + 0) / 3, (0.25 + 0.5 + 0.5) / 3])
    assert [s and s.value for s in micro.scores] == pytest.approx([10 / 14, 6 / 14])
    for mean in (macro, micro):
        (test,) = mean.tests
        assert test.result.difference == pytest.approx(mean.scores[1].value - mean.scores[0].value)  # type: ignore[union-attr]
    bounds = [wilson(2, 4), wilson(8, 8), wilson(0, 2)]
    low = 0.5 - math.sqrt(sum((p - interval[0]) ** 2 for p, interval in zip((0.5, 1, 0), bounds, strict=True))) / 3
    assert macro.scores[0] is not None and macro.scores[0].interval is not None
    assert macro.scores[0].interval[0] == pytest.approx(low)
    assert table.family == 3 + 2, "three tasks and two means; the parts of a mean are not tested a second time"


def test_of_many_tasks_the_averages_are_tested() -> None:
    """MMLU has 57 tasks: with a test each, the correction would hide what their mean shows."""
    tasks = {f"mmlu_{n}": GOOD for n in range(11)}
    table = board([model("a", tasks), model("b", dict.fromkeys(tasks, MIDDLE))])
    (group,) = table.groups
    assert not table.contests and table.family == 1 and len(group.parts) == 11
    few = board([model("a", {"t": GOOD, "u": GOOD}), model("b", {"t": BAD, "u": GOOD})])
    assert len(few.contests) == 2 and few.family == 3
    mixed = [replace(ran, results={**ran.results, ("pages", "ppl", "none"): (9.0, None)},
                     hashes={**ran.hashes, "pages": {0: ("d", "p", "t")}}) for ran in table.runs]  # fmt: skip
    assert [row.key[0] for row in board(mixed).contests] == ["pages"], "what is in no average stays by itself"


def test_parts_of_one_size_have_one_mean() -> None:
    table = board([model(name, {"t": values, "u": values}) for name, values in (("a", GOOD), ("b", MIDDLE))])
    (mean,) = table.groups[0].means
    assert mean.mean == "macro" and mean.tests[0].result.test == "mcnemar-exact", "weights of one keep 0/1 scores"


def test_the_macro_means_interval_covers() -> None:
    """Five tasks of unlike sizes and rates: the interval holds the true macro mean about 95 times in 100."""
    draw = np.random.default_rng(7)
    rates, sizes = (0.02, 0.3, 0.5, 0.9, 0.99), (20, 30, 60, 100, 200)
    hits = 0
    for _ in range(400):
        tasks = {f"t{n}": (draw.random(size) < rate).astype(float).tolist()
                 for n, (rate, size) in enumerate(zip(rates, sizes, strict=True))}  # fmt: skip
        parts = {task: Scores((task, "acc", "none"), {0: values}, True) for task, values in tasks.items()}
        score = group("all", parts, 1).means[0].scores[0]
        assert score is not None and score.interval is not None
        hits += score.interval[0] <= sum(rates) / 5 <= score.interval[1]
    assert 0.92 <= hits / 400 <= 0.99


# -- pass@k ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(n: int) -> None:
    for correct in range(n + 1):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_has_values_and_an_interval_of_its_own() -> None:
    scores = [0.0, 0.25, 0.5, 1.0, 0.75]
    sampled = model("a", {"t": scores})
    items = {("t", doc, repeat, repeat): replace(item, request_index=repeat, repeat=repeat)
             for (_, doc, _, _), item in sampled.items.items() for repeat in range(4)}  # fmt: skip
    added = with_pass_at_k(replace(sampled, items=items))
    assert [key[1] for key in added.results] == ["acc", "pass@2", "pass@4"]
    assert added.scores["t", "pass@4", "none"] == {0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert added.results["t", "pass@2", "none"][0] == pytest.approx((0 + 0.5 + 5 / 6 + 1 + 1) / 5)
    other = replace(added, identity={**added.identity, "weights": "x" * 64})
    cells = [row.scores[0] for row in board([added, other], ["a", "b"]).contests]
    assert [cell and cell.interval for cell in cells][2] == wilson(4, 5)
    assert len({cell and cell.interval for cell in cells}) == 3
    named = replace(sampled, items=items, results={**sampled.results, ("t", "em pass@4", "none"): (0.5, None)})
    assert with_pass_at_k(named).results == named.results, "the task has reported it, for each of its metrics"
    assert with_pass_at_k(sampled).results == sampled.results, "one sample a document has no pass@k"
    odd = replace(added, scores={("t", "acc", "none"): {**dict(enumerate(scores)), 0: 0.3}}, results=sampled.results)
    assert with_pass_at_k(odd).results == sampled.results, "no mean of rights and wrongs"
    assert with_pass_at_k(replace(added, kind="lm-eval", results=sampled.results)).results == sampled.results


def test_numbers_are_said_for_readers() -> None:
    cases = [(0.0, False, "0.0000"), (-0.00001, False, "0.0000"), (-1.5, False, "-1.5000"), (4.0e11, False, "4e+11"),
            (math.nan, False, "unknown"), (-math.inf, False, "unbounded"), (0.7704, True, "77.0"),
            (-0.0001, True, "0.0")]  # fmt: skip
    assert [signed(value, share, sign=False) for value, share, _ in cases] == [text for *_, text in cases]
    assert signed(0.065, True) == "+6.5" and signed(-0.065, True) == "-6.5" and signed(0.0, True) == "0.0"
