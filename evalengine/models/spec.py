"""The description of a model, as a frozen dataclass.

`hf_config` and the GGUF reader translate a checkpoint's own configuration into it, once, and `spec_checks` checks the
result. Layers and engine read no Hugging Face config and no GGUF metadata.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch

from evalengine import version
from evalengine.kernels.attention_variant import AttentionVariant, Latent
from evalengine.kernels.mixture_variant import Mixture
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2, Recurrence, ShortConv
from evalengine.kernels.row_variants import NormVariant, RowVariants
from evalengine.kernels.shapes import Shapes
from evalengine.layers.variants import Activation, Norm
from evalengine.models.processors import LogitsProcessors
from evalengine.models.rope import LATER, RopeSpec, in_use, text_of


@dataclass(frozen=True)
class Multipliers:
    """Factors of a layer's inputs, products and outputs (Falcon-H1), each product rounded."""

    attention_in: float = 1.0
    key: float = 1.0  # of keys, before RoPE
    attention_out: float = 1.0
    recurrence_in: float = 1.0
    projected: tuple[float, ...] = (1.0,) * 5  # of Mamba-2's z, x, B, C and dt
    recurrence_out: float = 1.0
    gate: float = 1.0  # of the feed-forward's gate, before its activation
    feed_forward_out: float = 1.0


class Heads(NamedTuple):
    """The heads of a layer's attention."""

    queries: int
    keys: int  # as many as have values
    size: int  # of keys; values are as large in the pools


@dataclass(frozen=True)
class Block:
    """How a layer differs from Llama's: norm, attention, norm, gated SiLU feed-forward, each added to the residual."""

    rope: RopeSpec | None = None  # None: the model's
    window: int | None = None  # keys that a query sees, its own among them; None: all before it
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    scale: float | None = None  # of q . k; None: head_dim ** -0.5
    sinks: bool = field(default=False, metadata=LATER)  # whether each head has a logit without a value
    # Whether q and k norms span a head (with one weight for all, or one for each head), or all heads.
    qk_norm_of: Literal["head", "each head", "vector"] = "head"
    qk_norm_last: bool = False  # whether they come after RoPE
    norm_before: bool = True  # whether a branch's input is normed
    norm_after: bool = False  # whether its output is, before it is added
    parallel: Literal["one norm", "two norms"] | None = None  # whether both branches take the same residual
    residual_scale: float = 1.0  # of a branch's output
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False
    mixture: Mixture | None = field(default=None, metadata=LATER)  # instead of the one feed-forward
    recurrence: Recurrence | None = field(default=None, metadata=LATER)  # instead of attention
    output_gate: bool = field(default=False, metadata=LATER)  # whether attention's output is times sigmoid(gate(x))
    beside_attention: bool = field(default=False, metadata=LATER)  # whether the recurrence is parallel to attention
    only: Literal["mixer", "feed-forward"] | None = field(default=None, metadata=LATER)  # the one branch, if it is one
    multipliers: Multipliers | None = field(default=None, metadata=LATER)
    latent: Latent | None = field(default=None, metadata=LATER)  # what keys and values are products of, if not of x
    heads: Heads | None = field(default=None, metadata=LATER)  # None: the model's; others only in transformers' modules

    def __repr__(self) -> str:
        """All fields, but the later ones only where they are used: dummy weights of models without have their names."""
        names = [f.name for f in fields(self) if f.name in ("sinks", *in_use(self))]
        return f"Block({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self.only != "feed-forward" and (self.recurrence is None or self.beside_attention)

    @property
    def feeds_forward(self) -> bool:
        """Whether the layer has a feed-forward."""
        return self.only != "mixer"


