"""`report.html` of runs with hostile outputs, thousands of samples, choices, or logprobs that are not finite."""

from __future__ import annotations

import math
import random
import re
import time
from pathlib import Path

import pytest

from evalengine.report.html import samples as page_samples
from evalengine.report.html.run_page import run_page, write_run_report
from evalengine.report.html.samples import Truncator
from evalengine.report.read.load import load_run_data
from tests.browser import Browser
from tests.report.page_content import content, embedded
from tests.report.run_page_tab import ROWS, docs, opened, search
from tests.report.test_pages import HOSTILE, quiet
from tests.report.written_run import Doc, write_choices, write_generations


def test_hostile_outputs_are_inert(browser: Browser, tmp_path: Path) -> None:
    texts = [*HOSTILE.values(), "x" * 1_000_000, "<b>" * 100_000]
    documents = [Doc(t, t, t, t, 0.0, [t], fields={t: t, "__proto__": t, "constructor": [t]}) for t in texts]
    folder = write_generations(tmp_path / HOSTILE["entity"].replace("/", ""), documents)
    started = time.monotonic()
    tab = opened(browser, folder)
    assert len((folder / "report.html").read_bytes()) < 1_000_000, "long texts are cut"
    for place, text in enumerate(texts):
        tab.evaluate(f"report.openRow('samples', {place})")
        tab.wait(f"document.querySelector('dialog[open]')?.innerText.includes('document {place}')")
        if text == HOSTILE["script"]:
            assert text in tab.evaluate("document.querySelector('dialog').textContent")
    item = f"report.blocks('samples').get({len(HOSTILE)})"
    text = tab.evaluate(f"{item}.then(item => report.details.sample([], item)).then(node => node.textContent)")
    assert "980,000 characters left out" in text
    tab.press("Escape")
    search(tab, "onerror", f"1 of {len(texts)} samples")
    quiet(tab)
    assert tab.evaluate("Object.keys(Object.prototype).length") == 0
    assert time.monotonic() - started < 60
    tab.close()


