"""The frame of a page in a browser: its policy, its escaping, and that the driver sees what a hostile page does."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from evalengine.errors import EvalEngineError
from evalengine.report.html.markup import Markup, escape, json_text, tag
from evalengine.report.html.page import Page, asset
from evalengine.report.html.parts import Column, details, facts, figure, grid, row_of, table, tiles, verdict
from evalengine.report.html.plots import Series, bars, calibration, histogram, interval, ticks
from tests.browser import Browser, Tab

HOSTILE = {
    "script": "<script>window.pwned = 1</script>",
    "end of script": "</script><script>window.pwned = 1</script>",
    "comment": "<!--<script>",
    "image": '<img src=x onerror="window.pwned = 1">',
    "attribute": '"><svg onload="window.pwned = 1">',
    "remote": '<link rel=stylesheet href="https://example.com/x.css"><iframe src="https://example.com">',
    "template": "${window.pwned = 1}`; window.pwned = 1; `",
    "right to left": "abc\u202e\u2066cba",
    "surrogates": "\ud800 and \udfff alone",
    "NUL": "a\x00b\x1b[31m\x07",
    "separators": "a\u2028b\u2029c",
    "entity": "&lt;b&gt; &amp; &#60;",
    "prototype": "__proto__",
    "constructor": "constructor",
    "uri": "javascript:window.pwned=1",
    "emoji": "👩‍👩‍👧 naïve 中文",
}


def quiet(tab: Tab) -> None:
    """Asserts that the page did nothing but show itself."""
    assert tab.evaluate("typeof window.pwned") == "undefined"
    assert (tab.errors, tab.requests, tab.dialogs) == ([], [], [])


def hostile_page() -> Page:
    texts = list(HOSTILE.values())
    page = Page(HOSTILE["end of script"], eyebrow=HOSTILE["image"])
    page.lead(verdict(HOSTILE["image"], HOSTILE["script"], None), tiles([(t, t, t) for t in texts[:3]]))
    page.section(
        "plain", HOSTILE["attribute"], table(texts, [texts]), facts(HOSTILE), details(*texts[:2]), note=texts[0]
    )
    drawn = histogram([0, 1, 2], [Series(texts[3], [1, 2])], texts[4], texts[3])
    shapes = (drawn, bars([(t, 1.0, "") for t in texts[:4]], 4, texts[0]), interval(0.5, 0.1, 0.9, (0.0, 1.0)))
    page.section("drawn", "Drawn", row_of(*(figure(texts[3], shape, texts[4]) for shape in shapes)))
    page.blocks("long", [[text, [[text, text]]] for text in texts])
    columns = [Column("name"), Column(HOSTILE["image"], choose=True)]
    page.section("rows", "Rows", grid(page, "g", columns, [[k, v] for k, v in HOSTILE.items()], blocks="long"))
    return page


def test_hostile_texts_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    hostile_page().write(path)
    tab = browser.open(path)
    quiet(tab)
    cells = tab.evaluate("[...document.querySelectorAll('#plain tbody td')].map(td => td.textContent)")
    assert cells[:5] == list(HOSTILE.values())[:5]
    assert cells[7:10] == ["abc\\u202e\\u2066cba", "\\ud800 and \\udfff alone", "a\\x00b\\x1b[31m\\x07"]
    rows = tab.evaluate("[...document.querySelectorAll('.grid-row')].map(r => r.children[1].textContent)")
    assert rows[:5] == list(HOSTILE.values())[:5]
    assert rows[7:10] == ["abc\\u202e\\u2066cba", "\\ud800 and \\udfff alone", "a\\u0000b\\u001b[31m\\u0007"]
    assert rows[-1] == HOSTILE["emoji"]
    texts = tab.evaluate("report.blocks('long').load(0).then(items => items.map(item => item[0]))")
    whole = [
        text for text in HOSTILE.values() if text != HOSTILE["surrogates"]
    ]  # the protocol's JSON cannot carry surrogates
    assert [text for text in texts if "alone" not in text] == whole
    assert tab.evaluate("document.querySelectorAll('iframe, img, link, object, embed').length") == 0
    tab.close()


def test_the_driver_sees_a_page_that_is_not_escaped(browser: Browser, tmp_path: Path) -> None:
    """The inverse: the same text as markup, with the policy taken out and left in."""
    page = Page("Careless")
    page.section("hole", "Hole", Markup(HOSTILE["image"] + "<script>alert('hello'); window.pwned = 1</script>"))
    guarded, open_ = tmp_path / "guarded.html", tmp_path / "open.html"
    page.write(guarded)
    text = guarded.read_text(encoding="utf-8")
    start = text.index('<meta http-equiv="Content-Security-Policy"')
    open_.write_text(text[:start] + text[text.index(">", start) + 1 :], encoding="utf-8")
    tab = browser.open(open_)
    assert tab.evaluate("window.pwned") == 1
    assert tab.dialogs == ["hello"]
    assert any(url.endswith("/x") for url in tab.requests)
    tab.close()
    tab = browser.open(guarded)  # the policy holds where the escaping did not, and says so
    assert tab.evaluate("typeof window.pwned") == "undefined"
    assert tab.dialogs == [] and any("Content Security Policy" in error for error in tab.errors)
    tab.close()


def test_the_driver_sees_errors_and_requests(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "noisy.html"
    path.write_text("<script>console.error('said'); fetch('https://example.com/y').catch(() => 0); nowhere.x</script>")
    tab = browser.open(path)
    tab.wait("true")
    assert any("said" in error for error in tab.errors) and any("nowhere" in error for error in tab.errors)
    assert "https://example.com/y" in tab.requests
    tab.close()


def test_the_driver_waits_for_what_is_not_there_yet(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "late.html"
    late = "document.body.innerHTML = '<p>here</p>'"
    path.write_text(f"<body><script>setTimeout(() => {{ {late} }}, 300)</script></body>")
    tab = browser.open(path)
    tab.wait("document.querySelector('p').innerText === 'here'")
    with pytest.raises(AssertionError, match="nowhere is not defined"):
        tab.wait("nowhere.text")
    with pytest.raises(AssertionError, match=r"not true after 0\.1 s"):
        tab.wait("document.querySelector('table').innerText", 0.1)
    tab.close()


def test_the_policy_names_what_is_there_and_nothing_else() -> None:
    text = Page("A page").render()
    policy = text.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy and "data:" not in policy and "https" not in policy
    assert "://" not in text.replace("http://www.w3.org", ""), "an address in a page that fetches nothing"


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("b", "<i>", Markup("<u></u>"), title='"<') == '<b title="&quot;&lt;">&lt;i&gt;<u></u></b>'
    assert escape(tag("b")) == "<b></b>" and escape(f"{tag('b')}!") == "&lt;b&gt;&lt;/b&gt;!"  # a joined string is text
    assert tag("input", disabled=True, hidden=False, value=None, class_="x", data_row=3) == (
        '<input disabled class="x" data-row="3">'
    )
    with pytest.raises(AssertionError, match="policy"):
        tag("b", onclick="x()")


def test_json_in_a_page_cannot_end_its_element() -> None:
    text = json_text(["</script>", "<!--", "\u2028", "\ud800", "&lt;"])
    assert text.isascii() and not set("<>&") & set(text)
    wide = ["語", "😀", "\u202e", "\ud83d", "\x7f\x85\ufeff"]
    assert json_text(wide) == '["語","😀","\\u202e","\\ud83d","\\u007f\\u0085\\ufeff"]'
    assert json.loads(json_text(wide)) == wide
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text([float("nan")])


@pytest.mark.parametrize(
    "name", sorted(file.name for file in files("evalengine.report.html").joinpath("assets").iterdir())
)
def test_assets_use_nothing_that_runs_text(name: str) -> None:
    text = asset(name)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "import(",
        "url(",
        "fetch(",
    ):
        assert word not in text, word


def test_plots_of_awkward_numbers_hold_no_nan_and_no_infinity(browser: Browser, tmp_path: Path) -> None:
    page = Page("Plots")
    drawn = [
        histogram([0.0, 1e-9, 2e-9], [Series("", [0, 0])], "nat", "requests"),
        histogram([-1e6, 0, 1e6], [Series("a", [1, 0]), Series("b", [0, 12345], "bad")], "x", "y", rule=0.0),
        calibration([]),
        calibration([(0.5, 1.0, 0.2, 1.0, 1), (1.0, 0.0, 0.0, 0.0, 100000)]),
        bars([("none", 0.0, "")], 1, "requests"),
        histogram([0.5, 1.5, 2.5], [Series("", [1, 0])], "tokens", "requests"),
    ]
    page.section("drawn", "Drawn", row_of(*(figure("", shape) for shape in drawn)))
    page.write(tmp_path / "plots.html")
    tab = browser.open(tmp_path / "plots.html")
    quiet(tab)
    shown = tab.evaluate("[...document.querySelectorAll('svg.plot')].map(s => s.outerHTML).join()")
    assert "NaN" not in shown and "inf" not in shown and '="-' not in shown.replace('d="', "")
    tab.close()


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-3.2, 17) == [0, 5, 10, 15]
    assert all(low <= t <= high for low, high in [(0.1, 0.13), (-5e6, 2), (1e-9, 3e-9)] for t in ticks(low, high))


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "gone" / "x.html"
    with pytest.raises(EvalEngineError, match=r"could not write .*x\.html"):
        Page("x").write(target)
    page = Page("\ud800")
    assert page.write(tmp_path / "x.html") == (tmp_path / "x.html").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["x.html"]
