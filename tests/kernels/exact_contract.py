"""NUMERICS.md's products and attention written once more, literally: frexp, rint and int64 sums. Slow."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em


def scaled(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x 2^(bits - e), and e, of each row [..., K]."""
    _, e = torch.frexp(x.double().abs().amax(-1, keepdim=True))
    return torch.ldexp(x.double(), bits - e), e


def limbs(x: Tensor, bits: int, further: list[int]) -> list[Tensor]:
    """rint(x), then rint of what is left of it times 2^n, for each n: int64."""
    found = [x.round()]
    for n in further:
        x = torch.ldexp(x - found[-1], torch.tensor(n))
        found.append(x.round())
        assert found[-1].abs().max() <= 2.0**bits
    return [limb.long() for limb in found]


def is_wide(row: Tensor) -> bool:
    """Whether a row [K] gets a second limb: in Python's integers, number by number."""
    numbers = [abs(x) for x in row.double().tolist() if abs(x) >= 2.0**-126]
    if not numbers or not all(x < float("inf") for x in numbers):
        return False
    e, *others = torch.frexp(torch.tensor([max(numbers), *numbers], dtype=torch.float64)).exponent.tolist()
    lossy = any(not (x * 2.0 ** (26 - e)).is_integer() for x in numbers)
    total = sum(2 ** (min(e - other, 14) // 2) for other in others)
    return (lossy and total > 8 * len(numbers)) or (total > 40 * len(numbers) and e - min(others) >= 19)


def wide_rows(x: Tensor) -> Tensor:
    """bool [...] of x [..., K]."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.tensor([is_wide(row) for row in rows], dtype=torch.bool).view(x.shape[:-1])


def product(left: Tensor, right: Tensor) -> Tensor:
    """float64 [M, K] by [N, K] -> float64 [M, N], before the one rounding."""
    x, e = scaled(left, 17)
    w, ew = scaled(right, 26)
    hi, lo, lowest = (part[:, None] for part in limbs(x, 17, [18, 18]))
    upper, lower = (part[None] for part in limbs(w, 26, [27]))

    def add(part: Tensor, count: int) -> Tensor:
        total = (hi * part).sum(-1).double()
        for n, limb in enumerate((lo, lowest)[: count - 1], 1):
            total = total + torch.ldexp((limb * part).sum(-1).double(), torch.tensor(-18 * n))
        return total

    more = add(upper, 3) + torch.ldexp(add(lower, 3), torch.tensor(-27))
    return torch.ldexp(torch.where(wide_rows(right), more, add(upper, 2)), e - 17 + ew.t() - 26)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[M, K] by [N, K] -> float32 [M, N]."""
    return product(x, weight).float() + 0.0


def attention_row(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None, sink: float = -float("inf")
) -> Tensor:
    """One query row of one head, q [D], over the keys that it sees, k and v [L, D] -> float32 [D]."""
    z = product(q[None], k)[0] * torch.tensor(scale).item()
    if softcap is not None:
        z = em.tanh(z * (1.0 / softcap)) * softcap
    logit = torch.tensor(sink, dtype=torch.float64)
    top = torch.maximum(z.max(), logit)
    p = em.exp(z - top)
    total = (torch.cat([p, em.exp(logit - top)[None]]) * 2.0**44).round().long().sum()
    values, ev = scaled(v, 26)
    w, ew = scaled(torch.ldexp(p, ev.squeeze(-1)), 17)
    hi, lo = (part[:, None] for part in limbs(w, 17, [18]))
    upper, lower = limbs(values, 26, [27])
    wide = wide_rows(v)

    def add(part: Tensor) -> Tensor:
        return (hi * part).sum(0).double() + torch.ldexp((lo * part).sum(0).double(), torch.tensor(-18))

    out = add(upper)
    if wide.any():
        out = out + torch.ldexp(add(lower * wide[:, None]), torch.tensor(-27))
    return (torch.ldexp(out, ew - 17 - 26) * em.reciprocal(total.double() * 2.0**-44)).float()
