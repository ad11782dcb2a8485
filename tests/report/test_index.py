"""`index.html` of a folder of runs: what it lists, what it says of damage, and that no run waits or fails for it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.cli import run as command
from evalengine.errors import EvalEngineError
from evalengine.harness import runner
from evalengine.report.html import index_page
from evalengine.report.html.index_page import write_index
from evalengine.report.html.on_complete import refresh_index
from evalengine.report.read.index import DAMAGED, UNFINISHED, entries
from evalengine.report.read.names import INDEX, SWEEP_FORMAT
from tests.browser import Browser
from tests.report.grouped_run import write_grouped
from tests.report.page_content import embedded
from tests.report.test_pages import quiet
from tests.report.written_run import Doc, write_choices, write_generations
from tests.run_double import bind_again

DOCS = [Doc(f"{n}", score=float(n > 0)) for n in range(4)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    for number, (name, docs) in enumerate({"first": DOCS, "other": [*DOCS[:3], Doc("x", score=0.0)]}.items()):
        write_generations(root / name, docs)
        bind_again(root / name, started=f"2026-01-0{number + 2}T03:04:05Z")
    write_choices(root / "choices", [[-1.0, -2.0]], targets=[1])
    return root


def rows(page: Path) -> list[list[Any]]:
    """The rows of the page's list of runs."""
    listed: list[list[Any]] = embedded(page, "grid-runs")["rows"]
    return listed


def titles(page: Path) -> list[str]:
    """The columns of the page's list of runs."""
    return [column["title"] for column in embedded(page, "grid-runs")["columns"]]


