"""From a checkpoint's tensors to those of the decoder: names, fused tensors, the order of a head's dimensions.

The decoder's parameters have the names of a Llama checkpoint (`models.decoder`); where a family's differ, this says
how.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evalengine.errors import listed
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2, Recurrence, ShortConv
from evalengine.models.file_values import plain
from evalengine.models.spec import Block, ModelSpec

# Its number, its part, its kind.
OF_A_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.(.+?)((?:\.weight|\.bias)?)")
OF_AN_EXPERT = re.compile(r"(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)")
_OF_A_HEAD = re.compile(r"self_attn\.([qk])_layernorm\.norms\.(\d+)")  # StableLM's norms of q and k
# Parts whose rows are heads of queries or keys.
_OF_HEADS = frozenset(f"self_attn.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm", "q_b_proj"))
# Tensors that hold one projection, or two, of all experts, [E, ...]: as transformers 5 has them in memory.
_FUSED = re.compile(r"mlp\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias)?")

# A Mamba-2 layer's parts, where a family calls the layer `mamba`, and its tensors that end in neither weight nor bias.
MAMBA = {
    **{f"mamba.{part}": f"mixer.{part}" for part in ("in_proj", "A_log", "dt_bias", "D", "norm", "out_proj")},
    "mamba.conv1d": "mixer.conv",
}
MAMBA_BARE = (".A_log", ".dt_bias", ".D")


@dataclass(frozen=True)
class WeightNames:
    """How a family's tensors are called.

    prefixes: beginnings of names, each with what the decoder's names have there. parts: a layer's parts, each with the
    decoder's name for it. buffers: ends of names of a layer's tensors that are computed, not learned. qkv, gate_up: the
    decoder's names, after `parts`, of tensors that hold several of its own in one; qkv_by_head: such a tensor has q, k
    and v of each head side by side, not all of q before k. expert_parts: an expert's parts, each with our name for it.
    experts_transposed: tensors of all experts have their inputs before their outputs, and gate and up column by column
    in turn, not one after the other. bare: the last words of a layer's names that do not end in .weight or .bias.
    gated_q: q_proj has, head by head, the rows of q and then those of the output's gate.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    qkv: str | None = None
    qkv_by_head: bool = False
    gate_up: str | None = None
    expert_parts: Mapping[str, str] = field(default_factory=dict)
    experts_transposed: bool = False
    bare: tuple[str, ...] = ()
    gated_q: bool = False

    def renamed(self, name: str) -> str | None:
        """The decoder's name of a checkpoint's tensor; None for one that is computed."""
        if name.endswith(self.buffers):
            return None
        for prefix, ours in self.prefixes.items():
            if name.startswith(prefix):
                name = ours + name[len(prefix) :]
                break
        if name.endswith(self.bare):
            name += ".weight"
        if not (match := OF_A_LAYER.fullmatch(name)):
            return name
        part = self.parts.get(match[2], match[2])
        if expert := OF_AN_EXPERT.fullmatch(part):
            part = f"mlp.experts.{expert[1]}.{self.expert_parts.get(expert[2], expert[2])}"
        elif head := _OF_A_HEAD.fullmatch(part):
            part = f"self_attn.{head[1]}_norm.{head[2]}"
        return f"model.layers.{match[1]}.{part}{match[3]}"

    def pieces(self, spec: ModelSpec, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The decoder's tensors in a checkpoint's, which has its new name; of the meta device, their shapes."""
        match = OF_A_LAYER.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        layer, part, kind = int(match[1]), match[2], match[3]
        if part == "post_attention_layernorm" and not spec.block(layer).norm_before:
            part = "attention_output_norm"  # OLMo's name for it
        if fused := _FUSED.fullmatch(part):
            kind = ".bias" if fused[2] or kind == ".bias" else ".weight"
            pieces = self._experts(fused[1], tensor)
        else:
            pieces = self._split(spec, spec.block(layer), part, tensor)
        for own, rows in pieces:
            yield f"model.layers.{layer}.{own}{kind}", _reordered(spec, layer, own, rows)

    def _experts(self, part: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The projections in one tensor of all experts, as views."""
        for number, expert in enumerate(tensor):
            own = expert.t() if self.experts_transposed and expert.ndim == 2 else expert
            if part != "gate_up_proj":
                yield f"mlp.experts.{number}.{part}", own
                continue
            gate, up = (own[::2], own[1::2]) if self.experts_transposed else own.tensor_split(2)
            yield f"mlp.experts.{number}.gate_proj", gate
            yield f"mlp.experts.{number}.up_proj", up

    def _split(self, spec: ModelSpec, block: Block, part: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        recurrence, q, kv = block.recurrence, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        # A feed-forward next to experts is the expert that all tokens share.
        feed_forward, inner = "mlp", spec.intermediate_size
        if block.mixture is not None:
            feed_forward, inner = "mlp.shared_expert", block.mixture.shared_size
        sizes: dict[str, int] = {}
        if part == self.qkv:
            sizes = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        elif part == "self_attn.q_proj" and self.gated_q and tensor.shape[0] == 2 * q:
            by_head = tensor.unflatten(0, (spec.num_heads, 2, spec.head_dim))
            yield from (
                (f"self_attn.{own}", by_head[:, i].flatten(0, 1)) for i, own in enumerate(("q_proj", "gate_proj"))
            )
            return
        elif block.qk_norm_of == "each head" and part in ("self_attn.q_norm", "self_attn.k_norm") and tensor.ndim == 2:
            yield from ((f"{part}.{head}", weight) for head, weight in enumerate(tensor))
            return
        elif isinstance(recurrence, GatedDelta) and part in ("mixer.in_proj_qkvz", "mixer.in_proj_ba"):
            yield from _by_key_head(recurrence, part, tensor)
            return
        elif recurrence is not None and part in ("mixer.in_proj", "mixer.in_proj_qkv", "mixer.conv"):
            sizes = _parts_of(recurrence, part)
        elif part == self.gate_up:
            sizes = {f"{feed_forward}.gate_proj": inner, f"{feed_forward}.up_proj": inner}
        elif part == "mlp.down_proj":
            part = f"{feed_forward}.down_proj"
        if not sizes or tensor.shape[0] != sum(sizes.values()):  # the loader names a shape that does not fit
            yield part, tensor.flatten() if part == "mlp.gate.e_score_correction_bias" else tensor
        elif part == self.qkv and self.qkv_by_head:
            by_head = tensor.unflatten(0, (spec.num_heads, 3, spec.head_dim))
            yield from ((own, by_head[:, i].flatten(0, 1)) for i, own in enumerate(sizes))
        else:
            yield from zip(sizes, tensor.split(list(sizes.values())), strict=True)


# The names of an expert that all tokens share, where they are of several.
SHARED_EXPERTS = {
    f"mlp.shared_experts.{part}": f"mlp.shared_expert.{part}" for part in ("gate_proj", "up_proj", "down_proj")
}
# The names of the text part of a model of texts and images, as transformers 4 and 5 save it.
OF_TEXT_PART = WeightNames(
    prefixes={
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
)


# Blocks that no text passes: those of images, sound and further tokens.
_FOREIGN = re.compile(
    r"(?:\w+_)?(?:mtp|vision|visual|vit|image|video|audio|speech|multi_modal|multimodal|mm|talker|token2wav|code2wav)(?:_\w+)?"
)
_OPS = re.compile(r"norm|proj|embed|scale|lora_", re.IGNORECASE)  # in names of modules that compute with a text
_OF_GUESSING = re.compile(r"(.+?\.[1-9][0-9]*)\.(?:eh_proj|enorm|hnorm|shared_head|mtp)\..+")


def guessing_layers(names: Iterable[str]) -> frozenset[str]:
    """Return the modules of layers that predict further tokens, by the parts that only such layers have.

    names: of all tensors of a checkpoint.
    """
    return frozenset(match[1] for name in names if (match := _OF_GUESSING.fullmatch(name)))


def foreign_module(name: str, modules: Set[str], guessing: Set[str] = frozenset()) -> str | None:
    """Return the module of a tensor that is none of the model's, if the model does not have that module, else None.

    Tensors of such a module are skipped: a vision tower, a block or layer that predicts further tokens.
    modules: paths of the model's modules, also of those that contain others. guessing: see `guessing_layers`. What may
    change the model's numbers is never foreign: a tensor inside a layer, of an embedding, a norm or the head, any other
    layer, and, outside of known blocks, a tensor directly in a module or with the name of an op, which may be between
    layers (`model.embed_norm.weight`).
    """
    path = name.split(".")[:-1]
    for depth, part in enumerate(path):
        module, parent = ".".join(path[: depth + 1]), ".".join(path[:depth])
        if module not in modules:
            if f"{parent}.0" in modules:  # a list of layers
                return module if module in guessing else None
            contains = not parent or any(other.startswith(f"{parent}.") for other in modules)
            known = _FOREIGN.fullmatch(part) is not None
            may_be_op = depth == len(path) - 1 or any(_OPS.search(inner) for inner in path[depth:])
            return module if contains and (known or not may_be_op) else None
        if part.isdecimal():
            return None
    return None


def decoder_modules(num_layers: int) -> frozenset[str]:
    """The decoder's modules down to its layers, for `foreign_module`."""
    outer = ("model", "model.embed_tokens", "model.layers", "model.norm", "lm_head")
    return frozenset({*outer, *(f"model.layers.{i}" for i in range(num_layers))})


def skipped_tensors(modules: Mapping[str, int]) -> str:
    """The words of a warning. modules: those that are skipped, with their numbers of tensors."""
    groups = [f"{plain(module)}.* ({count})" for module, count in modules.items()]
    return f"skipped tensors of modules that the model does not have: {listed(groups, 8)}"


def _by_key_head(rule: GatedDelta, part: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of Qwen3-Next's merged projections, whose rows stand key head by key head."""
    group = rule.num_value_heads // rule.num_key_heads
    values = group * rule.value_dim
    sizes = {"q": rule.key_dim, "k": rule.key_dim, "v": values, "z": values}
    if part == "mixer.in_proj_ba":
        sizes = {"b": group, "a": group}
    if tensor.shape[0] != rule.num_key_heads * sum(sizes.values()):  # the loader names a shape that does not fit
        yield part, tensor
        return
    heads = tensor.unflatten(0, (rule.num_key_heads, -1)).split(list(sizes.values()), 1)
    yield from ((f"mixer.in_proj_{name}", rows.flatten(0, 1)) for name, rows in zip(sizes, heads, strict=True))


def _parts_of(recurrence: Recurrence, part: str) -> dict[str, int]:
    """The decoder's parts in a recurrence's merged projection or convolution, with their rows."""
    if isinstance(recurrence, ShortConv):
        return {} if part == "mixer.conv" else dict.fromkeys((f"mixer.in_proj_{x}" for x in "BCx"), recurrence.channels)
    parts = dict(recurrence.parts)
    if isinstance(recurrence, Mamba2) and part == "mixer.in_proj":
        parts = {"z": recurrence.features, **parts, "dt": recurrence.num_heads}
    name = "mixer.conv" if part == "mixer.conv" else "mixer.in_proj"
    return {f"{name}_{own}": rows for own, rows in parts.items()}


def _reordered(spec: ModelSpec, layer: int, part: str, tensor: Tensor) -> Tensor:
    """The rows of q, of k and of their norms in the engine's order of a head's dimensions (`RopeSpec.head_order`)."""
    rope = spec.rope_of(spec.block(layer))
    if part == "self_attn.kv_a_proj_with_mqa":  # ends with the part of keys that is turned
        turned = rope.turned(spec.head_dim)
        pairs = replace(rope, rotary_dim=None).head_order(turned)
        if pairs is None or tensor.shape[0] < turned:
            return tensor
        rest = torch.arange(tensor.shape[0] - turned)
        return tensor[torch.cat([rest, pairs + len(rest)]).to(tensor.device)]
    if part.rstrip(".0123456789") not in _OF_HEADS:
        return tensor
    order = rope.head_order(spec.head_dim)
    if order is None or tensor.shape[0] % spec.head_dim:
        return tensor
    heads = tensor.shape[0] // spec.head_dim
    rows = torch.arange(heads)[:, None] * spec.head_dim + order
    return tensor[rows.flatten().to(tensor.device)]
