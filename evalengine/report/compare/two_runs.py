"""Two runs compared, if they are alike enough, with the weights in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.weight_files import differing_weights
from evalengine.report.read.asked import asked_of
from evalengine.report.read.run import Run


def compared(a: Run, b: Run, allow: bool) -> Comparison:
    """Two runs compared, with their weights where they differ and can be read, and what the changed documents asked.

    Raises `ConfigError` for unlike runs (unless `allow`), and for runs that share no request.
    """
    why = incomparable(a, b)
    if not a.items.keys() & b.items.keys():
        raise _refusal(a, b, why, "They have no request in common.")
    if why and not allow:
        raise _refusal(a, b, why, "--allow compares them on the requests that they share.")
    return replace(with_questions(compare(a, b)), tensors=differing_weights(a, b))


def with_questions(c: Comparison) -> Comparison:
    """The comparison, with what the documents asked whose output or answer differs."""
    changed = {(flip.task, flip.doc_id) for flip in c.flips} | {d.key[:2] for d in c.differences if "output" in d.kinds}
    return replace(c, asked=asked_of((c.a, c.b), changed))


def _refusal(a: Run, b: Run, why: Sequence[str], cure: str) -> ConfigError:
    what = f"{a.source} (A) and {b.source} (B) are not comparable{':' if why else '.'}"
    return ConfigError(what, *(f"  - {line}" for line in why), cure)
