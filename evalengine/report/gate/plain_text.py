"""Text from outside on one line of visible characters, for every sink of a gate's report.

Names of tasks and metrics, and models' answers, come from others. Every sink applies `plain` first: no control, format
or bidirectional character survives, hence no line break, no terminal sequence, no character that XML forbids, and no
line that begins with a workflow command of its own.
"""

from __future__ import annotations

import unicodedata

LONGEST = 400  # characters of one text from outside


def plain(text: str, longest: int | None = LONGEST) -> str:
    """`text` on one line of visible characters: all others as \\u escapes; cut at `longest`; `##[` broken up, since
    it is a workflow command of GitHub's wherever it stands in a line."""
    shown = "".join(char if _visible(char) else _escape(char) for char in text).replace("##[", "# #[")
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."


def _visible(char: str) -> bool:
    """No control, format, surrogate, private or unassigned character (Unicode's C*), no line or paragraph break."""
    return unicodedata.category(char)[0] != "C" and unicodedata.category(char) not in ("Zl", "Zp")


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
