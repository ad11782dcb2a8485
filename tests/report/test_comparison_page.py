"""What the comparison's pages hold: rows, texts where outputs diverge, sizes, and the command's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.__main__ import main
from evalengine.records.manifest_data import Manifest
from evalengine.report.cli import compare as compare_cli
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.matrix import matrix
from evalengine.report.html import differences
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.differences import ITEM_BYTES, TEXT_BYTES
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.page import BLOCK, Page
from evalengine.report.read.run import Run
from tests.report.compared_runs import BASE, BIT, FILTER, TASK, TOKEN, run
from tests.report.page_content import content, embedded, nodes, words


def with_texts(base: Run, **texts: str | None) -> Run:
    """The run with other output texts; names are d0, d1, ..."""
    items = {k: replace(i, text=texts.get(f"d{i.doc_id}", i.text)) for k, i in base.items.items()}
    return replace(base, items=items)


@pytest.mark.parametrize(
    ("other", "verdict", "mood"),
    [(BASE, "IDENTICAL", True), (BIT, "SAME TOKENS", None), (TOKEN, "DIFFERENT", None)],
)
def test_the_verdict_comes_first(other: Any, verdict: str, mood: bool | None) -> None:
    page = comparison_page(compare(run(BASE), run(other)))
    lead = content(page)["lead"][0]
    assert lead["good"] is mood and lead["word"].endswith(".") and lead["sentence"].startswith(verdict)
    assert words(page).index(verdict) < words(page).index("Requests compared")


def test_a_flip_shows_answers_scores_and_where_the_outputs_part() -> None:
    b = with_texts(run(TOKEN, answers={0: "7"}, scores={0: 0.0}), d0="t5 t6 other")
    page = comparison_page(compare(run(BASE, answers={0: "6"}), b))
    (row,) = embedded(page, "grid-flips")["rows"]
    assert row == ["0", "6", "7", "1 → 0", False, 2, True, "unknown"]
    (row,) = embedded(page, "grid-outputs")["rows"]
    assert row[:4] == ["0", 2, "t7", "other"] and row[4] == pytest.approx(0.03) and row[5:] == [True, False, "unknown"]
    assert embedded(page, "map")["rows"][0] == ["sums doc 0", 3, 2, 2, 0]  # the map's line opens that row
    assert embedded(page, "map")["rows"][1] == ["sums doc 1", 2, None, None, None]


def test_columns_that_say_nothing_are_left_out() -> None:
    a = run(BASE, kind="loglikelihood")
    c = compare(a, run(BIT, kind="loglikelihood", scores={0: 0.0}))
    content = embedded(comparison_page(c), "grid-flips")
    assert [column["title"] for column in content["columns"]] == [
        *("Doc", "Answer A", "Answer B", "Score", "Change", "Cause"),
    ]
    assert content["rows"] == [["0", "5", "5", "1 → 0", False, "unknown"]]


def test_an_identical_comparison_has_no_flips_and_no_map() -> None:
    page = comparison_page(compare(run(BASE), run(BASE)))
    assert content(page)["data"] == {}
    assert "have the same requests and the same model" in words(page) and "configuration" not in words(page)


def test_findings_and_causes_are_said() -> None:
    c = compare(run(BASE, numerics="exact"), run(BIT, numerics="fast", weights="e" * 64))
    text = words(comparison_page(c))
    assert "Compared although they are unlike" in text and "The model weights differ" in text
    assert 'numerics is "exact" in A and "fast" in B' in text
    assert "weights or numerics level 1 1 in logprobs The model weights differ (weights is aaaaaaaaaaaa" in text
    assert "engine.max_num_seqs" not in text
    other = replace(run(BIT), manifest=Manifest({"engine": {"max_num_seqs": None}}))
    assert "engine.max_num_seqs is 8 in A and none in B" in words(comparison_page(compare(run(BASE), other)))


def test_outputs_without_tokens_part_by_their_texts() -> None:
    """lm-eval's folders hold no token to name, but both texts."""

    def bare(base: Run) -> Run:
        items = {
            k: replace(i, output_ids=None, logprobs=None, output_sha256="", leaf="") for k, i in base.items.items()
        }
        return replace(base, kind="lm-eval", digest=None, items=items)

    a, b = bare(with_texts(run(BASE), d1="so 12")), bare(with_texts(run(BASE), d1="so 13"))
    page = comparison_page(compare(a, b))
    assert [row[:3] for row in embedded(page, "grid-outputs")["rows"]] == [["1", "2", "3"]]
    assert "There is no map" in words(page)


