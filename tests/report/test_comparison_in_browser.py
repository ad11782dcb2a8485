"""The comparison's page in Chromium: the map's pixels, pointing and keys, panels, hostile texts, 20,000 items."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import ids_sha256
from evalengine.report.compare.compare import compare
from evalengine.report.compare.matrix import matrix
from evalengine.report.html import page as page_module
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Item, Run
from tests.browser import Browser, Tab
from tests.report.compared_runs import BASE, FILTER, KEY, TASK, TOKEN, run
from tests.report.test_pages import HOSTILE, quiet
from tests.report.written_run import Doc, write_generations

TOKENS = 12
READY = "'ready' in document.querySelector('[data-map]').dataset"
# Per token, it gives the state whose swatch has the colour of the pixel in its middle, or null where nothing is drawn.
STATES = """(() => {
  const canvas = document.querySelector(".map-detail");
  const context = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const colours = new Map(Array.from(report.picture.palette().slice(0, 11), (c, state) => [c?.join(), state]));
  const line = parseFloat(document.querySelector(".map-space").style.height) / ITEMS;
  return Array.from({length: ITEMS}, (_, i) => Array.from({length: TOKENS}, (_, t) => {
    const at = [Math.floor((t + 0.6) / TOKENS * canvas.width), Math.floor((i + 0.5) * line)];
    const [r, g, b, a] = context.getImageData(...at, 1, 1).data;
    return a ? colours.get([r, g, b].join()) ?? -1 : null;
  }));
})()"""


def states(tab: Tab, items: int) -> Any:
    """Per item, the states of its tokens that the map's pixels show."""
    return tab.evaluate(STATES.replace("ITEMS", str(items)).replace("TOKENS", str(TOKENS)))


@pytest.fixture
def drawn(tmp_path: Path) -> tuple[Path, list[list[int | None]]]:
    """A page of four items, and the states that its map must show with the earliest parting at the top."""
    ids, logprobs = list(range(TOKENS)), [-1.0] * TOKENS
    a = {0: (ids, logprobs), 1: (ids, logprobs), 2: (ids, logprobs), 3: (ids[:5], logprobs[:5])}
    b = dict(a)
    b[1] = (ids, [*logprobs[:3], -1.002, -1.0, -1.2, *logprobs[6:]])
    b[2] = ([*ids[:7], 99, 98], [*logprobs[:6], -1.00002, -1.0, -1.0])
    path = tmp_path / "two.html"
    comparison_page(compare(run(a), run(b))).write(path)
    levels = [0, 0, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0]
    parts = [0, 0, 0, 0, 0, 0, 3, 9, 10, 10, 10, 10]
    return path, [parts, levels, [0] * TOKENS, [0] * 5 + [None] * 7]


@contextmanager
def opened(browser: Browser, path: Path, **how: Any) -> Iterator[Tab]:
    """The page in a tab of its own, which must do nothing but show itself, and is closed whatever happens."""
    tab = browser.open(path, **how)
    try:
        yield tab
        quiet(tab)
    finally:
        tab.close()


@pytest.fixture
def tab(browser: Browser, drawn: tuple[Path, Any]) -> Iterator[Tab]:
    with opened(browser, drawn[0]) as opened_tab:
        opened_tab.wait(READY)
        yield opened_tab


def test_the_map_shows_each_token_as_it_is(tab: Tab, drawn: tuple[Path, Any]) -> None:
    assert states(tab, 4) == drawn[1]
    choose = "s.selectedIndex = 1; s.dispatchEvent(new Event('change'))"
    tab.evaluate(f"(() => {{ const s = document.querySelector('.tools select'); {choose} }})()")
    assert states(tab, 4) == [drawn[1][2], drawn[1][1], drawn[1][0], drawn[1][3]]  # now the order is the task's


def test_the_map_follows_dark_and_light(browser: Browser, drawn: tuple[Path, Any]) -> None:
    with opened(browser, drawn[0], dark=True) as tab:
        tab.wait(READY)
        assert states(tab, 4) == drawn[1]
        dark = tab.evaluate("report.picture.palette().join()")
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        tab.wait(f"report.picture.palette().join() !== '{dark}'")
        tab.evaluate("new Promise(requestAnimationFrame)")
        assert states(tab, 4) == drawn[1]  # the map is redrawn in the new colours


