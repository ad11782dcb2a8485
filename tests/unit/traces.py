"""Traces made by hand for the tests of `explain`: every output is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evalengine.explain.trace import Computation, Trace
from evalengine.records.schema import ids_sha256

OPS = (
    "model.embed_tokens",
    "model.layers.0.input_layernorm.residual",
    "model.layers.0.self_attn.attention",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.input_layernorm.residual",
    "model.layers.1.mlp.down_proj",
    "model.norm.norm",
    "lm_head",
    "logprob",
)
PROMPT = [5, 6, 7]
FED = [*PROMPT, 8, 9]
Planted = Mapping[tuple[str, int], np.ndarray]  # (op, position) -> the output in place of the usual one


def output(op: str, position: int) -> np.ndarray:
    """The usual output of an op at a position: float32 [4], or [1] for a logprob; every op and position has its own."""
    draw = np.random.default_rng([OPS.index(op), position])
    return draw.standard_normal(1 if op == "logprob" else 4).astype(np.float32)


def computation(position: int, planted: Planted, keep: bool = True, **facts: Any) -> Computation:
    made = Computation(position, 1, 5, **facts)
    for op in OPS:
        if op not in ("lm_head", "logprob") or position >= len(PROMPT) - 1:
            made.take(op, planted.get((op, position), output(op, position)), keep)
    return made


def trace(
    planted: Planted | None = None, fed: Sequence[int] = FED, recomputed: Sequence[Computation] = (), **changed: Any
) -> Trace:
    """A trace that fed the tokens `fed`; `recomputed` are further computations, after the first of their position."""
    keep = changed.pop("keep", True)
    computations = [computation(position, planted or {}, keep) for position in range(len(fed))]
    facts: dict[str, Any] = {
        "label": "run",
        "key": ("sums", 3, 0, 0),
        "prompt_sha256": ids_sha256(PROMPT),
        "prompt_tokens": len(PROMPT),
        "token_ids": [*fed, 10],
        "ops": dict.fromkeys(OPS, "float32"),
        "computations": sorted([*computations, *recomputed], key=lambda item: item.position),
        "settings": {"numerics": "fast", "max_num_seqs": 1},
        "machine": {"hardware": {"cpu": "one"}},
        "extent": "the run's 4 requests",
        "reproduced": True,
    }
    return Trace(**{**facts, **changed})


def moved(op: str, position: int, steps: int = 1) -> dict[tuple[str, int], np.ndarray]:
    """Plants the op's output at the position with its first number `steps` float32 further from zero."""
    values = output(op, position).copy()
    values.view(np.int32)[0] += steps
    return {(op, position): values}
