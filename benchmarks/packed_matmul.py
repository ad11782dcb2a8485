"""Products that read packed weights, compared with those of the unpacked weight and with a copy of the bytes they must
read.

    M rows, N columns, K the reduced dimension; experts of gpt-oss: T tokens, k experts of each.

Weights are random codes and scales. Each product is checked byte by byte against the dense kernel's with the unpacked
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Timer, WrongResult, guarded, run_poisoned
from benchmarks.report import Line, Timing
from evalengine.bench.floor import copies_of, quickest_copy
from evalengine.bench.timing import free_memory
from evalengine.kernels import expert_matmul, matmul, packed_matmul
from evalengine.kernels.expert_groups import group
from evalengine.kernels.packed_rows import PackedForm, PackedFragments, PackedRows, fragments_of
from evalengine.verification.verdict import count_differing

FORMS = (
    PackedForm("int4", 128, torch.float16),
    PackedForm("e2m1", 32, torch.uint8),
    PackedForm("e2m1", 16, torch.float32),
    PackedForm("e4m3", 128, torch.float32),
)


@dataclass(frozen=True)
class PackedShapes:
    """dense: (N, K) of products; experts: (E, k, N, K), packed in the second of `FORMS` alone."""

    dense: tuple[tuple[int, int], ...] = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
    experts: tuple[tuple[int, int, int, int], ...] = ((32, 4, 5760, 2880), (32, 4, 2880, 2880))
    rows: tuple[int, ...] = (1, 16, 64)
    tokens: tuple[int, ...] = (1, 16, 64, 256)
    dtype: torch.dtype = torch.bfloat16


def measure(timer: Timer, device: torch.device, sizes: PackedShapes | None = None) -> Iterator[Line]:
    """Yields two lines for each form, shape and number of rows."""
    sizes = sizes or PackedShapes()
    for form in FORMS:
        for n, k in sizes.dense:
            weight = _random(form, torch.Size((n, k)), device)
            for rows in sizes.rows:
                case = f"{form.kind}, groups of {form.group}, M{rows} N{n} K{k}"
                yield from guarded("packed", case, partial(_product, case, rows, weight, 1, sizes.dtype, timer))
            free_memory()
    for experts, chosen, n, k in sizes.experts:
        weight = _random(FORMS[1], torch.Size((experts, n, k)), device)
        for rows in sizes.tokens:
            case = f"{FORMS[1].kind}, {chosen} of {experts} experts, {rows} tokens N{n} K{k}"
            yield from guarded("packed", case, partial(_product, case, rows, weight, chosen, sizes.dtype, timer))
        free_memory()


def _random(form: PackedForm, shape: torch.Size, device: torch.device) -> PackedFragments:
    weight = PackedRows.empty(form, shape, device)
    weight.codes.random_(0, 0x70)  # no NaN of e4m3
    if form.scale == torch.uint8:
        weight.scales.random_(118, 124)
    else:
        weight.scales.uniform_(1e-3, 1e-2)
    if weight.zeros is not None:
        weight.zeros.random_(0, 16)
    return fragments_of(weight)


def _product(
    case: str, rows: int, weight: PackedFragments, chosen: int, dtype: torch.dtype, timer: Timer
) -> list[Line]:
    device, row_bytes = weight.words.device, weight.form.row_bytes(weight.shape[-1])
    x = torch.randn(rows, weight.shape[-1], device=device, dtype=dtype)
    dense = packed_matmul.unpack(weight, torch.empty(weight.shape, dtype=dtype, device=device))
    run: Callable[[], Tensor]
    if len(weight.shape) == 2:
        groups, read = None, weight.shape[0]
        theirs = partial(matmul.linear, x, dense)
    else:
        experts = weight.shape[0]
        ids = torch.rand(rows, experts, device=device).topk(chosen).indices.int().contiguous()
        groups = group(ids, experts, expert_matmul.height(dtype, ids.numel(), experts))
        read = int(ids.unique().numel()) * weight.shape[1]
        theirs = partial(expert_matmul.expert_linear, x, dense, None, groups)
    run = partial(packed_matmul.fused, x, weight, None, groups)
    (y,) = run_poisoned(lambda: [run()])
    if count_differing(y, theirs()):
        raise WrongResult("other bytes than the dense product's")
    seconds = timer({"ours": run, "unpacked": theirs, **copies_of(read * row_bytes, device)})
    return [
        Timing("packed", case, seconds["ours"], "the unpacked weight", seconds["unpacked"]),
        Timing("packed", case, seconds["ours"], "copy of the bytes read", quickest_copy(seconds), target=0.7,
               work=read * row_bytes, unit="TB/s"),
    ]  # fmt: skip
