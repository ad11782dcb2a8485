"""Which packed weights are read: config.json's `quantization_config`, and what is refused of it by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evalengine.models.file_values import is_integer, shown

# Of each method, the fields whose value matters and the values that are read; others must be those of `_DEFAULTS`.
_READ: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "mxfp4": {},
    "fp8": {"activation_scheme": ("dynamic",), "fmt": ("e4m3",), "scale_fmt": ("float",), "expert_dtype": ("fp8",)},
    "gptq": {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",)},
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
}
_REFUSED = "quantization_config: packed weights are not supported"
_CURE = "use the unquantised checkpoint"


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of config.json's content, or of its text part."""
    own, text = raw.get("quantization_config"), raw.get("text_config")
    found = own if own is not None or not isinstance(text, Mapping) else text.get("quantization_config")
    return found if isinstance(found, Mapping) and found else None


def packing_problems(quantization: Any, *, takes_mxfp4: bool) -> Iterator[str]:
    """A sentence for each thing that is not read of a model's `quantization_config`."""
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    known = [name for name in _READ if name != "mxfp4" or takes_mxfp4]
    if method not in known:
        named = "" if method is None else f" of method {shown(method)}"
        yield f"{_REFUSED}{named}, only {', '.join(known)}; {_CURE}"
        return
    for field, values in _READ[method].items():
        value = quantization.get(field)
        if value is not None and value not in values:
            read = " or ".join(map(shown, values))
            yield f"{_REFUSED} with {field}={shown(value)}, only {read}; {_CURE}"
    yield from _size_problems(method, quantization)


def _size_problems(method: str, quantization: Mapping[str, Any]) -> Iterator[str]:
    if method == "fp8":
        blocks = quantization.get("weight_block_size")
        sizes = blocks if isinstance(blocks, list | tuple) else ()
        if len(sizes) != 2 or not all(is_integer(size, 1, 1 << 16) for size in sizes):
            yield f"{_REFUSED} with weight_block_size={shown(blocks)}, only by blocks of two sizes; {_CURE}"
    if method in ("gptq", "awq"):
        size, bits = quantization.get("group_size"), quantization.get("bits")
        if bits is None or not (size == -1 or is_integer(size, 1, 1 << 16)):
            yield f"quantization_config: bits={shown(bits)}, group_size={shown(size)}: must be numbers"
