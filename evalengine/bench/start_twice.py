"""`python -m evalengine.bench.start_twice [SETTING=VALUE ...]`: answers a run's requests twice in one process.

The engine is made as a run makes it, and used before anything else. Its last line is JSON: the seconds of the
first answers, and of the second, each from an empty prefix cache.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence

from evalengine.config.compose import compose_jobs
from evalengine.harness.identity import deferred_llm
from evalengine.harness.plan import plan_and_load, prepare


def main(words: Sequence[str]) -> None:
    """Answers the requests of the run that the words describe, twice."""
    (job,) = compose_jobs(words)
    config, seconds = job.config, list[float]()
    checkpoint, tasks = prepare(config)
    gc.set_threshold(3_000_000)  # as in `evalengine.__main__`
    with deferred_llm(config, checkpoint) as llm:
        plan = plan_and_load(config, tasks, llm)
        requests = [item.request for item in plan.requests]
        for _ in range(2):
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            answered = sum(1 for _ in llm.run(requests))
            seconds.append(time.perf_counter() - begin)
            assert answered == len(requests)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
