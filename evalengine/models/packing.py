"""Which packed weights are read: config.json's `quantization_config`, and what is refused of it by name.

Which tensors of a checkpoint are packed, and by which sizes, its files say (`engine.load.packed`): lists of modules
that are not (`ignore`, `modules_to_not_convert`) need not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from evalengine.models.file_values import is_integer, shown

# Of each method, the fields whose value matters and the values that are read.
_READ: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "mxfp4": {},
    "fp8": {
        "activation_scheme": ("dynamic", "static"),
        "fmt": ("e4m3", "float8_e4m3fn"),  # one format, by two names
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


class Activations(NamedTuple):
    """How the inputs of FP8 weights become FP8: by a constant of the checkpoint (static), or by the largest of `group`
    features of a token in a row, or (None) of all its features; power: rounded up to a power of two (DeepSeek V3.1)."""

    group: int | None = None
    static: bool = False
    power: bool = False

    def __str__(self) -> str:
        by = "a constant" if self.static else "token" if self.group is None else f"1x{self.group}"
        return f"{by}, to powers of two" if self.power else by


class DeclaredForm(NamedTuple):
    """A form of packed weights that config.json declares."""

    kind: str  # "int" or "float"
    bits: int
    block: tuple[int | None, int | None] | None  # rows and columns per scale (None: all of them); None: not declared

    def scales(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Return the number of scales of a matrix along its rows and columns; None if not declared."""
        if self.block is None:
            return None
        return -(-rows // (self.block[0] or rows)), -(-columns // (self.block[1] or columns))


_ALGORITHMS = {
    "FP8": DeclaredForm("float", 8, None),
    "FP8_PER_CHANNEL_PER_TOKEN": DeclaredForm("float", 8, (1, None)),
    "NVFP4": DeclaredForm("float", 4, (1, 16)),
}
DUMMY_MXFP4 = "mxfp4, dummies"  # `ModelSpec.packing` of dummy weights whose config.json has experts in MXFP4
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


def declared_forms(quantization: Mapping[str, Any]) -> list[DeclaredForm]:
    """Return the forms of packed weights that a `quantization_config` declares; none for GPTQ, AWQ and MXFP4, whose
    single form is checked with the tensors' shapes."""
    match method_of(quantization):
        case "fp8":
            return [DeclaredForm("float", 8, block_of(quantization))]
        case "modelopt":
            named = {_algorithm(quantization), *(one.get("quant_algo") for one in _layers(quantization))}
            return [form for algorithm, form in _ALGORITHMS.items() if algorithm in named]
        case "compressed-tensors":
            groups = weight_groups(quantization)
            return [DeclaredForm(own.get("type", "int"), own["num_bits"], _declared_block(own)) for own in groups]
    return []


def _declared_block(weights: Mapping[str, Any]) -> tuple[int | None, int | None] | None:
    size = weights.get("group_size")
    match weights.get("strategy"):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group" | "tensor_group" if is_integer(size, 1):
            return 1, size
        case "block":
            return block_of({"weight_block_size": weights.get("block_structure")})
    return None


def bits_of(quantization: Mapping[str, Any]) -> int | None:
    """The bits of compressed-tensors' integers; None where there are none."""
    return next((int(w["num_bits"]) for w in weight_groups(quantization) if w.get("type", "int") == "int"), None)


def activations_of(quantization: Mapping[str, Any]) -> Activations | None:
    """How inputs of FP8 weights are quantised; None if they are not, as those of other weights never are here."""
    method = method_of(quantization)
    if method == "fp8":
        if quantization.get("activation_scheme") == "static":
            return Activations(static=True)
        return Activations((block_of(quantization) or (1, None))[1], power=quantization.get("scale_fmt") == "ue8m0")
    if method == "modelopt":
        named = {_algorithm(quantization), *(one.get("quant_algo") for one in _layers(quantization))}
        if "FP8_PER_CHANNEL_PER_TOKEN" in named:
            return Activations()
        return Activations(static=True) if "FP8" in named else None
    inputs = _fp8_inputs(quantization)
    if not inputs:
        return None
    if inputs[0].get("strategy") == "group":
        return Activations(inputs[0].get("group_size"))
    return Activations(static=not inputs[0].get("dynamic"))


def _fp8_inputs(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' accounts of the inputs of FP8 weights, of which those of equal sense are one."""
    groups = [group for group in _values(quantization.get("config_groups")) if isinstance(group, Mapping)]
    found: list[Mapping[str, Any]] = []
    for group in groups:
        weights, inputs = group.get("weights"), group.get("input_activations")
        if isinstance(weights, Mapping) and weights.get("type") == "float" and weights.get("num_bits") == 8:
            own = inputs if isinstance(inputs, Mapping) else {}
            form = {name: own.get(name) for name in ("num_bits", "type", "strategy", "dynamic", "group_size")}
            if form not in found:
                found.append(form)
    return [] if len(found) == 1 and not any(found[0].values()) else found


def _input_problems(quantization: Mapping[str, Any]) -> Iterator[str]:
    inputs = _fp8_inputs(quantization)
    if len(inputs) > 1:
        yield f"{_REFUSED} with inputs of FP8 weights quantised in several ways; {_CURE}"
    for one in inputs:
        yield from _other_value("input_activations.num_bits", one["num_bits"], (8,))
        yield from _other_value("input_activations.type", one["type"], ("float",))
        yield from _other_value("input_activations.dynamic", one["dynamic"], (True, False, None))
        if one["strategy"] == "tensor" and one["dynamic"]:
            yield (
                f"{_REFUSED} with input_activations scaled by the largest number of a whole step (strategy=tensor, "
                f"dynamic=true): a token's results would depend on the other requests; {_CURE}"
            )
        elif one["dynamic"]:
            yield from _other_value("input_activations.strategy", one["strategy"], ("token", "group"))
        else:
            yield from _other_value("input_activations.strategy", one["strategy"], ("tensor",))
        if one["strategy"] == "group" and not is_integer(one["group_size"], 1, 1 << 16):
            yield f"quantization_config: input_activations.group_size={shown(one['group_size'])}: must be a number"


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
        if not (one.get("group_size") in (None, -1) or is_integer(one["group_size"], 1, 1 << 16)):
            yield f"quantization_config: weights.group_size={shown(one['group_size'])}: must be a number, -1 or null"
    widths = [one.get("num_bits") for one in weights if one.get("type", "int") == "int"]
    yield from _input_problems(quantization)
    if 4 in widths and 8 in widths:
        yield f"{_REFUSED} with integers of 4 and of 8 bits; {_CURE}"


def _modelopt(quantization: Mapping[str, Any]) -> Iterator[str]:
    algorithm, layers = _algorithm(quantization), _layers(quantization)
    if algorithm == "MIXED_PRECISION" and layers:
        for one in layers:
            yield from _other_value("quant_algo", one.get("quant_algo"), tuple(_ALGORITHMS))
        if {"FP8", "FP8_PER_CHANNEL_PER_TOKEN"} <= {
            one["quant_algo"] for one in layers if isinstance(one.get("quant_algo"), str)
        }:
            yield f"{_REFUSED} with inputs of FP8 weights quantised in several ways; {_CURE}"
    else:
        yield from _other_value("quant_algo", algorithm, tuple(_ALGORITHMS))


def _algorithm(quantization: Mapping[str, Any]) -> Any:
    inner = quantization.get("quantization")  # as in hf_quant_config.json
    return (inner if isinstance(inner, Mapping) else quantization).get("quant_algo")


def _layers(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """ModelOpt's accounts of single layers; one that is no object is an empty one."""
    inner = quantization.get("quantization")
    layers = (inner if isinstance(inner, Mapping) else quantization).get("quantized_layers")
    return [one if isinstance(one, Mapping) else {} for one in _values(layers)]


_OF_METHOD = {
    "mxfp4": lambda quantization: (),
    "fp8": _fp8,
    "gptq": _in_groups,
    "awq": _in_groups,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
