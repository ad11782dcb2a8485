"""Finds the packed weights of a checkpoint, of which several tensors make one, and says which methods are read.

E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from evalengine.engine.load.shards import StoredTensor
from evalengine.engine.load.unpacking import MXFP4_ROW
from evalengine.errors import EvalEngineError
from evalengine.models.file_values import plain

Stored = Mapping[str, StoredTensor]
# Of each method: the end of its first tensor's name, the ends of the others', and what the weight's name ends in.
_ENDS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "mxfp4": ("_blocks", ("_scales",), ""),
    "fp8": ("", ("_scale_inv",), ""),
    "gptq": (".qweight", (".qzeros", ".scales", ".g_idx"), ".weight"),
    "awq": (".qweight", (".qzeros", ".scales"), ".weight"),
}


def with_packed(stored: Stored, quantization: Any) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with one in the place of each packed weight's.

    quantization: config.json's `quantization_config`, one that `packing.packing_problems` finds nothing wrong
    with. Raises EvalEngineError for tensors without their partners, and for those that do not fit.
    """
    tensors = dict(stored)
    if not quantization:
        return tensors
    method = quantization["quant_method"]
    first, others, end = _ENDS[method]
    ends = others if method == "fp8" else (first, *others)
    for name in [name for name in stored if name.endswith(ends)]:
        stem = name.removesuffix(next(suffix for suffix in ends if name.endswith(suffix)))
        if stem + end in tensors and tensors[stem + end].method == method:
            continue  # by the name of another of its tensors
        parts = [stored.get(stem + suffix) for suffix in (first, *others)]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise EvalEngineError(f"{stored[name].file}: {plain(name)} lacks its partners; download or copy it again")
        for suffix in (first, *others):
            del tensors[stem + suffix]
        fitting = _FITTING[method](whole, quantization)
        if fitting is None:
            raise EvalEngineError(
                f"{whole[0].file}: {plain(whole[0].name)} and its partners, "
                f"{', '.join(f'{part.dtype} {list(part.shape)}' for part in whole)}, are no {method} as config.json "
                "describes it; download or copy it again"
            )
        dtype, shape, sizes = fitting
        packed = replace(whole[0], dtype=dtype, shape=shape, method=method, others=tuple(whole[1:]), sizes=sizes)
        tensors[stem + end] = packed
    return tensors


_Fitting = tuple[str, tuple[int, ...], tuple[int, ...]]  # the weight's dtype and shape, and the sizes to unpack it by


def _mxfp4(parts: list[StoredTensor], _: Mapping[str, Any]) -> _Fitting | None:
    blocks, scales = parts
    shape = blocks.shape
    fits = len(shape) == 4 and shape[3] == MXFP4_ROW // 2 and scales.shape == shape[:3]
    if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
        return None
    return "BF16", (shape[0], shape[2] * MXFP4_ROW, shape[1]), ()


def _fp8(parts: list[StoredTensor], quantization: Mapping[str, Any]) -> _Fitting | None:
    weight, scales = parts
    rows, columns = quantization["weight_block_size"]
    if len(weight.shape) < 2 or weight.dtype != "F8_E4M3" or scales.dtype not in ("F32", "BF16"):
        return None
    *leading, n, k = weight.shape
    fits = scales.shape == (*leading, -(-n // rows), -(-k // columns))
    return ("F32", weight.shape, (rows, columns)) if fits else None


def _gptq(parts: list[StoredTensor], quantization: Mapping[str, Any]) -> _Fitting | None:
    qweight, qzeros, scales, group_of = parts
    bits = quantization["bits"]
    if {qweight.dtype, qzeros.dtype, group_of.dtype} != {"I32"} or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    groups = 1 if quantization["group_size"] == -1 else -(-k // quantization["group_size"])
    fits = scales.shape == (groups, n) and qzeros.shape == (groups, n * bits // 32) and group_of.shape == (k,)
    return ("F32", (n, k), (bits, int(quantization.get("checkpoint_format") != "gptq_v2"))) if fits else None


def _awq(parts: list[StoredTensor], quantization: Mapping[str, Any]) -> _Fitting | None:
    qweight, qzeros, scales = parts
    if {qweight.dtype, qzeros.dtype} != {"I32"} or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    k, n = qweight.shape[0], qweight.shape[1] * 8
    size = k if quantization["group_size"] == -1 else quantization["group_size"]
    fits = k % size == 0 and scales.shape == (k // size, n) and qzeros.shape == (k // size, n // 8)
    return ("F32", (n, k), (size,)) if fits else None


_FITTING: Mapping[str, Callable[[list[StoredTensor], Mapping[str, Any]], _Fitting | None]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
}
