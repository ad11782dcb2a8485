"""Has an engine answer made-up requests, so that its first real ones do not wait for what is done once in a process:
kernels read from Triton's cache, libraries loaded, memory taken from the driver. On a GPU that is a second.
"""

from __future__ import annotations

from evalengine.engine.engine import Engine
from evalengine.engine.request import ScoreRequest
from evalengine.engine.stats import EngineStats
from evalengine.util.phases import phase

CONTEXTS, ENDINGS = 64, 4  # some 16,000 tokens: two full steps of 8,192 and one that is not


@phase("warm-up")
def warm_up(engine: Engine) -> None:
    """Scores made-up endings of shared contexts by the model's first layer alone, whose kernels are all layers' own.

    Nothing of it is left: the prefix cache, which holds one layer's KV, is emptied, and the counters are what they
    were. Does nothing where layers differ, and where other ranks share the model: all layers would be computed.
    """
    runner = engine.runner
    if runner is None or not runner.model.layers_alike or engine.settings.tensor_parallel_size > 1:
        return
    caches, stats, scheduler = runner.kv_caches, engine.stats, engine.scheduler
    steps = runner.num_graph_steps, runner.num_cascade_steps
    tokens = scheduler.num_cached_tokens, scheduler.num_preemptions
    engine.stats = EngineStats()
    runner.kv_caches = caches[:1]
    try:
        for _ in engine.run(made_up(engine.spec.vocab_size, engine.settings.max_model_len)):
            pass
    finally:
        runner.kv_caches, engine.stats = caches, stats
        runner.num_graph_steps, runner.num_cascade_steps = steps
        scheduler.num_cached_tokens, scheduler.num_preemptions = tokens
        engine.reset_prefix_cache()


def made_up(vocab_size: int, max_model_len: int) -> list[ScoreRequest]:
    """Requests of unlike lengths, four endings to a context, as those of multiple choice are."""
    longest = max_model_len // 2
    requests = []
    for number in range(CONTEXTS * ENDINGS):
        context = number // ENDINGS
        before = [(context * 7919 + place * 31) % vocab_size for place in range(min(longest, 100 + context * 13 % 120))]
        after = [(number * 104729 + place * 17) % vocab_size for place in range(min(longest, 10 + number % 31))]
        requests.append(ScoreRequest(number, before, after))
    return requests
