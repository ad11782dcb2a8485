"""Which documents of a task are related, as two runs say: questions about one passage, variants of one item.

Statistics count clusters, not documents: without them the tests' false alarms grow with a cluster's size
(`python -m evalengine bench statistics` has the figures).
"""

from __future__ import annotations

from collections.abc import Sequence

from evalengine.errors import ConfigError
from evalengine.report.read.run import Run


def cluster_names(a: Run, b: Run, task: str, documents: Sequence[int]) -> list[str] | None:
    """A name for each document's cluster; None if no run names any: the documents are unrelated.

    Of two runs that name them, `a` (the baseline) counts; a run from before there were clusters names none.

    Raises `ConfigError` if a run names the clusters of some of the documents only.
    """
    for run in (a, b):
        names = run.clusters.get(task)
        if not names:
            continue
        missing = [doc for doc in documents if doc not in names]
        if missing:
            raise ConfigError(
                f"{run.source}: {task}: {len(missing)} of {len(documents)} documents have no cluster (the first is "
                f"{missing[0]}) and the others have: its samples were edited; run it again"
            )
        return [names[doc] for doc in documents]
    return None
