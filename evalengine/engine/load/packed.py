"""Finds the packed weights of a checkpoint, of which several tensors make one.

What the files hold tells which weights are packed and by which sizes; config.json tells what their shapes leave open.

E experts, N output features, K input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evalengine.engine.load.shards import StoredTensor, read_tensors
from evalengine.engine.load.unpacking import MXFP4_ROW, NVFP4_ROW
from evalengine.errors import EvalEngineError
from evalengine.models.file_values import plain, shown
from evalengine.models.packing import (
    Activations,
    DeclaredForm,
    activations_of,
    bits_of,
    block_of,
    declared_forms,
    method_of,
)

Stored = Mapping[str, StoredTensor]
Parts = Mapping[str, StoredTensor | None]  # a weight's tensors by the ends of their names
_CURE = "correct config.json, or download or copy the files again"
RULE = "number times scale in float32, rounded once"  # `unpacking` has it in full
_FLOATS = ("F32", "BF16", "F16", "F8_E8M0")
_INPUT_SCALES = ("input_scale", "activation_scale")
# Scales of activations, and of keys and values, which are not quantised here.
_OTHERS = ("input_global_scale", "input_zero_point", "k_scale", "v_scale", "q_scale")
_NO_WEIGHTS = tuple(f".{name}" for name in (*_INPUT_SCALES, *_OTHERS))


@dataclass(frozen=True)
class _Fitting:
    """How a weight's tensors are unpacked: the method, its parameters, and their names."""

    method: str
    dtype: str
    shape: tuple[int, ...]
    others: tuple[StoredTensor | None, ...]
    sizes: tuple[int, ...]
    packing: str


@dataclass(frozen=True)
class _Layout:
    """Ends of the names of a weight's tensors, of which the first leads, and of the weight's own."""

    required: tuple[str, ...]
    fitting: Callable[[Parts, Mapping[str, Any]], _Fitting | None]
    optional: tuple[str, ...] = ()
    weight: str = ""


def with_packed(stored: Stored, quantization: Any) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with one instead of each packed weight's.

    quantization: config.json's `quantization_config`, one that `packing.packing_problems` finds nothing wrong
    with. Raises EvalEngineError for tensors without their partners, and for those that do not fit or contradict it.
    """
    if not quantization:
        return dict(stored)
    method, rule, declared = method_of(quantization), activations_of(quantization), declared_forms(quantization)
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_NO_WEIGHTS)}
    # tensors that contain a weight's shape, and the shape that the weight has
    named_shapes: dict[str, tuple[StoredTensor, tuple[int, ...]]] = {}
    for layout in _LAYOUTS[method]:
        for stem, parts in [*_packed(tensors, layout)]:
            whole = [part for part in parts.values() if part is not None]
            fitting = layout.fitting(parts, quantization)
            if fitting is None:
                raise EvalEngineError(
                    f"{whole[0].file}: {plain(whole[0].name)} and its partners, "
                    f"{', '.join(f'{part.dtype} {list(part.shape)}' for part in whole)}, are no {method} as "
                    "config.json describes it; download or copy it again"
                )
            if problem := _contradiction(parts, fitting, declared):
                raise EvalEngineError(f"{whole[0].file}: {problem}; {_CURE}")
            for part in whole:
                del tensors[part.name]
            if (shape := parts.get("_shape")) is not None:
                named_shapes[shape.name] = shape, fitting.shape
            packed = replace(whole[0], **vars(fitting))
            if rule is not None and packed.packing.startswith("fp8"):
                packed = _with_input(packed, stored, stem, rule)
            tensors[stem + layout.weight] = packed
    ends = tuple(end for layout in _LAYOUTS[method] for end in (*layout.required, *layout.optional) if end)
    for name, tensor in tensors.items():
        if tensor.method is None and name.endswith(ends):
            raise EvalEngineError(f"{tensor.file}: {plain(name)} lacks its partners; download or copy it again")
    for name, named in read_tensors({name: tensor for name, (tensor, _) in named_shapes.items()}):
        holder, expected = named_shapes[name]
        if named.tolist() != [*expected]:
            problem = (
                f"{plain(name)} is {shown(named.tolist())}, expected {[*expected]}, the shape of the packed numbers"
            )
            raise EvalEngineError(f"{holder.file}: {problem}; {_CURE}")
    return tensors


def _contradiction(parts: Parts, fitting: _Fitting, declared: Sequence[DeclaredForm]) -> str | None:
    """Return what is wrong if config.json and the tensors disagree on how a weight is packed, else None.

    A weight may have the form of any group in config.json: its module is not matched with the groups' targets.
    """
    if not declared:
        return None
    weight, scales = [part for part in parts.values() if part is not None][:2]
    *_, n, k = fitting.shape
    if fitting.method == "scaled":
        kind, bits = "int" if weight.dtype == "I8" else "float", 8
        found = (-(-n // fitting.sizes[0]), -(-k // fitting.sizes[1]))
    else:
        kind, bits = ("int", fitting.sizes[0]) if fitting.method == "integers" else ("float", 4)
        found = (n, scales.shape[1])
    alike = [form for form in declared if (form.kind, form.bits) == (kind, bits)]
    if not alike:
        kinds = " or ".join(dict.fromkeys(f"type={form.kind}, num_bits={form.bits}" for form in declared))
        return f"{plain(weight.name)} is {weight.dtype} (type={kind}, num_bits={bits}), expected {kinds} by config.json"
    expected = [form.scales(n, k) for form in alike]
    if None in expected or found in expected:
        return None
    counts = " or ".join(dict.fromkeys(f"{count[0]} x {count[1]}" for count in expected if count is not None))
    return (
        f"{plain(scales.name)} has {found[0]} x {found[1]} scales for {n} x {k} numbers, expected {counts} by the "
        "strategy and group or block size in config.json"
    )


def _with_input(packed: StoredTensor, stored: Stored, stem: str, rule: Activations) -> StoredTensor:
    """A weight with the rule for its product's input, and the constant of a static one."""
    scale = None
    if rule.static:
        names = [stem.removesuffix("weight") + name for name in _INPUT_SCALES]
        scale = next((stored[name] for name in names if name in stored), None)
        if scale is None:
            raise EvalEngineError(
                f"{packed.file}: {plain(packed.name)} lacks its partner {plain(names[0])}; download or copy it again"
            )
        if math.prod(scale.shape) != 1 or scale.dtype not in _FLOATS:
            raise EvalEngineError(
                f"{scale.file}: {plain(scale.name)} is {scale.dtype} {list(scale.shape)}, not one number; "
                "download or copy it again"
            )
    text = f"{packed.packing}, inputs by {rule}"
    return replace(packed, packing=text, activations=rule, input_scale=scale)


