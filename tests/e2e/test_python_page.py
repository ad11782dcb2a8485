"""evalengine/README.md, whose examples are run as they are written."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "evalengine" / "README.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(text: str, flags: int = FLAGS) -> doctest.TestResults:
    """Runs the text's examples, and counts those that were tried and those that failed."""
    # doctest takes all up to an empty line as output, so on the page an empty line precedes each closing fence.
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    return doctest.DocTestRunner(optionflags=flags).run(test)


def test_every_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = examples(PAGE.read_text(encoding="utf-8"))
    assert results.attempted >= 15 and results.failed == 0


def test_a_wrong_example_fails() -> None:
    assert examples(">>> import evalengine\n>>> evalengine.CONTRACT_VERSION\n0\n").failed == 1
