"""From a generated answer to a score: regex extraction and exact match, as lm-evaluation-harness 0.4.12 defines them.

`"$1,800.00"` against gold 1800: flexible extraction gives "$1,800.00", exact match strips "$" and "," and compares
"1800.00" with "1800": wrong. `"#### 1800."`: strict extraction gives "1800.", the trailing dot is stripped: right.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

INVALID = "[invalid]"
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class RegexFilter:
    """Extracts one match from a text: `pattern`'s `select`-th match, of several groups the first non-empty one.

    `select` is 0 for the first match and -1 for the last. Without a match the result is "[invalid]".
    """

    pattern: str
    select: int = 0

    def __call__(self, text: str) -> str:
        matches = re.findall(self.pattern, text)
        if not matches:
            return INVALID
        match: str | tuple[str, ...] = matches[self.select]
        if isinstance(match, tuple):  # findall gives a tuple when the pattern has several groups
            match = next((group for group in match if group), INVALID)
        return match.strip()


@dataclass(frozen=True)
class ExactMatch:
    """1.0 if prediction and reference are equal after normalisation, else 0.0.

    Both have every pattern of `ignore` removed, in order; then case and punctuation are dropped if asked for.
    """

    ignore: tuple[str, ...] = ()
    ignore_case: bool = False
    ignore_punctuation: bool = False

    def __call__(self, prediction: str, reference: str) -> float:
        return float(self._normalise(prediction) == self._normalise(reference))

    def _normalise(self, text: str) -> str:
        for pattern in self.ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()
        return text.translate(_DROP_PUNCTUATION) if self.ignore_punctuation else text
