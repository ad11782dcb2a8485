"""How messages list many things, and how two plain JSON values are told apart."""

from __future__ import annotations

from evalengine.errors import first_of, listed
from evalengine.records.sealed import differences, differing


def test_only_the_first_lines_are_said_and_how_many_there_are_besides() -> None:
    assert first_of(["a", "b", "c"], 3) == ["a", "b", "c"] and first_of([], 3) == []
    assert first_of(["a", "b", "c"], 1, "more rows") == ["a", "... and 2 more rows"]
    assert listed(["a", "b"], 2) == "a, b" and listed(["a", "b", "c"], 2, "; ") == "a; b and 1 more"


def test_values_that_differ_are_named_by_their_path() -> None:
    old, new = {"a": {"b": 1, "c": [1]}, "same": 0}, {"a": {"b": 2, "c": [1]}, "same": 0, "added": None, "d": True}
    assert list(differing(old, new)) == [(("a", "b"), 1, 2), (("d",), None, True)]
    assert list(differences(old, new, "x")) == ["x.a.b was 1, is 2", "x.d was null, is true"]
    assert list(differences(1, 2, "x")) == ["x was 1, is 2"] and list(differences({}, {})) == []
