"""LoRA adapters as PEFT saves them: which weights of a checkpoint they change, and how.

    N output features, K input features, r the rank.

A weight W [N, K] with lora_A [r, K] and lora_B [N, r] becomes W + scale * (B A), in float32 and by the exact product:
every machine and every number of ranks has the same bits. The loader rounds it once, to the run's dtype. The scale is
alpha / r, or alpha / sqrt(r) with `use_rslora`. Fields of adapter_config.json mean what PEFT 0.21 makes of them; those
that change the result in a way that is not computed here are rejected by their names.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.locate import Absent, locate
from evalengine.engine.load.shards import ADAPTER, DTYPES, FIX, MAX_NAMES, LowRank, StoredTensor, tensors_of
from evalengine.errors import ConfigError, EvalEngineError, listed
from evalengine.models.file_values import is_integer, is_number, one_line, plain, shown
from evalengine.util.plain_files import read_json

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = (ADAPTER, "adapter_model.bin")  # the first that is there counts
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.+)\.lora_(?:([AB])\.weight|(embedding_[AB]))")
_LARGEST_RANK = 1 << 16
_LAYER_DIGITS = 6  # the most in a layer's number
# The expressions into which PEFT puts the patterns of a configuration.
_LAYERS = r"(?:^|.*?\.)%s\.(?P<index>\d+)\."
_MODULE_END = r"(.*\.)?(%s)$"
# Fields that say how an adapter was trained, and change nothing of what it computes.
_TRAINING = frozenset(
    {
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "lora_dropout"),
        *("megatron_core", "runtime_config", "eva_config", "corda_config", "lora_ga_config", "loftq_config"),
        *("qalora_group_size", "fan_in_fan_out"),  # the second follows from the class of each layer, as in PEFT
    }
)
_READ = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        "init_lora_weights",
    }
)
# Values of `init_lora_weights` that leave the base weights as they are. PEFT changes them when it loads the others.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An adapter that was found and understood; no weights are read yet."""

    path: Path
    source: str  # as configured
    revision: str | None  # the Hub commit; None for a local folder
    config: Mapping[str, Any] = field(repr=False, hash=False)

    @property
    def files(self) -> list[Path]:
        """The files that its hash covers. Raises `ConfigError` if it has no weights."""
        weights = [self.path / name for name in WEIGHTS if (self.path / name).exists()]
        if not weights:
            raise ConfigError(f"model.adapter={self.source}: no {WEIGHTS[0]} and no {WEIGHTS[1]} there")
        return [self.path / CONFIG, weights[0]]

    def selects(self, module: str) -> bool:
        """Return whether PEFT adapts a layer with this name, by the fields that select modules."""
        config = self.config
        if _matches(config.get("exclude_modules"), module) or self.saves(module):
            return False
        if (targets := config.get("target_modules")) is None:  # PEFT's choice by the kind of model
            return True
        if _is_all_linear(targets):
            return True
        if not _matches(targets, module):
            return False
        layers = config.get("layers_to_transform")
        if isinstance(targets, str) or layers is None or layers == []:
            return True
        patterns = config.get("layers_pattern") or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if found := re.match(_LAYERS % pattern, module):
                index = found["index"]  # None if the pattern has alternatives: "layers|h"
                wanted = [layers] if isinstance(layers, int) else layers
                return index is not None and len(index) <= _LAYER_DIGITS and int(index) in wanted
        return False

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and scale of one module."""
        config = self.config
        rank = _of_pattern(config.get("rank_pattern"), module, config.get("r", 8))
        alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def saves(self, module: str) -> bool:
        """Return whether a module is one of `modules_to_save`, which name ends of paths, or inside one."""
        return any(f"{saved}." in f"{module}." for saved in self.config.get("modules_to_save") or ())


def resolve_adapter(model: ModelConfig) -> Adapter | None:
    """Find `model.adapter` and read its configuration; None without one.

    Raises `ConfigError` for an adapter that is missing or not supported, `EvalEngineError` for a damaged file.
    """
    if model.adapter is None:
        if model.adapter_revision is not None:
            raise ConfigError("model.adapter_revision: set without model.adapter")
        return None
    setting = f"model.adapter={model.adapter}"
    wanted = (CONFIG, *WEIGHTS, "tokenizer_config.json")
    try:
        located = locate(model.adapter, model.adapter_revision, wanted, "model.adapter")
    except Absent as error:
        raise ConfigError(f"{setting}: not found. Tried: {error}") from error
    file = located.path / CONFIG
    if not file.exists():
        raise ConfigError(f"{setting}: no {CONFIG} there; set it to a folder or Hub id that PEFT saved an adapter to")
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise EvalEngineError(f"{file}: cannot be read as JSON ({one_line(error)}); {FIX}") from error
    if not isinstance(config, dict):
        raise EvalEngineError(f"{file}: must hold a JSON object; {FIX}")
    if problems := [*_problems(config)]:
        raise ConfigError([f"{setting}: {CONFIG}: {problem}" for problem in problems])
    adapter = Adapter(located.path, located.source, located.revision, config)
    for part in adapter.files:
        if not part.is_file():
            raise EvalEngineError(f"{part}: not a regular file; {FIX}")
    if (located.path / "tokenizer_config.json").exists() and model.tokenizer is None:
        logger.warning(
            "%s: its tokenizer and chat template are not used, but the base model's, as in lm-eval "
            "(model.tokenizer=%s uses them)", setting, model.adapter
        )  # fmt: skip
    return adapter


@dataclass(frozen=True)
class Parameters:
    """How the parameters of transformers' module are found among the tensors of a checkpoint."""

    key: Callable[[str], str]  # from a parameter's name to a tensor's
    foreign: Callable[[str], str | None]  # the module of a parameter, if the model does not have it
    transposed: Callable[[str], bool] = lambda module: False  # whether a module's weight is [K, N]


