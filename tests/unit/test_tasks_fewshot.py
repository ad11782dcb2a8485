"""Drawing exemplars and rendering prompts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalengine.errors import ConfigError
from evalengine.tasks.fewshot import Sampler, Turn, joined, read_exemplars, render

POOL = [{"id": i} for i in range(13)]
TURNS = [
    Turn("system", "Be brief."),
    Turn("user", "Q1", " "),
    Turn("assistant", "A1", "\n\n"),
    Turn("user", "Q2"),
]


def chat(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def test_the_generator_goes_on_from_document_to_document() -> None:
    sampler, generator = Sampler(POOL, seed=1234), random.Random(1234)
    drawn = [sampler.draw(3, {}) for _ in range(4)]
    assert drawn == [generator.sample(POOL, 3) for _ in range(4)]
    assert drawn[0] != drawn[1]
    assert drawn[0] != Sampler(POOL, seed=1235).draw(3, {})


def test_first_n_ignores_the_seed() -> None:
    assert (
        Sampler(POOL, seed=1, first_n=True).draw(2, {}) == POOL[:2] == Sampler(POOL, seed=2, first_n=True).draw(2, {})
    )


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**32))
def test_a_spare_exemplar_keeps_the_evaluated_row_out(n: int, evaluated: int, seed: int) -> None:
    drawn = Sampler(POOL, seed=seed, spare=True).draw(n, POOL[evaluated])
    assert len(drawn) == n
    assert POOL[evaluated] not in drawn
    if n:
        order = random.Random(seed).sample(POOL, n + 1)
        assert drawn == [row for row in order if row != POOL[evaluated]][:n]


def test_without_a_spare_the_evaluated_row_can_be_drawn() -> None:
    assert POOL[0] in Sampler(POOL, seed=0).draw(13, POOL[0])


@pytest.mark.parametrize(("spare", "needed"), [(False, 14), (True, 14)])
def test_too_few_exemplars(spare: bool, needed: int) -> None:
    with pytest.raises(ConfigError, match=f"needs {needed} exemplars, but there are 13"):
        Sampler(POOL, seed=0, spare=spare).draw(13 if spare else 14, {})


def test_an_evaluated_row_that_appears_twice_is_drawn_around() -> None:
    """As lm-eval 0.4.13 does, the sampler draws again from the pool without the row, and its generator goes on."""
    pool = [{"id": 0}, {"id": 0}, {"id": 1}, {"id": 2}]
    for seed in range(20):
        drawn, generator = Sampler(pool, seed=seed, spare=True).draw(2, {"id": 0}), random.Random(seed)
        first = [row for row in generator.sample(pool, 3) if row["id"]][:2]
        assert drawn == (first if len(first) == 2 else generator.sample(pool[2:], 2))
    with pytest.raises(ConfigError, match="only 1 exemplars are not the evaluated row itself"):
        Sampler(pool[:3], seed=0, spare=True).draw(2, {"id": 0})


def test_first_n_leaves_the_evaluated_row_out_where_it_may_be_among_them() -> None:
    assert Sampler(POOL, seed=1, first_n=True, spare=True).draw(2, POOL[1]) == [POOL[0], POOL[2]]
    assert Sampler(POOL, seed=1, first_n=True, spare=True).draw(2, POOL[9]) == POOL[:2]
    assert Sampler(POOL, seed=1, first_n=True).draw(2, POOL[1]) == POOL[:2]


def test_plain_text_joins_with_the_delimiters() -> None:
    assert render(TURNS, None, multiturn=True) == "Be brief.Q1 A1\n\nQ2"


def test_chat_keeps_turns_or_makes_one_user_message() -> None:
    assert render(TURNS, chat, multiturn=True) == "<system>Be brief.<user>Q1<assistant>A1<user>Q2"
    assert render(TURNS, chat, multiturn=False) == "<system>Be brief.<user>Q1 A1\n\nQ2"
    assert render(TURNS[1:], chat, multiturn=False) == "<user>Q1 A1\n\nQ2"


@pytest.mark.parametrize(
    ("instruction", "description", "system"),
    [
        ("", "", ""),
        ("a", "", "a"),
        ("", "b", "b"),
        ("a", "b", "a\n\nb"),
        ("a\n", "b", "a\nb"),
        ("a", " b", "a b"),
    ],
)
def test_system_instruction_and_description(instruction: str, description: str, system: str) -> None:
    """A blank line joins the two where neither brings white space to the border."""
    assert joined(instruction, description, "\n\n") == system


def test_exemplar_files(tmp_path: Path) -> None:
    """YAML and JSON Lines give the same rows."""
    rows = [{"question": "1 + 1?", "target": "The answer is 2."}, {"question": "é", "target": "x: y"}]
    (tmp_path / "e.yaml").write_text(
        '- {question: "1 + 1?", target: The answer is 2.}\n- {question: é, target: "x: y"}\n'
    )
    (tmp_path / "e.jsonl").write_text(
        '{"question": "1 + 1?", "target": "The answer is 2."}\n\n{"question": "é", "target": "x: y"}\n'
    )
    assert read_exemplars(str(tmp_path / "e.yaml")).rows == read_exemplars(str(tmp_path / "e.jsonl")).rows == rows


@pytest.mark.parametrize(
    ("text", "problem"), [("a: b", "list of mappings"), ("- 1", "list of mappings"), ("[", "read")]
)
def test_exemplar_file_of_the_wrong_shape(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"fewshot_file=.*{problem}"):
        read_exemplars(str(tmp_path / "e.yaml"))


def test_exemplar_file_that_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"fewshot_file=nowhere\.yaml does not exist"):
        read_exemplars("nowhere.yaml")
