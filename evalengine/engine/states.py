"""The pools of recurrent layers' states: a slot for each running sequence, in the place of pages.

    R slots, L recurrent layers.

A slot needs no clearing: a sequence that begins with a step begins with zeros (`layers.recurrent`). Some more slots
hold copies of states at the ends of prefixes that sequences share (`schedule.snapshots`).
"""

from __future__ import annotations

import math

import torch

from evalengine.kernels.recurrent_variant import Recurrence
from evalengine.layers.ops import Ops
from evalengine.layers.recurrent import States
from evalengine.models.spec import ModelSpec

NUM_SNAPSHOTS = 16  # copies of states that are kept: followers come soon after the first sequence of a prefix


def state_pools(spec: ModelSpec, ops: Ops, slots: int) -> dict[int, States]:
    """Each recurrent layer's pools, by the layer's number. slots: of running sequences; `NUM_SNAPSHOTS` are added."""
    own = {layer: recurrence.of_rank(ops.tp.size) for layer, recurrence in spec.recurrences.items()}
    return {layer: _pools(recurrence, ops, slots + NUM_SNAPSHOTS) for layer, recurrence in own.items()}


def _pools(recurrence: Recurrence, ops: Ops, slots: int) -> States:
    conv = slots, recurrence.taps - 1, recurrence.channels
    return States(
        torch.zeros(conv, dtype=ops.activation_dtype, device=ops.device),
        torch.zeros(slots, *(recurrence.state_shape or (0,)), dtype=torch.float32, device=ops.device),
    )


def state_bytes(spec: ModelSpec, activation_bytes: int, ranks: int = 1) -> int:
    """Bytes of one slot in all layers, on each of so many ranks; activation_bytes: of one activation."""
    return sum(
        recurrence.channels * (recurrence.taps - 1) * activation_bytes + 4 * math.prod(recurrence.state_shape or (0,))
        for recurrence in (kind.of_rank(ranks) for kind in spec.recurrences.values())
    )
