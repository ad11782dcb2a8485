"""Counters of what an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class EngineStats:
    """Counters since the engine was made."""

    num_steps: int = 0
    num_graph_steps: int = 0  # steps that replayed a CUDA graph
    num_cascade_steps: int = 0  # steps whose attention read what decodes share once for all of them
    num_steps_ahead: int = 0  # steps launched before the last one's tokens were known on the host
    num_computed_tokens: int = 0  # prompt tokens, generated ones, and speculative ones after an end seen late
    num_generated_tokens: int = 0
    num_guesses: int = 0  # tokens computed before it was known that they would be chosen (`drafts`)
    num_right_guesses: int = 0
    num_cached_tokens: int = 0  # tokens not computed thanks to the prefix cache
    num_preemptions: int = 0
    num_shrunk_steps: int = 0  # steps that had no memory and were scheduled anew, at half the tokens
    largest_batch: int = 0  # sequences in one step
    largest_step: int = 0  # tokens in one step
    seconds: float = 0.0  # time spent in steps

    def plus(self, other: EngineStats) -> EngineStats:
        """The sum of two engines' counters; for the two largest sizes, the larger of each."""
        names = [item.name for item in fields(EngineStats)]
        total = {name: getattr(self, name) + getattr(other, name) for name in names}
        for name in ("largest_batch", "largest_step"):
            total[name] = max(getattr(self, name), getattr(other, name))
        return EngineStats(**total)

    def since(self, before: EngineStats) -> EngineStats:
        """The counts since a copy `before` was taken; the two largest sizes are those since the beginning."""
        counted = {item.name: getattr(self, item.name) - getattr(before, item.name) for item in fields(EngineStats)}
        return EngineStats(**{**counted, "largest_batch": self.largest_batch, "largest_step": self.largest_step})


@dataclass
class FleetStats(EngineStats):
    """The counters of several engines together, with a progress line for each engine."""

    lines: tuple[str, ...] = ()
