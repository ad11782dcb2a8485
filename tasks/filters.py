"""From a generated answer to a score: regex extraction and exact match, as lm-evaluation-harness 0.4.13 defines them.

`"$1,800.00"` against gold 1800: flexible extraction gives "$1,800.00", exact match strips "$" and "," and compares
"1800.00" with "1800": wrong. `"#### 1800."`: strict extraction gives "1800.", the trailing dot is stripped: right.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import category

from evalengine.util import limits
from evalengine.util.plain_files import Tagged

Step = Callable[[list[str], Mapping[str, Any]], Any]  # (a document's texts, the document)
INVALID = "[invalid]"
NUMBER = r"#### (\-?[0-9\.\,]+)"  # what lm-eval's filters look for by default
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DROP_DIGITS = str.maketrans("", "", string.digits)


class Unbuilt(str):
    """A problem with a task's file that the file does not have in lm-eval: it uses what is not built here."""


@dataclass(frozen=True)
class RegexFilter:
    """Extracts one match from a text: the pattern's `group_select`-th match; where the pattern has several groups, the
    first non-empty one.

    `group_select` is 0 for the first match and -1 for the last. Without a match the result is `fallback`.
    """

    regex_pattern: str = NUMBER
    group_select: int = 0
    fallback: str = INVALID

    def __call__(self, text: str) -> str:
        matches = re.findall(self.regex_pattern, text)
        if not -len(matches) <= self.group_select < len(matches):
            return self.fallback
        match: str | tuple[str, ...] = matches[self.group_select]
        if isinstance(match, tuple):  # findall gives a tuple when the pattern has several groups
            match = next((group for group in match if group), self.fallback)
        return match.strip()


@dataclass(frozen=True)
class ExactMatch:
    """1.0 if prediction and reference are equal after normalisation, else 0.0.

    Every pattern of `ignore` is removed from both, in order; then case, punctuation and digits are dropped on request.
    """

    ignore: tuple[str, ...] = ()
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False

    def __call__(self, prediction: str, reference: str) -> float:
        return float(self._normalise(prediction) == self._normalise(reference))

    def _normalise(self, text: str) -> str:
        for pattern in self.ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()[: len(text)]  # "İ" becomes two characters; NumPy, for lm-eval, then drops the last one
        if self.ignore_punctuation:
            text = text.translate(WITHOUT_PUNCTUATION)
        return text.translate(_DROP_DIGITS) if self.ignore_numbers else text


@dataclass(frozen=True)
class ChoiceFilter(RegexFilter):
    """lm-eval's multi_choice_regex: a letter in parentheses, "(B)", by the first of three ways that finds one.

    The pattern's match; the text of one of the document's `choices`, which stands for its letter; a letter after a
    colon. The second way compares them without what `regexes_to_ignore` match, and without case or punctuation if set.
    """

    ignore_case: bool = False
    ignore_punctuation: bool = False
    regexes_to_ignore: Sequence[str] = ()

    def letter(self, text: str, choices: Sequence[str]) -> str:
        first = replace(self, fallback="")
        return first(text) or first._named(text, choices) or first._lettered(text, len(choices)) or self.fallback

    def _named(self, text: str, choices: Sequence[str]) -> str:
        plain = [self._plain(choice.strip()) for choice in choices]
        longest_first = sorted(map(re.escape, plain), key=len, reverse=True)  # else "red" hides "red car"
        found = replace(self, regex_pattern="|".join(longest_first))(self._plain(text))
        return {choice: f"({chr(ord('A') + n)})" for n, choice in enumerate(plain)}.get(found, found)

    def _plain(self, text: str) -> str:
        for pattern in self.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        text = text.lower() if self.ignore_case else text
        return "".join(c for c in text if category(c)[0] != "P") if self.ignore_punctuation else text

    def _lettered(self, text: str, count: int) -> str:
        letters = "|".join(chr(ord("A") + n) for n in range(count))
        found = replace(self, regex_pattern=rf":[\s]*({letters})")(text)
        return found and f"({found})"


@dataclass(frozen=True)
class Pipeline:
    """A named sequence of steps from one document's responses (one text a repeat) to the scored answer: a text, or a
    list where no step selects one."""

    name: str
    steps: tuple[Step, ...]
    alike: bool = True  # every step but a last take_first treats each text separately

    def __call__(self, texts: list[str], doc: Mapping[str, Any]) -> Any:
        answer: Any = texts
        with limits.named(f"filter_list.{self.name}"):
            for step in self.steps:
                answer = step(answer, doc)
        return answer

    @property
    def by_sample(self) -> Pipeline | None:
        """The pipeline over each text separately; None where a step votes or selects some of the texts."""
        return Pipeline(self.name, tuple(s for s in self.steps if s is not _take_first)) if self.alike else None


