"""Finding a checkpoint, and filling a model with its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from evalengine.config import ModelConfig
from evalengine.engine.gguf import GGUFFile
from evalengine.engine.locate import CONFIG_FILES, Absent, locate, locate_model
from evalengine.engine.tokenizer import gguf_tokenizer, load_tokenizer
from evalengine.engine.weights import dummy_tensors, fingerprint, safetensors_files, safetensors_tensors
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers.base import Layer
from evalengine.layers.ops import Ops
from evalengine.models.config import ModelSpec, from_hf, token_ids
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import find_class_for_type, get_model_class

Format = Literal["safetensors", "gguf", "dummy"]


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found and understood; no weights are read yet."""

    path: Path  # a folder, or one .gguf or config .json file
    format: Format
    spec: ModelSpec  # eos_token_ids: the config's, the generation config's and the tokenizer's
    tokenizer: PreTrainedTokenizerBase | None  # None only for dummy weights without a tokenizer
    source: str  # the path as configured
    revision: str | None  # the Hub commit
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)  # kept open: parsing takes seconds


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint tensor goes."""

    layer: Layer
    param: nn.Parameter
    shard: str
    shape: tuple[int, ...]


def resolve_checkpoint(model: ModelConfig) -> Checkpoint:
    """Find the model (`locate`), read its configuration and its tokenizer.

    Raises `ConfigError` for a missing or unsupported model, `EvalEngineError` for a damaged file.
    """
    located = locate_model(model)
    path, kind = _weights_of(located.path, model.load_format)
    setting = f"model.path={located.source}"
    tokenizer = _named_tokenizer(model.tokenizer) if model.tokenizer else None
    file = GGUFFile(path) if kind == "gguf" else None
    if file is not None:
        spec = file.spec()
        if tokenizer is None:
            tokenizer = gguf_tokenizer(file.tokenizer_field, setting)
    else:
        spec = _folder_spec(path, setting)
        if tokenizer is None and (kind != "dummy" or (path / "tokenizer.json").exists()):
            tokenizer = load_tokenizer(path, setting)
    if tokenizer is not None:
        spec = _with_tokenizer(spec, tokenizer, setting)
    return Checkpoint(path, kind, spec, tokenizer, located.source, located.revision, file)


def load_model(checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> DecoderForCausalLM:
    """A model on `ops.device` with its weights in the form `ops` multiplies with, ready for `max_model_len` positions.

    Raises one `EvalEngineError` that lists every missing, unexpected or misshapen tensor.
    """
    model = get_model_class(checkpoint.spec.architecture)(checkpoint.spec, ops)
    targets = _targets(model)
    missing = set(targets)
    unexpected: list[str] = []
    wrong: list[str] = []
    for name, tensor in _tensors(checkpoint, targets, ops.device):
        missing.discard(name)
        target = targets.get(name)
        if target is None:
            if not _ignorable(name, checkpoint.spec):
                unexpected.append(name)
        elif tuple(tensor.shape) != target.shape or not tensor.is_floating_point():
            wrong.append(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {list(target.shape)}")
        else:
            target.layer.weight_loader(target.param, tensor, target.shard)
    found = {"missing": sorted(missing), "unexpected": unexpected, "wrong shape or type": wrong}
    if problems := [f"{kind}: {_listing(names)}" for kind, names in found.items() if names]:
        raise EvalEngineError(
            f"{checkpoint.path}: the tensors do not fit {checkpoint.spec.architecture} as configured; "
            f"{'; '.join(problems)}. Download or copy it again, or set model.path to another checkpoint"
        )
    model.finalize(max_model_len)
    return model.eval()


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex) over the weight files' names and contents in name order; for dummy weights, over the spec."""
    if checkpoint.format == "dummy":
        return hashlib.sha256(f"dummy {checkpoint.spec}".encode()).hexdigest()
    return fingerprint([checkpoint.path] if checkpoint.format == "gguf" else safetensors_files(checkpoint.path))