def test_pointing_reads_out_and_a_click_opens_the_outputs(tab: Tab) -> None:
    box = tab.evaluate(
        "(() => { const c = document.querySelector('.map-body'); c.scrollIntoView({block: 'center'});"
        " const r = c.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })()"
    )

    def at(item: int, token: int) -> dict[str, float]:
        return {"x": box[0] + (token + 0.5) / TOKENS * box[2], "y": box[1] + (item + 0.5) / 4 * box[3]}

    readout = "document.querySelector('.map-readout').textContent"
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", **at(1, 3))
    assert (
        tab.evaluate(readout)
        == "sums doc 1 same tokens, logprobs differ from token 3 token 3: |Δ logprob| 0.001 to 0.01 nat"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", **at(0, 7))
    assert tab.evaluate(readout) == "sums doc 2 outputs diverge at token 7 token 7: the first that differs"
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at(0, 7))
    tab.wait("document.querySelector('dialog[open]')")
    text = tab.evaluate("document.querySelector('dialog').textContent")
    assert "sums doc 2" in text and "Token 7, where the outputs diverge" in text and "token ids 99 98" in text


def test_keys_move_through_the_map(tab: Tab) -> None:
    tab.evaluate("document.querySelector('.map-body').focus()")
    for _ in range(2):
        tab.press("ArrowDown")
    assert tab.evaluate("document.querySelector('.map-readout strong').textContent") == "sums doc 1"
    tab.press("Enter")
    assert not tab.evaluate("!!document.querySelector('dialog[open]')")  # doc 1's output is the same: nothing opens
    tab.press("ArrowUp")
    tab.press("Enter")
    tab.wait("document.querySelector('dialog[open]')")


def test_a_flip_opens_both_answers_and_both_outputs(browser: Browser, tmp_path: Path) -> None:
    b = run(TOKEN, answers={0: "73"}, scores={0: 0.0})
    comparison_page(compare(run(BASE, answers={0: "37"}), b)).write(tmp_path / "x.html")
    with opened(browser, tmp_path / "x.html") as tab:
        tab.click("[data-grid=flips] .grid-row")
        tab.wait("document.querySelector('dialog[open] .pair')")
        pres = tab.evaluate("[...document.querySelectorAll('dialog pre')].map(p => p.textContent)")
        assert pres == ["37", "73", "t5 t6 t7", "t5 t6 t3"]
        marks = tab.evaluate("[...document.querySelectorAll('dialog mark')].map(m => m.textContent)")
        assert marks == ["37", "73", "7", "3"]
        assert "Gap 0.0300 nat: a near-tie" in tab.evaluate("document.querySelector('dialog').textContent")


def hostile_runs() -> tuple[Run, Run]:
    """Two runs that differ in all hostile texts, which stand as answers, outputs and a task's filter."""
    texts = list(HOSTILE.values())
    outputs = {doc: ([1, 2], [-0.5, -0.5]) for doc in range(len(texts))}
    others = {doc: ([1, 3], [-0.5, -0.25]) for doc in range(len(texts))}
    a, b = run(outputs, answers=dict(enumerate(texts))), run(others, answers={d: f"B {t}" for d, t in enumerate(texts)})

    def with_texts(base: Run, before: str) -> Run:
        items = {k: replace(i, text=f"same {before}{texts[i.doc_id]}") for k, i in base.items.items()}
        name = HOSTILE["end of script"]
        answers = {(TASK, FILTER): base.answers[TASK, FILTER], (TASK, name): base.answers[TASK, FILTER]}
        return replace(base, items=items, answers=answers, source=Path(HOSTILE["image"]), name=HOSTILE["script"])

    return with_texts(a, ""), with_texts(b, "B ")


def test_hostile_texts_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    a, b = hostile_runs()
    comparison_page(compare(a, b)).write(tmp_path / "pair.html")
    matrix_page(matrix([a, b, a])).write(tmp_path / "matrix.html")
    with opened(browser, tmp_path / "matrix.html") as tab:
        assert tab.evaluate("document.querySelectorAll('.cell').length") == 9
    with opened(browser, tmp_path / "pair.html") as tab:
        tab.wait(READY)
        for name, count in (("flips", 2 * len(HOSTILE)), ("outputs", len(HOSTILE))):
            for row in range(count):
                tab.evaluate(f"report.openRow('{name}', {row})")
                tab.wait(f"location.hash === '#{name}={row}'")
        texts = tab.evaluate("[...document.querySelectorAll('dialog pre')].map(p => p.textContent)")
        assert HOSTILE["emoji"] in " ".join(texts)
        tab.evaluate("report.openRow('outputs', 1)")
        tab.wait("location.hash === '#outputs=1'")
        texts = tab.evaluate("[...document.querySelectorAll('dialog pre')].map(p => p.textContent)")
        assert f"same {HOSTILE['end of script']}" in texts  # the whole text is shown as text
        assert tab.evaluate("document.querySelectorAll('iframe, img, link, object, embed').length") == 0


