"""A folder with a tiny tied Qwen3, and what the loader reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import load_model, resolve_checkpoint
from evalengine.layers import create_ops
from evalengine.models.decoder import DecoderForCausalLM

WEIGHTS = "model.safetensors"


def tokenizer(vocab: int = 20) -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose tokens are t0, t1 and so on; t1 is its BOS token and t2 its EOS token."""
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="t1", eos_token="t2")


def sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """The sizes of a tiny model, as the fields of its transformers config."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def tied_qwen3(path: Path) -> Path:
    """A tiny tied Qwen3 with a tokenizer, saved by transformers; returns `path`."""
    torch.manual_seed(0)
    config = Qwen3Config(**sizes(23, 16, 24, 2, 2, 1), head_dim=8, tie_word_embeddings=True, eos_token_id=5)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def load(path: Path | str, **settings: Any) -> DecoderForCausalLM:
    """Loads the model at `path` for exact float32 arithmetic on the CPU; `settings` are ModelConfig's."""
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(path), **settings))
    # In exact: in fast, equal weights at another address can give other bits (seen: a product's columns of one value).
    return load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)


def shard(folder: Path, files: int) -> None:
    """Rewrites the folder's one file of weights as several, with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::files]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