def _weights_of(path: Path, load_format: str) -> tuple[Path, Format]:
    """The folder or file to read and how; a folder whose only weights are one .gguf stands for that file."""
    if load_format not in ("auto", "safetensors", "gguf", "dummy"):
        raise ConfigError(f"model.load_format={load_format}: must be auto, safetensors, gguf or dummy")
    if load_format == "dummy":
        return path, "dummy"
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix.lower() == ".gguf" else []
    if load_format == "gguf" or (load_format == "auto" and ggufs and not any(path.glob("*.safetensors"))):
        if len(ggufs) != 1:
            raise ConfigError(f"model.path={path}: {len(ggufs)} .gguf files here; set model.path to one of them")
        return ggufs[0], "gguf"
    if not path.is_dir():
        raise ConfigError(f"model.path={path}: must be a folder with config.json and *.safetensors, or a .gguf file")
    safetensors_files(path)
    return path, "safetensors"


def _folder_spec(path: Path, setting: str) -> ModelSpec:
    """The spec from config.json; end-of-sequence ids from generation_config.json are added."""
    config_file = path / "config.json" if path.is_dir() else path
    raw = _json(config_file)
    if "model_type" not in raw:
        raise ConfigError(f"{setting}: {config_file} has no model_type; it is not a Hugging Face model's configuration")
    try:
        spec = from_hf(_hf_config(config_file, raw))
    except ConfigError as error:
        raise ConfigError([f"{setting}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # transformers' validation raises several unrelated types
        raise ConfigError(f"{setting}: {config_file} is not a valid configuration ({error})") from error
    generation = path / "generation_config.json"
    more = token_ids(_json(generation).get("eos_token_id")) if generation.exists() else ()
    if not {"dtype", "torch_dtype"} & raw.keys() and path.is_dir():
        spec = dataclasses.replace(spec, dtype=_stored_dtype(path, spec.dtype))
    return dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))


def _hf_config(file: Path, raw: dict[str, Any]) -> Any:
    """transformers' configuration. That of an unknown model, which transformers may not know either, is only read to
    be refused: its values as they are."""
    if find_class_for_type(raw["model_type"]) is None:
        return SimpleNamespace(**raw)
    return AutoConfig.from_pretrained(str(file), local_files_only=True)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model.path={file.parent}: no {file.name} there; it is not a model's folder") from error
    except (OSError, ValueError) as error:
        raise EvalEngineError(f"{file}: cannot be read as JSON ({error}); download or copy it again") from error
    if not isinstance(content, dict):
        raise EvalEngineError(f"{file}: must hold a JSON object; download or copy it again")
    return content


def _stored_dtype(folder: Path, default: torch.dtype) -> torch.dtype:
    """The dtype of the weights themselves, for a configuration that names none."""
    if not any(folder.glob("*.safetensors")):
        return default
    return next(tensor.dtype for _, tensor in safetensors_tensors(folder))


def _named_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        folder = locate(name, None, CONFIG_FILES).path
    except Absent as error:
        raise ConfigError(f"model.tokenizer={name}: not found. Tried: {error}") from error
    return load_tokenizer(folder, f"model.tokenizer={name}")


def _with_tokenizer(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase, setting: str) -> ModelSpec:
    """The spec with the tokenizer's end-of-sequence and, where the config has none, beginning-of-sequence ids."""
    if len(tokenizer) > spec.vocab_size:
        raise ConfigError(
            f"{setting}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {spec.vocab_size}; "
            "set model.tokenizer to the model's own"
        )
    eos = spec.eos_token_ids + token_ids(tokenizer.eos_token_id)
    bos = tokenizer.bos_token_id if spec.bos_token_id is None else spec.bos_token_id
    return dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys(eos)), bos_token_id=bos)


def _targets(model: DecoderForCausalLM) -> dict[str, _Target]:
    """Every checkpoint tensor that the model needs, by name."""
    targets = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        parent, _, own_name = path.rpartition(".")
        for shard, shape in layer.checkpoint_shards(own_name).items():
            prefix = f"{parent}.{shard}" if parent else shard
            for kind, param in layer.named_parameters(recurse=False):
                whole = shape if kind == "weight" else shape[:1]
                targets[f"{prefix}.{kind}"] = _Target(layer, param, shard, whole)
    return targets


def _tensors(
    checkpoint: Checkpoint, targets: dict[str, _Target], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    if checkpoint.gguf is not None:
        return checkpoint.gguf.tensors()
    if checkpoint.format == "dummy":
        return dummy_tensors({name: target.shape for name, target in targets.items()}, device)
    return safetensors_tensors(checkpoint.path)


def _ignorable(name: str, spec: ModelSpec) -> bool:
    """Tensors that checkpoints carry and nobody needs: a tied head's copy, and RoPE frequencies, which are computed."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == "lm_head.weight")


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