def many(count: int, text: str) -> Comparison:
    """A comparison of so many documents, whose outputs differ in one letter between two copies of the text."""
    outputs = {doc: ([1, 2], [-0.5, -0.5]) for doc in range(count)}
    others = {doc: ([1, 3], [-0.5, -0.5]) for doc in range(count)}
    texts = {f"d{doc}": text + "a" + text for doc in range(count)}
    return compare(
        with_texts(run(outputs), **texts), with_texts(run(others), **{k: v.replace("a", "b") for k, v in texts.items()})
    )


def test_texts_are_cut_around_the_place_and_say_so(tmp_path: Path) -> None:
    c = many(1, "x" * 1_000_000)
    size = comparison_page(c).write(tmp_path / "x.html")
    assert size < 200_000
    short = comparison_page(many(1, "x" * 10)).write(tmp_path / "y.html")
    assert short < size


def test_random_texts_stay_below_the_limit(tmp_path: Path) -> None:
    """Texts of three bytes a character that do not compress: all items share the page's room."""
    draw = np.random.default_rng(0)
    text = "".join(map(chr, draw.integers(0x4E00, 0x9FFF, 20_000)))
    c = many(3 * TEXT_BYTES // ITEM_BYTES, text)
    assert comparison_page(c).write(tmp_path / "x.html") < 30_000_000


def test_rows_and_blocks_go_together() -> None:
    c = many(2 * BLOCK + 1, "x")
    page = comparison_page(c)
    assert embedded(page, "blocks-outputs")["items"] == len(embedded(page, "grid-outputs")["rows"]) == 2 * BLOCK + 1
    assert len(embedded(page, "map")["rows"]) == embedded(page, "blocks-map")["items"] == 2 * BLOCK + 1


def test_log_likelihoods_have_a_scale_of_their_own() -> None:
    """On one scale with nats, the interval of a share would be a dot."""
    c = compare(run(BASE), run(TOKEN, scores={0: 0.0}))
    (share,) = c.metrics
    nats = replace(share, key=(TASK, "loglikelihood per window", "none"), nats=True)
    assert share.paired is not None
    wide = replace(nats, paired=replace(share.paired, ci_low=-9000.0, ci_high=9000.0))
    pages = [comparison_page(replace(c, metrics=[share, m])) for m in (nats, wide)]
    (first, second), (same, other) = ([*nodes(page, is_="interval")] for page in pages)
    assert first == same and second != other


def cells(page: Page) -> list[tuple[str, str]]:
    """(look, words) of each cell of a matrix."""
    found = [node for node in nodes(page, is_="span") if node.get("class", "").split()[:1] == ["cell"]]
    return [(node["class"].removeprefix("cell").strip(), words(node)) for node in found]


def mood(page: Page) -> bool | None:
    (lead,) = nodes(page, is_="verdict")
    good: bool | None = lead["good"]
    return good


def test_a_matrix_shows_groups_counts_and_refusals() -> None:
    runs = [run(BASE), run(BASE), run(TOKEN, numerics="fast"), run({0: BASE[0]}, limit=1)]
    page = matrix_page(matrix(runs))
    found = cells(page)
    assert found.count(("same", "identical")) == 2  # runs 1 and 2 have a cell in either direction
    assert found.count(("some", "different outputs differ in 1 of 3")) == 4
    assert found.count(("refused", "not comparable")) == 6
    assert "they share 1 (limit is none in A and 1 in B)" in words(page)
    assert mood(page) is None  # what was refused is neither good nor bad
    assert mood(matrix_page(matrix(runs[:2]))) is True
    calm = matrix_page(matrix(runs[:3]))
    assert mood(calm) is None and "No metric changed by more than" in words(calm)


def scored(right: int, **identity: Any) -> Run:
    """A run of 60 documents, the first of them right; where it is wrong, its output is another one."""
    outputs = {doc: ([1 if doc < right else 2, doc], [-0.5, -0.5]) for doc in range(60)}
    return run(outputs, scores={doc: float(doc < right) for doc in range(60)}, **identity)


def test_a_matrix_colours_by_what_a_difference_means() -> None:
    """Two flips of 60 may be chance, 40 are not."""
    few, many = (matrix_page(matrix([scored(50), scored(right, numerics="fast")])) for right in (48, 10))
    assert [look for look, _ in cells(few)].count("some") == 2 and mood(few) is None
    assert [look for look, _ in cells(many)].count("other") == 2 and mood(many) is False
    assert "Yellow: results differ" in words(few) and "Red: a metric differs" in words(many)


def test_the_same_tokens_have_a_colour_of_their_own_and_what_differs_is_said() -> None:
    runs = [run(BASE), run(BIT, numerics="fast"), run(TOKEN, numerics="fast", seed=1)]
    page = matrix_page(matrix(runs[:2]))
    assert cells(page).count(("tokens", "same tokens logprobs differ in 1 of 3")) == 2
    assert "Every output is the same; logprobs differ in up to 1 request of a pair." in words(page)
    assert [look for look, _ in cells(matrix_page(matrix(runs)))].count("tokens") == 2


def _commanded(base: Run, *words: str) -> Run:
    """The run as if this command had started it."""
    return replace(base, manifest=Manifest({**base.manifest.content, "command": [*words]}))


def test_a_matrix_holds_scores_their_change_and_the_setting_that_differs() -> None:
    page = matrix_page(matrix([scored(50), scored(48, numerics="fast")]))
    found = cells(page)
    assert ("", "83.3 %") in found and ("", "80.0 %") in found
    changes = [text.split()[-2:] for _, text in found if text.endswith("points")]
    assert changes == [["+3.3", "points"], ["-3.3", "points"]], "a row against a column"
    assert [words(node) for node in nodes(page, class_="setting")] == ["exact", "fast"]
    assert "numerics exact → fast" in words(page), "the pair names what differs"
    named = [_commanded(run_, "limit=60") for run_ in (scored(50), scored(48))]
    shown = words(matrix_page(matrix(named)))
    assert shown.count("python -m evalengine limit=60") == 1, "a sweep's command is said once"
    named[1] = _commanded(named[1], "limit=61")
    shown = words(matrix_page(matrix(named)))
    assert shown.count("python -m evalengine limit=60") == shown.count("python -m evalengine limit=61") == 1
    odd = [replace(scored(50), results={}), scored(48)]
    assert ("", "·") in cells(matrix_page(matrix(odd))), "no metric that both report"


def test_a_matrix_lists_what_is_unlike_and_how_much_was_shared() -> None:
    page = matrix_page(matrix([run(BASE), run(BASE), run({0: BASE[0]}, limit=1)], allow=True))
    assert cells(page).count(("same", "identical")) == 2
    assert cells(page).count(("tokens", "identical on 1 / 3")) == 4
    body = words(page)
    assert "IDENTICAL where compared" in body and mood(page) is None
    assert "Runs 1 (A) and 3 (B): sums: A has 3 requests, B 1, and they share 1 (limit is none in A and 1 in B)" in body
    assert "the requests that both runs hold, of the larger one" in body


def test_cells_have_less_room_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = with_texts(run(BASE), d0="same " + "語" * 200), with_texts(run(TOKEN), d0="same " + "😀" * 200)
    a, b = (replace(r, answers={(TASK, FILTER): {0: r.items[TASK, 0, 0, 0].text or ""}}) for r in (a, b))
    for budget, count in ((differences.CELL_BYTES, 160), (160, 10)):  # either grid has one row with two texts
        monkeypatch.setattr(differences, "CELL_BYTES", budget)
        page = comparison_page(compare(a, b))
        (flip,), (output,) = embedded(page, "grid-flips")["rows"], embedded(page, "grid-outputs")["rows"]
        assert output[2:4] == ["語" * count, "😀" * count]
        assert [text for text in flip if isinstance(text, str) and text.startswith("same")] == [
            ("same " + "語" * 200)[:count],
            ("same " + "😀" * 200)[:count],
        ]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs that the command loads by these names, instead of folders."""
    known = {"base": run(BASE), "token": run(TOKEN)}
    monkeypatch.setattr(compare_cli, "load_run", lambda path: known[path])


@pytest.mark.parametrize(
    ("names", "title"), [(("base", "token"), "Two runs of sums"), (("base", "token", "base"), "3 runs of sums")]
)
def test_the_command_writes_the_page(
    names: tuple[str, ...], title: str, runs: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "c.html"
    assert main(["compare", *names, "--html", str(target)]) == 1  # the exit code is the verdict's, not the file's
    assert f"<h1>{title}</h1>" in target.read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: DIFFERENT")


def test_a_page_that_cannot_be_written_is_not_a_verdict(
    runs: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "base", "token", "--html", str(tmp_path / "gone" / "c.html")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"evalengine: compare: --html {tmp_path}/gone/c.html: there is no f")
