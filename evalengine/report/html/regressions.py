"""The regressions on a comparison's page: question, target, both answers and where they part, one below the other."""

from __future__ import annotations

from collections.abc import Iterator

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.divergence import Divergence
from evalengine.report.compare.regressions import Regression, regressions
from evalengine.report.html.differences import document_texts
from evalengine.report.html.markup import Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.numbers import counted, shown

OPEN = 3  # shown unfolded
MOST = 200  # shown at all; the flips' table has the rest
ROOM = 1500  # characters of a question, or of a text around the place where outputs part


def regressions_section(page: Page, c: Comparison, names: tuple[str, str] = ("A", "B")) -> None:
    """The section, before all others; none where nothing got worse. names: of A and B."""
    found = regressions(c)
    if not found:
        return
    better = c.answers.get("wrong to right", 0)
    note = f"{counted(len(found), 'document')} that {names[0]} answers right and {names[1]} wrong"
    note += f"; {better:,} went the other way." if better else "; none went the other way."
    if len(found) > MOST:
        note += f" The first {MOST:,}; the table of flips has them all."
    cards = [_card(c, one, number < OPEN, names) for number, one in enumerate(found[:MOST])]
    page.section("regressions", "Right to wrong", *cards, note=note)


def _card(c: Comparison, one: Regression, opened: bool, names: tuple[str, str]) -> Markup:
    flip = one.flip
    answers = [_or_none(text) for text in (flip.answer_a, flip.answer_b)]
    summary = join(tag("strong", one.name), tag("span", f"{answers[0][:60]} \u2192 {answers[1][:60]}", class_="gist"))
    return tag("details", tag("summary", summary), *_body(c, one, names), class_="card", open=opened)


def _body(c: Comparison, one: Regression, names: tuple[str, str]) -> Iterator[Markup]:
    flip = one.flip
    if one.asked is not None:
        yield tag("h3", "Question")
        yield tag("pre", one.asked.question[-ROOM:])
        yield tag("h3", "Target")
        yield tag("pre", tag("mark", one.asked.target[:ROOM], class_="right"))
    yield tag(
        "h3", " ".join(part for part in ("Answers under", flip.metric, flip.filter) if part not in (None, "none"))
    )
    yield _pair(names, tag("mark", _or_none(flip.answer_a)[:ROOM], class_="right"),
                tag("mark", _or_none(flip.answer_b)[:ROOM], class_="wrong"))  # fmt: skip
    if one.parts_at is not None:
        yield tag("h3", _place(one.parts_at))
        before, a, b = document_texts(c, one.parts_at.key, ROOM)
        yield _pair(names, join(tag("span", before, class_="soft"), tag("mark", a or "(ends)")),
                    join(tag("span", before, class_="soft"), tag("mark", b or "(ends)", class_="bad")))  # fmt: skip
    yield tag("p", f"Cause: {flip.cause}.", class_="note")


def _place(d: Divergence) -> str:
    gap = "" if d.gap is None else f", gap {shown(d.gap, '+.4f')} nat"
    tie = {True: ": a near-tie is possible", False: ": no near-tie", None: ""}[d.near_tie]
    return f"Token {d.position}, where the outputs part{gap}{tie}"


def _pair(names: tuple[str, str], a: Markup, b: Markup) -> Markup:
    sides = (
        tag("div", tag("p", side, class_="badge"), tag("pre", text)) for side, text in zip(names, (a, b), strict=True)
    )
    return tag("div", *sides, class_="pair")


def _or_none(answer: str | None) -> str:
    return "no answer" if answer is None else answer
