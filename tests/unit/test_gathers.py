"""A layer whose ranks gather in one with the ops beside has the bytes of one whose every op is by itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evalengine.layers import create_ops
from evalengine.layers.base import Layer
from evalengine.layers.hooks import op_hook
from evalengine.layers.ops import Ops
from evalengine.layers.parallel import TensorParallel
from evalengine.layers.rows import ActivationLayer, AddNorm
from evalengine.layers.variants import Norm
from evalengine.models.decoder import DecoderMLP
from evalengine.models.spec import Block
from tests.bitwise import assert_bitwise_equal

SPEC: Any = SimpleNamespace(hidden_size=24, intermediate_size=36)
CPU = torch.device("cpu")


class Group:
    """What a rank's thread uses of a process group: every rank's tensor, side by side on each."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size), dict[int, Tensor]()


class RankThread(TensorParallel):
    """A rank that is a thread of this process."""

    def gather(self, x: Tensor, widths: Any = None) -> Tensor:
        group: Group = self._group
        group.given[self.rank] = x
        group.barrier.wait(60)
        whole = torch.cat([group.given[rank] for rank in range(self.size)], dim=1)
        group.barrier.wait(60)
        return whole


class Branch(nn.Module):
    """A norm, a feed-forward block, and the norm after it."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.before, self.after = (AddNorm(ops, SPEC.hidden_size, Norm(1e-6)) for _ in range(2))
        self.mlp = DecoderMLP(SPEC, Block(), ops, whole=False)
        generator = torch.Generator().manual_seed(1)
        for name, layer in self.named_modules():
            if isinstance(layer, Layer):
                for shard, shape in layer.checkpoint_shards(name).items():
                    layer.weight_loader(layer.weight, torch.randn(shape, generator=generator), shard)
                layer.finalize()

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.before(x, residual)
        return self.after(self.mlp(x), residual)


def outputs(level: str, size: int, fused: bool) -> list[dict[str, Tensor]]:
    """Every op's output by name, of each rank; the block's own are `after.0` and `after.1`."""
    group = Group(size)
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(5, SPEC.hidden_size, generator=generator) for _ in range(2))

    def of_rank(rank: int) -> dict[str, Tensor]:
        ops = create_ops(level, torch.float32, CPU, tp=RankThread(rank, size, group))
        ops.fused = fused
        block, seen = Branch(ops), dict[str, Tensor]()
        with torch.inference_mode(), op_hook(block, lambda name, output: seen.update({name: output.clone()})):
            block(x, residual)
        return seen

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fused_gathers_give_the_bytes_of_one_rank(size: int) -> None:
    (alone,) = outputs("exact", 1, fused=False)
    for fused in (False, True):
        for rank, seen in enumerate(outputs("exact", size, fused)):
            for name in ("before.0", "before.1", "after.0", "after.1"):
                assert_bitwise_equal(seen[name], alone[name])
            # A fused gather comes with the activation, and after the projection; else each op is seen by itself.
            for name, is_whole in (("mlp.activation", fused), ("mlp.down_proj", not fused)):
                expected = alone[name] if is_whole else alone[name].chunk(size, dim=1)[rank]
                assert_bitwise_equal(seen[name], expected)


def test_sums_over_ranks_are_not_gathered_too() -> None:
    """In fast, which sums, the activation has this rank's columns whatever is fused."""
    ops = create_ops("fast", torch.float32, CPU, tp=RankThread(1, 2, Group(2)))
    ops.fused = True
    gate_up = torch.randn(3, 10)
    assert_bitwise_equal(ActivationLayer(ops)(gate_up), ops.silu_and_mul(gate_up))
