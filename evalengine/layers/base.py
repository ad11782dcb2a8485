"""The base of every layer: a module that holds an `Ops`, calls nothing else, and knows its checkpoint tensors.

Under tensor parallelism a layer holds one rank's part of its weight: the r-th of n equal parts of the output rows, and
of the input columns where `fast` sums over ranks (`OutputLinear`). `ops.tp` tells the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evalengine.kernels.packed_rows import PackedFragments, PackedRows
from evalengine.layers.ops import Ops, PreparedWeight
from evalengine.layers.parallel import TensorParallel
from evalengine.layers.variants import Fp8Rows


class Layer(nn.Module):
    """A leaf module: one op, whose output its forward returns, so that `op_hook` sees it."""

    input_rule: Fp8Rows | None = None  # how a product's input is quantised
    packed: PackedRows | None = None  # instead of the weight, which has no storage then

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def quantized(self, x: Tensor) -> Tensor:
        """A product's input, as the checkpoint's `input_rule` requires."""
        return x if self.input_rule is None else self.ops.fp8_rows(x, self.input_rule)

    def quantized_part(self, x: Tensor) -> Tensor:
        """As `quantized`, of this rank's part of the features: a scale that is made is that of all ranks' features."""
        rule, tp = self.input_rule, self.ops.tp
        if rule is None or rule.scale is not None or tp.size == 1:
            return self.quantized(x)
        whole = self.quantized(tp.gather_features(x.flatten(0, -2)))
        return whole.chunk(tp.size, -1)[tp.rank].unflatten(0, x.shape[:-1])

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter in the run's dtype, on its device."""
        device = torch.device("meta") if self.ops.without_storage else self.ops.device
        return nn.Parameter(torch.empty(shape, dtype=self.ops.dtype, device=device), requires_grad=False)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the whole weight, for each checkpoint layer that fills this one, which is called `name`.

        A bias has the weight's first dimension. Empty if the layer has no separate tensors.
        """
        return {}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        """Copies this rank's part of a whole checkpoint tensor into its place in `param`; `shard` is a key of
        `checkpoint_shards`."""
        param.copy_(loaded_weight)

    def finalize(self) -> None:
        """Prepares the loaded weights for `ops`, and drops those that are no longer needed."""


class ProductLayer(Layer):
    """A layer that multiplies with a weight, in the form that the ops prepare once it is loaded."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    prepared: PreparedWeight = None
    unquantized: Tensor | None = None  # of a layer that quantises its input: the columns that take it as it is

    def finalize(self) -> None:
        assert self.weight is not None, "finalize() runs once"
        weight, packed, self.weight, self.packed = self.weight, self.packed, None, None
        if packed is None:
            self.prepared = self.prepare(weight)
        else:
            self.prepared = self.ops.prepare_packed(packed, biased=self.bias is not None)

    def prepare(self, weight: Tensor) -> PreparedWeight:
        """The weight in that form."""
        return self.ops.prepare_weight(weight)

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that distinguishes its kernels from those of a layer of the same sizes."""
        form = self.prepared.form if isinstance(self.prepared, PackedFragments) else None
        rule = self.input_rule and (self.input_rule.group, self.input_rule.scale is None, self.input_rule.power)
        return form, rule, self.unquantized is None


def product_kinds(module: nn.Module) -> tuple[object, ...]:
    """The kinds of a module's products, in order: of a checkpoint that leaves some layers unpacked, layers differ."""
    return tuple(part.kind for part in module.modules() if isinstance(part, ProductLayer))


class MergedRows(Layer):
    """A layer whose weight has the rows of several checkpoint layers, one after another: of each this rank's part."""

    def __init__(self, ops: Ops, sizes: dict[str, int], parts: Mapping[str, int] | None = None) -> None:
        """sizes: the checkpoint layers' rows in all. parts: in how many parts those are cut of which several ranks
        hold the same one."""
        super().__init__(ops)
        self.sizes, self.parts = sizes, parts or {}

    def local_rows(self, shard: str) -> int:
        """This rank's output rows of one checkpoint layer."""
        return self.sizes[shard] // self.shard_of(shard)[1]

    @property
    def rows(self) -> int:
        """This rank's rows of all of them."""
        return sum(self.local_rows(shard) for shard in self.sizes)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        names = list(self.sizes)
        offset = sum(self.local_rows(name) for name in names[: names.index(shard)])
        own = param.narrow(0, offset, self.local_rows(shard))
        own.copy_(shard_rows(loaded_weight, *self.shard_of(shard)).view_as(own))

    def shard_of(self, shard: str) -> tuple[int, int]:
        """(part, parts): this rank holds the part-th of so many equal parts of one checkpoint layer's rows."""
        return self.ops.tp.part_of(self.parts.get(shard))


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint, and the parameter of which it fills a part."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    layer: Layer
    param: nn.Parameter
    shard: str  # the layer's own name for the part


def checkpoint_tensors(model: nn.Module) -> Iterator[CheckpointTensor]:
    """Every checkpoint tensor that a model's layers need."""
    for path, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        parent, _, own_name = path.rpartition(".")
        for shard, shape in layer.checkpoint_shards(own_name).items():
            prefix = f"{parent}.{shard}" if parent else shard
            for kind, param in layer.named_parameters(recurse=False):
                whole = shape if kind == "weight" else shape[:1]
                yield CheckpointTensor(f"{prefix}.{kind}", whole, layer, param, shard)


def load_part(target: Tensor, whole: Tensor, tp: TensorParallel, by_rows: bool) -> None:
    """Loads a rank's rows of a weight or bias; or else its columns of a weight, and of a bias all at rank 0 alone."""
    if by_rows:
        target.copy_(shard_rows(whole, tp.rank, tp.size))
    elif whole.ndim == 2:
        target.copy_(shard_rows(whole.t(), tp.rank, tp.size).t())
    elif tp.rank == 0:
        target.copy_(whole)
    else:
        target.zero_()  # the sum over ranks must hold the bias once


def shard_rows(tensor: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """The tp_rank-th of tp_size equal parts of the first dimension, as a view."""
    rows = tensor.shape[0]
    assert rows % tp_size == 0, f"{rows} rows do not divide among {tp_size} ranks"
    return tensor.narrow(0, tp_rank * (rows // tp_size), rows // tp_size)