def test_the_browser_tells_a_page_whose_data_is_not_escaped(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse: the same runs, with the data's escapes undone before it is embedded."""
    embed = page_module.json_text
    undo = {"\\u003c": "<", "\\u003e": ">", "\\u0026": "&"}

    def careless(value: Any) -> str:
        text = embed(value)
        for escape, character in undo.items():
            text = text.replace(escape, character)
        return text

    monkeypatch.setattr(page_module, "json_text", careless)
    comparison_page(compare(*hostile_runs())).write(tmp_path / "x.html")
    with pytest.raises(AssertionError, match="Content Security Policy"), opened(browser, tmp_path / "x.html"):
        pass


def large(items: int, tokens: int) -> tuple[Run, Run]:
    """Runs of this size: in B every logprob differs, and every fourth output parts somewhere."""
    draw, ids = np.random.default_rng(0), list(range(tokens))
    left: dict[Any, Item] = {}
    right: dict[Any, Item] = {}
    for doc in range(items):
        logprobs = -draw.random(tokens, dtype=np.float32)
        moved = logprobs * (1 + 10 ** draw.uniform(-7, -1, tokens)).astype(np.float32)
        other = ids if doc % 4 else [*ids[: doc % tokens], 10**6, *ids[doc % tokens + 1 :]]
        for side, mine, values, name in ((left, ids, logprobs, "a"), (right, other, moved, "b")):
            text = f"words of document {doc} " * 20 + (name if other is not ids else "") + " more" * 100
            leaf = ids_sha256([doc, name == "b"])
            output = "equal" if mine is ids else "other"
            key = (TASK, doc, 0, 0)
            side[key] = Item(*key, "generate_until", leaf, "p", output, mine, values, float(values.sum()), text, 0)
    base = run({0: BASE[0]})
    scores = {KEY: dict.fromkeys(range(items), 1.0)}
    whole = replace(base, answers={}, hashes={}, scores=scores)
    return replace(whole, items=left, digest="a" * 64), replace(whole, items=right, digest="b" * 64)


@pytest.mark.parametrize("tokens", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_twenty_thousand_items_stay_usable(tokens: int, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    assert comparison_page(compare(*large(20_000, tokens))).write(path) < 30_000_000
    with opened(browser, path) as tab:
        assert tab.loaded < 20  # seconds; on a quiet machine it takes about one
        assert tab.evaluate("document.querySelectorAll('*').length") < 2000
        tab.evaluate("document.querySelector('[data-map]').scrollIntoView()")
        tab.wait(READY, 60)
        assert tab.evaluate("document.querySelector('.map-detail').height") < 600  # it draws lines in sight, not 20,000
        tab.evaluate("(() => { document.querySelector('.map-body').scrollTop = 6 * 4000 })()")
        tab.wait("parseFloat(document.querySelector('.map-detail').style.top) >= 6 * 3990")
        tab.evaluate("report.openRow('outputs', 4999)")
        tab.wait("document.querySelector('dialog[open]')")
        assert "sums doc 19996" in tab.evaluate("document.querySelector('dialog h2').textContent")


def test_the_headings_of_flips_are_whole_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    a = write_generations(tmp_path / "a", [Doc("out 1", answer="a long answer"), Doc("out 2")])
    other = [Doc("no", answer="another long answer", score=0.0), Doc("out 2")]
    b = write_generations(tmp_path / "b", other, numerics="fast")
    comparison_page(compare(load_run(a), load_run(b))).write(tmp_path / "page.html")
    tab = browser.open(tmp_path / "page.html", width=390, height=844)
    shown = "[...document.querySelectorAll('[data-grid=flips] .grid-head > div:not([hidden]) button')]"
    heads = tab.evaluate(f"{shown}.map(e => [e.textContent, e.scrollWidth <= e.clientWidth])")
    assert heads == [["Doc", True], ["Answer A", True], ["Answer B", True], ["Change", True]]
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    quiet(tab)
    tab.close()


def test_the_settings_in_a_matrix_break_between_words_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    runs = [
        replace(run(BASE), manifest=Manifest({"engine": {"max_num_batched_tokens": size, "max_num_seqs": size // 8}}))
        for size in (512, 1024, 2048)
    ]
    matrix_page(matrix(runs)).write(tmp_path / "m.html")
    tab = browser.open(tmp_path / "m.html", width=390, height=844)
    lines = """(() => {
      const label = document.querySelector("table.matrix .setting").firstChild, range = new Range();
      return label.textContent.split(" ").map((word) => {
        const from = label.textContent.indexOf(word);
        range.setStart(label, from); range.setEnd(label, from + word.length);
        return range.getClientRects().length;
      });
    })()"""
    assert tab.evaluate(lines) == [1, 1, 1, 1], "each word is on one line"
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    quiet(tab)
    tab.close()
