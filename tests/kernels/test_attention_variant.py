"""A variant of attention: what it refuses, what it is called, and the reference's float64 arithmetic of it."""

from __future__ import annotations

import math

import pytest
import torch

from evalengine.kernels.attention_variant import AttentionVariant
from tests.references import reference


@pytest.mark.parametrize(
    "wrong",
    [
        *({"scale": scale} for scale in (0.0, -1.0, math.inf, math.nan)),
        *({"scale": 1.0, "softcap": cap} for cap in (0.0, -30.0, math.inf)),
        *({"scale": 1.0, "window": window} for window in (0, -1)),
    ],
)
def test_what_no_attention_computes_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"attention's (scale|softcap|window) must be"):
        AttentionVariant(**wrong)


def test_a_variant_is_named_by_what_differs_from_plain_attention() -> None:
    assert str(AttentionVariant(0.1)) == ""
    assert str(AttentionVariant(0.1, window=4096, softcap=50.0)) == "window 4096, softcap 50.0"
    assert str(AttentionVariant(0.1, sinks=True)) == "sinks"


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_is_the_definition(window: int | None, softcap: float | None, sinks: bool) -> None:
    """Every row is written out by Python's own math: which keys it sees, the cap, and the logit without a value."""
    torch.manual_seed(0)
    q, keys, values = torch.randn(4, 2, 3), torch.randn(1, 7, 1, 3), torch.randn(1, 7, 1, 3)
    logits = torch.tensor([0.5, -1.0])
    variant = AttentionVariant(0.7, window, softcap, sinks)
    out = reference.paged_attention(
        q, keys, values, torch.zeros(1, 1, dtype=torch.int32), [4], [7], variant, logits if sinks else None
    )
    for row in range(4):
        for head in range(2):
            place, total, sums = 3 + row, math.exp(logits[head].item()) if sinks else 0.0, [0.0] * 3
            for key in range(7):
                if key > place or (window is not None and key <= place - window):
                    continue
                score = 0.7 * sum(a * b for a, b in zip(q[row, head].tolist(), keys[0, key, 0].tolist(), strict=True))
                weight = math.exp(score if softcap is None else softcap * math.tanh(score / softcap))
                total += weight
                sums = [x + weight * v for x, v in zip(sums, values[0, key, 0].tolist(), strict=True)]
            expected = torch.tensor([x / total for x in sums], dtype=torch.float64)
            torch.testing.assert_close(out[row, head], expected, rtol=1e-12, atol=1e-12)
