"""Finds the tensors of a checkpoint that are packed, of which two make one.

E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evalengine.engine.load.mxfp4 import ROW
from evalengine.engine.load.shards import StoredTensor
from evalengine.errors import EvalEngineError
from evalengine.models.file_values import plain

BLOCKS, SCALES = "_blocks", "_scales"


def with_packed(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with one of bfloat16, [E, K, N], in the place of each pair NAME_blocks, uint8
    [E, N, K / 32, 16], and NAME_scales, uint8 [E, N, K / 32].

    Raises EvalEngineError for a half of a pair, or for two that do not fit.
    """
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith((BLOCKS, SCALES))]:
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        blocks, scales = stored.get(stem + BLOCKS), stored.get(stem + SCALES)
        if blocks is None or scales is None:
            raise EvalEngineError(f"{stored[name].file}: {plain(name)} has no partner; download or copy it again")
        if name.endswith(SCALES):
            del tensors[name]
            continue
        shape = blocks.shape
        fits = len(shape) == 4 and shape[3] == ROW // 2 and scales.shape == shape[:3]
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise EvalEngineError(
                f"{blocks.file}: {plain(name)} is {blocks.dtype} {list(blocks.shape)} and its scales are "
                f"{scales.dtype} {list(scales.shape)}, which is not MXFP4; download or copy it again"
            )
        del tensors[name]
        tensors[stem] = replace(blocks, dtype="BF16", shape=(shape[0], shape[2] * ROW, shape[1]), scales=scales)
    return tensors
