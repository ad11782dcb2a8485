"""A packed weight in the one layout that the product kernels read, however a checkpoint stores it.

N output features, K input features, G groups of a row's inputs, each with a scale; E experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Kind = Literal["e2m1", "e4m3", "int4", "int8"]
GROUPS = tuple(1 << power for power in range(4, 11))  # sizes of groups that the kernels take, in addition to whole rows


class PackedForm(NamedTuple):
    """How numbers are packed. group: inputs that share a scale; 0: all of a row. zeros: whether integers have zeros."""

    kind: Kind
    group: int
    scale: torch.dtype  # uint8: a power of two, 2^(scale - 127)

    @property
    def zeros(self) -> bool:
        return self.kind in ("int4", "int8")

    def columns(self, k: int) -> tuple[int, int]:
        """The bytes of a row's numbers, and its scales."""
        return (k // 2 if self.kind in ("e2m1", "int4") else k), (k // self.group if self.group else 1)

    def row_bytes(self, k: int) -> int:
        """The bytes of a row of K numbers, with its scales and zeros."""
        numbers, groups = self.columns(k)
        return numbers + groups * (self.scale.itemsize + 2 * self.zeros)


class PackedRows(NamedTuple):
    """The weight [N, K], or [E, N, K]: number times scale, of integers number less zero times scale."""

    codes: Tensor  # uint8 [..., N, K / 2], two numbers in a byte, the lower half first; of 8 bits: [..., N, K]
    scales: Tensor  # [..., N, G]
    zeros: Tensor | None  # int16 [..., N, G], of integers
    form: PackedForm

    @property
    def shape(self) -> torch.Size:
        """That of the numbers."""
        *leading, width = self.codes.shape
        return torch.Size([*leading, 2 * width if self.form.kind in ("e2m1", "int4") else width])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the packed weight."""
        return tuple(x for x in self[:3] if x is not None)

    def of(self, expert: int) -> PackedRows:
        """One expert's weight."""
        zeros = None if self.zeros is None else self.zeros[expert]
        return self._replace(codes=self.codes[expert], scales=self.scales[expert], zeros=zeros)

    @classmethod
    def empty(cls, form: PackedForm, shape: torch.Size, device: torch.device) -> PackedRows:
        """Uninitialised, for a weight of that shape."""
        *leading, k = shape
        numbers, groups = form.columns(k)
        zeros = torch.empty(*leading, groups, dtype=torch.int16, device=device) if form.zeros else None
        codes = torch.empty(*leading, numbers, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(*leading, groups, dtype=form.scale, device=device), zeros, form)


def unpacked_by_torch(weight: PackedRows) -> Tensor:
    """float32 [..., N, K]: the numbers, by torch's own operations."""
    codes, scales, zeros, form = weight
    if form.kind in ("e2m1", "int4"):
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if form.kind == "e2m1":
        numbers = torch.tensor(E2M1, device=codes.device)[codes.int()]
    else:
        numbers = codes.view(torch.float8_e4m3fn).float() if form.kind == "e4m3" else codes.float()
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    if form.scale != torch.uint8:
        factors = scales.float()
    width = codes.shape[-1] // scales.shape[-1]
    if zeros is not None:
        numbers -= zeros.repeat_interleave(width, -1)
    return numbers.mul_(factors.repeat_interleave(width, -1))