PLAIN = (Block(),)
LLAMA_NORM = Norm(eps=0.0)


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model. Sizes are element counts."""

    architecture: str  # key of MODEL_REGISTRY
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # whether q, k and v have a bias
    attention_output_bias: bool  # whether o_proj has a bias
    qk_norm: bool
    dtype: torch.dtype  # the checkpoint's dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    processors: LogitsProcessors = field(default_factory=LogitsProcessors)  # those of the generation config
    blocks: tuple[Block, ...] = field(default=PLAIN, metadata=LATER)  # layer i is blocks[i % len(blocks)]
    norm: Norm = field(default=LLAMA_NORM, metadata=LATER)  # the kind of all norms; its eps is `rms_norm_eps`
    embedding_scale: float = field(default=1.0, metadata=LATER)  # of the embedding's rows
    embedding_scale_rounded: bool = field(default=True, metadata=LATER)  # whether it is rounded to the weights' dtype
    logits_scale: float = field(default=1.0, metadata=LATER)
    logits_softcap: float | None = field(default=None, metadata=LATER)  # logits become cap * tanh(logit / cap)
    packing: str | None = field(default=None, metadata=LATER)  # how the files pack weights, and how they were unpacked
    # The class and configuration of transformers' module that computes it (`hf_module.source`); None: `models.decoder`.
    module: str | None = field(default=None, repr=False, metadata=LATER)

    def __repr__(self) -> str:
        return text_of(self)

    def heads_of(self, block: Block) -> Heads:
        """A layer's heads."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim) if block.heads is None else block.heads

    @property
    def every_shapes(self) -> tuple[Shapes, ...]:
        """`shapes` with each kind of heads that layers have."""
        kinds = dict.fromkeys(self.heads_of(block) for block in self.blocks)
        return tuple(
            replace(self.shapes, num_heads=kind.queries, num_kv_heads=kind.keys, head_dim=kind.size) for kind in kinds
        )

    @property
    def shapes(self) -> Shapes:
        """The sizes that the kernels' schedules depend on, where all layers have heads of the same number and size."""
        block = self.blocks[0]
        return Shapes(
            **{size.name: getattr(self if hasattr(self, size.name) else block, size.name) for size in fields(Shapes)}
        )

    def block(self, layer: int) -> Block:
        """The description of a layer, by its number."""
        return self.blocks[layer % len(self.blocks)]

    def rope_of(self, block: Block) -> RopeSpec:
        """A layer's RoPE."""
        return self.rope if block.rope is None else block.rope

    @property
    def ropes(self) -> list[RopeSpec]:
        """The distinct RoPEs of the layers."""
        ropes: list[RopeSpec] = []
        for block in self.blocks:
            if (rope := self.rope_of(block)) not in ropes:
                ropes.append(rope)
        return ropes

    @property
    def mixture(self) -> Mixture | None:
        """The experts of the layers that have some; all of them have the same."""
        return next((block.mixture for block in self.blocks if block.mixture is not None), None)

    @property
    def latent(self) -> Latent | None:
        """The input of the key and value projections in all layers, if it is not the hidden state."""
        return self.blocks[0].latent

    @property
    def dense(self) -> bool:
        """Whether some layer has one feed-forward for all tokens."""
        return any(block.mixture is None and block.feeds_forward for block in self.blocks)

    @property
    def of_each_kind(self) -> ModelSpec:
        """The model with one layer of each kind that it has, in the order of their first ones."""
        kinds = tuple(dict.fromkeys(self.blocks))
        return replace(self, num_layers=len(kinds), blocks=kinds)

    def short_positions(self, max_model_len: int) -> int:
        """The most tokens of a request that has LongRoPE's short factors; 0 if all requests of up to `max_model_len`
        tokens have the same."""
        lengths = [r.original_max_position_embeddings for r in self.ropes if r.long_factors is not None]
        return lengths[0] if lengths and lengths[0] < max_model_len else 0

    @property
    def recurrences(self) -> dict[int, Recurrence]:
        """The layers that have a recurrence, by their numbers."""
        found = ((i, self.block(i).recurrence) for i in range(self.num_layers))
        return {i: recurrence for i, recurrence in found if recurrence is not None}

    @property
    def recurrent_kinds(self) -> tuple[Recurrence, ...]:
        """The kinds of recurrences that layers have, each once."""
        return tuple(dict.fromkeys(self.recurrences.values()))

    @property
    def contract_version(self) -> int:
        """Of the numerics contract by which the model is computed."""
        chunked = any(not isinstance(kind, ShortConv) for kind in self.recurrent_kinds)
        return version.RECURRENT_CONTRACT_VERSION if chunked else version.CONTRACT_VERSION

    @property
    def output_gate(self) -> bool:
        """Whether some layer's attention has an output gate."""
        return any(block.output_gate for block in self.blocks)

    @property
    def attention_scale(self) -> float:
        """The factor of q . k where a block has none of its own."""
        return self.head_dim**-0.5

    def attention_of(self, block: Block) -> AttentionVariant:
        """The variant of a layer's attention."""
        scale = self.attention_scale if block.scale is None else block.scale
        return AttentionVariant(scale, window=block.window, softcap=block.softcap, sinks=block.sinks)

    @property
    def variants(self) -> tuple[AttentionVariant, ...]:
        """The variants of the layers' attention, each once."""
        return tuple(dict.fromkeys(map(self.attention_of, self.blocks)))

    @property
    def norms(self) -> Norm:
        """The kind of the model's norms, with their eps."""
        return replace(self.norm, eps=self.rms_norm_eps)

    @property
    def row_variants(self) -> RowVariants:
        """The variants of norms and RoPE, where they differ from Llama's."""
        norms = () if self.norms.is_plain else (self.norms.variant,)
        if self.qk_norm and self.blocks[0].qk_norm_of == "each head":
            norms = (*norms, NormVariant("layer of each head", cast_first=False))
        return RowVariants(norms, any(rope.wide for rope in self.ropes))

    def kv_heads_of_rank(self, ranks: int) -> int:
        """How many KV heads each of so many ranks holds. With fewer heads than ranks, several ranks share a head."""
        return self.shapes.heads_of_rank(ranks)[1]

    @property
    def implementation(self) -> str:
        """Whose code computes the layers: a value of `model.implementation`."""
        return "native" if self.module is None else "transformers"

    @property
    def described(self) -> str:
        """The architecture, whose code computes it if that is not ours, which requests have another RoPE, and how
        weights are packed."""
        if self.module is None:
            lengths = [r.original_max_position_embeddings for r in self.ropes if r.long_factors is not None]
            more = f" (long RoPE factors for requests of more than {lengths[0]:,} tokens)" if lengths else ""
            return self.architecture + more + (f", weights packed as {self.packing}" if self.packing else "")
        return f"{self.architecture} by transformers {json.loads(self.module)['transformers']}"

    @property
    def plain(self) -> dict[str, Any]:
        """The spec as a dictionary; a field that came later is left out while it has its default."""
        return _plain(self)


def _plain(spec: Any) -> dict[str, Any]:
    values = asdict(spec)
    plain = {name: values[name] for name in in_use(spec)}
    for name in plain:
        value = getattr(spec, name)
        if isinstance(value, RopeSpec | GatedDelta | Mamba2):
            plain[name] = _plain(value)
        elif name == "blocks":
            plain[name] = [_plain(block) for block in value]
    return plain


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
