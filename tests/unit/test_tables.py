"""Tables on terminals of any width: every cell is there, and numbers and names stay whole."""

from __future__ import annotations

import io
import re
from collections import Counter

import pytest
from rich.cells import cell_len
from rich.console import Console

from evalengine.__main__ import main
from evalengine.util.sheet import Sheet
from evalengine.util.tables import print_lines, print_sheet, wrapped

HEADINGS = ("Task", "Filter", "Metric", "A", "B", "95% interval", "Needs")
ROWS = [
    [
        "  mmlu_high_school_biology (2 of 3)",
        "strict-match",
        "exact_match",
        "0.6667",
        "0.5000",
        "[-0.1980, +0.1980]",
        "",
    ],
    ["arithmetic", "none", "acc, acc_norm", "1,234.5", "", "none", "pip install evalengine[lm-eval]; 多言語の名前"],
]


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, soft_wrap=True)


def printed(width: int, terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, soft_wrap=True)
    with console.capture() as captured:
        print_sheet(Sheet("", HEADINGS, ROWS, (0, 1, 2, 6)), console)
    return captured.get()


def letters(text: str) -> Counter[str]:
    return Counter(re.sub(r"[\s─]", "", text))


@pytest.mark.parametrize("width", [*range(47, 160, 7), 80, 120, 200])
def test_nothing_is_cut(width: int) -> None:
    text = printed(width)
    cells = [cell for row in ROWS for cell in row]
    assert "…" not in text and letters("".join(cells)) - letters(text) == Counter()
    for whole in ("mmlu_high_school_biology", "0.6667", "1,234.5", "[-0.1980, +0.1980]"):
        assert whole in text
    assert max(map(len, text.splitlines())) <= width


def test_three_layouts() -> None:
    wide, folded, rows = printed(200), printed(110), printed(80)
    assert len(wide.splitlines()) == 6 and "pip install evalengine[lm-eval]" in wide
    assert folded.count("Task") == 1 and "pip install evalengine[lm-eval]" not in folded
    assert rows.count("Task") == 2 and re.search(r"^ 95% interval +\[-0.1980, \+0.1980\]", rows, re.M)


def test_a_pipe_gets_the_whole_width() -> None:
    text = printed(40, terminal=False)
    assert text == printed(200, terminal=False) and len(text.splitlines()) == 6 and "95% interval" in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_list_of_tasks(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal, as `FORCE_COLOR` makes rich believe."""
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    assert main(["tasks"]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "…" not in text
    assert all(name in text for name in ("gpqa_extended_zeroshot", "humaneval_64_instruct", "14,042", "633f5ee8"))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_prose_ends_its_lines_between_words(width: int) -> None:
    prose = "  - W/L/T: documents on which B is better, worse and equal; 多言語の名前, " * 4 + "results/" + "x" * 130
    command = "Next: python -m evalengine explain results/a results/b --item arithmetic/3 " + "y" * 99
    lines = wrapped(prose, terminal(width))
    assert " ".join(line.strip() for line in lines).split() == prose.split() and len(lines) > 3
    assert all(cell_len(line) <= width for line in lines if "xxx" not in line)
    assert all(line.startswith("    ") for line in lines[1:]) and lines[0].startswith("  - W/L/T")
    assert wrapped(command, terminal(width)) == [command], "a command is pasted"
    assert wrapped(prose, Console(file=io.StringIO(), width=width)) == [prose], "a pipe has no width"


def test_what_commands_print_is_wrapped() -> None:
    console = terminal(80)
    print_lines(["so many words " * 20], console)
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


def test_a_list_of_tasks_in_a_pipe_has_no_blanks_at_its_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    assert max(map(len, lines)) <= 190 and main(["tasks", "ifeval"]) == 0
    assert "inst_level_loose_acc" in capsys.readouterr().out, "one task's metrics are all named"
