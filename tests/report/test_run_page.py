"""`report.html` of a run, driven in a browser as a reader would."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalengine.report.html.run_page import _verdict, write_run_report
from tests.browser import Browser, Tab
from tests.report.page_content import embedded
from tests.report.run_page_tab import docs, opened, search
from tests.report.test_pages import quiet
from tests.report.written_run import ISO, Doc, write_generations
from tests.run_double import bind_again


def choose(tab: Tab, label: str, value: str) -> None:
    """Chooses an option, by its text, in the select with this label."""
    tab.evaluate(
        f"(() => {{ const s = document.querySelector('select[aria-label={json.dumps(label)}]');"
        f" s.value = [...s.options].find(o => o.text === {json.dumps(value)}).value;"
        " s.dispatchEvent(new Event('change')); })()"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [Doc(f"the answer is {n}\n", f"Question: what is {n}?\nAnswer:", f"#### {n}", str(n), float(n % 4 != 0))
            for n in range(60)]  # fmt: skip
    documents[7] = Doc("pale blue needle", "Question: a haystack", "#### 7", "7", 0.0, finish="length", truncated=5)
    return write_generations(tmp_path_factory.mktemp("runs") / "exact", documents)


def test_the_page_says_what_the_run_says(browser: Browser, run: Path) -> None:
    tab = opened(browser, run)
    quiet(tab)
    text = tab.evaluate("document.body.innerText")
    assert "sums on tiny" in text and "Reproducible bit for bit" in text
    assert (run / "digest.txt").read_text().strip() in text
    assert "73.3 %" in text and "95 %: 61.0 to 82.9" in text  # 44 of 60: Wilson's interval, by R's binom::binom.wilson
    assert "1 of 60 outputs (1.7 %) ran into the length limit" in text
    assert "1 of 60 prompts were cut from the left" in text
    titles = tab.evaluate("[...document.querySelectorAll('nav a')].map(a => a.textContent)")
    cost = "Time and memory, exact numerics"
    assert titles == ["Metrics", "Lengths, endings and logprobs", "Samples", cost, "Manifest"]
    tab.close()


@pytest.mark.parametrize(
    ("architecture", "expected"), [("Tiny", "or machine changes"), ("Tiny by transformers 5.24.0", "one kind of CPU")]
)
def test_the_promise_of_exact_is_that_of_the_implementation(architecture: str, expected: str) -> None:
    """transformers' own modules take cos, sin and exp from torch, which differ between kinds of CPU."""
    manifest = SimpleNamespace(numerics="exact", model=SimpleNamespace(architecture=architecture))
    data: Any = SimpleNamespace(run=SimpleNamespace(manifest=manifest, items=[]), samples={})
    title, text, _ = _verdict(data)
    assert expected in text and ("one kind of CPU" in title) == (architecture != "Tiny")


def test_samples_are_searched_filtered_and_sorted(browser: Browser, run: Path) -> None:
    tab = opened(browser, run)
    assert docs(tab)[:3] == ["0", "1", "2"]
    search(tab, "blue NEEDLE", "1 of 60 samples")  # the text lies in a block: no cell shows outputs
    assert docs(tab) == ["7"]
    search(tab, "nowhere to be found", "0 of 60 samples")
    search(tab, "", "60 samples")
    choose(tab, "exact_match", "wrong")
    tab.wait("document.querySelector('.count').textContent === '16 of 60 samples'")
    assert docs(tab)[:4] == ["0", "4", "7", "8"]
    search(tab, "what is 1", "2 of 60 samples")  # search and choice hold at once
    assert docs(tab) == ["12", "16"]
    search(tab, "", "16 of 60 samples")
    choose(tab, "exact_match", "exact_match: all")
    tab.click(".grid-head [role=columnheader]:first-child button")
    tab.click(".grid-head [role=columnheader]:first-child button")
    tab.wait("document.querySelector('[aria-sort=descending]')")
    assert docs(tab)[:3] == ["59", "58", "57"]
    tab.click(".grid-head [role=columnheader]:nth-child(3) button")  # answers are texts, and sort as numbers do
    tab.wait("document.querySelector('[aria-sort=ascending] .text')")
    assert docs(tab)[8:12] == ["8", "9", "10", "11"]
    quiet(tab)
    tab.close()