def test_every_run_is_a_row_with_what_it_gave(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().out == f"{results / 'index.html'}: 3 runs\n"
    listed = rows(results / "index.html")
    assert [row[:5] for row in listed if row[2] == "sums"] == [
        ["2026-01-03 03:04", "tiny", "sums", "exact_match strict-match", 0.5],
        ["2026-01-02 03:04", "tiny", "sums", "exact_match strict-match", 0.75],
    ]
    assert {row[2] for row in listed} == {"sums", "pick"} and titles(results / "index.html")[5:] == [
        *("95 %", "Digest", "Numerics"),
    ]
    assert [row[5] for row in listed if row[2] == "sums"] == ["0.4804 to 0.5196", "0.7299 to 0.7691"]  # stderr 0.01
    digest = json.loads((results / "first" / "manifest.json").read_text())["task_digests"]["sums"]
    assert digest[:10] in {row[6] for row in listed}


def test_the_latest_baseline_of_the_task_judges(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age in (("first", 10), ("other", 99)):
        file = results.parent / f"{name}.json"
        assert main(["baseline", str(results / name), "-o", str(file)]) == 0
        os.utime(file, (2e9 - age, 2e9 - age))
    write_generations(results / "longer", [*DOCS[:3], Doc("more", score=0.0)])
    write_generations(results / "third", DOCS, model="big", weights="b" * 64)
    (results.parent / "broken.json").write_text('{"format": "evalengine-baseline"')
    verdicts = {entry.folder.name: (entry.baseline, entry.verdict) for entry in entries(results)}
    assert verdicts == {
        "first": ("first.json", "same bits"),
        "other": ("first.json", "was 0.7500: the same bits, scored otherwise"),  # its ids equal those of the first
        "longer": ("first.json", "was 0.7500"),
        "third": ("first.json", "same bits"),  # a digest covers no weights, and the outputs are equal
        "choices": ("", ""),
    }
    os.utime(results.parent / "other.json", (2e9, 2e9))
    assert {e.verdict for e in entries(results) if e.folder.name == "other"} == {"same bits"}
    write_generations(results / "fourth", [Doc("z", score=0.0)] * 4, model="big", weights="b" * 64)
    assert [e.verdict for e in entries(results) if e.folder.name == "fourth"] == ["was 0.5000, another model"]


def test_damaged_and_unfinished_runs_are_listed_as_such(results: Path) -> None:
    for name in ("manifest", "digest", "results", "gone", "unbound"):
        write_generations(results / name, DOCS)
    manifest = json.loads((results / "manifest" / "manifest.json").read_text())
    (results / "manifest" / "manifest.json").write_text(json.dumps({**manifest, "run_id": "x"}))
    (results / "digest" / "digest.txt").write_text("0" * 64)
    (edited,) = (results / "results").glob("results_*.json")
    edited.write_text(edited.read_text().replace("0.75", "0.99"))
    next((results / "gone").glob("results_*.json")).unlink()
    (results / "unbound" / "manifest.json").write_text("[1, 2")
    (results / "half").mkdir()
    (results / "half" / "journal.jsonl").write_text("")
    path, count = write_index(results)
    by_name = {entry.folder.name: entry for entry in entries(results)}
    assert count == 9 and {n: e.state for n, e in by_name.items() if e.state != "finished"} == {
        **dict.fromkeys(("manifest", "digest", "results", "gone", "unbound"), DAMAGED),
        "half": UNFINISHED,
    }
    for name, message in (("manifest", "edited or damaged"), ("digest", "not the digest"), ("results", "not the file"),
                       ("gone", "missing"), ("unbound", "damaged")):  # fmt: skip
        assert message in by_name[name].problem, name
        assert any(row[6].startswith("damaged: ") and row[2] == name for row in rows(path))


def test_runs_of_experiments_and_lm_evals_folders_are_there(results: Path, tmp_path: Path) -> None:
    sweep = results / "noise_floor-sums-tiny-x"
    write_generations(sweep / "1-max_num_seqs_1" / "run", DOCS)
    (sweep / "noise_floor.json").write_text(json.dumps({"format": SWEEP_FORMAT, "runs": []}))
    foreign = results / "org__model"
    foreign.mkdir()
    for file in (results / "first").glob("results_*.json"):
        shutil.copy(file, foreign)
    by_place = {str(entry.folder.relative_to(results)): entry for entry in entries(results)}
    assert by_place["noise_floor-sums-tiny-x/1-max_num_seqs_1/run"].digest
    assert by_place["org__model"].metrics[0].value == 0.75 and not by_place["org__model"].digest


def test_no_run_in_a_folder_is_refused_and_a_single_run_gets_its_page(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results.parent / "empty").mkdir()
    assert main(["report", str(results.parent / "empty")]) == 2
    assert "no run in this folder" in capsys.readouterr().err
    assert main(["report", str(results / "first")]) == 0
    assert "report.html" in capsys.readouterr().out


def test_a_run_leaves_the_list_and_never_fails_for_it(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = results / "first"
    monkeypatch.setattr(runner, "run", lambda config, done, *rest: done(folder) or folder)
    assert command.command()([]) == 0
    assert len(rows(results / "index.html")) == 3 and capsys.readouterr().out.splitlines()[-1].startswith("digest: ")
    (results / "index.html").unlink()
    (results / "index.html").mkdir()  # the disk refuses
    assert command.command()([]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("digest: ") and f"python -m evalengine report {results}" in err
    assert sorted(path.name for path in results.iterdir() if "index" in path.name) == ["index.html"], "no scratch file"

    def broken(root: Path, target: Path | None = None) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(index_page, "write_index", broken)
    assert command.command()([]) == 0 and "RuntimeError: planted" in capsys.readouterr().err


def test_a_group_is_one_row_and_its_tasks_are_in_its_panel(tmp_path: Path, browser: Browser) -> None:
    scores = {f"t{n}": [1.0, 0.0, 1.0, 1.0] for n in range(5)}
    write_grouped(tmp_path / "results" / "many", scores, {"all": ["low", "t3", "t4"], "low": ["t0", "t1", "t2"]})
    root = tmp_path / "grouped"
    root.mkdir()
    (tmp_path / "results" / "many").rename(root / "many")
    path, _ = write_index(root)
    (row,) = rows(path)
    assert row[1:4] == ["all", "exact_match strict-match", 0.75], "no run has a date"
    tab = browser.open(path)
    tab.evaluate("report.openRow('runs', 0)")
    tab.wait("document.querySelector('dialog[open] details')")
    names = tab.evaluate("[...document.querySelectorAll('dialog details tbody tr')].map(r => r.cells[0].textContent)")
    assert names == ["low", "t0", "t1", "t2", "t3", "t4"]
    quiet(tab)
    tab.close()


def test_two_ticked_runs_give_the_command_that_compares_them(results: Path, browser: Browser) -> None:
    path, _ = write_index(results)
    tab = browser.open(path)
    order = [(row[0], row[2]) for row in rows(path)]
    newer, older = (order.index((f"2026-01-0{day} 03:04", "sums")) for day in (3, 2))
    for place in (newer, older):
        tab.click(f".grid-row[data-row='{place}'] input")
    tab.wait("document.querySelector('.picked code')")
    said = tab.evaluate("document.querySelector('.picked code').textContent")
    assert said == f"python -m evalengine compare {results / 'first'} {results / 'other'}"  # A is the older one
    assert not tab.evaluate("!!document.querySelector('dialog[open]')")  # a tick opens no panel
    tab.click(f".grid-row[data-row='{newer}'] input")
    tab.wait("document.querySelector('.picked').innerText.includes('tick another')")
    quiet(tab)
    tab.close()


def test_scores_over_time_are_drawn_with_their_intervals(results: Path, browser: Browser) -> None:
    path, _ = write_index(results)
    assert "Scores over time" not in path.read_text()  # two runs are no trend
    write_generations(results / "third", DOCS)
    bind_again(results / "third", started="2026-01-05T03:04:05Z")
    tab = browser.open(write_index(results)[0])
    tab.wait("document.querySelector('#trends circle')")
    titles_ = "[...document.querySelectorAll('#trends circle title')].map(t => t.textContent)"
    assert tab.evaluate(titles_) == [
        "2026-01-02 03:04: 0.7500, first", "2026-01-03 03:04: 0.5000, other", "2026-01-05 03:04: 0.7500, third",
    ]  # fmt: skip
    assert tab.evaluate("document.querySelectorAll('#trends .whisker').length") == 3
    quiet(tab)
    tab.close()


def test_a_row_opens_the_runs_page(results: Path, browser: Browser) -> None:
    hard = results / "a #1 & 50%"
    write_generations(hard, DOCS, model='"><img src=x onerror="window.pwned=1">')
    assert main(["report", str(hard)]) == 0 == main(["report", str(results)])
    for width in (390, 1200):
        tab = browser.open(results / "index.html", width=width)
        place = next(n for n, row in enumerate(rows(results / "index.html")) if "img" in row[1])
        tab.evaluate(f"report.openRow('runs', {place})")
        tab.wait("document.querySelector('dialog[open] a')")
        text = tab.evaluate("document.querySelector('dialog').innerText")
        assert "python -m evalengine task=sums 'output_dir=my results'" in text and "0.7500" in text
        href = tab.evaluate("document.querySelector('dialog a').href")
        assert href == (hard / "report.html").resolve().as_uri()
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        quiet(tab)
        tab.close()


def test_somebody_elses_page_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output folder may be the place of a site; a list that evalengine wrote is written anew each time."""
    write_generations(tmp_path / "run", [Doc("a"), Doc("b", score=0.0)])
    write_index(tmp_path)
    write_index(tmp_path)
    (tmp_path / INDEX).write_text("<!doctype html><title>My site</title>evalengine")
    with pytest.raises(EvalEngineError, match=r"index\.html: not a list of runs that evalengine wrote"):
        write_index(tmp_path)
    refresh_index(tmp_path)
    assert "it stays as it is" in capsys.readouterr().err and "My site" in (tmp_path / INDEX).read_text()
    path, _ = write_index(tmp_path, tmp_path / "runs.html")
    assert path.is_file()


def test_runs_of_a_sweep_are_told_apart(results: Path) -> None:
    """Their dates, tasks, models and often their scores are the same."""
    first = {"temperature": 0.0, "until": ["x"]}
    for name, limit, batch, numerics, generation in (
        *(("first", 8, 1, "exact", first), ("other", None, 64, "fast", {**first, "temperature": 0.5})),
    ):
        content = json.loads((results / name / "manifest.json").read_text())
        own = {
            **content["identity"],
            "limit": limit,
            "enable_thinking": limit is None,
            "seed": 0,
            "tasks": {"sums": {"generation": generation}},
        }
        engine = {**content["engine"], "max_num_seqs": batch, "num_kv_blocks": batch}
        bind_again(results / name, identity=own, engine=engine, numerics=numerics)
    path, _ = write_index(results)
    numerics, changed = (titles(path).index(name) for name in ("Numerics", "Changed"))
    assert {(row[numerics], row[changed]) for row in rows(path) if row[2] == "sums"} == {
        ("exact", "limit=8, enable_thinking=false, engine.max_num_seqs=1, tasks.sums.generation.temperature=0.0"),
        ("fast", "limit=null, enable_thinking=true, engine.max_num_seqs=64, tasks.sums.generation.temperature=0.5"),
    }


@pytest.mark.parametrize("width", [320, 375, 1200])
def test_no_score_is_cut(width: int, results: Path, browser: Browser) -> None:
    (results / "first").rename(results / "arithmetic-of-a-long-name")
    tab = browser.open(write_index(results)[0], width=width)
    tab.wait("document.querySelectorAll('.grid-row').length === 3")
    places = tab.evaluate(
        "[...document.querySelectorAll('.grid-row .number')].map(cell => [cell.scrollWidth - cell.clientWidth, "
        "cell.getBoundingClientRect().right - document.querySelector('.grid-body').getBoundingClientRect().right])"
    )
    assert len(places) >= 3 and all(cut <= 0 and beyond <= 0 for cut, beyond in places)
    quiet(tab)
    tab.close()
