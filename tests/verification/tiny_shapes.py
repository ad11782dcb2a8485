"""Shapes that are verified in a moment, and their verdict."""

from __future__ import annotations

from typing import Any

import torch

from evalengine.kernels import matmul
from evalengine.kernels.shapes import Shapes
from evalengine.verification import verify
from evalengine.version import CONTRACT_VERSION
from tests.verification.verify_double import DEVICE, GPU

SHAPE = (48, 40)  # N, K

ABOUT: dict[str, Any] = {"device": DEVICE, "contract_version": CONTRACT_VERSION, "lm_head_rows": 1 << 20}

TINY = Shapes(hidden_size=32, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=100)


def verified(shapes: Shapes = TINY, dtype: torch.dtype = torch.float16, **options: Any) -> dict[str, Any]:
    """The verdict for a model's shapes on this machine."""
    return verify.verify(shapes, dtype, **{**ABOUT, **options})


def chosen(rows: int) -> matmul.MatmulSchedule:
    """The schedule that is chosen on this machine for a product of SHAPE with so many rows."""
    name = torch.cuda.get_device_name(DEVICE) if GPU else "cpu"
    return matmul.choose(name, torch.float16, rows, *SHAPE, tma_ok=True)
