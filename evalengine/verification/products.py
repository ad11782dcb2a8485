"""The comparisons of products: every schedule that may be chosen for a model's shapes.

Every tile of experts' products that a step may have is compared with the dense product of each expert's rows.

M rows, N columns, K the reduced dimension, E experts, k of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, matmul_schedules
from evalengine.kernels.expert_groups import group
from evalengine.kernels.matmul_device import Gpu, gpu_of
from evalengine.kernels.matmul_schedules import MatmulSchedule
from evalengine.kernels.shapes import LinearShape
from evalengine.verification import operands
from evalengine.verification.verdict import KernelsVerdict

# The most rows that are compared: more than any tile has. For a persistent schedule there are more where one of its
# programs needs them for a second tile.
MAX_ROWS = 1031


def verify_matmul(
    verdict: KernelsVerdict,
    shapes: Sequence[LinearShape],
    dtype: torch.dtype,
    device: torch.device,
    out_dtype: torch.dtype | None = None,
    most_rows: int = matmul_schedules.MAX_BUCKET,
    max_rows: int = MAX_ROWS,
) -> None:
    """x [M, K] times W^T, W [N, K]: every schedule that `choose` names for a shape, at an odd M of its own bucket.

    shapes: the weights; most_rows: the largest M that the engine has; max_rows: the largest M that is compared.
    """
    gpu = gpu_of(torch.empty(0, device=device).get_device())
    cases: list[tuple[str, Any, Callable[[], Tensor], Tensor]] = []
    for n, k, biased in shapes:
        chosen = _chosen(gpu, n, k, dtype, out_dtype or dtype, biased, most_rows, max_rows)
        random = operands.Random(dtype, device)
        a, weight = random(max(rows for _, rows in chosen), k), random(n, k)
        product = partial(matmul.matmul, b=weight.T, bias=random(n) if biased else None, out_dtype=out_dtype)
        expected = product(a, schedule=matmul.REFERENCE)
        for schedule, rows in chosen:
            where = f"M{rows} N{n} K{k} {dtype} to {out_dtype or dtype}{', with a bias' if biased else ''}"
            cases.append((where, schedule, partial(product, a[:rows], schedule=schedule), expected[:rows]))
    for where, schedule, run, expected in cases:
        verdict.compare("matmul", schedule, where, run, expected)


def _chosen(
    gpu: Gpu, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, biased: bool, most_rows: int, max_rows: int
) -> list[tuple[Any, int]]:
    """(schedule, rows) for every schedule of [n, k] and each way in which it runs: with masked rows or without, and, if
    persistent, with a second tile for a program where that occurs. The rows are odd, and those of the largest bucket
    for which the schedule is chosen, or `max_rows`.

    Schedules are chosen as for the engine's layers: with tensor descriptors wherever `matmul` makes them. A schedule
    that is excluded already is compared and dropped again, because this verdict must name it, too: other processes read
    it from the cache.
    """
    aligned = dtype != torch.float32 and k % 8 == 0 and n * out_dtype.itemsize % 16 == 0
    chosen = {}
    for bucket in matmul_schedules.BUCKETS:
        if bucket > matmul_schedules.bucket(most_rows):
            break
        for schedule in matmul_schedules.preferred(gpu.name, dtype, bucket, n, k, *gpu.forms(aligned, not biased)):
            largest = min(max(1, bucket - 1), most_rows)
            looping = (rows for rows in range(schedule.block_m - 1, largest + 1, schedule.block_m)
                       if schedule.loops(rows, n, gpu.multiprocessors))  # fmt: skip
            rows = max(min(largest, max_rows), next(looping, 0))
            chosen[schedule, schedule.masks_rows(rows)] = rows
    return [(schedule, rows) for (schedule, _), rows in chosen.items()]


def verify_experts(
    verdict: KernelsVerdict, layers: dict[str, LinearShape], chosen: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The experts' products of a model whose tokens have k = `chosen` experts; layers: `Shapes.expert_layers`.

    There is one expert more than a token has, so that each has tiles that are full, one that is not, and rows that lie
    apart.
    """
    cases: list[tuple[str, MatmulSchedule, Callable[[], Tensor], Tensor]] = []
    for name, (n, k, biased) in layers.items():
        random = operands.Random(dtype, device)
        weight, bias = random(chosen + 1, n, k), random(chosen + 1, n) if biased else None
        for rows in expert_matmul.heights(dtype):
            tokens = 2 * rows + 3
            ids = _ids(tokens, chosen, device)
            x = random(tokens, k) if name == "gate_up_proj" else random(tokens, chosen, k)
            expected = _dense(x, weight, bias, ids)
            for schedule in (expert_matmul.preferred(dtype, rows, n), expert_matmul.plainest(rows)):
                product = partial(expert_matmul.expert_linear, x, weight, bias, group(ids, chosen + 1, rows), schedule)
                cases.append((f"experts' {name}, {tokens} tokens N{n} K{k} {dtype}", schedule, product, expected))
    for where, schedule, run, expected in cases:
        verdict.compare("experts", schedule, where, run, expected)
    for rows in expert_matmul.heights(dtype):
        if expert_matmul.plainest(rows) in expert_matmul.excluded:
            verdict.fail(f"experts' products, tiles of {rows} rows: the schedule in reserve differs or does not run")


def _ids(tokens: int, chosen: int, device: torch.device) -> Tensor:
    """int32 [T, k]: every token lacks one expert, each in turn."""
    first = torch.arange(tokens, dtype=torch.int32, device=device)[:, None]
    return (first + torch.arange(chosen, dtype=torch.int32, device=device)) % (chosen + 1)


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    y = torch.empty((*ids.shape, weight.shape[1]), dtype=x.dtype, device=x.device)
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1) if x.ndim == 2 else x
    for expert in range(len(weight)):
        own = ids == expert
        product = partial(matmul.matmul, rows[own], weight[expert].t(), None if bias is None else bias[expert])
        y[own] = product(schedule=matmul.REFERENCE)
    return y
