"""The answers that went from right to wrong, each with all that a person needs to judge it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evalengine.plain_text import printable
from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.divergence import Divergence
from evalengine.report.compare.flips import Flip
from evalengine.report.numbers import shown
from evalengine.report.read.asked import Asked
from evalengine.report.read.names import item_name

FEW = 5  # shown on the terminal
LONGEST = 300  # characters of a question that the terminal shows: its end


@dataclass(frozen=True)
class Regression:
    """One document: right in A, wrong in B."""

    flip: Flip
    asked: Asked | None  # None where no run holds texts
    parts_at: Divergence | None  # its first output that parts; None for scored choices, and where tokens are not held

    @property
    def name(self) -> str:
        return item_name((self.flip.task, self.flip.doc_id, 0, 0))


def regressions(c: Comparison) -> list[Regression]:
    """Every document that got worse, in the order of tasks and documents."""
    parting: dict[tuple[str, int], Divergence] = {}
    for d in c.divergences:
        parting.setdefault(d.key[:2], d)
    places = [(flip, (flip.task, flip.doc_id)) for flip in c.regressions]
    return [Regression(flip, c.asked.get(place), parting.get(place)) for flip, place in places]


def regression_lines(c: Comparison, names: tuple[str, str] | None = None) -> Iterator[str]:
    """The first of them for the terminal, a block of lines each; nothing if there are none. names: of A and B."""
    found = regressions(c)
    if not found:
        return
    better = c.answers.get("wrong to right", 0)
    who = "" if names is None else f", from {names[0]} (A) to {names[1]} (B)"
    yield f"Right to wrong{who}: {len(found):,}{f' (and {better:,} from wrong to right)' if better else ''}"
    for one in found[:FEW]:
        yield f"  {one.name}"
        for label, text in facts(one, LONGEST):
            yield f"    {label:<9}{text}"
    if len(found) > FEW:
        yield f"  ... and {len(found) - FEW:,} more: --html FILE shows them all"


def facts(one: Regression, longest: int) -> Iterator[tuple[str, str]]:
    """(name, text on one line) of what is known of a regression."""
    if one.asked is not None:
        yield "question", printable(_end(" ".join(one.asked.question.split()), longest))
        yield "target", printable(one.asked.target[:longest])
    for side, answer in (("A", one.flip.answer_a), ("B", one.flip.answer_b)):
        yield side, "no answer" if answer is None else printable(answer[:longest])
    if (d := one.parts_at) is not None:
        gap = "" if d.gap is None else f", gap {shown(d.gap, '+.3f')} nat"
        texts = f"{d.before!r}, then {d.text_a!r} or {d.text_b!r}" if d.before or d.text_a or d.text_b else ""
        yield "parts at", printable(f"token {d.position}{gap}{f': {texts}' if texts else ''}")


def _end(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"... {text[-longest:]}"
