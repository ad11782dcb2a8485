"""`verify kernels`: compares `exact`'s kernels with known bits and `native`'s schedules with each other, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from evalengine.engine.settings import Settings
from evalengine.layers.embedding import rows_per_slice
from evalengine.models.spec import ModelSpec
from evalengine.verification.exact_kernels import exact_kernels_verdict
from evalengine.version import CONTRACT_VERSION

PAGE_SIZES = (16, 64, 256)  # the page sizes that the engine's proof varies
NEEDS_CUDA = "native's kernels run on CUDA only, so none of them was verified"
NOT_ASKED = "native's kernels were not verified: these settings use exact's"


def kernels_verdict(spec: ModelSpec, settings: Settings, use_cache: bool = True) -> dict[str, Any]:
    """{"exact": of `exact_kernels_verdict`, "native": of `verification.verify.verify` or None, "note": why None}.

    `exact`'s kernels run on every device, `native`'s where the settings choose them.
    """
    verdict: dict[str, Any] = {"exact": exact_kernels_verdict(settings.device), "native": None, "note": None}
    if settings.numerics == "native":
        verdict["native"] = schedules_verdict(spec, settings.dtype, settings.device, use_cache)
    else:
        verdict["note"] = NOT_ASKED if settings.device.type == "cuda" else NEEDS_CUDA
    return verdict


def schedules_verdict(spec: ModelSpec, dtype: torch.dtype, device: torch.device, use_cache: bool) -> dict[str, Any]:
    """The verdict of `verify.verify` for a model."""
    from evalengine.verification import verify  # It needs Triton, which a CPU may lack.

    rows = rows_per_slice(spec.vocab_size, device)
    about: dict[str, Any] = {"contract_version": CONTRACT_VERSION, "lm_head_rows": rows, "page_sizes": PAGE_SIZES}
    of_each = [verify.verify(shapes, dtype, device, use_cache=use_cache, **about) for shapes in spec.every_shapes]
    return verify.together(of_each)


def failures(verdict: Mapping[str, Any]) -> list[str]:
    """A sentence for each kernel that must give equal bytes and does not."""
    native = verdict["native"] or {"failed": []}
    return [*verdict["exact"]["failed"], *native["failed"]]


def kernels_summary(verdict: Mapping[str, Any]) -> Iterator[str]:
    """A line for each schedule that was dropped and each kernel that failed, and one for each level."""
    exact, native = verdict["exact"], verdict["native"]
    yield from (f"dropped: {dropped}" for dropped in dropped_schedules(verdict))
    yield from (f"failed: {failed}" for failed in failures(verdict))
    outcome = f"{len(exact['failed'])} failed ({exact['seconds']:.1f} s)"
    yield f"exact: {exact['kernels']} kernels against the bits of every other machine, {outcome}"
    if native is None:
        yield verdict["note"]
        return
    source = "cached" if native["cached"] else f"{native['seconds']:.1f} s"
    counts = f"{native['schedules']} schedules, {native['checked']} comparisons"
    yield f"native: {counts}, {len(native['dropped'])} dropped, {len(native['failed'])} failed ({source})"


def dropped_schedules(verdict: Mapping[str, Any]) -> Iterator[str]:
    """The schedules that this machine must not choose, in words; another takes their place."""
    for drop in (verdict["native"] or {"dropped": []})["dropped"]:
        values = " ".join(f"{name}={value}" for name, value in drop["schedule"].items())
        yield f"{drop['kernel']} ({values}) at {drop['where']}: {drop['reason']}"
