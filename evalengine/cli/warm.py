"""`python -m evalengine warm MODEL`: what a model's first run on a GPU would compile and compare, done before it."""

from __future__ import annotations

import time
from typing import Any

from evalengine.config.shipped import available
from evalengine.plain_text import say
from evalengine.util.command import Namespace


def main(arguments: Namespace) -> int:
    """Runs `warm` with its words; returns the exit code. Raises ConfigError and EvalEngineError as `LLM` does."""
    from evalengine.config.compose import compose_jobs

    own = "model" if arguments.model in available("model") else "model.path"
    (job,) = compose_jobs([f"{own}={arguments.model}", *arguments.settings])
    from evalengine.engine.llm import LLM
    from evalengine.engine.load.loader import resolve_checkpoint
    from evalengine.engine.settings import resolve_settings
    from evalengine.engine.warm_up import warm_up

    config, begin = job.config, time.perf_counter()
    mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    checkpoint = resolve_checkpoint(config.model)
    if resolve_settings(config.engine, **mode, spec=checkpoint.spec).device.type != "cuda":
        say(f"{arguments.model}: computes on the CPU here, for which nothing is compiled")
        return 0
    with LLM(checkpoint, **mode, engine=config.engine) as llm:
        warm_up(llm)
        llm.capture_graphs()
        verdict = llm.kernels_verdict
    compared = "" if verdict is None else f"{verdict['schedules']} schedules compared, "
    say(f"{arguments.model}: {compared}kernels compiled, in {time.perf_counter() - begin:.1f} s")
    return 0
