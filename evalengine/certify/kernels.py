"""`verify kernels`: a model's shapes, handed to `evalengine.kernels.verify`, and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from evalengine.models.config import ModelSpec, kernel_shapes

PAGE_SIZES = (16, 64, 256)  # those of the engine's proof


def kernels_verdict(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, use_cache: bool = True
) -> dict[str, Any]:
    """The verdict of `verify.verify` for a model."""
    from evalengine.kernels import verify  # Triton: a CPU may have none, and its verdicts in words need none

    return verify.verify(
        **kernel_shapes(spec),
        dtype=dtype,
        device=device,
        page_sizes=PAGE_SIZES,
        use_cache=use_cache,
    )


def kernels_summary(verdict: Mapping[str, Any]) -> Iterator[str]:
    """A line for each schedule that was dropped and each kernel that failed, then the count."""
    for drop in verdict["dropped"]:
        values = " ".join(f"{name}={value}" for name, value in drop["schedule"].items())
        yield f"dropped: {drop['kernel']} ({values}) at {drop['where']}: {drop['reason']}"
    yield from (f"failed: {failed}" for failed in verdict["failed"])
    source = "cached" if verdict["cached"] else f"{verdict['seconds']:.1f} s"
    counts = f"{verdict['schedules']} schedules, {verdict['checked']} comparisons"
    yield f"verdict: {counts}, {len(verdict['dropped'])} dropped, {len(verdict['failed'])} failed ({source})"
