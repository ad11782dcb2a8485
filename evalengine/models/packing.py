"""Which packed weights are read: config.json's `quantization_config`, and what is refused of it by name.

Which tensors of a checkpoint are packed, and by which sizes, its files say (`engine.load.packed`): lists of modules
that are not (`ignore`, `modules_to_not_convert`) need not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evalengine.models.file_values import is_integer, shown

# Of each method, the fields whose value matters and the values that are read.
_READ: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "mxfp4": {},
    "fp8": {
        "activation_scheme": ("dynamic", "static"),
        "fmt": ("e4m3",),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    },
    "gptq": {
        "bits": (4, 8),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
        "is_marlin_format": (False,),
    },
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
    "compressed-tensors": {"quantization_status": ("compressed", "frozen")},
    "modelopt": {},
}
_SPELLED = {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "compressed_tensors": "compressed-tensors"}
_FORMATS = (
    *("naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense"),
)
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
_OF_MODELOPT = ("quant_algo", "quantized_layers")
_REFUSED = "quantization_config: packed weights are not supported"
_CURE = "use the unquantised checkpoint"


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of config.json's content, or of its text part."""
    own, text = raw.get("quantization_config"), raw.get("text_config")
    found = own if own is not None or not isinstance(text, Mapping) else text.get("quantization_config")
    return found if isinstance(found, Mapping) and found else None


def method_of(quantization: Mapping[str, Any]) -> Any:
    """The method's name, of several spellings always the same."""
    method = quantization.get("quant_method")
    return _SPELLED.get(method, method) if isinstance(method, str) else method


def packing_problems(quantization: Any, *, takes_mxfp4: bool) -> Iterator[str]:
    """A sentence for each thing that is not read of a model's `quantization_config`."""
    if quantization is None:
        return
    method = method_of(quantization) if isinstance(quantization, Mapping) else None
    known = [name for name in _READ if name != "mxfp4" or takes_mxfp4]
    if method not in known:
        named = "" if method is None else f" of method {shown(method)}"
        yield f"{_REFUSED}{named}, only {', '.join(known)}; {_CURE}"
        return
    for field, values in _READ[method].items():
        yield from _other_value(field, quantization.get(field), (None, *values))
    yield from _OF_METHOD[method](quantization)


def weight_groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' accounts of how weights are packed, one a group of modules."""
    groups = quantization.get("config_groups")
    found = [group.get("weights") if isinstance(group, Mapping) else None for group in _values(groups)]
    return [weights for weights in found if isinstance(weights, Mapping)]


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale each, where the configuration names some."""
    named = [quantization.get("weight_block_size"), *(w.get("block_structure") for w in weight_groups(quantization))]
    for sizes in named:
        if isinstance(sizes, str):  # "128x128"
            sizes = [int(size) if size.isdecimal() and len(size) < 6 else 0 for size in sizes.split("x")]
        if isinstance(sizes, list | tuple) and len(sizes) == 2 and all(is_integer(size, 1, 1 << 16) for size in sizes):
            return sizes[0], sizes[1]
    return None


def bits_of(quantization: Mapping[str, Any]) -> int | None:
    """The bits of compressed-tensors' integers; None where there are none."""
    return next((int(w["num_bits"]) for w in weight_groups(quantization) if w.get("type", "int") == "int"), None)


def _other_value(field: str, value: Any, read: tuple[Any, ...]) -> Iterator[str]:
    if value not in read:
        named = " or ".join(shown(one) for one in read if one is not None) or "none"
        yield f"{_REFUSED} with {field}={shown(value)}, only {named}; {_CURE}"


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else []


def _fp8(quantization: Mapping[str, Any]) -> Iterator[str]:
    blocks = quantization.get("weight_block_size")
    if blocks is not None and block_of({"weight_block_size": blocks}) is None:
        yield f"{_REFUSED} with weight_block_size={shown(blocks)}, only by blocks of two sizes; {_CURE}"


def _in_groups(quantization: Mapping[str, Any]) -> Iterator[str]:
    size, bits = quantization.get("group_size"), quantization.get("bits")
    if bits is None or not (size == -1 or is_integer(size, 1, 1 << 16)):
        yield f"quantization_config: bits={shown(bits)}, group_size={shown(size)}: must be numbers"
    exceptions = quantization.get("dynamic")  # of GPTQModel: "-:" names modules that are not packed
    keys = exceptions if isinstance(exceptions, Mapping) else () if exceptions in (None, False) else ("dynamic",)
    if others := [key for key in keys if not key.startswith("-:")]:
        yield f"{_REFUSED} with modules of other sizes (dynamic: {shown(others[0])}); {_CURE}"


def _compressed(quantization: Mapping[str, Any]) -> Iterator[str]:
    sparsity, transforms = quantization.get("sparsity_config"), quantization.get("transform_config")
    if isinstance(sparsity, Mapping):
        yield from _other_value("sparsity_config.format", sparsity.get("format"), (None, "dense"))
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        yield f"{_REFUSED} that are rotated (transform_config); {_CURE}"
    groups = quantization.get("config_groups")
    formats = [quantization.get("format"), *(g.get("format") for g in _values(groups) if isinstance(g, Mapping))]
    mixed = ("mixed-precision",) if len(formats) > 1 and None not in formats[1:] else ()
    yield from _other_value("format", formats[0], (*_FORMATS, *mixed))
    for own in formats[1:]:
        yield from _other_value("format", own, (None, *_FORMATS))
    weights = weight_groups(quantization)
    if not weights:
        yield f"quantization_config: config_groups={shown(groups)}: must say how weights are packed"
    for one in weights:
        yield from _other_value("num_bits", one.get("num_bits"), (4, 8))
        yield from _other_value("type", one.get("type", "int"), ("int", "float"))
        yield from _other_value("dynamic", one.get("dynamic"), (None, False))
    widths = [one.get("num_bits") for one in weights if one.get("type", "int") == "int"]
    if 4 in widths and 8 in widths:
        yield f"{_REFUSED} with integers of 4 and of 8 bits; {_CURE}"


def _modelopt(quantization: Mapping[str, Any]) -> Iterator[str]:
    inner = quantization.get("quantization")  # as in hf_quant_config.json
    algorithm, layers = ((inner if isinstance(inner, Mapping) else quantization).get(x) for x in _OF_MODELOPT)
    layers = _values(layers)
    if algorithm == "MIXED_PRECISION" and layers:
        for one in layers:
            own = one.get("quant_algo") if isinstance(one, Mapping) else None
            yield from _other_value("quant_algo", own, _ALGORITHMS)
    else:
        yield from _other_value("quant_algo", algorithm, _ALGORITHMS)


_OF_METHOD = {
    "mxfp4": lambda quantization: (),
    "fp8": _fp8,
    "gptq": _in_groups,
    "awq": _in_groups,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