def _each(function: Callable[[str], str]) -> Step:
    return lambda texts, doc: [function(text) for text in texts]


def _take_first(texts: list[str], doc: Mapping[str, Any]) -> str:
    return texts[0]


def majority_vote(texts: list[str], doc: Mapping[str, Any]) -> list[str]:
    return [Counter(texts).most_common(1)[0][0]]  # the first one among equally frequent texts


def _letters(read: ChoiceFilter) -> Step:
    return lambda texts, doc: [read.letter(text, doc["choices"]) for text in texts]


# lm-eval's name of a step -> (its options with their types, the function that makes the step from them)
REGEX = {"regex_pattern": str, "group_select": int, "fallback": str}
STEPS: dict[str, tuple[Mapping[str, type], Callable[..., Step]]] = {
    "regex": (REGEX, lambda **options: _each(RegexFilter(**options))),
    "multi_choice_regex": (
        {**REGEX, "ignore_case": bool, "ignore_punctuation": bool, "regexes_to_ignore": list},
        lambda **options: _letters(ChoiceFilter(**options)),
    ),
    "remove_whitespace": ({}, lambda: _each(str.strip)),
    "lowercase": ({}, lambda: _each(str.lower)),
    "uppercase": ({}, lambda: _each(str.upper)),
    "majority_vote": ({}, lambda: majority_vote),
    "take_first_k": ({"k": int}, lambda k: lambda texts, doc: texts[:k]),
    "take_first": ({}, lambda: _take_first),
}
AS_IT_IS = Pipeline("none", (_take_first,))


def pipelines(filter_list: Any) -> list[Pipeline]:
    """The pipelines of lm-eval's `filter_list`; without a list, the one that takes the first answer as it is. Raises
    ValueError with a line for each thing that is wrong."""
    if filter_list is None:
        return [AS_IT_IS]
    if problems := list(filter_problems(filter_list)):
        raise ValueError("\n".join(problems))
    return [
        Pipeline(
            entry["name"],
            tuple(map(_step, entry["filter"])),
            not {"majority_vote", "take_first_k"} & {written["function"] for written in entry["filter"]},
        )
        for entry in filter_list
    ]


def _step(written: Mapping[str, Any]) -> Step:
    options = {name: value for name, value in written.items() if name != "function"}
    return STEPS[written["function"]][1](**options)


def filter_problems(filter_list: Any) -> Iterator[str]:
    """Yields what is wrong with a `filter_list`; each problem begins with its place."""
    if not isinstance(filter_list, list) or not filter_list:
        yield "filter_list: must be a list of {name, filter}"
        return
    names = [entry.get("name") for entry in filter_list if isinstance(entry, dict)]
    for entry in filter_list:
        if not isinstance(entry, dict) or {*entry} != {"name", "filter"} or not isinstance(entry["filter"], list):
            yield f"filter_list: {str(entry)[:60]} is not {{name, filter: [{{function, ...}}]}}"
        elif not isinstance(entry["name"], str) or not entry["name"] or names.count(entry["name"]) > 1:
            yield f"filter_list: {str(entry['name'])[:60]!r} must be a name that no other filter has"
        else:
            where = f"filter_list.{entry['name']}"
            for problem in (problem for written in entry["filter"] for problem in _step_problems(written)):
                yield type(problem)(f"{where}: {problem}")
            functions = [written.get("function") for written in entry["filter"] if isinstance(written, dict)]
            if "take_first" in functions[:-1]:
                yield f"{where}: take_first must come last, since the steps before it take a list"


def _step_problems(written: Any) -> Iterator[str]:
    name = written.get("function") if isinstance(written, dict) else None
    if not isinstance(name, str) or name not in STEPS:
        problem = f"function {str(name or written)[:60]} is not built; there are {', '.join(STEPS)}"
        yield (Unbuilt if isinstance(name, (str, Tagged)) else str)(problem)
        return
    options = STEPS[name][0]
    for option, value in written.items():
        if option != "function" and not isinstance(value, options.get(option, ())):
            yield f"{name}: {option}={str(value)[:60]!r} is no option of it, or of the wrong type"
    if name == "take_first_k" and not (isinstance(written.get("k"), int) and written["k"] > 0):
        yield "take_first_k: needs k, a positive number"
    if isinstance(pattern := written.get("regex_pattern", ""), str):
        yield from pattern_problems(f"{name}: regex_pattern", pattern)
    if isinstance(ignored := written.get("regexes_to_ignore", []), list):
        yield from (wrong for entry in ignored for wrong in pattern_problems(f"{name}: regexes_to_ignore", str(entry)))


def pattern_problems(where: str, pattern: str) -> Iterator[str]:
    """Yields why `pattern` is no regular expression, if it is none."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield f"{where}: {pattern[:60]!r} is no regular expression ({error})"
