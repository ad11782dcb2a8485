"""Checks a resolved `ModelSpec`, wherever it was read from: the types and ranges of its fields."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evalengine.kernels.limits import MAX_VOCABULARY
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2, Recurrence
from evalengine.models.file_values import is_integer, is_number, shown
from evalengine.models.spec import ModelSpec, RopeSpec, dtype_name

# The largest sizes that are accepted, several times those of any model known. A larger one comes from a damaged or
# hostile file, and would take memory before a missing tensor shows the damage.
LARGEST = {
    "vocab_size": MAX_VOCABULARY,  # log-softmax and sampling add up no more numbers
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 1024,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 24,  # RoPE's angles are float32, which holds no odd position beyond
}
RECURRENT_SIZES = {
    *("num_key_heads", "num_value_heads", "key_dim", "value_dim", "taps"),
    *("num_heads", "head_dim", "num_groups", "state_dim", "channels"),
}
MOST_EXPERTS = 4096  # the logits of one chunk of a softmax
_WHY = {"vocab_size": ", the most probabilities that log-softmax and sampling can add up exactly"}
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def size_demanded(name: str) -> str:
    """The requirement on a field of `LARGEST`: the end of a sentence."""
    return f"must be an integer from 1 to {LARGEST[name]}{_WHY.get(name, '')}"


def spec_problems(spec: ModelSpec) -> list[str]:
    """A sentence, which begins with the field's name, for each value of a spec that has another type, is out of range
    or contradicts another one. Only a spec without problems may reach the layers."""
    problems = [
        f"{name}={shown(getattr(spec, name))}: {size_demanded(name)}"
        for name, largest in LARGEST.items()
        if not is_integer(getattr(spec, name), 1, largest)
    ]
    if not problems:
        problems += _head_problems(spec)
    if not is_number(spec.rms_norm_eps, 1e-30, 1.0):
        problems.append(f"rms_norm_eps={shown(spec.rms_norm_eps)}: must be a number from 1e-30 to 1")
    for rope in spec.ropes:
        problems += [problem for problem in _rope_problems(rope, spec.head_dim) if problem not in problems]
    problems += [
        *_block_problems(spec),
        *_mixture_problems(spec),
        *_latent_problems(spec),
        *dict.fromkeys(_number_problems(spec)),
    ]
    for flag in ("tie_word_embeddings", "attention_bias", "attention_output_bias", "qk_norm"):
        if not isinstance(getattr(spec, flag), bool):
            problems.append(f"{flag}={shown(getattr(spec, flag))}: must be true or false")
    if spec.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(dtype_name(dtype) for dtype in SUPPORTED_DTYPES)
        problems.append(f"dtype={dtype_name(spec.dtype)}: not supported; supported: {supported}")
    if is_integer(spec.vocab_size, 1):
        ids = [("bos_token_id", spec.bos_token_id)] if spec.bos_token_id is not None else []
        for name, token_id in [*ids, *(("eos_token_ids", i) for i in spec.eos_token_ids)]:
            if not is_integer(token_id, 0, spec.vocab_size - 1):
                problems.append(
                    f"{name}={shown(token_id)}: must be a token id, an integer from 0 to {spec.vocab_size - 1}"
                )
    return problems


def _block_problems(spec: ModelSpec) -> Iterator[str]:
    """A sentence for each size or kind that layers may not differ in."""
    for name in ("gated", "mlp_bias", "activation", "parallel", "qk_norm_of", "latent"):
        if len({getattr(block, name) for block in spec.blocks}) > 1:
            yield f"{name}: must be the same in all layers"
    if not any(block.attends for block in spec.blocks):
        yield "blocks: some layer must have attention"
    for kind in dict.fromkeys(block.recurrence for block in spec.blocks):
        if kind is not None:
            yield from _recurrence_problems(kind)


def _recurrence_problems(kind: Recurrence) -> Iterator[str]:
    """A sentence for each size of a recurrence that is none, and for heads that cannot share their keys or groups."""
    of = type(kind).__name__
    for name, value in vars(kind).items():
        least = 2 if name == "taps" else 1
        if name in RECURRENT_SIZES and not is_integer(value, least, LARGEST["hidden_size"]):
            yield f"{of}.{name}={shown(value)}: must be an integer from {least} to {LARGEST['hidden_size']}"
            return
    if isinstance(kind, GatedDelta) and kind.num_value_heads % kind.num_key_heads:
        yield f"{of}.num_value_heads={kind.num_value_heads}: must be a multiple of num_key_heads={kind.num_key_heads}"
    if isinstance(kind, Mamba2) and kind.num_heads % kind.num_groups:
        yield f"{of}.num_heads={kind.num_heads}: must be a multiple of num_groups={kind.num_groups}"


def _latent_problems(spec: ModelSpec) -> Iterator[str]:
    """A sentence for each size of latent attention that is none, or does not fit."""
    if (latent := spec.latent) is None:
        return
    ranks = {"kv_lora_rank": latent.kv_rank, "v_head_dim": latent.value_dim, "qk_rope_head_dim": latent.rotary_dim}
    if latent.q_rank is not None:
        ranks["q_lora_rank"] = latent.q_rank
    for name, size in ranks.items():
        if not is_integer(size, 1, LARGEST["hidden_size"]):
            yield f"{name}={shown(size)}: {size_demanded('hidden_size')}"
            return
    if latent.value_dim > spec.head_dim or latent.rotary_dim > spec.head_dim:
        yield f"v_head_dim={latent.value_dim}: must be at most the keys' {spec.head_dim}"


def _mixture_problems(spec: ModelSpec) -> Iterator[str]:
    """A sentence for each size of the experts that is none, and for layers whose experts differ."""
    mixtures = {block.mixture for block in spec.blocks if block.mixture is not None}
    if len(mixtures) > 1:
        yield "mixture: must be the same in all layers that have experts"
    for mixture in mixtures:
        router = mixture.router
        counts = {
            "experts": router.experts,
            "experts of a token": router.chosen,
            "groups of experts": router.groups,
            "groups of a token": router.kept_groups,
        }
        wrong = [f"{what}={shown(n)}: must be an integer from 1 to {MOST_EXPERTS}" for what, n in counts.items()
                 if not is_integer(n, 1, MOST_EXPERTS)]  # fmt: skip
        inner, largest = mixture.intermediate_size, LARGEST["intermediate_size"]
        if not is_integer(inner, 1, largest) or not is_integer(mixture.shared_size, 0, largest):
            sizes = f"{shown(inner)} and {shown(mixture.shared_size)}"
            wrong.append(f"experts of {sizes} intermediate features: must be integers from 1 to {largest}")
        wrong += [f"{what}={shown(n)}: must be a positive number" for what, n, least in
                  (("scaling of experts", router.scaling, 1e-9), ("least sum of experts", router.least_sum, 0.0))
                  if not is_number(n, least, 1e9)]  # fmt: skip
        yield from wrong or router.problems


def _head_problems(spec: ModelSpec) -> Iterator[str]:
    if spec.num_heads % spec.num_kv_heads:
        yield f"num_kv_heads={spec.num_kv_heads}: num_heads={spec.num_heads} is not a multiple of it"
    if spec.head_dim % 2:
        yield f"head_dim={spec.head_dim}: must be even, RoPE rotates pairs"


def _number_problems(spec: ModelSpec) -> Iterator[str]:
    """A sentence for each factor, cap or window of the spec or of a layer that is no such number."""
    for name in ("embedding_scale", "logits_scale"):
        if not is_number(getattr(spec, name), 1e-9, 1e9):
            yield f"{name}={shown(getattr(spec, name))}: must be a positive number"
    optional = [("logits_softcap", spec.logits_softcap)]
    for block in spec.blocks[: LARGEST["num_layers"]]:
        optional += [(name, getattr(block, name)) for name in ("softcap", "scale", "residual_scale")]
        if block.multipliers is not None:
            factors = vars(block.multipliers).items()
            optional += [(f"multipliers.{name}", value) for name, value in factors if name != "projected"]
        if block.window is not None and not is_integer(block.window, 1, LARGEST["max_position_embeddings"]):
            yield f"window={shown(block.window)}: must be a number of tokens"
    for name, value in optional:
        if value is not None and not is_number(value, 1e-9, 1e9):
            yield f"{name}={shown(value)}: must be a positive number"


def _rope_problems(rope: RopeSpec, head_dim: int) -> Iterator[str]:
    """A sentence for each number of RoPE out of the range that a context may be stretched by, if its type uses it."""
    if rope.type not in ("default", "linear", "llama3", "factors", "yarn"):
        yield f"rope.type={shown(rope.type)}: not supported; supported: default, linear, llama3, yarn"
        return
    if rope.rotary_dim is not None and (not is_integer(rope.rotary_dim, 0, head_dim) or rope.rotary_dim % 2):
        yield f"rope.rotary_dim={shown(rope.rotary_dim)}: must be even, and at most head_dim={head_dim}"
        return
    ranges = {"theta": (1.0, 1e15), "attention_factor": (1e-3, 1e3), "query_beta": (0.0, 1e3)}
    if rope.type in ("linear", "llama3", "yarn"):
        ranges["factor"] = (1.0, 1e6)
    if rope.type == "yarn":
        ranges |= {"beta_fast": (1e-6, 1e6), "beta_slow": (1e-6, 1e6)}
    if rope.type == "llama3":
        ranges |= {"low_freq_factor": (1e-6, 1e6), "high_freq_factor": (1e-6, 1e6)}
    wrong = [name for name, limits in ranges.items() if not is_number(getattr(rope, name), *limits)]
    for name in wrong:
        least, most = ranges[name]
        yield f"rope.{name}={shown(getattr(rope, name))}: must be a number from {least:g} to {most:g}"
    if rope.type == "yarn" and rope.theta == 1.0:
        yield "rope.theta=1.0: must be above 1 for yarn"
    if rope.type in ("llama3", "yarn") or rope.long_factors is not None or rope.query_beta:
        low, high = rope.low_freq_factor, rope.high_freq_factor
        if rope.type == "llama3" and not {"low_freq_factor", "high_freq_factor"} & set(wrong) and low >= high:
            yield f"rope.low_freq_factor={rope.low_freq_factor}: must be below high_freq_factor={rope.high_freq_factor}"
        largest, context = LARGEST["max_position_embeddings"], rope.original_max_position_embeddings
        if not is_integer(context, 1, largest):
            name = "rope.original_max_position_embeddings"
            yield f"{name}={shown(context)}: must be an integer from 1 to {largest}"
    if rope.type == "factors":
        yield from _factor_problems("freq_factors", rope.freq_factors, rope, head_dim)
        if rope.long_factors is not None:
            yield from _factor_problems("long_factors", rope.long_factors, rope, head_dim)


def _factor_problems(name: str, factors: tuple[float, ...] | None, rope: RopeSpec, head_dim: int) -> Iterator[str]:
    """A sentence if there is not one factor for each pair that is turned, or one is no factor."""
    if factors is None or not is_integer(head_dim) or len(factors) != rope.turned(head_dim) // 2:
        have = "none" if factors is None else str(len(factors))
        yield f"rope.{name}: {have}, and head_dim={shown(head_dim)} needs one for each pair"
    elif wrong_factor := [f for f in factors if not is_number(f, 1e-6, 1e6)]:
        yield f"rope.{name}: {shown(wrong_factor[0])} must be a number from 1e-06 to 1e+06"
