"""Layers that work on each token's row separately: norms, the feed-forward's activation, scales, and RoPE.

T tokens, H features of the residual stream, I of the feed-forward block (h and i: this rank's), D head_dim. RoPE has
its tables for the model, applied to q and k in every layer.
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evalengine.kernels.row_variants import Xielu
from evalengine.layers.base import Layer
from evalengine.layers.ops import Ops
from evalengine.layers.variants import Activation, Norm


class RowNorm(Layer):
    """[..., H] -> [..., H]: a norm over the last dimension. Every rank has the whole weight."""

    def __init__(self, ops: Ops, size: int, norm: Norm) -> None:
        super().__init__(ops)
        self.size, self.norm = size, norm
        self.weight = self.new_parameter(size)
        self.bias = self.new_parameter(size) if norm.bias else None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.size,)}

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.bias, self.norm)


class HeadNorm(RowNorm):
    """[T, h, D] -> [T, h, D]: a norm over D, without a bias, with weights [h, D]: this rank's of all H heads.

    A checkpoint tensor `NAME.I` has the weight [D] of head I.
    """

    def __init__(self, ops: Ops, heads: int, size: int, norm: Norm) -> None:
        super().__init__(ops, size, replace(norm, bias=False))
        part, parts = ops.tp.part_of(min(ops.tp.size, heads))  # with fewer heads than ranks, several hold one
        self.heads, local = heads, heads // parts
        self.first, self.weight = part * local, self.new_parameter(local, size)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.{head}": (self.size,) for head in range(self.heads)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        head = int(shard.rpartition(".")[2]) - self.first
        if 0 <= head < len(param):
            param[head].copy_(loaded_weight)


class AddNorm(RowNorm):
    """x and residual [T, H] -> the norm of their rounded sum, and that sum itself, which the residual stream goes on
    with. Of x this rank's columns [T, h] will do, for Llama's norm: the others' are gathered."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if x.shape[1] < residual.shape[1]:
            return self.ops.gather_add_rms_norm(x, residual, self.weight, self.norm.eps)
        return self.ops.add_norm(x, residual, self.weight, self.bias, self.norm)


class Add(Layer):
    """x and residual [T, H] -> their rounded sum."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add(x, residual)


class Scale(Layer):
    """Any shape: x times a constant, rounded once."""

    def __init__(self, ops: Ops, factor: float) -> None:
        super().__init__(ops)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.scale(x, self.factor)


def scales(ops: Ops, *factors: float) -> list[Scale | None]:
    """A `Scale` for each factor; None for 1."""
    return [None if factor == 1.0 else Scale(ops, factor) for factor in factors]


class ScaleColumns(Layer):
    """[T, N] -> [T, N]: each column times its own factor, rounded once. parts: widths of columns side by side, with
    their factors."""

    def __init__(self, ops: Ops, parts: Sequence[tuple[int, float]]) -> None:
        super().__init__(ops)
        factors = [torch.full((width,), factor, dtype=torch.float32) for width, factor in parts]
        self.factors = torch.cat(factors).to(ops.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.scale_columns(x, self.factors)


class Softcap(Layer):
    """float32 logits of any shape -> cap * tanh(logits / cap)."""

    def __init__(self, ops: Ops, cap: float) -> None:
        super().__init__(ops)
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        return self.ops.softcap(logits, self.cap)


class ActivationLayer(Layer):
    """[T, 2 i] -> [T, i] if gated, kind(first half) * second half, else [T, i] -> [T, i]; all ranks' [T, I] if a gated
    silu's gathers are fused."""

    def __init__(self, ops: Ops, kind: Activation = "silu", *, gated: bool = True) -> None:
        super().__init__(ops)
        self.kind, self.gated = kind, gated

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim > 2:  # a row for each expert of a token
            return self.forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if self.kind != "silu" or not self.gated:
            return self.ops.activation(x, self.kind, gated=self.gated)
        return self.ops.gather_silu_and_mul(x) if self.ops.fuses_gathers else self.ops.silu_and_mul(x)


