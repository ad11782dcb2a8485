"""A Hugging Face folder's own account of its model: config.json, generation_config.json and what its weights add.

Where files contradict each other, the value that transformers takes is taken, or the folder is refused.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from evalengine.engine.load.adapter import CONFIG as ADAPTER_CONFIG
from evalengine.engine.load.adapter import EMBEDDING, HEAD, Adapter, Parameters, with_adapter
from evalengine.engine.load.locate import CONFIG_FILES, PYTORCH_FILES, WEIGHT_FILES
from evalengine.engine.load.packed import packing_of, with_packed
from evalengine.engine.load.shards import StoredTensor, equal_tensors, stored_dtype, stored_tensors
from evalengine.errors import ConfigError, EvalEngineError, listed
from evalengine.models.describe import context_note, token_ids
from evalengine.models.file_values import one_line, plain
from evalengine.models.hf_config import spec_from_json, unread_fields
from evalengine.models.packing import DUMMY_MXFP4, method_of, quantization_of
from evalengine.models.registry import NotNative, find_family_of_type, get_family, no_family
from evalengine.models.spec import ModelSpec
from evalengine.models.spec_checks import spec_problems
from evalengine.models.weight_names import decoder_modules, foreign_module, guessing_layers, skipped_tensors
from evalengine.util.plain_files import read_json

logger = logging.getLogger(__name__)

CONFIG = "config.json"
PACKED_CONFIG = "hf_quant_config.json"
GENERATION_CONFIG = "generation_config.json"


def folder_spec(
    path: Path,
    setting: str,
    with_weights: bool,
    implementation: str = "auto",
    adapter: Adapter | None = None,
    load_format: str = "auto",
) -> ModelSpec:
    """The spec of a folder, or of one config .json file.

    with_weights: the folder's weights will be loaded, so they tell the dtype, if the configuration leaves it out, and
    whether the head is the embedding table. implementation: `model.implementation`. adapter: will be merged.
    load_format: of `weight_files`.

    Raises `ConfigError` for what is missing, not supported or cannot be meant, `EvalEngineError` for a damaged file.
    """
    refuse_pipes(path)
    config_file = path / CONFIG if path.is_dir() else path
    raw = _config(config_file)
    is_own = adapter is not None and adapter.path.resolve() == path.resolve()
    if with_weights and not is_own and (path / ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"{setting}: {ADAPTER_CONFIG} says that an adapter belongs to these weights, which would be left out; set "
            f"model.adapter={path} to merge it, or remove the file to do without the adapter"
        )
    try:
        spec = _spec({**raw, "eos_token_id": None}, implementation, setting)
    except ConfigError as error:
        raise ConfigError([f"{setting}: {problem}" for problem in error.problems]) from error
    _warn(unread_fields(raw), setting, spec)
    text = raw.get("text_config")
    if note := context_note(spec, (text if isinstance(text, dict) else raw).get("max_position_embeddings")):
        logger.warning("%s: %s", setting, note)
    source, generation = generation_config(path)
    spec = dataclasses.replace(spec, eos_token_ids=token_ids(generation.get("eos_token_id")))
    if with_weights:
        stored = stored_tensors(path, load_format)
        if spec.module is None:
            stored, skipped = _renamed(with_packed(stored, quantization_of(raw)), spec)
            if skipped:
                logger.warning("%s: %s", setting, skipped_tensors(skipped))
        spec = _as_stored(spec, stored, has_dtype=any(raw.get(name) is not None for name in ("dtype", "torch_dtype")))
        if adapter is not None and spec.module is None:
            merged, skipped = _adapted(stored, spec, adapter, raw)
            if any(merged.get(name) != stored.get(name) for name in (EMBEDDING, HEAD)):
                spec = dataclasses.replace(spec, tie_word_embeddings=False)
            if skipped:
                logger.warning("model.adapter=%s: %s", adapter.source, skipped_tensors(skipped))
        spec = dataclasses.replace(spec, packing=packing_of(stored))
    elif spec.module is None and method_of(quantization_of(raw) or {}) == "mxfp4":
        spec = dataclasses.replace(spec, packing=DUMMY_MXFP4)
    if problems := spec_problems(spec):
        raise ConfigError([f"{setting}: {source}: {p.replace('eos_token_ids=', 'eos_token_id=')}" for p in problems])
    return spec


def _spec(raw: dict[str, Any], implementation: str, setting: str) -> ModelSpec:
    """Return the native family's spec if it computes the whole config.json, else that of transformers' module."""
    model_type = raw.get("model_type")
    known = isinstance(model_type, str) and find_family_of_type(model_type) is None and _is_transformers(model_type)
    if implementation == "transformers":
        return _spec_of_module(raw)
    if implementation == "auto" and known:
        try:
            return _spec_of_module(raw)
        except ConfigError as error:
            raise ConfigError(no_family(str(model_type), "; ".join(error.problems))) from error
    try:
        return spec_from_json(raw)
    except NotNative as error:
        why = "; ".join(error.problems)
        try:
            spec = _spec_of_module(raw)
        except ConfigError as theirs:
            raise ConfigError(
                f"{why}; model.implementation=transformers cannot run it either ({'; '.join(theirs.problems)})"
            ) from error
        if implementation == "native":
            raise ConfigError(
                f"{why}; use model.implementation=auto or transformers, whose module computes it"
            ) from error
        logger.warning("%s: %s; running transformers' own module instead (model.implementation)", setting, why)
        return spec


def _is_transformers(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING  # its import takes seconds

    return model_type in CONFIG_MAPPING


def _spec_of_module(raw: dict[str, Any]) -> ModelSpec:
    # Imported here: transformers' modelling code takes seconds, and most models do not need it.
    from evalengine.models.hf_module.describe import spec_of_module

    return spec_of_module(raw)


def generation_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The name and content of the file from which transformers takes a model's generation settings:
    generation_config.json or, only if there is none, config.json. `path` is a folder, or one config .json file."""
    file = path / GENERATION_CONFIG if path.is_dir() else path
    if not file.exists() and not file.is_symlink():  # a link that leads nowhere is a broken download
        file = path / CONFIG
    content = _object(file)
    text = content.get("text_config")
    if isinstance(text, dict):  # of a model of several parts, what the whole does not say
        content = {**text, **{name: value for name, value in content.items() if value is not None}}
    return file.name, content


