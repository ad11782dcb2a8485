"""Where the ± of the terminal's table, lm-eval's standard error, says less than it seems to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evalengine.records.manifest_data import Manifest
from evalengine.report.stats.mean_interval import wilson


def stderr_notes(results: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    """A sentence for scores of 0 or 1, whose ± 0 claims certainty, and one for tasks whose documents are related."""
    for task, samples in results.get("n-samples", {}).items():
        values, count = results["results"].get(task, {}), samples.get("effective", 0)
        for name, value in values.items():
            metric, comma, filter_name = name.partition(",")
            if comma and value in (0, 1) and values.get(f"{metric}_stderr,{filter_name}") == 0 and count > 1:
                low, high = wilson(int(value) * count, count)
                words = f"all {count} documents score {value:g}; its 95 % interval is {low:.4f} to {high:.4f}"
                yield f"{task} {metric}, {filter_name}: {words} (the ± claims certainty)"
    datasets = manifest.content.get("datasets") or {}
    for task, facts in datasets.items():
        clusters, rows = facts.get("clusters"), facts.get("rows")
        if clusters and rows and clusters < rows:
            yield (
                f"{task}: {rows:,} documents in {clusters:,} clusters of related ones: the ± takes them as unrelated, "
                "as lm-eval does; the intervals of the page, of compare and of gate do not"
            )
