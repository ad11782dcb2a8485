"""Fills transformers' own module with a checkpoint's weights: our reader reads them, transformers' rules name and merge
them."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from evalengine.engine.load.adapter import Adapter, Parameters, with_adapter
from evalengine.engine.load.shards import MAX_NAMES, StoredTensor, read_tensors, stored_tensors
from evalengine.engine.load.weights import dummy_tensors
from evalengine.errors import ConfigError, EvalEngineError, listed
from evalengine.layers.ops import Ops
from evalengine.models.file_values import one_line, plain
from evalengine.models.hf_module import source
from evalengine.models.hf_module.model import TransformersForCausalLM
from evalengine.models.hf_module.trial import can_capture, check_module
from evalengine.models.spec import ModelSpec
from evalengine.models.weight_names import foreign_module, guessing_layers, skipped_tensors

logger = logging.getLogger(__name__)


def load_module(
    path: Path, spec: ModelSpec, ops: Ops, load_format: str, adapter: Adapter | None = None
) -> TransformersForCausalLM:
    """The module on `ops.device`, tried. load_format: of `Checkpoint`; for dummy, the weights are seeded random ones.

    Raises one `EvalEngineError` that lists every tensor that is missing, unexpected or does not fit, and `ConfigError`
    for a module that the trial refuses.
    """
    assert spec.module is not None
    config = source.configuration(spec.module)
    cls = source.class_of(config)
    if load_format == "dummy":
        shapes = {name: tuple(x.shape) for name, x in source.without_weights(spec.module).named_parameters()}
        with source.quiet():
            module = source.made(cls, config, ops.dtype, source.implementations(cls)).to(ops.device)
        with torch.no_grad():
            for name, tensor in dummy_tensors(shapes, ops.device):
                module.get_parameter(name).copy_(tensor)
    else:
        stored = stored_tensors(path, load_format)
        if adapter is not None:
            stored = _adapted(stored, spec.module, adapter)
        tensors = {name: tensor.cpu() for name, tensor in read_tensors(stored, ops.device)}
        module = _filled(path, cls, config, tensors, ops).to(ops.device)
    model = TransformersForCausalLM(spec, ops, module.eval().requires_grad_(False))
    check_module(model)
    model.capturable = ops.capturable and ops.device.type == "cuda" and can_capture(model)
    return model.eval()


def _adapted(stored: dict[str, StoredTensor], text: str, adapter: Adapter) -> dict[str, StoredTensor]:
    """The folder's tensors with an adapter, which names the module's parameters. So do the files, but for a prefix that
    old ones lack (GPT-2's)."""
    module = source.without_weights(text)
    parts = dict(module.named_modules())
    tables = (module.get_input_embeddings(), module.get_output_embeddings())

    def key(name: str) -> str:
        owner = name.rpartition(".")[0]
        if owner in parts and parts[owner] in tables and getattr(module.config, "tie_word_embeddings", False):
            raise ConfigError(
                f"model.adapter={adapter.source}: it changes {plain(owner)}, which is tied to another table; "
                "native families support this, transformers' module does not"
            )
        bare = name.removeprefix(f"{module.base_model_prefix}.")
        return bare if name not in stored and bare in stored else name

    parameters = Parameters(
        key,
        foreign=lambda name: foreign_module(name, parts.keys()),
        transposed=lambda name: isinstance(parts.get(name), Conv1D),
    )
    merged, skipped = with_adapter(stored, adapter, parameters, complete=False)
    if skipped:
        logger.warning("model.adapter=%s: %s", adapter.source, skipped_tensors(skipped))
    return merged


def _filled(path: Path, cls: type, config: object, tensors: dict[str, Tensor], ops: Ops) -> torch.nn.Module:
    fix = "Download or copy it again, or set model.path to another checkpoint"
    try:
        with source.quiet():
            module, found = cls.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=config,
                state_dict=tensors,
                dtype=ops.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below
                **source.implementations(cls),
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise EvalEngineError(f"{path}: transformers cannot load these tensors ({one_line(error)}). {fix}") from error
    modules = {name for name, _ in module.named_modules()}
    unexpected = sorted(found["unexpected_keys"])
    guessing = guessing_layers(unexpected)
    foreign = {name: foreign_module(name, modules, guessing) for name in unexpected}
    if skipped := Counter(of_module for of_module in foreign.values() if of_module is not None):
        logger.warning("%s: %s", path, skipped_tensors(skipped))
    kinds = {
        "missing": sorted(found["missing_keys"]),
        "unexpected": [plain(name) for name, of_module in foreign.items() if of_module is None],
        "wrong shape": sorted(
            f"{name} is {list(has)}, expected {list(needs)}" for name, has, needs in found["mismatched_keys"]
        ),
    }
    if problems := [f"{kind}: {listed(names, MAX_NAMES)}" for kind, names in kinds.items() if names]:
        raise EvalEngineError(
            f"{path}: the tensors do not fit {cls.__name__} as configured; {'; '.join(problems)}. {fix}"
        )
    filled: torch.nn.Module = module
    return filled
