"""Matrix products with a checkpoint's weights: plain, merged (gate and up), and merged q, k, v.

    T tokens, K input features, N output features of this rank.

Merging only concatenates output rows: a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from torch import Tensor, nn

from evalengine.layers.base import Layer, shard_rows
from evalengine.layers.ops import Ops, PreparedWeight


class MergedLinear(Layer):
    """One product for several checkpoint layers that share an input; `sizes` maps their names to their whole N."""

    def __init__(
        self, ops: Ops, in_features: int, sizes: dict[str, int], bias: bool = False, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        super().__init__(ops)
        self.in_features, self.sizes = in_features, sizes
        self.tp_rank, self.tp_size = tp_rank, tp_size
        rows = sum(self.local_rows(shard) for shard in sizes)
        self.weight: nn.Parameter | None = self.new_parameter(rows, in_features)
        self.bias = self.new_parameter(rows) if bias else None
        self.prepared: PreparedWeight = None

    def local_rows(self, shard: str) -> int:
        """This rank's output rows of one checkpoint layer."""
        return self.sizes[shard] // self.tp_size

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {shard: (rows, self.in_features) for shard, rows in self.sizes.items()}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        names = list(self.sizes)
        offset = sum(self.local_rows(name) for name in names[: names.index(shard)])
        part = shard_rows(loaded_weight, *self.shard_of(shard))
        param.narrow(0, offset, self.local_rows(shard)).copy_(part)

    def shard_of(self, shard: str) -> tuple[int, int]:
        """(part, parts) of one checkpoint layer's rows that this rank holds."""
        return self.tp_rank, self.tp_size

    def finalize(self) -> None:
        assert self.weight is not None, "finalize() runs once"
        self.prepared, self.weight = self.ops.prepare_weight(self.weight), None

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return self.ops.linear(x, self.prepared, self.bias)


class Linear(MergedLinear):
    """One checkpoint layer, which carries this layer's own name."""

    def __init__(
        self, ops: Ops, in_features: int, out_features: int, bias: bool = False, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        super().__init__(ops, in_features, {"": out_features}, bias, tp_rank, tp_size)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.sizes[""], self.in_features)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        super().weight_loader(param, loaded_weight, "")


class QKVLinear(MergedLinear):
    """q, k and v in one product, cut by heads. With more ranks than KV heads, each KV head is held by several."""

    def __init__(
        self,
        ops: Ops,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.head_dim = head_dim
        self.kv_parts = min(tp_size, num_kv_heads)
        assert num_heads % tp_size == 0 and num_kv_heads % self.kv_parts == 0 and tp_size % self.kv_parts == 0
        sizes = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        super().__init__(ops, in_features, sizes, bias, tp_rank, tp_size)

    def shard_of(self, shard: str) -> tuple[int, int]:
        if shard == "q_proj":
            return self.tp_rank, self.tp_size
        return self.tp_rank * self.kv_parts // self.tp_size, self.kv_parts

    def local_rows(self, shard: str) -> int:
        return self.sizes[shard] // self.shard_of(shard)[1]

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N] -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], as views."""
        q, k, v = qkv.split([self.local_rows(shard) for shard in self.sizes], dim=-1)
        heads = (-1, self.head_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)
