"""The numbers behind a run's page, against SciPy, by hand, and on planted differences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from scipy import stats

from evalengine.errors import ConfigError
from evalengine.records.tokens import read_tokens, token_texts, tokens_json
from evalengine.report.compare.compare import compare
from evalengine.report.compare.sibling_runs import is_pair, sibling
from evalengine.report.html import samples
from evalengine.report.html.comparison_page import noise_floor
from evalengine.report.html.distributions import edges
from evalengine.report.html.parts import beginning
from evalengine.report.html.run_page import interval_note, run_page, write_run_report
from evalengine.report.html.samples import mark_title
from evalengine.report.read.documents import Bin, choices, expected_calibration_error, reliability, target_index
from evalengine.report.read.load import load_run, load_run_data
from evalengine.report.stats.metric_interval import mean_interval, wilson
from tests.report.page_content import embedded, nodes, words
from tests.report.written_run import Doc, write_choices, write_generations
from tests.run_double import bind_again


@pytest.mark.parametrize(("successes", "count"), [(0, 1), (1, 1), (0, 40), (40, 40), (7, 40), (1, 100_000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_wilson_is_scipys(successes: int, count: int, confidence: float) -> None:
    known = stats.binomtest(successes, count).proportion_ci(confidence, "wilson")
    assert wilson(successes, count, confidence) == pytest.approx((known.low, known.high), abs=1e-12)
    other = stats.binomtest(successes, count).proportion_ci(confidence, "exact")
    assert wilson(successes, count, confidence) != pytest.approx((other.low, other.high), abs=1e-12)


def test_the_interval_of_a_mean_is_wilsons_or_students() -> None:
    assert mean_interval([1.0] * 7 + [0.0] * 33) == wilson(7, 40)
    values = [0.5, 1.5, 2.25, 9.0]
    known = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx(known)
    assert mean_interval([*values, 9.5]) != pytest.approx(known)
    for unknowable in ([], [1.0], [2.0, 2.0], [1.0, math.nan], [1.0, math.inf]):
        assert mean_interval(unknowable) is None


def test_choices_by_hand(tmp_path: Path) -> None:
    sums = [[-1.0, -3.0], [-2.0, -2.0], [-9.0, -1.0], [-math.inf, -1.0]]
    data = load_run_data(write_choices(tmp_path / "run", sums, targets=[0, 1, 0, 1]))
    taken = choices(data, "pick")
    assert [(c.doc_id, c.chosen, c.correct, c.margin) for c in taken] == [
        (0, 0, True, 2.0),
        (1, 0, False, 0.0),
        (2, 1, False, -8.0),
    ]
    assert [c.confidence for c in taken] == pytest.approx([1 / (1 + math.exp(-2)), 0.5, 1 / (1 + math.exp(-8))])
    bins = reliability(taken)
    assert [(b.correct, b.count) for b in bins] == [(0, 1), (1, 1), (0, 1)]
    assert expected_calibration_error(bins) == pytest.approx(sum(abs(c.correct - c.confidence) for c in taken) / 3)
    assert expected_calibration_error([Bin(0.75, 3, 4), Bin(0.5, 1, 2)]) == 0
    assert expected_calibration_error([Bin(0.75, 1, 4)]) == 0.5


def test_choices_asked_twice_are_no_further_choices(tmp_path: Path) -> None:
    """lm-eval's acc_mutual_info asks each choice again without its context; a repeated request is the same choice."""
    data = load_run_data(write_choices(tmp_path / "run", [[-1.0, -3.0, -0.1, -0.2]], targets=[1]))
    assert len(list(samples._requests(data, "pick", 0, samples.Truncator(9, 99)))) == 4
    data.samples["pick"][0][0]["metrics"].append("acc_mutual_info")
    assert [r[2] for r in samples._requests(data, "pick", 0, samples.Truncator(9, 99))] == [-1.0, -3.0]
    requests = data.documents["pick", 0]
    data.documents["pick", 0] = [replace(item, repeat=n) for item in requests for n in (0, 1)]
    assert [(c.margin, c.confidence) for c in choices(data, "pick")] == [(-2.0, pytest.approx(1 / (1 + math.exp(-2))))]
    assert [r[2] for r in samples._requests(data, "pick", 0, samples.Truncator(9, 99))] == [-1.0, -3.0]


