"""The noise kernel has the bits of the noise in torch ops, and is close to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import gumbel, sampling
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(n: int) -> tuple[Tensor, Tensor]:
    """Returns n random 64-bit keys and n positions; the largest key and the largest position are among them."""
    generator = torch.Generator().manual_seed(n)
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    positions = torch.randint(0, 2**20, (n,), generator=generator)
    keys[:1], positions[-1:] = -1, 2**31 - 1
    return keys, positions


@pytest.mark.parametrize(("n", "vocab"), [(0, 7), (3, 0), (1, 1), (2, 511), (5, 513), (3, 4099)])
def test_bits_of_the_torch_ops(n: int, vocab: int) -> None:
    """The kernel's noise has the bytes of `sampling.gumbel_noise`, which is made of torch ops."""
    keys, positions = rows(n)
    noise = gumbel.gumbel_noise(keys.to(DEVICE), positions.to(DEVICE), vocab)
    assert_bitwise_equal(noise, sampling.gumbel_noise(keys, positions, vocab))


def test_against_float64() -> None:
    """The noise is within 1e-14 of float64, and that of another position is not."""
    keys, positions = (x.to(DEVICE) for x in rows(5))
    truth = reference.gumbel_noise(keys, positions, 513)
    error = (gumbel.gumbel_noise(keys, positions, 513) - truth).abs()
    assert (error <= 1e-14 * (1 + truth.abs())).all()
    assert (reference.gumbel_noise(keys, positions ^ 1, 513) - truth).abs().min() > 1e-14  # another position's noise


def test_noise_is_gumbels() -> None:
    """The noise has the Gumbel distribution's mean and variance, and two keys' noise does not correlate."""
    keys, positions = (x.to(DEVICE) for x in rows(2))
    noise = gumbel.gumbel_noise(keys, positions, 20011)
    assert (noise.mean(1) - 0.5772).abs().max() < 0.04 and (noise.var(1) - 1.6449).abs().max() < 0.1
    assert (torch.corrcoef(noise)[0, 1]).abs() < 0.03


def test_a_token_depends_on_its_key_position_and_id_alone() -> None:
    keys, positions = (x.to(DEVICE) for x in rows(3))
    noise = gumbel.gumbel_noise(keys, positions, 1009)
    assert_bitwise_equal(gumbel.gumbel_noise(keys[1:2], positions[1:2], 77), noise[1:2, :77])
    assert count_differing(gumbel.gumbel_noise(keys ^ (1 << 63), positions, 1009), noise) > 3000
    assert count_differing(gumbel.gumbel_noise(keys, positions ^ 1, 1009), noise) > 3000
