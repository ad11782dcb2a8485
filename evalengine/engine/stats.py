"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Counters since the engine was made."""

    num_steps: int = 0
    num_graph_steps: int = 0  # of those, replayed CUDA graphs
    num_steps_ahead: int = 0  # of those, launched before the last one's tokens were known on the host
    num_computed_tokens: int = 0  # through the model: prompts, generated, and in vain after an end that was seen late
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0  # not computed thanks to the prefix cache
    num_preemptions: int = 0
    largest_batch: int = 0  # sequences in one step
    largest_step: int = 0  # tokens in one step
    seconds: float = 0.0  # in steps
