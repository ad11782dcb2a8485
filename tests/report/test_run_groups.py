"""A run of many tasks on its page: what was asked for first, its tasks folded; and what the length limit cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.report.html.run_page import write_run_report
from evalengine.report.read.load import load_run
from evalengine.report.run_table import print_report
from evalengine.report.stats.metric_interval import cut_of, metric_interval
from tests.browser import Browser
from tests.report.grouped_run import write_grouped
from tests.report.test_pages import quiet
from tests.report.written_run import Doc, write_generations
from tests.run_double import bind_again

TASKS = {f"t{n:02}": [1.0, 1.0, 0.0, float(n % 2)] for n in range(14)}
GROUPS = {"all": ["low", "high"], "low": [*TASKS][:5], "high": [*TASKS][5:]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_grouped(tmp_path / "many", TASKS, GROUPS)


def test_a_tile_is_what_was_asked_for(browser: Browser, run: Path) -> None:
    path, _ = write_run_report(run)
    tab = browser.open(path)
    assert tab.evaluate("document.querySelector('h1').textContent") == "all on tiny"
    tiles = "[...document.querySelectorAll('header .tiles > div')].map(t => t.innerText.split(/\\s*\\n\\s*/))"
    low, high = metric_interval(load_run(run), ("all", "exact_match", "strict-match")) or (0, 0)
    assert low < 0.625 < high
    assert tab.evaluate(tiles) == [["all exact_match", "62.5 %", f"95 %: {100 * low:.1f} to {100 * high:.1f}"]]
    quiet(tab)
    tab.close()


def test_groups_come_first_and_their_tasks_are_folded(browser: Browser, run: Path) -> None:
    path, _ = write_run_report(run)
    tab = browser.open(path)
    rows = "[...document.querySelectorAll('#metrics > .scroll tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    found = tab.evaluate(rows)
    assert [row[0] for row in found] == ["all", "low", "high"]
    assert all(" to " in row[3] for row in found)  # each has an interval
    heads = tab.evaluate("[...document.querySelectorAll('#metrics > .scroll th')].map(c => c.innerText)")
    assert [row[heads.index("Documents")] for row in found] == ["56", "20", "36"]
    folds = "[...document.querySelectorAll('#metrics details')].map(d => [d.firstChild.textContent, d.open])"
    assert tab.evaluate(folds) == [["low: 5 tasks", False], ["high: 9 tasks", False]]
    assert tab.evaluate("document.querySelectorAll('#metrics details tbody tr').length") == 14
    assert tab.evaluate("document.documentElement.scrollHeight") < 4000
    tab.close()


def test_a_group_of_few_tasks_is_one_table(run: Path, browser: Browser, tmp_path: Path) -> None:
    few = write_grouped(tmp_path / "few", {"x": [1.0, 0.0], "y": [1.0, 1.0]}, {"both": ["x", "y"]})
    tab = browser.open(write_run_report(few)[0])
    names = "[...document.querySelectorAll('#metrics tbody tr')].map(r => r.cells[0].innerText)"
    assert tab.evaluate(names) == ["both", "x", "y"]
    tab.close()


def cut_run(path: Path) -> Path:
    """10 documents, of which 4 were cut; 1 of these and 5 of the others are right."""
    docs = [Doc(f"{n}", score=float(n in (0, 4, 5, 6, 7, 8)), finish="length" if n < 4 else "stop") for n in range(10)]
    return write_generations(path, docs)


def test_cut_answers_stand_beside_the_score(
    tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_run(tmp_path / "run")
    words = "40.0 % cut at the limit: 0.2500 on these, 0.8333 on the finished ones"
    cut = cut_of(load_run(folder), ("sums", "exact_match", "strict-match"))
    assert cut is not None and cut.words == words
    tab = browser.open(write_run_report(folder)[0])
    assert words in tab.evaluate("document.querySelector('header .tiles').innerText")
    head = tab.evaluate("[...document.querySelectorAll('#metrics th')].map(c => c.innerText)")
    row = tab.evaluate("[...document.querySelectorAll('#metrics td')].map(c => c.innerText)")
    shown = dict(zip(head, row, strict=True))
    assert (shown["Cut"], shown["Cut ones"], shown["Finished"]) == ("40.0 %", "0.2500", "0.8333")
    tab.close()


def test_the_terminal_says_what_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cut_run(tmp_path / "run")
    print_report(folder)
    assert "cut at the limit" not in capsys.readouterr().out  # its manifest counts none
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    bind_again(folder, counts={**counts, "length_limited": 4})
    print_report(folder)
    assert "exact_match, strict-match: 40.0 % cut at the limit: 0.2500 on these" in capsys.readouterr().out


def test_a_comparison_says_what_was_cut_in_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_generations(tmp_path / "whole", [Doc(f"{n} ", score=float(n != 3)) for n in range(10)])
    main(["compare", str(whole), str(cut_run(tmp_path / "cut"))])
    a = "A none cut at the limit (2 to 2 tokens, median 2)"
    b = "B 40.0 % cut at the limit: 0.2500 on these, 0.8333 on the finished ones (1 to 1 tokens, median 1)"
    assert f"sums, exact_match, strict-match: {a}; {b}." in capsys.readouterr().out
