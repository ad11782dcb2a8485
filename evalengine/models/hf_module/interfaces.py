"""The engine's attention and mixture of experts where transformers' modules look for them: in `AttentionInterface` and
`ALL_EXPERTS_FUNCTIONS`, by the name `evalengine`.

    T tokens of a step, Hq/Hkv heads, D head_dim of q and k, Dv that of v, k experts of each token.

A module's attention layers hand q, k, v and the other arguments of their attention to whatever `attach` gave them: a
`AttentionRecorder`, which only writes down how they attend, or the model's paged attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.masking_utils import AttentionMaskInterface

from evalengine.errors import ConfigError
from evalengine.models.file_values import shown
from evalengine.models.spec import Block

NAME = "evalengine"
_HANDLER = "evalengine_attention"  # the attribute of a module's parts that holds what `attach` gave them
Handler = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
# Arguments of transformers' attention functions that change nothing of a causal decoder's attention in inference.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
_OTHER_KEYS = "its attention sees other keys than those before a query, or the last of them"
_READ = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"})


def attach(module: nn.Module, handler: Handler) -> None:
    """Has every attention layer of the module call the handler."""
    for part in module.modules():
        setattr(part, _HANDLER, handler)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> [1, T, Hq, Dv], and no attention weights."""
    handler: Handler = getattr(module, _HANDLER)
    return handler(module, query, key, value, attention_mask, arguments), None


class _Mask(Tensor):
    """A mask of which only the rule is wanted, in the attribute `rule`."""


def _mask(*, mask_function: Callable[..., Tensor], device: torch.device | str = "cpu", **_: Any) -> Tensor:
    mask = torch.empty(1, 1, 1, 1, device=device).as_subclass(_Mask)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends."""

    number: int | None
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block: Block  # scale, window, softcap and sinks


@dataclass
class AttentionRecorder:
    """Writes down how the layers of a module without weights attend. longest: the most tokens of a sequence.

    Raises `ConfigError` for attention that the engine does not compute.
    """

    longest: int
    layers: list[LayerAttention] = field(default_factory=list)
    _windows: dict[Any, int | None] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1]:
            raise ConfigError("its attention is not one of each token to those before it")
        _check(module, arguments)
        scale, softcap = arguments.get("scaling"), arguments.get("softcap")
        for name, number in (("scaling", scale), ("softcap", softcap)):
            if number is not None and not isinstance(number, int | float):
                raise ConfigError(f"{name}={shown(number)}: attention with a {name} that is no number is not supported")
        block = Block(
            window=self._window(mask, arguments.get("sliding_window")),
            softcap=None if softcap is None else float(softcap),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            sinks=arguments.get("s_aux") is not None,
        )
        sizes = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
        number = getattr(module, "layer_idx", None)
        self.layers.append(LayerAttention(number, *sizes, block))
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])

    def _window(self, mask: Tensor | None, argument: Any) -> int | None:
        """The keys that a query sees, by the mask that transformers' own attention would use; it also hands the window
        as an argument to some kinds of attention, which must not say otherwise."""
        rule = getattr(mask, "rule", None)
        if rule is None:
            raise ConfigError("its layers do not use the masks that transformers makes for them")
        if rule not in self._windows:
            self._windows[rule] = window_of(rule, self.longest)
        window = self._windows[rule]
        if argument is not None and (argument if argument < self.longest else None) != window:
            raise ConfigError(
                f"sliding_window={shown(argument)}: its mask says {window}, so its attention is not known"
            )
        return window


def _check(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Raises ConfigError for an argument of which nothing is known, or that says what is not computed."""
    if getattr(module, "is_causal", True) is False or arguments.get("is_causal") is False:
        raise ConfigError("its attention is not causal")
    if arguments.get("dropout"):
        raise ConfigError("its attention drops out at random")
    for name in sorted(arguments.keys() - _READ - _WITHOUT_EFFECT):
        if arguments[name] is not None and arguments[name] is not False:
            raise ConfigError(f"{name}: attention with such an argument is not supported")


def window_of(rule: Callable[..., Tensor], longest: int) -> int | None:
    """The window of a mask's rule, (batch, head, query, key) -> whether the key is seen; None without one.

    The rule is evaluated for all keys of some queries. Raises ConfigError for any other than a causal one with or
    without a window, which has the same number of keys before every query.
    """
    queries = sorted({*range(min(longest, 5)), longest // 3, longest // 2, longest - 2, longest - 1} - {-1})
    keys, none = torch.arange(longest), torch.tensor(0)
    counts = {}
    try:
        for query in queries:
            at = torch.tensor(query)
            seen = torch.as_tensor(rule(none, none, at, keys)).broadcast_to(keys.shape)
            counts[query] = int(seen.sum())
            if not torch.equal(seen, (keys <= at) & (keys > at - counts[query])):
                raise ConfigError(_OTHER_KEYS)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError("the mask of its attention depends on what it is given") from error
    window = max(counts.values())
    if any(count != min(query + 1, window) for query, count in counts.items()):
        raise ConfigError(_OTHER_KEYS)
    return None if window == longest else window


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[T, H], int64 [T, k], [T, k] -> [T, H], the sums in float32 (float64), in the order of the router's choice.

    Tokens do not affect each other: each pair of a token and an expert is one row, and a token's pairs are added
    one after another. transformers' own functions add the pairs by a reduction or by `index_add_`, whose order is
    torch's to choose on CUDA. The products are transformers' `grouped_mm` form, one for each expert, of which the mode
    makes one product after another.
    """
    tokens, k = top_k_index.shape
    rows = hidden_states.repeat_interleave(k, dim=0)
    pairs = grouped_mm_experts_forward(self, rows, top_k_index.reshape(-1, 1), top_k_weights.reshape(-1, 1))
    first, *others = pairs.view(tokens, k, -1).unbind(1)
    total = first if first.dtype.itemsize >= 4 else first.float()
    for other in others:
        total = total + other
    return total.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
