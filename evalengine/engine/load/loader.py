"""Finds a checkpoint, and fills a model with its weights."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from evalengine.config.schema import ModelConfig
from evalengine.engine.execute.memory import check_weights_fit
from evalengine.engine.load.adapter import Adapter, resolve_adapter
from evalengine.engine.load.generation_config import read_processors
from evalengine.engine.load.hf_folder import folder_spec, model_tensors
from evalengine.engine.load.locate import CONFIG_FILES, Absent, locate, locate_model
from evalengine.engine.load.packed_weights import (
    PackedWeights,
    allocate,
    dummy_forms,
    load_dummies,
    load_packed,
    select_packed,
)
from evalengine.engine.load.shards import (
    DTYPES,
    MAX_NAMES,
    StoredTensor,
    has_weights,
    pytorch_files_open,
    read_tensors,
    weight_files,
)
from evalengine.engine.load.weights import dummy_tensors
from evalengine.engine.text.tokenizer import load_tokenizer
from evalengine.errors import ConfigError, EvalEngineError, listed
from evalengine.kernels.packed_rows import PackedForm
from evalengine.layers.base import CheckpointTensor, Layer, checkpoint_tensors
from evalengine.layers.experts import ExpertDown, ExpertGateUp
from evalengine.layers.linear import MergedLinear, OutputLinear
from evalengine.layers.ops import Ops
from evalengine.layers.variants import Fp8Rows
from evalengine.models.causal_lm import CausalLM
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.file_values import plain
from evalengine.models.registry import get_family
from evalengine.models.spec import ModelSpec, dtype_name
from evalengine.models.spec_checks import SUPPORTED_DTYPES, spec_problems
from evalengine.util.plain_files import fingerprint, gguf_parts, is_later_part
from evalengine.util.validation import read_as

if TYPE_CHECKING:
    from evalengine.engine.load.gguf import GGUFFile

Format = Literal["safetensors", "pytorch", "gguf", "dummy"]
Stamp = tuple[tuple[str, int, int, int, int], ...]  # name, device, inode, bytes and time of change of each weight file


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found and understood; no weights are read yet."""

    path: Path  # a folder, or one .gguf or config .json file
    format: Format
    spec: ModelSpec
    tokenizer: Any  # `load_tokenizer`'s; None only for dummy weights without a tokenizer
    source: str  # the path as configured
    revision: str | None  # the Hub commit; None for a local model
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)  # stays open, so that it is parsed once
    stamp: Stamp = field(default=(), repr=False, compare=False)  # the weight files as they were found
    hashes: dict[str, str] = field(
        default_factory=dict, repr=False, compare=False
    )  # `weights_fingerprint`, and the adapter's, once known
    adapter: Adapter | None = None  # merged into the weights when they are loaded