class XieluLayer(Layer):
    """[T, i] -> [T, i]: xIELU (arXiv:2411.13010). A layer has four numbers, which every rank loads.

    The learned ones pass a softplus: alpha_p = softplus(w[0]), alpha_n = beta + softplus(w[1]). It is computed once,
    from 40 decimal digits, since logarithms differ between machines.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.weight = self.new_parameter(len(Xielu._fields))

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {f"act_fn.{field}": (1,) if field.startswith("alpha") else () for field in Xielu._fields}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        param[Xielu._fields.index(shard.removeprefix("act_fn."))].copy_(loaded_weight.reshape(()))

    def finalize(self) -> None:
        p, n, beta, eps = self.weight.tolist()
        numbers = torch.tensor([_softplus(p), beta + _softplus(n), beta, eps], dtype=torch.float32)
        self.numbers = Xielu(*numbers.tolist())

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.xielu(x, self.numbers)


def _softplus(x: float) -> float:
    """ln(1 + e^x), rounded from 40 decimal digits; x itself beyond 100, where the two are equal."""
    if not x < 100:
        return x
    with decimal.localcontext(decimal.Context(prec=40)):
        return float((1 + decimal.Decimal(x).exp()).ln())


class Table(NamedTuple):
    """The parameters of a table of cosines and sines."""

    inv_freq: Tensor  # float32 [D / 2]; 0 for pairs that are not turned
    turned: int  # pairs that are
    scaling: float = 1.0  # multiplies their cosines and sines
    wide: bool = False  # `Ops.rope_table`
    long_inv_freq: Tensor | None = None  # of requests of more than `short_positions` tokens; None: the same


class RopeTable(Layer):
    """cos and sin of every position, for each RoPE that layers have. The tables are made once; a step gathers their
    rows once for all layers.

    Where long requests have their own frequencies, their rows follow those of the short ones, and a long
    request's positions are counted from there (`Sequence.rope_start`).
    """

    def __init__(self, ops: Ops, tables: Sequence[Table]) -> None:
        super().__init__(ops)
        self.tables = tuple(tables)
        self.built: list[Tensor] = []  # cos and sin of the first table, of the second, ...

    def build(self, max_positions: int, short_positions: int = 0) -> None:
        """Makes the rows for positions below `max_positions`, behind those of the short requests, if any."""
        self.built = []
        for table in self.tables:
            parts = [self._rows(table, table.inv_freq, short_positions)] if short_positions else []
            own = short_positions and table.long_inv_freq is not None
            parts.append(self._rows(table, table.long_inv_freq if own else table.inv_freq, max_positions))
            self.built += [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in zip(*parts, strict=True)]

    def _rows(self, table: Table, inv_freq: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        assert inv_freq is not None
        cos, sin = self.ops.rope_table(inv_freq, count, table.scaling, wide=table.wide)
        cos[:, table.turned :], sin[:, table.turned :] = 1, 0
        return cos, sin

    def forward(self, positions: Tensor) -> tuple[Tensor, ...]:
        """int64 [T] -> cos, sin [T, D / 2] of each table, side by side."""
        assert self.built, "build() comes first"
        return tuple(table[positions] for table in self.built)


class Rope(Layer):
    """Rotates [T, heads, D] by the step's cos and sin, [T, D / 2]."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.ops.rope(x, cos, sin)


class QueryFactors(Layer):
    """The factor of each token's query, by its position; a step gathers them once for all layers."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.built: Tensor | None = None

    def build(self, factors: Tensor | None) -> None:
        """factors: float32 [positions]; None if all are 1."""
        self.built = None if factors is None else factors.to(self.ops.activation_dtype).to(self.ops.device)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [T] -> [T]."""
        assert self.built is not None
        return self.built[positions]


class ScaleRows(Layer):
    """x [T, heads, D] times a factor for each token, [T], rounded once."""

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        return self.ops.scale_rows(x, factors)
