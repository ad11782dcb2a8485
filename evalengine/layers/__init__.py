"""The layers models are made of, and the numerics levels (`Ops`) behind them."""

from __future__ import annotations

import torch

from evalengine.errors import ConfigError
from evalengine.layers.ops import Ops

NATIVE_IS_ABSENT = (
    "numerics=native needs the CUDA kernels, which are not in this version; "
    "set numerics=exact (equal bits on every device) or batch_invariant=false (numerics=fast)"
)


def create_ops(level: str, dtype: torch.dtype, device: torch.device) -> Ops:
    """The implementation of a numerics level, `fast` or `exact`, on one device.

    Raises `ConfigError` for a level that is not there, `EvalEngineError` for a device that fails the exact self-test.
    """
    if level == "fast":
        from evalengine.layers.fast import FastOps

        return FastOps(dtype, device)
    if level == "exact":
        from evalengine.layers.exact import ExactOps

        return ExactOps(dtype, device)
    if level == "native":
        raise ConfigError(NATIVE_IS_ABSENT)
    raise ConfigError(f"numerics={level}: must be native, exact or fast")
