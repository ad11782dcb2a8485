"""`python -m evalengine warm MODEL`: what a model's first run on a GPU would compile and compare, done before it."""

from __future__ import annotations

import time
from typing import Annotated, Any

from typer import Argument

from evalengine.cli.command import Command, setting_of
from evalengine.config.shipped import available
from evalengine.plain_text import say
from evalengine.util.command import Namespace

OF_MODELS = ("model.", "engine.", "batch_invariant=", "numerics=")  # the settings on which kernels depend


def _words(
    model: Annotated[str, Argument(metavar="MODEL", help="a name of the shipped models, a folder, a Hub id or a .gguf "
                                   "file")],
    settings: Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False,
                        parser=setting_of(*OF_MODELS), help="those of the runs to come: engine.*, model.*, numerics, "
                        "batch_invariant")] = None,
) -> Namespace:  # fmt: skip
    """Compiles and compares a model's kernels on this GPU before its first run needs them, for every batch size, and
    keeps them in the caches of the user (TRITON_CACHE_DIR, XDG_CACHE_HOME)."""
    return Namespace(model=model, settings=settings or [])


def work(arguments: Namespace) -> int:
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


EPILOG = """\
  warm qwen3-8b
  warm ./checkpoint engine.max_num_seqs=64
  warm ./checkpoint model.load_format=dummy       reads config.json alone: kernels depend on shapes, not on weights

Exit codes: 0 done, or nothing to compile on a CPU; 1 the kernels differ on this GPU; 2 bad usage."""
main = Command("warm", _words, "evalengine.cli.warm:work", EPILOG)
