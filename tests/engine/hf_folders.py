"""Folders with a tiny model as transformers saves them, and what both libraries read from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import load_model, resolve_checkpoint
from evalengine.layers import create_ops
from tests.engine.tied_folder import tokenizer
from tests.parity.paged import PagedRunner

IDS = [3, 1, 4, 1, 5, 9]

CONFIG: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 5,
}


def tiny_llama(path: Path) -> Path:
    """A tiny Llama with an untied head; returns `path`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def engine_logits(folder: Path) -> Tensor:
    """The logits that our engine computes for IDS with the folder's model: float32 [len(IDS), vocabulary]."""
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder)))
    model = load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)
    return PagedRunner(model).step({"s": IDS})["s"]


def edit(folder: Path, **changes: Any) -> None:
    """Sets values in the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
