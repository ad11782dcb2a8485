"""Which weights differ between two sides of an explanation: stated before the ops, since then no op is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evalengine.errors import ConfigError
from evalengine.explain.align import Explanation
from evalengine.report.compare.weight_tensors import in_words, weights_difference
from evalengine.report.read.identities import short

if TYPE_CHECKING:  # `rerun` imports the engine, which comparing two files does not need
    from evalengine.explain.rerun import Side


def differing_weights(explanation: Explanation, sides: Sequence[Side | None]) -> list[str]:
    """A sentence for each difference, without its full stop; none if the weights are equal, or a file does not tell.

    sides: what was run again; None for a digest file. Raises `ConfigError` for weights that cannot be read.
    """
    hashes = [trace.settings.get("weights") for trace in (explanation.a, explanation.b)]
    if None in hashes or hashes[0] == hashes[1]:
        return []
    runs = [side for side in sides if side is not None]
    if len(runs) < 2:
        return [f"their hashes are {short(hashes[0])} in A and {short(hashes[1])} in B; the tensors are not in a file"]
    from evalengine.explain.rerun import weight_files_of

    files = [weight_files_of(side) for side in runs]
    if not all(files):
        return [f"{'A' if not files[0] else 'B'}'s are made up (dummy), and lie in no file"]
    try:
        return in_words(weights_difference(*files))
    except (OSError, ValueError) as error:
        raise ConfigError(f"explain: the weights cannot be compared ({error}); copy the checkpoint again") from error