def test_the_panel_of_a_sample_shows_its_texts_and_tokens(browser: Browser, run: Path) -> None:
    tab = opened(browser, run)
    tab.click(".grid-row[data-row='7']")
    tab.wait("document.querySelector('dialog[open] .tokens')")
    text = tab.evaluate("document.querySelector('dialog').innerText")
    for part in (
        "sums, document 7",
        "pale blue needle",
        "Question: a haystack",
        "#### 7",
        "the length limit",
        "5 tokens",
    ):
        assert part in text, part
    titles = tab.evaluate("[...document.querySelectorAll('dialog h3')].map(h => h.textContent)")
    assert titles == ["Output", "Target", "Prompt", "Document"]
    heat = tab.evaluate("[...document.querySelectorAll('.tokens span')].map(s => s.style.getPropertyValue('--heat'))")
    assert [float(value) for value in heat[:3]] == [0.0, 0.013, 0.025]  # logprobs 0, -0.1, -0.2 of 6 nat, times 0.75
    tab.click(".tokens [data-token='2']")
    assert "logprob -0.200, probability 81.9 %" in tab.evaluate("document.querySelector('.readout').innerText")
    tab.press("ArrowRight")
    tab.wait("document.querySelector('dialog').innerText.includes('document 8')")
    assert tab.evaluate("location.hash") == "#samples=8"
    tab.press("Escape")
    tab.wait("!document.querySelector('dialog').open")
    tab.evaluate("location.hash = 'samples=3'")
    tab.wait("document.querySelector('dialog[open]').innerText.includes('document 3')")
    # This row is asked for before the event of the closing has come.
    tab.evaluate("(() => { document.querySelector('dialog').close(); location.hash = 'samples=5' })()")
    tab.wait("document.querySelector('dialog[open]').innerText.includes('document 5')")
    assert tab.evaluate("location.hash") == "#samples=5"
    tab.press("Escape")
    tab.wait("location.hash === '' && !document.querySelector('dialog').open")
    quiet(tab)
    tab.close()


def test_a_page_says_when_by_what_and_under_which_id(browser: Browser, run: Path, tmp_path: Path) -> None:
    tab = opened(browser, run)
    facts = "[...document.querySelectorAll('.origin .facts > div')].map(d => [...d.children].map(c => c.textContent))"
    assert tab.evaluate(facts) == [
        ["Date", "2026-01-02 03:04 UTC"],
        ["Run", "00000000"],
        ["Command", "python -m evalengine task=sums 'output_dir=my results'"],
        ["Digest", f"{(run / 'digest.txt').read_text().strip()} (equal digests mean equal bits)"],
    ]
    tab.close()
    for changes, note in ({"command": None}, "started from Python"), ({"command": None, "started": None}, "older run"):
        folder = write_generations(tmp_path / note.replace(" ", "_"), [Doc("a"), Doc("b")])
        bind_again(folder, **changes)
        assert note in write_run_report(folder)[0].read_text(encoding="utf-8")


@pytest.mark.parametrize(("row", "look", "answer"), [(4, "wrong", "4"), (5, "right", "5")])
def test_a_sample_shows_the_answer_beside_its_target(
    row: int, look: str, answer: str, browser: Browser, run: Path
) -> None:
    tab = opened(browser, run)
    tab.evaluate(f"report.openRow('samples', {row})")
    tab.wait("document.querySelector('dialog[open] .judged')")
    marks = tab.evaluate("[...document.querySelectorAll('.judged mark')].map(m => [m.className, m.textContent])")
    assert marks == [[look, answer], ["right", f"#### {answer}"]]
    assert f"Answer: {look}" in tab.evaluate("document.querySelector('.judged').innerText")
    quoted = tab.evaluate("[...document.querySelectorAll('.tokens .said')].map(s => [s.className, s.textContent])")
    assert quoted == [[f"said {look}", answer]], "where the output says it"
    assert tab.evaluate("document.querySelector('dialog code').className") == look
    tab.evaluate("report.openRow('samples', 7)")
    tab.wait("document.querySelector('dialog').innerText.includes('document 7')")
    assert tab.evaluate("document.querySelectorAll('.tokens .said').length") == 0, "its output does not say its answer"
    quiet(tab)
    tab.close()


