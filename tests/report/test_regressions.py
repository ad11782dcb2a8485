"""What went from right to wrong, with question, target, both answers and the parting in one view."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.report.read.documents import questions_of
from evalengine.report.read.load import load_run
from tests.browser import Browser
from tests.report.test_pages import quiet
from tests.report.written_run import Doc, write_choices, write_generations

SHOTS = "Question: an example of two?\nAnswer: 2\n\n"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of 120 documents, of which documents 7 and 113 got worse and 30 better."""

    def doc(number: int, right: bool) -> Doc:
        answer = str(number if right else number + 1000)
        question = f"{SHOTS}Question: what number is document {number} of this set?\n\nAnswer:"
        score = float(right)
        return Doc(f"It is {answer}.", question, f"So it is.\n#### {number}", answer, score, finish="stop")

    docs = [[doc(n, n not in wrong) for n in range(120)] for wrong in ({30}, {7, 113})]
    folders = [write_generations(tmp_path / name, own) for name, own in zip("ab", docs, strict=True)]
    return folders[0], folders[1]


def test_the_terminal_shows_all_of_a_regression(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, runs)]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Right to wrong: 2 (and 1 from wrong to right)")
    assert lines[at + 1 : at + 6] == [
        "  sums doc 7",
        "    question Question: what number is document 7 of this set? Answer:",  # without the examples before it
        "    target   #### 7",
        "    A        7",
        "    B        1007",
    ]
    assert lines[at + 6].startswith("    diverges at token 6, gap ") and lines[at + 6].endswith(
        "'It is ', then '7.' or '1007.'"
    )
    assert lines[at + 7] == "  sums doc 113"


def test_the_page_shows_them_first(runs: tuple[Path, Path], tmp_path: Path, browser: Browser) -> None:
    main(["compare", *map(str, runs), "--html", str(tmp_path / "c.html")])
    tab = browser.open(tmp_path / "c.html")
    assert tab.evaluate("document.querySelector('main section h2').textContent") == "Right to wrong"
    cards = tab.evaluate("[...document.querySelectorAll('.card')].map(c => c.innerText.split(/\\s*\\n\\s*/))")
    assert len(cards) == 2
    for part in ("Question: what number is document 113 of this set?", "#### 113", "113", "1113", "1113."):
        assert any(part in line for line in cards[1]), part
    assert not any("example of two" in line for line in cards[1])
    quiet(tab)
    tab.close()


def test_markdown_has_the_sentence_and_the_regressions(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, runs), "--table", "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| Document", "| Task"))]
    first, second = heads[1][3:]  # the runs are called the same everywhere
    assert heads[0][3:5] == [first, second] and lines[0].endswith(": not significant over 120 documents.**")
    assert lines[0].startswith(f"**{second} 0.8 points worse than {first} (95 % CI ")
    assert lines[2] == "3 documents changed: 3 scores." and "### Right to wrong: 2" in lines
    (row,) = [line for line in lines if line.startswith("| sums doc 113 |")]
    assert "what number is document 113 of this set? Answer: | &#35;### 113 | 113 | 1113 | at token 8" in row
    assert any(line.startswith("| sums | exact") for line in lines)  # the results follow
    assert main(["report", str(runs[0]), "--table", "md"]) == 0
    assert capsys.readouterr().out.startswith("| Task")  # of one run there is nothing to say


@pytest.mark.parametrize("name", ["flips", "outputs"])
def test_a_panel_has_the_question_and_the_target(
    name: str, runs: tuple[Path, Path], tmp_path: Path, browser: Browser
) -> None:
    main(["compare", *map(str, runs), "--html", str(tmp_path / "c.html")])
    tab = browser.open(tmp_path / "c.html")
    tab.evaluate(f"report.openRow('{name}', 2)")
    tab.wait("document.querySelector('dialog[open] pre')")
    text = tab.evaluate("document.querySelector('dialog').textContent")
    assert "what number is document 113 of this set?" in text and "#### 113" in text and "1113" in text
    tab.close()


@pytest.mark.parametrize("width", [390, 1400])
def test_documents_numbers_are_whole(width: int, runs: tuple[Path, Path], tmp_path: Path, browser: Browser) -> None:
    main(["compare", *map(str, runs), "--html", str(tmp_path / "c.html")])
    tab = browser.open(tmp_path / "c.html", width=width)
    for name in ("flips", "outputs"):
        cells = f"[...document.querySelectorAll('[data-grid={name}] .grid-row > div:first-child')]"
        assert tab.evaluate(f"{cells}.map(c => [c.textContent, c.scrollWidth <= c.clientWidth])") == [
            ["7", True], ["30", True], ["113", True],
        ]  # fmt: skip
    tab.close()


def test_choices_have_their_right_one_as_target(tmp_path: Path) -> None:
    a = load_run(write_choices(tmp_path / "a", [[-1.0, -2.0], [-1.0, -2.0]], [0, 1]))
    questions = questions_of((a,), {("pick", 1)})
    assert questions["pick", 1].target == "1: choice 1" and questions["pick", 1].question == "Question 1"
    assert questions_of((a,), set()) == {}
