"""Random packed weights in the kernels' layout, and the float32 numbers that they stand for, by the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels.packed_rows import LARGEST, PackedForm, PackedRows
from tests.references import reference

FORMS = [
    PackedForm("e2m1", 32, torch.uint8),
    PackedForm("e2m1", 16, torch.float32),
    PackedForm("e4m3", 128, torch.float32),
    PackedForm("e4m3", 0, torch.bfloat16),
    PackedForm("int4", 128, torch.float16),
    PackedForm("int4", 32, torch.bfloat16),
    PackedForm("int4", 256, torch.float16),
    PackedForm("int8", 0, torch.float32),
]


def packed(form: PackedForm, *shape: int, seed: int = 0, device: str = "cpu") -> tuple[PackedRows, Tensor]:
    """A weight [N, K] or [E, N, K], on `device`, and its numbers on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    *leading, k = shape
    groups = form.columns(k)[1]
    bits = 4 if form.kind in ("e2m1", "int4") else 8
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    if form.kind == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0
    zeros = torch.randint(0, (1 << bits) + 1, (*leading, groups), generator=generator) if form.zeros else None
    if form.scale == torch.uint8:
        scales = torch.randint(118, 124, (*leading, groups), generator=generator).to(torch.uint8)
        scales.view(-1)[0] = 0  # 2^-127, a subnormal number
        scales.view(-1)[-1] = LARGEST
        factors = 2.0 ** (scales.double() - 127)
    else:
        scales = (torch.rand(*leading, groups, generator=generator) / (1 << bits)).to(form.scale)
        factors = scales.double()
    of_code = {"e2m1": (2, 1), "e4m3": (4, 3)}
    numbers = codes.double() if form.zeros else reference.of_small_float(codes, *of_code[form.kind])
    width = form.group or k
    spread = [None if x is None else x.repeat_interleave(width, -1) for x in (factors, zeros)]
    assert spread[0] is not None
    stored = (codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes).to(torch.uint8)
    rows = PackedRows(stored, scales, None if zeros is None else zeros.short(), form)
    on_device = (None if x is None else x.to(device) for x in rows[:3])
    return PackedRows(*on_device, form), reference.dequantized(numbers, spread[0], spread[1])  # type: ignore[arg-type]
