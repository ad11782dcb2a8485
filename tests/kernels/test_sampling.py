"""Sampling takes the float64 reference's tokens, whatever lies beside a row; noise, ties, top-k and top-p.

The CUDA kernel for the noise is tested in `test_gumbel.py`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from evalengine.kernels import sampling
from tests.bitwise import assert_bitwise_equal
from tests.references import reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# The known answers published with Random123 (kat_vectors, philox4x32 10), as (counter, key, result).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(w, 16)], device=device) for w in text.split())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected, device):
    result = sampling.philox(words(counter, device), words(key, device))
    assert " ".join(f"{w.item():08x}" for w in result) == expected
    truth = reference.philox(*(tuple(int(w, 16) for w in text.split()) for text in (counter, key)))
    assert " ".join(f"{w:08x}" for w in truth) == expected


@pytest.fixture(params=DEVICES)
def device(request):
    """The device that holds the logprobs and samples."""
    return request.param


def draw(logprobs, temperature=1.0, top_k=0, top_p=1.0, keys=None, positions=None):
    n = len(logprobs)
    return sampling.sample(
        logprobs,
        torch.full((n,), temperature, dtype=torch.float64),
        torch.full((n,), top_k),
        torch.full((n,), top_p, dtype=torch.float64),
        torch.arange(n, device=logprobs.device) if keys is None else keys,
        torch.zeros(n, dtype=torch.int64, device=logprobs.device) if positions is None else positions,
    )


def test_samples_follow_the_distribution(device):
    """20,000 samples have the probabilities' shares, within four standard deviations."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device)
    n = 20000
    counts = torch.bincount(draw(p.log().expand(n, -1)), minlength=4) / n
    assert (counts - p).abs().max() < 4 * math.sqrt(0.25 / n)


def test_temperature_sharpens(device):
    """Tokens' shares follow the softmax of the logprobs divided by the temperature."""
    p = torch.tensor([0.6, 0.4], device=device).log()
    for temperature in (0.25, 4.0):
        share = draw(p.expand(5000, -1), temperature=temperature).eq(0).double().mean()
        assert abs(share - reference.softmax(p / temperature)[0]) < 0.03


def random_rows(rows, vocab):
    """Returns random float32 logprobs [rows, vocab], int64 keys [rows] and positions [rows], on the CPU."""
    generator = torch.Generator().manual_seed(rows)
    logprobs = torch.randn(rows, vocab, generator=generator).log_softmax(-1)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return logprobs, keys, torch.randint(0, 5000, (rows,), generator=generator)


def every_setting(device):
    """Returns float64 temperatures, int64 top-k and float64 top-p, each [100]: every combination of a few values."""
    grid = itertools.product((0.1, 0.7, 1.0, 1.3, 4.0), (0, 1, 7, 50, 400), (0.05, 0.5, 0.9, 1.0))
    temperatures, top_k, top_p = torch.tensor(list(grid), dtype=torch.float64, device=device).unbind(1)
    return temperatures, top_k.long(), top_p


def test_tokens_of_the_float64_truth(device):
    """One batch of all settings gives the reference's tokens; coarse logprobs make ties at the edge of top-k."""
    settings = every_setting(device)
    logprobs, keys, positions = (x.to(device) for x in random_rows(100, 211))
    logprobs = (logprobs * 4).round() / 4
    noise = reference.gumbel_noise(keys, positions, 211)
    truth = reference.sample(logprobs, *settings, noise)
    assert torch.equal(sampling.sample(logprobs, *settings, keys, positions), truth)
    assert truth.unique().numel() > 30
    no_top_k, no_top_p = torch.zeros_like(settings[1]), torch.ones_like(settings[2])
    others = [(settings[0], no_top_k, settings[2]), (*settings[:2], no_top_p), (1 / settings[0], *settings[1:])]
    for other in others:  # every setting changes some token, so that equality can fail for each
        assert not torch.equal(reference.sample(logprobs, *other, noise), truth)
    highest_first = reference.sample(logprobs.flip(1), *settings, noise.flip(1))
    assert not torch.equal(210 - highest_first, truth)  # ties that go to the highest id differ, too


def test_a_row_does_not_depend_on_its_neighbours_or_slot(device):
    logprobs, keys, positions = (x.to(device) for x in random_rows(45, 1009))  # one engine changes its kernel at 44
    together = draw(logprobs, 0.7, 50, 0.9, keys, positions)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(draw(logprobs[order], 0.7, 50, 0.9, keys[order], positions[order]), together[order])
    alone = torch.cat(
        [draw(logprobs[i : i + 1], 0.7, 50, 0.9, keys[i : i + 1], positions[i : i + 1]) for i in range(45)]
    )
    assert torch.equal(alone, together)


