"""What one re-run of an item saw: for every token position, a digest of every op's output there, and some values.

    H numbers that an op puts out for one token.

An output is digested as float32, to which bfloat16 and float16 widen without loss: equal numbers have equal digests in
runs of unlike dtype, and within one dtype equal digests mean equal bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evalengine.records.schema import RecordKey

DIGEST_BYTES = 8  # length of a BLAKE2b digest: two unlike outputs agree by chance once in 2^64 comparisons
LOGITS, LOGPROB = "lm_head", "logprob"  # the last two ops; the second is the engine's answer itself


@dataclass
class Computation:
    """One computation of one token position. A position is computed again after a preemption."""

    position: int
    step_requests: int = 0  # sequences of the step that computed it
    step_tokens: int = 0  # tokens of that step
    reused: bool = False  # another request computed it; the item found it in the prefix cache
    digests: dict[str, bytes] = field(default_factory=dict)  # op -> DIGEST_BYTES
    values: dict[str, np.ndarray] = field(default_factory=dict)  # op -> float32 [H]; empty without values

    def take(self, op: str, output: np.ndarray, keep: bool) -> None:
        """Adds an op's output, float32 [H]: its digest, and its values if `keep`."""
        self.digests[op] = hashlib.blake2b(output.tobytes(), digest_size=DIGEST_BYTES).digest()
        if keep:
            self.values[op] = output


@dataclass(frozen=True)
class Trace:
    """One side of an explanation."""

    label: str  # the run's name, and the settings it was given instead
    key: RecordKey
    prompt_sha256: str
    prompt_tokens: int
    token_ids: list[int]  # the prompt's and the output's
    ops: dict[str, str]  # op -> dtype of its output, in the order in which they run
    computations: list[Computation]  # by position, then by time
    settings: dict[str, Any]  # the engine's, as resolved; the seed; `weights`: their hash, which older files lack
    machine: dict[str, Any]  # hardware, libraries and code of the re-run
    extent: str  # what was run again
    reproduced: bool | None  # whether the re-run gave the bytes of the run's record; None: it is no run's configuration

    @property
    def fed_ids(self) -> list[int]:
        """The token at each position; the last one of the output is predicted, never fed."""
        return self.token_ids[:-1]


def place(op: str) -> tuple[str, str]:
    """(layer, op) as a reader knows them: ("3", "mlp.down_proj"); a layer of "" lies outside all layers."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", op)
    return (match[1], match[2]) if match else ("", op.removeprefix("model."))


def op_name(op: str) -> str:
    """An op's place for a sentence: `layer 3, mlp.down_proj`."""
    layer, name = place(op)
    return f"layer {layer}, {name}" if layer else name