def packing_of(stored: Stored) -> str | None:
    """The forms of packed weights, each once, and the rule by which they are unpacked; None if there are none."""
    forms = sorted({tensor.packing for tensor in stored.values() if tensor.packing})
    return f"{', '.join(forms)} ({RULE})" if forms else None


def _packed(tensors: Stored, layout: _Layout) -> Iterator[tuple[str, Parts]]:
    """The stems of packed weights of which no tensor is missing."""
    for name in tensors:
        if name.endswith(layout.required[0]):
            stem = name.removesuffix(layout.required[0])
            parts = {end: tensors.get(stem + end) for end in (*layout.required, *layout.optional)}
            if all(parts[end] is not None for end in layout.required):
                yield stem, parts


def _mxfp4(parts: Parts, _: Mapping[str, Any]) -> _Fitting | None:
    """gpt-oss's blocks of all experts, which its own code has with inputs before outputs."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    assert blocks is not None and scales is not None
    shape = blocks.shape
    fits = len(shape) == 4 and shape[3] == MXFP4_ROW // 2 and scales.shape == shape[:3]
    if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
        return None
    return _Fitting("mxfp4", "BF16", (shape[0], shape[2] * MXFP4_ROW, shape[1]), (scales,), (), "mxfp4")


def _scaled(parts: Parts, quantization: Mapping[str, Any]) -> _Fitting | None:
    """Numbers of 8 bits, or ModelOpt's of 4."""
    weight, scales = parts[""], parts.get("_scale") or parts.get("_scale_inv")
    assert weight is not None and scales is not None
    if weight.dtype == "U8":
        return _nvfp4(weight, scales, parts.get("_scale_2"), divides=False)
    kinds = {"F8_E4M3": "fp8", "I8": "int8"}
    if len(weight.shape) < 2 or weight.dtype not in kinds or scales.dtype not in _FLOATS:
        return None
    block = _block(weight.shape, scales.shape, block_of(quantization))
    zeros = parts.get("_zero_point")
    if block is None or (zeros is not None and (zeros.dtype != "I8" or zeros.shape != scales.shape)):
        return None
    *_, n, k = weight.shape
    by = "tensor" if block == (n, k) else "row" if block == (1, k) else f"{block[0]}x{block[1]}"
    return _Fitting("scaled", "F32", weight.shape, (scales, zeros), block, f"{kinds[weight.dtype]} by {by}")


