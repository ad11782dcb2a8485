"""The generator of word problems: right arithmetic, stable streams, and a test split that training never sees."""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from random import Random

import pytest

from tests.tinymath import word_problems
from tests.tinymath.story_templates import CHANGES, ENDINGS, STARTS, TEMPLATES
from tests.tinymath.word_problems import (
    TEST_ROWS,
    Difficulty,
    Problem,
    exclusion_hashes,
    generate,
    held_out_split,
    training_stream,
)

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(islice(training_stream(11), 4000))


def test_every_line_holds_one_true_calculation_and_the_last_is_the_answer(problems: list[Problem]) -> None:
    for problem in problems:
        lines = problem.rationale.split("\n")
        assert 2 <= len(lines) <= 4, problem
        for line in lines:
            terms = CALCULATION.findall(line)
            assert len(terms) == 1, line
            left, op, right, result = int(terms[0][0]), terms[0][1], int(terms[0][2]), int(terms[0][3])
            assert {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[op] == result, line
        assert result == problem.answer


def test_texts_are_filled_completely(problems: list[Problem]) -> None:
    for problem in problems:
        assert not re.search(r"[\[\]{}|]", problem.question + problem.rationale), problem
        assert problem.question.endswith("?")
        row = problem.row()
        assert list(row) == ["question", "answer"]
        assert re.findall(r"#### (\-?[0-9\.\,]+)", row["answer"]) == [str(problem.answer)]


def test_every_template_and_every_part_is_drawn(problems: list[Problem]) -> None:
    keys = {problem.signature.split(":")[0] for problem in problems}
    chains = [key.split("-") for key in keys if "-" in key]
    assert {template.key for template in TEMPLATES} <= keys
    assert {part for chain in chains for part in chain} == {*STARTS, *CHANGES, *ENDINGS}
    assert {len(chain) for chain in chains} == {3, 4}  # a chain has a start, one or two changes, and an ending
    assert max(len(p.rationale.split("\n")) for p in problems) == 4


def test_chains_of_five_steps_need_a_higher_limit() -> None:
    """Three changes make five steps, and the default allows four."""
    rng = Random(3)
    longest = {len(generate(rng, Difficulty(max_steps=5)).rationale.split("\n")) for _ in range(500)}
    assert longest == {2, 3, 4, 5}


@pytest.mark.parametrize("difficulty", [Difficulty(), Difficulty(3, 300, 9), Difficulty(2, 150, 5)])
def test_difficulty_bounds_the_numbers(difficulty: Difficulty) -> None:
    rng = Random(5)
    for _ in range(500):
        problem = generate(rng, difficulty)
        calculations = CALCULATION.findall(problem.rationale)
        assert len(calculations) <= difficulty.max_steps
        for left, op, right, result in calculations:
            assert 2 <= int(result) <= difficulty.max_value
            if op == "/":
                assert int(right) <= difficulty.max_factor
            if op == "*" and not {left, right} & {"60", "12", "7", "2"}:
                assert min(int(left), int(right)) <= difficulty.max_factor


def test_the_stream_depends_on_the_seed_alone() -> None:
    assert list(islice(training_stream(1), 50)) == list(islice(training_stream(1), 50))
    assert list(islice(training_stream(1), 50)) != list(islice(training_stream(2), 50))


def test_the_stream_is_the_same_on_every_python() -> None:
    """The digest is Python 3.11's: another one on another version means that the files cannot be rebuilt there."""
    text = "\n".join(problem.question + problem.row()["answer"] for problem in islice(training_stream(7), 300))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "adcb348de58c95db7beffa638acfeab179df24f2fb03a55cb0dd234bf1d70493"
    )


def test_the_split_has_distinct_problems() -> None:
    rows = held_out_split()
    assert len(rows) == TEST_ROWS == 200
    assert len({row.question for row in rows}) == len({row.signature for row in rows}) == TEST_ROWS
    assert held_out_split() == rows


def test_training_drops_what_the_split_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the split drawn from the very seed that training uses, training must skip exactly those problems."""
    rng = Random(7)
    raw = [generate(rng) for _ in range(300)]
    monkeypatch.setattr(word_problems, "_held_out_hashes", lambda: frozenset().union(*map(exclusion_hashes, raw[:100])))
    forbidden = {p.signature for p in raw[:100]} | {p.question for p in raw[:100]}
    expected = [p for p in raw if not {p.signature, p.question} & forbidden]
    assert list(islice(training_stream(7), len(expected))) == expected
    assert 190 <= len(expected) <= 200


def test_training_never_meets_the_split(problems: list[Problem]) -> None:
    rows = held_out_split()
    signatures, questions = {row.signature for row in rows}, {row.question for row in rows}
    assert not any(p.signature in signatures or p.question in questions for p in problems)
    rng = Random(11)
    unfiltered = [generate(rng).signature for _ in range(4000)]
    assert any(signature in signatures for signature in unfiltered)  # the filter did remove something