@pytest.mark.parametrize("vocab", [1, 1009, 49152])
def test_no_filter_takes_the_same_token_without_a_sort(device, vocab):
    """A top-k of the whole vocabulary sorts, and 0 does not; the token does not depend on whether a batch sorts."""
    logprobs, keys, positions = (x.to(device) for x in random_rows(7, vocab))
    logprobs[2, vocab // 2] = torch.nan
    unsorted = draw(logprobs, 0.7, 0, 1.0, keys, positions)
    assert torch.equal(unsorted, draw(logprobs, 0.7, vocab, 1.0, keys, positions))
    assert unsorted[2] == vocab
    assert vocab == 1 or not torch.equal(unsorted, draw(logprobs, 0.7, 1, 1.0, keys, positions))


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)])
def test_cuda_takes_the_cpus_tokens(top_k, top_p):
    """From equal logprobs CUDA takes the CPU's tokens, as noise, exp and the masses have the same bits."""
    logprobs, keys, positions = random_rows(45, 49152)
    noise = sampling.gumbel_noise(keys, positions, 49152)
    assert_bitwise_equal(sampling.gumbel_noise(keys.cuda(), positions.cuda(), 49152), noise)
    there = draw(logprobs.cuda(), 0.7, top_k, top_p, keys.cuda(), positions.cuda())
    assert torch.equal(there.cpu(), draw(logprobs, 0.7, top_k, top_p, keys, positions))


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 50])
def test_settings_on_the_host_cost_no_synchronisation(top_k):
    logprobs, keys, positions = (x.cuda() for x in random_rows(45, 1009))
    draw(logprobs, 0.7, top_k, 0.9 if top_k else 1.0, keys, positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw(logprobs, 0.7, top_k, 0.9 if top_k else 1.0, keys, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_key_and_position_change_the_sample(device):
    """Equal keys and positions give equal tokens; another key, or another position, gives others."""
    logprobs = torch.zeros(1, 1009, device=device).expand(64, -1).log_softmax(-1)
    zero, distinct = torch.zeros(64, dtype=torch.int64, device=device), torch.arange(64, device=device)
    assert draw(logprobs, keys=zero).unique().numel() == 1
    assert draw(logprobs, keys=distinct << 32).unique().numel() > 50  # the key's high word has an effect, too
    assert draw(logprobs, keys=zero, positions=distinct).unique().numel() > 50


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, [1]),
        (2, 1.0, [1, 3]),
        (0, 0.4, [1]),  # a mass of 0.4 reaches 0.4
        (0, 0.41, [1, 3]),
        (0, 1.0, [1, 3, 2, 0]),
        (3, 0.5, [1, 3]),  # top-p applies to what top-k left: masses 0.44 and 0.78
    ],
)
def test_top_k_and_top_p_keep_what_they_should(top_k, top_p, kept, device):
    p = torch.tensor([0.1, 0.4, 0.2, 0.3], device=device).log()
    assert reference.kept_tokens(p, 1.0, top_k, top_p).tolist() == kept
    assert set(draw(p.expand(2000, -1), top_k=top_k, top_p=top_p).tolist()) == set(kept)


@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p"),
    [(7, 3, 1.0), (7, 0, 0.4), (8, 0, 0.375)],  # 2/7 does not reach 0.4, 3/7 does; 3/8 reaches 0.375
)
def test_ties_go_to_the_lowest_id(vocab, top_k, top_p, device):
    p = torch.zeros(vocab, device=device).log_softmax(-1)
    assert reference.kept_tokens(p, 1.0, top_k, top_p).tolist() == [0, 1, 2]
    assert set(draw(p.expand(2000, -1), top_k=top_k, top_p=top_p).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [1, 2, 31, 1009, 49152])
def test_argmax_takes_the_lowest_of_equals(vocab, device):
    values = torch.zeros(3, vocab, device=device)
    assert sampling.argmax_lowest(values).tolist() == [0, 0, 0]
    values[1, vocab // 2 :] = 1.0
    assert sampling.argmax_lowest(values)[1] == (vocab // 2 if vocab > 1 else 0)


def test_argmax_of_nan_is_out_of_range(device):
    assert sampling.argmax_lowest(torch.tensor([[0.0, float("nan"), 1.0]], device=device)).tolist() == [3]
    assert sampling.argmax_lowest(torch.empty(0, 5, device=device)).tolist() == []


@pytest.mark.parametrize("vocab", [1, 2, 129, 1009])
@pytest.mark.parametrize("device", DEVICES)
def test_top_is_a_stable_sort(vocab, device):
    """`top` orders as a stable sort does, among many ties, both zeros and infinities, and beside a row with NaN."""
    torch.manual_seed(vocab)
    values = torch.randint(-3, 2, (7, vocab)).float() / 3
    values[0, vocab // 2], values[1, 0], values[2] = float("-inf"), -0.0, -torch.rand(vocab) * 90
    values[3, : vocab // 2] = 0.0
    values[4], values[5, vocab - 1] = float("-inf"), float("nan")
    rows = torch.tensor([0, 1, 2, 3, 4, 6])
    expected = values[rows].sort(descending=True, stable=True, dim=-1)
    for k in {1, min(2, vocab), min(20, vocab), vocab}:
        ids, best = (x.cpu()[rows] for x in sampling.top(values.to(device), k))
        assert torch.equal(ids, expected.indices[:, :k]) and torch.equal(best, expected.values[:, :k])