def with_adapter(
    stored: Mapping[str, StoredTensor],
    adapter: Adapter,
    parameters: Parameters,
    *,
    tied: bool = False,
    complete: bool = True,
) -> tuple[dict[str, StoredTensor], Counter[str]]:
    """Return a checkpoint's tensors with the changes of an adapter, and the foreign modules whose changes are skipped.

    tied: the head is the embedding table; if an adapter changes one of them, they are two from then on, as in PEFT.
    complete: a matrix that the adapter's configuration selects, and for which it has nothing, is an error.

    Raises `EvalEngineError` that names each tensor that cannot be used, `ConfigError` for packed weights.
    """
    merging = _Merging(adapter, parameters, {**stored})
    for tensor in tensors_of(adapter.files[1]):
        merging.sort(tensor)
    modules = [*merging.pairs, *merging.replaced]
    if tied and {EMBEDDING, HEAD} & {parameters.key(f"{module}.weight") for module in modules}:
        merging.stored = _with_both_tables(merging.stored)
    merging.replace(tied)
    merging.update()
    merging.check_effect()
    if complete:
        merging.check_complete(stored, tied)
    if merging.problems:
        raise EvalEngineError(
            f"{adapter.files[1]}: {listed(merging.problems, MAX_NAMES, '; ')}. Set model.path to the model that the "
            "adapter was trained on, or download or copy the adapter again"
        )
    return merging.stored, merging.skipped


