"""GGUF files: metadata to `ModelSpec`, tensors dequantised and named as in a Hugging Face checkpoint.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every type that the `gguf` library dequantises is
read; the arithmetic then runs in the run's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.config import ModelSpec, RopeSpec
from evalengine.models.registry import model_class_for_type

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the RoPE frequencies: Llama 3 scaling, already worked out
# Unquantised files keep their dtype; float32 holds what the others dequantise to.
_FILE_DTYPES = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}


class GGUFFile:
    """One open GGUF file. Raises `EvalEngineError` if it is damaged, `ConfigError` if it is not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(str(path))
        except Exception as error:  # the reader raises whatever numpy or struct met in a damaged header
            raise self._damaged(error) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.field("split.count", 1) > 1:
            raise ConfigError(f"{path}: split GGUF files are not supported; merge them first (gguf-split --merge)")

    def field(self, key: str, default: Any = None) -> Any:
        """One metadata value."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def tokenizer_field(self, key: str) -> Any:
        """One metadata value of the tokenizer, e.g. "ggml.tokens"; None if it is not there."""
        return self.field(f"tokenizer.{key}")

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; it prefixes the model's metadata keys."""
        return str(self.field("general.architecture"))

    def spec(self) -> ModelSpec:
        """The model's description. Raises `ConfigError` listing everything that is not supported."""
        model = model_class_for_type(self.architecture)
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise EvalEngineError(f"{self.path}: no tensor token_embd.weight; it is not a language model's GGUF file")
        heads = int(self._model_field("attention.head_count"))
        hidden = int(self._model_field("embedding_length"))
        head_dim = int(self._model_field("attention.key_length", hidden // heads))
        if problems := self._unsupported(head_dim):
            raise ConfigError([f"{self.path}: {problem}" for problem in problems])
        eos = (self.field("tokenizer.ggml.eos_token_id"), self.field("tokenizer.ggml.eot_token_id"))
        return ModelSpec(
            architecture=model.__name__,
            vocab_size=int(embedding.shape[1]),
            hidden_size=hidden,
            intermediate_size=int(self._model_field("feed_forward_length")),
            num_layers=int(self._model_field("block_count")),
            num_heads=heads,
            num_kv_heads=int(self._model_field("attention.head_count_kv", heads)),
            head_dim=head_dim,
            # Stored as float32: its shortest decimal is the value that the model's own config has (1e-05).
            rms_norm_eps=float(str(np.float32(self._model_field("attention.layer_norm_rms_epsilon")))),
            rope=self._rope(),
            max_position_embeddings=int(self._model_field("context_length")),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            attention_output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm=model.qk_norm,
            dtype=_FILE_DTYPES.get(embedding.tensor_type, torch.float32),
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, float32 tensor), in name order; one dequantised tensor at a time."""
        interleaved = model_class_for_type(self.architecture).gguf_interleaved_rope
        heads = int(self._model_field("attention.head_count"))
        head_counts = {"attn_q": heads, "attn_k": int(self._model_field("attention.head_count_kv", heads))}
        for name in sorted(self._tensors):
            if name == ROPE_FACTORS:
                continue
            tensor = self._dequantised(name)
            role = name.split(".")[-2]
            if interleaved and role in head_counts:
                tensor = _half_split(tensor, head_counts[role])
            yield hf_name(name), tensor

    def _dequantised(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            return torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigError(f"{self.path}: {name} is {kind}, which the gguf library cannot dequantise") from error
        except ValueError as error:
            raise self._damaged(error) from error

    def _model_field(self, key: str, default: Any = None) -> Any:
        value = self.field(f"{self.architecture}.{key}", default)
        if value is None:
            raise EvalEngineError(f"{self.path}: metadata key {self.architecture}.{key} is missing")
        return value

    def _rope(self) -> RopeSpec:
        theta = float(self._model_field("rope.freq_base", 10000.0))
        if ROPE_FACTORS in self._tensors:
            factors = tuple(self._dequantised(ROPE_FACTORS).tolist())
            return RopeSpec(theta=theta, type="factors", freq_factors=factors)
        if self._model_field("rope.scaling.type", "none") == "linear":
            return RopeSpec(theta=theta, type="linear", factor=float(self._model_field("rope.scaling.factor")))
        return RopeSpec(theta=theta)

    def _unsupported(self, head_dim: int) -> list[str]:
        problems = []
        if (scaling := self._model_field("rope.scaling.type", "none")) not in ("none", "linear"):
            problems.append(f"RoPE scaling {scaling} is not supported; supported: none, linear, llama3")
        if self._model_field("rope.dimension_count", head_dim) != head_dim:
            problems.append("only the whole head may be rotated (rope.dimension_count)")
        if self._model_field("attention.value_length", head_dim) != head_dim:
            problems.append("keys and values of different sizes are not supported (attention.value_length)")
        if self._model_field("attention.sliding_window", 0):
            problems.append("a sliding window is not supported (attention.sliding_window)")
        if self._model_field("expert_count", 0):
            problems.append("mixtures of experts are not supported (expert_count)")
        return problems

    def _damaged(self, error: Exception) -> EvalEngineError:
        return EvalEngineError(
            f"{self.path}: not a whole GGUF file ({type(error).__name__}: {error}); "
            "download or copy it again, or set model.path to another file"
        )


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name outside the table is kept as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, role, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[role]}.{kind}" if role in _LAYER_NAMES else name
    role, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[role]}.{kind}" if role in _TOP_NAMES else name


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    """[heads * D, ...] with each head's RoPE pairs side by side -> pairs (i, i + D / 2), as models compute."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
