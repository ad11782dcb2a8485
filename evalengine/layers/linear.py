"""Matrix products with a checkpoint's weights: merged (gate and up), merged q, k, v, and back to the residual stream.

    T tokens, K input features, N output features; n and k are this rank's.

Merging only concatenates output rows of the weight: no output depends on other rows. So a rank may hold
some of the rows only, which the literature, where weights are written transposed, calls column-parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from evalengine.layers.base import MergedRows, ProductLayer, load_part
from evalengine.layers.ops import Ops


class MergedLinear(ProductLayer, MergedRows):
    """One product for several checkpoint layers that share an input; `sizes` maps their names to their whole N."""

    def __init__(
        self,
        ops: Ops,
        in_features: int,
        sizes: dict[str, int],
        bias: bool = False,
        *,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(ops, sizes, parts)
        self.in_features = in_features
        self.weight: nn.Parameter | None = self.new_parameter(self.rows, in_features)
        self.bias = self.new_parameter(self.rows) if bias else None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {shard: (rows, self.in_features) for shard, rows in self.sizes.items()}

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, n]."""
        y = self.ops.linear(x if self.input_rule is None else self.quantized(x), self.prepared, self.bias)
        if self.unquantized is None:
            return y
        return torch.where(self.unquantized, self.ops.linear(x, self.prepared, self.bias), y)

    def leave_unquantized(self, shards: Iterable[str]) -> None:
        """Of the columns of some checkpoint layers the input is not quantised: they are computed separately."""
        rows = [torch.full((self.local_rows(shard),), shard in {*shards}) for shard in self.sizes]
        self.unquantized = torch.cat(rows).to(self.ops.device)


class WholeLinear(MergedLinear):
    """`MergedLinear` of which every rank has all rows."""

    def shard_of(self, shard: str) -> tuple[int, int]:
        return 0, 1


class OutputLinear(ProductLayer):
    """The product that ends an attention or a feed-forward: from the ranks' features to the whole residual stream.

    Where no sum may cross ranks, the inputs are gathered, each rank computes its own output columns with the whole
    chain over K, and these are gathered, unless the next norm does so (`Ops.fuses_gathers`). Where sums may
    (`Ops.sums_cross_ranks`), each rank multiplies its own inputs with its columns of the weight, and the products are
    summed, which moves half as many bytes.
    """

    def __init__(
        self,
        ops: Ops,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        whole: bool = False,
        part: bool = False,
    ) -> None:
        """whole: every rank gets all output columns, also where the gathers are fused. part: it gets its own alone, or
        its part of the sum, which a later layer completes."""
        super().__init__(ops)
        self.whole, self.part = whole, part
        self.shape = (out_features, in_features)
        self.by_rows = not ops.sums_cross_ranks or ops.tp.size == 1
        size = ops.tp.size
        own = (out_features // size, in_features) if self.by_rows else (out_features, in_features // size)
        self.weight: nn.Parameter | None = self.new_parameter(*own)
        self.bias = self.new_parameter(own[0]) if bias else None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: self.shape}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        load_part(param, loaded_weight, self.ops.tp, self.by_rows)

    def forward(self, x: Tensor) -> Tensor:
        """[T, k], or all ranks' [T, K] where sums may not cross ranks -> [T, N], or [T, n] if the gathers are fused."""
        tp = self.ops.tp
        if not self.by_rows:
            part = self.ops.linear(self.quantized_part(x), self.prepared, self.bias)
            return part if self.part else tp.sum(part)
        whole = x if x.shape[1] == self.shape[1] else tp.gather_features(x)
        whole = whole if self.input_rule is None else self.quantized(whole)
        part = self.ops.linear(whole, self.prepared, self.bias)
        return part if self.part or (self.ops.fuses_gathers and not self.whole) else tp.gather_features(part)


class QKVLinear(MergedLinear):
    """q, k and v in one product, cut by heads. With more ranks than KV heads, each KV head is held by several."""

    def __init__(
        self, ops: Ops, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False, *,
        gate: bool = False,
    ) -> None:  # fmt: skip
        """gate: whether the output's gate, of as many features as q, comes after v."""
        self.head_dim, tp_size = head_dim, ops.tp.size
        kv_parts = min(tp_size, num_kv_heads)
        assert num_heads % tp_size == 0 and num_kv_heads % kv_parts == 0 and tp_size % kv_parts == 0
        sizes = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        if gate:
            sizes["gate_proj"] = sizes["q_proj"]
        super().__init__(ops, in_features, sizes, bias, parts={"k_proj": kv_parts, "v_proj": kv_parts})
        self._widths = [self.local_rows(shard) for shard in sizes]

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N] -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], as views."""
        q, k, v, *_ = qkv.split(self._widths, dim=-1)
        heads = (-1, self.head_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)

    def gate(self, qkv: Tensor) -> Tensor:
        """[T, N] -> the output's gate, [T, Hq * D], as a view."""
        return qkv[:, -self.local_rows("gate_proj") :]

    def gather_heads(self, x: Tensor, shard: str) -> Tensor:
        """This rank's heads of q, k or v, [T, h, D] -> all of the model's side by side, [T, H * D], on every rank."""
        tp, parts = self.ops.tp, self.shard_of(shard)[1]
        if tp.size == 1:
            return x.flatten(1)
        ranks = tp.gather(x.flatten(1).contiguous()).unflatten(-1, (tp.size, -1))
        return ranks[:, :: tp.size // parts].flatten(1)  # several ranks in a row hold the same heads

    def own_heads(self, heads: Tensor, shard: str) -> Tensor:
        """All of the model's heads, [T, H, D] -> this rank's, [T, h, D]."""
        part, parts = self.shard_of(shard)
        return heads.chunk(parts, dim=1)[part]