@pytest.mark.parametrize("samples", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_thousands_of_samples(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    """Samples have gsm8k's sizes: prompts of 2,900 characters that no compression folds away, outputs of 120 tokens.

    A page of 20,000 has the real limits; one of fewer has as many bytes for each sample.
    """
    for limit in ("BUDGET", "CELL_BYTES", "FEW"):
        monkeypatch.setattr(page_samples, limit, getattr(page_samples, limit) * samples // 20_000)
    draw = random.Random(0)
    shots = [" ".join(f"{draw.getrandbits(40):x}" for _ in range(52)) for _ in range(500)]
    words = [[f"w{draw.randrange(5000)} " for _ in range(120)] for _ in range(samples)]
    made = [Doc("".join(w), "\n\n".join([*draw.sample(shots, 5), f"Question: {' '.join(w[:40])}"]), f"#### {n}", str(n),
                float(n % 3 == 0), w) for n, w in enumerate(words)]  # fmt: skip
    folder = write_generations(tmp_path / "large", made)
    path, size = write_run_report(folder)
    assert 750 * samples < size < 1_500 * samples
    tab = browser.open(path)
    assert tab.loaded < 4, "aim: 2 s on an idle machine"
    note = tab.evaluate("document.querySelector('#samples .note').innerText")
    assert f"{samples:,} texts are too long for this page" in note, "the prompts: the outputs are whole"
    assert len(docs(tab)) < 60, "rows out of sight are no elements"
    assert tab.evaluate("document.querySelectorAll('*').length") < 2000
    tab.evaluate("document.querySelector('.grid-body').scrollTop = 1e9")
    tab.wait(f"{ROWS}.at(-1)?.children[0].textContent === '{samples - 1:,}'")
    began = time.monotonic()
    tab.click(".grid-head [role=columnheader]:first-child button")
    tab.click(".grid-head [role=columnheader]:first-child button")
    tab.wait(f"document.querySelector('.grid-row').children[0].textContent === '{samples - 1:,}'")
    search(tab, f"#### {samples - 1}", f"1 of {samples:,} samples")
    assert time.monotonic() - began < 15
    quiet(tab)
    tab.close()


def test_choices_have_calibration_and_margins(browser: Browser, tmp_path: Path) -> None:
    sums = [[-1.0, -3.0, -2.0], [-4.0, -1.5, -9.0], [-2.0, -2.5, -30.0]]
    tab = opened(browser, write_choices(tmp_path / "run", sums, targets=[0, 2, 0]))
    text = tab.evaluate("document.querySelector('#likelihood').innerText")
    assert "Calibration error" in text and "1 of 3 within 1 nat" in text  # the margins are 1.0 (not less), -7.5, 0.5
    tab.evaluate("report.openRow('samples', 1)")
    tab.wait("document.querySelector('dialog[open] .choice')")
    rows = tab.evaluate("[...document.querySelectorAll('.choice')].map(c => [c.className, c.innerText])")
    assert [name for name, _ in rows] == ["choice", "choice chosen wrong", "choice target"]
    assert "92.4 %" in rows[1][1]  # 1 / (1 + e^-2.5 + e^-7.5)
    quiet(tab)
    tab.close()


def test_logprobs_that_are_not_finite_give_no_share_and_sort_last(browser: Browser, tmp_path: Path) -> None:
    """Such logprobs look like no certain token and give no share; their rows stay last in both orders."""
    sums = [[math.nan, -1.0, -2.0], [-1.0, -3.0, -3.0], [-math.inf] * 3, [-2.0, -3.0, -3.0]]
    tab = opened(browser, write_choices(tmp_path / "run", sums, targets=[1, 0, 0, 0]))
    tab.evaluate("report.openRow('samples', 0)")
    tab.wait("document.querySelector('dialog[open] .choice')")
    rows = tab.evaluate("[...document.querySelectorAll('.choice')].map(c => [c.className, c.innerText])")
    assert [name for name, _ in rows] == ["choice", "choice target", "choice"], "none is the likeliest"
    assert "not finite" in rows[0][1] and "-1.00" in rows[1][1]
    assert not any("%" in text or "NaN" in text for _, text in rows)
    heat = "[...document.querySelectorAll('.choice [data-token]')].map(s => s.style.getPropertyValue('--heat'))"
    assert [float(value) for value in tab.evaluate(heat)] == [0.75, 0.125, 0.25]
    tab.press("Escape")
    for order in (["3", "1"], ["1", "3"]):
        tab.click(".grid-head [role=columnheader]:last-child button")
        tab.wait(f"{ROWS}[0].children[0].textContent === '{order[0]}'")
        assert docs(tab) == [*order, "0", "2"]
    quiet(tab)
    tab.close()


def test_fast_beside_exact_shows_the_noise_floor(browser: Browser, tmp_path: Path) -> None:
    documents = [Doc(f"out {n}", answer=str(n)) for n in range(5)]
    exact = write_generations(tmp_path / "exact", documents)
    changed = [*documents[:4], Doc("elsewhere", answer="9", score=0.0)]
    write_generations(tmp_path / "fast", changed, numerics="fast", shift=-0.25)
    tab = opened(browser, exact)
    text = tab.evaluate("document.querySelector('#noise').innerText")
    assert re.search(r"Requests whose bits differ\s+5\s+of 5", text) and re.search(r"Outputs that diverge\s+1\s", text)
    assert "0.25 nat" in text and "-0.2000" in text
    assert "Time over fast's" in tab.evaluate("document.querySelector('#cost').innerText")
    quiet(tab)
    tab.close()
    assert "noise" not in [section["name"] for section in content(run_page(load_run_data(exact)))["sections"]]


def test_scores_between_0_and_1_are_numbers(tmp_path: Path) -> None:
    """A score between 0 and 1 is the mean of an item's repeats."""
    run = write_generations(tmp_path / "run", [Doc("4", score=score) for score in (1.0, 1 / 3, 0.0)])
    grid = embedded(write_run_report(run)[0], "grid-samples")
    place = [column["title"] for column in grid["columns"]].index("exact_match")
    assert grid["columns"][place]["kind"] == "number" and [row[place] for row in grid["rows"]] == [1.0, 0.3333, 0.0]


def test_long_texts_are_shown_by_their_ends() -> None:
    truncator = Truncator(prompt=4, other=8)
    assert truncator.prompt("abcd") == "abcd" and truncator.other("z" * 8) == "z" * 8 and truncator.count == 0
    assert truncator.other("a" * 10 + "z" * 10) == ["a" * 6, 12, "zz"]
    assert truncator.prompt("a" * 10 + "z" * 10) == ["a", 16, "zzz"], "of a prompt, its end is the question"
    assert truncator.count == 2
