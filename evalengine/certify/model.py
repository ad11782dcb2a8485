"""The model that is certified: a checkpoint, or the shape of a known model with seeded dummy weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from evalengine.config.schema import ModelConfig
from evalengine.errors import ConfigError

if TYPE_CHECKING:
    from evalengine.engine.load.loader import Checkpoint

SHAPE = "shape:"
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
_MOST_TOKENS = 151936  # the vocabulary that `bench throughput` draws token ids from; these models' own are other ones
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "mistral-7b": {  # v0.1, all of whose layers see a window
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": _MOST_TOKENS,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "gemma-3-4b": {  # its text part
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "layer_types": [f"{'full' if layer % 6 == 5 else 'sliding'}_attention" for layer in range(34)],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}


def open_checkpoint(model: ModelConfig, num_layers: int | None = None) -> Checkpoint:
    """Opens a run's `model.path`, or `shape:<name>` (`SHAPES`) cut to `num_layers` if given.

    Raises: ConfigError for an unknown shape, a depth that is not the shape's to cut, or a model that is not found.
    """
    from evalengine.engine.load.loader import resolve_checkpoint  # the shapes alone are asked for without torch

    if not model.path.startswith(SHAPE):
        if num_layers is not None:
            raise ConfigError(f"--layers={num_layers}: only a shape's depth can be cut; {model.path} is none")
        return resolve_checkpoint(model)
    name = model.path.removeprefix(SHAPE)
    if name not in SHAPES:
        raise ConfigError(
            f"model.path={model.path}: no such shape; there are {', '.join(SHAPE + known for known in SHAPES)}"
        )
    config = dict(SHAPES[name])
    depth = config["num_hidden_layers"]
    if num_layers is not None and not 1 <= num_layers <= int(str(depth)):
        raise ConfigError(f"--layers={num_layers}: must lie in 1 ... {depth} for {model.path}")
    config["num_hidden_layers"] = num_layers or depth
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[:num_layers]
    with tempfile.TemporaryDirectory() as folder:  # With dummy weights, nothing is read from the folder later.
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return resolve_checkpoint(ModelConfig(name=name, path=folder, load_format="dummy"))
