"""The pools of recurrent layers' states: a slot for each running sequence, instead of pages.

    R slots, L recurrent layers.

A slot needs no clearing: a sequence that begins with a step begins with zeros (`layers.recurrent`). Some more slots
hold copies of states at the ends of prefixes that sequences share (`schedule.snapshots`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from evalengine.kernels.recurrent_variant import PoolShape, Recurrence, ring_rows
from evalengine.layers.ops import Ops
from evalengine.layers.recurrent import States
from evalengine.models.spec import ModelSpec

NUM_SNAPSHOTS = 16  # copies of states: followers come soon after the first sequence of a prefix


def state_pools(spec: ModelSpec, ops: Ops, slots: int) -> tuple[dict[int, States], list[torch.Tensor]]:
    """Each recurrent layer's pools, by the layer's number; and the stacked tensors that they are views of, [layers of a
    kind, R, ...]. slots: of running sequences; `NUM_SNAPSHOTS` are added."""
    layers: dict[Recurrence, list[int]] = {}
    for layer, recurrence in spec.recurrences.items():
        layers.setdefault(recurrence.of_rank(ops.tp.size), []).append(layer)
    pools: dict[int, States] = {}
    whole: list[torch.Tensor] = []
    for recurrence, numbers in layers.items():
        of_all = [
            torch.zeros(len(numbers), slots + NUM_SNAPSHOTS, *shape, dtype=dtype, device=ops.device)
            for shape, dtype in _shapes(recurrence, ops.activation_dtype, ops.chunked)
        ]
        whole += of_all
        for i, layer in enumerate(numbers):
            conv, *recurrent = (pool[i] for pool in of_all)
            pools[layer] = States(conv, tuple(recurrent), 0 if i else len(numbers))
    return pools, whole


def _shapes(recurrence: Recurrence, dtype: torch.dtype, chunked: bool) -> list[PoolShape]:
    conv = ring_rows(recurrence.taps), recurrence.channels
    return [(conv, dtype), *recurrence.state_pools(dtype, chunked=chunked)]


def state_bytes(spec: ModelSpec, dtype: torch.dtype, ranks: int = 1, *, chunked: bool) -> int:
    """Bytes of one slot in all layers, on each of so many ranks. dtype: of activations; chunked: see `Ops.chunked`."""
    own = [recurrence.of_rank(ranks) for recurrence in spec.recurrences.values()]
    pools = (pool for recurrence in own for pool in _shapes(recurrence, dtype, chunked))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pools)


def decode_bytes(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes of states that a decode reads, in all layers: of a recurrence in chunks the state and, on average, half of
    the open chunk's rows; of a convolution's ring K - 1 rows."""
    states = [state_bytes(spec, dtype, chunked=chunked) for chunked in (False, True)]
    unread = sum((ring_rows(kind.taps) - kind.taps + 1) * kind.channels for kind in spec.recurrences.values())
    return sum(states) / 2 - unread * dtype.itemsize


def independent(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divides copies (source, destination) that are made in order into groups: those of a group can be made at once,
    since no destination is in another copy of its group."""
    groups: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    destinations: set[int] = set()
    for source, destination in copies:
        if not groups or source in destinations or destination in sources or destination in destinations:
            groups.append([])
            sources, destinations = set(), set()
        groups[-1].append((source, destination))
        sources.add(source)
        destinations.add(destination)
    return groups
