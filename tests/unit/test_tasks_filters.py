"""Answer extraction and exact match, against values worked out by hand from the definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalengine.config.schema import TemplateConfig
from evalengine.tasks.filters import INVALID, ExactMatch, Pipeline, RegexFilter, pipelines
from evalengine.tasks.metric import read_metrics
from evalengine.tasks.templated import class_of_file


def _template(name: str) -> TemplateConfig:
    cls = class_of_file("gsm8k", name)
    assert cls is not None and cls.fixed is not None
    return cls.fixed


class Extract:
    """A filter for one text."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __call__(self, text: str) -> str:
        (answer,) = self._pipeline([text], {})
        return str(answer)


STRICT, FLEXIBLE = map(Extract, pipelines(_template("GSM8K").filter_list))
COT, _ = map(Extract, pipelines(_template("GSM8KCoT").filter_list))
match = read_metrics(_template("GSM8K").metric_list, "generate_until").match

GOLD = "She pays 3 * 600 = <<3*600=1800>>1800.\n#### 1800"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 1800", "1800", "1800"),
        ("#### 1800.", "1800.", "1800."),
        ("$1,800.00", INVALID, "$1,800.00"),
        ("#### 1,800 and #### 7", "1,800", "7"),
        ("1800 in all (42)", INVALID, "42"),
        ("####1800", INVALID, "1800"),
        ("#### -3", "-3", "-3"),
        ("#### $12", INVALID, "$12"),
        ("it is 5", INVALID, "5"),
        ("it is 5.", INVALID, "5."),
        ("the end...", INVALID, "..."),
        ("none at all", INVALID, INVALID),
        ("", INVALID, INVALID),
    ],
)
def test_gsm8k_extraction(text: str, strict: str, flexible: str) -> None:
    """The strict filter takes the first number behind `#### `, the flexible one the last number of the text."""
    assert STRICT(text) == strict
    assert FLEXIBLE(text) == flexible


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 2 + 3 = 5. The answer is 5.", "5"),  # the unescaped dot of the pattern takes the last character
        ("The answer is 1,800. The answer is 2.", "1,800."),
        ("The answer is 5", INVALID),  # the pattern wants one more character, and the only digit is the number
        ("The answer is 15", "1"),  # here, too, the last digit stands for that character
        ("the answer is 5.", INVALID),
    ],
)
def test_gsm8k_cot_extraction(text: str, answer: str) -> None:
    assert COT(text) == answer


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("1800", 1.0),
        ("1800.", 1.0),
        ("1,800", 1.0),
        ("$1,800", 1.0),
        ("$1,800.00", 0.0),  # the answer becomes 1800.00
        ("1800..", 0.0),  # only one trailing dot goes
        ("42", 0.0),
        (INVALID, 0.0),
    ],
)
def test_gsm8k_match(prediction: str, right: float) -> None:
    """Commas, dollar signs and one last dot do not count."""
    assert match(prediction, GOLD) == right


def test_several_groups_give_the_first_non_empty_one() -> None:
    both = RegexFilter(r"(a)?(b)?(c)", group_select=0)
    assert both("abc") == "a"
    assert both("bc") == "b"
    assert both("c bc") == "c"
    assert RegexFilter(r"(x)?(y)?z")("z") == INVALID  # a match whose groups are all empty
    assert RegexFilter(r"( q )")("- q -") == "q"


def test_exact_match_options() -> None:
    assert ExactMatch()("Yes", "yes") == 0.0
    assert ExactMatch(ignore_case=True)("Yes", "yes") == 1.0
    assert ExactMatch()("a.b!", "ab") == 0.0
    assert ExactMatch(ignore_punctuation=True)("a.b!", "ab") == 1.0
    assert ExactMatch(ignore=("x", "yy"))("yxy", "") == 1.0  # the order counts: dropping x makes yy
    assert ExactMatch(ignore=("yy", "x"))("yxy", "") == 0.0


@given(
    st.integers(-(10**9), 10**9), st.text(st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="#$.,-"))
)
def test_a_number_behind_the_mark_is_always_found(number: int, prose: str) -> None:
    text = f"{prose}\n#### {number:,}"
    assert STRICT(text) == FLEXIBLE(text) == f"{number:,}"
    assert match(STRICT(text), f"reasoning\n#### {number}") == 1.0