def model_tensors(
    path: Path, spec: ModelSpec, adapter: Adapter | None = None, load_format: str = "auto"
) -> dict[str, StoredTensor]:
    """The folder's tensors by the names that the model has for them, with the changes of an adapter.

    RoPE frequencies, which are computed, and the copy in a tied head are left out. A tied table that was saved only as
    the head becomes the embedding.
    """
    raw = _config(path / CONFIG)
    stored, _ = _renamed(with_packed(stored_tensors(path, load_format), quantization_of(raw)), spec)
    if adapter is not None:
        stored, _ = _adapted(stored, spec, adapter, raw)
    if spec.tie_word_embeddings and HEAD in stored:
        head = stored.pop(HEAD)
        stored.setdefault(EMBEDDING, head)
    return stored


def _renamed(stored: dict[str, StoredTensor], spec: ModelSpec) -> tuple[dict[str, StoredTensor], Counter[str]]:
    """(The tensors by the decoder's names for them, the modules whose tensors are skipped, by `foreign_module`).

    Raises EvalEngineError for two of one name.
    """
    names, modules = get_family(spec.architecture).weights, decoder_modules(spec.num_layers)
    renamed: dict[str, StoredTensor] = {}
    skipped: Counter[str] = Counter()
    new_names = {name: None if name.endswith("rotary_emb.inv_freq") else names.renamed(name) for name in stored}
    guessing = guessing_layers(ours for ours in new_names.values() if ours is not None)
    for name, tensor in stored.items():
        ours = new_names[name]
        if ours is not None and (module := foreign_module(ours, modules, guessing)) is not None:
            skipped[module] += 1
            continue
        if ours in renamed:
            raise EvalEngineError(
                f"{tensor.file}: {plain(name)} and {plain(renamed[ours].name)} are one tensor's names"
            )
        if ours is not None:
            renamed[ours] = tensor
    return renamed, skipped


def _adapted(
    stored: dict[str, StoredTensor], spec: ModelSpec, adapter: Adapter, raw: dict[str, Any]
) -> tuple[dict[str, StoredTensor], Counter[str]]:
    """A native model's tensors with an adapter, and the modules of the adapter that the model does not have."""
    names, modules = get_family(spec.architecture).weights, decoder_modules(spec.num_layers)

    def key(name: str) -> str:
        return names.renamed(name) or name

    parameters = Parameters(key, foreign=lambda name: foreign_module(key(name), modules))
    base = _as_stored(spec_from_json({**raw, "eos_token_id": None}), stored, has_dtype=True)
    return with_adapter(stored, adapter, parameters, tied=base.tie_word_embeddings)


def refuse_pipes(path: Path) -> None:
    """Raises `EvalEngineError` for a named pipe, a device or a socket among a model's or tokenizer's files: a reader
    would wait for ever."""
    files = (
        [path]
        if not path.is_dir()
        else [f for pattern in CONFIG_FILES + WEIGHT_FILES + PYTORCH_FILES for f in path.glob(pattern)]
    )
    for file in files:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise EvalEngineError(f"{file}: not a regular file; remove it, or copy the folder again")


def _object(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except FileNotFoundError as error:
        raise ConfigError(f"model.path={file.parent}: no {file.name} there; it is not a model's folder") from error
    except (OSError, ValueError) as error:
        raise EvalEngineError(
            f"{file}: cannot be read as JSON ({one_line(error)}); download or copy it again"
        ) from error
    if not isinstance(content, dict):
        raise EvalEngineError(f"{file}: must hold a JSON object; download or copy it again")
    return content


def _config(file: Path) -> dict[str, Any]:
    """config.json's content, with the account of packed weights that ModelOpt wrote next to it."""
    raw, packing = _object(file), file.parent / PACKED_CONFIG
    if quantization_of(raw) is None and file.name == CONFIG and (packing.exists() or packing.is_symlink()):
        raw["quantization_config"] = {"quant_method": "modelopt", **_object(packing)}
    return raw


def _warn(unknown: list[str], setting: str, spec: ModelSpec) -> None:
    """Warns of fields that a user may expect to count."""
    if "auto_map" in unknown:
        unknown.remove("auto_map")
        logger.warning("%s: auto_map names its own code, which is not run: it is a %s", setting, spec.architecture)
    if unknown:
        names = listed([plain(name) for name in unknown], 8)
        logger.warning("%s: nothing reads these fields of config.json: %s", setting, names)


def _as_stored(spec: ModelSpec, stored: dict[str, StoredTensor], has_dtype: bool) -> ModelSpec:
    """The spec, completed from the weights.

    A head that was saved in addition to the embedding with other values is not tied to it, whatever the configuration
    says (typical after an adapter's merge): transformers 5 keeps both, with a warning.
    """
    if not has_dtype:
        spec = dataclasses.replace(spec, dtype=stored_dtype(stored))
    if spec.module is None and spec.tie_word_embeddings and {EMBEDDING, HEAD} <= stored.keys():
        tied = equal_tensors(stored[EMBEDDING], stored[HEAD])
        spec = dataclasses.replace(spec, tie_word_embeddings=tied)
    return spec