def test_the_right_choice_is_found_by_number_or_text() -> None:
    texts = [" red", " blue", " 7"]
    for target, place in (
        ("1", 1),
        ("blue", 1),
        (" blue ", 1),
        ("7", 2),
        ("9", None),
        ("green", None),
        ("", None),
        ("²", None),
        ("2", 2),
    ):
        assert target_index({"target": target}, texts) == place, target
    assert target_index({"target": "red"}, [" red", "red"]) is None, "two choices of one text"
    assert target_index({"target": "1"}, [" 1", " 3"]) is None, "the first by its text, the second by its number"
    assert target_index({"target": "1"}, [" 3", " 1"]) == 1


def test_tokens_keep_every_byte(tmp_path: Path) -> None:
    pieces = {0: b"na", 1: "ï".encode()[:1], 2: "ï".encode()[1:], 3: b"ve", 4: b"\xff", 5: "中".encode()}
    file = tmp_path / "tokens.json"
    assert read_tokens(file) == {}
    file.write_text(str(tokens_json(pieces)).replace("'", '"'), encoding="utf-8")
    assert read_tokens(file) == pieces
    assert token_texts([0, 1, 2, 3, 5], pieces) == ["na", "", "ï", "ve", "中"]
    assert token_texts([4, 0, 1], pieces) == ["\ufffd", "na", "\ufffd"]
    assert token_texts([9], pieces) == ["[9]"] and token_texts([], pieces) == []
    file.write_text('{"x": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokens\.json: damaged"):
        read_tokens(file)


def test_the_noise_floor_counts_what_was_planted(tmp_path: Path) -> None:
    documents = [Doc(f"out {n}", answer=str(n)) for n in range(6)]
    exact = write_generations(tmp_path / "exact", documents)
    assert sibling(load_run(exact)) is None
    write_generations(tmp_path / "exact2", documents)
    assert sibling(load_run(exact)) is None, "two invariant runs are no pair"
    changed = [*documents[:4], Doc("out 4", answer="x", score=0.0), Doc("other", answer="5")]
    fast = load_run(write_generations(tmp_path / "fast", changed, numerics="fast"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "digest.txt").write_text("x")
    invariant = load_run(exact)
    neighbour = sibling(invariant)
    assert neighbour is not None and neighbour.source.name == "fast" and is_pair(invariant, fast)
    for floor in (noise_floor(invariant, fast), noise_floor(fast, invariant)):
        assert (floor.common, len(floor.differences), floor.outputs, floor.changed, floor.documents) == (6, 1, 1, 1, 6)
        (metric,) = floor.metrics
        assert metric.paired is not None and (metric.paired.wins, metric.paired.losses, metric.paired.n) == (0, 1, 6)
        assert metric.difference == pytest.approx(-1 / 6), "fast less invariant, in whichever order they are given"
        assert floor.logprob_counts == (0, 5 * 5 + 1), "of equal requests too; the sixth shares its first token, o"
    moved = load_run(write_generations(tmp_path / "moved", documents, numerics="fast", shift=-0.5))
    assert (change := noise_floor(invariant, moved).logprobs) is not None
    assert change.max_abs == pytest.approx(0.5) and change.differing == change.compared == 30


def test_the_noise_floor_counts_choices_that_flip(tmp_path: Path) -> None:
    exact = load_run(write_choices(tmp_path / "exact", [[-1.0, -2.0], [-1.0, -2.0]], targets=[0, 0]))
    fast = load_run(write_choices(tmp_path / "fast", [[-1.0, -2.0], [-1.0, -0.5]], targets=[0, 0], numerics="fast"))
    floor = noise_floor(exact, fast)
    assert (floor.common, len(floor.differences), floor.outputs, floor.changed, floor.documents) == (4, 1, 0, 1, 2)
    assert floor.logprob_counts == (1, 4)
    assert floor.changed == len({flip.doc_id for flip in compare(exact, fast).flips})
    page = _page(exact.source)
    assert "25.0 % of 4 logprobs differ" in page and "Documents that changed" in page
    same = load_run(write_choices(tmp_path / "same", [[-1.0, -2.0], [-1.0, -2.0]], targets=[0, 0], numerics="fast"))
    assert (noise_floor(exact, same).changed, noise_floor(exact, same).logprob_counts) == (0, (0, 4))


def test_the_sibling_of_equal_settings_is_found_in_the_experiment(tmp_path: Path) -> None:
    documents = [Doc("a"), Doc("b")]
    folders = {}
    for place, (numerics, seqs) in enumerate([("exact", 1), ("exact", 8), ("fast", 1), ("fast", 8)], 1):
        folder = tmp_path / "sweep" / f"{place}-seqs_{seqs}" / "run"
        folders[numerics, seqs] = write_generations(folder, documents, numerics=numerics, shift=0.0)
        engine = json.loads((folder / "manifest.json").read_text())["engine"]
        bind_again(folder, engine={**engine, "max_num_seqs": seqs})
    for (numerics, seqs), folder in folders.items():
        neighbour = sibling(load_run(folder))
        assert neighbour is not None
        assert neighbour.source == folders["exact" if numerics == "fast" else "fast", seqs], "the one of equal settings"
    (folders["fast", 8] / "records.parquet").write_bytes(b"PAR1 no more")
    neighbour = sibling(load_run(folders["exact", 8]))
    assert neighbour is not None and neighbour.source == folders["fast", 1], "a damaged one is passed over"
    (tmp_path / "sweep" / "1-seqs_1").rename(tmp_path / "sweep" / "mine")
    assert sibling(load_run(tmp_path / "sweep" / "mine" / "run")) is None, "no folder of an experiment"


def test_unlike_runs_are_no_pair(tmp_path: Path) -> None:
    exact = write_generations(tmp_path / "exact", [Doc("a"), Doc("b")])
    write_generations(tmp_path / "fast", [Doc("a"), Doc("b", prompt="another question")], numerics="fast")
    assert not is_pair(load_run(exact), load_run(tmp_path / "fast"))
    assert sibling(load_run(exact)) is None


def test_a_damaged_neighbour_costs_its_section_only(tmp_path: Path) -> None:
    exact = write_generations(tmp_path / "exact", [Doc("a")])
    fast = write_generations(tmp_path / "fast", [Doc("b")], numerics="fast")
    assert "Noise floor" in _page(exact)
    (fast / "records.parquet").write_bytes(b"PAR1 no more")
    assert "Noise floor" not in _page(exact)


def test_a_manifest_that_lacks_a_part_is_said_and_makes_no_pair(tmp_path: Path) -> None:
    exact = write_generations(tmp_path / "exact", [Doc("a")])
    fast = write_generations(tmp_path / "fast", [Doc("b")], numerics="fast")
    bind_again(fast, counts=None)
    assert "Noise floor" not in _page(exact)
    with pytest.raises(
        ConfigError, match=r"manifest\.json: counts=None: must be a mapping of names to values.*; run its command again"
    ):
        write_run_report(fast)


def test_what_has_no_interval_says_why(tmp_path: Path) -> None:
    """One document, equal scores and a metric that is no mean have no interval; where all have one, no note stands."""
    alone = _page(write_generations(tmp_path / "alone", [Doc("a")]))
    assert "No interval for exact_match: one document says nothing of others." in alone
    assert "95 % interval" not in alone.partition("Samples")[0]
    alike = _page(write_generations(tmp_path / "alike", [Doc("a", score=0.5), Doc("b", score=0.5)]))
    assert "No interval for exact_match: all documents have the same number." in alike
    both = _page(write_generations(tmp_path / "both", [Doc("a"), Doc("b", score=0.0)]))
    assert "95 % interval" in both and "No interval" not in both
    data = load_run_data(tmp_path / "both")
    unrecorded = "the run does not record what each document adds"
    for kind, reason in ("loglikelihood_rolling", unrecorded), ("generate_until", "it is no mean of"):
        key = ("sums", "word_perplexity", "none")
        items = {k: replace(item, kind=kind) for k, item in data.run.items.items()}
        odd = replace(data, run=replace(data.run, items=items, scores={}, results={key: (20.0, None)}))
        assert f"No interval for word_perplexity: {reason}" in interval_note(odd, {key: False})


def test_pass_at_k_stands_beside_its_metric_with_its_own_interval(tmp_path: Path) -> None:
    data = load_run_data(write_generations(tmp_path / "run", [Doc("a"), Doc("b", score=0.5), Doc("c", score=0.0)]))
    items = {(*key[:2], n, n): replace(item, request_index=n, repeat=n) for key, item in data.run.items.items()
             for n in range(2)}  # fmt: skip
    page = run_page(replace(data, run=replace(data.run, items=items)))
    rows = next(nodes(page, is_="sheet"))["rows"]
    assert [words(row[0]) for row in rows] == ["exact_match", "pass@2"]
    low, high = wilson(2, 3)
    assert [words(cell) for cell in rows[1][1:3]] == ["0.6667", f"{low:.4f} to {high:.4f}"]
    titles = [column["title"] for column in embedded(page, "grid-samples")["columns"]]
    assert "exact_match" in titles and "pass@2" not in titles, "a sample's columns are its metrics"


def _page(folder: Path) -> str:
    """The text of the run's page."""
    return words(write_run_report(folder)[0])


def test_bins_are_whole_for_whole_numbers() -> None:
    assert edges([3, 3, 3], whole=True) == [2.5, 3.5]
    assert edges([0, 59], whole=True) == [-0.5 + 2 * i for i in range(31)]
    bounds = edges([0, 1000], whole=True)
    assert len(bounds) <= 31 and bounds[-1] > 1000 and {b - a for a, b in pairwise(bounds)} == {34}
    assert edges([2.5, 2.5], whole=False)[0] == 2.0 and edges([-1e38], whole=False)[0] < -1e38


def test_an_empty_output_costs_no_plot_and_odd_logprobs_are_said(tmp_path: Path) -> None:
    page = _page(write_generations(tmp_path / "run", [Doc("abc"), Doc("", score=0.0)]))
    assert "Mean logprob of an output's tokens" in page and "NaN or infinite" not in page
    page = _page(write_choices(tmp_path / "odd", [[-1.0, -2.0], [-math.inf, -1.0], [math.nan, -1.0]], [0, 1, 1]))
    assert "2 of 6 requests hold a logprob that is NaN or infinite" in page


def test_cells_have_less_room_where_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (beginning("abcd", 3), beginning("語語語", 8), beginning("ab", 9)) == ("abc", "語語", "ab")
    folder = write_generations(tmp_path / "run", [Doc("x", prompt="語" * 90, target="😀" * 90, answer="a" * 90)] * 2)
    for budget, (prompt, answer, target) in ((6_000_000, (90, 90, 90)), (240, (10, 40, 10))):
        monkeypatch.setattr(samples, "CELL_BYTES", budget)
        grid = embedded(write_run_report(folder)[0], "grid-samples")
        assert grid["rows"][1][1:4] == ["語" * prompt, "a" * answer, "😀" * target]


def test_metrics_have_the_columns_that_tell_them_apart(tmp_path: Path) -> None:
    for names, title in (
        ([("acc", "none"), ("acc_norm", "none")], "acc_norm"),
        ([("exact_match", "strict"), ("exact_match", "loose")], "loose"),
        ([("a", "x"), ("b", "y")], "b y"),
    ):
        keys = [("task", *name) for name in names]
        assert mark_title(keys, keys[-1]) == title
    text = run_page(load_run_data(write_generations(tmp_path / "run", [Doc("a"), Doc("b", score=0.5)]))).render()
    assert '"title":"exact_match","kind":"number"' in text, "a score of 0.5 is neither correct nor wrong"
    assert '"title":"Task"' not in text, "one task needs no column"
