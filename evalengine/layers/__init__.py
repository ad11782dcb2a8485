"""The layers models are made of, and the numerics levels (`Ops`) behind them."""

from __future__ import annotations

import torch

from evalengine.errors import ConfigError
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


def _ops(level: str, dtype: torch.dtype, device: torch.device, attention_backend: str) -> Ops:
    if level == "fast":
        return _fast_ops(dtype, device, attention_backend)
    if level == "exact":
        from evalengine.layers.exact import ExactOps

        return ExactOps(dtype, device)
    if level == "native":
        from evalengine.layers.native import NativeOps

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
    from evalengine.layers.fast_cuda import CudaFastOps

    return CudaFastOps(dtype, device, attention_backend)