class _Merging:
    """The tensors of a checkpoint while an adapter's are applied, and what is wrong with these."""

    def __init__(self, adapter: Adapter, parameters: Parameters, stored: dict[str, StoredTensor]) -> None:
        self.adapter, self.parameters, self.stored = adapter, parameters, stored
        self.pairs: dict[str, dict[str, StoredTensor]] = {}  # module -> its matrices, by "A", "embedding_A", ...
        self.replaced: dict[str, list[StoredTensor]] = {}  # module -> whole tensors
        self.taken: set[str] = set()  # the keys of whole tensors that replace the checkpoint's
        self.problems: list[str] = []
        self.skipped: Counter[str] = Counter()

    def sort(self, tensor: StoredTensor) -> None:
        """Put a tensor of the adapter with the others of its module."""
        name = tensor.name.removeprefix(_PREFIX)
        if name == tensor.name:
            self._problem(tensor, f"does not begin with {_PREFIX}")
        elif tensor.dtype not in DTYPES:
            self._problem(tensor, f"is {tensor.dtype}, not one of {', '.join(DTYPES)}")
        elif matrix := _MATRIX.fullmatch(name):
            self.pairs.setdefault(matrix[1], {})[matrix[2] or matrix[3]] = tensor
        else:
            module = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", name).rpartition(".")[0]
            self.replaced.setdefault(module, []).append(tensor)

    def replace(self, tied: bool) -> None:
        """Take whole tensors of the adapter instead of the checkpoint's.

        A table outside `modules_to_save` is one parameter in PEFT if the model is tied: it replaces the embedding and
        the head, unless the file has the other one as well.
        """
        shared: dict[str, StoredTensor] = {}
        for module, tensor in ((module, tensor) for module, tensors in self.replaced.items() for tensor in tensors):
            name = f"{module}.{tensor.name.rpartition('.')[2]}"
            bias = self.adapter.config.get("bias") in ("all", "lora_only") and name.endswith(".bias")
            key = self.parameters.key(name)
            table = key in (EMBEDDING, HEAD)  # PEFT saves these next to their adapters
            if not (self.adapter.saves(module) or bias or table):
                self._problem(tensor, "is not LoRA's, and its module is not in modules_to_save")
            elif (base := self._base(tensor, name)) is not None:
                if tensor.shape != base.shape:
                    self._problem(tensor, f"is {[*tensor.shape]}, and the model's {[*base.shape]}")
                elif tensor.file == base.file:
                    self._problem(tensor, f"and {plain(base.name)} are one weight")
                self.stored[key] = tensor
                self.taken.add(key)
                if tied and table and not self.adapter.saves(module):
                    shared[HEAD if key == EMBEDDING else EMBEDDING] = tensor
        self.stored |= {key: tensor for key, tensor in shared.items() if key not in self.taken}

    def update(self) -> None:
        """Add the products of matrices to weights."""
        for module, pair in self.pairs.items():
            first, name = next(iter(pair.values())), f"{module}.weight"
            embedding = first.name.rpartition(".")[2].startswith("lora_embedding")
            needed = ("embedding_A", "embedding_B") if embedding else ("A", "B")
            if {*pair} != {*needed}:
                self._problem(first, f"needs {' and '.join(f'lora_{part}' for part in needed)}, not {', '.join(pair)}")
                continue
            if not self.adapter.selects(module):
                self._problem(first, f"is of a module that {CONFIG} does not select, so PEFT does not use it")
                continue
            if (base := self._base(first, name, len(pair))) is None:
                continue
            if base.update is not None:
                self._problem(first, f"and {plain(base.update.a.name)} change one weight")
            a, b = (pair[part] for part in needed)
            rank, scale = self.adapter.rank_and_scale(module)
            transposed = embedding or self.parameters.transposed(module)
            n, k = base.shape[:: -1 if transposed else 1] if len(base.shape) == 2 else (0, 0)
            for tensor, shape in ((a, (rank, k)), (b, (n, rank))):
                if tensor.shape != shape:
                    self._problem(tensor, f"is {[*tensor.shape]}, expected {[*shape]}")
            self.stored[self.parameters.key(name)] = replace(base, update=LowRank(a, b, scale, transposed))

    def check_effect(self) -> None:
        """Report an adapter that changes nothing: it has no tensors, or all its LoRA is of skipped modules."""
        updates = any(tensor.update is not None for tensor in self.stored.values())
        if not self.problems and not (updates if self.pairs else self.taken):
            skipped = f": the model does not have {listed([plain(name) for name in self.skipped], MAX_NAMES)}"
            tensors = "LoRA matrices" if self.pairs else "tensors"
            self.problems.append(f"none of its {tensors} changes the model{skipped if self.skipped else ''}")

    def check_complete(self, stored: Mapping[str, StoredTensor], tied: bool) -> None:
        """Report what the configuration selects and the adapter lacks. Experts are exempt: whether each of them is a
        module depends on the version of transformers that trained the adapter. So are targets without names."""
        targets = self.adapter.config.get("target_modules")
        named = targets is not None and not _is_all_linear(targets)
        for key, tensor in (_with_both_tables(stored) if tied else stored).items():
            name = tensor.name if key in stored else key
            module, _, kind = name.rpartition(".")
            updated = self.stored.get(key, tensor).update is not None
            if ".experts." in module or updated or (key in self.taken and self.adapter.saves(module)):
                continue
            if self.adapter.saves(module):
                self.problems.append(f"no {plain(name)}, which is in modules_to_save")
            elif named and kind == "weight" and len(tensor.shape) == 2 and self.adapter.selects(module):
                self.problems.append(f"no lora_A and lora_B for {plain(module)}, which {CONFIG} selects")

    def _base(self, tensor: StoredTensor, name: str, count: int = 1) -> StoredTensor | None:
        """The checkpoint's tensor that `count` tensors of the adapter change; None if there is none."""
        if (foreign := self.parameters.foreign(name)) is not None:
            self.skipped[foreign] += count
            return None
        base = self.stored.get(self.parameters.key(name))
        if base is None:
            self._problem(tensor, f"changes {plain(name)}, which the model does not have")
        elif base.method is not None:
            raise ConfigError(
                f"model.adapter={self.adapter.source}: {plain(tensor.name)} changes a packed weight ({base.packing}); "
                "set model.path to the unquantised model"
            )
        return base

    def _problem(self, tensor: StoredTensor, why: str) -> None:
        self.problems.append(f"{plain(tensor.name)} {why}")


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each field of adapter_config.json that is not supported."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type={shown(config.get('peft_type'))}: only LORA is supported; merge the adapter with PEFT"
        return
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"task_type={shown(config['task_type'])}: only CAUSAL_LM is supported"
    if config.get("init_lora_weights") not in _INITIAL:
        yield (
            f"init_lora_weights={shown(config['init_lora_weights'])}: PEFT changes the base weights when it loads "
            "this; save the adapter by save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if config.get("bias") not in (None, "none", "all", "lora_only"):
        yield f"bias={shown(config['bias'])}: must be none, all or lora_only"
    if config.get("use_rslora") not in (None, True, False):
        yield f"use_rslora={shown(config['use_rslora'])}: must be true or false"
    for name, value in config.items():
        if value and name not in _READ | _TRAINING:
            yield f"{plain(name)}={shown(value)}: not supported; merge the adapter with PEFT's merge_and_unload"
    ranks, alphas = (config.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    for name, patterns, one in (("rank_pattern", ranks, config.get("r", 8)), ("alpha_pattern", alphas, None)):
        if not isinstance(patterns, Mapping):
            yield f"{name}={shown(patterns)}: must be an object"
            continue
        yield from _pattern_problems(name, patterns)
        for key, rank in (*patterns.items(), ("", one)) if name == "rank_pattern" else ():
            if not is_integer(rank, 1, _LARGEST_RANK):
                yield f"{f'{name}: {plain(key)}' if key else 'r'}={shown(rank)}: must be an integer of at least 1"
    for alpha in (config.get("lora_alpha", 8), *(alphas.values() if isinstance(alphas, Mapping) else ())):
        if not is_number(alpha, -1e9, 1e9):
            yield f"lora_alpha={shown(alpha)}: must be a number"
    for name in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"):
        value = config.get(name)
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not (value is None or texts or (isinstance(value, str) and name != "modules_to_save")):
            yield f"{name}={shown(value)}: must be a list of names{' or a pattern' * (name != 'modules_to_save')}"
        elif isinstance(value, str) or name == "layers_pattern":
            yield from _pattern_problems(name, [value] if isinstance(value, str) else value or ())
    layers = config.get("layers_to_transform")
    if not all(is_integer(layer) for layer in (layers if isinstance(layers, list) else [layers or 0])):
        yield f"layers_to_transform={shown(layers)}: must be a number of a layer, or a list of them"


def _pattern_problems(name: str, patterns: Iterable[str]) -> Iterator[str]:
    forms = {"layers_pattern": _LAYERS, "rank_pattern": _MODULE_END, "alpha_pattern": _MODULE_END}
    for pattern in patterns:
        try:
            re.compile(forms.get(name, "%s") % pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{name}: {shown(pattern)} is no regular expression ({one_line(error)})"


def _with_both_tables(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A tied model's tensors with its table as the embedding and as the head."""
    tables = stored.get(EMBEDDING, stored.get(HEAD)), stored.get(HEAD, stored.get(EMBEDDING))
    return {**stored, **{key: table for key, table in zip((EMBEDDING, HEAD), tables, strict=True) if table is not None}}


def _is_all_linear(targets: Any) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _matches(targets: Any, module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or ())


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(_MODULE_END % pattern, module):
            return value
    return default
