"""One product on one shape: its operands, the products that it is compared with, and the result.

    M rows (tokens), K input features, N output features.

The shapes are those of seven models, projections merged as the engine merges them. Inputs are random bf16; cuBLAS is
`torch.mm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import seeded
from benchmarks.models import PRODUCTS_OF, shapes_of
from evalengine.kernels.matmul import MatmulSchedule

FIXED = MatmulSchedule("tma", 128, 128, 64, num_warps=8, num_stages=3, persistent=True)
# an H200's copies and products, from which the floor of a time follows
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.3e12, 790e12


@dataclass(frozen=True)
class Shape:
    """A weight [n, k]; lm_head's products stay float32. The engine takes a slice of logits at once
    (`layers.embedding.rows_per_slice`); other models in the mode take all their rows."""

    n: int
    k: int
    lm_head: bool
    names: tuple[str, ...]

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.lm_head else torch.bfloat16

    def __str__(self) -> str:
        return f"N{self.n} K{self.k}"


@dataclass(frozen=True)
class Point:
    """One shape and M: the schedule, and seconds of ours, cuBLAS's and the fixed tile's product, and their floor."""

    names: tuple[str, ...]
    n: int
    k: int
    m: int
    out_dtype: str
    schedule: str
    seconds: float
    cublas_seconds: float
    fixed_seconds: float
    floor_seconds: float
    differing: tuple[str, ...] = ()  # schedules whose bytes were not the reference's

    @property
    def ratio(self) -> float:
        return self.seconds / self.cublas_seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": round(self.ratio, 4)}


def shapes(ranks: int = 1) -> list[Shape]:
    """Every distinct weight of the models, the smallest first.

    ranks: the part of each that one of so many tensor-parallel ranks has, of the models whose heads they can share.
    """
    names: dict[tuple[int, int, bool], list[str]] = {}
    for model in PRODUCTS_OF:
        sizes = shapes_of(model)
        if sizes.num_heads % ranks or sizes.vocab_size % ranks:
            continue
        of_rank = model if ranks == 1 else f"{model} of {ranks} ranks"
        for layer, (n, k, _) in sizes.linear_layers(ranks).items():
            names.setdefault((n, k, False), []).append(f"{of_rank} {layer}")
        names.setdefault((sizes.vocab_size // ranks, sizes.hidden_size, True), []).append(f"{of_rank} lm_head")
    return [Shape(*key, tuple(names[key])) for key in sorted(names, key=lambda key: key[0] * key[1])]


def operands(shape: Shape, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [rows, K] and the weight [N, K], random, of a trained layer's magnitudes."""
    generator = seeded(device, shape.n + shape.k)
    x = torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16, generator=generator)
    return x, torch.randn(shape.n, shape.k, device=device, dtype=torch.bfloat16, generator=generator) * 0.03


def cublas(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Callable[[], Tensor]:
    """The same product by torch, with its default settings."""
    if out_dtype == x.dtype:
        return lambda: torch.mm(x, weight.t())
    return lambda: torch.mm(x, weight.t(), out_dtype=out_dtype)


def floor_seconds(shape: Shape, m: int) -> float:
    moved = 2 * (shape.n * shape.k + m * shape.k) + m * shape.n * shape.out_dtype.itemsize
    return max(moved / BYTES_PER_SECOND, 2 * m * shape.n * shape.k / FLOPS_PER_SECOND)


def poisoned(run: Callable[[], Tensor], like: Tensor) -> Tensor:
    """`run`'s output, whose memory held NaN before: the allocator hands out the block that was just given back."""
    block = torch.full_like(like, torch.nan)
    del block
    return run()


def point_of(
    shape: Shape, m: int, schedule: str, seconds: float, reference: Mapping[str, float], *differing: str
) -> Point:
    dtype = str(shape.out_dtype).removeprefix("torch.")
    cublas_seconds, fixed_seconds, floor = reference["cublas"], reference["fixed"], floor_seconds(shape, m)
    names = (shape.names, shape.n, shape.k, m, dtype, schedule)
    return Point(*names, seconds, cublas_seconds, fixed_seconds, floor, differing)
