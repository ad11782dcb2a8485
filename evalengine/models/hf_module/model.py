"""Runs transformers' own module over the engine's paged KV pool.

    T tokens of a step, n rows of interest, H hidden, V vocabulary.

A step's tokens are one row of the module's batch, whatever sequences they are of: only attention and positions tell
these apart. At `exact` and `native` the module computes inside the batch-invariant mode, which is entered for each
step and left after it (1.6 ms on a CPU), so that nothing else in the process is computed otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evalengine.errors import ConfigError
from evalengine.invariant import CoverageAudit, set_batch_invariant_mode
from evalengine.kernels.attention_batch import KVCache
from evalengine.layers.base import Layer
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.models.causal_lm import CausalLM
from evalengine.models.hf_module.describe import base_of
from evalengine.models.hf_module.interfaces import attach
from evalengine.models.spec import ModelSpec


class PagedLayers:
    """The attention of a module's layers over the pools of one step."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        self.ops = ops
        self.audit: CoverageAudit | None = None  # watches the module; what the engine's own ops promise is known
        self.kv_caches: list[KVCache] = []
        self.metadata: AttentionMetadata | None = None
        self._variants = [spec.attention_of(spec.block(layer)) for layer in range(spec.num_layers)]
        if problems := dict.fromkeys(problem for variant in self._variants for problem in ops.problems(variant)):
            raise ConfigError("; ".join(problems))

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> [1, T, Hq, Dv]. Values and keys of different sizes
        share a pool of the larger one; columns of zeros change no other column."""
        assert self.metadata is not None and isinstance(module.layer_idx, int)
        with nullcontext() if self.audit is None else self.audit.paused():
            kv = self.kv_caches[module.layer_idx]
            variant, sinks = self._variants[module.layer_idx], arguments.get("s_aux")
            size, dtype = kv[0].shape[-1], self.ops.activation_dtype
            rows = [_rows(x, size) for x in (q, k, v)]
            metadata = self.metadata.of_layer(module.layer_idx)
            self.ops.store_kv(rows[1], rows[2], kv, metadata.slot_mapping)
            sinks = None if sinks is None else sinks.to(self.ops.dtype)
            out = self.ops.attention(rows[0].to(dtype), kv, metadata, variant, sinks)
            return out[None, ..., : v.shape[-1]].to(v.dtype)


def _rows(x: Tensor, size: int) -> Tensor:
    """[1, heads, T, d] -> [T, heads, size], with zeros in the columns past d."""
    rows = x[0].transpose(0, 1)
    return (rows if x.shape[-1] == size else nn.functional.pad(rows, (0, size - x.shape[-1]))).contiguous()


class _Given(nn.Module):
    """Replaces the part of the module that makes hidden states, and has those that it was given."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs, self.hidden = outputs, torch.empty(0)

    @property
    def decoder(self) -> _Given:
        """The inner part that OPT's module uses."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._outputs(last_hidden_state=self.hidden)


class _Head(Layer):
    """The vocabulary projection, to float32 logits as in the engine's own models."""

    def __init__(self, ops: Ops, linear: nn.Linear, layers: PagedLayers) -> None:
        super().__init__(ops)
        self.prepared = ops.prepare_weight(linear.weight.to(ops.dtype), lm_head=True)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self._layers = layers

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, n, H] -> float32 [1, n, V]."""
        audit = self._layers.audit
        with nullcontext() if audit is None else audit.paused():
            logits = self.ops.lm_head(hidden[0].to(self.ops.activation_dtype), self.prepared)
            return (logits if self.bias is None else logits + self.bias)[None]


class TransformersForCausalLM(CausalLM):
    """A module of transformers' as the engine runs models. Its weights are loaded, on the ops' device."""

    layers_alike = False

    def __init__(self, spec: ModelSpec, ops: Ops, module: PreTrainedModel) -> None:
        super().__init__()
        self.spec, self.ops, self.module = spec, ops, module
        self.layers = PagedLayers(spec, ops)
        attach(module, self.layers)
        self._base_name, self._base = base_of(module)
        # A mask of four dimensions is taken as it is, so that the module makes none.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=ops.dtype, device=ops.device)
        self._after: PreTrainedModel | None = None
        self._given: _Given | None = None

    def invariant(self) -> AbstractContextManager[None]:
        """The mode in which the module computes."""
        return nullcontext() if self.ops.name == "fast" else set_batch_invariant_mode(keep_weights=True)

    def forward(  # type: ignore[override]  # such a model has no recurrent layers
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        assert len(kv_caches) == self.spec.num_layers, "every layer has a pool"
        self.layers.kv_caches, self.layers.metadata = kv_caches, metadata
        with self.invariant():
            outputs = self._base(
                input_ids=input_ids[None],
                position_ids=positions[None],
                attention_mask=self._no_mask,
                use_cache=False,
                return_dict=True,
            )
        if self._after is None:
            self._split(type(outputs))
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> float32 logits [n, V]: what the module does after its hidden states, over our projection."""
        assert self._after is not None and self._given is not None, "hidden states were computed"
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with self.invariant():
            logits: Tensor = self._after(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        self._given.hidden = torch.empty(0)
        return logits.float()

    def _split(self, outputs: Any) -> None:
        """Parts what makes hidden states from what comes after them, which is the same module without the former.
        outputs: the class of what the former returns."""
        after, given = copy.copy(self.module), _Given(outputs)
        after._modules = dict(self.module._modules)
        after._modules[self._base_name] = given
        linear = self.module.get_output_embeddings()
        name = next(
            (name for name, part in self.module._modules.items() if part is linear and linear is not None), None
        )
        if name is not None and type(linear) is nn.Linear:
            after._modules[name] = _Head(self.ops, linear, self.layers)
            if self.module.get_input_embeddings().weight is not linear.weight:
                self.module._modules[name] = None  # the prepared form of its weight is all that is needed
        self.__dict__["_after"], self.__dict__["_given"] = (
            after,
            given,
        )  # not parts of this one: their weights are its own

    def named_ops(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts whose outputs `op_hook` shows: those that have their own weights, or no parts."""
        yield from _ops_of(self.module, "")
        if self._after is not None:
            heads = (part for part in self._after._modules.values() if isinstance(part, _Head))
            yield from (("lm_head", head) for head in heads)


def _ops_of(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    parts = [(part_name, part) for part_name, part in module.named_children() if part is not None]
    if name and (not parts or any(True for _ in module.parameters(recurse=False))):
        yield name, module
        return
    for part_name, part in parts:
        yield from _ops_of(part, f"{name}.{part_name}" if name else part_name)
