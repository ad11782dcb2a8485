"""Checks, before any weight is loaded, that the model has room for what the tasks generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evalengine.config.schema import Config
from evalengine.models.spec import ModelSpec
from evalengine.tasks.base import Task
from evalengine.tasks.generation import generation_settings


def budget_problems(config: Config, tasks: Sequence[Task], spec: ModelSpec) -> Iterator[str]:
    """Yields a sentence for each budget that leaves no room for a prompt, for each task that a thinking model cannot
    answer, and for an end of thinking that is no token."""
    room = config.engine.max_model_len or spec.max_position_embeddings
    end = config.model.think_end_token
    if isinstance(end, int) and end >= spec.vocab_size:
        yield f"model.think_end_token={end}: token ids must lie in 0 ... {spec.vocab_size - 1}"
    for task in tasks:
        if task.output_type == "generate_until":
            max_gen_toks = generation_settings(task.config.generation, task.fewshot_delimiter).max_gen_toks
            if max_gen_toks >= room:
                yield _too_long(task.name, max_gen_toks, room, spec.max_position_embeddings)
        elif config.enable_thinking:
            yield (
                f"tasks.{task.name}: it scores given texts, and enable_thinking=true has the model think before it "
                "answers: scores of an answer after no thinking mean nothing; leave enable_thinking null for it"
            )


def _too_long(task: str, max_gen_toks: int, room: int, most: int) -> str:
    cure = f"lower it, or raise engine.max_model_len (at most {most}, the model's own)"
    if room >= most:
        cure = "lower it: that is the model's own limit"
    where = f"tasks.{task}.generation.max_gen_toks={max_gen_toks}"
    return f"{where} leaves no room for a prompt in engine.max_model_len={room}; {cure}"
