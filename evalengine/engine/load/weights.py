"""Makes seeded dummy weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from evalengine.kernels.packed_rows import PackedForm, PackedRows

DUMMY_STD = 0.02  # dummy weights' standard deviation: transformers' usual initializer_range
_NORM = re.compile(r".*norm(\.\d+)?\.weight")  # also of one head
HASHED_AT_ONCE = 1 << 20  # elements of a dummy tensor on a CPU: 8 MB of int64, which fits a cache
ON_GPU = 4  # times as many on a GPU: with fewer, the host takes longer to launch the hash than the GPU to compute it


def dummy_tensors(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Seeded random float32 weights, the same on every machine, made on `device`: norm weights 1, the rest uniform.

    Each weight is a hash of (name, element) in integer arithmetic: a random generator's stream differs between CPU and
    GPU and between GPUs, and a CPU's generator takes minutes for 8 billion weights.
    """
    for name in sorted(shapes):
        tensor = torch.ones(shapes[name], device=device)
        if not _NORM.fullmatch(name):
            for start, part in _parts(tensor):
                part.copy_(_uniform(name, start, len(part), device))
        yield name, tensor


def dummy_rows(name: str, shape: tuple[int, ...], form: PackedForm, device: torch.device) -> PackedRows:
    """A packed dummy weight [N, K] of e2m1, made as the others are; scales of 2^-7 give it a standard deviation of
    0.023."""
    assert form.kind == "e2m1" and form.scale == torch.uint8
    rows = PackedRows.empty(form, torch.Size(shape), device)
    rows.scales.fill_(120)
    for start, part in _parts(rows.codes):
        part.copy_((_hashed(name, start, len(part), device) >> 8) & 0xFF)
    return rows


def _parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first element, elements) of each part that is hashed at once."""
    size = HASHED_AT_ONCE * (1 if tensor.device.type == "cpu" else ON_GPU)
    for number, part in enumerate(tensor.view(-1).split(size)):
        yield number * size, part


def _uniform(name: str, start: int, count: int, device: torch.device) -> Tensor:
    """float32 [count], mean 0, standard deviation `DUMMY_STD`: elements [start, start + count) of a dummy tensor."""
    x = _hashed(name, start, count, device)
    return ((x >> 8) & 0xFFFFFF).float().mul_(2.0**-24).sub_(0.5).mul_(DUMMY_STD * 12**0.5)


def _hashed(name: str, start: int, count: int, device: torch.device) -> Tensor:
    """int64 [count], of which bits 8 to 31 are random.

    The hash is two rounds of 32-bit multiply-xorshift for each of the name's two seeds. Products stay below 2^63.
    """
    seeds = hashlib.sha256(name.encode()).digest()
    x = torch.arange(start, start + count, device=device)
    for seed in (seeds[:4], seeds[4:8]):
        x += int.from_bytes(seed, "little")
        for _ in range(2):
            x &= 0xFFFFFFFF
            x ^= x >> 16
            x *= 0x45D9F3B
    return x
