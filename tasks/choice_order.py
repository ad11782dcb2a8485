"""Another order of the options that a question lists, for `task.choice_order=SEED`: does the answer hang on the letter?

A row: {"choices": ["3", "4"], "answer": 1} (MMLU) or {"options": ["3", "4"], "answer": "B"} (MMLU-Pro).
"""

from __future__ import annotations

import random
from typing import Any

from evalengine.tasks.documents import Doc
from evalengine.tasks.rows import content_hash

LETTERS = "ABCDEFGHIJ"


def reordered(row: Doc, seed: int) -> Doc:
    """The row with its options in a random order, and the answer that names the same one. The order depends on seed and
    row alone. Raises ValueError for a row that lists no options in one of the two forms."""
    column = next((name for name in ("choices", "options") if isinstance(row.get(name), list)), None)
    answer = row.get("answer")
    place: Any = LETTERS.find(answer) if isinstance(answer, str) and len(answer) == 1 else answer
    if column is None or not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(row[column]):
        raise ValueError("choice_order is set, and it lists no choices or options with an answer's number or letter")
    order = [*range(len(row[column]))]
    random.Random(f"{seed} {content_hash([row])}").shuffle(order)
    now = order.index(place)
    changed = {column: [row[column][old] for old in order], "answer": LETTERS[now] if isinstance(answer, str) else now}
    return {**row, **changed, **({"answer_index": now} if "answer_index" in row else {})}
