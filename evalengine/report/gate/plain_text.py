"""Text from outside for every sink of a gate's report: visible, on one line, and no longer than a reader reads.

Names of tasks and metrics, and models' answers, come from others. Every sink applies `plain` first, and so holds no
line break, terminal sequence, workflow command or character that XML forbids.
"""

from __future__ import annotations

from evalengine.plain_text import printable

LONGEST = 400  # characters of one text from outside


def plain(text: str, longest: int | None = LONGEST) -> str:
    """`printable` text, cut at `longest`."""
    shown = printable(text)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."
