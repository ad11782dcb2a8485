"""AIME, fifteen problems of each of a year's two exams, task version 0.0 of lm-eval 0.4.13. Every answer is 0 ... 999.

A row of 2024: {"ID": "2024-I-1", "Problem": "What is 2 + 2?", "Solution": "...", "Answer": 4}; of 2025: {"problem":
"What is 2 + 2?", "answer": "4", "id": "0"}. The content of the last \\boxed{}, else between the first and the last
dollar sign, else the whole answer is compared as text, after the clean-up of MATH (Hendrycks et al. 2021, arXiv
2103.03874).
"""

from __future__ import annotations

from collections.abc import Callable

from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

# LaTeX that only changes how a formula looks -> what replaces it; the replacements are made in this order.
SAME = {
    "\n": "", "\\!": "", "\\\\": "\\", "tfrac": "frac", "dfrac": "frac", "\\left": "", "\\right": "", "^{\\circ}": "",
    "^\\circ": "", "\\$": "",
}  # fmt: skip
UNIT = "\\text{ "  # the text that begins a unit
BOX = "\\boxed{"


class AIME(Templated):
    """A problem and its integer."""

    forks = True

    def judge(self, doc: Doc) -> Callable[[str], float]:
        gold = str(self._target(doc))
        return lambda text: float(same_answer(answer_in(text), gold))


def answer_in(text: str) -> str:
    """The answer that a solution ends with."""
    inside = boxed(text)
    if inside is not None:
        return inside
    first, last = text.find("$"), text.rfind("$")
    return text[first + 1 : last] if first < last else text


def boxed(text: str) -> str | None:
    """The content of the last box, `\\boxed{42}` or `\\boxed 42$`; None without one, or for one that is not closed."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start, depth = text.rfind("\\boxed"), 0
    for place in range(max(start, 0), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth == 0:
            return text[start + len(BOX) : place] if text.startswith(BOX, start) else None
    return None


def same_answer(first: str, second: str) -> bool:
    """Whether the two texts are equal after the clean-up, or without it where either cannot be cleaned up."""
    try:
        return cleaned(first) == cleaned(second)
    except ValueError:
        return first == second


def cleaned(text: str) -> str:
    """The text in the LaTeX form that MATH's answers have. Raises ValueError for a text without such a form."""
    for written, left in SAME.items():
        text = text.replace(written, left)
    if UNIT in text:
        text, _ = text.split(UNIT)  # `split` raises ValueError for more than one unit
    for written, left in {"\\%": "", " .": " 0.", "{.": "{0."}.items():
        text = text.replace(written, left)
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    name, *value = text.split("=")
    if len(value) == 1 and len(name) <= 2:  # "k = 4" becomes "4"
        text = value[0]
    text = _with_braces(text, "\\sqrt", 1).replace(" ", "")
    text = _with_braces(text, "\\frac", 2)
    return _as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _with_braces(text: str, command: str, arguments: int) -> str:
    """`\\sqrt3` as `\\sqrt{3}`, `\\frac12` as `\\frac{1}{2}`. Raises ValueError where nothing follows the command."""
    head, *parts = text.split(command)
    done = [head]
    for part in parts:
        if not part:
            raise ValueError(f"nothing follows {command}")
        if part[0] != "{":
            if len(part) < arguments:
                return text
            first, rest = part[0], part[1:]
            if arguments == 2 and rest[0] != "{":
                rest = f"{{{rest[0]}}}{rest[1:]}"
            part = f"{{{first}}}{rest}"
        done.append(part)
    return command.join(done)


def _as_fraction(text: str) -> str:
    """`1/2` as `\\frac{1}{2}`, for two whole numbers. Raises ValueError where either is not a whole number."""
    parts = text.split("/")
    if len(parts) != 2:
        return text
    above, below = map(int, parts)
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
