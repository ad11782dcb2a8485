"""GGUF files: metadata to `ModelSpec`, tensors dequantised and named as in a Hugging Face checkpoint.

Every type that the `gguf` library dequantises is read; the arithmetic then runs in the run's dtype. `unsupported`
lists what a file needs and no model here computes.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cached_property
from itertools import chain
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType
from gguf.constants import Keys
from gguf.quants import dequantize
from torch import Tensor

from evalengine.engine.load.gguf_names import (
    EMBEDDING,
    HEAD,
    ROPE_FACTORS,
    ROPE_TENSORS,
    GGUFNames,
    half_split,
    is_known,
    listing,
    parts_of,
    roles,
    without_ones,
)
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.describe import context_note
from evalengine.models.gguf_form import GGUFForm, Metadata
from evalengine.models.hf_config import spec_from_json
from evalengine.models.registry import Family, family_of_gguf
from evalengine.models.spec import ModelSpec, RopeSpec, dtype_name
from evalengine.models.spec_checks import LARGEST, spec_problems
from evalengine.util.gguf_header import NO_TOKEN, GGUFFields, GGUFHeader, open_gguf, shown
from evalengine.util.plain_files import CHUNK, gguf_parts

logger = logging.getLogger(__name__)

HALVES = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
FEED_FORWARD_BIASES = {f"blk.0.ffn_{part}.bias" for part in ("gate", "up", "down")}

# Metadata keys, without the architecture's name (llama.cpp's `LLM_KV_NAMES` in src/llama-arch.cpp).
# These are read into the spec or compared with it, or do not influence the numbers of a dense decoder.
READ = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length", "scale")),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window_pattern"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
    *(f"rope.scaling.{key}" for key in ("type", "factor", "finetuned", "original_context_length")),
    *(f"rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow", "log_multiplier")),
    # Granite 4's files have these without a recurrent layer; those of a layer would be tensors that no family reads.
    *(f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")),
}
# These change the numbers unless they are 0 or false.
_OFF_AT_ZERO = (
    *("activation_sparsity_scale", "attn_logit_softcapping", "final_logit_softcapping", "swiglu_clamp_exp"),
    *(f"attention.{key}" for key in ("clamp_kqv", "key_length_mla", "kv_lora_rank", "max_alibi_bias", "q_lora_rank")),
    *(f"attention.{key}" for key in ("shared_kv_layers", "sliding_window", "temperature_length", "temperature_scale")),
    *(f"expert_{key}" for key in ("count", "used_count", "shared_count", "gating_func", "weights_norm")),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "leading_dense_block_count"),
    *("embedding_length_per_layer_input", "n_deepstack_layers", "nextn_predict_layers", "rescale_every_n_layers"),
    *("rope.dimension_sections", "swin_norm", "use_parallel_residual"),
)
# llama.cpp takes a scale of 0 for "not set".
_OFF_AT_ZERO_OR_ONE = (
    *("attention.output_scale", "attention.value_scale", "embedding_scale", "logit_scale", "residual_scale"),
    *("expert_group_count", "expert_group_used_count", "expert_weights_scale", "rope.scaling.alpha"),
    *("full_attention_interval", "interleave_moe_layer_step"),
)
# Keys that change the numbers -> their values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF_AT_ZERO, (0,)),
    **dict.fromkeys(_OFF_AT_ZERO_OR_ONE, (0, 1)),
    "attention.causal": (True,),
    "hidden_activation": ("silu", "swish"),
    "pooling_type": (0, -1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),
}
TOKENIZER_KEYS = {value.removeprefix("tokenizer.") for name, value in vars(Keys.Tokenizer).items() if name.isupper()}
WHAT = {
    "attention.causal": "attention in both directions is not supported",
    "attention.sliding_window": "a sliding window is not supported",
    "expert_count": "mixtures of experts are not supported",
}


class GGUFFile:
    """One open GGUF file. Raises `EvalEngineError` if it is damaged, `ConfigError` if it is not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data, header = _opened(path)
        self.fields = GGUFFields(path, header.metadata)
        self._tensors = header.tensors
        self._data = dict.fromkeys(header.tensors, data)  # the content of the file that each tensor is in
        self._add_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file itself."""
        return GGUFFile, (self.path,)

    def _add_parts(self) -> None:
        """Adds the tensors of a split model's other parts, which are found by the first one's name, as in llama.cpp."""
        keys = ("split.no", "split.count", "split.tensors.count")
        number, count = self.fields.integer(keys[0], 0), max(self.fields.integer(keys[1], 1), 1)
        if number:
            raise ConfigError(
                f"{self.path}: part {number + 1} of {count} of a split model; set model.path to the first part, whose "
                f"name ends in -00001-of-{count:05}.gguf"
            )
        first, *others = gguf_parts(self.path)
        if len(others) != count - 1:
            raise ConfigError(
                f"{self.path}: split.count is {count}, which the file's name contradicts; rename it so that its name "
                f"ends in -00001-of-{count:05}.gguf"
            )
        for number, path in enumerate(others, 1):
            if not path.exists():
                raise EvalEngineError(
                    f"{path}: part {number + 1} of {count} is missing; download or copy it next to {first.name}"
                )
            data, header = _opened(path)
            fields = GGUFFields(path, header.metadata)
            expected = [number, count, self.fields.integer(keys[2])]
            found, twice = [fields.integer(key, None) for key in keys], header.tensors.keys() & self._tensors.keys()
            differing = [f"{k}={x}, expected {y}" for k, x, y in zip(keys, found, expected, strict=True) if x != y]
            if differing or twice:
                problem = "; ".join(differing) or f"tensors of parts before it: {listing(sorted(twice))}"
                raise EvalEngineError(
                    f"{path}: not part {number + 1} of the model of {first.name} ({problem}); download or copy all "
                    "parts of one model again"
                )
            self._tensors |= header.tensors
            self._data |= dict.fromkeys(header.tensors, data)
        if others and len(self._tensors) != (total := self.fields.integer(keys[2])):
            raise EvalEngineError(
                f"{self.path}: its {count} parts have {len(self._tensors)} tensors, expected {total} "
                f"({keys[2]}); download or copy all parts of one model again"
            )

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; it prefixes the model's metadata keys."""
        name = self.fields.string("general.architecture")
        if not re.fullmatch(r"[\w()-]{1,64}", name):
            raise EvalEngineError(f"{self.path}: general.architecture is {name[:40]!r}; download or copy it again")
        return name

    def spec(self) -> ModelSpec:
        """The model's description from the metadata, checked against the tensors.

        `bos_token_id` and `eos_token_ids` are as transformers reads a GGUF file: the end of generation is
        `eos_token_id` alone; only a file without one ends at `eot_token_id`. An id outside the vocabulary is none.
        Raises `ConfigError` listing everything that is not supported, `EvalEngineError` for metadata and tensors that
        contradict each other.
        """
        family = self._family
        ids = self.fields.under("tokenizer.ggml")
        if EMBEDDING not in self._tensors:
            raise EvalEngineError(f"{self.path}: no tensor {EMBEDDING}; it is not a language model's GGUF file")
        size = self._tensors[EMBEDDING].shape[0]
        bos, eos, eot = (ids.token_id(f"{role}_token_id", size) for role in ("bos", "eos", "eot"))
        config = self._config(family) | {"bos_token_id": bos, "eos_token_id": eot if eos is None else eos}
        metadata = Metadata(self._model, self._names(), self._factors)
        problems: list[str] = []
        try:
            if config["num_hidden_layers"] <= LARGEST["num_layers"]:  # a list of more layers is not even made
                self._form.complete(metadata, config)
            spec = self._with_factors(spec_from_json(config), config)
        except ConfigError as error:
            problems = [problem.replace("config.json: ", "") for problem in error.problems]
        problems += unsupported(self.fields, self._model, metadata.read, config, family)
        if problems:
            raise ConfigError([f"{self.path}: {problem}" for problem in problems])
        self._check_tensors(spec)
        self._log(spec, eot, metadata.read)
        return spec

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs (the family's name for it, float32 tensor) in name order; one dequantised tensor at a time. The names
        and rows are those of a folder, before tensors that hold several of the decoder's are split."""
        names = GGUFNames(self._family)
        heads = self._model.integer("attention.head_count", least=1)
        head_counts = {"attn_q": heads, "attn_k": self._kv_heads(heads)} if self._form.permuted else {}
        stored = (self._parts(name, heads) for name in sorted(self._tensors) if name not in ROPE_TENSORS)
        for name, tensor in chain.from_iterable(stored):
            role = name.split(".")[-2] if name.count(".") > 1 else name
            if role in head_counts:
                tensor = half_split(tensor, head_counts[role])
            elif role == "ffn_gate_inp_shexp":
                tensor = tensor.view(1, -1)
            elif name.endswith(".shortconv.conv.weight"):
                tensor = tensor.unsqueeze(1) if tensor.ndim == 2 else tensor
            elif self._form.norms_plus_one and name.endswith("_norm.weight"):
                tensor -= 1
            yield names.own(name), tensor

    def _parts(self, name: str, heads: int) -> Iterable[tuple[str, Tensor]]:
        """The tensors in a stored one: q, k and v of a fused one, where the family's folders have them apart."""
        tensor, names = self._dequantised(name), parts_of(name)
        if len(names) == 1 or self._family.weights.qkv is not None:
            return [(name, tensor)]
        kv_heads = self._kv_heads(heads)
        rows = len(tensor) // (heads + 2 * kv_heads)
        return zip(names, tensor.split([count * rows for count in (heads, kv_heads, kv_heads)]), strict=True)

    def _names(self) -> set[str]:
        """The tensors' names, with those of q, k and v of a fused one."""
        return {part for name in self._tensors for part in parts_of(name)}

    @cached_property
    def _family(self) -> Family:
        return family_of_gguf(self.architecture, self._model.any)

    @property
    def _form(self) -> GGUFForm:
        assert self._family.gguf is not None
        return self._family.gguf

    def _config(self, family: Family) -> dict[str, Any]:
        """The fields that every family's config.json has, from metadata and tensors."""
        fields, form = self._model, self._form
        heads = fields.integer("attention.head_count", least=1)
        hidden = fields.integer("embedding_length", least=1)
        head_dim = fields.integer("attention.key_length", hidden // heads, least=1)
        eps = "attention.layer_norm_rms_epsilon" if form.eps is None else "attention.layer_norm_epsilon"
        context = fields.integer("context_length")
        return {
            "model_type": family.model_type,
            "vocab_size": self._tensors[EMBEDDING].shape[0],
            "hidden_size": hidden,
            "intermediate_size": fields.integer("feed_forward_length"),
            "num_hidden_layers": fields.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(heads),
            "head_dim": head_dim,
            form.eps or "rms_norm_eps": fields.number(eps),
            "max_position_embeddings": context,
            "tie_word_embeddings": HEAD not in self._tensors,
            # The tensors say whether there are biases, and the family's description whether there may be.
            "attention_bias": "blk.0.attn_q.bias" in self._names(),
            **({"mlp_bias": self._tensors.keys() >= FEED_FORWARD_BIASES} if "mlp_bias" in family.reads else {}),
            "dtype": dtype_name(self._dtype()),
            "rope_parameters": self._rope(family, head_dim, context),
        }

    @cached_property
    def _model(self) -> GGUFFields:
        return self.fields.under(self.architecture)

    def _dequantised(self, name: str) -> Tensor:
        info = self._tensors[name]
        try:
            return torch.tensor(dequantize(info.stored(self._data[name]), info.kind), dtype=torch.float32)
        except NotImplementedError as error:
            kind = info.kind.name
            raise ConfigError(f"{self.path}: {name} is {kind}, which the gguf library cannot dequantise") from error

    def _dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every matrix of the file: float16 or bfloat16 if all have it, else float32.

        Quantised blocks become float32, and neither float16 nor bfloat16 holds the other. Vectors (norms, biases) do
        not count: llama.cpp's converter writes them as float32 whatever the model's own dtype, and in a run of that
        dtype they are rounded to it again, as transformers does.
        """
        kinds = {info.kind for info in self._tensors.values() if len(info.shape) > 1}
        return HALVES.get(next(iter(kinds)), torch.float32) if len(kinds) == 1 else torch.float32

    def _kv_heads(self, heads: int) -> int:
        """Of all layers that attend; a list has a number for each layer, 0 for the others."""
        key = "attention.head_count_kv"
        if not isinstance(self._model.any(key), list):
            return self._model.integer(key, heads)
        (number, *others) = sorted({*self._model.integers(key)} - {0}) or [0]
        if others:
            raise ConfigError(f"{self.path}: {key}: layers with unlike numbers of heads are not supported")
        return number

    def _rope(self, family: Family, head_dim: int, context: int) -> dict[str, Any]:
        """config.json's `rope_parameters` as llama.cpp reads RoPE (`llama_model::load_hparams` in src/llama-model.cpp):
        scaling without a type is linear, `rope.scale_linear` is the old name of its factor, 0 means none; the type
        "none" overrides a factor (`llama_context`)."""
        fields = self._model
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10000.0)}
        if "partial_rotary_factor" in family.reads:
            turned = fields.integer("rope.dimension_count", head_dim)
            rope["partial_rotary_factor"] = turned / max(head_dim, 1)  # heads of 0 are refused with the other sizes
        factor = fields.number("rope.scaling.factor", None)
        if factor is None:
            factor = fields.number("rope.scale_linear", 0.0)
        kind = fields.string("rope.scaling.type", "linear")
        if kind == "yarn":
            rope |= {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length", context),
                "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
                "attention_factor": fields.number("rope.scaling.yarn_attn_factor", None),
            }
            if scale := fields.number("rope.scaling.yarn_log_multiplier", 0.0):
                rope |= {"mscale": 1.0, "mscale_all_dim": scale}  # no metadata: llama.cpp takes 1 for `mscale`
        elif kind == "linear" and factor not in (0.0, 1.0):
            rope |= {"rope_type": "linear", "factor": factor}
        return rope

    def _with_factors(self, spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
        """The spec with the divisors of RoPE's frequencies that the file has; a common factor applies, too."""
        if (factors := self._factors(ROPE_FACTORS)) is None:
            return spec
        pairs = spec.rope.turned(spec.head_dim) // 2
        if (shape := self._tensors[ROPE_FACTORS].shape) != (pairs,):
            raise _damaged(self.path, f"{ROPE_FACTORS} is {list(shape)}, and heads of {spec.head_dim} need [{pairs}]")
        if spec.rope.type == "yarn":
            raise ConfigError(f"{ROPE_FACTORS}: not supported together with rope.scaling.type=yarn")
        common = config["rope_parameters"].get("factor", 1.0)
        divisors = (torch.tensor(factors) * common).tolist()
        spec = replace(spec, rope=RopeSpec(theta=spec.rope.theta, type="factors", freq_factors=tuple(divisors)))
        if problems := spec_problems(spec):
            raise ConfigError(problems)
        return spec

    def _factors(self, name: str) -> list[float] | None:
        """A small tensor's numbers; None without it."""
        return self._dequantised(name).flatten().tolist() if name in self._tensors else None

    def _check_tensors(self, spec: ModelSpec) -> None:
        """Raises an error unless the tensors are those that the spec names, before a model is made: `ConfigError` for
        tensors that llama.cpp reads and the family does not, else `EvalEngineError`."""
        shapes = {name: info.shape for name, info in self._tensors.items() if name not in ROPE_TENSORS}
        expected = GGUFNames(self._family).shapes(spec, shapes)
        missing = [name for name in expected if name not in shapes]
        unexpected = [name for name in shapes if name not in expected]
        problems = {
            "missing": missing,
            "unexpected": unexpected,
            "wrong shape": [
                f"{name} is {list(shape)}, expected {list(expected[name])}"
                for name, shape in shapes.items()
                if without_ones(shape) != without_ones(expected.get(name, shape))
            ],
        }
        # llama.cpp reads a model without its biases.
        variant = all(name.endswith(".bias") for name in missing) and all(
            is_known(name, spec.num_layers) for name in unexpected
        )
        if variant and (missing or unexpected) and not problems["wrong shape"]:
            parts = {"with": unexpected, "without": missing}
            differing = " and ".join(f"{word} {roles(names)}" for word, names in parts.items() if names)
            raise ConfigError(
                f"{self.path}: {spec.architecture} {differing} is not supported in GGUF files; set model.path to the "
                "folder that it was converted from, or to another file"
            )
        faults = [f"{kind}: {listing(names)}" for kind, names in problems.items() if names]
        tokens = self.fields.count("tokenizer.ggml.tokens")
        if tokens not in (None, spec.vocab_size):
            faults.append(f"{tokens} tokens for the {spec.vocab_size} rows of {EMBEDDING}")
        version = self.fields.integer("general.quantization_version", GGML_QUANT_VERSION)
        blocks = any(GGML_QUANT_SIZES[info.kind][0] > 1 for info in self._tensors.values())
        if blocks and version != GGML_QUANT_VERSION:
            faults.append(f"general.quantization_version={version}, only {GGML_QUANT_VERSION} is known")
        if faults:
            raise EvalEngineError(
                f"{self.path}: the tensors do not fit {spec.architecture} as the metadata describe it; "
                f"{'; '.join(faults)}. Download or copy it again, or set model.path to another file"
            )

    def _log(self, spec: ModelSpec, eot: int | None, read: Set[str]) -> None:
        """Warns of decisions and unread metadata that a user may not expect."""
        counts = Counter(info.kind for info in self._tensors.values() if len(info.shape) > 1)
        if len(counts) > 1 and HALVES.keys() & counts.keys():
            types = ", ".join(f"{count} {kind.name}" for kind, count in counts.most_common())
            logger.warning("%s: its matrices are %s; together they are taken for float32", self.path, types)
        for role in ("bos", "eos"):
            number = self.fields.integer(f"tokenizer.ggml.{role}_token_id", None, least=-1)
            if number is not None and spec.vocab_size <= number < NO_TOKEN:
                outside = f"{role}_token_id={number} is outside the vocabulary of {spec.vocab_size} tokens"
                logger.warning("%s: %s, so the model has none", self.path, outside)
        if note := context_note(spec, self._model.integer("context_length")):
            logger.warning("%s: %s", self.path, note)
        if eot not in (None, *spec.eos_token_ids):
            logger.warning("%s: eot_token_id=%d does not end generation, only %s", self.path, eot, spec.eos_token_ids)
        if keys := ignored(self.fields, self.architecture, read):
            logger.warning("%s: nothing reads these metadata keys: %s", self.path, listing(keys))


def _opened(path: Path) -> tuple[mmap, GGUFHeader]:
    """One file's content and header. Raises EvalEngineError for a damaged file."""
    try:
        if not path.is_file():  # reading a pipe might never end
            raise EvalEngineError(f"{path}: not a regular file; set model.path to another file")
        data, header = open_gguf(path)
    except OSError as error:
        raise EvalEngineError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # of the header or an empty file
        raise _damaged(path, error) from error
    # Other bytes may be a tensor that a damaged header lost; without a head, a model is silently read as a tied one.
    if any(data[at : at + CHUNK].strip(b"\0") for at in range(header.end, len(data), CHUNK)):
        raise EvalEngineError(
            f"{path}: {len(data) - header.end} bytes follow its last tensor, not all of them zeros; download or copy "
            f"it again, or, if they were appended on purpose, copy the file without them (head -c {header.end})"
        )
    return data, header


def _damaged(path: Path, problem: object) -> EvalEngineError:
    return EvalEngineError(
        f"{path}: not a whole GGUF file ({problem}); download or copy it again, or set model.path to another file"
    )


def unsupported(
    fields: GGUFFields, model: GGUFFields, read: Set[str], config: Mapping[str, Any], family: Family
) -> Iterator[str]:
    """A sentence for each unsupported thing that the file needs.

    fields: the whole file's; model: those below its architecture; read: the keys that the family's own form reads;
    config: what the metadata are as a config.json.
    """
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    if (kind := fields.string("general.type", "model")) != "model":
        yield f"general.type={shown(kind)}: only files of models are supported"
    known = ["none", "linear", "yarn", *({"longrope"} & family.reads)]
    if (scaling := model.string("rope.scaling.type", "linear")) not in known:
        yield f"RoPE scaling {shown(scaling)} is not supported; supported: {', '.join(known)}, llama3"
    turned = head_dim if "partial_rotary_factor" not in rope else int(head_dim * rope["partial_rotary_factor"])
    if model.integer("rope.dimension_count", head_dim) != turned:
        yield "only the whole head may be rotated (rope.dimension_count)"
    base = model.number("rope.freq_base", 10000.0)
    if "rope.freq_base_swa" not in read and model.number("rope.freq_base_swa", base) != base:
        yield "layers with different RoPE settings are not supported (rope.freq_base_swa)"
    if model.integer("attention.value_length", head_dim) != head_dim:
        yield "keys and values of different sizes are not supported (attention.value_length)"
    scale = model.number("attention.scale", 0.0)
    if scale and abs(scale * head_dim**0.5 - 1) > 1e-6 and "attention.scale" not in read:
        yield f"attention.scale={scale}: only the inverse root of the head's size is supported"
    neutral = dict(NEUTRAL)
    if scaling == "yarn":
        neutral["rope.scaling.yarn_ext_factor"] = (1, -1)  # the whole ramp, which is also the default
        del neutral["rope.scaling.yarn_attn_factor"]  # read
    for key, allowed in neutral.items():
        value = None if key in read else model.any(key)
        if any(item not in allowed for item in (value if isinstance(value, list) else [value]) if item is not None):
            yield f"{WHAT[key]} ({key})" if key in WHAT else f"{key}={shown(value)} is not supported"
    if suppressed := fields.integers("tokenizer.ggml.suppress_tokens", []):
        yield f"tokens that are never generated are not supported (tokenizer.ggml.suppress_tokens: {len(suppressed)})"


def ignored(fields: GGUFFields, architecture: str, read: Set[str]) -> list[str]:
    """The keys that look like settings of the model or its tokenizer and that nothing reads: unknown ones, and those
    below another name, such as one that a damaged byte renamed. Keys about the file's origin are not among them."""
    known = {architecture: READ | NEUTRAL.keys() | read, "tokenizer": TOKENIZER_KEYS}
    ends = tuple(key for keys in known.values() for key in keys)
    unread = []
    for key in fields.names():
        prefix, _, rest = key.partition(".")
        other_template = prefix == "tokenizer" and rest.startswith("chat_template.")
        if not other_template and (rest not in known[prefix] if prefix in known else key.endswith(ends)):
            unread.append(key)
    return unread
