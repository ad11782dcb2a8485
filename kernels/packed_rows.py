"""A packed weight, however a checkpoint stores it: row by row, as it is loaded, and in the fragments of the products.

N output features, K input features, G groups of a row's inputs, each with a scale; E experts.

A fragment has 8 rows and 128 inputs of 4 bits, or 64 of 8 bits: 128 words, four for each lane of a warp. The product is
a chain of m16n8k16, whose right operand needs from lane 4 g + t the numbers of row g in columns 2 t, 2 t + 1, 2 t + 8
and 2 t + 9 of each 16, or of wgmma, whose left operand needs the same of two fragments. So column
32 c + 16 b + 8 h + 2 t + e of row g lies in lane 4 g + t,

- of 4 bits in word c, half e, at the bits of `_PLACES`;
- of 8 bits in word 2 c + b, byte 2 h + e,

and no number crosses a lane between memory and the product (the idea is Marlin's, arXiv 2408.11743).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Kind = Literal["e2m1", "e4m3", "int4", "int8"]
GROUPS = tuple(1 << power for power in range(4, 11))  # sizes of groups that the kernels take, in addition to whole rows
ROWS = 8  # of a fragment
WORDS = 128  # of a fragment
# Where half a word has the bits of its codes, the lowest first, by 2 b + h. One shift and one mask make three of e2m1's
# codes a bfloat16, whose sign is bit 15, and whose exponent begins with bit 7.
_PLACES = {
    "int4": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    "e2m1": ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14)),
}
LARGEST = 128  # power of two, as stored, of which the product's kernel scales e2m1 by one multiplication in bfloat16


class PackedForm(NamedTuple):
    """How numbers are packed. group: inputs that share a scale; 0: all of a row. zeros: whether integers have zeros."""

    kind: Kind
    group: int
    scale: torch.dtype  # uint8: a power of two, 2^(scale - 127)

    @property
    def zeros(self) -> bool:
        return self.kind in ("int4", "int8")

    @property
    def halves(self) -> bool:
        """Whether a byte has two numbers."""
        return self.kind in ("e2m1", "int4")

    @property
    def unit(self) -> int:
        """The inputs of a fragment."""
        return 128 if self.halves else 64

    @property
    def scale_words(self) -> int:
        """The words that a fragment's rows have for the scales, and zeros, of one group."""
        if self.scale == torch.uint8:
            return ROWS // 4
        return 2 * ROWS if self.zeros and self.scale == torch.float32 else ROWS

    def columns(self, k: int) -> tuple[int, int]:
        """The bytes of a row's numbers, and its scales."""
        return (k // 2 if self.halves else k), (k // self.group if self.group else 1)

    def units(self, k: int) -> tuple[int, int]:
        """The fragments next to each other that hold K inputs, and the groups that they have scales of."""
        count = -(-k // self.unit)
        return count, count * (self.unit // self.group) if 0 < self.group < self.unit else self.columns(k)[1]

    def row_bytes(self, k: int) -> int:
        """The bytes of a row of K numbers, with its scales and zeros, in fragments."""
        count, groups = self.units(k)
        return 4 * (count * WORDS + groups * self.scale_words) // ROWS


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
        return torch.Size([*leading, 2 * width if self.form.halves else width])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the packed weight."""
        return tuple(x for x in self[:3] if x is not None)

    @classmethod
    def empty(cls, form: PackedForm, shape: torch.Size, device: torch.device) -> PackedRows:
        """Uninitialised, for a weight of that shape."""
        *leading, k = shape
        numbers, groups = form.columns(k)
        zeros = torch.empty(*leading, groups, dtype=torch.int16, device=device) if form.zeros else None
        codes = torch.empty(*leading, numbers, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(*leading, groups, dtype=form.scale, device=device), zeros, form)


class PackedFragments(NamedTuple):
    """The weight [N, K], or [E, N, K], as the product kernels read it; rows and inputs past the end are 0."""

    words: Tensor  # int32 [..., N / ROWS, fragments of a row, WORDS]
    # int32 [..., N / ROWS, G, form.scale_words], of a group's 8 rows: a byte each of powers of two; the 16 bits of a
    # scale, and the zero above them; else the scales in float32, and then the zeros if there are any
    scales: Tensor
    form: PackedForm
    shape: torch.Size

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors of the packed weight."""
        return self.words, self.scales

    def of(self, expert: int) -> PackedFragments:
        """One expert's weight."""
        return self._replace(words=self.words[expert], scales=self.scales[expert], shape=self.shape[1:])


def fragments_of(rows: PackedRows) -> PackedFragments:
    """The weight in fragments; on the device of its rows, where it takes several times their memory for a moment.

    e2m1 with a power of two above `LARGEST`, which no trained weight needs, is stored with scales in float32.
    """
    if rows.form.kind == "e2m1" and rows.form.scale == torch.uint8 and bool((rows.scales > LARGEST).any()):
        rows = rows._replace(scales=_powers_of_two(rows.scales), form=rows.form._replace(scale=torch.float32))
    form, (*leading, n, k) = rows.form, rows.shape
    count, groups = form.units(k)

    def tiles(x: Tensor, columns: int) -> Tensor:
        """[experts, tile of rows, row, column]"""
        x = F.pad(x, (0, columns - x.shape[-1], 0, -n % ROWS))
        return x.reshape(-1, x.shape[-2] // ROWS, ROWS, columns)

    codes = tiles(rows.codes, form.columns(count * form.unit)[0])
    if form.halves:
        words = _in_halves(codes.unflatten(-1, (count, 4, 4, 4)), form.kind).permute(0, 1, 3, 2, 5, 4, 6)
    else:
        words = codes.unflatten(-1, (count, 2, 2, 2, 4, 2)).permute(0, 1, 3, 2, 7, 4, 5, 6, 8)
    words = words.flatten(3).view(torch.int32).view(*leading, -1, count, WORDS)
    scales = tiles(rows.scales, groups).transpose(-1, -2)
    if form.scale == torch.uint8:
        scales = scales.contiguous().view(torch.int32)
    elif not form.zeros:
        scales = scales.float().contiguous().view(torch.int32)
    else:
        assert rows.zeros is not None
        zeros = tiles(rows.zeros, groups).transpose(-1, -2).int()
        if form.scale == torch.float32:
            scales = torch.cat([scales.contiguous().view(torch.int32), zeros], -1)
        else:
            scales = scales.contiguous().view(torch.int16).int() & 0xFFFF | zeros << 16
    return PackedFragments(words, scales.reshape(*leading, -1, groups, form.scale_words), form, rows.shape)


def rows_of(weight: PackedFragments) -> PackedRows:
    """The rows of which the fragments were made."""
    form, (*leading, n, k), (tiles, count) = weight.form, weight.shape, weight.words.shape[-3:-1]
    if form.halves:
        words = weight.words.view(torch.int16).view(-1, tiles, count, ROWS, 4, 4, 2)
        codes = _of_halves(words.permute(0, 1, 3, 2, 5, 4, 6), form.kind)
    else:
        words = weight.words.view(torch.uint8).view(-1, tiles, count, ROWS, 4, 2, 2, 2, 2)
        codes = words.permute(0, 1, 3, 2, 5, 6, 7, 4, 8)
    width, groups = form.columns(k)

    def rows(x: Tensor, columns: int) -> Tensor:
        x = x.reshape(*leading, tiles * ROWS, -1)[..., :n, :columns]
        return x.clone(memory_format=torch.contiguous_format)

    scales, zeros = weight.scales, None
    if form.scale == torch.uint8:
        scales = scales.view(torch.uint8)
    elif not form.zeros:
        scales = scales.view(torch.float32).to(form.scale)
    elif form.scale == torch.float32:
        scales, zeros = scales.split(ROWS, -1)
        scales = scales.contiguous().view(torch.float32)
    else:
        scales, zeros = scales.short().view(form.scale), scales >> 16
    if zeros is not None:
        zeros = rows(zeros.short().transpose(-1, -2), groups)
    return PackedRows(rows(codes, width), rows(scales.transpose(-1, -2), groups), zeros, form)


def _in_halves(codes: Tensor, kind: Kind) -> Tensor:
    """Bytes [.., 4 (2 b + h), t] of two codes (e) each -> int16 [.., t, e]."""
    halves = [torch.zeros_like(codes[..., 0, :], dtype=torch.int16) for _ in range(2)]
    for code, places in zip(codes.short().unbind(-2), _PLACES[kind], strict=True):
        for bit, place in enumerate(places):
            for e, half in enumerate(halves):
                half |= (code >> bit + 4 * e & 1) << place
    return torch.stack(halves, -1)


def _of_halves(halves: Tensor, kind: Kind) -> Tensor:
    """The inverse of `_in_halves`."""
    codes = []
    for places in _PLACES[kind]:
        bits = [(halves >> place & 1) << bit for bit, place in enumerate(places)]
        code = bits[0] | bits[1] | bits[2] | bits[3]
        codes.append(code[..., 0] | code[..., 1] << 4)
    return torch.stack(codes, -2).to(torch.uint8)


def _powers_of_two(scales: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)


def unpacked_by_torch(weight: PackedRows | PackedFragments) -> Tensor:
    """float32 [..., N, K]: the numbers, by torch's own operations."""
    codes, scales, zeros, form = weight if isinstance(weight, PackedRows) else rows_of(weight)
    if form.halves:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if form.kind == "e2m1":
        numbers = torch.tensor(E2M1, device=codes.device)[codes.int()]
    else:
        numbers = codes.view(torch.float8_e4m3fn).float() if form.kind == "e4m3" else codes.float()
    factors = _powers_of_two(scales) if form.scale == torch.uint8 else scales.float()
    width = codes.shape[-1] // scales.shape[-1]
    if zeros is not None:
        numbers -= zeros.repeat_interleave(width, -1)
    return numbers.mul_(factors.repeat_interleave(width, -1))
