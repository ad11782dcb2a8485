"""Which documents of a task are related, as two runs say: questions about one passage, variants of one item.

Statistics count clusters, not documents: without them the tests' false alarms grow with a cluster's size
(`python -m benchmarks statistics` has the figures).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.read.run import Run
from evalengine.report.stats.intervals import cluster_degrees, cluster_sums, few_clusters, heavy_tails
from evalengine.report.stats.paired import cluster_codes

RARE = 10  # as many whole successes (or failures): with fewer, intervals of a mean of shares covered .89 to .93


def across_tasks(task: str, names: Sequence[str]) -> list[str]:
    """The clusters of a task's documents where they are compared with documents of other tasks: its own, but for those
    of a set of items that several tasks ask (`TaskConfig.items`), whose names begin with the set's."""
    from evalengine.config.schema import ITEM_MARK  # the settings load pydantic's models, which few comparisons need

    sets = {name.partition(ITEM_MARK)[0] if ITEM_MARK in name else None for name in names}
    return list(names) if len(sets) == 1 and None not in sets else [f"{task} {name}" for name in names]


def cautions(scores: Sequence[float], clusters: Sequence[str] | None) -> list[str]:
    """Why the interval of the mean of a task's scores may cover less than it says: too few clusters, or too few shares
    above 0 or below 1 (`benchmarks statistics` has the figures). Empty where nothing speaks against it."""
    values = np.asarray(scores, dtype=np.float64)
    if len(values) < 2:
        return []
    codes = cluster_codes(clusters, len(values))
    sizes = np.bincount(codes)
    said = [few_clusters(len(values), len(sizes), cluster_degrees(sizes.astype(np.float64)) + 1)]
    if values.min() < 0 or values.max() > 1:
        said.append(heavy_tails(cluster_sums(values - values.mean(), codes)))
    elif not np.isin(values, (0, 1)).all():
        rarer = min((float(x.sum()) ** 2 / float((x * x).sum()) for x in (values, 1 - values) if x.any()), default=0.0)
        if rarer < RARE:
            said.append(f"as few as {rarer:.1f} documents make the score, so that its interval may be too narrow")
    return [text for text in said if text]


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
