"""Choosing the next token: arg max, and Gumbel-max sampling whose noise is a function of its key alone.

    n rows, V vocabulary.

The noise of a token is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) of
(request key; token id, position): no state, no batch slot, so a sample depends on nothing but what is sampled.

Rounding points (NUMERICS.md, `native` as `exact`): Gumbel noise through own log; top-k and top-p over (probability
descending, id ascending) with int64 mass; ties to the lowest id. Logprobs are float32, all that follows is float64:
the logprob times 1 / T, each rounded; u = (word + 1/2) 2^-32, exact; the noise -log(-log u); their sum, rounded. A
token's mass is the own exp of its distance from the row's largest, rounded to a multiple of 2^-44. Masses add exactly;
the mass before a token and the total are rounded to float64, the total times top_p is rounded, and the two compared.
exp and log are `exact_math`'s: one set of logprobs gives one token on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels import exact_math
from evalengine.kernels.launching.pinned import to_device

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32's multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Philox4x32's key increments
_FIXED_POINT_BITS = 44  # 2^44 times `limits.MAX_VOCABULARY` is 2^63


def argmax_lowest(values: Tensor) -> Tensor:
    """[n, V] -> int64 [n]: position of the maximum, the lowest among equals; V where the row has a NaN.

    torch.argmax promises no order among equals.
    """
    ids = torch.arange(values.shape[-1], device=values.device)
    best = values.amax(dim=-1, keepdim=True)
    return torch.where(values == best, ids, values.shape[-1]).amin(dim=-1)


def top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """float32 [n, V] -> int64 and float32 [n, k]: the ids and values of each row's k largest, the largest first, equals
    by id.

    torch.topk promises no order among equals, and a stable sort of a whole vocabulary costs many times as much. So topk
    gets keys that all differ: the value's bits, mapped to integers of the same order, then the negated id.
    """
    values = values + 0.0  # turns -0 into 0, which equals it
    bits = values.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(values.shape[-1], device=values.device)
    largest = _MASK32 - ((ordered << 32) | (_MASK32 - ids)).topk(k, dim=-1).values.bitwise_and_(_MASK32)
    return largest, values.gather(-1, largest)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four counter words under two key words: four words; int64 tensors of 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2^64, so it has all bits of the unsigned product.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, p1 & _MASK32, ((p0 >> 32) & _MASK32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return c0, c1, c2, c3


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """int64 keys [n] (64 bits), int64 positions [n] below 2^32 -> float64 [n, V] of standard Gumbel noise.

    The bits are the same on every device; on CUDA one kernel computes them, instead of 200 passes over [n, V].
    """
    if keys.is_cuda:
        from evalengine.kernels import gumbel  # Triton comes with torch's CUDA builds, not with its CPU builds.

        return gumbel.gumbel_noise(keys, positions, vocab_size)
    return _gumbel_noise_in_torch(keys, positions, vocab_size)


def _gumbel_noise_in_torch(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    ids = torch.arange(vocab_size, device=keys.device)[None, :].expand(len(keys), -1)
    where = positions[:, None].expand_as(ids)
    key = ((keys & _MASK32)[:, None], ((keys >> 32) & _MASK32)[:, None])
    zero = torch.zeros_like(ids)
    bits = philox((ids, where, zero, zero), key)[0]
    uniform = (bits.double() + 0.5) * 2.0**-32  # in (0, 1), exact
    inner = exact_math.log(uniform).neg_()
    return exact_math.log(inner).neg_()


def sample(
    logprobs: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, positions: Tensor
) -> Tensor:
    """float32 [n, V]; float64 [n] > 0; int64 [n] (0: off); float64 [n]; int64 keys and positions [n] -> int64 [n].

    Temperature is applied first, then top-k, then top-p (the smallest set of most probable tokens whose mass reaches
    top_p; a token is in if the mass before it is less), then arg max of scaled logprob + noise.

    Temperatures, top-k and top-p are read on the host: given as CPU tensors they cost CUDA no synchronisation.
    """
    device = logprobs.device
    inverse = torch.tensor([1.0 / t for t in temperatures.tolist()], dtype=torch.float64)
    scaled = logprobs.double() * to_device(inverse, device)[:, None]
    keys, positions = (x if x.is_cuda else to_device(x, device) for x in (keys, positions))
    noise = gumbel_noise(keys, positions, scaled.shape[-1])
    top_k, top_p = top_k.cpu(), top_p.cpu()
    if not ((top_k != 0) | (top_p < 1.0)).any():
        return argmax_lowest(scaled.add_(noise))  # Every token remains, so nothing must be sorted.
    top_k, top_p = (to_device(x, device)[:, None] for x in (top_k, top_p))
    order = scaled.sort(dim=-1, descending=True, stable=True)  # stable: equals stay in id order
    rank = torch.arange(scaled.shape[-1], device=device)[None, :]
    keep = (rank < top_k) | (top_k == 0)
    shifted = order.values - order.values[:, :1]
    mass = (exact_math.exp(shifted) * 2.0**_FIXED_POINT_BITS).round().to(torch.int64)
    mass = torch.where(keep, mass, 0)
    before = mass.cumsum(dim=-1) - mass
    limit = mass.sum(dim=-1, keepdim=True).double() * top_p
    keep &= (before.double() < limit) | (top_p >= 1.0)
    noisy = torch.where(keep, order.values + noise.gather(-1, order.indices), float("-inf"))
    best = noisy.amax(dim=-1, keepdim=True)
    return torch.where(noisy == best, order.indices, scaled.shape[-1]).amin(dim=-1)