def test_plots_are_folded_on_a_phone(browser: Browser, run: Path) -> None:
    tab = opened(browser, run)
    states = "[...document.querySelectorAll('details.fold')].map(d => d.open)"
    assert tab.evaluate(states) == [True]
    assert tab.evaluate("document.querySelector('details.fold > summary').offsetHeight") == 0, "alone it needs no name"
    tab.close()
    tab = opened(browser, run, width=390, height=844)
    assert tab.evaluate(states) == [False]
    folded = tab.evaluate("document.documentElement.scrollHeight")
    tab.click("details.fold > summary")
    tab.wait("document.querySelector('details.fold').open")
    assert tab.evaluate("document.documentElement.scrollHeight") - folded > 600, "four plots, one below the other"
    assert "sums: 4 plots" in tab.evaluate("document.querySelector('details.fold > summary').innerText")
    quiet(tab)
    tab.close()


def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Browser, run: Path) -> None:
    tab = opened(browser, run, width=390, height=844, dark=True)
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate("document.querySelectorAll('.grid-row')[0].children.length") == 3
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
    tab.evaluate("report.openRow('samples', 3)")
    tab.wait("document.querySelector('dialog[open] .tokens')")
    assert tab.evaluate("document.querySelector('dialog').scrollWidth") <= 390
    quiet(tab)
    tab.close()


def test_lm_evals_folders_and_old_runs_without_tokens_have_pages(browser: Browser, run: Path, tmp_path: Path) -> None:
    """One folder holds lm-eval's two files only, the other is of a run from before tokens.json."""
    old, foreign = tmp_path / "old", tmp_path / "foreign"
    for folder, names in ((old, ["*"]), (foreign, ["results_*", "samples_*"])):
        folder.mkdir()
        for file in (
            file for name in names for file in run.glob(name) if file.name not in ("tokens.json", "report.html")
        ):
            (folder / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["files"], manifest["sha256"]  # runs without tokens.json listed no files either
    manifest["identity"].pop("model_spec", None)
    (old / "manifest.json").write_text(json.dumps(manifest))
    tab = opened(browser, old)
    tab.evaluate("report.openRow('samples', 2)")
    tab.wait("document.querySelector('dialog[open] .tokens')")
    assert re.search(r"\[\d+\]\[\d+\]", tab.evaluate("document.querySelector('.tokens').textContent")), (
        "ids in brackets"
    )
    quiet(tab)
    tab.close()
    tab = opened(browser, foreign)
    assert "Read from an lm-eval folder" in tab.evaluate("document.body.innerText")
    tab.evaluate("report.openRow('samples', 2)")
    tab.wait("document.querySelector('dialog[open] pre')")
    assert "the answer is 2" in tab.evaluate("document.querySelector('dialog').innerText")
    quiet(tab)
    tab.close()


def test_the_numbers_in_the_file_are_those_of_the_samples(run: Path) -> None:
    """Without a browser: the embedded rows, unpacked, against the samples file."""
    page = write_run_report(run)[0].read_text(encoding="utf-8")
    grid = embedded(run / "report.html", "grid-samples")
    rows = [json.loads(line) for line in (run / f"samples_sums_{ISO}.jsonl").read_text().splitlines()]
    assert [row[0] for row in grid["rows"]] == [row["doc_id"] for row in rows]
    assert [row[4] for row in grid["rows"]] == [row["exact_match"] == 1.0 for row in rows]
    block = page.split('id="block-samples-0">')[1].split("</script>")[0]
    requests = [item[5][0] for item in json.loads(gzip.decompress(base64.b64decode(block)))]
    assert [request[5][: request[1]] for request in requests] == [row["resps"][0][0] for row in rows]