def _block(shape: tuple[int, ...], scales: tuple[int, ...], named: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that share a scale."""
    *leading, n, k = shape
    outer = tuple(leading)
    if named is not None and scales == (*outer, -(-n // named[0]), -(-k // named[1])):
        return named
    if scales in (outer, (*outer, 1), (*outer, 1, 1)) or (not outer and scales in ((1,), (1, 1))):
        return n, k
    if scales in ((*outer, n), (*outer, n, 1)):
        return 1, k
    grouped = len(scales) == len(shape) and scales[:-1] == (*outer, n) and scales[-1] > 0 and k % scales[-1] == 0
    return (1, k // scales[-1]) if grouped else None


def _compressed(parts: Parts, quantization: Mapping[str, Any]) -> _Fitting | None:
    """compressed-tensors' words of integers, or bytes of two numbers of e2m1."""
    words, scales, zeros, group_of = (parts[end] for end in ("_packed", "_scale", "_zero_point", "_g_idx"))
    assert words is not None and scales is not None
    if len(words.shape) != 2 or len(scales.shape) != 2:
        return None
    n, columns = words.shape
    if words.dtype == "U8" and parts["_global_scale"] is not None:
        return _nvfp4(words, scales, parts["_global_scale"], divides=True)
    if words.dtype == scales.dtype == "U8" and scales.shape == (n, columns * 2 // MXFP4_ROW):
        return _Fitting("mxfp4_rows", "BF16", (n, columns * 2), (scales,), (), "mxfp4")
    bits = bits_of(quantization)
    if bits is None or words.dtype != "I32" or scales.dtype not in _FLOATS or scales.shape[0] != n:
        return None
    k, groups = columns * 32 // bits, scales.shape[1]
    if groups == 0:
        return None
    fits = k % groups == 0 or group_of is not None
    if zeros is not None:
        fits &= zeros.dtype == "I32" and zeros.shape == (-(-n * bits // 32), groups)
    if group_of is not None:
        fits &= group_of.dtype in ("I32", "I64") and group_of.shape == (k,)
    packing = f"int{bits} by {'row' if groups == 1 else f'1x{-(-k // groups)}'}"
    return _Fitting("integers", "F32", (n, k), (scales, zeros, group_of), (bits,), packing) if fits else None


def _nvfp4(words: StoredTensor, scales: StoredTensor, of_all: StoredTensor | None, *, divides: bool) -> _Fitting | None:
    n, columns = words.shape if len(words.shape) == 2 else (0, 0)
    fits = of_all is not None and of_all.shape in ((), (1,)) and of_all.dtype == "F32" and n > 0
    if not fits or scales.dtype != "F8_E4M3" or scales.shape != (n, columns * 2 // NVFP4_ROW):
        return None
    return _Fitting("nvfp4", "F32", (n, columns * 2), (scales, of_all), (int(divides),), "nvfp4")


def _gptq(parts: Parts, quantization: Mapping[str, Any]) -> _Fitting | None:
    qweight, *others = (part for part in parts.values() if part is not None)
    qzeros, scales, group_of = others
    bits = int(quantization["bits"])
    if {qweight.dtype, qzeros.dtype, group_of.dtype} != {"I32"} or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    groups = 1 if quantization["group_size"] == -1 else -(-k // quantization["group_size"])
    fits = scales.shape == (groups, n) and qzeros.shape == (groups, n * bits // 32) and group_of.shape == (k,)
    as_stored = quantization.get("checkpoint_format") == "gptq_v2"  # its zeros; the tensors do not tell
    sizes, packing = (bits, int(not as_stored)), f"gptq{'_v2' * as_stored} int{bits}"
    return _Fitting("gptq", "F32", (n, k), (*others,), sizes, packing) if fits else None


def _awq(parts: Parts, quantization: Mapping[str, Any]) -> _Fitting | None:
    qweight, *others = (part for part in parts.values() if part is not None)
    qzeros, scales = others
    if {qweight.dtype, qzeros.dtype} != {"I32"} or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    k, n = qweight.shape[0], qweight.shape[1] * 8
    size = k if quantization["group_size"] == -1 else quantization["group_size"]
    fits = k % size == 0 and scales.shape == (k // size, n) and qzeros.shape == (k // size, n // 8)
    return _Fitting("awq", "F32", (n, k), (*others,), (size,), "awq int4") if fits else None


_LAYOUTS: Mapping[str, tuple[_Layout, ...]] = {
    "mxfp4": (_Layout(("_blocks", "_scales"), _mxfp4),),
    "fp8": (_Layout(("", "_scale_inv"), _scaled), _Layout(("", "_scale"), _scaled)),
    "gptq": (_Layout((".qweight", ".qzeros", ".scales", ".g_idx"), _gptq, weight=".weight"),),
    "awq": (_Layout((".qweight", ".qzeros", ".scales"), _awq, weight=".weight"),),
    "compressed-tensors": (
        _Layout(("_packed", "_scale"), _compressed, ("_global_scale", "_zero_point", "_g_idx", "_shape")),
        _Layout(("", "_scale"), _scaled, ("_zero_point",)),
    ),
    "modelopt": (_Layout(("", "_scale"), _scaled, ("_scale_2",)),),
}
