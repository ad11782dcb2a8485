"""Pages that a person can read: contrast of every text, and a cue where a table goes on beyond a phone's edge."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.report.compare.compare import compare
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.page import Page
from evalengine.report.html.parts import table
from evalengine.report.html.run_page import write_run_report
from tests.browser import Browser, Tab
from tests.report.compared_runs import BASE, TOKEN, run
from tests.report.written_run import write_choices

LEAST = 4.5  # WCAG 2.2, success criterion 1.4.3: contrast of text
# Each text's contrast with the first ground below it that is opaque; texts that are hidden or disabled are left out.
CONTRASTS = """(() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => { context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data]; };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (e) => {
    if (!e) return [255, 255, 255, 255];
    const colour = rgba(getComputedStyle(e).backgroundColor);
    return colour[3] === 255 ? colour : ground(e.parentElement);
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.disabled || e.matches("script, option")) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const pair = [light(rgba(svg ? style.fill : style.color)), light(ground(e))].sort((a, b) => b - a);
    const name = `${e.tagName}.${e.className.baseVal ?? e.className}: ${e.textContent.slice(0, 40)}`;
    found.push([(pair[0] + 0.05) / (pair[1] + 0.05), name]);
  }
  return found;
})()"""


def low(tab: Tab) -> list[str]:
    """The texts whose contrast is below `LEAST`."""
    found = tab.evaluate(CONTRASTS)
    assert len(found) > 20
    return [f"{contrast:.2f} {text}" for contrast, text in found if contrast < LEAST]


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_its_ground(dark: bool, browser: Browser, tmp_path: Path) -> None:
    choices = write_choices(tmp_path / "run", [[-1.0, -2.0], [-1.0, -2.0], [-3.0, -0.5]], [0, 1, 1])
    pages = [write_run_report(choices)[0], tmp_path / "c.html"]
    comparison_page(compare(run(BASE), run(TOKEN, scores={0: 0.0}, answers={0: "3"}))).write(pages[1])
    for page in pages:
        tab = browser.open(page, dark=dark)
        tab.wait("document.querySelector('.grid-row')")
        assert low(tab) == []
        tab.close()


def test_a_table_that_goes_on_says_so_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    """The right edge of a wide table is shaded until it is scrolled to its end; a table that fits has no shade."""
    page = Page("wide")
    page.section("wide", "Wide", table([f"column {n}" for n in range(12)], [[f"cell number {n}" for n in range(12)]]))
    page.section("slim", "Slim", table(["a"], [["b"]]))
    page.write(tmp_path / "x.html")
    tab = browser.open(tmp_path / "x.html", width=390, height=844)

    def shades(name: str) -> list[bool]:
        """Whether the left and the right edge are darker than the page."""
        tab.evaluate("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
        box = tab.evaluate(f"(() => {{ const r = document.querySelector('#{name} .scroll').getBoundingClientRect();"
                           " return [r.left, r.top + 3, r.right, r.top + 3] })()")  # fmt: skip
        shot = tab.call("Page.captureScreenshot", format="png")["data"]
        pixels = tab.evaluate(
            "(async () => { const image = await createImageBitmap(new Blob([Uint8Array.from(atob('" + shot + "'),"
            " c => c.charCodeAt(0))])); const c = new OffscreenCanvas(image.width, image.height).getContext('2d');"
            f" c.drawImage(image, 0, 0); return [[{box[0] + 1}, {box[1]}], [{box[2] - 2}, {box[3]}]]"
            ".map(([x, y]) => [...c.getImageData(x, y, 1, 1).data].slice(0, 3).reduce((a, b) => a + b)) })()"
        )
        return [pixel < 3 * 235 for pixel in pixels]

    assert shades("wide") == [False, True] and shades("slim") == [False, False]
    tab.evaluate("document.querySelector('#wide .scroll').scrollLeft = 1e6")
    assert shades("wide") == [True, False]
    tab.close()
