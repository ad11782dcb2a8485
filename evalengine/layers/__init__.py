"""The layers models are made of, and the numerics levels (`Ops`) behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evalengine.errors import ConfigError
from evalengine.kernels.shapes import Shapes
from evalengine.layers.ops import Ops
from evalengine.layers.parallel import SINGLE, TensorParallel


def create_ops(
    level: str, dtype: torch.dtype, device: torch.device, attention_backend: str = "auto", tp: TensorParallel = SINGLE
) -> Ops:
    """The implementation of a numerics level on one device; tp: the rank of a tensor-parallel model that it serves.

    attention_backend: `fast` only: flash_attn | triton | sdpa. auto takes triton or sdpa, which read KV pages of any
    size; flash_attn must be named by a caller that knows its pages' size (`possible_backends`).

    `evalengine.engine.settings` has refused devices and models that a level cannot run on. Raises `ConfigError` for an
    unknown level, `EvalEngineError` for a device that fails the exact self-test.
    """
    ops = _ops(level, dtype, device, attention_backend)
    ops.tp = tp
    return ops


def verify_heads(ops: Ops, every: Sequence[Shapes], block_size: int) -> dict[str, Any] | None:
    """One verdict of `Ops.verify_kernels` for all kinds of heads of a model. every: at least one."""
    found = [ops.verify_kernels(shapes, block_size=block_size) for shapes in every]
    verdicts = [verdict for verdict in found if verdict is not None]
    if len(verdicts) < 2:
        return found[0]
    from evalengine.verification.verify import together  # it needs Triton, as a level does that has schedules

    return together(verdicts)


def _ops(level: str, dtype: torch.dtype, device: torch.device, attention_backend: str) -> Ops:
    if level == "fast":
        return _fast_ops(dtype, device, attention_backend)
    if level == "exact":
        from evalengine.layers.exact import ExactOps

        return ExactOps(dtype, device)
    if level == "native":
        from evalengine.layers.cuda import NativeOps

        return NativeOps(dtype, device)
    raise ConfigError(f"numerics={level}: must be native, exact or fast")


def _fast_ops(dtype: torch.dtype, device: torch.device, attention_backend: str) -> Ops:
    from evalengine.layers.attention_backends import possible_backends
    from evalengine.layers.kernel_support import kernel_problems

    if attention_backend == "auto":
        attention_backend = possible_backends(device, dtype, head_dim=None, block_size=1, variants=())[0]
    if kernel_problems(device):
        from evalengine.layers.fast import FastOps

        return FastOps(dtype, device, attention_backend)
    from evalengine.layers.cuda import CudaFastOps

    return CudaFastOps(dtype, device, attention_backend)
