"""A second implementation of NUMERICS.md's softmax and log_softmax, in torch and NumPy: what the tests compare with."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.kernels.softmax import SoftmaxSchedule
from tests import random_tensors

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WALKS = [SoftmaxSchedule(), SoftmaxSchedule(rows=4, warps=8), SoftmaxSchedule(rows=2, warps=2)]
SCHEDULES = [*WALKS, SoftmaxSchedule(resident=True)] if CUDA else WALKS  # Triton's interpreter cannot run Gluon kernels
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, BFLOAT16]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


randn = partial(random_tensors.randn, device=DEVICE)


def _exp(x: Tensor) -> Tensor:
    return x.exp() if CUDA else torch.from_numpy(np.exp(x.numpy()))  # Triton's interpreter calls NumPy's exp


def _log(x: Tensor) -> Tensor:
    return x.log() if CUDA else torch.from_numpy(np.log(x.numpy()))


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x.double() * y.double() + z.double()).float() if CUDA else x * y + z  # the interpreter rounds twice


def normalizer(x: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """float32 [n, V] of finite numbers and -inf -> each row's maximum M and normalizer l, both [n, 1]."""
    m = torch.full((len(x), 1), -torch.inf, device=x.device)
    norm = torch.zeros_like(m)
    for z in x.split(chunk, 1):
        chunk_m = z.amax(1, keepdim=True)
        p = _exp(z - chunk_m.clamp(min=-3e38))
        chunk_norm = (p.double() * 2.0**44).to(torch.int64).sum(1, keepdim=True).float() * 2.0**-44
        top = torch.maximum(m, chunk_m)
        shift = top.clamp(min=-3e38)
        m, norm = top, _fma(norm, _exp(m - shift), chunk_norm * _exp(chunk_m - shift))
    return m, norm


def log_softmax(x: Tensor, chunk: int = 4096) -> Tensor:
    m, norm = normalizer(x.float(), chunk)
    return (x.float() - m) - _log(norm)


def softmax(x: Tensor, chunk: int = 4096) -> Tensor:
    m, norm = normalizer(x.float(), chunk)
    return _exp(x.float() - m) / norm