_hashing = threading.Lock()  # two threads would read the same files


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint tensor goes."""

    layer: Layer
    param: nn.Parameter
    shard: str
    shape: tuple[int, ...]


class _Fit:
    """Compares a checkpoint's tensors with those that a model needs."""

    def __init__(self, targets: dict[str, _Target]) -> None:
        self.targets = targets
        self._missing = set(targets)
        self._unexpected: list[str] = []
        self._wrong: list[str] = []

    def take(self, name: str, dtype: torch.dtype | str, shape: tuple[int, ...]) -> _Target | None:
        """Where the tensor goes; None for one that does not fit. `dtype` is a str for a type that no model can have."""
        self._missing.discard(name)
        target = self.targets.get(name)
        if target is None:
            self._unexpected.append(plain(name))
        elif shape != target.shape or dtype not in SUPPORTED_DTYPES:
            self._wrong.append(f"{name} is {dtype_name(dtype)} {list(shape)}, expected {list(target.shape)}")
            return None
        return target

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises EvalEngineError that lists every tensor that is missing, unexpected or does not fit."""
        misfits = {"missing": sorted(self._missing), "unexpected": self._unexpected, "wrong shape or type": self._wrong}
        if problems := [f"{kind}: {listed(names, MAX_NAMES)}" for kind, names in misfits.items() if names]:
            raise EvalEngineError(
                f"{checkpoint.path}: the tensors do not fit {checkpoint.spec.architecture} as configured; "
                f"{'; '.join(problems)}. Download or copy it again, or set model.path to another checkpoint"
            )


@pytorch_files_open()
def resolve_checkpoint(model: ModelConfig) -> Checkpoint:
    """Finds the model (`locate`), and reads its configuration and its tokenizer.

    Raises `ConfigError` for a missing or unsupported model, `EvalEngineError` for a damaged file.
    """
    words = ModelConfig(
        load_format=model.load_format, implementation=model.implementation, generation_config=model.generation_config
    )
    read_as(ModelConfig, words, "model", strict=True)  # paths are looked for where they are opened
    located = locate_model(model)
    path, kind = _weights_of(located.path, model.load_format)
    setting = f"model.path={located.source}"
    tokenizer = _named_tokenizer(model.tokenizer) if model.tokenizer else None
    if model.implementation == "transformers" and kind == "gguf":
        raise ConfigError(
            f"model.implementation=transformers: {setting} is a GGUF file, which only native families read"
        )
    adapter = resolve_adapter(model)
    if adapter is not None and kind in ("gguf", "dummy"):
        what = "a GGUF file" if kind == "gguf" else "loaded with dummy weights"
        raise ConfigError(
            f"model.adapter={adapter.source}: {setting} is {what}; an adapter needs the safetensors or PyTorch "
            "files of its model: set model.path to their folder or Hub id"
        )
    file = None
    if kind == "gguf":
        from evalengine.engine.load.gguf import GGUFFile  # loads gguf, with which few models are stored
        from evalengine.engine.load.gguf_tokenizer import gguf_tokenizer

        file = GGUFFile(path)
        spec = file.spec()
        if tokenizer is None:
            tokenizer = gguf_tokenizer(file.fields.under("tokenizer"), setting)
    else:
        spec = folder_spec(path, setting, kind != "dummy", model.implementation, adapter, kind)
        processors = read_processors(path, model.generation_config, spec.vocab_size, setting)
        spec = dataclasses.replace(spec, processors=processors)
        if tokenizer is None and (kind != "dummy" or (path / "tokenizer.json").exists()):
            tokenizer = load_tokenizer(path, setting)
    if tokenizer is not None:
        spec = _with_tokenizer(spec, tokenizer, setting)
    stamp = file_stamp(path, kind, adapter)
    return Checkpoint(path, kind, spec, tokenizer, located.source, located.revision, file, stamp, adapter=adapter)


@pytorch_files_open()
def load_model(checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> CausalLM:
    """A model on `ops.device` with its weights in the form `ops` multiplies with, ready for `max_model_len` positions.

    Raises one `EvalEngineError` that lists every missing, unexpected or misshapen tensor, and `ConfigError` for a model
    that is larger than the free memory; unless it is a GGUF file, both before anything is allocated. Raises
    `EvalEngineError` if the files have changed since the checkpoint was found: a run would name other weights than
    those that compute it.
    """
    if checkpoint.spec.module is not None:
        return _module(checkpoint, ops, max_model_len)
    spec, names = checkpoint.spec, get_family(checkpoint.spec.architecture).weights
    stored = None
    quantized: dict[str, StoredTensor] = {}  # weights whose inputs are quantised, by the decoder's names
    packed = PackedWeights({}, {})
    if checkpoint.format in ("safetensors", "pytorch"):
        stored = model_tensors(checkpoint.path, checkpoint.spec, checkpoint.adapter, checkpoint.format)
        needed = [*checkpoint_tensors(DecoderForCausalLM(spec, _without_storage(ops)))]
        fit = _Fit(_targets(needed))
        for name, header in stored.items():
            for own, piece in names.pieces(spec, name, torch.empty(header.shape, device="meta")):
                fit.take(own, DTYPES.get(header.dtype, header.dtype), tuple(piece.shape))
                if header.activations is not None:
                    quantized[own] = header
        fit.check(checkpoint)
        if ops.keeps_packed:
            packed = select_packed(spec, names, stored, needed)
            stored = {name: header for name, header in stored.items() if name not in packed.files}
    dummies: dict[str, PackedForm] = {}
    if checkpoint.format == "dummy" and spec.packing is not None:
        needed = [*checkpoint_tensors(DecoderForCausalLM(spec, _without_storage(ops)))]
        dummies = dummy_forms(spec, needed)
        packed = PackedWeights(dummies if ops.keeps_packed else {}, {})
    saved = packed.saved_bytes(needed, ops.dtype, ops.tp.size) if packed.forms else 0
    check_weights_fit(checkpoint.spec, ops.dtype, ops.device, max_model_len, ops.tp.size, saved)
    model, needed = _made(spec, ops, packed)
    set_input_rules(needed, quantized)
    fit = _Fit(_targets(needed))
    by_name = {tensor.name: tensor for tensor in needed}
    load_packed(spec, names, packed, by_name)
    load_dummies(dummies, by_name, ops.device)
    loaded = {*packed.forms, *dummies}
    for name in loaded:
        fit.take(name, ops.dtype, fit.targets[name].shape)
    others = {name: target for name, target in fit.targets.items() if name not in loaded}
    for name, tensor in _tensors(checkpoint, others, stored, ops.device):
        target = fit.take(name, tensor.dtype, tuple(tensor.shape))
        if target is not None:
            target.layer.weight_loader(target.param, tensor, target.shard)
    fit.check(checkpoint)
    _check_unchanged(checkpoint)
    model.finalize(max_model_len)
    return model.eval()


def _module(checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> CausalLM:
    """transformers' own module with the checkpoint's weights."""
    from evalengine.engine.load.module_weights import (
        load_module,
    )  # transformers' modelling code takes seconds to import

    check_weights_fit(checkpoint.spec, ops.dtype, ops.device, max_model_len, ops.tp.size)
    model = load_module(checkpoint.path, checkpoint.spec, ops, checkpoint.format, checkpoint.adapter)
    _check_unchanged(checkpoint)
    return model


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex) over the weight files' names and contents in name order; for dummy weights, over the spec; with an
    adapter, over that hash and its files'.

    The files are hashed once. Raises `EvalEngineError` if they have changed since the checkpoint was found: a model in
    memory would be given the hash of the next one, which a training has saved in its place.
    """
    if checkpoint.format == "dummy":
        return hashlib.sha256(f"dummy {checkpoint.spec}{checkpoint.spec.module or ''}".encode()).hexdigest()
    with _hashing:
        if "weights" not in checkpoint.hashes:
            _check_unchanged(checkpoint)
            found = fingerprint(files_of(checkpoint))
            if checkpoint.adapter is not None:
                checkpoint.hashes["adapter"] = fingerprint(checkpoint.adapter.files)
                found = hashlib.sha256(f"{found} with adapter {checkpoint.hashes['adapter']}".encode()).hexdigest()
            _check_unchanged(checkpoint)
            checkpoint.hashes["weights"] = found
        return checkpoint.hashes["weights"]


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """The files with the weights; none for dummy weights."""
    return _files(checkpoint.path, checkpoint.format)


