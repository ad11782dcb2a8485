"""Products of tokens with their experts, compared with torch's grouped product and with a copy of the bytes they must
read.

    T tokens, E experts, k of each token, P = T k pairs, K input features, N output features.

The choice is random and even. A decode step's rows are checked byte by byte against dense products of each expert's
rows, a prefill's likewise; sorting the pairs and choosing the experts is timed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Timer, WrongResult, guarded, run_poisoned
from benchmarks.models import published_spec
from benchmarks.report import Line, Timing
from evalengine.bench.floor import copies_of, quickest_copy
from evalengine.bench.timing import free_memory
from evalengine.kernels import expert_matmul, expert_rows, matmul, routing
from evalengine.kernels.expert_groups import Groups, group
from evalengine.kernels.mixture_variant import Router
from evalengine.verification.verdict import count_differing

MODELS = ("Qwen3-30B-A3B", "gpt-oss-20b")
FEW = 256  # tokens up to which the weights' bytes, not the arithmetic, are the floor


@dataclass(frozen=True)
class ExpertShapes:
    """The shapes of one run: (name, router, hidden size, an expert's intermediate size) of each model."""

    models: tuple[tuple[str, Router, int, int], ...]
    tokens: tuple[int, ...] = (1, 8, 64, 256, 1024, 8192)
    dtype: torch.dtype = torch.bfloat16


def published() -> ExpertShapes:
    """The experts of `MODELS`."""
    models = []
    for name in MODELS:
        spec = published_spec(name)
        assert spec.mixture is not None
        models.append((name, spec.mixture.router, spec.hidden_size, spec.mixture.intermediate_size))
    return ExpertShapes(tuple(models))


def measure(timer: Timer, device: torch.device, sizes: ExpertShapes | None = None) -> Iterator[Line]:
    """Yields two lines for each product of each model and number of tokens, and one for what goes before it."""
    sizes = sizes or published()
    for name, router, hidden, inner in sizes.models:
        for part, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            weight = torch.randn(router.experts, n, k, device=device, dtype=sizes.dtype) * k**-0.5
            for tokens in sizes.tokens:
                case = f"{name} {part}, {tokens} tokens"
                run = partial(_product, case, part, tokens, weight, router, timer)
                yield from guarded("experts", case, run)
            del weight
            free_memory()
        for tokens in sizes.tokens:
            case = f"{name}, {tokens} tokens"
            run = partial(_choice, case, tokens, hidden, router, sizes.dtype, device, timer)
            yield from guarded("experts' choice", case, run)


def _choose(tokens: int, router: Router, device: torch.device) -> Tensor:
    """int32 [T, k]: experts of an even random choice."""
    noise = torch.rand(tokens, router.experts, device=device)
    return noise.topk(router.chosen).indices.int().contiguous()


def _product(case: str, part: str, tokens: int, weight: Tensor, router: Router, timer: Timer) -> list[Line]:
    n, k = weight.shape[1:]
    shape = (tokens, k) if part == "gate_up_proj" else (tokens, router.chosen, k)
    x = torch.randn(shape, device=weight.device, dtype=weight.dtype)
    ids = _choose(tokens, router, weight.device)
    groups = group(ids, router.experts, expert_matmul.height(weight.dtype, ids.numel(), router.experts))
    run = partial(expert_matmul.expert_linear, x, weight, None, groups)
    (y,) = run_poisoned(lambda: [run()])
    _check(y, x, weight, ids)
    moved = int(ids.unique().numel()) * n * k * weight.itemsize
    runs: dict[str, Callable[[], object]] = {"ours": run}
    if (theirs := _grouped_mm(x, weight, ids, groups)) is not None:
        runs["grouped_mm"] = theirs
    if tokens <= FEW:
        runs |= copies_of(moved, weight.device)
    seconds = timer(runs)
    lines: list[Line] = []
    if "grouped_mm" in seconds:
        flops = 2 * ids.numel() * n * k
        lines.append(Timing("experts", case, seconds["ours"], "torch's grouped_mm", seconds["grouped_mm"],
                            work=flops, unit="TFLOP/s"))  # fmt: skip
    if tokens <= FEW:
        lines.append(Timing("experts", case, seconds["ours"], "copy of the bytes read", quickest_copy(seconds),
                            work=moved, unit="TB/s"))  # fmt: skip
    return lines


def _check(y: Tensor, x: Tensor, weight: Tensor, ids: Tensor) -> None:
    """Raises WrongResult unless each expert's rows have the bytes of the dense product."""
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1) if x.ndim == 2 else x
    for expert in range(len(weight)):
        own = ids == expert
        if own.any():
            expected = matmul.matmul(rows[own], weight[expert].t(), schedule=matmul.REFERENCE)
            if count_differing(y[own], expected):
                raise WrongResult(f"expert {expert}: other bytes than the dense product's")


def _grouped_mm(x: Tensor, weight: Tensor, ids: Tensor, groups: Groups) -> Callable[[], object] | None:
    """torch's grouped product of rows that are sorted beforehand; None where there is none for the dtype."""
    if weight.dtype != torch.bfloat16 or not weight.is_cuda:
        return None
    pairs = groups.order.long()
    rows = x[pairs // ids.shape[1]] if x.ndim == 2 else x.flatten(0, 1)[pairs]
    ends = torch.bincount(ids.flatten(), minlength=len(weight)).cumsum(0).int()
    return partial(torch._grouped_mm, rows.contiguous(), weight.transpose(1, 2), ends)


def _choice(
    case: str, tokens: int, hidden: int, router: Router, dtype: torch.dtype, device: torch.device, timer: Timer
) -> list[Line]:
    """Routing, the sort and the weighted sum, which a layer has in addition to its products, and a copy of the last
    one's bytes."""
    logits = torch.randn(tokens, router.experts, device=device, dtype=dtype)
    rows = torch.randn(tokens, router.chosen, hidden, device=device, dtype=dtype)
    height = expert_matmul.height(dtype, tokens * router.chosen, router.experts)

    def run() -> Tensor:
        ids, weights = routing.route(logits, None, router, dtype)
        group(ids, router.experts, height)
        return expert_rows.combine(rows, weights)

    moved = (rows.numel() + tokens * hidden) * rows.itemsize
    seconds = timer({"ours": run, **copies_of(moved, device)})
    other = "copy of the sum's bytes"
    return [Timing("experts' choice", case, seconds["ours"], other, quickest_copy(seconds), work=moved, unit="TB/s")]
