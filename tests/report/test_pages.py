"""The frame of a page in a browser: its policy, its escaping, and that the driver sees what a hostile page does."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from evalengine.errors import EvalEngineError
from evalengine.report.html import page as page_module
from evalengine.report.html.markup import Node, json_text, markup, tag
from evalengine.report.html.page import Page, asset
from evalengine.report.html.parts import Column, details, facts, figure, grid, interval, row_of, table, tiles, verdict
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


def histogram(
    edges: list[float], layers: list[tuple[str, list[int]]], x: str, noun: str, rule: float | None = None
) -> Node:
    own = [{"name": name, "counts": counts, "style": "bad" * bool(n)} for n, (name, counts) in enumerate(layers)]
    return {"is": "histogram", "edges": edges, "layers": own, "x": x, "noun": noun, "rule": rule}


def hostile_page() -> Page:
    texts = list(HOSTILE.values())
    page = Page(HOSTILE["end of script"], eyebrow=HOSTILE["image"])
    page.lead(verdict(HOSTILE["image"], HOSTILE["script"], None), tiles([(t, t, t) for t in texts[:3]]))
    page.section(
        "plain", HOSTILE["attribute"], table(texts, [texts]), facts(HOSTILE.items()), details(*texts[:2]), note=texts[0]
    )
    drawn = histogram([0, 1, 2], [(texts[3], [10, 20])], texts[4], texts[3])
    bars = {"is": "bars", "rows": [(text, 1, "") for text in texts[:8]], "total": 8}
    shapes = (drawn, bars, interval(0.5, 0.1, 0.9, (0.0, 1.0)))
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
    assert cells[7:10] == ["abc\\u202e\\u2066cba", "\\ud800 and \\udfff alone", "a\\u0000b\\u001b[31m\\u0007"]
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
    tab.wait("document.querySelectorAll('svg.plot text').length > 8")
    labels = tab.evaluate("[...document.querySelectorAll('svg.plot text')].map(text => text.innerHTML)")
    assert "abc\\u202e\\u2066cba" in labels, "SVG shows no HTML elements"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1200
    tab.close()


def test_the_driver_sees_a_page_that_is_not_escaped(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse: the same text as markup, with the policy taken out and left in."""
    monkeypatch.setattr(page_module, "json_text", json.dumps)
    page = Page("Careless")
    page.section("hole", "</script>" + HOSTILE["image"] + "<script>alert('hello'); window.pwned = 1</script>")
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
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe" not in policy and "data:" not in policy and "https" not in policy
    assert "://" not in text.replace("http://www.w3.org", ""), "an address in a page that fetches nothing"


def test_texts_of_a_file_are_escaped() -> None:
    node = tag("b", "<i>", tag("u"), tag("style", "a > b"), title='"<\u202e', hidden=False, data_row=3)
    assert markup(node) == '<b title="&quot;&lt;\\u202e" data-row="3">&lt;i&gt;<u></u><style>a > b</style></b>'
    with pytest.raises(AssertionError, match="policy"):
        tag("b", onclick="x()")


@pytest.mark.parametrize("scripts", [True, False])
def test_a_page_without_scripts_has_title_and_verdict(scripts: bool, browser: Browser, tmp_path: Path) -> None:
    page = Page("Title")
    page.lead(verdict("All is well.", "So it is.", True))
    page.write(tmp_path / "x.html")
    tab = browser.open(tmp_path / "x.html")
    tab.call("Emulation.setScriptExecutionDisabled", value=not scripts)
    tab.go(tmp_path / "x.html")
    text = tab.evaluate("document.querySelector('main').innerText").split("\n")
    off = ["All is well.", "Scripts are off: the rest of this page needs them."]
    assert [line for line in text if line][-2:] == (["All is well.", "So it is."] if scripts else off)
    tab.close()


def test_json_in_a_page_cannot_end_its_element() -> None:
    text = json_text(["</script>", "<!--", "\u2028", "\ud800", "&lt;"])
    assert text.isascii() and not set("<>&") & set(text)
    wide = ["語", "😀", "\u202e", "\ud83d", "\x7f\x85\ufeff"]
    assert json_text(wide) == '["語","😀","\\u202e","\\ud83d","\\u007f\\u0085\\ufeff"]'
    assert json.loads(json_text(wide)) == wide
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text([float("nan")])


@pytest.mark.parametrize(
    "name",
    sorted(
        file.name for file in files("evalengine.report.html").joinpath("assets").iterdir() if "jinja" not in file.name
    ),
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
    calibration = {"is": "calibration", "points": [(0.5, 1.0, 0.2, 1.0, 1), (1.0, 0.0, 0.0, 0.0, 100000)]}
    drawn: list[Node] = [
        histogram([0.0, 1e-9, 2e-9], [("", [0, 0])], "nat", "requests"),
        histogram([-1e6, 0, 1e6], [("a", [1, 0]), ("b", [0, 12345])], "x", "y", rule=0.0),
        calibration,
        {**calibration, "points": []},
        {"is": "bars", "rows": [("none", 0, "")], "total": 1},
        histogram([0.5, 1.5, 2.5], [("", [1, 0])], "tokens", "requests"),
        {"is": "series", "points": [(1.0, None, "one"), (1.0, (0.5, 1.5), "two")], "x": "runs", "y": "acc"},
    ]
    page.section("drawn", "Drawn", row_of(*(figure("", shape) for shape in drawn)))
    page.write(tmp_path / "plots.html")
    tab = browser.open(tmp_path / "plots.html")
    tab.wait("[...document.querySelectorAll('svg.plot')].every(s => s.children.length)")
    quiet(tab)
    shown = tab.evaluate("[...document.querySelectorAll('svg.plot')].map(s => s.outerHTML).join()")
    assert "NaN" not in shown and "inf" not in shown and '="-' not in shown.replace('d="', "")
    assert tab.evaluate("[...document.querySelectorAll('svg')].slice(-2)[0].querySelectorAll('circle').length") == 1
    outside = "report.build({is: 'interval', value: 90, low: 90, high: 99, bounds: [-4, 4], rule: 2}).outerHTML"
    at_edge = tab.evaluate(outside)
    assert 'cx="156"' in at_edge and "M156 9H156" in at_edge and "90, from 90 to 99" in at_edge
    tab.close()


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "gone" / "x.html"
    with pytest.raises(EvalEngineError, match=r"could not write .*x\.html"):
        Page("x").write(target)
    page = Page("\ud800")
    assert page.write(tmp_path / "x.html") == (tmp_path / "x.html").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["x.html"]