def _files(path: Path, kind: Format) -> list[Path]:
    if kind == "dummy":
        return []
    return gguf_parts(path) if kind == "gguf" else weight_files(path, kind)


def file_stamp(path: Path, kind: Format, adapter: Adapter | None = None) -> Stamp:
    """A stamp that changes when a file is rewritten or replaced, without reading it."""
    files = [*_files(path, kind), *(adapter.files if adapter is not None else ())]
    states = [(file.name, file.stat()) for file in files]
    return tuple((name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in states)


def _check_unchanged(checkpoint: Checkpoint) -> None:
    try:
        same = file_stamp(checkpoint.path, checkpoint.format, checkpoint.adapter) == checkpoint.stamp
    except (OSError, EvalEngineError):  # a file is gone
        same = False
    if not same:
        raise EvalEngineError(
            f"{checkpoint.path}: its weight files have changed since the model was found, so no hash can name what is "
            "in memory; load the model again, and let a training save each step in its own folder"
        )


def _weights_of(path: Path, load_format: str) -> tuple[Path, Format]:
    """The folder or file to read, and its format; a folder whose only weights are one .gguf stands for that file, and
    of a split one for its first part."""
    if load_format == "dummy":
        return path, "dummy"
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix.lower() == ".gguf" else []
    ggufs = [file for file in ggufs if not is_later_part(file)] or ggufs
    if load_format == "gguf" or (load_format == "auto" and ggufs and not has_weights(path)):
        if len(ggufs) != 1:
            raise ConfigError(f"model.path={path}: {len(ggufs)} .gguf files here; set model.path to one of them")
        return ggufs[0], "gguf"
    if not path.is_dir():
        raise ConfigError(f"model.path={path}: must be a folder with config.json and *.safetensors, or a .gguf file")
    return path, "pytorch" if weight_files(path, load_format)[0].suffix == ".bin" else "safetensors"


def _named_tokenizer(name: str) -> Any:
    try:
        folder = locate(name, None, CONFIG_FILES).path
    except Absent as error:
        raise ConfigError(f"model.tokenizer={name}: not found. Tried: {error}") from error
    return load_tokenizer(folder, f"model.tokenizer={name}")


def _with_tokenizer(spec: ModelSpec, tokenizer: Any, setting: str) -> ModelSpec:
    """The spec with the tokenizer's beginning-of-sequence id where the config has none.

    The tokenizer's end-of-sequence token does not end a generation by default, as in transformers.
    """
    if len(tokenizer) > spec.vocab_size:
        raise ConfigError(
            f"{setting}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {spec.vocab_size}; "
            "set model.tokenizer to the model's own"
        )
    bos = tokenizer.bos_token_id if spec.bos_token_id is None else spec.bos_token_id
    spec = dataclasses.replace(spec, bos_token_id=bos)
    if problems := [problem for problem in spec_problems(spec) if problem.startswith("bos_token_id")]:
        raise ConfigError([f"{setting}: the tokenizer's {problem}" for problem in problems])
    return spec


def _made(spec: ModelSpec, ops: Ops, packed: PackedWeights) -> tuple[DecoderForCausalLM, list[CheckpointTensor]]:
    """The model with storage for its weights, and the tensors that it needs."""
    ops.without_storage = bool(packed.forms)
    model = DecoderForCausalLM(spec, ops)
    if packed.forms:
        ops.without_storage = False
        allocate(model, [*checkpoint_tensors(model)], packed, ops)
    return model, [*checkpoint_tensors(model)]


def _targets(needed: list[CheckpointTensor]) -> dict[str, _Target]:
    """Every checkpoint tensor that the model needs, by name."""
    return {s.name: _Target(s.layer, s.param, s.shard, s.shape) for s in needed}


def _without_storage(ops: Ops) -> Ops:
    """A copy of the ops on the meta device, for a model of which only names and shapes are wanted."""
    shapes_only = copy.copy(ops)
    shapes_only.device = torch.device("meta")
    return shapes_only


def _tensors(
    checkpoint: Checkpoint,
    targets: dict[str, _Target],
    stored: dict[str, StoredTensor] | None,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors by their Hugging Face names."""
    spec, names = checkpoint.spec, get_family(checkpoint.spec.architecture).weights
    if stored is not None:
        return (piece for name, tensor in read_tensors(stored, device) for piece in names.pieces(spec, name, tensor))
    if checkpoint.gguf is not None:  # llama.cpp's converter has brought q, k and v, and all experts, to one order
        names = dataclasses.replace(names, qkv_by_head=False, experts_transposed=False)
        return (piece for name, tensor in checkpoint.gguf.tensors() for piece in names.pieces(spec, name, tensor))
    return dummy_tensors({name: target.shape for name, target in targets.items()}, device)


def set_input_rules(tensors: Iterable[CheckpointTensor], packed: Mapping[str, StoredTensor]) -> None:
    """Sets `Layer.input_rule` for every layer that has a weight whose input is quantised.

    packed: by the decoder's names, what the files hold of those weights. Of several constants for one input the largest
    counts. Raises EvalEngineError for constants that are no positive numbers, and for a layer that cannot do so.
    """
    shards: dict[Layer, dict[str, StoredTensor | None]] = {}
    for tensor in tensors:
        if tensor.name.endswith(".weight"):
            shards.setdefault(tensor.layer, {})[tensor.shard] = packed.get(tensor.name)
    for layer, own in shards.items():
        found = [stored for stored in own.values() if stored is not None]
        if not found:
            continue
        rules = {stored.activations for stored in found if stored.activations is not None}
        assert len(rules) == 1, "a checkpoint has one rule"
        rule = rules.pop()
        layer.input_rule = Fp8Rows(rule.group, max(map(_constant, found)) if rule.static else None, rule.power)
        if rest := [shard for shard, stored in own.items() if stored is None]:
            if not isinstance(layer, MergedLinear):
                raise _unsupported(found[0], "some of its neighbours' inputs are not")
            layer.leave_unquantized(rest)
        elif not isinstance(layer, MergedLinear | OutputLinear | ExpertGateUp | ExpertDown):
            raise _unsupported(found[0], "no layer of this kind does so")


def _constant(stored: StoredTensor) -> float:
    scale = stored.input_scale
    assert scale is not None, "a constant scale is a partner of the weight"
    ((_, value),) = read_tensors({scale.name: scale})
    number = float(value.float().item())
    if not 2.0**-126 <= number < 2.0**127:
        raise EvalEngineError(f"{scale.file}: {plain(scale.name)} is {number}, no scale; download or copy it again")
    return number


def _unsupported(stored: StoredTensor, why: str) -> EvalEngineError:
    return EvalEngineError(
        f"{stored.file}: the input of {plain(stored.name)} is to be quantised, and {why}; "
        "use the unquantised checkpoint"
    )
