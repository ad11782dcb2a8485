"""A sample of a run's items, computed again from its rows and its model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from evalengine.engine.difference import difference
from evalengine.receipts.compute import answer_of
from evalengine.receipts.needs import check_level
from evalengine.receipts.of_run import planned
from evalengine.receipts.prove import provable
from evalengine.records.folder import RECORDS
from evalengine.records.schema import read_records
from evalengine.report.read.run import Run


def differing(run: Run, sample: int, seed: int, places: Sequence[str] = ()) -> tuple[int, list[str]]:
    """(how many items were computed again, a sentence for each of them that differs).

    Raises ConfigError for a run that cannot be computed again here.
    """
    provable(run, "check")
    check_level(run.identity, run.name)
    keys = random.Random(seed).sample([*run.items], min(sample, len(run.items)))
    plan, llm = planned(run, places)
    chosen = {item.request.request_id: item for item in plan.requests if item.key in {*keys}}
    records = {record.key: record for record in read_records(run.source / RECORDS) if record.key in {*keys}}
    sentences = {}
    with llm:
        for output in llm.run([item.request for item in chosen.values()]):
            key = chosen[output.request_id].key
            output.top_logprobs = None  # alternatives are no part of the digest
            if difference_in_words := difference(answer_of(records[key]), output, "in the run"):
                sentences[key] = f"{'/'.join(map(str, key))}: {difference_in_words}"
    return len(chosen), [sentences[key] for key in sorted(sentences)]
