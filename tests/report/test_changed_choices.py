"""A changed choice on the comparison's page, in Chromium."""

from __future__ import annotations

from pathlib import Path

from evalengine.report.compare.compare import compare
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.read.load import load_run
from tests.browser import Browser
from tests.report.test_comparison_in_browser import opened
from tests.report.written_run import write_choices


def test_a_changed_choice_opens_what_changed_and_the_sums(browser: Browser, tmp_path: Path) -> None:
    """The new wrong choice has NaN as its sum: lm-eval's argmax takes such a choice too."""
    a = write_choices(tmp_path / "a", [[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]], [1, 0])
    b = write_choices(tmp_path / "b", [[-2.5, -2.0, float("nan")], [-1.0, -2.0, -3.0]], [1, 0], numerics="fast")
    runs = load_run(a), load_run(b)
    comparison_page(compare(*runs)).write(tmp_path / "x.html")
    with opened(browser, tmp_path / "x.html", width=390, height=844) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        tab.click("[data-grid=flips] .grid-row")
        tab.wait("document.querySelector('dialog[open] .pair')")
        text = tab.evaluate("document.querySelector('dialog').textContent")
        assert "Answer under acc: wrong to wrong; cause: numerics level" in text
        pres = tab.evaluate("[...document.querySelectorAll('dialog pre')].map(p => p.textContent)")
        assert pres == ["0: choice 0", "2: choice 2"]
        cells = tab.evaluate("[...document.querySelectorAll('dialog table td')].map(c => c.textContent)")
        changed = ["0", "-1.000000", "-2.500000", "-1.50e+0"]
        assert cells == [*changed, "1", "-2.000000", "-2.000000", "0.00e+0", "2", "-3.000000", "NaN", ""]
