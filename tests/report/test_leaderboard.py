"""`compare` of different models, as a user calls it: when it applies, its exit codes, its files and its page."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.formats import board_lines
from evalengine.report.read.load import load_run
from tests.browser import Browser
from tests.report.test_pages import HOSTILE, quiet
from tests.report.written_run import Doc, write_generations

Made = Callable[..., str]
RIGHT = {"good": range(14), "poor": range(5), "step-1000": range(3), "step-2000": range(9)}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes the folder of a model's run on 16 documents of three subjects, of which it has those in `right`."""

    def make(name: str, right: range | None = None, **more: str) -> str:
        solved = RIGHT[name] if right is None else right
        docs = [
            Doc(f"{n}", f"Question {n}\nAnswer:", score=float(n in solved), fields={"subject": "abcc"[n % 4]})
            for n in range(16)
        ]
        folder = tmp_path / re.sub(r"\W", "_", name)
        return str(write_generations(folder, docs, model=name, **{"weights": name.ljust(64, "w")[:64], **more}))  # type: ignore[arg-type]

    return make


def test_other_weights_are_compared_as_models_without_allow(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", made("good"), made("poor")]) == 1, "a script must not take them for the same"
    out = capsys.readouterr().out
    assert re.search(r"good +87\.5 +1 +a +\[64\.0, 96\.5\] ", out) and re.search(r"poor +31\.2 ", out)
    assert re.search(r"poor against good +-56\.2 +\[-94\.7, -17\.8\] +0 / 9 / 7 +0\.0039 +0\.0078 ", out)
    last = out.splitlines()[-1]
    assert last.startswith("verdict: 2 of 2 differences significant at 5 % (Holm); 0 of 16 answers changed; best on")
    assert "exact_match strict-match: good (87.5 %)" in last


def test_options_decide_whether_models_or_runs_are_compared(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, poor = made("good"), made("poor")
    same = made("again", right=RIGHT["good"], weights="good".ljust(64, "w"))
    assert main(["compare", good, poor, "--models"]) == 0 and "p (Holm)" in capsys.readouterr().out
    assert main(["compare", good, same]) == 0 and "verdict: IDENTICAL" in capsys.readouterr().out
    assert main(["compare", good, same, "--models"]) == 0 and "p (Holm)" in capsys.readouterr().out
    for words, error in (["--runs"], "The model weights differ"), (["--level", "answers"], "The model weights differ"):
        assert main(["compare", good, poor, *words]) == 2 and error in capsys.readouterr().err
    assert main(["compare", good, poor, "--allow"]) == 1
    assert "verdict: DIFFERENT" in capsys.readouterr().out
    assert main(["compare", good, poor, "--matrix"]) == 2
    assert "not comparable" in capsys.readouterr().out
    assert main(["compare", good, poor, "--runs", "--by", "subject"]) == 2
    assert "give either" in capsys.readouterr().err


def test_report_of_models_is_their_page(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, names = tmp_path / "c.html", [made("good"), made("poor")]
    assert main(["report", *names, "-o", str(page)]) == 0
    assert "<h1>2 models on sums, sums by subject</h1>" in page.read_text(encoding="utf-8")
    assert main(["report", *names, "-o", str(page), "--allow"]) == 0
    assert "<h1>Two runs of sums</h1>" in page.read_text(encoding="utf-8")


def test_subjects_have_a_table_with_both_means(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", made("good"), made("poor"), "--models"]) == 0
    table = capsys.readouterr().out.split("sums by subject: exact_match strict-match, %")[1]
    cells = [line.split() for line in table.splitlines()]
    rows = {" ".join(row[:-3]): row[-3:] for row in cells if len(row) > 3}
    assert rows["a"] == ["4", "100.0", "50.0"] and rows["c"] == ["8", "75.0", "25.0"]
    assert rows["macro mean"] == ["16", "91.7", "33.3"] and rows["micro mean"] == ["16", "87.5", "31.2"]
    assert main(["compare", made("step-1000"), made("step-2000"), "--by", "colour"]) == 2
    assert "no task's documents have this field with 2 to 500 values; their fields are question, subj" in (
        capsys.readouterr().err
    )


def test_groups_that_lm_eval_names_have_their_means(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tasks in a group of a group are listed with their means, and left out of the other metrics."""
    folders = []
    for name in ("good", "poor"):
        folder = tmp_path / f"lm-{name}"
        folder.mkdir()
        merged: dict[str, Any] = {}
        for task in ("x", "y"):
            source = Path(made(f"{name}-{task}", right=RIGHT[name], task=task))
            (samples,) = source.glob("samples_*.jsonl")
            (folder / samples.name).write_bytes(samples.read_bytes())
            (results_file,) = source.glob("results_*.json")
            for key, value in json.loads(results_file.read_text()).items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        merged["config"]["model_args"] = {"pretrained": name}
        merged["group_subtasks"] = {"all": ["inner"], "inner": ["x", "y"]}
        merged["results"]["inner"] = {"exact_match,strict-match": 0.5}
        (folder / results_file.name).write_text(json.dumps(merged))
        folders.append(str(folder))
    assert main(["compare", *folders, "--json", "-"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in content["groups"] if "by subject" not in group["name"]] == ["all", "inner"]
    inner = next(group for group in content["groups"] if group["name"] == "inner")
    assert [part["task"] for part in inner["parts"]] == ["x", "y"] and content["metrics"] == []
    assert [score["value"] for score in inner["means"][0]["scores"]] == [0.875, 0.3125]
    assert inner["means"][0]["tests"][0]["n"] == 32


def test_two_models_have_one_sentence_first(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made("first", right=range(8)), made("second", right=range(9))
    file = tmp_path / "c.md"
    main(["compare", a, b, "-o", str(file)])
    sentence = "second 6.2 points better than first (95 % CI "
    first = capsys.readouterr().out.splitlines()[0]
    assert sentence in first and first.endswith("no other of the 2 tests shows a difference.")
    head = file.read_text().splitlines()[0]
    assert head.startswith("**On sums exact") and "6.2 points better than first" in head


def test_two_models_show_what_went_from_right_to_wrong(
    made: Made, tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = made("first", right=range(8)), made("second", right=range(1, 9))
    page = tmp_path / "c.html"
    main(["compare", a, b, "--html", str(page)])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Right to wrong, from first (A) to second (B): 1 (and 1 from wrong to right)")
    assert lines[at + 1 : at + 4] == ["  sums doc 0", "    question Question 0 Answer:", "    target   #### 4"]
    tab = browser.open(page)
    titles = tab.evaluate("[...document.querySelectorAll('main section h2')].map(h => h.textContent)")
    assert titles[:2] == ["Metrics", "Right to wrong"]
    text = tab.evaluate("document.querySelector('.card').innerText")
    assert "Question 0" in text and "first" in text and "second" in text
    quiet(tab)
    tab.close()
    assert "Right to wrong" not in "".join(map(str, board_lines(board([load_run(run) for run in (a, b, b)]))))


def test_the_page_has_documents_links_churn_and_a_matrix(made: Made, tmp_path: Path, browser: Browser) -> None:
    folders = [made(name) for name in ("good", "poor", "step-1000")]
    main(["report", folders[0]])
    page = tmp_path / "models" / "c.html"
    page.parent.mkdir()
    main(["compare", *folders, "-o", str(page), "--names", "good,poor,early"])
    tab = browser.open(page)
    cells = "[...document.querySelectorAll('#tests .matrix')][0].querySelectorAll('.cell')"
    matrix = tab.evaluate(f"[...{cells}].map(c => [c.className, c.innerText.split(/\\s*\\n\\s*/)])")
    assert len(matrix) == 9 and [matrix[place][1] for place in (0, 4, 8)] == [["87.5"], ["31.2"], ["18.8"]]
    assert matrix[1] == ["cell same", ["+56.2", matrix[1][1][1], "0 answers differ"]]  # good against poor
    assert matrix[3][0] == "cell other" and matrix[3][1][0] == "-56.2"
    assert tab.evaluate("document.querySelector('#tests details').open") is False
    links = tab.evaluate("[...document.querySelectorAll('#models a')].map(a => a.href)")
    assert links == [(Path(folders[0]) / "report.html").resolve().as_uri()]  # the others have no page yet
    rows = "[...document.querySelectorAll('[data-grid=documents] .grid-row')]"
    assert tab.evaluate(f"{rows}.slice(0, 16).map(r => r.children[2].textContent)") == [
        *["3 of 3"] * 3, *["2 of 3"] * 2, *["1 of 3"] * 9, *["0 of 3"] * 2,
    ]  # fmt: skip
    tab.evaluate("report.openRow('documents', 4)")
    tab.wait("document.querySelector('dialog[open] table')")
    text = tab.evaluate("document.querySelector('dialog').innerText")
    assert "Question 4" in text and "#### 4" in text
    answers = "[...document.querySelectorAll('dialog tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    assert tab.evaluate(answers) == [["good", "4", "1"], ["poor", "4", "1"], ["early", "4", "0"]]
    quiet(tab)
    tab.close()


def test_files_of_every_kind_hold_scores_and_tests(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"t{ending}" for ending in (".md", ".tex", ".csv", ".html", ".svg")]
    words = [word for file in files for word in ("-o", str(file))]
    names = [made("step-2000"), made("step-1000")]
    assert main(["compare", *names, "--history", *words]) == 0
    markdown, latex, table, page, picture = (file.read_text(encoding="utf-8") for file in files)
    rows = [line for line in markdown.splitlines() if line.startswith("| step")]
    assert rows[0].startswith("| step-1000 | 18.8 [6.6, 43.0]") and "| 56.2" in rows[1], "in the steps' order"
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == latex.count("\\toprule") >= 4
    assert "exact\\_match" in latex and "56.2 {[}33.2, 76.9]" in latex and "\\textbf" not in latex, "a tie has no best"
    records = list(csv.DictReader(table.splitlines()))
    score = next(row for row in records if row["row"] == "score" and row["model"] == "step-2000")
    assert float(score["value"]) == 9 / 16 and score["documents"] == "16"
    assert [score[name] for name in ("rank_best", "rank_worst", "tie_group")] == ["1", "2", "a"]
    (test,) = [row for row in records if row["row"] == "test" and not row["mean"]]
    assert float(test["p"]) == 0.03125 and float(test["p_holm"]) == pytest.approx(2 * 0.03125)
    assert "<h1>2 models on sums, sums by subject</h1>" in page and ">1k<" in picture
    capsys.readouterr()
    assert main(["compare", *names, "--format", "csv"]) == 0
    assert {row["model"] for row in csv.DictReader(capsys.readouterr().out.splitlines())} == {"step-1000", "step-2000"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "x.docx"], "name a file that ends in .md, .tex, .csv, .html, .svg"),
        (["-o", "nowhere/x.md"], "there is no folder nowhere"),
        (["--names", "a"], "2 models need 2 different names"),
        (["--names", "a,a"], "2 models need 2 different names"),
    ],
)
def test_bad_usage_writes_nothing(
    words: list[str], message: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", made("good"), made("poor"), "-o", str(tmp_path / "t.csv"), *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out and not (tmp_path / "t.csv").exists()


def test_hostile_names_stay_text(browser: Browser, made: Made, tmp_path: Path) -> None:
    name = f'=cmd|"{HOSTILE["end of script"]}\\input{{x}}$ % _\n[x](y)'
    files = [tmp_path / f"t{ending}" for ending in (".md", ".tex", ".csv", ".html", ".svg")]
    words = [word for file in files for word in ("-o", str(file))]
    assert main(["compare", made("good"), made(name, right=range(2)), "--history", *words]) == 0
    markdown, latex, table, _, _ = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    uncommented = "".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert (
        not re.search(r"(?<!\\)<script", markdown)
        and "](y)" not in markdown.replace("\\]", "")
        and "\\input{" not in uncommented
    )
    assert not any(cell.startswith("=") for row in csv.reader(table.splitlines()) for cell in row)
    for file in files[3:]:
        tab = browser.open(file)
        quiet(tab)
        tab.close()


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_the_screen_and_draws_steps_as_a_history(
    width: int, browser: Browser, made: Made, tmp_path: Path
) -> None:
    page = tmp_path / "c.html"
    folders = [made(name) for name in ("step-1000", "step-2000", "good")]
    assert main(["compare", *folders, "-o", str(page), "--names", "first,second,last"]) == 0
    tab = browser.open(page, width=width)
    quiet(tab)
    text = tab.evaluate("document.body.innerText")
    assert "No model is ahead of all others; 2 of 6 differences are significant." in text
    assert "run 00000000" in text and "2026-01-02 03:04 UTC" in text
    assert "python -m evalengine task=sums 'output_dir=my results'" in text
    assert tab.evaluate("document.documentElement.scrollWidth") == width, "nothing is wider than the screen"
    assert tab.evaluate("document.querySelectorAll('#history svg').length") == 0
    tab.close()
    assert main(["compare", *folders[:2], made("step-9000", right=range(15)), "-o", str(page)]) == 0
    tab = browser.open(page, width=width)
    assert tab.evaluate("document.querySelectorAll('#history svg').length") == 2, (
        "the metric and its mean over subjects"
    )
    quiet(tab)
    tab.close()
