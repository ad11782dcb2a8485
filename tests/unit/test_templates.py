"""A template's text is that of its own row, also where the last row had the same; rows are chosen by their columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evalengine.tasks.rows import Rows
from evalengine.tasks.templates import Field


def test_each_row_has_its_own_text() -> None:
    field = Field("description", "about {{ subject }}{% if more is defined %} and {{ more }}{% endif %}")
    rows = [
        *({"subject": "a"}, {"subject": "a"}, {"subject": "a", "more": "b"}, {"subject": "a", "more": 1}),
        *({"subject": "a", "more": True}, {"subject": "a", "more": 1.0}, {"subject": "b"}, {"subject": "a"}),
    ]
    assert [field.render(row) for row in rows] == [
        *("about a", "about a", "about a and b", "about a and 1"),
        *("about a and True", "about a and 1.0", "about b", "about a"),
    ]


def test_equal_rows_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the columns that the template reads count."""
    field = Field("description", "about {{ subject }}")
    assert field.render({"subject": "a", "question": "1"}) == "about a"
    monkeypatch.setattr(field, "_template", object())
    assert field.render({"subject": "a", "question": "2"}) == "about a"
    with pytest.raises(ValueError, match="description"):
        field.render({"subject": "b", "question": "2"})


def test_a_missing_column_is_told_after_a_row_that_has_it() -> None:
    field = Field("doc_to_text", "{{ a }}{{ b }}")
    assert field.render({"a": "x", "b": "y"}) == "xy"
    with pytest.raises(ValueError, match="'b' is undefined"):
        field.render({"a": "x"})


def test_rows_with_a_text_in_a_column() -> None:
    """Tasks take their parts of the same rows, by one column or by several; a part of a part has rows of its own."""
    values = [("x", 1), ("y", 1), ("x", 2), ("x", 1)]
    rows = Rows([{"a": a, "b": b} for a, b in values], "file", lines=[1, 3, 4, 5])
    named = replace(rows, source="other")
    assert rows.where({"a": "x"}).lines == named.where({"a": "x"}).lines == [1, 4, 5]
    assert rows.where({"a": "y"}).rows == [{"a": "y", "b": 1}]
    part = rows.where({"a": "x", "b": "1"})
    assert part.lines == [1, 5] and part.where({"a": "y"}).rows == [] and part.where({"b": "1"}).lines == [1, 5]
    assert rows.where({"a": "z"}).rows == rows.where({"c": "x"}).rows == []
    assert rows.where({"c": "None"}).lines == [1, 3, 4, 5]
