"""The comparisons of experts' products: every tile that a step may have, with the dense product of each expert's rows.

E experts, k of each token, N columns, K the reduced dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul
from evalengine.kernels.expert_groups import group
from evalengine.kernels.matmul_schedules import MatmulSchedule
from evalengine.kernels.shapes import LinearShape
from evalengine.verification import operands
from evalengine.verification.verdict import KernelsVerdict


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
