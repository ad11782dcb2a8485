"""The names of a GGUF file's tensors: what a family's decoder calls them, and the tensors that a model needs.

The `gguf` library's `TensorNameMap` is not used. It maps several checkpoint names to one GGUF name, so it cannot be
inverted, and it lacks the decoder's names for post-norms, attention sinks and short convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from gguf.constants import TENSOR_NAMES
from torch import Tensor

from evalengine.errors import listed
from evalengine.layers.base import checkpoint_tensors
from evalengine.models.decoder import without_storage
from evalengine.models.registry import Family
from evalengine.models.spec import ModelSpec
from evalengine.models.weight_names import OF_A_LAYER, OF_AN_EXPERT

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.attention.sinks",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_output_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "mlp_output_norm",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.conv": "mixer.conv",
    "shortconv.out_proj": "mixer.out_proj",
}
_BARE = {"attn_sinks": "weight", "exp_probs_b": "bias"}  # roles whose own names have no kind -> the kind in a file
_QKV = {f"self_attn.{x}_proj" for x in "qkv"}
_FUSED_QKV = re.compile(r"(blk\.\d+\.attn_)qkv(\.(?:weight|bias))")  # the converter's --fuse-qkv writes these
_KINDS = ("weight", "bias", "scale", "input_scale")
_GATE_UP = {"mlp.gate_proj", "mlp.up_proj"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the RoPE frequencies, in which Llama 3 scaling is worked out
# Tensors of RoPE, which the model's description has: those, and LongRoPE's two lists.
ROPE_TENSORS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")


class GGUFNames:
    """The names of one family's tensors."""

    def __init__(self, family: Family) -> None:
        assert family.gguf is not None
        self._fused = family.weights
        self._own = {**_LAYER_NAMES, **family.gguf.names}
        if family.weights.gate_up is not None:
            self._own["ffn_up"] = family.weights.gate_up
        self._theirs = {own: role for role, own in self._own.items()}
        tops = {role: own for role, own in family.gguf.names.items() if own in _TOP_NAMES.values()}
        self._top = {**_TOP_NAMES, **tops}

    def own(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, as the family's tensors are called before
        those that hold several are split; a name outside the table stays as it is."""
        if match := re.fullmatch(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)", name):
            layer, role, kind = match.groups()
            end = "" if _BARE.get(role) == kind else f".{kind}"
            return f"model.layers.{layer}.{self._own[role]}{end}" if role in self._own else name
        role, _, kind = name.rpartition(".")
        return f"{self._top[role]}.{kind}" if role in self._top else name

    def shapes(self, spec: ModelSpec, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
        """GGUF name -> shape, a row's length last, of every tensor of a model. stored: a file's names, among which
        one of q, k and v together replaces the three; a layer's weights and biases need not be alike in that."""
        top_of = {own: role for role, own in self._top.items()}
        kinds = spec.of_each_kind
        shapes: dict[str, tuple[int, ...]] = {}
        parts: list[dict[str, list[tuple[int, ...]]]] = [{} for _ in kinds.blocks]
        for tensor in checkpoint_tensors(without_storage(kinds)):
            if match := OF_A_LAYER.fullmatch(tensor.name):
                parts[int(match[1])].setdefault(self._stored(match[2], match[3]), []).append(tensor.shape)
            else:
                name, _, kind = tensor.name.rpartition(".")
                shapes[f"{top_of[name]}.{kind}"] = tensor.shape
        for layer in range(spec.num_layers):
            of_layer = parts[kinds.blocks.index(spec.block(layer))]
            shapes |= {f"blk.{layer}.{name}": _together(name, several) for name, several in of_layer.items()}
        for name in stored:
            if several := [shapes.pop(part) for part in parts_of(name) if part != name and part in shapes]:
                shapes[name] = _together(name, several)
        return shapes

    def _stored(self, part: str, kind: str) -> str:
        """The name, behind the layer's, of the tensor that holds a part of the decoder."""
        if expert := OF_AN_EXPERT.fullmatch(part):
            part = f"mlp.experts.{expert[2]}"
        elif part.startswith("mixer.in_proj_"):
            part = "mixer.in_proj"
        elif part in _QKV and self._fused.qkv is not None:
            part = self._fused.qkv
        elif part in _GATE_UP and self._fused.gate_up is not None:
            part = self._fused.gate_up
        role = self._theirs[part]
        return f"{role}.{_BARE[role]}" if role in _BARE else f"{role}{kind}"


def _together(name: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of one tensor of several parts: experts stand side by side, projections after one another."""
    if "_exps." in name:
        return (len(shapes), *shapes[0])
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def parts_of(name: str) -> list[str]:
    """The names of q, k and v of a tensor that holds the three, weights or biases; another name alone."""
    match = _FUSED_QKV.fullmatch(name)
    return [name] if match is None else [f"{match[1]}{part}{match[2]}" for part in "qkv"]


def is_known(name: str, num_layers: int) -> bool:
    """Whether llama.cpp has such a tensor in some architecture, and the layer is one of the model's."""
    role, _, kind = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", name)
    pattern = re.sub(r"\.\d+(?=\.|$)", ".{bid}", role)
    return kind in _KINDS and pattern in TENSOR_NAMES.values() and (layer is None or int(layer[1]) < num_layers)


def roles(names: Sequence[str]) -> str:
    """`listing` with one name for the same tensor of all layers."""
    return listing([*dict.fromkeys(re.sub(r"^blk\.\d+\.", "blk.*.", name) for name in names)])


def half_split(tensor: Tensor, heads: int) -> Tensor:
    """Reorders rows [heads * D, ...]: RoPE pairs side by side become pairs (i, i + D / 2), as models compute them."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without the dimensions of one element, which a file may leave out: a row [1, n] is a vector [n]."""
    return tuple(n for n in shape if n != 1) or (1,)


def listing(names: Sequence[str]) -> str:
    """Names from a file for a message: the first eight, shortened, and how many more there are."""
    return listed([name[:100] for name in names], 8)
